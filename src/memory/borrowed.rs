//! Tensors of other owners, borrowed for the length of a call.
//!
//! A borrow owns nothing and is valid for its lifetime only. Use [`Region`](super::Region) to own memory.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::base::bounded::signed;
use crate::base::{DType, Device, Dims, Error, Result};

use super::stream_set::with_streams_at;
use super::{Stream, StreamSet};

/// A tensor that its owner keeps alive for `'a`: address, dtype, device, shape and strides (in elements).
///
/// Other threads and devices may write the memory at any time, so it is accessed through raw copies only.
///
/// ```
/// use kvpool::base::{DType, Device, Dims};
/// use kvpool::memory::BorrowedTensor;
/// let mut values = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0];
/// let address = std::ptr::NonNull::from(&mut values).cast();
/// let (shape, strides) = (Dims::new(&[2, 3]).unwrap(), Dims::new(&[3, 1]).unwrap());
/// // SAFETY: the six elements live longer than the tensor.
/// let tensor = unsafe { BorrowedTensor::new(address, DType::F32, Device::Cpu, shape, strides) };
/// assert!(tensor.is_contiguous());
/// assert!(tensor.check_on(Device::Cuda(0), "k").is_err());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct BorrowedTensor<'a> {
    address: NonNull<u8>,
    dtype: DType,
    device: Device,
    shape: Dims,
    strides: Dims,
    owner: PhantomData<&'a ()>,
}

// SAFETY: it is an address and numbers; the kernels that follow the address are responsible for races,
// and they treat the memory as shared.
unsafe impl Send for BorrowedTensor<'_> {}
// SAFETY: as above.
unsafe impl Sync for BorrowedTensor<'_> {}

impl BorrowedTensor<'_> {
    /// Creates a tensor at `address`.
    ///
    /// # Safety
    /// For `'a`, every element that `shape` and `strides` reach from `address` is valid memory of `device`
    /// for reads, and for writes where the caller passes the tensor as a target.
    #[must_use]
    pub const unsafe fn new(
        address: NonNull<u8>,
        dtype: DType,
        device: Device,
        shape: Dims,
        strides: Dims,
    ) -> Self {
        Self { address, dtype, device, shape, strides, owner: PhantomData }
    }

    /// Returns the address of element 0.
    #[must_use]
    pub const fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Returns the element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the device of the memory.
    #[must_use]
    pub const fn device(&self) -> Device {
        self.device
    }

    /// Returns the extents.
    #[must_use]
    pub const fn shape(&self) -> &Dims {
        &self.shape
    }

    /// Returns the strides, in elements.
    #[must_use]
    pub const fn strides(&self) -> &Dims {
        &self.strides
    }

    /// Returns the number of elements from one to the next, if they are evenly spaced.
    #[must_use]
    pub fn even_step(&self) -> Option<usize> {
        if self.is_contiguous() {
            return Some(1);
        }
        let axes = self.shape().as_slice().iter().zip(self.strides().as_slice());
        let mut long = axes.filter(|(extent, _)| **extent != 1).map(|(_, stride)| *stride);
        match (long.next(), long.next()) {
            (Some(stride), None) => usize::try_from(stride).ok(),
            _ => None,
        }
    }

    /// Returns whether the elements are contiguous, last dimension fastest.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        let mut packed = 1i64;
        let mut axes = self.shape.as_slice().iter().zip(self.strides.as_slice()).rev();
        axes.all(|(&extent, &stride)| {
            let is_packed = extent == 1 || stride == packed;
            packed = packed.saturating_mul(extent);
            is_packed
        }) || self.shape.numel() == 0
    }

    /// Returns the tensor's only element, repeated `count` times. `None` unless it has exactly one element.
    #[must_use]
    pub fn expanded(&self, count: usize) -> Option<Self> {
        let extent = i64::try_from(count).ok()?;
        let (shape, strides) = (Dims::new(&[extent]).ok()?, Dims::new(&[0]).ok()?);
        (self.shape.numel() == 1).then_some(Self { shape, strides, ..*self })
    }

    /// Returns elements of a contiguous tensor in row-major order, in one dimension.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a tensor with gaps,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for elements that it does not have.
    ///
    /// ```
    /// use kvpool::base::{DType, Dims, ErrorKind, IndexVec};
    /// use kvpool::kernels::read_indices;
    /// use kvpool::memory::Region;
    /// let region = Region::copy_of(&[3i32, 4, 5, 6]).unwrap();
    /// let [four, two, one] = [4, 2, 1].map(|extent| Dims::of(&[extent]).unwrap());
    /// let tensor = region.borrow(0, DType::I32, four, one).unwrap();
    /// assert_eq!(read_indices(&tensor.elements(1..3).unwrap()).unwrap(), IndexVec::I32(vec![4, 5]));
    /// assert!(tensor.elements(4..4).is_ok());
    /// assert_eq!(tensor.elements(3..5).unwrap_err().kind(), ErrorKind::Index);
    /// let gaps = region.borrow(0, DType::I32, two, two).unwrap();
    /// assert_eq!(gaps.elements(0..1).unwrap_err().kind(), ErrorKind::Argument);
    /// ```
    pub fn elements(&self, range: Range<usize>) -> Result<Self> {
        let (count, strides) = (self.shape.numel(), Dims::new(&[1])?);
        if !self.is_contiguous() {
            return Err(Error::argument("only elements of a contiguous tensor lie in a row"));
        }
        if range.start > range.end || range.end > count {
            return Err(Error::index(format!("elements {range:?} are outside a tensor of {count}")));
        }
        // SAFETY: the elements of the tensor are one block, and the first of the range is in it or at its end.
        let address = unsafe { self.address.add(range.start * self.dtype.size()) };
        Ok(Self { address, shape: Dims::of(&[range.len()])?, strides, ..*self })
    }

    /// Returns the elements 0, `step`, 2 * `step`, ... in row-major order, in one dimension.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a tensor of more dimensions that is not
    /// contiguous.
    pub fn step_by(&self, step: usize) -> Result<Self> {
        let stride = match (self.strides.as_slice(), self.is_contiguous()) {
            (_, true) => 1,
            (&[stride], false) => stride,
            (strides, false) => {
                return Err(Error::argument(format!(
                    "slots {step} apart cannot be read from a tensor with strides {strides:?}; pass one dimension"
                )));
            }
        };
        let (count, step) = (self.shape.numel().div_ceil(step), signed(step));
        let strides = Dims::new(&[stride.checked_mul(step).filter(|_| count > 1).unwrap_or(1)])?;
        Ok(Self { shape: Dims::new(&[signed(count)])?, strides, ..*self })
    }

    /// Records that work on `stream` uses the memory, once it is enqueued: see [`StreamSet::record`]. From then on the
    /// memory is freed, and slots of an allocator are written again, only after that work, even if the owner drops
    /// the tensor before. Has no effect on memory that devices cannot access or that no backend allocated.
    pub fn record_stream(&self, stream: Stream) {
        with_streams_at(self.address.as_ptr().addr(), |users| users.record(stream));
    }

    /// Returns the streams that use its memory, if devices can access it and a backend allocated it.
    #[must_use]
    pub fn users(&self) -> Option<Arc<StreamSet>> {
        with_streams_at(self.address.as_ptr().addr(), Arc::clone)
    }

    /// Checks that the tensor is on `device`, the device of the pool.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) with both devices.
    pub fn check_on(&self, device: Device, what: &str) -> Result<()> {
        if self.device == device {
            return Ok(());
        }
        Err(Error::argument(format!("{what} is on {}, the pool on {device}", self.device)))
    }
}
