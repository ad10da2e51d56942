//! Vectors of a length that a caller chose.

use super::{Error, ErrorKind, Result};

/// An empty vector with room for `count` elements.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`] when the host has no room, where `Vec::with_capacity` would end the process.
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

#[cold]
fn no_room(count: usize, size: usize) -> Error {
    let bytes = count.saturating_mul(size);
    let text = format!("the host cannot give {bytes} bytes for {count} elements");
    Error::new(ErrorKind::OutOfMemory, text).asked(bytes)
}

/// `count` zeros, which cost what is touched.
///
/// # Errors
/// As [`reserve`].
pub fn zeros<T: Copy + Default>(count: usize) -> Result<Vec<T>> {
    // The room is tried first, since only `vec!` gets zeroed pages from the system, and it cannot fail.
    drop(reserve::<T>(count)?);
    Ok(vec![T::default(); count])
}
