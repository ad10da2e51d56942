//! Pieces of a tier that keep their places for a copy.

use std::ops::Range;
use std::sync::Arc;

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{Epoch, ForkGate};
use crate::cache::{EntryId, Namespace, PageHash, hex};
use crate::layout::CacheLayout;
use crate::memory::Region;

use super::storage::{Arrivals, SoundPieces, Storage};
use super::{HostTier, TierCounts};

/// The contents of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool) enum PieceKind {
    /// The K and V of a page.
    Page,
    /// A snapshot of a state.
    State,
}

impl PieceKind {
    /// Both.
    pub(in crate::pool) const ALL: [Self; 2] = [Self::Page, Self::State];
}

/// Pieces that keep their places, as long as this lives.
#[derive(Debug)]
pub(in crate::pool) struct HeldPieces {
    tier: Arc<HostTier>,
    pages: Vec<EntryId>,
    states: Vec<EntryId>,
}

impl HeldPieces {
    fn of(tier: &Arc<HostTier>, kind: PieceKind, entries: Vec<EntryId>) -> Self {
        let (pages, states) = match kind {
            PieceKind::Page => (entries, Vec::new()),
            PieceKind::State => (Vec::new(), entries),
        };
        Self { tier: Arc::clone(tier), pages, states }
    }

    pub(super) fn pages(&self) -> &[EntryId] {
        &self.pages
    }

    pub(super) fn states(&self) -> &[EntryId] {
        &self.states
    }
}

impl Drop for HeldPieces {
    fn drop(&mut self) {
        self.tier.pages.release(&self.pages);
        self.tier.states.iter().for_each(|storage| storage.release(&self.states));
    }
}

/// A guard of pieces that are about to be sent to a store, and are counted as on their way to it.
#[derive(Debug)]
pub(in crate::pool) struct SendingGuard(Arc<HostTier>);

impl Drop for SendingGuard {
    fn drop(&mut self) {
        let _gate = ForkGate::enter_on_own_thread();
        self.0.counts.lock().sending -= 1;
    }
}

/// Pieces that a store reads. They keep their places meanwhile.
#[derive(Debug)]
pub(in crate::pool) struct OutgoingPieces {
    tier: Arc<HostTier>,
    kind: PieceKind,
    entries: Vec<EntryId>,
}

/// Pieces that are counted as being written to a store, as long as this lives.
#[derive(Debug)]
pub(in crate::pool) struct StoringCount {
    tier: Arc<HostTier>,
    count: usize,
}

impl Drop for StoringCount {
    fn drop(&mut self) {
        let _gate = ForkGate::enter_on_own_thread();
        self.tier.counts.lock().storing -= self.count;
    }
}

impl OutgoingPieces {
    /// Returns the ranges of the pieces in their memory.
    pub(in crate::pool) fn ranges(&self) -> Vec<Range<usize>> {
        self.tier.storage(self.kind).map_or(Vec::new(), |storage| storage.ranges(&self.entries))
    }
}

impl Drop for OutgoingPieces {
    fn drop(&mut self) {
        self.tier.storage(self.kind).iter().for_each(|storage| storage.end_reads(&self.entries));
    }
}

/// Pieces on their way from a store. Those that have not [arrived](Self::arrive) when this drops are given
/// up.
#[derive(Debug)]
pub(in crate::pool) struct IncomingPieces {
    tier: Arc<HostTier>,
    kind: PieceKind,
    keys: Vec<PageHash>,
    ranges: Vec<Range<usize>>,
    /// Keys of the pieces that were evicted for them or given up before, and whether there was no place for
    /// some.
    pub(in crate::pool) evicted: Vec<PageHash>,
    pub(in crate::pool) is_cut: bool,
    entries: RankedMutex<Vec<EntryId>>,
}

impl IncomingPieces {
    /// Returns the keys of the pieces.
    pub(in crate::pool) fn keys(&self) -> &[PageHash] {
        &self.keys
    }

    /// Returns the ranges of the pieces in their memory.
    pub(in crate::pool) fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    fn storage(&self) -> Option<&Storage> {
        self.tier.storage(self.kind)
    }

