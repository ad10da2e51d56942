//! Leases: a request's hold on a prefix of an arena.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{Epoch, Error, ErrorKind, Result};
use crate::cache::{GroupHold, GroupPublication, LeasedUnits, Namespace, Tokens};
use crate::index::BadFrees;
use crate::memory::Stream;
use crate::pool::CacheArena;

use super::cache_core::{ArenaCacheCore, ArenaCacheState, free_units};

/// The result of a publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaPublished {
    /// Tokens of the lease now.
    pub length: usize,
    /// Tokens that others had published in between: the cache has other units for them, and those offered were freed.
    pub duplicates: usize,
    /// The cache's units of each group, in the order in which they were offered. `None` for a unit of a window that
    /// neither had.
    pub units: Vec<Vec<Option<u32>>>,
}

/// A request's hold on a prefix: what the request needs to go on is not evicted. Dropping it releases it.
///
/// Its lock comes before that of the cache, and both before those of planners and of the arena.
pub struct ArenaLease {
    core: Arc<ArenaCacheCore>,
    namespace: Namespace,
    /// The epoch of the arena in which it was made.
    epoch: Epoch,
    /// The tier below, and the tokens that the lease may be extended over from there.
    below: Option<(Arc<dyn TierBelow>, Vec<i32>)>,
    /// The lease of what is saved of the request in the tier.
    saved: OnceLock<Arc<ArenaLease>>,
    state: RankedMutex<ArenaLeaseState>,
}

/// What a lease holds, and for whom.
#[derive(Debug)]
struct ArenaLeaseState {
    /// `None` once it is released.
    hold: Option<GroupHold>,
    /// Whether a request of a planner has it, which releases it.
    is_bound: bool,
    /// Whether its user has released it meanwhile.
    is_given_up: bool,
}

/// Who owns the units of a publication before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// Whoever took them.
    User,
    /// A holder, such as a planner.
    Holder,
    /// A load from the tier.
    Tier,
}

/// The tier below a cache, as leases use it.
pub(super) trait TierBelow: Send + Sync {
    /// See [`ArenaLease::save`].
    fn save(&self, lease: &ArenaLease, tokens: &dyn Tokens, stream: Stream);

    /// See [`ArenaLease::loadable`].
    ///
    /// # Errors
    /// Those of the lease.
    fn loadable(&self, lease: &ArenaLease, prompt: &[i32]) -> Result<usize>;

    /// See [`ArenaLease::load`].
    ///
    /// # Errors
    /// Those of the lease.
    fn load(&self, lease: &ArenaLease, prompt: &[i32], stream: Stream) -> Result<usize>;
}

impl ArenaLease {
    /// Leases the longest prefix of `tokens` in a cache, of at most `limit` tokens.
    ///
    /// # Errors
    /// See [`GroupTree::match_prefix`](crate::cache::GroupTree::match_prefix).
    pub(super) fn of(
        core: &Arc<ArenaCacheCore>,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<Arc<Self>> {
        Self::with_hold(core, namespace, None, |cache| cache.groups.match_prefix(namespace, tokens, limit))
    }

    /// Works like [`Self::of`], and does not count as a use of the prefix.
    ///
    /// # Errors
    /// See [`Self::of`].
    pub(super) fn without_use(
        core: &Arc<ArenaCacheCore>,
        namespace: &Namespace,
        tokens: &dyn Tokens,
    ) -> Result<Arc<Self>> {
        Self::with_hold(core, namespace, None, |cache| {
            cache.groups.hold_prefix(namespace, tokens, tokens.count())
        })
    }

    /// Leases what `find` holds in a cache, under its lock; `below` is where a request may find more of its prompt.
    ///
    /// # Errors
    /// The error of `find`.
    pub(super) fn with_hold(
        core: &Arc<ArenaCacheCore>,
        namespace: &Namespace,
        below: Option<(Arc<dyn TierBelow>, Vec<i32>)>,
        find: impl FnOnce(&mut ArenaCacheState) -> Result<GroupHold>,
    ) -> Result<Arc<Self>> {
        let mut cache = core.current();
        let hold = find(&mut cache)?;
        let epoch = cache.epoch();
        drop(cache);
        Ok(Self::new(core, namespace, epoch, hold, below))
    }

    fn new(
        core: &Arc<ArenaCacheCore>,
        namespace: &Namespace,
        epoch: Epoch,
        hold: GroupHold,
        below: Option<(Arc<dyn TierBelow>, Vec<i32>)>,
    ) -> Arc<Self> {
        let state = ArenaLeaseState { hold: Some(hold), is_bound: false, is_given_up: false };
        Arc::new(Self {
            core: Arc::clone(core),
            namespace: namespace.clone(),
            epoch,
            below,
            saved: OnceLock::new(),
            state: RankedMutex::new(LockRank::Lease, state),
        })
    }

    /// Returns another lease of the same prefix, for a copy of its units. No request goes on there.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub(super) fn for_copy(&self) -> Result<Arc<Self>> {
        let hold = self.with(|cache, hold| Ok(cache.groups.hold_for_copy(hold)))?;
        Ok(Self::new(&self.core, &self.namespace, self.epoch, hold, None))
    }

