//! The order in which snapshots are evicted.
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
//! *Cost.* An eviction looks at every snapshot: 0.02 ms with 1,000 of them, and 0.2 ms with 10,000. A GPU has a few
//! hundred.

use std::cmp::Ordering;

use crate::base::StateSlot;
use crate::cache::Remembered;
use crate::cache::policy::real;

use super::evict::Queues;
use super::snapshots::{Snapshot, SnapshotRank, Snapshots};
use super::{FoundPrefix, History, Hold, Kind, Node, NodeArena, NodeId, Outlook, Tick, Tree};

/// How many times as much a snapshot is worth at which requests are likely to resume: the last one on its
/// path, where a conversation continues, the last one of a prompt, or one from which a request has resumed.
/// At the others a prompt has to part from the cached ones within the tokens up to the next snapshot.
const LIKELY: f64 = 4.0;

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
        // What has resumed there goes on behind it, and comes back to a later snapshot.
        if self.page > 0.0 && !is_last && snapshot.uses > 1 && snapshot.below.len() == 1 {
            return LIKELY.recip();
        }
        if is_last || snapshot.was_chosen { LIKELY } else { 1.0 }
    }
}

/// A snapshot in the order of eviction.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankedSnapshot {
    pub(super) node: NodeId,
    pub(super) rank: SnapshotRank,
    /// What it saves in a time, for the memory that it frees.
    pub(super) value: f64,
    /// The tokens since the last use of its node.
    age: u64,
    end: usize,
}

impl RankedSnapshot {
    /// Compares which one goes first: that of the lower rank or value; of several, the one used less recently, then the
    /// one nearer to the root.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        let value = self.rank.cmp(&other.rank).then_with(|| self.value.total_cmp(&other.value));
        let age = value.then_with(|| other.age.cmp(&self.age));
        age.then_with(|| self.end.cmp(&other.end)).then_with(|| self.node.cmp(&other.node))
    }
}

/// Ranks snapshots at one time.
pub(super) struct Judge<'a> {
    snapshots: &'a Snapshots,
    nodes: &'a NodeArena<Node>,
    queues: &'a mut Queues,
    now: Tick,
    cached: u64,
    freed: FreedMemory,
}

impl<'a> Judge<'a> {
    /// Ranks all snapshots at which no lease ends, those of leaves only if there are `leaves`.
    pub(super) fn rank_all(mut self, leaves: bool) -> impl Iterator<Item = RankedSnapshot> + 'a {
        let Self { snapshots, nodes, .. } = self;
        let may_go = move |node: NodeId| leaves || !nodes[node].is_queued;
        let all = snapshots.by_node.iter().filter(move |&(&node, one)| one.is_unused && may_go(node));
        all.map(move |(&node, snapshot)| self.rank(node, snapshot, false))
    }

    /// Ranks the snapshot of a node, if no lease ends there.
    pub(super) fn rank_unused(&mut self, node: NodeId) -> Option<RankedSnapshot> {
        let snapshots = self.snapshots;
        let snapshot = snapshots.by_node.get(&node).filter(|snapshot| snapshot.is_unused)?;
        Some(self.rank(node, snapshot, false))
    }

    /// Ranks the snapshot of a node behind which another one follows.
    pub(super) fn rank_followed(&mut self, node: NodeId) -> Option<RankedSnapshot> {
        let snapshots = self.snapshots;
        let snapshot = snapshots.by_node.get(&node)?;
        Some(self.rank(node, snapshot, true))
    }

    fn rank(&mut self, node: NodeId, snapshot: &Snapshot, is_followed: bool) -> RankedSnapshot {
        let Self { snapshots, nodes, queues, now, cached, freed } = self;
        let is_last = snapshot.below.is_empty() && !is_followed;
        let here = &nodes[node];
        let history = here.history;
        let age = (now.since(history.used) + *cached).max(1);
        let uses =
            if is_last { history } else { History { uses: snapshot.uses, used: snapshot.used, ..history } };
        let rate = queues.policy.worth(&uses, *now).unwrap_or_else(|| real(age).recip());
        let saved = queues.policy.saved(snapshots.positions(snapshot.above, snapshot.end));
        // What a session has given up goes first, as its pages do.
        let is_over = is_last && history.outlook == Outlook::Ended;
        let rank = match snapshot.rank {
            _ if queues.waiting.needs(node) => SnapshotRank::Needed,
            _ if is_over => SnapshotRank::Superseded,
            rank => rank,
        };
        let pages = if here.is_queued && freed.page > 0.0 { pages_with(nodes, node) } else { 0 };
        let memory = freed.snapshot + freed.page * real(pages as u64);
        let value = freed.likelihood(snapshot, is_last) * rate * saved / memory;
        RankedSnapshot { node, rank, value, age, end: snapshot.end }
    }
}

/// Returns the number of pages that are of no use without the leaf at `node`: its own, and those before it up to a
/// snapshot or to where other prefixes go on.
fn pages_with(nodes: &NodeArena<Node>, node: NodeId) -> usize {
    let before = std::iter::successors(Some(nodes[node].parent), |&at| Some(nodes[at].parent));
    let is_bare = |at: &NodeId| {
        let here = &nodes[*at];
        here.kind == Kind::Run && !here.has_snapshot && (here.children, here.locks) == (1, 0)
    };
    let bare = before.take_while(is_bare).map(|at| nodes[at].pages.len());
    nodes[node].pages.len() + bare.sum::<usize>()
}

impl Tree {
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
        let of_hold = at_end.and_then(|end| self.judge(FreedMemory::OF_SNAPSHOTS).rank_followed(end));
        let others = self.judge(FreedMemory::OF_SNAPSHOTS).rank_all(true);
        let least = others.chain(of_hold).min_by(RankedSnapshot::order)?;
        if least.rank != SnapshotRank::Superseded
            && let Some((found, len)) = offered
            && self.value_behind(hold, found, len, least.node).is_some_and(|later| later < least.value)
        {
            return None;
        }
        self.remove_snapshot(least.node)
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

    /// Returns what ranks snapshots now, by their value for the memory that is freed.
    pub(super) fn judge(&mut self, freed: FreedMemory) -> Judge<'_> {
        let cached = (self.counts.cached * self.page_size) as u64;
        let Self { snapshots, nodes, queues, now, .. } = self;
        Judge { snapshots, nodes, queues, now: *now, cached, freed }
    }
}
