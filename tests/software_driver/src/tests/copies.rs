use super::*;
use crate::codes::{CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, INVALID_VALUE, NOT_SUPPORTED};

const HOST: u32 = 1;
const DEVICE: u32 = 2;
const UNIFIED: u32 = 4;

fn at(kind: u32, address: u64, pitch: usize) -> Half {
    let host = usize::try_from(address).unwrap_or(0);
    Half { x_bytes: 0, y: 0, kind, host, device: address, array: 0, pitch }
}

#[test]
fn rows_are_copied_late() {
    let _fresh = FreshDriver::with_context();
    let (block, page) = (allocate(16), locked(&[1, 2, 3, 4, 5, 6, 7, 8]));
    let zeros = locked(&[0; 16]);
    ok(cuMemcpyHtoDAsync_v2(block, zeros, 16, 0));
    // The second and the third row of two bytes, behind two others, to rows of five.
    let source = Half { y: 1, ..at(HOST, page as u64, 2) };
    let target = Half { x_bytes: 1, y: 1, ..at(DEVICE, block, 5) };
    let copy = Copy2D { source, target, width: 2, height: 2 };
    ok(cuMemcpy2DAsync_v2(&raw const copy, 0));
    write_host(page, &[1, 2, 9]);
    assert_eq!(soft_pending_all(), 2);
    ok(cuStreamSynchronize(0));
    assert_eq!(peek(block), [0, 0, 0, 0, 0, 0, 9, 4, 0, 0, 0, 5, 6, 0, 0, 0]);
    let back = Copy2D {
        source: at(UNIFIED, block + 6, 5),
        target: at(UNIFIED, page as u64, 4),
        width: 2,
        height: 2,
    };
    ok(cuMemcpy2DAsync_v2(&raw const back, 0));
    ok(cuStreamSynchronize(0));
    assert_eq!(read_host(page), [9, 4, 9, 4, 5, 6, 7, 8]);
}

#[test]
fn copies_of_rows_are_checked() {
    let _fresh = FreshDriver::with_context();
    let (block, page) = (allocate(16), locked(&[0; 16]));
    let good = Copy2D { source: at(HOST, page as u64, 8), target: at(DEVICE, block, 8), width: 4, height: 2 };
    let with = |change: &dyn Fn(&mut Copy2D)| {
        let mut copy = good;
        change(&mut copy);
        cuMemcpy2DAsync_v2(&raw const copy, 0)
    };
    assert_eq!(with(&|copy| copy.source.pitch = 3), INVALID_VALUE);
    assert_eq!(with(&|copy| copy.target.x_bytes = 5), INVALID_VALUE);
    assert_eq!(with(&|copy| copy.target.pitch = 1 << 31), INVALID_VALUE);
    assert_eq!(with(&|copy| copy.height = 3), INVALID_VALUE);
    assert_eq!(with(&|copy| copy.target = at(DEVICE, 0, 8)), INVALID_VALUE);
    assert_eq!(with(&|copy| copy.target.kind = HOST), INVALID_VALUE);
    assert_eq!(with(&|copy| copy.target.kind = 3), NOT_SUPPORTED);
    assert_eq!(with(&|copy| copy.target.kind = 9), INVALID_VALUE);
    assert_eq!(cuMemcpy2DAsync_v2(std::ptr::null(), 0), INVALID_VALUE);
    ok(with(&|copy| copy.width = 0));
    assert_eq!(soft_pending_all(), 0);
    ok(cuMemcpy2DAsync_v2(&raw const good, 0));
    assert_eq!(soft_pending_all(), 1);
}

#[test]
fn copies_of_rows_are_captured_unless_they_are_pageable() {
    let _fresh = FreshDriver::with_context();
    let (block, page, first) = (allocate(4), locked(&[1, 0, 2, 0]), stream());
    let source = at(HOST, page as u64, 2);
    let good = Copy2D { source, target: at(DEVICE, block, 1), width: 1, height: 2 };
    ok(soft_begin_capture(first));
    ok(cuMemcpy2DAsync_v2(&raw const good, first));
    let graph = soft_end_capture(first);
    ok(soft_replay(graph, first));
    ok(cuStreamSynchronize(first));
    assert_eq!(peek(block), [1, 2, 0xA5, 0xA5]);
    let mine = [3u8, 0, 4];
    let pageable = Copy2D { source: at(HOST, mine.as_ptr().addr() as u64, 2), ..good };
    ok(cuMemcpy2DAsync_v2(&raw const pageable, first));
    ok(cuStreamSynchronize(first));
    assert_eq!(peek(block), [3, 4, 0xA5, 0xA5]);
    ok(soft_begin_capture(first));
    assert_eq!(cuMemcpy2DAsync_v2(&raw const pageable, first), CAPTURE_UNSUPPORTED);
    assert_eq!(soft_end_capture(first), -i64::from(CAPTURE_INVALIDATED));
}
