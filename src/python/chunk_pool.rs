//! `kvpool.ChunkPool`, its chunks and their copies.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyString, PyTuple};
use pyo3::{PyTraverseError, gc::PyVisit};

use crate::base::{ChunkId, Device, Dims, Id, widen};
use crate::index::IndexHandle;
use crate::kernels::Direction;
use crate::memory::{
    Backend, Event, MappedHost, PageKind, PageLockEvent, PageLockProgress, PageLocking as Locking, Stream,
};
use crate::pool::{Attempt, ChunkConfig, ChunkPool as Pool};

use super::args;
use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::debug::Debug;
use super::environment;
use super::framework::{backend, current_stream, to_dtype};
use super::logging::{self, Reporter};
use super::pool_name::PoolName;
use super::tensor_cache::TensorCache;
use super::{SLICE, lock, wait_in_slices, wait_polling};

/// Fixed-size chunks in one region, for offloaded K and V.
///
/// Chunks are numbered from 0. They are zero at first and are not zeroed again. The chunk freed last is taken
/// first, then the lowest that was never taken.
///
/// If there is a driver, host memory is page-locked in steps of about 64 MiB on two threads.
/// `KVPOOL_PAGE_LOCK_THREADS` sets the number of threads: more threads finish sooner but delay other driver
/// calls meanwhile. The constructor of a larger pool returns at once, chunks become available as their step
/// completes, and progress is reported through the logger `kvpool`. A step that cannot be page-locked stays
/// ordinary memory, with a warning.
///
/// Args:
///     num_chunks: Number of chunks.
///     chunk_shape: Shape of a chunk.
///     dtype: Storage dtype of the elements.
///     device: Device of the chunks.
///     pin_memory: Whether to page-lock host memory if a driver is present.
///     numa_node: Prefer this NUMA node for host memory. A machine without NUMA has node 0.
///     huge_pages: Whether to use explicit huge pages for host memory: of the largest size of which the system
///         has reserved enough, and which adds at most an eighth to the memory. If there is none, transparent
///         huge pages are used, with a log message.
///     strict: Whether an invalid free raises; otherwise it is dropped, counted and reported.
///     debug: Whether to record owners and call sites for `leaks` and reports. Defaults to the environment
///         variable `KVPOOL_DEBUG`.
///     progress: Called as `progress(done_chunks, num_chunks)` after each step, from another thread if there
///         are several steps.
///
/// Raises:
///     ConfigError: If a size is below 1, the size in bytes overflows, or the NUMA node does not exist.
///     TypeError: If `dtype` is not a storage dtype.
///     OutOfMemoryError: If there is not enough memory.
///     BackendUnavailableError: If `device` is not available.
#[pyclass(extends = BasePool, frozen, module = "kvpool", name = "ChunkPool")]
pub(super) struct ChunkPool {
    pool: Arc<Pool>,
    /// The backend of host memory.
    mapped: Option<Arc<MappedHost>>,
    numa_node: Option<usize>,
    debug: Debug,
    reporter: Reporter,
    pending: Arc<PendingCopies>,
    /// The tensors by chunk index.
    tensors: TensorCache<IndexHandle<ChunkId>>,
}

/// Tensors that copies in flight read or write, each with the event after its copy.
#[derive(Default)]
struct PendingCopies(Mutex<Vec<(Arc<Event>, Py<PyAny>)>>);

impl Drop for ChunkPool {
    fn drop(&mut self) {
        for (event, _) in lock(&self.pending.0).iter() {
            // A driver that fails here cannot report the end of the copy in any other way.
            let _ = event.wait();
        }
    }
}

impl PendingCopies {
    /// Drops the tensors of completed copies, and adds `more`.
    fn drop_finished(&self, more: Option<(Arc<Event>, Py<PyAny>)>) {
        let mut pending = lock(&self.0);
        let (over, under_way) = std::mem::take(&mut *pending)
            .into_iter()
            .partition(|(event, _)| matches!(event.has_passed(), Ok(true)));
        *pending = under_way;
        pending.extend(more);
        drop(pending);
        // Dropping a tensor may run Python code.
        let _: Vec<(Arc<Event>, Py<PyAny>)> = over;
    }
}

/// Page-locking in progress, for the thread that reports it.
#[pyclass(frozen, module = "kvpool._kvpool", name = "_PageLocking")]
pub(super) struct PageLocking {
    /// `None` after the end.
    locking: Mutex<Option<Locking>>,
    progress: Option<Py<PyAny>>,
    /// Bytes from one chunk to the next, and of a chunk.
    stride: usize,
    chunk_bytes: usize,
}

