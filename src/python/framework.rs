//! PyTorch, if it is installed: its tensors, dtypes and streams.

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

use crate::base::{DType, Device, Dims, Error, IndexVec};
use crate::memory::{Backend, BorrowedTensor, Stream, backend_for};
use crate::tensor::TensorView;
use crate::tensor::dlpack::{
    EXCHANGE_API, ExchangeApi, Import, RawTensor, borrow, first_element, is_view, packed_indices, raw_device,
    raw_dtype,
};

use super::capsule::take_capsule;

/// The parts of the installed PyTorch that kvpool uses.
pub(super) struct Torch {
    pub(super) module: Py<PyModule>,
    pub(super) tensor_type: Py<PyType>,
    /// The dtypes of this version that kvpool supports.
    dtypes: Vec<(Py<PyAny>, DType)>,
    /// `torch.is_inference_mode_enabled`. PyTorch counts no writes to inference tensors.
    pub(super) is_inference: Py<PyAny>,
    /// The way in which tensors are made and read.
    pub(super) exchange: Exchange,
}

/// The way in which PyTorch's tensors are made and read.
pub(super) enum Exchange {
    /// PyTorch's DLPack exchange table, which PyTorch has since 2.10.
    Table(Api),
    /// The functions in C below `torch.utils.dlpack`: what `torch.from_dlpack` and `Tensor.__dlpack__` do
    /// besides, in Python, takes ten times as long.
    Capsules {
        /// A tensor of a capsule.
        from_capsule: Py<PyAny>,
        /// A capsule of a tensor.
        to_capsule: Py<PyAny>,
    },
}

impl Exchange {
    fn of(torch: &Bound<'_, PyModule>, tensor_type: &Bound<'_, PyType>) -> PyResult<Self> {
        if let Ok(attribute) = tensor_type.getattr("__dlpack_c_exchange_api__") {
            let capsule = attribute.cast_into::<PyCapsule>()?;
            let api = Api(capsule.pointer_checked(Some(EXCHANGE_API))?.cast());
            if api.table().is_usable() {
                return Ok(Self::Table(api));
            }
        }
        let functions = torch.getattr("_C")?;
        let from_capsule = functions.getattr("_from_dlpack")?.unbind();
        let to_capsule = functions.getattr("_to_dlpack")?.unbind();
        Ok(Self::Capsules { from_capsule, to_capsule })
    }
}

/// PyTorch's description of a tensor, to which the caller holds a reference for `'a`. Resizing its storage
/// meanwhile would break PyTorch's own operations as well.
pub(super) struct TensorDescription<'a> {
    raw: RawTensor,
    /// The owner of the shape and the strides of `raw`, if that is not the tensor.
    _import: Option<Import>,
    tensor: PhantomData<&'a ()>,
}

impl<'a> TensorDescription<'a> {
    pub(super) fn borrow(&self) -> PyResult<BorrowedTensor<'a>> {
        // SAFETY: the type says that the tensor lives for 'a.
        unsafe { borrow(&self.raw, self.tensor) }
    }

    /// Returns the address of element 0.
    pub(super) fn address(&self) -> usize {
        first_element(&self.raw).addr()
    }

    /// Copies the indices of a contiguous 1-D tensor in host memory; `None` for other tensors.
    pub(super) fn packed_indices(&self) -> Result<Option<IndexVec>, Error> {
        // SAFETY: as above.
        unsafe { packed_indices(&self.raw) }
    }

    /// Returns whether the tensor still is `view`: see [`is_view`].
    pub(super) fn is_view(&self, view: &TensorView) -> bool {
        // SAFETY: as above.
        unsafe { is_view(&self.raw, view) }
    }
}

/// An exchange table, which lives as long as the process.
pub(super) struct Api(NonNull<ExchangeApi>);

// SAFETY: the table is constant, and its functions are called on threads that are attached to the interpreter.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

impl Api {
    pub(super) const fn table(&self) -> &ExchangeApi {
        // SAFETY: DLPack promises that a published table lives as long as the process and does not change.
        unsafe { self.0.as_ref() }
    }
}

static TORCH: PyOnceLock<Option<Torch>> = PyOnceLock::new();

