//! A radix tree that maps tokens to pages. Its edges are runs of whole pages.

mod cause;
mod counts;
mod edges;
mod ends;
mod evict;
mod explain;
mod hold;
mod invariants;
mod keyed_pages;
mod offers;
mod pin;
mod publish;
mod roots;
mod sessions;
mod short_vec;
mod snapshot_order;
mod snapshots;
mod uses;
mod waiting;

use std::fmt;
use std::hash::RandomState;

use crate::base::{Id, Page, Result, StateSlot, widen};

use super::keys::PageHash;
use super::node_arena::NodeArena;
use super::rare_cases::{fingerprint_mask, shared_len};
use super::rolling_hash::{RollingHash, RollingHasher};
use super::sessions::{SessionId, Sessions};
use super::{
    BlockTokens, History, Namespace, NamespaceHash, NodeHandle, NodeId, Novelty, Outlook, Policy,
    RequestNovelty, Tick, Tokens,
};
use counts::Counts;
pub(crate) use edges::Edges;
use ends::LeastEnds;
use evict::Queues;
use explain::EvictionLog;
use keyed_pages::KeyedPages;
use offers::Offers;
use roots::{Roots, retain_listed};
use short_vec::ShortVec;
pub(super) use snapshot_order::FreedMemory;
use snapshots::Snapshots;
use uses::Uses;

pub use cause::{Cause, Pressure};
pub use evict::{AGE_BUCKETS, Evicted};
pub use explain::{EvictionRecord, Segment, SegmentState};
pub use hold::Hold;
pub use offers::{Continuation, LowerTierContents, OfferedPages, OfferedPieces, OfferedState, WritePolicy};
pub use publish::FoundPrefix;
pub use uses::UsedRun;

/// A run of whole pages that every prompt with these tokens has used as a whole: the prompts differ only
/// after its last page, or one of them ends there.
#[derive(Clone, Debug)]
// The node fills two cache lines.
#[repr(align(64))]
struct Node {
    /// The parent node. A root is its own parent.
    parent: NodeId,
    /// The root that the node is below. A root is its own root.
    root: NodeId,
    /// The fingerprint of the first page; with pages of one token, that token.
    fingerprint: u32,
    children: u32,
    /// The number of leases that end at this node, plus the number of its children that have locks. A node
    /// with locks is not evicted.
    locks: u32,
    /// The number of leases that end at this node.
    leases: u32,
    /// The tokens of the pages: `page_size` for each page.
    tokens: ShortVec<i32>,
    /// The pages of the node; not empty, except in a root.
    pages: ShortVec<Page>,
    /// The hash of all tokens up to the end of the node.
    hash: RollingHash,
    /// The number of tokens from the root to the end of the node.
    end: u32,
    history: History,
    /// Whether there is a snapshot of the state at the end of the node.
    has_snapshot: bool,
    /// Whether the node is in the queue of evictable leaves.
    is_queued: bool,
    /// The number of pins of prefixes that contain the node.
    pins: u32,
    /// The session that alone has used the node.
    user: Option<SessionId>,
    kind: Kind,
}

const _: () = assert!(size_of::<Node>() == 128, "a node fills two cache lines");

impl Node {
    /// Returns the capacity for tokens and pages outside of the node, in elements.
    fn heap_capacity(&self) -> usize {
        self.tokens.heap_capacity() + self.pages.heap_capacity()
    }

    /// Creates a node without tokens, neighbours and locks.
    fn new(kind: Kind, hash: RollingHash) -> Self {
        Self {
            parent: NodeId::new(0),
            root: NodeId::new(0),
            fingerprint: 0,
            children: 0,
            locks: 0,
            leases: 0,
            tokens: ShortVec::new(),
            pages: ShortVec::new(),
            hash,
            end: 0,
            history: History::default(),
            has_snapshot: false,
            is_queued: false,
            pins: 0,
            user: None,
            kind,
        }
    }
}

/// The kind of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The root of a namespace.
    Root,
    /// The root of prefixes that can no longer be found, because their namespace was cleared. It is removed
    /// with their last lease.
    Detached,
    /// A run of pages.
    Run,
}

