//! `kvpool.ArenaPlanner`.

mod plan;

use pyo3::PyTraverseError;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyList, PySequence};

use std::sync::Arc;

use crate::base::IndexVec;
use crate::memory::Stream;
use crate::pool::{ArenaLease as PoolLease, ArenaPlanner as Planner, ArenaPlannerConfig};

use super::arena_prefix_cache::ArenaLease;
use super::args::{self, Arg};
use super::batch_planner::padded_sizes;
use super::cache_arena::CacheArena;
use super::framework::{backend, current_stream};
use super::tensor_cache::TensorCache;
use super::tokens::with_tokens;

pub(super) use plan::{ArenaPlan, GroupPlan};

/// Plans the steps of a scheduler over a `CacheArena`: one call takes the units of a whole batch in every group of the
/// layout, and builds the metadata that attention and state kernels read.
///
/// A request is a row, from `alloc` to `finish`. The planner tracks how many of its tokens have units, and owns these
/// units: `CacheArena.free` refuses them. `seq_lens` always include the new tokens; a length that does not follow from
/// the request's current length is an error. A request has units of pages in the order of its tokens, and one unit of
/// each group of states, from its first `extend` on; states are not zeroed.
///
/// `extend` and `decode` first free the units that no new token sees: those behind the window, or of earlier chunks, of
/// the first new token, or of the last whole page if the request publishes to a prefix cache. Sinks stay. These units
/// may be handed out by the same step: what reads them must have been enqueued before, on the stream of the step or one
/// that the stream waits for. Then they take units of all groups, or return `None` and take none.
///
/// A step is one pass on the host. On a GPU it is one launch on the current stream, preceded by a copy to the device if
/// it has more numbers than a launch takes. It waits only if the host is many large steps ahead. All calls are atomic
/// and thread-safe.
///
/// Args:
///     arena: The arena of the units. The arrays are on its device.
///     max_requests: Maximum number of requests at once.
///     max_context_len: Maximum number of tokens of a request.
///     max_batch_size: Maximum number of requests in a batch, including padding.
///     max_tokens: Maximum number of new tokens in a batch, including padding.
///     kv_indices: Whether to build FlashInfer's `kv_indices`, which take memory for `max_batch_size` requests of full
///         length in each group.
///     block_table: Whether to build the block tables of FlashAttention and vLLM, which take as much memory again.
///
/// Raises:
///     ConfigError: If a size is below 1, or numbers may be beyond int32.
///     OutOfMemoryError: If there is not enough memory.
#[pyclass(frozen, module = "kvpool", name = "ArenaPlanner", weakref)]
pub(super) struct ArenaPlanner {
    planner: Planner,
    arena: Py<CacheArena>,
    /// The tensors by array. Steps of equal sizes use the same tensors.
    tensors: TensorCache<()>,
}

impl ArenaPlanner {
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        current_stream(py, self.planner.device())
    }
}

fn values(py: Python<'_>, object: &Bound<'_, PyAny>) -> PyResult<IndexVec> {
    args::index_or_indices(object)?.values(py)
}

/// Converts a sequence of leases, or `None` in the place of one.
fn leases(object: &Bound<'_, PyAny>) -> PyResult<Vec<Option<Arc<PoolLease>>>> {
    let wrong = |what: &str, object: &Bound<'_, PyAny>| {
        PyTypeError::new_err(format!("{what}, not {}", args::kind_of(object)))
    };
    let Ok(sequence) = object.cast::<PySequence>() else {
        return Err(wrong("prefixes must be a sequence with one entry for each request", object));
    };
    let lease = |item: PyResult<Bound<'_, PyAny>>| {
        let item = item?;
        if item.is_none() {
            return Ok(None);
        }
        let lease = item.cast::<ArenaLease>();
        let lease = lease.map_err(|_| wrong("an entry of prefixes must be an ArenaLease or None", &item))?;
        Ok(Some(Arc::clone(&lease.get().lease)))
    };
    sequence.try_iter()?.map(lease).collect()
}

