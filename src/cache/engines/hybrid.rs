//! A radix tree whose nodes carry values of several kinds of attention, for engines that drive it node by
//! node.
//!
//! Every node has the slots of its tokens for full attention ([`Part::Full`]). Beside them it may have slots
//! for sliding-window attention ([`Part::Window`]) and a state of linear attention ([`Part::State`]), which
//! come and go on their own. A prefix is found up to the deepest node that every part accepts: a window needs
//! its whole last stretch, a state only the node itself.
//!
//! The engine drives it: it names nodes by [`NodeHandle`], applies the [`Action`]s of an insertion to its
//! allocators between two [`HybridTree::advance`]s, and frees what an eviction hands out ([`Frees`]). The
//! tree decides everything else: which node goes next, what goes with it, what is locked, and what may be
//! found.
//!
//! *Invariant.* Every node except the root has slots for full attention, one a token; a window has one a
//! token or none; a node is in the list of a part exactly while it has a value of that part; leaves without
//! locks are queued by the rank of the eviction order. [`HybridTree::broken_invariant`] checks all of them.
//!
//! *Cost.* Finding and inserting cost one comparison of the tokens and one look-up a node. Evicting costs
//! what is evicted and a logarithm of the number of leaves. Locking costs the nodes on the path.
//!
//! It owns no slot, depends on no device, and is not synchronised.

mod evict;
mod find;
mod fingerprints;
mod insert;
mod invariants;
mod lists;
mod lock;
mod namespaces;
mod order;
mod report;
mod run;

use std::hash::RandomState;

use crate::base::{EngineSlot, Id, Result};

use crate::cache::node_arena::NodeArena;
use crate::cache::tree::Edges;
use crate::cache::{NodeHandle, NodeId};
use fingerprints::Fingerprints;
use lists::{List, ListLink};
use namespaces::{NamespaceId, Namespaces};
use order::{EvictionRank, Queue};

pub use evict::{Frees, RemovedNode, Victim};
pub use find::{Match, Peek};
pub use insert::{Action, AddedTokens, AdoptedRanges, Insert, InsertResult, PositionRange, Step};
pub use lock::{Boundary, LockResult, NotLocked, Receipt, SkippedParts, StateRelease, WindowRelease};
pub use order::EvictionOrder;
pub use report::{NodeState, PathNode, SlotRow, SlotRuns};
pub use run::{BLOCK, TokenBlock, TokenRun, differ};

/// The kinds of values of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// One slot a token, for full attention.
    Full,
    /// One slot a token, for sliding-window attention.
    Window,
    /// One state a node, for linear attention.
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

/// The name of a page in the reports of an engine: a digest of its tokens and of all before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageDigest(pub [u8; 32]);

/// The tokens of a prompt, which the tree compares and reads in the caller's memory.
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
    /// Returns the slots from `at` on, `count` of them.
    ///
    /// # Errors
    /// The error of values that cannot be read or are no slots.
    fn read(&self, at: usize, count: usize) -> Result<Vec<EngineSlot>>;
}

impl SlotSource for &[EngineSlot] {
    fn read(&self, at: usize, count: usize) -> Result<Vec<EngineSlot>> {
        Ok(self[at..at + count].to_vec())
    }
}

/// The behaviour of a window part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowConfig {
    /// Tokens of history that must be there.
    pub size: usize,
    /// Whether a prefix is found only with its window.
    pub gates: bool,
}

/// The behaviour of a state part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateConfig {
    /// States can be taken at multiples of this number of tokens.
    pub grid: usize,
    /// The maximum number of states that one path keeps.
    pub max_per_path: Option<usize>,
}

/// Settings of a [`HybridTree`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HybridConfig {
    /// Tokens that are found together, at least 1.
    pub page_size: usize,
    /// The order of evictions.
    pub order: EvictionOrder,
    /// The sliding window, if the model has one.
    pub window: Option<WindowConfig>,
    /// The states, if the model has some.
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

/// A moment: later ones are larger. A path is refreshed at one moment, its nodes the earlier the nearer to
/// the root they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Moment(u64);

/// Moments within a refresh of a path.
const MOMENTS_OF_PATH: u64 = 1 << 24;

