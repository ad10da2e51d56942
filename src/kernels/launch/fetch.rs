//! Index values in transfer from a device to the host.

use std::sync::{Arc, Mutex};

use crate::base::bounded::signed;
use crate::base::sync::lock;
use crate::base::{DType, Discarded, Error, IndexVec, Result, bytes_of, try_with_capacity};
use crate::kernels::indices::{Numbers, check_ints};
use crate::memory::{BorrowedTensor, Event, Gpu, Keep, Number, RegionRange, Reply, Ring, Stream};

use super::Kernels;
use super::grid::blocks;
use super::numbers::Index;
use super::params::ReadParams;

/// The number of values that fit the fetcher that is shared.
const ROOM: usize = 128 << 10;

/// Copies index tensors to the host without waiting for them. Threads may share it.
#[derive(Debug)]
pub(crate) struct Fetcher {
    gpu: Arc<Gpu>,
    kernels: Arc<Kernels>,
    ring: Ring,
}

/// Index values in transfer.
#[derive(Debug)]
pub(crate) struct PendingFetch {
    reply: Reply,
    count: usize,
    /// Whether they are copied as int64.
    is_wide: bool,
    /// Keeps the tensor alive until the copy is done.
    keep: Option<Keep>,
}

impl PendingFetch {
    /// Returns the number of values.
    #[must_use]
    pub(crate) const fn len(&self) -> usize {
        self.count
    }

    /// Discards the owner that kept the tensor alive.
    pub(crate) fn discard(self, discarded: &Discarded) {
        if let Some(keep) = self.keep {
            discarded.add(keep);
        }
    }

    /// Returns the point after the copy.
    #[must_use]
    pub(crate) fn done(&self) -> &Arc<Event> {
        self.reply.done()
    }
}

impl Fetcher {
    /// Creates a fetcher for up to `values` values at a time.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) and
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver), when memory or the kernels are not available.
    pub(crate) fn new(gpu: &Arc<Gpu>, values: usize) -> Result<Self> {
        let bytes = bytes_of("index values", &[values], DType::I64)?;
        Ok(Self { gpu: Arc::clone(gpu), kernels: Kernels::of(gpu)?, ring: Ring::on_host(gpu, bytes)? })
    }

    /// Returns the fetcher that the whole process shares for `gpu`, so that a wait for a few values allocates
    /// nothing.
    fn shared(gpu: &Arc<Gpu>, values: usize) -> Result<Arc<Self>> {
        static SHARED: Mutex<Vec<Arc<Fetcher>>> = Mutex::new(Vec::new());
        if values > ROOM {
            return Ok(Arc::new(Self::new(gpu, values)?));
        }
        let mut shared = lock(&SHARED);
        if let Some(found) = shared.iter().find(|fetcher| fetcher.gpu.device() == gpu.device()) {
            return Ok(Arc::clone(found));
        }
        let fetcher = Arc::new(Self::new(gpu, ROOM)?);
        shared.push(Arc::clone(&fetcher));
        Ok(fetcher)
    }

    /// Returns the device of the tensors that it copies.
    #[must_use]
    pub(crate) const fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Enqueues a copy of `tensor`, int32 or int64, with its contents at this point of `stream`. `None` when
    /// too many values are in transfer. The result of `keep` keeps the tensor's memory alive, even beyond the
    /// end of its stream; it is only called when the copy is enqueued.
    ///
    /// # Errors
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) for another dtype,
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails, or `stream` is being
    /// captured.
    pub(crate) fn fetch(
        &self,
        tensor: &BorrowedTensor<'_>,
        keep: impl FnOnce() -> Option<Keep>,
        stream: Stream,
    ) -> Result<Option<PendingFetch>> {
        self.gpu.check_not_capturing(
            stream,
            "freeing slots that only the device has, whose values are copied to the host,",
        )?;
        self.enqueue(tensor, keep, stream)
    }

    /// Works like [`Fetcher::fetch`]; the caller has checked that `stream` is not being captured.
    fn enqueue(
        &self,
        tensor: &BorrowedTensor<'_>,
        keep: impl FnOnce() -> Option<Keep>,
        stream: Stream,
    ) -> Result<Option<PendingFetch>> {
        // A copy takes all bytes for numbers.
        check_ints(tensor.dtype())?;
        let (count, wide) = (tensor.shape().numel(), is_copied_wide(tensor));
        let bytes = bytes_of("index values", &[count], if wide { DType::I64 } else { DType::I32 })?;
        let reply = self.ring.receive(bytes, stream, |range| {
            if tensor.is_contiguous() {
                self.gpu.copy_out(tensor, range, stream)
            } else {
                let launched = read_kernel(&self.gpu, &self.kernels, tensor, range, stream);
                tensor.record_stream(stream);
                launched
            }
        })?;
        Ok(reply.map(|reply| PendingFetch { reply, count, is_wide: wide, keep: keep() }))
    }

    /// Returns the values of a fetch that is done.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the
    /// copy; the fetch can be taken later.
    pub(crate) fn take(&self, fetch: &PendingFetch) -> Result<IndexVec> {
        if fetch.is_wide {
            Ok(IndexVec::I64(self.ring.take(&fetch.reply, fetch.count)?))
        } else {
            Ok(IndexVec::I32(self.ring.take(&fetch.reply, fetch.count)?))
        }
    }

    /// Drops a fetch without reading its values.
    pub(crate) fn abandon(&self, fetch: &PendingFetch) {
        self.ring.release(&fetch.reply);
    }
}

