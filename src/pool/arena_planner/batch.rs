//! A batch that has grown: its requests, and what of each group they show.

use crate::base::bounded::{int32, narrow};
use crate::base::{Id, PADDING, RequestRow, Result, try_reserve, widen};
use crate::index::{KeptUnits, RowTable, UnitGrowth, UnitTables};

use super::plan_array::PlanArray;

/// A request in a group.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RequestSpan {
    /// The positions of its units.
    pub(super) kept: KeptUnits,
    /// Those with whole entries.
    pub(super) shown: KeptUnits,
    /// Entries in the last of these.
    pub(super) last_len: u32,
}

/// The last batch, with the requests that pad it.
#[derive(Debug, Default)]
pub(super) struct PlannedBatch {
    pub(super) growths: Vec<UnitGrowth>,
    /// The generation of each row.
    pub(super) generations: Vec<u32>,
    /// Requests before those of padding.
    pub(super) real: usize,
    /// Group by group.
    spans: Vec<RequestSpan>,
    /// Slots of the entries that new tokens complete, by group.
    pub(super) slots: Vec<Vec<i32>>,
    tokens: usize,
    /// Units in `kv_indices` by group; the width of a state.
    pub(super) kv_lens: Vec<usize>,
    /// The entries of a line, by group.
    widths: Vec<usize>,
}

impl PlannedBatch {
    pub(super) fn new(tables: &UnitTables) -> Self {
        let mut batch = Self::default();
        for group in 0..tables.groups() {
            batch.slots.push(Vec::new());
            batch.kv_lens.push(0);
            batch.widths.push(widen(tables.rule(group).width()));
        }
        batch
    }

    /// Makes this a batch of `growths`, followed by `missing` padding requests of `padding` tokens each.
    pub(super) fn begin(
        &mut self,
        growths: Vec<UnitGrowth>,
        [missing, padding]: [usize; 2],
        rows: &RowTable<RequestRow>,
    ) -> Result<()> {
        self.growths = growths;
        self.real = self.growths.len();
        self.generations.clear();
        try_reserve(&mut self.generations, self.real)?;
        self.generations.extend(self.growths.iter().map(|growth| rows.generation(growth.row)));
        try_reserve(&mut self.growths, missing)?;
        let row = RequestRow::new(PADDING);
        let filler = UnitGrowth { row, had: 0, prefix: 0, seq: narrow(padding) };
        self.growths.resize(self.real + missing, filler);
        self.tokens = self.growths.iter().map(|growth| widen(growth.new_tokens())).sum();
        Ok(())
    }

    /// Fills in what the requests show of each group, once they have grown. It is not inlined: in its only caller, a
    /// decode step with states takes a tenth longer.
    #[inline(never)]
    pub(super) fn fill(&mut self, tables: &UnitTables, with_slots: bool) -> Result<()> {
        self.spans.clear();
        try_reserve(&mut self.spans, self.growths.len() * tables.groups())?;
        for group in 0..tables.groups() {
            let rule = tables.rule(group);
            if rule.is_state() {
                self.spans.extend(self.growths.iter().map(|growth| RequestSpan {
                    kept: tables.kept(group, growth.row),
                    ..RequestSpan::default()
                }));
                continue;
            }
            let mut kv_len = 0;
            let (real, padding) = self.growths.split_at(self.real);
            self.spans.extend(real.iter().map(|growth| {
                let (units, last_len) = rule.filled(growth.seq);
                let kept = tables.kept(group, growth.row);
                let shown = if units == kept.end { kept } else { kept.until(units) };
                kv_len += widen(shown.len());
                RequestSpan { kept, shown, last_len }
            }));
            self.spans.extend(padding.iter().map(|growth| {
                let (end, last_len) = rule.filled(growth.seq);
                let kept = KeptUnits { end, ..KeptUnits::default() };
                kv_len += widen(kept.len());
                RequestSpan { kept, shown: kept, last_len }
            }));
            // Offsets fit int32: `kv_indices` has that many entries.
            self.kv_lens[group] = widen(int32(kv_len).cast_unsigned());
            if with_slots {
                self.fill_slots(tables, group)?;
            }
        }
        Ok(())
    }

    /// Fills in the slots of the new tokens in a group; a group of states has none.
    pub(super) fn fill_slots(&mut self, tables: &UnitTables, group: usize) -> Result<()> {
        let rule = tables.rule(group);
        if rule.is_state() {
            return Ok(());
        }
        let slots = &mut self.slots[group];
        slots.clear();
        try_reserve(slots, self.tokens)?;
        let slot_of = |line: &[i32], token: u32| {
            let (slot, is_entry) = rule.slot(line[widen(rule.unit(token))], token);
            if is_entry { slot } else { PADDING.cast_signed() }
        };
        let real = &self.growths[..self.real];
        let is_decode = real.iter().all(|growth| growth.new_tokens() == 1);
        if is_decode && rule.is_of_each_token() {
            // As in most decode steps.
            slots.extend(real.iter().map(|growth| {
                let line = tables.line(group, growth.row);
                rule.slot_of_each(line[widen(rule.unit(growth.prefix))], growth.prefix)
            }));
        } else if is_decode {
            slots.extend(real.iter().map(|growth| slot_of(tables.line(group, growth.row), growth.prefix)));
        } else {
            for growth in real {
                let line = tables.line(group, growth.row);
                slots.extend((growth.prefix..growth.seq).map(|token| slot_of(line, token)));
            }
        }
        slots.resize(self.tokens, PADDING.cast_signed());
        Ok(())
    }

    /// Returns the requests in a group.
    pub(super) fn spans(&self, group: usize) -> &[RequestSpan] {
        &self.spans[group * self.growths.len()..(group + 1) * self.growths.len()]
    }

    /// Returns the request at `at` in a group.
    #[inline]
    pub(super) fn span(&self, group: usize, at: usize) -> RequestSpan {
        self.spans[group * self.growths.len() + at]
    }

    /// Returns the shape of an array.
    pub(super) fn shape(&self, array: PlanArray) -> Vec<usize> {
        let batch = self.growths.len();
        match array {
            PlanArray::Positions | PlanArray::OutCacheLoc(_) | PlanArray::SlotMapping(_) => vec![self.tokens],
            PlanArray::ReqPoolIndices | PlanArray::SeqLens | PlanArray::KvLastPageLen(_) => vec![batch],
            PlanArray::QoIndptr | PlanArray::KvIndptr(_) => vec![batch + 1],
            PlanArray::KvIndices(group) => vec![self.kv_lens[group]],
            PlanArray::BlockTable(group) => vec![batch, self.widths[group]],
            PlanArray::StateIndices(group) => vec![self.widths[group], batch],
        }
    }
}
