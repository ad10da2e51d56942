//! One call that frees slots: from unchecked numbers to pages.

use std::ops::Range;

use crate::base::{Id, IndexVec, Page, widen};
use crate::index::bitmap::Bitmap;
use crate::index::free_list::FreeBatch;
use crate::index::mask::Mask;
use crate::index::owners::RemovalBatch;
use crate::index::runs::{BLOCK, BlockMasks, RawIndex, run_len};
use crate::index::{BadFree, BadFrees, SlotList};

use super::FreedSlots;

/// The state of a call that frees slots.
pub(super) struct Freeing<'a> {
    pub(super) page_size: u32,
    /// Pages that had one owner.
    pub(super) batch: FreeBatch<'a, Page>,
    /// Removed owners of pages that had more.
    pub(super) owners: RemovalBatch<'a>,
    /// The pages added so far, if pages have several slots: each counts once. Empty otherwise.
    pub(super) named: &'a mut Bitmap,
    pub(super) bad: BadFrees,
}

impl<'a> Freeing<'a> {
    /// Returns the batches, and the report.
    pub(super) fn into_parts(self) -> (FreeBatch<'a, Page>, RemovalBatch<'a>, BadFrees) {
        (self.batch, self.owners, self.bad)
    }

    /// Frees the pages of slots.
    #[inline]
    pub(super) fn add(&mut self, slots: FreedSlots<'_>) {
        match slots {
            FreedSlots::Values(IndexVec::I32(values)) => self.add_values(values),
            FreedSlots::Values(IndexVec::I64(values)) => self.add_values(values),
            FreedSlots::Runs(slots) => self.add_runs(slots),
        }
        if self.page_size > 1 {
            for &Mask { word, bits } in self.batch.masks() {
                self.named.remove_word(widen(word), bits);
            }
            for page in self.owners.pages() {
                self.named.remove_run(widen(page.number()), 1);
            }
            // One call frees its pages in ascending order, independent of the order of its values.
            self.batch.sort();
        }
    }

    /// Returns the range of all slots.
    fn space(&self) -> Range<u32> {
        self.page_size..self.page_size * (self.batch.list().count() + 1)
    }

    fn add_runs(&mut self, slots: &SlotList) {
        let space = self.space();
        for run in slots.runs() {
            self.add_run(run.start.number().into(), widen(run.len), &space);
        }
    }

    fn add_values<T: RawIndex>(&mut self, values: &[T]) {
        let space = self.space();
        let mut remaining = values;
        while let Some(&first) = remaining.first() {
            let len = run_len(remaining);
            let is_scattered = self.page_size == 1 && len < BLOCK && len < remaining.len();
            let scattered = if is_scattered { self.add_scattered(remaining, &space) } else { 0 };
            if scattered == 0 {
                self.add_run(first.into(), len, &space);
            }
            remaining = &remaining[if scattered == 0 { len } else { scattered }..];
        }
    }

    /// Frees the leading `values`, each a page of its own, up to one that is not a slot or begins a longer
    /// run. Returns how many were freed.
    fn add_scattered<T: RawIndex>(&mut self, values: &[T], space: &Range<u32>) -> usize {
        let mut masks = BlockMasks::new();
        let mut done = 0;
        for block in values.chunks(BLOCK) {
            let is_run = block.len() == BLOCK && run_len(block) == BLOCK;
            let Some(masks) = masks.of(block, space).filter(|_| !is_run) else { break };
            self.add_masks(masks, block.len());
            done += block.len();
        }
        done
    }

    /// Frees slots that are pages of their own, `count` in all.
    #[inline]
    fn add_masks(&mut self, masks: &[Mask], count: usize) {
        let is_plain = self.is_plain(masks.iter().copied());
        let done = if is_plain { self.batch.add_while_live(masks, count) } else { 0 };
        for range in masks[done..].iter().flat_map(|mask| mask.ranges()) {
            self.add_range(&range);
        }
    }

    /// Frees the pages of `start..start + len`, which may lie outside of the space.
    #[inline]
    fn add_run(&mut self, start: i64, len: usize, space: &Range<u32>) {
        let mut remaining = Numbers { start, len };
        if let Some(slots) =
            remaining.range().filter(|slots| slots.start >= space.start && slots.end <= space.end)
        {
            return self.add_range(&slots);
        }
        let negative = remaining.split_below(0);
        self.bad.add(negative.start, BadFree::OutOfRange, negative.len);
        let padding = remaining.split_below(space.start);
        self.bad.add(padding.start, BadFree::Padding, padding.len);
        let within = remaining.split_below(space.end);
        if let Some(slots) = within.range() {
            self.add_range(&slots);
        }
        self.bad.add(remaining.start, BadFree::OutOfRange, remaining.len);
    }

    /// Returns whether each of `pages` has one owner at this point of the call, which is not the cache.
    #[inline]
    fn is_plain(&self, pages: impl IntoIterator<Item = Mask>) -> bool {
        let is_trivial = self.owners.owners().is_trivial() || self.is_plain_beside_others(pages);
        is_trivial && self.owners.pages().is_empty()
    }

