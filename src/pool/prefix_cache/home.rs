//! A prefix cache as its parts see it that must not own it: loads in flight, and the threads of the store.

use std::sync::Weak;

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{ForkGate, run_blocking};
use crate::cache::OfferedPages;
use crate::memory::Stream;
use crate::pool::host_tier::IncomingPieces;

use super::released::EndedLoad;

/// A prefix cache, which takes back what a load had, and lets the threads of the store change it.
pub(super) trait CacheHome: Send + Sync {
    /// Gives back the pages of a load that is over or was given up.
    fn end_load(&self, ended: EndedLoad);

    /// Makes places in the tier below for pages from a store, and records what the tier evicted for them.
    fn expect_below(&self, expect: &dyn Fn() -> Option<IncomingPieces>) -> Option<IncomingPieces>;

    /// Records pages that arrived in the tier below from a store.
    fn record_arrived_below(&self, arrived: &[OfferedPages]);

    /// Completes copies to the tier below that are over.
    fn complete_copies(&self, stream: Stream);
}

/// The reference by which threads reach the cache until it is dropped.
#[derive(Debug)]
pub(super) struct CacheRef(RankedMutex<Option<Weak<dyn CacheHome>>>);

impl Default for CacheRef {
    fn default() -> Self {
        Self(RankedMutex::new(LockRank::CacheRef, None))
    }
}

impl CacheRef {
    pub(super) fn begin(&self, cache: Weak<dyn CacheHome>) {
        *self.0.lock() = Some(cache);
    }

    /// Prevents threads from reaching the cache from now on, and waits for a thread that is using it.
    pub(super) fn end(&self) {
        match self.0.try_lock() {
            Some(mut cache) => *cache = None,
            // The thread may wait for the interpreter, whose lock the caller has.
            None => run_blocking(|| *self.0.lock() = None),
        }
    }

    /// Calls `work` with the cache, if it is there.
    pub(super) fn visit(&self, work: impl FnOnce(&dyn CacheHome)) {
        let _gate = ForkGate::enter();
        // Held until the thread no longer uses the cache, so that the cache is dropped by its owner, not by
        // the thread.
        let cache = self.0.lock();
        if let Some(cache) = cache.as_ref().and_then(Weak::upgrade) {
            work(&*cache);
        }
    }
}
