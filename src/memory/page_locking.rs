//! Page-locking of a region in steps on background threads, while finished steps are already used.
//!
//! Page-locking a large region takes minutes. A step holds the driver's locks for some tens of milliseconds,
//! so that other calls run in between. Its bytes are offered to a [`PageLockSink`] as soon as it is done.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::base::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, MutexGuard, thread};
use crate::base::{Error, ErrorKind, ForkGate, Result, mark_own_thread};

use super::{Gpu, Region, system_page_size};

/// Returns the approximate bytes of one step, which delays other driver calls meanwhile. A minimum under `loom`, which
/// explores every interleaving.
fn step_bytes() -> usize {
    if cfg!(loom) { system_page_size() } else { 64 << 20 }
}

/// Groups the pieces of a region, given by their ends, into steps of whole pieces. Each step ends where the
/// next begins.
///
/// Pieces end at pages, so that each step can be page-locked on its own.
///
/// ```
/// use kvpool::memory::page_lock_steps;
/// assert_eq!(page_lock_steps([4096, 8192, 200 << 20]), [0..8192, 8192..200 << 20]);
/// ```
pub fn page_lock_steps(piece_ends: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let mut steps: Vec<Range<usize>> = Vec::new();
    let (mut start, max_bytes) = (0, step_bytes());
    for end in piece_ends {
        match steps.last_mut() {
            Some(step) if end - step.start <= max_bytes => step.end = end,
            _ => steps.push(start..end),
        }
        start = end;
    }
    steps
}

/// Page-locks a region step by step through `gpu`, and returns when all steps are done.
///
/// # Errors
/// Same as [`Backend::page_lock`](super::Backend::page_lock).
pub fn page_lock(gpu: &Arc<Gpu>, region: &Region, steps: &[Range<usize>]) -> Result<()> {
    steps.iter().try_for_each(|step| region.page_lock(gpu, step))
}

/// Receives the bytes of a region as they are page-locked.
pub trait PageLockSink: Debug + Send + Sync {
    /// Receives the bytes of a step. With `is_page_locked == false` they are ordinary memory.
    fn offer(&self, bytes: &Range<usize>, is_page_locked: bool);

    /// Called once no further step will be offered.
    fn end(&self);
}

/// The progress of page-locking.
#[derive(Clone, Debug)]
pub struct PageLockProgress {
    /// Bytes offered so far.
    pub done: usize,
    /// Bytes of the region.
    pub total: usize,
    /// Why the last step could not be page-locked.
    pub failure: Option<Error>,
}

/// The result of [`PageLocking::next`].
#[derive(Clone, Debug)]
pub enum PageLockEvent {
    /// A step is done.
    Step(PageLockProgress),
    /// No step was done within the timeout.
    TimedOut,
    /// There is no further step.
    Finished,
}

/// Page-locking in progress. Dropping this calls [`PageLockSink::end`].
///
/// ```
/// use std::ops::Range;
/// use std::sync::Arc;
/// use std::time::Duration;
/// use kvpool::base::ErrorKind;
/// use kvpool::memory::{
///     Gpu, MappedHost, PageLockEvent, PageLockProgress, PageLockSink, PageLocking, Region, page_lock,
/// };
/// #[derive(Debug)]
/// struct Pages;
/// impl PageLockSink for Pages {
///     fn offer(&self, _bytes: &Range<usize>, _is_page_locked: bool) {} // copies may use them from now on
///     fn end(&self) {}
/// }
/// # fn main() -> kvpool::base::Result<()> {
/// let gpu = match Gpu::any() {
///     Ok(gpu) => gpu,
///     Err(error) if error.kind() == ErrorKind::BackendUnavailable => return Ok(()),
///     Err(error) => return Err(error),
/// };
/// let region = Arc::new(Region::new(Arc::new(MappedHost::default()), 1 << 20)?);
/// let pages: Arc<dyn PageLockSink> = Arc::new(Pages);
/// let steps = vec![0..1 << 19, 1 << 19..1 << 20];
/// let locking = PageLocking::start(&gpu, &region, steps, 2, Arc::downgrade(&pages));
/// let mut done = 0;
/// loop {
///     match locking.next(Duration::from_secs(60)) {
///         PageLockEvent::Step(PageLockProgress { done: bytes, .. }) => done = bytes,
///         PageLockEvent::TimedOut => panic!("a minute is long"),
///         PageLockEvent::Finished => break,
///     }
/// }
/// assert_eq!(done, 1 << 20);
/// // At once, for a region that nobody uses yet:
/// let other = Region::new(Arc::new(MappedHost::default()), 4096)?;
/// page_lock(&gpu, &other, &[0..4096])?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PageLocking(Arc<Job>);

