//! Pools shared by several threads, for as long as a sanitizer should watch.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kvpool::base::{DType, ErrorKind, IndexVec};
use kvpool::cache::{Namespace, PolicyKind};
use kvpool::engines::{SlotTree, SlotTreeConfig};
use kvpool::kernels::{CopyThreads, Direction, Indices, set_num_threads};
use kvpool::memory::Host;
use kvpool::pool::{
    AllocatorConfig, Attempt, Batch, BatchPlanner, ChunkConfig, ChunkPool, GdnConfig, GdnPool, Grant,
    KvConfig, KvPool, PlannerConfig, Prefix, PrefixCache, PrefixCacheConfig, Publication, ReqToTokenConfig,
    ReqToTokenPool, Scales, TokenToKvPoolAllocator,
};

use crate::histories::contents;
use crate::pool_table::{GDN, KV, STREAM, chunks, host};

const THREADS: usize = 8;

/// The duration of each test: `KVPOOL_THREAD_SECONDS`, by default a moment.
fn time() -> Duration {
    let seconds = std::env::var("KVPOOL_THREAD_SECONDS").ok().and_then(|value| value.parse().ok());
    seconds.map_or(Duration::from_millis(200), Duration::from_secs)
}

fn int32(number: usize) -> i32 {
    i32::try_from(number).expect("small")
}

/// Calls `work(thread, round)` on every thread until the time is over.
fn together(work: impl Fn(usize, usize) + Sync) {
    let end = Instant::now() + time();
    thread::scope(|scope| {
        for number in 0..THREADS {
            let work = &work;
            scope.spawn(move || {
                let mut round = 0;
                while Instant::now() < end {
                    work(number, round);
                    round += 1;
                }
            });
        }
    });
}

#[test]
fn one_prefix_cache_serves_eight_threads() {
    let config = AllocatorConfig { page_size: 2, strict: true, ..AllocatorConfig::new(512) };
    let slots = Arc::new(TokenToKvPoolAllocator::new(&config, &host()).expect("small"));
    let rows = ReqToTokenConfig { strict: true, ..ReqToTokenConfig::new(THREADS, 64) };
    let table = Arc::new(ReqToTokenPool::new(&rows, &host()).expect("small"));
    let config = PlannerConfig::new(1, 64);
    let planner = BatchPlanner::new(&config, &host(), Arc::clone(&slots), Arc::clone(&table)).expect("small");
    let config = PrefixCacheConfig {
        policy: PolicyKind::Adaptive,
        cost: None,
        max_pinned: 1.0,
        name: "cache".into(),
        events: None,
    };
    let cache = PrefixCache::new(config, Arc::clone(&slots), None, None).expect("valid");
    together(|number, round| {
        // Prompts share beginnings, within a thread and between them.
        let prompt: Vec<i32> = (0..40)
            .map(|at| if at < 16 + round % 8 { 0 } else { int32([number, round, at][at % 3]) })
            .collect();
        let name = Namespace::Number(i64::from(round % 7 == 0));
        let lease = cache.match_prefix(&name, &prompt.as_slice(), 39, STREAM).expect("tokens");
        let prefix = lease.len().expect("a lease");
        let row = table.alloc(1, STREAM).expect("rows");
        let row = IndexVec::I64(vec![row.expect("one for each thread")[0].into()]);
        let prefixes = [Prefix::Leased(Arc::clone(&lease))];
        let batch =
            Batch { rows: &row, prefix_lens: &[int32(prefix).into()], seq_lens: &[40], prefixes: &prefixes };
        let plan = planner.extend(batch, STREAM).expect("valid");
        if plan.is_some() && round % 5 > 0 {
            let new = &prompt[prefix..];
            let publication = Publication { tokens: &new, slots: None, state: None };
            assert_eq!(lease.publish(&publication, STREAM).expect("computed").length, 40);
        }
        match round % 31 {
            0 => cache.clear(Some(&name), STREAM),
            1 => drop(cache.evict(64, STREAM)),
            2 => {
                if let Err(error) = cache.pin(&lease, Some(Duration::from_millis(1)), 0, STREAM) {
                    assert!(error.to_string().contains("was cleared"), "{error}");
                }
            }
            _ => (),
        }
        let finished = planner.finish(&row, None, None, STREAM).expect("strict");
        assert_eq!(finished.bad.dropped(), 0);
    });
    cache.verify(STREAM).expect("consistent");
    slots.verify().expect("consistent");
    assert_eq!(slots.stats().in_use, slots.stats().cached);
}

