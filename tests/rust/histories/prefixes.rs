//! The prefix cache on an allocator: a naive dictionary of prefixes, with the leases and pins that hold them,
//! with snapshots of states, with sessions, and with requests that wait.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;

use kvpool::base::{DType, ErrorKind, IndexVec, StateSlot};
use kvpool::cache::{
    CacheEvent, Namespace, PageHash, PolicyKind, Segment, SegmentState, Tokens, WaitingRank,
};
use kvpool::index::IndexState;
use kvpool::kernels::Indices;
use kvpool::memory::Region;
use kvpool::pool::{
    AllocatorConfig, GdnConfig, GdnPool, Lease, Pool, PrefixCache, PrefixCacheConfig, Publication, Session,
    TokenToKvPoolAllocator, WaitingRequest,
};

use super::slots::Fences;
use super::{Refusal, STREAM, Source, Verdict, agree, contents, ensure, host, int, ints_of, refused, size};

const NAMESPACES: i64 = 2;
const SESSIONS: usize = 3;
/// Longer than any history.
const LONG: Duration = Duration::from_secs(1 << 20);

/// A prefix in whole pages. A namespace that is cleared has a new generation.
type Key = (usize, Vec<i32>);

/// Whether a prefix is that of `end`, or begins it.
fn leads_to(prefix: &Key, end: &Key) -> bool {
    prefix.0 == end.0 && end.1.starts_with(&prefix.1)
}

/// A lease and what it should hold.
struct HeldLease {
    lease: Arc<Lease>,
    /// The namespace.
    name: usize,
    end: Key,
    /// Tokens that it was matched with.
    asked: usize,
    /// The last snapshot after these tokens.
    passing: Option<Key>,
    /// The session whose turn it is.
    session: Option<usize>,
}

/// What a session has said last.
#[derive(Clone, Copy, PartialEq)]
enum Said {
    Nothing,
    Pause,
    End,
}

/// A session, and the end of its last turn.
struct Talk {
    session: Session,
    said: Said,
    tail: Option<Key>,
}

/// A request that waits, and the prefix that it needs.
struct Waiting {
    request: WaitingRequest,
    name: usize,
    prompt: Vec<i32>,
    needed: Option<Key>,
}

impl Waiting {
    fn needs(&self, is_it: impl FnOnce(&Key) -> bool) -> bool {
        self.needed.as_ref().is_some_and(is_it)
    }
}

/// The last page of a cached prefix.
#[derive(Clone, Copy)]
struct Page {
    number: i32,
    /// The number of tokens looked up until its last use.
    used: usize,
    /// 0, or one more than what a pin without a time asked for.
    priority: u8,
    /// The session that alone has used it.
    user: Option<usize>,
    /// Whether it is evicted first.
    is_ended: bool,
}

struct Prefixes {
    allocator: Arc<TokenToKvPoolAllocator>,
    states: Option<Arc<GdnPool>>,
    cache: PrefixCache,
    page_size: usize,
    max_pinned: f64,
    cached: BTreeMap<Key, Page>,
    held: Vec<HeldLease>,
    talks: Vec<Talk>,
    /// The requests that wait, the first one first.
    queue: Vec<Waiting>,
    /// Namespaces and prefixes that are pinned for a time.
    pinned: Vec<(usize, Key)>,
    /// Prefixes with a snapshot, and its track slot.
    snapshots: BTreeMap<Key, StateSlot>,
    /// The snapshots that a later one of the same lease superseded.
    superseded: BTreeSet<Key>,
    /// The snapshots from which a request has resumed, and the last ones of prompts.
    chosen: BTreeSet<Key>,
    /// Tokens looked up.
    now: usize,
    /// Pages of requests.
    own: Vec<i32>,
    /// Pages of requests that were freed with a fence.
    fenced: Vec<(usize, Vec<i32>)>,
    fences: Fences,
    /// The generation of each namespace.
    current: Vec<usize>,
    generations: usize,
    dropped: usize,
    /// The pages that the events tell of the pages that can be found.
    told: BTreeSet<PageHash>,
}

pub(super) fn run(source: &mut Source<'_>) {
    let page_size = source.of(&[1, 1, 2, 3]);
    let config = AllocatorConfig {
        page_size,
        need_sort: source.flip(),
        ..AllocatorConfig::new(page_size * (4 + source.below(40)))
    };
    let allocator = Arc::new(TokenToKvPoolAllocator::new(&config, &host()).expect("memory"));
    let max_pinned = source.of(&[1.0, 0.5, 0.0]);
    let config = PrefixCacheConfig {
        policy: source.of(&PolicyKind::ALL),
        cost: None,
        max_pinned,
        name: "cache".into(),
        events: Some(digest),
    };
    let states = source.rarely(3).then(|| states(source.below(5)));
    let cache =
        PrefixCache::new(config, Arc::clone(&allocator), states.clone(), None).expect("a valid config");
    let talk =
        |name| Talk { session: cache.session(Namespace::Number(int(name))), said: Said::Nothing, tail: None };
    // Sessions also decide about snapshots, which is not followed here.
    let talks = if states.is_none() { (0..SESSIONS).map(talk).collect() } else { Vec::new() };
    let mut prefixes = Prefixes {
        cache,
        talks,
        allocator,
        states,
        page_size,
        max_pinned,
        cached: BTreeMap::new(),
        held: Vec::new(),
        queue: Vec::new(),
        pinned: Vec::new(),
        snapshots: BTreeMap::new(),
        superseded: BTreeSet::new(),
        chosen: BTreeSet::new(),
        now: 0,
        own: Vec::new(),
        fenced: Vec::new(),
        fences: Fences::default(),
        current: (0..size(NAMESPACES)).collect(),
        generations: size(NAMESPACES),
        dropped: 0,
        told: BTreeSet::new(),
    };
    while source.next_step() {
        prefixes.step(source);
        prefixes.check();
    }
    let Prefixes { allocator, states, cache, held, own, fenced, page_size, .. } = prefixes;
    // Leases may be the last to know the pools.
    drop(cache);
    drop(held);
    let left = allocator.stats();
    let fenced = fenced.iter().map(|(_, pages)| pages.len()).sum::<usize>();
    assert_eq!((left.cached, left.in_use), (0, (own.len() + fenced) * page_size));
    assert!(states.is_none_or(|states| states.with_tracks(|tracks| tracks.rows().in_use()) == 0));
}

