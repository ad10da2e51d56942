//! The link between the prefix cache of an arena and the tier below it.
//!
//! The tier's pieces have a cache of their own, over the same groups and tokens: the same tree on both sides. A save
//! extends the lower prefix by what the upper one has more, a load the upper one by what the lower one has. Leases on
//! both sides keep units and pieces until the copy between them is over, so neither side evicts what is read or
//! written.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{ChunkId, Id, Page, Result, run_blocking};
use crate::cache::{CacheEvent, Namespace, Tier, Tokens};
use crate::kernels::PagePair;
use crate::layout::{Group, GroupKind};
use crate::memory::Stream;
use crate::pool::ArenaHostTier;
use crate::pool::arena_host_tier::{Soundness, UnitCopies, UnitWrite};
use crate::transfer::Transfer;

use super::cache_core::{ArenaCacheCore, CachedKind, LowerMemory, free_units};
use super::lease::TierBelow;
use super::leased::{end_of, has_hole, in_places, lacks_state, units_of};
use super::store_link::{ArenaFetch, StoreLink};
use super::{ArenaLease, ArenaLowerTier, ArenaPrefixCacheConfig};

/// The tier below a cache, what is cached there, and the copies between the two.
pub(super) struct TierLink {
    tier: Arc<ArenaHostTier>,
    /// The cache of the pieces.
    below: Arc<ArenaCacheCore>,
    /// The store below the tier, if there is one.
    store: Option<Arc<StoreLink>>,
    copies: RankedMutex<TierCopies>,
    /// The number of threads that end saves.
    ending: AtomicUsize,
}

/// Copies in flight, in their order in each direction.
#[derive(Debug, Default)]
struct TierCopies {
    saves: VecDeque<Save>,
    loads: VecDeque<(Arc<Transfer>, Arc<ArenaLease>)>,
    /// Whether the cache is being dropped: nothing is saved any more.
    is_closed: bool,
}

/// A copy to the tier, with the leases that keep both sides.
#[derive(Debug)]
struct Save {
    write: UnitWrite,
    source: Arc<ArenaLease>,
    /// Keeps the pieces.
    target: Arc<ArenaLease>,
    tokens: Vec<i32>,
}

impl TierLink {
    /// Takes the tier for a cache with these settings.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) if another cache has it; the error of a store that is closed.
    pub(super) fn new(
        ArenaLowerTier { host: tier, digest, store }: ArenaLowerTier,
        config: ArenaPrefixCacheConfig,
        contents: &CachedKind,
    ) -> Result<Self> {
        let pieces = CachedKind { tier: Tier::Host, ..contents.clone() };
        let config = ArenaPrefixCacheConfig { cost: config.cost.filter(|_| store.is_none()), ..config };
        let below = ArenaCacheCore::new(config, Arc::clone(tier.pieces()), pieces, None);
        let store =
            store.map(|store| StoreLink::new(&tier, &below, store, digest).map(Arc::new)).transpose()?;
        tier.attach()?;
        let copies = RankedMutex::new(LockRank::ArenaTierCopies, TierCopies::default());
        Ok(Self { tier, below, store, copies, ending: AtomicUsize::new(0) })
    }

    /// Takes the events of the tier since the last call, in order.
    pub(super) fn take_events(&self) -> Vec<CacheEvent> {
        self.below.current().groups.take_events()
    }

    fn groups(&self) -> &[Group] {
        self.below.contents.layout.groups()
    }

    fn page_size(&self) -> usize {
        self.below.contents.layout.page_size()
    }

    /// Takes the copies that are over out of those in flight. Call [`Self::end`] without the lock.
    fn take_over(copies: &mut TierCopies) -> Vec<Save> {
        let is_over = |transfer: &Transfer| transfer.is_over().unwrap_or(false);
        while copies.loads.front().is_some_and(|(transfer, _)| is_over(transfer)) {
            copies.loads.pop_front();
        }
        let over = copies.saves.iter().take_while(|save| is_over(&save.write.transfer)).count();
        copies.saves.drain(..over).collect()
    }