/// Returns PyTorch, imported at the first call, or `None` when it is not installed.
pub(super) fn torch(py: Python<'_>) -> PyResult<Option<&'static Torch>> {
    let found = TORCH.get_or_try_init(py, || match py.import("torch") {
        Ok(module) => Torch::new(&module).map(Some),
        Err(error) if is_absent(py, &error)? => Ok(None),
        // A broken installation is an error, not an absent one.
        Err(error) => Err(error),
    })?;
    Ok(found.as_ref())
}

/// Returns whether PyTorch itself is missing or hidden, rather than one of its dependencies.
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
        let exchange = Exchange::of(module, &tensor_type)?;
        let dtypes = DType::ALL
            .into_iter()
            .filter_map(|dtype| Some((module.getattr(dtype.name()).ok()?.unbind(), dtype)))
            .collect();
        let is_inference = module.getattr("is_inference_mode_enabled")?.unbind();
        let tensor_type = tensor_type.unbind();
        Ok(Self { module: module.clone().unbind(), tensor_type, dtypes, is_inference, exchange })
    }

    /// Returns whether `object` is an instance of `torch.Tensor` or of a subclass, regardless of its
    /// `__class__`.
    pub(super) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> bool {
        let (found, tensor) = (object.get_type_ptr(), self.tensor_type.as_ptr().cast());
        // SAFETY: both are live types. Unlike `isinstance`, this asks the types and no Python code.
        found == tensor || unsafe { pyo3::ffi::PyType_IsSubtype(found, tensor) } == 1
    }

    /// Returns the dtype of `object`, if it is a `torch.dtype` that kvpool supports.
    pub(super) fn known_dtype(&self, object: &Bound<'_, PyAny>) -> Option<DType> {
        self.dtypes.iter().find(|(known, _)| known.is(object)).map(|(_, dtype)| *dtype)
    }

    /// Returns the `torch.dtype` of `dtype`.
    pub(super) fn dtype<'py>(&self, py: Python<'py>, dtype: DType) -> PyResult<Bound<'py, PyAny>> {
        self.module.bind(py).getattr(dtype.name())
    }

    /// Returns the exchange table, if there is one.
    #[inline]
    pub(super) const fn table(&self) -> Option<&ExchangeApi> {
        match &self.exchange {
            Exchange::Table(api) => Some(api.table()),
            Exchange::Capsules { .. } => None,
        }
    }

    /// Describes a PyTorch tensor.
    pub(super) fn describe<'a>(&self, tensor: &'a Bound<'_, PyAny>) -> PyResult<TensorDescription<'a>> {
        let Exchange::Table(api) = &self.exchange else { return self.describe_by_capsule(tensor) };
        let describe = api.table().describe_object.expect("a table without it is not used");
        let mut raw = MaybeUninit::<RawTensor>::zeroed();
        // SAFETY: the thread is attached, `tensor` is a tensor of the framework that published the function, and
        // `raw` is room for one description.
        if unsafe { describe(tensor.as_ptr().cast(), raw.as_mut_ptr()) } != 0 {
            return Err(unreadable_tensor_error(tensor.py(), &fetch(tensor.py())));
        }
        // SAFETY: the function filled it in; all zeros would be a valid value, too.
        let raw = unsafe { raw.assume_init() };
        Ok(TensorDescription { raw, _import: None, tensor: PhantomData })
    }

    /// Works like [`Torch::describe`], without an exchange table. Neither reads gradients or streams.
    fn describe_by_capsule<'a>(&self, tensor: &'a Bound<'_, PyAny>) -> PyResult<TensorDescription<'a>> {
        let py = tensor.py();
        let Exchange::Capsules { to_capsule, .. } = &self.exchange else {
            unreachable!("a table is used where there is one")
        };
        let to_capsule = to_capsule.bind(py);
        let (capsule, dtype) = match to_capsule.call1((tensor,)) {
            Ok(capsule) => (capsule, None),
            // The first versions with 8-bit floats do not export them: their bytes are.
            Err(error) => {
                let dtype = self.known_dtype(&tensor.getattr("dtype")?).filter(|dtype| dtype.is_fp8());
                let Some(dtype) = dtype else { return Err(unreadable_tensor_error(py, &error)) };
                let bytes = self.dtype(py, DType::U8)?;
                let bytes = tensor.call_method0("detach")?.call_method1("view", (bytes,))?;
                (to_capsule.call1((bytes,))?, Some(dtype))
            }
        };
        let import = take_capsule(&capsule)?;
        let mut raw = import.tensor()?;
        raw.dtype = dtype.map_or(raw.dtype, raw_dtype);
        Ok(TensorDescription { raw, _import: Some(import), tensor: PhantomData })
    }

    /// Creates a tensor of PyTorch's own memory, with undefined contents.
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

    /// Returns the handle of the stream on which PyTorch enqueues work on `device` now.
    fn current_stream(&self, py: Python<'_>, device: Device, ordinal: u32) -> PyResult<usize> {
        let Some(current) = self.table().and_then(|table| table.current_work_stream) else {
            let stream = self.module.bind(py).getattr("cuda")?.call_method1("current_stream", (ordinal,))?;
            return stream.getattr("cuda_stream")?.extract();
        };
        let raw = raw_device(device);
        let mut stream: *mut c_void = ptr::null_mut();
        // SAFETY: the thread is attached, and `stream` is room for one handle.
        if unsafe { current(raw.kind, raw.ordinal, &raw mut stream) } != 0 {
            return Err(fetch(py));
        }
        Ok(stream.addr())
    }
}

