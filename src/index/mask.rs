//! Sets of up to 64 neighbouring indices, as the bits of one word.

use std::ops::Range;

use crate::base::widen;

/// Some of the indices `64 * word..64 * (word + 1)`: bit `i` stands for index `64 * word + i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mask {
    pub(super) word: u32,
    pub(super) bits: u64,
}

impl Mask {
    /// Creates the mask of a single index.
    pub(super) const fn of(index: u32) -> Self {
        Self { word: index / 64, bits: 1 << (index % 64) }
    }

    /// Returns the masks of a range, lowest first.
    pub(super) fn of_range(range: Range<u32>) -> impl Iterator<Item = Self> + Clone {
        let mut at = range.start;
        std::iter::from_fn(move || {
            (at < range.end).then(|| {
                let (word, bit) = (at / 64, at % 64);
                let len = (64 - bit).min(range.end - at);
                at += len;
                Self { word, bits: run_of_bits(widen(bit), widen(len)) }
            })
        })
    }

    /// Returns the number of indices.
    pub(super) const fn len(self) -> usize {
        widen(self.bits.count_ones())
    }

    /// Returns the index of bit 0.
    pub(super) const fn base(self) -> u32 {
        self.word * 64
    }

    /// Returns whether it contains `index`.
    pub(super) const fn contains(self, index: u32) -> bool {
        self.word == index / 64 && self.bits >> (index % 64) & 1 == 1
    }

    /// Returns the maximal ranges, lowest first.
    pub(super) fn ranges(self) -> impl Iterator<Item = Range<u32>> {
        let mut bits = self.bits;
        std::iter::from_fn(move || {
            (bits != 0).then(|| {
                let low = bits.trailing_zeros();
                let len = (bits >> low).trailing_ones();
                bits &= !run_of_bits(widen(low), widen(len));
                let start = self.base() + low;
                start..start + len
            })
        })
    }

    /// Returns the indices, lowest first.
    pub(super) fn indices(self) -> impl Iterator<Item = u32> {
        self.ranges().flatten()
    }
}

/// Returns a word with the bits `start..start + len`. `len` is 1 to 64, and the run ends within the word.
pub(super) const fn run_of_bits(start: usize, len: usize) -> u64 {
    (u64::MAX >> (64 - len)) << start
}

/// Returns the bits that are set, if they are one run.
#[inline]
pub(super) const fn only_run(bits: u64) -> Option<Range<u32>> {
    let lowest = bits & bits.wrapping_neg();
    // A sum with the lowest bit of a run carries through the whole run.
    if bits == 0 || bits & bits.wrapping_add(lowest) != 0 {
        return None;
    }
    Some(bits.trailing_zeros()..64 - bits.leading_zeros())
}
