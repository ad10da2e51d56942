//! `kvpool.ArenaHostTier`.

use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::memory::{Backend, MappedHost};
use crate::pool::{ArenaHostTier as Tier, ArenaHostTierConfig};

use super::args;
use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::cache_arena::CacheArena;
use super::chunk_pool::page_lock_threads;
use super::debug::Debug;
use super::export::{BufferLists, buffer_lists};
use super::host_tier::staging_bytes;
use super::{logging, wait_in_slices};

/// Host memory below an `ArenaPrefixCache`. Loading units from there with `ArenaLease.load` is faster than computing them.
///
/// It is an arena of its own: pages, windows and snapshots of states share its slabs, and a prefix is found there by the
/// same rules as on the device. Each unit is one contiguous piece, all layers one behind the other. What a request
/// publishes is copied there in the background, one copy after the other: on a thread or, for an arena on a GPU, on a
/// separate stream. Of windows only what the next token sees is copied.
///
/// Pieces have fingerprints, which are checked before a load (see `docs/host-tier.md`, "Damage"): a damaged one is counted,
/// named in the log and not used, the load ends before it, and the next publication of these tokens replaces it.
///
/// If the arena is on a GPU, the memory is page-locked in steps on threads, and copies pass through staging areas on the
/// GPU: `KVPOOL_STAGING_BYTES`, as for a `HostTier`.
///
/// Args:
///     arena: The arena of the units.
///     tier_bytes: Bytes of host memory; what is behind the last whole slab is not allocated.
///     pin_memory: Whether to page-lock the memory for an arena on a GPU.
///
/// Raises:
///     ConfigError: If `tier_bytes` are too few for the layout.
///     OutOfMemoryError: If there is not enough memory.
#[pyclass(extends = BasePool, frozen, module = "kvpool", name = "ArenaHostTier")]
pub(super) struct ArenaHostTier {
    pub(super) tier: Arc<Tier>,
    arena: Py<CacheArena>,
}

impl PoolClass for ArenaHostTier {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&*self.tier);
    }

    fn before_stats(&self, py: Python<'_>) -> PyResult<()> {
        self.log_notes(py);
        Ok(())
    }
}

impl ArenaHostTier {
    /// Logs why copies to the tier failed, and which units were damaged there.
    pub(super) fn log_notes(&self, py: Python<'_>) {
        for note in self.tier.take_notes() {
            logging::warn(py, &note);
        }
    }
}

#[pymethods]
impl ArenaHostTier {
    #[new]
    #[pyo3(signature = (arena, tier_bytes, *, pin_memory=true))]
    fn new(
        py: Python<'_>,
        arena: Py<CacheArena>,
        tier_bytes: &Bound<'_, PyAny>,
        pin_memory: bool,
    ) -> PyResult<PyClassInitializer<Self>> {
        let config = ArenaHostTierConfig {
            tier_bytes: args::size("tier_bytes", tier_bytes)?,
            pin_memory,
            page_lock_threads: page_lock_threads()?,
            staging_bytes: staging_bytes()?,
        };
        let backend: Arc<dyn Backend> = Arc::new(MappedHost::default());
        let pool = Arc::clone(&arena.get().pool);
        let tier = Arc::new(py.detach(|| Tier::new(&config, &pool, &backend))?);
        Ok(BasePool::initializer("ArenaHostTier", Debug::OFF, Self { tier, arena }))
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

    /// Returns the addresses, the bytes and the bytes of an item of the memory, for transfer engines: one buffer, whose
    /// items are slabs.
    fn get_contiguous_buf_infos(&self) -> BufferLists {
        buffer_lists(self.tier.buffer_infos())
    }

    /// Bytes of the memory.
    fn mem_bytes(&self) -> usize {
        self.tier.mem_bytes()
    }

    /// Bytes of GPU memory through which copies come here and go back; 0 if there is no such area.
    fn staging_bytes(&self) -> usize {
        self.tier.staging_bytes()
    }

    /// Bytes of a unit of a group; of one layer's, if it is a state that is placed layer by layer.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group.
    fn piece_bytes(&self, group: &str) -> PyResult<usize> {
        Ok(self.tier.piece_bytes(self.tier.arena().layout().group_number(group)?))
    }

    /// The arena of the units.
    #[getter]
    fn arena(&self, py: Python<'_>) -> Py<CacheArena> {
        self.arena.clone_ref(py)
    }

    /// Bytes of host memory, as passed to the constructor.
    #[getter]
    fn tier_bytes(&self) -> usize {
        self.tier.config().tier_bytes
    }

    /// Whether page-locking was requested, as passed to the constructor.
    #[getter]
    fn pin_memory(&self) -> bool {
        self.tier.config().pin_memory
    }

    fn __repr__(&self) -> String {
        let stats = self.tier.stats();
        let of = |name| stats.get(name).unwrap_or(0);
        format!(
            "ArenaHostTier(bytes={}, units={}, slabs={} of {})",
            self.mem_bytes(),
            of("units"),
            of("in_use"),
            of("capacity")
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.arena)
    }
}