impl PageLocking {
    /// Reports each step from a thread that ends with the program, or from this thread if none can be
    /// started.
    fn report_from_thread(slf: &Bound<'_, Self>) -> PyResult<()> {
        let py = slf.py();
        let options =
            [("target", slf.getattr("run")?), ("name", PyString::new(py, "kvpool-page-locking").into_any())];
        let thread = py.import("threading")?.getattr("Thread")?.call((), Some(&options.into_py_dict(py)?))?;
        match thread.call_method0("start") {
            Err(error) if error.is_instance_of::<PyRuntimeError>(py) => slf.get().run(py),
            started => started.map(drop),
        }
    }

    /// Waits up to `most` for the next step and reports it to the logger and the callback. Returns whether
    /// page-locking continues.
    fn report_next(&self, py: Python<'_>, most: Duration) -> bool {
        let wait = || lock(&self.locking).as_ref().map(|locking| locking.next(most));
        match py.detach(wait) {
            Some(PageLockEvent::Step(PageLockProgress { done, total, failure })) => {
                let (done, total) = (done / self.stride, total / self.stride);
                if let Some(failure) = failure {
                    logging::warn(py, &format!("some chunks stay ordinary memory: {failure}"));
                }
                let bytes = self.chunk_bytes;
                logging::info(py, &format!("{done} of {total} chunks of {bytes} bytes are ready"));
                if let Some(Err(error)) =
                    self.progress.as_ref().map(|progress| progress.call1(py, (done, total)))
                {
                    error.write_unraisable(py, None);
                }
                true
            }
            Some(PageLockEvent::TimedOut) => true,
            Some(PageLockEvent::Finished) => {
                py.detach(|| drop(lock(&self.locking).take()));
                false
            }
            None => false,
        }
    }
}

#[pymethods]
impl PageLocking {
    /// Reports every step. The interpreter waits for this thread, so no further step begins after the main
    /// thread has ended.
    fn run(&self, py: Python<'_>) -> PyResult<()> {
        let main = py.import("threading")?.call_method0("main_thread")?;
        while self.report_next(py, SLICE) {
            if !main.call_method0("is_alive")?.extract::<bool>()?
                && let Some(locking) = lock(&self.locking).as_ref()
            {
                locking.stop();
            }
        }
        Ok(())
    }
}

/// Returns the number of threads that page-lock memory: `KVPOOL_PAGE_LOCK_THREADS`.
pub(super) fn page_lock_threads() -> PyResult<usize> {
    environment::number_of("KVPOOL_PAGE_LOCK_THREADS", 1, 2)
}

impl PoolClass for ChunkPool {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&*self.pool);
    }
}

