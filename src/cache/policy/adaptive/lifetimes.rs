//! The times between two uses of blocks of a class, and the worth that follows from them.
//!
//! Counts fade with time, so that what is learned follows what happens.
//!
//! *Cost.* A few additions for each call; learning anew, a few ten thousand multiplications, happens once in
//! an eighth of the capacity at most.

use std::collections::VecDeque;

use super::CLASSES;
use super::ages::{AGES, Ages};
use crate::cache::policy::Tick;

/// Counts halve in the time in which the capacity is looked up so many times.
const HALF_LIFE: f64 = 64.0;

/// The hazards of all classes together weigh like so many lookups of the class itself.
const PRIOR_LOOKUPS: f64 = 64.0;

/// The ratio of a class to all classes is taken for 1 with the weight of so many lookups.
const PRIOR_RATIO: f64 = 4.0;

/// Nothing is judged before so many lookups.
const FEWEST_LOOKUPS: u32 = 128;

/// Nothing is judged before lifetimes are counted up to so many times the capacity.
const MIN_HORIZON: f64 = 2.0;

/// Snapshots of beginnings, at most.
const SNAPSHOTS: usize = 64;

/// The beginnings until a moment.
#[derive(Clone, Debug)]
struct Snapshot {
    at: Tick,
    begun: [f64; CLASSES],
}

/// The counts, in tokens.
#[derive(Debug)]
pub(super) struct Lifetimes {
    ages: Ages,
    capacity: f64,
    /// Lifetimes that ended with a use, by class and age.
    ended: [[f64; AGES]; CLASSES],
    /// Lifetimes that began, by class.
    begun: [f64; CLASSES],
    /// `begun` at earlier moments, sparser the longer ago.
    snapshots: VecDeque<Snapshot>,
    /// Lookups, that is moments with a beginning. They fade like the counts.
    lookups: f64,
    /// Lookups in all: they do not fade.
    total: u32,
    last: Tick,
    learned: Tick,
    /// The time between two learnings.
    pause: u64,
    worth: Box<[[f64; AGES]; CLASSES]>,
    is_known: bool,
}

impl Lifetimes {
    pub(super) fn new(capacity: u64, ages: Ages) -> Self {
        Self {
            ages,
            capacity: real(capacity),
            ended: [[0.0; AGES]; CLASSES],
            begun: [0.0; CLASSES],
            snapshots: VecDeque::new(),
            lookups: 0.0,
            total: 0,
            last: Tick::default(),
            learned: Tick::default(),
            pause: (capacity / 8).max(1),
            worth: Box::new([[0.0; AGES]; CLASSES]),
            is_known: false,
        }
    }

    /// A lifetime of `tokens` tokens ended with a use.
    pub(super) fn end(&mut self, class: usize, age: usize, tokens: u32) {
        self.ended[class][age] += f64::from(tokens);
    }

    /// A lifetime of `tokens` tokens began.
    pub(super) fn begin(&mut self, class: usize, tokens: u32, now: Tick) {
        self.begun[class] += f64::from(tokens);
        if now != self.last {
            self.last = now;
            self.lookups += 1.0;
            self.total = self.total.saturating_add(1);
        }
    }

    /// Returns whether there is enough to judge by.
    pub(super) const fn is_known(&self) -> bool {
        self.is_known
    }

    /// Returns the worth of a block of each class and age.
    pub(super) const fn worth(&self) -> &[[f64; AGES]; CLASSES] {
        &self.worth
    }

