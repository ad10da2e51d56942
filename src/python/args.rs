//! Conversion of Python arguments: tensors, indices, sizes, dtypes, devices, streams.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use numpy::npyffi::_PyArray_GET_ITEM_DATA;
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyInt, PyList, PyRange, PySequence, PyTuple};

use crate::base::{
    DType, Device, Dims, Error, IndexDType, IndexVec, MAX_NDIM, try_collect, try_push, try_with_capacity,
};
use crate::cache::{PageHash, PrefillCost};
use crate::kernels::{Indices, check_ints, not_indices_error, read_indices};
use crate::memory::{BorrowedTensor, HostRows, Keep, Stream};
use crate::pool::{TensorOrigin, Writes, values_now};
use crate::tensor::dlpack::{Import, address_of};

use super::framework::{Torch, current_device, current_ordinal, current_stream, stream_of, torch};
use super::tensor::{Tensor, consume};

pub(super) use super::ints::{int, kind_of};

/// A tensor argument of any framework.
///
/// It is described as late as possible, by [`TensorArg::borrow`]: until then other arguments may still run
/// Python code, which could resize it.
pub(super) enum TensorArg<'a, 'py> {
    /// A PyTorch tensor.
    Torch(&'static Torch, Cow<'a, Bound<'py, PyAny>>),
    /// A NumPy array.
    Array(&'a Bound<'py, PyUntypedArray>),
    /// A tensor imported through DLPack, kept alive here.
    Imported(Import),
    /// A `kvpool.Tensor`.
    Own(&'a Tensor),
}

impl TensorArg<'_, '_> {
    /// Describes the tensor. Runs no Python code of the caller.
    pub(super) fn borrow(&self) -> PyResult<BorrowedTensor<'_>> {
        match self {
            Self::Torch(torch, tensor) => torch.describe(tensor)?.borrow(),
            Self::Array(array) => describe_array(array),
            Self::Imported(import) => Ok(import.borrow()?),
            Self::Own(tensor) => Ok(tensor.view().borrow()),
        }
    }

    /// Returns the object that keeps the memory alive beyond the call: a tensor made for the call, or
    /// `given`.
    pub(super) fn keeper(&self, given: &Bound<'_, PyAny>) -> Py<PyAny> {
        match self {
            Self::Torch(_, tensor) => tensor.as_ref().clone().unbind(),
            Self::Array(_) | Self::Imported(_) | Self::Own(_) => given.clone().unbind(),
        }
    }

    /// Returns the number of writes, if it is known. The importer of an exported `kvpool.Tensor` may have
    /// written to it.
    fn version(&self) -> Option<u64> {
        match self {
            Self::Own(tensor) => (!tensor.is_exported()).then_some(0),
            Self::Torch(..) | Self::Array(_) | Self::Imported(_) => None,
        }
    }
}

/// Returns PyTorch's count of writes to `tensor` (`_version`), or `None` for an inference tensor, which has
/// no count.
pub(super) fn version_of(tensor: &Bound<'_, PyAny>) -> Option<u64> {
    tensor.getattr(intern!(tensor.py(), "_version")).and_then(|version| version.extract()).ok()
}

/// A tensor in host memory from which indices were copied.
#[derive(Clone, Copy)]
pub(super) struct HostTensor {
    /// The address of the first index.
    address: usize,
    /// The number of elements from one index to the next, if they are evenly spaced.
    step: Option<usize>,
}

impl HostTensor {
    /// Describes the tensor of which `found` is every `step`th element.
    fn of(found: &BorrowedTensor<'_>, step: usize) -> Self {
        let spaced = found.even_step().map(|distance| distance * step);
        Self { address: found.address().as_ptr().addr(), step: spaced }
    }

    /// Returns the origin of the indices; `writes` tells whether the tensor was written to.
    pub(super) const fn origin(self, writes: &dyn Fn() -> Writes) -> TensorOrigin<'_> {
        TensorOrigin { address: self.address, step: self.step, writes }
    }
}

/// Returns whether PyTorch has counted writes to a tensor; for other objects nobody does.
pub(super) fn writes_of(object: &Bound<'_, PyAny>) -> Writes {
    let is_torch = torch(object.py()).ok().flatten().is_some_and(|torch| torch.is_tensor(object));
    match version_of(object).filter(|_| is_torch) {
        None => Writes::Uncounted,
        Some(0) => Writes::None,
        Some(_) => Writes::Some,
    }
}

/// Indices passed as an argument.
pub(super) enum IndexArg<'a, 'py> {
    /// Indices in host memory, copied, and the tensor that they were read from, if it is one.
    Host(IndexVec, Option<HostTensor>),
    /// Every `step`th element of an index tensor on a device.
    Device { tensor: TensorArg<'a, 'py>, device: Device, version: Option<u64>, step: usize },
}

