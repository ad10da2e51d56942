//! Parameters of the kernels, laid out as `params.cuh` has them, and how they are filled.

use std::ffi::c_void;
use std::ptr;

use crate::base::{DType, Dims, Error, Result, widen};
use crate::index::Move;
use crate::kernels::convert::conversion;
use crate::kernels::indices::Numbers;
use crate::kernels::rows::RowBuffer;
use crate::kernels::store::{Layout, Store, inconvertible, layout};
use crate::memory::{Borrowed, RegionRange};

/// Words that a thread copies.
const WORDS_PER_LANE: usize = 4;
/// Elements that a thread converts.
const ELEMENTS_PER_LANE: usize = 8;
/// Threads of a block.
const BLOCK: usize = 256;
/// Threads that share a row, at most.
const MOST_LANES: usize = 32;
/// The most blocks in the second dimension of a grid.
const MOST_Y: usize = 65_535;

/// `Divisor` of `params.cuh`: of numbers below 2^31, as a factor and a shift.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Divisor {
    by: u32,
    factor: u32,
    shift: u32,
}

/// `Split`: a row for a power of two of threads, in pieces of which each of them does one at a time.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    pieces: Divisor,
    lane_bits: u32,
}

/// `Index` of `params.cuh`: the numbers of a batch.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Index {
    pub(super) data: *const c_void,
    pub(super) value: i64,
    pub(super) step: i64,
    pub(super) kind: i32,
    pub(super) ndim: i32,
    pub(super) shape: [i64; 8],
    pub(super) strides: [i64; 8],
}

/// Kinds of an [`Index`]: int32 or computed, int64, and in the list of the call.
const NARROW: i32 = 0;
const WIDE: i32 = 1;
const LISTED: i32 = 2;

/// Bytes of parameters that every driver takes, and what fits them of a list alone.
const PARAMS_BYTES: usize = 4096;
const MOST_LISTED: usize = PARAMS_BYTES / size_of::<i32>();

/// `WithList`: parameters of a kernel with numbers of the host behind them. It may go on behind what the kernel takes.
#[repr(C)]
pub(super) struct WithList<P> {
    params: P,
    list: [i32; MOST_LISTED],
}

impl<P> WithList<P> {
    /// How many numbers fit.
    const ROOM: usize = (PARAMS_BYTES - size_of::<P>()) / size_of::<i32>();

    /// `params` with all of `arrays`, one behind the other, unless they are too many.
    pub(super) fn fits(arrays: &[&[i32]]) -> bool {
        arrays.iter().map(|array| array.len()).sum::<usize>() <= Self::ROOM
    }

    /// `params` with `arrays`, which fit, one behind the other.
    pub(super) fn new(params: P, arrays: &[&[i32]]) -> Self {
        let mut list = [0; MOST_LISTED];
        for (place, number) in list.iter_mut().zip(arrays.iter().copied().flatten()) {
            *place = *number;
        }
        Self { params, list }
    }
}

/// Where a kernel finds the arrays of the host that it was given.
#[derive(Clone, Copy)]
pub(super) enum Arrays<'a> {
    /// In the list of the call, one behind the other.
    Listed,
    /// Each copied to bytes on the device.
    Copied(&'a [RegionRange<'a>]),
}

impl Arrays<'_> {
    /// The address of array `which`; null where it came with the call.
    pub(super) fn address<T>(&self, which: usize) -> *const T {
        match self {
            Self::Listed => ptr::null(),
            Self::Copied(ranges) => ranges[which].address().as_ptr().cast_const().cast(),
        }
    }

    /// The numbers of every batch of a call, for whose lists these are.
    pub(super) fn indices(&self, numbers: &[Numbers<'_>]) -> Result<Vec<Index>> {
        let (mut which, mut begin) = (0, 0);
        let index = |numbers: &Numbers<'_>| {
            let Numbers::List(list) = numbers else { return Index::new(numbers) };
            let index = match self {
                Self::Listed => Index::listed(begin, list.len()),
                Self::Copied(_) => Index::at(self.address(which), list.len()),
            };
            which += 1;
            begin += list.len();
            Ok(index)
        };
        numbers.iter().map(index).collect()
    }
}

