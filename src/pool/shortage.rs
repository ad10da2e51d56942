//! What a pool does when it is short: it completes what is due, asks who can do without, and waits for what is on its way.

use crate::base::Result;
use crate::memory::Stream;

/// Memory that a pool may ask for when it is short, such as that of a prefix cache.
///
/// A pool calls it without holding a lock, from whichever thread is short, perhaps from several at once. It may use the
/// pool.
pub trait Reclaim: Send + Sync {
    /// Frees at least `slots` slots, or as many as it can, and returns how many it freed. Work that is enqueued for it goes
    /// to `stream`.
    ///
    /// # Errors
    /// What the call that was short returns then.
    fn reclaim(&self, slots: usize, stream: Stream) -> Result<usize>;
}

/// By how many slots a pool was short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Short {
    /// Slots that had to be freed; 0 if there are enough, but not in one run.
    pub(super) slots: usize,
}

/// What an attempt took, or by how much the pool was short for it.
pub(super) type OrShort<T> = std::result::Result<T, Short>;
