//! [`RefCounts`] with a ledger.

use std::ops::Range;

use super::Ledgered;
use crate::base::{Id, Result, widen};
use crate::index::ledger::{IndexState, Span, spans};
use crate::index::{BadFree, BadFrees, IndexHandle, RefCounts, Returning};

impl<I: Id> Ledgered<RefCounts<I>> {
    /// Returns all indices by state and holders. A returning index counts as fenced, a withheld one as free.
    #[must_use]
    pub fn spans(&self) -> Vec<Span> {
        let is_free = self.inner.free_flags();
        spans(self.inner.indices(), self.ledger.get(), |index| {
            if self.inner.handle(I::new(index)).is_some() {
                IndexState::Live
            } else if is_free[widen(index)] {
                IndexState::Free
            } else {
                IndexState::Fenced
            }
        })
    }

    /// Returns whether the call in progress names an owner, and `index` is known to be held by others alone.
    #[must_use]
    pub fn is_held_by_others(&self, index: I) -> bool {
        self.ledger.is_held_by_others(index.number())
    }

    /// Returns a report of `index`, which could not be freed, with its history.
    pub fn bad_free(&self, index: i64, reason: BadFree) -> BadFrees {
        let mut bad = BadFrees::of(index, reason);
        self.ledger.explain(&mut bad, |index| index);
        bad
    }

    /// Calls [`RefCounts::extend`].
    ///
    /// # Errors
    /// Same as [`RefCounts::extend`].
    pub fn extend(&mut self, count: u32) -> Result<()> {
        self.inner.extend(count)
    }

    /// Calls [`RefCounts::offer`].
    pub fn offer(&mut self, range: Range<u32>) {
        self.inner.offer(range);
    }

    /// Calls [`RefCounts::count_dropped`].
    pub const fn count_dropped(&mut self) {
        self.inner.count_dropped();
    }

    /// Calls [`RefCounts::take`] and records it.
    pub fn take(&mut self) -> Option<IndexHandle<I>> {
        let handle = self.inner.take()?;
        self.ledger.record_take(handle.range());
        Some(handle)
    }

    /// Calls [`RefCounts::retain`] and records it.
    pub fn retain(&mut self, handle: IndexHandle<I>) -> bool {
        let is_retained = self.inner.retain(handle);
        if is_retained {
            self.ledger.add_holder(handle.index().number());
        }
        is_retained
    }

    /// Calls [`RefCounts::release`] and records it.
    ///
    /// # Errors
    /// Same as [`RefCounts::release`].
    pub fn release(&mut self, handle: IndexHandle<I>) -> std::result::Result<Option<Returning<I>>, BadFree> {
        let returning = self.inner.release(handle)?;
        if returning.is_some() {
            self.ledger.record_release(handle.range());
        } else {
            self.ledger.remove_holder(handle.index().number());
        }
        Ok(returning)
    }

    /// Calls [`RefCounts::give_back`].
    pub fn give_back(&mut self, returning: Returning<I>) {
        self.inner.give_back(returning);
    }
}
