//! [`SlotAllocator`] with a ledger of its pages.

use super::{Ledgered, call_of};
use crate::base::{Id, IndexNumber, IndexVec, PADDING, Page, Result, Slot};
use crate::index::ledger::{Attribution, IndexState, Span, spans};
use crate::index::owners::SharingReservation;
use crate::index::slot_allocator::FreedSlots;
use crate::index::{
    BadFree, BadFrees, Extension, FenceId, Fit, Held, LastLoc, Moment, OnBadFree, Owner, Run, SlotAllocator,
    SlotList, on_bad_frees,
};

impl Ledgered<SlotAllocator> {
    /// Returns all pages by state and holders. A page of a cache is locked if `is_locked` says so.
    #[must_use]
    pub fn spans(&self, is_locked: impl Fn(Page) -> bool) -> Vec<Span> {
        let slots = &self.inner;
        spans(slots.pages().indices(), self.ledger.get(), |page| {
            let page = Page::new(page);
            if !slots.pages().is_in_use(page) {
                IndexState::Free
            } else if slots.is_only_cached(page) {
                if is_locked(page) { IndexState::Locked } else { IndexState::Evictable }
            } else if slots.is_owned(page) {
                IndexState::Live
            } else {
                IndexState::Fenced
            }
        })
    }

    /// Calls [`SlotAllocator::alloc`] and records it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::alloc`].
    #[inline]
    pub fn alloc<T: IndexNumber>(&mut self, count: usize) -> Result<Option<Vec<T>>> {
        let taken = self.inner.alloc(count)?;
        self.record_taken(taken.as_deref().unwrap_or_default(), &[]);
        Ok(taken)
    }

    /// Calls [`SlotAllocator::alloc_contiguous`] and records it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::alloc_contiguous`].
    pub fn alloc_contiguous<T: IndexNumber>(&mut self, count: usize, fit: Fit) -> Result<Option<Vec<T>>> {
        let taken = self.inner.alloc_contiguous(count, fit)?;
        self.record_taken(taken.as_deref().unwrap_or_default(), &[]);
        Ok(taken)
    }

    /// Calls [`SlotAllocator::extend`] and records it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::extend`].
    pub fn extend<T: IndexNumber>(
        &mut self,
        prefix_lens: &[i64],
        seq_lens: &[i64],
        last_loc: LastLoc<'_>,
    ) -> Result<Option<Extension<T>>> {
        let taken = self.inner.extend(prefix_lens, seq_lens, last_loc)?;
        if let Some(taken) = &taken {
            self.record_taken(&taken.slots, &taken.continued);
        }
        Ok(taken)
    }

    /// Calls [`SlotAllocator::extend_runs`], with `slots` empty, and records it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::extend_runs`].
    pub fn extend_runs(
        &mut self,
        prefix_lens: &[i64],
        seq_lens: &[i64],
        last_loc: LastLoc<'_>,
        slots: &mut SlotList,
    ) -> Result<Option<Vec<Page>>> {
        let continued = self.inner.extend_runs(prefix_lens, seq_lens, last_loc, slots)?;
        if self.ledger.get().is_some()
            && let Some(continued) = &continued
        {
            self.record_taken(&slots.iter().map(u32::cast_signed).collect::<Vec<_>>(), continued);
        }
        Ok(continued)
    }

    /// Calls [`SlotAllocator::alloc_pages`] and records it.
    pub fn alloc_pages(&mut self, count: usize, mut emit: impl FnMut(Run<Page>)) -> bool {
        let ledger = &mut self.ledger;
        self.inner.alloc_pages(count, |pages| {
            ledger.record_take(pages.range());
            emit(pages);
        })
    }

    /// Calls [`SlotAllocator::alloc_page`] and records it.
    #[inline]
    pub fn alloc_page(&mut self) -> Option<Page> {
        let page = self.inner.alloc_page()?;
        self.ledger.record_take(page.number()..page.number() + 1);
        Some(page)
    }

