//! Leases: a request's hold on a prefix.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::base::sync::explored::{Mutex, lock};
use crate::base::{Error, ErrorKind, Id, IndexVec, Page, RequestRow, Result, StateSlot, reserve, widen};
use crate::cache::{Hold, Namespace, Tokens, Tree};
use crate::index::{PageList, put_slots_of};
use crate::memory::Stream;
use crate::pool::gdn_pool::Source;
use crate::pool::slot_tensors::SlotTensors;
use crate::pool::{GdnPool, TokenToKvPoolAllocator};
use crate::tensor::TensorView;
use crate::transfer::Transfer;

use super::below::free_states;
use super::load::{Loadable, Loading};
use super::lock::PrefixLock;
use super::request::{LeaseKeeper, LeasedRequest, LeasingRequest};
use super::{CacheCore, CacheState, Open, Rest, pages_of};

/// A request's hold on a prefix: its pages are not evicted. Dropping it releases them.
pub struct Lease {
    pub(super) shared: Arc<CacheCore>,
    namespace: Namespace,
    /// How often the allocator had been cleared.
    pub(super) clears: u64,
    /// The stream on which it was made, for what a drop frees.
    stream: Stream,
    /// `None` once it is released.
    held: Mutex<Option<LeaseState>>,
    pub(super) allocator: Arc<TokenToKvPoolAllocator>,
}

/// What a lease holds.
pub(super) struct LeaseState {
    pub(super) hold: Hold,
    holder: Holder,
    /// What the tier below could add.
    pub(super) rest: Loadable,
    /// What comes from there, behind the hold until it has arrived.
    pub(super) loading: Option<Loading>,
}

/// Who keeps a lease.
enum Holder {
    /// Its user alone.
    User,
    /// Its user, and a request to its end.
    Both(LeasingRequest),
    /// A request alone: the user has released it.
    Request(LeasingRequest),
}

/// What a request has computed since the end of its lease.
#[derive(Clone, Copy, Debug)]
pub struct Publication<'a> {
    /// Tokens from the end of the lease on.
    pub tokens: &'a dyn Tokens,
    /// Their slots. A planner knows those of its requests.
    pub slots: Option<&'a IndexVec>,
    /// The working slot whose state is that of the last whole page's end.
    pub state: Option<i64>,
}

/// The result of a publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Tokens of the lease now.
    pub length: usize,
    /// Tokens that others had published in between: the cache has other slots for them, and those offered
    /// were freed.
    pub duplicates: usize,
    /// The cache's pages from the former end of the lease on.
    pub pages: Vec<Page>,
}

impl Lease {
    pub(super) fn new(
        (shared, allocator): (&Arc<CacheCore>, &Arc<TokenToKvPoolAllocator>),
        hold: Hold,
        clears: u64,
        namespace: Namespace,
        stream: Stream,
    ) -> Self {
        let (rest, loading) = (Loadable::default(), None);
        let state = Some(LeaseState { hold, holder: Holder::User, rest, loading });
        let (shared, allocator) = (Arc::clone(shared), Arc::clone(allocator));
        Self { shared, namespace, clears, stream, held: Mutex::new(state), allocator }
    }

    /// The namespace of the prefix.
    #[must_use]
    pub const fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Tokens of the prefix, in whole pages.
    ///
    /// # Errors
    /// [`ErrorKind::StaleBuffer`] after its release, or when the allocator was cleared.
    pub fn len(&self) -> Result<usize> {
        self.with(self.stream, |_, _, held| Ok(held.len()))
    }

