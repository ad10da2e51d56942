//! What requests in the engine's waiting queue will find: it is evicted after all else.
//!
//! A request needs the tokens up to a node. Only leaves are evicted, so it is enough to know that node: those before it
//! are safe behind it. If it is evicted all the same, the request needs what is left, up to its parent. A node that is
//! split keeps its end, and the requests with it.
//!
//! *Cost.* A new queue costs the requests of the old one and of the new one, and a logarithm of their number for each.

use super::{HybridTree, NodeHandle, NodeId, ROOT};
use crate::engines::{QueueEnd, WaitingId};

/// A request of a waiting queue, by what is known of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitingRequest {
    /// The request in the queue before, if it was in it.
    pub known: Option<WaitingId>,
    /// The node at the end of what was found for it, if it was looked up since. With one that no longer exists, it needs
    /// what it needed before.
    pub found: Option<NodeHandle>,
}

impl HybridTree {
    /// Sets the engine's waiting queue, from the request on that is served next, and returns how the requests are known
    /// from now on. What they need is evicted after all else, that of the last request first. What several need counts as of
    /// the first of them. Those that are not in the queue any more need nothing. It counts with
    /// [`EvictionOrder::Adaptive`](super::EvictionOrder::Adaptive) alone, and not for the eviction of windows and states,
    /// which go by recency.
    ///
    /// ```
    /// use kvpool::base::{EngineSlot, Id};
    /// use kvpool::cache::Namespace;
    /// use kvpool::engines::hybrid::{EvictionOrder, HybridConfig, HybridTree, Insert, WaitingRequest};
    /// let order = EvictionOrder::Adaptive(8);
    /// let mut tree = HybridTree::new(HybridConfig { page_size: 1, order, window: None, state: None });
    /// let prompts: [&[i64]; 2] = [&[5], &[6]];
    /// for (prompt, slot) in prompts.iter().zip([20, 21]) {
    ///     let slots = [EngineSlot::new(slot)];
    ///     tree.begin(&Namespace::Unnamed, prompt, &slots.as_slice(), Insert::default()).unwrap();
    /// }
    /// let found = Some(tree.find(&Namespace::Unnamed, &prompts[0]).node);
    /// let known = tree.set_waiting(&[WaitingRequest { found, ..WaitingRequest::default() }])[0];
    /// assert_eq!(tree.evict_full(1).full, [EngineSlot::new(21)], "a waiting request needs the older prompt");
    /// tree.set_waiting(&[WaitingRequest { known: Some(known), found: None }]);
    /// assert_eq!(tree.evict_full(1).full, [EngineSlot::new(20)], "nothing is locked");
    /// ```
    pub fn set_waiting(&mut self, queue: &[WaitingRequest]) -> Vec<WaitingId> {
        let Some(worth) = self.queue.worth() else { return vec![WaitingId::from(0); queue.len()] };
        let needed_by = |request: &WaitingRequest| {
            let found = request.found.and_then(|node| self.at(node));
            let before = || worth.waiting.needed_by(request.known?).first().copied();
            found.or_else(before).filter(|&id| id != ROOT)
        };
        let needed: Vec<Option<NodeId>> = queue.iter().map(needed_by).collect();
        let changed = worth.waiting.needed().chain(needed.iter().flatten().copied());
        // An eviction may have taken a leaf out of the queue.
        let changed: Vec<NodeId> = changed.filter(|&id| self.node(id).queued.is_some()).collect();
        for &id in &changed {
            self.unqueue(id);
        }
        let requests = self.queue.worth_mut().map_or(Vec::new(), |worth| {
            worth.waiting.clear();
            let add = |id: Option<NodeId>| {
                let request = worth.waiting.add(QueueEnd::Back);
                if let Some(id) = id {
                    worth.waiting.need(request, id);
                }
                request
            };
            needed.into_iter().map(add).collect()
        });
        for id in changed {
            self.requeue(id);
        }
        requests
    }

    /// Lets the requests that need a leaf, which is about to be removed, need what is before it.
    pub(super) fn move_needs_up(&mut self, leaf: NodeId) {
        let parent = self.node(leaf).parent;
        if self.queue.worth().is_some_and(|worth| worth.waiting.needs(leaf)) {
            self.unqueue(leaf);
            if let Some(worth) = self.queue.worth_mut() {
                worth.waiting.replace(leaf, Some(parent).filter(|&parent| parent != ROOT));
            }
        }
    }
}
