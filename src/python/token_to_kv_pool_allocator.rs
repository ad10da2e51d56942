//! `kvpool.TokenToKVPoolAllocator`.

mod free_group;

use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::base::{Device, Id, IndexDType, Slot, try_with_capacity};
use crate::index::{AbandonedRequest, BadFrees, Fit};
use crate::kernels::Indices;
use crate::memory::{Keep, Stream};
use crate::pool::{AllocatorConfig, FreedAs, Grant, Notice, OnNotice, TokenToKvPoolAllocator as Pool};
use crate::tensor::TensorView;

use super::args::{self, Arg, IndexArg};
use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::debug::Debug;
use super::export::{slots_to_tensor, to_tensor};
use super::fences::{fence, traverse};
use super::framework::{backend, current_stream, to_dtype};
use super::kv_pool::KvPool;
use super::logging::{Reporter, warn};
use super::pool_name::PoolName;

pub(super) use free_group::FreeGroup;

/// Hands out the token slots of a `KVPool` as index tensors and takes them back.
///
/// With `need_sort` the lowest free slots come first, and freed slots are kept apart until the others cannot
/// serve a request. Without it, slots are handed out first in, first out. With `page_size > 1` slots are
/// handed out and freed as whole pages `[p * page_size, (p + 1) * page_size)`, numbered from 1. Slot 0 is
/// never handed out.
///
/// An invalid free (a slot that is out of range, the padding slot, not allocated, already free, or listed
/// twice in one call; a tensor of `alloc`, or a view of one, whose slots were freed since, also if they were
/// handed out again) is dropped, counted in `stats()` and reported once through the logger `kvpool`. With
/// `strict` it raises instead, and nothing is changed. All calls are atomic and thread-safe.
///
/// On a GPU the tensors are views of a stage, to which the next slots are sent ahead of time: `alloc` and
/// `free` then make no driver call, and only methods that say so wait. Tensors are valid on the stream that
/// was current in `alloc`; another stream needs an event. Nothing is allocated on the device after
/// construction. A tensor kept alive after its slots were freed still occupies the stage, which holds twice
/// the pool's slots.
///
/// `free` reads the values of a GPU tensor on the host, without a copy from the GPU, if the tensor is a
/// result of `alloc` (of any allocator), is `ReqToTokenPool.req_to_token`, or is an evenly spaced view of one
/// of these, and PyTorch has counted no write to it (`_version`; for the table, no write beyond those that
/// `mark_modified` accounts for). PyTorch does not count writes through `.data`, through another framework's
/// view, or by a custom kernel: do not write to these tensors in such a way, or free a copy instead. The
/// values of any other GPU tensor are copied asynchronously on the current stream, and its slots become free
/// when the copy has completed. Until then `available_size` already counts them, as whole pages of their own.
///
/// The slots that a call returns depend only on the calls before it, and not on when such a copy completes:
/// ranks that make the same calls get the same slots. With `need_sort` a merge waits for copies in progress.
/// Without it, a free waits behind those in progress, and finds invalid slots when they complete. The
/// exceptions are slots freed with a fence and, without `need_sort`, slots that a `PrefixCache` gives up: the
/// time at which they become free varies.
///
/// Args:
///     size: Number of slots. A partial last page is never handed out.
///     device: Device of the index tensors.
///     page_size: Slots per page.
///     need_sort: Hand out the lowest free slots first, instead of first in, first out.
///     strict: Whether an invalid free raises.
///     index_dtype: The dtype of all tensors that the allocator returns, int32 or int64. `free` and the other
///         methods accept both in any case.
///     debug: Whether to record owners and call sites for `leaks` and reports. Defaults to the environment
///         variable `KVPOOL_DEBUG`.
///
/// Raises:
///     ConfigError: If `size` or `page_size` is below 1, or a slot would not fit int32.
///     TypeError: If `index_dtype` is neither int32 nor int64.
///     BackendUnavailableError: If `device` cannot be used here.
#[pyclass(extends = BasePool, frozen, subclass, module = "kvpool", name = "TokenToKVPoolAllocator")]
pub(super) struct TokenToKvPoolAllocator {
    pub(super) pool: Arc<Pool>,
    device: Device,
    pub(super) debug: Debug,
    reporter: Arc<Reporter>,
}

