//! The allocator through which PyTorch takes memory of a workspace, as C symbols of the extension module.
//!
//! `torch.cuda.memory.CUDAPluggableAllocator` defines the signatures. PyTorch calls these functions with its
//! own locks held, from any thread, with or without the GIL: they touch no Python objects.

use std::ffi::{c_int, c_void};

use crate::base::Device;
use crate::memory::Stream;
use crate::pool::{give_back_segment, take_segment};

/// Takes `size` bytes from the workspace that this thread has entered. Null if there is none, or too few
/// bytes are left.
#[unsafe(no_mangle)]
extern "C" fn kvpool_workspace_alloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let (Ok(bytes), Ok(ordinal)) = (usize::try_from(size), u32::try_from(device)) else {
        return std::ptr::null_mut();
    };
    // SAFETY: PyTorch keeps its streams for the life of the process. 2, which is none, is told by `leave`.
    let stream = unsafe { Stream::from_handle(stream.addr(), ordinal) };
    let address = take_segment(bytes, Device::Cuda(ordinal), stream);
    address.map_or(std::ptr::null_mut(), std::ptr::with_exposed_provenance_mut)
}

/// Gives back memory of [`kvpool_workspace_alloc`].
#[unsafe(no_mangle)]
extern "C" fn kvpool_workspace_free(
    address: *mut c_void,
    _size: isize,
    _device: c_int,
    _stream: *mut c_void,
) {
    give_back_segment(address.addr());
}