/// A position in the tree: the first `pages` pages of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TreePosition {
    node: NodeId,
    pages: usize,
    /// The number of tokens from the root to the place.
    len: usize,
}

impl fmt::Debug for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tree")
            .field("page_size", &self.page_size)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl TreePosition {
    pub(super) const fn len(self) -> usize {
        self.len
    }
}

/// Statistics of a [`Tree`], in tokens unless the name says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeStats {
    /// The number of cached tokens: the evictable and the locked ones.
    pub cached: usize,
    /// The number of tokens that no lease holds.
    pub evictable: usize,
    /// The number of tokens that leases hold.
    pub locked: usize,
    /// The number of nodes, not counting roots.
    pub nodes: usize,
    /// The number of snapshots of states.
    pub snapshots: usize,
    /// The number of requests that wait.
    pub waiting: usize,
    /// The size of the bookkeeping in bytes.
    pub bytes: usize,
}

/// A radix tree of cached prefixes.
///
/// A node is evictable when no lease holds it or one of its descendants. Only leaves are evicted, and from
/// their end, so a prefix stays as long as any longer prefix that begins with it. Finding a prefix costs one
/// comparison of its tokens and one look-up for each node; adding to a prefix costs the new tokens; evicting
/// costs the evicted tokens.
///
/// ```
/// use kvpool::base::{Id, Page};
/// use kvpool::cache::{BlockTokens, Evicted, FoundPrefix, Hold, Namespace, PolicyKind, ResumeAt, Tree, TreeStats};
/// let (name, prompt): (_, &[i32]) = (Namespace::Unnamed, &[5, 6, 7, 8, 9]);
/// let policy = PolicyKind::Lru.policy(1024, BlockTokens::of_page_size(2), None);
/// let mut tree = Tree::new(2, ResumeAt::AnyPage, policy);
/// let mut hold: Hold = tree.match_prefix(&name, &prompt, 5).unwrap();
/// let found: FoundPrefix = tree.find(&hold, &prompt).unwrap();
/// tree.publish(&mut hold, found, prompt[..4].to_vec(), &[Page::new(3), Page::new(8)]);
/// let removed: Evicted = tree.release(hold);
/// assert!(removed.pages.is_empty());
/// assert_eq!(tree.match_prefix(&name, &prompt, 3).unwrap().len(), 2);
/// let TreeStats { evictable, locked, .. } = tree.stats();
/// assert_eq!((evictable, locked), (2, 2));
/// ```
pub struct Tree {
    /// The number of tokens in a page, at least 1.
    page_size: usize,
    /// The nodes. One without pages is a root, or its number is not in use.
    nodes: NodeArena<Node>,
    edges: Edges,
    roots: Roots,
    /// Names prefixes.
    rolling: RollingHasher,
    /// Makes the fingerprints of pages.
    fingerprints: RollingHasher,
    fingerprint_mask: u32,
    /// The number of pages from which on a run is shared with its readers.
    shared_len: usize,
    queues: Queues,
    now: Tick,
    counts: Counts,
    /// Whether a request can use a prefix only if there is a snapshot of the state at its end.
    is_stateful: bool,
    snapshots: Snapshots,
    least_ends: LeastEnds,
    /// Records of evictions are kept for every prefix whose length is a multiple of this number of tokens.
    remembered_every: usize,
    evictions: EvictionLog,
    /// The numbers of evicted pages by age.
    evicted_ages: [u64; AGE_BUCKETS],
    keyed: KeyedPages,
    /// The pages and snapshots to copy to the tier below, if there is a tier.
    offers: Option<Offers>,
    /// The uses that a store below does not know of, if there is one.
    uses: Option<Uses>,
    sessions: Sessions<NodeHandle>,
    /// Memory for the nodes of a path. It has none between calls.
    path: Vec<NodeId>,
}

/// Where a request can resume from a cached prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeAt {
    /// At the end of any page.
    AnyPage,
    /// At the end of a page with a snapshot of the state of the linear-attention layers.
    Snapshot,
}

