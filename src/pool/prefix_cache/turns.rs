//! The turns of sessions in a prefix cache.

use std::sync::{Arc, Weak};

use crate::base::Result;
use crate::cache::{Namespace, SessionId, Tokens, Tree};
use crate::memory::Stream;
use crate::pool::session::{HasSessions, Session};

use super::cache_core::CacheCore;
use super::{Lease, PrefixCache};

impl CacheCore {
    /// Calls `work` with the tree, as long as the allocator exists.
    pub(super) fn with_tree<R>(&self, stream: Stream, work: impl FnOnce(&mut Tree) -> R) -> Option<R> {
        let allocator = self.allocator.upgrade()?;
        Some(work(&mut self.begin_call(&allocator, stream).current().tree))
    }
}

impl HasSessions for CacheCore {
    fn pause(&self, session: SessionId, kind: &str, stream: Stream) {
        self.with_tree(stream, |tree| tree.pause(session, kind));
    }

    fn end(&self, session: SessionId, stream: Stream) {
        self.with_tree(stream, |tree| tree.end(session));
    }
}

impl PrefixCache {
    /// Returns the session with a name; a session like no other for [`Namespace::Unnamed`].
    #[must_use]
    pub fn session(&self, name: Namespace) -> Session {
        let shared: Weak<CacheCore> = Arc::downgrade(&self.shared);
        Session::new(shared, name, &self.shared.unnamed_sessions)
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
        let id = session.id_in(&self.shared)?;
        self.match_with(namespace, tokens, limit, stream, |tree| {
            tree.match_in_session(id, namespace, tokens, limit)
        })
    }
}
