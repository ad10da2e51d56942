//! The prefix cache of a [`CacheArena`]: units of all groups of a layout, found by their tokens.

mod cache_core;
mod lease;
mod leased;
mod queue;
mod store_link;
mod tier_link;

use std::fmt;
use std::sync::{Arc, Weak};

use crate::base::{Device, Error, ErrorKind, Result, Slot};
use crate::base::{Id, check_memory};
use crate::cache::{
    CacheEvent, CachedPage, Digest, GroupExplanation, GroupHold, GroupTree, Namespace, PolicyKind,
    PrefillCost, Tokens, TreeStats,
};

use super::contract::{Pool, Stats};
use super::session::Session;
use super::{ArenaHostTier, CacheArena, CachedSizes, LowerStore};
use cache_core::{ArenaCacheCore, CachedKind, LowerMemory};
use lease::TierBelow;
use tier_link::TierLink;

pub use lease::{ArenaLease, ArenaPublished};
pub use store_link::ArenaFetch;

/// Settings of an [`ArenaPrefixCache`].
#[derive(Clone, Copy, Debug)]
pub struct ArenaPrefixCacheConfig {
    /// The policy by which leaves are evicted.
    pub policy: PolicyKind,
    /// What a token is worth by its position, in the last tier before a store. Without it, all are worth the same.
    pub cost: Option<PrefillCost>,
    /// Hashes the keys of pages for [`ArenaPrefixCache::take_events`]; without it there are no events.
    pub events: Option<Digest>,
}

/// The tiers below an [`ArenaPrefixCache`].
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::DType;
/// use kvpool::cache::{Namespace, PolicyKind};
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
/// use kvpool::memory::{Backend, Host};
/// use kvpool::pool::{
///     ArenaFetch, ArenaHostTier, ArenaHostTierConfig, ArenaLowerTier, ArenaPrefixCache, ArenaPrefixCacheConfig,
///     CacheArena, CacheArenaConfig,
/// };
/// let k = vec![Plane::new("k", DType::BF16, &[2, 64]).unwrap()];
/// let full = Group::new("full", GroupKind::Full, &[0], k).unwrap();
/// let config = CacheArenaConfig {
///     layout: CacheLayout::new("a model", 2, vec![full]).unwrap(),
///     arena_bytes: 1 << 16, floors: Vec::new(), slabs: SlabOptions::default(), strict: true,
/// };
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let arena = Arc::new(CacheArena::new(&config, &host).unwrap());
/// let config = ArenaHostTierConfig {
///     tier_bytes: 1 << 18, pin_memory: false, page_lock_threads: 1, staging_bytes: 0,
/// };
/// // Take BLAKE3 or SHA-256.
/// fn digest(parts: &[&[u8]]) -> [u8; 32] {
///     let mix = |sum: u64, &byte: &u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
///     [parts.concat().iter().fold(0, mix).to_le_bytes(); 4].concat().try_into().unwrap()
/// }
/// let tier = Arc::new(ArenaHostTier::new(&config, &arena, &host).unwrap());
/// let below = ArenaLowerTier { host: tier, digest, store: None };
/// let config = ArenaPrefixCacheConfig { policy: PolicyKind::Lru, cost: None, events: None };
/// let cache = ArenaPrefixCache::with_tier(config, arena, Some(below)).unwrap();
/// let prompt: &[i32] = &[5, 6, 7, 8];
/// let lease = cache.match_prefix(&Namespace::Unnamed, &prompt, 4).unwrap();
/// assert_eq!((lease.len().unwrap(), lease.loadable().unwrap()), (0, 0));
/// let fetch: ArenaFetch = cache.fetch(&Namespace::Unnamed, &prompt, 4).unwrap();
/// assert!(fetch.is_over() && fetch.is_empty(), "there is no store");
/// ```
#[derive(Clone, Debug)]
pub struct ArenaLowerTier {
    /// Host memory, for this cache alone.
    pub host: Arc<ArenaHostTier>,
    /// Hashes the keys of pages.
    pub digest: Digest,
    /// The store below host memory.
    pub store: Option<LowerStore>,
}

/// Counts of an [`ArenaPrefixCache`] since it was made, in tokens unless the name says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArenaPrefixCounts {
    /// Calls of [`ArenaPrefixCache::match_prefix`].
    pub lookups: usize,
    /// Tokens found by look-ups.
    pub hit_tokens: usize,
    /// Tokens looked up and not found.
    pub missed_tokens: usize,
    /// Tokens published.
    pub published: usize,
    /// Tokens that others had published in between.
    pub duplicates: usize,
    /// Tokens that came back from the tier below.
    pub loaded: usize,
    /// Tokens evicted.
    pub evicted: usize,
    /// The numbers of units of each group that were evicted.
    pub evicted_units: Vec<usize>,
}

