//! Kernel parameters, laid out as in `params.cuh`, and how those of rows are filled.

use std::ffi::c_void;

use crate::base::bounded::{distance, int32, signed};
use crate::base::{DType, Result, widen};
use crate::kernels::convert::conversion;
use crate::kernels::pages::KindCopy;
use crate::kernels::rows::RowBuffer;
use crate::kernels::store::{StoreRows, inconvertible, layout};
use crate::memory::BorrowedTensor;

use super::grid::{
    Divisor, ELEMENTS_PER_LANE, FEW_WORDS, RUN, RUNS_PER_LANE, RowGroup, Split, WIDEST, WORDS_PER_LANE,
    units, word_of,
};
use super::numbers::{Index, collapsed};

/// The way in which values are copied to their buffer: `WAY_...` of `params.cuh`.
#[repr(i32)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum StoreMethod {
    /// Rows are contiguous and copied word by word.
    Words = 0,
    /// Contiguous and aligned runs of elements are copied or converted.
    Runs = 1,
    /// Elements are copied or converted one by one.
    Elements = 2,
}

/// The dtypes of conversions: `DTYPE_...` of `params.cuh`.
#[repr(i32)]
#[derive(Clone, Copy)]
pub(super) enum DTypeCode {
    F64 = 0,
    F32 = 1,
    F16 = 2,
    Bf16 = 3,
    F8E4M3 = 4,
    F8E5M2 = 5,
    /// A dtype that is never converted.
    None = 6,
}

impl DTypeCode {
    const fn of(dtype: DType) -> Self {
        match dtype {
            DType::F64 => Self::F64,
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::Bf16,
            DType::F8E4M3 => Self::F8E4M3,
            DType::F8E5M2 => Self::F8E5M2,
            DType::I8
            | DType::U8
            | DType::I16
            | DType::U16
            | DType::I32
            | DType::U32
            | DType::I64
            | DType::U64
            | DType::Bool => Self::None,
        }
    }
}

/// `StorePart`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct StorePart {
    pub(super) target: *mut u8,
    pub(super) source: *const u8,
    pub(super) row_bytes: i64,
    pub(super) split: Split,
    pub(super) units: u32,
    pub(super) per_lane: u32,
    pub(super) way: StoreMethod,
    pub(super) size: i32,
    pub(super) lead_ndim: i32,
    pub(super) target_size: i32,
    pub(super) source_dtype: DTypeCode,
    pub(super) target_dtype: DTypeCode,
    pub(super) divisor: f32,
    pub(super) reciprocal: f32,
    pub(super) unused: i32,
    pub(super) dim: Divisor,
    pub(super) head_stride: i64,
    pub(super) dim_stride: i64,
    pub(super) lead_strides: [i64; 8],
    pub(super) lead_shape: [i64; 8],
}

/// `StoreParams`.
#[repr(C)]
pub(super) struct StoreParams {
    pub(super) fault: *mut c_void,
    pub(super) count: u32,
    pub(super) rows: u32,
    pub(super) first_blocks: u32,
    pub(super) unused: u32,
    pub(super) indices: Index,
    pub(super) parts: [StorePart; 2],
}

/// `GatherPart`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GatherPart {
    pub(super) source: *const u8,
    pub(super) target: *mut u8,
    pub(super) row_bytes: i64,
    pub(super) split: Split,
    pub(super) words: u32,
    pub(super) word: i32,
}

/// `GatherParams`.
#[repr(C)]
pub(super) struct GatherParams {
    pub(super) fault: *mut c_void,
    pub(super) count: u32,
    pub(super) rows: u32,
    pub(super) first_blocks: u32,
    pub(super) unused: u32,
    pub(super) parts: [GatherPart; 2],
    pub(super) indices: Index,
}

/// `MoveParams`.
#[repr(C)]
pub(super) struct MoveParams {
    pub(super) groups: [RowGroup; 2],
    pub(super) fault: *mut c_void,
    pub(super) count: u32,
    pub(super) rows: u32,
    pub(super) target: Index,
    pub(super) source: Index,
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
    pub(super) groups: [RowGroup; 2],
    pub(super) fault: *mut c_void,
    pub(super) count: u32,
    pub(super) rows: u32,
    pub(super) indices: Index,
}

/// `PageTarget`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct PageTarget {
    pub(super) base: *mut u8,
    pub(super) step: i64,
    pub(super) stride: i64,
    pub(super) source_stride: i64,
}

