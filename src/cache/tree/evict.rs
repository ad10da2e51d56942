//! Eviction of prefixes: in the order of the policy, by namespace, or with their last lease.

use std::collections::{BTreeSet, VecDeque};

use crate::base::{Page, StateSlot, check_memory, widen};

use super::cause::{Cause, Pressure, Reason};
use super::roots::retain_listed;
use super::{
    History, Kind, Namespace, Node, NodeId, Outlook, PageHash, Policy, RollingHash, ShortVec, Tick, Tree,
    is_below,
};
use crate::cache::WaitingNeeds;
use crate::cache::block_keys::visit_ends_back;

/// The number of entries in the histogram of ages: one for each power of two of tokens.
pub const AGE_BUCKETS: usize = 40;

/// Pages and snapshots that a tree has removed, for the caller to free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Evicted {
    /// The numbers of the pages in the allocator.
    pub pages: Vec<Page>,
    /// The track slots of the snapshots.
    pub states: Vec<StateSlot>,
    /// The keys of the pages, if the tree keeps keys, those of the least valuable pages first.
    pub keys: Vec<PageHash>,
    /// The history of each page in `keys`.
    pub histories: Vec<History>,
}

/// The evictable leaves, in the order of their eviction.
#[derive(Debug)]
pub(super) struct Queues {
    pub(super) policy: Box<dyn Policy>,
    /// The leaves that will not be used again, which are evicted before those of the policy: the least recently used
    /// first.
    ended: BTreeSet<(Tick, NodeId)>,
    /// The nodes that waiting requests need. The leaves among them are evicted when the policy has none.
    pub(super) waiting: WaitingNeeds<NodeId>,
    /// The leaves with a priority, which are evicted only when there are no others: the lowest priority first, then the
    /// least recently used.
    retained: BTreeSet<(u8, Tick, NodeId)>,
    /// The leaf that was evicted last, and the leaves after it that were prefetched because they will
    /// probably be evicted next, in this order.
    upcoming: VecDeque<NodeId>,
}

