//! Token slots, and the tensors that hand them out.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use crate::base::bounded::{int32, narrow, unsigned};
use crate::base::{
    Device, Error, ErrorKind, Id, IndexDType, IndexNumber, IndexVec, PADDING, Page, Result, Slot, reserve,
    widen,
};
use crate::index::{
    Act, BadFrees, FenceId, Fit, LastLoc, Ledger, Ledgered, OnBadFree, Order, Owner, Run, SlotAllocator,
    SlotStats,
};
use crate::kernels::{Grown, Indices, read_now};
use crate::memory::{Backend, Borrowed, Event, Gpu, Keep, Stream};
use crate::tensor::TensorView;
use crate::transfer::Transfer;

use super::KvPool;
use super::deferred::{Deferred, FreedAs, Part, Values, abandon, slots_of};
use super::fences::{Fence, Fences};
use super::mirror::known_values;
use super::shortage::{Missing, OrShort, Short};
use super::stage::Stage;

/// The state that a [`TokenToKvPoolAllocator`](super::TokenToKvPoolAllocator) guards: slots, their tensors,
/// and pending frees.
#[derive(Debug)]
pub(super) struct SlotTensors {
    slots: Ledgered<SlotAllocator>,
    device: Device,
    /// The memory of the tensors on a GPU.
    stage: Option<Stage>,
    deferred: Deferred,
    /// The fences of frees in `slots` and `deferred`.
    fences: Fences,
    /// Values of the open group that the host does not have yet.
    group: Vec<(Part, Option<Arc<Act>>)>,
    /// Pages of the current call; kept for its capacity.
    runs: Vec<Run<Page>>,
    on_bad_free: OnBadFree,
    index_dtype: IndexDType,
    /// How often it was cleared: what was taken before is not the taker's any more.
    clears: u64,
    /// Copies to slots in use, and some that are over.
    writers: Vec<Arc<Transfer>>,
    /// Pools whose rows are poisoned when their slots become free.
    poisoned: Vec<Weak<KvPool>>,
}

/// Slots, as they are handed out.
#[derive(Clone, Debug)]
pub enum Granted {
    /// One slot in host memory: a tensor of it needs no region, which would cost more than the slot.
    One(Slot, IndexDType),
    /// All others.
    Tensor(TensorView),
}

impl Granted {
    /// A 1-D tensor of the slots.
    #[must_use]
    pub fn view(&self) -> TensorView {
        match self {
            Self::One(slot, IndexDType::I32) => {
                TensorView::from_indices(IndexVec::I32(vec![i32::of(slot.number())]))
            }
            Self::One(slot, IndexDType::I64) => {
                TensorView::from_indices(IndexVec::I64(vec![i64::of(slot.number())]))
            }
            Self::Tensor(view) => view.clone(),
        }
    }
}

/// A free completed by a later call: the number of values, and the invalid ones.
#[derive(Debug)]
pub(super) struct CompletedFree {
    pub(super) given: usize,
    pub(super) bad: BadFrees,
    /// Owners of its tensors. Drop them without locks: that may run foreign code.
    pub(super) _keeps: Vec<Keep>,
}

impl SlotTensors {
    /// A pool with all slots free.
    ///
    /// # Errors
    /// The error of the backend when there is no memory for the tensors.
    pub(super) fn new(
        slots: SlotAllocator,
        on_bad_free: OnBadFree,
        index_dtype: IndexDType,
        backend: &Arc<dyn Backend>,
    ) -> Result<Self> {
        let slots = Ledgered::from(slots);
        let mut deferred = Deferred::default();
        let stage = match backend.gpu() {
            None => None,
            Some(gpu) => {
                deferred.prepare(gpu, fetched_at_once(&slots))?;
                Some(Stage::new(gpu, backend, &slots, index_dtype)?)
            }
        };
        Ok(Self {
            slots,
            device: backend.device(),
            stage,
            deferred,
            fences: Fences::default(),
            group: Vec::new(),
            runs: Vec::new(),
            on_bad_free,
            index_dtype,
            clears: 0,
            writers: Vec::new(),
            poisoned: Vec::new(),
        })
    }

