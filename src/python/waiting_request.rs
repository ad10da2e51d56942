//! `kvpool.WaitingRequest`.

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::pool::WaitingRequest as PoolRequest;

use super::args;
use super::cache_object::CacheObject;
use super::tokens::with_tokens;

/// A request in the engine's waiting queue: what it would find is evicted after everything that is not retained. Made by
/// `PrefixCache.add_waiting` or `ArenaPrefixCache.add_waiting`.
///
/// Nothing is locked: memory that is short still evicts it, the prefix of the last request in the queue first, and a request
/// that runs always finds room. What several requests need counts as of the first of them. The snapshot from which a request
/// would resume, and the windows that it would read, are kept likewise. Tiers are not told.
///
/// Dropping it removes it from the queue. Clearing the allocator or the arena does not: the request needs nothing then until
/// it is updated.
#[pyclass(frozen, module = "kvpool", name = "WaitingRequest", weakref)]
pub(super) struct WaitingRequest {
    pub(super) request: PoolRequest,
    pub(super) cache: Box<dyn CacheObject>,
}

#[pymethods]
impl WaitingRequest {
    /// Tokens that the request would have found when it was looked up last, in whole pages.
    #[getter]
    fn length(&self) -> usize {
        self.request.len()
    }

    /// Its place in the queue: see `PrefixCache.add_waiting`.
    #[getter]
    const fn rank(&self) -> i64 {
        self.request.rank().priority
    }

    /// Looks the prompt up again, as others may have published more of it since. The request needs what it would find now.
    /// It does not count as a use.
    ///
    /// Args:
    ///     tokens: Token ids of the prompt, as in `PrefixCache.match`. Those behind what is found are not checked.
    ///     limit: As in `PrefixCache.add_waiting`.
    ///
    /// Returns:
    ///     Tokens that it would find, in whole pages.
    ///
    /// Raises:
    ///     ArgumentError: If a token that is looked up is outside of [0, 2**31), or `limit` is negative.
    ///     StateError: If it was removed.
    ///     TypeError: If `tokens` are not ints.
    #[pyo3(signature = (tokens, *, limit=None))]
    fn update(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        limit: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let stream = self.cache.stream(py)?;
        let limit = limit.map_or(Ok(usize::MAX), |limit| args::count("limit", limit))?;
        with_tokens(tokens, |tokens| Ok(self.request.update(tokens, limit, stream)?))
    }

    /// Removes the request from the queue, because it runs now or does not go on. A second call does nothing.
    fn remove(&self, py: Python<'_>) -> PyResult<()> {
        self.request.remove(self.cache.stream(py)?);
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("WaitingRequest(length={}, rank={})", self.length(), self.rank())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.cache.traverse(&visit)
    }
}
