//! An interface to the nodes of a tree, for engines that hold nodes instead of leases.
//!
//! Prefixes are matched in units of several pages ([`Tree::with_match_unit`]), while pages are kept one by
//! one. The tokens of an insertion after its last whole unit become a *tail*: a leaf that no look-up finds.
//! It belongs to the request that inserted it. The next insertion of the same pages takes the tail over, and
//! it is not evicted while its parent is locked, because a request locks the parent. A root is never locked
//! by a request, so a tail below a root has a lock of its own until its pages are inserted again.
//!
//! *Cost.* Two look-ups in a table for each tail, and nothing in a tree without tails.

use std::collections::BTreeSet;

use crate::base::{KeyMap, Page, Result, check_memory, try_collect_each, widen};

use super::Cause;
use super::evict::Evicted;
use super::publish::Segment;
use super::{History, Kind, Namespace, NodeId, Tick, Tokens, Tree, TreePosition};
use crate::cache::node_arena::NodeArena;
use crate::cache::{NodeHandle, Remembered};

/// The position of an insertion in the tree, and the tails on its path.
#[derive(Debug)]
#[must_use]
pub struct Insertion {
    /// `None` for a namespace without a root.
    place: Option<TreePosition>,
    /// The tails of the caller whose tokens others have inserted in the meantime.
    returned: Vec<NodeId>,
    /// The tail of the caller that continues the cached tokens.
    continued: Option<NodeId>,
}

impl Insertion {
    /// Returns the number of tokens that are cached already, in whole match units.
    #[must_use]
    pub fn found(&self) -> usize {
        self.place.map_or(0, |place| place.len)
    }
}

/// The current state of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// The parent; `None` for a root.
    pub parent: Option<NodeHandle>,
    /// The children, including tails.
    pub children: Vec<NodeHandle>,
    /// The tokens of the node itself, without those of its ancestors.
    pub tokens: Vec<i32>,
    /// The pages of these tokens.
    pub pages: Vec<Page>,
    /// The number of locks of the node and of all its descendants.
    pub locks: usize,
}

/// The tails, by their parents.
pub(super) type Tails = KeyMap<NodeId, Siblings>;

/// The tails of one parent.
#[derive(Debug, Default)]
pub(super) struct Siblings {
    by_first_page: KeyMap<Page, NodeId>,
    /// The number of pages of tails without locks of their own.
    unlocked: usize,
    /// The tails to queue when the parent is unlocked.
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

    /// Makes the handles of nodes differ from those of `earlier`. The tree is empty.
    #[must_use]
    pub fn after(mut self, earlier: &Self) -> Self {
        assert!(self.nodes.is_new(), "the nodes of a tree keep their names");
        self.nodes = NodeArena::after(&earlier.nodes);
        self
    }

    /// Returns the root of prefixes without a namespace, and keeps it as long as the tree exists.
    pub fn keep_root(&mut self) -> NodeHandle {
        let root = self.root_or_new(&Namespace::Unnamed);
        self.lock(root);
        self.roots.set_locked(root);
        self.handle(root)
    }

    /// Returns the handle of a node.
    fn handle(&self, id: NodeId) -> NodeHandle {
        self.nodes.handle(id)
    }

    /// Returns the node with this handle; `None` if it no longer exists.
    fn at(&self, handle: NodeHandle) -> Option<NodeId> {
        self.nodes.at(handle)
    }

