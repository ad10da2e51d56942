//! The names of a plan's arrays.

use crate::base::DType;

/// One array of an [`ArenaPlan`](super::ArenaPlan); those of a group have its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanArray {
    /// Positions of the new tokens in their requests.
    Positions,
    /// The row of each request.
    ReqPoolIndices,
    /// Tokens of each request, including the new ones.
    SeqLens,
    /// Offsets of the new tokens of each request, ending with their total.
    QoIndptr,
    /// Slots of the entries that the new tokens complete; the padding slot for the others.
    OutCacheLoc(usize),
    /// Slots of the entries that the new tokens complete, int64; -1 for the others.
    SlotMapping(usize),
    /// Offsets of the units of each request in `KvIndices`, ending with their total.
    KvIndptr(usize),
    /// Entries in the last unit of each request.
    KvLastPageLen(usize),
    /// The units of all requests.
    KvIndices(usize),
    /// The units of each request by position in a line of its own, 0 where it has none.
    BlockTable(usize),
    /// The numbers of each request's state.
    StateIndices(usize),
}

impl PlanArray {
    pub(super) const fn dtype(self) -> DType {
        match self {
            Self::SlotMapping(_) => DType::I64,
            _ => DType::I32,
        }
    }
}
