//! Integers of a caller.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt};

/// Returns the name of an object's class, for messages.
pub(super) fn kind_of(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "something else".to_owned(), |name| name.to_string())
}

/// Converts one index. An int beyond 64 bits is outside every range, so the nearest 64-bit int stands for it.
pub(super) fn int(object: &Bound<'_, PyAny>) -> PyResult<i64> {
    // A bool is a subclass of int in Python.
    if !object.is_exact_instance_of::<PyInt>() && object.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err("an index must be an int, not bool"));
    }
    match object.extract::<i64>() {
        Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
            Ok(if object.lt(0)? { i64::MIN } else { i64::MAX })
        }
        answer => answer,
    }
}
