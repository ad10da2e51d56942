use super::{
    Fresh, allocate, cuCtxSynchronize, cuEventQuery, cuEventRecord, cuEventSynchronize, cuMemAlloc_v2,
    cuMemFree_v2, cuMemcpyDtoDAsync_v2, cuMemcpyDtoH_v2, cuMemcpyDtoHAsync_v2, cuMemcpyHtoDAsync_v2,
    cuMemsetD8Async, cuStreamIsCapturing, cuStreamSynchronize, cuStreamWaitEvent, event, locked, ok, peek,
    soft_begin_capture, soft_end_capture, soft_pending_all, soft_replay, stream, write_host,
};
use crate::codes::{
    CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_UNSUPPORTED, CAPTURED_EVENT, INVALID_VALUE,
};

pub fn status(stream: usize) -> i32 {
    let mut status = -1;
    ok(cuStreamIsCapturing(stream, &raw mut status));
    status
}

#[test]
fn a_graph_does_again_what_was_captured() {
    let _fresh = Fresh::with_context();
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
    assert_eq!(i64::from(INVALID_VALUE), -soft_end_capture(first));
    assert_eq!(soft_begin_capture(0), CAPTURE_UNSUPPORTED);
}

#[test]
fn what_cannot_be_captured_spoils_the_capture() {
    let _fresh = Fresh::with_context();
    let (block, first, done) = (allocate(8), stream(), event());
    ok(cuEventRecord(done, 0));
    let host = std::cell::Cell::new([0u8; 8]);
    let start = host.as_ptr().addr();
    let forbidden: [&dyn Fn() -> i32; 9] = [
        &|| cuMemAlloc_v2(&mut 0, 8),
        &|| cuMemFree_v2(block),
        &|| cuEventQuery(done),
        &|| cuEventSynchronize(done),
        &|| cuStreamSynchronize(first),
        &|| cuCtxSynchronize(),
        &|| cuMemcpyDtoH_v2(start, block, 8),
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
    ok(cuMemcpyDtoH_v2(start, block, 8));
    assert_eq!((host.get(), soft_pending_all()), ([0xA5; 8], 0));
}

#[test]
fn streams_join_a_capture_by_events() {
    let _fresh = Fresh::with_context();
    let (block, [first, side], [fork, join]) = (allocate(2), [stream(), stream()], [event(), event()]);
    ok(soft_begin_capture(first));
    ok(cuEventRecord(fork, first));
    ok(cuStreamWaitEvent(side, fork, 0));
    assert_eq!(status(side), 1);
    ok(cuMemsetD8Async(block, 1, 1, side));
    ok(cuEventRecord(join, side));
    ok(cuStreamWaitEvent(first, join, 0));
    ok(cuMemsetD8Async(block + 1, 2, 1, first));
    let graph = soft_end_capture(first);
    assert_eq!((status(side), cuEventQuery(join)), (0, CAPTURED_EVENT));
    ok(soft_replay(graph, 0));
    ok(cuStreamSynchronize(0));
    assert_eq!(peek(block), [1, 2]);
    // What was not captured cannot be waited for.
    ok(cuEventRecord(fork, side));
    ok(soft_begin_capture(first));
    assert_eq!(cuStreamWaitEvent(first, fork, 0), CAPTURE_ISOLATION);
    assert_eq!(soft_end_capture(first), -i64::from(CAPTURE_INVALIDATED));
}
