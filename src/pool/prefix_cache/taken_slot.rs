//! Track slots that were taken for snapshots that are still to be copied.

use std::sync::Arc;

use crate::base::{Result, StateSlot};
use crate::cache::{FoundPrefix, Hold};
use crate::index::Owner;
use crate::memory::Stream;
use crate::pool::GdnPool;
use crate::transfer::Transfer;

use super::cache_core::CacheState;

/// A track slot that a snapshot is copied to. Dropping it before [`TakenSlot::keep`] gives it back.
pub(super) struct TakenSlot<'a> {
    states: &'a GdnPool,
    /// The cache that takes it.
    owner: &'a Owner,
    slot: Option<StateSlot>,
    /// The copy that may still use the slot, for the snapshot that was there before.
    copy: Option<Arc<Transfer>>,
}

impl<'a> TakenSlot<'a> {
    /// Takes a free track slot or, if there is none, that of the snapshot that is evicted first: for a snapshot that
    /// is needed, or that is only `offered` ([`Tree::evict_snapshot`](crate::cache::Tree::evict_snapshot)).
    pub(super) fn new(
        states: &'a GdnPool,
        owner: &'a Owner,
        cache: &mut CacheState,
        hold: &mut Hold,
        offered: Option<(&FoundPrefix, usize)>,
    ) -> Option<Self> {
        let (slot, copy) = states.take_cached(owner).or_else(|| {
            let slot = cache.tree.evict_snapshot(hold, offered)?;
            Some((slot, cache.below.as_ref().and_then(|below| below.write_of(slot))))
        })?;
        Some(Self { states, owner, slot: Some(slot), copy })
    }

    /// Makes it safe for later work on `stream` to write to the slot; without a device, for the calling
    /// thread.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when a driver call fails.
    ///
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    pub(super) fn make_ready(&self, stream: Stream) -> Result<()> {
        self.copy.as_ref().map_or(Ok(()), |copy| copy.make_stream_wait_for_all(stream))
    }

    pub(super) fn slot(&self) -> StateSlot {
        self.slot.expect("it is taken")
    }

    pub(super) fn keep(mut self) -> StateSlot {
        self.slot.take().expect("it is taken once")
    }
}

impl Drop for TakenSlot<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.states.free_cached(slot, self.copy.take(), self.owner);
        }
    }
}
