//! Snapshots of states at the ends of nodes, and the order of their eviction.
//!
//! A snapshot saves the tokens that would be computed without it: those after the snapshot before it on its
//! path. Of a prompt that is computed in chunks, a snapshot at the end of every chunk saves little more than
//! every second one does, so that snapshots are thinned out evenly before any prompt loses all of its own.
//!
//! Its value is these tokens, or the seconds that they take, times the rate at which requests will resume from
//! it, as the policy of eviction estimates it. At the last snapshot of a path these are the requests that use
//! the pages before it. Of those that use the pages before another one, most go on to a later one, so that only
//! the requests count that have resumed from it. A policy that estimates nothing has snapshots go by the time
//! since their last use.
//!
//! Where pages and snapshots share memory, what counts is the value for the memory that is freed: of a snapshot within a
//! path its own, of one at the end of a leaf also that of the pages there, which are of no use without it.
//!
//! *Cost.* An eviction looks at every snapshot: 0.02 ms with 1,000 of them, and 0.2 ms with 10,000. A GPU has a few
//! hundred. An insertion or a removal does so only if there are nodes below.

use std::ops::Range;

use crate::base::{KeyMap, StateSlot, widen};
use crate::cache::Remembered;
use crate::cache::policy::real;

use super::cause::Cause;
use super::evict::Evicted;
use super::{FoundPrefix, History, Hold, Kind, NodeId, Outlook, Tick, Tree, narrow};

/// How many times as much a snapshot is worth at which requests are likely to resume: the last one on its
/// path, where a conversation continues, the last one of a prompt, or one from which a request has resumed.
/// At the others a prompt has to part from the cached ones within the tokens up to the next snapshot.
const LIKELY: f64 = 4.0;

/// The same where snapshots and pages share memory: the less the others are worth, the more of it goes to pages.
const LIKELY_BESIDE_PAGES: f64 = 2.0;

/// The memory that evictions free.
#[derive(Clone, Copy, Debug)]
pub(in crate::cache) struct FreedMemory {
    /// That of a snapshot.
    pub(in crate::cache) snapshot: f64,
    /// That of a page, if it is freed with the snapshot at the end of its leaf.
    pub(in crate::cache) page: f64,
}

impl FreedMemory {
    /// Snapshots have memory of their own.
    const OF_SNAPSHOTS: Self = Self { snapshot: 1.0, page: 0.0 };

    /// Returns how likely requests are to resume from a snapshot, compared to others that are used as often.
    fn likelihood(self, snapshot: &Snapshot, is_last: bool) -> f64 {
        let has_pages = self.page > 0.0;
        let likely = if has_pages { LIKELY_BESIDE_PAGES } else { LIKELY };
        // What has resumed there goes on behind it, and comes back to a later snapshot.
        if has_pages && !is_last && snapshot.uses > 1 && snapshot.below == 1 {
            return likely.recip();
        }
        if is_last || snapshot.was_chosen { likely } else { 1.0 }
    }
}

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
    /// The number of requests that have resumed from it, and the one that made it.
    uses: u32,
    /// When one of them did so last.
    used: Tick,
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
    /// A waiting request will resume from it. No snapshot has this rank for itself.
    Needed,
}

impl Snapshots {
    pub(super) fn len(&self) -> usize {
        self.by_node.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.by_node.capacity() * (size_of::<(NodeId, Snapshot)>() + 1)
    }

