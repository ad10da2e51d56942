//! Storage below host memory: pieces by key, in files or on other machines.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::sync::Condvar;
use crate::base::{Error, ErrorKind, Result};
use crate::cache::PageHash;
use crate::memory::HostRows;

/// Keeps pieces of memory by their keys, in a place that is slower and larger than host memory.
///
/// A key identifies everything that the bytes of its piece depend on. A piece that is found has the bytes
/// that were put; a piece that was damaged or evicted is missing. Calls may come from any thread.
pub trait Store: fmt::Debug + Send + Sync {
    /// Returns the number of bytes of the largest piece that it takes.
    fn max_bytes(&self) -> usize;

    /// Returns which of the keys the store has. May wait for other machines; the caller holds no locks.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if the store is closed, or belongs to the process that this one was forked from.
    fn find(&self, keys: &[PageHash]) -> Result<Vec<bool>>;

    /// Records a use of consecutive pieces of a prefix, and returns which of them the store has. Without a
    /// record of uses, it is [`Store::find`].
    ///
    /// # Errors
    /// See [`Store::find`].
    fn touch(&self, keys: &[PageHash]) -> Result<Vec<bool>> {
        self.find(keys)
    }

    /// Begins to copy pieces to `rows`, one for each key, which must not be used before they are done. The
    /// row of a piece that is not found has undefined contents.
    ///
    /// # Errors
    /// See [`Store::find`]; also [`ErrorKind::Argument`] for sizes that do not fit.
    fn get(&self, keys: Vec<PageHash>, rows: HostRows) -> Result<Arc<StoreTransfer>>;

    /// Begins to copy pieces from `rows`, one for each key, which must not change before they are done. Never
    /// waits; the caller limits the pieces that are in flight.
    ///
    /// # Errors
    /// See [`Store::get`].
    fn put(&self, keys: Vec<PageHash>, rows: HostRows) -> Result<Arc<StoreTransfer>>;
}

/// A `get` or a `put` in progress.
#[derive(Debug)]
pub struct StoreTransfer {
    /// The process whose threads work on it.
    process: u32,
    state: RankedMutex<StoreProgress>,
    over: Condvar,
    is_cancelled: AtomicBool,
}

#[derive(Debug)]
struct StoreProgress {
    present: Vec<bool>,
    left: usize,
}

impl StoreTransfer {
    /// Creates a transfer of pages that are `present` already, and `left` others.
    pub(super) fn new(present: Vec<bool>, left: usize) -> Self {
        let state = RankedMutex::new(LockRank::StoreTransfer, StoreProgress { present, left });
        Self {
            process: std::process::id(),
            state,
            over: Condvar::new(),
            is_cancelled: AtomicBool::new(false),
        }
    }

    /// Returns whether all pages are done.
    ///
    /// # Errors
    /// [`ErrorKind::State`] in the child of a fork, which has no threads that work on it.
    pub fn query(&self) -> Result<bool> {
        self.check_process()?;
        Ok(self.state.lock().left == 0)
    }

    /// Waits up to `timeout` until all pages are done. Returns whether they are.
    ///
    /// # Errors
    /// See [`StoreTransfer::query`].
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        self.check_process()?;
        let begin = Instant::now();
        let mut state = self.state.lock();
        while state.left > 0 {
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            state = state.wait_timeout(&self.over, left);
        }
        Ok(true)
    }

    /// Returns for each page whether it was transferred: after a `get` to memory, after a `put` to the store.
    /// False for pages that are not done.
    ///
    /// # Errors
    /// See [`StoreTransfer::query`].
    pub fn present(&self) -> Result<Vec<bool>> {
        self.check_process()?;
        Ok(self.state.lock().present.clone())
    }

    /// Returns the number of present pages before the first that is not.
    ///
    /// # Errors
    /// See [`StoreTransfer::query`].
    pub fn leading(&self) -> Result<usize> {
        self.check_process()?;
        let state = self.state.lock();
        Ok(state.present.iter().position(|is_present| !is_present).unwrap_or(state.present.len()))
    }

    /// Gives up the pages that are not being transferred yet: they are done, and not present. The others go on.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Returns whether pages that are not being transferred yet are given up.
    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
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

    /// Records that a page is done.
    pub(super) fn finish(&self, page: usize, is_present: bool) {
        let mut state = self.state.lock();
        state.present[page] = is_present;
        state.left -= 1;
        if state.left == 0 {
            self.over.notify_all();
        }
    }
}
