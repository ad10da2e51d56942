//! The allocator that PyTorch calls for memory of a workspace, as C symbols of the extension module.
//!
//! The signatures are those that `torch.cuda.memory.CUDAPluggableAllocator` asks for. PyTorch calls them with its own
//! locks held, from any thread, with or without the GIL: they touch no Python.

use std::ffi::{c_int, c_void};

use crate::base::Device;
use crate::memory::Stream;
use crate::pool::{give_back_segment, take_segment};

/// Takes `size` bytes from the workspace that this thread uses; null if it has none, or not so much.
#[unsafe(no_mangle)]
extern "C" fn kvpool_workspace_alloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let (Ok(bytes), Ok(ordinal)) = (usize::try_from(size), u32::try_from(device)) else {
        return std::ptr::null_mut();
    };
    let address = take_segment(bytes, Device::Cuda(ordinal), Stream::from_handle(stream.addr()));
    address.map_or(std::ptr::null_mut(), std::ptr::with_exposed_provenance_mut)
}

/// Gives back what [`kvpool_workspace_alloc`] gave.
#[unsafe(no_mangle)]
extern "C" fn kvpool_workspace_free(
    address: *mut c_void,
    _size: isize,
    _device: c_int,
    _stream: *mut c_void,
) {
    give_back_segment(address.addr());
}
