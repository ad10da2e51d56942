//! Pages in files, which survive the process.

mod batch;
mod layout;
mod opening;
mod recency;
mod slots;
mod work;
mod worth;

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::sync::{Condvar, thread};
use crate::base::{Error, ErrorKind, KeyMap, Result, check_memory, try_collect, try_collect_each};
use crate::cache::{Digest, PageHash, PolicyKind, hex};
use crate::memory::HostRows;
use crate::transfer::{AlignedBytes, BLOCK, Disk, FileCaching, Folder};

use batch::{Batch, PageWork};
use layout::FileSlot;
use opening::Opening;
use recency::Ticks;
use slots::{MAX_SLOTS, Slots};
use work::Worker;

pub use recency::PutAfter;

use super::{Stats, Store, StoreTransfer, at_least_one};

/// Bytes of bookkeeping for each page of a call.
const BOOKKEEPING: usize = 256;

/// The shape of a [`FileStore`].
#[derive(Clone, Copy, Debug)]
pub struct FileStoreConfig {
    /// Bytes of all pages, each rounded up to [`BLOCK`]. The index takes 64 bytes more for each.
    pub capacity_bytes: usize,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Threads that read and write.
    pub threads: usize,
    /// Bytes of pages that wait to be written. Further ones are dropped.
    pub queue_bytes: usize,
    /// Which prompt loses its last page.
    pub policy: PolicyKind,
    /// The hash of checksums. A store is opened with the one that it was made with.
    pub digest: Digest,
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStore")
            .field("path", &self.name())
            .field("capacity_bytes", &self.config().capacity_bytes)
            .field("page_bytes", &self.config().page_bytes)
            .finish_non_exhaustive()
    }
}

/// Pages by their keys in two files, which survive the end of the process, even if it is killed at any
/// moment.
///
/// A page that is found has the bytes that were put under its key; a checksum covers both. Pages that a
/// killed process has not completed are missing. The pages that are worth least by the policy, or were used least
/// recently, are evicted first and, of the pages of a prompt, the last ones: those of one call follow each other,
/// and [`PutAfter`] tells what comes before them.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use kvpool::base::DType;
/// use kvpool::cache::PolicyKind;
/// use kvpool::memory::{Host, HostRows, Region};
/// use kvpool::tensor::TensorView;
/// use kvpool::transfer::FileCaching;
/// use kvpool::pool::{FileStore, FileStoreConfig, PutAfter};
///
/// fn digest(parts: &[&[u8]]) -> [u8; 32] {
///     let mix = |sum: u64, &byte: &u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
///     let sum = parts.concat().iter().fold(0, mix);
///     [sum.to_le_bytes(); 4].concat().try_into().unwrap()
/// }
///
/// let path = std::env::temp_dir().join(format!("kvpool-example-{}", std::process::id()));
/// let config = FileStoreConfig {
///     capacity_bytes: 1 << 20, page_bytes: 4096, threads: 1, queue_bytes: 1 << 20,
///     policy: PolicyKind::Adaptive, digest,
/// };
/// let region = Arc::new(Region::new(Arc::new(Host), 2 * 4096).unwrap());
/// let pages = TensorView::contiguous(Arc::clone(&region), 0, DType::U8, &[2, 4096]).unwrap();
/// // SAFETY: nothing else uses the region, and each call is waited for.
/// let rows = || unsafe { HostRows::of_tensor("pages", &pages.borrow(), region.clone()) }.unwrap();
/// rows().write(1, &[7; 4096]);
///
/// let store = FileStore::at(&path, &config, FileCaching::Direct).unwrap();
/// let put = store.put(vec![[1; 32], [2; 32]], rows(), PutAfter::Nothing).unwrap();
/// assert!(put.wait(Duration::from_secs(60)).unwrap());
/// drop(store);
///
/// let store = FileStore::at(&path, &config, FileCaching::Direct).unwrap();
/// assert_eq!(store.exists(&[[1; 32], [2; 32], [3; 32]]).unwrap(), 2);
/// let get = store.get(vec![[2; 32]], rows().select(&[0]).unwrap()).unwrap();
/// assert!(get.wait(Duration::from_secs(60)).unwrap());
/// let mut page = [0; 4096];
/// rows().read(0, &mut page);
/// assert_eq!((get.present().unwrap(), page), (vec![true], [7; 4096]));
/// # drop(store);
/// # std::fs::remove_dir_all(path).unwrap();
/// ```
pub struct FileStore {
    shared: Arc<StoreCore>,
    workers: RankedMutex<Vec<thread::JoinHandle<()>>>,
}

