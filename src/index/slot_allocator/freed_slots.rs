//! The slots of a free, in either form.

use crate::base::IndexVec;
use crate::index::SlotList;

/// The slots of a free.
#[derive(Clone, Copy, Debug)]
pub(in crate::index) enum FreedSlots<'a> {
    /// Numbers from a caller, which may be no slots.
    Values(&'a IndexVec),
    /// Slots as they were handed out.
    Runs(&'a SlotList),
}

impl<'a> From<&'a IndexVec> for FreedSlots<'a> {
    fn from(values: &'a IndexVec) -> Self {
        Self::Values(values)
    }
}

impl FreedSlots<'_> {
    pub(super) fn len(self) -> usize {
        match self {
            Self::Values(values) => values.len(),
            Self::Runs(slots) => slots.len(),
        }
    }

    /// Returns the slot, if there is only one.
    #[inline]
    pub(super) fn only(self) -> Option<i64> {
        match self {
            Self::Values(IndexVec::I32(values)) => match values[..] {
                [slot] => Some(slot.into()),
                _ => None,
            },
            Self::Values(IndexVec::I64(values)) => match values[..] {
                [slot] => Some(slot),
                _ => None,
            },
            Self::Runs(slots) => slots.iter().next().filter(|_| slots.len() == 1).map(i64::from),
        }
    }

    /// Calls `visit` with each slot.
    pub(super) fn for_each(self, visit: impl FnMut(i64)) {
        match self {
            Self::Values(values) => values.iter().for_each(visit),
            Self::Runs(slots) => slots.iter().map(i64::from).for_each(visit),
        }
    }
}