    /// Learns anew, if it is time, and returns whether it did. Lifetimes are counted fully up to `horizon`.
    pub(super) fn learn(&mut self, horizon: u64, now: Tick) -> bool {
        let passed = now.since(self.learned);
        if passed < self.pause {
            return false;
        }
        self.learned = now;
        let fade = (-real(passed) / (HALF_LIFE * self.capacity)).exp2();
        self.ended.iter_mut().flatten().chain(&mut self.begun).for_each(|count| *count *= fade);
        self.lookups *= fade;
        self.remember(now);
        self.is_known =
            self.total >= FEWEST_LOOKUPS && real(now.tokens().min(horizon)) >= MIN_HORIZON * self.capacity;

        // Lifetimes that began long enough ago to have reached each age.
        let mut reached = [[0.0; CLASSES]; AGES];
        let mut steps = 0;
        for (age, reached) in reached.iter_mut().enumerate() {
            let floor = self.ages.floor(age);
            let Some(then) = now.tokens().checked_sub(floor).filter(|_| floor <= horizon) else { break };
            let Some(snapshot) = self.snapshots.iter().rfind(|snapshot| snapshot.at.tokens() <= then) else {
                break;
            };
            *reached = snapshot.begun;
            steps = age + 1;
        }
        let lookup: f64 = self.begun.iter().sum::<f64>() / self.lookups.max(1.0);
        let mut all = Curve::default();
        for age in 0..steps {
            let ended = self.ended.iter().map(|class| class[age]).sum();
            all.add(age, ended, reached[age].iter().sum(), 0.0, 0.0);
        }
        for (class, (ended, worth)) in self.ended.iter().zip(self.worth.iter_mut()).enumerate() {
            // How much more likely a use is than for all classes, whatever the age.
            let (mut found, mut expected) = (PRIOR_RATIO * lookup, PRIOR_RATIO * lookup);
            let mut alone = Curve::default();
            for age in 0..steps {
                expected += reached[age][class] * alone.left() * all.hazard[age];
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
        true
    }

    fn remember(&mut self, now: Tick) {
        if self.snapshots.len() == SNAPSHOTS {
            // The one whose neighbours are closest together, relative to how long ago they are.
            let gap = |at: &usize| {
                let [before, after] = [at - 1, at + 1].map(|at| now.since(self.snapshots[at].at));
                real(before - after) / real(before + self.pause)
            };
            let least = (1..SNAPSHOTS - 1).min_by(|a, b| gap(a).total_cmp(&gap(b)));
            self.snapshots.remove(least.expect("there are inner snapshots"));
        }
        self.snapshots.push_back(Snapshot { at: now, begun: self.begun });
    }
}

/// The survival of lifetimes by age.
#[derive(Debug)]
struct Curve {
    /// The share that ends at an age, of the lifetimes that reach it.
    hazard: [f64; AGES],
    /// The share that reaches an age.
    survival: [f64; AGES],
    left: f64,
}

impl Default for Curve {
    fn default() -> Self {
        Self { hazard: [0.0; AGES], survival: [0.0; AGES], left: 1.0 }
    }
}

impl Curve {
    const fn left(&self) -> f64 {
        self.left
    }

    /// Adds the next age: `ended` of `begun` lifetimes, and `weight` more with the hazard `prior`.
    fn add(&mut self, age: usize, ended: f64, begun: f64, weight: f64, prior: f64) {
        let reached = begun * self.left + weight;
        let hazard = if reached > 0.0 { ((ended + weight * prior) / reached).min(0.99) } else { 0.0 };
        self.survival[age] = self.left;
        self.hazard[age] = hazard;
        self.left *= 1.0 - hazard;
    }

    /// Returns the most hits per unit of time that staying on can bring at each age, over all times to stay.
    fn worth(&self, ages: &Ages, steps: usize) -> [f64; AGES] {
        // Hits by time, were every block kept until then: the best time to stay from an age on is where the
        // curve seen from there rises steepest, which is a corner of its upper hull.
        let mut hits = [0.0; AGES];
        let mut time = [0.0; AGES];
        let last = steps.min(AGES - 1);
        for age in 0..last {
            let width = real(ages.floor(age + 1) - ages.floor(age));
            hits[age + 1] = hits[age] + self.survival[age] * self.hazard[age];
            // Lifetimes that end do so in the middle, on average.
            time[age + 1] = time[age] + self.survival[age] * width * (1.0 - self.hazard[age] / 2.0);
        }
        let slope = |from: usize, to: usize| {
            let spent = time[to] - time[from];
            // So few survive that no time passes, within the precision of numbers.
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
pub(super) const fn real(tokens: u64) -> f64 {
    tokens as f64
}
