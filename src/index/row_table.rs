//! Rows of the request table: ownership, and how far each row was written.
//!
//! The extents make clearing cheap: a row is cleared up to its last written column. The table only returns
//! the extent; the caller clears.

use std::fmt;

use crate::base::{Id, IndexVec, Result, try_with_capacity, try_zeros, widen};

use super::free_list::{FreeList, FreeTiming, Order};
use super::mask::Mask;
use super::{BadFree, BadFrees, Bitmap, OnBadFree, on_bad_frees};

/// A row and its columns to clear: `0..written`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowExtent<I> {
    /// The row.
    pub row: I,
    /// Columns written since the row was last cleared.
    pub written: u32,
}

/// Ownership of rows, first in, first out, with the written extent of each.
///
/// It serves the request table (rows and columns) and, with extents of 0, the places of linear-attention
/// states.
///
/// ```
/// use kvpool::base::{IndexVec, RequestRow};
/// use kvpool::index::{OnBadFree, RowTable};
/// let mut table = RowTable::<RequestRow>::new(1, 2).unwrap();
/// assert_eq!(table.alloc(2).unwrap().unwrap().len(), 2);
/// assert!(table.alloc_one().is_none());
/// let (freed, bad) = table.free(&IndexVec::I64(vec![2, 2]), OnBadFree::Report).unwrap();
/// assert_eq!((freed.len(), bad.dropped()), (1, 1));
/// ```
#[derive(Clone)]
pub struct RowTable<I> {
    rows: FreeList<I>,
    /// The end of the written columns, by row number: columns outside of `0..written[row]` are zero.
    written: Vec<u32>,
    /// The generation of each row, by row number: how often it was handed out. It may wrap.
    generations: Vec<u32>,
    /// The rows of a prefix cache. They are live.
    cached: Bitmap,
    frees: u64,
    dropped_frees: usize,
}

