//! Every interleaving of a few threads, explored by loom: `make orders`.
//!
//! loom's clocks stand still, so a timeout never ends a wait: a missing notification is found as a deadlock.

#![cfg(loom)]
#![expect(clippy::unwrap_used, reason = "a failing test panics")]

#[path = "histories/disks.rs"]
#[expect(dead_code, reason = "no disk fails here")]
mod disks;

use std::sync::Arc;
use std::time::Duration;

use kvpool::base::{DType, ErrorKind, IndexVec};
use kvpool::cache::{Namespace, PolicyKind};
use kvpool::kernels::{CopyThreads, Direction, Indices, read_indices, set_num_threads};
use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
use kvpool::memory::{
    Backend, CopyDirection, Host, HostRows, LimitedBackend, MappedHost, PageLockEvent, PageLocking, Region,
    Stream, StreamSet, system_page_size,
};
use kvpool::pool::{
    AllocatorConfig, ArenaPrefixCache, ArenaPrefixCacheConfig, Attempt, Batch, BatchPlanner, CacheArena,
    CacheArenaConfig, ChunkConfig, ChunkPool, Fence, FileStore, FileStoreConfig, GdnConfig, GdnPool, Grant,
    Lease, PlannerConfig, Prefix, PrefixCache, PrefixCacheConfig, Publication, PutAfter, RemoteStore,
    ReqToTokenConfig, ReqToTokenPool, Store, StoreCallQueue, TokenToKvPoolAllocator,
};
use kvpool::tensor::TensorView;
use kvpool::transfer::{CopyQueue, Disk};
use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::thread;

/// Longer than any wait of a test.
const FOREVER: Duration = Duration::from_secs(1 << 20);

/// Host memory has no streams.
const NO_STREAM: Stream = Stream::DEFAULT;

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
        chunk_shape: vec![system_page_size()],
        dtype: DType::U8,
        pin_memory: true,
        page_lock_threads: 2,
        strict: true,
    };
    let mapped: Arc<dyn Backend> = Arc::new(MappedHost::default());
    let pool = Arc::new(ChunkPool::new(&config, &mapped).expect("small"));
    let locking = pool.start_page_locking().expect("a driver, which LD_PRELOAD may give");
    assert_eq!(locking.steps(), num_chunks);
    (pool, locking)
}

/// The chunks that were ready after each step, in order.
fn steps_of(locking: &PageLocking) -> Vec<usize> {
    let mut steps = Vec::new();
    loop {
        match locking.next(FOREVER) {
            PageLockEvent::Step(progress) => {
                assert!(progress.failure.is_none(), "{progress:?}");
                steps.push(progress.done / system_page_size());
            }
            PageLockEvent::TimedOut => panic!("time stands still"),
            PageLockEvent::Finished => return steps,
        }
    }
}

