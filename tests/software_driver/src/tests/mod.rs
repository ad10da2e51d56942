//! The driver through the functions that it exports, as a program calls them.

mod capture;
mod control;
mod copies;
mod cubins;
mod errors;
mod kernels;
mod loading;
mod memory;
mod modes;
mod orders;
mod runtime;
mod streams;

use std::ffi::{CString, c_char, c_int, c_long, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::codes::SUCCESS;
use crate::state::{State, state};

unsafe extern "C" {
    safe fn cuInit(flags: c_uint) -> c_int;
    safe fn cuDriverGetVersion(version: *mut c_int) -> c_int;
    safe fn cuDeviceGetAttribute(value: *mut c_int, number: c_int, device: c_int) -> c_int;
    safe fn cuDeviceGetCount(count: *mut c_int) -> c_int;
    safe fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> c_int;
    safe fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int;
    safe fn cuCtxPushCurrent_v2(context: usize) -> c_int;
    safe fn cuCtxPopCurrent_v2(context: *mut usize) -> c_int;
    safe fn cuCtxSynchronize() -> c_int;
    safe fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int;
    safe fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int;
    safe fn cuMemFree_v2(address: u64) -> c_int;
    safe fn cuMemHostAlloc(address: *mut usize, bytes: usize, flags: c_uint) -> c_int;
    safe fn cuMemFreeHost(address: usize) -> c_int;
    safe fn cuMemHostRegister_v2(address: usize, bytes: usize, flags: c_uint) -> c_int;
    safe fn cuMemHostUnregister(address: usize) -> c_int;
    safe fn cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: u64) -> c_int;
    safe fn cuMemsetD8Async(target: u64, value: u8, len: usize, stream: usize) -> c_int;
    safe fn cuMemcpyHtoDAsync_v2(target: u64, source: usize, len: usize, stream: usize) -> c_int;
    safe fn cuMemcpyDtoHAsync_v2(target: usize, source: u64, len: usize, stream: usize) -> c_int;
    safe fn cuMemcpyDtoDAsync_v2(target: u64, source: u64, len: usize, stream: usize) -> c_int;
    safe fn cuMemcpyDtoH_v2(target: usize, source: u64, len: usize) -> c_int;
    safe fn cuStreamCreate(stream: *mut usize, flags: c_uint) -> c_int;
    safe fn cuStreamDestroy_v2(stream: usize) -> c_int;
    safe fn cuStreamSynchronize(stream: usize) -> c_int;
    safe fn cuStreamQuery(stream: usize) -> c_int;
    safe fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) -> c_int;
    safe fn cuStreamIsCapturing(stream: usize, status: *mut c_int) -> c_int;
    safe fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int;
    safe fn cuStreamBeginCapture_v2(stream: usize, mode: c_int) -> c_int;
    safe fn cuStreamEndCapture(stream: usize, graph: *mut usize) -> c_int;
    safe fn cuStreamGetCaptureInfo_v2(
        stream: usize,
        status: *mut c_int,
        id: *mut u64,
        graph: *mut usize,
        dependencies: *mut usize,
        count: *mut usize,
    ) -> c_int;
    safe fn cuGraphInstantiateWithFlags(made: *mut usize, graph: usize, flags: u64) -> c_int;
    safe fn cuGraphLaunch(graph: usize, stream: usize) -> c_int;
    safe fn cuGraphDestroy(graph: usize) -> c_int;
    safe fn cuGraphExecDestroy(graph: usize) -> c_int;
    safe fn cuEventCreate(event: *mut usize, flags: c_uint) -> c_int;
    safe fn cuEventDestroy_v2(event: usize) -> c_int;
    safe fn cuEventRecord(event: usize, stream: usize) -> c_int;
    safe fn cuEventQuery(event: usize) -> c_int;
    safe fn cuEventSynchronize(event: usize) -> c_int;
    safe fn cuModuleLoadData(module: *mut usize, image: *const c_char) -> c_int;
    safe fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) -> c_int;
    safe fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: usize) -> c_int;
    safe fn cuFuncLoad(function: usize) -> c_int;
    safe fn cuFuncIsLoaded(state: *mut c_int, function: usize) -> c_int;
    safe fn cuLaunchKernel(
        function: usize,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: usize,
        params: *const *const u8,
        extra: *const *const c_void,
    ) -> c_int;
    safe fn cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int;
    safe fn cuGetErrorString(code: c_int, string: *mut *const c_char) -> c_int;
    safe fn cuGetProcAddress(
        symbol: *const c_char,
        function: *mut *const (),
        version: c_int,
        flags: u64,
    ) -> c_int;
    safe fn cuGetProcAddress_v2(
        symbol: *const c_char,
        function: *mut *const (),
        version: c_int,
        flags: u64,
        status: *mut c_int,
    ) -> c_int;

    safe fn soft_calls(name: *const c_char) -> c_long;
    safe fn soft_reset_calls();
    safe fn soft_fail(name: *const c_char, number: c_long, code: c_int);
    safe fn soft_failures_left() -> c_long;
    safe fn soft_set_devices(count: c_int);
    safe fn soft_set_version(version: c_int);
    safe fn soft_set_init_error(code: c_int);
    safe fn soft_set_capacity(bytes: c_long);
    safe fn soft_set_capability(major: c_int, minor: c_int);
    safe fn soft_set_free_waits(waits: c_int);
    safe fn soft_set_register_limit(bytes: c_long);
    safe fn soft_set_lazy(is_lazy: c_int);
    safe fn soft_set_reuse_handles(reuses: c_int);
    safe fn soft_set_seed(seed: c_long);
    safe fn soft_break(code: c_int);
    safe fn soft_deinitialize();
    safe fn soft_mend();
    safe fn soft_restore();
    safe fn soft_set_queries(count: c_long);
    safe fn soft_pending(stream: usize) -> c_long;
    safe fn soft_pending_all() -> c_long;
    safe fn soft_run(stream: usize) -> c_int;
    safe fn soft_device_bytes() -> c_long;
    safe fn soft_locked_bytes() -> c_long;
    safe fn soft_events() -> c_long;
    safe fn soft_streams() -> c_long;
    safe fn soft_peek(target: *mut c_void, source: usize, bytes: c_long) -> c_int;
    safe fn soft_poke(target: usize, source: *const c_void, bytes: c_long) -> c_int;
    safe fn soft_begin_capture(stream: usize) -> c_int;
    safe fn soft_end_capture(stream: usize) -> c_long;
    safe fn soft_replay(graph: c_long, stream: usize) -> c_int;
}

