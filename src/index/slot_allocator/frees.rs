//! Freeing slots: at once, at the end of a group, or when a fence has passed.

use crate::base::{
    Error, Id, IndexVec, Page, Result, Slot, try_push, try_reserve, try_to_vec, try_with_capacity, widen,
};

use super::freeing::Freeing;
use super::{FenceId, FencedFree, FreedSlots, Group, Held, SlotAllocator};
use crate::base::bounded::signed;
use crate::index::free_list::FreeTiming;
use crate::index::free_times::Moment;
use crate::index::mask::Mask;
use crate::index::runs::{RawIndex, run_len};
use crate::index::{BadFree, BadFrees, OnBadFree, on_bad_frees};

impl SlotAllocator {
    /// Frees slots: at once or, within a group, when the outermost group ends.
    ///
    /// The page of every slot is freed, once. Slots that are not live are dropped, counted and reported.
    ///
    /// # Errors
    /// With [`OnBadFree::Fail`], [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) when
    /// anything would be dropped; within a group
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot keep the values.
    /// Nothing is changed then.
    pub fn free(&mut self, values: &IndexVec, on_bad: OnBadFree) -> Result<BadFrees> {
        if let Some(group) = &mut self.group {
            self.has_left_times = false;
            try_reserve(&mut group.values, values.len())?;
            group.values.extend(values.iter());
            return Ok(BadFrees::default());
        }
        self.free_known(values, None, on_bad, |_| ())
    }

    /// Frees slots at once, even within a group.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::free`].
    pub fn free_now(&mut self, values: &IndexVec, on_bad: OnBadFree) -> Result<BadFrees> {
        self.free_known(values, None, on_bad, |_| ())
    }

    /// Creates a fence, different from every other one.
    pub const fn new_fence(&mut self) -> FenceId {
        self.next_fence += 1;
        FenceId(self.next_fence)
    }

    /// Continues the numbers of `other`, which this allocator replaces: a fence of the other may pass later,
    /// what was taken from it is of an earlier epoch, and counters never decrease.
    pub fn continue_after(&mut self, other: &Self) {
        self.next_fence = other.next_fence;
        self.epoch = other.epoch.next();
        self.free_times.record_all(Some(&other.free_times));
        self.dropped_frees = other.dropped_frees;
    }

    /// Frees slots that work in flight still uses: they stay in use until [`SlotAllocator::fence_passed`].
    ///
    /// A group does not delay it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::free`].
    pub fn free_after(&mut self, fence: FenceId, values: &IndexVec, on_bad: OnBadFree) -> Result<BadFrees> {
        self.free_known(values, Some(fence), on_bad, |_| ())
    }

    /// Frees the slots of a fence that has passed. Has no effect for a fence that had passed before.
    pub fn fence_passed(&mut self, id: FenceId) {
        self.pass_fence(id, |_, _| ());
    }

    /// Works like [`SlotAllocator::fence_passed`], and passes the pages that became free to `freed`, with
    /// `true` for pages that had several owners and lost the last one.
    pub(in crate::index) fn pass_fence(&mut self, id: FenceId, mut freed: impl FnMut(Mask, bool)) {
        let passed: Vec<_> = self.fences.extract_if(.., |(fence, _)| *fence == id).collect();
        for (_, fenced) in passed {
            self.pages.unfence(&fenced.pages);
            fenced.pages.masks().iter().for_each(|mask| freed(*mask, false));
            for page in fenced.shared {
                if self.owners.complete(page) {
                    self.give_back(page.number()..page.number() + 1);
                    freed(Mask::of(page.number()), true);
                }
            }
        }
    }

    /// Returns the pages from which the last free removed an owner that was not the last.
    pub(in crate::index) fn last_removed(&self) -> &[Page] {
        self.owners.last_removed()
    }

    /// Returns whether slots wait for this fence.
    #[must_use]
    pub fn is_awaited(&self, id: FenceId) -> bool {
        self.fences.iter().any(|(fence, _)| *fence == id)
    }

    /// Returns whether a caller with this hold may no longer have some of the values.
    #[must_use]
    pub fn may_be_stale(&self, values: &IndexVec, held: Held) -> bool {
        self.are_stale(values.into(), held)
    }

    fn are_stale(&self, slots: FreedSlots<'_>, held: Held) -> bool {
        held.is_over
            || !self.free_times.is_now(held.since)
                && match slots {
                    FreedSlots::Values(IndexVec::I32(values)) => self.may_be_freed_since(values, held.since),
                    FreedSlots::Values(IndexVec::I64(values)) => self.may_be_freed_since(values, held.since),
                    FreedSlots::Runs(slots) => slots.runs().iter().any(|run| {
                        self.is_run_freed_since(run.start.number(), run.range().end - 1, held.since)
                    }),
                }
    }