/// `StorePart`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct StorePart {
    pub(super) target: *mut u8,
    pub(super) source: *const u8,
    pub(super) words: i64,
    pub(super) head_stride: i64,
    pub(super) dim_stride: i64,
    pub(super) lead_shape: [i64; 8],
    pub(super) lead_strides: [i64; 8],
    pub(super) split: Split,
    pub(super) dim: Divisor,
    pub(super) lead_ndim: i32,
    pub(super) way: i32,
    pub(super) word: i32,
    pub(super) source_dtype: i32,
    pub(super) target_dtype: i32,
    pub(super) element_bytes: i32,
    pub(super) is_run: i32,
    pub(super) divisor: f32,
    pub(super) reciprocal: f32,
}

/// `StoreParams`.
#[repr(C)]
pub(super) struct StoreParams {
    pub(super) indices: Index,
    pub(super) count: i64,
    pub(super) rows: i64,
    pub(super) fault: *mut c_void,
    pub(super) first_blocks: i64,
    pub(super) parts: [StorePart; 2],
}

/// `GatherPart`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GatherPart {
    pub(super) source: *const u8,
    pub(super) target: *mut u8,
    pub(super) words: i64,
    pub(super) split: Split,
    pub(super) word: i32,
    pub(super) unused: i32,
}

/// `GatherParams`.
#[repr(C)]
pub(super) struct GatherParams {
    pub(super) indices: Index,
    pub(super) count: i64,
    pub(super) rows: i64,
    pub(super) fault: *mut c_void,
    pub(super) first_blocks: i64,
    pub(super) parts: [GatherPart; 2],
}

/// `RowGroup`: equal buffers, `step` bytes apart.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RowGroup {
    pub(super) base: *mut u8,
    pub(super) step: i64,
    pub(super) words: i64,
    pub(super) split: Split,
    pub(super) blocks: Divisor,
    pub(super) buffers: u32,
    pub(super) word: i32,
    pub(super) unused: i32,
}

/// `MoveParams`.
#[repr(C)]
pub(super) struct MoveParams {
    pub(super) target: Index,
    pub(super) source: Index,
    pub(super) count: i64,
    pub(super) rows: i64,
    pub(super) fault: *mut c_void,
    pub(super) groups: [RowGroup; 2],
}

/// `OrderParams`.
#[repr(C)]
pub(super) struct OrderParams {
    pub(super) steps: *const i32,
    pub(super) count: i64,
    pub(super) groups: [RowGroup; 2],
}

/// `ZeroParams`.
#[repr(C)]
pub(super) struct ZeroParams {
    pub(super) indices: Index,
    pub(super) count: i64,
    pub(super) rows: i64,
    pub(super) fault: *mut c_void,
    pub(super) groups: [RowGroup; 2],
}

/// `PointsParams`.
#[repr(C)]
pub(super) struct PointsParams {
    pub(super) table: *mut i32,
    pub(super) rows: i64,
    pub(super) columns: i64,
    pub(super) row: Index,
    pub(super) column: Index,
    pub(super) value: Index,
    pub(super) count: i64,
    pub(super) echo: *mut i32,
    pub(super) fault: *mut c_void,
}

/// `RaggedParams`.
#[repr(C)]
pub(super) struct RaggedParams {
    pub(super) table: *mut i32,
    pub(super) columns: i64,
    pub(super) rows: *const i32,
    pub(super) starts: *const i32,
    pub(super) indptr: *const i32,
    pub(super) values: *const i32,
    pub(super) count: i64,
}

/// `KvIndicesParams`.
#[repr(C)]
pub(super) struct KvIndicesParams {
    pub(super) table: *const i32,
    pub(super) rows: i64,
    pub(super) columns: i64,
    pub(super) row: Index,
    pub(super) indptr: Index,
    pub(super) out: *mut i32,
    pub(super) capacity: i64,
    pub(super) count: i64,
    pub(super) fault: *mut c_void,
}