impl TokenToKvPoolAllocator {
    /// Returns the stream for calls that enqueue work only with `debug=True`, to poison freed rows.
    pub(super) fn debug_stream(&self, py: Python<'_>) -> PyResult<Stream> {
        if self.debug.is_on() { current_stream(py, self.device) } else { Ok(Stream::default_of(self.device)) }
    }

    fn free_all_segments(
        &self,
        py: Python<'_>,
        segments: &[(Bound<'_, PyAny>, Bound<'_, PyAny>)],
        after: Option<&Bound<'_, PyAny>>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let page_size = self.pool.page_size();
        let mut page_indices = Vec::with_capacity(segments.len());
        for (indices, start) in segments {
            self.pool.check_segment(args::int(start)?)?;
            page_indices.push((indices, args::strided_indices(indices, page_size)?));
        }
        self.free_page_indices(py, page_indices, FreedAs::SlotsOfPages, after, owner)
    }

    /// Frees the pages that the indices identify, one page per index. Each comes with the object that was passed.
    fn free_page_indices<'py>(
        &self,
        py: Python<'py>,
        mut page_indices: Vec<(&Bound<'py, PyAny>, IndexArg<'_, 'py>)>,
        freed_as: FreedAs,
        after: Option<&Bound<'py, PyAny>>,
        owner: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        let fence = fence(after)?;
        let _acting = self.debug.begin(py, owner)?;
        let given = page_indices.iter().map(|(_, indices)| indices.len()).sum::<PyResult<_>>()?;
        let on_device = page_indices.iter().find(|(_, indices)| matches!(indices, IndexArg::Device { .. }));
        let stream = match on_device {
            Some((_, indices)) => indices.stream(py, self.device)?,
            None => self.debug_stream(py)?,
        };
        let objects: Vec<_> = page_indices.iter().map(|(object, _)| *object).collect();
        let tensors: Vec<_> = page_indices.iter().map(|(_, indices)| indices.host_tensor()).collect();
        let writes: Vec<_> = objects.iter().map(|object| || args::writes_of(object)).collect();
        let origins: Vec<_> = tensors
            .iter()
            .zip(&writes)
            .map(|(tensor, writes)| tensor.map(|tensor| tensor.origin(writes)))
            .collect();
        let keep = |at: usize| Some(Arc::new(objects[at].clone().unbind()) as Keep);
        let pages =
            page_indices.iter_mut().map(|(_, indices)| indices.take()).collect::<PyResult<Vec<_>>>()?;
        let bad = self.pool.free_pages(&pages, &origins, freed_as, fence.as_ref(), keep, stream)?;
        self.report(py, &bad, given);
        Ok(())
    }

    pub(super) fn report(&self, py: Python<'_>, bad: &BadFrees, given: usize) {
        self.reporter.bad_frees(py, bad, Slot::NOUN, given, self.debug);
    }
}

/// Logs errors that an allocator finds after the call that caused them.
fn on_notice(reporter: Arc<Reporter>, debug: Debug) -> OnNotice {
    Box::new(move |notice| {
        Python::attach(|py| match notice {
            Notice::BadFrees(bad, given) => reporter.bad_frees(py, bad, Slot::NOUN, given, debug),
            Notice::NotPoisoned(error) => warn(py, &format!("freed rows are not poisoned: {error}")),
            Notice::Abandoned(request, pages) => warn(py, &describe_abandoned(request, pages)),
        });
    })
}

/// Describes a request whose row was freed without its planner. `given` of its pages went back.
fn describe_abandoned(request: &AbandonedRequest, given: usize) -> String {
    let (AbandonedRequest { row, len, .. }, pages) = (request, request.own_pages().len());
    let kept = pages - given;
    let others =
        if kept == 0 { String::new() } else { format!(", and {kept} were freed by other calls since") };
    format!(
        "request row {row} was freed without its planner while it had {len} tokens: {given} of its {pages} pages are \
         free again{others}; end requests with BatchPlanner.finish"
    )
}

