//! DLPack: exporting and importing tensors.
//!
//! The structures are those of `dlpack.h` 1.3 (`dmlc/dlpack`), laid out for C. An exported tensor owns its
//! region through the context of the managed tensor; its deleter may run on any thread and touches no Python.
//! Neither direction copies elements or synchronises streams: the caller does.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::base::bounded::int32;
use crate::base::{
    DType, Device, Dims, Error, IndexNumber, IndexVec, Life, MAX_NDIM, Result, contiguous_strides,
    try_with_capacity, widen,
};
use crate::memory::{BorrowedTensor, Region};

use super::TensorView;

/// Name of a legacy capsule that is not consumed yet.
pub const LEGACY: &std::ffi::CStr = c"dltensor";
/// Name of a consumed legacy capsule.
pub const LEGACY_USED: &std::ffi::CStr = c"used_dltensor";
/// Name of a versioned capsule that is not consumed yet.
pub const VERSIONED: &std::ffi::CStr = c"dltensor_versioned";
/// Name of a consumed versioned capsule.
pub const VERSIONED_USED: &std::ffi::CStr = c"used_dltensor_versioned";
/// Name of the capsule that holds an [`ExchangeApi`].
pub const EXCHANGE_API: &std::ffi::CStr = c"dlpack_exchange_api";

/// The version of exported tensors: 1.1 is the first with 8-bit floats.
pub const VERSION: Version = Version { major: 1, minor: 1 };

/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;
/// `DLPACK_FLAG_BITMASK_IS_COPIED`.
const IS_COPIED: u64 = 2;

const I32: RawDType = raw_dtype(DType::I32);
const I64: RawDType = raw_dtype(DType::I64);

const CPU: i32 = 1;
const CUDA: i32 = 2;
/// Page-locked host memory.
const CUDA_HOST: i32 = 3;

