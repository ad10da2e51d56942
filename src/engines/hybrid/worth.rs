//! The order of leaves by what they are worth, as a policy of the prefix cache learns it.
//!
//! A policy needs to know which request uses what, once each. Engines look a prompt up several times before it
//! runs, lock its nodes for each of several attempts to admit it, and insert it chunk by chunk, but say with every
//! insertion how much of it the request has inserted before ([`Insert::inserted`](super::Insert::inserted)). So an
//! insertion counts as the use of the nodes after that, and look-ups and locks count nothing. The time is the number
//! of tokens that requests have inserted, those of a request counted once, and of the shortages between.
//!
//! *Invariant.* The policy, the ended leaves and those that waiting requests need are together exactly the queued leaves.
//! The hash of a node is that of its namespace and of all tokens up to its end.
//!
//! *Cost.* An insertion hashes the tokens that it adds, an eviction those that it removes, and a split the shorter
//! part. Memory: 40 bytes for each node number, 24 more once requests wait, and what the policy and the sessions need.

use std::collections::BTreeSet;
use std::ops::Range;

use super::{HybridTree, Node, NodeHandle, NodeId, ROOT};
use crate::base::bounded::{narrow, saturated};
use crate::base::{Id, widen};
use crate::cache::{
    BlockTokens, History, NamespaceHash, NewPages, Outlook, PageAndBlock, Policy, PolicyKind, Published,
    RequestNovelty, RollingHash, RollingHasher, SessionId, Sessions, Tick, WaitingNeeds, record_published,
    visit_ends_back,
};

/// What is known of a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Past {
    pub(super) history: History,
    /// The hash of all tokens up to the end of the node.
    hash: RollingHash,
    /// The session that alone has used it.
    pub(super) user: Option<SessionId>,
    /// Whether its novelty is an estimate: nothing new of its request was known when it was used or added.
    is_estimate: bool,
}

const _: () = assert!(size_of::<Past>() == 40, "the documented size");

/// The request that uses nodes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Request {
    /// The session of which it is a turn.
    pub(super) session: Option<SessionId>,
    /// The tokens of its prompt, as far as they are known.
    tokens: usize,
    novelty: RequestNovelty,
}

/// The leaves in the order of a policy, and the histories of all nodes.
#[derive(Debug)]
pub(super) struct WorthQueue {
    pub(super) policy: Box<dyn Policy>,
    rolling: RollingHasher,
    size: PageAndBlock,
    pub(super) now: Tick,
    /// By the number of the node. Those of numbers that are not in use mean nothing.
    past: Vec<Past>,
    /// Whether a request has inserted tokens at this time: what is evicted next is evicted for another.
    is_past: bool,
    /// The number of leaves, those that have ended included.
    len: usize,
    /// The leaves that are not used again, which are evicted before those of the policy: the least recently used first.
    ended: BTreeSet<(Tick, NodeId)>,
    /// The nodes that waiting requests need. Leaves among them are evicted after those of the policy.
    pub(super) waiting: WaitingNeeds<NodeId>,
    pub(super) sessions: Sessions<NodeHandle>,
}

impl WorthQueue {
    /// Creates the empty queue of a cache of `capacity` tokens, whose pages have `page_size`.
    pub(super) fn new(capacity: usize, page_size: usize) -> Self {
        let block = BlockTokens::of_page_size(narrow(page_size));
        Self::of_policy(PolicyKind::Adaptive.policy(narrow(capacity).into(), block, None), page_size)
    }

    fn of_policy(policy: Box<dyn Policy>, page_size: usize) -> Self {
        let block = widen(BlockTokens::of_page_size(narrow(page_size)).get());
        let size = PageAndBlock { page: page_size, block };
        Self {
            policy,
            rolling: RollingHasher::of_names(),
            size,
            now: Tick::default(),
            past: Vec::new(),
            is_past: false,
            len: 0,
            ended: BTreeSet::new(),
            waiting: WaitingNeeds::default(),
            sessions: Sessions::default(),
        }
    }

    pub(super) fn insert(&mut self, leaf: NodeId, node: &Node) {
        let Past { history, .. } = *self.past(leaf);
        if self.waiting.needs(leaf) {
            self.waiting.offer(leaf);
        } else if history.outlook == Outlook::Ended {
            self.ended.insert((history.used, leaf));
        } else {
            self.policy.insert(leaf, positions_of(node), &history, self.now);
        }
        self.len += 1;
    }

    pub(super) fn remove(&mut self, leaf: NodeId) {
        let Past { history, .. } = *self.past(leaf);
        if self.waiting.needs(leaf) {
            self.waiting.withdraw(leaf);
        } else if history.outlook == Outlook::Ended {
            self.ended.remove(&(history.used, leaf));
        } else {
            self.policy.remove(leaf);
        }
        self.len -= 1;
    }

    /// Removes all leaves, and what requests need. What was learned stays.
    pub(super) fn clear(&mut self, leaves: impl Iterator<Item = NodeId>) {
        leaves.for_each(|leaf| self.remove(leaf));
        self.waiting.clear();
    }

