//! Loads from the tier below, as data: the copies, the pages that they fill, and the leases that share them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{Epoch, Page, Result, StateSlot};
use crate::cache::{Hold, PageHash, Tree};
use crate::memory::Stream;
use crate::pool::HostTier;
use crate::pool::host_tier::HeldPieces;
use crate::transfer::Transfer;

use super::home::CacheHome;
use super::released::EndedLoad;

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

/// The pages that a load fills.
pub(super) struct LoadedPages {
    /// The keys of the pages, which begin where the holds of the leases end.
    pub(super) keys: Vec<PageHash>,
    pub(super) tokens: Vec<i32>,
    pub(super) pages: Vec<Page>,
    pub(super) state: Option<StateSlot>,
}

/// A load that leases share: it copies a part of a prefix from the tier below to pages of the cache. The tree
/// gets these pages when they are complete. Its drop is a call of the cache.
pub(super) struct SharedLoad {
    home: Arc<dyn CacheHome>,
    /// The epoch of the allocator in which its pages were taken.
    epoch: Epoch,
    /// The stream on which its pages are freed if it is given up.
    stream: Stream,
    loaded: LoadedPages,
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

/// The copies of a load, and their outcome.
#[derive(Clone)]
pub(super) struct Copies {
    transfer: Arc<Transfer>,
    outcome: Arc<RankedMutex<Outcome>>,
    /// Whether a caller has waited for the last layer, or has been told that the load is complete. Until then
    /// the load counts as in flight, so that the results of other calls do not depend on when it ends.
    is_known_complete: Arc<AtomicBool>,
}

impl Copies {
    fn new(transfer: Arc<Transfer>) -> Self {
        let outcome = RankedMutex::new(LockRank::LoadOutcome, Outcome::default());
        Self { transfer, outcome: Arc::new(outcome), is_known_complete: Arc::default() }
    }

    /// See [`Transfer::make_stream_wait`].
    pub(super) fn make_stream_wait(&self, layer: usize, stream: Stream) -> Result<()> {
        self.transfer.make_stream_wait(layer, stream)?;
        if layer + 1 == self.transfer.steps() {
            self.is_known_complete.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Returns whether they are over. If so, the load no longer counts as in flight.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub(super) fn is_over(&self) -> Result<bool> {
        let is_over = self.transfer.is_over()?;
        if is_over {
            self.is_known_complete.store(true, Ordering::Release);
        }
        Ok(is_over)
    }

    /// Returns whether the tree has the pages.
    pub(super) fn have_arrived(&self) -> bool {
        *self.outcome.lock() == Outcome::Arrived
    }
}

impl SharedLoad {
    /// Returns the load that `transfer` does, to pages that were taken in `epoch`.
    pub(super) fn new(
        home: Arc<dyn CacheHome>,
        epoch: Epoch,
        stream: Stream,
        loaded: LoadedPages,
        transfer: Arc<Transfer>,
    ) -> Self {
        let (copies, arrived) = (Copies::new(transfer), RankedMutex::new(LockRank::LoadArrival, None));
        Self { home, epoch, stream, loaded, copies, arrived }
    }

    /// Returns its copies, for a handle.
    pub(super) fn copies(&self) -> Copies {
        self.copies.clone()
    }

    /// Returns the number of its tokens.
    pub(super) const fn len(&self) -> usize {
        self.loaded.tokens.len()
    }

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
        let is_one = !keys.is_empty() && (!must_end || self.loaded.keys.len() == keys.len());
        is_one && self.loaded.keys.starts_with(keys) && self.can_arrive()
    }

    /// Returns the pages of its first `len` tokens.
    pub(super) fn pages(&self, len: usize) -> &[Page] {
        let LoadedPages { tokens, pages, .. } = &self.loaded;
        let page_size = tokens.len() / pages.len().max(1);
        &pages[..len.checked_div(page_size).unwrap_or(0)]
    }

    /// Returns whether the load is in flight or complete, and its pages are not in the tree yet.
    fn can_arrive(&self) -> bool {
        self.arrived.lock().is_none() && !self.has_failed().unwrap_or(true)
    }

    /// The pages, until the tree has them.
    pub(super) fn pages_in_flight(&self) -> Vec<Page> {
        if self.arrived.lock().is_some() { Vec::new() } else { self.loaded.pages.clone() }
    }

    /// Returns the snapshot behind its first `len` tokens.
    pub(super) fn state(&self, len: usize) -> Option<StateSlot> {
        self.loaded.state.filter(|_| len == self.len())
    }

    /// Publishes the pages that have arrived in the tree, after `hold`, unless that was done before, and tells
    /// the tier below. Returns the number of pages that the tree took.
    pub(super) fn arrive(&self, tree: &mut Tree, tier: Option<&HostTier>, hold: &Hold) -> usize {
        let mut arrived = self.arrived.lock();
        if arrived.is_some() {
            return 0;
        }
        let LoadedPages { keys, tokens, pages, state } = &self.loaded;
        let found = tree.find(hold, &tokens.as_slice()).expect("they are in memory");
        let (cached, mut own) = (found.len() / tree.page_size(), tree.hold_again(hold));
        tree.publish(&mut own, found, tokens[found.len()..].to_vec(), &pages[cached..]);
        let mut state = *state;
        if let Some(slot) = state.filter(|_| tree.snapshot(&own).is_none()) {
            tree.set_snapshot(&mut own, slot);
            state = None;
        }
        if let Some(tier) = tier {
            tier.set_loaded(keys.iter().rev(), tree.now());
        }
        *self.copies.outcome.lock() = Outcome::Arrived;
        *arrived = Some(ArrivedLoad { hold: own, spare: pages[..cached].to_vec(), state });
        pages.len() - cached
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

    /// Moves `hold` to the end of the pages, which have arrived in `tree`. Returns the fallback, which is no
    /// longer needed.
    pub(super) fn settle(&mut self, tree: &mut Tree, hold: &mut Hold) -> Result<Option<Hold>> {
        let found = tree.find(hold, &&self.shared.loaded.tokens[..self.len])?;
        tree.publish(hold, found, Vec::new(), &[]);
        self.has_arrived = true;
        Ok(self.fallback.take())
    }
}

impl Drop for SharedLoad {
    fn drop(&mut self) {
        let copy = Arc::clone(&self.copies.transfer);
        copy.cancel();
        let (pages, state, hold) = if let Some(arrived) = self.arrived.get_mut().take() {
            (arrived.spare, arrived.state, Some(arrived.hold))
        } else {
            *self.copies.outcome.lock() = Outcome::GivenUp;
            (std::mem::take(&mut self.loaded.pages), self.loaded.state, None)
        };
        let (epoch, stream) = (self.epoch, self.stream);
        self.home.end_load(EndedLoad { copy, pages, state, hold, epoch, stream });
    }
}

impl fmt::Debug for SharedLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedLoad").field("pages", &self.loaded.pages.len()).finish_non_exhaustive()
    }
}