    /// The ownership of slots, without frees whose values are in flight.
    pub(super) const fn slots(&self) -> &Ledgered<SlotAllocator> {
        &self.slots
    }

    /// Records owners and call sites from now on.
    pub(super) fn keep_ledger(&mut self) {
        self.slots.book_mut().open();
    }

    /// The current act of this thread, if a ledger is kept.
    pub(super) fn act(&self) -> Option<Arc<Act>> {
        self.keeps_ledger().then(Act::current)
    }

    /// Whether a ledger is kept.
    pub(super) fn keeps_ledger(&self) -> bool {
        self.slots.book().ledger().is_some()
    }

    /// Poisons rows of `kv` when their slots become free, if a ledger is kept.
    pub(super) fn poison_freed(&mut self, kv: &Arc<KvPool>) {
        if let Some(ledger) = self.slots.book_mut().ledger_mut() {
            ledger.list_freed();
            self.poisoned.push(Arc::downgrade(kv));
        }
    }

    /// Poisons the rows of slots that became free since the last call, in the order of `stream`.
    ///
    /// # Errors
    /// See [`KvPool::poison`]; the slots are free all the same.
    #[inline]
    pub(super) fn poison(&mut self, stream: Stream) -> Result<()> {
        if self.poisoned.is_empty() {
            return Ok(());
        }
        let pages = self.slots.book_mut().ledger_mut().map_or(Vec::new(), Ledger::take_freed);
        let page_size = self.slots.page_size();
        let slots: Vec<_> =
            pages.iter().map(|run| widen(run.start) * page_size..widen(run.end) * page_size).collect();
        self.poisoned.retain(|kv| kv.strong_count() > 0);
        self.poisoned.iter().filter_map(Weak::upgrade).try_for_each(|kv| kv.poison(&slots, stream))
    }

    /// [`Self::slots`] for a planner, which makes its own tensors.
    pub(super) const fn slots_mut(&mut self) -> &mut Ledgered<SlotAllocator> {
        &mut self.slots
    }

    /// The device of the tensors.
    pub(super) const fn device(&self) -> Device {
        self.device
    }

    /// Whether the lowest free slots are handed out first.
    pub(super) fn need_sort(&self) -> bool {
        matches!(self.slots.order(), Order::Sorted)
    }

    /// Whether a bad free is an error.
    pub(super) const fn strict(&self) -> bool {
        matches!(self.on_bad_free, OnBadFree::Fail)
    }

    /// Takes `count` slots: a 1-D tensor, valid on `stream`.
    #[inline]
    pub(super) fn alloc(&mut self, count: usize, stream: Stream) -> Result<OrShort<Granted>> {
        if self.must_land_before(|| count) {
            return Ok(Err(Short::InFlight));
        }
        let Some(stage) = &mut self.stage else {
            return match self.index_dtype {
                _ if count == 1 => Ok(self.alloc_one()),
                IndexDType::I32 => self.alloc_on_host::<i32>(count),
                IndexDType::I64 => self.alloc_on_host::<i64>(count),
            };
        };
        if !stage.has_ready(count) || self.slots.merges_for(count) {
            // Taking slots can be undone; merging released slots cannot.
            stage.check_writable(stream)?;
        }
        self.runs.clear();
        let pages = count.div_ceil(self.slots.page_size());
        if !self.slots.alloc_pages(pages, |run| self.runs.push(run)) {
            return Ok(Err(self.short(count)));
        }
        let upcoming = |pages: usize, runs: &mut VecDeque<Run<Page>>| {
            self.slots.pages().upcoming(pages, |run| runs.push_back(run));
        };
        let view = stage.hand_out(&self.runs, count, upcoming, stream);
        if view.is_err() {
            self.slots.release(&self.runs, None).expect("the pages were taken just now");
        }
        view.map(|view| Ok(Granted::Tensor(view)))
    }

    /// Takes note of copies to slots in use, which end before all slots are freed.
    pub(super) fn add_writer(&mut self, writer: &Arc<Transfer>) {
        self.writers.retain(|writer| !writer.is_over().unwrap_or(false));
        self.writers.push(Arc::clone(writer));
    }

