//! The default policy, which evicts the leaf that is worth least, as learned from blocks that were evicted
//! and then published again.
//!
//! A *lifetime* of a block is the time from one use to the next. Lifetimes are counted by the class of the
//! block (what is known of its next use, or else how often it was used, and how many tokens were new of the request
//! that used it last: [`Novelties`]) and by their length, whether the block was still cached at the next use or only
//! remembered ([`Ghosts`]). From these counts follows the *worth* of a block of a class and age: the most hits per unit of
//! time that keeping it any longer can bring ([`Lifetimes`]), times what a hit saves at its position ([`Levels`]). Leaves
//! are grouped into cohorts of the same class, level and about the same age ([`Cohorts`]). The oldest leaf of the cohort
//! that is worth least is evicted.
//!
//! At the same time the policy estimates what least-recently-used eviction would hold and would have saved
//! ([`Recency`]), and evicts no more of what such a cache would hold than it can afford to lose ([`Leeway`]). Beyond that,
//! the leaf that is worth least is evicted of those that such a cache would have evicted by now. So the cache saves at
//! least 0.975 of what least-recently-used eviction would save, less a sixteenth of what the tokens of its capacity
//! save, in the mean; with a cost, half of what these save may be lost besides. That does not hold where leaves that should go are
//! locked, and where requests resume at snapshots. Where leaves go by their value for the memory, in an arena with windows
//! or states, they do so until that much was lost; what is early then may be lost besides.
//!
//! *Invariant.* All state follows from the calls: times are counted in tokens, and there are no random
//! numbers.
//!
//! *Cost.* Each call takes constant time, except that learning takes some microseconds whenever an eighth of
//! the capacity was looked up. Memory: 16 bytes for each node number, 2 bytes for each token of the capacity
//! (16 remembered blocks of 8 bytes for each block), and some 50 KiB; with a cost, 200 KiB.

mod ages;
mod cohorts;
mod ghosts;
mod leeway;
mod levels;
mod lifetimes;
mod novelties;
mod recency;

use std::ops::Range;

use super::{BlockKey, BlockTokens, History, NodeId, Novelty, Outlook, Policy, Remembered, Tick, Worth};
use crate::cache::PrefillCost;
use ages::Ages;
use cohorts::Cohorts;
use ghosts::{Ghost, Ghosts};
use leeway::{Again, Leeway};
use levels::Levels;
use lifetimes::Lifetimes;
use novelties::Novelties;
use recency::Recency;

pub(in crate::cache) use lifetimes::real;

/// The number of classes of blocks by the number of their uses: 1, 2, 3 to 4, and more.
const USES: usize = 4;

/// The number of classes of blocks of whose next use nothing is known.
const UNKNOWN: usize = USES * Novelty::ALL.len();

/// The number of classes of blocks. An outlook says more of the next use than the uses before, and is a class of its
/// own.
const CLASSES: usize = UNKNOWN + 3;

const _: () = assert!(levels::LEVELS as usize * CLASSES <= 128, "cohorts have a bit for each kind");

/// Returns the class of a block with what is remembered of it; `None` if it is not used again.
fn class(block: &Ghost) -> Option<usize> {
    match block.outlook {
        Outlook::Unknown => {
            let uses = block.uses.max(1).next_power_of_two().trailing_zeros() as usize;
            Some(uses.min(USES - 1) * Novelty::ALL.len() + block.novelty as usize)
        }
        Outlook::Soon => Some(UNKNOWN),
        Outlook::Later => Some(UNKNOWN + 1),
        Outlook::Late => Some(UNKNOWN + 2),
        Outlook::Ended => None,
    }
}

/// Returns the class of pages with a history.
fn class_of(history: &History) -> Option<usize> {
    class(&Ghost::of(history))
}

/// Returns the worth of the leaves of a kind, which is a level and a class, at an age.
fn worth<'a>(levels: &'a Levels, lifetimes: &'a Lifetimes) -> impl Fn(usize, usize) -> f64 + 'a {
    |kind, age| levels.saved(kind / CLASSES) * lifetimes.worth()[kind % CLASSES][age]
}

/// How a victim was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chosen {
    /// By its worth among all leaves.
    OfAll,
    /// By its worth among those that least-recently-used eviction would have evicted by now.
    OfOld,
    /// By recency.
    Oldest,
}

/// The adaptive policy: see the [module](self).
#[derive(Debug)]
pub(super) struct Adaptive {
    ages: Ages,
    levels: Levels,
    cohorts: Cohorts,
    ghosts: Ghosts,
    lifetimes: Lifetimes,
    novelties: Novelties,
    recency: Recency,
    cost: Option<PrefillCost>,
    /// How the last victim was chosen.
    chosen: Chosen,
    /// When it was asked for a victim last.
    asked: Option<Tick>,
    capacity: f64,
}

