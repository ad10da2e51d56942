//! Publications of a planner's requests: their units become the cache's.
//!
//! The cache's lock comes before the planner's, so a request gives its units up first, and then the cache takes them.

use std::sync::Arc;

use crate::base::bounded::narrow;
use crate::base::{Epoch, Error, Id, IndexVec, RequestRow, Result, try_collect, try_with_capacity, widen};
use crate::memory::Stream;
use crate::pool::{ArenaLease, CacheArena};

use super::state::PlannerState;

/// What a request has given up to be published.
pub(super) struct HandedOver {
    row: RequestRow,
    /// The generation of the row.
    generation: u32,
    epoch: Epoch,
    pub(super) lease: Arc<ArenaLease>,
    /// The leased tokens before.
    leased: u32,
    /// The leased tokens afterwards.
    tokens: u32,
    /// The units by group.
    pub(super) units: Vec<Vec<Option<u32>>>,
    /// The numbers of the request's state, by group.
    states: Vec<Vec<i64>>,
}

impl HandedOver {
    /// Takes snapshots of the states, copies of them on `stream`. There are none if the arena is short.
    ///
    /// # Errors
    /// The errors of [`CacheArena::copy`] for driver calls;
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot list the units. Nothing is
    /// taken.
    pub(super) fn take_snapshots(&mut self, arena: &CacheArena, stream: Stream) -> Result<Vec<Vec<u32>>> {
        let wanted = try_collect(self.states.iter().map(Vec::len))?;
        let Some(taken) = arena.take_held(self.epoch, &wanted, stream)? else { return Ok(Vec::new()) };
        self.copy_states(arena, &taken, stream).inspect_err(|_| self.free(arena, &taken))?;
        Ok(taken)
    }

    /// Copies the states to units that were taken for them, and adds these to the others.
    fn copy_states(&mut self, arena: &CacheArena, taken: &[Vec<u32>], stream: Stream) -> Result<()> {
        for (group, (units, states)) in taken.iter().zip(&self.states).enumerate() {
            if units.is_empty() {
                continue;
            }
            let targets = try_collect(units.iter().map(|&unit| i64::from(unit)))?;
            let snapshot = try_collect(units.iter().copied().map(Some))?;
            arena.copy_units(group, &targets, states, stream)?;
            self.units[group] = snapshot;
        }
        Ok(())
    }

    /// Frees units that nobody has any more.
    pub(super) fn free(&self, arena: &CacheArena, units: &[Vec<u32>]) {
        // A cleared arena has them already.
        let _ = arena.in_epoch(self.epoch, |slabs| {
            for (group, units) in units.iter().enumerate() {
                slabs.free_held(group, units);
            }
        });
    }
}

impl PlannerState {
    /// Takes the units of the first `tokens` tokens behind its lease from a request, which cannot grow or shrink until
    /// [`Self::record_published`] or [`Self::take_back`].
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) for a request without a lease, or that another thread
    /// publishes; [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for fewer tokens than the lease has, for
    /// more than the request has, and for a snapshot of fewer.
    pub(super) fn hand_over(&mut self, row: i64, tokens: usize, snapshot: bool) -> Result<HandedOver> {
        let row = self.resolve(&IndexVec::I64(vec![row]))?[0];
        if let Some(error) = self.tables.cleared_error(0, row) {
            return Err(error);
        }
        let Some(lease) = self.leases[widen(row.number())].clone() else {
            let text = format!(
                "request row {row} has no lease to publish through; extend it with one, which may be of length 0"
            );
            return Err(Error::state(text));
        };
        let (has, leased) = (self.tables.len(row), self.tables.leased(row));
        if tokens > widen(has) || (snapshot && tokens < widen(has)) {
            let what = if snapshot { "a snapshot is of all of them, not of" } else { "it cannot publish" };
            return Err(Error::argument(format!(
                "request row {row} has {has} tokens with units; {what} {tokens}"
            )));
        }
        if tokens < widen(leased) {
            return Err(Error::argument(format!(
                "request row {row} has {leased} tokens in its lease; it cannot publish the first {tokens}"
            )));
        }
        self.tables.check_not_handing_over(0, row)?;
        let mut states = try_with_capacity(self.tables.groups())?;
        for group in 0..self.tables.groups() {
            let is_wanted = snapshot && self.tables.rule(group).is_state();
            let line = if is_wanted { self.tables.line(group, row) } else { &[] };
            states.push(try_collect(line.iter().map(|&unit| i64::from(unit)))?);
        }
        let tokens = narrow(tokens);
        let units = self.tables.hand_over(row, tokens)?;
        let (generation, epoch) = (self.rows.generation(row), self.epoch);
        Ok(HandedOver { row, generation, epoch, lease, leased, tokens, units, states })
    }

    /// Returns whether the request that gave units up is still there.
    fn is_there(&self, handed: &HandedOver) -> bool {
        self.epoch == handed.epoch
            && self.rows.rows().is_live(handed.row)
            && self.rows.generation(handed.row) == handed.generation
    }

    /// Records the cache's units in the place of those that a request has given up.
    pub(super) fn record_published(&mut self, handed: &HandedOver, units: &[Vec<Option<u32>>]) {
        if !self.is_there(handed) {
            return;
        }
        let changed = self.tables.replace_leased(handed.row, [handed.leased, handed.tokens], units);
        for (lines, changed) in self.arrays.lines.iter_mut().zip(&changed) {
            if let (Some(lines), Some(changed)) = (lines, changed) {
                lines.table.truncate(handed.row, widen(*changed));
            }
        }
        self.changes += 1;
    }

    /// Gives units back to the request that gave them up, or to the arena if it is gone.
    pub(super) fn take_back(&mut self, arena: &CacheArena, handed: &HandedOver) {
        if self.is_there(handed) {
            self.tables.take_back(handed.row, handed.leased);
            return;
        }
        // A cleared arena has them already.
        let _ = arena.in_epoch(handed.epoch, |slabs| {
            // Snapshots were freed by whoever took them.
            let of_pages =
                handed.units.iter().enumerate().filter(|(group, _)| !self.tables.rule(*group).is_state());
            for (group, units) in of_pages {
                // One by one: a list of them may not fit the host's memory.
                units.iter().flatten().for_each(|unit| slabs.free_held(group, &[*unit]));
            }
        });
    }
}
