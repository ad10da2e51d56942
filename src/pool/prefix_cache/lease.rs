//! Leases: a request's hold on a prefix.

use std::fmt;
use std::sync::Arc;

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{Epoch, Error, Page, RequestRow, Result, StateSlot, try_extend};
use crate::cache::{Hold, Namespace};
use crate::index::PageList;
use crate::memory::Stream;
use crate::pool::TokenToKvPoolAllocator;
use crate::pool::gdn_pool::Source;
use crate::pool::slot_tensors::SlotTensors;
use crate::tensor::TensorView;

use super::cache_core::{CacheCall, CacheCore, CacheState};
use super::lease_state::{Holder, LeaseState};
use super::loading::{LeaseLoad, Loadable};
use super::lock::PrefixLock;
use super::request::{LeaseId, LeasingRequest};
use super::stale::{cleared_error, released_error};

/// A request's hold on a prefix: its pages are not evicted. Dropping it releases them.
pub struct Lease {
    pub(super) shared: Arc<CacheCore>,
    namespace: Namespace,
    /// The epoch of the allocator in which it was made.
    pub(super) epoch: Epoch,
    /// The stream on which it was made, for what a drop frees.
    stream: Stream,
    /// `None` once it is released.
    state: RankedMutex<Option<LeaseState>>,
    pub(super) allocator: Arc<TokenToKvPoolAllocator>,
}

impl Lease {
    pub(super) fn new(
        shared: &Arc<CacheCore>,
        allocator: &Arc<TokenToKvPoolAllocator>,
        hold: Hold,
        epoch: Epoch,
        namespace: Namespace,
        stream: Stream,
    ) -> Self {
        let (loadable, load) = (Loadable::default(), None);
        let state = Some(LeaseState { hold, holder: Holder::User, loadable, load });
        let (shared, allocator) = (Arc::clone(shared), Arc::clone(allocator));
        Self { shared, namespace, epoch, stream, state: RankedMutex::new(LockRank::Lease, state), allocator }
    }

    /// Returns its identity.
    pub(in crate::pool) fn id(&self) -> LeaseId {
        LeaseId::of(self)
    }

    pub(super) const fn stream(&self) -> Stream {
        self.stream
    }