#[test]
fn limit_holds_in_every_order() {
    try_all(None, || {
        let limit = Arc::new(LimitedBackend::new(Arc::new(Host), 100));
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
fn units_of_an_arena_have_one_owner() {
    try_all(None, || {
        let plane = |name, heads| Plane::new(name, DType::U8, &[heads, 64]).unwrap();
        let groups = vec![
            Group::new("full", GroupKind::Full, &[0], vec![plane("k", 1), plane("v", 1)]).unwrap(),
            Group::new("state", GroupKind::State, &[1], vec![plane("recurrent", 2)]).unwrap(),
        ];
        let config = CacheArenaConfig {
            layout: CacheLayout::new("", 1, groups).unwrap(),
            // Padding, and two slabs of one page or one state.
            arena_bytes: 3 * 128,
            floors: Vec::new(),
            slabs: SlabOptions::default(),
            strict: true,
        };
        let host: Arc<dyn Backend> = Arc::new(Host);
        let arena = Arc::new(CacheArena::new(&config, &host).unwrap());
        // Both want a slab of each group: the last pair of slabs goes to one of them as a whole.
        let threads = [(); 2].map(|()| {
            let arena = Arc::clone(&arena);
            thread::spawn(move || arena.alloc(&[1, 1]).unwrap())
        });
        let taken: Vec<_> = threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect();
        let [units] = &taken[..] else { panic!("{taken:?}") };
        assert_ne!(units[0][0] / arena_numbers(&arena, 0), units[1][0] / arena_numbers(&arena, 1));
        // What one thread gives back, the other may take at once.
        let giver = {
            let (arena, unit) = (Arc::clone(&arena), units[0][0]);
            thread::spawn(move || arena.free(0, &[unit.into()]).unwrap().dropped())
        };
        let more = arena.alloc(&[0, 1]).unwrap();
        assert_eq!(giver.join().unwrap(), 0);
        let states = 1 + more.map_or(0, |units| units[1].len());
        assert_eq!(arena.group_counts(1).unwrap().0.in_use, states);
        arena.verify().unwrap();
    });
}

#[test]
fn a_prefix_of_an_arena_is_evicted_or_leased() {
    try_all_calls(None, || {
        let plane = Plane::new("k", DType::U8, &[64]).unwrap();
        let full = Group::new("full", GroupKind::Full, &[0], vec![plane]).unwrap();
        let config = CacheArenaConfig {
            layout: CacheLayout::new("", 1, vec![full]).unwrap(),
            // Padding, and a slab of one page.
            arena_bytes: 2 * 64,
            floors: Vec::new(),
            slabs: SlabOptions::default(),
            strict: true,
        };
        let host: Arc<dyn Backend> = Arc::new(Host);
        let arena = Arc::new(CacheArena::new(&config, &host).unwrap());
        let config = ArenaPrefixCacheConfig { policy: PolicyKind::Lru, cost: None, events: None };
        let cache = Arc::new(ArenaPrefixCache::new(config, Arc::clone(&arena)).unwrap());
        let tokens: &[i32] = &[7];
        let unit = arena.alloc(&[1]).unwrap().unwrap()[0][0];
        let lease = cache.match_prefix(&Namespace::Unnamed, &tokens, 1).unwrap();
        lease.publish(&tokens, &[vec![Some(unit)]]).unwrap();
        drop(lease);
        // One wants the unit that the other finds.
        let short = {
            let arena = Arc::clone(&arena);
            spawn(move || arena.alloc(&[1]).unwrap())
        };
        let lease = cache.match_prefix(&Namespace::Unnamed, &tokens, 1).unwrap();
        let taken = short.join().unwrap();
        assert_eq!(taken.is_some(), lease.is_empty().unwrap());
        cache.verify().unwrap();
        arena.verify().unwrap();
    });
}

/// The numbers of a slab of a group.
fn arena_numbers(arena: &CacheArena, group: usize) -> u32 {
    u32::try_from(arena.slabs().groups()[group].numbers).unwrap()
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
        assert!(pool.wait_page_locked(FOREVER).unwrap());
        assert_eq!(pool.counts(|chunks, page_locked| (chunks.in_use(), page_locked)), (2, 2));
    });
}

#[test]
fn stopped_page_locking_ends_every_wait() {
    try_all(Some(2), || {
        let (pool, locking) = locking(3);
        let waiter = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || {
                (pool.allocate(3, FOREVER).unwrap(), pool.wait_page_locked(FOREVER).unwrap())
            })
        };
        locking.stop();
        let steps = steps_of(&locking).len();
        drop(locking);
        let (attempt, is_over) = waiter.join().unwrap();
        assert!(is_over);
        assert_eq!(attempt == Attempt::Full, steps < 3, "{attempt:?} after {steps} steps");
        assert_eq!(
            pool.counts(|chunks, page_locked| (chunks.ready() + chunks.in_use(), page_locked)),
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
                let region = Arc::new(Region::new(Arc::new(Host), system_page_size()).expect("small"));
                let ours = TensorView::contiguous_with_dims(
                    region,
                    0,
                    DType::U8,
                    *pool.tensor(chunk, None)?.shape(),
                )?;
                pool.copy(chunk, &ours.borrow(), Direction::Pack, Stream::DEFAULT)
            })
        };
        assert_eq!(pool.free(chunk).unwrap().dropped(), 0);
        let Attempt::Taken(again) = pool.allocate(1, FOREVER).unwrap() else { panic!("it comes back") };
        // Either the copy began before the free, or it fails because the chunk is stale.
        let answer = copier.join().unwrap();
        assert!(answer.map_or_else(|error| error.kind() == ErrorKind::Stale, |event| event.is_none()));
        assert_eq!(pool.references(again[0]), 1);
    });
}

