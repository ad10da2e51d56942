//! Scratch buffers: which memory is reused, and that no two buffers share any.

use std::sync::Arc;

use kvpool::base::{BufferId, ErrorKind};
use kvpool::index::{IndexHandle, Rounding};
use kvpool::memory::{Keep, Stream};
use kvpool::pool::{Buffer, BufferConfig, BufferPool, Pool};

use super::{Source, Verdict, agree, contents, ensure, host};

/// A buffer in use.
struct Live {
    handle: IndexHandle<BufferId>,
    address: usize,
    capacity: usize,
    lane: Stream,
    /// The byte that its owner wrote to all of it.
    mark: u8,
    buffer: Buffer,
}

/// A freed buffer.
#[derive(Clone, Copy, PartialEq)]
struct Free {
    address: usize,
    capacity: usize,
    lane: Stream,
}

struct Model {
    /// The buffers in the order of taking, except that the last one fills the gap of a freed one.
    live: Vec<Live>,
    /// The last one freed is at the end.
    free: Vec<Free>,
    stale: Vec<IndexHandle<BufferId>>,
    stale_uses: usize,
    marks: u8,
    high_water_bytes: usize,
}

/// The number of stale handles tried after every step.
const STALE: usize = 8;

pub(super) fn run(source: &mut Source<'_>) {
    let rounding = source.of(&[Rounding::Pow2, Rounding::Fine]);
    let pool = BufferPool::new(&BufferConfig { rounding }, &host());
    let mut model = Model {
        live: Vec::new(),
        free: Vec::new(),
        stale: Vec::new(),
        stale_uses: 0,
        marks: 0,
        high_water_bytes: 0,
    };
    while source.next_step() {
        step(source, &pool, &mut model);
        check(&pool, &mut model);
    }
}

fn step(source: &mut Source<'_>, pool: &BufferPool, model: &mut Model) {
    match source.below(16) {
        0..=5 => {
            let (bytes, lane) = (bytes(source), lane(source));
            if let Some(buffer) = agree(pool.alloc(bytes, lane), &possible(pool, &[bytes])) {
                taken(pool, model, buffer, bytes, lane);
            } else {
                lose(model, pool, bytes);
            }
        }
        6 | 7 => batch(source, pool, model),
        8..=12 => {
            if !model.live.is_empty() {
                let live = model.live.swap_remove(source.below(model.live.len()));
                check_mark(&live);
                pool.release(live.handle).expect("it is live");
                give_back(model, &live);
            }
        }
        13 => {
            pool.reset();
            while let Some(live) = model.live.pop() {
                check_mark(&live);
                give_back(model, &live);
            }
        }
        14 => {
            pool.clear();
            model.free.clear();
        }
        _ => {
            let Some(live) = model.live.first() else { return };
            let all = live.buffer.region().bytes_at(0, live.capacity).expect("inside");
            let registered = || stat(pool, "registered_bytes");
            let before = registered();
            let keep = source.flip().then(|| Arc::new(()) as Keep);
            let is_new = match pool.register_existing(&all, keep, false) {
                Ok(is_new) => is_new,
                // With a driver: other memory in the same page is page-locked.
                Err(failure) => return assert_eq!(failure.kind(), ErrorKind::Argument, "{failure}"),
            };
            assert_eq!(registered() - before, if is_new { live.capacity } else { 0 });
            assert!(!pool.register_existing(&all, None, false).expect("host memory"));
        }
    }
}

fn lane(source: &mut Source<'_>) -> Stream {
    // SAFETY: the pool is in host memory, where streams are names only.
    unsafe { Stream::from_handle(source.below(3) << 4, 0) }.expect("a handle")
}

fn bytes(source: &mut Source<'_>) -> usize {
    match source.below(16) {
        0 => source.of(&[usize::MAX, usize::MAX / 2, 1 << 63, (1 << 62) + 1, 1 << 60]),
        1..=4 => source.below(5000),
        _ => source.below(40),
    }
}

/// Checks that buffers have a bucket, and that the model's host can allocate them.
fn possible(pool: &BufferPool, sizes: &[usize]) -> Verdict {
    ensure(sizes.iter().all(|&bytes| pool.config().rounding.bucket(bytes).is_ok()), ErrorKind::Argument)?;
    ensure(sizes.iter().all(|&bytes| bytes < 1 << 40), ErrorKind::OutOfMemory)
}

/// Free buffers are dropped for a new one that memory is missing for; a size without a bucket is refused
/// before.
fn lose(model: &mut Model, pool: &BufferPool, bytes: usize) {
    if pool.config().rounding.bucket(bytes).is_ok() {
        model.free.clear();
    }
}

