//! Policies of the prefix cache: the order of each, and what `adaptive` learns.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvpool::base::{Id, IndexVec, Page, widen};
use kvpool::cache::{
    BlockKey, BlockTokens, Cause, History, MakePolicy, Namespace, NodeId, Novelty, Outlook, Policy,
    PolicyKind, Pressure, Remembered, ResumeAt, Tick, Tree,
};
use kvpool::memory::{Backend, Host, Stream};
use kvpool::pool::{AllocatorConfig, PrefixCache, PrefixCacheConfig, TokenToKvPoolAllocator};
use proptest::prelude::*;

/// Tokens of a block.
const BLOCK: u32 = 64;

fn history(published: u64, last: u64, uses: u32, priority: u8) -> History {
    History {
        published: Tick::new(published),
        used: Tick::new(last),
        uses,
        priority,
        outlook: Outlook::Unknown,
        novelty: Novelty::default(),
    }
}

/// The order in which a policy evicts leaves numbered from 0.
fn order(kind: PolicyKind, leaves: &[History]) -> Vec<u32> {
    let now = Tick::new(1000);
    let mut policy = kind.policy(1 << 20, BlockTokens::of_page_size(16), None);
    for (number, history) in (0..).zip(leaves) {
        policy.insert(NodeId::new(number), 0..BLOCK, history, now);
    }
    drain(policy.as_mut(), now)
}

fn drain(policy: &mut dyn Policy, now: Tick) -> Vec<u32> {
    let mut order = Vec::new();
    while let Some(leaf) = policy.victim(now) {
        policy.remove(leaf);
        order.push(leaf.number());
    }
    order
}

#[test]
fn each_policy_has_its_order() {
    let leaves = [
        history(10, 900, 3, 1),
        history(40, 40, 1, 0),
        history(20, 300, 2, 0),
        history(30, 100, 9, 0),
        history(50, 800, 1, 2),
    ];
    assert_eq!(order(PolicyKind::Lru, &leaves), [1, 3, 2, 4, 0]);
    assert_eq!(order(PolicyKind::Fifo, &leaves), [0, 2, 3, 1, 4]);
    assert_eq!(order(PolicyKind::Lfu, &leaves), [1, 4, 2, 0, 3]);
    assert_eq!(order(PolicyKind::Slru, &leaves), [1, 4, 3, 2, 0]);
    assert_eq!(order(PolicyKind::Priority, &leaves), [1, 3, 2, 0, 4]);
    // Before anything is learned, recency decides.
    assert_eq!(order(PolicyKind::Adaptive, &leaves), order(PolicyKind::Lru, &leaves));
}

