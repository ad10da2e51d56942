//! Scratch buffers that are reused from step to step.

use std::fmt;
use std::sync::Arc;

use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{BufferId, Device, Error, ErrorKind, Id, Result, try_with_capacity, widen};
use crate::index::{Bucket, Buckets, IndexHandle, Ledgered, Rounding};
use crate::memory::{
    Backend, BorrowedTensor, Contents, Gpu, Keep, PageLock, Region, Stream, StreamSet, release_parked,
};

use super::contract::{Occupancy, Pool, Stats};

/// A buffer that was handed out.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::index::Rounding;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{Buffer, BufferConfig, BufferPool};
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let pool = BufferPool::new(&BufferConfig { rounding: Rounding::Pow2 }, &host);
/// let buffer: Buffer = pool.alloc(100, Stream::DEFAULT).unwrap();
/// assert_eq!((buffer.bytes(), buffer.region().bytes()), (100, 128));
/// pool.release(buffer.handle()).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Buffer {
    handle: IndexHandle<BufferId>,
    region: Arc<Region>,
    bytes: usize,
}

impl Buffer {
    /// Returns the handle with which the owner gives the buffer back.
    #[must_use]
    pub const fn handle(&self) -> IndexHandle<BufferId> {
        self.handle
    }

    /// Returns the memory, as large as the bucket.
    #[must_use]
    pub const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the number of bytes requested.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The shape of a [`BufferPool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferConfig {
    /// The way in which sizes are rounded up.
    pub rounding: Rounding,
}

/// Scratch buffers in buckets by size, allocated and zeroed once, and then reused.
///
/// A buffer that is given back while its stream still uses it is reused at once on the same stream. Another
/// stream waits, on the device, for the work enqueued on the first until then. Giving a buffer back bumps its
/// generation, so that a stale handle is recognised.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::index::Rounding;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{BufferConfig, BufferPool};
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let pool = BufferPool::new(&BufferConfig { rounding: Rounding::Pow2 }, &host);
/// let first = pool.alloc(100, Stream::DEFAULT).unwrap();
/// assert_eq!(first.region().bytes(), 128);
/// pool.reset();
/// assert!(pool.release(first.handle()).is_err());
/// let again = pool.alloc(120, Stream::DEFAULT).unwrap();
/// assert_eq!(first.region().address(), again.region().address());
/// ```
pub struct BufferPool {
    config: BufferConfig,
    backend: Arc<dyn Backend>,
    state: RankedMutex<BufferState>,
    /// The streams for which buffers were taken. Work on these may also use registered memory.
    users: Arc<StreamSet>,
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool")
            .field("rounding", &self.config.rounding)
            .field("device", &self.backend.device())
            .finish_non_exhaustive()
    }
}

/// What a [`BufferPool`] locks.
#[derive(Debug, Default)]
struct BufferState {
    buckets: Ledgered<Buckets<Stream>>,
    /// The memory of each buffer, by index. `None` where `buckets` has a vacancy.
    regions: Vec<Option<Arc<Region>>>,
    /// Registered memory of others, by address and bytes, with its page lock.
    existing: Vec<((usize, usize), Option<PageLock>)>,
    stale_uses: usize,
}

impl BufferPool {
    /// Creates an empty pool that allocates buffers from `backend`.
    #[must_use]
    pub fn new(config: &BufferConfig, backend: &Arc<dyn Backend>) -> Self {
        Self {
            config: *config,
            backend: Arc::clone(backend),
            state: RankedMutex::new(LockRank::BufferPool, BufferState::default()),
            users: Arc::default(),
        }
    }

    /// Returns the device of the buffers.
    #[must_use]
    pub fn device(&self) -> Device {
        self.backend.device()
    }

    /// Returns the config of the pool.
    #[must_use]
    pub const fn config(&self) -> BufferConfig {
        self.config
    }

    /// Calls `read` with the ownership of buffers, under the lock of the pool.
    pub fn with_buckets<R>(&self, read: impl FnOnce(&Ledgered<Buckets<Stream>>) -> R) -> R {
        read(&self.state().buckets)
    }

    fn state(&self) -> RankedGuard<'_, BufferState> {
        self.state.lock()
    }

    /// Takes a buffer of at least `bytes`: the one given back to its bucket last, else a new one of zeros.
    ///
    /// It is valid in the order of `stream`. A new buffer on a GPU makes driver calls that may wait for the
    /// device. If there is not enough memory, the free buffers are deallocated and the allocation is tried
    /// again.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when its bucket is more than an address can name; [`ErrorKind::OutOfMemory`]
    /// when there is not enough memory; [`ErrorKind::Driver`] when a driver call fails, and for a new buffer
    /// while `stream` is captured. Nothing is handed out.
    pub fn alloc(&self, bytes: usize, stream: Stream) -> Result<Buffer> {
        self.with_room(|state| self.take(state, bytes, stream))
    }

