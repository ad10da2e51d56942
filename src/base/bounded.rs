//! Conversions of numbers that fit because of what they count.
//!
//! Each panics where that is not so, which no caller can bring about: a wrong number would end up in memory.

/// A number of bytes, elements or rows in memory, or of a batch of indices, as tensors and kernels have it.
pub(crate) fn signed(number: usize) -> i64 {
    i64::try_from(number).expect("what lies in memory is counted in 63 bits")
}

/// An extent of a tensor, which is never negative.
pub(crate) fn unsigned(extent: i64) -> usize {
    usize::try_from(extent).expect("an extent is not negative, and an address has 64 bits")
}

/// Elements or bytes from one place of a tensor to another.
pub(crate) fn distance(number: i64) -> isize {
    isize::try_from(number).expect("an address has 64 bits")
}

/// A number of indices, or an index, which was checked to fit an int32 tensor.
pub(crate) fn narrow(number: usize) -> u32 {
    int32(number).cast_unsigned()
}

/// As [`narrow`], signed.
pub(crate) fn int32(number: usize) -> i32 {
    i32::try_from(number).expect("indices were checked to fit int32 when the pool was made")
}
