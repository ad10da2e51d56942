//! What requests in the engine's waiting queue will find: it is evicted after all else.
//!
//! A request needs the tokens up to a node. Only leaves are evicted, so it is enough to know that node: those before it
//! are safe behind it. If it is evicted all the same, the request needs what is left, up to its parent. A node that is
//! split keeps its end, and the requests with it.
//!
//! *Cost.* A new queue costs the requests of the old one and of the new one, and a logarithm of their number for each.

use super::{HybridTree, NodeHandle, NodeId, ROOT};
use crate::cache::{WaitingId, WaitingRank};

/// A request of a waiting queue, by what is known of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuedRequest {
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
    /// use kvpool::engines::hybrid::{EvictionOrder, HybridConfig, HybridTree, Insert, QueuedRequest};
    /// let order = EvictionOrder::Adaptive(8);
    /// let mut tree = HybridTree::new(HybridConfig { page_size: 1, order, window: None, state: None });
    /// let prompts: [&[i64]; 2] = [&[5], &[6]];
    /// for (prompt, slot) in prompts.iter().zip([20, 21]) {
    ///     let slots = [EngineSlot::new(slot)];
    ///     tree.begin(&Namespace::Unnamed, prompt, &slots.as_slice(), Insert::default()).unwrap();
    /// }
    /// let found = Some(tree.find(&Namespace::Unnamed, &prompts[0]).node);
    /// let known = tree.set_waiting(&[QueuedRequest { found, ..QueuedRequest::default() }])[0];
    /// assert_eq!(tree.evict_full(1).full, [EngineSlot::new(21)], "a waiting request needs the older prompt");
    /// tree.set_waiting(&[QueuedRequest { known: Some(known), found: None }]);
    /// assert_eq!(tree.evict_full(1).full, [EngineSlot::new(20)], "nothing is locked");
    /// ```
    pub fn set_waiting(&mut self, queue: &[QueuedRequest]) -> Vec<WaitingId> {
        let Some(worth) = self.queue.worth() else {
            return vec![WaitingId::new(WaitingRank::default(), 0); queue.len()];
        };
        let needed_by = |request: &QueuedRequest| {
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
                let request = worth.waiting.add(WaitingRank::default());
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

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails where there is nothing to unwrap")]
mod tests {
    use super::*;
    use crate::base::{EngineSlot, Id};
    use crate::cache::Namespace;
    use crate::engines::hybrid::{EvictionOrder, HybridConfig, Insert};

    fn tree(order: EvictionOrder, prompts: &[&[i64]]) -> HybridTree {
        let mut tree = HybridTree::new(HybridConfig { page_size: 1, order, window: None, state: None });
        for prompt in prompts {
            insert(&mut tree, prompt);
        }
        tree
    }

    /// Inserts a prompt, whose slots are its tokens.
    fn insert(tree: &mut HybridTree, prompt: &[i64]) {
        let slots: Vec<_> =
            prompt.iter().map(|&token| EngineSlot::new(u32::try_from(token).unwrap())).collect();
        tree.begin(&Namespace::Unnamed, &prompt, &slots.as_slice(), Insert::default())
            .unwrap()
            .result
            .unwrap();
    }

    /// Sets the queue to new requests with these prompts.
    fn wait(tree: &mut HybridTree, prompts: &[&[i64]]) -> Vec<WaitingId> {
        let find = |prompt: &&[i64]| QueuedRequest {
            known: None,
            found: Some(tree.find(&Namespace::Unnamed, prompt).node),
        };
        let queue: Vec<_> = prompts.iter().map(find).collect();
        tree.set_waiting(&queue)
    }

    fn evicted(tree: &mut HybridTree, count: usize) -> Vec<u32> {
        let mut slots: Vec<_> = tree.evict_full(count).full.iter().map(|slot| slot.number()).collect();
        slots.sort_unstable();
        assert_eq!(tree.broken_invariant(), None);
        slots
    }

    const BY_WORTH: EvictionOrder = EvictionOrder::Adaptive(64);

    #[test]
    fn a_request_needs_what_is_left_of_its_prefix() {
        let mut tree = tree(BY_WORTH, &[&[1, 2, 3, 4], &[1, 2, 3, 5]]);
        wait(&mut tree, &[&[1, 2, 3, 4, 9], &[1, 2, 8]]);
        assert_eq!(evicted(&mut tree, 1), [5]);
        insert(&mut tree, &[6]);
        // The last token and then a part of a node, each after what is new.
        assert_eq!(evicted(&mut tree, 2), [4, 6]);
        insert(&mut tree, &[7]);
        assert_eq!(evicted(&mut tree, 2), [3, 7]);
        insert(&mut tree, &[8]);
        assert_eq!(evicted(&mut tree, 2), [2, 8]);
        insert(&mut tree, &[9]);
        assert_eq!(evicted(&mut tree, 1), [9]);
    }

    #[test]
    fn a_request_needs_no_more_than_its_prefix() {
        let mut tree = tree(BY_WORTH, &[&[1, 2, 3]]);
        wait(&mut tree, &[&[1, 2, 9]]);
        insert(&mut tree, &[1, 2, 4]);
        assert_eq!(evicted(&mut tree, 2), [3, 4]);
        insert(&mut tree, &[5]);
        assert_eq!(evicted(&mut tree, 1), [5]);
    }

    #[test]
    fn an_empty_tree_is_needed_by_none() {
        let mut tree = tree(BY_WORTH, &[&[1]]);
        let known = wait(&mut tree, &[&[1]])[0];
        tree.reset();
        for prompt in [&[2], &[3]] {
            insert(&mut tree, prompt);
        }
        assert_eq!(evicted(&mut tree, 1), [2]);
        tree.set_waiting(&[QueuedRequest { known: Some(known), found: None }]);
        insert(&mut tree, &[4]);
        assert_eq!(evicted(&mut tree, 1), [3]);
    }

    #[test]
    fn other_orders_are_not_told() {
        let mut tree = tree(EvictionOrder::Fifo, &[&[1], &[2]]);
        assert_eq!(wait(&mut tree, &[&[1], &[2]]).len(), 2);
        assert_eq!(evicted(&mut tree, 1), [1]);
    }
}