/// Working slots 1 and 2, and as many track slots as asked for.
fn states(tracks: usize) -> Arc<GdnPool> {
    let config = GdnConfig {
        max_reqs: 2,
        num_gdn_layers: 1,
        num_v_heads: 1,
        head_k_dim: 1,
        head_v_dim: 2,
        conv_dim: 1,
        conv_kernel_size: 2,
        dtype: DType::BF16,
        max_track_slots: tracks,
        strict: true,
    };
    Arc::new(GdnPool::new(&config, &host()).expect("memory"))
}

/// The number that stands for the state after these tokens; the state of none is 0.
fn state_after(tokens: &[i32]) -> i32 {
    tokens.iter().fold(0, |state: i32, token| state.wrapping_mul(31).wrapping_add(token + 7))
}

/// A digest as good as BLAKE3, for keys that nobody forges.
pub(super) fn digest(parts: &[&[u8]]) -> PageHash {
    let mut hasher = DefaultHasher::new();
    for part in parts {
        hasher.write(part);
    }
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&hasher.finish().to_le_bytes());
    hash
}

fn tokens(source: &mut Source<'_>, most: usize) -> Vec<i32> {
    // Few different ones, so that prefixes meet.
    (0..source.below(most + 1)).map(|_| i32::from(source.rarely(4))).collect()
}

impl Prefixes {
    fn step(&mut self, source: &mut Source<'_>) {
        match source.below(38) {
            0..=6 => self.match_prefix(source),
            7..=14 => self.publish(source),
            15..=19 => self.release(source),
            20..=22 => self.alloc(source),
            23..=25 => self.free(source),
            26..=27 => self.evict(source),
            28 => self.clear(source),
            29 => self.misuse(source),
            30 => self.pin(source),
            31 => self.restore(source),
            32 => self.pass_a_fence(source),
            33..=34 => self.talk(source),
            35..=36 => self.wait(source),
            _ if source.rarely(8) => self.clear_allocator(),
            _ => drop(self.take(source.below(3))),
        }
    }

    /// The ends of leases and timed pins.
    fn ends(&self) -> impl Iterator<Item = &Key> {
        self.held.iter().map(|held| &held.end).chain(self.pinned.iter().map(|(_, end)| end))
    }

    fn is_locked(&self, key: &Key) -> bool {
        self.ends().any(|end| leads_to(key, end))
    }

    /// Whether a pin of either kind goes through a prefix.
    fn is_pinned(&self, key: &Key, page: Page) -> bool {
        page.priority > 0 || self.pinned.iter().any(|(_, end)| leads_to(key, end))
    }

    fn evictable(&self) -> usize {
        self.cached.keys().filter(|key| !self.is_locked(key)).count()
    }

    /// The prefixes of `tokens` in whole pages, shortest first.
    fn prefixes_of(&self, generation: usize, tokens: &[i32]) -> impl Iterator<Item = Key> {
        let lens = (self.page_size..=tokens.len()).step_by(self.page_size);
        lens.map(move |len| (generation, tokens[..len].to_vec()))
    }

    /// The number of tokens of `tokens` that are cached, in whole pages.
    fn find(&self, generation: usize, tokens: &[i32]) -> usize {
        let found = self.prefixes_of(generation, tokens).take_while(|key| self.cached.contains_key(key));
        found.last().map_or(0, |(_, prefix)| prefix.len())
    }

    /// The number of these tokens from which a request can resume.
    fn usable(&self, generation: usize, tokens: &[i32]) -> usize {
        let found = self.find(generation, tokens);
        if self.states.is_none() {
            return found;
        }
        let known =
            self.prefixes_of(generation, &tokens[..found]).filter(|key| self.snapshots.contains_key(key));
        known.last().map_or(0, |(_, prefix)| prefix.len())
    }

    /// Notes a use of the prefixes of `end` longer than `from`, by a session or none.
    fn touch(&mut self, end: &Key, from: usize, session: Option<usize>) {
        for key in
            self.prefixes_of(end.0, &end.1).filter(|(_, prefix)| prefix.len() > from).collect::<Vec<_>>()
        {
            let page = self.cached.get_mut(&key).expect("cached");
            let user = page.user.filter(|&user| session == Some(user));
            *page = Page { used: self.now, user, is_ended: false, ..*page };
        }
    }

