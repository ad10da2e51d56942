//! What tests call, through `ctypes` or `dlsym`.

use std::ffi::{CStr, c_char};

use crate::state::{Code, state};

/// The name that a test gave, or `None` for all.
fn text(name: *const c_char) -> Option<String> {
    // SAFETY: tests pass a string that ends with a zero, or null.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

/// Calls of a function since the last reset (`launch:NAME` for a kernel); of all driver functions for null.
#[unsafe(no_mangle)]
extern "C" fn software_calls(name: *const c_char) -> u64 {
    state().calls(text(name).as_deref())
}

#[unsafe(no_mangle)]
extern "C" fn software_reset_calls() {
    state().reset_calls();
}

/// Lets the call after `left` others of a function (of any, for null) return `code` and do nothing.
#[unsafe(no_mangle)]
extern "C" fn software_fail(name: *const c_char, left: u64, code: Code) {
    state().plan(text(name), left, code);
}

/// Planned failures that have not happened.
#[unsafe(no_mangle)]
extern "C" fn software_planned() -> u64 {
    state().planned() as u64
}

#[unsafe(no_mangle)]
extern "C" fn software_forget_plans() {
    state().forget_plans();
}

/// Bytes that the device has.
#[unsafe(no_mangle)]
extern "C" fn software_set_capacity(bytes: usize) {
    state().memory.capacity = bytes;
}

/// Queries of an event after which what lies before it has run.
#[unsafe(no_mangle)]
extern "C" fn software_set_patience(queries: u64) {
    state().streams.patience = queries;
}

/// Work that has not run, of a stream, or of all for a negative one.
#[unsafe(no_mangle)]
extern "C" fn software_pending(stream: i64) -> u64 {
    state().streams.pending(usize::try_from(stream).ok()) as u64
}

/// Runs the work of one stream and what it waits for.
#[unsafe(no_mangle)]
extern "C" fn software_run_stream(stream: usize) {
    let state = &mut *state();
    state.streams.run_all_of(stream, &state.memory);
}

#[unsafe(no_mangle)]
extern "C" fn software_run_everything() {
    let state = &mut *state();
    state.streams.run_everything(&state.memory);
}

/// Bytes of device memory that are out.
#[unsafe(no_mangle)]
extern "C" fn software_device_bytes() -> usize {
    state().memory.used
}

/// Bytes of page-locked memory that are out.
#[unsafe(no_mangle)]
extern "C" fn software_locked_bytes() -> usize {
    state().memory.locked_bytes()
}

#[unsafe(no_mangle)]
extern "C" fn software_events() -> u64 {
    state().streams.events() as u64
}

#[unsafe(no_mangle)]
extern "C" fn software_streams() -> u64 {
    state().streams.count() as u64
}

/// A new stream.
#[unsafe(no_mangle)]
extern "C" fn software_stream() -> usize {
    let mut state = state();
    let handle = state.handle();
    state.streams.create(handle);
    handle
}

/// Records what is enqueued on a stream from now on, instead of enqueuing it. 0 if it does so already.
#[unsafe(no_mangle)]
extern "C" fn software_begin_capture(stream: usize) -> i32 {
    i32::from(state().streams.begin_capture(stream))
}

/// Ends a capture. The graph's number, or -1.
#[unsafe(no_mangle)]
extern "C" fn software_end_capture(stream: usize) -> i64 {
    state().streams.end_capture(stream).and_then(|graph| i64::try_from(graph).ok()).unwrap_or(-1)
}

/// Enqueues the work of a graph. 0 if there is none.
#[unsafe(no_mangle)]
extern "C" fn software_replay(graph: usize, stream: usize) -> i32 {
    i32::from(state().streams.replay(graph, stream))
}
