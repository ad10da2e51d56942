//! Index tensors: where their values are, and how the host reads them.
//!
//! Values from the host are copied once and checked against an [`IndexSpace`]. Values on a device stay there:
//! kernels check them.

use crate::base::bounded::{distance, signed, unsigned};
use crate::base::{DType, Device, Error, IndexVec, Result, try_with_capacity};
use crate::memory::BorrowedTensor;

/// An index space: the name of its indices and their bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexSpace {
    /// The name of one index in messages.
    pub noun: &'static str,
    /// The number of indices: valid ones are below it.
    pub len: usize,
}

impl IndexSpace {
    /// Checks that the values belong to the space, and converts them.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) with the first value outside of it.
    #[inline]
    pub fn check(self, values: &IndexVec) -> Result<Vec<u32>> {
        values.below(self.len, self.noun)
    }
}

/// The index spaces of a memory's rows and of their columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexSpaces {
    /// The space of rows, or of slots.
    pub rows: IndexSpace,
    /// The space of columns, for a table.
    pub columns: IndexSpace,
}

impl IndexSpaces {
    /// Returns the spaces of a memory without columns.
    #[must_use]
    pub const fn of_rows(rows: IndexSpace) -> Self {
        Self { rows, columns: IndexSpace { noun: "column", len: 0 } }
    }
}

/// Index values of a call: copied on the host, or still on a device.
#[derive(Clone, Debug)]
pub enum Indices<'a> {
    /// Copied on the host.
    Host(IndexVec),
    /// The values are on a device, int32 or int64. The host may know them or not.
    Device {
        /// The tensor.
        tensor: BorrowedTensor<'a>,
        /// The number of times that its framework has written to the tensor; `None` when the framework does
        /// not count.
        version: Option<u64>,
    },
}

impl<'a> Indices<'a> {
    /// Returns the values of an index tensor on any device, with its framework's count of writes.
    ///
    /// # Errors
    /// Same as [`read_indices`], except that any device is allowed.
    pub fn of(tensor: BorrowedTensor<'a>, version: Option<u64>) -> Result<Self> {
        if tensor.device() == Device::Cpu {
            return read_indices(&tensor).map(Self::Host);
        }
        check_ints(tensor.dtype())?;
        Ok(Self::Device { tensor, version })
    }

    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Device { tensor, .. } => tensor.shape().numel(),
        }
    }

    /// Returns whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the values, for a pool in host memory.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) when they are on a device.
    pub fn host_values(&self) -> Result<&IndexVec> {
        match self {
            Self::Host(values) => Ok(values),
            Self::Device { tensor, .. } => {
                Err(Error::argument(format!("the index tensor is on {}, the pool on cpu", tensor.device())))
            }
        }
    }

    /// Returns the values from the host, checked against `space`; empty for a device tensor.
    ///
    /// # Errors
    /// Same as [`IndexSpace::check`].
    pub fn list(&self, space: IndexSpace) -> Result<Vec<i32>> {
        match self {
            Self::Host(values) => Ok(space.check(values)?.into_iter().map(u32::cast_signed).collect()),
            Self::Device { .. } => Ok(Vec::new()),
        }
    }

    /// Returns the values as kernel parameters; `list` holds those from the host.
    #[must_use]
    pub const fn numbers<'b>(&'b self, list: &'b [i32]) -> Numbers<'b> {
        match self {
            Self::Host(_) => Numbers::List(list),
            Self::Device { tensor, .. } => Numbers::Tensor(tensor),
        }
    }
}

/// A batch of numbers, on either side or computed.
#[derive(Clone, Copy, Debug)]
pub enum Numbers<'a> {
    /// The numbers are on the host.
    List(&'a [i32]),
    /// The numbers are on the device: int32 or int64, of any shape and stride.
    Tensor(&'a BorrowedTensor<'a>),
    /// The same number for every element.
    Constant(i64),
    /// This number for the first element, and one more for each further element.
    Arange(i64),
}

/// Returns the error for an argument that is not an index; `found` is a dtype or the type of an object.
#[cold]
#[must_use]
pub(crate) fn not_indices_error(found: &str) -> Error {
    Error::wrong_type(format!(
        "indices must be int16, uint16, int32, uint32, int64 or uint64 in a tensor, an array or a series, or a \
         sequence of ints, not {found}"
    ))
}

