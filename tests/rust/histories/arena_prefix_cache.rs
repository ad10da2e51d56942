//! The prefix cache of an arena: matches are those that a brute force over what the cache says it has would find, what
//! it has is what was published, units have one owner, those of a lease do not change, and events tell all of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvpool::base::{DType, ErrorKind};
use kvpool::cache::{
    CacheEvent, CachedPage, EventGroup, GroupReason, KeyChain, LeasedUnits, Namespace, PageHash, PolicyKind,
    Tier, WaitingRank,
};
use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
use kvpool::memory::Stream;
use kvpool::pool::{
    ArenaLease, ArenaPrefixCache, ArenaPrefixCacheConfig, ArenaPublished, CacheArena, CacheArenaConfig, Pool,
    Session, WaitingRequest,
};

use super::prefixes::digest;
use super::{Source, agree, ensure, host, int, refused, size};

/// The last page of a prefix: its namespace, and the tokens from the first one on.
type Key = (Namespace, Vec<i32>);

/// Units of each group.
type Units = Vec<Vec<Option<u32>>>;

/// A request: its lease, and what it reads by it.
struct Request {
    lease: Arc<ArenaLease>,
    namespace: Namespace,
    tokens: Vec<i32>,
    reads: Vec<LeasedUnits>,
    /// Whether its namespace was not cleared since: others find what it publishes.
    is_found: bool,
}

struct World {
    arena: Arc<CacheArena>,
    cache: ArenaPrefixCache,
    page_size: usize,
    groups: Vec<Group>,
    requests: Vec<Request>,
    sessions: Vec<Session>,
    /// Requests that wait.
    queue: Vec<WaitingRequest>,
    /// Units of nobody's prefix, by group.
    own: Vec<Vec<u32>>,
    /// What was published last for each page: the unit, or the numbers of the snapshot, of each group.
    published: BTreeMap<Key, Vec<Vec<u32>>>,
    prompts: Vec<Vec<i32>>,
    told: Told,
}

/// What the events have told: the keys with which the units of each group end, and those of pages without a group.
#[derive(Default)]
struct Told(BTreeMap<Option<String>, BTreeSet<PageHash>>);

impl Told {
    fn apply(&mut self, event: CacheEvent, page_size: usize) {
        let name = |group: &Option<Arc<EventGroup>>| group.as_ref().map(|group| group.name.clone());
        match event {
            CacheEvent::Stored { pages, parent, tokens, namespace, tier, group } => {
                assert_eq!((tier, tokens.len() % (pages.len() * page_size)), (Tier::Device, 0));
                let each = tokens.len() / pages.len() / page_size;
                let root = || KeyChain::at_root(digest, &namespace, page_size);
                let mut chain = parent.map_or_else(root, |parent| KeyChain::after(digest, parent));
                let keys: Vec<_> = tokens.chunks(page_size).map(|tokens| chain.next(tokens)).collect();
                assert!(keys.iter().skip(each - 1).step_by(each).eq(&pages), "keys of {group:?}");
                let told = self.0.entry(name(&group)).or_default();
                let is_of_all = group.is_none_or(|group| group.kind == GroupKind::Full);
                assert!(!is_of_all || parent.is_none_or(|parent| told.contains(&parent)), "a gap");
                assert!(pages.into_iter().all(|page| told.insert(page)), "stored twice");
            }
            CacheEvent::Removed { pages, tier, group } => {
                assert_eq!(tier, Tier::Device);
                let told = self.0.entry(name(&group)).or_default();
                assert!(pages.iter().all(|page| told.remove(page)), "removed twice from {group:?}");
            }
            CacheEvent::Cleared => self.0.clear(),
        }
    }
}

