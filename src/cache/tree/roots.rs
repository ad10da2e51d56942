//! The roots of a tree: that of each namespace with its nodes, and those that are found no more.

use std::collections::HashMap;

use super::{Namespace, NodeId};

/// The roots of a tree.
#[derive(Debug, Default)]
pub(super) struct Roots {
    /// The roots that can be found.
    ids: HashMap<Namespace, NodeId>,
    /// The namespaces of the same roots.
    spaces: HashMap<NodeId, Space>,
    /// Roots that are found no more, and stay until the leases below them end.
    detached: usize,
    /// The root of [`Tree::keep_root`](super::Tree::keep_root), with a lock of its own.
    kept: Option<NodeId>,
    /// Bytes behind the names.
    texts: usize,
    /// The room in the lists of nodes.
    listed: usize,
}

/// A namespace.
#[derive(Debug)]
struct Space {
    name: Namespace,
    /// Every node below the root, and some that are gone.
    nodes: Vec<NodeId>,
}

impl Roots {
    /// Returns the number of roots, whether they can be found or not.
    pub(super) fn len(&self) -> usize {
        self.ids.len() + self.detached
    }

    /// Records that `root` has a lock of its own.
    pub(super) const fn keep(&mut self, root: NodeId) {
        self.kept = Some(root);
    }

    pub(super) fn is_kept(&self, root: NodeId) -> bool {
        self.kept == Some(root)
    }

    pub(super) fn get(&self, name: &Namespace) -> Option<NodeId> {
        self.ids.get(name).copied()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.ids.values().copied()
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &Namespace> {
        self.ids.keys()
    }

    pub(super) fn name(&self, root: NodeId) -> Option<&Namespace> {
        self.spaces.get(&root).map(|space| &space.name)
    }

    pub(super) fn insert(&mut self, name: &Namespace, root: NodeId) {
        self.texts += 2 * name.text_bytes();
        self.ids.insert(name.clone(), root);
        self.spaces.insert(root, Space { name: name.clone(), nodes: Vec::new() });
    }

    /// Removes a root, if it can be found, and returns the list of its nodes, of which some are gone.
    pub(super) fn remove(&mut self, root: NodeId) -> Vec<NodeId> {
        let Some(Space { name, nodes }) = self.spaces.remove(&root) else { return Vec::new() };
        self.ids.remove(&name);
        self.texts -= 2 * name.text_bytes();
        self.listed -= nodes.capacity();
        nodes
    }

    /// Makes a root be found no more, and returns the list of its nodes, of which some are gone.
    pub(super) fn detach(&mut self, root: NodeId) -> Vec<NodeId> {
        self.detached += 1;
        self.remove(root)
    }

    /// Records that a root that was detached is gone.
    pub(super) const fn forget_detached(&mut self) {
        self.detached -= 1;
    }

    /// Lists a new node below `root`, unless that is found no more. Removals leave the list as it is: when it
    /// is full, the nodes that are gone, which are not below `root` by `is_below`, are dropped from it. So a
    /// node costs the same at any size.
    pub(super) fn list(&mut self, root: NodeId, node: NodeId, is_below: impl Fn(NodeId) -> bool) {
        let Some(Space { nodes, .. }) = self.spaces.get_mut(&root) else { return };
        let capacity = nodes.capacity();
        if nodes.len() == capacity {
            retain_listed(nodes, is_below);
            // As many again are listed before the next time.
            nodes.shrink_to(2 * nodes.len() + 2);
            nodes.reserve_exact(nodes.len() + 2);
        }
        nodes.push(node);
        self.listed = self.listed + nodes.capacity() - capacity;
    }

    /// Returns every node below a root with that root, and some nodes that no longer exist.
    pub(super) fn listed(&self) -> impl Iterator<Item = (NodeId, NodeId)> + '_ {
        self.spaces.iter().flat_map(|(&root, space)| space.nodes.iter().map(move |&node| (root, node)))
    }

    pub(super) fn bytes(&self) -> usize {
        /// The bytes of a table for each entry, in addition to the entry itself.
        const CONTROL: usize = 1;
        let ids = self.ids.capacity() * (size_of::<(Namespace, NodeId)>() + CONTROL);
        let spaces = self.spaces.capacity() * (size_of::<(NodeId, Space)>() + CONTROL);
        ids + spaces + self.texts + self.listed * size_of::<NodeId>()
    }
}

/// Removes the nodes that are gone, and repeated ones: the number of a node that is gone may be used again.
pub(super) fn retain_listed(nodes: &mut Vec<NodeId>, is_below: impl Fn(NodeId) -> bool) {
    nodes.retain(|&node| is_below(node));
    nodes.sort_unstable();
    nodes.dedup();
}
