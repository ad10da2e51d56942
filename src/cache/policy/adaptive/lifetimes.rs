//! Counts of the times between two uses of blocks, and the worth of blocks that follows from them.
//!
//! Counts decay with time, so that the policy follows changes in the requests.
//!
//! *Cost.* A few additions for each call. Learning takes a few ten thousand multiplications, at most once
//! each time that an eighth of the capacity was looked up.

use std::collections::VecDeque;

use super::CLASSES;
use super::ages::{AGES, Ages};
use crate::cache::policy::Tick;

/// The counts halve each time that this many times the capacity was looked up.
const HALF_LIFE: f64 = 64.0;

/// The weight of the hazards of all classes together, in look-ups of the class itself.
const PRIOR_LOOKUPS: f64 = 64.0;

/// The weight of the assumption that a class is like all classes together, in look-ups.
const PRIOR_RATIO: f64 = 4.0;

/// The number of look-ups before which blocks are not judged.
const FEWEST_LOOKUPS: u32 = 128;

/// Blocks are not judged before lifetimes are counted up to this many times the capacity.
const MIN_HORIZON: f64 = 2.0;

/// The largest number of entries of `earlier`.
const MAX_EARLIER: usize = 64;

/// The worth of blocks, by class and age.
pub(super) type WorthByAge = [[f64; AGES]; CLASSES];

/// The number of lifetimes that had begun by a time.
#[derive(Clone, Debug)]
struct EarlierCount {
    at: Tick,
    begun: [f64; CLASSES],
}

/// The counts, in tokens.
#[derive(Debug)]
pub(super) struct Lifetimes {
    ages: Ages,
    capacity: f64,
    /// The lifetimes that ended with a use, by class and age.
    ended: [[f64; AGES]; CLASSES],
    /// The lifetimes that began, by class.
    begun: [f64; CLASSES],
    /// The values of `begun` at earlier times; the longer ago, the fewer there are.
    earlier: VecDeque<EarlierCount>,
    /// The number of look-ups: times at which a lifetime began. It decays like the counts.
    lookups: f64,
    /// The number of all look-ups, which does not decay.
    total: u32,
    last: Tick,
    learned: Tick,
    /// The time between two rounds of learning.
    pause: u64,
    worth: WorthByAge,
    is_known: bool,
}

impl Lifetimes {
    pub(super) fn new(capacity: u64, ages: Ages) -> Self {
        Self {
            ages,
            capacity: real(capacity),
            ended: [[0.0; AGES]; CLASSES],
            begun: [0.0; CLASSES],
            earlier: VecDeque::new(),
            lookups: 0.0,
            total: 0,
            last: Tick::default(),
            learned: Tick::default(),
            pause: (capacity / 8).max(1),
            worth: [[0.0; AGES]; CLASSES],
            is_known: false,
        }
    }

    /// Records that a lifetime of `tokens` tokens ended with a use.
    pub(super) fn end(&mut self, class: usize, age: usize, tokens: u32) {
        self.ended[class][age] += f64::from(tokens);
    }

    /// Records that a lifetime of `tokens` tokens began.
    pub(super) fn begin(&mut self, class: usize, tokens: u32, now: Tick) {
        self.begun[class] += f64::from(tokens);
        if now != self.last {
            self.last = now;
            self.lookups += 1.0;
            self.total = self.total.saturating_add(1);
        }
    }

    /// Moves a lifetime of `tokens` tokens that began at `begun` to another class. One in no class does not end.
    pub(super) fn reclass(&mut self, [from, to]: [Option<usize>; 2], begun: Tick, tokens: u32) {
        let passed = real(self.learned.since(begun));
        let recent = f64::from(tokens) * (-passed / (HALF_LIFE * self.capacity)).exp2();
        let later = self.earlier.iter_mut().rev().take_while(|count| count.at >= begun);
        for counts in later.map(|count| &mut count.begun).chain([&mut self.begun]) {
            if let Some(from) = from {
                counts[from] = (counts[from] - recent).max(0.0);
            }
            if let Some(to) = to {
                counts[to] += recent;
            }
        }
    }

    /// Returns whether enough is known to judge blocks.
    pub(super) const fn is_known(&self) -> bool {
        self.is_known
    }

    /// Returns the worth of blocks, by class and age.
    pub(super) const fn worth(&self) -> &WorthByAge {
        &self.worth
    }

