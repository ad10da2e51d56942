//! The driver through the functions that it exports, as a program calls them.

mod capture;
mod control;
mod copies;
mod floats;
mod kernels;
mod memory;
mod orders;
mod runtime;
mod streams;

use std::ffi::{c_int, c_long};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::codes::SUCCESS;
use crate::control::*;
use crate::driver::*;
use crate::state::{State, state};

/// A new driver, which one test has for itself.
struct FreshDriver {
    _alone: MutexGuard<'static, ()>,
}

impl FreshDriver {
    /// A driver that is not initialised.
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        *state() = State::new();
        Self { _alone: alone }
    }

    /// A driver with the context of the first device.
    fn with_context() -> Self {
        let fresh = Self::new();
        ok(cuInit(0));
        let mut context = 0;
        ok(cuDevicePrimaryCtxRetain(&raw mut context, 0));
        ok(cuCtxPushCurrent_v2(context));
        soft_reset_calls();
        fresh
    }
}

#[track_caller]
fn ok(code: c_int) {
    assert_eq!(code, SUCCESS);
}

fn allocate(bytes: usize) -> u64 {
    let mut address = 0;
    ok(cuMemAlloc_v2(&raw mut address, bytes));
    address
}

/// Page-locked memory that holds `bytes`.
fn locked(bytes: &[u8]) -> usize {
    let mut address = 0;
    ok(cuMemHostAlloc(&raw mut address, bytes.len(), 0));
    write_host(address, bytes);
    address
}

fn write_host(address: usize, bytes: &[u8]) {
    // SAFETY: tests write page-locked memory that they allocated with this size.
    unsafe { (address as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

fn read_host<const N: usize>(address: usize) -> [u8; N] {
    // SAFETY: tests read page-locked memory that they allocated with at least this size.
    unsafe { (address as *const [u8; N]).read() }
}

fn stream() -> usize {
    let mut stream = 0;
    ok(cuStreamCreate(&raw mut stream, 1));
    stream
}

fn event() -> usize {
    let mut event = 0;
    ok(cuEventCreate(&raw mut event, 2));
    event
}

/// The bytes that device memory holds, whatever is enqueued.
fn peek<const N: usize>(address: u64) -> [u8; N] {
    let mut bytes = [0; N];
    let len = c_long::try_from(N).unwrap_or(0);
    ok(soft_peek(bytes.as_mut_ptr().cast(), usize::try_from(address).unwrap_or(0), len));
    bytes
}

/// Whether a child of this process dies of `work`.
fn dies(work: impl FnOnce()) -> bool {
    // SAFETY: the child only touches memory, and ends at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        work();
        // SAFETY: nothing of the parent is to be tidied up by the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: the child is ours, and `status` is room for the answer.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    libc::WIFSIGNALED(status)
}