/// `PagesParams`.
#[repr(C)]
pub(super) struct PagesParams {
    pub(super) count: i64,
    pub(super) blocks: i64,
    pub(super) groups: [RowGroup; 2],
    pub(super) targets: [PageTarget; 2],
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

/// `ColumnsParams`.
#[repr(C)]
pub(super) struct ColumnsParams {
    pub(super) table: *mut i32,
    pub(super) columns: i64,
    pub(super) rows: *const i32,
    pub(super) indptr: *const i32,
    pub(super) count: i64,
}

/// `KvIndicesParams`.
#[repr(C)]
pub(super) struct KvIndicesParams {
    pub(super) table: *const i32,
    pub(super) out: *mut i32,
    pub(super) columns: i64,
    pub(super) capacity: i64,
    pub(super) rows: u32,
    pub(super) count: u32,
    pub(super) fault: *mut c_void,
    pub(super) row: Index,
    pub(super) indptr: Index,
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

/// `UnitPlanParams`.
#[repr(C)]
pub(super) struct UnitPlanParams {
    pub(super) groups: *const i32,
    pub(super) requests: *const i32,
    pub(super) spans: *const i32,
    pub(super) units: *const i32,
    pub(super) base: *mut u8,
    pub(super) positions: *mut i32,
    pub(super) req_pool_indices: *mut i32,
    pub(super) seq_lens: *mut i32,
    pub(super) qo_indptr: *mut i32,
    pub(super) groups_count: i32,
    pub(super) batch: i32,
    pub(super) padded_batch: i32,
    pub(super) tokens: i32,
}

/// `ContinueParams`.
#[repr(C)]
pub(super) struct ContinueParams {
    pub(super) out: *mut c_void,
    pub(super) last_loc: Index,
    pub(super) first: i64,
    pub(super) count: i64,
    pub(super) slots: i64,
    pub(super) fault: *mut c_void,
    pub(super) page_size: i32,
    pub(super) is_wide: i32,
}

/// `RunsParams`.
#[repr(C)]
pub(super) struct RunsParams {
    pub(super) out: *mut c_void,
    pub(super) count: u32,
    pub(super) runs: u32,
    pub(super) is_wide: i32,
    pub(super) unused: i32,
}

/// `ReadParams`.
#[repr(C)]
pub(super) struct ReadParams {
    pub(super) from: Index,
    pub(super) out: *mut i64,
    pub(super) count: i64,
}

/// The layout is that of `params.cuh`, which asserts the same numbers.
const _: () = {
    assert!(size_of::<Index>() == 160);
    assert!(size_of::<Divisor>() == 12);
    assert!(size_of::<Split>() == 16);
    assert!(size_of::<StorePart>() == 240);
    assert!(size_of::<StoreParams>() == 24 + 160 + 2 * 240);
    assert!(size_of::<GatherParams>() == 24 + 2 * 48 + 160);
    assert!(size_of::<RowGroup>() == 64);
    assert!(size_of::<MoveParams>() == 2 * 64 + 16 + 2 * 160);
    assert!(size_of::<OrderParams>() == 16 + 2 * 64);
    assert!(size_of::<ZeroParams>() == 2 * 64 + 16 + 160);
    assert!(size_of::<PagesParams>() == 16 + 2 * 64 + 2 * 32);
    assert!(size_of::<PointsParams>() == 24 + 3 * 160 + 24);
    assert!(size_of::<ColumnsParams>() == 40);
    assert!(size_of::<KvIndicesParams>() == 48 + 2 * 160);
    assert!(size_of::<PlanParams>() == 136);
    assert!(size_of::<UnitPlanParams>() == 88);
    assert!(size_of::<ContinueParams>() == 8 + 160 + 40);
    assert!(size_of::<RunsParams>() == 24);
    assert!(size_of::<ReadParams>() == 176);
};

impl StorePart {
    /// Returns the parameters to store `count` rows of values in their buffer.
    pub(super) fn new(store: &StoreRows<'_>, count: usize) -> Result<Self> {
        let layout = layout(store, count)?;
        let (from, to) = (store.values.dtype(), store.target.dtype());
        if from != to && conversion(from, to).is_none() {
            return Err(inconvertible(store));
        }
        let (lead_ndim, lead_shape, lead_strides) = collapsed(&layout.lead_shape, &layout.lead_strides);
        let target = store.target.row(0);
        let source = store.values.address().as_ptr().cast_const();
        let row_bytes = store.target.row_bytes();
        // Strides of an empty tensor may be anything.
        let apart = |stride: i64| stride.wrapping_mul(signed(from.size()));
        let lead_strides = lead_strides.map(apart);
        let (heads, dim) = (layout.heads, layout.dim);
        let [head_stride, dim_stride] = [layout.head_stride, layout.dim_stride].map(apart);
        // Only the lowest bits matter.
        let address = |stride: i64| distance(stride).cast_unsigned();
        let sources = [source.addr()].into_iter().chain(lead_strides.map(address));
        let targets = [target.addr(), row_bytes];
        let (way, size) = if from == to && layout.is_packed() && heads == 1 {
            (StoreMethod::Words, word_of(sources.chain(targets)).bytes())
        } else {
            // The lanes of a row must agree, so the decision depends only on what all rows share.
            let heads_apart = if heads == 1 { 0 } else { address(head_stride) };
            let is_run = layout.dim_stride == 1
                && dim % RUN == 0
                && from.size() <= size_of::<f32>()
                && word_of(sources.chain([heads_apart])).bytes() >= run_alignment(from)
                && word_of(targets).bytes() >= run_alignment(to);
            (if is_run { StoreMethod::Runs } else { StoreMethod::Elements }, from.size())
        };
        let (of_row, per_lane) = match way {
            StoreMethod::Words => {
                let words = row_bytes / size;
                (words, if count.saturating_mul(words) <= FEW_WORDS { 1 } else { WORDS_PER_LANE })
            }
            StoreMethod::Runs => (heads * dim / RUN, RUNS_PER_LANE),
            StoreMethod::Elements => (heads * dim, ELEMENTS_PER_LANE),
        };
        // Kernels count elements, too.
        units(heads * dim)?;
        // Other dtypes are stored unchanged: a scale applies to 8-bit floats.
        let divisor = store.scale.unwrap_or(1.0);
        Ok(Self {
            target,
            source,
            row_bytes: signed(row_bytes),
            split: Split::new(of_row, per_lane)?,
            units: units(of_row)?,
            per_lane: units(per_lane)?,
            way,
            size: int32(size),
            lead_ndim,
            target_size: int32(to.size()),
            source_dtype: DTypeCode::of(from),
            target_dtype: DTypeCode::of(to),
            divisor,
            reciprocal: reciprocal(divisor),
            unused: 0,
            dim: Divisor::new(dim.max(1))?,
            head_stride,
            dim_stride,
            lead_strides,
            lead_shape,
        })
    }

