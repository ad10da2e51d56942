//! Leases that a planner takes over.

use std::cell::Cell;
use std::sync::Arc;

use crate::base::{Error, Result};
use crate::index::PageList;
use crate::memory::Stream;
use crate::pool::prefix_cache::LeasingRequest;
use crate::pool::slot_tensors::SlotTensors;
use crate::pool::{Lease, TokenToKvPoolAllocator};

/// The pages of a request's cached prefix in a batch.
#[derive(Debug)]
pub(super) enum CachedPages<'a> {
    /// Pages that the request shares, if it has a prefix at all.
    Shared(PageList),
    /// Pages of a lease.
    Leased(&'a mut Claim),
}

impl CachedPages<'_> {
    /// Returns the pages, to be taken.
    pub(super) const fn pages_mut(&mut self) -> &mut PageList {
        match self {
            Self::Shared(pages) => pages,
            Self::Leased(claim) => &mut claim.pages,
        }
    }
}

/// A lease that is to become that of a request. Dropping it before [`Claim::keep`] leaves the lease as it
/// was.
#[derive(Debug)]
pub(super) struct Claim {
    lease: Arc<Lease>,
    /// The pages of the lease, until the request has them.
    pages: PageList,
    is_kept: Cell<bool>,
}

impl Claim {
    /// Claims a lease of pages of `slots` for `request`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a lease of another allocator or of another
    /// request; the errors of a lease.
    pub(super) fn new(
        lease: &Arc<Lease>,
        request: LeasingRequest,
        slots: &Arc<TokenToKvPoolAllocator>,
    ) -> Result<Self> {
        if !lease.is_of(slots) {
            return Err(Error::argument("a lease is of another allocator than the planner's"));
        }
        let pages = lease.bind(request)?;
        Ok(Self { lease: Arc::clone(lease), pages, is_kept: Cell::new(false) })
    }

    /// Claims another lease of the first `len` tokens of a lease, in whole pages, for `request`.
    ///
    /// # Errors
    /// The errors of a lease.
    pub(super) fn of_prefix(
        lease: &Lease,
        len: i64,
        request: LeasingRequest,
        stream: Stream,
    ) -> Result<Self> {
        // The planner refuses a negative length later; it claims no page.
        let lease = Arc::new(lease.lease_prefix(usize::try_from(len).unwrap_or(0), stream)?);
        let pages = lease.bind(request)?;
        Ok(Self { lease, pages, is_kept: Cell::new(false) })
    }

    /// Checks that the pages are still those of the allocator, whose lock the caller holds.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) when it was cleared meanwhile.
    pub(super) fn check(&self, slots: &SlotTensors) -> Result<()> {
        self.lease.check_epoch(slots)
    }

    /// Returns the pages of the lease.
    pub(super) const fn pages(&self) -> &PageList {
        &self.pages
    }

    /// Returns the lease, which is that of the request from now on.
    pub(super) fn keep(&self) -> Arc<Lease> {
        self.is_kept.set(true);
        Arc::clone(&self.lease)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.is_kept.get() {
            self.lease.unbind();
        }
    }
}
