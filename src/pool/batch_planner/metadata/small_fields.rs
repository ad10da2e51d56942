//! The fields of a plan that do not grow with the context.

use std::iter::repeat_n;

use crate::base::{Id, PADDING, Result, try_reserve, widen};
use crate::index::Growth;
use crate::memory::RegionWriter;
use crate::pool::batch_planner::Field;
use crate::pool::batch_planner::plan::PlanLayout;

use super::GrownBatch;

/// The fields of the current plan that do not grow with the context. Kept for their capacity. What nobody
/// has asked for yet is not written to host memory.
#[derive(Debug, Default)]
pub(super) struct SmallFields {
    pub(super) out_cache_loc: Vec<i32>,
    /// Tokens before those of padding.
    real_tokens: usize,
    pub(super) req_pool_indices: Vec<i32>,
    pub(super) seq_lens: Vec<i32>,
    pub(super) qo_indptr: Vec<i32>,
    pub(super) kv_indptr: Vec<i32>,
    kv_last_page_len: Vec<i32>,
    /// The fields that each plan writes to host memory.
    asked: Vec<Field>,
}

impl SmallFields {
    fn clear(&mut self) {
        let Self { out_cache_loc, req_pool_indices, seq_lens, .. } = self;
        for values in [out_cache_loc, req_pool_indices, seq_lens] {
            values.clear();
        }
        let Self { qo_indptr, kv_indptr, kv_last_page_len, .. } = self;
        for values in [qo_indptr, kv_indptr, kv_last_page_len] {
            values.clear();
        }
    }

    /// Fills in the grown requests, followed by padding requests of `padding` tokens each, up to a batch
    /// of `padded_size`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate them.
    pub(super) fn fill(&mut self, batch: GrownBatch<'_>, padding: u32) -> Result<()> {
        let GrownBatch { requests, growths, padded_size } = batch;
        self.clear();
        let tokens = growths.iter().map(|growth| growth.new_tokens()).sum::<usize>();
        let missing = padded_size - growths.len();
        let of_padding = missing * widen(padding);
        self.reserve(padded_size, tokens + of_padding)?;
        let size = requests.page_size();
        // One field after the other, each in loops of known length.
        let padded = PaddedBatch { growths, filler: Growth::padding(padding), missing };
        padded.put(&mut self.req_pool_indices, |growth| growth.row.number());
        padded.put(&mut self.seq_lens, |growth| growth.seq);
        padded.put(&mut self.kv_last_page_len, |growth| size.last_page_len(growth.seq));
        padded.put_sums(&mut self.qo_indptr, |growth| growth.seq - growth.prefix);
        padded.put_sums(&mut self.kv_indptr, |growth| size.pages(growth.seq));
        for growth in growths {
            requests.slots(growth.row, growth.prefix, growth.seq, &mut self.out_cache_loc);
        }
        self.real_tokens = self.out_cache_loc.len();
        self.out_cache_loc.resize(self.real_tokens + of_padding, PADDING.cast_signed());
        Ok(())
    }

    /// Makes room for a batch of `requests` requests and `tokens` new tokens.
    fn reserve(&mut self, requests: usize, tokens: usize) -> Result<()> {
        let Self { out_cache_loc, req_pool_indices, .. } = self;
        try_reserve(out_cache_loc, tokens)?;
        try_reserve(req_pool_indices, requests)?;
        let Self { seq_lens, qo_indptr, kv_indptr, kv_last_page_len, .. } = self;
        for values in [seq_lens, qo_indptr, kv_indptr, kv_last_page_len] {
            try_reserve(values, requests + 1)?;
        }
        Ok(())
    }

    /// Returns the offset of the pages of the request at `batch_index` in the list of all pages; for the end
    /// of the batch, their total.
    pub(super) fn kv_begin(&self, batch_index: usize) -> usize {
        widen(self.kv_indptr[batch_index].cast_unsigned())
    }

    /// Returns the number of pages of the request at `batch_index`.
    pub(super) fn kv_pages(&self, batch_index: usize) -> usize {
        self.kv_begin(batch_index + 1) - self.kv_begin(batch_index)
    }

