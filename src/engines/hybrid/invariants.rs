//! Checks of the invariants of a hybrid tree, node by node. Tests and debugging use them.

use std::collections::HashMap;

use super::namespaces::NamespaceId;
use super::{HybridTree, NodeId, Part, ROOT, Sizes};
use crate::base::{Id, widen};

impl HybridTree {
    /// Describes a broken invariant, if there is one.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let of_node = |id: NodeId| {
            let fault = self.broken_contents(id).or_else(|| self.broken_place(id));
            let fault = fault.or_else(|| self.broken_parts(id)).or_else(|| self.broken_past(id));
            fault.map(|fault| {
                format!("node {} at {} tokens {fault}", self.handle(id).number(), self.node(id).end)
            })
        };
        let mut parts = [Part::Window, Part::State].into_iter();
        (self.runs().find_map(of_node))
            .or_else(|| self.broken_children())
            .or_else(|| self.broken_namespaces())
            .or_else(|| parts.find_map(|part| self.broken_list(part)))
            .or_else(|| self.broken_sizes())
    }

    /// Checks that the tokens and values of a node fit each other.
    fn broken_contents(&self, id: NodeId) -> Option<String> {
        let (node, page_size) = (self.node(id), self.config.page_size);
        let (tokens, slots) = (node.tokens.len(), node.value(Part::Full).len());
        let windows = node.value(Part::Window).len();
        if self.node(node.parent).end + tokens != node.end {
            return Some("does not begin where its parent ends".to_owned());
        }
        if tokens != slots {
            return Some(format!("has {slots} slots"));
        }
        if node.has(Part::Window) && windows != tokens {
            return Some(format!("has {windows} windows"));
        }
        if !tokens.is_multiple_of(page_size) {
            return Some("is no whole number of pages".to_owned());
        }
        if !node.hashes.is_empty() && node.hashes.len() * page_size != tokens {
            return Some(format!("has {} hashes of pages", node.hashes.len()));
        }
        (node.reach < node.end).then(|| format!("was reached up to {} tokens", node.reach))
    }

    /// Checks that a node is found from its parent, and has its place in the queue.
    fn broken_place(&self, id: NodeId) -> Option<String> {
        let node = self.node(id);
        let mut page = vec![0; self.config.page_size];
        node.tokens.read(&mut page);
        if self.child(node.parent, node.namespace, &page) != Some(id) {
            return Some("is not found from its parent".to_owned());
        }
        let rank = self.is_leaf(id).then(|| self.config.order.rank(node));
        (node.queued != rank).then(|| format!("is queued as {:?}", node.queued))
    }

    /// Checks that a node has no more locks of a part than of full attention.
    fn broken_parts(&self, id: NodeId) -> Option<String> {
        let node = self.node(id);
        let full_locks = node.locks[Part::Full.index()];
        Part::ALL.into_iter().find_map(|part| {
            let locks = node.locks[part.index()];
            (locks > full_locks).then(|| format!("has {locks} locks of {part:?}, {full_locks} in full"))
        })
    }

    /// Checks the numbers of children of each node and of queued leaves.
    fn broken_children(&self) -> Option<String> {
        let mut children = vec![0_u32; self.nodes.numbers()];
        for id in self.runs() {
            children[widen(self.node(id).parent.number())] += 1;
        }
        let mut nodes = self.nodes.iter();
        if let Some((id, node)) = nodes.find(|(id, node)| node.children != children[widen(id.number())]) {
            return Some(format!("node {id} has {} children", node.children));
        }
        let leaves = self.runs().filter(|&id| self.node(id).queued.is_some()).count();
        (leaves != self.queue.len()).then(|| format!("{leaves} leaves, {} queued", self.queue.len()))
    }

    /// Checks that the namespaces are those of the children of the root.
    fn broken_namespaces(&self) -> Option<String> {
        let mut found: HashMap<_, usize> = HashMap::new();
        for id in self.runs() {
            let node = self.node(id);
            if node.parent == ROOT && node.namespace != NamespaceId::UNNAMED {
                *found.entry(node.namespace).or_default() += 1;
            }
        }
        let counted: HashMap<_, _> = self.namespaces.counts().collect();
        (counted != found)
            .then(|| format!("namespaces of the children of the root are {found:?}, counted {counted:?}"))
    }

    /// Checks that a list has the nodes with a value, the same in both directions.
    fn broken_list(&self, part: Part) -> Option<String> {
        let forth = self.listed(part);
        let mut back: Vec<_> = self.list(part).iter_oldest().collect();
        back.reverse();
        let is_equal = back.iter().map(|&id| self.handle(id)).eq(forth.iter().copied());
        let len = self.runs().filter(|&id| self.node(id).has(part)).count();
        let are_values = back.len() == len && back.iter().all(|&id| self.node(id).has(part));
        (!are_values || !is_equal)
            .then(|| format!("the list of {part:?} is broken: {} of {len} nodes", forth.len()))
    }

    /// Checks that the sizes are the sums over the nodes.
    fn broken_sizes(&self) -> Option<String> {
        let mut sizes = [Sizes::default(); 3];
        for id in self.runs() {
            let node = self.node(id);
            for (at, size) in sizes.iter_mut().enumerate() {
                let is_locked = node.locks[at] > 0;
                *(if is_locked { &mut size.locked } else { &mut size.evictable }) += node.values[at].len();
            }
        }
        (sizes != self.sizes).then(|| format!("sizes are {sizes:?}, counted were {:?}", self.sizes))
    }
}
