//! A tree that owns slots of an allocator, for engines that hold nodes and evict by themselves.
//!
//! Whole pages are in a [`HybridTree`]; what an insertion has after them is beside it ([`tails`]).

mod tails;

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use super::hybrid::{
    EvictionOrder, HybridConfig, HybridTree, Part, Place, TokenBlock, TokenRun, TokenSource,
};
use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{
    EngineSlot, Epoch, Error, ErrorKind, Id, IndexVec, KeyMap, Page, Result, check_memory, try_with_capacity,
    widen,
};
use crate::cache::{Namespace, NodeHandle, Tokens};
use crate::memory::Stream;
use crate::pool::{CachedSizes, CachedSlots, Obtainable, Reclaim, TokenToKvPoolAllocator};
use crate::tensor::TensorView;
use tails::{Tail, Tails};

/// Settings of a [`SlotTree`].
#[derive(Clone, Debug)]
pub struct SlotTreeConfig {
    /// Tokens that are found together.
    pub page_size: usize,
    /// The owner of cached slots in reports.
    pub name: String,
}

/// A prefix and the node at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodePrefix {
    /// The node that ends where the prefix ends.
    pub node: NodeHandle,
    /// Tokens of the prefix.
    pub len: usize,
}

/// The result of an insertion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inserted {
    /// The node that ends where the inserted tokens end.
    pub node: NodeHandle,
    /// Tokens that were cached before, in whole pages. The slots offered for them are the caller's still.
    pub cached: usize,
    /// Tokens inserted: those before the first slot that is not allocated.
    pub len: usize,
    /// Nodes that no longer exist.
    pub removed_nodes: Vec<NodeHandle>,
}

/// The result of an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictedNodes {
    /// Slots that became free. Without an allocator, all slots evicted.
    pub freed: usize,
    /// The slots that were evicted, in the order of eviction.
    pub slots: Vec<i32>,
    /// Nodes that no longer exist.
    pub removed_nodes: Vec<NodeHandle>,
}

/// The current state of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotNode {
    /// The parent; `None` for the root.
    pub parent: Option<NodeHandle>,
    /// The children, including tails.
    pub children: Vec<NodeHandle>,
    /// The tokens of the node itself, without those of its ancestors.
    pub tokens: Vec<i32>,
    /// The slots of these tokens.
    pub slots: Vec<EngineSlot>,
    /// The number of locks of the node and of all its descendants.
    pub locks: usize,
}

/// Statistics of a [`SlotTree`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotTreeStats {
    /// Cached tokens.
    pub sizes: CachedSizes,
    /// The number of nodes, without the root.
    pub nodes: usize,
    /// The size of the bookkeeping in bytes.
    pub bytes: usize,
}

/// Finds slots by tokens, and gives callers access to the nodes at the ends of prefixes. Calls are atomic and
/// thread-safe.
///
/// Slots that are inserted belong to the tree until they are evicted, if it has an allocator; without one
/// they are plain numbers. Insertions free nothing: slots of tokens that were cached before stay the
/// caller's. Only [`evict`](Self::evict) evicts, and it evicts whole nodes.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::IndexVec;
/// use kvpool::cache::Namespace;
/// use kvpool::engines::{
///     EvictedNodes, Inserted, NodePrefix, SlotNode, SlotTree, SlotTreeConfig, SlotTreeStats,
/// };
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, TokenToKvPoolAllocator};
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let config = AllocatorConfig::new(8);
/// let allocator = Arc::new(TokenToKvPoolAllocator::new(&config, &host).unwrap());
/// let config = SlotTreeConfig { page_size: 1, name: "tree".into() };
/// let tree = SlotTree::new(config, Some(Arc::clone(&allocator))).unwrap();
/// drop(allocator.alloc(3, stream).unwrap().unwrap().keep());
/// let (name, prompt): (_, &[i32]) = (Namespace::Unnamed, &[5, 6, 7]);
/// let inserted: Inserted = tree.insert(&name, &prompt, &IndexVec::I32(vec![1, 2, 3]), stream).unwrap();
/// tree.lock(inserted.node).unwrap();
/// assert_eq!(tree.evict(3, stream).freed, 0);
/// tree.unlock(inserted.node).unwrap();
/// let NodePrefix { node, len } = tree.find(&name, &&prompt[..2]).unwrap();
/// let SlotNode { tokens, children, .. } = tree.info(node).unwrap();
/// assert_eq!((len, tokens, children.len()), (2, vec![5, 6], 1));
/// let SlotTreeStats { nodes, .. } = tree.stats();
/// assert_eq!(nodes, 2, "the look-up has cut the node in two");
/// let EvictedNodes { freed, removed_nodes, .. } = tree.evict(3, stream);
/// assert_eq!((freed, removed_nodes.len()), (3, 2));
/// assert_eq!(allocator.available_size(), 8);
/// ```
pub struct SlotTree {
    slots: CachedSlots,
    state: Arc<RankedMutex<TreeState>>,
}

