//! `kvpool.PrefixCache`, `kvpool.Lease` and `kvpool.Published`.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pyo3::PyTraverseError;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::base::{Device, Error, Id, IndexVec, Page};
use crate::cache::PolicyKind;
use crate::index::ActGuard;
use crate::memory::Stream;
use crate::pool::{
    HostTier as HostTierOfPool, Lease as PoolLease, LowerStore, LowerTier, PrefixCache as Cache,
    PrefixCacheConfig, Publication, Published as PoolPublished, Store,
};

use super::args::{self, Arg};
use super::base_pool::{BasePool, Look, PoolClass};
use super::debug::Debug;
use super::export::to_tensor;
use super::fetch::Fetch;
use super::file_store::FileStore;
use super::framework::current_stream;
use super::gdn_pool::GdnPool;
use super::host_tier::{HostTier, Load};
use super::page_keys::{digest, namespace_of, namespace_to_py};
use super::prefix_report::{Segment, event_to_py};
use super::store_queue::StoreQueue;
use super::token_to_kv_pool_allocator::TokenToKvPoolAllocator;
use super::tokens::with_tokens;

/// Keeps the K and V of prompts and answers by their tokens, so that a request that begins like an earlier one
/// does not compute them again.
///
/// The cache owns whole pages of an allocator, from their publication to their eviction; requests hold
/// leases. A call of the allocator, or of a planner on it, that is short of slots evicts pages without a
/// lease, and fails, without evicting any, only if all that are evictable would not do. At any time `cached_size() == evictable_size() +
/// locked_size()`. Freeing a cached slot through the allocator is an invalid free.
///
/// Token ids are ints in `[0, 2**31)`: a 1-D int32 or int64 tensor or array in host memory, or a list, is read
/// in place; other sequences of ints and tensors on a GPU are copied first. Prefixes are compared token by
/// token, never by a hash. A namespace (a str, bytes or an int, such as an adapter or a tenant) keeps prefixes
/// apart: two namespaces share nothing.
///
/// All calls are atomic and thread-safe. They wait for a GPU only for the values of an argument that the host
/// does not know (see `TokenToKVPoolAllocator`). Clearing the allocator empties the cache.
///
/// On a GPU, publish when the work that writes the K and V is enqueued on the current stream: prefixes are valid
/// in the order of that stream. Pages that are evicted, and duplicates, are reused in its order, too.
///
/// Args:
///     allocator: The allocator of the slots. The cache keeps whole pages of its page size.
///     states: A `GDNPool` with track slots, on the same device, for models with linear-attention states. A
///         prefix is then found only up to a snapshot of the state at its end.
///     policy: What is evicted first: "adaptive", "lru", "fifo", "lfu", "slru" or "priority". Only the ends of
///         prefixes are evicted, never what other cached prefixes continue.
///     tiers: What lies below the device: nothing, a `HostTier` for this cache alone, or that and a store: a `FileStore`
///         or another `Store`. `Lease.load` brings back from the first what is evicted, `fetch` brings there what the
///         second has.
///     model: Names, for a store, what the bytes of K and V depend on beside the tokens, the namespace and the shape of
///         the pools: the model and its revision, and the part of it if there are several, such as a rank.
///         Caches with the same name share pages. Needed with a store, and only then.
///     max_pinned: The share of the allocator's capacity that `pin` may retain.
///     events: Whether to list what comes and goes for `events`.
///     name: The owner of cached slots in reports and `leaks`, and the name of this pool. Defaults to the class
///         name and a number, such as "PrefixCache-0".
///
/// Raises:
///     ConfigError: If `policy` is unknown, `max_pinned` is outside of [0, 1], the pools are on different devices,
///         the tier is for other pools or belongs to another cache, or only one of a store and `model` is given.
///     RuntimeError: If the store is closed.
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

impl PoolClass for PrefixCache {
    fn look(&self, look: Look<'_>) {
        look(&self.cache);
    }

    /// Gives back what a cleared allocator or the end of a pin leaves.
    fn before_stats(&self, py: Python<'_>) -> PyResult<()> {
        let _ = self.cache.sizes(self.stream(py)?);
        Ok(())
    }
}

