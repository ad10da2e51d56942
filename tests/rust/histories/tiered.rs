//! A prefix cache with host memory below it, and sometimes a store below that, which outlives both. What is
//! found or loaded must be right to the byte, nothing may be written to slots that have a new owner, and
//! nothing may be lost.
//!
//! Copies run on threads, so that each run has its own order of events. The contents of a row tell all tokens
//! up to its position, the layer and the kind.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::base::{DType, ErrorKind, Id, IndexVec};
use kvpool::cache::{Namespace, PolicyKind, WritePolicy};
use kvpool::kernels::Indices;
use kvpool::pool::{
    AllocatorConfig, Fetch, GdnConfig, GdnPool, HostTier, HostTierConfig, KvConfig, KvLayout, KvPool, Lease,
    Load, LowerStore, LowerTier, PrefixCache, PrefixCacheConfig, Publication, Store, TokenToKvPoolAllocator,
};
use kvpool::tensor::TensorView;

use super::prefixes::digest;
use super::served::AnsweringStore;
use super::{STREAM, Source, contents, host, ints_of, size};

const LAYERS: usize = 3;
const NAMESPACES: i64 = 2;
/// The number that is written to slots that no cache has.
const SCRIBBLE: i64 = -77;

struct HeldLease {
    lease: Arc<Lease>,
    name: i64,
    tokens: Vec<i32>,
    /// A load that was not seen to be over, and the length before it.
    load: Option<(Load, usize)>,
    /// Whether its prefix was cleared, so that nobody finds what it publishes.
    is_cleared: bool,
}

struct World {
    kv: Arc<KvPool>,
    allocator: Arc<TokenToKvPoolAllocator>,
    states: Option<Arc<GdnPool>>,
    of_tier: HostTierConfig,
    tier: Arc<HostTier>,
    of_cache: PrefixCacheConfig,
    /// `None` in between two caches.
    cache: Option<PrefixCache>,
    served: Option<AnsweringStore>,
    fetches: Vec<Fetch>,
    /// The contents of pages depend on it.
    model: i64,
    page_size: usize,
    held: Vec<HeldLease>,
    /// Slots that this owns.
    own: Vec<IndexVec>,
    /// Whether the tier has everything that was published since the last clear.
    is_complete: bool,
    published: BTreeSet<(i64, Vec<i32>)>,
    loaded: usize,
}

/// A value for a prefix.
fn content(name: i64, tokens: &[i32], layer: usize, kind: usize) -> i64 {
    let mut hasher = DefaultHasher::new();
    (name, tokens, layer, kind).hash(&mut hasher);
    hasher.finish().cast_signed()
}

fn row_of(view: &TensorView, row: usize) -> usize {
    view.offset() + row * size_of::<i64>()
}

pub(super) fn run(source: &mut Source<'_>) {
    let mut world = World::new(source);
    while source.next_step() {
        world.step(source);
        world.check();
    }
    world.end();
}

impl World {
    fn new(source: &mut Source<'_>) -> Self {
        let page_size = source.of(&[1, 2, 4]);
        let pages = 4 + source.below(24);
        let of_kv = KvConfig {
            size: page_size * pages,
            layer_num: LAYERS,
            k_head_num: 1,
            k_head_dim: 2,
            v_head_num: 1,
            v_head_dim: 2,
            dtype: DType::F32,
            page_size,
            layout: source.of(&[KvLayout::Split, KvLayout::Fused]),
            pin_memory: false,
        };
        let kv = Arc::new(KvPool::new(&of_kv, &host()).expect("memory"));
        let of_slots = AllocatorConfig { page_size, strict: true, ..AllocatorConfig::new(of_kv.size) };
        let allocator = Arc::new(TokenToKvPoolAllocator::new(&of_slots, &host()).expect("memory"));
        let states = source.rarely(3).then(|| {
            let config = GdnConfig {
                max_reqs: 2,
                num_gdn_layers: LAYERS,
                num_v_heads: 1,
                head_k_dim: 2,
                head_v_dim: 1,
                conv_dim: 2,
                conv_kernel_size: 2,
                dtype: DType::F32,
                max_track_slots: 1 + source.below(6),
                strict: true,
            };
            Arc::new(GdnPool::new(&config, &host()).expect("memory"))
        });
        let is_large = source.flip();
        let of_tier = HostTierConfig {
            size: page_size * if is_large { 1 << 12 } else { 1 + source.below(30) },
            max_states: states.as_ref().map_or(0, |_| if is_large { 1 << 10 } else { 1 + source.below(8) }),
            write: source.of(&[WritePolicy::Through, WritePolicy::Selective, WritePolicy::Back]),
            pin_memory: false,
            page_lock_threads: 1,
            staging_bytes: 0,
        };
        let tier = Arc::new(HostTier::new(&of_tier, &kv, states.as_ref(), &host()).expect("memory"));
        let is_complete = is_large && of_tier.write == WritePolicy::Through && states.is_none();
        let config = PrefixCacheConfig {
            policy: source.of(&PolicyKind::ALL),
            cost: None,
            max_pinned: 0.5,
            name: "cache".into(),
            events: source.flip().then_some(digest),
        };
        let served = source.flip().then(|| AnsweringStore::new(source.flip()));
        let mut world = Self {
            kv,
            allocator,
            states,
            of_tier,
            tier,
            of_cache: config,
            cache: None,
            served,
            fetches: Vec::new(),
            model: 0,
            page_size,
            held: Vec::new(),
            own: Vec::new(),
            is_complete,
            published: BTreeSet::new(),
            loaded: 0,
        };
        world.open();
        world
    }