impl IndexArg<'_, '_> {
    /// Returns indices that were not read from a tensor.
    pub(super) const fn of_values(values: IndexVec) -> Self {
        Self::Host(values, None)
    }

    /// Returns the tensor in host memory that the indices were read from.
    pub(super) const fn host_tensor(&self) -> Option<HostTensor> {
        match self {
            Self::Host(_, tensor) => *tensor,
            Self::Device { .. } => None,
        }
    }

    /// Takes the indices for a call into a pool. Call it once. Runs no Python code of the caller.
    pub(super) fn take(&mut self) -> PyResult<Indices<'_>> {
        match self {
            Self::Host(values, _) => Ok(Indices::Host(std::mem::replace(values, IndexVec::I32(Vec::new())))),
            Self::Device { tensor, version, step: 1, .. } => Ok(Indices::of(tensor.borrow()?, *version)?),
            Self::Device { tensor, version, step, .. } => {
                Ok(Indices::of(tensor.borrow()?.step_by(*step)?, *version)?)
            }
        }
    }

    /// Returns the number of indices in host memory, which are sent to a device.
    pub(super) fn host_len(&self) -> usize {
        match self {
            Self::Host(values, _) => values.len(),
            Self::Device { .. } => 0,
        }
    }

    /// Returns the number of indices.
    #[inline]
    pub(super) fn len(&self) -> PyResult<usize> {
        match self {
            Self::Host(values, _) => Ok(values.len()),
            Self::Device { tensor, step, .. } => Ok(tensor.borrow()?.shape().numel().div_ceil(*step)),
        }
    }

    /// Returns the indices on the host or on the device `pool`. Waits for values that only another device
    /// has.
    pub(super) fn on(self, py: Python<'_>, pool: Device) -> PyResult<Self> {
        match &self {
            Self::Device { device, .. } if *device != pool => self.values(py).map(Self::of_values),
            _ => Ok(self),
        }
    }

    /// Returns the values. Waits for values that only a device has.
    pub(super) fn values(mut self, py: Python<'_>) -> PyResult<IndexVec> {
        let stream = self.stream(py, Device::Cpu)?;
        let indices = self.take()?;
        Ok(py.detach(|| values_now(indices, stream))?)
    }

    /// Returns the current stream of the pool's device or, for a pool in host memory, of the device of these
    /// indices.
    pub(super) fn stream(&self, py: Python<'_>, pool: Device) -> PyResult<Stream> {
        match (pool, self) {
            (Device::Cpu, Self::Device { device, .. }) => current_stream(py, *device),
            _ => current_stream(py, pool),
        }
    }
}

/// Converts a tensor of PyTorch, kvpool, NumPy or a framework with DLPack. Returns `None` for other objects.
pub(super) fn tensor_or_none<'a, 'py>(object: &'a Bound<'py, PyAny>) -> PyResult<Option<TensorArg<'a, 'py>>> {
    let py = object.py();
    if let Some(torch) = torch(py)?
        && torch.is_tensor(object)
    {
        return Ok(Some(TensorArg::Torch(torch, Cow::Borrowed(object))));
    }
    if let Ok(tensor) = object.cast::<Tensor>() {
        return Ok(Some(TensorArg::Own(tensor.get())));
    }
    if numpy_is_loaded(py)?
        && let Ok(array) = object.cast::<PyUntypedArray>()
    {
        return Ok(Some(TensorArg::Array(array)));
    }
    if object.hasattr(intern!(py, "__dlpack__"))? {
        return consume(object).map(|import| Some(TensorArg::Imported(import)));
    }
    Ok(None)
}

/// Returns whether NumPy was imported. If it was not, no object is an array, and the `numpy` crate would
/// panic.
fn numpy_is_loaded(py: Python<'_>) -> PyResult<bool> {
    /// Whether NumPy was found before. Every call needs the answer, and modules are not unloaded.
    static LOADED: AtomicBool = AtomicBool::new(false);
    if LOADED.load(Relaxed) {
        return Ok(true);
    }
    let modules = py.import("sys")?.getattr("modules")?;
    let loaded = !modules.call_method1("get", ("numpy",))?.is_none();
    LOADED.store(loaded, Relaxed);
    Ok(loaded)
}

