//! Prefixes that come from the store to the host tier.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::sync::Condvar;
use crate::base::{Discarded, Epoch, Result};
use crate::cache::{Continuation, LowerTierContents as _, Namespace, OfferedPages, PageHash};
use crate::pool::host_tier::{HeldPieces, IncomingPieces, PieceKind};
use crate::pool::{HostTier, StoreTransfer};

use super::backing::Backing;
use super::home::CacheRef;
use super::store_access::{AvailablePages, StoreAccess};

/// Bytes of a batch that is requested from a store, unless one page has more.
const BATCH_BYTES: usize = 16 << 20;

/// The maximum number of batches in flight.
const BATCHES: usize = 3;

/// The time between two checks of whether a waiting fetch was given up.
const SLICE: Duration = Duration::from_millis(20);

/// A fetch of a prefix from the store to the host tier. The tier keeps the prefix as long as the fetch lives.
#[derive(Debug)]
pub struct Fetch {
    process: u32,
    progress: Arc<FetchProgress>,
}

/// The progress of a fetch.
#[derive(Debug)]
struct FetchProgress {
    state: RankedMutex<FetchState>,
    changed: Condvar,
}

impl FetchProgress {
    fn new(state: FetchState) -> Self {
        Self { state: RankedMutex::new(LockRank::Fetch, state), changed: Condvar::new() }
    }
}

#[derive(Debug, Default)]
struct FetchState {
    /// Tokens whose pages have arrived.
    len: usize,
    is_over: bool,
    is_given_up: bool,
    /// The pieces that are kept in the tier, in the order of the prompt.
    held: Vec<HeldPieces>,
}

/// A prompt to be fetched.
#[derive(Debug)]
pub(super) struct FetchRequest {
    pub(super) namespace: Namespace,
    /// The tokens that follow the part of the prompt that the device has and a request can use.
    pub(super) tokens: Vec<i32>,
    pub(super) continuation: Continuation,
    /// The epochs of the pieces of the tier in which it begins.
    pub(super) epochs: TierEpochs,
    /// Whether the cache reports events.
    pub(super) has_events: bool,
}

impl FetchRequest {
    /// Holds the pages of the prompt in the tier, and the snapshot at their end, if nothing of it has to be
    /// looked for in the store: each page is on the device or in the tier.
    fn hold_in_tier(&self, tier: &Arc<HostTier>) -> Option<[HeldPieces; 2]> {
        let page_size = tier.kv().config().page_size;
        let Continuation { chain, usable, cached } = &self.continuation;
        let (mut chain, on_device) = (chain.clone(), (cached - usable) / page_size);
        let contents = tier.contents();
        let mut keys = Vec::new();
        for (at, page) in self.tokens.chunks_exact(page_size).enumerate() {
            let key = chain.next(page);
            if at >= on_device && !contents.has_page(&key) {
                return None;
            }
            keys.push(key);
        }
        let last = keys.last().map(std::slice::from_ref).unwrap_or_default();
        if tier.states().is_some() && !last.iter().all(|key| contents.has_state(key)) {
            return None;
        }
        drop(contents);
        Some(
            [(PieceKind::Page, keys.as_slice()), (PieceKind::State, last)]
                .map(|(kind, keys)| tier.hold_found(kind, keys)),
        )
    }
}

/// Epochs of the pieces of each kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct TierEpochs {
    pages: Epoch,
    states: Epoch,
}

impl TierEpochs {
    /// Returns the current ones of a tier.
    pub(super) fn of_tier(tier: &HostTier) -> Self {
        Self { pages: tier.epoch(PieceKind::Page), states: tier.epoch(PieceKind::State) }
    }

    const fn of(self, kind: PieceKind) -> Epoch {
        match kind {
            PieceKind::Page => self.pages,
            PieceKind::State => self.states,
        }
    }
}

impl Fetch {
    /// Creates a fetch that is over and has no pages.
    pub(super) fn empty() -> Self {
        Self::with_state(FetchState { is_over: true, ..FetchState::default() })
    }

    fn with_state(state: FetchState) -> Self {
        Self { process: std::process::id(), progress: Arc::new(FetchProgress::new(state)) }
    }