/// What lies below the device.
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
        return model.map_or(Ok(None), |model| Err(without_store(model)));
    };
    let host = given.cast::<HostTier>().map_err(|_| {
        PyTypeError::new_err(format!("tiers[0] must be a HostTier, not {}", args::kind_of(given)))
    })?;
    let host = Arc::clone(&host.get().tier);
    let store = match (store.map(GivenStore::of).transpose()?, model) {
        (None, None) => None,
        (Some(store), Some(model)) => {
            Some(LowerStore { store: store.attached(&host)?, model: model.to_owned() })
        }
        (Some(_), None) => {
            return Err(Error::config("a store needs the name of the model whose pages it has: model").into());
        }
        (None, Some(model)) => return Err(without_store(model)),
    };
    Ok(Some(LowerTier { host, digest, store }))
}

#[cold]
fn without_store(model: &str) -> PyErr {
    Error::config(format!("model is {model:?}, but there is no store whose pages it would name")).into()
}

/// A store as its user gave it.
enum GivenStore<'a, 'py> {
    Files(&'a Bound<'py, FileStore>),
    Python { store: &'a Bound<'py, PyAny>, queue: Bound<'py, StoreQueue> },
}

impl<'a, 'py> GivenStore<'a, 'py> {
    fn of(object: &'a Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(files) = object.cast::<FileStore>() {
            return Ok(Self::Files(files));
        }
        let queue = object.getattr_opt("_queue")?.and_then(|queue| queue.cast_into::<StoreQueue>().ok());
        let queue = queue.ok_or_else(|| {
            let kind = args::kind_of(object);
            PyTypeError::new_err(format!("tiers[1] must be a FileStore or another Store, not {kind}"))
        })?;
        Ok(Self::Python { store: object, queue })
    }

    /// The store, which takes note of the memory of the tier above it.
    fn attached(self, host: &HostTierOfPool) -> PyResult<Arc<dyn Store>> {
        match self {
            Self::Files(files) => Ok(Arc::clone(&files.get().store) as _),
            Self::Python { store, queue } => {
                let memory = host.memory()?;
                let memory: Vec<_> =
                    memory.iter().map(|rows| (rows.address_of(0), rows.bytes_of(0))).collect();
                store.call_method1("attach", (memory,))?;
                Ok(Arc::clone(&queue.get().store) as _)
            }
        }
    }
}

impl PrefixCache {
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        current_stream(py, self.device)
    }

    /// Records the caller's line for the allocator, if it debugs.
    fn begin(&self, py: Python<'_>) -> PyResult<Option<ActGuard>> {
        self.allocator.get().debug.begin(py, None)
    }

    fn lease(slf: &Bound<'_, Self>, lease: Arc<PoolLease>) -> Lease {
        Lease { lease, cache: slf.clone().unbind() }
    }
}

