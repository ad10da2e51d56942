//! `kvpool.ChunkPool`, its chunks and their copies.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyString, PyTuple};
use pyo3::{PyTraverseError, gc::PyVisit};

use crate::base::{Device, Dims, Error, widen};
use crate::index::Ticket;
use crate::kernels::Direction;
use crate::memory::{Backend, Event, MappedHost, PageLocking as Locking, Progress, Report, Stream};
use crate::pool::{Attempt, ChunkConfig, ChunkPool as Pool};

use super::args;
use super::base_pool::{BasePool, Look, PoolClass};
use super::debug::Debug;
use super::framework::{backend, current_stream, to_dtype};
use super::lock;
use super::logging::{self, Reporter};
use super::tensor_cache::TensorCache;

/// How long it waits before it looks for signals, or whether the program has ended.
const SLICE: Duration = Duration::from_millis(50);

/// Fixed-size chunks in one region, for KV that left the GPU.
///
/// Chunks are numbered from 0, zero at first and not zeroed again. The last freed is taken first, then the lowest that was
/// never taken. Host memory is page-locked where there is a driver, in steps of about 64 MiB on two threads
/// (`KVPOOL_PAGE_LOCK_THREADS`; more are sooner done, and hold up other calls of the driver meanwhile): the
/// constructor of a larger pool returns at once, chunks can be taken as their step is done, and the logger `kvpool` tells how
/// far it has come. A step that the driver refuses stays ordinary memory, and is told as a warning.
///
/// Args:
///     num_chunks: Chunks.
///     chunk_shape: Extents of a chunk.
///     dtype: Of the elements.
///     device: Where the chunks are.
///     pin_memory: Page-lock host memory where a driver is present.
///     numa_node: Take host memory from this NUMA node as long as it has any. A machine without nodes has node 0.
///     huge_pages: Take host memory in explicit huge pages of 2 MiB; where the system has not reserved enough of them,
///         a log line says so and transparent ones are used.
///     strict: Whether a bad free raises; otherwise it is dropped, counted and reported.
///     progress: Called as `progress(done_chunks, num_chunks)` after each step, from another thread if there are several.
///
/// Raises:
///     ConfigError: If a size is below 1, bytes overflow, or the machine has no such node.
///     TypeError: If `dtype` cannot be stored.
///     OutOfMemoryError: If the memory cannot be had.
///     BackendUnavailableError: If `device` cannot be used here.
#[pyclass(extends = BasePool, frozen, module = "kvpool", name = "ChunkPool")]
pub(super) struct ChunkPool {
    pool: Arc<Pool>,
    /// Where host memory comes from.
    mapped: Option<Arc<MappedHost>>,
    numa_node: Option<usize>,
    debug: Debug,
    reporter: Reporter,
    pending: Arc<PendingCopies>,
    /// By the index of a chunk.
    tensors: TensorCache<Ticket>,
}

/// What copies under direction read or write, with the points after them.
#[derive(Default)]
struct PendingCopies(Mutex<Vec<(Arc<Event>, Py<PyAny>)>>);

impl Drop for ChunkPool {
    fn drop(&mut self) {
        for (event, _) in lock(&self.pending.0).iter() {
            // If the driver cannot say when a copy is done, nothing can.
            let _ = event.wait();
        }
    }
}

impl PendingCopies {
    /// Drops what copies that are done have read or written, and keeps `more`.
    fn drop_finished(&self, more: Option<(Arc<Event>, Py<PyAny>)>) {
        let mut pending = lock(&self.0);
        let (over, under_way) = std::mem::take(&mut *pending)
            .into_iter()
            .partition(|(event, _)| matches!(event.passed(), Ok(true)));
        *pending = under_way;
        pending.extend(more);
        drop(pending);
        // Dropping a tensor may run Python code.
        let _: Vec<(Arc<Event>, Py<PyAny>)> = over;
    }
}

/// Page-locking that goes on, for the thread that reports how far it has come.
#[pyclass(frozen, module = "kvpool._kvpool", name = "_PageLocking")]
pub(super) struct PageLocking {
    /// `None` once it is over.
    locking: Mutex<Option<Locking>>,
    progress: Option<Py<PyAny>>,
    /// Bytes from one chunk to the next, and of a chunk.
    stride: usize,
    chunk_bytes: usize,
}

