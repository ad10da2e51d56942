//! What a planned step is made of, and where its arrays lie.

use std::sync::Arc;

use crate::base::{DType, PADDING, Result, bytes_of, widen};
use crate::index::{Growth, Requests};
use crate::memory::{ALIGNMENT, Region};
use crate::tensor::TensorView;

/// One array of a [`Plan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// Slots of the new tokens; the padding slot for padding.
    OutCacheLoc,
    /// Positions of the new tokens in their requests.
    Positions,
    /// Slots of the new tokens, int64; -1 for padding.
    SlotMapping,
    /// Rows.
    ReqPoolIndices,
    /// Tokens of each request, the new ones counted.
    SeqLens,
    /// Where the new tokens of each request begin, and their number.
    QoIndptr,
    /// Where the pages of each request begin in `KvIndices`, and their number.
    KvIndptr,
    /// Tokens in the last page of each request.
    KvLastPageLen,
    /// The pages of all requests.
    KvIndices,
    /// The pages of each request in a line of its own, zeros after them.
    BlockTable,
}

impl Field {
    /// All of them. The last two are those whose size grows with the context.
    pub const ALL: [Self; 10] = [
        Self::OutCacheLoc,
        Self::Positions,
        Self::SlotMapping,
        Self::ReqPoolIndices,
        Self::SeqLens,
        Self::QoIndptr,
        Self::KvIndptr,
        Self::KvLastPageLen,
        Self::KvIndices,
        Self::BlockTable,
    ];

    pub(super) const fn at(self) -> usize {
        self as usize
    }

    pub(super) const fn dtype(self) -> DType {
        match self {
            Self::SlotMapping => DType::I64,
            _ => DType::I32,
        }
    }
}

/// Sizes of a [`BatchPlanner`](super::BatchPlanner).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannerConfig {
    /// Requests in a batch, at most, padding counted.
    pub max_batch_size: usize,
    /// New tokens in a batch, at most, padding counted.
    pub max_tokens: usize,
    /// Whether [`Field::KvIndices`] is wanted.
    pub kv_indices: bool,
    /// Whether [`Field::BlockTable`] is wanted.
    pub block_table: bool,
}

/// A step that was planned. Its arrays are the planner's, which the next plan overwrites.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub(super) number: usize,
    /// What had changed when it was made.
    pub(super) changes: u64,
    /// Requests.
    pub batch_size: usize,
    /// Requests with padding.
    pub padded_batch_size: usize,
    /// New tokens.
    pub num_tokens: usize,
    /// New tokens with those of padding.
    pub padded_num_tokens: usize,
    /// New tokens of the request that has most of them.
    pub max_seqlen_q: usize,
    /// Tokens of the longest request.
    pub max_seqlen_k: usize,
    pub(super) kv_len: usize,
}

/// Where each field lies in a region, with those whose size grows with the context behind the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanLayout {
    config: PlannerConfig,
    /// Entries in a line of the block table.
    width: usize,
    offsets: [usize; Field::ALL.len()],
    bytes: usize,
}

impl PlanLayout {
    pub(super) fn new(config: PlannerConfig, width: usize) -> Result<Self> {
        let PlannerConfig { max_batch_size, max_tokens, .. } = config;
        let mut layout = Self { config, width, offsets: [0; Field::ALL.len()], bytes: 0 };
        for field in Field::ALL {
            layout.offsets[field.at()] = layout.bytes;
            let shape: &[usize] = match field {
                Field::OutCacheLoc | Field::Positions | Field::SlotMapping => &[max_tokens],
                Field::ReqPoolIndices | Field::SeqLens | Field::KvLastPageLen => &[max_batch_size],
                Field::QoIndptr | Field::KvIndptr => &[max_batch_size + 1],
                Field::KvIndices => &[usize::from(config.kv_indices), max_batch_size, width],
                Field::BlockTable => &[usize::from(config.block_table), max_batch_size, width],
            };
            layout.bytes += bytes_of("a plan", shape, field.dtype())?.next_multiple_of(ALIGNMENT);
        }
        Ok(layout)
    }

    pub(super) const fn config(&self) -> PlannerConfig {
        self.config
    }

    pub(super) const fn width(&self) -> usize {
        self.width
    }

    /// Bytes of all fields.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of the fields that do not grow with the context.
    pub(super) const fn small_bytes(&self) -> usize {
        self.offsets[Field::KvIndices.at()]
    }

    /// Where a field begins.
    pub(super) const fn offset(&self, field: Field) -> usize {
        self.offsets[field.at()]
    }

    /// Where line `place` of the block table begins.
    pub(super) const fn line(&self, place: usize) -> usize {
        self.offset(Field::BlockTable) + place * self.width * size_of::<i32>()
    }

    /// Whether a field is made.
    pub(super) const fn has(&self, field: Field) -> bool {
        match field {
            Field::KvIndices => self.config.kv_indices,
            Field::BlockTable => self.config.block_table,
            _ => true,
        }
    }

