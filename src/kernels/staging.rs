//! Device memory through which copies pass on their way to the host.
//!
//! A kernel that writes to the host holds multiprocessors for as long as the bus takes: the pages kernel slows
//! a matrix product beside it 2.3 times (H100, 2026-11-26). So a kernel only gathers what lies apart into
//! device memory, at the rate of that memory, and a copy engine, which takes nothing from the kernels of others,
//! moves whole runs of it over the bus. Two halves let both work at once.
//!
//! Owns the memory and the order of its uses; what lies there is the caller's. No call waits.

use std::sync::{Arc, Mutex};

use crate::base::Result;
use crate::base::sync::lock;
use crate::memory::{ALIGNMENT, Contents, Cuda, Event, Gpu, Region, SideStream, Stream};

/// Two halves of device memory, which are filled and emptied in turn.
#[derive(Debug)]
pub struct StagingArea {
    gpu: Arc<Gpu>,
    region: Arc<Region>,
    half_bytes: usize,
    turns: Mutex<Turns>,
}

/// The order of the uses of both halves.
#[derive(Debug, Default)]
struct Turns {
    /// The half that is filled next.
    next: usize,
    /// The points at which the halves have been emptied.
    emptied: [Option<Event>; 2],
}

impl StagingArea {
    /// Allocates an area of up to `bytes` bytes on `gpu`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the device has less;
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        let half_bytes = bytes / 2 / ALIGNMENT * ALIGNMENT;
        let memory = Arc::new(Cuda::new(gpu, Stream::default_of(gpu.device())));
        let region = Arc::new(Region::with(memory, 2 * half_bytes, Contents::Undefined, Arc::default())?);
        Ok(Self { gpu: Arc::clone(gpu), region, half_bytes, turns: Mutex::default() })
    }

    /// Returns the memory.
    pub(super) const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the number of bytes of both halves.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        2 * self.half_bytes
    }

    /// Returns the number of bytes of a half.
    pub(super) const fn half_bytes(&self) -> usize {
        self.half_bytes
    }

    /// Makes the stream on which halves are filled wait for the current work of `stream`, and returns it.
    pub(super) fn begin(&self, stream: Stream) -> Result<Stream> {
        let filling = self.gpu.side_stream(SideStream::Gather)?;
        self.gpu.make_stream_wait(&[stream], filling)?;
        self.region.record_stream(filling);
        self.region.record_stream(stream);
        Ok(filling)
    }

    /// Calls `fill` and then `empty` with the first byte of a half. They enqueue work on `filling`, which
    /// [`Self::begin`] returned, and on `stream`.
    pub(super) fn pass(
        &self,
        [filling, stream]: [Stream; 2],
        fill: impl FnOnce(usize) -> Result<()>,
        empty: impl FnOnce(usize) -> Result<()>,
    ) -> Result<()> {
        let mut turns = lock(&self.turns);
        let half = turns.next;
        let begin = half * self.half_bytes;
        if let Some(emptied) = &turns.emptied[half] {
            emptied.make_stream_wait(filling)?;
        }
        fill(begin)?;
        Event::record(&self.gpu, filling)?.make_stream_wait(stream)?;
        let outcome = empty(begin);
        // Also after an error: a part may be on its way.
        turns.emptied[half] = Some(Event::record(&self.gpu, stream)?);
        turns.next = 1 - half;
        outcome
    }
}
