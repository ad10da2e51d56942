//! `kvpool.TokenToKVPoolAllocator`.

use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::base::{Device, Id, Slot};
use crate::index::BadFrees;
use crate::memory::{Keep, Stream};
use crate::pool::{AllocatorConfig, Grant, Notice, OnNotice, TokenToKvPoolAllocator as Pool};
use crate::tensor::TensorView;

use super::args::{self, Arg, IndexArg};
use super::base_pool::{BasePool, Look, PoolClass};
use super::debug::Debug;
use super::export::to_tensor;
use super::fences::{fence, traverse};
use super::framework::{backend, current_stream};
use super::kv_pool::KvPool;
use super::logging::{Reporter, warn};

/// Hands out the token slots of a `KVPool` as int32 tensors and takes them back.
///
/// With `need_sort` the lowest free slots come first, and freed ones are kept apart until the others cannot serve a
/// request; without, the longest free come first. With `page_size > 1` slots leave and return as whole pages
/// `[p * page_size, (p + 1) * page_size)`, numbered from 1. Slot 0 is never handed out.
///
/// A slot that is out of range, the padding slot, not allocated, already free or named twice in one call is dropped,
/// counted in `stats()` and reported once through the logger `kvpool`; with `strict` it raises instead, and nothing
/// is changed. All calls are atomic and may come from any thread.
///
/// On a GPU tensors are parts of a stage, to which the next slots are copied before anybody asks for them: `alloc` and
/// `free` then make no driver call, and nothing waits but what says so. Tensors are valid on the stream that was
/// current in `alloc`; another stream needs an event. Nothing is allocated on the device after construction, so tensors
/// that are kept although their slots were freed take room from later ones: the stage holds twice the pool's slots.
///
/// `free` knows the values of a tensor without asking the GPU if it is one from `alloc` (of this or another
/// allocator) or of `ReqToTokenPool.req_to_token`, or a view of such a tensor with evenly spaced elements, and PyTorch
/// counts no write to it (`_version`; for the table, none that `mark_modified` did not account for). What PyTorch does
/// not count is not seen: writes through `.data`, through another framework's view, or by a kernel that it does not
/// know of; do not write to these tensors in such a way, or free a copy. Every other tensor on a GPU, computed or of
/// somebody else, is copied asynchronously on the current stream, and its slots return when the copy has landed. Until
/// then `available_size` counts them, as whole pages of their own.
///
/// Args:
///     size: Slots; the last partial page is never handed out.
///     device: Where the index tensors are.
///     page_size: Slots in a page.
///     need_sort: Lowest first, else first in, first out.
///     strict: Whether a bad free raises.
///     debug: Whether to note who takes and gives what, for `leaks` and reports; by default if `KVPOOL_DEBUG=1`.
///
/// Raises:
///     ConfigError: If `size` or `page_size` is below 1, or a slot would not fit int32.
///     BackendUnavailableError: If `device` cannot be used here.
#[pyclass(extends = BasePool, frozen, module = "kvpool", name = "TokenToKVPoolAllocator")]
pub(super) struct TokenToKvPoolAllocator {
    pub(super) pool: Arc<Pool>,
    device: Device,
    pub(super) debug: Debug,
    reporter: Arc<Reporter>,
}

impl TokenToKvPoolAllocator {
    /// The stream for calls that enqueue work only where the pool debugs: rows are poisoned on it.
    pub(super) fn debug_stream(&self, py: Python<'_>) -> PyResult<Stream> {
        if self.debug.is_on() { current_stream(py, self.device) } else { Ok(Stream::DEFAULT) }
    }

    pub(super) fn report(&self, py: Python<'_>, bad: &BadFrees, given: usize) {
        self.reporter.bad_frees(py, bad, Slot::NOUN, given, self.debug);
    }
}

/// Logs what an allocator finds late.
fn on_notice(reporter: Arc<Reporter>, debug: Debug) -> OnNotice {
    Box::new(move |notice| {
        Python::attach(|py| match notice {
            Notice::BadFrees(bad, given) => reporter.bad_frees(py, bad, Slot::NOUN, given, debug),
            Notice::NotPoisoned(error) => warn(py, &format!("freed rows are not poisoned: {error}")),
        });
    })
}

