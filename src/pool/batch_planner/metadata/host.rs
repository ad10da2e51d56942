//! Writing a step in host memory: the table and the fields.

use crate::base::bounded::narrow;
use crate::base::{Id, PADDING, Page, RequestRow, Result, try_with_capacity, widen};
use crate::index::{Growth, PageList, Requests, Runs};
use crate::memory::RegionWriter;
use crate::pool::batch_planner::Field;
use crate::pool::req_to_token_pool::RequestTable;

use super::{GrownBatch, PlanMetadata};

/// Slots that are copied to the table at a time.
const PART: usize = 4096;

impl PlanMetadata {
    /// Writes the table and the fields in host memory.
    pub(super) fn write_on_host(&mut self, batch: GrownBatch<'_>, table: &mut RequestTable) -> Result<()> {
        let GrownBatch { requests, growths, padded_size } = batch;
        self.small_fields.write(&mut self.fields, &self.layout)?;
        for (batch_index, growth) in growths.iter().enumerate() {
            self.write_new_slots(requests, batch_index, *growth, table)?;
            let pages = requests.pages(growth.row);
            self.write_pages(batch_index, self.valid_entries(batch_index, growth.row, table), pages)?;
        }
        for batch_index in growths.len()..padded_size {
            let count = self.small_fields.kv_pages(batch_index);
            let mut padding = try_with_capacity(count)?;
            padding.resize(count, Page::new(PADDING));
            self.write_pages(batch_index, 0, &PageList::from(padding))?;
        }
        self.record_block_table(batch, table);
        Ok(())
    }

    /// Writes the new slots of a request to the table.
    pub(super) fn write_new_slots(
        &self,
        requests: &Requests,
        batch_index: usize,
        growth: Growth,
        table: &mut RequestTable,
    ) -> Result<()> {
        let Growth { row, start, prefix, .. } = growth;
        if start < prefix {
            write_slots_between(requests, row, start, prefix, table)?;
        }
        table.put(row, widen(prefix), self.small_fields.new_slots(batch_index))
    }

    /// Writes the pages of the request at `batch_index`, of which the block table already has the first
    /// `valid`.
    fn write_pages(&mut self, batch_index: usize, valid: usize, pages: &PageList) -> Result<()> {
        let size = size_of::<i32>();
        let fields = &mut self.fields;
        let mut write = |begin: usize, from: usize| match pages.unshared() {
            Some(pages) => fields.write(begin, &pages[from..]),
            None => write_runs(fields, begin, pages.runs(from..pages.len())),
        };
        if self.layout.has(Field::KvIndices) {
            let begin = self.layout.offset(Field::KvIndices) + self.small_fields.kv_begin(batch_index) * size;
            write(begin, 0)?;
        }
        if self.layout.has(Field::BlockTable) {
            let line = self.layout.line(batch_index);
            write(line + valid * size, valid)?;
            let stale = self.block_table.used(batch_index).saturating_sub(pages.len());
            self.fields.fill(line + pages.len() * size, stale * size, 0)?;
        }
        Ok(())
    }

    /// Returns the number of entries of line `batch_index` of the block table that hold pages of the request.
    pub(super) fn valid_entries(&self, batch_index: usize, row: RequestRow, table: &RequestTable) -> usize {
        self.block_table.valid(batch_index, row, table.rows().generation(row))
    }

    /// Records that the pages of a batch were written to the block table.
    pub(super) fn record_block_table(&mut self, batch: GrownBatch<'_>, table: &RequestTable) {
        let GrownBatch { requests, growths, padded_size } = batch;
        for (batch_index, &Growth { row, .. }) in growths.iter().enumerate() {
            let count = requests.pages(row).len();
            self.block_table.set_request(batch_index, row, table.rows().generation(row), count);
        }
        for batch_index in growths.len()..padded_size {
            self.block_table.set_padding(batch_index, self.small_fields.kv_pages(batch_index));
        }
    }
}

/// Writes the slots of positions `from..to` of a request to the table.
fn write_slots_between(
    requests: &Requests,
    row: RequestRow,
    from: u32,
    to: u32,
    table: &mut RequestTable,
) -> Result<()> {
    if requests.page_size().slots() == 1 {
        let mut at = widen(from);
        return requests.pages(row).runs(at..widen(to)).try_for_each(|run| {
            table.put_pages(row, at, run)?;
            at += run.len();
            Ok(())
        });
    }
    // Written in parts that fit in the first-level cache.
    let mut slots = try_with_capacity(PART.min(widen(to - from)))?;
    for at in (from..to).step_by(PART) {
        slots.clear();
        requests.slots(row, at, to.min(at + narrow(PART)), &mut slots);
        table.put(row, widen(at), &slots)?;
    }
    Ok(())
}

#[cold]
fn write_runs(to: &mut RegionWriter, mut begin: usize, runs: Runs<'_>) -> Result<()> {
    for run in runs {
        to.write(begin, run)?;
        begin += size_of_val(run);
    }
    Ok(())
}
