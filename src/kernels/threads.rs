//! Large copies, split among threads.
//!
//! The number of threads never changes a result.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, TryLockError};
use std::{process, thread};

use super::CopyThreads;

/// The minimum work for which a thread is used. On a virtual Intel Xeon with 2 MiB of second-level cache a
/// core (2026-11) two threads copy 2 MiB in 35 us instead of 130 when they are awake, as in a series of
/// copies. When they sleep, waking one delays its caller by 15 us, and two threads are faster from 4 MiB on:
/// 2 MiB take 145 us instead of 124.
const BYTES_PER_THREAD: usize = 1 << 20;

/// More threads than this add no bandwidth on any host we know of.
const MAX_BY_DEFAULT: usize = 16;

/// 0 until it is first read or set.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of threads that one large copy may use.
///
/// ```
/// kvpool::kernels::set_num_threads(2);
/// assert_eq!(kvpool::kernels::num_threads(), 2);
/// ```
#[must_use]
pub fn num_threads() -> usize {
    match THREADS.load(Relaxed) {
        0 => {
            let threads = thread::available_parallelism().map_or(1, |n| n.get().min(MAX_BY_DEFAULT));
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

/// The standing threads, and the process that they belong to: the child of a fork has none.
static COPY_THREADS: Mutex<(u32, CopyThreads)> = Mutex::new((0, CopyThreads::new()));

/// Calls `work(part, parts)` for every part, on as many threads as pay for `bytes`, or on this one alone
/// while another call has the others.
pub(super) fn run_in_parts(bytes: usize, work: impl Fn(usize, usize) + Sync) {
    if bytes < 2 * BYTES_PER_THREAD || !try_run_on_threads(bytes, &work) {
        work(0, 1);
    }
}

/// Runs the work in parts on several threads, or returns false if one thread should do all of it. It is not
/// inlined, to keep small copies cheap.
#[inline(never)]
fn try_run_on_threads(bytes: usize, work: &(dyn Fn(usize, usize) + Sync)) -> bool {
    let parts = num_threads().min(bytes / BYTES_PER_THREAD);
    if parts < 2 {
        return false;
    }
    let mut guard = match COPY_THREADS.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
        Err(TryLockError::WouldBlock) => return false,
    };
    let (owner, threads) = &mut *guard;
    if *owner != process::id() {
        threads.forget();
        *owner = process::id();
    }
    threads.run(parts, work);
    true
}
