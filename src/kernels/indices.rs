//! Reading index tensors.

use crate::base::bounded::{distance, signed, unsigned};
use crate::base::{DType, Device, Error, IndexVec, Result, reserve};
use crate::memory::Borrowed;

/// What indices name, and what they must be below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexSpace {
    /// What one is called in messages.
    pub noun: &'static str,
    /// How many there are.
    pub len: usize,
}

impl IndexSpace {
    /// The values, each of which names one.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) with the first that names none.
    #[inline]
    pub fn check(self, values: &IndexVec) -> Result<Vec<u32>> {
        values.rows(self.noun, self.len)
    }
}

/// Index values as a call gets them: copied from the host, or where they are on a device.
#[derive(Clone, Debug)]
pub enum Indices<'a> {
    /// On the host.
    Host(IndexVec),
    /// On a device, int32 or int64: known to kernels, and perhaps to the host.
    Device {
        /// Where they are.
        tensor: Borrowed<'a>,
        /// How often its framework says that it wrote to the tensor; `None` where nobody counts.
        version: Option<u64>,
    },
}

impl<'a> Indices<'a> {
    /// An index tensor, wherever it is, and its framework's count of writes to it.
    ///
    /// # Errors
    /// As [`read_indices`], but for the device.
    pub fn of(tensor: Borrowed<'a>, version: Option<u64>) -> Result<Self> {
        if tensor.device() == Device::Cpu {
            return read_indices(&tensor).map(Self::Host);
        }
        expect_ints(tensor.dtype())?;
        Ok(Self::Device { tensor, version })
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Device { tensor, .. } => tensor.shape().numel(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values, for a pool in host memory.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when they are on a device.
    pub fn on_host(&self) -> Result<&IndexVec> {
        match self {
            Self::Host(values) => Ok(values),
            Self::Device { tensor, .. } => {
                Err(Error::config(format!("the index tensor is on {}, the pool on cpu", tensor.device())))
            }
        }
    }

    /// Those of the host, each of which names one of `space`; none if only the device knows them.
    ///
    /// # Errors
    /// As [`IndexSpace::check`].
    pub fn list(&self, space: IndexSpace) -> Result<Vec<i32>> {
        match self {
            Self::Host(values) => Ok(space.check(values)?.into_iter().map(u32::cast_signed).collect()),
            Self::Device { .. } => Ok(Vec::new()),
        }
    }

    /// As kernels take them; `list` stands for those of the host.
    #[must_use]
    pub const fn numbers<'b>(&'b self, list: &'b [i32]) -> Numbers<'b> {
        match self {
            Self::Host(_) => Numbers::List(list),
            Self::Device { tensor, .. } => Numbers::Tensor(tensor),
        }
    }
}

/// The numbers of a batch, wherever they are.
#[derive(Clone, Copy, Debug)]
pub enum Numbers<'a> {
    /// On the host.
    List(&'a [i32]),
    /// On the device: int32 or int64, of any shape and stride.
    Tensor(&'a Borrowed<'a>),
    /// The same for all.
    Same(i64),
    /// This, and one more each.
    From(i64),
}

/// Checks that indices are int32 or int64.
///
/// # Errors
/// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when they are not.
pub fn expect_ints(dtype: DType) -> Result<()> {
    if matches!(dtype, DType::I32 | DType::I64) {
        return Ok(());
    }
    Err(Error::wrong_type(format!("indices must be int32 or int64, not {dtype}")))
}

/// The values of an index tensor in host memory, of any shape and stride, in row-major order, copied.
///
/// # Errors
/// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when it is neither int32 nor int64,
/// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when it is not in host memory,
/// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when there is no room for a copy.
pub fn read_indices(tensor: &Borrowed<'_>) -> Result<IndexVec> {
    tensor.expect_on(Device::Cpu, "the index tensor")?;
    expect_ints(tensor.dtype())?;
    match tensor.dtype() {
        DType::I32 => Ok(IndexVec::I32(read(tensor)?)),
        _ => Ok(IndexVec::I64(read(tensor)?)),
    }
}

/// Copies the elements, which are of type `T`.
fn read<T: Copy>(tensor: &Borrowed<'_>) -> Result<Vec<T>> {
    let count = tensor.shape().numel();
    let source: *const T = tensor.address().as_ptr().cast_const().cast();
    let mut values: Vec<T> = reserve(count)?;
    if tensor.is_contiguous() {
        let target: *mut u8 = values.as_mut_ptr().cast();
        // SAFETY: `Borrowed` promises `count` readable elements; the vector is ours and has room for them. Foreign
        // elements may be unaligned, so bytes are copied.
        unsafe { target.copy_from_nonoverlapping(source.cast(), count * size_of::<T>()) };
        // SAFETY: so many were just written, and any bytes make an integer.
        unsafe { values.set_len(count) };
        return Ok(values);
    }
    let (shape, strides) = (tensor.shape().as_slice(), tensor.strides().as_slice());
    values.extend((0..count).map(|position| {
        let element = source.wrapping_offset(offset_of(position, shape, strides));
        // SAFETY: `position` is below `numel`, so it is an element that `Borrowed` promises; it may be unaligned.
        unsafe { element.read_unaligned() }
    }));
    Ok(values)
}

/// The offset, in elements, of element number `position` in row-major order.
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
