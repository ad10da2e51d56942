use std::ffi::CStr;
use std::ptr;

use super::{
    Fresh, allocate, calls, cuCtxPopCurrent_v2, cuCtxPushCurrent_v2, cuCtxSynchronize, cuDeviceGetCount,
    cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRetain, cuDriverGetVersion, cuGetErrorName,
    cuGetProcAddress, cuInit, cuMemAlloc_v2, cuMemFree_v2, cuMemsetD8Async, cuStreamSynchronize, event, ok,
    peek, soft_calls, soft_device_bytes, soft_events, soft_fail, soft_failures_left, soft_pending_all,
    soft_reset_calls, soft_set_devices, soft_set_init_error, soft_set_version, stream,
};
use crate::codes::{
    CONTEXT_IS_DESTROYED, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND,
    NOT_INITIALIZED, OUT_OF_MEMORY, UNKNOWN,
};

#[test]
fn a_driver_is_initialised_and_entered_first() {
    let _fresh = Fresh::new();
    let mut count = 0;
    assert_eq!(cuDeviceGetCount(&raw mut count), NOT_INITIALIZED);
    assert_eq!(cuCtxSynchronize(), NOT_INITIALIZED);
    soft_set_init_error(UNKNOWN);
    assert_eq!(cuInit(0), UNKNOWN);
    soft_set_init_error(0);
    soft_set_devices(0);
    ok(cuInit(0));
    ok(cuDeviceGetCount(&raw mut count));
    assert_eq!((count, cuDevicePrimaryCtxRetain(&mut 0, 0)), (0, INVALID_DEVICE));
    soft_set_devices(3);
    ok(cuDeviceGetCount(&raw mut count));
    assert_eq!((count, cuCtxSynchronize()), (3, INVALID_CONTEXT));
    soft_set_version(11_080);
    ok(cuDriverGetVersion(&raw mut count));
    assert_eq!(count, 11_080);
}

#[test]
fn a_released_context_is_gone_with_all_it_had() {
    let _fresh = Fresh::with_context();
    let (block, side) = (allocate(8), stream());
    ok(cuMemsetD8Async(block, 1, 8, side));
    event();
    ok(cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!((soft_device_bytes(), soft_events(), soft_pending_all()), (0, 0, 0));
    assert_eq!(cuCtxSynchronize(), CONTEXT_IS_DESTROYED);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(0), INVALID_CONTEXT);
    ok(cuCtxPopCurrent_v2(ptr::null_mut()));
    assert_eq!((cuCtxPopCurrent_v2(ptr::null_mut()), cuCtxSynchronize()), (INVALID_CONTEXT, INVALID_CONTEXT));
}

#[test]
fn calls_are_counted() {
    let _fresh = Fresh::with_context();
    let block = allocate(8);
    ok(cuMemFree_v2(block));
    assert_eq!(cuMemFree_v2(block), INVALID_VALUE);
    assert_eq!((calls("cuMemAlloc_v2"), calls("cuMemFree_v2"), calls("cuInit")), (1, 2, 0));
    assert_eq!(soft_calls(ptr::null()), 3);
    soft_reset_calls();
    assert_eq!((calls("cuMemFree_v2"), soft_calls(ptr::null())), (0, 0));
}

#[test]
fn calls_fail_once_as_planned() {
    let _fresh = Fresh::with_context();
    let block = allocate(8);
    soft_fail(c"cuMemAlloc_v2".as_ptr(), 2, OUT_OF_MEMORY);
    soft_fail(ptr::null(), 4, INVALID_HANDLE);
    assert_eq!(soft_failures_left(), 2);
    let mut address = 0;
    ok(cuMemAlloc_v2(&raw mut address, 8));
    ok(cuMemsetD8Async(block, 1, 8, 0));
    assert_eq!(cuMemAlloc_v2(&raw mut address, 8), OUT_OF_MEMORY);
    assert_eq!((cuMemsetD8Async(block, 2, 8, 0), soft_pending_all()), (INVALID_HANDLE, 1));
    assert_eq!(soft_failures_left(), 0);
    ok(cuMemAlloc_v2(&raw mut address, 8));
    ok(cuMemsetD8Async(block, 2, 8, 0));
}

#[test]
fn threads_have_their_own_contexts() {
    let _fresh = Fresh::with_context();
    let mut context = 0;
    ok(cuDevicePrimaryCtxRetain(&raw mut context, 0));
    soft_reset_calls();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                assert_eq!(cuCtxSynchronize(), INVALID_CONTEXT);
                ok(cuCtxPushCurrent_v2(context));
                let (block, side) = (allocate(64), stream());
                for value in 0..50 {
                    ok(cuMemsetD8Async(block, value, 64, side));
                    ok(cuStreamSynchronize(side));
                    assert_eq!(peek(block), [value; 64]);
                }
                ok(cuMemFree_v2(block));
            });
        }
    });
    assert_eq!((calls("cuMemsetD8Async"), soft_device_bytes()), (200, 0));
}

#[test]
fn functions_and_errors_have_names() {
    let _fresh = Fresh::new();
    let mut function = ptr::null();
    ok(cuGetProcAddress(c"cuMemAlloc".as_ptr(), &raw mut function, 12_000, 0));
    assert_eq!(function.addr(), cuMemAlloc_v2 as *const () as usize);
    ok(cuGetProcAddress(c"cuInit".as_ptr(), &raw mut function, 12_000, 0));
    assert_eq!(cuGetProcAddress(c"cuNothing".as_ptr(), &raw mut function, 12_000, 0), NOT_FOUND);
    assert_eq!(cuGetProcAddress(c"cuInit".as_ptr(), &raw mut function, 99_000, 0), INVALID_VALUE);
    let mut name = ptr::null();
    ok(cuGetErrorName(OUT_OF_MEMORY, &raw mut name));
    // SAFETY: the driver gave a string that ends with a zero.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(cuGetErrorName(12_345, &raw mut name), INVALID_VALUE);
}
