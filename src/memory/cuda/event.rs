//! Points in the work of a stream.
//!
//! Events are reused, and never destroyed. Recording or waiting on the device costs one driver call and never
//! blocks the host.

use std::sync::Arc;

use crate::base::{Device, Error, ErrorKind, Result, assert_may_wait};
use crate::memory::{Stream, StreamSet};

use super::driver::EventHandle;
use super::gpu::Gpu;
use super::host_wait::HostWait;

/// A point in the work of a stream that the host and other streams can wait for.
#[derive(Debug)]
pub struct Event {
    gpu: Arc<Gpu>,
    handle: EventHandle,
    wait: HostWait,
}

impl Event {
    /// Returns the point after everything that was enqueued on `stream` so far, a stream of `gpu` or of another
    /// device. The caller has checked that `stream` is not being captured: see `Gpu::check_not_capturing`.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails, or the stream does not
    /// exist.
    pub fn record(gpu: &Arc<Gpu>, stream: Stream) -> Result<Self> {
        Self::record_for(gpu, stream, HostWait::Spins)
    }

    /// Works like [`Event::record`], for threads that wait for it in this way.
    ///
    /// # Errors
    /// Same as [`Event::record`].
    pub fn record_for(gpu: &Arc<Gpu>, stream: Stream, wait: HostWait) -> Result<Self> {
        Self::record_if_alive(gpu, stream, wait)?.ok_or_else(|| {
            let device = Device::Cuda(stream.ordinal());
            let text = format!("there is no stream {:#x} on {device}", stream.handle());
            Error::new(ErrorKind::Driver, text)
        })
    }

    /// Works like [`Event::record_for`]. `None` when the stream no longer exists, and so has no work of kvpool.
    pub(super) fn record_if_alive(gpu: &Arc<Gpu>, stream: Stream, wait: HostWait) -> Result<Option<Self>> {
        // The driver records an event on streams of the event's own device only.
        let gpu = gpu.of_stream(stream)?;
        let _entered = gpu.enter()?;
        let event = Self { handle: gpu.take_event(wait)?, gpu: Arc::clone(&gpu), wait };
        let is_alive = gpu.driver().record_event(event.handle, stream)?;
        Ok(is_alive.then_some(event))
    }

    /// Returns what a thread does while it waits for this point.
    pub(in crate::memory) const fn host_wait(&self) -> HostWait {
        self.wait
    }

    /// Returns whether the device has passed this point. Does not wait.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver), also for an earlier failure on the device.
    pub fn has_passed(&self) -> Result<bool> {
        let _entered = self.gpu.enter_beside_captures()?;
        self.gpu.driver().query_event(self.handle)
    }

    /// Waits until the device has passed this point. The caller must hold no lock of a pool.
    ///
    /// # Errors
    /// Same as [`Event::has_passed`].
    pub fn wait(&self) -> Result<()> {
        assert_may_wait();
        self.wait_under_locks()
    }

    /// Works like [`Event::wait`], under locks of the caller.
    pub(in crate::memory) fn wait_under_locks(&self) -> Result<()> {
        let _entered = self.gpu.enter_beside_captures()?;
        self.gpu.driver().wait_for_event(self.handle)
    }

    /// Makes everything enqueued on `stream`, of whatever device, from now on wait for this point. The host does
    /// not wait.
    ///
    /// # Errors
    /// Same as [`Event::record`].
    pub fn make_stream_wait(&self, stream: Stream) -> Result<()> {
        let _entered = self.gpu.enter_of(stream)?;
        self.gpu.driver().stream_wait_event(stream, self.handle)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.gpu.give_back_event(self.handle, self.wait);
    }
}

impl Gpu {
    /// Checks that the device has `stream`. One that is being captured is there.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) if it has not, and when a driver call fails.
    fn check_exists(self: &Arc<Self>, stream: Stream) -> Result<()> {
        if !self.is_capturing(stream)? {
            Event::record(self, stream)?;
        }
        Ok(())
    }

    /// Makes everything enqueued on `stream` from now on wait for the current work of `others`, which may be
    /// streams of other devices. The host does not wait.
    ///
    /// # Errors
    /// Same as `Gpu::check_can_order`, before anything is enqueued; [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver
    /// call fails.
    pub fn make_stream_wait(self: &Arc<Self>, others: &[Stream], stream: Stream) -> Result<()> {
        self.check_can_order(others, stream)?;
        let mut others = others.iter().filter(|other| **other != stream);
        others.try_for_each(|&other| match Event::record_if_alive(self, other, HostWait::Spins)? {
            Some(event) => event.make_stream_wait(stream),
            None => Ok(()),
        })
    }
}

impl StreamSet {
    /// Records a stream that the caller names: work on it may use the memory at any time from now on, without being
    /// recorded again.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) if its device has no such stream, which fails here and
    /// not when somebody has to wait for it, and when a driver call fails. Nothing is recorded.
    pub fn keep(&self, stream: Stream) -> Result<()> {
        self.keep_checked(stream, || Gpu::open(stream.ordinal())?.check_exists(stream))
    }
}
