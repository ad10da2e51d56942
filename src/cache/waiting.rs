//! What requests in a waiting queue have been found to need: nodes of a tree, or blocks of an engine.
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

/// A request in a waiting queue.
///
/// ```
/// use kvpool::cache::{WaitingId, WaitingRank};
/// let request = WaitingId::new(WaitingRank::default(), 7);
/// assert_eq!((request.rank(), request.number()), (WaitingRank::default(), 7));
/// assert!(request < WaitingId::new(WaitingRank::default(), 8), "it is served before the next one");
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
/// use kvpool::cache::WaitingRank;
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
pub(crate) struct WaitingNeeds<T> {
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
    /// Adds a request behind those of its rank.
    pub(crate) fn add(&mut self, rank: WaitingRank) -> WaitingId {
        self.last += 1;
        self.enter(WaitingId::new(rank, self.last))
    }

    /// Adds a request before those of its rank.
    pub(crate) fn add_first(&mut self, rank: WaitingRank) -> WaitingId {
        self.first -= 1;
        self.enter(WaitingId::new(rank, self.first))
    }

    fn enter(&mut self, request: WaitingId) -> WaitingId {
        self.by_request.insert(request, Vec::new());
        request
    }

    /// Returns the number of requests.
    pub(crate) fn len(&self) -> usize {
        self.by_request.len()
    }

    /// Returns whether a request was added and not removed.
    pub(crate) fn has(&self, request: WaitingId) -> bool {
        self.by_request.contains_key(&request)
    }

    /// Records that a request needs what has this id, which is not offered. One that was removed needs nothing.
    pub(crate) fn need(&mut self, request: WaitingId, id: T) {
        if !self.has(request) {
            return;
        }
        let requests = self.requests_mut(id);
        if let Err(at) = requests.binary_search(&request) {
            requests.insert(at, request);
            self.by_request.entry(request).or_default().push(id);
        }
    }

    fn requests_mut(&mut self, id: T) -> &mut Vec<WaitingId> {
        let at = widen(id.number());
        if at >= self.by_id.len() {
            self.by_id.resize(at + 1, Vec::new());
        }
        &mut self.by_id[at]
    }

    /// Returns whether a request needs what has this id.
    pub(crate) fn needs(&self, id: T) -> bool {
        self.first_request(id).is_some()
    }

    /// Returns what a request was found to need, and has not been given up since.
    pub(crate) fn needed_by(&self, request: WaitingId) -> &[T] {
        self.by_request.get(&request).map_or(&[], Vec::as_slice)
    }

    /// Removes a request, and returns what it was found to need. [`Self::end_need`] ends that for each.
    pub(crate) fn remove(&mut self, request: WaitingId) -> Vec<T> {
        self.by_request.remove(&request).unwrap_or_default()
    }

    /// Returns what the requests need. Several may need the same.
    pub(crate) fn needed(&self) -> impl Iterator<Item = T> + '_ {
        self.by_request.values().flatten().copied()
    }

    /// Returns the same requests, which need nothing.
    pub(crate) fn without_needs(self) -> Self {
        let by_request = self.by_request.into_keys().map(|request| (request, Vec::new())).collect();
        Self { by_request, last: self.last, first: self.first, ..Self::default() }
    }

    /// Removes all requests. Nothing of what they need is offered.
    pub(crate) fn clear(&mut self) {
        for id in std::mem::take(&mut self.by_request).into_values().flatten() {
            self.forget(id);
        }
    }

    /// Ends the need of a request for what has this id, which is not offered.
    pub(crate) fn end_need(&mut self, request: WaitingId, id: T) {
        if let Some(needed) = self.by_request.get_mut(&request) {
            needed.retain(|&other| other != id);
        }
        if let Some(requests) = self.by_id.get_mut(widen(id.number()))
            && let Ok(at) = requests.binary_search(&request)
        {
            requests.remove(at);
            if requests.is_empty() {
                *requests = Vec::new();
            }
        }
    }

    /// Ends the need of all requests for what has this id, which is not offered and means something else from now on.
    pub(crate) fn forget(&mut self, id: T) {
        if let Some(requests) = self.by_id.get_mut(widen(id.number())) {
            *requests = Vec::new();
        }
    }

    /// Lets all requests that need what has this id need another, or nothing, in its place. Neither is offered.
    pub(crate) fn replace(&mut self, id: T, by: Option<T>) {
        let Some(requests) = self.by_id.get_mut(widen(id.number())).map(std::mem::take) else { return };
        for request in &requests {
            if let Some(needed) = self.by_request.get_mut(request) {
                needed.retain(|&other| other != id && Some(other) != by);
                needed.extend(by);
            }
        }
        if let Some(by) = by.filter(|_| !requests.is_empty()) {
            let there = self.requests_mut(by);
            there.extend(requests);
            // Two runs in order, which merge in linear time.
            there.sort();
            there.dedup();
        }
    }

    /// Offers what a request needs.
    pub(crate) fn offer(&mut self, id: T) {
        self.offered.extend(self.first_request(id).map(|request| (Reverse(request), id)));
    }

    /// Withdraws what was offered.
    pub(crate) fn withdraw(&mut self, id: T) {
        if let Some(request) = self.first_request(id) {
            self.offered.remove(&(Reverse(request), id));
        }
    }

    /// Returns what is offered, in the order in which to take it.
    pub(crate) fn offered(&self) -> impl Iterator<Item = T> + '_ {
        self.offered.iter().map(|&(_, id)| id)
    }

    /// Returns the size of the bookkeeping in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let needs: usize = self.by_request.values().map(Vec::len).sum();
        self.by_id.capacity() * size_of::<Vec<WaitingId>>()
            + self.by_request.len() * size_of::<(WaitingId, Vec<T>)>()
            + needs * (size_of::<T>() + size_of::<WaitingId>())
            + self.offered.len() * size_of::<(Reverse<WaitingId>, T)>()
    }

    /// Describes a broken invariant, if there is one: what requests need is the same by request and by id.
    pub(crate) fn broken_invariant(&self) -> Option<String> {
        let by_id: usize = self.by_id.iter().map(Vec::len).sum();
        let by_request =
            self.by_request.iter().flat_map(|(request, ids)| ids.iter().map(move |id| (request, id)));
        let is_listed = |(request, id): (&WaitingId, &T)| {
            self.by_id.get(widen(id.number())).is_some_and(|requests| requests.contains(request))
        };
        let lost = by_request.clone().find(|&need| !is_listed(need));
        let is_ordered = self.by_id.iter().all(|requests| requests.is_sorted());
        let is_whole = lost.is_none() && by_id == by_request.count() && is_ordered;
        (!is_whole)
            .then(|| format!("needs of waiting requests: {by_id} by what is needed, not listed {lost:?}"))
    }

    /// Returns the earliest request that needs what has this id.
    fn first_request(&self, id: T) -> Option<WaitingId> {
        self.by_id.get(widen(id.number()))?.first().copied()
    }
}