/// `PlanParams`.
#[repr(C)]
pub(super) struct PlanParams {
    pub(super) requests: *const c_void,
    pub(super) pages: *const i32,
    pub(super) table: *mut i32,
    pub(super) columns: i64,
    pub(super) out_cache_loc: *mut i32,
    pub(super) positions: *mut i32,
    pub(super) slot_mapping: *mut i64,
    pub(super) req_pool_indices: *mut i32,
    pub(super) seq_lens: *mut i32,
    pub(super) qo_indptr: *mut i32,
    pub(super) kv_indptr: *mut i32,
    pub(super) kv_last_page_len: *mut i32,
    pub(super) kv_indices: *mut i32,
    pub(super) block_table: *mut i32,
    pub(super) page_size: i32,
    pub(super) width: i32,
    pub(super) batch: i32,
    pub(super) padded_batch: i32,
    pub(super) tokens: i32,
    pub(super) kv_len: i32,
}

/// `ReadParams`.
#[repr(C)]
pub(super) struct ReadParams {
    pub(super) from: Index,
    pub(super) out: *mut i64,
    pub(super) count: i64,
}

/// The layout is that of `params.cuh`, which checks the same numbers.
const _: () = {
    assert!(size_of::<Index>() == 160);
    assert!(size_of::<Divisor>() == 12);
    assert!(size_of::<Split>() == 16);
    assert!(size_of::<StorePart>() == 232);
    assert!(size_of::<StoreParams>() == 160 + 32 + 2 * 232);
    assert!(size_of::<GatherParams>() == 160 + 32 + 2 * 48);
    assert!(size_of::<RowGroup>() == 64);
    assert!(size_of::<MoveParams>() == 2 * 160 + 24 + 2 * 64);
    assert!(size_of::<OrderParams>() == 16 + 2 * 64);
    assert!(size_of::<ZeroParams>() == 160 + 24 + 2 * 64);
    assert!(size_of::<PointsParams>() == 24 + 3 * 160 + 24);
    assert!(size_of::<RaggedParams>() == 56);
    assert!(size_of::<KvIndicesParams>() == 24 + 2 * 160 + 32);
    assert!(size_of::<PlanParams>() == 136);
    assert!(size_of::<ReadParams>() == 176);
};

impl Index {
    const fn computed(value: i64, step: i64) -> Self {
        Self { data: ptr::null(), value, step, kind: NARROW, ndim: 1, shape: [1; 8], strides: [0; 8] }
    }

    /// `len` numbers of the list that comes with a call, from `begin` on.
    fn listed(begin: usize, len: usize) -> Self {
        Self { kind: LISTED, shape: first(signed(len), 1), ..Self::computed(signed(begin), 0) }
    }

    /// `len` numbers at an address of the device.
    fn at(data: *const c_void, len: usize) -> Self {
        Self { data, shape: first(signed(len), 1), strides: first(1, 0), ..Self::computed(0, 0) }
    }

    /// Numbers that the device knows, or can compute. A list of the host is none.
    pub(super) fn new(numbers: &Numbers<'_>) -> Result<Self> {
        match numbers {
            Numbers::Same(value) => Ok(Self::computed(*value, 0)),
            Numbers::From(value) => Ok(Self::computed(*value, 1)),
            Numbers::List(_) => Err(Error::config("numbers of the host are not on the device")),
            Numbers::Tensor(tensor) => {
                let kind = match tensor.dtype() {
                    DType::I32 => NARROW,
                    DType::I64 => WIDE,
                    other => {
                        return Err(Error::wrong_type(format!(
                            "indices must be int32 or int64, not {other}"
                        )));
                    }
                };
                let (ndim, shape, strides) = collapsed(tensor.shape(), tensor.strides());
                let data = tensor.address().as_ptr().cast_const().cast();
                Ok(Self { data, kind, ndim, shape, strides, ..Self::computed(0, 0) })
            }
        }
    }
}

/// `value`, and `rest` after it.
const fn first(value: i64, rest: i64) -> [i64; 8] {
    [value, rest, rest, rest, rest, rest, rest, rest]
}

