//! `kvpool.ArenaPrefixCache`, `kvpool.ArenaLease` and what they return.

use std::ops::Range;
use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::base::Error;
use crate::cache::{GroupExplanation, GroupReason, LeasedUnits as PoolUnits, PolicyKind, WaitingRank};
use crate::kernels::BufferInfo;
use crate::layout::GroupKind;
use crate::memory::Stream;
use crate::pool::{
    ArenaLease as PoolLease, ArenaLowerTier, ArenaPrefixCache as Cache, ArenaPrefixCacheConfig,
    CacheArena as Arena,
};

use super::arena_host_tier::ArenaHostTier;
use super::args;
use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::cache_arena::{CacheArena, flattened, name_of};
use super::cache_object::CacheObject;
use super::debug::Debug;
use super::fetch::{Fetch, PoolFetch};
use super::framework::current_stream;
use super::page_keys::{self, digest, namespace_of, namespace_to_py};
use super::pool_name::PoolName;
use super::prefix_report::event_to_py;
use super::session::Session;
use super::store_arg::lower_store;
use super::tokens::with_tokens;
use super::wait_polling;
use super::waiting_request::WaitingRequest;

/// Keeps the units of prompts and answers by their tokens, so that a request that begins like an earlier one does not
/// compute them again: the prefix cache of a `CacheArena`, for every group of its layout.
///
/// A prefix is found up to the last page at which every group can go on: full groups have all units, windows those that
/// the next token sees, chunks those of the current chunk, both their sinks, and states a snapshot exactly there.
/// Entries of several tokens need not be whole at that page if the layout has a state, which knows the rest.
///
/// The cache owns units of the arena, from their publication to their eviction; requests hold leases. A lease locks
/// what a request needs to go on, and not what is behind a window. A call of the arena that is short of units evicts
/// what is worth least: units of windows that nothing needs, then what is worth least for its memory, a snapshot or a
/// window within a prefix or the end of one; of full groups alone, ends in the order of the policy. If all that would
/// not suffice, it evicts nothing and fails. Freeing a cached unit through the arena is an invalid free.
///
/// Token ids are ints in `[0, 2**31)`, as those of `PrefixCache`. Prefixes are compared token by token, never by a
/// hash. A namespace (a str, bytes or an int, such as an adapter or a tenant) keeps prefixes apart: two namespaces
/// share nothing.
///
/// All calls are atomic and thread-safe, and make no CUDA call, but for copies to a tier and back. Clearing the arena
/// empties the cache, not the tier. On a GPU, publish
/// when the work that writes the units is enqueued on the current stream: prefixes are valid in the order of that
/// stream.
///
/// Args:
///     arena: The arena of the units.
///     policy: The order in which ends of prefixes are evicted: "adaptive", "lru", "fifo", "lfu", "slru" or "priority".
///     cost: The seconds that a prefill takes: the adaptive policy then keeps what saves most seconds, else what
///         saves most tokens. With tiers below it counts in the last one, above a store: what is loaded takes as
///         long at any position. Other policies do not use it.
///     tiers: The tiers below the device: nothing, an `ArenaHostTier` for this cache alone, or that and a store: a `FileStore`
///         or another `Store`. What is published is copied to the first and from there to the second; `ArenaLease.load`
///         loads what was evicted meanwhile from the first, `fetch` copies units from the second to the first.
///     model: The name, in a store, of everything that the units depend on besides the tokens, the namespace and the layout:
///         the model with its revision, and the rank if the model is divided among ranks. Caches with the same name
///         share units. Required with a store, and only then.
///     events: Whether to record changes for `events`.
///     name: The name of this pool. Defaults to the class name and a number, such as "ArenaPrefixCache-0".
///
/// Raises:
///     ConfigError: If `policy` is unknown, the tier is for another arena or belongs to another cache, or only one of a store
///         and `model` is given.
///     StateError: If the store is closed.
///     TypeError: If `tiers` has something else.
#[pyclass(extends = BasePool, frozen, module = "kvpool", name = "ArenaPrefixCache")]
pub(super) struct ArenaPrefixCache {
    cache: Cache,
    arena: Py<CacheArena>,
    tiers: Vec<Py<PyAny>>,
    model: Option<String>,
}

