//! The objects that leases and planners own, and when they go.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use kvpool::base::{ErrorKind, IndexVec, Result};
use kvpool::cache::{Namespace, PolicyKind, Tokens};
use kvpool::engines::{SlotTree, SlotTreeConfig};
use kvpool::kernels::{Indices, read_indices};
use kvpool::memory::{Backend, Host, Stream};
use kvpool::pool::{
    AllocatorConfig, Batch, BatchPlanner, Fence, GdnPool, HostTier, HostTierConfig, KvConfig, KvPool, Lease,
    LowerTier, PlannerConfig, Pool, Prefix, PrefixCache, PrefixCacheConfig, Publication, ReqToTokenConfig,
    ReqToTokenPool, TokenToKvPoolAllocator,
};

use crate::histories::disks::digest;
use crate::pool_table::{GDN, KV, TIER};

const STREAM: Stream = Stream::DEFAULT;
const PROMPT: &[i32] = &[5, 6, 7, 8];

struct NeverPassingFence;

impl Fence for NeverPassingFence {
    fn has_passed(&self) -> Result<bool> {
        Ok(false)
    }
}

struct Scene {
    slots: Arc<TokenToKvPoolAllocator>,
    planner: Arc<BatchPlanner>,
    cache: PrefixCache,
    lease: Arc<Lease>,
    row: IndexVec,
}

/// A request whose prompt has slots.
fn scene() -> Scene {
    let host: Arc<dyn Backend> = Arc::new(Host);
    let config = AllocatorConfig { strict: true, ..AllocatorConfig::new(16) };
    let slots = Arc::new(TokenToKvPoolAllocator::new(&config, &host).unwrap());
    let config = ReqToTokenConfig { strict: true, ..ReqToTokenConfig::new(1, 16) };
    let table = Arc::new(ReqToTokenPool::new(&config, &host).unwrap());
    let config = PlannerConfig::new(1, 16);
    let planner = BatchPlanner::new(&config, &host, Arc::clone(&slots), Arc::clone(&table)).unwrap();
    let config = PrefixCacheConfig {
        policy: PolicyKind::Lru,
        cost: None,
        max_pinned: 0.5,
        name: "cache".into(),
        events: None,
    };
    let cache = PrefixCache::new(config, Arc::clone(&slots), None, None).unwrap();
    let row = i64::from(table.alloc(1, STREAM).unwrap().unwrap()[0]);
    let row = IndexVec::I64(vec![row]);
    let lease = cache.match_prefix(&Namespace::Unnamed, &PROMPT, 0, STREAM).unwrap();
    let prefixes = [Prefix::Leased(Arc::clone(&lease))];
    let batch = Batch { rows: &row, prefix_lens: &[0], seq_lens: &[4], prefixes: &prefixes };
    assert!(planner.extend(batch, STREAM).unwrap().is_some());
    Scene { slots, planner, cache, lease, row }
}

/// Tokens whose reader drops the last handle of the planner, as another thread may.
#[derive(Debug)]
struct DroppingTokens(Mutex<Option<Arc<BatchPlanner>>>);

impl Tokens for DroppingTokens {
    fn count(&self) -> usize {
        PROMPT.len()
    }

    fn common(&self, at: usize, with: &[i32]) -> Result<usize> {
        PROMPT.common(at, with)
    }

    fn read(&self, range: Range<usize>, out: &mut Vec<i32>) -> Result<()> {
        drop(self.0.lock().unwrap().take());
        PROMPT.read(range, out)
    }

    fn check(&self, range: Range<usize>) -> Result<()> {
        PROMPT.check(range)
    }
}

#[test]
fn a_planner_dropped_during_a_publication_holds_no_locks() {
    let Scene { slots, planner, cache, lease, .. } = scene();
    // The request's lease is the only one, and ends in the cache with the planner.
    let weak = Arc::downgrade(&planner);
    let tokens = DroppingTokens(Mutex::new(Some(planner)));
    let published =
        lease.publish(&Publication { tokens: &tokens, slots: None, state: None }, STREAM).unwrap();
    assert_eq!((published.length, weak.strong_count()), (4, 0));
    drop(lease);
    assert_eq!((cache.tree_stats(STREAM).evictable, slots.stats().in_use), (4, 4));
}

#[test]
fn slots_of_another_request_are_not_published() {
    let scene = scene();
    let own = scene.slots.alloc(4, STREAM).unwrap().unwrap().keep();
    let own = read_indices(&own.borrow()).unwrap();
    let publication = Publication { tokens: &PROMPT, slots: Some(&own), state: None };
    let error = scene.lease.publish(&publication, STREAM).unwrap_err();
    assert_eq!((error.kind(), scene.cache.tree_stats(STREAM).cached), (ErrorKind::Argument, 0), "{error}");
}

#[test]
fn an_allocator_is_dropped_although_a_fence_never_passes() {
    let Scene { slots, planner, cache, lease, row } = scene();
    lease.publish(&Publication { tokens: &PROMPT, slots: None, state: None }, STREAM).unwrap();
    let fence: Arc<dyn Fence> = Arc::new(NeverPassingFence);
    assert_eq!(planner.finish(&row, None, Some(&fence), STREAM).unwrap().bad.dropped(), 0);
    assert_eq!((cache.tree_stats(STREAM).locked, cache.evict(4, STREAM)), (4, 0));
    let weak = Arc::downgrade(&slots);
    drop((slots, planner, cache, lease));
    assert_eq!((weak.strong_count(), Arc::strong_count(&fence)), (0, 1));
}

