//! Sessions of a hybrid tree: the order of eviction that follows from the turns of conversations.
//!
//! *Cost.* A turn costs one look-up and a visit of the nodes that change.

use super::{HybridTree, NodeHandle, NodeId, ROOT};
use crate::base::bounded::saturated;
use crate::cache::{Outlook, SessionId, beside_path};
use crate::engines::AfterTurn;

impl HybridTree {
    /// Records that a turn of a session is over, whose tokens end with `node`, and what follows. Tokens that only this
    /// session has used are evicted first if the turn has left them, or if none follows. At the root the session is only
    /// told what follows. Returns `None` if the node no longer exists. It counts with
    /// [`EvictionOrder::Adaptive`](super::EvictionOrder::Adaptive) alone.
    ///
    /// ```
    /// use kvpool::base::{EngineSlot, Id};
    /// use kvpool::cache::{Namespace, SessionId};
    /// use kvpool::engines::AfterTurn;
    /// use kvpool::engines::hybrid::{EvictionOrder, HybridConfig, HybridTree, Insert};
    /// let order = EvictionOrder::Adaptive(8);
    /// let mut tree = HybridTree::new(HybridConfig { page_size: 1, order, window: None, state: None });
    /// for (token, after) in [(5, AfterTurn::Pause("user")), (6, AfterTurn::End)] {
    ///     let (session, slot) = (SessionId::new(token.into()), EngineSlot::new(token));
    ///     let insert = Insert { session: Some(session), ..Insert::default() };
    ///     let prompt: &[i64] = &[token.into()];
    ///     let step = tree.begin(&Namespace::Unnamed, &prompt, &[slot].as_slice(), insert).unwrap();
    ///     tree.end_turn(session, step.result.unwrap().node, after).unwrap();
    /// }
    /// assert_eq!(tree.evict_full(1).full, [EngineSlot::new(6)], "the second session has ended");
    /// ```
    pub fn end_turn(&mut self, session: SessionId, node: NodeHandle, after: AfterTurn<'_>) -> Option<()> {
        let node = self.at(node)?;
        if self.queue.worth().is_none() {
            return Some(());
        }
        if node != ROOT {
            self.supersede(session, node);
        }
        let Self { nodes, queue, .. } = self;
        if let Some(worth) = queue.worth_mut() {
            let is_cached = |tail| nodes.at(tail).is_some();
            match after {
                AfterTurn::Unknown => {}
                AfterTurn::Pause(kind) => worth.sessions.pause(session, kind, worth.now, is_cached),
                AfterTurn::End => worth.sessions.end(session, is_cached),
            }
        }
        self.look_ahead(session);
        Some(())
    }

    /// Records that a turn of a session begins.
    pub(super) fn begin_turn(&mut self, session: SessionId) {
        if let Some(worth) = self.queue.worth_mut() {
            worth.sessions.begin_turn(session, worth.now);
        }
    }

    /// Ends a turn at `node`. It supersedes the turn before, if that ended elsewhere: what only this session has used of
    /// it, and no request uses now.
    fn supersede(&mut self, session: SessionId, node: NodeId) {
        // A turn that has added nothing to the one before changes nothing.
        let (rest, is_on_path) = self.tail(session).map_or((Vec::new(), false), |tail| {
            beside_path(tail, node, |at| saturated(self.node(at).end), |at| self.node(at).parent)
        });
        if is_on_path {
            return;
        }
        for superseded in rest {
            if self.is_of(superseded, session) && !self.node(superseded).is_locked() {
                self.set_outlook(superseded, Outlook::Ended);
            }
        }
        let tail = self.is_of(node, session).then(|| self.handle(node));
        let Self { nodes, queue, .. } = self;
        if let Some(worth) = queue.worth_mut() {
            worth.sessions.set_tail(session, tail, |tail| nodes.at(tail).is_some());
        }
    }

    /// Gives the nodes that only this session has used the outlook that follows from what it does.
    fn look_ahead(&mut self, session: SessionId) {
        let outlook = self.queue.worth().and_then(|worth| worth.sessions.outlook(session, &*worth.policy));
        let (Some(outlook), Some(tail)) = (outlook, self.tail(session)) else { return };
        let own: Vec<NodeId> = self.path(tail).take_while(|&id| self.is_of(id, session)).collect();
        for id in own {
            self.set_outlook(id, outlook);
        }
    }

