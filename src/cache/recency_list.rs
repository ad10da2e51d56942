//! A list of indices in the order of their last use.

use std::marker::PhantomData;

use crate::base::{Id, Result, try_reserve, widen};

/// The mark for no index, at the ends of the list.
const NONE: u32 = u32::MAX;

/// A doubly linked list of small indices, the most recently used one first. A change costs a few stores,
/// whatever the length of the list.
#[derive(Clone, Debug)]
pub(crate) struct RecencyList<I> {
    /// The neighbours of each index. The entries of indices that are not in the list are stale.
    links: Vec<Link>,
    newest: u32,
    oldest: u32,
    of: PhantomData<I>,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    newer: u32,
    older: u32,
}

impl<I> Default for RecencyList<I> {
    fn default() -> Self {
        Self { links: Vec::new(), newest: NONE, oldest: NONE, of: PhantomData }
    }
}

impl<I: Id> RecencyList<I> {
    /// Makes room for the indices below `end`, so that adding them needs no memory.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has none.
    pub(crate) fn reserve_below(&mut self, end: usize) -> Result<()> {
        let more = end.saturating_sub(self.links.len());
        try_reserve(&mut self.links, more)
    }

    /// Adds an index that is not in the list, as the most recently used one.
    pub(crate) fn push(&mut self, index: I) {
        self.insert_older_than(index, None);
    }

    /// Adds an index that is not in the list, as the least recently used one.
    pub(crate) fn push_oldest(&mut self, index: I) {
        self.insert_older_than(index, self.oldest());
    }

    /// Adds an index that is not in the list, as the next older one after `newer`. Without `newer`, it
    /// becomes the most recently used one.
    pub(crate) fn insert_older_than(&mut self, index: I, newer: Option<I>) {
        let (number, newer) = (index.number(), newer.map_or(NONE, I::number));
        let older = if newer == NONE { self.newest } else { self.links[widen(newer)].older };
        if widen(number) >= self.links.len() {
            self.links.resize(widen(number) + 1, Link { newer: NONE, older: NONE });
        }
        self.links[widen(number)] = Link { newer, older };
        self.set_older(newer, number);
        self.set_newer(older, number);
    }

    /// Removes an index that is in the list.
    pub(crate) fn remove(&mut self, index: I) {
        let Link { newer, older } = self.links[widen(index.number())];
        self.set_older(newer, older);
        self.set_newer(older, newer);
    }

    /// Makes an index that is in the list the most recently used one.
    pub(crate) fn touch(&mut self, index: I) {
        if self.newest != index.number() {
            self.remove(index);
            self.push(index);
        }
    }

    /// Returns the least recently used index.
    #[must_use]
    pub(crate) fn oldest(&self) -> Option<I> {
        index_of(self.oldest)
    }

    /// Returns the most recently used index.
    #[must_use]
    pub(crate) fn newest(&self) -> Option<I> {
        index_of(self.newest)
    }

    /// Returns the next more recently used index after one that is in the list.
    #[must_use]
    pub(crate) fn newer(&self, index: I) -> Option<I> {
        index_of(self.links[widen(index.number())].newer)
    }

    /// Returns the next less recently used index after one that is in the list.
    #[must_use]
    pub(crate) fn older(&self, index: I) -> Option<I> {
        index_of(self.links[widen(index.number())].older)
    }

    /// Returns the indices, the least recently used one first.
    pub(crate) fn iter_oldest(&self) -> impl Iterator<Item = I> + '_ {
        std::iter::successors(self.oldest(), |&index| self.newer(index))
    }

    /// Returns the size of the bookkeeping in bytes.
    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        self.links.capacity() * size_of::<Link>()
    }

    fn set_older(&mut self, number: u32, older: u32) {
        *(if number == NONE { &mut self.newest } else { &mut self.links[widen(number)].older }) = older;
    }

    fn set_newer(&mut self, number: u32, newer: u32) {
        *(if number == NONE { &mut self.oldest } else { &mut self.links[widen(number)].newer }) = newer;
    }
}

fn index_of<I: Id>(number: u32) -> Option<I> {
    (number != NONE).then(|| I::new(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{BlockId, Id};

    #[test]
    fn the_order_is_that_of_uses() {
        let [one, two, three] = [1, 2, 3].map(BlockId::new);
        let mut list = RecencyList::default();
        for block in [three, one, two] {
            list.push(block);
        }
        list.remove(three);
        list.insert_older_than(three, Some(two));
        assert_eq!(list.iter_oldest().collect::<Vec<_>>(), [one, three, two]);
    }
}