/// The state that the store and its threads share.
#[derive(Debug)]
struct StoreCore {
    config: FileStoreConfig,
    /// The name of the store in messages.
    name: String,
    slot_bytes: usize,
    is_direct: bool,
    /// The process whose threads these are.
    process: u32,
    /// `None` once the store is closed.
    disk: RankedMutex<Option<Arc<dyn Disk>>>,
    state: RankedMutex<StoreState>,
    /// Signals that there is work, or that a thread has ended.
    changed: Condvar,
}

#[derive(Debug)]
struct StoreState {
    slots: Slots,
    ticks: Ticks,
    gets: VecDeque<PageWork>,
    puts: VecDeque<PageWork>,
    /// The pages that are being put, queued or at work, with their ticks.
    pending: KeyMap<PageHash, u64>,
    is_closing: bool,
    /// The threads and calls that use the files.
    disk_users: usize,
    counts: Counts,
    /// The message of the first failure of each kind.
    notes: Vec<String>,
    /// The failures noted so far: the operation, and the kind of the cause.
    noted: HashSet<(&'static str, io::ErrorKind)>,
    /// The time of the last message that the disk is full.
    noted_full: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    hits: usize,
    misses: usize,
    damaged: usize,
    dropped: usize,
    errors: usize,
    read_bytes: usize,
    written_bytes: usize,
}

impl FileStore {
    /// Opens the store in the folder at `path`, which is made if it is missing.
    ///
    /// Reads the index only, unless the capacity has become smaller: then pages behind it are moved or, those
    /// used least recently, dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Config`], with the path, for sizes that do not fit, for a folder that is in use, that the
    /// system refuses, or that has a store with other pages; [`ErrorKind::OutOfMemory`] if the index does not
    /// fit in memory or no thread can be started.
    pub fn at(path: &Path, config: &FileStoreConfig, caching: FileCaching) -> Result<Self> {
        Self::check(config)?;
        let folder = Folder::open(path, caching)?;
        let notes = folder.warnings().to_vec();
        let disk: Arc<dyn Disk> = Arc::new(folder);
        let store = Self::open(path.display().to_string(), config, &disk)?;
        store.shared.state().notes.splice(0..0, notes);
        Ok(store)
    }

    /// Returns the bytes of a slot, if the sizes fit.
    fn check(config: &FileStoreConfig) -> Result<usize> {
        let FileStoreConfig { capacity_bytes, page_bytes, threads, queue_bytes, .. } = *config;
        at_least_one(&[("page_bytes", page_bytes), ("threads", threads)])?;
        let slot_bytes = page_bytes.checked_next_multiple_of(BLOCK).filter(|slot| *slot <= capacity_bytes);
        let slot_bytes = slot_bytes.ok_or_else(|| {
            let text =
                format!("capacity_bytes is {capacity_bytes}, too few for a page of {page_bytes} bytes");
            Error::config(format!("{text}, which takes a multiple of {BLOCK}"))
        })?;
        if capacity_bytes / slot_bytes > MAX_SLOTS {
            let text =
                format!("capacity_bytes is {capacity_bytes}; with pages of {page_bytes} bytes the most is");
            return Err(Error::config(format!("{text} {MAX_SLOTS} * {slot_bytes}")));
        }
        if queue_bytes < page_bytes {
            let text = format!("queue_bytes is {queue_bytes}, too few for a page of {page_bytes} bytes");
            return Err(Error::config(text));
        }
        Ok(slot_bytes)
    }

