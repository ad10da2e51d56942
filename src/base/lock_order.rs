//! The order of the locks of pools. Debug builds check it.
//!
//! A thread that holds a lock takes only locks that come later, and waits for no device, no other thread and
//! no interpreter. So no two threads can each hold what the other one waits for. The locks of the layers below
//! the pools come last, because these layers call no pool; some have a rank, and those of executors, events and
//! rings have none.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::Duration;

use super::sync::{Condvar, Mutex, MutexGuard};

/// The locks of pools, in the order in which a thread takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LockRank {
    /// The list of those that can free slots for an allocator that is short.
    Reclaimers,
    /// The reference by which threads of a store reach a prefix cache.
    CacheRef,
    /// A lease of a prefix.
    Lease,
    /// The tree of a prefix cache, and all that it has below it.
    Cache,
    /// What came of a load from the tier below.
    LoadArrival,
    /// Whether a load has arrived.
    LoadOutcome,
    /// The slots of an allocator.
    Allocator,
    /// The requests of a planner.
    Planner,
    /// A request table.
    Table,
    /// The pages of a page pool.
    PagePool,
    /// The buffers of a buffer pool.
    BufferPool,
    /// The track slots of the states.
    TrackSlots,
    /// The copies that may still use track slots.
    TrackCopies,
    /// The model whose pages a tier has.
    TierModel,
    /// The page-locking of a tier.
    TierPageLocking,
    /// Pieces of a tier on their way from a store.
    TierPieces,
    /// Pieces of a tier that wait until a store can take them.
    WaitingPieces,
    /// The pages of a tier.
    TierPages,
    /// The states of a tier.
    TierStates,
    /// The chunks of a chunk pool.
    ChunkPool,
    /// The counters of a tier.
    TierCounts,
    /// The failures of a tier that were not reported yet.
    TierNotes,
    /// The progress of a fetch from a store.
    Fetch,
    /// The threads of a file store.
    StoreWorkers,
    /// The file of a file store.
    StoreDisk,
    /// The queues of a store.
    Store,
    /// The progress of a call of a store.
    StoreTransfer,
    /// The slots of a stage.
    Stage,
    /// The mirror of a request table.
    TableMirror,
    /// Whether a workspace is open.
    Workspace,
    /// The arena of a workspace.
    Arena,
    /// The jobs of a background thread.
    JobQueue,
    /// The progress of copies on a thread.
    CopySteps,
}

/// A mutex with a place in the order of locks. It ignores poisoning: see [`lock`](super::sync::lock).
#[derive(Debug)]
pub(crate) struct RankedMutex<T> {
    rank: LockRank,
    mutex: Mutex<T>,
}

impl<T> RankedMutex<T> {
    pub(crate) fn new(rank: LockRank, value: T) -> Self {
        Self { rank, mutex: Mutex::new(value) }
    }

    /// Waits for the lock.
    #[inline]
    pub(crate) fn lock(&self) -> RankedGuard<'_, T> {
        let held = Held::new(self.rank);
        RankedGuard { guard: self.mutex.lock().unwrap_or_else(PoisonError::into_inner), held }
    }

    /// Returns the value, which no other thread can reach.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock, unless another thread has it.
    pub(crate) fn try_lock(&self) -> Option<RankedGuard<'_, T>> {
        let held = Held::new(self.rank);
        let guard = match self.mutex.try_lock() {
            Ok(guard) => guard,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => return None,
        };
        Some(RankedGuard { guard, held })
    }
}

/// A guard of a [`RankedMutex`]: unlocks it when it is dropped.
#[derive(Debug)]
pub(crate) struct RankedGuard<'a, T> {
    guard: MutexGuard<'a, T>,
    held: Held,
}

impl<T> RankedGuard<'_, T> {
    /// Unlocks until `condvar` is notified.
    pub(crate) fn wait(self, condvar: &Condvar) -> Self {
        let Self { guard, held } = self;
        Self { guard: condvar.wait(guard).unwrap_or_else(PoisonError::into_inner), held }
    }

    /// Unlocks until `condvar` is notified, at most for `timeout`.
    pub(crate) fn wait_timeout(self, condvar: &Condvar, timeout: Duration) -> Self {
        let Self { guard, held } = self;
        Self { guard: condvar.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner).0, held }
    }
}

impl<T> Deref for RankedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for RankedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

use check::Held;
pub(crate) use check::assert_none_held;

#[cfg(all(debug_assertions, not(loom)))]
mod check {
    use std::cell::RefCell;
    use std::marker::PhantomData;

    use super::LockRank;

    thread_local! {
        /// The locks that this thread holds, in the order in which it took them.
        static HELD: RefCell<Vec<LockRank>> = const { RefCell::new(Vec::new()) };
    }

    /// A lock that this thread holds.
    #[derive(Debug)]
    pub(super) struct Held {
        rank: LockRank,
        of_this_thread: PhantomData<*const ()>,
    }

    impl Held {
        /// Records a lock of this thread.
        ///
        /// # Panics
        /// If the thread holds a lock that comes later, or one of the same rank.
        pub(super) fn new(rank: LockRank) -> Self {
            HELD.with_borrow_mut(|held| {
                let highest = held.iter().max();
                assert!(
                    highest.is_none_or(|highest| *highest < rank),
                    "{rank:?} is locked while {held:?} are"
                );
                held.push(rank);
            });
            Self { rank, of_this_thread: PhantomData }
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            // A thread that ends may drop guards after its record.
            let _ = HELD.try_with(|held| {
                let mut held = held.borrow_mut();
                if let Some(last) = held.iter().rposition(|rank| *rank == self.rank) {
                    held.remove(last);
                }
            });
        }
    }

    /// Checks that this thread holds no lock of a pool.
    ///
    /// # Panics
    /// If it holds one.
    pub(crate) fn assert_none_held() {
        HELD.with_borrow(|held| assert!(held.is_empty(), "a thread waits while {held:?} are locked"));
    }
}

#[cfg(not(all(debug_assertions, not(loom))))]
mod check {
    use super::LockRank;

    /// Nothing: only debug builds record locks.
    #[derive(Debug)]
    pub(super) struct Held;

    impl Held {
        #[inline]
        pub(super) const fn new(_: LockRank) -> Self {
            Self
        }
    }

    /// Does nothing: only debug builds record locks.
    #[inline]
    pub(crate) const fn assert_none_held() {}
}

#[cfg(all(test, debug_assertions, not(loom)))]
mod tests {
    use super::*;

    /// Returns whether `work` panics.
    fn is_refused(work: impl FnOnce() + std::panic::UnwindSafe) -> bool {
        std::panic::catch_unwind(work).is_err()
    }

    #[test]
    fn locks_out_of_order_are_refused() {
        let (cache, table) = (RankedMutex::new(LockRank::Cache, 1), RankedMutex::new(LockRank::Table, 2));
        assert_eq!(*cache.lock() + *table.lock(), 3);
        assert!(is_refused(|| drop((table.lock(), cache.lock()))));
        assert!(is_refused(|| drop((cache.lock(), cache.try_lock()))));
        let other = RankedMutex::new(LockRank::Table, 3);
        assert!(is_refused(|| drop((table.lock(), other.lock()))));
        // What was refused is not held.
        let (first, last) = (cache.lock(), table.lock());
        drop(first);
        assert_eq!(*last, 2);
    }

    #[test]
    fn a_held_lock_is_found() {
        let table = RankedMutex::new(LockRank::Table, ());
        let guard = table.lock();
        assert!(is_refused(assert_none_held));
        drop(guard);
        assert_none_held();
    }
}
