//! Pieces of host memory of one size, by key.

use std::collections::VecDeque;
use std::iter::from_fn;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::time::Duration;

use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{ChunkId, DType, Device, Epoch, ForkGate, Id, Result, try_zeros, widen};
use crate::cache::{DevicePresence, EntryId, History, Namespace, NamespaceHash, PageHash, Residency, Tick};
use crate::index::IndexHandle;
use crate::kernels::{HostAccess, LayerRows, PagePair, Pieces, StagingArea};
use crate::memory::{Backend, Fingerprint, PageLocking, Region};
use crate::pool::{ChunkConfig, ChunkPool};
use crate::transfer::Transfer;

use super::HostTierConfig;

/// The memory of one kind of pieces, and the key of each piece.
#[derive(Debug)]
pub(super) struct Storage {
    chunks: Arc<ChunkPool>,
    /// The pieces for access in place, if the device can access them there.
    in_place: Option<Pieces>,
    copied: Pieces,
    resident: RankedMutex<Shelf>,
    /// Page-locking, until it is known to be over.
    locking: RankedMutex<Option<PageLocking>>,
}

/// The place of a piece.
type Place = IndexHandle<ChunkId>;

/// The contents of a storage, and the copies that use its places.
#[derive(Debug, Default)]
struct Shelf {
    residency: Residency<Place>,
    /// Copies from the device, to places.
    writes: CopyLog,
    /// Copies to the device, from places.
    reads: CopyLog,
    /// Places that have no piece, and that copies may still use.
    lingering: Vec<Place>,
    /// The fingerprint of the piece in each place, if that piece is complete.
    fingerprints: Vec<Fingerprint>,
    /// The keys of the pieces that were given up because they are damaged, until they are reported.
    given_up: Vec<PageHash>,
}

/// Complete pieces that are being read: none is evicted for others.
struct Reading {
    keys: Vec<PageHash>,
    entries: Vec<EntryId>,
    places: Vec<ChunkId>,
    /// The fingerprints that they had when they came.
    fingerprints: Vec<Fingerprint>,
}

/// Complete pieces that are being read, and have the bytes that came.
#[derive(Debug, Default)]
pub(super) struct SoundPieces {
    pub(super) keys: Vec<PageHash>,
    pub(super) entries: Vec<EntryId>,
    /// The keys of pieces that have other bytes, and were given up.
    pub(super) damaged: Vec<PageHash>,
}

/// Copies in flight in one direction, in their order, and the places that each uses.
#[derive(Debug, Default)]
struct CopyLog(VecDeque<(Arc<Transfer>, Vec<ChunkId>)>);

impl CopyLog {
    /// Adds a copy that runs after the earlier ones.
    fn push(&mut self, copy: &Arc<Transfer>, mut places: Vec<ChunkId>) {
        self.forget_past();
        if !places.is_empty() {
            places.sort_unstable();
            self.0.push_back((Arc::clone(copy), places));
        }
    }

    fn forget_past(&mut self) {
        while self.0.front().is_some_and(|(copy, _)| copy.is_over().unwrap_or(false)) {
            self.0.pop_front();
        }
    }

    /// Returns the last copy that uses one of the places: it is over after all others that do.
    fn last_of(&mut self, places: &[ChunkId]) -> Option<Arc<Transfer>> {
        self.forget_past();
        let uses = |used: &[ChunkId]| places.iter().any(|place| used.binary_search(place).is_ok());
        self.0.iter().rev().find(|(_, used)| uses(used)).map(|(copy, _)| Arc::clone(copy))
    }

    /// Returns whether a copy in the log uses a place. It may be over.
    fn uses(&self, place: ChunkId) -> bool {
        self.0.iter().any(|(_, used)| used.binary_search(&place).is_ok())
    }
}

impl Shelf {
    /// Returns whether a copy may use a place.
    fn is_busy(&self, place: Place) -> bool {
        self.writes.uses(place.index()) || self.reads.uses(place.index())
    }
}

