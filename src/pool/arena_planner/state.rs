//! The state that a planner guards: the rows and units of its requests, and the arrays of the last plan.

use std::sync::Arc;

use crate::base::bounded::narrow;
use crate::base::{
    Device, Discarded, Epoch, Error, ErrorKind, Id, IndexNumber, IndexVec, RequestRow, Result, try_collect,
    try_extend, try_reserve, try_with_capacity, widen,
};
use crate::index::{MissingUnits, OnBadFree, RowTable, UnitGrowth, UnitRule, UnitTables};
use crate::kernels::{
    Executor, IndexSpace, IndexSpaces, UNIT_GROUP_NUMBERS, UNIT_REQUEST_NUMBERS, UNIT_SPAN_NUMBERS,
    UnitGroup, UnitPlanBatch,
};
use crate::memory::{Backend, Region, RegionWriter, Stream};
use crate::pool::batch_args::as_many;
use crate::pool::{ArenaLease, CacheArena, at_least_one, fits_int32};
use crate::tensor::TensorView;

use super::arrays::{ArrayLayout, LineChange, PlanArrays};
use super::batch::PlannedBatch;
use super::claim::{ArenaClaim, ArenaLeaseEnd};
use super::{ArenaPlan, ArenaPlannerConfig, PlanArray};

/// The state of an [`ArenaPlanner`](super::ArenaPlanner).
#[derive(Debug)]
pub(super) struct PlannerState {
    config: ArenaPlannerConfig,
    pub(super) rows: RowTable<RequestRow>,
    pub(super) tables: UnitTables,
    pub(super) arrays: PlanArrays,
    executor: Executor,
    batch: PlannedBatch,
    /// The leases of requests, by row.
    pub(super) leases: Vec<Option<Arc<ArenaLease>>>,
    /// The epoch of the arena in which requests have their units.
    pub(super) epoch: Epoch,
    pub(super) plans: usize,
    /// Counts changes of the units of requests.
    pub(super) changes: u64,
}

/// A step that was not taken.
pub(super) enum NotPlanned {
    /// Units are missing: those wanted, by group.
    Short(MissingUnits),
    /// The arena was cleared meanwhile.
    Cleared,
}

impl PlannerState {
    pub(super) fn new(
        config: ArenaPlannerConfig,
        backend: &Arc<dyn Backend>,
        arena: &CacheArena,
    ) -> Result<Self> {
        let ArenaPlannerConfig { max_requests, max_context_len, max_batch_size, max_tokens, .. } = config;
        at_least_one(&[
            ("max_requests", max_requests),
            ("max_context_len", max_context_len),
            ("max_batch_size", max_batch_size),
            ("max_tokens", max_tokens),
        ])?;
        let most = fits_int32(&format!("max_context_len {max_context_len}"), Some(max_context_len))?;
        let rows = fits_int32(&format!("max_requests {max_requests}"), max_requests.checked_add(1))?;
        let layout = arena.layout();
        let rules = layout.groups().iter().enumerate().map(|(group, declared)| {
            UnitRule::new(declared, layout.page_size(), most, arena.numbers_of_unit(group))
        });
        let tables = UnitTables::new(widen(rows), layout.page_size(), rules.collect::<Result<_>>()?)?;
        for (group, declared) in layout.groups().iter().enumerate() {
            let units = arena.slabs().unit_runs(group).units;
            let entries = declared.unit_entries(layout.page_size());
            let what = format!("{units} units of {entries} entries in group {}", declared.name());
            fits_int32(&what, units.checked_mul(entries))?;
        }
        let on_device = backend.device() != Device::Cpu;
        let places = ArrayLayout::new(&config, &tables, widen(rows), on_device)?;
        let memory = RegionWriter::new(Region::new(Arc::clone(backend), places.bytes)?);
        let ring_bytes = ArrayLayout::ring_bytes(&config, &tables);
        let spaces = IndexSpaces {
            rows: IndexSpace { noun: "row", len: widen(rows) },
            columns: IndexSpace { noun: "column", len: max_context_len },
        };
        let executor = Executor::new(memory.region(), 0, spaces, ring_bytes)?;
        Ok(Self {
            config,
            rows: RowTable::new(1, rows - 1)?,
            batch: PlannedBatch::new(&tables),
            arrays: PlanArrays::new(places, memory, &config, widen(rows))?,
            tables,
            executor,
            leases: try_collect((0..rows).map(|_| None))?,
            epoch: arena.epoch(),
            plans: 0,
            changes: 0,
        })
    }

