//! Devices, versions and errors.

use std::ffi::{CStr, c_char, c_int, c_uint};

use crate::codes::{
    Code, INVALID_DEVICE, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, Outcome, SUCCESS, meaning,
};
use crate::contexts;
use crate::driver::{self, put, text};
use crate::operations::check;

use super::LAST_ERROR;

/// The version that the runtime says of itself and of the driver below: new enough for any PyTorch, whatever the driver
/// says.
const VERSION: c_int = 13_020;
/// The newest interface of the driver of which functions are handed out that only say that they are not supported.
const OLD: c_uint = 12_000;

/// `cudaDeviceProp` of CUDA 13, of which most is 0.
#[repr(C, align(8))]
struct Properties([u8; 1008]);

impl Properties {
    fn new(device: usize, bytes: usize, capability: (c_int, c_int)) -> Self {
        let mut all = Self([0; 1008]);
        all.put(0, driver::NAME);
        // The UUID, different for each device.
        all.put(256, &[0x50; 15]);
        all.put(271, &[u8::try_from(device).unwrap_or(u8::MAX)]);
        // Sizes are `size_t`: total memory, shared memory of a block, pitch, constant memory, alignment of textures,
        // shared memory of a multiprocessor and the most of a block.
        for (at, size) in [(288, bytes), (296, 49_152), (312, i32::MAX as usize), (352, 65_536), (368, 512)] {
            all.put(at, &size.to_ne_bytes());
        }
        for (at, size) in [(624, 233_472usize), (672, 232_448)] {
            all.put(at, &size.to_ne_bytes());
        }
        // Registers of a block, lanes, threads of a block and its dimensions, of the grid, capability,
        // multiprocessors, concurrent kernels, PCI device, copy engines, unified addresses, bus width, cache,
        // threads of a multiprocessor, priorities, its registers and blocks.
        let device = c_int::try_from(device).unwrap_or(0);
        for (at, numbers) in [
            (304, &[65_536, 32][..]),
            (320, &[1024, 1024, 1024, 64, c_int::MAX, 65_535, 65_535]),
            (360, &[capability.0, capability.1]),
            (384, &[132]),
            (392, &[1]),
            (560, &[1]),
            (572, &[device]),
            (584, &[3, 1, 6144, 62_914_560]),
            (604, &[2048, 1]),
            (632, &[65_536]),
            (688, &[32]),
        ] {
            for (position, number) in numbers.iter().enumerate() {
                all.put(at + position * size_of::<c_int>(), &number.to_ne_bytes());
            }
        }
        all
    }

    /// Writes bytes at an offset that the header of CUDA gives.
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// A string for a code, which C++ keeps.
fn string(code: Code, describe: fn(crate::codes::Meaning) -> &'static CStr) -> *const c_char {
    meaning(code).map_or(c"unrecognized error code", describe).as_ptr()
}

/// The number of a device.
fn known(device: c_int, devices: usize) -> Outcome<usize> {
    usize::try_from(device).ok().filter(|device| *device < devices).ok_or(INVALID_DEVICE)
}

/// The function that is handed out for a function of the driver that is not here.
extern "C" fn unsupported() -> Code {
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetLastError() -> Code {
    LAST_ERROR.replace(SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn cudaPeekAtLastError() -> Code {
    LAST_ERROR.get()
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorName(code: Code) -> *const c_char {
    string(code, |found| found.runtime)
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorString(code: Code) -> *const c_char {
    string(code, |found| found.text)
}

super::exports! {
    Nothing cudaDriverGetVersion(version: *mut c_int) |_| put(version, VERSION);
    Nothing cudaRuntimeGetVersion(version: *mut c_int) |_| put(version, VERSION);
    Nothing cudaProfilerStart() |_| Ok(());
    Nothing cudaProfilerStop() |_| Ok(());
    Init cudaGetDeviceCount(count: *mut c_int) |call| {
        put(count, c_int::try_from(call.state.config.devices).unwrap_or(c_int::MAX))
    };
    Init cudaGetDevice(device: *mut c_int) |call| put(device, c_int::try_from(call.device).unwrap_or(c_int::MAX));
    Init cudaSetDevice(device: c_int) |call| {
        let device = known(device, call.state.config.devices)?;
        contexts::set(call.state.primaries.retain(device))
    };
    Init cudaGetDeviceProperties(properties: *mut Properties, device: c_int) |call| {
        let device = known(device, call.state.config.devices)?;
        put(properties, Properties::new(device, call.state.memory.capacity, call.state.config.capability))
    };
    Init cudaDeviceGetAttribute(value: *mut c_int, number: c_int, device: c_int) |call| {
        known(device, call.state.config.devices)?;
        put(value, driver::attribute(number, &call.state.config).ok_or(INVALID_VALUE)?)
    };
    Init cudaDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) |call| {
        known(device, call.state.config.devices)?;
        known(peer, call.state.config.devices)?;
        put(can, 0)
    };
    Init cudaDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) |_| {
        put(least, 0)?;
        put(greatest, -5)
    };
    Init cudaDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) |call| {
        let device = known(device, call.state.config.devices)?;
        let shown = format!("0000:00:{device:02x}.0\0");
        check(!id.is_null() && len >= c_int::try_from(shown.len()).unwrap_or(c_int::MAX), INVALID_VALUE)?;
        // SAFETY: the caller gives room for `len` bytes.
        unsafe { id.cast::<u8>().copy_from_nonoverlapping(shown.as_ptr(), shown.len()) };
        Ok(())
    };
    Context cudaDeviceSynchronize() |call| call.state.synchronize(call.device);
    Nothing cudaGetDriverEntryPointByVersion(
        symbol: *const c_char,
        function: *mut *const (),
        version: c_uint,
        _flags: u64,
        status: *mut c_int,
    ) |_| {
        // PyTorch wants all functions that old drivers have before it uses the first.
        let stand_in = (version <= OLD).then_some(unsupported as *const ());
        let found = driver::function(text(symbol)?, c_int::MAX).or(stand_in);
        put(function, found.unwrap_or(std::ptr::null()))?;
        if status.is_null() {
            return check(found.is_some(), NOT_FOUND);
        }
        put(status, c_int::from(found.is_none()))
    };
}
