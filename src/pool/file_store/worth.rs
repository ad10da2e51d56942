//! The worth of the pages of a store, and its time.
//!
//! The time is the number of pages that were looked up, used or stored.

use crate::cache::{PageHash, PageWorth, PolicyKind, Tick};
use crate::transfer::to_u64;

use super::layout::FileSlot;

/// The tokens of a page for the policy. The store does not know them.
const PAGE_TOKENS: u32 = 64;

/// What the pages of a store are worth.
#[derive(Debug)]
pub(super) struct StoreWorth {
    pub(super) pages: PageWorth<FileSlot>,
    /// The pages of the prompt that was looked up last whose time has passed and that were not used yet.
    ahead: usize,
}

impl StoreWorth {
    /// Creates the worth of the pages of a store with `count` slots. Recency needs none.
    pub(super) fn new(kind: PolicyKind, count: usize) -> Option<Self> {
        let is_recency = matches!(kind, PolicyKind::Lru);
        (!is_recency).then(|| Self { pages: PageWorth::new(kind, count, PAGE_TOKENS), ahead: 0 })
    }

    /// Records that a prompt of so many pages is looked up, which are used or stored after that.
    pub(super) fn look_up(&mut self, pages: usize) {
        self.pass(to_u64(pages));
        self.ahead = pages;
        self.pages.begin_request();
    }

    /// Records that a page is stored, which has no place in the order yet.
    pub(super) fn add(&mut self, slot: FileSlot, key: &PageHash) {
        self.pass_page();
        self.pages.add(slot, key);
    }

    /// Records a use of a page that has no place in the order now.
    pub(super) fn record_use(&mut self, slot: FileSlot) {
        if self.pages.is_due(slot) {
            self.pass_page();
            self.pages.record_use(slot);
        }
    }

    /// Lets the time pass in which a page is used.
    fn pass_page(&mut self) {
        if self.ahead > 0 {
            self.ahead -= 1;
        } else {
            self.pass(1);
        }
    }

    fn pass(&mut self, pages: u64) {
        let now = self.pages.now().tokens() + pages * u64::from(PAGE_TOKENS);
        self.pages.set_now(Tick::new(now));
    }
}
