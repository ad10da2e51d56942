//! Snapshots of states at the ends of nodes, and the order in which they are given up.

use std::collections::{BTreeSet, HashMap};

use crate::base::StateSlot;

use super::evict::Evicted;
use super::{FoundPrefix, Hold, NodeId, Tick, Tree};

/// The snapshots of a tree.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    by_node: HashMap<NodeId, Snapshot>,
    /// The snapshots at whose node no lease ends, in the order in which they go.
    unused: BTreeSet<(SnapshotRank, Tick, NodeId)>,
}

#[derive(Debug)]
struct Snapshot {
    slot: StateSlot,
    rank: SnapshotRank,
    /// The last use of its node when the snapshot became unused, if it is.
    since: Option<Tick>,
}

/// The order in which snapshots go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SnapshotRank {
    /// A later snapshot of the same request took its place.
    Superseded,
    /// No later one did: it goes after those.
    Last,
}

impl Snapshots {
    pub(super) fn len(&self) -> usize {
        self.by_node.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.by_node.capacity() * (size_of::<(NodeId, Snapshot)>() + 1)
            + self.unused.len() * size_of::<(SnapshotRank, Tick, NodeId)>()
    }

    fn remove(&mut self, node: NodeId) -> Option<StateSlot> {
        let Snapshot { slot, rank, since } = self.by_node.remove(&node)?;
        if let Some(since) = since {
            self.unused.remove(&(rank, since, node));
        }
        Some(slot)
    }

    /// Records that a lease ends at `node`: what another request goes on from is not superseded.
    pub(super) fn set_used(&mut self, node: NodeId) {
        let Some(snapshot) = self.by_node.get_mut(&node) else { return };
        if let Some(since) = snapshot.since.take() {
            self.unused.remove(&(snapshot.rank, since, node));
        }
        snapshot.rank = SnapshotRank::Last;
    }

    /// Records that no lease ends at `node` any more, which was used last at `used`.
    pub(super) fn set_unused(&mut self, node: NodeId, used: Tick) {
        let Some(snapshot) = self.by_node.get_mut(&node) else { return };
        snapshot.since = Some(used);
        self.unused.insert((snapshot.rank, used, node));
    }

    /// Lets the snapshot at `node` go before others, if no lease ends there.
    fn supersede(&mut self, node: NodeId) {
        let Some(snapshot) = self.by_node.get_mut(&node) else { return };
        if let Some(since) = snapshot.since {
            self.unused.remove(&(snapshot.rank, since, node));
            snapshot.rank = SnapshotRank::Superseded;
            self.unused.insert((snapshot.rank, since, node));
        }
    }

    fn has_superseded(&self) -> bool {
        self.unused.first().is_some_and(|&(rank, ..)| rank == SnapshotRank::Superseded)
    }

    /// Returns the unused snapshot that goes next. Nodes on the way to others are used without a note here,
    /// so that `last_use` is asked.
    fn next(&mut self, last_use: impl Fn(NodeId) -> Tick) -> Option<NodeId> {
        loop {
            let &(rank, since, node) = self.unused.first()?;
            let used = last_use(node);
            if used == since {
                return Some(node);
            }
            self.unused.pop_first();
            self.unused.insert((rank, used, node));
            self.by_node.get_mut(&node).expect("every entry of `unused` is of a snapshot").since = Some(used);
        }
    }
}

impl Tree {
    /// Returns the snapshot at the end of a hold.
    #[must_use]
    pub fn snapshot(&self, hold: &Hold) -> Option<StateSlot> {
        self.snapshot_at(hold.node)
    }

    pub(super) fn snapshot_at(&self, node: NodeId) -> Option<StateSlot> {
        self.snapshots.by_node.get(&node).map(|snapshot| snapshot.slot)
    }

    /// Keeps a snapshot of the state at the end of a hold that has tokens and no snapshot. It supersedes the
    /// one that was kept through this hold before, if both are behind the tokens that were looked up.
    pub fn set_snapshot(&mut self, hold: &mut Hold, slot: StateSlot) {
        let snapshot = Snapshot { slot, rank: SnapshotRank::Last, since: None };
        let previous = self.snapshots.by_node.insert(hold.node, snapshot);
        debug_assert!(previous.is_none(), "a snapshot is not replaced");
        self.node_mut(hold.node).has_snapshot = true;
        self.offer_snapshot(hold.node);
        if hold.len > hold.asked
            && let Some(earlier) = hold.passing.replace(hold.node)
        {
            self.snapshots.supersede(earlier);
        }
    }

    /// Gives up a snapshot for one at a later end of `hold`: one that is superseded, or the one that it will
    /// supersede, or else the least recently used, at last the one at the end. Those that other leases end at
    /// stay.
    pub fn evict_snapshot(&mut self, hold: &mut Hold) -> Option<StateSlot> {
        if !self.snapshots.has_superseded()
            && let Some(own) = hold.passing.filter(|&own| self.is_alone_at(own, hold))
        {
            hold.passing = None;
            return self.remove_snapshot(own);
        }
        let Self { snapshots, nodes, .. } = self;
        let unused = snapshots.next(|node| nodes[node].history.used);
        let node = unused.or_else(|| self.is_alone_at(hold.node, hold).then_some(hold.node))?;
        self.remove_snapshot(node)
    }

    /// Returns whether there is a snapshot at `node`, on the way to the end of `hold`, that no other lease
    /// ends at.
    fn is_alone_at(&self, node: NodeId, hold: &Hold) -> bool {
        let leases = u32::from(node == hold.node);
        self.node(node).has_snapshot && self.node(node).leases == leases
    }

    /// Returns whether a prefix that ends `len` tokens behind its hold, of which `found` are cached, has
    /// tokens and no snapshot at its end.
    #[must_use]
    pub fn lacks_snapshot(&self, found: &FoundPrefix, len: usize) -> bool {
        let (place, end) = (found.place, found.begin + len);
        let node = self.node(place.node);
        let has_one = node.has_snapshot && (place.pages, place.len) == (node.pages.len(), end);
        end > 0 && !has_one
    }

    pub(super) fn drop_snapshot(&mut self, node: NodeId, evicted: &mut Evicted) {
        if self.node(node).has_snapshot {
            evicted.states.extend(self.remove_snapshot(node));
        }
    }

    fn remove_snapshot(&mut self, node: NodeId) -> Option<StateSlot> {
        self.node_mut(node).has_snapshot = false;
        self.snapshots.remove(node)
    }

    /// Returns all snapshots, which the tree has no more.
    pub(super) fn take_snapshots(&mut self) -> Vec<StateSlot> {
        let all = std::mem::take(&mut self.snapshots);
        all.by_node.into_values().map(|snapshot| snapshot.slot).collect()
    }
}