    /// Returns the slots of the new tokens of each request.
    #[inline]
    pub(super) fn new_slots_of_each(&self) -> impl Iterator<Item = &[i32]> {
        let ends =
            self.qo_indptr.windows(2).map(|ends| [ends[0], ends[1]].map(|at| widen(at.cast_unsigned())));
        ends.map(|[begin, end]| &self.out_cache_loc[begin..end])
    }

    /// Writes the fields that were asked for to host memory.
    pub(super) fn write(&self, to: &mut RegionWriter, layout: &PlanLayout) -> Result<()> {
        self.asked.iter().try_for_each(|&field| self.write_field(field, to, layout))
    }

    /// Writes a field to host memory, now and in each later [`SmallFields::write`], unless it is there.
    pub(super) fn ask(&mut self, field: Field, to: &mut RegionWriter, layout: &PlanLayout) -> Result<()> {
        if field.is_small() && !self.asked.contains(&field) {
            self.write_field(field, to, layout)?;
            self.asked.push(field);
        }
        Ok(())
    }

    fn write_field(&self, field: Field, to: &mut RegionWriter, layout: &PlanLayout) -> Result<()> {
        let values = match field {
            Field::OutCacheLoc => &self.out_cache_loc,
            Field::ReqPoolIndices => &self.req_pool_indices,
            Field::SeqLens => &self.seq_lens,
            Field::QoIndptr => &self.qo_indptr,
            Field::KvIndptr => &self.kv_indptr,
            Field::KvLastPageLen => &self.kv_last_page_len,
            Field::Positions => return self.write_positions(to, layout.offset(field)),
            Field::SlotMapping => return self.write_slot_mapping(to, layout.offset(field)),
            Field::KvIndices | Field::BlockTable => return Ok(()),
        };
        to.write(layout.offset(field), values)
    }

    fn write_positions(&self, to: &mut RegionWriter, mut offset: usize) -> Result<()> {
        if self.qo_indptr.windows(2).all(|ends| ends[1] - ends[0] == 1) {
            // As in most decode steps.
            return to.write_each(offset, self.seq_lens.iter().map(|seq| seq - 1));
        }
        for (ends, &seq) in self.qo_indptr.windows(2).zip(&self.seq_lens) {
            let new = ends[1] - ends[0];
            to.write_each(offset, seq - new..seq)?;
            offset += widen(new.cast_unsigned()) * size_of::<i32>();
        }
        Ok(())
    }

    fn write_slot_mapping(&self, to: &mut RegionWriter, offset: usize) -> Result<()> {
        let (real, padding) = self.out_cache_loc.split_at(self.real_tokens);
        to.write_each(offset, real.iter().map(|&slot| i64::from(slot)))?;
        to.write_each(offset + real.len() * size_of::<i64>(), repeat_n(-1_i64, padding.len()))
    }
}

/// The requests of a batch, followed by those that pad it.
#[derive(Clone, Copy)]
struct PaddedBatch<'a> {
    growths: &'a [Growth],
    /// Each request of the padding.
    filler: Growth,
    /// The number of those.
    missing: usize,
}

impl PaddedBatch<'_> {
    /// Appends a number of each request.
    #[inline]
    fn put(&self, to: &mut Vec<i32>, number: impl Fn(&Growth) -> u32) {
        to.extend(self.growths.iter().map(|growth| number(growth).cast_signed()));
        to.extend(repeat_n(number(&self.filler).cast_signed(), self.missing));
    }

    /// Appends 0 and the running sums of a number of each request.
    #[inline]
    fn put_sums(&self, to: &mut Vec<i32>, number: impl Fn(&Growth) -> u32) {
        let mut sum = 0;
        let mut add = |number: u32| {
            sum += number.cast_signed();
            sum
        };
        to.push(0);
        to.extend(self.growths.iter().map(|growth| add(number(growth))));
        to.extend(repeat_n(number(&self.filler), self.missing).map(add));
    }
}
