//! A store whose calls are answered elsewhere.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, Result, blocking};
use crate::cache::PageHash;
use crate::memory::HostRows;

use super::{Stats, Store, StoreTransfer, at_least_one};

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
/// let store = RemoteStore::new(1 << 20).unwrap();
/// std::thread::scope(|scope| {
///     scope.spawn(|| {
///         let errand = store.next(ErrandQueue::Reads, Duration::from_secs(60)).unwrap().expect("one was queued");
///         assert_eq!((errand.kind(), errand.keys().len()), (ErrandKind::Find, 2));
///         errand.finish(&[true, false]);
///     });
///     assert_eq!(store.find(&[[1; 32], [2; 32]]).unwrap(), [true, false]);
/// });
/// ```
#[derive(Debug)]
pub struct RemoteStore {
    process: u32,
    queue_bytes: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    reads: VecDeque<Errand>,
    writes: VecDeque<Errand>,
    /// Bytes that are written, or wait to be.
    writing: Arc<Mutex<usize>>,
    is_closed: bool,
    dropped: usize,
}

/// A call of a store. If it is dropped, nothing was there and nothing was done.
#[derive(Debug)]
pub struct Errand {
    kind: ErrandKind,
    keys: Vec<PageHash>,
    rows: Option<HostRows>,
    transfer: Arc<StoreTransfer>,
    present: Vec<bool>,
    /// What it adds to the bytes that are written.
    bytes: usize,
    writing: Arc<Mutex<usize>>,
}

impl RemoteStore {
    /// A store without calls. Pieces of more than `queue_bytes` that wait to be written are dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for no bytes.
    pub fn new(queue_bytes: usize) -> Result<Self> {
        at_least_one(&[("queue_bytes", queue_bytes)])?;
        let (state, changed) = (Mutex::default(), Condvar::new());
        Ok(Self { process: std::process::id(), queue_bytes, state, changed })
    }

    /// Bytes of pieces that may wait to be written.
    #[must_use]
    pub const fn queue_bytes(&self) -> usize {
        self.queue_bytes
    }

    /// The next call of a queue; waits for one up to `timeout`. `None` if there is none.
    ///
    /// # Errors
    /// [`ErrorKind::State`] once the store is closed, or in the child of a fork.
    pub fn next(&self, queue: ErrandQueue, timeout: Duration) -> Result<Option<Errand>> {
        let begin = Instant::now();
        let mut state = self.open()?;
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
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes no more calls, and drops those that nobody answers yet. Does nothing in the child of a fork.
    pub fn close(&self) {
        if self.process != std::process::id() {
            return;
        }
        let mut state = lock(&self.state);
        state.is_closed = true;
        let (reads, writes) = (std::mem::take(&mut state.reads), std::mem::take(&mut state.writes));
        state.dropped += writes.iter().map(|errand| errand.keys.len()).sum::<usize>();
        drop(state);
        self.changed.notify_all();
        // Without the lock: the owners of their memory have locks of their own.
        drop((reads, writes));
    }

    /// The statistics: `queued_bytes` that wait to be written or are, and `dropped` pieces for which there was no
    /// room.
    ///
    /// # Errors
    /// [`ErrorKind::State`] in the child of a fork.
    pub fn stats(&self) -> Result<Stats> {
        let state = self.state()?;
        let writing = *lock(&state.writing);
        Ok(Stats::from([("queued_bytes", writing), ("dropped", state.dropped)]))
    }

    fn state(&self) -> Result<MutexGuard<'_, State>> {
        if self.process != std::process::id() {
            let text = "the store belongs to the process that this one was forked from";
            return Err(Error::new(ErrorKind::State, text));
        }
        Ok(lock(&self.state))
    }

    fn open(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.state()?;
        if state.is_closed { Err(closed()) } else { Ok(state) }
    }

    fn queue(
        &self,
        kind: ErrandKind,
        mut keys: Vec<PageHash>,
        rows: Option<HostRows>,
    ) -> Result<Arc<StoreTransfer>> {
        if let Some(rows) = rows.as_ref().filter(|rows| rows.len() != keys.len()) {
            return Err(Error::config(format!("there are {} keys for {} pieces", keys.len(), rows.len())));
        }
        let count = keys.len();
        let mut state = self.open()?;
        let mut bytes = 0;
        if let (Some(rows), ErrandKind::Write) = (&rows, kind) {
            let mut writing = lock(&state.writing);
            let sums = (0..count).scan(0, |sum: &mut usize, row| {
                *sum = sum.saturating_add(rows.bytes_of(row));
                Some(*sum)
            });
            // The first are what the others are no use without.
            let fitting: Vec<_> =
                sums.take_while(|sum| writing.saturating_add(*sum) <= self.queue_bytes).collect();
            keys.truncate(fitting.len());
            bytes = fitting.last().copied().unwrap_or(0);
            *writing += bytes;
        }
        state.dropped += count - keys.len();
        let transfer = Arc::new(StoreTransfer::new(vec![false; count], keys.len()));
        if keys.is_empty() {
            return Ok(transfer);
        }
        let (writing, theirs) = (Arc::clone(&state.writing), Arc::clone(&transfer));
        let present = vec![false; keys.len()];
        let errand = Errand { kind, keys, rows, transfer: theirs, present, bytes, writing };
        let queue = if kind == ErrandKind::Write { ErrandQueue::Writes } else { ErrandQueue::Reads };
        state.queue(queue).push_back(errand);
        drop(state);
        self.changed.notify_all();
        Ok(transfer)
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
        let transfer = self.queue(ErrandKind::Find, keys.to_vec(), None)?;
        blocking(|| transfer.wait(Duration::MAX))?;
        transfer.present()
    }

    fn get(&self, keys: Vec<PageHash>, rows: HostRows) -> Result<Arc<StoreTransfer>> {
        self.queue(ErrandKind::Read, keys, Some(rows))
    }

    fn put(&self, keys: Vec<PageHash>, rows: HostRows) -> Result<Arc<StoreTransfer>> {
        self.queue(ErrandKind::Write, keys, Some(rows))
    }
}

impl Errand {
    /// What it asks for.
    #[must_use]
    pub const fn kind(&self) -> ErrandKind {
        self.kind
    }

    /// The keys of the pieces.
    #[must_use]
    pub fn keys(&self) -> &[PageHash] {
        &self.keys
    }

    /// The memory of the pieces, until the errand is finished; perhaps of more, which were dropped, behind them.
    /// `None` for [`ErrandKind::Find`].
    #[must_use]
    pub const fn rows(&self) -> Option<&HostRows> {
        self.rows.as_ref()
    }

    /// Answers for each piece whether it is where it was to go; those without an answer are not.
    pub fn finish(mut self, present: &[bool]) {
        self.present.iter_mut().zip(present).for_each(|(here, is_present)| *here = *is_present);
    }
}

impl Drop for Errand {
    fn drop(&mut self) {
        *lock(&self.writing) -= self.bytes;
        for (page, is_present) in self.present.iter().enumerate() {
            self.transfer.finish(page, *is_present);
        }
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::State, "the store is closed")
}
