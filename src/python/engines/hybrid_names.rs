//! Namespaces of `HybridTree`: those of `PrefixCache`, and tuples.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyTuple};

use crate::cache::Namespace;

use crate::python::page_keys::namespace_of;

/// The byte that the bytes of a tuple begin with, and those of bytes that begin so.
const ESCAPE: u8 = u8::MAX;

/// Returns the namespace that `object` names.
pub(in crate::python) fn name_of(object: Option<&Bound<'_, PyAny>>) -> PyResult<Namespace> {
    let Some(parts) = object.and_then(|object| object.cast::<PyTuple>().ok()) else {
        let mut name = namespace_of(object)?;
        if let Namespace::Bytes(bytes) = &mut name
            && bytes.first() == Some(&ESCAPE)
        {
            bytes.insert(0, ESCAPE);
        }
        return Ok(name);
    };
    let mut all = vec![ESCAPE];
    for part in parts.iter() {
        let (kind, bytes) = match namespace_of(Some(&part).filter(|part| !part.is_none()))? {
            Namespace::Unnamed => (0, Vec::new()),
            Namespace::Number(number) => (1, number.to_string().into_bytes()),
            Namespace::Large(digits) => (1, digits.into_bytes()),
            Namespace::Text(text) => (2, text.into_bytes()),
            Namespace::Bytes(bytes) => (3, bytes),
        };
        all.push(kind);
        all.extend(bytes.len().to_le_bytes());
        all.extend(bytes);
    }
    Ok(Namespace::Bytes(all))
}

/// Returns the object that [`name_of`] was given.
pub(in crate::python) fn object_of<'py>(py: Python<'py>, name: &Namespace) -> PyResult<Bound<'py, PyAny>> {
    match name {
        Namespace::Unnamed => Ok(py.None().into_bound(py)),
        Namespace::Number(number) => Ok(number.into_pyobject(py)?.into_any()),
        Namespace::Large(digits) => int_of(py, digits.as_bytes()),
        Namespace::Text(text) => Ok(text.into_pyobject(py)?.into_any()),
        Namespace::Bytes(bytes) => match bytes.as_slice() {
            [ESCAPE, ESCAPE, ..] => Ok(PyBytes::new(py, &bytes[1..]).into_any()),
            [ESCAPE, parts @ ..] => Ok(PyTuple::new(py, parts_of(py, parts)?)?.into_any()),
            plain => Ok(PyBytes::new(py, plain).into_any()),
        },
    }
}

fn parts_of<'py>(py: Python<'py>, mut rest: &[u8]) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let mut parts = Vec::new();
    while let Some((&kind, behind)) = rest.split_first() {
        let (len, behind) = behind.split_first_chunk().expect("a length follows a kind");
        let (bytes, behind) = behind.split_at(usize::from_le_bytes(*len));
        rest = behind;
        parts.push(match kind {
            0 => py.None().into_bound(py),
            1 => int_of(py, bytes)?,
            2 => text_of(bytes).into_pyobject(py)?.into_any(),
            _ => PyBytes::new(py, bytes).into_any(),
        });
    }
    Ok(parts)
}

fn int_of<'py>(py: Python<'py>, digits: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    py.get_type::<PyInt>().call1((text_of(digits),))
}

fn text_of(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("it was a text")
}
