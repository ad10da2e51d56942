//! Tests of the core through its public interface.

#![expect(clippy::unwrap_used, reason = "a failing test panics")]

mod arena_sessions;
mod blocks;
mod conformance;
mod contract;
mod dlpack;
mod face;
mod file_store;
#[cfg(feature = "cuda")]
mod gpu;
mod histories;
mod history_runs;
mod hybrid;
mod layering;
mod leases;
mod offload;
mod oracle;
mod pages;
#[cfg(feature = "cuda")]
mod pages_on_device;
mod policies;
mod pool_table;
mod publications;
mod residency;
mod shortage;
mod snapshots;
mod threads;