#[test]
fn a_load_in_flight_gives_its_state_back_whatever_is_dropped_first() {
    for turn in 0..4 {
        let host: Arc<dyn Backend> = Arc::new(Host);
        let kv = Arc::new(KvPool::new(&KvConfig { size: 16, page_size: 1, ..KV }, &host).unwrap());
        let gdn = Arc::new(GdnPool::new(&GDN, &host).unwrap());
        let slots = Arc::new(TokenToKvPoolAllocator::new(&AllocatorConfig::new(16), &host).unwrap());
        let tier = Arc::new(
            HostTier::new(&HostTierConfig { max_states: 2, ..TIER }, &kv, Some(&gdn), &host).unwrap(),
        );
        let below = LowerTier { host: tier, digest, store: None };
        let config = PrefixCacheConfig {
            policy: PolicyKind::Lru,
            cost: None,
            max_pinned: 0.5,
            name: "cache".into(),
            events: None,
        };
        let cache =
            PrefixCache::new(config, Arc::clone(&slots), Some(Arc::clone(&gdn)), Some(below)).unwrap();
        let table = Arc::new(ReqToTokenPool::new(&ReqToTokenConfig::new(1, 16), &host).unwrap());
        let planner =
            BatchPlanner::new(&PlannerConfig::new(1, 16), &host, Arc::clone(&slots), Arc::clone(&table))
                .unwrap();
        // A prefix with a state, which only the tier has.
        let lease = cache.match_prefix(&Namespace::Unnamed, &PROMPT, 4, STREAM).unwrap();
        let own = slots.alloc(4, STREAM).unwrap().unwrap().keep();
        let own = Indices::of(own.borrow(), None).unwrap().host_values().unwrap().clone();
        lease.publish(&Publication { tokens: &PROMPT, slots: Some(&own), state: Some(1) }, STREAM).unwrap();
        drop(lease);
        assert!(cache.wait_written(Duration::from_secs(60), STREAM).unwrap());
        cache.evict(4, STREAM);
        assert_eq!(gdn.stats().get("in_use"), Some(0));

        let lease = cache.match_prefix(&Namespace::Unnamed, &PROMPT, 4, STREAM).unwrap();
        let load = lease.load(4, STREAM).unwrap().expect("there is room");
        assert_eq!((load.len(), gdn.stats().get("in_use")), (4, Some(1)));
        let row = IndexVec::I64(vec![table.alloc(1, STREAM).unwrap().unwrap()[0].into()]);
        let prefixes = [Prefix::Leased(Arc::clone(&lease))];
        let batch = Batch { rows: &row, prefix_lens: &[4], seq_lens: &[5], prefixes: &prefixes };
        assert!(planner.extend(batch, STREAM).unwrap().is_some());
        drop(prefixes);
        let fence: Arc<dyn Fence> = Arc::new(NeverPassingFence);
        planner.finish(&row, None, Some(&fence), STREAM).unwrap();
        let mut owners: Vec<Box<dyn Any>> =
            vec![Box::new(slots), Box::new(planner), Box::new(cache), Box::new((lease, load))];
        owners.rotate_left(turn);
        owners.into_iter().for_each(drop);
        assert_eq!((gdn.stats().get("in_use"), Arc::strong_count(&fence)), (Some(0), 1), "turn {turn}");
    }
}

/// Tokens whose reader waits until another thread has cleared the allocator and taken all slots anew.
#[derive(Debug)]
struct ClearingTokens(Arc<TokenToKvPoolAllocator>);

impl Tokens for ClearingTokens {
    fn count(&self) -> usize {
        PROMPT.len()
    }

    fn common(&self, at: usize, with: &[i32]) -> Result<usize> {
        PROMPT.common(at, with)
    }

    fn read(&self, range: Range<usize>, out: &mut Vec<i32>) -> Result<()> {
        let clear = || {
            self.0.clear(STREAM);
            drop(self.0.alloc(4, STREAM).expect("memory").expect("all are free").keep());
        };
        thread::scope(|scope| scope.spawn(clear).join().expect("no panic"));
        PROMPT.read(range, out)
    }

    fn check(&self, range: Range<usize>) -> Result<()> {
        PROMPT.check(range)
    }
}

#[test]
fn a_tree_takes_no_slots_that_a_clear_has_given_to_others() {
    let host: Arc<dyn Backend> = Arc::new(Host);
    let config = AllocatorConfig { strict: true, ..AllocatorConfig::new(4) };
    let slots = Arc::new(TokenToKvPoolAllocator::new(&config, &host).unwrap());
    let config = SlotTreeConfig { page_size: 1, name: "tree".into() };
    let tree = SlotTree::new(config, Some(Arc::clone(&slots))).unwrap();
    drop(slots.alloc(4, STREAM).unwrap().unwrap().keep());
    let given = IndexVec::I32(vec![1, 2, 3, 4]);
    let error =
        tree.insert(&Namespace::Unnamed, &ClearingTokens(Arc::clone(&slots)), &given, STREAM).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    assert_eq!((slots.stats().cached, slots.stats().in_use), (0, 4));
    tree.verify().unwrap();
}