/// The contents of a storage, under its lock.
pub(super) struct Resident<'a> {
    shelf: RankedGuard<'a, Shelf>,
    _gate: Option<ForkGate>,
}

impl Deref for Resident<'_> {
    type Target = Residency<Place>;

    fn deref(&self) -> &Self::Target {
        &self.shelf.residency
    }
}

impl DerefMut for Resident<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.shelf.residency
    }
}

/// The pieces that begin to arrive, from places `I` of the device or, with `()`, from below.
#[derive(Debug)]
pub(super) struct Arrivals<I> {
    pub(super) entries: Vec<EntryId>,
    pub(super) keys: Vec<PageHash>,
    /// The entries that are held until the copy has begun: those that arrive and, between them, those that
    /// were there before.
    held: Vec<EntryId>,
    /// The places that they come from.
    pub(super) from: Vec<I>,
    /// The chunks that they go to.
    pieces: Vec<ChunkId>,
    /// The keys of the pieces that were evicted for them.
    pub(super) evicted: Vec<PageHash>,
    /// The keys of the pieces that were given up before because they are damaged.
    pub(super) given_up: Vec<PageHash>,
    /// The number of pieces that had no place.
    pub(super) skipped: usize,
}

impl<I> Arrivals<I> {
    pub(super) const fn new() -> Self {
        Self {
            entries: Vec::new(),
            keys: Vec::new(),
            held: Vec::new(),
            from: Vec::new(),
            pieces: Vec::new(),
            evicted: Vec::new(),
            given_up: Vec::new(),
            skipped: 0,
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Makes room for `arriving` more pieces among `held` ones.
    fn reserve(&mut self, held: usize, arriving: usize) {
        let Self { entries, keys, from, pieces, .. } = self;
        self.held.reserve(held);
        entries.reserve(arriving);
        keys.reserve(arriving);
        from.reserve(arriving);
        pieces.reserve(arriving);
    }
}

impl<I: Id> Arrivals<I> {
    /// Returns the copies between both places.
    pub(super) fn pairs(&self) -> Vec<PagePair<I>> {
        self.from.iter().zip(&self.pieces).map(|(from, piece)| pair(*from, *piece)).collect()
    }
}

/// Takes the fingerprint of pieces of `keys` in `places`, to which nothing copies meanwhile.
pub(super) fn fingerprints(pieces: &Pieces, keys: &[PageHash], places: &[ChunkId]) -> Vec<Fingerprint> {
    // Keys are hashes already.
    let seed = |key: &PageHash| u64::from_le_bytes(*key.first_chunk().expect("a hash has 32 bytes"));
    pieces.fingerprints(places.iter().copied().zip(keys.iter().map(seed)))
}

/// Returns a place of the device and a piece, for a copy between them.
fn pair<I: Id>(page: I, piece: ChunkId) -> PagePair<I> {
    PagePair { page, piece }
}

impl Storage {
    /// Creates room for `count` pages of `page_size` of `rows`. The lock of its contents has the rank `rank`.
    pub(super) fn new(
        config: &HostTierConfig,
        count: usize,
        rows: &LayerRows,
        page_size: usize,
        backend: &Arc<dyn Backend>,
        rank: LockRank,
    ) -> Result<Self> {
        let device = rows.all().first().map_or(Device::Cpu, |buffer| buffer.region().device());
        let pin_memory = config.pin_memory && device != Device::Cpu;
        let chunks = ChunkPool::new(
            &ChunkConfig {
                num_chunks: count,
                chunk_shape: vec![rows.piece(page_size)?.bytes()],
                dtype: DType::U8,
                pin_memory,
                page_lock_threads: config.page_lock_threads,
                strict: true,
            },
            backend,
        )?;
        let pieces =
            |reach| Pieces::new(Arc::clone(chunks.region()), reach, rows, page_size, chunks.stride(), count);
        let in_place = chunks.uses_page_locking().then(|| pieces(HostAccess::InPlace)).transpose()?;
        let copied = pieces(HostAccess::Copied)?;
        let chunks = Arc::new(chunks);
        let locking = chunks.start_page_locking();
        // The locking of a single step is done.
        let locking = locking.filter(|locking| locking.steps() > 1);
        let locking = RankedMutex::new(LockRank::TierPageLocking, locking);
        let fingerprints = try_zeros(count)?;
        let resident = RankedMutex::new(rank, Shelf { fingerprints, ..Shelf::default() });
        Ok(Self { chunks, in_place, copied, resident, locking })
    }

    /// Lets pieces come from the device and go back through `areas`, if the device accesses them in place.
    pub(super) fn stage(&mut self, areas: [&Arc<StagingArea>; 2]) {
        let together = self.chunks.chunks_together();
        self.in_place = self.in_place.take().map(|pieces| pieces.staged(areas, together));
    }

    /// Returns whether the device accesses the memory in place, once it is page-locked.
    pub(super) fn is_in_place(&self) -> bool {
        self.in_place.as_ref().is_some_and(|pieces| pieces.reach() == HostAccess::InPlace)
    }

    /// Returns the contents, under its lock.
    pub(super) fn resident(&self) -> Resident<'_> {
        // Threads of stores lock it, too.
        let gate = ForkGate::enter_on_own_thread();
        Resident { shelf: self.resident.lock(), _gate: gate }
    }

    pub(super) fn piece_bytes(&self) -> usize {
        self.chunks.chunk_bytes()
    }

    pub(super) fn mem_bytes(&self) -> usize {
        self.chunks.mem_bytes()
    }

    pub(super) fn capacity(&self) -> usize {
        self.chunks.config().num_chunks
    }

    pub(super) fn page_locked(&self) -> usize {
        self.chunks.counts(|_, page_locked| page_locked)
    }

    pub(super) fn wait_page_locked(&self, timeout: Duration) -> Result<bool> {
        self.chunks.check_process()?;
        Ok(PageLocking::wait(&mut self.locking.lock(), timeout))
    }

    /// Returns the numbers of pieces that are found, and that arrive.
    pub(super) fn counts(&self) -> [usize; 2] {
        let resident = self.resident();
        [resident.len(), resident.arriving()]
    }

    /// Returns the pieces, as the device reaches them now: in place as long as every step could be
    /// page-locked.
    pub(super) fn pieces(&self) -> Pieces {
        let in_place = self.in_place.as_ref().filter(|_| self.chunks.is_all_page_locked());
        in_place.unwrap_or(&self.copied).clone()
    }

    /// Records that the device has pages.
    pub(super) fn set_loaded<'a>(&self, keys: impl Iterator<Item = &'a PageHash>, now: Tick) {
        let mut resident = self.resident();
        resident.set_now(now);
        resident.set_device_presence(keys, DevicePresence::Present);
    }

