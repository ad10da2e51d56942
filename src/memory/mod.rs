//! Sources of bytes: backends, regions, devices and streams.
//!
//! A [`Backend`] allocates memory on one device; a [`Region`] owns a piece of it and frees it on drop.
//! [`BorrowedTensor`] describes a tensor of another owner for the length of a call, [`HostRows`] one for as
//! long as work takes. A `FileLock` keeps the files behind memory for one process. Everything here may be
//! used from any thread.
//!
//! | backend | memory |
//! |---|---|
//! | [`Host`] | pageable host memory |
//! | [`MappedHost`] | large host memory on a NUMA node or in huge pages, page-locked in place by [`PageLocking`] |
//! | [`PageLockedHost`] | page-locked host memory |
//! | [`Cuda`] | device memory |
//! | [`LimitedBackend`], [`FailingBackend`], [`CountingBackend`] | wrappers around any backend: limit, fail a chosen allocation, count |
//!
//! A [`Gpu`] is an open device: it runs work in the order of a [`Stream`]. An [`Event`] is a point in that
//! work, and a [`Ring`] transfers small arrays between host and device. Without the feature `cuda`, opening a
//! [`Gpu`] fails, so the code on top of it needs no feature of its own.

mod backend;
mod block;
mod borrowed;
mod cuda;
mod device_memory;
mod file_lock;
mod fingerprint;
mod forked;
mod host;
mod host_rows;
mod image;
mod mapped;
mod memory_limit;
mod page_locking;
mod region;
mod region_range;
mod region_writer;
mod ring;
mod stream;
mod stream_set;
mod system_pages;
mod wrappers;

pub use backend::Backend;
pub use block::{ALIGNMENT, Block, Contents};
pub use borrowed::BorrowedTensor;
pub(crate) use cuda::Function;
pub(crate) use cuda::PageLock;
pub(crate) use cuda::release_parked;
pub use cuda::{CopyDirection, Event, Gpu, HostWait, SideStream};
pub use device_memory::{Cuda, PageLockedHost};
pub(crate) use file_lock::{FileLock, TryLockResult, this_user};
pub(crate) use fingerprint::Fingerprint;
pub use host::{Host, prefer_huge_pages};
pub(crate) use host_rows::HostRow;
pub use host_rows::HostRows;
pub(crate) use image::Image;
pub use mapped::{MappedHost, PageKind};
pub use memory_limit::MemoryLimit;
pub use page_locking::{
    PageLockEvent, PageLockProgress, PageLockSink, PageLocking, page_lock, page_lock_steps,
};
pub use region::{Number, Plain, Region, ReturnedParts};
pub use region_range::RegionRange;
pub(crate) use region_writer::RegionWriter;
pub(crate) use ring::Reply;
pub use ring::Ring;
pub use stream::Stream;
pub use stream_set::{StreamSet, StreamUser, TakenStreams};
pub use system_pages::system_page_size;
pub use wrappers::{CountingBackend, FailingBackend, LimitedBackend};

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::base::{Device, Result};

/// Keeps memory of another owner alive; it may be dropped on any thread.
pub type Keep = Arc<dyn KeepAlive>;

/// An owner that a [`Keep`] can hold.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::memory::{Keep, KeepAlive};
/// fn owner_of<T: KeepAlive>(bytes: T) -> Keep {
///     Arc::new(bytes)
/// }
/// let bytes = Arc::new([0_u8; 64]);
/// let keep = owner_of(Arc::clone(&bytes));
/// assert_eq!(Arc::strong_count(&bytes), 2);
/// drop(keep);
/// assert_eq!(Arc::strong_count(&bytes), 1);
/// ```
pub trait KeepAlive: Debug + Any + Send + Sync {}

impl<T: Debug + Any + Send + Sync> KeepAlive for T {}

/// Returns the backend for `device`. On a GPU, [`Contents::Zeros`] are written on `stream`, which is waited
/// for.
///
/// # Errors
/// [`ErrorKind::BackendUnavailable`](crate::base::ErrorKind::BackendUnavailable), with the missing part, when
/// `device` cannot be used.
///
/// ```
/// use kvpool::base::{Device, ErrorKind};
/// use kvpool::memory::{Stream, backend_for};
///
/// if !cfg!(feature = "cuda") {
///     let error = backend_for(Device::Cuda(0), Stream::DEFAULT).expect_err("no driver");
///     assert_eq!(error.kind(), ErrorKind::BackendUnavailable);
///     assert!(error.to_string().contains("kvpool was built without the `cuda` feature"));
/// }
/// ```
pub fn backend_for(device: Device, stream: Stream) -> Result<Arc<dyn Backend>> {
    match device {
        Device::Cpu => Ok(Arc::new(Host)),
        Device::Cuda(ordinal) => Ok(Arc::new(Cuda::new(&Gpu::open(ordinal)?, stream))),
    }
}
