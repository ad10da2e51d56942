//! `kvpool.TokenToKVPoolAllocator`.

use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyTuple};

use crate::base::{Device, Id, Page, Slot, Waits, Watched};
use crate::index::{BadFrees, FenceId};
use crate::memory::{Keep, Stream};
use crate::pool::TokenToKvPoolAllocator as Pool;
use crate::tensor::TensorView;

use super::args::{Arg, IndexArg};
use super::debug::{self, Debug, Occupancy};
use super::export::to_tensor;
use super::fences::Fences;
use super::framework::{backend, current_stream};
use super::kv_pool::KvPool;
use super::pool::Pool as Base;
use super::report::{Reporter, warn};
use super::{args, lock, with};

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
#[pyclass(extends = Base, frozen, module = "kvpool", name = "TokenToKVPoolAllocator")]
pub(super) struct TokenToKvPoolAllocator {
    /// In which frees may wait for their values to land.
    pub(super) pool: Watched<Pool>,
    fences: Fences,
    device: Device,
    pub(super) debug: Debug,
    reporter: Reporter,
}

impl TokenToKvPoolAllocator {
    /// Frees what lies behind fences that have passed.
    ///
    /// A fence that uses the allocator in its `query` finds the others as they are: polls do not nest.
    #[inline]
    pub(super) fn poll(&self, py: Python<'_>) -> PyResult<()> {
        if self.pool.waits() {
            self.settle(py)?;
        }
        if self.fences.is_empty() { Ok(()) } else { self.poll_fences(py) }
    }

    fn poll_fences(&self, py: Python<'_>) -> PyResult<()> {
        let (passed, interrupt) = self.fences.passed(py);
        if !passed.is_empty() {
            // What has passed is freed, also if somebody wants to stop the program.
            self.freeing(py, |pool| {
                for &id in &passed {
                    pool.fence_passed(id);
                }
                Ok(())
            })?;
            self.fences.remove(&passed);
        }
        interrupt.map_or(Ok(()), Err)
    }

    /// Completes frees whose values have landed, and reports what was wrong with them.
    fn settle(&self, py: Python<'_>) -> PyResult<()> {
        let mut settled = Vec::new();
        let answer = self.freeing(py, |pool| pool.settle(&mut settled));
        for settled in settled {
            self.report(py, &settled.bad, settled.given);
        }
        answer
    }

