//! `kvpool.HostTier` and `kvpool.Load`.

use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::base::{Device, Error};
use crate::cache::WritePolicy;
use crate::memory::{Backend, MappedHost};
use crate::pool::{HostTier as Tier, HostTierConfig, Load as PoolLoad};

use super::args;
use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::chunk_pool::page_lock_threads;
use super::debug::Debug;
use super::framework::current_stream;
use super::gdn_pool::GdnPool;
use super::kv_pool::KvPool;
use super::{environment, logging, wait_in_slices, wait_polling};

/// Host memory below a `PrefixCache`. Loading pages from there with `Lease.load` is faster than computing
/// them.
///
/// Each page of K and V is one contiguous piece: the K and then the V of the first layer, then of the next.
/// Copies run in the background, one after the other in each direction: on a thread or, for a pool on a GPU,
/// on a separate stream. A page can be loaded from the moment its copy begins. Pages that the cache has on the device, too,
/// are evicted last. Of the others, those that are worth least by the `adaptive` policy of the cache are evicted first or,
/// with another policy or another `write` than "through", those that were evicted from the device first.
///
/// If there is a driver and the pool is on a GPU, the memory is page-locked in steps on threads, like that of
/// a `ChunkPool`, and can be used before all of it is page-locked. Copies in both directions then pass through
/// staging areas on the GPU, so that copy engines move them over the bus and not kernels, which would take
/// multiprocessors from the model and wait for them: `KVPOOL_STAGING_BYTES`, 192 MiB by default and at most three
/// times the tier; 0 for none.
///
/// Args:
///     kv: The pool of the K and V.
///     size: Tokens to make room for, in whole pages.
///     states: The `GDNPool` of the cache, for models with linear-attention states.
///     max_states: Snapshots of states to make room for. Defaults to the number per token that `states` has per
///         token of `kv`.
///     pin_memory: Whether to page-lock the memory for a pool on a GPU.
///     write: When pages are copied there: "through", when they are published; "selective", when a second request
///         uses them; or "back", when they are evicted from the device: whoever takes their slots comes after the
///         copy. Snapshots of states are copied when they are made or, with "selective", when a second request uses
///         them.
///
/// Raises:
///     ConfigError: If a size is below a page or below 1, `write` is unknown, `max_states` is given without `states`,
///         or the pools are on different devices.
///     OutOfMemoryError: If there is not enough memory.
#[pyclass(extends = BasePool, frozen, module = "kvpool", name = "HostTier")]
pub(super) struct HostTier {
    pub(super) tier: Arc<Tier>,
    kv: Py<KvPool>,
    states: Option<Py<GdnPool>>,
}

impl PoolClass for HostTier {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&*self.tier);
    }

    fn before_stats(&self, py: Python<'_>) -> PyResult<()> {
        self.log_notes(py);
        Ok(())
    }
}

impl HostTier {
    /// Logs why copies to the tier failed, and which pieces were damaged there.
    pub(super) fn log_notes(&self, py: Python<'_>) {
        for note in self.tier.take_notes() {
            logging::warn(py, &note);
        }
    }
}

/// Returns the most bytes of the staging area of a tier: `KVPOOL_STAGING_BYTES`.
pub(super) fn staging_bytes() -> PyResult<usize> {
    // Two halves of 64 MiB for what goes out, and four parts of 16 MiB for what comes in. While a kernel of others
    // holds the device, nothing is gathered or scattered, and smaller ones leave the bus idle then (H100, 2026-11-26).
    const USUAL: usize = 192 << 20;
    environment::number_of("KVPOOL_STAGING_BYTES", 0, USUAL)
}

/// The ways to write, and their names.
const WRITES: [(&str, WritePolicy); 3] =
    [("through", WritePolicy::Through), ("selective", WritePolicy::Selective), ("back", WritePolicy::Back)];

#[pymethods]
impl HostTier {
    #[new]
    #[pyo3(signature = (kv, size, *, states=None, max_states=None, pin_memory=true, write="through"))]
    fn new(
        py: Python<'_>,
        kv: Py<KvPool>,
        size: &Bound<'_, PyAny>,
        states: Option<Py<GdnPool>>,
        max_states: Option<&Bound<'_, PyAny>>,
        pin_memory: bool,
        write: &str,
    ) -> PyResult<PyClassInitializer<Self>> {
        let size = args::size("size", size)?;
        let write =
            WRITES.iter().find(|(name, _)| *name == write).map(|(_, write)| *write).ok_or_else(|| {
                Error::config(format!("write is '{write}'; it is 'through', 'selective' or 'back'"))
            })?;
        let (pool, gdn) = (kv.get().shared(), states.as_ref().map(|states| &states.get().pool));
        let in_proportion = |slots: usize| (slots.saturating_mul(size)).div_ceil(pool.config().size).max(1);
        let max_states = match (max_states, gdn) {
            (Some(states), _) => args::size("max_states", states)?,
            (None, gdn) => gdn.map_or(0, |gdn| in_proportion(gdn.config().max_track_slots)),
        };
        let page_lock_threads = page_lock_threads()?;
        let staging_bytes = staging_bytes()?;
        let config = HostTierConfig { size, max_states, write, pin_memory, page_lock_threads, staging_bytes };
        let backend: Arc<dyn Backend> = Arc::new(MappedHost::default());
        let tier = Arc::new(py.detach(|| Tier::new(&config, pool, gdn, &backend))?);
        Ok(BasePool::initializer("HostTier", Debug::OFF, Self { tier, kv, states }))
    }

