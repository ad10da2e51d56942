//! What pages are worth that are in no tree: those of a tier or a store, which knows them by their keys.
//!
//! A page is of use only together with those before it in its prompt. So the policy gets the last page of each run of
//! pages that were used together. The owner of the pages has them in such an order, and tells of their uses. All pages
//! count the same: where they are in a prompt is not known here.
//!
//! *Invariant.* The policy, or the list of the ended ones, has the last page of each run of those in the order.
//!
//! *Cost.* One call of the policy for each use, and some for each page that is added or evicted. Memory: 24 bytes for
//! each number of a page, and what the policy needs.

use std::hash::BuildHasher;
use std::ops::Range;

use foldhash::quality::FixedState;

use crate::base::{Id, Result, try_reserve, widen};

use super::{
    BlockKey, BlockTokens, History, NodeId, Novelty, Outlook, PageHash, Policy, PolicyKind, RecencyList,
    Remembered, Tick,
};

/// A use counts if as much as this part of the capacity was looked up since the last one.
const PARTS: u64 = 64;

/// The most pages that are passed over because they must stay, before the owner chooses.
const PASSED: usize = 8;

/// The place of a page in an order in which the end of a prompt comes before its beginning. Neighbours that were used
/// together are a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlaceInRun<I> {
    /// Whether no page of its run comes before it in the order, so that none is behind it in the prompt.
    is_last: bool,
    /// The next page of its run, which is before it in the prompt.
    before: Option<I>,
}

impl<I: Id> PlaceInRun<I> {
    /// Returns the place of a page in `order`, whose oldest pages come first.
    pub(crate) fn of(page: I, order: &RecencyList<I>, is_one_run: impl Fn(I, I) -> bool) -> Self {
        Self {
            is_last: order.older(page).is_none_or(|older| !is_one_run(older, page)),
            before: order.newer(page).filter(|&newer| is_one_run(newer, page)),
        }
    }
}

/// The histories of pages by number, and a policy that learns from them.
#[derive(Debug)]
pub(crate) struct PageWorth<I> {
    policy: Box<dyn Policy>,
    /// Those of numbers without a page are stale.
    histories: Vec<History>,
    page_tokens: u32,
    /// The tokens of a block, of which one page is remembered when it is evicted.
    block_tokens: u32,
    /// What is remembered of the last such page that the present request has added. It counts for those behind it, too.
    remembered: Remembered,
    /// The last pages of runs that are not used again, in the order in which they became the last.
    ended: RecencyList<I>,
    now: Tick,
    /// The time from a use to the next that counts.
    pause: u64,
}

impl<I: Id> PageWorth<I> {
    /// Creates the worth of pages of which there is room for `count`.
    pub(crate) fn new(kind: PolicyKind, count: usize, page_tokens: u32) -> Self {
        let (capacity, block) =
            (count as u64 * u64::from(page_tokens), BlockTokens::of_page_size(page_tokens));
        Self {
            policy: kind.policy(capacity, block, None),
            histories: Vec::new(),
            page_tokens,
            block_tokens: block.get(),
            remembered: Remembered::default(),
            ended: RecencyList::default(),
            now: Tick::default(),
            pause: capacity / PARTS,
        }
    }

    /// Makes room for the pages with numbers below `end`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has none.
    pub(crate) fn reserve_below(&mut self, end: usize) -> Result<()> {
        let more = end.saturating_sub(self.histories.len());
        try_reserve(&mut self.histories, more)?;
        self.histories.resize(end.max(self.histories.len()), History::default());
        Ok(())
    }

    /// Returns the time, in tokens that were looked up.
    pub(crate) const fn now(&self) -> Tick {
        self.now
    }

    /// Sets the time, which is not before the last one.
    pub(crate) fn set_now(&mut self, now: Tick) {
        self.now = now;
    }

    /// Records that the pages of another request are used or added from now on.
    pub(crate) fn begin_request(&mut self) {
        // How many of them are new is not known: of those that are not found, the policy may remember some.
        self.policy.record_request(0);
        self.remembered = Remembered::default();
    }

    /// Records that a page is added, which has no place in an order yet. That takes no memory for a number for which
    /// there [is room](Self::reserve_below).
    pub(crate) fn add(&mut self, page: I, key: &PageHash) {
        let (key, tokens) = (block_key(key), self.page_tokens);
        if self.is_remembered(key) {
            self.remembered = self.policy.record_publication(key, 0..self.block_tokens, self.now);
        }
        let history = History::of_new(self.remembered, Novelty::default(), self.now);
        self.policy.record_new(&history, tokens);
        let at = widen(page.number());
        self.histories.resize(self.histories.len().max(at + 1), History::default());
        self.histories[at] = history;
    }