impl Queues {
    pub(super) fn new(policy: Box<dyn Policy>) -> Self {
        Self {
            policy,
            ended: BTreeSet::new(),
            waiting: WaitingNeeds::default(),
            retained: BTreeSet::new(),
            upcoming: VecDeque::new(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.policy.bytes()
            + self.ended.len() * size_of::<(Tick, NodeId)>()
            + self.waiting.bytes()
            + self.retained.len() * size_of::<(u8, Tick, NodeId)>()
    }
}

/// The leaf to evict next.
pub(super) struct NextLeaf {
    pub(super) leaf: NodeId,
    /// Whether the policy has chosen it.
    is_of_policy: bool,
}

/// The number of pages whose lists count as of no caller's length.
const FEW: usize = 16;

/// How many evictions ahead nodes are prefetched: enough to hide the latency, and few enough that all of them
/// stay in the cache.
const NODES_AHEAD: usize = 24;

/// How many evictions ahead edges are prefetched. The node must have arrived by then.
const EDGES_AHEAD: usize = 12;

impl Tree {
    /// Evicts at least `pages` pages, or all evictable ones if there are fewer. If the host has little memory,
    /// it evicts fewer pages, or none.
    pub fn evict(&mut self, pages: usize, cause: Cause) -> Evicted {
        let mut evicted = Evicted::default();
        let Some(pages) = self.fitting(pages.min(self.counts.evictable())) else { return evicted };
        if pages == 0 {
            return evicted;
        }
        let has_keys = self.keyed.reserve_removed(pages, &mut evicted.keys, &mut evicted.histories);
        if has_keys.is_err() || evicted.pages.try_reserve(pages).is_err() {
            return evicted;
        }
        self.record_shortage();
        let mut reason = Reason::from(cause);
        while evicted.pages.len() < pages {
            let Some(NextLeaf { leaf, is_of_policy }) = self.next_leaf() else { break };
            // The policy cannot guess what follows a leaf that it does not have.
            if is_of_policy {
                self.fetch_after(leaf);
            }
            reason.worth = if is_of_policy { self.queues.policy.judged() } else { None };
            let wanted = pages - evicted.pages.len();
            let count = if is_of_policy { self.may_evict(leaf, wanted) } else { wanted };
            self.trim(leaf, count, &reason, &mut evicted);
        }
        evicted
    }

    /// Tells the policy that the memory is short.
    pub(super) fn record_shortage(&mut self) {
        let cached = self.counts.cached * self.page_size;
        self.queues.policy.record_shortage(cached as u64, self.now);
    }

    /// Returns the leaf to evict next, after [`Self::record_shortage`].
    pub(super) fn next_leaf(&mut self) -> Option<NextLeaf> {
        let now = self.now;
        let Queues { policy, ended, waiting, retained, .. } = &mut self.queues;
        let ended = ended.first().map(|&(.., leaf)| leaf);
        let of_policy = if ended.is_none() { policy.victim(now) } else { None };
        let needed = || waiting.offered().next();
        let retained = || retained.first().map(|&(.., leaf)| leaf);
        let leaf = ended.or(of_policy).or_else(needed).or_else(retained)?;
        Some(NextLeaf { leaf, is_of_policy: of_policy.is_some() })
    }

    /// Returns how many of the last `wanted` pages of the policy's victim may go before it chooses again: at least one.
    fn may_evict(&mut self, leaf: NodeId, wanted: usize) -> usize {
        let here = &self.nodes[leaf];
        let count = wanted.min(here.pages.len());
        if count <= 1 {
            return 1;
        }
        // Without its end, no request goes on from a leaf that has a snapshot there.
        if here.has_snapshot {
            return count;
        }
        let positions = here.end - super::narrow(count * self.page_size)..here.end;
        (widen(self.queues.policy.may_evict(positions, &here.history)) / self.page_size).max(1)
    }

    /// Returns the numbers of tokens that were evicted, by age: entry `n` counts those since whose last use fewer than
    /// `2**n` tokens were looked up.
    #[must_use]
    pub fn eviction_ages(&self) -> [u64; AGE_BUCKETS] {
        self.evicted_ages.map(|pages| pages * self.page_size as u64)
    }

    /// Counts the evictions of `earlier`, too.
    pub fn keep_ages_of(&mut self, earlier: &Self) {
        self.evicted_ages = earlier.evicted_ages;
    }

    /// Returns the number of pages, at most `pages`, for the lists of which the host has memory.
    fn fitting(&self, pages: usize) -> Option<usize> {
        let bytes = |pages: usize| 2 * pages * size_of::<Page>() + self.keyed.bytes_to_remove(pages);
        if pages <= FEW {
            return Some(pages);
        }
        let halves = std::iter::successors(Some(pages), |pages| Some(pages / 2));
        halves.take_while(|pages| *pages > FEW).find(|&pages| check_memory(bytes(pages)).is_ok())
    }

    /// Prefetches the memory that the evictions after that of `leaf` will touch: first the nodes and, a few
    /// evictions later, their generations and edges.
    fn fetch_after(&mut self, leaf: NodeId) {
        let Queues { policy, upcoming, .. } = &mut self.queues;
        // A leaf that was evicted in part is still the first one.
        if upcoming.front() != Some(&leaf) {
            upcoming.pop_front();
        }
        if upcoming.front() != Some(&leaf) {
            upcoming.clear();
            upcoming.push_back(leaf);
        }
        while upcoming.len() < NODES_AHEAD
            && let Some(next) = policy.guess_after(upcoming[upcoming.len() - 1])
        {
            self.nodes.prefetch(next);
            upcoming.push_back(next);
            if let Some(near) = upcoming.len().checked_sub(NODES_AHEAD - EDGES_AHEAD) {
                let near = upcoming[near];
                self.nodes.prefetch_generation(near);
                self.edges.prefetch(self.nodes[near].parent, self.nodes[near].fingerprint);
            }
        }
    }

    /// Evicts up to `count` pages from the end of a leaf.
    pub(super) fn trim(&mut self, leaf: NodeId, count: usize, reason: &Reason, evicted: &mut Evicted) {
        let here = self.node(leaf);
        let (history, end, pages) = (here.history, here.end, here.pages.len());
        let keep = pages.saturating_sub(count);
        let age = self.now.since(history.used);
        let age = widen(u64::BITS - age.leading_zeros()).min(AGE_BUCKETS - 1);
        self.evicted_ages[age] += (pages - keep) as u64;
        let begin = end - super::narrow((pages - keep) * self.page_size);
        self.queues.policy.record_evicted(begin..end, &history, self.now);
        self.offer_evicted(leaf, keep..pages);
        let (at, hash) = self.record_eviction(leaf, keep, reason);
        if keep == 0 {
            let parent = self.node(leaf).parent;
            self.remove(leaf, evicted);
            if self.node(parent).children == 0 {
                self.queue(parent);
                self.drop_if_empty(parent);
            }
            return;
        }
        self.drop_snapshot(leaf, evicted);
        let page_size = self.page_size;
        let here = self.node_mut(leaf);
        let capacity = here.heap_capacity();
        let trimmed = here.pages.split_off(keep);
        here.tokens.truncate(keep * page_size);
        if here.tokens.heap_capacity() > 2 * here.tokens.len() {
            here.tokens.shrink_to_fit();
            here.pages.shrink_to_fit();
        }
        let freed = capacity - here.heap_capacity();
        (here.end, here.hash) = (super::narrow(at), hash);
        self.counts.heap_capacity -= freed;
        self.counts.cached -= trimmed.len();
        self.counts.pinned -= if history.priority > 0 { trimmed.len() } else { 0 };
        self.keyed.record_removed(&trimmed, &history, evicted);
        evicted.pages.extend_from_slice(&trimmed);
    }

    /// Records the eviction of the prefixes that end in a node after its first `keep` pages. Returns the
    /// length of the prefix that remains, and its hash if a part of the node remains.
    fn record_eviction(&mut self, node: NodeId, keep: usize, reason: &Reason) -> (usize, RollingHash) {
        let here = &self.nodes[node];
        let (history, end, mut hash) = (here.history, widen(here.end), here.hash);
        let begin = end - here.tokens.len();
        let until = begin + keep * self.page_size;
        if until < end {
            self.evictions.record(hash.key(), history.used, self.now, reason);
        }
        let every = self.remembered_every;
        if keep > 0 || end - end % every > until {
            let mut cursor = self.rolling.cursor(hash, end);
            let (policy, evictions) = (&mut self.queues.policy, &mut self.evictions);
            let now = self.now;
            let at = visit_ends_back(&mut cursor, end, &here.tokens, until, every, |at, key| {
                if reason.cause.pressure != Pressure::Clear {
                    policy.remember(key, &history, now);
                }
                if at < end {
                    evictions.record(key, history.used, now, reason);
                }
            });
            cursor.pop(&here.tokens[until - begin..at - begin]);
            hash = cursor.hash();
        }
        (until, hash)
    }

    /// Removes a leaf without locks.
    pub(super) fn remove(&mut self, leaf: NodeId, evicted: &mut Evicted) {
        self.unqueue(leaf);
        self.move_tail_up(leaf);
        self.move_needs_up(leaf);
        self.unlink(leaf);
        self.drop_snapshot(leaf, evicted);
        let is_pinned = self.is_pinned(leaf);
        self.counts.heap_capacity -= self.node(leaf).heap_capacity();
        let here = self.node_mut(leaf);
        here.tokens = ShortVec::new();
        let pages = std::mem::take(&mut here.pages);
        self.counts.cached -= pages.len();
        self.counts.pinned -= if is_pinned { pages.len() } else { 0 };
        self.keyed.record_removed(&pages, &self.nodes[leaf].history, evicted);
        self.nodes.vacate(leaf);
        evicted.pages.extend_from_slice(&pages);
    }

    /// Removes the prefixes of a namespace, or all of them. Prefixes in use can no longer be found, and are
    /// removed with their last lease.
    pub fn clear(&mut self, namespace: Option<&Namespace>, cause: Cause) -> Evicted {
        let roots: Vec<_> = match namespace {
            Some(name) => self.root(name).into_iter().collect(),
            None => self.roots.ids().collect(),
        };
        let mut nodes: Vec<_> = roots.iter().flat_map(|&root| self.detach(root)).collect();
        // Children are removed before their parents, and in each process in the same order.
        nodes.sort_by_key(|&id| (std::cmp::Reverse(self.node(id).end), id));
        for &id in &nodes {
            let _ = self.record_eviction(id, 0, &cause.into());
        }
        match namespace {
            Some(_) => self.record_all_removed(&nodes),
            None => self.keyed.record_cleared(),
        }
        let mut evicted = Evicted::default();
        for id in nodes {
            if self.node(id).locks == 0 {
                self.remove(id, &mut evicted);
            }
        }
        for root in roots {
            self.drop_if_empty(root);
        }
        evicted
    }

    /// Detaches the prefixes below `root`, so that they can no longer be found, and returns their nodes.
    fn detach(&mut self, root: NodeId) -> Vec<NodeId> {
        let mut nodes = self.roots.detach(root);
        retain_listed(&mut nodes, |id| is_below(self.node(id), root));
        self.node_mut(root).kind = Kind::Detached;
        nodes
    }

    /// Records that the pages of `nodes`, with or without leases, can no longer be found.
    fn record_all_removed(&mut self, nodes: &[NodeId]) {
        for &id in nodes {
            let Node { history, pages, .. } = self.node_mut(id);
            let (history, pages) = (*history, std::mem::take(pages));
            self.keyed.record_removed(&pages, &history, &mut Evicted::default());
            self.node_mut(id).pages = pages;
        }
    }

    /// Removes everything, whether there are leases or not. The tree must not be used after this call.
    pub fn take_all(&mut self) -> Evicted {
        let mut pages = Vec::new();
        for node in self.nodes.iter_mut() {
            pages.extend_from_slice(&std::mem::take(&mut node.pages));
        }
        Evicted { pages, states: self.take_snapshots(), ..Evicted::default() }
    }

    /// Removes `node` and its ancestors as far as they are detached and have neither locks nor children.
    pub(super) fn prune(&mut self, node: NodeId) -> Evicted {
        let mut evicted = Evicted::default();
        if self.node(self.node(node).root).kind != Kind::Detached {
            return evicted;
        }
        let mut at = node;
        while self.node(at).kind == Kind::Run && (self.node(at).locks, self.node(at).children) == (0, 0) {
            let parent = self.node(at).parent;
            self.remove(at, &mut evicted);
            at = parent;
        }
        self.drop_if_empty(at);
        evicted
    }

    /// Adds a node to the queue of evictable leaves, if it is such a leaf.
    pub(super) fn queue(&mut self, id: NodeId) {
        let now = self.now;
        let here = self.node_mut(id);
        if here.kind != Kind::Run || here.locks > 0 || here.children > 0 || here.is_queued {
            return;
        }
        here.is_queued = true;
        let Node { history, end, ref tokens, .. } = *here;
        let positions = end - super::narrow(tokens.len())..end;
        if history.priority > 0 {
            self.queues.retained.insert((history.priority, history.used, id));
        } else if self.queues.waiting.needs(id) {
            self.queues.waiting.offer(id);
        } else if history.outlook == Outlook::Ended {
            self.queues.ended.insert((history.used, id));
        } else {
            self.queues.policy.insert(id, positions, &history, now);
        }
    }

    /// Removes a node from the queue of evictable leaves, if it is in it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "an eviction calls it for each leaf")]
    pub(super) fn unqueue(&mut self, id: NodeId) {
        let history = self.node(id).history;
        let here = self.node_mut(id);
        if !std::mem::take(&mut here.is_queued) {
            return;
        }
        if history.priority > 0 {
            self.queues.retained.remove(&(history.priority, history.used, id));
        } else if self.queues.waiting.needs(id) {
            self.queues.waiting.withdraw(id);
        } else if history.outlook == Outlook::Ended {
            self.queues.ended.remove(&(history.used, id));
        } else {
            self.queues.policy.remove(id);
        }
    }
}