    /// The copies to slots that may not be over, to be stopped without locks.
    pub(super) fn take_writers(&mut self) -> Vec<Arc<Transfer>> {
        std::mem::take(&mut self.writers)
    }

    /// Takes `count` pages for a prefix cache, the `owner`.
    pub(super) fn take_cached_pages(&mut self, count: usize, owner: &Owner) -> Result<OrShort<Vec<Page>>> {
        let slots = count * self.slots.page_size();
        if self.must_land_before(|| slots) {
            return Ok(Err(Short::InFlight));
        }
        let mut pages = reserve(count)?;
        let mut runs = Vec::new();
        let take = |run: Run<Page>| {
            pages.extend(run.range().map(Page::new));
            runs.push(run);
        };
        if !self.slots.alloc_pages(count, take) {
            return Ok(Err(self.short(slots)));
        }
        if let Err(error) = self.slots.cache(&pages, &[], owner) {
            self.slots.release(&runs, None).expect("they were taken just now");
            return Err(error);
        }
        Ok(Ok(pages))
    }

    /// [`Self::alloc`] in host memory.
    #[inline]
    fn alloc_on_host<T: IndexNumber>(&mut self, count: usize) -> Result<OrShort<Granted>> {
        let slots = self.slots.alloc::<T>(count)?;
        let tensor = |slots| Granted::Tensor(TensorView::from_indices(T::values(slots)));
        Ok(slots.map(tensor).ok_or_else(|| self.short(count)))
    }

    /// [`Self::alloc`] of one slot in host memory.
    #[inline]
    fn alloc_one(&mut self) -> OrShort<Granted> {
        let mut page = None;
        self.slots.alloc_pages(1, |run| page = Some(run.start));
        let slot = page.map(|page| Slot::new(page.number() * narrow(self.slots.page_size())));
        slot.map(|slot| Granted::One(slot, self.index_dtype)).ok_or_else(|| self.short(1))
    }

    /// Takes one ascending run of `count` slots.
    pub(super) fn alloc_contiguous(
        &mut self,
        count: usize,
        fit: Fit,
        stream: Stream,
    ) -> Result<OrShort<TensorView>> {
        self.check_writable(stream)?;
        if self.has_deferred() {
            return Ok(Err(Short::InFlight));
        }
        let taken = match self.dtype_on_host() {
            IndexDType::I32 => self.slots.alloc_contiguous(count, fit)?.map(IndexVec::I32),
            IndexDType::I64 => self.slots.alloc_contiguous(count, fit)?.map(IndexVec::I64),
        };
        match taken {
            Some(slots) => self.hand_out(slots, &[], stream).map(Ok),
            None => Ok(Err(self.short(count))),
        }
    }

    /// The dtype in which slots are listed on the host: a stage widens them itself.
    const fn dtype_on_host(&self) -> IndexDType {
        if self.stage.is_some() { IndexDType::I32 } else { self.index_dtype }
    }

    /// Takes the slots for positions `prefix..seq` of each request, concatenated. Also returns the continued
    /// pages, which the requests had before.
    pub(super) fn alloc_extend(
        &mut self,
        lens: BatchLens<'_>,
        last_loc: &LastLocs<'_>,
        stream: Stream,
    ) -> Result<OrShort<(TensorView, Vec<Page>)>> {
        self.check_writable(stream)?;
        self.stage.as_ref().map_or(Ok(()), Stage::fault)?;
        match self.dtype_on_host() {
            IndexDType::I32 => self.extend::<i32>(lens, last_loc, stream),
            IndexDType::I64 => self.extend::<i64>(lens, last_loc, stream),
        }
    }

