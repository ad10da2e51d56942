use std::thread;

use super::capture::status;
use super::{
    Fresh, allocate, cuCtxPushCurrent_v2, cuCtxSynchronize, cuDevicePrimaryCtxRetain, cuEventDestroy_v2,
    cuEventQuery, cuEventRecord, cuGraphDestroy, cuGraphExecDestroy, cuGraphInstantiateWithFlags,
    cuGraphLaunch, cuMemAlloc_v2, cuMemsetD8Async, cuStreamBeginCapture_v2, cuStreamCreate,
    cuStreamDestroy_v2, cuStreamEndCapture, cuStreamGetCaptureInfo_v2, cuStreamIsCapturing,
    cuStreamSynchronize, cuStreamWaitEvent, cuThreadExchangeStreamCaptureMode, event, ok, peek, soft_pending,
    soft_set_reuse_handles, stream,
};
use crate::codes::{
    CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD,
    CAPTURED_EVENT, INVALID_VALUE, NOT_READY, SUCCESS,
};

const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

fn end(stream: usize) -> i32 {
    cuStreamEndCapture(stream, &mut 0)
}

/// Does something with another mode of this thread.
fn with_mode<T>(mut mode: i32, work: impl FnOnce() -> T) -> T {
    ok(cuThreadExchangeStreamCaptureMode(&raw mut mode));
    let found = work();
    ok(cuThreadExchangeStreamCaptureMode(&raw mut mode));
    found
}

/// Does something in another thread, which has the context of the first device.
fn elsewhere<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let mut context = 0;
    ok(cuDevicePrimaryCtxRetain(&raw mut context, 0));
    let entered = || {
        ok(cuCtxPushCurrent_v2(context));
        work()
    };
    thread::scope(|scope| scope.spawn(entered).join().unwrap_or_else(|_| panic!("it failed")))
}

fn alloc() -> i32 {
    cuMemAlloc_v2(&mut 0, 8)
}

#[test]
fn unsafe_calls_are_forbidden_by_the_modes_of_thread_and_capture() {
    let _fresh = Fresh::with_context();
    let first = stream();
    for capture in [GLOBAL, THREAD_LOCAL, RELAXED] {
        for thread in [GLOBAL, THREAD_LOCAL, RELAXED] {
            let own = thread != RELAXED && capture != RELAXED;
            let others = thread == GLOBAL && capture == GLOBAL;
            for (is_own, is_forbidden) in [(true, own), (false, others)] {
                ok(cuStreamBeginCapture_v2(first, capture));
                let code =
                    with_mode(
                        thread,
                        || if is_own { alloc() } else { elsewhere(|| with_mode(thread, alloc)) },
                    );
                assert_eq!(code == CAPTURE_UNSUPPORTED, is_forbidden, "{capture} {thread} {is_own}");
                assert_eq!(end(first) == CAPTURE_INVALIDATED, is_forbidden, "{capture} {thread} {is_own}");
            }
        }
    }
    assert_eq!(cuStreamBeginCapture_v2(first, 3), INVALID_VALUE);
}

#[test]
fn waits_for_a_device_spoil_its_captures_in_every_mode() {
    let _fresh = Fresh::with_context();
    let [first, side] = [stream(), stream()];
    for capture in [GLOBAL, THREAD_LOCAL, RELAXED] {
        for thread in [GLOBAL, THREAD_LOCAL, RELAXED] {
            ok(cuStreamBeginCapture_v2(first, capture));
            ok(cuStreamBeginCapture_v2(side, capture));
            let code = elsewhere(|| with_mode(thread, || cuCtxSynchronize()));
            assert_eq!(
                [code, end(first), end(side)],
                [CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_INVALIDATED]
            );
        }
    }
    ok(cuCtxSynchronize());
}

#[test]
fn a_capture_ends_in_its_thread() {
    let _fresh = Fresh::with_context();
    let first = stream();
    ok(cuStreamBeginCapture_v2(first, THREAD_LOCAL));
    assert_eq!(elsewhere(|| end(first)), CAPTURE_WRONG_THREAD);
    ok(end(first));
    ok(cuStreamBeginCapture_v2(first, RELAXED));
    ok(elsewhere(|| end(first)));
}

#[test]
fn streams_that_joined_are_awaited_at_the_end() {
    let _fresh = Fresh::with_context();
    let (block, [first, side, third], done) = (allocate(4), [stream(), stream(), stream()], event());
    let pull = |stream, from| {
        ok(cuEventRecord(done, from));
        ok(cuStreamWaitEvent(stream, done, 0));
    };
    let work = |stream| ok(cuMemsetD8Async(block, 1, 1, stream));
    let none: &dyn Fn() = &|| ();
    let cases: [(&dyn Fn(), i32); 6] = [
        (none, CAPTURE_UNJOINED),
        (&|| pull(first, side), SUCCESS),
        // Later work is not awaited.
        (&|| [pull(first, side), work(side)].into_iter().collect(), CAPTURE_UNJOINED),
        (&|| [work(side), pull(first, side)].into_iter().collect(), SUCCESS),
        // By way of another stream, which has to be awaited itself.
        (&|| [work(side), pull(third, side), pull(first, third)].into_iter().collect(), SUCCESS),
        (&|| [work(side), pull(third, side), pull(first, side)].into_iter().collect(), CAPTURE_UNJOINED),
    ];
    for (at, (joined, code)) in cases.into_iter().enumerate() {
        ok(cuStreamBeginCapture_v2(first, GLOBAL));
        pull(side, first);
        joined();
        assert_eq!(end(first), code, "case {at}");
        assert_eq!([first, side, third].map(status), [0; 3]);
    }
}