    fn may_be_freed_since<T: RawIndex>(&self, values: &[T], since: Moment) -> bool {
        let mut remaining = values;
        while let Some(&first) = remaining.first() {
            let (first, len): (i64, _) = (first.into(), run_len(remaining));
            remaining = &remaining[len..];
            let (Ok(first), Ok(last)) = (u32::try_from(first), u32::try_from(first + signed(len) - 1)) else {
                continue;
            };
            if self.is_run_freed_since(first, last, since) {
                return true;
            }
        }
        false
    }

    /// Returns whether the page of one of the slots from `first` to `last` was freed since.
    fn is_run_freed_since(&self, first: u32, last: u32, since: Moment) -> bool {
        let pages = first / self.page_size..(last / self.page_size).saturating_add(1);
        Mask::of_range(pages).any(|pages| self.free_times.is_any_freed_since(pages, since))
    }

    /// Splits off the values that a caller may not free though their pages are in use: `refuse` says why, of the
    /// position and the value, and of whether the caller no longer holds it. Returns the others and a report, or `None` if none
    /// is refused.
    pub(in crate::index) fn without_refused(
        &self,
        values: &IndexVec,
        held: Option<Held>,
        refuse: impl Fn(usize, i64, bool) -> Option<BadFree>,
    ) -> Result<Option<(IndexVec, BadFrees)>> {
        let mut bad = BadFrees::default();
        let mut kept = Vec::new();
        for (position, slot) in values.iter().enumerate() {
            let page = u32::try_from(slot).ok().map(|slot| Page::new(slot / self.page_size));
            let page = page.filter(|&page| self.pages.is_in_use(page));
            let reason = page.and_then(|page| {
                let is_stale = held.is_some_and(|held| held.is_stale(page, self));
                refuse(position, slot, is_stale)
            });
            let Some(reason) = reason else {
                if bad.dropped() > 0 {
                    kept.push(slot);
                }
                continue;
            };
            if bad.dropped() == 0 {
                kept = try_with_capacity(values.len())?;
                kept.extend(values.iter().take(position));
            }
            bad.add(slot, reason, 1);
        }
        Ok((bad.dropped() > 0).then_some((IndexVec::I64(kept), bad)))
    }

    /// Returns whether the last free left the times of its pages to the caller: see [`Held::is_whole`].
    #[must_use]
    pub const fn has_left_times(&self) -> bool {
        self.has_left_times
    }

    /// Counts values that were refused.
    pub(in crate::index) const fn count_dropped(&mut self, count: usize) {
        self.dropped_frees += count;
    }

    /// Works like [`SlotAllocator::free_now`] or [`SlotAllocator::free_after`]; `explain` adds to the report.
    pub(in crate::index) fn free_known(
        &mut self,
        values: &IndexVec,
        fence: Option<FenceId>,
        on_bad: OnBadFree,
        explain: impl FnOnce(&mut BadFrees),
    ) -> Result<BadFrees> {
        let freed = self.free_explained(values, None, fence, on_bad, explain)?;
        Ok(freed.unwrap_or_else(|| unreachable!("a free without a hold is never stale")))
    }

