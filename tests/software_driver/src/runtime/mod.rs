//! Enough of the CUDA runtime for PyTorch to hold tensors here: memory, copies, streams, events, graphs.
//!
//! PyTorch links the runtime dynamically, so these functions win where the library is preloaded. They fail on no
//! plan, and only `cudaMalloc` is counted. Kernels of PyTorch have nothing to run on: launches answer `cudaErrorNotSupported`, and so
//! does every other function that PyTorch may call.

mod devices;
mod graphs;
mod memory;
mod refused;
mod streams;

use std::cell::Cell;

use crate::codes::{BLOCKED, Code, NO_DEVICE, NOT_INITIALIZED, Outcome, SUCCESS};
use crate::contexts;
use crate::operations::{check, check_up};
use crate::state::{State, go_down_at_exit, is_forked, state, wait_for_gates, watch_for_forks};

thread_local! {
    /// The answer of `cudaGetLastError`.
    static LAST_ERROR: Cell<Code> = const { Cell::new(SUCCESS) };
}

/// The state that a function needs before it does anything.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// There are to be devices.
    Init,
    /// A current context, which is made current where there is none.
    Context,
}

/// A call of a function.
struct Call<'a> {
    state: &'a mut State,
    device: usize,
}

/// Remembers an error for `cudaGetLastError`.
fn told(code: Code) -> Code {
    if code != SUCCESS {
        LAST_ERROR.set(code);
    }
    code
}

fn call(needs: Needs, work: impl Fn(Call) -> Outcome) -> Code {
    if needs != Needs::Nothing && is_forked() {
        return told(NOT_INITIALIZED);
    }
    let mut guard = state();
    loop {
        let state = &mut *guard;
        match ready(state, needs).and_then(|device| work(Call { state, device })) {
            Err(BLOCKED) => guard = wait_for_gates(guard),
            outcome => return told(outcome.err().unwrap_or(SUCCESS)),
        }
    }
}

/// The device on which a function works: that of the current context, or the first.
fn ready(state: &mut State, needs: Needs) -> Outcome<usize> {
    let current = contexts::current();
    let device = state.primaries.device_of(current).unwrap_or(0);
    if needs == Needs::Nothing {
        return Ok(device);
    }
    check_up()?;
    check(state.config.init_code == SUCCESS, state.config.init_code)?;
    check(state.config.devices > 0, NO_DEVICE)?;
    state.is_initialized = true;
    watch_for_forks();
    go_down_at_exit();
    if needs == Needs::Context {
        state.check_device(device)?;
        let context = state.primaries.retain(device);
        if current == 0 {
            contexts::set(context)?;
        }
    }
    Ok(device)
}

/// Defines exported functions: what each needs, its arguments, and what it does.
macro_rules! exports {
    ($($needs:ident $name:ident($($argument:ident: $kind:ty),* $(,)?) |$call:pat_param| $work:expr;)*) => {
        $(#[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $kind),*) -> $crate::codes::Code {
            $crate::runtime::call($crate::runtime::Needs::$needs, |$call| $work)
        })*
    };
}
use exports;