    /// Finds the longest cached prefix of `tokens`, in whole match units and of at most `limit` tokens, and
    /// records its use. Splits a node if none ends there. Returns `None` if nothing is found.
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
        place.map_or(Ok(()), |place| self.check_memory_at(place, 0, 0))?;
        self.now = Tick::new(self.now.tokens() + tokens.count().max(1) as u64);
        let Some(place) = place.filter(|place| place.len > 0) else { return Ok(None) };
        let node = self.split_node(place);
        self.refresh(node);
        Ok(Some(self.handle(node)))
    }

    /// Records a use of a node and its ancestors, whether they have locks or not.
    fn refresh(&mut self, node: NodeId) {
        self.unqueue(node);
        self.touch(node, None);
        self.queue(node);
    }

    /// Returns the number of tokens up to the end of a node; `None` if it no longer exists.
    #[must_use]
    pub fn end_of(&self, node: NodeHandle) -> Option<usize> {
        self.at(node).map(|id| widen(self.node(id).end))
    }

    /// Returns the pages of positions from `from` on up to the end of a node; `None` if it no longer exists.
    ///
    /// # Errors
    /// See [`Tree::pages`].
    pub fn pages_of(&self, node: NodeHandle, from: usize) -> Result<Option<Vec<Page>>> {
        let Some(id) = self.at(node) else { return Ok(None) };
        let here = self.node(id);
        self.pages_up_to(TreePosition { node: id, pages: here.pages.len(), len: widen(here.end) }, from)
            .map(Some)
    }

    /// Determines where `tokens` and their `pages` would be inserted. Changes nothing.
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

    /// Returns the pages that the caller gets back, because the tree has other pages for their tokens now.
    ///
    /// # Errors
    /// See [`Tree::pages`].
    pub fn returned_pages(&self, plan: &Insertion) -> Result<Vec<Page>> {
        try_collect_each(plan.returned.iter().flat_map(|&tail| self.node(tail).pages.iter().copied()))
    }

    /// Checks that there is memory for [`Tree::insert`] of `tokens` new tokens.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when there is not.
    pub fn check_memory_for(&self, plan: &Insertion, tokens: usize) -> Result<()> {
        match plan.place {
            Some(place) => self.check_memory_at(place, tokens, 0),
            None => check_memory(2 * tokens * (size_of::<i32>() + size_of::<Page>())),
        }
    }

    /// Returns the position of the first inserted page that the tree does not have yet.
    #[must_use]
    pub fn first_new_page(&self, plan: &Insertion) -> usize {
        plan.found() / self.page_size + plan.continued.map_or(0, |tail| self.node(tail).pages.len())
    }

    /// Adds `tokens`, which follow the tokens that were found, and their `pages`. Returns the node at their
    /// end, and adds the tails that no longer exist to `removed`.
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
            Some(place) => self.split_node(place),
        };
        self.now = Tick::new(self.now.tokens() + 1);
        self.refresh(at);
        // The number of uses of the tail that is continued.
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

    /// Adds whole match units after `node`, with one node for each run of pages that have the same history.
    /// Returns the last node.
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

    /// Adds a tail after `node`. If `node` is a root, the tail gets a lock of its own.
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

    /// Locks a node and its ancestors. Returns `None` if the node no longer exists.
    pub fn lock_node(&mut self, node: NodeHandle) -> Option<()> {
        let id = self.at(node)?;
        self.lock(id);
        Some(())
    }

    /// Undoes [`Tree::lock_node`]. Returns `None` if the node no longer exists or has no such lock.
    pub fn unlock_node(&mut self, node: NodeHandle) -> Option<()> {
        let id = self.at(node).filter(|&id| self.has_foreign_locks(id))?;
        self.unlock(id);
        Some(())
    }

    /// Evicts whole leaves, and their parents when these become leaves, until `evicted` has at least `pages`
    /// pages or nothing is evictable; fewer if the host has little memory. Adds the former handles of the
    /// evicted nodes to `leaves`.
    pub fn evict_leaves(
        &mut self,
        pages: usize,
        cause: Cause,
        evicted: &mut Evicted,
        leaves: &mut Vec<NodeHandle>,
    ) {
        let missing = pages.saturating_sub(evicted.pages.len()).min(self.counts.evictable());
        let Some(fitting) = self.fitting(missing) else { return };
        let pages = evicted.pages.len() + fitting;
        let has_keys = self.keyed.reserve_removed(fitting, &mut evicted.keys);
        if has_keys.is_err() || evicted.pages.try_reserve(fitting).is_err() {
            return;
        }
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

    /// Returns the handles of all nodes except roots.
    #[must_use]
    pub fn handles(&self) -> Vec<NodeHandle> {
        self.all_runs().map(|id| self.handle(id)).collect()
    }

    pub(super) fn all_runs(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.nodes.iter().filter(|(_, node)| !node.pages.is_empty()).map(|(id, _)| id)
    }

    /// Returns the current state of a node; `None` if it no longer exists. Visits every node.
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

    /// Returns whether a node is a tail, which is too short to be found.
    pub(super) fn is_tail(&self, id: NodeId) -> bool {
        let node = self.node(id);
        node.tokens.len() < self.match_unit && node.kind == Kind::Run
    }

    /// Returns whether a node is *covered*: a tail without locks that is protected by the locks of its
    /// parent.
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

    /// Sets a covered tail aside until its parent is unlocked.
    pub(super) fn set_aside(&mut self, id: NodeId) {
        let parent = self.node(id).parent;
        self.tails.get_mut(&parent).expect("the tail was recorded").set_aside.insert(id);
    }

    /// Counts the pages of tails as locked that the first lock of their parent protects. The locks of its
    /// ancestors have not changed yet.
    pub(super) fn cover_tails(&mut self, id: NodeId) {
        if self.tails.is_empty() {
            return;
        }
        if self.is_tail(id) {
            let (parent, pages) = (self.node(id).parent, self.node(id).pages.len());
            // The tail was counted with those that its parent covers.
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

    /// Returns whether a tail has the lock that a tail below a root has until its pages are inserted again.
    fn has_own_lock(&self, id: NodeId) -> bool {
        let node = self.node(id);
        self.is_tail(id) && self.node(node.parent).kind == Kind::Root && node.history.uses == 1
    }

    /// Returns whether a node has locks of [`Tree::lock_node`].
    fn has_foreign_locks(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let has_extra_lock = self.roots.is_locked(id) || self.has_own_lock(id);
        node.leases > u32::from(has_extra_lock)
    }

    fn unlock_tail(&mut self, tail: NodeId) {
        if self.has_own_lock(tail) {
            self.unlock(tail);
        }
    }

    /// Removes a tail, whose pages go to another node or to the caller.
    fn take_tail(&mut self, tail: NodeId, removed: &mut Vec<NodeHandle>) {
        self.unlock_tail(tail);
        removed.push(self.handle(tail));
        self.remove(tail, &mut Evicted::default());
    }
}
