//! Ownership structures with a debugging ledger around them.

mod buckets;
mod ref_counts;
mod row_table;
mod slots;

use std::ops::Deref;
use std::sync::Arc;

use super::ledger::{CallRecord, Ledger, OptionalLedger, Owner};

/// An ownership structure and, in debug mode, the [`Ledger`] that records its takes and frees.
///
/// Every method that changes an owner is here: it calls the structure, which has no ledger, and records the
/// result. Without a ledger nothing is recorded, and a call costs one more branch.
///
/// ```
/// use kvpool::base::ChunkId;
/// use kvpool::index::{CallRecord, Ledgered, RefCounts};
/// let mut counts: Ledgered<RefCounts<ChunkId>> = Ledgered::default();
/// counts.open_ledger();
/// counts.extend(1).unwrap();
/// counts.offer(0..1);
/// counts.take().unwrap();
/// let ledger = counts.ledger().unwrap();
/// assert_eq!(ledger.history(0).unwrap(), format!("taken by {}", CallRecord::UNKNOWN_SITE));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Ledgered<T> {
    inner: T,
    ledger: OptionalLedger,
}

impl<T> From<T> for Ledgered<T> {
    fn from(inner: T) -> Self {
        Self { inner, ledger: OptionalLedger::default() }
    }
}

impl<T> Deref for Ledgered<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> Ledgered<T> {
    /// Starts an empty ledger, which records every take and free from now on.
    pub fn open_ledger(&mut self) {
        self.ledger.open();
    }

    /// Returns the ledger, if there is one.
    #[must_use]
    pub fn ledger(&self) -> Option<&Ledger> {
        self.ledger.get()
    }

    /// Works like [`Ledgered::ledger`], but mutable.
    pub fn ledger_mut(&mut self) -> Option<&mut Ledger> {
        self.ledger.get_mut()
    }
}

/// Returns the call in progress, in the name of `owner`.
fn call_of(owner: &Owner) -> Arc<CallRecord> {
    Arc::new(CallRecord { owner: Some(owner.clone()), ..CallRecord::clone(&CallRecord::current()) })
}
