use std::ffi::CStr;
use std::ptr;

use super::{
    Fresh, allocate, cuCtxSynchronize, cuDeviceGetCount, cuDriverGetVersion, cuEventQuery, cuFuncLoad,
    cuGetErrorName, cuGetErrorString, cuGetProcAddress_v2, cuInit, cuMemAlloc_v2, cuMemFree_v2,
    cuMemGetInfo_v2, cuMemsetD8Async, cuStreamSynchronize, event, locked, ok, soft_break, soft_deinitialize,
    soft_fail, soft_mend, soft_restore, soft_set_capacity, soft_set_register_limit, soft_set_version,
};
use crate::codes::{DEINITIALIZED, INVALID_VALUE};

fn name(code: i32) -> (i32, Option<&'static CStr>) {
    let mut name = ptr::null();
    let answer = cuGetErrorName(code, &raw mut name);
    // SAFETY: the driver gave a string that ends with a zero, or null.
    (answer, (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }))
}

#[test]
fn any_number_can_be_planned_and_newer_ones_have_names() {
    let _fresh = Fresh::with_context();
    for code in [36, 225, 226, 402, 721, 913, 914, 915, 916, 917, 9999, -1] {
        soft_fail(c"cuMemAlloc_v2".as_ptr(), 1, code);
        assert_eq!(cuMemAlloc_v2(&mut 0, 8), code);
        let is_known = code > 0 && code < 9999;
        assert_eq!(name(code).1.is_some(), is_known, "{code}");
    }
    assert_eq!(name(721), (0, Some(c"CUDA_ERROR_TENSOR_MEMORY_LEAK")));
    assert_eq!(name(913), (0, Some(c"CUDA_ERROR_FUNCTION_NOT_LOADED")));
    assert_eq!(name(9999), (INVALID_VALUE, None));
    let mut words = ptr::null();
    ok(cuGetErrorString(226, &raw mut words));
    assert!(!words.is_null());
    assert_eq!((cuGetErrorString(9999, &raw mut words), words), (INVALID_VALUE, ptr::null()));
}

#[test]
fn errors_that_break_a_context_stay() {
    let _fresh = Fresh::with_context();
    let (block, done) = (allocate(8), event());
    soft_break(721);
    for _ in 0..2 {
        let codes = [
            cuMemAlloc_v2(&mut 0, 8),
            cuMemFree_v2(block),
            cuMemsetD8Async(block, 1, 8, 0),
            cuStreamSynchronize(0),
            cuEventQuery(done),
            cuCtxSynchronize(),
            cuMemGetInfo_v2(&mut 0, &mut 0),
        ];
        assert_eq!(codes, [721; 7]);
    }
    assert_eq!(name(721).0, 0);
    ok(cuDeviceGetCount(&mut 0));
    soft_mend();
    ok(cuMemFree_v2(block));
}

#[test]
fn a_driver_that_goes_down_says_so() {
    let _fresh = Fresh::with_context();
    let block = allocate(8);
    soft_deinitialize();
    let codes = [cuInit(0), cuDeviceGetCount(&mut 0), cuMemFree_v2(block), cuCtxSynchronize()];
    assert_eq!(codes, [DEINITIALIZED; 4]);
    assert_eq!(name(DEINITIALIZED), (0, Some(c"CUDA_ERROR_DEINITIALIZED")));
    ok(cuDriverGetVersion(&mut 0));
    soft_mend();
    ok(cuMemFree_v2(block));
}

#[test]
fn what_a_test_chose_is_restored() {
    let _fresh = Fresh::with_context();
    let block = allocate(8);
    soft_break(700);
    soft_deinitialize();
    soft_set_version(12_000);
    soft_set_capacity(1);
    soft_set_register_limit(1);
    soft_fail(c"cuMemFree_v2".as_ptr(), 1, 1);
    soft_restore();
    ok(cuMemFree_v2(block));
    let mut version = 0;
    ok(cuDriverGetVersion(&raw mut version));
    assert_eq!(version, 13_020);
    allocate(8);
    locked(&[0; 8]);
}

#[test]
fn functions_are_found_in_the_version_that_is_asked_for() {
    let _fresh = Fresh::new();
    let mut function = ptr::null();
    let mut find = |name: &CStr, version| {
        let mut status = -1;
        let code = cuGetProcAddress_v2(name.as_ptr(), &raw mut function, version, 0, &raw mut status);
        (code, status, function.addr())
    };
    assert_eq!(find(c"cuFuncLoad", 12_040), (0, 0, cuFuncLoad as *const () as usize));
    assert_eq!(find(c"cuFuncLoad", 12_000), (0, 2, 0));
    assert_eq!(find(c"cuNothing", 12_000), (0, 1, 0));
    soft_set_version(12_000);
    assert_eq!(find(c"cuFuncLoad", 12_040).0, INVALID_VALUE);
}
