//! Copies and fills.

use crate::operations::Direction;

use super::host;

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
    Context cuMemcpyHtoD_v2(target: u64, source: usize, len: usize) |call| {
        call.state.copy_now(call.device, [host(target), source], len, Direction::ToDevice)
    };
    Context cuMemcpyDtoH_v2(target: usize, source: u64, len: usize) |call| {
        call.state.copy_now(call.device, [target, host(source)], len, Direction::ToHost)
    };
}
