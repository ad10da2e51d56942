//! Index + memory + tensor = a pool: one file for each class of the public interface, and [`Pool`], what all of them
//! answer.
//!
//! Every pool is made from its config on a [`Backend`](crate::memory::Backend), which gives all of its memory. Whether that
//! is the host's or a device's decides what works on it, an [`Executor`](crate::kernels::Executor).
//!
//! [`TokenToKvPoolAllocator`], [`BatchPlanner`], [`KvPool`] and [`GdnPool`] may be shared as they are: their calls are atomic
//! among themselves. The others take `&mut self`, and are shared behind a lock. Foreign frameworks reach the same bytes past
//! these locks, by design.

mod batch_planner;
mod buffer_pool;
mod chunk_pool;
mod contract;
mod deferred;
mod fences;
mod gdn_pool;
mod kv_pool;
mod mirror;
mod page_pool;
mod req_to_token_pool;
mod shortage;
mod slot_tensors;
mod stage;
mod table_mirror;
mod token_to_kv_pool_allocator;
mod workspace;

pub use batch_planner::{Batch, BatchPlanner, Field, Plan, PlannerConfig};
pub use buffer_pool::{Buffer, BufferConfig, BufferPool};
pub use chunk_pool::{Attempt, ChunkConfig, ChunkPool};
pub use contract::{Occupancy, Piece, Pool, Stats};
pub use fences::Fence;
pub use gdn_pool::{GdnConfig, GdnPool};
pub use kv_pool::{BufferInfo, KvConfig, KvPool, Scales};
pub use mirror::values_now;
pub use page_pool::{PageConfig, PagePool};
pub use req_to_token_pool::{ReqToTokenConfig, ReqToTokenPool, TableIndex};
pub use shortage::Reclaim;
pub use token_to_kv_pool_allocator::{AllocatorConfig, Grant, Notice, OnNotice, TokenToKvPoolAllocator};
pub use workspace::{Workspace, WorkspaceConfig, give_back_segment, take_segment};

use std::sync::Arc;

use crate::base::{Error, Result, blocking};
use crate::memory::Event;

/// Checks that every number is at least 1.
fn at_least_one(arguments: &[(&str, usize)]) -> Result<()> {
    match arguments.iter().find(|(_, value)| *value == 0) {
        None => Ok(()),
        Some((name, _)) => Err(Error::config(format!("{name} is 0; it must be at least 1"))),
    }
}

/// Checks that indices below `end` fit int32 tensors.
fn fits_int32(what: &str, end: Option<usize>) -> Result<u32> {
    end.and_then(|end| i32::try_from(end).ok())
        .map(i32::unsigned_abs)
        .ok_or_else(|| Error::config(format!("{what} needs indices beyond {}, the largest int32", i32::MAX)))
}

/// Bytes of indices of a pool of `rows` rows that cross to a device at once.
fn row_ring_bytes(rows: usize) -> usize {
    /// For each row a move of the host takes three numbers; a batch may name a row more than once.
    const BYTES_A_ROW: usize = 16;
    /// For pools of few rows.
    const LEAST: usize = 64 << 10;
    (rows * BYTES_A_ROW).max(LEAST)
}

/// Waits for a device that is far behind with the numbers that a pool sends, so that a call that sends `numbers` of them
/// has room. The caller holds no lock.
///
/// # Errors
/// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the device has failed.
pub fn make_room(numbers: usize, crowded: impl Fn() -> Option<Arc<Event>>) -> Result<()> {
    /// So many always cross with a launch.
    const BESIDE: usize = 800;
    while numbers > BESIDE
        && let Some(event) = crowded()
    {
        blocking(|| event.wait())?;
    }
    Ok(())
}
