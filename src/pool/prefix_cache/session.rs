//! Sessions: the turns of one conversation.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use crate::base::{Error, Result};
use crate::cache::{Namespace, SessionId, Tokens, Tree};
use crate::memory::Stream;

use super::cache_core::CacheCore;
use super::{Lease, PrefixCache};

/// The turns of one conversation or agent in a [`PrefixCache`], which tells it what comes back and what does
/// not. It holds nothing: a session that is abandoned costs nothing.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::cache::{Namespace, PolicyKind};
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, PrefixCache, PrefixCacheConfig, Session, TokenToKvPoolAllocator};
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let allocator = Arc::new(TokenToKvPoolAllocator::new(&AllocatorConfig::new(8), &host).unwrap());
/// let config = PrefixCacheConfig {
///     policy: PolicyKind::Adaptive, cost: None, max_pinned: 0.5, name: "cache".into(), events: None,
/// };
/// let cache = PrefixCache::new(config, allocator, None, None).unwrap();
/// let session: Session = cache.session(Namespace::Text("chat 3".into()));
/// let prompt: &[i32] = &[5, 6, 7];
/// let lease = cache.match_in_session(&session, &Namespace::Unnamed, &prompt, 2, stream).unwrap();
/// drop(lease);
/// session.pause("user", stream);
/// session.end(stream);
/// assert_eq!(session.name(), &Namespace::Text("chat 3".into()));
/// ```
pub struct Session {
    /// The cache, which it does not keep.
    shared: Weak<CacheCore>,
    name: Namespace,
    id: SessionId,
}

impl Session {
    /// Returns the name of the session; [`Namespace::Unnamed`] for one like no other.
    #[must_use]
    pub const fn name(&self) -> &Namespace {
        &self.name
    }

    /// Records that the turn is over, and that the session goes on after a pause of this kind, such as a call
    /// of a tool.
    pub fn pause(&self, kind: &str, stream: Stream) {
        self.with(stream, |tree| tree.pause(self.id, kind));
    }

    /// Records that the session has ended: what only it has used is evicted first.
    pub fn end(&self, stream: Stream) {
        self.with(stream, |tree| tree.end(self.id));
    }

    /// Calls `work` with the tree, as long as the cache exists.
    fn with(&self, stream: Stream, work: impl FnOnce(&mut Tree)) {
        let Some(shared) = self.shared.upgrade() else { return };
        let Some(allocator) = shared.allocator.upgrade() else { return };
        work(&mut shared.begin_call(&allocator, stream).current().tree);
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("name", &self.name).finish_non_exhaustive()
    }
}

impl PrefixCache {
    /// Returns the session with a name; a session like no other for [`Namespace::Unnamed`].
    #[must_use]
    pub fn session(&self, name: Namespace) -> Session {
        // Ranks that make the same calls get the same identities.
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        if name == Namespace::Unnamed {
            self.shared.unnamed_sessions.fetch_add(1, Ordering::Relaxed).hash(&mut hasher);
        }
        Session { shared: Arc::downgrade(&self.shared), name, id: SessionId::new(hasher.finish()) }
    }

    /// Works like [`Self::match_prefix`], for a turn of a session, which ends with the lease.
    ///
    /// # Errors
    /// See [`Self::match_prefix`]; also [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a session
    /// of another cache.
    pub fn match_in_session(
        &self,
        session: &Session,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        stream: Stream,
    ) -> Result<Arc<Lease>> {
        if Arc::as_ptr(&self.shared) != session.shared.as_ptr() {
            return Err(Error::argument("the session is of another prefix cache"));
        }
        self.match_with(namespace, tokens, limit, stream, |tree| {
            tree.match_in_session(session.id, namespace, tokens, limit)
        })
    }
}