    fn match_prefix(&mut self, source: &mut Source<'_>) {
        let (name, prompt) = (source.below(size(NAMESPACES)), tokens(source, 24));
        let limit = if source.flip() { source.below(26) } else { prompt.len() };
        let namespace = Namespace::Number(int(name));
        let generation = self.current[name];
        let limited = &prompt[..limit.min(prompt.len())];
        let (found, usable) = (self.find(generation, limited), self.usable(generation, limited));
        assert_eq!(
            self.cache.cached_len(&namespace, &prompt.as_slice(), STREAM).expect("tokens"),
            self.usable(generation, &prompt)
        );
        let wide: Vec<i64> = prompt.iter().copied().map(i64::from).collect();
        let tokens: &dyn Tokens = if source.flip() { &wide.as_slice() } else { &prompt.as_slice() };
        let session = (!self.talks.is_empty() && source.flip()).then(|| source.below(SESSIONS));
        let lease = match session.map(|session| &mut self.talks[session]) {
            None => self.cache.match_prefix(&namespace, tokens, limit, STREAM),
            Some(Talk { session, said, .. }) => {
                *said = Said::Nothing;
                self.cache.match_in_session(session, &namespace, tokens, limit, STREAM)
            }
        };
        let lease = lease.expect("valid tokens");
        assert_eq!(lease.len().expect("a new lease"), usable);
        assert_eq!(lease.kv_len().expect("a new lease"), found);
        self.now += prompt.len().max(1);
        self.explain(name, &prompt);
        let end = (generation, prompt[..usable].to_vec());
        self.touch(&end, 0, session);
        self.note_resumed(&end);
        self.held.push(HeldLease { lease, name, end, asked: prompt.len(), passing: None, session });
        if self.held.len() > 6 {
            self.release(source);
        }
    }

    /// Takes pages for a request, which evicts when there are too few.
    fn take(&mut self, pages: usize) -> Vec<i32> {
        let free = self.free_pages();
        let taken = self.allocator.alloc(pages * self.page_size, STREAM).expect("no error");
        let taken = taken.map(kvpool::pool::Grant::keep);
        let evictable = self.evictable();
        // A call that cannot succeed evicts nothing.
        let missing = pages.saturating_sub(free);
        let evicted = if missing <= evictable { missing } else { 0 };
        let is_possible = pages <= free + evicted;
        assert_eq!(taken.is_some(), is_possible, "{pages} pages, {free} free, {evictable} evictable");
        self.record_evicted(evicted);
        let slots = taken.map_or(Vec::new(), |view| ints_of(&view));
        let width = i32::try_from(self.page_size).expect("small");
        let pages: Vec<i32> = slots.iter().step_by(self.page_size).map(|slot| slot / width).collect();
        self.own.extend(&pages);
        pages
    }

    fn fenced_pages(&self) -> usize {
        self.fenced.iter().map(|(_, pages)| pages.len()).sum()
    }

    fn free_pages(&self) -> usize {
        let total = self.allocator.stats().capacity / self.page_size;
        total - self.own.len() - self.fenced_pages() - self.cached.len()
    }

    /// Drops the evicted prefixes, of which there must be `count`: none may be leased, and none retained
    /// while another was evictable.
    fn record_evicted(&mut self, count: usize) {
        let gone: Vec<Key> = self.cached.keys().filter(|key| !self.is_cached(key)).cloned().collect();
        assert_eq!(gone.len(), count, "evicted {gone:?}");
        let (mut highest, mut is_all_ended, mut parents) = (0, true, BTreeSet::new());
        // The place in the queue of the first request that needed something that was evicted.
        let mut first = None;
        for key in gone {
            assert!(!self.is_locked(&key), "{key:?} was leased");
            let page = self.cached.remove(&key).expect("it was cached");
            highest = page.priority.max(highest);
            let needed = self.queue.iter().position(|request| request.needs(|needed| leads_to(&key, needed)));
            is_all_ended &= page.is_ended && page.priority == 0 && needed.is_none();
            if page.priority == 0 {
                first = first.into_iter().chain(needed).min();
            }
            parents.insert(self.before(&key));
        }
        self.move_needs();
        let inner: BTreeSet<Key> = self.cached.keys().map(|key| self.before(key)).collect();
        // One whose last continuation was evicted is the next to go.
        let is_first = |key: &Key| !inner.contains(key) && !self.is_locked(key) && !parents.contains(key);
        for (key, page) in self.cached.iter().filter(|(key, page)| page.priority == 0 && is_first(key)) {
            let needed = self.queue.iter().position(|request| request.needs(|needed| needed == key));
            let is_ended = page.is_ended && needed.is_none();
            assert!(is_all_ended || !is_ended, "{key:?} of an ended session stays: {}", page.number);
            let is_in_order = first.is_none_or(|first| needed.is_some_and(|needed| needed <= first));
            assert!(is_in_order, "{key:?} is needed by {needed:?} and stays, evicted for {first:?}");
        }
        self.move_tails();
        self.snapshots.retain(|key, _| self.cached.contains_key(key));
        for (key, page) in &self.cached {
            // The rest is closed: a prefix goes after what hangs on it.
            let parent = self.before(key);
            assert!(parent.1.is_empty() || self.cached.contains_key(&parent));
            assert!(page.priority >= highest || self.is_locked(key), "{key:?} goes before what is retained");
        }
    }

    /// The prefix that is a page shorter.
    fn before(&self, key: &Key) -> Key {
        (key.0, key.1[..key.1.len() - self.page_size].to_vec())
    }

