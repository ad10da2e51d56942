//! The contract between memory and its users.
//!
//! Use a backend through [`Region`](super::Region), which frees its block on drop.

use std::fmt::Debug;
use std::sync::Arc;

use crate::base::{Device, Error, Result};

use super::{Block, Contents, Gpu, RegionRange, StreamSet};

/// A source of memory on one device.
///
/// A block may have zero bytes. Both calls may come from any thread; `deallocate` never fails or panics.
///
/// # Safety
/// A block is valid memory of [`Backend::device`] for reads and writes from [`Backend::allocate`] to
/// [`Backend::deallocate`], overlaps no other valid block, begins at a multiple of
/// [`ALIGNMENT`](super::ALIGNMENT) and has the requested contents.
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

    /// Page-locks bytes of a block of this backend until the block is freed. Several threads may call it at once
    /// for different bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) where memory cannot be page-locked in place;
    /// errors of the driver. The memory stays usable in either case.
    fn page_lock(&self, gpu: &Arc<Gpu>, bytes: RegionRange<'_>) -> Result<()> {
        let _ = (gpu, bytes);
        Err(Error::argument(format!(
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