impl PageLocking {
    /// Reports each step, from a thread that ends with the program, or from this one where no thread can be started.
    fn watch(slf: &Bound<'_, Self>) -> PyResult<()> {
        let py = slf.py();
        let options =
            [("target", slf.getattr("run")?), ("name", PyString::new(py, "kvpool-page-locking").into_any())];
        let thread = py.import("threading")?.getattr("Thread")?.call((), Some(&options.into_py_dict(py)?))?;
        match thread.call_method0("start") {
            Err(error) if error.is_instance_of::<PyRuntimeError>(py) => slf.get().run(py),
            started => started.map(drop),
        }
    }

    /// Waits for the next step, at most so long, and reports it to the logger and the callback. Whether it goes on.
    fn tell(&self, py: Python<'_>, most: Duration) -> bool {
        let wait = || lock(&self.locking).as_ref().map(|locking| locking.next(most));
        match py.detach(wait) {
            Some(Report::Step(Progress { done, total, failure })) => {
                let (done, total) = (done / self.stride, total / self.stride);
                if let Some(failure) = failure {
                    logging::warn(py, &format!("some chunks stay ordinary memory: {failure}"));
                }
                let bytes = self.chunk_bytes;
                logging::inform(py, &format!("{done} of {total} chunks of {bytes} bytes are ready"));
                if let Some(Err(error)) =
                    self.progress.as_ref().map(|progress| progress.call1(py, (done, total)))
                {
                    error.write_unraisable(py, None);
                }
                true
            }
            Some(Report::Later) => true,
            Some(Report::Over) => {
                py.detach(|| drop(lock(&self.locking).take()));
                false
            }
            None => false,
        }
    }
}

#[pymethods]
impl PageLocking {
    /// Reports every step. Once the main thread has ended, those that were begun are the last: the interpreter waits for this
    /// thread.
    fn run(&self, py: Python<'_>) -> PyResult<()> {
        let main = py.import("threading")?.call_method0("main_thread")?;
        while self.tell(py, SLICE) {
            if !main.call_method0("is_alive")?.extract::<bool>()?
                && let Some(locking) = lock(&self.locking).as_ref()
            {
                locking.stop();
            }
        }
        Ok(())
    }
}

/// How many threads page-lock memory at once: `KVPOOL_PAGE_LOCK_THREADS`.
fn page_lock_threads() -> PyResult<usize> {
    const VARIABLE: &str = "KVPOOL_PAGE_LOCK_THREADS";
    const USUAL: usize = 2;
    let Ok(value) = std::env::var(VARIABLE) else { return Ok(USUAL) };
    match value.trim().parse() {
        Ok(threads) if threads > 0 => Ok(threads),
        _ => Err(Error::config(format!("{VARIABLE} is {value:?}; it must be a number from 1 on")).into()),
    }
}

