//! Copies on their way, which are waited for step by step.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, Result, blocking};
use crate::memory::{Event, Gpu, Stream};

/// Copies in steps, such as the layers of a model, one after the other: on a thread, or on a stream of their
/// own.
///
/// In the child of a fork the copies of its parent are over, and failed: the child has neither the threads
/// nor the device that do them.
#[derive(Debug)]
pub struct Transfer {
    process: u32,
    runner: Runner,
}

#[derive(Debug)]
enum Runner {
    /// The steps run on a thread.
    Thread { steps: usize, progress: Mutex<StepProgress>, moved: Condvar },
    /// The steps run on a stream, with an event behind each step, and the streams that wait for the last one.
    Device { gpu: Arc<Gpu>, events: Vec<Event>, behind: Mutex<Vec<Stream>> },
}

/// The progress of a thread.
#[derive(Clone, Copy, Debug, Default)]
struct StepProgress {
    done: usize,
    is_cancelled: bool,
    /// Whether nothing is copied any more.
    is_over: bool,
}

impl Transfer {
    /// Copies in `steps`, at least 1, that a thread will do.
    pub(super) fn on_thread(steps: usize) -> Self {
        let progress = Mutex::new(StepProgress::default());
        Self {
            process: std::process::id(),
            runner: Runner::Thread { steps, progress, moved: Condvar::new() },
        }
    }

    /// Copies that were enqueued, with an event behind each step.
    pub(super) fn on_device(gpu: &Arc<Gpu>, events: Vec<Event>) -> Self {
        let runner = Runner::Device { gpu: Arc::clone(gpu), events, behind: Mutex::default() };
        Self { process: std::process::id(), runner }
    }

    /// The number of steps.
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

    /// Whether nothing is copied any more, rightly or not.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when the device has failed.
    pub fn is_over(&self) -> Result<bool> {
        match &self.runner {
            _ if self.is_foreign() => Ok(true),
            Runner::Thread { progress, .. } => Ok(lock(progress).is_over),
            Runner::Device { events, .. } => events.last().map_or(Ok(true), Event::passed),
        }
    }

    /// Whether every step was done.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub fn is_complete(&self) -> Result<bool> {
        match &self.runner {
            _ if self.is_foreign() => Ok(false),
            Runner::Thread { steps, progress, .. } => Ok(lock(progress).done == *steps),
            Runner::Device { .. } => self.is_over(),
        }
    }

    /// Whether every step is done before the work that is enqueued on `stream` from now on.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub fn is_complete_on(&self, stream: Stream) -> Result<bool> {
        match &self.runner {
            Runner::Device { behind, .. } if !self.is_foreign() && lock(behind).contains(&stream) => Ok(true),
            _ => self.is_complete(),
        }
    }

    /// Lets `stream` go on when step `step` is done; without a device, the calling thread. The host does not
    /// wait for a device.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for a step that does not exist; [`ErrorKind::State`] when the copies were
    /// cancelled or failed before it; [`ErrorKind::Driver`] while `stream` is being captured, and when a
    /// driver call fails.
    pub fn order(&self, step: usize, stream: Stream) -> Result<()> {
        let steps = self.steps();
        if step >= steps {
            return Err(Error::index(format!("step {step} is outside [0, {steps})")));
        }
        if self.is_foreign() {
            return Err(ended("belong to the process that this one was forked from"));
        }
        match &self.runner {
            Runner::Thread { progress, moved, .. } => {
                let has_moved = |now: &StepProgress| now.done > step || now.is_over;
                let now = *lock(progress);
                let now = if has_moved(&now) { now } else { blocking(|| wait(progress, moved, has_moved)) };
                if now.done > step { Ok(()) } else { Err(ended("have ended before they were complete")) }
            }
            Runner::Device { gpu, events, behind } => {
                gpu.not_capturing(stream, "a wait for copies outside of the capture")?;
                events[step].precede(stream)?;
                if step + 1 == steps {
                    let mut behind = lock(behind);
                    if !behind.contains(&stream) {
                        behind.push(stream);
                    }
                }
                Ok(())
            }
        }
    }

    /// Waits until nothing is copied any more.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub fn wait(&self) -> Result<()> {
        match &self.runner {
            _ if self.is_foreign() => Ok(()),
            Runner::Thread { progress, moved, .. } => {
                let is_over = |now: &StepProgress| now.is_over;
                if !lock(progress).is_over {
                    blocking(|| wait(progress, moved, is_over));
                }
                Ok(())
            }
            Runner::Device { events, .. } => events
                .last()
                .map_or(Ok(()), |event| if event.passed()? { Ok(()) } else { blocking(|| event.wait()) }),
        }
    }

    /// Lets a thread begin no further step. What a device was given, it does.
    pub fn cancel(&self) {
        if let Runner::Thread { progress, .. } = &self.runner {
            lock(progress).is_cancelled = true;
        }
    }

    /// Ends the copies before the work that is enqueued on `stream` from now on. A thread ends after its
    /// present step, for which this waits; the host does not wait for a device.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub fn stop(&self, stream: Stream) -> Result<()> {
        self.cancel();
        self.precede(stream)
    }

    /// Makes `stream` wait for the end of the copies; without a device, the calling thread waits. The host
    /// does not wait for a device.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub fn precede(&self, stream: Stream) -> Result<()> {
        match &self.runner {
            Runner::Device { gpu, events, .. } if !self.is_over()? => {
                gpu.not_capturing(stream, "a wait for copies outside of the capture")?;
                events.last().map_or(Ok(()), |event| event.precede(stream))
            }
            _ => self.wait(),
        }
    }

    /// Whether a thread is to do the next step.
    pub(super) fn goes_on(&self) -> bool {
        match &self.runner {
            Runner::Thread { steps, progress, .. } => {
                let now = *lock(progress);
                !now.is_cancelled && now.done < *steps
            }
            Runner::Device { .. } => false,
        }
    }

    /// Records the progress of a thread.
    pub(super) fn note(&self, note: Note) {
        let Runner::Thread { progress, moved, .. } = &self.runner else { return };
        let mut now = lock(progress);
        match note {
            Note::Done => now.done += 1,
            Note::Over => now.is_over = true,
        }
        drop(now);
        moved.notify_all();
    }
}

/// A report of a thread.
#[derive(Clone, Copy, Debug)]
pub(super) enum Note {
    /// A step is done.
    Done,
    /// The thread does no more.
    Over,
}

fn wait(
    progress: &Mutex<StepProgress>,
    moved: &Condvar,
    enough: impl Fn(&StepProgress) -> bool,
) -> StepProgress {
    let mut now: MutexGuard<'_, StepProgress> = lock(progress);
    while !enough(&now) {
        now = moved.wait(now).unwrap_or_else(PoisonError::into_inner);
    }
    *now
}

fn ended(why: &str) -> Error {
    Error::new(ErrorKind::State, format!("the copies {why}"))
}
