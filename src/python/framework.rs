//! PyTorch, if it is installed: how tensors are made for it and read from it.

use std::cell::Cell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pyo3::exceptions::{PyModuleNotFoundError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyDict, PyType};

use crate::base::{DType, Device, Dims, Error};
use crate::memory::{Backend, Borrowed, Stream, backend_for};
use crate::tensor::TensorView;
use crate::tensor::dlpack::{
    EXCHANGE_API, ExchangeApi, RawTensor, borrow, export_versioned, is_view, raw_device,
};

use super::tensor::Tensor;

/// What kvpool knows of the installed PyTorch.
pub(super) struct Torch {
    module: Py<PyModule>,
    tensor_type: Py<PyType>,
    /// Its dtypes that kvpool knows, as far as this version has them.
    dtypes: Vec<(Py<PyAny>, DType)>,
    /// Whether tensors made now would be of inference mode, which count no writes.
    is_inference: Py<PyAny>,
    /// Its DLPack exchange table; PyTorch before 2.10 has none.
    api: Option<Api>,
}

/// An exchange table, which lives as long as the process.
struct Api(NonNull<ExchangeApi>);

// SAFETY: the table is constant, and its functions are called with the GIL.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

impl Api {
    const fn table(&self) -> &ExchangeApi {
        // SAFETY: DLPack promises that a published table lives as long as the process and does not change.
        unsafe { self.0.as_ref() }
    }
}

static TORCH: PyOnceLock<Option<Torch>> = PyOnceLock::new();

