//! Prefixes that come back from the tier below.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{Epoch, Error, ErrorKind, Page, Result, StateSlot, try_to_vec};
use crate::cache::{DevicePresence, Hold, LowerTierContents, PageHash};
use crate::memory::Stream;
use crate::pool::HostTier;
use crate::pool::host_tier::HeldPieces;
use crate::transfer::Transfer;

use super::lease::cleared_error;
use super::lease_state::LeaseState;
use super::lock::PrefixLock;
use super::taken_slot::TakenSlot;
use super::tier_link::ReleasedPieces;
use super::{CacheCore, CacheState, Lease};
use crate::pool::slot_tensors::CopiedPages;

/// The tokens that a tier could add to a prefix.
#[derive(Debug, Default)]
pub(super) struct Loadable {
    /// Tokens behind the prefix, in whole pages.
    pub(super) tokens: Vec<i32>,
    /// The keys of their pages.
    pub(super) keys: Vec<PageHash>,
    /// Keeps the pages in the tier, if ranks have agreed on them.
    pub(super) kept: Option<HeldPieces>,
}

/// A load that leases share: it copies a part of a prefix from the tier below to pages of the cache. The tree
/// gets these pages when they are complete.
///
/// Drop it without locks.
pub(super) struct SharedLoad {
    shared: Arc<CacheCore>,
    /// The number of times that the allocator had been cleared.
    epoch: Epoch,
    /// The stream on which its pages are freed if it is given up.
    stream: Stream,
    /// The keys of the pages, which begin where the holds of the leases end.
    keys: Vec<PageHash>,
    tokens: Vec<i32>,
    pages: Vec<Page>,
    state: Option<StateSlot>,
    copies: Copies,
    arrived: RankedMutex<Option<ArrivedLoad>>,
}

/// The outcome of copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Outcome {
    #[default]
    InFlight,
    Arrived,
    GivenUp,
}

/// The result of a complete load.
#[derive(Debug)]
struct ArrivedLoad {
    /// Keeps it in the tree.
    hold: Hold,
    /// Pages that the tree did not take: it has others of the same contents. Requests may use them.
    spare: Vec<Page>,
    /// The snapshot, if the tree did not take it.
    state: Option<StateSlot>,
}

/// The share of a load that belongs to a lease.
#[derive(Debug)]
pub(super) struct LeaseLoad {
    pub(super) shared: Arc<SharedLoad>,
    /// The number of tokens after the hold of the lease that belong to the lease.
    pub(super) len: usize,
    /// The hold to which the lease returns if the load ends early, unless that is its present one.
    pub(super) fallback: Option<Hold>,
    /// Whether the hold of the lease has moved to its end.
    pub(super) has_arrived: bool,
}

/// A load of the pages of a prefix from the tier below, layer by layer.
///
/// The pages belong to the lease that loads them from the beginning. Call [`Load::wait_layer`] before work
/// that uses a layer.
pub struct Load {
    lease: Weak<Lease>,
    /// `None` if there was nothing to load.
    copies: Option<Copies>,
    len: usize,
    is_given_up: AtomicBool,
}

/// The copies of a load, and their outcome.
#[derive(Clone)]
struct Copies {
    transfer: Arc<Transfer>,
    outcome: Arc<RankedMutex<Outcome>>,
    /// Whether a caller has waited for the last layer, or has been told that the load is complete. Until then
    /// the load counts as in flight, so that the results of other calls do not depend on when it ends.
    is_known_complete: Arc<AtomicBool>,
}

impl Copies {
    /// See [`Transfer::make_stream_wait`].
    fn make_stream_wait(&self, layer: usize, stream: Stream) -> Result<()> {
        self.transfer.make_stream_wait(layer, stream)?;
        if layer + 1 == self.transfer.steps() {
            self.is_known_complete.store(true, Ordering::Release);
        }
        Ok(())
    }
}

impl Load {
    fn new(lease: Weak<Lease>, shared: Option<&SharedLoad>, len: usize) -> Self {
        let copies = shared.map(|load| load.copies.clone());
        Self { lease, copies, len, is_given_up: AtomicBool::new(false) }
    }

