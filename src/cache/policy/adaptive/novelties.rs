//! What numbers of new tokens are few or many, as learned from requests.
//!
//! *Cost.* A request counts in one of 64 steps. Learning adds these up.

use crate::cache::policy::Novelty;

/// The number of steps: two for each doubling of the tokens.
const STEPS: usize = 64;

/// The counts of requests by the number of their new tokens.
#[derive(Debug)]
pub(super) struct Novelties {
    requests: [f64; STEPS],
    /// What the requests of each step are compared to all.
    levels: [Novelty; STEPS],
}

impl Novelties {
    pub(super) const fn new() -> Self {
        Self { requests: [0.0; STEPS], levels: [Novelty::Middle; STEPS] }
    }

    /// Counts a request with `new` new tokens.
    pub(super) fn record(&mut self, new: u32) {
        self.requests[step(new)] += 1.0;
    }

    /// Returns what so many new tokens are compared to other requests.
    pub(super) const fn of(&self, new: u32) -> Novelty {
        self.levels[step(new)]
    }

    /// Learns from the counts, which then weigh `decay` times as much.
    pub(super) fn learn(&mut self, decay: f64) {
        let all: f64 = self.requests.iter().sum();
        let mut below = 0.0;
        for (requests, level) in self.requests.iter_mut().zip(&mut self.levels) {
            // Those of one step count as if they were half below and half above it.
            *level = match (below + *requests / 2.0) * 3.0 / all {
                third if third < 1.0 => Novelty::Low,
                third if third >= 2.0 => Novelty::High,
                _ => Novelty::Middle,
            };
            below += *requests;
            *requests *= decay;
        }
    }
}

/// Returns the step that a number of tokens is in.
const fn step(tokens: u32) -> usize {
    // Up to 2^31 tokens.
    let tokens = if tokens >> 31 == 0 { tokens + 1 } else { tokens };
    let doublings = tokens.ilog2();
    // The bit after the highest one.
    let half = (tokens << (31 - doublings)) >> 30 & 1;
    (2 * doublings + half) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_double_every_second_time() {
        assert_eq!([0, 1, 2, 3, 4, 5, 6, 7, 11, 15].map(step), [0, 2, 3, 4, 4, 5, 5, 6, 7, 8]);
        assert_eq!([(1 << 31) - 1, 1 << 31, u32::MAX].map(step), [62, 62, 63]);
    }

    #[test]
    fn each_third_has_a_level() {
        let mut novelties = Novelties::new();
        let of = |novelties: &Novelties| [0, 100, 1_000, 10_000].map(|new| novelties.of(new));
        assert_eq!(of(&novelties), [Novelty::Middle; 4], "nothing is known");
        for new in [100, 1_000, 10_000] {
            novelties.record(new);
        }
        novelties.learn(0.5);
        assert_eq!(of(&novelties), [Novelty::Low, Novelty::Low, Novelty::Middle, Novelty::High]);
        // Five requests weigh more than one and a half.
        for _ in 0..5 {
            novelties.record(10_000);
        }
        novelties.learn(0.5);
        assert_eq!(of(&novelties), [Novelty::Low, Novelty::Low, Novelty::Low, Novelty::Middle]);
    }
}