    /// Waits, without the GIL, until page-locking has ended.
    ///
    /// Args:
    ///     timeout: Seconds; `None` for any time.
    ///
    /// Returns:
    ///     Whether it has ended within the time.
    ///
    /// Raises:
    ///     ArgumentError: If `timeout` is negative.
    ///     DriverError: In a forked child.
    #[pyo3(signature = (timeout=None))]
    fn wait_page_locked(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        wait_in_slices(py, timeout, |timeout| self.tier.wait_page_locked(timeout))
    }

    /// Gives up all pages and snapshots. Those that are being copied keep their places until the copy is over. This
    /// emits no events: `PrefixCache.clear` clears both and emits them.
    fn clear(&self) {
        self.tier.clear(None);
    }

    /// Checks every invariant of the tier.
    ///
    /// Raises:
    ///     IndexOwnershipError: If a check fails, with a description.
    fn verify(&self) -> PyResult<()> {
        Ok(self.tier.verify()?)
    }

    /// Bytes of the memory.
    fn mem_bytes(&self) -> usize {
        self.tier.mem_bytes()
    }

    /// Bytes of GPU memory through which copies come here; 0 if there is no such area.
    fn staging_bytes(&self) -> usize {
        self.tier.staging_bytes()
    }

    /// The pool of the K and V.
    #[getter]
    fn kv(&self, py: Python<'_>) -> Py<KvPool> {
        self.kv.clone_ref(py)
    }

    /// The pool of states, if there is one.
    #[getter]
    fn states(&self, py: Python<'_>) -> Option<Py<GdnPool>> {
        self.states.as_ref().map(|states| states.clone_ref(py))
    }

    /// Tokens that the tier has room for, as passed to the constructor.
    #[getter]
    fn size(&self) -> usize {
        self.tier.config().size
    }

    /// Snapshots of states that the tier has room for.
    #[getter]
    fn max_states(&self) -> usize {
        self.tier.config().max_states
    }

    /// Whether page-locking was requested, as passed to the constructor.
    #[getter]
    fn pin_memory(&self) -> bool {
        self.tier.config().pin_memory
    }

    /// When pages are copied to the tier: "through", "selective" or "back".
    #[getter]
    fn write(&self) -> &'static str {
        let write = self.tier.config().write;
        WRITES.iter().find(|(_, known)| *known == write).map_or("", |(name, _)| name)
    }

    /// Bytes of K and V of a page.
    #[getter]
    fn page_bytes(&self) -> usize {
        self.tier.page_bytes()
    }

    fn __repr__(&self) -> String {
        let stats = self.tier.stats();
        let of = |name| stats.get(name).unwrap_or(0);
        format!(
            "HostTier(size={}, pages={} of {}, write='{}')",
            self.size(),
            of("pages"),
            of("capacity"),
            self.write()
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.kv)?;
        visit.call(&self.states)
    }
}

/// A load of pages of a prefix from the tiers below the device, layer by layer. Its lease has the pages already. Call
/// `wait_layer` before the work that uses a layer.
#[pyclass(frozen, module = "kvpool", name = "Load", weakref)]
pub(super) struct Load {
    pub(super) load: PoolLoad,
    pub(super) device: Device,
}

#[pymethods]
impl Load {
    /// Tokens that the load adds to the lease; 0 if there was nothing to load.
    #[getter]
    const fn length(&self) -> usize {
        self.load.len()
    }

    const fn __len__(&self) -> usize {
        self.load.len()
    }

    /// Makes the current stream wait for the copies of a layer, of those before it, and of the state; the host does
    /// not wait. Without a GPU, the call waits for them, without the GIL.
    ///
    /// Raises:
    ///     DriverError: If the current stream is being captured.
    ///     IndexError: If there is no such layer.
    ///     StateError: If the load was cancelled or failed before it.
    fn wait_layer(&self, py: Python<'_>, layer: &Bound<'_, PyAny>) -> PyResult<()> {
        let layer = args::count("layer", layer)?;
        Ok(self.load.wait_layer(layer, current_stream(py, self.device)?)?)
    }

    /// Returns whether the load is complete. When that is known, by this call or by `wait_layer` of the last layer,
    /// other requests find the pages, too. Does not wait.
    ///
    /// Raises:
    ///     StateError: If it was cancelled or failed: the lease is as long as before, and the request computes.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.load.query(current_stream(py, self.device)?)?)
    }

    /// Waits until the load is complete, without the GIL. An interrupt ends the wait only.
    ///
    /// Args:
    ///     timeout: Maximum wait in seconds; unlimited by default.
    ///
    /// Returns:
    ///     Whether it is complete.
    ///
    /// Raises:
    ///     ArgumentError: If `timeout` is negative or NaN.
    ///     StateError: As in `query`.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let stream = current_stream(py, self.device)?;
        wait_polling(py, timeout, || self.load.query(stream))
    }

    /// The `StateError` of a load that was cancelled or failed, the `DriverError` of a device that has failed, else
    /// `None`.
    ///
    /// Raises:
    ///     DriverError: If the current stream is being captured.
    #[getter]
    fn error(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        let stream = current_stream(py, self.device)?;
        Ok(self.load.query(stream).err().map(PyErr::from))
    }

    /// Gives up the load unless it is complete: the lease is as long as before, and its slots are free: their
    /// next owner comes after the copies. Does nothing if the load is complete, or the lease was released.
    ///
    /// Raises:
    ///     StateError: If a planner has the lease: its request uses the slots.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.load.cancel(current_stream(py, self.device)?)?)
    }

    fn __repr__(&self) -> String {
        format!("Load(length={})", self.load.len())
    }
}
