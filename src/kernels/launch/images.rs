//! The embedded kernels: PTX for every device, PTX for devices with more features, and machine code for the
//! most used ones.

use std::ffi::CStr;

use crate::memory::{Gpu, Image};

/// A compiled source file of kernels.
pub(super) struct Compiled {
    /// The PTX for every device.
    ptx: &'static str,
    /// The PTX for compute capability 9.0 and later.
    ptx_90: &'static str,
    /// Machine code, and its compute capability: devices with the same major number and at least this minor
    /// number run it.
    cubins: [((u32, u32), &'static [u8]); 4],
}

/// Aligned, since a loader of ELF may rely on it.
#[repr(C, align(16))]
struct Aligned<Bytes: ?Sized>(Bytes);

macro_rules! cubin {
    ($name:literal, $architecture:literal) => {{
        const CUBIN: &Aligned<[u8]> =
            &Aligned(*include_bytes!(concat!("../cubin/", $name, ".sm_", $architecture, ".cubin")));
        &CUBIN.0
    }};
}

macro_rules! compiled {
    ($name:literal) => {
        Compiled {
            ptx: concat!(include_str!(concat!("../", $name, ".ptx")), "\0"),
            ptx_90: concat!(include_str!(concat!("../", $name, ".sm_90.ptx")), "\0"),
            cubins: [
                ((8, 0), cubin!($name, "80")),
                ((9, 0), cubin!($name, "90")),
                ((10, 0), cubin!($name, "100")),
                ((12, 0), cubin!($name, "120")),
            ],
        }
    };
}

pub(super) const PLAN: Compiled = compiled!("plan");
pub(super) const ROWS: Compiled = compiled!("rows");
pub(super) const TABLE: Compiled = compiled!("table");

/// Returns PTX as the driver takes it, ending with a zero.
fn ptx(text: &'static str) -> Image<'static> {
    Image::Ptx(CStr::from_bytes_with_nul(text.as_bytes()).expect("PTX has a zero at its end only"))
}

impl Compiled {
    /// Returns the images to try on a device, best first.
    ///
    /// The machine code is from CUDA 12.9. A driver that is older, or is set to compile PTX only, uses the
    /// PTX.
    pub(super) fn images(&self, gpu: &Gpu) -> Vec<Image<'static>> {
        let (major, minor) = gpu.capability();
        let runs = |(of_major, from_minor): (u32, u32)| of_major == major && from_minor <= minor;
        let cubin = self.cubins.iter().find(|(capability, _)| runs(*capability));
        let newer = ((major, minor) >= (9, 0)).then(|| ptx(self.ptx_90));
        cubin.map(|(_, code)| Image::Cubin(code)).into_iter().chain(newer).chain([ptx(self.ptx)]).collect()
    }
}
