//! Memory that the driver allocates: of a device, or of the host and page-locked.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::base::{Error, ErrorKind, Result, assert_may_wait};
use crate::memory::{ALIGNMENT, Block, Contents, Stream, StreamSet};

use super::driver::DevicePtr;
use super::gpu::Gpu;
use super::parked::{HostPtr, Resource, park, release_parked, retire, sweep};

/// Returns a block of zero bytes, which the driver does not allocate.
fn empty() -> Block {
    // Aligned, and never dereferenced.
    let address = NonNull::new(ptr::without_provenance_mut(ALIGNMENT));
    Block::new(address.expect("an alignment is not 0"), 0)
}

impl Gpu {
    /// Allocates memory of the device. [`Contents::Zeros`] are written on `stream`.
    ///
    /// # Errors
    /// See [`Backend::allocate`](crate::memory::Backend::allocate); [`ErrorKind::Driver`] while the stream of the
    /// zeros is being captured, and when a driver call fails.
    pub(in crate::memory) fn allocate(
        self: &Arc<Self>,
        bytes: usize,
        contents: Contents,
        stream: Stream,
    ) -> Result<Block> {
        let zeroed_on = match contents {
            Contents::Zeros => Some(stream),
            Contents::ZerosOn(stream) => Some(stream),
            Contents::Undefined => None,
        };
        let may_wait = contents.may_wait();
        if may_wait {
            assert_may_wait();
        }
        if let Some(stream) = zeroed_on {
            self.check_not_capturing(stream, "new memory, which is zeroed once,")?;
        }
        if bytes == 0 {
            return Ok(empty());
        }
        sweep();
        let _entered = self.enter_beside_captures()?;
        let driver = self.driver();
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
            unsafe { give_back(self, Resource::Device(found), &users) };
            return Err(failure);
        }
        let pointer = NonNull::new(found.pointer());
        let pointer = pointer.ok_or_else(|| Error::new(ErrorKind::Driver, "cuMemAlloc_v2 gave address 0"))?;
        Ok(Block::new(pointer, bytes))
    }

    /// Enqueues the zeros of a new block on `stream`, and waits for them if they must be visible to every
    /// stream.
    fn zero(&self, address: DevicePtr, bytes: usize, stream: Stream, contents: Contents) -> Result<()> {
        // SAFETY: the driver allocated this many bytes just now.
        unsafe { self.driver().fill(address, 0, bytes, stream) }?;
        if contents == Contents::Zeros { self.driver().synchronize(stream) } else { Ok(()) }
    }

    /// Frees a block of [`Gpu::allocate`] after the work of `users`.
    ///
    /// # Safety
    /// It came from there, is freed once, and only that work still accesses its memory.
    pub(in crate::memory) unsafe fn deallocate(self: &Arc<Self>, block: &Block, users: &StreamSet) {
        if block.bytes() > 0 {
            let resource = Resource::Device(DevicePtr::of(block.address().as_ptr()));
            // SAFETY: guaranteed by the caller.
            unsafe { retire(self, resource, users) };
        }
    }

    /// Allocates page-locked memory of the host, which every device reaches.
    ///
    /// # Errors
    /// See [`Backend::allocate`](crate::memory::Backend::allocate); [`ErrorKind::Driver`] when a driver call fails.
    pub(in crate::memory) fn allocate_host(&self, bytes: usize, contents: Contents) -> Result<Block> {
        if bytes == 0 {
            return Ok(empty());
        }
        sweep();
        let _entered = self.enter_beside_captures()?;
        let found = self.driver().allocate_host(bytes)?.and_then(NonNull::new).ok_or_else(|| {
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

    /// Frees a block of [`Gpu::allocate_host`] after the work of `users`.
    ///
    /// # Safety
    /// Same as [`Gpu::deallocate`].
    pub(in crate::memory) unsafe fn deallocate_host(self: &Arc<Self>, block: &Block, users: &StreamSet) {
        if block.bytes() > 0 {
            let resource = Resource::Host(HostPtr(block.address().as_ptr()));
            // SAFETY: guaranteed by the caller.
            unsafe { retire(self, resource, users) };
        }
    }
}