/// One thread clears the allocator again and again, while others fill, empty and drop trees.
#[test]
fn an_allocator_is_cleared_below_its_trees() {
    let config = AllocatorConfig::new(4096);
    let slots = Arc::new(TokenToKvPoolAllocator::new(&config, &host()).expect("small"));
    let config = || SlotTreeConfig { page_size: 1, name: "tree".into() };
    let new_tree = || SlotTree::new(config(), Some(Arc::clone(&slots))).expect("valid");
    let trees: Vec<_> = (0..THREADS).map(|_| Mutex::new(new_tree())).collect();
    let prompt: Vec<i32> = (0..64).collect();
    together(|number, round| {
        if number == 0 {
            slots.clear(STREAM);
            return;
        }
        let mut tree = trees[number].lock().expect("no panic");
        let Some(granted) = slots.alloc(prompt.len(), STREAM).expect("no device") else { return };
        let view = granted.keep();
        let given = contents::read::<i32>(view.region(), 0, view.shape().numel());
        let given = IndexVec::I32(given);
        match tree.insert(&Namespace::Unnamed, &prompt.as_slice(), &given, STREAM) {
            Ok(_) => (),
            // Another thread may have them by now, and even its tree.
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::Stale | ErrorKind::IndexOwnership), "{error}");
            }
        }
        match round % 3 {
            0 => drop(tree.evict(prompt.len(), STREAM)),
            1 => drop(tree.clear(STREAM)),
            _ => *tree = new_tree(),
        }
    });
    for tree in &trees {
        tree.lock().expect("no panic").verify().expect("consistent");
    }
    drop(trees);
    slots.verify().expect("consistent");
    assert_eq!(slots.stats().cached, 0);
}

#[test]
fn one_allocator_serves_eight_threads() {
    let config = AllocatorConfig { page_size: 4, strict: true, ..AllocatorConfig::new(4096) };
    let allocator = TokenToKvPoolAllocator::new(&config, &host()).expect("small");
    // The owner of each page; each thread writes to its own pages without another lock.
    let owners: Vec<AtomicUsize> = (0..1025).map(|_| AtomicUsize::new(0)).collect();
    together(|number, round| {
        let taken = allocator.alloc(4 * (1 + round % 9), STREAM).expect("memory");
        let Some(view) = taken.map(Grant::keep) else { return };
        let slots = contents::read::<i32>(view.region(), 0, view.shape().numel());
        for slot in slots.iter().step_by(4) {
            let page = usize::try_from(*slot).expect("positive") / 4;
            assert_eq!(owners[page].swap(number + 1, Relaxed), 0, "page {page} has two owners");
        }
        for slot in slots.iter().step_by(4) {
            let page = usize::try_from(*slot).expect("positive") / 4;
            assert_eq!(owners[page].swap(0, Relaxed), number + 1);
        }
        let slots = Indices::Host(IndexVec::I32(slots));
        let _ = allocator.free(&slots, STREAM).expect("its own");
    });
    assert_eq!(allocator.available_size(), 4096);
}

#[test]
fn chunks_are_copied_freed_and_taken_at_once() {
    let config = ChunkConfig { chunk_shape: vec![1 << 10], dtype: DType::I64, ..chunks(12, true) };
    let pool = ChunkPool::new(&config, &host()).expect("memory");
    together(|number, round| {
        let Ok(Attempt::Taken(chunks)) = pool.allocate(1 + round % 3, Duration::from_millis(1)) else {
            return;
        };
        for &chunk in &chunks {
            let values = kvpool::tensor::TensorView::from_indices(IndexVec::I32(vec![
                i32::try_from(number)
                    .expect("small");
                512
            ]));
            let values = values.region().bytes_at(0, 2048).expect("inside");
            // The length does not fit the dtype, so bytes are refused; words are not.
            assert!(pool.copy(chunk, &values, Direction::Pack, STREAM).is_err());
            let view = pool.tensor(chunk, None).expect("it is ours");
            let mark = i64::try_from(number * 1000 + round % 1000).expect("small");
            contents::write(view.region(), view.offset(), &vec![mark; 1 << 10]);
            pool.retain(chunk).expect("it is ours");
            let found = contents::read::<i64>(view.region(), view.offset(), 1 << 10);
            assert!(found.iter().all(|value| *value == mark), "a chunk has two owners");
            let _ = pool.release(chunk).expect("it is ours");
        }
        for chunk in chunks {
            let _ = pool.free(chunk).expect("it is ours");
        }
    });
    assert_eq!(pool.counts(|chunks, _| (chunks.in_use(), chunks.broken_invariant())), (0, None));
}

