//! Reading index tensors.

use crate::base::{DType, Error, IndexVec, Result, reserve};
use crate::memory::Borrowed;

/// The values of an index tensor in host memory, of any shape and stride, in row-major order, copied.
///
/// # Errors
/// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when it is neither int32 nor int64,
/// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when it is not in host memory,
/// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when there is no room for a copy.
pub fn read_indices(tensor: &Borrowed<'_>) -> Result<IndexVec> {
    tensor.expect_host("the index tensor")?;
    match tensor.dtype() {
        DType::I32 => Ok(IndexVec::I32(read(tensor)?)),
        DType::I64 => Ok(IndexVec::I64(read(tensor)?)),
        other => Err(Error::wrong_type(format!("indices must be int32 or int64, not {other}"))),
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
        let extent = usize::try_from(extent).unwrap_or(1);
        let (rest, index) = (left / extent, left % extent);
        offset += i64::try_from(index).unwrap_or(0) * stride;
        left = rest;
    }
    isize::try_from(offset).unwrap_or(0)
}