/// The run that the argument `contiguous` asks for, if any.
#[derive(Clone, Copy)]
struct Contiguous(Option<Fit>);

impl<'a, 'py> FromPyObject<'a, 'py> for Contiguous {
    type Error = PyErr;

    fn extract(object: pyo3::Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(name) = object.cast::<PyString>() {
            return Ok(Self(Some(Fit::parse(name.to_str()?)?)));
        }
        let is_run: bool = object.extract().map_err(|_| {
            let kind = args::kind_of(&object);
            PyTypeError::new_err(format!("contiguous must be a bool, 'first_fit' or 'best_fit', not {kind}"))
        })?;
        Ok(Self(is_run.then_some(Fit::First)))
    }
}

/// Hands slots to Python. If that fails, they are returned to the pool, because no caller would free them.
///
/// The grant is used in place, because it is large and moving it would slow down small calls.
#[inline]
fn hand_out(
    py: Python<'_>,
    mut taken: crate::base::Result<Option<Grant<'_>>>,
) -> PyResult<Option<Py<PyAny>>> {
    match &mut taken {
        Ok(Some(grant)) => {
            let tensor = slots_to_tensor(py, grant)?;
            grant.commit();
            Ok(Some(tensor))
        }
        Ok(None) => Ok(None),
        Err(_) => Ok(taken.map(|_| None)?),
    }
}

