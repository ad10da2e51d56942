//! The order in which free blocks with a hash are taken, by a policy of the prefix cache.
//!
//! A block is of no use without those before it in its prompt. So the policy gets only blocks that no other
//! block with a hash follows, as the leaves of a tree, and a block counts as a leaf once those after it have
//! lost their hashes.
//!
//! Requests may be turns of [sessions](crate::cache::SessionId). What a turn leaves of the one before, and what an
//! ended session leaves, is taken before the blocks that the policy has, as far as no other session has used it.
//!
//! What a request in the waiting queue has been found to need is taken after the blocks that the policy has, as long as the
//! request waits.
//!
//! *Invariant.* The policy, the ended blocks and the waiting ones together are exactly the blocks that are free, are known
//! by [`BlockOrder::add`] and have no known block behind them. A known block that only one session has used follows
//! such blocks, or blocks that others have used as well.
//!
//! *Cost.* One call of the policy for each block that is taken, freed, used again or added, and one for each block
//! of a session at the end of a turn that pauses or ends it. Memory: 64 bytes for each block, 24 more once requests
//! wait, what the policy needs, and some 100 bytes for each session, of which there are at most two for each block,
//! or 1,024.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::base::bounded::saturated;
use crate::base::{BlockId, Id, widen};
use crate::cache::{
    BlockKey, BlockTokens, History, NodeId, Novelty, Outlook, Policy, PolicyKind, Remembered, RequestNovelty,
    SessionId, Sessions, Tick, WaitingId, WaitingNeeds, WaitingRank, beside_path,
};

use super::{EvictionQueue, QueueEnd};

/// A block, and how many prompts it had held before: with another prompt it is another place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    block: BlockId,
    held: u32,
}

/// A block in the prompts that have used it.
#[derive(Clone, Copy, Debug)]
struct KnownBlock {
    history: History,
    key: BlockKey,
    /// The block before it in its prompt.
    before: Option<Place>,
    /// The number of prompts that it has held. It tells the blocks behind it from those of an earlier prompt.
    held: u32,
    /// The number of known blocks behind it.
    behind: u32,
    /// The number of tokens of its prompt up to its end.
    end: u32,
    /// The session that alone has used it.
    user: Option<SessionId>,
    is_known: bool,
    /// Whether its novelty is an estimate: nothing new of its request was known when it was used or added.
    is_estimate: bool,
    /// Whether the policy, the ended blocks or the waiting ones have it.
    is_offered: bool,
}

const _: () = assert!(size_of::<KnownBlock>() == 64, "the documented size");

/// A block with a hash that follows others in a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewBlock {
    pub(super) block: BlockId,
    pub(super) key: BlockKey,
}

/// Blocks of a prompt that begin their history.
#[derive(Debug)]
struct Added {
    /// Each with what is remembered of it.
    blocks: Vec<(BlockId, Remembered)>,
    /// The position of the first token of which nothing is remembered.
    new_from: Option<u32>,
}

