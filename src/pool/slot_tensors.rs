//! Token slots, and the tensors that hand them out.

mod batch;
mod frees;
mod grants;
mod source;

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, Weak};

use crate::base::{
    Device, Discarded, Epoch, Error, ErrorKind, Id, IndexDType, IndexNumber, IndexVec, PADDING, Page, Result,
    Slot, try_collect, try_with_capacity, widen,
};
use crate::index::{
    CallRecord, Fit, Ledger, Ledgered, Moment, OnBadFree, Order, Owner, Run, SlotAllocator, SlotList,
    SlotStats,
};
use crate::kernels::GrowingBatch;
use crate::memory::{Backend, BorrowedTensor, Event, Stream};
use crate::tensor::TensorView;
use crate::tensor::dlpack::IndexExport;
use crate::transfer::Transfer;

use super::KvPool;
use super::deferred::{DeferredFrees, FreedValues, abandon};
use super::fences::Fences;
use super::shortage::{Shortage, Shortfall, TakeResult};
use super::stage::Stage;
pub(super) use batch::{BatchLens, LastLocs};
use frees::fetched_at_once;
pub(super) use frees::{Freed, PagesOf};
use grants::{Grants, Listing};
pub(super) use source::Source;
pub use source::{TensorOrigin, Writes};

/// The state that a [`TokenToKvPoolAllocator`](super::TokenToKvPoolAllocator) guards: slots, their tensors,
/// and pending frees.
pub(super) struct SlotTensors {
    slots: Ledgered<SlotAllocator>,
    device: Device,
    /// The memory of the tensors on a GPU.
    stage: Option<Stage>,
    deferred: DeferredFrees,
    /// The fences of frees in `slots` and `deferred`.
    fences: Fences,
    /// Values of the open group that the host does not have yet.
    group: Vec<(FreedValues, Option<Arc<CallRecord>>)>,
    /// Pages of the current call; kept for its capacity.
    runs: Vec<Run<Page>>,
    /// Slots of the current call that extends requests; kept for its capacity.
    extended: SlotList,
    on_bad_free: OnBadFree,
    index_dtype: IndexDType,
    /// The tensors in which slots were handed out.
    grants: Grants,
    /// Copies to slots in use. Some of them may be over.
    writers: Vec<Arc<Transfer>>,
    /// Copies that may still use free pages.
    copied: Vec<CopiedPages>,
    /// Pools whose rows are poisoned when their slots become free.
    poisoned: Vec<Weak<KvPool>>,
}

impl fmt::Debug for SlotTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotTensors")
            .field("slots", &*self.slots)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// Pages that a copy may still use after they were freed. Their next owner has to come after it.
#[derive(Debug)]
pub(super) struct CopiedPages {
    pub(super) copy: Arc<Transfer>,
    pub(super) pages: Vec<Page>,
}

/// Slots, as they are handed out.
#[derive(Debug)]
pub enum GrantedSlots {
    /// One slot in host memory: a tensor of it needs no region, which would cost more than the slot.
    One(OneSlot),
    /// All others.
    Tensor(TensorView),
}

/// A slot in host memory.
#[derive(Debug)]
pub struct OneSlot {
    slot: Slot,
    dtype: IndexDType,
    /// The tensor of the slot, until it is taken.
    export: Option<IndexExport>,
}

impl GrantedSlots {
    /// Returns a 1-D tensor of the slots.
    #[must_use]
    pub fn view(&self) -> TensorView {
        match self {
            Self::One(OneSlot { slot, dtype: IndexDType::I32, .. }) => {
                TensorView::from_indices(IndexVec::I32(vec![i32::of(slot.number())]))
            }
            Self::One(OneSlot { slot, dtype: IndexDType::I64, .. }) => {
                TensorView::from_indices(IndexVec::I64(vec![i64::of(slot.number())]))
            }
            Self::Tensor(view) => view.clone(),
        }
    }

