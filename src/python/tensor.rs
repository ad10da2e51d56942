//! `kvpool.Tensor`, the tensor class for programs without PyTorch, and the import of DLPack capsules.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::base::bounded::signed;
use crate::base::{DType, Device};
use crate::memory::{Region, Stream};
use crate::tensor::TensorView;
use crate::tensor::dlpack::{
    Import, LEGACY, LEGACY_USED, Legacy, RawDevice, VERSIONED, VERSIONED_USED, Versioned, export_legacy,
    export_versioned, raw_device,
};

use super::framework::current_stream;

/// A tensor over memory that kvpool owns, for frameworks that speak DLPack (NumPy, CuPy, JAX).
///
/// It keeps its memory alive even after the pool is dropped. It has no arithmetic: use `numpy()`,
/// `numpy.from_dlpack` or another framework's `from_dlpack`, which see the same bytes without a copy.
#[pyclass(frozen, module = "kvpool", name = "Tensor", weakref)]
pub(super) struct Tensor {
    view: TensorView,
    /// Whether the memory was exported, so that the importer may write to it.
    shared: AtomicBool,
}

impl Tensor {
    pub(super) const fn new(view: TensorView) -> Self {
        Self { view, shared: AtomicBool::new(false) }
    }

    /// Whether the memory was exported, so that the importer may write to it.
    pub(super) fn is_shared(&self) -> bool {
        self.shared.load(Relaxed)
    }

    /// Orders later work on `stream` after the work enqueued on the current stream.
    fn order(&self, py: Python<'_>, stream: Option<i64>) -> PyResult<()> {
        let Some(gpu) = self.view.region().gpu() else { return Ok(()) };
        let theirs = match stream {
            Some(-1) => return Ok(()),
            // 1 and None are the legacy default stream; 0 is not allowed, since it may mean either default
            // stream.
            None | Some(1) => Stream::DEFAULT,
            Some(0) => return Err(PyBufferError::new_err("stream 0 is ambiguous for CUDA; pass 1 or 2")),
            Some(handle) => Stream::from_handle(
                usize::try_from(handle)
                    .map_err(|_| PyBufferError::new_err(format!("{handle} is not a CUDA stream")))?,
            ),
        };
        let ours = current_stream(py, self.view.device())?;
        gpu.order(&[ours], theirs).map_err(|error| PyBufferError::new_err(error.to_string()))?;
        self.view.region().used_on(theirs);
        Ok(())
    }

    pub(super) const fn view(&self) -> &TensorView {
        &self.view
    }
}

#[pymethods]
impl Tensor {
    /// The shape, a tuple of ints.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.view.shape().as_slice())
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
        let (py, view) = (slf.py(), &slf.get().view);
        let Some(gpu) = view.region().gpu() else { return Ok(slf.clone().unbind()) };
        let stream = current_stream(py, view.device())?;
        let copy = py.detach(|| -> crate::base::Result<TensorView> {
            gpu.not_capturing(stream, "a copy to the host, which is waited for,")?;
            let region = Region::scratch(view.shape().bytes(view.dtype())?)?;
            gpu.copy_out(&view.borrow(), region.range(0, region.bytes())?, stream)?;
            gpu.synchronize(stream)?;
            TensorView::packed(Arc::new(region), 0, view.dtype(), *view.shape())
        })?;
        Py::new(py, Self::new(copy))
    }

    fn __len__(&self) -> PyResult<usize> {
        let first = self.view.shape().as_slice().first();
        first
            .and_then(|&extent| usize::try_from(extent).ok())
            .ok_or_else(|| PyTypeError::new_err("a tensor of no dimensions has no length"))
    }

    fn __repr__(&self) -> String {
        let shape = self.view.shape().as_slice();
        format!("kvpool.Tensor(shape={shape:?}, dtype={}, device={})", self.view.dtype(), self.view.device())
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
        let view = &slf.get().view;
        if view.device() != Device::Cpu {
            return Err(PyBufferError::new_err(format!(
                "the tensor is on {}; cpu() gives a copy in host memory",
                view.device()
            )));
        }
        let bits = match view.dtype() {
            DType::BF16 => DType::F16,
            DType::F8E4M3 | DType::F8E5M2 => DType::U8,
            _ => return numpy.call_method1("from_dlpack", (slf,)),
        };
        let dtype = py.import("ml_dtypes")?.getattr(view.dtype().name())?;
        let carried = Self::new(view.reinterpret(bits)?);
        numpy.call_method1("from_dlpack", (carried,))?.call_method1("view", (dtype,))
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
    ///         handle, 1 or `None` for the legacy default stream, -1 for no synchronization. Ignored in host
    ///         memory.
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
        self.shared.store(true, Relaxed);
        if max_version.is_some_and(|version| version >= (1, 0)) {
            // SAFETY: the pointer is a managed tensor that the capsule owns until it is renamed.
            unsafe {
                PyCapsule::new_with_pointer_and_destructor(
                    py,
                    export_versioned(&self.view).cast(),
                    VERSIONED,
                    Some(drop_versioned),
                )
            }
        } else {
            legacy_capsule(py, &self.view)
        }
    }
}