    /// Calls `take`. If there is not enough memory, deallocates the free buffers and memory that was given back while
    /// it was in use, and calls it again.
    fn with_room<R>(&self, mut take: impl FnMut(&mut BufferState) -> Result<R>) -> Result<R> {
        let mut state = self.state();
        let has_free = state.buckets.free_count() > 0;
        match take(&mut state) {
            Err(failure) if failure.kind() == ErrorKind::OutOfMemory => {
                let free = if has_free { state.drain_free() } else { Vec::new() };
                // Both wait for the streams that used the memory, which nobody may do under the lock.
                drop(state);
                drop(free);
                if release_parked() || has_free { take(&mut self.state()) } else { Err(failure) }
            }
            answer => answer,
        }
    }

    fn take(&self, state: &mut BufferState, bytes: usize, stream: Stream) -> Result<Buffer> {
        let bucket = self.config.rounding.bucket(bytes)?;
        let Some(reused) = state.buckets.take(bucket, stream) else {
            return self.make(state, bucket, bytes, stream);
        };
        let handle = reused.handle;
        let region = Arc::clone(state.region(handle)?);
        if let (Some(before), Some(gpu)) = (reused.after, region.gpu()) {
            // All work that uses the buffer was enqueued before it was given back.
            if let Err(failure) = gpu.make_stream_wait(&[before], stream) {
                state.buckets.give_back_as(handle, before);
                return Err(failure);
            }
        }
        region.record_stream(stream);
        self.users.record(stream);
        Ok(Buffer { handle, region, bytes })
    }

    fn make(&self, state: &mut BufferState, bucket: Bucket, bytes: usize, stream: Stream) -> Result<Buffer> {
        let backend = Arc::clone(&self.backend);
        let region = Region::with(backend, bucket.bytes(), Contents::ZerosOn(stream), Arc::default())?;
        let region = Arc::new(region);
        region.record_stream(stream);
        self.users.record(stream);
        let handle = state.buckets.add(bucket, stream);
        let at = widen(handle.index().number());
        if at == state.regions.len() {
            state.regions.push(None);
        }
        state.regions[at] = Some(Arc::clone(&region));
        Ok(Buffer { handle, region, bytes })
    }

    /// Takes a buffer for each of `sizes`, or none of them.
    ///
    /// # Errors
    /// See [`BufferPool::alloc`].
    pub fn alloc_batch(&self, sizes: &[usize], stream: Stream) -> Result<Vec<Buffer>> {
        sizes.iter().try_for_each(|&bytes| self.config.rounding.bucket(bytes).map(drop))?;
        self.with_room(|state| {
            let mut buffers: Vec<Buffer> = try_with_capacity(sizes.len())?;
            let marks = state.buckets.marks();
            for &bytes in sizes {
                match self.take(state, bytes, stream) {
                    Ok(buffer) => buffers.push(buffer),
                    Err(failure) => {
                        for buffer in buffers.iter().rev() {
                            state.buckets.give_back(buffer.handle);
                        }
                        state.buckets.set_marks(marks);
                        return Err(failure);
                    }
                }
            }
            Ok(buffers)
        })
    }

    /// Returns the memory of a buffer in use.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] if the buffer was given back.
    pub fn region(&self, buffer: IndexHandle<BufferId>) -> Result<Arc<Region>> {
        self.state().region(buffer).map(Arc::clone)
    }

    /// Gives a buffer back.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] if the buffer was already given back; nothing is changed.
    pub fn release(&self, buffer: IndexHandle<BufferId>) -> Result<()> {
        let mut state = self.state();
        state.region(buffer)?;
        state.buckets.give_back(buffer);
        Ok(())
    }

    /// Gives every buffer in use back. The same sequence of sizes then gets the same memory.
    pub fn reset(&self) {
        self.state().buckets.reset();
    }

    /// Deallocates the memory of free buffers. On a GPU this waits for the streams that used it.
    pub fn clear(&self) {
        let free = self.state().drain_free();
        drop(free);
    }