impl Added {
    /// Adds blocks from the position `begin` on.
    fn add(&mut self, blocks: &mut Vec<BlockId>, remembered: Remembered, begin: u32) {
        if remembered == Remembered::default() {
            self.new_from.get_or_insert(begin);
        }
        self.blocks.extend(blocks.drain(..).map(|block| (block, remembered)));
    }
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
    /// The number of known blocks.
    known: u32,
    /// The blocks that are not used again, which are taken before those of the policy: the least recently used first.
    ended: BTreeSet<(Tick, BlockId)>,
    /// The blocks that waiting requests need, which are taken after those of the policy.
    waiting: WaitingNeeds<BlockId>,
    sessions: Sessions<Place>,
    /// The session of the request that uses blocks.
    user: Option<SessionId>,
    /// The positions of its prompt that were not found; empty for none.
    missing: Range<u32>,
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
            user: None,
            is_known: false,
            is_estimate: false,
            is_offered: false,
        };
        Self {
            policy: kind.policy(count as u64 * u64::from(tokens), every, None),
            tokens,
            remembered_every: every.get(),
            now: Tick::default(),
            blocks: vec![unknown; count],
            known: 0,
            ended: BTreeSet::new(),
            waiting: WaitingNeeds::default(),
            sessions: Sessions::default(),
            user: None,
            missing: 0..0,
        }
    }

    /// Records that a prompt of `tokens` tokens was looked up, with which a turn of a session begins.
    pub(super) fn look_up(&mut self, tokens: u64, session: Option<SessionId>) {
        self.now = Tick::new(self.now.tokens().saturating_add(tokens));
        self.policy.record_request(saturated(self.missing.len()));
        if let Some(session) = session {
            self.sessions.begin_turn(session, self.now);
        }
    }

    /// Sets the session of the request that uses or adds blocks from now on, and the positions of its prompt that were not
    /// found at first.
    pub(super) const fn set_user(&mut self, session: Option<SessionId>, missing: Range<u32>) {
        (self.user, self.missing) = (session, missing);
    }

    /// Returns whether a block is known.
    pub(super) fn knows(&self, block: BlockId) -> bool {
        self.at(block).is_known
    }

    /// Adds blocks that follow `before` in a prompt of a session or of none, or begin it. Those that are known stay as
    /// they are. As in the prefix cache, the policy remembers several small blocks by the last one.
    pub(super) fn add(
        &mut self,
        before: Option<BlockId>,
        new: &[NewBlock],
        session: Option<SessionId>,
        queue: &EvictionQueue,
    ) {
        let mut before = before.filter(|&block| self.knows(block));
        let mut end = before.map_or(0, |block| self.at(block).end);
        // What follows something new in later steps of a request is as new as that.
        let (level, is_estimate) = before.map_or((Novelty::default(), true), |block| {
            let here = self.at(block);
            (here.history.novelty, here.is_estimate)
        });
        let so_far = RequestNovelty { level, is_estimate: is_estimate && !self.missing.is_empty() };
        let mut added = Added { new_from: None, blocks: Vec::new() };
        let mut waiting = Vec::new();
        for &NewBlock { block, key } in new {
            if self.knows(block) {
                // What follows it is not behind the blocks before it.
                self.record_fragment(&mut waiting, end, &mut added);
                self.count_user(block, session);
                (before, end) = (Some(block), self.at(block).end);
                continue;
            }
            end = end.saturating_add(self.tokens);
            waiting.push(block);
            if end.is_multiple_of(self.remembered_every) {
                let positions = end - self.tokens_of(&waiting)..end;
                let begin = positions.start;
                let remembered = self.policy.record_publication(key, positions, self.now);
                added.add(&mut waiting, remembered, begin);
            }
            let place = before.map(|block| self.place(block));
            if let Some(before) = before {
                self.count_user(before, session);
                self.withdraw(before);
                self.at_mut(before).behind += 1;
            }
            let here = self.at_mut(block);
            *here = KnownBlock { key, before: place, end, behind: 0, user: session, is_known: true, ..*here };
            self.known += 1;
            before = Some(block);
        }
        self.record_fragment(&mut waiting, end, &mut added);
        let (tokens, new_from) = (widen(self.missing.end), added.new_from.map(widen));
        let RequestNovelty { level, is_estimate } =
            so_far.after_publication(&*self.policy, tokens, widen(end), new_from);
        for (block, remembered) in added.blocks {
            let history = History::of_new(remembered, level, self.now);
            self.policy.record_new(&history, self.tokens);
            let here = self.at_mut(block);
            (here.history, here.is_estimate) = (history, is_estimate);
        }
        // Most are in use. Those that an engine has freed before it names them are not.
        for &NewBlock { block, .. } in new {
            self.offer(block, queue);
        }
    }

    /// Records blocks up to the position `end` that fill none of the policy's blocks, if there are any.
    fn record_fragment(&mut self, blocks: &mut Vec<BlockId>, end: u32, added: &mut Added) {
        if !blocks.is_empty() {
            let tokens = self.tokens_of(blocks);
            self.policy.record_fragment(tokens, self.now);
            let remembered = added.blocks.last().map_or(Remembered::default(), |&(_, last)| last);
            added.add(blocks, remembered, end - tokens);
        }
    }

    /// Records that a request of a session or of none has used a block.
    fn count_user(&mut self, block: BlockId, session: Option<SessionId>) {
        let here = self.at_mut(block);
        here.user = here.user.filter(|&user| session == Some(user));
    }

    /// Records that the request of the present user uses a block again.
    pub(super) fn record_use(&mut self, block: BlockId) {
        if self.knows(block) {
            self.count_user(block, self.user);
            self.withdraw(block);
            let history = self.at(block).history;
            // Without a request nothing else is known of it.
            let is_prompt = !self.missing.is_empty();
            let missing = saturated(self.missing.len());
            let novelty = if is_prompt { self.policy.novelty(missing) } else { history.novelty };
            let after = history.used_again(novelty, self.now);
            self.policy.record_use(&history, &after, self.positions(block));
            let here = self.at_mut(block);
            (here.history, here.is_estimate) = (after, is_prompt);
        }
    }

    /// Adds a request at an end of those of its rank in the waiting queue, which needs `blocks`.
    pub(super) fn add_waiting(
        &mut self,
        blocks: &[BlockId],
        rank: WaitingRank,
        end: QueueEnd,
        queue: &EvictionQueue,
    ) -> WaitingId {
        let request = match end {
            QueueEnd::Back => self.waiting.add(rank),
            QueueEnd::Front => self.waiting.add_first(rank),
        };
        self.extend_waiting(request, blocks, queue);
        request
    }

    /// Records that a request in the waiting queue needs `blocks`, too.
    pub(super) fn extend_waiting(&mut self, request: WaitingId, blocks: &[BlockId], queue: &EvictionQueue) {
        for &block in blocks {
            if self.knows(block) {
                self.withdraw(block);
                self.waiting.need(request, block);
                self.offer(block, queue);
            }
        }
    }

    /// Removes a request from the waiting queue.
    pub(super) fn remove_waiting(&mut self, request: WaitingId, queue: &EvictionQueue) {
        for block in self.waiting.remove(request) {
            self.withdraw(block);
            self.waiting.end_need(request, block);
            self.offer(block, queue);
        }
    }

    /// Records that a turn of a session is over, which had these blocks. It supersedes the turn before, if that ended
    /// elsewhere: what only this session has used of it, and no request uses now.
    pub(super) fn end_turn(&mut self, session: SessionId, blocks: &[BlockId], queue: &EvictionQueue) {
        let Some(&last) = blocks.iter().rev().find(|&&block| self.knows(block)) else { return };
        // A turn that has added nothing to the one before changes nothing.
        let (rest, is_on_path) = self.tail(session).map_or((Vec::new(), false), |tail| {
            let block_end = |at: Option<BlockId>| at.map_or(0, |block| self.at(block).end);
            beside_path(Some(tail), Some(last), block_end, |at| at.and_then(|block| self.before(block)))
        });
        if !is_on_path {
            for superseded in rest.into_iter().flatten() {
                if self.at(superseded).user == Some(session) && queue.contains(superseded) {
                    self.set_outlook(superseded, Outlook::Ended, queue);
                }
            }
            let tail = (self.at(last).user == Some(session)).then(|| self.place(last));
            let Self { sessions, blocks, .. } = self;
            sessions.set_tail(session, tail, |place| is_cached(blocks, place));
        }
        self.look_ahead(session, queue);
    }

    /// Records that a session goes on after a pause of this kind.
    pub(super) fn pause(&mut self, session: SessionId, kind: &str, queue: &EvictionQueue) {
        let Self { sessions, blocks, now, .. } = self;
        sessions.pause(session, kind, *now, |place| is_cached(blocks, place));
        self.look_ahead(session, queue);
    }

    /// Records that a session has ended: what only it has used is taken first.
    pub(super) fn end(&mut self, session: SessionId, queue: &EvictionQueue) {
        let Self { sessions, blocks, .. } = self;
        sessions.end(session, |place| is_cached(blocks, place));
        self.look_ahead(session, queue);
    }

    /// Gives the blocks that only this session has used the outlook that follows from what it does.
    fn look_ahead(&mut self, session: SessionId, queue: &EvictionQueue) {
        let Some(outlook) = self.sessions.outlook(session, &*self.policy) else { return };
        let mut at = self.tail(session);
        while let Some(block) = at.filter(|&block| self.at(block).user == Some(session)) {
            self.set_outlook(block, outlook, queue);
            at = self.before(block);
        }
    }

    fn set_outlook(&mut self, block: BlockId, outlook: Outlook, queue: &EvictionQueue) {
        let history = self.at(block).history;
        if history.outlook == outlook {
            return;
        }
        self.withdraw(block);
        self.policy.record_outlook(&history, outlook, self.tokens);
        self.at_mut(block).history.outlook = outlook;
        self.offer(block, queue);
    }

    /// Returns the block where the last turn of a session ended, as far as that is cached.
    fn tail(&self, session: SessionId) -> Option<BlockId> {
        self.sessions.tail(session).filter(|&place| is_cached(&self.blocks, place)).map(|place| place.block)
    }

    /// Returns the block before one in its prompt, if it is cached.
    fn before(&self, block: BlockId) -> Option<BlockId> {
        self.at(block).before.filter(|&place| is_cached(&self.blocks, place)).map(|place| place.block)
    }

    fn place(&self, block: BlockId) -> Place {
        Place { block, held: self.at(block).held }
    }

    /// Offers a block to the policy, or to the waiting or the ended ones, if it is free and known, and no known block is
    /// behind it.
    pub(super) fn offer(&mut self, block: BlockId, queue: &EvictionQueue) {
        let here = *self.at(block);
        if !here.is_known || here.behind > 0 || here.is_offered || !queue.contains(block) {
            return;
        }
        if self.waiting.needs(block) {
            self.waiting.offer(block);
        } else if here.history.outlook == Outlook::Ended {
            self.ended.insert((here.history.used, block));
        } else {
            self.policy.insert(node(block), self.positions(block), &here.history, self.now);
        }
        self.at_mut(block).is_offered = true;
    }

    /// Takes a block back from the policy, because it is no longer free or no longer the last one.
    pub(super) fn withdraw(&mut self, block: BlockId) {
        if std::mem::replace(&mut self.at_mut(block).is_offered, false) {
            let history = self.at(block).history;
            if self.waiting.needs(block) {
                self.waiting.withdraw(block);
            } else if history.outlook == Outlook::Ended {
                self.ended.remove(&(history.used, block));
            } else {
                self.policy.remove(node(block));
            }
        }
    }

    /// Returns the block to take next, if there is one that is offered.
    pub(super) fn victim(&mut self) -> Option<BlockId> {
        // Requests that run have other blocks, too.
        self.policy.record_shortage(u64::from(self.known) * u64::from(self.tokens), self.now);
        let ended = self.ended.first().map(|&(.., block)| block);
        let of_policy = || self.policy.victim(self.now).map(|victim| BlockId::new(victim.number()));
        ended.or_else(of_policy).or_else(|| self.waiting.offered().next())
    }

    /// Forgets a block that is taken, because a request needs memory. See [`Self::forget`].
    pub(super) fn forget_taken(&mut self, block: BlockId, queue: &EvictionQueue) {
        if self.knows(block) {
            let history = self.at(block).history;
            self.policy.record_evicted(self.positions(block), &history, self.now);
        }
        self.forget(block, queue);
    }

    /// Forgets a block that loses its hash. The one before it may be the last one then.
    pub(super) fn forget(&mut self, block: BlockId, queue: &EvictionQueue) {
        self.withdraw(block);
        self.waiting.forget(block);
        let here = *self.at(block);
        if !here.is_known {
            return;
        }
        if here.end.is_multiple_of(self.remembered_every) {
            self.policy.remember(here.key, &here.history, self.now);
        }
        let before = self.before(block);
        if let Some(user) = here.user {
            let own = before.filter(|&before| self.at(before).user == Some(user));
            let to = own.map(|before| self.place(before));
            self.sessions.move_tail(user, self.place(block), to);
        }
        *self.at_mut(block) =
            KnownBlock { is_known: false, behind: 0, before: None, held: here.held.wrapping_add(1), ..here };
        self.known -= 1;
        if let Some(before) = before {
            self.at_mut(before).behind -= 1;
            self.offer(before, queue);
        }
    }

    /// Returns the tokens of blocks that the policy remembers together, or of fewer.
    fn tokens_of(&self, blocks: &[BlockId]) -> u32 {
        self.tokens * u32::try_from(blocks.len()).expect("they have 64 tokens, or are one block")
    }

    /// Returns the positions of the tokens of a known block.
    fn positions(&self, block: BlockId) -> Range<u32> {
        let end = self.at(block).end;
        end - self.tokens..end
    }

    fn at(&self, block: BlockId) -> &KnownBlock {
        &self.blocks[widen(block.number())]
    }

    fn at_mut(&mut self, block: BlockId) -> &mut KnownBlock {
        &mut self.blocks[widen(block.number())]
    }
}

