//! Sums over the nodes of a tree, which are updated with every change so that no call has to visit every
//! node.

/// The sums over all nodes of a tree. [`Tree::broken_invariant`](super::Tree::broken_invariant) checks them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// The number of pages of all nodes.
    pub(super) cached: usize,
    /// The number of pages of nodes with locks. At most `cached`.
    pub(super) locked: usize,
    /// The number of pages of nodes that are pinned or retained. At most `cached`.
    pub(super) pinned: usize,
    /// The capacity for tokens and pages in the vectors of nodes, in elements.
    pub(super) heap_capacity: usize,
}

impl Counts {
    /// Returns the number of pages that no lock protects.
    #[inline]
    pub(super) const fn evictable(&self) -> usize {
        self.cached - self.locked
    }
}
