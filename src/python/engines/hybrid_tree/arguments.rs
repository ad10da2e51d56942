//! Arguments and errors of `HybridTree`.

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;

use crate::base::{EngineSlot, Error, ErrorKind, IndexVec};
use crate::cache::NodeHandle;
use crate::engines::hybrid::{Boundary, NotLocked, Part, Receipt, SkippedParts};
use crate::python::args;
use crate::python::tokens::slots_of;

pub(super) fn no_such_node_error(node: NodeHandle) -> PyErr {
    PyKeyError::new_err(node.number())
}

pub(super) fn not_locked_error(error: NotLocked) -> PyErr {
    Error::new(
        ErrorKind::IndexOwnership,
        format!("node {} has no lock of {:?} to release", error.node.number(), error.part),
    )
    .into()
}

pub(super) fn part_of(number: usize) -> PyResult<Part> {
    Part::ALL.get(number).copied().ok_or_else(|| {
        Error::argument(format!("part {number} must be 0 (full), 1 (window) or 2 (state)")).into()
    })
}

/// Converts the number by which Python refers to a node.
pub(super) fn handle_of(number: u64) -> NodeHandle {
    NodeHandle::new(number)
}

pub(super) fn no_eviction_error(part: usize) -> PyErr {
    Error::state(format!("no eviction of part {part} has begun")).into()
}

pub(super) fn skipped_of(parts: &[usize]) -> PyResult<SkippedParts> {
    let parts: PyResult<Vec<_>> = parts.iter().map(|&part| part_of(part)).collect();
    Ok(SkippedParts::of(parts?))
}

pub(super) fn receipt_of(boundary: Option<u64>, skip: &[usize]) -> PyResult<Receipt> {
    Ok(Receipt { skipped: skipped_of(skip)?, boundary: boundary.map(Boundary::new) })
}

/// Returns all slots of a tensor or sequence.
pub(super) fn slots_in(object: &Bound<'_, PyAny>) -> PyResult<Vec<EngineSlot>> {
    let values: IndexVec = args::indices(object)?.values(object.py())?;
    Ok(slots_of(values.iter(), 0)?)
}