    /// Returns the number of bytes of the arrays.
    pub(super) fn mem_bytes(&self) -> usize {
        self.arrays.memory.region().bytes()
    }

    pub(super) const fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Returns the number of rows that are taken.
    pub(super) fn rows_in_use(&self) -> usize {
        self.rows.rows().capacity() - self.rows.rows().available()
    }

    /// Ends the tokens of all requests if the arena has been cleared.
    pub(super) fn enter(&mut self, arena: &CacheArena, discarded: &Discarded) {
        let epoch = arena.epoch();
        if self.epoch != epoch {
            self.epoch = epoch;
            self.tables.clear();
            self.arrays.forget_lines(&self.tables);
            self.changes += 1;
            let leases = self.leases.iter_mut().filter_map(Option::take);
            leases.for_each(|lease| discarded.add(Arc::new(ArenaLeaseEnd(lease))));
        }
    }

    /// Returns whether `lease` is that of the request in `row`.
    pub(super) fn has_lease(&self, row: RequestRow, lease: &Arc<ArenaLease>) -> bool {
        self.leases[widen(row.number())].as_ref().is_some_and(|own| Arc::ptr_eq(own, lease))
    }

    pub(super) fn alloc(&mut self, count: usize) -> Result<Option<Vec<RequestRow>>> {
        let taken = self.rows.alloc(count)?;
        let Some(taken) = taken else { return Ok(None) };
        let mut rows = try_with_capacity(taken.len())?;
        rows.extend(taken.iter().map(|extent| extent.row));
        Ok(Some(rows))
    }

    /// Returns the rows of a batch, each of a request and named once.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for a row that there is not, [`ErrorKind::IndexOwnership`] for one that is not allocated,
    /// [`ErrorKind::Argument`] for one that is named twice.
    pub(super) fn resolve(&mut self, values: &IndexVec) -> Result<Vec<RequestRow>> {
        let rows = values.ids::<RequestRow>(self.config.max_requests + 1)?;
        self.tables.begin_batch();
        for (position, &row) in rows.iter().enumerate() {
            if !self.rows.rows().contains(row) || !self.rows.rows().is_live(row) {
                return Err(Error::new(
                    ErrorKind::IndexOwnership,
                    format!("request row {row} at position {position} is not allocated"),
                )
                .with_index(row.number()));
            }
            if self.tables.is_named_again(row) {
                return Err(Error::argument(format!("request row {row} is resolved twice in one batch")));
            }
        }
        Ok(rows)
    }

    /// Returns the growth of each request of a batch, some of which begin with the lease of a claim.
    pub(super) fn extensions(
        &mut self,
        rows: &IndexVec,
        prefix_lens: &[i64],
        seq_lens: &[i64],
        claims: &[Option<ArenaClaim>],
    ) -> Result<Vec<UnitGrowth>> {
        if [prefix_lens.len(), seq_lens.len()] != [rows.len(); 2] {
            return Err(Error::argument(format!(
                "a batch of {} rows, {} prefix_lens and {} seq_lens; the lengths must be equal",
                rows.len(),
                prefix_lens.len(),
                seq_lens.len()
            )));
        }
        let rows = self.resolve(rows)?;
        let mut growths = try_with_capacity(rows.len())?;
        for (position, &row) in rows.iter().enumerate() {
            let lens = [prefix_lens[position], seq_lens[position]];
            let claim = claims.get(position).and_then(Option::as_ref);
            claim.map_or(Ok(()), |claim| claim.check(self.epoch))?;
            growths.push(self.tables.growth(position, row, lens, claim.map(|claim| claim.len))?);
        }
        Ok(growths)
    }

