//! The calls of the CUDA driver that kvpool makes.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_uint, c_void};

use crate::kernels;
use crate::state::{
    CAPTURE_UNSUPPORTED, Code, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE,
    NOT_FOUND, NOT_INITIALIZED, NOT_READY, SUCCESS, State, state,
};
use crate::stream::Work;

/// The handle of the first device's primary context; those of others follow.
const CONTEXT: usize = 0x1000;
/// The most bytes of a kernel's parameters.
const MOST_PARAMS: usize = 4096;

thread_local! {
    /// The contexts of this thread, the current one last.
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// What a call needs before it does anything.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// That the driver was initialised.
    Init,
    /// A current context.
    Context,
    /// A current context, and that nothing is being captured.
    NoCapture,
}

/// Counts a call, lets it fail if that was planned or something is missing, else does `work`.
fn call(name: &str, needs: Needs, work: impl FnOnce(&mut State) -> Result<(), Code>) -> Code {
    let mut state = state();
    if let Some(code) = state.call(name) {
        return code;
    }
    if needs != Needs::Nothing && !state.is_initialized {
        return NOT_INITIALIZED;
    }
    let is_bound = CONTEXTS.with_borrow(|contexts| contexts.last().is_some_and(|&context| context != 0));
    if matches!(needs, Needs::Context | Needs::NoCapture) && !is_bound {
        return INVALID_CONTEXT;
    }
    if needs == Needs::NoCapture && state.streams.is_any_capturing() {
        return CAPTURE_UNSUPPORTED;
    }
    work(&mut state).err().unwrap_or(SUCCESS)
}

/// Writes an answer.
fn put<T>(target: *mut T, value: T) -> Result<(), Code> {
    if target.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the driver gives a place for the answer.
    unsafe { target.write(value) };
    Ok(())
}

fn check(condition: bool, code: Code) -> Result<(), Code> {
    if condition { Ok(()) } else { Err(code) }
}

/// Exported functions: each is counted and may fail on plan.
macro_rules! exports {
    ($($needs:ident $name:ident($($argument:ident: $kind:ty),*) $work:expr;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $kind),*) -> Code {
            call(stringify!($name), Needs::$needs, $work)
        }
    )*};
}

