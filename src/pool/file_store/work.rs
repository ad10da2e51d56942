//! The threads of a store.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::base::mark_own_thread;
use crate::cache::PageHash;
use crate::transfer::{AlignedBytes, Disk, DiskFile, read_whole, write_whole};

use super::batch::PageWork;
use super::layout::{ENTRY_BYTES, FileSlot, Record, entry_offset, page_offset, page_sum};
use super::opening::clear_entries;
use super::{DiskUser, StoreCore, StoreState};

/// A thread that takes pages from the queues, those to read first, until the store closes and the queues are
/// empty.
pub(super) struct Worker {
    shared: Arc<StoreCore>,
    disk: DiskUser,
    bytes: AlignedBytes,
}

enum Job {
    Get(PageWork),
    /// To a slot, if there is one for the page.
    Put(PageWork, Option<FileSlot>),
}

impl Worker {
    pub(super) fn new(shared: &Arc<StoreCore>, bytes: AlignedBytes) -> Self {
        Self { shared: Arc::clone(shared), disk: DiskUser::new(shared, shared.state()), bytes }
    }

    pub(super) fn run(mut self) {
        mark_own_thread();
        while let Some(job) = self.next() {
            let work = AssertUnwindSafe(|| match job {
                Job::Get(work) => self.get(work),
                Job::Put(work, slot) => self.put(work, slot),
            });
            if catch_unwind(work).is_err() {
                let panicked = io::Error::other("a thread panicked");
                self.shared.state().record_failure(&self.shared.name, "go on with a page", &panicked);
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.shared.state();
        loop {
            if let Some(work) = state.gets.pop_front() {
                return Some(Job::Get(work));
            }
            if let Some(work) = state.puts.pop_front() {
                // In the order of the queue: of a prompt that does not fit, the beginning gets the slots.
                let tick = state.pending_tick(&work);
                let slot = state.slots.take(tick);
                return Some(Job::Put(work, slot));
            }
            if state.is_closing {
                return None;
            }
            state = state.wait(&self.shared.changed);
        }
    }

    fn get(&mut self, mut work: PageWork) {
        if work.batch.transfer.is_cancelled() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let Some((held, record)) = HeldSlot::find(&shared, work.key()) else { return };
        let offset = page_offset(held.slot, shared.slot_bytes);
        let read = read_whole(self.disk.files(), DiskFile::Pages, self.bytes.as_mut_slice(), offset);
        let page = &self.bytes.as_mut_slice()[..shared.config.page_bytes];
        let is_right = read.is_ok() && page_sum(shared.config.digest, &record.key, page) == record.sum;
        let is_entry_changed = if is_right {
            let row = &mut work.row;
            row.write(&page[..row.bytes()]);
            work.is_present = true;
            self.count_hit(&held)
        } else {
            self.count_miss(&held, &record, read.err())
        };
        if is_entry_changed && shared.state().slots.is_removed(held.slot) {
            shared.forget(self.disk.files(), &[held.slot]);
        }
    }

    /// Counts a page that was read. If its entry is long out of date, also writes the entry, so that a later
    /// process knows of this use. Returns whether the entry was written, perhaps in part; if that fails, the old
    /// one stays valid.
    fn count_hit(&self, held: &HeldSlot<'_>) -> bool {
        let shared = &self.shared;
        let stale = {
            let mut state = shared.state();
            state.counts.hits += 1;
            state.counts.read_bytes += shared.config.page_bytes;
            state.slots.stale_record(held.slot)
        };
        let Some(record) = stale else { return false };
        let entry = record.encode(shared.config.digest, held.slot);
        if let Err(cause) = write_whole(self.disk.files(), DiskFile::Index, &entry, entry_offset(held.slot)) {
            shared.state().record_failure(&shared.name, "renew an entry", &cause);
        }
        true
    }

    /// Counts a page that could not be read or is damaged, and removes it: it will be computed again and
    /// stored elsewhere. Returns whether it is damaged, so that its entry has to be cleared, too. After a
    /// failed read the entry stays, as a later process may succeed.
    fn count_miss(&self, held: &HeldSlot<'_>, record: &Record, failed: Option<io::Error>) -> bool {
        let mut state = self.shared.state();
        state.counts.misses += 1;
        let failed = failed.filter(|cause| cause.kind() != io::ErrorKind::UnexpectedEof);
        match &failed {
            Some(cause) => state.record_failure(&self.shared.name, "read a page", cause),
            None => state.record_damage(&self.shared.name, &record.key),
        }
        if state.slots.record(held.slot).key == record.key && !state.slots.is_removed(held.slot) {
            state.slots.remove(&record.key);
            state.slots.release(held.slot);
        }
        failed.is_none()
    }

    fn put(&mut self, mut work: PageWork, slot: Option<FileSlot>) {
        let shared = Arc::clone(&self.shared);
        let taken = slot.map(|slot| Taken { shared: &shared, slot, is_stored: false });
        let pending = PendingPut { shared: &shared, work: &mut work };
        let is_cancelled = pending.work.batch.transfer.is_cancelled();
        let Some(mut taken) = taken.filter(|_| !is_cancelled) else {
            shared.state().counts.dropped += 1;
            return;
        };
        let (batch, at) = (Arc::clone(&pending.work.batch), pending.work.page);
        let (bytes, rest) = self.bytes.as_mut_slice().split_at_mut(pending.work.row.bytes());
        pending.work.row.read(bytes);
        rest.fill(0);
        let page = &self.bytes.as_mut_slice()[..shared.config.page_bytes];
        let key = batch.keys[at];
        let sum = page_sum(shared.config.digest, &key, page);
        let mut may_retry = true;
        loop {
            let record = Record { key, sum, tick: shared.state().pending_tick(pending.work) };
            let bytes = self.bytes.as_mut_slice();
            match write_page(self.disk.files(), bytes, taken.slot, &record, &shared) {
                Ok(()) => {
                    let mut state = shared.state();
                    let tick = state.pending_tick(pending.work);
                    let before = at.checked_sub(1).map(|before| &batch.keys[before]);
                    state.slots.store(taken.slot, record, tick, before);
                    state.counts.written_bytes += shared.config.page_bytes;
                    taken.is_stored = true;
                    drop(state);
                    pending.work.is_present = true;
                    return;
                }
                Err(cause) if is_full(cause.kind()) => {
                    // The place of an evicted page has space for this one.
                    drop(taken);
                    let mut state = shared.state();
                    state.record_full(&shared.name, &cause);
                    let slot = if may_retry { state.slots.take(record.tick) } else { None };
                    let Some(slot) = slot else {
                        state.counts.dropped += 1;
                        return;
                    };
                    drop(state);
                    taken = Taken { shared: &shared, slot, is_stored: false };
                    may_retry = false;
                }
                Err(cause) => {
                    drop(taken);
                    shared.state().record_failure(&shared.name, "write a page", &cause);
                    return;
                }
            }
        }
    }
}

impl StoreState {
    /// Returns the tick of a page that is being put.
    fn pending_tick(&self, work: &PageWork) -> u64 {
        self.pending[work.key()]
    }
}

/// Returns whether the system has no space for more bytes, of all files, those of a user, or one.
fn is_full(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(kind, StorageFull | QuotaExceeded | FileTooLarge)
}

/// Writes a page to its slot. The entry of the previous page is cleared first, and the entry of the new page
/// is written last.
fn write_page(
    disk: &dyn Disk,
    bytes: &[u8],
    slot: FileSlot,
    record: &Record,
    shared: &StoreCore,
) -> io::Result<()> {
    if !disk.is_reachable()? {
        return Err(io::Error::new(io::ErrorKind::NotFound, "its files were removed"));
    }
    write_whole(disk, DiskFile::Index, &[0; ENTRY_BYTES], entry_offset(slot))?;
    write_whole(disk, DiskFile::Pages, bytes, page_offset(slot, shared.slot_bytes))?;
    write_whole(disk, DiskFile::Index, &record.encode(shared.config.digest, slot), entry_offset(slot))
}

/// A page that is being put. It may be put again when this drops.
struct PendingPut<'a> {
    shared: &'a StoreCore,
    work: &'a mut PageWork,
}

impl Drop for PendingPut<'_> {
    fn drop(&mut self) {
        self.shared.state().pending.remove(self.work.key());
    }
}

