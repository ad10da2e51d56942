//! `kvpool.Lease` and `kvpool.Published`.

use std::sync::{Arc, OnceLock};

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::base::{Device, Error, Id, IndexVec, Page};
use crate::memory::Stream;
use crate::pool::{
    Lease as PoolLease, Publication, Published as PoolPublished, TokenToKvPoolAllocator as Allocator,
};

use super::PrefixCache;
use crate::python::args;
use crate::python::export::to_tensor;
use crate::python::framework::current_stream;
use crate::python::host_tier::Load;
use crate::python::page_keys::namespace_to_py;
use crate::python::req_to_token_pool::report_not_zeroed;
use crate::python::tokens::with_tokens;

/// A request's hold on a cached prefix, whose pages are not evicted. As a context manager it is released at
/// the end of the block; a lease that is dropped is released, too.
#[pyclass(frozen, module = "kvpool", name = "Lease", weakref)]
pub(in crate::python) struct Lease {
    pub(in crate::python) lease: Arc<PoolLease>,
    pub(super) cache: Py<PrefixCache>,
}

impl Lease {
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        self.cache.get().stream(py)
    }

    fn publish_tokens(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        slots: Option<&IndexVec>,
        state: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PoolPublished> {
        let state = state.map(args::int).transpose()?;
        let stream = self.stream(py)?;
        with_tokens(tokens, |tokens| Ok(self.lease.publish(&Publication { tokens, slots, state }, stream)?))
    }

    /// Checks that a planner has the lease for the request in `row`, if that was given.
    fn check_row(&self, row: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(row) = row.map(args::int).transpose()? else { return Ok(()) };
        let text = match self.lease.row() {
            Some(own) if i64::from(own.number()) == row => return Ok(()),
            Some(other) => format!("row {row} was given for the lease of request row {other}"),
            None => format!(
                "row {row} was given for a lease that no planner has, and the cache has no other request table; \
                 write the slots published to the row yourself"
            ),
        };
        Err(Error::argument(text).into())
    }
}

#[pymethods]
impl Lease {
    /// Tokens of the prefix, in whole pages.
    ///
    /// Raises:
    ///     StaleError: If the lease was released, or the allocator was cleared.
    #[getter]
    fn length(&self) -> PyResult<usize> {
        Ok(self.lease.len()?)
    }

    /// Tokens whose K and V were cached at the match, in whole pages. This is more than `length` only if the
    /// cache has states, and no snapshot of the state at the end of these tokens. Other prompts diverge from
    /// this one there: end a chunk of the prefill there, and publish it with its state.
    ///
    /// Raises:
    ///     StaleError: If the lease was released, or the allocator was cleared.
    #[getter]
    fn kv_length(&self) -> PyResult<usize> {
        Ok(self.lease.kv_len()?)
    }

    fn __len__(&self) -> PyResult<usize> {
        self.length()
    }

    /// Tokens after the prefix that the tiers below the device had at the match, and that `load` can load. 0
    /// after a load or a publication.
    ///
    /// Raises:
    ///     StaleError: If the lease was released, or the allocator was cleared.
    #[getter]
    fn loadable(&self) -> PyResult<usize> {
        Ok(self.lease.loadable()?)
    }

    /// The slots of the prefix: 1-D `[length]` in the allocator's `index_dtype`, on its device, made by each access.
    ///
    /// Raises:
    ///     StaleError: If the lease was released, or the allocator was cleared.
    #[getter]
    fn slots(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_tensor(py, &self.lease.slots(self.stream(py)?)?)
    }

    /// The track slot with the state at the end of the prefix; `None` for a prefix without tokens and a cache
    /// without states. The cache owns it: `GDNPool` does not free it, and does not write it.
    ///
    /// Raises:
    ///     StaleError: If the lease was released, or the allocator was cleared.
    #[getter]
    fn state_slot(&self) -> PyResult<Option<u32>> {
        Ok(self.lease.state_slot()?.map(Id::number))
    }

