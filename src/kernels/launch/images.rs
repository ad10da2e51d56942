//! The embedded kernels: PTX for every device, PTX for devices with more features, and machine code for the
//! most used ones.

use std::ffi::CStr;

use crate::base::{Error, Result};
use crate::memory::{Gpu, Image};

/// The environment variable with the kind of image to load; without it, or if it is empty, the best that
/// suits.
const VARIABLE: &str = "KVPOOL_KERNELS";

/// The kinds of images to try.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    All,
    Ptx,
    Cubin,
}

impl Wanted {
    /// Returns what [`VARIABLE`] names.
    fn of_environment() -> Result<Self> {
        let value = std::env::var_os(VARIABLE).unwrap_or_default();
        match value.to_string_lossy().trim() {
            "" => Ok(Self::All),
            "ptx" => Ok(Self::Ptx),
            "cubin" => Ok(Self::Cubin),
            other => Err(Error::config(format!(
                "{VARIABLE} is {other:?}; it must be \"ptx\", \"cubin\" or empty, for the best that suits"
            ))),
        }
    }
}

/// A compiled source file of kernels.
pub(super) struct Compiled {
    /// The PTX for every device.
    ptx: &'static str,
    /// The PTX for compute capability 9.0 and later, if it has instructions that older ones lack.
    ptx_90: Option<&'static str>,
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
    ($name:literal, $newer:expr) => {
        Compiled {
            ptx: concat!(include_str!(concat!("../", $name, ".ptx")), "\0"),
            ptx_90: $newer,
            cubins: [
                ((8, 0), cubin!($name, "80")),
                ((9, 0), cubin!($name, "90")),
                ((10, 0), cubin!($name, "100")),
                ((12, 0), cubin!($name, "120")),
            ],
        }
    };
}

pub(super) const PLAN: Compiled = compiled!("plan", None);
/// For drivers from [`LONG_PARAMS_SINCE`](super::numbers::LONG_PARAMS_SINCE) on.
pub(super) const PLAN_LONG: Compiled = compiled!("plan_long", None);
pub(super) const ROWS: Compiled = compiled!("rows", Some(concat!(include_str!("../rows.sm_90.ptx"), "\0")));
pub(super) const TABLE: Compiled = compiled!("table", None);

/// Returns PTX as the driver takes it, ending with a zero.
fn ptx(text: &'static str) -> Image<'static> {
    Image::Ptx(CStr::from_bytes_with_nul(text.as_bytes()).expect("PTX has a zero at its end only"))
}

impl Compiled {
    /// Returns the images to try on a device, best first. `KVPOOL_KERNELS` limits them to one kind.
    ///
    /// The machine code is from CUDA 12.9, and an older driver uses the PTX. The driver's own variable
    /// `CUDA_FORCE_PTX_JIT` has no effect on it, as it has none on images that are not fat binaries.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for another value of the variable, and when
    /// there is no image of the kind for this device.
    pub(super) fn images(&self, gpu: &Gpu) -> Result<Vec<Image<'static>>> {
        let wanted = Wanted::of_environment()?;
        let (major, minor) = gpu.capability();
        let runs = |(of_major, from_minor): (u32, u32)| of_major == major && from_minor <= minor;
        let cubin = self.cubins.iter().find(|(capability, _)| runs(*capability));
        let cubin = cubin.map(|(_, code)| Image::Cubin(code)).filter(|_| wanted != Wanted::Ptx);
        if wanted == Wanted::Cubin {
            return cubin.map(|code| vec![code]).ok_or_else(|| {
                let [first, .., last] = self.cubins.map(|((major, minor), _)| format!("{major}.{minor}"));
                Error::config(format!(
                    "{VARIABLE} is \"cubin\", and there is no machine code for compute capability {major}.{minor}, \
                     only from {first} to {last}"
                ))
            });
        }
        let newer = self.ptx_90.filter(|_| (major, minor) >= (9, 0)).map(ptx);
        Ok(cubin.into_iter().chain(newer).chain([ptx(self.ptx)]).collect())
    }
}

#[cfg(test)]
impl Compiled {
    /// Returns the bytes of parameters of each kernel, as the PTX for every device declares them.
    pub(super) fn params_bytes(&self) -> Vec<(&str, usize)> {
        let entry = |text: &'static str| {
            let (name, rest) = text.split_once('(').expect("a name");
            let (_, rest) = rest.split_once('[').expect("an array of bytes");
            let (bytes, _) = rest.split_once(']').expect("its length");
            (name.trim(), bytes.parse().expect("a number"))
        };
        self.ptx.split(".entry ").skip(1).map(entry).collect()
    }
}
