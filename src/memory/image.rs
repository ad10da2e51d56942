//! Compiled kernels.

use std::ffi::CStr;

/// Kernels as the driver takes them.
#[derive(Clone, Copy, Debug)]
pub enum Image<'a> {
    /// Text that the driver compiles, for any device from an architecture on.
    Ptx(&'a CStr),
    /// Machine code, for devices of one architecture.
    Cubin(&'a [u8]),
}

impl Image<'_> {
    /// Where it begins.
    #[must_use]
    pub const fn address(&self) -> *const u8 {
        match self {
            Self::Ptx(text) => text.as_ptr().cast(),
            Self::Cubin(bytes) => bytes.as_ptr(),
        }
    }
}
