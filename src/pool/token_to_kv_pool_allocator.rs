//! Token slots as tensors, shared by threads.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use crate::base::sync::lock;
use crate::base::{Device, Error, IndexVec, Page, Result, blocking};
use crate::index::{BadFrees, FenceId, Ledgered, SlotAllocator, SlotStats, ascending_runs};
use crate::kernels::Indices;
use crate::memory::{Backend, Borrowed, Keep, Stream};
use crate::tensor::TensorView;

use super::KvPool;
use super::fences::{Fence, passed};
use super::shortage::{OrShort, Reclaim};
use super::slot_tensors::{Lens, SlotTensors};

/// The shape of a [`TokenToKvPoolAllocator`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocatorConfig {
    /// Slots, numbered from 1 or, in pages, from `page_size` on.
    pub size: usize,
    /// Slots in a page.
    pub page_size: usize,
    /// Whether the lowest free slots are handed out first, else the longest free.
    pub need_sort: bool,
    /// Whether a bad free is an error.
    pub strict: bool,
}

/// Hands out token slots of a [`KvPool`] as int32 tensors and takes them back. Calls are atomic and may come from any
/// thread.
///
/// On a GPU the tensors are parts of a stage, to which the next slots are copied before they are needed, so
/// handing out and taking back make no call to the driver as long as slots come in the order foreseen. A freed tensor
/// is read from the host's copy of the stage or of a request table. One that the host does not know (written to,
/// computed, foreign) is copied asynchronously; its slots return when the copy has landed. Slots that were freed behind a
/// [`Fence`] return when it has passed. Every call that takes or gives slots looks for both; [`Self::poll`] does nothing
/// else.
///
/// When slots are short, a call that takes some completes what is due, asks those who registered with
/// [`Self::on_shortage`], waits for values on their way from a device, and only then answers `None`.
///
/// A `stream` argument is the one on which the caller's work is enqueued: tensors are valid on it, values are copied and
/// rows are poisoned in its order. In host memory it is [`Stream::DEFAULT`].
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::IndexVec;
/// use kvpool::kernels::Indices;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, TokenToKvPoolAllocator};
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let config = AllocatorConfig { size: 1024, page_size: 1, need_sort: true, strict: false };
/// let allocator = TokenToKvPoolAllocator::new(&config, &host).unwrap();
/// let slots = allocator.alloc(3, stream).unwrap().expect("there are enough").keep();
/// assert_eq!(slots.shape().as_slice(), [3]);
/// assert_eq!(allocator.available_size(), 1021);
/// let freed = Indices::Host(IndexVec::I32(vec![1, 2, 3, 3]));
/// let bad = allocator.free(&freed, None, || None, stream).unwrap();
/// assert_eq!((bad.dropped(), allocator.available_size()), (1, 1024));
/// ```
pub struct TokenToKvPoolAllocator {
    slots: Mutex<SlotTensors>,
    device: Device,
    reclaim: Mutex<Vec<Weak<dyn Reclaim>>>,
    on_notice: Option<OnNotice>,
}

