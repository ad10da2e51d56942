//! The launch that writes the page tables and metadata of a step in every group of a layout.

use crate::base::Result;
use crate::base::bounded::int32;
use crate::memory::{ALIGNMENT, Region, Stream};

use super::Launcher;
use super::grid::ragged_grid;
use super::numbers::Arrays;
use super::params::UnitPlanParams;

/// A group of a step: `UnitGroup` of `params.cuh`, which documents the fields. Places are byte offsets into a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnitGroup {
    pub table: usize,
    pub width: u32,
    pub unit_tokens: u32,
    pub stride: u32,
    /// `state_indices` of a group of states.
    pub out_cache_loc: usize,
    /// `None` for a group of states, as the next ones.
    pub slot_mapping: Option<usize>,
    pub kv_indptr: Option<usize>,
    pub kv_last_page_len: Option<usize>,
    pub kv_indices: Option<usize>,
    pub block_table: Option<usize>,
    pub kv_len: i32,
}

/// The numbers of a group: `UnitGroup` of `params.cuh`.
pub(crate) const UNIT_GROUP_NUMBERS: usize = 11;

impl UnitGroup {
    /// Appends the numbers that the device reads, [`UNIT_GROUP_NUMBERS`] of them.
    pub(crate) fn put(self, to: &mut Vec<i32>) {
        /// What places are multiples of on the device.
        const UNIT: usize = 256;
        const { assert!(ALIGNMENT.is_multiple_of(UNIT)) };
        let place = |bytes: usize| int32(bytes / UNIT);
        let some = |bytes: Option<usize>| bytes.map_or(-1, place);
        let numbers: [i32; UNIT_GROUP_NUMBERS] = [
            place(self.table),
            self.width.cast_signed(),
            self.unit_tokens.cast_signed(),
            self.stride.cast_signed(),
            place(self.out_cache_loc),
            some(self.slot_mapping),
            some(self.kv_indptr),
            some(self.kv_last_page_len),
            some(self.kv_indices),
            some(self.block_table),
            self.kv_len,
        ];
        to.extend(numbers);
    }
}

/// The numbers of a request: `UnitRequest` of `params.cuh`.
pub(crate) const UNIT_REQUEST_NUMBERS: usize = 4;

/// The numbers of a request in a group: `UnitSpan` of `params.cuh`.
pub(crate) const UNIT_SPAN_NUMBERS: usize = 9;

/// A step, planned on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnitPlanBatch<'a> {
    /// The memory that all arrays are in.
    pub region: &'a Region,
    /// Byte offsets of `positions`, `req_pool_indices`, `seq_lens` and `qo_indptr`.
    pub common: [usize; 4],
    /// The groups: [`UnitGroup::put`].
    pub groups: &'a [i32],
    /// The requests, followed by those that pad a batch of fixed size.
    pub requests: &'a [i32],
    /// The requests in each group, group by group.
    pub spans: &'a [i32],
    /// The units that the device does not have yet.
    pub units: &'a [i32],
    /// The number of requests without padding.
    pub batch: usize,
    /// The number of new tokens.
    pub tokens: usize,
    /// The most positions of a request that are written.
    pub longest: usize,
}

impl UnitPlanBatch<'_> {
    /// Returns the largest number of bytes that a batch sends to the device, including room for alignment.
    #[must_use]
    pub(crate) const fn bytes(groups: usize, requests: usize, units: usize) -> usize {
        const SPARE: usize = 128;
        let each = UNIT_REQUEST_NUMBERS + groups * UNIT_SPAN_NUMBERS;
        (groups * UNIT_GROUP_NUMBERS + requests * each + units) * size_of::<i32>() + SPARE
    }
}

impl Launcher {
    /// Writes the new units of a batch to the page tables and all arrays of its plan, in one launch on `stream`, which
    /// the caller has checked not to be captured. A batch too large for the parameters that the driver accepts is
    /// copied first.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for more numbers than can be transferred at once,
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails.
    pub(crate) fn unit_plan(&self, batch: &UnitPlanBatch<'_>, stream: Stream) -> Result<()> {
        let UnitPlanBatch { region, common, groups, requests, spans, units, .. } = *batch;
        let pairs = spans.len() / UNIT_SPAN_NUMBERS;
        // The ends of the offsets are written even without requests.
        let grid = ragged_grid(batch.longest, pairs)?.map(|blocks| blocks.max(1));
        let at = |offset: usize| region.at(offset, 0).map(std::ptr::NonNull::as_ptr);
        let arrays = [groups, requests, spans, units];
        let params = |arrays: Arrays<'_>| -> Result<UnitPlanParams> {
            let [positions, req_pool_indices, seq_lens, qo_indptr] = common;
            Ok(UnitPlanParams {
                groups: arrays.address(0),
                requests: arrays.address(1),
                spans: arrays.address(2),
                units: arrays.address(3),
                base: at(0)?,
                positions: at(positions)?.cast(),
                req_pool_indices: at(req_pool_indices)?.cast(),
                seq_lens: at(seq_lens)?.cast(),
                qo_indptr: at(qo_indptr)?.cast(),
                groups_count: int32(groups.len() / UNIT_GROUP_NUMBERS),
                batch: int32(batch.batch),
                padded_batch: int32(requests.len() / UNIT_REQUEST_NUMBERS),
                tokens: int32(batch.tokens),
            })
        };
        let long = self.kernels.long_plans.map(|kernels| kernels.unit_plan);
        self.launch_plan(self.kernels.unit_plan, long, grid, &arrays, stream, params)
    }
}
