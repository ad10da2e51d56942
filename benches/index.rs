//! Micro-benchmarks of the slot allocator without Python, against a sorted vector of free slots.
//!
//! Run it with `cargo bench`. Each line is a question with both answers and their ratio.

use std::collections::VecDeque;
use std::hint::black_box;
use std::io::Write as _;
use std::time::Instant;

use kvpool::base::IndexVec;
use kvpool::index::{Order, SlotAllocator};

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
        let bad = slots.free(&IndexVec::I32(black_box(taken)), false);
        let _ = black_box(bad);
    }
}

/// A pool in which every `step`th slot is free, as interleaved decoding leaves it.
fn fragmented(step: usize) -> SlotAllocator {
    let Ok(mut slots) = SlotAllocator::new(SIZE, 1, Order::Sorted) else { unreachable!("a valid size") };
    let _ = slots.alloc::<i32>(SIZE);
    let freed = (1..SIZE).step_by(step).filter_map(|slot| i32::try_from(slot).ok()).collect();
    let _ = slots.free(&IndexVec::I32(freed), false);
    slots
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
}