    /// Ends saves that are over.
    fn end(&self, saves: Vec<Save>) {
        for save in saves {
            // A cleared arena may have had other bytes there before they were copied.
            let is_sound = save.source.len().is_ok() && save.write.transfer.is_complete().unwrap_or(false);
            self.tier.complete(&save.write, is_sound);
            if let (Some(store), true) = (&self.store, is_sound) {
                store.put(save.target.namespace(), save.tokens);
            }
        }
        self.store.iter().for_each(StoreLink::settle_puts);
    }

    /// Returns whether nothing is on its way to the tier and the store.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the device has failed.
    pub(super) fn is_written(&self) -> Result<bool> {
        self.settle();
        if let Some(save) = self.copies.lock().saves.front() {
            // A failed device ends no copy.
            return save.write.transfer.is_over().map(|_| false);
        }
        Ok(self.ending.load(Ordering::Acquire) == 0 && self.store.as_ref().is_none_or(StoreLink::is_idle))
    }

    /// Starts to copy what a cache has of the prefix of `lease`, whose tokens these are, and the tier has not.
    fn start_save(&self, lease: &ArenaLease, tokens: Vec<i32>, stream: Stream) -> Result<Option<Save>> {
        let (above, len) = (lease.core(), lease.len()?);
        check_not_capturing(above, stream)?;
        if len != tokens.len() || has_hole(above, lease)? || lacks_state(above, lease)? {
            return Ok(None);
        }
        let target = if let Some(target) = lease.saved().get() {
            Arc::clone(target)
        } else {
            let target = ArenaLease::of(&self.below, lease.namespace(), &tokens.as_slice(), len)?;
            Arc::clone(lease.saved().get_or_init(|| target))
        };
        let begin = target.len()?;
        let mut copies = self.repairs(lease, len, &target)?;
        if begin < len {
            let offered = units_of(above, lease, begin..len)?;
            let wanted: Vec<usize> = offered.iter().map(|units| units.iter().flatten().count()).collect();
            let Some(taken) = self.below.arena.take_held(target.epoch(), &wanted, stream)? else {
                self.tier.count(|counts| counts.skipped += wanted.iter().sum::<usize>());
                return Ok(None);
            };
            // Before they can be found.
            self.tier.expect(&taken);
            let pieces = in_places(&offered, &taken);
            let published = target.publish_held(&tokens.as_slice(), &pieces);
            let published = published.inspect_err(|_| self.below.give_back(&target, &taken))?;
            // What the tier had already keeps its place, and its bytes.
            for (group, units) in offered.iter().enumerate() {
                let places = units.iter().zip(pieces[group].iter().zip(&published.units[group]));
                let fresh =
                    places.filter_map(|(unit, (piece, now))| (*unit).zip(piece.filter(|_| piece == now)));
                copies[group].extend(fresh.map(|(unit, piece)| pair(unit, piece)));
            }
        }
        if copies.iter().all(Vec::is_empty) {
            return Ok(None);
        }
        let kept = lease.for_copy().and_then(|source| Ok((source, target.for_copy()?)));
        let started = kept.and_then(|kept| Ok((kept, self.tier.write(copies.clone(), stream)?)));
        match started {
            Ok(((source, target), write)) => Ok(Some(Save { write, source, target, tokens })),
            Err(failure) => {
                self.tier.give_up(&copies);
                self.tier.note_failure(&failure);
                Ok(None)
            }
        }
    }

    /// Returns the copies that replace damaged pieces of the prefix of `target` by units of `lease`, of `len` tokens.
    fn repairs(&self, lease: &ArenaLease, len: usize, target: &ArenaLease) -> Result<UnitCopies> {
        let mut copies = vec![Vec::new(); self.groups().len()];
        if !self.tier.has_damage() {
            return Ok(copies);
        }
        let begin = target.len()?;
        let units = units_of(lease.core(), lease, 0..begin)?;
        let pieces = units_of(&self.below, target, 0..begin)?;
        for (number, (units, pieces)) in units.iter().zip(pieces).enumerate() {
            // A snapshot is of its end alone.
            if self.groups()[number].kind() == GroupKind::State && begin != len {
                continue;
            }
            let both = units.iter().zip(pieces).filter_map(|(unit, piece)| (*unit).zip(piece));
            let damaged = both.filter(|&(_, piece)| self.tier.is_damaged(number, piece));
            copies[number].extend(damaged.map(|(unit, piece)| pair(unit, piece)));
        }
        Ok(copies)
    }

