//! The worth of the pages of a store, and its time.
//!
//! The time is the number of pages that were looked up, used or stored.

use crate::base::Result;
use crate::cache::{PageHash, PageWorth, PlaceInRun, PolicyKind, Tick};
use crate::transfer::to_u64;

use super::layout::FileSlot;

/// The tokens of a page for the policy. The store does not know them.
const PAGE_TOKENS: u32 = 64;

/// What the pages of a store are worth.
#[derive(Debug)]
pub(super) struct Worth {
    pages: PageWorth<FileSlot>,
    /// The pages of the prompt that was looked up last whose time has passed and that were not used yet.
    ahead: usize,
}

impl Worth {
    /// Creates the worth of the pages of a store with `count` slots. Recency needs none.
    pub(super) fn new(kind: PolicyKind, count: usize) -> Option<Self> {
        let is_recency = matches!(kind, PolicyKind::Lru);
        (!is_recency).then(|| Self { pages: PageWorth::new(kind, count, PAGE_TOKENS), ahead: 0 })
    }

    /// Makes room for the pages of the slots below `end`.
    pub(super) fn reserve_below(&mut self, end: usize) -> Result<()> {
        self.pages.reserve_below(end)
    }

    /// Records that a prompt of so many pages is looked up, which are used or stored after that.
    pub(super) fn look_up(&mut self, pages: usize) {
        self.pass(to_u64(pages));
        self.ahead = pages;
        self.begin_request();
    }

    /// Records that the pages of another request are used or stored from now on.
    pub(super) fn begin_request(&mut self) {
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

    /// Records that a page is evicted for another one.
    pub(super) fn record_evicted(&mut self, slot: FileSlot, key: &PageHash) {
        self.pages.record_evicted(slot, key);
    }

    /// Records that a page has got its place in the order.
    pub(super) fn enter(&mut self, slot: FileSlot, place: PlaceInRun<FileSlot>) {
        self.pages.enter(slot, place);
    }

    /// Records that a page loses its place in the order.
    pub(super) fn leave(&mut self, slot: FileSlot, place: PlaceInRun<FileSlot>) {
        self.pages.leave(slot, place);
    }

    /// Returns the page to evict first of those that may go, if it is soon found. The store has `pages`.
    pub(super) fn first(&mut self, pages: usize, may_go: impl Fn(FileSlot) -> bool) -> Option<FileSlot> {
        self.pages.first(pages, may_go)
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