#[derive(Debug)]
struct Job {
    gpu: Arc<Gpu>,
    region: Arc<Region>,
    /// Each thread takes the next one.
    steps: Vec<Range<usize>>,
    next: AtomicUsize,
    /// Page-locking ends early when the sink is dropped.
    sink: Weak<dyn PageLockSink>,
    stop: AtomicBool,
    state: Mutex<JobState>,
    /// Signalled when a step is done or a worker has ended.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct JobState {
    workers: usize,
    done: usize,
    /// Steps that [`PageLocking::next`] has not returned yet.
    reports: VecDeque<PageLockProgress>,
}

impl PageLocking {
    /// Page-locks `steps` of a region through `gpu`, on up to `threads` threads, until the sink is dropped. A
    /// single step is done on return. The sink must not wait for this call.
    #[must_use]
    pub fn start(
        gpu: &Arc<Gpu>,
        region: &Arc<Region>,
        steps: Vec<Range<usize>>,
        threads: usize,
        sink: Weak<dyn PageLockSink>,
    ) -> Self {
        let count = steps.len();
        let shared = Arc::new(Job {
            gpu: Arc::clone(gpu),
            region: Arc::clone(region),
            steps,
            next: AtomicUsize::new(0),
            sink,
            stop: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        for number in 0..threads.min(count) {
            let worker = Worker::new(&shared);
            let name = format!("kvpool-page-lock-{number}");
            if count == 1 {
                worker.work();
            } else if let Err(failure) = thread::Builder::new().name(name).spawn(move || worker.run())
                && number == 0
            {
                // The system has no more threads: the memory stays ordinary.
                let failure = Error::new(ErrorKind::OutOfMemory, failure.to_string());
                shared.offer(&(0..region.bytes()), Err(failure));
                break;
            }
        }
        Self(shared)
    }

    /// Returns the number of steps.
    #[must_use]
    pub fn steps(&self) -> usize {
        self.0.steps.len()
    }

    /// Waits for the next step, at most for `timeout`.
    #[must_use]
    pub fn next(&self, timeout: Duration) -> PageLockEvent {
        let begin = Instant::now();
        let mut state = self.0.state();
        loop {
            if let Some(step) = state.reports.pop_front() {
                return PageLockEvent::Step(step);
            }
            if state.workers == 0 {
                return PageLockEvent::Finished;
            }
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return PageLockEvent::TimedOut;
            }
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits up to `timeout` for the end of page-locking that someone keeps until then. Returns whether it has ended.
    #[must_use]
    pub fn wait(kept: &mut Option<Self>, timeout: Duration) -> bool {
        let begin = Instant::now();
        while let Some(steps) = &*kept {
            match steps.next(timeout.saturating_sub(begin.elapsed())) {
                PageLockEvent::Step(_) => (),
                PageLockEvent::TimedOut => return false,
                PageLockEvent::Finished => *kept = None,
            }
        }
        true
    }

    /// Stops after the steps in progress.
    pub fn stop(&self) {
        self.0.stop.store(true, Relaxed);
    }
}

impl Drop for PageLocking {
    fn drop(&mut self) {
        if let Some(sink) = self.0.sink.upgrade() {
            sink.end();
        }
    }
}

impl Job {
    fn state(&self) -> MutexGuard<'_, JobState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Offers the bytes of a step and reports it. Returns whether the sink is still alive.
    fn offer(&self, step: &Range<usize>, page_locked: Result<()>) -> bool {
        let Some(sink) = self.sink.upgrade() else { return false };
        // A child that is forked meanwhile would wait for the locks of the sink.
        let _gate = ForkGate::enter_on_own_thread();
        sink.offer(step, page_locked.is_ok());
        let mut state = self.state();
        state.done += step.len();
        let progress =
            PageLockProgress { done: state.done, total: self.region.bytes(), failure: page_locked.err() };
        state.reports.push_back(progress);
        drop(state);
        self.changed.notify_all();
        true
    }
}

/// One thread of page-locking.
struct Worker(Arc<Job>);

impl Worker {
    fn new(shared: &Arc<Job>) -> Self {
        shared.state().workers += 1;
        Self(Arc::clone(shared))
    }

    /// Works on a thread of its own.
    fn run(self) {
        mark_own_thread();
        self.work();
    }

    fn work(self) {
        let shared = &self.0;
        while let Some(step) = shared.steps.get(shared.next.fetch_add(1, Relaxed))
            && !shared.stop.load(Relaxed)
            && shared.sink.strong_count() > 0
            && shared.offer(step, shared.region.page_lock(&shared.gpu, step))
        {}
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _gate = ForkGate::enter_on_own_thread();
        self.0.state().workers -= 1;
        self.0.changed.notify_all();
    }
}
