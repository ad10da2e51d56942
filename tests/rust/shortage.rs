//! Slots that are freed late or on demand: fences, and the behaviour of an allocator that runs short.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

use kvpool::base::{Error, ErrorKind, IndexDType, IndexVec, Result};
use kvpool::index::Fit;
use kvpool::kernels::Indices;
use kvpool::memory::Stream;
use kvpool::pool::{
    AllocatorConfig, Batch, BatchPlanner, Fence, Grant, Obtainable, PlannerConfig, Reclaim, ReqToTokenConfig,
    ReqToTokenPool, TokenToKvPoolAllocator,
};

use crate::histories::contents;
use crate::pool_table::{STREAM, host};

fn allocator(size: usize, page_size: usize) -> Arc<TokenToKvPoolAllocator> {
    let config = AllocatorConfig { page_size, ..AllocatorConfig::new(size) };
    Arc::new(TokenToKvPoolAllocator::new(&config, &host()).expect("small"))
}

fn known(slots: &[i64]) -> Indices<'static> {
    Indices::Host(IndexVec::I64(slots.to_vec()))
}

fn free(allocator: &TokenToKvPoolAllocator, slots: &[i32], after: Option<&Arc<dyn Fence>>) -> Result<usize> {
    let given = Indices::Host(IndexVec::I32(slots.to_vec()));
    allocator.free_keeping(&given, None, after, || None, STREAM).map(|bad| bad.dropped())
}

/// Keeps slots until another owner needs them, and records the requests.
struct Cache {
    allocator: Weak<TokenToKvPoolAllocator>,
    kept: Mutex<Vec<i32>>,
    asked: Mutex<Vec<usize>>,
    fails: AtomicBool,
}

impl Cache {
    /// A cache that keeps `count` slots of an allocator.
    fn new(allocator: &Arc<TokenToKvPoolAllocator>, count: usize) -> Arc<Self> {
        let kept = allocator.alloc(count, STREAM).expect("memory").expect("room").keep();
        let kept = contents::read::<i32>(kept.region(), kept.offset(), count);
        let cache = Arc::new(Self {
            allocator: Arc::downgrade(allocator),
            kept: Mutex::new(kept),
            asked: Mutex::default(),
            fails: AtomicBool::new(false),
        });
        allocator.on_shortage(&(Arc::clone(&cache) as Arc<dyn Reclaim>));
        cache
    }

    fn asked(&self) -> Vec<usize> {
        std::mem::take(&mut self.asked.lock().expect("no panic"))
    }
}

impl Reclaim for Cache {
    fn obtainable(&self, _stream: Stream) -> Obtainable {
        Obtainable { at_once: self.kept.lock().expect("no panic").len(), behind_fences: 0 }
    }

    fn reclaim(&self, slots: usize, _stream: Stream) -> Result<usize> {
        self.asked.lock().expect("no panic").push(slots);
        if self.fails.load(Relaxed) {
            return Err(Error::new(ErrorKind::State, "the cache is closed"));
        }
        let allocator = self.allocator.upgrade().expect("it calls");
        let before = allocator.available_size();
        let given: Vec<i32> = {
            let mut kept = self.kept.lock().expect("no panic");
            let left = kept.len().saturating_sub(slots);
            kept.split_off(left)
        };
        free(&allocator, &given, None)?;
        Ok(allocator.available_size() - before)
    }
}

fn count(taken: Result<Option<Grant<'_>>>) -> Option<usize> {
    taken.expect("memory").map(|grant| grant.keep().shape().numel())
}

#[test]
fn shortage_reclaims_missing_slots() {
    let allocator = allocator(100, 1);
    let cache = Cache::new(&allocator, 80);
    assert_eq!(count(allocator.alloc(20, STREAM)), Some(20));
    assert!(cache.asked().is_empty());
    assert_eq!(count(allocator.alloc(30, STREAM)), Some(30));
    assert_eq!(cache.asked(), [30]);
    // All that it has.
    assert_eq!(count(allocator.alloc(50, STREAM)), Some(50));
    assert_eq!(cache.asked(), [50]);
    allocator.verify().expect("consistent");
}

