//! Host memory of others, page-locked for a while.

use std::sync::Arc;

use crate::base::{Device, Error, Result};
use crate::memory::{Borrowed, Keep, Users};

use super::Gpu;
use super::parked::{Given, HostPtr, retire};

/// Host memory that stays in place until this drops, so that every device reads and writes it directly.
#[derive(Debug)]
pub struct PageLock {
    gpu: Arc<Gpu>,
    address: HostPtr,
    users: Arc<Users>,
    /// What keeps the memory; `None` only while it drops.
    keep: Option<Keep>,
}

impl PageLock {
    /// Page-locks the memory of a contiguous tensor through `gpu`, in one piece: a copy must not reach beyond it. When it
    /// drops, it waits for the work of `users`. `None` if all or part of it was page-locked before, which is somebody else's
    /// to undo.
    ///
    /// `keep` keeps the memory, perhaps for longer than this lives.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for memory of a device or a tensor with gaps,
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the driver refuses.
    pub fn new(
        gpu: &Arc<Gpu>,
        tensor: &Borrowed<'_>,
        users: &Arc<Users>,
        keep: Keep,
    ) -> Result<Option<Self>> {
        tensor.expect_on(Device::Cpu, "the tensor")?;
        if !tensor.is_contiguous() {
            return Err(Error::config("only a contiguous tensor can be page-locked"));
        }
        let bytes = tensor.shape().numel() * tensor.dtype().size();
        if bytes == 0 {
            return Ok(None);
        }
        let address = tensor.address().as_ptr();
        let _entered = gpu.enter_beside_captures()?;
        // SAFETY: `Borrowed` promises the memory now, and `keep` until it is unregistered.
        let is_new = unsafe { gpu.driver().register_host(address, bytes) }?;
        let (gpu, users) = (Arc::clone(gpu), Arc::clone(users));
        Ok(is_new.then(|| Self { gpu, address: HostPtr(address), users, keep: Some(keep) }))
    }
}

impl Drop for PageLock {
    fn drop(&mut self) {
        if let Some(keep) = self.keep.take() {
            let given = Given::Lock { address: HostPtr(self.address.0), _keep: keep };
            // SAFETY: it was registered by `new`, and this is its end.
            unsafe { retire(&self.gpu, given, &self.users) };
        }
    }
}
