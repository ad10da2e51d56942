//! Ownership by runs of pages, for owners that keep pages, without a conversion to slots and back.

use crate::base::bounded::narrow;
use crate::base::{Error, ErrorKind, Id, Page, Result, try_collect_each, try_push, try_to_vec, widen};
use crate::index::free_list::{FreeTiming, Run};
use crate::index::mask::Mask;
use crate::index::runs::BLOCK;

use super::{FenceId, FencedFree, SlotAllocator};

impl SlotAllocator {
    /// Adds an owner to pages, as [`SlotAllocator::share`] does. A page that is listed twice gets two.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`] with the first page that is not live; nothing is changed then.
    ///
    /// ```
    /// use kvpool::base::{Id, Page};
    /// use kvpool::index::{Order, Run, SlotAllocator};
    /// let mut slots = SlotAllocator::new(64, 16, Order::Sorted).unwrap();
    /// slots.alloc::<i32>(40).unwrap().unwrap();
    /// let prefix = [Run { start: Page::new(1), len: 2 }];
    /// slots.retain(&prefix).unwrap();
    /// slots.release(&prefix, None).unwrap();
    /// assert_eq!(slots.available(), 16);
    /// slots.release(&prefix, None).unwrap();
    /// assert_eq!(slots.available(), 48);
    /// assert!(slots.release(&prefix, None).is_err());
    /// ```
    pub fn retain(&mut self, runs: &[Run<Page>]) -> Result<()> {
        self.check_within(runs, "retained")?;
        let pages = || runs.iter().flat_map(|run| run.range()).map(Page::new);
        if let Some(page) = pages().find(|&page| !self.is_owned(page)) {
            return Err(not_owned_error(page, "retained"));
        }
        let reservation = self.prepare_sharing()?;
        self.share_pages(reservation, pages());
        Ok(())
    }

    /// Checks that runs lie in the space, so that their ends do not overflow.
    fn check_within(&self, runs: &[Run<Page>], what: &str) -> Result<()> {
        let space = self.pages.indices();
        let lies_within = |run: &&Run<Page>| {
            let start = run.start.number();
            space.contains(&start) && run.len <= space.end - start
        };
        match runs.iter().find(|run| !lies_within(run)) {
            None => Ok(()),
            Some(run) => Err(not_owned_error(run.start, what)),
        }
    }

    /// Makes a prefix cache the owner of `pages` in place of the caller, and removes the caller from
    /// `duplicates`. Frees do not remove the cache, only [`SlotAllocator::release_cached`] does.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`] with the first page that is not live, is listed twice or, in `pages`, is
    /// cached already; nothing is changed then.
    ///
    /// ```
    /// use kvpool::base::{Id, IndexVec, Page};
    /// use kvpool::index::{OnBadFree, Order, SlotAllocator};
    /// let mut slots = SlotAllocator::new(8, 1, Order::Sorted).unwrap();
    /// let taken = IndexVec::I32(slots.alloc(2).unwrap().unwrap());
    /// slots.cache(&[Page::new(1)], &[]).unwrap();
    /// assert_eq!(slots.free(&taken, OnBadFree::Report).unwrap().dropped(), 1);
    /// slots.release_cached(&[Page::new(1)], None);
    /// assert_eq!(slots.available(), 8);
    /// ```
    pub fn cache(&mut self, pages: &[Page], duplicates: &[Page]) -> Result<()> {
        let (list, space) = (&self.pages, widen(self.pages.count()) + 1);
        let runs = try_collect_each(runs_of(pages))?;
        let duplicates = try_collect_each(runs_of(duplicates))?;
        let is_within = self.check_within(&runs, "published").is_ok();
        if !is_within || !self.owners.cache_plain(space, masks_of(&runs), |mask| list.are_live(mask))? {
            let is_live = |page| list.contains(page) && list.is_live(page);
            if let Err((page, reason)) = self.owners.cache(space, pages, is_live)? {
                let slot = i64::from(page.number()) * i64::from(self.page_size);
                let text = format!("slot {slot} cannot be published: {}", reason.description());
                return Err(Error::new(ErrorKind::IndexOwnership, text).with_index(slot));
            }
        }
        self.release(&duplicates, None).inspect_err(|_| self.owners.uncache(masks_of(&runs)))
    }

    /// Removes the cache's ownership of pages, each of which it owns: at once, or when a fence has passed. A
    /// page returns with its last owner.
    ///
    /// # Panics
    /// If the cache does not own a page.
    pub fn release_cached(&mut self, pages: &[Page], fence: Option<FenceId>) {
        let masks = || runs_of(pages).flat_map(|run| Mask::of_range(run.range()));
        assert!(masks().all(|mask| self.owners.are_cached(mask)), "only cached pages are released");
        self.owners.uncache(masks());
        let released = try_collect_each(runs_of(pages)).and_then(|runs| self.release(&runs, fence));
        match released {
            Err(failure) if failure.kind() == ErrorKind::OutOfMemory && fence.is_none() => {
                self.give_back_each(pages.iter().copied(), |_, _| ());
            }
            released => released.expect("the cache is an owner of its pages"),
        }
    }