impl PoolClass for ChunkPool {
    fn look(&self, look: Look<'_>) {
        look(&*self.pool);
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
                let mapped = Arc::new(MappedHost::new(numa_node, huge_pages)?);
                (Some(Arc::clone(&mapped)), mapped)
            }
            Device::Cuda(_) => (None, backend(py, device)?),
        };
        let mut pool = py.detach(|| Pool::new(&config, &backend))?;
        let debug = Debug::new(debug, &mut pool);
        let pool = Arc::new(pool);
        for note in mapped.iter().flat_map(|mapped| mapped.notes()) {
            logging::inform(py, &note);
        }
        if let Some(locking) = py.detach(|| pool.lock_pages()) {
            let (stride, chunk_bytes) = (pool.stride(), pool.chunk_bytes());
            let is_done = locking.steps() == 1;
            let locking = PageLocking { locking: Mutex::new(Some(locking)), progress, stride, chunk_bytes };
            if is_done {
                while locking.tell(py, Duration::ZERO) {}
            } else {
                PageLocking::watch(&Bound::new(py, locking)?)?;
            }
        }
        let (reporter, pending, tensors) = (Reporter::default(), Arc::default(), TensorCache::default());
        let pool = Self { pool, mapped, numa_node, debug, reporter, pending, tensors };
        Ok(BasePool::initializer("ChunkPool", debug, pool))
    }

    /// Takes a chunk, with one reference.
    ///
    /// While page-locking goes on and all chunks that are ready are taken, or copies of a freed chunk are under direction, it
    /// waits for them, without the GIL.
    ///
    /// Returns:
    ///     A `Chunk`, or `None` if all are in use.
    #[pyo3(signature = (*, owner=None))]
    fn allocate(slf: &Bound<'_, Self>, owner: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Chunk>> {
        let _acting = slf.get().debug.begin(slf.py(), owner)?;
        let pool = &slf.get().pool;
        if let Some(ticket) = pool.try_allocate_one()? {
            return Ok(Some(Chunk { pool: slf.clone().unbind(), ticket }));
        }
        Ok(Self::allocate_many(slf, 1)?.and_then(|mut chunks| chunks.pop()))
    }

    /// Takes `n` chunks, or none of them. Waits as `allocate` does.
    ///
    /// Returns:
    ///     A list of `Chunk`, or `None` if there are not so many.
    ///
    /// Raises:
    ///     ConfigError: If `n` is negative.
    #[pyo3(signature = (n, *, owner=None))]
    fn allocate_batch(
        slf: &Bound<'_, Self>,
        n: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Vec<Chunk>>> {
        let _acting = slf.get().debug.begin(slf.py(), owner)?;
        Self::allocate_many(slf, args::count("n", n)?)
    }

    /// Frees a chunk that nobody else refers to.
    ///
    /// Raises:
    ///     IndexOwnershipError: If the pool is strict and the chunk was freed before, is still referenced or of another
    ///         pool. Nothing is changed.
    ///     TypeError: If it is no `Chunk`.
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
            pool.pool.free(chunk.ticket)?
        } else {
            pool.pool.free_foreign(chunk.ticket)?
        };
        pool.reporter.bad_frees(slf.py(), &bad, "chunk", 1, pool.debug);
        Ok(())
    }

    /// Waits until page-locking has ended, without the GIL.
    ///
    /// Args:
    ///     timeout: Seconds to wait at most.
    ///
    /// Returns:
    ///     Whether it has ended.
    ///
    /// Raises:
    ///     ConfigError: If `timeout` is negative or no number.
    ///     DriverError: In the child of a fork, where it never ends.
    #[pyo3(signature = (timeout=None))]
    fn wait_registered(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let seconds = timeout.unwrap_or(f64::INFINITY);
        if seconds.is_nan() || seconds < 0.0 {
            return Err(
                Error::config(format!("timeout is {seconds}; it must be seconds, not negative")).into()
            );
        }
        let start = Instant::now();
        loop {
            let left = (seconds - start.elapsed().as_secs_f64()).clamp(0.0, SLICE.as_secs_f64());
            if py.detach(|| self.pool.wait_registered(Duration::from_secs_f64(left)))? {
                return Ok(true);
            }
            py.check_signals()?;
            if start.elapsed().as_secs_f64() >= seconds {
                return Ok(false);
            }
        }
    }

    /// Chunks.
    #[getter]
    fn num_chunks(&self) -> usize {
        self.pool.config().num_chunks
    }

    /// Extents of a chunk, a tuple of ints.
    #[getter]
    fn chunk_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.pool.config().chunk_shape)
    }

    /// Bytes of a chunk.
    #[getter]
    fn chunk_bytes(&self) -> usize {
        self.pool.chunk_bytes()
    }

    /// Of the elements: a `torch.dtype`, or its name where PyTorch is not installed.
    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_dtype(py, self.pool.config().dtype)
    }

    /// Whether the memory is page-locked, or is about to be.
    #[getter]
    fn pin_memory(&self) -> bool {
        self.pool.is_locked()
    }

    /// The NUMA node that was asked for.
    #[getter]
    fn numa_node(&self) -> Option<usize> {
        self.numa_node
    }

    /// Whether the memory is in explicit huge pages.
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
        let tickets = match attempt {
            Attempt::Taken(tickets) => Some(tickets),
            Attempt::Full | Attempt::Later => None,
        };
        Ok(tickets.map(|tickets| {
            tickets.into_iter().map(|ticket| Chunk { pool: slf.clone().unbind(), ticket }).collect()
        }))
    }
}

/// A chunk of a `ChunkPool`, as it was allocated: it is told from the same index allocated again later.
///
/// Dropping it frees nothing. `with chunk:` releases it at the end.
#[pyclass(frozen, module = "kvpool", name = "Chunk", weakref)]
pub(super) struct Chunk {
    pool: Py<ChunkPool>,
    ticket: Ticket,
}

#[pymethods]
impl Chunk {
    /// Its number.
    #[getter]
    const fn index(&self) -> u32 {
        self.ticket.index()
    }

    /// Bytes of the whole chunk.
    #[getter]
    fn nbytes(&self) -> usize {
        self.pool.get().pool.chunk_bytes()
    }

    /// How often it is referred to; 0 once it was freed.
    #[getter]
    fn references(&self) -> u32 {
        self.pool.get().pool.references(self.ticket)
    }

