//! Cases that are rare in use. Tests make them frequent.

use std::cell::Cell;

thread_local! {
    static ARE_FREQUENT: Cell<bool> = const { Cell::new(false) };
}

/// Decides whether rare cases are frequent in the trees that this thread creates from now on: first pages with
/// equal fingerprints, and runs that are long enough to be shared with their readers. For tests.
#[doc(hidden)]
pub fn set_rare_cases_frequent(are_frequent: bool) {
    ARE_FREQUENT.set(are_frequent);
}

/// Returns the bits of a fingerprint that a new tree uses.
pub(crate) fn fingerprint_mask() -> u32 {
    if ARE_FREQUENT.get() { 0xff } else { u32::MAX }
}

/// Returns the number of elements from which on a new tree shares a run with its readers: sharing then costs
/// less than a copy.
pub(super) fn shared_len() -> usize {
    if ARE_FREQUENT.get() { 1 } else { 1024 }
}