/// PyTorch, imported at the first call, or `None` when it is not installed.
pub(super) fn torch(py: Python<'_>) -> PyResult<Option<&'static Torch>> {
    let found = TORCH.get_or_try_init(py, || match py.import("torch") {
        Ok(module) => Torch::new(&module).map(Some),
        Err(error) if is_absent(py, &error)? => Ok(None),
        // A PyTorch that is there but broken is not taken for absent.
        Err(error) => Err(error),
    })?;
    Ok(found.as_ref())
}

/// Whether PyTorch is not installed (or hidden), rather than something that it needs.
fn is_absent(py: Python<'_>, error: &PyErr) -> PyResult<bool> {
    if !error.is_instance_of::<PyModuleNotFoundError>(py) {
        return Ok(false);
    }
    let name = error.value(py).getattr("name")?;
    Ok(name.is_none() || name.extract::<String>()? == "torch")
}

impl Torch {
    fn new(module: &Bound<'_, PyModule>) -> PyResult<Self> {
        let tensor_type = module.getattr("Tensor")?.cast_into::<PyType>()?;
        let api = match tensor_type.getattr("__dlpack_c_exchange_api__") {
            Ok(attribute) => {
                let capsule = attribute.cast_into::<PyCapsule>()?;
                let api = Api(capsule.pointer_checked(Some(EXCHANGE_API))?.cast());
                api.table().is_usable().then_some(api)
            }
            Err(_) => None,
        };
        let dtypes = DType::ALL
            .into_iter()
            .filter_map(|dtype| Some((module.getattr(dtype.name()).ok()?.unbind(), dtype)))
            .collect();
        let is_inference = module.getattr("is_inference_mode_enabled")?.unbind();
        let tensor_type = tensor_type.unbind();
        Ok(Self { module: module.clone().unbind(), tensor_type, dtypes, is_inference, api })
    }

    /// Whether `object` is a `torch.Tensor` or of a subclass, whatever it says of itself.
    pub(super) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> bool {
        let (found, tensor) = (object.get_type_ptr(), self.tensor_type.as_ptr().cast());
        // SAFETY: both are live types. Unlike `isinstance`, this asks the types and no Python code.
        found == tensor || unsafe { pyo3::ffi::PyType_IsSubtype(found, tensor) } == 1
    }

    /// The dtype that `object` is, if it is a `torch.dtype` that kvpool knows.
    pub(super) fn known_dtype(&self, object: &Bound<'_, PyAny>) -> Option<DType> {
        self.dtypes.iter().find(|(known, _)| known.is(object)).map(|(_, dtype)| *dtype)
    }

    /// The `torch.dtype` of that name.
    pub(super) fn dtype<'py>(&self, py: Python<'py>, dtype: DType) -> PyResult<Bound<'py, PyAny>> {
        self.module.bind(py).getattr(dtype.name())
    }

    /// Whether there is an exchange table, so that [`Torch::describe`] can be used.
    pub(super) const fn describes(&self) -> bool {
        self.api.is_some()
    }

    /// Describes `tensor`, which is one of this framework.
    pub(super) fn describe<'a>(&self, tensor: &'a Bound<'_, PyAny>) -> PyResult<Borrowed<'a>> {
        let raw = self.describe_raw(tensor)?;
        // SAFETY: the caller holds a reference to the tensor for 'a, and nobody resizes its storage meanwhile: that
        // would break PyTorch's own operations as well.
        Ok(unsafe { borrow(&raw, PhantomData) }?)
    }

    fn describe_raw(&self, tensor: &Bound<'_, PyAny>) -> PyResult<RawTensor> {
        let Some(describe) = self.api.as_ref().and_then(|api| api.table().describe_object) else {
            return Err(PyRuntimeError::new_err("PyTorch has no exchange table"));
        };
        let mut raw = MaybeUninit::<RawTensor>::zeroed();
        // SAFETY: the GIL is held, `tensor` is a tensor of the framework that published the function, and `raw`
        // is room for one description.
        if unsafe { describe(tensor.as_ptr().cast(), raw.as_mut_ptr()) } != 0 {
            let cause = fetch(tensor.py()).value(tensor.py()).to_string();
            let reason = cause.lines().next().unwrap_or_default();
            return Err(Error::config(format!("the tensor cannot be read: {reason}")).into());
        }
        // SAFETY: the function filled it in; all zeros would be a valid value, too.
        Ok(unsafe { raw.assume_init() })
    }

    /// A new tensor of PyTorch's own memory, with undefined contents.
    pub(super) fn empty<'py>(
        &self,
        py: Python<'py>,
        shape: &Dims,
        dtype: DType,
        device: Device,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = PyDict::new(py);
        options.set_item("dtype", self.dtype(py, dtype)?)?;
        options.set_item("device", device.to_string())?;
        self.module.bind(py).call_method("empty", (shape.as_slice(),), Some(&options))
    }

    /// Whether `tensor` is what [`to_lasting_tensor`] made of `view` still: nobody gave it another shape, memory or class, or
    /// had it record gradients. Attributes that somebody gave it are not looked for.
    fn is_unchanged(&self, tensor: &Bound<'_, PyAny>, view: &TensorView) -> PyResult<bool> {
        let is_plain = tensor.get_type_ptr() == self.tensor_type.as_ptr().cast();
        if !self.describes() || !is_plain {
            return Ok(false);
        }
        let raw = self.describe_raw(tensor)?;
        // SAFETY: the function that filled it in promises it until the tensor is changed.
        let is_same = unsafe { is_view(&raw, view) };
        if view.dtype().is_integer() {
            return Ok(is_same); // PyTorch lets these record nothing
        }
        Ok(is_same
            && !tensor.getattr(pyo3::intern!(tensor.py(), "requires_grad"))?.is_truthy()?
            && tensor.getattr(pyo3::intern!(tensor.py(), "grad"))?.is_none())
    }

    /// The stream on which PyTorch enqueues work on `device` now.
    fn current_stream(&self, py: Python<'_>, device: Device, ordinal: u32) -> PyResult<Stream> {
        let Some(current) = self.api.as_ref().and_then(|api| api.table().current_work_stream) else {
            let stream = self.module.bind(py).getattr("cuda")?.call_method1("current_stream", (ordinal,))?;
            return Ok(Stream::from_handle(stream.getattr("cuda_stream")?.extract()?));
        };
        let raw = raw_device(device);
        let mut stream: *mut c_void = ptr::null_mut();
        // SAFETY: the GIL is held, and `stream` is room for one handle.
        if unsafe { current(raw.kind, raw.ordinal, &raw mut stream) } != 0 {
            return Err(fetch(py));
        }
        Ok(Stream::from_handle(stream.addr()))
    }

    /// `view` as a tensor. On a device it is never one of inference mode, since those count no writes.
    fn import(&self, py: Python<'_>, view: &TensorView) -> PyResult<Py<PyAny>> {
        if view.device() == Device::Cpu { self.import_now(py, view) } else { self.import_outside(py, view) }
    }

    /// `view` as a tensor that is none of inference mode.
    fn import_outside(&self, py: Python<'_>, view: &TensorView) -> PyResult<Py<PyAny>> {
        if !self.is_inference.bind(py).call0()?.is_truthy()? {
            return self.import_now(py, view);
        }
        let guard = self.module.bind(py).call_method1("inference_mode", (false,))?;
        guard.call_method0("__enter__")?;
        let tensor = self.import_now(py, view);
        guard.call_method1("__exit__", (py.None(), py.None(), py.None()))?;
        tensor
    }

    fn import_now(&self, py: Python<'_>, view: &TensorView) -> PyResult<Py<PyAny>> {
        let Some(import) = self.api.as_ref().and_then(|api| api.table().object_from_managed) else {
            return self.import_slowly(py, view);
        };
        let managed = export_versioned(view);
        let mut object: *mut c_void = ptr::null_mut();
        // SAFETY: the GIL is held, `managed` is ours to give away, and `object` is room for one reference.
        if unsafe { import(managed.as_ptr(), &raw mut object) } != 0 {
            return Err(fetch(py));
        }
        // SAFETY: the function succeeded, so `object` is a new reference.
        Ok(unsafe { Bound::from_owned_ptr(py, object.cast()) }.unbind())
    }

    /// Through `torch.from_dlpack`, which every version has.
    fn import_slowly(&self, py: Python<'_>, view: &TensorView) -> PyResult<Py<PyAny>> {
        let torch = self.module.bind(py);
        // PyTorch learned to import 8-bit floats later than to have them.
        let carrier = if view.dtype().is_fp8() { view.reinterpret(DType::U8)? } else { view.clone() };
        let tensor = torch.call_method1("from_dlpack", (Tensor::new(carrier),))?;
        let tensor = if view.dtype().is_fp8() {
            tensor.call_method1("view", (self.dtype(py, view.dtype())?,))?
        } else {
            tensor
        };
        Ok(tensor.unbind())
    }
}