/// The same elements in the same order with as few dimensions as possible, at least one.
fn collapsed(shape: &Dims, strides: &Dims) -> (i32, [i64; 8], [i64; 8]) {
    let (mut extents, mut steps) = (first(1, 1), [0i64; 8]);
    let mut ndim = 0;
    for (&extent, &stride) in shape.as_slice().iter().zip(strides.as_slice()) {
        if extent == 1 {
            continue;
        }
        if ndim > 0 && steps[ndim - 1] == stride.saturating_mul(extent) {
            extents[ndim - 1] *= extent;
            steps[ndim - 1] = stride;
        } else {
            (extents[ndim], steps[ndim]) = (extent, stride);
            ndim += 1;
        }
    }
    (i32::try_from(ndim.max(1)).unwrap_or(1), extents, steps)
}

impl Divisor {
    /// Divides by `by`, at least 1 and below 2^31.
    fn new(by: usize) -> Result<Self> {
        let by = u32::try_from(by).ok().filter(|by| (1..1 << 31).contains(by));
        let by = by.ok_or_else(|| Error::config("a row or a batch is too large for one launch"))?;
        let shift = 31 + by.next_power_of_two().trailing_zeros();
        // Fits, as 2^shift is at most 2^32 * (by - 1).
        let factor = u32::try_from((1u64 << shift).div_ceil(u64::from(by)));
        Ok(Self { by, factor: factor.expect("it has 32 bits"), shift })
    }
}

impl Split {
    /// Rows of `words` for threads that do `per_lane` of them at a time.
    fn new(words: usize, per_lane: usize) -> Result<Self> {
        let lanes = words.div_ceil(per_lane).next_power_of_two().min(MOST_LANES);
        let pieces = Divisor::new(words.div_ceil(lanes * per_lane).max(1))?;
        Ok(Self { pieces, lane_bits: lanes.trailing_zeros() })
    }

    /// Blocks for `count` rows.
    fn blocks(&self, count: usize) -> Result<u32> {
        let pieces = count.saturating_mul(widen(self.pieces.by));
        // Kernels count them in 31 bits.
        let pieces = u32::try_from(pieces).ok().filter(|pieces| *pieces < 1 << 31);
        let pieces = pieces.ok_or_else(|| too_much(count, "rows"))?;
        blocks(widen(pieces) << self.lane_bits)
    }
}

/// Where the second part of two begins, and the grid of both.
pub(super) fn parts_grid(splits: [Split; 2], count: usize) -> Result<(i64, [u32; 2])> {
    let [first, second] = [splits[0].blocks(count)?, splits[1].blocks(count)?];
    Ok((i64::from(first), [total(u64::from(first) + u64::from(second))?, 1]))
}

impl StorePart {
    /// How `count` rows of values get to their buffer.
    pub(super) fn new(store: &Store<'_>, count: usize) -> Result<Self> {
        let layout = layout(store, count)?;
        let (from, to) = (store.values.dtype(), store.target.dtype());
        let way = if from == to && layout.is_packed() && layout.heads == 1 {
            0
        } else if from == to {
            2
        } else if conversion(from, to).is_some() {
            1
        } else {
            return Err(inconvertible(store));
        };
        let (lead_ndim, lead_shape, lead_strides) = collapsed(&layout.lead_shape, &layout.lead_strides);
        let target = store.target.row(0);
        let source = store.values.address().as_ptr().cast_const();
        let row_bytes = store.target.row_bytes();
        let apart =
            |stride: i64| usize::try_from(stride.unsigned_abs()).unwrap_or(0).saturating_mul(from.size());
        let Layout { heads, dim, head_stride, dim_stride, .. } = layout;
        let (head_stride, dim_stride) =
            (i64::try_from(head_stride).unwrap_or(0), i64::try_from(dim_stride).unwrap_or(0));
        let sources = [source.addr()].into_iter().chain(lead_strides.map(apart));
        let targets = [target.addr(), row_bytes];
        let word = if way == 0 { word_of(sources.clone().chain(targets)) } else { 1 };
        // Other lanes of a row rely on what each of them does, so it rests on what all rows share.
        let heads_apart = if heads == 1 { 0 } else { apart(head_stride) };
        let is_run = dim_stride == 1
            && dim % ELEMENTS_PER_LANE == 0
            && word_of(sources.chain([heads_apart])) >= run_alignment(from)
            && word_of(targets) >= run_alignment(to);
        // Others are stored as they are: a scale is for 8-bit floats.
        let divisor = store.scale.unwrap_or(1.0);
        let (words, per_lane) =
            if way == 0 { (row_bytes / word, WORDS_PER_LANE) } else { (heads * dim, ELEMENTS_PER_LANE) };
        Ok(Self {
            target,
            source,
            words: signed(words),
            head_stride,
            dim_stride,
            lead_shape,
            lead_strides,
            split: Split::new(words, per_lane)?,
            dim: Divisor::new(dim.max(1))?,
            lead_ndim,
            way,
            word: small(word),
            source_dtype: code(from),
            target_dtype: code(to),
            element_bytes: small(from.size()),
            is_run: i32::from(is_run),
            divisor,
            reciprocal: reciprocal(divisor),
        })
    }
}

