//! Writing a step on a GPU.

use std::ops::Range;

use crate::base::bounded::int32;
use crate::base::{Id, PADDING, Result, try_with_capacity, widen};
use crate::index::{Growth, PageList, PageSize};
use crate::kernels::{Executor, Indices, PlanBatch, PlanFields, PlanRequest, PlanRequests};
use crate::memory::Stream;
use crate::pool::TableIndex;
use crate::pool::batch_planner::Field;
use crate::pool::req_to_token_pool::RequestTable;

use super::host::write_earlier_slots;
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
        let mut requests = PlanRequests::new(padded_size)?;
        let mut pages: Vec<i32> = try_with_capacity(sent + of_padding)?;
        let begins = self.small_fields.qo_indptr.iter().zip(&self.small_fields.kv_indptr);
        let has_lines = self.layout.has(Field::BlockTable);
        let mut lacks_earlier = false;
        for (((batch_index, &growth), (&qo_begin, &kv_begin)), new_slots) in
            growths.iter().enumerate().zip(begins).zip(self.small_fields.new_slots_of_each())
        {
            let Growth { row, prefix, seq, mut start, .. } = growth;
            if sent > self.max_pages && start < prefix {
                // Too many cached slots for one launch.
                let slots = Indices::Host(slots_of(grown, row, 0, prefix)?);
                table.write(&TableIndex::first_columns(row, prefix), &slots, stream)?;
                start = prefix;
            }
            lacks_earlier |= growth.start < prefix;
            let (block_from, block_until) = if has_lines {
                (self.valid_entries(batch_index, row, table), self.block_table.used(batch_index))
            } else {
                (0, 0)
            };
            requests.push(PlanRequest {
                row: row.number().cast_signed(),
                start: start.cast_signed(),
                prefix: prefix.cast_signed(),
                seq: seq.cast_signed(),
                qo_begin,
                kv_begin,
                page_begin: int32(pages.len()),
                block_from: int32(block_from),
                block_until: int32(block_until),
            });
            let range = sent_pages(Growth { start, ..growth }, size);
            match new_slots.last() {
                // As in most decode steps: the only page is that of the new slots.
                Some(slot) if range.len() == 1 => pages.push(size.page(slot.cast_unsigned()).cast_signed()),
                _ => put_pages(&mut pages, grown.pages(row), range),
            }
        }
        for batch_index in growths.len()..padded_size {
            requests.push(PlanRequest {
                seq: self.small_fields.seq_lens[batch_index],
                qo_begin: self.small_fields.qo_indptr[batch_index],
                kv_begin: self.small_fields.kv_indptr[batch_index],
                page_begin: int32(pages.len()),
                block_until: int32(self.block_table.used(batch_index)),
                ..PlanRequest::default()
            });
            pages.resize(pages.len() + self.small_fields.kv_pages(batch_index), PADDING.cast_signed());
        }
        let host_fields = self.host_fields.as_mut().unwrap_or(&mut self.fields);
        self.small_fields.write(host_fields, &self.layout)?;
        let planned = PlanBatch {
            requests: &requests,
            batch: growths.len(),
            pages: &pages,
            page_size: size.slots(),
            width: self.layout.width(),
            tokens: self.small_fields.out_cache_loc.len(),
            kv_len: self.small_fields.kv_begin(padded_size),
        };
        let Executor::Device(launcher) = &self.executor else { return Ok(()) };
        let outcome = launcher.plan(&table.table()?, &self.plan_fields(), &planned, stream);
        if outcome.is_err() {
            for growth in growths {
                table.record_failed_write(growth.row, widen(growth.seq));
            }
            return outcome;
        }
        if lacks_earlier {
            growths.iter().try_for_each(|growth| write_earlier_slots(grown, growth, table))?;
        }
        let new_slots = self.small_fields.new_slots_of_each();
        table.record_launched(
            growths
                .iter()
                .zip(new_slots)
                .map(|(growth, new_slots)| (growth.row, widen(growth.prefix), new_slots)),
        );
        if has_lines {
            for (batch_index, growth) in growths.iter().enumerate() {
                self.record_line(batch_index, growth.row, grown, table);
            }
            for batch_index in growths.len()..padded_size {
                self.block_table.set_padding(batch_index, self.small_fields.kv_pages(batch_index));
            }
        }
        Ok(())
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

/// Appends some of the pages of a request.
#[inline]
fn put_pages(to: &mut Vec<i32>, pages: &PageList, range: Range<usize>) {
    for run in pages.runs(range) {
        to.extend(run.iter().map(|page| page.number().cast_signed()));
    }
}

/// Returns the pages of a request that are sent to the device.
fn sent_pages(growth: Growth, page_size: PageSize) -> Range<usize> {
    widen(page_size.page(growth.start))..widen(page_size.pages(growth.seq))
}
