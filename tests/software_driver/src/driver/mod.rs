//! The driver's functions, as CUDA 12 has them.

mod copies;
mod devices;
mod lookup;
mod memory;
mod modules;
mod streams;

pub use devices::{NAME, attribute};
pub use lookup::function;
pub use streams::BLOCKING_SYNC;

/// Every exported function, for the tests.
#[cfg(test)]
pub use {copies::*, devices::*, lookup::*, memory::*, modules::*, streams::*};

use std::ffi::{c_char, c_int};

use crate::codes::{
    BLOCKED, Code, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NOT_INITIALIZED, Outcome, SUCCESS,
};
use crate::contexts;
use crate::operations::{check, check_up};
use crate::state::{State, is_forked, state, wait_for_gates};

/// The state that a function needs before it does anything.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// The driver is to be initialised, in this process.
    Init,
    /// A current context.
    Context,
}

/// A call of a function.
struct Call<'a> {
    state: &'a mut State,
    /// The device of the current context, if the function needs one.
    device: usize,
}

/// Counts a call, lets it fail if that was planned or something is missing, else does `work`, again after a gate that
/// was in its way.
fn call(name: &str, needs: Needs, work: impl Fn(Call) -> Outcome) -> Code {
    if needs != Needs::Nothing && is_forked() {
        return NOT_INITIALIZED;
    }
    let mut guard = state();
    if let Some(code) = guard.ledger.call(name) {
        return code;
    }
    loop {
        let state = &mut *guard;
        let ready = if needs == Needs::Nothing { Ok(0) } else { ready(state, needs) };
        match ready.and_then(|device| work(Call { state, device })) {
            Err(BLOCKED) => guard = wait_for_gates(guard),
            outcome => return outcome.err().unwrap_or(SUCCESS),
        }
    }
}

/// The device on which a function works that needs something.
fn ready(state: &State, needs: Needs) -> Outcome<usize> {
    check_up()?;
    check(state.is_initialized, NOT_INITIALIZED)?;
    if needs != Needs::Context {
        return Ok(0);
    }
    let current = contexts::current();
    check(current != 0, INVALID_CONTEXT)?;
    let device = state.primaries.device_of(current)?;
    state.check_device(device)?;
    Ok(device)
}

impl Call<'_> {
    /// The device with this number.
    fn device(&self, ordinal: c_int) -> Outcome<usize> {
        let ordinal = usize::try_from(ordinal).map_err(|_| INVALID_DEVICE)?;
        check(ordinal < self.state.config.devices, INVALID_DEVICE)?;
        Ok(ordinal)
    }
}

/// Writes an answer.
pub fn put<T>(target: *mut T, value: T) -> Outcome {
    check(!target.is_null(), INVALID_VALUE)?;
    // SAFETY: the caller gives a place for the answer.
    unsafe { target.write(value) };
    Ok(())
}

/// Makes something and writes it, unless there is no place for it.
pub fn put_new<T>(target: *mut T, make: impl FnOnce() -> Outcome<T>) -> Outcome {
    check(!target.is_null(), INVALID_VALUE)?;
    put(target, make()?)
}

/// The text of a string that ends with a zero, if it is UTF-8.
pub fn text<'a>(string: *const c_char) -> Outcome<&'a str> {
    check(!string.is_null(), INVALID_VALUE)?;
    // SAFETY: the caller gives a string that ends with a zero and lives for the call.
    let string = unsafe { std::ffi::CStr::from_ptr(string) };
    string.to_str().map_err(|_| INVALID_VALUE)
}

/// An address of the device as the host counts it: here it is the same.
fn host(address: u64) -> usize {
    usize::try_from(address).unwrap_or(usize::MAX)
}

/// Defines exported functions: what each needs, its arguments, and what it does.
macro_rules! exports {
    ($($needs:ident $name:ident($($argument:ident: $kind:ty),* $(,)?) |$call:pat_param| $work:expr;)*) => {
        $(#[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $kind),*) -> $crate::codes::Code {
            $crate::driver::call(stringify!($name), $crate::driver::Needs::$needs, |$call| $work)
        })*

        /// The address of the function with this name.
        pub(super) fn find(name: &str) -> Option<*const ()> {
            match name {
                $(stringify!($name) => Some($name as *const ()),)*
                _ => None,
            }
        }
    };
}
use exports;
