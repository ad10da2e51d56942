//! The store below the host tier of a cache.

use std::sync::Arc;

use crate::base::Result;
use crate::cache::{Digest, PageHash, UsedRun};
use crate::memory::Stream;
use crate::pool::host_tier::PieceKind;
use crate::pool::{HostTier, Store};
use crate::transfer::{JobThread, Transfer};

use super::home::CacheRef;
use super::put_queue::PutQueue;
use super::store_access::StoreAccess;

/// A store, and the names of a tier's pieces in it.
#[derive(Debug)]
pub(super) struct Backing {
    /// The part that threads use.
    store_access: Arc<StoreAccess>,
    cache_ref: Arc<CacheRef>,
    puts: Arc<PutQueue>,
    fetches: JobThread,
}

impl Backing {
    /// Creates a store below `tier`, for pieces of `model`, with names made by `digest`.
    ///
    /// # Errors
    /// The error of a store that is closed.
    pub(super) fn new(
        tier: &Arc<HostTier>,
        store: Arc<dyn Store>,
        model: &str,
        digest: Digest,
    ) -> Result<Self> {
        // A store that is closed returns its error here.
        store.find(&[])?;
        let store_access = Arc::new(StoreAccess::new(tier, store, model, digest));
        let puts = Arc::new(PutQueue::new(&store_access));
        Ok(Self { store_access, cache_ref: Arc::default(), puts, fetches: JobThread::new("kvpool-fetch") })
    }

    pub(super) const fn cache_ref(&self) -> &Arc<CacheRef> {
        &self.cache_ref
    }

    pub(super) const fn store_access(&self) -> &Arc<StoreAccess> {
        &self.store_access
    }

    /// Returns the thread that fetches.
    pub(super) const fn fetches(&self) -> &JobThread {
        &self.fetches
    }

    /// Has a thread put the pieces that a copy has brought to the tier in the store.
    pub(super) fn put<'a>(&self, keys: impl Fn(PieceKind) -> &'a [PageHash]) {
        for kind in PieceKind::ALL {
            self.puts.add(kind, keys(kind));
        }
        self.puts.send();
    }

    /// Has a thread tell the store that parts of prefixes were used, unless it is still busy with the last
    /// call. A run comes before the run that it follows.
    pub(super) fn record_uses(&self, used: impl FnOnce() -> Vec<UsedRun>) {
        self.puts.record_uses(used);
    }

    /// Waits until every piece was passed to the store. Called when the cache is dropped.
    pub(super) fn finish(&self) {
        self.puts.finish();
    }

    /// Has a thread complete a copy to the tier when it is over.
    pub(super) fn await_copy(&self, copy: &Arc<Transfer>, stream: Stream) {
        let (copy, cache_ref) = (Arc::clone(copy), Arc::clone(&self.cache_ref));
        // Without a thread, the next call of the cache completes it.
        let _ = self.puts.thread().submit(move || {
            let _ = copy.wait();
            cache_ref.visit(|cache| cache.complete_copies(stream));
        });
    }
}
