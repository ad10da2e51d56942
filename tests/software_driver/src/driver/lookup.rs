//! Names of errors, and functions by their names.

use std::ffi::{CStr, c_char, c_int};

use crate::codes::{Code, INVALID_VALUE, Outcome, meaning};
use crate::operations::check;

use super::{copies, devices, memory, modules, put, streams, text};

/// The address of an exported function of the driver, by its exact name.
fn exported(name: &str) -> Option<*const ()> {
    [devices::find, memory::find, copies::find, streams::find, modules::find, find]
        .iter()
        .find_map(|find| find(name))
}

/// The versions in which functions came that the oldest drivers have not.
const SINCE: &[(&str, c_int)] = &[
    ("cuFuncIsLoaded", 12_040),
    ("cuFuncLoad", 12_040),
    ("cuGetProcAddress_v2", 12_000),
    ("cuStreamBeginCapture_v2", 10_010),
];

/// The version in which a function came.
fn since(name: &str) -> c_int {
    SINCE.iter().find(|(known, _)| *known == name).map_or(0, |(_, since)| *since)
}

/// The address of a function by the name that it has in programs, where the newest version has no suffix: the newest
/// of those that `version` has.
pub fn function(name: &str, version: c_int) -> Option<*const ()> {
    let names = [format!("{name}_v2"), name.to_owned()];
    names.iter().filter(|name| since(name) <= version).find_map(|name| exported(name))
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
    let name = text(symbol)?;
    check(version <= newest, INVALID_VALUE)?;
    let found = function(name, version);
    put(target, found.unwrap_or(std::ptr::null()))?;
    if !status.is_null() {
        let is_newer = found.is_none() && function(name, c_int::MAX).is_some();
        put(status, if is_newer { 2 } else { c_int::from(found.is_none()) })?;
    }
    Ok(())
}

super::exports! {
    Nothing cuGetErrorName(code: Code, name: *mut *const c_char) |_| describe(code, name, |found| found.driver);
    Nothing cuGetErrorString(code: Code, string: *mut *const c_char) |_| describe(code, string, |found| found.text);
    Nothing cuGetProcAddress_v2(
        symbol: *const c_char,
        function: *mut *const (),
        version: c_int,
        _flags: u64,
        status: *mut c_int,
    ) |call| look_up(symbol, function, version, call.state.config.version, status);
}