#[pymethods]
impl PrefixCache {
    #[new]
    #[pyo3(signature = (allocator, *, states=None, policy="adaptive", tiers=Vec::new(), model=None, max_pinned=0.5,
                        events=false, name=None),
           text_signature = "(allocator, *, states=None, policy=\"adaptive\", tiers=(), model=None, \
                             max_pinned=0.5, events=False, name=None)")]
    #[expect(clippy::too_many_arguments, reason = "the parameters of Python")]
    fn new(
        py: Python<'_>,
        allocator: Py<TokenToKvPoolAllocator>,
        states: Option<Py<GdnPool>>,
        policy: &str,
        tiers: Vec<Bound<'_, PyAny>>,
        model: Option<String>,
        max_pinned: f64,
        events: bool,
        name: Option<String>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let name = name.unwrap_or_else(|| BasePool::next_name("PrefixCache"));
        let config = PrefixCacheConfig {
            policy: PolicyKind::parse(policy)?,
            max_pinned,
            name: name.clone(),
            events: events.then_some(digest),
        };
        let pool = Arc::clone(&allocator.get().pool);
        let device = pool.device();
        let states_of = states.as_ref().map(|states| Arc::clone(&states.get().pool));
        let tier = lower_tier(&tiers, model.as_deref())?;
        let cache = py.detach(|| Cache::new(config, pool, states_of, tier))?;
        let tiers = tiers.into_iter().map(Bound::unbind).collect();
        let this = Self { cache, allocator, states, tiers, model, policy: policy.to_owned(), device };
        Ok(BasePool::named(name, Debug::OFF, this))
    }

    /// Leases the longest cached prefix, in whole pages. Refreshes what it finds. A miss is a lease of length
    /// 0, through which the request publishes what it computes.
    ///
    /// Args:
    ///     tokens: Token ids of the prompt.
    ///     namespace: A str, bytes or an int; `None` is a namespace of its own.
    ///     limit: Maximum length in tokens. Engines pass `len(tokens) - 1`: the last token must be computed.
    ///
    /// Raises:
    ///     ConfigError: If a token is outside of [0, 2**31), or `limit` is negative.
    ///     TypeError: If `tokens` are no ints, or `namespace` is of another type.
    #[pyo3(signature = (tokens, *, namespace=None, limit=None))]
    fn r#match(
        slf: &Bound<'_, Self>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        limit: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Lease> {
        let (this, py) = (slf.get(), slf.py());
        let namespace = namespace_of(namespace)?;
        let limit = limit.map_or(Ok(usize::MAX), |limit| args::count("limit", limit))?;
        let stream = this.stream(py)?;
        let lease =
            with_tokens(tokens, |tokens| Ok(this.cache.acquire(&namespace, tokens, limit, stream)?))?;
        Ok(Self::lease(slf, lease))
    }

    /// Begins to bring to the host tier what the store below it has of a prompt. Returns at once: a thread looks, and
    /// prompts come one after the other. Call it when a request arrives, and `match` when it is its turn: that finds
    /// what came until then.
    ///
    /// Args:
    ///     tokens: As in `match`.
    ///     namespace: As in `match`.
    ///     limit: Maximum length of the prefix in tokens.
    ///
    /// Returns:
    ///     A `Fetch`; without a store one that is over.
    ///
    /// Raises:
    ///     ConfigError: As in `match`.
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
        Ok(Fetch { fetch })
    }

    /// Adds a prompt: matches it, publishes the rest, and releases the lease. The caller's slots of tokens
    /// that are cached already are freed.
    ///
    /// Args:
    ///     tokens: Token ids, from the first on.
    ///     slots: Their slots, which fill pages in order. Those of a partial page at the end stay the caller's.
    ///     namespace: As in `match`.
    ///
    /// Raises:
    ///     ConfigError: As in `match` and `Lease.publish`.
    ///     IndexOwnershipError: As in `Lease.publish`.
    #[pyo3(signature = (tokens, slots, *, namespace=None))]
    fn insert(
        slf: &Bound<'_, Self>,
        tokens: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Published> {
        let (this, py) = (slf.get(), slf.py());
        let namespace = namespace_of(namespace)?;
        let slots = args::indices(slots)?.values(py)?;
        let _acting = this.begin(py)?;
        let stream = this.stream(py)?;
        let (lease, published) = with_tokens(tokens, |tokens| {
            let lease = this.cache.acquire(&namespace, tokens, 0, stream)?;
            let published =
                lease.publish(&Publication { tokens, slots: Some(&slots), state: None }, stream)?;
            Ok((lease, published))
        })?;
        lease.release(stream);
        Ok(Published { outcome: published, lease, tensor: OnceLock::new(), device: this.device })
    }

    /// Evicts at least `tokens` tokens, or all that are evictable, and returns how many slots became free.
    ///
    /// Raises:
    ///     ConfigError: If `tokens` is negative.
    fn evict(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<usize> {
        let tokens = args::count("tokens", tokens)?;
        let _acting = self.begin(py)?;
        Ok(self.cache.evict(tokens, self.stream(py)?))
    }

    /// Gives up all prefixes, or those of a namespace, pinned or not. Prefixes with a lease are found no more,
    /// and are given up with their last lease.
    #[pyo3(signature = (namespace=None))]
    fn clear(&self, py: Python<'_>, namespace: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let namespace = namespace.map(|object| namespace_of(Some(object))).transpose()?;
        let _acting = self.begin(py)?;
        self.cache.clear(namespace.as_ref(), self.stream(py)?);
        Ok(())
    }

    /// Retains the prefix of a lease beyond it: pages are evicted after all that are not retained, the lowest
    /// priority first.
    ///
    /// Args:
    ///     lease: A lease of this cache.
    ///     seconds: If given, the pages are locked for that time, and `priority` has no effect.
    ///     priority: 0 to 254.
    ///
    /// Raises:
    ///     ConfigError: If more than the share `max_pinned` of the capacity would be retained, an argument is
    ///         negative, the prefix was cleared, or the lease is of another cache.
    ///     StaleBufferError: If the lease was released.
    #[pyo3(signature = (lease, *, seconds=None, priority=Arg::Missing),
           text_signature = "($self, lease, *, seconds=None, priority=0)")]
    fn pin(&self, py: Python<'_>, lease: &Lease, seconds: Option<f64>, priority: Arg<'_>) -> PyResult<()> {
        let time = seconds.map(Duration::try_from_secs_f64).transpose();
        let time = time.map_err(|error| Error::config(format!("seconds is {seconds:?}: {error}")))?;
        let priority = priority.count("priority", 0)?;
        let priority = u8::try_from(priority).ok().filter(|&priority| priority < u8::MAX);
        let priority = priority.ok_or_else(|| Error::config("priority is outside [0, 254]"))?;
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

    /// Says of each part of a prompt where it is cached, or why it is not. Refreshes nothing.
    ///
    /// What was evicted is remembered for a while: the last 32,768 places, one for each 64 tokens of a prefix
    /// and one where an eviction ended, so fewer tokens if pages go one by one. A look at every namespace makes
    /// this a call for debugging. A store is asked, and waited for.
    ///
    /// Args:
    ///     tokens: As in `match`.
    ///     namespace: As in `match`.
    ///
    /// Returns:
    ///     A list of `Segment`, which together cover the prompt, in order.
    ///
    /// Raises:
    ///     ConfigError: As in `match`.
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

    /// Returns what came and went since the last call, in order: objects of `Stored`, `Removed` and `Cleared`,
    /// from which a router knows what is cached here. 65,536 events are kept; a reader that is later than that
    /// is told to begin anew, by `Cleared`.
    ///
    /// Raises:
    ///     ConfigError: If the cache was made without `events=True`.
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

    /// What lies below the device: a tuple.
    #[getter]
    fn tiers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.tiers)
    }

    /// The name of what the K and V are of, if there is a store.
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