#[test]
fn a_victim_stays_until_it_is_removed() {
    for kind in PolicyKind::ALL {
        let mut policy = kind.policy(1024, BlockTokens::of_page_size(1), None);
        let now = Tick::new(5);
        assert_eq!(policy.victim(now), None, "{}", kind.name());
        policy.insert(NodeId::new(3), 0..1, &history(1, 1, 1, 0), now);
        assert_eq!(policy.victim(now), Some(NodeId::new(3)));
        assert_eq!(policy.victim(now), Some(NodeId::new(3)));
        policy.remove(NodeId::new(3));
        assert_eq!(policy.victim(now), None);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever happens, a policy holds the leaves that were inserted and not removed.
    #[test]
    fn policies_hold_their_leaves(
        kind in prop::sample::select(PolicyKind::ALL.to_vec()),
        capacity in 1..5000u64,
        steps in prop::collection::vec((0..6u8, 0..40u32, 0..3000u64), 1..400),
    ) {
        let mut policy = kind.policy(capacity, BlockTokens::of_page_size(1), None);
        let mut held = BTreeMap::new();
        let mut now = 0;
        for (action, number, value) in steps {
            let leaf = NodeId::new(number);
            let tick = Tick::new(now);
            let novelty = policy.record_request(number);
            match action {
                0 | 1 if !held.contains_key(&number) => {
                    // Uses are mostly recent; a parent can be much older.
                    let used = if action == 0 { now } else { now - value.min(now) };
                    let known = history(used / 2, used, number % 5 + 1, 0);
                    policy.insert(leaf, number..number + 1, &known, tick);
                    held.insert(number, known);
                }
                2 => if let Some(known) = held.remove(&number) {
                    policy.remove(leaf);
                    policy.record_use(&known, &known.used_again(novelty, tick), 0..BLOCK);
                },
                3 => if let Some(victim) = policy.victim(tick) {
                    let known = held.remove(&victim.number());
                    prop_assert!(known.is_some());
                    let may_go = policy.may_evict(number..number + BLOCK, &known.unwrap());
                    prop_assert!(may_go <= BLOCK);
                    policy.record_evicted(number..number + may_go, &known.unwrap(), tick);
                    policy.remove(victim);
                    policy.remember(key(u32::from(victim.number() % 7 == 0)), &known.unwrap(), tick);
                },
                4 => {
                    let before = policy.record_publication(key(number), 0..BLOCK, tick);
                    policy.record_new(&History::of_new(before, novelty, tick), BLOCK);
                }
                5 if value % 8 == 0 => policy.record_fragment(number, tick),
                _ => now += value,
            }
            prop_assert_eq!(policy.victim(Tick::new(now)).is_some(), !held.is_empty());
        }
        let left: BTreeSet<u32> = drain(policy.as_mut(), Tick::new(now)).into_iter().collect();
        prop_assert_eq!(left, held.into_keys().collect::<BTreeSet<_>>());
    }
}

fn key(block: u32) -> BlockKey {
    // The finalizer of MurmurHash3.
    let mut hash = u64::from(block) + 1;
    for factor in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
    }
    BlockKey::new(hash ^ (hash >> 33))
}

/// A cache of single blocks without a tree.
struct Blocks {
    policy: Box<dyn Policy>,
    cached: BTreeMap<u32, History>,
    capacity: usize,
    now: u64,
}

impl Blocks {
    fn new(kind: PolicyKind, capacity: usize) -> Self {
        let tokens = capacity as u64 * u64::from(BLOCK);
        let policy = kind.policy(tokens, BlockTokens::of_page_size(BLOCK), None);
        Self { policy, cached: BTreeMap::new(), capacity, now: 0 }
    }

    /// Asks for a block. Returns whether it was found.
    fn ask(&mut self, block: u32) -> bool {
        self.ask_as(block, Novelty::default())
    }

    /// Asks for a block in a request of this novelty.
    fn ask_as(&mut self, block: u32, novelty: Novelty) -> bool {
        self.now += u64::from(BLOCK);
        let (now, leaf, policy) = (Tick::new(self.now), NodeId::new(block), &mut self.policy);
        let is_found = self.cached.contains_key(&block);
        if let Some(history) = self.cached.get_mut(&block) {
            policy.remove(leaf);
            let after = history.used_again(novelty, now);
            policy.record_use(history, &after, 0..BLOCK);
            *history = after;
        } else {
            if self.cached.len() == self.capacity {
                let victim = policy.victim(now).unwrap();
                policy.remove(victim);
                let history = self.cached.remove(&victim.number()).unwrap();
                policy.record_evicted(0..BLOCK, &history, now);
                policy.remember(key(victim.number()), &history, now);
            }
            let before = policy.record_publication(key(block), 0..BLOCK, now);
            let history = History::of_new(before, novelty, now);
            policy.record_new(&history, BLOCK);
            self.cached.insert(block, history);
        }
        policy.insert(leaf, 0..BLOCK, &self.cached[&block], now);
        is_found
    }
}

/// Returns how many of `requests` a cache of single blocks finds.
fn found(kind: PolicyKind, capacity: usize, requests: &[u32]) -> usize {
    let mut cache = Blocks::new(kind, capacity);
    requests.iter().filter(|&&block| cache.ask(block)).count()
}

