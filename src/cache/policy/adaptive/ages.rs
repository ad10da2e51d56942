//! A logarithmic scale of ages: two steps for each doubling, from a 64th of the capacity on.

use crate::cache::policy::Outlook;

/// The number of steps. The last one has no upper end: it is for ages above 900 times the capacity.
pub(super) const AGES: usize = 32;

/// Blocks that are used again within this many times the capacity are used again soon. Most of what is looked up is
/// found and takes up no room, so that more can be looked up than there is room for.
const SOON: u64 = 4;

/// Blocks that are used again within this many times the capacity are used again later, the others late.
const LATER: u64 = 32;

/// The scale of the ages of blocks. An age is the number of tokens that were looked up since the last use.
#[derive(Clone, Debug)]
pub(super) struct Ages {
    capacity: u64,
    /// The width of the first step, in tokens.
    unit: u64,
    /// The youngest age of each step.
    floors: [u64; AGES],
}

impl Ages {
    /// Creates the scale for a cache of `capacity` tokens.
    pub(super) fn new(capacity: u64) -> Self {
        let unit = (capacity / 64).max(1);
        let mut floors = [0; AGES];
        for (step, floor) in floors.iter_mut().enumerate() {
            // (2^(step / 2) - 1) units.
            let square = (u128::from(unit) * u128::from(unit)) << step;
            *floor = u64::try_from(square.isqrt()).expect("a capacity is far below 2^48") - unit;
        }
        Self { capacity, unit, floors }
    }

    /// Returns the step that an age is in.
    pub(super) fn of(&self, age: u64) -> usize {
        self.floors.partition_point(|&floor| floor <= age) - 1
    }

    /// Returns the outlook of blocks that are usually used again at an age.
    pub(super) fn outlook(&self, age: u64) -> Outlook {
        match age / self.capacity {
            0..SOON => Outlook::Soon,
            SOON..LATER => Outlook::Later,
            _ => Outlook::Late,
        }
    }

    /// Returns the youngest age of a step.
    pub(super) const fn floor(&self, step: usize) -> u64 {
        self.floors[step]
    }

    /// Returns the width of the first step.
    pub(super) const fn unit(&self) -> u64 {
        self.unit
    }
}
