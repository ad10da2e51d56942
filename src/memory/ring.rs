//! Page-locked ring buffer that transfers small arrays to and from a device.
//!
//! Use it for numbers that change with every call. It is not for bulk data: a piece that does not fit is an
//! error.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::{
    ALIGNMENT, Backend, Contents, Event, Gpu, HostWait, Number, PageLockedHost, Plain, Region, RegionRange,
    Stream, StreamSet,
};
use crate::base::sync::lock;
use crate::base::{Error, Result};

/// Alignment of pieces, in bytes.
const PIECE_ALIGNMENT: usize = 16;

/// From this part of a ring on that is in use, the device is so far behind that a thread sleeps while it waits.
const BEHIND: usize = 4;

/// Finished pieces are reclaimed once this many are in use.
const RECLAIM_THRESHOLD: usize = 32;

/// A ring of page-locked memory with a twin on the device, handed out piece by piece.
///
/// Enqueued work uses the contents of a piece, which is reused once the device has done that work. When the
/// host is a whole ring ahead of the device, the next piece waits for the oldest. Nothing is allocated after
/// construction. Threads may share it: each call locks it.
#[derive(Debug)]
pub struct Ring {
    gpu: Arc<Gpu>,
    host: Region,
    /// `None` for a ring on the host only; its uploads need a target of their own.
    twin: Option<Region>,
    /// The streams that use the ring and its twin.
    users: Arc<StreamSet>,
    pieces: Mutex<Allocations>,
}

#[derive(Debug, Default)]
struct Allocations {
    /// The offset of the next piece, if it fits.
    next: usize,
    /// Oldest first, contiguous except for a gap where the ring wrapped.
    used: VecDeque<Allocation>,
}

#[derive(Debug)]
struct Allocation {
    range: Range<usize>,
    /// The point after the work of the piece or, if it is unknown, the failure of the device; the piece is
    /// then never reused.
    done: Result<Arc<Event>>,
    /// Whether the host still has to read it.
    is_held: bool,
}

impl Allocations {
    /// Returns the piece of a reply that was neither read nor freed.
    fn held(&mut self, reply: &Reply) -> Option<&mut Allocation> {
        let is_of = |piece: &Allocation| piece.done.as_ref().is_ok_and(|done| Arc::ptr_eq(done, &reply.done));
        self.used.iter_mut().find(|piece| piece.is_held && is_of(piece))
    }
}

impl Allocation {
    /// Returns the point after which the piece can be reused, if there is one.
    fn free_after(&self) -> Option<&Arc<Event>> {
        self.done.as_ref().ok().filter(|_| !self.is_held)
    }
}

/// A piece that work on the device writes, for the host to read.
#[derive(Debug)]
pub(crate) struct Reply {
    range: Range<usize>,
    done: Arc<Event>,
}

impl Reply {
    /// Returns the point after the work that writes it.
    #[must_use]
    pub(crate) const fn done(&self) -> &Arc<Event> {
        &self.done
    }
}

impl Ring {
    /// Returns the size of a ring of `bytes` on each side: a multiple of the alignment of backends.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for more than an address can name.
    pub(crate) fn padded_size(bytes: usize) -> Result<usize> {
        bytes
            .checked_next_multiple_of(ALIGNMENT)
            .ok_or_else(|| Error::config(format!("a ring of {bytes} bytes is more than an address can name")))
    }

    /// Creates a ring of `bytes` on the host and as many from `backend`, whose memory is on `gpu`.
    ///
    /// # Errors
    /// The backends', when they have not enough.
    pub fn new(gpu: &Arc<Gpu>, backend: &Arc<dyn Backend>, bytes: usize) -> Result<Self> {
        let users = Arc::<StreamSet>::default();
        let twin = Region::with(
            Arc::clone(backend),
            Self::padded_size(bytes)?,
            Contents::Undefined,
            Arc::clone(&users),
        )?;
        Self::with_twin(gpu, bytes, Some(twin), users)
    }

    /// Creates a ring of `bytes` on the host only, for kernels that write to host memory.
    ///
    /// # Errors
    /// Same as [`Ring::new`].
    pub(crate) fn on_host(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        Self::with_twin(gpu, bytes, None, Arc::default())
    }

    fn with_twin(gpu: &Arc<Gpu>, bytes: usize, twin: Option<Region>, users: Arc<StreamSet>) -> Result<Self> {
        let host = Arc::new(PageLockedHost::new(gpu));
        let host = Region::with(host, Self::padded_size(bytes)?, Contents::Undefined, Arc::clone(&users))?;
        Ok(Self { gpu: Arc::clone(gpu), host, twin, users, pieces: Mutex::default() })
    }