impl Adaptive {
    pub(super) fn new(capacity: u64, block_tokens: BlockTokens, cost: Option<PrefillCost>) -> Self {
        let capacity = capacity.max(1);
        let leeway = if cost.is_some() { Leeway::of_seconds() } else { Leeway::of_tokens() };
        let (ages, levels) = (Ages::new(capacity), Levels::new(cost));
        Self {
            cohorts: Cohorts::new(ages.clone(), levels.len() * CLASSES),
            ghosts: Ghosts::new(capacity, block_tokens),
            lifetimes: Lifetimes::new(capacity, ages.clone()),
            novelties: Novelties::new(),
            recency: Recency::new(capacity, leeway),
            ages,
            levels,
            cost,
            chosen: Chosen::Oldest,
            asked: None,
            capacity: real(capacity),
        }
    }

    /// Learns, if it is time.
    fn learn(&mut self, now: Tick) {
        if let Some(decay) = self.lifetimes.learn(self.ghosts.horizon(now), now) {
            self.novelties.learn(decay);
            self.cohorts.reconsider();
            self.recency.decay(now);
        }
    }

    /// Ends the lifetime of `tokens` tokens that are used again.
    fn end_lifetime(&mut self, before: Ghost, tokens: u32, now: Tick) {
        if let Some(class) = class(&before) {
            self.lifetimes.end(class, self.ages.of(now.since(before.used)), tokens);
        }
    }

    /// Begins the lifetime of `tokens` tokens that are used.
    fn begin_lifetime(&mut self, history: &History, tokens: u32) {
        if let Some(class) = class_of(history) {
            self.lifetimes.begin(class, tokens, history.used);
        }
    }
}

/// Returns the whole number of tokens below this.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a conversion ends at 0 and at the largest"
)]
const fn whole(tokens: f64) -> u32 {
    tokens as u32
}

impl Policy for Adaptive {
    fn insert(&mut self, leaf: NodeId, positions: Range<u32>, history: &History, now: Tick) {
        let class = class_of(history).expect("the tree has ended leaves in a queue of its own");
        let kind = self.levels.of(positions) * CLASSES + class;
        let worth = worth(&self.levels, &self.lifetimes)(kind, self.ages.of(now.since(history.used)));
        self.cohorts.insert(leaf, kind, history.used, worth, now);
    }

    fn remove(&mut self, leaf: NodeId) {
        self.cohorts.remove(leaf);
    }

    fn guess_after(&self, leaf: NodeId) -> Option<NodeId> {
        self.cohorts.younger(leaf)
    }

    fn bytes(&self) -> usize {
        self.cohorts.bytes() + self.ghosts.bytes()
    }

    fn victim(&mut self, now: Tick) -> Option<NodeId> {
        // Many leaves may go at one time. Once only the oldest may, that stays so.
        let is_first = self.asked.replace(now) != Some(now);
        if is_first {
            self.learn(now);
        }
        if self.lifetimes.is_known() && (is_first || self.chosen != Chosen::Oldest) {
            let before = if self.recency.room() > 0.0 { None } else { Some(self.recency.held_from()) };
            let least = self.cohorts.least(worth(&self.levels, &self.lifetimes), before, now);
            if least.is_some() {
                self.chosen = if before.is_none() { Chosen::OfAll } else { Chosen::OfOld };
                return least;
            }
        }
        self.chosen = Chosen::Oldest;
        self.cohorts.oldest()
    }

    fn may_evict(&mut self, positions: Range<u32>, history: &History) -> u32 {
        let tokens = positions.end - positions.start;
        if self.chosen != Chosen::OfAll || history.used < self.recency.held_from() {
            return tokens;
        }
        let share = self.recency.room() / self.saved(positions);
        if share < 1.0 { whole(f64::from(tokens) * share) } else { tokens }
    }

    fn judged(&self) -> Option<Worth> {
        let Worth { victim, least_kept } = self.cohorts.chosen().filter(|_| self.chosen != Chosen::Oldest)?;
        // From hits per time to hits in the time of the capacity.
        Some(Worth { victim: victim * self.capacity, least_kept: least_kept * self.capacity })
    }

    fn may_replace(&self) -> bool {
        !self.recency.has_lost_too_much()
    }

    fn worth(&mut self, history: &History, now: Tick) -> Option<f64> {
        self.learn(now);
        let age = self.ages.of(now.since(history.used));
        let class = class_of(history);
        self.lifetimes.is_known().then(|| class.map_or(0.0, |class| self.lifetimes.worth()[class][age]))
    }

    fn record_shortage(&mut self, tokens: u64, now: Tick) {
        self.recency.record_shortage(tokens, now);
    }

    fn saved(&self, positions: Range<u32>) -> f64 {
        match self.cost {
            Some(cost) => cost.seconds(positions),
            None => f64::from(positions.end - positions.start),
        }
    }

    fn record_request(&mut self, new: u32) -> Novelty {
        self.recency.begin_look_up();
        self.novelties.record(new);
        self.novelties.of(new)
    }

