//! Single indices with a reference count. The last one that was freed is taken first.
//!
//! Taking, retaining and releasing cost a few steps, independent of the capacity.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use crate::base::{Id, Result, try_with_capacity, widen};

use super::BadFree;

/// A handle of one take of an index. A later take of the same index has another handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IndexHandle<I> {
    index: I,
    generation: u64,
}

impl<I: Id> IndexHandle<I> {
    pub(super) const fn new(index: I, generation: u64) -> Self {
        Self { index, generation }
    }

    /// Returns the index.
    #[must_use]
    pub const fn index(self) -> I {
        self.index
    }

    pub(super) const fn generation(self) -> u64 {
        self.generation
    }

    /// Returns the index as a range of length one, for a ledger.
    pub(super) fn range(self) -> Range<u32> {
        self.index.number()..self.index.number() + 1
    }
}

/// An index without references, which stays in use until [`RefCounts::give_back`].
///
/// ```
/// use kvpool::base::{ChunkId, Id, PoolPage};
/// use kvpool::index::{IndexHandle, RefCounts, Returning};
/// let mut pages: RefCounts<PoolPage> = RefCounts::default();
/// pages.extend(2).unwrap();
/// pages.offer(0..2);
/// let page: IndexHandle<PoolPage> = pages.take().expect("two are free");
/// let returning: Returning<PoolPage> = pages.release(page).unwrap().expect("nobody else has it");
/// assert_eq!(pages.available(), 1, "it is in use until it is given back");
/// pages.give_back(returning);
/// assert_eq!((pages.available(), pages.references(page)), (2, 0));
/// ```
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Returning<I>(I);

impl<I: Id> Returning<I> {
    /// Returns the index.
    pub const fn index(&self) -> I {
        self.0
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    references: u32,
    /// The number of times that the index was freed.
    generation: u64,
}

/// Ownership of the indices `0..capacity`, each with a reference count.
///
/// An index is withheld (not offered yet), free, taken, or returning (its last reference was released, and
/// the [`Returning`] was not given back yet). Taken and returning indices are in use.
///
/// ```
/// use kvpool::base::ChunkId;
/// use kvpool::index::RefCounts;
/// let mut chunks: RefCounts<ChunkId> = RefCounts::default();
/// chunks.extend(2).unwrap();
/// chunks.offer(0..2);
/// let first = chunks.take().unwrap();
/// let returning = chunks.release(first).unwrap().expect("the last reference");
/// chunks.give_back(returning);
/// assert!(chunks.release(first).is_err());
/// assert_eq!((chunks.available(), chunks.in_use()), (2, 0));
/// ```
#[derive(Clone)]
pub struct RefCounts<I> {
    entries: Vec<Entry>,
    /// The freed indices, the last one at the end. The vector has capacity for every index.
    stack: Vec<I>,
    /// The indices that were offered and never taken, lowest first.
    fresh: VecDeque<Range<u32>>,
    /// The number of `entries` that are neither in `stack` nor in `fresh`, nor withheld.
    in_use: usize,
    high_water: usize,
    dropped_frees: usize,
    /// The length of `entries`.
    count: u32,
}

impl<I> fmt::Debug for RefCounts<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RefCounts")
            .field("count", &self.count)
            .field("in_use", &self.in_use)
            .finish_non_exhaustive()
    }
}

impl<I> Default for RefCounts<I> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            stack: Vec::new(),
            fresh: VecDeque::new(),
            in_use: 0,
            high_water: 0,
            dropped_frees: 0,
            count: 0,
        }
    }
}

impl<I: Id> RefCounts<I> {
    /// Returns all indices.
    pub(super) const fn indices(&self) -> Range<u32> {
        0..self.count
    }

    /// Returns whether each index is free or withheld.
    pub(super) fn free_flags(&self) -> Vec<bool> {
        let mut flags: Vec<bool> =
            self.entries.iter().map(|entry| entry.generation == 0 && entry.references == 0).collect();
        for index in &self.stack {
            flags[widen(index.number())] = true;
        }
        flags
    }

    /// Adds `count` indices after the others, withheld for now.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has no room for them.
    pub fn extend(&mut self, count: u32) -> Result<()> {
        let total = self.entries.len() + widen(count);
        let mut entries = try_with_capacity(total)?;
        let mut stack = try_with_capacity(total)?;
        entries.extend_from_slice(&self.entries);
        entries.resize(total, Entry::default());
        stack.extend_from_slice(&self.stack);
        (self.entries, self.stack) = (entries, stack);
        self.count += count;
        Ok(())
    }

    /// Offers withheld indices, which can be taken from now on.
    pub fn offer(&mut self, range: Range<u32>) {
        if range.start < range.end {
            let at = self.fresh.partition_point(|other| other.start < range.start);
            self.fresh.insert(at, range);
        }
    }