    /// Opens the store on `disk`, which is `name` in messages. Otherwise as [`FileStore::at`].
    ///
    /// # Errors
    /// See [`FileStore::at`].
    pub fn open(name: impl Into<String>, config: &FileStoreConfig, disk: &Arc<dyn Disk>) -> Result<Self> {
        let (name, slot_bytes) = (name.into(), Self::check(config)?);
        let FileStoreConfig { page_bytes, policy, digest, .. } = *config;
        let count = config.capacity_bytes / slot_bytes;
        let found = Opening { disk: &**disk, digest, page_bytes, slot_bytes, count, policy }
            .run()
            .map_err(|error| error.with_prefix(&name))?;
        let counts = Counts { damaged: found.damaged, ..Counts::default() };
        let notes = found.lost_bytes.map(|lost| {
            format!(
                "the store in {name} has lost its index, as after a power cut: it begins anew, without the \
                 {lost} bytes of its pages"
            )
        });
        let state = StoreState {
            slots: found.slots,
            ticks: Ticks::after(found.last_tick),
            gets: VecDeque::new(),
            puts: VecDeque::new(),
            pending: KeyMap::default(),
            is_closing: false,
            disk_users: 0,
            counts,
            notes: notes.into_iter().collect(),
            noted: HashSet::new(),
            noted_full: None,
        };
        let shared = Arc::new(StoreCore {
            config: *config,
            name,
            slot_bytes,
            is_direct: disk.is_direct(),
            process: std::process::id(),
            disk: RankedMutex::new(LockRank::StoreDisk, Some(Arc::clone(disk))),
            state: RankedMutex::new(LockRank::Store, state),
            changed: Condvar::new(),
        });
        let store = Self { shared, workers: RankedMutex::new(LockRank::StoreWorkers, Vec::new()) };
        for number in 0..config.threads {
            let bytes = AlignedBytes::new(slot_bytes)?;
            let worker = Worker::new(&store.shared, bytes);
            let thread = thread::Builder::new().name(format!("kvpool-store-{number}"));
            match thread.spawn(move || worker.run()) {
                Ok(handle) => store.workers.lock().push(handle),
                Err(cause) if number > 0 => {
                    let mut state = store.shared.state();
                    state.record_failure(&store.shared.name, "start all of its threads", &cause);
                    break;
                }
                Err(cause) => {
                    let text = format!("{}: no thread can be started: {cause}", store.shared.name);
                    return Err(Error::new(ErrorKind::OutOfMemory, text));
                }
            }
        }
        Ok(store)
    }

    /// Returns the number of keys before the first whose page is not there. Reads no file, and records no use.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if the store is closed, or belongs to the process that this one was forked from.
    pub fn exists(&self, keys: &[PageHash]) -> Result<usize> {
        let state = self.open_state()?;
        Ok(keys.iter().take_while(|key| state.slots.find(key).is_some()).count())
    }

    /// Returns what [`FileStore::exists`] does, and records a use of these pages, which a prompt begins with.
    ///
    /// # Errors
    /// See [`FileStore::exists`].
    pub fn look_up(&self, keys: &[PageHash]) -> Result<usize> {
        let mut state = self.open_state()?;
        let slots = try_collect_each(keys.iter().map_while(|key| state.slots.find(key)))?;
        if !keys.is_empty() {
            state.slots.look_up(keys.len());
            state.look_up(&slots);
        }
        Ok(slots.len())
    }

    /// Returns which of the pages are there. Reads no file, and records no use.
    ///
    /// # Errors
    /// See [`FileStore::exists`].
    pub fn find(&self, keys: &[PageHash]) -> Result<Vec<bool>> {
        let state = self.open_state()?;
        try_collect(keys.iter().map(|key| state.slots.find(key).is_some()))
    }