    /// Works like [`SlotAllocator::free_known`], for values that the caller holds. Returns `None`, and frees
    /// nothing, if it may no longer have some of them. [`SlotAllocator::has_left_times`] tells afterwards
    /// whether the times of the frees are left to the caller.
    #[inline]
    pub(in crate::index) fn free_explained<'a>(
        &mut self,
        slots: impl Into<FreedSlots<'a>>,
        held: Option<Held>,
        fence: Option<FenceId>,
        on_bad: OnBadFree,
        explain: impl FnOnce(&mut BadFrees),
    ) -> Result<Option<BadFrees>> {
        let slots = slots.into();
        let only = if fence.is_none() { self.only_page(slots) } else { None };
        let Some(page) = only else { return self.free_listed(slots, held, fence, on_bad, explain) };
        if held.is_some_and(|held| held.is_stale(page, self)) {
            return Ok(None);
        }
        self.free_only(page, slots);
        Ok(Some(BadFrees::default()))
    }

    /// Frees a page that is live and has one owner.
    fn free_only(&mut self, page: Page, slots: FreedSlots<'_>) {
        self.has_left_times = false;
        // An empty batch, so that the previous one does not count as the last.
        self.owners.remove(FreeTiming::Now).commit();
        let mask = Mask::of(page.number());
        let mut batch = self.pages.begin_free(FreeTiming::Now);
        batch.add(mask);
        if batch.check().is_ok() {
            self.free_times.record([mask]);
            batch.commit();
            return;
        }
        drop(batch);
        self.free_without_lists(slots);
    }

    /// Works like [`SlotAllocator::free_explained`], for any slots.
    fn free_listed(
        &mut self,
        slots: FreedSlots<'_>,
        held: Option<Held>,
        fence: Option<FenceId>,
        on_bad: OnBadFree,
        explain: impl FnOnce(&mut BadFrees),
    ) -> Result<Option<BadFrees>> {
        let (page_size, capacity) = (self.page_size, self.capacity());
        let timing = if fence.is_some() { FreeTiming::AfterFence } else { FreeTiming::Now };
        let mut freeing = Freeing {
            page_size,
            batch: self.pages.begin_free(timing),
            owners: self.owners.remove(timing),
            named: &mut self.named,
            bad: BadFrees::default(),
        };
        freeing.add(slots);
        let (batch, owners, mut bad) = freeing.into_parts();
        let listed = batch.check().and_then(|()| owners.check());
        let is_any_stale = |held: Held| {
            let is_freed = |pages| self.free_times.is_any_freed_since(pages, held.since);
            let shared = owners.pages().iter().map(|page| Mask::of(page.number()));
            // As a rule nothing was freed since.
            held.is_over
                || !self.free_times.is_now(held.since)
                    && (batch.masks().iter().copied().any(is_freed) || shared.into_iter().any(is_freed))
        };
        if held.is_some_and(is_any_stale) {
            return Ok(None);
        }
        let dropped = bad.dropped();
        explain(&mut bad);
        let bad = on_bad_frees(bad, on_bad, Slot::NOUN, slots.len(), capacity)?;
        let is_plain = dropped == 0 && owners.pages().is_empty() && listed.is_ok();
        let is_left = is_plain && held.is_some_and(|held| held.is_whole);
        match (listed, fence) {
            (Ok(()), fence) => {
                if let Some(fence) = fence {
                    let fenced = FencedFree { pages: batch.fenced()?, shared: try_to_vec(owners.pages())? };
                    try_push(&mut self.fences, (fence, fenced))?;
                }
                if !is_left {
                    self.free_times.record(batch.masks().iter().copied());
                }
                owners.commit();
                batch.commit();
            }
            // It must not fail: its caller may have no other record of the slots.
            (Err(_), None) => {
                drop(owners);
                drop(batch);
                if held.is_some_and(|held| self.are_stale(slots, held)) {
                    return Ok(None);
                }
                self.free_without_lists(slots);
            }
            (Err(failure), Some(_)) => return Err(failure),
        }
        self.dropped_frees += dropped;
        self.has_left_times = is_left;
        Ok(Some(bad))
    }

    /// Frees those of the slots that can be freed, without lists for which there is no memory. A ledger does
    /// not learn of it.
    #[cold]
    fn free_without_lists(&mut self, slots: FreedSlots<'_>) {
        slots.for_each(|slot| {
            let page = u32::try_from(slot).ok().map(|slot| Page::new(slot / self.page_size));
            let Some(page) = page.filter(|&page| self.pages.is_live(page)) else { return };
            let place = widen(page.number());
            if self.page_size > 1 && self.named.contains(place) {
                return;
            }
            if !self.owners.give_back(page) {
                self.give_back(page.number()..page.number() + 1);
            }
            if self.page_size > 1 {
                self.named.insert_run(place, 1);
            }
        });
        self.named.clear();
    }

    /// Returns the page of the slot, if a free has only one, the page is live, and no page has several
    /// owners. This is the most frequent free, and needs no list.
    #[inline]
    fn only_page(&self, slots: FreedSlots<'_>) -> Option<Page> {
        let page = Page::new(u32::try_from(slots.only()?).ok()? / self.page_size);
        (self.owners.is_trivial() && self.pages.is_live(page)).then_some(page)
    }

    /// Starts to collect frees. Groups nest.
    pub fn group_begin(&mut self) {
        match &mut self.group {
            Some(group) => group.nested += 1,
            None => self.group = Some(Group::default()),
        }
    }

    /// Ends a group. The outermost one returns the collected values, to be freed in one call.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) when no group is open.
    pub fn group_end(&mut self) -> Result<Option<IndexVec>> {
        match &mut self.group {
            None => Err(Error::state("free_group_end without free_group_begin")),
            Some(group) if group.nested > 0 => {
                group.nested -= 1;
                Ok(None)
            }
            Some(group) => {
                let values = std::mem::take(&mut group.values);
                self.group = None;
                Ok(Some(IndexVec::I64(values)))
            }
        }
    }

    /// Returns the number of values that the open group has collected.
    pub(in crate::index) fn grouped(&self) -> usize {
        self.group.as_ref().map_or(0, |group| group.values.len())
    }

    /// Returns whether a group is open.
    #[must_use]
    pub const fn in_group(&self) -> bool {
        self.group.is_some()
    }
}
