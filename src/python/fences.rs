//! Fences that freed slots wait for.

use std::cell::Cell;

use pyo3::PyTraverseError;
use pyo3::exceptions::PyException;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::base::Watched;
use crate::index::FenceId;

use super::report::warn;

thread_local! {
    /// Whether this thread is asking fences right now.
    static POLLING: Cell<bool> = const { Cell::new(false) };
}

/// A fence and the free that waits for it.
pub(super) struct Fence {
    id: FenceId,
    object: Py<PyAny>,
    /// Whether it was said that its `query` raises.
    reported: bool,
}

/// The fences of an allocator that have not passed, in the order of their frees.
#[derive(Default)]
pub(super) struct Fences {
    waiting: Watched<Vec<Fence>>,
}

impl Fences {
    /// Whether there is none.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        !self.waiting.waits()
    }

    /// Adds a fence, whose `query` can be called.
    pub(super) fn add(&self, id: FenceId, object: &Bound<'_, PyAny>) {
        self.waiting.lock().push(Fence { id, object: object.clone().unbind(), reported: false });
    }

    /// Asks all of them which have passed. Also says who wants to stop the program meanwhile, after which none is asked.
    ///
    /// A fence that uses the allocator in its `query` finds the others as they are: this does not nest.
    pub(super) fn passed(&self, py: Python<'_>) -> (Vec<FenceId>, Option<PyErr>) {
        let mut passed = Vec::new();
        if POLLING.replace(true) {
            return (passed, None);
        }
        // Python code runs in `query`, so no lock may be held then.
        let waiting: Vec<_> =
            self.waiting.lock().iter().map(|fence| (fence.id, fence.object.clone_ref(py))).collect();
        let mut interrupt = None;
        for (id, object) in waiting {
            match object.bind(py).call_method0("query").and_then(|answer| answer.is_truthy()) {
                Ok(true) => passed.push(id),
                Ok(false) => (),
                Err(error) if error.is_instance_of::<PyException>(py) => self.report(py, id, &error),
                Err(error) => {
                    interrupt = Some(error);
                    break;
                }
            }
        }
        POLLING.set(false);
        (passed, interrupt)
    }

    fn report(&self, py: Python<'_>, id: FenceId, error: &PyErr) {
        let first = self
            .waiting
            .lock()
            .iter_mut()
            .find(|fence| fence.id == id)
            .is_some_and(|fence| !std::mem::replace(&mut fence.reported, true));
        if first {
            warn(py, &format!("a fence raised in query(); its slots stay in use until it answers: {error}"));
        }
    }

    /// Forgets fences that have passed.
    pub(super) fn remove(&self, passed: &[FenceId]) {
        let gone: Vec<Fence> =
            self.waiting.lock().extract_if(.., |fence| passed.contains(&fence.id)).collect();
        // Dropping the objects may run Python code.
        drop(gone);
    }

    /// Forgets all, and hands them out: dropping them may run Python code.
    pub(super) fn take(&self) -> Vec<Fence> {
        std::mem::take(&mut *self.waiting.lock())
    }

    /// Shows them to the garbage collector.
    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        // Whoever holds the lock is running, so the fences are reachable anyway.
        let Some(waiting) = self.waiting.try_lock() else { return Ok(()) };
        waiting.iter().try_for_each(|fence| visit.call(&fence.object))
    }
}
