//! Operations on rows of bytes and on the request table: on the CPU, and as CUDA kernels.
//!
//! An [`Executor`] runs them. On the host it copies rows in place, strided or not, and uses several threads
//! for large batches; on a device each operation is one launch. The operations move memory, so bandwidth is
//! their limit.
//!
//! The images of the CUDA kernels are loaded once per device, at the first use, and stay loaded. A
//! `Fetcher` copies index values from a device to the host without waiting; `pack` copies tensors with
//! any strides to and from contiguous memory; [`Executor::copy_pages`] copies pages to and from [`Pieces`] of
//! host memory. Nothing here decides which indices are in use.

mod convert;
mod copy_threads;
#[cfg(all(target_os = "linux", not(loom)))]
mod cpu_set;
#[cfg(feature = "python")]
mod elements;
mod executor;
mod indices;
mod launch;
mod pack;
mod pages;
mod row_copy;
mod rows;
mod staging;
mod store;
mod table;
mod threads;

pub use copy_threads::CopyThreads;
#[cfg(feature = "python")]
pub(crate) use elements::{Element, elements};
pub use executor::Executor;
pub(crate) use indices::Numbers;
pub use indices::{IndexSpace, IndexSpaces, Indices, read_indices};
#[cfg(feature = "python")]
pub(crate) use indices::{check_ints, not_indices_error};
pub(crate) use launch::{
    Fetcher, GrowingBatch, MAX_RUNS, PendingFetch, PlanBatch, PlanFields, PlanRequest, PlanRequests,
    UNIT_GROUP_NUMBERS, UNIT_REQUEST_NUMBERS, UNIT_SPAN_NUMBERS, UnitGroup, UnitPlanBatch, read_now,
};
pub use pack::Direction;
pub(crate) use pack::pack;
pub(crate) use pages::LoadWay;
pub use pages::{HostAccess, PageCopy, PagePair, Pieces};
pub(crate) use rows::BufferInfo;
pub use rows::{LayerRows, PlaneRows, RowBuffer};
pub use staging::StagingArea;
pub(crate) use store::StoreRows;
pub(crate) use table::Table;
pub use threads::{num_threads, set_num_threads};