    /// Does `work` under the lock; where somebody debugs, poisons the rows of the slots that it makes free.
    fn freeing<R>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Pool) -> crate::base::Result<R>,
    ) -> PyResult<R> {
        if !self.debug.is_on() {
            return with(&self.pool, work);
        }
        let stream = current_stream(py, self.device)?;
        let (answer, poisoned) = {
            let mut pool = lock(&self.pool);
            // Nobody may get the slots before their rows are poisoned.
            (work(&mut pool), pool.poison(stream))
        };
        if let Err(error) = poisoned {
            warn(py, &format!("freed rows are not poisoned: {error}"));
        }
        Ok(answer?)
    }

    /// Waits for the oldest free whose values have not landed, and completes it. `false` when there is none.
    fn wait_for_oldest(&self, py: Python<'_>) -> PyResult<bool> {
        let oldest = {
            let pool = lock(&self.pool);
            if !pool.waits() {
                return Ok(false);
            }
            pool.unsettled()
        };
        // No lock is held meanwhile: others go on.
        if let Some(oldest) = oldest {
            py.detach(|| oldest.wait())?;
        }
        self.settle(py)?;
        Ok(true)
    }

    /// As [`Self::poll`], and waits for every free whose values have not landed.
    fn wait_for_all(&self, py: Python<'_>) -> PyResult<()> {
        while self.wait_for_oldest(py)? {}
        self.poll(py)
    }

    /// What `take` takes, after waiting for frees to land if it must.
    pub(super) fn take<T>(
        &self,
        py: Python<'_>,
        mut take: impl FnMut(&mut Pool, Stream) -> crate::base::Result<Option<T>>,
    ) -> PyResult<Option<T>> {
        self.poll(py)?;
        let stream = current_stream(py, self.device)?;
        loop {
            let taken = with(&self.pool, |pool| match pool.crowded() {
                Some(event) => Ok(Err(event)),
                None => take(pool, stream).map(Ok),
            })?;
            let taken = match taken {
                Ok(taken) => taken,
                Err(event) => {
                    py.detach(|| event.wait())?;
                    continue;
                }
            };
            if taken.is_some() || !self.wait_for_oldest(py)? {
                return Ok(taken);
            }
        }
    }

    pub(super) fn report(&self, py: Python<'_>, bad: &BadFrees, given: usize) {
        self.reporter.bad_frees(py, bad, Slot::NOUN, given, self.debug);
    }

    /// Frees what `free` frees, behind a fence if there is one.
    ///
    /// # Errors
    /// `TypeError` if the fence cannot be asked; what `free` says.
    pub(super) fn give<R>(
        &self,
        py: Python<'_>,
        after: Option<&Bound<'_, PyAny>>,
        free: impl FnOnce(&mut Pool, Option<FenceId>) -> crate::base::Result<R>,
    ) -> PyResult<R> {
        if let Some(fence) = after
            && !fence.getattr("query").is_ok_and(|query| query.is_callable())
        {
            return Err(PyTypeError::new_err("after must have a method query() -> bool"));
        }
        self.freeing(py, |pool| {
            let fence = after.map(|object| (pool.new_fence(), object));
            let answer = free(pool, fence.map(|(id, _)| id));
            // Some of it may have been freed all the same.
            if let Some((id, object)) = fence
                && (answer.is_ok() || pool.slots().is_awaited(id))
            {
                // The pool's lock is still held, so that no `clear` comes between the slots and their fence.
                self.fences.add(id, object);
            }
            answer
        })
    }

    /// Hands `view` to Python; if that fails, nobody else would ever give its slots back.
    fn hand_out(&self, py: Python<'_>, view: &TensorView, continued: &[Page]) -> PyResult<Option<Py<PyAny>>> {
        to_tensor(py, view).map(Some).inspect_err(|_| lock(&self.pool).undo(view, continued))
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
        let mut pool = py.detach(|| Pool::new(size, &backend, page_size, need_sort, strict))?;
        let debug = Debug::new(debug);
        if debug.is_on() {
            pool.keep_ledger();
        }
        let allocator = Self {
            pool: Watched::new(pool),
            fences: Fences::default(),
            device,
            debug,
            reporter: Reporter::default(),
        };
        Ok(PyClassInitializer::from(Base::new("TokenToKVPoolAllocator", Slot::NOUN, debug))
            .add_subclass(allocator))
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
        let taken = self.take(py, |pool, stream| {
            if contiguous { pool.alloc_contiguous(count, stream) } else { pool.alloc(count, stream) }
        })?;
        taken.map_or(Ok(None), |view| self.hand_out(py, &view, &[]))
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
        let taken =
            self.take(py, |pool, stream| pool.alloc_extend(&prefix_lens, &seq_lens, &last_loc, stream))?;
        taken.map_or(Ok(None), |(view, continued)| self.hand_out(py, &view, &continued))
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
        let taken = self.take(py, |pool, stream| pool.alloc_decode(&seq_lens, &last_loc, stream))?;
        taken.map_or(Ok(None), |(view, continued)| self.hand_out(py, &view, &continued))
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
        let mut indices = args::indices(object)?;
        self.poll(py)?;
        let _acting = self.debug.begin(py, owner)?;
        let given = indices.len()?;
        let bad = if let IndexArg::Host(values) = &indices {
            self.give(py, after, |pool, fence| pool.free(values, fence))?
        } else {
            let stream = indices.stream(py, self.device)?;
            let indices = indices.take()?;
            // PyTorch may use a tensor's memory again, in the order of another stream, as soon as the tensor is gone.
            let keep = || Some(Arc::new(object.clone().unbind()) as Keep);
            self.give(py, after, |pool, fence| pool.free_anywhere(&indices, fence, keep, stream))?
        };
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
        with(&self.pool, |pool| pool.used_on(&borrowed, stream))
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
        self.wait_for_all(py)?;
        let _acting = self.debug.begin(py, owner)?;
        with(&self.pool, |pool| pool.share(&values))
    }

    /// Starts to collect frees, by value, of whichever thread. Groups nest. Frees behind a fence are not collected.
    fn free_group_begin(&self) {
        lock(&self.pool).free_group_begin();
    }

    /// Ends a group; the outermost frees all that was collected as one call.
    ///
    /// Raises:
    ///     ConfigError: If no group is open.
    ///     IndexOwnershipError: As `free`; the group is closed, and nothing of it was freed.
    fn free_group_end(&self, py: Python<'_>) -> PyResult<()> {
        let _acting = self.debug.begin(py, None)?;
        let (given, bad) = self.freeing(py, Pool::free_group_end)?;
        self.report(py, &bad, given);
        Ok(())
    }

    /// A context manager around `free_group_begin` and `free_group_end`.
    fn free_group(slf: &Bound<'_, Self>) -> FreeGroup {
        FreeGroup { allocator: slf.clone().unbind() }
    }

    /// Tokens that can be handed out, those counted in whose values are on their way from a GPU.
    fn available_size(&self, py: Python<'_>) -> PyResult<usize> {
        self.poll(py)?;
        Ok(lock(&self.pool).available_size())
    }

    /// Makes every slot free, closes groups and forgets fences. Tensors handed out before must not be used.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let _acting = self.debug.begin(py, None)?;
        let gone = self.freeing(py, |pool| {
            // Dropping them may run Python code.
            Ok((self.fences.take(), pool.clear()))
        })?;
        drop(gone);
        Ok(())
    }

    /// Has rows of a `KVPool` poisoned when their slots become free, so that reading one shows: NaN in floats, -1 in int8,
    /// 255 in uint8, in all layers, written on the stream that is current then. Where the pool does not debug nothing
    /// happens.
    ///
    /// Args:
    ///     kv_pool: The `KVPool` whose rows the slots are. It is not kept alive.
    fn poison_freed(&self, kv_pool: &Bound<'_, KvPool>) {
        lock(&self.pool).poison_freed(kv_pool.get().shared());
    }

    /// What stands in the pool, in slots: (first, end, state, bytes, holders) of each span, and lifetimes.
    fn _occupancy<'py>(&self, py: Python<'py>) -> PyResult<Occupancy<'py>> {
        self.wait_for_all(py)?;
        let (spans, lifetimes, page_size) = {
            let pool = lock(&self.pool);
            let slots = pool.slots();
            (slots.spans(), debug::lifetimes(slots.book()), slots.page_size())
        };
        // A page has at most as many slots as there are int32s.
        let page_size = u32::try_from(page_size).unwrap_or(u32::MAX);
        debug::occupancy(py, debug::even(spans), lifetimes, page_size)
    }

    /// Merges the freed slots into those that are handed out next.
    fn merge_and_sort_free(&self) {
        lock(&self.pool).merge_and_sort_free();
    }

    /// The free slots (pages, with pages), in the order in which they are handed out: a new 1-D int32 tensor. Waits
    /// for values on their way.
    #[getter]
    fn free_slots(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.wait_for_all(py)?;
        let stream = current_stream(py, self.device)?;
        let view = with(&self.pool, |pool| pool.free_slots(stream))?;
        to_tensor(py, &view)
    }

    /// The freed slots (pages, with pages) that wait for a merge, lowest first: a new 1-D int32 tensor. Waits for
    /// values on their way.
    #[getter]
    fn release_slots(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.wait_for_all(py)?;
        let stream = current_stream(py, self.device)?;
        let view = with(&self.pool, |pool| pool.release_slots(stream))?;
        to_tensor(py, &view)
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
        self.wait_for_all(py)?;
        let answers: Vec<bool> = lock(&self.pool).slots().is_allocated(&values).collect();
        to_tensor(py, &TensorView::from_bools(&answers)?)
    }

    /// Checks that free and live slots make up the pool, and that no slot is in two states. Waits for values on their
    /// way.
    ///
    /// Raises:
    ///     IndexOwnershipError: If not, with what is wrong.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        self.wait_for_all(py)?;
        with(&self.pool, |pool| pool.verify())
    }

    /// The numbers of this pool, in slots: `capacity`, `available`, `in_use`, `high_water`, `dropped_frees`, `free`,
    /// `released`, `fenced`, `shared` (with more than one owner), `pending` (freed, but only the GPU knows which they
    /// are); and `size`, `page_size`, `bytes` of host memory for the bookkeeping, and `device_bytes` of GPU memory for the
    /// tensors.
    ///
    /// Of a strict pool it leaves frees pending, as what is wrong with them is to be raised where slots are used.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if lock(&self.pool).strict() {
            self.poll_fences(py)?;
        } else {
            self.poll(py)?;
        }
        let (stats, pending, device_bytes, size, page_size) = {
            let pool = lock(&self.pool);
            let slots = pool.slots();
            (pool.stats(), pool.pending(), pool.device_bytes(), slots.size(), slots.page_size())
        };
        [
            ("capacity", stats.capacity),
            ("available", stats.available),
            ("in_use", stats.in_use),
            ("high_water", stats.high_water),
            ("dropped_frees", stats.dropped_frees),
            ("free", stats.available - stats.released - pending),
            ("released", stats.released),
            ("fenced", stats.fenced),
            ("shared", stats.shared),
            ("pending", pending),
            ("size", size),
            ("page_size", page_size),
            ("bytes", stats.bytes),
            ("device_bytes", device_bytes),
        ]
        .into_py_dict(py)
    }

    /// Slots asked for at construction.
    #[getter]
    fn size(&self) -> usize {
        lock(&self.pool).slots().size()
    }

    /// Slots in a page.
    #[getter]
    fn page_size(&self) -> usize {
        lock(&self.pool).slots().page_size()
    }

    /// Where the index tensors are, as PyTorch writes it.
    #[getter]
    fn device(&self) -> String {
        self.device.to_string()
    }

    /// Whether the lowest free slots are handed out first.
    #[getter]
    fn need_sort(&self) -> bool {
        lock(&self.pool).need_sort()
    }

    /// Whether a bad free raises.
    #[getter]
    fn strict(&self) -> bool {
        lock(&self.pool).strict()
    }

    fn __repr__(&self) -> String {
        let pool = lock(&self.pool);
        format!(
            "TokenToKVPoolAllocator(size={}, device='{}', page_size={}, available={})",
            pool.slots().size(),
            pool.device(),
            pool.slots().page_size(),
            pool.available_size()
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.fences.traverse(&visit)
    }

    fn __clear__(&self) {
        drop(self.fences.take());
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
        if !lock(&allocator.pool).slots().in_group() {
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
