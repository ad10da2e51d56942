//! `kvpool.PrefixCache`.

mod lease;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pyo3::PyTraverseError;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::base::{Device, Error};
use crate::cache::{Namespace, PolicyKind, Tokens, WaitingRank};
use crate::index::CallGuard;
use crate::memory::{Region, Stream};
use crate::pool::{
    Lease as PoolLease, LowerTier, PrefixCache as Cache, PrefixCacheConfig, Publication,
    Published as PoolPublished,
};

use super::args::{self, Arg};
use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::cache_object::CacheObject;
use super::debug::Debug;
use super::fetch::{Fetch, PoolFetch};
use super::framework::current_stream;
use super::gdn_pool::GdnPool;
use super::host_tier::HostTier;
use super::page_keys::{digest, name_of, namespace_of};
use super::pool_name::PoolName;
use super::prefix_report::{Segment, event_to_py};
use super::session::Session;
use super::store_arg::lower_store;
use super::token_to_kv_pool_allocator::TokenToKvPoolAllocator;
use super::tokens::with_tokens;
use super::waiting_request::WaitingRequest;
use super::{logging, wait_polling};

pub(super) use lease::{Lease, Published};

/// Keeps the K and V of prompts and answers by their tokens, so that a request that begins like an earlier one
/// does not compute them again.
///
/// The cache owns whole pages of an allocator, from their publication to their eviction; requests hold
/// leases. A call of the allocator, or of a planner on it, that is short of slots evicts pages without a
/// lease. If all evictable pages would not suffice, it evicts none and fails. At any time `cached_size() ==
/// evictable_size() + locked_size()`. Freeing a cached slot through the allocator is an invalid free.
///
/// Token ids are ints in `[0, 2**31)`: a 1-D int32 or int64 tensor or array in host memory, or a list, is read
/// in place; other sequences of ints and tensors on a GPU are copied first. Prefixes are compared token by
/// token, never by a hash. A namespace (a str, bytes or an int, such as an adapter or a tenant) keeps prefixes
/// apart: two namespaces share nothing.
///
/// All calls are atomic and thread-safe. They wait for a GPU only for the values of an argument that the host
/// does not have (see `TokenToKVPoolAllocator`). Clearing the allocator empties the cache.
///
/// On a GPU, publish when the work that writes the K and V is enqueued on the current stream: prefixes are valid
/// in the order of that stream. Pages that are evicted, and duplicates, are reused in its order, too.
///
/// Args:
///     allocator: The allocator of the slots. The cache keeps whole pages of its page size.
///     states: A `GDNPool` with track slots, on the same device, for models with linear-attention states. A
///         prefix is then found only up to a snapshot of the state at its end.
///     policy: The order of eviction: "adaptive", "lru", "fifo", "lfu", "slru" or "priority". Only the ends of
///         prefixes are evicted, never pages that other cached prefixes continue.
///     cost: The seconds that a prefill takes: the adaptive policy then keeps what saves most seconds, else what
///         saves most tokens. It does not count with a tier below: what is loaded takes as long at any position.
///         Other policies do not use it.
///     tiers: The tiers below the device: nothing, a `HostTier` for this cache alone, or that and a store: a `FileStore`
///         or another `Store`. `Lease.load` loads evicted pages from the first, `fetch` copies pages from the
///         second to the first.
///     model: The name, in a store, of everything that K and V depend on besides the tokens, the namespace and the
///         shape of the pools: the model with its revision, and the rank if the model is divided among ranks.
///         Caches with the same name share pages. Required with a store, and only then.
///     max_pinned: The share of the allocator's capacity that `pin` may retain.
///     events: Whether to record changes for `events`.
///     name: The owner of cached slots in reports and `leaks`, and the name of this pool. Defaults to the class
///         name and a number, such as "PrefixCache-0".
///
/// Raises:
///     ConfigError: If `policy` is unknown, `max_pinned` is outside of [0, 1], the pools are on different devices,
///         the tier is for other pools or belongs to another cache, or only one of a store and `model` is given.
///     StateError: If the store is closed.
///     TypeError: If `tiers` has something else.
#[pyclass(extends = BasePool, frozen, module = "kvpool", name = "PrefixCache")]
pub(super) struct PrefixCache {
    cache: Cache,
    allocator: Py<TokenToKvPoolAllocator>,
    states: Option<Py<GdnPool>>,
    tiers: Vec<Py<PyAny>>,
    model: Option<String>,
    policy: String,
    device: Device,
}

