//! Sessions of a tree: the order of eviction that follows from the turns of conversations.
//!
//! *Invariant.* A node that only one session has used is below such nodes, or below the part of its prefix
//! that others have used as well.
//!
//! *Cost.* A turn costs one look-up and a visit of the nodes that change.

use super::{Kind, NodeId, Tree, narrow};
use crate::cache::sessions::{SessionId, beside_path};
use crate::cache::{NodeHandle, Outlook};

impl Tree {
    /// Records that the turn of a session is over, and that the session goes on after a pause of this kind, such
    /// as a call of a tool. How long pauses of a kind are is learned, in tokens looked up.
    ///
    /// ```
    /// use kvpool::cache::{BlockTokens, Namespace, PolicyKind, ResumeAt, SessionId, Tree};
    /// let policy = PolicyKind::Adaptive.policy(1024, BlockTokens::of_page_size(1), None);
    /// let (mut tree, session) = (Tree::new(1, ResumeAt::AnyPage, policy), SessionId::new(7));
    /// let prompt: &[i32] = &[5, 6, 7];
    /// let hold = tree.match_in_session(session, &Namespace::Unnamed, &prompt, 3).unwrap();
    /// drop(tree.release(hold));
    /// tree.pause(session, "bash");
    /// tree.end(session);
    /// ```
    pub fn pause(&mut self, session: SessionId, kind: &str) {
        let nodes = &self.nodes;
        self.sessions.pause(session, kind, self.now, |tail| nodes.at(tail).is_some());
        self.look_ahead(session);
    }

    /// Records that a session has ended: what only it has used is evicted first.
    pub fn end(&mut self, session: SessionId) {
        let nodes = &self.nodes;
        self.sessions.end(session, |tail| nodes.at(tail).is_some());
        self.look_ahead(session);
    }

    /// Ends a turn of a session at `node`. It supersedes the turn before, if that ended elsewhere: what only
    /// this session has used of it, and does not use now.
    pub(super) fn end_turn(&mut self, id: SessionId, node: NodeId) {
        let here = self.node(node);
        if here.kind != Kind::Run || self.node(here.root).kind != Kind::Root {
            return;
        }
        let before = self.sessions.tail(id).and_then(|tail| self.nodes.at(tail));
        // A turn that has added nothing to the one before changes nothing.
        let (rest, is_on_path) = before.map_or((Vec::new(), false), |before| self.rest_of(before, node));
        if !is_on_path {
            for superseded in rest {
                if self.node(superseded).user == Some(id) && self.node(superseded).locks == 0 {
                    self.set_outlook(superseded, Outlook::Ended);
                }
            }
            if let Some(before) = before {
                self.supersede_state(before, id);
            }
            let nodes = &self.nodes;
            let tail = (nodes[node].user == Some(id)).then(|| nodes.handle(node));
            self.sessions.set_tail(id, tail, |tail| nodes.at(tail).is_some());
        }
        self.look_ahead(id);
    }

    /// Returns the nodes on the path to `node` that are not on the path to `other`, the deepest first, and
    /// whether `other` is on the path to `node`.
    fn rest_of(&self, node: NodeId, other: NodeId) -> (Vec<NodeId>, bool) {
        beside_path(node, other, |at| self.node(at).end, |at| self.node(at).parent)
    }

    /// Makes the snapshot at the end of a turn superseded, if the session alone goes on there.
    fn supersede_state(&mut self, before: NodeId, id: SessionId) {
        let here = self.node(before);
        if here.has_snapshot && here.children == 1 && here.user == Some(id) {
            self.snapshots.supersede(before);
        }
    }

    /// Gives the nodes that only this session has used the outlook that follows from its phase.
    fn look_ahead(&mut self, id: SessionId) {
        let Some(outlook) = self.sessions.outlook(id, &*self.queues.policy) else { return };
        let Some(tail) = self.sessions.tail(id).and_then(|tail: NodeHandle| self.nodes.at(tail)) else {
            return;
        };
        let own = self.path(tail).take_while(|&node| self.node(node).user == Some(id));
        for node in own.collect::<Vec<_>>() {
            self.set_outlook(node, outlook);
        }
    }

    fn set_outlook(&mut self, node: NodeId, outlook: Outlook) {
        let here = self.node(node);
        if here.history.outlook == outlook {
            return;
        }
        let (history, tokens) = (here.history, narrow(here.tokens.len()));
        self.unqueue(node);
        self.queues.policy.record_outlook(&history, outlook, tokens);
        self.node_mut(node).history.outlook = outlook;
        self.queue(node);
    }