    /// Returns the lease of what is saved of its request in the tier, as soon as something is.
    pub(super) const fn saved(&self) -> &OnceLock<Arc<Self>> {
        &self.saved
    }

    /// Returns the cache of the units.
    pub(super) const fn core(&self) -> &Arc<ArenaCacheCore> {
        &self.core
    }

    /// Returns the arena of the units.
    #[must_use]
    pub fn arena(&self) -> &Arc<CacheArena> {
        &self.core.arena
    }

    /// Returns the namespace of the prefix.
    #[must_use]
    pub const fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Returns the tokens of the prefix, in whole pages.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) after its release, or when the arena was cleared.
    pub fn len(&self) -> Result<usize> {
        self.with(|_, hold| Ok(hold.len()))
    }

    /// Returns the tokens whose blocks were cached when it was made: more than [`Self::len`] if not every group could
    /// go on at their end.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub fn found(&self) -> Result<usize> {
        self.with(|_, hold| Ok(hold.found()))
    }

    /// Returns whether the prefix has no tokens.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub fn is_empty(&self) -> Result<bool> {
        self.len().map(|len| len == 0)
    }

    /// Returns the units of a group that a request needs to go on behind the prefix; of states, the numbers of the
    /// snapshot at its end.
    ///
    /// # Errors
    /// See [`Self::len`]; also [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a group that does not
    /// exist.
    pub fn units(&self, group: usize) -> Result<LeasedUnits> {
        self.with(|cache, hold| {
            let groups = cache.groups.groups().len();
            if group >= groups {
                return Err(Error::argument(format!("group {group} is outside [0, {groups})")));
            }
            cache.groups.units(hold, group)
        })
    }

    /// Offers what the request has computed behind its lease, which grows over it. See [`GroupPublication`] for
    /// `tokens` and `units`.
    ///
    /// The cache takes the units. Where others have published the same tokens in between, it keeps its own and frees
    /// the given ones; what it lacks for these tokens, a unit of a window or a snapshot, it takes.
    ///
    /// # Errors
    /// See [`Self::len`]. [`ErrorKind::Argument`] for tokens that are not the lease's, do not fill pages or are no
    /// token ids, for units that are missing, too many or too few; [`ErrorKind::IndexOwnership`] for units that are not
    /// in use, are listed twice or held already; [`ErrorKind::State`](crate::base::ErrorKind::State) for the lease of a
    /// planner's request. Nothing is changed.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::IndexOwnership`]: crate::base::ErrorKind::IndexOwnership
    pub fn publish(&self, tokens: &dyn Tokens, units: &[Vec<Option<u32>>]) -> Result<ArenaPublished> {
        self.publish_of(Owner::User, tokens, units)
    }

    /// Works like [`Self::publish`], with units of [`Slabs::alloc_held`](crate::index::Slabs::alloc_held), which the
    /// caller gives up. A unit that is the cache's own for these tokens may be among them. The caller holds no lock
    /// that comes later than that of a lease.
    ///
    /// # Errors
    /// See [`Self::publish`], without the errors of ownership.
    pub(in crate::pool) fn publish_held(
        &self,
        tokens: &dyn Tokens,
        units: &[Vec<Option<u32>>],
    ) -> Result<ArenaPublished> {
        self.publish_of(Owner::Holder, tokens, units)
    }

    /// Works like [`Self::publish_held`], for units from the tier.
    pub(super) fn publish_loaded(
        &self,
        tokens: &dyn Tokens,
        units: &[Vec<Option<u32>>],
    ) -> Result<ArenaPublished> {
        self.publish_of(Owner::Tier, tokens, units)
    }

    /// Starts to copy what the cache has of published tokens, and the tier has not, behind the work on `stream`; does
    /// nothing without a tier. What cannot be copied is counted and noted by the tier. The caller holds no lock.
    pub fn save(&self, tokens: &dyn Tokens, stream: Stream) {
        if let Some((tier, _)) = &self.below {
            tier.save(self, tokens, stream);
        }
    }

    /// Returns the tokens that the tier has behind the prefix, for requests that go on there: those that
    /// [`Self::load`] would add, if there are units for them and nothing is damaged.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub fn loadable(&self) -> Result<usize> {
        self.len()?;
        self.below.as_ref().map_or(Ok(0), |(tier, prompt)| tier.loadable(self, prompt))
    }

    /// Copies what the tier has behind the prefix to the arena, and extends the lease over it. Returns the tokens added:
    /// fewer than [`Self::loadable`] if the arena has not enough units, or if bytes were damaged in host memory.
    ///
    /// Work enqueued on `stream` from now on sees the copies, and the host does not wait; without a device, the call
    /// waits. It waits, too, for copies to the tier of what it loads. The caller holds no lock.
    ///
    /// # Errors
    /// See [`Self::len`]; [`ErrorKind::State`](crate::base::ErrorKind::State) for the lease of a planner's request, and
    /// when a copy has failed; [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) while `stream` is being captured and
    /// when a driver call fails. The lease is as long as before.
    pub fn load(&self, stream: Stream) -> Result<usize> {
        let is_bound = self.with_bound(|_, _, is_bound| Ok(is_bound))?;
        if is_bound {
            return Err(Error::state("the lease is a planner's request's; load it before"));
        }
        self.below.as_ref().map_or(Ok(0), |(tier, prompt)| tier.load(self, prompt, stream))
    }

    fn publish_of(
        &self,
        owner: Owner,
        tokens: &dyn Tokens,
        units: &[Vec<Option<u32>>],
    ) -> Result<ArenaPublished> {
        let arena = &self.core.arena;
        self.with_bound(|cache, hold, is_bound| {
            if is_bound && owner != Owner::Holder {
                let text = "the lease is a planner's request's, which publishes through its planner";
                return Err(Error::state(text));
            }
            let mut plan = cache.groups.plan(hold, &GroupPublication { tokens, units })?;
            cache.groups.check_prefix(hold, tokens)?;
            let handed_over = arena.in_epoch(self.epoch, |slabs| {
                if owner == Owner::User {
                    let given: Vec<Vec<u32>> =
                        units.iter().map(|units| units.iter().copied().flatten().collect()).collect();
                    slabs.hold(&given).map_err(|(group, bad)| {
                        let group = &arena.layout().groups()[group];
                        not_owned_error(group.name(), &bad)
                    })?;
                }
                free_units(slabs, &plan.duplicates);
                Ok(())
            });
            handed_over.ok_or_else(cleared_error)??;
            if owner == Owner::Tier {
                cache.counts.loaded += plan.fresh();
            } else {
                cache.counts.published += plan.fresh();
                cache.counts.duplicates += plan.duplicate_tokens;
            }
            let (duplicates, units) = (plan.duplicate_tokens, std::mem::take(&mut plan.units));
            cache.groups.publish(hold, plan);
            Ok(ArenaPublished { length: hold.len(), duplicates, units })
        })
    }

    /// Ends the lease. Later calls of it fail; a second release does nothing. The lease of a planner's request ends
    /// with the request, and not before.
    pub fn release(&self) {
        let mut state = self.state.lock();
        if state.is_bound {
            state.is_given_up = true;
            return;
        }
        self.end_of(state);
    }

    /// Returns the epoch of the arena in which it was made.
    pub(in crate::pool) const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Makes it the lease of a planner's request.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if another has it.
    pub(in crate::pool) fn bind(&self) -> Result<()> {
        if std::mem::replace(&mut self.state.lock().is_bound, true) {
            return Err(Error::state("the lease is another request's; match the prefix again"));
        }
        Ok(())
    }

    /// Undoes [`Self::bind`]: the request was not planned.
    pub(in crate::pool) fn unbind(&self) {
        let mut state = self.state.lock();
        state.is_bound = false;
        if state.is_given_up {
            self.end_of(state);
        }
    }

    /// Ends the lease of a planner's request.
    pub(in crate::pool) fn end(&self) {
        self.end_of(self.state.lock());
    }

    fn end_of(&self, mut state: RankedGuard<'_, ArenaLeaseState>) {
        let Some(hold) = state.hold.take() else { return };
        drop(state);
        if let Some(mut cache) = self.core.at(self.epoch) {
            let freed = cache.groups.release(hold);
            self.core.free(&cache, &freed);
        }
        self.saved.get().iter().for_each(|saved| saved.end());
    }

    /// Calls `work` with what the cache keeps and with what the lease holds, under their locks.
    fn with<R>(&self, work: impl FnOnce(&mut ArenaCacheState, &mut GroupHold) -> Result<R>) -> Result<R> {
        self.with_bound(|cache, hold, _| work(cache, hold))
    }

    /// Works like [`Self::with`], and tells `work` whether a request of a planner has the lease.
    fn with_bound<R>(
        &self,
        work: impl FnOnce(&mut ArenaCacheState, &mut GroupHold, bool) -> Result<R>,
    ) -> Result<R> {
        let mut state = self.state.lock();
        let is_bound = state.is_bound;
        let hold = state.hold.as_mut().ok_or_else(|| stale_error("it was released"))?;
        let mut cache = self.core.at(self.epoch).ok_or_else(cleared_error)?;
        work(&mut cache, hold, is_bound)
    }
}

