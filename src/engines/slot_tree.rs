//! A tree that owns slots of an allocator, for engines that hold nodes and evict by themselves.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{Epoch, Error, ErrorKind, Id, IndexVec, Page, Result, try_with_capacity};
use crate::cache::{
    BlockTokens, Cause, Evicted, Namespace, NodeHandle, NodeInfo, PolicyKind, Pressure, ResumeAt, Tokens,
    Tree, TreeStats,
};
use crate::memory::Stream;
use crate::pool::{CachedSizes, CachedSlots, Obtainable, Reclaim, TokenToKvPoolAllocator};
use crate::tensor::TensorView;

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
/// use kvpool::engines::{SlotTree, SlotTreeConfig};
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, TokenToKvPoolAllocator};
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let config = AllocatorConfig::new(8);
/// let allocator = Arc::new(TokenToKvPoolAllocator::new(&config, &host).unwrap());
/// let config = SlotTreeConfig { page_size: 1, name: "tree".into() };
/// let tree = SlotTree::new(config, Some(Arc::clone(&allocator))).unwrap();
/// drop(allocator.alloc(3, stream).unwrap().unwrap().keep());
/// let (name, prompt): (_, &[i32]) = (Namespace::Unnamed, &[5, 6, 7]);
/// let inserted = tree.insert(&name, &prompt, &IndexVec::I32(vec![1, 2, 3]), stream).unwrap();
/// tree.lock(inserted.node).unwrap();
/// assert_eq!(tree.evict(3, stream).freed, 0);
/// tree.unlock(inserted.node).unwrap();
/// assert_eq!(tree.find(&name, &&prompt[..2]).unwrap().len, 2);
/// assert_eq!(tree.evict(3, stream).removed_nodes.len(), 2, "the look-up has cut the node in two");
/// assert_eq!(allocator.available_size(), 8);
/// ```
pub struct SlotTree {
    config: SlotTreeConfig,
    slots: CachedSlots,
    state: Arc<RankedMutex<TreeState>>,
}

/// The largest page size: positions fit int32.
const MAX_PAGE_SIZE: usize = (1 << 31) - 1;