    /// Moves the tail of a session up, before the leaf where it is is removed.
    pub(super) fn move_tail_up(&mut self, leaf: NodeId) {
        let here = self.node(leaf);
        if let Some(id) = here.user {
            let parent = self.node(here.parent);
            let to =
                (parent.kind == Kind::Run && parent.user == Some(id)).then(|| self.nodes.handle(here.parent));
            self.sessions.move_tail(id, self.nodes.handle(leaf), to);
        }
    }

    /// Describes a node whose session has not used the nodes above it, if there is one.
    pub(super) fn broken_user(&self, id: NodeId) -> Option<String> {
        let user = self.node(id).user?;
        let parent = self.node(self.node(id).parent);
        (parent.kind == Kind::Run && parent.user.is_some_and(|other| other != user))
            .then(|| format!("{id:?} was used by {user:?}, and the node above it by another session alone"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{Id, Page};
    use crate::cache::sessions::FEW_SESSIONS;
    use crate::cache::{BlockTokens, Cause, Evicted, Hold, Namespace, PolicyKind, Pressure, ResumeAt};
    use std::time::Instant;

    const CAPACITY: usize = 64;

    /// A tree of pages of one token.
    struct Cache {
        tree: Tree,
        pages: u32,
    }

    impl Cache {
        fn new(policy: PolicyKind) -> Self {
            let policy = policy.policy(CAPACITY as u64, BlockTokens::of_page_size(1), None);
            Self { tree: Tree::new(1, ResumeAt::AnyPage, policy), pages: 0 }
        }

        fn begin(&mut self, session: Option<u64>, tokens: &[i32]) -> Hold {
            let (name, len) = (Namespace::Unnamed, tokens.len());
            let mut hold = match session {
                None => self.tree.match_prefix(&name, &tokens, len),
                Some(number) => self.tree.match_in_session(SessionId::new(number), &name, &tokens, len),
            }
            .expect("tokens");
            let rest = tokens[hold.len()..].to_vec();
            let found = self.tree.find(&hold, &rest.as_slice()).expect("tokens");
            let first = self.pages;
            self.pages += narrow(rest.len());
            let pages: Vec<Page> = (first..self.pages).map(Page::new).collect();
            self.tree.publish(&mut hold, found, rest, &pages);
            hold
        }

        fn turn(&mut self, session: Option<u64>, tokens: &[i32]) {
            let hold = self.begin(session, tokens);
            drop(self.tree.release(hold));
            assert_eq!(self.tree.broken_invariant(), None);
        }

        fn evict(&mut self, pages: usize) -> Evicted {
            self.tree.evict(pages, Cause { pressure: Pressure::Alloc, at: Instant::now() })
        }

        fn len(&self, tokens: &[i32]) -> usize {
            self.tree.cached_len(&Namespace::Unnamed, &tokens).expect("tokens")
        }
    }

    const FIRST: SessionId = SessionId::new(1);

    #[test]
    fn what_only_an_ended_session_used_goes_first() {
        let mut cache = Cache::new(PolicyKind::Lru);
        cache.turn(Some(2), &[1, 2, 9]);
        cache.turn(Some(1), &[1, 2, 3, 4]);
        cache.turn(Some(1), &[1, 2, 3, 4, 5]);
        cache.tree.end(FIRST);
        drop(cache.evict(3));
        assert_eq!((cache.len(&[1, 2, 3]), cache.len(&[1, 2, 9])), (2, 3));
        // What both have used is no one's.
        drop(cache.evict(1));
        assert_eq!(cache.len(&[1, 2, 9]), 2);
    }

    #[test]
    fn a_session_may_end_before_its_lease() {
        let mut cache = Cache::new(PolicyKind::Lru);
        cache.turn(None, &[7, 8]);
        let hold = cache.begin(Some(1), &[1, 2]);
        cache.tree.end(FIRST);
        drop(cache.tree.release(hold));
        drop(cache.evict(2));
        assert_eq!((cache.len(&[1, 2]), cache.len(&[7, 8])), (0, 2));
    }

    #[test]
    fn a_use_takes_the_end_back() {
        let mut cache = Cache::new(PolicyKind::Lru);
        cache.turn(Some(1), &[1, 2]);
        cache.tree.end(FIRST);
        cache.turn(None, &[7, 8]);
        cache.turn(None, &[1]);
        // The lease ended inside of the node.
        drop(cache.evict(1));
        assert_eq!((cache.len(&[1, 2]), cache.len(&[7, 8])), (1, 2));
        drop(cache.evict(2));
        assert_eq!((cache.len(&[1, 2]), cache.len(&[7, 8])), (1, 0));
    }

    #[test]
    fn a_turn_supersedes_the_branch_that_it_leaves() {
        let mut cache = Cache::new(PolicyKind::Lru);
        cache.turn(None, &[7, 8]);
        cache.turn(Some(1), &[1, 2, 3, 4]);
        cache.turn(Some(1), &[1, 2, 5]);
        drop(cache.evict(2));
        assert_eq!((cache.len(&[1, 2, 3, 4]), cache.len(&[1, 2, 5]), cache.len(&[7, 8])), (2, 3, 2));
        // Another session has used this branch.
        cache.turn(Some(2), &[1, 2, 5]);
        cache.turn(Some(1), &[1, 2, 6]);
        drop(cache.evict(2));
        assert_eq!((cache.len(&[1, 2, 5]), cache.len(&[1, 2, 6]), cache.len(&[7, 8])), (3, 3, 0));
    }

    #[test]
    fn a_turn_that_adds_nothing_supersedes_nothing() {
        let mut cache = Cache::new(PolicyKind::Lru);
        cache.turn(None, &[7, 8]);
        cache.turn(Some(1), &[1, 2, 3, 4]);
        cache.turn(Some(1), &[1, 2]);
        drop(cache.evict(2));
        assert_eq!((cache.len(&[1, 2, 3, 4]), cache.len(&[7, 8])), (4, 0));
    }

    #[test]
    fn a_running_turn_is_not_superseded() {
        let mut cache = Cache::new(PolicyKind::Lru);
        cache.turn(None, &[7, 8]);
        cache.turn(Some(1), &[1, 2, 3]);
        let running = cache.begin(Some(1), &[1, 2, 3, 4]);
        cache.turn(Some(1), &[1, 5]);
        drop(cache.tree.release(running));
        drop(cache.evict(2));
        assert_eq!((cache.len(&[1, 2, 3, 4]), cache.len(&[7, 8])), (4, 1));
    }

    #[test]
    fn the_end_of_a_session_finds_what_is_left_of_it() {
        let mut cache = Cache::new(PolicyKind::Lru);
        cache.turn(Some(1), &[1, 2, 3]);
        cache.turn(Some(1), &[1, 2, 3, 4, 5]);
        cache.turn(None, &[7, 8]);
        drop(cache.evict(2));
        assert_eq!(cache.len(&[1, 2, 3, 4, 5]), 3);
        cache.turn(None, &[9]);
        cache.tree.end(FIRST);
        drop(cache.evict(3));
        assert_eq!((cache.len(&[1]), cache.len(&[7, 8])), (0, 2));
        // Nothing is left.
        cache.tree.pause(FIRST, "user");
        cache.tree.end(FIRST);
        assert_eq!(cache.tree.broken_invariant(), None);
    }

    #[test]
    fn sessions_without_pages_are_forgotten() {
        let mut cache = Cache::new(PolicyKind::Lru);
        for number in 1..5_000 {
            cache.turn(Some(number), &[i32::try_from(number).expect("small")]);
            cache.tree.pause(SessionId::new(number), "user");
            if number > 8 {
                drop(cache.evict(1));
            }
        }
        assert!(cache.tree.sessions.len() <= FEW_SESSIONS);
    }

    #[test]
    fn sessions_that_end_where_others_do_are_forgotten() {
        let mut cache = Cache::new(PolicyKind::Lru);
        cache.turn(None, &[1, 2]);
        for number in 1..5_000 {
            cache.turn(Some(number), &[1, 2]);
            cache.tree.pause(SessionId::new(number), "user");
        }
        assert!(cache.tree.sessions.len() <= FEW_SESSIONS);
    }

    #[test]
    fn pauses_of_a_kind_become_known() {
        let mut cache = Cache::new(PolicyKind::Adaptive);
        let outlook = |cache: &Cache| {
            let tail = cache.tree.sessions.tail(FIRST).expect("a turn has ended");
            cache.tree.node(cache.tree.nodes.at(tail).expect("it is cached")).history.outlook
        };
        for turn in 0..10 {
            cache.turn(Some(1), &[1, 2, 3]);
            cache.tree.pause(FIRST, "bash");
            assert_eq!(outlook(&cache), if turn < 4 { Outlook::Unknown } else { Outlook::Soon });
        }
        for _ in 0..10 {
            cache.turn(Some(1), &[1, 2, 3]);
            cache.tree.pause(FIRST, "user");
            cache.turn(None, &[9; 64 * CAPACITY]);
        }
        cache.turn(Some(1), &[1, 2, 3]);
        assert_eq!(outlook(&cache), Outlook::Unknown);
        cache.tree.pause(FIRST, "user");
        assert_eq!(outlook(&cache), Outlook::Late);
    }
}