/// A stream and one that comes after it. No work is enqueued on them.
fn stream_and_writer() -> [Stream; 2] {
    // SAFETY: as above.
    [1, 2].map(|handle| unsafe { Stream::from_handle(handle << 4, 0) }.unwrap())
}

#[test]
fn a_stream_leaves_a_set_with_all_of_its_work() {
    try_all(None, || {
        let [stream, writer] = stream_and_writer();
        let users = Arc::new(StreamSet::default());
        users.record(stream);
        users.record(writer);
        // What was enqueued on the stream. Calls of a driver are ordered, as by a lock.
        let enqueued = Arc::new(loom::sync::Mutex::new(0));
        let launches = {
            let (users, enqueued) = (Arc::clone(&users), Arc::clone(&enqueued));
            thread::spawn(move || {
                for _ in 0..2 {
                    *enqueued.lock().unwrap() += 1;
                    users.record(stream);
                }
            })
        };
        let taken = users.take(|user| user.stream == stream);
        assert_eq!(taken.before(), [stream, writer]);
        let awaited = *enqueued.lock().unwrap();
        users.record(writer);
        taken.forget();
        launches.join().unwrap();
        let left = users.streams();
        assert!(left.contains(&writer));
        assert!(left.contains(&stream) || awaited == 2, "{awaited} of 2 launches are waited for");
        users.record(stream);
        assert!(users.streams().contains(&stream));
    });
}

#[test]
fn a_stream_that_was_not_waited_for_stays_in_its_set() {
    try_all(None, || {
        let [stream, other] = stream_and_writer();
        let users = Arc::new(StreamSet::default());
        users.record(stream);
        let launches = {
            let users = Arc::clone(&users);
            thread::spawn(move || [other, stream, other].map(|stream| users.record(stream)))
        };
        drop(users.take(|_| true));
        launches.join().unwrap();
        let mut left = users.streams();
        left.sort_by_key(|stream| stream.handle());
        assert_eq!(left, [stream, other]);
    });
}

/// The number that each part writes, without a lock: loom reports a race.
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

/// Runs `work` on a thread with room for the calls of a cache.
fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> thread::JoinHandle<T> {
    /// The size in words.
    const STACK: usize = 1 << 15;
    thread::Builder::new().stack_size(STACK).spawn(work).unwrap()
}

/// [`try_all`] for such calls.
fn try_all_calls(preemptions: Option<usize>, model: impl Fn() + Copy + Send + Sync + 'static) {
    try_all(preemptions, move || spawn(model).join().unwrap());
}

/// A cache of all eight slots of an allocator, evictable.
fn full_cache() -> (Arc<TokenToKvPoolAllocator>, Arc<PrefixCache>) {
    let config = AllocatorConfig { strict: true, ..AllocatorConfig::new(8) };
    let host: Arc<dyn Backend> = Arc::new(Host);
    let slots = Arc::new(TokenToKvPoolAllocator::new(&config, &host).expect("small"));
    let config = PrefixCacheConfig {
        policy: PolicyKind::Lru,
        cost: None,
        max_pinned: 1.0,
        name: "cache".into(),
        events: None,
    };
    let cache = Arc::new(PrefixCache::new(config, Arc::clone(&slots), None, None).expect("valid"));
    publish(&slots, &cache, &[1, 2, 3, 4, 5, 6, 7, 8]);
    (slots, cache)
}

