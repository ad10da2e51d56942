//! One call of a store for many pages, while threads work on it.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, Result};
use crate::cache::PageHash;
use crate::memory::HostRows;
use crate::transfer::wide;

/// The pages of a `get` or a `put`, on their way.
#[derive(Debug)]
pub struct StoreTransfer {
    /// The process whose threads work on it.
    process: u32,
    state: Mutex<Progress>,
    over: Condvar,
}

#[derive(Debug)]
struct Progress {
    present: Vec<bool>,
    left: usize,
}

impl StoreTransfer {
    /// For pages that are `present` already, and `left` others.
    pub(super) fn new(present: Vec<bool>, left: usize) -> Self {
        let state = Mutex::new(Progress { present, left });
        Self { process: std::process::id(), state, over: Condvar::new() }
    }

    /// Whether all pages are done.
    ///
    /// # Errors
    /// [`ErrorKind::State`] in the child of a fork, which has no threads that work on it.
    pub fn query(&self) -> Result<bool> {
        self.check_process()?;
        Ok(lock(&self.state).left == 0)
    }

    /// Waits up to `timeout` until all pages are done. Returns whether they are.
    ///
    /// # Errors
    /// As [`StoreTransfer::query`].
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        self.check_process()?;
        let begin = Instant::now();
        let mut state = lock(&self.state);
        while state.left > 0 {
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            state = self.over.wait_timeout(state, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        Ok(true)
    }

    /// For each page whether it is where it was to go: after a `get` in memory, after a `put` in the store. Pages that
    /// are not done are not.
    ///
    /// # Errors
    /// As [`StoreTransfer::query`].
    pub fn present(&self) -> Result<Vec<bool>> {
        self.check_process()?;
        Ok(lock(&self.state).present.clone())
    }

    /// The number of present pages before the first that is not.
    ///
    /// # Errors
    /// As [`StoreTransfer::query`].
    pub fn leading(&self) -> Result<usize> {
        self.check_process()?;
        let state = lock(&self.state);
        Ok(state.present.iter().position(|is_present| !is_present).unwrap_or(state.present.len()))
    }

    fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::State,
            "a transfer of a store belongs to the process that this one was forked from",
        ))
    }

    fn finish(&self, page: usize, is_present: bool) {
        let mut state = lock(&self.state);
        state.present[page] = is_present;
        state.left -= 1;
        if state.left == 0 {
            self.over.notify_all();
        }
    }
}

/// What a transfer moves, and between where.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) keys: Vec<PageHash>,
    pub(super) rows: HostRows,
    pub(super) transfer: std::sync::Arc<StoreTransfer>,
    /// Of the last page, if pages are put.
    pub(super) first_tick: u64,
}

impl Batch {
    /// The place of a page in the order of use.
    pub(super) fn tick(&self, page: usize) -> u64 {
        self.first_tick + wide(self.keys.len() - 1 - page)
    }
}

/// A page of a transfer at work. It is done when this drops.
#[derive(Debug)]
pub(super) struct PageWork {
    pub(super) batch: std::sync::Arc<Batch>,
    pub(super) page: usize,
    pub(super) is_present: bool,
}

impl PageWork {
    pub(super) fn key(&self) -> &PageHash {
        &self.batch.keys[self.page]
    }
}

impl Drop for PageWork {
    fn drop(&mut self) {
        self.batch.transfer.finish(self.page, self.is_present);
    }
}
