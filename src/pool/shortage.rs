//! Recovery of a pool that is short of slots: it completes pending frees, waits for values in flight, and
//! reclaims slots.

use crate::base::{Page, Result};
use crate::memory::Stream;

/// A holder of slots that can free some on demand, such as a prefix cache.
///
/// A pool calls it without holding a lock, from the threads that are short, possibly several at once. It may
/// use the pool.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use kvpool::base::{IndexVec, Result};
/// use kvpool::kernels::Indices;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, Obtainable, Reclaim, TokenToKvPoolAllocator};
/// struct Spare {
///     allocator: Arc<TokenToKvPoolAllocator>,
///     slots: Mutex<Vec<i32>>,
/// }
/// impl Reclaim for Spare {
///     fn obtainable(&self, _stream: Stream) -> Obtainable {
///         Obtainable { at_once: self.slots.lock().unwrap().len(), behind_fences: 0 }
///     }
///     fn reclaim(&self, _slots: usize, stream: Stream) -> Result<usize> {
///         let slots = std::mem::take(&mut *self.slots.lock().unwrap());
///         let count = slots.len();
///         self.allocator.free(&Indices::Host(IndexVec::I32(slots)), stream)?;
///         Ok(count)
///     }
/// }
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let allocator = Arc::new(TokenToKvPoolAllocator::new(&AllocatorConfig::new(8), &host).unwrap());
/// drop(allocator.alloc(6, stream).unwrap().expect("8 are free").keep());
/// let spare = Spare { allocator: Arc::clone(&allocator), slots: Mutex::new((1..7).collect()) };
/// let spare: Arc<dyn Reclaim> = Arc::new(spare);
/// allocator.on_shortage(&spare);
/// assert!(allocator.alloc(8, stream).unwrap().is_some(), "the six others were reclaimed");
/// ```
pub trait Reclaim: Send + Sync {
    /// Returns an upper bound of the slots that it could free now. A call that is short of more slots than
    /// all holders together could free fails without a call of [`Self::reclaim`].
    fn obtainable(&self, stream: Stream) -> Obtainable;

    /// Frees at least `slots` slots, or as many as possible, and returns the number freed: at once, or behind
    /// a fence. Enqueues any work on `stream`.
    ///
    /// # Errors
    /// The call that was short returns the error.
    fn reclaim(&self, slots: usize, stream: Stream) -> Result<usize>;

    /// Returns the pages that it holds and cannot free now, for a snapshot of the pool. Also called without a
    /// lock.
    fn locked(&self) -> Vec<Page> {
        Vec::new()
    }
}

/// The slots that a [`Reclaim`] could free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Obtainable {
    /// Slots that would be free at once.
    pub at_once: usize,
    /// Slots that would be free when a fence has passed.
    pub behind_fences: usize,
}

/// Why there are not enough slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shortage {
    /// Frees in flight must be complete first.
    InFlight,
    Missing(Shortfall),
}

/// A shortage of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shortfall {
    /// Slots to free; 0 if there are enough, but not in one run, or if there can never be enough.
    pub(super) slots: usize,
    /// Slots that were freed behind fences which have not passed.
    pub(super) fenced: usize,
}

impl Shortfall {
    /// Returns the number of slots to reclaim; 0 if reclaiming cannot help. If it can free all missing slots
    /// at once, it is all of them. Otherwise this call fails, and it is the slots that a later call will lack
    /// once the fences have passed, if reclaiming can free them by then.
    pub(super) fn to_reclaim(self, obtainable: Obtainable) -> usize {
        let Obtainable { at_once, behind_fences } = obtainable;
        let later = self.slots.saturating_sub(self.fenced);
        match self.slots {
            slots if slots <= at_once => slots,
            _ if behind_fences > 0 && later <= at_once + behind_fences => later,
            _ => 0,
        }
    }
}

/// The result of an attempt to take slots: success, or the shortage.
pub(super) type TakeResult<T> = std::result::Result<T, Shortage>;
