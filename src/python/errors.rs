//! The mapping from [`Error`] to Python exceptions.

use pyo3::exceptions::{PyIndexError, PyOSError, PyTypeError};
use pyo3::prelude::*;

use crate::base::{Error, ErrorKind};

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        Python::attach(|py| {
            if let Some(raised) =
                std::error::Error::source(&error).and_then(|source| source.downcast_ref::<Self>())
            {
                // Raised by Python code that a pool called, such as a fence.
                return raised.clone_ref(py);
            }
            to_exception(py, &error).unwrap_or_else(|failure| failure)
        })
    }
}

/// Returns the name of the exception class for a kind: a class of `kvpool.errors`, or one of Python's own.
pub(super) const fn class_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Config => "ConfigError",
        ErrorKind::Argument => "ArgumentError",
        ErrorKind::Type => "TypeError",
        ErrorKind::Index => "IndexError",
        ErrorKind::IndexOwnership => "IndexOwnershipError",
        ErrorKind::OutOfMemory => "OutOfMemoryError",
        ErrorKind::WorkspaceExhausted => "WorkspaceExhaustedError",
        ErrorKind::Stale => "StaleError",
        ErrorKind::Driver => "DriverError",
        ErrorKind::BackendUnavailable => "BackendUnavailableError",
        ErrorKind::State => "StateError",
    }
}

/// Creates an exception of the class for the error's kind, with the numbers of the error as attributes.
fn to_exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let message = error.to_string();
    let exception = match error.kind() {
        ErrorKind::Type => PyTypeError::new_err(message),
        ErrorKind::Index => PyIndexError::new_err(message),
        kind => {
            let class = py.import("kvpool.errors")?.getattr(class_name(kind))?;
            PyErr::from_value(class.call1((message,))?)
        }
    };
    let (value, facts) = (exception.value(py), error.facts());
    if let Some(index) = facts.index {
        value.setattr("index", index)?;
    }
    if let Some(asked) = facts.asked {
        value.setattr("asked", asked)?;
    }
    if let Some(available) = facts.available {
        value.setattr("available", available)?;
    }
    if let Some(code) = facts.code {
        value.setattr("code", code)?;
    }
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>());
    if let Some((cause, code)) = source.and_then(|cause| Some((cause, cause.raw_os_error()?))) {
        // Python makes it the subclass for the code, such as `PermissionError`.
        exception.set_cause(py, Some(PyOSError::new_err((code, cause.to_string()))));
    }
    Ok(exception)
}
