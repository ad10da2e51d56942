//! Requests that keep a lease, as leases see them. A planner implements both traits.

use std::sync::{Arc, Weak};

use crate::base::{Error, Page, RequestRow, Result};

use super::Lease;

/// A planner: it keeps the leases of its requests until they are finished.
pub(in crate::pool) trait LeaseKeeper: Send + Sync {
    /// Returns the request in `row`, locked, if `lease` is its lease. The caller holds the lock on the slots.
    fn leased_request(&self, row: RequestRow, lease: &Lease) -> Option<Box<dyn LeasedRequest + '_>>;
}

/// A request whose lease grows by a publication, locked.
pub(in crate::pool) trait LeasedRequest {
    /// Returns the pages of positions `from..to`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) if it has fewer tokens, or its leased prefix
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
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when that is gone.
    pub(super) fn planner(&self) -> Result<Arc<dyn LeaseKeeper>> {
        self.planner.upgrade().ok_or_else(|| Error::config("the planner of the lease's request is gone"))
    }
}
