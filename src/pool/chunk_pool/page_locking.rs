//! Page-locking of a chunk pool's memory, step by step, while it is used.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use crate::base::{Error, ErrorKind, Result, widen};
use crate::kernels::num_threads;
use crate::memory::{ALIGNMENT, Gpu, PAGE};

use super::ChunkPool;

/// About so much is page-locked at a time: some tens of milliseconds of work.
const STEP_BYTES: usize = 256 << 20;

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
    /// Page-locks the memory step by step on several threads, until the pool stops. Its only step, if there is one only, is
    /// done on return.
    ///
    /// To be called once; of a pool that is not [`ChunkPool::is_locked`] there is nothing to lock.
    pub fn lock_pages(self: &Arc<Self>) -> Option<PageLocking> {
        let gpu = self.locks_through.clone()?;
        self.state().is_locking = true;
        let (sender, progress) = mpsc::channel();
        let work = Arc::new(Steps { steps: self.steps(), next: AtomicUsize::new(0) });
        let count = work.steps.len();
        for number in 0..num_threads().min(count) {
            let (pool, gpu, work, steps_done) =
                (Arc::clone(self), Arc::clone(&gpu), Arc::clone(&work), sender.clone());
            let lock = move || {
                while let Some(step) = work.steps.get(work.next.fetch_add(1, Relaxed))
                    && !pool.stop.load(Relaxed)
                {
                    // Whether somebody still listens or not, the memory is locked.
                    let _ = steps_done.send(pool.lock_step(&gpu, step));
                }
            };
            let name = format!("kvpool-page-lock-{number}");
            if count == 1 {
                lock();
            } else if let Err(failure) = thread::Builder::new().name(name).spawn(lock)
                && number == 0
            {
                // The machine has no thread to give: the memory stays ordinary.
                self.state().chunks.offer(0..u32::try_from(self.config.num_chunks).unwrap_or(u32::MAX));
                let failure = Some(Error::new(ErrorKind::OutOfMemory, failure.to_string()));
                let total = self.config.num_chunks;
                let _ = sender.send(Progress { done: total, total, failure });
                break;
            }
        }
        Some(PageLocking { pool: Arc::clone(self), progress, steps: count, done: 0 })
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
    fn lock_step(&self, gpu: &Arc<Gpu>, step: &Range<u32>) -> Progress {
        let bytes = widen(step.start) * self.stride..widen(step.end) * self.stride;
        let locked = match &self.mapped {
            Some(mapped) => mapped.lock_pages(gpu, &self.region, &bytes),
            None => Ok(()),
        };
        let mut state = self.state();
        state.chunks.offer(step.clone());
        if locked.is_ok() {
            state.registered += step.len();
        }
        let done = state.chunks.ready() + state.chunks.in_use();
        drop(state);
        self.changed.notify_all();
        Progress { done, total: self.config.num_chunks, failure: locked.err() }
    }

    fn end_locking(&self) {
        self.state().is_locking = false;
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
        let state = self.state();
        if state.is_locking {
            self.check_process()?;
        }
        match self.changed.wait_timeout_while(state, timeout, |state| state.is_locking) {
            Ok((_, waited)) => Ok(!waited.timed_out()),
            Err(_) => Ok(true),
        }
    }
}

/// The steps of page-locking, of which each thread takes the next.
#[derive(Debug)]
struct Steps {
    steps: Vec<Range<u32>>,
    next: AtomicUsize,
}

/// Page-locking that goes on, until it drops.
#[derive(Debug)]
pub struct PageLocking {
    pool: Arc<ChunkPool>,
    progress: mpsc::Receiver<Progress>,
    steps: usize,
    /// Steps of several threads may be told in another order than they were counted; what is told only grows.
    done: usize,
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
        match self.progress.recv_timeout(timeout) {
            Ok(step) => {
                self.done = self.done.max(step.done);
                Ok(Some(Progress { done: self.done, ..step }))
            }
            Err(mpsc::RecvTimeoutError::Timeout) => Ok(None),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(Over),
        }
    }

    /// Has it end after the steps that were begun.
    pub fn stop(&self) {
        self.pool.stop();
    }
}

impl Drop for PageLocking {
    fn drop(&mut self) {
        self.pool.end_locking();
    }
}

/// There is no further step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over;