/// 1 / `divisor` where `divide` of `convert.cuh` may use it, else 0.
fn reciprocal(divisor: f32) -> f32 {
    let [least, most] = [-60, 60].map(|power| f32::powi(2.0, power));
    if (least..=most).contains(&divisor) { 1.0 / divisor } else { 0.0 }
}

/// What a run of elements, of which a lane has several, must be aligned to.
fn run_alignment(dtype: DType) -> usize {
    (dtype.size() * ELEMENTS_PER_LANE).min(16)
}

impl GatherPart {
    /// From `buffer` to `out`, which is contiguous and as wide.
    pub(super) fn new(buffer: &RowBuffer, out: &Borrowed<'_>) -> Result<Self> {
        let (source, target) = (buffer.row(0), out.address().as_ptr());
        let word = word_of([source.addr(), target.addr(), buffer.row_bytes()]);
        let words = buffer.row_bytes() / word;
        Ok(Self {
            source: source.cast_const(),
            target,
            words: signed(words),
            split: Split::new(words, WORDS_PER_LANE)?,
            word: small(word),
            unused: 0,
        })
    }
}

impl RowGroup {
    /// Buffers of equal rows that lie equally far apart in one region.
    fn new(buffers: &[RowBuffer]) -> Result<Self> {
        let present = buffers.first().filter(|buffer| buffer.row_bytes() > 0);
        let step = match (present, buffers.get(1)) {
            (Some(first), Some(second)) => second.offset() - first.offset(),
            _ => 0,
        };
        debug_assert!(buffers.windows(2).all(|pair| pair[1].offset() - pair[0].offset() == step));
        let base = present.map_or(ptr::null_mut(), |buffer| buffer.row(0));
        let row_bytes = present.map_or(0, RowBuffer::row_bytes);
        Self::of(base, step, row_bytes, present.map_or(0, |_| buffers.len()))
    }

    /// `buffers` buffers of rows of `row_bytes`, `step` bytes apart.
    fn of(base: *mut u8, step: usize, row_bytes: usize, buffers: usize) -> Result<Self> {
        let word = word_of([base.addr(), step, row_bytes]);
        let words = row_bytes / word;
        Ok(Self {
            base,
            step: signed(step),
            words: signed(words),
            split: Split::new(words, WORDS_PER_LANE)?,
            blocks: Divisor::new(1)?,
            buffers: u32::try_from(buffers).map_err(|_| too_much(buffers, "buffers"))?,
            word: small(word),
            unused: 0,
        })
    }
}

/// Two groups of buffers, for whose rows or words each block of a grid works on one buffer.
pub(super) struct Groups([RowGroup; 2]);

impl Groups {
    pub(super) fn new(buffers: [&[RowBuffer]; 2]) -> Result<Self> {
        Ok(Self([RowGroup::new(buffers[0])?, RowGroup::new(buffers[1])?]))
    }

    /// With blocks for `count` rows of every buffer.
    pub(super) fn for_rows(self, count: usize) -> Result<([RowGroup; 2], [u32; 2])> {
        self.with_blocks(|group| group.split.blocks(count))
    }