/// A cache of prompts of five pages of 16 tokens: a block of 64, and a page that fills none. Others have the memory of
/// `in_use` more. Returns how many of `requests` it finds.
fn found_with_fragments(
    kind: PolicyKind,
    capacity: usize,
    in_use: usize,
    requests: impl Iterator<Item = i32>,
) -> usize {
    let policy = kind.policy(80 * (capacity + in_use) as u64, BlockTokens::of_page_size(16), None);
    let mut tree = Tree::new(16, ResumeAt::AnyPage, policy);
    let mut free: Vec<Page> = (1..).map(Page::new).take(5 * capacity).collect();
    requests.filter(|&request| ask(&mut tree, &mut free, request, |_| ())).count()
}

/// Asks for a prompt of five pages. Returns whether all were found.
fn ask(tree: &mut Tree, free: &mut Vec<Page>, request: i32, mut on_evicted: impl FnMut(&[Page])) -> bool {
    let prompt: Vec<i32> = (0..80).map(|at| 80 * request + at).collect();
    let mut hold = tree.match_prefix(&Namespace::Unnamed, &&prompt[..], usize::MAX).unwrap();
    let is_found = hold.len() == prompt.len();
    let rest = &prompt[hold.len()..];
    let pages = rest.len() / 16;
    if free.len() < pages {
        let cause = Cause { pressure: Pressure::Alloc, at: Instant::now() };
        let evicted = tree.evict(pages - free.len(), cause).pages;
        on_evicted(&evicted);
        free.extend(evicted);
    }
    let known = tree.find(&hold, &rest).unwrap();
    let pages: Vec<Page> = free.split_off(free.len() - pages);
    tree.publish(&mut hold, known, rest.to_vec(), &pages);
    drop(tree.release(hold));
    is_found
}

#[test]
fn adaptive_learns_from_prompts_that_end_within_blocks() {
    // Recency finds nothing of 90 prompts in turn, of which 80 fit. It would find all of them if 100 did: so many
    // seem to fit if the pages after the last block do not count.
    let requests = || (0..9000).map(|at| at % 90);
    assert_eq!(found_with_fragments(PolicyKind::Lru, 80, 0, requests()), 0);
    let learned = found_with_fragments(PolicyKind::Adaptive, 80, 0, requests());
    assert!(learned > 4000, "{learned}");
}

#[test]
fn adaptive_learns_beside_requests_that_have_memory() {
    // Recency would find all of 90 prompts in turn if it had the memory of all 160.
    let requests = || (0..9000).map(|at| at % 90);
    assert_eq!(found_with_fragments(PolicyKind::Lru, 80, 80, requests()), 0);
    let learned = found_with_fragments(PolicyKind::Adaptive, 80, 80, requests());
    assert!(learned > 4000, "{learned}");
}

/// Numbers without a pattern, below `below`.
fn numbers(below: u32) -> impl Iterator<Item = u32> {
    let mut state = 1_u32;
    std::iter::repeat_with(move || {
        // xorshift32
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state % below
    })
}

#[test]
fn adaptive_keeps_blocks_that_are_used_again() {
    // Every fourth block is one of 60, the others come once.
    let requests: Vec<u32> = numbers(60)
        .zip(60..)
        .take(20_000)
        .map(|(known, new)| if new % 4 == 0 { known } else { new })
        .collect();
    let [recency, learned] = [PolicyKind::Lru, PolicyKind::Adaptive].map(|kind| found(kind, 80, &requests));
    assert!(recency < 2000, "{recency}");
    assert!(learned > 4000, "{learned}");
}

#[test]
fn adaptive_keeps_part_of_a_loop_that_does_not_fit() {
    let requests: Vec<u32> = (0..20_000).map(|at| at % 120).collect();
    assert_eq!(found(PolicyKind::Lru, 100, &requests), 0);
    let learned = found(PolicyKind::Adaptive, 100, &requests);
    assert!(learned > 10_000, "{learned}");
}

