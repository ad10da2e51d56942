//! The order in which free blocks with a hash are taken, by a policy of the prefix cache.
//!
//! A block is of no use without those before it in its prompt. So the policy gets only blocks that no other
//! block with a hash follows, as the leaves of a tree, and a block counts as a leaf once those after it have
//! lost their hashes.
//!
//! *Invariant.* The policy has exactly the blocks that are free, are known by [`BlockOrder::add`] and have no
//! known block behind them.
//!
//! *Cost.* One call of the policy for each block that is taken, freed, used again or added. Memory: 64 bytes for
//! each block, and what the policy needs.

use crate::base::{BlockId, Id, widen};
use crate::cache::{BlockKey, BlockTokens, History, NodeId, Policy, PolicyKind, Remembered, Tick};

use super::EvictionQueue;

/// A block in the prompts that have used it.
#[derive(Clone, Copy, Debug)]
struct KnownBlock {
    history: History,
    key: BlockKey,
    /// The block before it in its prompt, and how many prompts that had held before.
    before: Option<(BlockId, u32)>,
    /// The number of prompts that it has held. It tells the blocks behind it from those of an earlier prompt.
    held: u32,
    /// The number of known blocks behind it.
    behind: u32,
    /// The number of tokens of its prompt up to its end.
    end: u32,
    is_known: bool,
    is_offered: bool,
}

/// A block with a hash that follows others in a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewBlock {
    pub(super) block: BlockId,
    pub(super) key: BlockKey,
}

/// The order in which free blocks with a hash are taken.
#[derive(Debug)]
pub(super) struct BlockOrder {
    policy: Box<dyn Policy>,
    /// The tokens of a block of the engine.
    tokens: u32,
    /// The tokens after which the policy remembers a block.
    remembered_every: u32,
    now: Tick,
    blocks: Vec<KnownBlock>,
}

impl BlockOrder {
    /// Creates the order of `count` blocks of `tokens` tokens each, none of them known.
    pub(super) fn new(kind: PolicyKind, count: usize, tokens: u32) -> Self {
        let every = BlockTokens::of_page_size(tokens);
        let unknown = KnownBlock {
            history: History::default(),
            key: BlockKey::new(0),
            before: None,
            held: 0,
            behind: 0,
            end: 0,
            is_known: false,
            is_offered: false,
        };
        Self {
            policy: kind.policy(count as u64 * u64::from(tokens), every, None),
            tokens,
            remembered_every: every.get(),
            now: Tick::default(),
            blocks: vec![unknown; count],
        }
    }

    /// Records that a prompt of `tokens` tokens was looked up.
    pub(super) fn look_up(&mut self, tokens: u64) {
        self.now = Tick::new(self.now.tokens().saturating_add(tokens));
    }

    /// Returns whether a block is known.
    pub(super) fn knows(&self, block: BlockId) -> bool {
        self.at(block).is_known
    }

    /// Adds blocks that follow `before` in a prompt, or begin it. Those that are known stay as they are. As in the
    /// prefix cache, the policy remembers several small blocks by the last one.
    pub(super) fn add(&mut self, before: Option<BlockId>, new: &[NewBlock], queue: &EvictionQueue) {
        let mut before = before.filter(|&block| self.knows(block));
        let mut end = before.map_or(0, |block| self.at(block).end);
        let (mut remembered, mut waiting) = (Remembered::default(), Vec::new());
        for &NewBlock { block, key } in new {
            if self.knows(block) {
                (before, end) = (Some(block), self.at(block).end);
                continue;
            }
            end = end.saturating_add(self.tokens);
            waiting.push(block);
            if end.is_multiple_of(self.remembered_every) {
                remembered = self.policy.record_publication(key, self.tokens_of(&waiting), self.now);
                self.begin(&mut waiting, remembered);
            }
            let held = before.map(|block| (block, self.at(block).held));
            if let Some(before) = before {
                self.withdraw(before);
                self.at_mut(before).behind += 1;
            }
            let here = self.at_mut(block);
            *here = KnownBlock { key, before: held, end, behind: 0, is_known: true, ..*here };
            before = Some(block);
        }
        if !waiting.is_empty() {
            self.policy.record_fragment(self.tokens_of(&waiting), self.now);
            self.begin(&mut waiting, remembered);
        }
        // Most are in use. Those that an engine has freed before it names them are not.
        for &NewBlock { block, .. } in new {
            self.offer(block, queue);
        }
    }

    /// Begins the history of blocks.
    fn begin(&mut self, blocks: &mut Vec<BlockId>, remembered: Remembered) {
        for block in blocks.drain(..) {
            self.at_mut(block).history = History::of_new(remembered, self.now);
        }
    }

    /// Records that a request uses a block again.
    pub(super) fn record_use(&mut self, block: BlockId) {
        if self.knows(block) {
            self.withdraw(block);
            let history = self.at(block).history;
            self.policy.record_use(&history, self.tokens, self.now);
            let now = self.now;
            self.at_mut(block).history.touch(now);
        }
    }

    /// Offers a block to the policy, if it is free and known, and no known block is behind it.
    pub(super) fn offer(&mut self, block: BlockId, queue: &EvictionQueue) {
        let here = *self.at(block);
        if here.is_known && here.behind == 0 && !here.is_offered && queue.contains(block) {
            let positions = here.end - self.tokens..here.end;
            self.policy.insert(node(block), positions, &here.history, self.now);
            self.at_mut(block).is_offered = true;
        }
    }

    /// Takes a block back from the policy, because it is no longer free or no longer the last one.
    pub(super) fn withdraw(&mut self, block: BlockId) {
        if std::mem::replace(&mut self.at_mut(block).is_offered, false) {
            self.policy.remove(node(block));
        }
    }

    /// Returns the block to take next, if the policy has one.
    pub(super) fn victim(&mut self) -> Option<BlockId> {
        self.policy.victim(self.now).map(|victim| BlockId::new(victim.number()))
    }

    /// Forgets a block that loses its hash. The one before it may be the last one then.
    pub(super) fn forget(&mut self, block: BlockId, queue: &EvictionQueue) {
        self.withdraw(block);
        let here = *self.at(block);
        if !here.is_known {
            return;
        }
        if here.end.is_multiple_of(self.remembered_every) {
            self.policy.record_eviction(here.key, &here.history, self.now);
        }
        *self.at_mut(block) =
            KnownBlock { is_known: false, behind: 0, before: None, held: here.held.wrapping_add(1), ..here };
        if let Some((before, held)) = here.before
            && self.at(before).held == held
        {
            self.at_mut(before).behind -= 1;
            self.offer(before, queue);
        }
    }

    /// Returns the tokens of blocks that the policy remembers together, or of fewer.
    fn tokens_of(&self, blocks: &[BlockId]) -> u32 {
        self.tokens * u32::try_from(blocks.len()).expect("they have 64 tokens, or are one block")
    }

    fn at(&self, block: BlockId) -> &KnownBlock {
        &self.blocks[widen(block.number())]
    }

    fn at_mut(&mut self, block: BlockId) -> &mut KnownBlock {
        &mut self.blocks[widen(block.number())]
    }
}

fn node(block: BlockId) -> NodeId {
    NodeId::new(block.number())
}
