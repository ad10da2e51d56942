//! Bytes of owned memory, for the length of a call.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::base::{DType, Device, Dims, Error, Result, contiguous_strides};

use super::{BorrowedTensor, Stream, StreamSet};

/// Bytes of a region, within its bounds.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::memory::{Host, Region, RegionRange};
/// let region = Region::new(Arc::new(Host), 4096).unwrap();
/// let range: RegionRange<'_> = region.range(256, 64).unwrap();
/// assert_eq!(range.address().as_ptr().addr(), region.address().as_ptr().addr() + 256);
/// assert_eq!(range.tensor().unwrap().shape().as_slice(), [64]);
/// assert!(region.range(4090, 64).is_err());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct RegionRange<'a> {
    address: NonNull<u8>,
    bytes: usize,
    device: Device,
    /// The streams that use the memory, if a backend allocated it.
    users: Option<&'a Arc<StreamSet>>,
}

// SAFETY: it is a borrow of a region, whose memory is shared in any case, and numbers.
unsafe impl Send for RegionRange<'_> {}
// SAFETY: as above.
unsafe impl Sync for RegionRange<'_> {}

impl<'a> RegionRange<'a> {
    /// Returns `bytes` at `address` that streams of `users` use.
    ///
    /// # Safety
    /// For `'a`, they are memory of `device` that its owner does not free.
    pub(super) const unsafe fn new(
        address: NonNull<u8>,
        bytes: usize,
        device: Device,
        users: Option<&'a Arc<StreamSet>>,
    ) -> Self {
        Self { address, bytes, device, users }
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

    /// Returns the streams that use the memory, if a backend allocated it.
    pub(super) const fn users(&self) -> Option<&'a Arc<StreamSet>> {
        self.users
    }

    /// Returns the bytes as a tensor.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for more bytes than a tensor can have.
    pub fn tensor(&self) -> Result<BorrowedTensor<'a>> {
        let extent = i64::try_from(self.bytes)
            .map_err(|_| Error::index(format!("{} bytes are in no region", self.bytes)))?;
        let shape = Dims::new(&[extent])?;
        // SAFETY: guaranteed by `new`.
        Ok(unsafe {
            BorrowedTensor::new(self.address, DType::U8, self.device, shape, contiguous_strides(&shape))
        })
    }

    /// Records that work on `stream` uses the memory: see [`StreamSet::record`].
    pub fn record_stream(&self, stream: Stream) {
        if let Some(users) = self.users {
            users.record(stream);
        }
    }
}
