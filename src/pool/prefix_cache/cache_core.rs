//! The state that a prefix cache shares with its leases, loads and fetches, and the guard of one call.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::base::lock_order::{RankedGuard, RankedMutex};
use crate::base::{Discarded, Epoch, Page, Result, StateSlot};
use crate::cache::{
    BlockTokens, Cause, Evicted, Hold, OfferedPages, PolicyKind, Pressure, ResumeAt, Tree, TreeStats,
    WritePolicy,
};
use crate::index::Owner;
use crate::memory::Stream;
use crate::pool::host_tier::IncomingPieces;
use crate::pool::token_to_kv_pool_allocator::AllocatorCall;
use crate::pool::{GdnPool, Obtainable, Reclaim, TokenToKvPoolAllocator};

use super::config::{PrefixCacheConfig, PrefixCounts};
use super::home::{CacheHome, CacheRef};
use super::loading::SharedLoad;
use super::pins::Pins;
use super::released::{EndedLoad, ReleasedPieces};
use super::tier_link::TierLink;

/// The state that a cache and its leases share.
pub(super) struct CacheCore {
    /// The allocator, by a weak reference: it may own this state through the lock of a prefix that waits for
    /// a fence.
    pub(super) allocator: Weak<TokenToKvPoolAllocator>,
    pub(super) states: Option<Arc<GdnPool>>,
    pub(super) config: PrefixCacheConfig,
    /// The owner of cached pages in the ledger.
    pub(super) owner: Owner,
    /// The number of sessions without a name so far.
    pub(super) unnamed_sessions: AtomicU64,
    pub(super) state: RankedMutex<CacheState>,
}

/// The contents of a cache.
pub(super) struct CacheState {
    pub(super) tree: Tree,
    pub(super) counts: PrefixCounts,
    pub(super) pins: Pins,
    /// The epoch of the allocator in which the cache has its pages.
    epoch: Epoch,
    pub(super) below: Option<TierLink>,
    /// Pages that the tree does not have: they are being loaded from the tier below, or are duplicates of
    /// loaded pages.
    pub(super) loading_pages: usize,
}

/// A call of a cache in progress. Create it before taking any lock.
pub(super) struct CacheCall<'a> {
    pub(super) shared: &'a CacheCore,
    pub(super) slots: AllocatorCall<'a>,
}

impl CacheState {
    pub(super) fn new(tree: Tree, epoch: Epoch, below: Option<TierLink>) -> Self {
        Self { tree, counts: PrefixCounts::default(), pins: Pins::default(), epoch, below, loading_pages: 0 }
    }

    /// Returns the epoch in which its holds and pages are valid.
    pub(super) const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Waits for the copies to the tier below, before the cache is dropped.
    pub(super) fn finish_writes(&mut self, allocator: Option<&TokenToKvPoolAllocator>) {
        if let Self { below: Some(below), tree, epoch, .. } = self {
            below.finish(tree, || allocator.is_none_or(|allocator| allocator.lock().epoch() == *epoch));
        }
    }

    /// Returns the reference for the threads of the store, if there is one.
    pub(super) fn cache_ref(&self) -> Option<Arc<CacheRef>> {
        let backing = self.below.as_ref()?.backing.as_ref()?;
        Some(Arc::clone(backing.cache_ref()))
    }

    /// Returns the loads from the tier below that may be in flight. The caller may become their last owner.
    pub(super) fn shared_loads(&self) -> impl Iterator<Item = Arc<SharedLoad>> {
        self.below.iter().flat_map(TierLink::shared_loads)
    }

    /// Publishes the pages of a load that have arrived in the tree, after `hold`, unless that was done before.
    pub(super) fn arrive(&mut self, load: &SharedLoad, hold: &Hold) {
        let tier = self.below.as_ref().map(|below| &*below.tier);
        self.loading_pages -= load.arrive(&mut self.tree, tier, hold);
    }

    pub(super) fn stats(&self) -> TreeStats {
        let tree = self.tree.stats();
        let loading = self.loading_pages * self.tree.page_size();
        TreeStats {
            cached: tree.cached + loading,
            locked: tree.locked + loading,
            bytes: tree.bytes + self.pins.bytes(),
            ..tree
        }
    }
}

impl CacheCore {
    /// Begins a call of the cache, whose allocator is `allocator`, on a stream. Do so before any lock is taken.
    pub(super) fn begin_call<'a>(
        &'a self,
        allocator: &'a TokenToKvPoolAllocator,
        stream: Stream,
    ) -> CacheCall<'a> {
        CacheCall { shared: self, slots: allocator.begin_call(stream) }
    }

    /// Locks the contents of the cache as they are, for a holder of pages since `epoch` of the allocator; `None`
    /// if the cache has left that.
    fn at(&self, epoch: Epoch) -> Option<RankedGuard<'_, CacheState>> {
        Some(self.state.lock()).filter(|cache| cache.epoch == epoch)
    }

    /// Counts pages that are being loaded, unless `epoch` of the allocator is over.
    pub(super) fn add_loading(&self, epoch: Epoch, pages: usize) {
        if let Some(mut cache) = self.at(epoch) {
            cache.loading_pages += pages;
        }
    }

    /// Returns snapshots to their pool.
    fn free_states(&self, slots: &[StateSlot]) {
        if let Some(states) = &self.states {
            for &slot in slots {
                states.free_cached(slot, None, &self.owner);
            }
        }
    }
}

