//! A CUDA driver made of software, for tests: the calls that kvpool makes, on host memory.
//!
//! - **Streams are late.** What is enqueued runs when somebody synchronises, has queried an event often enough, or the
//!   test says so; and only the work of the streams that are waited for runs. A missing wait shows as missing data.
//! - **Device memory is not host memory.** It can be touched only while enqueued work runs; a host that follows a
//!   device address dies, and so does whoever uses memory after it was given back. It is not zero at first.
//! - **Kernels** are the same sources, compiled for the host; they are found by the names in the PTX that is loaded.
//! - **Kernels run in no order that anything may rely on**: a seed shuffles blocks and threads. `soft_set_seed`, or
//!   `KVPOOL_SOFTWARE_SEED` for a whole process, gives the same orders to the same launches again.
//! - **Captures** are spoilt by what spoils them on a device: by waits of a whole device in every mode, by calls that
//!   are unsafe as the modes of thread and capture say (copies of pageable memory on any stream are, as the driver waits
//!   in them), by the first launch of a function that is not loaded. Their end fails if a stream that joined was not
//!   awaited.
//! - **Work of the host** is a gate: a stream stays there until the test opens it, as calls do that wait for it, or for room
//!   in a queue that the test has made short. Whoever waits with the lock of Python's interpreter ends the process.
//! - **Failures** can be planned for any call with any number, also for all calls of a context or of the process, as
//!   after an error of a kernel or at the end of the process. Calls are counted, memory is limited.
//!
//! The driver is used by preloading the library (`LD_PRELOAD`), or by a folder on `LD_LIBRARY_PATH` that has it as
//! `libcuda.so.1`, the name that it bears inside. `control` has the functions that tests call. Of the environment it
//! takes `KVPOOL_SOFTWARE_DEVICES` (how many; 2), `KVPOOL_SOFTWARE_VERSION` (like 11080; 13020, and kernels have at most
//! 4,096 bytes of parameters before 12010),
//! `KVPOOL_SOFTWARE_INIT_ERROR` (what `cuInit` answers; 0), `KVPOOL_SOFTWARE_SEED` (the order of blocks and threads, 0
//! for the last first; 1), `KVPOOL_SOFTWARE_FREE_WAITS` (1 if freeing memory waits; 0), `KVPOOL_SOFTWARE_EXIT` (1 if the
//! driver goes down when the process ends; 0), `KVPOOL_SOFTWARE_STREAMS` (`reused` if new streams get the handles of
//! destroyed ones), and `CUDA_MODULE_LOADING` as any driver does.
//!
//! Folders and files are layers: `arena`, `memory`, `work`, `streams`, `operations`, then what is exported. All state
//! is under one lock, under which work runs, too.
//!
//! `runtime` has enough of the CUDA runtime for PyTorch, if the library is preloaded.
//!
//! It is stricter than a device: the default stream waits for no other, nothing waits for it, and memory that queued
//! work uses must live until it ran, as freeing it waits for nothing (a driver may wait; `cudaFree` does here).
//! The handle of a destroyed stream is refused, which a device does not promise, and its uses are counted.
//! Memory is registered by whole pages. Copies of pageable memory cannot be captured. A function is not loaded when it
//! is looked up, as NVIDIA's programming guide says it is. It is simpler in this: streams of one capture run in the order
//! of the calls, nothing takes time, kernels run one after another and blocks too, and what a broken context had to do
//! stays until it is mended.

#![allow(non_snake_case, reason = "exported functions have the names that CUDA gives them")]

mod arena;
mod capture;
mod codes;
mod contexts;
mod control;
mod copies;
mod cubin;
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
