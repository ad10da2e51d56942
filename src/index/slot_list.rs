//! Slots in the order of a tensor, as runs.

use crate::base::bounded::{int32, narrow};
use crate::base::{Id, PADDING, Result, Slot, try_reserve, widen};

use super::free_list::Run;
use super::runs::run_len;

/// Slots in any order, held as ascending runs.
///
/// Neighbours that ascend are one run. The padding slot, which stands for a slot that the host does not know, is
/// always a run of its own.
///
/// ```
/// use kvpool::base::{Id, Slot};
/// use kvpool::index::{Run, SlotList};
/// let mut slots = SlotList::default();
/// slots.push(Run { start: Slot::new(16), len: 3 });
/// slots.push(Run { start: Slot::new(19), len: 2 });
/// slots.push(Run { start: Slot::new(4), len: 1 });
/// assert_eq!(slots.runs(), [Run { start: Slot::new(16), len: 5 }, Run { start: Slot::new(4), len: 1 }]);
/// assert_eq!(slots.iter().collect::<Vec<_>>(), [16, 17, 18, 19, 20, 4]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotList {
    runs: Vec<Run<Slot>>,
    /// The sum of their lengths.
    len: usize,
}

impl SlotList {
    /// Returns the runs of `numbers`, which are not negative.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the list.
    pub fn of(numbers: &[i32]) -> Result<Self> {
        let mut slots = Self::default();
        slots.extend(numbers)?;
        Ok(slots)
    }

    /// Appends `numbers`, which are not negative.
    ///
    /// # Errors
    /// Same as [`SlotList::of`].
    pub fn extend(&mut self, numbers: &[i32]) -> Result<()> {
        let mut remaining = numbers;
        while !remaining.is_empty() {
            remaining = self.extend_by_run(remaining)?;
        }
        Ok(())
    }

    /// Appends the first run of `numbers`, which are not negative, and returns those behind it.
    ///
    /// # Errors
    /// Same as [`SlotList::of`].
    pub fn extend_by_run<'a>(&mut self, numbers: &'a [i32]) -> Result<&'a [i32]> {
        let Some(&first) = numbers.first() else { return Ok(numbers) };
        let start = first.cast_unsigned();
        let len = if start == PADDING { 1 } else { run_len(numbers) };
        self.reserve(1)?;
        self.push(Run { start: Slot::new(start), len: narrow(len) });
        Ok(&numbers[len..])
    }

    /// Returns the number of slots.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no slots.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the runs.
    #[must_use]
    pub fn runs(&self) -> &[Run<Slot>] {
        &self.runs
    }

    /// Iterates over the slots.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().flat_map(|run| run.range())
    }

    /// Appends the first `count` slots, as numbers, to `to`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has none.
    pub fn list(&self, count: usize, to: &mut Vec<i32>) -> Result<()> {
        try_reserve(to, count)?;
        let mut left = count;
        for run in &self.runs {
            let first = run.start.number().cast_signed();
            match left.min(widen(run.len)) {
                0 => break,
                // As most of those that are listed are.
                1 => to.push(first),
                len => to.extend(first..first + int32(len)),
            }
            left -= left.min(widen(run.len));
        }
        Ok(())
    }

    /// Makes room for `count` more runs, so that [`SlotList::push`] needs no memory.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has none.
    pub fn reserve(&mut self, count: usize) -> Result<()> {
        try_reserve(&mut self.runs, count)
    }

    /// Appends the slots of `run`. The padding slot comes alone.
    #[inline]
    pub fn push(&mut self, run: Run<Slot>) {
        debug_assert!(run.start.number() != PADDING || run.len == 1, "the padding slot is a run of its own");
        self.len += widen(run.len);
        match self.runs.last_mut() {
            Some(last) if last.range().end == run.start.number() && last.start.number() != PADDING => {
                last.len += run.len;
            }
            _ => self.runs.push(run),
        }
    }

    /// Drops all slots behind the first `len`.
    pub fn truncate(&mut self, len: usize) {
        while self.len > len
            && let Some(last) = self.runs.last_mut()
        {
            let extra = self.len - len;
            if widen(last.len) > extra {
                last.len -= narrow(extra);
                self.len = len;
            } else {
                self.len -= widen(last.len);
                self.runs.pop();
            }
        }
    }

    /// Drops all slots. Keeps the memory.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.len = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_padding_slot_is_alone() {
        let slots = SlotList::of(&[0, 0, 1, 2, 7, 8, 0, 9]).expect("there is memory");
        assert_eq!(slots.iter().collect::<Vec<_>>(), [0, 0, 1, 2, 7, 8, 0, 9]);
        assert_eq!(slots.runs().iter().map(|run| run.len).collect::<Vec<_>>(), [1, 1, 2, 2, 1, 1]);
    }

    #[test]
    fn a_cut_may_end_within_a_run() {
        let all: Vec<i32> = (5..9).chain(20..23).chain(2..3).collect();
        for len in 0..=all.len() {
            let mut slots = SlotList::of(&all).expect("there is memory");
            let mut listed = vec![1];
            slots.list(len, &mut listed).expect("there is memory");
            assert_eq!((listed[0], &listed[1..]), (1, &all[..len]));
            slots.truncate(len);
            assert_eq!(slots, SlotList::of(&all[..len]).expect("there is memory"));
        }
    }
}