    /// Returns the positions from the snapshot at `above`, or from the beginning, up to `end`.
    fn positions(&self, above: Option<NodeId>, end: usize) -> Range<u32> {
        let above = above.and_then(|above| self.by_node.get(&above));
        narrow(above.map_or(0, |above| above.end))..narrow(end)
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

    /// Evicts a snapshot, to make place for a later one of `hold`. In this order: a superseded one, the one that
    /// the later one will supersede, and the one of the lowest value, which may be that at the end of the hold. Those
    /// that waiting requests need go after all others.
    /// Snapshots at which other leases end are not evicted.
    ///
    /// Returns `None` if there is none. If the later one is only `offered`, for a number of tokens behind the hold of
    /// which some were found, also if it is worth less than each of them.
    pub fn evict_snapshot(
        &mut self,
        hold: &mut Hold,
        offered: Option<(&FoundPrefix, usize)>,
    ) -> Option<StateSlot> {
        let is_free = |own: &NodeId| self.is_alone_at(*own, hold) && !self.queues.waiting.needs(*own);
        if !self.has_superseded()
            && let Some(own) = hold.own_snapshot.filter(is_free)
        {
            hold.own_snapshot = None;
            return self.remove_snapshot(own);
        }
        let at_end = Some(hold.node).filter(|&end| self.is_alone_at(end, hold));
        let (node, rank, value) = self.least_snapshot(at_end, FreedMemory::OF_SNAPSHOTS)?;
        if rank != SnapshotRank::Superseded
            && let Some((found, len)) = offered
            && self.value_behind(hold, found, len, node).is_some_and(|later| later < value)
        {
            return None;
        }
        self.remove_snapshot(node)
    }

    /// Returns the value of a snapshot at the end of `len` tokens behind a hold, of which some were found, that
    /// replaces the one at `replaced`. `None` if the policy does not estimate it.
    fn value_behind(
        &mut self,
        hold: &Hold,
        found: &FoundPrefix,
        len: usize,
        replaced: NodeId,
    ) -> Option<f64> {
        let (now, end) = (self.now, hold.len() + len);
        let history = if found.len() == len {
            self.node(found.place.node).history.used_again(hold.novelty.level, now)
        } else {
            History::of_new(Remembered::default(), hold.novelty.level, now)
        };
        let worth = self.queues.policy.worth(&history, now)?;
        let mut path = self.path(hold.node).filter(|&at| self.node(at).has_snapshot && at != replaced);
        let positions = self.snapshots.positions(path.next(), end);
        Some(LIKELY * worth * self.queues.policy.saved(positions))
    }

    /// Returns whether there is a superseded snapshot that no waiting request needs.
    fn has_superseded(&self) -> bool {
        let is_superseded = |(&node, one): (&NodeId, &Snapshot)| {
            one.rank == SnapshotRank::Superseded && !self.queues.waiting.needs(node)
        };
        self.snapshots.superseded > 0 && self.snapshots.by_node.iter().any(is_superseded)
    }

    /// Returns the snapshot to evict next, of those that are unused and `own`, behind which another one follows, with
    /// its rank and its value for the memory that it frees: of the lowest rank, the one of the lowest value; of several,
    /// the one used least recently, then the one nearest to the root.
    fn least_snapshot(
        &mut self,
        own: Option<NodeId>,
        freed: FreedMemory,
    ) -> Option<(NodeId, SnapshotRank, f64)> {
        let cached = (self.counts.cached * self.page_size) as u64;
        let Self { snapshots, nodes, queues, now, .. } = self;
        let candidates = snapshots.by_node.iter().filter(|&(&node, one)| one.is_unused || own == Some(node));
        let valued = candidates.map(|(&node, snapshot)| {
            let is_last = snapshot.below == 0 && own != Some(node);
            let history = nodes[node].history;
            let age = (now.since(history.used) + cached).max(1);
            let uses = if is_last {
                history
            } else {
                History { uses: snapshot.uses, used: snapshot.used, ..history }
            };
            let rate = queues.policy.worth(&uses, *now).unwrap_or_else(|| real(age).recip());
            let factor = freed.likelihood(snapshot, is_last);
            let saved = queues.policy.saved(snapshots.positions(snapshot.above, snapshot.end));
            // What a session has given up goes first, as its pages do.
            let is_over = is_last && history.outlook == Outlook::Ended;
            let rank = match snapshot.rank {
                _ if queues.waiting.needs(node) => SnapshotRank::Needed,
                _ if is_over => SnapshotRank::Superseded,
                rank => rank,
            };
            let pages = if nodes[node].is_queued { nodes[node].pages.len() } else { 0 };
            let memory = freed.snapshot + freed.page * real(pages as u64);
            (node, snapshot, rank, factor * rate * saved / memory, age)
        });
        let least = valued.min_by(|one, other| {
            let (node, snapshot, rank, value, age) = one;
            let (other_node, other_snapshot, other_rank, other_value, other_age) = other;
            rank.cmp(other_rank)
                .then_with(|| value.total_cmp(other_value))
                .then_with(|| other_age.cmp(age))
                .then_with(|| snapshot.end.cmp(&other_snapshot.end))
                .then_with(|| node.cmp(other_node))
        });
        least.map(|(node, _, rank, value, _)| (node, rank, value))
    }

    /// Evicts a snapshot at which no lease ends: a superseded one, or else, if `any` says so, the one that is worth
    /// least (see [`Tree::evict_snapshot`]), and with it the pages of a leaf that it is the end of. Returns `None` if
    /// there is none.
    pub(in crate::cache) fn evict_unused_snapshot(&mut self, any: bool, cause: Cause) -> Option<Evicted> {
        if !any && !self.has_superseded() {
            return None;
        }
        let (node, ..) = self.least_snapshot(None, FreedMemory::OF_SNAPSHOTS)?;
        let mut evicted = Evicted::default();
        if self.node(node).is_queued {
            self.trim(node, self.node(node).pages.len(), &cause.into(), &mut evicted);
        } else {
            self.drop_snapshot(node, &mut evicted);
        }
        Some(evicted)
    }

    /// Evicts what is worth least for its memory, of a tree whose pages are of no use behind the last snapshot: a leaf
    /// without a snapshot; or else a snapshot (see [`Tree::evict_snapshot`]), and with one at the end of a leaf the
    /// pages that are behind the one before. Returns `None` if there is nothing.
    pub(in crate::cache) fn evict_end(&mut self, freed: FreedMemory, cause: Cause) -> Option<Evicted> {
        self.record_shortage();
        let leaf = self.next_leaf().map(|next| next.leaf);
        let bare = leaf.filter(|&leaf| self.is_bare_leaf(leaf));
        let least = |tree: &mut Self| tree.least_snapshot(None, freed).map(|(node, ..)| node);
        let end = bare.or_else(|| least(self)).or(leaf)?;
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

    /// Returns whether a node is an evictable leaf without a snapshot.
    fn is_bare_leaf(&self, node: NodeId) -> bool {
        self.node(node).is_queued && !self.node(node).has_snapshot
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
