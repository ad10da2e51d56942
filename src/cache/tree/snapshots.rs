//! Snapshots of states at the ends of nodes.
//!
//! *Cost.* An insertion or a removal looks at the snapshots that come next after the one before it; an insertion without
//! one before it looks at all, if there are nodes below.

use std::ops::Range;

use crate::base::{KeyMap, StateSlot, widen};

use super::evict::Evicted;
use super::{FoundPrefix, Hold, Kind, NodeId, Tick, Tree, narrow};

/// The snapshots of a tree.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    pub(super) by_node: KeyMap<NodeId, Snapshot>,
    /// The number of superseded ones, all of which are unused.
    superseded: usize,
}

#[derive(Debug)]
pub(super) struct Snapshot {
    slot: StateSlot,
    pub(super) rank: SnapshotRank,
    /// The number of tokens up to the snapshot.
    pub(super) end: usize,
    /// The node of the snapshot before it on its path.
    pub(super) above: Option<NodeId>,
    /// The nodes of the snapshots whose `above` it is.
    pub(super) below: Vec<NodeId>,
    /// Whether a request has resumed from it, or it is the last one of a prompt.
    pub(super) was_chosen: bool,
    /// The number of requests that have resumed from it, and the one that made it.
    pub(super) uses: u32,
    /// When one of them did so last.
    pub(super) used: Tick,
    /// Whether no lease ends at its node.
    pub(super) is_unused: bool,
}

/// The rank of a snapshot. Snapshots of the lowest rank are evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SnapshotRank {
    /// A later snapshot of the same request supersedes it.
    Superseded,
    /// It is the last snapshot of its request.
    Last,
    /// A waiting request will resume from it. No snapshot has this rank for itself.
    Needed,
}

impl Snapshots {
    pub(super) fn len(&self) -> usize {
        self.by_node.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.by_node.capacity() * (size_of::<(NodeId, Snapshot)>() + 1)
            + self.by_node.len() * size_of::<NodeId>()
    }

    /// Returns the positions from the snapshot at `above`, or from the beginning, up to `end`.
    pub(super) fn positions(&self, above: Option<NodeId>, end: usize) -> Range<u32> {
        let above = above.and_then(|above| self.by_node.get(&above));
        narrow(above.map_or(0, |above| above.end))..narrow(end)
    }

    fn remove(&mut self, node: NodeId) -> Option<StateSlot> {
        let Snapshot { slot, above, below, rank, .. } = self.by_node.remove(&node)?;
        self.superseded -= usize::from(rank == SnapshotRank::Superseded);
        for other in &below {
            self.by_node.get_mut(other).expect("a snapshot below").above = above;
        }
        if let Some(above) = above.and_then(|above| self.by_node.get_mut(&above)) {
            above.below.retain(|&other| other != node);
            above.below.extend(below);
        }
        Some(slot)
    }

    /// Records that a lease ends at `node`, where a request resumes now if that is a `use_at`. A snapshot at which
    /// another lease ends is not superseded.
    pub(super) fn set_leased(&mut self, node: NodeId, use_at: Option<Tick>) {
        if let Some(snapshot) = self.by_node.get_mut(&node) {
            self.superseded -= usize::from(snapshot.rank == SnapshotRank::Superseded);
            snapshot.rank = SnapshotRank::Last;
            if let Some(now) = use_at {
                snapshot.was_chosen = true;
                (snapshot.uses, snapshot.used) = (snapshot.uses.saturating_add(1), now);
            }
            snapshot.is_unused = false;
        }
    }

    /// Records that the last lease that ended at `node` was released.
    pub(super) fn set_unused(&mut self, node: NodeId) {
        if let Some(snapshot) = self.by_node.get_mut(&node) {
            snapshot.is_unused = true;
        }
    }

    /// Records that the snapshot at `node` is the last one of a prompt.
    fn set_chosen(&mut self, node: Option<NodeId>) {
        if let Some(snapshot) = node.and_then(|node| self.by_node.get_mut(&node)) {
            snapshot.was_chosen = true;
        }
    }