/// The largest page size: positions fit int32.
const MAX_PAGE_SIZE: usize = (1 << 31) - 1;

struct TreeState {
    tree: HybridTree,
    tails: Tails,
    /// The locks of each node that callers have locked.
    locks: KeyMap<NodeHandle, usize>,
    /// The epoch of the allocator in which the tree has its slots.
    epoch: Epoch,
    /// Nodes that were removed when the allocator was cleared, for the next report.
    unreported: Vec<NodeHandle>,
}

impl SlotTree {
    /// Creates an empty tree. It has the slots of `allocator`; without one, slots are plain numbers.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a `page_size` of 0 or beyond int32, and an allocator with pages of more than
    /// one slot.
    pub fn new(config: SlotTreeConfig, allocator: Option<Arc<TokenToKvPoolAllocator>>) -> Result<Self> {
        let SlotTreeConfig { page_size, name } = config;
        if !(1..=MAX_PAGE_SIZE).contains(&page_size) {
            return Err(Error::config(format!("page_size is {page_size}; it must be within [1, 2**31)")));
        }
        let slots = CachedSlots::new(allocator, name)?;
        check_memory(0)?;
        let order = EvictionOrder::Lru;
        let state = Arc::new(RankedMutex::new(
            LockRank::Cache,
            TreeState {
                tree: HybridTree::new(HybridConfig { page_size, order, window: None, state: None })
                    .without_owners(),
                tails: Tails::default(),
                locks: KeyMap::default(),
                epoch: slots.epoch(),
                unreported: Vec::new(),
            },
        ));
        let reclaim: Arc<dyn Reclaim> = Arc::clone(&state) as _;
        slots.report(&reclaim);
        Ok(Self { slots, state })
    }

    /// Returns the node at the end of no tokens.
    #[must_use]
    pub fn root(&self) -> NodeHandle {
        self.current().tree.root()
    }

    /// Finds the longest cached prefix of `tokens`, in whole pages, and refreshes it. Splits a node in two if
    /// none ends there.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for a number that is no token id; the error of tokens that cannot be read.
    pub fn find(&self, namespace: &Namespace, tokens: &dyn Tokens) -> Result<NodePrefix> {
        let mut state = self.current();
        let place = state.place_of(namespace, tokens, tokens.count())?;
        let len = place.len();
        tokens.check(len..tokens.count())?;
        state.check_memory_at(&place, 0)?;
        Ok(NodePrefix { node: state.tree.use_place(place), len })
    }

