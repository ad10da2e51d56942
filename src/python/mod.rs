//! The extension module `kvpool._kvpool`: converts arguments, delegates to [`crate::pool`], maps errors.
//!
//! Classes are frozen and lock their mutable state. The GIL is held for bookkeeping and for enqueueing work,
//! which take microseconds. It is released for longer operations: constructors, copies in host memory of 64
//! KiB and more, and waits for a device or another thread ([`run_blocking`](crate::base::run_blocking)). No lock is
//! held while Python code runs or while waiting for the GIL, so locks and GIL cannot deadlock.

#![expect(
    clippy::doc_markdown,
    clippy::needless_pass_by_value,
    clippy::similar_names,
    reason = "docstrings are written for Python, argument names are fixed by the classes these replace, and \
              arguments arrive by value"
)]

mod address_space;
mod args;
mod base_pool;
mod batch_planner;
mod block;
mod block_map;
mod block_queue;
mod buffer_pool;
mod capsule;
mod chunk_pool;
mod debug;
mod errors;
mod export;
mod fences;
mod fetch;
mod file_store;
mod footprint;
mod framework;
mod gdn_pool;
mod host_tier;
mod hybrid_names;
mod hybrid_results;
mod hybrid_tree;
mod ints;
mod kv_pool;
mod logging;
mod numbers;
mod offload;
mod page_keys;
mod page_pool;
mod pickling;
mod prefix_cache;
mod prefix_report;
mod prefix_tree;
mod req_to_token_pool;
mod store_queue;
mod tensor;
mod tensor_cache;
mod token_to_kv_pool_allocator;
mod tokens;
mod torch_allocator;
mod workspace;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::IntoPyDict;

use crate::base::sync::lock;
use crate::base::{
    DType, Device, Error, LONG_COPY, bytes_of, close_fork_gate, open_fork_gate, set_blocking_hook,
    set_large_table_hook,
};
use crate::memory::{Region, Stream, prefer_huge_pages};
use crate::tensor::TensorView;

/// Does `work` under the lock. An error becomes an exception, which runs Python code, after the lock is
/// released.
fn with<T, R>(value: &Mutex<T>, work: impl FnOnce(&mut T) -> crate::base::Result<R>) -> PyResult<R> {
    let answer = work(&mut lock(value));
    Ok(answer?)
}

/// Does `work`, which copies `bytes` bytes. Releases the GIL for large copies in host memory.
fn copying<R: Send>(
    py: Python<'_>,
    device: Device,
    bytes: usize,
    work: impl FnOnce() -> crate::base::Result<R> + Send,
) -> PyResult<R> {
    let is_long = device == Device::Cpu && bytes >= LONG_COPY;
    Ok(if is_long { py.detach(work) } else { work() }?)
}

/// Runs a blocking section without the GIL.
fn without_gil(section: &mut (dyn FnMut() + Send)) {
    Python::attach(|py| py.detach(section));
}

/// Keeps threads of the crate from holding locks while the process is forked: a child would wait for them for ever.
#[pyfunction]
fn _before_fork(py: Python<'_>) {
    // A thread that is in may wait for the GIL.
    py.detach(close_fork_gate);
}

/// Ends `_before_fork`, in both processes.
#[pyfunction]
fn _after_fork() {
    open_fork_gate();
}

/// Longest wait between checks for signals and for the end of the program.
const SLICE: Duration = Duration::from_millis(50);

/// Calls `wait`, without the GIL, with short timeouts until it is over or `timeout` seconds are.
fn wait_in_slices(
    py: Python<'_>,
    timeout: Option<f64>,
    wait: impl Fn(Duration) -> crate::base::Result<bool> + Sync,
) -> PyResult<bool> {
    let seconds = timeout.unwrap_or(f64::INFINITY);
    if seconds.is_nan() || seconds < 0.0 {
        return Err(Error::config(format!("timeout is {seconds}; it must be seconds, not negative")).into());
    }
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
///     threads: At least 1, or 0 for one per CPU, at most 16.
///
/// Raises:
///     ConfigError: If `threads` is negative.
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
    framework::use_stream(handle.map(Stream::from_handle));
}

/// Returns the number of calls that debugging pools have recorded. Later calls have this number or a greater
/// one.
#[pyfunction]
fn _noted() -> u64 {
    crate::index::Act::count()
}

