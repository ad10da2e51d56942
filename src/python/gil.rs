//! The GIL, as what blocks a thread releases it.

use std::ffi::c_void;
use std::mem::transmute;
use std::ptr::NonNull;
use std::sync::OnceLock;

use pyo3::ffi::{PyEval_RestoreThread, PyEval_SaveThread, PyGILState_GetThisThreadState, PyThreadState};
use pyo3::prelude::*;

use crate::base::InterpreterLock;

/// Returns the state of the thread that holds the GIL or, without a GIL, of this thread if it is attached.
type CurrentState = unsafe extern "C" fn() -> *mut PyThreadState;

/// The GIL. Neither function runs Python code, which those of pyo3 do: they drop what other threads left.
pub(super) const GIL: InterpreterLock = InterpreterLock { release, acquire };

/// Looks up the function, which every CPython has, but not its stable interface.
fn current_state() -> Option<CurrentState> {
    static FOUND: OnceLock<Option<CurrentState>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        [c"PyThreadState_GetUnchecked", c"_PyThreadState_UncheckedGet"].into_iter().find_map(|name| {
            // SAFETY: the name ends with a zero.
            let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            // SAFETY: the function of this name takes nothing and returns a thread's state.
            unsafe { transmute::<*mut c_void, Option<CurrentState>>(found) }
        })
    })
}

/// Returns whether this thread holds the GIL, or `None` if this Python does not tell.
fn is_held() -> Option<bool> {
    let current = current_state()?;
    // SAFETY: it may be called on every thread, and at any time.
    let ours = unsafe { PyGILState_GetThisThreadState() };
    // SAFETY: as above.
    Some(!ours.is_null() && ours == unsafe { current() })
}

fn release() -> Option<NonNull<c_void>> {
    if is_held() != Some(true) {
        return None;
    }
    // SAFETY: this thread holds the GIL.
    NonNull::new(unsafe { PyEval_SaveThread() }.cast())
}

fn acquire(state: NonNull<c_void>) {
    // SAFETY: `release` has returned it on this thread.
    unsafe { PyEval_RestoreThread(state.as_ptr().cast()) };
}

/// Runs a blocking section without the GIL.
pub(super) fn without_gil(section: &mut (dyn FnMut() + Send)) {
    if is_held() == Some(false) {
        section();
    } else {
        Python::attach(|py| py.detach(section));
    }
}