    /// Returns the leaf to evict next of a tree with `cached` tokens: requests that run have other slots, too.
    pub(super) fn first(&mut self, cached: usize) -> Option<NodeId> {
        if std::mem::take(&mut self.is_past) {
            self.now = Tick::new(self.now.tokens() + 1);
        }
        self.policy.record_shortage(cached as u64, self.now);
        let ended = self.ended.first().map(|&(.., leaf)| leaf);
        ended.or_else(|| self.policy.victim(self.now)).or_else(|| self.waiting.offered().next())
    }

    /// Returns the leaves that will probably be evicted after `leaf`, which is the next one.
    pub(super) fn after(&self, leaf: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let is_needed = self.waiting.needs(leaf);
        let of_policy = Some(leaf).filter(|_| self.ended.is_empty() && !is_needed);
        let of_policy = std::iter::successors(of_policy, |&leaf| self.policy.guess_after(leaf));
        let needed = self.waiting.offered().filter(move |_| is_needed);
        self.ended.iter().map(|&(.., leaf)| leaf).chain(of_policy).chain(needed).skip(1)
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        self.policy.bytes()
            + self.past.capacity() * size_of::<Past>()
            + self.ended.len() * size_of::<(Tick, NodeId)>()
            + self.waiting.bytes()
            + self.sessions.bytes()
    }

    pub(super) fn past(&self, node: NodeId) -> &Past {
        &self.past[widen(node.number())]
    }

    pub(super) fn past_mut(&mut self, node: NodeId) -> &mut Past {
        &mut self.past[widen(node.number())]
    }

    fn set_past(&mut self, node: NodeId, past: Past) {
        let at = widen(node.number());
        if at >= self.past.len() {
            self.past.resize(at + 1, past);
        }
        self.past[at] = past;
    }
}

impl HybridTree {
    /// Lets the time pass in which a request inserts `tokens` tokens more.
    pub(super) fn pass_time(&mut self, tokens: usize) {
        if let Some(worth) = self.queue.worth_mut() {
            worth.now = Tick::new(worth.now.tokens() + tokens as u64);
            worth.is_past = true;
        }
    }

    /// Returns a request with a prompt of `tokens` tokens, of which it has inserted the first `inserted` before, and at first
    /// found `found`.
    pub(super) fn request(
        &mut self,
        session: Option<SessionId>,
        tokens: usize,
        [inserted, found]: [usize; 2],
    ) -> Request {
        let mut novelty = RequestNovelty::default();
        if let Some(worth) = self.queue.worth_mut().filter(|_| inserted == 0) {
            novelty.level = worth.policy.record_request(saturated(tokens.saturating_sub(found)));
            novelty.is_estimate = true;
        }
        Request { session, tokens, novelty }
    }

    /// Records that a request goes on from a node that it has inserted before.
    pub(super) fn go_on(&self, request: &mut Request, id: NodeId) {
        if let Some(worth) = self.queue.worth() {
            let Past { history, is_estimate, .. } = *worth.past(id);
            request.novelty = RequestNovelty { level: history.novelty, is_estimate };
        }
    }

    /// Counts a use of a node by a request. The caller queues it again.
    pub(super) fn count_use(&mut self, id: NodeId, request: Request) {
        if self.queue.worth().is_none() {
            return;
        }
        // The policy has a leaf by its history.
        self.unqueue(id);
        let positions = positions_of(self.node(id));
        let Some(worth) = self.queue.worth_mut() else { return };
        let (now, history) = (worth.now, worth.past(id).history);
        let RequestNovelty { level, is_estimate } = request.novelty;
        let after = history.used_again(level, now);
        worth.policy.record_use(&history, &after, positions);
        let past = worth.past_mut(id);
        (past.history, past.is_estimate) = (after, is_estimate);
        past.user = past.user.filter(|&user| request.session == Some(user));
    }

    /// Begins the history of a new leaf of a request, which is not queued yet. Tokens of which the policy
    /// remembers other things than of the last ones become nodes of their own before it.
    pub(super) fn begin_history(&mut self, id: NodeId, request: Request) {
        if self.queue.worth().is_none() {
            return;
        }
        let before = self.hash_before(id);
        let node = self.node(id);
        let (end, tokens) = (node.end, node.tokens.names());
        let begin = end - node.tokens.len();
        let Some(worth) = self.queue.worth_mut() else { return };
        let now = worth.now;
        let mut cursor = worth.rolling.cursor(before, begin);
        let policy = worth.policy.as_mut();
        let Published { mut segments, new_from } =
            record_published(policy, &mut cursor, begin, &tokens, worth.size, now);
        let RequestNovelty { level, is_estimate } =
            request.novelty.after_publication(policy, request.tokens, end, new_from);
        let begin_history = |segment: &NewPages| {
            let history = History::of_new(segment.remembered, level, now);
            policy.record_new(&history, saturated(segment.pages * worth.size.page));
            history
        };
        let histories: Vec<_> = segments.iter().map(begin_history).collect();
        let last = segments.pop().expect("a leaf has a page");
        worth.set_past(
            id,
            Past { history: histories[segments.len()], hash: last.hash, user: request.session, is_estimate },
        );
        for (segment, history) in segments.iter().zip(histories) {
            let front = self.split_node(id, segment.pages * self.config.page_size);
            if let Some(worth) = self.queue.worth_mut() {
                worth.past_mut(front).history = history;
            }
        }
    }