    /// Returns the growth of each request of a decode step to its length, of which `width` tokens are new.
    pub(super) fn decodes(
        &mut self,
        rows: &IndexVec,
        seq_lens: &IndexVec,
        width: usize,
    ) -> Result<Vec<UnitGrowth>> {
        if width == 0 {
            return Err(Error::argument("tokens_per_req is 0; it must be at least 1"));
        }
        as_many("seq_lens", seq_lens, rows)?;
        let width = i64::try_from(width).map_err(|_| {
            Error::argument(format!("tokens_per_req {width} is more than a request can have"))
        })?;
        let rows = self.resolve(rows)?;
        match seq_lens {
            IndexVec::I32(seq_lens) => self.growths_of(&rows, seq_lens, width),
            IndexVec::I64(seq_lens) => self.growths_of(&rows, seq_lens, width),
        }
    }

    fn growths_of<T: IndexNumber>(
        &self,
        rows: &[RequestRow],
        seq_lens: &[T],
        width: i64,
    ) -> Result<Vec<UnitGrowth>> {
        let mut growths = try_with_capacity(rows.len())?;
        for (position, (&row, &seq)) in rows.iter().zip(seq_lens).enumerate() {
            let seq = seq.into();
            growths.push(self.tables.growth(position, row, [seq.saturating_sub(width), seq], None)?);
        }
        Ok(growths)
    }

    /// Plans a checked batch, padded with requests of `of_padding` tokens to `padded_size`. Requests with a claim begin
    /// with its lease.
    pub(super) fn plan(
        &mut self,
        arena: &CacheArena,
        growths: Vec<UnitGrowth>,
        claims: &[Option<ArenaClaim>],
        [padded_size, of_padding]: [usize; 2],
        stream: Stream,
        discarded: &Discarded,
    ) -> Result<std::result::Result<ArenaPlan, NotPlanned>> {
        let missing = padded_size - growths.len();
        let of_padding = if missing > 0 { of_padding } else { 0 };
        let sizes = self.sizes(&growths, [missing, of_padding])?;
        self.executor.check_not_capturing(stream, "a plan, of which the host keeps a copy,")?;
        for (growth, claim) in claimed(&growths, claims) {
            self.tables.adopt(growth.row, claim.len, &claim.cached);
        }
        let grown = arena.in_epoch(self.epoch, |slabs| self.tables.grow(&growths, slabs)).transpose();
        if !matches!(grown, Ok(Some(Ok(())))) {
            for (growth, _) in claimed(&growths, claims) {
                self.tables.disown(growth.row, self.leases[widen(growth.row.number())].is_some());
            }
            // What lies behind windows may be free now.
            self.changes += 1;
        }
        match grown? {
            None => return Ok(Err(NotPlanned::Cleared)),
            Some(Err(missing)) => return Ok(Err(NotPlanned::Short(missing))),
            Some(Ok(())) => (),
        }
        self.plans += 1;
        self.changes += 1;
        let written = self
            .batch
            .begin(growths, [missing, of_padding], &self.rows)
            .and_then(|()| self.restore_states(arena, claims, stream))
            .and_then(|()| self.write(stream));
        let Self { batch, tables, leases, .. } = self;
        let grown = &batch.growths[..batch.real];
        if let Err(failure) = written {
            // After a clear there is nothing to undo.
            let _ = arena.in_epoch(self.epoch, |slabs| tables.shrink(grown, slabs));
            for (growth, _) in claimed(grown, claims) {
                tables.disown(growth.row, leases[widen(growth.row.number())].is_some());
            }
            self.arrays.forget_lines(&self.tables);
            return Err(failure);
        }
        for (growth, claim) in claimed(grown, claims) {
            if let Some(earlier) = leases[widen(growth.row.number())].replace(claim.keep()) {
                discarded.add(Arc::new(ArenaLeaseEnd(earlier)));
            }
        }
        Ok(Ok(ArenaPlan { number: self.plans, changes: self.changes, ..sizes }))
    }

