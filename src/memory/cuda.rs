//! What an NVIDIA driver offers on this machine.
//!
//! Nothing here runs before somebody asks for a CUDA device: importing kvpool makes no driver call.

use cudarc::driver::sys;

/// The oldest driver interface that has every entry point of the table cudarc is built with.
const DRIVER_VERSION: i32 = 12_000;

/// Why device `ordinal` cannot be used, naming what was looked for.
pub(super) fn why_unavailable(ordinal: u32) -> String {
    match device_count() {
        Err(reason) => reason,
        Ok(count) if i64::from(count) <= i64::from(ordinal) => {
            format!("the driver reports {count} devices and has no cuda:{ordinal}")
        }
        Ok(_) => {
            "the driver and the device are there, but this version of kvpool has pools in host memory only; \
             pass device=\"cpu\""
                .to_owned()
        }
    }
}

/// The number of devices, or why there is none to ask for.
fn device_count() -> Result<i32, String> {
    // SAFETY: it only tries to load libraries by name.
    if !unsafe { sys::is_culib_present() } {
        return Err("no NVIDIA driver: libcuda.so.1 was not found by the dynamic loader".to_owned());
    }
    let mut version = 0;
    // SAFETY: the library is present, and the pointer is to a live integer.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    if version < DRIVER_VERSION {
        return Err(format!("the NVIDIA driver offers CUDA {version}; at least {DRIVER_VERSION} is needed"));
    }
    // SAFETY: the library is present; 0 is the only value that the flags may have.
    check("cuInit", unsafe { sys::cuInit(0) })?;
    let mut count = 0;
    // SAFETY: the driver is initialised, and the pointer is to a live integer.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    Ok(count)
}

fn check(call: &str, result: sys::CUresult) -> Result<(), String> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        failure => Err(format!("{call} failed with {failure:?}")),
    }
}
