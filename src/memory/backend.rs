//! The contract between memory and its users: backends and blocks.
//!
//! Use a backend through [`Region`](super::Region), which frees its block on drop.

use std::fmt::Debug;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::base::{Device, Error, Result};

use super::{Gpu, Region, Stream, StreamSet};

/// Every block begins at a multiple of this many bytes.
pub const ALIGNMENT: usize = 256;

/// Memory that a backend has allocated and not deallocated.
///
/// Dropping a block frees nothing. The owner of the memory is [`Region`](super::Region).
#[derive(Debug)]
pub struct Block {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a block is an address and a length; its owner decides which accesses are allowed.
unsafe impl Send for Block {}
// SAFETY: as above; nothing is reachable through a shared block but the two numbers.
unsafe impl Sync for Block {}

impl Block {
    /// Creates a block of `bytes` at `address`.
    #[must_use]
    pub const fn new(address: NonNull<u8>, bytes: usize) -> Self {
        Self { address, bytes }
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub const fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The initial contents of a new block. Pageable host memory is zeroed in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Zeros, for every stream: allocating device memory waits for the device.
    Zeros,
    /// Zeros in the order of this stream: another stream needs an event. Allocating waits for no work.
    ZerosOn(Stream),
    /// Undefined contents, for memory that is always written before it is read. When there is not enough device
    /// memory, allocating waits for memory that was given back and is still in use.
    Undefined,
}

impl Contents {
    /// Returns whether allocating device memory may wait for enqueued work, so that the caller must hold no lock of
    /// a pool.
    pub(super) const fn may_wait(self) -> bool {
        !matches!(self, Self::ZerosOn(_))
    }
}

/// A source of memory on one device.
///
/// A block may have zero bytes. Both calls may come from any thread; `deallocate` never fails or panics.
///
/// # Safety
/// A block is valid memory of [`Backend::device`] for reads and writes from [`Backend::allocate`] to
/// [`Backend::deallocate`], overlaps no other valid block, begins at a multiple of [`ALIGNMENT`] and has the
/// requested contents.
pub unsafe trait Backend: Debug + Send + Sync {
    /// Returns the device of the memory.
    fn device(&self) -> Device;

    /// Returns the GPU of the memory, or `None` for host memory.
    fn gpu(&self) -> Option<&Arc<Gpu>> {
        None
    }

    /// Returns whether devices can access the memory, so that enqueued work may use it.
    fn is_device_accessible(&self) -> bool {
        self.gpu().is_some()
    }

    /// Page-locks `bytes` of `region`, which this backend allocated, until the region is dropped. Several
    /// threads may call it at once for different bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) where memory cannot be page-locked in place;
    /// errors of the driver. The memory stays usable in either case.
    fn page_lock(&self, gpu: &Arc<Gpu>, region: &Region, bytes: &Range<usize>) -> Result<()> {
        let _ = (gpu, region, bytes);
        Err(Error::config(format!(
            "memory of this backend on {} cannot be page-locked in place",
            self.device()
        )))
    }

    /// Allocates a block of `bytes`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory), with the bytes asked for, when there
    /// is not enough; nothing is allocated then.
    fn allocate(&self, bytes: usize, contents: Contents) -> Result<Block>;

    /// Frees a block, after the work that was enqueued on the streams of `users`.
    ///
    /// # Safety
    /// `block` came from this backend's `allocate` and was not deallocated before, and only that work still
    /// accesses its memory.
    unsafe fn deallocate(&self, block: Block, users: &StreamSet);
}
