//! The calls of a store that is written in Python.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::base::ForkGate;
use crate::base::sync::lock;
use crate::pool::{RemoteStore, StoreCall as PoolStoreCall, StoreCallKind, StoreCallQueue};

use super::wait_in_slices;

/// The calls of a `Store`, for threads that answer them.
#[pyclass(frozen, module = "kvpool._kvpool", name = "_StoreQueue")]
pub(super) struct StoreQueue {
    pub(super) store: Arc<RemoteStore>,
}

#[pymethods]
impl StoreQueue {
    #[new]
    fn new() -> Self {
        Self { store: Arc::default() }
    }

    /// Returns the next call of `find` or `read`, or `None` after a while without one. Waits without the GIL.
    ///
    /// Raises:
    ///     StateError: Once it is closed, and in the child of a fork.
    fn next_read(&self, py: Python<'_>) -> PyResult<Option<StoreCall>> {
        self.next(py, StoreCallQueue::Reads)
    }

    /// Returns the next call of `write`. Otherwise like `next_read`.
    fn next_write(&self, py: Python<'_>) -> PyResult<Option<StoreCall>> {
        self.next(py, StoreCallQueue::Writes)
    }

    /// Rejects further calls, and waits, without the GIL, until the earlier ones are answered.
    ///
    /// Raises:
    ///     StateError: In the child of a fork.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        wait_in_slices(py, None, |slice| self.store.close(slice)).map(drop)
    }

    /// Rejects further calls, and drops those that are not being answered.
    fn abandon(&self, py: Python<'_>) {
        py.detach(|| {
            let _gate = ForkGate::enter();
            self.store.abandon();
        });
    }
}

impl StoreQueue {
    fn next(&self, py: Python<'_>, queue: StoreCallQueue) -> PyResult<Option<StoreCall>> {
        /// The time between two checks of whether the store still exists.
        const POLL_INTERVAL: Duration = Duration::from_millis(100);
        let call = py.detach(|| self.store.next(queue, POLL_INTERVAL))?;
        Ok(call.map(|call| StoreCall { call: Mutex::new(Some(call)) }))
    }
}

/// A call of a store. One that is dropped has failed.
#[pyclass(frozen, module = "kvpool._kvpool", name = "_StoreCall")]
pub(super) struct StoreCall {
    call: Mutex<Option<PoolStoreCall>>,
}

#[pymethods]
impl StoreCall {
    /// The requested operation: "find", "read" or "write"; `None` once the call is finished.
    #[getter]
    fn kind(&self) -> Option<&'static str> {
        lock(&self.call).as_ref().map(|call| match call.kind() {
            StoreCallKind::Find => "find",
            StoreCallKind::Touch => "touch",
            StoreCallKind::Read => "read",
            StoreCallKind::Write => "write",
        })
    }

    /// The keys of the pages.
    #[getter]
    fn keys<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        let keys = lock(&self.call).as_ref().map_or(Vec::new(), |call| call.keys().to_vec());
        keys.iter().map(|key| PyBytes::new(py, key)).collect()
    }

    /// The address and the bytes of each page in memory.
    #[getter]
    fn places(&self) -> (Vec<usize>, Vec<usize>) {
        let call = lock(&self.call);
        let Some(rows) = call.as_ref().and_then(PoolStoreCall::rows) else { return Default::default() };
        let count = call.as_ref().map_or(0, |call| call.keys().len());
        (0..count).map(|row| (rows.address_of(row), rows.bytes_of(row))).unzip()
    }

    /// Finishes the call with an answer for each page: whether it was found, read or written. Pages without
    /// an answer were not.
    fn finish(&self, py: Python<'_>, present: Vec<bool>) {
        let call = lock(&self.call).take();
        py.detach(|| {
            // Owners of the pages have locks.
            let _gate = ForkGate::enter();
            if let Some(call) = call {
                call.finish(&present);
            }
        });
    }
}