impl Moment {
    /// Returns the moment `steps` nodes nearer to the root than this one.
    const fn before(self, steps: u64) -> Self {
        let steps = if steps < MOMENTS_OF_PATH { steps } else { MOMENTS_OF_PATH - 1 };
        Self(self.0 - steps)
    }
}

/// A run of tokens that one prompt after another used as a whole.
#[derive(Debug)]
struct Node {
    parent: NodeId,
    /// The fingerprint of the first page and the namespace.
    fingerprint: u32,
    children: u32,
    /// The place among the children of its parent: those that came earlier have lower numbers.
    place: u64,
    namespace: NamespaceId,
    /// A whole number of pages.
    tokens: TokenRun,
    /// Tokens up to its end.
    end: usize,
    /// Tokens of the longest prompt that went through it, evicted since or not.
    reach: usize,
    /// The digests of its pages, if the engine has named them.
    hashes: Vec<PageDigest>,
    /// The slots and states by part; empty where there is none.
    values: [Vec<EngineSlot>; 3],
    /// Numbers of locks, by part.
    locks: [u32; 3],
    /// The name of the window locks that end here.
    boundary: Option<Boundary>,
    /// The links in the lists of windows and states.
    links: [ListLink; 2],
    used: Moment,
    created: Moment,
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
            links: [ListLink::default(); 2],
            used: Moment::default(),
            created: Moment::default(),
            hits: 0,
            priority: 0,
            queued: None,
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

/// Values of a part, by whether they are locked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Values of nodes without locks of the part.
    pub evictable: usize,
    /// Values of nodes with such locks.
    pub locked: usize,
}

/// A size that would become negative, and what it would become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NegativeSize(pub i64);

/// The tree. See the [module](self).
///
/// ```
/// use kvpool::base::{EngineSlot, Id};
/// use kvpool::cache::Namespace;
/// use kvpool::cache::engines::hybrid::{EvictionOrder, HybridConfig, HybridTree, Insert, Part};
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
#[derive(Debug)]
pub struct HybridTree {
    config: HybridConfig,
    /// A node without tokens is the root, or not in use.
    nodes: NodeArena<Node>,
    edges: Edges,
    namespaces: Namespaces,
    next_place: u64,
    next_boundary: u64,
    fingerprints: Fingerprints,
    now: u64,
    sizes: [Sizes; 3],
    /// The lists of windows and states, the value used last first.
    lists: [List; 2],
    queue: Queue,
    evictions: evict::Evictions,
    insertion: Option<insert::PendingInsertion>,
}

const ROOT: NodeId = NodeId::FIRST;