#[test]
fn adaptive_is_as_good_as_recency_where_that_is_best() {
    // Blocks come again from a stack, the likelier the less deep, or are new.
    let mut stack: VecDeque<u32> = VecDeque::new();
    let mut depths = numbers(1 << 20);
    let mut requests = Vec::new();
    for new in 0..20_000_u32 {
        let depth = widen(1_u32 << (depths.next().unwrap() % 11)) - 1 + widen(depths.next().unwrap() % 2);
        let block = stack.remove(depth).unwrap_or(new);
        stack.push_front(block);
        requests.push(block);
    }
    for capacity in [5, 20, 80, 300] {
        let [recency, learned] =
            [PolicyKind::Lru, PolicyKind::Adaptive].map(|kind| found(kind, capacity, &requests));
        assert!(learned * 100 >= recency * 97, "{capacity}: {learned} of {recency}");
    }
}

#[test]
fn adaptive_is_nearly_as_good_as_recency_for_requests_that_know_it() {
    // Every other request is for a block that recency has and the policy has not, if there is one.
    let mut recency: VecDeque<u32> = VecDeque::new();
    let mut cache = Blocks::new(PolicyKind::Adaptive, 80);
    let [mut by_recency, mut learned] = [0, 0];
    for (at, known) in numbers(60).take(60_000).enumerate() {
        let missing = recency.iter().find(|block| !cache.cached.contains_key(block));
        let block = match missing {
            Some(&block) if at % 2 == 0 => block,
            _ if at % 8 < 6 => known,
            _ => at.try_into().unwrap(),
        };
        learned += usize::from(cache.ask(block));
        let place = recency.iter().position(|&other| other == block);
        by_recency += usize::from(place.is_some());
        place.map(|place| recency.remove(place));
        recency.push_front(block);
        recency.truncate(80);
    }
    assert!(learned * 100 >= by_recency * 97, "{learned} of {by_recency}");
}

/// Returns the pages that a cache of `capacity` pages finds of prompts, each of which is a run of pages.
fn found_pages(kind: PolicyKind, capacity: usize, prompts: &[Vec<i32>]) -> usize {
    let policy = kind.policy(64 * capacity as u64, BlockTokens::of_page_size(64), None);
    let mut tree = Tree::new(64, ResumeAt::AnyPage, policy);
    let (mut free, mut found) = ((1..).map(Page::new).take(capacity).collect::<Vec<_>>(), 0);
    for prompt in prompts {
        let tokens: Vec<i32> = prompt.iter().flat_map(|&page| [page; 64]).collect();
        let mut hold = tree.match_prefix(&Namespace::Unnamed, &&tokens[..], usize::MAX).unwrap();
        let rest = &tokens[hold.len()..];
        let pages = rest.len() / 64;
        found += hold.len() / 64;
        if free.len() < pages {
            let cause = Cause { pressure: Pressure::Alloc, at: Instant::now() };
            free.extend(tree.evict(pages - free.len(), cause).pages);
        }
        let known = tree.find(&hold, &rest).unwrap();
        let pages = free.split_off(free.len() - pages);
        tree.publish(&mut hold, known, rest.to_vec(), &pages);
        drop(tree.release(hold));
    }
    found
}

