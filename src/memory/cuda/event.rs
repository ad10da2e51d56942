//! Points in the work of a stream.
//!
//! Events are reused, and never destroyed. Recording or waiting on the device costs one driver call and never
//! blocks the host.

use std::sync::Arc;

use crate::base::{Device, Error, ErrorKind, Result, assert_may_wait};
use crate::memory::Stream;

use super::{Gpu, driver::EventHandle};

/// A point in the work of a stream that the host and other streams can wait for.
#[derive(Debug)]
pub struct Event {
    gpu: Arc<Gpu>,
    handle: EventHandle,
    wait: HostWait,
}

/// What a thread does while it waits for an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostWait {
    /// It spins, and goes on at once. Such events are the fastest for streams that wait for them, and to query.
    Spins,
    /// It sleeps, and leaves its core to others: for work that takes longer than waking up.
    Sleeps,
}

impl HostWait {
    /// Returns what is best while so many bytes cross the bus.
    #[must_use]
    pub const fn for_copy_of(bytes: usize) -> Self {
        /// Takes about 20 us at 55 GB/s.
        const LONG: usize = 1 << 20;
        if bytes < LONG { Self::Spins } else { Self::Sleeps }
    }
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
    pub(super) const fn host_wait(&self) -> HostWait {
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
    pub(super) fn wait_under_locks(&self) -> Result<()> {
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
