//! Index values on their way from a device to the host.

use std::sync::{Arc, Mutex};

use crate::base::bounded::signed;
use crate::base::sync::lock;
use crate::base::{DType, Dims, Error, IndexVec, Result, bytes_of};
use crate::kernels::indices::{Numbers, read_indices};
use crate::memory::{Borrowed, Event, Gpu, Host, Keep, Region, RegionRange, Reply, Ring, Stream};

use super::Kernels;
use super::grid::blocks;
use super::numbers::Index;
use super::params::ReadParams;

/// Copies index tensors to the host without waiting for them.
#[derive(Debug)]
pub struct Fetcher {
    gpu: Arc<Gpu>,
    kernels: Arc<Kernels>,
    ring: Ring,
}

/// Index values that are on their way.
#[derive(Debug)]
pub struct Fetch {
    held: Reply,
    count: usize,
    /// Whether they arrive as int64.
    wide: bool,
    /// Keeps the tensor until they are there.
    keep: Option<Keep>,
}

impl Fetch {
    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// What has kept the tensor. Dropping it may run code of others, so no lock is held then.
    #[must_use]
    pub fn into_keep(self) -> Option<Keep> {
        self.keep
    }

    /// The point after the copy.
    #[must_use]
    pub fn done(&self) -> &Arc<Event> {
        self.held.done()
    }
}

impl Fetcher {
    /// For up to `values` values at a time.
    ///
    /// # Errors
    /// What the driver says when it has no memory, or cannot load the kernels.
    pub fn new(gpu: &Arc<Gpu>, values: usize) -> Result<Self> {
        let bytes = bytes_of("index values", &[values], DType::I64)?;
        Ok(Self { gpu: Arc::clone(gpu), kernels: Kernels::of(gpu)?, ring: Ring::on_host(gpu, bytes)? })
    }

    /// One that the whole process has for `gpu`, so that a wait for a few values allocates nothing.
    fn shared(gpu: &Arc<Gpu>, values: usize) -> Result<Arc<Self>> {
        static SHARED: Mutex<Vec<Arc<Fetcher>>> = Mutex::new(Vec::new());
        /// Values for which it has room.
        const ROOM: usize = 128 << 10;
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

    /// The device whose tensors it copies.
    #[must_use]
    pub const fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Enqueues a copy of `tensor`, int32 or int64, as it is when `stream` comes to it. `None` when so many values
    /// are on their way that there is no room for it. `keep` keeps the tensor's memory, also beyond the end of its stream.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the driver refuses, or `stream` is captured.
    pub fn fetch(&self, tensor: &Borrowed<'_>, keep: Option<Keep>, stream: Stream) -> Result<Option<Fetch>> {
        self.gpu.not_capturing(
            stream,
            "freeing slots that only the device knows, whose values are copied to the host,",
        )?;
        let count = tensor.shape().numel();
        let wide = tensor.dtype() == DType::I64 || !tensor.is_contiguous();
        let bytes = bytes_of("index values", &[count], if wide { DType::I64 } else { DType::I32 })?;
        let held = self.ring.receive(bytes, stream, |range| {
            if tensor.is_contiguous() {
                self.gpu.copy_out(tensor, range, stream)
            } else {
                read_kernel(&self.gpu, &self.kernels, tensor, range, stream)
            }
        })?;
        Ok(held.map(|held| Fetch { held, count, wide, keep }))
    }

    /// The values of a fetch that has landed.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has no room for them.
    pub fn take(&self, fetch: &Fetch) -> Result<IndexVec> {
        if fetch.wide {
            Ok(IndexVec::I64(self.ring.take(&fetch.held, fetch.count)?))
        } else {
            Ok(IndexVec::I32(self.ring.take(&fetch.held, fetch.count)?))
        }
    }

    /// Gives up a fetch whose values are not wanted any more.
    pub fn abandon(&self, fetch: &Fetch) {
        self.ring.release(&fetch.held);
    }
}

/// Enqueues a kernel that writes the values of `tensor`, whatever its strides, as int64 to page-locked memory.
fn read_kernel(
    gpu: &Gpu,
    kernels: &Kernels,
    tensor: &Borrowed<'_>,
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
    // SAFETY: `out` has room for `count` numbers in page-locked memory, which the device reaches; `Borrowed` promises
    // the elements of the tensor, which is on this device.
    unsafe { gpu.launch(kernels.read_indices, grid, &params, stream) }
}

/// The values of an index tensor on a device. Waits for what `stream` does before.
///
/// # Errors
/// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when it is neither int32 nor int64,
/// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) while `stream` is captured, or when the driver refuses.
pub fn read_now(gpu: &Arc<Gpu>, tensor: &Borrowed<'_>, stream: Stream) -> Result<IndexVec> {
    gpu.not_capturing(stream, "an answer that waits for values that only the device knows")?;
    if !tensor.is_contiguous() {
        return read_strided(gpu, tensor, stream);
    }
    let bytes = tensor.shape().bytes(tensor.dtype())?;
    let host = Region::new(Arc::new(Host), bytes)?;
    gpu.copy_out(tensor, host.range(0, bytes)?, stream)?;
    gpu.synchronize(stream)?;
    read_indices(&host.borrow(0, tensor.dtype(), Dims::of(&[tensor.shape().numel()])?, Dims::new(&[1])?)?)
}

/// As [`read_now`], by a kernel that knows strides.
fn read_strided(gpu: &Arc<Gpu>, tensor: &Borrowed<'_>, stream: Stream) -> Result<IndexVec> {
    let count = tensor.shape().numel();
    let mut reader = Fetcher::shared(gpu, count)?;
    let mut fetch = reader.fetch(tensor, None, stream)?;
    if fetch.is_none() {
        // Other threads have all of its room.
        reader = Arc::new(Fetcher::new(gpu, count)?);
        fetch = reader.fetch(tensor, None, stream)?;
    }
    let fetch = fetch.expect("a new fetcher has room for what it was made for");
    if let Err(failure) = fetch.done().wait() {
        reader.abandon(&fetch);
        return Err(failure);
    }
    reader.take(&fetch)
}
