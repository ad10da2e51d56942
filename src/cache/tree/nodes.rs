//! The tree by its nodes, for engines that hold nodes instead of leases.
//!
//! Prefixes are found in whole steps ([`Tree::with_match_unit`]), while pages are kept one by one. What is
//! left of an insertion behind its last whole step is a *tail*: a leaf that no look-up finds. It stays with
//! those that inserted it: the next insertion of the same pages takes it over, and it is not evicted while
//! the node before it is locked, as the lock of its request is on that node. A root has no such lock, so a
//! tail below a root is locked until its pages are inserted again.
//!
//! *Cost.* A tail costs two look-ups in a table. Without tails there are none.

use std::collections::{BTreeSet, HashMap};

use crate::base::{Page, Result, widen};

use super::Cause;
use super::evict::Evicted;
use super::publish::Segment;
use super::{History, Kind, Namespace, NodeId, Place, Tick, Tokens, Tree};
use crate::cache::node_arena::NodeArena;
use crate::cache::{NodeHandle, Remembered};

/// The place of an insertion, and the tails that it meets.
#[derive(Debug)]
#[must_use]
pub struct Insertion {
    /// `None` for a namespace without a root.
    place: Option<Place>,
    /// Tails of the caller within what is cached: others have inserted these tokens meanwhile.
    returned: Vec<NodeId>,
    /// The tail of the caller behind what is cached.
    continued: Option<NodeId>,
}

impl Insertion {
    /// Returns the number of tokens that are cached already, in whole steps.
    #[must_use]
    pub fn found(&self) -> usize {
        self.place.map_or(0, |place| place.len)
    }
}

/// A node as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// The node before; `None` for a root.
    pub parent: Option<NodeHandle>,
    /// The nodes behind, tails included.
    pub children: Vec<NodeHandle>,
    /// The tokens of the node, without those of the nodes before.
    pub tokens: Vec<i32>,
    /// The pages of these tokens.
    pub pages: Vec<Page>,
    /// Locks of the node and of all nodes behind.
    pub locks: usize,
}

/// The tails by the nodes before them.
pub(super) type Tails = HashMap<NodeId, Siblings>;

/// The tails behind one node.
#[derive(Debug, Default)]
pub(super) struct Siblings {
    by_first_page: HashMap<Page, NodeId>,
    /// Pages of those without locks of their own.
    unlocked: usize,
    /// The tails that are to be queued when the node before them is unlocked.
    set_aside: BTreeSet<NodeId>,
    count: usize,
}

impl Tree {
    /// Sets the number of tokens that are matched together, a whole number of pages. By default it is one
    /// page.
    ///
    /// # Panics
    /// If `tokens` is not a whole number of pages, or the tree has nodes already.
    #[must_use]
    pub fn with_match_unit(mut self, tokens: usize) -> Self {
        let is_whole = tokens > 0 && tokens.is_multiple_of(self.page_size);
        assert!(is_whole, "a match unit is a whole number of pages");
        assert!(self.nodes.is_new(), "the match unit of a tree with nodes does not change");
        self.match_unit = tokens;
        self
    }

    /// Gives nodes names that `earlier` has not given. The tree is empty.
    #[must_use]
    pub fn after(mut self, earlier: &Self) -> Self {
        assert!(self.nodes.is_new(), "the nodes of a tree keep their names");
        self.nodes = NodeArena::after(&earlier.nodes);
        self
    }

    /// Returns the root of prefixes without a namespace, which stays until the tree ends.
    pub fn keep_root(&mut self) -> NodeHandle {
        let root = self.root_or_new(&Namespace::Unnamed);
        self.lock(root);
        self.roots.keep(root);
        self.handle(root)
    }

    /// Returns the name of a node.
    fn handle(&self, id: NodeId) -> NodeHandle {
        self.nodes.handle(id)
    }

    /// Returns the node of this name; `None` once it is gone.
    fn at(&self, handle: NodeHandle) -> Option<NodeId> {
        self.nodes.at(handle)
    }

