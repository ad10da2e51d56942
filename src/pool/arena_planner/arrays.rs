//! The arrays of a plan: where they are, and their contents.

use std::sync::Arc;

use crate::base::bounded::{int32, narrow};
use crate::base::{DType, Id, IndexVec, Result, bytes_of, try_reserve, try_with_capacity, widen};
use crate::index::{KeptUnits, UnitGrowth, UnitTables};
use crate::kernels::UnitPlanBatch;
use crate::memory::{ALIGNMENT, Region, RegionWriter};
use crate::pool::block_table::BlockTable;
use crate::pool::fits_int32;
use crate::tensor::TensorView;

use super::ArenaPlannerConfig;
use super::batch::PlannedBatch;
use super::plan_array::PlanArray;

/// The places of a group's arrays, in bytes. A group of states has one array, in the place of the slots.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GroupPlaces {
    /// The units of each row, on a device.
    pub(super) table: usize,
    pub(super) out_cache_loc: usize,
    pub(super) slot_mapping: Option<usize>,
    pub(super) kv_indptr: Option<usize>,
    pub(super) kv_last_page_len: Option<usize>,
    pub(super) kv_indices: Option<usize>,
    pub(super) block_table: Option<usize>,
}

/// The places of all arrays in a region.
#[derive(Debug)]
pub(super) struct ArrayLayout {
    /// Those of [`PlanArray::Positions`] and the next three.
    pub(super) common: [usize; 4],
    pub(super) groups: Vec<GroupPlaces>,
    pub(super) bytes: usize,
}

impl ArrayLayout {
    /// Places the arrays of a planner of `rows` rows one behind the other; on a device, page tables too.
    pub(super) fn new(
        config: &ArenaPlannerConfig,
        tables: &UnitTables,
        rows: usize,
        on_device: bool,
    ) -> Result<Self> {
        let (batch, tokens) = (config.max_batch_size, config.max_tokens);
        fits_int32(&format!("max_tokens {tokens}"), Some(tokens))?;
        let mut bytes = 0;
        let mut place = |shape: &[usize], dtype: DType| {
            let at = bytes;
            bytes += bytes_of("a plan", shape, dtype)?.next_multiple_of(ALIGNMENT);
            Ok(at)
        };
        let common = [
            place(&[tokens], DType::I32)?,
            place(&[batch], DType::I32)?,
            place(&[batch], DType::I32)?,
            place(&[batch + 1], DType::I32)?,
        ];
        let mut groups = try_with_capacity(tables.groups())?;
        for group in 0..tables.groups() {
            let rule = tables.rule(group);
            let width = widen(rule.width());
            fits_int32(
                &format!("{batch} requests of {width} units in group {group}"),
                batch.max(rows).checked_mul(width),
            )?;
            let mut places = GroupPlaces::default();
            if on_device {
                places.table = place(&[rows, width], DType::I32)?;
            }
            if rule.is_state() {
                places.out_cache_loc = place(&[width, batch], DType::I32)?;
            } else {
                places.out_cache_loc = place(&[tokens], DType::I32)?;
                places.slot_mapping = Some(place(&[tokens], DType::I64)?);
                places.kv_indptr = Some(place(&[batch + 1], DType::I32)?);
                places.kv_last_page_len = Some(place(&[batch], DType::I32)?);
                let mut lines = |wanted: bool| wanted.then(|| place(&[batch, width], DType::I32)).transpose();
                places.kv_indices = lines(config.kv_indices)?;
                places.block_table = lines(config.block_table)?;
            }
            groups.push(places);
        }
        Ok(Self { common, groups, bytes })
    }

    /// Returns the place of an array; `None` if the planner does not build it, or the group has none.
    fn place(&self, array: PlanArray) -> Option<usize> {
        let [positions, req_pool_indices, seq_lens, qo_indptr] = self.common;
        match array {
            PlanArray::Positions => Some(positions),
            PlanArray::ReqPoolIndices => Some(req_pool_indices),
            PlanArray::SeqLens => Some(seq_lens),
            PlanArray::QoIndptr => Some(qo_indptr),
            PlanArray::OutCacheLoc(group) => {
                let places = self.groups[group];
                places.slot_mapping.map(|_| places.out_cache_loc)
            }
            PlanArray::SlotMapping(group) => self.groups[group].slot_mapping,
            PlanArray::KvIndptr(group) => self.groups[group].kv_indptr,
            PlanArray::KvLastPageLen(group) => self.groups[group].kv_last_page_len,
            PlanArray::KvIndices(group) => self.groups[group].kv_indices,
            PlanArray::BlockTable(group) => self.groups[group].block_table,
            PlanArray::StateIndices(group) => {
                let places = self.groups[group];
                places.slot_mapping.is_none().then_some(places.out_cache_loc)
            }
        }
    }

