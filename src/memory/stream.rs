//! Queues of work on a device.

/// A CUDA stream, by its driver handle; 0 is the default stream. Host memory ignores it.
///
/// Does not own the stream: the creator has to keep it alive for as long as pools work on it.
///
/// ```
/// use kvpool::memory::Stream;
/// // SAFETY: 0 is the default stream of every device.
/// assert_eq!(Stream::DEFAULT, unsafe { Stream::from_handle(0) });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stream(usize);

impl Stream {
    /// The legacy default stream.
    pub const DEFAULT: Self = Self(0);

    /// Returns the stream with this driver handle.
    ///
    /// # Safety
    /// In calls that enqueue work on a device, the handle is 0 or that of a stream of this device that exists
    /// until the memory it is used with was given back.
    #[must_use]
    pub const unsafe fn from_handle(handle: usize) -> Self {
        Self(handle)
    }

    /// Returns the driver handle.
    #[must_use]
    pub const fn handle(self) -> usize {
        self.0
    }
}