    /// Adds `tokens` with their `slots`, up to the first slot that is not allocated.
    ///
    /// The slots after the last whole page are kept in a node that no look-up finds. The caller's next
    /// insertion of the same slots takes it over. Until then it is not evicted while its parent is locked or
    /// is the root.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for a number that is no token id or no slot, and when there are not as
    /// many slots as tokens; [`ErrorKind::IndexOwnership`] for slots that are listed twice, or are cached
    /// with other tokens; [`ErrorKind::Stale`] when another thread clears the allocator meanwhile.
    /// Nothing is changed. Without an allocator, the caller has to pass different slots; [`Self::verify`]
    /// finds a slot that the tree has twice.
    pub fn insert(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        slots: &IndexVec,
        stream: Stream,
    ) -> Result<Inserted> {
        if tokens.count() != slots.len() {
            return Err(Error::argument(format!(
                "{} tokens and {} slots were inserted; the numbers must be equal",
                tokens.count(),
                slots.len()
            )));
        }
        let call = self.slots.begin_call(stream);
        let mut state = self.current();
        let pages = self.slots.usable(slots)?;
        let len = pages.len();
        let place = state.place_of(namespace, tokens, len)?;
        let cached = place.len();
        let fresh = tokens.to_vec(cached..len)?;
        tokens.check(len..tokens.count())?;
        let offered = Offered { namespace, tokens: &fresh, slots: &pages, cached };
        let overlap = state.overlap(&place, &offered);
        let returned: Vec<_> =
            overlap.returned.iter().flat_map(|&tail| state.tails.slots_of(tail)).map(page_of).collect();
        state.check_memory_at(&place, fresh.len())?;
        let continued = overlap.continued.map_or(0, |tail| state.tails.slots_of(tail).count());
        call.take(state.epoch, &pages[cached + continued..], &returned)?;
        let mut removed_nodes = std::mem::take(&mut state.unreported);
        let node = state.insert(place, overlap, &offered, &mut removed_nodes);
        Ok(Inserted { node, cached, len, removed_nodes })
    }

    /// Keeps a node, and those before it, from being evicted.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] for a node that no longer exists.
    pub fn lock(&self, node: NodeHandle) -> Result<()> {
        let mut state = self.current();
        let state = &mut *state;
        let (path_end, is_tail) = state.path_end(node).ok_or_else(|| is_gone(node))?;
        state.tree.pin(path_end).expect("the node exists");
        if is_tail {
            state.tails.lock(node);
        } else {
            *state.locks.entry(node).or_default() += 1;
        }
        Ok(())
    }

