//! The last place at which a window of attention, or a state, is cached.

use std::ops::Range;

/// Where a run of blocks may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunEnds {
    /// Ends are this many blocks apart, at least 1.
    pub period: usize,
    /// The lowest end.
    pub first: usize,
}

impl RunEnds {
    /// Any end.
    pub const ANY: Self = Self { period: 1, first: 0 };

    /// The last end at or before `at`.
    fn at_most(self, at: usize) -> Option<usize> {
        at.checked_sub(self.first).map(|above| at - above % self.period.max(1))
    }
}

/// Returns the last `need` blocks in a row that are all found, of the blocks below `count`, and that end at one of
/// `ends`. If there are none, returns those from block 0 on, up to an end: fewer than `need`, perhaps none.
///
/// Asks for each block once at most, and for one in `need` where few are found, as a missing block excludes all runs
/// that contain it. If there is no run, it asks for the first `need` once more.
///
/// ```
/// use kvpool::engines::{RunEnds, last_run};
/// let found = [true, true, false, true, true, true, false];
/// assert_eq!(last_run(7, 2, RunEnds::ANY, |at| found[at]), 4..6);
/// assert_eq!(last_run(7, 2, RunEnds { period: 5, first: 0 }, |at| found[at]), 3..5);
/// assert_eq!(last_run(7, 4, RunEnds::ANY, |at| found[at]), 0..2);
/// ```
pub fn last_run(
    count: usize,
    need: usize,
    ends: RunEnds,
    mut is_found: impl FnMut(usize) -> bool,
) -> Range<usize> {
    let need = need.max(1);
    let mut end = ends.at_most(count);
    // Blocks from here to the end were found.
    let mut known = count;
    while let Some((first, last)) = end.and_then(|last| Some((last.checked_sub(need)?, last))) {
        let Some(missing) = (first..known.min(last)).find(|&at| !is_found(at)) else { return first..last };
        known = first;
        end = ends.at_most(missing);
    }
    let found = (0..count.min(need)).take_while(|&at| is_found(at)).count();
    0..ends.at_most(found).unwrap_or(0)
}