#[test]
fn hopeless_shortage_reclaims_nothing() {
    let allocator = allocator(100, 1);
    let cache = Cache::new(&allocator, 80);
    let other = Cache::new(&allocator, 5);
    let in_use = allocator.alloc(10, STREAM).expect("memory").expect("room").keep();
    // One more than is free and than all doors together could free.
    for asked in [91, 100] {
        assert_eq!(count(allocator.alloc(asked, STREAM)), None);
        assert_eq!(count(allocator.alloc_contiguous(asked, Fit::First, STREAM)), None);
        assert_eq!(count(allocator.alloc_extend(&[0], &[100], &known(&[0]), STREAM)), None);
    }
    assert!(cache.asked().is_empty() && other.asked().is_empty());
    assert_eq!(allocator.available_size(), 5);
    // Just as many.
    assert_eq!(count(allocator.alloc(90, STREAM)), Some(90));
    assert_eq!((cache.asked(), other.asked()), (vec![85], vec![5]));
    drop(in_use);
}

#[test]
fn impossible_shortage_reclaims_nothing() {
    let allocator = allocator(100, 1);
    let cache = Cache::new(&allocator, 80);
    // More than the pool can ever hold, or enough slots that are not contiguous.
    assert_eq!(count(allocator.alloc(101, STREAM)), None);
    let rest = allocator.alloc(20, STREAM).expect("memory").expect("room").keep();
    let rest = contents::read::<i32>(rest.region(), 0, 20);
    let every_other: Vec<i32> = rest.iter().copied().step_by(2).collect();
    assert_eq!(free(&allocator, &every_other, None).expect("its own"), 0);
    assert_eq!(count(allocator.alloc_contiguous(5, Fit::Best, STREAM)), None);
    assert!(cache.asked().is_empty());
}

#[test]
fn shortage_of_pages_and_plans_reclaims() {
    let allocator = allocator(64, 4);
    let cache = Cache::new(&allocator, 64);
    assert_eq!(count(allocator.alloc_extend(&[0, 0], &[3, 6], &known(&[0, 0]), STREAM)), Some(9));
    assert_eq!(cache.asked(), [12]);

    let config = ReqToTokenConfig::new(2, 32);
    let table = Arc::new(ReqToTokenPool::new(&config, &host()).expect("small"));
    let config = PlannerConfig::new(2, 32);
    let planner =
        BatchPlanner::new(&config, &host(), Arc::clone(&allocator), Arc::clone(&table)).expect("small");
    let row = table.alloc(1, STREAM).expect("host memory").expect("room")[0];
    let rows = IndexVec::I64(vec![row.into()]);
    let batch = Batch { rows: &rows, prefix_lens: &[0], seq_lens: &[9], prefixes: &[] };
    assert!(planner.extend(batch, STREAM).expect("valid").is_some());
    assert_eq!(cache.asked(), [12]);
    assert_eq!(allocator.available_size(), 0);
    // 40 slots are left in the cache. After 24 of them are evicted, the remaining 16 are not enough for 20.
    let most = Batch { rows: &rows, prefix_lens: &[9], seq_lens: &[32], prefixes: &[] };
    assert!(planner.extend(most, STREAM).expect("valid").is_some());
    assert_eq!(cache.asked(), [20]);
    let row = table.alloc(1, STREAM).expect("host memory").expect("room")[0];
    let rows = IndexVec::I64(vec![row.into()]);
    let too_many = Batch { rows: &rows, prefix_lens: &[0], seq_lens: &[21], prefixes: &[] };
    assert!(planner.extend(too_many, STREAM).expect("valid").is_none());
    assert!(planner.decode(&rows, &IndexVec::I64(vec![1]), 1, None, STREAM).expect("valid").is_some());
    assert_eq!(cache.asked(), [4], "only by the call that can succeed");
}

#[test]
fn failed_reclaim_fails_the_short_call() {
    let allocator = allocator(10, 1);
    let cache = Cache::new(&allocator, 10);
    cache.fails.store(true, Relaxed);
    let error = allocator.alloc(1, STREAM).expect_err("the cache fails");
    assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::State, "the cache is closed"));
    cache.fails.store(false, Relaxed);
    let weak = Arc::downgrade(&cache);
    drop(cache);
    assert_eq!(weak.strong_count(), 0, "an allocator does not keep it alive");
    assert_eq!(count(allocator.alloc(1, STREAM)), None);
}

