//! From a node to its children, by the fingerprint of their first page.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, Hasher, RandomState};

use super::NodeId;
use crate::base::Id;

/// The first child by parent and fingerprint.
#[derive(Debug)]
pub(in crate::cache) struct Edges(HashMap<u64, NodeId, Fold>);

impl Edges {
    pub(in crate::cache) fn new(seed: &RandomState) -> Self {
        let [plus, times] = [1, 2].map(|number| seed.hash_one(number));
        Self(HashMap::with_hasher(Fold { plus, times: times | 1, hash: 0 }))
    }

    pub(in crate::cache) fn get(&self, parent: NodeId, fingerprint: u32) -> Option<NodeId> {
        self.0.get(&edge(parent, fingerprint)).copied()
    }

    /// Makes `child` the first, and returns the one that was.
    pub(in crate::cache) fn insert(
        &mut self,
        parent: NodeId,
        fingerprint: u32,
        child: NodeId,
    ) -> Option<NodeId> {
        self.0.insert(edge(parent, fingerprint), child)
    }

    /// Puts `next` in the place of `child` if that is the first, else returns the first.
    pub(in crate::cache) fn replace(
        &mut self,
        parent: NodeId,
        fingerprint: u32,
        child: NodeId,
        next: Option<NodeId>,
    ) -> Option<NodeId> {
        let Entry::Occupied(mut first) = self.0.entry(edge(parent, fingerprint)) else {
            unreachable!("a child is linked")
        };
        if *first.get() != child {
            return Some(*first.get());
        }
        match next {
            Some(next) => drop(first.insert(next)),
            None => drop(first.remove()),
        }
        None
    }

    pub(in crate::cache) fn clear(&mut self) {
        self.0.clear();
    }

    /// The size of the table in bytes.
    pub(in crate::cache) fn bytes(&self) -> usize {
        self.0.capacity() * (size_of::<(u64, NodeId)>() + 1)
    }
}

fn edge(parent: NodeId, fingerprint: u32) -> u64 {
    u64::from(parent.number()) << 32 | u64::from(fingerprint)
}

/// A hash of one number: the halves of a product with secret numbers, folded. Callers choose tokens, and with
/// them fingerprints; without the numbers they cannot choose ones that collide.
#[derive(Clone, Copy, Debug)]
struct Fold {
    plus: u64,
    times: u64,
    hash: u64,
}

impl BuildHasher for Fold {
    type Hasher = Self;

    fn build_hasher(&self) -> Self {
        *self
    }
}

impl Hasher for Fold {
    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("an edge is a number")
    }

    fn write_u64(&mut self, edge: u64) {
        let product = u128::from(edge ^ self.plus) * u128::from(self.times);
        let [low, high] = [product & u128::from(u64::MAX), product >> 64];
        self.hash = u64::try_from(low ^ high).expect("64 bits");
    }

    fn finish(&self) -> u64 {
        self.hash
    }
}
