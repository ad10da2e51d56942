//! Parameters of the kernels, laid out as `params.cuh` has them, and how they are filled.

use std::ffi::c_void;
use std::ptr;

use crate::base::{DType, Dims, Error, Result};
use crate::index::Move;
use crate::kernels::convert::conversion;
use crate::kernels::indices::Numbers;
use crate::kernels::rows::RowBuffer;
use crate::kernels::store::{Layout, Store, inconvertible, layout};
use crate::memory::Borrowed;

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

/// `Index` of `params.cuh`: the numbers of a batch.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Index {
    pub(super) data: *const c_void,
    pub(super) value: i64,
    pub(super) step: i64,
    pub(super) wide: i32,
    pub(super) ndim: i32,
    pub(super) shape: [i64; 8],
    pub(super) strides: [i64; 8],
}

/// `StorePart`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct StorePart {
    pub(super) target: *mut u8,
    pub(super) source: *const u8,
    pub(super) words: i64,
    pub(super) pieces: i64,
    pub(super) dim: i64,
    pub(super) head_stride: i64,
    pub(super) dim_stride: i64,
    pub(super) lead_shape: [i64; 8],
    pub(super) lead_strides: [i64; 8],
    pub(super) lead_ndim: i32,
    pub(super) way: i32,
    pub(super) word: i32,
    pub(super) lanes: i32,
    pub(super) source_dtype: i32,
    pub(super) target_dtype: i32,
    pub(super) element_bytes: i32,
    pub(super) divisor: f32,
}

/// `StoreParams`.
#[repr(C)]
pub(super) struct StoreParams {
    pub(super) indices: Index,
    pub(super) count: i64,
    pub(super) rows: i64,
    pub(super) fault: *mut c_void,
    pub(super) parts: [StorePart; 2],
}

/// `GatherPart`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GatherPart {
    pub(super) source: *const u8,
    pub(super) target: *mut u8,
    pub(super) words: i64,
    pub(super) pieces: i64,
    pub(super) word: i32,
    pub(super) lanes: i32,
}

/// `GatherParams`.
#[repr(C)]
pub(super) struct GatherParams {
    pub(super) indices: Index,
    pub(super) count: i64,
    pub(super) rows: i64,
    pub(super) fault: *mut c_void,
    pub(super) parts: [GatherPart; 2],
}

/// `RowGroup`: equal buffers, `step` bytes apart.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RowGroup {
    pub(super) base: *mut u8,
    pub(super) step: i64,
    pub(super) words: i64,
    pub(super) pieces: i64,
    pub(super) buffers: i32,
    pub(super) word: i32,
    pub(super) lanes: i32,
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
    assert!(size_of::<StorePart>() == 216);
    assert!(size_of::<StoreParams>() == 160 + 24 + 2 * 216);
    assert!(size_of::<GatherParams>() == 160 + 24 + 2 * 40);
    assert!(size_of::<RowGroup>() == 48);
    assert!(size_of::<MoveParams>() == 2 * 160 + 24 + 2 * 48);
    assert!(size_of::<OrderParams>() == 16 + 2 * 48);
    assert!(size_of::<ZeroParams>() == 160 + 24 + 2 * 48);
    assert!(size_of::<PointsParams>() == 24 + 3 * 160 + 24);
    assert!(size_of::<RaggedParams>() == 56);
    assert!(size_of::<KvIndicesParams>() == 24 + 2 * 160 + 32);
    assert!(size_of::<PlanParams>() == 136);
    assert!(size_of::<ReadParams>() == 176);
};

