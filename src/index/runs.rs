//! Ascending runs in sequences of indices, which make bulk work on bitmaps cheap.

use std::ops::Range;

use crate::base::{Error, IndexVec, PADDING, Result, try_reserve, widen};

use super::mask::Mask;

/// The number of indices that are compared at once; a multiple of every vector width.
pub(super) const BLOCK: usize = 32;

/// The element type of an index tensor.
pub(super) trait RawIndex: Copy + PartialEq + Into<i64> {
    /// The largest number. It has no successor: a run ends there.
    const LARGEST: i64;

    /// Returns `self + n`, or the wrong number beyond the largest one.
    fn plus(self, n: i8) -> Self;

    /// Returns whether `block` is `first, first + 1, ...`, without a branch per element.
    fn continues(block: &[Self; BLOCK], first: Self) -> bool;
}

macro_rules! raw_index {
    ($int:ident) => {
        impl RawIndex for $int {
            const LARGEST: i64 = $int::MAX as i64;

            #[inline]
            fn plus(self, n: i8) -> Self {
                self.wrapping_add(n.into())
            }

            #[inline]
            fn continues(block: &[Self; BLOCK], first: Self) -> bool {
                let mut difference = 0;
                let mut expected = first;
                for &value in block {
                    difference |= value ^ expected;
                    expected = expected.wrapping_add(1);
                }
                difference == 0
            }
        }
    };
}

raw_index!(i32);
raw_index!(i64);

/// Returns the number of leading values that ascend by one each. `values` is not empty.
pub(super) fn run_len<T: RawIndex>(values: &[T]) -> usize {
    let mut expected = values[0].plus(1);
    if values.get(1) != Some(&expected) {
        return 1;
    }
    let room = usize::try_from(T::LARGEST.saturating_sub(values[0].into()));
    let values = &values[..values.len().min(room.map_or(usize::MAX, |room| room.saturating_add(1)))];
    let mut end = 1;
    while let Some(block) = values[end..].first_chunk()
        && T::continues(block, expected)
    {
        end += BLOCK;
        expected = expected.plus(32);
    }
    // A rest that is shorter than a block is compared together with values before it.
    if values.len() < end + BLOCK
        && let Some(block) = values.last_chunk()
        && T::continues(block, block[0])
    {
        return values.len();
    }
    while values.get(end) == Some(&expected) {
        end += 1;
        expected = expected.plus(1);
    }
    end
}

/// The masks of up to [`BLOCK`] values. Values that ascend within a word share one mask.
#[derive(Debug)]
pub(super) struct BlockMasks([Mask; BLOCK]);

impl BlockMasks {
    pub(super) const fn new() -> Self {
        Self([Mask { word: 0, bits: 0 }; BLOCK])
    }

    /// Returns the masks of up to [`BLOCK`] values, or `None` when one of them lies outside of `space`.
    #[inline]
    pub(super) fn of<T: RawIndex>(&mut self, values: &[T], space: &Range<u32>) -> Option<&[Mask]> {
        // A value that fits no index becomes the padding index, which lies in no space.
        let mut indices = [PADDING; BLOCK];
        let mut is_within = true;
        for (index, value) in indices.iter_mut().zip(values) {
            *index = u32::try_from((*value).into()).unwrap_or(PADDING);
            is_within &= space.contains(index);
        }
        if !is_within {
            return None;
        }
        let indices = &indices[..values.len()];
        if let [first, .., last] = indices
            && widen(last.saturating_sub(*first) / 64) >= BLOCK / 2
        {
            // Few of them share a word, so looking for those costs more than it saves.
            for (mask, &index) in self.0.iter_mut().zip(indices) {
                *mask = Mask::of(index);
            }
            return Some(&self.0[..values.len()]);
        }
        let (mut word, mut bits, mut last, mut at) = (u32::MAX, 0, 0, BLOCK - 1);
        for &index in indices {
            // Without a branch: the end of a word is not predictable.
            let goes_on = index / 64 == word && index > last;
            at = (at + usize::from(!goes_on)) % BLOCK;
            (word, last) = (index / 64, index);
            bits = 1 << (index % 64) | if goes_on { bits } else { 0 };
            self.0[at] = Mask { word, bits };
        }
        Some(&self.0[..=at])
    }
}

fn runs_in<T: RawIndex>(values: &[T], mut visit: impl FnMut(i64, usize)) {
    let mut rest = values;
    while let Some(&first) = rest.first() {
        let len = run_len(rest);
        visit(first.into(), len);
        rest = &rest[len..];
    }
}

/// Calls `visit(start, length)` for each maximal ascending run, in order.
///
/// ```
/// use kvpool::{base::IndexVec, index::for_each_run};
/// let mut runs = Vec::new();
/// for_each_run(&IndexVec::I32(vec![4, 5, 6, 9, 3]), |start, len| runs.push((start, len)));
/// assert_eq!(runs, [(4, 3), (9, 1), (3, 1)]);
/// ```
pub fn for_each_run(values: &IndexVec, visit: impl FnMut(i64, usize)) {
    match values {
        IndexVec::I32(values) => runs_in(values, visit),
        IndexVec::I64(values) => runs_in(values, visit),
    }
}

/// Returns the (start, length) of each maximal ascending run, in order and flattened: the form of DMA
/// descriptors.
///
/// # Errors
/// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) when a start or a length does not fit int32,
/// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the list.
///
/// ```
/// use kvpool::base::IndexVec;
/// use kvpool::index::ascending_runs;
/// assert_eq!(ascending_runs(&IndexVec::I32(vec![4, 5, 6, 9])).unwrap(), [4, 3, 9, 1]);
/// ```
pub fn ascending_runs(values: &IndexVec) -> Result<Vec<i32>> {
    let mut flat = Vec::new();
    let (mut unfit, mut reserved) = (None, Ok(()));
    for_each_run(values, |start, len| match (i32::try_from(start), i32::try_from(len)) {
        (Ok(start), Ok(len)) if reserved.is_ok() => {
            reserved = try_reserve(&mut flat, 2);
            if reserved.is_ok() {
                flat.extend([start, len]);
            }
        }
        (Ok(_), Ok(_)) => (),
        _ => unfit = unfit.or(Some((start, len))),
    });
    match unfit {
        None => reserved.map(|()| flat),
        Some((start, len)) => {
            Err(Error::argument(format!("the run of {len} from {start} does not fit an int32 tensor")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that ascend from `first` on, up to the largest number and from the smallest one on.
    fn ascending(first: i32, count: usize) -> Vec<i32> {
        std::iter::successors(Some(first), |value| Some(value.wrapping_add(1))).take(count).collect()
    }

    #[test]
    fn a_run_ends_at_any_place() {
        for count in 1..=2 * BLOCK + 5 {
            let values = ascending(-7, count);
            assert_eq!(run_len(&values), count);
            for end in 1..count {
                for other in [-1, 1, i32::MAX] {
                    let mut values = values.clone();
                    values[end] = values[end].wrapping_add(other);
                    assert_eq!(run_len(&values), end, "{count} values");
                }
            }
        }
    }

    #[test]
    fn the_largest_number_has_no_successor() {
        for before in 0..=BLOCK + 2 {
            for after in [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK] {
                let first = i32::MAX - i32::try_from(before).expect("it is small");
                assert_eq!(run_len(&ascending(first, before + 1 + after)), before + 1);
            }
        }
        assert_eq!(run_len(&[i64::MAX - 1, i64::MAX, i64::MIN]), 2);
        assert_eq!(run_len(&[i64::MIN, i64::MIN + 1, 0]), 2);
    }
}
