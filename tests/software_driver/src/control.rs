//! The functions that tests call, through `ctypes` or `dlsym`. None of it is counted, and none of it needs a context.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};

use crate::codes::{Code, INVALID_HANDLE, INVALID_VALUE, Outcome, SUCCESS};
use crate::contexts;
use crate::kernels;
use crate::memory::Place;
use crate::state::{State, StreamHandles, set_down, state};
use crate::threads::Mode;

/// The name that a test gave, or `None` for all.
fn text(name: *const c_char) -> Option<String> {
    // SAFETY: tests pass a string that ends with a zero, or null.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

/// A count as C has it.
fn long<T: TryInto<c_long>>(count: T) -> c_long {
    count.try_into().unwrap_or(c_long::MAX)
}

fn code(outcome: Outcome) -> Code {
    outcome.err().unwrap_or(SUCCESS)
}

/// The stream of a handle on any device; 0 is the default stream of the first.
fn stream_of(state: &mut State, handle: usize) -> Outcome<usize> {
    let device = state.streams.device_of(handle).unwrap_or(0);
    state.streams.resolve(handle, device)
}

/// Calls of a function since the last reset (`launch:NAME` for a kernel, `load:ptx` and `load:cubin` for images that
/// were loaded, `wait:sleeps` and `wait:spins` for events that were waited for); of all driver functions for null, but for `cuDevicePrimaryCtxGetState`, which PyTorch calls when it
/// likes.
#[unsafe(no_mangle)]
pub extern "C" fn soft_calls(name: *const c_char) -> c_long {
    long(state().ledger.calls(text(name).as_deref()))
}

#[unsafe(no_mangle)]
pub extern "C" fn soft_reset_calls() {
    state().ledger.reset();
}

/// Lets the `number`-th call from now (1 is the next) of a function return `code` once and do nothing; of any
/// function for null, as [`soft_calls`] has them. Functions of the runtime do not fail on plan.
#[unsafe(no_mangle)]
pub extern "C" fn soft_fail(name: *const c_char, number: c_long, code: c_int) {
    state().ledger.plan(text(name), number.try_into().unwrap_or(0), code);
}

/// Planned failures that have not happened.
#[unsafe(no_mangle)]
pub extern "C" fn soft_failures_left() -> c_long {
    long(state().ledger.planned())
}

#[unsafe(no_mangle)]
pub extern "C" fn soft_forget_failures() {
    state().ledger.forget_plans();
}

/// Bytes that each device has.
#[unsafe(no_mangle)]
pub extern "C" fn soft_set_capacity(bytes: c_long) {
    state().memory.capacity = bytes.try_into().unwrap_or(0);
}

/// Sets the number of queries of an event or of a stream with which what lies before it runs; 0 for never.
#[unsafe(no_mangle)]
pub extern "C" fn soft_set_queries(count: c_long) {
    state().config.patience = count.try_into().unwrap_or(0);
}

/// The compute capability of every device, at first 9.0.
#[unsafe(no_mangle)]
pub extern "C" fn soft_set_capability(major: c_int, minor: c_int) {
    state().config.capability = (major, minor);
}

/// Whether kernels of every device reach registered memory at its host address, at first 1.
#[unsafe(no_mangle)]
pub extern "C" fn soft_set_host_pointers(uses: c_int) {
    state().config.uses_host_pointers = uses != 0;
}

/// Sets the bytes from which on one call page-locks no memory, at first 512 GiB.
#[unsafe(no_mangle)]
pub extern "C" fn soft_set_register_limit(bytes: c_long) {
    state().memory.most_page_locked = bytes.try_into().unwrap_or(0);
}

/// Sets the copies, fills and launches that a stream takes before a call waits, as one of a device does for room in its
/// queue; 0 for any number, as at first.
#[unsafe(no_mangle)]
pub extern "C" fn soft_set_queue(most: c_long) {
    state().config.most_queued = usize::try_from(most).ok().filter(|most| *most > 0);
}

/// Enqueues work of the host on a stream, which is over when [`soft_open_gates`] says so. Whoever has to wait for it with
/// the lock of Python's interpreter ends the process, since the work could need that lock.
#[unsafe(no_mangle)]
pub extern "C" fn soft_close_gate(stream: usize) -> c_int {
    let state = &mut *state();
    code(stream_of(state, stream).and_then(|id| state.streams.close_gate(id)))
}

/// Ends the work of the host on all streams.
#[unsafe(no_mangle)]
pub extern "C" fn soft_open_gates() {
    state().open_gates();
}

/// Decides in which order blocks and threads of the launches from now on run; 0 for the last first, at first 1. The
/// same seed before the same launches gives the same orders.
#[unsafe(no_mangle)]
pub extern "C" fn soft_set_seed(seed: c_long) {
    // The lock is held so that no launch runs meanwhile.
    let _state = state();
    kernels::set_seed(seed.cast_unsigned());
}

/// Breaks the current context, or that of the first device: all its calls answer `code` from now on, as after an error
/// of a kernel. What is enqueued stays.
#[unsafe(no_mangle)]
pub extern "C" fn soft_break(code: c_int) {
    let state = &mut *state();
    let device = state.primaries.device_of(contexts::current()).unwrap_or(0);
    state.break_device(device, code);
}

/// Lets the driver go down: calls answer `CUDA_ERROR_DEINITIALIZED` from now on.
#[unsafe(no_mangle)]
pub extern "C" fn soft_deinitialize() {
    set_down(true);
}

/// Mends all contexts, and brings the driver back.
#[unsafe(no_mangle)]
pub extern "C" fn soft_mend() {
    state().broken.clear();
    set_down(false);
}

/// Brings back all that a test may choose as it is at first, and mends what it broke.
#[unsafe(no_mangle)]
pub extern "C" fn soft_restore() {
    state().restore();
    set_down(false);
}

/// Copies, fills and launches of a stream that have not run; -1 for a handle that is none.
#[unsafe(no_mangle)]
pub extern "C" fn soft_pending(stream: usize) -> c_long {
    let state = &mut *state();
    stream_of(state, stream).map_or(-1, |id| long(state.streams.pending(Some(id))))
}

/// The same number, of all streams of all devices.
#[unsafe(no_mangle)]
pub extern "C" fn soft_pending_all() -> c_long {
    long(state().streams.pending(None))
}

/// Runs a stream and what it waits for.
#[unsafe(no_mangle)]
pub extern "C" fn soft_run(stream: usize) -> c_int {
    let state = &mut *state();
    code(stream_of(state, stream).map(|id| state.run(state.streams.end(id))))
}

/// Runs all streams of all devices.
#[unsafe(no_mangle)]
pub extern "C" fn soft_run_all() {
    state().run_all(None);
}

/// Bytes of device memory that are out, of all devices.
#[unsafe(no_mangle)]
pub extern "C" fn soft_device_bytes() -> c_long {
    long(state().memory.device_bytes())
}

/// Bytes of page-locked memory that are out, registered ones too.
#[unsafe(no_mangle)]
pub extern "C" fn soft_page_locked_bytes() -> c_long {
    long(state().memory.page_locked_bytes())
}

/// A new stream of a device, which does not wait for the default stream.
#[unsafe(no_mangle)]
pub extern "C" fn soft_stream(device: c_int) -> usize {
    device.try_into().map_or(0, |device| state().create_stream(device, 1).unwrap_or(0))
}

/// Whether a new stream gets the handle of a destroyed one, at first 0.
#[unsafe(no_mangle)]
pub extern "C" fn soft_reuse_streams(reuses: c_int) {
    state().config.stream_handles = if reuses == 0 { StreamHandles::New } else { StreamHandles::Reused };
}

/// Calls that were given the handle of a destroyed stream, which is undefined on a device.
#[unsafe(no_mangle)]
pub extern "C" fn soft_uses_of_destroyed() -> c_long {
    long(state().streams.uses_of_gone)
}

/// Copies what device memory holds now, whatever is enqueued, to `target`.
#[unsafe(no_mangle)]
pub extern "C" fn soft_peek(target: *mut c_void, source: usize, bytes: c_long) -> c_int {
    let state = state();
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    if !matches!(state.memory.place(source, len), Place::Device(_)) {
        return INVALID_VALUE;
    }
    state.memory.open(true);
    // SAFETY: the range is device memory, which is open, and the test gives room for it.
    unsafe { target.cast::<u8>().copy_from_nonoverlapping(source as *const u8, len) };
    state.memory.open(false);
    SUCCESS
}

/// Records what is enqueued on a stream from now on, instead of enqueuing it. The default stream cannot do so.
#[unsafe(no_mangle)]
pub extern "C" fn soft_begin_capture(stream: usize) -> c_int {
    let state = &mut *state();
    code(stream_of(state, stream).and_then(|id| state.streams.begin_capture(id, Mode::Global)))
}

/// Ends a capture: the graph's number, from 1 on, or the error's number below 0.
#[unsafe(no_mangle)]
pub extern "C" fn soft_end_capture(stream: usize) -> c_long {
    let state = &mut *state();
    let graph = stream_of(state, stream).and_then(|id| state.streams.end_capture(id));
    graph.map_or_else(|code| -c_long::from(code), long)
}

/// Enqueues the work of a graph on a stream.
#[unsafe(no_mangle)]
pub extern "C" fn soft_replay(graph: c_long, stream: usize) -> c_int {
    let state = &mut *state();
    let graph = usize::try_from(graph).map_err(|_| INVALID_HANDLE);
    code(graph.and_then(|graph| {
        let id = stream_of(state, stream)?;
        state.streams.replay(graph, id)
    }))
}
