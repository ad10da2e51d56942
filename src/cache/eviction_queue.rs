//! Numbers that wait to be taken, in an order that their owner decides.

use crate::base::widen;

use super::RecencyList;

/// A queue of the numbers below a count, each at most once: taken from the front, added at either end, and
/// taken out of the middle at the same cost.
///
/// ```
/// use kvpool::cache::EvictionQueue;
/// let mut queue = EvictionQueue::full(4);
/// assert!(queue.remove(2));
/// assert_eq!(queue.pop_front(), Some(0));
/// queue.push_back(2);
/// queue.push_front(0);
/// assert_eq!(queue.iter().collect::<Vec<_>>(), [0, 1, 3, 2]);
/// ```
#[derive(Clone, Debug)]
pub struct EvictionQueue {
    order: RecencyList,
    waits: Vec<bool>,
    len: usize,
}

impl EvictionQueue {
    /// A queue of all numbers below `count`, the lowest in front.
    #[must_use]
    pub fn full(count: u32) -> Self {
        let mut queue = Self { order: RecencyList::default(), waits: vec![false; widen(count)], len: 0 };
        for number in 0..count {
            queue.push_back(number);
        }
        queue
    }

    /// Numbers in the queue.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether a number is in the queue.
    #[must_use]
    pub fn contains(&self, number: u32) -> bool {
        self.waits[widen(number)]
    }

    /// The number in front.
    #[must_use]
    pub fn front(&self) -> Option<u32> {
        self.order.oldest()
    }

    /// The number at the end.
    #[must_use]
    pub fn back(&self) -> Option<u32> {
        self.order.newest()
    }

    /// The number behind `number`, which is in the queue.
    #[must_use]
    pub fn behind(&self, number: u32) -> Option<u32> {
        self.order.newer(number)
    }

    /// The number before `number`, which is in the queue.
    #[must_use]
    pub fn before(&self, number: u32) -> Option<u32> {
        self.order.older(number)
    }

    /// The numbers from the front on.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.order.iter_oldest()
    }

    /// Takes the number in front.
    pub fn pop_front(&mut self) -> Option<u32> {
        let number = self.front()?;
        self.remove(number);
        Some(number)
    }

    /// Takes a number out, and says whether it was there.
    pub fn remove(&mut self, number: u32) -> bool {
        let was = std::mem::replace(&mut self.waits[widen(number)], false);
        if was {
            self.order.remove(number);
            self.len -= 1;
        }
        was
    }

    /// Adds a number at the end, unless it is in the queue, and says whether it was not.
    pub fn push_back(&mut self, number: u32) -> bool {
        self.add(number, RecencyList::push)
    }

    /// Adds a number in front, unless it is in the queue, and says whether it was not.
    pub fn push_front(&mut self, number: u32) -> bool {
        self.add(number, RecencyList::push_oldest)
    }

    fn add(&mut self, number: u32, push: fn(&mut RecencyList, u32)) -> bool {
        let is_new = !std::mem::replace(&mut self.waits[widen(number)], true);
        if is_new {
            push(&mut self.order, number);
            self.len += 1;
        }
        is_new
    }
}
