//! The nodes of a tree by number, and the handles by which callers refer to them.
//!
//! The number of a removed node is used again, so the arena is as large as the tree was at most. A
//! [`NodeHandle`] tells apart the nodes that had the same number.

use std::collections::HashSet;
use std::ops::{Index, IndexMut};

use super::NodeId;
use crate::base::{Id, prefetch, widen};

/// A handle of a node. No other node of the tree ever has it. When a node is split in two, the deeper part
/// keeps the handle, the end and the locks.
///
/// ```
/// use kvpool::cache::NodeHandle;
/// let handle = NodeHandle::new(7);
/// assert_eq!(handle.number(), 7);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeHandle(u64);

impl NodeHandle {
    /// Returns the handle with this number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number of the handle, below 2**63.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// The generation at which a number is retired. Handles are signed 64-bit numbers, so a number is not used in
/// later generations.
const END_OF_GENERATIONS: u32 = u32::MAX >> 1;

/// The nodes of a tree.
#[derive(Debug)]
pub(crate) struct NodeArena<N> {
    /// The nodes by number. A number that is not in use has a blank node, which the tree provides.
    nodes: Vec<N>,
    /// How often each number was in use before; one entry for each number.
    generations: Vec<u32>,
    /// The numbers that may be used again. Their nodes are blank, their generations are below
    /// [`END_OF_GENERATIONS`], and each is listed once.
    vacant: Vec<NodeId>,
    /// How many numbers are retired: they may not be used again.
    retired: usize,
}

impl<N> NodeArena<N> {
    pub(crate) const fn new() -> Self {
        Self { nodes: Vec::new(), generations: Vec::new(), vacant: Vec::new(), retired: 0 }
    }

    /// Returns the number of nodes.
    pub(crate) const fn len(&self) -> usize {
        self.nodes.len() - self.vacant.len() - self.retired
    }

    /// Returns how many numbers there are, including those that are not in use.
    pub(crate) const fn numbers(&self) -> usize {
        self.nodes.len()
    }

    /// Adds a node, under a number that no other node has at present.
    #[inline]
    pub(crate) fn add(&mut self, node: N) -> NodeId {
        if let Some(id) = self.vacant.pop() {
            self[id] = node;
            return id;
        }
        let number = u32::try_from(self.nodes.len()).expect("a node has slots or pages, which fit int32");
        if self.nodes.len() == self.nodes.capacity() {
            // Doubling the capacity would waste up to one node for each node.
            self.nodes.reserve_exact(self.nodes.len() / 8 + 8);
            self.generations.reserve_exact(self.nodes.capacity() - self.generations.len());
        }
        self.nodes.push(node);
        self.generations.push(0);
        NodeId::new(number)
    }

    /// Makes a number, whose node is blank now, available for another node, which will have another handle.
    #[inline]
    pub(crate) fn vacate(&mut self, id: NodeId) {
        let generation = &mut self.generations[widen(id.number())];
        *generation += 1;
        if *generation < END_OF_GENERATIONS {
            self.vacant.push(id);
        } else {
            self.retired += 1;
        }
    }

    /// Removes every node. The next node gets the first number, with another handle.
    pub(crate) fn reset(&mut self, blank: impl FnMut() -> N) {
        self.nodes.fill_with(blank);
        self.vacant.clear();
        self.retired = 0;
        // Vacant numbers are used from the end of the list.
        let ids: Vec<NodeId> = self.iter().map(|(id, _)| id).collect();
        for id in ids.into_iter().rev() {
            if self.is_retired(id) {
                self.retired += 1;
            } else {
                self.vacate(id);
            }
        }
    }

    /// Returns the handle of a node.
    #[inline]
    pub(crate) fn handle(&self, id: NodeId) -> NodeHandle {
        let generation = self.generations[widen(id.number())];
        NodeHandle(u64::from(generation) << 32 | u64::from(id.number()))
    }