/// `DLPackVersion`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Increases when the layout changes.
    pub major: u32,
    /// Increases when something is added.
    pub minor: u32,
}

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawDevice {
    /// `DLDeviceType`.
    pub kind: i32,
    /// Ordinal among devices of this kind.
    pub ordinal: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawDType {
    /// `DLDataTypeCode`.
    pub code: u8,
    /// Bits per element of a lane.
    pub bits: u8,
    /// Elements per vector; 1 for scalars.
    pub lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawTensor {
    /// The address of element 0, less `byte_offset`.
    pub data: *mut c_void,
    /// The device of the data.
    pub device: RawDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// Element type.
    pub dtype: RawDType,
    /// `ndim` extents.
    pub shape: *mut i64,
    /// `ndim` strides in elements; null is allowed for contiguous tensors, but exported tensors always have
    /// them.
    pub strides: *mut i64,
    /// Bytes from `data` to element 0.
    pub byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
#[derive(Debug)]
pub struct Legacy {
    /// The tensor.
    pub tensor: RawTensor,
    /// Private to the producer.
    pub context: *mut c_void,
    /// The last owner calls it once.
    pub deleter: Option<unsafe extern "C" fn(*mut Legacy)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
#[derive(Debug)]
pub struct Versioned {
    /// The DLPack version of this struct.
    pub version: Version,
    /// Private to the producer.
    pub context: *mut c_void,
    /// The last owner calls it once.
    pub deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    /// `DLPACK_FLAG_BITMASK_*`.
    pub flags: u64,
    /// The tensor.
    pub tensor: RawTensor,
}

/// `DLPackExchangeAPI`: creates and reads a framework's tensors without Python calls.
///
/// PyTorch 2.10 and later publish one as `torch.Tensor.__dlpack_c_exchange_api__`. Every function except
/// `current_work_stream` needs the GIL; failures are -1 with a Python exception set.
///
/// ```
/// use std::ptr;
/// use kvpool::tensor::dlpack::{ExchangeApi, Version};
/// let table = ExchangeApi {
///     version: Version { major: 1, minor: 3 }, previous: ptr::null_mut(), allocate: ptr::null(),
///     managed_from_object: ptr::null(), object_from_managed: None, describe_object: None,
///     current_work_stream: None,
/// };
/// assert!(!table.is_usable(), "it has no functions");
/// ```
#[repr(C)]
#[derive(Debug)]
pub struct ExchangeApi {
    /// The DLPack version of this table.
    pub version: Version,
    /// An older table, or null.
    pub previous: *mut c_void,
    /// Allocates a tensor of the framework.
    pub allocate: *const c_void,
    /// Exports an object as an owning managed tensor.
    pub managed_from_object: *const c_void,
    /// Imports a managed tensor, which it takes over, as a new object.
    pub object_from_managed: Option<unsafe extern "C" fn(*mut Versioned, *mut *mut c_void) -> c_int>,
    /// Describes an object's tensor without owning it, until control returns to the framework.
    pub describe_object: Option<unsafe extern "C" fn(*mut c_void, *mut RawTensor) -> c_int>,
    /// The stream on which the framework currently enqueues work.
    pub current_work_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

impl ExchangeApi {
    /// Returns whether this table has the layout and the functions that kvpool uses.
    #[must_use]
    pub const fn is_usable(&self) -> bool {
        self.version.major == 1 && self.object_from_managed.is_some() && self.describe_object.is_some()
    }
}

/// Returns the DLPack code of `dtype`.
#[must_use]
pub const fn raw_dtype(dtype: DType) -> RawDType {
    let (code, bits) = match dtype {
        DType::I8 => (0, 8),
        DType::I32 => (0, 32),
        DType::I64 => (0, 64),
        DType::I16 => (0, 16),
        DType::U8 => (1, 8),
        DType::U16 => (1, 16),
        DType::U32 => (1, 32),
        DType::U64 => (1, 64),
        DType::F16 => (2, 16),
        DType::F32 => (2, 32),
        DType::F64 => (2, 64),
        DType::BF16 => (4, 16),
        DType::Bool => (6, 8),
        DType::F8E4M3 => (10, 8),
        DType::F8E5M2 => (12, 8),
    };
    RawDType { code, bits, lanes: 1 }
}

/// Converts a DLPack dtype.
///
/// # Errors
/// [`ErrorKind::Type`](crate::base::ErrorKind::Type) for dtypes that kvpool neither stores nor reads.
#[inline]
pub fn dtype_of(raw: RawDType) -> Result<DType> {
    // A match instead of a table search, since this runs for every tensor argument.
    let likely = match (raw.code, raw.bits) {
        (0, 8) => DType::I8,
        (0, 32) => DType::I32,
        (0, 64) => DType::I64,
        (0, 16) => DType::I16,
        (1, 8) => DType::U8,
        (1, 16) => DType::U16,
        (1, 32) => DType::U32,
        (1, _) => DType::U64,
        (2, 16) => DType::F16,
        (2, 64) => DType::F64,
        (4, _) => DType::BF16,
        (6, _) => DType::Bool,
        (10, _) => DType::F8E4M3,
        (12, _) => DType::F8E5M2,
        _ => DType::F32,
    };
    if raw_dtype(likely) == raw { Ok(likely) } else { Err(unknown_dtype_error(raw)) }
}

#[cold]
fn unknown_dtype_error(raw: RawDType) -> Error {
    let RawDType { code, bits, lanes } = raw;
    let name = match code {
        0 => format!("int{bits}"),
        1 => format!("uint{bits}"),
        2 => format!("float{bits}"),
        _ => format!("DLPack code {code} of {bits} bits and {lanes} lanes"),
    };
    Error::wrong_type(format!("a tensor of dtype {name} cannot be used here"))
}

/// Converts a device to DLPack.
#[must_use]
pub fn raw_device(device: Device) -> RawDevice {
    match device {
        Device::Cpu => RawDevice { kind: CPU, ordinal: 0 },
        Device::Cuda(ordinal) => RawDevice { kind: CUDA, ordinal: int32(widen(ordinal)) },
    }
}

fn device_of(raw: RawDevice) -> Result<Device> {
    match raw.kind {
        CPU | CUDA_HOST => Ok(Device::Cpu),
        CUDA if raw.ordinal >= 0 => Ok(Device::Cuda(raw.ordinal.cast_unsigned())),
        kind => Err(Error::argument(format!("a tensor on DLPack device type {kind} cannot be used here"))),
    }
}

/// An exported tensor: the managed tensor and the memory behind its pointers.
#[repr(C)]
struct Export<M, D, O> {
    managed: M,
    shape: D,
    strides: D,
    /// The owner of the elements, which keeps them alive until the deleter runs; or the only element.
    owner: O,
}

/// Boxes an export, points its tensor into the box and returns the box as a raw pointer.
fn box_export<M, D, O>(
    managed: M,
    [shape, strides]: [D; 2],
    owner: O,
    tensor_of: impl FnOnce(&mut M) -> &mut RawTensor,
) -> *mut Export<M, D, O> {
    // The tensor is written into the box, not moved there: an export is large, and every tensor that is
    // handed out has one.
    let mut export = Box::new_uninit();
    export.write(Export { managed, shape, strides, owner });
    let export: *mut Export<M, D, O> = Box::into_raw(export).cast();
    // SAFETY: the box was leaked just now, so it is live, and no other code has its address.
    let shape = unsafe { &raw mut (*export).shape };
    // SAFETY: as above.
    let strides = unsafe { &raw mut (*export).strides };
    // SAFETY: as above.
    let tensor = tensor_of(unsafe { &mut (*export).managed });
    // The memory of shape and strides begins with their values.
    tensor.shape = shape.cast();
    tensor.strides = strides.cast();
    export
}

fn raw_tensor(view: &TensorView) -> RawTensor {
    RawTensor {
        data: view.address().cast(),
        device: raw_device(view.device()),
        ndim: int32(view.shape().ndim()),
        dtype: raw_dtype(view.dtype()),
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    }
}

unsafe extern "C" fn delete_versioned<D, O>(managed: *mut Versioned) {
    // SAFETY: the pointer came from `versioned`, and its last owner calls this once.
    let context = unsafe { (*managed).context };
    // SAFETY: the context is the box that `versioned` leaked.
    drop(unsafe { Box::from_raw(context.cast::<Export<Versioned, D, O>>()) });
}

unsafe extern "C" fn delete_legacy(managed: *mut Legacy) {
    // SAFETY: the pointer came from `export_legacy`, and its last owner calls this once.
    let context = unsafe { (*managed).context };
    // SAFETY: the context is the box that `export_legacy` leaked.
    drop(unsafe { Box::from_raw(context.cast::<Export<Legacy, Dims, Arc<Region>>>()) });
}

/// Exports `view` as a versioned managed tensor. Its owner must call the deleter once; until then the memory
/// lives.
///
/// ```
/// use kvpool::base::{DType, Device, IndexVec};
/// use kvpool::tensor::TensorView;
/// use kvpool::tensor::dlpack::{
///     Import, RawDType, RawDevice, RawTensor, Version, Versioned, address_of, dtype_of, export_versioned,
///     first_element, is_view, packed_indices, raw_device, raw_dtype,
/// };
/// let view = TensorView::from_indices(IndexVec::I32(vec![7, 8, 9]));
/// let managed: std::ptr::NonNull<Versioned> = export_versioned(&view);
/// // SAFETY: it was exported just now, and nobody else takes it.
/// let version: Version = unsafe { managed.as_ref() }.version;
/// assert_eq!(version.major, 1);
///
/// // What a framework does with it, here the crate itself.
/// // SAFETY: as above.
/// let import = unsafe { Import::of_versioned(managed) };
/// let raw: RawTensor = import.tensor().unwrap();
/// let (dtype, device): (RawDType, RawDevice) = (raw.dtype, raw.device);
/// assert_eq!((dtype, device), (raw_dtype(DType::I32), raw_device(Device::Cpu)));
/// assert_eq!(dtype_of(dtype).unwrap(), DType::I32);
/// assert_eq!(address_of(first_element(&raw), view.shape()).unwrap().as_ptr(), view.address());
/// // SAFETY: `import` keeps the tensor alive.
/// assert!(unsafe { is_view(&raw, &view) });
/// // SAFETY: as above.
/// assert_eq!(unsafe { packed_indices(&raw) }.unwrap(), Some(IndexVec::I32(vec![7, 8, 9])));
/// ```
#[must_use]
pub fn export_versioned(view: &TensorView) -> NonNull<Versioned> {
    let dims = [*view.shape(), *view.strides()];
    new_versioned(raw_tensor(view), dims, Arc::clone(view.region())).cast()
}

/// An exported 1-D tensor of one index on the host, which is stored in the managed tensor itself. Until it is
/// given away, dropping it frees the tensor.
///
/// ```
/// use kvpool::tensor::dlpack::{Import, IndexExport};
/// let export = IndexExport::new(7_i64);
/// let address = export.address();
/// // SAFETY: it was exported just now, and nobody else takes it.
/// let import = unsafe { Import::of_versioned(export.into_managed()) };
/// assert_eq!(import.borrow().unwrap().address().as_ptr().addr(), address);
/// ```
#[derive(Debug)]
pub struct IndexExport {
    managed: NonNull<Versioned>,
    /// The address of the index.
    address: usize,
    /// The life that ends with the tensor, within the managed tensor.
    life: NonNull<Option<Life>>,
}

// SAFETY: it owns the managed tensor, whose deleter may run on any thread.
unsafe impl Send for IndexExport {}

impl IndexExport {
    /// Exports `index`, as [`export_versioned`] does.
    #[must_use]
    pub fn new<T: IndexNumber>(index: T) -> Self {
        let export = export_index(index);
        let boxed = export.as_ptr();
        // SAFETY: the box was leaked just now, so it is live, and no other code has its address.
        let address = unsafe { &raw const (*boxed).owner.index }.addr();
        // SAFETY: as above.
        let life = NonNull::from(unsafe { &mut (*boxed).owner.life });
        Self { managed: export.cast(), address, life }
    }

    /// Makes `life` end with the tensor.
    #[must_use]
    pub(crate) fn with_life(mut self, life: Life) -> Self {
        // SAFETY: the managed tensor is live until it is given away, and only this has it.
        unsafe { *self.life.as_mut() = Some(life) };
        self
    }

    /// Returns the address of the index.
    #[must_use]
    pub const fn address(&self) -> usize {
        self.address
    }

    /// Gives the managed tensor away: its owner must call the deleter once.
    #[must_use]
    pub fn into_managed(self) -> NonNull<Versioned> {
        std::mem::ManuallyDrop::new(self).managed
    }
}

impl Drop for IndexExport {
    fn drop(&mut self) {
        // SAFETY: the managed tensor was not given away, and an `Import` drops it once.
        drop(unsafe { Import::of_versioned(self.managed) });
    }
}

/// The owner of a single exported index.
struct OneIndex<T> {
    index: T,
    life: Option<Life>,
}

/// Leaks a managed tensor of one index.
fn export_index<T: IndexNumber>(index: T) -> NonNull<Export<Versioned, [i64; 1], OneIndex<T>>> {
    let tensor = RawTensor {
        data: ptr::null_mut(),
        device: raw_device(Device::Cpu),
        ndim: 1,
        dtype: raw_dtype(T::DTYPE),
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    };
    let export = new_versioned(tensor, [[1_i64]; 2], OneIndex { index, life: None });
    let boxed = export.as_ptr();
    // SAFETY: the box was leaked just now, so it is live, and no other code has its address.
    let data = unsafe { &raw mut (*boxed).owner.index };
    // SAFETY: as above.
    unsafe {
        (*boxed).managed.tensor.data = data.cast();
    }
    export
}

/// Leaks a box with a versioned managed tensor, which is `tensor` without its shape and strides.
fn new_versioned<D, O>(tensor: RawTensor, dims: [D; 2], owner: O) -> NonNull<Export<Versioned, D, O>> {
    let managed = Versioned {
        version: VERSION,
        context: ptr::null_mut(),
        deleter: Some(delete_versioned::<D, O>),
        flags: 0,
        tensor,
    };
    let export = box_export(managed, dims, owner, |managed| &mut managed.tensor);
    // SAFETY: the box was leaked just now and no other code has its address; `Export` begins with its managed
    // tensor.
    unsafe {
        (*export).managed.context = export.cast();
    }
    // SAFETY: a box is never null.
    unsafe { NonNull::new_unchecked(export) }
}

/// Exports `view` as a legacy managed tensor, for consumers without versions.
///
/// ```
/// use std::ptr::NonNull;
/// use kvpool::base::IndexVec;
/// use kvpool::tensor::TensorView;
/// use kvpool::tensor::dlpack::{Import, Legacy, export_legacy};
/// let view = TensorView::from_indices(IndexVec::I64(vec![7]));
/// let managed: NonNull<Legacy> = export_legacy(&view);
/// // SAFETY: it was exported just now, and nobody else takes it.
/// let import = unsafe { Import::of_legacy(managed) };
/// assert_eq!(import.borrow().unwrap().shape().as_slice(), [1]);
/// ```
#[must_use]
pub fn export_legacy(view: &TensorView) -> NonNull<Legacy> {
    let managed = Legacy { tensor: raw_tensor(view), context: ptr::null_mut(), deleter: Some(delete_legacy) };
    let dims = [*view.shape(), *view.strides()];
    let export = box_export(managed, dims, Arc::clone(view.region()), |managed| &mut managed.tensor);
    // SAFETY: the box was leaked just now and no other code has its address; `Export` begins with its managed
    // tensor.
    unsafe {
        (*export).managed.context = export.cast();
    }
    // SAFETY: a box is never null.
    unsafe { NonNull::new_unchecked(export.cast()) }
}

/// A managed tensor of another producer, owned until dropped.
#[derive(Debug)]
pub struct Import(Managed);

/// A managed tensor.
#[derive(Debug)]
enum Managed {
    /// A tensor with a DLPack version.
    Versioned(NonNull<Versioned>),
    /// A tensor without a version.
    Legacy(NonNull<Legacy>),
}

impl Import {
    /// Takes a managed tensor with a version.
    ///
    /// # Safety
    /// It is a managed tensor as DLPack defines it, of any version, whose owner gives it up.
    #[must_use]
    pub const unsafe fn of_versioned(managed: NonNull<Versioned>) -> Self {
        Self(Managed::Versioned(managed))
    }

    /// Takes a managed tensor without a version.
    ///
    /// # Safety
    /// See [`Import::of_versioned`].
    #[must_use]
    pub const unsafe fn of_legacy(managed: NonNull<Legacy>) -> Self {
        Self(Managed::Legacy(managed))
    }

    /// Returns whether the producer allows writes, and they reach its memory.
    ///
    /// # Errors
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) for another major version.
    pub fn is_writable(&self) -> Result<bool> {
        match &self.0 {
            Managed::Versioned(managed) => Ok(known_version(managed)?.flags & (READ_ONLY | IS_COPIED) == 0),
            Managed::Legacy(_) => Ok(true),
        }
    }

    /// Returns the tensor that it describes.
    ///
    /// # Errors
    /// Same as [`borrow`], and [`ErrorKind::Type`](crate::base::ErrorKind::Type) for another major version.
    pub fn borrow(&self) -> Result<BorrowedTensor<'_>> {
        let tensor = self.tensor()?;
        // SAFETY: we own the managed tensor, so its memory is valid for as long as `self`.
        unsafe { borrow(&tensor, PhantomData) }
    }

    /// Returns a copy of the description, whose shape and strides are valid for as long as `self`.
    ///
    /// # Errors
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) for another major version.
    pub fn tensor(&self) -> Result<RawTensor> {
        match &self.0 {
            Managed::Versioned(managed) => Ok(known_version(managed)?.tensor),
            // SAFETY: we own the managed tensor.
            Managed::Legacy(managed) => Ok(unsafe { managed.as_ref() }.tensor),
        }
    }
}

/// Returns the fields of a managed tensor of an [`Import`], if its version is known.
fn known_version(managed: &NonNull<Versioned>) -> Result<&Versioned> {
    // SAFETY: the import owns the managed tensor, and the version is the first field in every major version.
    let managed = unsafe { managed.as_ref() };
    if managed.version.major == VERSION.major {
        return Ok(managed);
    }
    let Version { major, minor } = managed.version;
    Err(Error::wrong_type(format!(
        "a DLPack tensor of version {major}.{minor} cannot be read; known is {}",
        VERSION.major
    )))
}

impl Drop for Import {
    fn drop(&mut self) {
        match self.0 {
            Managed::Versioned(managed) => {
                // SAFETY: we own the managed tensor.
                if let Some(deleter) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: this is the drop of its last owner.
                    unsafe { deleter(managed.as_ptr()) };
                }
            }
            Managed::Legacy(managed) => {
                // SAFETY: we own the managed tensor.
                if let Some(deleter) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: this is the drop of its last owner.
                    unsafe { deleter(managed.as_ptr()) };
                }
            }
        }
    }
}

