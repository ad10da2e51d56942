//! Host memory below a prefix cache: pages of all layers, and snapshots of states.

mod pieces;
mod storage;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::base::bounded::narrow;
use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{Device, Error, ErrorKind, ForkGate, Page, Result, StateSlot};
use crate::cache::{
    DevicePresence, History, LowerTierContents, Namespace, OfferedPages, OfferedPieces, PageHash, PolicyKind,
    Tick, UsedRun, WritePolicy,
};
use crate::kernels::{PageCopy, PagePair, StagingArea};
use crate::memory::{Backend, CopyDirection, Fingerprint, Gpu, Stream};
use crate::transfer::{CopyQueue, EarlierCopy, Transfer};

use super::contract::{Pool, Stats};
use super::{GdnPool, KvPool, at_least_one};
use storage::{Arrivals, Resident, Storage};

pub(super) use pieces::{HeldPieces, IncomingPieces, OutgoingPieces, PieceKind, StoringCount};

/// The shape of a [`HostTier`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostTierConfig {
    /// Tokens whose K and V it has room for: whole pages of the pool.
    pub size: usize,
    /// Snapshots of states that it has room for.
    pub max_states: usize,
    /// The moment when pages are copied down.
    pub write: WritePolicy,
    /// Whether to page-lock the memory, for a pool on a device. Needs a backend such as [`MappedHost`].
    ///
    /// [`MappedHost`]: crate::memory::MappedHost
    pub pin_memory: bool,
    /// Number of threads that page-lock it.
    pub page_lock_threads: usize,
    /// Bytes of device memory through which a device copies to page-locked memory, at most twice those of the
    /// tier; 0 for none.
    pub staging_bytes: usize,
}

impl fmt::Debug for HostTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostTier")
            .field("size", &self.config.size)
            .field("max_states", &self.config.max_states)
            .field("write", &self.config.write)
            .finish_non_exhaustive()
    }
}

/// Host memory for pages that a prefix cache has published. Loading them from here is faster than computing
/// them again. Each page is one contiguous piece: K and then V of the first layer, then of the next.
///
/// Copies run beside their callers, in either direction one after the other: on a thread or, for a pool on a
/// device, on a stream of their own. A page is found from the moment its copy begins: what reads it, or writes
/// to its place, runs behind that copy.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::DType;
/// use kvpool::cache::WritePolicy;
/// use kvpool::memory::{Backend, Host};
/// use kvpool::pool::{HostTier, HostTierConfig, KvConfig, KvLayout, KvPool};
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let config = KvConfig {
///     size: 64, layer_num: 2, k_head_num: 4, k_head_dim: 8, v_head_num: 4, v_head_dim: 8,
///     dtype: DType::BF16, page_size: 16, layout: KvLayout::Split, pin_memory: false,
/// };
/// let kv = Arc::new(KvPool::new(&config, &host).unwrap());
/// let config = HostTierConfig {
///     size: 1024, max_states: 0, write: WritePolicy::Through, pin_memory: false, page_lock_threads: 1,
///     staging_bytes: 0,
/// };
/// let tier = HostTier::new(&config, &kv, None, &host).unwrap();
/// assert_eq!(tier.page_bytes(), 16 * 2 * 2 * 4 * 8 * 2);
/// ```
pub struct HostTier {
    config: HostTierConfig,
    pages: Storage,
    states: Option<Storage>,
    kv: Arc<KvPool>,
    gdn: Option<Arc<GdnPool>>,
    /// Device memory on the way down and on the way up.
    staging: Option<[Arc<StagingArea>; 2]>,
    down: CopyQueue,
    up: CopyQueue,
    counts: RankedMutex<TierCounts>,
    notes: RankedMutex<FailureNotes>,
    /// Whether the tier belongs to a prefix cache.
    is_taken: AtomicBool,
    /// The model of the pages, if a cache has set it.
    model: RankedMutex<Option<String>>,
}

/// Counts of what a tier did, in pages and snapshots together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TierCounts {
    /// Pieces copied here from the device.
    written: usize,
    /// Pieces copied back to the device.
    loaded: usize,
    /// Pieces given up for others.
    evicted: usize,
    /// Pieces that were not copied here because copies use all places.
    skipped: usize,
    /// Copies that failed.
    failed: usize,
    /// Pieces copied here from the store below.
    fetched: usize,
    /// Pieces that are being written to the store below.
    storing: usize,
    /// Calls that are about to send pieces to the store.
    sending: usize,
    /// Pieces that wait until the store can take them.
    waiting: usize,
    /// Pieces not taken by the store below.
    unstored: usize,
    /// Pieces given up because their bytes were not those that came.
    damaged: usize,
}

