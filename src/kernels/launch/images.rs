//! The kernels as they are embedded: compiled for every device, and for those that can do more.

use std::ffi::CStr;

use crate::memory::{Gpu, Image};

/// A source file of kernels, compiled.
pub(super) struct Compiled {
    /// For every device.
    ptx: &'static CStr,
    /// For compute capability 9.0 and later.
    ptx_90: &'static CStr,
}

macro_rules! compiled {
    ($name:literal) => {
        Compiled {
            ptx: text(concat!(include_str!(concat!("../", $name, ".ptx")), "\0")),
            ptx_90: text(concat!(include_str!(concat!("../", $name, ".sm_90.ptx")), "\0")),
        }
    };
}

pub(super) const PLAN: Compiled = compiled!("plan");
pub(super) const ROWS: Compiled = compiled!("rows");
pub(super) const TABLE: Compiled = compiled!("table");

/// Zero-terminated, as the driver takes it.
const fn text(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("PTX holds no zero byte"),
    }
}

impl Compiled {
    /// What to try on a device, the best first.
    pub(super) fn images(&self, gpu: &Gpu) -> Vec<Image<'static>> {
        let newer = (gpu.capability() >= (9, 0)).then_some(Image::Ptx(self.ptx_90));
        newer.into_iter().chain([Image::Ptx(self.ptx)]).collect()
    }
}
