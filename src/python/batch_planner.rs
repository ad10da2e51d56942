//! `kvpool.BatchPlanner`.

mod plan;

use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PySequence};

use crate::base::{Error, IndexVec};
use crate::index::CallGuard;
use crate::memory::Stream;
use crate::pool::{Batch, BatchPlanner as Planner, PlannerConfig, Prefix};

use super::args;
use super::export::to_tensor;
use super::fences::fence;
use super::framework::{backend, current_stream};
use super::prefix_cache::Lease;
use super::req_to_token_pool::{ReqToTokenPool, report_not_zeroed};
use super::tensor_cache::TensorCache;
use super::token_to_kv_pool_allocator::TokenToKvPoolAllocator;

pub(super) use plan::{BatchPlan, HostPlan};

/// Plans the steps of a scheduler: one call takes the slots of a whole batch, writes the request table and
/// builds the metadata that attention kernels read.
///
/// The planner tracks how many tokens of each request have slots, and owns these slots. `seq_lens` always
/// include the new tokens; a length that does not follow from the request's current length is an error. Rows
/// come from `req_to_token_pool.alloc`; `finish` frees them with their slots. A row that was freed and
/// allocated again starts with no tokens. The lease of a row that was freed without `finish` ends in the next
/// call of the planner. `extend` and `decode` are all or nothing: when they return `None`
/// or raise, nothing is changed.
///
/// A step is one pass on the host. Its cost grows with the new tokens and the requests; only `kv_indices` is
/// rewritten whole in every step. On a GPU a step is one launch on the current stream, preceded by a copy to
/// the device if it has more numbers than a launch takes. It waits only if the host is many large steps ahead.
/// If you plan on another stream than before, make that stream wait, by an event, for the work that reads the
/// previous plan. All calls are atomic.
///
/// Args:
///     req_to_token_pool: The request table. Do not write to rows that the planner uses.
///     allocator: The allocator of the slots, on the same device. The metadata has its page size.
///     max_batch_size: Maximum number of requests in a batch, including padding.
///     max_tokens: Maximum number of new tokens in a batch, including padding.
///     kv_indices: Whether to build FlashInfer's `kv_indices`, which takes memory for `max_batch_size`
///         requests of full length.
///     block_table: Whether to build the block table of FlashAttention and vLLM, which takes as much memory
///         again.
///
/// Raises:
///     ConfigError: If a size is below 1, or the pools are on different devices.
///     OutOfMemoryError: If there is not enough memory.
#[pyclass(frozen, module = "kvpool", name = "BatchPlanner", weakref)]
pub(super) struct BatchPlanner {
    pub(super) planner: Arc<Planner>,
    table: Py<ReqToTokenPool>,
    allocator: Py<TokenToKvPoolAllocator>,
    /// The tensors by field. Steps of equal sizes use the same tensors.
    pub(super) tensors: TensorCache<()>,
}

impl BatchPlanner {
    /// Records the caller's line for the pools, if one of them debugs.
    fn begin(&self, py: Python<'_>) -> PyResult<Option<CallGuard>> {
        let (slots, rows) = (self.allocator.get().debug, self.table.get().debug);
        if slots.is_on() { slots.begin(py, None) } else { rows.begin(py, None) }
    }

    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        current_stream(py, self.planner.device())
    }
}

fn values(py: Python<'_>, object: &Bound<'_, PyAny>) -> PyResult<IndexVec> {
    args::index_or_indices(object)?.values(py)
}

/// Converts batch sizes, which must not be negative.
pub(super) fn padded_sizes(given: &IndexVec) -> PyResult<Vec<usize>> {
    let size = |size: i64| {
        usize::try_from(size).map_err(|_| {
            Error::argument(format!("pad_to has {size}; a batch size must not be negative")).into()
        })
    };
    given.iter().map(size).collect()
}