    /// Copies the snapshots of leases to the states of their requests: a launch for each group of states.
    fn restore_states(
        &self,
        arena: &CacheArena,
        claims: &[Option<ArenaClaim>],
        stream: Stream,
    ) -> Result<()> {
        let claimed = || claimed(&self.batch.growths, claims).filter(|(_, claim)| claim.len > 0);
        for group in (0..self.tables.groups()).filter(|&group| self.tables.rule(group).is_state()) {
            let (mut dst, mut src): (Vec<i64>, Vec<i64>) = (Vec::new(), Vec::new());
            for (growth, claim) in claimed() {
                let (snapshot, state) = (&claim.snapshots[group], self.tables.line(group, growth.row));
                try_reserve(&mut src, snapshot.len())?;
                src.extend(snapshot.iter().map(|&unit| i64::from(unit)));
                try_reserve(&mut dst, state.len())?;
                dst.extend(state.iter().map(|&unit| i64::from(unit)));
            }
            if !dst.is_empty() {
                arena.copy_units(group, &dst, &src, stream)?;
            }
        }
        Ok(())
    }

    /// Returns the sizes of a batch, with padding.
    fn sizes(&self, batch: &[UnitGrowth], [missing, of_padding]: [usize; 2]) -> Result<ArenaPlan> {
        let ArenaPlannerConfig { max_context_len, max_batch_size, max_tokens, .. } = self.config;
        let padded_batch_size = batch.len() + missing;
        if padded_batch_size > max_batch_size {
            return Err(Error::argument(format!(
                "a batch of {padded_batch_size} requests is more than max_batch_size {max_batch_size}"
            )));
        }
        let (mut longest, mut most, mut tokens) = (of_padding, of_padding, 0usize);
        for growth in batch {
            longest = longest.max(widen(growth.seq));
            most = most.max(widen(growth.new_tokens()));
            tokens += widen(growth.new_tokens());
        }
        if longest > max_context_len {
            return Err(Error::index(format!(
                "a request of {longest} tokens is longer than max_context_len {max_context_len}"
            )));
        }
        let padded = tokens.saturating_add(missing.saturating_mul(of_padding));
        if padded > max_tokens {
            return Err(Error::argument(format!(
                "{padded} new tokens are more than max_tokens {max_tokens}"
            )));
        }
        Ok(ArenaPlan {
            number: 0,
            changes: 0,
            batch_size: batch.len(),
            padded_batch_size,
            num_tokens: tokens,
            padded_num_tokens: padded,
            max_seqlen_q: most,
            max_seqlen_k: longest,
        })
    }

    /// Writes the arrays of the batch.
    fn write(&mut self, stream: Stream) -> Result<()> {
        let on_host = matches!(self.executor, Executor::Host(_));
        self.batch.fill(&self.tables, on_host)?;
        if on_host { self.arrays.write(&self.batch, &self.tables) } else { self.launch(stream) }
    }

