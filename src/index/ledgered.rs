//! Structures that decide who owns what, with a ledger around them.

mod buckets;
mod ref_counts;
mod row_table;
mod slots;

use std::ops::Deref;

use super::ledger::Book;

/// A structure, and a [`Book`] of who takes and gives what in it.
///
/// Everything that changes owners is a method here, which does it and notes what was done; the structure itself knows of no
/// ledger. Without an open book nothing is noted, and a call costs one branch more.
///
/// ```
/// use kvpool::index::{Act, Ledgered, RefCounts};
/// let mut counts = Ledgered::from(RefCounts::default());
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
    /// Who takes and gives what, if that is noted.
    #[must_use]
    pub const fn book(&self) -> &Book {
        &self.book
    }

    /// As [`Ledgered::book`], to open it.
    pub const fn book_mut(&mut self) -> &mut Book {
        &mut self.book
    }
}
