//! Snapshots of states at the ends of nodes, and the order of their eviction.
//!
//! A snapshot is worth the tokens that would be computed without it: those after the snapshot before it on
//! its path. Of a prompt that is computed in chunks, a snapshot at the end of every chunk saves little more
//! than every second one does, so that snapshots are thinned out evenly before any prompt loses all of its
//! own.
//!
//! *Cost.* An eviction looks at every snapshot. An insertion or a removal does so only if there are nodes below.

use std::cmp::Ordering;

use crate::base::{KeyMap, StateSlot, widen};

use super::cause::Cause;
use super::evict::Evicted;
use super::{FoundPrefix, Hold, Kind, NodeId, Tree};

/// How many times as much a snapshot is worth at which requests are likely to resume: the last one on its
/// path, where a conversation continues, the last one of a prompt, or one from which a request has resumed.
/// At the others a prompt has to part from the cached ones within the tokens up to the next snapshot.
const LIKELY: u64 = 4;

/// The snapshots of a tree.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    by_node: KeyMap<NodeId, Snapshot>,
    /// The number of superseded ones, all of which are unused.
    superseded: usize,
}

#[derive(Debug)]
struct Snapshot {
    slot: StateSlot,
    rank: SnapshotRank,
    /// The number of tokens up to the snapshot.
    end: usize,
    /// The node of the snapshot before it on its path.
    above: Option<NodeId>,
    /// The number of snapshots whose `above` it is.
    below: usize,
    /// Whether a request has resumed from it, or it is the last one of a prompt.
    was_chosen: bool,
    /// Whether no lease ends at its node.
    is_unused: bool,
}

/// The rank of a snapshot. Snapshots of the lowest rank are evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SnapshotRank {
    /// A later snapshot of the same request supersedes it.
    Superseded,
    /// It is the last snapshot of its request.
    Last,
}

/// The value of a snapshot: the tokens that it saves, by the time since its last use.
#[derive(Clone, Copy, Debug)]
struct SnapshotValue {
    saved: u64,
    age: u64,
}

impl SnapshotValue {
    /// Compares `saved / age`.
    fn compare(self, other: Self) -> Ordering {
        let product = |saved: u64, age: u64| u128::from(saved) * u128::from(age);
        product(self.saved, other.age).cmp(&product(other.saved, self.age))
    }
}

impl Snapshots {
    pub(super) fn len(&self) -> usize {
        self.by_node.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.by_node.capacity() * (size_of::<(NodeId, Snapshot)>() + 1)
    }

    /// Returns the tokens from the snapshot above `snapshot` up to it.
    fn gap(&self, snapshot: &Snapshot) -> u64 {
        let above = snapshot.above.and_then(|above| self.by_node.get(&above));
        (snapshot.end - above.map_or(0, |above| above.end)) as u64
    }

    fn remove(&mut self, node: NodeId) -> Option<StateSlot> {
        let Snapshot { slot, above, below, rank, .. } = self.by_node.remove(&node)?;
        self.superseded -= usize::from(rank == SnapshotRank::Superseded);
        if below > 0 {
            for other in self.by_node.values_mut().filter(|other| other.above == Some(node)) {
                other.above = above;
            }
        }
        if let Some(above) = above.and_then(|above| self.by_node.get_mut(&above)) {
            above.below = above.below - 1 + below;
        }
        Some(slot)
    }