/// A layout of groups of every kind.
fn layout(source: &mut Source<'_>) -> CacheLayout {
    let page_size = source.of(&[1, 2, 4]);
    let count = 1 + source.below(3);
    let groups = (0..count).map(|number| {
        let kind = source.of(&[
            GroupKind::Full,
            GroupKind::Window { tokens: 5, sinks: 0 },
            GroupKind::State,
            GroupKind::State,
            GroupKind::Full,
            GroupKind::Window { tokens: 8, sinks: 3 },
            GroupKind::Chunk { tokens: 6, sinks: 0 },
            GroupKind::Chunk { tokens: 8, sinks: 5 },
            GroupKind::Window { tokens: 1, sinks: 0 },
        ]);
        let heads = source.of(&[1, 2, 4]);
        let planes = vec![Plane::new("k", DType::U8, &[heads, 16]).expect("small")];
        let layers: Vec<_> = (0..=source.below(2)).collect();
        let stride = if kind == GroupKind::State { 1 } else { source.of(&[1, 1, 1, 4, 8]) };
        let group = Group::new(&format!("group_{number}"), kind, &layers, planes);
        group.and_then(|group| group.with_stride(stride)).expect("valid")
    });
    let groups = groups.collect();
    CacheLayout::new("model", page_size, groups).expect("small")
}

pub(super) fn run(source: &mut Source<'_>) {
    let layout = layout(source);
    let config = CacheArenaConfig {
        layout: layout.clone(),
        arena_bytes: source.of(&[1 << 10, 3 << 10, 1 << 12, 1 << 13]),
        floors: Vec::new(),
        slabs: SlabOptions { granularity: 1, alignment: 16 },
        strict: true,
    };
    let policy = PolicyKind::ALL[source.below(PolicyKind::ALL.len())];
    let Ok(arena) = CacheArena::new(&config, &host()) else {
        while source.next_step() {
            source.below(256);
        }
        return;
    };
    let arena = Arc::new(arena);
    let config = ArenaPrefixCacheConfig { policy, cost: None, events: Some(digest) };
    let cache = ArenaPrefixCache::new(config, Arc::clone(&arena)).expect("memory");
    let sessions = (0..3).map(|number| cache.session(Namespace::Number(number))).collect();
    let groups = layout.groups().to_vec();
    let mut world = World {
        page_size: layout.page_size(),
        own: vec![Vec::new(); groups.len()],
        groups,
        arena,
        cache,
        requests: Vec::new(),
        sessions,
        queue: Vec::new(),
        published: BTreeMap::new(),
        prompts: Vec::new(),
        told: Told::default(),
    };
    while source.next_step() {
        world.step(source);
        world.check();
    }
    world.requests.clear();
    world.check();
    world.cache.clear(None);
    for (group, units) in std::mem::take(&mut world.own).into_iter().enumerate() {
        let units: Vec<_> = units.into_iter().map(i64::from).collect();
        assert_eq!(world.arena.free(group, &units).expect("live").dropped(), 0);
    }
    assert_eq!(world.arena.stats().get("available"), world.arena.stats().get("capacity"), "all is free");
    assert_eq!(world.cache.stats().get("cached"), Some(0));
}

impl World {
    fn each(&self, group: usize) -> Option<usize> {
        let group = &self.groups[group];
        (group.kind() != GroupKind::State).then(|| self.page_size.max(group.stride()))
    }

    fn is_state(&self, group: usize) -> bool {
        self.groups[group].kind() == GroupKind::State
    }

    fn has_states(&self) -> bool {
        (0..self.groups.len()).any(|group| self.is_state(group))
    }

    /// The positions of the units of a group that a query behind `tokens` tokens reads, and that are whole.
    fn needed(&self, group: usize, tokens: usize) -> Vec<usize> {
        let Some(each) = self.each(group) else { return Vec::new() };
        let is_read = |token: usize| match self.groups[group].kind() {
            GroupKind::Full | GroupKind::State => true,
            GroupKind::Window { tokens: window, sinks } => token < sinks || token + window > tokens,
            GroupKind::Chunk { tokens: chunk, sinks } => token < sinks || token / chunk == tokens / chunk,
        };
        (0..tokens / each).filter(|unit| (unit * each..(unit + 1) * each).any(is_read)).collect()
    }