    /// Tokens behind the prefix that the tier below had when it was made, and that [`Self::load`] brings
    /// back.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub fn loadable(&self) -> Result<usize> {
        self.with(self.stream, |_, _, held| Ok(held.rest.tokens.len()))
    }

    /// Takes note of what the tier below could add, for a new lease.
    pub(super) fn set_rest(&self, rest: Loadable) {
        if let Some(held) = lock(&self.held).as_mut() {
            held.rest = rest;
        }
    }

    /// Tokens whose K and V were cached when it was made, in whole pages: more than [`Self::len`] if the
    /// cache has states, but no snapshot at their end.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub fn kv_len(&self) -> Result<usize> {
        self.with(self.stream, |_, _, held| Ok(held.hold.found().max(held.len())))
    }

    /// Whether the prefix has no tokens.
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
        work: impl FnOnce(&Open<'_>, &mut CacheState, &mut LeaseState) -> Result<R>,
    ) -> Result<R> {
        self.with_request(stream, |open, cache, held| match held.holder {
            Holder::User | Holder::Both(_) => work(open, cache, held),
            Holder::Request(_) => Err(stale("it was released")),
        })
    }

    /// Like [`Self::with`], also if only the request needs the lease still.
    pub(super) fn with_request<R>(
        &self,
        stream: Stream,
        work: impl FnOnce(&Open<'_>, &mut CacheState, &mut LeaseState) -> Result<R>,
    ) -> Result<R> {
        let open = self.shared.open(&self.allocator, stream);
        // Dropped without locks.
        let ended;
        let mut guard = lock(&self.held);
        let Some(held) = guard.as_mut() else { return Err(stale("it was released")) };
        let mut cache = open.current();
        if cache.clears != self.clears {
            return Err(cleared());
        }
        ended = held.settle(&open, &mut cache, stream)?;
        let answer = work(&open, &mut cache, held);
        drop(cache);
        drop(guard);
        drop(ended);
        answer
    }

    /// The lock that `hold`, which is none of the lease any more, and what comes behind it are.
    pub(super) fn lock_of(&self, hold: Hold, loading: Option<Loading>, stream: Stream) -> PrefixLock {
        let shared = Arc::clone(&self.shared);
        PrefixLock { shared, hold: Some(hold), loading, clears: self.clears, stream }
    }

    /// Calls `work` with the hold of this lease, if it is of the cache `shared`.
    pub(super) fn with_hold<R>(
        &self,
        shared: &Arc<CacheCore>,
        stream: Stream,
        work: impl FnOnce(&mut CacheState, &Hold) -> Result<R>,
    ) -> Result<R> {
        if !Arc::ptr_eq(shared, &self.shared) {
            return Err(Error::config("the lease is of another prefix cache"));
        }
        self.with(stream, |_, cache, held| {
            held.expect_arrived()?;
            work(cache, &held.hold)
        })
    }

    /// The pages of the prefix from token `from` on.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub fn pages(&self, from: usize) -> Result<Vec<Page>> {
        self.with(self.stream, |_, cache, held| {
            let mut pages = cache.tree.pages(&held.hold, from.min(held.hold.len()));
            let coming = held.coming_pages();
            let skipped = from.saturating_sub(held.hold.len()) / cache.tree.page_size();
            pages.extend_from_slice(&coming[skipped.min(coming.len())..]);
            Ok(pages)
        })
    }

    /// The slots of the prefix: 1-D int32, valid on `stream`.
    ///
    /// # Errors
    /// See [`Self::len`]; see [`TokenToKvPoolAllocator::alloc`](crate::pool::TokenToKvPoolAllocator::alloc).
    pub fn slots(&self, stream: Stream) -> Result<TensorView> {
        self.show(&self.pages(0)?, stream)
    }

    /// The slots of pages of this cache: 1-D int32, valid on `stream`.
    ///
    /// # Errors
    /// See [`TokenToKvPoolAllocator::alloc`](crate::pool::TokenToKvPoolAllocator::alloc).
    pub fn show(&self, pages: &[Page], stream: Stream) -> Result<TensorView> {
        let page_size = crate::base::bounded::narrow(self.allocator.page_size());
        let mut slots = reserve(pages.len() * widen(page_size))?;
        put_slots_of(pages.iter().map(|page| page.number()), page_size, &mut slots);
        self.allocator.lock().show(slots, stream)
    }

    /// The track slot of the snapshot at the end of the prefix.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub fn state_slot(&self) -> Result<Option<StateSlot>> {
        self.with(self.stream, |_, cache, held| Ok(held.state(&cache.tree)))
    }

    /// Copies the snapshot at the end of the prefix to working slot `row`, or resets that for a prefix
    /// without tokens.
    ///
    /// # Errors
    /// See [`Self::len`] and [`GdnPool::copy_states`](crate::pool::GdnPool::copy_states);
    /// [`ErrorKind::Config`] when the cache has no states, or the prefix has tokens and no snapshot.
    pub fn restore(&self, row: i64, stream: Stream) -> Result<()> {
        let Some(states) = &self.shared.states else {
            return Err(Error::config("the prefix cache was made without states"));
        };
        // A lock of its own: the snapshot is not given up before it is copied.
        let (snapshot, lock) = self.with(stream, |_, cache, held| {
            let snapshot = held.state(&cache.tree);
            if snapshot.is_none() && held.len() > 0 {
                return Err(Error::config(format!(
                    "the lease has {} tokens and no snapshot of the state at their end",
                    held.len()
                )));
            }
            let loading = held.loading.as_ref().map(|loading| loading.share(loading.len));
            Ok((snapshot, self.lock_of(cache.tree.hold_again(&held.hold), loading, stream)))
        })?;
        // States come before the first layer.
        if let Some(loading) = lock.loading.as_ref().filter(|loading| !loading.has_arrived) {
            loading.tail.transfer().order(0, stream)?;
        }
        let source = snapshot.map_or(Source::Zeros, |slot| Source::Slot(slot.into()));
        states.set_state(row, source, stream)
    }

    /// Offers what the request has computed. Whole pages become the cache's, and the lease grows over them; a
    /// partial page at the end stays the caller's. The caller's slots of pages that others have published in
    /// between are freed.
    ///
    /// With a state, a snapshot of it is kept at the new end of the lease, if there is a track slot for it.
    /// It is copied first, without locks.
    ///
    /// # Errors
    /// See [`Self::len`]. [`ErrorKind::Config`] for a number that is no token id, and when there are not as
    /// many slots as tokens; [`ErrorKind::IndexOwnership`] for slots that are not live, are listed twice, are
    /// cached already, or do not fill pages in order; see [`GdnPool::copy_states`]. Nothing is changed,
    /// except that another snapshot may have been given up for the state.
    pub fn publish(&self, publication: &Publication<'_>, stream: Stream) -> Result<Published> {
        let tokens = publication.tokens.count();
        let pages = publication.slots.map(|slots| self.pages_for(tokens, slots, Rest::Kept)).transpose()?;
        // Dropped without locks: it may be the last owner.
        let mut planner = None;
        let Some(row) = publication.state else {
            return self.with(stream, |open, cache, held| {
                planner = held.holder.planner()?;
                self.publish_pages(open, (cache, held), publication.tokens, pages, planner.as_deref())
            });
        };
        // As they are now: others may run while the state is copied.
        let tokens = publication.tokens.to_vec(0..tokens)?;
        let snapshot = self.take_snapshot(&tokens, row, stream)?;
        self.with(stream, |open, cache, held| {
            planner = held.holder.planner()?;
            let tokens = &tokens.as_slice();
            let published = self.publish_pages(open, (cache, held), tokens, pages, planner.as_deref())?;
            // Others may have been as fast.
            if let Some(snapshot) = snapshot
                && cache.tree.snapshot(&held.hold).is_none()
            {
                cache.tree.set_snapshot(&mut held.hold, snapshot.keep());
                open.send_down(cache);
            }
            Ok(published)
        })
    }

    /// A copy of the state of `row`, for the end of the whole pages of `tokens` behind the lease. `None` if
    /// there is one already, or no track slot for it.
    fn take_snapshot(&self, tokens: &[i32], row: i64, stream: Stream) -> Result<Option<TakenSlot<'_>>> {
        let Some(states) = &self.shared.states else {
            return Err(Error::config("a state was published to a prefix cache without states"));
        };
        states.check_slot(row)?;
        let taken = self.with(stream, |_, cache, held| {
            held.expect_arrived()?;
            let found = cache.tree.find(&held.hold, &tokens)?;
            if !cache.tree.lacks_snapshot(&found, in_whole_pages(tokens.len(), &cache.tree)) {
                return Ok(None);
            }
            Ok(TakenSlot::new(states, cache, &mut held.hold))
        })?;
        if let Some(taken) = &taken {
            taken.make_ready(stream)?;
            states.set_state(taken.slot().into(), Source::Slot(row), stream)?;
        }
        Ok(taken)
    }

    /// Publishes what the request has computed, frees the partial page at the end, and ends the lease: the
    /// end of a request without a planner.
    ///
    /// # Errors
    /// See [`Self::publish`], also for the slots of the partial page; also [`ErrorKind::Config`] for the
    /// lease of a request that a planner has. Nothing is changed.
    pub fn finish(&self, tokens: &dyn Tokens, slots: &IndexVec, stream: Stream) -> Result<Published> {
        let pages = self.pages_for(tokens.count(), slots, Rest::Freed)?;
        let published = self.with(stream, |open, cache, held| {
            if let Some(request) = held.request() {
                let row = request.row();
                let text = format!("the lease is that of request row {row}; the planner finishes it");
                return Err(Error::config(text));
            }
            self.publish_pages(open, (cache, held), tokens, Some(pages), None)
        })?;
        self.release(stream);
        Ok(published)
    }

    /// The pages of the slots that are offered for so many tokens.
    fn pages_for(&self, tokens: usize, slots: &IndexVec, rest: Rest) -> Result<Vec<Page>> {
        if tokens != slots.len() {
            return Err(Error::config(format!(
                "{tokens} tokens and {} slots were published; the numbers must be equal",
                slots.len()
            )));
        }
        pages_of(slots, self.allocator.page_size(), rest)
    }

    /// Publishes whole pages, and frees the one behind them, if there is one; `planner` is that of the
    /// request.
    fn publish_pages(
        &self,
        open: &Open<'_>,
        (cache, held): (&mut CacheState, &mut LeaseState),
        tokens: &dyn Tokens,
        pages: Option<Vec<Page>>,
        planner: Option<&dyn LeaseKeeper>,
    ) -> Result<Published> {
        held.expect_arrived()?;
        let (begin, page_size) = (held.hold.len(), cache.tree.page_size());
        let whole = in_whole_pages(tokens.count(), &cache.tree);
        let found = cache.tree.find(&held.hold, tokens)?;
        let cached = cache.tree.found_pages(&found);
        let fresh = tokens.to_vec(found.len()..whole)?;
        tokens.check(whole..tokens.count())?;
        let published = open.slots.change(self.clears, |slots| {
            let mut request = planner.map(|planner| self.request_of(planner, held)).transpose()?;
            let mut pages = pages_of_request(request.as_deref(), begin..begin + tokens.count(), pages)?;
            let rest = pages.split_off((whole / page_size).min(pages.len()));
            let duplicates = self.hand_over(&mut pages, &rest, &cached, slots)?;
            if let Some(request) = &mut request {
                request.note_published(begin / page_size, &pages);
            }
            Ok((pages, duplicates * page_size))
        })?;
        let (pages, duplicates) = published.ok_or_else(cleared)?;
        let new = &pages[found.len() / page_size..];
        cache.counts.published += fresh.len();
        cache.tree.publish(&mut held.hold, found, fresh, new);
        if let Some(below) = &mut cache.below {
            below.note_publisher(open.slots.stream());
        }
        open.send_down(cache);
        held.rest = Loadable::default();
        cache.counts.duplicates += duplicates;
        Ok(Published { length: held.hold.len(), duplicates, pages })
    }

    /// The request that keeps this lease, locked.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when its planner does not have it any more.
    fn request_of<'a>(
        &self,
        planner: &'a dyn LeaseKeeper,
        held: &LeaseState,
    ) -> Result<Box<dyn LeasedRequest + 'a>> {
        let request = held.holder.request().and_then(|request| planner.leased_request(request.row(), self));
        request.ok_or_else(|| Error::config("the lease is of a request that its planner does not have"))
    }

    /// Makes whole pages the cache's, and frees `rest`. Where the cache has other pages for the same tokens,
    /// `cached`, they take the place of the first of `pages`, which are freed. Returns how many were.
    ///
    /// # Errors
    /// See [`SlotAllocator::cache`](crate::index::SlotAllocator::cache); nothing is changed.
    fn hand_over(
        &self,
        pages: &mut [Page],
        rest: &[Page],
        cached: &[Page],
        slots: &mut SlotTensors,
    ) -> Result<usize> {
        let (offered, new) = pages.split_at_mut(cached.len());
        let freed =
            if rest.is_empty() { Cow::Borrowed(&*offered) } else { Cow::Owned([&*offered, rest].concat()) };
        slots.slots_mut().cache(new, &freed, &self.shared.owner)?;
        let duplicates = offered.iter().zip(cached).filter(|(offered, cached)| offered != cached).count();
        offered.copy_from_slice(cached);
        Ok(duplicates)
    }

    /// The row of its request, if a planner has that.
    #[must_use]
    pub fn row(&self) -> Option<RequestRow> {
        let held = lock(&self.held);
        Some(held.as_ref()?.request()?.row())
    }

    /// Whether its pages are of `allocator`.
    pub(in crate::pool) fn is_of(&self, allocator: &Arc<TokenToKvPoolAllocator>) -> bool {
        Arc::ptr_eq(&self.allocator, allocator)
    }

    /// Makes it the lease of `request`, and returns its pages.
    ///
    /// # Errors
    /// See [`Self::len`]; also [`ErrorKind::Config`] when it is that of another request.
    pub(in crate::pool) fn bind(&self, request: LeasingRequest) -> Result<PageList> {
        self.with(self.stream, |_, cache, held| {
            if let Some(other) = held.request() {
                let row = other.row();
                return Err(Error::config(format!(
                    "the lease is that of request row {row} already; match again"
                )));
            }
            let mut pages = cache.tree.share_pages(&held.hold);
            pages.extend_from_slice(held.coming_pages());
            held.holder = Holder::Both(request);
            Ok(pages)
        })
    }

    /// Undoes [`Self::bind`]. Its planner exists still, so that no other request has the lease since.
    pub(in crate::pool) fn unbind(&self) {
        self.end_if(LeaseState::lose_request, self.stream);
    }

    /// Ends what the lease was to a request whose planner is gone. The lease may be another request's since.
    pub(in crate::pool) fn unbind_gone(&self) {
        self.end_if(|held| held.request().is_none() && held.lose_request(), self.stream);
    }

    /// Checks that the pages are still those of the allocator, whose lock the caller holds.
    ///
    /// # Errors
    /// [`ErrorKind::StaleBuffer`] when it was cleared.
    pub(in crate::pool) fn check_clears(&self, slots: &SlotTensors) -> Result<()> {
        if slots.clears() == self.clears { Ok(()) } else { Err(cleared()) }
    }

    /// Another lease of the first `len` tokens, in whole pages.
    ///
    /// # Errors
    /// See [`Self::len`].
    pub(in crate::pool) fn again(&self, len: usize, stream: Stream) -> Result<Self> {
        let (hold, loading) = self.with_request(stream, |_, cache, held| {
            let len = in_whole_pages(len, &cache.tree);
            Ok((cache.tree.hold_first(&held.hold, len), held.share_of(len)))
        })?;
        let of = (&self.shared, &self.allocator);
        let again = Self::new(of, hold, self.clears, self.namespace.clone(), stream);
        if let Some(held) = lock(&again.held).as_mut() {
            held.loading = loading;
        }
        Ok(again)
    }

    /// Shortens it to the whole pages of `len` tokens, or ends it if that is 0: its request was cut. Returns
    /// a lock of what it had, unless it has ended before.
    pub(in crate::pool) fn cut(&self, len: usize, stream: Stream) -> Option<PrefixLock> {
        if len == 0 {
            let held = lock(&self.held).take();
            return held.map(|held| self.lock_of(held.hold, held.loading, stream));
        }
        let before = self.with_request(stream, |_, cache, held| {
            let len = in_whole_pages(len, &cache.tree);
            let (shorter, share) = (cache.tree.hold_first(&held.hold, len), held.share_of(len));
            let loading = std::mem::replace(&mut held.loading, share);
            Ok((std::mem::replace(&mut held.hold, shorter), loading))
        });
        before.ok().map(|(hold, loading)| self.lock_of(hold, loading, stream))
    }

    /// Ends the lease. Later calls of it fail; a second release does nothing. The prefix of a planner's
    /// request stays until the request is finished.
    pub fn release(&self, stream: Stream) {
        self.end_if(LeaseState::lose_user, stream);
    }

    /// Ends the lease if `is_over` says so. One lock for both: in between it could become that of a request.
    fn end_if(&self, is_over: impl FnOnce(&mut LeaseState) -> bool, stream: Stream) {
        let held = lock(&self.held).take_if(is_over);
        let Some(mut held) = held else { return };
        // Dropped without locks.
        let mut ended = None;
        let open = self.shared.open(&self.allocator, stream);
        if held.loading.is_some() {
            let mut cache = open.current();
            if cache.clears == self.clears {
                ended = held.settle(&open, &mut cache, stream).unwrap_or_default();
            }
        }
        let LeaseState { hold, loading, .. } = held;
        open.release(hold, self.clears);
        if let Some(before) = loading.and_then(Loading::into_before) {
            open.release(before, self.clears);
        }
        drop(ended);
    }
}

