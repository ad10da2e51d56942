//! A list of free ranges in the order of their addresses, which finds the first range that is long enough.
//!
//! Ranges are stored in groups, each of which knows the length of its longest range, so a search skips a
//! group in one step. Taking and adding a range cost one step for each group before it, and one pass over a
//! group.

use std::ops::Range;

/// The largest number of ranges in a group.
const MOST: usize = 64;

#[derive(Clone, Debug, Default)]
pub(super) struct Gaps {
    /// The groups of ranges. No two ranges touch.
    groups: Vec<Group>,
}

#[derive(Clone, Debug)]
struct Group {
    longest: usize,
    /// The ranges of the group in order. There is at least one, and none is empty.
    ranges: Vec<Range<usize>>,
}

impl Group {
    fn new(ranges: Vec<Range<usize>>) -> Self {
        let mut group = Self { longest: 0, ranges };
        group.measure();
        group
    }

    /// Updates the length of the longest range.
    fn measure(&mut self) {
        self.longest = self.ranges.iter().map(Range::len).max().unwrap_or(0);
    }
}

impl Gaps {
    /// Returns the ranges in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Range<usize>> {
        self.groups.iter().flat_map(|group| &group.ranges)
    }

    /// Returns the length of the longest range; 0 if there are no ranges.
    pub(super) fn longest(&self) -> usize {
        self.groups.iter().map(|group| group.longest).max().unwrap_or(0)
    }

    /// Returns how many pieces of `bytes`, which is not 0, can be cut from the ranges, up to `limit`.
    pub(super) fn fitting(&self, bytes: usize, limit: usize) -> usize {
        let mut found = 0;
        for group in self.groups.iter().filter(|group| group.longest >= bytes) {
            for range in &group.ranges {
                found += range.len() / bytes;
                if found >= limit {
                    return limit;
                }
            }
        }
        found
    }

    /// Cuts pieces of `bytes`, which is not 0, from the beginning of the first range that is long enough for
    /// one: as many as fit, up to `limit`. Returns the pieces as one range, or `None` if no range is long
    /// enough.
    pub(super) fn cut(&mut self, bytes: usize, limit: usize) -> Option<Range<usize>> {
        let at = self.groups.iter().position(|group| group.longest >= bytes)?;
        let group = &mut self.groups[at];
        let position = group.ranges.iter().position(|range| range.len() >= bytes)?;
        let range = &mut group.ranges[position];
        let was_longest = range.len() == group.longest;
        let start = range.start;
        range.start += limit.min(range.len() / bytes) * bytes;
        let taken = start..range.start;
        if range.start == range.end {
            group.ranges.remove(position);
        }
        if group.ranges.is_empty() {
            self.groups.remove(at);
        } else if was_longest {
            group.measure();
        }
        Some(taken)
    }

    /// Returns whether `range` has bytes in common with a free range.
    pub(super) fn overlap(&self, range: &Range<usize>) -> bool {
        let (at, position) = self.position_from(range.end);
        self.before(at, position)
            .is_some_and(|(at, position)| self.groups[at].ranges[position].end > range.start)
    }

    /// Adds a range that is not empty and overlaps no other. It is joined with the ranges that it touches.
    pub(super) fn add(&mut self, range: Range<usize>) {
        let (mut at, mut position) = self.position_from(range.start);
        let before = self
            .before(at, position)
            .filter(|&(at, position)| self.groups[at].ranges[position].end == range.start);
        let goes_on = self.groups.get(at).is_some_and(|group| group.ranges[position].start == range.end);
        let mut whole = range;
        if goes_on {
            whole.end = self.groups[at].ranges[position].end;
        }
        if let Some((earlier, last)) = before {
            whole.start = self.groups[earlier].ranges[last].start;
            if goes_on {
                self.remove(at, position);
            }
            (at, position) = (earlier, last);
        } else if !goes_on {
            (at, position) = self.insert(at, position, whole.clone());
        }
        let group = &mut self.groups[at];
        group.longest = group.longest.max(whole.len());
        group.ranges[position] = whole;
    }

    /// Removes the last range, if it ends at `end`, and returns where it begins.
    pub(super) fn pop(&mut self, end: usize) -> Option<usize> {
        let at = self.groups.len().checked_sub(1)?;
        let last = self.groups[at].ranges.last().filter(|last| last.end == end)?.start;
        self.remove(at, self.groups[at].ranges.len() - 1);
        Some(last)
    }

    /// Removes all ranges.
    pub(super) fn clear(&mut self) {
        self.groups.clear();
    }

    /// Returns the group and the position of the first range that begins at or after `start`. If there is
    /// none, returns the position after the last group.
    fn position_from(&self, start: usize) -> (usize, usize) {
        let at =
            self.groups.partition_point(|group| group.ranges.last().is_some_and(|last| last.start < start));
        let position =
            self.groups.get(at).map_or(0, |group| group.ranges.partition_point(|range| range.start < start));
        (at, position)
    }

    /// Returns the position before a position.
    fn before(&self, at: usize, position: usize) -> Option<(usize, usize)> {
        match position.checked_sub(1) {
            Some(position) => Some((at, position)),
            None => at.checked_sub(1).map(|at| (at, self.groups[at].ranges.len() - 1)),
        }
    }

    /// Inserts a range before the one at a position, and returns where it is.
    fn insert(&mut self, at: usize, position: usize, range: Range<usize>) -> (usize, usize) {
        // After the last range it joins the last group.
        let (at, position) = match (self.groups.get(at), self.groups.len().checked_sub(1)) {
            (Some(_), _) => (at, position),
            (None, Some(last)) => (last, self.groups[last].ranges.len()),
            (None, None) => {
                self.groups.push(Group::new(vec![range]));
                return (0, 0);
            }
        };
        self.groups[at].ranges.insert(position, range);
        if self.groups[at].ranges.len() <= MOST {
            return (at, position);
        }
        let behind = self.groups[at].ranges.split_off(MOST / 2);
        self.groups[at].measure();
        self.groups.insert(at + 1, Group::new(behind));
        if position < MOST / 2 { (at, position) } else { (at + 1, position - MOST / 2) }
    }

    fn remove(&mut self, at: usize, position: usize) {
        let group = &mut self.groups[at];
        group.ranges.remove(position);
        if group.ranges.is_empty() {
            self.groups.remove(at);
        } else {
            group.measure();
        }
    }

    /// Describes a broken invariant, if there is one.
    pub(super) fn broken_invariant(&self) -> Option<String> {
        let mut end = None;
        for range in self.iter() {
            if range.is_empty() || end.is_some_and(|end| range.start <= end) {
                return Some(format!(
                    "the gap {range:?} is empty, or not apart from the one before, {end:?}"
                ));
            }
            end = Some(range.end);
        }
        self.groups.iter().find_map(|group| {
            let found = group.ranges.iter().map(Range::len).max();
            (found != Some(group.longest))
                .then(|| format!("the longest gap of a group has {found:?} bytes, not {}", group.longest))
        })
    }
}