/// A request's hold on a cached prefix, whose pages are not evicted. As a context manager it is released at
/// the end of the block; a lease that is dropped is released, too.
#[pyclass(frozen, module = "kvpool", name = "Lease", weakref)]
pub(super) struct Lease {
    pub(super) lease: Arc<PoolLease>,
    cache: Py<PrefixCache>,
}

impl Lease {
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        self.cache.get().stream(py)
    }

    fn offer(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        slots: Option<&IndexVec>,
        state: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PoolPublished> {
        let state = state.map(args::int).transpose()?;
        let stream = self.stream(py)?;
        with_tokens(tokens, |tokens| Ok(self.lease.publish(&Publication { tokens, slots, state }, stream)?))
    }
}

#[pymethods]
impl Lease {
    /// Tokens of the prefix, in whole pages.
    ///
    /// Raises:
    ///     StaleBufferError: If the lease was released, or the allocator was cleared.
    #[getter]
    fn length(&self) -> PyResult<usize> {
        Ok(self.lease.len()?)
    }

    /// Tokens whose K and V were cached at the match, in whole pages. More than `length` only if the cache has
    /// states, and no snapshot of the state at their end: other prompts part from this one there, so that a chunk
    /// of a prefill should end there and be published with its state.
    ///
    /// Raises:
    ///     StaleBufferError: If the lease was released, or the allocator was cleared.
    #[getter]
    fn kv_length(&self) -> PyResult<usize> {
        Ok(self.lease.kv_len()?)
    }

    fn __len__(&self) -> PyResult<usize> {
        self.length()
    }

    /// Tokens behind the prefix that the tiers below the device had at the match: what `load` can bring back. 0 after
    /// a load or a publication.
    ///
    /// Raises:
    ///     StaleBufferError: If the lease was released, or the allocator was cleared.
    #[getter]
    fn loadable(&self) -> PyResult<usize> {
        Ok(self.lease.loadable()?)
    }

