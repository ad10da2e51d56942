//! The link between the tier below the prefix cache of an arena and the store below that.
//!
//! A unit has a name in the store by its group and the key of the page that it ends with; a snapshot by the page that it
//! is behind. A thread puts what comes to the tier, and another one fetches prefixes to it.

mod fetch;
mod puts;

use std::ops::Range;
use std::sync::Arc;

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{ForkGate, Result};
use crate::cache::{Digest, KeyChain, Namespace, PageHash};
use crate::layout::Group;
use crate::memory::{CopyDirection, HostRows, Keep};
use crate::pool::piece_names::PieceNames;
use crate::pool::{ArenaHostTier, LowerStore, Store};
use crate::transfer::{CopyQueue, JobThread};

use super::ArenaLease;
use super::cache_core::ArenaCacheCore;
use puts::Outgoing;

pub use fetch::ArenaFetch;

/// A store below a tier.
pub(super) struct StoreLink {
    tier: Arc<ArenaHostTier>,
    /// The cache of the tier's pieces.
    below: Arc<ArenaCacheCore>,
    store: Arc<dyn Store>,
    digest: Digest,
    /// The names of each group's pieces.
    names: Vec<PieceNames>,
    puts: Arc<JobThread>,
    fetches: CopyQueue,
    outgoing: RankedMutex<Outgoing>,
}

/// A piece, by its group and its name among the pieces of that.
#[derive(Clone, Copy, Debug)]
struct Named {
    group: usize,
    key: PageHash,
    /// Which of the pieces with this key: those of a snapshot, one a layer, may be several.
    number: usize,
    /// The position of its unit.
    position: usize,
    piece: u32,
}

impl Named {
    /// Returns what tells it from all others.
    const fn name(&self) -> (usize, PageHash, usize) {
        (self.group, self.key, self.number)
    }
}

/// Keeps the pieces of a prefix for a store.
#[derive(Debug)]
struct KeptPrefix(Option<Arc<ArenaLease>>);

impl Drop for KeptPrefix {
    fn drop(&mut self) {
        // A thread of the store locks what callers lock, too.
        let _gate = ForkGate::enter_on_own_thread();
        drop(self.0.take());
    }
}

impl StoreLink {
    /// Takes a store for pieces of `tier`, whose cache is `below`, with names made by `digest`.
    ///
    /// # Errors
    /// The error of a store that is closed.
    pub(super) fn new(
        tier: &Arc<ArenaHostTier>,
        below: &Arc<ArenaCacheCore>,
        LowerStore { store, model }: LowerStore,
        digest: Digest,
    ) -> Result<Self> {
        // A store that is closed returns its error here.
        store.find(&[])?;
        let layout = &below.contents.layout;
        let names = layout.groups().iter().enumerate().map(|(number, group)| {
            let (page, unit) = (layout.page_size().to_string(), group.description());
            // Layers apart or together, and the padding behind units, which arenas of other sizes may not have.
            let (numbers, bytes) = (below.contents.of_unit[number], tier.piece_bytes(number));
            let placed = format!("{numbers} pieces of {bytes} bytes");
            let context = [&*model, &*page, &*unit, &*placed].map(str::as_bytes);
            PieceNames::new(digest, &context, tier.piece_bytes(number), store.max_bytes())
        });
        Ok(Self {
            names: names.collect(),
            tier: Arc::clone(tier),
            below: Arc::clone(below),
            store,
            digest,
            puts: Arc::new(JobThread::new("kvpool-put")),
            fetches: CopyQueue::new(CopyDirection::In, None),
            outgoing: RankedMutex::new(LockRank::WaitingPieces, Outgoing::default()),
        })
    }

    fn groups(&self) -> &[Group] {
        self.below.contents.layout.groups()
    }

    fn page_size(&self) -> usize {
        self.below.contents.layout.page_size()
    }

    fn keys_of(&self, namespace: &Namespace, tokens: &[i32]) -> Vec<PageHash> {
        let mut chain = KeyChain::at_root(self.digest, namespace, self.page_size());
        tokens.chunks_exact(self.page_size()).map(|page| chain.next(page)).collect()
    }

    /// Names pieces at the positions of [`units_of`] `tokens`.
    fn named(&self, units: &[Vec<Option<u32>>], tokens: Range<usize>, keys: &[PageHash]) -> Vec<Named> {
        let mut named = Vec::new();
        for (group, units) in units.iter().enumerate() {
            let each = self.groups()[group].unit_tokens(self.page_size());
            let there = units.iter().enumerate().filter_map(|(at, piece)| Some((at, (*piece)?)));
            named.extend(there.map(|(position, piece)| {
                // A unit is named by its last page, and a snapshot by the page before it.
                let end = each.map_or(tokens.end, |each| (tokens.start / each + position + 1) * each);
                let number = if each.is_some() { 0 } else { position };
                Named { group, key: keys[end / self.page_size() - 1], number, position, piece }
            }));
        }
        named
    }

    /// Returns the places of the units that a request needs to go on behind `tokens.end`, from `tokens.start` on, of the
    /// groups that count.
    fn wanted(&self, tokens: Range<usize>, counts: impl Fn(usize) -> bool) -> Vec<Vec<Option<u32>>> {
        let page_size = self.page_size();
        let of_group = |(number, group): (usize, &Group)| {
            if !counts(number) {
                return Vec::new();
            }
            let (Some(needed), Some(each)) =
                (group.prefix_units(tokens.end, page_size), group.unit_tokens(page_size))
            else {
                return vec![Some(0); self.below.contents.of_unit[number]];
            };
            let is_needed = |position: usize| position < needed.sinks || needed.units.contains(&position);
            (tokens.start / each..tokens.end / each).map(|at| is_needed(at).then_some(0)).collect()
        };
        self.groups().iter().enumerate().map(of_group).collect()
    }

    /// Returns the names of the parts of pieces, which are sorted by their group.
    fn names_of(&self, pieces: &[Named]) -> Vec<PageHash> {
        let of_group = |pieces: &[Named]| {
            self.names[pieces[0].group].of(pieces.iter().map(|piece| (&piece.key, piece.number)))
        };
        pieces.chunk_by(|one, next| one.group == next.group).flat_map(of_group).collect()
    }

    /// Returns which of these pieces a store has whole, that has or has not their parts.
    fn whole(&self, pieces: &[Named], parts: &[bool]) -> Vec<bool> {
        let mut rest = parts;
        let mut whole = Vec::with_capacity(pieces.len());
        for pieces in pieces.chunk_by(|one, next| one.group == next.group) {
            let names = &self.names[pieces[0].group];
            let of_group;
            (of_group, rest) = rest.split_at((pieces.len() * names.parts()).min(rest.len()));
            whole.extend(names.whole(of_group));
        }
        whole.resize(pieces.len(), false);
        whole
    }

    fn rows(&self, pieces: &[Named], owner: Keep) -> Result<HostRows> {
        let ranges = pieces
            .iter()
            .flat_map(|piece| self.names[piece.group].parts_of(&[self.tier.range(piece.group, piece.piece)]));
        HostRows::of_ranges(self.tier.pieces().region(), ranges.collect(), owner)
    }
}

impl std::fmt::Debug for StoreLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreLink").field("store", &self.store).finish_non_exhaustive()
    }
}
