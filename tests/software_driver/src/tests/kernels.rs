use std::ffi::{CStr, CString, c_uint};
use std::ptr;

use super::*;
use crate::codes::{
    INVALID_HANDLE, INVALID_IMAGE, INVALID_PTX, INVALID_VALUE, NO_BINARY_FOR_GPU, NOT_FOUND, UNSUPPORTED_PTX,
};
use crate::kernels;

/// `ReadParams` of the kernels: the numbers of an index, and where they go.
#[repr(C)]
pub struct ReadParams {
    data: u64,
    value: i64,
    step: i64,
    is_wide: i32,
    ndim: i32,
    shape: [i64; 8],
    strides: [i64; 8],
    out: u64,
    count: i64,
}

const KERNELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../src/kernels");
const NAME: &CStr = c"kvpool_read_indices";

/// Whether a function is in the memory of the device.
pub fn is_loaded(function: usize) -> bool {
    let mut is_loaded = -1;
    ok(cuFuncIsLoaded(&raw mut is_loaded, function));
    is_loaded == 1
}

fn ptx() -> CString {
    CString::new(std::fs::read(format!("{KERNELS}/table.ptx")).unwrap_or_default()).unwrap_or_default()
}

fn load(ptx: &CStr) -> (i32, usize) {
    let mut module = 0;
    (cuModuleLoadData(&raw mut module, ptx.as_ptr()), module)
}

pub fn function() -> usize {
    let (code, module) = load(&ptx());
    ok(code);
    let mut function = 0;
    ok(cuModuleGetFunction(&raw mut function, module, NAME.as_ptr()));
    function
}

pub fn launch(function: usize, grid: c_uint, block: c_uint, params: &ReadParams, stream: usize) -> i32 {
    let params = [ptr::from_ref(params).cast::<u8>()];
    cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, params.as_ptr(), ptr::null())
}

/// The parameters of a launch that writes `5` to the eight bytes at `out`.
pub fn five(out: u64) -> ReadParams {
    let (shape, strides) = ([0; 8], [0; 8]);
    ReadParams { data: 0, value: 5, step: 2, is_wide: 0, ndim: 0, shape, strides, out, count: 1 }
}

#[test]
fn kernels_run_late_with_the_parameters_of_the_call() {
    let _fresh = FreshDriver::with_context();
    let (function, side) = (function(), stream());
    let (list, out) = (allocate(8), allocate(16));
    let source = locked(&[7, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF]);
    ok(cuMemcpyHtoDAsync_v2(list, source, 8, side));
    let (shape, strides) = ([2, 1, 1, 1, 1, 1, 1, 1], [1; 8]);
    let mut params =
        ReadParams { data: list, value: 0, step: 0, is_wide: 0, ndim: 1, shape, strides, out, count: 2 };
    ok(launch(function, 1, 256, &params, side));
    // Nor does the caller have to keep it as it was.
    params.count = 1000;
    std::hint::black_box(&params);
    assert_eq!((soft_pending(side), peek(out)), (2, [0xA5; 16]));
    write_host(source, &[9]);
    ok(cuStreamSynchronize(side));
    assert_eq!(peek(out), [9, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF]);
}

#[test]
fn numbers_of_a_list_are_not_taken_for_addresses() {
    for name in ["kvpool_plan", "kvpool_gather"] {
        let (plain, listed) = (kernels::find(name), kernels::find(&format!("{name}_listed")));
        let (plain, listed) = plain.zip(listed).expect("kernels");
        let params: Vec<u128> = (0..256).collect();
        assert_eq!(listed.params_bytes(), 4096);
        assert_eq!(listed.addresses(&params).count(), plain.params_bytes() / 8);
        assert!(listed.addresses(&params).eq(plain.addresses(&params)));
    }
}

#[test]
fn launches_are_checked() {
    let _fresh = FreshDriver::with_context();
    let (function, out) = (function(), allocate(8));
    let params = five(out);
    assert_eq!(launch(function, 0, 256, &params, 0), INVALID_VALUE);
    assert_eq!(launch(function, 1, 128, &params, 0), INVALID_VALUE);
    assert_eq!(launch(function + 1, 1, 256, &params, 0), INVALID_HANDLE);
    assert_eq!(launch(function, 1, 256, &params, 12), INVALID_HANDLE);
    assert_eq!(soft_pending(0), 0);
    assert!(!is_loaded(function));
    ok(launch(function, 3, 256, &params, 0));
    assert!(is_loaded(function));
    ok(cuStreamSynchronize(0));
    assert_eq!(peek(out), [5, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn kernels_die_where_a_device_would_fail() {
    let _fresh = FreshDriver::with_context();
    let (function, out) = (function(), allocate(256));
    let misaligned = out + 1;
    for (out, count) in [(misaligned, 1), (out, 33)] {
        let params = ReadParams { count, ..five(out) };
        let side = stream();
        ok(launch(function, 1, 256, &params, side));
        assert!(dies(|| ok(soft_run(side))));
    }
}

#[test]
fn modules_are_ptx_that_the_driver_knows() {
    let _fresh = FreshDriver::with_context();
    assert_eq!(load(c"\x7fELF").0, INVALID_IMAGE);
    assert_eq!(load(c"hello").0, INVALID_PTX);
    let (code, module) = load(&ptx());
    ok(code);
    let mut function = 0;
    assert_eq!(cuModuleGetFunction(&raw mut function, module, c"kvpool_nothing".as_ptr()), NOT_FOUND);
    assert_eq!(cuModuleGetFunction(&raw mut function, module + 1, NAME.as_ptr()), INVALID_HANDLE);
    state().config.version = 12_000;
    ok(load(&ptx()).0);
    state().config.version = 11_080;
    assert_eq!(load(&ptx()).0, UNSUPPORTED_PTX);
    soft_set_capability(8, 9);
    assert_eq!(load(c".version 8.0\n.target sm_90\n.address_size 64\n").0, INVALID_PTX);
}

#[test]
fn cubins_are_for_one_generation() {
    let _fresh = FreshDriver::with_context();
    for (major, minor) in [(8, 0), (8, 9), (9, 0), (10, 3), (11, 0), (12, 1)] {
        soft_set_capability(major, minor);
        for architecture in [80, 90, 100, 120] {
            let path = format!("{KERNELS}/cubin/table.sm_{architecture}.cubin");
            let image = std::fs::read(&path).unwrap_or_default();
            let code = cuModuleLoadData(&mut 0, image.as_ptr().cast());
            let expected = if architecture == 10 * major { SUCCESS } else { NO_BINARY_FOR_GPU };
            assert_eq!(code, expected, "{path} on {major}.{minor}");
        }
    }
}