    /// Keeps the pieces of a lease for a load in flight.
    fn keep_until_over(&self, transfer: Arc<Transfer>, source: Arc<ArenaLease>) {
        let mut copies = self.copies.lock();
        if !copies.is_closed {
            copies.loads.push_back((transfer, source));
            return;
        }
        drop(copies);
        let _ = transfer.wait();
    }

    /// Copies pieces to units, and makes `stream` wait for them; without a device, the caller waits.
    fn copy_up(
        &self,
        pieces: &[Vec<Option<u32>>],
        units: &[Vec<Option<u32>>],
        stream: Stream,
    ) -> Result<Arc<Transfer>> {
        let pairs = |(pieces, units): (&Vec<Option<u32>>, &Vec<Option<u32>>)| {
            let both = pieces.iter().zip(units).filter_map(|(piece, unit)| piece.zip(*unit));
            both.map(|(piece, unit)| pair(unit, piece)).collect()
        };
        let transfer = self.tier.load(pieces.iter().zip(units).map(pairs).collect(), stream)?;
        if let Err(failure) = transfer.make_stream_wait(0, stream) {
            // The caller frees the units.
            let _ = transfer.wait();
            return Err(failure);
        }
        Ok(transfer)
    }

    /// Returns the end of the pages before the first pieces that are damaged, at the positions of [`units_of`] `tokens`.
    /// `None` if some are on their way here.
    fn sound_end(&self, wanted: &[Vec<Option<u32>>], tokens: Range<usize>) -> Option<usize> {
        let mut sound = tokens.end;
        for (number, (group, wanted)) in self.groups().iter().zip(wanted).enumerate() {
            let there = wanted.iter().enumerate().filter_map(|(at, piece)| Some((at, (*piece)?)));
            let (positions, pieces): (Vec<usize>, Vec<u32>) = there.unzip();
            let end = |at: usize| end_of(group, self.page_size(), positions[at], tokens.clone());
            let inspected = self.tier.inspect(number, &pieces, |at| end(at).1);
            if inspected.contains(&Soundness::Arriving) {
                return None;
            }
            if let Some(damaged) = inspected.iter().position(|piece| *piece == Soundness::Damaged) {
                sound = sound.min(end(damaged).0);
            }
        }
        Some(sound)
    }

    /// Starts to fetch what the store has of a prompt to the tier.
    ///
    /// # Errors
    /// The error of tokens that cannot be read; [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when no
    /// thread can be started.
    pub(super) fn fetch(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<ArenaFetch> {
        let Some(store) = &self.store else { return Ok(ArenaFetch::over()) };
        store.fetch(namespace.clone(), tokens.to_vec(0..limit.min(tokens.count()))?)
    }

    /// Gives up the prefixes of a namespace in the tier, or all.
    pub(super) fn clear(&self, namespace: Option<&Namespace>) {
        self.below.clear(namespace);
    }

    /// Waits for all copies, and gives the tier up. Called when the cache is dropped.
    pub(super) fn close(&self) {
        // What came to the tier still goes to the store.
        let _ = self.wait_for_saves();
        let (saves, loads) = {
            let mut copies = self.copies.lock();
            copies.is_closed = true;
            (std::mem::take(&mut copies.saves), std::mem::take(&mut copies.loads))
        };
        run_blocking(|| {
            let transfers = saves.iter().map(|save| &save.write.transfer);
            transfers.chain(loads.iter().map(|load| &load.0)).for_each(|transfer| drop(transfer.wait()));
        });
        self.end(saves.into());
        drop(loads);
        self.store.iter().for_each(StoreLink::finish);
        self.tier.detach();
    }
}

impl LowerMemory for TierLink {
    fn settle(&self) {
        let over = {
            let mut copies = self.copies.lock();
            self.ending.fetch_add(1, Ordering::AcqRel);
            Self::take_over(&mut copies)
        };
        self.end(over);
        self.ending.fetch_sub(1, Ordering::AcqRel);
    }

