//! Lengths and last slots of the requests of a batch.

use std::borrow::Cow;

use crate::base::bounded::{int32, unsigned};
use crate::base::{Device, Result, try_with_capacity};
use crate::index::LastLoc;
use crate::kernels::Indices;
use crate::memory::BorrowedTensor;
use crate::pool::mirror::known_values;

/// The last slots of the requests of a batch.
#[derive(Debug)]
pub(in crate::pool) enum LastLocs<'a> {
    /// The slots are on the host.
    Known(Cow<'a, [i64]>),
    /// The slots are in a tensor on the device of the pool, whose values the host does not have.
    OnDevice(&'a BorrowedTensor<'a>),
}

impl<'a> LastLocs<'a> {
    /// Returns the values of `last_loc`, which is on the host or on `device`.
    pub(in crate::pool) fn new(last_loc: &'a Indices<'_>, device: Device) -> Result<Self> {
        match last_loc {
            Indices::Host(values) => values.as_i64().map(Self::Known),
            Indices::Device { tensor, version } => match known_values(tensor, *version) {
                Some(values) => values.into_i64().map(|slots| Self::Known(slots.into())),
                None => tensor.check_on(device, "last_loc").map(|()| Self::OnDevice(tensor)),
            },
        }
    }

    pub(super) fn of_index(&self) -> LastLoc<'_> {
        match self {
            Self::Known(slots) => LastLoc::Known(slots),
            Self::OnDevice(tensor) => LastLoc::OnDevice(tensor.shape().numel()),
        }
    }
}

/// Lengths of the requests of a batch.
#[derive(Clone, Copy, Debug)]
pub(in crate::pool) struct BatchLens<'a> {
    /// Tokens that each request has now.
    pub(in crate::pool) prefix: &'a [i64],
    /// Tokens that each request will have.
    pub(in crate::pool) seq: &'a [i64],
}

impl BatchLens<'_> {
    /// Returns the number of slots that the requests take at most. The lengths may be invalid.
    pub(super) fn max_slots(self, page_size: usize) -> usize {
        let grown = self.prefix.iter().zip(self.seq).filter_map(|(prefix, seq)| seq.checked_sub(*prefix));
        let tokens = grown.filter_map(|tokens| usize::try_from(tokens).ok());
        tokens.fold(0, |slots: usize, tokens| slots.saturating_add(tokens).saturating_add(page_size))
    }

    /// Returns for each request the number of slots in its last page, 0 if that page is full, and the offset
    /// of its new slots in the batch; and, last, the end of all offsets. Call it after slots were taken.
    pub(super) fn in_pages(self, page_size: usize) -> Result<(Vec<i32>, Vec<i32>)> {
        let (mut offsets, mut indptr) =
            (try_with_capacity(self.prefix.len())?, try_with_capacity(self.seq.len() + 1)?);
        let mut end = 0;
        indptr.push(end);
        for (&prefix, &seq) in self.prefix.iter().zip(self.seq) {
            offsets.push(int32(unsigned(prefix) % page_size));
            end += int32(unsigned(seq - prefix));
            indptr.push(end);
        }
        Ok((offsets, indptr))
    }

    /// Returns the number of slots in the pages that the requests begin. Call it after the lengths were
    /// checked.
    pub(super) fn new_slots(self, page_size: usize) -> usize {
        let pages = |len: i64| usize::try_from(len).expect("lengths were checked").div_ceil(page_size);
        let pages = self.prefix.iter().zip(self.seq).map(|(&prefix, &seq)| pages(seq) - pages(prefix));
        pages.fold(0, usize::saturating_add).saturating_mul(page_size)
    }
}
