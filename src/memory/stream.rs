//! Queues of work on a device.

use crate::base::{Device, Error, Result};

/// `CU_STREAM_PER_THREAD`: the default stream of the thread that passes it.
const PER_THREAD: usize = 2;

/// A CUDA stream: its device, and its driver handle; 0 is the default stream of the device. Host memory ignores it.
///
/// Does not own the stream: the creator has to keep it alive for as long as pools work on it.
///
/// ```
/// use kvpool::base::Device;
/// use kvpool::memory::Stream;
/// // SAFETY: 0 is the default stream of every device.
/// assert_eq!(Stream::DEFAULT, unsafe { Stream::from_handle(0, 0) }.unwrap());
/// assert_ne!(Stream::DEFAULT, Stream::default_of(Device::Cuda(1)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stream {
    handle: usize,
    ordinal: u32,
}

impl Stream {
    /// The legacy default stream of the first device.
    pub const DEFAULT: Self = Self { handle: 0, ordinal: 0 };

    /// Returns the legacy default stream of `device`; for the host, which has none, [`Stream::DEFAULT`].
    #[must_use]
    pub const fn default_of(device: Device) -> Self {
        match device {
            Device::Cpu => Self::DEFAULT,
            Device::Cuda(ordinal) => Self { handle: 0, ordinal },
        }
    }

    /// Returns the stream of device `ordinal` with this driver handle.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for 2, which names another stream in each thread: memory
    /// may be given back by a thread that cannot wait for it.
    ///
    /// # Safety
    /// In calls that enqueue work on a device, the handle is 0 or that of a stream of this device that exists
    /// until the memory it is used with was given back.
    ///
    /// [`ErrorKind::Config`]: crate::base::ErrorKind::Config
    pub unsafe fn from_handle(handle: usize, ordinal: u32) -> Result<Self> {
        if handle == PER_THREAD {
            return Err(per_thread_error());
        }
        Ok(Self { handle, ordinal })
    }

    /// Returns the driver handle.
    #[must_use]
    pub const fn handle(self) -> usize {
        self.handle
    }

    /// Returns the number of its device.
    #[must_use]
    pub const fn ordinal(self) -> u32 {
        self.ordinal
    }
}

#[cold]
fn per_thread_error() -> Error {
    Error::argument(
        "stream 2 is the default stream of the calling thread, another one in each thread, so that no other thread \
         can wait for it; pass a stream that was created, or the legacy default stream: 0, for DLPack 1",
    )
}
