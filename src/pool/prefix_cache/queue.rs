//! Requests that wait for prefixes of a prefix cache.

use std::sync::{Arc, Weak};

use crate::base::Result;
use crate::cache::{Namespace, Tokens, WaitingId, WaitingRank};
use crate::memory::Stream;
use crate::pool::waiting_request::{HasWaiting, WaitingRequest};

use super::PrefixCache;
use super::cache_core::CacheCore;

impl HasWaiting for CacheCore {
    fn add(&self, rank: WaitingRank, stream: Stream) -> WaitingId {
        self.with_tree(stream, |tree| tree.add_waiting(rank)).unwrap_or_else(|| WaitingId::new(rank, 0))
    }

    fn look_up(
        &self,
        request: WaitingId,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        stream: Stream,
    ) -> Result<usize> {
        self.with_tree(stream, |tree| tree.look_up_waiting(request, namespace, tokens, limit))
            .unwrap_or(Ok(0))
    }

    fn remove(&self, request: WaitingId, stream: Stream) {
        self.with_tree(stream, |tree| tree.remove_waiting(request));
    }
}

impl PrefixCache {
    /// Adds a request to the engine's waiting queue, behind those of its rank. What it would find of the first `limit` of
    /// `tokens` is evicted after all else that is not retained, that of the last request in the queue first, until it is
    /// removed. What several requests need counts as of the first of them. The tier below is not told of it.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a number that is no token id; the error of tokens
    /// that cannot be read.
    pub fn add_waiting(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        rank: WaitingRank,
        stream: Stream,
    ) -> Result<WaitingRequest> {
        let shared: Weak<CacheCore> = Arc::downgrade(&self.shared);
        WaitingRequest::new(shared, namespace, tokens, limit, rank, stream)
    }
}