impl PoolClass for TokenToKvPoolAllocator {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&*self.pool);
    }

    /// Polls fences and, unless the pool is strict, pending frees. A strict pool raises their errors in `alloc`
    /// and `free`.
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
    #[pyo3(signature = (size, device=None, page_size=Arg::Missing, need_sort=true, *, strict=false, index_dtype=None,
                     debug=None),
           text_signature = "(size, device=\"cuda\", page_size=1, need_sort=True, *, strict=False, \
                             index_dtype=\"int32\", debug=None)")]
    fn new(
        py: Python<'_>,
        size: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        page_size: Arg<'_>,
        need_sort: bool,
        strict: bool,
        index_dtype: Option<&Bound<'_, PyAny>>,
        debug: Option<bool>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let size = args::size("size", size)?;
        let page_size = page_size.size("page_size", 1)?;
        let device = args::device(py, device)?;
        let backend = backend(py, device)?;
        let index_dtype = index_dtype.map_or(Ok(IndexDType::I32), args::index_dtype)?;
        let config = AllocatorConfig { size, page_size, need_sort, strict, index_dtype };
        let mut pool = py.detach(|| Pool::new(&config, &backend))?;
        let debug = Debug::new(debug, &pool);
        let name = PoolName::next("TokenToKVPoolAllocator");
        let reporter = Arc::new(Reporter::new(&name));
        pool.on_notice(on_notice(Arc::clone(&reporter), debug));
        let allocator = Self { pool: Arc::new(pool), device, debug, reporter };
        Ok(BasePool::named(name, debug, allocator))
    }

    /// Takes slots.
    ///
    /// Args:
    ///     need_size: Number of slots.
    ///     contiguous: Take one ascending run. `True` or "first_fit": the lowest that is long enough;
    ///         "best_fit": the shortest that is long enough, the lowest if there are several. Long runs last
    ///         longer with it, and it looks at all free slots, those that wait for a merge included, which it
    ///         merges.
    ///     owner: An owner for reports and `leaks`, a str or an int. Recorded only if the pool debugs.
    ///
    /// Returns:
    ///     A 1-D tensor of `need_size` slots on the pool's device, which keeps its memory alive, or
    ///     `None` if there are not enough slots. With pages, the rest of the last page belongs to the caller
    ///     as well.
    ///
    /// Waits in two cases only: for freed slots whose values are still being copied from a GPU, if it would
    /// otherwise return `None`; and for the GPU, if it is far behind with slots handed out before.
    ///
    /// Raises:
    ///     ArgumentError: If `need_size` is negative, or `contiguous` is another string.
    ///     TypeError: If `need_size` is not an int, or `contiguous` neither a bool nor a string.
    ///     OutOfMemoryError: If tensors that are still alive cover the stage. Nothing is taken.
    ///     DriverError: If a driver call fails, or the stream is being captured. Nothing is taken.
    #[pyo3(signature = (need_size, *, contiguous=Contiguous(None), owner=None),
           text_signature = "($self, need_size, *, contiguous=False, owner=None)")]
    fn alloc(
        &self,
        py: Python<'_>,
        need_size: &Bound<'_, PyAny>,
        contiguous: Contiguous,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let count = args::count("need_size", need_size)?;
        let _acting = self.debug.begin(py, owner)?;
        let stream = current_stream(py, self.device)?;
        let pool = &self.pool;
        match contiguous.0 {
            Some(fit) => hand_out(py, pool.alloc_contiguous(count, fit, stream)),
            None => hand_out(py, pool.alloc(count, stream)),
        }
    }

    /// Takes the slots for positions `[prefix, seq)` of each request, as SGLang's paged allocator does.
    ///
    /// A prefix that ends inside a page is continued from `last_loc + 1`; then new pages are taken.
    ///
    /// Values of `last_loc` that only the pool's GPU has stay there: a kernel on the current stream writes the slots
    /// behind them, and `free` copies those from the GPU. A later `alloc_extend` or `alloc_decode` raises the errors
    /// that it finds; that a page is in use is not checked. Waits for the values of other arguments on a GPU.
    ///
    /// Args:
    ///     prefix_lens: Tokens that each request has now, ints `[bs]`.
    ///     seq_lens: Tokens that each request will have, ints `[bs]`.
    ///     last_loc: Slot of the last token of each request, ints `[bs]`. Ignored for a prefix that fills its
    ///         pages.
    ///     owner: As in `alloc`.
    ///
    /// Returns:
    ///     A 1-D tensor of `sum(seq_lens - prefix_lens)` slots, one request after the other, or `None`
    ///     if there are not enough slots.
    ///
    /// Raises:
    ///     ArgumentError: If the arguments differ in length, a length is negative or shrinks, or `last_loc` is
    ///         not the end of its prefix. If that is found on a GPU, the slots behind it were the padding slot.
    ///     IndexOwnershipError: If the page of `last_loc` is not in use, or two requests would continue the
    ///         same page.
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
        let mut last_loc = args::indices(last_loc)?.on(py, self.device)?;
        let stream = current_stream(py, self.device)?;
        hand_out(py, self.pool.alloc_extend(&prefix_lens, &seq_lens, &last_loc.take()?, stream))
    }

    /// Takes one slot for each request of a decode step: `alloc_extend` from `seq_lens - 1` to `seq_lens`.
    ///
    /// Args:
    ///     seq_lens: Tokens of each request, including the new one, ints `[bs]`.
    ///     last_loc: Slot of the token before the new one, ints `[bs]`.
    ///     owner: As in `alloc`.
    ///
    /// Returns:
    ///     A 1-D tensor `[bs]`, or `None` if there are not enough slots.
    ///
    /// Raises:
    ///     ArgumentError: As in `alloc_extend`.
    ///     IndexOwnershipError: As in `alloc_extend`.
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
        let mut last_loc = args::indices(last_loc)?.on(py, self.device)?;
        let stream = current_stream(py, self.device)?;
        hand_out(py, self.pool.alloc_decode(&seq_lens, &last_loc.take()?, stream))
    }

    /// Frees slots; with pages, the whole page of every slot, once.
    ///
    /// The values are copied, so you may overwrite the tensor at once. Does not wait, unless more values are
    /// being copied from a GPU than the pool has slots. Values that only a GPU has are copied in the order
    /// of the current stream, and a later call finds invalid ones.
    ///
    /// Args:
    ///     indices: Slots, an int tensor or array of any shape, a sequence of ints, or an int.
    ///     after: A fence: an object with `query() -> bool`, such as a `torch.cuda.Event`. The slots stay in
    ///         use until `query()` returns true; later calls of the allocator query it.
    ///     owner: As in `alloc`. Selects the owner of a shared slot that gives it up, else the first. A slot that
    ///         is held by others alone is not freed.
    ///
    /// Raises:
    ///     IndexOwnershipError: If the pool is strict and a free is invalid. For values that only a GPU
    ///         has, a later call raises it; none of them is freed.
    ///     TypeError: If `indices` does not hold ints, or `after` has no `query`.
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
        let bad = match indices {
            IndexArg::Host(values, tensor) => {
                let stream = self.debug_stream(py)?;
                let writes = || args::writes_of(object);
                let origin = tensor.map(|tensor| tensor.origin(&writes));
                self.pool.free_keeping(&Indices::Host(values), origin, fence.as_ref(), || None, stream)?
            }
            IndexArg::Device { .. } => {
                let stream = indices.stream(py, self.device)?;
                // PyTorch may reuse the memory of a dropped tensor in the order of another stream.
                let keep = || Some(Arc::new(object.clone().unbind()) as Keep);
                self.pool.free_keeping(&indices.take()?, None, fence.as_ref(), keep, stream)?
            }
        };
        self.report(py, &bad, given);
        Ok(())
    }

    /// Frees consecutive slots of a request, as its row of the table has them: whole pages from the first on,
    /// the last one even if not all of its slots are listed.
    ///
    /// Reads one slot of each page, so it costs less than `free`, and `available_size` is exact while values
    /// are being copied from a GPU.
    ///
    /// Args:
    ///     indices: Slots of the tokens from `start_pos` on, an int tensor of one dimension, or contiguous, an
    ///         array or a sequence of ints.
    ///     start_pos: Position of the first token, which begins a page.
    ///     after: As in `free`.
    ///     owner: As in `free`.
    ///
    /// Raises:
    ///     ArgumentError: If `start_pos` does not begin a page.
    ///     IndexOwnershipError: As in `free`.
    ///     TypeError: As in `free`.
    #[pyo3(signature = (indices, *, start_pos, after=None, owner=None))]
    fn free_segment(
        &self,
        py: Python<'_>,
        indices: &Bound<'_, PyAny>,
        start_pos: &Bound<'_, PyAny>,
        after: Option<&Bound<'_, PyAny>>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.free_all_segments(py, &[(indices.clone(), start_pos.clone())], after, owner)
    }

    /// Frees several segments, as one call of `free_segment` would.
    ///
    /// Args:
    ///     segments: Pairs of `indices` and `start_pos`, as in `free_segment`.
    ///     after: As in `free`.
    ///     owner: As in `free`.
    ///
    /// Raises:
    ///     ArgumentError: As in `free_segment`. Nothing is freed.
    ///     IndexOwnershipError: As in `free`.
    ///     TypeError: As in `free`.
    #[pyo3(signature = (segments, *, after=None, owner=None))]
    fn free_segments(
        &self,
        py: Python<'_>,
        segments: &Bound<'_, PyAny>,
        after: Option<&Bound<'_, PyAny>>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let segments: Vec<_> = segments
            .try_iter()?
            .map(|segment| segment?.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>())
            .collect::<PyResult<_>>()?;
        self.free_all_segments(py, &segments, after, owner)
    }

    /// Frees pages by their numbers. Page `p` has the slots from `p * page_size` on.
    ///
    /// Args:
    ///     page_ids: Pages, an int tensor or array of any shape or a sequence of ints.
    ///     after: As in `free`.
    ///     owner: As in `free`.
    ///
    /// Raises:
    ///     IndexOwnershipError: As in `free`. The message has the first slot of a page.
    ///     TypeError: As in `free`.
    #[pyo3(signature = (page_ids, *, after=None, owner=None))]
    fn free_pages(
        &self,
        py: Python<'_>,
        page_ids: &Bound<'_, PyAny>,
        after: Option<&Bound<'_, PyAny>>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let pages = args::indices(page_ids)?;
        self.free_page_indices(py, vec![(page_ids, pages)], FreedAs::Pages, after, owner)
    }

    /// Records that work on a stream reads a tensor of slots. Its memory is reused only after that work, even
    /// if the tensor is dropped first.
    ///
    /// kvpool's own calls record their streams. Call this if your own kernel reads the tensor on a stream
    /// other than the one that was current in `alloc`: `Tensor.record_stream` has no effect on memory that
    /// PyTorch does not own.
    ///
    /// Args:
    ///     tensor: A tensor that `alloc` returned, or a view of one.
    ///     stream: A stream or its handle, as in `Pool.used_on`; it may be one of another GPU. Defaults to the current
    ///         stream. It must outlive the allocator.
    ///
    /// Raises:
    ///     ArgumentError: If the tensor does not come from this allocator, or `stream` is 2.
    ///     DriverError: If the GPU has no such stream.
    #[pyo3(signature = (tensor, stream=None))]
    fn used_on(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let stream = match stream {
            Some(stream) => args::stream(stream, self.device)?,
            None => current_stream(py, self.device)?,
        };
        let given = args::tensor("tensor", tensor)?;
        let borrowed = given.borrow()?;
        Ok(self.pool.record_stream(&borrowed, stream)?)
    }

    /// Adds an owner to slots, for example when requests share a cached prefix; with pages, to the page of
    /// every slot, once.
    ///
    /// Each owner frees the slot once; it becomes free with its last owner. A slot listed twice in one call
    /// gains two owners, or loses two in `free`; a page gains or loses one.
    ///
    /// Args:
    ///     indices: Slots, an int tensor or array of any shape, a sequence of ints, or an int. Waits for values that
    ///         only a GPU has.
    ///     owner: As in `alloc`.
    ///
    /// Raises:
    ///     IndexOwnershipError: If a slot is not in use. Nothing is changed.
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

    /// Starts to collect the values of frees, from all threads. Groups nest. Frees with a fence are not
    /// collected.
    fn free_group_begin(&self) {
        self.pool.free_group_begin();
    }

    /// Ends a group. The end of the outermost group frees everything collected, as one call.
    ///
    /// Raises:
    ///     StateError: If no group is open.
    ///     IndexOwnershipError: As in `free`. The group is closed, and none of its slots is freed.
    fn free_group_end(&self, py: Python<'_>) -> PyResult<()> {
        let _acting = self.debug.begin(py, None)?;
        let (given, bad) = self.pool.free_group_end(self.debug_stream(py)?)?;
        self.report(py, &bad, given);
        Ok(())
    }

    /// Returns a context manager around `free_group_begin` and `free_group_end`.
    fn free_group(slf: &Bound<'_, Self>) -> FreeGroup {
        FreeGroup { allocator: slf.clone().unbind() }
    }

    /// Returns the number of slots that can be handed out, including freed slots whose values are still being
    /// copied from a GPU.
    fn available_size(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.pool.poll_available_size(self.debug_stream(py)?)?)
    }

    /// Number of slots that can be handed out: what `available_size` returns.
    #[getter]
    fn slots_free(&self, py: Python<'_>) -> PyResult<usize> {
        self.available_size(py)
    }

    /// Number of pages that can be handed out.
    #[getter]
    fn pages_free(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.available_size(py)? / self.pool.page_size())
    }

    /// Frees every slot, closes groups and discards fences. Do not use tensors that were handed out before. Loads
    /// from a tier below a prefix cache are over in the order of the current stream; without a GPU the call waits for
    /// them. Leases of a prefix cache and requests of a `BatchPlanner` end: they have no tokens afterwards.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let _acting = self.debug.begin(py, None)?;
        self.pool.clear(current_stream(py, self.device)?);
        Ok(())
    }

    /// Changes the number of slots, as an engine does once it has measured how much memory is left. Frees every slot,
    /// as `clear` does. On a GPU it allocates the tensors anew.
    ///
    /// Args:
    ///     size: As in the constructor.
    ///
    /// Raises:
    ///     ConfigError: As in the constructor. Nothing is changed.
    ///     OutOfMemoryError: If there is not enough memory. Nothing is changed.
    ///     DriverError: If the stream is being captured. Nothing is changed.
    fn resize(&self, py: Python<'_>, size: &Bound<'_, PyAny>) -> PyResult<()> {
        let _acting = self.debug.begin(py, None)?;
        let size = args::size("size", size)?;
        let stream = current_stream(py, self.device)?;
        Ok(py.detach(|| self.pool.resize(size, stream))?)
    }

    /// Poisons rows of a `KVPool` when their slots become free, so that a read after free is visible: NaN in
    /// floats, -1 in int8, 255 in uint8, in all layers, written on the stream that is current at that time.
    /// Does nothing if the pool does not debug.
    ///
    /// Args:
    ///     kv_pool: The `KVPool` that the slots index. It is not kept alive.
    fn poison_freed(&self, kv_pool: &Bound<'_, KvPool>) {
        self.pool.poison_freed(kv_pool.get().shared());
    }

    /// Merges the freed slots into those that are handed out next. Waits for values that are being copied from
    /// a GPU. Does nothing without `need_sort`.
    fn merge_and_sort_free(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.pool.merge_and_sort_free(self.debug_stream(py)?)?)
    }

    /// The free slots (with pages, the free pages) in the order in which they are handed out: a new 1-D
    /// tensor. Waits for pending copies of values.
    #[getter]
    fn free_slots(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_tensor(py, &self.pool.free_slots(current_stream(py, self.device)?)?)
    }

    /// The freed slots (with pages, the freed pages) that wait for a merge, lowest first: a new 1-D
    /// tensor. Waits for pending copies of values.
    #[getter]
    fn release_slots(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_tensor(py, &self.pool.release_slots(current_stream(py, self.device)?)?)
    }

    /// Returns the maximal ascending runs of `indices`, in order.
    ///
    /// Args:
    ///     indices: An int tensor or array of any shape, a sequence of ints, or an int.
    ///
    /// Returns:
    ///     An int32 tensor `[k, 2]` of (start, length) on the host, in the form of DMA and transfer
    ///     descriptors.
    #[staticmethod]
    fn runs(py: Python<'_>, indices: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        to_tensor(py, &Pool::runs(&args::indices(indices)?.values(py)?)?)
    }

    /// Returns whether each slot is in use: live, or freed with a fence that has not passed. Waits for
    /// pending copies of values.
    ///
    /// Args:
    ///     indices: An int tensor or array of any shape, a sequence of ints, or an int.
    ///
    /// Returns:
    ///     A 1-D bool tensor on the host. False for an index that is not a slot.
    fn is_allocated(&self, py: Python<'_>, indices: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let values = args::indices(indices)?.values(py)?;
        self.pool.settle(self.debug_stream(py)?)?;
        let mut answers: Vec<bool> = try_with_capacity(values.len())?;
        self.pool.inspect(|slots| answers.extend(slots.is_allocated(&values)));
        to_tensor(py, &TensorView::from_bools(&answers)?)
    }

    /// Checks that free and live slots add up to the pool, and that no slot is in two states. Waits for
    /// pending copies of values.
    ///
    /// Raises:
    ///     IndexOwnershipError: If a check fails, with a description.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        self.pool.settle(self.debug_stream(py)?)?;
        Ok(self.pool.verify()?)
    }

    /// The number of slots, as passed to the constructor or to `resize`.
    #[getter]
    fn size(&self) -> usize {
        self.pool.inspect(|slots| slots.size())
    }

    /// Slots per page.
    #[getter]
    fn page_size(&self) -> usize {
        self.pool.page_size()
    }

    /// Whether the lowest free slots are handed out first.
    #[getter]
    fn need_sort(&self) -> bool {
        self.pool.need_sort()
    }

    /// The dtype of the tensors that the allocator returns: a `torch.dtype` or, without PyTorch, its name.
    #[getter]
    fn index_dtype(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_dtype(py, self.pool.index_dtype().dtype())
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