/// Returns the dtype of an array, or `None` if its byte order is not the native one.
fn array_dtype(array: &Bound<'_, PyUntypedArray>) -> PyResult<Option<DType>> {
    let descr = array.dtype();
    if descr.byteorder() == b'>' {
        return Ok(None);
    }
    Ok(match (descr.kind(), descr.itemsize()) {
        (b'i', 8) => Some(DType::I64),
        (b'i', 4) => Some(DType::I32),
        (b'i', 2) => Some(DType::I16),
        (b'u', 8) => Some(DType::U64),
        (b'u', 4) => Some(DType::U32),
        (b'u', 2) => Some(DType::U16),
        (b'i', 1) => Some(DType::I8),
        (b'u', 1) => Some(DType::U8),
        (b'f', 8) => Some(DType::F64),
        (b'f', 4) => Some(DType::F32),
        (b'f', 2) => Some(DType::F16),
        (b'b', 1) => Some(DType::Bool),
        // The dtypes of `ml_dtypes` are identified by name only.
        _ => DType::parse(&descr.getattr("name")?.extract::<String>()?).ok(),
    })
}

fn describe_array<'a>(array: &'a Bound<'_, PyUntypedArray>) -> PyResult<BorrowedTensor<'a>> {
    let dtype = array_dtype(array)?.ok_or_else(|| {
        PyTypeError::new_err(format!("an array of dtype {} cannot be used here", &*array.dtype()))
    })?;
    let size = dtype.size().cast_signed();
    let shape = Dims::of(array.shape())?;
    let mut strides = Vec::with_capacity(shape.ndim());
    for &stride in array.strides() {
        if stride % size != 0 {
            return Err(Error::argument(format!(
                "a stride of {stride} bytes is not a multiple of the size of {dtype}"
            ))
            .into());
        }
        strides.push(i64::try_from(stride / size).expect("an address has 64 bits"));
    }
    // SAFETY: the array is live.
    let fields = unsafe { _PyArray_GET_ITEM_DATA(array.as_array_ptr()) };
    // SAFETY: they are the header of the array, which does not move.
    let data = unsafe { (*fields).data };
    let address = address_of(data.cast(), &shape)?;
    // SAFETY: NumPy promises memory behind every element of the shape; the caller's reference keeps it alive.
    Ok(unsafe { BorrowedTensor::new(address, dtype, Device::Cpu, shape, Dims::new(&strides)?) })
}

/// Converts the argument `name`, which must be a tensor.
pub(super) fn tensor<'a, 'py>(name: &str, object: &'a Bound<'py, PyAny>) -> PyResult<TensorArg<'a, 'py>> {
    tensor_or_none(object)?.ok_or_else(|| {
        PyTypeError::new_err(format!("{name} must be a tensor or an array, not {}", kind_of(object)))
    })
}

/// Converts the argument `name`, whose values are read. Resolves PyTorch's lazy negation.
pub(super) fn values<'a, 'py>(name: &str, object: &'a Bound<'py, PyAny>) -> PyResult<TensorArg<'a, 'py>> {
    match tensor(name, object)? {
        TensorArg::Torch(torch, tensor) if tensor.call_method0("is_neg")?.is_truthy()? => {
            Ok(TensorArg::Torch(torch, Cow::Owned(tensor.call_method0("resolve_neg")?)))
        }
        other => Ok(other),
    }
}

/// Converts the argument `out` with two tensors.
pub(super) fn outputs<'py>(pair: &Bound<'py, PyAny>) -> PyResult<[Bound<'py, PyAny>; 2]> {
    match pair.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>)>() {
        Ok((k, v)) => Ok([k, v]),
        Err(_) => Err(PyTypeError::new_err(format!("out must be a pair of tensors, not {}", kind_of(pair)))),
    }
}

/// Converts the argument `out`, which must be a writable tensor.
pub(super) fn output<'a, 'py>(object: &'a Bound<'py, PyAny>) -> PyResult<TensorArg<'a, 'py>> {
    writable("out", object)
}

/// Converts the argument `name`, which must be a writable tensor.
fn writable<'a, 'py>(name: &str, object: &'a Bound<'py, PyAny>) -> PyResult<TensorArg<'a, 'py>> {
    let tensor = tensor(name, object)?;
    let writable = match &tensor {
        TensorArg::Imported(_) if is_jax_array(object)? => {
            return Err(Error::argument(format!(
                "{name} is a jax.Array, which must not change; pass a NumPy array, and make a jax.Array of that"
            ))
            .into());
        }
        TensorArg::Imported(import) => import.is_writable()?,
        TensorArg::Array(array) => array.getattr("flags")?.getattr("writeable")?.is_truthy()?,
        TensorArg::Torch(..) | TensorArg::Own(_) => true,
    };
    if writable { Ok(tensor) } else { Err(Error::argument(format!("{name} is read-only")).into()) }
}

/// Returns whether `object` is a `jax.Array`, whose capsules do not say that they are read-only.
fn is_jax_array(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let jax = object.py().import("sys")?.getattr("modules")?.call_method1("get", ("jax",))?;
    match jax.getattr("Array") {
        Ok(array) => object.is_instance(&array),
        Err(_) => Ok(false), // it is not imported, or not wholly
    }
}

