//! `kvpool.Tensor`, the tensor class for programs without PyTorch, and the import of DLPack capsules.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::pyclass::CompareOp;
use pyo3::types::{PyBytes, PyCapsule, PyDict, PyIterator, PyList, PySlice, PyTuple};

use crate::base::bounded::signed;
use crate::base::{DType, Device};
use crate::memory::{Region, Stream};
use crate::tensor::TensorView;
use crate::tensor::dlpack::{Import, RawDevice, raw_device};

use super::capsule::{legacy_capsule, take_capsule, versioned_capsule};
use super::framework::{current_stream, stream_of};
use super::numbers::{format_tensor, part_of, to_list};

/// A tensor over memory that kvpool owns, for programs without PyTorch: `numpy()`, `numpy.asarray`, `memoryview` (from
/// Python 3.12 on) and the `from_dlpack` of NumPy, CuPy and JAX see the same bytes without a copy.
///
/// A tensor keeps its memory alive even after the pool is dropped, and shows later writes to that memory. It
/// has no arithmetic. Elements are read as Python numbers: `tolist()`, iteration, and `tensor[i]`, or
/// `tensor[i, j]` of two dimensions, where indices may be negative. Fewer indices, and slices with a positive
/// step, give a view. Reading elements on a device copies them, and waits for its current stream. `==` raises
/// `TypeError` unless it is the same object: compare `tolist()` or `numpy()`.
#[pyclass(frozen, module = "kvpool", name = "Tensor", weakref)]
pub(super) struct Tensor {
    view: TensorView,
    /// Whether the memory was exported, so that the importer may write to it.
    exported: AtomicBool,
}

impl Tensor {
    pub(super) const fn new(view: TensorView) -> Self {
        Self { view, exported: AtomicBool::new(false) }
    }

    /// Returns whether the memory was exported, so that the importer may write to it.
    pub(super) fn is_exported(&self) -> bool {
        self.exported.load(Relaxed)
    }

    /// Orders later work on `stream` after the work enqueued on the current stream.
    fn order(&self, py: Python<'_>, stream: Option<i64>) -> PyResult<()> {
        let (Some(gpu), Device::Cuda(ordinal)) = (self.view.region().gpu(), self.view.device()) else {
            return Ok(());
        };
        let refuse = |error: crate::base::Error| PyBufferError::new_err(error.to_string());
        let theirs = match stream {
            Some(-1) => return Ok(()),
            // 1 and None are the legacy default stream; 0 is not allowed, since it may mean either default
            // stream.
            None | Some(1) => Stream::default_of(self.view.device()),
            Some(0) => {
                return Err(PyBufferError::new_err(
                    "stream 0 is ambiguous for CUDA; pass 1 for the legacy default stream",
                ));
            }
            Some(handle) => {
                let known = usize::try_from(handle);
                let handle =
                    known.map_err(|_| PyBufferError::new_err(format!("{handle} is not a CUDA stream")))?;
                stream_of(handle, ordinal).map_err(refuse)?
            }
        };
        let ours = current_stream(py, self.view.device())
            .map_err(|error| PyBufferError::new_err(error.value(py).to_string()))?;
        gpu.make_stream_wait(&[ours], theirs).map_err(refuse)?;
        self.view.region().users().map_or(Ok(()), |users| users.keep(theirs)).map_err(refuse)
    }

    pub(super) const fn view(&self) -> &TensorView {
        &self.view
    }

    /// Returns the view, if it is in host memory.
    fn host_view(&self) -> PyResult<&TensorView> {
        match self.view.device() {
            Device::Cpu => Ok(&self.view),
            device @ Device::Cuda(_) => Err(PyBufferError::new_err(format!(
                "the tensor is on {device}; cpu() gives a copy in host memory"
            ))),
        }
    }

