//! Sessions: the turns of one conversation, of which only the latest is likely to come back.
//!
//! What is cached is a tree of prefixes, for a [`Tree`](super::Tree) of nodes, for an engine of blocks. It keeps for
//! each node the session that alone has used it. A session knows its *tail*, where its last turn ended. From these
//! follow the nodes that a new turn supersedes ([`beside_path`]), those that the end of a session leaves, and those
//! that come back after a pause. What is known of their next use is their [`Outlook`], which their next use
//! takes away.
//!
//! *Invariant.* A tail is a node that its session alone had used when the turn ended. So there are no more sessions
//! with a tail that is cached than there are nodes.
//!
//! *Cost.* A call costs one look-up. Nothing is locked: a tail that is evicted moves up, and sessions whose nodes are
//! no longer cached are forgotten when there are twice as many sessions as were kept last. So there are at most two
//! for each node, or 1,024.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;

use super::{Namespace, Outlook, Policy, Tick};

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

    /// Returns the identity of the session with a name: the same in all processes, so that ranks that make the same
    /// calls have the same identities.
    ///
    /// ```
    /// use kvpool::cache::{Namespace, SessionId};
    /// let of = |name: &str| SessionId::of_name(&Namespace::Text(name.into()));
    /// assert_eq!(of("chat 3"), of("chat 3"));
    /// assert_ne!(of("chat 3"), of("chat 4"));
    /// ```
    #[must_use]
    pub fn of_name(name: &Namespace) -> Self {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        Self::new(hasher.finish())
    }
}

/// The last kind of pauses that is told apart, of 256. Further kinds count as this one.
const LAST_KIND: u8 = u8::MAX;

/// The number of pauses over which the length of a kind is averaged.
const AVERAGED: f64 = 64.0;

/// The number of pauses of a kind before which nothing is concluded from its length.
const FEWEST_PAUSES: f64 = 4.0;

/// The number of sessions up to which none is forgotten.
pub(super) const FEW_SESSIONS: usize = 1024;

/// What a session does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// A turn is running, or nothing was said about the next one.
    Running,
    /// It will go on after a pause.
    Paused { kind: u8, since: Tick },
    /// It will not go on.
    Ended,
}

#[derive(Debug)]
struct Session<T> {
    phase: Phase,
    /// Where its last turn ended, as far as that is cached.
    tail: Option<T>,
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

/// The sessions of a cache, whose nodes have handles `T`: a node that takes the place of another has another handle.
#[derive(Debug)]
pub(crate) struct Sessions<T> {
    by_id: HashMap<SessionId, Session<T>>,
    /// The number of sessions at which those are forgotten that have no tail.
    most: usize,
    kinds: HashMap<Box<str>, u8>,
    pauses: Vec<Pauses>,
    /// The bytes of the names of kinds.
    texts: usize,
}

impl<T> Default for Sessions<T> {
    fn default() -> Self {
        Self {
            by_id: HashMap::new(),
            most: FEW_SESSIONS,
            kinds: HashMap::new(),
            pauses: Vec::new(),
            texts: 0,
        }
    }
}

impl<T: Copy + PartialEq> Sessions<T> {
    pub(crate) fn bytes(&self) -> usize {
        self.by_id.capacity() * size_of::<(SessionId, Session<T>)>()
            + self.kinds.capacity() * size_of::<(Box<str>, u8)>()
            + self.pauses.capacity() * size_of::<Pauses>()
            + self.texts
    }

    /// Returns the number of sessions that are known.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    fn kind(&mut self, name: &str) -> u8 {
        if let Some(&kind) = self.kinds.get(name) {
            return kind;
        }
        let Ok(kind) = u8::try_from(self.pauses.len()) else { return LAST_KIND };
        self.pauses.push(Pauses::default());
        self.texts += name.len();
        self.kinds.insert(name.into(), kind);
        kind
    }