    /// Returns the number of tokens that it adds to the lease.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there was nothing to load.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes `stream` wait until the pages of a layer and of the layers before it have arrived; without a
    /// device, the calling thread waits. The host does not wait for a device.
    ///
    /// # Errors
    /// See [`Transfer::make_stream_wait`].
    pub fn wait_layer(&self, layer: usize, stream: Stream) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.make_stream_wait(layer, stream))
    }

    /// Returns whether all layers have arrived. Then the cache has the pages, for other requests too.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if it was cancelled or failed, or its lease has ended before: then the request
    /// computes; [`ErrorKind::Driver`] when the device has failed.
    pub fn query(&self, stream: Stream) -> Result<bool> {
        let Some(Copies { transfer, outcome, is_known_complete }) = &self.copies else { return Ok(true) };
        if !transfer.is_over()? {
            return Ok(false);
        }
        is_known_complete.store(true, Ordering::Release);
        if let Some(lease) = self.lease.upgrade() {
            lease.complete_load(stream);
        }
        let is_given_up = self.is_given_up.load(Ordering::Acquire);
        if *outcome.lock() == Outcome::Arrived && !is_given_up {
            return Ok(true);
        }
        Err(Error::new(ErrorKind::State, format!("the load of {} tokens has ended early", self.len)))
    }

    /// Gives up the load if it is not complete: the lease ends where it did before, and the pages are free,
    /// and their next owner comes after the copies. Does nothing if the load is complete, or the lease was released.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when a planner has the lease, whose request uses the pages.
    pub fn cancel(&self, stream: Stream) -> Result<()> {
        let Some(lease) = self.lease.upgrade() else { return Ok(()) };
        if lease.cancel_load(stream)? {
            self.is_given_up.store(true, Ordering::Release);
        }
        Ok(())
    }
}

impl fmt::Debug for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Load").field("len", &self.len).finish_non_exhaustive()
    }
}

/// The steps that are left for a load.
enum LoadStart<'a> {
    /// Nothing: there is nothing to load, or another load does it.
    Done(Load),
    /// Nothing can be loaded: there is no track slot for the state, or the tier has lost a page since. The
    /// lock of the prefix on the device is dropped without other locks.
    Short { _lock: PrefixLock },
    /// Take pages, and copy to them.
    Copy(Box<LoadRequest<'a>>),
}

/// The part of a prefix that a load is about to bring back.
struct LoadRequest<'a> {
    /// Tokens of the lease.
    begin: usize,
    /// The lock of the prefix that is on the device.
    lock: PrefixLock,
    keys: Vec<PageHash>,
    tokens: Vec<i32>,
    pieces: HeldPieces,
    state: Option<TakenSlot<'a>>,
    tier: Arc<HostTier>,
}

impl Lease {
    /// Shortens what the tier below could add to what all ranks have, and keeps that in the tier until it is
    /// loaded, or the lease ends or grows. For ranks with a store below: it may bring other pages to their
    /// tiers. `least` gets the tokens that this rank has, with those of the lease, and returns the smallest of
    /// these numbers of all ranks. It is called without locks, and equally often on all ranks: once or, with
    /// states, until they agree.
    ///
    /// # Errors
    /// See [`Self::len`]; [`ErrorKind::Config`] for a result that is below the length of the lease, which
    /// ranks that make the same calls have in common, or above what this rank has; the error of `least`.
    pub fn agree(&self, mut least: impl FnMut(usize) -> Result<usize>) -> Result<()> {
        let (len, is_stateful) = (self.len()?, self.shared.states.is_some());
        let (mut have, mut before) = (self.keep_loadable(usize::MAX)?, None);
        loop {
            let all = least(len + have)?;
            let agreed = all.checked_sub(len).filter(|agreed| *agreed <= have).ok_or_else(|| {
                Error::config(format!(
                    "agree returned {all}; this rank has {}, of which {len} are on its device",
                    len + have
                ))
            })?;
            have = self.keep_loadable(agreed)?;
            // The second time, all ranks have a snapshot there.
            if !is_stateful || before == Some(all) {
                return Ok(());
            }
            before = Some(all);
        }
    }

