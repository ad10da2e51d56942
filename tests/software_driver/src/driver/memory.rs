//! Device memory and page-locked memory.

use std::ffi::{c_int, c_uint, c_void};

use crate::codes::{INVALID_VALUE, NOT_SUPPORTED};
use crate::contexts;
use crate::memory::Place;
use crate::operations::check;

use super::{host, put};

/// `CU_MEMHOSTALLOC_PORTABLE`, `DEVICEMAP` and `WRITECOMBINED`.
const HOST_ALLOC_FLAGS: c_uint = 7;
/// `CU_MEMHOSTREGISTER_PORTABLE`, `DEVICEMAP`, `IOMEMORY` and `READ_ONLY`.
const HOST_REGISTER_FLAGS: c_uint = 15;

super::exports! {
    Context cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |call| {
        put(free, call.state.memory.free_bytes(call.device))?;
        put(total, call.state.memory.capacity)
    };
    Context cuMemAlloc_v2(address: *mut u64, bytes: usize) |call| {
        check(!address.is_null(), INVALID_VALUE)?;
        put(address, call.state.allocate(call.device, bytes)? as u64)
    };
    Context cuMemFree_v2(address: u64) |call| call.state.free(host(address), false);
    Context cuMemHostAlloc(address: *mut usize, bytes: usize, flags: c_uint) |call| {
        check(!address.is_null() && flags <= HOST_ALLOC_FLAGS, INVALID_VALUE)?;
        put(address, call.state.allocate_locked(bytes)?)
    };
    Context cuMemAllocHost_v2(address: *mut usize, bytes: usize) |call| {
        check(!address.is_null(), INVALID_VALUE)?;
        put(address, call.state.allocate_locked(bytes)?)
    };
    Context cuMemFreeHost(address: usize) |call| call.state.free_locked(address);
    Context cuMemHostRegister_v2(address: usize, bytes: usize, flags: c_uint) |call| {
        check(flags <= HOST_REGISTER_FLAGS, INVALID_VALUE)?;
        call.state.register(address, bytes)
    };
    Context cuMemHostUnregister(address: usize) |call| call.state.unregister(address);
    Context cuMemHostGetDevicePointer_v2(address: *mut u64, pointer: usize, flags: c_uint) |call| {
        check(flags == 0 && call.state.memory.place(pointer, 1) == Place::Locked, INVALID_VALUE)?;
        put(address, pointer as u64)
    };
    Init cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: u64) |call| {
        let place = call.state.memory.place(host(address), 1);
        let device = match place {
            Place::Device(device) => device,
            Place::Locked => 0,
            Place::Pageable | Place::Nowhere => return Err(INVALID_VALUE),
        };
        let is_device = place != Place::Locked;
        match attribute {
            // CONTEXT
            1 => put(data.cast(), contexts::handle(device)),
            // MEMORY_TYPE: 1 is host, 2 device.
            2 => put(data.cast(), if is_device { 2u32 } else { 1 }),
            // DEVICE_POINTER
            3 => put(data.cast(), address),
            // HOST_POINTER
            4 => if is_device { Err(INVALID_VALUE) } else { put(data.cast(), address) },
            // IS_MANAGED
            8 => put(data.cast(), 0u32),
            // DEVICE_ORDINAL
            9 => put(data.cast(), c_int::try_from(device).unwrap_or(c_int::MAX)),
            _ => Err(NOT_SUPPORTED),
        }
    };
}
