//! Frees of slots, including those whose values are on a device and have to be copied to the host first.

use std::sync::Arc;

use crate::base::{Device, Discarded, Error, IndexVec, Result, try_with_capacity};
use crate::index::{BadFrees, FenceId, OnBadFree, SlotAllocator};
use crate::kernels::Indices;
use crate::memory::{BorrowedTensor, Event, Gpu, Keep, Stream};
use crate::pool::deferred::{FreedAs, FreedValues, Values, abandon, slots_of};
use crate::pool::fences::{Fence, Fences};
use crate::pool::mirror::{known_runs, known_values};

use super::grants::{HeldGrant, Unproven};
use super::source::Source;
use super::{SlotTensors, SlotsAt};

/// A free completed by a later call: the number of values, and the invalid ones.
#[derive(Debug)]
pub(in crate::pool) struct CompletedFree {
    pub(in crate::pool) given: usize,
    pub(in crate::pool) bad: BadFrees,
}

/// Returns the maximum number of values in flight: one per slot, and some to spare.
pub(super) fn fetched_at_once(slots: &SlotAllocator) -> usize {
    /// The spare values for small pools, whose frees may list slots more than once.
    const SPARE: usize = 8 << 10;
    slots.capacity().saturating_add(SPARE)
}

/// The outcome of an attempt to free slots.
#[derive(Debug)]
pub(in crate::pool) enum Freed {
    /// The slots are freed, now or later, except the invalid ones.
    Done(BadFrees),
    /// The values have to be read first, with a wait: so many are in flight that there is no room for a
    /// copy, or the host does not know them and has to.
    Unread,
    /// It has to be known first whether the tensor was written to: see [`Source::prove`].
    Unproven,
}

/// Values that each name a page, and where the host has read them.
#[derive(Clone, Copy)]
pub(in crate::pool) struct PagesOf<'a> {
    pub(in crate::pool) given: &'a [Indices<'a>],
    /// By position; shorter if no more sources are known.
    pub(in crate::pool) sources: &'a [Option<Source<'a>>],
    pub(in crate::pool) freed_as: FreedAs,
}

impl SlotTensors {
    /// Frees slots; drops and reports those that are not live. With a fence, they stay in use until
    /// [`Self::fence_passed`] names it.
    pub(super) fn free_values(&mut self, given: &IndexVec, fence: Option<FenceId>) -> Result<BadFrees> {
        self.check_process()?;
        self.slots.free_refusing(given, None, fence, self.on_bad_free)
    }

    fn check_process(&self) -> Result<()> {
        self.stage.as_ref().map_or(Ok(()), |stage| stage.gpu().check_process())
    }

    /// Works like [`Self::free_values`], for values that the caller has read from `source`: those that it no
    /// longer has are dropped and reported, too.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "it is on the path of every free")]
    fn free_held(
        &mut self,
        values: &IndexVec,
        source: Option<Source<'_>>,
        fence: Option<FenceId>,
    ) -> Result<Freed> {
        self.check_process()?;
        let on_bad = self.on_bad_free;
        let Some(source) = source else {
            return self.slots.free_refusing(values, None, fence, on_bad).map(Freed::Done);
        };
        let Ok(grant) = self.grants.held(values, &source) else { return Ok(Freed::Unproven) };
        let Some(grant) = grant else {
            return self.slots.free_refusing(values, None, fence, on_bad).map(Freed::Done);
        };
        let Some(bad) = self.slots.free_held(values, grant.held, fence, on_bad)? else {
            return self.free_stale(values, grant, source, fence);
        };
        if grant.held.is_whole && self.slots.has_left_times() {
            self.grants.end(grant);
        }
        Ok(Freed::Done(bad))
    }

    /// Works like [`Self::free_held`], for a grant that may be over.
    #[cold]
    fn free_stale(
        &mut self,
        values: &IndexVec,
        grant: HeldGrant,
        source: Source<'_>,
        fence: Option<FenceId>,
    ) -> Result<Freed> {
        let Ok(is_unwritten) = self.grants.is_unwritten(grant, values, &source) else {
            return Ok(Freed::Unproven);
        };
        let held = is_unwritten.then_some(grant.held);
        self.slots.free_refusing(values, held, fence, self.on_bad_free).map(Freed::Done)
    }

