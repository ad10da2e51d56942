//! A hash table that finds the children of a node by the fingerprint of their first page.
//!
//! One table with open addressing serves all nodes. Each word in it is half a hash and the number of a child.
//! A look-up, an insertion and a removal touch one cache line, or a few where many words share a bucket.
//! Children with equal hashes have a word each; the tree compares their pages.

use std::hash::{BuildHasher, RandomState};

use super::NodeId;
use crate::base::{Id, prefetch, table_of};

/// The number of words in a bucket.
const WORDS: usize = 8;

/// The smallest number of buckets of a table that is not empty; a power of two.
const LEAST: usize = 2;

/// A hash in the upper half, and the number of a child plus 1 in the lower half. 0 is an empty entry.
type Word = u64;

/// A bucket of words, which is one cache line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Bucket([Word; WORDS]);

impl Bucket {
    fn position_of(&self, word: Word) -> Option<usize> {
        self.0.iter().position(|&other| other == word)
    }

    fn is_full(&self) -> bool {
        self.position_of(0).is_none()
    }
}

/// The children of all nodes.
#[derive(Debug)]
pub(crate) struct Edges {
    /// The buckets. A word is in the bucket that the upper bits of its hash name or, if that is full, in the
    /// next bucket with an empty entry. The length is a power of two, or 0.
    buckets: Vec<Bucket>,
    /// The number of words that are not 0: on average at most 3.5 in a bucket. Full buckets are rare then; a
    /// removal has to look into the bucket after a full one.
    len: usize,
    /// Random and secret: callers choose tokens and thereby fingerprints, but cannot choose fingerprints that
    /// collide.
    plus: u64,
    times: u64,
}

impl Edges {
    pub(crate) fn new(seed: &RandomState) -> Self {
        let [plus, times] = [1, 2].map(|number| seed.hash_one(number));
        Self { buckets: Vec::new(), len: 0, plus, times: times | 1 }
    }

