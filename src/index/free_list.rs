//! The free list of one index space: lowest first, or first in, first out.
//!
//! Taking and freeing cost a pass over the indices of the call, independent of the size of the space. A merge
//! costs a pass over the released indices.

mod batch;
mod records;

use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use crate::base::{Error, Id, IndexNumber, Result, try_collect_each, try_with_capacity, widen};

use super::BadFree;
use super::mask::Mask;
use records::{Records, Set};

pub(super) use batch::{FencedIndices, FreeBatch};

/// The order in which freed indices are handed out again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Lowest first. Freed indices are released: they stay in a second set until the first cannot serve a
    /// request; then both are merged.
    Sorted,
    /// First in, first out.
    Fifo,
}

/// `len` consecutive indices from `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run<I> {
    /// The lowest index.
    pub start: I,
    /// The number of indices; at least 1.
    pub len: u32,
}

impl<I: Id> Run<I> {
    pub(super) fn of(range: &Range<u32>) -> Self {
        Self { start: I::new(range.start), len: range.end - range.start }
    }

    fn end(self) -> u32 {
        self.start.number() + self.len
    }

    /// Returns the numbers of the indices.
    #[must_use]
    pub fn range(self) -> Range<u32> {
        self.start.number()..self.end()
    }

    /// Splits off the first `count` indices, at least one. Also returns the others.
    #[must_use]
    pub fn split(self, count: u32) -> (Self, Option<Self>) {
        let first = Self { len: self.len.min(count), ..self };
        (first, (first.len < self.len).then(|| Self::of(&(first.end()..self.end()))))
    }
}

/// The choice among the runs of consecutive free indices that are long enough for a request.
///
/// ```
/// use kvpool::index::{Fit, Order, SlotAllocator};
/// let mut slots = SlotAllocator::new(64, 1, Order::Sorted).unwrap();
/// assert_eq!(Fit::parse("best_fit").unwrap(), Fit::Best);
/// assert_eq!(slots.alloc_contiguous::<i32>(3, Fit::Best).unwrap().unwrap(), [1, 2, 3]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// The run with the lowest indices.
    First,
    /// The shortest run; of several, the lowest one. Long runs stay whole for requests that need them.
    Best,
}

impl Fit {
    /// Parses `first_fit` or `best_fit`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for anything else.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "first_fit" => Ok(Self::First),
            "best_fit" => Ok(Self::Best),
            _ => Err(Error::argument(format!("unknown fit '{name}'; use 'first_fit' or 'best_fit'"))),
        }
    }
}

/// When freed indices become available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FreeTiming {
    /// Indices become available at once.
    Now,
    /// Indices become available when their fence has passed.
    AfterFence,
}

/// Ownership of the indices `first..first + count`.
///
/// Each index is free, released, fenced or live. In [`Order::Fifo`] `queue` lists exactly the free ones, and
/// indices are released only when there was no memory to queue them.
///
/// ```
/// use kvpool::base::{Id, RequestRow};
/// use kvpool::index::{FreeList, Order};
/// let mut rows: FreeList<RequestRow> = FreeList::new(1, 4, Order::Fifo).unwrap();
/// let mut taken = Vec::new();
/// assert!(rows.alloc(2, |run| taken.push((run.start.number(), run.len))));
/// assert_eq!(taken, [(1, 2)]);
/// assert!(!rows.alloc(3, |_| unreachable!()));
/// ```
#[derive(Clone)]
pub struct FreeList<I> {
    first: u32,
    count: u32,
    order: Order,
    records: Records,
    queue: VecDeque<Run<I>>,
    /// Indices that the last batch freed.
    marked: Vec<Mask>,
    /// The largest number of indices in use at once since construction or the last clear.
    high_water: usize,
    /// Every index below this one has been handed out since the last clear: a new list hands out indices in
    /// ascending order.
    reached: u32,
    space: PhantomData<I>,
}