/// Checks that kernels can read indices of `dtype`.
///
/// # Errors
/// [`ErrorKind::Type`](crate::base::ErrorKind::Type) unless it is int32 or int64.
pub(crate) fn check_ints(dtype: DType) -> Result<()> {
    if matches!(dtype, DType::I32 | DType::I64) {
        return Ok(());
    }
    Err(not_indices_error(&format!("{dtype} on a GPU, where int32 and int64 are read")))
}

/// Copies the values of an index tensor in host memory, of any shape and stride, in row-major order. Integers
/// of 8 bits are not indices: they are bytes or, in PyTorch's indexing, masks.
///
/// # Errors
/// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when it has no integers of 16 bits or more,
/// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) when it is not in host memory,
/// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the copy cannot be allocated.
///
/// ```
/// use kvpool::base::IndexVec;
/// use kvpool::kernels::read_indices;
/// use kvpool::tensor::TensorView;
/// let tensor = TensorView::from_indices(IndexVec::I32(vec![7, 8]));
/// assert_eq!(read_indices(&tensor.borrow()).unwrap(), IndexVec::I32(vec![7, 8]));
/// ```
pub fn read_indices(tensor: &BorrowedTensor<'_>) -> Result<IndexVec> {
    tensor.check_on(Device::Cpu, "the index tensor")?;
    match tensor.dtype() {
        DType::I32 => Ok(IndexVec::I32(read(tensor)?)),
        DType::I64 => Ok(IndexVec::I64(read(tensor)?)),
        DType::I16 => widened(tensor, |value: i16| value.into()),
        DType::U16 => widened(tensor, |value: u16| value.into()),
        DType::U32 => widened(tensor, |value: u32| value.into()),
        // A number beyond 63 bits is outside every range, so the largest int64 is used for it.
        DType::U64 => widened(tensor, |value: u64| i64::try_from(value).unwrap_or(i64::MAX)),
        other => Err(not_indices_error(other.name())),
    }
}

/// Copies the elements, whose type is `T`, as int64.
fn widened<T: Copy>(tensor: &BorrowedTensor<'_>, widen: impl Fn(T) -> i64) -> Result<IndexVec> {
    let narrow: Vec<T> = read(tensor)?;
    let mut values = try_with_capacity(narrow.len())?;
    values.extend(narrow.into_iter().map(widen));
    Ok(IndexVec::I64(values))
}

/// Copies the elements, whose type is `T`.
pub(super) fn read<T: Copy>(tensor: &BorrowedTensor<'_>) -> Result<Vec<T>> {
    let count = tensor.shape().numel();
    let source: *const T = tensor.address().as_ptr().cast_const().cast();
    let mut values: Vec<T> = try_with_capacity(count)?;
    if tensor.is_contiguous() {
        let target: *mut u8 = values.as_mut_ptr().cast();
        // SAFETY: `BorrowedTensor` guarantees `count` readable elements; the vector is ours and has room for
        // them. Foreign elements may be unaligned, so bytes are copied.
        unsafe { target.copy_from_nonoverlapping(source.cast(), count * size_of::<T>()) };
        // SAFETY: that many were just written, and any bytes make an integer.
        unsafe { values.set_len(count) };
        return Ok(values);
    }
    let (shape, strides) = (tensor.shape().as_slice(), tensor.strides().as_slice());
    values.extend((0..count).map(|position| {
        let element = source.wrapping_offset(offset_of(position, shape, strides));
        // SAFETY: `position` is below `numel`, so `BorrowedTensor` guarantees the element; it may be
        // unaligned.
        unsafe { element.read_unaligned() }
    }));
    Ok(values)
}

/// Returns the offset, in elements, of element number `position` in row-major order.
pub(super) fn offset_of(position: usize, shape: &[i64], strides: &[i64]) -> isize {
    let mut left = position;
    let mut offset = 0i64;
    for (&extent, &stride) in shape.iter().zip(strides).rev() {
        let extent = unsigned(extent);
        let (rest, index) = (left / extent, left % extent);
        offset = offset.wrapping_add(signed(index).wrapping_mul(stride));
        left = rest;
    }
    distance(offset)
}
