//! The allocator of token slots, which hands them out as tensors.

use std::fmt;
use std::sync::{Arc, Weak};

use crate::base::bounded::narrow;
use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{
    Device, Discarded, Epoch, Error, Id, IndexDType, IndexVec, Page, Result, Slot, assert_may_wait,
    run_blocking, try_with_capacity, widen,
};
use crate::index::{
    AbandonedRequest, BadFrees, FenceId, Fit, Ledgered, OnBadFree, Order, Owner, SlotAllocator, SlotStats,
    ascending_runs, put_slots_of,
};
use crate::kernels::Indices;
use crate::memory::{Backend, BorrowedTensor, Gpu, Keep, Stream};
use crate::tensor::TensorView;

use super::contract::{Occupancy, Pool, Stats};
use super::deferred::FreedAs;
use super::fences::Fence;
use super::mirror::values_now;
use super::shortage::Reclaim;
use super::slot_tensors::{
    BatchLens, Freed, GrantedSlots, LastLocs, PagesOf, SlotTensors, Source, TensorOrigin,
};
use super::stage::stage_bytes;
use super::{Footprint, KvPool, at_least_one};

mod grant;
mod short;

pub(super) use grant::AllocatorCall;
pub use grant::Grant;

/// The shape of a [`TokenToKvPoolAllocator`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocatorConfig {
    /// Number of slots, which are numbered from 1 or, with pages, from `page_size`.
    pub size: usize,
    /// Slots in a page.
    pub page_size: usize,
    /// Whether the lowest free slots are handed out first, instead of first in, first out.
    pub need_sort: bool,
    /// Whether an invalid free is an error.
    pub strict: bool,
    /// The dtype of the tensors.
    pub index_dtype: IndexDType,
}

impl AllocatorConfig {
    /// Creates an allocator of `size` slots with the defaults of the Python class: pages of one slot, the
    /// lowest first, as int32.
    #[must_use]
    pub const fn new(size: usize) -> Self {
        Self { size, page_size: 1, need_sort: true, strict: false, index_dtype: IndexDType::I32 }
    }

    /// Returns the bytes of an allocator on `device`.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a `page_size` of 0, and when the bytes
    /// overflow.
    pub fn footprint(&self, device: Device) -> Result<Footprint> {
        let slots = self.pages()? * self.page_size;
        Footprint::new(
            device,
            if device == Device::Cpu { 0 } else { stage_bytes(slots, self.index_dtype)? },
            0,
        )
    }

    /// Returns all slots, free.
    fn slots(&self, backend: &Arc<dyn Backend>) -> Result<SlotTensors> {
        let order = if self.need_sort { Order::Sorted } else { Order::Fifo };
        let slots = SlotAllocator::new(self.size, self.page_size, order)?;
        SlotTensors::new(slots, OnBadFree::of(self.strict), self.index_dtype, backend)
    }

    /// Returns the number of whole pages.
    pub(super) fn pages(&self) -> Result<usize> {
        at_least_one(&[("page_size", self.page_size)])?;
        Ok(self.size / self.page_size)
    }
}