    /// Gives `front`, which was split off from `id`, its part of the past. The caller queues `id` again.
    pub(super) fn split_history(&mut self, front: NodeId, id: NodeId) {
        let Some(worth) = self.queue.worth() else { return };
        let past = *worth.past(id);
        let Past { hash, .. } = past;
        let (ahead, behind) = (self.node(front), self.node(id));
        let hash = if ahead.tokens.len() < behind.tokens.len() {
            let begin = ahead.end - ahead.tokens.len();
            let mut cursor = worth.rolling.cursor(self.hash_before(front), begin);
            cursor.push(&ahead.tokens.names());
            cursor.hash()
        } else {
            let mut cursor = worth.rolling.cursor(hash, behind.end);
            cursor.pop(&behind.tokens.names());
            cursor.hash()
        };
        if let Some(worth) = self.queue.worth_mut() {
            worth.set_past(front, Past { hash, ..past });
        }
        // The policy has a leaf by its positions.
        self.unqueue(id);
    }

    /// Makes a leaf that is about to be evicted one of as many tokens as are wanted, in whole pages, if it has more:
    /// those before them stay. Windows and states are of no use without the end of their leaf, so a leaf goes as a
    /// whole where there are any.
    pub(super) fn spare_front(&mut self, leaf: NodeId, wanted: usize) {
        let is_plain = self.config.window.is_none() && self.config.state.is_none();
        let tokens = self.node(leaf).tokens.len();
        if self.queue.worth().is_none() || !is_plain || wanted == 0 || wanted >= tokens {
            return;
        }
        let kept = tokens - wanted.next_multiple_of(self.config.page_size);
        if kept > 0 {
            let front = self.split_node(leaf, kept);
            self.node_mut(front).shrink();
        }
    }

    /// Returns how many of the last `wanted` tokens of a leaf that is about to be evicted may go before the next one is
    /// chosen.
    pub(super) fn may_evict(&mut self, leaf: NodeId, wanted: usize) -> usize {
        let Range { start, end } = positions_of(self.node(leaf));
        let Some(worth) = self.queue.worth_mut() else { return wanted };
        let history = worth.past(leaf).history;
        if worth.waiting.needs(leaf) || history.outlook == Outlook::Ended {
            return wanted;
        }
        let positions = start.max(end.saturating_sub(saturated(wanted)))..end;
        widen(worth.policy.may_evict(positions, &history)).clamp(1, wanted)
    }

    /// Lets the policy remember the blocks that end in a node, which is about to be evicted.
    pub(super) fn remember(&mut self, id: NodeId) {
        let Some(worth) = self.queue.worth_mut() else { return };
        let node = &self.nodes[id];
        let (tokens, now) = (node.tokens.names(), worth.now);
        let Past { history, hash, .. } = *worth.past(id);
        let WorthQueue { policy, rolling, size, .. } = worth;
        policy.record_evicted(positions_of(node), &history, now);
        let (mut cursor, begin) = (rolling.cursor(hash, node.end), node.end - tokens.len());
        visit_ends_back(&mut cursor, node.end, &tokens, begin, size.block, |_, key| {
            policy.remember(key, &history, now);
        });
    }

    /// Returns the hash of the tokens before a node.
    fn hash_before(&self, id: NodeId) -> RollingHash {
        let Node { parent, namespace, .. } = *self.node(id);
        match self.queue.worth() {
            Some(worth) if parent != ROOT => worth.past(parent).hash,
            _ => RollingHasher::start(NamespaceHash::from(&self.namespaces.name(namespace))),
        }
    }

    /// Checks that the hash of a node is that of its tokens.
    pub(super) fn broken_past(&self, id: NodeId) -> Option<String> {
        let worth = self.queue.worth()?;
        let node = self.node(id);
        let mut cursor = worth.rolling.cursor(self.hash_before(id), node.end - node.tokens.len());
        cursor.push(&node.tokens.names());
        let Past { history, hash, .. } = *worth.past(id);
        if cursor.hash() != hash {
            return Some("has the hash of other tokens".to_owned());
        }
        let is_past = history.published <= history.used && history.used <= worth.now && history.uses > 0;
        (!is_past).then(|| format!("has {history:?} at {:?}", worth.now))
    }
}

