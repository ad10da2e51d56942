use super::*;
use crate::codes::{INVALID_VALUE, NO_DEVICE, NOT_SUPPORTED};

unsafe extern "C" {
    safe fn cudaGetDeviceCount(count: *mut c_int) -> c_int;
    safe fn cudaGetDevice(device: *mut c_int) -> c_int;
    safe fn cudaSetDevice(device: c_int) -> c_int;
    safe fn cudaFree(address: usize) -> c_int;
    safe fn cudaGetLastError() -> c_int;
    safe fn cudaLaunchKernel() -> c_int;
}

#[test]
fn errors_are_kept_until_asked_for() {
    let _fresh = FreshDriver::new();
    assert_eq!(
        (cudaLaunchKernel(), cudaGetLastError(), cudaGetLastError()),
        (NOT_SUPPORTED, NOT_SUPPORTED, SUCCESS)
    );
    assert_eq!((cudaFree(1), cudaGetLastError()), (INVALID_VALUE, INVALID_VALUE));
    let mut device = -1;
    ok(cudaSetDevice(1));
    ok(cudaGetDevice(&raw mut device));
    assert_eq!(device, 1);
    state().config.devices = 0;
    assert_eq!(cudaGetDeviceCount(&raw mut device), NO_DEVICE);
}