    /// With a thread for each word of a row, in every buffer.
    pub(super) fn for_words(self) -> Result<([RowGroup; 2], [u32; 2])> {
        self.with_blocks(|group| blocks(usize::try_from(group.words).unwrap_or(usize::MAX)))
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

/// All blocks of a grid, in its first dimension.
fn total(blocks: u64) -> Result<u32> {
    u32::try_from(blocks).ok().filter(|blocks| *blocks < 1 << 31).ok_or_else(|| too_much(blocks, "blocks"))
}

fn too_much(number: impl std::fmt::Display, noun: &str) -> Error {
    Error::config(format!("{number} {noun} of work are more than one launch takes; pass it in parts"))
}

/// Blocks for `count` segments of at most `longest` elements; each block walks over what is left.
pub(super) fn ragged_grid(longest: usize, count: usize) -> Result<[u32; 2]> {
    /// A device runs so many blocks at once, more or less; more along one segment do not speed it up.
    const ENOUGH: usize = 1024;
    let along = blocks(longest)?.min(u32::try_from(ENOUGH.div_ceil(count.max(1))).unwrap_or(1));
    Ok([along, u32::try_from(count.min(MOST_Y)).unwrap_or(0)])
}

/// Blocks of that many threads in all.
pub(super) fn blocks(threads: usize) -> Result<u32> {
    let blocks = threads.div_ceil(BLOCK);
    i32::try_from(blocks).map(i32::unsigned_abs).map_err(|_| too_much(threads, "threads"))
}

/// The largest word, at most 16 bytes, of which all `places` are multiples.
fn word_of(places: impl IntoIterator<Item = usize>) -> usize {
    let bits = places.into_iter().fold(16, |bits, place| bits | place);
    1 << bits.trailing_zeros()
}

/// The number that the kernels know a dtype by.
const fn code(dtype: DType) -> i32 {
    match dtype {
        DType::F64 => 0,
        DType::F32 => 1,
        DType::F16 => 2,
        DType::BF16 => 3,
        DType::F8E4M3 => 4,
        DType::F8E5M2 => 5,
        DType::I8 | DType::U8 | DType::I32 | DType::I64 | DType::Bool => 6,
    }
}

fn small(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

pub(super) fn signed(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The rows written and the rows read, if none of `moves` depends on another.
pub(super) fn independent(moves: &[Move]) -> Option<(Vec<i32>, Vec<i32>)> {
    let mut pairs = (Vec::with_capacity(moves.len()), Vec::with_capacity(moves.len()));
    for step in moves {
        let Move::Copy { dst, src } = *step else { return None };
        pairs.0.push(dst.cast_signed());
        pairs.1.push(src.cast_signed());
    }
    let written: std::collections::HashSet<i32> = pairs.0.iter().copied().collect();
    pairs.1.iter().all(|row| !written.contains(row)).then_some(pairs)
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

    /// The number of threads that have words of a row, and of all threads, block by block as the kernels divide them.
    fn busy_blocks(groups: &[RowGroup; 2], grid: [u32; 2], count: u32) -> [u64; 2] {
        let first_blocks = groups[0].buffers * groups[0].blocks.by;
        let mut found = [0; 2];
        for block in 0..grid[0] {
            let (group, block) =
                if block < first_blocks { (&groups[0], block) } else { (&groups[1], block - first_blocks) };
            let buffer = group.blocks.quotient(block);
            assert!(buffer < group.buffers);
            let within = block - buffer * group.blocks.by;
            let piece = (u64::from(within) * 256) >> group.split.lane_bits;
            found[0] += u64::from(piece < u64::from(count) * u64::from(group.split.pieces.by));
            found[1] += 1;
        }
        found
    }

    #[test]
    fn every_block_has_work() {
        // Qwen3-Next: 36 layers of 32 x 128 x 128 float32 and of 8192 x 3 bfloat16, 8 slots at once.
        let of =
            |row_bytes, buffers| RowGroup::of(ptr::null_mut(), 256, row_bytes, buffers).expect("a group");
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
    fn parts_of_different_widths_have_blocks_of_their_own() {
        // 64 rows of 1024 and of 64 bytes: 2 rows a warp, and 32.
        let splits = [1024 / 16, 64 / 16].map(|words| Split::new(words, WORDS_PER_LANE).expect("a split"));
        assert_eq!(parts_grid(splits, 64).expect("a grid"), (4, [4 + 1, 1]));
        assert!(parts_grid(splits, 1 << 31).is_err());
    }
}