    /// Works like [`Self::is_plain`], when there are pages with several owners or of the cache. It is a
    /// function of its own so that the common case stays small.
    #[inline(never)]
    fn is_plain_beside_others(&self, pages: impl IntoIterator<Item = Mask>) -> bool {
        pages.into_iter().all(|pages| self.owners.owners().is_trivial_for(pages))
    }

    /// Frees the pages of `slots`, which lie in the space and are not empty.
    #[inline]
    fn add_range(&mut self, slots: &Range<u32>) {
        let pages = match self.page_size {
            1 => slots.clone(),
            page_size => slots.start / page_size..(slots.end - 1) / page_size + 1,
        };
        let mut remaining = pages.start;
        if !self.is_plain(Mask::of_range(pages.clone())) {
            for page in pages.clone() {
                if self.remove_owner(Page::new(page), slots) {
                    self.add_pages(remaining..page, slots);
                    remaining = page + 1;
                }
            }
        }
        self.add_pages(remaining..pages.end, slots);
    }

    /// Removes an owner of `page` if it has more than one, or had when this call began. Returns `false` for
    /// other pages.
    fn remove_owner(&mut self, page: Page, slots: &Range<u32>) -> bool {
        if self.named.contains(widen(page.number())) {
            return true;
        }
        if !self.owners.owners().counts_page(page) {
            return false;
        }
        if !self.owners.remove(page) {
            self.report(Mask::of(page.number()), slots);
        } else if self.page_size > 1 {
            self.named.insert_run(widen(page.number()), 1);
        }
        true
    }

    /// Frees `pages`, none of them shared.
    #[inline]
    fn add_pages(&mut self, pages: Range<u32>, slots: &Range<u32>) {
        if self.page_size == 1 {
            return self.add_slots(pages, slots);
        }
        for mask in Mask::of_range(pages) {
            let unnamed = mask.bits & !self.named.word(widen(mask.word));
            let blocked = self.batch.add(Mask { bits: unnamed, ..mask });
            self.named.insert_word(widen(mask.word), unnamed & !blocked);
            self.report(Mask { bits: blocked, ..mask }, slots);
        }
    }

    /// Works like [`Self::add_pages`], for pages that are the slots.
    #[inline]
    fn add_slots(&mut self, mut pages: Range<u32>, slots: &Range<u32>) {
        /// The least number of pages for which it is worth to list words.
        const MANY: usize = 4 * 64;
        if pages.len() >= MANY {
            pages = self.add_long_run(pages);
        }
        for mask in Mask::of_range(pages) {
            let blocked = self.batch.add(mask);
            self.report(Mask { bits: blocked, ..mask }, slots);
        }
    }

    /// Frees leading pages of a run, many words at once, as long as all of a word are live. Returns the others.
    #[inline(never)]
    fn add_long_run(&mut self, mut pages: Range<u32>) -> Range<u32> {
        /// The number of words at once.
        const WORDS: u32 = 32;
        while !pages.is_empty() {
            let end = pages.end.min((pages.start / 64 + WORDS) * 64);
            let mut block = [Mask::of(0); widen(WORDS)];
            let len = block
                .iter_mut()
                .zip(Mask::of_range(pages.start..end))
                .map(|(place, mask)| *place = mask)
                .count();
            let done = self.batch.add_while_live(&block[..len], widen(end - pages.start));
            if done < len {
                return pages.start.max(block[done].base())..pages.end;
            }
            pages.start = end;
        }
        pages
    }

    /// Reports those of `slots` whose `pages` could not be freed, if there are any.
    #[inline]
    fn report(&mut self, pages: Mask, slots: &Range<u32>) {
        if pages.bits != 0 {
            self.report_blocked(pages, slots);
        }
    }

    #[cold]
    fn report_blocked(&mut self, pages: Mask, slots: &Range<u32>) {
        for page in pages.indices() {
            let start = page * self.page_size;
            let (from, to) = (start.max(slots.start), (start + self.page_size).min(slots.end));
            let reason = self.reason(Page::new(page));
            self.bad.add(from.into(), reason, widen(to - from));
        }
    }

    /// Returns why `page` cannot be freed.
    fn reason(&self, page: Page) -> BadFree {
        if self.bad.has_room() && self.batch.contains(page) {
            return BadFree::NamedTwice;
        }
        match self.batch.list() {
            list if list.is_live(page) && self.owners.owners().is_cached(page) => BadFree::Cached,
            // All owners are removed, and a fence that has not passed protects the page.
            list if list.is_live(page) => BadFree::AlreadyFree,
            list => list.reason(page),
        }
    }
}

/// The numbers `start..start + len`.
struct Numbers {
    start: i64,
    len: usize,
}

impl Numbers {
    /// Splits off the numbers below `end`.
    fn split_below(&mut self, end: impl Into<i64>) -> Self {
        let distance = end.into().saturating_sub(self.start).max(0);
        let below = usize::try_from(distance).map_or(self.len, |below| below.min(self.len));
        let split = Self { start: self.start, len: below };
        self.start = self.start.wrapping_add_unsigned(below as u64);
        self.len -= below;
        split
    }

    /// Returns the numbers as indices, if all of them are and there is at least one.
    fn range(&self) -> Option<Range<u32>> {
        let start = u32::try_from(self.start).ok()?;
        let len = u32::try_from(self.len).ok().filter(|&len| len > 0)?;
        Some(start..start.checked_add(len)?)
    }
}