    /// Copies a tensor on a device to host memory. Waits for the current stream of the device.
    fn copied(&self, py: Python<'_>) -> PyResult<Option<TensorView>> {
        let view = &self.view;
        let Some(gpu) = view.region().gpu() else { return Ok(None) };
        let stream = current_stream(py, view.device())?;
        let copy = py.detach(|| -> crate::base::Result<TensorView> {
            gpu.check_not_capturing(stream, "a copy to the host, which is waited for,")?;
            let bytes = view.span_bytes();
            let region = Region::scratch(bytes)?;
            gpu.copy_out(&view.region().bytes_at(view.offset(), bytes)?, region.range(0, bytes)?, stream)?;
            gpu.synchronize(stream)?;
            view.over_copy(Arc::new(region))
        })?;
        Ok(Some(copy))
    }
}

/// Makes the interpreter call `Tensor.__buffer__` for buffer requests: from Python 3.12 on it fills the slot of
/// classes that have the method as an attribute.
pub(super) fn serve_buffers(py: Python<'_>) -> PyResult<()> {
    let class = py.get_type::<Tensor>();
    if py.version_info() >= (3, 12) {
        class.setattr("__buffer__", class.getattr("__buffer__")?)?;
    }
    Ok(())
}

#[pymethods]
impl Tensor {
    /// The shape, a tuple of ints.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.view.shape().as_slice())
    }

    /// The number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.view.shape().ndim()
    }

    /// The name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.view.dtype().name()
    }

    /// The device in PyTorch's notation, such as "cpu" or "cuda:0".
    #[getter]
    fn device(&self) -> String {
        self.view.device().to_string()
    }

    /// Returns the address of element 0.
    fn data_ptr(&self) -> usize {
        self.view.address().addr()
    }

    /// Returns the tensor itself if it is in host memory, else a copy there. The copy waits for the current
    /// stream of the device.
    ///
    /// Raises:
    ///     OutOfMemoryError: If the host has no memory for the copy.
    fn cpu(slf: &Bound<'_, Self>) -> PyResult<Py<Self>> {
        match slf.get().copied(slf.py())? {
            Some(copy) => Py::new(slf.py(), Self::new(copy)),
            None => Ok(slf.clone().unbind()),
        }
    }

    /// Returns the elements as Python numbers: nested lists of as many dimensions as the tensor has, or a number if it
    /// has none. Those on a device are copied first, which waits for its current stream.
    ///
    /// Raises:
    ///     OutOfMemoryError: If the host has no memory for them.
    fn tolist<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.copied(py)? {
            Some(copy) => to_list(py, &copy),
            None => to_list(py, &self.view),
        }
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let view = part_of(&self.view, index)?;
        let part = Self { view, exported: AtomicBool::new(self.is_exported()) };
        if part.ndim() == 0 { part.tolist(py) } else { Ok(Bound::new(py, part)?.into_any()) }
    }

    fn __iter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyIterator>> {
        let (py, tensor) = (slf.py(), slf.get());
        if tensor.ndim() == 1 {
            return tensor.tolist(py)?.try_iter();
        }
        let rows: Vec<_> = (0..tensor.__len__()?)
            .map(|row| tensor.__getitem__(py, &row.into_bound_py_any(py)?))
            .collect::<PyResult<_>>()?;
        PyList::new(py, rows)?.try_iter()
    }

    fn __richcmp__(slf: &Bound<'_, Self>, other: &Bound<'_, PyAny>, how: CompareOp) -> PyResult<Py<PyAny>> {
        let is_same = slf.is(other);
        match how {
            // Containers ask this of the objects in them.
            CompareOp::Eq if is_same => true.into_py_any(slf.py()),
            CompareOp::Ne if is_same => false.into_py_any(slf.py()),
            CompareOp::Eq | CompareOp::Ne => Err(PyTypeError::new_err(
                "tensors have no == and no !=: compare a.tolist() == b.tolist(), or their numpy() element by element; \
                 whether it is the same object, and whether it is None, says `is`",
            )),
            _ => Ok(slf.py().NotImplemented()),
        }
    }

    /// Hashes by identity.
    fn __hash__(slf: &Bound<'_, Self>) -> usize {
        // Objects lie 16 bytes apart.
        slf.as_ptr().addr() >> 4
    }

    fn __len__(&self) -> PyResult<usize> {
        let first = self.view.shape().as_slice().first();
        first
            .and_then(|&extent| usize::try_from(extent).ok())
            .ok_or_else(|| PyTypeError::new_err("a tensor of no dimensions has no length"))
    }

    fn __repr__(&self) -> PyResult<String> {
        let (shape, dtype) = (self.view.shape().as_slice(), self.view.dtype());
        let about = format!("shape={shape:?}, dtype={dtype}, device={}", self.view.device());
        Ok(match self.view.device() {
            Device::Cpu => format!("kvpool.Tensor({}, {about})", format_tensor(&self.view)?),
            // Printing a tensor must not wait for a device.
            Device::Cuda(_) => format!("kvpool.Tensor({about})"),
        })
    }

    /// Returns a NumPy array over the same memory.
    ///
    /// 8-bit floats and bfloat16 need the package `ml_dtypes`.
    ///
    /// Raises:
    ///     ImportError: If NumPy, or `ml_dtypes` if needed, is not installed.
    ///     BufferError: If the tensor is not in host memory.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let numpy = py.import("numpy")?;
        let view = slf.get().host_view()?;
        let bits = match view.dtype() {
            DType::BF16 => DType::F16,
            DType::F8E4M3 | DType::F8E5M2 => DType::U8,
            _ => return numpy.call_method1("from_dlpack", (slf,)),
        };
        let dtype = py.import("ml_dtypes")?.getattr(view.dtype().name())?;
        let carried = Self::new(view.reinterpret(bits)?);
        numpy.call_method1("from_dlpack", (carried,))?.call_method1("view", (dtype,))
    }

    /// Returns the tensor as an array, for `numpy.asarray`: see `numpy()`.
    ///
    /// Args:
    ///     dtype: The dtype of the array. Another than the tensor's takes a copy.
    ///     copy: `True` copies in any case, `False` never.
    ///
    /// Raises:
    ///     ImportError: If NumPy, or `ml_dtypes` if needed, is not installed.
    ///     BufferError: If the tensor is not in host memory.
    ///     ValueError: If `copy` is `False`, and `dtype` takes one.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, array) = (slf.py(), Self::numpy(slf)?);
        let options = PyDict::new(py);
        options.set_item("dtype", dtype)?;
        if let Some(copy) = copy {
            options.set_item("copy", copy)?;
            return py.import("numpy")?.call_method("array", (array,), Some(&options));
        }
        py.import("numpy")?.call_method("asarray", (array,), Some(&options))
    }

    /// Returns a view of the memory, with the shape and the format of the tensor: what `memoryview` and other users of
    /// buffers call, from Python 3.12 on.
    ///
    /// Raises:
    ///     BufferError: If the tensor is not in host memory or not contiguous, if buffers have no format for its dtype
    ///         (bfloat16 and 8-bit floats), or no shape for it (empty, of several dimensions or none).
    fn __buffer__<'py>(slf: &Bound<'py, Self>, _flags: i32) -> PyResult<Bound<'py, PyAny>> {
        let (py, view) = (slf.py(), slf.get().host_view()?);
        let format = match view.dtype() {
            DType::F64 => "d",
            DType::F32 => "f",
            DType::F16 if py.version_info() >= (3, 12) => "e",
            DType::I8 => "b",
            DType::U8 => "B",
            DType::I32 => "i",
            DType::I64 => "q",
            DType::Bool => "?",
            other => {
                return Err(PyBufferError::new_err(format!(
                    "buffers have no format for {other}; numpy() takes it"
                )));
            }
        };
        let (shape, bytes) = (view.shape(), view.span_bytes());
        if !view.borrow().is_contiguous() || (bytes == 0 && shape.ndim() != 1) {
            let (shape, strides) = (shape.as_slice(), view.strides().as_slice());
            return Err(PyBufferError::new_err(format!(
                "a buffer cannot show shape {shape:?} with strides {strides:?}; numpy() can"
            )));
        }
        slf.get().exported.store(true, Relaxed);
        let memoryview = py.import("builtins")?.getattr("memoryview")?;
        if bytes == 0 {
            let one = memoryview.call1((PyBytes::new(py, &[0; 8]),))?.call_method1("cast", (format,))?;
            return one.get_item(PySlice::new(py, 0, 0, 1));
        }
        // An object over the memory that keeps the tensor, and exports buffers in every version of Python.
        let array = py.import("ctypes")?.getattr("c_ubyte")?.mul(bytes)?;
        let array = array.call_method1("from_address", (view.address().addr(),))?;
        array.setattr("tensor", slf)?;
        let raw = memoryview.call1((array,))?.call_method1("cast", ("B",))?;
        raw.call_method1("cast", (format, shape.as_slice()))
    }

    /// Returns the DLPack device as (type, ordinal).
    fn __dlpack_device__(&self) -> (i32, i32) {
        let RawDevice { kind, ordinal } = raw_device(self.view.device());
        (kind, ordinal)
    }

    /// Returns a DLPack capsule over the same memory, never a copy.
    ///
    /// Args:
    ///     stream: The consumer's CUDA stream, which waits for the work enqueued on the current stream: a
    ///         handle, 1 or `None` for the legacy default stream, -1 for no synchronization. 2, the default stream
    ///         of the calling thread, raises. Ignored in host memory.
    ///     max_version: The newest DLPack (major, minor) that the caller reads. From (1, 0) on the capsule is
    ///         versioned, otherwise legacy.
    ///     dl_device: The requested device. Only the tensor's own is accepted.
    ///     copy: `True` raises: there is no copy.
    ///
    /// Raises:
    ///     BufferError: If another device or a copy is requested.
    ///     TypeError: If an argument has the wrong type.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<&Bound<'py, PyAny>>,
        dl_device: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if copy == Some(true) {
            return Err(PyBufferError::new_err(
                "kvpool tensors are handed out without a copy; copy it afterwards",
            ));
        }
        let max_version = max_version.map(|version| pair::<u32>("max_version", version)).transpose()?;
        let dl_device = dl_device.map(|device| pair::<i32>("dl_device", device)).transpose()?;
        let own = self.__dlpack_device__();
        if let Some(wanted) = dl_device.filter(|&wanted| wanted != own) {
            return Err(PyBufferError::new_err(format!(
                "the tensor is on DLPack device {own:?}, not {wanted:?}"
            )));
        }
        self.order(py, stream)?;
        self.exported.store(true, Relaxed);
        if max_version.is_some_and(|version| version >= (1, 0)) {
            versioned_capsule(py, &self.view)
        } else {
            legacy_capsule(py, &self.view)
        }
    }
}