    /// Works like [`Self::free_values`] for indices on any device.
    ///
    /// Values that only a device has are copied in the order of `stream`, without waiting. The result of
    /// `keep` keeps the tensor alive until then. `source` is that of values on the host.
    #[inline]
    pub(in crate::pool) fn free(
        &mut self,
        given: &Indices<'_>,
        source: Option<Source<'_>>,
        fence: Option<FenceId>,
        keep: impl FnOnce() -> Option<Keep>,
        stream: Stream,
    ) -> Result<Freed> {
        if let Indices::Host(values) = given
            && !self.must_wait_behind(fence)
        {
            return self.free_held(values, source, fence);
        }
        if source.is_none()
            && let Some(bad) = self.free_runs(given, fence)?
        {
            return Ok(Freed::Done(bad));
        }
        let Some(values) = self.values_of(given, keep, stream)? else { return Ok(Freed::Unread) };
        let Values::Known(values) = values else {
            let part = FreedValues { values, freed_as: FreedAs::Slots };
            return self.free_parts(vec![part], fence).map(Freed::Done);
        };
        let source = source.or_else(|| Source::of(given));
        if !self.must_wait_behind(fence) {
            return self.free_held(&values, source, fence);
        }
        let Ok((values, mut refused)) = self.without_stale(values, source)? else {
            return Ok(Freed::Unproven);
        };
        refused.append(self.free_parts(vec![FreedValues::of_slots(values)], fence)?);
        Ok(Freed::Done(refused))
    }

    /// Frees the slots of a tensor on a device that the host has as a few long runs, as most tensors of slots are,
    /// without a list of them. Returns `None`, and frees nothing, if the values have to be looked at.
    fn free_runs(&mut self, given: &Indices<'_>, fence: Option<FenceId>) -> Result<Option<BadFrees>> {
        let (Indices::Device { tensor, version }, Some(source)) = (given, Source::of(given)) else {
            return Ok(None);
        };
        if self.must_wait_behind(fence) {
            return Ok(None);
        }
        let Some(slots) = known_runs(tensor, *version) else { return Ok(None) };
        self.check_process()?;
        let held = self.grants.held_as_runs(&source);
        self.slots.free_runs(&slots, held, fence, self.on_bad_free)
    }

    /// Splits off the values that a caller who has read them from `source` no longer has.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) if there are any.
    fn without_stale(
        &mut self,
        values: IndexVec,
        source: Option<Source<'_>>,
    ) -> Result<std::result::Result<(IndexVec, BadFrees), Unproven>> {
        let Some(source) = source else { return Ok(Ok((values, BadFrees::default()))) };
        let Ok(grant) = self.grants.held(&values, &source) else { return Ok(Err(Unproven)) };
        let Some(grant) = grant.filter(|grant| self.slots.may_be_stale(&values, grant.held)) else {
            return Ok(Ok((values, BadFrees::default())));
        };
        let stale = match self.grants.is_unwritten(grant, &values, &source) {
            Ok(true) => self.slots.without_stale(&values, grant.held, self.on_bad_free)?,
            Ok(false) => None,
            Err(unproven) => return Ok(Err(unproven)),
        };
        Ok(Ok(stale.unwrap_or((values, BadFrees::default()))))
    }

    /// Frees pages: each value of `pages` names one. The result of `keep` keeps the tensor at a position
    /// alive. Otherwise like [`Self::free`].
    ///
    /// # Errors
    /// See [`Self::free`].
    pub(in crate::pool) fn free_pages(
        &mut self,
        pages: PagesOf<'_>,
        fence: Option<FenceId>,
        keep: impl Fn(usize) -> Option<Keep>,
        discarded: &Discarded,
        stream: Stream,
    ) -> Result<Freed> {
        let (mut parts, mut refused) = (try_with_capacity(pages.given.len())?, BadFrees::default());
        for position in 0..pages.given.len() {
            match self.part_of(pages, position, || keep(position), &mut refused, stream) {
                Ok(Ok(values)) => parts.push(FreedValues { values, freed_as: pages.freed_as }),
                answer => {
                    abandon(parts, discarded);
                    return answer.map(|values| values.err().unwrap_or(Freed::Unread));
                }
            }
        }
        refused.append(self.free_parts(parts, fence)?);
        Ok(Freed::Done(refused))
    }

