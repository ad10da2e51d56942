//! Vectors whose length comes from a caller. Running out of memory is an error here, and does not abort the
//! process.

use super::{Error, ErrorKind, Result};

/// Creates an empty vector with capacity for `count` elements.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] when the host cannot allocate it, where `Vec::with_capacity` would abort.
///
/// ```
/// use kvpool::base::try_with_capacity;
/// assert!(try_with_capacity::<i32>(16).unwrap().capacity() >= 16);
/// assert!(try_with_capacity::<i32>(usize::MAX / 8).is_err());
/// ```
#[inline]
pub fn try_with_capacity<T>(count: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    match values.try_reserve_exact(count) {
        Ok(()) => Ok(values),
        Err(_) => Err(out_of_memory_error(count, size_of::<T>())),
    }
}

/// Makes room for `more` elements.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] when the host cannot allocate it, where `Vec::reserve` would abort.
#[inline]
pub fn try_reserve<T>(values: &mut Vec<T>, more: usize) -> Result<()> {
    values.try_reserve(more).map_err(|_| out_of_memory_error(values.len() + more, size_of::<T>()))
}

/// Appends `value`.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] when the host cannot make room, where `Vec::push` would abort.
#[inline]
pub fn try_push<T>(values: &mut Vec<T>, value: T) -> Result<()> {
    if values.len() == values.capacity() && values.try_reserve(1).is_err() {
        return Err(out_of_memory_error(values.len() + 1, size_of::<T>()));
    }
    values.push(value);
    Ok(())
}

#[cold]
fn out_of_memory_error(count: usize, size: usize) -> Error {
    let bytes = count.saturating_mul(size);
    let text = format!("the host cannot give {bytes} bytes for {count} elements");
    Error::new(ErrorKind::OutOfMemory, text).with_asked(bytes)
}

/// Creates a vector of `count` zeros. Its pages take up memory only once they are touched.
///
/// # Errors
/// Same as [`try_with_capacity`].
pub fn try_zeros<T: Copy + Default>(count: usize) -> Result<Vec<T>> {
    // Only `vec!` gets zeroed pages from the system, and it aborts on failure: so `try_with_capacity` tries
    // first.
    drop(try_with_capacity::<T>(count)?);
    Ok(vec![T::default(); count])
}