    /// [`Self::alloc_extend`] with slots that the host lists as `T`.
    fn extend<T: IndexNumber>(
        &mut self,
        lens: BatchLens<'_>,
        last_loc: &LastLocs<'_>,
        stream: Stream,
    ) -> Result<OrShort<(TensorView, Vec<Page>)>> {
        if self.must_land_before(|| lens.most_slots(self.slots.page_size())) {
            return Ok(Err(Short::InFlight));
        }
        let Some(taken) = self.slots.extend::<T>(lens.prefix, lens.seq, last_loc.of_index())? else {
            return Ok(Err(self.short(lens.new_slots(self.slots.page_size()))));
        };
        let (slots, continued) = (T::values(taken.slots), taken.continued);
        let view = match (last_loc, &mut self.stage) {
            (LastLocs::OnDevice(last_loc), Some(stage))
                if slots.iter().any(|slot| slot == i64::from(PADDING)) =>
            {
                let slots = slots.into_i32()?;
                let (offsets, indptr) = lens.in_pages(self.slots.page_size())?;
                let grown = Grown {
                    offsets: &offsets,
                    indptr: &indptr,
                    slots: self.slots.capacity(),
                    page_size: self.slots.page_size(),
                };
                let view = stage.complete(&slots, last_loc, &grown, stream);
                view.inspect_err(|_| self.slots.undo(&slots, &continued))?
            }
            _ => self.hand_out(slots, &continued, stream)?,
        };
        Ok(Ok((view, continued)))
    }

    /// Whether frees in flight, if there are any, must be complete before `count()` slots are taken: the
    /// slots that are handed out must not depend on when values land. First in, first out, later frees stay
    /// behind those in flight, and a call takes from the other end. Lowest first, the order of frees has no
    /// effect until they are merged.
    #[inline]
    pub(super) fn must_land_before(&self, count: impl FnOnce() -> usize) -> bool {
        !self.deferred.is_empty() && self.need_sort() && self.slots.merges_for(count())
    }

    /// The shortage for `count` more slots, beside those that are on their way as values that have not
    /// landed. A request beyond the capacity is not worth reclaiming for.
    pub(super) fn short(&self, count: usize) -> Short {
        let coming = self.slots.available() + self.landing();
        let is_possible = count <= self.slots.capacity();
        let slots = if is_possible { count.saturating_sub(coming) } else { 0 };
        Short::Missing(Missing { slots, fenced: self.slots.stats().fenced })
    }

    /// Checks that a tensor of slots can be made for `stream` now.
    fn check_writable(&self, stream: Stream) -> Result<()> {
        self.stage.as_ref().map_or(Ok(()), |stage| stage.check_writable(stream))
    }

    /// Replaces the slots by others, all free. Returns the old ones. The caller has cleared them.
    pub(super) fn replace(&mut self, mut other: Self) -> Self {
        if self.keeps_ledger() {
            other.keep_ledger();
        }
        for kv in self.poisoned.iter().filter_map(Weak::upgrade) {
            other.poison_freed(&kv);
        }
        other.clears = self.clears;
        other.slots.number_fences_after(&self.slots);
        std::mem::replace(self, other)
    }

    /// Makes a tensor of taken slots. Returns the slots to the pool on failure.
    fn hand_out(&mut self, slots: IndexVec, continued: &[Page], stream: Stream) -> Result<TensorView> {
        let Some(stage) = &mut self.stage else { return Ok(TensorView::from_indices(slots)) };
        let slots = slots.into_i32()?;
        stage.show(&slots, stream).inspect_err(|_| self.slots.undo(&slots, continued))
    }

    /// An event to wait for, without locks, before more slots are taken, if the device is far behind.
    pub(super) fn crowded(&self) -> Option<Arc<Event>> {
        self.stage.as_ref()?.crowded()
    }

    /// Records that work on `stream` reads a tensor of slots: its memory is reused only after that work.
    /// Tensors in host memory have no streams.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a tensor that does not come from this allocator.
    pub(super) fn used_on(&self, tensor: &Borrowed<'_>, stream: Stream) -> Result<()> {
        match &self.stage {
            Some(stage) => stage.used_on(tensor, stream),
            None => Ok(()),
        }
    }

    /// How often it was cleared.
    pub(super) const fn clears(&self) -> u64 {
        self.clears
    }

