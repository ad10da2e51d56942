//! A store as the tier above it uses it: the names of the pieces, and where they lie.

use std::ops::Range;
use std::sync::Arc;

use crate::base::Result;
use crate::cache::{Continuation, Digest, LowerTierContents, PageHash};
use crate::layout::CacheLayout;
use crate::memory::{Keep, Region};
use crate::pool::host_tier::{IncomingPieces, PieceKind};
use crate::pool::piece_names::PieceNames;
use crate::pool::{HostTier, Store, StoreTransfer};

/// Pages that are looked for in a store at once, and snapshots, which have more parts.
const SURVEYED: usize = 512;
const STATES_SURVEYED: usize = 16;

/// A store below a tier.
#[derive(Debug)]
pub(super) struct StoreAccess {
    tier: Arc<HostTier>,
    store: Arc<dyn Store>,
    pages: PieceNames,
    states: PieceNames,
}

/// Returns the first and only piece of each key.
fn first(keys: &[PageHash]) -> impl Iterator<Item = (&PageHash, usize)> {
    keys.iter().map(|key| (key, 0))
}

/// The part of a prompt that follows the part on the device, and is in the tier or in the store.
#[derive(Debug, Default)]
pub(super) struct AvailablePages {
    /// The keys of the pages that follow the usable tokens on the device, up to the last one from which a
    /// request can continue.
    pub(super) keys: Vec<PageHash>,
    /// The positions of the keys that only the store has.
    pub(super) missing: Vec<usize>,
    /// Whether only the store has the snapshot at their end.
    pub(super) lacks_state: bool,
}

impl StoreAccess {
    /// Returns the access to `store` for pieces of `model` in `tier`, with names made by `digest`.
    pub(super) fn new(tier: &Arc<HostTier>, store: Arc<dyn Store>, model: &str, digest: Digest) -> Self {
        let names = |kind| {
            let layout = tier.cache_layout(kind).map_or(Vec::new(), CacheLayout::descriptions);
            let context = std::iter::once(model).chain(layout.iter().map(String::as_str));
            let context: Vec<&[u8]> = context.map(str::as_bytes).collect();
            PieceNames::new(digest, &context, tier.piece_bytes(kind), store.max_bytes())
        };
        let (pages, states) = (names(PieceKind::Page), names(PieceKind::State));
        Self { tier: Arc::clone(tier), store, pages, states }
    }

    const fn names(&self, kind: PieceKind) -> &PieceNames {
        match kind {
            PieceKind::Page => &self.pages,
            PieceKind::State => &self.states,
        }
    }

    /// Finds which pieces the store has. Waits for it.
    fn find(&self, kind: PieceKind, keys: &[PageHash]) -> Result<Vec<bool>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let names = self.names(kind);
        Ok(names.whole(&self.store.find(&names.of(first(keys)))?))
    }

    /// Records a use of consecutive pieces, and finds which of them the store has. Waits for it.
    pub(super) fn touch(&self, kind: PieceKind, keys: &[PageHash]) -> Result<Vec<bool>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let names = self.names(kind);
        Ok(names.whole(&self.store.touch(&names.of(first(keys)))?))
    }

    /// Begins to put pieces in `ranges` of the tier's memory, which `owner` keeps.
    pub(super) fn put(
        &self,
        kind: PieceKind,
        keys: &[PageHash],
        ranges: &[Range<usize>],
        owner: Keep,
    ) -> Result<Arc<StoreTransfer>> {
        let names = self.names(kind);
        let rows = names.rows(self.region(kind), ranges, owner)?;
        self.store.put(names.of(first(keys)), rows)
    }

    /// Returns which pieces a put that is over has stored; `None` while it is not over.
    pub(super) fn stored(&self, kind: PieceKind, transfer: &StoreTransfer) -> Option<Vec<bool>> {
        // In the child of a fork nothing is stored.
        if !transfer.query().unwrap_or(true) {
            return None;
        }
        let present = transfer.present().unwrap_or_default();
        Some(self.names(kind).whole(&present))
    }

    /// Begins to get pieces that are expected.
    pub(super) fn get(&self, kind: PieceKind, incoming: &Arc<IncomingPieces>) -> Result<Arc<StoreTransfer>> {
        let names = self.names(kind);
        let rows = names.rows(self.region(kind), incoming.ranges(), Arc::clone(incoming) as Keep)?;
        self.store.get(names.of(first(incoming.keys())), rows)
    }

    /// Returns the number of pieces before the first that a transfer did not bring whole.
    pub(super) fn leading(&self, kind: PieceKind, transfer: &StoreTransfer) -> Result<usize> {
        Ok(transfer.leading()? / self.names(kind).parts())
    }

    fn region(&self, kind: PieceKind) -> &Arc<Region> {
        self.tier.region(kind).expect("there are pieces of this kind")
    }

    pub(super) const fn tier(&self) -> &Arc<HostTier> {
        &self.tier
    }

    /// Looks for pages of `tokens`, which follow the usable tokens of `continuation`, as long as
    /// `should_continue` returns true. Waits for the store.
    ///
    /// # Errors
    /// The error of the store.
    pub(super) fn find_available(
        &self,
        continuation: Continuation,
        tokens: &[i32],
        should_continue: impl Fn() -> bool,
    ) -> Result<AvailablePages> {
        let Continuation { mut chain, usable, cached } = continuation;
        let page_size = self.tier.kv().config().page_size;
        let on_device = (cached - usable) / page_size;
        let (mut keys, mut missing) = (Vec::new(), Vec::new());
        for tokens in tokens.chunks(SURVEYED * page_size) {
            if !should_continue() {
                return Ok(AvailablePages::default());
            }
            let begin = keys.len();
            keys.extend(tokens.chunks_exact(page_size).map(|page| chain.next(page)));
            let contents = self.tier.contents();
            let is_absent = |&at: &usize| at >= on_device && !contents.has_page(&keys[at]);
            let absent: Vec<usize> = (begin..keys.len()).filter(is_absent).collect();
            drop(contents);
            let names: Vec<PageHash> = absent.iter().map(|&at| keys[at]).collect();
            let found = self.find(PieceKind::Page, &names)?.iter().take_while(|is_there| **is_there).count();
            missing.extend_from_slice(&absent[..found]);
            if let Some(&end) = absent.get(found) {
                keys.truncate(end);
                break;
            }
        }
        let mut available = AvailablePages { keys, missing, lacks_state: false };
        if self.tier.states().is_some() {
            self.end_with_state(&mut available)?;
        }
        Ok(available)
    }

    /// Shortens the pages found to the last one with a snapshot at its end.
    fn end_with_state(&self, available: &mut AvailablePages) -> Result<()> {
        let AvailablePages { keys, missing, lacks_state } = available;
        let mut end = keys.len();
        let mut usable = 0;
        while end > 0 {
            let begin = end.saturating_sub(STATES_SURVEYED);
            let stored = self.find(PieceKind::State, &keys[begin..end])?;
            let contents = self.tier.contents();
            let is_here = |at: usize| contents.has_state(&keys[at]);
            if let Some(last) = (begin..end).rev().find(|&at| is_here(at) || stored[at - begin]) {
                (usable, *lacks_state) = (last + 1, !is_here(last));
                break;
            }
            end = begin;
        }
        keys.truncate(usable);
        missing.retain(|&at| at < usable);
        Ok(())
    }
}