/// The slot of a page that is read. Dropping it ends the hold.
struct HeldSlot<'a> {
    shared: &'a StoreCore,
    slot: FileSlot,
}

impl<'a> HeldSlot<'a> {
    /// Holds the slot of the page `key`, and returns its record. Counts a miss if the page was evicted since it
    /// was found.
    fn find(shared: &'a StoreCore, key: &PageHash) -> Option<(Self, Record)> {
        let mut state = shared.state();
        let Some(slot) = state.slots.find(key) else {
            state.counts.misses += 1;
            return None;
        };
        state.slots.hold(slot);
        let record = *state.slots.record(slot);
        drop(state);
        Some((Self { shared, slot }, record))
    }
}

impl Drop for HeldSlot<'_> {
    fn drop(&mut self) {
        self.shared.state().slots.release(self.slot);
    }
}

/// A slot that was taken. It is given up when this drops, unless a page was stored there.
struct Taken<'a> {
    shared: &'a StoreCore,
    slot: FileSlot,
    is_stored: bool,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if !self.is_stored {
            self.shared.state().slots.give_up(self.slot);
        }
    }
}

impl StoreCore {
    /// Clears the entries of removed pages in the index.
    pub(super) fn forget(&self, disk: &dyn Disk, slots: &[FileSlot]) {
        if let Err(cause) = clear_entries(disk, slots) {
            self.state().record_failure(&self.name, "clear an entry", &cause);
        }
    }
}
