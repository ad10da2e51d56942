//! Free indices of one space, lowest first or first in, first out.

mod batch;
mod records;

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::Range;

use crate::base::{Id, Result, widen};

use super::BadFree;
use super::mask::Mask;
use records::{Records, Set};

pub(super) use batch::{Fenced, FreeBatch};

/// In which order indices are handed out again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Lowest first. Released indices wait in a second set until the first cannot serve a request; then
    /// both are merged.
    Sorted,
    /// First in, first out.
    Fifo,
}

/// `len` indices from `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run<I> {
    /// The lowest.
    pub start: I,
    /// How many; at least 1.
    pub len: u32,
}

impl<I: Id> Run<I> {
    pub(super) fn of(range: &Range<u32>) -> Self {
        Self { start: I::new(range.start), len: range.end - range.start }
    }

    fn end(self) -> u32 {
        self.start.number() + self.len
    }

    pub(super) fn range(self) -> Range<u32> {
        self.start.number()..self.end()
    }

    /// Its first `count` indices, at least one, and the others.
    pub(super) fn split(self, count: u32) -> (Self, Option<Self>) {
        let first = Self { len: self.len.min(count), ..self };
        (first, (first.len < self.len).then(|| Self::of(&(first.end()..self.end()))))
    }
}

/// Where indices go when they are given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Give {
    /// Back to those that may be handed out.
    Now,
    /// Aside, until their fence has passed.
    Fenced,
}

/// Who owns which index of `first..first + count`.
///
/// Each is free, released, fenced or live. In [`Order::Fifo`] none is released, and `queue` names exactly those that are
/// free.
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
#[derive(Clone, Debug)]
pub struct FreeList<I> {
    first: u32,
    count: u32,
    order: Order,
    records: Records,
    queue: VecDeque<Run<I>>,
    /// What the last batch has marked.
    marked: Vec<Mask>,
    /// The most indices that were in use at once since the start or the last clear.
    high_water: usize,
    /// Below it every index was handed out since then, for no order leaves one of a new list out.
    reached: u32,
    space: PhantomData<I>,
}

impl<I: Id> FreeList<I> {
    /// All of `first..first + count` free. The sum must fit a `u32`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has no room for it.
    pub fn new(first: u32, count: u32, order: Order) -> Result<Self> {
        let mut list = Self {
            first,
            count,
            order,
            records: Records::new(first..first + count)?,
            queue: VecDeque::new(),
            marked: Vec::new(),
            high_water: 0,
            reached: first,
            space: PhantomData,
        };
        list.clear();
        Ok(list)
    }

    /// Makes everything free again, in the order of a new list.
    pub fn clear(&mut self) {
        self.records.clear();
        self.queue.clear();
        if self.order == Order::Fifo && self.count > 0 {
            self.queue.push_back(Run { start: I::new(self.first), len: self.count });
        }
        self.high_water = 0;
        self.reached = self.first;
    }

    /// How many indices there are, as a number of their own kind.
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// How many indices there are.
    #[must_use]
    pub fn capacity(&self) -> usize {
        widen(self.count)
    }

    /// How many could be handed out now.
    #[must_use]
    pub const fn available(&self) -> usize {
        self.records.count(Set::Free) + self.records.count(Set::Released)
    }

