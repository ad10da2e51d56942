//! The choice of what to evict next: the trait [`Policy`], the record of a node that it gets ([`History`]),
//! and the policies.
//!
//! A policy owns the order of the evictable leaves and what it has learned; the tree owns the nodes. The tree
//! names every leaf that becomes evictable ([`Policy::insert`]) or ceases to be ([`Policy::remove`]) and asks
//! for the one to evict next ([`Policy::victim`]). Uses, publications and evictions are reported as they
//! happen, so that a policy can learn; by default a policy ignores them.
//!
//! *Invariant.* A policy holds exactly the leaves that were inserted and not removed since, and `victim`
//! names one of them.
//!
//! *Cost.* No call depends on how many leaves there are: `lru`, `fifo`, `lfu`, `slru` and `priority` keep one
//! ordered set (logarithmic, a fraction of a microsecond at a million leaves), `adaptive` linked lists.
//!
//! *Determinism.* The order depends on the calls alone: time is counted in tokens, and nothing is drawn at
//! random.
//!
//! It decides nothing about locks, pins or pages: a leaf that must stay is simply not inserted.

mod adaptive;
mod queue;
mod ranked;

use std::fmt;

use crate::base::{Error, Id, Result};

/// A node of the tree. The numbers of nodes that are gone may be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

impl NodeId {
    /// The first number.
    pub(super) const FIRST: Self = Self(0);
}

impl Id for NodeId {
    const NOUN: &'static str = "node";

    fn new(number: u32) -> Self {
        Self(number)
    }

    fn number(self) -> u32 {
        self.0
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A moment: the number of prompt tokens looked up in the cache until then. It never goes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(u64);

impl Tick {
    /// Returns the moment after `tokens` tokens were looked up.
    #[must_use]
    pub const fn new(tokens: u64) -> Self {
        Self(tokens)
    }

    /// Returns the number of tokens looked up until this moment.
    #[must_use]
    pub const fn tokens(self) -> u64 {
        self.0
    }

    /// Returns the tokens looked up since `earlier`, or 0 if that moment is still to come.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// The key of a block of tokens: a hash of the namespace, the tokens before the block, and the block itself.
///
/// A policy takes two blocks with the same key for one. If they are not, its estimate is wrong; no request
/// gets a wrong page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockKey(u64);

impl BlockKey {
    /// Creates a key from a hash, all bits of which are well mixed.
    #[must_use]
    pub const fn new(hash: u64) -> Self {
        Self(hash)
    }
}

/// The facts about the pages of one node, which share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// The moment when the pages came.
    pub published: Tick,
    /// The moment when a request used them last.
    pub used: Tick,
    /// The number of requests that used them, the one that published them included, and those of an earlier
    /// stay that the policy remembers.
    pub uses: u32,
    /// The priority that the caller asked for with a pin: higher goes later. 0 is the default.
    pub priority: u8,
}

impl History {
    /// Returns the history of new pages, of which the policy remembers `before`.
    #[must_use]
    pub const fn of_new(remembered: Remembered, now: Tick) -> Self {
        Self { published: now, used: now, uses: remembered.uses.saturating_add(1), priority: 0 }
    }

    /// Counts a use. Call [`Policy::record_use`] first, which needs the history before.
    pub const fn touch(&mut self, now: Tick) {
        self.used = now;
        self.uses = self.uses.saturating_add(1);
    }
}

/// The facts that a policy remembers of evicted pages. By default it remembers nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remembered {
    /// [`History::uses`] when they were evicted.
    pub uses: u32,
}

/// Decides which leaf goes next.
pub trait Policy: fmt::Debug + Send {
    /// Takes in a leaf that became evictable. Its history stays as it is until it is removed.
    fn insert(&mut self, leaf: NodeId, history: &History, now: Tick);

    /// Forgets a leaf that was inserted: it is locked again, got a child, or is gone.
    fn remove(&mut self, leaf: NodeId);

    /// Returns the leaf to evict next, or `None` when there is none. It stays until it is removed.
    fn victim(&mut self, now: Tick) -> Option<NodeId>;

