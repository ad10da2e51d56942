//! `kvpool.Fetch`.

use pyo3::prelude::*;

use crate::pool::{ArenaFetch, Fetch as PageFetch};

use super::{wait_in_slices, wait_polling};

/// A fetch of a prompt's pages from a store to the `HostTier` above it, made by `PrefixCache.fetch`, or of its units to an
/// `ArenaHostTier`, made by `ArenaPrefixCache.fetch`. As long as it lives, it keeps what it fetched to or found in the host
/// tier: drop it when the request has its lease and has loaded. It keeps nothing on the device.
#[pyclass(frozen, module = "kvpool", name = "Fetch", weakref)]
pub(super) struct Fetch {
    pub(super) fetch: PoolFetch,
}

/// What is fetched.
pub(super) enum PoolFetch {
    Pages(PageFetch),
    Units(ArenaFetch),
}

impl PoolFetch {
    fn len(&self) -> usize {
        match self {
            Self::Pages(fetch) => fetch.len(),
            Self::Units(fetch) => fetch.len(),
        }
    }

    fn is_over(&self) -> bool {
        match self {
            Self::Pages(fetch) => fetch.is_over(),
            Self::Units(fetch) => fetch.is_over(),
        }
    }

    fn cancel(&self) {
        match self {
            Self::Pages(fetch) => fetch.cancel(),
            Self::Units(fetch) => fetch.cancel(),
        }
    }
}

#[pymethods]
impl Fetch {
    /// Tokens whose pages have arrived from the store, in whole pages. `PrefixCache.match` finds how many a request can
    /// load.
    #[getter]
    fn length(&self) -> usize {
        self.fetch.len()
    }

    /// Returns whether the fetch is over. Does not wait.
    fn query(&self) -> bool {
        self.fetch.is_over()
    }

    /// Waits until the fetch is over, without the GIL. An interrupt ends the wait only.
    ///
    /// Args:
    ///     timeout: Maximum wait in seconds; unlimited by default.
    ///
    /// Returns:
    ///     Whether the fetch is over.
    ///
    /// Raises:
    ///     ArgumentError: If `timeout` is negative or NaN.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        match &self.fetch {
            PoolFetch::Pages(fetch) => wait_in_slices(py, timeout, |slice| Ok(fetch.wait(slice))),
            PoolFetch::Units(fetch) => wait_polling(py, timeout, || Ok(fetch.is_over())),
        }
    }

    /// Stops fetching. Pages that have arrived stay.
    fn cancel(&self) {
        self.fetch.cancel();
    }

    /// Always `None`: pages that a store does not bring are missing, and `length` does not count them.
    #[getter]
    #[expect(clippy::unused_self, reason = "as other work in flight has it")]
    const fn error(&self) -> Option<PyErr> {
        None
    }

    fn __repr__(&self) -> String {
        let state = if self.fetch.is_over() { "over" } else { "on its way" };
        format!("Fetch(length={}, {state})", self.fetch.len())
    }
}