impl ArenaPrefixCache {
    /// Returns the stream of copies to the tier and back; the default one without a tier.
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        let device = self.cache.arena().device();
        if self.tiers.is_empty() { Ok(Stream::default_of(device)) } else { current_stream(py, device) }
    }

    fn log_notes_below(&self, py: Python<'_>) {
        if let Some(Ok(host)) = self.tiers.first().map(|tier| tier.bind(py).cast::<ArenaHostTier>()) {
            host.get().log_notes(py);
        }
    }
}

impl CacheObject for Py<ArenaPrefixCache> {
    /// Returns any stream, because no call of a session or a waiting request enqueues anything.
    fn stream(&self, _py: Python<'_>) -> PyResult<Stream> {
        Ok(Stream::DEFAULT)
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(self)
    }
}

impl PoolClass for ArenaPrefixCache {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&self.cache);
    }
}

#[pymethods]
impl ArenaPrefixCache {
    #[new]
    #[pyo3(signature = (arena, *, policy="adaptive", cost=None, tiers=Vec::new(), model=None, events=false, name=None),
           text_signature = "(arena, *, policy=\"adaptive\", cost=None, tiers=(), model=None, events=False, name=None)")]
    fn new(
        py: Python<'_>,
        arena: Py<CacheArena>,
        policy: &str,
        cost: Option<Bound<'_, PyAny>>,
        tiers: Vec<Bound<'_, PyAny>>,
        model: Option<String>,
        events: bool,
        name: Option<String>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let name = name.map_or_else(|| PoolName::next("ArenaPrefixCache"), PoolName::from);
        let config = ArenaPrefixCacheConfig {
            policy: PolicyKind::parse(policy)?,
            cost: cost.map(|cost| args::prefill_cost(&cost)).transpose()?,
            events: events.then_some(digest),
        };
        let pool = Arc::clone(&arena.get().pool);
        let below = lower_tier(&tiers, model.as_deref())?;
        let tiers = tiers.into_iter().map(Bound::unbind).collect();
        let cache = py.detach(|| Cache::with_tier(config, pool, below))?;
        Ok(BasePool::named(name, Debug::OFF, Self { cache, arena, tiers, model }))
    }

    /// Leases the longest cached prefix at which every group can go on. What was found counts as used. A miss is a
    /// lease of length 0, through which the request publishes what it computes.
    ///
    /// Args:
    ///     token_ids: Token ids of the prompt.
    ///     max_tokens: Maximum length in tokens. Engines pass `len(token_ids) - 1`: the last token must be computed.
    ///     namespace: A str, bytes or an int; `None` is a namespace of its own.
    ///     session: The session whose next turn this is. The turn ends with the lease.
    ///
    /// Raises:
    ///     ArgumentError: If a token is outside of [0, 2**31), `max_tokens` is negative, or the session is of another
    ///         cache.
    ///     TypeError: If `token_ids` are not ints, or `namespace` is of another type.
    #[pyo3(signature = (token_ids, *, max_tokens=None, namespace=None, session=None))]
    fn r#match(
        slf: &Bound<'_, Self>,
        token_ids: &Bound<'_, PyAny>,
        max_tokens: Option<&Bound<'_, PyAny>>,
        namespace: Option<&Bound<'_, PyAny>>,
        session: Option<&Session>,
    ) -> PyResult<ArenaLease> {
        let (this, namespace) = (slf.get(), namespace_of(namespace)?);
        let limit = limit_of(max_tokens)?;
        let lease = with_tokens(token_ids, |tokens| match session {
            None => Ok(this.cache.match_prefix(&namespace, tokens, limit)?),
            Some(Session { session, .. }) => {
                Ok(this.cache.match_in_session(session, &namespace, tokens, limit)?)
            }
        })?;
        Ok(ArenaLease { lease, cache: slf.clone().unbind() })
    }

    /// Returns the session with a name, for the turns of one conversation or agent: see `Session`. Sessions with
    /// the same name are the same. Tiers are not told of sessions.
    ///
    /// Args:
    ///     name: A str, bytes or an int; `None` makes a session like no other.
    ///
    /// Raises:
    ///     TypeError: If `name` is of another type.
    #[pyo3(signature = (name=None))]
    fn session(slf: &Bound<'_, Self>, name: Option<&Bound<'_, PyAny>>) -> PyResult<Session> {
        let session = slf.get().cache.session(page_keys::name_of("name", name)?);
        Ok(Session { session, cache: Box::new(slf.clone().unbind()) })
    }

    /// Adds a request to the engine's waiting queue: see `PrefixCache.add_waiting`.
    ///
    /// Args:
    ///     token_ids: As in `match`. They are not kept.
    ///     namespace: As in `match`.
    ///     max_tokens: As in `match`. Pass the same: of states, the snapshot counts at which `match` will end.
    ///     rank: Requests of a lower rank are served first; those of one rank in the order in which they were added.
    ///
    /// Raises:
    ///     ArgumentError: If a token is outside of [0, 2**31), or `max_tokens` is negative.
    ///     OverflowError: If `rank` does not fit 64 bits.
    ///     TypeError: As in `match`.
    #[pyo3(signature = (token_ids, *, namespace=None, max_tokens=None, rank=0))]
    fn add_waiting(
        slf: &Bound<'_, Self>,
        token_ids: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        max_tokens: Option<&Bound<'_, PyAny>>,
        rank: i64,
    ) -> PyResult<WaitingRequest> {
        let namespace = namespace_of(namespace)?;
        let limit = limit_of(max_tokens)?;
        let rank = WaitingRank { priority: rank, arrival: 0 };
        let request = with_tokens(token_ids, |tokens| {
            Ok(slf.get().cache.add_waiting(&namespace, tokens, limit, rank)?)
        })?;
        Ok(WaitingRequest { request, cache: Box::new(slf.clone().unbind()) })
    }

    /// Returns the length that `match` would find, without a lease and without refreshing it.
    ///
    /// Raises:
    ///     ArgumentError: If `max_tokens` is negative.
    ///     TypeError: As in `match`.
    #[pyo3(signature = (token_ids, *, max_tokens=None, namespace=None))]
    fn cached_len(
        &self,
        token_ids: &Bound<'_, PyAny>,
        max_tokens: Option<&Bound<'_, PyAny>>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (namespace, limit) = (namespace_of(namespace)?, limit_of(max_tokens)?);
        with_tokens(token_ids, |tokens| Ok(self.cache.cached_len(&namespace, tokens, limit)?))
    }

    /// Returns how far each group could go on alone, and why not further. A match is at most as long as the shortest of
    /// them. Refreshes nothing; a call for debugging, because it looks at every namespace.
    ///
    /// Args:
    ///     token_ids: As in `match`.
    ///     namespace: As in `match`.
    ///
    /// Returns:
    ///     A list of `GroupReport`, one a group, in their order.
    ///
    /// Raises:
    ///     ArgumentError: As in `match`.
    ///     TypeError: As in `match`.
    #[pyo3(signature = (token_ids, *, namespace=None))]
    fn explain(
        &self,
        token_ids: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<GroupReport>> {
        let namespace = namespace_of(namespace)?;
        let (_, groups) = with_tokens(token_ids, |tokens| Ok(self.cache.explain(&namespace, tokens)?))?;
        let layout = self.cache.arena().layout();
        let report = |explained: GroupExplanation| {
            let declared = &layout.groups()[explained.group];
            GroupReport { name: declared.name().to_owned(), kind: declared.kind(), explained }
        };
        Ok(groups.into_iter().map(report).collect())
    }

    /// Starts to fetch what the store has of a prompt to the host tier. Returns at once; a thread fetches, one prompt after
    /// another. Call it when a request arrives, and `match` and `ArenaLease.load` when the request is about to run.
    ///
    /// Args:
    ///     token_ids: As in `match`.
    ///     max_tokens: As in `match`.
    ///     namespace: As in `match`.
    ///
    /// Returns:
    ///     A `Fetch`; without a store it is over at once.
    ///
    /// Raises:
    ///     ArgumentError: As in `match`.
    ///     OutOfMemoryError: If no thread can be started.
    ///     TypeError: As in `match`.
    #[pyo3(signature = (token_ids, *, max_tokens=None, namespace=None))]
    fn fetch(
        &self,
        token_ids: &Bound<'_, PyAny>,
        max_tokens: Option<&Bound<'_, PyAny>>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Fetch> {
        let (namespace, limit) = (namespace_of(namespace)?, limit_of(max_tokens)?);
        let fetch = with_tokens(token_ids, |tokens| Ok(self.cache.fetch(&namespace, tokens, limit)?))?;
        Ok(Fetch { fetch: PoolFetch::Units(fetch) })
    }

    /// Waits, without the GIL, until all copies of units to host memory, and from there to a store, are complete. Without
    /// tiers it returns at once.
    ///
    /// Args:
    ///     timeout: Seconds; `None` for any time.
    ///
    /// Returns:
    ///     Whether all copies completed within the time.
    ///
    /// Raises:
    ///     ArgumentError: If `timeout` is negative.
    ///     DriverError: If the device has failed.
    #[pyo3(signature = (timeout=None))]
    fn wait_written(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let waited = wait_polling(py, timeout, || self.cache.is_written());
        self.log_notes_below(py);
        waited
    }

    /// Gives up all prefixes, or those of a namespace, in the tier too. Prefixes with a lease are no longer found, and
    /// are given up when their last lease ends.
    #[pyo3(signature = (namespace=None))]
    fn clear(&self, namespace: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let namespace = namespace.map(|object| namespace_of(Some(object))).transpose()?;
        self.cache.clear(namespace.as_ref());
        Ok(())
    }

    /// Returns the changes since the last call, in order: objects of `Stored`, `Removed` and `Cleared`, as those of
    /// `PrefixCache.events`, for every group.
    ///
    /// A unit that the cache takes or gives up is an event of its group, and named by the key of the page that it ends
    /// with; a snapshot of a state by that of the page at whose end it is. So a reader knows which units a prompt has, and
    /// where every group can go on, by the same rules as `match`. If no full group has a unit for every page, pages are
    /// reported as well, without a group: a prefix is known as far as its pages are.
    ///
    /// Units of the host tier follow those of the device, with `tier="host"`; one that is found damaged there is reported as
    /// long as it keeps its place.
    ///
    /// 65,536 events are kept of each; a reader that falls further behind gets `Cleared` and must start over.
    ///
    /// Raises:
    ///     StateError: If the cache was made without `events=True`.
    fn events(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let events = self.cache.take_events()?;
        events.into_iter().map(|event| event_to_py(py, event)).collect()
    }

    /// Returns what the cache has of a group: `units`, `tokens` (that the units stand for; 0 for states), `unneeded`
    /// (units that no lease and no expected match needs, the first to be evicted) and `evicted` (units, since the cache
    /// was made). States that are placed layer by layer count each layer.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group.
    fn group_stats<'py>(&self, py: Python<'py>, group: &str) -> PyResult<Bound<'py, PyDict>> {
        let counts = self.cache.group_counts(self.cache.arena().layout().group_number(group)?)?;
        let stats = PyDict::new(py);
        stats.set_item("units", counts.units)?;
        stats.set_item("tokens", counts.tokens)?;
        stats.set_item("unneeded", counts.unneeded)?;
        stats.set_item("evicted", counts.evicted)?;
        Ok(stats)
    }

    /// Returns the number of cached tokens.
    fn cached_size(&self) -> usize {
        let sizes = self.cache.sizes();
        sizes.evictable + sizes.locked
    }

    /// Returns the number of cached tokens that no lease holds.
    fn evictable_size(&self) -> usize {
        self.cache.sizes().evictable
    }

    /// Returns the number of cached tokens that leases hold.
    fn locked_size(&self) -> usize {
        self.cache.sizes().locked
    }

    /// Checks every invariant of the cache.
    ///
    /// Raises:
    ///     IndexOwnershipError: If a check fails, with a description.
    fn verify(&self) -> PyResult<()> {
        Ok(self.cache.verify()?)
    }

    /// The arena of the units.
    #[getter]
    fn arena(&self, py: Python<'_>) -> Py<CacheArena> {
        self.arena.clone_ref(py)
    }

    /// The tiers below the device.
    #[getter]
    fn tiers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.tiers)
    }

    /// The name in a store of what the units depend on, as passed to the constructor.
    #[getter]
    fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// The name of the policy.
    #[getter]
    fn policy(&self) -> &'static str {
        self.cache.config().policy.name()
    }

    fn __repr__(&self) -> String {
        let sizes = self.cache.sizes();
        format!(
            "ArenaPrefixCache(policy='{}', cached={}, locked={}, device='{}')",
            self.policy(),
            sizes.evictable + sizes.locked,
            sizes.locked,
            self.cache.arena().device()
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.arena)?;
        self.tiers.iter().try_for_each(|tier| visit.call(tier))
    }
}