#[test]
fn rows_are_stored_moved_and_gathered_at_once() {
    set_num_threads(3);
    let config = KvConfig {
        size: 4000,
        k_head_num: 4,
        k_head_dim: 128,
        v_head_num: 4,
        v_head_dim: 128,
        dtype: DType::F32,
        page_size: 1,
        ..KV
    };
    let pool = KvPool::new(&config, &host()).expect("memory");
    let states = GdnPool::new(&GdnConfig { max_track_slots: 4, ..GDN }, &host()).expect("memory");
    together(|number, round| {
        let list = |step: i64| Indices::Host(IndexVec::I64((1..=2000).map(|row| row + step).collect()));
        let layer = round % 2;
        match number % 4 {
            0 => {
                let [k, v] = pool.gather_kv(layer, &list(0)).expect("rows");
                let values = [k.borrow(), v.borrow()];
                pool.set_kv(layer, &list(1000), values, Scales::default(), STREAM).expect("rows");
            }
            1 => pool.move_kv(&list(500), &list(0), STREAM).expect("rows"),
            2 => drop(pool.gather_kv(layer, &list(7)).expect("rows")),
            _ => {
                let slot = |number: i64| Indices::Host(IndexVec::I64(vec![number]));
                let taken = states.alloc_track_slot();
                states.copy_states(&slot(1), &slot(2), STREAM).expect("slots");
                states.reset_states(&slot(1), STREAM).expect("a slot");
                taken.map(|slot| states.free_track_slot(slot.into()).map(drop)).transpose().expect("its own");
            }
        }
    });
    assert_eq!(states.with_tracks(|tracks| tracks.rows().available()), 4);
}

#[test]
fn each_part_of_a_copy_is_done_once() {
    let mut threads = CopyThreads::new();
    let end = Instant::now() + time();
    for round in 0.. {
        let parts = 1 + round % THREADS;
        let done: [AtomicUsize; THREADS] = Default::default();
        threads.run(parts, &|part, of| {
            assert_eq!(of, parts);
            done[part].fetch_add(1, Relaxed);
        });
        assert_eq!(done.iter().map(|count| count.load(Relaxed)).sum::<usize>(), parts);
        assert!(done[..parts].iter().all(|count| count.load(Relaxed) == 1));
        if round % 64 == 0 {
            // The next part finds the threads asleep.
            thread::sleep(Duration::from_millis(1));
        }
        if Instant::now() > end {
            break;
        }
    }
}

#[test]
fn a_part_that_panics_ends_its_call_only() {
    let mut threads = CopyThreads::new();
    for panicking in 0..3 {
        let begun = AtomicUsize::new(0);
        let mut run = |panicking| {
            threads.run(3, &|part, _| {
                begun.fetch_add(1, Relaxed);
                assert_ne!(Some(part), panicking);
            });
        };
        assert!(catch_unwind(AssertUnwindSafe(|| run(Some(panicking)))).is_err());
        let before = begun.load(Relaxed);
        run(None);
        assert_eq!(begun.load(Relaxed), before + 3);
    }
}

/// A race that a race detector must report; otherwise its silence proves nothing.
#[test]
#[ignore = "races on purpose, for a race detector"]
fn a_race_for_the_detector() {
    let region = kvpool::memory::Region::new(Arc::new(Host), 64).expect("memory");
    together(|number, _| contents::write(&region, 0, &[i32::try_from(number).expect("small")]));
}
