//! Device memory and page-locked host memory.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::base::{Device, Error, ErrorKind, Result};
use crate::memory::{ALIGNMENT, Backend, Block, Stream, Users};

use super::Gpu;
use super::driver::DevicePtr;
use super::parked::{Given, HostPtr, retire, sweep};

/// Memory of a device.
///
/// Giving a block back waits for the streams that used it, but never for the device: see [`Users`].
#[derive(Clone, Debug)]
pub struct Cuda {
    gpu: Arc<Gpu>,
    zeroing: Zeroing,
}

/// When blocks hold zeros.
#[derive(Clone, Copy, Debug)]
enum Zeroing {
    /// From the beginning, for every stream: the host waits for it.
    Done(Stream),
    /// In the order of a stream.
    Ordered(Stream),
    /// Never.
    Never,
}

impl Cuda {
    /// Memory of `gpu` that holds zeros for every stream as soon as it is given: `stream` zeroes it, and is waited for.
    #[must_use]
    pub fn new(gpu: &Arc<Gpu>, stream: Stream) -> Self {
        Self { gpu: Arc::clone(gpu), zeroing: Zeroing::Done(stream) }
    }

    /// Memory of `gpu`, zeroed in the order of `stream`: another stream needs an event.
    #[must_use]
    pub fn in_order(gpu: &Arc<Gpu>, stream: Stream) -> Self {
        Self { gpu: Arc::clone(gpu), zeroing: Zeroing::Ordered(stream) }
    }

    /// Memory of `gpu` for what is always written before it is read: it is not zeroed, so no stream comes first.
    #[must_use]
    pub fn unwritten(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu), zeroing: Zeroing::Never }
    }

    fn zero(&self, address: DevicePtr, bytes: usize) -> Result<()> {
        let (Zeroing::Done(stream) | Zeroing::Ordered(stream)) = self.zeroing else { return Ok(()) };
        // SAFETY: the driver gave so many bytes just now.
        unsafe { self.gpu.driver().fill(address, 0, bytes, stream) }?;
        if let Zeroing::Done(_) = self.zeroing { self.gpu.driver().synchronize(stream) } else { Ok(()) }
    }
}

/// A block of no bytes, which the driver does not give.
fn empty() -> Block {
    // Aligned, and never followed.
    let address = NonNull::new(ptr::without_provenance_mut(ALIGNMENT));
    Block::new(address.expect("an alignment is not 0"), 0)
}

impl Backend for Cuda {
    fn device(&self) -> Device {
        self.gpu.device()
    }

    fn gpu(&self) -> Option<&Arc<Gpu>> {
        Some(&self.gpu)
    }

    fn allocate(&self, bytes: usize) -> Result<Block> {
        if let Zeroing::Done(stream) | Zeroing::Ordered(stream) = self.zeroing {
            self.gpu.not_capturing(stream, "new memory, which is zeroed once,")?;
        }
        if bytes == 0 {
            return Ok(empty());
        }
        sweep();
        let _entered = self.gpu.enter_beside_captures()?;
        let driver = self.gpu.driver();
        let Some(found) = driver.allocate(bytes)? else {
            let (free, total) = driver.memory_info()?;
            return Err(Error::new(
                ErrorKind::OutOfMemory,
                format!("{bytes} bytes asked for, {free} of {total} free on {}", self.device()),
            ));
        };
        if let Err(failure) = self.zero(found, bytes) {
            let users = Users::default();
            if let Zeroing::Done(stream) | Zeroing::Ordered(stream) = self.zeroing {
                users.note(stream);
            }
            // SAFETY: the driver gave it just now, and nothing but its zeros can be under way.
            unsafe { retire(&self.gpu, Given::Device(found), &users) };
            return Err(failure);
        }
        let pointer = NonNull::new(found.pointer());
        let pointer = pointer.ok_or_else(|| Error::new(ErrorKind::Driver, "cuMemAlloc_v2 gave address 0"))?;
        Ok(Block::new(pointer, bytes))
    }

    unsafe fn deallocate(&self, block: Block, users: &Users) {
        if block.bytes() > 0 {
            let given = Given::Device(DevicePtr::of(block.address().as_ptr()));
            // SAFETY: the block is of `allocate`; the rest is the caller's promise.
            unsafe { retire(&self.gpu, given, users) };
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

    fn is_reached_by_devices(&self) -> bool {
        true
    }

    fn allocate(&self, bytes: usize) -> Result<Block> {
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
        })?;
        // SAFETY: the driver gave so many bytes just now, and nobody else knows them.
        unsafe { found.write_bytes(0, bytes) };
        Ok(Block::new(found, bytes))
    }

    unsafe fn deallocate(&self, block: Block, users: &Users) {
        if block.bytes() > 0 {
            let given = Given::Host(HostPtr(block.address().as_ptr()));
            // SAFETY: the block is of `allocate`; the rest is the caller's promise.
            unsafe { retire(&self.gpu, given, users) };
        }
    }
}
