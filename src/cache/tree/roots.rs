//! The roots of a tree: one for each namespace with the nodes below it, and the detached ones.

use std::collections::HashMap;

use super::{Namespace, NodeId};

/// The roots of a tree.
#[derive(Debug, Default)]
pub(super) struct Roots {
    /// The roots that can be found.
    ids: HashMap<Namespace, NodeId>,
    /// That of requests without a name, which is in `ids`, too.
    unnamed: Option<NodeId>,
    /// The namespaces of these roots.
    spaces: HashMap<NodeId, Space>,
    /// The number of detached roots, which stay until the leases below them end.
    detached: usize,
    /// The number of bytes that the names take up on the heap.
    texts: usize,
    /// The capacity of the lists of nodes.
    listed: usize,
}

/// A namespace.
#[derive(Debug)]
struct Space {
    name: Namespace,
    /// Every node below the root, and some nodes that no longer exist.
    nodes: Vec<NodeId>,
}

impl Roots {
    /// Returns the number of roots, including detached ones.
    pub(super) fn len(&self) -> usize {
        self.ids.len() + self.detached
    }

    pub(super) fn get(&self, name: &Namespace) -> Option<NodeId> {
        match name {
            Namespace::Unnamed => self.unnamed,
            name => self.ids.get(name).copied(),
        }
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
        if *name == Namespace::Unnamed {
            self.unnamed = Some(root);
        }
        self.ids.insert(name.clone(), root);
        self.spaces.insert(root, Space { name: name.clone(), nodes: Vec::new() });
    }

    /// Removes a root, if it can be found, and returns the list of its nodes, some of which may no longer
    /// exist.
    pub(super) fn remove(&mut self, root: NodeId) -> Vec<NodeId> {
        let Some(Space { name, nodes }) = self.spaces.remove(&root) else { return Vec::new() };
        if name == Namespace::Unnamed {
            self.unnamed = None;
        }
        self.ids.remove(&name);
        self.texts -= 2 * name.text_bytes();
        self.listed -= nodes.capacity();
        nodes
    }

    /// Detaches a root, so that it can no longer be found, and returns the list of its nodes, some of which
    /// may no longer exist.
    pub(super) fn detach(&mut self, root: NodeId) -> Vec<NodeId> {
        self.detached += 1;
        self.remove(root)
    }

    /// Records that a detached root was removed.
    pub(super) const fn forget_detached(&mut self) {
        self.detached -= 1;
    }

    /// Lists a new node below `root`, unless the root is detached. Removals of nodes do not change the list.
    /// When it is full, the nodes that are no longer below `root`, as `is_below` tells, are dropped from it,
    /// so the cost of a node does not depend on the size of the tree.
    pub(super) fn list(&mut self, root: NodeId, node: NodeId, is_below: impl Fn(NodeId) -> bool) {
        let Some(Space { nodes, .. }) = self.spaces.get_mut(&root) else { return };
        let capacity = nodes.capacity();
        if nodes.len() == capacity {
            retain_listed(nodes, is_below);
            // The list can double before the next time.
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

    /// Returns every node below a root that can be found, and some nodes that no longer exist.
    pub(super) fn listed_below(&self, root: NodeId) -> &[NodeId] {
        self.spaces.get(&root).map_or(&[], |space| &space.nodes)
    }

    pub(super) fn bytes(&self) -> usize {
        /// The bytes that a hash table needs for each entry in addition to the entry itself.
        const CONTROL: usize = 1;
        let ids = self.ids.capacity() * (size_of::<(Namespace, NodeId)>() + CONTROL);
        let spaces = self.spaces.capacity() * (size_of::<(NodeId, Space)>() + CONTROL);
        ids + spaces + self.texts + self.listed * size_of::<NodeId>()
    }
}

/// Removes nodes that no longer exist, and duplicates: the number of a removed node may be used again.
pub(super) fn retain_listed(nodes: &mut Vec<NodeId>, is_below: impl Fn(NodeId) -> bool) {
    nodes.retain(|&node| is_below(node));
    nodes.sort_unstable();
    nodes.dedup();
}