    /// Returns whether a use of a page counts: as much was looked up since the last one as a part of the capacity. A
    /// request may look a page up, get it, and touch it.
    pub(crate) fn is_due(&self, page: I) -> bool {
        self.now.since(self.used(page)) >= self.pause
    }

    /// Records a use of a page that has no place in an order now, if it [counts](Self::is_due).
    pub(crate) fn record_use(&mut self, page: I) {
        if !self.is_due(page) {
            return;
        }
        let before = *self.history_mut(page);
        let after = before.used_again(Novelty::default(), self.now);
        self.policy.record_use(&before, &after, self.positions());
        *self.history_mut(page) = after;
    }

    /// Takes over what a cache above knows of a page that it gives up.
    pub(crate) fn record_given_up(&mut self, page: I, above: &History) {
        if above.used.since(self.used(page)) >= self.pause {
            self.record_use(page);
        }
        self.set_outlook(page, above.outlook);
    }

    fn set_outlook(&mut self, page: I, outlook: Outlook) {
        let before = *self.history_mut(page);
        if before.outlook != outlook {
            self.policy.record_outlook(&before, outlook, self.page_tokens);
            self.history_mut(page).outlook = outlook;
        }
    }

    /// Records that a page is evicted for another one.
    pub(crate) fn record_evicted(&mut self, page: I, key: &PageHash) {
        let (key, history) = (block_key(key), *self.history_mut(page));
        self.policy.record_evicted(self.positions(), &history, self.now);
        if self.is_remembered(key) {
            self.policy.remember(key, &history, self.now);
        }
    }

    /// Records that a page has got its place in an order. The last page of a run may be evicted from now on, and the one
    /// before it no more.
    pub(crate) fn enter(&mut self, page: I, place: PlaceInRun<I>) {
        if place.is_last {
            if let Some(before) = place.before {
                self.withdraw(before);
            }
            self.offer(page);
        }
    }

    /// Records that a page loses the place in the order that it [has got](Self::enter).
    pub(crate) fn leave(&mut self, page: I, place: PlaceInRun<I>) {
        if place.is_last {
            self.withdraw(page);
            if let Some(before) = place.before {
                self.offer(before);
            }
        }
    }

    /// Returns when a page was used last.
    pub(crate) fn used(&self, page: I) -> Tick {
        self.histories[widen(page.number())].used
    }

    /// Returns whether two pages were used at the same time, as those of a prompt are.
    pub(crate) fn are_used_together(&self, page: I, other: I) -> bool {
        self.used(page) == self.used(other)
    }

    fn offer(&mut self, page: I) {
        let history = *self.history_mut(page);
        if history.outlook == Outlook::Ended {
            self.ended.push(page);
        } else {
            self.policy.insert(NodeId::new(page.number()), self.positions(), &history, self.now);
        }
    }

    fn withdraw(&mut self, page: I) {
        if self.history_mut(page).outlook == Outlook::Ended {
            self.ended.remove(page);
        } else {
            self.policy.remove(NodeId::new(page.number()));
        }
    }

    /// Returns the page to evict first of those that may go, if it is soon found. There are `pages` in all.
    pub(crate) fn first(&mut self, pages: usize, may_go: impl Fn(I) -> bool) -> Option<I> {
        if let Some(ended) = self.ended.iter_oldest().find(|&page| may_go(page)) {
            return Some(ended);
        }
        self.policy.record_shortage(pages as u64 * u64::from(self.page_tokens), self.now);
        let mut passed = Vec::new();
        let found = loop {
            let Some(page) = self.policy.victim(self.now).map(|node| I::new(node.number())) else {
                break None;
            };
            if may_go(page) {
                break Some(page);
            }
            if passed.len() == PASSED {
                break None;
            }
            self.withdraw(page);
            passed.push(page);
        };
        for page in passed {
            self.offer(page);
        }
        found
    }

    /// Returns the size of the bookkeeping in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.histories.capacity() * size_of::<History>() + self.ended.bytes() + self.policy.bytes()
    }

    /// Returns whether a page is one that is remembered, as one of each block is on average. The positions are not known
    /// here, so the key decides.
    fn is_remembered(&self, key: BlockKey) -> bool {
        key.number().is_multiple_of(u64::from(self.block_tokens / self.page_tokens))
    }

    /// The positions of the tokens of a page, for the policy.
    const fn positions(&self) -> Range<u32> {
        0..self.page_tokens
    }

    fn history_mut(&mut self, page: I) -> &mut History {
        &mut self.histories[widen(page.number())]
    }
}

/// Returns the key of a page, the same in each process. What a caller has chosen need not be mixed.
fn block_key(key: &PageHash) -> BlockKey {
    BlockKey::new(FixedState::default().hash_one(key))
}