impl CacheCall<'_> {
    /// Locks the contents of the cache, which are emptied if the allocator was cleared. Completes copies that
    /// are over, and ends pins whose time is over.
    pub(super) fn current(&self) -> RankedGuard<'_, CacheState> {
        let mut cache = self.shared.state.lock();
        let allocator = self.slots.allocator();
        // Counted before the epoch is read: copies that were over before a clear have the published
        // contents.
        let completed = cache.below.as_ref().map_or(0, TierLink::completed_writes);
        let epoch = allocator.lock().epoch();
        if cache.epoch != epoch {
            (cache.epoch, cache.loading_pages) = (epoch, 0);
            cache.pins = Pins::default();
            // Its pages are free already.
            let evicted = Evicted { pages: Vec::new(), ..cache.tree.take_all() };
            cache.below.iter_mut().for_each(TierLink::clear);
            let resume_at = resume_at(self.shared.states.as_ref());
            let mut tree = new_tree(&self.shared.config, allocator, resume_at, cache.below.as_ref());
            tree.keep_journal_of(&mut cache.tree);
            tree.keep_ages_of(&cache.tree);
            tree.keep_waiting_of(&mut cache.tree);
            cache.tree = tree;
            self.give_back(&cache, evicted);
        }
        if completed > 0
            && let CacheState { below: Some(below), tree, .. } = &mut *cache
        {
            below.settle(completed, tree);
        }
        if !cache.pins.is_empty() {
            self.end_pins(&mut cache);
        }
        cache
    }

    /// Ends a hold of `epoch`. After a clear of the allocator it is void.
    pub(super) fn release(&self, hold: Hold, epoch: Epoch) {
        if let Some(mut cache) = self.at(epoch) {
            let evicted = cache.tree.release(hold);
            self.give_back(&cache, evicted);
        }
    }

    /// Works like [`Self::current`], for a holder of pages since `epoch` of the allocator; `None` if that is over.
    pub(super) fn at(&self, epoch: Epoch) -> Option<RankedGuard<'_, CacheState>> {
        Some(self.current()).filter(|cache| cache.epoch == epoch)
    }

    /// Copies the pages that the tree offers to the tier below.
    pub(super) fn copy_offers_to_tier(&self, cache: &mut CacheState) {
        if let CacheState { below: Some(below), tree, .. } = cache {
            below.copy_offers(tree, self.slots.stream());
        }
    }

    #[cold]
    pub(super) fn end_pins(&self, cache: &mut CacheState) {
        let now = Instant::now();
        while let Some(pinned) = cache.pins.take_ended(now) {
            let evicted = cache.tree.unpin(pinned);
            self.give_back(cache, evicted);
        }
    }

    pub(super) fn evict(&self, tokens: usize, pressure: Pressure) -> usize {
        let mut cache = self.current();
        let page_size = cache.tree.page_size();
        let (wanted, mut freed) = (tokens.div_ceil(page_size), 0);
        // A page with another owner does not become free.
        while freed < wanted {
            let evicted = cache.tree.evict(wanted - freed, Cause { pressure, at: Instant::now() });
            if evicted.pages.is_empty() {
                break;
            }
            self.copy_offers_to_tier(&mut cache);
            if let Some(below) = &cache.below {
                let pages = evicted.keys.iter().zip(&evicted.histories);
                below.tier.set_evicted_above(pages, cache.tree.now());
            }
            cache.counts.evicted += evicted.pages.len() * page_size;
            freed += self.give_back(&cache, evicted);
        }
        freed * page_size
    }

    /// Returns pages and snapshots to their pools. Returns the number of pages that became free. The caller
    /// holds the lock of `cache`, so that no other call finds these pages in between.
    pub(super) fn give_back(&self, cache: &CacheState, evicted: Evicted) -> usize {
        let Evicted { pages, states, .. } = evicted;
        let below = cache.below.as_ref();
        let page_copies = below.map_or(Vec::new(), |below| below.readers_of(&pages));
        let states = states.into_iter().map(|state| (state, below.and_then(|below| below.write_of(state))));
        let released = ReleasedPieces { pages, page_copies, states: states.collect() };
        self.release_pieces(cache.epoch, released)
    }

    /// Returns pages and snapshots to their pools. Those that copies still use are free as well: the pools
    /// order their next owners behind the copies. So the slots that a call gets do not depend on when copies
    /// end. Returns the number of pages that became free.
    fn release_pieces(&self, epoch: Epoch, released: ReleasedPieces) -> usize {
        let ReleasedPieces { pages, page_copies, states } = released;
        let mut freed = 0;
        if !pages.is_empty() {
            // A cleared allocator has its pages already.
            let _ = self.slots.change(epoch, |mut slots| {
                let before = slots.slots().available();
                slots.add_copied(page_copies);
                slots.slots_mut().release_cached(&pages, None, &self.shared.owner);
                freed = (slots.slots().available() - before) / slots.slots().page_size();
                Ok(())
            });
        }
        if let Some(pool) = &self.shared.states {
            for (slot, copy) in states {
                pool.free_cached(slot, copy, &self.shared.owner);
            }
        }
        freed
    }
}

