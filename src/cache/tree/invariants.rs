//! Checks of the invariants of a tree, node by node. Tests and debugging use them.

use std::collections::{HashMap, HashSet};

use super::counts::Counts;
use super::{Kind, NodeId, Tree};
use crate::base::widen;

/// The children of a node, counted from their parent fields.
#[derive(Clone, Copy, Debug, Default)]
struct Children {
    count: u32,
    /// The number of children that have locks.
    locked: u32,
}

impl Tree {
    /// Describes a broken invariant, if there is one.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let ids: Vec<_> = self.nodes.ids().collect();
        let is_run = |id: &NodeId| self.node(*id).kind == Kind::Run;
        let listed: HashSet<_> = self.roots.listed().collect();
        let broken_run = |id: NodeId| {
            let is_found = self.node(self.node(id).root).kind == Kind::Root;
            if is_found && !listed.contains(&(self.node(id).root, id)) {
                return Some(format!("{id:?} is not listed with its namespace"));
            }
            self.broken_state(id).or_else(|| self.broken_contents(id)).or_else(|| self.broken_user(id))
        };
        let mut runs = ids.iter().copied().filter(is_run);
        (runs.find_map(broken_run))
            .or_else(|| self.broken_pages(&ids))
            .or_else(|| self.broken_sums(&ids))
            .or_else(|| self.broken_snapshot())
            .or_else(|| self.broken_needs())
    }

    /// Checks that the flags of a node for the queue and for a snapshot are right.
    fn broken_state(&self, id: NodeId) -> Option<String> {
        let node = self.node(id);
        let is_leaf = (node.locks, node.children) == (0, 0);
        if node.is_queued != is_leaf {
            return Some(format!(
                "{id:?} is queued: {}, and a leaf without locks: {is_leaf}",
                node.is_queued
            ));
        }
        (node.has_snapshot != self.snapshot_at(id).is_some())
            .then(|| format!("{id:?} has no entry for its snapshot"))
    }

    /// Checks that the tokens, the pages and the place of a node fit each other.
    fn broken_contents(&self, id: NodeId) -> Option<String> {
        let node = self.node(id);
        let (pages, tokens) = (node.pages.len(), node.tokens.len());
        if pages == 0 || tokens != pages * self.page_size {
            return Some(format!("{id:?} has {pages} pages and {tokens} tokens"));
        }
        if self.child(node.parent, &node.tokens[..self.page_size]) != Some(id) {
            return Some(format!("{id:?} is not found from its parent"));
        }
        let begin = widen(self.node(node.parent).end);
        (widen(node.end) != begin + tokens)
            .then(|| format!("{id:?} ends at {}, not behind its parent", node.end))
    }

    /// Checks that no two nodes have the same page.
    fn broken_pages(&self, ids: &[NodeId]) -> Option<String> {
        let mut seen = HashSet::new();
        let mut pages = ids.iter().flat_map(|&id| self.node(id).pages.iter());
        pages.find(|page| !seen.insert(**page)).map(|page| format!("page {page} is cached twice"))
    }

    /// Checks that the counts of each node and of the tree equal the sums over the nodes.
    fn broken_sums(&self, ids: &[NodeId]) -> Option<String> {
        let mut counts = Counts::default();
        let mut children: HashMap<NodeId, Children> = HashMap::new();
        let mut roots = 0;
        for &id in ids {
            let node = self.node(id);
            let pages = node.pages.len();
            counts.heap_capacity += node.heap_capacity();
            if node.kind != Kind::Run {
                roots += 1;
                continue;
            }
            let siblings = children.entry(node.parent).or_default();
            siblings.count += 1;
            siblings.locked += u32::from(node.locks > 0);
            counts.cached += pages;
            counts.locked += if node.locks > 0 { pages } else { 0 };
            counts.pinned += if self.is_pinned(id) { pages } else { 0 };
        }
        for &id in ids {
            let node = self.node(id);
            let Children { count, locked } = children.get(&id).copied().unwrap_or_default();
            if (node.children, node.locks) != (count, locked + node.leases) {
                return Some(format!("{id:?} counts {} children and {} locks", node.children, node.locks));
            }
        }
        if roots != self.roots.len() {
            return Some(format!("there are {roots} roots, counted {}", self.roots.len()));
        }
        (counts != self.counts).then(|| format!("the nodes have {counts:?}, counted {:?}", self.counts))
    }
}
