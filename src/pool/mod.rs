//! Index + memory + tensor = a pool: one file for each class of the public interface, and [`Pool`], what all of them
//! answer.
//!
//! [`TokenToKvPoolAllocator`], [`BatchPlanner`], [`KvPool`] and [`GdnPool`] may be shared as they are: their calls are atomic
//! among themselves. The others take `&mut self`, and are shared behind a lock. Foreign frameworks reach the same bytes past
//! these locks, by design.

mod batch_planner;
mod buffer_pool;
mod chunk_pool;
mod contract;
mod copies;
mod deferred;
mod fences;
mod gdn_pool;
mod host_copy;
mod kv_pool;
mod page_pool;
mod plan;
mod req_to_token_pool;
mod shortage;
mod slot_tensors;
mod stage;
mod table_copy;
mod token_to_kv_pool_allocator;
mod workspace;

pub use batch_planner::{Batch, BatchPlanner};
pub use buffer_pool::{Buffer, BufferPool};
pub use chunk_pool::{Attempt, ChunkConfig, ChunkPool, Over, PageLocking, Progress};
pub use contract::{Occupancy, Piece, Pool, Stats};
pub use fences::Fence;
pub use gdn_pool::{GdnConfig, GdnPool};
pub use host_copy::values_now;
pub use kv_pool::{BufferInfo, KvConfig, KvPool, Scales};
pub use page_pool::{PageConfig, PagePool};
pub use plan::{Field, Plan, PlannerConfig};
pub use req_to_token_pool::{ReqToTokenPool, TableIndex};
pub use shortage::Reclaim;
pub use token_to_kv_pool_allocator::{Grant, Notice, OnNotice, TokenToKvPoolAllocator};
pub use workspace::{Workspace, give_back_segment, take_segment};

use std::sync::Arc;

use crate::base::{Device, Error, Result, blocking};
use crate::kernels::{Indices, Launcher};
use crate::memory::{Event, Region, Stream};

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

/// Checks that there is a layer of that number.
fn check_layer(layer: usize, layers: usize) -> Result<()> {
    if layer < layers { Ok(()) } else { Err(Error::index(format!("layer {layer} is outside [0, {layers})"))) }
}

/// How a pool of `rows` rows in `region` works on its device; `None` in host memory.
fn launcher_for(region: &Arc<Region>, rows: usize) -> Result<Option<Launcher>> {
    /// For each row a move of the host takes three numbers; a batch may name a row more than once.
    const BYTES_A_ROW: usize = 16;
    /// For pools of few rows.
    const LEAST: usize = 64 << 10;
    let bytes = rows.saturating_mul(BYTES_A_ROW).max(LEAST);
    launcher(region, bytes)
}

/// How a pool whose memory is `region` works on its device, passing up to `ring_bytes` of numbers from the host at once.
fn launcher(region: &Region, ring_bytes: usize) -> Result<Option<Launcher>> {
    let device = region.gpu().zip(region.users());
    device.map(|(gpu, users)| Launcher::new(gpu, users, ring_bytes)).transpose()
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

/// Checks that index tensors are in host memory or on `device`, and notes that work on `stream` reads them.
fn expect_here(device: Device, indices: &[&Indices<'_>], stream: Stream) -> Result<()> {
    let tensors = || {
        indices.iter().filter_map(|indices| match indices {
            Indices::Host(_) => None,
            Indices::Device { tensor, .. } => Some(tensor),
        })
    };
    tensors().try_for_each(|tensor| tensor.expect_on(device, "the index tensor"))?;
    for tensor in tensors() {
        tensor.used_on(stream);
    }
    Ok(())
}