/// Returns the tensor that a `DLTensor` describes. It is generic over the error, so that converting an error
/// does not copy the tensor.
///
/// # Errors
/// [`ErrorKind::Type`] or [`ErrorKind::Argument`]
/// for dtypes, devices and ranks that kvpool does not read, and for an invalid shape.
///
/// # Safety
/// For `'a`, `raw` describes a tensor as DLPack defines it, and its memory stays alive.
///
/// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
/// [`ErrorKind::Type`]: crate::base::ErrorKind::Type
pub unsafe fn borrow<'a, E: From<Error>>(
    raw: &RawTensor,
    _owner: PhantomData<&'a ()>,
) -> std::result::Result<BorrowedTensor<'a>, E> {
    let dtype = dtype_of(raw.dtype)?;
    let device = device_of(raw.device)?;
    let ndim = match usize::try_from(raw.ndim) {
        Ok(ndim) if ndim <= MAX_NDIM => ndim,
        _ => return Err(too_many_dimensions_error(raw.ndim).into()),
    };
    let shape = if ndim == 0 {
        Dims::new(&[])?
    } else if raw.shape.is_null() {
        return Err(without_shape(ndim).into());
    } else {
        // SAFETY: DLPack guarantees `ndim` extents, and the pointer is not null.
        Dims::new(unsafe { std::slice::from_raw_parts(raw.shape, ndim) })?
    };
    // Fails for sizes that overflow, so that later computations of elements and bytes cannot.
    shape.bytes(dtype)?;
    let strides = if ndim == 0 || raw.strides.is_null() {
        contiguous_strides(&shape)
    } else {
        // SAFETY: DLPack guarantees `ndim` strides where the pointer is not null.
        Dims::new(unsafe { std::slice::from_raw_parts(raw.strides, ndim) })?
    };
    let address = if raw.data.is_null() { ptr::null_mut() } else { first_element(raw) };
    let address = address_of(address, &shape)?;
    // SAFETY: the caller guarantees that `raw` describes live memory for 'a.
    Ok(unsafe { BorrowedTensor::new(address, dtype, device, shape, strides) })
}

