//! Messages to Python's `logging`: reports of invalid frees, warnings, information.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use pyo3::prelude::*;

use crate::index::BadFrees;

use super::base_pool::PoolName;
use super::debug::Debug;

/// `logging.WARNING`
const WARNING: u32 = 30;
/// `logging.INFO`
const INFO: u32 = 20;
/// `logging.DEBUG`
const DEBUG: u32 = 10;

/// Writes reports of invalid frees to the logger `kvpool`: the first report of a pool as a warning, later
/// reports at level DEBUG, or as warnings if the pool debugs.
#[derive(Debug)]
pub(super) struct Reporter {
    /// The name of the pool, which begins each report.
    name: PoolName,
    warned: AtomicBool,
}

impl Reporter {
    /// Creates the reporter of a pool.
    pub(super) fn new(name: &PoolName) -> Self {
        Self { name: name.clone(), warned: AtomicBool::new(false) }
    }

    /// Reports the dropped ones of `given` freed `noun`s, if there are any.
    pub(super) fn bad_frees(&self, py: Python<'_>, bad: &BadFrees, noun: &str, given: usize, debug: Debug) {
        if bad.dropped() > 0 {
            let is_known = self.warned.swap(true, Relaxed) && !debug.is_on();
            let level = if is_known { DEBUG } else { WARNING };
            log(py, level, &format!("{}: dropped {}", self.name, bad.describe(noun, given)));
        }
    }
}

/// Logs a warning.
pub(super) fn warn(py: Python<'_>, message: &str) {
    log(py, WARNING, message);
}

/// Logs a message at level INFO.
pub(super) fn info(py: Python<'_>, message: &str) {
    log(py, INFO, message);
}

/// Logs `message`. An exception in a handler must not undo the pool's work, so it goes to
/// `sys.unraisablehook`.
fn log(py: Python<'_>, level: u32, message: &str) {
    let logged = py
        .import("logging")
        .and_then(|logging| logging.call_method1("getLogger", ("kvpool",)))
        .and_then(|logger| logger.call_method1("log", (level, "%s", message)));
    if let Err(error) = logged {
        error.write_unraisable(py, None);
    }
}
