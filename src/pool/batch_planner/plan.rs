//! A planned step: its arrays and their layout in memory.

use std::sync::Arc;

use crate::base::{DType, Device, Result, bytes_of};
use crate::kernels::PlanBatch;
use crate::memory::{ALIGNMENT, Region};
use crate::pool::{AllocatorConfig, Footprint, ReqToTokenConfig, fits_int32};
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
    /// The row of each request in the table.
    ReqPoolIndices,
    /// Tokens of each request, including the new ones.
    SeqLens,
    /// Offsets of the new tokens of each request, ending with their total.
    QoIndptr,
    /// Offsets of the pages of each request in `KvIndices`, ending with their total.
    KvIndptr,
    /// Tokens in the last page of each request.
    KvLastPageLen,
    /// The pages of all requests.
    KvIndices,
    /// The pages of each request in a line of its own, padded with zeros.
    BlockTable,
}

impl Field {
    /// All fields. The sizes of the last two grow with the context.
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

    /// Returns whether the size of the field does not grow with the context.
    pub(super) const fn is_small(self) -> bool {
        !matches!(self, Self::KvIndices | Self::BlockTable)
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
    /// Maximum number of requests in a batch, including padding.
    pub max_batch_size: usize,
    /// Maximum number of new tokens in a batch, including padding.
    pub max_tokens: usize,
    /// Whether to build [`Field::KvIndices`].
    pub kv_indices: bool,
    /// Whether to build [`Field::BlockTable`].
    pub block_table: bool,
}

impl PlannerConfig {
    /// Creates a planner for batches of up to `max_batch_size` requests and `max_tokens` new tokens, which
    /// builds all fields.
    #[must_use]
    pub const fn new(max_batch_size: usize, max_tokens: usize) -> Self {
        Self { max_batch_size, max_tokens, kv_indices: true, block_table: true }
    }

    /// Returns the bytes of a planner on `device` for a table and an allocator.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a `page_size` of 0, and for sizes that do
    /// not fit int32.
    pub fn footprint(
        &self,
        table: &ReqToTokenConfig,
        slots: &AllocatorConfig,
        device: Device,
    ) -> Result<Footprint> {
        let pool_pages = slots.pages()?;
        let layout = PlanLayout::new(*self, table.max_context_len.div_ceil(slots.page_size))?;
        Footprint::new(device, layout.bytes(), layout.ring_bytes(pool_pages))
    }
}

/// A planned step. Its arrays lie in the planner's memory, and the next plan overwrites them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub(super) number: usize,
    /// The planner's count of changes at the time of the plan.
    pub(super) changes: u64,
    /// Number of requests, without padding.
    pub batch_size: usize,
    /// Number of requests, including padding.
    pub padded_batch_size: usize,
    /// Number of new tokens, without padding.
    pub num_tokens: usize,
    /// Number of new tokens, including padding.
    pub padded_num_tokens: usize,
    /// Largest number of new tokens of a request.
    pub max_seqlen_q: usize,
    /// Largest number of tokens of a request.
    pub max_seqlen_k: usize,
    pub(super) kv_len: usize,
}

/// The layout of the fields in a region. Fields whose size grows with the context come last.
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
        fits_int32(&format!("max_tokens {max_tokens}"), Some(max_tokens))?;
        fits_int32(
            &format!("max_batch_size {max_batch_size} with {width} pages a request"),
            max_batch_size.checked_mul(width),
        )?;
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

    /// Returns the maximum number of pages that a step takes.
    const fn new_pages(&self) -> usize {
        self.config.max_tokens + 2 * self.config.max_batch_size
    }

    /// Returns the maximum number of pages sent to a device at once, with an allocator of `pool_pages`.
    pub(super) fn max_pages(&self, pool_pages: usize) -> usize {
        // Cached prefixes are sent once, and are distinct pages of the pool.
        self.new_pages() + (self.config.max_batch_size * self.width).min(pool_pages)
    }

    /// Returns the number of bytes of the ring through which steps are sent to a device, with an allocator of
    /// `pool_pages`.
    pub(super) fn ring_bytes(&self, pool_pages: usize) -> usize {
        /// The host may be this far ahead with steps without prefixes.
        const STEPS_AHEAD: usize = 8;
        let bytes = |pages: usize| PlanBatch::bytes(self.config.max_batch_size, pages);
        (bytes(self.new_pages()) * STEPS_AHEAD).max(bytes(self.max_pages(pool_pages)) * 2)
    }

    pub(super) const fn config(&self) -> PlannerConfig {
        self.config
    }

    pub(super) const fn width(&self) -> usize {
        self.width
    }

    /// Returns the number of bytes of all fields.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the number of bytes of the fields that do not grow with the context.
    pub(super) const fn small_bytes(&self) -> usize {
        self.offsets[Field::KvIndices.at()]
    }

    /// Returns the offset of a field in bytes.
    pub(super) const fn offset(&self, field: Field) -> usize {
        self.offsets[field.at()]
    }

    /// Returns the offset of line `batch_index` of the block table in bytes.
    pub(super) const fn line(&self, batch_index: usize) -> usize {
        self.offset(Field::BlockTable) + batch_index * self.width * size_of::<i32>()
    }

    /// Returns whether the planner builds a field.
    pub(super) const fn has(&self, field: Field) -> bool {
        match field {
            Field::KvIndices => self.config.kv_indices,
            Field::BlockTable => self.config.block_table,
            _ => true,
        }
    }

    /// Returns a field of a plan in `region`, without a copy. `None` if the planner does not build it.
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
