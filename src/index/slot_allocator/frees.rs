//! Freeing slots: at once, at the end of a group, or when a fence has passed.

use crate::base::{Error, Id, IndexVec, Page, Result, Slot, try_push, try_reserve, try_to_vec, widen};

use super::freeing::Freeing;
use super::{FenceId, FencedFree, Group, SlotAllocator};
use crate::index::free_list::FreeTiming;
use crate::index::mask::Mask;
use crate::index::{BadFrees, OnBadFree, on_bad_frees};

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
            try_reserve(&mut group.values, values.len())?;
            group.values.extend(values.iter());
            return Ok(BadFrees::default());
        }
        self.free_explained(values, None, on_bad, |_| ())
    }

    /// Frees slots at once, even within a group.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::free`].
    pub fn free_now(&mut self, values: &IndexVec, on_bad: OnBadFree) -> Result<BadFrees> {
        self.free_explained(values, None, on_bad, |_| ())
    }

    /// Creates a fence, different from every other one.
    pub const fn new_fence(&mut self) -> FenceId {
        self.next_fence += 1;
        FenceId(self.next_fence)
    }

    /// Makes the fences of this allocator differ from those of `other`, which it replaces: a fence of the
    /// other may pass later.
    pub const fn number_fences_after(&mut self, other: &Self) {
        self.next_fence = other.next_fence;
    }

    /// Frees slots that work in flight still uses: they stay in use until [`SlotAllocator::fence_passed`].
    ///
    /// A group does not delay it.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::free`].
    pub fn free_after(&mut self, fence: FenceId, values: &IndexVec, on_bad: OnBadFree) -> Result<BadFrees> {
        self.free_explained(values, Some(fence), on_bad, |_| ())
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
                    self.pages.give_back(page.number()..page.number() + 1);
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

    /// Works like [`SlotAllocator::free_now`] or [`SlotAllocator::free_after`]; `explain` adds to the report.
    pub(in crate::index) fn free_explained(
        &mut self,
        values: &IndexVec,
        fence: Option<FenceId>,
        on_bad: OnBadFree,
        explain: impl FnOnce(&mut BadFrees),
    ) -> Result<BadFrees> {
        if fence.is_none()
            && let Some(page) = self.only_page(values)
        {
            // An empty batch, so that the previous one does not count as the last.
            self.owners.remove(FreeTiming::Now).commit();
            let mut batch = self.pages.begin_free(FreeTiming::Now);
            batch.add(Mask::of(page.number()));
            if batch.check().is_ok() {
                batch.commit();
            } else {
                drop(batch);
                self.free_without_lists(values);
            }
            return Ok(BadFrees::default());
        }
        let (page_size, capacity) = (self.page_size, self.capacity());
        let timing = if fence.is_some() { FreeTiming::AfterFence } else { FreeTiming::Now };
        let mut freeing = Freeing {
            page_size,
            batch: self.pages.begin_free(timing),
            owners: self.owners.remove(timing),
            named: &mut self.named,
            bad: BadFrees::default(),
        };
        freeing.add(values);
        let (batch, owners, mut bad) = freeing.into_parts();
        let dropped = bad.dropped();
        explain(&mut bad);
        let bad = on_bad_frees(bad, on_bad, Slot::NOUN, values.len(), capacity)?;
        let listed = batch.check().and_then(|()| owners.check());
        match (listed, fence) {
            (Ok(()), None) => {
                owners.commit();
                batch.commit();
            }
            (Ok(()), Some(fence)) => {
                let fenced = FencedFree { pages: batch.fenced()?, shared: try_to_vec(owners.pages())? };
                try_push(&mut self.fences, (fence, fenced))?;
                owners.commit();
                batch.commit();
            }
            // It must not fail: its caller may have no other record of the slots.
            (Err(_), None) => {
                drop(owners);
                drop(batch);
                self.free_without_lists(values);
            }
            (Err(failure), Some(_)) => return Err(failure),
        }
        self.dropped_frees += dropped;
        Ok(bad)
    }

    /// Frees those of the slots that can be freed, without lists for which there is no memory. A ledger does
    /// not learn of it.
    #[cold]
    fn free_without_lists(&mut self, values: &IndexVec) {
        for slot in values.iter() {
            let page = u32::try_from(slot).ok().map(|slot| Page::new(slot / self.page_size));
            let Some(page) = page.filter(|&page| self.pages.is_live(page)) else { continue };
            let place = widen(page.number());
            if self.page_size > 1 && self.named.contains(place) {
                continue;
            }
            if !self.owners.give_back(page) {
                self.pages.give_back(page.number()..page.number() + 1);
            }
            if self.page_size > 1 {
                self.named.insert_run(place, 1);
            }
        }
        self.named.clear();
    }

    /// Returns the page of the slot, if a free has only one, the page is live, and no page has several
    /// owners. This is the most frequent free, and needs no list.
    #[inline]
    fn only_page(&self, values: &IndexVec) -> Option<Page> {
        let slot = match values {
            IndexVec::I32(slots) => match slots[..] {
                [slot] => slot.into(),
                _ => return None,
            },
            IndexVec::I64(slots) => match slots[..] {
                [slot] => slot,
                _ => return None,
            },
        };
        let page = Page::new(u32::try_from(slot).ok()? / self.page_size);
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
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when no group is open.
    pub fn group_end(&mut self) -> Result<Option<IndexVec>> {
        match &mut self.group {
            None => Err(Error::config("free_group_end without free_group_begin")),
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