    /// Records a use of the pages of a prompt that are there or being put, the first of which is evicted last.
    /// Returns which of them are there. Reads no file.
    ///
    /// # Errors
    /// See [`FileStore::exists`].
    pub fn touch(&self, keys: &[PageHash]) -> Result<Vec<bool>> {
        let mut guard = self.open_state()?;
        let state = &mut *guard;
        state.slots.begin_request();
        let recency = state.ticks.touch(keys.len());
        let mut near = None;
        let record =
            |(page, key)| state.record_use(key, recency.tick(page), &mut near) == Some(Known::Stored);
        Ok(keys.iter().enumerate().map(record).collect())
    }

    /// Reads pages to `rows`, one for each key, which must not be used before they are done. The row of a
    /// page that is not found keeps its bytes.
    ///
    /// # Errors
    /// See [`FileStore::exists`]; also [`ErrorKind::Argument`] unless there are as many rows as keys, of the
    /// size of a page.
    pub fn get(&self, keys: Vec<PageHash>, rows: HostRows) -> Result<Arc<StoreTransfer>> {
        self.check_rows(&rows)?;
        self.begin_get(keys, rows)
    }

    /// Reads pages to rows, which may be shorter.
    fn begin_get(&self, keys: Vec<PageHash>, rows: HostRows) -> Result<Arc<StoreTransfer>> {
        check_counts(&keys, &rows)?;
        check_memory(keys.len() * BOOKKEEPING)?;
        // Those that are not used are dropped after the lock.
        let mut rows: Vec<_> = rows.into_rows().map(Some).collect();
        let mut state = self.open_state()?;
        let found = |(page, key)| Some((page, state.slots.find(key)?));
        let (pages, slots): (Vec<usize>, Vec<FileSlot>) = keys.iter().enumerate().filter_map(found).unzip();
        if !keys.is_empty() {
            state.look_up(&slots);
        }
        let present = vec![false; keys.len()];
        state.counts.misses += keys.len() - pages.len();
        let transfer = Arc::new(StoreTransfer::new(present, pages.len()));
        let batch = Arc::new(Batch { keys, transfer: Arc::clone(&transfer) });
        let work = |page: usize| PageWork::new(&batch, page, rows[page].take());
        state.gets.extend(pages.into_iter().map(work));
        drop(state);
        self.shared.changed.notify_all();
        Ok(transfer)
    }

    /// Writes pages from `rows`, one for each key, which must not change before they are done. Never waits:
    /// pages beyond `queue_bytes` are dropped, and so are the last pages of a prompt that the store has no
    /// room for. Pages that are in the store, or in the queue, are not written again.
    ///
    /// # Errors
    /// See [`FileStore::get`].
    pub fn put(&self, keys: Vec<PageHash>, rows: HostRows, after: PutAfter) -> Result<Arc<StoreTransfer>> {
        self.check_rows(&rows)?;
        self.begin_put(keys, rows, self.shared.config.queue_bytes / self.shared.config.page_bytes, after)
    }

    /// Writes pages from rows, unless `most` pages wait already. The rest of a page after a shorter row is
    /// zero.
    fn begin_put(
        &self,
        keys: Vec<PageHash>,
        rows: HostRows,
        most: usize,
        after: PutAfter,
    ) -> Result<Arc<StoreTransfer>> {
        check_counts(&keys, &rows)?;
        check_memory(keys.len() * BOOKKEEPING)?;
        // Those that are not used are dropped after the lock.
        let mut rows: Vec<_> = rows.into_rows().map(Some).collect();
        let mut guard = self.open_state()?;
        let state = &mut *guard;
        let parent = match &after {
            PutAfter::Page(key) => state.tick(key),
            PutAfter::PreviousCall | PutAfter::Nothing => None,
        };
        if after == PutAfter::Nothing {
            state.slots.begin_request();
        }
        let recency = state.ticks.put(keys.len(), state.slots.room(), after, parent);
        let mut pages = Vec::new();
        let mut present = vec![false; keys.len()];
        let mut near = None;
        for (page, key) in keys.iter().enumerate() {
            // A page that is still being put counts as absent: the other put may fail.
            let known = state.record_use(key, recency.tick(page), &mut near);
            present[page] = known == Some(Known::Stored);
            if known.is_some() {
                // It is not written again.
            } else if state.pending.len() >= most {
                state.counts.dropped += 1;
            } else {
                state.pending.insert(*key, recency.tick(page));
                pages.push(page);
            }
        }
        let transfer = Arc::new(StoreTransfer::new(present, pages.len()));
        let batch = Arc::new(Batch { keys, transfer: Arc::clone(&transfer) });
        let work = |page: usize| PageWork::new(&batch, page, rows[page].take());
        state.puts.extend(pages.into_iter().map(work));
        drop(guard);
        self.shared.changed.notify_all();
        Ok(transfer)
    }

