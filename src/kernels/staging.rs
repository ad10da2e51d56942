//! Device memory through which copies between pages and the host pass.
//!
//! A kernel that writes to the host holds multiprocessors for as long as the bus takes: the pages kernel slows
//! a matrix product beside it 2.3 times (H100, 2026-11-26). One that reads from the host moves less than a copy
//! engine does, and waits for every kernel of others: 33 GB/s instead of 55 beside a matrix product. So a
//! kernel only gathers what lies apart into device memory, or scatters it from there, at the rate of that
//! memory, and a copy engine, which takes nothing from the kernels of others, moves whole runs of it over the
//! bus. Several parts let both work at once.
//!
//! Owns the memory and the order of its uses; what lies there is the caller's. No call waits.

use std::sync::{Arc, Mutex};

use crate::base::Result;
use crate::base::sync::lock;
use crate::memory::{ALIGNMENT, Contents, CopyDirection, Cuda, Event, Gpu, Region, SideStream, Stream};

/// Parts of device memory, which are filled and emptied in turn, for copies in one direction.
///
/// ```
/// use kvpool::kernels::StagingArea;
/// use kvpool::memory::{CopyDirection, Gpu};
/// if let Ok(gpu) = Gpu::open(0) {
///     let [out, into] = StagingArea::of_tier(&gpu, 3 << 20).unwrap();
///     let _ = (out, into, StagingArea::new(&gpu, CopyDirection::In, 1 << 20).unwrap());
/// }
/// ```
#[derive(Debug)]
pub struct StagingArea {
    gpu: Arc<Gpu>,
    direction: CopyDirection,
    region: Arc<Region>,
    part_bytes: usize,
    turns: Mutex<Turns>,
}

/// The order of the uses of the parts.
#[derive(Debug)]
struct Turns {
    /// The part that is filled next.
    next: usize,
    /// The points at which the parts have been emptied.
    emptied: Vec<Option<Event>>,
}

/// The parts of an area. While a kernel of others holds the device, none is gathered or scattered: what goes out
/// has large ones, and what comes in, a layer at a time, as many as arrive meanwhile.
const fn parts_for(direction: CopyDirection) -> usize {
    match direction {
        CopyDirection::Out => 2,
        CopyDirection::In => 4,
    }
}

impl StagingArea {
    /// Allocates an area of up to `bytes` bytes on `gpu`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the device has less;
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails.
    pub fn new(gpu: &Arc<Gpu>, direction: CopyDirection, bytes: usize) -> Result<Self> {
        let parts = parts_for(direction);
        let part_bytes = bytes / parts / ALIGNMENT * ALIGNMENT;
        let memory = Arc::new(Cuda::new(gpu, Stream::default_of(gpu.device())));
        let region = Arc::new(Region::with(memory, parts * part_bytes, Contents::Undefined, Arc::default())?);
        let turns =
            Mutex::new(Turns { next: 0, emptied: std::iter::repeat_with(|| None).take(parts).collect() });
        Ok(Self { gpu: Arc::clone(gpu), direction, region, part_bytes, turns })
    }

    /// Allocates the areas of a tier on `gpu`, of up to `bytes` bytes together: for what goes out, which has two thirds
    /// of them, and for what comes in.
    ///
    /// # Errors
    /// See [`Self::new`].
    pub fn of_tier(gpu: &Arc<Gpu>, bytes: usize) -> Result<[Arc<Self>; 2]> {
        let area = |direction, bytes| {
            Self::new(gpu, direction, bytes).map(Arc::new).map_err(|failure| {
                failure.with_prefix("the staging area of a tier (KVPOOL_STAGING_BYTES; 0 for none)")
            })
        };
        let into = bytes / 3;
        Ok([area(CopyDirection::Out, bytes - into)?, area(CopyDirection::In, into)?])
    }

    /// Returns the memory.
    pub(super) const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the number of bytes of all parts.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.region.bytes()
    }

    /// Returns the number of bytes of a part.
    pub(super) const fn part_bytes(&self) -> usize {
        self.part_bytes
    }

    /// Makes the stream on which parts are filled wait for the current work of `stream`, and returns it.
    pub(super) fn begin(&self, stream: Stream) -> Result<Stream> {
        let filling = self.gpu.side_stream(SideStream::Filling(self.direction))?;
        self.gpu.make_stream_wait(&[stream], filling)?;
        self.region.record_stream(filling);
        self.region.record_stream(stream);
        Ok(filling)
    }

    /// Calls `fill` and then `empty` with the first byte of a part. They enqueue work on `filling`, which
    /// [`Self::begin`] returned, and on `stream`.
    pub(super) fn pass(
        &self,
        [filling, stream]: [Stream; 2],
        fill: impl FnOnce(usize) -> Result<()>,
        empty: impl FnOnce(usize) -> Result<()>,
    ) -> Result<()> {
        let mut turns = lock(&self.turns);
        let part = turns.next;
        let begin = part * self.part_bytes;
        if let Some(emptied) = &turns.emptied[part] {
            emptied.make_stream_wait(filling)?;
        }
        fill(begin)?;
        Event::record(&self.gpu, filling)?.make_stream_wait(stream)?;
        let outcome = empty(begin);
        // Also after an error: a piece may be on its way.
        turns.emptied[part] = Some(Event::record(&self.gpu, stream)?);
        turns.next = (part + 1) % turns.emptied.len();
        outcome
    }
}
