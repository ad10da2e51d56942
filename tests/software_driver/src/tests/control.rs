use std::ffi::CStr;
use std::ptr;

use super::*;
use crate::codes::{
    INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED,
    OUT_OF_MEMORY, UNKNOWN,
};

#[test]
fn a_driver_is_initialised_and_entered_first() {
    let _fresh = FreshDriver::new();
    let mut count = 0;
    assert_eq!(cuDeviceGetCount(&raw mut count), NOT_INITIALIZED);
    assert_eq!(cuCtxSynchronize(), NOT_INITIALIZED);
    state().config.init_code = UNKNOWN;
    assert_eq!(cuInit(0), UNKNOWN);
    state().config.init_code = SUCCESS;
    state().config.devices = 0;
    ok(cuInit(0));
    ok(cuDeviceGetCount(&raw mut count));
    assert_eq!((count, cuDevicePrimaryCtxRetain(&mut 0, 0)), (0, INVALID_DEVICE));
    state().config.devices = 3;
    ok(cuDeviceGetCount(&raw mut count));
    assert_eq!((count, cuCtxSynchronize()), (3, INVALID_CONTEXT));
    let mut context = 0;
    ok(cuDevicePrimaryCtxRetain(&raw mut context, 0));
    ok(cuCtxPushCurrent_v2(context));
    ok(cuCtxSynchronize());
    // Every thread has its own contexts.
    assert_eq!(std::thread::spawn(|| cuCtxSynchronize()).join().ok(), Some(INVALID_CONTEXT));
    assert_eq!(cuDevicePrimaryCtxRelease_v2(0), NOT_SUPPORTED);
    ok(cuCtxPopCurrent_v2(ptr::null_mut()));
    assert_eq!((cuCtxPopCurrent_v2(ptr::null_mut()), cuCtxSynchronize()), (INVALID_CONTEXT, INVALID_CONTEXT));
}

#[test]
fn calls_fail_once_as_planned() {
    let _fresh = FreshDriver::with_context();
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
fn what_a_test_chose_is_restored() {
    let _fresh = FreshDriver::with_context();
    let block = allocate(8);
    soft_break(700);
    soft_deinitialize();
    soft_set_capacity(1);
    soft_set_register_limit(1);
    soft_fail(c"cuMemFree_v2".as_ptr(), 1, 1);
    soft_restore();
    ok(cuMemFree_v2(block));
    allocate(8);
    locked(&[0; 8]);
}

#[test]
fn functions_are_found_in_the_version_that_is_asked_for() {
    let _fresh = FreshDriver::new();
    let mut function = ptr::null();
    let mut find = |name: &CStr, version| {
        let mut status = -1;
        let code = cuGetProcAddress_v2(name.as_ptr(), &raw mut function, version, 0, &raw mut status);
        (code, status, function.addr())
    };
    assert_eq!(find(c"cuFuncLoad", 12_040), (0, 0, cuFuncLoad as *const () as usize));
    assert_eq!(find(c"cuMemAlloc", 12_040), (0, 0, cuMemAlloc_v2 as *const () as usize));
    assert_eq!(find(c"cuFuncLoad", 12_000), (0, 2, 0));
    assert_eq!(find(c"cuNothing", 12_000), (0, 1, 0));
    state().config.version = 12_000;
    assert_eq!(find(c"cuFuncLoad", 12_040).0, INVALID_VALUE);
}
