//! A CUDA driver made of software, for tests: the calls that kvpool makes, on host memory.
//!
//! - **Streams are late.** What is enqueued runs when somebody synchronises, has queried an event often enough, or the
//!   test says so; and only the work of the streams that are waited for runs. A missing wait shows as missing data.
//! - **Device memory is not host memory.** It can be touched only while enqueued work runs; a host that follows a
//!   device address dies, and so does whoever uses memory after it was given back. It is not zero at first.
//! - **Kernels** are the same sources, compiled for the host; they are found by the names in the PTX that is loaded.
//! - **Failures** can be planned for any call, calls are counted, memory is limited.
//!
//! The driver is used by preloading the library (`LD_PRELOAD`), or by a folder on `LD_LIBRARY_PATH` that has it as
//! `libcuda.so.1`, the name that it bears inside. `control` has the functions that tests call. Of the environment it
//! takes `KVPOOL_SOFTWARE_DEVICES` (how many; 2), `KVPOOL_SOFTWARE_VERSION` (like 11080; 13020) and
//! `KVPOOL_SOFTWARE_INIT_ERROR` (what `cuInit` answers; 0).
//!
//! Folders and files are layers: `arena`, `memory`, `work`, `streams`, `operations`, then what is exported. All state
//! is under one lock, under which work runs, too.
//!
//! `runtime` has enough of the CUDA runtime for PyTorch, if the library is preloaded.
//!
//! It is stricter than a device: the default stream waits for no other, nothing waits for it, and memory that a queued
//! copy uses must live until it ran. Copies of pageable memory cannot be captured. It is simpler in this: streams of one
//! capture run in the order of the calls, nothing takes time, and kernels run one after another.

#![allow(non_snake_case, reason = "exported functions have the names that CUDA gives them")]

mod arena;
mod capture;
mod codes;
mod contexts;
mod control;
mod driver;
mod events;
mod kernels;
mod ledger;
mod memory;
mod modules;
mod operations;
mod runtime;
mod state;
mod streams;
mod threads;
mod work;

#[cfg(test)]
mod tests;
