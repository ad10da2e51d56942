//! A radix tree whose nodes have values for several kinds of attention, for engines that drive it node by
//! node.
//!
//! Every node has the slots of its tokens for full attention ([`Part::Full`]). It may also have slots for
//! sliding-window attention ([`Part::Window`]) and a state of linear attention ([`Part::State`]), which are
//! added and evicted independently. A prefix is found up to the deepest node that all parts accept:
//! sliding-window attention needs the slots of the whole last window, linear attention only the state of the
//! node itself. SGLang calls the parts components.
//!
//! The engine refers to nodes by [`NodeHandle`], applies the [`Action`]s of an insertion to its allocators
//! between two calls of [`HybridTree::advance`], and frees what an eviction returns ([`Frees`]). The tree
//! decides everything else: which node is evicted next and what is evicted with it, what is locked, and what
//! can be found.
//!
//! *Invariant.* Every node except the root has one slot for full attention for each token, and either one
//! window slot for each token or none. A node is in the list of windows or of states exactly if it has one.
//! Leaves without locks are queued by their rank in the eviction order, or by a policy.
//! [`HybridTree::broken_invariant`] checks all of them.
//!
//! *Cost.* Finding and inserting cost one comparison of the tokens, and one look-up for each node. Evicting
//! costs the evicted values, and a logarithm of the number of leaves. Locking costs the nodes on the path.
//!
//! The tree owns no slots, depends on no device, and is not synchronised.

mod evict;
mod find;
mod fingerprints;
mod insert;
mod invariants;
mod lists;
mod lock;
mod namespaces;
mod order;
mod place;
mod report;
mod run;
mod sessions;
mod slot_owners;
mod waiting;
mod worth;

use std::hash::RandomState;

use crate::base::{EngineSlot, Id, Result};

use crate::cache::Edges;
use crate::cache::NodeArena;
use crate::cache::{NodeHandle, NodeId, RecencyList};
use fingerprints::Fingerprints;
use namespaces::{NamespaceId, Namespaces};
use order::{EvictionRank, Queue};
use slot_owners::SlotOwners;
use worth::Request;

pub use evict::{Frees, RemovedNode, Victim};
pub use find::{Match, Peek};
pub use insert::{Action, AddedTokens, AdoptedRanges, Insert, InsertResult, PositionRange, Step};
pub use lock::{Boundary, LockResult, NotLocked, Receipt, SkippedParts, StateRelease, WindowRelease};
pub use order::EvictionOrder;
pub use place::Place;
pub use report::{NodeState, PathNode, SlotRow, SlotRuns};
pub use run::{BLOCK, TokenBlock, TokenRun, differ};
pub use slot_owners::SecondOwners;
pub use waiting::QueuedRequest;

/// A kind of attention, for which nodes have values. SGLang calls it a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Full attention: one slot for each token.
    Full,
    /// Sliding-window attention: one slot for each token.
    Window,
    /// Linear attention: one state for each node.
    State,
}

impl Part {
    /// Every part, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Full, Self::Window, Self::State];

    const fn index(self) -> usize {
        match self {
            Self::Full => 0,
            Self::Window => 1,
            Self::State => 2,
        }
    }
}

/// The hash of a page in the reports of an engine: a digest of its tokens and of all tokens before it.
///
/// ```
/// use kvpool::engines::hybrid::PageDigest;
/// assert_eq!(PageDigest([7; 32]), PageDigest([7; 32]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageDigest(pub [u8; 32]);

/// The tokens of a prompt, which the tree compares and reads in the caller's memory.
///
/// ```
/// use kvpool::base::{EngineSlot, Id};
/// use kvpool::engines::hybrid::{SlotSource, TokenBlock, TokenRun, TokenSource, differ};
/// let prompt: &[i64] = &[5, 6, 7];
/// let run = TokenRun::Narrow(vec![5, 6, 8]);
/// let TokenRun::Narrow(tokens) = &run else { panic!("all are below 2**32") };
/// assert_eq!(prompt.common(0, TokenBlock::Narrow(tokens)), 2);
/// assert!(differ(tokens, |at| prompt[at]));
/// let slots = [20, 21, 22].map(EngineSlot::new);
/// assert_eq!(SlotSource::read(&slots.as_slice(), 1, 2).unwrap(), slots[1..]);
/// ```
pub trait TokenSource {
    /// Returns the number of tokens.
    fn count(&self) -> usize;