/// Converts `object`, a sequence with an entry for each of `count` requests, entry by entry. `None` stays
/// `None`.
fn prefix_entries(
    name: &str,
    object: &Bound<'_, PyAny>,
    count: usize,
    entry: impl Fn(&Bound<'_, PyAny>) -> PyResult<Prefix>,
) -> PyResult<Vec<Prefix>> {
    let Ok(sequence) = object.cast::<PySequence>() else {
        return Err(PyTypeError::new_err(format!(
            "{name} must be a sequence with one entry for each request, not {}",
            args::kind_of(object)
        )));
    };
    let entry = |item: PyResult<Bound<'_, PyAny>>| {
        let item = item?;
        if item.is_none() { Ok(Prefix::None) } else { entry(&item) }
    };
    let entries = sequence.try_iter()?.map(entry).collect::<PyResult<Vec<_>>>()?;
    if entries.len() != count {
        let given = entries.len();
        let text = format!("a batch of {count} rows and {given} {name}; there must be an entry for each");
        return Err(Error::argument(text).into());
    }
    Ok(entries)
}

/// Converts a lease to a prefix.
fn leased_prefix(object: &Bound<'_, PyAny>) -> PyResult<Prefix> {
    let Ok(lease) = object.cast::<Lease>() else {
        let kind = args::kind_of(object);
        return Err(PyTypeError::new_err(format!(
            "an entry of prefixes must be a Lease or None, not {kind}"
        )));
    };
    Ok(Prefix::Leased(Arc::clone(&lease.get().lease)))
}

#[pymethods]
impl BatchPlanner {
    #[new]
    #[pyo3(signature = (req_to_token_pool, allocator, max_batch_size, max_tokens, *, kv_indices=true, block_table=true))]
    fn new(
        py: Python<'_>,
        req_to_token_pool: Py<ReqToTokenPool>,
        allocator: Py<TokenToKvPoolAllocator>,
        max_batch_size: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
        kv_indices: bool,
        block_table: bool,
    ) -> PyResult<Self> {
        let max_batch_size = args::size("max_batch_size", max_batch_size)?;
        let max_tokens = args::size("max_tokens", max_tokens)?;
        let config = PlannerConfig { max_batch_size, max_tokens, kv_indices, block_table };
        let (slots, table) = (&allocator.get().pool, &req_to_token_pool.get().pool);
        let backend = backend(py, slots.device())?;
        let planner = py.detach(|| Planner::new(&config, &backend, Arc::clone(slots), Arc::clone(table)))?;
        Ok(Self { planner, table: req_to_token_pool, allocator, tensors: TensorCache::default() })
    }