/// Whether [`rows`] are only read, or also written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// Returns the rows of a tensor in host memory, one for each index of dimension 0. They keep the tensor
/// alive.
pub(super) fn rows(name: &str, object: &Bound<'_, PyAny>, access: Access) -> PyResult<HostRows> {
    let given = if access == Access::Write { writable(name, object)? } else { tensor(name, object)? };
    let keep = Arc::new(given.keeper(object)) as Keep;
    let borrowed = given.borrow()?;
    // SAFETY: the keeper keeps the memory, which is writable if it is to be written.
    Ok(unsafe { HostRows::of_tensor(name, &borrowed, keep) }?)
}

/// Keys of pages: a sequence of 32 bytes each, or a uint8 array of as many in each row.
pub(super) fn page_keys(object: &Bound<'_, PyAny>) -> PyResult<Vec<PageHash>> {
    let wrong = |found: String| {
        let text = "keys must be a sequence of bytes objects of 32 bytes, or a uint8 array of shape [n, 32]";
        PyTypeError::new_err(format!("{text}, not {found}"))
    };
    let is_sequence = object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>();
    if !is_sequence && let Some(given) = tensor_or_none(object)? {
        let borrowed = given.borrow()?;
        let (dtype, shape) = (borrowed.dtype(), borrowed.shape().as_slice());
        if dtype != DType::U8 || shape.len() != 2 || shape[1] != 32 {
            return Err(wrong(format!("{dtype} of shape {shape:?}")));
        }
        let rows = rows("keys", object, Access::Read)?;
        let mut keys = try_with_capacity(rows.len())?;
        for row in 0..rows.len() {
            let mut key = [0; 32];
            rows.read(row, &mut key);
            keys.push(key);
        }
        return Ok(keys);
    }
    let is_bytes = object.is_instance_of::<PyBytes>() || object.is_instance_of::<PyByteArray>();
    let sequence = object.cast::<PySequence>().ok().filter(|_| !is_bytes);
    let sequence = sequence.ok_or_else(|| wrong(kind_of(object)))?;
    let mut keys = try_with_capacity(sequence.len()?)?;
    for item in sequence.try_iter()? {
        let item = item?;
        let bytes = item.cast::<PyBytes>().map_err(|_| wrong(format!("one with {}", kind_of(&item))))?;
        let bytes = bytes.as_bytes();
        let key = bytes.try_into().map_err(|_| {
            Error::argument(format!("key {} has {} bytes; a key has 32", keys.len(), bytes.len()))
        })?;
        try_push(&mut keys, key)?;
        check_signals(object.py(), keys.len())?;
    }
    Ok(keys)
}

/// Converts indices: integers of 16 bits or more in a tensor, an array or a series, of any shape, a sequence
/// of ints, or a single int. Indices in host memory are copied.
pub(super) fn indices<'a, 'py>(object: &'a Bound<'py, PyAny>) -> PyResult<IndexArg<'a, 'py>> {
    strided_indices(object, 1)
}

/// Converts every `step`th of [`indices`].
#[inline]
pub(super) fn strided_indices<'a, 'py>(
    object: &'a Bound<'py, PyAny>,
    step: usize,
) -> PyResult<IndexArg<'a, 'py>> {
    let Some(torch) = torch(object.py())?.filter(|torch| torch.is_tensor(object)) else {
        return indices_of_others(object, step);
    };
    let described = torch.describe(object)?;
    // What `alloc` returns is read without a description of shape and strides.
    if step == 1
        && let Some(indices) = described.packed_indices()?
    {
        let tensor = HostTensor { address: described.address(), step: Some(1) };
        return Ok(IndexArg::Host(indices, Some(tensor)));
    }
    let found = found_indices(object, step, described.borrow())?;
    found.or_else(|found| found.indices(object, step, TensorArg::Torch(torch, Cow::Borrowed(object))))
}

/// Indices on a device.
struct OnDevice {
    device: Device,
    dtype: DType,
}

/// Reads indices that are in host memory.
fn found_indices<'a, 'py>(
    object: &'a Bound<'py, PyAny>,
    step: usize,
    found: PyResult<BorrowedTensor<'_>>,
) -> PyResult<Result<IndexArg<'a, 'py>, OnDevice>> {
    let found = match found {
        Ok(found) => found,
        Err(error) => return indices_by_copy(object, step, error).map(Ok),
    };
    if found.device() != Device::Cpu {
        return Ok(Err(OnDevice { device: found.device(), dtype: found.dtype() }));
    }
    let indices = if step == 1 { read_indices(&found) } else { read_indices(&found.step_by(step)?) };
    Ok(Ok(IndexArg::Host(indices?, Some(HostTensor::of(&found, step)))))
}

