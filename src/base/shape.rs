//! Shapes and strides of tensors, stored inline with a bounded rank.

use super::{DType, Error, Result};

/// The highest rank of a tensor that kvpool creates or reads.
pub const MAX_NDIM: usize = 8;

/// Up to [`MAX_NDIM`] extents or strides, in elements and laid out as DLPack expects them.
///
/// ```
/// use kvpool::base::Dims;
/// let shape = Dims::new(&[4, 2, 8]).unwrap();
/// assert_eq!(shape.as_slice(), [4, 2, 8]);
/// assert_eq!(shape.numel(), 64);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Dims {
    /// First field: a pointer to `Dims` is a pointer to its values. Entries from `len` on are 0.
    values: [i64; MAX_NDIM],
    /// The number of dimensions, at most `MAX_NDIM`.
    len: usize,
}

impl Dims {
    /// Copies `values`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](super::ErrorKind::Config) when there are more than [`MAX_NDIM`].
    #[inline]
    pub fn new(values: &[i64]) -> Result<Self> {
        if values.len() > MAX_NDIM {
            return Err(too_many_dimensions_error(values.len()));
        }
        let mut dims = Self { values: [0; MAX_NDIM], len: values.len() };
        // Index tensors have one dimension, rows of tables two, K and V three: they need no call.
        match *values {
            [a] => dims.values[0] = a,
            [a, b] => dims.values[..2].copy_from_slice(&[a, b]),
            [a, b, c] => dims.values[..3].copy_from_slice(&[a, b, c]),
            _ => dims.values[..values.len()].copy_from_slice(values),
        }
        Ok(dims)
    }

    /// Copies `extents`, converted to `i64`.
    ///
    /// # Errors
    /// Same as [`Dims::new`], and [`ErrorKind::Config`](super::ErrorKind::Config) for an extent beyond `i64`.
    pub fn of(extents: &[usize]) -> Result<Self> {
        let mut values = [0; MAX_NDIM];
        for (value, &extent) in values.iter_mut().zip(extents) {
            *value = i64::try_from(extent)
                .map_err(|_| Error::argument(format!("shape {extents:?} is too large for a tensor")))?;
        }
        // Too many extents are reported before an extent that is too large.
        values.get(..extents.len()).map_or_else(|| Self::new(&vec![0; extents.len()]), Self::new)
    }

    /// Returns the values as a slice.
    #[must_use]
    pub fn as_slice(&self) -> &[i64] {
        &self.values[..self.len]
    }

    /// Returns the number of dimensions.
    #[must_use]
    pub const fn ndim(&self) -> usize {
        self.len
    }

    /// Returns the size in bytes of a contiguous tensor with these extents.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](super::ErrorKind::Argument) for a negative extent, or for a size beyond `i64`.
    ///
    /// ```
    /// use kvpool::base::{DType, Dims};
    /// assert_eq!(Dims::new(&[3, 4]).unwrap().bytes(DType::F16).unwrap(), 24);
    /// assert!(Dims::new(&[-1]).unwrap().bytes(DType::F16).is_err());
    /// ```
    pub fn bytes(&self, dtype: DType) -> Result<usize> {
        let shape = self.as_slice();
        let bytes = shape.iter().try_fold(dtype.size(), |bytes, &extent| {
            let bytes = bytes.checked_mul(usize::try_from(extent).ok()?)?;
            i64::try_from(bytes).is_ok().then_some(bytes)
        });
        bytes.ok_or_else(|| too_many_bytes_error(shape, dtype))
    }

    /// Returns the product of the extents: 1 for a scalar. Negative extents count as 0.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.as_slice().iter().map(|&extent| usize::try_from(extent).unwrap_or(0)).product()
    }
}

/// Returns the strides, in elements, of a C-contiguous tensor of `shape`.
///
/// ```
/// use kvpool::base::{Dims, contiguous_strides};
/// let strides = contiguous_strides(&Dims::new(&[4, 2, 8]).unwrap());
/// assert_eq!(strides.as_slice(), [16, 8, 1]);
/// ```
#[must_use]
pub fn contiguous_strides(shape: &Dims) -> Dims {
    let mut strides = *shape;
    let mut step = 1i64;
    for axis in (0..shape.len).rev() {
        strides.values[axis] = step;
        step = step.saturating_mul(shape.values[axis].max(1));
    }
    strides
}

/// Returns the size in bytes of a contiguous tensor of `extents`. An overflow error names the argument
/// `what`.
///
/// # Errors
/// [`ErrorKind::Argument`](super::ErrorKind::Argument) when the size exceeds `i64`.
///
/// ```
/// use kvpool::base::{DType, bytes_of};
/// assert_eq!(bytes_of("k", &[128, 8, 64], DType::BF16).unwrap(), 128 * 8 * 64 * 2);
/// assert!(bytes_of("k", &[usize::MAX, 2], DType::U8).is_err());
/// ```
pub fn bytes_of(what: &str, extents: &[usize], dtype: DType) -> Result<usize> {
    extents
        .iter()
        .try_fold(dtype.size(), |bytes, &extent| bytes.checked_mul(extent))
        .filter(|&bytes| i64::try_from(bytes).is_ok())
        .ok_or_else(|| {
            let product = extents.iter().map(ToString::to_string).collect::<Vec<_>>().join(" x ");
            Error::argument(format!("{what}: {product} x {dtype} is more bytes than an address can name"))
        })
}

#[cold]
fn too_many_bytes_error(shape: &[i64], dtype: DType) -> Error {
    if shape.iter().any(|&extent| extent < 0) {
        return Error::argument(format!("shape {shape:?} has a negative extent"));
    }
    Error::argument(format!("shape {shape:?} of {dtype} is more bytes than an address can name"))
}

#[cold]
fn too_many_dimensions_error(ndim: usize) -> Error {
    Error::argument(format!("a tensor of {ndim} dimensions; at most {MAX_NDIM} are supported"))
}
