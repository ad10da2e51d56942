//! What requests in a waiting queue have been found to need: blocks of an engine, or nodes of a tree.
//!
//! What several requests need counts as of the earliest of them in the queue. What the last request needs is taken
//! first.
//!
//! *Cost.* A call for a block or node is logarithmic in the number of those that are needed and can be taken, and linear
//! in the requests that need it. Memory: 24 bytes for each number of a block or node, and some 50 for each that a request
//! needs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::base::{Id, widen};

use super::QueueEnd;

/// A request in a waiting queue.
///
/// ```
/// use kvpool::cache::PolicyKind;
/// use kvpool::engines::{BlockTable, HashedBlocks, HashedTokens, QueueEnd, WaitingId, WaitingRank};
/// let mut table = BlockTable::new(3);
/// table.evict_by(PolicyKind::Adaptive, 16);
/// let prompts = [b"a", b"b"].map(|hash| {
///     table.look_up(16, None);
///     let prompt = table.take(1).unwrap();
///     table.set_hash(prompt[0], HashedTokens { hash: hash[..].into(), tokens: None });
///     table.add_prompt(None, &prompt, None);
///     table.release(&prompt, HashedBlocks::Last);
///     prompt
/// });
/// let request: WaitingId = table.add_waiting(&prompts[0], WaitingRank::default(), QueueEnd::Back);
/// table.extend_waiting(request, &prompts[0]);
/// assert_eq!(table.take(2).unwrap()[1], prompts[1][0], "a waiting request needs the older prompt");
/// table.remove_waiting(request);
/// assert_eq!(table.take(1).unwrap(), prompts[0]);
/// assert_eq!(WaitingId::new(request.rank(), request.number()), request);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaitingId {
    rank: WaitingRank,
    number: i64,
}

/// The place of a request in a queue that is not served by arrival alone: the lower, the earlier. Requests of one rank are
/// in the order in which they were added at an end.
///
/// ```
/// use kvpool::engines::WaitingRank;
/// let urgent = WaitingRank { priority: -1, arrival: 7 };
/// assert!(urgent < WaitingRank::default() && urgent < WaitingRank { arrival: 8, ..urgent });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaitingRank {
    /// The priority: requests of a lower number are served first.
    pub priority: i64,
    /// The time of arrival, by any clock.
    pub arrival: i64,
}

impl WaitingId {
    /// Returns the id of the request with this number among those of a rank.
    #[must_use]
    pub const fn new(rank: WaitingRank, number: i64) -> Self {
        Self { rank, number }
    }

    /// Returns the rank of the request.
    #[must_use]
    pub const fn rank(self) -> WaitingRank {
        self.rank
    }

    /// Returns the number of the request: of one rank, the lower, the earlier it is in the queue.
    #[must_use]
    pub const fn number(self) -> i64 {
        self.number
    }
}

/// What waiting requests need, by ids of blocks or nodes.
#[derive(Debug)]
pub(super) struct WaitingNeeds<T> {
    /// The requests that need each block or node, the earliest first. Empty until a request waits.
    by_id: Vec<Vec<WaitingId>>,
    /// What each request was found to need.
    by_request: BTreeMap<WaitingId, Vec<T>>,
    /// Those that can be taken, the first one first.
    offered: BTreeSet<(Reverse<WaitingId>, T)>,
    /// The numbers of the requests that were added last at each end.
    last: i64,
    first: i64,
}

impl<T> Default for WaitingNeeds<T> {
    fn default() -> Self {
        Self { by_id: Vec::new(), by_request: BTreeMap::new(), offered: BTreeSet::new(), last: 0, first: 0 }
    }
}

impl<T: Id> WaitingNeeds<T> {
    /// Adds a request at an end of those of its rank.
    pub(super) fn add(&mut self, rank: WaitingRank, end: QueueEnd) -> WaitingId {
        let number = match end {
            QueueEnd::Back => &mut self.last,
            QueueEnd::Front => &mut self.first,
        };
        *number += if end == QueueEnd::Back { 1 } else { -1 };
        WaitingId::new(rank, *number)
    }

