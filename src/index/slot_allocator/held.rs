//! What a caller knows of the slots that it frees.

use crate::base::Page;
use crate::index::free_times::Moment;

use super::SlotAllocator;

/// What a caller knows of values that it frees: a list in which they were handed out to it.
///
/// With it, a free is told from a stale one, of pages that were freed and handed out again since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The moment when the pages were taken.
    pub since: Moment,
    /// Whether a free of the whole list has ended the hold.
    pub is_over: bool,
    /// Whether the values are the whole list as it was handed out, and no other list has their pages. If none of
    /// them is stale, the caller records the end of the hold itself, which costs less than to record it for
    /// each of many scattered pages.
    pub is_whole: bool,
}

impl Held {
    /// Returns whether a caller with this hold no longer has `page`, which is in use, in `slots`.
    pub(super) fn is_stale(self, page: Page, slots: &SlotAllocator) -> bool {
        self.is_over || slots.is_freed_since(page, self.since)
    }
}
