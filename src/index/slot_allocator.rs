//! An allocator of token slots, in pages of one or more slots.
//!
//! A slot belongs to a page, and every page is free, released, fenced or live with one or more owners. The
//! allocator decides which. It has no requests, no tensors and no streams, and is not synchronised.

mod freed_slots;
mod freeing;
mod frees;
mod held;
mod page_runs;

use std::fmt;
use std::ops::Range;

use crate::base::{
    Epoch, Error, ErrorKind, Id, IndexNumber, IndexVec, PADDING, Page, Result, Slot, try_push,
    try_with_capacity, widen,
};

use super::Bitmap;
use super::extension::{ExtendedRequest, Extension, LastLoc, NewSlots, parse_requests};
use super::free_list::{FencedIndices, Fit, FreeList, Order, Run};
use super::free_times::{FreeTimes, Moment};
use super::mask::Mask;
use super::owners::{Owners, SharingReservation};
use super::page_size::PageSize;
use super::slot_list::SlotList;
pub(super) use freed_slots::FreedSlots;
pub use held::Held;

/// Identifies a fenced free until its fence has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FenceId(u64);

/// Statistics of a [`SlotAllocator`], in slots unless the name says otherwise.
///
/// ```
/// use kvpool::base::IndexVec;
/// use kvpool::index::{FenceId, OnBadFree, Order, SlotAllocator, SlotStats};
/// let mut slots = SlotAllocator::new(64, 16, Order::Sorted).unwrap();
/// slots.alloc::<i32>(20).unwrap();
/// let fence: FenceId = slots.new_fence();
/// slots.free_after(fence, &IndexVec::I32(vec![16]), OnBadFree::Report).unwrap();
/// let SlotStats { available, in_use, fenced, .. } = slots.stats();
/// assert_eq!((available, in_use, fenced), (32, 32, 16));
/// slots.fence_passed(fence);
/// assert_eq!(slots.stats().available, 48);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotStats {
    /// Slots that can be in use at once.
    pub capacity: usize,
    /// Free and released slots.
    pub available: usize,
    /// Live and fenced slots.
    pub in_use: usize,
    /// The most slots in use at once.
    pub high_water: usize,
    /// Slots whose free was dropped.
    pub dropped_frees: usize,
    /// Slots that wait for a merge.
    pub released: usize,
    /// Slots that wait for a fence.
    pub fenced: usize,
    /// Slots with more than one owner.
    pub shared: usize,
    /// Slots in use that a prefix cache owns.
    pub cached: usize,
    /// The size of the bookkeeping in bytes.
    pub bytes: usize,
}

/// Ownership of token slots.
///
/// Pages are numbered `1..=size / page_size`; page `p` holds slots `p * page_size..(p + 1) * page_size`.
/// Slots leave as whole pages and return as whole pages. With `page_size == 1` page and slot are the same
/// number.
///
/// A page has one owner, or more after [`SlotAllocator::share`]. Each owner frees it once, and the page is
/// free when the last owner has freed it.
///
/// Taking and freeing cost one pass over the indices and a few steps per run, independent of the size of the
/// pool. The returned vector is the only allocation.
///
/// ```
/// use kvpool::base::IndexVec;
/// use kvpool::index::{OnBadFree, Order, SlotAllocator};
/// let mut slots = SlotAllocator::new(64, 16, Order::Sorted).unwrap();
/// assert_eq!(slots.alloc::<i32>(3).unwrap().unwrap(), [16, 17, 18]);
/// assert_eq!(slots.available(), 48);
/// let bad = slots.free(&IndexVec::I32(vec![17]), OnBadFree::Report).unwrap();
/// assert_eq!((bad.dropped(), slots.available()), (0, 64));
/// ```
#[derive(Clone)]
pub struct SlotAllocator {
    pages: FreeList<Page>,
    size: usize,
    /// The number of slots in a page, at least 1.
    page_size: u32,
    /// Pages that the free in progress has listed already. Empty between calls, and with `page_size == 1`.
    named: Bitmap,
    owners: Owners,
    /// When pages were freed.
    free_times: FreeTimes,
    /// Whether the last free left the times of its pages to the caller.
    has_left_times: bool,
    /// The fenced frees and their fences.
    fences: Vec<(FenceId, FencedFree)>,
    next_fence: u64,
    /// The current period between two clears.
    epoch: Epoch,
    group: Option<Group>,
    dropped_frees: usize,
}