    /// The slots of the prefix: 1-D `[length]` in the allocator's `index_dtype`, on its device, made by each access.
    ///
    /// Raises:
    ///     StaleBufferError: If the lease was released, or the allocator was cleared.
    #[getter]
    fn slots(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_tensor(py, &self.lease.slots(self.stream(py)?)?)
    }

    /// The track slot with the state at the end of the prefix; `None` for a prefix without tokens and a cache
    /// without states.
    ///
    /// Raises:
    ///     StaleBufferError: If the lease was released, or the allocator was cleared.
    #[getter]
    fn state_slot(&self) -> PyResult<Option<u32>> {
        Ok(self.lease.state_slot()?.map(Id::number))
    }

    /// The namespace of the prefix.
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        namespace_to_py(py, self.lease.namespace())
    }

    /// Whether the lease was released, or the allocator was cleared.
    #[getter]
    fn released(&self) -> bool {
        self.lease.len().is_err()
    }

    /// Offers what the request has computed since: whole pages become the cache's, and the lease grows over
    /// them. Costs what the new tokens cost. The partial page at the end stays the caller's.
    ///
    /// What another request has published in between is not kept twice: the caller's slots of these pages are
    /// freed, and the request continues with those of the cache (`Published.slots`).
    ///
    /// Args:
    ///     tokens: Token ids of positions `length` and up, only the new ones.
    ///     slots: Their slots, ints of the same length, which fill pages in order. The caller's ownership of
    ///         whole pages passes to the cache. Not needed for a lease that a planner has: it knows the slots
    ///         of its requests.
    ///     row: The request row of a lease that a planner has; only checked. The planner's next call with the
    ///         row writes the cache's slots to the request table, in place of those of duplicates. Without a
    ///         planner the cache knows no table: write `Published.slots` to yours.
    ///     state: A working slot of the cache's states, whose state is that after the last whole page. A
    ///         snapshot of it is kept if a track slot is free or can be given up: superseded ones first, which are
    ///         earlier ones of the same lease behind the tokens that it was matched with. The state is copied
    ///         before anything is published, on the current stream.
    ///
    /// Nothing is changed if the call raises, except that another snapshot may have been given up for the state.
    ///
    /// Raises:
    ///     ConfigError: If a token is outside of [0, 2**31), or `tokens` and `slots` differ in length.
    ///     DriverError: If the state cannot be copied.
    ///     IndexError: If there is no slot `state`.
    ///     IndexOwnershipError: If a slot is not in use, listed twice, cached already, or not at its place in a
    ///         page.
    ///     StaleBufferError: If the lease was released, or the allocator was cleared.
    #[pyo3(signature = (tokens, slots=None, *, state=None, row=None))]
    fn publish(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        slots: Option<&Bound<'_, PyAny>>,
        state: Option<&Bound<'_, PyAny>>,
        row: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Published> {
        let slots = slots.map(|slots| args::indices(slots)?.values(py)).transpose()?;
        if let Some(row) = row.map(args::int).transpose()?
            && self.lease.row().map(|row| i64::from(row.number())) != Some(row)
        {
            let text = match self.lease.row() {
                None => format!(
                    "row {row} was given for a lease that no planner has, and the cache knows no other request \
                     table; write the slots published to the row yourself"
                ),
                Some(other) => format!("row {row} was given for the lease of request row {other}"),
            };
            return Err(Error::config(text).into());
        }
        let _acting = self.cache.get().begin(py)?;
        let published = self.offer(py, tokens, slots.as_ref(), state)?;
        let (lease, device) = (Arc::clone(&self.lease), self.cache.get().device);
        Ok(Published { outcome: published, lease, tensor: OnceLock::new(), device })
    }

    /// Publishes, frees the partial page at the end, and releases the lease: the end of a request without a
    /// planner. With one, publish and call `BatchPlanner.finish`. Nothing is changed if the call raises.
    ///
    /// Args:
    ///     tokens: As in `publish`.
    ///     slots: As in `publish`.
    ///
    /// Raises:
    ///     ConfigError: As in `publish`.
    ///     IndexOwnershipError: As in `publish`.
    ///     StaleBufferError: As in `publish`.
    fn finish(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>, slots: &Bound<'_, PyAny>) -> PyResult<()> {
        let slots = args::indices(slots)?.values(py)?;
        let _acting = self.cache.get().begin(py)?;
        let stream = self.stream(py)?;
        with_tokens(tokens, |tokens| Ok(self.lease.finish(tokens, &slots, stream)?))?;
        Ok(())
    }

    /// Brings back what the tiers below the device have behind the prefix. The lease has its slots from now on; what
    /// uses a layer goes behind `Load.wait_layer`. What another request is loading is not loaded twice.
    ///
    /// Load before a planner has the lease, and publish behind the last layer: a publication while tokens are on
    /// their way raises. On a GPU the copies run on a stream of their own, behind what is enqueued on the current
    /// stream.
    ///
    /// Args:
    ///     limit: Maximum number of tokens to load.
    ///
    /// Returns:
    ///     A `Load`, or `None` if there are not enough slots, or no track slot for the state.
    ///
    /// Raises:
    ///     ConfigError: If `limit` is negative, a planner has the lease, or it is loading already.
    ///     DriverError: If a copy cannot be enqueued, as while the current stream is being captured.
    ///     StaleBufferError: If the lease was released, or the allocator was cleared.
    #[pyo3(signature = (*, limit=None))]
    fn load(&self, py: Python<'_>, limit: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Load>> {
        let limit = limit.map_or(Ok(usize::MAX), |limit| args::count("limit", limit))?;
        let _acting = self.cache.get().begin(py)?;
        let load = self.lease.load(limit, self.stream(py)?)?;
        Ok(load.map(|load| Load { load, device: self.cache.get().device }))
    }

    /// Copies the state at the end of the prefix to a working slot of the cache's states, or resets that for a
    /// prefix without tokens. Enqueued on the current stream.
    ///
    /// Raises:
    ///     ConfigError: If the cache was made without states, or the prefix has tokens and no snapshot.
    ///     IndexError: If the slot does not exist.
    ///     StaleBufferError: If the lease was released, or the allocator was cleared.
    fn restore(&self, py: Python<'_>, row: &Bound<'_, PyAny>) -> PyResult<()> {
        let row = args::int(row)?;
        Ok(self.lease.restore(row, self.stream(py)?)?)
    }

    /// Ends the lease. Does nothing if it has ended. A planner that has the lease keeps the prefix until the
    /// request is finished.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let _acting = self.cache.get().begin(py)?;
        self.lease.release(self.stream(py)?);
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release(py)
    }

    fn __repr__(&self) -> String {
        self.lease.len().map_or_else(
            |_| "Lease(released)".to_owned(),
            |length| format!("Lease(length={length}, namespace={})", self.lease.namespace()),
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.cache)
    }
}

