//! Micro-benchmarks without Python: the slot allocator against a queue of free slots, locks of the prefix
//! cache against reference counts, and copies of pages to pieces of host memory against `memcpy`.
//!
//! Run it with `cargo bench`. Each line is a question with both answers and their ratio.

use std::collections::VecDeque;
use std::hint::black_box;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Instant;

use kvpool::base::{ChunkId, DType, Id, IndexVec, Page, Result, widen};
use kvpool::cache::{BlockTokens, Namespace, PolicyKind, ResumeAt, Tree};
use kvpool::index::{OnBadFree, Order, SlotAllocator};
use kvpool::kernels::{
    Executor, HostAccess, IndexSpace, IndexSpaces, LayerRows, PageCopy, PagePair, Pieces, PlaneRows,
};
use kvpool::memory::{Host, Region, Stream};

const SIZE: usize = 1 << 20;
const ROUNDS: usize = 15;

/// The median time of `work`, in nanoseconds, over several rounds of `repeats` calls.
fn median_ns(repeats: u32, mut work: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            (0..repeats).for_each(|_| work());
            start.elapsed().as_secs_f64() * 1e9 / f64::from(repeats)
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

/// The obvious free list: a queue of numbers, cut at the front and extended at the back, without checks.
struct Queue(VecDeque<i32>);

impl Queue {
    fn new() -> Self {
        Self((1..=i32::try_from(SIZE).unwrap_or(i32::MAX)).collect())
    }

    fn cycle(&mut self, count: usize) {
        let taken: Vec<i32> = self.0.drain(..count).collect();
        self.0.extend(black_box(taken));
    }
}

fn cycle(slots: &mut SlotAllocator, count: usize) {
    if let Ok(Some(taken)) = slots.alloc(count) {
        let bad = slots.free(&IndexVec::I32(black_box(taken)), OnBadFree::Report);
        let _ = black_box(bad);
    }
}

/// A pool in which every `step`th slot is free, as interleaved decoding leaves it.
fn fragmented(step: usize) -> SlotAllocator {
    let Ok(mut slots) = SlotAllocator::new(SIZE, 1, Order::Sorted) else { unreachable!("a valid size") };
    let _ = slots.alloc::<i32>(SIZE);
    let freed = (1..SIZE).step_by(step).filter_map(|slot| i32::try_from(slot).ok()).collect();
    let _ = slots.free(&IndexVec::I32(freed), OnBadFree::Report);
    slots
}

/// Nodes on the way to the end of a prompt.
const DEPTH: u32 = 8;

/// A reference count on each node of a path.
fn count_path(counts: &mut [u32], change: i32) {
    for count in counts {
        *count = count.wrapping_add_signed(change);
    }
}

/// A prefix cache in which prompts part from each other at the end of each of `DEPTH` nodes of 64 tokens, and
/// the longest of them.
fn parted() -> (Tree, Vec<i32>) {
    let (name, policy) =
        (Namespace::Unnamed, PolicyKind::Adaptive.policy(1 << 20, BlockTokens::of_page_size(1), None));
    let mut tree = Tree::new(1, ResumeAt::AnyPage, policy);
    let prompt: Vec<i32> = (0..64 * DEPTH).map(u32::cast_signed).collect();
    let mut pages = (1..).map(Page::new);
    for end in (64..=prompt.len()).step_by(64) {
        let parting: Vec<i32> = prompt[..end].iter().copied().chain([100_000]).collect();
        for tokens in [&parting[..], &prompt[..end]] {
            let Ok(mut hold) = tree.match_prefix(&name, &tokens, usize::MAX) else { continue };
            let rest = &tokens[hold.len()..];
            let Ok(found) = tree.find(&hold, &rest) else { continue };
            let new: Vec<Page> = pages.by_ref().take(rest.len()).collect();
            tree.publish(&mut hold, found, rest.to_vec(), &new);
            let _ = tree.release(hold);
        }
    }
    (tree, prompt)
}

/// A prefix that is locked and unlocked: if it is locked already, without a look-up; if not, when each node
/// on its way is locked and its use noted, as what a match and an unlock cost more than a look-up that does
/// neither.
fn locks(out: &mut impl std::io::Write) {
    let (mut tree, prompt) = parted();
    let mut counts = [0; DEPTH as usize];
    let theirs = median_ns(20_000, || {
        count_path(black_box(&mut counts), 1);
        count_path(black_box(&mut counts), -1);
    });
    let looked_up = median_ns(20_000, || {
        if let Ok(hold) = tree.match_prefix(&Namespace::Unnamed, &black_box(&prompt).as_slice(), usize::MAX) {
            let _ = black_box(tree.release(hold));
        }
    });
    let found = median_ns(20_000, || {
        let _ = black_box(tree.cached_len(&Namespace::Unnamed, &black_box(&prompt).as_slice()));
    });
    let Ok(hold) = tree.match_prefix(&Namespace::Unnamed, &prompt.as_slice(), usize::MAX) else { return };
    let locked = median_ns(20_000, || {
        let other = tree.hold_again(black_box(&hold));
        let _ = black_box(tree.release(other));
    });
    let _ =
        writeln!(out, "\n{:<38}{:>12}{:>16}{:>8}", "prefix of 8 nodes", "kvpool ns", "8 counts ns", "ratio");
    for (label, ours) in [
        ("lock + unlock, locked already", locked),
        ("lock + unlock of every node, refreshed", looked_up - found),
        ("look-up of its 512 tokens alone", found),
    ] {
        let _ = writeln!(out, "{label:<38}{ours:>12.0}{theirs:>16.0}{:>8.2}", theirs / ours);
    }
    let _ = tree.release(hold);
}

/// Rows of K and of V in each layer of a pool, and their bytes.
const ROWS: usize = 16 << 10;
const ROW_BYTES: usize = 2048;
const LAYERS: usize = 8;
/// Rows of a layer that are copied at once.
const COPIED: usize = 1024;

/// A pool of K and V, and pieces for its pages.
struct Tier {
    rows: LayerRows,
    executor: Executor,
    pieces: Pieces,
    page_size: usize,
    pairs: Vec<PagePair<Page>>,
}

impl Tier {
    fn new(page_size: usize) -> Result<Self> {
        let step = ROWS * ROW_BYTES;
        let region = Arc::new(Region::new(Arc::new(Host), 2 * LAYERS * step)?);
        let plane = |offset| PlaneRows::new(offset, LAYERS, step, [ROWS, 1, ROW_BYTES], DType::U8);
        let rows = LayerRows::new(&region, [plane(0)?, plane(LAYERS * step)?])?;
        let space = IndexSpace { noun: "row", len: ROWS };
        let executor = Executor::new(&region, LAYERS, IndexSpaces::of_rows(space), 0)?;
        let (stride, count) = (rows.piece(page_size)?.bytes(), ROWS / page_size);
        let memory = Arc::new(Region::new(Arc::new(Host), stride * count)?);
        for region in [&region, &memory] {
            // SAFETY: these bytes are live host memory, which nothing else uses yet.
            unsafe { region.address().write_bytes(1, region.bytes()) };
        }
        let pieces = Pieces::new(memory, HostAccess::Copied, &rows, page_size, stride, count)?;
        let pages = u32::try_from(count).unwrap_or(u32::MAX);
        // An odd number without a pattern leads to each page once.
        let pairs = (0..u32::try_from(COPIED / page_size).unwrap_or(0))
            .map(|at| PagePair {
                page: Page::new(at.wrapping_mul(0x9E37_79B1) % pages),
                piece: ChunkId::new(at.wrapping_mul(0x85EB_CA77) % pages),
            })
            .collect();
        Ok(Self { rows, executor, pieces, page_size, pairs })
    }

    fn copy(&self, direction: PageCopy) {
        let copied = self.executor.copy_pages(
            &self.rows,
            &self.pieces,
            direction,
            &self.pairs,
            0..LAYERS,
            Stream::DEFAULT,
        );
        let _ = black_box(copied);
    }

    /// The same bytes, from and to the same places.
    fn memcpy(&self, direction: PageCopy) {
        let page_bytes = self.page_size * ROW_BYTES;
        let memory = self.pieces.region().address().as_ptr();
        for pair in &self.pairs {
            for layer in 0..LAYERS {
                for (kind, buffers) in self.rows.kinds().into_iter().enumerate() {
                    let buffer = &buffers[layer];
                    let pool = buffer.region().address().as_ptr();
                    let page = pool.wrapping_add(buffer.offset() + widen(pair.page.number()) * page_bytes);
                    let offset = (2 * layer + kind) * page_bytes;
                    let piece =
                        memory.wrapping_add(widen(pair.piece.number()) * self.pieces.stride() + offset);
                    let (source, target) = match direction {
                        PageCopy::Out => (page, piece),
                        PageCopy::In => (piece, page),
                    };
                    // SAFETY: pages lie in the region of the pool and pieces in theirs, which nothing else
                    // uses.
                    unsafe { target.copy_from_nonoverlapping(source, page_bytes) };
                }
            }
        }
    }
}

/// Copies of random pages of K and V of all layers to their pieces, and back.
fn pages(out: &mut impl std::io::Write) {
    let _ =
        writeln!(out, "\n{:<38}{:>12}{:>16}{:>8}", "pages of 2 KiB rows", "kvpool ns", "memcpy ns", "ratio");
    for page_size in [1, 16] {
        let Ok(tier) = Tier::new(page_size) else { continue };
        for (name, direction) in [("out to", PageCopy::Out), ("in from", PageCopy::In)] {
            let ours = median_ns(3, || tier.copy(direction));
            let theirs = median_ns(3, || tier.memcpy(direction));
            let label = format!("{} pages of {page_size} {name} host memory", tier.pairs.len());
            let _ = writeln!(out, "{label:<38}{ours:>12.0}{theirs:>16.0}{:>8.2}", theirs / ours);
        }
    }
}

fn main() {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(
        out,
        "{:<38}{:>12}{:>16}{:>8}",
        "alloc + free, 1 M slots", "kvpool ns", "unchecked ns", "ratio"
    );
    // With a step of 256 the largest request takes all that are free, so each alloc merges.
    for step in [2, 40, 256] {
        let fragmented = fragmented(step);
        for count in [1, 128, 4096] {
            let mut slots = fragmented.clone();
            let mut queue = Queue((1..=4096).map(|slot| 64 * slot).collect());
            let ours = median_ns(2000, || cycle(&mut slots, count));
            let theirs = median_ns(2000, || queue.cycle(count));
            let label = format!("one slot of {step} is free, n = {count}");
            let _ = writeln!(out, "{label:<38}{ours:>12.0}{theirs:>16.0}{:>8.2}", theirs / ours);
        }
    }
    for (name, page_size, order) in [
        ("sorted, page 1", 1, Order::Sorted),
        ("first in, first out, page 1", 1, Order::Fifo),
        ("sorted, page 16", 16, Order::Sorted),
    ] {
        for count in [1, 128, 4096] {
            let Ok(mut slots) = SlotAllocator::new(SIZE, page_size, order) else { continue };
            let mut queue = Queue::new();
            let ours = median_ns(2000, || cycle(&mut slots, count));
            let theirs = median_ns(2000, || queue.cycle(count));
            let label = format!("{name}, n = {count}");
            let _ = writeln!(out, "{label:<38}{ours:>12.0}{theirs:>16.0}{:>8.2}", theirs / ours);
        }
    }
    locks(&mut out);
    pages(&mut out);
}