    /// The longest prefix at which every group of `which` can go on, of what the cache has.
    fn longest(
        &self,
        kept: &BTreeMap<Key, Vec<Vec<u32>>>,
        namespace: &Namespace,
        tokens: &[i32],
        which: &[usize],
    ) -> usize {
        let key = |end: usize| (namespace.clone(), tokens[..end].to_vec());
        let mut found = 0;
        for end in (self.page_size..=tokens.len()).step_by(self.page_size) {
            if !kept.contains_key(&key(end)) {
                break;
            }
            let can_go_on = |&group: &usize| {
                let Some(each) = self.each(group) else { return !kept[&key(end)][group].is_empty() };
                let is_there = |unit: usize| !kept[&key((unit + 1) * each)][group].is_empty();
                (self.has_states() || end % each == 0) && self.needed(group, end).into_iter().all(is_there)
            };
            if which.iter().all(can_go_on) {
                found = end;
            }
        }
        found
    }

    fn kept(&self) -> BTreeMap<Key, Vec<Vec<u32>>> {
        let pages = self.cache.contents().into_iter();
        pages.map(|CachedPage { namespace, tokens, units }| ((namespace, tokens), units)).collect()
    }

    /// A prompt that often begins like another one.
    fn prompt(&mut self, source: &mut Source<'_>) -> Vec<i32> {
        let known = source.below(self.prompts.len().max(1));
        let mut tokens = self.prompts.get(known).cloned().unwrap_or_default();
        tokens.truncate(source.below(tokens.len() + 1));
        if source.flip() {
            tokens = self.prompts.get(known).cloned().unwrap_or_default();
        }
        for _ in 0..source.below(20) {
            tokens.push(i32::try_from(source.below(2)).expect("small"));
        }
        tokens.truncate(60);
        if self.prompts.len() < 12 {
            self.prompts.push(tokens.clone());
        } else {
            let at = source.below(12);
            self.prompts[at].clone_from(&tokens);
        }
        tokens
    }

    fn namespace(source: &mut Source<'_>) -> Namespace {
        if source.rarely(4) { Namespace::Number(1) } else { Namespace::Unnamed }
    }

    fn step(&mut self, source: &mut Source<'_>) {
        match source.below(13) {
            0..=2 => self.start(source),
            3..=6 => self.publish(source),
            7 => {
                if !self.requests.is_empty() {
                    let request = self.requests.swap_remove(source.below(self.requests.len()));
                    request.lease.release();
                    request.lease.release();
                    refused(request.lease.len(), ErrorKind::Stale);
                    refused(request.lease.publish(&[0].as_slice(), &[]), ErrorKind::Stale);
                }
            }
            8 | 9 => {
                let wanted: Vec<_> = (0..self.groups.len()).map(|_| source.below(6)).collect();
                for (own, taken) in self.own.clone().iter().zip(self.take(&wanted).unwrap_or_default()) {
                    assert!(own.iter().all(|unit| !taken.contains(unit)));
                }
            }
            10 => {
                let group = source.below(self.groups.len());
                let units: Vec<_> = self.own[group].drain(..).map(i64::from).collect();
                assert_eq!(self.arena.free(group, &units).expect("live").dropped(), 0);
                let leased =
                    self.requests.first().and_then(|request| request.reads[group].units.first().copied());
                if let Some(unit) = leased.flatten() {
                    refused(self.arena.free(group, &[unit.into()]), ErrorKind::IndexOwnership);
                }
            }
            11 => self.wait(source),
            _ => self.rare(source),
        }
    }

    /// Adds a request to the waiting queue, or looks one up again, which changes the order of evictions alone.
    fn wait(&mut self, source: &mut Source<'_>) {
        let (tokens, namespace) = (self.prompt(source), Self::namespace(source));
        let (kept, all): (_, Vec<_>) = (self.kept(), (0..self.groups.len()).collect());
        let (tokens, limit) = (tokens.as_slice(), source.below(62));
        let prefix = &tokens[..limit.min(tokens.len())];
        let rank = WaitingRank { priority: int(source.below(2)), arrival: 0 };
        let request = self.cache.add_waiting(&namespace, &tokens, limit, rank).expect("tokens");
        assert_eq!(request.len(), self.longest(&kept, &namespace, prefix, &all));
        if self.queue.len() == 3 {
            let other = self.queue.swap_remove(source.below(3));
            let found = other.update(&tokens, limit, Stream::DEFAULT).expect("tokens");
            assert!(
                [Namespace::Unnamed, Namespace::Number(1)]
                    .iter()
                    .any(|namespace| { found == self.longest(&kept, namespace, prefix, &all) })
            );
            other.remove(Stream::DEFAULT);
            refused(other.update(&tokens, limit, Stream::DEFAULT), ErrorKind::State);
        }
        self.queue.push(request);
        assert_eq!(self.kept(), kept);
    }