impl fmt::Debug for SlotAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotAllocator")
            .field("size", &self.size)
            .field("page_size", &self.page_size)
            .field("available", &self.available())
            .finish_non_exhaustive()
    }
}

/// The pages of one fenced free.
#[derive(Clone, Debug)]
struct FencedFree {
    pages: FencedIndices<Page>,
    /// Pages from which one owner is removed.
    shared: Vec<Page>,
}

/// Frees that are collected until the outermost group ends.
#[derive(Clone, Debug, Default)]
struct Group {
    /// The number of open groups within this one.
    nested: usize,
    values: Vec<i64>,
}

impl SlotAllocator {
    /// Creates an allocator with all of `size / page_size` pages free.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when `size` or `page_size` is 0, or when slots would not fit int32.
    pub fn new(size: usize, page_size: usize, order: Order) -> Result<Self> {
        if size == 0 || page_size == 0 {
            return Err(Error::config(format!("size {size} and page_size {page_size} must be at least 1")));
        }
        let highest = size.checked_add(page_size).and_then(|end| i32::try_from(end).ok());
        let (Some(_), Ok(page_size), Ok(count)) =
            (highest, u32::try_from(page_size), u32::try_from(size / page_size))
        else {
            return Err(Error::config(format!(
                "size {size} with page_size {page_size} needs slots beyond {}, the largest int32",
                i32::MAX
            )));
        };
        Ok(Self {
            pages: FreeList::new(1, count, order)?,
            size,
            page_size,
            named: Bitmap::new(if page_size == 1 { 0 } else { widen(count) + 1 })?,
            owners: Owners::new()?,
            free_times: FreeTimes::new(count + 1)?,
            has_left_times: false,
            fences: Vec::new(),
            next_fence: 0,
            epoch: Epoch::default(),
            group: None,
            dropped_frees: 0,
        })
    }

    /// Returns the size that was requested at construction. A partial page at its end is never handed out.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Returns the order in which freed pages are handed out again.
    #[must_use]
    pub const fn order(&self) -> Order {
        self.pages.order()
    }

    /// Returns the number of slots in a page.
    #[must_use]
    pub const fn page_size(&self) -> usize {
        widen(self.page_size)
    }

    /// Returns the number of slots that could be handed out now, in whole pages.
    #[must_use]
    pub fn available(&self) -> usize {
        self.pages.available() * self.page_size()
    }

