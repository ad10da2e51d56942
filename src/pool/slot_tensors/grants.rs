//! The tensors in which slots were handed out, by address, so that a free of one is told from a stale one.

use crate::base::{Id, IndexVec, Life, LifeMark, LifeMarks, Result, Slot, try_reserve};
use crate::index::{Held, Moment};

use super::source::{Source, TensorOrigin, Writes, needs_proof};

/// Slots as they were handed out, in one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listing {
    /// The address of the first slot.
    pub(super) address: usize,
    /// The number of slots.
    pub(super) count: usize,
    /// The size of a slot in bytes.
    pub(super) size: usize,
    /// The first slot, if it is known that the slots ascend by one.
    pub(super) run: Option<Slot>,
    /// Whether some slots are in pages of earlier tensors.
    pub(super) continues: bool,
}

/// A tensor of slots that may be alive.
#[derive(Clone, Copy, Debug)]
struct Grant {
    listing: Listing,
    /// The moment when the slots were taken.
    since: Moment,
    /// The number of tensors before it that continue pages.
    continuing: u64,
    /// Whether a free of the whole tensor has ended its hold.
    is_over: bool,
    mark: LifeMark,
}

impl Grant {
    const fn end(&self) -> usize {
        self.listing.address + self.listing.count * self.listing.size
    }

    /// Returns whether `values`, read from `address` on, are those that were handed out there. `None` if that
    /// is not known without the framework.
    fn has_unchanged(&self, values: &IndexVec, origin: &TensorOrigin<'_>) -> Option<bool> {
        let Listing { address, size, run, .. } = self.listing;
        let (first, step) = (i64::from(run?.number()), origin.step?);
        let (begin, distance) = ((origin.address - address) / size, i64::try_from(step).ok()?);
        let mut expected = first.checked_add(i64::try_from(begin).ok()?)?;
        for value in values.iter() {
            if value != expected {
                return Some(false);
            }
            expected += distance;
        }
        Some(true)
    }
}

/// The tensors of slots that may be alive, by address. Dead ones are forgotten from time to time.
#[derive(Debug, Default)]
pub(super) struct Grants {
    /// In ascending order. No two overlap.
    by_address: Vec<Grant>,
    marks: LifeMarks,
    /// The number of tensors so far that continue pages of earlier ones.
    continuing: u64,
    /// The number of grants at which the dead ones are looked for.
    sweep_at: usize,
}

impl Grants {
    /// Makes room for one more tensor, so that [`Grants::add`] cannot fail.
    #[inline]
    pub(super) fn reserve(&mut self) -> Result<()> {
        if self.by_address.len() >= self.sweep_at {
            self.sweep()?;
        }
        self.marks.reserve()
    }

    #[cold]
    fn sweep(&mut self) -> Result<()> {
        /// Fewer tensors are not worth a search.
        const FEW: usize = 64;
        let Self { by_address, marks, .. } = self;
        by_address.retain(|grant| {
            let is_over = grant.mark.is_over();
            if is_over {
                marks.reuse(grant.mark);
            }
            !is_over
        });
        let sweep_at = FEW.max(2 * by_address.len());
        try_reserve(by_address, sweep_at - by_address.len())?;
        self.sweep_at = sweep_at;
        Ok(())
    }

    /// Adds a tensor of slots that were taken at `since`. The tensor keeps the life that is returned.
    #[inline]
    pub(super) fn add(&mut self, listing: Listing, since: Moment) -> Life {
        let (life, mark) = self.marks.begin();
        let added = Grant { listing, since, continuing: self.continuing, is_over: false, mark };
        self.continuing += u64::from(listing.continues);
        // Memory that is used again had tensors that are dead.
        let end = self.by_address.partition_point(|grant| grant.listing.address < added.end());
        // As a rule it is the same piece again.
        if let Some(grant) = self.by_address[..end].last_mut()
            && grant.listing.address == listing.address
        {
            self.marks.reuse(std::mem::replace(grant, added).mark);
            return life;
        }
        let mut begin = end;
        while begin > 0 && self.by_address[begin - 1].end() > listing.address {
            begin -= 1;
        }
        if begin == end {
            self.by_address.insert(begin, added);
            return life;
        }
        for grant in &self.by_address[begin..end] {
            self.marks.reuse(grant.mark);
        }
        self.by_address[begin] = added;
        self.by_address.drain(begin + 1..end);
        life
    }

    /// Returns the tensor that has `address`, if it is alive.
    #[inline]
    fn find(&self, address: usize) -> Option<usize> {
        let at = self.by_address.partition_point(|grant| grant.listing.address <= address).checked_sub(1)?;
        let grant = &self.by_address[at];
        (address < grant.end() && !grant.mark.is_over()).then_some(at)
    }

    /// Returns the moment when the slots of the tensor at `address` were taken, if it is alive.
    pub(super) fn since(&self, address: usize) -> Option<Moment> {
        self.find(address).map(|at| self.by_address[at].since)
    }

    /// Works like [`Self::held`], for a few runs of slots: to record the free of each costs little.
    pub(super) fn held_as_runs(&self, source: &Source<'_>) -> Option<Held> {
        let grant = &self.by_address[self.find(source.origin.address)?];
        Some(Held { since: grant.since, is_over: grant.is_over, is_whole: false })
    }

    /// Returns what a caller knows of values that it has read from `source`; `None` if they are of no tensor
    /// that is alive.
    ///
    /// # Errors
    /// [`Unproven`] if the values may have been written there, and the answer matters.
    #[inline]
    pub(super) fn held(
        &self,
        values: &IndexVec,
        source: &Source<'_>,
    ) -> std::result::Result<Option<HeldGrant>, Unproven> {
        let Source { origin, writes } = source;
        let Some(at) = self.find(origin.address) else { return Ok(None) };
        let grant = &self.by_address[at];
        let Listing { address, count, .. } = grant.listing;
        // A tensor that continues pages may share them with any before it.
        let may_be_whole = grant.continuing == self.continuing
            && address == origin.address
            && values.len() == count
            && origin.step == Some(1)
            && needs_proof(values);
        let is_whole = may_be_whole && writes.ok_or(Unproven)? == Writes::None;
        let held = Held { since: grant.since, is_over: grant.is_over, is_whole };
        Ok(Some(HeldGrant { at, held }))
    }

    /// Returns whether values that were read from `source` are what was handed out there. A tensor whose writes
    /// nobody counts is taken for what it was: the alternative is to believe it.
    ///
    /// # Errors
    /// [`Unproven`] if the values may have been written there.
    pub(super) fn is_unwritten(
        &self,
        grant: HeldGrant,
        values: &IndexVec,
        source: &Source<'_>,
    ) -> std::result::Result<bool, Unproven> {
        let is_unwritten = source.writes.map(|writes| writes != Writes::Some);
        self.by_address[grant.at].has_unchanged(values, &source.origin).or(is_unwritten).ok_or(Unproven)
    }

    /// Records that a free of the whole tensor has ended its hold.
    pub(super) fn end(&mut self, held: HeldGrant) {
        self.by_address[held.at].is_over = true;
    }
}

/// A hold, and the tensor it is of.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldGrant {
    at: usize,
    pub(super) held: Held,
}

/// It must be known first whether a tensor was written to: see [`Source::prove`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Unproven;

impl Drop for Grants {
    fn drop(&mut self) {
        LifeMarks::give_up(self.by_address.drain(..).map(|grant| grant.mark));
    }
}