#[test]
fn adaptive_finds_what_recency_finds_in_caches_of_few_prompts() {
    // Most prompts come once. Old ones come again for a while, so that it seems best to keep these; then the last ones do,
    // which recency has.
    let mut random = numbers(1 << 16);
    let mut next = |below: u32| random.next().unwrap() % below;
    let (mut prompts, mut page): (Vec<Vec<i32>>, _) = (Vec::new(), 0);
    for at in 0..3_000 {
        let again = match at % 500 {
            0..150 => Some(60 + widen(next(40))),
            350..500 => Some(1 + widen(next(8))),
            _ => None,
        };
        let again = again.filter(|&back| back < prompts.len() && next(3) == 0);
        let prompt = again.map_or_else(
            || {
                let pages = 10 + next(80).cast_signed();
                page += pages;
                (page - pages..page).collect()
            },
            |back| prompts[prompts.len() - back].clone(),
        );
        prompts.push(prompt);
    }
    for capacity in [100, 150, 225, 340, 500, 750, 1_100, 1_700, 2_500] {
        let [recency, learned] =
            [PolicyKind::Lru, PolicyKind::Adaptive].map(|kind| found_pages(kind, capacity, &prompts));
        assert!(learned * 100 >= recency * 97, "{capacity}: {learned} of {recency}");
    }
}

#[test]
fn policies_have_names() {
    for kind in PolicyKind::ALL {
        assert_eq!(PolicyKind::parse(kind.name()).unwrap().name(), kind.name());
    }
    let error = PolicyKind::parse("mru").unwrap_err();
    assert!(error.to_string().contains("lru, fifo, lfu, slru, priority, adaptive"), "{error}");
}

/// Ranks of one model have a cache each, which must find the same.
#[test]
fn caches_that_get_the_same_calls_decide_the_same() {
    // More blocks are evicted than a policy remembers, so that it forgets some.
    let requests: Vec<i32> = numbers(2600).take(20_000).map(u32::cast_signed).collect();
    let [one, other] = [(), ()].map(|()| evicted_by_adaptive(80, &requests));
    assert!(one.len() > 10_000);
    assert!(one == other, "two caches evict other pages");
}

/// Returns the pages that a cache of prompts evicts, in order.
fn evicted_by_adaptive(capacity: usize, requests: &[i32]) -> Vec<Page> {
    let policy = PolicyKind::Adaptive.policy(80 * capacity as u64, BlockTokens::of_page_size(16), None);
    let mut tree = Tree::new(16, ResumeAt::AnyPage, policy);
    let mut free: Vec<Page> = (1..).map(Page::new).take(5 * capacity).collect();
    let mut evicted = Vec::new();
    for request in requests {
        ask(&mut tree, &mut free, *request, |pages| evicted.extend_from_slice(pages));
    }
    evicted
}

/// Evicts the leaf that became evictable last.
#[derive(Debug, Default)]
struct Newest(Vec<NodeId>);

impl Policy for Newest {
    fn insert(&mut self, leaf: NodeId, _positions: Range<u32>, _history: &History, _now: Tick) {
        self.0.push(leaf);
    }

    fn remove(&mut self, leaf: NodeId) {
        self.0.retain(|&other| other != leaf);
    }

    fn victim(&mut self, _now: Tick) -> Option<NodeId> {
        self.0.last().copied()
    }

    fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<NodeId>()
    }
}

#[test]
fn a_cache_evicts_by_a_policy_of_the_caller() {
    let host: Arc<dyn Backend> = Arc::new(Host);
    let slots = Arc::new(TokenToKvPoolAllocator::new(&AllocatorConfig::new(4), &host).unwrap());
    let make: MakePolicy = |_capacity, _block, _cost| Box::new(Newest::default());
    let policy = PolicyKind::Own(make);
    assert_eq!(policy.name(), "own");
    let config =
        PrefixCacheConfig { policy, cost: None, max_pinned: 0.5, name: "cache".into(), events: None };
    let cache = PrefixCache::new(config, Arc::clone(&slots), None, None).unwrap();
    let stream = Stream::DEFAULT;
    for (prompt, taken) in [([1, 2], vec![1, 2]), ([3, 4], vec![3, 4])] {
        let prompt: &[i32] = &prompt;
        let lease = cache.match_prefix(&Namespace::Unnamed, &prompt, 2, stream).unwrap();
        drop(slots.alloc(2, stream).unwrap().expect("4 are free").keep());
        lease.finish(&prompt, &IndexVec::I32(taken), stream).unwrap();
    }
    assert_eq!(cache.evict(2, stream), 2);
    let found = |prompt: &[i32]| cache.cached_len(&Namespace::Unnamed, &prompt, stream).unwrap();
    assert_eq!((found(&[1, 2]), found(&[3, 4])), (2, 0));
}

