//! A lock that need not be taken to learn that there is nothing to do.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::sync::{AtomicBool, Mutex, MutexGuard};

/// What may hold something that somebody has to come back to.
pub trait Waits {
    /// Whether it does.
    fn waits(&self) -> bool;
}

impl<T> Waits for Vec<T> {
    fn waits(&self) -> bool {
        !self.is_empty()
    }
}

/// A value under a lock, of which everybody can see without the lock whether something waits in it.
///
/// Who locks it has the answer brought up to date before the lock is given back, so that nothing waits unseen: the
/// answer is older than the value only while somebody has the lock.
///
/// ```
/// use kvpool::base::Watched;
/// let numbers = Watched::new(Vec::new());
/// numbers.lock().push(1);
/// assert!(numbers.waits());
/// numbers.lock().clear();
/// assert!(!numbers.waits());
/// ```
pub struct Watched<T: Waits> {
    value: Mutex<T>,
    waits: AtomicBool,
}

impl<T: Waits> Watched<T> {
    /// `value`, unlocked.
    #[must_use]
    pub fn new(value: T) -> Self {
        let waits = AtomicBool::new(value.waits());
        Self { value: Mutex::new(value), waits }
    }

    /// Whether something waits.
    #[inline]
    #[must_use]
    pub fn waits(&self) -> bool {
        self.waits.load(Acquire)
    }

    /// Locks it. Poison is ignored, so a value must hold together wherever its methods may panic.
    #[inline]
    pub fn lock(&self) -> WatchedGuard<'_, T> {
        WatchedGuard { value: self.value.lock().unwrap_or_else(PoisonError::into_inner), waits: &self.waits }
    }

    /// As [`Watched::lock`], or `None` while another has the lock.
    pub fn try_lock(&self) -> Option<WatchedGuard<'_, T>> {
        Some(WatchedGuard { value: self.value.try_lock().ok()?, waits: &self.waits })
    }
}

impl<T: Waits + Default> Default for Watched<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: Waits> fmt::Debug for Watched<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("waits", &self.waits()).finish_non_exhaustive()
    }
}

/// A [`Watched`] value that is locked until this drops.
pub struct WatchedGuard<'a, T: Waits> {
    value: MutexGuard<'a, T>,
    waits: &'a AtomicBool,
}

impl<T: Waits> Drop for WatchedGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // The lock is given back after this.
        self.waits.store(self.value.waits(), Release);
    }
}

impl<T: Waits> Deref for WatchedGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Waits> DerefMut for WatchedGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T: Waits> fmt::Debug for WatchedGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchedGuard").field("waits", &self.value.waits()).finish_non_exhaustive()
    }
}