    /// Makes the first `count` pieces complete and holds them, and gives up the others. No copy to them may
    /// be in flight.
    pub(in crate::pool) fn arrive(&self, count: usize) -> HeldPieces {
        let entries = std::mem::take(&mut *self.entries.lock());
        let held =
            self.storage().map_or(Vec::new(), |storage| storage.arrive_fetched(&entries, &self.keys, count));
        self.tier.count(TierCounts { fetched: held.len(), ..TierCounts::default() });
        HeldPieces::of(&self.tier, self.kind, held)
    }

    /// Lets other fetches request these pieces. Their places stay in use as long as this lives, as they may
    /// still be written.
    pub(in crate::pool) fn give_up(&self) {
        self.storage().iter().for_each(|storage| storage.cancel_fetch(&self.keys));
    }
}

impl Drop for IncomingPieces {
    fn drop(&mut self) {
        let entries = std::mem::take(&mut *self.entries.lock());
        self.storage().iter().for_each(|storage| storage.fail_fetched(&entries));
    }
}

impl HostTier {
    /// Holds pages and a snapshot, whose copies to the tier may be in progress, and records a use of them.
    /// `None` if one of them is not here.
    pub(in crate::pool) fn hold(
        self: &Arc<Self>,
        keys: &[PageHash],
        state: Option<&PageHash>,
    ) -> Option<HeldPieces> {
        let pages = self.pages.hold(keys)?;
        // From here on a drop releases them.
        let mut held = HeldPieces { tier: Arc::clone(self), pages, states: Vec::new() };
        if let Some(key) = state {
            held.states = self.states.as_ref()?.hold(std::slice::from_ref(key))?;
        }
        Some(held)
    }

    /// Holds those pieces that are here.
    pub(in crate::pool) fn hold_found(self: &Arc<Self>, kind: PieceKind, keys: &[PageHash]) -> HeldPieces {
        let found = self.storage(kind).map(|storage| storage.hold_found(keys));
        HeldPieces::of(self, kind, found.unwrap_or_default())
    }

    /// Begins to count pieces as on their way to a store, before they are found.
    pub(in crate::pool) fn begin_sending(self: &Arc<Self>) -> SendingGuard {
        let _gate = ForkGate::enter_on_own_thread();
        self.counts.lock().sending += 1;
        SendingGuard(Arc::clone(self))
    }

    /// Returns how many pieces of a kind a cache may have a store read at once: half of the places are kept for them.
    pub(in crate::pool) fn max_sent(&self, kind: PieceKind) -> usize {
        self.storage(kind).map_or(0, |storage| storage.capacity().div_ceil(2))
    }

    /// Changes the number of pieces that wait until a store can take them.
    pub(in crate::pool) fn change_waiting(&self, added: usize, removed: usize) {
        let _gate = ForkGate::enter_on_own_thread();
        let mut counts = self.counts.lock();
        counts.waiting = counts.waiting + added - removed;
    }

    /// Returns those pieces that are complete here.
    pub(in crate::pool) fn complete_of(&self, kind: PieceKind, keys: Vec<PageHash>) -> Vec<PageHash> {
        self.storage(kind).map_or(Vec::new(), |storage| storage.complete_of(keys))
    }

    /// Keeps those pieces that are complete here for a store, and counts them. Returns their keys. Those that
    /// are damaged are given up: see [`Self::give_up_damaged`].
    pub(in crate::pool) fn send_out(
        self: &Arc<Self>,
        kind: PieceKind,
        keys: &[PageHash],
    ) -> (Vec<PageHash>, OutgoingPieces, StoringCount) {
        let found = self.storage(kind).map(|storage| storage.begin_reads(keys));
        let SoundPieces { keys, entries, damaged } = found.unwrap_or_default();
        self.note_damage(kind, &damaged);
        let count = keys.len();
        let gate = ForkGate::enter_on_own_thread();
        self.counts.lock().storing += count;
        drop(gate);
        let storing = StoringCount { tier: Arc::clone(self), count };
        (keys, OutgoingPieces { tier: Arc::clone(self), kind, entries }, storing)
    }