impl TierCounts {
    /// Returns the number of pieces on their way to the store, plus the calls that are about to send some.
    const fn on_way_down(self) -> usize {
        self.storing + self.sending + self.waiting
    }
}

/// Failed copies to a tier, and damage in it.
#[derive(Debug, Default)]
struct FailureNotes {
    /// The message of the first failure of each kind and of each damaged piece, until it is taken.
    texts: Vec<String>,
    /// The kinds of the failures so far.
    noted: Vec<ErrorKind>,
}

/// A copy of pages and snapshots from the device to the tier. Their places on the device must not change
/// meanwhile.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) transfer: Arc<Transfer>,
    pages: Arrivals<Page>,
    states: Arrivals<StateSlot>,
    fingerprints: CopiedFingerprints,
}

/// The fingerprints of the pages and the states of a copy, as soon as the thread that copies them has taken
/// them. A device has none.
type CopiedFingerprints = Arc<OnceLock<[Vec<Fingerprint>; 2]>>;

/// Work of the thread that copies, at the end of a copy.
type AtEnd = Box<dyn FnOnce() + Send>;

/// The outcome of [`HostTier::write`].
pub(super) struct Begun {
    /// The copy, if there is something to copy.
    pub(super) write: Option<Write>,
    /// The pages that are copied, if events of them are wanted.
    pub(super) runs: Vec<OfferedPages>,
    /// The keys of the pages that were evicted for them, or given up before.
    pub(super) evicted: Vec<PageHash>,
}

impl Write {
    /// Returns the keys of the pieces that are copied.
    pub(super) fn keys(&self, kind: PieceKind) -> &[PageHash] {
        match kind {
            PieceKind::Page => &self.pages.keys,
            PieceKind::State => &self.states.keys,
        }
    }

    /// Returns the number of pages and snapshots.
    fn len(&self) -> usize {
        self.pages.entries.len() + self.states.entries.len()
    }

    /// Returns the places of the pages on the device.
    pub(super) fn pages(&self) -> &[Page] {
        &self.pages.from
    }

    /// Returns the places of the snapshots on the device.
    pub(super) fn states(&self) -> &[StateSlot] {
        &self.states.from
    }
}

/// The contents of a tier, under its locks.
pub(super) struct Contents<'a> {
    pages: Resident<'a>,
    states: Option<Resident<'a>>,
}

impl LowerTierContents for Contents<'_> {
    fn has_page(&self, key: &PageHash) -> bool {
        self.pages.find(key).is_some()
    }

    fn has_state(&self, key: &PageHash) -> bool {
        self.states.as_ref().is_some_and(|states| states.find(key).is_some())
    }
}

impl HostTier {
    /// Creates a tier for the pages of `kv`, and for snapshots of `states`, in memory of `backend`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for less than a page, for room for snapshots
    /// without `states` or no room with them, and for sizes whose bytes overflow; the error of the backend if
    /// it runs out of memory.
    pub fn new(
        config: &HostTierConfig,
        kv: &Arc<KvPool>,
        states: Option<&Arc<GdnPool>>,
        backend: &Arc<dyn Backend>,
    ) -> Result<Self> {
        let page_size = kv.config().page_size;
        at_least_one(&[("size", config.size), ("page_lock_threads", config.page_lock_threads)])?;
        if config.size < page_size {
            return Err(Error::config(format!(
                "size {} is less than a page of {page_size} tokens",
                config.size
            )));
        }
        match (states, config.max_states) {
            (None, 1..) => {
                let text = format!("max_states is {}, but there are no states", config.max_states);
                return Err(Error::config(text));
            }
            (Some(_), 0) => at_least_one(&[("max_states", 0)])?,
            _ => (),
        }
        if let Some(states) = states.filter(|states| states.device() != kv.device()) {
            let (kv, states) = (kv.device(), states.device());
            return Err(Error::config(format!("the K and V are on {kv}, the states on {states}")));
        }
        let gpu = kv.gpu().cloned();
        let storage =
            |count, (rows, page_size), rank| Storage::new(config, count, rows, page_size, backend, rank);
        let mut pages = storage(config.size / page_size, kv.pages(), LockRank::TierPages)?;
        let mut states_of = states
            .map(|states| storage(config.max_states, states.pages(), LockRank::TierStates))
            .transpose()?;
        let staging = staging_areas(config, gpu.as_ref(), [Some(&mut pages), states_of.as_mut()])?;
        Ok(Self {
            config: *config,
            pages,
            states: states_of,
            kv: Arc::clone(kv),
            gdn: states.cloned(),
            staging,
            down: CopyQueue::new(CopyDirection::Out, gpu.clone()),
            up: CopyQueue::new(CopyDirection::In, gpu),
            counts: RankedMutex::new(LockRank::TierCounts, TierCounts::default()),
            notes: RankedMutex::new(LockRank::TierNotes, FailureNotes::default()),
            is_taken: AtomicBool::new(false),
            model: RankedMutex::new(LockRank::TierModel, None),
        })
    }

