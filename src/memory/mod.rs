//! Where bytes come from.
//!
//! A [`Backend`] gives memory on one device; a [`Region`] owns a piece of it and gives it back when it is
//! dropped. [`Borrowed`] describes memory of others for the length of a call. The wrappers [`Limit`], [`Fail`] and [`Count`] stand in front of any backend.

mod backend;
mod borrowed;
#[cfg(feature = "cuda")]
mod cuda;
mod host;
mod region;
mod wrappers;

pub use backend::{ALIGNMENT, Backend, Block};
pub use borrowed::Borrowed;
pub use host::Host;
pub use region::{Plain, Region};
pub use wrappers::{Count, Fail, Limit};

use std::sync::Arc;

use crate::base::{Device, Error, ErrorKind, Result};

/// The backend for `device`.
///
/// # Errors
/// [`ErrorKind::BackendUnavailable`] when `device` cannot be used here, with what was looked for.
pub fn backend_for(device: Device) -> Result<Arc<dyn Backend>> {
    match device {
        Device::Cpu => Ok(Arc::new(Host)),
        Device::Cuda(ordinal) => Err(Error::new(
            ErrorKind::BackendUnavailable,
            format!("device {device} cannot be used: {}", why_no_cuda(ordinal)),
        )),
    }
}

#[cfg(feature = "cuda")]
fn why_no_cuda(ordinal: u32) -> String {
    cuda::why_unavailable(ordinal)
}

#[cfg(not(feature = "cuda"))]
fn why_no_cuda(_ordinal: u32) -> String {
    "kvpool was built without the `cuda` feature".to_owned()
}
