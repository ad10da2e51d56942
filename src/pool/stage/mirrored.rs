//! The slots at the positions of a stage, as far as the host knows them.

use std::ops::Range;

use crate::base::bounded::{int32, narrow};
use crate::base::{Id, PADDING, Result, Slot, try_zeros, widen};
use crate::index::{Run, SlotList};

/// Positions that are one entry, if their slots ascend by one.
const BLOCK: usize = 64;

/// A slot for each position: the padding slot where the host does not know it.
///
/// Most tensors are a few long runs, so writing and reading cost a step for each block of a run. Slots are listed one
/// by one only in blocks that hold more than one run, or a part of one.
#[derive(Debug)]
pub(super) struct MirroredSlots {
    /// For each block the slot of its first position, if the others ascend from there; the padding slot if they are
    /// `listed`.
    blocks: Vec<i32>,
    /// The slots in the other blocks; stale elsewhere.
    listed: Vec<i32>,
}

impl MirroredSlots {
    /// Creates `positions` positions with unknown slots.
    pub(super) fn new(positions: usize) -> Result<Self> {
        Ok(Self { blocks: try_zeros(positions.div_ceil(BLOCK))?, listed: try_zeros(positions)? })
    }

    /// Sets the slots of `positions` to the first ones of `slots`. Needs no memory.
    pub(super) fn write(&mut self, positions: Range<usize>, slots: &SlotList) {
        let mut next = positions.start;
        for run in slots.runs() {
            if run.len == 1 && next < positions.end {
                // As most runs of a batch that grows are.
                self.list(next / BLOCK);
                self.listed[next] = run.start.number().cast_signed();
                next += 1;
                continue;
            }
            let end = positions.end.min(next + widen(run.len));
            self.write_run(next..end, run.start.number().cast_signed());
            next = end;
        }
    }

    /// Sets the slots of `positions` to `first` and those that follow it.
    fn write_run(&mut self, positions: Range<usize>, first: i32) {
        let (mut next, mut slot) = (positions.start, first);
        while next < positions.end {
            let (block, end) = (next / BLOCK, positions.end.min((next / BLOCK + 1) * BLOCK));
            let len = end - next;
            if len == BLOCK {
                self.blocks[block] = slot;
            } else {
                self.list(block);
                for (place, slot) in self.listed[next..end].iter_mut().zip(slot..) {
                    *place = slot;
                }
            }
            slot += int32(len);
            next = end;
        }
    }

    /// Sets the slots at positions from `first` on. Needs no memory.
    pub(super) fn write_listed(&mut self, first: usize, slots: &[i32]) {
        let end = first + slots.len();
        // Other slots of the blocks at both ends stay.
        for edge in [first, end] {
            if !edge.is_multiple_of(BLOCK) {
                self.list(edge / BLOCK);
            }
        }
        self.blocks[first / BLOCK..end.div_ceil(BLOCK)].fill(PADDING.cast_signed());
        self.listed[first..end].copy_from_slice(slots);
    }

    /// Lists the slots of a block one by one.
    fn list(&mut self, block: usize) {
        let first = std::mem::replace(&mut self.blocks[block], PADDING.cast_signed());
        if first != PADDING.cast_signed() {
            let start = block * BLOCK;
            for (place, slot) in self.listed[start..start + BLOCK].iter_mut().zip(first..) {
                *place = slot;
            }
        }
    }

    /// Returns the slot at a position.
    pub(super) fn at(&self, position: usize) -> i32 {
        let first = self.blocks[position / BLOCK];
        if first == PADDING.cast_signed() { self.listed[position] } else { first + int32(position % BLOCK) }
    }

    /// Returns the slots at `first`, `first + step`, ... (`count` of them), if they are all there and known.
    pub(super) fn values(&self, first: usize, step: usize, count: usize) -> Option<Vec<i32>> {
        let positions = self.positions(first, step, count)?;
        let mut values = Vec::with_capacity(count);
        let mut has_unknown = false;
        if step == 1 {
            for piece in self.pieces(positions) {
                match piece {
                    Piece::Run { start, len } => values.extend(start..start + int32(len)),
                    Piece::Listed(listed) => {
                        has_unknown |= listed.contains(&PADDING.cast_signed());
                        values.extend_from_slice(listed);
                    }
                }
            }
        } else {
            values.extend((0..count).map(|place| self.at(first + place * step)));
            has_unknown = values.contains(&PADDING.cast_signed());
        }
        (!has_unknown).then_some(values)
    }