impl CacheObject for Py<PrefixCache> {
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        self.get().stream(py)
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(self)
    }
}

impl PoolClass for PrefixCache {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&self.cache);
    }

    /// Gives back pages and snapshots after a clear of the allocator or the end of a pin.
    fn before_stats(&self, py: Python<'_>) -> PyResult<()> {
        let _ = self.cache.sizes(self.stream(py)?);
        Ok(())
    }
}

/// Converts the argument `tiers`.
fn lower_tier(tiers: &[Bound<'_, PyAny>], model: Option<&str>) -> PyResult<Option<LowerTier>> {
    let (host, store) = match tiers {
        [] => (None, None),
        [host] => (Some(host), None),
        [host, store] => (Some(host), Some(store)),
        more => {
            let text =
                format!("{} tiers were given; there can be a HostTier and a store below it", more.len());
            return Err(Error::config(text).into());
        }
    };
    let Some(given) = host else {
        lower_store(None, model, Vec::new)?;
        return Ok(None);
    };
    let host = given.cast::<HostTier>().map_err(|_| {
        PyTypeError::new_err(format!("tiers[0] must be a HostTier, not {}", args::kind_of(given)))
    })?;
    let host = Arc::clone(&host.get().tier);
    let region = |region: &Arc<Region>| (region.address().as_ptr().addr(), region.bytes());
    let store = lower_store(store, model, || host.regions().map(region).collect())?;
    Ok(Some(LowerTier { host, digest, store }))
}

impl PrefixCache {
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        current_stream(py, self.device)
    }

    /// Records the caller's line for the allocator, if it debugs.
    fn begin(&self, py: Python<'_>) -> PyResult<Option<CallGuard>> {
        self.allocator.get().debug.begin(py, None)
    }

    /// Logs what the tier below has to say.
    fn log_notes_below(&self, py: Python<'_>) {
        if let Some(Ok(host)) = self.tiers.first().map(|tier| tier.bind(py).cast::<HostTier>()) {
            host.get().log_notes(py);
        }
    }

    fn published(&self, outcome: PoolPublished) -> Published {
        let allocator = Arc::clone(&self.allocator.get().pool);
        Published { outcome, allocator, tensor: OnceLock::new(), device: self.device }
    }

    fn lease(slf: &Bound<'_, Self>, lease: Arc<PoolLease>) -> Lease {
        Lease { lease, cache: slf.clone().unbind() }
    }

    /// Leases a prefix, in a session or in none.
    fn match_with(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        session: Option<&Session>,
        stream: Stream,
    ) -> crate::base::Result<Arc<PoolLease>> {
        match session {
            None => self.cache.match_prefix(namespace, tokens, limit, stream),
            Some(Session { session, .. }) => {
                self.cache.match_in_session(session, namespace, tokens, limit, stream)
            }
        }
    }
}