/// Hands out token slots of a [`KvPool`] as tensors of int32 or int64 and takes them back. Calls are atomic
/// and thread-safe.
///
/// On a GPU the tensors are views of a stage, to which the next slots are sent ahead of time, so `alloc`
/// and `free` make no driver call as long as slots come in the predicted order. The values of a freed tensor
/// are read from the host's mirror of the stage or of a request table. Values that the host does not know
/// (written to, computed, foreign) are copied asynchronously; their slots become free when the copy
/// completes. Slots that were freed behind a [`Fence`] become free when it has passed. Every call that takes
/// or frees slots checks for both; [`Self::poll`] does only that.
///
/// When there are not enough slots, a call that takes some completes pending frees, waits for values in
/// flight from a device, calls the [`Reclaim`]s registered with [`Self::on_shortage`], and only then returns
/// `None`. If all of them together could not free what is missing, none is called.
///
/// The slots that a call hands out depend only on the calls before it, and not on when values of frees
/// arrive, so that processes that make the same calls get the same slots. Therefore a merge of released slots
/// waits for values in flight and, in first in, first out order, a free waits behind those in flight. Slots
/// that a copy to or from a host tier still uses are free; their next owner is ordered behind the copy. There
/// are two exceptions: slots freed behind a fence, and slots freed by a prefix cache in first in, first out
/// order while values are in flight from a device, become free at a time that may vary.
///
/// A `stream` argument is the stream of the caller's work: tensors are valid on it, and values are copied and
/// rows are poisoned in its order. In host memory it is [`Stream::DEFAULT`].
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::IndexVec;
/// use kvpool::kernels::Indices;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, TokenToKvPoolAllocator};
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let config = AllocatorConfig::new(1024);
/// let allocator = TokenToKvPoolAllocator::new(&config, &host).unwrap();
/// let slots = allocator.alloc(3, stream).unwrap().expect("there are enough").keep();
/// assert_eq!(slots.shape().as_slice(), [3]);
/// assert_eq!(allocator.available_size(), 1021);
/// let freed = Indices::Host(IndexVec::I32(vec![1, 2, 3, 3]));
/// let bad = allocator.free(&freed, stream).unwrap();
/// assert_eq!((bad.dropped(), allocator.available_size()), (1, 1024));
/// ```
pub struct TokenToKvPoolAllocator {
    slots: RankedMutex<SlotTensors>,
    backend: Arc<dyn Backend>,
    index_dtype: IndexDType,
    reclaim: RankedMutex<Vec<Weak<dyn Reclaim>>>,
    on_notice: Option<OnNotice>,
}

