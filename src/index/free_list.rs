//! Free indices of one space, lowest first or first in, first out.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::Range;

use crate::base::{Id, Result, widen};

use super::BadFree;
use super::bitmap::{Bitmap, runs_of, words_of};
use super::ledger::{Book, Span, State, spans};

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
    const fn of(start: I, len: u32) -> Self {
        Self { start, len }
    }

    fn end(self) -> u32 {
        self.start.number() + self.len
    }

    fn range(self) -> Range<u32> {
        self.start.number()..self.end()
    }

    fn bits(self) -> (usize, usize) {
        (widen(self.start.number()), widen(self.len))
    }
}

/// Where indices go when they are given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Give {
    /// Back to those that may be handed out.
    Now,
    /// Aside, until [`FreeList::unfence`].
    Fenced,
}

/// Runs that [`FreeList::give`] marked and that [`FreeList::commit`] or [`FreeList::rollback`] completes.
pub type Accepted<I> = Vec<Run<I>>;

/// Who owns which index of `first..first + count`.
///
/// Invariant: `free`, `released` and `fenced` are disjoint, and what is in none of them is live. In
/// [`Order::Fifo`] `released` is empty and `queue` names exactly the members of `free`.
///
/// ```
/// use kvpool::base::{Id, Row};
/// use kvpool::index::{FreeList, Order};
/// let mut rows: FreeList<Row> = FreeList::new(1, 4, Order::Fifo).unwrap();
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
    free: Bitmap,
    released: Bitmap,
    fenced: Bitmap,
    queue: VecDeque<Run<I>>,
    /// The most indices that were in use at once since the start or the last clear.
    high_water: usize,
    /// Below it every index was handed out since then, for no order leaves one of a new list out.
    reached: u32,
    book: Book,
    space: PhantomData<I>,
}

