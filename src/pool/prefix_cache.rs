//! The prefix cache: cached pages of a [`TokenToKvPoolAllocator`], found by their tokens.

mod backing;
mod cache_core;
mod config;
mod fetch;
mod home;
mod lease;
mod lease_state;
mod load;
mod loading;
mod lock;
mod pages;
mod pins;
mod publish;
mod put_queue;
mod queue;
mod released;
mod request;
mod stale;
mod store_access;
mod taken_slot;
mod tier_link;
mod turns;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{Device, Error, Id, Result, Slot, check_memory};
use crate::cache::{
    AGE_BUCKETS, CacheEvent, Cause, Hold, LowerTierContents, Namespace, Pressure, Segment, Tokens, Tree,
    TreeStats, WritePolicy,
};
use crate::index::Owner;
use crate::memory::Stream;

use super::contract::{Pool, Stats};
use super::{GdnPool, HostTier, Reclaim, TokenToKvPoolAllocator};
use cache_core::{CacheCall, CacheCore, CacheState, new_tree, resume_at};
use fetch::{FetchRequest, TierEpochs};
use home::CacheRef;
use loading::Loadable;
use tier_link::TierLink;

pub use config::{LowerStore, LowerTier, PrefixCacheConfig, PrefixCounts};
pub use fetch::Fetch;
pub use lease::Lease;
pub use load::Load;
pub(super) use lock::FencedLock;
pub use publish::{Publication, Published};
pub use request::FinishedRequests;
pub(super) use request::{LeaseId, LeaseKeeper, LeasedRequest, LeasingRequest};

/// Cached tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedSizes {
    /// Tokens that no lease holds.
    pub evictable: usize,
    /// Tokens that leases hold.
    pub locked: usize,
}

/// Keeps the K and V of requests by their tokens, so that a request that begins like an earlier one does not
/// compute them again. Calls are atomic and thread-safe.
///
/// Cached pages belong to the cache: frees do not remove them. Requests hold [`Lease`]s. A call of the
/// allocator that is short of slots evicts pages without a lease. Clearing the allocator empties the cache
/// and ends its leases.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::IndexVec;
/// use kvpool::cache::{Namespace, PolicyKind};
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, Publication, PrefixCache, PrefixCacheConfig, TokenToKvPoolAllocator};
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let config = AllocatorConfig { page_size: 2, ..AllocatorConfig::new(8) };
/// let allocator = Arc::new(TokenToKvPoolAllocator::new(&config, &host).unwrap());
/// let config = PrefixCacheConfig {
///     policy: PolicyKind::Adaptive, cost: None, max_pinned: 0.5, name: "cache".into(), events: None,
/// };
/// let cache = PrefixCache::new(config, Arc::clone(&allocator), None, None).unwrap();
/// let prompt: &[i32] = &[5, 6, 7, 8, 9];
/// let lease = cache.match_prefix(&Namespace::Unnamed, &prompt, 4, stream).unwrap();
/// assert_eq!(lease.len().unwrap(), 0);
/// let slots = IndexVec::I32(vec![2, 3, 4, 5]);
/// drop(allocator.alloc(4, stream).unwrap().unwrap().keep());
/// let publication = Publication { tokens: &&prompt[..4], slots: Some(&slots), state: None };
/// let published = lease.publish(&publication, stream).unwrap();
/// assert_eq!((published.length, cache.tree_stats(stream).locked), (4, 4));
/// drop(lease);
/// assert_eq!(cache.match_prefix(&Namespace::Unnamed, &prompt, 4, stream).unwrap().len().unwrap(), 4);
/// assert!(allocator.alloc(8, stream).unwrap().is_some(), "the prefix is evicted");
/// ```
pub struct PrefixCache {
    shared: Arc<CacheCore>,
    allocator: Arc<TokenToKvPoolAllocator>,
    /// The reference by which the threads of the store reach the cache.
    cache_ref: Option<Arc<CacheRef>>,
}