    /// Undoes one [`Self::lock`].
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] for a node that no longer exists; [`ErrorKind::IndexOwnership`] for one
    /// that has no lock.
    pub fn unlock(&self, node: NodeHandle) -> Result<()> {
        let mut state = self.current();
        let state = &mut *state;
        let (path_end, is_tail) = state.path_end(node).ok_or_else(|| is_gone(node))?;
        let locks = if is_tail {
            state.tails.get(node).map_or(0, |tail| tail.locks)
        } else {
            state.locks.get(&node).copied().unwrap_or(0)
        };
        match locks {
            0 => {
                let text = format!("node {} has no lock to undo", node.number());
                return Err(Error::new(ErrorKind::IndexOwnership, text));
            }
            _ if is_tail => state.tails.unlock(node),
            1 => drop(state.locks.remove(&node)),
            _ => *state.locks.get_mut(&node).expect("it has locks") -= 1,
        }
        state.tree.unpin(path_end).expect("the node exists").expect("it has a lock");
        state.uncover_tails(path_end);
        Ok(())
    }

    /// Evicts whole leaves, and nodes that become leaves by that, until at least `tokens` slots became free
    /// or nothing is evictable. Tails go first, because no look-up finds them.
    pub fn evict(&self, tokens: usize, stream: Stream) -> EvictedNodes {
        let call = self.slots.begin_call(stream);
        let mut state = self.current();
        let mut all = EvictedNodes {
            freed: 0,
            slots: Vec::new(),
            removed_nodes: std::mem::take(&mut state.unreported),
        };
        // A slot with another owner does not become free.
        while all.freed < tokens {
            let evicted = state.evict(tokens - all.freed, &mut all.removed_nodes);
            if evicted.is_empty() {
                break;
            }
            let pages: Vec<_> = evicted.into_iter().map(page_of).collect();
            // The next call reports the nodes that a clear of the allocator has removed.
            let Some(freed) = call.give_back(state.epoch, &pages) else { break };
            all.freed += freed;
            all.slots.extend(pages.iter().map(|page| page.number().cast_signed()));
        }
        all
    }

    /// Gives up everything, locked or not.
    #[expect(clippy::must_use_candidate, reason = "what was in it may be of no interest")]
    pub fn clear(&self, stream: Stream) -> EvictedNodes {
        let call = self.slots.begin_call(stream);
        let mut state = self.current();
        let mut removed_nodes = std::mem::take(&mut state.unreported);
        removed_nodes.extend(state.handles());
        let pages = state.take_all();
        match call.give_back(state.epoch, &pages) {
            None => EvictedNodes { freed: 0, slots: Vec::new(), removed_nodes },
            Some(freed) => {
                let slots = pages.iter().map(|page| page.number().cast_signed()).collect();
                EvictedNodes { freed, slots, removed_nodes }
            }
        }
    }

    /// Returns the slots of the tokens up to the end of a node: 1-D, valid on `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] for a node that no longer exists; as [`TokenToKvPoolAllocator::alloc`].
    pub fn slots(&self, node: NodeHandle, stream: Stream) -> Result<TensorView> {
        let state = self.current();
        let (path_end, _) = state.path_end(node).ok_or_else(|| is_gone(node))?;
        let runs = state.tree.slot_runs(path_end, state.tree.root()).ok_or_else(|| is_gone(node))?;
        let rest = state.tails.get(node).map_or(&[][..], |tail| &tail.slots);
        let mut slots = try_with_capacity(runs.count() + rest.len())?;
        for run in runs.iter().chain([rest]) {
            slots.extend(run.iter().map(|slot| slot.number().cast_signed()));
        }
        self.slots.tensor_of(slots, stream)
    }

    /// Returns the present state of a node. The cost of this call grows with the number of nodes.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] for a node that no longer exists.
    pub fn info(&self, node: NodeHandle) -> Result<SlotNode> {
        self.current().info(node).ok_or_else(|| is_gone(node))
    }

    /// Returns the evictable and locked tokens, at the cost of a lock and of a look-up for each node before a
    /// tail.
    #[must_use]
    pub fn sizes(&self) -> CachedSizes {
        self.current().sizes()
    }

    /// Returns the statistics of the tree. Visits every node.
    #[must_use]
    pub fn stats(&self) -> SlotTreeStats {
        let state = self.current();
        let locks = state.locks.capacity() * size_of::<(NodeHandle, usize)>();
        SlotTreeStats {
            sizes: state.sizes(),
            nodes: state.handles().count(),
            bytes: state.tree.bytes() + state.tails.bytes() + locks,
        }
    }

    /// Checks every invariant.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`] with the broken invariant.
    pub fn verify(&self) -> Result<()> {
        let state = self.current();
        let CachedSizes { evictable, locked } = state.sizes();
        let cached = evictable + locked;
        let owned = self.slots.cached(state.epoch).unwrap_or(cached);
        let fault = state.broken_invariant().or_else(|| {
            (cached > owned).then(|| format!("{cached} slots are cached, the tree owns {owned}"))
        });
        fault.map_or(Ok(()), |fault| {
            Err(Error::new(ErrorKind::IndexOwnership, format!("the tree of slots is inconsistent: {fault}")))
        })
    }

    /// Locks the tree, which is emptied if the allocator was cleared.
    fn current(&self) -> RankedGuard<'_, TreeState> {
        let mut state = self.state.lock();
        let epoch = self.slots.epoch();
        if state.epoch != epoch {
            state.epoch = epoch;
            let removed_nodes: Vec<_> = state.handles().collect();
            state.unreported.extend(removed_nodes);
            // The slots are free already.
            state.empty();
        }
        state
    }
}

impl Drop for SlotTree {
    fn drop(&mut self) {
        let call = self.slots.begin_call(Stream::default_of(self.slots.device()));
        let mut state = self.current();
        let pages = state.take_all();
        let _ = call.give_back(state.epoch, &pages);
    }
}

/// What an insertion offers.
#[derive(Clone, Copy)]
struct Offered<'a> {
    namespace: &'a Namespace,
    /// The tokens after the cached ones.
    tokens: &'a [i32],
    /// The slots of all tokens.
    slots: &'a [Page],
    /// The number of tokens that are cached already.
    cached: usize,
}

/// The tails of the caller on the path of an insertion.
struct Overlap {
    /// Those whose tokens others have inserted in the meantime.
    returned: Vec<NodeHandle>,
    /// The one that continues the cached tokens.
    continued: Option<NodeHandle>,
}

