//! The launch that writes the tables and metadata of a step.

use std::ptr::NonNull;

use crate::base::bounded::{int32, signed};
use crate::base::{Result, try_with_capacity, widen};
use crate::kernels::table::Table;
use crate::memory::{Region, Stream};

use super::Launcher;
use super::grid::ragged_grid;
use super::kernels::{Kernel, LongKernel};
use super::numbers::{Arrays, LONG_PARAMS, LONGEST_PARAMS, PARAMS, WithList};
use super::params::PlanParams;

/// The fields of a plan on a device, as byte offsets into a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanFields<'a> {
    /// The device memory that the offsets are in.
    pub region: &'a Region,
    /// int32, one per new token.
    pub out_cache_loc: usize,
    /// int32, one per new token.
    pub positions: usize,
    /// int64, one per new token.
    pub slot_mapping: usize,
    /// int32, one per request.
    pub req_pool_indices: usize,
    /// int32, one per request.
    pub seq_lens: usize,
    /// int32, one per request plus one.
    pub qo_indptr: usize,
    /// int32, one per request plus one.
    pub kv_indptr: usize,
    /// int32, one per request.
    pub kv_last_page_len: usize,
    /// int32, one per page of each request; `None` to leave it out.
    pub kv_indices: Option<usize>,
    /// int32, `width` per request; `None` to leave it out.
    pub block_table: Option<usize>,
}

/// One request of a plan: `PlanRequest` of `params.cuh`, which documents the fields.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PlanRequest {
    pub row: i32,
    pub start: i32,
    pub prefix: i32,
    pub seq: i32,
    pub qo_begin: i32,
    pub kv_begin: i32,
    pub page_begin: i32,
    pub block_from: i32,
    pub block_until: i32,
}

/// The number of int32 values in a [`PlanRequest`].
const REQUEST_NUMBERS: usize = 9;

impl PlanRequest {
    const fn numbers(self) -> [i32; REQUEST_NUMBERS] {
        let Self { row, start, prefix, seq, qo_begin, kv_begin, page_begin, block_from, block_until } = self;
        [row, start, prefix, seq, qo_begin, kv_begin, page_begin, block_from, block_until]
    }

    /// Returns the number of threads that it keeps busy.
    fn work(self) -> usize {
        widen(self.seq.max(self.block_until).cast_unsigned())
    }
}

/// The requests of a plan as the device reads them.
#[derive(Debug)]
pub(crate) struct PlanRequests {
    numbers: Vec<[i32; REQUEST_NUMBERS]>,
    /// The most threads that one of them keeps busy.
    longest: usize,
}

impl PlanRequests {
    /// Makes room for `count` requests.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has none.
    pub(crate) fn new(count: usize) -> Result<Self> {
        Ok(Self { numbers: try_with_capacity(count)?, longest: 0 })
    }

    /// Appends a request.
    #[inline]
    pub(crate) fn push(&mut self, request: PlanRequest) {
        self.longest = self.longest.max(request.work());
        self.numbers.push(request.numbers());
    }
}

/// A step, planned on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanBatch<'a> {
    /// The requests, followed by those that pad a batch of fixed size.
    pub requests: &'a PlanRequests,
    /// The number of requests without padding.
    pub batch: usize,
    /// The pages of every request from `start` on, concatenated.
    pub pages: &'a [i32],
    /// The number of slots in a page.
    pub page_size: u32,
    /// The number of entries in a line of the block table.
    pub width: usize,
    /// The number of new tokens.
    pub tokens: usize,
    /// The number of pages of all requests.
    pub kv_len: usize,
}

impl PlanBatch<'_> {
    /// Returns the largest number of bytes that a batch sends to the device, including room for alignment.
    #[must_use]
    pub(crate) fn bytes(requests: usize, pages: usize) -> usize {
        const SPARE: usize = 64;
        (requests * REQUEST_NUMBERS + pages) * size_of::<i32>() + SPARE
    }
}

impl Launcher {
    /// Writes the new slots of a batch to the table and all fields of its plan, in one launch on `stream`,
    /// which the caller has checked not to be captured. A batch too large for the parameters that the driver
    /// accepts is copied first.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for more numbers than can be transferred at
    /// once, [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails.
    pub(crate) fn plan(
        &self,
        table: &Table<'_>,
        fields: &PlanFields<'_>,
        batch: &PlanBatch<'_>,
        stream: Stream,
    ) -> Result<()> {
        let PlanRequests { numbers, longest } = batch.requests;
        let mut grid = ragged_grid(*longest, numbers.len())?;
        // The ends of the offsets are written even without requests.
        grid = grid.map(|blocks| blocks.max(1));
        let at = |offset: usize| fields.region.at(offset, 0).map(NonNull::as_ptr);
        let some = |offset: Option<usize>| offset.map_or(Ok(std::ptr::null_mut()), at);
        let arrays = [numbers.as_flattened(), batch.pages];
        let params = |arrays: Arrays<'_>| -> Result<PlanParams> {
            Ok(PlanParams {
                requests: arrays.address(0),
                pages: arrays.address(1),
                table: table.address(),
                columns: signed(table.columns()),
                out_cache_loc: at(fields.out_cache_loc)?.cast(),
                positions: at(fields.positions)?.cast(),
                slot_mapping: at(fields.slot_mapping)?.cast(),
                req_pool_indices: at(fields.req_pool_indices)?.cast(),
                seq_lens: at(fields.seq_lens)?.cast(),
                qo_indptr: at(fields.qo_indptr)?.cast(),
                kv_indptr: at(fields.kv_indptr)?.cast(),
                kv_last_page_len: at(fields.kv_last_page_len)?.cast(),
                kv_indices: some(fields.kv_indices)?.cast(),
                block_table: some(fields.block_table)?.cast(),
                page_size: batch.page_size.cast_signed(),
                width: int32(batch.width),
                batch: int32(batch.batch),
                padded_batch: int32(numbers.len()),
                tokens: int32(batch.tokens),
                kv_len: int32(batch.kv_len),
            })
        };
        let long = self.kernels.long_plans.map(|kernels| kernels.plan);
        let launched = self.launch_plan(self.kernels.plan, long, grid, &arrays, stream, params);
        table.region().record_stream(stream);
        launched
    }

    /// Works like [`Launcher::launch_with_arrays`], with the shortest parameters that are long enough.
    pub(super) fn launch_plan<P>(
        &self,
        kernel: Kernel<P>,
        long: Option<LongKernel<P>>,
        grid: [u32; 2],
        arrays: &[&[i32]],
        stream: Stream,
        params: impl FnOnce(Arrays<'_>) -> Result<P>,
    ) -> Result<()> {
        match long.filter(|_| !WithList::<P, PARAMS>::fits(arrays)) {
            Some(LongKernel { long, .. }) if WithList::<P, LONG_PARAMS>::fits(arrays) => {
                self.launch_with_list(long, grid, arrays, stream, params(Arrays::Listed)?)
            }
            Some(LongKernel { longest, .. }) if WithList::<P, LONGEST_PARAMS>::fits(arrays) => {
                self.launch_with_list(longest, grid, arrays, stream, params(Arrays::Listed)?)
            }
            _ => self.launch_with_arrays(kernel, grid, arrays, stream, params),
        }
    }
}
