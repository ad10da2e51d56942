//! A store whose calls are answered elsewhere.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, Result, blocking};
use crate::cache::PageHash;
use crate::memory::HostRows;

use super::{Store, StoreTransfer};

/// What an [`Errand`] asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrandKind {
    /// Which keys are there.
    Find,
    /// Copies of pieces to memory.
    Read,
    /// Copies of memory as pieces.
    Write,
}

/// What an errand asks for, with the memory of the pieces.
#[derive(Debug)]
enum Work {
    Find,
    Read(HostRows),
    Write(HostRows),
}

/// The queue that an [`Errand`] waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrandQueue {
    /// [`ErrandKind::Find`] and [`ErrandKind::Read`]: their callers wait.
    Reads,
    /// [`ErrandKind::Write`].
    Writes,
}

/// A store that queues its calls for threads that answer them, such as those of an interpreter.
///
/// ```
/// use std::time::Duration;
/// use kvpool::pool::{ErrandKind, ErrandQueue, RemoteStore, Store};
/// let store = RemoteStore::default();
/// std::thread::scope(|scope| {
///     scope.spawn(|| {
///         let errand = store.next(ErrandQueue::Reads, Duration::from_secs(60)).unwrap();
///         let errand = errand.expect("one was queued");
///         assert_eq!((errand.kind(), errand.keys().len()), (ErrandKind::Find, 2));
///         errand.finish(&[true, false]);
///     });
///     assert_eq!(store.find(&[[1; 32], [2; 32]]).unwrap(), [true, false]);
/// });
/// ```
#[derive(Debug)]
pub struct RemoteStore {
    process: u32,
    shared: Arc<Shared>,
}

/// What a store and its errands have in common.
#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    reads: VecDeque<Errand>,
    writes: VecDeque<Errand>,
    /// Errands that are not answered.
    open: usize,
    is_closed: bool,
}

/// A call of a store. If it is dropped, nothing was there and nothing was done.
#[derive(Debug)]
pub struct Errand {
    work: Work,
    keys: Vec<PageHash>,
    transfer: Arc<StoreTransfer>,
    present: Vec<bool>,
    shared: Arc<Shared>,
}

impl Default for RemoteStore {
    /// A store without calls.
    fn default() -> Self {
        Self { process: std::process::id(), shared: Arc::default() }
    }
}

impl RemoteStore {
    /// The next call of a queue; waits for one up to `timeout`. `None` if there is none.
    ///
    /// # Errors
    /// [`ErrorKind::State`] once the store is closed, or in the child of a fork.
    pub fn next(&self, queue: ErrandQueue, timeout: Duration) -> Result<Option<Errand>> {
        let begin = Instant::now();
        let mut state = self.state()?;
        loop {
            if let Some(errand) = state.queue(queue).pop_front() {
                return Ok(Some(errand));
            }
            if state.is_closed {
                return Err(closed());
            }
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes no more calls, and waits up to `timeout` until those before are answered. Returns whether they
    /// are.
    ///
    /// # Errors
    /// [`ErrorKind::State`] in the child of a fork.
    pub fn close(&self, timeout: Duration) -> Result<bool> {
        let begin = Instant::now();
        let mut state = self.state()?;
        state.is_closed = true;
        self.shared.changed.notify_all();
        while state.open > 0 {
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(true)
    }

    /// Takes no more calls, and drops those that nothing answers yet. Does nothing in the child of a fork.
    pub fn abandon(&self) {
        let Ok(mut state) = self.state() else { return };
        state.is_closed = true;
        let (reads, writes) = (std::mem::take(&mut state.reads), std::mem::take(&mut state.writes));
        drop(state);
        self.shared.changed.notify_all();
        // Without the lock, which they take.
        drop((reads, writes));
    }

    fn state(&self) -> Result<MutexGuard<'_, State>> {
        if self.process != std::process::id() {
            let text = "the store belongs to the process that this one was forked from";
            return Err(Error::new(ErrorKind::State, text));
        }
        Ok(lock(&self.shared.state))
    }

    fn queue(&self, work: Work, keys: Vec<PageHash>) -> Result<Arc<StoreTransfer>> {
        if let Some(rows) = work.rows().filter(|rows| rows.len() != keys.len()) {
            return Err(Error::config(format!("there are {} keys for {} pieces", keys.len(), rows.len())));
        }
        let present = vec![false; keys.len()];
        let transfer = Arc::new(StoreTransfer::new(present.clone(), keys.len()));
        let mut state = self.state()?;
        if state.is_closed {
            return Err(closed());
        }
        if keys.is_empty() {
            return Ok(transfer);
        }
        state.open += 1;
        let (theirs, shared) = (Arc::clone(&transfer), Arc::clone(&self.shared));
        state.queue(work.queue()).push_back(Errand { work, keys, transfer: theirs, present, shared });
        drop(state);
        self.shared.changed.notify_all();
        Ok(transfer)
    }
}

impl Work {
    const fn queue(&self) -> ErrandQueue {
        match self {
            Self::Find | Self::Read(_) => ErrandQueue::Reads,
            Self::Write(_) => ErrandQueue::Writes,
        }
    }

    const fn rows(&self) -> Option<&HostRows> {
        match self {
            Self::Find => None,
            Self::Read(rows) | Self::Write(rows) => Some(rows),
        }
    }
}

impl State {
    const fn queue(&mut self, queue: ErrandQueue) -> &mut VecDeque<Errand> {
        match queue {
            ErrandQueue::Reads => &mut self.reads,
            ErrandQueue::Writes => &mut self.writes,
        }
    }
}

impl Store for RemoteStore {
    fn most_bytes(&self) -> usize {
        usize::MAX
    }

    fn find(&self, keys: &[PageHash]) -> Result<Vec<bool>> {
        let transfer = self.queue(Work::Find, keys.to_vec())?;
        blocking(|| transfer.wait(Duration::MAX))?;
        transfer.present()
    }

    fn get(&self, keys: Vec<PageHash>, rows: HostRows) -> Result<Arc<StoreTransfer>> {
        self.queue(Work::Read(rows), keys)
    }

    fn put(&self, keys: Vec<PageHash>, rows: HostRows) -> Result<Arc<StoreTransfer>> {
        self.queue(Work::Write(rows), keys)
    }
}

impl Errand {
    /// What it asks for.
    #[must_use]
    pub const fn kind(&self) -> ErrandKind {
        match self.work {
            Work::Find => ErrandKind::Find,
            Work::Read(_) => ErrandKind::Read,
            Work::Write(_) => ErrandKind::Write,
        }
    }

    /// The keys of the pieces.
    #[must_use]
    pub fn keys(&self) -> &[PageHash] {
        &self.keys
    }

    /// The memory of the pieces, until the errand is finished. `None` for [`ErrandKind::Find`].
    #[must_use]
    pub const fn rows(&self) -> Option<&HostRows> {
        self.work.rows()
    }

    /// Answers for each piece whether it is where it was to go; those without an answer are not.
    pub fn finish(mut self, present: &[bool]) {
        self.present.iter_mut().zip(present).for_each(|(here, is_present)| *here = *is_present);
    }
}

impl Drop for Errand {
    fn drop(&mut self) {
        for (page, is_present) in self.present.iter().enumerate() {
            self.transfer.finish(page, *is_present);
        }
        // Owners of the memory have locks of their own.
        self.work = Work::Find;
        lock(&self.shared.state).open -= 1;
        self.shared.changed.notify_all();
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::State, "the store is closed")
}