impl TreeState {
    /// Returns the end of the cached part of the first `len` tokens, in whole pages.
    fn place_of(&self, namespace: &Namespace, tokens: &dyn Tokens, len: usize) -> Result<Place> {
        let prompt = Prompt { tokens, len, block: RefCell::default(), failed: RefCell::default() };
        let place = self.tree.place_of(namespace, &prompt);
        prompt.failed.into_inner().map_or(Ok(place), Err)
    }

    /// Checks that there is memory for the split of a node at `place` and for `tokens` new tokens.
    fn check_memory_at(&self, place: &Place, tokens: usize) -> Result<()> {
        let moved = self.tree.tokens_to_move(place);
        check_memory((2 * moved + 4 * tokens) * size_of::<(i32, EngineSlot)>())
    }

    /// Returns the node of whole pages where the path to a node ends, and whether the node is a tail after it;
    /// `None` for one that no longer exists.
    fn path_end(&self, node: NodeHandle) -> Option<(NodeHandle, bool)> {
        if !Tails::is_tail(node) {
            return self.tree.contains(node).then_some((node, false));
        }
        self.tails.get(node).map(|tail| (tail.parent, true))
    }

    fn is_locked(&self, node: NodeHandle) -> bool {
        is_locked(&self.tree, node)
    }

    fn overlap(&self, place: &Place, offered: &Offered<'_>) -> Overlap {
        let mut found = Overlap { returned: Vec::new(), continued: None };
        if self.tails.is_empty() {
            return found;
        }
        let path = self.tree.path_to(self.tree.node_before(place)).expect("the node was found");
        let ends = path.iter().rev().map(|at| (at.node, at.end)).chain([(self.tree.root(), 0)]);
        for (node, end) in ends {
            let slots = &offered.slots[end..];
            let Some(tail) = self.tails.beginning(node, offered.namespace, slots) else { continue };
            let at = self.tails.get(tail).expect("it was found");
            // A locked one stays; it is the end of the insertion if that has no other slots.
            if at.locks > 0 && at.slots.len() < slots.len() {
                continue;
            }
            if end == offered.cached {
                found.continued = Some(tail);
            } else {
                found.returned.push(tail);
            }
        }
        found
    }

    /// Adds what is offered. Returns the node at its end, and adds the tails that no longer exist to `removed`.
    fn insert(
        &mut self,
        place: Place,
        overlap: Overlap,
        offered: &Offered<'_>,
        removed: &mut Vec<NodeHandle>,
    ) -> NodeHandle {
        for tail in overlap.returned {
            self.remove_tail(tail, removed);
        }
        let mut node = self.tree.use_place(place);
        if let Some(tail) = overlap.continued {
            if self.tails.slots_of(tail).count() == offered.tokens.len() {
                self.tails.refresh(tail);
                return tail;
            }
            self.remove_tail(tail, removed);
        }
        let slots: Vec<_> =
            offered.slots[offered.cached..].iter().map(|page| EngineSlot::new(page.number())).collect();
        let page_size = self.tree.config().page_size;
        let whole = slots.len() / page_size * page_size;
        if whole > 0 {
            let tokens = offered.tokens[..whole].iter().map(|token| token.cast_unsigned()).collect();
            let run = TokenRun::Narrow(tokens);
            node = (self.tree.add(node, offered.namespace, run, slots[..whole].to_vec()))
                .expect("the node before was found");
        }
        if whole == slots.len() {
            return node;
        }
        self.tails.add(Tail {
            parent: node,
            name: offered.namespace.clone(),
            tokens: offered.tokens[whole..].to_vec(),
            slots: slots[whole..].to_vec(),
            locks: 0,
            is_young: node == self.tree.root() && overlap.continued.is_none(),
            used: 0,
        })
    }

    /// Removes a tail, whose slots go to another node or to the caller.
    fn remove_tail(&mut self, tail: NodeHandle, removed: &mut Vec<NodeHandle>) {
        let Tail { locks, .. } = self.tails.remove(tail);
        debug_assert_eq!(locks, 0, "a locked tail stays");
        removed.push(tail);
    }