    /// Records that a request needs what has this id, which is not offered.
    pub(super) fn need(&mut self, request: WaitingId, id: T) {
        let at = widen(id.number());
        if at >= self.by_id.len() {
            self.by_id.resize(at + 1, Vec::new());
        }
        let requests = &mut self.by_id[at];
        if let Err(at) = requests.binary_search(&request) {
            requests.insert(at, request);
            self.by_request.entry(request).or_default().push(id);
        }
    }

    /// Returns whether a request needs what has this id.
    pub(super) fn needs(&self, id: T) -> bool {
        self.first_request(id).is_some()
    }

    /// Returns what a request was found to need, and has not been given up since.
    pub(super) fn needed_by(&self, request: WaitingId) -> &[T] {
        self.by_request.get(&request).map_or(&[], Vec::as_slice)
    }

    /// Removes a request, and returns what it was found to need. [`Self::end_need`] ends that for each.
    pub(super) fn remove(&mut self, request: WaitingId) -> Vec<T> {
        self.by_request.remove(&request).unwrap_or_default()
    }

    /// Returns what the requests need. Several may need the same.
    pub(super) fn needed(&self) -> impl Iterator<Item = T> + '_ {
        self.by_request.values().flatten().copied()
    }

    /// Removes all requests. Nothing of what they need is offered.
    pub(super) fn clear(&mut self) {
        for id in std::mem::take(&mut self.by_request).into_values().flatten() {
            self.forget(id);
        }
    }

    /// Ends the need of a request for what has this id, which is not offered.
    pub(super) fn end_need(&mut self, request: WaitingId, id: T) {
        if let Some(requests) = self.by_id.get_mut(widen(id.number())) {
            requests.retain(|&other| other != request);
        }
    }

    /// Ends the need of all requests for what has this id, which is not offered and means something else from now on.
    pub(super) fn forget(&mut self, id: T) {
        if let Some(requests) = self.by_id.get_mut(widen(id.number())) {
            requests.clear();
        }
    }

    /// Lets all requests that need what has this id need another, or nothing, in its place. Neither is offered.
    pub(super) fn replace(&mut self, id: T, by: Option<T>) {
        let requests = self.by_id.get_mut(widen(id.number())).map(std::mem::take);
        for request in requests.into_iter().flatten() {
            if let Some(needed) = self.by_request.get_mut(&request) {
                needed.retain(|&other| other != id);
            }
            if let Some(by) = by {
                self.need(request, by);
            }
        }
    }

    /// Offers what a request needs.
    pub(super) fn offer(&mut self, id: T) {
        self.offered.extend(self.first_request(id).map(|request| (Reverse(request), id)));
    }

    /// Withdraws what was offered.
    pub(super) fn withdraw(&mut self, id: T) {
        if let Some(request) = self.first_request(id) {
            self.offered.remove(&(Reverse(request), id));
        }
    }

    /// Returns what is offered, in the order in which to take it.
    pub(super) fn offered(&self) -> impl Iterator<Item = T> + '_ {
        self.offered.iter().map(|&(_, id)| id)
    }

    /// Returns the size of the bookkeeping in bytes.
    pub(super) fn bytes(&self) -> usize {
        let needed = size_of::<(WaitingId, Vec<T>)>() + size_of::<T>() + size_of::<WaitingId>();
        self.by_id.capacity() * size_of::<Vec<WaitingId>>()
            + self.by_request.len() * needed
            + self.offered.len() * size_of::<(Reverse<WaitingId>, T)>()
    }

    /// Returns the earliest request that needs what has this id.
    fn first_request(&self, id: T) -> Option<WaitingId> {
        self.by_id.get(widen(id.number()))?.first().copied()
    }
}
