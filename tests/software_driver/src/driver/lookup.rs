//! Names of errors, and functions by their names.

use std::ffi::{CStr, c_char, c_int};

use crate::codes::{Code, INVALID_VALUE, NOT_FOUND, Outcome, meaning};
use crate::operations::check;

use super::{copies, devices, memory, modules, put, streams, text};

/// The address of an exported function of the driver, by its exact name.
fn exported(name: &str) -> Option<*const ()> {
    [devices::find, memory::find, copies::find, streams::find, modules::find, find]
        .iter()
        .find_map(|find| find(name))
}

/// The address of a function by the name that it has in programs, where the newest version has no suffix.
pub fn function(name: &str) -> Option<*const ()> {
    exported(&format!("{name}_v2")).or_else(|| exported(name))
}

fn describe(
    code: Code,
    target: *mut *const c_char,
    describe: fn(crate::codes::Meaning) -> &'static CStr,
) -> Outcome {
    let known = meaning(code).map(describe);
    put(target, known.map_or(std::ptr::null(), CStr::as_ptr))?;
    check(known.is_some(), INVALID_VALUE)
}

/// Looks a function up; the status is 1 for a name that is not there and 2 for one that is newer than `version`.
fn look_up(
    symbol: *const c_char,
    target: *mut *const (),
    version: c_int,
    newest: c_int,
    status: *mut c_int,
) -> Outcome {
    let found = function(text(symbol)?).filter(|_| version <= newest);
    put(target, found.unwrap_or(std::ptr::null()))?;
    if !status.is_null() {
        put(status, if found.is_some() { 0 } else { 1 + c_int::from(version > newest) })?;
    }
    check(found.is_some(), NOT_FOUND)
}

super::exports! {
    Nothing cuGetErrorName(code: Code, name: *mut *const c_char) |_| describe(code, name, |found| found.driver);
    Nothing cuGetErrorString(code: Code, string: *mut *const c_char) |_| describe(code, string, |found| found.text);
    Nothing cuGetProcAddress(symbol: *const c_char, function: *mut *const (), version: c_int, _flags: u64) |call| {
        look_up(symbol, function, version, call.state.config.version, std::ptr::null_mut())
    };
    Nothing cuGetProcAddress_v2(
        symbol: *const c_char,
        function: *mut *const (),
        version: c_int,
        _flags: u64,
        status: *mut c_int,
    ) |call| look_up(symbol, function, version, call.state.config.version, status);
}