/// Publishes a prompt as far as there are slots for it, which may evict; how much of it was found.
fn publish(slots: &TokenToKvPoolAllocator, cache: &PrefixCache, prompt: &[i32]) -> usize {
    let lease = cache.match_prefix(&Namespace::Unnamed, &prompt, prompt.len(), NO_STREAM).unwrap();
    let begin = lease.len().unwrap();
    if let Some(own) = slots.alloc(prompt.len() - begin, NO_STREAM).unwrap().map(Grant::keep) {
        let own = read_indices(&own.borrow()).unwrap();
        let publication = Publication { tokens: &&prompt[begin..], slots: Some(&own), state: None };
        assert_eq!(lease.publish(&publication, NO_STREAM).unwrap().length, prompt.len());
    }
    begin
}

fn nothing_is_lost(slots: &TokenToKvPoolAllocator, cache: &PrefixCache, in_use: usize) {
    cache.verify(NO_STREAM).unwrap();
    slots.verify().unwrap();
    let (stats, tree) = (slots.stats(), cache.tree_stats(NO_STREAM));
    assert_eq!((stats.cached, tree.locked), (tree.cached, 0));
    assert_eq!(stats.available + in_use + tree.cached, 8);
}

#[test]
fn an_allocation_evicts_while_another_thread_matches_and_publishes() {
    try_all_calls(Some(4), || {
        let (slots, cache) = full_cache();
        let other = {
            let (slots, cache) = (Arc::clone(&slots), Arc::clone(&cache));
            spawn(move || publish(&slots, &cache, &[1, 2, 3, 9]))
        };
        let own = slots.alloc(4, NO_STREAM).unwrap().map(Grant::keep);
        assert!(own.is_some(), "the other one needs at most four");
        other.join().unwrap();
        nothing_is_lost(&slots, &cache, 4);
    });
}

#[test]
fn a_lease_is_dropped_by_one_thread_while_others_evict_and_clear() {
    try_all_calls(None, || {
        let (slots, cache) = full_cache();
        let prompt: &[i32] = &[1, 2, 3, 4];
        let lease = cache.match_prefix(&Namespace::Unnamed, &prompt, 4, NO_STREAM).unwrap();
        let dropping = spawn(move || drop(lease));
        let clearing = {
            let cache = Arc::clone(&cache);
            spawn(move || cache.clear(None, NO_STREAM))
        };
        let evicted = cache.evict(8, NO_STREAM);
        assert!(evicted <= 8);
        dropping.join().unwrap();
        clearing.join().unwrap();
        nothing_is_lost(&slots, &cache, 0);
        assert_eq!(slots.available_size(), 8);
    });
}

#[test]
fn two_threads_keep_one_snapshot_of_the_same_prompt() {
    try_all_calls(Some(2), || {
        let host: Arc<dyn Backend> = Arc::new(Host);
        let config = AllocatorConfig { strict: true, ..AllocatorConfig::new(4) };
        let slots = Arc::new(TokenToKvPoolAllocator::new(&config, &host).expect("small"));
        let config = GdnConfig {
            max_reqs: 2,
            num_gdn_layers: 1,
            num_v_heads: 1,
            head_k_dim: 1,
            head_v_dim: 1,
            conv_dim: 1,
            conv_kernel_size: 2,
            dtype: DType::U8,
            max_track_slots: 2,
            strict: true,
        };
        let states = Arc::new(GdnPool::new(&config, &host).expect("small"));
        let config = PrefixCacheConfig {
            policy: PolicyKind::Lru,
            cost: None,
            max_pinned: 1.0,
            name: "cache".into(),
            events: None,
        };
        let cache = PrefixCache::new(config, slots.clone(), Some(states.clone()), None).expect("valid");
        let prompt: &[i32] = &[1, 2];
        let requests = [1, 2].map(|row| {
            let lease = cache.match_prefix(&Namespace::Unnamed, &prompt, 2, NO_STREAM).unwrap();
            let own = slots.alloc(2, NO_STREAM).unwrap().map(Grant::keep).expect("there are four");
            (lease, read_indices(&own.borrow()).unwrap(), row)
        });
        let threads = requests.map(|(lease, own, row)| {
            spawn(move || {
                let publication = Publication { tokens: &prompt, slots: Some(&own), state: Some(row) };
                lease.publish(&publication, NO_STREAM).unwrap().duplicates
            })
        });
        let duplicates = threads.map(|thread| thread.join().unwrap());
        assert_eq!(duplicates.iter().sum::<usize>(), 2, "one of them came second");
        cache.verify(NO_STREAM).unwrap();
        let taken = states.with_tracks(|tracks| tracks.rows().in_use());
        assert_eq!((cache.tree_stats(NO_STREAM).snapshots, taken), (1, 1));
    });
}