#[pymethods]
impl ChunkPool {
    #[new]
    #[pyo3(signature = (num_chunks, chunk_shape, dtype, device=None, pin_memory=true, *, numa_node=None,
                        huge_pages=false, strict=false, debug=None, progress=None),
           text_signature = "(num_chunks, chunk_shape, dtype, device=\"cpu\", pin_memory=True, *, numa_node=None, \
                             huge_pages=False, strict=False, debug=None, progress=None)")]
    #[expect(clippy::too_many_arguments, reason = "each stands for itself")]
    fn new(
        py: Python<'_>,
        num_chunks: &Bound<'_, PyAny>,
        chunk_shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        pin_memory: bool,
        numa_node: Option<&Bound<'_, PyAny>>,
        huge_pages: bool,
        strict: bool,
        debug: Option<bool>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let numa_node = numa_node.map(|node| args::count("numa_node", node)).transpose()?;
        let device = args::host_or(device)?;
        let config = ChunkConfig {
            num_chunks: args::size("num_chunks", num_chunks)?,
            chunk_shape: args::extents("chunk_shape", chunk_shape)?,
            dtype: args::storage_dtype(dtype)?,
            pin_memory,
            page_lock_threads: page_lock_threads()?,
            strict,
        };
        if let Some(progress) =
            progress.as_ref().map(|progress| progress.bind(py)).filter(|it| !it.is_callable())
        {
            let kind = args::kind_of(progress);
            return Err(PyTypeError::new_err(format!("progress must be callable, not {kind}")));
        }
        let (mapped, backend): (_, Arc<dyn Backend>) = match device {
            Device::Cpu => {
                let pages = if huge_pages { PageKind::Huge } else { PageKind::Ordinary };
                let mapped = Arc::new(MappedHost::new(numa_node, pages)?);
                (Some(Arc::clone(&mapped)), mapped)
            }
            Device::Cuda(_) => (None, backend(py, device)?),
        };
        let pool = py.detach(|| Pool::new(&config, &backend))?;
        let debug = Debug::new(debug, &pool);
        let pool = Arc::new(pool);
        for note in mapped.iter().flat_map(|mapped| mapped.take_notes()) {
            logging::info(py, &note);
        }
        if let Some(locking) = py.detach(|| pool.start_page_locking()) {
            let (stride, chunk_bytes) = (pool.stride(), pool.chunk_bytes());
            let is_done = locking.steps() == 1;
            let locking = PageLocking { locking: Mutex::new(Some(locking)), progress, stride, chunk_bytes };
            if is_done {
                while locking.report_next(py, Duration::ZERO) {}
            } else {
                PageLocking::report_from_thread(&Bound::new(py, locking)?)?;
            }
        }
        let name = PoolName::next("ChunkPool");
        let (reporter, pending, tensors) = (Reporter::new(&name), Arc::default(), TensorCache::default());
        let pool = Self { pool, mapped, numa_node, debug, reporter, pending, tensors };
        Ok(BasePool::named(name, debug, pool))
    }

    /// Takes a chunk, with one reference.
    ///
    /// If no chunk is ready, waits, without the GIL, as long as page-locking in progress or copies of freed
    /// chunks can still provide one.
    ///
    /// Returns:
    ///     A `Chunk`, or `None` if all are in use.
    #[pyo3(signature = (*, owner=None))]
    fn allocate(slf: &Bound<'_, Self>, owner: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Chunk>> {
        let _acting = slf.get().debug.begin(slf.py(), owner)?;
        let pool = &slf.get().pool;
        if let Some(handle) = pool.try_allocate_one()? {
            return Ok(Some(Chunk { pool: slf.clone().unbind(), handle }));
        }
        Ok(Self::allocate_many(slf, 1)?.and_then(|mut chunks| chunks.pop()))
    }

    /// Takes `n` chunks, or none of them. Waits like `allocate`.
    ///
    /// Returns:
    ///     A list of `Chunk`, or `None` if there are not enough.
    ///
    /// Raises:
    ///     ArgumentError: If `n` is negative.
    #[pyo3(signature = (n, *, owner=None))]
    fn allocate_batch(
        slf: &Bound<'_, Self>,
        n: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Vec<Chunk>>> {
        let _acting = slf.get().debug.begin(slf.py(), owner)?;
        Self::allocate_many(slf, args::count("n", n)?)
    }

    /// Frees a chunk to which the caller has the only reference.
    ///
    /// Raises:
    ///     IndexOwnershipError: If the pool is strict and the chunk was already freed, has further references
    ///         or belongs to another pool. Nothing is changed.
    ///     TypeError: If `chunk` is not a `Chunk`.
    #[pyo3(signature = (chunk, *, owner=None))]
    fn free(
        slf: &Bound<'_, Self>,
        chunk: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let pool = slf.get();
        let _acting = pool.debug.begin(slf.py(), owner)?;
        let chunk = chunk.cast::<Chunk>().map_err(|_| {
            PyTypeError::new_err(format!("only a Chunk can be freed, not {}", args::kind_of(chunk)))
        })?;
        let chunk = chunk.get();
        let bad = if chunk.pool.is(slf) {
            pool.pool.free(chunk.handle)?
        } else {
            pool.pool.free_foreign(chunk.handle)?
        };
        pool.reporter.bad_frees(slf.py(), &bad, "chunk", 1, pool.debug);
        Ok(())
    }

    /// Waits until page-locking has ended, without the GIL.
    ///
    /// Args:
    ///     timeout: Maximum wait in seconds; unlimited by default.
    ///
    /// Returns:
    ///     Whether page-locking has ended.
    ///
    /// Raises:
    ///     ArgumentError: If `timeout` is negative or NaN.
    ///     DriverError: In a forked child, where page-locking never ends.
    #[pyo3(signature = (timeout=None))]
    fn wait_page_locked(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        wait_in_slices(py, timeout, |slice| self.pool.wait_page_locked(slice))
    }

    /// Number of chunks.
    #[getter]
    fn num_chunks(&self) -> usize {
        self.pool.config().num_chunks
    }

    /// Shape of a chunk, a tuple of ints.
    #[getter]
    fn chunk_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.pool.config().chunk_shape)
    }

    /// Bytes of a chunk.
    #[getter]
    fn chunk_bytes(&self) -> usize {
        self.pool.chunk_bytes()
    }

    /// Dtype of the elements: a `torch.dtype`, or its name if PyTorch is not installed.
    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_dtype(py, self.pool.config().dtype)
    }

    /// Whether the memory is page-locked, or page-locking is in progress.
    #[getter]
    fn pin_memory(&self) -> bool {
        self.pool.uses_page_locking()
    }

    /// The requested NUMA node.
    #[getter]
    fn numa_node(&self) -> Option<usize> {
        self.numa_node
    }

    /// Whether the memory uses explicit huge pages.
    #[getter]
    fn huge_pages(&self) -> bool {
        self.mapped.as_ref().is_some_and(|mapped| mapped.has_huge_pages())
    }

    fn __repr__(&self) -> String {
        let config = self.pool.config();
        format!(
            "ChunkPool(num_chunks={}, chunk_shape={:?}, dtype={}, device='{}')",
            config.num_chunks,
            config.chunk_shape,
            config.dtype,
            self.pool.device()
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Ok(pending) = self.pending.0.try_lock() {
            pending.iter().try_for_each(|(_, tensor)| visit.call(tensor))?;
        }
        self.tensors.traverse(&visit)
    }
}