    /// Begins to look for a prompt in the store, and to fetch the pages found. A prompt that the device and the
    /// tier have waits for no other: its fetch is over at once.
    ///
    /// # Errors
    /// See [`JobThread::submit`](crate::transfer::JobThread::submit).
    pub(super) fn begin(backing: &Backing, request: FetchRequest) -> Result<Self> {
        if let Some(held) = request.hold_in_tier(backing.store_access().tier()) {
            let state = FetchState { is_over: true, held: held.into(), ..FetchState::default() };
            return Ok(Self::with_state(state));
        }
        let progress = Arc::new(FetchProgress::new(FetchState::default()));
        let (store_access, cache_ref) = (Arc::clone(backing.store_access()), Arc::clone(backing.cache_ref()));
        let end = End(Arc::clone(&progress));
        backing.fetches().submit(move || {
            let job = FetchJob { store_access, cache_ref, progress: &end.0, request: &request };
            // A store that fails reports its failure itself; the fetch ends with the pages that have arrived.
            let _ = job.run();
        })?;
        Ok(Self { process: std::process::id(), progress })
    }

    /// Returns the number of tokens whose pages have arrived so far. A [`match`] of the prompt returns what a
    /// request can load.
    ///
    /// [`match`]: super::PrefixCache::match_prefix
    #[must_use]
    pub fn len(&self) -> usize {
        if self.is_foreign() { 0 } else { self.progress.state.lock().len }
    }

    /// Returns whether no pages have arrived so far.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the fetch is over. True in the child of a fork.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.is_foreign() || self.progress.state.lock().is_over
    }

    /// Waits up to `timeout` for the end of the fetch. Returns whether it has ended.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> bool {
        if self.is_foreign() {
            return true;
        }
        let begin = Instant::now();
        let mut state = self.progress.state.lock();
        while !state.is_over {
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return false;
            }
            state = state.wait_timeout(&self.progress.changed, left);
        }
        true
    }

    /// Fetches no more pages. Those that have arrived stay in the tier.
    pub fn cancel(&self) {
        if !self.is_foreign() {
            self.progress.state.lock().is_given_up = true;
        }
    }

    /// Returns whether the fetch belongs to the process that this one was forked from. Its lock may be held
    /// forever.
    fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        if self.is_foreign() {
            return;
        }
        let mut state = self.progress.state.lock();
        state.is_given_up = true;
        let mut held = std::mem::take(&mut state.held);
        drop(state);
        // The first page of the prompt is used last, so that it is evicted last.
        while held.pop().is_some() {}
    }
}

/// Ends a fetch when it drops, also if it never began.
struct End(Arc<FetchProgress>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.state.lock().is_over = true;
        self.0.changed.notify_all();
    }
}

/// Fetches one prompt.
struct FetchJob<'a> {
    store_access: Arc<StoreAccess>,
    cache_ref: Arc<CacheRef>,
    progress: &'a FetchProgress,
    request: &'a FetchRequest,
}

/// Pieces that were requested from a store. When this drops, other fetches may request those that have not
/// arrived, while the store still copies to their places.
struct Batch {
    incoming: Arc<IncomingPieces>,
    transfer: Arc<StoreTransfer>,
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.incoming.give_up();
    }
}

