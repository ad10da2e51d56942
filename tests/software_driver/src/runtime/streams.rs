//! Streams and events.

use std::ffi::{c_int, c_uint};

use crate::codes::{INVALID_VALUE, NOT_READY};
use crate::driver::{BLOCKING_SYNC, put, put_new};
use crate::operations::check;
use crate::threads::{Mode, exchange_mode};

super::exports! {
    Context cudaStreamCreate(stream: *mut usize) |call| put_new(stream, || call.state.create_stream(call.device, 0));
    Context cudaStreamCreateWithFlags(stream: *mut usize, flags: c_uint) |call| {
        put_new(stream, || call.state.create_stream(call.device, flags))
    };
    Context cudaStreamCreateWithPriority(stream: *mut usize, flags: c_uint, _priority: c_int) |call| {
        put_new(stream, || call.state.create_stream(call.device, flags))
    };
    Context cudaStreamDestroy(stream: usize) |call| call.state.destroy_stream(call.device, stream);
    Context cudaStreamSynchronize(stream: usize) |call| call.state.synchronize_stream(call.device, stream);
    Context cudaStreamQuery(stream: usize) |call| call.state.query_stream(call.device, stream);
    Context cudaStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) |call| {
        call.state.wait_for_event(call.device, stream, event)
    };
    Context cudaStreamGetPriority(stream: usize, priority: *mut c_int) |call| {
        call.state.streams.resolve(stream, call.device)?;
        put(priority, 0)
    };
    Context cudaStreamIsCapturing(stream: usize, status: *mut c_int) |call| {
        put(status, call.state.capture_status(call.device, stream)? as c_int)
    };
    Nothing cudaThreadExchangeStreamCaptureMode(mode: *mut c_int) |_| {
        // SAFETY: the caller gives the new mode here.
        let new = unsafe { mode.as_ref() }.copied().and_then(Mode::new).ok_or(INVALID_VALUE)?;
        put(mode, exchange_mode(new) as c_int)
    };
    Context cudaEventCreate(event: *mut usize) |call| {
        put_new(event, || Ok(call.state.create_event(call.device, false)))
    };
    Context cudaEventCreateWithFlags(event: *mut usize, flags: c_uint) |call| {
        put_new(event, || Ok(call.state.create_event(call.device, flags & BLOCKING_SYNC != 0)))
    };
    Context cudaEventDestroy(event: usize) |call| call.state.events.destroy(event);
    Context cudaEventRecord(event: usize, stream: usize) |call| {
        call.state.record_event(call.device, event, stream)
    };
    Context cudaEventRecordWithFlags(event: usize, stream: usize, flags: c_uint) |call| {
        check(flags == 0, INVALID_VALUE)?;
        call.state.record_event(call.device, event, stream)
    };
    Context cudaEventQuery(event: usize) |call| call.state.query_event(event);
    Context cudaEventSynchronize(event: usize) |call| call.state.synchronize_event(event);
    // Nothing takes time here.
    Context cudaEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) |call| {
        for event in [start, end] {
            check(call.state.is_over(event)?, NOT_READY)?;
        }
        put(milliseconds, 0.0)
    };
}
