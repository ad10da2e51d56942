//! The state that a planner guards: the slots of each request, their leases, and the metadata.

mod release;

use std::ops::Range;
use std::sync::Arc;

use crate::base::{
    Discarded, Epoch, Error, Id, IndexNumber, IndexVec, Page, RequestRow, Result, try_collect,
    try_with_capacity, widen,
};
use crate::index::{AbandonedRequest, CallRecord, Growth, GrowthRequest, Owner, PageList, Requests};
use crate::kernels::Indices;
use crate::memory::{Backend, Stream};
use crate::pool::batch_args::{as_many, padded_size};
use crate::pool::req_to_token_pool::{ReqToTokenPool, RequestTable};
use crate::pool::shortage::{Shortage, TakeResult};
use crate::pool::slot_tensors::{SlotTensors, SlotsAt};
use crate::pool::token_to_kv_pool_allocator::TokenToKvPoolAllocator;
use crate::pool::{TableIndex, at_least_one};
use crate::tensor::TensorView;

use super::claim::{CachedPages, Claim};
use super::growing::GrowthGuard;
use super::leases::Leases;
use super::metadata::{PlanMetadata, PoolSizes, slots_of};
use super::{Batch, Field, Plan, PlannerConfig, Prefix};
pub(super) use release::Release;

/// The locked pools of a step.
pub(super) struct Pools<'a> {
    pub(super) slots: SlotsAt<'a>,
    pub(super) table: &'a mut RequestTable,
    /// What is dropped when the pools are no longer locked: the ends of leases, which are calls of a cache.
    pub(super) discarded: &'a Discarded,
}

/// Padding of a batch with requests of the padding row.
#[derive(Clone, Copy, Debug)]
struct Padding {
    /// Requests, including padding.
    batch_size: usize,
    /// New tokens of each padding request.
    tokens_per_req: usize,
}

impl Padding {
    const fn none(batch_size: usize) -> Self {
        Self { batch_size, tokens_per_req: 0 }
    }
}

/// Sizes of a batch, as those of a [`Plan`].
struct BatchSizes {
    /// New tokens of each padding request.
    of_padding: usize,
    num_tokens: usize,
    padded_num_tokens: usize,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
}

/// The state of a [`BatchPlanner`](super::BatchPlanner).
#[derive(Debug)]
pub(super) struct PlannerState {
    /// The slots of each request.
    requests: Requests,
    metadata: PlanMetadata,
    /// The leases of requests.
    pub(super) leases: Leases,
    /// The epoch of the allocator in which requests have their slots.
    epoch: Epoch,
}

impl PlannerState {
    pub(super) fn new(
        config: &PlannerConfig,
        backend: &Arc<dyn Backend>,
        slots: &TokenToKvPoolAllocator,
        table: &ReqToTokenPool,
    ) -> Result<Self> {
        let PlannerConfig { max_batch_size, max_tokens, .. } = *config;
        at_least_one(&[("max_batch_size", max_batch_size), ("max_tokens", max_tokens)])?;
        let (requests, leases, epoch, sizes) = {
            let (slots, table) = (slots.lock(), table.lock());
            if slots.device() != table.device() {
                return Err(Error::config(format!(
                    "the allocator is on {}, the request table on {}; a planner needs both on one device",
                    slots.device(),
                    table.device()
                )));
            }
            let requests = Requests::new(table.table_rows(), slots.slots())?;
            (requests, Leases::new(&table)?, slots.epoch(), PoolSizes::of(slots.slots(), &table))
        };
        // New memory is waited for. Another epoch that begins meanwhile is noticed later.
        let metadata = PlanMetadata::new(config, backend, sizes)?;
        Ok(Self { requests, metadata, leases, epoch })
    }

    /// Ends the tokens and the leases of all requests if the allocator has begun another epoch.
    pub(super) fn enter(&mut self, epoch: Epoch, stream: Stream, discarded: &Discarded) {
        if self.epoch != epoch {
            self.epoch = epoch;
            self.requests.clear();
            self.leases.discard_all(stream, discarded);
            self.metadata.record_change();
        }
    }

