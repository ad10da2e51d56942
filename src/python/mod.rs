//! The extension module `kvpool._kvpool`: converts arguments, delegates to [`crate::pool`], maps errors.
//!
//! Classes are frozen and lock their mutable state. The GIL is held for bookkeeping, which takes microseconds.
//! It is released for longer operations: constructors, copies in host memory of 64 KiB and more, and waits for
//! a device or another thread ([`run_blocking`](crate::base::run_blocking)); also for each call of the driver
//! that enqueues work, as it waits while the queue is full, and for work before it that may need the GIL. Nobody
//! waits for a lock with the GIL, and no lock is held while Python code runs, so locks and GIL cannot deadlock.

#![expect(
    clippy::doc_markdown,
    clippy::needless_pass_by_value,
    clippy::similar_names,
    reason = "docstrings are written for Python, argument names are fixed by the classes these replace, and \
              arguments arrive by value"
)]

mod arena_host_tier;
mod arena_planner;
mod arena_prefix_cache;
mod args;
mod base_pool;
mod batch_planner;
mod buffer_pool;
mod cache_arena;
mod cache_layout;
mod cache_object;
mod capsule;
mod chunk_pool;
mod debug;
mod engines;
mod environment;
mod errors;
mod export;
mod fences;
mod fetch;
mod file_store;
mod footprint;
mod framework;
mod gdn_pool;
mod gil;
mod host_tier;
mod ints;
mod kv_pool;
mod logging;
mod numbers;
mod page_keys;
mod page_pool;
mod pickling;
mod pool_name;
mod prefix_cache;
mod prefix_report;
mod req_to_token_pool;
mod session;
mod store_arg;
mod store_queue;
mod tensor;
mod tensor_cache;
mod token_to_kv_pool_allocator;
mod tokens;
mod torch_allocator;
mod waiting_request;
mod workspace;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::base::sync::lock;
use crate::base::{DType, Device, Error, LONG_COPY, bytes_of, close_fork_gate, open_fork_gate};
use crate::memory::Region;
use crate::tensor::TensorView;

/// Calls `work` under the lock. An error becomes an exception, which runs Python code, after the lock is
/// released.
fn with<T, R>(value: &Mutex<T>, work: impl FnOnce(&mut T) -> crate::base::Result<R>) -> PyResult<R> {
    let answer = work(&mut lock(value));
    Ok(answer?)
}

/// Calls `work`, which copies `bytes` bytes. Releases the GIL for large copies in host memory.
fn copying<R: Send>(
    py: Python<'_>,
    device: Device,
    bytes: usize,
    work: impl FnOnce() -> crate::base::Result<R> + Send,
) -> PyResult<R> {
    let is_long = device == Device::Cpu && bytes >= LONG_COPY;
    Ok(if is_long { py.detach(work) } else { work() }?)
}

/// Keeps threads of the crate from holding locks while the process is forked. A child would wait for them
/// forever.
#[pyfunction]
fn _before_fork(py: Python<'_>) {
    // A thread inside the gate may wait for the GIL.
    py.detach(close_fork_gate);
}

/// Ends `_before_fork`, in both processes.
#[pyfunction]
fn _after_fork() {
    open_fork_gate();
}

/// Longest wait between checks for signals and for the end of the program.
const SLICE: Duration = Duration::from_millis(50);

/// Runs the handlers of signals that have come, on the main thread.
fn check_signals() -> crate::base::Result<()> {
    Python::attach(|py| py.check_signals().map_err(Error::foreign))
}

/// Calls `wait`, without the GIL, with short timeouts until it is over or `timeout` seconds are.
fn wait_in_slices(
    py: Python<'_>,
    timeout: Option<f64>,
    wait: impl Fn(Duration) -> crate::base::Result<bool> + Sync,
) -> PyResult<bool> {
    let seconds = checked_seconds(timeout)?;
    let start = Instant::now();
    loop {
        let left = (seconds - start.elapsed().as_secs_f64()).clamp(0.0, SLICE.as_secs_f64());
        if py.detach(|| wait(Duration::from_secs_f64(left)))? {
            return Ok(true);
        }
        py.check_signals()?;
        if start.elapsed().as_secs_f64() >= seconds {
            return Ok(false);
        }
    }
}