    /// The chunk's first elements as a contiguous tensor, no copy.
    ///
    /// The tensor keeps the region alive, not the chunk: after it was freed, somebody else may write there.
    ///
    /// Args:
    ///     shape: Extents, of as many elements as a chunk has or fewer; by default all of it, in `chunk_shape`.
    ///
    /// Raises:
    ///     ConfigError: If it does not fit.
    ///     StaleBufferError: If the chunk was freed.
    #[pyo3(signature = (shape=None))]
    fn tensor(&self, py: Python<'_>, shape: Option<&Bound<'_, PyAny>>) -> PyResult<Py<PyAny>> {
        let shape: Option<Dims> = shape.map(args::shape).transpose()?;
        let pool = self.pool.get();
        let view = pool.pool.tensor(self.ticket, shape)?;
        pool.tensors.tensor(py, widen(self.ticket.index()), self.ticket, &view)
    }

    /// Adds a reference.
    ///
    /// Returns:
    ///     The chunk itself.
    ///
    /// Raises:
    ///     StaleBufferError: If it was freed.
    fn retain(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let chunk = slf.get();
        let pool = chunk.pool.get();
        let acting = pool.debug.begin(slf.py(), None)?;
        pool.pool.retain(chunk.ticket)?;
        drop(acting);
        Ok(slf)
    }

    /// Gives up a reference. With the last one the chunk is freed, as soon as its copies are done.
    ///
    /// Raises:
    ///     IndexOwnershipError: If the pool is strict and the chunk was freed before.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let pool = self.pool.get();
        let _acting = pool.debug.begin(py, None)?;
        let bad = pool.pool.release(self.ticket)?;
        pool.reporter.bad_frees(py, &bad, "chunk", 1, pool.debug);
        Ok(())
    }

    /// Copies the elements of `tensor`, in order, to the beginning of the chunk.
    ///
    /// In host memory it is done on return. With a GPU on either side it is enqueued, one copy for all runs of contiguous
    /// elements that are equally far apart; tensor and chunk are kept until it is done, also if the chunk is freed meanwhile.
    ///
    /// Args:
    ///     tensor: Of the chunk's dtype, on any device, with any strides.
    ///     stream: A `torch.cuda.Stream` or its handle; by default the current one.
    ///
    /// Raises:
    ///     ConfigError: If it has more elements than the chunk.
    ///     TypeError: If it is of another dtype.
    ///     StaleBufferError: If the chunk was freed.
    #[pyo3(signature = (tensor, stream=None))]
    fn copy_from(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<ChunkCopy> {
        self.copy(py, tensor, Direction::Pack, stream)
    }

    /// Copies the beginning of the chunk to the elements of `tensor`, in order. As `copy_from` otherwise.
    ///
    /// Raises:
    ///     ConfigError: If it has more elements than the chunk, is read-only, or overlaps itself.
    ///     TypeError: If it is of another dtype.
    ///     StaleBufferError: If the chunk was freed.
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
            Some(stream) => args::stream(stream)?,
            None => current_stream(py, device)?,
        };
        let borrowed = given.borrow()?;
        let done = py.detach(|| pool.pool.copy(self.ticket, &borrowed, direction, stream))?;
        if let Some(done) = &done {
            pool.pending.drop_finished(Some((Arc::clone(done), given.keeper(tensor))));
        }
        Ok(ChunkCopy { pending: Arc::clone(&pool.pending), done })
    }
}

/// A copy to or from a chunk. It is a fence, as `TokenToKVPoolAllocator.free` takes one.
#[pyclass(frozen, module = "kvpool", name = "ChunkCopy", weakref)]
pub(super) struct ChunkCopy {
    pending: Arc<PendingCopies>,
    /// `None` if it was done when the call returned.
    done: Option<Arc<Event>>,
}

#[pymethods]
impl ChunkCopy {
    /// Whether it is done. Does not wait.
    ///
    /// Raises:
    ///     DriverError: If the driver refuses, also for what failed on the device before.
    fn query(&self) -> PyResult<bool> {
        let is_done = self.done.as_ref().map_or(Ok(true), |event| event.passed())?;
        if is_done && self.done.is_some() {
            self.pending.drop_finished(None);
        }
        Ok(is_done)
    }

    /// Waits until it is done, without the GIL.
    ///
    /// Raises:
    ///     DriverError: As `query`.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let Some(event) = &self.done else { return Ok(()) };
        py.detach(|| event.wait())?;
        self.pending.drop_finished(None);
        Ok(())
    }
}