/// Converts a pair of ints. Anything else is a `TypeError`: consumers expect only that and `BufferError`.
fn pair<'py, T>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<(T, T)>
where
    (T, T): for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    object
        .extract()
        .map_err(|error: PyErr| PyTypeError::new_err(format!("{name} must be a pair of ints: {error}")))
}

/// Returns the current stream; a producer on a GPU makes it wait for its own work.
fn consumer_stream(object: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
    /// `kDLCUDA`
    const CUDA: i32 = 2;
    let Ok(device) = object.call_method0("__dlpack_device__") else { return Ok(None) };
    match device.extract::<(i32, u32)>() {
        Ok((CUDA, ordinal)) => {
            let handle = current_stream(object.py(), Device::Cuda(ordinal))?.handle();
            Ok(Some(if handle == 0 { 1 } else { signed(handle) }))
        }
        _ => Ok(None),
    }
}

/// Takes over the tensor of a capsule from `object.__dlpack__`.
pub(super) fn consume(object: &Bound<'_, PyAny>) -> PyResult<Import> {
    let py = object.py();
    let options = pyo3::types::PyDict::new(py);
    options.set_item("max_version", (1, 1))?;
    if let Some(stream) = consumer_stream(object)? {
        options.set_item("stream", stream)?;
    }
    let capsule = match object.call_method("__dlpack__", (), Some(&options)) {
        // Producers older than DLPack 1.0 do not have the argument.
        Err(error) if error.get_type(py).is(py.get_type::<PyTypeError>()) => {
            object.call_method0("__dlpack__")?
        }
        answer => answer?,
    };
    take_capsule(&capsule)
}