#[pymethods]
impl PrefixCache {
    #[new]
    #[pyo3(signature = (allocator, *, states=None, policy="adaptive", cost=None, tiers=Vec::new(), model=None, max_pinned=0.5,
                        events=false, name=None),
           text_signature = "(allocator, *, states=None, policy=\"adaptive\", cost=None, tiers=(), model=None, \
                             max_pinned=0.5, events=False, name=None)")]
    #[expect(clippy::too_many_arguments, reason = "the parameters of Python")]
    fn new(
        py: Python<'_>,
        allocator: Py<TokenToKvPoolAllocator>,
        states: Option<Py<GdnPool>>,
        policy: &str,
        cost: Option<Bound<'_, PyAny>>,
        tiers: Vec<Bound<'_, PyAny>>,
        model: Option<String>,
        max_pinned: f64,
        events: bool,
        name: Option<String>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let name = name.map_or_else(|| PoolName::next("PrefixCache"), PoolName::from);
        let config = PrefixCacheConfig {
            policy: PolicyKind::parse(policy)?,
            cost: cost.map(|cost| args::prefill_cost(&cost)).transpose()?,
            max_pinned,
            name: name.to_string(),
            events: events.then_some(digest),
        };
        let pool = Arc::clone(&allocator.get().pool);
        let device = pool.device();
        let states_of = states.as_ref().map(|states| Arc::clone(&states.get().pool));
        let tier = lower_tier(&tiers, model.as_deref())?;
        let cache = py.detach(|| Cache::new(config, pool, states_of, tier))?;
        if let Some(warning) = cache.useless_tier() {
            logging::warn(py, &warning);
        }
        let tiers = tiers.into_iter().map(Bound::unbind).collect();
        let this = Self { cache, allocator, states, tiers, model, policy: policy.to_owned(), device };
        Ok(BasePool::named(name, Debug::OFF, this))
    }

    /// Leases the longest cached prefix, in whole pages. The pages found count as used. A miss is a lease of
    /// length 0, through which the request publishes what it computes.
    ///
    /// Args:
    ///     tokens: Token ids of the prompt.
    ///     namespace: A str, bytes or an int; `None` is a namespace of its own.
    ///     limit: Maximum length in tokens. Engines pass `len(tokens) - 1`: the last token must be computed.
    ///     session: The session whose next turn this is. The turn ends with the lease.
    ///     agree: For ranks that run one model together, with a store below: a function that gets the tokens which
    ///         this rank has, on the device and in host memory, and returns the smallest number of all ranks, as an
    ///         all-reduce does. `loadable` is then what all ranks can load, and host memory keeps it until the lease
    ///         loads, publishes or ends. Called once or, with states, until all agree, equally often on all ranks.
    ///         Without a store, ranks that make the same calls agree anyway.
    ///
    /// Raises:
    ///     ArgumentError: If a token is outside of [0, 2**31), `limit` is negative, the session is of another cache,
    ///         or `agree` returns less than the device has or more than this rank has. What `agree` raises.
    ///     TypeError: If `tokens` are not ints, or `namespace` is of another type.
    #[pyo3(signature = (tokens, *, namespace=None, limit=None, session=None, agree=None))]
    fn r#match(
        slf: &Bound<'_, Self>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        limit: Option<&Bound<'_, PyAny>>,
        session: Option<&Session>,
        agree: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Lease> {
        let (this, py) = (slf.get(), slf.py());
        let namespace = namespace_of(namespace)?;
        let limit = limit.map_or(Ok(usize::MAX), |limit| args::count("limit", limit))?;
        let stream = this.stream(py)?;
        let lease =
            with_tokens(tokens, |tokens| Ok(this.match_with(&namespace, tokens, limit, session, stream)?))?;
        if let Some(agree) = agree {
            let mut raised = None;
            let agreed = lease.agree(|have| {
                let least = agree.call1((have,)).and_then(|least| args::count("the result of agree", &least));
                least.map_err(|error| {
                    raised = Some(error);
                    Error::argument("agree has failed")
                })
            });
            this.log_notes_below(py);
            raised.map_or(Ok(()), Err)?;
            agreed?;
        }
        Ok(Self::lease(slf, lease))
    }

    /// Starts to fetch the pages of a prompt from the store to the host tier. Returns at once; a thread
    /// fetches the pages, one prompt after another. Call it when a request arrives, and call `match` when the
    /// request is about to run: `match` finds the pages that have arrived.
    ///
    /// Args:
    ///     tokens: As in `match`.
    ///     namespace: As in `match`.
    ///     limit: Maximum length of the prefix in tokens.
    ///
    /// Returns:
    ///     A `Fetch`; without a store it is over at once.
    ///
    /// Raises:
    ///     ArgumentError: As in `match`.
    ///     OutOfMemoryError: If no thread can be started.
    ///     TypeError: As in `match`.
    #[pyo3(signature = (tokens, *, namespace=None, limit=None))]
    fn fetch(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        limit: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Fetch> {
        let (namespace, stream) = (namespace_of(namespace)?, self.stream(py)?);
        let limit = limit.map_or(Ok(usize::MAX), |limit| args::count("limit", limit))?;
        let fetch = with_tokens(tokens, |tokens| Ok(self.cache.fetch(&namespace, tokens, limit, stream)?))?;
        Ok(Fetch { fetch: PoolFetch::Pages(fetch) })
    }

    /// Adds a prompt: matches it, publishes the rest, and releases the lease. The caller's slots of tokens
    /// that are cached already are freed.
    ///
    /// Args:
    ///     tokens: Token ids, from the first on.
    ///     slots: Their slots, which fill pages in order. Those of a partial page at the end stay the caller's.
    ///     namespace: As in `match`.
    ///     session: As in `match`.
    ///
    /// Raises:
    ///     ArgumentError: As in `match` and `Lease.publish`.
    ///     IndexOwnershipError: As in `Lease.publish`.
    #[pyo3(signature = (tokens, slots, *, namespace=None, session=None))]
    fn insert(
        slf: &Bound<'_, Self>,
        tokens: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        session: Option<&Session>,
    ) -> PyResult<Published> {
        let (this, py) = (slf.get(), slf.py());
        let namespace = namespace_of(namespace)?;
        let slots = args::indices(slots)?.values(py)?;
        let _acting = this.begin(py)?;
        let stream = this.stream(py)?;
        let (lease, published) = with_tokens(tokens, |tokens| {
            let lease = this.match_with(&namespace, tokens, 0, session, stream)?;
            let published =
                lease.publish(&Publication { tokens, slots: Some(&slots), state: None }, stream)?;
            Ok((lease, published))
        })?;
        lease.release(stream);
        Ok(this.published(published))
    }

    /// Returns the session with a name, for the turns of one conversation or agent: see `Session`. Sessions with
    /// equal names are one.
    ///
    /// Args:
    ///     name: A str, bytes or an int; `None` makes a session like no other.
    ///
    /// Raises:
    ///     TypeError: If `name` is of another type.
    #[pyo3(signature = (name=None))]
    fn session(slf: &Bound<'_, Self>, name: Option<&Bound<'_, PyAny>>) -> PyResult<Session> {
        let session = slf.get().cache.session(name_of("name", name)?);
        Ok(Session { session, cache: Box::new(slf.clone().unbind()) })
    }

    /// Adds a request to the engine's waiting queue: what it would find now is evicted after everything that is not retained,
    /// until it is removed or dropped. Call it when a request arrives or is preempted, `WaitingRequest.update` now and then
    /// while it waits, and `WaitingRequest.remove` once `match` has leased its prefix.
    ///
    /// Args:
    ///     tokens: As in `match`. They are not kept.
    ///     namespace: As in `match`.
    ///     limit: As in `match`. Pass the same: of states, the snapshot counts at which `match` will end.
    ///     rank: Requests of a lower rank are served first; those of one rank in the order in which they were added.
    ///
    /// Raises:
    ///     ArgumentError: As in `match`.
    ///     OverflowError: If `rank` does not fit 64 bits.
    ///     TypeError: As in `match`.
    #[pyo3(signature = (tokens, *, namespace=None, limit=None, rank=0))]
    fn add_waiting(
        slf: &Bound<'_, Self>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        limit: Option<&Bound<'_, PyAny>>,
        rank: i64,
    ) -> PyResult<WaitingRequest> {
        let (this, namespace) = (slf.get(), namespace_of(namespace)?);
        let limit = limit.map_or(Ok(usize::MAX), |limit| args::count("limit", limit))?;
        let (rank, stream) = (WaitingRank { priority: rank, arrival: 0 }, this.stream(slf.py())?);
        let request = with_tokens(tokens, |tokens| {
            Ok(this.cache.add_waiting(&namespace, tokens, limit, rank, stream)?)
        })?;
        Ok(WaitingRequest { request, cache: Box::new(slf.clone().unbind()) })
    }

    /// Evicts at least `tokens` tokens, or all that are evictable, and returns how many slots became free.
    ///
    /// Raises:
    ///     ArgumentError: If `tokens` is negative.
    fn evict(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<usize> {
        let tokens = args::count("tokens", tokens)?;
        let _acting = self.begin(py)?;
        Ok(self.cache.evict(tokens, self.stream(py)?))
    }

    /// Waits, without the GIL, until all copies of pages to host memory, and from there to a store, are
    /// complete. Without tiers it returns at once.
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
        let _acting = self.begin(py)?;
        let stream = self.stream(py)?;
        wait_polling(py, timeout, || self.cache.wait_written(Duration::ZERO, stream))
    }

    /// Gives up all prefixes, or those of a namespace, pinned or not. Prefixes with a lease are no longer
    /// found, and are given up when their last lease ends.
    #[pyo3(signature = (namespace=None))]
    fn clear(&self, py: Python<'_>, namespace: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let namespace = namespace.map(|object| namespace_of(Some(object))).transpose()?;
        let _acting = self.begin(py)?;
        self.cache.clear(namespace.as_ref(), self.stream(py)?);
        Ok(())
    }

    /// Retains the prefix of a lease, also after the lease ends: its pages are evicted after all pages that
    /// are not retained, the lowest priority first.
    ///
    /// Args:
    ///     lease: A lease of this cache.
    ///     seconds: If given, the pages are locked for that time, and `priority` has no effect.
    ///     priority: 0 to 254.
    ///
    /// Raises:
    ///     ArgumentError: If an argument is negative, or the lease is of another cache.
    ///     StaleError: If the lease was released, or the prefix was cleared.
    ///     StateError: If more than the share `max_pinned` of the capacity would be retained.
    #[pyo3(signature = (lease, *, seconds=None, priority=Arg::Missing),
           text_signature = "($self, lease, *, seconds=None, priority=0)")]
    fn pin(&self, py: Python<'_>, lease: &Lease, seconds: Option<f64>, priority: Arg<'_>) -> PyResult<()> {
        let time = seconds.map(Duration::try_from_secs_f64).transpose();
        let time = time.map_err(|error| Error::argument(format!("seconds is {seconds:?}: {error}")))?;
        let priority = priority.count("priority", 0)?;
        let priority = u8::try_from(priority).ok().filter(|&priority| priority < u8::MAX);
        let priority = priority.ok_or_else(|| Error::argument("priority is outside [0, 254]"))?;
        Ok(self.cache.pin(&lease.lease, time, priority, self.stream(py)?)?)
    }

    /// Returns the tokens of the longest cached prefix, in whole pages, without a lease and without refreshing
    /// it: for schedulers that choose among waiting requests.
    ///
    /// Raises:
    ///     TypeError: As in `match`.
    #[pyo3(signature = (tokens, *, namespace=None))]
    fn cached_len(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (namespace, stream) = (namespace_of(namespace)?, self.stream(py)?);
        with_tokens(tokens, |tokens| Ok(self.cache.cached_len(&namespace, tokens, stream)?))
    }

    /// Returns where each part of a prompt is cached, or why it is not. Refreshes nothing.
    ///
    /// Evictions are remembered for a while: the last 32,768 places, one for each 64 tokens of a prefix and
    /// one where an eviction ended, so fewer tokens if pages are evicted one by one. This is a call for
    /// debugging, because it looks at every namespace. Waits for the store, if there is one.
    ///
    /// Args:
    ///     tokens: As in `match`.
    ///     namespace: As in `match`.
    ///
    /// Returns:
    ///     A list of `Segment`, which together cover the prompt, in order.
    ///
    /// Raises:
    ///     ArgumentError: As in `match`.
    ///     TypeError: As in `match`.
    #[pyo3(signature = (tokens, namespace=None))]
    fn explain(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Segment>> {
        let (namespace, stream) = (namespace_of(namespace)?, self.stream(py)?);
        let parts = with_tokens(tokens, |tokens| Ok(self.cache.explain(&namespace, tokens, stream)?))?;
        Ok(parts.into_iter().map(Segment).collect())
    }

    /// Returns the changes since the last call, in order: objects of `Stored`, `Removed` and `Cleared`,
    /// from which a router learns what is cached here. 65,536 events are kept; a reader that falls further behind
    /// gets `Cleared` and must start over.
    ///
    /// Raises:
    ///     StateError: If the cache was made without `events=True`.
    fn events(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let events = self.cache.take_events(self.stream(py)?)?;
        events.into_iter().map(|event| event_to_py(py, event)).collect()
    }

    /// Returns the number of cached tokens.
    fn cached_size(&self, py: Python<'_>) -> PyResult<usize> {
        let sizes = self.cache.sizes(self.stream(py)?);
        Ok(sizes.evictable + sizes.locked)
    }

    /// Returns the number of cached tokens that no lease holds.
    fn evictable_size(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.cache.sizes(self.stream(py)?).evictable)
    }

    /// Returns the number of cached tokens that leases hold.
    fn locked_size(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.cache.sizes(self.stream(py)?).locked)
    }

    /// Returns the number of slots that an allocation can get: those that are free, and those that are
    /// evictable.
    fn obtainable_size(&self, py: Python<'_>) -> PyResult<usize> {
        let stream = self.stream(py)?;
        Ok(self.allocator.get().pool.available_size() + self.cache.sizes(stream).evictable)
    }

    /// Returns how many evicted tokens had an age below 1, 2, 4, ... when they were evicted: the number of
    /// tokens that were looked up after their last use.
    fn eviction_ages(&self) -> Vec<u64> {
        self.cache.eviction_ages().to_vec()
    }

    /// Checks every invariant of the cache.
    ///
    /// Raises:
    ///     IndexOwnershipError: If a check fails, with a description.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.cache.verify(self.stream(py)?)?)
    }

    /// The allocator of the slots.
    #[getter]
    fn allocator(&self, py: Python<'_>) -> Py<TokenToKvPoolAllocator> {
        self.allocator.clone_ref(py)
    }

    /// The pool of states, if there is one.
    #[getter]
    fn states(&self, py: Python<'_>) -> Option<Py<GdnPool>> {
        self.states.as_ref().map(|states| states.clone_ref(py))
    }

    /// The tiers below the device: a tuple.
    #[getter]
    fn tiers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.tiers)
    }

    /// The name of the model in the store, as passed to the constructor; `None` without a store.
    #[getter]
    fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// The name of the policy.
    #[getter]
    fn policy(&self) -> &str {
        &self.policy
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let sizes = self.cache.sizes(self.stream(py)?);
        Ok(format!(
            "PrefixCache(policy='{}', cached={}, locked={}, device='{}')",
            self.policy,
            sizes.evictable + sizes.locked,
            sizes.locked,
            self.device
        ))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.allocator)?;
        visit.call(&self.states)?;
        self.tiers.iter().try_for_each(|tier| visit.call(tier))
    }
}