/// Hands slots to Python. If that fails they go back: no caller would free them.
fn hand_out(py: Python<'_>, grant: Option<Grant<'_>>) -> PyResult<Option<Py<PyAny>>> {
    let Some(grant) = grant else { return Ok(None) };
    let tensor = to_tensor(py, grant.view())?;
    let _ = grant.keep();
    Ok(Some(tensor))
}

impl PoolClass for TokenToKvPoolAllocator {
    fn look(&self, look: Look<'_>) {
        look(&*self.pool);
    }

    /// Of a strict pool it leaves frees pending, as what is wrong with them is to be raised where slots are used.
    fn before_stats(&self, py: Python<'_>) -> PyResult<()> {
        let stream = self.debug_stream(py)?;
        Ok(if self.pool.strict() { self.pool.poll_fences(stream) } else { self.pool.poll(stream) }?)
    }

    fn before_occupancy(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.pool.settle(self.debug_stream(py)?)?)
    }
}

#[pymethods]
impl TokenToKvPoolAllocator {
    #[new]
    #[pyo3(signature = (size, device=None, page_size=Arg::Missing, need_sort=true, *, strict=false, debug=None),
           text_signature = "(size, device=\"cuda\", page_size=1, need_sort=True, *, strict=False, debug=None)")]
    fn new(
        py: Python<'_>,
        size: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        page_size: Arg<'_>,
        need_sort: bool,
        strict: bool,
        debug: Option<bool>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let size = args::size("size", size)?;
        let page_size = page_size.size("page_size", 1)?;
        let device = args::device(device)?;
        let backend = backend(py, device)?;
        let config = AllocatorConfig { size, page_size, need_sort, strict };
        let mut pool = py.detach(|| Pool::new(&config, &backend))?;
        let debug = Debug::new(debug, &mut pool);
        let reporter = Arc::new(Reporter::default());
        pool.on_notice(on_notice(Arc::clone(&reporter), debug));
        let allocator = Self { pool: Arc::new(pool), device, debug, reporter };
        Ok(BasePool::initializer("TokenToKVPoolAllocator", debug, allocator))
    }

    /// Takes slots.
    ///
    /// Args:
    ///     need_size: How many.
    ///     contiguous: One ascending run, the lowest that fits.
    ///     owner: A name for reports and `leaks`, a str or an int. Only noted where the pool debugs.
    ///
    /// Returns:
    ///     A 1-D int32 tensor of `need_size` slots on the pool's device, over memory that it owns, or `None` when the
    ///     pool is short. With pages, the rest of the last page belongs to the caller, too.
    ///
    /// Waits only where it would otherwise answer `None`, for freed slots whose values are on their way from a GPU, and where
    /// the GPU is far behind with slots that were handed out before.
    ///
    /// Raises:
    ///     ConfigError: If `need_size` is negative.
    ///     TypeError: If it is no int.
    ///     OutOfMemoryError: If tensors that are still alive cover the stage. Nothing is taken.
    ///     DriverError: If the driver refuses, or the stream is being captured. Nothing is taken.
    #[pyo3(signature = (need_size, *, contiguous=false, owner=None))]
    fn alloc(
        &self,
        py: Python<'_>,
        need_size: &Bound<'_, PyAny>,
        contiguous: bool,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let count = args::count("need_size", need_size)?;
        let _acting = self.debug.begin(py, owner)?;
        let stream = current_stream(py, self.device)?;
        let pool = &self.pool;
        hand_out(
            py,
            if contiguous { pool.alloc_contiguous(count, stream) } else { pool.alloc(count, stream) }?,
        )
    }

    /// Takes the slots for positions `[prefix, seq)` of each request, as SGLang's paged allocator does.
    ///
    /// A prefix that ends inside a page is continued from `last_loc + 1`; then new pages are taken. Arguments that
    /// only a GPU knows are waited for.
    ///
    /// Args:
    ///     prefix_lens: Tokens that each request has, ints `[bs]`.
    ///     seq_lens: Tokens that it will have, ints `[bs]`.
    ///     last_loc: The slot of its last token, ints `[bs]`; ignored where the prefix fills its pages.
    ///     owner: As in `alloc`.
    ///
    /// Returns:
    ///     A 1-D int32 tensor of `sum(seq_lens - prefix_lens)` slots, the requests concatenated, or `None` when the
    ///     pool is short.
    ///
    /// Raises:
    ///     ConfigError: If lengths differ, are negative or shrink, or `last_loc` does not end its prefix.
    ///     IndexOwnershipError: If `last_loc` is in nobody's page, or two requests would continue the same page.
    #[pyo3(signature = (prefix_lens, seq_lens, last_loc, *, owner=None))]
    fn alloc_extend(
        &self,
        py: Python<'_>,
        prefix_lens: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        last_loc: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let _acting = self.debug.begin(py, owner)?;
        let prefix_lens = args::indices(prefix_lens)?.values(py)?.into_i64()?;
        let seq_lens = args::indices(seq_lens)?.values(py)?.into_i64()?;
        let last_loc = args::indices(last_loc)?.values(py)?.into_i64()?;
        let stream = current_stream(py, self.device)?;
        hand_out(py, self.pool.alloc_extend(&prefix_lens, &seq_lens, &last_loc, stream)?)
    }

    /// Takes one slot for each request of a decode step: `alloc_extend` from `seq_lens - 1` to `seq_lens`.
    ///
    /// Args:
    ///     seq_lens: Tokens of each request with the new one, ints `[bs]`.
    ///     last_loc: The slot of the token before the new one, ints `[bs]`.
    ///     owner: As in `alloc`.
    ///
    /// Returns:
    ///     A 1-D int32 tensor `[bs]`, or `None` when the pool is short.
    ///
    /// Raises:
    ///     ConfigError: As `alloc_extend`.
    ///     IndexOwnershipError: As `alloc_extend`.
    #[pyo3(signature = (seq_lens, last_loc, *, owner=None))]
    fn alloc_decode(
        &self,
        py: Python<'_>,
        seq_lens: &Bound<'_, PyAny>,
        last_loc: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let _acting = self.debug.begin(py, owner)?;
        let seq_lens = args::indices(seq_lens)?.values(py)?.into_i64()?;
        let last_loc = args::indices(last_loc)?.values(py)?.into_i64()?;
        let stream = current_stream(py, self.device)?;
        hand_out(py, self.pool.alloc_decode(&seq_lens, &last_loc, stream)?)
    }

    /// Gives slots back; with pages, the whole page of every slot, once.
    ///
    /// The values are copied, so the caller may overwrite its tensor at once. Waits for nothing, unless more values
    /// are on their way from a GPU than the pool has slots. What a GPU alone knows is copied in the order of the
    /// current stream, and what is wrong with it is found by a later call.
    ///
    /// Args:
    ///     indices: Slots, an int tensor or array of any shape or a sequence of ints.
    ///     after: Something with `query() -> bool`, such as a `torch.cuda.Event`. The slots stay in use until it
    ///         answers true; later calls ask it.
    ///     owner: As in `alloc`; of a slot with several owners, the one of that name leaves, or else the first.
    ///
    /// Raises:
    ///     IndexOwnershipError: If the pool is strict and a slot is not the caller's to free; of values that a GPU
    ///         alone knew, a later call raises it, and none of them was freed.
    ///     TypeError: If `indices` holds no ints, or `after` has no `query`.
    #[pyo3(signature = (indices, *, after=None, owner=None))]
    fn free(
        &self,
        py: Python<'_>,
        indices: &Bound<'_, PyAny>,
        after: Option<&Bound<'_, PyAny>>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let object = indices;
        let (mut indices, fence) = (args::indices(object)?, fence(after)?);
        let _acting = self.debug.begin(py, owner)?;
        let given = indices.len()?;
        let stream = match &indices {
            IndexArg::Host(_) => self.debug_stream(py)?,
            IndexArg::Device { .. } => indices.stream(py, self.device)?,
        };
        // PyTorch may use a tensor's memory again, in the order of another stream, as soon as the tensor is gone.
        let keep = || Some(Arc::new(object.clone().unbind()) as Keep);
        let bad = self.pool.free(&indices.take()?, fence.as_ref(), keep, stream)?;
        self.report(py, &bad, given);
        Ok(())
    }

    /// Notes that work on a stream reads slots that this allocator handed out, so that their memory is used again after that
    /// work only, also when the tensor is gone before. Calls of kvpool note it themselves; a kernel of others that reads the
    /// tensor on another stream than the one that was current in `alloc` needs this, as `Tensor.record_stream` has no
    /// effect on memory that is not PyTorch's own.
    ///
    /// Args:
    ///     tensor: A tensor that `alloc` returned, or a view of one.
    ///     stream: A `torch.cuda.Stream`, or the handle of a stream; the current one by default. It must live as long as the
    ///         allocator.
    ///
    /// Raises:
    ///     ConfigError: If the tensor is none of this allocator's.
    #[pyo3(signature = (tensor, stream=None))]
    fn used_on(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let stream = stream.map_or_else(|| current_stream(py, self.device), args::stream)?;
        let given = args::tensor("tensor", tensor)?;
        let borrowed = given.borrow()?;
        Ok(self.pool.used_on(&borrowed, stream)?)
    }

    /// Adds an owner to slots, as a prefix cache does whose requests share it; with pages, to the page of every slot, once.
    /// Each owner frees once, and a slot returns with its last owner. A slot that is named twice in one call has two owners
    /// more, or gives up two of them in `free`; a page has one.
    ///
    /// Args:
    ///     indices: Slots, an int tensor or array of any shape or a sequence of ints. A tensor that only a GPU knows is
    ///         waited for.
    ///     owner: As in `alloc`.
    ///
    /// Raises:
    ///     IndexOwnershipError: If a slot is not in use; nothing is changed then.
    #[pyo3(signature = (indices, *, owner=None))]
    fn share(
        &self,
        py: Python<'_>,
        indices: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let values = args::indices(indices)?.values(py)?;
        let stream = self.debug_stream(py)?;
        self.pool.settle(stream)?;
        let _acting = self.debug.begin(py, owner)?;
        Ok(self.pool.share(&values, stream)?)
    }

    /// Starts to collect frees, by value, of whichever thread. Groups nest. Frees behind a fence are not collected.
    fn free_group_begin(&self) {
        self.pool.free_group_begin();
    }

    /// Ends a group; the outermost frees all that was collected as one call.
    ///
    /// Raises:
    ///     ConfigError: If no group is open.
    ///     IndexOwnershipError: As `free`; the group is closed, and nothing of it was freed.
    fn free_group_end(&self, py: Python<'_>) -> PyResult<()> {
        let _acting = self.debug.begin(py, None)?;
        let (given, bad) = self.pool.free_group_end(self.debug_stream(py)?)?;
        self.report(py, &bad, given);
        Ok(())
    }

    /// A context manager around `free_group_begin` and `free_group_end`.
    fn free_group(slf: &Bound<'_, Self>) -> FreeGroup {
        FreeGroup { allocator: slf.clone().unbind() }
    }

    /// Tokens that can be handed out, those counted in whose values are on their way from a GPU.
    fn available_size(&self, py: Python<'_>) -> PyResult<usize> {
        self.pool.poll(self.debug_stream(py)?)?;
        Ok(self.pool.available_size())
    }

    /// Makes every slot free, closes groups and forgets fences. Tensors handed out before must not be used.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let _acting = self.debug.begin(py, None)?;
        self.pool.clear(self.debug_stream(py)?);
        Ok(())
    }

    /// Has rows of a `KVPool` poisoned when their slots become free, so that reading one shows: NaN in floats, -1 in int8,
    /// 255 in uint8, in all layers, written on the stream that is current then. Where the pool does not debug nothing
    /// happens.
    ///
    /// Args:
    ///     kv_pool: The `KVPool` whose rows the slots are. It is not kept alive.
    fn poison_freed(&self, kv_pool: &Bound<'_, KvPool>) {
        self.pool.poison_freed(kv_pool.get().shared());
    }

    /// Merges the freed slots into those that are handed out next.
    fn merge_and_sort_free(&self) {
        self.pool.merge_and_sort_free();
    }

    /// The free slots (pages, with pages), in the order in which they are handed out: a new 1-D int32 tensor. Waits
    /// for values on their way.
    #[getter]
    fn free_slots(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_tensor(py, &self.pool.free_slots(current_stream(py, self.device)?)?)
    }

    /// The freed slots (pages, with pages) that wait for a merge, lowest first: a new 1-D int32 tensor. Waits for
    /// values on their way.
    #[getter]
    fn release_slots(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_tensor(py, &self.pool.release_slots(current_stream(py, self.device)?)?)
    }

    /// The maximal ascending runs of `indices`, in order.
    ///
    /// Args:
    ///     indices: An int tensor or array of any shape or a sequence of ints.
    ///
    /// Returns:
    ///     An int32 tensor `[k, 2]` of (start, length) on the host: what DMA and transfer descriptors want.
    #[staticmethod]
    fn runs(py: Python<'_>, indices: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        to_tensor(py, &Pool::runs(&args::indices(indices)?.values(py)?)?)
    }

    /// Whether each slot is in use: live, or freed behind a fence that has not passed. Waits for values on their way.
    ///
    /// Args:
    ///     indices: An int tensor or array of any shape or a sequence of ints.
    ///
    /// Returns:
    ///     A 1-D bool tensor on the host; false for what is no slot.
    fn is_allocated(&self, py: Python<'_>, indices: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let values = args::indices(indices)?.values(py)?;
        self.pool.settle(self.debug_stream(py)?)?;
        let answers: Vec<bool> = self.pool.look(|slots| slots.is_allocated(&values).collect());
        to_tensor(py, &TensorView::from_bools(&answers)?)
    }

    /// Checks that free and live slots make up the pool, and that no slot is in two states. Waits for values on their
    /// way.
    ///
    /// Raises:
    ///     IndexOwnershipError: If not, with what is wrong.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        self.pool.settle(self.debug_stream(py)?)?;
        Ok(self.pool.verify()?)
    }

    /// Slots asked for at construction.
    #[getter]
    fn size(&self) -> usize {
        self.pool.look(|slots| slots.size())
    }

    /// Slots in a page.
    #[getter]
    fn page_size(&self) -> usize {
        self.pool.page_size()
    }

    /// Whether the lowest free slots are handed out first.
    #[getter]
    fn need_sort(&self) -> bool {
        self.pool.need_sort()
    }

    fn __repr__(&self) -> String {
        format!(
            "TokenToKVPoolAllocator(size={}, device='{}', page_size={}, available={})",
            self.size(),
            self.device,
            self.page_size(),
            self.pool.available_size()
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        traverse(&self.pool, &visit)
    }

    fn __clear__(&self) {
        self.pool.forget_fences();
    }
}

/// What `TokenToKVPoolAllocator.free_group` returns: frees within it are released together at its end.
#[pyclass(frozen, module = "kvpool", name = "FreeGroup")]
pub(super) struct FreeGroup {
    allocator: Py<TokenToKvPoolAllocator>,
}

#[pymethods]
impl FreeGroup {
    fn __enter__(&self) {
        self.allocator.get().free_group_begin();
    }

    /// Ends the group. What the body raised goes on; what the end finds wrong with its slots is logged then.
    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        let allocator = self.allocator.get();
        if !allocator.pool.look(|slots| slots.in_group()) {
            // The body cleared the pool, and the group with it.
            return Ok(());
        }
        let body_raised = exception.get_item(0).is_ok_and(|kind| !kind.is_none());
        match allocator.free_group_end(py) {
            Err(error) if body_raised => {
                warn(py, &format!("a group of frees failed while another exception passed: {error}"));
                Ok(())
            }
            answer => answer,
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.allocator)
    }
}