    fn set_outlook(&mut self, id: NodeId, outlook: Outlook) {
        let Some(history) = self.queue.worth().map(|worth| worth.past(id).history) else { return };
        if history.outlook == outlook {
            return;
        }
        let tokens = saturated(self.node(id).tokens.len());
        self.unqueue(id);
        if let Some(worth) = self.queue.worth_mut() {
            worth.policy.record_outlook(&history, outlook, tokens);
            worth.past_mut(id).history.outlook = outlook;
        }
        self.requeue(id);
    }

    /// Moves the tail of a session up, before the leaf where it is is removed.
    pub(super) fn move_tail_up(&mut self, leaf: NodeId) {
        let Some(user) = self.queue.worth().and_then(|worth| worth.past(leaf).user) else { return };
        let parent = self.node(leaf).parent;
        let to = (parent != ROOT && self.is_of(parent, user)).then(|| self.handle(parent));
        let from = self.handle(leaf);
        if let Some(worth) = self.queue.worth_mut() {
            worth.sessions.move_tail(user, from, to);
        }
    }

    /// Returns the node where the last turn of a session ended, as far as that is cached.
    fn tail(&self, session: SessionId) -> Option<NodeId> {
        self.queue.worth()?.sessions.tail(session).and_then(|tail| self.nodes.at(tail))
    }

    /// Returns whether a session alone has used a node.
    fn is_of(&self, id: NodeId, session: SessionId) -> bool {
        self.queue.worth().is_some_and(|worth| worth.past(id).user == Some(session))
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails where there is nothing to unwrap")]
mod tests {
    use super::*;
    use crate::base::{EngineSlot, Id};
    use crate::cache::Namespace;
    use crate::engines::hybrid::{EvictionOrder, HybridConfig, Insert};

    const CAPACITY: usize = 64;
    const FIRST: SessionId = SessionId::new(1);

    fn tree() -> HybridTree {
        let order = EvictionOrder::Adaptive(CAPACITY);
        HybridTree::new(HybridConfig { page_size: 1, order, window: None, state: None })
    }

    fn turn(tree: &mut HybridTree, session: Option<SessionId>, tokens: &[i64], after: AfterTurn<'_>) {
        let slots: Vec<_> =
            tokens.iter().map(|&token| EngineSlot::new(u32::try_from(token).unwrap())).collect();
        let insert = Insert { session, ..Insert::default() };
        let step = tree.begin(&Namespace::Unnamed, &tokens, &slots.as_slice(), insert).unwrap();
        if let Some(session) = session {
            tree.end_turn(session, step.result.unwrap().node, after).unwrap();
        }
        assert_eq!(tree.broken_invariant(), None);
    }

    #[test]
    fn pauses_of_a_kind_become_known() {
        let mut tree = tree();
        let outlook = |tree: &HybridTree| {
            let tail = tree.tail(FIRST).unwrap();
            tree.queue.worth().unwrap().past(tail).history.outlook
        };
        for number in 0..10 {
            turn(&mut tree, Some(FIRST), &[1, 2, 3], AfterTurn::Pause("bash"));
            assert_eq!(outlook(&tree), if number < 4 { Outlook::Unknown } else { Outlook::Soon });
        }
        let long: Vec<i64> = (100..100 + 64 * 64).collect();
        for _ in 0..10 {
            turn(&mut tree, Some(FIRST), &[1, 2, 3], AfterTurn::Pause("user"));
            turn(&mut tree, None, &long, AfterTurn::Unknown);
        }
        turn(&mut tree, Some(FIRST), &[1, 2, 3], AfterTurn::Unknown);
        assert_eq!(outlook(&tree), Outlook::Unknown);
        turn(&mut tree, Some(FIRST), &[1, 2, 3], AfterTurn::Pause("user"));
        assert_eq!(outlook(&tree), Outlook::Late);
    }

    #[test]
    fn sessions_without_nodes_of_their_own_are_forgotten() {
        let mut tree = tree();
        turn(&mut tree, None, &[1, 2], AfterTurn::Unknown);
        for number in 10..5_000 {
            let own = i64::try_from(number).unwrap();
            turn(&mut tree, Some(SessionId::new(number)), &[1, 2, own], AfterTurn::Pause("user"));
            drop(tree.evict_full(1));
            // Another session ends where others do.
            turn(&mut tree, Some(SessionId::new(10_000 + number)), &[1, 2], AfterTurn::Pause("user"));
        }
        assert!(tree.queue.worth().unwrap().sessions.len() <= 1_024);
    }
}
