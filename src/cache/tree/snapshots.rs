//! Snapshots of states at the ends of nodes, and the order of their eviction.

use std::collections::{BTreeSet, HashMap};

use crate::base::StateSlot;

use super::evict::Evicted;
use super::{FoundPrefix, Hold, NodeId, Tick, Tree};

/// The snapshots of a tree.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    by_node: HashMap<NodeId, Snapshot>,
    /// The snapshots at whose node no lease ends, in the order of their eviction.
    unused: BTreeSet<(SnapshotRank, Tick, NodeId)>,
}

#[derive(Debug)]
struct Snapshot {
    slot: StateSlot,
    rank: SnapshotRank,
    /// If the snapshot is unused, the last use of its node when it became so.
    since: Option<Tick>,
}

/// The rank of a snapshot. Snapshots of the lowest rank are evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SnapshotRank {
    /// A later snapshot of the same request supersedes it.
    Superseded,
    /// It is the last snapshot of its request.
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

    /// Records that a lease ends at `node`. A snapshot from which another request resumes is not superseded.
    pub(super) fn set_used(&mut self, node: NodeId) {
        let Some(snapshot) = self.by_node.get_mut(&node) else { return };
        if let Some(since) = snapshot.since.take() {
            self.unused.remove(&(snapshot.rank, since, node));
        }
        snapshot.rank = SnapshotRank::Last;
    }

    /// Records that the last lease that ended at `node` was released. The last use of `node` was at `used`.
    pub(super) fn set_unused(&mut self, node: NodeId, used: Tick) {
        let Some(snapshot) = self.by_node.get_mut(&node) else { return };
        snapshot.since = Some(used);
        self.unused.insert((snapshot.rank, used, node));
    }

    /// Makes the snapshot at `node` superseded, so that it is evicted before others, if no lease ends there.
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

    /// Returns the unused snapshot to evict next. Uses of inner nodes are not recorded here, so `last_use` is
    /// asked for the last use of a node.
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

    /// Adds a snapshot of the state at the end of a hold, which has tokens and no snapshot there. It
    /// supersedes the previous snapshot that was added through this hold, if both are after the tokens of the
    /// prompt.
    pub fn set_snapshot(&mut self, hold: &mut Hold, slot: StateSlot) {
        let snapshot = Snapshot { slot, rank: SnapshotRank::Last, since: None };
        let previous = self.snapshots.by_node.insert(hold.node, snapshot);
        debug_assert!(previous.is_none(), "a snapshot is not replaced");
        self.node_mut(hold.node).has_snapshot = true;
        self.offer_snapshot(hold.node);
        if hold.len > hold.prompt_len
            && let Some(earlier) = hold.own_snapshot.replace(hold.node)
        {
            self.snapshots.supersede(earlier);
        }
    }

    /// Evicts a snapshot, to make place for a later one of `hold`. In this order: a superseded one, the one
    /// that the later one will supersede, the least recently used one, and finally the one at the end of the
    /// hold. Snapshots at which other leases end are not evicted.
    pub fn evict_snapshot(&mut self, hold: &mut Hold) -> Option<StateSlot> {
        if !self.snapshots.has_superseded()
            && let Some(own) = hold.own_snapshot.filter(|&own| self.is_alone_at(own, hold))
        {
            hold.own_snapshot = None;
            return self.remove_snapshot(own);
        }
        let Self { snapshots, nodes, .. } = self;
        let unused = snapshots.next(|node| nodes[node].history.used);
        let node = unused.or_else(|| self.is_alone_at(hold.node, hold).then_some(hold.node))?;
        self.remove_snapshot(node)
    }

    /// Returns whether there is a snapshot at `node`, which is on the path to the end of `hold`, and no other
    /// lease ends there.
    fn is_alone_at(&self, node: NodeId, hold: &Hold) -> bool {
        let leases = u32::from(node == hold.node);
        self.node(node).has_snapshot && self.node(node).leases == leases
    }

    /// Returns whether a prefix that ends `len` tokens after its hold, of which `found` are cached, has
    /// tokens and lacks a snapshot at its end.
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

    /// Removes and returns all snapshots.
    pub(super) fn take_snapshots(&mut self) -> Vec<StateSlot> {
        let all = std::mem::take(&mut self.snapshots);
        all.by_node.into_values().map(|snapshot| snapshot.slot).collect()
    }
}