impl<I> fmt::Debug for FreeList<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FreeList")
            .field("first", &self.first)
            .field("count", &self.count)
            .field("order", &self.order)
            .finish_non_exhaustive()
    }
}

impl<I: Id> FreeList<I> {
    /// Creates a list of `first..first + count`, all free.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when the end of the range does not fit a `u32`,
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the
    /// list.
    pub fn new(first: u32, count: u32, order: Order) -> Result<Self> {
        let end = first.checked_add(count).ok_or_else(|| {
            Error::config(format!("{count} indices from {first} on end beyond {}", u32::MAX))
        })?;
        let mut list = Self {
            first,
            count,
            order,
            records: Records::new(first..end)?,
            queue: VecDeque::new(),
            marked: Vec::new(),
            high_water: 0,
            reached: first,
            space: PhantomData,
        };
        list.clear();
        Ok(list)
    }

    /// Returns the order in which freed indices are handed out again.
    pub(super) const fn order(&self) -> Order {
        self.order
    }

    /// Frees every index and restores the order of a new list.
    pub fn clear(&mut self) {
        self.records.clear();
        self.queue.clear();
        if self.order == Order::Fifo && self.count > 0 {
            self.queue.push_back(Run { start: I::new(self.first), len: self.count });
        }
        self.high_water = 0;
        self.reached = self.first;
    }

    /// Returns the number of indices, as `u32`.
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Returns the number of indices.
    #[must_use]
    pub fn capacity(&self) -> usize {
        widen(self.count)
    }

    /// Returns the number of indices that could be handed out now.
    #[must_use]
    pub const fn available(&self) -> usize {
        self.records.count(Set::Free) + self.records.count(Set::Released)
    }

