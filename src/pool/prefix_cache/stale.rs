//! Why a lease cannot be used any more.

use crate::base::Error;

/// Returns the error of a lease whose allocator was cleared.
pub(super) fn cleared_error() -> Error {
    stale_lease_error("the allocator was cleared, and its slots are gone")
}

/// Returns the error of a lease that was released.
pub(super) fn released_error() -> Error {
    stale_lease_error("it was released")
}

#[cold]
fn stale_lease_error(why: &str) -> Error {
    Error::stale(format!("the lease cannot be used: {why}"))
}