/// A planner for one request, and its row.
fn planner_and_row(slots: &Arc<TokenToKvPoolAllocator>) -> (Arc<BatchPlanner>, IndexVec) {
    let config = ReqToTokenConfig { strict: true, ..ReqToTokenConfig::new(1, 8) };
    let host: Arc<dyn Backend> = Arc::new(Host);
    let table = ReqToTokenPool::new(&config, &host).expect("small");
    let row = table.alloc(1, NO_STREAM).unwrap().expect("one");
    let config = PlannerConfig { max_batch_size: 1, max_tokens: 8, kv_indices: false, block_table: false };
    let planner = BatchPlanner::new(&config, &host, Arc::clone(slots), Arc::new(table));
    (planner.expect("small"), IndexVec::I64(vec![row[0].into()]))
}

/// A lease of two tokens.
fn lease_of_two(cache: &PrefixCache) -> Arc<Lease> {
    let prompt: &[i32] = &[1, 2, 7];
    cache.match_prefix(&Namespace::Unnamed, &prompt, 2, NO_STREAM).unwrap()
}

/// Starts a request of `tokens` tokens after the two of a lease. Returns whether it began.
fn starts(planner: &BatchPlanner, row: &IndexVec, lease: &Arc<Lease>, tokens: i64) -> bool {
    let prefixes = [Prefix::Leased(Arc::clone(lease))];
    let batch = Batch { rows: row, prefix_lens: &[2], seq_lens: &[tokens], prefixes: &prefixes };
    matches!(planner.extend(batch, NO_STREAM), Ok(Some(_)))
}

#[test]
fn a_request_keeps_its_prefix_while_its_lease_is_released() {
    try_all_calls(Some(2), || {
        let (slots, cache) = full_cache();
        let (planner, row) = planner_and_row(&slots);
        let lease = lease_of_two(&cache);
        let releasing = {
            let lease = Arc::clone(&lease);
            spawn(move || lease.release(NO_STREAM))
        };
        let started = starts(&planner, &row, &lease, 3);
        releasing.join().unwrap();
        assert!(!started || cache.tree_stats(NO_STREAM).locked >= 2);
    });
}

#[test]
fn no_request_continues_a_prefix_from_before_a_clear() {
    try_all_calls(Some(2), || {
        let (slots, cache) = full_cache();
        let (planner, row) = planner_and_row(&slots);
        let lease = lease_of_two(&cache);
        let clearing = {
            let slots = Arc::clone(&slots);
            spawn(move || slots.clear(NO_STREAM))
        };
        starts(&planner, &row, &lease, 3);
        clearing.join().unwrap();
        assert_eq!(slots.stats().in_use, 0);
    });
}

#[test]
fn a_new_request_keeps_its_lease_while_the_planner_before_ends() {
    try_all_calls(Some(2), || {
        let (slots, cache) = full_cache();
        let (ending, row) = planner_and_row(&slots);
        let lease = lease_of_two(&cache);
        assert!(starts(&ending, &row, &lease, 2));
        let (planner, row) = planner_and_row(&slots);
        let ending = spawn(move || drop(ending));
        let started = starts(&planner, &row, &lease, 3);
        ending.join().unwrap();
        if started {
            assert!(lease.row().is_some());
            lease.release(NO_STREAM);
            assert!(cache.tree_stats(NO_STREAM).locked >= 2);
        }
    });
}

/// A fence that has passed, or never passes.
#[derive(Debug)]
struct FixedFence(bool);

