//! The order in which leaves are evicted.

use std::collections::BTreeSet;

use super::{Node, NodeId, UseTime};

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
        }
    }
}

/// The leaves that may be evicted.
#[derive(Debug, Default)]
pub(super) struct Queue(BTreeSet<(EvictionRank, NodeId)>);

impl Queue {
    pub(super) fn insert(&mut self, rank: EvictionRank, leaf: NodeId) {
        self.0.insert((rank, leaf));
    }

    pub(super) fn remove(&mut self, rank: EvictionRank, leaf: NodeId) {
        self.0.remove(&(rank, leaf));
    }

    pub(super) fn first(&self) -> Option<NodeId> {
        self.0.first().map(|&(_, leaf)| leaf)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.0.iter().map(|&(_, leaf)| leaf)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.len() * size_of::<(EvictionRank, NodeId)>()
    }
}