    /// Returns the number of indices.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// Returns the number of indices that are not in use, including withheld ones.
    #[must_use]
    pub const fn available(&self) -> usize {
        self.capacity() - self.in_use
    }

    /// Returns the number of indices that could be taken now.
    #[must_use]
    pub fn ready(&self) -> usize {
        self.stack.len() + self.fresh.iter().map(ExactSizeIterator::len).sum::<usize>()
    }

    /// Returns the number of indices that are taken or returning.
    #[must_use]
    pub const fn in_use(&self) -> usize {
        self.in_use
    }

    /// Returns the largest number that was in use at once.
    #[must_use]
    pub const fn high_water(&self) -> usize {
        self.high_water
    }

    /// Returns the number of frees that were dropped so far.
    #[must_use]
    pub const fn dropped_frees(&self) -> usize {
        self.dropped_frees
    }

    /// Counts a free that was dropped.
    pub const fn count_dropped(&mut self) {
        self.dropped_frees += 1;
    }

    /// Takes an index, with one reference: the last one that was given back or, if there is none, the lowest
    /// one that was never taken.
    pub fn take(&mut self) -> Option<IndexHandle<I>> {
        let index = match self.stack.pop() {
            Some(index) => index,
            None => self.take_fresh()?,
        };
        self.in_use += 1;
        self.high_water = self.high_water.max(self.in_use);
        let entry = &mut self.entries[widen(index.number())];
        entry.references = 1;
        Some(IndexHandle::new(index, entry.generation))
    }

    fn take_fresh(&mut self) -> Option<I> {
        let front = self.fresh.front_mut()?;
        let index = front.start;
        front.start += 1;
        if front.start == front.end {
            self.fresh.pop_front();
        }
        Some(I::new(index))
    }

    /// Returns the number of references to the take that `handle` names; 0 if it was freed.
    #[must_use]
    pub fn references(&self, handle: IndexHandle<I>) -> u32 {
        self.entries
            .get(widen(handle.index.number()))
            .filter(|entry| entry.generation == handle.generation)
            .map_or(0, |entry| entry.references)
    }

    /// Returns the handle of the current take of an index, or `None` while it is not taken.
    #[must_use]
    pub fn handle(&self, index: I) -> Option<IndexHandle<I>> {
        let entry = self.entries.get(widen(index.number())).filter(|entry| entry.references > 0)?;
        Some(IndexHandle::new(index, entry.generation))
    }

    /// Adds a reference. Returns `false` if the index was freed, or the count is at its maximum.
    pub fn retain(&mut self, handle: IndexHandle<I>) -> bool {
        let more = match self.references(handle) {
            0 => None,
            references => references.checked_add(1),
        };
        if let Some(more) = more {
            self.entries[widen(handle.index.number())].references = more;
        }
        more.is_some()
    }

    /// Releases a reference. If it was the last, returns the index, which is to be given back once nothing
    /// uses it.
    ///
    /// # Errors
    /// The reason when it was freed already; nothing is changed then.
    pub fn release(&mut self, handle: IndexHandle<I>) -> std::result::Result<Option<Returning<I>>, BadFree> {
        if self.references(handle) == 0 {
            return Err(BadFree::AlreadyFree);
        }
        let entry = &mut self.entries[widen(handle.index.number())];
        entry.references -= 1;
        if entry.references > 0 {
            return Ok(None);
        }
        entry.generation += 1;
        Ok(Some(Returning(handle.index)))
    }

    /// Returns why `index` cannot be freed, if it cannot: outside, never taken, free, or referred to more
    /// than once.
    #[must_use]
    pub fn reason(&self, index: i64) -> Option<BadFree> {
        let entry = usize::try_from(index).ok().and_then(|index| self.entries.get(index));
        match entry {
            None => Some(BadFree::OutOfRange),
            Some(Entry { references: 0, generation: 0 }) => Some(BadFree::NotAllocated),
            Some(Entry { references: 0, .. }) => Some(BadFree::AlreadyFree),
            Some(Entry { references: 1, .. }) => None,
            Some(_) => Some(BadFree::StillReferenced),
        }
    }

    /// Makes a returning index free.
    #[expect(clippy::needless_pass_by_value, reason = "an index is put back once")]
    pub fn give_back(&mut self, returning: Returning<I>) {
        self.in_use -= 1;
        self.stack.push(returning.0);
    }

    /// Describes a broken invariant, if there is one.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let mut seen = vec![false; self.entries.len()];
        for index in self.stack.iter().map(|index| index.number()).chain(self.fresh.iter().cloned().flatten())
        {
            if std::mem::replace(&mut seen[widen(index)], true) {
                return Some(format!("index {index} is free twice"));
            }
            if self.entries[widen(index)].references > 0 {
                return Some(format!("index {index} is free and taken"));
            }
        }
        None
    }
}
