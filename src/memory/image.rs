//! Compiled kernels, in the forms that the driver loads.

use std::ffi::CStr;

/// Kernels in a form that the driver loads.
#[derive(Clone, Copy, Debug)]
pub enum Image<'a> {
    /// PTX, which the driver compiles for any device from an architecture on.
    Ptx(&'a CStr),
    /// Machine code, for the devices of one architecture.
    Cubin(&'a [u8]),
}

impl Image<'_> {
    /// Returns the address of the first byte.
    #[must_use]
    pub const fn address(&self) -> *const u8 {
        match self {
            Self::Ptx(text) => text.as_ptr().cast(),
            Self::Cubin(bytes) => bytes.as_ptr(),
        }
    }
}