    fn cache(&self) -> &PrefixCache {
        self.cache.as_ref().expect("there is one")
    }

    /// A cache on the tier.
    fn open(&mut self) {
        let store = self.served.as_ref().map(|served| LowerStore {
            store: Arc::clone(&served.store) as Arc<dyn Store>,
            model: format!("model {}", self.model),
        });
        let below = LowerTier { host: Arc::clone(&self.tier), digest, store };
        let (config, states) = (self.of_cache.clone(), self.states.clone());
        let cache = PrefixCache::new(config, Arc::clone(&self.allocator), states, Some(below));
        self.cache = Some(cache.expect("they fit"));
    }

    /// Ends the cache, and begins another one, perhaps on another tier or with another model.
    fn restart(&mut self, source: &mut Source<'_>) {
        self.held.clear();
        if source.flip() {
            self.fetches.clear();
        }
        self.settle();
        self.cache = None;
        if self.served.is_some() && source.flip() {
            self.model += 1;
            self.published.clear();
        }
        if source.flip() {
            let states = self.states.as_ref();
            let tier = HostTier::new(&self.of_tier, &self.kv, states, &host()).expect("memory");
            self.tier = Arc::new(tier);
            if !self.has_all_below() {
                self.published.clear();
            }
        }
        self.open();
    }

    /// Whether the store keeps everything.
    fn has_all_below(&self) -> bool {
        self.is_complete && self.served.as_ref().is_some_and(|served| !served.fails())
    }

    fn step(&mut self, source: &mut Source<'_>) {
        match source.below(20) {
            0..=4 => self.start(source),
            5 | 6 => self.go_on(source),
            7 | 8 => self.look(source),
            9 => drop(self.cache().evict(source.below(12), STREAM)),
            10 => self.scribble(source),
            11 => self.free_own(),
            12 => self.drain(),
            13 if source.rarely(4) => {
                let name = source.flip().then(|| Namespace::Number(source.within(0, NAMESPACES - 1)));
                self.cache().clear(name.as_ref(), STREAM);
                let is_named =
                    |number: i64| name.as_ref().is_none_or(|name| *name == Namespace::Number(number));
                self.published.retain(|(number, _)| !is_named(*number));
                for held in self.held.iter_mut().filter(|held| is_named(held.name)) {
                    held.is_cleared = true;
                }
            }
            14 if source.rarely(6) => {
                self.allocator.clear(STREAM);
                self.own.clear();
                self.published.clear();
                self.held.clear();
            }
            15 => self.audit(),
            16 | 17 => self.fetch(source),
            18 => {
                if !self.fetches.is_empty() {
                    let at = source.below(self.fetches.len());
                    let fetch = self.fetches.swap_remove(at);
                    match source.below(3) {
                        0 => assert!(fetch.wait(Duration::from_secs(60)), "it ends"),
                        1 => fetch.cancel(),
                        _ => (),
                    }
                }
            }
            19 if source.rarely(4) => self.restart(source),
            _ => {
                if !self.held.is_empty() {
                    let at = source.below(self.held.len());
                    self.held.swap_remove(at).lease.release(STREAM);
                }
            }
        }
    }

