//! Writing a step on a GPU.

use crate::base::bounded::int32;
use crate::base::{Id, Result, try_with_capacity, widen};
use crate::index::{Growth, PageSize};
use crate::kernels::{Executor, Indices, PlanBatch, PlanFields, PlanRequest};
use crate::memory::Stream;
use crate::pool::TableIndex;
use crate::pool::batch_planner::Field;
use crate::pool::req_to_token_pool::RequestTable;

use super::{GrownBatch, PlanMetadata, slots_of};

impl PlanMetadata {
    /// Writes the table and the fields on the device: one launch, preceded by a copy if there are many
    /// numbers.
    pub(super) fn write_on_device(
        &mut self,
        batch: GrownBatch<'_>,
        table: &mut RequestTable,
        stream: Stream,
    ) -> Result<()> {
        let GrownBatch { requests: grown, growths, padded_size } = batch;
        let size = grown.page_size();
        let sent: usize = growths.iter().map(|growth| sent_pages(*growth, size).len()).sum();
        let of_padding: usize =
            (growths.len()..padded_size).map(|batch_index| self.small_fields.kv_pages(batch_index)).sum();
        let mut requests = try_with_capacity(padded_size)?;
        let mut pages: Vec<i32> = try_with_capacity(sent + of_padding)?;
        for batch_index in 0..padded_size {
            let mut growth = growths.get(batch_index).copied().unwrap_or(Growth::padding(0));
            let Growth { row, start, prefix, .. } = growth;
            if sent > self.max_pages && start < prefix {
                // Too many cached slots for one launch.
                let slots = Indices::Host(slots_of(grown, row, 0, prefix)?);
                table.write(&TableIndex::first_columns(row, prefix), &slots, stream)?;
                growth.start = prefix;
            }
            let is_padding = batch_index >= growths.len();
            requests.push(PlanRequest {
                row: row.number().cast_signed(),
                start: growth.start.cast_signed(),
                prefix: prefix.cast_signed(),
                seq: self.small_fields.seq_lens[batch_index],
                qo_begin: self.small_fields.qo_indptr[batch_index],
                kv_begin: self.small_fields.kv_indptr[batch_index],
                page_begin: int32(pages.len()),
                block_from: if is_padding { 0 } else { int32(self.valid_entries(batch_index, row, table)) },
                block_until: int32(self.block_table.used(batch_index)),
            });
            if is_padding {
                pages.resize(pages.len() + self.small_fields.kv_pages(batch_index), 0);
            } else {
                let sent = grown.pages(row).runs(sent_pages(growth, size)).flatten();
                pages.extend(sent.map(|page| page.number().cast_signed()));
            }
        }
        let host_fields = self.host_fields.as_mut().unwrap_or(&mut self.fields);
        self.small_fields.write(host_fields, &self.layout)?;
        let planned = PlanBatch {
            requests: &requests,
            batch: growths.len(),
            pages: &pages,
            page_size: size.slots(),
            width: self.layout.width(),
            tokens: self.small_fields.positions.len(),
            kv_len: self.small_fields.kv_begin(padded_size),
        };
        let Executor::Device(launcher) = &self.executor else { return Ok(()) };
        let outcome = launcher.plan(&table.table()?, &self.plan_fields(), &planned, stream);
        for (batch_index, growth) in growths.iter().enumerate() {
            match &outcome {
                Ok(()) => self.write_new_slots(grown, batch_index, *growth, table)?,
                Err(_) => table.record_failed_write(growth.row, widen(growth.seq)),
            }
        }
        self.record_block_table(batch, table);
        outcome
    }

    /// Returns the positions of the fields, for the kernel.
    fn plan_fields(&self) -> PlanFields<'_> {
        let offset = |field: Field| self.layout.offset(field);
        let wanted = |field: Field| self.layout.has(field).then(|| offset(field));
        PlanFields {
            region: self.fields.region(),
            out_cache_loc: offset(Field::OutCacheLoc),
            positions: offset(Field::Positions),
            slot_mapping: offset(Field::SlotMapping),
            req_pool_indices: offset(Field::ReqPoolIndices),
            seq_lens: offset(Field::SeqLens),
            qo_indptr: offset(Field::QoIndptr),
            kv_indptr: offset(Field::KvIndptr),
            kv_last_page_len: offset(Field::KvLastPageLen),
            kv_indices: wanted(Field::KvIndices),
            block_table: wanted(Field::BlockTable),
        }
    }
}

/// Returns the pages of a request that are sent to the device.
fn sent_pages(growth: Growth, page_size: PageSize) -> std::ops::Range<usize> {
    widen(page_size.page(growth.start))..widen(page_size.pages(growth.seq))
}