    /// Returns the number of slots that can be in use at once.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.pages.capacity() * self.page_size()
    }

    /// Returns the free list of the pages.
    #[must_use]
    pub const fn pages(&self) -> &FreeList<Page> {
        &self.pages
    }

    /// Returns the first slot of `page`.
    #[must_use]
    pub fn first_slot(&self, page: Page) -> Slot {
        Slot::new(page.number() * self.page_size)
    }

    /// Returns [`SlotAllocator::page_size`] as `u32`.
    pub(super) const fn slots_of_a_page(&self) -> u32 {
        self.page_size
    }

    /// Returns the current numbers.
    #[must_use]
    pub fn stats(&self) -> SlotStats {
        SlotStats {
            capacity: self.capacity(),
            available: self.available(),
            in_use: self.pages.in_use() * self.page_size(),
            high_water: self.pages.high_water() * self.page_size(),
            dropped_frees: self.dropped_frees,
            released: self.pages.released() * self.page_size(),
            fenced: (self.pages.fenced() + self.owners.unowned()) * self.page_size(),
            shared: self.owners.shared() * self.page_size(),
            cached: self.owners.cached() * self.page_size(),
            bytes: self.pages.bytes() + self.named.bytes() + self.owners.bytes() + self.free_times.bytes(),
        }
    }

    /// Takes `count` slots, or returns `None` when there are not enough.
    ///
    /// The caller also owns the rest of the last page.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when the host cannot allocate the result; nothing is taken.
    pub fn alloc<T: IndexNumber>(&mut self, count: usize) -> Result<Option<Vec<T>>> {
        let pages = count.div_ceil(self.page_size());
        if pages > self.pages.available() {
            self.pages.merge();
            return Ok(None);
        }
        let mut slots = try_with_capacity(count)?;
        if self.page_size == 1 {
            slots.resize(count, T::default());
            self.pages.alloc_into(&mut slots);
            return Ok(Some(slots));
        }
        let page_size = self.page_size;
        self.pages.alloc(pages, |run| push_slots(&mut slots, run, page_size, count));
        Ok(Some(slots))
    }

    /// Returns whether taking `count` slots would first merge the released ones into the free ones.
    #[must_use]
    pub fn merges_for(&self, count: usize) -> bool {
        count.div_ceil(self.page_size()) > self.pages.available() - self.pages.released()
    }

    /// Takes `count` consecutive slots from the beginning of a page on, in the run that `fit` selects, or
    /// returns `None`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when the host cannot allocate the result; nothing is taken.
    pub fn alloc_contiguous<T: IndexNumber>(&mut self, count: usize, fit: Fit) -> Result<Option<Vec<T>>> {
        let pages = count.div_ceil(self.page_size());
        if pages == 0 || pages > self.pages.available() {
            return self.alloc(count);
        }
        let mut slots = try_with_capacity(count)?;
        Ok(self.pages.alloc_run(pages, fit).map(|run| {
            push_slots(&mut slots, run, self.page_size, count);
            slots
        }))
    }

    /// Takes the slots for positions `prefix..seq` of each request, or returns `None`.
    ///
    /// A prefix that ends inside a page is continued from `last_loc + 1`; then whole pages are taken. The
    /// requests' slots are concatenated. `last_loc` is ignored where the prefix fills its pages. A `last_loc`
    /// that only a device has is not checked.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when the slices differ in length, a length is negative or shrinks, or the offset
    /// of `last_loc` in its page contradicts the prefix; [`ErrorKind::IndexOwnership`] when the page of
    /// `last_loc` is not allocated, or two requests would continue the same page. Nothing is taken.
    pub fn extend<T: IndexNumber>(
        &mut self,
        prefix_lens: &[i64],
        seq_lens: &[i64],
        last_loc: LastLoc<'_>,
    ) -> Result<Option<Extension<T>>> {
        let mut slots = Vec::new();
        let continued = self.extend_into(prefix_lens, seq_lens, last_loc, &mut slots)?;
        Ok(continued.map(|continued| Extension { slots, continued }))
    }

    /// Works like [`SlotAllocator::extend`], and appends the slots to `slots`. Returns the continued pages.
    ///
    /// # Errors
    /// Same as [`SlotAllocator::extend`].
    pub fn extend_runs(
        &mut self,
        prefix_lens: &[i64],
        seq_lens: &[i64],
        last_loc: LastLoc<'_>,
        slots: &mut SlotList,
    ) -> Result<Option<Vec<Page>>> {
        self.extend_into(prefix_lens, seq_lens, last_loc, slots)
    }

    fn extend_into(
        &mut self,
        prefix_lens: &[i64],
        seq_lens: &[i64],
        last_loc: LastLoc<'_>,
        slots: &mut impl NewSlots,
    ) -> Result<Option<Vec<Page>>> {
        let requests = parse_requests(prefix_lens, seq_lens, last_loc)?;
        let page_size = PageSize::new(self.page_size);
        let is_known = matches!(last_loc, LastLoc::Known(_));
        let continued = if is_known { self.continued(&requests, page_size, last_loc)? } else { Vec::new() };
        // A sum that overflows exceeds the tokens or pages of any pool.
        let wanted = requests.iter().try_fold((0usize, 0usize), |(tokens, pages), request| {
            let tokens = tokens.checked_add(widen(request.new_slots()))?;
            Some((tokens, pages.checked_add(widen(request.new_pages(page_size)))?))
        });
        let fits =
            |&(tokens, pages): &(usize, usize)| pages <= self.pages.available() && tokens <= self.capacity();
        let Some((tokens, pages)) = wanted.filter(fits) else {
            self.pages.merge();
            return Ok(None);
        };
        slots.reserve(tokens, if is_known { tokens.min(continued.len() + pages) } else { tokens })?;
        let mut taken = Vec::new();
        self.alloc_page_runs(pages, &mut taken)?;
        let mut taken = taken.into_iter();
        let mut rest: Option<Run<Page>> = None;
        for request in &requests {
            let open = request.open_slots(page_size);
            match open {
                0 => (),
                open if is_known => slots.push(Run { start: Slot::new(request.next_slot), len: open }),
                open => slots.push_unknown(open),
            }
            let mut left = request.new_slots() - open;
            while left > 0 {
                let run = rest.take().or_else(|| taken.next()).expect("as many pages were taken");
                let (run, others) = run.split(page_size.pages(left));
                let len = left.min(run.len * self.page_size);
                slots.push(Run { start: self.first_slot(run.start), len });
                left -= len;
                rest = others;
            }
        }
        Ok(Some(continued))
    }

    /// Returns the pages that `requests` continue behind `last_loc`, each checked to be live and continued only
    /// once.
    fn continued(
        &mut self,
        requests: &[ExtendedRequest],
        page_size: PageSize,
        last_loc: LastLoc<'_>,
    ) -> Result<Vec<Page>> {
        let mut marked = try_with_capacity(requests.len())?;
        let fault = requests.iter().enumerate().find_map(|(position, request)| {
            let offset = page_size.offset(request.prefix);
            if offset == 0 || request.new_slots() == 0 {
                return None;
            }
            let next = request.next_slot;
            let page = Page::new(page_size.page(next));
            let is_right = page_size.offset(next) == offset
                && self.is_owned(page)
                && self.named.insert(widen(page.number()));
            if !is_right {
                return Some(self.not_continued_error(position, request, page_size, last_loc.of(position)));
            }
            marked.push(page);
            None
        });
        for page in &marked {
            self.named.remove(widen(page.number()));
        }
        fault.map_or(Ok(marked), Err)
    }

    /// Returns why a request of a batch cannot continue the page behind its `last_loc`.
    #[cold]
    fn not_continued_error(
        &self,
        position: usize,
        request: &ExtendedRequest,
        page_size: PageSize,
        last: i64,
    ) -> Error {
        let ExtendedRequest { prefix, next_slot, .. } = request;
        let page = Page::new(page_size.page(*next_slot));
        if page_size.offset(*next_slot) != page_size.offset(*prefix) {
            let page_size = self.page_size;
            return Error::argument(format!(
                "last_loc {last} of request {position} does not end a prefix of {prefix} with page_size {page_size}"
            ));
        }
        let text = if self.is_owned(page) {
            format!("request {position} continues page {page}, as another request of the batch does")
        } else {
            format!("last_loc {last} of request {position} is in page {page}, which is not allocated")
        };
        Error::new(ErrorKind::IndexOwnership, text).with_index(last)
    }

    /// Undoes an allocation that never reached its caller: frees the pages of `slots`, except the `continued`
    /// ones. Needs no memory.
    ///
    /// A group does not delay the free, and nothing is reported. The padding slot stands for a slot in a page
    /// that the request had before.
    pub fn undo<T: IndexNumber>(&mut self, slots: &[T], continued: &[Page]) {
        self.undo_each(slots.iter().copied(), continued, |_| ());
    }

    /// Works like [`SlotAllocator::undo`], and passes the freed pages to `undone`.
    pub(super) fn undo_each<T: IndexNumber>(
        &mut self,
        slots: impl IntoIterator<Item = T>,
        continued: &[Page],
        mut undone: impl FnMut(Range<u32>),
    ) {
        let mut run = 0..0;
        for slot in slots {
            let page = slot.number() / self.page_size;
            let is_last = page + 1 == run.end;
            if is_last || page == PADDING || continued.contains(&Page::new(page)) {
                continue;
            }
            if page == run.end {
                run.end += 1;
                continue;
            }
            let before = std::mem::replace(&mut run, page..page + 1);
            self.give_back(before.clone());
            undone(before);
        }
        self.give_back(run.clone());
        undone(run);
    }

    /// Frees live pages that have lost their last owner. Needs no memory.
    fn give_back(&mut self, run: Range<u32>) {
        self.free_times.record(Mask::of_range(run.clone()));
        self.pages.give_back(run);
    }

    /// Adds an owner to the pages of slots, once per page (with `page_size == 1`, once per occurrence). Each
    /// owner frees its pages, and a page returns with its last owner.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`] with the first slot that is not live; nothing is changed then.
    ///
    /// ```
    /// use kvpool::base::IndexVec;
    /// use kvpool::index::{OnBadFree, Order, SlotAllocator};
    /// let mut slots = SlotAllocator::new(8, 1, Order::Sorted).unwrap();
    /// let prefix = IndexVec::I32(slots.alloc(3).unwrap().unwrap());
    /// slots.share(&prefix).unwrap();
    /// assert_eq!(slots.free(&prefix, OnBadFree::Fail).unwrap().dropped(), 0);
    /// assert_eq!(slots.available(), 5);
    /// assert_eq!(slots.free(&prefix, OnBadFree::Fail).unwrap().dropped(), 0);
    /// assert_eq!(slots.available(), 8);
    /// ```
    pub fn share(&mut self, values: &IndexVec) -> Result<()> {
        self.share_pages_of(values).map(drop)
    }

    /// Works like [`SlotAllocator::share`], and returns the pages that have one more owner.
    pub(super) fn share_pages_of(&mut self, values: &IndexVec) -> Result<Vec<Page>> {
        let mut pages: Vec<Page> = try_with_capacity(values.len())?;
        for (position, slot) in values.iter().enumerate() {
            let page = u32::try_from(slot).ok().map(|slot| Page::new(slot / self.page_size));
            match page.filter(|&page| self.is_owned(page)) {
                Some(page) => pages.push(page),
                None => {
                    return Err(Error::new(
                        ErrorKind::IndexOwnership,
                        format!("slot {slot} at position {position} is not allocated, and cannot be shared"),
                    )
                    .with_index(slot));
                }
            }
        }
        if self.page_size > 1 {
            pages.sort_unstable();
            pages.dedup();
        }
        let reservation = self.prepare_sharing()?;
        self.share_pages(reservation, pages.iter().copied());
        Ok(pages)
    }

    /// Allocates the counts of owners.
    pub(super) fn prepare_sharing(&mut self) -> Result<SharingReservation> {
        self.owners.prepare(widen(self.pages.count()) + 1)
    }

    /// Works like [`SlotAllocator::share`], for pages that the caller has checked to be live.
    pub(super) fn share_pages(
        &mut self,
        reservation: SharingReservation,
        pages: impl IntoIterator<Item = Page>,
    ) {
        for page in pages {
            self.owners.add(reservation, page);
        }
    }

    /// Returns whether `page` is live and has an owner whose removal is not pending.
    #[inline]
    pub(super) fn is_owned(&self, page: Page) -> bool {
        self.pages.is_live(page) && self.owners.is_owned(page)
    }

    /// Returns the current moment, after all frees so far, for something that is taken now.
    #[must_use]
    pub const fn take_moment(&mut self) -> Moment {
        self.free_times.take_moment()
    }

    /// Returns whether the ownership of `page`, any number, has ended since `moment`. A free of a whole
    /// [hold](Held) does not count.
    #[must_use]
    pub fn is_freed_since(&self, page: Page, moment: Moment) -> bool {
        self.free_times.is_freed_since(page.number(), moment)
    }

    /// Returns whether the allocator was cleared after `moment`.
    #[must_use]
    pub const fn is_cleared_since(&self, moment: Moment) -> bool {
        self.free_times.is_all_freed_since(moment)
    }

    /// Returns whether the cache is the only owner of `page`.
    pub(super) fn is_only_cached(&self, page: Page) -> bool {
        self.owners.is_cached(page) && !self.owners.is_in_use(page)
    }

    /// Returns whether `page` has several owners, or had another one that was removed with a fence.
    pub(super) fn is_shared(&self, page: Page) -> bool {
        self.owners.counts_page(page)
    }

    /// Takes `count` pages and passes them to `emit` in order, or returns `false`. Give them back with
    /// [`SlotAllocator::release`].
    ///
    /// ```
    /// use kvpool::index::{Order, SlotAllocator};
    /// let mut slots = SlotAllocator::new(64, 4, Order::Sorted).unwrap();
    /// let mut runs = Vec::new();
    /// assert!(slots.alloc_pages(2, |run| runs.push(run)));
    /// assert_eq!(runs[0].range(), 1..3);
    /// ```
    pub fn alloc_pages(&mut self, count: usize, emit: impl FnMut(Run<Page>)) -> bool {
        if count > self.pages.available() {
            self.pages.merge();
            return false;
        }
        self.pages.alloc(count, emit)
    }

    /// Works like [`SlotAllocator::alloc_pages`], for one page.
    pub fn alloc_page(&mut self) -> Option<Page> {
        self.pages.alloc_one()
    }

    /// Works like [`SlotAllocator::alloc_pages`], and appends the runs to `runs`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when the host cannot allocate the list; nothing is taken.
    pub fn alloc_page_runs(&mut self, count: usize, runs: &mut Vec<Run<Page>>) -> Result<bool> {
        if count > self.pages.available() {
            self.pages.merge();
            return Ok(false);
        }
        let begin = runs.len();
        self.pages.try_alloc(count, |run| try_push(runs, run)).inspect_err(|_| {
            runs.drain(begin..).for_each(|run| self.pages.give_back(run.range()));
        })
    }

    /// Returns whether each slot is in use; `false` for values that are not slots.
    pub fn is_allocated<'a>(&'a self, values: &'a IndexVec) -> impl Iterator<Item = bool> + 'a {
        values.iter().map(|slot| {
            u32::try_from(slot).is_ok_and(|slot| self.pages.is_in_use(Page::new(slot / self.page_size)))
        })
    }

    /// Merges the released pages into the free ones.
    pub fn merge(&mut self) {
        self.pages.merge();
    }

    /// Returns the current epoch, which [`SlotAllocator::clear`] ends.
    #[must_use]
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Frees every slot, closes groups and forgets fences. A new epoch begins.
    pub fn clear(&mut self) {
        self.epoch = self.epoch.next();
        self.free_times.record_all(None);
        self.pages.clear();
        self.owners.clear();
        self.fences.clear();
        self.group = None;
    }

    /// Describes a broken invariant, if there is one.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let fenced: usize = self.fences.iter().map(|(_, fenced)| fenced.pages.len()).sum();
        if fenced != self.pages.fenced() {
            return Some(format!("{} pages are fenced, the fences name {fenced}", self.pages.fenced()));
        }
        if let Some(page) = self.owners.pages().find(|&page| !self.pages.is_live(page)) {
            return Some(format!("page {page} has several owners and is not in use"));
        }
        self.pages.broken_invariant()
    }
}

/// Appends the slots of `run`, up to a length of `goal`.
fn push_slots<T: IndexNumber>(slots: &mut Vec<T>, run: Run<Page>, page_size: u32, goal: usize) {
    let start = run.start.number() * page_size;
    let len =
        u32::try_from(goal - slots.len()).map_or(run.len * page_size, |room| room.min(run.len * page_size));
    slots.extend((start..start + len).map(T::of));
}
