//! Integer conversions that succeed for every number that this crate counts.
//!
//! A conversion panics instead of truncating, because a truncated number would corrupt memory. No caller can
//! trigger the panic.

/// Converts a number of bytes, elements or rows in memory, or of indices in a batch, as tensors and kernels
/// represent it.
pub(crate) fn signed(number: usize) -> i64 {
    i64::try_from(number).expect("what lies in memory is counted in 63 bits")
}

/// Converts an extent of a tensor, which is never negative.
pub(crate) fn unsigned(extent: i64) -> usize {
    usize::try_from(extent).expect("an extent is not negative, and an address has 64 bits")
}

/// Converts the distance between two elements of a tensor, in elements or bytes.
pub(crate) fn distance(number: i64) -> isize {
    isize::try_from(number).expect("an address has 64 bits")
}

/// Converts an index or a number of indices, which is already checked to fit an int32 tensor.
pub(crate) fn narrow(number: usize) -> u32 {
    int32(number).cast_unsigned()
}

/// Works like [`narrow`], but returns a signed number.
pub(crate) fn int32(number: usize) -> i32 {
    i32::try_from(number).expect("indices were checked to fit int32 when the pool was made")
}

/// Converts a number of tokens of a prompt; a longer prompt counts as one of 2**32 - 1.
pub(crate) fn saturated(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}