    /// Shortens what the tier below could add to at most `limit` tokens, and keeps it in the tier. Returns the
    /// number of tokens.
    fn keep_loadable(&self, limit: usize) -> Result<usize> {
        self.with(self.stream(), |_, cache, lease| {
            let Some(below) = &cache.below else { return Ok(0) };
            let (is_stateful, page_size) = (cache.tree.is_stateful(), cache.tree.page_size());
            let Loadable { mut tokens, mut keys, kept: before } = std::mem::take(&mut lease.loadable);
            let mut end = limit.min(tokens.len()) / page_size;
            let mut kept = None;
            while end > 0 && kept.is_none() {
                let found = cache.tree.find(&lease.hold, &&tokens[..end * page_size])?.len() / page_size;
                let contents = below.tier.contents();
                let run = keys[found..end].iter().take_while(|key| contents.has_page(key)).count();
                let has_end = |end: &usize| !is_stateful || contents.has_state(&keys[end - 1]);
                end = (1..=found + run).rev().find(has_end).unwrap_or(0);
                // The call below locks the tier.
                drop(contents);
                if let Some(last) = end.checked_sub(1) {
                    let state = is_stateful.then(|| &keys[last]);
                    kept = below.tier.hold(&keys[found.min(end)..end], state);
                }
            }
            tokens.truncate(end * page_size);
            keys.truncate(end);
            lease.loadable = Loadable { tokens, keys, kept };
            drop(before);
            Ok(end * page_size)
        })
    }

    /// Loads the tokens that the tier below has after the prefix, at most `limit` of them. The lease has
    /// their pages from now on; call [`Load::wait_layer`] before work that uses a layer of them. Pages that
    /// other leases are loading or have loaded are not loaded twice. `None` if there are not enough slots, or
    /// no track slot for the state.
    ///
    /// The copies run behind the work enqueued on `stream`.
    ///
    /// # Errors
    /// See [`Self::len`]; also [`ErrorKind::Config`] when a planner has the lease, or it is loading already;
    /// as [`TokenToKvPoolAllocator::alloc`](crate::pool::TokenToKvPoolAllocator::alloc);
    /// [`ErrorKind::Driver`] while `stream` is being captured, and when a driver call fails. Nothing is
    /// changed, except that other prefixes may have been evicted for it.
    pub fn load(self: &Arc<Self>, limit: usize, stream: Stream) -> Result<Option<Load>> {
        if let Some(gpu) = self.allocator.gpu() {
            gpu.check_not_capturing(stream, "a load, whose copies run beside it,")?;
        }
        // Dropped without locks.
        let loads = self.shared.state.lock().shared_loads();
        let request = match self.begin_load(limit, &loads, stream)? {
            LoadStart::Short { .. } => return Ok(None),
            LoadStart::Done(load) => return Ok(Some(load)),
            LoadStart::Copy(request) => *request,
        };
        if let Some(state) = &request.state {
            // Before anything can fail: the track slot may be given back.
            state.make_ready(stream)?;
        }
        let (count, owner) = (request.keys.len(), &self.shared.owner);
        let Some(pages) = self.allocator.take_cached_pages(count, owner, self.epoch, stream)? else {
            return Ok(None);
        };
        let begin = request.begin;
        let (load, lock) = self.start_copies(request, pages, stream)?;
        let added = self.extend_lease(&load, begin, lock, stream)?;
        Ok(Some(Load::new(Arc::downgrade(self), Some(&load), added)))
    }

