//! Page-locking of host memory of other owners.

use std::sync::Arc;

use crate::base::{Device, Error, Result};
use crate::memory::{BorrowedTensor, Keep, StreamSet, system_page_size};

use super::Gpu;
use super::driver::Driver;
use super::parked::{HostPtr, Resource, retire};

/// A guard that keeps host memory page-locked, so that every device can access it directly.
#[derive(Debug)]
pub(crate) struct PageLock {
    gpu: Arc<Gpu>,
    address: HostPtr,
    users: Arc<StreamSet>,
    /// Keeps the memory alive; `None` only while it drops.
    keep: Option<Keep>,
}

impl PageLock {
    /// Page-locks the memory of a contiguous tensor through `gpu`, in one piece; a copy must not reach beyond
    /// the piece. The driver locks whole pages. Dropping the guard waits for the work of `users`. `None` if the
    /// memory is page-locked already, because only the code that page-locked it may undo that.
    ///
    /// `keep` keeps the memory alive, possibly longer than the guard.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for device memory, for a tensor with gaps and for
    /// memory of which only a part is page-locked already, as the driver copies none that is locked in part;
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        tensor: &BorrowedTensor<'_>,
        users: &Arc<StreamSet>,
        keep: Keep,
    ) -> Result<Option<Self>> {
        tensor.check_on(Device::Cpu, "the tensor")?;
        if !tensor.is_contiguous() {
            return Err(Error::argument("only a contiguous tensor can be page-locked"));
        }
        let bytes = tensor.shape().numel() * tensor.dtype().size();
        if bytes == 0 {
            return Ok(None);
        }
        let address = tensor.address().as_ptr();
        let _entered = gpu.enter_beside_captures()?;
        // SAFETY: `BorrowedTensor` guarantees the memory now, and `keep` until it is unregistered.
        if !unsafe { gpu.driver().register_host(address, bytes) }? {
            return check_locked(gpu.driver(), address, bytes).map(|()| None);
        }
        let (gpu, users) = (Arc::clone(gpu), Arc::clone(users));
        Ok(Some(Self { gpu, address: HostPtr(address), users, keep: Some(keep) }))
    }
}

/// Checks that memory of which a part is page-locked is so at both ends: then one piece has all of it, unless
/// two pieces meet within it.
fn check_locked(driver: Driver, address: *const u8, bytes: usize) -> Result<()> {
    if driver.knows(address)? && driver.knows(address.wrapping_add(bytes - 1))? {
        return Ok(());
    }
    Err(Error::argument(format!(
        "of the {bytes} bytes at {address:p} a part is page-locked already: they share a page of {} bytes with other \
         memory that is, and copies of memory that is page-locked in part fail; register tensors whose memory has \
         pages of its own",
        system_page_size()
    )))
}

impl Drop for PageLock {
    fn drop(&mut self) {
        if let Some(keep) = self.keep.take() {
            let resource = Resource::Lock { address: HostPtr(self.address.0), _keep: keep };
            // SAFETY: `new` registered it, and it is unregistered only here.
            unsafe { retire(&self.gpu, resource, &self.users) };
        }
    }
}
