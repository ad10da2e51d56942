//! `kvpool._kvpool.FreeGroup`: what `TokenToKVPoolAllocator.free_group` returns.

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::TokenToKvPoolAllocator;
use crate::python::logging::warn;

/// The context manager of `TokenToKVPoolAllocator.free_group`: frees inside it take effect together at its
/// end.
#[pyclass(frozen, module = "kvpool._kvpool", name = "FreeGroup")]
pub(in crate::python) struct FreeGroup {
    pub(super) allocator: Py<TokenToKvPoolAllocator>,
}

#[pymethods]
impl FreeGroup {
    fn __enter__(&self) {
        self.allocator.get().free_group_begin();
    }

    /// Ends the group. An exception of the body propagates; an error of the group itself is then logged.
    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        let allocator = self.allocator.get();
        if !allocator.pool.inspect(|slots| slots.in_group()) {
            // `clear` in the body has closed the group.
            return Ok(());
        }
        let body_raised = exception.get_item(0).is_ok_and(|kind| !kind.is_none());
        match allocator.free_group_end(py) {
            Err(error) if body_raised => {
                warn(py, &format!("a group of frees failed while another exception passed: {error}"));
                Ok(())
            }
            answer => answer,
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.allocator)
    }
}