struct TreeState {
    tree: Tree,
    /// The root node, which is the end of the empty prefix.
    root: NodeHandle,
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
        if !(1..=MAX_PAGE_SIZE).contains(&config.page_size) {
            let text = format!("page_size is {}; it must be within [1, 2**31)", config.page_size);
            return Err(Error::config(text));
        }
        let slots = CachedSlots::new(allocator, config.name.clone())?;
        let mut tree = new_tree(&config);
        let root = tree.keep_root();
        let state = TreeState { tree, root, epoch: slots.epoch(), unreported: Vec::new() };
        let state = Arc::new(RankedMutex::new(LockRank::Cache, state));
        let reclaim: Arc<dyn Reclaim> = Arc::clone(&state) as _;
        slots.report(&reclaim);
        Ok(Self { config, slots, state })
    }

    /// Returns the settings of the tree.
    #[must_use]
    pub const fn config(&self) -> &SlotTreeConfig {
        &self.config
    }

    /// Returns the node at the end of no tokens.
    #[must_use]
    pub fn root(&self) -> NodeHandle {
        self.current().root
    }

    /// Finds the longest cached prefix of `tokens`, in whole pages, and refreshes it. Cuts a node in two if none ends there.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for a number that is no token id; the error of tokens that cannot be read.
    pub fn find(&self, namespace: &Namespace, tokens: &dyn Tokens) -> Result<NodePrefix> {
        let mut state = self.current();
        let node = state.tree.find_node(namespace, tokens, usize::MAX)?.unwrap_or(state.root);
        Ok(NodePrefix { node, len: state.tree.end_of(node).expect("the node was found") })
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
        let state = &mut *state;
        let pages = self.slots.usable(slots)?;
        let len = pages.len();
        let plan = state.tree.plan_insertion(namespace, tokens, &pages)?;
        let cached = plan.found();
        let fresh = tokens.to_vec(cached..len)?;
        tokens.check(len..tokens.count())?;
        if len == 0 {
            return Ok(Inserted {
                node: state.root,
                cached,
                len,
                removed_nodes: std::mem::take(&mut state.unreported),
            });
        }
        let returned = state.tree.returned_pages(&plan)?;
        state.tree.check_memory_for(&plan, fresh.len())?;
        let new = &pages[state.tree.first_new_page(&plan)..];
        call.take(state.epoch, new, &returned)?;
        let mut removed_nodes = std::mem::take(&mut state.unreported);
        let node = state.tree.insert(namespace, plan, &fresh, &pages[cached..], &mut removed_nodes);
        Ok(Inserted { node, cached, len, removed_nodes })
    }

    /// Keeps a node, and those before it, from being evicted.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] for a node that no longer exists.
    pub fn lock(&self, node: NodeHandle) -> Result<()> {
        self.current().tree.lock_node(node).ok_or_else(|| is_gone(node))
    }

    /// Undoes one [`Self::lock`].
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] for a node that no longer exists; [`ErrorKind::IndexOwnership`] for one
    /// that has no lock.
    pub fn unlock(&self, node: NodeHandle) -> Result<()> {
        let mut state = self.current();
        let end = state.tree.end_of(node).ok_or_else(|| is_gone(node))?;
        state.tree.unlock_node(node).ok_or_else(|| {
            let text = format!("node {} at {end} tokens has no lock to undo", node.number());
            Error::new(ErrorKind::IndexOwnership, text)
        })
    }

    /// Evicts whole leaves, and nodes that become leaves by that, until at least `tokens` slots became free
    /// or nothing is evictable.
    #[expect(clippy::must_use_candidate, reason = "callers that make room need no number")]
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
            let mut evicted = Evicted::default();
            let cause = Cause { pressure: Pressure::Evict, at: Instant::now() };
            state.tree.evict_leaves(tokens - all.freed, cause, &mut evicted, &mut all.removed_nodes);
            if evicted.pages.is_empty() {
                break;
            }
            // The next call reports the nodes that a clear of the allocator has removed.
            let Some(freed) = call.give_back(state.epoch, &evicted.pages) else { break };
            all.freed += freed;
            all.slots.extend(evicted.pages.iter().map(|page| page.number().cast_signed()));
        }
        all
    }

    /// Gives up everything, locked or not.
    #[expect(clippy::must_use_candidate, reason = "what was in it may be of no interest")]
    pub fn clear(&self, stream: Stream) -> EvictedNodes {
        let call = self.slots.begin_call(stream);
        let mut state = self.current();
        let mut removed_nodes = std::mem::take(&mut state.unreported);
        removed_nodes.extend(state.tree.handles());
        let pages = self.replace_tree(&mut state).pages;
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
        let pages = state.tree.pages_of(node, 0)?.ok_or_else(|| is_gone(node))?;
        let mut slots = try_with_capacity(pages.len())?;
        slots.extend(pages.iter().map(|page| page.number().cast_signed()));
        self.slots.tensor_of(slots, stream)
    }

    /// Returns the present state of a node. The cost of this call grows with the number of nodes.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] for a node that no longer exists.
    pub fn info(&self, node: NodeHandle) -> Result<NodeInfo> {
        self.current().tree.info(node).ok_or_else(|| is_gone(node))
    }

    /// Returns the evictable and locked tokens, at the cost of a lock.
    #[must_use]
    pub fn sizes(&self) -> CachedSizes {
        let state = self.current();
        CachedSizes { evictable: state.tree.evictable(), locked: state.tree.locked() }
    }

    /// Returns the statistics of the tree, in tokens.
    #[must_use]
    pub fn tree_stats(&self) -> TreeStats {
        self.current().tree.stats()
    }

    /// Checks every invariant.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`] with the broken invariant.
    pub fn verify(&self) -> Result<()> {
        let state = self.current();
        let cached = state.tree.stats().cached;
        let owned = self.slots.cached(state.epoch).unwrap_or(cached);
        let fault = state.tree.broken_invariant().or_else(|| {
            (cached > owned).then(|| format!("{cached} slots are cached, the tree owns {owned}"))
        });
        fault.map_or(Ok(()), |fault| {
            Err(Error::new(ErrorKind::IndexOwnership, format!("the tree is inconsistent: {fault}")))
        })
    }

    /// Locks the tree, which is emptied if the allocator was cleared.
    fn current(&self) -> RankedGuard<'_, TreeState> {
        let mut state = self.state.lock();
        let epoch = self.slots.epoch();
        if state.epoch != epoch {
            state.epoch = epoch;
            let removed_nodes = state.tree.handles();
            state.unreported.extend(removed_nodes);
            // The slots are free already.
            drop(self.replace_tree(&mut state));
        }
        state
    }

    /// Replaces the tree by an empty one. Returns the contents of the old one.
    fn replace_tree(&self, state: &mut TreeState) -> Evicted {
        let fresh = new_tree(&self.config).after(&state.tree);
        let mut old = std::mem::replace(&mut state.tree, fresh);
        state.root = state.tree.keep_root();
        old.take_all()
    }
}

impl Drop for SlotTree {
    fn drop(&mut self) {
        let call = self.slots.begin_call(Stream::default_of(self.slots.device()));
        let mut state = self.current();
        let pages = state.tree.take_all().pages;
        let _ = call.give_back(state.epoch, &pages);
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
        self.lock().tree.locked_pages()
    }
}

impl fmt::Debug for SlotTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotTree").field("config", &self.config).finish_non_exhaustive()
    }
}

fn new_tree(config: &SlotTreeConfig) -> Tree {
    /// The capacity in tokens, which this policy does not use.
    const TOKENS: u64 = 1 << 20;
    let policy = PolicyKind::Lru.policy(TOKENS, BlockTokens::of_page_size(1));
    Tree::new(1, ResumeAt::AnyPage, policy).with_match_unit(config.page_size)
}

#[cold]
fn is_gone(node: NodeHandle) -> Error {
    Error::stale(format!("node {} was evicted", node.number()))
}
