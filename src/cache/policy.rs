//! The order of eviction: the trait [`Policy`], the history of a node that it gets ([`History`]), and the
//! policies.
//!
//! A policy owns the order of the evictable leaves and what it has learned; the tree owns the nodes. The tree
//! tells the policy when a leaf becomes evictable ([`Policy::insert`]) or is no longer ([`Policy::remove`]),
//! and asks for the leaf to evict next ([`Policy::victim`]). It reports uses, publications and evictions as
//! they happen, so that a policy can learn; by default a policy ignores them.
//!
//! *Invariant.* A policy holds exactly the leaves that were inserted and not removed since, and `victim`
//! returns one of them.
//!
//! *Cost.* `lru`, `fifo`, `lfu`, `slru` and `priority` keep one ordered set: a call is logarithmic in the
//! number of leaves, a fraction of a microsecond at a million. `adaptive` keeps linked lists, and its calls
//! do not depend on the number of leaves.
//!
//! *Determinism.* The order depends on the calls alone: time is counted in tokens, and there are no random
//! numbers.
//!
//! A policy decides nothing about locks, pins or pages: a leaf that must stay is not inserted.

mod adaptive;
mod queue;
mod ranked;

use std::fmt;
use std::ops::Range;

use super::PrefillCost;
use crate::base::bounded::saturated;
use crate::base::{Error, Id, Result};

pub(super) use adaptive::real;

/// The number of a node of the tree. The number of a removed node may be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

impl NodeId {
    /// The first number.
    pub(crate) const FIRST: Self = Self(0);
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

/// A logical time: the number of prompt tokens that were looked up in the cache so far. It never decreases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(u64);

impl Tick {
    /// Creates the time at which `tokens` tokens were looked up.
    #[must_use]
    pub const fn new(tokens: u64) -> Self {
        Self(tokens)
    }

    /// Returns the number of tokens that were looked up by this time.
    #[must_use]
    pub const fn tokens(self) -> u64 {
        self.0
    }

    /// Returns the number of tokens that were looked up since `earlier`; 0 if that is a later time.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// The key of a block of tokens: a hash of the namespace, the tokens before the block, and the block itself.
///
/// A policy takes two blocks with the same key for one. If they are not, its estimate is wrong; no request
/// gets a wrong page.
///
/// ```
/// use kvpool::cache::{BlockKey, BlockTokens, PolicyKind, Tick};
/// let mut policy = PolicyKind::Adaptive.policy(1024, BlockTokens::of_page_size(16), None);
/// let remembered = policy.record_publication(BlockKey::new(0x9e37_79b9_7f4a_7c15), 0..64, Tick::new(0));
/// assert_eq!(remembered.uses, 0, "it is new");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockKey(u64);

impl BlockKey {
    /// Creates a key from a hash, all bits of which are well mixed.
    #[must_use]
    pub const fn new(hash: u64) -> Self {
        Self(hash)
    }

    pub(super) const fn number(self) -> u64 {
        self.0
    }
}

/// What is known of the next use of pages, besides their history.
///
/// ```
/// use kvpool::cache::{BlockTokens, Outlook, PolicyKind};
/// let policy = PolicyKind::Adaptive.policy(1024, BlockTokens::of_page_size(16), None);
/// assert_eq!(policy.outlook(64), Outlook::Soon);
/// assert_eq!(policy.outlook(1 << 20), Outlook::Late);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Outlook {
    /// Nothing.
    #[default]
    Unknown,
    /// They are used again after a pause that is short for the policy.
    Soon,
    /// They are used again after a longer pause.
    Later,
    /// They are used again after a long pause, if at all.
    Late,
    /// They are not used again.
    Ended,
}

impl Outlook {
    /// Every outlook, by number.
    pub(crate) const ALL: [Self; 5] = [Self::Unknown, Self::Soon, Self::Later, Self::Late, Self::Ended];
}

/// How many tokens of a request were new to the cache, compared to other requests.
///
/// ```
/// use kvpool::cache::{BlockTokens, Novelty, PolicyKind, Tick};
/// let mut policy = PolicyKind::Adaptive.policy(1024, BlockTokens::of_page_size(16), None);
/// for new in [100, 1_000, 10_000] {
///     policy.record_request(new);
/// }
/// // It learns from time to time.
/// policy.victim(Tick::new(11_100));
/// let novelty = [100, 1_000, 10_000].map(|new| policy.novelty(new));
/// assert_eq!(novelty, [Novelty::Low, Novelty::Middle, Novelty::High]);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Novelty {
    /// As few as in the third of the requests that had least.
    Low,
    /// Between the two, or nothing is known.
    #[default]
    Middle,
    /// As many as in the third of the requests that had most.
    High,
}

