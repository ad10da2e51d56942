//! Eviction in steps: the engine frees the values of one step before it asks for the next.

use super::{HybridTree, NodeHandle, NodeId, PageDigest, Part, ROOT, Sizes};
use crate::base::{EngineSlot, prefetch};
use crate::cache::Namespace;

/// Slots and states that the tree has removed, for the engine to free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Frees {
    /// The slots for full attention.
    pub full: Vec<EngineSlot>,
    /// The slots for full attention whose window slots were removed.
    pub window: Vec<EngineSlot>,
    /// The slots of states.
    pub state: Vec<EngineSlot>,
    /// The numbers of removed values, by part.
    pub counts: [usize; 3],
    /// The removed nodes, in the order of their removal.
    pub nodes: Vec<NodeHandle>,
    /// Those of them whose pages have hashes.
    pub removed: Vec<RemovedNode>,
}

/// A removed node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemovedNode {
    /// The namespace of its prefix.
    pub name: Namespace,
    /// The hashes of its pages.
    pub hashes: Vec<PageDigest>,
}

impl Frees {
    /// Returns whether there is nothing to free.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.full.is_empty() && self.window.is_empty() && self.state.is_empty()
    }

    /// Returns the number of removed values of a part.
    #[must_use]
    pub const fn count(&self, part: Part) -> usize {
        self.counts[part.index()]
    }
}

/// A step of an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Victim {
    /// A leaf, to evict as a whole with [`HybridTree::evict_leaf`].
    Leaf(NodeHandle),
    /// A value of a node that stays. The tree has removed it already.
    Value(Frees),
    /// Enough was evicted, or nothing evictable is left.
    Nothing,
}

/// An eviction of a part in progress.
#[derive(Debug)]
struct Eviction {
    wanted: usize,
    /// The node to visit next, for windows and states.
    next: Option<NodeHandle>,
    /// For full attention, the leaves that were proposed and have not been queued again since, the last one
    /// last.
    proposed: Vec<NodeHandle>,
}

/// How many evictions pass between two prefetches of leaves.
const NODES_AHEAD: usize = 8;

/// After how many evictions the first leaves are prefetched: a call that evicts one needs none.
const FETCH_AT: usize = 1;

#[derive(Debug, Default)]
pub(super) struct Evictions([Option<Eviction>; 3]);

impl HybridTree {
    /// Begins to evict `wanted` values of a part. Returns `false` if an eviction of the part is in progress
    /// already.
    #[must_use]
    pub fn begin_eviction(&mut self, part: Part, wanted: usize) -> bool {
        if self.evictions.0[part.index()].is_some() {
            return false;
        }
        let next = match part {
            Part::Full => None,
            Part::Window | Part::State => {
                self.unlocked_from(part, self.list(part).oldest()).map(|id| self.handle(id))
            }
        };
        self.evictions.0[part.index()] = Some(Eviction { wanted, next, proposed: Vec::new() });
        true
    }

    /// Ends the eviction of a part. Returns `false` if none is in progress.
    #[must_use]
    pub fn end_eviction(&mut self, part: Part) -> bool {
        let Some(eviction) = self.evictions.0[part.index()].take() else { return false };
        for node in eviction.proposed {
            if let Some(id) = self.at(node) {
                self.requeue(id);
            }
        }
        true
    }

    /// Returns the next step of an eviction in which `evicted` values were evicted so far. Returns `None` if
    /// no eviction of the part is in progress.
    pub fn next_victim(&mut self, part: Part, evicted: usize) -> Option<Victim> {
        match part {
            Part::Full => self.next_leaf(evicted),
            Part::Window | Part::State => self.next_value(part, evicted),
        }
    }

    /// Returns the leaf to evict next.
    fn first_leaf(&mut self) -> Option<NodeId> {
        let Sizes { evictable, locked } = self.sizes[Part::Full.index()];
        self.queue.first(evictable + locked)
    }

    fn next_leaf(&mut self, evicted: usize) -> Option<Victim> {
        let eviction = self.evictions.0[Part::Full.index()].as_ref()?;
        let (wanted, refused) = (eviction.wanted, eviction.proposed.last().copied());
        // A leaf that the engine did not evict is not proposed again.
        if let Some(id) = refused.and_then(|node| self.at(node)) {
            self.unqueue(id);
        }
        if evicted >= wanted {
            return Some(Victim::Nothing);
        }
        let Some(id) = self.first_leaf() else { return Some(Victim::Nothing) };
        let wanted = self.may_evict(id, wanted - evicted);
        self.spare_front(id, wanted);
        let leaf = self.handle(id);
        self.evictions.0[Part::Full.index()].as_mut()?.proposed.push(leaf);
        Some(Victim::Leaf(leaf))
    }

    fn next_value(&mut self, part: Part, evicted: usize) -> Option<Victim> {
        let eviction = self.evictions.0[part.index()].as_ref()?;
        let (wanted, next) = (eviction.wanted, eviction.next);
        let Some(next) = next else { return Some(Victim::Nothing) };
        let is_evictable = |&id: &NodeId| self.node(id).has(part) && self.node(id).locks[part.index()] == 0;
        // A call in between may have removed or locked the node. Then the eviction starts over.
        let at =
            self.at(next).filter(is_evictable).or_else(|| self.unlocked_from(part, self.list(part).oldest()));
        let Some(id) = at.filter(|_| evicted < wanted) else {
            self.set_next(part, at);
            return Some(Victim::Nothing);
        };
        let after = self.unlocked_from(part, self.list(part).newer(id));
        self.set_next(part, after);
        if self.is_leaf(id) {
            return Some(Victim::Leaf(self.handle(id)));
        }
        let mut frees = Frees::default();
        self.free_part(id, part, &mut frees);
        let node = self.node(id);
        if part == Part::Window && node.has(Part::State) && node.locks[Part::State.index()] == 0 {
            // A state cannot be found without its window.
            self.free_part(id, Part::State, &mut frees);
        }
        self.requeue(id);
        Some(Victim::Value(frees))
    }

