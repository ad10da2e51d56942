//! The free blocks of an engine, in an order that the engine determines.

use crate::base::{BlockId, Id, widen};
use crate::cache::RecencyList;

/// A queue of blocks, each at most once. Blocks are taken from the front, added at either end, and removed
/// from the middle, all at the same cost.
///
/// ```
/// use kvpool::base::{BlockId, Id};
/// use kvpool::engines::{EvictionQueue, QueueEnd};
/// let [a, b, c, d] = [0, 1, 2, 3].map(BlockId::new);
/// let mut queue = EvictionQueue::full(4);
/// assert!(queue.remove(c));
/// assert_eq!(queue.pop_front(), Some(a));
/// queue.push_back(c);
/// queue.push_front(a);
/// assert_eq!(queue.iter().collect::<Vec<_>>(), [a, b, d, c]);
/// queue.remove(b);
/// assert_eq!(queue.push_all(&[b, a], QueueEnd::Back), Err(a));
/// assert!(!queue.contains(b));
/// ```
#[derive(Clone, Debug)]
pub struct EvictionQueue {
    order: RecencyList<BlockId>,
    waits: Vec<bool>,
    len: usize,
}

/// An end of an [`EvictionQueue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueEnd {
    /// The end with the block that will be taken next.
    Front,
    /// The end with the block that will be taken last.
    Back,
}

impl EvictionQueue {
    /// Creates a queue of the blocks below `count`, the lowest at the front.
    #[must_use]
    pub fn full(count: u32) -> Self {
        let mut queue = Self { order: RecencyList::default(), waits: vec![false; widen(count)], len: 0 };
        for number in 0..count {
            queue.push_back(BlockId::new(number));
        }
        queue
    }

    /// Returns the number of blocks in the queue.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the queue is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether a block is in the queue.
    #[must_use]
    pub fn contains(&self, block: BlockId) -> bool {
        self.waits[widen(block.number())]
    }

    /// Returns the block at the front.
    #[must_use]
    pub fn front(&self) -> Option<BlockId> {
        self.order.oldest()
    }

    /// Returns the block at the end.
    #[must_use]
    pub fn back(&self) -> Option<BlockId> {
        self.order.newest()
    }

    /// Returns the block after `block`, which is in the queue.
    #[must_use]
    pub fn after(&self, block: BlockId) -> Option<BlockId> {
        self.order.newer(block)
    }

    /// Returns the block before `block`, which is in the queue.
    #[must_use]
    pub fn before(&self, block: BlockId) -> Option<BlockId> {
        self.order.older(block)
    }

    /// Returns the blocks from the front on.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.order.iter_oldest()
    }

    /// Removes and returns the block at the front.
    pub fn pop_front(&mut self) -> Option<BlockId> {
        let block = self.front()?;
        self.remove(block);
        Some(block)
    }

    /// Removes a block, and returns whether it was in the queue.
    pub fn remove(&mut self, block: BlockId) -> bool {
        let was = std::mem::replace(&mut self.waits[widen(block.number())], false);
        if was {
            self.order.remove(block);
            self.len -= 1;
        }
        was
    }

    /// Adds a block at the end, unless it is in the queue. Returns whether it was added.
    pub fn push_back(&mut self, block: BlockId) -> bool {
        self.add(block, RecencyList::push)
    }

    /// Adds a block at the front, unless it is in the queue. Returns whether it was added.
    pub fn push_front(&mut self, block: BlockId) -> bool {
        self.add(block, RecencyList::push_oldest)
    }

    /// Adds blocks at an end one after the other, either all of them or none.
    ///
    /// # Errors
    /// The first block that is in the queue already or listed twice. Nothing is changed then.
    pub fn push_all(&mut self, blocks: &[BlockId], end: QueueEnd) -> Result<(), BlockId> {
        for (at, &block) in blocks.iter().enumerate() {
            let is_new = match end {
                QueueEnd::Front => self.push_front(block),
                QueueEnd::Back => self.push_back(block),
            };
            if !is_new {
                for &added in &blocks[..at] {
                    self.remove(added);
                }
                return Err(block);
            }
        }
        Ok(())
    }

    fn add(&mut self, block: BlockId, push: fn(&mut RecencyList<BlockId>, BlockId)) -> bool {
        let is_new = !std::mem::replace(&mut self.waits[widen(block.number())], true);
        if is_new {
            push(&mut self.order, block);
            self.len += 1;
        }
        is_new
    }
}