    /// Returns unused slots to the pool, except those in `continued` pages.
    ///
    /// The list that the tensor was made of is the record of them: see `docs/decisions/grants.md`.
    pub(super) fn undo(&mut self, granted: &Granted, continued: &[Page]) {
        let view = match granted {
            Granted::One(slot, _) => return self.slots.undo(&[slot.number().cast_signed()], continued),
            Granted::Tensor(view) => view,
        };
        let of_stage = || self.stage.as_ref().map(|stage| stage.listed(view));
        match view.region().indices().cloned().or_else(of_stage).expect("the pool listed the slots") {
            IndexVec::I32(slots) => self.slots.undo(&slots, continued),
            IndexVec::I64(slots) => self.slots.undo(&slots, continued),
        }
    }

    /// Frees slots; drops and reports those that are not live. With a fence, they stay in use until
    /// [`Self::fence_passed`] names it.
    #[inline]
    fn free_values(&mut self, given: &IndexVec, fence: Option<FenceId>) -> Result<BadFrees> {
        if let Some(stage) = &self.stage {
            stage.gpu().check_process()?;
        }
        match fence {
            None => self.slots.free(given, self.on_bad_free),
            Some(fence) => self.slots.free_after(fence, given, self.on_bad_free),
        }
    }

    /// [`Self::free_values`] for indices on any device.
    ///
    /// Values that only a device knows are copied in the order of `stream`, without waiting unless more
    /// values are in flight than the pool has slots. What `keep` returns keeps the tensor alive until then.
    #[inline]
    pub(super) fn free(
        &mut self,
        given: &Indices<'_>,
        fence: Option<FenceId>,
        keep: impl FnOnce() -> Option<Keep>,
        stream: Stream,
    ) -> Result<BadFrees> {
        if let Indices::Host(values) = given
            && !self.stays_behind(fence)
        {
            return self.free_values(values, fence);
        }
        match self.values_of(given, keep, stream)? {
            Values::Known(values) if !self.stays_behind(fence) => self.free_values(&values, fence),
            values => self.free_parts(vec![Part { values, freed_as: FreedAs::Slots }], fence),
        }
    }

