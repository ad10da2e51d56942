//! Units on their way from the store.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::base::{Epoch, ForkGate, Result};
use crate::cache::{Namespace, PageHash};
use crate::layout::GroupKind;
use crate::memory::{Keep, Stream};
use crate::pool::arena_prefix_cache::ArenaLease;
use crate::pool::arena_prefix_cache::cache_core::{ArenaCacheCore, free_units};
use crate::pool::arena_prefix_cache::leased::{end_of, in_places};
use crate::transfer::Transfer;

use super::{KeptPrefix, Named, StoreLink};

/// The time after which a fetch looks whether it was given up.
const SLICE: Duration = Duration::from_millis(20);

/// Pieces that a store writes, and that nobody else has yet.
#[derive(Debug)]
struct FetchedPieces {
    below: Option<Arc<ArenaCacheCore>>,
    epoch: Epoch,
    taken: Vec<Vec<u32>>,
    /// Whether the cache has them.
    is_published: AtomicBool,
}

impl Drop for FetchedPieces {
    fn drop(&mut self) {
        let (_gate, below) = (ForkGate::enter_on_own_thread(), self.below.take());
        if let Some(below) = below.filter(|_| !self.is_published.load(Ordering::Acquire)) {
            let _ = below.arena.in_epoch(self.epoch, |slabs| free_units(slabs, &self.taken));
        }
    }
}

/// A fetch of a prompt's units from a store to the tier above it. As long as it lives, it keeps there what it fetched or
/// found.
#[derive(Debug)]
pub struct ArenaFetch {
    /// `None` without a store.
    transfer: Option<Arc<Transfer>>,
    fetched: Arc<Fetched>,
}

/// What a fetch has brought.
#[derive(Debug, Default)]
struct Fetched {
    tokens: AtomicUsize,
    is_cancelled: AtomicBool,
    /// Keeps the prefix in the tier.
    prefix: OnceLock<KeptPrefix>,
}

impl ArenaFetch {
    /// A fetch that has nothing to do.
    pub(in crate::pool::arena_prefix_cache) fn over() -> Self {
        Self { transfer: None, fetched: Arc::default() }
    }

    /// Returns the tokens whose units have arrived from the store, in whole pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.fetched.tokens.load(Ordering::Acquire)
    }

    /// Returns whether nothing has arrived.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the fetch is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.transfer.as_ref().is_none_or(|transfer| transfer.is_over().unwrap_or(true))
    }

    /// Stops the fetch. What has arrived stays.
    pub fn cancel(&self) {
        self.fetched.is_cancelled.store(true, Ordering::Release);
        self.transfer.iter().for_each(|transfer| transfer.cancel());
    }
}

impl Drop for ArenaFetch {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl StoreLink {
    /// Starts to fetch what the store has of a prompt behind what the tier has.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when no thread can be started.
    pub(in crate::pool::arena_prefix_cache) fn fetch(
        self: &Arc<Self>,
        namespace: Namespace,
        tokens: Vec<i32>,
    ) -> Result<ArenaFetch> {
        let fetched = Arc::new(Fetched::default());
        let (mut link, brought) = (Some(Arc::clone(self)), Arc::clone(&fetched));
        let transfer = self.fetches.start(1, &[], Vec::new(), move |_, _| {
            let Some(link) = link.take() else { return Ok(()) };
            let found = link.fetch_prefix(&namespace, &tokens, &brought);
            // The thread may be the last owner.
            let _gate = ForkGate::enter_on_own_thread();
            drop(link);
            found
        })?;
        Ok(ArenaFetch { transfer: Some(transfer), fetched })
    }

    /// Fetches a prefix: up to the last end that the store has and the tier has room for.
    fn fetch_prefix(&self, namespace: &Namespace, tokens: &[i32], brought: &Fetched) -> Result<()> {
        let page_size = self.page_size();
        let tokens = &tokens[..tokens.len() / page_size * page_size];
        let gate = ForkGate::enter_on_own_thread();
        let target = KeptPrefix(Some(ArenaLease::without_use(&self.below, namespace, &tokens)?));
        let lease = target.0.as_ref().expect("it was just made");
        let begin = lease.len()?;
        drop(gate);
        let keys = self.keys_of(namespace, tokens);
        let mut limit = tokens.len();
        while !brought.is_cancelled.load(Ordering::Acquire) {
            let Some(end) = self.last_end(begin, &keys[..limit / page_size], brought)? else { break };
            let Some(missing) = self.fetch_part(lease, &tokens[..end], begin, &keys, brought)? else {
                brought.tokens.store(end - begin, Ordering::Release);
                break;
            };
            limit = missing.min(end - page_size);
        }
        let _ = brought.prefix.set(target);
        Ok(())
    }