impl PrefixCache {
    /// Creates an empty cache of pages of `allocator`. With `states`, a prefix is found only up to a snapshot
    /// of the state at its end. Pages that were copied to the `tier` below can be [loaded](Lease::load) after
    /// they are evicted.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when `max_pinned` is not a share, the pools are
    /// on different devices, or the tier is for other pools or belongs to another cache.
    pub fn new(
        config: PrefixCacheConfig,
        allocator: Arc<TokenToKvPoolAllocator>,
        states: Option<Arc<GdnPool>>,
        tier: Option<LowerTier>,
    ) -> Result<Self> {
        if !(0.0..=1.0).contains(&config.max_pinned) {
            return Err(Error::config(format!("max_pinned {} is outside [0, 1]", config.max_pinned)));
        }
        if let Some(states) = states.as_ref().filter(|states| states.device() != allocator.device()) {
            return Err(Error::config(format!(
                "the allocator is on {}, the states are on {}; a prefix cache needs both on one device",
                allocator.device(),
                states.device()
            )));
        }
        let below = tier.map(|tier| {
            fits_tier(&tier.host, &allocator, states.as_ref())?;
            TierLink::new(tier)
        });
        let below = below.transpose()?;
        check_memory(0)?;
        let tree = new_tree(&config, &allocator, resume_at(states.as_ref()), below.as_ref());
        let epoch = allocator.lock().epoch();
        let cache = CacheState::new(tree, epoch, below);
        let owner = Owner::Text(config.name.clone());
        let weak = Arc::downgrade(&allocator);
        let shared = Arc::new(CacheCore {
            allocator: weak,
            states,
            config,
            owner,
            unnamed_sessions: AtomicU64::new(0),
            state: RankedMutex::new(LockRank::Cache, cache),
        });
        let cache_ref = shared.state.lock().cache_ref();
        if let Some(cache_ref) = &cache_ref {
            cache_ref.begin(Arc::downgrade(&shared) as _);
        }
        let reclaim: Arc<dyn Reclaim> = Arc::clone(&shared) as _;
        allocator.on_shortage(&reclaim);
        Ok(Self { shared, allocator, cache_ref })
    }

    /// Returns the allocator of the pages.
    #[must_use]
    pub const fn allocator(&self) -> &Arc<TokenToKvPoolAllocator> {
        &self.allocator
    }