    /// Returns the bytes of the ring through which steps are sent to a device.
    pub(super) fn ring_bytes(config: &ArenaPlannerConfig, tables: &UnitTables) -> usize {
        /// The host may be this far ahead with steps without prefixes.
        const STEPS_AHEAD: usize = 8;
        /// Units of cached prefixes that one call sends at most.
        const MOST_UNITS: usize = 1 << 22;
        let rules = || (0..tables.groups()).map(|group| tables.rule(group));
        let batch = config.max_batch_size;
        let new: usize = rules()
            .map(|rule| {
                if rule.is_state() {
                    batch * widen(rule.width())
                } else {
                    config.max_tokens / widen(rule.tokens()) + 2 * batch
                }
            })
            .sum();
        let all: usize = rules().map(|rule| batch * widen(rule.width())).sum();
        let bytes = |units: usize| UnitPlanBatch::bytes(tables.groups(), batch, units);
        (bytes(new) * STEPS_AHEAD).max(bytes(all.min(MOST_UNITS)) * 2)
    }
}

/// The lines of a group's block table.
#[derive(Debug)]
pub(super) struct Lines {
    pub(super) table: BlockTable,
    /// The first entry behind the sinks that is not 0, for lines that hold a request.
    firsts: Vec<u32>,
}

/// What has to change in a line of a block table.
#[derive(Clone, Copy, Debug)]
pub(super) struct LineChange {
    /// Entries before this one hold the units of the request.
    pub(super) from: u32,
    /// Entries of this range that the request has no unit for become 0.
    pub(super) zeros: [u32; 2],
}

/// The memory of a plan's arrays, and what is in it.
#[derive(Debug)]
pub(super) struct PlanArrays {
    pub(super) layout: ArrayLayout,
    pub(super) memory: RegionWriter,
    /// By group; `None` for states, and where there is no block table.
    pub(super) lines: Vec<Option<Lines>>,
    /// The arrays of small size that each plan writes in host memory: what nobody has asked for is not written.
    asked: Vec<PlanArray>,
    /// Kept for its capacity.
    room: Vec<i32>,
}

impl PlanArrays {
    pub(super) fn new(
        layout: ArrayLayout,
        memory: RegionWriter,
        config: &ArenaPlannerConfig,
        rows: usize,
    ) -> Result<Self> {
        let mut lines = try_with_capacity(layout.groups.len())?;
        for places in &layout.groups {
            let batch = config.max_batch_size;
            let made = places.block_table.map(|_| {
                let mut firsts = try_with_capacity(batch)?;
                firsts.resize(batch, 0);
                Ok(Lines { table: BlockTable::new(batch, rows)?, firsts })
            });
            lines.push(made.transpose()?);
        }
        Ok(Self { layout, memory, lines, asked: Vec::new(), room: Vec::new() })
    }

    /// Returns an array of a batch as a view of the memory; `None` if there is none.
    pub(super) fn view(&self, batch: &PlannedBatch, array: PlanArray) -> Result<Option<TensorView>> {
        let Some(offset) = self.layout.place(array) else { return Ok(None) };
        let region = Arc::clone(self.memory.region());
        TensorView::contiguous(region, offset, array.dtype(), &batch.shape(array)).map(Some)
    }

    /// Returns a copy of an array in host memory; `None` if there is none.
    pub(super) fn host_copy(
        &mut self,
        batch: &PlannedBatch,
        tables: &UnitTables,
        array: PlanArray,
    ) -> Result<Option<TensorView>> {
        if self.layout.place(array).is_none() {
            return Ok(None);
        }
        let mut room = std::mem::take(&mut self.room);
        let values = put(batch, tables, array, &mut room).and_then(|()| array_of(array, batch, &room));
        self.room = room;
        let values = values?;
        let region = Arc::new(Region::from_indices(values));
        TensorView::contiguous(region, 0, array.dtype(), &batch.shape(array)).map(Some)
    }

