//! Backends that wrap other backends, to limit them, to make a chosen allocation fail, or to count.
//!
//! Use them in tests and to limit the memory of a pool. Each forwards all other calls to the wrapped backend.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::base::sync::AtomicUsize;
use crate::base::{Device, Error, ErrorKind, Result};

use super::{Backend, Block, Contents, Gpu, RegionRange, StreamSet};

/// The calls that a wrapper only forwards.
macro_rules! forward {
    () => {
        fn device(&self) -> Device {
            self.inner.device()
        }

        fn gpu(&self) -> Option<&Arc<Gpu>> {
            self.inner.gpu()
        }

        fn is_device_accessible(&self) -> bool {
            self.inner.is_device_accessible()
        }

        fn page_lock(&self, gpu: &Arc<Gpu>, bytes: RegionRange<'_>) -> Result<()> {
            self.inner.page_lock(gpu, bytes)
        }
    };
}

/// Limits the bytes that are allocated at a time.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::memory::{Host, LimitedBackend, Region};
/// let backend = Arc::new(LimitedBackend::new(Arc::new(Host), 100));
/// let region = Region::new(backend.clone(), 80).unwrap();
/// assert!(Region::new(backend.clone(), 30).is_err());
/// drop(region);
/// assert!(Region::new(backend, 30).is_ok());
/// ```
#[derive(Debug)]
pub struct LimitedBackend {
    inner: Arc<dyn Backend>,
    capacity: usize,
    used: AtomicUsize,
}

impl LimitedBackend {
    /// Wraps `inner` and allows at most `limit` bytes at a time.
    #[must_use]
    pub fn new(inner: Arc<dyn Backend>, limit: usize) -> Self {
        Self { inner, capacity: limit, used: AtomicUsize::new(0) }
    }
}

// SAFETY: its blocks are those of the backend within it.
unsafe impl Backend for LimitedBackend {
    forward!();

    fn allocate(&self, bytes: usize, contents: Contents) -> Result<Block> {
        let reserve = |used: usize| used.checked_add(bytes).filter(|&sum| sum <= self.capacity);
        if let Err(used) = self.used.fetch_update(Relaxed, Relaxed, reserve) {
            return Err(Error::new(
                ErrorKind::OutOfMemory,
                format!(
                    "{bytes} bytes asked for, {} of {} available on {}",
                    self.capacity - used,
                    self.capacity,
                    self.device()
                ),
            )
            .with_asked(bytes)
            .with_available(self.capacity - used));
        }
        self.inner.allocate(bytes, contents).inspect_err(|_| {
            self.used.fetch_sub(bytes, Relaxed);
        })
    }

    unsafe fn deallocate(&self, block: Block, users: &StreamSet) {
        let bytes = block.bytes();
        // SAFETY: the block came from `inner` through `allocate`; the rest is the caller's promise.
        unsafe { self.inner.deallocate(block, users) };
        self.used.fetch_sub(bytes, Relaxed);
    }
}

/// Fails one chosen allocation.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::memory::{FailingBackend, Host, Region};
/// let backend = Arc::new(FailingBackend::new(Arc::new(Host), 1));
/// assert!(Region::new(backend.clone(), 8).is_ok());
/// assert!(Region::new(backend.clone(), 8).is_err());
/// assert!(Region::new(backend, 8).is_ok());
/// ```
#[derive(Debug)]
pub struct FailingBackend {
    inner: Arc<dyn Backend>,
    until_failure: AtomicUsize,
}

impl FailingBackend {
    /// Wraps `inner`; allocation number `nth` (from 0) fails.
    #[must_use]
    pub fn new(inner: Arc<dyn Backend>, nth: usize) -> Self {
        Self { inner, until_failure: AtomicUsize::new(nth) }
    }
}

// SAFETY: its blocks are those of the backend within it.
unsafe impl Backend for FailingBackend {
    forward!();

    fn allocate(&self, bytes: usize, contents: Contents) -> Result<Block> {
        // After the failure the counter wraps to the largest number, which is never counted down to 0.
        if self.until_failure.fetch_sub(1, Relaxed) == 0 {
            return Err(Error::new(
                ErrorKind::OutOfMemory,
                format!("{bytes} bytes asked for, and this allocation was planned to fail"),
            )
            .with_asked(bytes));
        }
        self.inner.allocate(bytes, contents)
    }

    unsafe fn deallocate(&self, block: Block, users: &StreamSet) {
        // SAFETY: the block came from `inner` through `allocate`; the rest is the caller's promise.
        unsafe { self.inner.deallocate(block, users) };
    }
}

/// Counts blocks and bytes in use.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::memory::{CountingBackend, Host, Region};
/// let backend = Arc::new(CountingBackend::new(Arc::new(Host)));
/// let region = Region::new(backend.clone(), 8).unwrap();
/// assert_eq!((backend.live_blocks(), backend.live_bytes()), (1, 8));
/// drop(region);
/// assert_eq!((backend.live_blocks(), backend.allocations()), (0, 1));
/// ```
#[derive(Debug)]
pub struct CountingBackend {
    inner: Arc<dyn Backend>,
    allocations: AtomicUsize,
    live_blocks: AtomicUsize,
    live_bytes: AtomicUsize,
}

impl CountingBackend {
    /// Wraps `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self {
            inner,
            allocations: AtomicUsize::new(0),
            live_blocks: AtomicUsize::new(0),
            live_bytes: AtomicUsize::new(0),
        }
    }

    /// Returns the number of successful allocations so far.
    #[must_use]
    pub fn allocations(&self) -> usize {
        self.allocations.load(Relaxed)
    }

    /// Returns the number of blocks in use.
    #[must_use]
    pub fn live_blocks(&self) -> usize {
        self.live_blocks.load(Relaxed)
    }

    /// Returns the number of bytes in use.
    #[must_use]
    pub fn live_bytes(&self) -> usize {
        self.live_bytes.load(Relaxed)
    }
}

// SAFETY: its blocks are those of the backend within it.
unsafe impl Backend for CountingBackend {
    forward!();

    fn allocate(&self, bytes: usize, contents: Contents) -> Result<Block> {
        let block = self.inner.allocate(bytes, contents)?;
        self.allocations.fetch_add(1, Relaxed);
        self.live_blocks.fetch_add(1, Relaxed);
        self.live_bytes.fetch_add(bytes, Relaxed);
        Ok(block)
    }

    unsafe fn deallocate(&self, block: Block, users: &StreamSet) {
        self.live_blocks.fetch_sub(1, Relaxed);
        self.live_bytes.fetch_sub(block.bytes(), Relaxed);
        // SAFETY: the block came from `inner` through `allocate`; the rest is the caller's promise.
        unsafe { self.inner.deallocate(block, users) };
    }
}