/// Copies the indices of a contiguous 1-D tensor of int32 or int64 in host memory. Returns `None` for all other
/// tensors, which [`borrow`] describes.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has no memory for the copy.
///
/// # Safety
/// Same as [`borrow`].
pub unsafe fn packed_indices(raw: &RawTensor) -> Result<Option<IndexVec>> {
    let is_on_host = matches!(raw.device.kind, CPU | CUDA_HOST);
    if !is_on_host || raw.ndim != 1 || raw.shape.is_null() || raw.data.is_null() {
        return Ok(None);
    }
    // SAFETY: DLPack guarantees as many extents as there are dimensions.
    let Ok(count) = usize::try_from(unsafe { *raw.shape }) else { return Ok(None) };
    // SAFETY: and as many strides, where the pointer is not null.
    let is_packed = count == 1 || raw.strides.is_null() || unsafe { *raw.strides } == 1;
    if !is_packed {
        return Ok(None);
    }
    let first = first_element(raw).cast_const();
    match raw.dtype {
        // SAFETY: the tensor has that many elements of this type, one after the other.
        I32 => unsafe { copied(first, count) }.map(|values| Some(IndexVec::I32(values))),
        // SAFETY: as above.
        I64 => unsafe { copied(first, count) }.map(|values| Some(IndexVec::I64(values))),
        _ => Ok(None),
    }
}

