//! The driver's functions, each checked and named.
//!
//! All are called after the probe found every entry point that this file names, so none of them can panic for want
//! of a symbol. Handles are plain numbers here, so that they cross threads.

use std::ffi::{CStr, c_void};

use cudarc::driver::sys::{self, CUresult};

use crate::base::{Error, ErrorKind, Result};
use crate::memory::Image;

use super::gpu::address;

/// The entry points that this file uses, which the probe looks for.
pub(super) const ENTRY_POINTS: [&str; 36] = [
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyAsync",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
];

/// What the driver answers when it lacks memory.
const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;

/// The error for a call that failed.
fn failed(call: &str, result: CUresult) -> Error {
    Error::new(ErrorKind::Driver, format!("{call} failed with {result:?}"))
}

/// Calls a driver function and turns its answer into a `Result`.
macro_rules! checked {
    ($name:ident($($argument:expr),*)) => {{
        // SAFETY: the entry point is there, since the probe found it. What the arguments point to is live for the
        // call, and handles are of objects that their owners keep.
        let result = unsafe { sys::$name($($argument),*) };
        if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failed(stringify!($name), result)) }
    }};
}

/// While it lives, this thread may make calls that CUDA forbids to all threads while somebody captures a stream, since
/// most programs mean to have them captured: to free memory, say, or to query an event of another stream.
pub(super) struct Relaxed {
    before: sys::CUstreamCaptureMode,
}

pub(super) fn relax() -> Result<Relaxed> {
    let mut before = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    checked!(cuThreadExchangeStreamCaptureMode(&raw mut before))?;
    Ok(Relaxed { before })
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // It was set by us; if it cannot be set back, the driver is going away.
        let _: Result<()> = checked!(cuThreadExchangeStreamCaptureMode(&raw mut self.before));
    }
}

pub(super) fn version() -> Result<i32> {
    let mut version = 0;
    checked!(cuDriverGetVersion(&raw mut version))?;
    Ok(version)
}

pub(super) fn init() -> Result<()> {
    checked!(cuInit(0))
}

pub(super) fn device_count() -> Result<i32> {
    let mut count = 0;
    checked!(cuDeviceGetCount(&raw mut count))?;
    Ok(count)
}

/// The primary context of device `ordinal`, which stays for the life of the process.
pub(super) fn retain_context(ordinal: i32) -> Result<usize> {
    let mut device = 0;
    checked!(cuDeviceGet(&raw mut device, ordinal))?;
    let mut context = std::ptr::null_mut();
    checked!(cuDevicePrimaryCtxRetain(&raw mut context, device))?;
    Ok(context.addr())
}

/// The compute capability of device `ordinal`, major and minor.
pub(super) fn capability(ordinal: i32) -> Result<(u32, u32)> {
    let mut device = 0;
    checked!(cuDeviceGet(&raw mut device, ordinal))?;
    let ask = |attribute| {
        let mut value = 0;
        checked!(cuDeviceGetAttribute(&raw mut value, attribute, device))?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let major = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    let minor = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
    Ok((ask(major)?, ask(minor)?))
}

pub(super) fn current_context() -> Result<usize> {
    let mut context = std::ptr::null_mut();
    checked!(cuCtxGetCurrent(&raw mut context))?;
    Ok(context.addr())
}

/// The device of the current context.
pub(super) fn current_device() -> Result<i32> {
    let mut device = 0;
    checked!(cuCtxGetDevice(&raw mut device))?;
    Ok(device)
}

pub(super) fn push_context(context: usize) -> Result<()> {
    checked!(cuCtxPushCurrent_v2(handle(context)))
}

pub(super) fn pop_context() -> Result<()> {
    let mut context = std::ptr::null_mut();
    checked!(cuCtxPopCurrent_v2(&raw mut context))
}

/// Bytes of device memory: free, and in all.
pub(super) fn memory_info() -> Result<(usize, usize)> {
    let (mut free, mut total) = (0, 0);
    checked!(cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
    Ok((free, total))
}

/// Device memory, or `None` when there is not enough.
pub(super) fn allocate(bytes: usize) -> Result<Option<u64>> {
    let mut address = 0;
    // SAFETY: as in `checked`.
    match unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) } {
        CUresult::CUDA_SUCCESS => Ok(Some(address)),
        OUT_OF_MEMORY => Ok(None),
        result => Err(failed("cuMemAlloc_v2", result)),
    }
}

pub(super) fn free(address: u64) -> Result<()> {
    checked!(cuMemFree_v2(address))
}

/// Page-locked host memory that every context and every kernel may use, or `None` when there is not enough.
pub(super) fn allocate_host(bytes: usize) -> Result<Option<*mut u8>> {
    let mut address: *mut c_void = std::ptr::null_mut();
    let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
    // SAFETY: as in `checked`.
    match unsafe { sys::cuMemHostAlloc(&raw mut address, bytes, flags) } {
        CUresult::CUDA_SUCCESS => Ok(Some(address.cast())),
        OUT_OF_MEMORY => Ok(None),
        result => Err(failed("cuMemHostAlloc", result)),
    }
}

pub(super) fn free_host(address: *mut u8) -> Result<()> {
    checked!(cuMemFreeHost(address.cast()))
}

/// Page-locks host memory of others for every context. `false` if part of it is page-locked already.
pub(super) fn register_host(address: *mut u8, bytes: usize) -> Result<bool> {
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
    // SAFETY: as in `checked`.
    match unsafe { sys::cuMemHostRegister_v2(address.cast(), bytes, flags) } {
        CUresult::CUDA_SUCCESS => Ok(true),
        CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => Ok(false),
        result => Err(failed("cuMemHostRegister_v2", result)),
    }
}