    /// A request: matches, perhaps loads, computes the rest, and publishes.
    fn start(&mut self, source: &mut Source<'_>) {
        let name = source.within(0, NAMESPACES - 1);
        let tokens: Vec<i32> = (0..=source.below(28)).map(|_| i32::from(source.rarely(4))).collect();
        let limit = tokens.len() - usize::from(source.flip());
        let lease = self
            .cache()
            .match_prefix(&Namespace::Number(name), &tokens.as_slice(), limit, STREAM)
            .expect("tokens");
        let (len, loadable) = (lease.len().expect("a lease"), lease.loadable().expect("a lease"));
        assert!((len + loadable) % self.page_size == 0 && len + loadable <= limit);
        let mut held = HeldLease { lease, name, tokens, load: None, is_cleared: false };
        if !source.rarely(4) {
            let limit = if source.rarely(4) { source.below(9) } else { usize::MAX };
            if let Some(load) = held.lease.load(limit, STREAM).expect("nothing fails") {
                let now = held.lease.len().expect("a lease");
                assert_eq!(now, len + load.len());
                assert!(load.len() <= loadable.min(limit));
                assert_eq!(
                    held.lease.loadable().expect("a lease"),
                    if load.is_empty() { loadable } else { 0 }
                );
                self.loaded += load.len();
                if !load.is_empty() {
                    held.load = Some((load, len));
                }
            }
        }
        self.held.push(held);
        if source.flip() {
            let at = self.held.len() - 1;
            self.wait(at, source.below(LAYERS));
            self.compute(source, at);
        }
    }

    /// Looks for a prompt in the store.
    fn fetch(&mut self, source: &mut Source<'_>) {
        if self.served.is_some() && source.rarely(4) {
            // The store alone has its pages. Leases would publish pages that follow those that the tier no
            // longer has.
            self.held.clear();
            self.cache().evict(usize::MAX, STREAM);
            self.settle();
            self.tier.clear(None);
            if !self.has_all_below() {
                self.published.clear();
            }
        }
        let known = (!self.published.is_empty()).then(|| source.below(self.published.len()));
        let (name, tokens) = match known.and_then(|at| self.published.iter().nth(at)) {
            Some(prompt) if source.flip() => prompt.clone(),
            _ => {
                let name = source.within(0, NAMESPACES - 1);
                (name, (0..=source.below(28)).map(|_| i32::from(source.rarely(4))).collect())
            }
        };
        let name = Namespace::Number(name);
        let limit = if source.rarely(3) { source.below(29) } else { usize::MAX };
        let fetch = self.cache().fetch(&name, &tokens.as_slice(), limit, STREAM).expect("tokens");
        if source.flip() {
            assert!(fetch.wait(Duration::from_secs(60)), "it ends");
            assert!(fetch.len() <= limit.min(tokens.len()));
        }
        if source.flip() {
            self.fetches.push(fetch);
        }
    }

    /// A held lease computes, if nothing is on its way.
    fn go_on(&mut self, source: &mut Source<'_>) {
        if !self.held.is_empty() {
            let at = source.below(self.held.len());
            self.compute(source, at);
        }
    }

    /// Waits for layers of a load, and compares them.
    fn wait(&mut self, at: usize, layer: usize) {
        let held = &self.held[at];
        let Some((load, _)) = &held.load else { return };
        load.wait_layer(layer, STREAM).expect("nothing fails");
        self.compare(at, layer + 1);
        if layer + 1 == LAYERS {
            while !self.held[at].load.as_ref().expect("a load").0.query(STREAM).expect("nothing fails") {
                std::thread::yield_now();
            }
            self.held[at].load = None;
        }
    }

    /// Compares the first layers of a lease with its tokens.
    fn compare(&self, at: usize, layers: usize) {
        let HeldLease { lease, name, tokens, .. } = &self.held[at];
        let Ok(pages) = lease.pages(0) else { return };
        let len = lease.len().expect("a lease");
        assert_eq!(pages.len() * self.page_size, len);
        for position in 0..len {
            let slot =
                size(pages[position / self.page_size].number()) * self.page_size + position % self.page_size;
            for layer in 0..layers {
                let views = self.kv.kv_buffer(layer).expect("a layer");
                for (kind, view) in views.iter().enumerate() {
                    let is = contents::read::<i64>(view.region(), row_of(view, slot), 1)[0];
                    let expected = content(self.salted(*name), &tokens[..=position], layer, kind);
                    assert_eq!(is, expected, "position {position} of {len}, layer {layer}, kind {kind}");
                }
            }
        }
        if let Some(states) = &self.states
            && len > 0
            && lease.state_slot().expect("a lease").is_some()
        {
            lease.restore(2, STREAM).expect("a snapshot");
            assert_eq!(Self::state(states, 2), self.expected_state(*name, &tokens[..len]));
        }
    }

