//! Pages and snapshots that a tree offers to the tier below, which copies them.

use std::ops::Range;

use crate::base::{Page, Result, StateSlot, try_push};

use super::{Hold, Namespace, NodeId, PageHash, Tokens, Tree, TreePosition};
use crate::cache::{Digest, KeyChain, Tick};

/// When pages are offered for a copy in the tier below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePolicy {
    /// Pages are offered when they are published.
    Through,
    /// Pages are offered when a second request uses them.
    Selective,
    /// Pages are offered when they are evicted. Snapshots are still offered when they are made: a pool has
    /// few slots for them.
    Back,
}

/// The contents of a tier below.
pub trait LowerTierContents {
    /// Returns whether the tier has a page, or a copy of it from the device is in progress.
    fn has_page(&self, key: &PageHash) -> bool;

    /// Returns whether the tier has the snapshot of the state at the end of a page, or a copy of it from the
    /// device is in progress.
    fn has_state(&self, key: &PageHash) -> bool;
}

/// The part of a prompt that the device has.
#[derive(Clone, Copy, Debug)]
pub(super) struct DevicePrefix {
    /// The end of the part that a request can use; `None` if the namespace has no root, and no part is there.
    pub(super) usable: Option<TreePosition>,
    /// The number of tokens whose pages are there. It exceeds the usable number if a snapshot is missing.
    pub(super) cached: usize,
}

/// The rest of a prompt after the part that the device has.
#[derive(Clone, Debug)]
pub struct Continuation {
    /// Makes the keys of the pages after the first `usable` tokens.
    pub chain: KeyChain,
    /// The number of tokens that a request can use.
    pub usable: usize,
    /// The number of tokens whose pages are there. It exceeds `usable` if a snapshot is missing.
    pub cached: usize,
}

/// Consecutive pages of a prefix that are offered to the tier below.
#[derive(Clone, Debug)]
pub struct OfferedPages {
    /// The numbers of the pages in the allocator.
    pub pages: Vec<Page>,
    /// The key of each page.
    pub keys: Vec<PageHash>,
    /// The namespace of their prefix.
    pub namespace: Namespace,
    /// The key of the page before them.
    pub parent: Option<PageHash>,
    /// The tokens of the pages, if the tree keeps a journal.
    pub tokens: Vec<i32>,
}

impl OfferedPages {
    /// Returns the pages of a range.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        let page_size = self.tokens.len() / self.pages.len();
        Self {
            pages: self.pages[range.clone()].to_vec(),
            keys: self.keys[range.clone()].to_vec(),
            namespace: self.namespace.clone(),
            parent: range.start.checked_sub(1).map_or(self.parent, |previous| Some(self.keys[previous])),
            tokens: self.tokens[range.start * page_size..range.end * page_size].to_vec(),
        }
    }
}

/// A snapshot of a state, offered to the tier below.
#[derive(Clone, Debug)]
pub struct OfferedState {
    /// The track slot with the state.
    pub slot: StateSlot,
    /// The key of the last page before it.
    pub key: PageHash,
    /// The namespace of its prefix.
    pub namespace: Namespace,
}

/// The pages and snapshots that a tree has offered since the last call of [`Tree::take_offers`].
///
/// ```
/// use std::collections::HashSet;
/// use kvpool::base::{Id, Page};
/// use kvpool::cache::{
///     BlockTokens, Continuation, LowerTierContents, Namespace, OfferedPages, OfferedPieces, OfferedState, PageHash,
///     PolicyKind, ResumeAt, Tree, UsedRun, WritePolicy,
/// };
/// struct Below(HashSet<PageHash>);
/// impl LowerTierContents for Below {
///     fn has_page(&self, key: &PageHash) -> bool {
///         self.0.contains(key)
///     }
///     fn has_state(&self, _key: &PageHash) -> bool {
///         false
///     }
/// }
/// // Take BLAKE3 or SHA-256.
/// fn digest(parts: &[&[u8]]) -> [u8; 32] {
///     let mix = |sum: u64, &byte: &u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
///     [parts.concat().iter().fold(0, mix).to_le_bytes(); 4].concat().try_into().unwrap()
/// }
/// let (name, prompt): (_, &[i32]) = (Namespace::Unnamed, &[5, 6, 7, 8]);
/// let mut tree = Tree::new(2, ResumeAt::AnyPage, PolicyKind::Lru.policy(1024, BlockTokens::of_page_size(2), None));
/// tree.offer(WritePolicy::Through, digest);
/// tree.keep_uses();
/// let mut hold = tree.match_prefix(&name, &prompt, 4).unwrap();
/// let found = tree.find(&hold, &prompt).unwrap();
/// tree.publish(&mut hold, found, prompt.to_vec(), &[Page::new(3), Page::new(8)]);
/// let OfferedPieces { pages, states }: OfferedPieces = tree.take_offers();
/// let (offered, snapshots): (&OfferedPages, &[OfferedState]) = (&pages[0], &states);
/// assert_eq!((offered.pages.len(), snapshots.len()), (2, 0));
/// drop(tree.release(hold));
///
/// // Once the device has lost them, the tier below continues a prompt.
/// drop(tree.clear(None, kvpool::cache::Cause {
///     pressure: kvpool::cache::Pressure::Clear, at: std::time::Instant::now(),
/// }));
/// let hold = tree.match_prefix(&name, &prompt, 4).unwrap();
/// let below = Below(offered.keys.iter().copied().collect());
/// assert_eq!(tree.keys_below(&name, &hold, &prompt, 4, &below).unwrap(), offered.keys);
/// let Continuation { usable, cached, mut chain } = tree.continuation(&name, &prompt, 4).unwrap().unwrap();
/// assert_eq!((usable, cached, chain.next(&prompt[..2])), (0, 0, offered.keys[0]));
/// let uses: Vec<UsedRun> = tree.take_uses(16, |_node| true);
/// assert!(uses.is_empty(), "the prefixes that were used are gone");
/// drop(tree.release(hold));
/// ```
#[derive(Debug, Default)]
pub struct OfferedPieces {
    /// Runs of pages.
    pub pages: Vec<OfferedPages>,
    /// Snapshots of states.
    pub states: Vec<OfferedState>,
}