    /// Returns the config of the tier.
    #[must_use]
    pub const fn config(&self) -> &HostTierConfig {
        &self.config
    }

    /// Returns the pool of the pages.
    #[must_use]
    pub const fn kv(&self) -> &Arc<KvPool> {
        &self.kv
    }

    /// Returns the pool of the states, if there is one.
    #[must_use]
    pub const fn states(&self) -> Option<&Arc<GdnPool>> {
        self.gdn.as_ref()
    }

    /// Returns the number of bytes of K and V of a page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.pages.piece_bytes()
    }

    /// Returns the number of pages that it has room for.
    pub(super) fn capacity(&self) -> usize {
        self.pages.capacity()
    }

    /// Returns the number of bytes of the memory.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.storages().map(Storage::mem_bytes).sum()
    }

    /// Returns the number of bytes of device memory through which copies come here and go back.
    #[must_use]
    pub fn staging_bytes(&self) -> usize {
        self.staging.iter().flatten().map(|area| area.bytes()).sum()
    }

    /// Waits up to `timeout` for the end of page-locking. Returns whether it has ended.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) in a forked child, where it never ends.
    pub fn wait_page_locked(&self, timeout: Duration) -> Result<bool> {
        let begin = std::time::Instant::now();
        for storage in self.storages() {
            if !storage.wait_page_locked(timeout.saturating_sub(begin.elapsed()))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Gives up all pages and snapshots, or those of a namespace. Copies that use one keep its place until
    /// they end.
    pub fn clear(&self, namespace: Option<&Namespace>) {
        self.forget(namespace);
    }

    /// Works like [`Self::clear`], and also returns the keys of the pages.
    pub(super) fn forget(&self, namespace: Option<&Namespace>) -> Vec<PageHash> {
        if let Some(states) = &self.states {
            states.clear(namespace);
        }
        self.pages.clear(namespace)
    }

    /// Returns the statistics, in pages: `capacity`, `pages` that are found, `arriving`; `states` and `state_capacity`;
    /// and, with snapshots, the pieces `written`, `loaded`, `evicted`, `skipped` because no place was free, `failed`,
    /// `fetched` from a store, on their way to it (`storing`) and not accepted by it (`unstored`), or given up because
    /// host memory has damaged them (`damaged`); page-locked places (`page_locked`); `bytes`, and `staging_bytes` on
    /// the device.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let counts = *self.counts.lock();
        let [pages, arriving] = self.pages.counts();
        let [states, states_arriving] = self.states.as_ref().map_or([0; 2], Storage::counts);
        Stats::from([
            ("capacity", self.pages.capacity()),
            ("pages", pages),
            ("arriving", arriving + states_arriving),
            ("state_capacity", self.states.as_ref().map_or(0, Storage::capacity)),
            ("states", states),
            ("written", counts.written),
            ("loaded", counts.loaded),
            ("evicted", counts.evicted),
            ("skipped", counts.skipped),
            ("failed", counts.failed),
            ("fetched", counts.fetched),
            ("storing", counts.on_way_down()),
            ("unstored", counts.unstored),
            ("damaged", counts.damaged),
            ("page_locked", self.storages().map(Storage::page_locked).sum()),
            ("bytes", self.mem_bytes()),
            ("staging_bytes", self.staging_bytes()),
        ])
    }

    /// Checks every invariant.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) with the broken invariant.
    pub fn verify(&self) -> Result<()> {
        let fault = self.storages().find_map(Storage::broken_invariant);
        fault.map_or(Ok(()), |fault| {
            let text = format!("the host tier is inconsistent: {fault}");
            Err(Error::new(crate::base::ErrorKind::IndexOwnership, text))
        })
    }

    /// Returns the memory of one kind of pieces. A tier without states has none of theirs.
    fn storage(&self, kind: PieceKind) -> Option<&Storage> {
        match kind {
            PieceKind::Page => Some(&self.pages),
            PieceKind::State => self.states.as_ref(),
        }
    }

    fn storages(&self) -> impl Iterator<Item = &Storage> {
        std::iter::once(&self.pages).chain(&self.states)
    }

    /// Makes this the tier of a prefix cache, until [`Self::detach`].
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if another one has it.
    pub(super) fn attach(&self) -> Result<()> {
        if self.is_taken.swap(true, Ordering::AcqRel) {
            return Err(Error::config("the host tier belongs to another prefix cache"));
        }
        Ok(())
    }

    /// Sets the model of the pages. Pages of another model are given up.
    pub(super) fn set_model(&self, model: Option<&str>) {
        let before = std::mem::replace(&mut *self.model.lock(), model.map(str::to_owned));
        if before.as_deref() != model {
            self.clear(None);
        }
    }

    /// Ends [`Self::attach`]: the device has none of the pages now.
    pub(super) fn detach(&self) {
        self.storages().for_each(Storage::set_none_on_device);
        self.is_taken.store(false, Ordering::Release);
    }

    /// Returns the complete contents, locked as long as the result lives. Lock it last.
    pub(super) fn contents(&self) -> Contents<'_> {
        Contents { pages: self.pages.resident(), states: self.states.as_ref().map(Storage::resident) }
    }

    /// Records that the device has pages. The last of them is evicted last from the tier. `now` is the time of the cache
    /// above.
    pub(super) fn set_loaded<'a>(&self, keys: impl Iterator<Item = &'a PageHash>, now: Tick) {
        self.pages.set_loaded(keys, now);
    }

    /// Records that the device has evicted pages, with their histories.
    pub(super) fn set_evicted_above<'a>(
        &self,
        pages: impl Iterator<Item = (&'a PageHash, &'a History)>,
        now: Tick,
    ) {
        self.pages.set_evicted_above(pages, now);
    }

    /// Evicts pages by what they are worth to a policy, whose time begins, or by recency.
    pub(super) fn set_policy(&self, policy: PolicyKind) {
        let page_tokens = narrow(self.kv.config().page_size);
        self.pages.resident().set_policy(policy, self.capacity(), page_tokens);
    }

    /// Records that requests have used pages on the device.
    pub(super) fn record_uses(&self, used: &[UsedRun], now: Tick) {
        let mut resident = self.pages.resident();
        resident.set_now(now);
        resident.record_uses(used.iter().flat_map(|run| &run.pages));
    }

    /// Records that pages of another request are written from now on.
    pub(super) fn begin_request(&self, now: Tick) {
        self.pages.resident().begin_request(now);
    }

    /// Starts to copy the offered pages that are not here, after the work enqueued on the streams `after`.
    /// They can be found from now on. `presence` says which of them the device still has. A copy that cannot
    /// be started counts as failed.
    pub(super) fn write(
        &self,
        offered: &OfferedPieces,
        presence: impl Fn(Page, &PageHash) -> DevicePresence,
        after: &[Stream],
    ) -> Begun {
        let (mut pages, mut states, mut runs) = (Arrivals::new(), Arrivals::new(), Vec::new());
        for run in &offered.pages {
            let numbered = run.keys.iter().zip(run.pages.iter().copied());
            let begun = self.pages.begin(numbered, &run.namespace, &presence, &mut pages);
            if !run.tokens.is_empty() {
                runs.extend(begun.into_iter().map(|range| run.part(range)));
            }
        }
        if let Some(storage) = &self.states {
            for state in &offered.states {
                let one = std::iter::once((&state.key, state.slot));
                storage.begin(one, &state.namespace, |_, _| DevicePresence::Absent, &mut states);
            }
        }
        let mut counts = TierCounts {
            evicted: pages.evicted.len() + states.evicted.len(),
            skipped: pages.skipped + states.skipped,
            ..TierCounts::default()
        };
        let mut evicted = std::mem::take(&mut pages.given_up);
        evicted.append(&mut pages.evicted);
        let (mut copy, fingerprints) = (None, CopiedFingerprints::default());
        if !pages.is_empty() || !states.is_empty() {
            // The places of evicted pieces may still be read.
            let readers: Vec<_> = (self.pages.last_read_of(&pages).into_iter())
                .chain(self.states.iter().filter_map(|storage| storage.last_read_of(&states)))
                .collect();
            let at_end = self.fingerprinting(&pages, &states, &fingerprints);
            match self.copy(PageCopy::Out, &pages.pairs(), &states.pairs(), after, readers, at_end) {
                Ok(transfer) => {
                    self.pages.begin_copy(&pages, &transfer);
                    self.states.iter().for_each(|storage| storage.begin_copy(&states, &transfer));
                    copy = Some(transfer);
                }
                Err(failure) => {
                    self.note_failure(&failure);
                    counts.failed += pages.entries.len() + states.entries.len();
                    self.pages.fail(&pages.entries);
                    self.states.iter().for_each(|storage| drop(storage.fail(&states.entries)));
                    runs.clear();
                }
            }
        }
        self.pages.end_begun(&mut pages);
        self.states.iter().for_each(|storage| storage.end_begun(&mut states));
        self.count(counts);
        let write = copy.map(|transfer| Write { transfer, pages, states, fingerprints });
        Begun { write, runs, evicted }
    }

    /// Returns the work that takes the fingerprints of what a thread has copied; `None` for copies of a device,
    /// whose end the host learns later.
    fn fingerprinting(
        &self,
        pages: &Arrivals<Page>,
        states: &Arrivals<StateSlot>,
        taken: &CopiedFingerprints,
    ) -> Option<AtEnd> {
        if self.kv.gpu().is_some() {
            return None;
        }
        let of_pages = self.pages.fingerprinting(pages);
        let of_states = self.states.as_ref().map(|storage| storage.fingerprinting(states));
        let taken = Arc::clone(taken);
        Some(Box::new(move || {
            let states = of_states.map_or_else(Vec::new, |take| take());
            let _ = taken.set([of_pages(), states]);
        }))
    }

    /// Ends a write that is complete.
    pub(super) fn complete(&self, write: &Write) {
        let [pages, states] = [0, 1].map(|kind| write.fingerprints.get().map(|taken| &*taken[kind]));
        self.pages.arrive(&write.pages, pages);
        self.states.iter().for_each(|storage| storage.arrive(&write.states, states));
        self.count(TierCounts { written: write.len(), ..TierCounts::default() });
    }

    /// Ends a write that has failed, perhaps with its device, or whose pages may have been overwritten.
    /// Returns the keys of the pages that can no longer be found.
    pub(super) fn discard(&self, write: &Write, of_device: Option<&Error>) -> Vec<PageHash> {
        if let Some(cause) = of_device.or(write.transfer.failure()) {
            self.note_failure(cause);
        }
        let keys = self.pages.fail(&write.pages.entries);
        self.states.iter().for_each(|storage| drop(storage.fail(&write.states.entries)));
        self.count(TierCounts { failed: write.len(), ..TierCounts::default() });
        keys
    }

    /// Starts to copy held pages to pages of the device, layer by layer, and a held snapshot before them,
    /// behind the work enqueued on `after`.
    ///
    /// # Errors
    /// See [`CopyQueue::start`]; no copy is in flight then.
    pub(super) fn load(
        &self,
        held: &HeldPieces,
        pages: &[Page],
        state: Option<StateSlot>,
        after: Stream,
    ) -> Result<Arc<Transfer>> {
        let pages = self.pages.pairs(held.pages(), pages);
        let states = match &self.states {
            Some(storage) => storage.pairs(held.states(), state.as_slice()),
            None => Vec::new(),
        };
        // Pieces that are held may still be on their way here.
        let writers: Vec<_> = (self.pages.last_write_of(held.pages()).into_iter())
            .chain(self.states.iter().filter_map(|storage| storage.last_write_of(held.states())))
            .collect();
        let transfer = self.copy(PageCopy::In, &pages, &states, &[after], writers, None)?;
        self.pages.begin_load(held.pages(), &transfer);
        self.states.iter().for_each(|storage| storage.begin_load(held.states(), &transfer));
        self.count(TierCounts { loaded: pages.len() + states.len(), ..TierCounts::default() });
        Ok(transfer)
    }

    /// Starts a copy, which runs after the copies `earlier` of the other direction: down in one step, up in
    /// one for each layer, of which some bring several and the next ones none. States are copied first. A thread
    /// does the work `at_end` behind the copy down.
    fn copy(
        &self,
        direction: PageCopy,
        pages: &[PagePair<Page>],
        states: &[PagePair<StateSlot>],
        after: &[Stream],
        earlier: Vec<Arc<Transfer>>,
        mut at_end: Option<AtEnd>,
    ) -> Result<Arc<Transfer>> {
        // What a load reads must be there; what a write replaces need not have been read.
        let must_succeed = direction == PageCopy::In;
        let earlier = earlier.into_iter().map(|copy| EarlierCopy { copy, must_succeed }).collect();
        let layers = self.kv.config().layer_num;
        let (queue, steps) = match direction {
            PageCopy::Out => (&self.down, 1),
            PageCopy::In => (&self.up, layers),
        };
        let (kv, kv_pieces, pages) = (Arc::clone(&self.kv), self.pages.pieces(), pages.to_vec());
        let gdn = match (&self.gdn, &self.states) {
            (Some(gdn), Some(storage)) if !states.is_empty() => {
                Some((Arc::clone(gdn), storage.pieces(), states.to_vec()))
            }
            _ => None,
        };
        let mut way = None;
        queue.start(steps, after, earlier, move |step, stream| {
            if let (0, Some((gdn, pieces, states))) = (step, &gdn) {
                gdn.copy_pieces(pieces, direction, states, stream)?;
            }
            if direction == PageCopy::Out {
                if !pages.is_empty() {
                    kv.copy_pieces(&kv_pieces, direction, &pages, 0..layers, stream)?;
                }
                at_end.take().into_iter().for_each(|work| work());
                return Ok(());
            }
            if pages.is_empty() {
                return Ok(());
            }
            let way = match way {
                Some(way) => way,
                None => *way.insert(kv_pieces.begin_load(&pages, stream)?),
            };
            let layers = way.layers(step, layers);
            if layers.is_empty() { Ok(()) } else { kv.load_pieces(&kv_pieces, &pages, &layers, &way, stream) }
        })
    }

    /// Notes why a copy to the tier failed.
    fn note_failure(&self, cause: &Error) {
        let _gate = ForkGate::enter_on_own_thread();
        let mut notes = self.notes.lock();
        if !notes.noted.contains(&cause.kind()) {
            notes.noted.push(cause.kind());
            notes.texts.push(format!("pages were not copied to a HostTier: {cause}"));
        }
    }

    /// Returns the number of pieces that are being written to the store below or wait for that, plus the calls
    /// that are about to send some.
    pub(super) fn storing(&self) -> usize {
        let _gate = ForkGate::enter_on_own_thread();
        self.counts.lock().on_way_down()
    }

    /// Takes the causes of copies to the tier that failed since the last call, in words: the first of each kind. Also
    /// takes the names of pieces that were damaged in host memory since.
    #[must_use]
    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut self.notes.lock().texts)
    }

    fn count(&self, more: TierCounts) {
        let _gate = ForkGate::enter_on_own_thread();
        let mut counts = self.counts.lock();
        counts.written += more.written;
        counts.loaded += more.loaded;
        counts.evicted += more.evicted;
        counts.skipped += more.skipped;
        counts.failed += more.failed;
        counts.fetched += more.fetched;
        counts.unstored += more.unstored;
        counts.damaged += more.damaged;
    }
}

/// Creates the staging areas of a tier, and lets pieces take them that `gpu` accesses in place.
fn staging_areas(
    config: &HostTierConfig,
    gpu: Option<&Arc<Gpu>>,
    storages: [Option<&mut Storage>; 2],
) -> Result<Option<[Arc<StagingArea>; 2]>> {
    let mut storages: Vec<_> =
        storages.into_iter().flatten().filter(|storage| storage.is_in_place()).collect();
    let bytes =
        storages.iter().map(|storage| 3 * storage.mem_bytes()).sum::<usize>().min(config.staging_bytes);
    let Some(gpu) = gpu.filter(|_| bytes > 0) else { return Ok(None) };
    let areas = StagingArea::of_tier(gpu, bytes)?;
    for storage in &mut storages {
        storage.stage([&areas[0], &areas[1]]);
    }
    Ok(Some(areas))
}

impl Pool for HostTier {
    fn unit(&self) -> &'static str {
        "page"
    }

    /// Returns false: the pages of a tier are a prefix cache's.
    fn hands_out(&self) -> bool {
        false
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(self.page_bytes())
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn stats(&self) -> Stats {
        Self::stats(self)
    }
}
