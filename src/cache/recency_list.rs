//! Numbers in the order of their last use.

use crate::base::widen;

/// No number: an end of the order.
const NONE: u32 = u32::MAX;

/// A list of small numbers, the one used last first. A change costs a few stores, whatever its length.
///
/// ```
/// use kvpool::cache::RecencyList;
/// let mut list = RecencyList::default();
/// for number in [3, 1, 2] {
///     list.push(number);
/// }
/// list.remove(3);
/// list.insert_behind(3, Some(2));
/// assert_eq!(list.iter_oldest().collect::<Vec<_>>(), [1, 3, 2]);
/// ```
#[derive(Clone, Debug)]
pub struct RecencyList {
    /// The neighbours of each number. Of those not in the list stale.
    links: Vec<Link>,
    newest: u32,
    oldest: u32,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    newer: u32,
    older: u32,
}

impl Default for RecencyList {
    fn default() -> Self {
        Self { links: Vec::new(), newest: NONE, oldest: NONE }
    }
}

impl RecencyList {
    /// Adds a number that is not in the list, as the one used last.
    pub fn push(&mut self, number: u32) {
        self.insert_behind(number, None);
    }

    /// Adds a number that is not in the list, as the one that was not used for longest.
    pub fn push_oldest(&mut self, number: u32) {
        self.insert_behind(number, self.oldest());
    }

    /// Adds a number that is not in the list behind `newer`, or as the one used last.
    pub fn insert_behind(&mut self, number: u32, newer: Option<u32>) {
        let newer = newer.unwrap_or(NONE);
        let older = if newer == NONE { self.newest } else { self.links[widen(newer)].older };
        if widen(number) >= self.links.len() {
            self.links.resize(widen(number) + 1, Link { newer: NONE, older: NONE });
        }
        self.links[widen(number)] = Link { newer, older };
        self.set_older(newer, number);
        self.set_newer(older, number);
    }

    /// Takes out a number that is in the list.
    pub fn remove(&mut self, number: u32) {
        let Link { newer, older } = self.links[widen(number)];
        self.set_older(newer, older);
        self.set_newer(older, newer);
    }

    /// Makes a number that is in the list the one used last.
    pub fn touch(&mut self, number: u32) {
        if self.newest != number {
            self.remove(number);
            self.push(number);
        }
    }

    /// The number that was not used for longest.
    #[must_use]
    pub fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// The number used last.
    #[must_use]
    pub fn newest(&self) -> Option<u32> {
        (self.newest != NONE).then_some(self.newest)
    }

    /// The number used after one that is in the list.
    #[must_use]
    pub fn newer(&self, number: u32) -> Option<u32> {
        let newer = self.links[widen(number)].newer;
        (newer != NONE).then_some(newer)
    }

    /// The number used before one that is in the list.
    #[must_use]
    pub fn older(&self, number: u32) -> Option<u32> {
        let older = self.links[widen(number)].older;
        (older != NONE).then_some(older)
    }

    /// The numbers, the one used last at the end.
    pub fn iter_oldest(&self) -> impl Iterator<Item = u32> + '_ {
        let mut next = self.oldest;
        std::iter::from_fn(move || {
            let here = (next != NONE).then_some(next)?;
            next = self.links[widen(here)].newer;
            Some(here)
        })
    }

    /// The size of the bookkeeping in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.links.capacity() * size_of::<Link>()
    }

    fn set_older(&mut self, number: u32, older: u32) {
        *(if number == NONE { &mut self.newest } else { &mut self.links[widen(number)].older }) = older;
    }

    fn set_newer(&mut self, number: u32, newer: u32) {
        *(if number == NONE { &mut self.oldest } else { &mut self.links[widen(number)].newer }) = newer;
    }
}