/// A problem that an allocator finds after the call that caused it has returned.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use kvpool::memory::{Backend, Host};
/// use kvpool::pool::{AllocatorConfig, Notice, OnNotice, TokenToKvPoolAllocator};
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let mut slots = TokenToKvPoolAllocator::new(&AllocatorConfig::new(8), &host).unwrap();
/// let log = Arc::new(Mutex::new(Vec::new()));
/// let lines = Arc::clone(&log);
/// let on_notice: OnNotice = Box::new(move |notice| {
///     lines.lock().unwrap().push(match notice {
///         Notice::BadFrees(bad, count) => format!("{} of {count} frees were dropped", bad.dropped()),
///         Notice::NotPoisoned(error) => error.to_string(),
///         Notice::Abandoned(_, pages) => format!("{pages} pages came back from a request without a row"),
///     });
/// });
/// slots.on_notice(on_notice);
/// assert!(log.lock().unwrap().is_empty());
/// ```
#[derive(Debug)]
pub enum Notice<'a> {
    /// The invalid part of a free that was completed late, and the number of values of that free.
    BadFrees(&'a BadFrees, usize),
    /// Freed rows could not be poisoned.
    NotPoisoned(&'a Error),
    /// The row of a planner's request was freed without its planner; the number of pages that went back.
    Abandoned(&'a AbandonedRequest, usize),
}

/// A callback for notices, called without locks.
pub type OnNotice = Box<dyn Fn(Notice<'_>) + Send + Sync>;

impl TokenToKvPoolAllocator {
    /// Creates a pool with all slots free.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when `size` or `page_size` is 0 or slots would
    /// not fit int32; the error of the backend when there is no memory for the tensors.
    pub fn new(config: &AllocatorConfig, backend: &Arc<dyn Backend>) -> Result<Self> {
        let slots = config.slots(backend)?;
        Ok(Self {
            slots: RankedMutex::new(LockRank::Allocator, slots),
            backend: Arc::clone(backend),
            index_dtype: config.index_dtype,
            reclaim: RankedMutex::new(LockRank::Reclaimers, Vec::new()),
            on_notice: None,
        })
    }

    /// Sends notices to `on_notice`. Without it, late problems are only counted.
    pub fn on_notice(&mut self, on_notice: OnNotice) {
        self.on_notice = Some(on_notice);
    }

    /// Registers `reclaim`, until it is dropped, for calls that are short of slots. Earlier registrations are
    /// called first.
    pub fn on_shortage(&self, reclaim: &Arc<dyn Reclaim>) {
        self.reclaim.lock().push(Arc::downgrade(reclaim));
    }

    /// Poisons rows of `kv` when their slots become free, if a ledger is kept.
    pub fn poison_freed(&self, kv: &Arc<KvPool>) {
        self.lock().poison_freed(kv);
    }

    /// Takes `count` slots: a 1-D tensor, valid on `stream`. `None` if there are not enough.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has no memory for the
    /// result, or live tensors cover the stage; [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when
    /// the driver refuses; see [`Self::poll`]. Nothing is taken.
    #[inline]
    pub fn alloc(&self, count: usize, stream: Stream) -> Result<Option<Grant<'_>>> {
        let mut grant = None;
        self.alloc_with(stream, |slots| {
            slots.alloc(count, stream, |granted, slots| {
                grant = Some(Grant::new(self, granted, Vec::new(), slots));
            })
        })?;
        Ok(grant)
    }

    /// Takes `count` pages for a prefix cache, the `owner`. `None` if there are not enough, or `epoch` is
    /// over.
    ///
    /// # Errors
    /// See [`Self::poll`]. Nothing is taken.
    pub(super) fn take_cached_pages(
        &self,
        count: usize,
        owner: &Owner,
        epoch: Epoch,
        stream: Stream,
    ) -> Result<Option<Vec<Page>>> {
        let take = |slots: &mut SlotTensors| {
            let Some(mut slots) = slots.at(epoch) else { return Ok(Ok(None)) };
            Ok(slots.take_cached_pages(count, owner)?.map(Some))
        };
        Ok(self.alloc_with(stream, take)?.flatten())
    }

    /// Works like [`Self::alloc`], with slots in one ascending run, chosen by `fit`. Reclaims nothing if
    /// there are enough slots, but not in one run.
    ///
    /// # Errors
    /// See [`Self::alloc`].
    pub fn alloc_contiguous(&self, count: usize, fit: Fit, stream: Stream) -> Result<Option<Grant<'_>>> {
        self.alloc_with(stream, |slots| {
            let taken = slots.alloc_contiguous(count, fit, stream)?;
            Ok(taken.map(|view| Grant::new(self, GrantedSlots::Tensor(view), Vec::new(), slots)))
        })
    }

    /// Takes the slots for positions `prefix..seq` of each request, concatenated.
    ///
    /// `last_loc` is on the host or on the device of the pool. The slots behind values that only the device
    /// knows are written there, by one launch on `stream`, and the host does not know them either.
    ///
    /// # Errors
    /// See [`SlotAllocator::extend`] and [`Self::alloc`].
    /// [`ErrorKind::Argument`] when an earlier call was given a last slot, in a
    /// tensor on the device, that does not end its request: that call handed out the padding slot instead.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    pub fn alloc_extend(
        &self,
        prefix_lens: &[i64],
        seq_lens: &[i64],
        last_loc: &Indices<'_>,
        stream: Stream,
    ) -> Result<Option<Grant<'_>>> {
        let lens = BatchLens { prefix: prefix_lens, seq: seq_lens };
        let ends = LastLocs::new(last_loc, self.device())?;
        self.alloc_with(stream, |slots| {
            let taken = slots.alloc_extend(lens, &ends, stream)?;
            Ok(taken.map(|(view, continued)| Grant::new(self, GrantedSlots::Tensor(view), continued, slots)))
        })
    }

    /// Takes one slot per request, for position `seq - 1`. Otherwise like [`Self::alloc_extend`].
    ///
    /// # Errors
    /// See [`Self::alloc_extend`].
    pub fn alloc_decode(
        &self,
        seq_lens: &[i64],
        last_loc: &Indices<'_>,
        stream: Stream,
    ) -> Result<Option<Grant<'_>>> {
        let mut prefix_lens = crate::base::try_with_capacity(seq_lens.len())?;
        prefix_lens.extend(seq_lens.iter().map(|len| len.saturating_sub(1)));
        self.alloc_extend(&prefix_lens, seq_lens, last_loc, stream)
    }

    /// Frees slots at once; drops and reports those that are not live.
    ///
    /// # Errors
    /// See [`Self::free_keeping`].
    #[inline]
    pub fn free(&self, slots: &Indices<'_>, stream: Stream) -> Result<BadFrees> {
        self.free_keeping(slots, None, None, || None, stream)
    }

    /// Frees slots that work in flight still uses: they stay in use until `fence` has passed.
    ///
    /// # Errors
    /// See [`Self::free_keeping`].
    pub fn free_after(
        &self,
        slots: &Indices<'_>,
        fence: &Arc<dyn Fence>,
        stream: Stream,
    ) -> Result<BadFrees> {
        self.free_keeping(slots, None, Some(fence), || None, stream)
    }

    /// Frees slots, at once or after a fence, and keeps the tensor that lists them alive while its values are
    /// needed. `origin` is the tensor of values on the host: a free of slots that were handed out in it, and
    /// were freed since, is invalid, also if they were handed out again.
    ///
    /// Values that only a device has are copied in the order of `stream`, without waiting unless more values
    /// are in flight than the pool has slots; then the call waits for its own values. The result of
    /// `keep` keeps the tensor alive until then, and is dropped without locks.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) for an invalid free;
    /// nothing is changed. See [`Self::poll`]. [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the
    /// driver refuses.
    #[inline]
    pub fn free_keeping(
        &self,
        slots: &Indices<'_>,
        origin: Option<TensorOrigin<'_>>,
        after: Option<&Arc<dyn Fence>>,
        keep: impl FnOnce() -> Option<Keep>,
        stream: Stream,
    ) -> Result<BadFrees> {
        // A call that is tried again asks for one owner at most.
        let mut keep = Some(keep);
        let mut keep = || keep.take().and_then(|keep| keep());
        let source = origin.map(|origin| Source::new(origin, slots));
        let freed =
            self.free_with(after, stream, |free, id| free.free(slots, source, id, &mut keep, stream))?;
        match freed {
            Freed::Done(bad) => Ok(bad),
            freed => self.free_slowly(freed, slots, source, after, &mut keep, stream),
        }
    }

    /// Goes on with a free for which something must be found out first.
    #[cold]
    fn free_slowly(
        &self,
        mut freed: Freed,
        slots: &Indices<'_>,
        mut source: Option<Source<'_>>,
        after: Option<&Arc<dyn Fence>>,
        keep: &mut dyn FnMut() -> Option<Keep>,
        stream: Stream,
    ) -> Result<BadFrees> {
        let mut read = None;
        loop {
            match freed {
                Freed::Done(bad) => return Ok(bad),
                Freed::Unread => {
                    source = Source::of(slots);
                    read = Some(read_values(slots, stream)?);
                }
                Freed::Unproven => source.iter_mut().for_each(Source::prove),
            }
            let given = read.as_ref().unwrap_or(slots);
            freed =
                self.free_with(after, stream, |free, id| free.free(given, source, id, &mut *keep, stream))?;
        }
    }

    /// Frees pages: each value of `given` names one. `origins` are the tensors of values on the host, by
    /// position; the result of `keep` keeps the tensor at a position alive. Otherwise like
    /// [`Self::free_keeping`].
    ///
    /// # Errors
    /// See [`Self::free_keeping`].
    pub fn free_pages(
        &self,
        given: &[Indices<'_>],
        origins: &[Option<TensorOrigin<'_>>],
        freed_as: FreedAs,
        after: Option<&Arc<dyn Fence>>,
        keep: impl Fn(usize) -> Option<Keep>,
        stream: Stream,
    ) -> Result<BadFrees> {
        let discarded = Discarded::new();
        let mut sources: Vec<_> =
            origins.iter().map(|origin| origin.map(|origin| Source { origin, writes: None })).collect();
        let mut read = None;
        loop {
            let given = read.as_deref().unwrap_or(given);
            let pages = PagesOf { given, sources: &sources, freed_as };
            let freed = self.free_with(after, stream, |slots, id| {
                slots.free_pages(pages, id, &keep, &discarded, stream)
            })?;
            match freed {
                Freed::Done(bad) => return Ok(bad),
                Freed::Unread => {
                    sources.resize(given.len(), None);
                    let of_device = given.iter().map(Source::of);
                    for (source, of_device) in sources.iter_mut().zip(of_device) {
                        *source = source.or(of_device);
                    }
                    let known = given.iter().map(|given| read_values(given, stream));
                    read = Some(known.collect::<Result<Vec<_>>>()?);
                }
                Freed::Unproven => sources.iter_mut().flatten().for_each(Source::prove),
            }
        }
    }

    /// Checks that consecutive slots of a request, whose first is that of token `start`, begin a page: every
    /// `page_size`th of them then names another page.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) when they do not.
    pub fn check_segment(&self, start: i64) -> Result<()> {
        let page_size = self.page_size();
        match usize::try_from(start) {
            Ok(start) if start.is_multiple_of(page_size) => Ok(()),
            _ => Err(Error::argument(format!(
                "a segment that starts at token {start} does not begin a page of {page_size} slots"
            ))),
        }
    }

    /// Returns the slots of pages: 1-D int32, valid on `stream`.
    ///
    /// # Errors
    /// See [`Self::alloc`].
    pub fn tensor_of_pages(&self, pages: &[Page], stream: Stream) -> Result<TensorView> {
        let page_size = narrow(self.page_size());
        let mut slots = try_with_capacity(pages.len() * widen(page_size))?;
        put_slots_of(pages.iter().map(|page| page.number()), page_size, &mut slots);
        self.lock().tensor_of(slots, stream)
    }

    /// Adds an owner to slots: see [`SlotAllocator::share`]. Waits for values in flight.
    ///
    /// # Errors
    /// See [`SlotAllocator::share`] and [`Self::settle`].
    pub fn share(&self, given: &IndexVec, stream: Stream) -> Result<()> {
        self.settle(stream)?;
        self.lock().share(given)
    }

    /// Starts to collect frees. Groups nest.
    pub fn free_group_begin(&self) {
        self.lock().free_group_begin();
    }

    /// Ends a group. The end of the outermost group frees everything collected, as one call, and returns how
    /// many values that was.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) when no group is open; see [`Self::free`]. The
    /// group is closed in any case.
    pub fn free_group_end(&self, stream: Stream) -> Result<(usize, BadFrees)> {
        self.freeing(self.lock(), stream, SlotTensors::free_group_end)
    }

    /// Returns the configuration that it was made with.
    fn config(&self) -> AllocatorConfig {
        let slots = self.lock();
        AllocatorConfig {
            size: slots.slots().size(),
            page_size: slots.slots().page_size(),
            need_sort: slots.need_sort(),
            strict: slots.strict(),
            index_dtype: self.index_dtype,
        }
    }

    /// Frees every slot, closes groups and discards fences and pending frees.
    pub fn clear(&self, stream: Stream) {
        let discarded = Discarded::new();
        let cleared = self.freeing(self.without_writers(stream), stream, |slots| {
            slots.clear(&discarded);
            Ok(())
        });
        cleared.expect("a clear cannot fail");
    }

    /// Changes the number of slots. Frees every slot, as [`Self::clear`] does.
    ///
    /// # Errors
    /// See [`Self::new`], and [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) while `stream` is
    /// captured. Nothing is changed.
    pub fn resize(&self, size: usize, stream: Stream) -> Result<()> {
        if let Some(gpu) = self.backend.gpu() {
            gpu.check_not_capturing(stream, "a change of the number of slots")?;
        }
        let config = AllocatorConfig { size, ..self.config() };
        let resized = config.slots(&self.backend)?;
        let discarded = Discarded::new();
        let (_replaced, poisoned) = self.freeing(self.without_writers(stream), stream, |slots| {
            slots.clear(&discarded);
            let poisoned = slots.poison(stream);
            Ok((slots.replace(resized), poisoned))
        })?;
        if let Err(failure) = poisoned {
            self.notify(Notice::NotPoisoned(&failure));
        }
        Ok(())
    }

    /// Merges the released slots into the free ones. Waits for values in flight.
    ///
    /// # Errors
    /// See [`Self::poll`].
    pub fn merge_and_sort_free(&self, stream: Stream) -> Result<()> {
        if self.need_sort() {
            self.settle(stream)?;
            self.lock().merge_and_sort_free();
        }
        Ok(())
    }

    /// Locks the slots when no copy to them is in flight any more, in the order of `stream`.
    fn without_writers(&self, stream: Stream) -> RankedGuard<'_, SlotTensors> {
        loop {
            let mut slots = self.lock();
            let writers = slots.take_writers();
            if writers.is_empty() {
                return slots;
            }
            drop(slots);
            for writer in writers {
                // If the copy cannot be ordered before `stream`, the call waits for it. A device that has
                // failed writes nothing.
                if writer.stop(stream).is_err() {
                    let _ = writer.wait();
                }
            }
        }
    }

    /// Calls `free`, with the id of a new fence if `after` is given.
    #[inline]
    pub(super) fn free_with<R>(
        &self,
        after: Option<&Arc<dyn Fence>>,
        stream: Stream,
        free: impl FnOnce(&mut SlotTensors, Option<FenceId>) -> Result<R>,
    ) -> Result<R> {
        // Never the last reference: the caller has one.
        let fence = after.cloned();
        self.freeing(self.polled(stream)?, stream, |slots| slots.with_fence(fence, free))
    }

    /// Calls `work` under the lock. If a ledger is kept, also poisons the rows of slots that it frees, before
    /// another call can take them.
    #[inline]
    pub(super) fn freeing<R>(
        &self,
        slots: RankedGuard<'_, SlotTensors>,
        stream: Stream,
        work: impl FnOnce(&mut SlotTensors) -> Result<R>,
    ) -> Result<R> {
        let (answer, poisoned) = Self::freeing_quietly(slots, stream, work);
        if let Err(failure) = poisoned {
            self.notify(Notice::NotPoisoned(&failure));
        }
        answer
    }

    /// Works like [`Self::freeing`] for a caller that holds locks: also returns whether the rows are
    /// poisoned, for a notice when it holds none.
    #[inline]
    fn freeing_quietly<R>(
        mut slots: RankedGuard<'_, SlotTensors>,
        stream: Stream,
        work: impl FnOnce(&mut SlotTensors) -> Result<R>,
    ) -> (Result<R>, Result<()>) {
        let answer = work(&mut slots);
        let poisoned = slots.poison(stream);
        (answer, poisoned)
    }

    /// Begins a call that changes slots while its caller holds other locks.
    pub(super) fn begin_call(&self, stream: Stream) -> AllocatorCall<'_> {
        AllocatorCall::new(self, stream)
    }

    /// Passes on a notice, to code that may do anything.
    pub(super) fn notify(&self, notice: Notice<'_>) {
        assert_may_wait();
        if let Some(on_notice) = &self.on_notice {
            on_notice(notice);
        }
    }

    #[inline]
    pub(super) fn lock(&self) -> RankedGuard<'_, SlotTensors> {
        self.slots.lock()
    }

    /// Calls `read` with the ownership of slots, under the lock. Pending frees are not included.
    pub fn inspect<R>(&self, read: impl FnOnce(&Ledgered<SlotAllocator>) -> R) -> R {
        read(self.lock().slots())
    }

    /// Calls `read` with each fence that has not passed, unless another thread holds the lock.
    ///
    /// # Errors
    /// The first error of `read`.
    pub fn try_inspect_fences<E>(
        &self,
        mut read: impl FnMut(&dyn Fence) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.slots.try_lock().map_or(Ok(()), |slots| slots.fences().iter().try_for_each(&mut read))
    }

    /// Discards all fences. Their slots stay in use until [`Self::clear`].
    pub fn forget_fences(&self) {
        let discarded = Discarded::new();
        self.lock().fences_mut().clear(&discarded);
    }

    /// Records that work on `stream` reads a tensor of slots: its memory is reused only after that work.
    /// Tensors in host memory have no streams.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a tensor that does not come from this
    /// allocator.
    pub fn record_stream(&self, tensor: &BorrowedTensor<'_>, stream: Stream) -> Result<()> {
        self.lock().record_stream(tensor, stream)
    }

    /// Returns the device of the tensors, or `None` on the host.
    pub(super) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.backend.gpu()
    }

    /// Returns the device of the tensors.
    #[must_use]
    pub fn device(&self) -> Device {
        self.backend.device()
    }

    /// Returns whether the lowest free slots are handed out first.
    #[must_use]
    pub fn need_sort(&self) -> bool {
        self.lock().need_sort()
    }

    /// Returns whether an invalid free is an error.
    #[must_use]
    pub fn strict(&self) -> bool {
        self.lock().strict()
    }

    /// Returns the dtype of the tensors.
    #[must_use]
    pub const fn index_dtype(&self) -> IndexDType {
        self.index_dtype
    }

    /// Returns the number of slots in a page.
    #[must_use]
    pub fn page_size(&self) -> usize {
        self.inspect(|slots| slots.page_size())
    }

    /// Returns the number of slots that can be handed out now or when pending frees complete. Pending frees
    /// count as whole, distinct pages.
    #[must_use]
    pub fn available_size(&self) -> usize {
        self.lock().available_size()
    }

    /// Calls [`Self::poll`] and then [`Self::available_size`], in one step.
    ///
    /// # Errors
    /// See [`Self::poll`].
    pub fn poll_available_size(&self, stream: Stream) -> Result<usize> {
        self.polled(stream).map(|slots| slots.available_size())
    }

    /// Returns the free pages, in the order in which they are handed out without a merge. Waits for values in
    /// flight.
    ///
    /// # Errors
    /// See [`Self::alloc`].
    pub fn free_slots(&self, stream: Stream) -> Result<TensorView> {
        self.settle(stream)?;
        self.lock().free_slots(stream)
    }

    /// Returns the released pages, lowest first. Waits for values in flight.
    ///
    /// # Errors
    /// See [`Self::alloc`].
    pub fn release_slots(&self, stream: Stream) -> Result<TensorView> {
        self.settle(stream)?;
        self.lock().release_slots(stream)
    }

    /// Returns (start, length) of the maximal ascending runs: int32 `[k, 2]` on the host.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for values beyond int32.
    pub fn runs(given: &IndexVec) -> Result<TensorView> {
        ascending_runs(given).map(TensorView::from_pairs)
    }

    /// Checks every invariant.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) with the broken invariant.
    pub fn verify(&self) -> Result<()> {
        self.lock().verify()
    }

    /// Returns the statistics of this pool. Slots of pending frees count as available, as estimated.
    #[must_use]
    pub fn stats(&self) -> SlotStats {
        self.lock().stats()
    }

    /// Returns an estimate of the slots of pending frees.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.lock().pending()
    }

    /// Returns the number of bytes on the device.
    #[must_use]
    pub fn device_bytes(&self) -> usize {
        self.lock().device_bytes()
    }
}

