//! Pools, which combine an index, memory and tensors. Each public class has a file of its own. Metrics,
//! snapshots and leak reports use a class through the trait [`Pool`], which all implement except
//! [`BatchPlanner`] and the stores, [`FileStore`] and [`RemoteStore`].
//!
//! A pool with memory of its own is constructed from a config and a [`Backend`](crate::memory::Backend),
//! which provides all of it. An [`Executor`](crate::kernels::Executor) for the host or for a device works on
//! that memory.
//!
//! The calls of a pool take `&self` and lock within, so that threads can share it. By design, other
//! frameworks access the same bytes without these locks.

#![forbid(unsafe_code)]

mod arena_host_tier;
mod arena_planner;
mod arena_prefix_cache;
mod batch_args;
mod batch_planner;
mod block_table;
mod buffer_pool;
mod cache_arena;
mod cached_slots;
mod chunk_pool;
mod contract;
mod deferred;
mod fences;
mod file_store;
mod gdn_pool;
mod host_tier;
mod kv_pool;
mod mirror;
mod page_pool;
mod piece_names;
mod prefix_cache;
mod remote_store;
mod req_to_token_pool;
mod session;
mod shortage;
mod slot_tensors;
mod stage;
mod store;
mod table_mirror;
mod token_to_kv_pool_allocator;
mod waiting_request;
mod workspace;

pub use arena_host_tier::{ArenaHostTier, ArenaHostTierConfig};
pub use arena_planner::{ArenaPlan, ArenaPlanner, ArenaPlannerConfig, PlanArray};
pub use arena_prefix_cache::{
    ArenaFetch, ArenaLease, ArenaLowerTier, ArenaPrefixCache, ArenaPrefixCacheConfig, ArenaPrefixCounts,
    ArenaPublished, CachedUnits,
};
pub use batch_planner::{Batch, BatchPlanner, Field, Plan, PlannerConfig, Prefix};
pub use buffer_pool::{Buffer, BufferConfig, BufferPool};
pub use cache_arena::{CacheArena, CacheArenaConfig, ReclaimUnits};
pub(crate) use cached_slots::CachedSlots;
pub use chunk_pool::{Attempt, ChunkConfig, ChunkPool};
pub use contract::{Occupancy, Piece, Pool, Stats};
pub use deferred::FreedAs;
pub use fences::Fence;
pub use file_store::{FileStore, FileStoreConfig, PutAfter};
pub use gdn_pool::{GdnConfig, GdnPool};
pub use host_tier::{HostTier, HostTierConfig};
pub use kv_pool::{KvConfig, KvLayout, KvPool, Scales};
pub use mirror::values_now;
pub use page_pool::{PageConfig, PagePool};
pub use prefix_cache::{
    CachedSizes, Fetch, FinishedRequests, Lease, Load, LowerStore, LowerTier, PrefixCache, PrefixCacheConfig,
    PrefixCounts, Publication, Published,
};
pub use remote_store::{RemoteStore, StoreCall, StoreCallKind, StoreCallQueue};
pub use req_to_token_pool::{FreedRows, ReqToTokenConfig, ReqToTokenPool, TableIndex, TableWriters};
pub use session::Session;
pub use shortage::{Obtainable, Reclaim};
pub use slot_tensors::{GrantedSlots, OneSlot, TensorOrigin, Writes};
pub use store::{Store, StoreTransfer};
pub use token_to_kv_pool_allocator::{AllocatorConfig, Grant, Notice, OnNotice, TokenToKvPoolAllocator};
pub use waiting_request::WaitingRequest;
pub use workspace::{Workspace, WorkspaceConfig, give_back_segment, take_segment};

use std::sync::Arc;

use crate::base::{Device, Error, Result, run_blocking};
use crate::memory::{Event, Ring};

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

/// The bytes of a pool, known before it is constructed.
///
/// ```
/// use kvpool::base::Device;
/// use kvpool::pool::{Footprint, ReqToTokenConfig};
/// let Footprint { pool, transfer } = ReqToTokenConfig::new(255, 1024).footprint(Device::Cpu).unwrap();
/// assert_eq!((pool, transfer), (256 * 1024 * 4, 0));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of its memory.
    pub pool: usize,
    /// Bytes of the buffers for numbers from the host, on a device.
    pub transfer: usize,
}

impl Footprint {
    fn new(device: Device, pool: usize, ring: usize) -> Result<Self> {
        Ok(Self { pool, transfer: if device == Device::Cpu { 0 } else { Ring::padded_size(ring)? } })
    }
}

/// Returns the number of bytes of the ring through which a pool of `rows` rows sends indices to a device.
fn row_ring_bytes(rows: usize) -> usize {
    /// A move with host indices takes three numbers a row; a batch may list a row more than once.
    const BYTES_A_ROW: usize = 16;
    /// Minimum, for pools of few rows.
    const LEAST: usize = 64 << 10;
    (rows * BYTES_A_ROW).max(LEAST)
}

/// Waits while a device is far behind, so that the next call has room to send `numbers` numbers. The caller
/// must hold no lock.
///
/// # Errors
/// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the device has failed.
///
/// ```
/// use kvpool::pool::make_room;
/// make_room(10_000, |_numbers| None).unwrap(); // no device is behind
/// ```
pub fn make_room(numbers: usize, backpressure_event: impl Fn(usize) -> Option<Arc<Event>>) -> Result<()> {
    /// Numbers that always fit beside a launch.
    const BESIDE: usize = 800;
    while numbers > BESIDE
        && let Some(event) = backpressure_event(numbers)
    {
        run_blocking(|| event.wait())?;
    }
    Ok(())
}