    /// Fetches what `tokens` have behind the first `begin`. Returns `None` if all came, or where to end instead.
    fn fetch_part(
        &self,
        lease: &Arc<ArenaLease>,
        tokens: &[i32],
        begin: usize,
        keys: &[PageHash],
        brought: &Fetched,
    ) -> Result<Option<usize>> {
        let end = tokens.len();
        let wanted = self.wanted(begin..end, |_| true);
        let counts: Vec<usize> = wanted.iter().map(|units| units.iter().flatten().count()).collect();
        let gate = ForkGate::enter_on_own_thread();
        let taken = self.below.arena.take_held(lease.epoch(), &counts, Stream::DEFAULT)?;
        let Some(taken) = taken else {
            self.tier.count(|tier| tier.skipped += counts.iter().sum::<usize>());
            // A shorter part may fit.
            return Ok(Some(begin + (end - begin) / 2));
        };
        self.tier.expect(&taken);
        drop(gate);
        let units = in_places(&wanted, &taken);
        let fetched = Arc::new(FetchedPieces {
            below: Some(Arc::clone(&self.below)),
            epoch: lease.epoch(),
            taken,
            is_published: AtomicBool::new(false),
        });
        let pieces = self.named(&units, begin..end, keys);
        let rows = self.rows(&pieces, Arc::clone(&fetched) as Keep)?;
        let transfer = self.store.get(self.names_of(&pieces), rows)?;
        while !transfer.wait(SLICE)? {
            if brought.is_cancelled.load(Ordering::Acquire) {
                transfer.cancel();
                return Ok(Some(begin));
            }
        }
        let present = self.whole(&pieces, &transfer.present()?);
        let missing = pieces.iter().zip(present).filter(|(_, is_there)| !is_there);
        let ends = missing.map(|(piece, _)| {
            end_of(&self.groups()[piece.group], self.page_size(), piece.position, begin..end).0
        });
        if let Some(missing) = ends.min() {
            return Ok(Some(missing));
        }
        let _gate = ForkGate::enter_on_own_thread();
        self.tier.arrive(&fetched.taken);
        lease.publish_held(&tokens, &units)?;
        fetched.is_published.store(true, Ordering::Release);
        Ok(None)
    }

    /// Returns what a request needs of windows, chunks and states to go on behind `tokens.end`, from `tokens.start` on.
    fn needs(&self, tokens: Range<usize>, keys: &[PageHash]) -> Vec<Named> {
        let page_size = self.page_size();
        let mut needs = Vec::new();
        let mut add = |group, end: usize, number| {
            let key = keys[end / page_size - 1];
            needs.push(Named { group, key, number, position: 0, piece: 0 });
        };
        for (number, group) in
            self.groups().iter().enumerate().filter(|(_, group)| group.kind() != GroupKind::Full)
        {
            let (Some(needed), Some(each)) =
                (group.prefix_units(tokens.end, page_size), group.unit_tokens(page_size))
            else {
                (0..self.below.contents.of_unit[number]).for_each(|layer| add(number, tokens.end, layer));
                continue;
            };
            let first = tokens.start / each;
            let positions = (first..needed.sinks).chain(needed.units.start.max(first)..needed.units.end);
            positions.for_each(|position| add(number, (position + 1) * each, 0));
        }
        needs
    }

    /// Returns the last tokens behind the first `begin` at which every group can go on with what the store has.
    fn last_end(&self, begin: usize, keys: &[PageHash], brought: &Fetched) -> Result<Option<usize>> {
        /// Pieces, and places with all that they need, that are looked for at once.
        const PIECES: usize = 512;
        const PLACES: usize = 64;
        let page_size = self.page_size();
        let mut limit = keys.len() * page_size;
        // What every place behind needs is looked for first.
        let groups = self.groups().iter().enumerate();
        for (number, group) in groups.filter(|(_, group)| group.kind() == GroupKind::Full) {
            let wanted = self.wanted(begin..limit, |other| other == number);
            for pieces in self.named(&wanted, begin..limit, keys).chunks(PIECES) {
                if brought.is_cancelled.load(Ordering::Acquire) {
                    return Ok(None);
                }
                let present = self.whole(pieces, &self.store.find(&self.names_of(pieces))?);
                if let Some(missing) = present.iter().position(|is_there| !is_there) {
                    let whole = begin..keys.len() * page_size;
                    limit = limit.min(end_of(group, page_size, pieces[missing].position, whole).0);
                    break;
                }
            }
        }
        let mut ends: Vec<usize> =
            (begin / page_size + 1..=limit / page_size).map(|page| page * page_size).collect();
        while !ends.is_empty() && !brought.is_cancelled.load(Ordering::Acquire) {
            let places = ends.split_off(ends.len().saturating_sub(PLACES));
            let needs = |&end: &usize| self.needs(begin..end, keys);
            let mut pieces: Vec<Named> = places.iter().flat_map(needs).collect();
            pieces.sort_by_key(Named::name);
            pieces.dedup_by_key(|piece| piece.name());
            let found = self.whole(&pieces, &self.store.find(&self.names_of(&pieces))?);
            let has = |wanted: &Named| {
                pieces.binary_search_by_key(&wanted.name(), Named::name).is_ok_and(|at| found[at])
            };
            if let Some(end) = places.iter().rev().find(|end| needs(end).iter().all(has)) {
                return Ok(Some(*end));
            }
        }
        Ok(None)
    }
}
