//! `kvpool.BatchPlanner`, `kvpool.BatchPlan` and what it has on the host.

use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PySequence};

use crate::base::{Error, IndexVec};
use crate::index::Acting;
use crate::memory::Stream;
use crate::pool::{Batch, BatchPlanner as Planner, Field, Plan, PlannerConfig};

use super::args;
use super::export::to_tensor;
use super::fences::fence;
use super::framework::{backend, current_stream};
use super::req_to_token_pool::ReqToTokenPool;
use super::tensor::Tensor;
use super::tensor_cache::TensorCache;
use super::token_to_kv_pool_allocator::TokenToKvPoolAllocator;

/// Plans the steps of a scheduler: one call takes the slots of a whole batch, writes the request table and makes the
/// metadata that attention kernels read.
///
/// The planner knows how many tokens of each request have slots, and owns these: `seq_lens` are always lengths with the new
/// tokens, and what does not fit what a request has is an error. Rows come from `req_to_token_pool.alloc`; `finish` gives
/// them back with their slots. A row that was freed and taken again by somebody else begins anew. `extend` and `decode` are
/// all or nothing: `None` when the pool is short, and an error, leave everything as it was.
///
/// A step is one pass on the host, whose cost grows with the new tokens and the requests; only `kv_indices` is written whole
/// every time. On a GPU it is one launch on the current stream, behind a copy to the device where the batch is large, and
/// nothing waits, unless the host is many large steps ahead; a plan on another stream than the one before must be ordered
/// after whatever still reads that, by an event. All calls are atomic.
///
/// Args:
///     req_to_token_pool: The request table, which nobody else writes in rows that the planner uses.
///     allocator: Where slots come from, on the same device. Its page size is that of the metadata.
///     max_batch_size: Requests in a batch, padding counted.
///     max_tokens: New tokens in a batch, padding counted.
///     kv_indices: Whether FlashInfer's `kv_indices` are made: memory for `max_batch_size` requests of full length.
///     block_table: Whether the block table of FlashAttention and vLLM is made: as much memory again.
///
/// Raises:
///     ConfigError: If a size is below 1, or the pools are on different devices.
///     OutOfMemoryError: If the memory cannot be had.
#[pyclass(frozen, module = "kvpool", name = "BatchPlanner", weakref)]
pub(super) struct BatchPlanner {
    planner: Planner,
    table: Py<ReqToTokenPool>,
    allocator: Py<TokenToKvPoolAllocator>,
    /// By field; they are the same in every step that has the same sizes.
    tensors: TensorCache<()>,
}