    fn wait_for_saves(&self) -> Result<bool> {
        /// The time after which another thread is asked again that ends saves.
        const POLL: Duration = Duration::from_micros(50);
        let last = self.copies.lock().saves.back().map(|save| Arc::clone(&save.write.transfer));
        let mut has_waited = last.is_some();
        last.map_or(Ok(()), |last| last.wait())?;
        self.settle();
        while self.ending.load(Ordering::Acquire) > 0 {
            has_waited = true;
            run_blocking(|| std::thread::sleep(POLL));
        }
        Ok(has_waited)
    }
}

impl TierBelow for TierLink {
    fn save(&self, lease: &ArenaLease, tokens: &dyn Tokens, stream: Stream) {
        self.settle();
        let started = tokens.to_vec(0..tokens.count()).and_then(|tokens| {
            let mut copies = self.copies.lock();
            if !copies.is_closed {
                copies.saves.extend(self.start_save(lease, tokens, stream)?);
            }
            Ok(())
        });
        if let Err(failure) = started {
            self.tier.count(|counts| counts.failed += 1);
            self.tier.note_failure(&failure);
        }
    }

    fn loadable(&self, lease: &ArenaLease, prompt: &[i32]) -> Result<usize> {
        if has_hole(lease.core(), lease)? {
            return Ok(0);
        }
        let cache = self.below.current();
        let found = cache.groups.cached_len(lease.namespace(), &prompt, prompt.len())?;
        drop(cache);
        Ok(found.saturating_sub(lease.len()?))
    }

    fn load(&self, lease: &ArenaLease, prompt: &[i32], stream: Stream) -> Result<usize> {
        let above = lease.core();
        check_not_capturing(above, stream)?;
        self.settle();
        let (mut limit, mut has_waited) = (prompt.len(), false);
        loop {
            let begin = lease.len()?;
            let source = ArenaLease::of(&self.below, lease.namespace(), &prompt, limit)?;
            let len = source.len()?;
            if len <= begin || has_hole(above, lease)? {
                return Ok(0);
            }
            let wanted = units_of(&self.below, &source, begin..len)?;
            match self.sound_end(&wanted, begin..len) {
                Some(end) if end == len => (),
                Some(end) => {
                    limit = end;
                    continue;
                }
                None => {
                    // Another thread may have ended the copies in between.
                    if !self.wait_for_saves()? && std::mem::replace(&mut has_waited, true) {
                        return Ok(0);
                    }
                    continue;
                }
            }
            let counts: Vec<usize> = wanted.iter().map(|pieces| pieces.iter().flatten().count()).collect();
            let Some(taken) = above.arena.take_held(lease.epoch(), &counts, stream)? else {
                // A shorter part may fit.
                limit = begin + (len - begin) / 2;
                continue;
            };
            let Some(mut filling) = above.arena.begin_fill(lease.epoch()) else {
                // A clear has freed them, and ended the lease.
                return lease.len();
            };
            let units = in_places(&wanted, &taken);
            let copied = self.copy_up(&wanted, &units, stream);
            let loaded = copied.and_then(|transfer| {
                filling.keep(&transfer);
                let published = lease.publish_loaded(&&prompt[..len], &units);
                if !transfer.is_complete().unwrap_or(false) {
                    self.keep_until_over(transfer, source);
                }
                published
            });
            let Err(failure) = loaded else {
                self.tier.count(|tier| tier.loaded += counts.iter().sum::<usize>());
                return Ok(len - begin);
            };
            above.give_back(lease, &taken);
            if lease.len()? == begin {
                return Err(failure);
            }
            // Another thread has extended the lease meanwhile.
        }
    }
}

impl ArenaCacheCore {
    /// Returns units that were taken for a publication that failed to the arena.
    fn give_back(&self, lease: &ArenaLease, taken: &[Vec<u32>]) {
        // A cleared arena has them already.
        let _ = self.arena.in_epoch(lease.epoch(), |slabs| free_units(slabs, taken));
    }
}

/// Refuses copies on a stream of their own behind one that is being captured, before anything is taken for them.
fn check_not_capturing(cache: &ArenaCacheCore, stream: Stream) -> Result<()> {
    cache.arena.gpu().map_or(Ok(()), |gpu| gpu.check_not_capturing(stream, "a copy outside of the capture"))
}

fn pair(unit: u32, piece: u32) -> PagePair<Page> {
    PagePair { page: Page::new(unit), piece: ChunkId::new(piece) }
}

impl std::fmt::Debug for TierLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TierLink").field("tier", &self.tier).finish_non_exhaustive()
    }
}
