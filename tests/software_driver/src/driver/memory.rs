//! Device memory and page-locked memory.

use std::ffi::{c_int, c_uint};

use crate::codes::{INVALID_VALUE, NOT_SUPPORTED};
use crate::memory::Place;
use crate::operations::check;

use super::{host, put, put_new};

/// `CU_MEMHOSTALLOC_PORTABLE`, `DEVICEMAP` and `WRITECOMBINED`.
const HOST_ALLOC_FLAGS: c_uint = 7;
/// `CU_MEMHOSTREGISTER_PORTABLE`, `DEVICEMAP`, `IOMEMORY` and `READ_ONLY`.
const HOST_REGISTER_FLAGS: c_uint = 15;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
const MEMORY_TYPE: c_int = 2;

super::exports! {
    Context cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |call| {
        put(free, call.state.memory.free_bytes(call.device))?;
        put(total, call.state.memory.capacity)
    };
    Context cuMemAlloc_v2(address: *mut u64, bytes: usize) |call| {
        put_new(address, || call.state.allocate(call.device, bytes).map(|start| start as u64))
    };
    Context cuMemFree_v2(address: u64) |call| call.state.free(host(address), false);
    Context cuMemHostAlloc(address: *mut usize, bytes: usize, flags: c_uint) |call| {
        check(flags <= HOST_ALLOC_FLAGS, INVALID_VALUE)?;
        put_new(address, || call.state.allocate_locked(bytes))
    };
    Context cuMemFreeHost(address: usize) |call| call.state.free_locked(address);
    Context cuMemHostRegister_v2(address: usize, bytes: usize, flags: c_uint) |call| {
        check(flags <= HOST_REGISTER_FLAGS, INVALID_VALUE)?;
        call.state.register(address, bytes)
    };
    Context cuMemHostUnregister(address: usize) |call| call.state.unregister(address);
    Context cuPointerGetAttribute(value: *mut c_uint, attribute: c_int, address: u64) |call| {
        check(attribute == MEMORY_TYPE, NOT_SUPPORTED)?;
        // `CUmemorytype`.
        put(value, match call.state.memory.place(host(address), 1) {
            Place::Locked => 1,
            Place::Device(_) => 2,
            Place::Pageable | Place::Nowhere => return Err(INVALID_VALUE),
        })
    };
}
