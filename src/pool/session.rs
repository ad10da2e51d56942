//! Sessions: the turns of one conversation.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::base::{Error, Result};
use crate::cache::{Namespace, SessionId};
use crate::memory::Stream;

/// A cache that sessions tell what comes back.
pub(super) trait HasSessions: Send + Sync {
    /// Records that a session pauses.
    fn pause(&self, session: SessionId, kind: &str, stream: Stream);

    /// Records that a session has ended.
    fn end(&self, session: SessionId, stream: Stream);
}

/// The turns of one conversation or agent in a [`PrefixCache`](super::PrefixCache) or an
/// [`ArenaPrefixCache`](super::ArenaPrefixCache), which tells it what comes back and what does not. It holds nothing:
/// a session that is abandoned costs nothing.
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
    shared: Weak<dyn HasSessions>,
    name: Namespace,
    id: SessionId,
}

impl Session {
    /// Returns the session of a cache with a name; one like no other for [`Namespace::Unnamed`], of which there were
    /// `unnamed`.
    pub(super) fn new(shared: Weak<dyn HasSessions>, name: Namespace, unnamed: &AtomicU64) -> Self {
        let id = if name == Namespace::Unnamed {
            let mut hasher = DefaultHasher::new();
            unnamed.fetch_add(1, Ordering::Relaxed).hash(&mut hasher);
            SessionId::new(hasher.finish())
        } else {
            SessionId::of_name(&name)
        };
        Self { shared, name, id }
    }

    /// Returns its identity in a cache.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a session of another cache.
    pub(super) fn id_in<T>(&self, cache: &Arc<T>) -> Result<SessionId> {
        if Arc::as_ptr(cache).cast::<()>() != self.shared.as_ptr().cast::<()>() {
            return Err(Error::argument("the session is of another prefix cache"));
        }
        Ok(self.id)
    }

    /// Returns the name of the session; [`Namespace::Unnamed`] for one like no other.
    #[must_use]
    pub const fn name(&self) -> &Namespace {
        &self.name
    }

    /// Records that the turn is over, and that the session goes on after a pause of this kind, such as a call
    /// of a tool.
    pub fn pause(&self, kind: &str, stream: Stream) {
        self.shared.upgrade().iter().for_each(|cache| cache.pause(self.id, kind, stream));
    }

    /// Records that the session has ended: what only it has used is evicted first.
    pub fn end(&self, stream: Stream) {
        self.shared.upgrade().iter().for_each(|cache| cache.end(self.id, stream));
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("name", &self.name).finish_non_exhaustive()
    }
}