#[pymodule]
fn _kvpool(module: &Bound<'_, PyModule>) -> PyResult<()> {
    set_blocking_hook(without_gil);
    set_large_table_hook(prefer_huge_pages);
    module.add_class::<tensor::Tensor>()?;
    tensor::serve_buffers(module.py())?;
    module.add_class::<base_pool::BasePool>()?;
    module.add_class::<kv_pool::KvPool>()?;
    module.add_class::<token_to_kv_pool_allocator::TokenToKvPoolAllocator>()?;
    module.add_class::<token_to_kv_pool_allocator::FreeGroup>()?;
    module.add_class::<req_to_token_pool::ReqToTokenPool>()?;
    module.add_class::<gdn_pool::GdnPool>()?;
    module.add_class::<batch_planner::BatchPlanner>()?;
    module.add_class::<batch_planner::BatchPlan>()?;
    module.add_class::<batch_planner::HostPlan>()?;
    module.add_class::<page_pool::PagePool>()?;
    module.add_class::<prefix_cache::PrefixCache>()?;
    module.add_class::<prefix_cache::Lease>()?;
    module.add_class::<prefix_cache::Published>()?;
    module.add_class::<hybrid_tree::HybridTree>()?;
    module.add_class::<hybrid_results::HybridMatch>()?;
    module.add_class::<hybrid_results::HybridStep>()?;
    module.add_class::<hybrid_results::HybridFrees>()?;
    module.add_class::<hybrid_results::HybridNode>()?;
    module.add_class::<block::Block>()?;
    module.add_class::<block_queue::BlockQueue>()?;
    module.add_class::<block_map::BlockMap>()?;
    module.add_class::<offload::OffloadTable>()?;
    module.add_class::<offload::OffloadRequest>()?;
    module.add_class::<offload::OffloadOrder>()?;
    module.add_class::<offload::OffloadTurn>()?;
    module.add_class::<address_space::AddressSpace>()?;
    module.add_class::<prefix_report::Segment>()?;
    module.add_class::<prefix_report::Stored>()?;
    module.add_class::<prefix_report::Removed>()?;
    module.add_class::<prefix_report::Cleared>()?;
    module.add_class::<prefix_tree::PrefixTree>()?;
    module.add_class::<prefix_tree::TreeMatch>()?;
    module.add_class::<prefix_tree::TreeInsertion>()?;
    module.add_class::<prefix_tree::TreeEviction>()?;
    module.add_class::<prefix_tree::TreeNode>()?;
    module.add_class::<workspace::Workspace>()?;
    module.add_class::<buffer_pool::BufferPool>()?;
    module.add_class::<buffer_pool::Buffer>()?;
    module.add_class::<buffer_pool::BufferStep>()?;
    module.add_class::<chunk_pool::ChunkPool>()?;
    module.add_class::<chunk_pool::Chunk>()?;
    module.add_class::<chunk_pool::ChunkCopy>()?;
    module.add_class::<chunk_pool::PageLocking>()?;
    module.add_class::<host_tier::HostTier>()?;
    module.add_class::<host_tier::Load>()?;
    module.add_class::<file_store::FileStore>()?;
    module.add_class::<file_store::StoreTransfer>()?;
    module.add_class::<fetch::Fetch>()?;
    module.add_class::<store_queue::StoreQueue>()?;
    module.add_class::<store_queue::StoreCall>()?;
    module.add_function(wrap_pyfunction!(get_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(set_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(_before_fork, module)?)?;
    module.add_function(wrap_pyfunction!(_after_fork, module)?)?;
    module.add_function(wrap_pyfunction!(_zeros, module)?)?;
    module.add_function(wrap_pyfunction!(_use_stream, module)?)?;
    module.add_function(wrap_pyfunction!(_noted, module)?)?;
    module.add_function(wrap_pyfunction!(offload::_store_keys, module)?)?;
    module.add_function(wrap_pyfunction!(footprint::_footprint, module)?)?;
    module.add_function(wrap_pyfunction!(base_pool::_pools, module)?)?;
    module.add_function(wrap_pyfunction!(base_pool::_report_leaks_with, module)?)?;
    let storage = DType::STORAGE.map(|dtype| (dtype.name(), dtype.size()));
    module.add("_STORAGE_DTYPES", storage.into_py_dict(module.py())?)?;
    module.add("_ERROR_CLASSES", crate::base::ErrorKind::ALL.map(errors::class_name).to_vec())?;
    pickling::explain(module)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
