use super::*;
use crate::codes::{INVALID_HANDLE, INVALID_VALUE, NOT_READY};

#[test]
fn work_waits_for_somebody_who_synchronises() {
    let _fresh = FreshDriver::with_context();
    let (block, first) = (allocate(4), stream());
    ok(cuMemsetD8Async(block, 1, 4, first));
    assert_eq!((soft_pending(first), peek(block)), (1, [0xA5; 4]));
    ok(cuStreamSynchronize(0));
    assert_eq!(peek(block), [0xA5; 4]);
    ok(cuStreamSynchronize(first));
    assert_eq!((soft_pending(first), peek(block)), (0, [1; 4]));
    ok(cuMemsetD8Async(block, 2, 4, 0));
    ok(cuMemsetD8Async(block + 2, 3, 2, first));
    assert_eq!(soft_pending_all(), 2);
    ok(cuCtxSynchronize());
    assert_eq!(soft_pending_all(), 0);
}

#[test]
fn only_what_is_waited_for_runs() {
    let _fresh = FreshDriver::with_context();
    let (block, [producer, consumer, other], done) = (allocate(4), [stream(), stream(), stream()], event());
    ok(cuMemsetD8Async(block, 1, 1, producer));
    ok(cuEventRecord(done, producer));
    ok(cuMemsetD8Async(block + 1, 2, 1, producer));
    ok(cuMemsetD8Async(block + 2, 3, 1, other));
    ok(cuStreamWaitEvent(consumer, done, 0));
    ok(cuMemcpyDtoDAsync_v2(block + 3, block, 1, consumer));
    ok(soft_run(consumer));
    assert_eq!(peek(block), [1, 0xA5, 0xA5, 1]);
    // Without the wait the copy would have come first.
    ok(cuMemsetD8Async(block, 9, 1, producer));
    ok(cuMemcpyDtoDAsync_v2(block + 3, block, 1, consumer));
    ok(cuStreamSynchronize(consumer));
    assert_eq!(peek(block), [1, 0xA5, 0xA5, 1]);
}

#[test]
fn a_wait_means_the_record_of_its_time() {
    let _fresh = FreshDriver::with_context();
    let (block, [producer, consumer], done) = (allocate(2), [stream(), stream()], event());
    // There is nothing to wait for of an event that was never recorded.
    ok(cuStreamWaitEvent(consumer, done, 0));
    ok(cuEventSynchronize(done));
    ok(cuEventQuery(done));
    ok(cuMemsetD8Async(block, 1, 1, producer));
    ok(cuEventRecord(done, producer));
    ok(cuStreamWaitEvent(consumer, done, 0));
    ok(cuMemsetD8Async(block + 1, 2, 1, producer));
    ok(cuEventRecord(done, producer));
    ok(soft_run(consumer));
    assert_eq!(peek(block), [1, 0xA5]);
    ok(cuEventSynchronize(done));
    assert_eq!(peek(block), [1, 2]);
}

#[test]
fn queries_run_what_lies_before_them_in_the_end() {
    let _fresh = FreshDriver::with_context();
    let (block, done) = (allocate(2), event());
    ok(cuMemsetD8Async(block, 1, 1, 0));
    ok(cuEventRecord(done, 0));
    ok(cuMemsetD8Async(block + 1, 2, 1, 0));
    assert_eq!([cuEventQuery(done), cuEventQuery(done)], [NOT_READY; 2]);
    assert_eq!(peek(block), [0xA5; 2]);
    ok(cuEventQuery(done));
    ok(cuEventQuery(done));
    assert_eq!(peek(block), [1, 0xA5]);
    ok(cuStreamSynchronize(0));
    soft_set_queries(0);
    ok(cuEventRecord(done, 0));
    assert!((0..100).all(|_| cuEventQuery(done) == NOT_READY));
    ok(soft_run(0));
    ok(cuEventQuery(done));
}

#[test]
fn page_locked_memory_is_read_and_written_late() {
    let _fresh = FreshDriver::with_context();
    let (block, page) = (allocate(8), locked(&[1; 4]));
    let mut pageable = [2u8; 4];
    ok(cuMemcpyHtoDAsync_v2(block, page, 4, 0));
    ok(cuMemcpyHtoDAsync_v2(block + 4, pageable.as_ptr().addr(), 4, 0));
    write_host(page, &[3; 4]);
    pageable = [4; 4];
    assert_eq!(soft_pending(0), 2);
    ok(cuStreamSynchronize(0));
    assert_eq!(peek(block), [3, 3, 3, 3, 2, 2, 2, 2]);
    ok(cuMemcpyDtoHAsync_v2(page, block + 4, 4, 0));
    assert_eq!(read_host(page), [3; 4]);
    // A copy to pageable memory is waited for, and what comes before it on its stream.
    ok(cuMemcpyDtoHAsync_v2((&raw mut pageable).addr(), block, 4, 0));
    // SAFETY: it is a local variable, which the driver knows by its address only.
    let landed = unsafe { (&raw const pageable).read_volatile() };
    assert_eq!((landed, read_host(page)), ([3; 4], [2; 4]));
}

#[test]
fn a_destroyed_stream_has_its_work_done() {
    let _fresh = FreshDriver::with_context();
    let (block, gone) = (allocate(1), stream());
    ok(cuMemsetD8Async(block, 1, 1, gone));
    ok(cuStreamDestroy_v2(gone));
    assert_eq!(cuStreamSynchronize(gone), INVALID_HANDLE);
    assert_eq!(peek(block), [0xA5]);
    ok(cuCtxSynchronize());
    assert_eq!((soft_pending_all(), peek(block)), (0, [1]));
}

