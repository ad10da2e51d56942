//! Device memory and page-locked host memory.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::base::{Device, Error, ErrorKind, Result};
use crate::memory::{ALIGNMENT, Backend, Block, Stream};

use super::{
    Gpu, driver,
    gpu::{address, is_forked},
};

/// Memory of a device.
///
/// A block is zeroed in the order of the stream that the backend was made with: work on another stream needs an
/// event. Giving a block back waits for the device, as the driver does.
#[derive(Clone, Debug)]
pub struct Cuda {
    gpu: Arc<Gpu>,
    /// The stream on which blocks are zeroed, if they are.
    zeroed_on: Option<Stream>,
}

impl Cuda {
    /// Memory of `gpu`, zeroed on `stream`.
    #[must_use]
    pub fn new(gpu: &Arc<Gpu>, stream: Stream) -> Self {
        Self { gpu: Arc::clone(gpu), zeroed_on: Some(stream) }
    }

    /// Memory of `gpu` for what is always written before it is read: it is not zeroed, so no stream comes first.
    #[must_use]
    pub fn unwritten(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu), zeroed_on: None }
    }
}

/// A block of no bytes, which the driver does not give.
fn empty() -> Block {
    // Aligned, and never followed.
    Block::new(NonNull::new(ptr::without_provenance_mut(ALIGNMENT)).unwrap_or(NonNull::dangling()), 0)
}

impl Backend for Cuda {
    fn device(&self) -> Device {
        self.gpu.device()
    }

    fn gpu(&self) -> Option<&Arc<Gpu>> {
        Some(&self.gpu)
    }

    fn allocate(&self, bytes: usize) -> Result<Block> {
        if bytes == 0 {
            return Ok(empty());
        }
        let _entered = self.gpu.enter_beside_captures()?;
        let Some(found) = driver::allocate(bytes)? else {
            let (free, total) = driver::memory_info()?;
            return Err(Error::new(
                ErrorKind::OutOfMemory,
                format!("{bytes} bytes asked for, {free} of {total} free on {}", self.device()),
            ));
        };
        let zeroed = self.zeroed_on.map_or(Ok(()), |stream| driver::fill(found, 0, bytes, stream.handle()));
        if let Err(failure) = zeroed {
            // The first failure is what is told.
            let _ = driver::free(found);
            return Err(failure);
        }
        let pointer = NonNull::new(ptr::without_provenance_mut(usize::try_from(found).unwrap_or(0)));
        let pointer = pointer.ok_or_else(|| Error::new(ErrorKind::Driver, "cuMemAlloc_v2 gave address 0"))?;
        Ok(Block::new(pointer, bytes))
    }

    unsafe fn deallocate(&self, block: Block) {
        // The child of a fork has no device memory; at the end of a process the driver may be gone, and the memory
        // with it.
        if block.bytes() == 0 || is_forked() {
            return;
        }
        if let Ok(_entered) = self.gpu.enter_beside_captures() {
            let _ = driver::free(address(block.address().as_ptr()));
        }
    }
}

/// Page-locked host memory, which a device reads and writes directly.
#[derive(Clone, Debug)]
pub struct Pinned {
    gpu: Arc<Gpu>,
}

impl Pinned {
    /// Host memory that is page-locked for every device, through `gpu`.
    #[must_use]
    pub fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu) }
    }
}

impl Backend for Pinned {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn allocate(&self, bytes: usize) -> Result<Block> {
        if bytes == 0 {
            return Ok(empty());
        }
        let _entered = self.gpu.enter_beside_captures()?;
        let found = driver::allocate_host(bytes)?.and_then(NonNull::new).ok_or_else(|| {
            Error::new(
                ErrorKind::OutOfMemory,
                format!("the host cannot give {bytes} bytes of page-locked memory"),
            )
        })?;
        // SAFETY: the driver gave so many bytes just now, and nobody else knows them.
        unsafe { found.write_bytes(0, bytes) };
        Ok(Block::new(found, bytes))
    }

    unsafe fn deallocate(&self, block: Block) {
        if block.bytes() == 0 || is_forked() {
            return;
        }
        if let Ok(_entered) = self.gpu.enter_beside_captures() {
            // Work that was enqueued may still read or write it.
            let _ = driver::synchronize_context();
            let _ = driver::free_host(block.address().as_ptr());
        }
    }
}