impl Fence for FixedFence {
    fn has_passed(&self) -> kvpool::base::Result<bool> {
        Ok(self.0)
    }
}

#[test]
fn a_fence_frees_no_slots_allocated_after_a_resize() {
    try_all_calls(Some(3), || {
        let config = AllocatorConfig { strict: true, ..AllocatorConfig::new(8) };
        let host: Arc<dyn Backend> = Arc::new(Host);
        let slots = Arc::new(TokenToKvPoolAllocator::new(&config, &host).expect("small"));
        let free_two = |passed| {
            let grant = slots.alloc(2, NO_STREAM).unwrap().expect("there are eight").keep();
            let own = Indices::Host(read_indices(&grant.borrow()).unwrap());
            let fence: Arc<dyn Fence> = Arc::new(FixedFence(passed));
            assert_eq!(slots.free_after(&own, &fence, NO_STREAM).unwrap().dropped(), 0);
        };
        free_two(true);
        let polling = {
            let slots = Arc::clone(&slots);
            spawn(move || slots.poll(NO_STREAM).unwrap())
        };
        slots.resize(8, NO_STREAM).unwrap();
        free_two(false);
        polling.join().unwrap();
        assert_eq!(slots.stats().fenced, 2);
    });
}

#[test]
fn a_planner_runs_a_request_while_another_thread_lacks_slots() {
    try_all_calls(Some(3), || {
        let (slots, cache) = full_cache();
        let (planner, row) = planner_and_row(&slots);
        let short = {
            let (slots, cache) = (Arc::clone(&slots), Arc::clone(&cache));
            spawn(move || publish(&slots, &cache, &[1, 9]))
        };
        let prompt: &[i32] = &[1, 2, 7];
        let lease = cache.match_prefix(&Namespace::Unnamed, &prompt, 2, NO_STREAM).unwrap();
        let begin = i64::try_from(lease.len().unwrap()).unwrap();
        let prefixes = [Prefix::Leased(Arc::clone(&lease))];
        let batch = Batch { rows: &row, prefix_lens: &[begin], seq_lens: &[3], prefixes: &prefixes };
        assert!(planner.extend(batch, NO_STREAM).unwrap().is_some(), "there is enough to evict");
        let new = &prompt[usize::try_from(begin).unwrap()..];
        lease.publish(&Publication { tokens: &new, slots: None, state: None }, NO_STREAM).unwrap();
        assert_eq!(planner.finish(&row, None, None, NO_STREAM).unwrap().bad.dropped(), 0);
        short.join().unwrap();
        drop(lease);
        nothing_is_lost(&slots, &cache, 0);
    });
}

/// Copies that write the number of each step, which the threads that wait read without a lock.
struct Steps([UnsafeCell<usize>; 2]);

// SAFETY: loom checks every access.
unsafe impl Sync for Steps {}
// SAFETY: as above.
unsafe impl Send for Steps {}

#[test]
fn a_step_of_a_copy_is_done_before_its_waiters_go_on() {
    try_all_calls(Some(3), || {
        let queue = CopyQueue::new(CopyDirection::In, None);
        let steps = Arc::new(Steps([0; 2].map(UnsafeCell::new)));
        let copied = Arc::clone(&steps);
        let copy = move |step: usize, _| {
            // SAFETY: loom checks every access.
            copied.0[step].with_mut(|done| unsafe { *done = step + 1 });
            Ok(())
        };
        let transfer = queue.start(2, &[], Vec::new(), copy).unwrap();
        let is_done = |step: usize| {
            // SAFETY: as above.
            assert_eq!(steps.0[step].with(|done| unsafe { *done }), step + 1);
        };
        let waiter = {
            let transfer = Arc::clone(&transfer);
            spawn(move || transfer.wait().unwrap())
        };
        transfer.make_stream_wait(0, NO_STREAM).unwrap();
        is_done(0);
        // The thread ends after the copy, which nothing waits for here.
        drop(queue);
        transfer.make_stream_wait(1, NO_STREAM).unwrap();
        is_done(1);
        waiter.join().unwrap();
        assert!(transfer.is_over().unwrap() && transfer.is_complete().unwrap());
    });
}