    /// Returns whether values are stored in words of 16 bytes.
    pub(super) fn is_wide(&self) -> bool {
        self.way == StoreMethod::Words && self.size == int32(WIDEST)
    }

    /// Returns whether values are rows of runs of 16-bit floats that become 8-bit floats.
    pub(super) fn is_narrowed(&self) -> bool {
        let is_one_head = widen(self.dim.by()) == widen(self.units) * RUN;
        self.way == StoreMethod::Runs && is_one_head && self.size == 2 && self.target_size == 1
    }
}

/// Returns 1 / `divisor` where `divide` of `convert.cuh` may use it, otherwise 0.
fn reciprocal(divisor: f32) -> f32 {
    let [least, most] = [-60, 60].map(|power| f32::powi(2.0, power));
    if (least..=most).contains(&divisor) { 1.0 / divisor } else { 0.0 }
}

/// Returns the required alignment of a run of elements.
fn run_alignment(dtype: DType) -> usize {
    (dtype.size() * RUN).min(WIDEST)
}

impl PageTarget {
    pub(super) fn new(kind: &KindCopy<'_>) -> Self {
        Self {
            base: kind.target.at(0, 0),
            step: signed(kind.target.runs.layer_step),
            stride: signed(kind.target.runs.unit_step),
            source_stride: signed(kind.source.runs.unit_step),
        }
    }
}

impl GatherPart {
    /// Returns the parameters to copy from `buffer` to `out`, which is contiguous with rows of the same size.
    pub(super) fn new(buffer: &RowBuffer, out: &BorrowedTensor<'_>) -> Result<Self> {
        let (source, target) = (buffer.row(0), out.address().as_ptr());
        let word = word_of([source.addr(), target.addr(), buffer.row_bytes()]);
        let words = buffer.row_bytes() / word.bytes();
        Ok(Self {
            source: source.cast_const(),
            target,
            row_bytes: signed(buffer.row_bytes()),
            split: Split::new(words, WORDS_PER_LANE)?,
            words: units(words)?,
            word: word.into(),
        })
    }
}