    /// Returns the node with this handle; `None` if it no longer exists.
    #[inline]
    pub(crate) fn at(&self, handle: NodeHandle) -> Option<NodeId> {
        let number = u32::try_from(handle.0 & u64::from(u32::MAX)).expect("32 bits");
        let generation = u64::from(*self.generations.get(widen(number))?);
        (generation == handle.0 >> 32).then(|| NodeId::new(number))
    }

    /// Returns the nodes by number, including blank ones.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (NodeId, &N)> + '_ {
        (0..).map(NodeId::new).zip(&self.nodes)
    }

    /// Returns all nodes, including blank ones.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut N> + '_ {
        self.nodes.iter_mut()
    }

    /// Returns the numbers that are in use. Visits every number.
    pub(crate) fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        let vacant: HashSet<_> = self.vacant.iter().copied().collect();
        self.iter().map(|(id, _)| id).filter(move |&id| !vacant.contains(&id) && !self.is_retired(id))
    }

    /// Returns whether a number is retired.
    fn is_retired(&self, id: NodeId) -> bool {
        self.generations[widen(id.number())] >= END_OF_GENERATIONS
    }

    /// Prefetches a node that will be read soon.
    #[inline]
    pub(crate) fn prefetch(&self, id: NodeId) {
        prefetch(&self[id]);
    }

    /// Prefetches what [`NodeArena::vacate`] changes.
    #[inline]
    pub(crate) fn prefetch_generation(&self, id: NodeId) {
        prefetch(&self.generations[widen(id.number())]);
    }

    /// Returns the size in bytes, without the memory that the nodes refer to.
    pub(crate) const fn bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<N>()
            + self.generations.capacity() * size_of::<u32>()
            + self.vacant.capacity() * size_of::<NodeId>()
    }
}

impl<N> Index<NodeId> for NodeArena<N> {
    type Output = N;

    #[inline]
    fn index(&self, id: NodeId) -> &N {
        &self.nodes[widen(id.number())]
    }
}

impl<N> IndexMut<NodeId> for NodeArena<N> {
    #[inline]
    fn index_mut(&mut self, id: NodeId) -> &mut N {
        &mut self.nodes[widen(id.number())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_belongs_to_one_node() {
        let mut arena = NodeArena::new();
        let (first, other) = (arena.add('a'), arena.add('b'));
        let handle = arena.handle(first);
        arena.vacate(first);
        assert_eq!((arena.at(handle), arena.len()), (None, 1));
        assert_eq!(arena.add('c'), first);
        assert_ne!(arena.handle(first), handle);
        assert_eq!(arena.at(arena.handle(other)), Some(other));
    }

    #[test]
    fn a_number_ends_before_its_names_are_no_signed_numbers() {
        let mut arena = NodeArena::new();
        let first = arena.add('a');
        arena.generations[widen(first.number())] = END_OF_GENERATIONS - 1;
        assert!(i64::try_from(arena.handle(first).number()).is_ok());
        arena.vacate(first);
        let other = arena.add('b');
        assert_ne!(first, other);
        assert_eq!((arena.len(), arena.ids().collect::<Vec<_>>()), (1, vec![other]));
        arena.reset(|| ' ');
        assert_eq!((arena.len(), arena.ids().count()), (0, 0));
        assert_ne!(arena.add('c'), first);
    }

    #[test]
    fn after_a_reset_numbers_begin_anew() {
        let mut arena = NodeArena::new();
        let ids = ['a', 'b', 'c'].map(|node| arena.add(node));
        let handles = ids.map(|id| arena.handle(id));
        arena.vacate(ids[0]);
        arena.reset(|| ' ');
        assert_eq!(arena.len(), 0);
        assert_eq!(['d', 'e', 'f'].map(|node| arena.add(node)), ids);
        assert!(handles.into_iter().all(|handle| arena.at(handle).is_none()));
    }
}