pub(super) fn unregister_host(address: usize) -> Result<()> {
    checked!(cuMemHostUnregister(handle(address)))
}

/// Enqueues a copy between any two places. From or to pageable memory it is done, or has read its source, on return.
pub(super) fn copy(target: u64, source: u64, bytes: usize, stream: usize) -> Result<()> {
    checked!(cuMemcpyAsync(target, source, bytes, handle(stream)))
}

/// One side of a copy of rows, which lie `pitch` bytes apart.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) address: *mut u8,
    pub(super) pitch: usize,
    /// Where the address means host memory.
    pub(super) is_on_host: bool,
}

/// As [`copy`], for `height` rows of `width` bytes.
pub(super) fn copy_2d(target: Rows, source: Rows, [height, width]: [usize; 2], stream: usize) -> Result<()> {
    let kind = |rows: Rows| {
        if rows.is_on_host {
            sys::CUmemorytype::CU_MEMORYTYPE_HOST
        } else {
            sys::CUmemorytype::CU_MEMORYTYPE_DEVICE
        }
    };
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: kind(source),
        srcHost: source.address.cast(),
        srcDevice: address(source.address),
        srcArray: std::ptr::null_mut(),
        srcPitch: source.pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: kind(target),
        dstHost: target.address.cast(),
        dstDevice: address(target.address),
        dstArray: std::ptr::null_mut(),
        dstPitch: target.pitch,
        WidthInBytes: width,
        Height: height,
    };
    checked!(cuMemcpy2DAsync_v2(&raw const copy, handle(stream)))
}

pub(super) fn fill(address: u64, value: u8, bytes: usize, stream: usize) -> Result<()> {
    checked!(cuMemsetD8Async(address, value, bytes, handle(stream)))
}

pub(super) fn copy_to_device(target: u64, source: *const u8, bytes: usize, stream: usize) -> Result<()> {
    checked!(cuMemcpyHtoDAsync_v2(target, source.cast(), bytes, handle(stream)))
}

pub(super) fn copy_to_host(target: *mut u8, source: u64, bytes: usize, stream: usize) -> Result<()> {
    checked!(cuMemcpyDtoHAsync_v2(target.cast(), source, bytes, handle(stream)))
}

pub(super) fn synchronize(stream: usize) -> Result<()> {
    checked!(cuStreamSynchronize(handle(stream)))
}

pub(super) fn synchronize_context() -> Result<()> {
    checked!(cuCtxSynchronize())
}

pub(super) fn is_capturing(stream: usize) -> Result<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    checked!(cuStreamIsCapturing(handle(stream), &raw mut status))?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

pub(super) fn create_event() -> Result<usize> {
    let mut event = std::ptr::null_mut();
    let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
    checked!(cuEventCreate(&raw mut event, flags))?;
    Ok(event.addr())
}

pub(super) fn record_event(event: usize, stream: usize) -> Result<()> {
    checked!(cuEventRecord(handle(event), handle(stream)))
}

pub(super) fn event_passed(event: usize) -> Result<bool> {
    // SAFETY: as in `checked`.
    match unsafe { sys::cuEventQuery(handle(event)) } {
        CUresult::CUDA_SUCCESS => Ok(true),
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        result => Err(failed("cuEventQuery", result)),
    }
}

pub(super) fn wait_for_event(event: usize) -> Result<()> {
    checked!(cuEventSynchronize(handle(event)))
}

/// Lets what is enqueued on `stream` from now on wait for `event`.
pub(super) fn order_after(stream: usize, event: usize) -> Result<()> {
    checked!(cuStreamWaitEvent(handle(stream), handle(event), 0))
}

/// Loads kernels into the current context; what is in the way, if it is that this image does not suit.
pub(super) fn load_module(image: &Image<'_>) -> Result<Result<usize>> {
    let mut module = std::ptr::null_mut();
    // SAFETY: as in `checked`; the image is whole, and its text ends with a zero.
    match unsafe { sys::cuModuleLoadData(&raw mut module, image.address().cast()) } {
        CUresult::CUDA_SUCCESS => Ok(Ok(module.addr())),
        result @ (CUresult::CUDA_ERROR_INVALID_IMAGE
        | CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
        | CUresult::CUDA_ERROR_INVALID_PTX
        | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION) => Ok(Err(failed("cuModuleLoadData", result))),
        result => Err(failed("cuModuleLoadData", result)),
    }
}

pub(super) fn unload_module(module: usize) -> Result<()> {
    checked!(cuModuleUnload(handle(module)))
}

/// A kernel of a module, loaded now: the first launch may be within a stream capture, where nothing can be loaded.
pub(super) fn function(module: usize, name: &CStr) -> Result<usize> {
    let mut function = std::ptr::null_mut();
    checked!(cuModuleGetFunction(&raw mut function, handle(module), name.as_ptr()))?;
    let mut registers = 0;
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
    checked!(cuFuncGetAttribute(&raw mut registers, attribute, function))?;
    Ok(function.addr())
}

/// Launches a kernel of one parameter.
///
/// # Safety
/// `params` points to what the kernel takes, and every address in it is valid for what the kernel does with it.
pub(super) unsafe fn launch(
    function: usize,
    [x, y]: [u32; 2],
    threads: u32,
    params: *const c_void,
    stream: usize,
) -> Result<()> {
    let mut arguments = [params.cast_mut()];
    checked!(cuLaunchKernel(
        handle(function),
        x,
        y,
        1,
        threads,
        1,
        1,
        0,
        handle(stream),
        arguments.as_mut_ptr(),
        std::ptr::null_mut()
    ))
}

/// A handle as the driver's types have it.
const fn handle<T>(number: usize) -> *mut T {
    std::ptr::without_provenance_mut(number)
}