    /// Returns how many tokens from `at` on equal the first ones of `with`, up to the first difference.
    ///
    /// `with` has at most [`BLOCK`] tokens, and the prompt has at least as many from `at` on.
    fn common(&self, at: usize, with: TokenBlock<'_>) -> usize;

    /// Appends `count` tokens from `at` on to `out`.
    fn read(&self, at: usize, count: usize, out: &mut Vec<i64>);
}

impl TokenSource for &[i64] {
    fn count(&self) -> usize {
        self.len()
    }

    fn common(&self, at: usize, with: TokenBlock<'_>) -> usize {
        let ours = &self[at..at + with.len()];
        if with.equals(ours) { ours.len() } else { with.common(ours) }
    }

    fn read(&self, at: usize, count: usize, out: &mut Vec<i64>) {
        out.extend_from_slice(&self[at..at + count]);
    }
}

/// The slots of a prompt, which the tree reads in the caller's memory.
pub trait SlotSource {
    /// Returns `count` slots from position `at` on.
    ///
    /// # Errors
    /// Returns an error if a value cannot be read or is not a slot.
    fn read(&self, at: usize, count: usize) -> Result<Vec<EngineSlot>>;
}

impl SlotSource for &[EngineSlot] {
    fn read(&self, at: usize, count: usize) -> Result<Vec<EngineSlot>> {
        Ok(self[at..at + count].to_vec())
    }
}

/// Settings for sliding-window attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowConfig {
    /// The size of the window in tokens.
    pub size: usize,
    /// Whether a prefix can be found only if the slots of its last window are there.
    pub gates: bool,
}

/// Settings for linear attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateConfig {
    /// Requests can take states at multiples of this number of tokens.
    pub grid: usize,
    /// The largest number of states on one path.
    pub max_per_path: Option<usize>,
}

/// Settings of a [`HybridTree`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HybridConfig {
    /// The number of tokens that are matched together, at least 1.
    pub page_size: usize,
    /// The order of evictions.
    pub order: EvictionOrder,
    /// The sliding window, if the model has one.
    pub window: Option<WindowConfig>,
    /// The states, if the model has linear attention.
    pub state: Option<StateConfig>,
}

impl HybridConfig {
    /// Returns whether nodes may have values of a part.
    #[must_use]
    pub const fn has(&self, part: Part) -> bool {
        match part {
            Part::Full => true,
            Part::Window => self.window.is_some(),
            Part::State => self.state.is_some(),
        }
    }
}

/// A logical time. All nodes of a path are used at one time; the times of nodes nearer to the root are a
/// little earlier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct UseTime(u64);

/// The number of times that a use of a path takes up.
const TIMES_PER_PATH: u64 = 1 << 24;

impl UseTime {
    /// Returns the time for the node `steps` nodes nearer to the root.
    const fn before(self, steps: u64) -> Self {
        let steps = if steps < TIMES_PER_PATH { steps } else { TIMES_PER_PATH - 1 };
        Self(self.0 - steps)
    }
}

/// A run of tokens that every prompt with these tokens has used as a whole.
#[derive(Debug)]
struct Node {
    parent: NodeId,
    /// The fingerprint of the first page and the namespace.
    fingerprint: u32,
    children: u32,
    /// The order among the children of the parent: those that were added earlier have lower numbers.
    place: u64,
    namespace: NamespaceId,
    /// The tokens: a whole number of pages.
    tokens: TokenRun,
    /// The number of tokens from the root to the end of the node.
    end: usize,
    /// The length of the longest prompt that contained the node, whether the rest was evicted since or not.
    reach: usize,
    /// The hashes of the pages, if the engine has set them.
    hashes: Vec<PageDigest>,
    /// The slots and states by part; empty if the node has none.
    values: [Vec<EngineSlot>; 3],
    /// The numbers of locks, by part.
    locks: [u32; 3],
    /// The boundary of the window locks that end at this node.
    boundary: Option<Boundary>,
    used: UseTime,
    created: UseTime,
    hits: u32,
    priority: i64,
    /// The rank of the node, if it is queued.
    queued: Option<EvictionRank>,
}

