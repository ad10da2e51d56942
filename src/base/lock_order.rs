//! The order of the locks of pools. Debug builds check it.
//!
//! A thread that holds a lock takes only locks that come later, and waits for no device and no other thread,
//! but for room in a device's queue of work and for the interpreter, with which nobody waits for a lock. So no
//! two threads can each hold what the other one waits for. The locks of the layers below
//! the pools come last, because these layers call no pool; some have a rank, and those of executors, events and
//! rings have none.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::Duration;

use super::held::Held;
pub(crate) use super::held::LockRank;
#[cfg(not(loom))]
use super::sync::lock;
use super::sync::{Condvar, Mutex, MutexGuard};

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

    /// Waits for the lock, without that of the interpreter.
    #[inline]
    pub(crate) fn lock(&self) -> RankedGuard<'_, T> {
        let held = Held::new(self.rank);
        #[cfg(not(loom))]
        let guard = lock(&self.mutex);
        #[cfg(loom)]
        let guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        RankedGuard { guard, held }
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

#[cfg(all(test, debug_assertions, not(loom)))]
mod tests {
    use crate::base::held::assert_none_held;

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