    fn begin_call(&self, stream: Stream) -> CacheCall<'_> {
        self.shared.begin_call(&self.allocator, stream)
    }

    /// Leases the longest cached prefix of `tokens`, in whole pages and of at most `limit` tokens.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a number that is no token id; the error of
    /// tokens that cannot be read.
    pub fn match_prefix(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        stream: Stream,
    ) -> Result<Arc<Lease>> {
        self.match_with(namespace, tokens, limit, stream, |tree| tree.match_prefix(namespace, tokens, limit))
    }

    /// Leases what `find` finds.
    fn match_with(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        stream: Stream,
        find: impl FnOnce(&mut Tree) -> Result<Hold>,
    ) -> Result<Arc<Lease>> {
        let call = self.begin_call(stream);
        let mut cache = call.current();
        let hold = find(&mut cache.tree)?;
        call.copy_offers_to_tier(&mut cache);
        cache.counts.lookups += 1;
        cache.counts.hit_tokens += hold.len();
        cache.counts.missed_tokens += tokens.count() - hold.len();
        let loadable = match &cache.below {
            Some(below) => below.loadable(&cache.tree, &hold, namespace, tokens, limit),
            None => Ok(Loadable::default()),
        };
        let epoch = cache.epoch();
        drop(cache);
        let lease = Lease::new(&self.shared, &self.allocator, hold, epoch, namespace.clone(), stream);
        lease.set_loadable(loadable?);
        Ok(Arc::new(lease))
    }

    /// Evicts at least `tokens` tokens, or all that are evictable, and returns the number of their slots.
    #[expect(clippy::must_use_candidate, reason = "callers that make room need no number")]
    pub fn evict(&self, tokens: usize, stream: Stream) -> usize {
        self.begin_call(stream).evict(tokens, Pressure::Evict)
    }

    /// Gives up the prefixes of a namespace, or all, pinned or not. Those with a lease are no longer found,
    /// and are given up when the lease ends.
    pub fn clear(&self, namespace: Option<&Namespace>, stream: Stream) {
        let call = self.begin_call(stream);
        let mut cache = call.current();
        for pinned in cache.pins.take(namespace) {
            let evicted = cache.tree.unpin(pinned);
            call.give_back(&cache, evicted);
        }
        let evicted = cache.tree.clear(namespace, Cause { pressure: Pressure::Clear, at: Instant::now() });
        if let CacheState { below: Some(below), tree, .. } = &mut *cache {
            // The offers are of pages that are given back now.
            drop(tree.take_offers());
            below.forget_tails();
            let keys = below.tier.forget(namespace);
            if namespace.is_some() {
                tree.record_dropped_below(&keys);
            }
        }
        call.give_back(&cache, evicted);
    }

    /// Retains the prefix of a lease. With a `time`, it is not evicted until that time is over, and
    /// `priority` has no effect. Without one, it is evicted after all prefixes that are not retained, the
    /// lowest `priority` first.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for the lease of another cache;
    /// [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) when the prefix was cleared;
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) when more than the share `max_pinned` of the
    /// capacity would be pinned; the errors of a lease.
    pub fn pin(&self, lease: &Lease, time: Option<Duration>, priority: u8, stream: Stream) -> Result<()> {
        let capacity = self.allocator.stats().capacity;
        // The share of a capacity below 2**31 is exact enough in floating point.
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let max = (capacity as f64 * self.shared.config.max_pinned) as usize;
        let until = time.map(|time| {
            let end = Instant::now().checked_add(time);
            end.ok_or_else(|| Error::argument(format!("a pin of {} s has no end", time.as_secs())))
        });
        let until = until.transpose()?;
        lease.with_hold(&self.shared, stream, |cache, hold| {
            if !cache.tree.is_attached(hold) {
                return Err(Error::stale("the prefix was cleared and is not found any more; match again"));
            }
            let pinned = cache.tree.pinned_with(hold);
            if pinned > max {
                return Err(Error::state(format!(
                    "{pinned} tokens would be pinned; max_pinned allows {max} of {capacity}"
                ))
                .with_asked(pinned)
                .with_available(max));
            }
            match until {
                None => cache.tree.retain(hold, priority),
                Some(until) => {
                    let hold = cache.tree.pin(hold);
                    cache.pins.insert(hold, until, lease.namespace());
                }
            }
            Ok(())
        })
    }

    /// Returns the tokens of the longest cached prefix of `tokens`, in whole pages. Changes nothing: the
    /// prefix is neither leased nor refreshed.
    ///
    /// # Errors
    /// The error of tokens that cannot be read.
    pub fn cached_len(&self, namespace: &Namespace, tokens: &dyn Tokens, stream: Stream) -> Result<usize> {
        self.begin_call(stream).current().tree.cached_len(namespace, tokens)
    }

    /// Explains where the parts of a prompt are cached, or why they are not. Changes nothing. Waits for the
    /// store, if there is one.
    ///
    /// # Errors
    /// See [`Self::match_prefix`].
    pub fn explain(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        stream: Stream,
    ) -> Result<Vec<Segment>> {
        let call = self.begin_call(stream);
        let cache = call.current();
        let lower = cache.below.as_ref().map(|below| below.tier.contents());
        let mut parts = cache.tree.explain(
            namespace,
            tokens,
            lower.as_ref().map(|lower| lower as &dyn LowerTierContents),
        )?;
        drop(lower);
        let backing = cache.below.as_ref().and_then(|below| below.backing.as_ref());
        let store_access = backing.map(|backing| Arc::clone(backing.store_access()));
        let continuation = cache.tree.continuation(namespace, tokens, usize::MAX)?;
        drop(cache);
        if let (Some(store_access), Some(continuation)) = (store_access, continuation) {
            let usable = continuation.usable;
            let rest = tokens.to_vec(usable..tokens.count())?;
            let available = match store_access.find_available(continuation, &rest, || true) {
                // A signal interrupted the wait for the store.
                Err(failure) if failure.is_foreign() => return Err(failure),
                // A store that fails reports it itself, and counts as empty here.
                available => available.unwrap_or_default(),
            };
            let page_size = self.allocator.page_size();
            Segment::mark_stored(&mut parts, usable + available.keys.len() * page_size);
        }
        Ok(parts)
    }

    /// Begins to fetch the pages of the first `limit` of `tokens` from the store to the host tier. Does not
    /// wait; prompts are fetched one after the other, and the fetch of one that needs nothing from the store is
    /// over at once. At any time, [`Self::match_prefix`] finds how much can be loaded.
    ///
    /// # Errors
    /// See [`Self::match_prefix`]; also [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when
    /// no thread can be started.
    pub fn fetch(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        stream: Stream,
    ) -> Result<Fetch> {
        let call = self.begin_call(stream);
        let mut cache = call.current();
        let Some(continuation) = cache.tree.continuation(namespace, tokens, limit)? else {
            return Ok(Fetch::empty());
        };
        let CacheState { below: Some(below), tree, .. } = &mut *cache else { return Ok(Fetch::empty()) };
        below.record_uses(tree);
        let Some(backing) = &below.backing else { return Ok(Fetch::empty()) };
        let page_size = tree.page_size();
        let pages = (limit.min(tokens.count()) - continuation.usable) / page_size;
        let pages = pages.min(below.tier.config().size / page_size);
        if pages == 0 {
            return Ok(Fetch::empty());
        }
        let sought = FetchRequest {
            namespace: namespace.clone(),
            tokens: tokens.to_vec(continuation.usable..continuation.usable + pages * page_size)?,
            continuation,
            epochs: TierEpochs::of_tier(&below.tier),
            has_events: self.shared.config.events.is_some(),
        };
        Fetch::begin(backing, sought)
    }

    /// Returns why the tier below can never have anything that the device lacks, in words, if that is so.
    #[must_use]
    pub fn useless_tier(&self) -> Option<String> {
        let cache = self.shared.state.lock();
        let below = cache.below.as_ref()?;
        let (config, capacity) = (below.tier.config(), self.allocator.stats().capacity);
        let is_useless =
            config.write == WritePolicy::Through && below.backing.is_none() && config.size <= capacity;
        is_useless.then(|| {
            format!(
                "a HostTier of {} tokens with write=\"through\" has only what the device has, which keeps {capacity}: nothing can be loaded from it; make it larger, or pass write=\"back\"",
                config.size
            )
        })
    }

    /// Returns the tier below, if there is one.
    #[must_use]
    pub fn tier(&self) -> Option<Arc<HostTier>> {
        self.shared.state.lock().below.as_ref().map(|below| Arc::clone(&below.tier))
    }

    /// Takes the events since the last call, in order.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) for a cache that was made without events.
    pub fn take_events(&self, stream: Stream) -> Result<Vec<CacheEvent>> {
        if self.shared.config.events.is_none() {
            return Err(Error::state("the prefix cache was made without events"));
        }
        Ok(self.begin_call(stream).current().tree.take_events())
    }

    /// Waits up to `timeout` until no copy to host memory and no write to the store is in progress. Returns
    /// whether none is.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the device has failed, which ends no copy.
    pub fn wait_written(&self, timeout: Duration, stream: Stream) -> Result<bool> {
        /// The polling interval, which is shorter than a copy.
        const PAUSE: Duration = Duration::from_micros(200);
        let begin = Instant::now();
        loop {
            let call = self.begin_call(stream);
            let is_written = call.current().below.as_ref().map_or(Ok(true), TierLink::is_written)?;
            drop(call);
            let left = timeout.saturating_sub(begin.elapsed());
            if is_written || left.is_zero() {
                return Ok(is_written);
            }
            std::thread::sleep(left.min(PAUSE));
        }
    }

    /// Returns the evictable and locked tokens, at the cost of a lock.
    #[must_use]
    pub fn sizes(&self, stream: Stream) -> CachedSizes {
        let call = self.begin_call(stream);
        let cache = call.current();
        let loading = cache.loading_pages * cache.tree.page_size();
        CachedSizes { evictable: cache.tree.evictable(), locked: cache.tree.locked() + loading }
    }

    /// Returns the statistics of the tree, in tokens.
    #[must_use]
    pub fn tree_stats(&self, stream: Stream) -> TreeStats {
        let call = self.begin_call(stream);
        call.current().stats()
    }

    /// Returns the counters since the cache was created.
    #[must_use]
    pub fn counts(&self) -> PrefixCounts {
        self.shared.state.lock().counts
    }

    /// Returns all statistics, read at the same time, without checking whether the allocator was cleared or a
    /// pin is over.
    pub(super) fn numbers(&self) -> (TreeStats, PrefixCounts) {
        let cache = self.shared.state.lock();
        (cache.stats(), cache.counts)
    }

    /// Returns the numbers of evicted tokens that had an age below 1, 2, 4, ... when they were evicted: the
    /// tokens looked up since their last use.
    #[must_use]
    pub fn eviction_ages(&self) -> [u64; AGE_BUCKETS] {
        self.shared.state.lock().tree.eviction_ages()
    }

    /// Checks every invariant.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) with the broken invariant.
    pub fn verify(&self, stream: Stream) -> Result<()> {
        let call = self.begin_call(stream);
        let cache = call.current();
        let (cached, owned) = (cache.stats().cached, self.allocator.stats().cached);
        let snapshots = cache.stats().snapshots;
        let tracks = self.shared.states.as_ref().map_or(0, |states| states.cached());
        let fault = cache.tree.broken_invariant().or_else(|| {
            if cached > owned {
                Some(format!("{cached} slots are cached, the cache owns {owned}"))
            } else {
                (snapshots > tracks)
                    .then(|| format!("{snapshots} snapshots are cached, the cache owns {tracks} track slots"))
            }
        });
        fault.map_or(Ok(()), |fault| {
            let text = format!("the prefix cache is inconsistent: {fault}");
            Err(Error::new(crate::base::ErrorKind::IndexOwnership, text))
        })
    }
}