impl Node {
    fn new() -> Self {
        Self {
            parent: NodeId::new(0),
            fingerprint: 0,
            children: 0,
            place: 0,
            namespace: NamespaceId::UNNAMED,
            tokens: TokenRun::default(),
            end: 0,
            reach: 0,
            hashes: Vec::new(),
            values: Default::default(),
            locks: [0; 3],
            boundary: None,
            used: UseTime::default(),
            created: UseTime::default(),
            hits: 0,
            priority: 0,
            queued: None,
        }
    }

    /// Frees the memory that its tokens and slots do not need, if that is more than they do.
    fn shrink(&mut self) {
        self.tokens.shrink();
        for values in &mut self.values {
            if values.capacity() > 2 * values.len() {
                values.shrink_to_fit();
            }
        }
    }

    fn has(&self, part: Part) -> bool {
        !self.values[part.index()].is_empty()
    }

    fn value(&self, part: Part) -> &[EngineSlot] {
        &self.values[part.index()]
    }

    fn is_locked(&self) -> bool {
        self.locks.iter().any(|&locks| locks > 0)
    }
}

/// The numbers of values of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// The number of values of nodes without locks of the part.
    pub evictable: usize,
    /// The number of values of nodes with such locks.
    pub locked: usize,
}

/// The value that a size would have had, which is negative.
///
/// ```
/// use kvpool::base::{EngineSlot, Id};
/// use kvpool::cache::Namespace;
/// use kvpool::engines::hybrid::{EvictionOrder, HybridConfig, HybridTree, Insert, NegativeSize, Part};
/// let config = HybridConfig { page_size: 1, order: EvictionOrder::Lru, window: None, state: None };
/// let mut tree = HybridTree::new(config);
/// let (prompt, slots): (&[i64], _) = (&[5], [EngineSlot::new(20)]);
/// let step = tree.begin(&Namespace::Unnamed, &prompt, &slots.as_slice(), Insert::default()).unwrap();
/// let node = step.result.unwrap().node;
/// assert_eq!(tree.adjust(node, Part::Full, -3), Some(Err(NegativeSize(-2))));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NegativeSize(pub i64);