/// Returns the values of indices on any device. Waits for those that only a device has.
fn read_values(indices: &Indices<'_>, stream: Stream) -> Result<Indices<'static>> {
    run_blocking(|| values_now(indices.clone(), stream)).map(Indices::Host)
}

impl Drop for TokenToKvPoolAllocator {
    /// Waits for the copies to the slots, so that another allocator can hand out the same memory.
    fn drop(&mut self) {
        for writer in self.slots.get_mut().take_writers() {
            // A failed device copies nothing.
            let _ = writer.wait();
        }
    }
}

impl Pool for TokenToKvPoolAllocator {
    fn unit(&self) -> &'static str {
        Slot::NOUN
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn strict(&self) -> bool {
        self.strict()
    }

    fn stats(&self) -> Stats {
        let slots = self.lock();
        let (stats, pending) = (slots.stats(), slots.pending());
        Stats::from([
            ("capacity", stats.capacity),
            ("available", stats.available),
            ("in_use", stats.in_use),
            ("high_water", stats.high_water),
            ("dropped_frees", stats.dropped_frees),
            ("free", stats.available - stats.released - pending),
            ("released", stats.released),
            ("fenced", stats.fenced),
            ("shared", stats.shared),
            ("cached", stats.cached),
            ("pending", pending),
            ("size", slots.slots().size()),
            ("page_size", slots.slots().page_size()),
            ("bytes", stats.bytes),
            ("device_bytes", slots.device_bytes()),
        ])
    }

    fn occupancy(&self) -> Occupancy {
        // Asked before the slots are locked: a cache locks itself first, and then the slots.
        let locked = self.locked_pages();
        self.inspect(|slots| {
            let spans = slots.spans(|page| locked.contains(&page));
            Occupancy::of_equal_units(spans, slots.ledger(), slots.page_size())
        })
    }

    fn keep_ledger(&self) {
        self.lock().keep_ledger();
    }
}

impl fmt::Debug for TokenToKvPoolAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenToKvPoolAllocator").field("slots", &self.slots).finish_non_exhaustive()
    }
}
