//! Vectors whose length comes from a caller: out of memory is an error here, not the end of the process.

use super::{Error, ErrorKind, Result};

/// An empty vector with room for `count` elements.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] when the host cannot allocate it, where `Vec::with_capacity` would abort.
///
/// ```
/// use kvpool::base::reserve;
/// assert!(reserve::<i32>(16).unwrap().capacity() >= 16);
/// assert!(reserve::<i32>(usize::MAX / 8).is_err());
/// ```
#[inline]
pub fn reserve<T>(count: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    match values.try_reserve_exact(count) {
        Ok(()) => Ok(values),
        Err(_) => Err(no_room(count, size_of::<T>())),
    }
}

/// Appends `value`.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] when the host cannot make room, where `Vec::push` would abort.
#[inline]
pub fn push<T>(values: &mut Vec<T>, value: T) -> Result<()> {
    if values.len() == values.capacity() && values.try_reserve(1).is_err() {
        return Err(no_room(values.len() + 1, size_of::<T>()));
    }
    values.push(value);
    Ok(())
}

#[cold]
fn no_room(count: usize, size: usize) -> Error {
    let bytes = count.saturating_mul(size);
    let text = format!("the host cannot give {bytes} bytes for {count} elements");
    Error::new(ErrorKind::OutOfMemory, text).asked(bytes)
}

/// A vector of `count` zeros. Pages of it cost memory only once they are touched.
///
/// # Errors
/// Same as [`reserve`].
pub fn zeros<T: Copy + Default>(count: usize) -> Result<Vec<T>> {
    // Only `vec!` gets zeroed pages from the system, and it aborts on failure: so `reserve` tries first.
    drop(reserve::<T>(count)?);
    Ok(vec![T::default(); count])
}