impl Index {
    /// Numbers as a kernel takes them; `list` is where those of the host were copied to.
    pub(super) fn new(numbers: &Numbers<'_>, list: *const c_void) -> Result<Self> {
        let computed = |value, step| Self {
            data: ptr::null(),
            value,
            step,
            wide: 0,
            ndim: 1,
            shape: [1; 8],
            strides: [0; 8],
        };
        match numbers {
            Numbers::Same(value) => Ok(computed(*value, 0)),
            Numbers::From(value) => Ok(computed(*value, 1)),
            Numbers::List(values) => Ok(Self {
                data: list,
                shape: first(signed(values.len()), 1),
                strides: first(1, 0),
                ..computed(0, 0)
            }),
            Numbers::Tensor(tensor) => {
                let wide = match tensor.dtype() {
                    DType::I32 => 0,
                    DType::I64 => 1,
                    other => {
                        return Err(Error::wrong_type(format!(
                            "indices must be int32 or int64, not {other}"
                        )));
                    }
                };
                let (ndim, shape, strides) = collapsed(tensor.shape(), tensor.strides());
                let data = tensor.address().as_ptr().cast_const().cast();
                Ok(Self { data, wide, ndim, shape, strides, ..computed(0, 0) })
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
        let bytes_apart = lead_strides
            .map(|stride| usize::try_from(stride.unsigned_abs()).unwrap_or(0).saturating_mul(from.size()));
        let word = if way == 0 {
            let places = [target.addr(), source.addr(), row_bytes];
            word_of(places.into_iter().chain(bytes_apart))
        } else {
            1
        };
        let (words, per_lane) = if way == 0 {
            (row_bytes / word, WORDS_PER_LANE)
        } else {
            (layout.heads * layout.dim, ELEMENTS_PER_LANE)
        };
        let (lanes, pieces) = split(words, per_lane);
        let Layout { dim, head_stride, dim_stride, .. } = layout;
        Ok(Self {
            target,
            source,
            words: signed(words),
            pieces: signed(pieces),
            dim: signed(dim),
            head_stride: i64::try_from(head_stride).unwrap_or(0),
            dim_stride: i64::try_from(dim_stride).unwrap_or(0),
            lead_shape,
            lead_strides,
            lead_ndim,
            way,
            word: small(word),
            lanes: small(lanes),
            source_dtype: code(from),
            target_dtype: code(to),
            element_bytes: small(from.size()),
            divisor: store.scale.unwrap_or(1.0),
        })
    }

    pub(super) fn threads(&self, count: usize) -> usize {
        threads(count, self.pieces, self.lanes)
    }
}

impl GatherPart {
    /// From `buffer` to `out`, which is contiguous and as wide.
    pub(super) fn new(buffer: &RowBuffer, out: &Borrowed<'_>) -> Self {
        let (source, target) = (buffer.row(0), out.address().as_ptr());
        let word = word_of([source.addr(), target.addr(), buffer.row_bytes()]);
        let words = buffer.row_bytes() / word;
        let (lanes, pieces) = split(words, WORDS_PER_LANE);
        Self {
            source: source.cast_const(),
            target,
            words: signed(words),
            pieces: signed(pieces),
            word: small(word),
            lanes: small(lanes),
        }
    }

    pub(super) fn threads(&self, count: usize) -> usize {
        threads(count, self.pieces, self.lanes)
    }
}

impl RowGroup {
    /// Buffers of equal rows that lie equally far apart in one region.
    pub(super) fn new(buffers: &[RowBuffer]) -> Self {
        let Some(buffer) = buffers.first().filter(|buffer| buffer.row_bytes() > 0) else {
            let base = ptr::null_mut();
            return Self { base, step: 0, words: 0, pieces: 0, buffers: 0, word: 1, lanes: 1, unused: 0 };
        };
        let step = buffers.get(1).map_or(0, |second| second.offset() - buffer.offset());
        debug_assert!(buffers.windows(2).all(|pair| pair[1].offset() - pair[0].offset() == step));
        let base = buffer.row(0);
        let word = word_of([base.addr(), step, buffer.row_bytes()]);
        let words = buffer.row_bytes() / word;
        let (lanes, pieces) = split(words, WORDS_PER_LANE);
        Self {
            base,
            step: signed(step),
            words: signed(words),
            pieces: signed(pieces),
            buffers: i32::try_from(buffers.len()).unwrap_or(i32::MAX),
            word: small(word),
            lanes: small(lanes),
            unused: 0,
        }
    }
}

/// Blocks for `count` rows of every buffer of both groups.
pub(super) fn groups_grid(groups: &[RowGroup; 2], count: usize) -> Result<[u32; 2]> {
    let threads = groups.iter().map(|group| threads(count, group.pieces, group.lanes)).max();
    Ok([blocks(threads.unwrap_or(0))?, buffers_y(groups)])
}

/// Blocks with a thread for each word of a row, in every buffer of both groups.
pub(super) fn words_grid(groups: &[RowGroup; 2]) -> Result<[u32; 2]> {
    let words = groups.iter().map(|group| usize::try_from(group.words).unwrap_or(0)).max();
    Ok([blocks(words.unwrap_or(0))?, buffers_y(groups)])
}

fn buffers_y(groups: &[RowGroup; 2]) -> u32 {
    let buffers = groups.iter().map(|group| usize::try_from(group.buffers).unwrap_or(0)).sum::<usize>();
    u32::try_from(buffers.min(MOST_Y)).unwrap_or(0)
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
    i32::try_from(blocks).map(i32::unsigned_abs).map_err(|_| {
        Error::config(format!("{threads} threads of work are more than one launch takes; pass it in parts"))
    })
}

fn threads(count: usize, pieces: i64, lanes: i32) -> usize {
    let group = usize::try_from(pieces).unwrap_or(0) * usize::try_from(lanes).unwrap_or(0);
    count.saturating_mul(group)
}

/// Threads that share a row of `words`, and pieces of which each of them does one.
fn split(words: usize, per_lane: usize) -> (usize, usize) {
    let lanes = words.div_ceil(per_lane).next_power_of_two().min(MOST_LANES);
    (lanes, words.div_ceil(lanes * per_lane))
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
