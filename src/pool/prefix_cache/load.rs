//! Prefixes that come back from the tier below.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::base::{Error, ErrorKind, Page, Result, try_to_vec};
use crate::cache::{LowerTierContents, PageHash};
use crate::memory::Stream;
use crate::pool::HostTier;
use crate::pool::host_tier::{HeldPieces, PieceKind};

use super::cache_core::{CacheCall, CacheState};
use super::lease::Lease;
use super::lease_state::LeaseState;
use super::loading::{Copies, LeaseLoad, Loadable, LoadedPages, SharedLoad};
use super::lock::PrefixLock;
use super::stale::cleared_error;
use super::taken_slot::TakenSlot;

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

impl Load {
    fn new(lease: Weak<Lease>, shared: Option<&SharedLoad>, len: usize) -> Self {
        let copies = shared.map(SharedLoad::copies);
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
    /// See [`Transfer::make_stream_wait`](crate::transfer::Transfer::make_stream_wait).
    pub fn wait_layer(&self, layer: usize, stream: Stream) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.make_stream_wait(layer, stream))
    }

    /// Returns whether all layers have arrived. Then the cache has the pages, for other requests too.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if it was cancelled or failed, or its lease has ended before: then the request
    /// computes; [`ErrorKind::Driver`] when the device has failed.
    pub fn query(&self, stream: Stream) -> Result<bool> {
        let Some(copies) = &self.copies else { return Ok(true) };
        if !copies.is_over()? {
            return Ok(false);
        }
        if let Some(lease) = self.lease.upgrade() {
            lease.complete_load(stream);
        }
        let is_given_up = self.is_given_up.load(Ordering::Acquire);
        if copies.have_arrived() && !is_given_up {
            return Ok(true);
        }
        Err(Error::state(format!("the load of {} tokens has ended early", self.len)))
    }

    /// Gives up the load if it is not complete: the lease ends where it did before, and the pages are free,
    /// and their next owner comes after the copies. Does nothing if the load is complete, or the lease was released.
    ///
    /// # Errors
    /// [`ErrorKind::State`] when a planner has the lease, whose request uses the pages.
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
    /// Nothing can be loaded: there is no track slot for the state, or the tier has lost a page since.
    Short,
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
    /// See [`Self::len`]; [`ErrorKind::Argument`] for a result that is below the length of the lease, which
    /// ranks that make the same calls have in common, or above what this rank has; the error of `least`.
    pub fn agree(&self, mut least: impl FnMut(usize) -> Result<usize>) -> Result<()> {
        let (len, is_stateful) = (self.len()?, self.shared.states.is_some());
        self.check_tier(usize::MAX, self.stream())?;
        let (mut have, mut before) = (self.keep_loadable(usize::MAX)?, None);
        loop {
            let all = least(len + have)?;
            let agreed = all.checked_sub(len).filter(|agreed| *agreed <= have).ok_or_else(|| {
                Error::argument(format!(
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
    /// See [`Self::len`]; also [`ErrorKind::State`] when a planner has the lease, or it is loading already;
    /// as [`TokenToKvPoolAllocator::alloc`](crate::pool::TokenToKvPoolAllocator::alloc);
    /// [`ErrorKind::Driver`] while `stream` is being captured, and when a driver call fails. Nothing is
    /// changed, except that other prefixes may have been evicted for it.
    pub fn load(self: &Arc<Self>, limit: usize, stream: Stream) -> Result<Option<Load>> {
        if let Some(gpu) = self.allocator.gpu() {
            gpu.check_not_capturing(stream, "a load, whose copies run beside it,")?;
        }
        let limit = self.check_tier(limit, stream)?;
        let request = match self.begin_load(limit, stream)? {
            LoadStart::Short => return Ok(None),
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
        let started = call.slots.change(self.epoch, |mut slots| {
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
        self.shared.add_loading(self.epoch, pages.len());
        let loaded = LoadedPages { keys, tokens, pages, state: state.map(TakenSlot::keep) };
        let home = Arc::clone(&self.shared) as _;
        let load = Arc::new(SharedLoad::new(home, self.epoch, stream, loaded, transfer));
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
                return Err(Error::state(format!(
                    "the lease changed from {begin} to {} tokens during load(); call load() again",
                    lease.hold.len()
                )));
            }
            let (hold, len) = (lock.hold.take().expect("it is a lock still"), load.len());
            let added = hold.len() + len - lease.hold.len();
            let fallback = Some(std::mem::replace(&mut lease.hold, hold));
            lease.load = Some(LeaseLoad { shared: Arc::clone(load), len, fallback, has_arrived: false });
            lease.loadable = Loadable::default();
            cache.counts.loaded += len;
            cache.below.iter_mut().for_each(|below| below.add_load(load));
            Ok(added)
        })
    }

    /// Decides what to load, and locks it in the tier.
    fn begin_load(self: &Arc<Self>, limit: usize, stream: Stream) -> Result<LoadStart<'_>> {
        self.with(stream, |call, cache, lease| {
            check_idle(lease)?;
            let nothing = || Ok(LoadStart::Done(Load::new(Weak::new(), None, 0)));
            let Some(tier) = cache.below.as_ref().map(|below| Arc::clone(&below.tier)) else {
                return nothing();
            };
            let (is_stateful, page_size) = (cache.tree.is_stateful(), cache.tree.page_size());
            let Some((_, end)) = find_loadable(&tier, cache, lease, limit)? else { return nothing() };
            let (keys, tokens) = (&lease.loadable.keys, &lease.loadable.tokens);
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
            if let Some(shared) = find_load(call, cache, |load| load.covers(&keys, is_stateful)) {
                let fallback = Some(std::mem::replace(&mut lease.hold, hold));
                let len = tokens.len();
                let load = Load::new(Arc::downgrade(self), Some(&shared), cached + len);
                (lease.loadable, lease.load) =
                    (Loadable::default(), Some(LeaseLoad { shared, len, fallback, has_arrived: false }));
                return Ok(LoadStart::Done(load));
            }
            let lock = self.lock_of(hold, None, stream);
            let short = |lock: PrefixLock| {
                call.slots.discard(Arc::new(lock));
                Ok(LoadStart::Short)
            };
            let state = match self.shared.states.as_ref().filter(|_| is_stateful) {
                None => None,
                Some(states) => {
                    match TakenSlot::new(states, &self.shared.owner, cache, &mut lease.hold, None) {
                        None => return short(lock),
                        taken => taken,
                    }
                }
            };
            let state_key = state.as_ref().map(|_| &state_key);
            let Some(pieces) = tier.hold(&keys, state_key) else { return short(lock) };
            Ok(LoadStart::Copy(Box::new(LoadRequest { begin, lock, keys, tokens, pieces, state, tier })))
        })
    }

    /// Compares the bytes of the pieces that a load of at most `limit` tokens would copy with those that came to
    /// the tier, and gives up those that differ: the load ends before them. Returns the tokens up to the end of
    /// what was compared. Pieces that are still being copied to the tier are not compared.
    ///
    /// The bytes are read without locks, so that other calls do not wait.
    fn check_tier(&self, limit: usize, stream: Stream) -> Result<usize> {
        loop {
            let found = self.with(stream, |_, cache, lease| {
                check_idle(lease)?;
                let Some(tier) = cache.below.as_ref().map(|below| Arc::clone(&below.tier)) else {
                    return Ok(None);
                };
                let Some((found, end)) = find_loadable(&tier, cache, lease, limit)? else { return Ok(None) };
                let keys = &lease.loadable.keys;
                let state = cache.tree.is_stateful().then(|| keys[end - 1]);
                Ok(Some((tier, try_to_vec(&keys[found.min(end)..end])?, state, end * cache.tree.page_size())))
            })?;
            let Some((tier, keys, state, len)) = found else { return Ok(0) };
            let damaged_pages = tier.give_up_damaged(PieceKind::Page, &keys);
            let damaged_state = tier.give_up_damaged(PieceKind::State, state.as_slice());
            if !damaged_pages && !damaged_state {
                return Ok(len);
            }
            self.with(stream, |_, cache, _| {
                cache.tree.record_dropped_below(&tier.take_given_up());
                Ok(())
            })?;
        }
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
                return Err(Error::state(text));
            }
            Ok(lease.give_up_load(call, cache))
        });
        ended.or_else(|error| if error.kind() == ErrorKind::Stale { Ok(false) } else { Err(error) })
    }
}

/// Returns how many of the next pages the device has, and the number of pages, at least 1, up to the end of what
/// the tier could bring a lease of the `limit` tokens behind it.
fn find_loadable(
    tier: &HostTier,
    cache: &CacheState,
    lease: &LeaseState,
    limit: usize,
) -> Result<Option<(usize, usize)>> {
    let (is_stateful, page_size) = (cache.tree.is_stateful(), cache.tree.page_size());
    let (keys, tokens) = (&lease.loadable.keys, &lease.loadable.tokens);
    let max = limit.min(tokens.len()) / page_size;
    let found = cache.tree.find(&lease.hold, &&tokens[..max * page_size])?.len() / page_size;
    let contents = tier.contents();
    let run = keys[found..max].iter().take_while(|key| contents.has_page(key)).count();
    let has_end = |end: &usize| !is_stateful || contents.has_state(&keys[end - 1]);
    Ok((1..=found + run).rev().find(has_end).map(|end| (found, end)))
}

/// Returns the first of the loads in flight that `is_sought`.
fn find_load(
    call: &CacheCall<'_>,
    cache: &CacheState,
    is_sought: impl Fn(&SharedLoad) -> bool,
) -> Option<Arc<SharedLoad>> {
    for load in cache.shared_loads() {
        if is_sought(&load) {
            return Some(load);
        }
        call.slots.discard(load);
    }
    None
}

/// Checks that a lease can load.
fn check_idle(lease: &LeaseState) -> Result<()> {
    lease.check_arrived()?;
    lease.request().map_or(Ok(()), |request| {
        let text = format!("the lease is that of request row {} already; load before", request.row());
        Err(Error::state(text))
    })
}
