//! The division of a launch's work among the blocks of its grid.

use std::ptr;

use crate::base::bounded::{narrow, signed};
use crate::base::{Error, Result, widen};
use crate::kernels::pages::{KindCopy, PagePlan};
use crate::kernels::rows::{LayerRows, RowBuffer};

/// Bytes of the widest word.
pub(super) const WIDEST: usize = 16;
/// Words that one thread copies.
pub(super) const WORDS_PER_LANE: usize = 4;
/// As many words of a store are spread over more multiprocessors, a word for each thread: up to here that takes less time
/// (H200, 2026-11-27).
pub(super) const FEW_WORDS: usize = 32 << 10;
/// Elements that one thread stores, and those of its runs: elements that it reads or writes together.
pub(super) const ELEMENTS_PER_LANE: usize = 16;
pub(super) const RUNS_PER_LANE: usize = 2;
pub(super) const RUN: usize = ELEMENTS_PER_LANE / RUNS_PER_LANE;
/// Numbers of a table that one thread copies at once, and of a plan.
const NUMBERS_PER_THREAD: usize = 8;
const PAGES_AT_ONCE: usize = 4;
/// Threads per block.
const BLOCK: usize = 256;
/// The most threads that share a row.
const MAX_LANES: usize = 32;
/// The most blocks in the second dimension of a grid.
const MAX_Y: usize = 65_535;

/// `Divisor` of `params.cuh`: a division of numbers below 2^31, as a factor and a shift.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Divisor {
    by: u32,
    factor: u32,
    shift: u32,
}

/// `Split`: a row divided among a power of two of threads, which do its pieces one at a time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    pieces: Divisor,
    lane_bits: u32,
}

/// `RowGroup`: equal buffers, `step` bytes apart.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RowGroup {
    pub(super) base: *mut u8,
    pub(super) step: i64,
    pub(super) row_bytes: i64,
    pub(super) split: Split,
    pub(super) blocks: Divisor,
    pub(super) buffers: u32,
    pub(super) words: u32,
    pub(super) word: i32,
}

impl Divisor {
    /// Divides by `by`, at least 1 and below 2^31.
    pub(super) fn new(by: usize) -> Result<Self> {
        let by = below_2_31(by).filter(|by| *by > 0).ok_or_else(row_too_large_error)?;
        let shift = 31 + by.next_power_of_two().trailing_zeros();
        // Fits, as 2^shift is at most 2^32 * (by - 1).
        let factor = u32::try_from((1u64 << shift).div_ceil(u64::from(by)));
        Ok(Self { by, factor: factor.expect("it has 32 bits"), shift })
    }

    /// Returns the divisor.
    pub(super) const fn by(self) -> u32 {
        self.by
    }
}

impl Split {
    /// Divides rows of `words` among threads that do `per_lane` of them at a time.
    pub(super) fn new(words: usize, per_lane: usize) -> Result<Self> {
        let lanes = words.div_ceil(per_lane).next_power_of_two().min(MAX_LANES);
        let pieces = Divisor::new(words.div_ceil(lanes * per_lane).max(1))?;
        Ok(Self { pieces, lane_bits: lanes.trailing_zeros() })
    }

    /// Returns the number of blocks for `count` rows.
    fn blocks(&self, count: usize) -> Result<u32> {
        // Kernels count pieces in 31 bits.
        let pieces = count.checked_mul(widen(self.pieces.by)).and_then(below_2_31);
        let pieces = pieces.ok_or_else(|| grid_too_large_error(count, "rows"))?;
        blocks_of(widen(pieces) << self.lane_bits)
    }
}

/// Returns `number` if kernels can count to it.
fn below_2_31(number: usize) -> Option<u32> {
    u32::try_from(number).ok().filter(|number| *number < 1 << 31)
}

/// Checks the number of words, or whatever threads take, of a row.
pub(super) fn units(number: usize) -> Result<u32> {
    below_2_31(number).ok_or_else(row_too_large_error)
}

/// Returns the first block of the second of two parts, and the grid of both.
pub(super) fn parts_grid(splits: [Split; 2], count: usize) -> Result<(u32, [u32; 2])> {
    let [first, second] = [splits[0].blocks(count)?, splits[1].blocks(count)?];
    Ok((first, [total(u64::from(first) + u64::from(second))?, 1]))
}

