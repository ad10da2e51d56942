//! `kvpool.BufferPool` and its buffers.

use std::sync::{Arc, Mutex};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{PyTraverseError, gc::PyVisit};

use crate::base::{BufferId, DType, Device, Dims, Error, ErrorKind, Id, widen};
use crate::index::{IndexHandle, Rounding};
use crate::memory::{BorrowedTensor, Keep};
use crate::pool::{self, BufferConfig, BufferPool as Pool};
use crate::tensor::TensorView;

use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::debug::Debug;
use super::framework::{backend, current_stream};
use super::tensor_cache::TensorCache;
use super::{args, environment, lock};

/// Scratch buffers that are reused from step to step.
///
/// A buffer occupies the smallest bucket that fits it. Free buffers of a bucket are reused last in, first
/// out, so that a step with the same allocations as the step before gets the same memory. New memory is
/// zeroed once; reused memory is not.
///
/// On a GPU a buffer is valid on the stream that was current when it was allocated. A buffer that was
/// released while that stream still uses it is reused at once on the same stream; another stream waits on the
/// device, and the host never waits. If you use a buffer on a further stream, make the allocating stream wait
/// for that work before you release the buffer. Only a new buffer makes driver calls, which may wait for the
/// device; there can be none while its stream is captured.
///
/// Args:
///     device: Device of the buffers.
///     rounding: "pow2" for power-of-two buckets, "fine" for four buckets per doubling.
///     debug: Whether to record owners and call sites for `leaks` and reports. Defaults to the environment
///         variable `KVPOOL_DEBUG`.
///
/// Raises:
///     ConfigError: If `rounding` is neither "pow2" nor "fine".
///     BackendUnavailableError: If `device` cannot be used here.
#[pyclass(extends = BasePool, frozen, module = "kvpool", name = "BufferPool")]
pub(super) struct BufferPool {
    // Dropped before the tensors whose memory it has page-locked.
    pool: Pool,
    device: Device,
    rounding: Rounding,
    debug: Debug,
    existing: Mutex<Vec<Py<PyAny>>>,
    /// The tensors by buffer index.
    tensors: TensorCache<IndexHandle<BufferId>>,
}

/// Returns whether a PyTorch tensor covers only a part of its storage, and false for other tensors, where it
/// is unknown.
fn is_part_of_storage(tensor: &Bound<'_, PyAny>, borrowed: &BorrowedTensor<'_>) -> PyResult<bool> {
    let Ok(storage) = tensor.call_method0("untyped_storage") else { return Ok(false) };
    let whole: usize = storage.call_method0("nbytes")?.extract()?;
    Ok(borrowed.shape().numel() * borrowed.dtype().size() != whole)
}

impl PoolClass for BufferPool {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&self.pool);
    }
}

