//! A store that queues its calls for other threads, which answer them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::sync::Condvar;
use crate::base::{Error, Result, wait_interruptibly};
use crate::cache::PageHash;
use crate::memory::HostRows;

use super::{Store, StoreTransfer};

/// The operation that a [`StoreCall`] asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreCallKind {
    /// A look-up of the keys that are there, which leaves the order of eviction as it is.
    Find,
    /// A look-up of keys that are in use.
    Touch,
    /// Copies of pieces to memory.
    Read,
    /// Copies of memory as pieces.
    Write,
}

/// The operation that a call asks for, with the memory of the pieces.
#[derive(Debug)]
enum Work {
    Find,
    Touch,
    Read(HostRows),
    Write(HostRows),
}

/// The queue that a [`StoreCall`] waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreCallQueue {
    /// All but [`StoreCallKind::Write`]: their callers wait.
    Reads,
    /// [`StoreCallKind::Write`].
    Writes,
}

/// A store that queues its calls for threads that answer them, such as those of an interpreter.
///
/// ```
/// use std::time::Duration;
/// use kvpool::pool::{StoreCallKind, StoreCallQueue, RemoteStore, Store};
/// let store = RemoteStore::default();
/// std::thread::scope(|scope| {
///     scope.spawn(|| {
///         let call = store.next(StoreCallQueue::Reads, Duration::from_secs(60)).unwrap();
///         let call = call.expect("one was queued");
///         assert_eq!((call.kind(), call.keys().len()), (StoreCallKind::Find, 2));
///         call.finish(&[true, false]);
///     });
///     assert_eq!(store.find(&[[1; 32], [2; 32]]).unwrap(), [true, false]);
/// });
/// ```
#[derive(Debug)]
pub struct RemoteStore {
    process: u32,
    shared: Arc<Calls>,
}

/// The state that a store and its calls have in common.
#[derive(Debug)]
struct Calls {
    state: RankedMutex<CallQueues>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct CallQueues {
    reads: VecDeque<StoreCall>,
    writes: VecDeque<StoreCall>,
    /// Calls that are not answered.
    open: usize,
    is_closed: bool,
}

/// A call of a store. If it is dropped without an answer, no piece was found or stored.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use kvpool::base::DType;
/// use kvpool::memory::{Host, HostRows, Region};
/// use kvpool::pool::{RemoteStore, Store, StoreCall, StoreCallQueue, StoreTransfer};
/// use kvpool::tensor::TensorView;
/// let region = Arc::new(Region::new(Arc::new(Host), 2 * 64).unwrap());
/// let pieces = TensorView::contiguous(Arc::clone(&region), 0, DType::U8, &[2, 64]).unwrap();
/// // SAFETY: nothing else uses the region.
/// let rows = unsafe { HostRows::of_tensor("pieces", &pieces.borrow(), region) }.unwrap();
/// let store = RemoteStore::default();
/// let put: Arc<StoreTransfer> = store.put(vec![[1; 32], [2; 32]], rows).unwrap();
/// // A thread of the program stores the pieces where it likes, and answers.
/// let call: StoreCall = store.next(StoreCallQueue::Writes, Duration::ZERO).unwrap().expect("one is queued");
/// assert_eq!(call.rows().map(HostRows::len), Some(2));
/// call.finish(&[true, false]);
/// assert!(put.wait(Duration::from_secs(60)).unwrap());
/// assert_eq!(put.present().unwrap(), [true, false]);
/// ```
#[derive(Debug)]
pub struct StoreCall {
    work: Work,
    keys: Vec<PageHash>,
    transfer: Arc<StoreTransfer>,
    present: Vec<bool>,
    shared: Arc<Calls>,
}

impl Default for RemoteStore {
    /// Creates a store without calls.
    fn default() -> Self {
        let state = RankedMutex::new(LockRank::Store, CallQueues::default());
        Self { process: std::process::id(), shared: Arc::new(Calls { state, changed: Condvar::new() }) }
    }
}

impl RemoteStore {
    /// Returns the next call of a queue; waits for one up to `timeout`. `None` if there is none.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) once the store is closed, or in the child of a fork.
    pub fn next(&self, queue: StoreCallQueue, timeout: Duration) -> Result<Option<StoreCall>> {
        let begin = Instant::now();
        let mut state = self.state()?;
        loop {
            if let Some(call) = state.queue(queue).pop_front() {
                return Ok(Some(call));
            }
            if state.is_closed {
                return Err(closed_error());
            }
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            state = state.wait_timeout(&self.shared.changed, left);
        }
    }

