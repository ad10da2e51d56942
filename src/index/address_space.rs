//! An allocator of byte ranges in one address space. Each range is freed by itself, or all of them at once.
//!
//! It manages offsets, not memory.

use std::iter::once;
use std::ops::Range;

use crate::base::bounded::signed;
use crate::base::{Error, Result, try_with_capacity};

use super::gaps::Gaps;
use super::{BadFree, BadFrees};

/// Ownership of the bytes `0..capacity`. The lowest free range that is long enough is taken first.
///
/// A free need not match a take: one call can free several adjacent ranges, or a part of one. A range is
/// refused as a whole if one of its bytes is free already.
///
/// Taking and freeing a range cost one step for each 64 gaps.
///
/// ```
/// use kvpool::index::{AddressSpace, BadFree};
/// let mut space = AddressSpace::new(4096, 256).unwrap();
/// assert_eq!(space.take(300), Some(0..512));
/// assert_eq!(space.take_many(100, 3).unwrap(), Some(vec![512, 768, 1024]));
/// space.give_back(512..1024).unwrap();
/// assert_eq!(space.give_back(768..1024), Err(BadFree::AlreadyFree));
/// assert_eq!(space.take(512), Some(512..1024));
/// assert_eq!((space.used(), space.capacity()), (1280, 4096));
/// ```
#[derive(Clone, Debug)]
pub struct AddressSpace {
    capacity: usize,
    /// The alignment, a power of two. Lengths are rounded up to a multiple of it.
    alignment: usize,
    /// The end of the last range: every taken byte is below it.
    end: usize,
    /// The free ranges before `end`, none of which touches it. Their lengths and `used` add up to `end`.
    gaps: Gaps,
    used: usize,
    high_water: usize,
    dropped_frees: usize,
}

impl AddressSpace {
    /// Creates a space of `capacity` bytes, all of them free.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) if `alignment` is no power of two, or an address
    /// does not fit 63 bits.
    pub fn new(capacity: usize, alignment: usize) -> Result<Self> {
        if !alignment.is_power_of_two() {
            return Err(Error::config(format!("alignment is {alignment}; it must be a power of two")));
        }
        let gaps = Gaps::default();
        let mut space =
            Self { capacity: 0, alignment, end: 0, gaps, used: 0, high_water: 0, dropped_frees: 0 };
        space.grow(capacity)?;
        Ok(space)
    }

    /// Returns the number of bytes, taken or free.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the alignment in bytes: lengths are rounded up to a multiple of it.
    #[must_use]
    pub const fn alignment(&self) -> usize {
        self.alignment
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

    /// Returns the number of frees that were dropped.
    #[must_use]
    pub const fn dropped_frees(&self) -> usize {
        self.dropped_frees
    }

    /// Returns the length of the longest free range in bytes.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.gaps.longest().max(self.capacity - self.end)
    }

    /// Rounds `bytes` up to the alignment. Returns `None` if the result does not fit an address.
    #[must_use]
    pub fn rounded(&self, bytes: usize) -> Option<usize> {
        bytes.checked_next_multiple_of(self.alignment)
    }