impl Novelty {
    /// Every novelty, by number.
    pub(crate) const ALL: [Self; 3] = [Self::Low, Self::Middle, Self::High];
}

/// How new a request is, as far as that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestNovelty {
    pub(crate) level: Novelty,
    /// Whether that is an estimate, because nothing new of the request is known yet. What was not found may be remembered.
    pub(crate) is_estimate: bool,
}

impl RequestNovelty {
    /// Returns what is known after the request, of `tokens` tokens or more, has published tokens up to `end`. Nothing is
    /// remembered of those from `new_from` on, if there are any.
    pub(crate) fn after_publication(
        self,
        policy: &dyn Policy,
        tokens: usize,
        end: usize,
        new_from: Option<usize>,
    ) -> Self {
        if !self.is_estimate {
            return self;
        }
        let new = tokens.max(end) - new_from.unwrap_or(end);
        Self { level: policy.novelty(saturated(new)), is_estimate: new_from.is_none() }
    }
}

/// The history of the pages of one node, which is the same for all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// When the pages were published.
    pub published: Tick,
    /// When a request used the pages last.
    pub used: Tick,
    /// The number of requests that have used the pages, including the one that published them and, if the
    /// policy remembers an earlier stay in the cache, those of that stay.
    pub uses: u32,
    /// The priority that a caller has given the pages by retaining them: pages of higher priority are evicted
    /// later. 0 is the default.
    pub priority: u8,
    /// What is known of their next use, which takes it away.
    pub outlook: Outlook,
    /// That of the request that used the pages last.
    pub novelty: Novelty,
}

impl History {
    /// Creates the history of new pages. `remembered` is what the policy knows of an earlier stay.
    #[must_use]
    pub const fn of_new(remembered: Remembered, novelty: Novelty, now: Tick) -> Self {
        let uses = remembered.uses.saturating_add(1);
        Self { published: now, used: now, uses, priority: 0, outlook: Outlook::Unknown, novelty }
    }

    /// Returns the history after another use.
    #[must_use]
    pub const fn used_again(self, novelty: Novelty, now: Tick) -> Self {
        Self { used: now, uses: self.uses.saturating_add(1), outlook: Outlook::Unknown, novelty, ..self }
    }
}

/// What a policy expected of the leaf that it chose last, and of the others.
///
/// Both are the uses that it expected of a token while as many tokens are looked up as the cache has; with a
/// [`PrefillCost`], times the seconds that a use saves.
///
/// ```
/// use kvpool::cache::{BlockTokens, PolicyKind, Worth};
/// let policy = PolicyKind::Adaptive.policy(1024, BlockTokens::of_page_size(16), None);
/// let judged: Option<Worth> = policy.judged();
/// assert_eq!(judged, None, "there was no victim");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Worth {
    /// That of the victim.
    pub victim: f64,
    /// The least of the leaves of another class, position or age among which it was chosen; infinite if there was none.
    pub least_kept: f64,
}

/// A policy's record of evicted pages; empty by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remembered {
    /// The value of [`History::uses`] when the pages were evicted.
    pub uses: u32,
}

