//! A tensor over a region, which it keeps alive.
//!
//! A view is a few numbers and an `Arc`: cloning it copies no elements.

use std::sync::Arc;

use crate::base::bounded::{signed, unsigned};
use crate::base::{DType, Device, Dims, Error, IndexVec, Life, Result, contiguous_strides};
use crate::memory::{BorrowedTensor, Region};

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
    /// The strides in elements, never negative.
    strides: Dims,
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// The indices selected in one dimension.
///
/// ```
/// use kvpool::base::IndexVec;
/// use kvpool::tensor::{DimIndex, TensorView};
/// let tensor = TensorView::from_indices(IndexVec::I32((0..10).collect()));
/// let odd = tensor.select(&[DimIndex { start: 1, count: Some(3), step: 2 }]).unwrap();
/// assert_eq!((odd.shape().as_slice(), odd.strides().as_slice()), (&[3][..], &[2][..]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DimIndex {
    /// The first index.
    pub start: usize,
    /// The number of indices; `None` to select only the first one and drop the dimension.
    pub count: Option<usize>,
    /// The distance from one index to the next.
    pub step: usize,
}

impl TensorView {
    /// Creates a C-contiguous tensor that begins at byte `offset` of `region`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when it is not within the region.
    pub fn contiguous(region: Arc<Region>, offset: usize, dtype: DType, shape: &[usize]) -> Result<Self> {
        Self::contiguous_with_dims(region, offset, dtype, Dims::of(shape)?)
    }

    /// Works like [`TensorView::contiguous`], with extents already converted.
    ///
    /// # Errors
    /// Same as [`TensorView::contiguous`].
    pub fn contiguous_with_dims(
        region: Arc<Region>,
        offset: usize,
        dtype: DType,
        shape: Dims,
    ) -> Result<Self> {
        let strides = contiguous_strides(&shape);
        region.borrow(offset, dtype, shape, strides)?;
        Ok(Self { region, offset, dtype, shape, strides })
    }

    /// Creates a tensor with `strides`, in elements, that begins at byte `offset` of `region`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when it is not within the region, or a stride is negative.
    pub fn strided(
        region: Arc<Region>,
        offset: usize,
        dtype: DType,
        shape: Dims,
        strides: Dims,
    ) -> Result<Self> {
        region.borrow(offset, dtype, shape, strides)?;
        Ok(Self { region, offset, dtype, shape, strides })
    }

    /// Creates a 1-D tensor on the host that takes over `indices`, in their dtype.
    #[must_use]
    pub fn from_indices(indices: IndexVec) -> Self {
        Self::from_living_indices(indices, None)
    }

    /// Works like [`TensorView::from_indices`], and keeps `life` until the memory is freed.
    pub(crate) fn from_living_indices(indices: IndexVec, life: Option<Life>) -> Self {
        let len = signed(indices.len());
        Self::with_shape(indices, &[len], life)
    }

    /// Creates a 2-D int32 tensor `[pairs.len() / 2, 2]` on the host that takes over `pairs`.
    #[must_use]
    pub fn from_pairs(pairs: Vec<i32>) -> Self {
        let rows = signed(pairs.len() / 2);
        Self::with_shape(IndexVec::I32(pairs), &[rows, 2], None)
    }

    /// Creates a 1-D bool tensor on the host.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate it.
    pub fn from_bools(values: &[bool]) -> Result<Self> {
        Self::contiguous(Arc::new(Region::copy_of(values)?), 0, DType::Bool, &[values.len()])
    }

    /// Views the same bytes as another dtype of the same size.
    ///
    /// # Errors
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when the sizes differ.
    pub fn reinterpret(&self, dtype: DType) -> Result<Self> {
        if dtype.size() != self.dtype.size() {
            return Err(Error::wrong_type(format!("{} cannot be seen as {dtype}", self.dtype)));
        }
        Ok(Self { dtype, ..self.clone() })
    }

