//! Blocks of memory, and their first contents.

use std::ptr::NonNull;

use super::Stream;

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
///
/// ```
/// use kvpool::memory::{Backend, Block, Contents, Host, StreamSet};
/// let block: Block = Host.allocate(4096, Contents::Zeros).unwrap();
/// assert_eq!((block.bytes(), block.address().as_ptr().addr() % 64), (4096, 0));
/// // SAFETY: `Host` has allocated the block, and nothing uses it.
/// unsafe { Host.deallocate(block, &StreamSet::default()) };
/// ```
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
    /// Returns whether allocating device memory may wait for enqueued work.
    pub(super) const fn may_wait(self) -> bool {
        !matches!(self, Self::ZerosOn(_))
    }
}
