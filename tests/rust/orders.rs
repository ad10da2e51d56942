//! Every interleaving of a few threads, explored by loom: `make orders`.
//!
//! loom's clocks stand still, so a timeout never ends a wait: a missing notification is found as a deadlock.

#![cfg(loom)]
#![expect(clippy::unwrap_used, reason = "a failing test panics")]

use std::sync::Arc;
use std::time::Duration;

use kvpool::base::{DType, ErrorKind};
use kvpool::kernels::{CopyThreads, Direction, set_num_threads};
use kvpool::memory::{Backend, Host, Limit, MappedHost, PAGE, PageLocking, Region, Report, Stream};
use kvpool::pool::{Attempt, ChunkConfig, ChunkPool};
use kvpool::tensor::TensorView;
use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::thread;

/// Longer than any wait of a test.
const FOREVER: Duration = Duration::from_secs(1 << 20);

/// Explores every interleaving or, where there are too many, those with at most `preemptions` switches away
/// from a thread that could have continued.
fn try_all(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

/// A pool of pages, page-locked one by one on two threads.
fn locking(num_chunks: usize) -> (Arc<ChunkPool>, PageLocking) {
    set_num_threads(2);
    let config = ChunkConfig {
        num_chunks,
        chunk_shape: vec![PAGE],
        dtype: DType::U8,
        pin_memory: true,
        page_lock_threads: 2,
        strict: true,
    };
    let mapped: Arc<dyn Backend> = Arc::new(MappedHost::default());
    let pool = Arc::new(ChunkPool::new(&config, &mapped).expect("small"));
    let locking = pool.lock_pages().expect("a driver, which LD_PRELOAD may give");
    assert_eq!(locking.steps(), num_chunks);
    (pool, locking)
}

/// The chunks that were ready after each step, in order.
fn steps_of(locking: &PageLocking) -> Vec<usize> {
    let mut steps = Vec::new();
    loop {
        match locking.next(FOREVER) {
            Report::Step(progress) => {
                assert!(progress.failure.is_none(), "{progress:?}");
                steps.push(progress.done / PAGE);
            }
            Report::TimedOut => panic!("time stands still"),
            Report::Finished => return steps,
        }
    }
}

#[test]
fn limit_holds_in_every_order() {
    try_all(None, || {
        let limit = Arc::new(Limit::new(Arc::new(Host), 100));
        let threads = [0, 1].map(|_| {
            let limit = Arc::clone(&limit);
            thread::spawn(move || Region::new(limit, 60).ok())
        });
        let regions: Vec<_> = threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect();
        assert_eq!(regions.len(), 1);
        drop(regions);
        assert!(Region::new(limit, 100).is_ok());
    });
}

#[test]
fn waiting_for_page_locking_gets_chunks() {
    try_all(Some(2), || {
        let (pool, locking) = locking(2);
        let waiter = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.allocate(2, FOREVER).unwrap())
        };
        assert_eq!(steps_of(&locking), [1, 2]);
        drop(locking);
        assert!(matches!(waiter.join().unwrap(), Attempt::Taken(chunks) if chunks.len() == 2));
        assert!(pool.wait_registered(FOREVER).unwrap());
        assert_eq!(pool.counts(|chunks, registered| (chunks.in_use(), registered)), (2, 2));
    });
}

#[test]
fn stopped_page_locking_ends_every_wait() {
    try_all(Some(2), || {
        let (pool, locking) = locking(3);
        let waiter = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || {
                (pool.allocate(3, FOREVER).unwrap(), pool.wait_registered(FOREVER).unwrap())
            })
        };
        locking.stop();
        let steps = steps_of(&locking).len();
        drop(locking);
        let (attempt, is_over) = waiter.join().unwrap();
        assert!(is_over);
        assert_eq!(attempt == Attempt::Full, steps < 3, "{attempt:?} after {steps} steps");
        assert_eq!(
            pool.counts(|chunks, registered| (chunks.ready() + chunks.in_use(), registered)),
            (steps, steps)
        );
    });
}

#[test]
fn freed_chunk_returns_after_its_copy() {
    try_all(None, || {
        let (pool, locking) = locking(1);
        steps_of(&locking);
        drop(locking);
        let chunk = pool.try_allocate_one().unwrap().expect("one");
        let copier = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || {
                let region = Arc::new(Region::new(Arc::new(Host), PAGE).expect("small"));
                let ours = TensorView::packed(region, 0, DType::U8, *pool.tensor(chunk, None)?.shape())?;
                pool.copy(chunk, &ours.borrow(), Direction::Pack, Stream::DEFAULT)
            })
        };
        assert_eq!(pool.free(chunk).unwrap().dropped(), 0);
        let Attempt::Taken(again) = pool.allocate(1, FOREVER).unwrap() else { panic!("it comes back") };
        // Either the copy began before the free, or it fails because the chunk is stale.
        let answer = copier.join().unwrap();
        assert!(answer.map_or_else(|error| error.kind() == ErrorKind::StaleBuffer, |event| event.is_none()));
        assert_eq!(pool.references(again[0]), 1);
    });
}

/// What each part writes, without a lock: loom reports a race.
struct Parts([UnsafeCell<usize>; 3]);

// SAFETY: loom checks every access.
unsafe impl Sync for Parts {}

#[test]
fn each_part_of_a_copy_is_done_once() {
    try_all(Some(2), || {
        let mut threads = CopyThreads::new();
        // The second work lies where the first one lay.
        for _ in 0..2 {
            let done = Parts([0; 3].map(UnsafeCell::new));
            let done = &done;
            // SAFETY: loom checks every access.
            threads.run(3, &|part, _| done.0[part].with_mut(|count| unsafe { *count += 1 }));
            for count in &done.0 {
                // SAFETY: loom checks every access.
                assert_eq!(count.with(|count| unsafe { *count }), 1);
            }
        }
    });
}