    /// Returns the size of the largest piece in bytes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.host.bytes()
    }

    /// Copies `arrays` to the twin and calls `work` with the range of each, to enqueue the work that uses
    /// them.
    ///
    /// Returns the point after the copy and the work. The caller has checked that `stream` is not being
    /// captured, with [`Ring::check_not_capturing`]: a graph would repeat the copy after the memory was
    /// reused.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) when they exceed the ring,
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails, and the errors of
    /// `work`.
    pub(crate) fn upload<T: Plain>(
        &self,
        arrays: &[&[T]],
        stream: Stream,
        work: impl FnOnce(&[RegionRange<'_>]) -> Result<()>,
    ) -> Result<Arc<Event>> {
        let Some(twin) = &self.twin else {
            return Err(Error::state("a ring on the host only has nothing on the device to copy to"));
        };
        self.send(
            arrays,
            |start, bytes| twin.range(start, bytes),
            stream,
            |start| {
                let ranges = piece_offsets(arrays)
                    .map(|(offset, array)| twin.range(start + offset, size_of_val(array)));
                work(&ranges.collect::<Result<Vec<_>>>()?)
            },
        )
    }

    /// Works like `Ring::upload`, to device memory as long as `values`, with no work but the copy.
    ///
    /// # Errors
    /// Same as `Ring::upload`.
    pub fn upload_to<T: Plain>(
        &self,
        target: RegionRange<'_>,
        values: &[T],
        stream: Stream,
    ) -> Result<Arc<Event>> {
        self.send(&[values], |_, _| Ok(target), stream, |_| Ok(()))
    }

    /// Copies `arrays` to the range that `target` returns for the offset and length of their piece, and calls
    /// `work` with that offset, to enqueue the work that uses them.
    fn send<'a, T: Plain>(
        &self,
        arrays: &[&[T]],
        target: impl FnOnce(usize, usize) -> Result<RegionRange<'a>>,
        stream: Stream,
        work: impl FnOnce(usize) -> Result<()>,
    ) -> Result<Arc<Event>> {
        let bytes = piece_offsets(arrays).last().map_or(0, |(offset, array)| offset + size_of_val(array));
        let mut pieces = lock(&self.pieces);
        let range = self.wait_for_room(&mut pieces, bytes)?.ok_or_else(|| {
            Error::argument(format!(
                "{bytes} bytes of numbers from the host are more than the {} that cross at once; \
                 pass them in parts, or as tensors on the device",
                self.capacity()
            ))
        })?;
        for (offset, array) in piece_offsets(arrays) {
            // SAFETY: the piece is this call's until it is sealed.
            unsafe { self.host.write(range.start + offset, array) }?;
        }
        let target = target(range.start, bytes)?;
        // From here on the device may use the piece, so it is kept even when a later step fails.
        let source = self.host.range(range.start, bytes)?;
        let copied = self.gpu.copy_in(target, source, stream);
        let enqueued = copied.and_then(|()| work(range.start));
        let is_behind = self.in_use(&pieces) > self.capacity() / BEHIND;
        let wait = if is_behind { HostWait::Sleeps } else { HostWait::Spins };
        let done = self.seal(&mut pieces, range, false, stream, wait)?;
        enqueued.map(|()| done)
    }

    /// Returns a point to wait for before the next upload, when more than half of the ring is in use or `bytes`
    /// bytes do not fit. Waiting for it beforehand, without the locks that `Ring::upload` is called under, avoids
    /// a wait there, unless another thread takes the room meanwhile.
    #[must_use]
    pub(crate) fn backpressure_event(&self, bytes: usize) -> Option<Arc<Event>> {
        let mut pieces = lock(&self.pieces);
        let has_room = |pieces: &Allocations| {
            self.in_use(pieces) <= self.capacity() / 2 && self.find_room(pieces, bytes).is_some()
        };
        if has_room(&pieces) {
            return None;
        }
        // A failed device reports its error to the next upload.
        Self::reclaim(&mut pieces).ok()?;
        if has_room(&pieces) {
            return None;
        }
        // What is before an event that a thread sleeps for becomes free with it, at least on its stream.
        let mut events = pieces.used.iter().filter_map(Allocation::free_after);
        let sleeping = events.find(|done| done.host_wait() == HostWait::Sleeps);
        let is_coming = |done: &&Arc<Event>| !done.has_passed().unwrap_or(true);
        sleeping.filter(is_coming).or(pieces.used.front()?.free_after()).cloned()
    }

    /// Returns the number of bytes from the start of the oldest piece to the end of the newest.
    fn in_use(&self, pieces: &Allocations) -> usize {
        let Some(oldest) = pieces.used.front() else { return 0 };
        let from = oldest.range.start;
        if pieces.next > from { pieces.next - from } else { self.capacity() - from + pieces.next }
    }

    /// Checks that work on `stream` can use numbers from the host.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) while it is being captured.
    pub(crate) fn check_not_capturing(&self, stream: Stream) -> Result<()> {
        self.gpu.check_not_capturing(stream, "a copy of numbers from the host, in memory that is used again,")
    }

    /// Calls `work` with `bytes` bytes of host memory, to enqueue work that writes them. `None` when there is
    /// no room now.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails, and the errors of
    /// `work`.
    pub(crate) fn receive(
        &self,
        bytes: usize,
        stream: Stream,
        work: impl FnOnce(RegionRange<'_>) -> Result<()>,
    ) -> Result<Option<Reply>> {
        let mut pieces = lock(&self.pieces);
        Self::reclaim(&mut pieces)?;
        let Some(range) = self.find_room(&pieces, bytes) else { return Ok(None) };
        let enqueued = self.host.range(range.start, bytes).and_then(work);
        let done = self.seal(&mut pieces, range.clone(), true, stream, HostWait::Spins)?;
        let reply = Reply { range, done };
        match enqueued {
            Ok(()) => Ok(Some(reply)),
            Err(failure) => {
                drop(pieces);
                self.release(&reply);
                Err(failure)
            }
        }
    }

    /// Reads the first `count` elements of a piece whose work is done, and frees the piece.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) when the work is not done or the piece was freed,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when the piece holds fewer elements,
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the
    /// copy, and the errors of [`Event::has_passed`]. The piece is not freed then.
    pub(crate) fn take<T: Number>(&self, reply: &Reply, count: usize) -> Result<Vec<T>> {
        let mut pieces = lock(&self.pieces);
        let Some(piece) = pieces.held(reply) else {
            return Err(Error::state("the numbers of the device were taken before"));
        };
        if !reply.done.has_passed()? {
            return Err(Error::state("the numbers of the device have not arrived"));
        }
        if count.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > reply.range.len()) {
            let bytes = reply.range.len();
            return Err(Error::index(format!(
                "{count} numbers are not in the {bytes} bytes from the device"
            )));
        }
        // SAFETY: the work that wrote the piece is done, and no other work gets it while it is held.
        let values = unsafe { self.host.read(reply.range.start, count) }?;
        piece.is_held = false;
        Ok(values)
    }

    /// Frees a piece without reading it. The device may still be writing it.
    pub(crate) fn release(&self, reply: &Reply) {
        if let Some(piece) = lock(&self.pieces).held(reply) {
            piece.is_held = false;
        }
    }

    /// Marks `range` as used by what was enqueued on `stream` so far.
    fn seal(
        &self,
        pieces: &mut Allocations,
        range: Range<usize>,
        is_held: bool,
        stream: Stream,
        wait: HostWait,
    ) -> Result<Arc<Event>> {
        self.users.record(stream);
        let done = match Event::record_for(&self.gpu, stream, wait) {
            Ok(done) => Arc::new(done),
            Err(failure) => {
                // Without a point to wait for, the piece is free only after waiting now; if that fails, it is
                // never reused.
                if self.gpu.synchronize(stream).is_err() {
                    pieces.next = range.end;
                    let done = Err(failure.clone());
                    pieces.used.push_back(Allocation { range, done, is_held: true });
                }
                return Err(failure);
            }
        };
        pieces.next = range.end;
        pieces.used.push_back(Allocation { range, done: Ok(Arc::clone(&done)), is_held });
        Ok(done)
    }

    /// Drops the oldest pieces that are no longer in use.
    fn reclaim(pieces: &mut Allocations) -> Result<()> {
        while let Some(oldest) = pieces.used.front() {
            match oldest.free_after() {
                Some(done) if done.has_passed()? => (),
                _ => break,
            }
            pieces.used.pop_front();
        }
        Ok(())
    }

    /// Finds room for `bytes`, and waits for the oldest pieces if necessary; `None` if the ring is too small.
    fn wait_for_room(&self, pieces: &mut Allocations, bytes: usize) -> Result<Option<Range<usize>>> {
        if pieces.used.len() >= RECLAIM_THRESHOLD {
            Self::reclaim(pieces)?;
        }
        loop {
            if let Some(range) = self.find_room(pieces, bytes) {
                return Ok(Some(range));
            }
            let Some(oldest) = pieces.used.front() else { return Ok(None) };
            match oldest.free_after() {
                Some(done) if done.has_passed()? => (),
                // Another thread took the room that `backpressure_event` saw.
                Some(done) => done.wait_under_locks()?,
                None => return oldest.done.clone().map(|_| None),
            }
            pieces.used.pop_front();
        }
    }

    fn find_room(&self, pieces: &Allocations, bytes: usize) -> Option<Range<usize>> {
        let bytes = bytes.max(1).checked_next_multiple_of(PIECE_ALIGNMENT)?;
        let fits =
            |start: usize, end: usize| (bytes <= end.checked_sub(start)?).then(|| start..start + bytes);
        let Some(oldest) = pieces.used.front().map(|piece| piece.range.start) else {
            return fits(0, self.capacity());
        };
        if pieces.next > oldest {
            // One byte stays free, so that a full ring does not look like an empty one.
            fits(pieces.next, self.capacity()).or_else(|| fits(0, oldest.saturating_sub(1)))
        } else {
            fits(pieces.next, oldest.saturating_sub(1))
        }
    }
}

