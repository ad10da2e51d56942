//! Where bytes come from.
//!
//! A [`Backend`] gives memory on one device; a [`Region`] owns a piece of it and gives it back when it is
//! dropped. [`Borrowed`] describes memory of others for the length of a call. The wrappers [`Limit`], [`Fail`] and
//! [`Count`] stand in front of any backend.
//!
//! A [`Gpu`] is a device in use: it runs work in the order of a [`Stream`], [`Event`]s are points in that work, and a
//! [`Ring`] is how small arrays cross. Without the feature `cuda` these types have no values, so that what is built
//! on them needs no feature of its own.

mod backend;
mod borrowed;
#[cfg(feature = "cuda")]
mod cuda;
mod host;
mod image;
mod mapped;
#[cfg(not(feature = "cuda"))]
mod no_cuda;
mod region;
mod stream;
mod wrappers;

pub use backend::{ALIGNMENT, Backend, Block};
pub use borrowed::Borrowed;
#[cfg(feature = "cuda")]
pub use cuda::{Cuda, Event, Function, Gpu, Held, PageLock, Pinned, Ring};
pub use host::Host;
pub use image::Image;
pub use mapped::{Mapped, PAGE};
#[cfg(not(feature = "cuda"))]
pub use no_cuda::{Cuda, Event, Function, Gpu, Held, PageLock, Pinned, Ring};
pub use region::{Number, Plain, Region, Returned};
pub use stream::Stream;
pub use wrappers::{Count, Fail, Limit};

use std::sync::Arc;

use crate::base::{Device, Result};

/// The backend for `device`. On a GPU its memory is zeroed in the order of `stream`.
///
/// # Errors
/// [`ErrorKind::BackendUnavailable`](crate::base::ErrorKind::BackendUnavailable) when `device` cannot be used here,
/// with what was looked for.
pub fn backend_for(device: Device, stream: Stream) -> Result<Arc<dyn Backend>> {
    match device {
        Device::Cpu => Ok(Arc::new(Host)),
        Device::Cuda(ordinal) => Ok(Arc::new(Cuda::new(&Gpu::open(ordinal)?, stream))),
    }
}

/// Host memory that devices reach directly: page-locked where there is a driver, pageable where there is none.
#[must_use]
pub fn pinned_if_possible() -> Arc<dyn Backend> {
    match Gpu::any() {
        Ok(gpu) => Arc::new(Pinned::new(&gpu)),
        Err(_) => Arc::new(Host),
    }
}