    /// Enqueues the copies of a load to `pages`. Also returns the lock of the prefix that is on the device.
    fn start_copies(
        &self,
        request: LoadRequest<'_>,
        pages: Vec<Page>,
        stream: Stream,
    ) -> Result<(Arc<SharedLoad>, PrefixLock)> {
        let LoadRequest { lock, keys, tokens, pieces, state, tier, .. } = request;
        let call = self.shared.begin_call(&self.allocator, stream);
        let slot = state.as_ref().map(TakenSlot::slot);
        // Under one lock: the allocator is not cleared in between, and has the copies when it is.
        let started = call.slots.change(self.epoch, |slots| {
            let started = tier.load(&pieces, &pages, slot, stream);
            match &started {
                Ok(transfer) => slots.add_writer(transfer),
                Err(_) => slots.slots_mut().release_cached(&pages, None, &self.shared.owner),
            }
            started
        })?;
        let transfer = started.ok_or_else(cleared_error)?;
        drop(call);
        // Later copies to their places run behind this one.
        drop(pieces);
        self.shared.change_loading(self.epoch, |loading| loading + pages.len());
        let load = Arc::new(SharedLoad {
            shared: Arc::clone(&self.shared),
            epoch: self.epoch,
            stream,
            keys,
            tokens,
            pages,
            state: state.map(TakenSlot::keep),
            copies: Copies {
                transfer,
                outcome: Arc::new(RankedMutex::new(LockRank::LoadOutcome, Outcome::default())),
                is_known_complete: Arc::default(),
            },
            arrived: RankedMutex::new(LockRank::LoadArrival, None),
        });
        Ok((load, lock))
    }

    /// Extends the lease, which had `begin` tokens, to the prefix that `lock` holds and, after that, by
    /// `load`. Returns the number of tokens added.
    fn extend_lease(
        &self,
        load: &Arc<SharedLoad>,
        begin: usize,
        mut lock: PrefixLock,
        stream: Stream,
    ) -> Result<usize> {
        self.with(stream, |_, cache, lease| {
            check_idle(lease)?;
            if lease.hold.len() != begin {
                return Err(Error::config(format!(
                    "the lease changed from {begin} to {} tokens while it was to load",
                    lease.hold.len()
                )));
            }
            let (hold, len) = (lock.hold.take().expect("it is a lock still"), load.tokens.len());
            let added = hold.len() + len - lease.hold.len();
            let fallback = Some(std::mem::replace(&mut lease.hold, hold));
            lease.load = Some(LeaseLoad { shared: Arc::clone(load), len, fallback, has_arrived: false });
            lease.loadable = Loadable::default();
            cache.counts.loaded += len;
            cache.below.iter_mut().for_each(|below| below.add_load(load));
            Ok(added)
        })
    }