    /// Takes the slots for positions `[prefix, seq)` of each request: a prefill, whole or chunked.
    ///
    /// Args:
    ///     req_pool_indices: Request rows, ints `[bs]`.
    ///     prefix_lens: Tokens that each request has now, ints `[bs]`. For a new request: 0, or the length of
    ///         its cached prefix.
    ///     seq_lens: Tokens that each request will have, ints `[bs]`.
    ///     prefix_slots: Slots of cached prefixes: `None`, or a sequence with one entry per request, each
    ///         `None` or ints. The slots must be in use and fill whole pages. The request becomes an
    ///         additional owner (see `TokenToKVPoolAllocator.share`); the caller remains one.
    ///     prefixes: In place of `prefix_slots`, leases of a `PrefixCache`: `None`, or a sequence with one
    ///         entry per request, each `None` or a `Lease` as long as its prefix, possibly of length 0. The
    ///         request keeps the lease, publishes through it, and releases it in `finish`. A lease is for one
    ///         request; with later chunks pass `None` or the same lease again.
    ///
    /// Returns:
    ///     A `BatchPlan`, or `None` if there are not enough slots. The slots are in the allocator's order,
    ///     those of a partly used page first.
    ///
    /// Waits in two cases only: for freed slots whose values are still being copied from a GPU, if it would
    /// otherwise return `None`; and for the values of arguments on a GPU.
    ///
    /// Raises:
    ///     ArgumentError: If the arguments differ in length, a length does not follow from the request's
    ///         current length, a row is listed twice, cached slots do not fill their prefix or their pages,
    ///         or the batch exceeds the planner's limits.
    ///     IndexError: If a row or a length is outside of the table.
    ///     IndexOwnershipError: If a row is not allocated, a cached slot is not in use, or the page that a
    ///         request continues was freed by another owner.
    ///     StaleError: If the allocator was cleared or resized since a request, which is not extended from
    ///         0, took its slots.
    ///     DriverError: If a driver call fails, or the stream is being captured.
    #[pyo3(signature = (req_pool_indices, prefix_lens, seq_lens, prefix_slots=None, *, prefixes=None))]
    fn extend(
        slf: &Bound<'_, Self>,
        req_pool_indices: &Bound<'_, PyAny>,
        prefix_lens: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        prefix_slots: Option<&Bound<'_, PyAny>>,
        prefixes: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<BatchPlan>> {
        let py = slf.py();
        let rows = values(py, req_pool_indices)?;
        let prefix_lens = values(py, prefix_lens)?.into_i64()?;
        let seq_lens = values(py, seq_lens)?.into_i64()?;
        let prefixes = match (prefix_slots, prefixes) {
            (None, None) => Vec::new(),
            (Some(slots), None) => prefix_entries("prefix_slots", slots, rows.len(), |slots| {
                args::indices(slots)?.values(py).map(Prefix::Slots)
            })?,
            (None, Some(leases)) => prefix_entries("prefixes", leases, rows.len(), leased_prefix)?,
            (Some(_), Some(_)) => {
                return Err(
                    Error::argument("prefixes come from prefix_slots or prefixes, not from both").into()
                );
            }
        };
        let batch =
            Batch { rows: &rows, prefix_lens: &prefix_lens, seq_lens: &seq_lens, prefixes: &prefixes };
        let this = slf.get();
        let _acting = this.begin(py)?;
        let plan = this.planner.extend(batch, this.stream(py)?)?;
        Ok(plan.map(|plan| BatchPlan::new(slf, plan)))
    }

    /// Takes the slots for the next tokens of each request: `extend` from `seq_lens - tokens_per_req` to
    /// `seq_lens`.
    ///
    /// `seq_lens` are lengths after this step, the new tokens included: a request that has 30 tokens and gets
    /// its next one has the length 31 here, and 32 in the step after that.
    ///
    /// Args:
    ///     req_pool_indices: Request rows, ints `[bs]`.
    ///     seq_lens: Tokens that each request will have, including the new ones, ints `[bs]`.
    ///     tokens_per_req: New tokens per request. Use more than one for speculative decoding, and `truncate`
    ///         to free the rejected ones.
    ///     pad_to: Batch sizes of CUDA graphs, an int or a sequence. The batch is padded to the smallest size
    ///         that it fits. A padding request has row 0, the padding page, and `tokens_per_req` tokens, all
    ///         new and at slot 0 (-1 in `slot_mapping`).
    ///
    /// Returns:
    ///     A `BatchPlan`, or `None` if there are not enough slots.
    ///
    /// Raises:
    ///     ArgumentError: As in `extend`; also if the batch exceeds every size of `pad_to`, or the table has no
    ///         padding row.
    ///     IndexError: As in `extend`.
    ///     IndexOwnershipError: As in `extend`.
    ///     StaleError: If the allocator was cleared or resized since a request took its slots.
    ///     DriverError: As in `extend`.
    #[pyo3(signature = (req_pool_indices, seq_lens, tokens_per_req=args::Arg::Missing, *, pad_to=None),
           text_signature = "($self, req_pool_indices, seq_lens, tokens_per_req=1, *, pad_to=None)")]
    fn decode(
        slf: &Bound<'_, Self>,
        req_pool_indices: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        tokens_per_req: args::Arg<'_>,
        pad_to: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<BatchPlan>> {
        let py = slf.py();
        let rows = values(py, req_pool_indices)?;
        let seq_lens = values(py, seq_lens)?;
        let tokens_per_req = tokens_per_req.count("tokens_per_req", 1)?;
        let sizes = pad_to.map(|sizes| padded_sizes(&values(py, sizes)?)).transpose()?;
        let this = slf.get();
        let _acting = this.begin(py)?;
        let plan =
            this.planner.decode(&rows, &seq_lens, tokens_per_req, sizes.as_deref(), this.stream(py)?)?;
        Ok(plan.map(|plan| BatchPlan::new(slf, plan)))
    }

    /// Shrinks requests, for example by rejected tokens, and frees their slots. Table entries beyond the new
    /// length keep their values but are no longer owned. A lease that is longer is cut as well.
    ///
    /// Args:
    ///     req_pool_indices: Request rows, ints `[bs]`.
    ///     seq_lens: Tokens that each request keeps, ints `[bs]`.
    ///     after: A fence as in `TokenToKVPoolAllocator.free`: the slots stay in use until its `query()`
    ///         returns true.
    ///
    /// Raises:
    ///     ArgumentError: If a request has fewer tokens, or a row is listed twice. Nothing is changed.
    ///     IndexError: If a row is outside of the table.
    ///     IndexOwnershipError: If a row is not allocated, or a request would end inside a page that has
    ///         another owner (possibly one behind a fence), which later tokens would overwrite; nothing is
    ///         changed. Also if the allocator is strict and a slot of the planner was freed by another owner;
    ///         all others are freed.
    ///     StaleError: As in `decode`.
    #[pyo3(signature = (req_pool_indices, seq_lens, *, after=None))]
    fn truncate(
        &self,
        py: Python<'_>,
        req_pool_indices: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (rows, seq_lens) = (values(py, req_pool_indices)?, values(py, seq_lens)?);
        let fence = fence(after)?;
        let _acting = self.begin(py)?;
        let allocator = self.allocator.get();
        let stream = allocator.debug_stream(py)?;
        let (given, bad) = self.planner.truncate(&rows, &seq_lens, fence.as_ref(), stream)?;
        allocator.report(py, &bad, given);
        Ok(())
    }

    /// Frees the slots and the rows of requests, and ends their leases. The rows are zeroed, as by
    /// `ReqToTokenPool.free`. Requests from before a `clear` or `resize` of the allocator have no slots: only
    /// their rows are freed.
    ///
    /// Args:
    ///     req_pool_indices: Request rows, ints `[bs]`.
    ///     seq_lens: Tokens of each request, ints `[bs]`. Only checked.
    ///     after: A fence as in `TokenToKVPoolAllocator.free`: the slots stay in use, and leased prefixes
    ///         locked, until its `query()` returns true.
    ///
    /// Raises:
    ///     ArgumentError: If a length differs from the request's, or a row is listed twice. Nothing is changed.
    ///     IndexError: If a row is outside of the table.
    ///     IndexOwnershipError: If a row is not allocated; nothing is changed. Also if the allocator is
    ///         strict and a slot of the planner was freed by another owner; everything else is freed.
    ///     DriverError: If the stream is being captured. Nothing is changed.
    #[pyo3(signature = (req_pool_indices, seq_lens=None, *, after=None))]
    fn finish(
        &self,
        py: Python<'_>,
        req_pool_indices: &Bound<'_, PyAny>,
        seq_lens: Option<&Bound<'_, PyAny>>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let rows = values(py, req_pool_indices)?;
        let seq_lens = seq_lens.map(|lens| values(py, lens)).transpose()?;
        let fence = fence(after)?;
        let _acting = self.begin(py)?;
        let finished = self.planner.finish(&rows, seq_lens.as_ref(), fence.as_ref(), self.stream(py)?)?;
        self.allocator.get().report(py, &finished.bad, finished.pages);
        report_not_zeroed(py, finished.not_zeroed.as_ref());
        Ok(())
    }

    /// Gives an empty request the first tokens of another, for example for parallel sampling. Full pages are
    /// shared, with each request as an owner. A partly used page gets a new page in its place, to which you
    /// copy its contents.
    ///
    /// Args:
    ///     src: Row of the request that has the tokens.
    ///     dst: Row of the empty request.
    ///     seq_len: Number of tokens.
    ///
    /// Returns:
    ///     `(dst_slots, src_slots)`, 1-D tensors of slots of equal length for `KVPool.move_kv`, empty if there
    ///     is nothing to copy (always for pages of one slot); or `None` if there is no free page.
    ///
    /// Raises:
    ///     ArgumentError: If `src` has fewer tokens, `dst` is not empty, or they are the same row.
    ///     IndexError: If a row is outside of the table.
    ///     IndexOwnershipError: If a row is not allocated, or a page of `src` was freed by another owner.
    ///     StaleError: If the allocator was cleared or resized since `src` took its slots.
    ///     DriverError: If a driver call fails, or the stream is being captured.
    fn fork(
        &self,
        py: Python<'_>,
        src: &Bound<'_, PyAny>,
        dst: &Bound<'_, PyAny>,
        seq_len: &Bound<'_, PyAny>,
    ) -> PyResult<Option<(Py<PyAny>, Py<PyAny>)>> {
        let (src, dst, len) = (args::int(src)?, args::int(dst)?, args::int(seq_len)?);
        let _acting = self.begin(py)?;
        let copied = self.planner.fork(src, dst, len, self.stream(py)?)?;
        let tensors = |[dst, src]: &[_; 2]| Ok((to_tensor(py, dst)?, to_tensor(py, src)?));
        copied.as_ref().map(tensors).transpose()
    }

    /// Returns the number of tokens of a request that have slots.
    ///
    /// Raises:
    ///     IndexError: If the row is outside of the table.
    ///     IndexOwnershipError: If the row is not allocated.
    fn seq_len(&self, req_pool_idx: &Bound<'_, PyAny>) -> PyResult<u32> {
        let row = args::int(req_pool_idx)?;
        Ok(self.planner.seq_len(row)?)
    }

    /// Returns the statistics of this planner: `requests` with slots, their `tokens`, `plans` so far,
    /// `max_batch_size`, `max_tokens`, and `bytes` of the arrays on its device.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (planner, (requests, tokens)) = (&self.planner, self.planner.totals());
        [
            ("requests", requests),
            ("tokens", tokens),
            ("plans", planner.plans()),
            ("max_batch_size", self.planner.config().max_batch_size),
            ("max_tokens", self.planner.config().max_tokens),
            ("bytes", planner.mem_bytes()),
        ]
        .into_py_dict(py)
    }

    /// The request table.
    #[getter]
    fn req_to_token_pool(&self, py: Python<'_>) -> Py<ReqToTokenPool> {
        self.table.clone_ref(py)
    }

    /// The allocator of the slots.
    #[getter]
    fn allocator(&self, py: Python<'_>) -> Py<TokenToKvPoolAllocator> {
        self.allocator.clone_ref(py)
    }

    /// Maximum number of requests in a batch, including padding.
    #[getter]
    fn max_batch_size(&self) -> usize {
        self.planner.config().max_batch_size
    }

    /// Maximum number of new tokens in a batch, including padding.
    #[getter]
    fn max_tokens(&self) -> usize {
        self.planner.config().max_tokens
    }

    /// Slots per page.
    #[getter]
    fn page_size(&self) -> usize {
        self.allocator.get().pool.page_size()
    }

    /// The device of the tensors, in PyTorch's notation, such as "cuda:0".
    #[getter]
    fn device(&self) -> String {
        self.planner.device().to_string()
    }

    fn __repr__(&self) -> String {
        format!(
            "BatchPlanner(max_batch_size={}, max_tokens={}, page_size={}, device='{}')",
            self.planner.config().max_batch_size,
            self.planner.config().max_tokens,
            self.page_size(),
            self.planner.device()
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.table)?;
        visit.call(&self.allocator)?;
        self.tensors.traverse(&visit)
    }
}
