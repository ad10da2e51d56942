//! The prefix cache on an allocator: a naive dictionary of prefixes, with the leases that hold them.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use kvpool::base::IndexVec;
use kvpool::cache::{Event, Namespace, PageHash, PolicyKind, Whereabouts};
use kvpool::pool::{AllocatorConfig, Lease, Offer, PrefixCache, PrefixCacheConfig, TokenToKvPoolAllocator};

use super::{STREAM, Source, agree, host, int, ints_of, size};

const NAMESPACES: i64 = 2;

/// A lease and what it should hold.
struct Held {
    lease: Arc<Lease>,
    generation: usize,
    tokens: Vec<i32>,
}

impl Held {
    fn locks(&self, (generation, prefix): &Key) -> bool {
        self.generation == *generation && self.tokens.starts_with(prefix)
    }
}

/// A prefix in whole pages. A cleared namespace goes on in a new generation.
type Key = (usize, Vec<i32>);

struct Prefixes {
    allocator: Arc<TokenToKvPoolAllocator>,
    cache: PrefixCache,
    page_size: usize,
    /// The last page of each cached prefix.
    cached: BTreeMap<Key, i32>,
    held: Vec<Held>,
    /// Pages of requests.
    own: Vec<i32>,
    /// The generation of each namespace.
    current: Vec<usize>,
    generations: usize,
    dropped: usize,
    /// What the events tell of the pages that can be found.
    told: BTreeSet<PageHash>,
}

pub(super) fn run(source: &mut Source<'_>) {
    let page_size = source.of(&[1, 1, 2, 3]);
    let config = AllocatorConfig {
        size: page_size * (4 + source.below(40)),
        page_size,
        need_sort: source.flip(),
        strict: false,
        ..AllocatorConfig::default()
    };
    let allocator = Arc::new(TokenToKvPoolAllocator::new(&config, &host()).expect("memory"));
    let config = PrefixCacheConfig {
        policy: source.of(&PolicyKind::ALL),
        max_pinned: 1.0,
        name: "cache".into(),
        events: Some(digest),
    };
    let mut prefixes = Prefixes {
        cache: PrefixCache::new(config, Arc::clone(&allocator), None).expect("a valid config"),
        allocator,
        page_size,
        cached: BTreeMap::new(),
        held: Vec::new(),
        own: Vec::new(),
        current: (0..size(NAMESPACES)).collect(),
        generations: size(NAMESPACES),
        dropped: 0,
        told: BTreeSet::new(),
    };
    while source.next_step() {
        prefixes.step(source);
        prefixes.check();
    }
    let Prefixes { allocator, cache, held, own, page_size, .. } = prefixes;
    drop(cache);
    drop(held);
    let stats = allocator.stats();
    assert_eq!((stats.cached, stats.in_use), (0, own.len() * page_size));
}

