//! Requests that wait until they are served.

use std::fmt;
use std::sync::Weak;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::base::Result;
use crate::cache::{Namespace, Tokens, WaitingId, WaitingRank};
use crate::memory::Stream;

/// A cache for whose prefixes requests wait.
pub(super) trait HasWaiting: Send + Sync {
    /// Adds a request.
    fn add(&self, rank: WaitingRank, stream: Stream) -> WaitingId;

    /// Looks up what a request would find of the first `limit` tokens: it needs that from now on.
    fn look_up(
        &self,
        request: WaitingId,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        stream: Stream,
    ) -> Result<usize>;

    /// Removes a request, if it was not removed before.
    fn remove(&self, request: WaitingId, stream: Stream);
}

/// A request in an engine's waiting queue, of which a [`PrefixCache`](super::PrefixCache) or an
/// [`ArenaPrefixCache`](super::ArenaPrefixCache) knows: what it would find is evicted after all else that is not retained.
/// Nothing is locked. Dropping it removes it from the queue.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::cache::{Namespace, PolicyKind, WaitingRank};
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, PrefixCache, PrefixCacheConfig, TokenToKvPoolAllocator, WaitingRequest};
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let allocator = Arc::new(TokenToKvPoolAllocator::new(&AllocatorConfig::new(8), &host).unwrap());
/// let config = PrefixCacheConfig {
///     policy: PolicyKind::Adaptive, cost: None, max_pinned: 0.5, name: "cache".into(), events: None,
/// };
/// let cache = PrefixCache::new(config, allocator, None, None).unwrap();
/// let prompt: &[i32] = &[5, 6, 7];
/// let rank = WaitingRank::default();
/// let request: WaitingRequest = cache.add_waiting(&Namespace::Unnamed, &prompt, 2, rank, stream).unwrap();
/// assert_eq!((request.len(), request.rank(), cache.tree_stats(stream).waiting), (0, rank, 1));
/// // Others may have published some of it meanwhile.
/// assert_eq!(request.update(&prompt, 2, stream).unwrap(), 0);
/// request.remove(stream);
/// assert_eq!(cache.tree_stats(stream).waiting, 0);
/// ```
pub struct WaitingRequest {
    /// The cache, which it does not keep.
    shared: Weak<dyn HasWaiting>,
    id: WaitingId,
    namespace: Namespace,
    /// The tokens that it would have found when it was looked up last.
    len: AtomicUsize,
    /// The stream on which it was made, for a drop.
    stream: Stream,
}

impl WaitingRequest {
    /// Adds a request to a cache.
    pub(super) fn new(
        shared: Weak<dyn HasWaiting>,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        rank: WaitingRank,
        stream: Stream,
    ) -> Result<Self> {
        tokens.check(0..tokens.count())?;
        let id = shared.upgrade().map_or(WaitingId::new(rank, 0), |cache| cache.add(rank, stream));
        let (namespace, len) = (namespace.clone(), AtomicUsize::new(0));
        let this = Self { shared, id, namespace, len, stream };
        this.update(tokens, limit, stream)?;
        Ok(this)
    }

    /// Looks the first `limit` tokens of the prompt up again: the request needs what it would find of them now. Returns the
    /// tokens of that, in whole pages; 0 if the cache no longer exists. Tokens behind what is found are not checked.
    ///
    /// # Errors
    /// The error of tokens that cannot be read; [`ErrorKind::State`](crate::base::ErrorKind::State) after
    /// [`Self::remove`].
    pub fn update(&self, tokens: &dyn Tokens, limit: usize, stream: Stream) -> Result<usize> {
        let found = |cache: &dyn HasWaiting| cache.look_up(self.id, &self.namespace, tokens, limit, stream);
        let len = self.shared.upgrade().map_or(Ok(0), |cache| found(&*cache))?;
        self.len.store(len, Ordering::Relaxed);
        Ok(len)
    }

    /// Returns the tokens that it would have found when it was looked up last, in whole pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Returns whether it would have found nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns its place in the queue: requests of a lower rank are served first; those of one rank in the order in which
    /// they were added.
    #[must_use]
    pub const fn rank(&self) -> WaitingRank {
        self.id.rank()
    }

    /// Removes it from the queue, because it runs now or does not go on. A second call does nothing.
    pub fn remove(&self, stream: Stream) {
        self.shared.upgrade().iter().for_each(|cache| cache.remove(self.id, stream));
    }
}

impl Drop for WaitingRequest {
    fn drop(&mut self) {
        self.remove(self.stream);
    }
}

impl fmt::Debug for WaitingRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitingRequest")
            .field("rank", &self.rank())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}
