//! Leases that a planner's requests take over, and their ends.

use std::cell::Cell;
use std::sync::Arc;

use crate::base::bounded::narrow;
use crate::base::{Epoch, Error, Result, try_with_capacity};
use crate::index::{AdoptedUnits, KeptUnits};
use crate::pool::{ArenaLease, CacheArena};

/// A lease that is to become that of a request. Dropping it before [`ArenaClaim::keep`] leaves the lease as it was.
#[derive(Debug)]
pub(super) struct ArenaClaim {
    lease: Arc<ArenaLease>,
    /// The tokens of the lease.
    pub(super) len: u32,
    /// The units of each group of pages.
    pub(super) cached: Vec<AdoptedUnits>,
    /// The numbers of the snapshot of each group of states.
    pub(super) snapshots: Vec<Vec<u32>>,
    is_kept: Cell<bool>,
}

impl ArenaClaim {
    /// Claims a lease of units of `arena`.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a lease of another arena, or without a unit that
    /// the next token sees; [`ErrorKind::State`](crate::base::ErrorKind::State) for another request's; the errors of a
    /// lease.
    pub(super) fn new(lease: &Arc<ArenaLease>, arena: &Arc<CacheArena>) -> Result<Self> {
        if !Arc::ptr_eq(lease.arena(), arena) {
            return Err(Error::argument("a lease is of another arena than the planner's"));
        }
        lease.bind()?;
        // From here on, dropping it unbinds the lease.
        let mut claim = Self {
            lease: Arc::clone(lease),
            len: 0,
            cached: Vec::new(),
            snapshots: Vec::new(),
            is_kept: Cell::new(false),
        };
        claim.len = narrow(lease.len()?);
        for (group, declared) in arena.layout().groups().iter().enumerate() {
            let leased = lease.units(group)?;
            let mut units = try_with_capacity(leased.sinks.len() + leased.units.len())?;
            units.extend(leased.sinks.iter().copied().chain(leased.units.iter().flatten().copied()));
            let sinks = leased.sinks.len();
            if units.len() != sinks + leased.units.len() {
                return Err(Error::argument(format!(
                    "a lease of {} tokens lacks units of group {} that the next token sees; match the prefix again",
                    claim.len,
                    declared.name()
                )));
            }
            if declared.unit_tokens(arena.layout().page_size()).is_none() {
                if claim.len > 0 && units.is_empty() {
                    return Err(Error::argument(format!(
                        "a lease of {} tokens has no snapshot of group {}; match the prefix again",
                        claim.len,
                        declared.name()
                    )));
                }
                claim.cached.push(AdoptedUnits::default());
                claim.snapshots.push(units);
                continue;
            }
            let first = leased.first.max(sinks);
            let kept = KeptUnits {
                sinks: narrow(sinks),
                first: narrow(first),
                end: narrow(first + leased.units.len()),
            };
            claim.cached.push(AdoptedUnits { kept, units });
            claim.snapshots.push(Vec::new());
        }
        Ok(claim)
    }

    /// Checks that the units are still those of the arena.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) when it was cleared meanwhile.
    pub(super) fn check(&self, epoch: Epoch) -> Result<()> {
        if self.lease.epoch() == epoch {
            return Ok(());
        }
        Err(Error::stale("the lease cannot be used: the arena was cleared, and its units are gone"))
    }

    /// Returns the lease, which is that of the request from now on.
    pub(super) fn keep(&self) -> Arc<ArenaLease> {
        self.is_kept.set(true);
        Arc::clone(&self.lease)
    }
}

impl Drop for ArenaClaim {
    fn drop(&mut self) {
        if !self.is_kept.get() {
            self.lease.unbind();
        }
    }
}

/// The end of a request's lease, a call of the cache: dropping it releases the lease.
#[derive(Debug)]
pub(super) struct ArenaLeaseEnd(pub(super) Arc<ArenaLease>);

impl Drop for ArenaLeaseEnd {
    fn drop(&mut self) {
        self.0.end();
    }
}
