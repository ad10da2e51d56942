//! A queue of leaves in the order of their ranks.
//!
//! *Cost.* A call is logarithmic in the number of leaves. Each leaf takes 3 words.

use std::collections::BTreeSet;
use std::ops::Bound;

use super::{NodeId, Tick};
use crate::base::{Id, widen};

/// The rank of a leaf: its level, and within a level a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank(u64);

impl Rank {
    /// Creates the rank of a level and a time. Levels from 65,535 on count as one, and so do times from 2^48
    /// on.
    pub(super) fn new(level: u32, at: Tick) -> Self {
        let level = u64::from(level.min(u32::from(u16::MAX)));
        Self(level << 48 | at.tokens().min((1 << 48) - 1))
    }
}

/// A set of leaves, the lowest rank first; of equal ranks, the lowest number.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    order: BTreeSet<(Rank, NodeId)>,
    /// The rank of each leaf in `order`, by number. The entries of leaves that are not in it are stale.
    ranks: Vec<Rank>,
}

impl Queue {
    /// Adds a leaf that is not in the queue.
    pub(super) fn insert(&mut self, leaf: NodeId, rank: Rank) {
        let at = widen(leaf.number());
        if at >= self.ranks.len() {
            self.ranks.resize(at + 1, Rank::default());
        }
        self.ranks[at] = rank;
        self.order.insert((rank, leaf));
    }

    /// Removes a leaf.
    pub(super) fn remove(&mut self, leaf: NodeId) {
        self.order.remove(&(self.ranks[widen(leaf.number())], leaf));
    }

    /// Returns the size of the bookkeeping in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.order.len() * size_of::<(Rank, NodeId)>() + self.ranks.capacity() * size_of::<Rank>()
    }

    /// Returns the leaf that follows `leaf`.
    pub(super) fn after(&self, leaf: NodeId) -> Option<NodeId> {
        let this = (self.ranks[widen(leaf.number())], leaf);
        self.order.range((Bound::Excluded(this), Bound::Unbounded)).next().map(|&(_, next)| next)
    }

    /// Returns the leaf of the lowest rank.
    pub(super) fn first(&self) -> Option<NodeId> {
        self.order.first().map(|&(_, leaf)| leaf)
    }
}
