//! The state that a cache shares with its leases, and what an arena that is short asks of it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{Epoch, Result};
use crate::cache::{
    Cause, GroupTree, JournalOf, Namespace, Pressure, Relief, SessionId, Tier, UnitNumbers, UnitsToFree,
};
use crate::index::Slabs;
use crate::layout::{CacheLayout, GroupKind};
use crate::memory::Stream;
use crate::pool::session::HasSessions;
use crate::pool::{CacheArena, ReclaimUnits};

use super::{ArenaPrefixCacheConfig, ArenaPrefixCounts};

/// The state that a cache and its leases share.
pub(super) struct ArenaCacheCore {
    /// The arena, which refers to this only weakly.
    pub(super) arena: Arc<CacheArena>,
    pub(super) contents: CachedKind,
    pub(super) config: ArenaPrefixCacheConfig,
    /// The tier below, if there is one.
    tier: Option<Arc<dyn LowerMemory>>,
    pub(super) state: RankedMutex<ArenaCacheState>,
    /// The number of sessions without a name so far.
    pub(super) unnamed_sessions: AtomicU64,
}

/// The memory below a cache, as a cache that gives units up knows it.
pub(super) trait LowerMemory: Send + Sync {
    /// Ends the copies that are over: the units that they read are no longer locked.
    fn settle(&self);

    /// Waits for the copies that read units now, and ends them. Returns whether there were any. The caller holds no lock.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the device has failed.
    fn wait_for_saves(&self) -> Result<bool>;
}

/// What the units of a cache are.
#[derive(Clone, Debug)]
pub(super) struct CachedKind {
    /// The groups, with what their units are for. Those of an arena of pieces are these, not its own.
    pub(super) layout: CacheLayout,
    /// The numbers that a unit of each group takes.
    pub(super) of_unit: Vec<usize>,
    /// The memory that they are in, for events.
    pub(super) tier: Tier,
}

impl CachedKind {
    /// The units of an arena, as they are declared.
    pub(super) fn of(arena: &CacheArena) -> Self {
        let groups = 0..arena.layout().groups().len();
        let of_unit = groups.map(|group| arena.numbers_of_unit(group)).collect();
        Self { layout: arena.layout().clone(), of_unit, tier: Tier::Device }
    }
}

/// The contents of a cache.
pub(super) struct ArenaCacheState {
    pub(super) groups: GroupTree,
    pub(super) counts: ArenaPrefixCounts,
    /// Tokens that would fit the arena if nothing else were in it.
    pub(super) capacity: usize,
    /// The epoch of the arena in which the cache has its units.
    epoch: Epoch,
}

impl ArenaCacheState {
    fn new(config: &ArenaPrefixCacheConfig, arena: &CacheArena, contents: &CachedKind) -> Self {
        let capacity = capacity_of(arena, &contents.layout);
        let counts = ArenaPrefixCounts {
            evicted_units: vec![0; contents.of_unit.len()],
            ..ArenaPrefixCounts::default()
        };
        let groups = new_tree(config, arena, contents, capacity);
        Self { groups, counts, capacity, epoch: arena.epoch() }
    }

    /// Returns the epoch in which its holds and units are valid.
    pub(super) const fn epoch(&self) -> Epoch {
        self.epoch
    }
}

impl ArenaPrefixCounts {
    fn record_evicted(&mut self, freed: &UnitsToFree) {
        self.evicted += freed.tokens;
        for (total, units) in self.evicted_units.iter_mut().zip(&freed.groups) {
            *total += units.len();
        }
    }
}

/// The tokens that a snapshot counts for where nothing else is kept.
const SNAPSHOT_TOKENS: usize = 64;

/// Returns the tokens of which an arena could keep all units that a prefix always has; those of windows, or a snapshot
/// for every few tokens, if there are no such units.
fn capacity_of(arena: &CacheArena, layout: &CacheLayout) -> usize {
    let page_size = layout.page_size();
    let bytes = |is_counted: fn(GroupKind) -> bool| -> usize {
        let groups = layout.groups().iter().filter(|group| is_counted(group.kind()));
        groups.map(|group| group.layers().len() * group.entry_bytes() * page_size / group.stride()).sum()
    };
    let full = bytes(|kind| kind == GroupKind::Full);
    let windows = bytes(|kind| kind != GroupKind::State);
    let snapshots = bytes(|kind| kind == GroupKind::State) / SNAPSHOT_TOKENS;
    let page_bytes = [full, windows, snapshots].into_iter().find(|&bytes| bytes > 0).unwrap_or(1);
    arena.mem_bytes() / page_bytes * page_size
}

/// Returns an empty tree for a cache.
fn new_tree(
    config: &ArenaPrefixCacheConfig,
    arena: &CacheArena,
    contents: &CachedKind,
    capacity: usize,
) -> GroupTree {
    let numbers = contents.of_unit.iter().enumerate().map(|(group, &of_unit)| UnitNumbers {
        of_unit,
        of_slab: arena.with_slabs(|slabs| slabs.units(group).numbers),
    });
    let numbers: Vec<_> = numbers.collect();
    let events = config.events.map(|digest| JournalOf { digest, tier: contents.tier });
    GroupTree::new(&contents.layout, &numbers, config.policy, config.cost, capacity as u64, events)
}

