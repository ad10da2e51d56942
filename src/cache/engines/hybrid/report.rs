//! Reports of the tree, and changes of single values.

use std::collections::{HashMap, HashSet};

use super::{HybridTree, NodeHandle, NodeId, PageDigest, Part, ROOT, TokenSource};
use crate::base::{EngineSlot, Error, Result, widen};
use crate::cache::Namespace;

/// A node on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathNode {
    /// The name of the node.
    pub node: NodeHandle,
    /// The node before it.
    pub parent: NodeHandle,
    /// Tokens of the prompt before its first.
    pub start: usize,
    /// Tokens up to its end.
    pub end: usize,
    /// Nodes directly behind it.
    pub children: usize,
}

/// A node as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeState {
    /// The node before it; `None` for the root.
    pub parent: Option<NodeHandle>,
    /// The tokens of the node, without those of the nodes before.
    pub tokens: Vec<i64>,
    /// Tokens up to its end.
    pub end: usize,
    /// Locks by part.
    pub locks: [u32; 3],
    /// The number of times that the node was inserted.
    pub hits: u32,
    /// Whether it may be evicted as a whole.
    pub is_leaf: bool,
    /// Whether it is in the list of a part.
    pub listed: [bool; 3],
}

/// The slot of a token, its position in the prompt, and the slot of the token before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRow {
    /// The slot of the token, for full attention.
    pub slot: EngineSlot,
    /// The token's position in the prompt, from 0 on.
    pub position: usize,
    /// The slot before; `None` for the first.
    pub before: Option<EngineSlot>,
}

/// Slots of the nodes on a way. See [`HybridTree::slot_runs`].
#[derive(Debug)]
pub struct SlotRuns<'a> {
    tree: &'a HybridTree,
    /// The deepest one first.
    nodes: Vec<NodeId>,
    count: usize,
}

impl SlotRuns<'_> {
    /// Returns the number of slots.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Returns the slots of one node after the other.
    pub fn iter(&self) -> impl Iterator<Item = &[EngineSlot]> {
        self.nodes.iter().rev().map(|&id| self.tree.node(id).value(Part::Full))
    }
}

impl HybridTree {
    /// Returns the slots for full attention behind `until` up to the end of `from`, run by run. Returns
    /// `None` if a node is gone or `until` is not on the way to `from`.
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

    /// Returns the slots of [`HybridTree::slot_runs`].
    #[must_use]
    pub fn slots_between(&self, from: NodeHandle, until: NodeHandle) -> Option<Vec<EngineSlot>> {
        Some(self.slot_runs(from, until)?.iter().flatten().copied().collect())
    }

    /// Returns the hash of the page that ends at `end` tokens on the way to a node, if it has one. Returns
    /// `None` if the node is gone.
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

    /// Names the pages from `start` up to the end of a node, on the way to it. Returns `None` if the node is
    /// gone.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) unless there is one hash for each page, and
    /// `start` is where a node begins. Nothing is changed.
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
            return Some(Err(Error::config(format!(
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

    /// Returns the value of a node: `None` if the node is gone, empty if it has none.
    #[must_use]
    pub fn value(&self, node: NodeHandle, part: Part) -> Option<&[EngineSlot]> {
        self.at(node).map(|id| self.node(id).value(part))
    }

    /// Gives a node a window or a state that it does not have, as its most recent use. Returns `None` if the
    /// node is gone.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for slots for full attention, a part that nodes
    /// do not have, a node that has a value, the root, and a value of a wrong length.
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
            return Some(Err(Error::config(problem)));
        }
        self.attach(id, part, value);
        Some(Ok(()))
    }

    /// Returns the ranges within `start..end` of the tokens that have no window.
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

    /// Gives the tokens `start..end`, whole pages that have no window, the windows `values`. Cuts nodes at
    /// the ends.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for tokens that are no whole pages, that are not
    /// there, or that have a window. Nothing is changed.
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
            return Err(Error::config("nodes have no windows"));
        }
        if !start.is_multiple_of(page_size) || !values.len().is_multiple_of(page_size) {
            return Err(Error::config(format!("tokens {start}..{end} are no whole pages of {page_size}")));
        }
        if !self.window_gaps(name, prompt, start, end).into_iter().eq(std::iter::once(start..end)) {
            return Err(Error::config(format!("tokens {start}..{end} are not all there without a window")));
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
                self.cut(id, span.start - at);
            }
            let is_cut = span.len() < self.node(id).tokens.len();
            let target = if is_cut { self.cut(id, span.len()) } else { id };
            self.attach(target, Part::Window, values[span.start - start..span.end - start].to_vec());
        }
        Ok(())
    }

    /// Returns a node as it is now; `None` if it is gone.
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
            listed: Part::ALL.map(|part| part != Part::Full && self.is_listed(part, id)),
        })
    }

    /// Returns all nodes, the root first.
    #[must_use]
    pub fn handles(&self) -> Vec<NodeHandle> {
        std::iter::once(ROOT).chain(self.runs()).map(|id| self.handle(id)).collect()
    }

    /// Returns the nodes directly behind a node, in the order in which they came. Returns `None` if the node
    /// is gone. Looks at every node.
    #[must_use]
    pub fn children(&self, node: NodeHandle) -> Option<Vec<NodeHandle>> {
        let id = self.at(node)?;
        let mut children: Vec<_> = self.runs().filter(|&child| self.node(child).parent == id).collect();
        children.sort_unstable_by_key(|&child| self.node(child).place);
        Some(children.into_iter().map(|child| self.handle(child)).collect())
    }

    /// Returns the nodes with a value of a part, the most recent first.
    #[must_use]
    pub fn listed(&self, part: Part) -> Vec<NodeHandle> {
        let first = self.list(part).first;
        std::iter::successors(first, |&id| self.earlier(part, id)).map(|id| self.handle(id)).collect()
    }

    /// Returns all values of a part.
    #[must_use]
    pub fn values(&self, part: Part) -> Vec<EngineSlot> {
        self.runs().flat_map(|id| self.node(id).value(part)).copied().collect()
    }

    /// Returns the path to a node, the root left out; `None` if the node is gone.
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
    /// positions in `nodes`; `None` if a node is gone.
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

    /// Returns the slots for full attention of all nodes that `wanted` accepts, by its locks and whether it
    /// has a window.
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
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.nodes.iter().filter(|(_, node)| !node.tokens.is_empty()).map(|(id, _)| id)
    }
}