    /// Calls [`SlotAllocator::alloc_page_runs`] and records it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::alloc_page_runs`].
    pub fn alloc_page_runs(&mut self, count: usize, runs: &mut Vec<Run<Page>>) -> Result<bool> {
        let begin = runs.len();
        let is_taken = self.inner.alloc_page_runs(count, runs)?;
        runs[begin..].iter().for_each(|run| self.ledger.record_take(run.range()));
        Ok(is_taken)
    }

    /// Removes an owner from pages that were taken or shared and not handed out. Needs no memory.
    pub(in crate::index) fn give_back_each(&mut self, pages: impl IntoIterator<Item = Page>) {
        let ledger = &mut self.ledger;
        self.inner.give_back_each(pages, |page, is_free| {
            if is_free {
                ledger.record_undo(page.number()..page.number() + 1);
            } else {
                ledger.remove_holder(page.number());
            }
        });
    }

    /// Gives back pages that were taken just now. Needs no memory.
    pub fn undo_pages(&mut self, runs: &[Run<Page>]) {
        self.give_back_each(runs.iter().flat_map(|run| run.range()).map(Page::new));
    }

    /// Records that the pages of `slots`, except the `continued` ones, were taken.
    #[inline]
    fn record_taken<T: IndexNumber>(&mut self, slots: &[T], continued: &[Page]) {
        let Some(ledger) = self.ledger.get_mut() else { return };
        let page_size = self.inner.slots_of_a_page();
        let mut pages: Vec<u32> = slots.iter().map(|slot| slot.number() / page_size).collect();
        pages.dedup();
        pages.retain(|page| *page != PADDING && !continued.contains(&Page::new(*page)));
        for run in pages.chunk_by(|page, next| page + 1 == *next) {
            ledger.record_take(run[0]..run[run.len() - 1] + 1);
        }
    }

    /// Works like [`SlotAllocator::undo`] with slots in any form, and records it.
    pub fn undo<T: IndexNumber>(&mut self, slots: impl IntoIterator<Item = T>, continued: &[Page]) {
        let ledger = &mut self.ledger;
        self.inner.undo_each(slots, continued, |pages| ledger.record_undo(pages));
    }

    /// Records that the last free gave its pages back and, with `is_free`, that they are free.
    fn record_freed(&mut self, is_free: bool) {
        let Some(ledger) = self.ledger.get_mut() else { return };
        let freed = || self.inner.pages().last_freed().iter().flat_map(|mask| mask.ranges());
        freed().for_each(|pages| ledger.record_release(pages));
        if is_free {
            freed().for_each(|pages| ledger.record_free(pages));
        }
    }

    /// Calls [`SlotAllocator::share`] and records it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::share`].
    pub fn share(&mut self, values: &IndexVec) -> Result<()> {
        for page in self.inner.share_pages_of(values)? {
            self.ledger.add_holder(page.number());
        }
        Ok(())
    }

    /// Calls `SlotAllocator::prepare_sharing`.
    pub(in crate::index) fn prepare_sharing(&mut self) -> Result<SharingReservation> {
        self.inner.prepare_sharing()
    }

    /// Calls `SlotAllocator::share_pages` and records it.
    pub(in crate::index) fn share_pages(
        &mut self,
        reservation: SharingReservation,
        pages: impl IntoIterator<Item = Page>,
    ) {
        let ledger = &mut self.ledger;
        self.inner
            .share_pages(reservation, pages.into_iter().inspect(|page| ledger.add_holder(page.number())));
    }

    /// Calls [`SlotAllocator::retain`] and records it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::retain`].
    pub fn retain(&mut self, runs: &[Run<Page>]) -> Result<()> {
        self.inner.retain(runs)?;
        for page in runs.iter().flat_map(|run| run.range()) {
            self.ledger.add_holder(page);
        }
        Ok(())
    }