    /// Writes the arrays of a batch in host memory.
    pub(super) fn write(&mut self, batch: &PlannedBatch, tables: &UnitTables) -> Result<()> {
        for at in 0..self.asked.len() {
            self.write_array(batch, tables, self.asked[at])?;
        }
        for group in 0..tables.groups() {
            if tables.rule(group).is_state() {
                self.write_array(batch, tables, PlanArray::StateIndices(group))?;
                continue;
            }
            self.write_array(batch, tables, PlanArray::OutCacheLoc(group))?;
            self.write_kv_indices(batch, tables, group)?;
            self.write_lines(batch, tables, group)?;
        }
        Ok(())
    }

    /// Writes an array of small size in host memory, now and with each later plan.
    pub(super) fn ask(&mut self, batch: &PlannedBatch, tables: &UnitTables, array: PlanArray) -> Result<()> {
        let is_always_written = matches!(
            array,
            PlanArray::OutCacheLoc(_)
                | PlanArray::KvIndices(_)
                | PlanArray::BlockTable(_)
                | PlanArray::StateIndices(_)
        );
        if !is_always_written && !self.asked.contains(&array) && self.layout.place(array).is_some() {
            self.write_array(batch, tables, array)?;
            self.asked.push(array);
        }
        Ok(())
    }

    fn write_array(&mut self, batch: &PlannedBatch, tables: &UnitTables, array: PlanArray) -> Result<()> {
        let Some(offset) = self.layout.place(array) else { return Ok(()) };
        if let PlanArray::SlotMapping(group) = array {
            let slots = &batch.slots[group];
            return self.memory.write_each(offset, slots.iter().map(|&slot| mapped(slot)));
        }
        let mut room = std::mem::take(&mut self.room);
        let written = put(batch, tables, array, &mut room).and_then(|()| self.memory.write(offset, &room));
        self.room = room;
        written
    }

    /// Writes the units of all requests, one request after the other.
    fn write_kv_indices(&mut self, batch: &PlannedBatch, tables: &UnitTables, group: usize) -> Result<()> {
        let Some(mut offset) = self.layout.groups[group].kv_indices else { return Ok(()) };
        for (at, growth) in batch.growths.iter().enumerate() {
            let shown = batch.span(group, at).shown;
            if at < batch.real {
                let line = tables.line(group, growth.row);
                let [sinks, run] = shown.runs();
                if !sinks.is_empty() {
                    self.memory.write(offset, &line[sinks.clone()])?;
                    offset += sinks.len() * size_of::<i32>();
                }
                self.memory.write(offset, &line[run.clone()])?;
                offset += run.len() * size_of::<i32>();
            } else {
                let bytes = widen(shown.len()) * size_of::<i32>();
                self.memory.fill(offset, bytes, 0)?;
                offset += bytes;
            }
        }
        Ok(())
    }

    /// Returns what has to change in the line of the request at `at` of a batch; `None` if nothing has.
    pub(super) fn line_change(&self, batch: &PlannedBatch, group: usize, at: usize) -> Option<LineChange> {
        let lines = self.lines[group].as_ref()?;
        let used = narrow(lines.table.used(at));
        if at >= batch.real {
            return (used > 0).then_some(LineChange { from: 0, zeros: [0, used] });
        }
        let kept = batch.span(group, at).kept;
        let from = narrow(lines.table.valid(at, batch.growths[at].row, batch.generations[at]));
        let zero_from = if from > 0 { lines.firsts[at].min(used) } else { 0 };
        // As in most decode steps.
        let is_same = [from, zero_from, used] == [kept.end, kept.first, kept.end];
        (!is_same).then_some(LineChange { from, zeros: [zero_from, used] })
    }

    /// Records that the line of the request at `at` of a batch was written.
    pub(super) fn record_line(&mut self, batch: &PlannedBatch, group: usize, at: usize) {
        let Some(lines) = &mut self.lines[group] else { return };
        if at >= batch.real {
            lines.table.set_padding(at, 0);
            return;
        }
        let kept = batch.span(group, at).kept;
        lines.table.set_request(at, batch.growths[at].row, batch.generations[at], widen(kept.end));
        lines.firsts[at] = kept.first;
    }

    /// Marks the contents of all lines as unknown.
    pub(super) fn forget_lines(&mut self, tables: &UnitTables) {
        for (group, lines) in self.lines.iter_mut().enumerate() {
            if let Some(lines) = lines {
                lines.table.invalidate(widen(tables.rule(group).width()));
            }
        }
    }