    /// Removes pages, also for later processes; returns how many were there. Those that are still being put
    /// are stored nevertheless. Writes to the index.
    ///
    /// # Errors
    /// See [`FileStore::exists`]. A page whose entry cannot be cleared counts among `errors`, and may be back
    /// when the store is opened again.
    pub fn remove(&self, keys: &[PageHash]) -> Result<usize> {
        let disk = DiskUser::new(&self.shared, self.open_state()?);
        let mut state = self.shared.state();
        state.ticks.end_prompt();
        let slots: Vec<FileSlot> = keys.iter().filter_map(|key| state.slots.remove(key)).collect();
        drop(state);
        self.shared.forget(disk.files(), &slots);
        let mut state = self.shared.state();
        for &slot in &slots {
            state.slots.release(slot);
        }
        Ok(slots.len())
    }

    /// Removes all pages. Otherwise as [`FileStore::remove`].
    ///
    /// # Errors
    /// See [`FileStore::remove`].
    pub fn clear(&self) -> Result<usize> {
        let keys = self.open_state()?.slots.keys();
        self.remove(&keys)
    }

    /// Rejects further calls, and waits up to `timeout` for the calls in progress. Returns whether they are
    /// done; then the files can be opened again.
    ///
    /// # Errors
    /// [`ErrorKind::State`] in the child of a fork.
    pub fn close(&self, timeout: Duration) -> Result<bool> {
        self.check_process()?;
        let begin = Instant::now();
        let mut state = self.shared.state();
        state.is_closing = true;
        self.shared.changed.notify_all();
        while state.disk_users > 0 {
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            state = state.wait_timeout(&self.shared.changed, left);
        }
        drop(state);
        let handles = std::mem::take(&mut *self.workers.lock());
        for handle in handles {
            // A thread that has panicked has reported it.
            let _ = handle.join();
        }
        self.shared.disk.lock().take();
        Ok(true)
    }

    /// Returns the config.
    #[must_use]
    pub fn config(&self) -> &FileStoreConfig {
        &self.shared.config
    }

    /// Returns the path, or the name of the disk.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns whether pages bypass the system's cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.shared.is_direct
    }

    /// Returns whether [`FileStore::close`] was called.
    ///
    /// # Errors
    /// [`ErrorKind::State`] in the child of a fork.
    pub fn is_closed(&self) -> Result<bool> {
        self.check_process()?;
        Ok(self.shared.state().is_closing)
    }

    /// Returns the number of pages.
    ///
    /// # Errors
    /// [`ErrorKind::State`] in the child of a fork.
    pub fn len(&self) -> Result<usize> {
        self.check_process()?;
        Ok(self.shared.state().slots.len())
    }

