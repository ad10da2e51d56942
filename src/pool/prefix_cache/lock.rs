//! Locks of prefixes, which end when they are dropped.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::base::Epoch;
use crate::cache::Hold;
use crate::memory::Stream;

use super::cache_core::CacheCore;
use super::loading::LeaseLoad;

/// A lock of a prefix: its pages are not evicted. Its drop is a call of the cache.
///
/// An allocator may keep it until a fence has passed. It keeps the cache, which does not keep the allocator.
pub(in crate::pool) struct PrefixLock {
    pub(super) shared: Arc<CacheCore>,
    /// `None` once it is released.
    pub(super) hold: Option<Hold>,
    /// The load behind the hold, in flight or complete.
    pub(super) load: Option<LeaseLoad>,
    /// The epoch of the allocator in which the pages were locked.
    pub(super) epoch: Epoch,
    /// The stream on which its pages are freed.
    pub(super) stream: Stream,
}

/// A place for the lock that a fence keeps. The lock is set once and released when the fence drops it.
pub(in crate::pool) type FencedLock = Arc<OnceLock<PrefixLock>>;

impl Drop for PrefixLock {
    fn drop(&mut self) {
        // If the allocator was dropped, there are no pages to unlock.
        let Some(allocator) = self.shared.allocator.upgrade() else { return };
        let fallback = self.load.as_mut().and_then(|load| load.fallback.take());
        for hold in self.hold.take().into_iter().chain(fallback) {
            self.shared.begin_call(&allocator, self.stream).release(hold, self.epoch);
        }
    }
}

impl fmt::Debug for PrefixLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixLock").field("hold", &self.hold).finish_non_exhaustive()
    }
}