    /// Takes the tensor of a single slot in host memory, to be given to a framework. `None` for all others.
    #[inline]
    pub const fn take_export(&mut self) -> Option<IndexExport> {
        match self {
            Self::One(one) => one.export.take(),
            Self::Tensor(_) => None,
        }
    }
}

impl SlotTensors {
    /// Creates a pool with all slots free.
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
        let mut deferred = DeferredFrees::default();
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
            extended: SlotList::default(),
            on_bad_free,
            index_dtype,
            grants: Grants::default(),
            writers: Vec::new(),
            copied: Vec::new(),
            poisoned: Vec::new(),
        })
    }

    /// Returns the ownership of slots, without frees whose values are in flight.
    pub(super) const fn slots(&self) -> &Ledgered<SlotAllocator> {
        &self.slots
    }

    /// Records owners and call sites from now on.
    pub(super) fn keep_ledger(&mut self) {
        self.slots.open_ledger();
    }

    /// Returns the current call of this thread, if a ledger is kept.
    pub(super) fn call(&self) -> Option<Arc<CallRecord>> {
        self.keeps_ledger().then(CallRecord::current)
    }

    /// Returns whether a ledger is kept.
    pub(super) fn keeps_ledger(&self) -> bool {
        self.slots.ledger().is_some()
    }

    /// Poisons rows of `kv` when their slots become free, if a ledger is kept.
    pub(super) fn poison_freed(&mut self, kv: &Arc<KvPool>) {
        if let Some(ledger) = self.slots.ledger_mut() {
            ledger.list_freed();
            self.poisoned.push(Arc::downgrade(kv));
        }
    }

    /// Poisons the rows of slots that became free since the last call, in the order of `stream`.
    ///
    /// # Errors
    /// See [`KvPool::poison`]; the slots are free in either case.
    #[inline]
    pub(super) fn poison(&mut self, stream: Stream) -> Result<()> {
        if self.poisoned.is_empty() { Ok(()) } else { self.poison_rows(stream) }
    }

    #[cold]
    fn poison_rows(&mut self, stream: Stream) -> Result<()> {
        let pages = self.slots.ledger_mut().map_or(Vec::new(), Ledger::take_freed);
        // A page that a copy may still read is poisoned when it is handed out.
        let is_copied =
            |page: &u32| self.copied.iter().any(|copied| copied.pages.contains(&Page::new(*page)));
        let runs: Vec<_> = if self.copied.is_empty() {
            pages
        } else {
            pages.into_iter().flatten().filter(|page| !is_copied(page)).map(|page| page..page + 1).collect()
        };
        self.poison_runs(&runs, stream)
    }

    /// Poisons the rows of pages, in the order of `stream`.
    fn poison_runs(&mut self, runs: &[Range<u32>], stream: Stream) -> Result<()> {
        let page_size = self.slots.page_size();
        let slots: Vec<_> =
            runs.iter().map(|run| widen(run.start) * page_size..widen(run.end) * page_size).collect();
        self.poisoned.retain(|kv| kv.strong_count() > 0);
        self.poisoned.iter().filter_map(Weak::upgrade).try_for_each(|kv| kv.poison(&slots, stream))
    }

    /// Returns the slots for a caller that holds some of them since `epoch`; `None` if that is over, and they
    /// are free already.
    #[inline]
    pub(super) fn at(&mut self, epoch: Epoch) -> Option<SlotsAt<'_>> {
        (self.epoch() == epoch).then_some(SlotsAt(self))
    }

    /// Adds an owner to slots: see [`SlotAllocator::share`].
    pub(super) fn share(&mut self, given: &IndexVec) -> Result<()> {
        self.slots.share(given)
    }

    /// Returns the device of the tensors.
    pub(super) const fn device(&self) -> Device {
        self.device
    }

    /// Returns whether the lowest free slots are handed out first.
    pub(super) fn need_sort(&self) -> bool {
        matches!(self.slots.order(), Order::Sorted)
    }

    /// Returns whether a bad free is an error.
    pub(super) const fn strict(&self) -> bool {
        matches!(self.on_bad_free, OnBadFree::Fail)
    }

    /// Takes `count` slots and passes them to `put`, once: they are large, and every result around them would
    /// be a copy. A tensor is 1-D and valid on `stream`.
    #[inline]
    pub(super) fn alloc(
        &mut self,
        count: usize,
        stream: Stream,
        put: impl FnOnce(GrantedSlots, &Self),
    ) -> Result<TakeResult<()>> {
        if self.must_land_before(|| count) {
            return Ok(Err(Shortage::InFlight));
        }
        self.grants.reserve()?;
        let Some(stage) = &mut self.stage else {
            return match self.index_dtype {
                _ if count == 1 => Ok(self.alloc_one(put)),
                IndexDType::I32 => self.alloc_on_host::<i32>(count, put),
                IndexDType::I64 => self.alloc_on_host::<i64>(count, put),
            };
        };
        if !stage.has_ready(count) || self.slots.merges_for(count) {
            // Slots can be given back after an error; a merge of released slots cannot be undone.
            stage.check_writable(stream)?;
        }
        self.runs.clear();
        let pages = count.div_ceil(self.slots.page_size());
        if !self.slots.alloc_page_runs(pages, &mut self.runs)? {
            return Ok(Err(self.short(count)));
        }
        let upcoming = |pages: usize, runs: &mut VecDeque<Run<Page>>| {
            self.slots.pages().upcoming(pages, |run| runs.push_back(run));
        };
        let view = stage.hand_out(&self.runs, count, upcoming, stream);
        if view.is_err() {
            self.slots.undo_pages(&self.runs);
        }
        let mut view = view?;
        let run = if let [run] = self.runs[..] { Some(self.slots.first_slot(run.start)) } else { None };
        self.list(&mut view, run, false);
        put(GrantedSlots::Tensor(view), self);
        Ok(Ok(()))
    }

    /// Records the tensor in which slots are handed out: `run` is the first one, if they ascend by one;
    /// `continues` says whether some are in pages of earlier tensors.
    fn list(&mut self, view: &mut TensorView, run: Option<Slot>, continues: bool) {
        self.list_since(Ledgered::take_moment, view, run, continues);
    }

    /// Works like [`Self::list`], for slots that were taken at another moment.
    fn list_since(
        &mut self,
        since: impl FnOnce(&mut Ledgered<SlotAllocator>) -> Moment,
        view: &mut TensorView,
        run: Option<Slot>,
        continues: bool,
    ) {
        let count = view.shape().numel();
        if view.region().has_life() || count == 0 {
            return;
        }
        let (address, size) = (view.address().addr(), view.dtype().size());
        let listing = Listing { address, count, size, run, continues };
        view.keep_life(self.grants.add(listing, since(&mut self.slots)));
    }

    /// Works like [`Self::list`], for a copy of the tensor in which slots were handed out in `epoch`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when the host has no memory for the record.
    pub(super) fn list_again(&mut self, view: &mut TensorView, epoch: Epoch, continues: bool) -> Result<()> {
        self.grants.reserve()?;
        let is_over = self.epoch() != epoch;
        // What was taken before a clear counts as taken before every free.
        let since = |slots: &mut Ledgered<SlotAllocator>| {
            if is_over { Moment::default() } else { slots.take_moment() }
        };
        self.list_since(since, view, None, continues);
        Ok(())
    }

    /// Records copies to slots in use, which have to be over before all slots are freed.
    pub(super) fn add_writer(&mut self, writer: &Arc<Transfer>) {
        self.writers.retain(|writer| !writer.is_over().unwrap_or(false));
        self.writers.push(Arc::clone(writer));
    }

    /// Records copies that may still use pages that become free now.
    pub(super) fn add_copied(&mut self, copied: Vec<CopiedPages>) {
        self.copied.extend(copied);
    }

    /// Returns whether a copy may still use free pages.
    #[inline]
    pub(super) fn has_copied(&mut self) -> bool {
        !self.copied.is_empty() && self.has_copied_still()
    }

    #[cold]
    fn has_copied_still(&mut self) -> bool {
        self.copied.retain(|copied| !copied.copy.is_over().unwrap_or(false));
        !self.copied.is_empty()
    }

    /// Returns the copies that may still use pages which are no longer free, with these pages. The owner of
    /// the pages has to wait for them.
    #[cold]
    pub(super) fn take_copied(&mut self) -> Vec<CopiedPages> {
        let mut taken = Vec::new();
        for CopiedPages { copy, pages } in &mut self.copied {
            let list = self.slots.pages();
            let pages: Vec<Page> = pages.extract_if(.., |page| list.is_live(*page)).collect();
            if !pages.is_empty() {
                taken.push(CopiedPages { copy: Arc::clone(copy), pages });
            }
        }
        taken
    }

    /// Poisons pages that no copy uses any more, if a ledger is kept.
    ///
    /// # Errors
    /// See [`KvPool::poison`].
    pub(super) fn poison_copied(&mut self, copied: &[CopiedPages], stream: Stream) -> Result<()> {
        if self.poisoned.is_empty() {
            return Ok(());
        }
        let pages = copied.iter().flat_map(|copied| &copied.pages);
        let runs: Vec<_> = pages.map(|page| page.number()..page.number() + 1).collect();
        self.poison_runs(&runs, stream)
    }

    /// Returns the copies to slots that may not be over, to be stopped.
    pub(super) fn take_writers(&mut self) -> Vec<Arc<Transfer>> {
        std::mem::take(&mut self.writers)
    }

    /// Works like [`Self::alloc`] in host memory.
    #[inline]
    fn alloc_on_host<T: IndexNumber>(
        &mut self,
        count: usize,
        put: impl FnOnce(GrantedSlots, &Self),
    ) -> Result<TakeResult<()>> {
        let Some(slots) = self.slots.alloc::<T>(count)? else { return Ok(Err(self.short(count))) };
        let slots = T::values(slots);
        let (address, size, run) = (slots.address(), slots.dtype().size(), self.run_of(&slots));
        let listing = Listing { address, count, size, run, continues: false };
        let life = (count > 0).then(|| self.grants.add(listing, self.slots.take_moment()));
        put(GrantedSlots::Tensor(TensorView::from_living_indices(slots, life)), self);
        Ok(Ok(()))
    }

    /// Returns the first of slots that were taken just now, if it is known that they ascend by one: in sorted
    /// order the ends tell.
    fn run_of(&self, slots: &IndexVec) -> Option<Slot> {
        if self.need_sort() && slots.ends_like_a_run() { first_of(slots) } else { None }
    }

    /// Works like [`Self::alloc`] of one slot in host memory.
    #[inline]
    fn alloc_one(&mut self, put: impl FnOnce(GrantedSlots, &Self)) -> TakeResult<()> {
        let Some(page) = self.slots.alloc_page() else { return Err(self.short(1)) };
        let (slot, dtype) = (self.slots.first_slot(page), self.index_dtype);
        // The tensor keeps the life that begins when its address is known.
        let export = match dtype {
            IndexDType::I32 => IndexExport::new(i32::of(slot.number())),
            IndexDType::I64 => IndexExport::new(i64::of(slot.number())),
        };
        let (address, size) = (export.address(), dtype.dtype().size());
        let listing = Listing { address, count: 1, size, run: Some(slot), continues: false };
        let life = self.grants.add(listing, self.slots.take_moment());
        put(GrantedSlots::One(OneSlot { slot, dtype, export: Some(export.with_life(life)) }), self);
        Ok(())
    }

    /// Takes one ascending run of `count` slots.
    pub(super) fn alloc_contiguous(
        &mut self,
        count: usize,
        fit: Fit,
        stream: Stream,
    ) -> Result<TakeResult<TensorView>> {
        self.check_writable(stream)?;
        self.grants.reserve()?;
        if self.has_deferred() {
            return Ok(Err(Shortage::InFlight));
        }
        let taken = match self.dtype_on_host() {
            IndexDType::I32 => self.slots.alloc_contiguous(count, fit)?.map(IndexVec::I32),
            IndexDType::I64 => self.slots.alloc_contiguous(count, fit)?.map(IndexVec::I64),
        };
        match taken {
            Some(slots) => {
                let run = first_of(&slots);
                let mut view = self.hand_out(slots, stream)?;
                self.list(&mut view, run, false);
                Ok(Ok(view))
            }
            None => Ok(Err(self.short(count))),
        }
    }

    /// Returns the dtype in which slots are listed on the host: a stage widens them itself.
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
    ) -> Result<TakeResult<(TensorView, Vec<Page>)>> {
        self.check_writable(stream)?;
        self.stage.as_ref().map_or(Ok(()), Stage::take_fault)?;
        self.grants.reserve()?;
        if self.must_land_before(|| lens.max_slots(self.slots.page_size())) {
            return Ok(Err(Shortage::InFlight));
        }
        let extended = match (&self.stage, self.index_dtype) {
            (Some(_), _) => self.extend_on_device(lens, last_loc, stream)?,
            (None, IndexDType::I32) => self.extend_on_host::<i32>(lens, last_loc)?,
            (None, IndexDType::I64) => self.extend_on_host::<i64>(lens, last_loc)?,
        };
        let Some((mut view, continued)) = extended else {
            return Ok(Err(self.short(lens.new_slots(self.slots.page_size()))));
        };
        self.list(&mut view, None, !continued.is_empty());
        Ok(Ok((view, continued)))
    }

    fn extend_on_host<T: IndexNumber>(
        &mut self,
        lens: BatchLens<'_>,
        last_loc: &LastLocs<'_>,
    ) -> Result<Option<(TensorView, Vec<Page>)>> {
        let taken = self.slots.extend::<T>(lens.prefix, lens.seq, last_loc.of_index())?;
        Ok(taken.map(|taken| (TensorView::from_indices(T::values(taken.slots)), taken.continued)))
    }

    fn extend_on_device(
        &mut self,
        lens: BatchLens<'_>,
        last_loc: &LastLocs<'_>,
        stream: Stream,
    ) -> Result<Option<(TensorView, Vec<Page>)>> {
        let mut slots = std::mem::take(&mut self.extended);
        slots.clear();
        let made = self.extend_to(&mut slots, lens, last_loc, stream);
        self.extended = slots;
        made
    }

    /// Works like [`Self::extend_on_device`], with an empty list for the slots.
    fn extend_to(
        &mut self,
        slots: &mut SlotList,
        lens: BatchLens<'_>,
        last_loc: &LastLocs<'_>,
        stream: Stream,
    ) -> Result<Option<(TensorView, Vec<Page>)>> {
        let taken = self.slots.extend_runs(lens.prefix, lens.seq, last_loc.of_index(), slots)?;
        let Some(continued) = taken else { return Ok(None) };
        let has_unknown = || slots.runs().iter().any(|run| run.start.number() == PADDING);
        let view = match last_loc {
            LastLocs::OnDevice(last_loc) if has_unknown() => self.complete(slots, last_loc, lens, stream),
            _ => self.staged(slots, stream),
        };
        let view = view.inspect_err(|_| self.slots.undo(slots.iter().map(u32::cast_signed), &continued))?;
        Ok(Some((view, continued)))
    }

    /// Makes a tensor of slots, some of which only the device can compute.
    fn complete(
        &mut self,
        slots: &SlotList,
        last_loc: &BorrowedTensor<'_>,
        lens: BatchLens<'_>,
        stream: Stream,
    ) -> Result<TensorView> {
        let (offsets, indptr) = lens.in_pages(self.slots.page_size())?;
        let grown = GrowingBatch {
            offsets: &offsets,
            indptr: &indptr,
            slots: self.slots.capacity(),
            page_size: self.slots.page_size(),
        };
        let Some(stage) = &mut self.stage else { unreachable!("slots in host memory are known") };
        stage.complete(slots, last_loc, &grown, stream)
    }

    /// Returns the slots as a tensor on the device.
    fn staged(&mut self, slots: &SlotList, stream: Stream) -> Result<TensorView> {
        let Some(stage) = &mut self.stage else { unreachable!("slots in host memory are in no stage") };
        stage.tensor_of(slots, stream)
    }

    /// Returns whether frees in flight must be complete before `count()` slots are taken, so that the slots
    /// handed out do not depend on when values arrive. In first in, first out order, later frees wait behind
    /// those in flight, and a call takes slots from the other end. In sorted order, the order of frees has no
    /// effect until they are merged.
    #[inline]
    pub(super) fn must_land_before(&self, count: impl FnOnce() -> usize) -> bool {
        !self.deferred.is_empty() && self.need_sort() && self.slots.merges_for(count())
    }

    /// Returns the shortage for `count` more slots, assuming that all pending frees complete. A request
    /// beyond the capacity is not worth reclaiming for.
    pub(super) fn short(&self, count: usize) -> Shortage {
        let coming = self.slots.available() + self.pending_slots();
        let is_possible = count <= self.slots.capacity();
        let slots = if is_possible { count.saturating_sub(coming) } else { 0 };
        Shortage::Missing(Shortfall { slots, fenced: self.slots.stats().fenced })
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
        other.slots.continue_after(&self.slots);
        other.grants = std::mem::take(&mut self.grants);
        std::mem::replace(self, other)
    }

    /// Makes a tensor of taken slots. Returns the slots to the pool on failure.
    fn hand_out(&mut self, slots: IndexVec, stream: Stream) -> Result<TensorView> {
        if self.stage.is_none() {
            return Ok(TensorView::from_indices(slots));
        }
        let slots = slots.into_i32()?;
        let view = SlotList::of(&slots).and_then(|runs| self.staged(&runs, stream));
        view.inspect_err(|_| self.slots.undo(slots.iter().copied(), &[]))
    }

    /// Returns an event to wait for before more slots are taken, if the device is far behind.
    pub(super) fn backpressure_event(&self) -> Option<Arc<Event>> {
        self.stage.as_ref()?.backpressure_event()
    }

    /// Records that work on `stream` reads a tensor of slots: its memory is reused only after that work.
    /// Tensors in host memory have no streams.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for a tensor that does not come from this allocator.
    pub(super) fn record_stream(&self, tensor: &BorrowedTensor<'_>, stream: Stream) -> Result<()> {
        match &self.stage {
            Some(stage) => stage.record_stream(tensor, stream),
            None => Ok(()),
        }
    }

    /// Returns the current epoch. A clear ends it, and with it the ownership of all slots that were taken
    /// before.
    pub(super) fn epoch(&self) -> Epoch {
        self.slots.epoch()
    }

    /// Returns the number of slots that can be handed out now or when pending frees complete. Pending frees
    /// count as whole, distinct pages.
    pub(super) fn available_size(&self) -> usize {
        self.slots.available() + self.pending_slots()
    }

    /// Merges the released slots into the free ones.
    pub(super) fn merge_and_sort_free(&mut self) {
        self.slots.merge();
    }

    /// Frees every slot, closes groups and discards fences and pending frees.
    pub(super) fn clear(&mut self, discarded: &Discarded) {
        abandon(self.group.drain(..).map(|(part, _)| part), discarded);
        self.deferred.clear(discarded);
        self.slots.clear();
        self.copied.clear();
        self.fences.clear(discarded);
    }

    /// Returns the free pages in the order in which they are handed out, without a merge.
    ///
    /// # Errors
    /// See [`Self::alloc`].
    pub(super) fn free_slots(&mut self, stream: Stream) -> Result<TensorView> {
        self.tensor_of(numbers_of(&self.slots.pages().free_indices()?)?, stream)
    }

    /// Returns the released pages, lowest first.
    ///
    /// # Errors
    /// See [`Self::alloc`].
    pub(super) fn release_slots(&mut self, stream: Stream) -> Result<TensorView> {
        self.tensor_of(numbers_of(&self.slots.pages().released_indices()?)?, stream)
    }

    /// Returns the numbers as a tensor that is valid on `stream`.
    pub(super) fn tensor_of(&mut self, numbers: Vec<i32>, stream: Stream) -> Result<TensorView> {
        if self.stage.is_some() {
            return self.staged(&SlotList::of(&numbers)?, stream);
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
        self.slots.broken_invariant().map_or(Ok(()), |fault| {
            Err(Error::new(ErrorKind::IndexOwnership, format!("the allocator is inconsistent: {fault}")))
        })
    }

    /// Returns the statistics of this pool. Slots of pending frees count as available, as estimated.
    pub(super) fn stats(&self) -> SlotStats {
        let (stats, pending) = (self.slots.stats(), self.pending_slots());
        SlotStats { available: stats.available + pending, in_use: stats.in_use - pending, ..stats }
    }

    /// Returns the number of bytes on the device.
    pub(super) fn device_bytes(&self) -> usize {
        self.stage.as_ref().map_or(0, Stage::bytes)
    }
}