/// Enqueues a kernel that writes the values of `tensor`, with any strides, as int64 to page-locked memory.
fn read_kernel(
    gpu: &Gpu,
    kernels: &Kernels,
    tensor: &BorrowedTensor<'_>,
    out: RegionRange<'_>,
    stream: Stream,
) -> Result<()> {
    let count = tensor.shape().numel();
    let grid = [blocks(count)?, 1];
    if count == 0 {
        return Ok(());
    }
    if out.bytes() < count * size_of::<i64>() {
        return Err(Error::index(format!("{count} values do not fit {} bytes", out.bytes())));
    }
    let out = out.address().as_ptr().cast();
    let params = ReadParams { from: Index::new(&Numbers::Tensor(tensor))?, out, count: signed(count) };
    // SAFETY: `out` has room for `count` numbers in page-locked memory, which the device reaches;
    // `BorrowedTensor` guarantees the elements of the tensor, which is on this device.
    unsafe { gpu.launch(kernels.read_indices.function(), grid, &params, stream) }
}

/// Returns whether the values of a tensor are copied as int64: kernels write no others.
fn is_copied_wide(tensor: &BorrowedTensor<'_>) -> bool {
    tensor.dtype() == DType::I64 || !tensor.is_contiguous()
}

/// Reads an index tensor on a device. Waits for the earlier work of `stream`.
///
/// # Errors
/// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when it is neither int32 nor int64,
/// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) while `stream` is being captured, or when a driver
/// call fails.
pub(crate) fn read_now(gpu: &Arc<Gpu>, tensor: &BorrowedTensor<'_>, stream: Stream) -> Result<IndexVec> {
    gpu.check_not_capturing(stream, "an answer that waits for values that only the device has")?;
    if is_copied_wide(tensor) {
        Ok(IndexVec::I64(read_in_parts(gpu, tensor, stream)?))
    } else {
        Ok(IndexVec::I32(read_in_parts(gpu, tensor, stream)?))
    }
}

/// Reads a tensor whose values are copied as `T`: part by part if it is contiguous and longer than the fetcher
/// that is shared.
fn read_in_parts<T: Number>(gpu: &Arc<Gpu>, tensor: &BorrowedTensor<'_>, stream: Stream) -> Result<Vec<T>> {
    let count = tensor.shape().numel();
    if count <= ROOM || !tensor.is_contiguous() {
        return read_at_once(gpu, tensor, stream);
    }
    let mut values = try_with_capacity(count)?;
    for first in (0..count).step_by(ROOM) {
        let part = tensor.elements(first..count.min(first + ROOM))?;
        values.append(&mut read_at_once(gpu, &part, stream)?);
    }
    Ok(values)
}

/// Works like [`read_in_parts`], in one copy.
fn read_at_once<T: Number>(gpu: &Arc<Gpu>, tensor: &BorrowedTensor<'_>, stream: Stream) -> Result<Vec<T>> {
    let count = tensor.shape().numel();
    let mut reader = Fetcher::shared(gpu, count)?;
    let mut fetch = reader.enqueue(tensor, || None, stream)?;
    if fetch.is_none() {
        // Other threads use all of its room.
        reader = Arc::new(Fetcher::new(gpu, count)?);
        fetch = reader.enqueue(tensor, || None, stream)?;
    }
    let fetch = fetch.expect("a new fetcher has room for what it was made for");
    // The copy is page-locked, so only its end is waited for, which is allowed beside captures of other streams.
    let read = fetch.done().wait().and_then(|()| reader.ring.take(&fetch.reply, fetch.count));
    read.inspect_err(|_| reader.abandon(&fetch))
}
