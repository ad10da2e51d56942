//! The contract of everything that gives memory.

use std::fmt::Debug;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::base::{Device, Error, Result};

use super::{Gpu, Region, Stream, Users};

/// Every block begins at a multiple of this many bytes.
pub const ALIGNMENT: usize = 256;

/// A piece of memory that a backend gave and has not taken back.
///
/// It is a receipt, not an owner: dropping it frees nothing. [`Region`](super::Region) is the owner.
#[derive(Debug)]
pub struct Block {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a block is an address and a length; who may touch the memory is the owner's business.
unsafe impl Send for Block {}
// SAFETY: as above; nothing is reachable through a shared block but the two numbers.
unsafe impl Sync for Block {}

impl Block {
    /// A block of `bytes` at `address`.
    #[must_use]
    pub const fn new(address: NonNull<u8>, bytes: usize) -> Self {
        Self { address, bytes }
    }

    /// Where it begins.
    #[must_use]
    pub const fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// How long it is.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// What a new block must hold. Host memory holds zeros in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Zeros, for every stream: a device is waited for.
    Zeros,
    /// Zeros in the order of this stream: another stream needs an event.
    ZerosOn(Stream),
    /// Anything, as it is always written before it is read.
    Undefined,
}

/// A source of memory on one device.
///
/// A block is valid from [`Backend::allocate`] to [`Backend::deallocate`], overlaps no other valid block, begins
/// at a multiple of [`ALIGNMENT`] and holds what was asked for. Zero bytes are a valid block. Both
/// calls may come from any thread; `deallocate` never fails, panics or raises.
pub trait Backend: Debug + Send + Sync {
    /// Where its memory is.
    fn device(&self) -> Device;

    /// The device, if its memory is there and not the host's.
    fn gpu(&self) -> Option<&Arc<Gpu>> {
        None
    }

    /// Whether devices reach its memory, so that work that was enqueued may use it.
    fn is_reached_by_devices(&self) -> bool {
        self.gpu().is_some()
    }

    /// Page-locks `bytes` of `region`, which came from this backend, until it goes. May be called for different bytes from
    /// several threads at once.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) where memory cannot be page-locked in place; what the driver
    /// says. The memory is there all the same.
    fn lock_pages(&self, gpu: &Arc<Gpu>, region: &Region, bytes: &Range<usize>) -> Result<()> {
        let _ = (gpu, region, bytes);
        Err(Error::config(format!(
            "memory of this backend on {} cannot be page-locked in place",
            self.device()
        )))
    }

    /// A block of `bytes`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory), with the bytes asked for, when there is
    /// not enough; nothing is taken then.
    fn allocate(&self, bytes: usize, contents: Contents) -> Result<Block>;

    /// Takes a block back, after the work that was enqueued on streams of `users`.
    ///
    /// # Safety
    /// `block` came from this backend's `allocate`, was not taken back before, and nobody touches its memory
    /// any more but that work.
    unsafe fn deallocate(&self, block: Block, users: &Users);
}