impl HybridTree {
    /// Creates an empty tree.
    ///
    /// # Panics
    /// For a `page_size` of 0.
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
            lists: [List::default(), List::default()],
            queue: Queue::default(),
            evictions: evict::Evictions::default(),
            insertion: None,
        };
        tree.reset();
        tree
    }

    /// Returns the settings of the tree.
    #[must_use]
    pub const fn config(&self) -> &HybridConfig {
        &self.config
    }

    /// Forgets everything, locked or not. No later node has the name of an earlier one.
    pub fn reset(&mut self) {
        self.nodes.reset(Node::new);
        self.edges.clear();
        self.namespaces.clear();
        self.sizes = [Sizes::default(); 3];
        self.lists = [List::default(), List::default()];
        self.queue = Queue::default();
        self.evictions = evict::Evictions::default();
        self.insertion = None;
        let used = self.tick();
        let root = self.nodes.add(Node { locks: [1; 3], priority: i64::MIN, used, ..Node::new() });
        debug_assert_eq!(root, ROOT);
    }

    /// Returns the node at the end of no tokens.
    #[must_use]
    pub fn root(&self) -> NodeHandle {
        self.handle(ROOT)
    }

    /// Returns whether a node exists.
    #[must_use]
    pub fn contains(&self, node: NodeHandle) -> bool {
        self.at(node).is_some()
    }

    /// Returns the numbers of a part.
    #[must_use]
    pub const fn sizes(&self, part: Part) -> Sizes {
        self.sizes[part.index()]
    }

    /// Changes what a part counts on a node, whose values the engine backs with more or less than one row a
    /// value. Returns `None` if the node is gone.
    ///
    /// # Errors
    /// [`NegativeSize`] if less than nothing would be counted; nothing is changed.
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

    /// Returns the name of a node.
    #[inline]
    fn handle(&self, id: NodeId) -> NodeHandle {
        self.nodes.handle(id)
    }

    /// Returns the node of this name; `None` once it is gone.
    #[inline]
    fn at(&self, handle: NodeHandle) -> Option<NodeId> {
        self.nodes.at(handle)
    }

    /// Returns the next moment.
    const fn tick(&mut self) -> Moment {
        self.now += 1;
        Moment(self.now * MOMENTS_OF_PATH)
    }

    /// Returns the nodes from `id` up to the root, without it.
    fn path(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        std::iter::successors(Some(id), |&id| Some(self.node(id).parent)).take_while(|&id| id != ROOT)
    }

    /// Returns the child of `parent` that begins with `page`.
    fn child(&self, parent: NodeId, namespace: NamespaceId, page: &[i64]) -> Option<NodeId> {
        let is_match = |id: &NodeId| {
            let node = self.node(*id);
            // The others are there because of their hash alone.
            let is_child = *id != ROOT && node.parent == parent && node.namespace == namespace;
            is_child && node.tokens.block(0, page.len()).equals(page)
        };
        self.edges.get(parent, self.fingerprints.of_page(namespace, page)).find(is_match)
    }

    /// Makes `id`, whose parent, namespace and tokens are set, a child of its parent.
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

    /// Cuts the first `len` tokens off a node, as a node of their own before it, and returns that.
    fn cut(&mut self, id: NodeId, len: usize) -> NodeId {
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
                self.list_after(part, id, front);
            }
        }
        let now = self.tick();
        self.node_mut(id).used = now;
        self.requeue(id);
        front
    }

    /// Returns the node of the first `len` tokens of a node, which keeps the others. No other node refers to
    /// it yet.
    fn split_front(&mut self, id: NodeId, len: usize, used: Moment) -> Node {
        let pages = len / self.config.page_size;
        let node = self.node_mut(id);
        let end = node.end - node.tokens.len() + len;
        let tokens = node.tokens.cut(len);
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
        // A boundary is the older edge of its node.
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

    /// Brings the queue up to date with a node.
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
            self.queue.insert(rank, id);
        }
    }

    /// Gives a node a value of a part that it does not have, the most recent one of its list.
    fn attach(&mut self, id: NodeId, part: Part, value: Vec<EngineSlot>) {
        debug_assert!(!self.node(id).has(part) && !value.is_empty(), "a value for a node without");
        let (len, is_locked) = (value.len(), self.node(id).locks[part.index()] > 0);
        self.node_mut(id).values[part.index()] = value;
        let sizes = &mut self.sizes[part.index()];
        *(if is_locked { &mut sizes.locked } else { &mut sizes.evictable }) += len;
        if part != Part::Full {
            self.list_first(part, id);
        }
    }

    /// Adds a leaf behind `parent`.
    fn add_leaf(
        &mut self,
        parent: NodeId,
        namespace: NamespaceId,
        tokens: TokenRun,
        slots: Vec<EngineSlot>,
        priority: i64,
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
        self.attach(id, Part::Full, slots);
        self.requeue(parent);
        self.requeue(id);
        id
    }

    /// Records that a prompt has gone to the end of a node.
    fn raise_reach(&mut self, id: NodeId) {
        let end = self.node(id).end;
        let mut at = id;
        // The nodes before it are no leaves, so that none is queued by it.
        while at != ROOT && self.node(at).reach < end {
            self.node_mut(at).reach = end;
            at = self.node(at).parent;
        }
    }

    /// Removes a node without children and values.
    fn remove(&mut self, id: NodeId) {
        let parent = self.node(id).parent;
        self.unlink(id);
        if let Some(rank) = self.node_mut(id).queued.take() {
            self.queue.remove(rank, id);
        }
        *self.node_mut(id) = Node::new();
        self.nodes.vacate(id);
        self.requeue(parent);
    }
}
