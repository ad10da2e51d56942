use std::ffi::{c_int, c_uint};
use std::ptr;

use super::{Fresh, ok, peek, soft_calls, soft_pending, soft_set_devices};
use crate::codes::{INVALID_VALUE, NO_DEVICE, NOT_READY, NOT_SUPPORTED, SUCCESS};

unsafe extern "C" {
    safe fn cudaGetDeviceCount(count: *mut c_int) -> c_int;
    safe fn cudaGetDevice(device: *mut c_int) -> c_int;
    safe fn cudaSetDevice(device: c_int) -> c_int;
    safe fn cudaMalloc(address: *mut usize, bytes: usize) -> c_int;
    safe fn cudaFree(address: usize) -> c_int;
    safe fn cudaMemcpyAsync(target: usize, source: usize, len: usize, kind: c_int, stream: usize) -> c_int;
    safe fn cudaStreamCreateWithPriority(stream: *mut usize, flags: c_uint, priority: c_int) -> c_int;
    safe fn cudaStreamSynchronize(stream: usize) -> c_int;
    safe fn cudaEventCreateWithFlags(event: *mut usize, flags: c_uint) -> c_int;
    safe fn cudaEventRecord(event: usize, stream: usize) -> c_int;
    safe fn cudaEventQuery(event: usize) -> c_int;
    safe fn cudaGetLastError() -> c_int;
    safe fn cudaLaunchKernel() -> c_int;
}

#[test]
fn the_runtime_works_on_the_same_streams_and_memory() {
    let _fresh = Fresh::new();
    let (mut address, mut stream, mut event) = (0, 0, 0);
    ok(cudaMalloc(&raw mut address, 4));
    ok(cudaStreamCreateWithPriority(&raw mut stream, 1, 0));
    ok(cudaEventCreateWithFlags(&raw mut event, 2));
    let source = [1u8, 2, 3, 4];
    ok(cudaMemcpyAsync(address, source.as_ptr().addr(), 4, 1, stream));
    ok(cudaEventRecord(event, stream));
    assert_eq!((cudaEventQuery(event), soft_pending(stream)), (NOT_READY, 1));
    ok(cudaStreamSynchronize(stream));
    assert_eq!((cudaEventQuery(event), peek(address as u64)), (SUCCESS, source));
    ok(cudaFree(address));
    assert_eq!(soft_calls(ptr::null()), 0);
}

#[test]
fn errors_are_kept_until_asked_for() {
    let _fresh = Fresh::new();
    assert_eq!(
        (cudaLaunchKernel(), cudaGetLastError(), cudaGetLastError()),
        (NOT_SUPPORTED, NOT_SUPPORTED, SUCCESS)
    );
    assert_eq!((cudaFree(1), cudaGetLastError()), (INVALID_VALUE, INVALID_VALUE));
    let mut device = -1;
    ok(cudaSetDevice(1));
    ok(cudaGetDevice(&raw mut device));
    assert_eq!(device, 1);
    soft_set_devices(0);
    assert_eq!(cudaGetDeviceCount(&raw mut device), NO_DEVICE);
}