impl BatchPlanner {
    /// Announces the caller's line to the pools, if one of them debugs.
    fn begin(&self, py: Python<'_>) -> PyResult<Option<Acting>> {
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

/// Batch sizes, none of them negative.
fn padded_sizes(given: &IndexVec) -> PyResult<Vec<usize>> {
    let size = |size: i64| {
        usize::try_from(size).map_err(|_| {
            Error::config(format!("pad_to has {size}; a batch size must not be negative")).into()
        })
    };
    given.iter().map(size).collect()
}

/// One entry for each request: ints, or `None`.
fn cached(py: Python<'_>, object: &Bound<'_, PyAny>) -> PyResult<Vec<Option<IndexVec>>> {
    let Ok(sequence) = object.cast::<PySequence>() else {
        return Err(PyTypeError::new_err(format!(
            "prefix_slots must be a sequence with one entry for each request, not {}",
            args::kind_of(object)
        )));
    };
    let entry = |item: PyResult<Bound<'_, PyAny>>| {
        let item = item?;
        if item.is_none() { Ok(None) } else { args::indices(&item)?.values(py).map(Some) }
    };
    sequence.try_iter()?.map(entry).collect()
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

    /// Takes the slots for positions `[prefix, seq)` of each request: prefill, chunk by chunk or at once.
    ///
    /// Args:
    ///     req_pool_indices: Rows, ints `[bs]`.
    ///     prefix_lens: Tokens that each request has, ints `[bs]`: 0 for a new one, or the length of its cached prefix.
    ///     seq_lens: Tokens that it will have, ints `[bs]`.
    ///     prefix_slots: Slots of cached prefixes: `None`, or a sequence with one entry for each request, `None` or ints.
    ///         They must be in use, and fill whole pages. The request becomes one more owner of them (see
    ///         `TokenToKVPoolAllocator.share`); the caller stays one.
    ///
    /// Returns:
    ///     A `BatchPlan`, or `None` when the pool is short. The slots are in the allocator's order, those of a partly used
    ///     page first.
    ///
    /// Waits only where it would otherwise answer `None`, for freed slots whose values are on their way from a GPU, and for
    /// arguments that only a GPU knows.
    ///
    /// Raises:
    ///     ConfigError: If lengths differ or do not fit what a request has, a row is named twice, cached slots do not fill
    ///         their prefix or their pages, or the batch is larger than the planner's.
    ///     IndexError: If a row or a length is outside of the table.
    ///     IndexOwnershipError: If a row was not taken, a cached slot is not in use, or somebody else freed the page that a
    ///         request goes on filling.
    ///     DriverError: If the driver refuses, or the stream is being captured.
    #[pyo3(signature = (req_pool_indices, prefix_lens, seq_lens, prefix_slots=None))]
    fn extend(
        slf: &Bound<'_, Self>,
        req_pool_indices: &Bound<'_, PyAny>,
        prefix_lens: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        prefix_slots: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<BatchPlan>> {
        let py = slf.py();
        let rows = values(py, req_pool_indices)?;
        let prefix_lens = values(py, prefix_lens)?.into_i64()?;
        let seq_lens = values(py, seq_lens)?.into_i64()?;
        let cached = prefix_slots.map_or(Ok(Vec::new()), |slots| cached(py, slots))?;
        if prefix_slots.is_some() && cached.len() != rows.len() {
            return Err(Error::config(format!(
                "a batch of {} rows and {} prefix_slots; there must be an entry for each",
                rows.len(),
                cached.len()
            ))
            .into());
        }
        let batch =
            Batch { rows: &rows, prefix_lens: &prefix_lens, seq_lens: &seq_lens, prefix_slots: &cached };
        let this = slf.get();
        let _acting = this.begin(py)?;
        let plan = this.planner.extend(batch, this.stream(py)?)?;
        Ok(plan.map(|plan| BatchPlan { planner: slf.clone().unbind(), plan }))
    }

    /// Takes the slots for the next tokens of each request: `extend` from `seq_lens - tokens_per_req` to `seq_lens`.
    ///
    /// Args:
    ///     req_pool_indices: Rows, ints `[bs]`.
    ///     seq_lens: Tokens of each request with the new ones, ints `[bs]`.
    ///     tokens_per_req: New tokens of each request; more than one for speculative decoding, after which `truncate` gives
    ///         back those that were rejected.
    ///     pad_to: Batch sizes of CUDA graphs, an int or a sequence: the batch is filled up to the least that it fits. A
    ///         padding request points at row 0, has `tokens_per_req` tokens at slot 0 (-1 in `slot_mapping`), all of them new,
    ///         and the padding page.
    ///
    /// Returns:
    ///     A `BatchPlan`, or `None` when the pool is short.
    ///
    /// Raises:
    ///     ConfigError: As `extend`; if the batch is larger than all of `pad_to`, or the table has no padding row.
    ///     IndexError: As `extend`.
    ///     IndexOwnershipError: As `extend`.
    ///     DriverError: As `extend`.
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
        Ok(plan.map(|plan| BatchPlan { planner: slf.clone().unbind(), plan }))
    }

    /// Shrinks requests, such as by tokens that were rejected. What the table holds beyond stays there, and is nobody's.
    ///
    /// Args:
    ///     req_pool_indices: Rows, ints `[bs]`.
    ///     seq_lens: Tokens that each keeps, ints `[bs]`.
    ///     after: As in `TokenToKVPoolAllocator.free`: the slots stay in use until its `query()` answers true.
    ///
    /// Raises:
    ///     ConfigError: If a request has less, or a row is named twice; nothing is changed then.
    ///     IndexError: If a row is outside of the table.
    ///     IndexOwnershipError: If a row was not taken, or a request would end within a page that has another owner, maybe
    ///         one behind a fence, which later tokens would overwrite; nothing is changed then. If the allocator is strict,
    ///         and somebody else freed a slot of the planner; all others were given back then.
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

    /// Gives back the slots and the rows of requests; the rows are zeroed.
    ///
    /// Args:
    ///     req_pool_indices: Rows, ints `[bs]`.
    ///     seq_lens: Tokens of each that have slots, ints `[bs]`; only checked.
    ///     after: As in `TokenToKVPoolAllocator.free`: the slots stay in use until its `query()` answers true.
    ///
    /// Raises:
    ///     ConfigError: If a length is not what the request has, or a row is named twice; nothing is changed then.
    ///     IndexError: If a row is outside of the table.
    ///     IndexOwnershipError: If a row was not taken; nothing is changed then. If the allocator is strict, and somebody
    ///         else freed a slot of the planner; all else was given back then.
    ///     DriverError: If the driver refuses to zero the rows; they are given back all the same.
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
        let (given, bad) = self.planner.finish(&rows, seq_lens.as_ref(), fence.as_ref(), self.stream(py)?)?;
        self.allocator.get().report(py, &bad, given);
        Ok(())
    }