    /// A field of a plan that lies in `region`, without a copy; `None` if it is not made.
    pub(super) fn view(&self, region: &Arc<Region>, plan: &Plan, field: Field) -> Result<Option<TensorView>> {
        if !self.has(field) {
            return Ok(None);
        }
        let (tokens, batch) = (plan.padded_num_tokens, plan.padded_batch_size);
        let line = [batch, self.width];
        let shape: &[usize] = match field {
            Field::OutCacheLoc | Field::Positions | Field::SlotMapping => &[tokens],
            Field::ReqPoolIndices | Field::SeqLens | Field::KvLastPageLen => &[batch],
            Field::QoIndptr | Field::KvIndptr => &[batch + 1],
            Field::KvIndices => &[plan.kv_len],
            Field::BlockTable => &line,
        };
        TensorView::contiguous(Arc::clone(region), self.offset(field), field.dtype(), shape).map(Some)
    }
}

/// The fields of the plan in progress that do not grow with the context. Kept for their capacity.
#[derive(Debug, Default)]
pub(super) struct SmallFields {
    pub(super) out_cache_loc: Vec<i32>,
    pub(super) positions: Vec<i32>,
    /// Tokens before those of padding.
    real_tokens: usize,
    pub(super) req_pool_indices: Vec<i32>,
    pub(super) seq_lens: Vec<i32>,
    pub(super) qo_indptr: Vec<i32>,
    pub(super) kv_indptr: Vec<i32>,
    kv_last_page_len: Vec<i32>,
}

impl SmallFields {
    fn clear(&mut self) {
        let Self { out_cache_loc, positions, req_pool_indices, .. } = self;
        for values in [out_cache_loc, positions, req_pool_indices] {
            values.clear();
        }
        let Self { seq_lens, qo_indptr, kv_indptr, kv_last_page_len, .. } = self;
        for values in [seq_lens, qo_indptr, kv_indptr, kv_last_page_len] {
            values.clear();
        }
    }

    /// Fills in requests that have grown, and behind them padding of `padding` tokens each up to a batch of `padded`.
    pub(super) fn fill(&mut self, batch: &[Growth], padded: usize, padding: u32, requests: &Requests) {
        self.clear();
        let size = requests.page_size();
        let filler = Growth { row: PADDING, seq: padding, ..Growth::default() };
        // One field after the other, each in a loop of known length.
        let all = || batch.iter().copied().chain(std::iter::repeat_n(filler, padded - batch.len()));
        self.req_pool_indices.extend(all().map(|growth| growth.row.cast_signed()));
        self.seq_lens.extend(all().map(|growth| growth.seq.cast_signed()));
        self.kv_last_page_len.extend(all().map(|growth| size.last_page_len(growth.seq).cast_signed()));
        sums(&mut self.qo_indptr, all().map(|growth| growth.seq - growth.prefix));
        sums(&mut self.kv_indptr, all().map(|growth| size.pages(growth.seq)));
        for growth in all() {
            self.positions.extend((growth.prefix..growth.seq).map(u32::cast_signed));
        }
        for growth in batch {
            requests.slots(growth.row, growth.prefix, growth.seq, &mut self.out_cache_loc);
        }
        self.real_tokens = self.out_cache_loc.len();
        self.out_cache_loc.resize(self.positions.len(), PADDING.cast_signed());
    }

    /// Where the pages of the request at `place` begin in the list of all pages; at the end, how many there are.
    pub(super) fn kv_begin(&self, place: usize) -> usize {
        widen(self.kv_indptr[place].cast_unsigned())
    }

    /// Pages of the request at `place`.
    pub(super) fn kv_pages(&self, place: usize) -> usize {
        self.kv_begin(place + 1) - self.kv_begin(place)
    }

    /// Slots of the new tokens of the request at `place`.
    pub(super) fn new_slots(&self, place: usize) -> &[i32] {
        let begin = |place: usize| widen(self.qo_indptr[place].cast_unsigned());
        &self.out_cache_loc[begin(place)..begin(place + 1)]
    }

    /// Writes them to host memory.
    pub(super) fn write(&self, region: &Region, layout: &PlanLayout) -> Result<()> {
        for (field, values) in [
            (Field::OutCacheLoc, &self.out_cache_loc),
            (Field::Positions, &self.positions),
            (Field::ReqPoolIndices, &self.req_pool_indices),
            (Field::SeqLens, &self.seq_lens),
            (Field::QoIndptr, &self.qo_indptr),
            (Field::KvIndptr, &self.kv_indptr),
            (Field::KvLastPageLen, &self.kv_last_page_len),
        ] {
            region.write(layout.offset(field), values)?;
        }
        self.write_slot_mapping(region, layout.offset(Field::SlotMapping))
    }

    /// Writes the slots as int64, in pieces that stay in the cache.
    fn write_slot_mapping(&self, region: &Region, mut offset: usize) -> Result<()> {
        const PIECE: usize = 256;
        let (real, padding) = self.out_cache_loc.split_at(self.real_tokens);
        let mut wide = [0; PIECE];
        for piece in real.chunks(PIECE) {
            let wide = &mut wide[..piece.len()];
            for (wide, &slot) in wide.iter_mut().zip(piece) {
                *wide = i64::from(slot);
            }
            region.write(offset, wide)?;
            offset += size_of_val(wide);
        }
        region.write(offset, &vec![-1i64; padding.len()])
    }
}

/// 0, and the sum of the counts up to each.
fn sums(to: &mut Vec<i32>, counts: impl Iterator<Item = u32>) {
    let mut sum = 0;
    to.push(sum);
    to.extend(counts.map(|count| {
        sum += count.cast_signed();
        sum
    }));
}