/// Returns the error of units that whoever publishes them does not own.
#[cold]
fn not_owned_error(group: &str, bad: &BadFrees) -> Error {
    let named = bad.first().iter().map(|(unit, reason)| format!("{unit} ({})", reason.description()));
    let (named, dropped) = (named.collect::<Vec<_>>().join(", "), bad.dropped());
    let text = format!("{dropped} units of group {group} cannot be published: {named}; nothing was changed");
    let error = Error::new(ErrorKind::IndexOwnership, text);
    match bad.first().first() {
        Some((unit, _)) => error.with_index(*unit),
        None => error,
    }
}

#[cold]
fn cleared_error() -> Error {
    stale_error("the arena was cleared, and its units are gone")
}

#[cold]
fn stale_error(why: &str) -> Error {
    Error::stale(format!("the lease cannot be used: {why}"))
}

impl Drop for ArenaLease {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for ArenaLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaLease").field("len", &self.len().ok()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use crate::base::DType;
    use crate::cache::PolicyKind;
    use crate::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
    use crate::memory::{Backend, Host};
    use crate::pool::{ArenaPrefixCache, ArenaPrefixCacheConfig, CacheArenaConfig};

    use super::*;

    #[test]
    fn units_of_a_holder_become_those_of_the_cache() {
        let plane = Plane::new("k", DType::U8, &[16]).expect("valid");
        let full = Group::new("full", GroupKind::Full, &[0], vec![plane]).expect("valid");
        let config = CacheArenaConfig {
            layout: CacheLayout::new("m", 2, vec![full]).expect("valid"),
            arena_bytes: 1 << 10,
            floors: Vec::new(),
            slabs: SlabOptions::default(),
            strict: true,
        };
        let host: Arc<dyn Backend> = Arc::new(Host);
        let arena = Arc::new(CacheArena::new(&config, &host).expect("valid"));
        let config = ArenaPrefixCacheConfig { policy: PolicyKind::Lru, cost: None, events: None };
        let cache = ArenaPrefixCache::new(config, Arc::clone(&arena)).expect("valid");
        let tokens: &[i32] = &[1, 2, 3, 4];
        let leases = [(); 2].map(|()| cache.match_prefix(&Namespace::Unnamed, &tokens, 4).expect("valid"));
        let take = || {
            arena
                .in_epoch(arena.epoch(), |slabs| slabs.alloc_held(&[2]).expect("valid").expect("valid"))
                .expect("valid")
        };
        let taken = take();
        let units = |taken: &[Vec<u32>]| vec![taken[0].iter().copied().map(Some).collect()];
        let published = leases[0].publish_held(&tokens, &units(&taken)).expect("valid");
        assert_eq!((published.length, published.duplicates), (4, 0));
        // The other request has computed the same; one of its units is the cache's own.
        let own = take();
        let mixed = vec![vec![Some(taken[0][0]), Some(own[0][1])]];
        let published = leases[1].publish_held(&tokens, &mixed).expect("valid");
        assert_eq!((published.duplicates, published.units), (4, units(&taken)));
        assert!(leases[1].publish(&tokens, &[vec![Some(own[0][0])]]).is_err());
        arena.in_epoch(arena.epoch(), |slabs| slabs.free_held(0, &own[0][..1])).expect("valid");
        drop(leases);
        cache.clear(None);
        assert_eq!(arena.with_slabs(|slabs| (slabs.held(), slabs.empty() == slabs.capacity())), (0, true));
    }
}