/// The result of a publication.
#[pyclass(frozen, module = "kvpool", name = "Published")]
pub(super) struct Published {
    outcome: PoolPublished,
    lease: Arc<PoolLease>,
    tensor: OnceLock<Py<PyAny>>,
    device: Device,
}

#[pymethods]
impl Published {
    /// Tokens of the lease now.
    #[getter]
    const fn length(&self) -> usize {
        self.outcome.length
    }

    /// Tokens that another request had published in between. The caller's slots of them were freed.
    #[getter]
    const fn duplicates(&self) -> usize {
        self.outcome.duplicates
    }

    /// The cache's slots of the tokens published, from the former length of the lease to `length`: 1-D tensor
    /// on the allocator's device. Without duplicates they are the caller's.
    #[getter]
    fn slots(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        if let Some(tensor) = self.tensor.get() {
            return Ok(tensor.clone_ref(py));
        }
        let pages: &[Page] = &self.outcome.pages;
        let tensor = to_tensor(py, &self.lease.show(pages, current_stream(py, self.device)?)?)?;
        Ok(self.tensor.get_or_init(|| tensor).clone_ref(py))
    }

    fn __repr__(&self) -> String {
        format!("Published(length={}, duplicates={})", self.outcome.length, self.outcome.duplicates)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.tensor.get().map_or(Ok(()), |tensor| visit.call(tensor))
    }
}