    /// Makes the snapshot at `node` superseded, so that it is evicted before others, if no lease ends there.
    pub(super) fn supersede(&mut self, node: NodeId) {
        if let Some(snapshot) = self.by_node.get_mut(&node).filter(|snapshot| snapshot.is_unused) {
            self.superseded += usize::from(snapshot.rank != SnapshotRank::Superseded);
            snapshot.rank = SnapshotRank::Superseded;
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
        let above = self.insert_snapshot(hold.node, slot);
        self.node_mut(hold.node).has_snapshot = true;
        self.offer_snapshot(hold.node);
        if hold.len <= hold.prompt_len {
            return;
        }
        match hold.own_snapshot.replace(hold.node) {
            Some(earlier) => self.snapshots.supersede(earlier),
            None => self.snapshots.set_chosen(above),
        }
    }

    /// Inserts a snapshot between those on the path to its node and those below. Returns the one above it.
    fn insert_snapshot(&mut self, node: NodeId, slot: StateSlot) -> Option<NodeId> {
        let Self { snapshots, nodes, now, .. } = self;
        let (end, parent) = (widen(nodes[node].end), nodes[node].parent);
        let next_above = |mut at: NodeId| {
            while nodes[at].kind == Kind::Run && !nodes[at].has_snapshot {
                at = nodes[at].parent;
            }
            (nodes[at].kind == Kind::Run).then_some(at)
        };
        let above = next_above(parent);
        let mut below = Vec::new();
        if nodes[node].children > 0 {
            let is_after = |&at: &NodeId| {
                let mut at = at;
                while widen(nodes[at].end) > end {
                    at = nodes[at].parent;
                }
                at == node
            };
            if let Some(above) = above.and_then(|above| snapshots.by_node.get_mut(&above)) {
                (below, above.below) = std::mem::take(&mut above.below).into_iter().partition(is_after);
            } else {
                let all = snapshots.by_node.iter();
                let first = all.filter(|(_, other)| other.above.is_none()).map(|(&other, _)| other);
                below.extend(first.filter(is_after));
            }
            for other in &below {
                snapshots.by_node.get_mut(other).expect("a snapshot below").above = Some(node);
            }
        }
        if let Some(above) = above.and_then(|above| snapshots.by_node.get_mut(&above)) {
            above.below.push(node);
        }
        let rank = SnapshotRank::Last;
        let snapshot = Snapshot {
            slot,
            rank,
            end,
            above,
            below,
            was_chosen: false,
            uses: 1,
            used: *now,
            is_unused: false,
        };
        let previous = snapshots.by_node.insert(node, snapshot);
        debug_assert!(previous.is_none(), "a snapshot is not replaced");
        above
    }

    /// Returns whether there is a superseded snapshot that no waiting request needs.
    pub(super) fn has_superseded(&self) -> bool {
        let is_superseded = |(&node, one): (&NodeId, &Snapshot)| {
            one.rank == SnapshotRank::Superseded && !self.queues.waiting.needs(node)
        };
        self.snapshots.superseded > 0 && self.snapshots.by_node.iter().any(is_superseded)
    }

    /// Returns the snapshot at the end of what was found.
    pub(in crate::cache) fn snapshot_behind(&self, found: &FoundPrefix) -> Option<StateSlot> {
        let place = found.place;
        let is_whole = place.pages == self.node(place.node).pages.len();
        if is_whole { self.snapshot_at(place.node) } else { None }
    }

    /// Takes the snapshot at the end of a hold, if nothing ends or goes on there but that hold and `others`, and no waiting
    /// request needs it.
    pub(in crate::cache) fn take_own_snapshot(&mut self, hold: &mut Hold, others: u32) -> Option<StateSlot> {
        let here = self.node(hold.node);
        let is_alone = here.children == 0
            && here.has_snapshot
            && here.leases == 1 + others
            && !self.queues.waiting.needs(hold.node);
        if !is_alone {
            return None;
        }
        if hold.own_snapshot == Some(hold.node) {
            hold.own_snapshot = None;
        }
        self.remove_snapshot(hold.node)
    }

    /// Returns whether there is a snapshot at `node`, which is on the path to the end of `hold`, and no other
    /// lease ends there.
    pub(super) fn is_alone_at(&self, node: NodeId, hold: &Hold) -> bool {
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

    /// Describes a broken link between the snapshots, if there is one.
    pub(super) fn broken_snapshot(&self) -> Option<String> {
        let by_node = &self.snapshots.by_node;
        let superseded = by_node.values().filter(|one| one.rank == SnapshotRank::Superseded).count();
        if superseded != self.snapshots.superseded {
            return Some(format!("{superseded} snapshots are superseded, not {}", self.snapshots.superseded));
        }
        by_node.iter().find_map(|(&node, snapshot)| {
            let here = self.node(node);
            let before = self.path(here.parent).find(|&at| self.node(at).has_snapshot);
            if snapshot.above != before || snapshot.end != widen(here.end) {
                return Some(format!("the snapshot of {node:?} is linked to {:?}", snapshot.above));
            }
            let below = by_node.values().filter(|other| other.above == Some(node)).count();
            let is_listed =
                |other: &NodeId| by_node.get(other).is_some_and(|other| other.above == Some(node));
            let all_listed = snapshot.below.len() == below && snapshot.below.iter().all(is_listed);
            let is_superseded = snapshot.rank == SnapshotRank::Superseded;
            if is_superseded && !snapshot.is_unused {
                return Some(format!("the snapshot of {node:?} is superseded and in use"));
            }
            (!all_listed).then(|| format!("{node:?} lists {:?} below, of {below}", snapshot.below))
        })
    }

    pub(super) fn drop_snapshot(&mut self, node: NodeId, evicted: &mut Evicted) {
        if self.node(node).has_snapshot {
            evicted.states.extend(self.remove_snapshot(node));
        }
    }

    pub(super) fn remove_snapshot(&mut self, node: NodeId) -> Option<StateSlot> {
        self.move_needs_to_snapshot_before(node);
        self.node_mut(node).has_snapshot = false;
        self.snapshots.remove(node)
    }

    /// Removes and returns all snapshots.
    pub(super) fn take_snapshots(&mut self) -> Vec<StateSlot> {
        let all = std::mem::take(&mut self.snapshots);
        all.by_node.into_values().map(|snapshot| snapshot.slot).collect()
    }
}
