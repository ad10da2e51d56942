//! Levels of leaves by what a token of them saves.
//!
//! Within a leaf all tokens are equally likely to be used, and those at its end, which cost most, are evicted
//! first. So it is evicted as a whole or not at all, and counts by its middle.

use std::ops::Range;

use crate::cache::PrefillCost;

/// The largest number of levels. A token of the last one saves eleven times as much as one of the first, or
/// more.
pub(super) const LEVELS: u32 = 8;

/// The position of the token by which the first level is measured.
const REFERENCE: u32 = 1024;

/// Positions divided into levels: two for each doubling of the seconds of a token. Without a cost there is one
/// level, and every token saves 1.
#[derive(Clone, Debug)]
pub(super) struct Levels {
    /// The first position of each level.
    floors: Vec<u32>,
    /// What a token of each level saves.
    saved: Vec<f64>,
}

impl Levels {
    pub(super) fn new(cost: Option<PrefillCost>) -> Self {
        let mut levels = Self { floors: vec![0], saved: vec![cost.map_or(1.0, |cost| cost.at(REFERENCE))] };
        let Some(cost) = cost else { return levels };
        for level in 1..LEVELS {
            let saved = cost.at(REFERENCE) * 2_f64.powf(f64::from(level) / 2.0);
            let Some(floor) = cost.position_of(saved) else { break };
            levels.floors.push(floor);
            levels.saved.push(saved);
        }
        levels
    }

    /// Returns the number of levels.
    pub(super) const fn len(&self) -> usize {
        self.floors.len()
    }

    /// Returns the level of a leaf with tokens at these positions.
    pub(super) fn of(&self, positions: Range<u32>) -> usize {
        let middle = u32::midpoint(positions.start, positions.end);
        self.floors.partition_point(|&floor| floor <= middle) - 1
    }

    /// Returns what a token of a level saves.
    pub(super) fn saved(&self, level: usize) -> f64 {
        self.saved[level]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_levels_double_the_seconds() {
        // A token at 1,024 takes 1 ms more than one at 0.
        let levels = Levels::new(Some(PrefillCost::new(1e-3, 1e-3 / 1024.0).expect("a time")));
        assert_eq!(levels.len(), 8);
        // At 2,048 + 1,024 tokens, 4 ms: twice the first level.
        assert_eq!([3070, 3071, 3072, 3073].map(|at| levels.of(at..at)), [1, 1, 2, 2]);
        assert_eq!(levels.of(0..2 * 3072), 2, "by its middle");
        assert!((levels.saved(2) / levels.saved(0) - 2.0).abs() < 1e-9);
        assert_eq!(levels.of(1 << 30..1 << 31), 7);
    }

    #[test]
    fn without_attention_all_tokens_are_worth_the_same() {
        for cost in [None, Some(PrefillCost::new(1e-3, 0.0).expect("a time"))] {
            let levels = Levels::new(cost);
            assert_eq!((levels.len(), levels.of(0..1 << 31)), (1, 0));
        }
    }
}