    /// Returns a session, which is new if it is not known. `is_cached` tells whether there is a node. Pauses of sessions
    /// that are forgotten are not counted: what is learned of the lifetimes of their blocks tells how many come
    /// back.
    fn get_or_new(&mut self, id: SessionId, is_cached: impl Fn(T) -> bool) -> &mut Session<T> {
        if self.by_id.len() >= self.most {
            self.by_id.retain(|_, session| session.tail.is_some_and(&is_cached));
            self.most = FEW_SESSIONS.max(2 * self.by_id.len());
        }
        self.by_id.entry(id).or_insert(Session { phase: Phase::Running, tail: None })
    }

    /// Records that a session goes on after a pause of this kind.
    pub(crate) fn pause(&mut self, id: SessionId, kind: &str, now: Tick, is_cached: impl Fn(T) -> bool) {
        let phase = Phase::Paused { kind: self.kind(kind), since: now };
        self.get_or_new(id, is_cached).phase = phase;
    }

    /// Records that a session has ended.
    pub(crate) fn end(&mut self, id: SessionId, is_cached: impl Fn(T) -> bool) {
        self.get_or_new(id, is_cached).phase = Phase::Ended;
    }

    /// Records that a turn of a session begins, and learns from the pause before it.
    pub(crate) fn begin_turn(&mut self, id: SessionId, now: Tick) {
        let Some(session) = self.by_id.get_mut(&id) else { return };
        if let Phase::Paused { kind, since } = std::mem::replace(&mut session.phase, Phase::Running) {
            self.pauses[usize::from(kind)].add(now.since(since));
        }
    }

    /// Returns the tail of a session, which may no longer be cached.
    pub(crate) fn tail(&self, id: SessionId) -> Option<T> {
        self.by_id.get(&id)?.tail
    }

    /// Sets the tail of a session: a node that it alone has used, or `None`.
    pub(crate) fn set_tail(&mut self, id: SessionId, tail: Option<T>, is_cached: impl Fn(T) -> bool) {
        self.get_or_new(id, is_cached).tail = tail;
    }

    /// Moves the tail of a session from a node that is removed to the one before it, unless the session has no tail
    /// there.
    pub(crate) fn move_tail(&mut self, id: SessionId, from: T, to: Option<T>) {
        if let Some(session) = self.by_id.get_mut(&id).filter(|session| session.tail == Some(from)) {
            session.tail = to;
        }
    }

    /// Returns the outlook that follows from what a session does; `None` while its turn is running.
    pub(crate) fn outlook(&self, id: SessionId, policy: &dyn Policy) -> Option<Outlook> {
        match self.by_id.get(&id)?.phase {
            Phase::Running => None,
            Phase::Paused { kind, .. } => {
                let len = self.pauses[usize::from(kind)].usual_len();
                Some(len.map_or(Outlook::Unknown, |len| policy.outlook(len)))
            }
            Phase::Ended => Some(Outlook::Ended),
        }
    }
}

/// Returns the nodes on the path to `from` that are not on the path to `other`, the deepest first, and whether
/// `other` is on the path to `from`. `end` is where a node ends in its prompt, 0 for that before the first one, and
/// `before` the node before one.
pub(crate) fn beside_path<N: Copy + PartialEq>(
    from: N,
    other: N,
    end: impl Fn(N) -> u32,
    before: impl Fn(N) -> N,
) -> (Vec<N>, bool) {
    let (mut at, mut on_other, mut beside) = (from, other, Vec::new());
    while at != on_other && end(at) > 0 {
        if end(on_other) > end(at) {
            on_other = before(on_other);
        } else {
            beside.push(at);
            at = before(at);
        }
    }
    (beside, at == other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_kinds_count_as_the_last_one() {
        let mut sessions = Sessions::<u32>::default();
        let kinds: Vec<u8> = (0..300).map(|number| sessions.kind(&format!("kind {number}"))).collect();
        assert_eq!((kinds[0], kinds[255], kinds[256], kinds[299]), (0, 255, 255, 255));
        assert_eq!(sessions.kind("kind 7"), 7);
    }
}