    /// Moves the tails of sessions up to what is cached of them.
    fn move_tails(&mut self) {
        for session in 0..self.talks.len() {
            if let Some(tail) = self.talks[session].tail.take() {
                let own = |key: &Key| self.cached.get(key).is_some_and(|page| page.user == Some(session));
                let is_there = self.cached.contains_key(&tail);
                let left = self.prefixes_of(tail.0, &tail.1).filter(own).last();
                self.talks[session].tail = if is_there { Some(tail) } else { left };
            }
        }
    }

    /// Moves what waiting requests need up to what is left of it, from which they can go on.
    fn move_needs(&mut self) {
        for at in 0..self.queue.len() {
            if let Some(needed) = self.queue[at].needed.take() {
                let is_left = |key: &Key| {
                    let has_state = self.states.is_none() || self.snapshots.contains_key(key);
                    has_state && self.cached.contains_key(key)
                };
                self.queue[at].needed = self.prefixes_of(needed.0, &needed.1).filter(is_left).last();
            }
        }
    }

    /// Adds a request to the waiting queue, looks one up again, or removes one.
    fn wait(&mut self, source: &mut Source<'_>) {
        if self.queue.len() < 3 && source.flip() {
            let (name, prompt, limit, priority) =
                (source.below(size(NAMESPACES)), tokens(source, 24), source.below(26), int(source.below(2)));
            let (namespace, rank) = (Namespace::Number(int(name)), WaitingRank { priority, arrival: 0 });
            let request = self.cache.add_waiting(&namespace, &prompt.as_slice(), limit, rank, STREAM);
            let request = request.expect("valid tokens");
            let at = self.queue.partition_point(|other| other.request.rank() <= rank);
            self.queue.insert(at, Waiting { request, name, prompt, needed: None });
            self.look_up_waiting(at, limit);
        } else if !self.queue.is_empty() {
            let at = source.below(self.queue.len());
            if source.flip() {
                let (Waiting { request, prompt, .. }, limit) = (&self.queue[at], source.below(26));
                request.update(&prompt.as_slice(), limit, STREAM).expect("valid tokens");
                self.look_up_waiting(at, limit);
            } else {
                let Waiting { request, prompt, .. } = self.queue.remove(at);
                request.remove(STREAM);
                refused(request.update(&prompt.as_slice(), 24, STREAM), ErrorKind::State);
            }
        }
    }

    /// Notes that a waiting request was looked up.
    fn look_up_waiting(&mut self, at: usize, limit: usize) {
        let Waiting { request, name, prompt, .. } = &self.queue[at];
        let generation = self.current[*name];
        let len = self.usable(generation, &prompt[..limit.min(prompt.len())]);
        assert_eq!(request.len(), len);
        self.queue[at].needed = (len > 0).then(|| (generation, self.queue[at].prompt[..len].to_vec()));
    }

    /// Whether a waiting request needs a prefix, up to its end.
    fn is_needed(&self, key: &Key) -> bool {
        self.queue.iter().any(|request| request.needs(|needed| needed == key))
    }

    /// Says something in a session.
    fn talk(&mut self, source: &mut Source<'_>) {
        if self.talks.is_empty() {
            return;
        }
        let session = source.below(SESSIONS);
        let talk = &mut self.talks[session];
        if source.flip() {
            talk.session.end(STREAM);
            talk.said = Said::End;
        } else {
            talk.session.pause(source.of(&["user", "bash"]), STREAM);
            talk.said = Said::Pause;
        }
        self.look_ahead(session);
    }

    /// Marks what only a session has used, as it has said.
    fn look_ahead(&mut self, session: usize) {
        let Talk { said, tail: Some(tail), .. } = &self.talks[session] else { return };
        let said = *said;
        for key in self.prefixes_of(tail.0, &tail.1).collect::<Vec<_>>() {
            if let Some(page) = self.cached.get_mut(&key).filter(|page| page.user == Some(session)) {
                page.is_ended = if said == Said::Nothing { page.is_ended } else { said == Said::End };
            }
        }
    }

    /// Notes that a turn of a session ends at a prefix.
    fn end_turn(&mut self, session: usize, end: &Key) {
        if end.1.is_empty() || !self.current.contains(&end.0) {
            return;
        }
        let before = self.talks[session].tail.clone();
        if before.as_ref().is_none_or(|before| !leads_to(end, before)) {
            if let Some(before) = before {
                let superseded = self.prefixes_of(before.0, &before.1).filter(|key| {
                    let is_own = self.cached.get(key).is_some_and(|page| page.user == Some(session));
                    is_own && !leads_to(key, end) && !self.is_locked(key)
                });
                for key in superseded.collect::<Vec<_>>() {
                    self.cached.get_mut(&key).expect("cached").is_ended = true;
                }
            }
            self.talks[session].tail = Some(end.clone());
        }
        self.look_ahead(session);
    }

    fn is_cached(&self, (generation, prefix): &Key) -> bool {
        let Some(name) = self.current.iter().position(|current| current == generation) else { return true };
        self.cached_len(name, prefix) == prefix.len()
    }

    /// The number of tokens of `tokens` that are cached, with a snapshot at their end or without.
    fn cached_len(&self, name: usize, tokens: &[i32]) -> usize {
        let namespace = Namespace::Number(int(name));
        if self.states.is_none() {
            return self.cache.cached_len(&namespace, &tokens, STREAM).expect("tokens");
        }
        let is_cached =
            |part: &&Segment| matches!(part.state, SegmentState::Device | SegmentState::NoSnapshot);
        let parts = self.cache.explain(&namespace, &tokens, STREAM).expect("tokens");
        parts.iter().take_while(is_cached).last().map_or(0, |part| part.range.end)
    }