    /// Compares the bytes of pieces that are complete here with those that came, by their fingerprints, and
    /// gives up those that differ. Returns whether there were any. Holds no lock meanwhile.
    pub(in crate::pool) fn give_up_damaged(&self, kind: PieceKind, keys: &[PageHash]) -> bool {
        let Some(storage) = self.storage(kind) else { return false };
        let SoundPieces { entries, damaged, .. } = storage.begin_reads(keys);
        storage.end_reads(&entries);
        self.note_damage(kind, &damaged);
        !damaged.is_empty()
    }

    /// Counts pieces that are damaged, and notes their names.
    fn note_damage(&self, kind: PieceKind, keys: &[PageHash]) {
        if keys.is_empty() {
            return;
        }
        self.count(TierCounts { damaged: keys.len(), ..TierCounts::default() });
        let _gate = ForkGate::enter_on_own_thread();
        let mut notes = self.notes.lock();
        for key in keys {
            let name = hex(key);
            let piece = match kind {
                PieceKind::Page => format!("page {name}"),
                PieceKind::State => format!("the state after page {name}"),
            };
            notes.texts.push(format!(
                "{piece} of a HostTier was damaged in host memory: it was given up, and requests compute it"
            ));
        }
    }

    /// Takes the keys of the pages that were given up because they are damaged, for events.
    pub(in crate::pool) fn take_given_up(&self) -> Vec<PageHash> {
        self.pages.take_given_up()
    }

    /// Counts pieces that a store did not take.
    pub(in crate::pool) fn count_unstored(&self, count: usize) {
        self.count(TierCounts { unstored: count, ..TierCounts::default() });
    }

    /// Takes places for pieces from a store, as many as possible. Pieces that are here, or are being copied
    /// from the device, are left out. `None` if `epoch` of the pieces is over.
    pub(in crate::pool) fn expect(
        self: &Arc<Self>,
        kind: PieceKind,
        keys: &[PageHash],
        namespace: &Namespace,
        epoch: Epoch,
    ) -> Option<IncomingPieces> {
        let storage = self.storage(kind)?;
        let Arrivals { entries, keys, mut evicted, given_up, skipped, .. } =
            storage.begin_fetch(epoch, keys, namespace)?;
        self.count(TierCounts { evicted: evicted.len(), skipped, ..TierCounts::default() });
        evicted.extend(given_up);
        let ranges = storage.ranges(&entries);
        let (tier, is_cut, entries) =
            (Arc::clone(self), skipped > 0, RankedMutex::new(LockRank::TierPieces, entries));
        Some(IncomingPieces { tier, kind, keys, ranges, evicted, is_cut, entries })
    }

    /// Returns the current epoch of the pieces of a kind.
    pub(in crate::pool) fn epoch(&self, kind: PieceKind) -> Epoch {
        self.storage(kind).map_or_else(Epoch::default, |storage| storage.resident().epoch())
    }

    /// Returns the number of bytes of a piece of a kind, 0 if it has none.
    pub(in crate::pool) fn piece_bytes(&self, kind: PieceKind) -> usize {
        self.storage(kind).map_or(0, Storage::piece_bytes)
    }

    /// Returns the memory of all pieces, a region for each kind, for stores that want to know it before they
    /// copy.
    pub fn regions(&self) -> impl Iterator<Item = &Arc<Region>> {
        self.storages().map(Storage::region)
    }

    /// Returns the memory of pieces of a kind, if it has them.
    pub(in crate::pool) fn region(&self, kind: PieceKind) -> Option<&Arc<Region>> {
        self.storage(kind).map(Storage::region)
    }

    /// Returns what the bytes of a piece depend on, beside the model and the tokens: the layout of its kind.
    pub(in crate::pool) fn cache_layout(&self, kind: PieceKind) -> Option<&CacheLayout> {
        match kind {
            PieceKind::Page => Some(self.kv.cache_layout()),
            PieceKind::State => self.gdn.as_ref().map(|gdn| gdn.cache_layout()),
        }
    }
}
