//! The blocks that requests in a waiting queue have been found to need.
//!
//! A block that several requests need counts as of the earliest of them in the queue. The blocks of the last request are
//! taken first.
//!
//! *Cost.* A call for a block is logarithmic in the number of such blocks that are free, and linear in the requests
//! that need it. Memory: 24 bytes for each block of the engine, and some 50 for each block that a request needs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::base::{BlockId, Id, widen};

use super::QueueEnd;

/// A request in a waiting queue.
///
/// ```
/// use kvpool::cache::PolicyKind;
/// use kvpool::engines::{BlockTable, HashedBlocks, HashedTokens, QueueEnd, WaitingId};
/// let mut table = BlockTable::new(3);
/// table.evict_by(PolicyKind::Adaptive, 16);
/// let prompts = [b"a", b"b"].map(|hash| {
///     table.look_up(16, None);
///     let prompt = table.take(1).unwrap();
///     table.set_hash(prompt[0], HashedTokens { hash: hash[..].into(), tokens: None });
///     table.add_prompt(None, &prompt, None);
///     table.release(&prompt, HashedBlocks::Last);
///     prompt
/// });
/// let request: WaitingId = table.add_waiting(&prompts[0], QueueEnd::Back);
/// assert_eq!(table.take(2).unwrap()[1], prompts[1][0], "a waiting request needs the older prompt");
/// table.remove_waiting(request);
/// assert_eq!(table.take(1).unwrap(), prompts[0]);
/// assert_eq!(WaitingId::from(request.number()), request);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaitingId(i64);

impl WaitingId {
    /// Returns the number of the request: the lower, the earlier it is in the queue.
    #[must_use]
    pub const fn number(self) -> i64 {
        self.0
    }
}

impl From<i64> for WaitingId {
    fn from(number: i64) -> Self {
        Self(number)
    }
}

/// The blocks that waiting requests need.
#[derive(Debug, Default)]
pub(super) struct WaitingBlocks {
    /// The requests that need each block, the earliest first. Empty until a request waits.
    by_block: Vec<Vec<WaitingId>>,
    /// The blocks that each request was found to need.
    by_request: BTreeMap<WaitingId, Vec<BlockId>>,
    /// Those that can be taken, the first one first.
    offered: BTreeSet<(Reverse<WaitingId>, BlockId)>,
    /// The numbers of the requests that were added last at each end.
    last: i64,
    first: i64,
}

impl WaitingBlocks {
    /// Adds a request at an end of the queue.
    pub(super) fn add(&mut self, end: QueueEnd) -> WaitingId {
        let number = match end {
            QueueEnd::Back => &mut self.last,
            QueueEnd::Front => &mut self.first,
        };
        *number += if end == QueueEnd::Back { 1 } else { -1 };
        WaitingId(*number)
    }

    /// Records that a request needs a block, of `count` in all, which is not offered.
    pub(super) fn need(&mut self, request: WaitingId, block: BlockId, count: usize) {
        self.by_block.resize(count, Vec::new());
        let requests = &mut self.by_block[widen(block.number())];
        if let Err(at) = requests.binary_search(&request) {
            requests.insert(at, request);
            self.by_request.entry(request).or_default().push(block);
        }
    }

    /// Returns whether a request needs a block.
    pub(super) fn needs(&self, block: BlockId) -> bool {
        self.first_request(block).is_some()
    }

    /// Removes a request, and returns the blocks that it was found to need. [`Self::end_need`] ends that for each.
    pub(super) fn remove(&mut self, request: WaitingId) -> Vec<BlockId> {
        self.by_request.remove(&request).unwrap_or_default()
    }

    /// Ends the need of a request for a block, which is not offered.
    pub(super) fn end_need(&mut self, request: WaitingId, block: BlockId) {
        if let Some(requests) = self.by_block.get_mut(widen(block.number())) {
            requests.retain(|&other| other != request);
        }
    }

    /// Ends the need of all requests for a block, which is not offered and holds another prompt from now on.
    pub(super) fn forget(&mut self, block: BlockId) {
        if let Some(requests) = self.by_block.get_mut(widen(block.number())) {
            requests.clear();
        }
    }

    /// Offers a block that a request needs.
    pub(super) fn offer(&mut self, block: BlockId) {
        self.offered.extend(self.first_request(block).map(|request| (Reverse(request), block)));
    }

    /// Withdraws a block that was offered.
    pub(super) fn withdraw(&mut self, block: BlockId) {
        if let Some(request) = self.first_request(block) {
            self.offered.remove(&(Reverse(request), block));
        }
    }

    /// Returns the block to take first of those that are offered.
    pub(super) fn first(&self) -> Option<BlockId> {
        self.offered.first().map(|&(_, block)| block)
    }

    /// Returns the earliest request that needs a block.
    fn first_request(&self, block: BlockId) -> Option<WaitingId> {
        self.by_block.get(widen(block.number()))?.first().copied()
    }
}