    /// Rejects further calls, and waits up to `timeout` until the earlier ones are answered. Returns whether
    /// they are.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) in the child of a fork.
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
            state = state.wait_timeout(&self.shared.changed, left);
        }
        Ok(true)
    }

    /// Rejects further calls, and drops those that no thread answers yet. Does nothing in the child of a
    /// fork.
    pub fn abandon(&self) {
        let Ok(mut state) = self.state() else { return };
        state.is_closed = true;
        let (reads, writes) = (std::mem::take(&mut state.reads), std::mem::take(&mut state.writes));
        drop(state);
        self.shared.changed.notify_all();
        // Their drop takes the lock.
        drop((reads, writes));
    }

    fn state(&self) -> Result<RankedGuard<'_, CallQueues>> {
        if self.process != std::process::id() {
            let text = "the store belongs to the process that this one was forked from";
            return Err(Error::state(text));
        }
        Ok(self.shared.state.lock())
    }

    fn ask(&self, question: Work, keys: &[PageHash]) -> Result<Vec<bool>> {
        let transfer = self.queue(question, keys.to_vec())?;
        wait_interruptibly(|timeout| transfer.wait(timeout))?;
        transfer.present()
    }

    fn queue(&self, work: Work, keys: Vec<PageHash>) -> Result<Arc<StoreTransfer>> {
        if let Some(rows) = work.rows().filter(|rows| rows.len() != keys.len()) {
            return Err(Error::argument(format!("there are {} keys for {} pieces", keys.len(), rows.len())));
        }
        let present = vec![false; keys.len()];
        let transfer = Arc::new(StoreTransfer::new(present.clone(), keys.len()));
        let mut state = self.state()?;
        if state.is_closed {
            return Err(closed_error());
        }
        if keys.is_empty() {
            return Ok(transfer);
        }
        state.open += 1;
        let (theirs, shared) = (Arc::clone(&transfer), Arc::clone(&self.shared));
        state.queue(work.queue()).push_back(StoreCall { work, keys, transfer: theirs, present, shared });
        drop(state);
        self.shared.changed.notify_all();
        Ok(transfer)
    }
}

impl Work {
    const fn queue(&self) -> StoreCallQueue {
        match self {
            Self::Find | Self::Touch | Self::Read(_) => StoreCallQueue::Reads,
            Self::Write(_) => StoreCallQueue::Writes,
        }
    }

    const fn rows(&self) -> Option<&HostRows> {
        match self {
            Self::Find | Self::Touch => None,
            Self::Read(rows) | Self::Write(rows) => Some(rows),
        }
    }
}

impl CallQueues {
    const fn queue(&mut self, queue: StoreCallQueue) -> &mut VecDeque<StoreCall> {
        match queue {
            StoreCallQueue::Reads => &mut self.reads,
            StoreCallQueue::Writes => &mut self.writes,
        }
    }
}

impl Store for RemoteStore {
    fn max_bytes(&self) -> usize {
        usize::MAX
    }

    fn find(&self, keys: &[PageHash]) -> Result<Vec<bool>> {
        self.ask(Work::Find, keys)
    }

    fn touch(&self, keys: &[PageHash]) -> Result<Vec<bool>> {
        self.ask(Work::Touch, keys)
    }

    fn get(&self, keys: Vec<PageHash>, rows: HostRows) -> Result<Arc<StoreTransfer>> {
        self.queue(Work::Read(rows), keys)
    }

    fn put(&self, keys: Vec<PageHash>, rows: HostRows) -> Result<Arc<StoreTransfer>> {
        self.queue(Work::Write(rows), keys)
    }
}

impl StoreCall {
    /// Returns the operation that it asks for.
    #[must_use]
    pub const fn kind(&self) -> StoreCallKind {
        match self.work {
            Work::Find => StoreCallKind::Find,
            Work::Touch => StoreCallKind::Touch,
            Work::Read(_) => StoreCallKind::Read,
            Work::Write(_) => StoreCallKind::Write,
        }
    }

    /// Returns the keys of the pieces.
    #[must_use]
    pub fn keys(&self) -> &[PageHash] {
        &self.keys
    }

    /// Returns the memory of the pieces, until the call is finished. `None` for the look-ups.
    #[must_use]
    pub const fn rows(&self) -> Option<&HostRows> {
        self.work.rows()
    }

    /// Finishes the call with an answer for each piece: whether it was found, read or written. Pieces without
    /// an answer were not.
    pub fn finish(mut self, present: &[bool]) {
        self.present.iter_mut().zip(present).for_each(|(here, is_present)| *here = *is_present);
    }
}

impl Drop for StoreCall {
    fn drop(&mut self) {
        for (page, is_present) in self.present.iter().enumerate() {
            self.transfer.finish(page, *is_present);
        }
        // Owners of the memory have locks of their own.
        self.work = Work::Find;
        self.shared.state.lock().open -= 1;
        self.shared.changed.notify_all();
    }
}

fn closed_error() -> Error {
    Error::state("the store is closed")
}