    /// Finds the longest cached prefix of `tokens`, in whole steps and of at most `limit` tokens, and
    /// refreshes it. Cuts a node if none ends there. Returns `None` if nothing is found.
    ///
    /// # Errors
    /// The error of tokens that cannot be read or are none. Nothing is changed.
    pub fn find_node(
        &mut self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<Option<NodeHandle>> {
        let place = self.place_of(namespace, tokens, limit.min(tokens.count()))?;
        let len = place.map_or(0, |place| place.len);
        tokens.check(len..tokens.count())?;
        self.now = Tick::new(self.now.tokens() + tokens.count().max(1) as u64);
        let Some(place) = place.filter(|place| place.len > 0) else { return Ok(None) };
        let node = self.cut(place);
        self.refresh(node);
        Ok(Some(self.handle(node)))
    }

    /// Counts a use of a node and of those before it, with locks or without.
    fn refresh(&mut self, node: NodeId) {
        self.unqueue(node);
        self.touch(node, None);
        self.queue(node);
    }

    /// Returns the tokens up to the end of a node; `None` if it is gone.
    #[must_use]
    pub fn end_of(&self, node: NodeHandle) -> Option<usize> {
        self.at(node).map(|id| widen(self.node(id).end))
    }

    /// Returns the pages up to the end of a node, from token `from` on; `None` if it is gone.
    #[must_use]
    pub fn pages_of(&self, node: NodeHandle, from: usize) -> Option<Vec<Page>> {
        let id = self.at(node)?;
        let here = self.node(id);
        Some(self.pages_up_to(Place { node: id, pages: here.pages.len(), len: widen(here.end) }, from))
    }

    /// Finds out where `tokens` with `pages` go. Changes nothing.
    ///
    /// # Errors
    /// The error of tokens that cannot be read.
    pub fn plan_insertion(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        pages: &[Page],
    ) -> Result<Insertion> {
        let place = self.place_of(namespace, tokens, pages.len() * self.page_size)?;
        let mut plan = Insertion { place, returned: Vec::new(), continued: None };
        let Some(place) = place.filter(|_| !self.tails.is_empty()) else { return Ok(plan) };
        let root = self.root(namespace);
        for id in self.path(place.node).chain(root) {
            let end = widen(self.node(id).end);
            if end > place.len {
                continue;
            }
            let tail_pages = &pages[end / self.page_size..];
            let tail = tail_pages.first().and_then(|first| self.tails.get(&id)?.by_first_page.get(first));
            let Some(&tail) = tail.filter(|tail| tail_pages.starts_with(&self.node(**tail).pages)) else {
                continue;
            };
            let is_equal = tail_pages.len() == self.node(tail).pages.len();
            if self.has_foreign_locks(tail) && !is_equal {
                continue;
            }
            if end == place.len {
                plan.continued = Some(tail);
            } else {
                plan.returned.push(tail);
            }
        }
        Ok(plan)
    }

    /// Returns the pages that go back to the caller, who has others for their tokens in the tree now.
    #[must_use]
    pub fn returned_pages(&self, plan: &Insertion) -> Vec<Page> {
        plan.returned.iter().flat_map(|&tail| self.node(tail).pages.iter().copied()).collect()
    }

    /// Returns the position of the first inserted page that the tree does not have yet.
    #[must_use]
    pub fn first_new_page(&self, plan: &Insertion) -> usize {
        plan.found() / self.page_size + plan.continued.map_or(0, |tail| self.node(tail).pages.len())
    }

    /// Adds `tokens`, which follow the tokens that were found, with `pages`. Returns the node at their end.
    /// Adds the tails that ceased to exist to `removed`.
    pub fn insert(
        &mut self,
        namespace: &Namespace,
        plan: Insertion,
        tokens: &[i32],
        pages: &[Page],
        removed: &mut Vec<NodeHandle>,
    ) -> NodeHandle {
        for tail in plan.returned {
            self.take_tail(tail, removed);
        }
        let mut at = match plan.place {
            None => self.root_or_new(namespace),
            Some(place) => self.cut(place),
        };
        self.now = Tick::new(self.now.tokens() + 1);
        self.refresh(at);
        // The uses of the tail that is continued.
        let mut uses = 0;
        if let Some(tail) = plan.continued {
            if self.node(tail).tokens.len() == tokens.len() {
                self.unlock_tail(tail);
                self.refresh(tail);
                return self.handle(tail);
            }
            self.take_tail(tail, removed);
            uses = 1;
        }
        self.record_stored(at, tokens, pages);
        let (tokens, tail_tokens) = tokens.split_at(tokens.len() / self.match_unit * self.match_unit);
        let (pages, tail_pages) = pages.split_at(tokens.len() / self.page_size);
        at = self.add_units(at, tokens, pages);
        if !tail_tokens.is_empty() {
            at = self.add_tail(at, tail_tokens, tail_pages, Remembered { uses });
        }
        self.queue(at);
        self.handle(at)
    }

    /// Adds whole steps behind `node`, a node for each run of pages with the same past. Returns the last one.
    fn add_units(&mut self, node: NodeId, mut tokens: &[i32], mut pages: &[Page]) -> NodeId {
        let mut last = node;
        for Segment { pages: count, remembered, hash } in self.segments(node, tokens) {
            let (own_pages, later_pages) = pages.split_at(count);
            let (own_tokens, later_tokens) = tokens.split_at(count * self.page_size);
            (pages, tokens) = (later_pages, later_tokens);
            let history = History::of_new(remembered, self.now);
            last = self.add_below(last, own_tokens.into(), own_pages, history, hash);
        }
        last
    }

    /// Adds a tail behind `node`, and its own lock if `node` is a root.
    fn add_tail(&mut self, node: NodeId, tokens: &[i32], pages: &[Page], remembered: Remembered) -> NodeId {
        let parent = self.node(node);
        let mut cursor = self.rolling.cursor(parent.hash, widen(parent.end));
        cursor.push(tokens);
        let (hash, history) = (cursor.hash(), History::of_new(remembered, self.now));
        let tail = self.add_below(node, tokens.into(), pages, history, hash);
        if self.has_own_lock(tail) {
            self.lock(tail);
        }
        tail
    }

    /// Locks a node and those before it. Returns `None` if it is gone.
    pub fn lock_node(&mut self, node: NodeHandle) -> Option<()> {
        let id = self.at(node)?;
        self.lock(id);
        Some(())
    }

    /// Undoes [`Tree::lock_node`]. Returns `None` if the node is gone or has no such lock.
    pub fn unlock_node(&mut self, node: NodeHandle) -> Option<()> {
        let id = self.at(node).filter(|&id| self.has_foreign_locks(id))?;
        self.unlock(id);
        Some(())
    }

    /// Evicts whole leaves, and nodes that become leaves by that, until `evicted` has at least `pages` pages
    /// or nothing is evictable. Adds their former names to `leaves`.
    pub fn evict_leaves(
        &mut self,
        pages: usize,
        cause: Cause,
        evicted: &mut Evicted,
        leaves: &mut Vec<NodeHandle>,
    ) {
        evicted.pages.reserve(pages.saturating_sub(evicted.pages.len()).min(self.counts.evictable()));
        while evicted.pages.len() < pages
            && let Some(leaf) = self.queues.policy.victim(self.now)
        {
            if self.is_covered(leaf) {
                self.unqueue(leaf);
                self.set_aside(leaf);
                continue;
            }
            self.fetch_after(leaf);
            leaves.push(self.handle(leaf));
            self.trim(leaf, usize::MAX, cause, evicted);
        }
    }

    /// Returns the names of all nodes, without roots.
    #[must_use]
    pub fn handles(&self) -> Vec<NodeHandle> {
        self.all_runs().map(|id| self.handle(id)).collect()
    }

    pub(super) fn all_runs(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.nodes.iter().filter(|(_, node)| !node.pages.is_empty()).map(|(id, _)| id)
    }

    /// Returns a node as it is now; `None` if it is gone. Costs a visit of every node.
    #[must_use]
    pub fn info(&self, node: NodeHandle) -> Option<NodeInfo> {
        let id = self.at(node)?;
        let here = self.node(id);
        let is_descendant = |other: NodeId| other == id || self.path(other).any(|before| before == id);
        let locked = self.all_runs().filter(|&other| self.node(other).leases > 0 && is_descendant(other));
        Some(NodeInfo {
            parent: (here.kind == Kind::Run).then(|| self.handle(here.parent)),
            children: (self.all_runs().filter(|&child| self.node(child).parent == id))
                .map(|child| self.handle(child))
                .collect(),
            tokens: here.tokens.to_vec(),
            pages: here.pages.to_vec(),
            locks: locked.map(|other| widen(self.node(other).leases)).sum(),
        })
    }

    pub(super) fn tails_bytes(&self) -> usize {
        let each = size_of::<(Page, NodeId)>();
        let siblings = self.tails.values().map(|siblings| siblings.by_first_page.capacity() * each);
        self.tails.capacity() * size_of::<(NodeId, Siblings)>() + siblings.sum::<usize>()
    }

    /// Returns whether a node is a tail: too short to be found.
    pub(super) fn is_tail(&self, id: NodeId) -> bool {
        let node = self.node(id);
        node.tokens.len() < self.match_unit && node.kind == Kind::Run
    }

    /// Returns whether a node is a tail without locks that the locks of the node before it keep.
    pub(super) fn is_covered(&self, id: NodeId) -> bool {
        self.is_tail(id) && self.node(id).locks == 0 && self.covers(self.node(id).parent)
    }

    fn covers(&self, id: NodeId) -> bool {
        let node = self.node(id);
        node.locks > 0 && node.kind == Kind::Run
    }

    /// Records a new tail without locks.
    pub(super) fn record_tail(&mut self, id: NodeId) {
        let (parent, pages) = (self.node(id).parent, self.node(id).pages.len());
        let first = self.node(id).pages[0];
        self.counts.locked += if self.is_covered(id) { pages } else { 0 };
        let siblings = self.tails.entry(parent).or_default();
        siblings.by_first_page.insert(first, id);
        siblings.unlocked += pages;
        siblings.count += 1;
    }

    /// Undoes [`Tree::record_tail`].
    pub(super) fn forget_tail(&mut self, id: NodeId) {
        let (parent, pages) = (self.node(id).parent, self.node(id).pages.len());
        let first = self.node(id).pages[0];
        self.counts.locked -= if self.is_covered(id) { pages } else { 0 };
        let siblings = self.tails.get_mut(&parent).expect("the tail was recorded");
        if siblings.by_first_page.get(&first) == Some(&id) {
            siblings.by_first_page.remove(&first);
        }
        siblings.unlocked -= pages;
        siblings.set_aside.remove(&id);
        siblings.count -= 1;
        if siblings.count == 0 {
            self.tails.remove(&parent);
        }
    }

    /// Sets a covered tail aside until the node before it is unlocked.
    pub(super) fn set_aside(&mut self, id: NodeId) {
        let parent = self.node(id).parent;
        self.tails.get_mut(&parent).expect("the tail was recorded").set_aside.insert(id);
    }

    /// Counts as locked the pages of tails that the first lock of a node keeps. The locks of the nodes before
    /// it have not changed yet.
    pub(super) fn cover_tails(&mut self, id: NodeId) {
        if self.tails.is_empty() {
            return;
        }
        if self.is_tail(id) {
            let (parent, pages) = (self.node(id).parent, self.node(id).pages.len());
            // It was counted with those that its parent covers.
            self.counts.locked -= if self.covers(parent) { pages } else { 0 };
            let siblings = self.tails.get_mut(&parent).expect("the tail was recorded");
            siblings.unlocked -= pages;
            siblings.set_aside.remove(&id);
        } else if self.covers(id) {
            self.counts.locked += self.tails.get(&id).map_or(0, |tails| tails.unlocked);
        }
    }

    /// Undoes [`Tree::cover_tails`], and queues the tails that were set aside.
    pub(super) fn uncover_tails(&mut self, id: NodeId) {
        if self.tails.is_empty() {
            return;
        }
        if self.is_tail(id) {
            let (parent, pages) = (self.node(id).parent, self.node(id).pages.len());
            self.counts.locked += if self.covers(parent) { pages } else { 0 };
            self.tails.get_mut(&parent).expect("the tail was recorded").unlocked += pages;
        } else if self.node(id).kind == Kind::Run
            && let Some(tails) = self.tails.get_mut(&id)
        {
            self.counts.locked -= tails.unlocked;
            for tail in std::mem::take(&mut tails.set_aside) {
                self.queue(tail);
            }
        }
    }

    /// Returns whether the tail has the lock that those below a root have until their pages are inserted
    /// again.
    fn has_own_lock(&self, id: NodeId) -> bool {
        let node = self.node(id);
        self.is_tail(id) && self.node(node.parent).kind == Kind::Root && node.history.uses == 1
    }

    /// Returns whether a node has locks of [`Tree::lock_node`].
    fn has_foreign_locks(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let is_kept = self.roots.is_kept(id) || self.has_own_lock(id);
        node.leases > u32::from(is_kept)
    }

    fn unlock_tail(&mut self, tail: NodeId) {
        if self.has_own_lock(tail) {
            self.unlock(tail);
        }
    }

    /// Removes a tail whose pages another node or the caller gets.
    fn take_tail(&mut self, tail: NodeId, removed: &mut Vec<NodeHandle>) {
        self.unlock_tail(tail);
        removed.push(self.handle(tail));
        self.remove(tail, &mut Evicted::default());
    }
}
