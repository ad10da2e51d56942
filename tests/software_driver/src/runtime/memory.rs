//! Memory and copies.

use std::ffi::{c_int, c_uint};

use crate::codes::{INVALID_VALUE, Outcome};
use crate::copies::Direction;
use crate::driver::{put, put_new};
use crate::memory::Place;

/// `cudaPointerAttributes`.
#[repr(C)]
struct Pointer {
    /// 0 for memory that is not known, 1 for page-locked, 2 for device memory.
    kind: c_int,
    device: c_int,
    on_device: usize,
    on_host: usize,
    reserved: [u64; 8],
}

/// `cudaInvalidDeviceId`.
const NO_DEVICE: c_int = -2;

/// The direction that `cudaMemcpyKind` means.
fn direction(kind: c_int) -> Outcome<Direction> {
    match kind {
        1 => Ok(Direction::ToDevice),
        2 => Ok(Direction::ToHost),
        3 => Ok(Direction::OnDevice),
        0 | 4 => Ok(Direction::Any),
        _ => Err(INVALID_VALUE),
    }
}

super::exports! {
    Context cudaMalloc(address: *mut usize, bytes: usize) |call| {
        call.state.ledger.count("cudaMalloc");
        put_new(address, || call.state.allocate(call.device, bytes))
    };
    // PyTorch gives blocks back that its streams still use.
    Context cudaFree(address: usize) |call| if address == 0 { Ok(()) } else { call.state.free(address, true) };
    Context cudaMallocHost(address: *mut usize, bytes: usize) |call| put_new(address, || call.state.allocate_locked(bytes));
    Context cudaHostAlloc(address: *mut usize, bytes: usize, _flags: c_uint) |call| {
        put_new(address, || call.state.allocate_locked(bytes))
    };
    Context cudaFreeHost(address: usize) |call| if address == 0 { Ok(()) } else { call.state.free_locked(address) };
    Context cudaHostRegister(address: usize, bytes: usize, _flags: c_uint) |call| call.state.register(address, bytes);
    Context cudaHostUnregister(address: usize) |call| call.state.unregister(address);
    Context cudaMemGetInfo(free: *mut usize, total: *mut usize) |call| {
        put(free, call.state.memory.free_bytes(call.device))?;
        put(total, call.state.memory.capacity)
    };
    Init cudaPointerGetAttributes(attributes: *mut Pointer, address: usize) |call| {
        let (kind, device) = match call.state.memory.place(address, 1) {
            Place::Device(device) => (2, c_int::try_from(device).unwrap_or(NO_DEVICE)),
            Place::Locked => (1, 0),
            Place::Pageable | Place::Nowhere => (0, NO_DEVICE),
        };
        let on_device = if kind == 0 { 0 } else { address };
        let on_host = if kind == 2 { 0 } else { address };
        put(attributes, Pointer { kind, device, on_device, on_host, reserved: [0; 8] })
    };
    Context cudaMemcpy(target: usize, source: usize, len: usize, kind: c_int) |call| {
        call.state.copy_now(call.device, [target, source], len, direction(kind)?)
    };
    Context cudaMemcpyAsync(target: usize, source: usize, len: usize, kind: c_int, stream: usize) |call| {
        call.state.copy(call.device, [target, source], len, direction(kind)?, stream)
    };
    Context cudaMemcpyPeerAsync(
        target: usize,
        _target_device: c_int,
        source: usize,
        _source_device: c_int,
        len: usize,
        stream: usize,
    ) |call| call.state.copy(call.device, [target, source], len, Direction::OnDevice, stream);
    Context cudaMemset(target: usize, value: c_int, len: usize) |call| {
        call.state.fill(call.device, target, value.to_le_bytes()[0], len, 0)
    };
    Context cudaMemsetAsync(target: usize, value: c_int, len: usize, stream: usize) |call| {
        call.state.fill(call.device, target, value.to_le_bytes()[0], len, stream)
    };
}