    /// Gives a request that has nothing the first tokens of another, as parallel sampling does. Full pages are shared, each
    /// request being an owner; a partly used one is replaced by a new page, to which the caller copies.
    ///
    /// Args:
    ///     src: The row of the request that has the tokens.
    ///     dst: The row of the other.
    ///     seq_len: How many tokens.
    ///
    /// Returns:
    ///     `(dst_slots, src_slots)`, 1-D int32 tensors of the same length for `KVPool.move_kv`, empty where nothing is to be
    ///     copied (always with pages of one slot); or `None` when there is no page for it.
    ///
    /// Raises:
    ///     ConfigError: If `src` has less, `dst` has something, or they are the same.
    ///     IndexError: If a row is outside of the table.
    ///     IndexOwnershipError: If a row was not taken, or somebody else freed a page of `src`.
    ///     DriverError: If the driver refuses, or the stream is being captured.
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

    /// Tokens of a request that have slots.
    ///
    /// Raises:
    ///     IndexError: If the row is outside of the table.
    ///     IndexOwnershipError: If it was not taken.
    fn seq_len(&self, req_pool_idx: &Bound<'_, PyAny>) -> PyResult<u32> {
        let row = args::int(req_pool_idx)?;
        Ok(self.planner.seq_len(row)?)
    }

    /// The numbers of this planner: `requests` that have slots, their `tokens`, `plans` so far; `max_batch_size`,
    /// `max_tokens`, and `bytes` of the arrays on its device.
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

    /// Where slots come from.
    #[getter]
    fn allocator(&self, py: Python<'_>) -> Py<TokenToKvPoolAllocator> {
        self.allocator.clone_ref(py)
    }

    /// Requests in a batch, at most.
    #[getter]
    fn max_batch_size(&self) -> usize {
        self.planner.config().max_batch_size
    }

    /// New tokens in a batch, at most.
    #[getter]
    fn max_tokens(&self) -> usize {
        self.planner.config().max_tokens
    }

    /// Slots in a page.
    #[getter]
    fn page_size(&self) -> usize {
        self.allocator.get().pool.page_size()
    }