    /// Returns the slots of the allocator, whose epoch the planner has entered.
    pub(super) fn enter_slots<'a>(
        &mut self,
        slots: &'a mut SlotTensors,
        stream: Stream,
        discarded: &Discarded,
    ) -> SlotsAt<'a> {
        self.enter(slots.epoch(), stream, discarded);
        slots.at(self.epoch).expect("it was entered")
    }

    /// Discards the leases of requests whose rows were freed by another call, and finds those that have abandoned
    /// pages.
    pub(super) fn end_freed(&mut self, table: &RequestTable, stream: Stream, discarded: &Discarded) {
        if self.leases.discard_freed(table, stream, discarded) {
            self.requests.find_abandoned(table.rows());
        }
    }

    /// Returns the requests of the planner.
    pub(super) const fn requests(&self) -> &Requests {
        &self.requests
    }

    /// Gives the pages of abandoned requests back, unless another call has freed them since they were taken.
    /// Returns the requests, each with the number of pages that were given back.
    pub(super) fn give_back_abandoned(
        &mut self,
        mut slots: SlotsAt<'_>,
        table: &RequestTable,
    ) -> Result<Vec<(AbandonedRequest, usize)>> {
        let size = self.requests.page_size().slots();
        let abandoned = self.requests.abandoned();
        let mut lists = try_with_capacity(abandoned.len())?;
        for request in abandoned {
            let mut own = try_with_capacity(request.own_pages().len())?;
            let is_own = |page: &Page| !slots.slots().is_freed_since(*page, request.since);
            let slot_of = |page: Page| (page.number() * size).cast_signed();
            own.extend(request.own_pages().filter(is_own).map(slot_of));
            lists.push(own);
        }
        let mut reports = try_with_capacity(lists.len())?;
        for (request, own) in self.requests.take_abandoned().into_iter().zip(lists) {
            let _acting = call_of_request(request.row, &slots, table).map(CallRecord::begin);
            let given = own.len();
            let bad = slots.free_now(&IndexVec::I32(own), None)?;
            reports.push((request, given - bad.dropped()));
            self.metadata.record_change();
        }
        Ok(reports)
    }

    /// Returns the arrays of the last plan.
    pub(super) const fn metadata(&self) -> &PlanMetadata {
        &self.metadata
    }

    /// Returns an array of a plan: see [`PlanMetadata::field`].
    pub(super) fn field(&mut self, plan: &Plan, field: Field) -> Result<Option<TensorView>> {
        self.metadata.field(plan, field)
    }

    /// Returns an array of a plan in host memory: see [`PlanMetadata::host_field`].
    pub(super) fn host_field(&mut self, plan: &Plan, field: Field) -> Result<Option<TensorView>> {
        self.metadata.host_field(&self.requests, plan, field)
    }

    /// Requests that have slots, and their tokens.
    pub(super) fn totals(&self, table: &RequestTable) -> (usize, usize) {
        self.requests.totals(table.rows())
    }

    /// Returns the tokens of a request that have slots.
    pub(super) fn seq_len(&mut self, row: i64, table: &RequestTable) -> Result<u32> {
        let row = self.resolve(&IndexVec::I64(vec![row]), table)?[0];
        Ok(self.requests.len(row))
    }

    /// Returns the rows of live requests.
    pub(super) fn resolve(&mut self, rows: &IndexVec, table: &RequestTable) -> Result<Vec<RequestRow>> {
        self.requests.resolve_rows(rows, table.rows())
    }

    pub(super) fn extend(
        &mut self,
        pools: Pools<'_>,
        batch: Batch<'_>,
        claims: &mut [Option<Claim>],
        stream: Stream,
    ) -> Result<TakeResult<Plan>> {
        let Pools { slots, table, discarded } = pools;
        let (rows, count) = (batch.rows, batch.rows.len());
        let cached = if batch.prefixes.is_empty() { count } else { batch.prefixes.len() };
        if [batch.prefix_lens.len(), batch.seq_lens.len(), cached] != [count; 3] {
            return Err(Error::argument(format!(
                "a batch of {count} rows, {} prefix_lens, {} seq_lens and {cached} prefixes; the lengths must be \
                 equal",
                batch.prefix_lens.len(),
                batch.seq_lens.len()
            )));
        }
        self.check_batch(count)?;
        debug_assert!(claims.is_empty() || claims.len() == count, "claims are by position");
        let mut cached: Vec<CachedPages<'_>> = try_with_capacity(count)?;
        cached.extend(claims.iter_mut().map(|claim| match claim {
            Some(claim) => CachedPages::Leased(claim),
            None => CachedPages::Shared(PageList::default()),
        }));
        cached.resize_with(count, || CachedPages::Shared(PageList::default()));
        let mut growths = try_with_capacity(count)?;
        for (position, (&row, pages)) in self.resolve(rows, table)?.iter().zip(&mut cached).enumerate() {
            let (prefix, seq) = (batch.prefix_lens[position], batch.seq_lens[position]);
            let asked = GrowthRequest { position, row, prefix, seq };
            growths.push(self.growth(asked, batch.prefixes.get(position), pages, &slots, table)?);
        }
        let are_new = growths.iter().map(|growth| growth.had < growth.prefix);
        let prefixes = are_new.zip(&mut cached).filter_map(|(is_new, pages)| is_new.then_some(pages));
        let mut pages_of_prefixes = try_with_capacity(count)?;
        pages_of_prefixes.extend(prefixes.map(CachedPages::pages_mut));
        let planned = self.plan(
            Pools { slots, table, discarded },
            &growths,
            &mut pages_of_prefixes,
            Padding::none(count),
            stream,
        )?;
        if planned.is_ok() {
            for (growth, claim) in growths.iter().zip(&*claims) {
                if let Some(claim) = claim {
                    self.leases.bind(growth.row, claim.keep(), table, stream, discarded);
                }
            }
        }
        Ok(planned)
    }

    /// Returns the growth of one request of a batch, which may have a cached prefix. Fills in the pages of
    /// one that is given by its slots.
    fn growth(
        &self,
        asked: GrowthRequest,
        prefix: Option<&Prefix>,
        pages: &mut CachedPages<'_>,
        slots: &SlotTensors,
        table: &RequestTable,
    ) -> Result<Growth> {
        match (pages, prefix) {
            (CachedPages::Leased(claim), _) => {
                claim.check(slots)?;
                self.requests.growth_of_leased(asked, claim.pages().len())
            }
            (CachedPages::Shared(pages), Some(Prefix::Slots(cached))) if !cached.is_empty() => {
                let (growth, shared) = self.requests.growth_of_cached(asked, cached, slots.slots())?;
                *pages = shared;
                Ok(growth)
            }
            (_, Some(Prefix::Leased(lease))) if !self.leases.is_of(lease.id(), asked.row, table) => {
                let GrowthRequest { position, row, .. } = asked;
                Err(Error::state(format!(
                    "request row {row} at position {position} was finished while it was to grow"
                )))
            }
            _ => {
                let GrowthRequest { row, prefix, seq, .. } = asked;
                self.requests.growth(row, prefix, seq).ok_or_else(|| self.requests.growth_error(asked))
            }
        }
    }

    /// Returns the pages of positions `from..to` of a request.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if it has fewer tokens, or its leased prefix
    /// does not end at `from`.
    pub(super) fn pages(&self, row: RequestRow, from: usize, to: usize) -> Result<Vec<Page>> {
        let leased = widen(self.requests.leased(row));
        if leased != from {
            return Err(Error::state(format!(
                "request row {row} was cut to {leased} leased tokens while its lease of {from} was published"
            )));
        }
        let (has, size) = (self.requests.len(row), widen(self.requests.page_size().slots()));
        if to > widen(has) {
            return Err(Error::state(format!(
                "tokens up to {to} were published of request row {row}, which has {has} tokens with slots"
            )));
        }
        self.requests.pages(row).to_vec(from / size..to / size)
    }

    /// Records that the cache keeps the leading pages of a request, the last of which are `cached`. The next
    /// plan of the request writes those that changed to the table.
    pub(super) fn record_published(&mut self, row: RequestRow, from: usize, cached: &[Page]) {
        if let Some(changed) = self.requests.lease(row, from, cached) {
            self.metadata.truncate(row, changed);
            self.metadata.record_change();
        }
    }

    pub(super) fn decode(
        &mut self,
        pools: Pools<'_>,
        rows: &IndexVec,
        seq_lens: &IndexVec,
        tokens_per_req: usize,
        pad_to: Option<&[usize]>,
        stream: Stream,
    ) -> Result<TakeResult<Plan>> {
        let Pools { slots, table, discarded } = pools;
        let count = rows.len();
        if tokens_per_req == 0 {
            return Err(Error::argument("tokens_per_req is 0; it must be at least 1"));
        }
        as_many("seq_lens", seq_lens, rows)?;
        let batch_size = padded_size(count, pad_to)?;
        if batch_size > count && !table.config().padding_row {
            return Err(Error::argument(format!(
                "a batch of {count} requests cannot be padded to {batch_size}: the request table has no padding row"
            )));
        }
        self.check_batch(batch_size)?;
        let width = i64::try_from(tokens_per_req).map_err(|_| {
            Error::argument(format!("tokens_per_req {tokens_per_req} is more than a request can have"))
        })?;
        let rows = self.resolve(rows, table)?;
        let growths = match seq_lens {
            IndexVec::I32(seq_lens) => self.decode_growths(&rows, seq_lens, width),
            IndexVec::I64(seq_lens) => self.decode_growths(&rows, seq_lens, width),
        }?;
        let padding = Padding { batch_size, tokens_per_req };
        self.plan(Pools { slots, table, discarded }, &growths, &mut [], padding, stream)
    }

    /// Returns the growth of each request of a decode step to its length, of which `width` tokens are new.
    fn decode_growths<T: IndexNumber>(
        &self,
        rows: &[RequestRow],
        seq_lens: &[T],
        width: i64,
    ) -> Result<Vec<Growth>> {
        let mut growths = try_with_capacity(rows.len())?;
        for (position, (&row, &seq)) in rows.iter().zip(seq_lens).enumerate() {
            let seq = seq.into();
            let prefix = seq.saturating_sub(width);
            let Some(growth) = self.requests.growth(row, prefix, seq) else {
                return Err(self.requests.decode_error(GrowthRequest { position, row, prefix, seq }, width));
            };
            growths.push(growth);
        }
        Ok(growths)
    }

    fn check_batch(&self, size: usize) -> Result<()> {
        if size > self.metadata.config().max_batch_size {
            return Err(Error::argument(format!(
                "a batch of {size} requests is more than max_batch_size {}",
                self.metadata.config().max_batch_size
            )));
        }
        Ok(())
    }

    /// Returns the sizes of a batch, with padding.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a request that does not fit the table,
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for more than `max_tokens` new tokens.
    fn sizes(&self, batch: &[Growth], padding: Padding, table: &RequestTable) -> Result<BatchSizes> {
        let missing = padding.batch_size - batch.len();
        let of_padding = if missing > 0 { padding.tokens_per_req } else { 0 };
        let (mut longest, mut max_new, mut num_tokens) = (of_padding, of_padding, 0);
        for growth in batch {
            longest = longest.max(widen(growth.seq));
            max_new = max_new.max(growth.new_tokens());
            num_tokens += growth.new_tokens();
        }
        if longest > table.config().max_context_len {
            return Err(Error::index(format!(
                "a request of {longest} tokens does not fit a table of {} columns",
                table.config().max_context_len
            )));
        }
        let padded_num_tokens = num_tokens.saturating_add(missing.saturating_mul(of_padding));
        if padded_num_tokens > self.metadata.config().max_tokens {
            return Err(Error::argument(format!(
                "{padded_num_tokens} new tokens are more than max_tokens {}",
                self.metadata.config().max_tokens
            )));
        }
        Ok(BatchSizes {
            of_padding,
            num_tokens,
            padded_num_tokens,
            max_seqlen_q: max_new,
            max_seqlen_k: longest,
        })
    }

    /// Plans a checked batch, with padding.
    fn plan(
        &mut self,
        pools: Pools<'_>,
        batch: &[Growth],
        prefixes: &mut [&mut PageList],
        padding: Padding,
        stream: Stream,
    ) -> Result<TakeResult<Plan>> {
        let Pools { mut slots, table, .. } = pools;
        for (position, growth) in batch.iter().enumerate() {
            self.requests.check_open(position, *growth, slots.slots())?;
        }
        let sizes = self.sizes(batch, padding, table)?;
        table.check_not_capturing(stream)?;
        let page_size = slots.slots().page_size();
        let new_slots = || batch.iter().map(|growth| widen(growth.new_pages) * page_size).sum();
        if slots.must_land_before(new_slots) {
            return Ok(Err(Shortage::InFlight));
        }
        let Some(growing) = GrowthGuard::batch(&mut self.requests, slots.reborrow(), batch, prefixes)? else {
            return Ok(Err(slots.short(new_slots())));
        };
        let grown = growing.grown(padding.batch_size);
        let written = self.metadata.write(grown, sizes.of_padding, table, stream)?;
        growing.keep();
        // Not before: the undo of the growth leaves other holders of its pages as they were.
        if slots.keeps_ledger() {
            for growth in batch {
                self.record_holder(growth.row, growth.had, &mut slots, table);
            }
        }
        self.requests.record_written(batch);
        Ok(Ok(Plan {
            number: written.number,
            changes: written.changes,
            batch_size: batch.len(),
            padded_batch_size: padding.batch_size,
            num_tokens: sizes.num_tokens,
            padded_num_tokens: sizes.padded_num_tokens,
            max_seqlen_q: sizes.max_seqlen_q,
            max_seqlen_k: sizes.max_seqlen_k,
            kv_len: written.kv_len,
        }))
    }

    /// Records the owner of a row as the owner of its new pages, from token `start` on, if a ledger is kept.
    fn record_holder(&self, row: RequestRow, start: u32, slots: &mut SlotsAt<'_>, table: &RequestTable) {
        let Some(call) = call_of_request(row, slots, table) else { return };
        let first = widen(self.requests.page_size().page(start));
        if let Some(ledger) = slots.slots_mut().ledger_mut() {
            let pages = self.requests.pages(row);
            for page in pages.iter_from(first) {
                ledger.replace_holder(page.number(), &call);
            }
        }
    }

    pub(super) fn fork(
        &mut self,
        pools: Pools<'_>,
        [src, dst]: [i64; 2],
        len: i64,
        claim: Option<&Claim>,
        stream: Stream,
    ) -> Result<TakeResult<[TensorView; 2]>> {
        let Pools { mut slots, table, discarded } = pools;
        let rows = self.resolve(&IndexVec::I64(vec![src, dst]), table)?;
        let (src, dst) = (rows[0], rows[1]);
        let (has, taken) = (self.requests.len(src), self.requests.len(dst));
        let Some(len) = u32::try_from(len).ok().filter(|&len| len <= has && taken == 0) else {
            if let Some(error) = self.requests.cleared_error(0, src) {
                return Err(error);
            }
            return Err(Error::argument(format!(
                "request row {src} has {has} tokens with slots and row {dst} has {taken}; {len} cannot be shared with \
                 it, which must have none"
            )));
        };
        table.check_not_capturing(stream)?;
        claim.map_or(Ok(()), |claim| claim.check(&slots))?;
        // The lease is useful only if it still has the same prefix.
        let full = widen(self.requests.page_size().page(len));
        let is_same = |claim: &&Claim| {
            let leased = claim.pages();
            leased.len() <= full && self.requests.pages(src).starts_with(leased)
        };
        let claim = claim.filter(is_same);
        let leased = claim.map_or(0, |claim| claim.pages().len());
        let page_size = slots.slots().page_size();
        if slots.must_land_before(|| page_size) {
            return Ok(Err(Shortage::InFlight));
        }
        let Some((mut growing, copied)) =
            GrowthGuard::fork(&mut self.requests, slots.reborrow(), [src, dst], len, leased)?
        else {
            return Ok(Err(slots.short(page_size)));
        };
        self.metadata.record_change();
        let copied = write_fork(&mut growing, table, dst, len, copied, stream)?;
        growing.keep();
        self.record_holder(dst, 0, &mut slots, table);
        if let Some(claim) = claim {
            self.leases.bind(dst, claim.keep(), table, stream, discarded);
        }
        Ok(Ok(copied))
    }
}