    /// Calls [`SlotAllocator::release`] and records it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::release`].
    pub fn release(&mut self, runs: &[Run<Page>], fence: Option<FenceId>) -> Result<()> {
        self.inner.release(runs, fence)?;
        self.record_removed(fence.is_none());
        Ok(())
    }

    /// Calls [`SlotAllocator::cache`] and records `owner` as the holder.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::cache`].
    pub fn cache(&mut self, pages: &[Page], duplicates: &[Page], owner: &Owner) -> Result<()> {
        self.inner.cache(pages, duplicates)?;
        self.record_removed(true);
        if let Some(ledger) = self.ledger.get_mut() {
            let pages = || pages.iter().map(|page| page.number());
            pages().for_each(|page| ledger.remove_holder(page));
            let _call = call_of(owner).begin();
            pages().for_each(|page| ledger.add_holder(page));
        }
        Ok(())
    }

    /// Calls [`SlotAllocator::release_cached`] and records that `owner` released the pages.
    ///
    /// # Panics
    /// Same as [`SlotAllocator::release_cached`].
    pub fn release_cached(&mut self, pages: &[Page], fence: Option<FenceId>, owner: &Owner) {
        self.inner.release_cached(pages, fence);
        let _call = self.ledger.get().map(|_| call_of(owner).begin());
        self.record_removed(fence.is_none());
    }

    /// Calls [`SlotAllocator::take_moment`].
    #[must_use]
    pub const fn take_moment(&mut self) -> Moment {
        self.inner.take_moment()
    }

    /// Calls [`SlotAllocator::free`] and records it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::free`].
    #[inline]
    pub fn free(&mut self, values: &IndexVec, on_bad: OnBadFree) -> Result<BadFrees> {
        self.free_refusing(values, None, None, on_bad)
    }

    /// Works like [`Self::free_refusing`], for values that the caller holds. Returns `None`, and frees nothing, if
    /// it may no longer have some of them.
    ///
    /// [`SlotAllocator::has_left_times`] tells afterwards whether the caller has to record the end of the hold.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::free`].
    #[inline]
    pub fn free_held(
        &mut self,
        values: &IndexVec,
        held: Held,
        fence: Option<FenceId>,
        on_bad: OnBadFree,
    ) -> Result<Option<BadFrees>> {
        if self.ledger.get().is_none() && (fence.is_some() || !self.inner.in_group()) {
            return self.inner.free_explained(values, Some(held), fence, on_bad, |_| ());
        }
        if self.inner.may_be_stale(values, held) {
            return Ok(None);
        }
        self.free_refusing(values, None, fence, on_bad).map(Some)
    }

    /// Works like [`Self::free_held`], for slots as they were handed out, also to nobody in particular. Also returns
    /// `None`, and frees nothing, if the values are needed: for a ledger or a group.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::free`].
    pub fn free_runs(
        &mut self,
        slots: &SlotList,
        held: Option<Held>,
        fence: Option<FenceId>,
        on_bad: OnBadFree,
    ) -> Result<Option<BadFrees>> {
        if self.ledger.get().is_some() || fence.is_none() && self.inner.in_group() {
            return Ok(None);
        }
        self.inner.free_explained(FreedSlots::Runs(slots), held, fence, on_bad, |_| ())
    }

    /// Works like [`SlotAllocator::free`] or, with a fence, [`SlotAllocator::free_after`]. Slots that are known
    /// to be held by others than the owner that the call names are dropped and reported like those that are
    /// not live; those that a caller with a hold no longer has, too.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::free`].
    pub fn free_refusing(
        &mut self,
        values: &IndexVec,
        held: Option<Held>,
        fence: Option<FenceId>,
        on_bad: OnBadFree,
    ) -> Result<BadFrees> {
        let owner = self.ledger.named_owner();
        if held.is_some() || owner.is_some() {
            let refuse = |_, slot, is_stale| self.refusal(slot, is_stale, owner.as_ref());
            if let Some((kept, bad)) = self.inner.without_refused(values, held, refuse)? {
                return self.free_rest(&kept, bad, values.len(), fence, on_bad);
            }
        }
        self.free_checked(values, fence, on_bad)
    }