    /// Takes units for the caller.
    fn take(&mut self, wanted: &[usize]) -> Option<Vec<Vec<u32>>> {
        let fits = self.arena.fits(wanted).expect("one a group");
        let before = self.cache.contents().len();
        let taken = self.arena.alloc(wanted).expect("memory");
        assert!(taken.is_some() || !fits);
        assert!(!fits || self.cache.contents().len() == before, "evicted without need");
        if taken.is_none() && self.requests.is_empty() {
            // All that the cache had would not have sufficed.
            self.cache.clear(None);
            self.published.clear();
            assert!(!self.arena.fits(wanted).expect("one a group"), "{wanted:?} were not given");
        }
        for (own, taken) in self.own.iter_mut().zip(taken.iter().flatten()) {
            own.extend(taken);
        }
        taken
    }

    fn start(&mut self, source: &mut Source<'_>) {
        let (tokens, namespace) = (self.prompt(source), Self::namespace(source));
        let limit = if source.flip() { usize::MAX } else { source.below(tokens.len() + 2) };
        let kept = self.kept();
        let all: Vec<_> = (0..self.groups.len()).collect();
        let prefix = &tokens[..limit.min(tokens.len())];
        let expected = self.longest(&kept, &namespace, prefix, &all);
        let slice = tokens.as_slice();
        assert_eq!(self.cache.cached_len(&namespace, &slice, limit).expect("tokens"), expected);
        let (len, groups) = self.cache.explain(&namespace, &slice).expect("tokens");
        assert_eq!(len, self.longest(&kept, &namespace, &tokens, &all));
        for explained in groups {
            let alone = self.longest(&kept, &namespace, &tokens, &[explained.group]);
            assert_eq!(explained.len, alone, "group {}", explained.group);
            let is_whole = alone == tokens.len() / self.page_size * self.page_size;
            assert_eq!(matches!(explained.reason, GroupReason::Complete), is_whole);
        }
        // A session changes the order of evictions alone.
        let session = self.sessions.get(source.below(2 * self.sessions.len()));
        let lease = match session {
            None => self.cache.match_prefix(&namespace, &slice, limit),
            Some(session) => self.cache.match_in_session(session, &namespace, &slice, limit),
        };
        let lease = lease.expect("tokens");
        assert_eq!(lease.len().expect("valid"), expected);
        let reads = self.reads(&lease);
        for (group, reads) in reads.iter().enumerate() {
            let Some(each) = self.each(group) else {
                let last = kept.get(&(namespace.clone(), tokens[..expected].to_vec()));
                let expected = last.map_or(Vec::new(), |units| units[group].clone());
                assert_eq!(reads.units, expected.into_iter().map(Some).collect::<Vec<_>>());
                continue;
            };
            let positions = (0..reads.sinks.len()).chain(reads.first..reads.first + reads.units.len());
            let positions: Vec<_> = positions.collect();
            assert_eq!(positions, self.needed(group, expected));
            let units = reads.sinks.iter().copied().map(Some).chain(reads.units.iter().copied());
            for (position, unit) in positions.into_iter().zip(units) {
                let end = (position + 1) * each;
                assert_eq!(unit, kept[&(namespace.clone(), tokens[..end].to_vec())][group].first().copied());
            }
        }
        if self.requests.len() < 6 {
            self.requests.push(Request { lease, namespace, tokens, reads, is_found: true });
        }
    }

    fn reads(&self, lease: &ArenaLease) -> Vec<LeasedUnits> {
        (0..self.groups.len()).map(|group| lease.units(group).expect("valid")).collect()
    }