/// Writes the slots of a request with `len` tokens of another to the table. Returns the slots to copy to and
/// from as tensors.
fn write_fork(
    growing: &mut GrowthGuard<'_>,
    table: &mut RequestTable,
    dst: RequestRow,
    len: u32,
    copied: [Range<u32>; 2],
    stream: Stream,
) -> Result<[TensorView; 2]> {
    let [to, from] = copied.map(|slots| try_collect(slots.map(u32::cast_signed)));
    let (to, from) = (to?, from?);
    let copied = [growing.slots().tensor_of(to, stream)?, growing.slots().tensor_of(from, stream)?];
    if len > 0 {
        let values = Indices::Host(slots_of(growing.requests(), dst, 0, len)?);
        table.write(&TableIndex::first_columns(dst, len), &values, stream)?;
    }
    Ok(copied)
}

/// Returns the current call in the name of a request, its row's owner or the row, if a ledger is kept.
fn call_of_request(row: RequestRow, slots: &SlotTensors, table: &RequestTable) -> Option<Arc<CallRecord>> {
    let call = slots.call()?;
    let holders = table.rows().ledger().map_or(Vec::new(), |ledger| ledger.holders(row.number()));
    let owner = holders.first().and_then(|holder| holder.owner.clone());
    let owner = owner.unwrap_or_else(|| Owner::Text(format!("row {row}")));
    Some(Arc::new(CallRecord { owner: Some(owner), ..CallRecord::clone(&call) }))
}
