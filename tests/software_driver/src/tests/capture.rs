use super::*;
use crate::codes::{
    CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_UNJOINED, CAPTURE_UNSUPPORTED,
    CAPTURE_WRONG_THREAD, ILLEGAL_STATE, INVALID_VALUE,
};

const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

pub fn status(stream: usize) -> i32 {
    let mut status = -1;
    ok(cuStreamIsCapturing(stream, &raw mut status));
    status
}

#[test]
fn a_graph_does_again_what_was_captured() {
    let _fresh = FreshDriver::with_context();
    let (block, page, first, other) = (allocate(2), locked(&[1]), stream(), stream());
    assert_eq!(status(first), 0);
    ok(soft_begin_capture(first));
    assert_eq!([status(first), status(other)], [1, 0]);
    ok(cuMemcpyHtoDAsync_v2(block, page, 1, first));
    ok(cuMemcpyDtoDAsync_v2(block + 1, block, 1, first));
    let graph = soft_end_capture(first);
    assert!(graph > 0);
    ok(cuStreamSynchronize(first));
    assert_eq!((status(first), peek(block)), (0, [0xA5; 2]));
    for value in [5, 6] {
        ok(soft_replay(graph, other));
        write_host(page, &[value]);
        ok(cuStreamSynchronize(other));
        assert_eq!(peek(block), [value; 2]);
    }
    assert_eq!(soft_replay(graph + 1, other), INVALID_VALUE);
    assert_eq!(i64::from(ILLEGAL_STATE), -soft_end_capture(first));
    assert_eq!(soft_begin_capture(0), CAPTURE_UNSUPPORTED);
}

#[test]
fn what_cannot_be_captured_spoils_the_capture() {
    let _fresh = FreshDriver::with_context();
    let (block, first, done) = (allocate(8), stream(), event());
    ok(cuEventRecord(done, 0));
    let host = std::cell::Cell::new([0u8; 8]);
    let start = host.as_ptr().addr();
    let forbidden: [&dyn Fn() -> i32; 8] = [
        &|| cuMemAlloc_v2(&mut 0, 8),
        &|| cuMemFree_v2(block),
        &|| cuEventQuery(done),
        &|| cuEventSynchronize(done),
        &|| cuStreamSynchronize(first),
        &|| cuCtxSynchronize(),
        &|| cuMemcpyDtoHAsync_v2(start, block, 8, first),
        &|| cuMemcpyHtoDAsync_v2(block, start, 8, first),
    ];
    for (at, call) in forbidden.iter().enumerate() {
        ok(soft_begin_capture(first));
        ok(cuMemsetD8Async(block, 1, 8, first));
        assert_eq!((call(), status(first)), (CAPTURE_UNSUPPORTED, 2), "call {at}");
        assert_eq!(cuMemsetD8Async(block, 1, 8, first), CAPTURE_INVALIDATED);
        assert_eq!(soft_end_capture(first), -i64::from(CAPTURE_INVALIDATED));
    }
    ok(cuStreamSynchronize(first));
    assert_eq!((peek(block), soft_pending_all()), ([0xA5; 8], 0));
}

#[test]
fn streams_join_a_capture_by_events() {
    let _fresh = FreshDriver::with_context();
    let (block, [first, side], done) = (allocate(2), [stream(), stream()], event());
    ok(soft_begin_capture(first));
    ok(cuEventRecord(done, first));
    ok(cuStreamWaitEvent(side, done, 0));
    ok(cuMemsetD8Async(block, 1, 1, side));
    ok(cuEventRecord(done, side));
    ok(cuStreamWaitEvent(first, done, 0));
    ok(cuMemsetD8Async(block + 1, 2, 1, first));
    ok(soft_replay(soft_end_capture(first), 0));
    ok(cuStreamSynchronize(0));
    assert_eq!(peek(block), [1, 2]);
}

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
    std::thread::scope(|scope| scope.spawn(entered).join().unwrap_or_else(|_| panic!("it failed")))
}

fn alloc() -> i32 {
    cuMemAlloc_v2(&mut 0, 8)
}