    fn set_next(&mut self, part: Part, to: Option<NodeId>) {
        let next = to.map(|id| self.handle(id));
        if let Some(eviction) = &mut self.evictions.0[part.index()] {
            eviction.next = next;
        }
    }

    /// Evicts a leaf with all its values. Returns `None` if the node no longer exists, and `Some(None)` if it
    /// is not a leaf or has locks.
    pub fn evict_leaf(&mut self, leaf: NodeHandle) -> Option<Option<Frees>> {
        let id = self.at(leaf)?;
        if !self.is_leaf(id) {
            return Some(None);
        }
        let mut frees = Frees::default();
        self.evict(id, &mut frees);
        Some(Some(frees))
    }

    /// Evicts leaves in the eviction order, until at least `wanted` slots for full attention were removed or
    /// nothing evictable is left. With [`EvictionOrder::Adaptive`](super::EvictionOrder::Adaptive) and full attention
    /// alone, only as much of the end of the last leaf is evicted as is wanted.
    pub fn evict_full(&mut self, wanted: usize) -> Frees {
        let mut frees = Frees::default();
        frees.full.reserve(wanted.min(self.sizes(Part::Full).evictable));
        while frees.count(Part::Full) < wanted
            && let Some(id) = self.first_leaf()
        {
            if frees.nodes.len() % NODES_AHEAD == FETCH_AT {
                self.fetch_leaves(id);
            }
            let wanted = self.may_evict(id, wanted - frees.count(Part::Full));
            self.spare_front(id, wanted);
            self.evict(id, &mut frees);
        }
        frees
    }

    /// Prefetches the leaves that will probably be evicted next, if `first` is the first one.
    fn fetch_leaves(&self, first: NodeId) {
        self.queue.visit_next(first, 2 * NODES_AHEAD, |leaf| {
            let node = self.node(leaf);
            prefetch(&node.parent);
            prefetch(&node.tokens);
            prefetch(&node.values);
            prefetch(&node.locks);
            prefetch(&node.hashes);
        });
    }

    fn evict(&mut self, id: NodeId, frees: &mut Frees) {
        self.remember(id);
        self.move_tail_up(id);
        self.move_needs_up(id);
        for part in [Part::Window, Part::State, Part::Full] {
            if self.node(id).has(part) {
                self.free_part(id, part, frees);
            }
        }
        let hashes = std::mem::take(&mut self.node_mut(id).hashes);
        if !hashes.is_empty() {
            let name = self.namespaces.name(self.node(id).namespace);
            frees.removed.push(RemovedNode { name, hashes });
        }
        frees.nodes.push(self.handle(id));
        self.remove(id);
    }

    /// Removes a value without locks from a node.
    pub(super) fn free_part(&mut self, id: NodeId, part: Part, frees: &mut Frees) {
        debug_assert!(id != ROOT && self.node(id).locks[part.index()] == 0, "nothing uses the value");
        let value = std::mem::take(&mut self.node_mut(id).values[part.index()]);
        self.sizes[part.index()].evictable -= value.len();
        frees.counts[part.index()] += value.len();
        match part {
            Part::Full => {
                self.owners.record_removed(&value);
                append(&mut frees.full, value);
            }
            // The engine finds the window slot by the slot for full attention.
            Part::Window => frees.window.extend_from_slice(self.node(id).value(Part::Full)),
            Part::State => append(&mut frees.state, value),
        }
        if part != Part::Full {
            self.list_mut(part).remove(id);
        }
    }

    /// Evicts the states on the path to `tail` that exceed
    /// [`StateConfig::max_per_path`](super::StateConfig::max_per_path), those nearest to the root first.
    /// Nodes with several children, locked nodes and leaves keep their states. Returns `None` if the node no
    /// longer exists.
    pub fn evict_excess_states(&mut self, tail: NodeHandle) -> Option<Frees> {
        let tail = self.at(tail)?;
        let mut frees = Frees::default();
        let Some(limit) = self.config.state.and_then(|state| state.max_per_path) else { return Some(frees) };
        let mut holders: Vec<_> = self.path(tail).filter(|&id| self.node(id).has(Part::State)).collect();
        let mut excess = holders.len().saturating_sub(limit);
        while let Some(id) = holders.pop().filter(|&id| excess > 0 && id != tail) {
            let node = self.node(id);
            if node.locks[Part::State.index()] == 0 && node.children == 1 {
                self.free_part(id, Part::State, &mut frees);
                self.requeue(id);
                excess -= 1;
            }
        }
        Some(frees)
    }
}

fn append(all: &mut Vec<EngineSlot>, mut more: Vec<EngineSlot>) {
    if all.is_empty() && all.capacity() <= more.len() { *all = more } else { all.append(&mut more) }
}