/// Asks again and again, until `timeout` seconds are over, whether something is. Pauses in between without the GIL; what
/// locks anything holds it, so that no other thread forks meanwhile.
fn wait_polling(
    py: Python<'_>,
    timeout: Option<f64>,
    is_over: impl Fn() -> crate::base::Result<bool>,
) -> PyResult<bool> {
    let seconds = checked_seconds(timeout)?;
    let (start, mut pause) = (Instant::now(), Duration::from_micros(20));
    loop {
        if is_over()? {
            return Ok(true);
        }
        py.check_signals()?;
        let left = seconds - start.elapsed().as_secs_f64();
        if left <= 0.0 {
            return Ok(false);
        }
        py.detach(|| std::thread::sleep(pause.min(Duration::from_secs_f64(left.min(1.0)))));
        pause = (pause * 2).min(Duration::from_millis(1));
    }
}

/// Returns the seconds of a timeout.
fn checked_seconds(timeout: Option<f64>) -> PyResult<f64> {
    let seconds = timeout.unwrap_or(f64::INFINITY);
    if seconds.is_nan() || seconds < 0.0 {
        return Err(Error::argument(format!("timeout is {seconds}; it must be seconds, not negative")).into());
    }
    Ok(seconds)
}

/// Returns the maximum number of threads of one large copy on the CPU.
#[pyfunction]
fn get_num_threads() -> usize {
    crate::kernels::num_threads()
}

/// Sets the maximum number of threads of one large copy on the CPU.
///
/// Copies below 2 MiB always use one thread.
///
/// Args:
///     threads: The number of threads. 0 means one per CPU, up to 16.
///
/// Raises:
///     ArgumentError: If `threads` is negative.
///     TypeError: If `threads` is not an int.
#[pyfunction]
fn set_num_threads(threads: &Bound<'_, PyAny>) -> PyResult<()> {
    crate::kernels::set_num_threads(args::size("threads", threads)?);
    Ok(())
}

/// Returns a tensor of zeros, made in the same way as the tensors of the pools. Tests use it to cover every
/// dtype.
///
/// Args:
///     shape: Extents.
///     dtype: The name of a storage dtype, or "int32", "int64" or "bool".
///     device: The device of the tensor.
#[pyfunction]
#[pyo3(signature = (shape, dtype, device="cpu"))]
fn _zeros(py: Python<'_>, shape: Vec<usize>, dtype: &str, device: &str) -> PyResult<Py<PyAny>> {
    let crossing = [DType::I32, DType::I64, DType::Bool].into_iter().find(|known| known.name() == dtype);
    let dtype = crossing.map_or_else(|| DType::parse(dtype), Ok)?;
    let device = Device::parse(device)?;
    let backend = framework::backend(py, device)?;
    let region = Arc::new(Region::new(backend, bytes_of("zeros", &shape, dtype)?)?);
    export::to_tensor(py, &TensorView::contiguous(region, 0, dtype, &shape)?)
}

/// Sets the current CUDA stream of this thread. `None` restores PyTorch's current stream.
///
/// Args:
///     handle: A `cudaStream_t` as an int.
#[pyfunction]
fn _use_stream(handle: Option<usize>) {
    framework::use_stream(handle);
}

/// Returns the number of calls that debugging pools have recorded. Later calls have this number or a greater
/// one.
#[pyfunction]
fn _noted() -> u64 {
    crate::index::CallRecord::count()
}

/// The classes and functions of the extension. Those of the module `kvpool._kvpool` itself are parts of integrations,
/// without a promise of stability.
#[pymodule]
mod _kvpool {
    use pyo3::prelude::*;
    use pyo3::types::IntoPyDict;