/// A fence that has passed, has not passed, or fails.
struct FixedFence(std::result::Result<bool, &'static str>);

impl Fence for FixedFence {
    fn has_passed(&self) -> Result<bool> {
        self.0.map_err(|text| Error::foreign(std::io::Error::other(text)))
    }
}

#[test]
fn failing_fence_delays_only_later_ones() {
    let allocator = allocator(8, 1);
    let _ = allocator.alloc(8, STREAM).expect("memory").expect("room").keep();
    let answers = [Ok(true), Ok(false), Err("the peer is gone"), Ok(true)];
    for (slot, answer) in (1..).zip(answers) {
        // The first one has passed before the next free polls it.
        let fence: Arc<dyn Fence> = Arc::new(FixedFence(answer));
        match free(&allocator, &[slot], Some(&fence)) {
            Ok(dropped) => assert_eq!(dropped, 0),
            Err(error) => assert_eq!(error.to_string(), "the peer is gone"),
        }
    }
    let error = allocator.poll(STREAM).expect_err("one fence fails");
    let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<std::io::Error>());
    assert_eq!(source.map(ToString::to_string).as_deref(), Some("the peer is gone"));
    assert_eq!((allocator.available_size(), allocator.stats().fenced), (1, 2));
    allocator.clear(STREAM);
    assert_eq!(allocator.available_size(), 8);
    allocator.poll(STREAM).expect("no fence is left");
}

#[test]
fn slots_behind_fences_do_not_keep_a_call_from_reclaiming() {
    let allocator = allocator(100, 1);
    let cache = Cache::new(&allocator, 20);
    let taken = allocator.alloc(80, STREAM).expect("memory").expect("room").keep();
    let taken = contents::read::<i32>(taken.region(), 0, 80);
    let fence: Arc<dyn Fence> = Arc::new(FixedFence(Ok(false)));
    assert_eq!(free(&allocator, &taken[..50], Some(&fence)).expect("its own"), 0);
    // The fence has not passed, but the cache has enough.
    assert_eq!(count(allocator.alloc(15, STREAM)), Some(15));
    assert_eq!(cache.asked(), [15]);
    // All doors together have not.
    assert_eq!(count(allocator.alloc(15, STREAM)), None);
    assert!(cache.asked().is_empty());
}

#[test]
fn slots_in_flight_are_not_reclaimed_twice() {
    /// Slots whose last use is still in flight when they are freed.
    struct BusySlots(Mutex<usize>, Weak<TokenToKvPoolAllocator>);

    impl Reclaim for BusySlots {
        fn obtainable(&self, _stream: Stream) -> Obtainable {
            Obtainable { at_once: 0, behind_fences: 100 - *self.0.lock().expect("no panic") }
        }

        fn reclaim(&self, slots: usize, _stream: Stream) -> Result<usize> {
            let allocator = self.1.upgrade().expect("it calls");
            let fence: Arc<dyn Fence> = Arc::new(FixedFence(Ok(false)));
            let mut next = self.0.lock().expect("no panic");
            for _ in 0..slots {
                *next += 1;
                free(&allocator, &[i32::try_from(*next).expect("small")], Some(&fence))?;
            }
            Ok(slots)
        }
    }

    let allocator = allocator(100, 1);
    let _ = allocator.alloc(100, STREAM).expect("memory").expect("room").keep();
    let busy = Arc::new(BusySlots(Mutex::new(0), Arc::downgrade(&allocator)));
    allocator.on_shortage(&(Arc::clone(&busy) as Arc<dyn Reclaim>));
    for _ in 0..5 {
        assert_eq!(count(allocator.alloc(3, STREAM)), None);
    }
    assert_eq!(*busy.0.lock().expect("no panic"), 3, "three are coming");
}

#[test]
fn a_dropped_grant_gives_its_slots_back() {
    for (page_size, index_dtype) in
        [(1, IndexDType::I32), (1, IndexDType::I64), (4, IndexDType::I32), (4, IndexDType::I64)]
    {
        let config = AllocatorConfig { page_size, index_dtype, ..AllocatorConfig::new(64) };
        let allocator = TokenToKvPoolAllocator::new(&config, &host()).expect("small");
        let kept =
            allocator.alloc_extend(&[0], &[3], &known(&[-1]), STREAM).expect("memory").expect("room").keep();
        let free = allocator.available_size();
        drop(allocator.alloc(5, STREAM));
        drop(allocator.alloc_contiguous(8, Fit::First, STREAM));
        // With pages, one of the slots lies in the page that the request had before.
        let last = known(&[i64::try_from(page_size).expect("small") + 2]);
        drop(allocator.alloc_extend(&[3], &[9], &last, STREAM));
        assert_eq!(allocator.available_size(), free);
        allocator.verify().expect("consistent");
        assert_eq!(kept.shape().numel(), 3);
    }
}

#[test]
fn a_grant_dropped_after_clear_frees_nothing() {
    let allocator = allocator(8, 1);
    let taken = allocator.alloc(3, STREAM).expect("memory").expect("room");
    allocator.clear(STREAM);
    let again = allocator.alloc(3, STREAM).expect("memory").expect("room").keep();
    drop(taken);
    assert_eq!((allocator.stats().in_use, again.shape().numel()), (3, 3));
}
