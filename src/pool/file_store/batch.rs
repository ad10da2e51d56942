//! Pages of a transfer, for the threads of a store.

use std::sync::Arc;

use crate::cache::PageHash;
use crate::memory::HostRow;
use crate::pool::StoreTransfer;

/// The pages that a transfer moves.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) keys: Vec<PageHash>,
    pub(super) transfer: Arc<StoreTransfer>,
}

/// A page of a transfer that a thread works on. It is done when this drops.
#[derive(Debug)]
pub(super) struct PageWork {
    pub(super) batch: Arc<Batch>,
    pub(super) page: usize,
    /// The memory that the page moves to or from.
    pub(super) row: HostRow,
    pub(super) is_present: bool,
}

impl PageWork {
    /// Creates the work on a page of `batch`, with the page's row, which no other work has.
    pub(super) fn new(batch: &Arc<Batch>, page: usize, row: Option<HostRow>) -> Self {
        let row = row.expect("a page of a batch is worked on once");
        Self { batch: Arc::clone(batch), page, row, is_present: false }
    }

    pub(super) fn key(&self) -> &PageHash {
        &self.batch.keys[self.page]
    }
}

impl Drop for PageWork {
    fn drop(&mut self) {
        self.batch.transfer.finish(self.page, self.is_present);
    }
}