impl RowGroup {
    /// Returns the buffers of a plane, in all layers.
    fn new(rows: &LayerRows, plane: usize) -> Result<Self> {
        let buffers = rows.kinds()[plane];
        // A single layer is not copied in smaller words for the sake of a next one.
        let step = if buffers.len() > 1 { rows.runs()[plane].layer_step } else { 0 };
        let present = buffers.first().filter(|buffer| buffer.row_bytes() > 0);
        let base = present.map_or(ptr::null_mut(), |buffer| buffer.row(0));
        let row_bytes = present.map_or(0, RowBuffer::row_bytes);
        let word = word_of([base.addr(), step, row_bytes]);
        Self::of(base, step, row_bytes, present.map_or(0, |_| buffers.len()), word)
    }

    /// Returns the pages of a kind in `layers` layers, as rows of the source.
    fn of_pages(kind: &KindCopy<'_>, layers: usize) -> Result<Self> {
        let sides = [kind.source, kind.target]
            .map(|side| [side.at(0, 0).addr(), side.runs.layer_step, side.runs.unit_step]);
        let word = word_of(sides.into_iter().flatten().chain([kind.bytes]));
        let buffers = if kind.bytes == 0 { 0 } else { layers };
        Self::of(kind.source.at(0, 0), kind.source.runs.layer_step, kind.bytes, buffers, word)
    }

    /// Creates `buffers` buffers of rows of `row_bytes`, `step` bytes apart, copied word by word.
    fn of(base: *mut u8, step: usize, row_bytes: usize, buffers: usize, word: Word) -> Result<Self> {
        let words = row_bytes / word.bytes();
        Ok(Self {
            base,
            step: signed(step),
            row_bytes: signed(row_bytes),
            split: Split::new(words, WORDS_PER_LANE)?,
            blocks: Divisor::new(1)?,
            buffers: u32::try_from(buffers).map_err(|_| grid_too_large_error(buffers, "buffers"))?,
            words: units(words)?,
            word: word.into(),
        })
    }
}

/// Two groups of buffers. Each block of a grid works on rows or words of one buffer.
#[derive(Clone, Copy)]
pub(super) struct Groups([RowGroup; 2]);

impl Groups {
    pub(super) fn new(rows: &LayerRows) -> Result<Self> {
        Ok(Self([RowGroup::new(rows, 0)?, RowGroup::new(rows, 1)?]))
    }

    /// Returns the source of a copy of pages.
    pub(super) fn of_pages(plan: &PagePlan<'_>) -> Result<Self> {
        let [first, second] = &plan.kinds;
        Ok(Self([RowGroup::of_pages(first, plan.layers)?, RowGroup::of_pages(second, plan.layers)?]))
    }

    /// Returns the groups and a grid with blocks for `count` rows of every buffer.
    pub(super) fn for_rows(self, count: usize) -> Result<([RowGroup; 2], [u32; 2])> {
        self.with_blocks(|group| group.split.blocks(count))
    }

    /// Returns the groups and a grid with a thread for each word of a row, in every buffer.
    pub(super) fn for_words(self) -> Result<([RowGroup; 2], [u32; 2])> {
        self.with_blocks(|group| blocks(widen(group.words)))
    }

    fn with_blocks(
        mut self,
        of_buffer: impl Fn(&RowGroup) -> Result<u32>,
    ) -> Result<([RowGroup; 2], [u32; 2])> {
        let mut blocks = 0;
        for group in &mut self.0 {
            let each = if group.buffers == 0 { 0 } else { of_buffer(group)? };
            if each == 0 {
                group.buffers = 0;
            }
            group.blocks = Divisor::new(widen(each).max(1))?;
            blocks += u64::from(each) * u64::from(group.buffers);
        }
        Ok((self.0, [total(blocks)?, 1]))
    }
}

/// Checks the number of blocks of a grid with one dimension.
fn total(blocks: u64) -> Result<u32> {
    u32::try_from(blocks)
        .ok()
        .filter(|blocks| *blocks < 1 << 31)
        .ok_or_else(|| grid_too_large_error(blocks, "blocks"))
}

fn row_too_large_error() -> Error {
    Error::argument("a row or a batch is too large for one launch")
}

