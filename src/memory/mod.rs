//! Where bytes come from.
//!
//! A [`Backend`] gives memory on one device; a [`Region`] owns a piece of it and gives it back when it is
//! dropped. [`Borrowed`] describes memory of others for the length of a call. The wrappers [`Limit`], [`Fail`] and
//! [`Count`] stand in front of any backend.
//!
//! [`PageLocking`] page-locks a region in place, step by step, while it is used.
//!
//! A [`Gpu`] is a device in use: it runs work in the order of a [`Stream`], [`Event`]s are points in that work, and a
//! [`Ring`] is how small arrays cross. Without the feature `cuda` no [`Gpu`] can be opened, so that what is built on it
//! needs no feature of its own.

mod backend;
mod borrowed;
mod cuda;
mod host;
mod image;
mod mapped;
mod page_locking;
mod region;
mod stream;
mod users;
mod wrappers;

pub use backend::{ALIGNMENT, Backend, Block, Contents};
pub use borrowed::Borrowed;
pub use cuda::{Cuda, Event, Function, Gpu, PageLock, Pinned, Reply, Ring};
pub use host::Host;
pub use image::Image;
pub use mapped::{MappedHost, PAGE};
pub use page_locking::{PageLocking, Progress, Report, Sink, lock_pages, page_lock_steps};
pub use region::{Number, Plain, Region, RegionRange, ReturnedParts};
pub use stream::Stream;
pub use users::Users;
pub use wrappers::{Count, Fail, Limit};

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::base::{Device, Result};

/// Something that keeps memory of others for as long as it lives; it may be dropped on any thread.
pub type Keep = Arc<dyn Keeps>;

/// What can be in a [`Keep`].
pub trait Keeps: Debug + Any + Send + Sync {}

impl<T: Debug + Any + Send + Sync> Keeps for T {}

/// The backend for `device`. On a GPU what must be zeros for every stream is zeroed on `stream`, which is waited for.
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