    fn publish(&mut self, source: &mut Source<'_>) {
        if self.requests.is_empty() {
            return;
        }
        let at = source.below(self.requests.len());
        let begin = self.requests[at].lease.len().expect("valid");
        let mut tokens = self.requests[at].tokens.clone();
        for _ in 0..source.below(5) {
            tokens.push(i32::try_from(source.below(2)).expect("small"));
        }
        self.requests[at].tokens.clone_from(&tokens);
        let pages = (tokens.len() - begin) / self.page_size;
        let end = begin + source.below(pages + 1).max(source.below(pages + 1)) * self.page_size;
        tokens.truncate(end);
        let (with_snapshot, with_all) = (end > 0 && source.flip(), source.flip());
        let positions: Vec<_> = (0..self.groups.len())
            .map(|group| {
                let Some(each) = self.each(group) else { return Vec::new() };
                let needed = self.needed(group, end);
                (begin / each..end / each)
                    .map(|unit| {
                        let full = self.groups[group].kind() == GroupKind::Full;
                        let sinks = unit * each < self.groups[group].kind().sinks();
                        full || sinks || needed.contains(&unit) || (with_all && source.flip())
                    })
                    .collect()
            })
            .collect();
        let wanted: Vec<_> = positions
            .iter()
            .enumerate()
            .map(|(group, positions)| {
                if self.is_state(group) {
                    usize::from(with_snapshot)
                } else {
                    positions.iter().filter(|&&is| is).count()
                }
            })
            .collect();
        let before: Vec<_> = self.own.iter().map(Vec::len).collect();
        let Some(taken) = self.take(&wanted) else { return };
        let kept = self.kept();
        let mut taken: Vec<_> = taken.into_iter().map(Vec::into_iter).collect();
        let mut units: Units = Vec::new();
        for (group, positions) in positions.iter().enumerate() {
            let of_group = &mut taken[group];
            units.push(if self.is_state(group) {
                of_group.by_ref().map(Some).collect()
            } else {
                positions.iter().map(|&is| if is { of_group.next() } else { None }).collect()
            });
        }
        if source.rarely(6) {
            self.misuse(source, at, &tokens, &units);
            assert_eq!(self.kept(), kept);
        }
        let request = &self.requests[at];
        let is_found = request.is_found;
        let complete = self.is_complete(&kept, at, &tokens, &units);
        let expected = ensure(complete || !with_snapshot || !self.has_states(), ErrorKind::Argument);
        let answer = request.lease.publish(&tokens.as_slice(), &units);
        if !is_found {
            // Whether the windows of a prefix that nobody finds are complete is not known here.
            if let Ok(published) = answer {
                self.given_up(&before);
                let reads = self.reads(&self.requests[at].lease);
                self.requests[at].reads = reads;
                assert_eq!(published.length, end);
            }
            return;
        }
        let Some(published) = agree(answer, &expected) else { return };
        self.given_up(&before);
        self.check_published(at, &tokens, &units, &kept, &published);
    }

    /// The units that the last call took from the arena are no longer the caller's.
    fn given_up(&mut self, before: &[usize]) {
        for (own, &before) in self.own.iter_mut().zip(before) {
            own.truncate(before);
        }
    }

    /// Whether a request can go on behind what is published.
    fn is_complete(
        &self,
        kept: &BTreeMap<Key, Vec<Vec<u32>>>,
        at: usize,
        tokens: &[i32],
        units: &Units,
    ) -> bool {
        let request = &self.requests[at];
        let begin = request.lease.len().expect("valid");
        (0..self.groups.len()).filter(|&group| !self.is_state(group)).all(|group| {
            let each = self.each(group).expect("pages");
            self.needed(group, tokens.len()).into_iter().all(|unit| {
                let key = (request.namespace.clone(), tokens[..(unit + 1) * each].to_vec());
                let is_kept = kept.get(&key).is_some_and(|units| !units[group].is_empty());
                let given =
                    unit.checked_sub(begin / each).and_then(|at| units[group].get(at).copied().flatten());
                is_kept || given.is_some()
            })
        })
    }