/// A radix tree with values for several kinds of attention: see the [module](self).
///
/// ```
/// use kvpool::base::{EngineSlot, Id};
/// use kvpool::cache::Namespace;
/// use kvpool::engines::hybrid::{EvictionOrder, HybridConfig, HybridTree, Insert, Part};
/// let config =
///     HybridConfig { page_size: 2, order: EvictionOrder::Lru, window: None, state: None };
/// let mut tree = HybridTree::new(config);
/// let (name, prompt): (_, &[i64]) = (Namespace::Unnamed, &[5, 6, 7, 8, 9]);
/// let slots = [20, 21, 22, 23, 24].map(EngineSlot::new);
/// let step = tree.begin(&name, &prompt, &slots.as_slice(), Insert::default()).unwrap();
/// let inserted = step.result.unwrap();
/// let found = tree.find(&name, &[5_i64, 6, 1].as_slice());
/// assert_eq!(found.len, 2);
/// assert_eq!(tree.slots_between(inserted.node, tree.root()).unwrap(), slots[..4]);
/// assert_eq!(tree.sizes(Part::Full).evictable, 4);
/// ```
///
/// ```
/// use kvpool::base::{EngineSlot, Id};
/// use kvpool::cache::Namespace;
/// use kvpool::engines::hybrid::{
///     Action, AddedTokens, AdoptedRanges, Boundary, EvictionOrder, Frees, HybridConfig, HybridTree, Insert,
///     InsertResult, LockResult, Match, NodeState, NotLocked, Part, PathNode, Peek, Place, Receipt, RemovedNode,
///     SecondOwners, Sizes, SkippedParts, SlotRow, SlotRuns, StateConfig, Step, Victim, WindowConfig,
/// };
/// let config = HybridConfig {
///     page_size: 1,
///     order: EvictionOrder::Lru,
///     window: Some(WindowConfig { size: 2, gates: true }),
///     state: Some(StateConfig { grid: 1, max_per_path: None }),
/// };
/// let mut tree = HybridTree::new(config);
/// let (name, prompt): (_, &[i64]) = (Namespace::Unnamed, &[5, 6, 7]);
/// let slots = [20, 21, 22].map(EngineSlot::new);
/// let insert = Insert { state: vec![EngineSlot::new(1)], ..Insert::default() };
/// let mut step: Step = tree.begin(&name, &prompt, &slots.as_slice(), insert).unwrap();
/// let Some(AddedTokens { tokens, .. }) = step.added.clone() else { panic!("all are new") };
/// assert_eq!(tokens, 0..3);
/// while step.result.is_none() {
///     for action in &step.actions {
///         match action {
///             // Here the slots of windows have the numbers of those for full attention.
///             Action::Rebuild { node, slots } => {
///                 tree.set_value(*node, Part::Window, slots.clone()).unwrap().unwrap();
///             }
///             Action::EvictExcess(tail) => drop(tree.evict_excess_states(*tail)),
///             other => panic!("nothing is freed, but {other:?}"),
///         }
///     }
///     step = tree.advance(&name, &prompt, &slots.as_slice()).unwrap();
/// }
/// let InsertResult { node, found, adopted, .. } = step.result.unwrap();
/// assert_eq!((found, adopted == AdoptedRanges::default()), (0, false));
///
/// let Match { len, .. } = tree.find(&name, &prompt);
/// let Peek { end, .. } = tree.peek(&name, &prompt);
/// let place: Place = tree.place_of(&name, &prompt);
/// assert_eq!((len, end, place.len()), (3, 3, 3));
/// let Some(NodeState { locks, .. }) = tree.state(node) else { panic!("it exists") };
/// let runs: SlotRuns<'_> = tree.slot_runs(node, tree.root()).unwrap();
/// assert_eq!((locks, runs.count()), ([0; 3], 3));
/// let path: Vec<PathNode> = tree.path_to(node).unwrap();
/// let rows: Vec<SlotRow> = tree.slot_rows(|_locks, _is_leaf| true);
/// assert_eq!((path.last().map(|last| last.end), rows.len()), (Some(3), 3));
///
/// // A lock of a request, and its release.
/// let LockResult { receipt, newly_locked } = tree.lock(node, SkippedParts::default()).unwrap();
/// let Receipt { skipped, boundary } = receipt;
/// assert!(!skipped.has(Part::Window) && newly_locked == 3);
/// assert!(boundary.map(Boundary::number).is_none_or(|number| number >= 1));
/// tree.pin(node).unwrap();
/// tree.unpin(node).unwrap().unwrap();
/// let Sizes { evictable, locked } = tree.sizes(Part::Full);
/// assert_eq!((evictable, locked), (0, 3));
/// let mut other = HybridTree::new(HybridConfig { window: None, state: None, ..config });
/// let NotLocked { part, .. } = {
///     let step = other.begin(&name, &prompt, &slots.as_slice(), Insert::default()).unwrap();
///     let node = step.result.unwrap().node;
///     other.unpin(node).unwrap().unwrap_err()
/// };
/// assert_eq!(part, Part::Full);
///
/// // An eviction, step by step.
/// assert!(other.begin_eviction(Part::Full, 3));
/// let Some(Victim::Leaf(leaf)) = other.next_victim(Part::Full, 0) else { panic!("there is one leaf") };
/// let frees: Frees = other.evict_leaf(leaf).unwrap().unwrap();
/// let removed: &[RemovedNode] = &frees.removed;
/// assert_eq!((frees.count(Part::Full), removed.len()), (3, 0));
/// other.end_eviction(Part::Full);
/// let SecondOwners { count, .. } = other.second_owners();
/// assert_eq!(count, 0);
/// ```
#[derive(Debug)]
pub struct HybridTree {
    config: HybridConfig,
    /// The nodes. One without tokens is the root, or its number is not in use.
    nodes: NodeArena<Node>,
    edges: Edges,
    namespaces: Namespaces,
    next_place: u64,
    next_boundary: u64,
    fingerprints: Fingerprints,
    now: u64,
    sizes: [Sizes; 3],
    /// The nodes with a value of each part, in the order of their last use. That of full attention is empty:
    /// its nodes are queued instead.
    lists: [RecencyList<NodeId>; 3],
    queue: Queue,
    evictions: evict::Evictions,
    insertion: Option<insert::PendingInsertion>,
    owners: SlotOwners,
}

