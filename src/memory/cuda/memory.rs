//! Device memory and page-locked host memory.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::base::{Device, Error, ErrorKind, Result, assert_may_wait};
use crate::memory::{ALIGNMENT, Backend, Block, Contents, Stream, StreamSet};

use super::Gpu;
use super::driver::DevicePtr;
use super::parked::{HostPtr, Resource, park, release_parked, retire, sweep};

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

    /// Enqueues the zeros of a new block on `stream`, and waits for them if they must be visible to every
    /// stream.
    fn zero(&self, address: DevicePtr, bytes: usize, stream: Stream, contents: Contents) -> Result<()> {
        // SAFETY: the driver allocated this many bytes just now.
        unsafe { self.gpu.driver().fill(address, 0, bytes, stream) }?;
        if contents == Contents::Zeros { self.gpu.driver().synchronize(stream) } else { Ok(()) }
    }
}

/// Returns a block of zero bytes, which the driver does not allocate.
fn empty() -> Block {
    // Aligned, and never dereferenced.
    let address = NonNull::new(ptr::without_provenance_mut(ALIGNMENT));
    Block::new(address.expect("an alignment is not 0"), 0)
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
        let zeroed_on = match contents {
            Contents::Zeros => Some(self.stream),
            Contents::ZerosOn(stream) => Some(stream),
            Contents::Undefined => None,
        };
        let may_wait = contents.may_wait();
        if may_wait {
            assert_may_wait();
        }
        if let Some(stream) = zeroed_on {
            self.gpu.check_not_capturing(stream, "new memory, which is zeroed once,")?;
        }
        if bytes == 0 {
            return Ok(empty());
        }
        sweep();
        let _entered = self.gpu.enter_beside_captures()?;
        let driver = self.gpu.driver();
        let found = match driver.allocate(bytes)? {
            None if may_wait && release_parked() => driver.allocate(bytes)?,
            found => found,
        };
        let Some(found) = found else {
            let (free, total) = driver.memory_info()?;
            return Err(Error::new(
                ErrorKind::OutOfMemory,
                format!("{bytes} bytes asked for, {free} of {total} free on {}", self.device()),
            )
            .with_asked(bytes)
            .with_available(free));
        };
        if let Some(stream) = zeroed_on
            && let Err(failure) = self.zero(found, bytes, stream, contents)
        {
            let users = StreamSet::default();
            users.record(stream);
            let give_back = if may_wait { retire } else { park };
            // SAFETY: the driver allocated it just now, and only the fill with zeros can be in flight.
            unsafe { give_back(&self.gpu, Resource::Device(found), &users) };
            return Err(failure);
        }
        let pointer = NonNull::new(found.pointer());
        let pointer = pointer.ok_or_else(|| Error::new(ErrorKind::Driver, "cuMemAlloc_v2 gave address 0"))?;
        Ok(Block::new(pointer, bytes))
    }

    unsafe fn deallocate(&self, block: Block, users: &StreamSet) {
        if block.bytes() > 0 {
            let resource = Resource::Device(DevicePtr::of(block.address().as_ptr()));
            // SAFETY: the block came from `allocate`; the caller guarantees the rest.
            unsafe { retire(&self.gpu, resource, users) };
        }
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
        if bytes == 0 {
            return Ok(empty());
        }
        sweep();
        let _entered = self.gpu.enter_beside_captures()?;
        let found = self.gpu.driver().allocate_host(bytes)?.and_then(NonNull::new).ok_or_else(|| {
            Error::new(
                ErrorKind::OutOfMemory,
                format!("the host cannot give {bytes} bytes of page-locked memory"),
            )
            .with_asked(bytes)
        })?;
        if contents != Contents::Undefined {
            // SAFETY: the driver allocated this many bytes just now, and no other code has the address.
            unsafe { found.write_bytes(0, bytes) };
        }
        Ok(Block::new(found, bytes))
    }

    unsafe fn deallocate(&self, block: Block, users: &StreamSet) {
        if block.bytes() > 0 {
            let resource = Resource::Host(HostPtr(block.address().as_ptr()));
            // SAFETY: the block came from `allocate`; the caller guarantees the rest.
            unsafe { retire(&self.gpu, resource, users) };
        }
    }
}
