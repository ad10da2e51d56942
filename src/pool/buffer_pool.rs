//! Scratch buffers that are used again from step to step.

use std::sync::Arc;

use crate::base::{Device, Error, ErrorKind, Result, widen};
use crate::index::{Bucket, Buckets, Ledgered, Rounding, Ticket};
use crate::memory::{Backend, Borrowed, Contents, Gpu, Keep, PageLock, Region, Stream, Users};

/// A buffer that was handed out.
#[derive(Clone, Debug)]
pub struct Buffer {
    ticket: Ticket,
    region: Arc<Region>,
    bytes: usize,
}

impl Buffer {
    /// What its owner shows to give it back.
    #[must_use]
    pub const fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Its memory, which is as long as its bucket.
    #[must_use]
    pub const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Bytes that were asked for.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The shape of a [`BufferPool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferConfig {
    /// How sizes are rounded up.
    pub rounding: Rounding,
}

/// Scratch buffers by size, each made once, zeroed then, and handed out again and again.
///
/// A buffer that is given back while its stream still uses it is handed out for the same stream at once; another stream
/// waits, on the device, for what the first has enqueued until then. Giving back bumps the buffer's generation, so that a
/// buffer is never taken for the one that has its memory now.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::index::Rounding;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{BufferConfig, BufferPool};
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let mut pool = BufferPool::new(&BufferConfig { rounding: Rounding::Pow2 }, &host);
/// let first = pool.alloc(100, Stream::DEFAULT).unwrap();
/// assert_eq!(first.region().bytes(), 128);
/// pool.reset();
/// assert!(pool.release(first.ticket()).is_err());
/// let again = pool.alloc(120, Stream::DEFAULT).unwrap();
/// assert_eq!(first.region().address(), again.region().address());
/// ```
#[derive(Debug)]
pub struct BufferPool {
    config: BufferConfig,
    backend: Arc<dyn Backend>,
    buckets: Ledgered<Buckets<Stream>>,
    /// By index, the memory of each buffer. `None` where `buckets` has a vacancy.
    regions: Vec<Option<Arc<Region>>>,
    /// Memory of others, by address and bytes, and what page-locks it.
    existing: Vec<((usize, usize), Option<PageLock>)>,
    /// The streams for which buffers were taken: what is done there may use memory of others, too.
    users: Arc<Users>,
    stale_uses: usize,
}

impl BufferPool {
    /// A pool without buffers, which will come from `backend`.
    #[must_use]
    pub fn new(config: &BufferConfig, backend: &Arc<dyn Backend>) -> Self {
        Self {
            config: *config,
            backend: Arc::clone(backend),
            buckets: Ledgered::default(),
            regions: Vec::new(),
            existing: Vec::new(),
            users: Arc::default(),
            stale_uses: 0,
        }
    }

    /// Where its buffers are.
    #[must_use]
    pub fn device(&self) -> Device {
        self.backend.device()
    }

    /// Its shape.
    #[must_use]
    pub const fn config(&self) -> BufferConfig {
        self.config
    }

    /// Who owns which buffer.
    #[must_use]
    pub const fn buckets(&self) -> &Ledgered<Buckets<Stream>> {
        &self.buckets
    }

    /// Notes from now on who takes and gives what.
    pub fn keep_ledger(&mut self) {
        self.buckets.book_mut().open();
    }

    /// How often a buffer was used after it had been given back.
    #[must_use]
    pub const fn stale_uses(&self) -> usize {
        self.stale_uses
    }

    /// Bytes of others that are registered.
    #[must_use]
    pub fn registered_bytes(&self) -> usize {
        self.existing.iter().map(|((_, bytes), _)| bytes).sum()
    }

    /// A buffer of at least `bytes`: the last that was given back to its bucket, else a new one of zeros.
    ///
    /// It is valid in the order of `stream`. A new one on a GPU costs calls that may wait for the device; when there is no
    /// memory for it, the free buffers are given back and it is tried again.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when its bucket is more than an address can name; [`ErrorKind::OutOfMemory`] when the memory
    /// cannot be had; [`ErrorKind::Driver`] when the driver refuses, and for a new one while `stream` is captured. Nothing
    /// is handed out then.
    pub fn alloc(&mut self, bytes: usize, stream: Stream) -> Result<Buffer> {
        let bucket = self.config.rounding.bucket(bytes)?;
        let Some(reused) = self.buckets.take(bucket, stream) else { return self.make(bucket, bytes, stream) };
        let ticket = reused.ticket;
        let region = Arc::clone(self.region(ticket)?);
        if let (Some(before), Some(gpu)) = (reused.after, region.gpu()) {
            // All that uses it was enqueued before it was given back.
            if let Err(failure) = gpu.order(&[before], stream) {
                self.buckets.put_back_as(ticket, before);
                return Err(failure);
            }
        }
        region.used_on(stream);
        self.users.note(stream);
        Ok(Buffer { ticket, region, bytes })
    }

    fn make(&mut self, bucket: Bucket, bytes: usize, stream: Stream) -> Result<Buffer> {
        let backend = Arc::clone(&self.backend);
        let new =
            || Region::with(Arc::clone(&backend), bucket.bytes(), Contents::ZerosOn(stream), Arc::default());
        let region = match new() {
            Err(failure) if failure.kind() == ErrorKind::OutOfMemory && self.buckets.free_count() > 0 => {
                self.clear();
                new()
            }
            answer => answer,
        };
        let region = Arc::new(region?);
        region.used_on(stream);
        self.users.note(stream);
        let ticket = self.buckets.add(bucket, stream);
        let at = widen(ticket.index());
        if at == self.regions.len() {
            self.regions.push(None);
        }
        self.regions[at] = Some(Arc::clone(&region));
        Ok(Buffer { ticket, region, bytes })
    }

    /// As [`BufferPool::alloc`] for each of `sizes`, or none of them.
    ///
    /// # Errors
    /// As [`BufferPool::alloc`].
    pub fn alloc_batch(&mut self, sizes: &[usize], stream: Stream) -> Result<Vec<Buffer>> {
        sizes.iter().try_for_each(|&bytes| self.config.rounding.bucket(bytes).map(drop))?;
        let marks = self.buckets.marks();
        let mut buffers = Vec::with_capacity(sizes.len());
        for &bytes in sizes {
            match self.alloc(bytes, stream) {
                Ok(buffer) => buffers.push(buffer),
                Err(failure) => {
                    for buffer in buffers.iter().rev() {
                        self.buckets.release(buffer.ticket);
                    }
                    self.buckets.set_marks(marks);
                    return Err(failure);
                }
            }
        }
        Ok(buffers)
    }

    /// The memory of a buffer that was not given back.
    ///
    /// # Errors
    /// [`ErrorKind::StaleBuffer`] if it was.
    pub fn region(&mut self, buffer: Ticket) -> Result<&Arc<Region>> {
        let region = self.regions.get(widen(buffer.index())).and_then(Option::as_ref);
        let region = region.filter(|_| self.buckets.is_live(buffer));
        self.stale_uses += usize::from(region.is_none());
        region.ok_or_else(|| {
            let ledger = self.buckets.book().ledger();
            stale(buffer, ledger.and_then(|ledger| ledger.history(buffer.index())))
        })
    }

    /// Gives a buffer back.
    ///
    /// # Errors
    /// [`ErrorKind::StaleBuffer`] if it was before; nothing is changed then.
    pub fn release(&mut self, buffer: Ticket) -> Result<()> {
        self.region(buffer)?;
        self.buckets.release(buffer);
        Ok(())
    }

    /// Gives every buffer back that is out. The same sequence of sizes gets the same memory again.
    pub fn reset(&mut self) {
        self.buckets.reset();
    }

    /// Gives the memory of free buffers back. On a GPU that waits for the streams that used it.
    pub fn clear(&mut self) {
        for index in self.buckets.drain_free() {
            self.regions[widen(index)] = None;
        }
    }

    /// Notes memory of others, which the pool neither owns nor recycles. With something that keeps it for so long, host
    /// memory is page-locked until the pool goes, where there is a driver: in one piece, beyond which no copy may reach.
    /// Memory that is registered already is left as it is; whether it was new. A tensor that `is_part` of its allocation is not
    /// page-locked: the driver copies no memory of which a part is.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for memory of another device, for a tensor with gaps, and for a part that would be page-locked;
    /// [`ErrorKind::OutOfMemory`] when the driver cannot page-lock so much, [`ErrorKind::Driver`] when it refuses.
    pub fn register_existing(
        &mut self,
        tensor: &Borrowed<'_>,
        page_lock: Option<Keep>,
        is_part: bool,
    ) -> Result<bool> {
        if tensor.device() != Device::Cpu {
            tensor.expect_on(self.device(), "the tensor")?;
        }
        if !tensor.is_contiguous() {
            return Err(Error::config(
                "a tensor with gaps cannot be registered; register what it is a view of",
            ));
        }
        let bytes = tensor.shape().numel() * tensor.dtype().size();
        let key = (tensor.address().as_ptr().addr(), bytes);
        if self.existing.iter().any(|(known, _)| *known == key) {
            return Ok(false);
        }
        let gpu = match (tensor.device(), self.backend.gpu()) {
            (Device::Cpu, Some(gpu)) => Some(Arc::clone(gpu)),
            (Device::Cpu, None) if page_lock.is_some() => Gpu::any().ok(),
            _ => None,
        };
        let locked = match gpu.zip(page_lock) {
            // What is page-locked already, by PyTorch perhaps, is somebody else's business.
            Some((gpu, keep)) => PageLock::new(&gpu, tensor, &self.users, keep)?,
            None => None,
        };
        if is_part && locked.is_some() {
            return Err(Error::config(
                "the tensor is a part of its allocation, and copies of memory that is page-locked in part fail; register a \
                 tensor over all of it",
            ));
        }
        self.existing.push((key, locked));
        Ok(true)
    }
}

fn stale(buffer: Ticket, history: Option<String>) -> Error {
    let history = history.map_or(String::new(), |history| format!("; it was {history}"));
    let text = format!("buffer {} was given back, by release or reset{history}", buffer.index());
    Error::new(ErrorKind::StaleBuffer, text)
}
