//! Which threads are kvpool's own.

use std::cell::Cell;

thread_local! {
    static IS_OURS: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as a thread of kvpool, on which no interpreter runs: its
/// [`run_blocking`](super::run_blocking) sections need no hook.
pub(crate) fn mark_own_thread() {
    IS_OURS.set(true);
}

/// Returns whether [`mark_own_thread`] was called on this thread.
pub(super) fn is_own_thread() -> bool {
    IS_OURS.get()
}
