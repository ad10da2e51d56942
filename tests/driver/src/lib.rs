//! A CUDA driver made of software, for tests: the calls that kvpool makes, on host memory.
//!
//! - **Streams are late.** What is enqueued runs when somebody synchronises, has queried an event often enough, or the
//!   test says so; and only the work of the streams that are waited for runs. A missing wait shows as missing data.
//! - **Device memory is not host memory.** It can be touched only while enqueued work runs; a host that follows a
//!   device address dies. It is not zero at first.
//! - **Kernels** are the same sources, compiled for the host; they are found by the names in the PTX that is loaded.
//! - **Failures** can be planned for any call, calls are counted, memory is limited.
//!
//! `control` has the functions that tests call, `runtime` the few of the CUDA runtime with which PyTorch can hold
//! tensors on such a device.

mod control;
mod driver;
mod kernels;
mod memory;
mod runtime;
mod state;
mod stream;