impl Tree {
    /// Creates an empty tree whose pages have `page_size` tokens.
    #[must_use]
    pub fn new(page_size: usize, resume_at: ResumeAt, policy: Box<dyn Policy>) -> Self {
        let page_tokens = u32::try_from(page_size).expect("a page fits int32");
        // Callers cannot choose tokens that collide in the tables.
        let seed = RandomState::new();
        Self {
            page_size,
            nodes: NodeArena::new(),
            edges: Edges::new(&seed),
            roots: Roots::default(),
            rolling: RollingHasher::of_names(),
            fingerprints: RollingHasher::of_seed(&seed),
            fingerprint_mask: fingerprint_mask(),
            shared_len: shared_len(),
            queues: Queues::new(policy),
            now: Tick::default(),
            counts: Counts::default(),
            is_stateful: resume_at == ResumeAt::Snapshot,
            snapshots: Snapshots::default(),
            least_ends: LeastEnds::default(),
            remembered_every: widen(BlockTokens::of_page_size(page_tokens).get()),
            evictions: EvictionLog::default(),
            evicted_ages: [0; AGE_BUCKETS],
            keyed: KeyedPages::default(),
            offers: None,
            uses: None,
            sessions: Sessions::default(),
            path: Vec::new(),
        }
    }

    /// Returns whether a request can use a prefix only if there is a snapshot of the state at its end.
    #[must_use]
    pub const fn is_stateful(&self) -> bool {
        self.is_stateful
    }

    /// Returns the number of tokens in a page.
    #[must_use]
    pub const fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the part of `len` tokens that fills pages.
    #[must_use]
    pub const fn in_whole_pages(&self, len: usize) -> usize {
        len / self.page_size * self.page_size
    }

    /// Returns the current statistics.
    #[must_use]
    pub fn stats(&self) -> TreeStats {
        let tokens = |pages: usize| pages * self.page_size;
        TreeStats {
            cached: tokens(self.counts.cached),
            evictable: tokens(self.counts.evictable()),
            locked: tokens(self.counts.locked),
            nodes: self.nodes.len() - self.roots.len(),
            snapshots: self.snapshots.len(),
            waiting: self.queues.waiting.len(),
            bytes: self.counts.heap_capacity * size_of::<u32>()
                + self.nodes.bytes()
                + self.edges.bytes()
                + self.roots.bytes()
                + self.snapshots.bytes()
                + self.least_ends.bytes()
                + self.queues.bytes()
                + self.evictions.bytes()
                + self.keyed.bytes()
                + self.sessions.bytes()
                + self.offer_bytes(),
        }
    }

    pub(super) const fn hasher(&self) -> &RollingHasher {
        &self.rolling
    }