    /// Queues the tails that were set aside for locks on the path to a node.
    fn uncover_tails(&mut self, node: NodeHandle) {
        if !self.tails.are_some_aside() {
            return;
        }
        for at in self.tree.path_to(node).expect("the node exists") {
            if !is_locked(&self.tree, at.node) {
                self.tails.uncover(at.node);
            }
        }
    }

    /// Evicts at least `slots` slots, or all that are evictable, or fewer if the host has little memory. Returns
    /// them, and adds the nodes to `removed`.
    fn evict(&mut self, slots: usize, removed: &mut Vec<NodeHandle>) -> Vec<EngineSlot> {
        let slots = fitting(slots.min(self.sizes().evictable));
        let mut evicted = Vec::new();
        while evicted.len() < slots
            && let Some((handle, tail)) = self.tails.evict(|node| is_locked(&self.tree, node))
        {
            removed.push(handle);
            evicted.extend(tail.slots);
        }
        let mut frees = self.tree.evict_full(slots.saturating_sub(evicted.len()));
        removed.append(&mut frees.nodes);
        if evicted.is_empty() {
            return frees.full;
        }
        evicted.append(&mut frees.full);
        evicted
    }

    /// Removes everything, and returns the slots.
    fn take_all(&mut self) -> Vec<Page> {
        let mut all = self.tree.values(Part::Full);
        all.extend(self.tails.iter().flat_map(|(_, tail)| tail.slots.iter().copied()));
        self.empty();
        all.into_iter().map(page_of).collect()
    }

    /// Removes everything.
    fn empty(&mut self) {
        self.tree.reset();
        self.tails.clear();
        self.locks.clear();
    }

    /// Returns the handles of all nodes but the root.
    fn handles(&self) -> impl Iterator<Item = NodeHandle> + '_ {
        self.tree.handles().into_iter().skip(1).chain(self.tails.iter().map(|(handle, _)| handle))
    }

    fn sizes(&self) -> CachedSizes {
        let sizes = self.tree.sizes(Part::Full);
        let evictable = self.tails.evictable(|node| self.is_locked(node));
        CachedSizes {
            evictable: sizes.evictable + evictable,
            locked: sizes.locked + self.tails.slots() - evictable,
        }
    }

    fn info(&self, node: NodeHandle) -> Option<SlotNode> {
        if Tails::is_tail(node) {
            let tail = self.tails.get(node)?;
            return Some(SlotNode {
                parent: Some(tail.parent),
                children: Vec::new(),
                tokens: tail.tokens.clone(),
                slots: tail.slots.clone(),
                locks: tail.locks,
            });
        }
        let state = self.tree.state(node)?;
        let mut children = self.tree.children(node)?;
        children.extend(self.tails.of(node));
        let locks = if state.parent.is_none() {
            self.locks.values().sum::<usize>() + self.tails.iter().map(|(_, tail)| tail.locks).sum::<usize>()
        } else {
            widen(self.tree.locks(node, Part::Full)?)
        };
        let narrow = |&token: &i64| i32::try_from(token).expect("tokens fit int32");
        Some(SlotNode {
            parent: state.parent,
            children,
            tokens: state.tokens.iter().map(narrow).collect(),
            slots: self.tree.value(node, Part::Full)?.to_vec(),
            locks,
        })
    }

    fn broken_invariant(&self) -> Option<String> {
        let mut seen = HashSet::new();
        let mut slots = self.tree.values(Part::Full);
        slots.extend(self.tails.iter().flat_map(|(_, tail)| tail.slots.iter().copied()));
        let twice = slots.iter().find(|slot| !seen.insert(**slot));
        let is_locked = |node| self.tree.contains(node).then(|| self.is_locked(node));
        let page_size = self.tree.config().page_size;
        self.tree
            .broken_invariant()
            .or_else(|| self.tails.broken_invariant(is_locked))
            .or_else(|| twice.map(|slot| format!("slot {} is cached twice", slot.number())))
            .or_else(|| {
                let lost = self.locks.keys().find(|node| !self.tree.contains(**node));
                lost.map(|node| format!("{node:?} is locked, and gone"))
            })
            .or_else(|| self.miscounted_locks())
            .or_else(|| {
                let long = self.tails.iter().find(|(_, tail)| tail.slots.len() >= page_size);
                long.map(|(handle, _)| format!("{handle:?} is a whole page"))
            })
    }

    /// Describes a node whose locks in the tree are not those of callers on it and behind it, if there is one.
    fn miscounted_locks(&self) -> Option<String> {
        let in_tree = |node| widen(self.tree.locks(node, Part::Full).unwrap_or(0));
        self.tree.handles().into_iter().skip(1).find_map(|node| {
            let own = self.locks.get(&node).copied().unwrap_or(0);
            let tails = self.tails.of(node).filter_map(|tail| self.tails.get(tail));
            let children = self.tree.children(node)?.into_iter().map(in_tree).sum::<usize>();
            let expected = own + tails.map(|tail| tail.locks).sum::<usize>() + children;
            let found = in_tree(node);
            (found != expected).then(|| format!("{node:?} has {found} locks instead of {expected}"))
        })
    }
}

