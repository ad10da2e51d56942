//! Reports of the contents of the tree, and changes of single values.

use std::collections::{HashMap, HashSet};

use super::{HybridTree, NodeHandle, NodeId, PageDigest, Part, ROOT, TokenSource};
use crate::base::{EngineSlot, Error, Result, widen};
use crate::cache::{Namespace, RecencyList};

/// A node on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathNode {
    /// The handle of the node.
    pub node: NodeHandle,
    /// The parent.
    pub parent: NodeHandle,
    /// The number of tokens before the node.
    pub start: usize,
    /// The number of tokens up to the end of the node.
    pub end: usize,
    /// The number of children.
    pub children: usize,
}

/// The current state of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeState {
    /// The parent; `None` for the root.
    pub parent: Option<NodeHandle>,
    /// The tokens of the node itself, without those of its ancestors.
    pub tokens: Vec<i64>,
    /// The number of tokens up to the end of the node.
    pub end: usize,
    /// The numbers of locks, by part.
    pub locks: [u32; 3],
    /// The number of times that the node was inserted.
    pub hits: u32,
    /// Whether the node may be evicted as a whole.
    pub is_leaf: bool,
    /// Whether the node is in the list of each part.
    pub listed: [bool; 3],
}

/// The slot of a token, its position in the prompt, and the slot of the token before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRow {
    /// The slot of the token, for full attention.
    pub slot: EngineSlot,
    /// The token's position in the prompt, from 0 on.
    pub position: usize,
    /// The slot of the token before; `None` for the first token.
    pub before: Option<EngineSlot>,
}

/// The slots of the nodes on a path. See [`HybridTree::slot_runs`].
#[derive(Debug)]
pub struct SlotRuns<'a> {
    tree: &'a HybridTree,
    /// The nodes, the deepest one first.
    nodes: Vec<NodeId>,
    count: usize,
}

impl SlotRuns<'_> {
    /// Returns the number of slots.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Returns the slots, node by node.
    pub fn iter(&self) -> impl Iterator<Item = &[EngineSlot]> {
        self.nodes.iter().rev().map(|&id| self.tree.node(id).value(Part::Full))
    }
}