    /// Where the tensors are, as PyTorch writes it.
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

/// A step that a `BatchPlanner` planned: what attention kernels and samplers read.
///
/// The tensors are int32 (`slot_mapping` int64) views of the planner's memory, on its device and at the same addresses in
/// every plan, valid on the stream that was current then; the next plan of the planner overwrites them. After it they cannot
/// be asked for here any more (`StaleBufferError`). `B` is the padded number of requests, `T` that of new tokens.
#[pyclass(frozen, module = "kvpool", name = "BatchPlan", weakref)]
pub(super) struct BatchPlan {
    planner: Py<BatchPlanner>,
    plan: Plan,
}

impl BatchPlan {
    fn field(&self, py: Python<'_>, field: Field) -> PyResult<Option<Py<PyAny>>> {
        let planner = self.planner.get();
        let view = planner.planner.field(&self.plan, field)?;
        view.map(|view| planner.tensors.tensor(py, field as usize, (), &view)).transpose()
    }

    /// A field that every plan has.
    fn tensor(&self, py: Python<'_>, field: Field) -> PyResult<Py<PyAny>> {
        Ok(self.field(py, field)?.unwrap_or_else(|| py.None()))
    }
}

#[pymethods]
impl BatchPlan {
    /// Slots of the new tokens, `[T]`, one request after the other; 0 for padding. SGLang's name.
    #[getter]
    fn out_cache_loc(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.tensor(py, Field::OutCacheLoc)
    }

    /// Positions of the new tokens in their requests, `[T]`.
    #[getter]
    fn positions(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.tensor(py, Field::Positions)
    }

    /// Slots of the new tokens, int64 `[T]`; -1 for padding, which vLLM's kernels skip.
    #[getter]
    fn slot_mapping(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.tensor(py, Field::SlotMapping)
    }

    /// Rows of the request table, `[B]`; 0 for padding.
    #[getter]
    fn req_pool_indices(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.tensor(py, Field::ReqPoolIndices)
    }

    /// Tokens of each request with the new ones, `[B]`.
    #[getter]
    fn seq_lens(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.tensor(py, Field::SeqLens)
    }

    /// The same tensor as `seq_lens`, by FlashAttention's name (`flash_attn_with_kvcache`).
    #[getter]
    fn cache_seqlens(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.tensor(py, Field::SeqLens)
    }

    /// Where the new tokens of each request begin, and how many there are in all, `[B + 1]` (FlashInfer).
    #[getter]
    fn qo_indptr(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.tensor(py, Field::QoIndptr)
    }

    /// The same tensor as `qo_indptr`, by FlashAttention's name (`flash_attn_varlen_func`).
    #[getter]
    fn cu_seqlens_q(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.tensor(py, Field::QoIndptr)
    }

    /// Where the pages of each request begin in `kv_indices`, and how many there are in all, `[B + 1]` (FlashInfer).
    #[getter]
    fn kv_indptr(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.tensor(py, Field::KvIndptr)
    }

    /// The pages of all requests, one after the other, `[kv_indptr[-1]]` (FlashInfer); with pages of one slot, their slots.
    /// `None` if the planner does not make it.
    #[getter]
    fn kv_indices(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.field(py, Field::KvIndices)
    }

    /// Tokens in the last page of each request, `[B]`, 1 to `page_size` (FlashInfer); 0 for a request without tokens.
    #[getter]
    fn kv_last_page_len(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.tensor(py, Field::KvLastPageLen)
    }

    /// The pages of each request, `[B, ceil(max_context_len / page_size)]`, zeros after them (FlashAttention and vLLM).
    /// `None` if the planner does not make it.
    #[getter]
    fn block_table(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.field(py, Field::BlockTable)
    }

    /// The same arrays on the host.
    #[getter]
    fn host(&self, py: Python<'_>) -> HostPlan {
        HostPlan { planner: self.planner.clone_ref(py), plan: self.plan }
    }

    /// Requests, padding not counted.
    #[getter]
    fn batch_size(&self) -> usize {
        self.plan.batch_size
    }

    /// Requests with padding: `B`.
    #[getter]
    fn padded_batch_size(&self) -> usize {
        self.plan.padded_batch_size
    }