    /// Splits off the values that a caller with a hold no longer has. Returns the others and a report, or
    /// `None` if it has all.
    ///
    /// # Errors
    /// With [`OnBadFree::Fail`], [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) if
    /// there are any.
    pub fn without_stale(
        &mut self,
        values: &IndexVec,
        held: Held,
        on_bad: OnBadFree,
    ) -> Result<Option<(IndexVec, BadFrees)>> {
        if !self.inner.may_be_stale(values, held) {
            return Ok(None);
        }
        let refuse = |_, slot, is_stale| self.refusal(slot, is_stale, None);
        let Some((kept, bad)) = self.inner.without_refused(values, Some(held), refuse)? else {
            return Ok(None);
        };
        Ok(Some((kept, self.report_refused(bad, values.len(), on_bad)?)))
    }

    /// Explains and counts the refused part of a free of `given` values.
    fn report_refused(&mut self, mut refused: BadFrees, given: usize, on_bad: OnBadFree) -> Result<BadFrees> {
        let page_size = self.inner.slots_of_a_page();
        self.ledger.explain(&mut refused, |slot| slot / page_size);
        let refused = on_bad_frees(refused, on_bad, Slot::NOUN, given, self.inner.capacity())?;
        self.inner.count_dropped(refused.dropped());
        Ok(refused)
    }

    /// Returns why `owner`, if it is known, may not free a slot that the allocator itself would free.
    fn refusal(&self, slot: i64, is_stale: bool, owner: Option<&Owner>) -> Option<BadFree> {
        if is_stale {
            return Some(BadFree::Stale);
        }
        let page = u32::try_from(slot).ok()? / self.inner.slots_of_a_page();
        let is_of_others = owner.is_some_and(|owner| self.ledger.is_held_by_others_than(page, owner));
        (is_of_others && !self.inner.is_only_cached(Page::new(page))).then_some(BadFree::OtherOwner)
    }

    /// Reports the refused part of a free of `given` values, and frees the others.
    #[cold]
    fn free_rest(
        &mut self,
        kept: &IndexVec,
        refused: BadFrees,
        given: usize,
        fence: Option<FenceId>,
        on_bad: OnBadFree,
    ) -> Result<BadFrees> {
        let refused = self.report_refused(refused, given, on_bad)?;
        let mut bad = self.free_checked(kept, fence, on_bad)?;
        bad.append(refused);
        Ok(bad)
    }

    /// Frees values that the caller may free, as far as it is known: at once, or when the group ends.
    fn free_checked(
        &mut self,
        values: &IndexVec,
        fence: Option<FenceId>,
        on_bad: OnBadFree,
    ) -> Result<BadFrees> {
        if fence.is_some() || !self.inner.in_group() {
            return self.free_explained(values, fence, on_bad);
        }
        let bad = self.inner.free(values, on_bad)?;
        self.ledger.attribute_group(self.inner.grouped());
        Ok(bad)
    }

    /// Calls [`SlotAllocator::free_now`] and records it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::free_now`].
    pub fn free_now(&mut self, values: &IndexVec, on_bad: OnBadFree) -> Result<BadFrees> {
        self.free_explained(values, None, on_bad)
    }

    /// Calls [`SlotAllocator::free_after`] and records it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::free_after`].
    pub fn free_after(&mut self, fence: FenceId, values: &IndexVec, on_bad: OnBadFree) -> Result<BadFrees> {
        self.free_explained(values, Some(fence), on_bad)
    }

