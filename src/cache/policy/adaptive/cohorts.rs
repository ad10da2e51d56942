//! Leaves grouped by their kind and the time of their last use.
//!
//! Leaves of one kind (of the same class, and worth the same if they are used) that were used at about the same
//! time form a cohort: a linked list, the least recently used leaf first. The age belongs to the cohort, so leaves
//! grow older without being touched. As cohorts grow older, neighbours are joined, so that a cohort spans about a
//! third of its age and a kind has a few dozen cohorts.
//!
//! *Invariant.* The cohorts of a kind are in the order of their times, which do not overlap.
//!
//! *Cost.* A call does not depend on the number of leaves. A choice visits each cohort once; it is made only
//! when the chosen cohort is used up, time has passed or the policy has learned. Memory: 16 bytes for each
//! node number.

use std::collections::VecDeque;

use super::ages::Ages;
use crate::base::{Id, widen};
use crate::cache::policy::{NodeId, Tick, Worth};

/// The largest number of cohorts of a kind.
const COHORTS: usize = 64;

/// A member of a circular list: its end, or a leaf.
#[derive(Clone, Copy, Debug)]
struct CohortLink {
    older: u32,
    younger: u32,
    /// The moment when the leaf was used last.
    used: Tick,
}

/// Leaves of a kind that were used between two times, both included.
#[derive(Clone, Copy, Debug)]
struct Cohort {
    from: Tick,
    to: Tick,
    /// The end of its list.
    end: usize,
}

/// The cohort to evict from.
#[derive(Clone, Copy, Debug)]
struct Choice {
    end: usize,
    /// What it is worth, and the least of the others.
    worth: Worth,
    /// The time before which leaves were to choose from, if not all were.
    before: Option<Tick>,
}

/// The leaves.
#[derive(Debug)]
pub(super) struct Cohorts {
    ages: Ages,
    /// The ends of the lists, and then the leaves.
    links: Vec<CohortLink>,
    /// The number of ends.
    ends: usize,
    kinds: Vec<VecDeque<Cohort>>,
    /// The kinds that may have cohorts, a bit for each.
    occupied: u128,
    /// Ends without a cohort.
    free: Vec<usize>,
    /// The cohort that is worth least, as long as that is known.
    choice: Option<Choice>,
    /// The time at which the choice is made again.
    due: Tick,
}

impl Cohorts {
    /// Returns the size of the bookkeeping in bytes.
    pub(super) fn bytes(&self) -> usize {
        let cohorts: usize = self.kinds.iter().map(VecDeque::capacity).sum();
        self.links.capacity() * size_of::<CohortLink>() + cohorts * size_of::<Cohort>()
    }

    /// Creates empty cohorts of so many kinds, at most 128.
    pub(super) fn new(ages: Ages, kinds: usize) -> Self {
        let ends = kinds * COHORTS;
        let end = |at| CohortLink { older: link(at), younger: link(at), used: Tick::default() };
        Self {
            ages,
            links: (0..ends).map(end).collect(),
            ends,
            kinds: vec![VecDeque::new(); kinds],
            occupied: 0,
            free: (0..ends).collect(),
            choice: None,
            due: Tick::default(),
        }
    }

    /// Adds a leaf that is worth `worth` at its age.
    pub(super) fn insert(&mut self, leaf: NodeId, kind: usize, used: Tick, worth: f64, now: Tick) {
        let at = widen(leaf.number()) + self.ends;
        if at >= self.links.len() {
            self.links.resize(at + 1, CohortLink { older: 0, younger: 0, used });
        }
        self.links[at].used = used;
        let end = self.cohort(kind, used, now);
        let CohortLink { older, younger, .. } = self.links[end];
        // A parent whose children were evicted can be older than the leaves that are there already.
        let head = self.links[widen(younger)].used;
        let is_first = used <= head;
        if widen(younger) != end && is_first {
            self.join(end, at);
            self.join(at, widen(younger));
        } else {
            self.join(widen(older), at);
            self.join(at, end);
        }
        if let Some(choice) = &mut self.choice
            && worth < choice.worth.victim
            && choice.before.is_none_or(|before| used < before)
        {
            let worth = Worth { victim: worth, least_kept: choice.worth.victim };
            *choice = Choice { end, worth, ..*choice };
        }
    }

    pub(super) fn remove(&mut self, leaf: NodeId) {
        let CohortLink { older, younger, .. } = self.links[widen(leaf.number()) + self.ends];
        self.join(widen(older), widen(younger));
    }