/// What an allocator found after the call that caused it had returned.
#[derive(Debug)]
pub enum Notice<'a> {
    /// A free, of so many values, that was completed late: what was wrong with it.
    BadFrees(&'a BadFrees, usize),
    /// Freed rows could not be poisoned.
    NotPoisoned(&'a Error),
}

/// Takes notices, without locks.
pub type OnNotice = Box<dyn Fn(Notice<'_>) + Send + Sync>;

impl TokenToKvPoolAllocator {
    /// All slots free.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when `size` or `page_size` is 0 or slots would not fit int32;
    /// what the backend says when there is no memory for the tensors.
    pub fn new(config: &AllocatorConfig, backend: &Arc<dyn Backend>) -> Result<Self> {
        let slots = SlotTensors::new(config, backend)?;
        Ok(Self {
            slots: Mutex::new(slots),
            device: backend.device(),
            reclaim: Mutex::new(Vec::new()),
            on_notice: None,
        })
    }

    /// Has what is found late told to `on_notice`; otherwise it is only counted.
    pub fn on_notice(&mut self, on_notice: OnNotice) {
        self.on_notice = Some(on_notice);
    }

    /// Asks `reclaim`, until it is dropped, when slots are short: after those that were registered before.
    pub fn on_shortage(&self, reclaim: &Arc<dyn Reclaim>) {
        lock(&self.reclaim).push(Arc::downgrade(reclaim));
    }

    /// Notes from now on who takes and gives what.
    pub fn keep_ledger(&self) {
        self.lock().keep_ledger();
    }

    /// Has rows of `kv` poisoned when their slots become free, if a ledger is kept.
    pub fn poison_freed(&self, kv: &Arc<KvPool>) {
        self.lock().poison_freed(kv);
    }

    /// Takes `count` slots: a 1-D int32 tensor, valid on `stream`. `None` when the pool is short.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot hold the answer, or tensors that
    /// were handed out before still cover the stage; [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the driver
    /// refuses; as [`Self::poll`]. Nothing is taken.
    pub fn alloc(&self, count: usize, stream: Stream) -> Result<Option<Grant<'_>>> {
        let taken = self.take(stream, |slots| slots.alloc(count, stream))?;
        Ok(taken.map(|view| self.grant(view, Vec::new())))
    }

    /// As [`Self::alloc`], in one ascending run: the lowest that fits. Nothing is reclaimed where there are enough slots, but
    /// not in one run.
    ///
    /// # Errors
    /// As [`Self::alloc`].
    pub fn alloc_contiguous(&self, count: usize, stream: Stream) -> Result<Option<Grant<'_>>> {
        let taken = self.take(stream, |slots| slots.alloc_contiguous(count, stream))?;
        Ok(taken.map(|view| self.grant(view, Vec::new())))
    }

    /// Takes the slots for positions `prefix..seq` of each request, concatenated.
    ///
    /// # Errors
    /// As [`SlotAllocator::extend`] and [`Self::alloc`].
    pub fn alloc_extend(
        &self,
        prefix_lens: &[i64],
        seq_lens: &[i64],
        last_loc: &[i64],
        stream: Stream,
    ) -> Result<Option<Grant<'_>>> {
        let lens = Lens { prefix: prefix_lens, seq: seq_lens };
        let taken = self.take(stream, |slots| slots.alloc_extend(lens, last_loc, stream))?;
        Ok(taken.map(|(view, continued)| self.grant(view, continued)))
    }

    /// Takes one slot a request, that of position `seq - 1`; else as [`Self::alloc_extend`].
    ///
    /// # Errors
    /// As [`Self::alloc_extend`].
    pub fn alloc_decode(
        &self,
        seq_lens: &[i64],
        last_loc: &[i64],
        stream: Stream,
    ) -> Result<Option<Grant<'_>>> {
        let mut prefix_lens = crate::base::reserve(seq_lens.len())?;
        prefix_lens.extend(seq_lens.iter().map(|len| len.saturating_sub(1)));
        self.alloc_extend(&prefix_lens, seq_lens, last_loc, stream)
    }

    /// Gives slots back; what is not live is dropped and reported. Behind a fence, they stay in use until it has passed.
    ///
    /// Values that only a device knows are copied in the order of `stream`, and nothing waits for them, unless more are
    /// on their way than the pool has slots; `keep` keeps the tensor until they were.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) when anything would be dropped;
    /// nothing is changed then. As [`Self::poll`]. [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the driver
    /// refuses.
    pub fn free(
        &self,
        given: &Indices<'_>,
        after: Option<&Arc<dyn Fence>>,
        keep: impl FnOnce() -> Option<Keep>,
        stream: Stream,
    ) -> Result<BadFrees> {
        self.give(after, stream, |slots, id| slots.free(given, id, keep, stream))
    }

    /// Adds an owner to slots: see [`SlotAllocator::share`]. Waits for values on their way.
    ///
    /// # Errors
    /// As there, and as [`Self::settle`].
    pub fn share(&self, given: &IndexVec, stream: Stream) -> Result<()> {
        self.settle(stream)?;
        self.lock().slots_mut().share(given)
    }

    /// Starts to collect frees. Groups nest.
    pub fn free_group_begin(&self) {
        self.lock().free_group_begin();
    }

    /// Ends a group; the outermost frees all that was collected as one call and says how much that was.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when no group is open; as [`Self::free`], the group being closed.
    pub fn free_group_end(&self, stream: Stream) -> Result<(usize, BadFrees)> {
        self.freeing(self.lock(), stream, SlotTensors::free_group_end)
    }

    /// Makes every slot free, closes groups and forgets fences and frees that have not landed.
    pub fn clear(&self, stream: Stream) {
        let kept = self.freeing(self.lock(), stream, |slots| Ok(slots.clear()));
        // Not under the lock: they may be the last owners of foreign objects.
        drop(kept);
    }

    /// Merges the released slots into the free ones.
    pub fn merge_and_sort_free(&self) {
        self.lock().merge_and_sort_free();
    }

    /// Completes frees whose values have landed or whose fences have passed. Waits for nothing.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) for the first late free that would
    /// have dropped something: it is left undone. [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the device has
    /// failed. What a fence answers that cannot tell.
    pub fn poll(&self, stream: Stream) -> Result<()> {
        self.polled(stream).map(drop)
    }

    /// Locks it after [`Self::poll`].
    #[inline]
    fn polled(&self, stream: Stream) -> Result<MutexGuard<'_, SlotTensors>> {
        let slots = self.lock();
        if slots.is_settled() {
            return Ok(slots);
        }
        drop(slots);
        self.complete_landed(stream)?;
        self.poll_fences(stream)?;
        Ok(self.lock())
    }

    /// As [`Self::poll`], for fences alone: no late free is found wrong.
    ///
    /// # Errors
    /// What a fence answers that cannot tell.
    pub fn poll_fences(&self, stream: Stream) -> Result<()> {
        let waiting = self.lock().fences().list();
        let (passed, end) = passed(&waiting);
        if !passed.is_empty() {
            // What has passed is freed, also where another cannot tell.
            let gone = self.freeing(self.lock(), stream, |slots| {
                for &id in &passed {
                    slots.fence_passed(id);
                }
                Ok(slots.fences_mut().take_passed(&passed))
            });
            drop(gone);
        }
        end
    }

    /// As [`Self::poll`], and waits for values that are on their way.
    ///
    /// # Errors
    /// As [`Self::poll`].
    pub fn settle(&self, stream: Stream) -> Result<()> {
        while self.wait_for_oldest(stream)? {}
        self.poll(stream)
    }

    /// Waits for the oldest free whose values have not landed, and completes it. `false` when there is none.
    fn wait_for_oldest(&self, stream: Stream) -> Result<bool> {
        let oldest = {
            let slots = self.lock();
            if !slots.has_deferred() {
                return Ok(false);
            }
            slots.unsettled()
        };
        if let Some(oldest) = oldest {
            blocking(|| oldest.wait())?;
        }
        self.complete_landed(stream)?;
        Ok(true)
    }

    /// Completes frees whose values have landed, and reports what was wrong with them.
    fn complete_landed(&self, stream: Stream) -> Result<()> {
        let mut settled = Vec::new();
        let answer = self.freeing(self.lock(), stream, |slots| slots.settle(&mut settled));
        for late in settled {
            if late.bad.dropped() > 0 {
                self.notify(Notice::BadFrees(&late.bad, late.given));
            }
        }
        answer
    }

    /// What `take` takes; `None` if slots are short and nothing helps.
    pub(super) fn take<T>(
        &self,
        stream: Stream,
        mut take: impl FnMut(&mut SlotTensors) -> Result<OrShort<T>>,
    ) -> Result<Option<T>> {
        loop {
            let mut slots = self.polled(stream)?;
            if let Some(event) = slots.crowded() {
                drop(slots);
                blocking(|| event.wait())?;
                continue;
            }
            let taken = take(&mut slots)?;
            drop(slots);
            match taken {
                Ok(taken) => return Ok(Some(taken)),
                Err(short) if self.reclaim(short.slots, stream)? || self.wait_for_oldest(stream)? => (),
                Err(_) => return Ok(None),
            }
        }
    }

    /// Whether slots were freed by those who can do without.
    fn reclaim(&self, slots: usize, stream: Stream) -> Result<bool> {
        if slots == 0 {
            return Ok(false);
        }
        let mut registered = lock(&self.reclaim);
        registered.retain(|reclaim| reclaim.strong_count() > 0);
        let asked: Vec<_> = registered.iter().filter_map(Weak::upgrade).collect();
        drop(registered);
        let mut freed = 0;
        for reclaim in asked {
            if freed < slots {
                freed += reclaim.reclaim(slots - freed, stream)?;
            }
        }
        Ok(freed > 0)
    }

    /// Frees what `free` frees, behind a fence if there is one.
    pub(super) fn give<R>(
        &self,
        after: Option<&Arc<dyn Fence>>,
        stream: Stream,
        free: impl FnOnce(&mut SlotTensors, Option<FenceId>) -> Result<R>,
    ) -> Result<R> {
        // The caller's own copy is dropped when no lock is held.
        let fence = after.cloned();
        self.freeing(self.polled(stream)?, stream, |slots| slots.behind(fence, free))
    }

    /// Does `work` under the lock and, where a ledger is kept, poisons the rows of slots that it makes free, before another
    /// call can hand them out.
    fn freeing<R>(
        &self,
        mut slots: MutexGuard<'_, SlotTensors>,
        stream: Stream,
        work: impl FnOnce(&mut SlotTensors) -> Result<R>,
    ) -> Result<R> {
        let answer = work(&mut slots);
        let poisoned = slots.poison(stream);
        drop(slots);
        if let Err(failure) = poisoned {
            self.notify(Notice::NotPoisoned(&failure));
        }
        answer
    }

    fn notify(&self, notice: Notice<'_>) {
        if let Some(on_notice) = &self.on_notice {
            on_notice(notice);
        }
    }

    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, SlotTensors> {
        lock(&self.slots)
    }

    const fn grant(&self, view: TensorView, continued: Vec<Page>) -> Grant<'_> {
        Grant { allocator: self, view: Some(view), continued }
    }

    /// Shows `look` who owns which slot, under the lock. Frees that have not landed are not counted in.
    pub fn look<R>(&self, look: impl FnOnce(&Ledgered<SlotAllocator>) -> R) -> R {
        look(self.lock().slots())
    }

    /// Shows `look` the fences that have not passed, unless another thread has the lock.
    ///
    /// # Errors
    /// What `look` answers first.
    pub fn try_look_at_fences<E>(
        &self,
        mut look: impl FnMut(&dyn Fence) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.slots.try_lock().map_or(Ok(()), |slots| slots.fences().iter().try_for_each(&mut look))
    }

    /// Forgets all fences, whose slots stay in use until [`Self::clear`].
    pub fn forget_fences(&self) {
        let gone = self.lock().fences_mut().take();
        drop(gone);
    }

    /// Notes that work on `stream` reads slots that were handed out: their memory is used again after that work only. Slots in
    /// host memory have no streams.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a tensor that is none of this allocator's.
    pub fn used_on(&self, tensor: &Borrowed<'_>, stream: Stream) -> Result<()> {
        self.lock().used_on(tensor, stream)
    }

    /// Where the tensors are.
    #[must_use]
    pub const fn device(&self) -> Device {
        self.device
    }

    /// Whether the lowest free slots are handed out first.
    #[must_use]
    pub fn need_sort(&self) -> bool {
        self.lock().need_sort()
    }

    /// Whether a bad free is an error.
    #[must_use]
    pub fn strict(&self) -> bool {
        self.lock().strict()
    }

    /// Slots in a page.
    #[must_use]
    pub fn page_size(&self) -> usize {
        self.look(|slots| slots.page_size())
    }

    /// Slots that can be handed out now or when frees have landed. Those are counted as whole pages of their own,
    /// none of them twice.
    #[must_use]
    pub fn available_size(&self) -> usize {
        self.lock().available_size()
    }

    /// The free pages, in the order in which they are handed out without a merge. Waits for values on their way.
    ///
    /// # Errors
    /// As [`Self::alloc`].
    pub fn free_slots(&self, stream: Stream) -> Result<TensorView> {
        self.settle(stream)?;
        self.lock().free_slots(stream)
    }

    /// The released pages, lowest first. Waits for values on their way.
    ///
    /// # Errors
    /// As [`Self::alloc`].
    pub fn release_slots(&self, stream: Stream) -> Result<TensorView> {
        self.settle(stream)?;
        self.lock().release_slots(stream)
    }

    /// (start, length) of the maximal ascending runs: int32 `[k, 2]` on the host.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for values beyond int32.
    pub fn runs(given: &IndexVec) -> Result<TensorView> {
        ascending_runs(given).map(TensorView::from_pairs)
    }

    /// Checks every invariant.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) with what is broken.
    pub fn verify(&self) -> Result<()> {
        self.lock().verify()
    }

    /// The numbers of this pool. Slots whose free has not landed count as available, as far as can be told.
    #[must_use]
    pub fn stats(&self) -> SlotStats {
        self.lock().stats()
    }

    /// Slots whose free has not landed, as far as can be told.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.lock().pending()
    }

    /// Bytes on the device.
    #[must_use]
    pub fn device_bytes(&self) -> usize {
        self.lock().device_bytes()
    }
}

impl fmt::Debug for TokenToKvPoolAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenToKvPoolAllocator").field("slots", &self.slots).finish_non_exhaustive()
    }
}

/// Slots that were taken, and go back when this is dropped, unless they are kept.
#[derive(Debug)]
#[must_use]
pub struct Grant<'a> {
    allocator: &'a TokenToKvPoolAllocator,
    /// `None` once they are kept.
    view: Option<TensorView>,
    /// Pages that the requests had before, in which some of the slots are.
    continued: Vec<Page>,
}

impl Grant<'_> {
    /// The slots.
    #[must_use]
    pub fn view(&self) -> &TensorView {
        self.view.as_ref().expect("only `keep` takes it")
    }

    /// Hands the slots on: from now on they are given back by [`TokenToKvPoolAllocator::free`].
    #[must_use]
    pub fn keep(mut self) -> TensorView {
        self.view.take().expect("only this takes it")
    }
}

impl Drop for Grant<'_> {
    fn drop(&mut self) {
        if let Some(view) = self.view.take() {
            self.allocator.lock().undo(&view, &self.continued);
        }
    }
}