    /// New tokens, padding not counted.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.plan.num_tokens
    }

    /// New tokens with those of padding: `T`.
    #[getter]
    fn padded_num_tokens(&self) -> usize {
        self.plan.padded_num_tokens
    }

    /// The most new tokens of a request, by FlashAttention's name.
    #[getter]
    fn max_seqlen_q(&self) -> usize {
        self.plan.max_seqlen_q
    }

    /// The most tokens of a request, by FlashAttention's name.
    #[getter]
    fn max_seqlen_k(&self) -> usize {
        self.plan.max_seqlen_k
    }

    fn __repr__(&self) -> String {
        format!(
            "BatchPlan(batch_size={}, num_tokens={}, max_seqlen_q={}, max_seqlen_k={}, padded_batch_size={})",
            self.plan.batch_size,
            self.plan.num_tokens,
            self.plan.max_seqlen_q,
            self.plan.max_seqlen_k,
            self.plan.padded_batch_size
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.planner)
    }
}

/// The arrays of a `BatchPlan` on the host: read-only NumPy arrays, in the planner's memory, which the next plan overwrites.
///
/// On a GPU `kv_indices` and `block_table` are made when they are asked for, which is an error (`StaleBufferError`) after
/// `truncate`, `finish` or `fork`. Without NumPy they are `kvpool.Tensor`.
#[pyclass(frozen, module = "kvpool", name = "HostPlan")]
pub(super) struct HostPlan {
    planner: Py<BatchPlanner>,
    plan: Plan,
}

impl HostPlan {
    fn field<'py>(&self, py: Python<'py>, field: Field) -> PyResult<Option<Bound<'py, PyAny>>> {
        let view = self.planner.get().planner.host_field(&self.plan, field)?;
        let Some(view) = view else { return Ok(None) };
        let tensor = Bound::new(py, Tensor::new(view))?.into_any();
        if py.import("numpy").is_err() {
            return Ok(Some(tensor));
        }
        let array = tensor.call_method0("numpy")?;
        array.call_method1("setflags", (false,))?;
        Ok(Some(array))
    }

    /// A field that every plan has.
    fn array<'py>(&self, py: Python<'py>, field: Field) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.field(py, field)?.unwrap_or_else(|| py.None().into_bound(py)))
    }
}

#[pymethods]
impl HostPlan {
    /// As `BatchPlan.out_cache_loc`.
    #[getter]
    fn out_cache_loc<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Field::OutCacheLoc)
    }

    /// As `BatchPlan.positions`.
    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Field::Positions)
    }

    /// As `BatchPlan.slot_mapping`.
    #[getter]
    fn slot_mapping<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Field::SlotMapping)
    }

    /// As `BatchPlan.req_pool_indices`.
    #[getter]
    fn req_pool_indices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Field::ReqPoolIndices)
    }

    /// As `BatchPlan.seq_lens`.
    #[getter]
    fn seq_lens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Field::SeqLens)
    }

    /// As `BatchPlan.cache_seqlens`.
    #[getter]
    fn cache_seqlens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Field::SeqLens)
    }

    /// As `BatchPlan.qo_indptr`.
    #[getter]
    fn qo_indptr<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Field::QoIndptr)
    }

    /// As `BatchPlan.cu_seqlens_q`.
    #[getter]
    fn cu_seqlens_q<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Field::QoIndptr)
    }

    /// As `BatchPlan.kv_indptr`.
    #[getter]
    fn kv_indptr<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Field::KvIndptr)
    }

    /// As `BatchPlan.kv_indices`.
    #[getter]
    fn kv_indices<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.field(py, Field::KvIndices)
    }

    /// As `BatchPlan.kv_last_page_len`.
    #[getter]
    fn kv_last_page_len<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.array(py, Field::KvLastPageLen)
    }

    /// As `BatchPlan.block_table`.
    #[getter]
    fn block_table<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.field(py, Field::BlockTable)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.planner)
    }
}