exports! {
    Nothing cuInit(flags: c_uint) |state| {
        check(flags == 0, INVALID_VALUE)?;
        check(state.init_code == SUCCESS, state.init_code)?;
        state.is_initialized = true;
        Ok(())
    };
    Nothing cuDriverGetVersion(version: *mut i32) |state| put(version, state.version);
    Init cuDeviceGetCount(count: *mut i32) |state| put(count, state.devices);
    Init cuDeviceGet(device: *mut i32, ordinal: i32) |state| {
        check((0..state.devices).contains(&ordinal), INVALID_DEVICE)?;
        put(device, ordinal)
    };
    Init cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) |state| {
        check((0..state.devices).contains(&device), INVALID_DEVICE)?;
        put(context, CONTEXT + usize::try_from(device).unwrap_or(0))
    };
    Init cuDevicePrimaryCtxGetState(_device: i32, flags: *mut c_uint, active: *mut i32) |_| {
        put(flags, 0)?;
        put(active, 1)
    };
    Init cuCtxGetCurrent(context: *mut usize) |_| {
        put(context, CONTEXTS.with_borrow(|contexts| contexts.last().copied().unwrap_or(0)))
    };
    Init cuCtxSetCurrent(context: usize) |_| {
        CONTEXTS.with_borrow_mut(|contexts| {
            contexts.pop();
            contexts.push(context);
        });
        Ok(())
    };
    Init cuCtxPushCurrent_v2(context: usize) |state| {
        let devices = usize::try_from(state.devices).unwrap_or(0);
        check((CONTEXT..CONTEXT + devices).contains(&context), INVALID_CONTEXT)?;
        CONTEXTS.with_borrow_mut(|contexts| contexts.push(context));
        Ok(())
    };
    Init cuCtxPopCurrent_v2(context: *mut usize) |_| {
        put(context, CONTEXTS.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?)
    };
    NoCapture cuCtxSynchronize() |state| {
        state.streams.run_everything(&state.memory);
        Ok(())
    };
    Context cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |state| {
        put(free, state.memory.capacity - state.memory.used.min(state.memory.capacity))?;
        put(total, state.memory.capacity)
    };
    NoCapture cuMemAlloc_v2(address: *mut u64, bytes: usize) |state| {
        put(address, state.memory.allocate(bytes)? as u64)
    };
    NoCapture cuMemFree_v2(address: u64) |state| {
        state.streams.run_everything(&state.memory);
        done(state.memory.free(host(address)))
    };
    NoCapture cuMemHostAlloc(address: *mut usize, bytes: usize, _flags: c_uint) |state| {
        put(address, state.memory.allocate_host(bytes)?)
    };
    NoCapture cuMemFreeHost(address: usize) |state| done(state.memory.free_host(address));
    Context cuMemsetD8Async(target: u64, value: u8, len: usize, stream: usize) |state| {
        check(state.memory.is_device(host(target), len), INVALID_VALUE)?;
        on(state, stream, Work::Set { target: host(target), value, len })
    };
    Context cuMemcpyHtoDAsync_v2(target: u64, source: usize, len: usize, stream: usize) |state| {
        check(state.memory.is_device(host(target), len), INVALID_VALUE)?;
        if state.memory.is_locked(source, len) {
            return on(state, stream, Work::Copy { target: host(target), source, len });
        }
        // SAFETY: the caller promises so many readable bytes.
        let bytes = unsafe { std::slice::from_raw_parts(source as *const u8, len) }.to_vec();
        on(state, stream, Work::Bytes { target: host(target), bytes })
    };
    Context cuMemcpyDtoHAsync_v2(target: usize, source: u64, len: usize, stream: usize) |state| {
        check(state.memory.is_device(host(source), len), INVALID_VALUE)?;
        let is_late = state.memory.is_locked(target, len);
        check(is_late || !state.streams.is_capturing(stream), CAPTURE_UNSUPPORTED)?;
        on(state, stream, Work::Copy { target, source: host(source), len })?;
        if !is_late {
            // What is not page-locked may be gone later, so a real driver waits, too.
            state.streams.run_all_of(stream, &state.memory);
        }
        Ok(())
    };
    Context cuStreamCreate(stream: *mut usize, _flags: c_uint) |state| {
        let handle = state.handle();
        state.streams.create(handle);
        put(stream, handle)
    };
    Context cuStreamDestroy_v2(stream: usize) |state| {
        check(state.streams.destroy(stream, &state.memory), INVALID_HANDLE)
    };
    Context cuStreamSynchronize(stream: usize) |state| {
        check(state.streams.exists(stream), INVALID_HANDLE)?;
        check(!state.streams.is_capturing(stream), CAPTURE_UNSUPPORTED)?;
        state.streams.run_all_of(stream, &state.memory);
        Ok(())
    };
    Context cuStreamIsCapturing(stream: usize, status: *mut i32) |state| {
        check(state.streams.exists(stream), INVALID_HANDLE)?;
        put(status, i32::from(state.streams.is_capturing(stream)))
    };
    Context cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) |state| {
        check(state.streams.exists(stream) && state.streams.is_event(event), INVALID_HANDLE)?;
        state.streams.order(stream, event);
        Ok(())
    };
    Context cuEventCreate(event: *mut usize, _flags: c_uint) |state| {
        let handle = state.handle();
        state.streams.create_event(handle);
        put(event, handle)
    };
    Context cuEventDestroy_v2(event: usize) |state| check(state.streams.destroy_event(event), INVALID_HANDLE);
    Context cuEventRecord(event: usize, stream: usize) |state| {
        check(state.streams.record(event, stream), INVALID_HANDLE)
    };
    NoCapture cuEventQuery(event: usize) |state| {
        check(state.streams.is_event(event), INVALID_HANDLE)?;
        check(state.streams.query(event, &state.memory), NOT_READY)
    };
    NoCapture cuEventSynchronize(event: usize) |state| {
        check(state.streams.is_event(event), INVALID_HANDLE)?;
        state.streams.wait(event, &state.memory);
        Ok(())
    };
    Context cuModuleLoadData(module: *mut usize, image: *const c_char) |state| {
        check(!image.is_null(), INVALID_VALUE)?;
        // SAFETY: PTX is passed as a string that ends with a zero.
        let text = unsafe { CStr::from_ptr(image) }.to_string_lossy().into_owned();
        check(text.contains(".version") && text.contains(".target"), INVALID_IMAGE)?;
        let names = text.split(".entry ").skip(1).filter_map(|rest| rest.split('(').next());
        let names = names.map(|name| name.trim().to_owned()).collect();
        let handle = state.handle();
        state.modules.insert(handle, names);
        put(module, handle)
    };
    Context cuModuleUnload(module: usize) |state| check(state.modules.remove(&module).is_some(), INVALID_HANDLE);
    Context cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) |state| {
        let names = state.modules.get(&module).ok_or(INVALID_HANDLE)?;
        // SAFETY: a name is a string that ends with a zero.
        let name = unsafe { CStr::from_ptr(name) };
        check(names.iter().any(|known| known.as_bytes() == name.to_bytes()), NOT_FOUND)?;
        let kernel = kernels::find(name).ok_or(NOT_FOUND)?;
        let handle = state.handle();
        state.functions.insert(handle, kernel);
        put(function, handle)
    };
    Context cuFuncGetAttribute(value: *mut i32, _attribute: i32, function: usize) |state| {
        check(state.functions.contains_key(&function), INVALID_HANDLE)?;
        put(value, 32)
    };
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the signature is CUDA's")]
extern "C" fn cuLaunchKernel(
    function: usize,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: usize,
    params: *const *const c_void,
    extra: usize,
) -> Code {
    call("cuLaunchKernel", Needs::Context, |state| {
        let kernel = *state.functions.get(&function).ok_or(INVALID_HANDLE)?;
        let is_grid = grid_x > 0 && (1..=65_535).contains(&grid_y) && grid_z == 1;
        let is_block = block_x == 256 && block_y == 1 && block_z == 1;
        check(is_grid && is_block && shared_bytes == 0 && extra == 0 && !params.is_null(), INVALID_VALUE)?;
        state.count(&format!("launch:{}", kernels::name(kernel)));
        let bytes = kernels::params_bytes(kernel);
        check(bytes <= MOST_PARAMS, INVALID_VALUE)?;
        let mut words = vec![0u64; bytes.div_ceil(8)];
        // SAFETY: a kernel of one parameter is launched with an array of one pointer to it.
        let source: *const u8 = unsafe { params.read() }.cast();
        // SAFETY: the parameter is as long as the kernel says, and the words have room for it.
        unsafe { words.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(source, bytes) };
        on(state, stream, Work::Kernel { kernel, params: words, grid: [grid_x, grid_y], threads: block_x })
    })
}

/// Enqueues work.
fn on(state: &mut State, stream: usize, work: Work) -> Result<(), Code> {
    check(state.streams.exists(stream), INVALID_HANDLE)?;
    state.streams.enqueue(stream, work);
    Ok(())
}

fn done(code: Code) -> Result<(), Code> {
    check(code == SUCCESS, code)
}

/// A device address as the host counts it: here it is the same.
fn host(address: u64) -> usize {
    usize::try_from(address).unwrap_or(0)
}

/// Names and descriptions of errors, which PyTorch asks for.
#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(_code: Code, name: *mut *const c_char) -> Code {
    put(name, c"an error of the driver made of software".as_ptr()).err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(code: Code, text: *mut *const c_char) -> Code {
    cuGetErrorName(code, text)
}