    /// Returns the values at a position of `pages` that the caller still has, and reports the others.
    fn part_of(
        &mut self,
        pages: PagesOf<'_>,
        position: usize,
        keep: impl FnOnce() -> Option<Keep>,
        refused: &mut BadFrees,
        stream: Stream,
    ) -> Result<std::result::Result<Values, Freed>> {
        let given = &pages.given[position];
        let Some(values) = self.values_of(given, keep, stream)? else { return Ok(Err(Freed::Unread)) };
        let Values::Known(values) = values else { return Ok(Ok(values)) };
        // Numbers of pages are not what was handed out, unless a page is a slot.
        let is_slots = pages.freed_as != FreedAs::Pages || self.slots.page_size() == 1;
        let source = pages.sources.get(position).copied().flatten().or_else(|| Source::of(given));
        let Ok((values, stale)) = self.without_stale(values, source.filter(|_| is_slots))? else {
            return Ok(Err(Freed::Unproven));
        };
        refused.append(stale);
        Ok(Ok(Values::Known(values)))
    }

    /// Returns the values of indices on any device, or a copy of them in flight. `None` if there is no room
    /// for the copy.
    fn values_of(
        &mut self,
        given: &Indices<'_>,
        keep: impl FnOnce() -> Option<Keep>,
        stream: Stream,
    ) -> Result<Option<Values>> {
        match given {
            Indices::Host(values) => Ok(Some(Values::Known(values.try_clone()?))),
            Indices::Device { tensor, version } => match known_values(tensor, *version) {
                Some(values) => Ok(Some(Values::Known(values))),
                // The mirror of a tensor from before a change of the number of slots is gone.
                None if self.is_from_before_clear(given) => Ok(None),
                None => self.fetch(tensor, keep, stream),
            },
        }
    }

    /// Returns whether indices on a device are a tensor of slots that were taken before all were freed.
    fn is_from_before_clear(&self, given: &Indices<'_>) -> bool {
        let since = Source::of(given).and_then(|source| self.grants.since(source.origin.address));
        since.is_some_and(|since| self.slots.is_cleared_since(since))
    }

    /// Returns whether a free of known values must stay behind those in flight, so that slots return in the
    /// order in which they were freed. In sorted order it has no effect.
    #[inline]
    pub(super) fn must_wait_behind(&self, fence: Option<FenceId>) -> bool {
        !self.deferred.is_empty() && !self.need_sort() && fence.is_none() && !self.slots.in_group()
    }

    /// Frees the slots of `parts`: now, if all of their values are known.
    pub(super) fn free_parts(
        &mut self,
        mut parts: Vec<FreedValues>,
        fence: Option<FenceId>,
    ) -> Result<BadFrees> {
        let is_known = parts.iter().all(|part| matches!(part.values, Values::Known(_)));
        if is_known && !self.must_wait_behind(fence) {
            let slots = slots_of(&mut parts, self.slots.page_size())?;
            return self.free_values(&slots, fence);
        }
        if fence.is_none() && self.slots.in_group() {
            let call = self.call();
            self.group.extend(parts.into_iter().map(|part| (part, call.clone())));
        } else {
            self.defer(parts, fence);
        }
        Ok(BadFrees::default())
    }

    /// Frees the slots of `parts` when all of their values have arrived.
    pub(super) fn defer(&mut self, parts: Vec<FreedValues>, fence: Option<FenceId>) {
        let count = parts.iter().map(FreedValues::len).sum();
        let by = self.call().map(|call| (count, call)).into_iter().collect();
        self.deferred.push(parts, fence, by);
    }