    /// Writes the arrays of the batch on the device: one launch, preceded by a copy if there are many numbers.
    fn launch(&mut self, stream: Stream) -> Result<()> {
        let Self { tables, arrays, batch, executor, .. } = self;
        let Executor::Device(launcher) = executor else { return Ok(()) };
        let (count, groups) = (batch.growths.len(), tables.groups());
        let mut group_numbers = try_with_capacity(groups * UNIT_GROUP_NUMBERS)?;
        let mut request_numbers = try_with_capacity(count * UNIT_REQUEST_NUMBERS)?;
        let mut begin = 0;
        let mut longest = 0;
        for growth in &batch.growths {
            let request = [growth.row.number(), growth.prefix, growth.seq, begin];
            request_numbers.extend(request.map(u32::cast_signed));
            begin += growth.new_tokens();
            longest = longest.max(growth.new_tokens());
        }
        let mut spans = try_with_capacity(count * groups * UNIT_SPAN_NUMBERS)?;
        let mut units: Vec<i32> = Vec::new();
        for group in 0..groups {
            let mut kv_begin = 0;
            for (at, (growth, span)) in batch.growths.iter().zip(batch.spans(group)).enumerate() {
                let (kept, change) = (span.kept, arrays.line_change(batch, group, at));
                let change = change.unwrap_or(LineChange { from: kept.end, zeros: [0, 0] });
                let sent = if at < batch.real { tables.changed(group, growth.row) } else { 0 };
                spans.extend(
                    [
                        kept.sinks,
                        kept.first,
                        kept.end,
                        sent,
                        narrow(units.len()),
                        kv_begin,
                        change.from,
                        change.zeros[0],
                        change.zeros[1],
                    ]
                    .map(u32::cast_signed),
                );
                kv_begin += span.shown.len();
                longest = longest.max(kept.end).max(change.zeros[1]);
                if at < batch.real {
                    for run in kept.runs_from(sent) {
                        try_extend(&mut units, &tables.line(group, growth.row)[run])?;
                    }
                }
            }
            let (places, rule) = (arrays.layout.groups[group], tables.rule(group));
            UnitGroup {
                table: places.table,
                width: rule.width(),
                unit_tokens: rule.tokens(),
                stride: rule.stride(),
                out_cache_loc: places.out_cache_loc,
                slot_mapping: places.slot_mapping,
                kv_indptr: places.kv_indptr,
                kv_last_page_len: places.kv_last_page_len,
                kv_indices: places.kv_indices,
                block_table: places.block_table,
                kv_len: kv_begin.cast_signed(),
            }
            .put(&mut group_numbers);
        }
        let planned = UnitPlanBatch {
            region: arrays.memory.region(),
            common: arrays.layout.common,
            groups: &group_numbers,
            requests: &request_numbers,
            spans: &spans,
            units: &units,
            batch: batch.real,
            tokens: widen(begin),
            longest: widen(longest),
        };
        launcher.unit_plan(&planned, stream)?;
        for group in 0..groups {
            for row in batch.growths[..batch.real].iter().map(|growth| growth.row) {
                tables.record_written(group, row);
            }
            (0..count).for_each(|at| arrays.record_line(batch, group, at));
        }
        Ok(())
    }

    pub(super) fn truncate(
        &mut self,
        arena: &CacheArena,
        rows: &IndexVec,
        seq_lens: &IndexVec,
    ) -> Result<()> {
        as_many("seq_lens", seq_lens, rows)?;
        let rows = self.resolve(rows)?;
        let mut lens = try_with_capacity(rows.len())?;
        for (position, (&row, len)) in rows.iter().zip(seq_lens.iter()).enumerate() {
            lens.push(self.tables.check_truncate(position, row, len, arena.layout().groups())?);
        }
        let cuts = rows.into_iter().zip(lens);
        self.cut(arena, cuts);
        Ok(())
    }

    pub(super) fn finish(
        &mut self,
        arena: &CacheArena,
        rows: &IndexVec,
        seq_lens: Option<&IndexVec>,
        discarded: &Discarded,
    ) -> Result<()> {
        let resolved = self.resolve(rows)?;
        if let Some(lens) = seq_lens {
            as_many("seq_lens", lens, rows)?;
            for (position, (&row, len)) in resolved.iter().zip(lens.iter()).enumerate() {
                let has = self.tables.len(row);
                // The caller may not know yet that the arena was cleared.
                if i64::from(has) != len && self.tables.cleared_error(position, row).is_none() {
                    return Err(Error::argument(format!(
                        "request row {row} at position {position} has {has} tokens with units, not {len}"
                    )));
                }
            }
        }
        for row in &resolved {
            if let Some(lease) = self.leases[widen(row.number())].take() {
                discarded.add(Arc::new(ArenaLeaseEnd(lease)));
            }
        }
        self.cut(arena, resolved.iter().map(|row| (*row, 0)));
        for row in &resolved {
            self.tables.forget(*row);
        }
        // Each row was checked to be allocated.
        let (_, bad) = self.rows.free(rows, OnBadFree::Report)?;
        debug_assert_eq!(bad.dropped(), 0, "rows were checked");
        Ok(())
    }

