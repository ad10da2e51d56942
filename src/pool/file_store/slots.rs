//! The slot of each page, and the order of eviction. Contains no page contents and accesses no files.

use std::collections::{HashMap, VecDeque};

use crate::base::{Id, check_memory, out_of_memory_error, try_push, widen};
use crate::cache::{PageHash, RecencyList};
use crate::transfer::to_u64;

use super::layout::{FileSlot, Record};

/// The most slots of a store.
pub(super) const MAX_SLOTS: usize = 0xffff_fff0;

/// Pages that are stored before a disk that was full is tried with one more.
const PROBE: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// No page, and free to take.
    Free,
    /// A page is being written.
    Written,
    /// A page that can be found.
    Stored,
    /// A removed page, which is still held.
    Removed,
}

#[derive(Debug)]
struct SlotUse {
    record: Record,
    /// The tick in the index, which may be older.
    written_tick: u64,
    /// Threads that use the slot.
    holders: u32,
    usage: Use,
}

impl SlotUse {
    const FREE: Self = Self {
        record: Record { key: [0; 32], sum: [0; 16], tick: 0 },
        written_tick: 0,
        holders: 0,
        usage: Use::Free,
    };
}

/// The slots of a store.
///
/// Pages that can be found are in a list by their last use. A slot is taken for a page, which then is stored
/// or given up. Slots that are held are not taken.
#[derive(Debug)]
pub(super) struct Slots {
    /// The slots that were ever used, at most `count`.
    slot_uses: Vec<SlotUse>,
    count: usize,
    /// The largest number of slots in use: `count`, or fewer while the disk is full.
    limit: usize,
    stored_since_full: usize,
    by_key: HashMap<PageHash, FileSlot>,
    written: usize,
    /// Free slots that were used before, so that the disk has space for them. The last one is taken first.
    free: VecDeque<FileSlot>,
    /// The pages that can be found.
    order: RecencyList<FileSlot>,
    next_tick: u64,
    evicted: usize,
}

impl Slots {
    pub(super) fn new(count: usize) -> Self {
        Self {
            slot_uses: Vec::new(),
            count,
            limit: count,
            stored_since_full: 0,
            by_key: HashMap::new(),
            written: 0,
            free: VecDeque::new(),
            order: RecencyList::default(),
            next_tick: 1,
            evicted: 0,
        }
    }

    /// Returns the number of pages that can be found.
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(super) const fn count(&self) -> usize {
        self.count
    }

    pub(super) const fn evicted(&self) -> usize {
        self.evicted
    }

    /// Returns the slot of a page that can be found.
    pub(super) fn find(&self, key: &PageHash) -> Option<FileSlot> {
        self.by_key.get(key).copied()
    }

    pub(super) fn record(&self, slot: FileSlot) -> &Record {
        &self.slot_use(slot).record
    }

    /// Returns every page that can be found.
    pub(super) fn keys(&self) -> Vec<PageHash> {
        self.by_key.keys().copied().collect()
    }

    fn slot_use(&self, slot: FileSlot) -> &SlotUse {
        &self.slot_uses[widen(slot.number())]
    }

    fn slot_use_mut(&mut self, slot: FileSlot) -> &mut SlotUse {
        &mut self.slot_uses[widen(slot.number())]
    }

    /// Ticks for `count` pages that follow each other, the first one the latest. Returns that of the last
    /// one.
    pub(super) fn take_ticks(&mut self, count: usize) -> u64 {
        let first = self.next_tick;
        self.next_tick += to_u64(count);
        first
    }

    /// Records a use of the pages, which follow each other: the first one is evicted last.
    pub(super) fn touch(&mut self, slots: &[FileSlot]) {
        for &slot in slots.iter().rev() {
            let tick = self.take_ticks(1);
            self.slot_use_mut(slot).record.tick = tick;
            self.order.touch(slot);
        }
    }

    /// Returns the record to write to the index, if the one in the index is much older.
    pub(super) fn stale_record(&mut self, slot: FileSlot) -> Option<Record> {
        let lag = self.next_tick - self.slot_use(slot).written_tick;
        let slot_use = &mut self.slot_uses[widen(slot.number())];
        let is_stale = slot_use.usage == Use::Stored && lag > to_u64(self.count / 8);
        if is_stale {
            slot_use.written_tick = slot_use.record.tick;
        }
        is_stale.then_some(slot_use.record)
    }

    /// Holds the slot of a page.
    pub(super) fn hold(&mut self, slot: FileSlot) {
        self.slot_use_mut(slot).holders += 1;
    }

    /// Returns whether a page that is held was removed.
    pub(super) fn is_removed(&self, slot: FileSlot) -> bool {
        self.slot_use(slot).usage == Use::Removed
    }

    /// Ends a hold. The slot of a removed page is free when the last one has ended.
    pub(super) fn release(&mut self, slot: FileSlot) {
        let slot_use = self.slot_use_mut(slot);
        slot_use.holders -= 1;
        if slot_use.holders == 0 && slot_use.usage == Use::Removed {
            slot_use.usage = Use::Free;
            self.free.push_back(slot);
        }
    }