#[test]
fn unsafe_calls_are_forbidden_by_the_modes_of_thread_and_capture() {
    let _fresh = FreshDriver::with_context();
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
fn copies_of_pageable_memory_are_unsafe_beside_captures() {
    let _fresh = FreshDriver::with_context();
    let (block, page, [first, other]) = (allocate(8), locked(&[1; 8]), [stream(), stream()]);
    let host = std::cell::Cell::new([0u8; 8]);
    let start = host.as_ptr().addr();
    let copies: [&(dyn Fn() -> i32 + Sync); 2] =
        [&|| cuMemcpyHtoDAsync_v2(block, start, 8, other), &|| cuMemcpyDtoHAsync_v2(start, block, 8, other)];
    for copy in copies {
        ok(cuStreamBeginCapture_v2(first, GLOBAL));
        assert_eq!(elsewhere(copy), CAPTURE_UNSUPPORTED);
        assert_eq!(end(first), CAPTURE_INVALIDATED);
        ok(cuStreamBeginCapture_v2(first, GLOBAL));
        ok(elsewhere(|| with_mode(RELAXED, copy)));
        ok(elsewhere(|| cuMemcpyHtoDAsync_v2(block, page, 8, other)));
        ok(end(first));
    }
}

#[test]
fn a_capture_ends_in_its_thread() {
    let _fresh = FreshDriver::with_context();
    let first = stream();
    ok(cuStreamBeginCapture_v2(first, RELAXED));
    ok(elsewhere(|| end(first)));
    ok(cuStreamBeginCapture_v2(first, GLOBAL));
    assert_eq!(elsewhere(|| end(first)), CAPTURE_WRONG_THREAD);
    assert_eq!((status(first), end(first)), (0, ILLEGAL_STATE));
}

#[test]
fn only_work_that_is_left_is_outside_of_a_capture() {
    let _fresh = FreshDriver::with_context();
    let (block, [first, other], done) = (allocate(1), [stream(), stream()], event());
    for is_done in [true, false] {
        ok(cuMemsetD8Async(block, 1, 1, other));
        ok(cuEventRecord(done, other));
        if is_done {
            ok(cuStreamSynchronize(other));
        }
        ok(cuStreamBeginCapture_v2(first, GLOBAL));
        let code = if is_done { SUCCESS } else { CAPTURE_ISOLATION };
        assert_eq!(cuStreamWaitEvent(first, done, 0), code);
        assert_eq!(end(first), if is_done { SUCCESS } else { CAPTURE_INVALIDATED });
    }
}

#[test]
fn streams_that_joined_are_awaited_at_the_end() {
    let _fresh = FreshDriver::with_context();
    let (block, [first, side, third], done) = (allocate(4), [stream(), stream(), stream()], event());
    let pull = |stream, from| {
        ok(cuEventRecord(done, from));
        ok(cuStreamWaitEvent(stream, done, 0));
    };
    let work = |stream| ok(cuMemsetD8Async(block, 1, 1, stream));
    let none: &dyn Fn() = &|| ();
    let cases: [(&dyn Fn(), i32); 8] = [
        // Only work has to be awaited: an H100 and an H200 say so.
        (none, SUCCESS),
        (&|| work(side), CAPTURE_UNJOINED),
        (&|| work(first), SUCCESS),
        (&|| pull(first, side), SUCCESS),
        // Later work is not awaited.
        (&|| [pull(first, side), work(side)].into_iter().collect(), CAPTURE_UNJOINED),
        (&|| [work(side), pull(first, side)].into_iter().collect(), SUCCESS),
        // By way of another stream, which has to be awaited itself.
        (&|| [work(side), pull(third, side), pull(first, third)].into_iter().collect(), SUCCESS),
        (
            &|| [work(side), pull(third, side), work(third), pull(first, side)].into_iter().collect(),
            CAPTURE_UNJOINED,
        ),
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
fn the_default_streams_are_two() {
    let _fresh = FreshDriver::with_context();
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
fn a_blocking_capture_forbids_to_wait_for_the_legacy_stream() {
    let _fresh = FreshDriver::with_context();
    let mut blocking = 0;
    ok(cuStreamCreate(&raw mut blocking, 0));
    ok(cuStreamBeginCapture_v2(blocking, RELAXED));
    assert_eq!(cuStreamSynchronize(0), CAPTURE_IMPLICIT);
    assert_eq!(end(blocking), CAPTURE_INVALIDATED);
}

#[test]
fn nothing_is_loaded_in_a_capture() {
    let _fresh = FreshDriver::with_context();
    let (function, out, first) = (kernels::function(), allocate(8), stream());
    let launch = || kernels::launch(function, 1, 256, &kernels::five(out), first);
    for mode in [GLOBAL, RELAXED] {
        ok(cuStreamBeginCapture_v2(first, mode));
        assert_eq!(launch(), CAPTURE_UNSUPPORTED);
        assert_eq!((end(first), kernels::is_loaded(function)), (CAPTURE_INVALIDATED, false));
    }
    ok(cuStreamBeginCapture_v2(first, GLOBAL));
    assert_eq!(cuFuncLoad(function), CAPTURE_UNSUPPORTED);
    assert_eq!(end(first), CAPTURE_INVALIDATED);
    // Beside one it can be, if the thread takes care of what it does.
    ok(cuStreamBeginCapture_v2(first, GLOBAL));
    ok(with_mode(RELAXED, || cuFuncLoad(function)));
    ok(launch());
    ok(end(first));
}