impl OfferedPieces {
    /// Returns whether nothing is offered.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.states.is_empty()
    }
}

/// The pages and snapshots that are offered, and the policy by which they are.
#[derive(Debug)]
pub(super) struct Offers {
    policy: WritePolicy,
    list: OfferedPieces,
}

impl Tree {
    /// Starts to offer pages and snapshots to the tier below, by `policy` and with keys made by `digest`.
    pub fn offer(&mut self, policy: WritePolicy, digest: Digest) {
        self.keyed.keep_keys(digest);
        self.offers = Some(Offers { policy, list: OfferedPieces::default() });
    }

    /// Takes the pages and snapshots that were offered since the last call. Pages come after those before them
    /// in their prefix, if both are offered.
    ///
    /// The tree no longer finds pages that were offered because they were [evicted](WritePolicy::Back), nor
    /// snapshots that were evicted in the meantime.
    pub fn take_offers(&mut self) -> OfferedPieces {
        let Some(offers) = &mut self.offers else { return OfferedPieces::default() };
        let mut list = std::mem::take(&mut offers.list);
        if offers.policy == WritePolicy::Back {
            // A prefix is evicted from its end.
            list.pages.reverse();
        }
        list
    }

    /// Returns the keys of the pages with which the tier below can continue a hold, for at most the first
    /// `limit` of `tokens`. In a stateful tree they end at a snapshot.
    ///
    /// # Errors
    /// Returns an error if a token cannot be read.
    pub fn keys_below(
        &self,
        namespace: &Namespace,
        hold: &Hold,
        tokens: &dyn Tokens,
        limit: usize,
        lower: &dyn LowerTierContents,
    ) -> Result<Vec<PageHash>> {
        let pages = self.node(hold.node).pages.len();
        let usable = Some(TreePosition { node: hold.node, pages, len: hold.len });
        self.keys_after(namespace, DevicePrefix { usable, cached: hold.found() }, tokens, limit, lower)
    }