    fn cut(&mut self, arena: &CacheArena, cuts: impl Iterator<Item = (RequestRow, u32)>) {
        let Self { tables, arrays, epoch, .. } = self;
        // In another epoch the units are gone: the next call notices.
        let _ = arena.in_epoch(*epoch, |slabs| {
            for (row, len) in cuts {
                tables.truncate(row, len, slabs);
                for (group, lines) in arrays.lines.iter_mut().enumerate() {
                    if let Some(lines) = lines {
                        lines.table.truncate(row, widen(tables.kept(group, row).end));
                    }
                }
            }
        });
        self.changes += 1;
    }

    /// Returns an array of a plan.
    pub(super) fn array(&mut self, plan: &ArenaPlan, array: PlanArray) -> Result<Option<TensorView>> {
        self.check_current(plan, plan.number == self.plans)?;
        if matches!(self.executor, Executor::Host(_)) {
            self.arrays.ask(&self.batch, &self.tables, array)?;
        }
        self.arrays.view(&self.batch, array)
    }

    /// Returns an array of a plan in host memory.
    pub(super) fn host_array(&mut self, plan: &ArenaPlan, array: PlanArray) -> Result<Option<TensorView>> {
        if matches!(self.executor, Executor::Host(_)) {
            return self.array(plan, array);
        }
        self.check_current(plan, plan.number == self.plans)?;
        let has_units = !matches!(
            array,
            PlanArray::Positions | PlanArray::ReqPoolIndices | PlanArray::SeqLens | PlanArray::QoIndptr
        );
        if has_units {
            self.check_current(plan, plan.changes == self.changes)?;
        }
        // On a device a plan leaves the slots to the launch; the units are still those of the plan.
        if let PlanArray::OutCacheLoc(group) | PlanArray::SlotMapping(group) = array {
            self.batch.fill_slots(&self.tables, group)?;
        }
        self.arrays.host_copy(&self.batch, &self.tables, array)
    }

    fn check_current(&self, plan: &ArenaPlan, is_current: bool) -> Result<()> {
        if is_current {
            return Ok(());
        }
        let text = if plan.number == self.plans {
            format!("the requests of plan {} have changed; take its arrays of units before", plan.number)
        } else {
            format!(
                "plan {} is not the last any more: its arrays were overwritten by plan {}; take them before",
                plan.number, self.plans
            )
        };
        Err(Error::new(ErrorKind::Stale, text))
    }

    /// Returns the tokens of a request that have units.
    pub(super) fn seq_len(&mut self, row: i64) -> Result<u32> {
        let row = self.resolve(&IndexVec::I64(vec![row]))?[0];
        Ok(self.tables.len(row))
    }

    /// Returns the positions and the units of a request in a group.
    pub(super) fn units(&mut self, row: i64, group: usize) -> Result<Vec<(u32, u32)>> {
        let row = self.resolve(&IndexVec::I64(vec![row]))?[0];
        let (kept, line) = (self.tables.kept(group, row), self.tables.line(group, row));
        let mut units = try_with_capacity(widen(kept.len()))?;
        for run in kept.runs() {
            units.extend(run.map(|at| (narrow(at), line[at].cast_unsigned())));
        }
        Ok(units)
    }

    /// Gives the units of all requests back, and ends their leases: the planner ends.
    pub(super) fn end(&mut self, arena: &CacheArena) {
        let tables = &mut self.tables;
        let _ = arena.in_epoch(self.epoch, |slabs| tables.end(slabs));
        self.leases.iter().flatten().for_each(|lease| lease.end());
    }

    /// Checks the bookkeeping.
    pub(super) fn verify(&self, arena: &CacheArena) -> Result<()> {
        arena.in_epoch(self.epoch, |slabs| self.tables.verify(slabs)).unwrap_or(Ok(()))
    }
}

/// Returns the requests of a batch that begin with a lease.
fn claimed<'a>(
    growths: &'a [UnitGrowth],
    claims: &'a [Option<ArenaClaim>],
) -> impl Iterator<Item = (UnitGrowth, &'a ArenaClaim)> {
    let named = growths.iter().zip(claims);
    named.filter_map(|(growth, claim)| Some((*growth, claim.as_ref()?)))
}
