//! Sessions of an [`ArenaPrefixCache`]: what one has given up goes before what is older, whichever group is short.

use std::sync::Arc;

use kvpool::base::{DType, ErrorKind};
use kvpool::cache::{Namespace, PolicyKind};
use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
use kvpool::memory::{Backend, Host, Stream};
use kvpool::pool::{ArenaPrefixCache, ArenaPrefixCacheConfig, CacheArena, CacheArenaConfig, Session};

const UNNAMED: Namespace = Namespace::Unnamed;

/// The tokens that the next one sees of a window.
const WINDOW: usize = 3;

/// A cache of pages of one token, of a full group and another one.
struct Scene {
    arena: Arc<CacheArena>,
    cache: ArenaPrefixCache,
    other: GroupKind,
}

impl Scene {
    fn new(other: GroupKind) -> Self {
        let plane = || vec![Plane::new("k", DType::U8, &[64]).expect("small")];
        let group = |name: &str, kind, layer| Group::new(name, kind, &[layer], plane()).expect("valid");
        let groups = vec![group("full", GroupKind::Full, 0), group("other", other, 1)];
        let config = CacheArenaConfig {
            layout: CacheLayout::new("model", 1, groups).expect("valid"),
            arena_bytes: 1 << 13,
            floors: Vec::new(),
            slabs: SlabOptions { granularity: 1, alignment: 64 },
            strict: true,
        };
        let host: Arc<dyn Backend> = Arc::new(Host);
        let arena = Arc::new(CacheArena::new(&config, &host).expect("memory"));
        let config = ArenaPrefixCacheConfig { policy: PolicyKind::Lru, cost: None, events: None };
        let cache = ArenaPrefixCache::new(config, Arc::clone(&arena)).expect("memory");
        Self { arena, cache, other }
    }

    fn session(&self, number: i64) -> Session {
        self.cache.session(Namespace::Number(number))
    }

    fn turn(&self, session: Option<&Session>, tokens: &[i32]) {
        let lease = match session {
            None => self.cache.match_prefix(&UNNAMED, &tokens, tokens.len()),
            Some(session) => self.cache.match_in_session(session, &UNNAMED, &tokens, tokens.len()),
        };
        let lease = lease.expect("tokens");
        let new = tokens.len() - lease.len().expect("valid");
        if new > 0 {
            let others = if self.other == GroupKind::State { 1 } else { new.min(WINDOW - 1) };
            let taken = self.arena.alloc(&[new, others]).expect("memory").expect("a large arena");
            let behind = if self.other == GroupKind::State { 0 } else { new - others };
            let some = |units: &[u32]| units.iter().copied().map(Some).collect::<Vec<_>>();
            let units = [some(&taken[0]), [vec![None; behind], some(&taken[1])].concat()];
            lease.publish(&tokens, &units).expect("valid");
        }
        drop(lease);
        self.cache.verify().expect("consistent");
    }

    /// Takes units of a group until the first are evicted.
    fn press(&self, group: usize) {
        let evicted = || self.cache.group_counts(group).expect("a group").evicted;
        let (before, mut wanted) = (evicted(), [0, 0]);
        wanted[group] = 1;
        while evicted() == before {
            assert!(self.arena.alloc(&wanted).expect("memory").is_some());
        }
        self.cache.verify().expect("consistent");
    }

    fn len(&self, tokens: &[i32]) -> usize {
        self.cache.cached_len(&UNNAMED, &tokens, tokens.len()).expect("tokens")
    }
}

/// Each kind of the second group, and the group that is short.
fn each(check: impl Fn(Scene, usize)) {
    for other in [GroupKind::Window { tokens: WINDOW, sinks: 0 }, GroupKind::State] {
        (0..2).for_each(|short| check(Scene::new(other), short));
    }
}

const OLD: &[i32] = &[7, 7, 7, 7, 7, 7];
const FIRST: &[i32] = &[1, 2, 3, 4, 5, 6];

#[test]
fn what_an_ended_session_used_goes_first() {
    each(|scene, short| {
        let session = scene.session(1);
        scene.turn(None, OLD);
        scene.turn(Some(&session), FIRST);
        session.end(Stream::DEFAULT);
        scene.press(short);
        assert_eq!(scene.len(OLD), OLD.len(), "{:?}, {short}", scene.other);
        assert!(scene.len(FIRST) < FIRST.len(), "{:?}, {short}", scene.other);
    });
}

#[test]
fn a_use_takes_the_end_back() {
    each(|scene, short| {
        let session = scene.session(1);
        scene.turn(None, OLD);
        scene.turn(Some(&session), FIRST);
        session.end(Stream::DEFAULT);
        scene.turn(None, FIRST);
        scene.press(short);
        assert_eq!(scene.len(FIRST), FIRST.len(), "{:?}, {short}", scene.other);
        assert!(scene.len(OLD) < OLD.len(), "{:?}, {short}", scene.other);
    });
}

#[test]
fn a_turn_supersedes_the_branch_that_it_leaves() {
    each(|scene, short| {
        let (session, second) = (scene.session(1), [1, 2, 8, 9, 10, 11]);
        scene.turn(None, OLD);
        scene.turn(Some(&session), FIRST);
        scene.turn(Some(&session), &second);
        session.pause("user", Stream::DEFAULT);
        scene.press(short);
        let lens = (scene.len(OLD), scene.len(&second));
        assert_eq!(lens, (OLD.len(), second.len()), "{:?}, {short}", scene.other);
        assert!(scene.len(FIRST) < FIRST.len(), "{:?}, {short}", scene.other);
    });
}

#[test]
fn a_turn_supersedes_the_end_that_it_continues() {
    for other in [GroupKind::Window { tokens: WINDOW, sinks: 0 }, GroupKind::State] {
        let scene = Scene::new(other);
        let (session, second) = (scene.session(1), [FIRST, &[8, 9, 10, 11]].concat());
        scene.turn(None, OLD);
        scene.turn(Some(&session), FIRST);
        scene.turn(Some(&session), &second);
        assert_eq!(scene.len(FIRST), FIRST.len());
        scene.press(1);
        assert_eq!((scene.len(OLD), scene.len(&second)), (OLD.len(), second.len()), "{other:?}");
        assert_eq!(scene.len(FIRST), 0, "{other:?}");
    }
}

#[test]
fn a_cleared_arena_forgets_its_sessions() {
    each(|scene, _| {
        let session = scene.session(1);
        let lease = scene.cache.match_in_session(&session, &UNNAMED, &FIRST, 6).expect("tokens");
        scene.arena.clear();
        session.pause("user", Stream::DEFAULT);
        drop(lease);
        scene.turn(Some(&session), FIRST);
        scene.cache.clear(None);
        session.end(Stream::DEFAULT);
        scene.turn(Some(&session), FIRST);
        assert_eq!(scene.len(FIRST), FIRST.len());
    });
}

#[test]
fn sessions_are_of_one_cache() {
    let (scene, other) = (Scene::new(GroupKind::State), Scene::new(GroupKind::State));
    let session = other.session(1);
    let refused = scene.cache.match_in_session(&session, &UNNAMED, &FIRST, 6);
    assert_eq!(refused.expect_err("of another cache").kind(), ErrorKind::Argument);
    drop(other);
    session.pause("user", Stream::DEFAULT);
    session.end(Stream::DEFAULT);
    assert_eq!(session.name(), &Namespace::Number(1));
}