/// The slots of a pool in one epoch, for a caller that holds some of them since it began.
pub(super) struct SlotsAt<'a>(&'a mut SlotTensors);

impl SlotsAt<'_> {
    /// Works like [`SlotTensors::slots`] for a holder, who makes its own tensors.
    pub(super) const fn slots_mut(&mut self) -> &mut Ledgered<SlotAllocator> {
        &mut self.0.slots
    }

    /// Borrows the slots, for a part of the call.
    pub(super) const fn reborrow(&mut self) -> SlotsAt<'_> {
        SlotsAt(self.0)
    }

    /// Takes `count` pages for a prefix cache, the `owner`.
    pub(super) fn take_cached_pages(&mut self, count: usize, owner: &Owner) -> Result<TakeResult<Vec<Page>>> {
        let slots = count * self.0.slots.page_size();
        if self.must_land_before(|| slots) {
            return Ok(Err(Shortage::InFlight));
        }
        let mut pages = try_with_capacity(count)?;
        let mut runs = Vec::new();
        if !self.0.slots.alloc_page_runs(count, &mut runs)? {
            return Ok(Err(self.short(slots)));
        }
        pages.extend(runs.iter().flat_map(|run| run.range()).map(Page::new));
        if let Err(error) = self.0.slots.cache(&pages, &[], owner) {
            self.0.slots.undo_pages(&runs);
            return Err(error);
        }
        Ok(Ok(pages))
    }

    /// Returns unused slots to the pool, except those in `continued` pages. Needs no memory.
    ///
    /// The list that the tensor was made of is the record of them: see `docs/decisions/grants.md`.
    pub(super) fn undo(&mut self, granted: &GrantedSlots, continued: &[Page]) {
        let SlotTensors { slots, stage, .. } = &mut *self.0;
        let view = match granted {
            GrantedSlots::One(one) => return slots.undo([one.slot.number().cast_signed()], continued),
            GrantedSlots::Tensor(view) => view,
        };
        match (view.region().indices(), stage) {
            (Some(listed), _) => slots.undo(listed, continued),
            (None, Some(stage)) => {
                stage.with_listed(view, |listed| slots.undo(listed, continued));
            }
            (None, None) => unreachable!("the pool listed the slots"),
        }
    }
}

impl Deref for SlotsAt<'_> {
    type Target = SlotTensors;

    fn deref(&self) -> &SlotTensors {
        self.0
    }
}

impl DerefMut for SlotsAt<'_> {
    fn deref_mut(&mut self) -> &mut SlotTensors {
        self.0
    }
}

fn numbers_of(pages: &[Page]) -> Result<Vec<i32>> {
    try_collect(pages.iter().map(|page| page.number().cast_signed()))
}

/// Returns the first of slots.
fn first_of(slots: &IndexVec) -> Option<Slot> {
    let (first, _) = slots.ends()?;
    u32::try_from(first).ok().map(Slot::new)
}