impl ChunkPool {
    fn allocate_many(slf: &Bound<'_, Self>, count: usize) -> PyResult<Option<Vec<Chunk>>> {
        let pool = &slf.get().pool;
        let mut attempt = pool.try_allocate(count)?;
        while attempt == Attempt::Later {
            slf.py().check_signals()?;
            attempt = slf.py().detach(|| pool.allocate(count, SLICE))?;
        }
        let handles = match attempt {
            Attempt::Taken(handles) => Some(handles),
            Attempt::Full | Attempt::Later => None,
        };
        Ok(handles.map(|handles| {
            handles.into_iter().map(|handle| Chunk { pool: slf.clone().unbind(), handle }).collect()
        }))
    }
}

/// One allocation of a chunk of a `ChunkPool`. A later allocation of the same index is a different `Chunk`.
///
/// Dropping the object does not free the chunk. `with chunk:` releases it at exit.
#[pyclass(frozen, module = "kvpool", name = "Chunk", weakref)]
pub(super) struct Chunk {
    pool: Py<ChunkPool>,
    handle: IndexHandle<ChunkId>,
}

#[pymethods]
impl Chunk {
    /// Index of the chunk in the pool.
    #[getter]
    fn index(&self) -> u32 {
        self.handle.index().number()
    }

    /// Bytes of the whole chunk.
    #[getter]
    fn nbytes(&self) -> usize {
        self.pool.get().pool.chunk_bytes()
    }

    /// Number of references; 0 after the chunk was freed.
    #[getter]
    fn references(&self) -> u32 {
        self.pool.get().pool.references(self.handle)
    }

    /// Returns the chunk's first elements as a contiguous tensor, without a copy.
    ///
    /// The tensor keeps the memory alive, but not the chunk: once the chunk is freed, its next owner may
    /// write there.
    ///
    /// Args:
    ///     shape: Shape of at most as many elements as a chunk has. Defaults to `chunk_shape`.
    ///
    /// Raises:
    ///     ArgumentError: If `shape` does not fit the chunk.
    ///     StaleError: If the chunk was freed.
    #[pyo3(signature = (shape=None))]
    fn tensor(&self, py: Python<'_>, shape: Option<&Bound<'_, PyAny>>) -> PyResult<Py<PyAny>> {
        let shape: Option<Dims> = shape.map(args::shape).transpose()?;
        let pool = self.pool.get();
        let view = pool.pool.tensor(self.handle, shape)?;
        pool.tensors.tensor(py, widen(self.handle.index().number()), self.handle, &view)
    }

    /// Adds a reference.
    ///
    /// Returns:
    ///     The chunk itself.
    ///
    /// Raises:
    ///     StaleError: If the chunk was freed.
    fn retain(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let chunk = slf.get();
        let pool = chunk.pool.get();
        let acting = pool.debug.begin(slf.py(), None)?;
        pool.pool.retain(chunk.handle)?;
        drop(acting);
        Ok(slf)
    }

