//! Large copies, split among threads.
//!
//! Threads are started per call, so nothing is kept between calls. The number of threads never changes a
//! result.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

/// The least work of a thread; starting one costs about as much as copying 200 KB.
const BYTES_PER_THREAD: usize = 2 << 20;

/// More threads than this add no bandwidth on any host we know of.
const MOST_BY_DEFAULT: usize = 16;

/// 0 until it is first read or set.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// The number of threads that one large copy may use.
///
/// ```
/// kvpool::kernels::set_num_threads(2);
/// assert_eq!(kvpool::kernels::num_threads(), 2);
/// ```
#[must_use]
pub fn num_threads() -> usize {
    match THREADS.load(Relaxed) {
        0 => {
            let threads = thread::available_parallelism().map_or(1, |n| n.get().min(MOST_BY_DEFAULT));
            THREADS.store(threads, Relaxed);
            threads
        }
        threads => threads,
    }
}

/// Sets the number of threads that one large copy may use; 0 means as many as the machine has, up to 16.
pub fn set_num_threads(threads: usize) {
    THREADS.store(threads, Relaxed);
}

/// Calls `work(part, parts)` for every part, on as many threads as pay for `bytes`.
pub(super) fn in_parts(bytes: usize, work: impl Fn(usize, usize) + Sync) {
    let parts = num_threads().min(bytes / BYTES_PER_THREAD).max(1);
    if parts == 1 {
        return work(0, 1);
    }
    let work = &work;
    thread::scope(|scope| {
        for part in 1..parts {
            let spawned = thread::Builder::new().spawn_scoped(scope, move || work(part, parts));
            if spawned.is_err() {
                // The system has no more threads: this one does the part.
                work(part, parts);
            }
        }
        work(0, parts);
    });
}
