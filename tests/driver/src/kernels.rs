//! The kernels, as compiled for the host.

use std::ffi::{CStr, c_char, c_void};

#[repr(C)]
struct Kernel {
    name: *const c_char,
    params_bytes: usize,
    thread: unsafe extern "C" fn(*const c_void),
}

unsafe extern "C" {
    fn software_kernels(found: *mut *const Kernel) -> usize;
    fn software_run(kernel: *const Kernel, params: *const c_void, x: u32, y: u32, threads: u32);
}

fn all() -> &'static [Kernel] {
    let mut found = std::ptr::null();
    // SAFETY: `found` is room for one pointer.
    let count = unsafe { software_kernels(&raw mut found) };
    // SAFETY: the array is a static one of so many kernels.
    unsafe { std::slice::from_raw_parts(found, count) }
}

/// The number of the kernel with this name.
pub fn find(name: &CStr) -> Option<usize> {
    // SAFETY: every kernel has a name, a literal.
    all().iter().position(|kernel| unsafe { CStr::from_ptr(kernel.name) } == name)
}

pub fn name(kernel: usize) -> String {
    // SAFETY: as above.
    unsafe { CStr::from_ptr(all()[kernel].name) }.to_string_lossy().into_owned()
}

pub fn params_bytes(kernel: usize) -> usize {
    all()[kernel].params_bytes
}

/// Runs a kernel on parameters of its size.
pub fn run(kernel: usize, params: &[u64], [x, y]: [u32; 2], threads: u32) {
    // SAFETY: the parameters are as long as the kernel takes; what they point to is the launcher's business, as on a
    // device.
    unsafe { software_run(&raw const all()[kernel], params.as_ptr().cast(), x, y, threads) };
}
