//! Checks of the arguments of a batch that both planners take.

use crate::base::{Error, IndexVec, Result};

/// Checks that there is a value for each row of a batch.
///
/// # Errors
/// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) otherwise.
pub(super) fn as_many(name: &str, values: &IndexVec, rows: &IndexVec) -> Result<()> {
    if values.len() == rows.len() {
        return Ok(());
    }
    Err(Error::argument(format!(
        "a batch of {} rows and {} {name}; the lengths must be equal",
        rows.len(),
        values.len()
    )))
}

/// Returns the smallest of `sizes` that a batch of `count` requests fits; `count` without sizes.
///
/// # Errors
/// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if it fits none.
pub(super) fn padded_size(count: usize, sizes: Option<&[usize]>) -> Result<usize> {
    let Some(sizes) = sizes else { return Ok(count) };
    sizes.iter().copied().filter(|&size| size >= count).min().ok_or_else(|| {
        Error::argument(format!("a batch of {count} requests is larger than all of pad_to {sizes:?}"))
    })
}
