//! A tensor over a region, which it keeps alive.
//!
//! A view is a few numbers and an `Arc`: cloning it copies no elements.

use std::sync::Arc;

use crate::base::bounded::signed;
use crate::base::{DType, Device, Dims, Error, IndexVec, Result, contiguous_strides};
use crate::memory::{Borrowed, Host, Region};

/// A tensor over part of a [`Region`], which it keeps alive.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{DType, IndexVec};
/// use kvpool::memory::Region;
/// use kvpool::tensor::TensorView;
/// let view = TensorView::from_indices(IndexVec::I32(vec![4, 5, 6]));
/// assert_eq!(view.shape().as_slice(), [3]);
/// assert_eq!(view.dtype(), DType::I32);
/// ```
#[derive(Clone, Debug)]
pub struct TensorView {
    region: Arc<Region>,
    /// Bytes from the start of the region to element 0. Every element lies within the region.
    offset: usize,
    dtype: DType,
    shape: Dims,
    /// In elements, never negative.
    strides: Dims,
}

impl TensorView {
    /// A C-contiguous tensor that begins at byte `offset` of `region`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when it is not within the region.
    pub fn contiguous(region: Arc<Region>, offset: usize, dtype: DType, shape: &[usize]) -> Result<Self> {
        Self::packed(region, offset, dtype, Dims::of(shape)?)
    }

    /// Like [`TensorView::contiguous`], with extents already converted.
    ///
    /// # Errors
    /// Same as [`TensorView::contiguous`].
    pub fn packed(region: Arc<Region>, offset: usize, dtype: DType, shape: Dims) -> Result<Self> {
        let strides = contiguous_strides(&shape);
        region.borrow(offset, dtype, shape, strides)?;
        Ok(Self { region, offset, dtype, shape, strides })
    }

    /// A 1-D tensor on the host that takes over `indices`, in their dtype.
    #[must_use]
    pub fn from_indices(indices: IndexVec) -> Self {
        let len = signed(indices.len());
        Self::over(indices, &[len])
    }

    /// A 2-D int32 tensor `[pairs.len() / 2, 2]` on the host that takes over `pairs`.
    #[must_use]
    pub fn from_pairs(pairs: Vec<i32>) -> Self {
        let rows = signed(pairs.len() / 2);
        Self::over(IndexVec::I32(pairs), &[rows, 2])
    }

    /// A 1-D bool tensor on the host.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate it.
    pub fn from_bools(values: &[bool]) -> Result<Self> {
        let region = Arc::new(Region::new(Arc::new(Host), values.len())?);
        region.write(0, values)?;
        Self::contiguous(region, 0, DType::Bool, &[values.len()])
    }

    /// The same bytes as another dtype of the same size.
    ///
    /// # Errors
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when the sizes differ.
    pub fn reinterpret(&self, dtype: DType) -> Result<Self> {
        if dtype.size() != self.dtype.size() {
            return Err(Error::wrong_type(format!("{} cannot be seen as {dtype}", self.dtype)));
        }
        Ok(Self { dtype, ..self.clone() })
    }

    /// `shape` has at most `MAX_NDIM` extents, whose product is the length of `values`.
    fn over(values: IndexVec, shape: &[i64]) -> Self {
        let shape = Dims::new(shape).unwrap_or_else(|_| unreachable!("at most two dimensions"));
        let dtype = values.dtype();
        Self {
            region: Arc::new(Region::from_indices(values)),
            offset: 0,
            dtype,
            shape,
            strides: contiguous_strides(&shape),
        }
    }

    /// Whether `other` has the same elements in the same order.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.region, &other.region)
            && (self.offset, self.dtype, self.shape, self.strides)
                == (other.offset, other.dtype, other.shape, other.strides)
    }

    /// The region of the elements.
    #[must_use]
    pub const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Bytes from the start of the region to element 0.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of the memory.
    #[must_use]
    pub fn device(&self) -> Device {
        self.region.device()
    }

    /// The extents.
    #[must_use]
    pub const fn shape(&self) -> &Dims {
        &self.shape
    }

    /// The strides, in elements.
    #[must_use]
    pub const fn strides(&self) -> &Dims {
        &self.strides
    }

    /// The address of element 0.
    #[must_use]
    pub fn address(&self) -> *mut u8 {
        self.region.address().as_ptr().wrapping_add(self.offset)
    }

    /// The same tensor, for a call that reads or writes its elements.
    #[expect(clippy::missing_panics_doc, reason = "a view was checked against its region when it was made")]
    #[must_use]
    pub fn borrow(&self) -> Borrowed<'_> {
        let tensor = self.region.borrow(self.offset, self.dtype, self.shape, self.strides);
        tensor.expect("a view lies within its region")
    }
}