    /// Frees pages: each value of `given` names one. What `keep` returns keeps the tensor at a position
    /// alive. Otherwise like [`Self::free`].
    ///
    /// # Errors
    /// See [`Self::free`]. Drop the owners in `abandoned` without locks: that may run foreign code.
    pub(super) fn free_pages(
        &mut self,
        given: &[Indices<'_>],
        freed_as: FreedAs,
        fence: Option<FenceId>,
        keep: impl Fn(usize) -> Option<Keep>,
        abandoned: &mut Vec<Keep>,
        stream: Stream,
    ) -> Result<BadFrees> {
        let mut parts = Vec::with_capacity(given.len());
        for (position, given) in given.iter().enumerate() {
            match self.values_of(given, || keep(position), stream) {
                Ok(values) => parts.push(Part { values, freed_as }),
                Err(failure) => {
                    abandoned.extend(abandon(parts));
                    return Err(failure);
                }
            }
        }
        self.free_parts(parts, fence)
    }

    /// The values of indices on any device, or a copy of them in flight.
    fn values_of(
        &mut self,
        given: &Indices<'_>,
        keep: impl FnOnce() -> Option<Keep>,
        stream: Stream,
    ) -> Result<Values> {
        match given {
            Indices::Host(values) => Ok(Values::Known(values.clone())),
            Indices::Device { tensor, version } => known_values(tensor, *version)
                .map_or_else(|| self.fetch((tensor, keep), stream), |values| Ok(Values::Known(values))),
        }
    }

    /// Frees slots of the planner in their turn; drops those that are not live. Groups do not delay it.
    pub(super) fn free_now(&mut self, slots: IndexVec, fence: Option<FenceId>) -> Result<BadFrees> {
        match fence {
            Some(fence) => self.slots.free_after(fence, &slots, OnBadFree::Report),
            None if self.deferred.is_empty() || self.need_sort() => {
                self.slots.free_now(&slots, OnBadFree::Report)
            }
            None => {
                self.defer(vec![Part::of_slots(slots)], None);
                Ok(BadFrees::default())
            }
        }
    }

    /// Whether a free of known values must stay behind those in flight, so that slots return in the order in
    /// which they were freed. In sorted order it has no effect.
    #[inline]
    fn stays_behind(&self, fence: Option<FenceId>) -> bool {
        !self.deferred.is_empty() && !self.need_sort() && fence.is_none() && !self.slots.in_group()
    }

    /// Frees what `parts` name: now, if all of it is known.
    fn free_parts(&mut self, parts: Vec<Part>, fence: Option<FenceId>) -> Result<BadFrees> {
        let is_known = parts.iter().all(|part| matches!(part.values, Values::Known(_)));
        if is_known && !self.stays_behind(fence) {
            let slots = slots_of(parts, self.slots.page_size(), &mut Vec::new())?;
            return self.free_values(&slots, fence);
        }
        if fence.is_none() && self.slots.in_group() {
            let act = self.act();
            self.group.extend(parts.into_iter().map(|part| (part, act.clone())));
        } else {
            self.defer(parts, fence);
        }
        Ok(BadFrees::default())
    }

    /// Frees what `parts` name when all of it has landed.
    fn defer(&mut self, parts: Vec<Part>, fence: Option<FenceId>) {
        let count = parts.iter().map(Part::len).sum();
        let by = self.act().map(|act| (count, act)).into_iter().collect();
        self.deferred.push(parts, fence, by);
    }

    /// Calls `free` with a new fence id if there is a fence.
    #[inline]
    pub(super) fn behind<R>(
        &mut self,
        fence: Option<Arc<dyn Fence>>,
        free: impl FnOnce(&mut Self, Option<FenceId>) -> Result<R>,
    ) -> Result<R> {
        let Some(fence) = fence else { return free(self, None) };
        let id = self.slots.new_fence();
        let answer = free(self, Some(id));
        // A call that failed may have freed a part behind the fence.
        if answer.is_ok() || self.slots.is_awaited(id) || self.fences.keeps_for(id) {
            self.fences.add(id, fence);
        }
        answer
    }

    /// Enqueues a copy of the values of `tensor`. Waits for them if there is no room for the copy.
    fn fetch(
        &mut self,
        (tensor, keep): (&Borrowed<'_>, impl FnOnce() -> Option<Keep>),
        stream: Stream,
    ) -> Result<Values> {
        let gpu = self.gpu_of(tensor.device())?;
        let at_once = fetched_at_once(&self.slots);
        tensor.used_on(stream);
        match self.deferred.fetch(&gpu, at_once, (tensor, keep), stream)? {
            None => read_now(&gpu, tensor, stream).map(Values::Known),
            Some(values) => Ok(values),
        }
    }

    /// The device of a tensor.
    fn gpu_of(&self, device: Device) -> Result<Arc<Gpu>> {
        match (&self.stage, device) {
            (Some(stage), _) if stage.gpu().device() == device => Ok(Arc::clone(stage.gpu())),
            (_, Device::Cuda(ordinal)) => Gpu::open(ordinal),
            (_, Device::Cpu) => Err(Error::config("a tensor in host memory is on no GPU")),
        }
    }

    /// Completes frees whose values are on the host, and adds their reports to `settled`.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`] for the first invalid free, which frees nothing.
    /// [`ErrorKind::Driver`] when the device has failed.
    pub(super) fn settle(&mut self, settled: &mut Vec<CompletedFree>) -> Result<()> {
        let page_size = self.slots.page_size();
        while let Some(landed) = self.deferred.landed(page_size)? {
            let given = landed.slots.as_ref().map_or(0, IndexVec::len);
            let freed = landed
                .slots
                .and_then(|slots| self.slots.free_signed(&slots, landed.fence, &landed.by, self.on_bad_free));
            let (bad, failure) =
                freed.map_or_else(|error| (BadFrees::default(), Some(error)), |bad| (bad, None));
            settled.push(CompletedFree { given, bad, _keeps: landed.keeps });
            if let Some(error) = failure {
                return Err(error.prefixed("a free of slots that the host did not know"));
            }
        }
        Ok(())
    }

    /// An event that the next free to complete in [`Self::settle`] waits for.
    pub(super) fn unsettled(&self) -> Option<Arc<Event>> {
        self.deferred.oldest()
    }

    /// Whether there are no pending frees.
    #[inline]
    pub(super) fn is_settled(&self) -> bool {
        self.deferred.is_empty() && self.fences.is_empty()
    }

    pub(super) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    pub(super) const fn fences(&self) -> &Fences {
        &self.fences
    }

    pub(super) const fn fences_mut(&mut self) -> &mut Fences {
        &mut self.fences
    }

    /// Frees the slots behind a fence. Does nothing for an unknown id.
    pub(super) fn fence_passed(&mut self, id: FenceId) {
        if !self.deferred.fence_passed(id) {
            self.slots.fence_passed(id);
        }
    }

    /// Starts to collect frees. Groups nest.
    pub(super) fn free_group_begin(&mut self) {
        self.slots.group_begin();
    }

    /// Ends a group. The end of the outermost group frees everything collected, as one call, and returns how
    /// many values that was.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when no group is open; see [`Self::free`]. The group is closed all the same.
    pub(super) fn free_group_end(&mut self) -> Result<(usize, BadFrees)> {
        let Some((given, mut by)) = self.slots.group_end()? else { return Ok((0, BadFrees::default())) };
        if self.group.is_empty() && !self.stays_behind(None) {
            return Ok((given.len(), self.slots.free_signed(&given, None, &by, self.on_bad_free)?));
        }
        let mut end = given.len();
        let mut parts = vec![Part::of_slots(given)];
        for (part, act) in self.group.drain(..) {
            end += part.len();
            by.extend(act.map(|act| (end, act)));
            parts.push(part);
        }
        self.deferred.push(parts, None, by);
        Ok((0, BadFrees::default()))
    }

    /// Slots that can be handed out now or when pending frees complete. Pending frees count as whole,
    /// distinct pages.
    pub(super) fn available_size(&self) -> usize {
        self.slots.available() + self.landing()
    }

    /// An estimate, from their lengths, of the slots of pending frees.
    fn landing(&self) -> usize {
        if self.deferred.is_empty() {
            return 0;
        }
        let page_size = self.slots.page_size();
        let given = self.deferred.slots(page_size).next_multiple_of(page_size);
        let stats = self.slots.stats();
        given.min(stats.in_use - stats.fenced)
    }

    /// Merges the released slots into the free ones.
    pub(super) fn merge_and_sort_free(&mut self) {
        self.slots.merge();
    }

    /// Frees every slot, closes groups and discards fences and pending frees. Returns the owners of their
    /// tensors and the fences. Drop them without locks.
    pub(super) fn clear(&mut self) -> (Vec<Keep>, Fences) {
        let mut keeps = abandon(self.group.drain(..).map(|(part, _)| part));
        keeps.extend(self.deferred.clear());
        self.slots.clear();
        self.clears += 1;
        (keeps, self.fences.take())
    }

    /// The free pages in the order in which they are handed out, without a merge.
    ///
    /// # Errors
    /// See [`Self::alloc`].
    pub(super) fn free_slots(&mut self, stream: Stream) -> Result<TensorView> {
        self.show(signed(self.slots.pages().free_ids()?), stream)
    }

    /// The released pages, lowest first.
    ///
    /// # Errors
    /// See [`Self::alloc`].
    pub(super) fn release_slots(&mut self, stream: Stream) -> Result<TensorView> {
        self.show(signed(self.slots.pages().released_ids()?), stream)
    }

    /// Numbers as a tensor that is valid on `stream`.
    pub(super) fn show(&mut self, numbers: Vec<i32>, stream: Stream) -> Result<TensorView> {
        if let Some(stage) = &mut self.stage {
            return stage.show(&numbers, stream);
        }
        let numbers = IndexVec::I32(numbers);
        Ok(TensorView::from_indices(match self.index_dtype {
            IndexDType::I32 => numbers,
            IndexDType::I64 => IndexVec::I64(numbers.into_i64()?),
        }))
    }

    /// Checks every invariant.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`] with the broken invariant.
    pub(super) fn verify(&self) -> Result<()> {
        self.slots.fault().map_or(Ok(()), |fault| {
            Err(Error::new(ErrorKind::IndexOwnership, format!("the allocator is inconsistent: {fault}")))
        })
    }

    /// The statistics of this pool. Slots of pending frees count as available, as estimated.
    pub(super) fn stats(&self) -> SlotStats {
        let (stats, landing) = (self.slots.stats(), self.landing());
        SlotStats { available: stats.available + landing, in_use: stats.in_use - landing, ..stats }
    }

    /// An estimate of the slots of pending frees.
    pub(super) fn pending(&self) -> usize {
        self.landing()
    }

    /// Bytes on the device.
    pub(super) fn device_bytes(&self) -> usize {
        self.stage.as_ref().map_or(0, Stage::bytes)
    }
}

fn signed(ids: Vec<u32>) -> Vec<i32> {
    ids.into_iter().map(u32::cast_signed).collect()
}

/// The last slots of the requests of a batch.
#[derive(Debug)]
pub(super) enum LastLocs<'a> {
    /// On the host.
    Known(Cow<'a, [i64]>),
    /// In a tensor on the device of the pool, whose values the host does not have.
    OnDevice(&'a Borrowed<'a>),
}

impl<'a> LastLocs<'a> {
    /// The values of `last_loc`, which is on the host or on `device`.
    pub(super) fn new(last_loc: &'a Indices<'_>, device: Device) -> Result<Self> {
        match last_loc {
            Indices::Host(values) => values.as_i64().map(Self::Known),
            Indices::Device { tensor, version } => match known_values(tensor, *version) {
                Some(values) => values.into_i64().map(|slots| Self::Known(slots.into())),
                None => tensor.expect_on(device, "last_loc").map(|()| Self::OnDevice(tensor)),
            },
        }
    }

    fn of_index(&self) -> LastLoc<'_> {
        match self {
            Self::Known(slots) => LastLoc::Known(slots),
            Self::OnDevice(tensor) => LastLoc::OnDevice(tensor.shape().numel()),
        }
    }
}

/// Lengths of the requests of a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchLens<'a> {
    /// Tokens that each request has now.
    pub(super) prefix: &'a [i64],
    /// Tokens that each request will have.
    pub(super) seq: &'a [i64],
}