/// Returns whether a node of `tree` has locks; those of the root protect nothing.
fn is_locked(tree: &HybridTree, node: NodeHandle) -> bool {
    node != tree.root() && tree.locks(node, Part::Full).is_some_and(|locks| locks > 0)
}

fn page_of(slot: EngineSlot) -> Page {
    Page::new(slot.number())
}

/// Returns the number of slots, at most `slots`, for the lists of which the host has memory.
fn fitting(slots: usize) -> usize {
    /// Lists that are no longer than these count as of no caller's length.
    const FEW: usize = 16;
    let halves = std::iter::successors(Some(slots), |slots| (*slots > FEW).then_some(slots / 2));
    let has_memory =
        |slots: &usize| *slots <= FEW || check_memory(8 * slots * size_of::<EngineSlot>()).is_ok();
    halves.into_iter().find(has_memory).unwrap_or(0)
}

/// Tokens of a caller, as the tree compares them. What cannot be read differs from everything.
struct Prompt<'a> {
    tokens: &'a dyn Tokens,
    /// The number of tokens that count.
    len: usize,
    block: RefCell<Vec<i32>>,
    /// The first error.
    failed: RefCell<Option<Error>>,
}

impl Prompt<'_> {
    fn fail(&self, error: Error) {
        self.failed.borrow_mut().get_or_insert(error);
    }
}

impl TokenSource for Prompt<'_> {
    fn count(&self) -> usize {
        self.len
    }

    fn common(&self, at: usize, with: TokenBlock<'_>) -> usize {
        let TokenBlock::Narrow(with) = with else { return 0 };
        let mut block = self.block.borrow_mut();
        block.clear();
        block.extend(with.iter().map(|token| token.cast_signed()));
        self.tokens.common(at, &block).unwrap_or_else(|error| {
            self.fail(error);
            0
        })
    }

    fn read(&self, at: usize, count: usize, out: &mut Vec<i64>) {
        let mut block = self.block.borrow_mut();
        block.clear();
        match self.tokens.read(at..at + count, &mut block) {
            Ok(()) => out.extend(block.iter().map(|&token| i64::from(token))),
            Err(error) => {
                self.fail(error);
                out.extend(std::iter::repeat_n(-1, count));
            }
        }
    }
}

/// The tree appears in reports only: an allocation that is short never evicts from it.
impl Reclaim for RankedMutex<TreeState> {
    fn obtainable(&self, _stream: Stream) -> Obtainable {
        Obtainable::default()
    }

    fn reclaim(&self, _slots: usize, _stream: Stream) -> Result<usize> {
        Ok(0)
    }

    fn locked(&self) -> Vec<Page> {
        let state = self.lock();
        let nodes = state.tree.slot_rows(|locks, _| locks[0] > 0).into_iter().map(|row| row.slot);
        let tails = state.tails.iter().filter(|(_, tail)| tail.is_kept() || state.is_locked(tail.parent));
        nodes.chain(tails.flat_map(|(_, tail)| tail.slots.iter().copied())).map(page_of).collect()
    }
}

impl fmt::Debug for SlotTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotTree").field("slots", &self.slots).finish_non_exhaustive()
    }
}

#[cold]
fn is_gone(node: NodeHandle) -> Error {
    Error::stale(format!("node {} was evicted", node.number()))
}