    use super::check_signals;
    use super::gil::{GIL, without_gil};
    use crate::base::{
        DType, ErrorKind, set_blocking_hook, set_interpreter_lock, set_interrupt_check, set_large_table_hook,
    };
    use crate::memory::prefer_huge_pages;

    #[pymodule_export]
    use super::arena_host_tier::ArenaHostTier;
    #[pymodule_export]
    use super::arena_planner::{ArenaPlan, ArenaPlanner, GroupPlan};
    #[pymodule_export]
    use super::arena_prefix_cache::{ArenaLease, ArenaPrefixCache, GroupReport, LeasedUnits};
    #[pymodule_export]
    use super::base_pool::{_pools, _report_leaks_with, BasePool};
    #[pymodule_export]
    use super::batch_planner::{BatchPlan, BatchPlanner, HostPlan};
    #[pymodule_export]
    use super::buffer_pool::{Buffer, BufferPool, BufferStep};
    #[pymodule_export]
    use super::cache_arena::CacheArena;
    #[pymodule_export]
    use super::cache_layout::{CacheLayout, Group, Plane, SlabLayout};
    #[pymodule_export]
    use super::chunk_pool::{Chunk, ChunkCopy, ChunkPool, PageLocking};
    #[pymodule_export]
    use super::engines::address_space::AddressSpace;
    #[pymodule_export]
    use super::engines::block::Block;
    #[pymodule_export]
    use super::engines::block_hasher::BlockHasher;
    #[pymodule_export]
    use super::engines::block_map::BlockMap;
    #[pymodule_export]
    use super::engines::block_queue::BlockQueue;
    #[pymodule_export]
    use super::engines::hybrid_results::{HybridFrees, HybridMatch, HybridNode, HybridStep};
    #[pymodule_export]
    use super::engines::hybrid_tree::HybridTree;
    #[pymodule_export]
    use super::engines::offload::{_store_keys, OffloadOrder, OffloadRequest, OffloadTable, OffloadTurn};
    #[pymodule_export]
    use super::engines::slot_tree::{
        SlotTree, SlotTreeEviction, SlotTreeInsertion, SlotTreeMatch, SlotTreeNode,
    };
    #[pymodule_export]
    use super::fetch::Fetch;
    #[pymodule_export]
    use super::file_store::{FileStore, StoreTransfer};
    #[pymodule_export]
    use super::footprint::_footprint;
    #[pymodule_export]
    use super::gdn_pool::GdnPool;
    #[pymodule_export]
    use super::host_tier::{HostTier, Load};
    #[pymodule_export]
    use super::kv_pool::KvPool;
    #[pymodule_export]
    use super::page_pool::PagePool;
    #[pymodule_export]
    use super::prefix_cache::{Lease, PrefixCache, Published};
    #[pymodule_export]
    use super::prefix_report::{Cleared, Removed, Segment, Stored};
    #[pymodule_export]
    use super::req_to_token_pool::ReqToTokenPool;
    #[pymodule_export]
    use super::session::Session;
    #[pymodule_export]
    use super::store_queue::{StoreCall, StoreQueue};
    #[pymodule_export]
    use super::tensor::Tensor;
    #[pymodule_export]
    use super::token_to_kv_pool_allocator::{FreeGroup, TokenToKvPoolAllocator};
    #[pymodule_export]
    use super::waiting_request::WaitingRequest;
    #[pymodule_export]
    use super::workspace::Workspace;
    #[pymodule_export]
    use super::{_after_fork, _before_fork, _noted, _use_stream, _zeros, get_num_threads, set_num_threads};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        set_blocking_hook(without_gil);
        set_interpreter_lock(GIL);
        set_interrupt_check(check_signals);
        set_large_table_hook(prefer_huge_pages);
        super::tensor::serve_buffers(module.py())?;
        let storage = DType::STORAGE.map(|dtype| (dtype.name(), dtype.size()));
        module.add("_STORAGE_DTYPES", storage.into_py_dict(module.py())?)?;
        module.add("_ERROR_CLASSES", ErrorKind::ALL.map(super::errors::class_name).to_vec())?;
        super::pickling::explain(module)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
