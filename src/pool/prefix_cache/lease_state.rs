//! The contents of a lease, and its holder.

use std::sync::Arc;

use crate::base::{Error, Page, Result, StateSlot};
use crate::cache::{Hold, Tree};
use crate::memory::Stream;

use super::cache_core::{CacheCall, CacheState};
use super::loading::{LeaseLoad, Loadable};
use super::request::{LeaseKeeper, LeasingRequest};

/// The contents of a lease, and its holder.
pub(super) struct LeaseState {
    pub(super) hold: Hold,
    pub(super) holder: Holder,
    /// The tokens that the tier below could add.
    pub(super) loadable: Loadable,
    /// The load from the tier, which continues the hold until it has arrived.
    pub(super) load: Option<LeaseLoad>,
}

/// The holder of a lease.
pub(super) enum Holder {
    /// The user alone keeps it.
    User,
    /// The user keeps it, and a request to its end.
    Both(LeasingRequest),
    /// A request alone keeps it: the user has released it.
    Request(LeasingRequest),
}

impl LeaseState {
    /// Returns the number of tokens of the prefix.
    pub(super) fn len(&self) -> usize {
        self.hold.len() + self.load_in_flight().map_or(0, |load| load.len)
    }

    /// Returns the load that is in flight.
    pub(super) fn load_in_flight(&self) -> Option<&LeaseLoad> {
        self.load.as_ref().filter(|load| !load.has_arrived)
    }

    /// Returns the pages of the prefix that are being loaded.
    pub(super) fn loading_pages(&self) -> &[Page] {
        self.load_in_flight().map_or(&[], |load| load.shared.pages(load.len))
    }

    /// Returns the snapshot at the end of the prefix.
    pub(super) fn state(&self, tree: &Tree) -> Option<StateSlot> {
        match self.load_in_flight() {
            Some(load) => load.shared.state(load.len),
            None => tree.snapshot(&self.hold),
        }
    }

    /// Returns a share of the load, in flight or complete, for the first `len` tokens.
    pub(super) fn share_of(&self, len: usize) -> Option<LeaseLoad> {
        let load = self.load.as_ref()?;
        if load.has_arrived {
            return Some(load.share(load.len));
        }
        let loading = len.checked_sub(self.hold.len()).filter(|&loading| loading > 0)?;
        Some(load.share(loading.min(load.len)))
    }

    /// Checks that no part of the prefix is being loaded.
    ///
    /// # Errors
    /// [`ErrorKind::State`] with the number of tokens that are being loaded.
    ///
    /// [`ErrorKind::State`]: crate::base::ErrorKind::State
    pub(super) fn check_arrived(&self) -> Result<()> {
        self.load_in_flight().map_or(Ok(()), |load| {
            Err(Error::state(format!(
                "{} tokens of the lease are on their way; wait for their last layer first",
                load.len
            )))
        })
    }

    /// Moves the hold to the end of a load that is known to be complete, in the order of `stream`, or gives up
    /// one that has failed.
    pub(super) fn settle(
        &mut self,
        call: &CacheCall<'_>,
        cache: &mut CacheState,
        stream: Stream,
    ) -> Result<()> {
        let has_request = self.request().is_some();
        let Self { hold, load, .. } = self;
        let Some(load) = load.as_mut().filter(|load| !load.has_arrived) else { return Ok(()) };
        let may_give_up = !has_request && load.shared.has_failed()?;
        if load.shared.is_complete_on(stream)? {
            cache.arrive(&load.shared, hold);
            if let Some(fallback) = load.settle(&mut cache.tree, hold)? {
                let evicted = cache.tree.release(fallback);
                call.give_back(cache, evicted);
            }
            call.copy_offers_to_tier(cache);
        } else if may_give_up {
            self.give_up_load(call, cache);
        }
        Ok(())
    }

    /// Gives up a load in flight: the lease ends where it did before. Returns whether there was one.
    pub(super) fn give_up_load(&mut self, call: &CacheCall<'_>, cache: &mut CacheState) -> bool {
        let Some(given_up) = self.load.take_if(|load| !load.has_arrived) else { return false };
        if let Some(fallback) = given_up.fallback {
            let evicted = cache.tree.release(std::mem::replace(&mut self.hold, fallback));
            call.give_back(cache, evicted);
        }
        call.slots.discard(given_up.shared);
        true
    }

    /// Returns the request that keeps the lease, unless its planner was dropped.
    pub(super) fn request(&self) -> Option<&LeasingRequest> {
        self.holder.request().filter(|request| request.is_planned())
    }

    /// Removes the user as a holder. Returns whether that was its only holder.
    pub(super) fn remove_user(&mut self) -> bool {
        let request = self.request().cloned();
        let is_over = request.is_none();
        self.holder = request.map_or(Holder::User, Holder::Request);
        is_over
    }

    /// Removes its request as a holder, if it has one. Returns whether that was its only holder.
    pub(super) fn remove_request(&mut self) -> bool {
        matches!(std::mem::replace(&mut self.holder, Holder::User), Holder::Request(_))
    }
}

impl Holder {
    pub(super) const fn request(&self) -> Option<&LeasingRequest> {
        match self {
            Self::User => None,
            Self::Both(request) | Self::Request(request) => Some(request),
        }
    }

    /// Returns the planner of the request.
    ///
    /// # Errors
    /// See [`LeasingRequest::planner`].
    pub(super) fn planner(&self) -> Result<Option<Arc<dyn LeaseKeeper>>> {
        self.request().map(LeasingRequest::planner).transpose()
    }
}