    fn novelty(&self, new: u32) -> Novelty {
        self.novelties.of(new)
    }

    fn record_use(&mut self, before: &History, after: &History, positions: Range<u32>) {
        let (tokens, now) = (positions.end - positions.start, after.used);
        self.end_lifetime(Ghost::of(before), tokens, now);
        self.begin_lifetime(after, tokens);
        let saved = self.saved(positions);
        self.recency.record_found(before.used, Again { tokens, saved }, now);
    }

    fn outlook(&self, pause: u64) -> Outlook {
        self.ages.outlook(pause)
    }

    fn record_outlook(&mut self, history: &History, outlook: Outlook, tokens: u32) {
        let from_to = [history.outlook, outlook].map(|outlook| class_of(&History { outlook, ..*history }));
        self.lifetimes.reclass(from_to, history.used, tokens);
    }

    fn fetch(&self, keys: &mut dyn Iterator<Item = BlockKey>) {
        keys.for_each(|key| self.ghosts.prefetch(key));
    }

    fn record_publication(&mut self, key: BlockKey, positions: Range<u32>, now: Tick) -> Remembered {
        let tokens = positions.end - positions.start;
        let Some(ghost) = self.ghosts.take(key, now) else {
            self.recency.add(tokens, now);
            return Remembered::default();
        };
        self.end_lifetime(ghost, tokens, now);
        let saved = self.saved(positions);
        self.recency.record_missed(ghost.used, Again { tokens, saved }, now);
        Remembered { uses: ghost.uses }
    }

    fn record_new(&mut self, history: &History, tokens: u32) {
        self.begin_lifetime(history, tokens);
    }

    fn record_fragment(&mut self, tokens: u32, now: Tick) {
        // They take up room. Whether they come back is not known: no block has them.
        self.recency.add(tokens, now);
    }

    fn record_evicted(&mut self, positions: Range<u32>, history: &History, now: Tick) {
        // It was said that they are not used again.
        if history.outlook == Outlook::Ended {
            return;
        }
        let (tokens, saved) = (positions.end - positions.start, self.saved(positions));
        self.recency.record_evicted(history.used, Again { tokens, saved }, now);
    }

    fn remember(&mut self, key: BlockKey, history: &History, now: Tick) {
        self.ghosts.put(key, Ghost::of(history), now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_up_is_a_request_not_a_part_of_one() {
        let [one, two] = [1, 2].map(|requests| {
            let mut policy = Adaptive::new(6_400, BlockTokens::of_page_size(64), None);
            policy.record_publication(BlockKey::new(1), 0..640, Tick::new(640));
            let before = History { used: Tick::new(640), ..History::default() };
            for (part, positions) in [0..64, 64..128].into_iter().enumerate() {
                if part < requests {
                    policy.record_request(0);
                }
                let after = before.used_again(Novelty::Low, Tick::new(1_000 + part as u64));
                policy.record_use(&before, &after, positions);
            }
            policy.recency.room()
        });
        // A sixteenth of the capacity, 400, is less than four usual look-ups of 128 tokens.
        assert!(one < 10.0 && two > 100.0, "{one}, {two}");
    }

    #[test]
    fn what_is_not_used_again_is_not_at_stake() {
        let evicted = [Outlook::Unknown, Outlook::Ended].map(|outlook| {
            let mut policy = Adaptive::new(6_400, BlockTokens::of_page_size(64), None);
            policy.record_publication(BlockKey::new(1), 0..640, Tick::new(640));
            let history = History { used: Tick::new(640), outlook, ..History::default() };
            let before = policy.recency.room();
            policy.record_evicted(0..640, &history, Tick::new(1_000));
            before - policy.recency.room()
        });
        assert_eq!(evicted.map(whole), [640, 0]);
    }

    #[test]
    fn what_is_lost_and_found_counts_by_what_it_saves() {
        let cost = PrefillCost::new(20e-6, 1e-9).expect("it is above 0");
        let judged = [None, Some(cost)].map(|cost| {
            let mut policy = Adaptive::new(6_400, BlockTokens::of_page_size(64), cost);
            let block = |number: u64| BlockKey::new((number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            for number in 0..40 {
                policy.record_publication(block(number), 0..64, Tick::new(64));
                policy.remember(
                    block(number),
                    &History::of_new(Remembered::default(), Novelty::Low, Tick::new(64)),
                    Tick::new(64),
                );
            }
            // Recency would have found all of these, at the beginning of prompts, and nothing of what is far behind.
            for number in 0..40 {
                policy.record_publication(block(number), 0..64, Tick::new(128));
            }
            let old = History { used: Tick::default(), ..History::default() };
            policy.record_use(&old, &old.used_again(Novelty::Low, Tick::new(192)), 200_000..200_640);
            policy.recency.room() > 0.0
        });
        assert_eq!(judged, [false, true]);
    }
}
