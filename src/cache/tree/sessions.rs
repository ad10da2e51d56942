//! Sessions: the turns of one conversation, of which only the latest is likely to come back.
//!
//! The tree knows for each session its *tail*, the node where its last turn ended, and for each node the
//! session that alone has used it. From these follow the nodes that a new turn supersedes, those that the end
//! of a session leaves, and those that come back after a pause. What is known of their next use is their
//! [`Outlook`], which their next use takes away.
//!
//! *Invariant.* A node that only one session has used is below such nodes, or below the part of its prefix
//! that others have used as well.
//!
//! *Cost.* A turn costs one look-up and a visit of the nodes that change. Nothing is locked: a tail that is
//! evicted moves up, and a session none of whose nodes is cached is forgotten when the table has doubled.

use std::collections::HashMap;
use std::num::NonZeroU32;

use super::{Kind, NodeId, Tick, Tree, narrow};
use crate::cache::{NodeHandle, Outlook};

/// The identity of a session: a hash of its name, all bits of which are well mixed.
///
/// It keeps 32 bits of the hash. Sessions with the same identity count as one: then the order of evictions is
/// wrong; no request gets a wrong page.
///
/// ```
/// use kvpool::cache::SessionId;
/// assert_ne!(SessionId::new(0x9e37_79b9_7f4a_7c15), SessionId::new(0x85eb_ca6b_c2b2_ae35));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SessionId(NonZeroU32);

impl SessionId {
    /// Creates the identity of the session whose name has this hash.
    #[must_use]
    pub const fn new(hash: u64) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "any bits of a hash")]
        let number = NonZeroU32::new(hash as u32);
        Self(match number {
            Some(number) => number,
            None => NonZeroU32::MAX,
        })
    }
}

/// The number of kinds of pauses that are told apart. Further kinds count as the last one.
const MOST_KINDS: usize = 256;

/// The number of pauses over which the length of a kind is averaged.
const AVERAGED: f64 = 64.0;

/// The number of pauses of a kind before which nothing is concluded from its length.
const FEWEST_PAUSES: f64 = 4.0;

/// The number of sessions below which none is forgotten.
const FEW_SESSIONS: usize = 1024;

/// What a session does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// A turn is running, or nothing was said about the next one.
    Running,
    /// It will go on after a pause.
    Paused { kind: usize, since: Tick },
    /// It will not go on.
    Ended,
}

#[derive(Debug)]
struct Session {
    phase: Phase,
    /// The node where its last turn ended, as far as that is cached.
    tail: Option<NodeHandle>,
}

/// The pauses of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct Pauses {
    /// The number of pauses, at most [`AVERAGED`].
    count: f64,
    /// The mean of the binary logarithms of their lengths in tokens: a few pauses are much longer than all
    /// others together.
    log_len: f64,
}

impl Pauses {
    fn add(&mut self, len: u64) {
        self.count = (self.count + 1.0).min(AVERAGED);
        #[expect(clippy::cast_precision_loss, reason = "tokens are counted far below 2^53")]
        let log_len = (len.max(1) as f64).log2();
        self.log_len += (log_len - self.log_len) / self.count;
    }

    /// Returns the usual length in tokens, if it is known.
    fn usual_len(self) -> Option<u64> {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of lengths")]
        let len = self.log_len.exp2() as u64;
        (self.count >= FEWEST_PAUSES).then_some(len)
    }
}

/// The sessions of a tree.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    by_id: HashMap<SessionId, Session>,
    kinds: HashMap<Box<str>, usize>,
    pauses: Vec<Pauses>,
    /// The bytes of the names of kinds.
    texts: usize,
}

impl Sessions {
    pub(super) fn bytes(&self) -> usize {
        self.by_id.capacity() * size_of::<(SessionId, Session)>()
            + self.kinds.capacity() * size_of::<(Box<str>, usize)>()
            + self.pauses.capacity() * size_of::<Pauses>()
            + self.texts
    }

    fn kind(&mut self, name: &str) -> usize {
        if let Some(&kind) = self.kinds.get(name) {
            return kind;
        }
        if self.pauses.len() == MOST_KINDS {
            return MOST_KINDS - 1;
        }
        self.pauses.push(Pauses::default());
        self.texts += name.len();
        self.kinds.insert(name.into(), self.pauses.len() - 1);
        self.pauses.len() - 1
    }

