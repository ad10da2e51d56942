//! A bump allocator of byte ranges. Ranges can be freed one by one, and [`Arena::reset`] frees all of them.
//!
//! Use it for memory that is reset as a whole, such as the temporaries of a step. It manages offsets, not
//! memory.

use std::iter::once;
use std::ops::Range;

use super::gaps::Gaps;

/// Ownership of the bytes `0..capacity`.
///
/// A range is taken after the last one. Only if it does not fit there, the first gap that is long enough is
/// used. Taking costs one step or, in the second case, one for each 64 gaps.
///
/// ```
/// use kvpool::index::Arena;
/// let mut arena = Arena::new(1024, 256);
/// assert_eq!(arena.take(100), Some(0..256));
/// assert_eq!(arena.take(300), Some(256..768));
/// assert_eq!(arena.take(300), None);
/// arena.give_back(0..256);
/// assert_eq!((arena.used(), arena.largest()), (512, 256));
/// arena.reset();
/// assert_eq!(arena.take(1024), Some(0..1024));
/// ```
#[derive(Clone, Debug)]
pub struct Arena {
    capacity: usize,
    /// The alignment, a power of two. The beginning and the length of every range are multiples of it.
    alignment: usize,
    /// The end of the last range: every taken byte is below it.
    end: usize,
    /// The freed ranges before `end`, none of which touches it.
    gaps: Gaps,
    used: usize,
    high_water: usize,
}

impl Arena {
    /// Creates an arena of `capacity` bytes whose ranges are aligned to `alignment`, a power of two.
    #[must_use]
    pub fn new(capacity: usize, alignment: usize) -> Self {
        Self { capacity, alignment, end: 0, gaps: Gaps::default(), used: 0, high_water: 0 }
    }

    /// Returns the size of the arena in bytes.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of bytes taken, in whole alignments.
    #[must_use]
    pub const fn used(&self) -> usize {
        self.used
    }

    /// Returns the largest number of bytes taken at once.
    #[must_use]
    pub const fn high_water(&self) -> usize {
        self.high_water
    }

    /// Returns the length in bytes of the largest range that [`Arena::take`] could return.
    #[must_use]
    pub fn largest(&self) -> usize {
        self.gaps.longest().max((self.capacity - self.end) / self.alignment * self.alignment)
    }

    /// Returns all bytes in order, as ranges that are taken (`true`) or free (`false`).
    ///
    /// ```
    /// use kvpool::index::Arena;
    /// let mut arena = Arena::new(1024, 256);
    /// arena.take(512);
    /// arena.take(256);
    /// arena.give_back(0..512);
    /// assert_eq!(arena.pieces(), [(0..512, false), (512..768, true), (768..1024, false)]);
    /// ```
    #[must_use]
    pub fn pieces(&self) -> Vec<(Range<usize>, bool)> {
        let mut pieces = Vec::new();
        let mut at = 0;
        for free in self.gaps.iter().cloned().chain(once(self.end..self.capacity)) {
            pieces.extend([(at..free.start, true), (free.clone(), false)]);
            at = free.end;
        }
        pieces.retain(|(range, _)| !range.is_empty());
        pieces
    }

    /// Takes a range of `bytes`, rounded up to the alignment and at least one alignment long. Returns `None`
    /// if no free range is long enough.
    pub fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        let bytes = bytes.max(1).checked_next_multiple_of(self.alignment)?;
        let range = if bytes <= self.capacity - self.end {
            self.end += bytes;
            self.end - bytes..self.end
        } else {
            self.gaps.cut(bytes, 1)?
        };
        self.used += bytes;
        self.high_water = self.high_water.max(self.used);
        Some(range)
    }

    /// Frees a range that [`Arena::take`] returned and that was not freed since.
    pub fn give_back(&mut self, range: Range<usize>) {
        self.used -= range.len();
        let gap = self.gaps.add(range);
        if gap.end == self.end {
            self.end = gap.start;
            self.gaps.pop();
        }
    }

    /// Frees everything.
    pub fn reset(&mut self) {
        self.end = 0;
        self.gaps.clear();
        self.used = 0;
    }
}