fn narrow(number: usize) -> u32 {
    // Bitmaps are bounded by `first + count`, which is a u32.
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl<I: Id> FreeList<I> {
    /// All of `first..first + count` free. The sum must fit a `u32`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has no room for it.
    pub fn new(first: u32, count: u32, order: Order) -> Result<Self> {
        let bound = widen(first) + widen(count);
        let mut list = Self {
            first,
            count,
            order,
            free: Bitmap::new(bound)?,
            released: Bitmap::new(bound)?,
            fenced: Bitmap::new(bound)?,
            queue: VecDeque::new(),
            high_water: 0,
            reached: first,
            book: Book::default(),
            space: PhantomData,
        };
        list.clear();
        Ok(list)
    }

    /// Who takes and gives what, where somebody debugs.
    #[must_use]
    pub const fn book(&self) -> &Book {
        &self.book
    }

    /// As [`FreeList::book`], to open it.
    pub const fn book_mut(&mut self) -> &mut Book {
        &mut self.book
    }

    /// All indices, by state and holders.
    #[must_use]
    pub fn spans(&self) -> Vec<Span> {
        self.spans_unless(|_| false)
    }

    /// As [`FreeList::spans`], where live indices are fenced of which `is_left` says so.
    pub(super) fn spans_unless(&self, is_left: impl Fn(I) -> bool) -> Vec<Span> {
        spans(self.first..self.first + self.count, self.book.ledger(), |index| {
            let index = I::new(index);
            if !self.is_in_use(index) {
                State::Free
            } else if self.is_live(index) && !is_left(index) {
                State::Live
            } else {
                State::Fenced
            }
        })
    }

    /// Makes everything free again, in the order of a new list.
    pub fn clear(&mut self) {
        let mut book = std::mem::take(&mut self.book);
        if let Some(ledger) = book.ledger_mut() {
            let all = self.first..self.first + self.count;
            for index in all.filter(|index| self.is_in_use(I::new(*index))) {
                ledger.became_free(index..index + 1);
            }
        }
        book.clear();
        self.book = book;
        self.released.clear();
        self.fenced.clear();
        self.free.insert_run(widen(self.first), widen(self.count));
        self.queue.clear();
        if self.order == Order::Fifo && self.count > 0 {
            self.queue.push_back(Run::of(I::new(self.first), self.count));
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
    pub fn available(&self) -> usize {
        self.free.len() + self.released.len()
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
        self.released.len()
    }

    /// How many were given back and wait for a fence.
    #[must_use]
    pub const fn fenced(&self) -> usize {
        self.fenced.len()
    }

    /// Bytes of the bookkeeping.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.free.bytes()
            + self.released.bytes()
            + self.fenced.bytes()
            + self.queue.capacity() * size_of::<Run<I>>()
    }

    /// Whether `index` belongs to this space.
    #[must_use]
    pub fn contains(&self, index: I) -> bool {
        (self.first..self.first + self.count).contains(&index.number())
    }

    /// Whether somebody owns `index`: it is live, or its fence has not passed.
    #[must_use]
    pub fn is_in_use(&self, index: I) -> bool {
        let bit = widen(index.number());
        self.contains(index) && !self.free.contains(bit) && !self.released.contains(bit)
    }

    /// Whether `index` may be freed: in use and not fenced.
    #[must_use]
    pub fn is_live(&self, index: I) -> bool {
        self.is_in_use(index) && !self.fenced.contains(widen(index.number()))
    }

    /// Merges the released indices into the free ones. In [`Order::Fifo`] there are none.
    pub fn merge(&mut self) {
        self.released.drain_into(&mut self.free);
    }

    /// Takes `count` indices and names them in order, or returns `false` and takes none.
    ///
    /// In [`Order::Sorted`], a request that the free set cannot serve alone merges first, also when the
    /// merged set is still too small.
    pub fn alloc(&mut self, count: usize, mut emit: impl FnMut(Run<I>)) -> bool {
        if count > self.free.len() {
            self.merge();
        }
        if count > self.free.len() {
            return false;
        }
        let (mut book, mut reached) = (std::mem::take(&mut self.book), self.reached);
        let mut emit = |run: Run<I>| {
            book.took(run.range());
            reached = reached.max(run.end());
            emit(run);
        };
        match self.order {
            Order::Sorted => self.free.take_lowest(count, |start, len| {
                emit(Run::of(I::new(narrow(start)), narrow(len)));
            }),
            Order::Fifo => self.take_front(count, emit),
        }
        (self.book, self.reached) = (book, reached);
        self.high_water = self.high_water.max(self.in_use());
        true
    }

    /// Names the first indices that would be handed out without a merge, in order, until there are `count`.
    pub fn upcoming(&self, count: usize, mut emit: impl FnMut(Run<I>)) {
        let mut left = count;
        let mut each = |(start, len): (usize, usize)| {
            let len = len.min(left);
            left -= len;
            if len > 0 {
                emit(Run::of(I::new(narrow(start)), narrow(len)));
            }
            left > 0
        };
        match self.order {
            Order::Sorted => self.free.runs().all(&mut each),
            Order::Fifo => self.queue.iter().map(|run| run.bits()).all(each),
        };
    }

    fn take_front(&mut self, count: usize, mut emit: impl FnMut(Run<I>)) {
        let mut left = narrow(count);
        while left > 0
            && let Some(front) = self.queue.front_mut()
        {
            let taken = Run::of(front.start, front.len.min(left));
            if taken.len == front.len {
                self.queue.pop_front();
            } else {
                *front = Run::of(I::new(taken.end()), front.len - taken.len);
            }
            let (start, len) = taken.bits();
            self.free.remove_run(start, len);
            left -= taken.len;
            emit(taken);
        }
    }

    /// Takes the lowest run of `count` consecutive indices, or returns `None` and takes none.
    ///
    /// The free set is searched first and, when it has no such run, the merged one. Costs one pass over the
    /// free runs; in [`Order::Fifo`] also one over the queue.
    pub fn alloc_run(&mut self, count: usize) -> Option<Run<I>> {
        let fits = |set: &Bitmap| set.runs().find(|&(_, len)| len >= count).map(|(start, _)| start);
        let start = fits(&self.free).or_else(|| {
            self.merge();
            fits(&self.free)
        })?;
        let taken = Run::of(I::new(narrow(start)), narrow(count));
        self.free.remove_run(start, count);
        if self.order == Order::Fifo {
            self.unqueue(taken);
        }
        self.high_water = self.high_water.max(self.in_use());
        self.reached = self.reached.max(taken.end());
        self.book.took(taken.range());
        Some(taken)
    }

    /// Cuts `taken` out of the queue.
    fn unqueue(&mut self, taken: Run<I>) {
        let (first, end) = (taken.start.number(), taken.end());
        let mut rest = VecDeque::with_capacity(self.queue.len() + 1);
        for run in self.queue.drain(..) {
            let (start, stop) = (run.start.number(), run.end());
            for (from, to) in [(start, stop.min(first)), (start.max(end), stop)] {
                if from < to {
                    rest.push_back(Run::of(I::new(from), to - from));
                }
            }
        }
        self.queue = rest;
    }

    /// The set that indices join when they are given back.
    const fn given(&mut self, give: Give) -> &mut Bitmap {
        match (give, self.order) {
            (Give::Fenced, _) => &mut self.fenced,
            (Give::Now, Order::Sorted) => &mut self.released,
            (Give::Now, Order::Fifo) => &mut self.free,
        }
    }

    /// Marks the live indices of `run` as given back and adds them to `accepted`; names the others to
    /// `blocked`. `run` must lie within the space. [`FreeList::commit`] or [`FreeList::rollback`] follows.
    pub fn give(&mut self, run: Run<I>, give: Give, accepted: &mut Accepted<I>, mut blocked: impl FnMut(I)) {
        let fresh = accepted.len();
        let (start, len) = run.bits();
        for (word, bits) in words_of(start, len) {
            let fenced = if self.fenced.is_empty() { 0 } else { self.fenced.word(word) };
            let owned = !(self.free.word(word) | self.released.word(word) | fenced) & bits;
            self.given(give).insert_word(word, owned);
            if len == 1 && owned != 0 {
                // Most frees of a busy pool are of slots far from each other.
                accepted.push(run);
                return;
            }
            for (bit, len) in runs_of(owned) {
                let (start, len) = (narrow(word * 64 + bit), narrow(len));
                match accepted[fresh..].last_mut() {
                    Some(last) if last.end() == start => last.len += len,
                    _ => accepted.push(Run::of(I::new(start), len)),
                }
            }
            for (bit, len) in runs_of(bits & !owned) {
                (word * 64 + bit..word * 64 + bit + len).for_each(|index| blocked(I::new(narrow(index))));
            }
        }
    }

    /// Completes the gives that `accepted` names: [`Order::Fifo`] queues them in that order.
    pub fn commit(&mut self, accepted: &[Run<I>], give: Give) {
        if let Some(ledger) = self.book.ledger_mut() {
            for run in accepted {
                ledger.gave(run.range());
            }
        }
        if give == Give::Now {
            self.queue(accepted);
        }
    }

    /// Lets runs that are in the free or the released set be handed out.
    fn queue(&mut self, accepted: &[Run<I>]) {
        if let Some(ledger) = self.book.ledger_mut() {
            for run in accepted {
                ledger.became_free(run.range());
            }
        }
        if self.order == Order::Sorted {
            return;
        }
        for &run in accepted {
            match self.queue.back_mut() {
                Some(back) if back.end() == run.start.number() => back.len += run.len,
                _ => self.queue.push_back(run),
            }
        }
    }

    /// Undoes the gives that `accepted` names: they are live again.
    pub fn rollback(&mut self, accepted: &[Run<I>], give: Give) {
        let given = self.given(give);
        for run in accepted {
            let (start, len) = run.bits();
            given.remove_run(start, len);
        }
    }

    /// Frees runs whose fence has passed. They were given with [`Give::Fenced`] before.
    pub fn unfence(&mut self, runs: &[Run<I>]) {
        for run in runs {
            let (start, len) = run.bits();
            self.fenced.remove_run(start, len);
            self.given(Give::Now).insert_run(start, len);
        }
        self.queue(runs);
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
        let numbers = |(start, len): (usize, usize)| narrow(start)..narrow(start + len);
        match self.order {
            Order::Sorted => self.free.runs().flat_map(numbers).collect(),
            Order::Fifo => self.queue.iter().flat_map(|run| numbers(run.bits())).collect(),
        }
    }

    /// The released indices, lowest first.
    #[must_use]
    pub fn released_ids(&self) -> Vec<u32> {
        self.released.runs().flat_map(|(start, len)| narrow(start)..narrow(start + len)).collect()
    }

    /// What breaks the invariant of this list, if anything does.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        let sets = [("free", &self.free), ("released", &self.released), ("fenced", &self.fenced)];
        if let Some((name, _)) = sets.iter().find(|(_, set)| !set.is_consistent()) {
            return Some(format!("the {name} set disagrees with its own summary"));
        }
        let Ok(mut union) = Bitmap::new(widen(self.first) + widen(self.count)) else {
            return Some("there is no memory to check it".to_owned());
        };
        for (start, len) in sets.iter().flat_map(|(_, set)| set.runs()) {
            union.insert_run(start, len);
        }
        let total: usize = sets.iter().map(|(_, set)| set.len()).sum();
        if union.len() != total {
            return Some(format!("{} indices are in two sets at once", total - union.len()));
        }
        if union.next_run(0, 1).is_some_and(|(start, _)| start < widen(self.first)) {
            return Some("the padding index is free".to_owned());
        }
        let queued: usize = self.queue.iter().map(|run| widen(run.len)).sum();
        if self.order == Order::Fifo
            && (queued != self.free.len()
                || self.queue.iter().any(|run| {
                    let (start, len) = run.bits();
                    (start..start + len).any(|bit| !self.free.contains(bit))
                }))
        {
            return Some(format!("the queue names {queued} indices, the free set {}", self.free.len()));
        }
        None
    }
}
