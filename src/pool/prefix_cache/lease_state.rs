//! The contents of a lease, and its holder.

use std::sync::Arc;

use crate::base::{Error, Page, Result, StateSlot};
use crate::cache::{Hold, Tree};
use crate::memory::Stream;

use super::load::{Loadable, Loading};
use super::request::{LeaseKeeper, LeasingRequest};
use super::shared::{CacheState, Open};

/// The contents of a lease, and its holder.
pub(super) struct LeaseState {
    pub(super) hold: Hold,
    pub(super) holder: Holder,
    /// The tokens that the tier below could add.
    pub(super) rest: Loadable,
    /// The load from there, behind the hold until it has arrived.
    pub(super) loading: Option<Loading>,
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
    /// Tokens of the prefix.
    pub(super) fn len(&self) -> usize {
        self.hold.len() + self.coming().map_or(0, |loading| loading.len)
    }

    /// The load that is on its way.
    pub(super) fn coming(&self) -> Option<&Loading> {
        self.loading.as_ref().filter(|loading| !loading.has_arrived)
    }

    /// The pages of the prefix that are on their way.
    pub(super) fn coming_pages(&self) -> &[Page] {
        self.coming().map_or(&[], |loading| loading.tail.pages(loading.len))
    }

    /// The snapshot at the end of the prefix.
    pub(super) fn state(&self, tree: &Tree) -> Option<StateSlot> {
        match self.coming() {
            Some(loading) => loading.tail.state(loading.len),
            None => tree.snapshot(&self.hold),
        }
    }

    /// A share of what is on its way, or has come, for the first `len` tokens.
    pub(super) fn share_of(&self, len: usize) -> Option<Loading> {
        let loading = self.loading.as_ref()?;
        if loading.has_arrived {
            return Some(loading.share(loading.len));
        }
        let coming = len.checked_sub(self.hold.len()).filter(|&coming| coming > 0)?;
        Some(loading.share(coming.min(loading.len)))
    }

    /// Checks that nothing is on its way.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] with its tokens.
    ///
    /// [`ErrorKind::Config`]: crate::base::ErrorKind::Config
    pub(super) fn expect_arrived(&self) -> Result<()> {
        self.coming().map_or(Ok(()), |loading| {
            Err(Error::config(format!(
                "{} tokens of the lease are on their way; wait for their last layer first",
                loading.len
            )))
        })
    }

    /// Moves the hold to the end of what has arrived, in the order of `stream`, or gives up what never will.
    /// Returns what is to be dropped without locks.
    pub(super) fn settle(
        &mut self,
        open: &Open<'_>,
        cache: &mut CacheState,
        stream: Stream,
    ) -> Result<Option<Loading>> {
        let has_request = self.request().is_some();
        let Self { hold, loading, .. } = self;
        let Some(coming) = loading.as_mut().filter(|loading| !loading.has_arrived) else { return Ok(None) };
        // Asked first: what ends in between has not ended early.
        let may_give_up = !has_request && coming.tail.transfer().is_over()?;
        if coming.tail.transfer().is_complete_on(stream)? {
            if let Some(before) = coming.settle(cache, hold)? {
                let gone = cache.tree.release(before);
                open.give_back(cache, gone);
            }
            open.send_down(cache);
        } else if may_give_up {
            return Ok(self.give_up_loading(open, cache));
        }
        Ok(None)
    }

    /// Lets the lease end where it did before what is on its way, which is returned, to be dropped without
    /// locks.
    pub(super) fn give_up_loading(&mut self, open: &Open<'_>, cache: &mut CacheState) -> Option<Loading> {
        let mut given_up = self.loading.take_if(|loading| !loading.has_arrived)?;
        if let Some(before) = given_up.before.take() {
            let gone = cache.tree.release(std::mem::replace(&mut self.hold, before));
            open.give_back(cache, gone);
        }
        Some(given_up)
    }

    /// The request whose prefix it is, unless its planner is gone.
    pub(super) fn request(&self) -> Option<&LeasingRequest> {
        self.holder.request().filter(|request| request.is_planned())
    }

    /// The user releases it. Returns whether that was its only holder.
    pub(super) fn lose_user(&mut self) -> bool {
        let request = self.request().cloned();
        let is_over = request.is_none();
        self.holder = request.map_or(Holder::User, Holder::Request);
        is_over
    }

    /// Removes its request as a holder, if it has one. Returns whether that was its only holder.
    pub(super) fn lose_request(&mut self) -> bool {
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

    /// The planner of the request.
    ///
    /// # Errors
    /// See [`LeasingRequest::planner`].
    pub(super) fn planner(&self) -> Result<Option<Arc<dyn LeaseKeeper>>> {
        self.request().map(LeasingRequest::planner).transpose()
    }
}
