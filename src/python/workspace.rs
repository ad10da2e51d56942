//! The arena of `kvpool.Workspace`. The part for PyTorch's memory pools is in Python.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::base::{DType, Dims};
use crate::memory::Stream;
use crate::pool::{Workspace as Pool, WorkspaceConfig};
use crate::tensor::TensorView;

use super::args::{self, Arg};
use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::debug::Debug;
use super::framework::{backend, current_stream};
use super::tensor_cache::TensorCache;

/// Default size of an arena in bytes.
const ARENA_BYTES: usize = 512 << 20;

/// Maximum number of PyTorch's threads. `OpenMP` ends the process when it cannot start as many as it was
/// given.
const MAX_THREADS: usize = 1024;

/// The arena of a `Workspace`.
#[pyclass(extends = BasePool, frozen, subclass, module = "kvpool._kvpool", name = "_Workspace")]
pub(super) struct Workspace {
    pool: Pool,
    num_threads: Option<usize>,
    /// The tensors by their number since the last reset.
    tensors: TensorCache<usize>,
    /// Tensors since the last reset.
    count: AtomicUsize,
    /// Tensors in all, which distinguishes them from the tensors of earlier passes.
    total: AtomicUsize,
}

impl Workspace {
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        current_stream(py, self.pool.device())
    }

    fn make(
        &self,
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        cut: impl FnOnce(&Pool, Dims, DType, Stream) -> crate::base::Result<TensorView>,
    ) -> PyResult<Py<PyAny>> {
        let (shape, dtype) = (args::shape(shape)?, args::any_dtype(dtype)?);
        let view = cut(&self.pool, shape, dtype, self.stream(py)?)?;
        let (at, owner) = (self.count.fetch_add(1, Relaxed), self.total.fetch_add(1, Relaxed));
        self.tensors.tensor(py, at, owner, &view)
    }
}

impl PoolClass for Workspace {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&self.pool);
    }
}

#[pymethods]
impl Workspace {
    #[new]
    #[pyo3(signature = (device=None, arena_bytes=Arg::Missing, num_threads=None, *, debug=None),
           text_signature = "(device=\"cuda\", arena_bytes=536870912, num_threads=None, *, debug=None)")]
    fn new(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        arena_bytes: Arg<'_>,
        num_threads: Option<&Bound<'_, PyAny>>,
        debug: Option<bool>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let device = args::device(py, device)?;
        let arena_bytes = arena_bytes.size("arena_bytes", ARENA_BYTES)?;
        let num_threads = num_threads.map(|threads| args::size("num_threads", threads)).transpose()?;
        if let Some(threads) = num_threads.filter(|threads| !(1..=MAX_THREADS).contains(threads)) {
            let text = format!("num_threads is {threads}; it must be 1 to {MAX_THREADS}");
            return Err(crate::base::Error::config(text).into());
        }
        let backend = backend(py, device)?;
        let debug = Debug::without_ledger(debug);
        let config = WorkspaceConfig { arena_bytes, poison: debug.is_on() };
        let pool = py.detach(|| Pool::new(&config, &backend))?;
        let workspace = Self {
            pool,
            num_threads,
            tensors: TensorCache::default(),
            count: AtomicUsize::new(0),
            total: AtomicUsize::new(0),
        };
        Ok(BasePool::initializer("Workspace", debug, workspace))
    }

    /// Returns a contiguous tensor in the arena, 256-byte aligned, with undefined elements.
    ///
    /// Do not use it after the next reset. On a GPU it is valid on the current stream.
    ///
    /// Args:
    ///     shape: Shape of the tensor, ints.
    ///     dtype: A storage dtype, float64, int32, int64 or bool.
    ///
    /// Raises:
    ///     WorkspaceExhaustedError: If the tensor does not fit the arena.
    ///     ArgumentError: If an extent is negative, or the size in bytes overflows.
    ///     TypeError: If the dtype is not supported.
    ///     StateError: If another thread uses the workspace, or the workspace is closed.
    fn empty(
        &self,
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        self.make(py, shape, dtype, Pool::empty)
    }

    /// Returns a tensor like `empty`, filled with zeros.
    fn zeros(
        &self,
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        self.make(py, shape, dtype, Pool::zeros)
    }

    /// Takes back the tensors of `empty` and `zeros`. Returns `False`, and does nothing, while PyTorch holds
    /// memory of the arena.
    fn _reset(&self, py: Python<'_>) -> PyResult<bool> {
        let stream = self.stream(py)?;
        let is_reset = py.detach(|| self.pool.reset(stream))?;
        if is_reset {
            self.count.store(0, Relaxed);
        }
        Ok(is_reset)
    }

    /// Closes the workspace and drops its reference to the arena.
    fn _close(&self) -> PyResult<()> {
        self.pool.close()?;
        self.tensors.forget(|_| true);
        Ok(())
    }

    /// Lets `kvpool_workspace_alloc` take memory of the arena for PyTorch's allocations on this thread.
    fn _enter(&self) -> PyResult<()> {
        Ok(self.pool.enter()?)
    }

    /// Undoes `_enter`. Returns a description of the last allocation that failed, if any.
    fn _leave(&self) -> PyResult<Option<String>> {
        Ok(self.pool.leave()?.map(|refused| refused.to_string()))
    }

    /// Bytes of the arena.
    #[getter]
    const fn arena_bytes(&self) -> usize {
        self.pool.arena_bytes()
    }

    /// Bytes in use, in whole alignments of 256.
    #[getter]
    fn used_bytes(&self) -> usize {
        self.pool.usage()[0]
    }

    /// Largest number of bytes in use at once.
    #[getter]
    fn high_water_bytes(&self) -> usize {
        self.pool.usage()[1]
    }

    /// Number of PyTorch threads inside `use()`, or `None` to keep PyTorch's setting.
    #[getter]
    const fn num_threads(&self) -> Option<usize> {
        self.num_threads
    }

    /// Whether the workspace is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.pool.is_closed()
    }

    /// Another name of `closed`.
    #[getter]
    fn is_closed(&self) -> bool {
        self.closed()
    }

    fn __repr__(&self) -> String {
        let [used, _] = self.pool.usage();
        format!(
            "Workspace(device='{}', arena_bytes={}, used_bytes={used})",
            self.pool.device(),
            self.pool.arena_bytes()
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.tensors.traverse(&visit)
    }
}