    /// Works like [`SlotAllocator::free_now`] or [`SlotAllocator::free_after`], for values that were freed by
    /// several earlier calls.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::free_now`].
    pub fn free_attributed(
        &mut self,
        values: &IndexVec,
        fence: Option<FenceId>,
        by: &Attribution,
        on_bad: OnBadFree,
    ) -> Result<BadFrees> {
        let page_size = i64::from(self.inner.slots_of_a_page());
        let refuse = |position, slot, is_stale| {
            let part = by.get(by.partition_point(|(end, _)| *end <= position));
            self.refusal(slot, is_stale, part.and_then(|(_, call)| call.owner.as_ref()))
        };
        let refused = if by.is_empty() { None } else { self.inner.without_refused(values, None, refuse)? };
        if let Some(ledger) = self.ledger.get_mut() {
            ledger.attribute_frees(values, by, |slot| u32::try_from(slot / page_size).ok());
        }
        let answer = match refused {
            None => self.free_explained(values, fence, on_bad),
            Some((kept, bad)) => self.free_rest(&kept, bad, values.len(), fence, on_bad),
        };
        if let Some(ledger) = self.ledger.get_mut() {
            ledger.end_attribution();
        }
        answer
    }

    fn free_explained(
        &mut self,
        values: &IndexVec,
        fence: Option<FenceId>,
        on_bad: OnBadFree,
    ) -> Result<BadFrees> {
        let (ledger, page_size) = (&self.ledger, self.inner.slots_of_a_page());
        let explain = |bad: &mut BadFrees| ledger.explain(bad, |slot| slot / page_size);
        let bad = self.inner.free_known(values, fence, on_bad, explain)?;
        self.record_removed(fence.is_none());
        Ok(bad)
    }

    /// Works like [`Self::record_freed`], and records the owners that the last free removed from shared
    /// pages.
    #[inline]
    fn record_removed(&mut self, is_free: bool) {
        if self.ledger.get().is_some() {
            self.list_removed(is_free);
        }
    }

    #[cold]
    fn list_removed(&mut self, is_free: bool) {
        self.record_freed(is_free);
        if let Some(ledger) = self.ledger.get_mut() {
            self.inner.last_removed().iter().for_each(|page| ledger.remove_holder(page.number()));
        }
    }

    /// Calls [`SlotAllocator::new_fence`].
    pub const fn new_fence(&mut self) -> FenceId {
        self.inner.new_fence()
    }

    /// Calls [`SlotAllocator::continue_after`].
    pub fn continue_after(&mut self, other: &SlotAllocator) {
        self.inner.continue_after(other);
    }

    /// Calls [`SlotAllocator::fence_passed`] and records it.
    pub fn fence_passed(&mut self, id: FenceId) {
        let ledger = &mut self.ledger;
        self.inner.pass_fence(id, |mask, is_last_owner| {
            let Some(ledger) = ledger.get_mut() else { return };
            for pages in mask.ranges() {
                if is_last_owner {
                    ledger.record_release(pages.clone());
                }
                ledger.record_free(pages);
            }
        });
    }

    /// Calls [`SlotAllocator::group_begin`].
    pub fn group_begin(&mut self) {
        self.inner.group_begin();
    }

    /// Works like [`SlotAllocator::group_end`], and also returns which call freed which values.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::group_end`].
    pub fn group_end(&mut self) -> Result<Option<(IndexVec, Attribution)>> {
        let values = self.inner.group_end()?;
        Ok(values.map(|values| (values, self.ledger.take_group())))
    }

    /// Calls [`SlotAllocator::merge`].
    pub fn merge(&mut self) {
        self.inner.merge();
    }

    /// Calls [`SlotAllocator::clear`] and records it.
    pub fn clear(&mut self) {
        let _ = self.ledger.take_group();
        if let Some(ledger) = self.ledger.get_mut() {
            let pages = self.inner.pages();
            for page in pages.indices().filter(|page| pages.is_in_use(Page::new(*page))) {
                ledger.record_free(page..page + 1);
            }
        }
        self.ledger.clear();
        self.inner.clear();
    }
}
