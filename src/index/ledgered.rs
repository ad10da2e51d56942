//! Ownership structures with a debugging ledger around them.

mod buckets;
mod ref_counts;
mod row_table;
mod slots;

use std::ops::Deref;

use super::ledger::Book;

/// An ownership structure and the [`Book`] that records its takes and frees.
///
/// Every method that changes an owner is here: it calls the structure, which has no ledger, and records
/// the result. While the book is closed nothing is recorded, and a call costs one more branch.
///
/// ```
/// use kvpool::base::ChunkId;
/// use kvpool::index::{Act, Ledgered, RefCounts};
/// let mut counts: Ledgered<RefCounts<ChunkId>> = Ledgered::default();
/// counts.book_mut().open();
/// counts.extend(1).unwrap();
/// counts.offer(0..1);
/// counts.take().unwrap();
/// let ledger = counts.book().ledger().unwrap();
/// assert_eq!(ledger.history(0).unwrap(), format!("taken by {}", Act::UNKNOWN_PLACE));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Ledgered<T> {
    inner: T,
    book: Book,
}

impl<T> From<T> for Ledgered<T> {
    fn from(inner: T) -> Self {
        Self { inner, book: Book::default() }
    }
}

impl<T> Deref for Ledgered<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> Ledgered<T> {
    /// The record of takes and frees.
    #[must_use]
    pub const fn book(&self) -> &Book {
        &self.book
    }

    /// Works like [`Ledgered::book`], but mutable: use it to open the ledger.
    pub const fn book_mut(&mut self) -> &mut Book {
        &mut self.book
    }
}