    fn check_published(
        &mut self,
        at: usize,
        tokens: &[i32],
        units: &Units,
        kept: &BTreeMap<Key, Vec<Vec<u32>>>,
        published: &ArenaPublished,
    ) {
        let namespace = self.requests[at].namespace.clone();
        let begin = self.requests[at].lease.len().expect("valid");
        assert_eq!((begin, published.length), (tokens.len(), tokens.len()));
        let after = self.kept();
        for group in 0..self.groups.len() {
            let Some(each) = self.each(group) else {
                let key = (namespace.clone(), tokens.to_vec());
                let old = kept.get(&key).map_or(&[][..], |units| &units[group]);
                let expected: Vec<_> = if old.is_empty() {
                    units[group].clone()
                } else {
                    old.iter().copied().map(Some).collect()
                };
                assert_eq!(published.units[group], expected, "group {group}");
                continue;
            };
            assert_eq!(published.units[group].len(), units[group].len());
            let last = tokens.len() / each;
            let first = last - units[group].len();
            for (position, (&given, &stands)) in
                (first..).zip(units[group].iter().zip(&published.units[group]))
            {
                let key = (namespace.clone(), tokens[..(position + 1) * each].to_vec());
                let old = kept.get(&key).and_then(|units| units[group].first().copied());
                assert_eq!(stands, old.or(given), "unit {position} of group {group}");
                assert_eq!(after[&key][group].first().copied(), stands, "unit {position} of group {group}");
            }
        }
        for end in (self.page_size..=tokens.len()).step_by(self.page_size) {
            let key = (namespace.clone(), tokens[..end].to_vec());
            let units = after[&key].clone();
            let known = self.published.entry(key).or_insert_with(|| vec![Vec::new(); units.len()]);
            for (known, now) in known.iter_mut().zip(units) {
                if !now.is_empty() {
                    *known = now;
                }
            }
        }
        let reads = self.reads(&self.requests[at].lease);
        self.requests[at].reads = reads;
    }

    /// Calls that are refused.
    fn misuse(&self, source: &mut Source<'_>, at: usize, tokens: &[i32], units: &Units) {
        let lease = &self.requests[at].lease;
        let before = self.arena.stats();
        let group = source.below(self.groups.len());
        let mut wrong = units.clone();
        match source.below(4) {
            0 => {
                wrong[group].extend([Some(1); 3]);
                refused(lease.publish(&tokens, &wrong), ErrorKind::Argument);
            }
            1 => {
                let begin = lease.len().expect("valid");
                let mut other = tokens.to_vec();
                if begin > 0 {
                    other[source.below(begin)] = 7;
                    refused(lease.publish(&other.as_slice(), &wrong), ErrorKind::Argument);
                }
                refused(lease.publish(&tokens, &wrong[1..]), ErrorKind::Argument);
            }
            2 => {
                let place = wrong[group].iter_mut().flatten().next();
                if let Some(place) = place {
                    *place = source.of(&[0, u32::MAX >> 1, 1 << 20]);
                    let answer = lease.publish(&tokens, &wrong);
                    let kind = answer.expect_err("no such unit").kind();
                    assert!(matches!(kind, ErrorKind::IndexOwnership | ErrorKind::Argument));
                }
            }
            _ => {
                if self.page_size > 1 {
                    let longer = [tokens, &[1]].concat();
                    refused(lease.publish(&longer.as_slice(), units), ErrorKind::Argument);
                }
                refused(lease.units(self.groups.len()), ErrorKind::Argument);
                refused(self.cache.group_counts(self.groups.len()), ErrorKind::Argument);
                let none = [-1].as_slice();
                refused(self.cache.match_prefix(&Namespace::Unnamed, &none, 1), ErrorKind::Argument);
            }
        }
        assert_eq!(self.arena.stats(), before);
    }