#[pymethods]
impl ArenaPlanner {
    #[new]
    #[pyo3(signature = (arena, max_requests, max_context_len, max_batch_size, max_tokens, *, kv_indices=true,
           block_table=true))]
    fn new(
        py: Python<'_>,
        arena: Py<CacheArena>,
        max_requests: &Bound<'_, PyAny>,
        max_context_len: &Bound<'_, PyAny>,
        max_batch_size: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
        kv_indices: bool,
        block_table: bool,
    ) -> PyResult<Self> {
        let config = ArenaPlannerConfig {
            max_requests: args::size("max_requests", max_requests)?,
            max_context_len: args::size("max_context_len", max_context_len)?,
            max_batch_size: args::size("max_batch_size", max_batch_size)?,
            max_tokens: args::size("max_tokens", max_tokens)?,
            kv_indices,
            block_table,
        };
        let pool = Arc::clone(&arena.get().pool);
        let backend = backend(py, pool.device())?;
        let planner = py.detach(|| Planner::new(config, &backend, pool))?;
        Ok(Self { planner, arena, tensors: TensorCache::default() })
    }

    /// Takes rows for requests without tokens.
    ///
    /// Args:
    ///     n: How many.
    ///
    /// Returns:
    ///     A list of row numbers, or `None` if there are fewer free rows.
    ///
    /// Raises:
    ///     ArgumentError: If `n` is negative.
    #[pyo3(signature = (n=Arg::Missing), text_signature = "($self, n=1)")]
    fn alloc<'py>(&self, py: Python<'py>, n: Arg<'_>) -> PyResult<Option<Bound<'py, PyList>>> {
        let rows = self.planner.alloc(n.count("n", 1)?)?;
        rows.map(|rows| PyList::new(py, rows.into_iter().map(i64::from))).transpose()
    }

    /// Takes the units for positions `[prefix, seq)` of each request in every group: a prefill, whole or chunked.
    ///
    /// Args:
    ///     req_pool_indices: Request rows, ints `[bs]`.
    ///     prefix_lens: Tokens that each request has now, ints `[bs]`.
    ///     seq_lens: Tokens that each request will have, ints `[bs]`.
    ///     prefixes: `None`, or a sequence with one entry per request, each `None` or the `ArenaLease` of a new
    ///         request, as long as its prefix and possibly of length 0. The request keeps the lease, publishes through
    ///         it, and releases it in `finish`. Its states become copies of the lease's snapshot, in stream order. A
    ///         lease is for one request; with later chunks pass `None` or the same lease again.
    ///
    /// Returns:
    ///     An `ArenaPlan`, or `None` if a group is short of units: then nothing is taken.
    ///
    /// Raises:
    ///     ArgumentError: If the arguments differ in length, a length does not follow from the request's current length
    ///         or its lease, a row is listed twice, a lease is of another arena, or the batch exceeds the planner's
    ///         limits.
    ///     IndexError: If a row or a length is beyond the planner's.
    ///     IndexOwnershipError: If a row is not allocated.
    ///     StaleError: If the arena was cleared since a request, which is not extended from 0, took its units, or since
    ///         a lease was made; if a lease was released.
    ///     StateError: If a lease is another request's.
    ///     DriverError: If a driver call fails, or the stream is being captured.
    #[pyo3(signature = (req_pool_indices, prefix_lens, seq_lens, *, prefixes=None))]
    fn extend(
        slf: &Bound<'_, Self>,
        req_pool_indices: &Bound<'_, PyAny>,
        prefix_lens: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        prefixes: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<ArenaPlan>> {
        let (py, this) = (slf.py(), slf.get());
        let rows = values(py, req_pool_indices)?;
        let prefixes = prefixes.map(leases).transpose()?;
        let prefix_lens = values(py, prefix_lens)?.into_i64()?;
        let seq_lens = values(py, seq_lens)?.into_i64()?;
        let plan =
            this.planner.extend(&rows, &prefix_lens, &seq_lens, prefixes.as_deref(), this.stream(py)?)?;
        Ok(plan.map(|plan| ArenaPlan::new(slf, plan)))
    }

    /// Takes the units for the next tokens of each request: `extend` from `seq_lens - tokens_per_req` to `seq_lens`.
    ///
    /// Args:
    ///     req_pool_indices: Request rows, ints `[bs]`.
    ///     seq_lens: Tokens that each request will have, including the new ones, ints `[bs]`.
    ///     tokens_per_req: New tokens per request. Use more than one for speculative decoding, and `truncate` to free
    ///         the rejected ones.
    ///     pad_to: Batch sizes of CUDA graphs, an int or a sequence. The batch is padded to the smallest size that it
    ///         fits. A padding request has row 0, the padding unit in every group, and `tokens_per_req` tokens, all new
    ///         and at slot 0 (-1 in `slot_mapping`).
    ///
    /// Returns:
    ///     An `ArenaPlan`, or `None` if a group is short of units.
    ///
    /// Raises:
    ///     ArgumentError: As in `extend`; also if the batch exceeds every size of `pad_to`.
    ///     IndexError: As in `extend`.
    ///     IndexOwnershipError: As in `extend`.
    ///     StaleError: If the arena was cleared since a request took its units.
    ///     DriverError: As in `extend`.
    #[pyo3(signature = (req_pool_indices, seq_lens, tokens_per_req=Arg::Missing, *, pad_to=None),
           text_signature = "($self, req_pool_indices, seq_lens, tokens_per_req=1, *, pad_to=None)")]
    fn decode(
        slf: &Bound<'_, Self>,
        req_pool_indices: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        tokens_per_req: Arg<'_>,
        pad_to: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<ArenaPlan>> {
        let (py, this) = (slf.py(), slf.get());
        let (rows, seq_lens) = (values(py, req_pool_indices)?, values(py, seq_lens)?);
        let tokens_per_req = tokens_per_req.count("tokens_per_req", 1)?;
        let sizes = pad_to.map(|sizes| padded_sizes(&values(py, sizes)?)).transpose()?;
        let stream = this.stream(py)?;
        let plan = this.planner.decode(&rows, &seq_lens, tokens_per_req, sizes.as_deref(), stream)?;
        Ok(plan.map(|plan| ArenaPlan::new(slf, plan)))
    }

    /// Shrinks requests, for example by rejected tokens, and frees the units of the others. What a state has seen stays
    /// in it.
    ///
    /// Args:
    ///     req_pool_indices: Request rows, ints `[bs]`.
    ///     seq_lens: Tokens that each request keeps, ints `[bs]`.
    ///
    /// Raises:
    ///     ArgumentError: If a request has fewer tokens, if the next token would see tokens whose units were freed
    ///         behind a window, or a row is listed twice. Nothing is changed.
    ///     IndexError: If a row is beyond the planner's.
    ///     IndexOwnershipError: If a row is not allocated.
    ///     StaleError: As in `decode`.
    fn truncate(
        &self,
        py: Python<'_>,
        req_pool_indices: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (rows, seq_lens) = (values(py, req_pool_indices)?, values(py, seq_lens)?);
        Ok(self.planner.truncate(&rows, &seq_lens)?)
    }

    /// Publishes what a request has computed through its lease: the units of its first tokens become the cache's.
    ///
    /// Units of tokens that another request has published in between are not kept twice: the request goes on with the
    /// cache's, which the next plan shows. Publish when the work that writes the units is enqueued on the current
    /// stream.
    ///
    /// Args:
    ///     req_pool_idx: Request row.
    ///     token_ids: Token ids from the first one on, in whole pages: ints, or a tensor or array of them.
    ///     snapshot: Whether to keep a copy of the states, so that a request can go on behind these tokens: they must
    ///         be all that the request has. The copy is enqueued on the current stream, one launch for each group of
    ///         states. Nothing is kept of the states if there are no units for them.
    ///
    /// Returns:
    ///     The number of tokens of the lease now.
    ///
    /// Nothing is changed if the call raises.
    ///
    /// Raises:
    ///     ArgumentError: If the request has fewer tokens, or more and `snapshot` is set; if `token_ids` are not whole
    ///         pages, do not begin with the tokens of the lease, or one is outside of [0, 2**31).
    ///     IndexError: If the row is beyond the planner's.
    ///     IndexOwnershipError: If the row is not allocated.
    ///     StaleError: If the arena was cleared since the request took its units.
    ///     StateError: If the request has no lease.
    ///     DriverError: If a driver call fails, or the stream is being captured.
    #[pyo3(signature = (req_pool_idx, token_ids, *, snapshot=false))]
    fn publish(
        &self,
        py: Python<'_>,
        req_pool_idx: &Bound<'_, PyAny>,
        token_ids: &Bound<'_, PyAny>,
        snapshot: bool,
    ) -> PyResult<usize> {
        let (row, stream) = (args::int(req_pool_idx)?, self.stream(py)?);
        with_tokens(token_ids, |tokens| Ok(self.planner.publish(row, tokens, snapshot, stream)?))
    }

    /// Frees the units and the rows of requests, and ends their leases.
    ///
    /// Args:
    ///     req_pool_indices: Request rows, ints `[bs]`.
    ///     seq_lens: Tokens of each request, ints `[bs]`. Only checked.
    ///
    /// Raises:
    ///     ArgumentError: If a length differs from the request's, or a row is listed twice. Nothing is changed.
    ///     IndexError: If a row is beyond the planner's.
    ///     IndexOwnershipError: If a row is not allocated. Nothing is changed.
    #[pyo3(signature = (req_pool_indices, seq_lens=None))]
    fn finish(
        &self,
        py: Python<'_>,
        req_pool_indices: &Bound<'_, PyAny>,
        seq_lens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let rows = values(py, req_pool_indices)?;
        let seq_lens = seq_lens.map(|lens| values(py, lens)).transpose()?;
        Ok(self.planner.finish(&rows, seq_lens.as_ref())?)
    }

    /// Returns the number of tokens of a request that have units.
    ///
    /// Raises:
    ///     IndexError: If the row is beyond the planner's.
    ///     IndexOwnershipError: If the row is not allocated.
    fn seq_len(&self, req_pool_idx: &Bound<'_, PyAny>) -> PyResult<u32> {
        Ok(self.planner.seq_len(args::int(req_pool_idx)?)?)
    }

    /// Returns the units of a request in a group by position: a page's number in the request, or a number of a state.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group.
    ///     IndexError: If the row is beyond the planner's.
    ///     IndexOwnershipError: If the row is not allocated.
    fn units<'py>(
        &self,
        py: Python<'py>,
        req_pool_idx: &Bound<'_, PyAny>,
        group: &str,
    ) -> PyResult<Bound<'py, PyDict>> {
        let group = self.arena.get().group(group)?;
        self.planner.units(args::int(req_pool_idx)?, group)?.into_py_dict(py)
    }

    /// Checks the bookkeeping.
    ///
    /// Raises:
    ///     StateError: If it is inconsistent.
    fn verify(&self) -> PyResult<()> {
        Ok(self.planner.verify()?)
    }

    /// Returns the statistics of this planner: `rows` in use, `requests` with units, their `tokens`, `plans` so far,
    /// `max_requests`, `max_batch_size`, `max_tokens`, and `bytes` of the arrays on its device.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (config, (rows, requests, tokens)) = (self.planner.config(), self.planner.totals());
        [
            ("rows", rows),
            ("requests", requests),
            ("tokens", tokens),
            ("plans", self.planner.plans()),
            ("max_requests", config.max_requests),
            ("max_batch_size", config.max_batch_size),
            ("max_tokens", config.max_tokens),
            ("bytes", self.planner.mem_bytes()),
        ]
        .into_py_dict(py)
    }

    /// The arena of the units.
    #[getter]
    fn arena(&self, py: Python<'_>) -> Py<CacheArena> {
        self.arena.clone_ref(py)
    }

    /// Maximum number of requests at once.
    #[getter]
    fn max_requests(&self) -> usize {
        self.planner.config().max_requests
    }

    /// Maximum number of tokens of a request.
    #[getter]
    fn max_context_len(&self) -> usize {
        self.planner.config().max_context_len
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

    /// The device of the tensors, in PyTorch's notation, such as "cuda:0".
    #[getter]
    fn device(&self) -> String {
        self.planner.device().to_string()
    }

    fn __repr__(&self) -> String {
        let config = self.planner.config();
        format!(
            "ArenaPlanner(max_requests={}, max_batch_size={}, max_tokens={}, device='{}')",
            config.max_requests,
            config.max_batch_size,
            config.max_tokens,
            self.planner.device()
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.arena)?;
        self.tensors.traverse(&visit)
    }
}