/// Evicts the leaf that became evictable last, three tokens at a time, and keeps what was evicted.
#[derive(Debug, Default)]
struct Parts {
    newest: Newest,
    evicted: Arc<Mutex<Vec<Range<u32>>>>,
}

impl Policy for Parts {
    fn insert(&mut self, leaf: NodeId, positions: Range<u32>, history: &History, now: Tick) {
        self.newest.insert(leaf, positions, history, now);
    }

    fn remove(&mut self, leaf: NodeId) {
        self.newest.remove(leaf);
    }

    fn victim(&mut self, now: Tick) -> Option<NodeId> {
        self.newest.victim(now)
    }

    fn bytes(&self) -> usize {
        self.newest.bytes()
    }

    fn may_evict(&mut self, positions: Range<u32>, _history: &History) -> u32 {
        3.min(positions.end - positions.start)
    }

    fn record_evicted(&mut self, positions: Range<u32>, _history: &History, _now: Tick) {
        self.evicted.lock().unwrap().push(positions);
    }
}

#[test]
fn a_policy_limits_and_sees_what_is_evicted() {
    let evicted = Arc::default();
    let policy = Parts { evicted: Arc::clone(&evicted), ..Parts::default() };
    let mut tree = Tree::new(2, ResumeAt::AnyPage, Box::new(policy));
    let cause = || Cause { pressure: Pressure::Alloc, at: Instant::now() };
    for (prompt, first_page) in [(0..8, 0), (20..32, 10)] {
        let prompt: Vec<i32> = prompt.collect();
        let pages: Vec<Page> = (first_page..).map(Page::new).take(prompt.len() / 2).collect();
        let mut hold = tree.match_prefix(&Namespace::Unnamed, &&prompt[..], usize::MAX).unwrap();
        let known = tree.find(&hold, &&prompt[..]).unwrap();
        tree.publish(&mut hold, known, prompt, &pages);
        drop(tree.release(hold));
    }
    // Three tokens are a page of two; the last one is wanted in any case.
    assert_eq!(tree.evict(3, cause()).pages, [15, 14, 13].map(Page::new));
    assert_eq!(*evicted.lock().unwrap(), [10..12, 8..10, 6..8]);
    evicted.lock().unwrap().clear();
    // What is cleared was not evicted.
    drop(tree.clear(None, Cause { pressure: Pressure::Clear, at: Instant::now() }));
    assert_eq!(*evicted.lock().unwrap(), []);
}

#[test]
fn what_long_requests_leave_is_not_taken_for_what_short_ones_leave() {
    let found = [Novelty::Low, Novelty::High].map(|of_long| {
        let mut cache = Blocks::new(PolicyKind::Adaptive, 100);
        let mut found = 0;
        // A short request is continued once, 60 requests later; a long one never.
        for request in 0..2_000 {
            cache.ask_as(5 * request, Novelty::Low);
            (1..5).for_each(|more| _ = cache.ask_as(5 * request + more, of_long));
            if request >= 60 {
                found += u32::from(cache.ask_as(5 * (request - 60), Novelty::Low));
            }
        }
        found
    });
    assert!(found[0] < 800 && found[1] > 1_200, "{found:?}");
}

/// What a policy was told of pages: their positions, and how new the request was that used them.
type Told = Arc<Mutex<Vec<(Range<u32>, Novelty)>>>;

/// A policy that knows what is much, and remembers all blocks.
#[derive(Debug)]
struct Thirds {
    told: Told,
    leaves: BTreeSet<NodeId>,
    evicted: Vec<BlockKey>,
    requests: Arc<Mutex<Vec<u32>>>,
}