/// Converts the argument `tiers`.
fn lower_tier(tiers: &[Bound<'_, PyAny>], model: Option<&str>) -> PyResult<Option<ArenaLowerTier>> {
    if tiers.len() > 2 {
        let text =
            format!("{} tiers were given; there can be an ArenaHostTier and a store below it", tiers.len());
        return Err(Error::config(text).into());
    }
    let Some(given) = tiers.first() else {
        lower_store(None, model, Vec::new)?;
        return Ok(None);
    };
    let host = given.cast::<ArenaHostTier>().map_err(|_| {
        PyTypeError::new_err(format!("tiers[0] must be an ArenaHostTier, not {}", args::kind_of(given)))
    })?;
    let host = Arc::clone(&host.get().tier);
    let region = |buffer: BufferInfo| (buffer.address, buffer.bytes);
    let store = lower_store(tiers.get(1), model, || host.buffer_infos().map(region).collect())?;
    Ok(Some(ArenaLowerTier { host, digest, store }))
}

fn limit_of(max_tokens: Option<&Bound<'_, PyAny>>) -> PyResult<usize> {
    max_tokens.map_or(Ok(usize::MAX), |limit| args::count("max_tokens", limit))
}

/// A request's hold on a cached prefix: what the request needs to go on is not evicted. As a context manager it is
/// released at the end of the block; a lease that is dropped is released, too.
#[pyclass(frozen, module = "kvpool", name = "ArenaLease", weakref)]
pub(super) struct ArenaLease {
    pub(super) lease: Arc<PoolLease>,
    cache: Py<ArenaPrefixCache>,
}

#[pymethods]
impl ArenaLease {
    /// Tokens of the prefix, in whole pages.
    ///
    /// Raises:
    ///     StaleError: If the lease was released, or the arena was cleared.
    #[getter]
    fn length(&self) -> PyResult<usize> {
        Ok(self.lease.len()?)
    }

    /// Tokens that were known at the match, in whole pages: more than `length` if not every group could go on at their
    /// end. Other prompts diverge from this one there: end a chunk of the prefill there, and publish it.
    ///
    /// Raises:
    ///     StaleError: If the lease was released, or the arena was cleared.
    #[getter]
    fn known_length(&self) -> PyResult<usize> {
        Ok(self.lease.found()?)
    }

    fn __len__(&self) -> PyResult<usize> {
        self.length()
    }

    /// Tokens after the prefix that host memory has, and that `load` can load. 0 without a tier.
    ///
    /// Raises:
    ///     StaleError: If the lease was released, or the arena was cleared.
    #[getter]
    fn loadable(&self) -> PyResult<usize> {
        Ok(self.lease.loadable()?)
    }

    /// Copies what host memory has after the prefix to units of the arena, and extends the lease over it. On a GPU the copies
    /// run on a separate stream; the current stream waits for them, and the host does not. Otherwise the call waits for
    /// them, without the GIL.
    ///
    /// Load before you pass the lease to a planner. Units whose fingerprint is not that of what came to the tier are not
    /// loaded: they are logged and counted as `damaged` in `ArenaHostTier.stats`, and the load ends before them.
    ///
    /// Returns:
    ///     The tokens that the lease has grown by: less than `loadable` if the arena has not enough units, or some are
    ///     damaged.
    ///
    /// Raises:
    ///     DriverError: If a copy cannot be enqueued, as while the current stream is being captured.
    ///     StaleError: If the lease was released, or the arena was cleared.
    ///     StateError: If a request of an `ArenaPlanner` has the lease, or the copy has failed. The lease is as long as
    ///         before.
    fn load(&self, py: Python<'_>) -> PyResult<usize> {
        let cache = self.cache.get();
        let stream = cache.stream(py)?;
        let loaded = self.lease.load(stream);
        cache.log_notes_below(py);
        Ok(loaded?)
    }

    /// The namespace of the prefix.
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        namespace_to_py(py, self.lease.namespace())
    }

    /// Whether the lease was released, or the arena was cleared.
    #[getter]
    fn closed(&self) -> bool {
        self.lease.len().is_err()
    }

    /// Returns the units of a group that a request needs to go on behind the prefix; of a state, the snapshot at its
    /// end, from which the request copies: the cache owns it and does not change it.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group.
    ///     StaleError: If the lease was released, or the arena was cleared.
    fn units(&self, group: &str) -> PyResult<LeasedUnits> {
        let arena = self.lease.arena();
        let number = arena.layout().group_number(group)?;
        Ok(LeasedUnits { units: self.lease.units(number)?, arena: Arc::clone(arena), group: number })
    }

    /// Publishes what the request has computed since: its units become the cache's, and the lease grows over them.
    ///
    /// Units of tokens that another request has published in between are not kept twice: the caller's are freed, and
    /// the request continues with those that the call returns. What the cache lacks for such tokens, a unit of a window
    /// or a snapshot, it takes.
    ///
    /// Args:
    ///     token_ids: Token ids of the whole prefix, from the first one on, in whole pages.
    ///     units: The units by the name of the group, as `CacheArena.alloc` gives them; the caller's ownership passes
    ///         to the cache. Of a group of pages, one for each position from that of the lease's end on, without one
    ///         that is not full at the end of the tokens, and `None` for those that the request has given up behind a
    ///         window. Of states, a snapshot of the state behind the last token, or nothing; of all states or none.
    ///
    /// Returns:
    ///     The cache's units for the same positions, by the name of the group. `None` for a unit that neither had; an
    ///     empty list for a state without a snapshot.
    ///
    /// Nothing is changed if the call raises.
    ///
    /// Raises:
    ///     ArgumentError: If `token_ids` are not whole pages, do not begin with the tokens of the lease, or one is
    ///         outside of [0, 2**31); if there is no such group; if units are too few or too many, or one is `None`
    ///         that a prefix always has or that a request needs to go on behind a snapshot.
    ///     IndexOwnershipError: If a unit is not in use, listed twice, or owned by a cache or a planner.
    ///     StaleError: If the lease was released, or the arena was cleared.
    ///     StateError: If a request of an `ArenaPlanner` has the lease: it publishes by `ArenaPlanner.publish`.
    ///     TypeError: If a unit is not an int or `None`.
    fn publish<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
        units: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let arena = self.lease.arena();
        let mut given = vec![Vec::new(); arena.layout().groups().len()];
        for item in units.items().iter() {
            let (name, units): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
            let name = name_of(&name)?;
            given[arena.layout().group_number(&name)?] = units_of(&name, &units)?;
        }
        let stream = self.cache.get().stream(py)?;
        let published = with_tokens(token_ids, |tokens| {
            let published = self.lease.publish(tokens, &given)?;
            self.lease.save(tokens, stream);
            Ok(published)
        })?;
        let found = PyDict::new(py);
        for (group, units) in published.units.iter().enumerate() {
            found.set_item(arena.layout().groups()[group].name(), units_to_py(py, arena, group, units)?)?;
        }
        Ok(found)
    }

    /// Ends the lease. Does nothing if it has ended, and if a request of an `ArenaPlanner` has it: it ends with the
    /// request.
    fn release(&self) {
        self.lease.release();
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.release();
    }

    fn __repr__(&self) -> String {
        self.lease.len().map_or_else(
            |_| "ArenaLease(released)".to_owned(),
            |length| format!("ArenaLease(length={length}, namespace={})", self.lease.namespace()),
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.cache)
    }
}