    /// Records that the device has evicted pages, with their histories.
    pub(super) fn set_evicted_above<'a>(
        &self,
        pages: impl Iterator<Item = (&'a PageHash, &'a History)>,
        now: Tick,
    ) {
        let mut resident = self.resident();
        resident.set_now(now);
        resident.set_evicted_above(pages);
    }

    pub(super) fn set_none_on_device(&self) {
        self.resident().set_none_on_device();
    }

    /// Takes a place for each key that is not here, in order and as long as there are places. Returns those
    /// that got one. `presence` says whether the device has a page.
    ///
    /// The pieces of all keys are held until [`Self::end_begun`], so that none of them is evicted for another
    /// one: a page is of no use without those before it. The places ascend with the keys, so that one
    /// copy reaches those that lie together.
    pub(super) fn begin<'a, I: Id>(
        &self,
        numbered: impl Iterator<Item = (&'a PageHash, I)>,
        namespace: &Namespace,
        presence: impl Fn(I, &PageHash) -> DevicePresence,
        arrivals: &mut Arrivals<I>,
    ) -> Vec<Range<usize>> {
        let mut resident = self.resident();
        // Before those that come again.
        arrivals.given_up.append(&mut resident.shelf.given_up);
        let mut begun: Vec<Range<usize>> = Vec::new();
        let offered: Vec<_> = numbered
            .map(|(key, from)| {
                let found = resident.find(key);
                if let Some(entry) = found {
                    resident.set_device_presence([key], presence(from, key));
                    resident.hold(entry);
                }
                (key, from, found)
            })
            .collect();
        let missing = offered.iter().filter(|(.., found)| found.is_none()).count();
        let namespace = NamespaceHash::from(namespace);
        let mut places = self.places_for_copies(missing, &mut resident, &mut arrivals.evicted);
        places.sort_unstable_by_key(|place| place.index());
        // Pages after the first without a place would not be found.
        arrivals.skipped += missing - places.len();
        resident.reserve(places.len());
        arrivals.reserve(offered.len(), places.len());
        let mut places = places.into_iter();
        for (at, (key, from, found)) in offered.into_iter().enumerate() {
            if let Some(entry) = found {
                arrivals.held.push(entry);
                continue;
            }
            let Some(place) = places.next() else { continue };
            arrivals.from.push(from);
            arrivals.pieces.push(place.index());
            let entry = resident.begin(*key, namespace, place, presence(from, key));
            arrivals.entries.push(entry);
            arrivals.held.push(entry);
            arrivals.keys.push(*key);
            match begun.last_mut().filter(|last| last.end == at) {
                Some(last) => last.end += 1,
                None => begun.push(at..at + 1),
            }
        }
        begun
    }

    /// Returns the last copy to the device that still reads a place of the arrivals: their copy has to run
    /// after it.
    pub(super) fn last_read_of<I>(&self, arrivals: &Arrivals<I>) -> Option<Arc<Transfer>> {
        self.resident().shelf.reads.last_of(&arrivals.pieces)
    }

    /// Returns the last copy from the device that still writes one of the held entries.
    pub(super) fn last_write_of(&self, held: &[EntryId]) -> Option<Arc<Transfer>> {
        let mut resident = self.resident();
        let places: Vec<ChunkId> = held.iter().map(|&entry| resident.place(entry).index()).collect();
        resident.shelf.writes.last_of(&places)
    }

    /// Records that `copy` writes the arrivals. Call [`Self::end_begun`] then.
    pub(super) fn begin_copy<I>(&self, arrivals: &Arrivals<I>, copy: &Arc<Transfer>) {
        self.resident().shelf.writes.push(copy, arrivals.pieces.clone());
    }

    /// Lets the pieces of [`Self::begin`] be evicted, the first of them last.
    pub(super) fn end_begun<I>(&self, arrivals: &mut Arrivals<I>) {
        let held = std::mem::take(&mut arrivals.held);
        self.release(&held);
    }

    /// Records that `copy` reads held entries.
    pub(super) fn begin_load(&self, held: &[EntryId], copy: &Arc<Transfer>) {
        let mut resident = self.resident();
        let places: Vec<ChunkId> = held.iter().map(|&entry| resident.place(entry).index()).collect();
        resident.shelf.reads.push(copy, places);
    }

    /// Takes a place for each key that is not here and will be fetched from below, in order and as long as
    /// there are places. Takes none if `epoch` is over.
    pub(super) fn begin_fetch(
        &self,
        epoch: Epoch,
        keys: &[PageHash],
        namespace: &Namespace,
    ) -> Option<Arrivals<()>> {
        let mut arrivals = Arrivals::new();
        let mut resident = self.resident();
        if resident.epoch() != epoch {
            return None;
        }
        arrivals.given_up.append(&mut resident.shelf.given_up);
        for key in keys {
            if resident.find(key).is_some() {
                continue;
            }
            let Some(place) = self.idle_place(&mut resident, &mut arrivals.evicted) else {
                // Pages after this one would not be found.
                arrivals.skipped = 1;
                break;
            };
            arrivals.entries.push(resident.begin_fetch(*key, namespace, place));
            arrivals.keys.push(*key);
        }
        Some(arrivals)
    }

    /// Completes the first `count` of the fetched entries, whose keys are `keys`, and holds them; gives up the
    /// others. Their copies are over.
    pub(super) fn arrive_fetched(
        &self,
        entries: &[EntryId],
        keys: &[PageHash],
        count: usize,
    ) -> Vec<EntryId> {
        let (arrived, missing) = entries.split_at(count.min(entries.len()));
        let places = self.places(arrived);
        // They are held, and cannot be found yet.
        let came = fingerprints(&self.copied, keys, &places);
        let mut resident = self.resident();
        for &entry in missing {
            let place = resident.fail_fetched(entry);
            self.free(&mut resident, place);
        }
        let mut held = Vec::new();
        for ((&entry, place), fingerprint) in arrived.iter().zip(places).zip(came) {
            if resident.arrive_fetched(entry) {
                resident.shelf.fingerprints[widen(place.number())] = fingerprint;
                held.push(entry);
            } else {
                // Another copy has replaced it.
                let place = resident.release(entry);
                self.free(&mut resident, place);
            }
        }
        held
    }

    /// Gives up fetches in flight. Their places stay in use.
    pub(super) fn cancel_fetch(&self, keys: &[PageHash]) {
        let mut resident = self.resident();
        for key in keys {
            resident.cancel_fetch(key);
        }
    }

    /// Returns places for `count` more pieces from the device: free ones and, if there are fewer, those of the
    /// pieces that are evicted first. Earlier copies may still use them. Fewer if all others are held.
    fn places_for_copies(
        &self,
        count: usize,
        resident: &mut Resident<'_>,
        evicted: &mut Vec<PageHash>,
    ) -> Vec<Place> {
        let mut places = self.chunks.try_allocate_up_to(count).unwrap_or_default();
        let place = || {
            resident.shelf.lingering.pop().or_else(|| {
                let (key, place) = resident.evict(|_| true)?;
                evicted.push(key);
                Some(place)
            })
        };
        let more = count - places.len();
        places.extend(from_fn(place).take(more));
        places
    }

    /// Returns a place for one more piece from below, which no copy uses.
    fn idle_place(&self, resident: &mut Resident<'_>, evicted: &mut Vec<PageHash>) -> Option<Place> {
        self.free_lingering(resident);
        let free = self.chunks.try_allocate_one().ok().flatten();
        free.or_else(|| {
            let Shelf { residency, writes, reads, .. } = &mut *resident.shelf;
            let is_idle = |place: Place| !writes.uses(place.index()) && !reads.uses(place.index());
            let (key, place) = residency.evict(is_idle)?;
            evicted.push(key);
            Some(place)
        })
    }

    /// Frees places that have no piece, unless a copy may use them: these linger.
    fn free(&self, resident: &mut Resident<'_>, places: impl IntoIterator<Item = Place>) {
        for place in places {
            if resident.shelf.is_busy(place) {
                resident.shelf.lingering.push(place);
                continue;
            }
            let freed = self.chunks.free(place);
            debug_assert!(freed.is_ok_and(|bad| bad.dropped() == 0), "the place was taken");
        }
    }

    /// Frees the lingering places that copies have left.
    fn free_lingering(&self, resident: &mut Resident<'_>) {
        resident.shelf.writes.forget_past();
        resident.shelf.reads.forget_past();
        let lingering = std::mem::take(&mut resident.shelf.lingering);
        self.free(resident, lingering);
    }

    /// Makes arrivals complete, whose fingerprints are `known` or taken now.
    pub(super) fn arrive<I>(&self, arrivals: &Arrivals<I>, known: Option<&[Fingerprint]>) {
        let taken = if known.is_some() { Vec::new() } else { self.fingerprints_of_arrivals(arrivals) };
        let came = known.unwrap_or(&taken);
        let mut resident = self.resident();
        for ((&entry, place), fingerprint) in arrivals.entries.iter().zip(&arrivals.pieces).zip(came) {
            if resident.arrive(entry) {
                resident.shelf.fingerprints[widen(place.number())] = *fingerprint;
            }
        }
        self.free_lingering(&mut resident);
    }

    /// Returns the work that takes the fingerprints of arrivals, for the thread that has copied them.
    pub(super) fn fingerprinting<I>(
        &self,
        arrivals: &Arrivals<I>,
    ) -> impl FnOnce() -> Vec<Fingerprint> + use<I> {
        let (pieces, keys, places) = (self.copied.clone(), arrivals.keys.clone(), arrivals.pieces.clone());
        move || fingerprints(&pieces, &keys, &places)
    }

    /// Takes the fingerprints of arrivals whose copy is over. Those that were evicted meanwhile have none.
    fn fingerprints_of_arrivals<I>(&self, arrivals: &Arrivals<I>) -> Vec<Fingerprint> {
        let Arrivals { entries, keys, pieces, .. } = arrivals;
        let mut resident = self.resident();
        let read: Vec<usize> = (0..entries.len()).filter(|&at| resident.is_expected(entries[at])).collect();
        for &at in &read {
            resident.begin_read(entries[at]);
        }
        drop(resident);
        let of_read = |at: &usize| (keys[*at], pieces[*at]);
        let (keys, places): (Vec<_>, Vec<_>) = read.iter().map(of_read).unzip();
        let mut found = vec![Fingerprint::default(); entries.len()];
        for (&at, taken) in read.iter().zip(fingerprints(&self.copied, &keys, &places)) {
            found[at] = taken;
        }
        self.end_reads(&read.iter().map(|&at| entries[at]).collect::<Vec<_>>());
        found
    }

    /// Gives up arrivals that no copy writes any more, and returns the keys of those that could be found.
    pub(super) fn fail(&self, entries: &[EntryId]) -> Vec<PageHash> {
        let mut resident = self.resident();
        let mut keys = Vec::new();
        for &entry in entries {
            let (key, place) = resident.fail(entry);
            keys.extend(key);
            self.free(&mut resident, place);
        }
        keys
    }

    /// Gives up pieces from a store.
    pub(super) fn fail_fetched(&self, entries: &[EntryId]) {
        let mut resident = self.resident();
        for &entry in entries {
            let place = resident.fail_fetched(entry);
            self.free(&mut resident, place);
        }
    }

    /// Holds the entries of `keys`: all or none.
    pub(super) fn hold(&self, keys: &[PageHash]) -> Option<Vec<EntryId>> {
        let mut resident = self.resident();
        let entries: Vec<_> = keys.iter().map_while(|key| resident.find(key)).collect();
        if entries.len() < keys.len() {
            return None;
        }
        for &entry in &entries {
            resident.hold(entry);
        }
        Some(entries)
    }

    /// Holds the entries that exist among `keys`.
    pub(super) fn hold_found(&self, keys: &[PageHash]) -> Vec<EntryId> {
        let mut resident = self.resident();
        let entries: Vec<_> = keys.iter().filter_map(|key| resident.find(key)).collect();
        for &entry in &entries {
            resident.hold(entry);
        }
        entries
    }

    /// Begins to read the complete entries among `keys`, except those that are damaged, which are given up.
    pub(super) fn begin_reads(&self, keys: &[PageHash]) -> SoundPieces {
        let Reading { keys, entries, places, fingerprints: before } = self.begin_all_reads(keys);
        let now = fingerprints(&self.copied, &keys, &places);
        let (mut sound, mut damaged) = (SoundPieces::default(), Vec::new());
        for (at, entry) in entries.into_iter().enumerate() {
            if now[at] == before[at] {
                sound.keys.push(keys[at]);
                sound.entries.push(entry);
            } else {
                damaged.push((keys[at], entry));
            }
        }
        if !damaged.is_empty() {
            sound.damaged = self.give_up(&damaged);
        }
        sound
    }

    fn begin_all_reads(&self, keys: &[PageHash]) -> Reading {
        let mut resident = self.resident();
        let found = keys.iter().filter_map(|key| Some((*key, resident.find_complete(key)?)));
        let (keys, entries): (Vec<_>, Vec<_>) = found.unzip();
        for &entry in &entries {
            resident.begin_read(entry);
        }
        let places: Vec<_> = entries.iter().map(|&entry| resident.place(entry).index()).collect();
        let before = |place: &ChunkId| resident.shelf.fingerprints[widen(place.number())];
        let fingerprints = places.iter().map(before).collect();
        Reading { keys, entries, places, fingerprints }
    }

    /// Gives up pieces that are being read, and ends that. Returns the keys of those that could be found.
    #[cold]
    fn give_up(&self, damaged: &[(PageHash, EntryId)]) -> Vec<PageHash> {
        let mut resident = self.resident();
        let mut given_up = Vec::new();
        for &(key, entry) in damaged {
            if resident.give_up(entry) {
                given_up.push(key);
            }
            let place = resident.end_read(entry);
            self.free(&mut resident, place);
        }
        resident.shelf.given_up.extend(&given_up);
        given_up
    }

    /// Takes the keys of the pieces that were given up because they are damaged.
    pub(super) fn take_given_up(&self) -> Vec<PageHash> {
        std::mem::take(&mut self.resident().shelf.given_up)
    }

    /// Ends what [`Self::begin_reads`] began.
    pub(super) fn end_reads(&self, entries: &[EntryId]) {
        let mut resident = self.resident();
        for &entry in entries {
            let place = resident.end_read(entry);
            self.free(&mut resident, place);
        }
    }

    /// Returns those of `keys` that are complete here.
    pub(super) fn complete_of(&self, keys: Vec<PageHash>) -> Vec<PageHash> {
        let resident = self.resident();
        keys.into_iter().filter(|key| resident.find_complete(key).is_some()).collect()
    }

    /// Returns the ranges in [`Self::region`] of entries that are held, or arrive.
    pub(super) fn ranges(&self, entries: &[EntryId]) -> Vec<Range<usize>> {
        self.places(entries).into_iter().map(|place| self.copied.piece(place.number())).collect()
    }

    /// Returns the places of entries that are held, or arrive.
    fn places(&self, entries: &[EntryId]) -> Vec<ChunkId> {
        let resident = self.resident();
        entries.iter().map(|&entry| resident.place(entry).index()).collect()
    }

    /// Returns the memory of all pieces.
    pub(super) fn region(&self) -> &Arc<Region> {
        self.chunks.region()
    }

    /// Ends a hold. The first is used last.
    pub(super) fn release(&self, entries: &[EntryId]) {
        let mut resident = self.resident();
        for &entry in entries.iter().rev() {
            // An entry that is still there keeps its place.
            if let Some(place) = resident.release(entry) {
                self.free(&mut resident, [place]);
            }
        }
    }

    /// Returns the copies between held entries and places of the device.
    pub(super) fn pairs<I: Id>(&self, held: &[EntryId], places: &[I]) -> Vec<PagePair<I>> {
        let resident = self.resident();
        let piece = |&entry: &EntryId| resident.place(entry).index();
        held.iter().map(piece).zip(places).map(|(piece, place)| pair(*place, piece)).collect()
    }

    /// Gives up the pieces of a namespace, or all, and returns the keys of those that could be found.
    pub(super) fn clear(&self, namespace: Option<&Namespace>) -> Vec<PageHash> {
        let mut resident = self.resident();
        let (keys, places) = resident.clear(namespace);
        self.free(&mut resident, places);
        keys
    }

    pub(super) fn broken_invariant(&self) -> Option<String> {
        let resident = self.resident();
        let in_use = self.chunks.counts(|chunks, _| chunks.in_use());
        let used = resident.in_use() + resident.shelf.lingering.len();
        resident
            .broken_invariant()
            .or_else(|| (in_use != used).then(|| format!("{in_use} places are taken, {used} are used")))
    }
}
