//! What objects know of the prefix cache that they belong to.

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::memory::Stream;

/// The Python object of a prefix cache.
pub(super) trait CacheObject: Send + Sync {
    /// Returns the stream of a call.
    fn stream(&self, py: Python<'_>) -> PyResult<Stream>;

    /// Shows the object to the garbage collector.
    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError>;
}
