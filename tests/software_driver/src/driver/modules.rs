//! Modules, kernels and their launches.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::codes::{INVALID_IMAGE, INVALID_VALUE};
use crate::cubin;
use crate::kernels::BLOCK;
use crate::ledger::LOAD;
use crate::operations::{Launch, check};

use super::{put, text};

/// `CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK`, `NUM_REGS`, `PTX_VERSION` and `BINARY_VERSION`; others are 0.
const ATTRIBUTES: &[(c_int, c_int)] = &[(0, BLOCK.cast_signed()), (4, 32), (5, 70), (6, 90)];
/// One more than the greatest number of an attribute.
const ATTRIBUTES_END: c_int = 16;
/// `MAX_THREADS_PER_BLOCK`, `CONST_SIZE_BYTES` and `MAX_DYNAMIC_SHARED_SIZE_BYTES`: those of a function that is loaded.
const OF_LOADED: [c_int; 3] = [0, 2, 8];
/// The first byte of a cubin, as no PTX does.
const ELF: u8 = 0x7F;

super::exports! {
    Context cuModuleLoadData(module: *mut usize, image: *const c_char) |call| {
        check(!module.is_null() && !image.is_null(), INVALID_VALUE)?;
        call.state.streams.captures.forbid()?;
        let handle = call.state.handle();
        let capability = call.state.config.capability;
        // SAFETY: an image has at least one byte.
        let first = unsafe { image.cast::<u8>().read() };
        if first == ELF {
            // SAFETY: the caller gives an image in full.
            let image = unsafe { cubin::image(image.cast()) }?;
            call.state.modules.load_cubin(handle, call.device, image, capability)?;
            call.state.ledger.count(&format!("{LOAD}cubin"));
            return put(module, handle);
        }
        // A compiled image begins with other bytes, and does not end with a zero.
        check(first.is_ascii_whitespace() || first.is_ascii_graphic(), INVALID_IMAGE)?;
        let text = text(image).map_err(|_| INVALID_IMAGE)?;
        let version = call.state.config.version;
        call.state.modules.load(handle, call.device, text, version, capability)?;
        call.state.ledger.count(&format!("{LOAD}ptx"));
        put(module, handle)
    };
    Context cuModuleUnload(module: usize) |call| {
        call.state.streams.captures.forbid()?;
        call.state.modules.unload(module)
    };
    Context cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) |call| {
        let name = text(name)?;
        let handle = call.state.handle();
        let is_loaded = !call.state.config.is_lazy;
        put(function, call.state.modules.function(handle, module, name, is_loaded)?)
    };
    Context cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: usize) |call| {
        call.state.modules.get(function)?;
        check((0..ATTRIBUTES_END).contains(&attribute), INVALID_VALUE)?;
        if OF_LOADED.contains(&attribute) {
            call.state.load_function(function)?;
        }
        let known = ATTRIBUTES.iter().find(|(at, _)| *at == attribute);
        put(value, known.map_or(0, |(_, value)| *value))
    };
    Context cuFuncLoad(function: usize) |call| call.state.load_function(function);
    Context cuFuncIsLoaded(state: *mut c_int, function: usize) |call| {
        put(state, c_int::from(call.state.modules.get(function)?.is_loaded))
    };
    Context cuLaunchKernel(
        function: usize,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: usize,
        params: *const *const u8,
        extra: *const *const c_void,
    ) |call| {
        check(extra.is_null(), INVALID_VALUE)?;
        let launch = Launch {
            function,
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
            params,
        };
        call.state.launch(call.device, &launch, stream)
    };
}