impl Policy for Thirds {
    fn insert(&mut self, leaf: NodeId, positions: Range<u32>, history: &History, _now: Tick) {
        self.leaves.insert(leaf);
        self.told.lock().unwrap().push((positions, history.novelty));
    }

    fn remove(&mut self, leaf: NodeId) {
        self.leaves.remove(&leaf);
    }

    fn victim(&mut self, _now: Tick) -> Option<NodeId> {
        self.leaves.first().copied()
    }

    fn bytes(&self) -> usize {
        0
    }

    fn record_request(&mut self, new: u32) -> Novelty {
        self.requests.lock().unwrap().push(new);
        self.novelty(new)
    }

    fn novelty(&self, new: u32) -> Novelty {
        match new {
            0..100 => Novelty::Low,
            100..150 => Novelty::Middle,
            _ => Novelty::High,
        }
    }

    fn record_use(&mut self, _before: &History, after: &History, positions: Range<u32>) {
        self.told.lock().unwrap().push((positions, after.novelty));
    }

    fn record_publication(&mut self, key: BlockKey, _positions: Range<u32>, _now: Tick) -> Remembered {
        let known = self.evicted.iter().position(|&evicted| evicted == key);
        Remembered { uses: u32::from(known.map(|at| self.evicted.remove(at)).is_some()) }
    }

    fn remember(&mut self, key: BlockKey, _history: &History, _now: Tick) {
        self.evicted.push(key);
    }
}

#[test]
fn pages_are_as_new_as_the_request_that_used_them_last() {
    let (told, requests) = (Told::default(), Arc::default());
    let policy = Thirds {
        told: told.clone(),
        leaves: BTreeSet::new(),
        evicted: Vec::new(),
        requests: Arc::clone(&requests),
    };
    let mut tree = Tree::new(16, ResumeAt::AnyPage, Box::new(policy));
    let mut next = 0;
    let mut request = |tree: &mut Tree, tokens: i32, step: usize| {
        let tokens: Vec<i32> = (0..tokens).collect();
        let mut hold = tree.match_prefix(&Namespace::Unnamed, &tokens.as_slice(), tokens.len()).unwrap();
        while hold.len() < tokens.len() {
            let rest = &tokens[hold.len()..tokens.len().min(hold.len() + step)];
            let found = tree.find(&hold, &rest).unwrap();
            let pages: Vec<_> = (next..).take(rest.len() / 16).map(Page::new).collect();
            next += 1000;
            tree.publish(&mut hold, found, rest.to_vec(), &pages);
        }
        drop(tree.release(hold));
        std::mem::take(&mut *told.lock().unwrap())
    };
    // Each step adds few tokens, but the request has many.
    assert_eq!(request(&mut tree, 640, 64), [(0..640, Novelty::High)]);
    assert_eq!(request(&mut tree, 704, 64), [(0..640, Novelty::Low), (640..704, Novelty::Low)]);
    let cause = Cause { pressure: Pressure::Alloc, at: Instant::now() };
    assert_eq!(tree.evict(4, cause).pages.len(), 4);
    // 192 are missing, of which 64 are remembered. What was found is as new as what is missing. (The leaf begins with
    // the last page of a block, by which the block is remembered.)
    let (low, middle, high) = ((0..640, Novelty::Low), Novelty::Middle, Novelty::High);
    assert_eq!(request(&mut tree, 832, 192), [low, (0..640, high), (752..832, middle)]);
    // All of a prompt is remembered, and nothing new.
    assert_eq!(tree.evict(52, cause).pages.len(), 52);
    told.lock().unwrap().clear();
    assert!(request(&mut tree, 832, 832).iter().all(|(_, novelty)| *novelty == Novelty::Low));
    assert_eq!(*requests.lock().unwrap(), [640, 64, 192, 832]);
}