impl<I: fmt::Debug> fmt::Debug for RowTable<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowTable").field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl<I: Id> RowTable<I> {
    /// Rows `first..first + count`, all free and clean.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate it.
    pub fn new(first: u32, count: u32) -> Result<Self> {
        Ok(Self {
            rows: FreeList::new(first, count, Order::Fifo)?,
            written: try_zeros(widen(first) + widen(count))?,
            generations: try_zeros(widen(first) + widen(count))?,
            cached: Bitmap::new(widen(first) + widen(count))?,
            frees: 0,
            dropped_frees: 0,
        })
    }

    /// Returns the free list of the rows.
    #[must_use]
    pub const fn rows(&self) -> &FreeList<I> {
        &self.rows
    }

    /// Returns the number of frees dropped so far.
    #[must_use]
    pub const fn dropped_frees(&self) -> usize {
        self.dropped_frees
    }

    /// Returns the number of calls so far that freed rows. While it does not change, no row is freed.
    #[must_use]
    pub const fn frees(&self) -> u64 {
        self.frees
    }

    /// Returns the generation of `row`: the number of times that it was handed out. Facts that were recorded
    /// in another generation are about an earlier owner.
    #[must_use]
    pub fn generation(&self, row: I) -> u32 {
        self.generations[widen(row.number())]
    }

    /// Takes `count` rows, those that have been free longest first, or returns `None` and takes none.
    ///
    /// Each row comes with the columns that were written while it had no owner.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the
    /// result; nothing is taken.
    pub fn alloc(&mut self, count: usize) -> Result<Option<Vec<RowExtent<I>>>> {
        if count > self.rows.available() {
            return Ok(None);
        }
        let mut taken = try_with_capacity(count)?;
        self.take(count, |row| taken.push(row));
        Ok(Some(taken))
    }

    /// Takes the row that has been free longest, or returns `None`.
    pub fn alloc_one(&mut self) -> Option<RowExtent<I>> {
        let mut taken = None;
        self.take(1, |row| taken = Some(row));
        taken
    }

    /// Takes `count` rows and passes them to `emit`, or takes none.
    fn take(&mut self, count: usize, mut emit: impl FnMut(RowExtent<I>)) {
        let Self { rows, written, generations, .. } = self;
        rows.alloc(count, |run| {
            for number in run.range() {
                let generation = &mut generations[widen(number)];
                *generation = generation.wrapping_add(1);
                emit(RowExtent { row: I::new(number), written: std::mem::take(&mut written[widen(number)]) });
            }
        });
    }

    /// Makes a row free again that was taken and not handed out. Needs no memory.
    pub fn undo(&mut self, row: I) {
        self.rows.give_back(row.number()..row.number() + 1);
    }

    /// Returns the number of rows of a prefix cache.
    #[must_use]
    pub const fn cached(&self) -> usize {
        self.cached.len()
    }

    /// Returns whether a prefix cache has `row`.
    #[must_use]
    pub fn is_cached(&self, row: I) -> bool {
        self.cached.contains(widen(row.number()))
    }

    /// Takes a row for a prefix cache, or returns `None`. Only [`RowTable::free_cached`] frees it: any other
    /// free of it is invalid.
    ///
    /// ```
    /// use kvpool::base::{Id, IndexVec, StateSlot};
    /// use kvpool::index::{BadFree, OnBadFree, RowTable};
    /// let mut tracks = RowTable::<StateSlot>::new(5, 2).unwrap();
    /// let slot = tracks.alloc_cached().unwrap();
    /// let (freed, bad) = tracks.free(&IndexVec::I64(vec![slot.into()]), OnBadFree::Report).unwrap();
    /// assert_eq!((freed.len(), bad.first()), (0, &[(5, BadFree::Cached)][..]));
    /// tracks.free_cached(slot);
    /// assert_eq!(tracks.rows().available(), 2);
    /// ```
    pub fn alloc_cached(&mut self) -> Option<I> {
        let row = self.alloc_one()?.row;
        self.cached.insert(widen(row.number()));
        Some(row)
    }

    /// Frees a row of a prefix cache.
    ///
    /// # Panics
    /// Panics if the prefix cache does not have it.
    pub fn free_cached(&mut self, row: I) {
        assert!(self.is_cached(row), "{} {row} belongs to the prefix cache", I::NOUN);
        self.cached.remove(widen(row.number()));
        self.rows.give_back(row.number()..row.number() + 1);
        self.written[widen(row.number())] = 0;
        self.frees += 1;
    }

    /// Frees rows. Rows that are not live, and those of a prefix cache, are dropped and reported.
    ///
    /// # Errors
    /// With [`OnBadFree::Fail`], [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) when
    /// anything would be dropped; [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the
    /// host cannot allocate the lists. Nothing is changed then.
    pub fn free(&mut self, values: &IndexVec, on_bad: OnBadFree) -> Result<(Vec<RowExtent<I>>, BadFrees)> {
        self.free_explained(values, on_bad, |_| false, |_| ())
    }

    /// Works like [`RowTable::free`], without rows that are others' according to `is_of_others`; `explain` adds
    /// to the report.
    pub(super) fn free_explained(
        &mut self,
        values: &IndexVec,
        on_bad: OnBadFree,
        is_of_others: impl Fn(I) -> bool,
        explain: impl FnOnce(&mut BadFrees),
    ) -> Result<(Vec<RowExtent<I>>, BadFrees)> {
        let capacity = self.rows.capacity();
        let mut batch = self.rows.begin_free(FreeTiming::Now);
        let mut bad = BadFrees::default();
        for value in values.iter() {
            let row = u32::try_from(value).ok().map(I::new).filter(|&row| batch.list().contains(row));
            let reason = match row {
                None if value == 0 => BadFree::Padding,
                None => BadFree::OutOfRange,
                Some(row) if self.cached.contains(widen(row.number())) => BadFree::Cached,
                Some(row) if is_of_others(row) && batch.list().is_live(row) => BadFree::OtherOwner,
                Some(row) if batch.add(Mask::of(row.number())) == 0 => continue,
                Some(row) if bad.has_room() && batch.contains(row) => BadFree::NamedTwice,
                Some(row) => batch.list().reason(row),
            };
            bad.add(value, reason, 1);
        }
        let dropped = bad.dropped();
        explain(&mut bad);
        let bad = on_bad_frees(bad, on_bad, I::NOUN, values.len(), capacity)?;
        batch.check()?;
        let mut freed = try_with_capacity(values.len() - dropped)?;
        let written = &mut self.written;
        freed.extend(
            batch
                .masks()
                .iter()
                .flat_map(|mask| mask.indices())
                .map(|row| RowExtent { row: I::new(row), written: std::mem::take(&mut written[widen(row)]) }),
        );
        batch.commit();
        self.frees += u64::from(!freed.is_empty());
        self.dropped_frees += dropped;
        Ok((freed, bad))
    }

    /// Records that columns below `end` of `row` were written. `row` may be any row, including the padding
    /// row.
    pub fn record_written(&mut self, row: I, end: u32) {
        let extent = &mut self.written[widen(row.number())];
        *extent = (*extent).max(end);
    }

    /// Frees and cleans every row. Returns the rows that the caller must clear, including the padding row.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the
    /// list; nothing is changed.
    pub fn clear(&mut self) -> Result<Vec<RowExtent<I>>> {
        let is_written = |(_, written): &(u32, &mut u32)| **written > 0;
        let mut cleared = try_with_capacity(self.written.iter().filter(|written| **written > 0).count())?;
        cleared.extend(
            (0..)
                .zip(&mut self.written)
                .filter(is_written)
                .map(|(number, written)| RowExtent { row: I::new(number), written: std::mem::take(written) }),
        );
        self.rows.clear();
        self.cached.clear();
        self.frees += 1;
        Ok(cleared)
    }
}