    /// Returns the slots at `count` positions from `first` on as runs, if they are all there and known, and the runs
    /// are long.
    pub(super) fn runs(&self, first: usize, count: usize) -> Option<SlotList> {
        /// The least number of slots in a run, on average, for which it is worth to look at runs.
        const LONG: usize = 16;
        let positions = self.positions(first, 1, count)?;
        let most = (count / LONG).max(1);
        let mut slots = SlotList::default();
        for piece in self.pieces(positions) {
            match piece {
                Piece::Run { start, len } => {
                    slots.reserve(1).ok()?;
                    slots.push(Run { start: Slot::new(start.cast_unsigned()), len: narrow(len) });
                }
                Piece::Listed(mut listed) => {
                    while !listed.is_empty() && slots.runs().len() <= most {
                        listed = slots.extend_by_run(listed).ok()?;
                    }
                }
            }
            if slots.runs().len() > most {
                return None;
            }
        }
        let is_known = slots.runs().iter().all(|run| run.start.number() != PADDING);
        is_known.then_some(slots)
    }

    /// Returns the positions from the first to the last one, if they are all there.
    fn positions(&self, first: usize, step: usize, count: usize) -> Option<Range<usize>> {
        if count == 0 {
            return Some(0..0);
        }
        let last = step.checked_mul(count - 1)?.checked_add(first)?;
        (last < self.listed.len()).then_some(first..last + 1)
    }

    /// Returns the slots at `positions`, block by block.
    fn pieces(&self, positions: Range<usize>) -> impl Iterator<Item = Piece<'_>> {
        let mut next = positions.start;
        std::iter::from_fn(move || {
            let (start, block) = (next, next / BLOCK);
            next = positions.end.min((block + 1) * BLOCK);
            (start < positions.end).then(|| match self.blocks[block] {
                first if first == PADDING.cast_signed() => Piece::Listed(&self.listed[start..next]),
                first => Piece::Run { start: first + int32(start % BLOCK), len: next - start },
            })
        })
    }
}

/// Slots within a block.
enum Piece<'a> {
    /// They ascend by one.
    Run { start: i32, len: usize },
    /// They are listed.
    Listed(&'a [i32]),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slots at all positions, one by one.
    struct Model(Vec<i32>);

    impl Model {
        fn check(&self, slots: &MirroredSlots) {
            let positions = self.0.len();
            assert!((0..positions).all(|position| slots.at(position) == self.0[position]));
            for (first, step, count) in [(0, 1, positions), (3, 1, 130), (64, 1, 64), (60, 1, 8), (5, 7, 30)]
            {
                let expected: Vec<i32> = (0..count).map(|place| self.0[first + place * step]).collect();
                let known = (!expected.contains(&0)).then_some(expected);
                assert_eq!(slots.values(first, step, count), known, "{count} from {first} by {step}");
                if step == 1
                    && let Some(runs) = slots.runs(first, count)
                {
                    let numbers = runs.iter().map(u32::cast_signed).collect();
                    assert_eq!(Some(numbers), known, "{count} from {first}");
                }
            }
        }
    }

    /// A number below `end`, by a generator that needs no state but `seed`.
    fn below(seed: &mut u64, end: usize) -> usize {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(*seed >> 33).expect("31 bits") % end
    }

    #[test]
    fn slots_are_those_that_were_written_last() {
        const POSITIONS: usize = 5 * BLOCK + 9;
        let mut seed = 1;
        for _ in 0..40 {
            let mut slots = MirroredSlots::new(POSITIONS).expect("there is memory");
            let mut model = Model(vec![0; POSITIONS]);
            model.check(&slots);
            for _ in 0..40 {
                let first = below(&mut seed, POSITIONS);
                let mut written = Vec::new();
                while written.len() < below(&mut seed, POSITIONS - first) {
                    let start = int32(below(&mut seed, 1000));
                    let len = if start == 0 { 1 } else { int32(1 + below(&mut seed, 3 * BLOCK)) };
                    written.extend(start..start + len);
                }
                let runs = SlotList::of(&written).expect("there is memory");
                let count = written.len().min(POSITIONS - first);
                if below(&mut seed, 2) == 0 {
                    slots.write(first..first + count, &runs);
                } else {
                    slots.write_listed(first, &written[..count]);
                }
                model.0[first..first + count].copy_from_slice(&written[..count]);
                model.check(&slots);
            }
        }
    }

    #[test]
    fn short_runs_are_left_to_lists_of_slots() {
        let mut slots = MirroredSlots::new(256).expect("there is memory");
        let scattered: Vec<i32> = (1..=128).map(|slot| 2 * slot).collect();
        slots.write(0..128, &SlotList::of(&scattered).expect("there is memory"));
        slots.write(128..256, &SlotList::of(&(1..129).collect::<Vec<_>>()).expect("there is memory"));
        assert_eq!(slots.runs(0, 128), None);
        assert_eq!(slots.runs(128, 128).map(|slots| slots.runs().len()), Some(1));
        assert_eq!((slots.runs(200, 57), slots.values(200, 1, 57)), (None, None));
        assert_eq!(slots.values(0, usize::MAX, 3), None);
    }
}