    /// Selects `indices` in the first dimensions, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when there are more indices than dimensions, or
    /// one is outside of its dimension.
    pub fn select(&self, indices: &[DimIndex]) -> Result<Self> {
        let (extents, steps) = (self.shape.as_slice(), self.strides.as_slice());
        self.check_dimensions(indices.len())?;
        let (mut shape, mut strides, mut offset) = (Vec::new(), Vec::new(), 0i64);
        for (index, (&extent, &stride)) in indices.iter().zip(extents.iter().zip(steps)) {
            let DimIndex { start, count, step } = *index;
            let (start, last) = (signed(start), count.map_or(0, |count| signed(count) - 1));
            if last >= 0 {
                if start + last * signed(step) >= extent {
                    return Err(Error::index(format!("index {} is outside [0, {extent})", start + last)));
                }
                offset += start * stride;
            }
            if let Some(count) = count {
                shape.push(signed(count));
                // The stride of a single index has no effect, so its step may have any length.
                strides.push(if count > 1 { stride * signed(step) } else { stride });
            }
        }
        shape.extend(&extents[indices.len()..]);
        strides.extend(&steps[indices.len()..]);
        let offset = self.offset + unsigned(offset) * self.dtype.size();
        let (shape, strides) = (Dims::new(&shape)?, Dims::new(&strides)?);
        let offset = if shape.numel() == 0 { self.offset } else { offset };
        self.region.borrow(offset, self.dtype, shape, strides)?;
        Ok(Self { region: Arc::clone(&self.region), offset, dtype: self.dtype, shape, strides })
    }

    /// Checks that the tensor has at least `count` dimensions.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when there are fewer.
    pub fn check_dimensions(&self, count: usize) -> Result<()> {
        let ndim = self.shape.ndim();
        if count <= ndim {
            return Ok(());
        }
        Err(Error::index(format!("{count} indices for a tensor of {ndim} dimensions")))
    }

    /// Returns this tensor at the start of a cache line, which JAX requires of host memory that it does not
    /// copy. A list of indices that begins elsewhere is copied; any other tensor is returned as it is. Call
    /// this only before the tensor is handed out for the first time.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has no room for a copy.
    pub fn cache_aligned(&self) -> Result<Self> {
        if !self.region.is_from_indices() || self.address().addr().is_multiple_of(LINE) {
            return Ok(self.clone());
        }
        Ok(Self { region: Arc::new(self.region.try_clone()?), ..self.clone() })
    }

    /// Makes `life` end with the region. Call this before the tensor is handed out.
    ///
    /// # Panics
    /// If another view has the region.
    pub(crate) fn keep_life(&mut self, life: Life) {
        let region = Arc::get_mut(&mut self.region);
        region.expect("the region was made for this view").keep_life(life);
    }

    /// Returns the number of bytes from element 0 to the end of the farthest one.
    #[must_use]
    pub fn span_bytes(&self) -> usize {
        if self.shape.numel() == 0 {
            return 0;
        }
        let axes = self.shape.as_slice().iter().zip(self.strides.as_slice());
        let last: i64 = axes.map(|(extent, stride)| (extent - 1) * stride).sum();
        (unsigned(last) + 1) * self.dtype.size()
    }

    /// Views the same tensor over a copy of its [span](Self::span_bytes).
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when `region` is shorter than that.
    pub fn over_copy(&self, region: Arc<Region>) -> Result<Self> {
        region.borrow(0, self.dtype, self.shape, self.strides)?;
        Ok(Self { region, offset: 0, ..self.clone() })
    }

    /// Creates a tensor over `values`, which keeps `life`. `shape` has at most `MAX_NDIM` extents, whose product is the length of
    /// `values`.
    fn with_shape(values: IndexVec, shape: &[i64], life: Option<Life>) -> Self {
        let shape = Dims::new(shape).unwrap_or_else(|_| unreachable!("at most two dimensions"));
        let dtype = values.dtype();
        Self {
            region: Arc::new(Region::from_living_indices(values, life)),
            offset: 0,
            dtype,
            shape,
            strides: contiguous_strides(&shape),
        }
    }

    /// Returns whether `other` has the same elements in the same order.
    #[must_use]
    pub fn is_same_view(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.region, &other.region)
            && (self.offset, self.dtype, self.shape, self.strides)
                == (other.offset, other.dtype, other.shape, other.strides)
    }

    /// Returns the region of the elements.
    #[must_use]
    pub const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the number of bytes from the start of the region to element 0.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the device of the memory.
    #[must_use]
    pub fn device(&self) -> Device {
        self.region.device()
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

    /// Returns the address of element 0.
    #[must_use]
    pub fn address(&self) -> *mut u8 {
        self.region.address().as_ptr().wrapping_add(self.offset)
    }

    /// Returns the same tensor, for a call that reads or writes its elements.
    #[expect(clippy::missing_panics_doc, reason = "a view was checked against its region when it was made")]
    #[must_use]
    pub fn borrow(&self) -> BorrowedTensor<'_> {
        let tensor = self.region.borrow(self.offset, self.dtype, self.shape, self.strides);
        tensor.expect("a view lies within its region")
    }
}