    /// Decides what to load, and locks it in the tier. `loads` are those in flight for other leases.
    fn begin_load(
        self: &Arc<Self>,
        limit: usize,
        loads: &[Arc<SharedLoad>],
        stream: Stream,
    ) -> Result<LoadStart<'_>> {
        self.with(stream, |call, cache, lease| {
            check_idle(lease)?;
            let nothing = || Ok(LoadStart::Done(Load::new(Weak::new(), None, 0)));
            let Some(tier) = cache.below.as_ref().map(|below| Arc::clone(&below.tier)) else {
                return nothing();
            };
            let (is_stateful, page_size) = (cache.tree.is_stateful(), cache.tree.page_size());
            let (keys, tokens) = (&lease.loadable.keys, &lease.loadable.tokens);
            let max = limit.min(tokens.len()) / page_size;
            let found = cache.tree.find(&lease.hold, &&tokens[..max * page_size])?.len() / page_size;
            let contents = tier.contents();
            let run = keys[found..max].iter().take_while(|key| contents.has_page(key)).count();
            let has_end = |end: &usize| !is_stateful || *end > 0 && contents.has_state(&keys[end - 1]);
            let Some(end) = (0..=found + run).rev().find(has_end).filter(|end| *end > 0) else {
                return nothing();
            };
            // The calls below lock the tier.
            drop(contents);
            let tokens = try_to_vec(&tokens[..end * page_size])?;
            let found = cache.tree.find(&lease.hold, &tokens.as_slice())?;
            let (cached, begin) = (found.len(), lease.hold.len());
            let (keys, state_key) = (try_to_vec(&keys[cached / page_size..end])?, keys[end - 1]);
            let mut hold = cache.tree.hold_again(&lease.hold);
            cache.tree.publish(&mut hold, found, Vec::new(), &[]);
            call.copy_offers_to_tier(cache);
            if keys.is_empty() && !is_stateful {
                lease.loadable = Loadable::default();
                let evicted = cache.tree.release(std::mem::replace(&mut lease.hold, hold));
                call.give_back(cache, evicted);
                return Ok(LoadStart::Done(Load::new(Weak::new(), None, cached)));
            }
            let tokens = try_to_vec(&tokens[cached..])?;
            if let Some(shared) = loads.iter().find(|load| load.covers(&keys, is_stateful)) {
                let fallback = Some(std::mem::replace(&mut lease.hold, hold));
                let (shared, len) = (Arc::clone(shared), tokens.len());
                let load = Load::new(Arc::downgrade(self), Some(&shared), cached + len);
                (lease.loadable, lease.load) =
                    (Loadable::default(), Some(LeaseLoad { shared, len, fallback, has_arrived: false }));
                return Ok(LoadStart::Done(load));
            }
            let lock = self.lock_of(hold, None, stream);
            let state = match self.shared.states.as_ref().filter(|_| is_stateful) {
                None => None,
                Some(states) => match TakenSlot::new(states, &self.shared.owner, cache, &mut lease.hold) {
                    None => return Ok(LoadStart::Short { _lock: lock }),
                    taken => taken,
                },
            };
            let state_key = state.as_ref().map(|_| &state_key);
            let Some(pieces) = tier.hold(&keys, state_key) else {
                return Ok(LoadStart::Short { _lock: lock });
            };
            Ok(LoadStart::Copy(Box::new(LoadRequest { begin, lock, keys, tokens, pieces, state, tier })))
        })
    }

    /// Completes a load that is over.
    fn complete_load(&self, stream: Stream) {
        // Does nothing for a lease that has ended.
        let _ = self.with_request(stream, |_, _, _| Ok(()));
    }

    /// Gives up the load in flight. Returns whether there was one.
    fn cancel_load(&self, stream: Stream) -> Result<bool> {
        let ended = self.with(stream, |call, cache, lease| {
            if let (Err(_), Some(request)) = (lease.check_arrived(), lease.request()) {
                let text =
                    format!("the lease is that of request row {}, which uses the pages", request.row());
                return Err(Error::config(text));
            }
            Ok(lease.give_up_load(call, cache))
        });
        match ended {
            Err(error) if error.kind() == ErrorKind::StaleBuffer => Ok(false),
            ended => ended.map(|ended| ended.is_some()),
        }
    }
}

/// Checks that a lease can load.
fn check_idle(lease: &LeaseState) -> Result<()> {
    lease.check_arrived()?;
    lease.request().map_or(Ok(()), |request| {
        let text = format!("the lease is that of request row {} already; load before", request.row());
        Err(Error::config(text))
    })
}