const ROOT: NodeId = NodeId::FIRST;

impl HybridTree {
    /// Creates an empty tree.
    ///
    /// # Panics
    /// If `page_size` is 0; with [`EvictionOrder::Adaptive`], also unless it and the capacity are below 2**31.
    #[must_use]
    pub fn new(config: HybridConfig) -> Self {
        assert!(config.page_size > 0, "page_size is 0; a page has at least one token");
        let seed = RandomState::new();
        let mut tree = Self {
            config,
            nodes: NodeArena::new(),
            edges: Edges::new(&seed),
            namespaces: Namespaces::default(),
            next_place: 0,
            next_boundary: 1,
            fingerprints: Fingerprints::new(&seed),
            now: 0,
            sizes: [Sizes::default(); 3],
            lists: Default::default(),
            queue: Queue::new(&config),
            evictions: evict::Evictions::default(),
            insertion: None,
            owners: SlotOwners::default(),
        };
        tree.reset();
        tree
    }

    /// Returns the settings of the tree.
    #[must_use]
    pub const fn config(&self) -> &HybridConfig {
        &self.config
    }

    /// Removes everything, whether it is locked or not. No later node has the handle of an earlier one. A policy keeps
    /// what it has learned.
    pub fn reset(&mut self) {
        let queued = self.nodes.iter().filter(|(_, node)| node.queued.is_some());
        self.queue.clear(queued.map(|(id, _)| id));
        self.nodes.reset(Node::new);
        self.edges.clear();
        self.namespaces.clear();
        self.sizes = [Sizes::default(); 3];
        self.lists = Default::default();
        self.evictions = evict::Evictions::default();
        self.insertion = None;
        self.owners.clear();
        let used = self.tick();
        let root = self.nodes.add(Node { locks: [1; 3], priority: i64::MIN, used, ..Node::new() });
        debug_assert_eq!(root, ROOT);
    }

    /// Returns the root, which is the end of the empty prefix.
    #[must_use]
    pub fn root(&self) -> NodeHandle {
        self.handle(ROOT)
    }

    /// Returns whether a node exists.
    #[must_use]
    pub fn contains(&self, node: NodeHandle) -> bool {
        self.at(node).is_some()
    }

    /// Returns the numbers of values of a part.
    #[must_use]
    pub const fn sizes(&self, part: Part) -> Sizes {
        self.sizes[part.index()]
    }

    /// Adjusts the number of values of a part by what a node contributes, for an engine that backs the values
    /// of the node with more or fewer rows than there are values. Returns `None` if the node no longer
    /// exists.
    ///
    /// # Errors
    /// [`NegativeSize`] if the number would become negative. Nothing is changed then.
    pub fn adjust(
        &mut self,
        node: NodeHandle,
        part: Part,
        delta: i64,
    ) -> Option<std::result::Result<(), NegativeSize>> {
        let id = self.at(node)?;
        let here = self.node(id);
        if id == ROOT || !here.has(part) {
            return Some(Ok(()));
        }
        let is_locked = here.locks[part.index()] > 0;
        let sizes = &mut self.sizes[part.index()];
        let size = if is_locked { &mut sizes.locked } else { &mut sizes.evictable };
        let signed = i64::try_from(*size).expect("sizes are below 2**63");
        let after = signed.saturating_add(delta);
        Some(match usize::try_from(after) {
            Ok(after) => {
                *size = after;
                Ok(())
            }
            Err(_) => Err(NegativeSize(after)),
        })
    }