/// What a cache has of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedUnits {
    /// Numbers of units in the cache; those of snapshots, for states.
    pub units: usize,
    /// The tokens that the units stand for; 0 for states.
    pub tokens: usize,
    /// Units of windows and chunks that no lease needs and no prefix at which a request is expected to go on.
    pub unneeded: usize,
    /// Numbers of units that were evicted.
    pub evicted: usize,
}

/// Keeps the units of requests by their tokens, so that a request that begins like an earlier one does not compute
/// them again. Calls are atomic and thread-safe.
///
/// A prefix is found up to the last page at which every group can go on: with all units of full groups, the last
/// window of window groups, those since the begin of the chunk, the sinks, and a snapshot of the state exactly there.
///
/// Cached units belong to the cache: frees of the arena do not remove them. Requests hold [`ArenaLease`]s, which lock
/// what a request needs to go on; the units of a window that are behind it may be evicted. A call of the arena that is
/// short evicts what is worth least. Clearing the arena empties the cache and ends its leases.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::DType;
/// use kvpool::cache::{Namespace, PolicyKind};
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
/// use kvpool::memory::{Backend, Host};
/// use kvpool::pool::{
///     ArenaLease, ArenaPrefixCache, ArenaPrefixCacheConfig, ArenaPrefixCounts, ArenaPublished, CacheArena,
///     CacheArenaConfig, CachedUnits,
/// };
/// let k = || vec![Plane::new("k", DType::BF16, &[2, 64]).unwrap()];
/// let layout = CacheLayout::new("a model with a window", 2, vec![
///     Group::new("full", GroupKind::Full, &[0], k()).unwrap(),
///     Group::new("window", GroupKind::Window { tokens: 3, sinks: 0 }, &[1], k()).unwrap(),
/// ]).unwrap();
/// let config = CacheArenaConfig {
///     layout, arena_bytes: 1 << 16, floors: Vec::new(), slabs: SlabOptions::default(), strict: true,
/// };
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let arena = Arc::new(CacheArena::new(&config, &host).unwrap());
/// let config = ArenaPrefixCacheConfig { policy: PolicyKind::Lru, cost: None, events: None };
/// let cache = ArenaPrefixCache::new(config, Arc::clone(&arena)).unwrap();
///
/// let prompt: &[i32] = &[5, 6, 7, 8, 9];
/// let lease: Arc<ArenaLease> = cache.match_prefix(&Namespace::Unnamed, &prompt, 4).unwrap();
/// assert_eq!(lease.len().unwrap(), 0);
/// let taken = arena.alloc(&[2, 1]).unwrap().unwrap();
/// // The window's first page is behind it.
/// let units = [taken[0].iter().copied().map(Some).collect(), vec![None, Some(taken[1][0])]];
/// let published: ArenaPublished = lease.publish(&&prompt[..4], &units).unwrap();
/// assert_eq!((published.length, published.duplicates), (4, 0));
/// drop(lease);
/// assert_eq!(cache.match_prefix(&Namespace::Unnamed, &prompt, 4).unwrap().len().unwrap(), 4);
/// let ArenaPrefixCounts { lookups, hit_tokens, .. } = cache.counts();
/// assert_eq!((lookups, hit_tokens), (2, 4));
/// let CachedUnits { units, tokens, .. } = cache.group_counts(0).unwrap();
/// assert_eq!((units, tokens), (2, 4));
/// ```
pub struct ArenaPrefixCache {
    core: Arc<ArenaCacheCore>,
    tier: Option<Arc<TierLink>>,
}

impl ArenaPrefixCache {
    /// Creates an empty cache of units of `arena`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when the host has no memory for it.
    pub fn new(config: ArenaPrefixCacheConfig, arena: Arc<CacheArena>) -> Result<Self> {
        Self::with_tier(config, arena, None)
    }

