//! Eviction of a tree whose pages are of no use behind the last place where a request can resume, its *end*.
//!
//! Pages and ends, which are snapshots or have windows, share memory. What counts is the value of an end (see
//! [`super::snapshot_order`]) for the memory that is freed: of one within a path its own, of one at the end of a leaf also
//! that of the pages there. A policy that estimates no worth, or by whose worth too much was lost, says itself which leaf
//! goes: only the ends within paths go by their value.
//!
//! *Cost.* A look at all ends takes 0.6 ms if there are 5,000. Where there are more than 64, one serves several evictions:
//! those of the least value are remembered.

use super::cause::Cause;
use super::evict::Evicted;
use super::snapshot_order::{FreedMemory, RankedSnapshot};
use super::snapshots::SnapshotRank;
use super::{Kind, NodeId, Tree};

/// Returns for how many more evictions it is enough to have looked at all of so many ends: a 64th of them, and a 16th of
/// thousands, where the next one is worth hardly more.
fn evictions_of(ends: usize) -> usize {
    ends / 64 * (ends / 1024).clamp(1, 4)
}

/// The ends of the least value when all were looked at last.
#[derive(Debug, Default)]
pub(super) struct LeastEnds {
    /// The one of the least value last.
    nodes: Vec<NodeId>,
    /// The one of the most value as it was then.
    most: Option<RankedSnapshot>,
    /// The evictions before all are looked at again.
    left: usize,
}

impl LeastEnds {
    pub(super) fn bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<NodeId>()
    }
}

impl Tree {
    /// Evicts what is worth least for its memory: a leaf without an end; or else an end, and with one of a leaf the
    /// pages that are behind the end before. Returns `None` if there is nothing.
    pub(in crate::cache) fn evict_end(&mut self, freed: FreedMemory, cause: Cause) -> Option<Evicted> {
        self.record_shortage();
        let leaf = self.next_leaf().map(|next| next.leaf);
        let end = match leaf.filter(|&leaf| self.is_bare_leaf(leaf)) {
            Some(bare) => bare,
            None => self.least_end(leaf, freed).or(leaf)?,
        };
        let mut evicted = Evicted::default();
        if !self.node(end).is_queued {
            self.drop_snapshot(end, &mut evicted);
            return Some(evicted);
        }
        let mut leaf = Some(end);
        while let Some(at) = leaf {
            let parent = self.node(at).parent;
            // A root may go with its last leaf.
            let is_run = self.node(parent).kind == Kind::Run;
            self.trim(at, self.node(at).pages.len(), &cause.into(), &mut evicted);
            leaf = Some(parent).filter(|_| is_run && self.is_bare_leaf(parent));
        }
        Some(evicted)
    }

    /// Returns the end to evict next: that of the policy's leaf, or another one of less value.
    fn least_end(&mut self, leaf: Option<NodeId>, freed: FreedMemory) -> Option<NodeId> {
        let by_value = leaf.is_some_and(|leaf| {
            let history = self.node(leaf).history;
            let policy = &mut self.queues.policy;
            policy.worth(&history, self.now).is_some() && policy.may_replace()
        });
        let of_policy = leaf.and_then(|leaf| self.judge(freed).rank_unused(leaf));
        // Superseded ones go before those that are remembered, and a leaf that a waiting request needs after all others.
        let is_last_left = of_policy.is_none_or(|end| end.rank == SnapshotRank::Needed);
        if self.least_ends.left == 0 || is_last_left || self.has_superseded() {
            self.remember_least_ends(by_value, freed);
        } else {
            self.least_ends.left -= 1;
        }
        let other = self.remembered_end(by_value, freed);
        of_policy.into_iter().chain(other).min_by(RankedSnapshot::order).map(|least| least.node)
    }

    /// Looks at all ends, those of leaves only if there are `leaves`, and remembers a few of the least value.
    fn remember_least_ends(&mut self, leaves: bool, freed: FreedMemory) {
        let left = evictions_of(self.snapshots.len());
        let mut ends: Vec<_> = self.judge(freed).rank_all(leaves).collect();
        if ends.len() > left + 1 {
            ends.select_nth_unstable_by(left, RankedSnapshot::order);
            ends.truncate(left + 1);
        }
        ends.sort_unstable_by(|one, other| other.order(one));
        let nodes = ends.iter().map(|end| end.node).collect();
        self.least_ends = LeastEnds { nodes, most: ends.first().copied(), left };
    }

    /// Returns the end of the least value of those remembered whose value has not risen.
    fn remembered_end(&mut self, leaves: bool, freed: FreedMemory) -> Option<RankedSnapshot> {
        let most = self.least_ends.most?;
        while let Some(&node) = self.least_ends.nodes.last() {
            let ranked = self.judge(freed).rank_unused(node);
            let may_go = |end: &RankedSnapshot| leaves || !self.node(end.node).is_queued;
            let least = ranked.filter(|end| end.order(&most).is_le() && may_go(end));
            if least.is_some() {
                return least;
            }
            self.least_ends.nodes.pop();
        }
        None
    }

    /// Returns whether a node is an evictable leaf without a snapshot.
    fn is_bare_leaf(&self, node: NodeId) -> bool {
        self.node(node).is_queued && !self.node(node).has_snapshot
    }
}