    /// How many are live or fenced.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.capacity() - self.available()
    }

    /// The most that were in use at once.
    #[must_use]
    pub const fn high_water(&self) -> usize {
        self.high_water
    }

    /// How many of the available ones wait for a merge.
    #[must_use]
    pub const fn released(&self) -> usize {
        self.records.count(Set::Released)
    }

    /// How many were given back and wait for a fence.
    #[must_use]
    pub const fn fenced(&self) -> usize {
        self.records.count(Set::Fenced)
    }

    /// Bytes of the bookkeeping.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.records.bytes() + self.queue.capacity() * size_of::<Run<I>>()
    }

    /// Whether `index` belongs to this space.
    #[must_use]
    pub fn contains(&self, index: I) -> bool {
        (self.first..self.first + self.count).contains(&index.number())
    }

    /// Whether somebody owns `index`: it is live, or its fence has not passed.
    #[must_use]
    pub fn is_in_use(&self, index: I) -> bool {
        self.records.is_live(index.number()) || self.records.is(index.number(), Set::Fenced)
    }

    /// Whether `index` may be freed: in use and not fenced.
    #[must_use]
    pub fn is_live(&self, index: I) -> bool {
        self.records.is_live(index.number())
    }

    /// Merges the released indices into the free ones. In [`Order::Fifo`] there are none.
    pub fn merge(&mut self) {
        self.records.merge();
    }

    /// Takes `count` indices and names them in order, or returns `false` and takes none.
    ///
    /// In [`Order::Sorted`], a request that the free set cannot serve alone merges first, also when the
    /// merged set is still too small.
    pub fn alloc(&mut self, count: usize, mut emit: impl FnMut(Run<I>)) -> bool {
        if count > self.records.count(Set::Free) {
            self.merge();
        }
        let is_enough = |count: &u32| widen(*count) <= self.records.count(Set::Free);
        let Some(mut left) = u32::try_from(count).ok().filter(is_enough) else { return false };
        let mut from = self.first;
        while left > 0 {
            let next = match self.order {
                Order::Sorted => self.records.next_free_run(from, left).map(|range| Run::of(&range)),
                Order::Fifo => self.unqueue_first(left),
            };
            let Some(run) = next else { break };
            self.records.take_run(run.range());
            self.reached = self.reached.max(run.end());
            (from, left) = (run.end(), left - run.len);
            emit(run);
        }
        self.high_water = self.high_water.max(self.in_use());
        true
    }

    /// As [`FreeList::alloc`], and lists them as index tensors do. As many are taken as `out` has room for.
    pub(super) fn alloc_into(&mut self, out: &mut [i32]) -> bool {
        if self.order == Order::Fifo {
            let mut rest = out.iter_mut();
            return self.alloc(rest.len(), |run| {
                for (index, out) in run.range().zip(&mut rest) {
                    *out = index.cast_signed();
                }
            });
        }
        if out.len() > self.available() {
            self.merge();
            return false;
        }
        self.records.take_lowest(out, out.len() > self.records.count(Set::Free));
        if let Some(highest) = out.last() {
            self.reached = self.reached.max(highest.cast_unsigned() + 1);
        }
        self.high_water = self.high_water.max(self.in_use());
        true
    }

    /// Cuts the first run off the queue, or its first `most` indices.
    fn unqueue_first(&mut self, most: u32) -> Option<Run<I>> {
        let front = self.queue.front_mut()?;
        if front.len <= most {
            return self.queue.pop_front();
        }
        let first = Run { len: most, ..*front };
        *front = Run::of(&(first.end()..front.end()));
        Some(first)
    }

    /// Names the first indices that would be handed out without a merge, in order, until there are `count`.
    pub fn upcoming(&self, count: usize, mut emit: impl FnMut(Run<I>)) {
        // There are no more than so many.
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

    /// Takes the lowest run of `count` consecutive indices, or returns `None` and takes none.
    ///
    /// The free set is searched first and, when it has no such run, the merged one. Costs one pass over the
    /// free runs; in [`Order::Fifo`] also one over the queue.
    pub fn alloc_run(&mut self, count: usize) -> Option<Run<I>> {
        let count = u32::try_from(count).ok()?;
        let found = self.first_fit(count).or_else(|| {
            self.merge();
            self.first_fit(count)
        })?;
        let taken = Run::of(&found);
        self.records.take_run(found);
        if self.order == Order::Fifo {
            self.unqueue(taken);
        }
        self.high_water = self.high_water.max(self.in_use());
        self.reached = self.reached.max(taken.end());
        Some(taken)
    }

    /// The lowest run of `count` free indices.
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

    /// Cuts `taken` out of the queue.
    fn unqueue(&mut self, taken: Run<I>) {
        let (first, end) = (taken.start.number(), taken.end());
        let mut rest = VecDeque::with_capacity(self.queue.len() + 1);
        for run in self.queue.drain(..) {
            let (start, stop) = (run.start.number(), run.end());
            for (from, to) in [(start, stop.min(first)), (start.max(end), stop)] {
                if from < to {
                    rest.push_back(Run::of(&(from..to)));
                }
            }
        }
        self.queue = rest;
    }

    /// The state of indices that are given back.
    const fn given(&self, give: Give) -> Set {
        match (give, self.order) {
            (Give::Fenced, _) => Set::Fenced,
            (Give::Now, Order::Sorted) => Set::Released,
            (Give::Now, Order::Fifo) => Set::Free,
        }
    }

    /// What the last batch gave back.
    pub(super) fn last_given(&self) -> &[Mask] {
        &self.marked
    }

    /// All indices.
    pub(super) fn indices(&self) -> Range<u32> {
        self.first..self.first + self.count
    }

    /// Begins to give indices back, all or none of them.
    pub(super) fn give(&mut self, give: Give) -> FreeBatch<'_, I> {
        FreeBatch::new(self, give)
    }

    /// As [`FreeList::queue`], for what the batch in progress has marked.
    fn queue_marked(&mut self) {
        let marked = std::mem::take(&mut self.marked);
        self.queue(&marked);
        self.marked = marked;
    }

    /// Lets indices that are free or released be handed out.
    fn queue(&mut self, given: &[Mask]) {
        if self.order == Order::Sorted {
            return;
        }
        let mut last = self.queue.pop_back().map_or(0..0, Run::range);
        for range in given.iter().flat_map(|mask| mask.ranges()) {
            if range.start == last.end {
                last.end = range.end;
            } else {
                self.queue.extend((!last.is_empty()).then(|| Run::of(&last)));
                last = range;
            }
        }
        self.queue.extend((!last.is_empty()).then(|| Run::of(&last)));
    }

    /// Frees indices whose fence has passed.
    pub(super) fn unfence(&mut self, fenced: &Fenced<I>) {
        let to = self.given(Give::Now);
        for &mask in fenced.masks() {
            self.records.shift(mask, Set::Fenced, to);
        }
        self.queue(fenced.masks());
    }

    /// Why `index`, which is not live, cannot be freed.
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

    /// The free indices in the order in which they would be handed out without a merge.
    #[must_use]
    pub fn free_ids(&self) -> Vec<u32> {
        match self.order {
            Order::Sorted => self.records.indices(Set::Free).collect(),
            Order::Fifo => self.queue.iter().flat_map(|run| run.range()).collect(),
        }
    }

    /// The released indices, lowest first.
    #[must_use]
    pub fn released_ids(&self) -> Vec<u32> {
        self.records.indices(Set::Released).collect()
    }

    /// What breaks the invariant of this list, if anything does.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        if let Some(fault) = self.records.fault() {
            return Some(fault);
        }
        let queued: usize = self.queue.iter().map(|run| widen(run.len)).sum();
        let free = self.records.count(Set::Free);
        let is_queue_free =
            self.queue.iter().flat_map(|run| run.range()).all(|index| self.records.is(index, Set::Free));
        if self.order == Order::Fifo && !(is_queue_free && queued == free) {
            return Some(format!("the queue names {queued} indices, the free set {free}"));
        }
        None
    }
}
