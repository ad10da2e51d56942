//! Slots given back: at once, in groups, behind fences, and what is wrong with them.

use crate::base::{Error, Id, IndexVec, Page, Result, Slot};

use super::freeing::Freeing;
use super::{FenceId, Given, Group, SlotAllocator};
use crate::index::free_list::Give;
use crate::index::mask::Mask;
use crate::index::{Act, BadFrees, Signatures, on_bad_frees};

impl SlotAllocator {
    /// Gives slots back, at once or, within a group, when the outermost group ends.
    ///
    /// The page of every slot is freed, once. What is not live is dropped, counted and reported.
    ///
    /// # Errors
    /// With `strict`, [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) when anything would be dropped,
    /// and nothing is changed.
    pub fn free(&mut self, given: &IndexVec, strict: bool) -> Result<BadFrees> {
        if let Some(group) = &mut self.group {
            group.given.extend(given.iter());
            if self.pages.book().ledger().is_some() {
                group.by.push((group.given.len(), Act::current()));
            }
            return Ok(BadFrees::default());
        }
        self.give(given, None, strict)
    }

    /// Gives slots back at once, also within a group.
    ///
    /// # Errors
    /// As [`SlotAllocator::free`].
    pub fn free_now(&mut self, given: &IndexVec, strict: bool) -> Result<BadFrees> {
        self.give(given, None, strict)
    }

    /// As [`SlotAllocator::free_now`] or [`SlotAllocator::free_after`], for values that several calls gave.
    ///
    /// # Errors
    /// As [`SlotAllocator::free`].
    pub fn free_signed(
        &mut self,
        given: &IndexVec,
        fence: Option<FenceId>,
        by: &Signatures,
        strict: bool,
    ) -> Result<BadFrees> {
        let page_size = i64::from(self.page_size);
        if let Some(ledger) = self.pages.book_mut().ledger_mut() {
            ledger.signed(given, by, |slot| u32::try_from(slot / page_size).ok());
        }
        let answer = match fence {
            None => self.free_now(given, strict),
            Some(fence) => self.free_after(fence, given, strict),
        };
        if let Some(ledger) = self.pages.book_mut().ledger_mut() {
            ledger.all_given();
        }
        answer
    }

    /// A name for a fence that no other has had.
    pub const fn new_fence(&mut self) -> FenceId {
        self.next_fence += 1;
        FenceId(self.next_fence)
    }

    /// Gives slots back that work in flight still uses: they stay in use until [`SlotAllocator::fence_passed`].
    ///
    /// A group does not hold them back.
    ///
    /// # Errors
    /// As [`SlotAllocator::free`].
    pub fn free_after(&mut self, fence: FenceId, given: &IndexVec, strict: bool) -> Result<BadFrees> {
        self.give(given, Some(fence), strict)
    }

    /// Frees the slots behind a fence. A fence that is not known any more has no slots.
    pub fn fence_passed(&mut self, id: FenceId) {
        let passed: Vec<_> = self.fences.extract_if(.., |(fence, _)| *fence == id).collect();
        for (_, given) in passed {
            self.pages.unfence(&given.pages);
            for page in given.shared {
                if self.owners.complete(page) {
                    self.give_now([page]);
                }
            }
        }
    }

    /// Whether slots wait for this fence.
    #[must_use]
    pub fn is_awaited(&self, id: FenceId) -> bool {
        self.fences.iter().any(|(fence, _)| *fence == id)
    }

    /// Gives live pages back, unseen by groups and reports.
    pub(super) fn give_now(&mut self, pages: impl IntoIterator<Item = Page>) {
        let mut batch = self.pages.give(Give::Now);
        for page in pages {
            batch.add(Mask::of(page.number()));
        }
        batch.commit();
    }

    /// Gives slots back, at once or behind a fence, or none of them if that is an error.
    fn give(&mut self, given: &IndexVec, fence: Option<FenceId>, strict: bool) -> Result<BadFrees> {
        let (page_size, capacity) = (self.page_size, self.capacity());
        let give = if fence.is_some() { Give::Fenced } else { Give::Now };
        let mut freeing = Freeing {
            page_size,
            batch: self.pages.give(give),
            owners: self.owners.remove(give),
            named: &mut self.named,
            bad: BadFrees::default(),
        };
        freeing.add(given);
        let Freeing { mut batch, owners, mut bad, .. } = freeing;
        let dropped = bad.dropped();
        batch.list().book().explain(&mut bad, |slot| slot / page_size);
        let bad = on_bad_frees(bad, strict, Slot::NOUN, given.len(), capacity)?;
        owners.pages().iter().for_each(|page| batch.book_mut().left(page.number()));
        self.dropped_frees += dropped;
        if let Some(fence) = fence {
            let shared = owners.pages().to_vec();
            self.fences.push((fence, Given { pages: batch.fenced(), shared }));
        }
        owners.commit();
        batch.commit();
        Ok(bad)
    }

    /// Starts to collect frees. Groups nest.
    pub fn group_begin(&mut self) {
        match &mut self.group {
            Some(group) => group.nested += 1,
            None => self.group = Some(Group::default()),
        }
    }

    /// Ends a group; the outermost hands out what was collected, to be given back as one call, and who gave it.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when no group is open.
    pub fn group_end(&mut self) -> Result<Option<(IndexVec, Signatures)>> {
        match &mut self.group {
            None => Err(Error::config("free_group_end without free_group_begin")),
            Some(group) if group.nested > 0 => {
                group.nested -= 1;
                Ok(None)
            }
            Some(group) => {
                let Group { given, by, .. } = std::mem::take(group);
                self.group = None;
                Ok(Some((IndexVec::I64(given), by)))
            }
        }
    }

    /// Whether a group is open.
    #[must_use]
    pub const fn in_group(&self) -> bool {
        self.group.is_some()
    }
}