    fn rare(&mut self, source: &mut Source<'_>) {
        match source.below(9) {
            0 => {
                self.arena.clear();
                self.own.iter_mut().for_each(Vec::clear);
                self.published.clear();
                for request in self.requests.drain(..) {
                    refused(request.lease.len(), ErrorKind::Stale);
                    refused(request.lease.units(0), ErrorKind::Stale);
                    refused(request.lease.publish(&[0].as_slice(), &[]), ErrorKind::Stale);
                }
                assert!(self.cache.contents().is_empty());
            }
            1 => {
                let namespace = Self::namespace(source);
                self.cache.clear(Some(&namespace));
                self.published.retain(|(name, _), _| *name != namespace);
                for request in self.requests.iter_mut().filter(|request| request.namespace == namespace) {
                    request.is_found = false;
                }
                assert!(self.cache.contents().iter().all(|page| page.namespace != namespace));
            }
            2..=4 => {
                let session = &self.sessions[source.below(self.sessions.len())];
                match source.below(3) {
                    0 => session.end(Stream::DEFAULT),
                    kind => session.pause(["tool", "user"][kind - 1], Stream::DEFAULT),
                }
            }
            _ => {
                // More than there is: nothing is evicted in vain.
                let before = self.cache.contents().len();
                let capacity = self.arena.stats().get("capacity").expect("a pool");
                let group = source.below(self.groups.len());
                let mut wanted = vec![0; self.groups.len()];
                wanted[group] = capacity * 4096;
                assert!(self.arena.alloc(&wanted).expect("memory").is_none());
                assert_eq!(self.cache.contents().len(), before);
            }
        }
    }

    /// Checks that the events tell what the cache has.
    fn check_told(&mut self, kept: &BTreeMap<Key, Vec<Vec<u32>>>) {
        for event in self.cache.take_events().expect("it has events") {
            self.told.apply(event, self.page_size);
        }
        let mut expected: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        let is_each_page = |group: usize| {
            self.groups[group].kind() == GroupKind::Full && self.each(group) == Some(self.page_size)
        };
        let has_each_page = (0..self.groups.len()).any(is_each_page);
        for ((namespace, tokens), units) in kept {
            let mut chain = KeyChain::at_root(digest, namespace, self.page_size);
            let key = tokens.chunks(self.page_size).map(|tokens| chain.next(tokens)).last().expect("a page");
            let names = self.groups.iter().map(|group| Some(group.name().to_owned()));
            let groups = names.zip(units).filter(|(_, units)| !units.is_empty()).map(|(name, _)| name);
            for group in groups.chain((!has_each_page).then_some(None)) {
                expected.entry(group).or_default().insert(key);
            }
        }
        self.told.0.retain(|_, keys| !keys.is_empty());
        assert!(self.told.0 == expected, "the events tell of other units than there are");
    }

    fn check(&mut self) {
        self.cache.verify().expect("consistent");
        self.arena.verify().expect("consistent");
        let kept = self.kept();
        self.check_told(&kept);
        for (key, units) in &kept {
            for (group, units) in units.iter().enumerate().filter(|(_, units)| !units.is_empty()) {
                assert_eq!(
                    self.published.get(key).map(|known| &known[group]),
                    Some(units),
                    "{key:?}, group {group}"
                );
            }
        }
        for (group, own) in self.own.iter().enumerate() {
            let cached = self.cache.group_counts(group).expect("a group").units;
            let (counts, _) = self.arena.group_counts(group).expect("a group");
            assert_eq!(counts.in_use, cached + own.len(), "group {group}");
            let found: Vec<_> = kept.values().flat_map(|units| &units[group]).collect();
            let distinct: BTreeSet<_> = found.iter().copied().chain(own).collect();
            assert_eq!(distinct.len(), found.len() + own.len(), "a unit of group {group} has two owners");
            assert!(found.len() <= cached);
            for unit in own.iter().take(1) {
                assert!(int(size(*unit)) > 0);
            }
        }
        for request in &self.requests {
            for (group, reads) in request.reads.iter().enumerate() {
                let now = request.lease.units(group).expect("valid");
                assert_eq!((&now.sinks, now.first), (&reads.sinks, reads.first));
                // Another request may have published what the lease lacks.
                let lacks = reads.units.is_empty() && self.is_state(group);
                let is_kept = |(read, now): (&Option<u32>, &Option<u32>)| read.is_none() || read == now;
                assert!(lacks || reads.units.len() == now.units.len());
                assert!(reads.units.iter().zip(&now.units).all(is_kept), "a lease keeps its units");
            }
        }
    }
}
