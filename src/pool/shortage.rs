//! What a pool does when it is short of slots: it completes pending frees, waits for values in flight, and
//! reclaims slots.

use crate::base::{Page, Result};
use crate::memory::Stream;

/// A holder of slots that can free some on demand, such as a prefix cache.
///
/// A pool calls it without holding a lock, from the threads that are short, possibly several at once. It may
/// use the pool.
pub trait Reclaim: Send + Sync {
    /// How many slots it could free now, at most: a call that lacks more than all doors could free fails without
    /// a reclaim. It may be more than it turns out to be, never less.
    fn obtainable(&self, stream: Stream) -> usize;

    /// Frees at least `slots` slots, or as many as possible, and returns the number freed: at once, or behind a
    /// fence. Enqueues any work on `stream`.
    ///
    /// # Errors
    /// The call that was short returns the error.
    fn reclaim(&self, slots: usize, stream: Stream) -> Result<usize>;

    /// The pages that it holds and cannot free now, for a snapshot of the pool. Called without a lock, too.
    fn locked(&self) -> Vec<Page> {
        Vec::new()
    }
}

/// A shortage of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Short {
    /// Slots to free; 0 if there are enough, but not in one run.
    pub(super) slots: usize,
}

impl Short {
    /// Frees in flight must be complete first.
    pub(super) const IN_FLIGHT: Self = Self { slots: 0 };
}

/// The result of an attempt to take slots: success, or the shortage.
pub(super) type OrShort<T> = std::result::Result<T, Short>;