    /// Returns whether there are none.
    ///
    /// # Errors
    /// [`ErrorKind::State`] in the child of a fork.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Returns the statistics: `pages`, `capacity` and `queued` in pages; `bytes` of the pages; `hits` and
    /// `misses` of `get`; `evicted`, `damaged` (also entries of the index), `dropped`, `errors`, `read_bytes`
    /// and `written_bytes`, all since the store was opened.
    ///
    /// # Errors
    /// [`ErrorKind::State`] in the child of a fork.
    pub fn stats(&self) -> Result<Stats> {
        self.check_process()?;
        let state = self.shared.state();
        let counts = state.counts;
        Ok(Stats::from([
            ("pages", state.slots.len()),
            ("capacity", state.slots.count()),
            ("queued", state.pending.len()),
            ("bytes", state.slots.len() * self.shared.config.page_bytes),
            ("hits", counts.hits),
            ("misses", counts.misses),
            ("evicted", state.slots.evicted()),
            ("damaged", counts.damaged),
            ("dropped", counts.dropped),
            ("errors", counts.errors),
            ("read_bytes", counts.read_bytes),
            ("written_bytes", counts.written_bytes),
        ]))
    }

    /// Takes the messages of failures since the last call: the first of each kind.
    #[must_use]
    pub fn take_notes(&self) -> Vec<String> {
        // In the child of a fork, the lock may be held forever, because its thread exists only in the parent.
        if self.check_process().is_err() {
            Vec::new()
        } else {
            std::mem::take(&mut self.shared.state().notes)
        }
    }

    /// Returns the first disagreement between parts of the bookkeeping, in words. Costs a visit of every
    /// page.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        self.shared.state().slots.broken_invariant()
    }

    /// Checks that rows are as large as pages.
    fn check_rows(&self, rows: &HostRows) -> Result<()> {
        let page_bytes = self.shared.config.page_bytes;
        let other = (0..rows.len()).map(|row| rows.bytes_of(row)).find(|&bytes| bytes != page_bytes);
        other.map_or(Ok(()), |bytes| {
            Err(Error::argument(format!("pages have {bytes} bytes each, those of the store {page_bytes}")))
        })
    }

    /// Checks that rows fit in pages.
    fn check_fit(&self, rows: &HostRows) -> Result<()> {
        let page_bytes = self.shared.config.page_bytes;
        let longer = (0..rows.len()).map(|row| rows.bytes_of(row)).find(|&bytes| bytes > page_bytes);
        longer.map_or(Ok(()), |bytes| {
            Err(Error::argument(format!(
                "a piece has {bytes} bytes, the pages of the store have {page_bytes}"
            )))
        })
    }

    fn check_process(&self) -> Result<()> {
        if self.shared.process == std::process::id() {
            return Ok(());
        }
        let text =
            format!("the store in {} belongs to the process that this one was forked from", self.shared.name);
        Err(Error::state(text))
    }

    fn closed(&self) -> Error {
        Error::state(format!("the store in {} is closed", self.shared.name))
    }

    fn open_state(&self) -> Result<RankedGuard<'_, StoreState>> {
        self.check_process()?;
        let state = self.shared.state();
        if state.is_closing { Err(self.closed()) } else { Ok(state) }
    }
}

/// A thread or a call that uses the files. [`FileStore::close`] waits for it.
#[derive(Debug)]
struct DiskUser {
    shared: Arc<StoreCore>,
    disk: Option<Arc<dyn Disk>>,
}

impl DiskUser {
    /// Counts a user, and gives it the files: they are there as long as somebody uses them.
    fn new(shared: &Arc<StoreCore>, mut state: RankedGuard<'_, StoreState>) -> Self {
        state.disk_users += 1;
        drop(state);
        let disk = shared.disk.lock().clone();
        Self { shared: Arc::clone(shared), disk }
    }

    fn files(&self) -> &dyn Disk {
        self.disk.as_deref().expect("a store that is not closed has its files")
    }
}

impl Drop for DiskUser {
    fn drop(&mut self) {
        self.disk = None;
        self.shared.state().disk_users -= 1;
        self.shared.changed.notify_all();
    }
}

/// Checks that there is a row for each key.
fn check_counts(keys: &[PageHash], rows: &HostRows) -> Result<()> {
    if rows.len() == keys.len() {
        return Ok(());
    }
    Err(Error::argument(format!("there are {} keys for {} pages", keys.len(), rows.len())))
}

impl Store for FileStore {
    fn max_bytes(&self) -> usize {
        self.shared.config.page_bytes
    }