/// Checks the buffer that was handed out, and fills it.
fn taken(pool: &BufferPool, model: &mut Model, buffer: Buffer, bytes: usize, lane: Stream) {
    let (address, capacity) = (buffer.region().address().as_ptr().addr(), buffer.region().bytes());
    assert_eq!(capacity, pool.config().rounding.bucket(bytes).expect("possible").bytes());
    assert!(capacity >= bytes.max(1) && capacity < 2 * bytes.max(1) && buffer.bytes() == bytes);
    let last = |of: &dyn Fn(&Free) -> bool| {
        model.free.iter().rposition(|free| free.capacity == capacity && of(free))
    };
    let known = model.free.iter().rposition(|free| free.address == address && free.capacity == capacity);
    let expected = match (last(&|free| free.lane == lane), known) {
        (Some(own), _) => Some(own),
        (None, Some(known)) => last(&|free| free.lane == model.free[known].lane),
        // Any buffer of another lane may be reused, but one must be.
        (None, None) => last(&|_| true),
    };
    assert_eq!(known, expected, "a buffer of its bucket is used again, the last given back first");
    if let Some(at) = known {
        model.free.remove(at);
    } else {
        let first = buffer.region().at(0, capacity).expect("all of it");
        // SAFETY: the region is live, has this length, and belongs to this buffer alone.
        let all = unsafe { std::slice::from_raw_parts(first.as_ptr(), capacity) };
        assert!(all.iter().all(|&byte| byte == 0), "a new buffer is zero");
    }
    assert!(
        model
            .live
            .iter()
            .all(|other| other.address + other.capacity <= address || address + capacity <= other.address)
    );
    model.marks = model.marks.wrapping_add(1);
    let live = Live { handle: buffer.handle(), address, capacity, lane, mark: model.marks, buffer };
    contents::fill(live.buffer.region(), 0, capacity, live.mark);
    model.live.push(live);
    let in_use: usize = model.live.iter().map(|live| live.capacity).sum();
    model.high_water_bytes = model.high_water_bytes.max(in_use);
}

/// Checks that no other code has written to a buffer before it is freed.
fn check_mark(live: &Live) {
    let first = live.buffer.region().at(0, live.capacity).expect("all of it");
    // SAFETY: the region is live and has this length, and no code writes to it now.
    let all = unsafe { std::slice::from_raw_parts(first.as_ptr(), live.capacity) };
    assert!(all.iter().all(|&byte| byte == live.mark), "another owner has written to the buffer");
}

fn give_back(model: &mut Model, live: &Live) {
    let Live { handle, address, capacity, lane, .. } = *live;
    model.free.push(Free { address, capacity, lane });
    model.stale.push(handle);
}

/// Takes several buffers, all or none.
fn batch(source: &mut Source<'_>, pool: &BufferPool, model: &mut Model) {
    let lane = lane(source);
    let sizes: Vec<usize> = (0..source.below(4)).map(|_| bytes(source)).collect();
    match agree(pool.alloc_batch(&sizes, lane), &possible(pool, &sizes)) {
        Some(buffers) => {
            assert_eq!(buffers.len(), sizes.len());
            for (buffer, bytes) in buffers.into_iter().zip(sizes) {
                taken(pool, model, buffer, bytes, lane);
            }
        }
        None if sizes.iter().any(|&bytes| pool.config().rounding.bucket(bytes).is_err()) => (),
        // Buffers that were taken and freed again may be in another order, and new ones may be free: start
        // again.
        None => {
            pool.clear();
            model.free.clear();
        }
    }
}

fn stat(pool: &BufferPool, name: &str) -> usize {
    pool.stats().get(name).expect("a statistic of buffer pools")
}

fn check(pool: &BufferPool, model: &mut Model) {
    assert_eq!(pool.with_buckets(|buckets| buckets.broken_invariant()), None);
    let stat = |name| stat(pool, name);
    let bytes = |capacities: &mut dyn Iterator<Item = usize>| capacities.sum::<usize>();
    assert_eq!((stat("in_use"), stat("available")), (model.live.len(), model.free.len()));
    assert_eq!(stat("in_use_bytes"), bytes(&mut model.live.iter().map(|live| live.capacity)));
    assert_eq!(stat("free_bytes"), bytes(&mut model.free.iter().map(|free| free.capacity)));
    assert_eq!(stat("high_water_bytes"), model.high_water_bytes);
    let excess = model.stale.len().saturating_sub(STALE);
    model.stale.drain(..excess);
    for &handle in &model.stale {
        let error = pool.release(handle).expect_err("it was given back");
        assert_eq!(error.kind(), ErrorKind::Stale);
    }
    model.stale_uses += model.stale.len();
    assert_eq!(stat("stale_uses"), model.stale_uses);
    for live in &model.live {
        assert_eq!(pool.region(live.handle).expect("it is live").address().as_ptr().addr(), live.address);
    }
}