thread_local! {
    /// The handle of this thread's current stream as set by [`use_stream`], which takes precedence over PyTorch's.
    static STREAM: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Sets the current stream of this thread, on every device that is asked for, by its handle. `None` restores
/// PyTorch's current stream.
pub(super) fn use_stream(handle: Option<usize>) {
    STREAM.set(handle);
}

/// Returns the stream of device `ordinal` with a handle that comes from Python.
pub(super) fn stream_of(handle: usize, ordinal: u32) -> Result<Stream, Error> {
    // SAFETY: the caller in Python answers for the handle, as for one that it passes to the driver; PyTorch keeps its
    // streams for the life of the process.
    unsafe { Stream::from_handle(handle, ordinal) }
}

/// Returns the stream on which work on `device` is enqueued now: PyTorch's current one, or the default stream
/// without PyTorch.
#[inline]
pub(super) fn current_stream(py: Python<'_>, device: Device) -> PyResult<Stream> {
    match device {
        Device::Cpu => Ok(Stream::DEFAULT),
        Device::Cuda(ordinal) => current_stream_of_gpu(py, device, ordinal),
    }
}

fn current_stream_of_gpu(py: Python<'_>, device: Device, ordinal: u32) -> PyResult<Stream> {
    if let Some(handle) = STREAM.get() {
        return Ok(stream_of(handle, ordinal)?);
    }
    match torch(py)? {
        Some(torch) => Ok(stream_of(torch.current_stream(py, device, ordinal)?, ordinal)?),
        None => Ok(Stream::default_of(device)),
    }
}

/// Returns PyTorch's current CUDA device, or the first one if PyTorch does not use CUDA in this process.
pub(super) fn current_device(py: Python<'_>) -> PyResult<Device> {
    current_ordinal(py).map(Device::Cuda)
}

/// Returns the number of [`current_device`].
pub(super) fn current_ordinal(py: Python<'_>) -> PyResult<u32> {
    let Some(torch) = torch(py)? else { return Ok(0) };
    let cuda = torch.module.bind(py).getattr("cuda")?;
    // To select a device initialises CUDA, which asking must not do.
    if !cuda.call_method0("is_initialized")?.is_truthy()? {
        return Ok(0);
    }
    cuda.call_method0("current_device")?.extract()
}

/// Creates the backend for a new pool on `device`. It zeroes memory on the current stream. Fails while that
/// stream is captured.
pub(super) fn backend(py: Python<'_>, device: Device) -> PyResult<Arc<dyn Backend>> {
    // PyTorch is asked for its stream only once the device is known to exist.
    py.detach(|| backend_for(device, Stream::default_of(device)))?;
    let stream = current_stream(py, device)?;
    let backend = backend_for(device, stream)?;
    if let Some(gpu) = backend.gpu() {
        gpu.check_not_capturing(stream, "a new pool")?;
    }
    Ok(backend)
}

/// Creates the error for a tensor that PyTorch refuses to describe, such as a sparse one.
#[cold]
fn unreadable_tensor_error(py: Python<'_>, error: &PyErr) -> PyErr {
    let cause = error.value(py).to_string();
    let reason = cause.lines().next().unwrap_or_default();
    Error::argument(format!("the tensor cannot be read: {reason}")).into()
}

/// Takes the exception that a C function set.
pub(super) fn fetch(py: Python<'_>) -> PyErr {
    PyErr::take(py).unwrap_or_else(|| PyRuntimeError::new_err("PyTorch failed without an exception"))
}

/// Converts `dtype` to a `torch.dtype` or, without PyTorch, to its name.
pub(super) fn to_dtype(py: Python<'_>, dtype: DType) -> PyResult<Py<PyAny>> {
    match torch(py)? {
        Some(torch) => Ok(torch.dtype(py, dtype)?.unbind()),
        None => Ok(dtype.name().into_pyobject(py)?.into_any().unbind()),
    }
}
