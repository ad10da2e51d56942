//! Page-locking of a chunk pool's memory, step by step, while it is used.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, atomic::Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::base::sync::{AtomicUsize, thread};
use crate::base::{Error, ErrorKind, Result, widen};
use crate::memory::{ALIGNMENT, Gpu, PAGE, PAGE_LOCK_STEP};

use super::ChunkPool;

/// About so much is page-locked at a time. Where every order of threads is tried, as little as can be.
const STEP_BYTES: usize = if cfg!(loom) { PAGE } else { PAGE_LOCK_STEP };

/// How far page-locking has come.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Chunks that can be used.
    pub done: usize,
    /// Chunks in all.
    pub total: usize,
    /// Why the last step was not page-locked. Its chunks are ordinary memory.
    pub failure: Option<Error>,
}

impl ChunkPool {
    /// Page-locks the memory step by step on a few threads, until the pool stops. Its only step, if there is one only, is
    /// done on return.
    ///
    /// To be called once; of a pool that is not [`ChunkPool::is_locked`] there is nothing to lock.
    pub fn lock_pages(self: &Arc<Self>) -> Option<PageLocking> {
        let gpu = self.locks_through.clone()?;
        self.state().locking = Some(Locking::default());
        let work = Arc::new(Steps { steps: self.steps(), next: AtomicUsize::new(0) });
        let count = work.steps.len();
        for number in 0..self.config.page_lock_threads.min(count) {
            let (worker, gpu, work) = (Worker::new(self), Arc::clone(&gpu), Arc::clone(&work));
            let lock = move || {
                while let Some(step) = work.steps.get(work.next.fetch_add(1, Relaxed))
                    && !worker.0.stop.load(Relaxed)
                {
                    worker.0.lock_step(&gpu, step);
                }
            };
            let name = format!("kvpool-page-lock-{number}");
            if count == 1 {
                lock();
            } else if let Err(failure) = thread::Builder::new().name(name).spawn(lock)
                && number == 0
            {
                // The machine has no thread to give: the memory stays ordinary.
                let all = 0..u32::try_from(self.config.num_chunks).unwrap_or(u32::MAX);
                self.offer(&all, Err(Error::new(ErrorKind::OutOfMemory, failure.to_string())));
                break;
            }
        }
        Some(PageLocking { pool: Arc::clone(self), steps: count })
    }

    /// The chunks of each step. Each begins and ends at a page, so that none shares a page with another.
    fn steps(&self) -> Vec<Range<u32>> {
        let pages = |chunks: &usize| (chunks * self.stride).is_multiple_of(PAGE);
        let least = (1..=PAGE / ALIGNMENT).find(pages).unwrap_or(PAGE / ALIGNMENT);
        let chunks = (STEP_BYTES / self.stride).max(1).next_multiple_of(least);
        let count = self.config.num_chunks;
        (0..count)
            .step_by(chunks)
            .map(|first| {
                let end = first.saturating_add(chunks).min(count);
                u32::try_from(first).unwrap_or(u32::MAX)..u32::try_from(end).unwrap_or(u32::MAX)
            })
            .collect()
    }

    /// Page-locks a step and offers its chunks.
    fn lock_step(&self, gpu: &Arc<Gpu>, step: &Range<u32>) {
        let bytes = widen(step.start) * self.stride..widen(step.end) * self.stride;
        let locked = match &self.mapped {
            Some(mapped) => mapped.lock_pages(gpu, &self.region, &bytes),
            None => Ok(()),
        };
        self.offer(step, locked);
    }

    /// Offers chunks that were page-locked or could not be, and tells it.
    fn offer(&self, step: &Range<u32>, locked: Result<()>) {
        let mut state = self.state();
        state.chunks.offer(step.clone());
        if locked.is_ok() {
            state.registered += step.len();
        }
        let done = state.chunks.ready() + state.chunks.in_use();
        if let Some(locking) = &mut state.locking {
            locking.told.push_back(Progress { done, total: self.config.num_chunks, failure: locked.err() });
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends page-locking early. What it has not come to is never offered.
    pub fn stop(&self) {
        self.stop.store(true, Relaxed);
    }

    /// Waits until page-locking has ended, or for `timeout`; whether it has.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] in the child of a fork, where it never ends.
    pub fn wait_registered(&self, timeout: Duration) -> Result<bool> {
        let begin = Instant::now();
        let mut state = self.state();
        while state.locking.is_some() {
            self.check_process()?;
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            state = self.wait(state, left);
        }
        Ok(true)
    }
}

/// The steps of page-locking, of which each thread takes the next.
#[derive(Debug)]
struct Steps {
    steps: Vec<Range<u32>>,
    next: AtomicUsize,
}

/// What is known of page-locking that goes on.
#[derive(Debug, Default)]
pub(super) struct Locking {
    workers: usize,
    /// Steps that nobody has asked for yet.
    told: VecDeque<Progress>,
}

/// A thread's part in page-locking.
struct Worker(Arc<ChunkPool>);

impl Worker {
    fn new(pool: &Arc<ChunkPool>) -> Self {
        if let Some(locking) = &mut pool.state().locking {
            locking.workers += 1;
        }
        Self(Arc::clone(pool))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(locking) = &mut self.0.state().locking {
            locking.workers -= 1;
        }
        self.0.changed.notify_all();
    }
}

/// Page-locking that goes on, until it drops.
#[derive(Debug)]
pub struct PageLocking {
    pool: Arc<ChunkPool>,
    steps: usize,
}

impl PageLocking {
    /// How many steps it takes.
    #[must_use]
    pub const fn steps(&self) -> usize {
        self.steps
    }

    /// Waits for the next step, at most for `timeout`; `Ok(None)` if there was none.
    ///
    /// # Errors
    /// [`Over`] when there is no further step.
    pub fn next(&mut self, timeout: Duration) -> std::result::Result<Option<Progress>, Over> {
        let begin = Instant::now();
        let mut state = self.pool.state();
        loop {
            let Some(locking) = &mut state.locking else { return Err(Over) };
            if let Some(step) = locking.told.pop_front() {
                return Ok(Some(step));
            }
            if locking.workers == 0 {
                return Err(Over);
            }
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            state = self.pool.wait(state, left);
        }
    }

    /// Has it end after the steps that were begun.
    pub fn stop(&self) {
        self.pool.stop();
    }
}

impl Drop for PageLocking {
    fn drop(&mut self) {
        self.pool.state().locking = None;
        self.pool.changed.notify_all();
    }
}

/// There is no further step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over;