    /// Returns the next leaf of the same cohort.
    pub(super) fn younger(&self, leaf: NodeId) -> Option<NodeId> {
        let next = widen(self.links[widen(leaf.number()) + self.ends].younger);
        (next >= self.ends).then(|| self.id(next))
    }

    /// Returns the leaf used least recently.
    pub(super) fn oldest(&mut self) -> Option<NodeId> {
        let mut oldest: Option<usize> = None;
        for kind in occupied(self.occupied) {
            while let Some(&cohort) = self.kinds[kind].front() {
                if let Some(head) = self.head(cohort.end) {
                    if oldest.is_none_or(|leaf| self.links[head].used < self.links[leaf].used) {
                        oldest = Some(head);
                    }
                    break;
                }
                self.kinds[kind].pop_front();
                self.free.push(cohort.end);
            }
            if self.kinds[kind].is_empty() {
                self.occupied &= !(1 << kind);
            }
        }
        oldest.map(|head| self.id(head))
    }

    /// Returns what the cohort that is worth least is worth, and the least of the others, if that is known.
    pub(super) fn chosen(&self) -> Option<Worth> {
        self.choice.map(|choice| choice.worth)
    }

    /// Returns the oldest leaf of the cohort that is worth least; of those whose oldest leaf was used `before`, if that is
    /// given. `worth` says what a kind of leaf is worth per unit of time at an age. If several cohorts are worth the same,
    /// takes the oldest.
    pub(super) fn least(
        &mut self,
        worth: impl Fn(usize, usize) -> f64,
        before: Option<Tick>,
        now: Tick,
    ) -> Option<NodeId> {
        let may_go =
            |links: &[CohortLink], head: usize| before.is_none_or(|before| links[head].used < before);
        if now < self.due
            && let Some(choice) = self.choice.filter(|choice| choice.before.is_some() == before.is_some())
            && let Some(head) = self.head(choice.end).filter(|&head| may_go(&self.links, head))
        {
            return Some(self.id(head));
        }
        self.due = Tick::new(now.tokens() + self.ages.unit().div_ceil(4));
        self.choice = None;
        let mut least: Option<(f64, Tick, usize)> = None;
        let mut next = f64::INFINITY;
        for kind in occupied(self.occupied) {
            self.tidy(kind, now);
            if self.kinds[kind].is_empty() {
                self.occupied &= !(1 << kind);
            }
            for cohort in &self.kinds[kind] {
                if !self.head(cohort.end).is_some_and(|head| may_go(&self.links, head)) {
                    // Later ones are younger.
                    break;
                }
                let middle = u64::midpoint(cohort.from.tokens(), cohort.to.tokens());
                let worth = worth(kind, self.ages.of(now.since(Tick::new(middle))));
                if least.is_none_or(|least| (worth, cohort.from) < (least.0, least.1)) {
                    next = least.map_or(f64::INFINITY, |least| least.0);
                    least = Some((worth, cohort.from, cohort.end));
                } else {
                    next = next.min(worth);
                }
            }
        }
        let (victim, _, end) = least?;
        self.choice = Some(Choice { end, worth: Worth { victim, least_kept: next }, before });
        self.head(end).map(|head| self.id(head))
    }

    /// Makes the choice again, because what leaves are worth has changed.
    pub(super) fn reconsider(&mut self) {
        self.choice = None;
    }

    /// Returns the end of the cohort for a leaf used at `used`.
    fn cohort(&mut self, kind: usize, used: Tick, now: Tick) -> usize {
        let after = self.kinds[kind].partition_point(|cohort| cohort.from <= used);
        let unit = self.ages.unit();
        if let Some(previous) = after.checked_sub(1) {
            let cohort = &mut self.kinds[kind][previous];
            if used <= cohort.to || used.since(cohort.from) < unit {
                cohort.to = cohort.to.max(used);
                return cohort.end;
            }
        }
        if self.kinds[kind].len() == COHORTS {
            self.tidy(kind, now);
        }
        let after = self.kinds[kind].partition_point(|cohort| cohort.from <= used);
        if self.kinds[kind].len() == COHORTS {
            // There are still too many cohorts: the leaf joins a neighbour.
            let cohort = &mut self.kinds[kind][after.saturating_sub(1)];
            cohort.from = cohort.from.min(used);
            cohort.to = cohort.to.max(used);
            return cohort.end;
        }
        let end = self.free.pop().expect("there are ends for all cohorts of all kinds");
        self.kinds[kind].insert(after, Cohort { from: used, to: used, end });
        self.occupied |= 1 << kind;
        end
    }

