//! Requests that shrink and end, and their leases.

use std::sync::Arc;

use crate::base::{
    Error, ErrorKind, Id, IndexVec, RequestRow, Result, Slot, try_push, try_with_capacity, widen,
};
use crate::index::{BadFrees, CallRecord, FenceId};
use crate::memory::Stream;
use crate::pool::batch_args::as_many;
use crate::pool::batch_planner::FinishedRequests;
use crate::pool::prefix_cache::FencedLock;
use crate::pool::req_to_token_pool::RequestTable;
use crate::pool::{FreedRows, Lease};

use super::{PlannerState, Pools, call_of_request};
use crate::pool::batch_planner::leases::LeaseEnd;

/// Whether the slots of a batch are freed at once, or behind a fence.
#[derive(Clone, Copy)]
pub(in crate::pool::batch_planner) struct Release {
    pub(in crate::pool::batch_planner) fence: Option<FenceId>,
    pub(in crate::pool::batch_planner) stream: Stream,
}

/// The cuts of requests, each to its first tokens. The lists of what they give up need no memory any more.
struct Cuts {
    /// The row, the tokens that stay, and the number of pages to free.
    requests: Vec<(RequestRow, u32, usize)>,
    /// One slot of each page that the requests give up, one request after the other.
    slots: Vec<i32>,
    /// Room for the slots of one request.
    room: Vec<i32>,
}

impl PlannerState {
    pub(in crate::pool::batch_planner) fn truncate(
        &mut self,
        pools: Pools<'_>,
        rows: &IndexVec,
        seq_lens: &IndexVec,
        release: Release,
    ) -> Result<(usize, BadFrees)> {
        as_many("seq_lens", seq_lens, rows)?;
        let Pools { slots, table, discarded } = pools;
        let rows = self.resolve(rows, table)?;
        let mut lens = try_with_capacity(rows.len())?;
        for (position, (&row, len)) in rows.iter().zip(seq_lens.iter()).enumerate() {
            lens.push(self.requests.check_truncate(position, row, len, slots.slots())?);
        }
        let cuts = self.prepare_cuts(rows.into_iter().zip(lens))?;
        self.give_back(Pools { slots, table, discarded }, cuts, release)
    }

    pub(in crate::pool::batch_planner) fn finish(
        &mut self,
        pools: Pools<'_>,
        rows: &IndexVec,
        seq_lens: Option<&IndexVec>,
        release: Release,
    ) -> Result<FinishedRequests> {
        let stream = release.stream;
        let Pools { slots, table, discarded } = pools;
        let resolved = self.resolve(rows, table)?;
        if let Some(lens) = seq_lens {
            as_many("seq_lens", lens, rows)?;
            for (position, (&row, len)) in resolved.iter().zip(lens.iter()).enumerate() {
                let has = self.requests.len(row);
                // The caller may not know yet that the allocator was cleared.
                let is_cleared = has == 0 && self.requests.cleared(row) > 0;
                if i64::from(has) != len && !is_cleared {
                    return Err(Error::argument(format!(
                        "request row {row} at position {position} has {has} tokens with slots, not {len}"
                    )));
                }
            }
        }
        table.check_not_capturing(stream)?;
        let cuts = self.prepare_cuts(resolved.into_iter().zip(std::iter::repeat(0)))?;
        let given = self.give_back(Pools { slots, table, discarded }, cuts, release);
        self.end_freed(table, stream, discarded);
        // Each row was checked to be allocated.
        let freed = table.free(rows, stream);
        self.leases.record_frees(table);
        let FreedRows { not_zeroed, .. } = freed?;
        let (pages, bad) = given?;
        Ok(FinishedRequests { pages, bad, not_zeroed })
    }

    /// Returns the lease of a request that is truncated to `len` tokens, if the lease has to be shortened,
    /// too.
    fn cut_lease(&mut self, row: RequestRow, len: u32, table: &RequestTable) -> Option<Arc<Lease>> {
        if len > 0 && self.requests.leased(row) <= len {
            return None;
        }
        let lease = Arc::clone(self.leases.of(row, table)?);
        if len == 0 {
            self.leases.remove(row);
        }
        Some(lease)
    }

    /// Lists the slots that requests give up, before any of them does.
    fn prepare_cuts(&mut self, cuts: impl Iterator<Item = (RequestRow, u32)>) -> Result<Cuts> {
        let mut requests = try_with_capacity(cuts.size_hint().0)?;
        for (row, len) in cuts {
            try_push(&mut requests, (row, len, self.requests.own_pages_from(row, len)))?;
        }
        let counts = || requests.iter().map(|(.., count)| *count);
        let mut slots = try_with_capacity(counts().sum())?;
        let room = try_with_capacity(counts().max().unwrap_or(0))?;
        for &(row, len, _) in &requests {
            self.requests.prepare_truncate(row, len, &mut slots)?;
        }
        Ok(Cuts { requests, slots, room })
    }

    fn give_back(&mut self, pools: Pools<'_>, cuts: Cuts, release: Release) -> Result<(usize, BadFrees)> {
        let Pools { mut slots, table, discarded } = pools;
        let Release { fence, stream } = release;
        let (mut given, mut bad) = (0, BadFrees::default());
        let Cuts { requests, slots: listed, mut room } = cuts;
        for (row, len, count) in requests {
            if let Some(lease) = self.cut_lease(row, len, table) {
                // The pages of the lease stay locked until the fence has passed.
                let fenced = fence.map(|id| {
                    let lock = FencedLock::default();
                    slots.fences_mut().keep(id, Arc::clone(&lock) as _);
                    lock
                });
                discarded.add(Arc::new(LeaseEnd::new(lease, widen(len), fenced, stream)));
            }
            let _acting = call_of_request(row, &slots, table).map(CallRecord::begin);
            self.requests.truncate(row, len);
            self.metadata.truncate(row, self.requests.pages(row).len());
            room.clear();
            room.extend_from_slice(&listed[given..given + count]);
            given += count;
            let pages = IndexVec::I32(room);
            bad.append(slots.free_now(&pages, fence)?);
            room = pages.into_i32()?;
        }
        self.metadata.record_change();
        if slots.strict() && bad.dropped() > 0 {
            let report = bad.describe(Slot::NOUN, given);
            return Err(Error::new(
                ErrorKind::IndexOwnership,
                format!("another owner freed slots of the planner; all others were freed: {report}"),
            ));
        }
        Ok((given, bad))
    }
}
