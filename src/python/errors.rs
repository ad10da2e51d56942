//! The one mapping from [`Error`] to exceptions.

use pyo3::exceptions::{PyIndexError, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;

use crate::base::{Error, ErrorKind};

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        if let Some(raised) =
            std::error::Error::source(&error).and_then(|source| source.downcast_ref::<Self>())
        {
            // An exception of Python code that a pool called.
            return Python::attach(|py| raised.clone_ref(py));
        }
        let message = error.to_string();
        match error.kind() {
            ErrorKind::Type => PyTypeError::new_err(message),
            ErrorKind::Index => PyIndexError::new_err(message),
            ErrorKind::State => PyRuntimeError::new_err(message),
            kind => Python::attach(|py| {
                let class = py.import("kvpool.errors").and_then(|module| module.getattr(kind.class_name()));
                match class.and_then(|class| class.call1((message,))) {
                    Ok(exception) => Self::from_value(exception),
                    Err(missing) => missing,
                }
            }),
        }
    }
}
