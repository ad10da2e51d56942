//! Requests that wait for prefixes of a prefix cache of an arena.

use std::sync::{Arc, Weak};

use crate::base::Result;
use crate::cache::{Namespace, Tokens, WaitingId, WaitingRank};
use crate::memory::Stream;
use crate::pool::waiting_request::{HasWaiting, WaitingRequest};

use super::ArenaPrefixCache;
use super::cache_core::ArenaCacheCore;

impl HasWaiting for ArenaCacheCore {
    fn add(&self, rank: WaitingRank, _stream: Stream) -> WaitingId {
        self.current().groups.add_waiting(rank)
    }

    fn look_up(
        &self,
        request: WaitingId,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        _stream: Stream,
    ) -> Result<usize> {
        self.current().groups.look_up_waiting(request, namespace, tokens, limit)
    }

    fn remove(&self, request: WaitingId, _stream: Stream) {
        self.current().groups.remove_waiting(request);
    }
}

impl ArenaPrefixCache {
    /// Adds a request to the engine's waiting queue, behind those of its rank. What it would find of the first `limit` of
    /// `tokens` is evicted after all else, that of the last request in the queue first, until it is removed. What several
    /// requests need counts as of the first of them. The tier below is not told of it.
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
    ) -> Result<WaitingRequest> {
        let core: Weak<ArenaCacheCore> = Arc::downgrade(&self.core);
        let stream = Stream::default_of(self.core.arena.device());
        WaitingRequest::new(core, namespace, tokens, limit, rank, stream)
    }
}
