//! The leases of a planner's requests.

use std::sync::Arc;

use crate::base::{Discarded, Id, RequestRow, Result, try_collect, widen};
use crate::memory::Stream;
use crate::pool::Lease;
use crate::pool::prefix_cache::{FencedLock, LeaseId};
use crate::pool::req_to_token_pool::RequestTable;

/// The lease of a request.
#[derive(Debug)]
struct BoundLease {
    /// The generation of the row when the lease was bound.
    generation: u32,
    lease: Arc<Lease>,
}

impl BoundLease {
    /// Returns whether the lease belongs to the request that has `row` now.
    fn is_of(&self, row: RequestRow, table: &RequestTable) -> bool {
        self.generation == table.rows().generation(row) && table.rows().rows().is_live(row)
    }
}

/// The end of a request's lease, a call of the cache: dropping it shortens the lease to `len` tokens, or releases
/// it if that is 0.
#[derive(Debug)]
pub(super) struct LeaseEnd {
    lease: Arc<Lease>,
    len: usize,
    /// Keeps the pages that the lease had locked until a fence has passed. Without it, they are unlocked at
    /// once.
    fenced: Option<FencedLock>,
    stream: Stream,
}

impl LeaseEnd {
    pub(super) const fn new(
        lease: Arc<Lease>,
        len: usize,
        fenced: Option<FencedLock>,
        stream: Stream,
    ) -> Self {
        Self { lease, len, fenced, stream }
    }

    /// Has a whole lease end with the call.
    fn discard(lease: Arc<Lease>, stream: Stream, discarded: &Discarded) {
        discarded.add(Arc::new(Self { lease, len: 0, fenced: None, stream }));
    }
}

impl Drop for LeaseEnd {
    fn drop(&mut self) {
        let cut = self.lease.shorten(self.len, self.stream);
        if let (Some(cut), Some(fenced)) = (cut, &self.fenced) {
            fenced.set(cut).expect("it is for this one");
        }
    }
}

/// The leases of requests, by row.
#[derive(Debug)]
pub(super) struct Leases {
    by_row: Vec<Option<BoundLease>>,
    /// The number of frees of rows up to which the leases of freed rows have ended.
    frees: u64,
}

impl Leases {
    /// Creates a record without leases, for requests in `table`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate it.
    pub(super) fn new(table: &RequestTable) -> Result<Self> {
        let by_row = try_collect((0..table.table_rows()).map(|_| None))?;
        Ok(Self { by_row, frees: table.rows().frees() })
    }

    /// Makes `lease` the lease of the request in `row`.
    pub(super) fn bind(
        &mut self,
        row: RequestRow,
        lease: Arc<Lease>,
        table: &RequestTable,
        stream: Stream,
        discarded: &Discarded,
    ) {
        let bound = BoundLease { generation: table.rows().generation(row), lease };
        if let Some(earlier) = self.by_row[widen(row.number())].replace(bound) {
            LeaseEnd::discard(earlier.lease, stream, discarded);
        }
    }

    /// Discards the leases of requests whose rows were freed by another call. It checks them only if there was
    /// one, and returns whether there was.
    pub(super) fn discard_freed(
        &mut self,
        table: &RequestTable,
        stream: Stream,
        discarded: &Discarded,
    ) -> bool {
        let frees = table.rows().frees();
        if std::mem::replace(&mut self.frees, frees) == frees {
            return false;
        }
        for (row, place) in (0..).map(RequestRow::new).zip(&mut self.by_row) {
            let is_over = |bound: &mut BoundLease| !bound.is_of(row, table);
            if let Some(bound) = place.take_if(is_over) {
                LeaseEnd::discard(bound.lease, stream, discarded);
            }
        }
        true
    }

    /// Discards all leases: the allocator of their pages was cleared.
    pub(super) fn discard_all(&mut self, stream: Stream, discarded: &Discarded) {
        let bound = self.by_row.iter_mut().filter_map(Option::take);
        bound.for_each(|bound| LeaseEnd::discard(bound.lease, stream, discarded));
    }

    /// Returns the lease of a request.
    pub(super) fn of(&self, row: RequestRow, table: &RequestTable) -> Option<&Arc<Lease>> {
        let bound = self.by_row.get(widen(row.number()))?.as_ref()?;
        bound.is_of(row, table).then_some(&bound.lease)
    }

    /// Returns whether `lease` is that of the request in `row`.
    pub(super) fn is_of(&self, lease: LeaseId, row: RequestRow, table: &RequestTable) -> bool {
        self.of(row, table).is_some_and(|own| own.id() == lease)
    }

    /// Removes the lease of a request, which gives it up.
    pub(super) fn remove(&mut self, row: RequestRow) {
        self.by_row[widen(row.number())] = None;
    }

    /// Records that the planner itself has freed rows, whose leases have ended.
    pub(super) fn record_frees(&mut self, table: &RequestTable) {
        self.frees = table.rows().frees();
    }
}

impl Drop for Leases {
    /// Requests end with their planner, and so do the leases that their users have released.
    fn drop(&mut self) {
        self.by_row.iter().flatten().for_each(|bound| bound.lease.unbind_gone());
    }
}