fn grid_too_large_error(number: impl std::fmt::Display, noun: &str) -> Error {
    Error::argument(format!("{number} {noun} of work are more than one launch takes; pass it in parts"))
}

/// Returns a grid for `count` segments of at most `longest` elements; each block loops over the rest of its
/// segment.
pub(super) fn ragged_grid(longest: usize, count: usize) -> Result<[u32; 2]> {
    /// About as many blocks as a device runs at once; more along one segment add no speed.
    const MOST: usize = 1024;
    /// A few for each multiprocessor: up to here a thread need not do several elements.
    const FEW: usize = 256;
    let (longest, segments) = (counted(longest)?, count.max(1));
    let each = longest.div_ceil(BLOCK).min(FEW / segments).max(longest.div_ceil(BLOCK * PAGES_AT_ONCE));
    Ok([narrow(each.min(MOST.div_ceil(segments))), narrow(count.min(MAX_Y))])
}

/// As [`ragged_grid`], for segments whose numbers are copied as they are: a block takes many of them at once.
pub(super) fn copy_grid(longest: usize, count: usize) -> Result<[u32; 2]> {
    /// A few for each multiprocessor, which run at once and have more bytes under way than memory takes.
    const ENOUGH: usize = 512;
    let longest = counted(longest)?.div_ceil(BLOCK * NUMBERS_PER_THREAD);
    Ok([narrow(longest.min(ENOUGH.div_ceil(count.max(1)))), narrow(counted(count)?.min(MAX_Y))])
}

/// Checks the number of elements of a batch, which kernels count in 31 bits.
pub(super) fn counted(number: usize) -> Result<usize> {
    below_2_31(number).map(widen).ok_or_else(|| grid_too_large_error(number, "threads"))
}

/// Returns the number of blocks for `threads` threads, each with a number that kernels count in 31 bits.
pub(super) fn blocks(threads: usize) -> Result<u32> {
    blocks_of(counted(threads)?)
}

fn blocks_of(threads: usize) -> Result<u32> {
    let blocks = threads.div_ceil(BLOCK);
    i32::try_from(blocks).map(i32::unsigned_abs).map_err(|_| grid_too_large_error(threads, "threads"))
}

/// A power of two of bytes, at most 16, that a thread copies in one access.
#[derive(Clone, Copy)]
pub(super) struct Word(u8);

impl Word {
    pub(super) fn bytes(self) -> usize {
        self.0.into()
    }
}

impl From<Word> for i32 {
    fn from(word: Word) -> Self {
        word.0.into()
    }
}