#[test]
fn uses_of_destroyed_streams_are_counted() {
    let _fresh = FreshDriver::with_context();
    let (block, gone, done) = (allocate(1), stream(), event());
    ok(cuMemsetD8Async(block, 1, 1, gone));
    ok(cuStreamDestroy_v2(gone));
    assert_eq!((soft_uses_of_destroyed(), cuEventRecord(done, gone)), (0, INVALID_HANDLE));
    assert_eq!((soft_uses_of_destroyed(), cuStreamSynchronize(gone)), (1, INVALID_HANDLE));
    // What was no stream ever is no destroyed one.
    assert_eq!((cuStreamSynchronize(0x5FFF_FFF0), soft_uses_of_destroyed()), (INVALID_HANDLE, 2));
    assert_ne!(stream(), gone);
}

#[test]
fn handles_are_used_again_if_asked_for() {
    let _fresh = FreshDriver::with_context();
    soft_reuse_streams(1);
    let (block, gone) = (allocate(1), stream());
    ok(cuMemsetD8Async(block, 1, 1, gone));
    ok(cuStreamDestroy_v2(gone));
    // Not while the stream has work.
    let other = stream();
    assert_ne!(other, gone);
    soft_run_all();
    assert_eq!(stream(), gone);
    ok(cuStreamSynchronize(gone));
    assert_ne!(stream(), gone);
    assert_eq!(soft_uses_of_destroyed(), 0);
    soft_restore();
    ok(cuStreamDestroy_v2(gone));
    assert_ne!(stream(), gone);
}

/// Opens the gates after a while, in another thread, while `work` waits for it.
fn while_gates_open<T>(work: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            soft_open_gates();
        });
        work()
    })
}

#[test]
fn what_lies_behind_a_gate_waits_for_it() {
    let _fresh = FreshDriver::with_context();
    let (block, [first, other], done) = (allocate(2), [stream(), stream()], event());
    ok(cuMemsetD8Async(block, 1, 1, first));
    ok(soft_close_gate(first));
    ok(cuMemsetD8Async(block, 2, 1, first));
    ok(cuEventRecord(done, first));
    ok(cuStreamWaitEvent(other, done, 0));
    ok(cuMemsetD8Async(block + 1, 3, 1, other));
    soft_run_all();
    assert_eq!((peek(block), soft_pending(first), soft_pending(other)), ([1, 0xA5], 1, 1));
    for _ in 0..9 {
        assert_eq!(cuEventQuery(done), NOT_READY);
    }
    while_gates_open(|| ok(cuStreamSynchronize(other)));
    assert_eq!(peek(block), [2, 3]);
    let waits: [&dyn Fn() -> i32; 4] = [
        &|| cuEventSynchronize(done),
        &|| cuCtxSynchronize(),
        &|| cuMemcpyDtoHAsync_v2([0u8; 1].as_mut_ptr().addr(), block, 1, first),
        &|| cuStreamSynchronize(first),
    ];
    for wait in waits {
        ok(soft_close_gate(first));
        ok(cuEventRecord(done, first));
        while_gates_open(|| ok(wait()));
        assert_eq!(cuEventQuery(done), SUCCESS);
    }
}

#[test]
fn a_full_queue_lets_calls_wait() {
    let _fresh = FreshDriver::with_context();
    let (block, page, first) = (allocate(8), locked(&[7]), stream());
    let launched = kernels::function();
    let calls: [&dyn Fn() -> i32; 3] = [
        &|| kernels::launch(launched, 1, 256, &kernels::five(block), first),
        &|| cuMemsetD8Async(block, 1, 1, first),
        &|| cuMemcpyHtoDAsync_v2(block, page, 1, first),
    ];
    soft_set_queue(3);
    for call in calls {
        ok(soft_close_gate(first));
        for _ in 0..3 {
            ok(call());
        }
        assert_eq!(soft_pending(first), 3);
        while_gates_open(|| ok(call()));
        assert_eq!(soft_pending(first), 1);
        ok(cuStreamSynchronize(first));
    }
    // Without a gate it becomes shorter.
    for _ in 0..9 {
        ok(cuMemsetD8Async(block, 1, 1, first));
    }
    assert_eq!(soft_pending(first), 3);
}

#[test]
fn an_event_says_how_it_is_waited_for() {
    let _fresh = FreshDriver::with_context();
    let mut event = 0;
    for flags in [4, 6, 8, 1 << 31] {
        assert_eq!(cuEventCreate(&raw mut event, flags), INVALID_VALUE, "{flags}");
    }
    for (flags, how) in [(0, c"wait:spins"), (1, c"wait:sleeps"), (2, c"wait:spins"), (3, c"wait:sleeps")] {
        ok(cuEventCreate(&raw mut event, flags));
        ok(cuEventRecord(event, 0));
        soft_reset_calls();
        ok(cuEventSynchronize(event));
        let waits = [c"wait:spins", c"wait:sleeps"].map(|how| soft_calls(how.as_ptr()));
        assert_eq!((waits[0] + waits[1], soft_calls(how.as_ptr())), (1, 1), "{flags}");
        assert_eq!(soft_calls(std::ptr::null()), 1);
    }
}
