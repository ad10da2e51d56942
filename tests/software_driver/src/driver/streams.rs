//! Streams and events.

use std::ffi::{c_int, c_uint};

use crate::codes::INVALID_VALUE;
use crate::operations::check;
use crate::threads::{Mode, exchange_mode};

use super::{put, put_new};

/// `CU_EVENT_BLOCKING_SYNC`, which the runtime has, too.
pub const BLOCKING_SYNC: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

super::exports! {
    Context cuStreamCreate(stream: *mut usize, flags: c_uint) |call| {
        put_new(stream, || call.state.create_stream(call.device, flags))
    };
    Context cuStreamDestroy_v2(stream: usize) |call| call.state.destroy_stream(call.device, stream);
    Context cuStreamSynchronize(stream: usize) |call| call.state.synchronize_stream(call.device, stream);
    Context cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) |call| {
        check(flags <= 1, INVALID_VALUE)?;
        call.state.wait_for_event(call.device, stream, event)
    };
    Context cuStreamIsCapturing(stream: usize, status: *mut c_int) |call| {
        put(status, call.state.capture_status(call.device, stream)? as c_int)
    };
    Context cuStreamBeginCapture_v2(stream: usize, mode: c_int) |call| {
        call.state.begin_capture(call.device, stream, mode)
    };
    Context cuStreamEndCapture(stream: usize, graph: *mut usize) |call| {
        put(graph, 0)?;
        put(graph, call.state.end_capture(call.device, stream)?)
    };
    Init cuThreadExchangeStreamCaptureMode(mode: *mut c_int) |_| {
        // SAFETY: the caller gives the new mode here.
        let new = unsafe { mode.as_ref() }.copied().and_then(Mode::new).ok_or(INVALID_VALUE)?;
        put(mode, exchange_mode(new) as c_int)
    };
    Context cuEventCreate(event: *mut usize, flags: c_uint) |call| {
        check(flags & !(BLOCKING_SYNC | DISABLE_TIMING) == 0, INVALID_VALUE)?;
        put_new(event, || Ok(call.state.create_event(call.device, flags & BLOCKING_SYNC != 0)))
    };
    Context cuEventRecord(event: usize, stream: usize) |call| call.state.record_event(call.device, event, stream);
    Context cuEventQuery(event: usize) |call| call.state.query_event(event);
    Context cuEventSynchronize(event: usize) |call| {
        call.state.synchronize_event(event)?;
        call.state.count_wait(event)
    };
}
