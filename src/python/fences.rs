//! Python objects as fences.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use pyo3::PyTraverseError;
use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::base::{Error, Result};
use crate::pool::{Fence, TokenToKvPoolAllocator};

use super::logging::warn;

/// An object with `query() -> bool`, such as a `torch.cuda.Event`.
struct PythonFence {
    object: Py<PyAny>,
    /// Whether an exception of `query` was reported.
    is_reported: AtomicBool,
}

/// Converts the argument `after`, an optional fence.
///
/// # Errors
/// `TypeError` if it has no callable `query`.
#[inline]
pub(super) fn fence(after: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Arc<dyn Fence>>> {
    match after {
        None => Ok(None),
        Some(object) => fence_of(object).map(Some),
    }
}

fn fence_of(object: &Bound<'_, PyAny>) -> PyResult<Arc<dyn Fence>> {
    if !object.getattr("query").is_ok_and(|query| query.is_callable()) {
        return Err(PyTypeError::new_err("after must have a method query() -> bool"));
    }
    Ok(Arc::new(PythonFence { object: object.clone().unbind(), is_reported: AtomicBool::new(false) }))
}

impl Fence for PythonFence {
    /// Returns whether the fence has passed. An exception of `query` is reported once and the fence is
    /// queried again later. `KeyboardInterrupt` and other exceptions that end the program propagate.
    fn has_passed(&self) -> Result<bool> {
        Python::attach(|py| {
            let answer = self.object.bind(py).call_method0("query").and_then(|answer| answer.is_truthy());
            answer.or_else(|error| {
                if !error.is_instance_of::<PyException>(py) {
                    return Err(Error::foreign(error));
                }
                if !self.is_reported.swap(true, Relaxed) {
                    let text = "query() of a fence raised; its slots stay in use until query() returns true";
                    warn(py, &format!("{text}: {error}"));
                }
                Ok(false)
            })
        })
    }
}

/// Shows the fences of an allocator to the garbage collector.
pub(super) fn traverse(
    allocator: &TokenToKvPoolAllocator,
    visit: &PyVisit<'_>,
) -> std::result::Result<(), PyTraverseError> {
    // The thread that holds the lock also holds a reference to the allocator, so its fences are reachable.
    allocator.try_inspect_fences(|fence| {
        let fence = (fence as &dyn std::any::Any).downcast_ref::<PythonFence>();
        fence.map_or(Ok(()), |fence| visit.call(&fence.object))
    })
}
