//! Backends for device memory and page-locked host memory.

use std::sync::Arc;

use crate::base::{Device, Result};

use super::{Backend, Block, Contents, Gpu, Stream, StreamSet};

/// Memory of a device.
///
/// Freeing a block waits for the streams that used it, but never for the whole device: see [`StreamSet`].
#[derive(Clone, Debug)]
pub struct Cuda {
    gpu: Arc<Gpu>,
    stream: Stream,
}

impl Cuda {
    /// Creates memory of `gpu`. [`Contents::Zeros`] are written on `stream`, which is waited for.
    #[must_use]
    pub fn new(gpu: &Arc<Gpu>, stream: Stream) -> Self {
        Self { gpu: Arc::clone(gpu), stream }
    }
}

// SAFETY: the driver allocates the block, aligned to 256 bytes or more, and frees it in `deallocate`.
unsafe impl Backend for Cuda {
    fn device(&self) -> Device {
        self.gpu.device()
    }

    fn gpu(&self) -> Option<&Arc<Gpu>> {
        Some(&self.gpu)
    }

    fn allocate(&self, bytes: usize, contents: Contents) -> Result<Block> {
        self.gpu.allocate(bytes, contents, self.stream)
    }

    unsafe fn deallocate(&self, block: Block, users: &StreamSet) {
        // SAFETY: the block came from `allocate`; the caller guarantees the rest.
        unsafe { self.gpu.deallocate(&block, users) };
    }
}

/// Page-locked host memory, which a device reads and writes directly.
#[derive(Clone, Debug)]
pub struct PageLockedHost {
    gpu: Arc<Gpu>,
}

impl PageLockedHost {
    /// Creates host memory that is page-locked for every device, through `gpu`.
    #[must_use]
    pub fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu) }
    }
}

// SAFETY: as for `Cuda`; the driver maps the block for the host and the devices.
unsafe impl Backend for PageLockedHost {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn is_device_accessible(&self) -> bool {
        true
    }

    fn allocate(&self, bytes: usize, contents: Contents) -> Result<Block> {
        self.gpu.allocate_host(bytes, contents)
    }

    unsafe fn deallocate(&self, block: Block, users: &StreamSet) {
        // SAFETY: the block came from `allocate`; the caller guarantees the rest.
        unsafe { self.gpu.deallocate_host(&block, users) };
    }
}