/// Returns the positions of the tokens of a node.
fn positions_of(node: &Node) -> Range<u32> {
    saturated(node.end - node.tokens.len())..saturated(node.end)
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails where there is nothing to unwrap")]
mod tests {
    use std::cmp::Reverse;
    use std::collections::{BTreeMap, BTreeSet, HashMap};
    use std::ops::Range;
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

    use proptest::prelude::*;

    use super::*;
    use crate::base::EngineSlot;
    use crate::cache::WaitingId;
    use crate::cache::{BlockKey, Namespace, NodeHandle, Novelty, Remembered};
    use crate::engines::AfterTurn;
    use crate::engines::hybrid::{
        EvictionOrder, HybridConfig, Insert, Part, Queue, QueuedRequest, Receipt, SkippedParts, StateConfig,
        Victim, WindowConfig, WindowRelease,
    };

    /// Tokens of a page; a block has two.
    const PAGE: usize = 32;

    /// What a policy was told.
    #[derive(Debug, Default)]
    struct Told {
        leaves: BTreeMap<NodeId, (Range<u32>, History)>,
        evicted: HashMap<BlockKey, u32>,
        evicted_tokens: u64,
        used: u64,
        /// The tokens that were added, by their novelty.
        begun: BTreeMap<u8, u64>,
        /// The new tokens of each request, as far as it was known.
        requests: Vec<u32>,
        /// When a request has used or added tokens last.
        last: Option<Tick>,
    }

    /// Evicts the least recently used leaf, at most two pages of it at a time, and remembers every block.
    #[derive(Clone, Debug, Default)]
    struct Spy(Arc<Mutex<Told>>);

    impl Spy {
        fn told(&self) -> MutexGuard<'_, Told> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl Policy for Spy {
        fn insert(&mut self, leaf: NodeId, positions: Range<u32>, history: &History, _now: Tick) {
            let before = self.told().leaves.insert(leaf, (positions, *history));
            assert_eq!(before, None, "a leaf is inserted once");
        }

        fn remove(&mut self, leaf: NodeId) {
            assert!(self.told().leaves.remove(&leaf).is_some(), "a leaf is removed that was inserted");
        }

        fn victim(&mut self, now: Tick) -> Option<NodeId> {
            let told = self.told();
            assert!(told.last < Some(now), "what is evicted is evicted for the next request");
            told.leaves.iter().min_by_key(|(id, (_, history))| (history.used, **id)).map(|(&id, _)| id)
        }

        fn bytes(&self) -> usize {
            0
        }

        fn record_use(&mut self, _before: &History, after: &History, positions: Range<u32>) {
            let mut told = self.told();
            told.used += positions.len() as u64;
            told.last = Some(after.used);
        }

        fn record_request(&mut self, new: u32) -> Novelty {
            self.told().requests.push(new);
            novelty(new)
        }

        fn novelty(&self, new: u32) -> Novelty {
            novelty(new)
        }

        fn record_new(&mut self, history: &History, tokens: u32) {
            let mut told = self.told();
            *told.begun.entry(history.novelty as u8).or_default() += u64::from(tokens);
            told.last = Some(history.used);
        }

        fn record_publication(&mut self, key: BlockKey, _positions: Range<u32>, _now: Tick) -> Remembered {
            Remembered { uses: self.told().evicted.remove(&key).unwrap_or_default() }
        }

        fn may_evict(&mut self, positions: Range<u32>, _history: &History) -> u32 {
            narrow(positions.len().min(2 * PAGE))
        }

        fn record_evicted(&mut self, positions: Range<u32>, _history: &History, _now: Tick) {
            self.told().evicted_tokens += positions.len() as u64;
        }

        fn remember(&mut self, key: BlockKey, history: &History, _now: Tick) {
            let before = self.told().evicted.insert(key, history.uses);
            assert_eq!(before, None, "a block is in the cache once");
        }
    }

    fn novelty(new: u32) -> Novelty {
        Novelty::ALL[widen(new) / PAGE % 3]
    }

    /// A prefix of whole pages, in a namespace.
    type Pages = (i64, Vec<u8>);

    struct Request {
        name: i64,
        path: Vec<u8>,
        session: Option<SessionId>,
        /// The pages that it has inserted.
        inserted: usize,
        /// The pages that it has locked, and their end.
        locked: usize,
        node: NodeHandle,
        receipt: Receipt,
    }

    /// An engine, beside what should be known of each page.
    struct Engine {
        tree: HybridTree,
        spy: Spy,
        uses: BTreeMap<Pages, u32>,
        /// The session that alone has used a page.
        users: BTreeMap<Pages, Option<SessionId>>,
        /// How new the request of each page was that used it last, and whether that is an estimate.
        novelties: BTreeMap<Pages, (Novelty, bool)>,
        /// The tokens that were added, by their novelty.
        begun: BTreeMap<u8, u64>,
        evicted_tokens: u64,
        requests: Vec<u32>,
        /// The pages that are not used again.
        ended: BTreeSet<Pages>,
        tails: HashMap<SessionId, Pages>,
        slots: BTreeMap<EngineSlot, Pages>,
        remembered: BTreeMap<Pages, u32>,
        running: Vec<Request>,
        /// The waiting queue.
        waiting: Vec<Waiting>,
        inserted: u64,
        /// The number of insertions.
        insertions: u64,
        used: u64,
        next: u32,
    }

    struct Waiting {
        known: Option<WaitingId>,
        prompt: Pages,
        /// The pages that it was found to need, as far as they were cached since.
        needed: Pages,
    }

    impl Waiting {
        fn needs(&self, (name, path): &Pages) -> bool {
            self.needed.0 == *name && self.needed.1.starts_with(path)
        }
    }

    fn namespace(name: i64) -> Namespace {
        if name == 0 { Namespace::Unnamed } else { Namespace::Number(name) }
    }

    /// Pages of tokens, some of them wide.
    fn tokens(path: &[u8]) -> Vec<i64> {
        let first = |page: u8| if page == 2 { 1 << 40 } else { i64::from(page) * 1000 };
        path.iter().flat_map(|&page| (0..32).map(move |at| first(page) + at)).collect()
    }

    impl Engine {
        fn new(window: bool, state: bool) -> Self {
            let spy = Spy::default();
            let mut tree = HybridTree::new(HybridConfig {
                page_size: PAGE,
                order: EvictionOrder::Adaptive(1),
                window: window.then_some(WindowConfig { size: 40, gates: false }),
                state: state.then_some(StateConfig { grid: PAGE, max_per_path: None }),
            });
            tree.queue = Queue::Worth(Box::new(WorthQueue::of_policy(Box::new(spy.clone()), PAGE)));
            Self {
                tree,
                spy,
                uses: BTreeMap::new(),
                users: BTreeMap::new(),
                novelties: BTreeMap::new(),
                begun: BTreeMap::new(),
                evicted_tokens: 0,
                requests: Vec::new(),
                ended: BTreeSet::new(),
                tails: HashMap::new(),
                slots: BTreeMap::new(),
                remembered: BTreeMap::new(),
                running: Vec::new(),
                waiting: Vec::new(),
                inserted: 0,
                insertions: 0,
                used: 0,
                next: 1,
            }
        }

        /// Looks a request up as often as an engine may, and locks what it has found.
        fn begin(&mut self, name: i64, path: &[u8], times: usize, session: Option<SessionId>) {
            let (space, prompt) = (namespace(name), tokens(path));
            for _ in 0..times {
                let found = self.tree.find(&space, &prompt.as_slice()).node;
                let lock = self.tree.lock(found, SkippedParts::default()).unwrap();
                self.tree.unlock(found, lock.receipt, WindowRelease::NotYet).unwrap().unwrap();
            }
            let found = self.tree.find(&space, &prompt.as_slice());
            let receipt = self.tree.lock(found.node, SkippedParts::default()).unwrap().receipt;
            let (node, locked) = (found.node, found.len / PAGE);
            let path = path.to_vec();
            self.running.push(Request { name, path, session, inserted: 0, locked, node, receipt });
        }

        /// Inserts more pages of a running request, and moves its lock.
        fn advance(&mut self, at: usize, more: usize) {
            let Request { name, ref path, session, inserted, locked, node, receipt } = self.running[at];
            let until = (inserted.max(locked) + more).min(path.len());
            let (path, whole) = (path[..until].to_vec(), path.len());
            self.expect(name, &path, [inserted, locked, whole], session);
            let (space, prompt) = (namespace(name), tokens(&path));
            // Pages that were found have their slots; the others get new ones.
            let mut row = self.tree.slots_between(node, self.tree.root()).unwrap();
            let count = u32::try_from(prompt.len() - row.len()).unwrap();
            row.extend((self.next..self.next + count).map(EngineSlot::new));
            self.next += count;
            let insert = Insert {
                found: locked * PAGE,
                inserted: inserted * PAGE,
                prompt: whole * PAGE,
                state: vec![EngineSlot::new(0)],
                session,
                ..Insert::default()
            };
            let mut step = self.tree.begin(&space, &prompt.as_slice(), &row.as_slice(), insert).unwrap();
            let end = loop {
                for action in &step.actions {
                    if let crate::engines::hybrid::Action::Rebuild { node, slots } = action {
                        self.tree.set_value(*node, Part::Window, slots.clone()).unwrap().unwrap();
                    }
                }
                if let Some(result) = step.result {
                    break result.node;
                }
                step = self.tree.advance(&space, &prompt.as_slice(), &row.as_slice()).unwrap();
            };
            for (page, slot) in
                self.tree.slots_between(end, self.tree.root()).unwrap().iter().step_by(PAGE).enumerate()
            {
                self.slots.insert(*slot, (name, path[..=page].to_vec()));
            }
            let lock = self.tree.lock(end, SkippedParts::default()).unwrap();
            self.tree.unlock(node, receipt, WindowRelease::NotYet).unwrap().unwrap();
            let request = &mut self.running[at];
            (request.inserted, request.locked) = (until, until);
            (request.node, request.receipt) = (end, lock.receipt);
        }

        /// Counts what an insertion should count.
        fn expect(
            &mut self,
            name: i64,
            path: &[u8],
            [inserted, locked, whole]: [usize; 3],
            session: Option<SessionId>,
        ) {
            let prefix = |end: usize| (name, path[..end].to_vec());
            self.insertions += 1;
            self.inserted += u64::try_from((path.len().saturating_sub(inserted)) * PAGE).unwrap();
            let cached = (1..=path.len()).take_while(|&end| self.uses.contains_key(&prefix(end))).count();
            let new_behind = |page: usize| narrow((whole - page) * PAGE);
            let novelty_from = |page: usize| novelty(new_behind(page));
            if inserted == 0 {
                self.requests.push(new_behind(locked));
            }
            // Later insertions are as new as earlier ones, once these have added something new.
            let earlier = inserted.checked_sub(1).map(|_| self.novelties[&prefix(inserted)]);
            for end in inserted + 1..=cached {
                self.novelties.insert(prefix(end), earlier.unwrap_or_else(|| (novelty_from(locked), true)));
                *self.uses.get_mut(&prefix(end)).unwrap() += 1;
                self.used += PAGE as u64;
                let user = self.users.get_mut(&prefix(end)).unwrap();
                *user = user.filter(|&user| session == Some(user));
                self.ended.remove(&prefix(end));
            }
            let (mut last, mut new_from) = (0, None);
            for end in cached + 1..=path.len() {
                // The pages before the last one of a block count as those of the block before.
                let is_end = end % 2 == 0;
                if is_end {
                    last = self.remembered.remove(&prefix(end)).unwrap_or_default();
                }
                if (is_end && last == 0) || (!is_end && end == path.len()) {
                    let begin = if is_end { end - 2 } else { end - 1 };
                    new_from.get_or_insert(begin.max(cached));
                }
                self.uses.insert(prefix(end), last + 1);
                self.users.insert(prefix(end), session);
            }
            let of_new = || (novelty_from(new_from.unwrap_or(path.len())), new_from.is_none());
            let novelty = earlier.filter(|&(_, is_estimate)| !is_estimate).unwrap_or_else(of_new);
            for end in cached + 1..=path.len() {
                self.novelties.insert(prefix(end), novelty);
            }
            if path.len() > cached {
                *self.begun.entry(novelty.0 as u8).or_default() += ((path.len() - cached) * PAGE) as u64;
            }
        }

        /// Ends a request, and its turn with it if it is one.
        fn end(&mut self, at: usize, is_last: bool) {
            let Request { node, receipt, name, path, session, locked, .. } = self.running.remove(at);
            self.tree.unlock(node, receipt, WindowRelease::NotYet).unwrap().unwrap();
            let Some(session) = session else { return };
            let after = if is_last { AfterTurn::End } else { AfterTurn::Pause("user") };
            self.tree.end_turn(session, node, after).unwrap();
            self.expect_end(session, (name, path[..locked].to_vec()), is_last);
        }

        fn is_of(&self, pages: &Pages, session: SessionId) -> bool {
            self.users.get(pages) == Some(&Some(session))
        }

        fn expect_end(&mut self, session: SessionId, (name, path): Pages, is_last: bool) {
            let before = self.tails.get(&session).cloned().unwrap_or_default();
            let adds_nothing = !before.1.is_empty() && before.0 == name && before.1.starts_with(&path);
            if !path.is_empty() && !adds_nothing {
                for end in 1..=before.1.len() {
                    let page = (before.0, before.1[..end].to_vec());
                    let is_left = before.0 != name || !path.starts_with(&page.1);
                    let is_locked = self.running.iter().any(|request| {
                        request.name == page.0 && request.path[..request.locked].starts_with(&page.1)
                    });
                    if is_left && !is_locked && self.is_of(&page, session) {
                        self.ended.insert(page);
                    }
                }
                self.tails.remove(&session);
                if self.is_of(&(name, path.clone()), session) {
                    self.tails.insert(session, (name, path));
                }
            }
            let (name, path) = self.tails.get(&session).cloned().unwrap_or_default();
            for end in (1..=path.len()).rev() {
                let page = (name, path[..end].to_vec());
                if !self.is_of(&page, session) {
                    break;
                }
                if is_last {
                    self.ended.insert(page)
                } else {
                    self.ended.remove(&page)
                };
            }
        }

        /// Looks the request of the waiting queue up that is at a place, if one is named, and sets the queue.
        fn wait(&mut self, looked_up: Option<usize>) {
            let known = |request: &Waiting| QueuedRequest { known: request.known, found: None };
            let mut queue: Vec<_> = self.waiting.iter().map(known).collect();
            if let Some(at) = looked_up {
                let (name, path) = self.waiting[at].prompt.clone();
                let found = self.tree.find(&namespace(name), &tokens(&path).as_slice());
                queue[at].found = Some(found.node);
                self.waiting[at].needed = (name, path[..found.len / PAGE].to_vec());
            }
            let numbers = self.tree.set_waiting(&queue);
            for (request, number) in self.waiting.iter_mut().zip(numbers) {
                request.known = Some(number);
            }
        }

        /// The place in the queue of the first request that needs pages.
        fn first_request(&self, pages: &Pages) -> Option<usize> {
            self.waiting.iter().position(|request| request.needs(pages))
        }

        fn is_locked(&self, (name, path): &Pages) -> bool {
            let locks = |request: &Request| request.path[..request.locked].starts_with(path);
            self.running.iter().any(|request| request.name == *name && locks(request))
        }

        /// Evicts tokens in one call: what has ended first, and what requests wait for last, that of the last request first.
        fn evict(&mut self, wanted: usize) {
            let ended = self.tree.queue.worth().unwrap().ended.iter();
            let ended: usize = ended.map(|&(_, leaf)| self.tree.node(leaf).tokens.len()).sum();
            let frees = self.tree.evict_full(wanted);
            let is_ended =
                |slot: &EngineSlot| self.slots.get(slot).is_none_or(|page| self.ended.contains(page));
            assert!(frees.full.len() > ended || frees.full.iter().all(is_ended));
            let page_of = |slot: &EngineSlot| self.slots.get(slot).cloned();
            let gone: BTreeSet<Pages> = frees.full.iter().filter_map(page_of).collect();
            let needed = gone.iter().filter_map(|pages| self.first_request(pages)).min();
            if let Some(first) = needed {
                let is_behind = |other: &&Pages| self.first_request(other).is_none_or(|at| at > first);
                let left = self.uses.keys().filter(|other| !gone.contains(*other) && !self.is_locked(other));
                assert_eq!(left.filter(is_behind).collect::<Vec<_>>(), Vec::<&Pages>::new());
            }
            self.forget(&frees.full);
        }

        fn forget(&mut self, freed: &[EngineSlot]) {
            self.evicted_tokens += freed.len() as u64;
            let gone: BTreeSet<Pages> =
                freed.iter().filter_map(|slot| self.slots.get(slot).cloned()).collect();
            for request in &mut self.waiting {
                while gone.contains(&request.needed) {
                    request.needed.1.pop();
                }
            }
            // A tail moves up as far as its session alone has used the pages.
            for (session, tail) in std::mem::take(&mut self.tails) {
                let mut at = tail.clone();
                while gone.contains(&at) && self.is_of(&at, session) {
                    at.1.pop();
                }
                if !gone.contains(&at) && (at == tail || self.is_of(&at, session)) {
                    self.tails.insert(session, at);
                }
            }
            for slot in freed {
                let Some(pages) = self.slots.remove(slot) else { continue };
                let uses = self.uses.remove(&pages).expect("it was cached");
                self.novelties.remove(&pages);
                self.users.remove(&pages);
                self.ended.remove(&pages);
                if pages.1.len() % 2 == 0 {
                    self.remembered.insert(pages, uses);
                }
            }
        }

        /// Evicts some pages in steps, and refuses the first leaf if it should.
        fn evict_in_steps(&mut self, part: Part, wanted: usize, mut refuses: bool) {
            assert!(self.tree.begin_eviction(part, wanted));
            let mut evicted = 0;
            loop {
                let frees = match self.tree.next_victim(part, evicted).unwrap() {
                    Victim::Nothing => break,
                    Victim::Leaf(_) if std::mem::take(&mut refuses) => continue,
                    Victim::Leaf(leaf) => self.tree.evict_leaf(leaf).unwrap().unwrap(),
                    Victim::Value(frees) => frees,
                };
                evicted += frees.count(part);
                self.forget(&frees.full);
            }
            assert!(self.tree.end_eviction(part));
        }

        fn check(&self) {
            assert_eq!(self.tree.broken_invariant(), None);
            let told = self.spy.told();
            let is_leaf = |id: &NodeId| self.tree.is_leaf(*id);
            let leaves: BTreeSet<_> = self.tree.runs().filter(is_leaf).collect();
            let worth = self.tree.queue.worth().unwrap();
            let ended = worth.ended.iter().map(|&(_, leaf)| leaf);
            let needed: Vec<NodeId> = worth.waiting.offered().collect();
            let offered = told.leaves.keys().copied().chain(ended).chain(needed.iter().copied());
            assert_eq!(offered.collect::<BTreeSet<_>>(), leaves);
            let offers = told.leaves.len() + worth.ended.len() + needed.len();
            assert_eq!((offers, worth.len()), (leaves.len(), leaves.len()));
            let needing = |&id: &NodeId| {
                let slots = self.tree.node(id).value(Part::Full);
                self.first_request(&self.slots[&slots[slots.len() - PAGE]])
            };
            let mut expected: Vec<_> =
                leaves.iter().filter_map(|id| Some((Reverse(needing(id)?), *id))).collect();
            expected.sort_unstable();
            assert_eq!(needed, expected.into_iter().map(|(_, id)| id).collect::<Vec<_>>());
            let mut pages = 0;
            for id in self.tree.runs() {
                let node = self.tree.node(id);
                let Past { history, user, is_estimate, .. } = *worth.past(id);
                for slot in node.value(Part::Full).iter().step_by(PAGE) {
                    let page = &self.slots[slot];
                    assert_eq!((history.uses, user), (self.uses[page], self.users[page]), "{page:?}");
                    assert_eq!((history.novelty, is_estimate), self.novelties[page], "{page:?}");
                    assert_eq!(history.outlook == Outlook::Ended, self.ended.contains(page), "{page:?}");
                    pages += 1;
                }
                if let Some((positions, offered)) = told.leaves.get(&id) {
                    assert_eq!(*offered, history);
                    let end = narrow(node.end);
                    assert_eq!(*positions, end - narrow(node.tokens.len())..end);
                }
            }
            assert_eq!(pages, self.uses.len());
            // A shortage comes after the insertion before it.
            let shortages = worth.now.tokens() - self.inserted;
            assert!(shortages <= self.insertions, "{shortages} after {} insertions", self.insertions);
            assert_eq!((told.used, told.evicted_tokens), (self.used, self.evicted_tokens));
            assert_eq!((&told.begun, &told.requests), (&self.begun, &self.requests));
            let mut remembered: Vec<_> = self.remembered.values().copied().collect();
            let mut keyed: Vec<_> = told.evicted.values().copied().collect();
            remembered.sort_unstable();
            keyed.sort_unstable();
            assert_eq!(keyed, remembered);
        }
    }

    #[derive(Clone, Debug)]
    enum Call {
        Begin(i64, Vec<u8>, usize, Option<u64>),
        Advance(prop::sample::Index, usize),
        End(prop::sample::Index, bool),
        Evict(usize),
        EvictInSteps(Part, usize, bool),
        Wait(prop::sample::Index, i64, Vec<u8>),
        LookAgain(prop::sample::Index),
        StopWaiting(prop::sample::Index),
        Reorder,
        Reset,
    }

    fn call() -> impl Strategy<Value = Call> {
        let part = prop::sample::select(Part::ALL.to_vec());
        prop_oneof![
            6 => (0..2_i64, prop::collection::vec(0..3_u8, 1..9), 0..3_usize, prop::option::of(1..4_u64))
                .prop_map(|(name, path, times, session)| Call::Begin(name, path, times, session)),
            8 => (any::<prop::sample::Index>(), 1..6_usize).prop_map(|(at, more)| Call::Advance(at, more)),
            5 => (any::<prop::sample::Index>(), any::<bool>()).prop_map(|(at, is_last)| Call::End(at, is_last)),
            4 => (1..12 * PAGE).prop_map(Call::Evict),
            3 => (part, 1..6 * PAGE, any::<bool>())
                .prop_map(|(part, wanted, refuses)| Call::EvictInSteps(part, wanted, refuses)),
            4 => (any::<prop::sample::Index>(), 0..2_i64, prop::collection::vec(0..3_u8, 1..9))
                .prop_map(|(at, name, path)| Call::Wait(at, name, path)),
            2 => any::<prop::sample::Index>().prop_map(Call::LookAgain),
            2 => any::<prop::sample::Index>().prop_map(Call::StopWaiting),
            1 => Just(Call::Reorder),
            1 => Just(Call::Reset),
        ]
    }

    proptest! {
        #[test]
        fn a_policy_is_told_of_every_use_once(
            window: bool, state: bool, calls in prop::collection::vec(call(), 1..60)
        ) {
            let mut engine = Engine::new(window, state);
            for call in calls {
                match call {
                    Call::Begin(name, path, times, session) => {
                        engine.begin(name, &path, times, session.map(SessionId::new));
                    }
                    Call::Advance(at, more) if !engine.running.is_empty() => {
                        engine.advance(at.index(engine.running.len()), more);
                    }
                    Call::End(at, is_last) if !engine.running.is_empty() => {
                        engine.end(at.index(engine.running.len()), is_last);
                    }
                    Call::Evict(wanted) => engine.evict(wanted),
                    Call::EvictInSteps(part, wanted, refuses) if engine.tree.config.has(part) => {
                        engine.evict_in_steps(part, wanted, refuses);
                    }
                    Call::Wait(at, name, path) => {
                        let at = at.index(engine.waiting.len() + 1);
                        let needed = (name, Vec::new());
                        engine.waiting.insert(at, Waiting { known: None, prompt: (name, path), needed });
                        engine.wait(Some(at));
                    }
                    Call::LookAgain(at) if !engine.waiting.is_empty() => {
                        engine.wait(Some(at.index(engine.waiting.len())));
                    }
                    Call::StopWaiting(at) if !engine.waiting.is_empty() => {
                        engine.waiting.remove(at.index(engine.waiting.len()));
                        engine.wait(None);
                    }
                    Call::Reorder => {
                        engine.waiting.reverse();
                        engine.wait(None);
                    }
                    Call::Reset if engine.running.is_empty() => {
                        engine.tree.reset();
                        engine.uses.clear();
                        engine.users.clear();
                        engine.novelties.clear();
                        engine.ended.clear();
                        engine.tails.clear();
                        engine.slots.clear();
                        for request in &mut engine.waiting {
                            request.needed.1.clear();
                        }
                    }
                    _ => (),
                }
                engine.check();
            }
            while !engine.running.is_empty() {
                engine.end(0, false);
            }
            engine.evict(usize::MAX);
            engine.check();
            prop_assert!(engine.uses.is_empty(), "without locks everything can be evicted");
        }
    }
}