    /// The name of contents in a namespace.
    const fn salted(&self, name: i64) -> i64 {
        self.model * NAMESPACES + name
    }

    fn state(states: &GdnPool, slot: usize) -> Vec<i64> {
        let views = [states.recurrent_state(), states.conv_state()];
        let of = |view: &TensorView, layer: usize| {
            let at = row_of(view, layer * states.pool_size() + slot);
            contents::read::<i64>(view.region(), at, 1)[0]
        };
        views.iter().flat_map(|view| (0..LAYERS).map(move |layer| of(view, layer))).collect()
    }

    fn expected_state(&self, name: i64, tokens: &[i32]) -> Vec<i64> {
        (0..2)
            .flat_map(|kind| {
                (0..LAYERS).map(move |layer| content(self.salted(name), tokens, layer, 7 + kind))
            })
            .collect()
    }

    /// Computes some tokens after a lease, and publishes them.
    fn compute(&mut self, source: &mut Source<'_>, at: usize) {
        let HeldLease { lease, name, tokens, load, .. } = &self.held[at];
        let Ok(len) = lease.len() else { return };
        let left = (tokens.len() - len) / self.page_size;
        let count = if source.flip() { left } else { source.below(left + 1) } * self.page_size;
        let Some(grant) = self.allocator.alloc(count, STREAM).expect("nothing fails") else { return };
        let slots = ints_of(&grant.keep());
        for (&slot, position) in slots.iter().zip(len..) {
            for layer in 0..LAYERS {
                for (kind, view) in self.kv.kv_buffer(layer).expect("a layer").iter().enumerate() {
                    let value = content(self.salted(*name), &tokens[..=position], layer, kind);
                    contents::write(view.region(), row_of(view, size(slot)), &[value]);
                }
            }
        }
        let new = &tokens[len..len + count];
        let slots = IndexVec::I32(slots);
        let state = self.states.as_ref().filter(|_| len + count > 0 && !source.rarely(3)).map(|states| {
            let values = self.expected_state(*name, &tokens[..len + count]);
            let views = [states.recurrent_state(), states.conv_state()];
            let places = views.iter().flat_map(|view| (0..LAYERS).map(move |layer| (view, layer)));
            for ((view, layer), value) in places.zip(values) {
                let at = row_of(view, layer * states.pool_size() + 1);
                contents::write(view.region(), at, &[value]);
            }
            1
        });
        let published = lease.publish(&Publication { tokens: &new, slots: Some(&slots), state }, STREAM);
        match published {
            Ok(published) => {
                assert_eq!(published.length, len + count);
                let found = if self.held[at].is_cleared { 0 } else { len + count };
                for end in (self.page_size..=found).step_by(self.page_size) {
                    self.published.insert((*name, tokens[..end].to_vec()));
                }
                self.held[at].load = None;
                self.compare(at, LAYERS);
            }
            Err(error) => {
                // The call fails while it loads, and only then.
                assert!(load.is_some() && error.kind() == ErrorKind::State, "{error}");
                self.free(&slots);
            }
        }
    }

    /// Looks at a lease: compares it with the model, or waits for, queries or cancels its load.
    fn look(&mut self, source: &mut Source<'_>) {
        if self.held.is_empty() {
            return;
        }
        let at = source.below(self.held.len());
        let Some((load, before)) = &self.held[at].load else { return self.compare(at, LAYERS) };
        match source.below(4) {
            0 => self.wait(at, source.below(LAYERS)),
            1 => {
                let whole = before + load.len();
                load.cancel(STREAM).expect("no planner has it");
                let len = self.held[at].lease.len().expect("a lease");
                // The prefix was there already, or it was dropped.
                assert!(len == *before || len == whole, "{len} of {before} and {whole}");
                self.held[at].load = None;
                self.compare(at, LAYERS);
            }
            2 => {
                if load.query(STREAM).expect("nothing fails") {
                    self.held[at].load = None;
                    self.compare(at, LAYERS);
                }
            }
            _ => self.wait(at, LAYERS - 1),
        }
    }