    /// Drops a reference. Dropping the last one frees the chunk as soon as its copies are complete.
    ///
    /// Raises:
    ///     IndexOwnershipError: If the pool is strict and the chunk was already freed.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let pool = self.pool.get();
        let _acting = pool.debug.begin(py, None)?;
        let bad = pool.pool.release(self.handle)?;
        pool.reporter.bad_frees(py, &bad, "chunk", 1, pool.debug);
        Ok(())
    }

    /// Copies the elements of `tensor`, in order, to the beginning of the chunk.
    ///
    /// Between host memory the copy is complete on return. With a GPU on either side it is enqueued, as one
    /// copy for all equally spaced runs of contiguous elements. Tensor and chunk are kept until it completes,
    /// even if the chunk is freed meanwhile.
    ///
    /// Args:
    ///     tensor: A tensor of the chunk's dtype, on any device, with any strides.
    ///     stream: A stream or its handle, as in `Pool.used_on`, of the GPU that copies. Defaults to the current
    ///         stream.
    ///
    /// Returns:
    ///     A `ChunkCopy`: `query` and `wait` say when the copy is complete.
    ///
    /// Raises:
    ///     ArgumentError: If `tensor` has more elements than the chunk, or `stream` is one of another GPU or 2.
    ///     TypeError: If `tensor` has another dtype.
    ///     StaleError: If the chunk was freed.
    #[pyo3(signature = (tensor, stream=None))]
    fn copy_from(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<ChunkCopy> {
        self.copy(py, tensor, Direction::Pack, stream)
    }

    /// Copies the beginning of the chunk to the elements of `tensor`, in order. Otherwise like `copy_from`.
    ///
    /// Raises:
    ///     ArgumentError: If `tensor` has more elements than the chunk, is read-only, or overlaps itself, or `stream` is
    ///         one of another GPU or 2.
    ///     TypeError: If `tensor` has another dtype.
    ///     StaleError: If the chunk was freed.
    #[pyo3(signature = (tensor, stream=None))]
    fn copy_to(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<ChunkCopy> {
        self.copy(py, tensor, Direction::Unpack, stream)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release(py)
    }

    fn __repr__(&self) -> String {
        format!("Chunk(index={}, nbytes={}, references={})", self.index(), self.nbytes(), self.references())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.pool)
    }
}

impl Chunk {
    fn copy(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        direction: Direction,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<ChunkCopy> {
        let pool = self.pool.get();
        let given = if direction == Direction::Unpack {
            args::output(tensor)?
        } else {
            args::values("tensor", tensor)?
        };
        let device = match given.borrow()?.device() {
            Device::Cpu => pool.pool.device(),
            theirs @ Device::Cuda(_) => theirs,
        };
        let stream: Stream = match stream {
            Some(stream) => args::stream(stream, device)?,
            None => current_stream(py, device)?,
        };
        let borrowed = given.borrow()?;
        let done = py.detach(|| pool.pool.copy(self.handle, &borrowed, direction, stream))?;
        if let Some(done) = &done {
            pool.pending.drop_finished(Some((Arc::clone(done), given.keeper(tensor))));
        }
        Ok(ChunkCopy { pending: Arc::clone(&pool.pending), done })
    }
}

/// A copy to or from a chunk. It can serve as the fence `after` of `TokenToKVPoolAllocator.free`.
#[pyclass(frozen, module = "kvpool", name = "ChunkCopy", weakref)]
pub(super) struct ChunkCopy {
    pending: Arc<PendingCopies>,
    /// `None` if the copy was complete when the call returned.
    done: Option<Arc<Event>>,
}

#[pymethods]
impl ChunkCopy {
    /// Returns whether the copy is complete. Does not wait.
    ///
    /// Raises:
    ///     DriverError: If a driver call fails, or earlier work on the device has failed.
    fn query(&self) -> PyResult<bool> {
        let is_done = self.done.as_ref().map_or(Ok(true), |event| event.has_passed())?;
        if is_done && self.done.is_some() {
            self.pending.drop_finished(None);
        }
        Ok(is_done)
    }

    /// Waits until the copy is complete, without the GIL. Without a time limit, an interrupt waits, too.
    ///
    /// Args:
    ///     timeout: Maximum wait in seconds; unlimited by default.
    ///
    /// Returns:
    ///     Whether the copy is complete.
    ///
    /// Raises:
    ///     ArgumentError: If `timeout` is negative or NaN.
    ///     DriverError: As in `query`.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        match (&self.done, timeout) {
            (Some(event), None) => py.detach(|| event.wait())?,
            (done, _) => {
                let is_done = || done.as_ref().map_or(Ok(true), |event| event.has_passed());
                if !wait_polling(py, timeout, is_done)? {
                    return Ok(false);
                }
            }
        }
        if self.done.is_some() {
            self.pending.drop_finished(None);
        }
        Ok(true)
    }

    /// Does nothing: a copy that is on a stream runs. Wait before its memory has another use.
    #[expect(clippy::unused_self, reason = "as other work in flight has it")]
    const fn cancel(&self) {}

    /// The `DriverError` of a device that has failed, else `None`.
    #[getter]
    fn error(&self) -> Option<PyErr> {
        self.query().err()
    }
}