    fn slots_of(&self, pages: &[i32], count: usize) -> Vec<i64> {
        let width = int(self.page_size);
        let slots = pages.iter().flat_map(|&page| (0..width).map(move |at| i64::from(page) * width + at));
        slots.take(count).collect()
    }

    /// The memory of a working slot: its place and its bytes.
    fn state(&self, row: usize) -> Option<(&Region, usize, usize)> {
        let states = self.states.as_ref()?;
        let view = states.recurrent_state();
        let bytes = view.shape().numel() * view.dtype().size() / states.pool_size();
        Some((view.region(), view.offset() + row * bytes, bytes))
    }

    fn publish(&mut self, source: &mut Source<'_>) {
        if self.held.is_empty() {
            return;
        }
        let at = source.below(self.held.len());
        let more = tokens(source, 8);
        let pages = self.take(more.len().div_ceil(self.page_size));
        if pages.len() * self.page_size < more.len() {
            return;
        }
        let slots = source.index_vec(&self.slots_of(&pages, more.len()));
        let state = (self.states.is_some() && source.flip()).then_some(1);
        let whole = more.len() / self.page_size * self.page_size;
        let (generation, begin) = (self.held[at].end.0, self.held[at].end.1.len());
        let all = [self.held[at].end.1.as_slice(), &more[..whole]].concat();
        if let Some((region, offset, bytes)) = self.state(1) {
            contents::write(region, offset, &vec![state_after(&all); bytes / size_of::<i32>()]);
        }
        let victims = state.and_then(|_| self.victims(at, &(generation, all.clone())));
        let there = self.find(generation, &all);
        let publication = Publication { tokens: &more.as_slice(), slots: Some(&slots), state };
        let published = self.held[at].lease.publish(&publication, STREAM).expect("own slots");
        let mut end = self.held[at].end.clone();
        let (mut duplicates, mut cached) = (0, Vec::new());
        for (&number, tokens) in pages.iter().zip(more.chunks_exact(self.page_size)) {
            end.1.extend(tokens);
            self.own.retain(|own| *own != number);
            let session = self.held[at].session;
            let new = Page { number, used: self.now, priority: 0, user: session, is_ended: false };
            self.cached.entry(end.clone()).or_insert(new);
            self.touch(&end, end.1.len() - self.page_size, session);
            let page = self.cached[&end];
            duplicates += if page.number == number { 0 } else { self.page_size };
            cached.push(page.number);
        }
        assert_eq!((published.length, published.duplicates), (end.1.len(), duplicates));
        let found: Vec<String> = published.pages.iter().map(ToString::to_string).collect();
        assert_eq!(found, cached.iter().map(ToString::to_string).collect::<Vec<_>>());
        self.held[at].end = end;
        if there > begin {
            // The lease was there.
            self.note_resumed(&(generation, all[..there].to_vec()));
        }
        if let Some(victims) = victims {
            self.record_snapshot(at, &victims);
        }
    }

    /// Notes that a lease ends after a prefix.
    fn note_resumed(&mut self, end: &Key) {
        self.superseded.remove(end);
        if self.snapshots.contains_key(end) {
            self.chosen.insert(end.clone());
        }
    }

    /// The last snapshot before the end of a prefix.
    fn snapshot_before(&self, key: &Key) -> Option<Key> {
        let before = self.prefixes_of(key.0, &key.1);
        before.filter(|prefix| prefix != key && self.snapshots.contains_key(prefix)).last()
    }

    /// The tokens that a snapshot saves, and the time that divides them; `own` is the end of the lease that makes
    /// the next one.
    fn worth(&self, key: &Key, own: &Key) -> (usize, usize) {
        let saved = key.1.len() - self.snapshot_before(key).map_or(0, |(_, prefix)| prefix.len());
        let is_last = key != own && !self.snapshots.keys().any(|other| other != key && leads_to(key, other));
        let is_likely = is_last || self.chosen.contains(key);
        let age = self.now - self.cached[key].used + self.cached.len() * self.page_size;
        (saved * if is_likely { 4 } else { 1 }, age)
    }

    /// The snapshots of which one is evicted for another at `end`, after lease `at`; `None` if none is kept
    /// there.
    fn victims(&mut self, at: usize, end: &Key) -> Option<Vec<Key>> {
        let tracks = self.states.as_ref().map_or(0, |states| states.config().max_track_slots);
        if end.1.is_empty() || self.snapshots.contains_key(end) {
            return None;
        }
        if self.snapshots.len() < tracks {
            return Some(Vec::new());
        }
        self.superseded.retain(|key| self.snapshots.contains_key(key));
        self.chosen.retain(|key| self.snapshots.contains_key(key));
        let own = self.held[at].end.clone();
        let least = |keys: Vec<&Key>| -> Vec<Key> {
            let worths: Vec<_> = keys.iter().map(|key| self.worth(key, &own)).collect();
            let is_least = |&(saved, age): &(usize, usize)| {
                worths.iter().all(|&(other, other_age)| saved * other_age <= other * age)
            };
            let pairs = keys.into_iter().zip(&worths);
            pairs.filter(|(_, worth)| is_least(worth)).map(|(key, _)| key.clone()).collect()
        };
        let superseded = least(self.superseded.iter().filter(|key| !self.is_needed(key)).collect());
        if !superseded.is_empty() {
            return Some(superseded);
        }
        let is_alone = |key: &Key| {
            let others = self.ends().filter(|end| *end == key).count();
            self.snapshots.contains_key(key) && others == usize::from(*key == own)
        };
        if let Some(passing) =
            self.held[at].passing.clone().filter(|key| is_alone(key) && !self.is_needed(key))
        {
            self.held[at].passing = None;
            return Some(vec![passing]);
        }
        let (needed, others): (Vec<_>, Vec<_>) =
            self.snapshots.keys().filter(|key| is_alone(key)).partition(|key| self.is_needed(key));
        let candidates = least(if others.is_empty() { needed } else { others });
        (!candidates.is_empty()).then_some(candidates)
    }