/// As good as BLAKE3 for keys that nobody forges.
fn digest(parts: &[&[u8]]) -> PageHash {
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
        match source.below(32) {
            0..=6 => self.acquire(source),
            7..=14 => self.publish(source),
            15..=19 => self.release(source),
            20..=22 => self.alloc(source),
            23..=25 => self.free(source),
            26..=27 => self.evict(source),
            28 => self.clear(source),
            29 => self.misuse(source),
            30 => self.pin(source),
            _ if source.rarely(8) => self.clear_allocator(),
            _ => drop(self.take(source.below(3))),
        }
    }

    fn is_locked(&self, key: &Key) -> bool {
        self.held.iter().any(|held| held.locks(key))
    }

    /// How many tokens of `tokens` are cached, in whole pages.
    fn find(&self, generation: usize, tokens: &[i32]) -> usize {
        let lens = (self.page_size..=tokens.len()).step_by(self.page_size);
        let is_cached = |len: &usize| self.cached.contains_key(&(generation, tokens[..*len].to_vec()));
        lens.take_while(is_cached).last().unwrap_or(0)
    }

    fn acquire(&mut self, source: &mut Source<'_>) {
        let (name, prompt) = (source.below(size(NAMESPACES)), tokens(source, 24));
        let limit = if source.flip() { source.below(26) } else { prompt.len() };
        let namespace = Namespace::Number(int(name));
        let generation = self.current[name];
        let found = self.find(generation, &prompt[..limit.min(prompt.len())]);
        assert_eq!(
            self.cache.cached_len(&namespace, &prompt.as_slice(), STREAM).expect("tokens"),
            self.find(generation, &prompt)
        );
        let wide: Vec<i64> = prompt.iter().copied().map(i64::from).collect();
        let lease = if source.flip() {
            self.cache.acquire(&namespace, &wide.as_slice(), limit, STREAM)
        } else {
            self.cache.acquire(&namespace, &prompt.as_slice(), limit, STREAM)
        };
        let lease = lease.expect("valid tokens");
        assert_eq!(lease.len().expect("a new lease"), found);
        self.explain(&namespace, &prompt);
        self.held.push(Held { lease, generation, tokens: prompt[..found].to_vec() });
        if self.held.len() > 6 {
            self.release(source);
        }
    }

    /// Takes pages for a request, which evicts when there are too few.
    fn take(&mut self, pages: usize) -> Vec<i32> {
        let free = self.free_pages();
        let taken = self.allocator.alloc(pages * self.page_size, STREAM).expect("no error");
        let taken = taken.map(kvpool::pool::Grant::keep);
        let evictable = self.cached.keys().filter(|key| !self.is_locked(key)).count();
        let missing = pages.saturating_sub(free);
        let is_possible = missing <= evictable;
        assert_eq!(taken.is_some(), is_possible, "{pages} pages, {free} free, {evictable} evictable");
        // What cannot succeed still evicts what it can, unless it is beyond the capacity.
        let total = self.allocator.stats().capacity / self.page_size;
        self.note_evicted(if pages > total { 0 } else { missing.min(evictable) });
        let slots = taken.map_or(Vec::new(), |view| ints_of(&view));
        let width = i32::try_from(self.page_size).expect("small");
        let pages: Vec<i32> = slots.iter().step_by(self.page_size).map(|slot| slot / width).collect();
        self.own.extend(&pages);
        pages
    }

    fn free_pages(&self) -> usize {
        self.allocator.stats().capacity / self.page_size - self.own.len() - self.cached.len()
    }

    /// Drops the prefixes that are gone, which must be `count`, none of them leased.
    fn note_evicted(&mut self, count: usize) {
        let gone: Vec<Key> = self.cached.keys().filter(|key| !self.is_cached(key)).cloned().collect();
        assert_eq!(gone.len(), count, "evicted {gone:?}");
        for key in gone {
            assert!(!self.is_locked(&key), "{key:?} was leased");
            self.cached.remove(&key);
        }
        // What remains is closed: a prefix goes after what hangs on it.
        for (generation, prefix) in self.cached.keys() {
            let parent = prefix[..prefix.len() - self.page_size].to_vec();
            assert!(parent.is_empty() || self.cached.contains_key(&(*generation, parent)));
        }
    }

    fn is_cached(&self, (generation, prefix): &Key) -> bool {
        let Some(name) = self.current.iter().position(|current| current == generation) else { return true };
        let found = self.cache.cached_len(&Namespace::Number(int(name)), &prefix.as_slice(), STREAM);
        found.expect("tokens") == prefix.len()
    }

    fn slots_of(&self, pages: &[i32], count: usize) -> Vec<i64> {
        let width = int(self.page_size);
        let slots = pages.iter().flat_map(|&page| (0..width).map(move |at| i64::from(page) * width + at));
        slots.take(count).collect()
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
        let offer = Offer { tokens: &more.as_slice(), slots: Some(&slots), state: None };
        let published = self.held[at].lease.publish(&offer, STREAM).expect("own slots");
        let Held { generation, tokens: held, .. } = &mut self.held[at];
        let (mut duplicates, mut cached) = (0, Vec::new());
        for (page, tokens) in pages.iter().zip(more.chunks_exact(self.page_size)) {
            held.extend(tokens);
            self.own.retain(|own| own != page);
            let entry = self.cached.entry((*generation, held.clone())).or_insert(*page);
            duplicates += if entry == page { 0 } else { self.page_size };
            cached.push(*entry);
        }
        assert_eq!((published.length, published.duplicates), (held.len(), duplicates));
        let found: Vec<String> = published.pages.iter().map(ToString::to_string).collect();
        assert_eq!(found, cached.iter().map(ToString::to_string).collect::<Vec<_>>());
    }

    fn release(&mut self, source: &mut Source<'_>) {
        if self.held.is_empty() {
            return;
        }
        let held = self.held.swap_remove(source.below(self.held.len()));
        if source.flip() {
            held.lease.release(STREAM);
            held.lease.release(STREAM);
            assert!(held.lease.len().is_err(), "a released lease holds nothing");
        }
        drop(held);
        self.drop_detached();
    }

    /// Drops the prefixes of earlier generations without a lease.
    fn drop_detached(&mut self) {
        let (current, held) = (&self.current, &self.held);
        self.cached.retain(|key, _| current.contains(&key.0) || held.iter().any(|held| held.locks(key)));
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
        let cached: Vec<i32> = self.cached.values().copied().collect();
        if !cached.is_empty() && source.rarely(3) {
            let page = source.of(&cached);
            slots.extend(self.slots_of(&[page], 1));
            self.dropped += 1;
        }
        let slots = kvpool::kernels::Indices::Host(source.index_vec(&slots));
        let bad = self.allocator.free(&slots, None, || None, STREAM).expect("not strict");
        let reasons: BTreeSet<_> = bad.first().iter().map(|(_, reason)| format!("{reason:?}")).collect();
        assert!(reasons.iter().all(|reason| reason == "Cached"), "{reasons:?}");
    }

    fn evict(&mut self, source: &mut Source<'_>) {
        let asked = source.below(12);
        let evictable = self.cached.keys().filter(|key| !self.is_locked(key)).count();
        let evicted = self.cache.evict(asked, STREAM);
        let pages = asked.div_ceil(self.page_size).min(evictable);
        assert_eq!(evicted, pages * self.page_size);
        self.note_evicted(pages);
    }

    fn clear(&mut self, source: &mut Source<'_>) {
        let name = source.rarely(3).then(|| source.below(size(NAMESPACES)));
        let namespace = name.map(|name| Namespace::Number(int(name)));
        self.cache.clear(namespace.as_ref(), STREAM);
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
        let free: Vec<i32> = (1..=i32::try_from(self.allocator.stats().capacity / self.page_size)
            .expect("small"))
            .filter(|page| !self.own.contains(page) && !self.cached.values().any(|cached| cached == page))
            .collect();
        let page = match (source.below(3), self.own.first(), free.first()) {
            (0, Some(&own), _) => vec![own, own],
            (1, _, Some(&free)) => vec![free],
            _ => vec![-1],
        };
        // Tokens that no prefix has: nothing of it is found.
        let more = vec![7; page.len() * self.page_size];
        let slots = IndexVec::I64(self.slots_of(&page, usize::MAX));
        let offer = Offer { tokens: &more.as_slice(), slots: Some(&slots), state: None };
        agree(held.lease.publish(&offer, STREAM), false);
        let few: &[i32] = &more[1..];
        agree(held.lease.publish(&Offer { tokens: &few, ..offer }, STREAM), false);
        let negative = vec![-1; more.len()];
        agree(held.lease.publish(&Offer { tokens: &negative.as_slice(), ..offer }, STREAM), false);
        agree(self.cache.acquire(&Namespace::Unnamed, &negative.as_slice(), 9, STREAM), false);
    }

    fn pin(&mut self, source: &mut Source<'_>) {
        let Some(held) = self.held.last() else { return };
        let priority = u8::try_from(source.below(3)).expect("small");
        // Pins that are over at once, and ones that only change the order.
        let time = source.flip().then_some(std::time::Duration::ZERO);
        self.cache.pin(&held.lease, time, priority, STREAM).expect("everything may be pinned");
    }

    fn clear_allocator(&mut self) {
        self.allocator.clear(STREAM);
        for held in self.held.drain(..) {
            assert!(held.lease.len().is_err(), "its slots are gone");
        }
        self.cached.clear();
        self.own.clear();
    }

    /// Follows the events, as a router does, and looks at every part of a prompt.
    fn follow(&mut self) {
        for event in self.cache.take_events(STREAM).expect("a cache with events") {
            match event {
                Event::Stored { pages, parent, tokens, .. } => {
                    assert_eq!(tokens.len(), pages.len() * self.page_size);
                    assert!(parent.is_none_or(|parent| self.told.contains(&parent)));
                    assert!(pages.into_iter().all(|page| self.told.insert(page)), "stored once");
                }
                Event::Removed { pages } => {
                    assert!(pages.iter().all(|page| self.told.remove(page)), "removed once");
                }
                Event::Cleared => self.told.clear(),
            }
        }
        let found = self.cached.keys().filter(|(generation, _)| self.current.contains(generation));
        assert_eq!(self.told.len(), found.count());
    }

    /// The parts of a prompt are explained in order, and what is cached is what would be found.
    fn explain(&self, namespace: &Namespace, prompt: &[i32]) {
        let parts = self.cache.explain(namespace, &prompt, STREAM).expect("tokens");
        let ends = parts.iter().map(|part| part.range.end);
        assert!(
            parts.iter().map(|part| part.range.start).eq(std::iter::once(0).chain(ends).take(parts.len()))
        );
        assert_eq!(parts.last().map_or(0, |part| part.range.end), prompt.len());
        let cached = parts.iter().find(|part| matches!(part.whereabouts, Whereabouts::Device));
        let found = self.cache.cached_len(namespace, &prompt, STREAM).expect("tokens");
        assert_eq!(cached.map_or(0, |part| part.range.end), found);
        let rest = parts.iter().find(|part| matches!(part.whereabouts, Whereabouts::PageNotFull));
        assert_eq!(rest.map_or(0, |part| part.range.len()), prompt.len() % self.page_size);
    }

    fn check(&mut self) {
        self.follow();
        self.cache.verify(STREAM).expect("a consistent cache");
        self.allocator.verify().expect("a consistent allocator");
        let (tree, slots) = (self.cache.tree_stats(STREAM), self.allocator.stats());
        let locked = self.cached.keys().filter(|key| self.is_locked(key)).count();
        let sizes =
            [self.cached.len(), locked, self.cached.len() - locked].map(|pages| pages * self.page_size);
        assert_eq!([tree.cached, tree.locked, tree.evictable], sizes);
        assert_eq!(slots.cached, tree.cached);
        assert_eq!(slots.available + self.own.len() * self.page_size + tree.cached, slots.capacity);
        assert_eq!(slots.dropped_frees, self.dropped);
        for held in &self.held {
            let pages = held.lease.pages(0).expect("a lease");
            let lens = (self.page_size..=held.tokens.len()).step_by(self.page_size);
            let expected = lens.map(|len| self.cached[&(held.generation, held.tokens[..len].to_vec())]);
            let pages: Vec<String> = pages.iter().map(ToString::to_string).collect();
            assert_eq!(pages, expected.map(|page| page.to_string()).collect::<Vec<_>>());
        }
    }
}