impl OnDevice {
    /// Returns every `step`th index of `tensor`, which was given as `object`.
    fn indices<'a, 'py>(
        self,
        object: &'a Bound<'py, PyAny>,
        step: usize,
        tensor: TensorArg<'a, 'py>,
    ) -> PyResult<IndexArg<'a, 'py>> {
        let Self { device, dtype } = self;
        // PyTorch without an exchange table counts the writes to an imported tensor as well.
        let is_torch = torch(object.py())?.is_some_and(|torch| torch.is_tensor(object));
        let version = if is_torch { version_of(object) } else { tensor.version() };
        let is_narrow = matches!(dtype, DType::I16 | DType::U16 | DType::U32);
        if is_narrow && let TensorArg::Torch(torch, narrow) = &tensor {
            // Kernels read 32 and 64 bits. PyTorch's copy lives on its current stream, as the call does.
            let wide = torch.dtype(object.py(), DType::I64)?;
            let wide = narrow.call_method1(intern!(object.py(), "to"), (wide,))?;
            let tensor = TensorArg::Torch(torch, Cow::Owned(wide));
            return Ok(IndexArg::Device { tensor, device, version: None, step });
        }
        check_ints(dtype)?;
        Ok(IndexArg::Device { tensor, device, version, step })
    }
}

/// Works like [`strided_indices`], for all objects but tensors of PyTorch.
#[inline(never)]
fn indices_of_others<'a, 'py>(object: &'a Bound<'py, PyAny>, step: usize) -> PyResult<IndexArg<'a, 'py>> {
    let ints = |object| Ok::<_, PyErr>(IndexArg::of_values(every_nth(ints(object)?, step)?));
    if object.is_instance_of::<PyList>()
        || object.is_instance_of::<PyTuple>()
        || object.is_instance_of::<PyRange>()
    {
        return ints(object);
    }
    let has_array = || object.hasattr(intern!(object.py(), "__array__"));
    let tensor = match tensor_or_none(object) {
        // An array of Arrow with gaps or of text has no capsule, but an array whose dtype says why.
        Err(error) if error.is_instance_of::<PyTypeError>(object.py()) && has_array()? => None,
        tensor => tensor?,
    };
    if let Some(tensor) = tensor {
        let found = found_indices(object, step, tensor.borrow())?;
        return found.or_else(|found| found.indices(object, step, tensor));
    }
    // Bytes are a sequence of ints in Python, but are never meant as indices.
    let is_bytes = object.is_instance_of::<PyBytes>() || object.is_instance_of::<PyByteArray>();
    if !is_bytes && object.cast::<PySequence>().is_ok() {
        return ints(object);
    }
    // A single index, as those who free one slot write it.
    if let Some(index) = single(object)? {
        return Ok(IndexArg::of_values(IndexVec::I64(vec![index])));
    }
    // A series of pandas or Polars, or an array of Arrow in chunks.
    if has_array()? {
        let (py, numpy) = (object.py(), object.py().import("numpy")?);
        let array = numpy.call_method1("asarray", (object,)).map_err(|error| {
            let is_none = error.is_instance_of::<PyValueError>(py);
            if is_none { not_indices_error(&kind_of(object)).into() } else { error }
        })?;
        return strided_indices(&array, step)?.values(object.py()).map(IndexArg::of_values);
    }
    Err(not_indices_error(&kind_of(object)).into())
}

/// Converts indices that [`TensorArg::borrow`] cannot describe, like [`strided_indices`]: arrays of the other
/// byte order, tensors of many dimensions or of dtypes other than the index dtypes.
#[cold]
fn indices_by_copy<'a, 'py>(
    object: &'a Bound<'py, PyAny>,
    step: usize,
    error: PyErr,
) -> PyResult<IndexArg<'a, 'py>> {
    let py = object.py();
    let owned =
        |object: &Bound<'py, PyAny>| strided_indices(object, step)?.values(py).map(IndexArg::of_values);
    // Only the order of indices matters, so a shape of too many dimensions is flattened.
    if has_more_dimensions(object) {
        return owned(&object.call_method1("reshape", (-1,))?);
    }
    if numpy_is_loaded(py)?
        && let Ok(array) = object.cast::<PyUntypedArray>()
    {
        let descr = array.dtype();
        if matches!(descr.kind(), b'i' | b'u') && descr.byteorder() == b'>' {
            return owned(&array.call_method1("astype", (descr.call_method1("newbyteorder", ("=",))?,))?);
        }
    }
    match object.getattr("dtype") {
        Ok(dtype) if error.is_instance_of::<PyTypeError>(py) => {
            Err(not_indices_error(&dtype.str()?.to_string()).into())
        }
        _ => Err(error),
    }
}

