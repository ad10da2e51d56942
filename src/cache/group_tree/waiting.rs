//! Requests in the engine's waiting queue: the tree keeps the blocks that they will find, and the units of windows and
//! chunks at the end of these count them among what needs them.
//!
//! When nothing else is left, the requests give up these units, the last one first: what they need is not locked.

use std::collections::{BTreeMap, BTreeSet};

use super::{GroupTree, Namespace, Rules, Tokens};
use crate::base::{KeyMap, Page, Result};
use crate::cache::{WaitingId, WaitingRank};

/// Where waiting requests would go on.
#[derive(Debug, Default)]
pub(super) struct WaitingPlaces {
    /// The places, by their last blocks.
    by_block: KeyMap<Page, Place>,
    by_request: BTreeMap<WaitingId, Page>,
}

/// The end of what some requests need.
#[derive(Debug)]
struct Place {
    tokens: usize,
    requests: BTreeSet<WaitingId>,
}

impl WaitingPlaces {
    /// Returns the last blocks and the lengths of all places.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Page, usize)> + '_ {
        self.by_block.iter().map(|(&block, place)| (block, place.tokens))
    }

    /// Returns the size of the bookkeeping in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.by_block.capacity() * (size_of::<(Page, Place)>() + 1)
            + self.by_request.len() * (size_of::<(WaitingId, Page)>() + size_of::<WaitingId>())
    }
}

impl GroupTree {
    /// Adds a request that waits until it is served: see [`Tree::add_waiting`](super::Tree::add_waiting).
    pub fn add_waiting(&mut self, rank: WaitingRank) -> WaitingId {
        self.tree.add_waiting(rank)
    }

    /// Looks up what a waiting request would find, of at most `limit` tokens: see
    /// [`Tree::look_up_waiting`](super::Tree::look_up_waiting).
    ///
    /// # Errors
    /// See [`Tree::look_up_waiting`](super::Tree::look_up_waiting).
    pub fn look_up_waiting(
        &mut self,
        request: WaitingId,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<usize> {
        let Self { tree, groups, page_size, step, blocks, .. } = self;
        let rules = Rules { groups, page_size: *page_size, step: *step };
        let len = tree.look_up_waiting_at(request, namespace, tokens, limit, |tree, place| {
            tree.place_before(place, rules.usable(tree, blocks, place))
        })?;
        self.leave_place(request);
        let has_counted = (0..self.groups.len()).any(|group| self.blocks.is_counted(group));
        if let Some(last) = self.tree.waiting_page(request).filter(|_| has_counted) {
            let place = || Place { tokens: len, requests: BTreeSet::new() };
            let requests = &mut self.waiting.by_block.entry(last).or_insert_with(place).requests;
            requests.insert(request);
            let is_new = requests.len() == 1;
            self.waiting.by_request.insert(request, last);
            if is_new {
                self.blocks.count_needs(&self.groups, self.page_size, last, len, true);
            }
        }
        Ok(len)
    }

    /// Removes a request that waits: see [`Tree::remove_waiting`](super::Tree::remove_waiting).
    pub fn remove_waiting(&mut self, request: WaitingId) {
        self.leave_place(request);
        self.tree.remove_waiting(request);
    }

    /// Lets the requests of `earlier`, which is no longer used, wait here, too. They need nothing until they are looked up.
    pub(crate) fn keep_waiting_of(&mut self, earlier: &mut Self) {
        self.tree.keep_waiting_of(&mut earlier.tree);
    }

    /// Lets the last request in the queue that needs units of windows or chunks need them no longer. Returns whether there
    /// was one.
    pub(super) fn give_up_last_place(&mut self) -> bool {
        let Some((&request, _)) = self.waiting.by_request.last_key_value() else { return false };
        self.leave_place(request);
        true
    }

    /// Ends a request's need for the units at the end of what it was found to need.
    fn leave_place(&mut self, request: WaitingId) {
        let Some(last) = self.waiting.by_request.remove(&request) else { return };
        let Some(place) = self.waiting.by_block.get_mut(&last) else { return };
        place.requests.remove(&request);
        if place.requests.is_empty() {
            self.forget_place(last);
        }
    }

    /// Ends all needs for the units at the end of a block, which may be evicted.
    pub(super) fn forget_place(&mut self, block: Page) {
        if let Some(Place { tokens, requests }) = self.waiting.by_block.remove(&block) {
            for request in requests {
                self.waiting.by_request.remove(&request);
            }
            self.blocks.count_needs(&self.groups, self.page_size, block, tokens, false);
        }
    }
}