    fn scribble(&mut self, source: &mut Source<'_>) {
        let count = source.below(6) * self.page_size;
        let Some(grant) = self.allocator.alloc(count, STREAM).expect("nothing fails") else { return };
        let slots = ints_of(&grant.keep());
        for (view, &slot) in
            self.all_views().iter().flat_map(|view| slots.iter().map(move |slot| (view, slot)))
        {
            contents::write(view.region(), row_of(view, size(slot)), &[SCRIBBLE]);
        }
        self.own.push(IndexVec::I32(slots));
    }

    fn all_views(&self) -> Vec<TensorView> {
        (0..LAYERS).flat_map(|layer| self.kv.kv_buffer(layer).expect("a layer")).collect()
    }

    fn free_own(&mut self) {
        for slots in std::mem::take(&mut self.own) {
            self.free(&slots);
        }
    }

    fn free(&self, slots: &IndexVec) {
        let freed = self.allocator.free(&Indices::Host(slots.clone()), STREAM);
        assert_eq!(freed.expect("they are ours").dropped(), 0);
    }

    /// Waits until nothing is copied down any more.
    fn drain(&self) {
        let begin = Instant::now();
        loop {
            let _ = self.cache().sizes(STREAM);
            if self.tier.stats().get("arriving") == Some(0) {
                // A thread that takes note of it holds the lock until the store has it, too.
                let _ = self.cache().sizes(STREAM);
                return;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "copies end");
            std::thread::yield_now();
        }
    }

    /// Waits until nothing is put any more.
    fn settle(&self) {
        self.drain();
        let begin = Instant::now();
        while self.tier.stats().get("storing") != Some(0) {
            assert!(begin.elapsed() < Duration::from_secs(60), "calls end");
            std::thread::yield_now();
        }
    }

    /// Checks that what was published is on the device or below, if the tier is large enough.
    fn audit(&mut self) {
        if !self.is_complete {
            return;
        }
        self.settle();
        self.cache().evict(usize::MAX, STREAM);
        self.fetches.clear();
        if self.has_all_below() {
            self.tier.clear(None);
            for (name, tokens) in &self.published {
                let name = Namespace::Number(*name);
                let fetch =
                    self.cache().fetch(&name, &tokens.as_slice(), usize::MAX, STREAM).expect("tokens");
                assert!(fetch.wait(Duration::from_secs(60)), "it ends");
            }
        }
        for (name, tokens) in &self.published {
            let name = Namespace::Number(*name);
            let lease =
                self.cache().match_prefix(&name, &tokens.as_slice(), tokens.len(), STREAM).expect("tokens");
            assert_eq!(
                lease.len().expect("a lease") + lease.loadable().expect("a lease"),
                tokens.len(),
                "{tokens:?} of {name} was published"
            );
        }
    }

    fn check(&self) {
        self.cache().verify(STREAM).expect("consistent");
        self.tier.verify().expect("consistent");
        self.allocator.verify().expect("consistent");
        for slots in &self.own {
            for slot in slots.iter() {
                for view in self.all_views() {
                    let is = contents::read::<i64>(view.region(), row_of(&view, size(slot)), 1)[0];
                    assert_eq!(is, SCRIBBLE, "slot {slot} is not the cache's");
                }
            }
        }
        let (sizes, stats) = (self.cache().sizes(STREAM), self.allocator.stats());
        assert_eq!(sizes.evictable + sizes.locked, stats.cached, "every cached page is counted");
    }

    fn end(mut self) {
        self.free_own();
        self.held.clear();
        self.fetches.clear();
        self.drain();
        self.cache().clear(None, STREAM);
        // Fences of loads and of copies.
        let begin = Instant::now();
        let is_back = || {
            let available = self.allocator.poll_available_size(STREAM).expect("nothing fails");
            let tracks =
                self.states.as_ref().map_or(0, |states| states.with_tracks(|tracks| tracks.rows().in_use()));
            available == self.allocator.stats().capacity && tracks == 0
        };
        while !is_back() {
            assert!(
                begin.elapsed() < Duration::from_secs(60),
                "all comes back: {:?}",
                self.allocator.stats()
            );
            std::thread::yield_now();
        }
        self.tier.verify().expect("consistent");
        assert_eq!(self.tier.stats().get("pages"), Some(0));
    }
}