    pub(super) fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        self.roots.names()
    }

    /// Returns the place where the cached part of the first `len` tokens ends. `len` is a whole number of
    /// pages.
    pub(super) fn place_of(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        len: usize,
    ) -> Result<Option<TreePosition>> {
        let root = self.root(namespace);
        root.map(|root| self.descend(root, tokens, len / self.page_size)).transpose()
    }

    /// Returns the last place, at or before `place`, from which a request can resume.
    pub(super) fn usable_place(&self, place: TreePosition) -> TreePosition {
        if self.is_stateful { self.last_snapshot_place(place) } else { place }
    }

    /// Returns the place of the last snapshot at or before `place`, or the beginning.
    pub(super) fn last_snapshot_place(&self, place: TreePosition) -> TreePosition {
        let node = self.last_snapshot(place);
        TreePosition { node, pages: self.node(node).pages.len(), len: widen(self.node(node).end) }
    }

    /// Returns the number of tokens that no lease holds.
    #[must_use]
    pub const fn evictable(&self) -> usize {
        self.counts.evictable() * self.page_size
    }

    /// Returns the number of tokens that leases hold.
    #[must_use]
    pub const fn locked(&self) -> usize {
        self.counts.locked * self.page_size
    }

    /// Returns the pages that leases hold. Visits every node.
    #[must_use]
    pub fn locked_pages(&self) -> Vec<Page> {
        let locked = self.nodes.iter().filter(|(_, node)| node.kind == Kind::Run && node.locks > 0);
        locked.flat_map(|(_, node)| node.pages.iter().copied()).collect()
    }

    /// Returns the runs that can be found: the namespace, the tokens from the first one on, the pages of the run and
    /// the snapshot at its end.
    pub(super) fn found_runs(
        &self,
    ) -> impl Iterator<Item = (&Namespace, Vec<i32>, Vec<Page>, Option<StateSlot>)> + '_ {
        let runs = self.nodes.iter().filter(|(_, node)| node.kind == Kind::Run && !node.pages.is_empty());
        runs.filter_map(|(id, node)| {
            let namespace = self.roots.name(node.root)?;
            let path: Vec<_> = self.path(id).collect();
            let tokens = path.iter().rev().flat_map(|&id| self.node(id).tokens.iter().copied());
            Some((namespace, tokens.collect(), node.pages.to_vec(), self.snapshot_at(id)))
        })
    }

    /// Returns the runs of a namespace: the pages of each, and the snapshot at its end. Longer prefixes come before those
    /// that they begin with.
    pub(super) fn runs_of(&self, namespace: &Namespace) -> Vec<(&[Page], Option<StateSlot>)> {
        let Some(root) = self.root(namespace) else { return Vec::new() };
        let mut nodes = self.roots.listed_below(root).to_vec();
        retain_listed(&mut nodes, |id| is_below(self.node(id), root));
        nodes.sort_by_key(|&id| std::cmp::Reverse(self.node(id).end));
        nodes.iter().map(|&id| (&self.node(id).pages[..], self.snapshot_at(id))).collect()
    }

    /// Returns the pages of all nodes. Visits every node.
    pub(super) fn all_pages(&self) -> Vec<Page> {
        self.nodes.iter().flat_map(|(_, node)| node.pages.iter().copied()).collect()
    }

    #[inline]
    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id]
    }

    #[inline]
    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id]
    }

    fn add(&mut self, node: Node) -> NodeId {
        self.counts.heap_capacity += node.heap_capacity();
        let (kind, root) = (node.kind, node.root);
        let id = self.nodes.add(node);
        if kind == Kind::Run {
            let nodes = &self.nodes;
            self.roots.list(root, id, |id| is_below(&nodes[id], root));
        }
        id
    }

    /// Returns the root of a namespace, if it has one.
    fn root(&self, namespace: &Namespace) -> Option<NodeId> {
        self.roots.get(namespace)
    }

    fn root_or_new(&mut self, namespace: &Namespace) -> NodeId {
        if let Some(root) = self.root(namespace) {
            return root;
        }
        let hash = RollingHasher::start(NamespaceHash::from(namespace));
        let root = self.add(Node::new(Kind::Root, hash));
        let node = self.node_mut(root);
        (node.parent, node.root) = (root, root);
        self.roots.insert(namespace, root);
        root
    }

    /// Removes a root that has neither children nor leases; does nothing for other nodes.
    fn drop_if_empty(&mut self, root: NodeId) {
        let node = self.node(root);
        if (node.children, node.locks) != (0, 0) {
            return;
        }
        match node.kind {
            Kind::Root => drop(self.roots.remove(root)),
            Kind::Detached => self.roots.forget_detached(),
            Kind::Run => return,
        }
        self.nodes.vacate(root);
    }

    /// Returns the fingerprint of the tokens of a page.
    fn fingerprint(&self, page: &[i32]) -> u32 {
        if let [token] = page {
            return token.cast_unsigned();
        }
        let [a, b, c, d, ..] = self.fingerprints.hash(page).to_le_bytes();
        u32::from_le_bytes([a, b, c, d]) & self.fingerprint_mask
    }

    /// Returns the child of `parent` that begins with `first`, the tokens of a page.
    fn child(&self, parent: NodeId, first: &[i32]) -> Option<NodeId> {
        self.edges.get(parent, self.fingerprint(first)).find(|&id| {
            let node = self.node(id);
            node.parent == parent && node.tokens[..self.page_size] == *first
        })
    }

    /// Enters a node, whose parent and tokens are set, among the children of its parent.
    fn link(&mut self, id: NodeId) {
        let parent = self.node(id).parent;
        self.node_mut(parent).children += 1;
        let fingerprint = self.fingerprint(&self.node(id).tokens[..self.page_size]);
        self.edges.insert(parent, fingerprint, id);
        self.node_mut(id).fingerprint = fingerprint;
    }

    /// Undoes [`Tree::link`].
    fn unlink(&mut self, id: NodeId) {
        let Node { parent, fingerprint, .. } = *self.node(id);
        self.node_mut(parent).children -= 1;
        self.edges.remove(parent, fingerprint, id);
    }

    /// Walks down from the end of `node` as far as the nodes have `tokens`, over at most `limit` pages. Returns
    /// the place where the walk ends.
    fn descend(&self, node: NodeId, tokens: &dyn Tokens, limit: usize) -> Result<TreePosition> {
        let begin = widen(self.node(node).end);
        let mut place = TreePosition { node, pages: self.node(node).pages.len(), len: begin };
        let (mut buffer, limit) = (Vec::new(), limit * self.page_size);
        loop {
            let at = place.len - begin;
            if at >= limit {
                return Ok(place);
            }
            let first = tokens.slice(at..at + self.page_size, &mut buffer)?;
            let Some(child) = self.child(place.node, first) else { return Ok(place) };
            let node = self.node(child);
            let equal =
                self.page_size + tokens.common(at + self.page_size, &node.tokens[self.page_size..])?;
            let pages = equal.min(limit - at) / self.page_size;
            place = TreePosition { node: child, pages, len: place.len + pages * self.page_size };
            if pages < node.pages.len() {
                return Ok(place);
            }
        }
    }

    /// Returns the node that ends at `place`. If no node ends there, splits one in two.
    fn split_node(&mut self, place: TreePosition) -> NodeId {
        if place.pages == self.node(place.node).pages.len() {
            return place.node;
        }
        let lower = place.node;
        let hash = self.hash_at(place);
        self.unlink(lower);
        let (page_size, capacity, node) =
            (self.page_size, self.node(lower).heap_capacity(), self.node_mut(lower));
        let tokens = split_front(&mut node.tokens, place.pages * page_size);
        let pages = split_front(&mut node.pages, place.pages);
        let Node { parent, root, history, pins, user, .. } = *node;
        let (locks, end) = (u32::from(node.locks > 0), narrow(place.len));
        let upper = self.add(Node {
            parent,
            root,
            locks,
            tokens,
            pages,
            end,
            history,
            pins,
            user,
            ..Node::new(Kind::Run, hash)
        });
        self.counts.heap_capacity = self.counts.heap_capacity - capacity + self.node(lower).heap_capacity();
        self.node_mut(lower).parent = upper;
        self.link(upper);
        self.link(lower);
        upper
    }

    /// Returns the hash of the tokens up to `place`. Costs the distance to the nearer end of its node.
    pub(super) fn hash_at(&self, place: TreePosition) -> RollingHash {
        let node = self.node(place.node);
        let (front, back) = node.tokens.split_at(place.pages * self.page_size);
        if front.len() < back.len() {
            let mut cursor = self.rolling.cursor(self.node(node.parent).hash, place.len - front.len());
            cursor.push(front);
            return cursor.hash();
        }
        let mut cursor = self.rolling.cursor(node.hash, widen(node.end));
        cursor.pop(back);
        cursor.hash()
    }

    /// Returns the nodes from `id` up to its root, not including the root.
    fn path(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let mut at = id;
        std::iter::from_fn(move || {
            let node = self.node(at);
            (node.kind == Kind::Run).then(|| std::mem::replace(&mut at, node.parent))
        })
    }
}

/// Returns whether a node is below `root`. The node may have been removed since.
fn is_below(node: &Node, root: NodeId) -> bool {
    node.root == root && !node.pages.is_empty()
}

/// Splits off and returns the first `count` elements, and frees the memory that the others do not need.
fn split_front<T: Copy>(all: &mut ShortVec<T>, count: usize) -> ShortVec<T> {
    let back = all.split_off(count);
    let mut front = std::mem::replace(all, back);
    front.shrink_to_fit();
    front
}

/// Converts a number of tokens on a path, which is at most that of all pages.
fn narrow(tokens: usize) -> u32 {
    crate::base::bounded::narrow(tokens)
}