    /// Records the snapshot that is kept at the end of a lease, and the one that was evicted for it.
    fn record_snapshot(&mut self, at: usize, victims: &[Key]) {
        let slot = self.held[at].lease.state_slot().expect("a lease").expect("it was kept");
        if !victims.is_empty() {
            // The one, of several that are worth as much, whose slot it has now.
            let gone =
                victims.iter().find(|key| self.snapshots[*key] == slot).expect("one of them is given up");
            self.snapshots.remove(gone);
            self.move_needs();
        }
        let held = &mut self.held[at];
        let end = held.end.clone();
        self.superseded.remove(&end);
        self.chosen.remove(&end);
        self.snapshots.insert(end.clone(), slot);
        if end.1.len() <= held.asked {
            return;
        }
        if let Some(earlier) = held.passing.replace(end.clone()) {
            if self.snapshots.contains_key(&earlier) && !self.ends().any(|end| *end == earlier) {
                self.superseded.insert(earlier);
            }
        } else if let Some(last) = self.snapshot_before(&end) {
            self.chosen.insert(last);
        }
    }

    /// Copies the snapshot at the end of a lease to the other working slot.
    fn restore(&mut self, source: &mut Source<'_>) {
        if self.held.is_empty() {
            return;
        }
        let HeldLease { lease, end, .. } = &self.held[source.below(self.held.len())];
        let is_right = self.states.is_some() && (end.1.is_empty() || self.snapshots.contains_key(end));
        let expected = ensure(is_right, ErrorKind::State);
        let of_no_slot: Verdict = expected.and(Err(Refusal::at(ErrorKind::Index, 9)));
        agree(lease.restore(9, STREAM), &of_no_slot);
        // The slot of padding, and the first track slot.
        for other in [0, 3] {
            let of_others: Verdict = expected.and(Err(Refusal::at(ErrorKind::Index, other)));
            agree(lease.restore(other, STREAM), &of_others);
        }
        for slot in self.snapshots.values() {
            let states = self.states.as_ref().expect("it has snapshots");
            let failure = states.free_track_slot((*slot).into()).expect_err("it is strict");
            assert_eq!(failure.kind(), ErrorKind::IndexOwnership);
        }
        if agree(lease.restore(2, STREAM), &expected).is_some() {
            let (region, offset, bytes) = self.state(2).expect("it was restored");
            let state = contents::read::<i32>(region, offset, bytes / size_of::<i32>());
            assert!(!state.is_empty() && state.iter().all(|part| *part == state_after(&end.1)));
        }
    }

    fn release(&mut self, source: &mut Source<'_>) {
        if self.held.is_empty() {
            return;
        }
        let held = self.held.swap_remove(source.below(self.held.len()));
        if source.flip() {
            held.lease.release(STREAM);
            held.lease.release(STREAM);
            // A released lease holds nothing.
            refused(held.lease.len(), ErrorKind::Stale);
        }
        if let HeldLease { session: Some(session), end, .. } = &held {
            self.end_turn(*session, end);
        }
        drop(held);
        self.drop_detached();
    }

    /// Drops the prefixes of earlier generations that nothing holds.
    fn drop_detached(&mut self) {
        let mut cached = std::mem::take(&mut self.cached);
        cached.retain(|key, _| self.current.contains(&key.0) || self.is_locked(key));
        self.cached = cached;
        self.move_tails();
        self.snapshots.retain(|key, _| self.cached.contains_key(key));
        self.move_needs();
    }

    fn alloc(&mut self, source: &mut Source<'_>) {
        let pages = source.below(8);
        self.take(pages);
    }

    fn free(&mut self, source: &mut Source<'_>) {
        let mut given = Vec::new();
        for _ in 0..source.below(4) {
            if !self.own.is_empty() {
                given.push(self.own.swap_remove(source.below(self.own.len())));
            }
        }
        let mut slots = self.slots_of(&given, usize::MAX);
        let cached: Vec<i32> = self.cached.values().map(|page| page.number).collect();
        if !cached.is_empty() && source.rarely(3) {
            let page = source.of(&cached);
            slots.extend(self.slots_of(&[page], 1));
            self.dropped += 1;
        }
        let slots = Indices::Host(source.index_vec(&slots));
        let fence = source.rarely(4).then(|| self.fences.make());
        let after = fence.as_ref().map(|(_, fence)| fence);
        let bad = self.allocator.free_keeping(&slots, None, after, || None, STREAM).expect("not strict");
        self.fenced.extend(fence.map(|(id, _)| (id, given)));
        let reasons: BTreeSet<_> = bad.first().iter().map(|(_, reason)| format!("{reason:?}")).collect();
        assert!(reasons.iter().all(|reason| reason == "Cached"), "{reasons:?}");
    }