/// A new driver, which one test has for itself.
struct Fresh {
    _alone: MutexGuard<'static, ()>,
}

impl Fresh {
    /// Not initialised.
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        *state() = State::new();
        Self { _alone: alone }
    }

    /// With the context of the first device.
    fn with_context() -> Self {
        let fresh = Self::new();
        ok(cuInit(0));
        let mut context = 0;
        ok(cuDevicePrimaryCtxRetain(&raw mut context, 0));
        ok(cuCtxPushCurrent_v2(context));
        soft_reset_calls();
        fresh
    }
}

#[track_caller]
fn ok(code: c_int) {
    assert_eq!(code, SUCCESS);
}

fn allocate(bytes: usize) -> u64 {
    let mut address = 0;
    ok(cuMemAlloc_v2(&raw mut address, bytes));
    address
}

/// Page-locked memory that holds `bytes`.
fn locked(bytes: &[u8]) -> usize {
    let mut address = 0;
    ok(cuMemHostAlloc(&raw mut address, bytes.len(), 0));
    write_host(address, bytes);
    address
}

fn write_host(address: usize, bytes: &[u8]) {
    // SAFETY: tests write page-locked memory that they allocated with this size.
    unsafe { (address as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

fn read_host<const N: usize>(address: usize) -> [u8; N] {
    // SAFETY: tests read page-locked memory that they allocated with at least this size.
    unsafe { (address as *const [u8; N]).read() }
}

fn stream() -> usize {
    let mut stream = 0;
    ok(cuStreamCreate(&raw mut stream, 1));
    stream
}

fn event() -> usize {
    let mut event = 0;
    ok(cuEventCreate(&raw mut event, 2));
    event
}

/// What device memory holds, whatever is enqueued.
fn peek<const N: usize>(address: u64) -> [u8; N] {
    let mut bytes = [0; N];
    let len = c_long::try_from(N).unwrap_or(0);
    ok(soft_peek(bytes.as_mut_ptr().cast(), usize::try_from(address).unwrap_or(0), len));
    bytes
}

fn calls(name: &str) -> c_long {
    let name = CString::new(name).unwrap_or_default();
    soft_calls(name.as_ptr())
}

/// Whether a child of this process dies of `work`.
fn dies(work: impl FnOnce()) -> bool {
    // SAFETY: the child only touches memory, and ends at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        work();
        // SAFETY: nothing of the parent is to be tidied up by the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: the child is ours, and `status` is room for the answer.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    libc::WIFSIGNALED(status)
}