    /// Works like [`Self::new`], with a tier below, for this cache alone: [`ArenaLease::save`] copies what was published
    /// there, and [`ArenaLease::load`] copies back what was evicted meanwhile.
    ///
    /// # Errors
    /// See [`Self::new`]; also [`ErrorKind::Config`] for the tier of another arena or of another cache.
    pub fn with_tier(
        config: ArenaPrefixCacheConfig,
        arena: Arc<CacheArena>,
        tier: Option<ArenaLowerTier>,
    ) -> Result<Self> {
        check_memory(0)?;
        if tier.as_ref().is_some_and(|tier| !Arc::ptr_eq(tier.host.arena(), &arena)) {
            return Err(Error::config("the host tier is for another arena"));
        }
        let contents = CachedKind::of(&arena);
        let tier = tier.map(|tier| TierLink::new(tier, config, &contents).map(Arc::new)).transpose()?;
        let below = tier.clone().map(|tier| tier as Arc<dyn LowerMemory>);
        Ok(Self { core: ArenaCacheCore::new(config, arena, contents, below), tier })
    }

    /// Returns whether nothing is on its way to the tier and the store below.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when the device has failed.
    pub fn is_written(&self) -> Result<bool> {
        self.tier.as_ref().map_or(Ok(true), |tier| tier.is_written())
    }

    /// Starts to fetch what the store has of the first `limit` of `tokens`, and the tier has not, to the tier. Does not wait.
    ///
    /// # Errors
    /// The error of tokens that cannot be read; [`ErrorKind::OutOfMemory`] when no thread can be started.
    pub fn fetch(&self, namespace: &Namespace, tokens: &dyn Tokens, limit: usize) -> Result<ArenaFetch> {
        let tier = self.tier.as_ref();
        tier.map_or_else(|| Ok(ArenaFetch::over()), |tier| tier.fetch(namespace, tokens, limit))
    }

    /// Returns the arena of the units.
    #[must_use]
    pub fn arena(&self) -> &Arc<CacheArena> {
        &self.core.arena
    }

    /// Returns the settings.
    #[must_use]
    pub fn config(&self) -> &ArenaPrefixCacheConfig {
        &self.core.config
    }

