//! Devices and their primary contexts.

use std::ffi::{c_char, c_int, c_uint};

use crate::codes::{INVALID_VALUE, SUCCESS};
use crate::contexts;
use crate::operations::{check, check_up};
use crate::state::{Config, go_down_at_exit, watch_for_forks};

use super::put;

/// The name of devices.
pub const NAME: &[u8] = b"Software device";
/// One more than the greatest number of an attribute.
const ATTRIBUTES_END: c_int = 150;

/// An attribute of any device, as those of an H200.
pub fn attribute(number: c_int, config: &Config) -> Option<c_int> {
    Some(match number {
        1..=3 => 1024,
        4 => 64,
        5 | 11 => c_int::MAX,
        6 | 7 => 65_535,
        8 => 49_152,
        9 | 12 | 82 => 65_536,
        10 | 106 => 32,
        13 => 1_980_000,
        14 => 512,
        15 | 19 | 31 | 32 | 41 | 78..=80 => 1,
        16 => 132,
        36 => 3_201_000,
        37 => 6144,
        38 => 62_914_560,
        39 => 2048,
        40 => 3,
        75 => config.capability.0,
        76 => config.capability.1,
        81 => 233_472,
        91 => config.uses_host_pointers.into(),
        97 => 232_448,
        _ if (1..ATTRIBUTES_END).contains(&number) => 0,
        _ => return None,
    })
}

super::exports! {
    Nothing cuInit(flags: c_uint) |call| {
        check_up()?;
        check(flags == 0, INVALID_VALUE)?;
        check(call.state.config.init_code == SUCCESS, call.state.config.init_code)?;
        call.state.is_initialized = true;
        watch_for_forks();
        go_down_at_exit();
        Ok(())
    };
    Nothing cuDriverGetVersion(version: *mut c_int) |call| put(version, call.state.config.version);
    Init cuDeviceGetCount(count: *mut c_int) |call| {
        put(count, c_int::try_from(call.state.config.devices).unwrap_or(c_int::MAX))
    };
    Init cuDeviceGet(device: *mut c_int, ordinal: c_int) |call| {
        call.device(ordinal)?;
        put(device, ordinal)
    };
    Init cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) |call| {
        call.device(device)?;
        let room = usize::try_from(len).unwrap_or(0);
        check(!name.is_null() && room > 0, INVALID_VALUE)?;
        // SAFETY: the caller gives room for `len` bytes.
        let target = unsafe { std::slice::from_raw_parts_mut(name.cast::<u8>(), room) };
        let shown = NAME.len().min(room - 1);
        target[..shown].copy_from_slice(&NAME[..shown]);
        target[shown] = 0;
        Ok(())
    };
    Init cuDeviceGetAttribute(value: *mut c_int, number: c_int, device: c_int) |call| {
        call.device(device)?;
        put(value, attribute(number, &call.state.config).ok_or(INVALID_VALUE)?)
    };
    Init cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) |call| {
        call.device(device)?;
        put(bytes, call.state.memory.capacity)
    };
    Init cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) |call| {
        let device = call.device(device)?;
        put(context, call.state.primaries.retain(device))
    };
    Init cuDevicePrimaryCtxRelease_v2(device: c_int) |call| {
        let device = call.device(device)?;
        call.state.primaries.release(device)
    };
    Init cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) |call| {
        let device = call.device(device)?;
        put(flags, 0)?;
        put(active, c_int::from(call.state.primaries.is_active(device)))
    };
    Init cuCtxGetCurrent(context: *mut usize) |_| put(context, contexts::current());
    Init cuCtxSetCurrent(context: usize) |call| {
        if context != 0 {
            call.state.primaries.device_of(context)?;
        }
        contexts::set(context)
    };
    Init cuCtxPushCurrent_v2(context: usize) |call| {
        call.state.primaries.device_of(context)?;
        contexts::push(context)
    };
    Init cuCtxPopCurrent_v2(context: *mut usize) |_| {
        let popped = contexts::pop()?;
        // The caller need not want to know it.
        if context.is_null() { Ok(()) } else { put(context, popped) }
    };
    Context cuCtxGetDevice(device: *mut c_int) |call| {
        put(device, c_int::try_from(call.device).unwrap_or(c_int::MAX))
    };
    Context cuCtxSynchronize() |call| call.state.synchronize(call.device);
}