/// Copies `count` integers, which may be unaligned.
///
/// # Safety
/// They are readable, and any bytes make a `T`.
unsafe fn copied<T: IndexNumber>(first: *const u8, count: usize) -> Result<Vec<T>> {
    if count == 1 {
        // SAFETY: the caller guarantees the element.
        return Ok(vec![unsafe { first.cast::<T>().read_unaligned() }]);
    }
    let mut values: Vec<T> = try_with_capacity(count)?;
    // SAFETY: the vector is ours and has room for them; the caller guarantees the rest.
    unsafe { values.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(first, count * size_of::<T>()) };
    // SAFETY: that many were just written.
    unsafe { values.set_len(count) };
    Ok(values)
}

#[cold]
fn without_shape(ndim: usize) -> Error {
    Error::argument(format!("a tensor of {ndim} dimensions without a shape"))
}

#[cold]
fn too_many_dimensions_error(ndim: i32) -> Error {
    Error::argument(format!("a tensor of {ndim} dimensions; at most {MAX_NDIM} are supported"))
}

/// Returns the address of element 0 of a tensor.
///
/// # Panics
/// If the offset of a description is beyond the address space.
#[inline]
#[must_use]
pub fn first_element(raw: &RawTensor) -> *mut u8 {
    let offset = usize::try_from(raw.byte_offset).expect("an address has 64 bits");
    raw.data.cast::<u8>().wrapping_add(offset)
}