/// Returns the largest word of which all `places` are multiples.
pub(super) fn word_of(places: impl IntoIterator<Item = usize>) -> Word {
    let bits = places.into_iter().fold(WIDEST, |bits, place| bits | place);
    Word(1 << bits.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Divisor {
        fn quotient(self, number: u32) -> u32 {
            u32::try_from((u64::from(number) * u64::from(self.factor)) >> self.shift).expect("a quotient")
        }
    }

    #[test]
    fn divisors_divide_every_number_below_their_bound() {
        const MOST: u32 = (1 << 31) - 1;
        let near_powers = (0..31).flat_map(|bits| [(1u32 << bits) - 1, 1 << bits, (1 << bits) + 1]);
        for by in
            near_powers.clone().chain((3..2000).map(|i| i * 1_048_573)).filter(|by| (1..=MOST).contains(by))
        {
            let divisor = Divisor::new(widen(by)).expect("in range");
            let multiples = [1, 2, 3, MOST / by - 1, MOST / by].map(|times| by.saturating_mul(times));
            let around = multiples.into_iter().chain(near_powers.clone()).chain([MOST]);
            for number in around.flat_map(|number| [number.wrapping_sub(1), number, number.wrapping_add(1)]) {
                if number <= MOST {
                    assert_eq!(divisor.quotient(number), number / by, "{number} / {by}");
                }
            }
        }
        assert!(Divisor::new(0).is_err() && Divisor::new(1 << 31).is_err());
    }

    /// Returns the number of blocks whose first thread has words to copy, and of all blocks, as the kernels
    /// divide them.
    fn busy_blocks(groups: &[RowGroup; 2], grid: [u32; 2], count: u32) -> [u64; 2] {
        let first_blocks = groups[0].buffers * groups[0].blocks.by;
        let mut counts = [0; 2];
        for block in 0..grid[0] {
            let (group, block) =
                if block < first_blocks { (&groups[0], block) } else { (&groups[1], block - first_blocks) };
            let buffer = group.blocks.quotient(block);
            assert!(buffer < group.buffers);
            let within = block - buffer * group.blocks.by;
            let piece = (u64::from(within) * 256) >> group.split.lane_bits;
            counts[0] += u64::from(piece < u64::from(count) * u64::from(group.split.pieces.by));
            counts[1] += 1;
        }
        counts
    }

    #[test]
    fn every_block_has_work() {
        // Qwen3-Next: 36 layers of 32 x 128 x 128 float32 and of 8192 x 3 bfloat16, 8 slots at once.
        let of = |row_bytes, buffers| {
            RowGroup::of(ptr::null_mut(), 256, row_bytes, buffers, word_of([256, row_bytes]))
                .expect("a group")
        };
        let states = || Groups([of(32 * 128 * 128 * 4, 36), of(8192 * 3 * 2, 36)]);
        for count in [1u32, 8, 100] {
            let (groups, grid) = states().for_rows(widen(count)).expect("a grid");
            let [busy, all] = busy_blocks(&groups, grid, count);
            assert_eq!((busy, all), (u64::from(grid[0]), u64::from(grid[0])));
        }
        let (_, grid) = states().for_rows(8).expect("a grid");
        assert_eq!(grid, [36 * (1024 + 24), 1]);
        let (groups, grid) = states().for_words().expect("a grid");
        assert_eq!(grid, [36 * (512 + 12), 1]);
        assert_eq!((groups[0].blocks.by, groups[1].blocks.by), (512, 12));
        assert_eq!(states().for_rows(0).expect("nothing").1, [0, 1]);
    }

    #[test]
    fn few_plans_have_a_thread_for_each_element() {
        let of = |longest, count| ragged_grid(longest, count).expect("a grid");
        assert_eq!(
            [of(1024, 1), of(1024, 64), of(1024, 256), of(8192, 256)],
            [[4, 1], [4, 64], [1, 256], [4, 256]]
        );
        assert_eq!([of(1 << 18, 1), of(1 << 21, 1), of(1, 70_000)], [[256, 1], [1024, 1], [1, 65_535]]);
        assert_eq!([of(0, 3), of(5, 0)], [[0, 3], [1, 0]]);
    }

    #[test]
    fn copies_of_numbers_have_a_block_for_many_of_them() {
        let of = |longest, count| copy_grid(longest, count).expect("a grid");
        assert_eq!([of(2048, 256), of(2049, 256), of(1 << 20, 256)], [[1, 256], [2, 256], [2, 256]]);
        assert_eq!([of(1 << 20, 1), of(1 << 21, 1), of(1, 70_000)], [[512, 1], [512, 1], [1, 65_535]]);
        assert_eq!([of(0, 3), of(5, 0)], [[0, 3], [1, 0]]);
    }

    #[test]
    fn kernels_count_in_31_bits() {
        const MOST: usize = (1 << 31) - 1;
        assert_eq!(units(MOST).expect("in range"), (1 << 31) - 1);
        assert_eq!(blocks(MOST).expect("in range"), 1 << 23);
        let errors = [
            units(MOST + 1).map(|_| ()),
            blocks(MOST + 1).map(|_| ()),
            copy_grid(MOST + 1, 1).map(|_| ()),
            copy_grid(1, MOST + 1).map(|_| ()),
            RowGroup::of(ptr::null_mut(), 0, MOST + 1, 1, word_of([1])).map(|_| ()),
        ];
        assert!(errors.iter().all(Result::is_err));
    }

    #[test]
    fn parts_of_different_widths_have_blocks_of_their_own() {
        // 64 rows of 1024 bytes, 2 in each warp, and 64 rows of 64 bytes, 32 in each warp.
        let splits = [1024 / 16, 64 / 16].map(|words| Split::new(words, WORDS_PER_LANE).expect("a split"));
        assert_eq!(parts_grid(splits, 64).expect("a grid"), (4, [4 + 1, 1]));
        assert!(parts_grid(splits, 1 << 31).is_err());
    }
}