/// Converts the units of a group.
fn units_of(group: &str, units: &Bound<'_, PyAny>) -> PyResult<Vec<Option<u32>>> {
    let flat = flattened(units)?;
    let number = |unit: i64| {
        u32::try_from(unit).map(Some).map_err(|_| {
            let text = format!("unit {unit} of group {group} is not a number of a unit");
            PyErr::from(Error::argument(text).with_index(unit))
        })
    };
    let Ok(list) = flat.cast::<PyList>() else {
        return args::indices(&flat)?.values(units.py())?.iter().map(number).collect();
    };
    list.iter().map(|unit| if unit.is_none() { Ok(None) } else { number(args::int(&unit)?) }).collect()
}

/// Returns units of a group, or the numbers of a snapshot, as `CacheArena.alloc` does.
fn units_to_py<'py>(
    py: Python<'py>,
    arena: &Arena,
    group: usize,
    units: &[Option<u32>],
) -> PyResult<Bound<'py, PyList>> {
    if arena.slabs().groups()[group].by_layer {
        let lists = units.chunks(arena.numbers_of_unit(group)).map(|units| PyList::new(py, units));
        return PyList::new(py, lists.collect::<PyResult<Vec<_>>>()?);
    }
    PyList::new(py, units)
}

/// Units of a group that a request needs to go on behind a prefix.
#[pyclass(frozen, module = "kvpool", name = "LeasedUnits")]
pub(super) struct LeasedUnits {
    units: PoolUnits,
    arena: Arc<Arena>,
    group: usize,
}