    /// Calls `free` with a new fence id if there is a fence.
    #[inline]
    pub(in crate::pool) fn with_fence<R>(
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

    /// Enqueues a copy of the values of `tensor`. `None` if there is no room for the copy.
    fn fetch(
        &mut self,
        tensor: &BorrowedTensor<'_>,
        keep: impl FnOnce() -> Option<Keep>,
        stream: Stream,
    ) -> Result<Option<Values>> {
        let gpu = self.gpu_of(tensor.device())?;
        let at_once = fetched_at_once(&self.slots);
        self.deferred.fetch(&gpu, at_once, tensor, keep, stream)
    }

    /// Returns the device of a tensor.
    pub(super) fn gpu_of(&self, device: Device) -> Result<Arc<Gpu>> {
        match (&self.stage, device) {
            (Some(stage), _) if stage.gpu().device() == device => Ok(Arc::clone(stage.gpu())),
            (_, Device::Cuda(ordinal)) => Gpu::open(ordinal),
            (_, Device::Cpu) => Err(Error::argument("a tensor in host memory is on no GPU")),
        }
    }

    /// Completes frees whose values are on the host, and adds their reports to `settled`. Owners of their tensors
    /// are discarded.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`] for the first invalid free, which frees nothing.
    /// [`ErrorKind::Driver`] when the device has failed.
    ///
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    /// [`ErrorKind::IndexOwnership`]: crate::base::ErrorKind::IndexOwnership
    pub(in crate::pool) fn settle(
        &mut self,
        settled: &mut Vec<CompletedFree>,
        discarded: &Discarded,
    ) -> Result<()> {
        let page_size = self.slots.page_size();
        while let Some(landed) = self.deferred.landed(page_size, discarded)? {
            let given = landed.slots.len();
            let freed = self.slots.free_attributed(&landed.slots, landed.fence, &landed.by, self.on_bad_free);
            let (bad, failure) =
                freed.map_or_else(|error| (BadFrees::default(), Some(error)), |bad| (bad, None));
            settled.push(CompletedFree { given, bad });
            if let Some(error) = failure {
                return Err(error.with_prefix("a free of slots that the host did not know"));
            }
        }
        Ok(())
    }

    /// Returns an event that the next free to complete in [`Self::settle`] waits for.
    pub(in crate::pool) fn oldest_pending(&self) -> Option<Arc<Event>> {
        self.deferred.oldest()
    }

    /// Returns whether there are no pending frees.
    #[inline]
    pub(in crate::pool) fn is_settled(&self) -> bool {
        self.deferred.is_empty() && self.fences.is_empty()
    }

    pub(in crate::pool) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    pub(in crate::pool) const fn fences(&self) -> &Fences {
        &self.fences
    }

    pub(in crate::pool) const fn fences_mut(&mut self) -> &mut Fences {
        &mut self.fences
    }

    /// Frees the slots behind a fence. Does nothing for an unknown id.
    pub(in crate::pool) fn fence_passed(&mut self, id: FenceId) {
        if !self.deferred.fence_passed(id) {
            self.slots.fence_passed(id);
        }
    }

    /// Starts to collect frees. Groups nest.
    pub(in crate::pool) fn free_group_begin(&mut self) {
        self.slots.group_begin();
    }

    /// Ends a group. The end of the outermost group frees everything collected, as one call, and returns how
    /// many values that was.
    ///
    /// # Errors
    /// [`ErrorKind::State`] when no group is open; see [`Self::free`]. The group is closed in any case.
    ///
    /// [`ErrorKind::State`]: crate::base::ErrorKind::State
    pub(in crate::pool) fn free_group_end(&mut self) -> Result<(usize, BadFrees)> {
        let Some((given, mut by)) = self.slots.group_end()? else { return Ok((0, BadFrees::default())) };
        if self.group.is_empty() && !self.must_wait_behind(None) {
            return Ok((given.len(), self.slots.free_attributed(&given, None, &by, self.on_bad_free)?));
        }
        let mut end = given.len();
        let mut parts = vec![FreedValues::of_slots(given)];
        for (part, call) in self.group.drain(..) {
            end += part.len();
            by.extend(call.map(|call| (end, call)));
            parts.push(part);
        }
        self.deferred.push(parts, None, by);
        Ok((0, BadFrees::default()))
    }

    /// Returns an estimate, from their lengths, of the slots of pending frees.
    pub(super) fn pending_slots(&self) -> usize {
        if self.deferred.is_empty() {
            return 0;
        }
        let page_size = self.slots.page_size();
        let given = self.deferred.slots(page_size).next_multiple_of(page_size);
        let stats = self.slots.stats();
        given.min(stats.in_use - stats.fenced)
    }

    /// Returns an estimate of the slots of pending frees.
    pub(in crate::pool) fn pending(&self) -> usize {
        self.pending_slots()
    }
}

impl SlotsAt<'_> {
    /// Frees slots of the planner, after pending frees where the order matters; drops those that are not
    /// live. Groups do not delay this free.
    pub(in crate::pool) fn free_now(&mut self, slots: &IndexVec, fence: Option<FenceId>) -> Result<BadFrees> {
        match fence {
            Some(fence) => self.slots_mut().free_after(fence, slots, OnBadFree::Report),
            None if self.deferred.is_empty() || self.need_sort() => {
                self.slots_mut().free_now(slots, OnBadFree::Report)
            }
            None => {
                self.defer(vec![FreedValues::of_slots(slots.try_clone()?)], None);
                Ok(BadFrees::default())
            }
        }
    }
}
