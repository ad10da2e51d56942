//! The kernels as they are embedded: PTX for every device, PTX for those that can do more, and machine code for those
//! that most use.

use std::ffi::CStr;

use crate::memory::{Gpu, Image};

/// A source file of kernels, compiled.
pub(super) struct Compiled {
    /// For every device.
    ptx: &'static str,
    /// For compute capability 9.0 and later.
    ptx_90: &'static str,
    /// Machine code, and the compute capability that it is for: devices of the same major number that have no smaller
    /// minor one run it.
    cubins: [((u32, u32), &'static [u8]); 4],
}

/// Aligned, as a loader of ELF may count on.
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

/// PTX as the driver takes it.
fn ptx(text: &'static str) -> Image<'static> {
    Image::Ptx(CStr::from_bytes_with_nul(text.as_bytes()).expect("PTX has a zero at its end only"))
}

impl Compiled {
    /// What to try on a device, the best first.
    ///
    /// The machine code is of CUDA 12.9. A driver that is too old for it, or that was told to compile PTX only, takes the
    /// PTX.
    pub(super) fn images(&self, gpu: &Gpu) -> Vec<Image<'static>> {
        let (major, minor) = gpu.capability();
        let runs = |(of_major, from_minor): (u32, u32)| of_major == major && from_minor <= minor;
        let cubin = self.cubins.iter().find(|(capability, _)| runs(*capability));
        let newer = ((major, minor) >= (9, 0)).then(|| ptx(self.ptx_90));
        cubin.map(|(_, code)| Image::Cubin(code)).into_iter().chain(newer).chain([ptx(self.ptx)]).collect()
    }
}
