//! The parts that the key of a cached page is made of: its namespace, and the digest of its tokens.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyString};

use crate::cache::{Namespace, PageHash};

use super::args;

/// Converts a namespace to the object that its user passed.
pub(super) fn namespace_to_py<'py>(
    py: Python<'py>,
    namespace: &Namespace,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    Ok(match namespace {
        Namespace::Unnamed => None,
        Namespace::Number(number) => Some(number.into_pyobject(py)?.into_any()),
        Namespace::Large(digits) => Some(py.get_type::<PyInt>().call1((digits,))?),
        Namespace::Text(text) => Some(PyString::new(py, text).into_any()),
        Namespace::Bytes(bytes) => Some(PyBytes::new(py, bytes).into_any()),
    })
}

/// Converts the argument `namespace`.
pub(super) fn namespace_of(object: Option<&Bound<'_, PyAny>>) -> PyResult<Namespace> {
    name_of("namespace", object)
}

/// Converts a name, the argument `argument`.
pub(super) fn name_of(argument: &str, object: Option<&Bound<'_, PyAny>>) -> PyResult<Namespace> {
    let Some(object) = object else { return Ok(Namespace::Unnamed) };
    if let Ok(text) = object.cast::<PyString>() {
        return Ok(Namespace::Text(text.to_str()?.to_owned()));
    }
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(Namespace::Bytes(bytes.as_bytes().to_vec()));
    }
    if object.is_instance_of::<PyInt>() {
        return match object.extract::<i64>() {
            Ok(number) => Ok(Namespace::Number(number)),
            Err(_) => Ok(Namespace::Large(object.str()?.to_string())),
        };
    }
    let kind = args::kind_of(object);
    Err(PyTypeError::new_err(format!("{argument} must be a str, bytes or an int, not {kind}")))
}

/// Computes BLAKE3 of the concatenation of `parts`.
pub(super) fn digest(parts: &[&[u8]]) -> PageHash {
    // The key of a page is of a few bytes: what a hasher keeps for more would cost more than their hash.
    if let [bytes] = parts {
        return *blake3::hash(bytes).as_bytes();
    }
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}
