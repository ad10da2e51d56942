//! Slots given back: at once, in groups, behind fences, and what is wrong with them.

use std::ops::Range;

use crate::base::{Error, Id, IndexVec, Page, Result, Slot, widen};

use super::{FenceId, Fenced, Group, SlotAllocator};
use crate::index::free_list::{Accepted, Give, Run};
use crate::index::owners::Leave;
use crate::index::runs::for_each_run;
use crate::index::{Act, BadFree, BadFrees, Signatures, on_bad_frees};

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
        self.give(given, Give::Now, strict)
    }

    /// Gives slots back at once, also within a group.
    ///
    /// # Errors
    /// As [`SlotAllocator::free`].
    pub fn free_now(&mut self, given: &IndexVec, strict: bool) -> Result<BadFrees> {
        self.give(given, Give::Now, strict)
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
        let bad = self.give(given, Give::Fenced, strict)?;
        self.fences.push(Fenced { fence, pages: self.accepted.clone(), left: self.left.clone() });
        Ok(bad)
    }

    /// Frees the slots behind a fence. A fence that is not known any more has no slots.
    pub fn fence_passed(&mut self, id: FenceId) {
        let passed: Vec<Fenced> = self.fences.extract_if(.., |fenced| fenced.fence == id).collect();
        for fenced in passed {
            self.pages.unfence(&fenced.pages);
            for page in fenced.left {
                if self.owners.passed(page) {
                    self.give_now([page]);
                }
            }
        }
    }

    /// Whether slots wait for this fence.
    #[must_use]
    pub fn is_awaited(&self, id: FenceId) -> bool {
        self.fences.iter().any(|fenced| fenced.fence == id)
    }

    /// Gives live pages back, unseen by groups and reports.
    pub(super) fn give_now(&mut self, pages: impl IntoIterator<Item = Page>) {
        let mut accepted = Vec::new();
        for page in pages {
            self.pages.give(Run { start: page, len: 1 }, Give::Now, &mut accepted, |_| ());
        }
        self.pages.commit(&accepted, Give::Now);
    }

    fn give(&mut self, given: &IndexVec, give: Give, strict: bool) -> Result<BadFrees> {
        let mut accepted = std::mem::take(&mut self.accepted);
        accepted.clear();
        self.left.clear();
        let mut bad = BadFrees::default();
        for_each_run(given, |start, len| self.give_run(start, len, give, &mut accepted, &mut bad));
        if self.page_size > 1 {
            for run in &accepted {
                self.named.remove_run(widen(run.start.number()), widen(run.len));
            }
            for page in &self.left {
                self.named.remove_run(widen(page.number()), 1);
            }
            // One call frees its pages in ascending order, however it names them.
            accepted.sort_unstable();
        }
        let dropped = bad.dropped();
        self.pages.book().explain(&mut bad, |slot| slot / self.page_size);
        let answer = on_bad_frees(bad, strict, Slot::NOUN, given.len(), self.capacity());
        if answer.is_ok() {
            self.pages.commit(&accepted, give);
            for page in &self.left {
                self.pages.book_mut().left(page.number());
            }
            self.dropped_frees += dropped;
        } else {
            self.pages.rollback(&accepted, give);
            for page in self.left.drain(..) {
                self.owners.stay(page, give == Give::Fenced);
            }
        }
        self.accepted = accepted;
        answer
    }

    /// Gives the pages of slots `start..start + len`, which may lie anywhere.
    fn give_run(
        &mut self,
        start: i64,
        len: usize,
        give: Give,
        accepted: &mut Accepted<Page>,
        bad: &mut BadFrees,
    ) {
        let (low, high) = (self.page_size, self.page_size * (self.pages.count() + 1));
        if start >= i64::from(high) {
            bad.add(start, BadFree::OutOfRange, len);
            return;
        }
        let end = start.saturating_add(i64::try_from(len).unwrap_or(i64::MAX));
        // Both ends, drawn into the space of slots, which `new` keeps within int32.
        let within = |slot: i64| u32::try_from(slot.clamp(low.into(), high.into())).unwrap_or(high);
        let (first, last) = (within(start), within(end));
        if start < low.into() {
            name_outside(bad, start, end.min(low.into()));
        }
        if first < last {
            self.give_slots(first..last, give, accepted, bad);
        }
        if end > high.into() {
            bad.add(high.into(), BadFree::OutOfRange, usize::try_from(end - i64::from(high)).unwrap_or(0));
        }
    }

    /// Gives the pages of `slots`, which lie in the space and are not empty.
    fn give_slots(
        &mut self,
        slots: Range<u32>,
        give: Give,
        accepted: &mut Accepted<Page>,
        bad: &mut BadFrees,
    ) {
        let pages = match self.page_size {
            1 => slots.clone(),
            page_size => slots.start / page_size..(slots.end - 1) / page_size + 1,
        };
        let mut rest = pages.start;
        if !(self.owners.is_trivial() && self.left.is_empty()) {
            for page in pages.clone() {
                if self.give_shared(Page::new(page), &slots, give, accepted, bad) {
                    self.give_pages(rest..page, &slots, give, accepted, bad);
                    rest = page + 1;
                }
            }
        }
        self.give_pages(rest..pages.end, &slots, give, accepted, bad);
    }

    /// Takes an owner from `page` if it has more than one, or had when this call began. `false` if it is a page like others.
    fn give_shared(
        &mut self,
        page: Page,
        slots: &Range<u32>,
        give: Give,
        accepted: &Accepted<Page>,
        bad: &mut BadFrees,
    ) -> bool {
        if self.named.contains(widen(page.number())) {
            return true;
        }
        if !self.owners.concerns(page) {
            return false;
        }
        if self.owners.leave(page, give == Give::Fenced) == Leave::Nobody {
            self.name_blocked(page, slots.clone(), accepted, bad);
            return true;
        }
        self.left.push(page);
        if self.page_size > 1 {
            self.named.insert_run(widen(page.number()), 1);
        }
        true
    }

    /// Gives `pages`, of which none is shared.
    fn give_pages(
        &mut self,
        pages: Range<u32>,
        slots: &Range<u32>,
        give: Give,
        accepted: &mut Accepted<Page>,
        bad: &mut BadFrees,
    ) {
        if pages.is_empty() {
            return;
        }
        let run = Run { start: Page::new(pages.start), len: pages.end - pages.start };
        let fresh = accepted.len();
        let mut blocked = Vec::new();
        self.pages.give(run, give, accepted, |page| blocked.push(page));
        if self.page_size > 1 {
            for run in &accepted[fresh..] {
                self.named.insert_run(widen(run.start.number()), widen(run.len));
            }
        }
        for page in blocked {
            self.name_blocked(page, slots.clone(), accepted, bad);
        }
    }

    /// Reports the slots of `slots` that lie in `page`, which could not be given, unless this call gave it.
    fn name_blocked(&self, page: Page, slots: Range<u32>, accepted: &Accepted<Page>, bad: &mut BadFrees) {
        if self.named.contains(widen(page.number())) {
            return;
        }
        let start = page.number() * self.page_size;
        let (from, to) = (start.max(slots.start), (start + self.page_size).min(slots.end));
        let repeated = bad.wants_reason()
            && accepted
                .iter()
                .any(|run| (run.start.number()..run.start.number() + run.len).contains(&page.number()));
        let reason = match self.pages.reason(page) {
            _ if repeated => BadFree::NamedTwice,
            // Its owners have left it, but a fence that has not passed keeps it.
            _ if self.pages.is_live(page) => BadFree::AlreadyFree,
            reason => reason,
        };
        bad.add(from.into(), reason, widen(to - from));
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

/// Reports `from..to`, which lies below the first page: negative, the padding slot, or the padding page.
fn name_outside(bad: &mut BadFrees, from: i64, to: i64) {
    let count = |from: i64, to: i64| usize::try_from(to - from).unwrap_or(0);
    bad.add(from, BadFree::OutOfRange, count(from, to.min(0)));
    let from = from.max(0);
    bad.add(from, BadFree::Padding, count(from, to));
}