    /// Returns the namespace of the prefix.
    #[must_use]
    pub const fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Returns the tokens of the prefix, in whole pages.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) after its release, or when the allocator
    /// was cleared.
    pub fn len(&self) -> Result<usize> {
        self.with(self.stream, |_, _, lease| Ok(lease.len()))
    }

    /// Returns the tokens behind the prefix that the tier below had when it was made, and that [`Self::load`]
    /// brings back.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub fn loadable(&self) -> Result<usize> {
        self.with(self.stream, |_, _, lease| Ok(lease.loadable.tokens.len()))
    }

    /// Records the tokens that the tier below could add to a new lease.
    pub(super) fn set_loadable(&self, loadable: Loadable) {
        if let Some(lease) = self.state.lock().as_mut() {
            lease.loadable = loadable;
        }
    }

    /// Returns the tokens whose K and V were cached when it was made, in whole pages: more than [`Self::len`]
    /// if the cache has states, but no snapshot at their end.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub fn kv_len(&self) -> Result<usize> {
        self.with(self.stream, |_, _, lease| Ok(lease.hold.found().max(lease.len())))
    }

    /// Returns whether the prefix has no tokens.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub fn is_empty(&self) -> Result<bool> {
        self.len().map(|len| len == 0)
    }

    /// Calls `work` with what the cache keeps and with what the lease holds, under their locks.
    pub(super) fn with<R>(
        &self,
        stream: Stream,
        work: impl FnOnce(&CacheCall<'_>, &mut CacheState, &mut LeaseState) -> Result<R>,
    ) -> Result<R> {
        self.with_request(stream, |call, cache, lease| match lease.holder {
            Holder::User | Holder::Both(_) => work(call, cache, lease),
            Holder::Request(_) => Err(released_error()),
        })
    }

    /// Works like [`Self::with`], also if only the request still needs the lease.
    pub(super) fn with_request<R>(
        &self,
        stream: Stream,
        work: impl FnOnce(&CacheCall<'_>, &mut CacheState, &mut LeaseState) -> Result<R>,
    ) -> Result<R> {
        let call = self.shared.begin_call(&self.allocator, stream);
        let mut guard = self.state.lock();
        let Some(lease) = guard.as_mut() else { return Err(released_error()) };
        let mut cache = call.at(self.epoch).ok_or_else(cleared_error)?;
        lease.settle(&call, &mut cache, stream)?;
        work(&call, &mut cache, lease)
    }

    /// Returns a lock made of a hold that the lease has given up, and of the load behind it.
    pub(super) fn lock_of(&self, hold: Hold, load: Option<LeaseLoad>, stream: Stream) -> PrefixLock {
        let shared = Arc::clone(&self.shared);
        PrefixLock { shared, hold: Some(hold), load, epoch: self.epoch, stream }
    }

    /// Calls `work` with the hold of this lease, if it is of the cache `shared`.
    pub(super) fn with_hold<R>(
        &self,
        shared: &Arc<CacheCore>,
        stream: Stream,
        work: impl FnOnce(&mut CacheState, &Hold) -> Result<R>,
    ) -> Result<R> {
        if !Arc::ptr_eq(shared, &self.shared) {
            return Err(Error::argument("the lease is of another prefix cache"));
        }
        self.with(stream, |_, cache, lease| {
            lease.check_arrived()?;
            work(cache, &lease.hold)
        })
    }

    /// Returns the pages of the prefix from token `from` on.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub fn pages(&self, from: usize) -> Result<Vec<Page>> {
        self.with(self.stream, |_, cache, lease| {
            let mut pages = cache.tree.pages(&lease.hold, from.min(lease.hold.len()))?;
            let loading = lease.loading_pages();
            let skipped = from.saturating_sub(lease.hold.len()) / cache.tree.page_size();
            try_extend(&mut pages, &loading[skipped.min(loading.len())..])?;
            Ok(pages)
        })
    }

    /// Returns the slots of the prefix: 1-D int32, valid on `stream`.
    ///
    /// # Errors
    /// See [`Self::len`]; see [`TokenToKvPoolAllocator::alloc`](crate::pool::TokenToKvPoolAllocator::alloc).
    pub fn slots(&self, stream: Stream) -> Result<TensorView> {
        self.allocator.tensor_of_pages(&self.pages(0)?, stream)
    }

    /// Returns the track slot of the snapshot at the end of the prefix.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub fn state_slot(&self) -> Result<Option<StateSlot>> {
        self.with(self.stream, |_, cache, lease| Ok(lease.state(&cache.tree)))
    }

    /// Copies the snapshot at the end of the prefix to working slot `row`, or resets that for a prefix
    /// without tokens.
    ///
    /// # Errors
    /// See [`Self::len`] and [`GdnPool::copy_states`](crate::pool::GdnPool::copy_states);
    /// [`ErrorKind::State`] when the cache has no states, or the prefix has tokens and no snapshot;
    /// [`ErrorKind::Index`] for a row of no working slot.
    ///
    /// [`ErrorKind::State`]: crate::base::ErrorKind::State
    /// [`ErrorKind::Index`]: crate::base::ErrorKind::Index
    pub fn restore(&self, row: i64, stream: Stream) -> Result<()> {
        let Some(states) = &self.shared.states else {
            return Err(Error::state("the prefix cache was made without states"));
        };
        // This lock keeps the snapshot from being given up before it is copied.
        let (snapshot, lock) = self.with(stream, |_, cache, lease| {
            let snapshot = lease.state(&cache.tree);
            if snapshot.is_none() && lease.len() > 0 {
                return Err(Error::state(format!(
                    "the lease has {} tokens and no snapshot of the state at their end",
                    lease.len()
                )));
            }
            let load = lease.load.as_ref().map(|load| load.share(load.len));
            Ok((snapshot, self.lock_of(cache.tree.hold_for_copy(&lease.hold), load, stream)))
        })?;
        states.check_working(row)?;
        // States come before the first layer.
        if let Some(load) = lock.load.as_ref().filter(|load| !load.has_arrived) {
            load.shared.wait_state(stream)?;
        }
        let source = snapshot.map_or(Source::Zeros, |slot| Source::Slot(slot.into()));
        states.set_state(row, source, stream)
    }

    /// Returns the row of the request that keeps the lease, if there is one.
    #[must_use]
    pub fn row(&self) -> Option<RequestRow> {
        let lease = self.state.lock();
        Some(lease.as_ref()?.request()?.row())
    }

    /// Returns whether its pages are of `allocator`.
    pub(in crate::pool) fn is_of(&self, allocator: &Arc<TokenToKvPoolAllocator>) -> bool {
        Arc::ptr_eq(&self.allocator, allocator)
    }

    /// Makes this the lease of `request`, and returns the pages.
    ///
    /// # Errors
    /// See [`Self::len`]; also [`ErrorKind::State`](crate::base::ErrorKind::State) when it is that of another
    /// request.
    pub(in crate::pool) fn bind(&self, request: LeasingRequest) -> Result<PageList> {
        self.with(self.stream, |_, cache, lease| {
            if let Some(other) = lease.request() {
                let row = other.row();
                return Err(Error::state(format!(
                    "the lease is that of request row {row} already; match again for another request"
                )));
            }
            let mut pages = cache.tree.share_pages(&lease.hold)?;
            pages.extend_from_slice(lease.loading_pages())?;
            lease.holder = Holder::Both(request);
            Ok(pages)
        })
    }

    /// Undoes [`Self::bind`]. The planner still exists, so no other request can have taken the lease since.
    pub(in crate::pool) fn unbind(&self) {
        self.end_if(LeaseState::remove_request, self.stream);
    }

    /// Ends the lease for a request whose planner was dropped, unless another request has the lease by now.
    pub(in crate::pool) fn unbind_gone(&self) {
        self.end_if(|lease| lease.request().is_none() && lease.remove_request(), self.stream);
    }

    /// Checks that the pages are still those of the allocator, whose lock the caller holds.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) when it was cleared.
    pub(in crate::pool) fn check_epoch(&self, slots: &SlotTensors) -> Result<()> {
        if slots.epoch() == self.epoch { Ok(()) } else { Err(cleared_error()) }
    }

    /// Creates another lease of the first `len` tokens, in whole pages.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub(in crate::pool) fn lease_prefix(&self, len: usize, stream: Stream) -> Result<Self> {
        let (hold, load) = self.with_request(stream, |_, cache, lease| {
            let len = cache.tree.in_whole_pages(len);
            Ok((cache.tree.hold_first(&lease.hold, len), lease.share_of(len)))
        })?;
        let prefix =
            Self::new(&self.shared, &self.allocator, hold, self.epoch, self.namespace.clone(), stream);
        if let Some(lease) = prefix.state.lock().as_mut() {
            lease.load = load;
        }
        Ok(prefix)
    }

    /// Shortens the lease of a truncated request to the whole pages of `len` tokens, or ends it if `len` is
    /// 0. Returns a lock of what it had, unless it has ended before.
    pub(in crate::pool) fn shorten(&self, len: usize, stream: Stream) -> Option<PrefixLock> {
        if len == 0 {
            let lease = self.state.lock().take();
            return lease.map(|lease| self.lock_of(lease.hold, lease.load, stream));
        }
        let before = self.with_request(stream, |_, cache, lease| {
            let len = cache.tree.in_whole_pages(len);
            let (shorter, share) = (cache.tree.hold_first(&lease.hold, len), lease.share_of(len));
            let load = std::mem::replace(&mut lease.load, share);
            Ok((std::mem::replace(&mut lease.hold, shorter), load))
        });
        before.ok().map(|(hold, load)| self.lock_of(hold, load, stream))
    }

    /// Ends the lease. Later calls of it fail; a second release does nothing. The prefix of a planner's
    /// request stays until the request is finished.
    pub fn release(&self, stream: Stream) {
        self.end_if(LeaseState::remove_user, stream);
    }

    /// Ends the lease if `is_over` returns true. Both happen under one lock, as a request could take the
    /// lease in between.
    fn end_if(&self, is_over: impl FnOnce(&mut LeaseState) -> bool, stream: Stream) {
        let lease = self.state.lock().take_if(is_over);
        let Some(mut lease) = lease else { return };
        let call = self.shared.begin_call(&self.allocator, stream);
        if lease.load.is_some()
            && let Some(mut cache) = call.at(self.epoch)
        {
            // A lease that ends reports no failure of a device.
            let _ = lease.settle(&call, &mut cache, stream);
        }
        let LeaseState { hold, load, .. } = lease;
        call.release(hold, self.epoch);
        if let Some(fallback) = load.and_then(LeaseLoad::into_fallback) {
            call.release(fallback, self.epoch);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end_if(|_| true, self.stream);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("len", &self.len().ok()).finish_non_exhaustive()
    }
}
