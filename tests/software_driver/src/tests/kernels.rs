use std::ffi::{CStr, CString, c_uint};
use std::ptr;

use super::*;
use crate::codes::{
    INVALID_HANDLE, INVALID_IMAGE, INVALID_PTX, INVALID_VALUE, NO_BINARY_FOR_GPU, NOT_FOUND, NOT_SUPPORTED,
    UNSUPPORTED_PTX,
};
use crate::kernels;

/// `ReadParams` of the kernels: the numbers of an index, and where they go.
#[repr(C)]
pub struct ReadParams {
    data: u64,
    value: i64,
    step: i64,
    kind: i32,
    ndim: i32,
    strides: [i64; 8],
    shape: [i64; 8],
    out: u64,
    count: i64,
}

// The kinds of an index: an int32 tensor of one dimension, and computed numbers.
const NARROW: i32 = 0;
const COMPUTED: i32 = 3;

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
    ReadParams { data: 0, value: 5, step: 2, kind: COMPUTED, ndim: 0, strides, shape, out, count: 1 }
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
        ReadParams { data: list, value: 0, step: 0, kind: NARROW, ndim: 1, strides, shape, out, count: 2 };
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
    for (name, listed, bytes) in [
        ("kvpool_plan", "kvpool_plan_listed", 4096),
        ("kvpool_plan", "kvpool_plan_long", 12_288),
        ("kvpool_plan", "kvpool_plan_longest", 32_760),
        ("kvpool_gather", "kvpool_gather_listed", 4096),
    ] {
        let (plain, listed) = kernels::find(name).zip(kernels::find(listed)).expect("kernels");
        let params: Vec<u128> = (0..2048).collect();
        assert_eq!(listed.params_bytes(), bytes);
        assert_eq!(listed.addresses(&params).count(), plain.params_bytes() / 8);
        assert!(listed.addresses(&params).eq(plain.addresses(&params)));
    }
}

const LONGEST: &CStr = c"kvpool_plan_longest";

/// The kernel with the most parameters, of a cubin, which drivers of every version load.
fn longest() -> usize {
    let image = std::fs::read(format!("{KERNELS}/cubin/plan_long.sm_90.cubin")).unwrap_or_default();
    let (mut module, mut function) = (0, 0);
    ok(cuModuleLoadData(&raw mut module, image.as_ptr().cast()));
    ok(cuModuleGetFunction(&raw mut function, module, LONGEST.as_ptr()));
    ok(cuFuncLoad(function));
    function
}

/// Launches it for a plan without requests: only the ends of the offsets are written, to `out` and behind.
fn launch_longest(function: usize, out: u64, ends: [u32; 2], stream: usize) -> i32 {
    let mut params = vec![0; 32_760 / 8];
    params[9..11].copy_from_slice(&[out, out + 4]);
    params[16] = u64::from(ends[1]) << 32 | u64::from(ends[0]);
    let params = [params.as_ptr().cast::<u8>()];
    cuLaunchKernel(function, 1, 1, 1, 256, 1, 1, 0, stream, params.as_ptr(), ptr::null())
}

#[test]
fn drivers_from_12_1_on_take_long_parameters() {
    let _fresh = FreshDriver::with_context();
    let (function, out) = (longest(), allocate(8));
    state().config.version = 12_000;
    assert_eq!(launch_longest(function, out, [5, 9], 0), NOT_SUPPORTED);
    assert_eq!(soft_pending(0), 0);
    state().config.version = 12_010;
    ok(launch_longest(function, out, [5, 9], 0));
    ok(cuStreamSynchronize(0));
    assert_eq!(peek(out), [5, 0, 0, 0, 9, 0, 0, 0]);
}

#[test]
fn a_graph_has_a_copy_of_long_parameters() {
    let _fresh = FreshDriver::with_context();
    let (function, out, side) = (longest(), allocate(8), stream());
    ok(soft_begin_capture(side));
    ok(launch_longest(function, out, [6, 9], side));
    let graph = soft_end_capture(side);
    for _ in 0..2 {
        ok(launch_longest(function, out, [7, 9], side));
        ok(cuStreamSynchronize(side));
        assert_eq!(peek::<1>(out), [7]);
        ok(soft_replay(graph, side));
        ok(cuStreamSynchronize(side));
        assert_eq!(peek::<1>(out), [6]);
    }
}

#[test]
fn ptx_declares_what_its_version_allows() {
    let _fresh = FreshDriver::with_context();
    for (version, bytes, code) in [
        ("8.0", 4096, SUCCESS),
        ("8.0", 4104, INVALID_PTX),
        ("8.1", 4104, SUCCESS),
        ("8.1", 32_760, SUCCESS),
        ("8.1", 32_768, INVALID_PTX),
    ] {
        let head = format!(".version {version}\n.target sm_70\n.address_size 64\n");
        let text = format!("{head}.visible .entry a(\n\t.param .align 8 .b8 a_param_0[{bytes}]\n)");
        let ptx = CString::new(text).unwrap_or_default();
        assert_eq!(load(&ptx).0, code, "{bytes} bytes in PTX {version}");
    }
    let long = CString::new(std::fs::read(format!("{KERNELS}/plan_long.ptx")).unwrap_or_default());
    let long = long.unwrap_or_default();
    state().config.version = 12_000;
    assert_eq!(load(&long).0, UNSUPPORTED_PTX);
    state().config.version = 12_010;
    ok(load(&long).0);
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
