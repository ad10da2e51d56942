//! Settings of a prefix cache, the tiers below it, and its counts.

use std::sync::Arc;

use crate::cache::{Digest, PolicyKind};
use crate::pool::{HostTier, Store};

/// Settings of a [`PrefixCache`](super::PrefixCache).
#[derive(Clone, Debug)]
pub struct PrefixCacheConfig {
    /// The policy by which prefixes are evicted.
    pub policy: PolicyKind,
    /// The share of the allocator's capacity that may be pinned.
    pub max_pinned: f64,
    /// The owner of cached pages in reports.
    pub name: String,
    /// Hashes the keys of pages for [`PrefixCache::take_events`](super::PrefixCache::take_events); without it
    /// there are no events.
    pub events: Option<Digest>,
}

/// The tiers below a [`PrefixCache`](super::PrefixCache).
#[derive(Clone, Debug)]
pub struct LowerTier {
    /// Host memory, for this cache alone.
    pub host: Arc<HostTier>,
    /// Hashes the keys of pages.
    pub digest: Digest,
    /// The store below host memory.
    pub store: Option<LowerStore>,
}

/// A store below a [`HostTier`], which other caches may use, too.
#[derive(Clone, Debug)]
pub struct LowerStore {
    /// The store.
    pub store: Arc<dyn Store>,
    /// The name of the model, and of everything else that K and V depend on besides the tokens and the shape
    /// of the pools, such as the rank of a model part. Caches with the same name share pages.
    pub model: String,
}

/// Counts of a [`PrefixCache`](super::PrefixCache) since it was made, in tokens unless the name says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCounts {
    /// Calls of [`PrefixCache::match_prefix`](super::PrefixCache::match_prefix), those of insertions included.
    pub lookups: usize,
    /// Tokens found by look-ups.
    pub hit_tokens: usize,
    /// Tokens looked up and not found.
    pub missed_tokens: usize,
    /// Tokens published.
    pub published: usize,
    /// Tokens that were published by others in between, and whose slots were freed.
    pub duplicates: usize,
    /// Tokens evicted.
    pub evicted: usize,
    /// Tokens that came back from the tier below.
    pub loaded: usize,
}
