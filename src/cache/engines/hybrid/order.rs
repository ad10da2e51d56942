//! The order in which leaves are evicted.

use std::collections::BTreeSet;

use super::{Moment, Node, NodeId};

/// The order of leaves: by level, and within it by moment. The lowest goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EvictionRank(i64, u64);

/// The order in which leaves are evicted, by the leaf that goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionOrder {
    /// The leaf used longest ago.
    Lru,
    /// The leaf used last.
    Mru,
    /// The leaf that came first.
    Fifo,
    /// The leaf that came last.
    Filo,
    /// The leaf used least often; of those, the one used longest ago.
    Lfu,
    /// The leaf of lowest priority; of those, the one used longest ago.
    Priority,
    /// Leaves used fewer times than this, then the others; each used longest ago first.
    Slru(u32),
    /// Leaves within this many tokens of the end of the longest prompt that went through them, evicted or
    /// not: what a prompt loses there is soon computed again. Then the others; each used longest ago first.
    Tlru(usize),
}

impl EvictionOrder {
    pub(super) fn rank(self, node: &Node) -> EvictionRank {
        let (Moment(used), Moment(created)) = (node.used, node.created);
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

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.len() * size_of::<(EvictionRank, NodeId)>()
    }
}
