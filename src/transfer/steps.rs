//! Copies in progress, whose steps can be waited for one by one.

use std::sync::{Arc, Mutex, OnceLock};

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::sync::{Condvar, lock};
use crate::base::{Error, Result, run_blocking};
use crate::memory::{Event, Gpu, Stream};

/// A copy in several steps, such as the layers of a model, which run one after the other: on a thread, or on
/// a stream of its own.
///
/// In the child of a fork the copies of the parent have failed: the child has neither the threads nor the
/// device that run them.
#[derive(Debug)]
pub struct Transfer {
    process: u32,
    runner: Runner,
}

#[derive(Debug)]
enum Runner {
    /// The steps run on a thread.
    Thread { steps: usize, progress: RankedMutex<StepProgress>, changed: Condvar, failure: OnceLock<Error> },
    /// The steps run on a stream: the event after each step, and the streams that wait for the last step.
    Device { gpu: Arc<Gpu>, events: Vec<Event>, waiting_streams: Mutex<Vec<Stream>> },
}

/// The progress of a thread.
#[derive(Clone, Copy, Debug, Default)]
struct StepProgress {
    done: usize,
    is_cancelled: bool,
    /// Whether the copies have ended.
    is_over: bool,
}

impl Transfer {
    /// Creates a transfer of `steps` steps, at least 1, which a thread will run.
    pub(super) fn on_thread(steps: usize) -> Self {
        let progress = RankedMutex::new(LockRank::CopySteps, StepProgress::default());
        Self {
            process: std::process::id(),
            runner: Runner::Thread { steps, progress, changed: Condvar::new(), failure: OnceLock::new() },
        }
    }

    /// Creates a transfer whose copies are enqueued, with an event after each step.
    pub(super) fn on_device(gpu: &Arc<Gpu>, events: Vec<Event>) -> Self {
        let runner = Runner::Device { gpu: Arc::clone(gpu), events, waiting_streams: Mutex::default() };
        Self { process: std::process::id(), runner }
    }

    /// Returns the number of steps.
    #[must_use]
    pub const fn steps(&self) -> usize {
        match &self.runner {
            Runner::Thread { steps, .. } => *steps,
            Runner::Device { events, .. } => events.len(),
        }
    }

    fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }

    /// Returns whether the copies have ended, complete or not.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the device has failed.
    pub fn is_over(&self) -> Result<bool> {
        match &self.runner {
            _ if self.is_foreign() => Ok(true),
            Runner::Thread { progress, .. } => Ok(progress.lock().is_over),
            Runner::Device { events, .. } => events.last().map_or(Ok(true), Event::has_passed),
        }
    }

    /// Returns whether every step was done.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub fn is_complete(&self) -> Result<bool> {
        match &self.runner {
            _ if self.is_foreign() => Ok(false),
            Runner::Thread { steps, progress, .. } => Ok(progress.lock().done == *steps),
            Runner::Device { .. } => self.is_over(),
        }
    }

    /// Returns whether every step is done before the work that is enqueued on `stream` from now on.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub fn is_complete_on(&self, stream: Stream) -> Result<bool> {
        match &self.runner {
            Runner::Device { waiting_streams, .. }
                if !self.is_foreign() && lock(waiting_streams).contains(&stream) =>
            {
                Ok(true)
            }
            _ => self.is_complete(),
        }
    }

    /// Makes `stream` wait for step `step`; without a device, the calling thread waits. The host does not
    /// wait for a device.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for a step that does not exist; [`ErrorKind::State`] when the copies were
    /// cancelled or failed before it; [`ErrorKind::Driver`] while `stream` is being captured, and when a
    /// driver call fails.
    ///
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    /// [`ErrorKind::Index`]: crate::base::ErrorKind::Index
    /// [`ErrorKind::State`]: crate::base::ErrorKind::State
    pub fn make_stream_wait(&self, step: usize, stream: Stream) -> Result<()> {
        let steps = self.steps();
        if step >= steps {
            return Err(Error::index(format!("step {step} is outside [0, {steps})")));
        }
        if self.is_foreign() {
            return Err(ended_error("belong to the process that this one was forked from"));
        }
        match &self.runner {
            Runner::Thread { progress, changed, failure, .. } => {
                let has_advanced = |now: &StepProgress| now.done > step || now.is_over;
                let now = *progress.lock();
                let now = if has_advanced(&now) {
                    now
                } else {
                    run_blocking(|| wait(progress, changed, has_advanced))
                };
                if now.done > step {
                    Ok(())
                } else {
                    let ended = "have ended before they were complete";
                    Err(match failure.get() {
                        Some(cause) => ended_error(&format!("{ended}: {cause}")),
                        None => ended_error(ended),
                    })
                }
            }
            Runner::Device { gpu, events, waiting_streams } => {
                gpu.check_not_capturing(stream, "a wait for copies outside of the capture")?;
                events[step].make_stream_wait(stream)?;
                if step + 1 == steps {
                    let mut streams = lock(waiting_streams);
                    if !streams.contains(&stream) {
                        streams.push(stream);
                    }
                }
                Ok(())
            }
        }
    }

    /// Waits until the copies have ended.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub fn wait(&self) -> Result<()> {
        match &self.runner {
            _ if self.is_foreign() => Ok(()),
            Runner::Thread { progress, changed, .. } => {
                let is_over = |now: &StepProgress| now.is_over;
                if !progress.lock().is_over {
                    run_blocking(|| wait(progress, changed, is_over));
                }
                Ok(())
            }
            Runner::Device { events, .. } => events.last().map_or(Ok(()), |event| {
                if event.has_passed()? { Ok(()) } else { run_blocking(|| event.wait()) }
            }),
        }
    }

    /// Returns the error of the step that failed on a thread, if one did.
    #[must_use]
    pub fn failure(&self) -> Option<&Error> {
        match &self.runner {
            Runner::Thread { failure, .. } => failure.get(),
            Runner::Device { .. } => None,
        }
    }

    /// Cancels the steps that a thread has not begun. Steps that were enqueued on a device still run.
    pub fn cancel(&self) {
        if let Runner::Thread { progress, .. } = &self.runner {
            progress.lock().is_cancelled = true;
        }
    }

    /// Cancels the steps that a thread has not begun, and makes `stream` wait until the copies have ended.
    /// Without a device, the calling thread waits.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub fn stop(&self, stream: Stream) -> Result<()> {
        self.cancel();
        self.make_stream_wait_for_all(stream)
    }

    /// Makes `stream` wait for the end of the copies; without a device, the calling thread waits. The host
    /// does not wait for a device.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub fn make_stream_wait_for_all(&self, stream: Stream) -> Result<()> {
        match &self.runner {
            Runner::Device { gpu, events, .. } if !self.is_over()? => {
                gpu.check_not_capturing(stream, "a wait for copies outside of the capture")?;
                events.last().map_or(Ok(()), |event| event.make_stream_wait(stream))
            }
            _ => self.wait(),
        }
    }

    /// Returns whether the thread should run the next step.
    pub(super) fn should_continue(&self) -> bool {
        match &self.runner {
            Runner::Thread { steps, progress, .. } => {
                let now = *progress.lock();
                !now.is_cancelled && now.done < *steps
            }
            Runner::Device { .. } => false,
        }
    }

    /// Records that a step of the thread failed.
    pub(super) fn record_failure(&self, cause: Error) {
        if let Runner::Thread { failure, .. } = &self.runner {
            // Only one step can fail, since none follows it.
            let _ = failure.set(cause);
        }
    }

    /// Records the progress of the thread.
    pub(super) fn record(&self, event: StepEvent) {
        let Runner::Thread { progress, changed, .. } = &self.runner else { return };
        let mut now = progress.lock();
        match event {
            StepEvent::Done => now.done += 1,
            StepEvent::Ended => now.is_over = true,
        }
        drop(now);
        changed.notify_all();
    }
}

/// The progress of a thread.
#[derive(Clone, Copy, Debug)]
pub(super) enum StepEvent {
    /// A step is done.
    Done,
    /// The thread has ended its work.
    Ended,
}

fn wait(
    progress: &RankedMutex<StepProgress>,
    changed: &Condvar,
    is_done: impl Fn(&StepProgress) -> bool,
) -> StepProgress {
    let mut now = progress.lock();
    while !is_done(&now) {
        now = now.wait(changed);
    }
    *now
}

fn ended_error(why: &str) -> Error {
    Error::state(format!("the copies {why}"))
}