    /// Reads no file.
    fn find(&self, keys: &[PageHash]) -> Result<Vec<bool>> {
        Self::find(self, keys)
    }

    /// Reads no file.
    fn touch(&self, keys: &[PageHash]) -> Result<Vec<bool>> {
        Self::touch(self, keys)
    }

    fn get(&self, keys: Vec<PageHash>, rows: HostRows) -> Result<Arc<StoreTransfer>> {
        self.check_fit(&rows)?;
        self.begin_get(keys, rows)
    }

    fn put(&self, keys: Vec<PageHash>, rows: HostRows) -> Result<Arc<StoreTransfer>> {
        self.check_fit(&rows)?;
        self.begin_put(keys, rows, usize::MAX, PutAfter::Nothing)
    }
}

impl Drop for FileStore {
    /// Drops queued pages, and waits for those that a thread is writing or reading.
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // The threads are those of another process.
            std::mem::forget(std::mem::take(self.workers.get_mut()));
            return;
        }
        let mut state = self.shared.state();
        state.is_closing = true;
        let (gets, puts) = (std::mem::take(&mut state.gets), std::mem::take(&mut state.puts));
        state.counts.dropped += puts.len();
        drop(state);
        self.shared.changed.notify_all();
        drop((gets, puts));
        let handles = std::mem::take(&mut *self.workers.lock());
        for handle in handles {
            let _ = handle.join();
        }
    }
}

impl StoreCore {
    fn state(&self) -> RankedGuard<'_, StoreState> {
        self.state.lock()
    }
}

/// Where the store has a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// In its files.
    Stored,
    /// In its queue, or at work.
    Pending,
}

impl StoreState {
    /// Records that pages were looked up and found, which become the last used.
    fn look_up(&mut self, slots: &[FileSlot]) {
        let recency = self.ticks.look_up(slots.len());
        self.slots.touch(slots, recency);
    }

    /// Returns the tick of a page that is there or being put.
    fn tick(&self, key: &PageHash) -> Option<u64> {
        let stored = self.slots.find(key).map(|slot| self.slots.record(slot).tick);
        stored.or_else(|| self.pending.get(key).copied())
    }

    /// Records a use of a page, unless it is not there or was used later. `near` is a page with a similar
    /// tick, and becomes this one.
    fn record_use(&mut self, key: &PageHash, tick: u64, near: &mut Option<FileSlot>) -> Option<Known> {
        if let Some(slot) = self.slots.find(key) {
            self.slots.raise(slot, tick, near.replace(slot));
            return Some(Known::Stored);
        }
        let pending = self.pending.get_mut(key)?;
        *pending = tick.max(*pending);
        Some(Known::Pending)
    }

    /// Counts a failure, and keeps the first of its kind.
    fn record_failure(&mut self, name: &str, what: &'static str, cause: &io::Error) {
        self.counts.errors += 1;
        if self.noted.insert((what, cause.kind())) {
            self.notes.push(format!("the store in {name} cannot {what}: {cause}"));
        }
    }

    /// Counts a page whose bytes are not those that were put, and names it.
    fn record_damage(&mut self, name: &str, key: &PageHash) {
        self.counts.damaged += 1;
        self.notes.push(format!("page {} of the store in {name} is damaged: it was removed", hex(key)));
    }

    /// Counts a failure of a disk that has no space for more pages, and keeps a message whenever that begins,
    /// at most one a minute.
    fn record_full(&mut self, name: &str, cause: &io::Error) {
        const PAUSE: Duration = Duration::from_secs(60);
        self.counts.errors += 1;
        let is_new = self.slots.record_full();
        if is_new && self.noted_full.is_none_or(|noted| noted.elapsed() >= PAUSE) {
            self.noted_full = Some(Instant::now());
            let (room, count) = (self.slots.room(), self.slots.count());
            self.notes.push(format!(
                "the store in {name} cannot write a page: {cause}: it goes on with {room} of {count} pages, and \
                 tries from time to time whether there is space for more"
            ));
        }
    }
}