/// Returns whether a place still holds the same prompt.
fn is_cached(blocks: &[KnownBlock], place: Place) -> bool {
    let here = &blocks[widen(place.block.number())];
    here.is_known && here.held == place.held
}

fn node(block: BlockId) -> NodeId {
    NodeId::new(block.number())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn a_prompt_may_name_a_block_of_another_place() {
        let blocks: Vec<BlockId> = (0..7).map(BlockId::new).collect();
        let new = |block: &BlockId| NewBlock { block: *block, key: BlockKey::new(block.number().into()) };
        let mut queue = EvictionQueue::full(7);
        let mut order = BlockOrder::new(PolicyKind::Adaptive, blocks.len(), 16);
        order.add(None, &[new(&blocks[6])], None, &queue);
        // The last one ends a block of the policy's 64 tokens: the fourth of a prompt that begins with the known one.
        let named = [0, 1, 2, 6, 3, 4, 5].map(|at: usize| new(&blocks[at]));
        order.add(None, &named, None, &queue);
        let ends: Vec<u32> = blocks.iter().map(|&block| order.at(block).end).collect();
        assert_eq!(ends, [16, 32, 48, 32, 48, 64, 16]);
        for _ in 0..7 {
            let victim = order.victim().expect("seven blocks are free");
            queue.remove(victim);
            order.forget(victim, &queue);
        }
        assert_eq!(order.victim(), None);
    }

    /// A policy that knows what is much, and keeps what it was told.
    #[derive(Clone, Debug, Default)]
    struct Known {
        /// The new tokens of each request.
        new: Arc<Mutex<Vec<u32>>>,
        /// The positions of what was evicted.
        evicted: Arc<Mutex<Vec<Range<u32>>>>,
    }

    impl Policy for Known {
        fn insert(&mut self, _leaf: NodeId, _positions: Range<u32>, _history: &History, _now: Tick) {}

        fn remove(&mut self, _leaf: NodeId) {}

        fn victim(&mut self, _now: Tick) -> Option<NodeId> {
            None
        }

        fn bytes(&self) -> usize {
            0
        }

        fn record_request(&mut self, new: u32) -> Novelty {
            self.new.lock().expect("no test has failed").push(new);
            self.novelty(new)
        }

        fn novelty(&self, new: u32) -> Novelty {
            if new < 100 { Novelty::Low } else { Novelty::High }
        }

        fn record_publication(&mut self, key: BlockKey, _positions: Range<u32>, _now: Tick) -> Remembered {
            Remembered { uses: u32::from(key == BlockKey::new(8)) }
        }

        fn record_evicted(&mut self, positions: Range<u32>, _history: &History, _now: Tick) {
            self.evicted.lock().expect("no test has failed").push(positions);
        }
    }

    #[test]
    fn only_blocks_that_are_taken_count_as_evicted() {
        let blocks: Vec<BlockId> = (0..3).map(BlockId::new).collect();
        let new = |block: &BlockId| NewBlock { block: *block, key: BlockKey::new(block.number().into()) };
        let mut queue = EvictionQueue::full(3);
        let mut order = BlockOrder::new(PolicyKind::Lru, blocks.len(), 64);
        let told = Known::default();
        order.policy = Box::new(told.clone());
        order.add(None, &blocks[..2].iter().map(new).collect::<Vec<_>>(), None, &queue);
        assert!(blocks.iter().all(|&block| queue.remove(block)));
        // The last one is of no prompt.
        order.forget_taken(blocks[2], &queue);
        order.forget_taken(blocks[1], &queue);
        order.forget(blocks[0], &queue);
        assert_eq!(*told.evicted.lock().expect("no test has failed"), [Range { start: 64, end: 128 }]);
    }

    #[test]
    fn what_is_new_of_a_request_may_be_known_late() {
        let blocks: Vec<BlockId> = (0..5).map(BlockId::new).collect();
        let new = [8, 9, 10, 11, 12].map(BlockKey::new);
        let new: Vec<_> = blocks.iter().zip(new).map(|(&block, key)| NewBlock { block, key }).collect();
        let mut queue = EvictionQueue::full(5);
        let mut order = BlockOrder::new(PolicyKind::Lru, blocks.len(), 64);
        order.policy = Box::new(Known::default());
        assert!(blocks.iter().all(|&block| queue.remove(block)));
        // The first step adds a block that is remembered: of 192 tokens, 128 may be new. The second adds new ones.
        order.set_user(None, 0..192);
        order.add(None, &new[..1], None, &queue);
        order.set_user(None, 0..160);
        order.add(Some(blocks[0]), &new[1..2], None, &queue);
        order.add(Some(blocks[1]), &new[2..3], None, &queue);
        // Of another one all is new, also what its second step leaves.
        order.set_user(None, 0..120);
        order.add(None, &new[3..4], None, &queue);
        order.add(Some(blocks[3]), &new[4..], None, &queue);
        let (low, high) = (Novelty::Low, Novelty::High);
        let novelty = |block: &BlockId| order.at(*block).history.novelty;
        assert_eq!(blocks.iter().map(novelty).collect::<Vec<_>>(), [high, low, low, high, high]);
    }

    #[test]
    fn blocks_are_as_new_as_their_request() {
        let blocks: Vec<BlockId> = (0..10).map(BlockId::new).collect();
        let new = |block: &BlockId| NewBlock { block: *block, key: BlockKey::new(block.number().into()) };
        let new: Vec<NewBlock> = blocks.iter().map(new).collect();
        let mut queue = EvictionQueue::full(10);
        let mut order = BlockOrder::new(PolicyKind::Lru, blocks.len(), 64);
        let told = Known::default();
        order.policy = Box::new(told.clone());
        let novelties = |order: &BlockOrder, known: usize| {
            let is_high = |&block: &BlockId| order.at(block).history.novelty == Novelty::High;
            blocks[..known].iter().filter(|block| is_high(block)).count()
        };
        assert!(blocks.iter().all(|&block| queue.remove(block)));
        // Later blocks of a request are as new as the first.
        order.set_user(None, 0..384);
        order.add(None, &new[..4], None, &queue);
        order.look_up(384, None);
        order.add(Some(blocks[3]), &new[4..5], None, &queue);
        order.set_user(None, 0..0);
        order.add(Some(blocks[4]), &new[5..6], None, &queue);
        assert_eq!(novelties(&order, 6), 6);
        // The next one adds little.
        order.set_user(None, 384..448);
        for &block in &blocks[..6] {
            order.record_use(block);
        }
        order.add(Some(blocks[5]), &new[6..7], None, &queue);
        assert_eq!(novelties(&order, 7), 0);
        // This one misses much, and all of that is new.
        order.set_user(None, 448..640);
        for &block in &blocks[..7] {
            order.record_use(block);
        }
        assert_eq!(novelties(&order, 7), 7);
        order.add(Some(blocks[6]), &new[7..], None, &queue);
        assert_eq!(novelties(&order, 10), 10, "the second is remembered, but what is new begins before it");
        for block in [9, 8, 7] {
            order.forget(blocks[block], &queue);
        }
        // Of what this one misses, half is remembered.
        order.set_user(None, 448..576);
        order.add(Some(blocks[6]), &new[8..], None, &queue);
        order.look_up(576, None);
        assert_eq!(order.at(blocks[8]).history.novelty, Novelty::Low);
        assert_eq!(order.at(blocks[9]).history.novelty, Novelty::Low);
        // Of what is used or added without a request, nothing is known.
        order.set_user(None, 0..0);
        order.record_use(blocks[9]);
        order.forget(blocks[9], &queue);
        order.forget(blocks[8], &queue);
        order.add(None, &new[9..], None, &queue);
        assert_eq!(order.at(blocks[9]).history.novelty, Novelty::Middle);
        order.record_use(blocks[0]);
        assert_eq!(order.at(blocks[0]).history.novelty, Novelty::High);
        assert_eq!(*told.new.lock().expect("no test has failed"), [384, 128]);
    }

    #[test]
    fn sessions_without_blocks_of_their_own_are_forgotten() {
        let blocks: Vec<BlockId> = (0..8).map(BlockId::new).collect();
        let mut queue = EvictionQueue::full(8);
        let mut order = BlockOrder::new(PolicyKind::Adaptive, blocks.len(), 16);
        // The first block is what all have in common, and each has another block of its own for a while.
        queue.remove(blocks[0]);
        order.add(None, &[NewBlock { block: blocks[0], key: BlockKey::new(7) }], None, &queue);
        for number in 1..20_000 {
            let session = Some(SessionId::new(number));
            let own = BlockId::new(u32::try_from(1 + number % 7).expect("small"));
            order.forget(own, &queue);
            order.look_up(32, session);
            order.set_user(session, 16..32);
            order.record_use(blocks[0]);
            order.add(
                Some(blocks[0]),
                &[NewBlock { block: own, key: BlockKey::new(number) }],
                session,
                &queue,
            );
            order.end_turn(SessionId::new(number), &[blocks[0], own], &queue);
            // Another session ends where others do, and is told to pause.
            let other = SessionId::new(20_000 + number);
            order.end_turn(other, &blocks[..1], &queue);
            order.pause(other, "user", &queue);
        }
        assert!(order.sessions.len() <= 1_024);
    }
}