impl BatchLens<'_> {
    /// Slots that the requests take at most. The lengths may be invalid.
    fn most_slots(self, page_size: usize) -> usize {
        let grown = self.prefix.iter().zip(self.seq).filter_map(|(prefix, seq)| seq.checked_sub(*prefix));
        let tokens = grown.filter_map(|tokens| usize::try_from(tokens).ok());
        tokens.fold(0, |slots: usize, tokens| slots.saturating_add(tokens).saturating_add(page_size))
    }

    /// The slots that each request has in its last page, 0 if that is full, and where its new slots begin
    /// among those of the batch, with the end of all. Call it after slots were taken.
    fn in_pages(self, page_size: usize) -> Result<(Vec<i32>, Vec<i32>)> {
        let (mut offsets, mut indptr) = (reserve(self.prefix.len())?, reserve(self.seq.len() + 1)?);
        let mut end = 0;
        indptr.push(end);
        for (&prefix, &seq) in self.prefix.iter().zip(self.seq) {
            offsets.push(int32(unsigned(prefix) % page_size));
            end += int32(unsigned(seq - prefix));
            indptr.push(end);
        }
        Ok((offsets, indptr))
    }

    /// Slots in the pages that the requests begin. Call it after the lengths were checked.
    fn new_slots(self, page_size: usize) -> usize {
        let pages = |len: i64| usize::try_from(len).expect("lengths were checked").div_ceil(page_size);
        let pages = self.prefix.iter().zip(self.seq).map(|(&prefix, &seq)| pages(seq) - pages(prefix));
        pages.fold(0, usize::saturating_add).saturating_mul(page_size)
    }
}

/// Maximum number of values in flight: one per slot, and some to spare.
fn fetched_at_once(slots: &SlotAllocator) -> usize {
    /// For small pools, whose frees may list slots more than once.
    const SPARE: usize = 8 << 10;
    slots.capacity().saturating_add(SPARE)
}
