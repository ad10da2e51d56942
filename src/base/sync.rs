//! Synchronisation primitives: from the standard library, or from `loom`, which explores every interleaving
//! of a test.

#[cfg(loom)]
pub(crate) use loom::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize},
    },
    thread,
};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize},
    },
    thread,
};

/// Locks `mutex` and ignores poisoning. No caller can cause a panic under a lock; after one that a bug
/// causes, continuing is better than failing every later call.
///
/// While it waits, the lock of the interpreter is released: the thread that holds the mutex may need it.
#[inline]
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => guard,
        Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(std::sync::TryLockError::WouldBlock) => wait_for(mutex),
    }
}

/// Waits for a mutex that another thread holds.
///
/// The interpreter's lock is taken back under the mutex, which is no deadlock: nobody waits for the mutex with
/// that lock.
#[cold]
fn wait_for<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    let _unlocked = super::interpreter::unlock_interpreter();
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