    #[inline]
    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id]
    }

    #[inline]
    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id]
    }

    /// Returns the handle of a node.
    #[inline]
    fn handle(&self, id: NodeId) -> NodeHandle {
        self.nodes.handle(id)
    }

    /// Returns the node with this handle; `None` if it no longer exists.
    #[inline]
    fn at(&self, handle: NodeHandle) -> Option<NodeId> {
        // The next handle of a number that is vacant names a node without tokens.
        self.nodes.at(handle).filter(|&id| id == ROOT || !self.node(id).tokens.is_empty())
    }

    /// Returns the next time.
    const fn tick(&mut self) -> UseTime {
        self.now += 1;
        UseTime(self.now * TIMES_PER_PATH)
    }

    /// Returns the nodes from `id` up to the root, not including the root.
    fn path(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        std::iter::successors(Some(id), |&id| Some(self.node(id).parent)).take_while(|&id| id != ROOT)
    }

    /// Returns the child of `parent` that begins with `page`.
    fn child(&self, parent: NodeId, namespace: NamespaceId, page: &[i64]) -> Option<NodeId> {
        let is_match = |id: &NodeId| {
            let node = self.node(*id);
            // Other nodes may have the same hash.
            let is_child = *id != ROOT && node.parent == parent && node.namespace == namespace;
            is_child && node.tokens.block(0, page.len()).equals(page)
        };
        self.edges.get(parent, self.fingerprints.of_page(namespace, page)).find(is_match)
    }

    /// Enters a node, whose parent, namespace and tokens are set, among the children of its parent.
    fn link(&mut self, id: NodeId) {
        let node = self.node(id);
        let (parent, namespace) = (node.parent, node.namespace);
        let fingerprint = self.fingerprints.of_run(namespace, &node.tokens, self.config.page_size);
        self.edges.insert(parent, fingerprint, id);
        self.node_mut(id).fingerprint = fingerprint;
        self.node_mut(parent).children += 1;
        if parent == ROOT {
            self.namespaces.add_child(namespace);
        }
    }

    /// Undoes [`HybridTree::link`].
    fn unlink(&mut self, id: NodeId) {
        let Node { parent, fingerprint, namespace, .. } = *self.node(id);
        self.node_mut(parent).children -= 1;
        if parent == ROOT {
            self.namespaces.remove_child(namespace);
        }
        self.edges.remove(parent, fingerprint, id);
    }

    /// Splits the first `len` tokens off a node, as a node of their own before it, and returns the new node.
    fn split_node(&mut self, id: NodeId, len: usize) -> NodeId {
        let used = self.tick();
        let front = self.split_front(id, len, used);
        let (parent, fingerprint) = (front.parent, front.fingerprint);
        let front = self.nodes.add(front);
        // The new node takes the place of the old one among its siblings.
        self.edges.remove(parent, fingerprint, id);
        self.edges.insert(parent, fingerprint, front);
        self.next_place += 1;
        let place = self.next_place;
        let node = self.node_mut(id);
        (node.parent, node.place) = (front, place);
        self.link(id);
        for part in [Part::Window, Part::State] {
            if self.node(front).has(part) {
                self.list_mut(part).insert_older_than(front, Some(id));
            }
        }
        let now = self.tick();
        self.node_mut(id).used = now;
        self.split_history(front, id);
        self.requeue(id);
        front
    }

    /// Creates the node of the first `len` tokens of a node, which keeps the others. No other node refers to
    /// it yet.
    fn split_front(&mut self, id: NodeId, len: usize, used: UseTime) -> Node {
        let pages = len / self.config.page_size;
        let node = self.node_mut(id);
        let end = node.end - node.tokens.len() + len;
        let tokens = node.tokens.split_front(len);
        let mut values: [Vec<EngineSlot>; 3] = Default::default();
        let mut locks = [0; 3];
        for part in [Part::Full, Part::Window] {
            let at = part.index();
            locks[at] = node.locks[at];
            if node.has(part) {
                let back = node.values[at].split_off(len);
                values[at] = std::mem::replace(&mut node.values[at], back);
            }
        }
        let mut hashes = Vec::new();
        if !node.hashes.is_empty() {
            let back = node.hashes.split_off(pages);
            hashes = std::mem::replace(&mut node.hashes, back);
        }
        // A boundary is at the beginning of its node.
        let boundary = node.boundary.take();
        let Node { parent, fingerprint, place, namespace, reach, created, hits, priority, .. } = *node;
        Node {
            parent,
            fingerprint,
            place,
            namespace,
            tokens,
            end,
            reach,
            hashes,
            values,
            locks,
            boundary,
            used,
            created,
            hits,
            priority,
            ..Node::new()
        }
    }

    /// Returns whether a node may be evicted as a whole.
    fn is_leaf(&self, id: NodeId) -> bool {
        let node = self.node(id);
        id != ROOT && node.children == 0 && !node.is_locked()
    }

    /// Updates the place of a node in the queue.
    fn requeue(&mut self, id: NodeId) {
        let rank = self.is_leaf(id).then(|| self.config.order.rank(self.node(id)));
        let previous = std::mem::replace(&mut self.node_mut(id).queued, rank);
        if previous == rank {
            return;
        }
        if let Some(rank) = previous {
            self.queue.remove(rank, id);
        }
        if let Some(rank) = rank {
            self.queue.insert(rank, id, &self.nodes[id]);
        }
    }

    /// Removes a node from the queue, if it is in it.
    fn unqueue(&mut self, id: NodeId) {
        if let Some(rank) = self.node_mut(id).queued.take() {
            self.queue.remove(rank, id);
        }
    }

    /// Gives a node a value of a part for which it has none, and makes it the most recent one of its list.
    fn attach(&mut self, id: NodeId, part: Part, value: Vec<EngineSlot>) {
        debug_assert!(!self.node(id).has(part) && !value.is_empty(), "a value for a node without");
        let (len, is_locked) = (value.len(), self.node(id).locks[part.index()] > 0);
        self.node_mut(id).values[part.index()] = value;
        let sizes = &mut self.sizes[part.index()];
        *(if is_locked { &mut sizes.locked } else { &mut sizes.evictable }) += len;
        if part != Part::Full {
            self.list_mut(part).push(id);
        }
    }

    /// Adds a leaf below `parent`.
    fn add_leaf(
        &mut self,
        parent: NodeId,
        namespace: NamespaceId,
        tokens: TokenRun,
        slots: Vec<EngineSlot>,
        priority: i64,
        request: Request,
    ) -> NodeId {
        let (used, created) = (self.tick(), self.tick());
        self.next_place += 1;
        let end = self.node(parent).end + tokens.len();
        let place = self.next_place;
        let id = self.nodes.add(Node {
            parent,
            place,
            namespace,
            tokens,
            end,
            used,
            created,
            priority,
            ..Node::new()
        });
        self.raise_reach(id);
        self.link(id);
        self.owners.record_adopted(&slots);
        self.attach(id, Part::Full, slots);
        self.requeue(parent);
        self.begin_history(id, request);
        self.requeue(id);
        id
    }

    /// Records that a prompt contained a node up to its end.
    fn raise_reach(&mut self, id: NodeId) {
        let end = self.node(id).end;
        let mut at = id;
        // The ancestors are not leaves, so their places in the queue do not change.
        while at != ROOT && self.node(at).reach < end {
            self.node_mut(at).reach = end;
            at = self.node(at).parent;
        }
    }

    /// Removes a node that has no children and no values.
    fn remove(&mut self, id: NodeId) {
        let parent = self.node(id).parent;
        self.unlink(id);
        self.unqueue(id);
        *self.node_mut(id) = Node::new();
        self.nodes.vacate(id);
        self.requeue(parent);
    }
}
