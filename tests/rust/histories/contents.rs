//! The contents of regions in host memory, in tests that access them alone.

use kvpool::memory::{Number, Plain, Region};

/// The `count` elements at byte `offset`.
#[track_caller]
pub(crate) fn read<T: Number>(region: &Region, offset: usize, count: usize) -> Vec<T> {
    let source = expect_here(region, offset, count * size_of::<T>()).cast::<T>();
    // SAFETY: they lie within live host memory, and any bytes make a `Number`.
    (0..count).map(|at| unsafe { source.wrapping_add(at).read_unaligned() }).collect()
}

/// Whether each of the `bytes` bytes at `offset` is `value`.
#[track_caller]
pub(crate) fn are_all(region: &Region, offset: usize, bytes: usize, value: u8) -> bool {
    let source = expect_here(region, offset, bytes);
    // SAFETY: they lie within live host memory.
    (0..bytes).all(|at| unsafe { source.wrapping_add(at).read() } == value)
}

/// Writes `values` at byte `offset`.
#[track_caller]
pub(crate) fn write<T: Plain>(region: &Region, offset: usize, values: &[T]) {
    let target = expect_here(region, offset, size_of_val(values));
    // SAFETY: they lie within live host memory, which no slice is part of.
    unsafe { target.copy_from_nonoverlapping(values.as_ptr().cast(), size_of_val(values)) };
}

/// Fills `bytes` bytes at `offset` with `value`.
#[track_caller]
pub(crate) fn fill(region: &Region, offset: usize, bytes: usize, value: u8) {
    // SAFETY: they lie within live host memory.
    unsafe { expect_here(region, offset, bytes).write_bytes(value, bytes) };
}

#[track_caller]
fn expect_here(region: &Region, offset: usize, bytes: usize) -> *mut u8 {
    assert!(region.gpu().is_none(), "memory of {}", region.device());
    region.at(offset, bytes).expect("inside").as_ptr()
}