    /// The namespace of the prefix.
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        namespace_to_py(py, self.lease.namespace())
    }

    /// Whether the lease was released, or the allocator was cleared.
    #[getter]
    fn closed(&self) -> bool {
        self.lease.len().is_err()
    }

    /// Another name of `closed`.
    #[getter]
    fn released(&self) -> bool {
        self.closed()
    }

    /// Publishes what the request has computed since: whole pages become the cache's, and the lease grows over
    /// them. The cost is proportional to the number of new tokens. The partial page at the end stays the caller's.
    ///
    /// Pages that another request has published in between are not kept twice: the caller's slots of these
    /// pages are freed, and the request continues with those of the cache (`Published.slots`).
    ///
    /// Args:
    ///     tokens: Token ids of positions `length` and up, only the new ones.
    ///     slots: Their slots, ints of the same length, which fill pages in order. The caller's ownership of
    ///         whole pages passes to the cache. Not needed for a lease that a planner has, which has the slots
    ///         of its requests.
    ///     row: The request row of a lease that a planner has; only checked. The planner's next call with the
    ///         row writes the cache's slots to the request table, in place of those of duplicates. Without a
    ///         planner the cache has no table: write `Published.slots` to yours.
    ///     state: A working slot of the cache's states, whose state is that after the last whole page. A
    ///         snapshot of it is kept if a track slot is free or can be given up: superseded ones first, which are
    ///         earlier ones of the same lease behind the tokens that it was matched with, then the one that is worth
    ///         least, unless the new one is worth less. The state is copied before anything is published, on the
    ///         current stream.
    ///
    /// Nothing is changed if the call raises, except that another snapshot may have been given up for the state.
    ///
    /// Raises:
    ///     ArgumentError: If a token is outside of [0, 2**31), or `tokens` and `slots` differ in length.
    ///     DriverError: If the state cannot be copied.
    ///     IndexError: If `state` is no working slot.
    ///     IndexOwnershipError: If a slot is not in use, listed twice, cached already, or not at its place in a
    ///         page.
    ///     StaleError: If the lease was released, or the allocator was cleared.
    ///     StateError: If a load of the lease is not over, or a state is given and the cache was made without states.
    #[pyo3(signature = (tokens, slots=None, *, state=None, row=None))]
    fn publish(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        slots: Option<&Bound<'_, PyAny>>,
        state: Option<&Bound<'_, PyAny>>,
        row: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Published> {
        let slots = slots.map(|slots| args::indices(slots)?.values(py)).transpose()?;
        self.check_row(row)?;
        let _acting = self.cache.get().begin(py)?;
        let published = self.publish_tokens(py, tokens, slots.as_ref(), state)?;
        Ok(self.cache.get().published(published))
    }

    /// Publishes, frees the partial page at the end, and releases the lease: the end of a request. Nothing is
    /// changed if the publication raises.
    ///
    /// Args:
    ///     tokens: As in `publish`.
    ///     slots: As in `publish`.
    ///     row: The request row of a lease that a planner has. The planner then finishes the request, as
    ///         `BatchPlanner.finish` does: it frees the other slots and the row.
    ///
    /// Raises:
    ///     ArgumentError: As in `publish`; also if a planner has the lease and `row` is not given.
    ///     IndexOwnershipError: As in `publish`, and with `row` as in `BatchPlanner.finish`.
    ///     StaleError: As in `publish`.
    ///     StateError: As in `publish`.
    #[pyo3(signature = (tokens, slots=None, *, row=None))]
    fn finish(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        slots: Option<&Bound<'_, PyAny>>,
        row: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let slots = slots.map(|slots| args::indices(slots)?.values(py)).transpose()?;
        self.check_row(row)?;
        let cache = self.cache.get();
        let _acting = cache.begin(py)?;
        let stream = self.stream(py)?;
        if row.is_some() {
            let finished = with_tokens(tokens, |tokens| {
                let publication = Publication { tokens, slots: slots.as_ref(), state: None };
                Ok(self.lease.finish_request(&publication, stream)?)
            })?;
            cache.allocator.get().report(py, &finished.bad, finished.pages);
            report_not_zeroed(py, finished.not_zeroed.as_ref());
            return Ok(());
        }
        let text = match (self.lease.row(), &slots) {
            (Some(row), _) => {
                format!(
                    "a planner has the lease, for request row {row}: give row={row}, and it finishes the request"
                )
            }
            (None, Some(slots)) => {
                with_tokens(tokens, |tokens| Ok(self.lease.finish(tokens, slots, stream)?))?;
                return Ok(());
            }
            (None, None) => "slots are needed for a lease that no planner has".to_owned(),
        };
        Err(Error::argument(text).into())
    }

    /// Loads the pages that the tiers below the device have after the prefix. The lease has their slots from
    /// now on; call `Load.wait_layer` before the work that uses a layer. Pages that another request is
    /// loading are not loaded twice.
    ///
    /// Load before you pass the lease to a planner, and publish after `wait_layer` of the last layer: a
    /// publication raises while tokens are being loaded. On a GPU the copies run on a separate stream, after
    /// the work enqueued on the current stream.
    ///
    /// Pages and snapshots whose fingerprint is not that of what came to the tier are not loaded: they are given up,
    /// logged and counted as `damaged` in `HostTier.stats`, and the load ends before them.
    ///
    /// Args:
    ///     limit: Maximum number of tokens to load.
    ///
    /// Returns:
    ///     A `Load`, or `None` if there are not enough slots, or no track slot for the state.
    ///
    /// Raises:
    ///     ArgumentError: If `limit` is negative.
    ///     DriverError: If a copy cannot be enqueued, as while the current stream is being captured.
    ///     StaleError: If the lease was released, or the allocator was cleared.
    ///     StateError: If a planner has the lease, or it is loading already.
    #[pyo3(signature = (*, limit=None))]
    fn load(&self, py: Python<'_>, limit: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Load>> {
        let limit = limit.map_or(Ok(usize::MAX), |limit| args::count("limit", limit))?;
        let _acting = self.cache.get().begin(py)?;
        let load = self.lease.load(limit, self.stream(py)?);
        self.cache.get().log_notes_below(py);
        Ok(load?.map(|load| Load { load, device: self.cache.get().device }))
    }

    /// Copies the state at the end of the prefix to a working slot of the cache's states, or resets that for a
    /// prefix without tokens. Enqueued on the current stream.
    ///
    /// Raises:
    ///     StateError: If the cache was made without states, or the prefix has tokens and no snapshot.
    ///     IndexError: If `row` is no working slot.
    ///     StaleError: If the lease was released, or the allocator was cleared.
    fn restore(&self, py: Python<'_>, row: &Bound<'_, PyAny>) -> PyResult<()> {
        let row = args::int(row)?;
        Ok(self.lease.restore(row, self.stream(py)?)?)
    }

    /// Ends the lease. Does nothing if it has ended. A planner that has the lease keeps the prefix until the
    /// request is finished.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let _acting = self.cache.get().begin(py)?;
        self.lease.release(self.stream(py)?);
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release(py)
    }

    fn __repr__(&self) -> String {
        self.lease.len().map_or_else(
            |_| "Lease(released)".to_owned(),
            |length| format!("Lease(length={length}, namespace={})", self.lease.namespace()),
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.cache)
    }
}

