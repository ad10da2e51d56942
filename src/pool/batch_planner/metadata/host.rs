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
        for (growth, new_slots) in growths.iter().zip(self.small_fields.new_slots_of_each()) {
            write_earlier_slots(requests, growth, table)?;
            table.put(growth.row, widen(growth.prefix), new_slots)?;
        }
        let has_lines = self.layout.has(Field::BlockTable);
        for (batch_index, &Growth { row, .. }) in growths.iter().enumerate() {
            let valid = if has_lines { self.valid_entries(batch_index, row, table) } else { 0 };
            self.write_pages(batch_index, valid, requests.pages(row))?;
            if has_lines {
                self.record_line(batch_index, row, requests, table);
            }
        }
        for batch_index in growths.len()..padded_size {
            let count = self.small_fields.kv_pages(batch_index);
            let mut padding = try_with_capacity(count)?;
            padding.resize(count, Page::new(PADDING));
            self.write_pages(batch_index, 0, &PageList::from(padding))?;
            self.block_table.set_padding(batch_index, count);
        }
        Ok(())
    }

    /// Writes the pages of the request at `batch_index`, of which the block table already has the first
    /// `valid`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a decode step calls it for each request")]
    fn write_pages(&mut self, batch_index: usize, valid: usize, pages: &PageList) -> Result<()> {
        let size = size_of::<i32>();
        if self.layout.has(Field::KvIndices) {
            let begin = self.layout.offset(Field::KvIndices) + self.small_fields.kv_begin(batch_index) * size;
            write_list(&mut self.fields, begin, pages, 0)?;
        }
        if self.layout.has(Field::BlockTable) {
            let line = self.layout.line(batch_index);
            write_list(&mut self.fields, line + valid * size, pages, valid)?;
            let stale = self.block_table.used(batch_index).saturating_sub(pages.len());
            if stale > 0 {
                self.fields.fill(line + pages.len() * size, stale * size, 0)?;
            }
        }
        Ok(())
    }

    /// Returns the number of entries of line `batch_index` of the block table that hold pages of the request.
    pub(super) fn valid_entries(&self, batch_index: usize, row: RequestRow, table: &RequestTable) -> usize {
        self.block_table.valid(batch_index, row, table.rows().generation(row))
    }

    /// Records that all pages of a request are in line `batch_index` of the block table.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a decode step calls it for each request")]
    pub(super) fn record_line(
        &mut self,
        batch_index: usize,
        row: RequestRow,
        requests: &Requests,
        table: &RequestTable,
    ) {
        let count = requests.pages(row).len();
        self.block_table.set_request(batch_index, row, table.rows().generation(row), count);
    }
}

/// Writes the slots of a grown request that the table lacks, of positions before the new ones.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a decode step calls it for each request")]
pub(super) fn write_earlier_slots(
    requests: &Requests,
    &Growth { row, start, prefix, .. }: &Growth,
    table: &mut RequestTable,
) -> Result<()> {
    if start < prefix { write_slots_between(requests, row, start, prefix, table) } else { Ok(()) }
}

/// Writes the pages of a request from position `from` on at byte `begin`.
#[inline]
fn write_list(to: &mut RegionWriter, begin: usize, pages: &PageList, from: usize) -> Result<()> {
    match pages.unshared() {
        Some(pages) => to.write(begin, &pages[from..]),
        None => write_runs(to, begin, pages.runs(from..pages.len())),
    }
}

/// Writes the slots of positions `from..to` of a request to the table.
#[cold]
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
