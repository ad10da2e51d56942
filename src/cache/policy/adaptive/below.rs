//! The order in which the tier below a cache evicts pages, by what the policy of the cache has learned.
//!
//! *Cost.* As for [`Cohorts`]: a call does not depend on the number of pages.

use std::sync::Arc;

use super::ages::Ages;
use super::cohorts::{Cohorts, Ties};
use super::lifetimes::WorthByAge;
use super::{CLASSES, History, NodeId, Tick, class_of};
use crate::base::Id;
use crate::cache::RecencyList;

/// The kind of pages that are not used again.
const ENDED: usize = CLASSES;

/// What a policy has learned: how much pages of each class are worth by the time since their last use.
///
/// ```
/// use kvpool::cache::{BlockTokens, Learned, PolicyKind, Tick};
/// let mut policy = PolicyKind::Adaptive.policy(1024, BlockTokens::of_page_size(16), None);
/// let learned: Option<Learned> = policy.learned(Tick::new(0));
/// assert!(learned.is_none(), "nothing yet");
/// ```
#[derive(Clone, Debug)]
pub struct Learned(Arc<WorthByAge>);

impl Learned {
    pub(super) fn new(worth: &Arc<WorthByAge>) -> Self {
        Self(Arc::clone(worth))
    }

    fn worth(&self, kind: usize, age: usize) -> f64 {
        if kind == ENDED { 0.0 } else { self.0[kind][age] }
    }
}

/// Pages of a tier in the order of their eviction: the one that is worth least is first; as long as nothing is learned,
/// the one that was added first. Of pages of a class that were used at the same time, too, the one that was added first:
/// the end of a prompt before its beginning.
#[derive(Debug)]
pub(in crate::cache) struct WorthOrder<I> {
    ages: Ages,
    cohorts: Cohorts,
    /// The pages in the order in which they were added, which counts as long as nothing is learned.
    recency: RecencyList<I>,
    learned: Option<Learned>,
    now: Tick,
}

impl<I: Id> WorthOrder<I> {
    /// Creates an empty order below a cache of `capacity` tokens.
    pub(in crate::cache) fn new(capacity: u64) -> Self {
        let ages = Ages::new(capacity.max(1));
        let cohorts = Cohorts::new(ages.clone(), CLASSES + 1, Ties::Last);
        Self { ages, cohorts, recency: RecencyList::default(), learned: None, now: Tick::default() }
    }

    /// Sets the time, and what is learned by then.
    pub(in crate::cache) fn set_learned(&mut self, learned: Option<Learned>, now: Tick) {
        let is_same = match (&self.learned, &learned) {
            (Some(before), Some(now)) => Arc::ptr_eq(&before.0, &now.0),
            (before, now) => before.is_some() == now.is_some(),
        };
        if !is_same {
            self.learned = learned;
            self.cohorts.reconsider();
        }
        self.now = now;
    }

    /// Returns the time of the last [`Self::set_learned`].
    pub(in crate::cache) const fn now(&self) -> Tick {
        self.now
    }

    /// Adds a page.
    pub(in crate::cache) fn insert(&mut self, page: I, history: &History) {
        let kind = class_of(history).unwrap_or(ENDED);
        self.recency.push(page);
        let age = self.ages.of(self.now.since(history.used));
        let worth = self.learned.as_ref().map_or(f64::INFINITY, |learned| learned.worth(kind, age));
        self.cohorts.insert(NodeId::new(page.number()), kind, history.used, worth, self.now);
    }

    /// Removes a page that was added.
    pub(in crate::cache) fn remove(&mut self, page: I) {
        self.recency.remove(page);
        self.cohorts.remove(NodeId::new(page.number()));
    }

    /// Returns the page that is evicted first of those that can go. If none of the cohort that is worth least can, it
    /// is the one that was added first.
    pub(in crate::cache) fn first(&mut self, can_go: impl Fn(I) -> bool) -> Option<I> {
        let Self { cohorts, recency, learned, now, .. } = self;
        let worth = learned.as_ref().map(|learned| |kind, age| learned.worth(kind, age));
        let least = worth.and_then(|worth| cohorts.least(worth, None, *now));
        let cohort = std::iter::successors(least, |&page| cohorts.younger(page));
        cohort.map(|page| I::new(page.number())).chain(recency.iter_oldest()).find(|&page| can_go(page))
    }

    /// Returns the pages, in the order in which they were added.
    pub(in crate::cache) fn pages(&self) -> impl Iterator<Item = I> + '_ {
        self.recency.iter_oldest()
    }

    /// Returns the size of the bookkeeping in bytes.
    pub(in crate::cache) fn bytes(&self) -> usize {
        self.cohorts.bytes() + self.recency.bytes()
    }
}
