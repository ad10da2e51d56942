//! Copies and fills.

use std::ffi::c_uint;

use crate::codes::{INVALID_VALUE, NOT_SUPPORTED, Outcome};
use crate::copies::{Direction, Side};
use crate::work::Rows;

use super::host;

/// Half of a `CUDA_MEMCPY2D`: where its rows are.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Half {
    pub x_bytes: usize,
    pub y: usize,
    /// `CUmemorytype`: 1 for the host, 2 for the device, 3 for an array, 4 for what the address says.
    pub kind: c_uint,
    pub host: usize,
    pub device: u64,
    pub array: usize,
    pub pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Copy2D {
    pub source: Half,
    pub target: Half,
    pub width: usize,
    pub height: usize,
}

impl Half {
    /// The address where the first row begins and what kind of memory it must be in, for rows of `width` bytes.
    fn start(&self, width: usize, height: usize) -> Outcome<(usize, Side)> {
        let (base, side) = match self.kind {
            1 => (self.host, Side::Host),
            2 => (host(self.device), Side::Device),
            3 => return Err(NOT_SUPPORTED),
            4 => (host(self.device), Side::Any),
            _ => return Err(INVALID_VALUE),
        };
        let row = self.x_bytes.checked_add(width).ok_or(INVALID_VALUE)?;
        let skipped = self.y.checked_mul(self.pitch).ok_or(INVALID_VALUE)?;
        if height > 1 && self.pitch < row {
            return Err(INVALID_VALUE);
        }
        let offset = skipped.checked_add(self.x_bytes).ok_or(INVALID_VALUE)?;
        Ok((base.checked_add(offset).ok_or(INVALID_VALUE)?, side))
    }
}

super::exports! {
    Context cuMemsetD8Async(target: u64, value: u8, len: usize, stream: usize) |call| {
        call.state.fill(call.device, host(target), value, len, stream)
    };
    Context cuMemcpyHtoDAsync_v2(target: u64, source: usize, len: usize, stream: usize) |call| {
        call.state.copy(call.device, [host(target), source], len, Direction::ToDevice, stream)
    };
    Context cuMemcpyDtoHAsync_v2(target: usize, source: u64, len: usize, stream: usize) |call| {
        call.state.copy(call.device, [target, host(source)], len, Direction::ToHost, stream)
    };
    Context cuMemcpyDtoDAsync_v2(target: u64, source: u64, len: usize, stream: usize) |call| {
        call.state.copy(call.device, [host(target), host(source)], len, Direction::OnDevice, stream)
    };
    Context cuMemcpyAsync(target: u64, source: u64, len: usize, stream: usize) |call| {
        call.state.copy(call.device, [host(target), host(source)], len, Direction::Any, stream)
    };
    Context cuMemcpy2DAsync_v2(copy: *const Copy2D, stream: usize) |call| {
        // SAFETY: the caller gives a description of the copy, or null.
        let copy = unsafe { copy.as_ref() }.ok_or(INVALID_VALUE)?;
        let (width, height) = (copy.width, copy.height);
        let (source, source_side) = copy.source.start(width, height)?;
        let (target, target_side) = copy.target.start(width, height)?;
        let pitches = [copy.target.pitch, copy.source.pitch];
        let rows = Rows { target, source, pitches, width, height };
        call.state.copy_rows(call.device, rows, [target_side, source_side], stream)
    };
}
