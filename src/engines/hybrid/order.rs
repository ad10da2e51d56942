//! The order in which leaves are evicted.

use std::collections::BTreeSet;

use super::worth::WorthQueue;
use super::{HybridConfig, Node, NodeId, UseTime};

/// The rank of a leaf: its level, and within a level a time. The leaf of the lowest rank is evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EvictionRank(i64, u64);

/// The order in which leaves are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionOrder {
    /// The least recently used leaf first.
    Lru,
    /// The most recently used leaf first.
    Mru,
    /// The leaf that was added first.
    Fifo,
    /// The leaf that was added last.
    Filo,
    /// The least often used leaf first; of several, the least recently used one.
    Lfu,
    /// The leaf of the lowest priority first; of several, the least recently used one.
    Priority,
    /// First the leaves that were used fewer times than this, then the others; both by least recent use.
    Slru(u32),
    /// First the leaves within this many tokens of the end of the longest prompt that contained them, because
    /// the end of a prompt is cheap to compute again; then the others. Both by least recent use. It does not
    /// matter whether the end of the prompt is still cached.
    Tlru(usize),
    /// The leaf that is worth least, by [`PolicyKind::Adaptive`](crate::cache::PolicyKind::Adaptive) for a cache of
    /// this many tokens. An insertion counts as a use of the tokens that the request has not inserted before; look-ups
    /// and locks count nothing.
    Adaptive(usize),
}

impl EvictionOrder {
    pub(super) fn rank(self, node: &Node) -> EvictionRank {
        let (UseTime(used), UseTime(created)) = (node.used, node.created);
        match self {
            Self::Lru => EvictionRank(0, used),
            Self::Mru => EvictionRank(0, !used),
            Self::Fifo => EvictionRank(0, created),
            Self::Filo => EvictionRank(0, !created),
            Self::Lfu => EvictionRank(i64::from(node.hits), used),
            Self::Priority => EvictionRank(node.priority, used),
            Self::Slru(often) => EvictionRank(i64::from(node.hits >= often), used),
            Self::Tlru(tail) => {
                let start = node.end - node.tokens.len();
                EvictionRank(i64::from(start.saturating_add(tail) < node.reach), used)
            }
            // The policy has the order.
            Self::Adaptive(_) => EvictionRank(0, 0),
        }
    }
}

/// The leaves that may be evicted.
#[derive(Debug)]
pub(super) enum Queue {
    /// By rank.
    Ranked(BTreeSet<(EvictionRank, NodeId)>),
    /// By worth.
    Worth(Box<WorthQueue>),
}

impl Queue {
    pub(super) fn new(config: &HybridConfig) -> Self {
        match config.order {
            EvictionOrder::Adaptive(capacity) => {
                Self::Worth(Box::new(WorthQueue::new(capacity, config.page_size)))
            }
            _ => Self::Ranked(BTreeSet::new()),
        }
    }

    pub(super) fn insert(&mut self, rank: EvictionRank, leaf: NodeId, node: &Node) {
        match self {
            Self::Ranked(leaves) => drop(leaves.insert((rank, leaf))),
            Self::Worth(leaves) => leaves.insert(leaf, node),
        }
    }

    pub(super) fn remove(&mut self, rank: EvictionRank, leaf: NodeId) {
        match self {
            Self::Ranked(leaves) => drop(leaves.remove(&(rank, leaf))),
            Self::Worth(leaves) => leaves.remove(leaf),
        }
    }

    /// Removes all leaves, which are `leaves`.
    pub(super) fn clear(&mut self, leaves: impl Iterator<Item = NodeId>) {
        match self {
            Self::Ranked(all) => all.clear(),
            Self::Worth(all) => all.clear(leaves),
        }
    }

    /// Returns the leaf to evict next of a tree with `cached` tokens.
    pub(super) fn first(&mut self, cached: usize) -> Option<NodeId> {
        match self {
            Self::Ranked(leaves) => leaves.first().map(|&(_, leaf)| leaf),
            Self::Worth(leaves) => leaves.first(cached),
        }
    }

    /// Calls `visit` with `count` leaves that will probably be evicted next, if `first` is the first one.
    pub(super) fn visit_next(&self, first: NodeId, count: usize, visit: impl FnMut(NodeId)) {
        match self {
            Self::Ranked(leaves) => leaves.iter().map(|&(_, leaf)| leaf).take(count).for_each(visit),
            Self::Worth(leaves) => leaves.after(first).take(count).for_each(visit),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Ranked(leaves) => leaves.len(),
            Self::Worth(leaves) => leaves.len(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Ranked(leaves) => leaves.len() * size_of::<(EvictionRank, NodeId)>(),
            Self::Worth(leaves) => leaves.bytes(),
        }
    }

    /// Returns the leaves by worth, if that is the order.
    pub(super) fn worth(&self) -> Option<&WorthQueue> {
        match self {
            Self::Ranked(_) => None,
            Self::Worth(leaves) => Some(leaves),
        }
    }

    pub(super) fn worth_mut(&mut self) -> Option<&mut WorthQueue> {
        match self {
            Self::Ranked(_) => None,
            Self::Worth(leaves) => Some(leaves),
        }
    }
}
