//! `kvpool.Session`.

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::pool::Session as PoolSession;

use super::cache_object::CacheObject;
use super::page_keys::namespace_to_py;

/// The turns of one conversation or agent, which tell a prefix cache what comes back: the newest turn, after a
/// pause, or nothing. Made by `PrefixCache.session` or
/// `ArenaPrefixCache.session`; pass it to `match`, and to `PrefixCache.insert`.
///
/// Nothing is locked or kept for a session: one that is abandoned costs nothing. What other requests use as well,
/// such as a system prompt, is theirs, too, and no call of a session changes when it is evicted. Contexts that go
/// on side by side, such as those of an agent and its sub-agents, are sessions of their own.
///
/// A turn ends with its lease. If it continues the one before, that stays cached below it. If it does not, because
/// the context was compacted or edited, it supersedes what only this session has used of the turn before behind
/// the tokens that they have in common: that is evicted before anything else. A snapshot of the state at the end of
/// a turn is superseded by the next turn, unless others have used that prefix, too.
///
/// Calls may be made in any order, also while a lease of the session is open. The next `match` of a session takes
/// back `pause` and `end`.
#[pyclass(frozen, module = "kvpool", name = "Session", weakref)]
pub(super) struct Session {
    pub(super) session: PoolSession,
    pub(super) cache: Box<dyn CacheObject>,
}

#[pymethods]
impl Session {
    /// The name, as it was passed to `session`.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        namespace_to_py(py, self.session.name())
    }

    /// Says that the turn is over, and what the session waits for. The policy "adaptive" learns how long pauses
    /// of each kind are, in tokens that are looked up meanwhile, and evicts accordingly.
    ///
    /// Args:
    ///     kind: A class of tool calls, such as "bash", or "user". 256 kinds are told apart: use no names of
    ///         single calls.
    fn pause(&self, py: Python<'_>, kind: &str) -> PyResult<()> {
        self.session.pause(kind, self.cache.stream(py)?);
        Ok(())
    }

    /// Says that the session has ended: what only it has used is evicted first.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        self.session.end(self.cache.stream(py)?);
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("Session(name={})", self.session.name())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.cache.traverse(&visit)
    }
}