    /// Registers existing memory, which the pool neither owns nor recycles. Returns `false` if it was
    /// registered before.
    ///
    /// If `page_lock_keep` keeps the memory alive and there is a driver, host memory is page-locked until the
    /// pool is dropped: in one piece, beyond which no copy may reach. A tensor that `is_part` of its
    /// allocation is not page-locked: the driver cannot copy memory that is page-locked in part.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for memory of another device, for a tensor with gaps, for a part that would be
    /// page-locked, and for memory of which only a part is page-locked already; [`ErrorKind::OutOfMemory`] when
    /// the driver cannot page-lock that much memory, [`ErrorKind::Driver`] when page-locking fails otherwise.
    pub fn register_existing(
        &self,
        tensor: &BorrowedTensor<'_>,
        page_lock_keep: Option<Keep>,
        is_part: bool,
    ) -> Result<bool> {
        if tensor.device() != Device::Cpu {
            tensor.check_on(self.device(), "the tensor")?;
        }
        if !tensor.is_contiguous() {
            return Err(Error::argument(
                "a tensor with gaps cannot be registered; register the tensor that it is a view of",
            ));
        }
        let bytes = tensor.shape().numel() * tensor.dtype().size();
        let key = (tensor.address().as_ptr().addr(), bytes);
        let mut state = self.state();
        if state.existing.iter().any(|(known, _)| *known == key) {
            return Ok(false);
        }
        let gpu = match (tensor.device(), self.backend.gpu()) {
            (Device::Cpu, Some(gpu)) => Some(Arc::clone(gpu)),
            (Device::Cpu, None) if page_lock_keep.is_some() => Gpu::any().ok(),
            _ => None,
        };
        let page_lock = match gpu.zip(page_lock_keep) {
            // Memory that is already page-locked, for example by PyTorch, is left alone.
            Some((gpu, keep)) => PageLock::new(&gpu, tensor, &self.users, keep)?,
            None => None,
        };
        if is_part && page_lock.is_some() {
            // The drop of the page lock waits for the pool's streams.
            drop(state);
            return Err(Error::argument(
                "the tensor is a part of its allocation, and copies of memory that is page-locked in part fail; register a \
                 tensor over all of it",
            ));
        }
        state.existing.push((key, page_lock));
        Ok(true)
    }
}

impl BufferState {
    /// Works like [`BufferPool::region`].
    fn region(&mut self, buffer: IndexHandle<BufferId>) -> Result<&Arc<Region>> {
        let region = self.regions.get(widen(buffer.index().number())).and_then(Option::as_ref);
        let region = region.filter(|_| self.buckets.is_live(buffer));
        self.stale_uses += usize::from(region.is_none());
        region.ok_or_else(|| {
            let ledger = self.buckets.ledger();
            stale_buffer_error(buffer, ledger.and_then(|ledger| ledger.history(buffer.index().number())))
        })
    }

    /// Forgets the free buffers, and returns their memory.
    fn drain_free(&mut self) -> Vec<Arc<Region>> {
        let free = self.buckets.drain_free();
        free.into_iter().filter_map(|buffer| self.regions[widen(buffer.number())].take()).collect()
    }

    /// Returns the number of bytes of registered memory.
    fn registered_bytes(&self) -> usize {
        self.existing.iter().map(|((_, bytes), _)| bytes).sum()
    }
}

impl Pool for BufferPool {
    fn unit(&self) -> &'static str {
        "buffer"
    }

    fn device(&self) -> Device {
        self.device()
    }

    /// Releasing a buffer that is not in use is always an error.
    fn strict(&self) -> bool {
        true
    }

    fn stats(&self) -> Stats {
        let state = self.state();
        let buckets = &state.buckets;
        Stats::from([
            ("capacity", buckets.free_count() + buckets.in_use_count()),
            ("available", buckets.free_count()),
            ("in_use", buckets.in_use_count()),
            ("high_water", buckets.high_water()),
            ("stale_uses", state.stale_uses),
            ("bytes", buckets.free_bytes() + buckets.in_use_bytes()),
            ("free_bytes", buckets.free_bytes()),
            ("in_use_bytes", buckets.in_use_bytes()),
            ("high_water_bytes", buckets.high_water_bytes()),
            ("registered_bytes", state.registered_bytes()),
        ])
    }

    fn occupancy(&self) -> Occupancy {
        self.with_buckets(|buckets| {
            let spans = buckets.spans().into_iter().map(|(span, bytes)| (span, Some(bytes)));
            Occupancy::new(spans, buckets.ledger(), 1)
        })
    }

    fn keep_ledger(&self) {
        self.state().buckets.open_ledger();
    }
}

fn stale_buffer_error(buffer: IndexHandle<BufferId>, history: Option<String>) -> Error {
    let history = history.map_or(String::new(), |history| format!("; it was {history}"));
    let text = format!("buffer {} was given back, by release or reset{history}", buffer.index());
    Error::stale(text)
}