#[pymethods]
impl LeasedUnits {
    /// The units of the sinks, which are units 0, 1, ... of the request; those that are among `units` are left out.
    #[getter]
    fn sinks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.units.sinks)
    }

    /// The position of the first of `units`, in units of the group: 0 for full groups and states.
    #[getter]
    const fn first(&self) -> usize {
        self.units.first
    }

    /// The units from there on to the end of the prefix, without one that is not full; of a state, the snapshot, as
    /// `CacheArena.alloc` gives one. `None` for a unit that the publication of the lease did not have.
    #[getter]
    fn units<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        units_to_py(py, &self.arena, self.group, &self.units.units)
    }

    fn __repr__(&self) -> String {
        let PoolUnits { sinks, first, units } = &self.units;
        let name = self.arena.layout().groups()[self.group].name();
        format!("LeasedUnits('{name}', {} sinks, {} units from {first} on)", sinks.len(), units.len())
    }
}

/// How far a group could go on alone, and why not further.
#[pyclass(frozen, module = "kvpool", name = "GroupReport")]
pub(super) struct GroupReport {
    name: String,
    kind: GroupKind,
    explained: GroupExplanation,
}

#[pymethods]
impl GroupReport {
    /// The name of the group.
    #[getter]
    fn group(&self) -> &str {
        &self.name
    }

