//! The blocks that requests in a waiting queue have been found to need.
//!
//! Each block belongs to one request at most: the first that was found to need it, until the block is used or loses
//! its hash. The blocks of the request that waits longest are taken last.
//!
//! *Cost.* A call for a block is logarithmic in the number of such blocks that are free. Memory: 8 bytes for each
//! block of the engine, and 4 more for each block that a request needs.

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
    /// The request that needs each block, if there is one. Empty until a request waits.
    by_block: Vec<Option<WaitingId>>,
    /// The blocks that were given to each request.
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

    /// Gives a request a block, of `count` in all, unless another one has it.
    pub(super) fn give(&mut self, request: WaitingId, block: BlockId, count: usize) {
        self.by_block.resize(count, None);
        let place = &mut self.by_block[widen(block.number())];
        if place.is_none() {
            *place = Some(request);
            self.by_request.entry(request).or_default().push(block);
        }
    }

    /// Returns whether a request needs a block.
    pub(super) fn needs(&self, block: BlockId) -> bool {
        self.request_of(block).is_some()
    }

    /// Takes a block from the request that has it. It must not be offered.
    pub(super) fn take(&mut self, block: BlockId) {
        if let Some(place) = self.by_block.get_mut(widen(block.number())) {
            *place = None;
        }
    }

    /// Removes a request, and returns the blocks that were given to it and that it still needs.
    pub(super) fn remove(&mut self, request: WaitingId) -> Vec<BlockId> {
        let mut blocks = self.by_request.remove(&request).unwrap_or_default();
        blocks.retain(|&block| self.request_of(block) == Some(request));
        blocks
    }

    /// Offers a block that a request needs.
    pub(super) fn offer(&mut self, block: BlockId) {
        self.offered.extend(self.request_of(block).map(|request| (Reverse(request), block)));
    }

    /// Withdraws a block that was offered.
    pub(super) fn withdraw(&mut self, block: BlockId) {
        if let Some(request) = self.request_of(block) {
            self.offered.remove(&(Reverse(request), block));
        }
    }

    /// Returns the block to take first of those that are offered.
    pub(super) fn first(&self) -> Option<BlockId> {
        self.offered.first().map(|&(_, block)| block)
    }

    fn request_of(&self, block: BlockId) -> Option<WaitingId> {
        self.by_block.get(widen(block.number())).copied().flatten()
    }
}