#[test]
fn captured_events_are_no_place_in_time() {
    let _fresh = Fresh::with_context();
    let (first, done) = (stream(), event());
    ok(cuStreamBeginCapture_v2(first, RELAXED));
    ok(cuEventRecord(done, first));
    assert_eq!(with_mode(RELAXED, || cuEventQuery(done)), CAPTURED_EVENT);
    assert_eq!((status(first), end(first)), (2, CAPTURE_INVALIDATED));
}

#[test]
fn the_default_streams_are_two() {
    let _fresh = Fresh::with_context();
    let block = allocate(4);
    ok(cuMemsetD8Async(block, 1, 1, 0));
    ok(cuMemsetD8Async(block + 1, 2, 1, 1));
    ok(cuMemsetD8Async(block + 2, 3, 1, 2));
    assert_eq!([0, 1, 2].map(|stream| soft_pending(stream)), [2, 2, 1]);
    assert_eq!(elsewhere(|| soft_pending(2)), 0);
    ok(cuStreamSynchronize(1));
    assert_eq!(peek(block), [1, 2, 0xA5, 0xA5]);
    ok(cuStreamSynchronize(2));
    assert_eq!(peek(block), [1, 2, 3, 0xA5]);
    for (handle, code) in [(0, CAPTURE_UNSUPPORTED), (1, CAPTURE_UNSUPPORTED), (2, SUCCESS)] {
        assert_eq!(cuStreamBeginCapture_v2(handle, GLOBAL), code);
    }
    ok(end(2));
}

#[test]
fn a_blocking_capture_forbids_the_legacy_stream() {
    let _fresh = Fresh::with_context();
    let (block, mut blocking) = (allocate(1), 0);
    ok(cuStreamCreate(&raw mut blocking, 0));
    ok(cuStreamBeginCapture_v2(blocking, RELAXED));
    // Asking is harmless, use is not.
    assert_eq!([0, 1].map(|stream| cuStreamIsCapturing(stream, &mut 0)), [CAPTURE_IMPLICIT; 2]);
    assert_eq!(status(blocking), 1);
    assert_eq!(cuMemsetD8Async(block, 1, 1, 0), CAPTURE_IMPLICIT);
    assert_eq!(end(blocking), CAPTURE_INVALIDATED);
    ok(cuStreamBeginCapture_v2(blocking, RELAXED));
    assert_eq!(cuStreamSynchronize(0), CAPTURE_IMPLICIT);
    assert_eq!(end(blocking), CAPTURE_INVALIDATED);
    assert_eq!(status(0), 0);
}

#[test]
fn graphs_are_made_of_captures() {
    let _fresh = Fresh::with_context();
    let (block, first) = (allocate(1), stream());
    ok(cuStreamBeginCapture_v2(first, GLOBAL));
    ok(cuMemsetD8Async(block, 1, 1, first));
    let (mut state, mut id, mut graph, mut made) = (0, 0, 0, 0);
    let none = std::ptr::null_mut();
    ok(cuStreamGetCaptureInfo_v2(first, &raw mut state, &raw mut id, none, none, none));
    assert_eq!((state, id > 0), (1, true));
    ok(cuStreamEndCapture(first, &raw mut graph));
    ok(cuGraphInstantiateWithFlags(&raw mut made, graph, 0));
    ok(cuGraphLaunch(made, first));
    ok(cuGraphDestroy(graph));
    ok(cuGraphExecDestroy(made));
    ok(cuStreamSynchronize(first));
    assert_eq!(peek(block), [1]);
    assert_eq!(cuGraphDestroy(graph + 1), INVALID_VALUE);
}

#[test]
fn handles_come_again_if_they_are_told_to() {
    let _fresh = Fresh::with_context();
    soft_set_reuse_handles(1);
    let (block, first, done) = (allocate(1), stream(), event());
    ok(cuMemsetD8Async(block, 1, 1, first));
    ok(cuEventRecord(done, first));
    ok(cuStreamSynchronize(first));
    ok(cuStreamDestroy_v2(first));
    assert_eq!(stream(), first);
    // What was recorded on the old stream is over, and has nothing to do with the new one.
    ok(cuMemsetD8Async(block, 2, 1, first));
    ok(cuEventQuery(done));
    assert_eq!(soft_pending(first), 1);
    ok(cuEventDestroy_v2(done));
    assert_eq!(event(), done);
    ok(cuEventRecord(done, first));
    assert_eq!(cuEventQuery(done), NOT_READY);
}