#[pymethods]
impl BufferPool {
    #[new]
    #[pyo3(signature = (device=None, *, rounding="pow2", debug=None),
           text_signature = "(device=\"cuda\", *, rounding=\"pow2\", debug=None)")]
    fn new(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        rounding: &str,
        debug: Option<bool>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let (device, rounding) = (args::device(py, device)?, Rounding::parse(rounding)?);
        let pool = Pool::new(&BufferConfig { rounding }, &backend(py, device)?);
        let debug = Debug::new(debug, &pool);
        let (existing, tensors) = (Mutex::default(), TensorCache::default());
        let pool = Self { pool, device, rounding, debug, existing, tensors };
        Ok(BasePool::initializer("BufferPool", debug, pool))
    }

    /// Takes a buffer.
    ///
    /// Args:
    ///     shape: Shape of the tensor, ints.
    ///     dtype: Dtype of the tensor: a storage dtype, float64, int32, int64 or bool.
    ///     owner: An owner for reports and `leaks`, a str or an int. Recorded only if the pool debugs.
    ///
    /// Returns:
    ///     A `Buffer`. New memory is zeroed; reused memory has its last contents.
    ///
    /// Raises:
    ///     ArgumentError: If an extent is negative or the bytes overflow.
    ///     TypeError: If the dtype is not supported.
    ///     OutOfMemoryError: If there is not enough memory even after the free buffers were deallocated.
    ///     DriverError: If a driver call fails, or a new buffer is needed while the current stream is
    ///         captured.
    #[pyo3(signature = (shape, dtype, *, owner=None))]
    fn alloc(
        slf: &Bound<'_, Self>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Buffer> {
        let (shape, dtype) = (args::shape(shape)?, args::any_dtype(dtype)?);
        let _acting = slf.get().debug.begin(slf.py(), owner)?;
        Self::alloc_one(slf, shape, dtype)
    }

    /// Takes a buffer of `n` bytes, whose tensor is uint8 `[n]`. Otherwise like `alloc`.
    #[pyo3(signature = (n, *, owner=None))]
    fn alloc_bytes(
        slf: &Bound<'_, Self>,
        n: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Buffer> {
        let _acting = slf.get().debug.begin(slf.py(), owner)?;
        let count = i64::try_from(args::size("n", n)?);
        let count = count.map_err(|_| Error::argument(format!("n is {n}, more than an address can name")))?;
        Self::alloc_one(slf, Dims::new(&[count])?, DType::U8)
    }

    /// Takes a buffer for each of `specs`, or none of them.
    ///
    /// Args:
    ///     specs: Pairs of shape and dtype, as in `alloc`.
    ///     owner: As in `alloc`.
    ///
    /// Returns:
    ///     A list of `Buffer` in the order of `specs`.
    ///
    /// Raises:
    ///     As in `alloc`. Nothing is taken.
    #[pyo3(signature = (specs, *, owner=None))]
    fn alloc_batch(
        slf: &Bound<'_, Self>,
        specs: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Buffer>> {
        let _acting = slf.get().debug.begin(slf.py(), owner)?;
        let mut tensors = Vec::new();
        let mut sizes = Vec::new();
        for spec in specs.try_iter()? {
            let spec = spec?;
            let (shape, dtype) = spec.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>().map_err(|_| {
                PyTypeError::new_err(format!(
                    "specs must be pairs of shape and dtype, not {}",
                    args::kind_of(&spec)
                ))
            })?;
            let (shape, dtype) = (args::shape(&shape)?, args::any_dtype(&dtype)?);
            sizes.push(shape.bytes(dtype)?);
            tensors.push((shape, dtype));
            args::check_signals(slf.py(), tensors.len())?;
        }
        let stream = current_stream(slf.py(), slf.get().device)?;
        let buffers = slf.get().try_twice(|pool| pool.alloc_batch(&sizes, stream))?;
        Ok(buffers
            .into_iter()
            .zip(tensors)
            .map(|(buffer, (shape, dtype))| Buffer::new(slf, &buffer, shape, dtype))
            .collect())
    }

    /// Gives a buffer back.
    ///
    /// Raises:
    ///     StaleError: If the buffer was already given back. Nothing is changed.
    ///     IndexOwnershipError: If the buffer belongs to another pool.
    fn release(slf: &Bound<'_, Self>, buffer: &Bound<'_, Buffer>) -> PyResult<()> {
        let buffer = buffer.get();
        if !buffer.pool.is(slf) {
            let text = format!("buffer {} is of another pool", buffer.handle.index());
            let error = Error::new(ErrorKind::IndexOwnership, text);
            return Err(error.with_index(buffer.handle.index().number()).into());
        }
        buffer.release(slf.py())
    }

    /// Gives every buffer in use back. Using one of them afterwards raises `StaleError`. The same
    /// sequence of `alloc` calls then gets the same memory.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        let _acting = self.debug.begin(py, None)?;
        self.pool.reset();
        Ok(())
    }

    /// Returns a context manager that resets the pool at exit.
    fn step(slf: Bound<'_, Self>) -> BufferStep {
        BufferStep { pool: slf.unbind() }
    }

    /// Registers existing memory, such as weights, which the pool neither owns nor recycles.
    ///
    /// Host memory is page-locked, for copies at full speed, until the pool is dropped, if there is a driver
    /// and `KVPOOL_NO_RESIDENCY` is not 1. The pool keeps the tensor alive. Registering the same memory again
    /// does nothing. Whole pages are locked, so a tensor should have its pages for itself, as large ones do.
    ///
    /// Args:
    ///     tensor: A contiguous tensor in host memory or on the pool's device.
    ///
    /// Raises:
    ///     ConfigError: If the tensor is on another device, is not contiguous, or would be page-locked but
    ///         covers only a part of its PyTorch storage, or shares a page with memory that is page-locked
    ///         already: the driver cannot copy memory that is page-locked in part.
    ///     OutOfMemoryError: If the driver cannot page-lock that much memory in one piece.
    ///     DriverError: If page-locking fails otherwise.
    fn register_existing(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let given = args::tensor("tensor", tensor)?;
        let borrowed = given.borrow()?;
        let keeper = given.keeper(tensor);
        let wants_page_locking = !environment::is_one_of("KVPOOL_NO_RESIDENCY", &["1"]);
        let keep = wants_page_locking.then(|| Arc::new(keeper.clone_ref(py)) as Keep);
        let is_part = borrowed.device() == Device::Cpu && is_part_of_storage(tensor, &borrowed)?;
        let is_new = py.detach(|| self.pool.register_existing(&borrowed, keep, is_part))?;
        if is_new {
            lock(&self.existing).push(keeper);
        }
        Ok(())
    }

    /// Deallocates the memory of free buffers. On a GPU this waits for the streams that used it.
    fn clear(&self, py: Python<'_>) {
        self.forget_free_tensors();
        py.detach(|| self.pool.clear());
    }

    /// Number of free buffers.
    #[getter]
    fn buffers_free(&self) -> usize {
        self.pool.with_buckets(|buckets| buckets.free_count())
    }

    /// Bytes of the free buffers.
    #[getter]
    fn bytes_free(&self) -> usize {
        self.pool.with_buckets(|buckets| buckets.free_bytes())
    }

    /// Another name of `buffers_free`.
    #[getter]
    fn free_count(&self) -> usize {
        self.buffers_free()
    }

    /// Another name of `bytes_free`.
    #[getter]
    fn free_bytes(&self) -> usize {
        self.bytes_free()
    }

    /// Number of buffers in use.
    #[getter]
    fn in_use_count(&self) -> usize {
        self.pool.with_buckets(|buckets| buckets.in_use_count())
    }

    /// Bytes of the buffers in use, in whole buckets.
    #[getter]
    fn in_use_bytes(&self) -> usize {
        self.pool.with_buckets(|buckets| buckets.in_use_bytes())
    }

    /// Largest number of bytes in use at once, in whole buckets.
    #[getter]
    fn high_water_bytes(&self) -> usize {
        self.pool.with_buckets(|buckets| buckets.high_water_bytes())
    }

    /// The way in which sizes are rounded up: "pow2" or "fine".
    #[getter]
    const fn rounding(&self) -> &'static str {
        self.rounding.name()
    }

    fn __repr__(&self) -> String {
        let (free, in_use) = self.pool.with_buckets(|buckets| (buckets.free_count(), buckets.in_use_count()));
        let rounding = self.rounding.name();
        format!("BufferPool(device='{}', rounding='{rounding}', in_use={in_use}, free={free})", self.device)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Ok(existing) = self.existing.try_lock() {
            existing.iter().try_for_each(|tensor| visit.call(tensor))?;
        }
        self.tensors.traverse(&visit)
    }
}

