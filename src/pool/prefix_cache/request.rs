//! Requests that keep a lease, as leases see them. A planner implements both traits.

use std::any::Any;
use std::sync::{Arc, Weak};

use crate::base::{Error, Page, RequestRow, Result};
use crate::index::BadFrees;

use crate::memory::Stream;

/// The outcome of [`BatchPlanner::finish`](crate::pool::BatchPlanner::finish).
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::IndexVec;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{
///     AllocatorConfig, Batch, BatchPlanner, FinishedRequests, PlannerConfig, ReqToTokenConfig, ReqToTokenPool,
///     TokenToKvPoolAllocator,
/// };
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let slots = Arc::new(TokenToKvPoolAllocator::new(&AllocatorConfig::new(64), &host).unwrap());
/// let table = Arc::new(ReqToTokenPool::new(&ReqToTokenConfig::new(4, 32), &host).unwrap());
/// let planner = BatchPlanner::new(&PlannerConfig::new(4, 16), &host, slots, Arc::clone(&table)).unwrap();
/// let rows = IndexVec::I64(vec![table.alloc(1, stream).unwrap().expect("four are free")[0].into()]);
/// let batch = Batch { rows: &rows, prefix_lens: &[0], seq_lens: &[3], prefixes: &[] };
/// planner.extend(batch, stream).unwrap().expect("64 are free");
/// let FinishedRequests { pages, bad, not_zeroed } = planner.finish(&rows, None, None, stream).unwrap();
/// assert_eq!((pages, bad.dropped(), not_zeroed.is_none()), (3, 0, true));
/// ```
#[derive(Debug)]
pub struct FinishedRequests {
    /// The number of pages given up.
    pub pages: usize,
    /// The invalid ones among them.
    pub bad: BadFrees,
    /// The error of the driver if the rows are not zeroed yet: see [`FreedRows::not_zeroed`](crate::pool::FreedRows).
    pub not_zeroed: Option<Error>,
}

/// The identity of a lease, which no other lease has as long as it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool) struct LeaseId(usize);

impl LeaseId {
    pub(super) fn of<L>(lease: &L) -> Self {
        Self(std::ptr::from_ref(lease).addr())
    }
}

/// A planner: it keeps the leases of its requests until they are finished.
pub(in crate::pool) trait LeaseKeeper: Any + Send + Sync {
    /// Returns the request in `row`, locked, if `lease` is its lease. The caller holds the lock on the slots.
    fn leased_request(&self, row: RequestRow, lease: LeaseId) -> Option<Box<dyn LeasedRequest + '_>>;

    /// Finishes the request in `row`: see [`BatchPlanner::finish`](crate::pool::BatchPlanner::finish).
    ///
    /// # Errors
    /// See there.
    fn finish_request(&self, row: RequestRow, stream: Stream) -> Result<FinishedRequests>;
}

/// A request whose lease grows by a publication, locked.
pub(in crate::pool) trait LeasedRequest {
    /// Returns the pages of positions `from..to`.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if it has fewer tokens, or its leased prefix
    /// does not end at `from`.
    fn pages(&self, from: usize, to: usize) -> Result<Vec<Page>>;

    /// Records that the cache owns the pages of the request up to those of `cached`, which replace the
    /// request's own pages from page `from` on.
    fn record_published(&mut self, from: usize, cached: &[Page]);
}

/// The request that keeps a lease.
#[derive(Clone)]
pub(in crate::pool) struct LeasingRequest {
    planner: Weak<dyn LeaseKeeper>,
    row: RequestRow,
}

impl LeasingRequest {
    pub(in crate::pool) const fn new(planner: Weak<dyn LeaseKeeper>, row: RequestRow) -> Self {
        Self { planner, row }
    }

    /// Returns the request's row in the table.
    pub(super) const fn row(&self) -> RequestRow {
        self.row
    }

    /// Returns whether its planner exists.
    pub(super) fn is_planned(&self) -> bool {
        self.planner.strong_count() > 0
    }

    /// Returns the request's planner.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) when that is gone.
    pub(super) fn planner(&self) -> Result<Arc<dyn LeaseKeeper>> {
        self.planner.upgrade().ok_or_else(|| Error::state("the planner of the lease's request is gone"))
    }
}
