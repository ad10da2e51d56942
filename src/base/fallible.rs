//! Vectors whose length comes from a caller. Running out of memory is an error here, and does not abort the
//! process.

use super::{Error, ErrorKind, Result};

/// Creates an empty vector with capacity for `count` elements.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] when the host cannot allocate it, where `Vec::with_capacity` would abort.
#[inline]
pub(crate) fn try_with_capacity<T>(count: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    match values.try_reserve_exact(count) {
        Ok(()) => Ok(values),
        Err(_) => Err(out_of_memory_error::<T>(count)),
    }
}

/// Returns a copy of `values`.
///
/// # Errors
/// Same as [`try_with_capacity`], where `to_vec` would abort.
#[inline]
pub(crate) fn try_to_vec<T: Clone>(values: &[T]) -> Result<Vec<T>> {
    let mut copy = try_with_capacity(values.len())?;
    copy.extend_from_slice(values);
    Ok(copy)
}

/// Collects values whose number is known.
///
/// # Errors
/// Same as [`try_with_capacity`], where `collect` would abort.
#[inline]
pub(crate) fn try_collect<T>(values: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>> {
    let mut collected = try_with_capacity(values.len())?;
    collected.extend(values);
    Ok(collected)
}

/// Collects values whose number is not known before they are made.
///
/// # Errors
/// Same as [`try_push`].
pub(crate) fn try_collect_each<T>(values: impl IntoIterator<Item = T>) -> Result<Vec<T>> {
    let mut collected = Vec::new();
    values.into_iter().try_for_each(|value| try_push(&mut collected, value))?;
    Ok(collected)
}

/// Appends copies of `values`.
///
/// # Errors
/// Same as [`try_push`], where `extend_from_slice` would abort.
#[inline]
pub(crate) fn try_extend<T: Clone>(all: &mut Vec<T>, values: &[T]) -> Result<()> {
    try_reserve(all, values.len())?;
    all.extend_from_slice(values);
    Ok(())
}

/// Makes room for `count` more elements.
///
/// # Errors
/// Same as [`try_push`], where `Vec::reserve` would abort.
#[inline]
pub(crate) fn try_reserve<T>(values: &mut Vec<T>, count: usize) -> Result<()> {
    if values.capacity() - values.len() < count && values.try_reserve(count).is_err() {
        return Err(out_of_memory_error::<T>(values.len().saturating_add(count)));
    }
    Ok(())
}

/// Appends `value`.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] when the host cannot make room, where `Vec::push` would abort.
#[inline]
pub(crate) fn try_push<T>(values: &mut Vec<T>, value: T) -> Result<()> {
    try_reserve(values, 1)?;
    values.push(value);
    Ok(())
}

/// Checks that the host can give `bytes`, before a change of several allocations that must not stop halfway.
/// If another thread takes the memory in between, one of them still aborts the process.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] when it cannot.
pub(crate) fn check_memory(bytes: usize) -> Result<()> {
    /// For allocations whose sizes do not depend on the caller.
    const SLACK: usize = 1 << 16;
    try_with_capacity::<u8>(bytes.saturating_add(SLACK)).map(drop)
}

/// Returns the error of a host that has no memory for `count` elements.
#[cold]
#[must_use]
pub(crate) fn out_of_memory_error<T>(count: usize) -> Error {
    let bytes = count.saturating_mul(size_of::<T>());
    let text = format!("the host cannot give {bytes} bytes for {count} elements");
    Error::new(ErrorKind::OutOfMemory, text).with_asked(bytes)
}

/// Creates a vector of `count` zeros. Its pages take up memory only once they are touched.
///
/// # Errors
/// Same as [`try_with_capacity`].
pub(crate) fn try_zeros<T: Copy + Default>(count: usize) -> Result<Vec<T>> {
    /// Bytes from which on untouched pages are worth it.
    const LARGE: usize = 4 << 20;
    let mut zeros = try_with_capacity(count)?;
    if count.saturating_mul(size_of::<T>()) < LARGE {
        zeros.resize(count, T::default());
        return Ok(zeros);
    }
    // Only `vec!` gets zeroed pages from the system, and it aborts on failure: so the other one was tried, and
    // its pages go back.
    drop(zeros);
    Ok(vec![T::default(); count])
}