/// Decides which leaf is evicted next.
///
/// ```
/// use std::ops::Range;
/// use kvpool::base::{Id, Page};
/// use kvpool::cache::{History, Namespace, NodeId, Novelty, Policy, Remembered, ResumeAt, Tick, Tree};
/// /// Evicts the leaf that became evictable last.
/// #[derive(Debug, Default)]
/// struct Newest(Vec<NodeId>);
/// impl Policy for Newest {
///     fn insert(&mut self, leaf: NodeId, _positions: Range<u32>, _history: &History, _now: Tick) {
///         self.0.push(leaf);
///     }
///     fn remove(&mut self, leaf: NodeId) {
///         self.0.retain(|&other| other != leaf);
///     }
///     fn victim(&mut self, _now: Tick) -> Option<NodeId> {
///         self.0.last().copied()
///     }
///     fn bytes(&self) -> usize {
///         self.0.capacity() * size_of::<NodeId>()
///     }
/// }
/// let mut tree = Tree::new(1, ResumeAt::AnyPage, Box::new(Newest::default()));
/// for (token, page) in [(5, 1), (6, 2)] {
///     let prompt: &[i32] = &[token];
///     let mut hold = tree.match_prefix(&Namespace::Unnamed, &prompt, 1).unwrap();
///     let found = tree.find(&hold, &prompt).unwrap();
///     tree.publish(&mut hold, found, prompt.to_vec(), &[Page::new(page)]);
///     drop(tree.release(hold));
/// }
/// let cause = kvpool::cache::Cause {
///     pressure: kvpool::cache::Pressure::Alloc, at: std::time::Instant::now(),
/// };
/// assert_eq!(tree.evict(1, cause).pages, [Page::new(2)]);
/// // What it remembers of pages begins their next history.
/// assert_eq!(History::of_new(Remembered { uses: 3 }, Novelty::default(), Tick::new(0)).uses, 4);
/// ```
pub trait Policy: fmt::Debug + Send {
    /// Adds a leaf that has become evictable, whose tokens are at these positions. Its history does not change
    /// until it is removed; tokens at its end may be evicted.
    fn insert(&mut self, leaf: NodeId, positions: Range<u32>, history: &History, now: Tick);

    /// Removes a leaf that was inserted, because it is locked again, has a child now, or was evicted.
    fn remove(&mut self, leaf: NodeId);

    /// Returns the leaf to evict next, or `None` if there is none. The leaf stays in the policy until it is
    /// removed.
    fn victim(&mut self, now: Tick) -> Option<NodeId>;

    /// Returns how many tokens of the last victim, which are the last of those at `positions`, may be evicted before the
    /// next one is asked for. If that is less than a page, a page is evicted.
    fn may_evict(&mut self, positions: Range<u32>, history: &History) -> u32 {
        let _ = history;
        positions.end - positions.start
    }

    /// Records that the cache is short of memory and keeps `tokens` tokens. Requests and snapshots may have more of the
    /// memory at one time than at another.
    fn record_shortage(&mut self, tokens: u64, now: Tick) {
        let _ = (tokens, now);
    }

    /// Guesses which leaf will be the victim after `leaf`, which was inserted and may have been removed
    /// since. The tree prefetches the leaf; nothing else depends on the guess.
    fn guess_after(&self, leaf: NodeId) -> Option<NodeId> {
        let _ = leaf;
        None
    }

    /// Returns what the last [`Policy::victim`] was worth, if it was chosen by that.
    fn judged(&self) -> Option<Worth> {
        None
    }

    /// Returns whether the tree may evict another leaf than the last [`Policy::victim`], one whose [`Policy::worth`] is less
    /// for the memory that is freed with it.
    fn may_replace(&self) -> bool {
        true
    }

    /// Returns the size of the bookkeeping in bytes.
    fn bytes(&self) -> usize;

    /// Returns the worth of pages with this history: the highest rate of uses, per token that is looked up, that
    /// keeping them can still bring. `None` if the policy does not estimate it, or not yet.
    fn worth(&mut self, history: &History, now: Tick) -> Option<f64> {
        let _ = (history, now);
        None
    }

    /// Returns what a use of the tokens at these positions saves: their number or, by a policy with a
    /// [`PrefillCost`], their seconds.
    fn saved(&self, positions: Range<u32>) -> f64 {
        f64::from(positions.end - positions.start)
    }

    /// Records that a request was looked up of which `new` tokens were not found, and returns what that is compared
    /// to other requests.
    fn record_request(&mut self, new: u32) -> Novelty {
        self.novelty(new)
    }

    /// Returns what `new` new tokens of a request are compared to other requests.
    fn novelty(&self, new: u32) -> Novelty {
        let _ = new;
        Novelty::default()
    }

    /// Records that a request found the tokens at these positions, whose history changes by that.
    fn record_use(&mut self, before: &History, after: &History, positions: Range<u32>) {
        let _ = (before, after, positions);
    }

    /// Returns the outlook of pages that are usually used again after `pause`, in tokens looked up.
    fn outlook(&self, pause: u64) -> Outlook {
        let _ = pause;
        Outlook::Unknown
    }

    /// Records that `tokens` tokens whose history so far is `history` have another outlook now.
    fn record_outlook(&mut self, history: &History, outlook: Outlook, tokens: u32) {
        let _ = (history, outlook, tokens);
    }

