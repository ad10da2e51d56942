//! Messages to Python's `logging`: reports of invalid frees, warnings, information.

use std::fmt::Write as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::base::sync::lock;
use crate::index::BadFrees;

use super::debug::Debug;
use super::pool_name::PoolName;

/// `logging.WARNING`
const WARNING: u32 = 30;
/// `logging.INFO`
const INFO: u32 = 20;
/// `logging.DEBUG`
const DEBUG: u32 = 10;

/// The least time between two warnings of a pool that does not debug.
const PAUSE: Duration = Duration::from_secs(1);

/// Writes reports of invalid frees to the logger `kvpool`: one report of a pool in a second as a warning, the
/// others at level DEBUG, or all as warnings if the pool debugs.
#[derive(Debug)]
pub(super) struct Reporter {
    /// The name of the pool, which begins each report.
    name: PoolName,
    warnings: Mutex<Warnings>,
}

#[derive(Debug, Default)]
struct Warnings {
    /// The time of the last warning.
    last: Option<Instant>,
    /// The number of reports since then.
    quiet: usize,
}

impl Warnings {
    /// Counts a report. Returns the number of quiet reports before it if it is to be a warning.
    fn count(&mut self, now: Instant, warns: bool) -> Option<usize> {
        if !warns && self.last.is_some_and(|last| now.duration_since(last) < PAUSE) {
            self.quiet += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.quiet))
    }
}

impl Reporter {
    /// Creates the reporter of a pool.
    pub(super) fn new(name: &PoolName) -> Self {
        Self { name: name.clone(), warnings: Mutex::default() }
    }

    /// Reports the dropped ones of `given` freed `noun`s, if there are any.
    #[inline]
    pub(super) fn bad_frees(&self, py: Python<'_>, bad: &BadFrees, noun: &str, given: usize, debug: Debug) {
        if bad.dropped() > 0 {
            self.report_bad_frees(py, bad, noun, given, debug);
        }
    }

    #[cold]
    fn report_bad_frees(&self, py: Python<'_>, bad: &BadFrees, noun: &str, given: usize, debug: Debug) {
        let quiet = lock(&self.warnings).count(Instant::now(), debug.is_on());
        let level = if quiet.is_some() { WARNING } else { DEBUG };
        let mut text = format!("{}: dropped {}", self.name, bad.describe(noun, given));
        if let Some(quiet) = quiet.filter(|&quiet| quiet > 0) {
            let _ = write!(text, "; reports of bad frees since the last warning: {quiet}");
        }
        log(py, level, &text);
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