/// The result of a publication. It keeps no lease.
#[pyclass(frozen, module = "kvpool", name = "Published")]
pub(in crate::python) struct Published {
    pub(super) outcome: PoolPublished,
    /// The allocator of the slots. The result of a publication keeps no lease.
    pub(super) allocator: Arc<Allocator>,
    pub(super) tensor: OnceLock<Py<PyAny>>,
    pub(super) device: Device,
}

#[pymethods]
impl Published {
    /// Tokens of the lease now.
    #[getter]
    const fn length(&self) -> usize {
        self.outcome.length
    }

    /// Tokens that another request had published in between. The caller's slots of them were freed.
    #[getter]
    const fn duplicates(&self) -> usize {
        self.outcome.duplicates
    }

    /// The cache's slots of the tokens published, from the former length of the lease to `length`: 1-D tensor
    /// on the allocator's device. Without duplicates they are the caller's.
    #[getter]
    fn slots(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        if let Some(tensor) = self.tensor.get() {
            return Ok(tensor.clone_ref(py));
        }
        let pages: &[Page] = &self.outcome.pages;
        let tensor =
            to_tensor(py, &self.allocator.tensor_of_pages(pages, current_stream(py, self.device)?)?)?;
        Ok(self.tensor.get_or_init(|| tensor).clone_ref(py))
    }

    fn __repr__(&self) -> String {
        format!("Published(length={}, duplicates={})", self.outcome.length, self.outcome.duplicates)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.tensor.get().map_or(Ok(()), |tensor| visit.call(tensor))
    }
}