    /// Returns the number of live and fenced indices.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.capacity() - self.available()
    }

    /// Returns the largest number of indices in use at once.
    #[must_use]
    pub const fn high_water(&self) -> usize {
        self.high_water
    }

    /// Returns the number of available indices that wait for a merge.
    #[must_use]
    pub const fn released(&self) -> usize {
        self.records.count(Set::Released)
    }

    /// Returns the number of freed indices that wait for a fence.
    #[must_use]
    pub const fn fenced(&self) -> usize {
        self.records.count(Set::Fenced)
    }

    /// Returns the size of the bookkeeping in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.records.bytes() + self.queue.capacity() * size_of::<Run<I>>()
    }

    /// Returns whether `index` belongs to this space.
    #[must_use]
    pub fn contains(&self, index: I) -> bool {
        (self.first..self.first + self.count).contains(&index.number())
    }

    /// Returns whether `index` is live or fenced.
    #[must_use]
    pub fn is_in_use(&self, index: I) -> bool {
        self.records.is_live(index.number()) || self.records.is_in_set(index.number(), Set::Fenced)
    }

    /// Returns whether `index` may be freed: it is in use and not fenced.
    #[must_use]
    #[inline]
    pub fn is_live(&self, index: I) -> bool {
        self.records.is_live(index.number())
    }

    /// Returns whether all of `mask`, which lies in this space, may be freed.
    pub(super) fn are_live(&self, mask: Mask) -> bool {
        self.records.are_live(mask)
    }

    /// Merges the released indices into the free ones. In [`Order::Fifo`] they are queued, lowest first, as
    /// far as there is memory for it.
    pub fn merge(&mut self) {
        if self.order == Order::Sorted {
            return self.records.merge();
        }
        while let Some(mask) = self.records.first_released()
            && self.queue.try_reserve(widen(u64::BITS)).is_ok()
        {
            self.records.shift(mask, Set::Released, Set::Free);
            self.queue(&[mask]);
        }
    }

    /// Takes `count` indices and passes them to `emit` in order, or returns `false` and takes none.
    ///
    /// A request that the free set cannot serve alone merges first, even when the merged set is still too
    /// small. In [`Order::Fifo`], indices that cannot be queued are taken last, lowest first.
    pub fn alloc(&mut self, count: usize, mut emit: impl FnMut(Run<I>)) -> bool {
        let taken = self.try_alloc(count, |run| {
            emit(run);
            Ok(())
        });
        taken.unwrap_or(false)
    }

    /// Works like [`FreeList::alloc`], with an `emit` that may fail.
    ///
    /// # Errors
    /// The error of `emit`, whose run is free again then. Those before it are not.
    pub(super) fn try_alloc(
        &mut self,
        count: usize,
        mut emit: impl FnMut(Run<I>) -> Result<()>,
    ) -> Result<bool> {
        if count > self.records.count(Set::Free) {
            self.merge();
        }
        let is_enough = |count: &u32| widen(*count) <= self.available();
        let Some(mut left) = u32::try_from(count).ok().filter(is_enough) else { return Ok(false) };
        let mut from = self.first;
        while left > 0 {
            let next = match self.order {
                Order::Sorted => self.records.next_free_run(from, left).map(|range| Run::of(&range)),
                Order::Fifo => self.unqueue_first(left).or_else(|| self.unrelease_first(left)),
            };
            let Some(run) = next else { break };
            self.records.take_run(run.range());
            self.reached = self.reached.max(run.end());
            (from, left) = (run.end(), left - run.len);
            emit(run).inspect_err(|_| self.give_back(run.range()))?;
        }
        self.high_water = self.high_water.max(self.in_use());
        Ok(true)
    }

    /// Works like [`FreeList::alloc`], for one index.
    pub(super) fn alloc_one(&mut self) -> Option<I> {
        if self.records.count(Set::Free) == 0 {
            self.merge();
        }
        let index = match self.order {
            Order::Sorted => self.records.take_first()?,
            Order::Fifo => {
                let run = self.unqueue_first(1).or_else(|| self.unrelease_first(1))?;
                self.records.take_run(run.range());
                run.start.number()
            }
        };
        self.record_taken(index + 1);
        Some(I::new(index))
    }

    /// Works like [`FreeList::alloc`], but fills `out` with indices, which must be available.
    pub(super) fn alloc_into<T: IndexNumber>(&mut self, out: &mut [T]) {
        debug_assert!(out.len() <= self.available(), "the caller has looked");
        if self.order == Order::Fifo {
            let mut rest = out.iter_mut();
            self.alloc(rest.len(), |run| {
                for (index, place) in run.range().zip(&mut rest) {
                    *place = T::of(index);
                }
            });
            return;
        }
        self.records.take_lowest(out, out.len() > self.records.count(Set::Free));
        self.record_taken(out.last().map_or(0, |highest| highest.number() + 1));
    }

    /// Records that indices below `end` were taken.
    fn record_taken(&mut self, end: u32) {
        self.reached = self.reached.max(end);
        self.high_water = self.high_water.max(self.in_use());
    }

    /// Removes the first run of the queue, or its first `limit` indices.
    fn unqueue_first(&mut self, limit: u32) -> Option<Run<I>> {
        let front = self.queue.front_mut()?;
        if front.len <= limit {
            return self.queue.pop_front();
        }
        let first = Run { len: limit, ..*front };
        *front = Run::of(&(first.end()..front.end()));
        Some(first)
    }

    /// Makes the first released run free, or its first `limit` indices.
    #[cold]
    fn unrelease_first(&mut self, limit: u32) -> Option<Run<I>> {
        let range = self.records.first_released()?.ranges().next()?;
        let (first, _) = Run::of(&range).split(limit);
        Mask::of_range(first.range()).for_each(|mask| self.records.shift(mask, Set::Released, Set::Free));
        Some(first)
    }

    /// Passes the first `count` indices that would be handed out without a merge to `emit`, in order.
    pub fn upcoming(&self, count: usize, mut emit: impl FnMut(Run<I>)) {
        // The list has no more than `self.count` indices.
        let mut left = u32::try_from(count).map_or(self.count, |count| count.min(self.count));
        let mut from = self.first;
        let mut queue = self.queue.iter();
        while left > 0 {
            let next = match self.order {
                Order::Sorted => self.records.next_free_run(from, left).map(|range| Run::of(&range)),
                Order::Fifo => queue.next().map(|run| Run { len: run.len.min(left), ..*run }),
            };
            let Some(run) = next else { return };
            (from, left) = (run.end(), left - run.len);
            emit(run);
        }
    }

    /// Takes a run of `count` consecutive indices, or returns `None` and takes none.
    ///
    /// [`Fit::First`] searches the free set first; if it has no such run, it is merged and searched again.
    /// [`Fit::Best`] merges at once: a released index may make a run that fits better. Costs one pass over
    /// the free runs, and in [`Order::Fifo`] one over the queue.
    pub fn alloc_run(&mut self, count: usize, fit: Fit) -> Option<Run<I>> {
        let count = u32::try_from(count).ok()?;
        let found = match fit {
            Fit::First => self.first_fit(count).or_else(|| {
                self.merge();
                self.first_fit(count)
            }),
            Fit::Best => {
                self.merge();
                self.best_fit(count)
            }
        }?;
        let taken = Run::of(&found);
        self.records.take_run(found);
        if self.order == Order::Fifo {
            self.unqueue(taken);
        }
        self.record_taken(taken.end());
        Some(taken)
    }

    /// Finds the lowest run of `count` free indices.
    fn first_fit(&self, count: u32) -> Option<Range<u32>> {
        let mut from = self.first;
        loop {
            let run = self.records.next_free_run(from, count)?;
            if run.end - run.start == count {
                return Some(run);
            }
            from = run.end;
        }
    }

    /// Finds the shortest run of at least `count` free indices, of several the lowest one, and returns its
    /// first `count` indices.
    fn best_fit(&self, count: u32) -> Option<Range<u32>> {
        let (mut start, mut least) = (None, u32::MAX);
        let mut from = self.first;
        while least > count
            && let Some(run) = self.records.next_free_run(from, u32::MAX)
        {
            from = run.end;
            let len = run.end - run.start;
            if (count..least).contains(&len) {
                (start, least) = (Some(run.start), len);
            }
        }
        start.map(|start| start..start + count)
    }

    /// Removes `taken` from the queue.
    fn unqueue(&mut self, taken: Run<I>) {
        let (first, end) = (taken.start.number(), taken.end());
        // Each run moves from the front of the queue to its back, without the taken indices. This keeps the
        // order.
        for _ in 0..self.queue.len() {
            let run = self.queue.pop_front().expect("as many as there were");
            let (start, stop) = (run.start.number(), run.end());
            self.push_run(start..stop.min(first));
            self.push_run(start.max(end)..stop);
        }
    }

    /// Returns the set to which freed indices are added.
    const fn set_of(&self, timing: FreeTiming) -> Set {
        match (timing, self.order) {
            (FreeTiming::AfterFence, _) => Set::Fenced,
            (FreeTiming::Now, Order::Sorted) => Set::Released,
            (FreeTiming::Now, Order::Fifo) => Set::Free,
        }
    }

    /// Returns the indices that the last batch freed.
    pub(super) fn last_freed(&self) -> &[Mask] {
        &self.marked
    }

    /// Returns the range of all indices.
    pub(super) fn indices(&self) -> Range<u32> {
        self.first..self.first + self.count
    }

    /// Starts a batch that frees indices, all or none of them.
    pub(super) fn begin_free(&mut self, timing: FreeTiming) -> FreeBatch<'_, I> {
        FreeBatch::new(self, timing)
    }

    /// Works like [`FreeList::queue`], for the indices of the batch in progress.
    fn queue_marked(&mut self) {
        let marked = std::mem::take(&mut self.marked);
        self.queue(&marked);
        self.marked = marked;
    }

    /// Makes free or released indices available in the order of the list.
    #[inline]
    fn queue(&mut self, masks: &[Mask]) {
        if self.order == Order::Fifo {
            self.queue_runs(masks);
        }
    }

    fn queue_runs(&mut self, masks: &[Mask]) {
        let mut last = self.queue.pop_back().map_or(0..0, Run::range);
        for range in masks.iter().flat_map(|mask| mask.ranges()) {
            if range.start == last.end {
                last.end = range.end;
            } else {
                self.push_run(last);
                last = range;
            }
        }
        self.push_run(last);
    }

    /// Appends free indices to the queue; without memory for it, they become released.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a free of scattered indices calls it for each")]
    fn push_run(&mut self, run: Range<u32>) {
        if run.is_empty() {
            return;
        }
        if self.queue.len() == self.queue.capacity() && self.queue.try_reserve(1).is_err() {
            return self.release_unqueued(run);
        }
        self.queue.push_back(Run::of(&run));
    }

    #[cold]
    fn release_unqueued(&mut self, run: Range<u32>) {
        Mask::of_range(run).for_each(|mask| self.records.shift(mask, Set::Free, Set::Released));
    }

    /// Frees live indices without a batch. Needs no memory, and does not change [`FreeList::last_freed`].
    pub(super) fn give_back(&mut self, run: Range<u32>) {
        let to = self.set_of(FreeTiming::Now);
        for mask in Mask::of_range(run) {
            let freed = self.records.give_back(mask, to);
            debug_assert_eq!(freed, mask, "they are live");
            self.queue(&[freed]);
        }
    }

    /// Frees indices whose fence has passed.
    pub(super) fn unfence(&mut self, fenced: &FencedIndices<I>) {
        let to = self.set_of(FreeTiming::Now);
        for &mask in fenced.masks() {
            self.records.shift(mask, Set::Fenced, to);
        }
        self.queue(fenced.masks());
    }

    /// Returns why `index`, which is not live, cannot be freed.
    #[must_use]
    pub fn reason(&self, index: I) -> BadFree {
        if !self.contains(index) {
            BadFree::OutOfRange
        } else if index.number() < self.reached {
            BadFree::AlreadyFree
        } else {
            BadFree::NotAllocated
        }
    }

    /// Returns the free indices, in the order in which they would be handed out without a merge.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the
    /// list.
    pub fn free_indices(&self) -> Result<Vec<I>> {
        let mut free = try_with_capacity(self.records.count(Set::Free))?;
        match self.order {
            Order::Sorted => free.extend(self.records.indices(Set::Free).map(I::new)),
            Order::Fifo => self.queue.iter().for_each(|run| free.extend(run.range().map(I::new))),
        }
        Ok(free)
    }

    /// Returns the indices in use, lowest first.
    ///
    /// # Errors
    /// Same as [`FreeList::free_indices`].
    pub fn indices_in_use(&self) -> Result<Vec<I>> {
        try_collect_each(self.indices().map(I::new).filter(|&index| self.is_in_use(index)))
    }

    /// Returns the released indices, lowest first.
    ///
    /// # Errors
    /// Same as [`FreeList::free_indices`].
    pub fn released_indices(&self) -> Result<Vec<I>> {
        let mut released = try_with_capacity(self.records.count(Set::Released))?;
        released.extend(self.records.indices(Set::Released).map(I::new));
        Ok(released)
    }

    /// Describes a broken invariant, if there is one.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        if let Some(fault) = self.records.broken_invariant() {
            return Some(fault);
        }
        let queued: usize = self.queue.iter().map(|run| widen(run.len)).sum();
        let free = self.records.count(Set::Free);
        let is_queue_free = self
            .queue
            .iter()
            .flat_map(|run| run.range())
            .all(|index| self.records.is_in_set(index, Set::Free));
        if self.order == Order::Fifo && !(is_queue_free && queued == free) {
            return Some(format!("the queue names {queued} indices, the free set {free}"));
        }
        None
    }
}