    /// Records that a lease ends at `node`, where a request resumes if that `is_use`. A snapshot at which another lease
    /// ends is not superseded.
    pub(super) fn set_leased(&mut self, node: NodeId, is_use: bool) {
        if let Some(snapshot) = self.by_node.get_mut(&node) {
            self.superseded -= usize::from(snapshot.rank == SnapshotRank::Superseded);
            snapshot.rank = SnapshotRank::Last;
            snapshot.was_chosen |= is_use;
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

    const fn has_superseded(&self) -> bool {
        self.superseded > 0
    }

    /// Returns the snapshot to evict next for one after `own`, of those that are unused and `own`: of the
    /// lowest rank, the one of the lowest value; of several, the one used least recently, then the one nearest
    /// to the root.
    ///
    /// `age_at` returns the time since the last use of a node, above 0.
    fn next(&self, own: Option<NodeId>, age_at: impl Fn(NodeId) -> u64) -> Option<NodeId> {
        let candidates = self.by_node.iter().filter(|&(&node, one)| one.is_unused || own == Some(node));
        let candidates = candidates.map(|(&node, snapshot)| {
            let is_last = snapshot.below == 0 && own != Some(node);
            let is_likely = is_last || snapshot.was_chosen;
            let saved = self.gap(snapshot) * if is_likely { LIKELY } else { 1 };
            (node, snapshot, SnapshotValue { saved, age: age_at(node) })
        });
        let first = candidates.min_by(|(node, one, value), (other_node, other, other_value)| {
            one.rank
                .cmp(&other.rank)
                .then_with(|| value.compare(*other_value))
                .then_with(|| other_value.age.cmp(&value.age))
                .then_with(|| one.end.cmp(&other.end))
                .then_with(|| node.cmp(other_node))
        });
        first.map(|(node, ..)| node)
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
        let Self { snapshots, nodes, .. } = self;
        let (end, parent) = (widen(nodes[node].end), nodes[node].parent);
        let next_above = |mut at: NodeId| {
            while nodes[at].kind == Kind::Run && !nodes[at].has_snapshot {
                at = nodes[at].parent;
            }
            (nodes[at].kind == Kind::Run).then_some(at)
        };
        let above = next_above(parent);
        let mut below = 0;
        if nodes[node].children > 0 {
            let is_after = |mut at: NodeId| {
                while widen(nodes[at].end) > end {
                    at = nodes[at].parent;
                }
                at == node
            };
            let others = snapshots.by_node.iter_mut();
            for (&other, snapshot) in others.filter(|(_, other)| other.above == above && other.end > end) {
                if is_after(other) {
                    (snapshot.above, below) = (Some(node), below + 1);
                }
            }
        }
        if let Some(above) = above.and_then(|above| snapshots.by_node.get_mut(&above)) {
            above.below = above.below + 1 - below;
        }
        let rank = SnapshotRank::Last;
        let snapshot = Snapshot { slot, rank, end, above, below, was_chosen: false, is_unused: false };
        let previous = snapshots.by_node.insert(node, snapshot);
        debug_assert!(previous.is_none(), "a snapshot is not replaced");
        above
    }

    /// Evicts a snapshot, to make place for a later one of `hold`. In this order: a superseded one, the one
    /// that the later one will supersede, and the one that is worth least, which may be that at the end of the
    /// hold. Snapshots at which other leases end are not evicted.
    ///
    /// A snapshot is worth the tokens from the one before it on its path, more if requests are likely to
    /// resume from it, and less the longer ago it was used. All uses within the tokens that are cached now
    /// count alike.
    pub fn evict_snapshot(&mut self, hold: &mut Hold) -> Option<StateSlot> {
        if !self.snapshots.has_superseded()
            && let Some(own) = hold.own_snapshot.filter(|&own| self.is_alone_at(own, hold))
        {
            hold.own_snapshot = None;
            return self.remove_snapshot(own);
        }
        let at_end = Some(hold.node).filter(|&end| self.is_alone_at(end, hold));
        let cached = (self.counts.cached * self.page_size) as u64;
        let age_at = |node: NodeId| (self.now.since(self.nodes[node].history.used) + cached).max(1);
        let node = self.snapshots.next(at_end, age_at)?;
        self.remove_snapshot(node)
    }

    /// Evicts a snapshot at which no lease ends: a superseded one, or else, if `any` says so, the one that is worth
    /// least (see [`Tree::evict_snapshot`]), and with it the pages of a leaf that it is the end of. Returns `None` if
    /// there is none.
    pub(in crate::cache) fn evict_unused_snapshot(&mut self, any: bool, cause: Cause) -> Option<Evicted> {
        if !any && !self.snapshots.has_superseded() {
            return None;
        }
        let cached = (self.counts.cached * self.page_size) as u64;
        let age_at = |node: NodeId| (self.now.since(self.nodes[node].history.used) + cached).max(1);
        let node = self.snapshots.next(None, age_at)?;
        let mut evicted = Evicted::default();
        if self.node(node).is_queued {
            self.trim(node, self.node(node).pages.len(), cause.into(), &mut evicted);
        } else {
            self.drop_snapshot(node, &mut evicted);
        }
        Some(evicted)
    }

    /// Returns the snapshot at the end of what was found.
    pub(in crate::cache) fn snapshot_behind(&self, found: &FoundPrefix) -> Option<StateSlot> {
        let place = found.place;
        let is_whole = place.pages == self.node(place.node).pages.len();
        if is_whole { self.snapshot_at(place.node) } else { None }
    }

    /// Takes the snapshot at the end of a hold, if nothing ends or goes on there but that hold and `others`.
    pub(in crate::cache) fn take_own_snapshot(&mut self, hold: &mut Hold, others: u32) -> Option<StateSlot> {
        let here = self.node(hold.node);
        let is_alone = here.children == 0 && here.has_snapshot && here.leases == 1 + others;
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
            let is_superseded = snapshot.rank == SnapshotRank::Superseded;
            if is_superseded && !snapshot.is_unused {
                return Some(format!("the snapshot of {node:?} is superseded and in use"));
            }
            (snapshot.below != below).then(|| format!("{node:?} counts {} snapshots below", snapshot.below))
        })
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
