//! Host memory of others, page-locked for a while.

use std::sync::Arc;

use crate::base::{Device, Error, Result};
use crate::memory::Borrowed;

use super::{Gpu, driver, gpu::is_forked};

/// Host memory that stays in place until this drops, so that every device reads and writes it directly.
///
/// Whoever has it sees to it that the memory outlives it.
#[derive(Debug)]
pub struct PageLock {
    gpu: Arc<Gpu>,
    address: usize,
}

impl PageLock {
    /// Page-locks the memory of a contiguous tensor through `gpu`. `None` if all or part of it was page-locked before,
    /// which is somebody else's to undo.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for memory of a device or a tensor with gaps,
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the driver refuses.
    pub fn new(gpu: &Arc<Gpu>, tensor: &Borrowed<'_>) -> Result<Option<Self>> {
        tensor.expect_on(Device::Cpu, "the tensor")?;
        if !tensor.is_contiguous() {
            return Err(Error::config("only a contiguous tensor can be page-locked"));
        }
        let bytes = tensor.shape().numel() * tensor.dtype().size();
        if bytes == 0 {
            return Ok(None);
        }
        let _entered = gpu.enter_beside_captures()?;
        let address = tensor.address().as_ptr();
        let is_new = driver::register_host(address, bytes)?;
        Ok(is_new.then(|| Self { gpu: Arc::clone(gpu), address: address.addr() }))
    }
}

impl Drop for PageLock {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        if let Ok(_entered) = self.gpu.enter_beside_captures() {
            // Work that was enqueued may still read or write it.
            let _ = driver::synchronize_context();
            let _ = driver::unregister_host(self.address);
        }
    }
}
