//! A background thread of a pool.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::sync::{Condvar, lock, thread};
use crate::base::{Error, ErrorKind, Result, mark_own_thread};

/// A thread that runs jobs one after the other. The first job starts it, also in the child of a fork. When
/// this is dropped, the thread ends after its last job.
///
/// ```
/// use kvpool::transfer::JobThread;
/// let (sender, receiver) = std::sync::mpsc::channel();
/// let thread = JobThread::new("an-example");
/// for number in [1, 2] {
///     let sender = sender.clone();
///     thread.submit(move || sender.send(number).unwrap()).unwrap();
/// }
/// assert_eq!([receiver.recv(), receiver.recv()], [Ok(1), Ok(2)]);
/// ```
#[derive(Debug)]
pub struct JobThread {
    name: &'static str,
    /// The process in which the thread runs, and its queue.
    thread: Mutex<Option<(u32, Arc<JobQueue>)>>,
}

type Job = Box<dyn FnOnce() + Send>;

/// The jobs that a thread has not begun.
struct JobQueue {
    state: RankedMutex<QueuedJobs>,
    changed: Condvar,
}

#[derive(Default)]
struct QueuedJobs {
    jobs: VecDeque<Job>,
    is_closed: bool,
}

impl JobThread {
    /// Creates a thread with a name, which is started by the first job.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self { name, thread: Mutex::new(None) }
    }

    /// Queues a job for the thread. If a job panics, the thread continues with the next one.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when no thread can be started. The job is dropped then.
    pub fn submit(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        self.queue()?.push(Box::new(job));
        Ok(())
    }

    /// Returns the queue of the thread, which it starts if there is none in this process.
    fn queue(&self) -> Result<Arc<JobQueue>> {
        let mut thread = lock(&self.thread);
        let process = std::process::id();
        if let Some((_, queue)) = thread.as_ref().filter(|(owner, _)| *owner == process) {
            return Ok(Arc::clone(queue));
        }
        let queue = Arc::new(JobQueue::new());
        let jobs = Arc::clone(&queue);
        let started = thread::Builder::new().name(self.name.to_owned()).spawn(move || serve(&jobs));
        started.map_err(|cause| {
            let text = format!("no thread {} can be started: {cause}", self.name);
            Error::new(ErrorKind::OutOfMemory, text)
        })?;
        *thread = Some((process, Arc::clone(&queue)));
        Ok(queue)
    }
}

impl Drop for JobThread {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
        // In the child of a fork there is no thread to end, and the lock may be held forever.
        if let Some((_, queue)) = thread.as_ref().filter(|(owner, _)| *owner == std::process::id()) {
            queue.close();
        }
    }
}

impl JobQueue {
    fn new() -> Self {
        Self { state: RankedMutex::new(LockRank::JobQueue, QueuedJobs::default()), changed: Condvar::new() }
    }

    fn push(&self, job: Job) {
        self.state.lock().jobs.push_back(job);
        self.changed.notify_one();
    }

    /// Ends the thread after its last job.
    fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_one();
    }

    /// Waits for the next job. Returns `None` after the last one of a closed queue.
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.is_closed {
                return None;
            }
            state = state.wait(&self.changed);
        }
    }
}

impl fmt::Debug for JobQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobQueue").finish_non_exhaustive()
    }
}

/// Runs jobs until the queue is closed.
fn serve(jobs: &JobQueue) {
    mark_own_thread();
    while let Some(job) = jobs.next() {
        // The panic hook has reported the panic.
        let _ = catch_unwind(AssertUnwindSafe(job));
    }
}