    /// Takes a slot for a page: a free one, or that of the page used least recently. `None` if all are held.
    pub(super) fn take(&mut self) -> Option<FileSlot> {
        let slot = if self.len() + self.written < self.limit { self.take_free() } else { None };
        let slot = slot.or_else(|| self.evict())?;
        self.slot_use_mut(slot).usage = Use::Written;
        self.written += 1;
        Some(slot)
    }

    fn take_free(&mut self) -> Option<FileSlot> {
        if let Some(slot) = self.free.pop_back() {
            return Some(slot);
        }
        let fresh = self.slot_uses.len();
        if fresh >= self.count {
            return None;
        }
        try_push(&mut self.slot_uses, SlotUse::FREE).ok()?;
        Some(FileSlot::new(u32::try_from(fresh).expect("MAX_SLOTS was checked")))
    }

    /// Evicts the page used least recently of those that are not held. The caller takes its slot.
    fn evict(&mut self) -> Option<FileSlot> {
        let slot = self.order.iter_oldest().find(|&slot| self.slot_use(slot).holders == 0)?;
        let key = self.slot_use(slot).record.key;
        self.by_key.remove(&key);
        self.order.remove(slot);
        self.evicted += 1;
        Some(slot)
    }

    /// Makes the page in a taken slot one that can be found: next to the page `before` it, or else as the
    /// last used.
    pub(super) fn store(&mut self, slot: FileSlot, record: Record, before: Option<&PageHash>) {
        let newer = before.and_then(|key| self.find(key));
        let slot_use = self.slot_use_mut(slot);
        debug_assert_eq!(slot_use.usage, Use::Written, "{slot:?} was not taken");
        slot_use.record = record;
        slot_use.written_tick = record.tick;
        slot_use.usage = Use::Stored;
        self.written -= 1;
        self.order.insert_older_than(slot, newer);
        self.by_key.insert(record.key, slot);
        self.stored_since_full += 1;
        if self.limit < self.count && self.stored_since_full.is_multiple_of(PROBE) {
            self.limit += 1;
        }
    }

    /// Gives up a taken slot. It is taken again after all others, as its place on the disk may be bad.
    pub(super) fn give_up(&mut self, slot: FileSlot) {
        self.slot_use_mut(slot).usage = Use::Free;
        self.written -= 1;
        self.free.push_front(slot);
    }

    /// Records that the disk has no space for more pages than it has now. From then on others are evicted for
    /// a new one.
    pub(super) fn record_full(&mut self) {
        self.limit = (self.len() + self.written).min(self.count).max(1);
        self.stored_since_full = 0;
    }

    /// Removes a page. Its slot is held for the caller, who clears its entry and releases it.
    pub(super) fn remove(&mut self, key: &PageHash) -> Option<FileSlot> {
        let slot = self.by_key.remove(key)?;
        self.order.remove(slot);
        let slot_use = self.slot_use_mut(slot);
        slot_use.usage = Use::Removed;
        slot_use.holders += 1;
        Some(slot)
    }

    /// Fills the slots with the pages of an index, by ascending tick. Slots are below `count`, and each
    /// occurs once.
    pub(super) fn fill(&mut self, pages: &[(FileSlot, Record)]) -> crate::base::Result<()> {
        let end = pages.iter().map(|(slot, _)| widen(slot.number()) + 1).max().unwrap_or(0);
        self.free.try_reserve(end).map_err(|_| out_of_memory_error::<FileSlot>(end))?;
        self.by_key.try_reserve(pages.len()).map_err(|_| out_of_memory_error::<PageHash>(pages.len()))?;
        // The order of the pages grows by one link for each slot.
        check_memory(2 * end * size_of::<u64>())?;
        for slot in 0..end {
            try_push(&mut self.slot_uses, SlotUse::FREE)?;
            self.free.push_front(FileSlot::new(u32::try_from(slot).expect("MAX_SLOTS was checked")));
        }
        for &(slot, record) in pages {
            self.slot_use_mut(slot).usage = Use::Written;
            self.written += 1;
            self.store(slot, record, None);
            self.next_tick = record.tick + 1;
        }
        let slot_uses = &self.slot_uses;
        self.free.retain(|&slot| slot_uses[widen(slot.number())].usage == Use::Free);
        Ok(())
    }

    /// Returns a description of the first broken invariant.
    pub(super) fn broken_invariant(&self) -> Option<String> {
        let mut seen = 0;
        for slot in self.order.iter_oldest() {
            let slot_use = self.slot_use(slot);
            if slot_use.usage != Use::Stored || self.find(&slot_use.record.key) != Some(slot) {
                return Some(format!("{slot:?} is out of order: {slot_use:?}"));
            }
            seen += 1;
        }
        let of = |usage| self.slot_uses.iter().filter(|slot_use| slot_use.usage == usage).count();
        let counted = [of(Use::Stored), of(Use::Written), of(Use::Free)];
        let known = [seen, self.written, self.free.len()];
        if counted != known || seen != self.len() || self.slot_uses.len() > self.count {
            return Some(format!("{counted:?} pages are stored, written and free, {known:?} are known"));
        }
        None
    }
}