    /// Returns a session, which is new if it is not known. `exists` tells whether there is a node. Pauses of sessions
    /// that are forgotten are not counted: what is learned of the lifetimes of their blocks tells how many come
    /// back.
    fn get_or_new(&mut self, id: SessionId, exists: impl Fn(NodeHandle) -> bool) -> &mut Session {
        let by_id = &mut self.by_id;
        if by_id.len() >= FEW_SESSIONS && by_id.len() == by_id.capacity() {
            by_id.retain(|_, session| session.tail.is_some_and(&exists));
            by_id.reserve(by_id.len());
        }
        by_id.entry(id).or_insert(Session { phase: Phase::Running, tail: None })
    }

    /// Moves the tail of a session from a node that is removed to its parent, unless the session has none
    /// there.
    pub(super) fn move_tail(&mut self, id: SessionId, from: NodeHandle, to: Option<NodeHandle>) {
        if let Some(session) = self.by_id.get_mut(&id).filter(|session| session.tail == Some(from)) {
            session.tail = to;
        }
    }

    /// Records that a turn of a session begins, and learns from the pause before it.
    pub(super) fn begin_turn(&mut self, id: SessionId, now: Tick) {
        let Some(session) = self.by_id.get_mut(&id) else { return };
        if let Phase::Paused { kind, since } = std::mem::replace(&mut session.phase, Phase::Running) {
            self.pauses[kind].add(now.since(since));
        }
    }
}

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
        let phase = Phase::Paused { kind: self.sessions.kind(kind), since: self.now };
        self.set_phase(session, phase);
    }

    /// Records that a session has ended: what only it has used is evicted first.
    pub fn end(&mut self, session: SessionId) {
        self.set_phase(session, Phase::Ended);
    }

    fn set_phase(&mut self, id: SessionId, phase: Phase) {
        self.session_mut(id).phase = phase;
        self.look_ahead(id);
    }

    fn session_mut(&mut self, id: SessionId) -> &mut Session {
        let nodes = &self.nodes;
        self.sessions.get_or_new(id, |tail| nodes.at(tail).is_some())
    }

    /// Ends a turn of a session at `node`. It supersedes the turn before, if that ended elsewhere: what only
    /// this session has used of it, and does not use now.
    pub(super) fn end_turn(&mut self, id: SessionId, node: NodeId) {
        let here = self.node(node);
        if here.kind != Kind::Run || self.node(here.root).kind != Kind::Root {
            return;
        }
        let before = self.session_mut(id).tail.and_then(|tail| self.nodes.at(tail));
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
            self.session_mut(id).tail = Some(self.nodes.handle(node));
        }
        self.look_ahead(id);
    }

    /// Returns the nodes on the path to `node` that are not on the path to `other`, the deepest first, and
    /// whether `other` is on the path to `node`.
    fn rest_of(&self, node: NodeId, other: NodeId) -> (Vec<NodeId>, bool) {
        let (mut at, mut on_other, mut rest) = (node, other, Vec::new());
        while at != on_other && self.node(at).kind == Kind::Run {
            if self.node(on_other).end > self.node(at).end {
                on_other = self.node(on_other).parent;
            } else {
                rest.push(at);
                at = self.node(at).parent;
            }
        }
        (rest, at == other)
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
        let Some(&Session { phase, tail: Some(tail) }) = self.sessions.by_id.get(&id) else { return };
        let outlook = match phase {
            Phase::Running => return,
            Phase::Paused { kind, .. } => {
                let len = self.sessions.pauses[kind].usual_len();
                len.map_or(Outlook::Unknown, |len| self.queues.policy.outlook(len))
            }
            Phase::Ended => Outlook::Ended,
        };
        let Some(tail) = self.nodes.at(tail) else { return };
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
        assert!(cache.tree.sessions.by_id.len() < 4 * FEW_SESSIONS);
    }

    #[test]
    fn pauses_of_a_kind_become_known() {
        let mut cache = Cache::new(PolicyKind::Adaptive);
        let outlook = |cache: &Cache| {
            let tail = cache.tree.sessions.by_id[&FIRST].tail.expect("a turn has ended");
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

    #[test]
    fn further_kinds_count_as_the_last_one() {
        let mut sessions = Sessions::default();
        let kinds: Vec<usize> = (0..300).map(|number| sessions.kind(&format!("kind {number}"))).collect();
        assert_eq!((kinds[0], kinds[255], kinds[256], kinds[299]), (0, 255, 255, 255));
        assert_eq!(sessions.kind("kind 7"), 7);
    }
}
