//! Reading index tensors.

use std::ptr::NonNull;

use crate::base::{DType, Error, IndexVec, Result, widen};
use crate::memory::Borrowed;

/// The values of an index tensor in host memory, of any shape and stride, in row-major order, copied.
///
/// # Errors
/// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when it is neither int32 nor int64,
/// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when it is not in host memory.
pub fn read_indices(tensor: &Borrowed<'_>) -> Result<IndexVec> {
    tensor.expect_host("the index tensor")?;
    match tensor.dtype() {
        DType::I32 => Ok(IndexVec::I32(read(tensor))),
        DType::I64 => Ok(IndexVec::I64(read(tensor))),
        other => Err(Error::wrong_type(format!("indices must be int32 or int64, not {other}"))),
    }
}

/// Copies the elements, which are of type `T`.
fn read<T: Copy + Default>(tensor: &Borrowed<'_>) -> Vec<T> {
    let mut values = vec![T::default(); tensor.shape().numel()];
    let source: NonNull<T> = tensor.address().cast();
    if tensor.is_contiguous() {
        // SAFETY: `Borrowed` promises `numel` readable elements; the vector is ours and as long. Elements may be
        // unaligned in foreign memory, so bytes are copied.
        unsafe {
            values
                .as_mut_ptr()
                .cast::<u8>()
                .copy_from_nonoverlapping(source.as_ptr().cast(), size_of_val(&*values));
        }
        return values;
    }
    let (shape, strides) = (tensor.shape().as_slice(), tensor.strides().as_slice());
    for (position, value) in values.iter_mut().enumerate() {
        let offset = offset_of(position, shape, strides);
        // SAFETY: `position` is below `numel`, so `offset` is an element that `Borrowed` promises.
        let element = unsafe { source.as_ptr().offset(offset) };
        // SAFETY: as above; foreign elements may be unaligned.
        *value = unsafe { element.read_unaligned() };
    }
    values
}

/// The offset, in elements, of element number `position` in row-major order.
pub(super) fn offset_of(position: usize, shape: &[i64], strides: &[i64]) -> isize {
    let mut left = position;
    let mut offset = 0i64;
    for (&extent, &stride) in shape.iter().zip(strides).rev() {
        let extent = u32::try_from(extent).map_or(usize::MAX, widen);
        let (rest, index) = (left / extent, left % extent);
        offset += i64::try_from(index).unwrap_or(0) * stride;
        left = rest;
    }
    isize::try_from(offset).unwrap_or(0)
}