impl HybridTree {
    /// Returns the slots for full attention after the end of `until` up to the end of `from`, node by node.
    /// Returns `None` if one of the nodes no longer exists, or `until` is not an ancestor of `from`.
    #[must_use]
    pub fn slot_runs(&self, from: NodeHandle, until: NodeHandle) -> Option<SlotRuns<'_>> {
        let (from, until) = (self.at(from)?, self.at(until)?);
        let mut nodes = Vec::new();
        let mut at = from;
        while at != until {
            if at == ROOT {
                return None;
            }
            nodes.push(at);
            at = self.node(at).parent;
        }
        Some(SlotRuns { tree: self, nodes, count: self.node(from).end - self.node(until).end })
    }

    /// Works like [`HybridTree::slot_runs`], but returns the slots in one vector.
    #[must_use]
    pub fn slots_between(&self, from: NodeHandle, until: NodeHandle) -> Option<Vec<EngineSlot>> {
        Some(self.slot_runs(from, until)?.iter().flatten().copied().collect())
    }

    /// Returns the hash of the page that ends at `end` tokens on the path to a node, if it has one. Returns
    /// `None` if the node no longer exists.
    #[must_use]
    pub fn hash_at(&self, node: NodeHandle, end: usize) -> Option<Option<PageDigest>> {
        let id = self.at(node)?;
        let holder = self.path(id).find(|&at| self.node(at).end - self.node(at).tokens.len() < end);
        let page = holder.filter(|_| end > 0).and_then(|at| {
            let here = self.node(at);
            let start = here.end - here.tokens.len();
            here.hashes.get((end - start) / self.config.page_size - 1).copied()
        });
        Some(page)
    }

    /// Sets the hashes of the pages from `start` up to the end of a node. Returns `None` if the node no
    /// longer exists.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) unless there is one hash for each page and a
    /// node on the path begins at `start`. Nothing is changed then.
    pub fn set_hashes(
        &mut self,
        node: NodeHandle,
        start: usize,
        hashes: &[PageDigest],
    ) -> Option<Result<()>> {
        let id = self.at(node)?;
        let end = self.node(id).end;
        let pages = end.saturating_sub(start) / self.config.page_size;
        let path: Vec<_> = self.path(id).take_while(|&at| self.node(at).end > start).collect();
        let first = path.last().map_or(end, |&at| self.node(at).end - self.node(at).tokens.len());
        if hashes.len() != pages || first != start {
            return Some(Err(Error::argument(format!(
                "{} hashes for the {pages} pages of tokens {start}..{end}, whose first node begins at {first}",
                hashes.len()
            ))));
        }
        let mut remaining = hashes;
        for &at in path.iter().rev() {
            let pages = self.node(at).tokens.len() / self.config.page_size;
            let (own, later) = remaining.split_at(pages);
            self.node_mut(at).hashes = own.to_vec();
            remaining = later;
        }
        Some(Ok(()))
    }

    /// Returns the value of a node for a part, which is empty if it has none. Returns `None` if the node no
    /// longer exists.
    #[must_use]
    pub fn value(&self, node: NodeHandle, part: Part) -> Option<&[EngineSlot]> {
        self.at(node).map(|id| self.node(id).value(part))
    }

    /// Gives a node window slots or a state, which it must not have, and makes it the most recently used node
    /// with such a value. Returns `None` if the node no longer exists.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for slots for full attention, for a part that
    /// the model does not have, for the root, for a node that has a value already, and for a value of a wrong
    /// length.
    pub fn set_value(&mut self, node: NodeHandle, part: Part, value: Vec<EngineSlot>) -> Option<Result<()>> {
        let id = self.at(node)?;
        let tokens = self.node(id).tokens.len();
        let problem = match part {
            Part::Full => Some("slots for full attention come by insertion".to_owned()),
            _ if !self.config.has(part) => Some(format!("nodes have no {part:?}")),
            _ if id == ROOT => Some("the root has no values".to_owned()),
            _ if self.node(id).has(part) => Some(format!("the node has a {part:?} already")),
            Part::Window if value.len() != tokens => {
                Some(format!("{} values for the window of {tokens} tokens", value.len()))
            }
            Part::State if value.is_empty() => Some("a state is at least one value".to_owned()),
            _ => None,
        };
        if let Some(problem) = problem {
            return Some(Err(Error::argument(problem)));
        }
        self.attach(id, part, value);
        Some(Ok(()))
    }

    /// Returns the ranges within `start..end` whose tokens have no window slots.
    #[must_use]
    pub fn window_gaps(
        &self,
        name: &Namespace,
        prompt: &dyn TokenSource,
        start: usize,
        end: usize,
    ) -> Vec<std::ops::Range<usize>> {
        let mut gaps: Vec<std::ops::Range<usize>> = Vec::new();
        let _ = self.walk(name, prompt, end, |id, at, common| {
            let gap = start.max(at)..end.min(at + common);
            if self.node(id).has(Part::Window) || gap.is_empty() {
                return;
            }
            match gaps.last_mut().filter(|last| last.end == gap.start) {
                Some(last) => last.end = gap.end,
                None => gaps.push(gap),
            }
        });
        gaps
    }

    /// Gives the tokens from `start` on, which are whole pages without window slots, the window slots
    /// `values`. Splits nodes at the ends of the range.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for tokens that are not whole pages, that are
    /// not in the tree, or that have window slots. Nothing is changed then.
    pub fn attach_window(
        &mut self,
        name: &Namespace,
        prompt: &dyn TokenSource,
        start: usize,
        values: &[EngineSlot],
    ) -> Result<()> {
        let end = start.saturating_add(values.len());
        let page_size = self.config.page_size;
        if self.config.window.is_none() {
            return Err(Error::argument("nodes have no windows"));
        }
        if !start.is_multiple_of(page_size) || !values.len().is_multiple_of(page_size) {
            return Err(Error::argument(format!("tokens {start}..{end} are no whole pages of {page_size}")));
        }
        if !self.window_gaps(name, prompt, start, end).into_iter().eq(std::iter::once(start..end)) {
            return Err(Error::argument(format!("tokens {start}..{end} are not all there without a window")));
        }
        let mut nodes = Vec::new();
        let _ = self.walk(name, prompt, end, |id, at, common| {
            let span = start.max(at)..end.min(at + common);
            if !span.is_empty() {
                nodes.push((id, at, span));
            }
        });
        for (id, at, span) in nodes {
            if span.start > at {
                self.split_node(id, span.start - at);
            }
            let is_cut = span.len() < self.node(id).tokens.len();
            let target = if is_cut { self.split_node(id, span.len()) } else { id };
            self.attach(target, Part::Window, values[span.start - start..span.end - start].to_vec());
        }
        Ok(())
    }

    /// Returns the current state of a node; `None` if it no longer exists.
    #[must_use]
    pub fn state(&self, node: NodeHandle) -> Option<NodeState> {
        let id = self.at(node)?;
        let here = self.node(id);
        Some(NodeState {
            parent: (id != ROOT).then(|| self.handle(here.parent)),
            tokens: here.tokens.to_vec(),
            end: here.end,
            locks: here.locks,
            hits: here.hits,
            is_leaf: self.is_leaf(id),
            listed: Part::ALL.map(|part| part != Part::Full && here.has(part)),
        })
    }

    /// Returns the handles of all nodes, the root first.
    #[must_use]
    pub fn handles(&self) -> Vec<NodeHandle> {
        std::iter::once(ROOT).chain(self.runs()).map(|id| self.handle(id)).collect()
    }

    /// Returns the children of a node, in the order in which they were added. Returns `None` if the node no
    /// longer exists. Visits every node.
    #[must_use]
    pub fn children(&self, node: NodeHandle) -> Option<Vec<NodeHandle>> {
        let id = self.at(node)?;
        let mut children: Vec<_> = self.runs().filter(|&child| self.node(child).parent == id).collect();
        children.sort_unstable_by_key(|&child| self.node(child).place);
        Some(children.into_iter().map(|child| self.handle(child)).collect())
    }

    /// Returns the nodes with a value of a part, the most recently used first.
    #[must_use]
    pub fn listed(&self, part: Part) -> Vec<NodeHandle> {
        let list = self.list(part);
        std::iter::successors(list.newest(), |&id| list.older(id)).map(|id| self.handle(id)).collect()
    }

    /// Returns all values of a part.
    #[must_use]
    pub fn values(&self, part: Part) -> Vec<EngineSlot> {
        self.runs().flat_map(|id| self.node(id).value(part)).copied().collect()
    }

    /// Returns the path to a node, without the root; `None` if the node no longer exists.
    #[must_use]
    pub fn path_to(&self, node: NodeHandle) -> Option<Vec<PathNode>> {
        let id = self.at(node)?;
        let mut path: Vec<_> = self
            .path(id)
            .map(|id| {
                let here = self.node(id);
                PathNode {
                    node: self.handle(id),
                    parent: self.handle(here.parent),
                    start: here.end - here.tokens.len(),
                    end: here.end,
                    children: widen(here.children),
                }
            })
            .collect();
        path.reverse();
        Some(path)
    }

    /// Orders nodes so that those with common prefixes are next to each other, larger groups first. Returns
    /// positions in `nodes`; `None` if a node no longer exists.
    #[must_use]
    pub fn by_common_prefix(&self, nodes: &[NodeHandle]) -> Option<Vec<usize>> {
        let mut positions: HashMap<NodeId, Vec<usize>> = HashMap::new();
        let mut weights: HashMap<NodeId, usize> = HashMap::new();
        let mut seen = HashSet::from([ROOT]);
        let mut children: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
        for (position, &node) in nodes.iter().enumerate() {
            let id = self.at(node)?;
            positions.entry(id).or_default().push(position);
            *weights.entry(ROOT).or_default() += 1;
            for at in self.path(id) {
                *weights.entry(at).or_default() += 1;
                if seen.insert(at) {
                    children.entry(self.node(at).parent).or_default().push(at);
                }
            }
        }
        let mut order = Vec::with_capacity(nodes.len());
        let mut stack = vec![(ROOT, false)];
        while let Some((id, is_done)) = stack.pop() {
            if is_done {
                order.extend(positions.remove(&id).unwrap_or_default());
                continue;
            }
            stack.push((id, true));
            let mut siblings = children.remove(&id).unwrap_or_default();
            siblings.sort_unstable_by_key(|child| (usize::MAX - weights[child], self.node(*child).place));
            stack.extend(siblings.into_iter().rev().map(|child| (child, false)));
        }
        Some(order)
    }

    /// Returns the slots for full attention of all nodes that `wanted` accepts, which gets the locks of a
    /// node and whether it has window slots.
    #[must_use]
    pub fn slot_rows(&self, wanted: impl Fn(&[u32; 3], bool) -> bool) -> Vec<SlotRow> {
        let mut rows = Vec::new();
        for id in self.runs() {
            let here = self.node(id);
            if !wanted(&here.locks, here.has(Part::Window)) {
                continue;
            }
            let start = here.end - here.tokens.len();
            let mut before = self.node(here.parent).value(Part::Full).last().copied();
            for (offset, &slot) in here.value(Part::Full).iter().enumerate() {
                rows.push(SlotRow { slot, position: start + offset, before });
                before = Some(slot);
            }
        }
        rows
    }

    /// Returns the size of the bookkeeping in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let contents = self.runs().map(|id| {
            let here = self.node(id);
            let values: usize =
                here.values.iter().map(|value| value.capacity() * size_of::<EngineSlot>()).sum();
            here.tokens.bytes() + values + here.hashes.capacity() * size_of::<PageDigest>()
        });
        contents.sum::<usize>()
            + self.nodes.bytes()
            + self.edges.bytes()
            + self.namespaces.bytes()
            + self.queue.bytes()
            + self.lists.iter().map(RecencyList::bytes).sum::<usize>()
            + self.owners.bytes()
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.nodes.iter().filter(|(_, node)| !node.tokens.is_empty()).map(|(id, _)| id)
    }
}