    /// Looks up the first `limit` of `tokens`, and returns what follows the cached part; `None` if the tree
    /// keeps no keys.
    ///
    /// # Errors
    /// Returns an error if a token cannot be read or is not a token id.
    pub fn continuation(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<Option<Continuation>> {
        let whole = self.in_whole_pages(limit.min(tokens.count()));
        tokens.check(0..whole)?;
        let place = self.place_of(namespace, tokens, whole)?;
        let (cached, usable) =
            (place.map_or(0, TreePosition::len), place.map(|place| self.usable_place(place)));
        let chain = self.chain_after(namespace, usable);
        Ok(chain.map(|chain| Continuation { chain, usable: usable.map_or(0, TreePosition::len), cached }))
    }

    /// Returns the keys of the pages with which the tier below can continue `prefix`, for at most the first
    /// `limit` of `tokens`.
    pub(super) fn keys_after(
        &self,
        namespace: &Namespace,
        prefix: DevicePrefix,
        tokens: &dyn Tokens,
        limit: usize,
        lower: &dyn LowerTierContents,
    ) -> Result<Vec<PageHash>> {
        let mut keys = Vec::new();
        let Some(mut chain) = self.chain_after(namespace, prefix.usable) else { return Ok(keys) };
        let (mut at, mut usable) = (prefix.usable.map_or(0, TreePosition::len), 0);
        let (limit, mut buffer) = (limit.min(tokens.count()), Vec::new());
        while at + self.page_size <= limit {
            let key = chain.next(tokens.slice(at..at + self.page_size, &mut buffer)?);
            at += self.page_size;
            if at > prefix.cached && !lower.has_page(&key) {
                break;
            }
            try_push(&mut keys, key)?;
            if !self.is_stateful || lower.has_state(&key) {
                usable = keys.len();
            }
        }
        keys.truncate(usable);
        Ok(keys)
    }

    /// Returns a chain that makes the keys after a place, if the tree keeps keys and the place can be found.
    fn chain_after(&self, namespace: &Namespace, place: Option<TreePosition>) -> Option<KeyChain> {
        let digest = self.keyed.keys()?.digest();
        let Some(place) = place.filter(|place| place.len > 0) else {
            return Some(KeyChain::at_root(digest, namespace, self.page_size));
        };
        let last = self.node(place.node).pages.get(place.pages.checked_sub(1)?)?;
        Some(KeyChain::after(digest, self.key_of(*last)?))
    }

    fn keys_of(&self, pages: &[Page]) -> Option<Vec<PageHash>> {
        let keys = self.keyed.keys()?;
        pages.iter().map(|&page| keys.get(page)).collect()
    }

    fn key_at_end(&self, node: NodeId) -> Option<PageHash> {
        self.key_of(*self.node(node).pages.last()?)
    }

    /// Offers pages of a node that were published, if the policy asks for that.
    pub(super) fn offer_published(&mut self, node: NodeId, pages: Range<usize>) {
        let Some(offers) = &self.offers else { return };
        if match offers.policy {
            WritePolicy::Through => true,
            WritePolicy::Selective => self.node(node).history.uses > 1,
            WritePolicy::Back => false,
        } {
            self.offer_pages(node, pages);
        }
    }

    /// Offers a node whose use was recorded, if the policy asks for that.
    pub(super) fn offer_used(&mut self, node: NodeId) {
        let Some(offers) = &self.offers else { return };
        let here = self.node(node);
        if offers.policy == WritePolicy::Selective && here.history.uses == 2 {
            let (pages, has_snapshot) = (0..here.pages.len(), here.has_snapshot);
            self.offer_pages(node, pages);
            if has_snapshot {
                self.offer_state(node);
            }
        }
    }

    /// Offers pages of a node that are about to be evicted, if the policy asks for that.
    pub(super) fn offer_evicted(&mut self, node: NodeId, pages: Range<usize>) {
        if self.offers.as_ref().is_some_and(|offers| offers.policy == WritePolicy::Back) {
            self.offer_pages(node, pages);
        }
    }

    /// Offers a snapshot that was made at the end of a node, if the policy asks for that.
    pub(super) fn offer_snapshot(&mut self, node: NodeId) {
        let Some(offers) = &self.offers else { return };
        if offers.policy != WritePolicy::Selective || self.node(node).history.uses > 1 {
            self.offer_state(node);
        }
    }

    fn offer_state(&mut self, node: NodeId) {
        let (key, slot) = (self.key_at_end(node), self.snapshot_at(node));
        let name = self.roots.name(self.node(node).root);
        if let (Some(key), Some(slot), Some(name), Some(offers)) = (key, slot, name, &mut self.offers) {
            offers.list.states.push(OfferedState { slot, key, namespace: name.clone() });
        }
    }

    fn offer_pages(&mut self, node: NodeId, range: Range<usize>) {
        let here = self.node(node);
        let pages = here.pages[range.clone()].to_vec();
        let previous = match range.start {
            0 => self.node(here.parent).pages.last().filter(|_| here.parent != node),
            start => here.pages.get(start - 1),
        };
        let Some(keys) = self.keys_of(&pages).filter(|keys| !keys.is_empty()) else { return };
        let parent = previous.and_then(|page| self.key_of(*page));
        let tokens = if self.keyed.has_journal() {
            here.tokens[range.start * self.page_size..range.end * self.page_size].to_vec()
        } else {
            Vec::new()
        };
        let name = self.roots.name(here.root);
        if let (Some(name), Some(offers)) = (name, &mut self.offers) {
            let namespace = name.clone();
            offers.list.pages.push(OfferedPages { pages, keys, namespace, parent, tokens });
        }
    }

    /// Returns the time.
    #[must_use]
    pub const fn now(&self) -> Tick {
        self.now
    }

    /// Returns the size of the list in bytes.
    pub(super) fn offer_bytes(&self) -> usize {
        let Some(Offers { list, .. }) = &self.offers else { return 0 };
        list.pages.capacity() * size_of::<OfferedPages>() + list.states.capacity() * size_of::<OfferedState>()
    }
}