    /// Writes what changes in the lines of the block table.
    fn write_lines(&mut self, batch: &PlannedBatch, tables: &UnitTables, group: usize) -> Result<()> {
        let Some(begin) = self.layout.groups[group].block_table else { return Ok(()) };
        let width = widen(tables.rule(group).width());
        for (at, growth) in batch.growths.iter().enumerate() {
            let Some(LineChange { from, zeros: [zero_from, zero_until] }) =
                self.line_change(batch, group, at)
            else {
                continue;
            };
            let entry = |position: u32| begin + (at * width + widen(position)) * size_of::<i32>();
            let kept = if at < batch.real { batch.span(group, at).kept } else { KeptUnits::default() };
            let gaps = [[kept.sinks, kept.first], [kept.end, u32::MAX]];
            for [start, end] in gaps.map(|[start, end]| [start.max(zero_from), end.min(zero_until)]) {
                if start < end {
                    self.memory.fill(entry(start), widen(end - start) * size_of::<i32>(), 0)?;
                }
            }
            for run in kept.runs_from(from).into_iter().filter(|run| !run.is_empty()) {
                let place = entry(narrow(run.start));
                self.memory.write(place, &tables.line(group, growth.row)[run])?;
            }
            self.record_line(batch, group, at);
        }
        Ok(())
    }
}

/// Returns the slot that kernels which skip negative slots are given.
fn mapped(slot: i32) -> i64 {
    // Slots of unit 0 are padding.
    if slot == 0 { -1 } else { i64::from(slot) }
}

fn array_of(array: PlanArray, batch: &PlannedBatch, values: &[i32]) -> Result<IndexVec> {
    if let PlanArray::SlotMapping(group) = array {
        let slots = &batch.slots[group];
        let mut wide = try_with_capacity(slots.len())?;
        wide.extend(slots.iter().map(|&slot| mapped(slot)));
        return Ok(IndexVec::I64(wide));
    }
    let mut copy = try_with_capacity(values.len())?;
    copy.extend_from_slice(values);
    Ok(IndexVec::I32(copy))
}

/// Fills in the values of an array.
fn put(batch: &PlannedBatch, tables: &UnitTables, array: PlanArray, to: &mut Vec<i32>) -> Result<()> {
    to.clear();
    try_reserve(to, batch.shape(array).iter().product())?;
    let growths = || batch.growths.iter();
    match array {
        PlanArray::Positions => to.extend(growths().flat_map(|growth| growth.prefix..growth.seq).map(signed)),
        PlanArray::ReqPoolIndices => to.extend(growths().map(|growth| signed(growth.row.number()))),
        PlanArray::SeqLens => to.extend(growths().map(|growth| signed(growth.seq))),
        PlanArray::QoIndptr => put_sums(to, growths().map(|growth| growth.new_tokens())),
        PlanArray::OutCacheLoc(group) | PlanArray::SlotMapping(group) => {
            to.extend_from_slice(&batch.slots[group]);
        }
        PlanArray::KvIndptr(group) => put_sums(to, batch.spans(group).iter().map(|span| span.shown.len())),
        PlanArray::KvLastPageLen(group) => {
            to.extend(batch.spans(group).iter().map(|span| signed(span.last_len)));
        }
        PlanArray::KvIndices(group) => {
            for (at, (growth, span)) in growths().zip(batch.spans(group)).enumerate() {
                for run in span.shown.runs() {
                    if at < batch.real {
                        to.extend_from_slice(&tables.line(group, growth.row)[run]);
                    } else {
                        to.resize(to.len() + run.len(), 0);
                    }
                }
            }
        }
        PlanArray::BlockTable(group) => {
            let width = widen(tables.rule(group).width());
            for (at, (growth, span)) in growths().zip(batch.spans(group)).enumerate() {
                let begin = to.len();
                to.resize(begin + width, 0);
                for run in span.kept.runs().into_iter().filter(|_| at < batch.real) {
                    let line = &tables.line(group, growth.row)[run.clone()];
                    to[begin..][run].copy_from_slice(line);
                }
            }
        }
        PlanArray::StateIndices(group) => {
            for number in 0..widen(tables.rule(group).width()) {
                let unit = |(at, growth): (usize, &UnitGrowth)| {
                    if at < batch.real { tables.line(group, growth.row)[number] } else { 0 }
                };
                to.extend(growths().enumerate().map(unit));
            }
        }
    }
    Ok(())
}

const fn signed(number: u32) -> i32 {
    number.cast_signed()
}

/// Appends 0 and the running sums of numbers.
fn put_sums(to: &mut Vec<i32>, numbers: impl Iterator<Item = u32>) {
    let mut sum = 0;
    to.push(0);
    to.extend(numbers.map(|number| {
        sum += widen(number);
        int32(sum)
    }));
}