/// A capsule over the memory of `view`, without a version.
pub(super) fn legacy_capsule<'py>(py: Python<'py>, view: &TensorView) -> PyResult<Bound<'py, PyCapsule>> {
    // SAFETY: the pointer is a managed tensor that the capsule owns until it is renamed.
    unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, export_legacy(view).cast(), LEGACY, Some(drop_legacy))
    }
}

/// A pair of ints. Anything else is a `TypeError`: consumers expect only that and `BufferError`.
fn pair<'py, T>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<(T, T)>
where
    (T, T): for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    object
        .extract()
        .map_err(|error: PyErr| PyTypeError::new_err(format!("{name} must be a pair of ints: {error}")))
}

/// Frees the tensor of a capsule that was not consumed.
unsafe extern "C" fn drop_versioned(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: called by Python on the capsule, with the GIL.
    if let Some(managed) = unsafe { unconsumed::<Versioned>(capsule, VERSIONED) } {
        drop(Import::Versioned(managed));
    }
}

/// [`drop_versioned`] for a legacy capsule.
unsafe extern "C" fn drop_legacy(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: called by Python on the capsule, with the GIL.
    if let Some(managed) = unsafe { unconsumed::<Legacy>(capsule, LEGACY) } {
        drop(Import::Legacy(managed));
    }
}

/// The pointer of a capsule that still has its first name.
unsafe fn unconsumed<T>(
    capsule: *mut pyo3::ffi::PyObject,
    name: &std::ffi::CStr,
) -> Option<std::ptr::NonNull<T>> {
    // SAFETY: the caller passes a live capsule.
    if unsafe { pyo3::ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return None;
    }
    // SAFETY: it is valid under that name, so this neither fails nor sets an exception.
    std::ptr::NonNull::new(unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) }.cast())
}

/// The current stream, which a producer on a GPU makes wait for its own work.
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
        Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0("__dlpack__")?,
        answer => answer?,
    };
    take_capsule(&capsule)
}

/// Takes over the tensor of a capsule.
pub(super) fn take_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Import> {
    let py = capsule.py();
    // SAFETY: `capsule` is a live object; the call returns 0 for any other object.
    let is =
        |name: &std::ffi::CStr| unsafe { pyo3::ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) } == 1;
    let (name, used) = if is(VERSIONED) {
        (VERSIONED, VERSIONED_USED)
    } else if is(LEGACY) {
        (LEGACY, LEGACY_USED)
    } else {
        return Err(PyTypeError::new_err("__dlpack__ did not return an unused DLPack capsule"));
    };
    // SAFETY: the capsule is valid under `name`.
    let Some(managed) =
        std::ptr::NonNull::new(unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) })
    else {
        return Err(PyErr::fetch(py));
    };
    // SAFETY: the capsule is live, and the new name is a constant.
    if unsafe { pyo3::ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    // A renamed capsule does not free the tensor: it is ours.
    Ok(if name == VERSIONED { Import::Versioned(managed.cast()) } else { Import::Legacy(managed.cast()) })
}
