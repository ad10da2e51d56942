//! Operations on rows of bytes and on the request table: on the CPU, and as CUDA kernels.
//!
//! An [`Executor`] is where they run. On the host they copy rows from where they lie, strided or not, on several threads when
//! there is enough of them; on a device they are one launch each. They move memory, so bandwidth is their limit.
//!
//! The images of the CUDA kernels are loaded once a device, at the first use, and stay loaded. A [`Fetcher`] brings index
//! values from a device to the host without a wait; [`pack()`] copies tensors that lie anyhow to
//! and from contiguous memory.

mod convert;
mod executor;
mod indices;
mod launch;
mod pack;
mod row_copy;
mod rows;
mod store;
mod table;
mod threads;

pub use executor::{Executor, HostExecutor};
pub use indices::{IndexSpace, Indices, Numbers, expect_ints, read_indices};
pub use launch::{Fetch, Fetcher, Launcher, PlanBatch, PlanFields, PlanRequest, read_now};
pub use pack::{Direction, pack};
pub use rows::{LayerLayout, LayerRows, RowBuffer, gather_rows, move_rows, zero_rows};
pub use store::{Store, store_rows};
pub use table::Table;
pub use threads::{num_threads, set_num_threads};
