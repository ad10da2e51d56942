//! A queue of copies in one direction.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::base::{Error, Result};
use crate::memory::{CopyDirection, Event, Gpu, HostWait, SideStream, Stream};

use super::JobThread;
use super::steps::{StepEvent, Transfer};

/// A queue of copies in one direction, which run one after the other in the background: on a thread of its
/// own or, with a device, on a stream of its own.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
/// use std::sync::Arc;
/// use kvpool::memory::{CopyDirection, Stream};
/// use kvpool::transfer::CopyQueue;
/// let queue = CopyQueue::new(CopyDirection::In, None);
/// let done = Arc::new(AtomicUsize::new(0));
/// let on_thread = Arc::clone(&done);
/// let step = move |step, _stream| Ok(assert_eq!(on_thread.fetch_add(1, Relaxed), step));
/// let transfer = queue.start(3, &[Stream::DEFAULT], Vec::new(), step).unwrap();
/// transfer.make_stream_wait(1, Stream::DEFAULT).unwrap();
/// assert!(done.load(Relaxed) >= 2);
/// transfer.wait().unwrap();
/// assert!(transfer.is_complete().unwrap());
/// ```
#[derive(Debug)]
pub struct CopyQueue {
    direction: CopyDirection,
    gpu: Option<Arc<Gpu>>,
    thread: JobThread,
}

/// A copy of another queue, after which a copy begins.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::memory::CopyDirection;
/// use kvpool::transfer::{CopyQueue, EarlierCopy, Transfer};
/// let [down, up] = [CopyDirection::Out, CopyDirection::In].map(|direction| CopyQueue::new(direction, None));
/// let copy: Arc<Transfer> = down.start(1, &[], Vec::new(), |_, _| Ok(())).unwrap();
/// let earlier = EarlierCopy { copy: Arc::clone(&copy), must_succeed: true };
/// let back = up.start(1, &[], vec![earlier], |_, _| Ok(())).unwrap();
/// back.wait().unwrap();
/// assert!(copy.is_over().unwrap());
/// ```
#[derive(Clone, Debug)]
pub struct EarlierCopy {
    /// The copy.
    pub copy: Arc<Transfer>,
    /// Whether the later copy fails if this one does.
    pub must_succeed: bool,
}

impl CopyQueue {
    /// Creates an empty queue, whose copies run on a stream of `gpu` if there is one.
    #[must_use]
    pub const fn new(direction: CopyDirection, gpu: Option<Arc<Gpu>>) -> Self {
        let name = match direction {
            CopyDirection::In => "kvpool-copy-in",
            CopyDirection::Out => "kvpool-copy-out",
        };
        Self { direction, gpu, thread: JobThread::new(name) }
    }

    /// Enqueues a copy in `steps` steps, at least 1, which begins after the earlier copies of this queue, after
    /// the copies `earlier` of other queues, and after the work that is enqueued on the streams `after`.
    ///
    /// A copy of another queue must not itself wait for a later copy of this queue.
    ///
    /// Calls `step` with the number of each step and a stream: with a device, it enqueues the copy of that
    /// step on the stream; without one, it copies before it returns. Does not wait for the copies.
    ///
    /// # Errors
    /// See [`JobThread::submit`]; also [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) while one of
    /// `after` is being captured. If a step fails on a device, its error, after a wait for the earlier steps:
    /// no copy is in flight then.
    pub fn start(
        &self,
        steps: usize,
        after: &[Stream],
        earlier: Vec<EarlierCopy>,
        step: impl FnMut(usize, Stream) -> Result<()> + Send + 'static,
    ) -> Result<Arc<Transfer>> {
        match &self.gpu {
            None => self.run_on_thread(steps, earlier, step),
            Some(gpu) => self.enqueue(gpu, steps, after, &earlier, step),
        }
    }

    fn enqueue(
        &self,
        gpu: &Arc<Gpu>,
        steps: usize,
        after: &[Stream],
        earlier: &[EarlierCopy],
        mut step: impl FnMut(usize, Stream) -> Result<()>,
    ) -> Result<Arc<Transfer>> {
        let own = gpu.side_stream(SideStream::Copy(self.direction))?;
        let enqueue = |number| {
            step(number, own)?;
            // Threads wait for the end only, streams for every step.
            let is_last = number + 1 == steps;
            Event::record_for(gpu, own, if is_last { HostWait::Sleeps } else { HostWait::Spins })
        };
        gpu.in_context(|| {
            gpu.make_stream_wait(after, own)?;
            earlier.iter().try_for_each(|earlier| earlier.copy.make_stream_wait_for_all(own))?;
            let enqueued: Result<Vec<_>> = (0..steps).map(enqueue).collect();
            if enqueued.is_err() {
                // The caller reuses the memory of a copy that failed.
                let _ = gpu.synchronize(own);
            }
            Ok(Arc::new(Transfer::on_device(gpu, enqueued?)))
        })
    }

    fn run_on_thread(
        &self,
        steps: usize,
        earlier: Vec<EarlierCopy>,
        mut step: impl FnMut(usize, Stream) -> Result<()> + Send + 'static,
    ) -> Result<Arc<Transfer>> {
        let transfer = Arc::new(Transfer::on_thread(steps));
        let on_thread = Arc::clone(&transfer);
        self.thread.submit(move || {
            run_steps(&on_thread, |number, stream| {
                if number == 0 {
                    earlier.iter().try_for_each(EarlierCopy::wait)?;
                }
                step(number, stream)
            });
        })?;
        Ok(transfer)
    }
}

impl EarlierCopy {
    fn wait(&self) -> Result<()> {
        self.copy.wait()?;
        if !self.must_succeed || self.copy.is_complete()? {
            return Ok(());
        }
        let cause = self.copy.failure().map_or_else(String::new, |cause| format!(": {cause}"));
        Err(Error::state(format!("an earlier copy of the same memory has failed{cause}")))
    }
}

/// Runs the steps of a transfer until it is complete, cancelled or failed.
fn run_steps(transfer: &Transfer, mut step: impl FnMut(usize, Stream) -> Result<()>) {
    let mut number = 0;
    while transfer.should_continue() {
        let done = catch_unwind(AssertUnwindSafe(|| step(number, Stream::DEFAULT)));
        let panicked = |_| Err(Error::state(format!("step {number} of a copy panicked")));
        if let Err(failure) = done.unwrap_or_else(panicked) {
            transfer.record_failure(failure);
            break;
        }
        transfer.record(StepEvent::Done);
        number += 1;
    }
    // Drop what `step` keeps alive before waking the threads that wait.
    drop(step);
    transfer.record(StepEvent::Ended);
}