    /// Learns from the counts, if it is time, and returns how much less they weigh than before. Lifetimes are counted
    /// completely up to the age `horizon`.
    pub(super) fn learn(&mut self, horizon: u64, now: Tick) -> Option<f64> {
        let passed = now.since(self.learned);
        if passed < self.pause {
            return None;
        }
        self.learned = now;
        let decay = (-real(passed) / (HALF_LIFE * self.capacity)).exp2();
        self.ended.iter_mut().flatten().chain(&mut self.begun).for_each(|count| *count *= decay);
        self.lookups *= decay;
        self.remember(now);
        self.is_known =
            self.total >= FEWEST_LOOKUPS && real(now.tokens().min(horizon)) >= MIN_HORIZON * self.capacity;

        // The lifetimes that began long enough ago to have reached each age.
        let mut reached = [[0.0; CLASSES]; AGES];
        let mut steps = 0;
        for (age, reached) in reached.iter_mut().enumerate() {
            let floor = self.ages.floor(age);
            let Some(then) = now.tokens().checked_sub(floor).filter(|_| floor <= horizon) else { break };
            let Some(count) = self.earlier.iter().rfind(|count| count.at.tokens() <= then) else {
                break;
            };
            *reached = count.begun;
            steps = age + 1;
        }
        let lookup: f64 = self.begun.iter().sum::<f64>() / self.lookups.max(1.0);
        let mut all = Curve::default();
        for age in 0..steps {
            let ended = self.ended.iter().map(|class| class[age]).sum();
            all.add(age, ended, reached[age].iter().sum(), 0.0, 0.0);
        }
        let of_all = all.worth(&self.ages, steps);
        for (class, (ended, worth)) in self.ended.iter().zip(&mut self.worth).enumerate() {
            if self.begun[class] == 0.0 {
                *worth = of_all;
                continue;
            }
            // How much more likely a use is in this class than in all classes, at any age.
            let (mut found, mut expected) = (PRIOR_RATIO * lookup, PRIOR_RATIO * lookup);
            let mut alone = Curve::default();
            for age in 0..steps {
                expected += reached[age][class] * alone.survivors() * all.hazard[age];
                found += ended[age];
                alone.add(age, ended[age], reached[age][class], 0.0, 0.0);
            }
            let ratio = found / expected;
            let mut curve = Curve::default();
            for age in 0..steps {
                let weight = PRIOR_LOOKUPS * lookup * all.survival[age];
                curve.add(age, ended[age], reached[age][class], weight, (all.hazard[age] * ratio).min(0.9));
            }
            *worth = curve.worth(&self.ages, steps);
        }
        Some(decay)
    }

    fn remember(&mut self, now: Tick) {
        if self.earlier.len() == MAX_EARLIER {
            // The entry whose neighbours are closest together, relative to how long ago they are.
            let gap = |at: &usize| {
                let [before, after] = [at - 1, at + 1].map(|at| now.since(self.earlier[at].at));
                real(before - after) / real(before + self.pause)
            };
            let least = (1..MAX_EARLIER - 1).min_by(|a, b| gap(a).total_cmp(&gap(b)));
            self.earlier.remove(least.expect("there are counts between the ends"));
        }
        self.earlier.push_back(EarlierCount { at: now, begun: self.begun });
    }
}

/// A survival curve: how many lifetimes reach each age.
#[derive(Debug)]
struct Curve {
    /// The share of the lifetimes that end at an age, of those that reach it.
    hazard: [f64; AGES],
    /// The share of the lifetimes that reach an age.
    survival: [f64; AGES],
    left: f64,
}

impl Default for Curve {
    fn default() -> Self {
        Self { hazard: [0.0; AGES], survival: [0.0; AGES], left: 1.0 }
    }
}

impl Curve {
    const fn survivors(&self) -> f64 {
        self.left
    }

    /// Adds the next age, at which `ended` of `begun` lifetimes ended. `weight` further lifetimes are assumed
    /// to have had the hazard `prior`.
    fn add(&mut self, age: usize, ended: f64, begun: f64, weight: f64, prior: f64) {
        let reached = begun * self.left + weight;
        let hazard = if reached > 0.0 { ((ended + weight * prior) / reached).min(0.99) } else { 0.0 };
        self.survival[age] = self.left;
        self.hazard[age] = hazard;
        self.left *= 1.0 - hazard;
    }

    /// Returns for each age the most hits per unit of time that keeping a block longer can bring, over all
    /// times to keep it.
    fn worth(&self, ages: &Ages, steps: usize) -> [f64; AGES] {
        // The points are the expected hits by time if every block is kept until then. From an age on, the
        // best time to keep a block is where the line from there to a later point is steepest, which is a
        // corner of the upper hull.
        let mut hits = [0.0; AGES];
        let mut time = [0.0; AGES];
        let last = steps.min(AGES - 1);
        for age in 0..last {
            let width = real(ages.floor(age + 1) - ages.floor(age));
            hits[age + 1] = hits[age] + self.survival[age] * self.hazard[age];
            // Lifetimes that end at an age end in the middle of its step, on average.
            time[age + 1] = time[age] + self.survival[age] * width * (1.0 - self.hazard[age] / 2.0);
        }
        let slope = |from: usize, to: usize| {
            let spent = time[to] - time[from];
            // So few lifetimes survive that the time is 0 within the precision of floating-point numbers.
            if spent > 0.0 { (hits[to] - hits[from]) / spent } else { 0.0 }
        };
        let mut worth = [0.0; AGES];
        let mut hull = vec![last];
        for age in (0..last).rev() {
            while let [.., next, top] = hull[..]
                && slope(age, top) <= slope(top, next)
            {
                hull.pop();
            }
            worth[age] = slope(age, hull[hull.len() - 1]);
            hull.push(age);
        }
        worth
    }
}

/// Converts a count of tokens to a real number.
#[expect(clippy::cast_precision_loss, reason = "tokens are counted far below 2^53")]
pub(in crate::cache) const fn real(tokens: u64) -> f64 {
    tokens as f64
}