/// Returns whether a `DLTensor` describes the same elements as `view`, in the same shape.
///
/// # Safety
/// Same as [`borrow`].
#[must_use]
pub unsafe fn is_view(raw: &RawTensor, view: &TensorView) -> bool {
    let (shape, strides) = (view.shape().as_slice(), view.strides().as_slice());
    let is_alike = first_element(raw) == view.address()
        && raw.dtype == raw_dtype(view.dtype())
        && usize::try_from(raw.ndim) == Ok(shape.len())
        && raw.device == raw_device(view.device());
    if !is_alike || shape.is_empty() || raw.shape.is_null() {
        return is_alike && shape.is_empty();
    }
    // SAFETY: DLPack guarantees as many extents as there are dimensions.
    let extents = unsafe { std::slice::from_raw_parts(raw.shape, shape.len()) };
    if raw.strides.is_null() {
        return extents == shape && contiguous_strides(view.shape()) == *view.strides();
    }
    // SAFETY: DLPack guarantees as many strides as there are dimensions where the pointer is not null.
    let steps = unsafe { std::slice::from_raw_parts(raw.strides, shape.len()) };
    extents == shape && steps == strides
}

/// Returns the address of a tensor's elements. An empty tensor may have none, since it is never dereferenced.
///
/// # Errors
/// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) when there are elements but no address, as for
/// tensors whose storage was freed or never allocated.
pub fn address_of(data: *mut u8, shape: &Dims) -> Result<NonNull<u8>> {
    match NonNull::new(data) {
        Some(address) => Ok(address),
        None if shape.numel() == 0 => Ok(NonNull::dangling()),
        None => Err(Error::argument(format!("a tensor of shape {:?} without memory", shape.as_slice()))),
    }
}
