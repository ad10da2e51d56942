//! Policies that order leaves by their histories and learn nothing.

use std::fmt;
use std::ops::Range;

use super::queue::{Queue, Rank};
use super::{History, NodeId, Policy, Tick};

/// A ranking of leaves by their histories.
pub(super) trait Ranking: fmt::Debug + Send {
    /// Returns the rank of a leaf: the leaf of the lowest rank is evicted first.
    fn rank(&self, history: &History) -> Rank;
}

/// The policy of a [`Ranking`].
#[derive(Debug)]
pub(super) struct Ranked<O> {
    order: O,
    queue: Queue,
}

impl<O> Ranked<O> {
    pub(super) fn new(order: O) -> Self {
        Self { order, queue: Queue::default() }
    }
}

impl<O: Ranking> Policy for Ranked<O> {
    fn insert(&mut self, leaf: NodeId, _positions: Range<u32>, history: &History, _now: Tick) {
        self.queue.insert(leaf, self.order.rank(history));
    }

    fn remove(&mut self, leaf: NodeId) {
        self.queue.remove(leaf);
    }

    fn victim(&mut self, _now: Tick) -> Option<NodeId> {
        self.queue.first()
    }

    fn guess_after(&self, leaf: NodeId) -> Option<NodeId> {
        self.queue.after(leaf)
    }

    fn bytes(&self) -> usize {
        self.queue.bytes()
    }
}

#[derive(Debug)]
pub(super) struct Lru;

impl Ranking for Lru {
    fn rank(&self, history: &History) -> Rank {
        Rank::new(0, history.used)
    }
}

#[derive(Debug)]
pub(super) struct Fifo;

impl Ranking for Fifo {
    fn rank(&self, history: &History) -> Rank {
        Rank::new(0, history.published)
    }
}

#[derive(Debug)]
pub(super) struct Lfu;

impl Ranking for Lfu {
    fn rank(&self, history: &History) -> Rank {
        Rank::new(history.uses, history.used)
    }
}

#[derive(Debug)]
pub(super) struct Slru;

impl Ranking for Slru {
    fn rank(&self, history: &History) -> Rank {
        Rank::new(u32::from(history.uses > 1), history.used)
    }
}

#[derive(Debug)]
pub(super) struct Priority;

impl Ranking for Priority {
    fn rank(&self, history: &History) -> Rank {
        Rank::new(u32::from(history.priority), history.used)
    }
}