    /// The kind of the group: "full", "window", "chunk" or "state".
    #[getter]
    const fn kind(&self) -> &'static str {
        self.kind.name()
    }

    /// The longest prefix, in tokens, at which the group could go on.
    #[getter]
    const fn length(&self) -> usize {
        self.explained.len
    }

    /// The first and one past the last token of the units that are missing to go on where the known tokens end, or of
    /// the tokens behind them; `None` if none is.
    #[getter]
    fn missing(&self) -> Option<(usize, usize)> {
        self.explained.missing.clone().map(|Range { start, end }| (start, end))
    }

    /// Why it is not longer: "complete" (it is all of the prompt's pages), "evicted", "never published" (or forgotten),
    /// "no snapshot", "snapshot evicted", or "part of an entry" (the last entry is of more tokens, and no state has the
    /// rest).
    #[getter]
    const fn reason(&self) -> &'static str {
        self.explained.reason.name()
    }

    fn __str__(&self) -> String {
        let (name, kind, length) = (&self.name, self.kind.name(), self.length());
        let missing = self.explained.missing.as_ref().map(|Range { start, end }| format!("{start}..{end}"));
        let why = match (&self.explained.reason, missing) {
            (GroupReason::Complete, _) => String::new(),
            (GroupReason::Evicted, Some(missing)) => format!("; the units of {missing} were evicted"),
            (GroupReason::NeverPublished, Some(missing)) => format!("; {missing} was never published"),
            (GroupReason::NoSnapshot, _) => format!("; no snapshot beyond {length}"),
            (GroupReason::SnapshotEvicted, _) => format!("; a snapshot beyond {length} was evicted"),
            (reason, _) => format!("; {}", reason.name()),
        };
        format!("{kind} `{name}`: {length} tokens{why}")
    }

    fn __repr__(&self) -> String {
        format!("GroupReport({})", self.__str__())
    }
}