/// Returns the offset of each of `arrays` in a piece.
fn piece_offsets<'a, T>(arrays: &'a [&'a [T]]) -> impl Iterator<Item = (usize, &'a [T])> {
    let mut end = 0usize;
    arrays.iter().map(move |array| {
        let offset = end.next_multiple_of(PIECE_ALIGNMENT);
        end = offset + size_of_val(*array);
        (offset, *array)
    })
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::memory::Cuda;

    /// Returns a GPU, if there is one.
    fn gpu() -> Option<Arc<Gpu>> {
        let is_required = std::env::var("KVPOOL_REQUIRE_CUDA").is_ok_and(|value| value == "1");
        let gpu = Gpu::open(0);
        assert!(gpu.is_ok() || !is_required, "this test must run, but {gpu:?}");
        gpu.ok()
    }

    #[test]
    fn data_beyond_the_ring_is_waited_for_first() {
        let Some(gpu) = gpu() else { return };
        let stream = Stream::DEFAULT;
        let region = Region::new(Arc::new(Cuda::new(&gpu, stream)), 256).expect("memory");
        let ring = Ring::on_host(&gpu, 1024).expect("memory");
        let target = region.range(0, 256).expect("inside");
        let sent = ring.upload_to(target, &[0_i32; 64], stream).expect("enqueued");
        let events = [0, 512, 900].map(|bytes| ring.backpressure_event(bytes));
        // A GPU may have copied it already; the software driver has not.
        if !sent.has_passed().expect("a device") {
            assert_eq!(events.map(|event| event.is_some()), [false, false, true]);
        }
        sent.wait().expect("a device");
        assert!(ring.backpressure_event(900).is_none());
        assert!(ring.backpressure_event(4096).is_none(), "it never fits");
    }

    #[test]
    fn a_thread_sleeps_until_a_device_that_is_far_behind_has_caught_up() {
        let Some(gpu) = gpu() else { return };
        let stream = Stream::DEFAULT;
        let region = Region::new(Arc::new(Cuda::new(&gpu, stream)), 256).expect("memory");
        let ring = Ring::on_host(&gpu, 2048).expect("memory");
        let target = region.range(0, 256).expect("inside");
        let sent: Vec<_> =
            (0..5).map(|_| ring.upload_to(target, &[0_i32; 64], stream).expect("enqueued")).collect();
        let waits: Vec<_> = sent.iter().map(|event| event.host_wait()).collect();
        // A GPU may have copied some already; the software driver has not.
        if !sent[0].has_passed().expect("a device") {
            assert_eq!(waits[..4], [HostWait::Spins, HostWait::Spins, HostWait::Spins, HostWait::Sleeps]);
            let event = ring.backpressure_event(0).expect("more than half of it is in use");
            assert!(Arc::ptr_eq(&event, &sent[3]), "not the first one, for which a thread would spin");
            event.wait().expect("a device");
        }
        assert!(ring.backpressure_event(0).is_none());
        sent[4].wait().expect("a device");
    }

    #[test]
    fn a_reply_is_taken_once_and_after_it_has_arrived() {
        let Some(gpu) = gpu() else { return };
        let stream = Stream::DEFAULT;
        let region = Region::new(Arc::new(Cuda::new(&gpu, stream)), 16).expect("memory");
        let zeros = region.bytes_at(0, 16).expect("inside");
        let ring = Ring::on_host(&gpu, 64).expect("memory");
        let copy = |range: RegionRange<'_>| gpu.copy_out(&zeros, range, stream);
        let reply = ring.receive(16, stream, copy).expect("enqueued").expect("room");
        // A GPU may have copied it already; the software driver has not.
        if !reply.done().has_passed().expect("a device") {
            assert_eq!(ring.take::<i32>(&reply, 4).expect_err("too early").kind(), ErrorKind::State);
        }
        gpu.synchronize(stream).expect("ran");
        assert_eq!(ring.take::<i32>(&reply, 5).expect_err("too many").kind(), ErrorKind::Index);
        assert_eq!(ring.take::<i32>(&reply, 4).expect("it has arrived"), [0; 4]);
        assert_eq!(ring.take::<i32>(&reply, 4).expect_err("taken").kind(), ErrorKind::State);
    }
}