impl SharedLoad {
    /// Returns whether the load is known to be complete, in the order of `stream`.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub(super) fn is_complete_on(&self, stream: Stream) -> Result<bool> {
        let is_known = self.copies.is_known_complete.load(Ordering::Acquire);
        Ok(is_known && self.copies.transfer.is_complete_on(stream)?)
    }

    /// Returns whether the load has ended before it was complete.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub(super) fn has_failed(&self) -> Result<bool> {
        // Asked first, so that a load that ends between the two questions does not count as failed.
        let is_over = self.copies.transfer.is_over()?;
        Ok(is_over && !self.copies.transfer.is_complete()?)
    }

    /// Makes `stream` wait for the state, which comes before the first layer.
    ///
    /// # Errors
    /// See [`Transfer::make_stream_wait`].
    pub(super) fn wait_state(&self, stream: Stream) -> Result<()> {
        self.copies.make_stream_wait(0, stream)
    }

    /// Returns whether this load has the pages of `keys`, which begin where it does, and the tree does not
    /// have them yet. With `must_end`, the load also has to end with them.
    pub(super) fn covers(&self, keys: &[PageHash], must_end: bool) -> bool {
        // A state alone has no keys from which its prefix would follow.
        let is_one = !keys.is_empty() && (!must_end || self.keys.len() == keys.len());
        is_one && self.keys.starts_with(keys) && self.can_arrive()
    }

    /// Returns the pages of its first `len` tokens.
    pub(super) fn pages(&self, len: usize) -> &[Page] {
        let page_size = self.tokens.len() / self.pages.len().max(1);
        &self.pages[..len.checked_div(page_size).unwrap_or(0)]
    }

    /// Returns whether the load is in flight or complete, and its pages are not in the tree yet.
    fn can_arrive(&self) -> bool {
        self.arrived.lock().is_none() && !self.has_failed().unwrap_or(true)
    }

    /// The pages, until the tree has them.
    pub(super) fn pages_in_flight(&self) -> Vec<Page> {
        if self.arrived.lock().is_some() { Vec::new() } else { self.pages.clone() }
    }

    /// Returns the snapshot behind its first `len` tokens.
    pub(super) fn state(&self, len: usize) -> Option<StateSlot> {
        self.state.filter(|_| len == self.tokens.len())
    }

    /// Publishes the pages that have arrived in the tree, after `hold`, unless that was done before.
    fn arrive(&self, cache: &mut CacheState, hold: &Hold) {
        let mut arrived = self.arrived.lock();
        if arrived.is_some() {
            return;
        }
        let tree = &mut cache.tree;
        let found = tree.find(hold, &self.tokens.as_slice()).expect("they are in memory");
        let (cached, mut own) = (found.len() / tree.page_size(), tree.hold_again(hold));
        tree.publish(&mut own, found, self.tokens[found.len()..].to_vec(), &self.pages[cached..]);
        let mut state = self.state;
        if let Some(slot) = state.filter(|_| tree.snapshot(&own).is_none()) {
            tree.set_snapshot(&mut own, slot);
            state = None;
        }
        if let Some(below) = &cache.below {
            below.tier.set_device_presence(self.keys.iter().rev(), DevicePresence::Present);
        }
        cache.loading_pages -= self.pages.len() - cached;
        *self.copies.outcome.lock() = Outcome::Arrived;
        *arrived = Some(ArrivedLoad { hold: own, spare: self.pages[..cached].to_vec(), state });
    }
}

impl LeaseLoad {
    /// Returns the hold to which the lease would have returned.
    pub(super) fn into_fallback(self) -> Option<Hold> {
        self.fallback
    }

    /// Creates another lease's share of the first `len` tokens.
    pub(super) fn share(&self, len: usize) -> Self {
        Self { shared: Arc::clone(&self.shared), len, fallback: None, has_arrived: self.has_arrived }
    }

    /// Moves `hold` to the end of the pages that have arrived. Returns the fallback, which is no longer
    /// needed.
    pub(super) fn settle(&mut self, cache: &mut CacheState, hold: &mut Hold) -> Result<Option<Hold>> {
        self.shared.arrive(cache, hold);
        let found = cache.tree.find(hold, &&self.shared.tokens[..self.len])?;
        cache.tree.publish(hold, found, Vec::new(), &[]);
        self.has_arrived = true;
        Ok(self.fallback.take())
    }
}

impl Drop for SharedLoad {
    fn drop(&mut self) {
        self.copies.transfer.cancel();
        let arrived = self.arrived.get_mut().take();
        let Some(allocator) = self.shared.allocator.upgrade() else {
            // There are no pages to give back, but the copies still write to the memory of the pools.
            let _ = self.copies.transfer.wait();
            let state = arrived.map_or(self.state, |arrived| arrived.state);
            return self.shared.free_states(state.as_slice());
        };
        let call = self.shared.begin_call(&allocator, self.stream);
        let (hold, pages, state) = if let Some(ArrivedLoad { hold, spare, state }) = arrived {
            (Some(hold), spare, state)
        } else {
            *self.copies.outcome.lock() = Outcome::GivenUp;
            (None, std::mem::take(&mut self.pages), self.state)
        };
        self.shared.change_loading(self.epoch, |loading| loading - pages.len());
        let copy = &self.copies.transfer;
        let page_copies = vec![CopiedPages { copy: Arc::clone(copy), pages: pages.clone() }];
        let states = state.map(|state| (state, Some(Arc::clone(copy)))).into_iter().collect();
        call.release_pieces(self.epoch, ReleasedPieces { pages, page_copies, states });
        if let Some(hold) = hold {
            call.release(hold, self.epoch);
        }
    }
}

impl fmt::Debug for SharedLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedLoad").field("pages", &self.pages.len()).finish_non_exhaustive()
    }
}
