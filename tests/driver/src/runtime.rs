//! The few functions of the CUDA runtime that let PyTorch hold tensors on this device: make them of DLPack, slice and
//! view them, count their versions, choose a stream. They win over the real ones when this library is preloaded.
//! Kernels of PyTorch have nothing to run on, so launches fail.

use std::ffi::c_void;

use crate::state::{Code, INVALID_HANDLE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, SUCCESS, state};
use crate::stream::Work;

/// `dim3`.
#[repr(C)]
struct Extent([u32; 3]);

/// What `cudaDriverGetVersion` and `cudaRuntimeGetVersion` say: new enough for any PyTorch.
const VERSION: i32 = 13_020;

fn put<T>(target: *mut T, value: T) -> Code {
    if target.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller gives a place for the answer.
    unsafe { target.write(value) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDevice(device: *mut i32) -> Code {
    put(device, 0)
}

#[unsafe(no_mangle)]
extern "C" fn cudaSetDevice(_device: i32) -> Code {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDeviceCount(count: *mut i32) -> Code {
    let devices = state().devices;
    put(count, devices)
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetLastError() -> Code {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaPeekAtLastError() -> Code {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaDriverGetVersion(version: *mut i32) -> Code {
    put(version, VERSION)
}

#[unsafe(no_mangle)]
extern "C" fn cudaRuntimeGetVersion(version: *mut i32) -> Code {
    put(version, VERSION)
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) -> Code {
    put(least, 0);
    put(greatest, -1)
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamCreateWithPriority(stream: *mut usize, _flags: u32, _priority: i32) -> Code {
    let mut state = state();
    let handle = state.handle();
    state.streams.create(handle);
    put(stream, handle)
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamSynchronize(stream: usize) -> Code {
    let state = &mut *state();
    state.streams.run_all_of(stream, &state.memory);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceSynchronize() -> Code {
    let state = &mut *state();
    state.streams.run_everything(&state.memory);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamIsCapturing(stream: usize, status: *mut i32) -> Code {
    let capturing = state().streams.is_capturing(stream);
    put(status, i32::from(capturing))
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventCreateWithFlags(event: *mut usize, _flags: u32) -> Code {
    let mut state = state();
    let handle = state.handle();
    state.streams.create_event(handle);
    put(event, handle)
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventDestroy(event: usize) -> Code {
    if state().streams.destroy_event(event) { SUCCESS } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventRecord(event: usize, stream: usize) -> Code {
    if state().streams.record(event, stream) { SUCCESS } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventRecordWithFlags(event: usize, stream: usize, _flags: u32) -> Code {
    cudaEventRecord(event, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventQuery(event: usize) -> Code {
    let state = &mut *state();
    if state.streams.query(event, &state.memory) { SUCCESS } else { NOT_READY }
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventSynchronize(event: usize) -> Code {
    let state = &mut *state();
    state.streams.wait(event, &state.memory);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamWaitEvent(stream: usize, event: usize, _flags: u32) -> Code {
    state().streams.order(stream, event);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemGetInfo(free: *mut usize, total: *mut usize) -> Code {
    let (used, capacity) = {
        let state = state();
        (state.memory.used, state.memory.capacity)
    };
    put(free, capacity.saturating_sub(used));
    put(total, capacity)
}

#[unsafe(no_mangle)]
extern "C" fn cudaMalloc(address: *mut usize, bytes: usize) -> Code {
    match state().memory.allocate(bytes) {
        Ok(found) => put(address, found),
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cudaFree(address: usize) -> Code {
    if address == 0 {
        return SUCCESS;
    }
    let state = &mut *state();
    state.streams.run_everything(&state.memory);
    state.memory.free(address)
}

/// Any direction; what is not on the device and not page-locked is waited for.
#[unsafe(no_mangle)]
extern "C" fn cudaMemcpyAsync(target: usize, source: usize, len: usize, _kind: i32, stream: usize) -> Code {
    let state = &mut *state();
    let is_late = |at: usize| state.memory.is_device(at, len) || state.memory.is_locked(at, len);
    let waits = !is_late(target) || !is_late(source);
    state.streams.enqueue(stream, Work::Copy { target, source, len });
    if waits {
        state.streams.run_all_of(stream, &state.memory);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemsetAsync(target: usize, value: i32, len: usize, stream: usize) -> Code {
    let [value, ..] = value.to_le_bytes();
    state().streams.enqueue(stream, Work::Set { target, value, len });
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaLaunchKernel(
    _function: *const c_void,
    _grid: Extent,
    _block: Extent,
    _params: *const c_void,
    _shared_bytes: usize,
    _stream: usize,
) -> Code {
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
extern "C" fn cudaLaunchKernelExC(
    _config: *const c_void,
    _function: *const c_void,
    _params: *const c_void,
) -> Code {
    NOT_SUPPORTED
}
