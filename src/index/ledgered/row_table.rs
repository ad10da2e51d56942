//! [`RowTable`] with a ledger.

use super::Ledgered;
use crate::base::{Id, IndexVec, Result};
use crate::index::ledger::{IndexState, Span, spans};
use crate::index::{BadFrees, OnBadFree, RowExtent, RowTable};

impl<I: Id> Ledgered<RowTable<I>> {
    /// Returns all rows by state and holders.
    #[must_use]
    pub fn spans(&self) -> Vec<Span> {
        spans(self.inner.rows().indices(), self.ledger.get(), |row| {
            if self.inner.rows().is_live(I::new(row)) { IndexState::Live } else { IndexState::Free }
        })
    }

    /// Calls [`RowTable::alloc`] and records it.
    pub fn alloc(&mut self, count: usize) -> Option<Vec<RowExtent<I>>> {
        let taken = self.inner.alloc(count)?;
        if let Some(ledger) = self.ledger.get_mut() {
            for row in taken.iter().map(|taken| taken.row.number()) {
                ledger.record_take(row..row + 1);
            }
        }
        Some(taken)
    }

    /// Calls [`RowTable::free`] and records it.
    ///
    /// # Errors
    /// Same as [`RowTable::free`].
    pub fn free(&mut self, values: &IndexVec, on_bad: OnBadFree) -> Result<(Vec<RowExtent<I>>, BadFrees)> {
        let ledger = &self.ledger;
        let explain = |bad: &mut BadFrees| ledger.explain(bad, |row| row);
        let (freed, bad) = self.inner.free_explained(values, on_bad, explain)?;
        if let Some(ledger) = self.ledger.get_mut() {
            for row in freed.iter().map(|freed| freed.row.number()) {
                ledger.record_release(row..row + 1);
            }
        }
        Ok((freed, bad))
    }

    /// Calls [`RowTable::record_written`].
    pub fn record_written(&mut self, row: I, end: u32) {
        self.inner.record_written(row, end);
    }

    /// Calls [`RowTable::clear`] and records it.
    pub fn clear(&mut self) -> Vec<RowExtent<I>> {
        self.ledger.clear();
        self.inner.clear()
    }
}
