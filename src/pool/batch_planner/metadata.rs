//! The metadata of a plan: the arrays that attention kernels read, and the request table's new slots.

mod device;
mod fields;
mod host;
mod small_fields;

use std::sync::Arc;

use crate::base::bounded::narrow;
use crate::base::{IndexVec, RequestRow, Result, try_with_capacity, widen};
use crate::index::{Growth, Requests, SlotAllocator};
use crate::kernels::{Executor, IndexSpaces};
use crate::memory::{Backend, Event, Host, Region, RegionWriter, Stream};
use crate::pool::req_to_token_pool::RequestTable;

use self::small_fields::SmallFields;
use super::PlannerConfig;
use super::plan::PlanLayout;
use crate::pool::block_table::BlockTable;

/// A batch whose requests have grown.
#[derive(Clone, Copy, Debug)]
pub(super) struct GrownBatch<'a> {
    /// All requests of the planner.
    pub(super) requests: &'a Requests,
    /// The growth of each request of the batch.
    pub(super) growths: &'a [Growth],
    /// The number of requests, including padding.
    pub(super) padded_size: usize,
}

/// The version of the metadata that was written for a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanVersion {
    /// The number of the plan.
    pub(super) number: usize,
    /// The count of changes of the pages of requests.
    pub(super) changes: u64,
    /// The number of pages of the batch, including padding.
    pub(super) kv_len: usize,
}

/// The sizes of the pools of a planner.
#[derive(Clone, Copy, Debug)]
pub(super) struct PoolSizes {
    page_size: usize,
    pages: usize,
    table_rows: usize,
    max_context_len: usize,
    table_spaces: IndexSpaces,
}

impl PoolSizes {
    /// Returns the sizes of pools for requests in `table` that take their slots from `slots`.
    pub(super) fn of(slots: &SlotAllocator, table: &RequestTable) -> Self {
        Self {
            page_size: slots.page_size(),
            pages: slots.pages().capacity(),
            table_rows: table.table_rows(),
            max_context_len: table.config().max_context_len,
            table_spaces: table.spaces(),
        }
    }
}

/// The memory of the metadata, and its contents.
#[derive(Debug)]
pub(super) struct PlanMetadata {
    layout: PlanLayout,
    fields: RegionWriter,
    /// Host copies of the fields that do not grow with the context, for fields on a device.
    host_fields: Option<RegionWriter>,
    executor: Executor,
    /// Maximum number of pages sent to a device at once.
    max_pages: usize,
    /// The contents of the block table, so that a step writes only new entries.
    block_table: BlockTable,
    small_fields: SmallFields,
    plans: usize,
    /// Counts changes of the pages of requests.
    changes: u64,
}

impl PlanMetadata {
    /// Creates metadata for pools of these sizes, with memory from `backend`, for which it may wait.
    pub(super) fn new(config: &PlannerConfig, backend: &Arc<dyn Backend>, pools: PoolSizes) -> Result<Self> {
        let width = pools.max_context_len.div_ceil(pools.page_size);
        let layout = PlanLayout::new(*config, width)?;
        let fields = RegionWriter::new(Region::new(Arc::clone(backend), layout.bytes())?);
        let ring_bytes = layout.ring_bytes(pools.pages);
        let executor = Executor::new(fields.region(), 0, pools.table_spaces, ring_bytes)?;
        let host_fields = match &executor {
            Executor::Host(_) => None,
            Executor::Device(_) => {
                Some(RegionWriter::new(Region::new(Arc::new(Host), layout.small_bytes())?))
            }
        };
        Ok(Self {
            layout,
            fields,
            host_fields,
            executor,
            max_pages: layout.max_pages(pools.pages),
            block_table: BlockTable::new(config.max_batch_size, pools.table_rows)?,
            small_fields: SmallFields::default(),
            plans: 0,
            changes: 0,
        })
    }

    pub(super) const fn config(&self) -> PlannerConfig {
        self.layout.config()
    }

    /// Returns the number of bytes of the fields.
    pub(super) fn mem_bytes(&self) -> usize {
        self.fields.region().bytes()
    }

    /// Returns the number of plans made so far.
    pub(super) const fn plans(&self) -> usize {
        self.plans
    }

    /// Returns an event to wait for before more numbers are sent to the device, if it is far
    /// behind.
    pub(super) fn backpressure_event(&self, numbers: usize) -> Option<Arc<Event>> {
        self.executor.backpressure_event(numbers)
    }

    /// Writes the table and the fields for a batch, whose padding requests have `padding_tokens` new tokens
    /// each. Earlier plans are stale afterwards, even after a failure.
    ///
    /// # Errors
    /// The error of the backend, if a part of it could not be written.
    pub(super) fn write(
        &mut self,
        batch: GrownBatch<'_>,
        padding_tokens: usize,
        table: &mut RequestTable,
        stream: Stream,
    ) -> Result<PlanVersion> {
        let filled = self.small_fields.fill(batch, narrow(padding_tokens));
        let outcome = filled.and_then(|()| match &self.executor {
            Executor::Host(_) => self.write_on_host(batch, table),
            Executor::Device(_) => self.write_on_device(batch, table, stream),
        });
        self.changes += 1;
        self.plans += 1;
        if let Err(failure) = outcome {
            // A part may have been written.
            self.block_table.invalidate(self.layout.width());
            return Err(failure);
        }
        let kv_len = self.small_fields.kv_begin(batch.padded_size);
        Ok(PlanVersion { number: self.plans, changes: self.changes, kv_len })
    }

    /// Records that the pages of some requests have changed.
    pub(super) const fn record_change(&mut self) {
        self.changes += 1;
    }

    /// Records that a request has kept only the first `pages` of its pages.
    pub(super) fn truncate(&mut self, row: RequestRow, pages: usize) {
        self.block_table.truncate(row, pages);
    }
}

/// Returns the slots of positions `from..to` of a request.
pub(super) fn slots_of(requests: &Requests, row: RequestRow, from: u32, to: u32) -> Result<IndexVec> {
    let mut slots = try_with_capacity(widen(to - from))?;
    requests.slots(row, from, to, &mut slots);
    Ok(IndexVec::I32(slots))
}
