//! A background thread of a pool.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::base::sync::lock;
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
    thread: Mutex<Option<(u32, Sender<Job>)>>,
}

type Job = Box<dyn FnOnce() + Send>;

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
    #[expect(clippy::missing_panics_doc, reason = "the thread takes jobs as long as this lives")]
    pub fn submit(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        let mut thread = lock(&self.thread);
        let process = std::process::id();
        if thread.as_ref().is_none_or(|(owner, _)| *owner != process) {
            let (sender, jobs) = channel();
            let started = std::thread::Builder::new().name(self.name.to_owned()).spawn(move || serve(&jobs));
            started.map_err(|cause| {
                let text = format!("no thread {} can be started: {cause}", self.name);
                Error::new(ErrorKind::OutOfMemory, text)
            })?;
            *thread = Some((process, sender));
        }
        let (_, queue) = thread.as_ref().expect("it was started");
        assert!(queue.send(Box::new(job)).is_ok(), "the thread takes every job");
        Ok(())
    }
}

/// Runs jobs until the queue is closed.
fn serve(jobs: &Receiver<Job>) {
    mark_own_thread();
    while let Ok(job) = jobs.recv() {
        // The panic hook has reported the panic.
        let _ = catch_unwind(AssertUnwindSafe(job));
    }
}
