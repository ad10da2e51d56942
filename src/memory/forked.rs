//! Whether this process has lost its devices by a fork.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::base::{Error, ErrorKind, Result};

/// Whether this process was forked from one that used a device.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Returns whether this process is the child of a fork, made after the driver was used.
pub(super) fn is_forked() -> bool {
    FORKED.load(Relaxed)
}

/// Checks that this process may call the driver.
///
/// # Errors
/// [`ErrorKind::Driver`] in the child of such a fork.
pub(super) fn check_not_forked() -> Result<()> {
    if is_forked() {
        return Err(Error::new(
            ErrorKind::Driver,
            "this process was forked from one that used CUDA, whose memory it does not have; \
             start worker processes with 'spawn' or 'forkserver'",
        ));
    }
    Ok(())
}

/// Installs the handler that records forks.
pub(super) fn watch_for_forks() {
    extern "C" fn in_child() {
        FORKED.store(true, Relaxed);
    }
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler only stores to an atomic, which is allowed in the child of a fork.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}
