//! [`RowTable`] with a ledger.

use super::{Ledgered, call_of};
use crate::base::{Id, IndexVec, Result};
use crate::index::ledger::{IndexState, Span, spans};
use crate::index::{BadFrees, OnBadFree, Owner, RowExtent, RowTable};

impl<I: Id> Ledgered<RowTable<I>> {
    /// Returns all rows by state and holders. Rows of a prefix cache are evictable.
    #[must_use]
    pub fn spans(&self) -> Vec<Span> {
        spans(self.inner.rows().indices(), self.ledger.get(), |row| {
            let row = I::new(row);
            if !self.inner.rows().is_live(row) {
                IndexState::Free
            } else if self.inner.is_cached(row) {
                IndexState::Evictable
            } else {
                IndexState::Live
            }
        })
    }

    /// Calls [`RowTable::alloc`] and records it.
    ///
    /// # Errors
    /// Same as [`RowTable::alloc`].
    pub fn alloc(&mut self, count: usize) -> Result<Option<Vec<RowExtent<I>>>> {
        let taken = self.inner.alloc(count)?;
        for row in taken.iter().flatten().map(|taken| taken.row.number()) {
            self.ledger.record_take(row..row + 1);
        }
        Ok(taken)
    }

    /// Calls [`RowTable::alloc_one`] and records it.
    pub fn alloc_one(&mut self) -> Option<RowExtent<I>> {
        let taken = self.inner.alloc_one()?;
        self.ledger.record_take(taken.row.number()..taken.row.number() + 1);
        Some(taken)
    }

    /// Calls [`RowTable::undo`] and records it.
    pub fn undo(&mut self, row: I) {
        self.inner.undo(row);
        self.ledger.record_release(row.number()..row.number() + 1);
    }

    /// Calls [`RowTable::alloc_cached`] and records `owner` as the holder.
    pub fn alloc_cached(&mut self, owner: &Owner) -> Option<I> {
        let row = self.inner.alloc_cached()?;
        let _call = self.ledger.get().map(|_| call_of(owner).begin());
        self.ledger.record_take(row.number()..row.number() + 1);
        Some(row)
    }

    /// Calls [`RowTable::free_cached`] and records that `owner` freed the row.
    ///
    /// # Panics
    /// Same as [`RowTable::free_cached`].
    pub fn free_cached(&mut self, row: I, owner: &Owner) {
        self.inner.free_cached(row);
        let _call = self.ledger.get().map(|_| call_of(owner).begin());
        self.ledger.record_release(row.number()..row.number() + 1);
    }

    /// Calls [`RowTable::free`] and records it.
    ///
    /// # Errors
    /// Same as [`RowTable::free`].
    pub fn free(&mut self, values: &IndexVec, on_bad: OnBadFree) -> Result<(Vec<RowExtent<I>>, BadFrees)> {
        let ledger = &self.ledger;
        let explain = |bad: &mut BadFrees| ledger.explain(bad, |row| row);
        let is_of_others = |row: I| ledger.is_held_by_others(row.number());
        let (freed, bad) = self.inner.free_explained(values, on_bad, is_of_others, explain)?;
        for row in freed.iter().map(|freed| freed.row.number()) {
            self.ledger.record_release(row..row + 1);
        }
        Ok((freed, bad))
    }

    /// Calls [`RowTable::record_written`].
    pub fn record_written(&mut self, row: I, end: u32) {
        self.inner.record_written(row, end);
    }

    /// Calls [`RowTable::clear`] and records it.
    ///
    /// # Errors
    /// Same as [`RowTable::clear`].
    pub fn clear(&mut self) -> Result<Vec<RowExtent<I>>> {
        let cleared = self.inner.clear()?;
        self.ledger.clear();
        Ok(cleared)
    }
}