    /// Takes a range of `bytes`, rounded up to the alignment and at least one alignment long. Returns `None`
    /// if no free range is long enough.
    pub fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        let bytes = self.rounded(bytes.max(1))?;
        let taken = self.gaps.cut(bytes, 1).or_else(|| self.cut_end(bytes))?;
        self.count_taken(bytes);
        Some(taken)
    }

    /// Takes a range as [`AddressSpace::take`] does, but after the last one if it fits there, which costs one
    /// step.
    ///
    /// ```
    /// use kvpool::index::AddressSpace;
    /// let mut space = AddressSpace::new(1024, 256).unwrap();
    /// space.take(512);
    /// space.give_back(0..256).unwrap();
    /// assert_eq!(space.take_last(300), Some(512..1024));
    /// assert_eq!(space.take_last(100), Some(0..256));
    /// ```
    pub fn take_last(&mut self, bytes: usize) -> Option<Range<usize>> {
        let bytes = self.rounded(bytes.max(1))?;
        let taken = self.cut_end(bytes).or_else(|| self.gaps.cut(bytes, 1))?;
        self.count_taken(bytes);
        Some(taken)
    }

    /// Cuts `bytes` from the free bytes after the last range.
    fn cut_end(&mut self, bytes: usize) -> Option<Range<usize>> {
        (bytes <= self.capacity - self.end).then(|| {
            self.end += bytes;
            self.end - bytes..self.end
        })
    }

    /// Takes `count` ranges of `bytes`, rounded as in [`AddressSpace::take`], and returns where they begin,
    /// in order. If there is not enough room for all, returns `None` and takes none.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has no room for the
    /// list; nothing is taken then.
    pub fn take_many(&mut self, bytes: usize, count: usize) -> Result<Option<Vec<usize>>> {
        let fitting = |bytes: usize| self.gaps.fitting(bytes, count) + (self.capacity - self.end) / bytes;
        let Some(bytes) = self.rounded(bytes.max(1)).filter(|&bytes| fitting(bytes) >= count) else {
            return Ok(None);
        };
        let mut starts = try_with_capacity(count)?;
        while starts.len() < count {
            let left = count - starts.len();
            let taken = self.gaps.cut(bytes, left).or_else(|| self.cut_end(left * bytes));
            let taken = taken.expect("as many pieces as this were found to fit");
            self.count_taken(taken.len());
            starts.extend(taken.step_by(bytes));
        }
        Ok(Some(starts))
    }

    fn count_taken(&mut self, bytes: usize) {
        self.used += bytes;
        self.high_water = self.high_water.max(self.used);
    }

    /// Frees a range, all bytes of which are taken.
    ///
    /// # Errors
    /// The reason why the range cannot be freed. Nothing is changed then.
    pub fn give_back(&mut self, range: Range<usize>) -> std::result::Result<(), BadFree> {
        self.check(&range)?;
        self.used -= range.len();
        if range.end == self.end {
            self.end = self.gaps.pop(range.start).unwrap_or(range.start);
        } else {
            self.gaps.add(range);
        }
        Ok(())
    }

    /// Frees everything.
    pub fn reset(&mut self) {
        self.end = 0;
        self.gaps.clear();
        self.used = 0;
    }

    /// Reports which of several ranges, each of `bytes` bytes, could not be freed one after the other. Frees
    /// none.
    ///
    /// # Panics
    /// If a range begins at 2**63 or above.
    pub fn refused(&self, starts: &[usize], bytes: usize) -> BadFrees {
        let (mut bad, mut freed) = (BadFrees::default(), Gaps::default());
        for &start in starts {
            let range = start..start.saturating_add(bytes);
            let listed = || if freed.overlap(&range) { Err(BadFree::AlreadyFree) } else { Ok(()) };
            match self.check(&range).and_then(|()| listed()) {
                Ok(()) => freed.add(range),
                Err(reason) => bad.add(signed(start), reason, 1),
            }
        }
        bad
    }

    /// Returns why a range cannot be freed.
    fn check(&self, range: &Range<usize>) -> std::result::Result<(), BadFree> {
        if range.is_empty() || range.end > self.capacity {
            return Err(BadFree::OutOfRange);
        }
        if range.end > self.end || self.gaps.overlap(range) {
            return Err(BadFree::AlreadyFree);
        }
        Ok(())
    }

    /// Frees several ranges, each of `bytes` bytes. Ranges that cannot be freed are dropped, counted and
    /// reported.
    ///
    /// # Panics
    /// If a dropped range begins at 2**63 or above.
    pub fn give_back_many(&mut self, starts: &[usize], bytes: usize) -> BadFrees {
        let mut bad = BadFrees::default();
        for &start in starts {
            // A range whose end does not fit an address is outside of the space, too.
            if let Err(reason) = self.give_back(start..start.saturating_add(bytes)) {
                bad.add(signed(start), reason, 1);
            }
        }
        self.dropped_frees += bad.dropped();
        bad
    }

    /// Adds `bytes` bytes at the end of the space.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if an address does not fit 63 bits; nothing is
    /// changed then.
    pub fn grow(&mut self, bytes: usize) -> Result<()> {
        let end = self.capacity.checked_add(bytes).filter(|&end| isize::try_from(end).is_ok());
        let Some(end) = end else {
            return Err(Error::argument(format!(
                "{} and {bytes} bytes are more than an address can name",
                self.capacity
            )));
        };
        self.capacity = end;
        Ok(())
    }

    /// Returns all bytes in order, as ranges that are taken (`true`) or free (`false`).
    ///
    /// ```
    /// use kvpool::index::AddressSpace;
    /// let mut space = AddressSpace::new(1024, 256).unwrap();
    /// space.take_many(256, 3).unwrap();
    /// space.give_back(0..512).unwrap();
    /// assert_eq!(space.pieces(), [(0..512, false), (512..768, true), (768..1024, false)]);
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

    /// Describes a broken invariant, if there is one.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let free: usize = self.gaps.iter().map(Range::len).sum();
        let (used, end) = (self.used, self.end);
        let is_end_taken = self.gaps.iter().last().is_none_or(|gap| gap.end < end);
        self.gaps.broken_invariant().or_else(|| {
            (free + used != end || end > self.capacity || !is_end_taken)
                .then(|| format!("{free} free and {used} taken bytes are not those before {end}"))
        })
    }
}
