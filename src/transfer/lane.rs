//! A queue of copies in one direction.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, Result};
use crate::memory::{Event, Gpu, SideStream, Stream};

use super::steps::{Note, Transfer};

/// Copies in one direction, one after the other, beside their callers: on a thread or, with a device, on a stream of
/// its own.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
/// use std::sync::Arc;
/// use kvpool::memory::{SideStream, Stream};
/// use kvpool::transfer::Lane;
/// let lane = Lane::new(SideStream::In, None);
/// let done = Arc::new(AtomicUsize::new(0));
/// let theirs = Arc::clone(&done);
/// let step = move |step, _stream| Ok(assert_eq!(theirs.fetch_add(1, Relaxed), step));
/// let transfer = lane.run(3, &[Stream::DEFAULT], step).unwrap();
/// transfer.order(1, Stream::DEFAULT).unwrap();
/// assert!(done.load(Relaxed) >= 2);
/// transfer.wait().unwrap();
/// assert!(transfer.is_complete().unwrap());
/// ```
#[derive(Debug)]
pub struct Lane {
    direction: SideStream,
    gpu: Option<Arc<Gpu>>,
    /// The process that has the thread, and its queue. Started by the first copy.
    thread: Mutex<Option<(u32, Sender<Job>)>>,
}

/// A step of a copy, on a stream.
type Step = Box<dyn FnMut(usize, Stream) -> Result<()> + Send>;

struct Job {
    transfer: Arc<Transfer>,
    step: Step,
}

impl Lane {
    /// A lane without copies, on a stream of `gpu` if there is one.
    #[must_use]
    pub const fn new(direction: SideStream, gpu: Option<Arc<Gpu>>) -> Self {
        Self { direction, gpu, thread: Mutex::new(None) }
    }

    /// Copies in `steps`, at least 1, behind the copies before and behind what is enqueued on the streams `after`. Calls `step`
    /// for each, which enqueues its copy on the stream that it is given, or copies at once. Does not wait.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when no thread can be started; [`ErrorKind::Driver`] while one of `after` is being
    /// captured; the error of a step on a device, after waiting for the steps before. Nothing is on its way then.
    pub fn run(
        &self,
        steps: usize,
        after: &[Stream],
        step: impl FnMut(usize, Stream) -> Result<()> + Send + 'static,
    ) -> Result<Arc<Transfer>> {
        match &self.gpu {
            None => self.hand_over(steps, Box::new(step)),
            Some(gpu) => self.enqueue(gpu, steps, after, step),
        }
    }

    fn enqueue(
        &self,
        gpu: &Arc<Gpu>,
        steps: usize,
        after: &[Stream],
        mut step: impl FnMut(usize, Stream) -> Result<()>,
    ) -> Result<Arc<Transfer>> {
        let own = gpu.side_stream(self.direction)?;
        gpu.order(after, own)?;
        let enqueued: Result<Vec<_>> = (0..steps)
            .map(|number| {
                step(number, own)?;
                Event::record(gpu, own)
            })
            .collect();
        if enqueued.is_err() {
            // The caller reuses the memory of a copy that failed.
            let _ = gpu.synchronize(own);
        }
        Ok(Arc::new(Transfer::on_device(gpu, enqueued?)))
    }

    fn hand_over(&self, steps: usize, step: Step) -> Result<Arc<Transfer>> {
        let transfer = Arc::new(Transfer::on_thread(steps));
        let job = Job { transfer: Arc::clone(&transfer), step };
        let mut thread = lock(&self.thread);
        let process = std::process::id();
        if thread.as_ref().is_none_or(|(owner, _)| *owner != process) {
            let (sender, jobs) = channel();
            let name = match self.direction {
                SideStream::In => "kvpool-copy-in",
                SideStream::Out => "kvpool-copy-out",
            };
            let started = std::thread::Builder::new().name(name.to_owned()).spawn(move || serve(&jobs));
            started.map_err(|cause| {
                Error::new(ErrorKind::OutOfMemory, format!("no thread can be started to copy: {cause}"))
            })?;
            *thread = Some((process, sender));
        }
        let (_, queue) = thread.as_ref().expect("it was started");
        // The thread ends with the lane, after what was handed over.
        assert!(queue.send(job).is_ok(), "the thread takes every job");
        Ok(transfer)
    }
}

/// Does jobs until the lane is gone.
fn serve(jobs: &Receiver<Job>) {
    while let Ok(Job { transfer, mut step }) = jobs.recv() {
        let mut number = 0;
        while transfer.goes_on() {
            let done = catch_unwind(AssertUnwindSafe(|| step(number, Stream::DEFAULT)));
            if !matches!(done, Ok(Ok(()))) {
                break;
            }
            transfer.note(Note::Done);
            number += 1;
        }
        // What the step keeps alive goes before those that wait learn that it is over.
        drop(step);
        transfer.note(Note::Over);
    }
}