impl BufferPool {
    fn alloc_one(slf: &Bound<'_, Self>, shape: Dims, dtype: DType) -> PyResult<Buffer> {
        let pool = slf.get();
        let bytes = shape.bytes(dtype)?;
        let stream = current_stream(slf.py(), pool.device)?;
        let buffer = pool.try_twice(|pool| pool.alloc(bytes, stream))?;
        Ok(Buffer::new(slf, &buffer, shape, dtype))
    }

    /// Calls `work`. If it runs out of memory, drops the cached tensors of free buffers, which keep memory
    /// alive, and tries again.
    fn try_twice<T>(&self, work: impl Fn(&Pool) -> crate::base::Result<T>) -> PyResult<T> {
        let answer = work(&self.pool);
        match answer {
            Err(failure) if failure.kind() == ErrorKind::OutOfMemory => {
                self.forget_free_tensors();
                Ok(work(&self.pool)?)
            }
            answer => Ok(answer?),
        }
    }

    fn forget_free_tensors(&self) {
        self.tensors.forget(|owner| self.pool.with_buckets(|buckets| !buckets.is_live(*owner)));
    }
}

/// A scratch buffer of a `BufferPool`, valid until it is given back.
///
/// Dropping the object does not give the buffer back. `with buffer:` releases it at exit, unless the pool was
/// reset meanwhile.
// Not tracked by the garbage collector: every step has thousands of buffers, and only a cycle through an
// attribute of a tensor could involve one.
#[pyclass(frozen, module = "kvpool", name = "Buffer", weakref)]
pub(super) struct Buffer {
    pool: Py<BufferPool>,
    handle: IndexHandle<BufferId>,
    capacity: usize,
    shape: Dims,
    dtype: DType,
    bytes: usize,
}

impl Buffer {
    fn new(pool: &Bound<'_, BufferPool>, buffer: &pool::Buffer, shape: Dims, dtype: DType) -> Self {
        Self {
            pool: pool.clone().unbind(),
            handle: buffer.handle(),
            capacity: buffer.region().bytes(),
            shape,
            dtype,
            bytes: buffer.bytes(),
        }
    }
}

#[pymethods]
impl Buffer {
    /// The buffer as a contiguous tensor of the requested shape and dtype, without a copy.
    ///
    /// If you keep the tensor after the buffer was given back, it shows what the next owner writes.
    ///
    /// Raises:
    ///     StaleError: If the buffer was given back.
    #[getter]
    fn tensor(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let pool = self.pool.get();
        let region = pool.pool.region(self.handle)?;
        let view = TensorView::contiguous_with_dims(region, 0, self.dtype, self.shape)?;
        pool.tensors.tensor(py, widen(self.handle.index().number()), self.handle, &view)
    }

    /// Number of bytes requested.
    #[getter]
    const fn nbytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of its bucket.
    #[getter]
    const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Gives the buffer back.
    ///
    /// Raises:
    ///     StaleError: If the buffer was already given back. Nothing is changed.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let _acting = self.pool.get().debug.begin(py, None)?;
        Ok(self.pool.get().pool.release(self.handle)?)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        let live = self.pool.get().pool.with_buckets(|buckets| buckets.is_live(self.handle));
        if live { self.release(exception.py()) } else { Ok(()) }
    }

    fn __repr__(&self) -> String {
        format!("Buffer(nbytes={}, capacity={})", self.bytes, self.capacity)
    }
}

/// The context manager of `BufferPool.step`: resets the pool at exit.
#[pyclass(frozen, module = "kvpool._kvpool", name = "BufferStep")]
pub(super) struct BufferStep {
    pool: Py<BufferPool>,
}

#[pymethods]
impl BufferStep {
    fn __enter__(&self, py: Python<'_>) -> Py<BufferPool> {
        self.pool.clone_ref(py)
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.pool.get().reset(exception.py())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.pool)
    }
}