impl FetchJob<'_> {
    fn should_continue(&self) -> bool {
        !self.progress.state.lock().is_given_up
    }

    fn run(&self) -> Result<()> {
        let FetchRequest { tokens, continuation, .. } = self.request;
        let available =
            self.store_access.find_available(continuation.clone(), tokens, || self.should_continue())?;
        let AvailablePages { keys, missing, lacks_state } = &available;
        let tier = self.store_access.tier();
        // Pieces that are there already must not be evicted for the others.
        self.keep(tier.hold_found(PieceKind::Page, keys));
        let state = keys.last().map(std::slice::from_ref).unwrap_or_default();
        if *lacks_state {
            if self.fetch_pieces(PieceKind::State, state, |_| ())? < state.len() {
                return Ok(());
            }
        } else {
            self.keep(tier.hold_found(PieceKind::State, state));
        }
        let wanted: Vec<PageHash> = missing.iter().map(|&at| keys[at]).collect();
        let mut places = missing.iter().copied();
        self.fetch_pieces(PieceKind::Page, &wanted, |arrived| {
            // The pages arrive in order, but perhaps not all of them.
            let arrived: Vec<usize> =
                arrived.iter().filter_map(|key| places.find(|&at| keys[at] == *key)).collect();
            self.progress.state.lock().len += arrived.len() * self.page_size();
            self.record_arrived(&self.runs(keys, &arrived));
        })?;
        Ok(())
    }

    /// Keeps pieces as long as the fetch lives.
    fn keep(&self, pieces: HeldPieces) {
        let discarded = Discarded::new();
        let mut state = self.progress.state.lock();
        if state.is_given_up {
            discarded.add(Arc::new(pieces));
        } else {
            state.held.push(pieces);
        }
    }

    fn page_size(&self) -> usize {
        self.store_access.tier().kv().config().page_size
    }

    /// Fetches pieces in order until one is missing, reports those of each batch, and returns how many have
    /// arrived.
    fn fetch_pieces(
        &self,
        kind: PieceKind,
        keys: &[PageHash],
        mut report: impl FnMut(&[PageHash]),
    ) -> Result<usize> {
        let piece_bytes = self.store_access.tier().piece_bytes(kind).max(1);
        let mut left = keys.chunks((BATCH_BYTES / piece_bytes).max(1));
        let (mut batches, mut count, mut has_room) = (VecDeque::<Batch>::new(), 0, true);
        loop {
            while has_room && batches.len() < BATCHES && self.should_continue() {
                let Some(keys) = left.next() else { break };
                has_room = self.request_pieces(kind, keys, &mut batches)?;
            }
            let Some(batch) = batches.pop_front() else { return Ok(count) };
            while !batch.transfer.wait(SLICE)? {
                if !self.should_continue() {
                    return Ok(count);
                }
            }
            let came = self.store_access.leading(kind, &batch.transfer)?;
            self.keep(batch.incoming.arrive(came));
            report(&batch.incoming.keys()[..came]);
            count += came;
            if came < batch.incoming.keys().len() {
                return Ok(count);
            }
        }
    }

    /// Requests pieces from the store, as long as there are places for them. Returns whether all of them got
    /// one.
    fn request_pieces(
        &self,
        kind: PieceKind,
        keys: &[PageHash],
        batches: &mut VecDeque<Batch>,
    ) -> Result<bool> {
        let FetchRequest { namespace, epochs, .. } = self.request;
        let expect = || self.store_access.tier().expect(kind, keys, namespace, epochs.of(kind));
        let incoming = if kind == PieceKind::Page && self.request.has_events {
            // The events of evicted pieces come before those of any that arrive again.
            let mut incoming = None;
            self.cache_ref.visit(|cache| incoming = cache.expect_below(&expect));
            incoming
        } else {
            expect()
        };
        let Some(incoming) = incoming.map(Arc::new) else { return Ok(false) };
        let transfer = self.store_access.get(kind, &incoming)?;
        let has_room = !incoming.is_cut;
        batches.push_back(Batch { incoming, transfer });
        Ok(has_room)
    }

    /// Returns the pages at `places` of the prompt, as the cache's events report them.
    fn runs(&self, keys: &[PageHash], places: &[usize]) -> Vec<OfferedPages> {
        let FetchRequest { namespace, tokens, continuation, .. } = self.request;
        let page_size = self.page_size();
        places
            .chunk_by(|one, next| one + 1 == *next)
            .map(|run| {
                let (begin, end) = (run[0], run[0] + run.len());
                OfferedPages {
                    pages: Vec::new(),
                    keys: keys[begin..end].to_vec(),
                    namespace: namespace.clone(),
                    parent: begin
                        .checked_sub(1)
                        .map_or(continuation.chain.last(), |before| Some(keys[before])),
                    tokens: tokens[begin * page_size..end * page_size].to_vec(),
                }
            })
            .collect()
    }

    /// Records pages that arrived in the cache's events.
    fn record_arrived(&self, arrived: &[OfferedPages]) {
        if self.request.has_events && !arrived.is_empty() {
            self.cache_ref.visit(|cache| cache.record_arrived_below(arrived));
        }
    }
}