/// Returns whether `object` is a tensor or an array of more than [`MAX_NDIM`] dimensions.
fn has_more_dimensions(object: &Bound<'_, PyAny>) -> bool {
    object.getattr("ndim").and_then(|ndim| ndim.extract::<usize>()).is_ok_and(|ndim| ndim > MAX_NDIM)
}

/// Converts a single index: an int, or an object with `__index__` that is not a tensor. Returns `None` for
/// other objects.
pub(super) fn single(object: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
    let py = object.py();
    let is_int = object.is_instance_of::<PyInt>()
        || (object.hasattr(intern!(py, "__index__"))?
            && !object.hasattr(intern!(py, "__len__"))?
            && tensor_or_none(object)?.is_none());
    is_int.then(|| int(object)).transpose()
}

/// Indices, or a single one.
pub(super) fn index_or_indices<'a, 'py>(object: &'a Bound<'py, PyAny>) -> PyResult<IndexArg<'a, 'py>> {
    match single(object)? {
        Some(index) => Ok(IndexArg::of_values(IndexVec::I64(vec![index]))),
        None => indices(object),
    }
}

/// Returns every `step`th value.
fn every_nth(values: IndexVec, step: usize) -> crate::base::Result<IndexVec> {
    match values {
        _ if step == 1 => Ok(values),
        IndexVec::I32(values) => try_collect(values.into_iter().step_by(step)).map(IndexVec::I32),
        IndexVec::I64(values) => try_collect(values.into_iter().step_by(step)).map(IndexVec::I64),
    }
}

fn ints(sequence: &Bound<'_, PyAny>) -> PyResult<IndexVec> {
    // Lists are the common case, and their length is known.
    if let Ok(list) = sequence.cast::<PyList>() {
        let mut values = try_with_capacity(list.len())?;
        for item in list.iter() {
            try_push(&mut values, item_of(&item)?)?;
        }
        return Ok(IndexVec::I64(values));
    }
    let mut values = Vec::new();
    for item in sequence.try_iter()? {
        try_push(&mut values, item_of(&item?)?)?;
        check_signals(sequence.py(), values.len())?;
    }
    Ok(IndexVec::I64(values))
}

/// Lets an interrupt end the reading of a sequence that is very long or has no end, of which `count` items were
/// read.
pub(super) fn check_signals(py: Python<'_>, count: usize) -> PyResult<()> {
    const OFTEN: usize = 1 << 16;
    if count.is_multiple_of(OFTEN) { py.check_signals() } else { Ok(()) }
}

/// Returns the value of an int of 64 bits, except -1: the frequent case, at the least cost. `None` for every other
/// object.
#[inline]
fn frequent_int(object: &Bound<'_, PyAny>) -> Option<i64> {
    if !object.is_exact_instance_of::<PyInt>() {
        return None;
    }
    // SAFETY: the thread is attached, and the object is an int.
    let value = unsafe { pyo3::ffi::PyLong_AsLongLong(object.as_ptr()) };
    if value == -1 {
        // It may stand for an error.
        drop(PyErr::take(object.py()));
        return None;
    }
    Some(value)
}

/// Converts one index of a sequence.
#[inline]
fn item_of(object: &Bound<'_, PyAny>) -> PyResult<i64> {
    frequent_int(object).map_or_else(|| any_item_of(object), Ok)
}

/// Works like [`item_of`], for all objects.
fn any_item_of(object: &Bound<'_, PyAny>) -> PyResult<i64> {
    int(object).map_err(|error| {
        let is_type = error.is_instance_of::<PyTypeError>(object.py());
        if is_type { not_indices_error(&format!("one with {}", kind_of(object))).into() } else { error }
    })
}

/// Converts the number of a layer, which must be below `layers`.
pub(super) fn layer(object: &Bound<'_, PyAny>, layers: usize) -> PyResult<usize> {
    let layer = int(object)?;
    usize::try_from(layer).ok().filter(|&layer| layer < layers).ok_or_else(|| {
        Error::index(format!("layer {layer} is outside [0, {layers})")).with_index(layer).into()
    })
}

/// An optional argument. Omitting it differs from passing `None`.
pub(super) enum Arg<'py> {
    Missing,
    Given(Bound<'py, PyAny>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Arg<'py> {
    type Error = PyErr;

    fn extract(object: pyo3::Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self::Given(object.to_owned()))
    }
}

