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
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
