//! Sums over the nodes of a tree, kept as these change so that no call has to visit every node.

/// The sums over all nodes of a tree. [`Tree::broken_invariant`](super::Tree::broken_invariant) checks them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Pages of all nodes.
    pub(super) cached: usize,
    /// Pages of nodes with locks, and of tails that the locks of the node before them keep. At most `cached`.
    pub(super) locked: usize,
    /// Pages of nodes that are pinned or retained. At most `cached`.
    pub(super) pinned: usize,
    /// The capacity for tokens and pages in the vectors of nodes, in elements.
    pub(super) heap_capacity: usize,
}

impl Counts {
    /// Returns the number of pages that no lock keeps.
    #[inline]
    pub(super) const fn evictable(&self) -> usize {
        self.cached - self.locked
    }
}
