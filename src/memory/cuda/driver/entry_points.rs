//! The driver functions that kvpool calls: names and parameters.

/// Passes the list to `$then`. `cuFuncLoad` came with CUDA 12.4 and is looked up by [`super::Driver`].
macro_rules! entry_points {
    ($then:ident) => {
        $then! {
            cuCtxGetCurrent(context: *mut ContextHandle);
            cuCtxGetDevice(device: *mut c_int);
            cuCtxPopCurrent_v2(context: *mut ContextHandle);
            cuCtxPushCurrent_v2(context: ContextHandle);
            cuDeviceGet(device: *mut c_int, ordinal: c_int);
            cuDeviceGetAttribute(value: *mut c_int, attribute: DeviceAttribute, device: c_int);
            cuDeviceGetCount(count: *mut c_int);
            cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, is_active: *mut c_int);
            cuDevicePrimaryCtxRetain(context: *mut ContextHandle, device: c_int);
            cuDriverGetVersion(version: *mut c_int);
            cuEventCreate(event: *mut EventHandle, flags: c_uint);
            cuEventQuery(event: EventHandle);
            cuEventRecord(event: EventHandle, stream: StreamHandle);
            cuEventSynchronize(event: EventHandle);
            cuFuncGetAttribute(value: *mut c_int, attribute: FunctionAttribute, function: FunctionHandle);
            cuGetErrorName(code: Code, name: *mut Text);
            cuGetProcAddress_v2(
                name: *const c_char,
                function: *mut *mut c_void,
                version: c_int,
                flags: u64,
                status: *mut LookupStatus
            );
            cuInit(flags: c_uint);
            cuLaunchKernel(
                function: FunctionHandle,
                grid_x: c_uint,
                grid_y: c_uint,
                grid_z: c_uint,
                block_x: c_uint,
                block_y: c_uint,
                block_z: c_uint,
                shared_bytes: c_uint,
                stream: StreamHandle,
                params: *mut *mut c_void,
                extra: *mut *mut c_void
            );
            cuMemAlloc_v2(address: *mut DevicePtr, bytes: usize);
            cuMemFreeHost(address: *mut c_void);
            cuMemFree_v2(address: DevicePtr);
            cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
            cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
            cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint);
            cuMemHostUnregister(address: *mut c_void);
            cuMemcpy2DAsync_v2(copy: *const Copy2d, stream: StreamHandle);
            cuMemcpyAsync(target: DevicePtr, source: DevicePtr, bytes: usize, stream: StreamHandle);
            cuMemcpyDtoHAsync_v2(target: *mut c_void, source: DevicePtr, bytes: usize, stream: StreamHandle);
            cuMemcpyHtoDAsync_v2(target: DevicePtr, source: *const c_void, bytes: usize, stream: StreamHandle);
            cuMemsetD8Async(address: DevicePtr, value: u8, bytes: usize, stream: StreamHandle);
            cuModuleGetFunction(function: *mut FunctionHandle, module: ModuleHandle, name: *const c_char);
            cuModuleLoadData(module: *mut ModuleHandle, image: *const c_void);
            cuModuleUnload(module: ModuleHandle);
            cuPointerGetAttribute(value: *mut c_void, attribute: PointerAttribute, address: DevicePtr);
            cuStreamCreate(stream: *mut StreamHandle, flags: c_uint);
            cuStreamIsCapturing(stream: StreamHandle, status: *mut CaptureStatus);
            cuStreamSynchronize(stream: StreamHandle);
            cuStreamWaitEvent(stream: StreamHandle, event: EventHandle, flags: c_uint);
            cuThreadExchangeStreamCaptureMode(mode: *mut CaptureMode);
        }
    };
}
pub(super) use entry_points;