    /// Returns the children of `parent` whose first page has this fingerprint. Others may be among them.
    pub(crate) fn get(&self, parent: NodeId, fingerprint: u32) -> impl Iterator<Item = NodeId> + '_ {
        let hash = self.hash(parent, fingerprint);
        let words = self.candidate_buckets(hash).flat_map(|at| self.buckets[at].0);
        words.filter(move |word| *word != 0 && word >> 32 == hash >> 32).map(child_of)
    }

    /// Prefetches the bucket of an edge that will be looked up soon.
    pub(crate) fn prefetch(&self, parent: NodeId, fingerprint: u32) {
        if !self.buckets.is_empty() {
            prefetch(&self.buckets[self.home(self.hash(parent, fingerprint))]);
        }
    }

    pub(crate) fn insert(&mut self, parent: NodeId, fingerprint: u32, child: NodeId) {
        if (self.len + 1) * 2 > self.buckets.len() * 7 {
            self.grow();
        }
        self.len += 1;
        self.insert_word(word_of(self.hash(parent, fingerprint), child));
    }

    /// Removes a child that was inserted.
    pub(crate) fn remove(&mut self, parent: NodeId, fingerprint: u32, child: NodeId) {
        let hash = self.hash(parent, fingerprint);
        let word = word_of(hash, child);
        let position_of = |at: usize| Some((at, self.buckets[at].position_of(word)?));
        let (mut at, mut entry) =
            self.candidate_buckets(hash).find_map(position_of).expect("a child is linked");
        self.len -= 1;
        // The gap is filled with a word that a full bucket has displaced, until the chain of full buckets
        // ends.
        let mut full = at;
        while self.buckets[full].is_full() {
            full = self.next(full);
            let past = self.steps(at, full);
            let is_of_earlier = |word: &Word| *word != 0 && self.steps(self.home(*word), full) >= past;
            if let Some(from) = self.buckets[full].0.iter().position(is_of_earlier) {
                self.buckets[at].0[entry] = self.buckets[full].0[from];
                (at, entry) = (full, from);
            }
        }
        self.buckets[at].0[entry] = 0;
    }

    pub(crate) fn clear(&mut self) {
        (self.buckets, self.len) = (Vec::new(), 0);
    }

    /// Returns the size of the table in bytes.
    pub(crate) const fn bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }

    /// Returns the buckets that may contain words with this hash.
    fn candidate_buckets(&self, hash: Word) -> impl Iterator<Item = usize> + '_ {
        let mut next = (!self.buckets.is_empty()).then(|| self.home(hash));
        std::iter::from_fn(move || {
            let at = next?;
            next = self.buckets[at].is_full().then(|| self.next(at));
            Some(at)
        })
    }

    /// Writes a word to the first empty entry where it may be.
    fn insert_word(&mut self, word: Word) {
        let mut at = self.home(word);
        let gap = loop {
            match self.buckets[at].position_of(0) {
                Some(gap) => break gap,
                None => at = self.next(at),
            }
        };
        self.buckets[at].0[gap] = word;
    }

    /// Doubles the number of buckets.
    fn grow(&mut self) {
        let buckets = table_of((self.buckets.len() * 2).max(LEAST), Bucket::default());
        for word in std::mem::replace(&mut self.buckets, buckets).into_iter().flat_map(|bucket| bucket.0) {
            if word != 0 {
                self.insert_word(word);
            }
        }
    }

    const fn next(&self, at: usize) -> usize {
        (at + 1) & (self.buckets.len() - 1)
    }

    /// Returns the number of buckets from `from` on to `to`.
    const fn steps(&self, from: usize, to: usize) -> usize {
        to.wrapping_sub(from) & (self.buckets.len() - 1)
    }

    /// Returns the bucket that the upper bits of a word name. The table is not empty.
    fn home(&self, word: Word) -> usize {
        let bits = self.buckets.len().trailing_zeros();
        usize::try_from(word >> (u64::BITS - bits)).expect("there is no bit of the child in it")
    }

    /// Returns the hash, in the upper half of a word. It is mixed twice: mixed once, consecutive
    /// fingerprints, which new tokens may have, would crowd into a few buckets for one multiplier in twenty.
    fn hash(&self, parent: NodeId, fingerprint: u32) -> Word {
        let edge = u64::from(parent.number()) << 32 | u64::from(fingerprint);
        self.mix(self.mix(edge)) >> 32 << 32
    }

    /// Multiplies and folds the halves of the product.
    fn mix(&self, value: u64) -> u64 {
        let product = u128::from(value ^ self.plus) * u128::from(self.times);
        let [low, high] = [product & u128::from(u64::MAX), product >> 64];
        u64::try_from(low ^ high).expect("64 bits")
    }
}

fn word_of(hash: Word, child: NodeId) -> Word {
    hash | (u64::from(child.number()) + 1)
}

/// Returns the child of a word.
fn child_of(word: Word) -> NodeId {
    let number = u32::try_from(word & u64::from(u32::MAX)).expect("32 bits");
    NodeId::new(number - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::widen;

    #[test]
    fn fingerprints_that_follow_each_other_are_spread() {
        for _ in 0..200 {
            let mut edges = Edges::new(&RandomState::new());
            for number in 0..2000 {
                edges.insert(NodeId::new(0), number, NodeId::new(number));
            }
            let is_home = |&(at, word): &(usize, Word)| edges.home(word) == at;
            let words =
                edges.buckets.iter().enumerate().flat_map(|(at, bucket)| bucket.0.map(|word| (at, word)));
            let at_home = words.filter(|&(_, word)| word != 0).filter(is_home).count();
            assert!(at_home > 1900, "{at_home} of 2000 edges are where they are looked for first");
        }
    }

    #[test]
    fn a_table_is_a_set_of_edges() {
        let mut edges = Edges::new(&RandomState::new());
        let mut known = Vec::new();
        let mut state = 1_u32;
        for child in 0..4000 {
            state = state.wrapping_mul(1_103_515_245).wrapping_add(12345);
            // There are few fingerprints, so that children share them.
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
                assert_eq!(
                    edges.buckets.iter().flat_map(|bucket| bucket.0).filter(|word| *word != 0).count(),
                    known.len()
                );
            }
        }
        assert_eq!(edges.len, known.len());
        assert!(Edges::new(&RandomState::new()).get(NodeId::new(0), 7).next().is_none());
    }
}
