//! What an NVIDIA driver offers on this machine.

use cudarc::driver::sys;

use crate::base::{Error, ErrorKind, Result};

use super::driver;

/// The oldest driver interface that has every entry point of the table cudarc is built with.
const DRIVER_VERSION: i32 = 12_000;

/// Checks that device `ordinal` can be used.
///
/// # Errors
/// [`ErrorKind::BackendUnavailable`] that names what is missing.
pub(super) fn probe(ordinal: u32) -> Result<()> {
    let reason = match why_unavailable(ordinal) {
        Ok(None) => return Ok(()),
        Ok(Some(reason)) => reason,
        Err(failure) => failure.to_string(),
    };
    Err(Error::new(ErrorKind::BackendUnavailable, format!("device cuda:{ordinal} cannot be used: {reason}")))
}

fn why_unavailable(ordinal: u32) -> Result<Option<String>> {
    // SAFETY: it only tries to load libraries by name.
    if !unsafe { sys::is_culib_present() } {
        return Ok(Some("no NVIDIA driver: libcuda.so.1 was not found by the dynamic loader".to_owned()));
    }
    if let Some(name) = missing_entry_point() {
        return Ok(Some(format!(
            "the library libcuda.so.1 is no driver that kvpool can use: it has no {name}"
        )));
    }
    let version = driver::version()?;
    if version < DRIVER_VERSION {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return Ok(Some(format!("the NVIDIA driver offers CUDA {major}.{minor}; at least 12.0 is needed")));
    }
    driver::init()?;
    let count = driver::device_count()?;
    if i64::from(count) <= i64::from(ordinal) {
        return Ok(Some(format!("the driver reports {count} devices and has no cuda:{ordinal}")));
    }
    Ok(None)
}

/// The first function of the driver that is not there, which cudarc would panic about.
fn missing_entry_point() -> Option<&'static str> {
    // SAFETY: the library is present.
    let library = unsafe { sys::culib() };
    driver::ENTRY_POINTS.into_iter().find(|name| {
        // SAFETY: the symbol is only looked for, not used as what it is said to be.
        unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err()
    })
}
