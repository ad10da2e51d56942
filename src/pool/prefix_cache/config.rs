//! Settings of a prefix cache, the tiers below it, and its counts.

use std::sync::Arc;

use crate::cache::{Digest, PolicyKind, PrefillCost};
use crate::pool::{HostTier, Store};

/// Settings of a [`PrefixCache`](super::PrefixCache).
#[derive(Clone, Debug)]
pub struct PrefixCacheConfig {
    /// The policy by which prefixes are evicted.
    pub policy: PolicyKind,
    /// What a token is worth by its position, if there is no tier below. Without it, all are worth the same.
    pub cost: Option<PrefillCost>,
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
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use kvpool::base::{DType, IndexVec};
/// use kvpool::cache::{Namespace, PolicyKind, WritePolicy};
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{
///     AllocatorConfig, CachedSizes, Fetch, FileStore, FileStoreConfig, HostTier, HostTierConfig, KvConfig,
///     KvLayout, KvPool, Lease, Load, LowerStore, LowerTier, PrefixCache, PrefixCacheConfig, Published,
///     TokenToKvPoolAllocator,
/// };
/// use kvpool::transfer::FileCaching;
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let config = AllocatorConfig { page_size: 2, ..AllocatorConfig::new(8) };
/// let slots = Arc::new(TokenToKvPoolAllocator::new(&config, &host).unwrap());
/// let config = KvConfig {
///     size: 8, layer_num: 1, k_head_num: 1, k_head_dim: 8, v_head_num: 1, v_head_dim: 8, dtype: DType::BF16,
///     page_size: 2, layout: KvLayout::Split, pin_memory: false,
/// };
/// let kv = Arc::new(KvPool::new(&config, &host).unwrap());
/// let config = HostTierConfig {
///     size: 64, max_states: 0, write: WritePolicy::Through, pin_memory: false, page_lock_threads: 1,
///     staging_bytes: 0,
/// };
/// // Take BLAKE3 or SHA-256.
/// fn digest(parts: &[&[u8]]) -> [u8; 32] {
///     let mix = |sum: u64, &byte: &u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
///     [parts.concat().iter().fold(0, mix).to_le_bytes(); 4].concat().try_into().unwrap()
/// }
/// let path = std::env::temp_dir().join(format!("kvpool-below-{}", std::process::id()));
/// let store_config = FileStoreConfig {
///     capacity_bytes: 1 << 20, page_bytes: 4096, threads: 1, queue_bytes: 1 << 20,
///     policy: PolicyKind::Adaptive, digest,
/// };
/// let store = Arc::new(FileStore::at(&path, &store_config, FileCaching::Cached).unwrap());
/// let store_below = LowerStore { store, model: "a model, rank 0".into() };
/// let tier = HostTier::new(&config, &kv, None, &host).unwrap();
/// let below = LowerTier { host: Arc::new(tier), digest, store: Some(store_below) };
/// let config =
///     PrefixCacheConfig { policy: PolicyKind::Lru, cost: None, max_pinned: 0.5, name: "cache".into(), events: None };
/// let cache = PrefixCache::new(config, Arc::clone(&slots), None, Some(below)).unwrap();
///
/// let prompt: &[i32] = &[5, 6, 7, 8];
/// let lease: Arc<Lease> = cache.match_prefix(&Namespace::Unnamed, &prompt, 4, stream).unwrap();
/// drop(slots.alloc(4, stream).unwrap().expect("8 are free").keep());
/// let published: Published = lease.finish(&prompt, &IndexVec::I32(vec![2, 3, 4, 5]), stream).unwrap();
/// assert_eq!(published.length, 4);
/// assert_eq!(cache.sizes(stream), CachedSizes { evictable: 4, locked: 0 });
/// cache.evict(4, stream);
/// // The pages were copied to host memory, from where they come back.
/// let lease = cache.match_prefix(&Namespace::Unnamed, &prompt, 4, stream).unwrap();
/// assert_eq!((lease.len().unwrap(), lease.loadable().unwrap()), (0, 4));
/// let load: Load = lease.load(4, stream).unwrap().expect("there are slots");
/// load.wait_layer(0, stream).unwrap();
/// assert_eq!(lease.len().unwrap(), 4);
/// // A prompt that arrives later: what only the store has of it is on its way to host memory.
/// let fetch: Fetch = cache.fetch(&Namespace::Unnamed, &prompt, 4, stream).unwrap();
/// assert!(fetch.wait(Duration::from_secs(60)) && fetch.is_over());
/// # drop((load, lease, cache));
/// # std::fs::remove_dir_all(path).unwrap();
/// ```
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