    fn pass_a_fence(&mut self, source: &mut Source<'_>) {
        if let Some(passed) = self.fences.pass(source) {
            self.allocator.poll(STREAM).expect("fences do not fail");
            self.fenced.retain(|(id, _)| *id != passed);
        }
    }

    fn evict(&mut self, source: &mut Source<'_>) {
        let asked = source.below(12);
        let pages = asked.div_ceil(self.page_size).min(self.evictable());
        let evicted = self.cache.evict(asked, STREAM);
        assert_eq!(evicted, pages * self.page_size);
        self.record_evicted(pages);
    }

    fn clear(&mut self, source: &mut Source<'_>) {
        let name = source.rarely(3).then(|| source.below(size(NAMESPACES)));
        let namespace = name.map(|name| Namespace::Number(int(name)));
        self.cache.clear(namespace.as_ref(), STREAM);
        self.pinned.retain(|(pinned, _)| name.is_some_and(|name| name != *pinned));
        for cleared in 0..self.current.len() {
            if name.is_none_or(|name| name == cleared) {
                self.current[cleared] = self.generations;
                self.generations += 1;
            }
        }
        self.drop_detached();
    }

    /// Calls that must be refused, and change nothing.
    fn misuse(&mut self, source: &mut Source<'_>) {
        let Some(held) = self.held.first() else { return };
        let mut pages = 1..=i32::try_from(self.allocator.stats().capacity / self.page_size).expect("small");
        let is_cached = |page: &i32| self.cached.values().any(|cached| cached.number == *page);
        let free = pages.find(|page| {
            !self.own.contains(page)
                && !is_cached(page)
                && !self.fenced.iter().any(|(_, pages)| pages.contains(page))
        });
        let fenced = self.fenced.iter().flat_map(|(_, pages)| pages).next();
        let cached = self.cached.values().next().map(|page| page.number);
        let page = match (source.below(5), self.own.first(), free, fenced, cached) {
            (0, Some(&own), ..) => vec![own, own],
            (1, _, Some(free), ..) => vec![free],
            (2, _, _, Some(&fenced), _) => vec![fenced],
            (3, .., Some(cached)) => vec![cached],
            _ => vec![-1],
        };
        // Tokens that no prefix has: nothing of it is found.
        let more = vec![7; page.len() * self.page_size];
        let mut listed = self.slots_of(&page, usize::MAX);
        let slots = IndexVec::I64(listed.clone());
        let publication = Publication { tokens: &more.as_slice(), slots: Some(&slots), state: None };
        let publish = |publication: &Publication<'_>| held.lease.publish(publication, STREAM);
        refused(publish(&publication), Refusal::at(ErrorKind::IndexOwnership, listed[0]));
        let few: &[i32] = &more[1..];
        refused(publish(&Publication { tokens: &few, ..publication }), ErrorKind::Argument);
        let negative = vec![-1; more.len()];
        let of_no_page = ensure(page != [-1], ErrorKind::IndexOwnership);
        let of_no_token: Verdict = of_no_page.and(Err(Refusal::at(ErrorKind::Argument, -1)));
        agree(publish(&Publication { tokens: &negative.as_slice(), ..publication }), &of_no_token);
        refused(publish(&Publication { slots: None, ..publication }), ErrorKind::Argument);
        if self.page_size > 1 {
            // Not at its place in a page.
            listed.reverse();
            let reversed = IndexVec::I64(listed);
            let answer = publish(&Publication { slots: Some(&reversed), ..publication });
            refused(answer, ErrorKind::IndexOwnership);
        }
        if self.states.is_none() {
            let (tokens, none): (&[i32], _) = (&[], IndexVec::I64(Vec::new()));
            let publication = Publication { tokens: &tokens, slots: Some(&none), state: Some(1) };
            refused(publish(&publication), ErrorKind::State);
        }
        let (name, negative) = (Namespace::Unnamed, negative.as_slice());
        let of_no_token = Refusal::at(ErrorKind::Argument, -1);
        refused(self.cache.match_prefix(&name, &negative, 9, STREAM), of_no_token);
        refused(self.cache.explain(&name, &negative, STREAM), of_no_token);
        refused(self.cache.pin(&held.lease, Some(Duration::MAX), 0, STREAM), ErrorKind::Argument);
    }

    fn pin(&mut self, source: &mut Source<'_>) {
        let Some(HeldLease { lease, name, end, .. }) = self.held.last() else { return };
        let priority = u8::try_from(source.below(3)).expect("small");
        // Pins that are over at once, ones that only change the order, and ones that do not end by
        // themselves.
        let time = source.of(&[None, Some(Duration::ZERO), Some(LONG)]);
        let way: BTreeSet<Key> = self.prefixes_of(end.0, &end.1).collect();
        let pinned =
            self.cached.iter().filter(|(key, page)| way.contains(key) || self.is_pinned(key, **page));
        let capacity = u32::try_from(self.allocator.stats().capacity).expect("small");
        let is_few = f64::from(u32::try_from(pinned.count() * self.page_size).expect("small"))
            <= (f64::from(capacity) * self.max_pinned).floor();
        let is_current = ensure(self.current[*name] == end.0, ErrorKind::Stale);
        let expected = is_current.and(ensure(is_few, ErrorKind::State));
        let answer = agree(self.cache.pin(lease, time, priority, STREAM), &expected);
        match time.filter(|_| answer.is_some()) {
            Some(time) => {
                // The pin is a lease of its own, for as long as it lasts.
                let (name, end) = (*name, end.clone());
                self.note_resumed(&end);
                if time == LONG {
                    self.pinned.push((name, end));
                }
            }
            None if answer.is_some() => {
                for key in way {
                    let page = self.cached.get_mut(&key).expect("cached");
                    page.priority = page.priority.max(priority + 1);
                }
            }
            None => (),
        }
    }