impl Arg<'_> {
    /// Converts the argument to a pool size; returns `default` if it is absent.
    pub(super) fn size(&self, name: &str, default: usize) -> PyResult<usize> {
        match self {
            Self::Missing => Ok(default),
            Self::Given(object) => size(name, object),
        }
    }

    /// Converts the argument to a count; returns `default` if it is absent.
    pub(super) fn count(&self, name: &str, default: usize) -> PyResult<usize> {
        match self {
            Self::Missing => Ok(default),
            Self::Given(object) => count(name, object),
        }
    }
}

/// Converts a count. An int that does not fit a `usize` becomes `usize::MAX`, which no pool can satisfy.
#[inline]
pub(super) fn count(name: &str, object: &Bound<'_, PyAny>) -> PyResult<usize> {
    if let Some(count) = frequent_int(object).and_then(|count| usize::try_from(count).ok()) {
        return Ok(count);
    }
    convert_count(name, object)
}

/// Works like [`count`], for all objects.
#[cold]
fn convert_count(name: &str, object: &Bound<'_, PyAny>) -> PyResult<usize> {
    match object.extract::<usize>() {
        Ok(count) => Ok(count),
        Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
            if object.lt(0)? {
                Err(negative_error(name, object))
            } else {
                Ok(usize::MAX)
            }
        }
        Err(error) => Err(error),
    }
}

/// Converts a pool size.
pub(super) fn size(name: &str, object: &Bound<'_, PyAny>) -> PyResult<usize> {
    match count(name, object)? {
        usize::MAX => {
            Err(Error::argument(format!("{name} is {object}, more than an address can name")).into())
        }
        size => Ok(size),
    }
}

fn negative_error(name: &str, object: &Bound<'_, PyAny>) -> PyErr {
    Error::argument(format!("{name} is {object}; it must not be negative")).into()
}

/// Converts a device in PyTorch's notation, or a `torch.device`. Defaults to "cuda", which is PyTorch's
/// current CUDA device.
pub(super) fn device(py: Python<'_>, object: Option<&Bound<'_, PyAny>>) -> PyResult<Device> {
    let Some(object) = object else { return current_device(py) };
    let text = object.str()?.to_string();
    if text == "cuda" {
        return current_device(py);
    }
    if object.is_instance_of::<pyo3::types::PyString>() || kind_of(object) == "device" {
        return Ok(Device::parse(&text)?);
    }
    Err(PyTypeError::new_err(format!("device must be a str or a torch.device, not {}", kind_of(object))))
}

/// Converts a device in PyTorch's notation, or a `torch.device`. Defaults to the host.
pub(super) fn host_or(object: Option<&Bound<'_, PyAny>>) -> PyResult<Device> {
    object.map_or(Ok(Device::Cpu), |object| device(object.py(), Some(object)))
}

/// Converts a CUDA stream for memory of `device`: a `torch.cuda.Stream`, another object with a `cuda_stream` or a
/// `__cuda_stream__`, or a stream handle. An object that names its device is a stream of that device. Any other is a
/// stream of `device` or, where that is the host, of the current device.
pub(super) fn stream(object: &Bound<'_, PyAny>, device: Device) -> PyResult<Stream> {
    let py = object.py();
    let handle = if let Some(handle) = object.getattr_opt(intern!(py, "cuda_stream"))? {
        handle.extract().ok()
    } else if let Some(answer) = object.getattr_opt(intern!(py, "__cuda_stream__"))? {
        Some(handle_of_protocol(object, answer)?)
    } else {
        object.extract().ok()
    };
    let handle = handle.ok_or_else(|| {
        PyTypeError::new_err(format!("stream must be a stream or its handle, not {}", kind_of(object)))
    })?;
    let ordinal = match (ordinal_of(object), device) {
        (Some(ordinal), _) | (None, Device::Cuda(ordinal)) => ordinal,
        (None, Device::Cpu) => current_ordinal(py)?,
    };
    Ok(stream_of(handle, ordinal)?)
}

/// Returns the handle of a `__cuda_stream__`, which is a method in `cuda.core` and a property elsewhere: the version
/// of the protocol, and the handle.
fn handle_of_protocol(stream: &Bound<'_, PyAny>, found: Bound<'_, PyAny>) -> PyResult<usize> {
    let answer = if found.is_callable() { found.call0()? } else { found };
    let (version, handle) = answer.extract::<(i64, usize)>().map_err(|_| {
        let kind = kind_of(stream);
        PyTypeError::new_err(format!("__cuda_stream__ of {kind} must give (version, handle), not {answer}"))
    })?;
    if version != 0 {
        let kind = kind_of(stream);
        let text = format!(
            "__cuda_stream__ of {kind} has version {version} of the protocol; kvpool knows version 0"
        );
        return Err(Error::argument(text).into());
    }
    Ok(handle)
}