impl CacheHome for CacheCore {
    fn end_load(&self, ended: EndedLoad) {
        let EndedLoad { epoch, stream, .. } = ended;
        let Some(allocator) = self.allocator.upgrade() else {
            // There are no pages to give back, but the copies still write to the memory of the pools.
            let _ = ended.copy.wait();
            return self.free_states(ended.state.as_slice());
        };
        let call = self.begin_call(&allocator, stream);
        if let Some(mut cache) = self.at(epoch) {
            cache.loading_pages -= ended.pages.len();
        }
        let (hold, pieces) = ended.into_pieces();
        call.release_pieces(epoch, pieces);
        if let Some(hold) = hold {
            call.release(hold, epoch);
        }
    }

    fn expect_below(&self, expect: &dyn Fn() -> Option<IncomingPieces>) -> Option<IncomingPieces> {
        let mut cache = self.state.lock();
        let mut incoming = expect()?;
        cache.tree.record_dropped_below(&std::mem::take(&mut incoming.evicted));
        Some(incoming)
    }

    fn record_arrived_below(&self, arrived: &[OfferedPages]) {
        let mut cache = self.state.lock();
        if let CacheState { below: Some(below), tree, .. } = &mut *cache {
            below.record_arrived(tree, arrived);
        }
    }

    fn complete_copies(&self, stream: Stream) {
        if let Some(allocator) = self.allocator.upgrade() {
            drop(self.begin_call(&allocator, stream).current());
        }
    }
}

impl Reclaim for CacheCore {
    fn obtainable(&self, stream: Stream) -> Obtainable {
        let Some(allocator) = self.allocator.upgrade() else { return Obtainable::default() };
        let call = self.begin_call(&allocator, stream);
        let evictable = call.current().tree.evictable();
        Obtainable { at_once: evictable, behind_fences: 0 }
    }

    fn reclaim(&self, slots: usize, stream: Stream) -> Result<usize> {
        // The allocator makes this call, so it exists.
        let Some(allocator) = self.allocator.upgrade() else { return Ok(0) };
        Ok(self.begin_call(&allocator, stream).evict(slots, Pressure::Alloc))
    }

    fn locked(&self) -> Vec<Page> {
        let discarded = Discarded::new();
        let cache = self.state.lock();
        let mut pages = cache.tree.locked_pages();
        for load in cache.shared_loads() {
            pages.extend(load.pages_in_flight());
            discarded.add(load);
        }
        pages
    }
}

impl Drop for CacheCore {
    fn drop(&mut self) {
        let allocator = self.allocator.upgrade();
        // No other call can reach the cache, so this waits without its lock.
        self.state.get_mut().finish_writes(allocator.as_deref());
        let Some(allocator) = allocator else {
            let evicted = self.state.get_mut().tree.take_all();
            return self.free_states(&evicted.states);
        };
        let call = self.begin_call(&allocator, Stream::default_of(allocator.device()));
        let mut cache = call.current();
        let evicted = cache.tree.take_all();
        call.give_back(&cache, evicted);
    }
}

/// Requests of a model with states can only continue at a snapshot.
pub(super) const fn resume_at(states: Option<&Arc<GdnPool>>) -> ResumeAt {
    if states.is_some() { ResumeAt::Snapshot } else { ResumeAt::AnyPage }
}

/// Returns an empty tree for a cache.
pub(super) fn new_tree(
    config: &PrefixCacheConfig,
    allocator: &TokenToKvPoolAllocator,
    resume_at: ResumeAt,
    below: Option<&TierLink>,
) -> Tree {
    let page_size = crate::base::bounded::narrow(allocator.page_size());
    let capacity = allocator.stats().capacity as u64;
    // What is evicted to a tier is loaded from there, and a token takes as long as any other.
    let cost = config.cost.filter(|_| below.is_none());
    let policy = config.policy.policy(capacity, BlockTokens::of_page_size(page_size), cost);
    let mut tree = Tree::new(allocator.page_size(), resume_at, policy);
    if let Some(digest) = config.events {
        tree.keep_journal(digest);
    }
    if let Some(below) = below {
        // With other ways of writing the tier holds a choice already, of which recency finds more.
        let is_whole = below.tier.config().write == WritePolicy::Through;
        let is_by_worth = is_whole && matches!(config.policy, PolicyKind::Adaptive);
        below.tier.set_policy(if is_by_worth { config.policy } else { PolicyKind::Lru });
        tree.offer(below.tier.config().write, below.digest);
        if is_by_worth || below.backing.is_some() {
            tree.keep_uses();
        }
    }
    tree
}