    /// Removes an owner from pages, each of which has one. Needs no memory, and is not recorded as the last
    /// free. Passes each page to `removed`, with `true` if it is free.
    pub(in crate::index) fn give_back_each(
        &mut self,
        pages: impl IntoIterator<Item = Page>,
        mut removed: impl FnMut(Page, bool),
    ) {
        // An empty batch, so that the previous one does not count as the last.
        self.owners.remove(FreeTiming::Now).commit();
        self.pages.begin_free(FreeTiming::Now).commit();
        for page in pages {
            let is_last = !self.owners.give_back(page);
            if is_last {
                self.give_back(page.number()..page.number() + 1);
            }
            removed(page, is_last);
        }
    }

    /// Removes an owner from pages: at once, or when a fence has passed. A page returns with its last owner.
    /// Groups do not delay it.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`] with the first page that has no owner, or fewer than its occurrences;
    /// nothing is changed then.
    pub fn release(&mut self, runs: &[Run<Page>], fence: Option<FenceId>) -> Result<()> {
        self.check_within(runs, "released")?;
        let timing = if fence.is_some() { FreeTiming::AfterFence } else { FreeTiming::Now };
        let (mut batch, mut owners) = (self.pages.begin_free(timing), self.owners.remove(timing));
        for mask in masks_of(runs) {
            let is_plain = owners.owners().is_trivial_for(mask) && owners.pages().is_empty();
            let mut shared = 0;
            for page in mask.indices().filter(|_| !is_plain).map(Page::new) {
                if owners.owners().counts_page(page) {
                    shared |= Mask::of(page.number()).bits;
                    if !owners.remove(page) {
                        let is_cached = owners.owners().is_cached(page);
                        return Err(if is_cached {
                            only_cached_error(page)
                        } else {
                            not_owned_error(page, "released")
                        });
                    }
                }
            }
            let blocked = batch.add(Mask { bits: mask.bits & !shared, ..mask });
            if let Some(page) = (Mask { bits: blocked, ..mask }).indices().next() {
                return Err(not_owned_error(Page::new(page), "released"));
            }
        }
        if self.page_size > 1 {
            batch.sort();
        }
        batch.check()?;
        owners.check()?;
        if let Some(fence) = fence {
            let fenced = FencedFree { pages: batch.fenced()?, shared: try_to_vec(owners.pages())? };
            try_push(&mut self.fences, (fence, fenced))?;
        }
        self.free_times.record(batch.masks().iter().copied());
        owners.commit();
        batch.commit();
        Ok(())
    }
}

/// Returns the maximal ascending runs of pages, in their order.
fn runs_of(pages: &[Page]) -> impl Iterator<Item = Run<Page>> + '_ {
    let mut remaining = pages;
    std::iter::from_fn(move || {
        let &start = remaining.first()?;
        let len = run_len(remaining);
        remaining = &remaining[len..];
        Some(Run { start, len: narrow(len) })
    })
}

/// Returns the number of leading pages that ascend by one each. `pages` is not empty.
fn run_len(pages: &[Page]) -> usize {
    let mut next = pages[0].number();
    let mut len = 0;
    for block in pages.chunks(BLOCK) {
        // Runs are continued block by block, without a branch for each page.
        let differ = block
            .iter()
            .zip(0..)
            .fold(0, |differ, (page, at)| differ | (page.number() ^ next.wrapping_add(at)));
        if differ != 0 {
            let goes_on = |(page, at): &(&Page, u32)| page.number() == next.wrapping_add(*at);
            return len + block.iter().zip(0..).take_while(goes_on).count();
        }
        len += block.len();
        next = next.wrapping_add(narrow(block.len()));
    }
    len
}

/// Returns the pages of runs that lie in the space.
fn masks_of(runs: &[Run<Page>]) -> impl Iterator<Item = Mask> + Clone + '_ {
    runs.iter().flat_map(|run| Mask::of_range(run.range()))
}

fn only_cached_error(page: Page) -> Error {
    Error::new(ErrorKind::IndexOwnership, format!("page {page} belongs to the prefix cache alone"))
        .with_index(page.number())
}

fn not_owned_error(page: Page, what: &str) -> Error {
    Error::new(ErrorKind::IndexOwnership, format!("page {page} is not allocated, and cannot be {what}"))
        .with_index(page.number())
}
