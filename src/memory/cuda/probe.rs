//! Availability of an NVIDIA driver and a device.

use crate::base::{Error, ErrorKind, Result};

use super::driver::Driver;

/// Returns the driver, if device `ordinal` can be used.
///
/// # Errors
/// [`ErrorKind::BackendUnavailable`] with the missing part.
pub(super) fn probe(ordinal: u32) -> Result<Driver> {
    let found = Driver::open().and_then(|driver| match why_unavailable(driver, ordinal) {
        Ok(None) => Ok(driver),
        Ok(Some(reason)) => Err(reason),
        Err(failure) => Err(failure.to_string()),
    });
    found.map_err(|reason| {
        Error::new(ErrorKind::BackendUnavailable, format!("device cuda:{ordinal} cannot be used: {reason}"))
    })
}

fn why_unavailable(driver: Driver, ordinal: u32) -> Result<Option<String>> {
    driver.init()?;
    let count = driver.device_count()?;
    if count <= ordinal {
        return Ok(Some(format!("the driver reports {count} devices and has no cuda:{ordinal}")));
    }
    Ok(None)
}