    /// Leases the longest cached prefix of `tokens`, of at most `limit` tokens, at which every group can go on.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for a number that is no token id; the error of tokens that cannot be read.
    pub fn match_prefix(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<Arc<ArenaLease>> {
        self.match_with(namespace, tokens, limit, |groups| groups.match_prefix(namespace, tokens, limit))
    }

    /// Works like [`Self::match_prefix`], for a turn of a session, which ends with the lease. The tier below is not told
    /// of it.
    ///
    /// # Errors
    /// See [`Self::match_prefix`]; also [`ErrorKind::Argument`] for a session of another cache.
    pub fn match_in_session(
        &self,
        session: &Session,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<Arc<ArenaLease>> {
        let id = session.id_in(&self.core)?;
        self.match_with(namespace, tokens, limit, |groups| {
            groups.match_in_session(id, namespace, tokens, limit)
        })
    }

    /// Returns the session with a name; a session like no other for [`Namespace::Unnamed`].
    #[must_use]
    pub fn session(&self, name: Namespace) -> Session {
        let core: Weak<ArenaCacheCore> = Arc::downgrade(&self.core);
        Session::new(core, name, &self.core.unnamed_sessions)
    }

    /// Leases what `find` holds, and counts it as a look-up.
    fn match_with(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        find: impl FnOnce(&mut GroupTree) -> Result<GroupHold>,
    ) -> Result<Arc<ArenaLease>> {
        let len = limit.min(tokens.count());
        let below = self.tier.clone().map(|tier| Ok((tier as Arc<dyn TierBelow>, tokens.to_vec(0..len)?)));
        ArenaLease::with_hold(&self.core, namespace, below.transpose()?, |cache| {
            let hold = find(&mut cache.groups)?;
            cache.counts.lookups += 1;
            cache.counts.hit_tokens += hold.len();
            cache.counts.missed_tokens += tokens.count() - hold.len();
            Ok(hold)
        })
    }

    /// Returns the tokens that [`Self::match_prefix`] would find. Changes nothing: the prefix is neither leased nor
    /// refreshed.
    ///
    /// # Errors
    /// The error of tokens that cannot be read.
    pub fn cached_len(&self, namespace: &Namespace, tokens: &dyn Tokens, limit: usize) -> Result<usize> {
        self.core.current().groups.cached_len(namespace, tokens, limit)
    }

    /// Returns the tokens that [`Self::match_prefix`] would find, and how far each group could go on alone. Changes
    /// nothing.
    ///
    /// # Errors
    /// See [`Self::match_prefix`].
    pub fn explain(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
    ) -> Result<(usize, Vec<GroupExplanation>)> {
        self.core.current().groups.explain(namespace, tokens)
    }

    /// Gives up the prefixes of a namespace, or all, in the tier too. Those with a lease are no longer found, and are
    /// given up when the lease ends.
    pub fn clear(&self, namespace: Option<&Namespace>) {
        self.core.clear(namespace);
        self.tier.iter().for_each(|tier| tier.clear(namespace));
    }

    /// Takes the events since the last call: which units of each group were cached and given up, in order, on the device
    /// and then in the tier.
    ///
    /// # Errors
    /// [`ErrorKind::State`] for a cache that was made without events.
    pub fn take_events(&self) -> Result<Vec<CacheEvent>> {
        if self.core.config.events.is_none() {
            return Err(Error::state("the prefix cache was made without events"));
        }
        let mut events = self.core.current().groups.take_events();
        let below = self.tier.as_ref().map_or(Vec::new(), |tier| tier.take_events());
        // A journal that starts over begins with that. A reader then forgets both, and knows what comes behind it.
        let starts_over = |events: &[CacheEvent]| matches!(events.first(), Some(CacheEvent::Cleared));
        if starts_over(&below) && !starts_over(&events) {
            events.insert(0, CacheEvent::Cleared);
        }
        events.extend(below.into_iter().filter(|event| !matches!(event, CacheEvent::Cleared)));
        Ok(events)
    }

    /// Returns the tokens that no lease holds, and those that leases hold.
    #[must_use]
    pub fn sizes(&self) -> CachedSizes {
        let TreeStats { evictable, locked, .. } = self.core.current().groups.stats();
        CachedSizes { evictable, locked }
    }

    /// Returns what the cache has of a group.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for a group that does not exist.
    pub fn group_counts(&self, group: usize) -> Result<CachedUnits> {
        let layout = self.core.arena.layout();
        let declared = layout.groups().get(group).ok_or_else(|| {
            Error::argument(format!("group {group} is outside [0, {})", layout.groups().len()))
        })?;
        let cache = self.core.current();
        let units = cache.groups.units_of(group);
        let tokens = declared.unit_tokens(layout.page_size()).map_or(0, |tokens| units * tokens);
        let unneeded = cache.groups.unneeded(group);
        Ok(CachedUnits { units, tokens, unneeded, evicted: cache.counts.evicted_units[group] })
    }

    /// Returns the counters since the cache was created.
    #[must_use]
    pub fn counts(&self) -> ArenaPrefixCounts {
        self.core.state.lock().counts.clone()
    }

    /// Returns every page that can be found, with the units that end there: for tests and debugging.
    #[must_use]
    pub fn contents(&self) -> Vec<CachedPage> {
        self.core.current().groups.contents()
    }

    /// Checks every invariant but those that need the list of all leases.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`] with the broken invariant.
    pub fn verify(&self) -> Result<()> {
        let cache = self.core.current();
        match cache.groups.broken_invariant(None) {
            None => Ok(()),
            Some(fault) => {
                let text = format!("the prefix cache is inconsistent: {fault}");
                Err(Error::new(ErrorKind::IndexOwnership, text))
            }
        }
    }
}

impl Drop for ArenaPrefixCache {
    /// Waits for copies to the tier, which is free for another cache then.
    fn drop(&mut self) {
        self.tier.iter().for_each(|tier| tier.close());
    }
}

impl Pool for ArenaPrefixCache {
    fn unit(&self) -> &'static str {
        Slot::NOUN
    }

    /// Returns false, because the units of a cache are those of the arena.
    fn hands_out(&self) -> bool {
        false
    }

    fn device(&self) -> Device {
        self.core.arena.device()
    }

    fn strict(&self) -> bool {
        self.core.arena.config().strict
    }

    fn stats(&self) -> Stats {
        let cache = self.core.current();
        let (tree, counts) = (cache.groups.stats(), &cache.counts);
        let groups = 0..cache.groups.groups().len();
        Stats::from([
            ("capacity", cache.capacity),
            ("lookups", counts.lookups),
            ("hit_tokens", counts.hit_tokens),
            ("missed_tokens", counts.missed_tokens),
            ("published", counts.published),
            ("duplicates", counts.duplicates),
            ("loaded", counts.loaded),
            ("evicted", counts.evicted),
            ("cached", tree.cached),
            ("evictable", tree.evictable),
            ("locked", tree.locked),
            ("units", groups.map(|group| cache.groups.units_of(group)).sum()),
            ("evicted_units", counts.evicted_units.iter().sum()),
            ("nodes", tree.nodes),
            ("snapshots", cache.groups.snapshots()),
            ("waiting", tree.waiting),
            ("bytes", tree.bytes),
        ])
    }
}

impl fmt::Debug for ArenaPrefixCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaPrefixCache").field("config", &self.core.config).finish_non_exhaustive()
    }
}
