//! Finding prefixes.

use super::{BLOCK, HybridTree, NamespaceId, NodeHandle, NodeId, Part, ROOT, TokenSource};
use crate::cache::Namespace;

/// A prefix that every part accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// The number of tokens of the prefix.
    pub len: usize,
    /// The node at the end of the prefix; the root if nothing was found.
    pub node: NodeHandle,
    /// The deepest node with tokens of the prompt, whether or not the parts accept it.
    pub visited: Option<NodeHandle>,
    /// The number of tokens with slots for full attention.
    pub full_len: usize,
    /// The position at which window slots would make more of the prompt usable: the end of the whole pages
    /// with slots for full attention, if that is after the prefix.
    pub window_branch: Option<usize>,
    /// The position at which a state would make more of the prompt usable: the last multiple of the grid that
    /// has slots for full attention, if that is after the prefix.
    pub state_branch: Option<usize>,
}

/// How much of the last window has slots, during a walk down.
struct Coverage {
    /// The number of tokens since the last gap. Before the first gap everything is covered.
    len: usize,
    has_gap: bool,
}

/// Where a walk down ended.
#[derive(Debug)]
pub(super) struct WalkEnd {
    pub(super) node: NodeId,
    pub(super) len: usize,
    /// The node within which the walk ended, and how many of its tokens are equal; `None` if the walk ended
    /// at the end of a node.
    pub(super) part_of: Option<(NodeId, usize)>,
}

impl HybridTree {
    /// Returns the number of tokens in the whole pages of `prompt`.
    pub(super) fn whole_pages(&self, prompt: &dyn TokenSource) -> usize {
        prompt.count() / self.config.page_size * self.config.page_size
    }

    /// Returns the child of `node` to which the tokens from `at` on lead, and how many of its tokens are
    /// equal, in whole pages.
    ///
    /// The first `found` tokens are known to be in the tree. No two children of a node have the same first
    /// page, so the first pages suffice to find them. `page` is a buffer for a page.
    pub(super) fn step(
        &self,
        node: NodeId,
        namespace: NamespaceId,
        prompt: &dyn TokenSource,
        at: usize,
        found: usize,
        page: &mut Vec<i64>,
    ) -> Option<(NodeId, usize)> {
        let page_size = self.config.page_size;
        page.clear();
        prompt.read(at, page_size, page);
        let child = self.child(node, namespace, page)?;
        let tokens = &self.node(child).tokens;
        let common_from = |begin| begin + tokens.common(begin, prompt, at + begin);
        // Of the tokens that were found, only the last ones are compared again: if a caller is wrong about
        // them, it is likely to be there. The first page is equal.
        let known = found.saturating_sub(at).min(tokens.len()).min(prompt.count() - at);
        let mut common = common_from(known.saturating_sub(BLOCK).max(page_size));
        if common < known {
            common = common_from(page_size);
        }
        Some((child, common / page_size * page_size))
    }

    /// Walks down as far as the tokens are equal, and calls `visit` with each node on the way, the number of
    /// tokens before it, and the number of its tokens that are equal. Changes nothing.
    pub(super) fn walk(
        &self,
        name: &Namespace,
        prompt: &dyn TokenSource,
        end: usize,
        mut visit: impl FnMut(NodeId, usize, usize),
    ) -> WalkEnd {
        let mut reached = WalkEnd { node: ROOT, len: 0, part_of: None };
        let Some(namespace) = self.namespaces.number(name) else { return reached };
        let limit = self.whole_pages(prompt);
        let mut page = Vec::with_capacity(self.config.page_size);
        while reached.len < limit.min(end) {
            let Some((child, common)) = self.step(reached.node, namespace, prompt, reached.len, 0, &mut page)
            else {
                break;
            };
            visit(child, reached.len, common);
            if common < self.node(child).tokens.len() {
                reached.part_of = Some((child, common));
                break;
            }
            (reached.node, reached.len) = (child, reached.len + common);
        }
        reached
    }

    /// Finds the longest prefix that all parts accept, and records its use. Splits a node in two if the
    /// tokens differ within it.
    pub fn find(&mut self, name: &Namespace, prompt: &dyn TokenSource) -> Match {
        let mut best = (ROOT, 0);
        let mut coverage = Coverage { len: 0, has_gap: false };
        let mut path = Vec::new();
        let end = self.walk(name, prompt, usize::MAX, |node, _, _| path.push(node));
        let mut full_len = end.len;
        if let Some((node, common)) = end.part_of {
            full_len += common;
            let front = self.split_node(node, common);
            *path.last_mut().expect("the node is the last on the path") = front;
        }
        let mut len = 0;
        for &id in &path {
            len += self.node(id).tokens.len();
            if self.accepts(id, &mut coverage) {
                best = (id, len);
            }
        }
        let (best, len) = best;
        self.refresh_window(best);
        if self.config.state.is_some() && best != ROOT && self.node(best).has(Part::State) {
            self.list_mut(Part::State).touch(best);
        }
        self.touch_path(best);
        let branch = |grid: usize| Some(full_len / grid * grid).filter(|&branch| branch > len);
        Match {
            len,
            node: self.handle(best),
            visited: path.last().map(|&id| self.handle(id)),
            full_len,
            window_branch: self.config.window.and_then(|_| branch(self.config.page_size)),
            state_branch: self.config.state.and_then(|state| branch(state.grid)),
        }
    }

    /// Returns whether a request can resume at the end of a node.
    fn accepts(&self, id: NodeId, coverage: &mut Coverage) -> bool {
        let node = self.node(id);
        let mut is_accepted = true;
        if let Some(window) = self.config.window {
            if node.has(Part::Window) {
                coverage.len += node.tokens.len();
                is_accepted &= !coverage.has_gap || coverage.len >= window.size;
            } else {
                *coverage = Coverage { len: 0, has_gap: true };
                is_accepted &= !window.gates;
            }
        }
        if self.config.state.is_some() {
            is_accepted &= node.has(Part::State);
        }
        is_accepted
    }

    /// Records a use of a node and its ancestors, the node itself being used last.
    pub(super) fn touch_path(&mut self, id: NodeId) {
        let now = self.tick();
        let (mut at, mut steps) = (id, 0);
        loop {
            self.node_mut(at).used = now.before(steps);
            if at == ROOT {
                break;
            }
            steps += 1;
            at = self.node(at).parent;
        }
        // Only the end of the path can be a leaf.
        self.requeue(id);
    }

    /// Looks up how many tokens have slots for full attention, regardless of the other parts. Changes
    /// nothing.
    #[must_use]
    pub fn peek(&self, name: &Namespace, prompt: &dyn TokenSource) -> Peek {
        let end = self.walk(name, prompt, usize::MAX, |_, _, _| ());
        let (node, common) = end.part_of.unwrap_or((end.node, 0));
        Peek { len: end.len + common, node: self.handle(node), end: self.node(node).end }
    }
}

/// The result of [`HybridTree::peek`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peek {
    /// The number of tokens with slots for full attention.
    pub len: usize,
    /// The deepest node with some of these tokens.
    pub node: NodeHandle,
    /// The number of tokens up to the end of that node.
    pub end: usize,
}
