//! Times the block manager of KVBM, and prints one JSON object: microseconds by question.

use std::time::Instant;

use kvbm_logical::blocks::ImmutableBlock;
use kvbm_logical::{BlockManager, BlockRegistry, SequenceHash};

const PAGE: usize = 16;
const ROUNDS: usize = 31;

#[derive(Clone)]
struct Device;

type Manager = BlockManager<Device>;

fn manager(blocks: usize) -> Manager {
    BlockManager::builder()
        .block_count(blocks)
        .block_size(PAGE)
        .registry(BlockRegistry::builder().build())
        .with_lru_backend()
        .build()
        .expect("a valid configuration")
}

/// The hashes of a chain of blocks. Making them is not timed.
fn chain(seed: u64, blocks: usize) -> Vec<SequenceHash> {
    let mut state = seed;
    let mut before = None;
    (0..blocks)
        .map(|position| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let hash = SequenceHash::new(state, before, position as u64);
            before = Some(state);
            hash
        })
        .collect()
}

fn register(manager: &Manager, hashes: &[SequenceHash]) -> Vec<ImmutableBlock<Device>> {
    let blocks = manager.allocate_blocks(hashes.len()).expect("enough blocks");
    let staged =
        blocks.into_iter().zip(hashes).map(|(block, hash)| block.stage(*hash, PAGE).expect("a block"));
    manager.register_blocks(staged.collect())
}

fn median(mut work: impl FnMut() -> f64) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS).map(|_| work()).collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

fn micros<R>(work: impl FnOnce() -> R) -> f64 {
    let start = Instant::now();
    let result = work();
    let time = start.elapsed().as_secs_f64() * 1e6;
    drop(result);
    time
}

/// A number below a billion with its digits in groups of three.
fn grouped(number: usize) -> String {
    match (number / 1_000_000, number / 1000 % 1000, number % 1000) {
        (0, thousands, rest) => format!("{thousands},{rest:03}"),
        (millions, thousands, rest) => format!("{millions},{thousands:03},{rest:03}"),
    }
}

fn main() {
    let mut answers = Vec::new();
    for pages in [64, 512, 4096, 8192, 65536] {
        let (manager, hashes) = (manager(2 * pages), chain(1, pages));
        drop(register(&manager, &hashes));
        // Found, kept and given up again.
        let time = median(|| {
            micros(|| {
                let found = manager.match_blocks(&hashes);
                assert_eq!(found.len(), pages);
                drop(found);
            })
        });
        answers.push((format!("match + release of {} tokens", grouped(pages * PAGE)), time));
    }
    let (manager, mut seed) = (manager(1 << 14), 2);
    let time = median(|| {
        seed += 1;
        let hashes = chain(seed, 4);
        micros(|| register(&manager, &hashes))
    });
    answers.push((format!("publish of {} tokens", 4 * PAGE), time));
    let rows: Vec<String> =
        answers.iter().map(|(question, time)| format!("\"{question}\": {time:.3}")).collect();
    println!("{{{}}}", rows.join(", "));
}
