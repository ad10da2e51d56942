//! Operations on rows of bytes, on the CPU.
//!
//! They move memory, so bandwidth is their limit: rows are copied from where they lie, strided or not, by several
//! threads when there is enough of them. They hold no lock and keep nothing.

mod convert;
mod copy;
mod indices;
mod launch;
mod rows;
mod store;
mod table;
mod threads;
mod transfer;

pub use indices::{Indices, Numbers, expect_ints, read_indices};
pub use launch::{Copies, Fetch, Fetcher, Launcher, PlanBatch, PlanFields, PlanRequest, Table, read_now};
pub use rows::{RowBuffer, gather_rows, move_rows, zero_rows};
pub use store::{Store, store_rows};
pub use table::{build_kv_indices, part as kv_indices_part};
pub use threads::{num_threads, set_num_threads};
pub use transfer::{Way, transfer};