/// Returns the number of the device that a stream object names: `device.index` in PyTorch, `device.device_id` in
/// `cuda.core`, `device_id` in CuPy, which has -1 for a stream of the device that is current.
fn ordinal_of(stream: &Bound<'_, PyAny>) -> Option<u32> {
    let py = stream.py();
    let number = |object: &Bound<'_, PyAny>, name| object.getattr(name).ok()?.extract().ok();
    let device = stream.getattr(intern!(py, "device")).ok();
    let of_device =
        |device| number(device, intern!(py, "index")).or_else(|| number(device, intern!(py, "device_id")));
    device.as_ref().and_then(of_device).or_else(|| number(stream, intern!(py, "device_id")))
}

/// Converts the shape of a tensor: a sequence of ints, or a single int.
pub(super) fn shape(object: &Bound<'_, PyAny>) -> PyResult<Dims> {
    let mut extents = [0; MAX_NDIM];
    let tuple = object.cast::<PyTuple>();
    if let Ok(tuple) = tuple
        && let Some(extents) = extents.get_mut(..tuple.len())
    {
        for (extent, item) in extents.iter_mut().zip(tuple.iter_borrowed()) {
            *extent = int(&item)?;
        }
        return Ok(Dims::new(extents)?);
    }
    if let Some(single) = single(object)? {
        return Ok(Dims::new(&[single])?);
    }
    // No more are read than a tensor may have: there may be no end.
    let mut count = 0;
    for item in object.try_iter()? {
        let Some(extent) = extents.get_mut(count) else {
            let known = object.len().ok().filter(|len| *len > MAX_NDIM);
            let given = known.map_or_else(|| format!("more than {MAX_NDIM}"), |len| len.to_string());
            return Err(Error::argument(format!(
                "a tensor of {given} dimensions; at most {MAX_NDIM} are supported"
            ))
            .into());
        };
        *extent = item_of(&item?)?;
        count += 1;
    }
    Ok(Dims::new(&extents[..count])?)
}

/// Converts the shape of a pool, without negative extents.
pub(super) fn extents(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let shape = shape(object)?;
    shape
        .as_slice()
        .iter()
        .map(|&extent| {
            usize::try_from(extent).map_err(|_| {
                Error::argument(format!("{name} is {:?}; no extent may be negative", shape.as_slice())).into()
            })
        })
        .collect()
}

/// Converts a storage dtype; returns `default` if it is absent.
pub(super) fn dtype(object: Option<&Bound<'_, PyAny>>, default: DType) -> PyResult<DType> {
    object.map_or(Ok(default), storage_dtype)
}

/// Converts a storage dtype: a `torch.dtype`, a NumPy dtype, or the name of one.
pub(super) fn storage_dtype(object: &Bound<'_, PyAny>) -> PyResult<DType> {
    Ok(DType::parse(&dtype_name(object)?)?)
}

/// Converts the dtype of index tensors: a `torch.dtype`, a NumPy dtype, or the name of one.
pub(super) fn index_dtype(object: &Bound<'_, PyAny>) -> PyResult<IndexDType> {
    Ok(IndexDType::parse(&dtype_name(object)?)?)
}

/// Converts any dtype, for scratch memory. A `torch.dtype` is recognised by its address.
pub(super) fn any_dtype(object: &Bound<'_, PyAny>) -> PyResult<DType> {
    match torch(object.py())?.and_then(|torch| torch.known_dtype(object)) {
        Some(dtype) => Ok(dtype),
        None => Ok(DType::parse_any(&dtype_name(object)?)?),
    }
}

fn dtype_name(object: &Bound<'_, PyAny>) -> PyResult<String> {
    let is_name = object.is_instance_of::<pyo3::types::PyString>();
    if is_name || kind_of(object) == "dtype" {
        Ok(object.str()?.to_string())
    } else if !object.is_none() && numpy_is_loaded(object.py())? {
        object.py().import("numpy")?.call_method1("dtype", (object,))?.getattr("name")?.extract()
    } else {
        Err(PyTypeError::new_err(format!("dtype must be a dtype or its name, not {}", kind_of(object))))
    }
}

/// Converts the argument `cost`, a `PrefillCost`.
pub(super) fn prefill_cost(cost: &Bound<'_, PyAny>) -> PyResult<PrefillCost> {
    let part = |name: &str| cost.getattr_opt(name)?.map(|value| value.extract::<f64>()).transpose();
    match (part("per_token_s")?, part("per_pair_s")?) {
        (Some(per_token_s), Some(per_pair_s)) => Ok(PrefillCost::new(per_token_s, per_pair_s)?),
        _ => Err(PyTypeError::new_err(format!("cost must be a PrefillCost, not {}", kind_of(cost)))),
    }
}