/// Frees units that a tree has given up.
pub(super) fn free_units(slabs: &mut Slabs, groups: &[Vec<u32>]) {
    for (group, units) in groups.iter().enumerate() {
        slabs.free_held(group, units);
    }
}

impl ArenaCacheCore {
    /// Creates an empty cache, which the arena asks when it is short.
    pub(super) fn new(
        config: ArenaPrefixCacheConfig,
        arena: Arc<CacheArena>,
        contents: CachedKind,
        tier: Option<Arc<dyn LowerMemory>>,
    ) -> Arc<Self> {
        // What is evicted to a tier is loaded from there, and a token takes as long as any other.
        let config = ArenaPrefixCacheConfig { cost: config.cost.filter(|_| tier.is_none()), ..config };
        let state = RankedMutex::new(LockRank::Cache, ArenaCacheState::new(&config, &arena, &contents));
        let core =
            Arc::new(Self { arena, contents, config, tier, state, unnamed_sessions: AtomicU64::new(0) });
        let reclaim: Arc<dyn ReclaimUnits> = Arc::clone(&core) as _;
        core.arena.on_shortage(&reclaim);
        core
    }

    /// Gives up the prefixes of a namespace, or all.
    pub(super) fn clear(&self, namespace: Option<&Namespace>) {
        let mut cache = self.current();
        let freed = cache.groups.clear(namespace, Cause { pressure: Pressure::Clear, at: Instant::now() });
        self.free(&cache, &freed);
    }

    /// Locks the contents of the cache, which are emptied if the arena was cleared.
    pub(super) fn current(&self) -> RankedGuard<'_, ArenaCacheState> {
        let mut cache = self.state.lock();
        let epoch = self.arena.epoch();
        if cache.epoch != epoch {
            // Its units are free already.
            let mut groups = new_tree(&self.config, &self.arena, &self.contents, cache.capacity);
            groups.keep_journal_of(&mut cache.groups);
            groups.keep_waiting_of(&mut cache.groups);
            (cache.groups, cache.epoch) = (groups, epoch);
        }
        cache
    }

    /// Works like [`Self::current`], for a holder of units since `epoch` of the arena; `None` if that is over.
    pub(super) fn at(&self, epoch: Epoch) -> Option<RankedGuard<'_, ArenaCacheState>> {
        Some(self.current()).filter(|cache| cache.epoch == epoch)
    }

    /// Returns units to the arena. The caller holds the lock of `cache`, so that no other call finds them in between.
    pub(super) fn free(&self, cache: &ArenaCacheState, freed: &UnitsToFree) {
        if !freed.is_empty() {
            // A cleared arena has them already.
            let _ = self.arena.in_epoch(cache.epoch, |slabs| free_units(slabs, &freed.groups));
        }
    }
}

impl HasSessions for ArenaCacheCore {
    fn pause(&self, session: SessionId, kind: &str, _stream: Stream) {
        self.current().groups.pause(session, kind);
    }

    fn end(&self, session: SessionId, _stream: Stream) {
        self.current().groups.end(session);
    }
}

impl ReclaimUnits for ArenaCacheCore {
    fn reclaim_units(&self, wanted: &[usize], _stream: Stream) -> Result<bool> {
        if let Some(tier) = &self.tier {
            tier.settle();
            if self.relieve(wanted) {
                return Ok(true);
            }
            // Units that are being copied down are locked until then.
            if !tier.wait_for_saves()? {
                return Ok(false);
            }
        }
        Ok(self.relieve(wanted))
    }
}

impl ArenaCacheCore {
    /// Frees units until `wanted` fits the arena, or nothing if that is impossible. Returns whether it freed any.
    fn relieve(&self, wanted: &[usize]) -> bool {
        let mut cache = self.current();
        let ArenaCacheState { groups, counts, epoch, .. } = &mut *cache;
        let cause = Cause { pressure: Pressure::Alloc, at: Instant::now() };
        let has_freed = self.arena.in_epoch(*epoch, |slabs| {
            let (mut has_freed, mut relief) = (false, Relief::default());
            if slabs.missing(wanted) == 0 || !groups.may_fit(wanted, slabs) {
                return has_freed;
            }
            while slabs.missing(wanted) > 0
                && let Some(freed) = groups.relieve(wanted, slabs, &mut relief, cause)
            {
                counts.record_evicted(&freed);
                free_units(slabs, &freed.groups);
                has_freed |= !freed.is_empty();
            }
            has_freed
        });
        has_freed.unwrap_or(false)
    }
}

impl fmt::Debug for ArenaCacheCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaCacheCore").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Drop for ArenaCacheCore {
    fn drop(&mut self) {
        let mut cache = self.current();
        let freed = cache.groups.take_all();
        self.free(&cache, &freed);
    }
}