    /// Removes the empty cohorts of a kind, and joins cohorts that are close together for their age.
    fn tidy(&mut self, kind: usize, now: Tick) {
        let mut kept = 0_usize;
        for at in 0..self.kinds[kind].len() {
            let cohort = self.kinds[kind][at];
            if self.head(cohort.end).is_none() {
                self.free.push(cohort.end);
                continue;
            }
            if let Some(last) = kept.checked_sub(1) {
                let older = self.kinds[kind][last];
                if cohort.to.since(older.from) * 3 <= now.since(cohort.to) {
                    self.kinds[kind][last].to = cohort.to;
                    self.splice(cohort.end, older.end);
                    self.free.push(cohort.end);
                    continue;
                }
            }
            self.kinds[kind][kept] = cohort;
            kept += 1;
        }
        self.kinds[kind].truncate(kept);
    }

    fn id(&self, link: usize) -> NodeId {
        NodeId::new(self::link(link - self.ends))
    }

    /// Returns the oldest leaf of a list.
    fn head(&self, end: usize) -> Option<usize> {
        let head = widen(self.links[end].younger);
        (head != end).then_some(head)
    }

    fn join(&mut self, older: usize, younger: usize) {
        self.links[older].younger = link(younger);
        self.links[younger].older = link(older);
    }

    /// Appends a whole list to another.
    fn splice(&mut self, from: usize, to: usize) {
        let CohortLink { older: tail, younger: head, .. } = self.links[from];
        self.join(widen(self.links[to].older), widen(head));
        self.join(widen(tail), to);
        self.join(from, from);
    }
}

/// Returns the kinds whose bits are set.
fn occupied(mut kinds: u128) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let kind = widen(kinds.trailing_zeros());
        kinds &= kinds.wrapping_sub(1);
        (kind < 128).then_some(kind)
    })
}

fn link(at: usize) -> u32 {
    u32::try_from(at).expect("node numbers stay within i32, and the ends are few")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_of_those_used_before_a_time_is_not_the_oldest() {
        let mut cohorts = Cohorts::new(Ages::new(1024), 3);
        let worth = |kind: usize, _age: usize| [3.0, 1.0, 0.5][kind];
        let now = Tick::new(1000);
        for (leaf, kind, used) in [(1, 0, 10), (2, 1, 200), (3, 2, 900), (4, 1, 950)] {
            cohorts.insert(NodeId::new(leaf), kind, Tick::new(used), worth(kind, 0), now);
        }
        let mut least =
            |before: Option<u64>| cohorts.least(worth, before.map(Tick::new), now).map(Id::number);
        assert_eq!(
            [Some(900), None, Some(900), Some(200), Some(10)].map(&mut least),
            [Some(2), Some(3), Some(2), Some(1), None]
        );
        cohorts.remove(NodeId::new(2));
        cohorts.reconsider();
        // A leaf that is too young does not become the choice, one that is old does.
        assert_eq!(cohorts.least(worth, Some(Tick::new(900)), now), Some(NodeId::new(1)));
        cohorts.insert(NodeId::new(5), 2, Tick::new(950), 0.5, now);
        assert_eq!(cohorts.least(worth, Some(Tick::new(900)), now), Some(NodeId::new(1)));
        cohorts.insert(NodeId::new(6), 2, Tick::new(300), 0.5, now);
        assert_eq!(cohorts.least(worth, Some(Tick::new(900)), now), Some(NodeId::new(6)));
    }

    #[test]
    fn a_choice_in_vain_ends_the_one_before() {
        let mut cohorts = Cohorts::new(Ages::new(1024), 2);
        let worth = |kind: usize, age: usize| if kind == 0 && age == 0 { 1.0 } else { [5.0, 3.0][kind] };
        for (leaf, kind) in [(1, 0), (2, 1)] {
            cohorts.insert(NodeId::new(leaf), kind, Tick::new(1000), worth(kind, 0), Tick::new(1000));
        }
        assert_eq!(cohorts.least(worth, None, Tick::new(1000)), Some(NodeId::new(1)));
        let later = Tick::new(60_000);
        assert_eq!(cohorts.least(worth, Some(Tick::new(5)), later), None);
        assert_eq!(cohorts.least(worth, None, later), Some(NodeId::new(2)));
    }
}