impl Pool for PrefixCache {
    fn unit(&self) -> &'static str {
        Slot::NOUN
    }

    /// Returns false, because the slots of a cache are units of the allocator.
    fn hands_out(&self) -> bool {
        false
    }

    fn device(&self) -> Device {
        self.allocator().device()
    }

    fn strict(&self) -> bool {
        self.allocator().strict()
    }

    fn stats(&self) -> Stats {
        let (tree, counts) = self.numbers();
        Stats::from([
            ("capacity", self.allocator().stats().capacity),
            ("lookups", counts.lookups),
            ("hit_tokens", counts.hit_tokens),
            ("missed_tokens", counts.missed_tokens),
            ("published", counts.published),
            ("duplicates", counts.duplicates),
            ("evicted", counts.evicted),
            ("loaded", counts.loaded),
            ("cached", tree.cached),
            ("evictable", tree.evictable),
            ("locked", tree.locked),
            ("nodes", tree.nodes),
            ("snapshots", tree.snapshots),
            ("waiting", tree.waiting),
            ("bytes", tree.bytes),
        ])
    }
}

impl Drop for PrefixCache {
    fn drop(&mut self) {
        self.cache_ref.iter().for_each(|cache_ref| cache_ref.end());
    }
}

impl fmt::Debug for PrefixCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixCache").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

/// Checks that a tier is for the pools of a cache.
fn fits_tier(
    tier: &HostTier,
    allocator: &TokenToKvPoolAllocator,
    states: Option<&Arc<GdnPool>>,
) -> Result<()> {
    let kv = tier.kv();
    let (page_size, size) = (allocator.page_size(), allocator.inspect(|slots| slots.size()));
    if (kv.device(), kv.config().page_size) != (allocator.device(), page_size) || kv.config().size < size {
        return Err(Error::config(format!(
            "the host tier is for {} slots on {} in pages of {}, the allocator has {size} on {} in pages of {page_size}",
            kv.config().size,
            kv.device(),
            kv.config().page_size,
            allocator.device()
        )));
    }
    match (tier.states(), states) {
        (None, None) => Ok(()),
        (Some(below), Some(states)) if Arc::ptr_eq(below, states) => Ok(()),
        (None, Some(_)) => Err(Error::config("the cache has states, the host tier has none")),
        (Some(_), None) => Err(Error::config("the host tier has states, the cache has none")),
        (Some(_), Some(_)) => Err(Error::config("the host tier is for another pool of states")),
    }
}