thread_local! {
    /// What this thread said is the current stream, where PyTorch does not say it.
    static STREAM: Cell<Option<Stream>> = const { Cell::new(None) };
}

/// Makes `stream` the current one of this thread, whatever PyTorch says; `None` asks PyTorch again.
pub(super) fn use_stream(stream: Option<Stream>) {
    STREAM.set(stream);
}

/// The stream on which work on `device` is enqueued now: PyTorch's current one, or the default stream without it.
pub(super) fn current_stream(py: Python<'_>, device: Device) -> PyResult<Stream> {
    let Device::Cuda(ordinal) = device else { return Ok(Stream::DEFAULT) };
    if let Some(stream) = STREAM.get() {
        return Ok(stream);
    }
    match torch(py)? {
        Some(torch) => torch.current_stream(py, device, ordinal),
        None => Ok(Stream::DEFAULT),
    }
}

/// The backend for `device`, whose memory is zeroed on the current stream.
pub(super) fn backend(py: Python<'_>, device: Device) -> PyResult<Arc<dyn Backend>> {
    // PyTorch is asked for its stream only when there is such a device.
    backend_for(device, Stream::DEFAULT)?;
    Ok(backend_for(device, current_stream(py, device)?)?)
}

/// The exception that a C function set.
fn fetch(py: Python<'_>) -> PyErr {
    PyErr::take(py).unwrap_or_else(|| PyRuntimeError::new_err("PyTorch failed without an exception"))
}

/// `view` as a `torch.Tensor` or, without PyTorch, as a [`Tensor`]. No copy; the tensor keeps the memory alive.
pub(super) fn to_tensor(py: Python<'_>, view: &TensorView) -> PyResult<Py<PyAny>> {
    match torch(py)? {
        Some(torch) => torch.import(py, view),
        None => Ok(Py::new(py, Tensor::new(view.clone()))?.into_any()),
    }
}

/// As [`to_tensor`], for a tensor that may be handed out again in another mode.
pub(super) fn to_lasting_tensor(py: Python<'_>, view: &TensorView) -> PyResult<Py<PyAny>> {
    match torch(py)? {
        Some(torch) => torch.import_outside(py, view),
        None => to_tensor(py, view),
    }
}

/// Whether `tensor` is still what [`to_lasting_tensor`] makes of `view`.
pub(super) fn is_unchanged(tensor: &Bound<'_, PyAny>, view: &TensorView) -> bool {
    match torch(tensor.py()) {
        Ok(Some(torch)) => torch.is_unchanged(tensor, view).unwrap_or(false),
        // Without PyTorch it is one of ours, which nobody can change.
        _ => tensor.cast::<Tensor>().is_ok_and(|tensor| tensor.get().view().is(view)),
    }
}

/// Whether nobody but the caller has `tensor`.
pub(super) fn is_unshared(tensor: &Bound<'_, PyAny>) -> bool {
    // SAFETY: the tensor is live, and the GIL is held.
    let references = unsafe { pyo3::ffi::Py_REFCNT(tensor.as_ptr()) };
    references == 1
}

/// Two views as a tuple of tensors.
pub(super) fn to_tensors(py: Python<'_>, views: &[TensorView; 2]) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
    Ok((to_tensor(py, &views[0])?, to_tensor(py, &views[1])?))
}

/// `dtype` as a `torch.dtype` or, without PyTorch, as its name.
pub(super) fn to_dtype(py: Python<'_>, dtype: DType) -> PyResult<Py<PyAny>> {
    match torch(py)? {
        Some(torch) => Ok(torch.dtype(py, dtype)?.unbind()),
        None => Ok(dtype.name().into_pyobject(py)?.into_any().unbind()),
    }
}
