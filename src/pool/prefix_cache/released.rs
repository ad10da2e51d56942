//! Pages and snapshots on their way back to their pools.

use std::sync::Arc;

use crate::base::{Epoch, Page, StateSlot};
use crate::cache::Hold;
use crate::memory::Stream;
use crate::pool::slot_tensors::CopiedPages;
use crate::transfer::Transfer;

/// Pages and snapshots to be given back.
#[derive(Debug, Default)]
pub(super) struct ReleasedPieces {
    pub(super) pages: Vec<Page>,
    /// The copies that may still use some of the pages.
    pub(super) page_copies: Vec<CopiedPages>,
    /// The snapshots, each with the copy that may still use its slot.
    pub(super) states: Vec<(StateSlot, Option<Arc<Transfer>>)>,
}

/// The rest of a load, to be given back.
#[derive(Debug)]
pub(super) struct EndedLoad {
    /// The copy that may still write to the pages and to the state.
    pub(super) copy: Arc<Transfer>,
    /// Pages that the tree did not take.
    pub(super) pages: Vec<Page>,
    /// The snapshot, if the tree did not take it.
    pub(super) state: Option<StateSlot>,
    /// Keeps the pages that the tree took.
    pub(super) hold: Option<Hold>,
    /// The epoch of the allocator in which the pages were taken.
    pub(super) epoch: Epoch,
    /// The stream on which the pages are freed.
    pub(super) stream: Stream,
}

impl EndedLoad {
    /// Returns the hold, and the pieces with the copy that their next owners come after.
    pub(super) fn into_pieces(self) -> (Option<Hold>, ReleasedPieces) {
        let Self { copy, pages, state, hold, .. } = self;
        let page_copies = vec![CopiedPages { copy: Arc::clone(&copy), pages: pages.clone() }];
        let states = state.map(|state| (state, Some(copy))).into_iter().collect();
        (hold, ReleasedPieces { pages, page_copies, states })
    }
}
