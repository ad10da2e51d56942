//! What the pages of a store are worth, by a policy of the prefix cache.
//!
//! A page is of use only together with those before it in its prompt. So of each run of pages with similar
//! ticks, which were used last as parts of one prompt, the policy has the last one. [`Slots`](super::slots::Slots)
//! knows which these are.
//!
//! *Invariant.* The policy has the pages that were offered and not withdrawn since.
//!
//! *Cost.* One call of the policy for each use, and one for each page that is stored or evicted. Memory: 24 bytes
//! for each slot that was ever used, and what the policy needs.

use std::ops::Range;

use crate::base::{Id, Result, try_reserve, widen};
use crate::cache::{BlockKey, BlockTokens, History, NodeId, Novelty, PageHash, Policy, PolicyKind, Tick};
use crate::transfer::to_u64;

use super::layout::FileSlot;

/// The positions of the tokens of a page, for the policy. The store does not know them: all of its pages count
/// the same.
const PAGE: Range<u32> = 0..64;

/// A use counts if as many pages as this part of the capacity were used since the last one. A request may look a
/// page up, get it, and touch it.
const PARTS: u64 = 64;

/// The histories of the pages of a store, and a policy that learns from them.
#[derive(Debug)]
pub(super) struct Worth {
    policy: Box<dyn Policy>,
    /// By slot. Those of slots without a page are stale.
    histories: Vec<History>,
    /// The tokens of the pages that were looked up, used or stored so far.
    now: Tick,
    /// The time from a use to the next that counts.
    pause: u64,
    /// The pages of the prompt that was looked up last whose time has passed and that were not used yet.
    ahead: usize,
}

impl Worth {
    /// Creates the worth of the pages of a store with `count` slots. Recency needs none.
    pub(super) fn new(kind: PolicyKind, count: usize) -> Option<Self> {
        if matches!(kind, PolicyKind::Lru) {
            return None;
        }
        let capacity = to_u64(count) * u64::from(PAGE.end);
        Some(Self {
            policy: kind.policy(capacity, BlockTokens::of_page_size(PAGE.end), None),
            histories: Vec::new(),
            now: Tick::default(),
            pause: capacity / PARTS,
            ahead: 0,
        })
    }

    /// Makes room for the pages of the slots below `end`.
    pub(super) fn reserve_below(&mut self, end: usize) -> Result<()> {
        let more = end.saturating_sub(self.histories.len());
        try_reserve(&mut self.histories, more)?;
        self.histories.resize(end.max(self.histories.len()), History::default());
        Ok(())
    }

    /// Records that a prompt of so many pages is looked up, which are used or stored after that.
    pub(super) fn look_up(&mut self, pages: usize) {
        self.pass(to_u64(pages));
        self.ahead = pages;
        self.begin_request();
    }

    /// Records that the pages of another request are used or stored from now on.
    pub(super) fn begin_request(&mut self) {
        // How many of them are new is not known: of those that are not found, the policy may remember some.
        self.policy.record_request(0);
    }

    /// Records that a page is stored, which is not offered yet.
    pub(super) fn add(&mut self, slot: FileSlot, key: &PageHash) {
        self.pass_page();
        let remembered = self.policy.record_publication(block_key(key), PAGE, self.now);
        let history = History::of_new(remembered, Novelty::default(), self.now);
        self.policy.record_new(&history, PAGE.end);
        *self.history_mut(slot) = history;
    }

    /// Records a use of a page that is not offered.
    pub(super) fn record_use(&mut self, slot: FileSlot) {
        let before = *self.history_mut(slot);
        if self.now.since(before.used) < self.pause {
            return;
        }
        self.pass_page();
        let after = before.used_again(Novelty::default(), self.now);
        self.policy.record_use(&before, &after, PAGE);
        *self.history_mut(slot) = after;
    }

    /// Records that a page is evicted for another one.
    pub(super) fn record_evicted(&mut self, slot: FileSlot, key: &PageHash) {
        let history = *self.history_mut(slot);
        self.policy.record_evicted(PAGE, &history, self.now);
        self.policy.remember(block_key(key), &history, self.now);
    }

    /// Offers the last page of a run.
    pub(super) fn offer(&mut self, slot: FileSlot) {
        let history = *self.history_mut(slot);
        self.policy.insert(NodeId::new(slot.number()), PAGE, &history, self.now);
    }

    /// Ends [`Self::offer`].
    pub(super) fn withdraw(&mut self, slot: FileSlot) {
        self.policy.remove(NodeId::new(slot.number()));
    }

    /// Returns the offered page to evict first, of the store's `pages`.
    pub(super) fn victim(&mut self, pages: usize) -> Option<FileSlot> {
        self.policy.record_shortage(to_u64(pages) * u64::from(PAGE.end), self.now);
        self.policy.victim(self.now).map(|node| FileSlot::new(node.number()))
    }

    /// Lets the time pass in which a page is used.
    fn pass_page(&mut self) {
        if self.ahead > 0 {
            self.ahead -= 1;
        } else {
            self.pass(1);
        }
    }

    fn pass(&mut self, pages: u64) {
        self.now = Tick::new(self.now.tokens() + pages * u64::from(PAGE.end));
    }

    fn history_mut(&mut self, slot: FileSlot) -> &mut History {
        &mut self.histories[widen(slot.number())]
    }
}

/// Returns the key of a page, which is a hash, or a caller's number.
fn block_key(key: &PageHash) -> BlockKey {
    let word = |at: usize| u64::from_le_bytes(*key[at..].first_chunk().expect("a key has 32 bytes"));
    let mixed = [0, 8, 16, 24]
        .map(word)
        .into_iter()
        .fold(0_u64, |sum, word| (sum.rotate_left(29) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    BlockKey::new(mixed ^ mixed >> 32)
}