impl LeaseState {
    /// Tokens of the prefix.
    pub(super) fn len(&self) -> usize {
        self.hold.len() + self.coming().map_or(0, |loading| loading.len)
    }

    /// What is on its way.
    fn coming(&self) -> Option<&Loading> {
        self.loading.as_ref().filter(|loading| !loading.has_arrived)
    }

    /// The pages of the prefix that are on their way.
    fn coming_pages(&self) -> &[Page] {
        self.coming().map_or(&[], |loading| loading.tail.pages(loading.len))
    }

    /// The snapshot at the end of the prefix.
    fn state(&self, tree: &Tree) -> Option<StateSlot> {
        match self.coming() {
            Some(loading) => loading.tail.state(loading.len),
            None => tree.snapshot(&self.hold),
        }
    }

    /// A share of what is on its way, or has come, for the first `len` tokens.
    fn share_of(&self, len: usize) -> Option<Loading> {
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
    fn settle(&mut self, open: &Open<'_>, cache: &mut CacheState, stream: Stream) -> Result<Option<Loading>> {
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
    fn lose_user(&mut self) -> bool {
        let request = self.request().cloned();
        let is_over = request.is_none();
        self.holder = request.map_or(Holder::User, Holder::Request);
        is_over
    }

    /// Its request, if it has one, does not keep it any more. Returns whether that was its only holder.
    fn lose_request(&mut self) -> bool {
        matches!(std::mem::replace(&mut self.holder, Holder::User), Holder::Request(_))
    }
}

impl Holder {
    const fn request(&self) -> Option<&LeasingRequest> {
        match self {
            Self::User => None,
            Self::Both(request) | Self::Request(request) => Some(request),
        }
    }

    /// The planner of the request.
    ///
    /// # Errors
    /// See [`LeasingRequest::planner`].
    fn planner(&self) -> Result<Option<Arc<dyn LeaseKeeper>>> {
        self.request().map(LeasingRequest::planner).transpose()
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

/// A track slot that a snapshot is copied to. Dropping it before [`TakenSlot::keep`] gives it back.
pub(super) struct TakenSlot<'a> {
    states: &'a GdnPool,
    slot: Option<StateSlot>,
    /// What reads the snapshot that was there.
    reader: Option<Arc<Transfer>>,
}

impl<'a> TakenSlot<'a> {
    /// A free one, or that of the snapshot that goes first.
    pub(super) fn new(states: &'a GdnPool, cache: &mut CacheState, hold: &mut Hold) -> Option<Self> {
        let free = states.alloc_track_slot();
        let slot = free.or_else(|| cache.tree.evict_snapshot(hold))?;
        let reader = cache.below.as_ref().and_then(|below| below.write_of(slot));
        Some(Self { states, slot: Some(slot), reader })
    }

    /// Lets what is enqueued on `stream` from now on write to it; without a device, the calling thread.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when a driver call fails.
    pub(super) fn make_ready(&self, stream: Stream) -> Result<()> {
        self.reader.as_ref().map_or(Ok(()), |reader| reader.precede(stream))
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
            free_states(self.states, &[slot]);
        }
    }
}

/// The pages of positions `range`: those that the request has, which those that were given must equal.
fn pages_of_request(
    request: Option<&dyn LeasedRequest>,
    range: Range<usize>,
    given: Option<Vec<Page>>,
) -> Result<Vec<Page>> {
    match (request, given) {
        (None, None) => Err(Error::config("slots are needed for a lease that no planner has")),
        (None, Some(given)) => Ok(given),
        (Some(request), given) => {
            let pages = request.pages(range.start, range.end)?;
            if given.is_some_and(|given| given != pages) {
                return Err(Error::config("the slots published are not those of the request"));
            }
            Ok(pages)
        }
    }
}

/// The part of `len` tokens that fills pages.
pub(super) const fn in_whole_pages(len: usize, tree: &Tree) -> usize {
    len / tree.page_size() * tree.page_size()
}

pub(super) fn cleared() -> Error {
    stale("the allocator was cleared, and its slots are gone")
}

#[cold]
fn stale(why: &str) -> Error {
    Error::new(ErrorKind::StaleBuffer, format!("the lease cannot be used: {why}"))
}
