//! Turns of sessions, as adapters name them.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cache::SessionId;
use crate::engines::AfterTurn;
use crate::python::page_keys::name_of;

/// Returns the session with a name.
pub(super) fn session_of(name: &Bound<'_, PyAny>) -> PyResult<SessionId> {
    Ok(SessionId::of_name(&name_of("session", Some(name))?))
}

/// Returns what follows a turn.
pub(super) fn after_turn(pause: Option<&str>, is_last: bool) -> PyResult<AfterTurn<'_>> {
    match (pause, is_last) {
        (None, false) => Ok(AfterTurn::Unknown),
        (Some(kind), false) => Ok(AfterTurn::Pause(kind)),
        (None, true) => Ok(AfterTurn::End),
        (Some(kind), true) => {
            Err(PyValueError::new_err(format!("a session that ends does not pause, and pause is '{kind}'")))
        }
    }
}