#[test]
fn a_cancelled_copy_ends_every_wait() {
    try_all_calls(Some(3), || {
        let queue = CopyQueue::new(CopyDirection::Out, None);
        let transfer = queue.start(2, &[], Vec::new(), |_, _| Ok(())).unwrap();
        let waiter = {
            let transfer = Arc::clone(&transfer);
            spawn(move || transfer.make_stream_wait(1, NO_STREAM))
        };
        transfer.stop(NO_STREAM).unwrap();
        let is_complete = transfer.is_complete().unwrap();
        assert_eq!(
            waiter.join().unwrap().map_err(|error| error.kind()),
            if is_complete { Ok(()) } else { Err(ErrorKind::State) }
        );
    });
}

/// Asks a store for two keys, and returns whether it has them.
fn find(store: &RemoteStore) -> Result<Vec<bool>, ErrorKind> {
    store.find(&[[1; 32], [2; 32]]).map_err(|error| error.kind())
}

#[test]
fn a_caller_gets_its_answer_while_the_store_is_closed() {
    try_all_calls(Some(3), || {
        let store = Arc::new(RemoteStore::default());
        let caller = {
            let store = Arc::clone(&store);
            spawn(move || find(&store))
        };
        let answering = {
            let store = Arc::clone(&store);
            spawn(move || {
                while let Ok(call) = store.next(StoreCallQueue::Reads, FOREVER) {
                    call.expect("time stands still").finish(&[true, false]);
                }
            })
        };
        assert!(store.close(FOREVER).unwrap());
        // It was answered, or came too late.
        let found = caller.join().unwrap();
        assert!(found == Ok(vec![true, false]) || found == Err(ErrorKind::State), "{found:?}");
        answering.join().unwrap();
        assert_eq!(find(&store), Err(ErrorKind::State));
    });
}

#[test]
fn the_thread_that_answers_a_call_abandons_the_store() {
    try_all_calls(Some(3), || {
        let store = Arc::new(RemoteStore::default());
        let callers = [0, 1].map(|_| {
            let store = Arc::clone(&store);
            spawn(move || find(&store))
        });
        let call = store.next(StoreCallQueue::Reads, FOREVER).unwrap().expect("time stands still");
        store.abandon();
        call.finish(&[true, true]);
        let found = callers.map(|caller| caller.join().unwrap());
        // The other call was dropped, or came too late.
        assert_eq!(found.iter().filter(|found| **found == Ok(vec![true, true])).count(), 1, "{found:?}");
        assert!(store.close(FOREVER).unwrap());
    });
}

#[test]
fn a_waiter_is_woken_when_two_threads_store_the_last_pages() {
    /// The bytes of a page.
    const BYTES: usize = 4096;
    try_all_calls(Some(2), || {
        let config = FileStoreConfig {
            capacity_bytes: 4 * BYTES,
            page_bytes: BYTES,
            threads: 2,
            queue_bytes: 4 * BYTES,
            policy: PolicyKind::Lru,
            digest: disks::digest,
        };
        let disk: Arc<dyn Disk> = Arc::<disks::MemoryDisk>::default();
        let store = FileStore::open("store", &config, &disk).unwrap();
        let region = Arc::new(Region::new(Arc::new(Host), 2 * BYTES).expect("small"));
        let pages = TensorView::contiguous(Arc::clone(&region), 0, DType::U8, &[2, BYTES]).unwrap();
        // SAFETY: nothing else uses the region.
        let rows = unsafe { HostRows::of_tensor("pages", &pages.borrow(), region) }.unwrap();
        let put = store.put(vec![[1; 32], [2; 32]], rows, PutAfter::Nothing).unwrap();
        let closing = spawn(move || store.close(FOREVER).unwrap());
        assert!(put.wait(FOREVER).unwrap());
        assert_eq!(put.present().unwrap(), [true, true]);
        assert!(closing.join().unwrap());
    });
}