    /// A guess which leaf is the victim after `leaf`, which was inserted and perhaps removed since. What it
    /// names is fetched ahead; nothing depends on it.
    fn guess_after(&self, leaf: NodeId) -> Option<NodeId> {
        let _ = leaf;
        None
    }

    /// Returns the size of the bookkeeping in bytes.
    fn bytes(&self) -> usize;

    /// A request found `tokens` tokens with the history `before`.
    fn record_use(&mut self, history: &History, tokens: u32, now: Tick) {
        let _ = (history, tokens, now);
    }

    /// The blocks `keys` are about to be published. What is known of them is fetched ahead; nothing depends
    /// on it.
    fn fetch(&self, keys: &mut dyn Iterator<Item = BlockKey>) {
        let _ = keys;
    }

    /// The block `key` is new in the cache. Returns what is remembered of an earlier stay; pages whose
    /// answers differ belong into different nodes.
    fn record_publication(&mut self, key: BlockKey, now: Tick) -> Remembered {
        let _ = (key, now);
        Remembered::default()
    }

    /// The block `key` was evicted.
    fn record_eviction(&mut self, key: BlockKey, history: &History, now: Tick) {
        let _ = (key, history, now);
    }
}

/// The number of tokens in a block, which has one [`BlockKey`]: a whole number of pages, about 64 tokens.
///
/// ```
/// use kvpool::cache::BlockTokens;
/// assert_eq!(BlockTokens::of_page_size(1).get(), 64);
/// assert_eq!(BlockTokens::of_page_size(24).get(), 48);
/// assert_eq!(BlockTokens::of_page_size(512).get(), 512);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockTokens(u32);

impl BlockTokens {
    /// Returns the size of a block for a page size, which is at least 1.
    #[must_use]
    pub const fn of_page_size(page_size: u32) -> Self {
        if page_size >= 64 { Self(page_size) } else { Self(64 / page_size * page_size) }
    }

    /// Returns the number of tokens.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// The policies by name.
///
/// ```
/// use kvpool::base::Id;
/// use kvpool::cache::{History, BlockTokens, NodeId, PolicyKind, Tick};
///
/// let mut policy = PolicyKind::parse("lru").unwrap().policy(1024, BlockTokens::of_page_size(16));
/// for node in [7, 8] {
///     let now = Tick::new(u64::from(node));
///     policy.insert(NodeId::new(node), &History { used: now, ..History::default() }, now);
/// }
/// assert_eq!(policy.victim(Tick::new(9)), Some(NodeId::new(7)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyKind {
    /// The leaf used least recently.
    Lru,
    /// The leaf published first.
    Fifo,
    /// The leaf used least often; of those, the one used least recently.
    Lfu,
    /// Leaves used once, then those used again; each least recently used first.
    Slru,
    /// The leaf of lowest priority; of those, the one used least recently.
    Priority,
    /// The leaf worth least, as learned from what was evicted and came again.
    Adaptive,
}

impl PolicyKind {
    /// Every policy, the default last.
    pub const ALL: [Self; 6] = [Self::Lru, Self::Fifo, Self::Lfu, Self::Slru, Self::Priority, Self::Adaptive];

    /// Returns the name of this policy.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Fifo => "fifo",
            Self::Lfu => "lfu",
            Self::Slru => "slru",
            Self::Priority => "priority",
            Self::Adaptive => "adaptive",
        }
    }

    /// Returns the policy called `name`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for an unknown name.
    pub fn parse(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Error::config(format!("unknown policy '{name}'; use one of {known}"))
        })
    }

    /// Creates a policy of this kind for a cache of `capacity` tokens.
    #[must_use]
    pub fn policy(self, capacity: u64, block_tokens: BlockTokens) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(ranked::Ranked::new(ranked::Lru)),
            Self::Fifo => Box::new(ranked::Ranked::new(ranked::Fifo)),
            Self::Lfu => Box::new(ranked::Ranked::new(ranked::Lfu)),
            Self::Slru => Box::new(ranked::Ranked::new(ranked::Slru)),
            Self::Priority => Box::new(ranked::Ranked::new(ranked::Priority)),
            Self::Adaptive => Box::new(adaptive::Adaptive::new(capacity, block_tokens)),
        }
    }
}
