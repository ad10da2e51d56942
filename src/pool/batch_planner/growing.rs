//! The growth of requests, until the table and the metadata are written.

use std::borrow::Cow;
use std::ops::Range;

use crate::base::{RequestRow, Result};
use crate::index::{Growth, PageList, Requests};
use crate::pool::slot_tensors::SlotsAt;

use super::metadata::GrownBatch;

/// A guard of requests that have grown. Dropping it before [`GrowthGuard::keep`] undoes the growth.
#[must_use]
pub(super) struct GrowthGuard<'a> {
    requests: &'a mut Requests,
    slots: SlotsAt<'a>,
    growths: Cow<'a, [Growth]>,
}

impl<'a> GrowthGuard<'a> {
    /// Grows the requests of a batch: see [`Requests::grow`]. Returns `None`, and changes nothing, if there
    /// are not enough pages.
    pub(super) fn batch(
        requests: &'a mut Requests,
        mut slots: SlotsAt<'a>,
        growths: &'a [Growth],
        prefixes: &mut [&mut PageList],
    ) -> Result<Option<Self>> {
        let has_grown = requests.grow(growths, prefixes, slots.slots_mut())?;
        Ok(has_grown.then_some(Self { requests, slots, growths: Cow::Borrowed(growths) }))
    }

    /// Gives a request the first tokens of another: see [`Requests::fork`]. Also returns the slots to copy to
    /// and from.
    pub(super) fn fork(
        requests: &'a mut Requests,
        mut slots: SlotsAt<'a>,
        [src, dst]: [RequestRow; 2],
        len: u32,
        leased: usize,
    ) -> Result<Option<(Self, [Range<u32>; 2])>> {
        let copied = requests.fork([src, dst], len, leased, slots.slots_mut())?;
        let growth = Growth { row: dst, ..Growth::padding(len) };
        Ok(copied.map(|copied| (Self { requests, slots, growths: Cow::Owned(vec![growth]) }, copied)))
    }

    /// Returns the grown requests as a batch of `padded_size`.
    pub(super) fn grown(&self, padded_size: usize) -> GrownBatch<'_> {
        GrownBatch { requests: self.requests, growths: &self.growths, padded_size }
    }

    /// Returns the requests of the planner.
    pub(super) const fn requests(&self) -> &Requests {
        self.requests
    }

    /// Returns the allocator of the slots.
    pub(super) const fn slots(&mut self) -> &mut SlotsAt<'a> {
        &mut self.slots
    }

    /// Keeps the growth.
    pub(super) fn keep(mut self) {
        self.growths = Cow::Borrowed(&[]);
    }
}

impl Drop for GrowthGuard<'_> {
    fn drop(&mut self) {
        self.requests.shrink(&self.growths, self.slots.slots_mut());
    }
}
