//! Index + memory + tensor = a pool: one file for each class of the public interface.
//!
//! Pools whose bookkeeping changes take `&mut self`; whoever shares one wraps it in a lock. [`KvPool`] and
//! [`GdnPool`] may be shared as they are: their calls are atomic among themselves. Other frameworks reach the same
//! bytes past these locks, by design.

mod gdn_pool;
mod kv_pool;
mod req_to_token_pool;
mod token_to_kv_pool_allocator;

pub use gdn_pool::{GdnConfig, GdnPool};
pub use kv_pool::{BufferInfo, KvConfig, KvPool, Scales};
pub use req_to_token_pool::{ReqToTokenPool, TableIndex};
pub use token_to_kv_pool_allocator::TokenToKvPoolAllocator;

use crate::base::{Error, Result};

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