    /// Prefetches what is known of the blocks `keys`, which are about to be published. Nothing else depends
    /// on this call.
    fn fetch(&self, keys: &mut dyn Iterator<Item = BlockKey>) {
        let _ = keys;
    }

    /// Records that the block `key` was published, the tokens at these positions of it by this call, and returns
    /// what is remembered of an earlier stay. Pages of which different things are remembered must be in
    /// different nodes.
    fn record_publication(&mut self, key: BlockKey, positions: Range<u32>, now: Tick) -> Remembered {
        let _ = (key, positions, now);
        Remembered::default()
    }

    /// Records that `tokens` tokens have this history from now on, because they were published.
    fn record_new(&mut self, history: &History, tokens: u32) {
        let _ = (history, tokens);
    }

    /// Records that `tokens` tokens were published that fill no block, or not yet.
    fn record_fragment(&mut self, tokens: u32, now: Tick) {
        let _ = (tokens, now);
    }

    /// Records that the tokens at these positions, which have this history, are evicted because the cache is short of
    /// memory.
    fn record_evicted(&mut self, positions: Range<u32>, history: &History, now: Tick) {
        let _ = (positions, history, now);
    }

    /// Remembers the block `key`, which is evicted.
    fn remember(&mut self, key: BlockKey, history: &History, now: Tick) {
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

/// A kind of policy, with its name.
///
/// ```
/// use kvpool::base::Id;
/// use kvpool::cache::{BlockTokens, History, NodeId, PolicyKind, Tick};
///
/// let block = BlockTokens::of_page_size(16);
/// let mut policy = PolicyKind::parse("lru").unwrap().policy(1024, block, None);
/// for node in [7, 8] {
///     let now = Tick::new(u64::from(node));
///     policy.insert(NodeId::new(node), 0..16, &History { used: now, ..History::default() }, now);
/// }
/// assert_eq!(policy.victim(Tick::new(9)), Some(NodeId::new(7)));
/// ```
#[derive(Clone, Copy, Debug)]
pub enum PolicyKind {
    /// Evicts the leaf that was used least recently.
    Lru,
    /// Evicts the leaf that was published first.
    Fifo,
    /// Evicts the leaf that was used least often; of several, the least recently used one.
    Lfu,
    /// Evicts leaves that were used once, then those that were used again; each in the order of their last
    /// use.
    Slru,
    /// Evicts the leaf of the lowest priority; of several, the least recently used one.
    Priority,
    /// Evicts the leaf that is worth least, as learned from blocks that were evicted and then published
    /// again.
    Adaptive,
    /// A policy of the caller, which the function makes.
    Own(MakePolicy),
}

/// Makes a policy for a cache of so many tokens, with blocks of this size and the cost that the cache was given.
///
/// ```
/// use kvpool::cache::{BlockTokens, MakePolicy, PolicyKind};
/// // Another policy's order where there is no cost.
/// let make: MakePolicy = |capacity, block, cost| match cost {
///     Some(_) => PolicyKind::Adaptive.policy(capacity, block, cost),
///     None => PolicyKind::Slru.policy(capacity, block, None),
/// };
/// let own = PolicyKind::Own(make);
/// assert_eq!(own.name(), "own");
/// assert!(own.policy(1024, BlockTokens::of_page_size(16), None).bytes() < 1024);
/// ```
pub type MakePolicy = fn(u64, BlockTokens, Option<PrefillCost>) -> Box<dyn Policy>;

impl PolicyKind {
    /// Every policy of this crate, the default last.
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
            Self::Own(_) => "own",
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

    /// Creates a policy of this kind for a cache of `capacity` tokens. With a `cost`, the adaptive policy
    /// counts seconds; without one, and by any other policy, a token is worth the same wherever it is.
    #[must_use]
    pub fn policy(
        self,
        capacity: u64,
        block_tokens: BlockTokens,
        cost: Option<PrefillCost>,
    ) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(ranked::Ranked::new(ranked::Lru)),
            Self::Fifo => Box::new(ranked::Ranked::new(ranked::Fifo)),
            Self::Lfu => Box::new(ranked::Ranked::new(ranked::Lfu)),
            Self::Slru => Box::new(ranked::Ranked::new(ranked::Slru)),
            Self::Priority => Box::new(ranked::Ranked::new(ranked::Priority)),
            Self::Adaptive => Box::new(adaptive::Adaptive::new(capacity, block_tokens, cost)),
            Self::Own(make) => make(capacity, block_tokens, cost),
        }
    }
}
