//! The kernels as they are embedded: compiled for every device, and for those that can do more.

use std::ffi::CStr;

use crate::memory::{Gpu, Image};

/// A source file of kernels, compiled.
pub(super) struct Compiled {
    /// For every device.
    ptx: &'static str,
    /// For compute capability 9.0 and later.
    ptx_90: &'static str,
}

macro_rules! compiled {
    ($name:literal) => {
        Compiled {
            ptx: concat!(include_str!(concat!("../", $name, ".ptx")), "\0"),
            ptx_90: concat!(include_str!(concat!("../", $name, ".sm_90.ptx")), "\0"),
        }
    };
}

pub(super) const PLAN: Compiled = compiled!("plan");
pub(super) const ROWS: Compiled = compiled!("rows");
pub(super) const TABLE: Compiled = compiled!("table");

/// PTX as the driver takes it.
fn ptx(text: &'static str) -> Image<'static> {
    Image::Ptx(CStr::from_bytes_with_nul(text.as_bytes()).expect("PTX has a zero at its end only"))
}

impl Compiled {
    /// What to try on a device, the best first.
    pub(super) fn images(&self, gpu: &Gpu) -> Vec<Image<'static>> {
        let newer = (gpu.capability() >= (9, 0)).then(|| ptx(self.ptx_90));
        newer.into_iter().chain([ptx(self.ptx)]).collect()
    }
}