    fn clear_allocator(&mut self) {
        self.allocator.clear(STREAM);
        for held in self.held.drain(..) {
            // Its slots are gone.
            refused(held.lease.len(), ErrorKind::Stale);
        }
        self.cached.clear();
        for talk in &mut self.talks {
            (talk.said, talk.tail) = (Said::Nothing, None);
        }
        for waiting in &mut self.queue {
            waiting.needed = None;
        }
        self.pinned.clear();
        self.snapshots.clear();
        self.superseded.clear();
        self.chosen.clear();
        self.own.clear();
        self.fenced.clear();
    }

    /// Follows the events, as a router does, and looks at every part of a prompt.
    fn follow(&mut self) {
        for event in self.cache.take_events(STREAM).expect("a cache with events") {
            match event {
                CacheEvent::Stored { pages, parent, tokens, .. } => {
                    assert_eq!(tokens.len(), pages.len() * self.page_size);
                    assert!(parent.is_none_or(|parent| self.told.contains(&parent)));
                    assert!(pages.into_iter().all(|page| self.told.insert(page)), "stored once");
                }
                CacheEvent::Removed { pages, .. } => {
                    assert!(pages.iter().all(|page| self.told.remove(page)), "removed once");
                }
                CacheEvent::Cleared => self.told.clear(),
            }
        }
        let found = self.cached.keys().filter(|(generation, _)| self.current.contains(generation));
        assert_eq!(self.told.len(), found.count());
    }

    /// The segments of a prompt are in order, and the cached ones are those that would be found.
    fn explain(&self, name: usize, prompt: &[i32]) {
        let parts = self.cache.explain(&Namespace::Number(int(name)), &prompt, STREAM).expect("tokens");
        let ends = parts.iter().map(|part| part.range.end);
        assert!(
            parts.iter().map(|part| part.range.start).eq(std::iter::once(0).chain(ends).take(parts.len()))
        );
        assert_eq!(parts.last().map_or(0, |part| part.range.end), prompt.len());
        let device = parts.iter().find(|part| matches!(part.state, SegmentState::Device));
        let usable = self.usable(self.current[name], prompt);
        assert_eq!(device.map_or(0, |part| part.range.end), usable);
        let bare = parts.iter().find(|part| matches!(part.state, SegmentState::NoSnapshot));
        assert_eq!(bare.map_or(usable, |part| part.range.end), self.find(self.current[name], prompt));
        let rest = parts.iter().find(|part| matches!(part.state, SegmentState::PageNotFull));
        assert_eq!(rest.map_or(0, |part| part.range.len()), prompt.len() % self.page_size);
    }

    fn check(&mut self) {
        self.follow();
        self.cache.verify(STREAM).expect("a consistent cache");
        self.allocator.verify().expect("a consistent allocator");
        let (tree, slots) = (self.cache.tree_stats(STREAM), self.allocator.stats());
        let locked = self.cached.len() - self.evictable();
        let sizes =
            [self.cached.len(), locked, self.cached.len() - locked].map(|pages| pages * self.page_size);
        assert_eq!([tree.cached, tree.locked, tree.evictable], sizes);
        assert_eq!(slots.cached, tree.cached);
        assert_eq!(slots.fenced, self.fenced_pages() * self.page_size);
        let own = self.own.len() * self.page_size;
        assert_eq!(slots.available + own + slots.fenced + tree.cached, slots.capacity);
        assert_eq!(slots.dropped_frees, self.dropped);
        assert_eq!(tree.snapshots, self.snapshots.len());
        assert_eq!(tree.waiting, self.queue.len());
        if let Some(states) = &self.states {
            let tracks = states.with_tracks(|tracks| (tracks.rows().in_use(), tracks.cached()));
            assert_eq!(tracks, (self.snapshots.len(), self.snapshots.len()));
        }
        for HeldLease { lease, end, .. } in &self.held {
            let pages = lease.pages(0).expect("a lease");
            let expected = self.prefixes_of(end.0, &end.1).map(|key| self.cached[&key].number.to_string());
            assert!(pages.iter().map(ToString::to_string).eq(expected));
            let state = lease.state_slot().expect("a lease");
            assert_eq!(state, self.snapshots.get(end).copied());
        }
        self.check_pages();
    }

    /// Compares the state of each page.
    fn check_pages(&self) {
        let by_page: BTreeMap<i32, &Key> = self.cached.iter().map(|(key, page)| (page.number, key)).collect();
        for piece in self.allocator.occupancy().pieces {
            for slot in piece.range.step_by(self.page_size) {
                let page = i32::try_from(slot / self.page_size).expect("small");
                let is_fenced = || self.fenced.iter().any(|(_, pages)| pages.contains(&page));
                let expected = match by_page.get(&page) {
                    Some(key) if self.is_locked(key) => IndexState::Locked,
                    Some(_) => IndexState::Evictable,
                    None if self.own.contains(&page) => IndexState::Live,
                    None if is_fenced() => IndexState::Fenced,
                    None => IndexState::Free,
                };
                assert_eq!(piece.state, expected, "page {page}");
            }
        }
    }
}
