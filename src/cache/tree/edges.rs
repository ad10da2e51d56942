//! From a node to its children, by the fingerprint of their first page.
//!
//! One open table of words for all nodes: half a hash, and the child. Linear probing keeps a look-up and a
//! removal within a line of the processor's cache, mostly. Children of equal hash have a word each; the tree
//! compares their pages.

use std::hash::{BuildHasher, RandomState};

use super::NodeId;
use crate::base::Id;

/// Words of a table that is not empty, at least; a power of two.
const LEAST: usize = 16;

/// The children of all nodes.
#[derive(Debug)]
pub(super) struct Edges {
    /// A hash in the upper half, and the number of a child plus 1 in the lower one; 0 is no word. A word lies at
    /// the upper bits of its hash or behind, with no gap before. The length is a power of two, or 0.
    words: Vec<u64>,
    /// Words that are not 0: at most two thirds.
    len: usize,
    /// Secret: callers choose tokens, and with them fingerprints, but cannot choose ones that collide.
    plus: u64,
    times: u64,
}

impl Edges {
    pub(super) fn new(seed: &RandomState) -> Self {
        let [plus, times] = [1, 2].map(|number| seed.hash_one(number));
        Self { words: Vec::new(), len: 0, plus, times: times | 1 }
    }

    /// The children of `parent` whose first page has this fingerprint, and perhaps others.
    pub(super) fn get(&self, parent: NodeId, fingerprint: u32) -> impl Iterator<Item = NodeId> + '_ {
        let hash = self.hash(parent, fingerprint);
        let words = self.cluster(hash).map(|at| self.words[at]);
        words.filter(move |word| word >> 32 == hash >> 32).map(child_of)
    }

    pub(super) fn insert(&mut self, parent: NodeId, fingerprint: u32, child: NodeId) {
        if (self.len + 1) * 3 > self.words.len() * 2 {
            self.grow();
        }
        self.len += 1;
        self.place(self.hash(parent, fingerprint) | (u64::from(child.number()) + 1));
    }

    /// Removes a child that was inserted.
    pub(super) fn remove(&mut self, parent: NodeId, fingerprint: u32, child: NodeId) {
        let hash = self.hash(parent, fingerprint);
        let word = hash | (u64::from(child.number()) + 1);
        let mut gap = self.cluster(hash).find(|&at| self.words[at] == word).expect("a child is linked");
        // What is behind moves up, so that no gap lies before it.
        let last = self.words.len() - 1;
        let mut at = (gap + 1) & last;
        while self.words[at] != 0 {
            let home = self.home(self.words[at]);
            if at.wrapping_sub(home) & last >= at.wrapping_sub(gap) & last {
                self.words[gap] = self.words[at];
                gap = at;
            }
            at = (at + 1) & last;
        }
        self.words[gap] = 0;
        self.len -= 1;
    }

    /// The size of the table in bytes.
    pub(super) const fn bytes(&self) -> usize {
        self.words.capacity() * size_of::<u64>()
    }

    /// The places from that of a hash on, up to the next gap.
    fn cluster(&self, hash: u64) -> impl Iterator<Item = usize> + '_ {
        let last = self.words.len().wrapping_sub(1);
        let start = if self.words.is_empty() { 0 } else { self.home(hash) };
        let places = (0..self.words.len()).map(move |step| (start + step) & last);
        places.take_while(|&at| self.words[at] != 0)
    }

    /// Writes a word to the first gap at its place or behind.
    fn place(&mut self, word: u64) {
        let last = self.words.len() - 1;
        let mut at = self.home(word);
        while self.words[at] != 0 {
            at = (at + 1) & last;
        }
        self.words[at] = word;
    }

    /// Doubles the table.
    fn grow(&mut self) {
        let words = vec![0; (self.words.len() * 2).max(LEAST)];
        for word in std::mem::replace(&mut self.words, words) {
            if word != 0 {
                self.place(word);
            }
        }
    }

    /// The place of a word: the upper bits of its hash. The table is not empty.
    fn home(&self, word: u64) -> usize {
        let bits = self.words.len().trailing_zeros();
        usize::try_from(word >> (u64::BITS - bits)).expect("there is no bit of the child in it")
    }

    /// The hash in the upper half of a word: the halves of a product, folded.
    fn hash(&self, parent: NodeId, fingerprint: u32) -> u64 {
        let edge = u64::from(parent.number()) << 32 | u64::from(fingerprint);
        let product = u128::from(edge ^ self.plus) * u128::from(self.times);
        let [low, high] = [product & u128::from(u64::MAX), product >> 64];
        u64::try_from(low ^ high).expect("64 bits") >> 32 << 32
    }
}

/// The child of a word.
fn child_of(word: u64) -> NodeId {
    let number = u32::try_from(word & u64::from(u32::MAX)).expect("32 bits");
    NodeId::new(number - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::widen;

    #[test]
    fn a_table_is_a_set_of_edges() {
        let mut edges = Edges::new(&RandomState::new());
        let mut known = Vec::new();
        let mut state = 1_u32;
        for child in 0..4000 {
            state = state.wrapping_mul(1_103_515_245).wrapping_add(12345);
            // Few fingerprints, so that children share them.
            let (parent, fingerprint) = (NodeId::new(state >> 16 & 3), state >> 20 & 63);
            edges.insert(parent, fingerprint, NodeId::new(child));
            known.push((parent, fingerprint, NodeId::new(child)));
            while known.len() > 700 || (state >> 8).is_multiple_of(3) && !known.is_empty() {
                let (parent, fingerprint, child) = known.swap_remove(widen(state >> 4) % known.len());
                edges.remove(parent, fingerprint, child);
                state = state.wrapping_mul(1_103_515_245).wrapping_add(12345);
            }
            if child % 97 == 0 {
                for &(parent, fingerprint, child) in &known {
                    assert!(edges.get(parent, fingerprint).any(|found| found == child));
                }
                assert_eq!(edges.words.iter().filter(|word| **word != 0).count(), known.len());
            }
        }
        assert_eq!(edges.len, known.len());
        assert!(Edges::new(&RandomState::new()).get(NodeId::new(0), 7).next().is_none());
    }
}
