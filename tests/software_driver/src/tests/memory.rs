use super::kernels::{five, function, launch};
use super::*;
use crate::codes::{
    ALREADY_REGISTERED, INVALID_VALUE, NOT_REGISTERED, NOT_SUPPORTED, OUT_OF_MEMORY, Outcome,
};

/// Follows a device address, as no host may.
fn touch(address: u64) {
    let pointer = usize::try_from(address).unwrap_or(0) as *const u8;
    // SAFETY: none; the process that does it is meant to die.
    let _ = unsafe { pointer.read_volatile() };
}

#[test]
fn the_host_cannot_touch_device_memory() {
    let _fresh = FreshDriver::with_context();
    let block = allocate(1000);
    assert!(dies(|| touch(block)));
    ok(cuMemsetD8Async(block, 1, 1000, 0));
    ok(cuStreamSynchronize(0));
    assert!(dies(|| touch(block + 999)));
    ok(cuMemFree_v2(block));
    assert!(dies(|| touch(block)));
    assert_ne!(allocate(1000), block);
    let page = locked(&[1]);
    assert!(!dies(|| touch(page as u64)));
    ok(cuMemFreeHost(page));
    assert!(dies(|| touch(page as u64)));
}

#[test]
fn memory_is_fresh_and_limited() {
    let _fresh = FreshDriver::with_context();
    let large = allocate(40 << 20);
    assert_eq!((large % 256, peek(large + (33 << 20))), (0, [0xA5; 64]));
    ok(cuMemsetD8Async(large + 100, 0, 39 << 20, 0));
    ok(cuStreamSynchronize(0));
    assert_eq!(peek(large + 98), [0xA5, 0xA5, 0, 0]);
    assert_eq!(peek(large + 98 + (39 << 20)), [0, 0, 0xA5, 0xA5]);
    let (mut free, mut total, mut address) = (0, 0, 0);
    soft_set_capacity(50 << 20);
    ok(cuMemGetInfo_v2(&raw mut free, &raw mut total));
    assert_eq!((free, total, soft_device_bytes()), (10 << 20, 50 << 20, 40 << 20));
    assert_eq!(cuMemAlloc_v2(&raw mut address, (10 << 20) + 1), OUT_OF_MEMORY);
    assert_eq!(cuMemAlloc_v2(&raw mut address, 0), INVALID_VALUE);
    ok(cuMemAlloc_v2(&raw mut address, 10 << 20));
    ok(cuMemFree_v2(address));
    assert_eq!(cuMemFree_v2(address), INVALID_VALUE);
    assert_eq!(cuMemFree_v2(large + 256), INVALID_VALUE);
}

#[test]
fn addresses_are_checked() {
    let _fresh = FreshDriver::with_context();
    let (block, page) = (allocate(16), locked(&[0; 16]));
    let pageable = [0u8; 16];
    let to_device = |target, source, len| cuMemcpyHtoDAsync_v2(target, source, len, 0);
    assert_eq!(to_device(block + 8, page, 9), INVALID_VALUE);
    assert_eq!(to_device(block, page + 8, 9), INVALID_VALUE);
    assert_eq!(to_device(pageable.as_ptr().addr() as u64, page, 1), INVALID_VALUE);
    assert_eq!(cuMemsetD8Async(block, 0, 17, 0), INVALID_VALUE);
    ok(to_device(block + 16, page, 0));
    assert_eq!(soft_pending_all(), 0);
}

#[test]
fn page_locked_memory_is_the_drivers_or_registered() {
    let _fresh = FreshDriver::with_context();
    let page = locked(&[0; 100]);
    let mine = [0u8; 64];
    let start = mine.as_ptr().addr();
    ok(cuMemHostRegister_v2(start, 64, 0));
    assert_eq!(soft_page_locked_bytes(), 164);
    assert_eq!(cuMemHostRegister_v2(start + 60, 64, 0), ALREADY_REGISTERED);
    assert_eq!((cuMemFreeHost(start), cuMemHostUnregister(page)), (INVALID_VALUE, NOT_REGISTERED));
    ok(cuMemHostUnregister(start));
    ok(cuMemFreeHost(page));
    assert_eq!((cuMemFreeHost(page), cuMemHostUnregister(start)), (INVALID_VALUE, NOT_REGISTERED));
    assert_eq!(soft_page_locked_bytes(), 0);
}

/// The answer of `cuPointerGetAttribute` for an address: a code, and 1 for the host or 2 for a device.
fn memory_type(address: usize) -> (i32, u32) {
    let mut kind = 0;
    (cuPointerGetAttribute(&raw mut kind, 2, address as u64), kind)
}

#[test]
fn memory_is_registered_by_whole_pages() {
    const PAGES: usize = 4 * 4096;
    let _fresh = FreshDriver::with_context();
    let (mine, block) = (vec![0u8; PAGES], allocate(PAGES));
    let start = mine.as_ptr().addr().next_multiple_of(4096);
    ok(cuMemHostRegister_v2(start + 100, 4096, 0));
    assert_eq!([start, start + 8191].map(memory_type), [(SUCCESS, 1); 2]);
    assert_eq!(memory_type(start + 8192), (INVALID_VALUE, 0));
    assert_eq!(memory_type(usize::try_from(block).unwrap_or(0)), (SUCCESS, 2));
    assert_eq!(cuPointerGetAttribute(&mut 0, 1, start as u64), NOT_SUPPORTED);
    // Nobody named the rest of the last page, but it is taken.
    assert_eq!(cuMemHostRegister_v2(start + 5000, 4096, 0), ALREADY_REGISTERED);
    ok(cuMemHostRegister_v2(start + 8192, 1, 0));
    ok(cuMemcpyHtoDAsync_v2(block, start, 8192, 0));
    assert_eq!(cuMemcpyHtoDAsync_v2(block, start, 8193, 0), INVALID_VALUE);
    ok(cuStreamSynchronize(0));
    assert_eq!(cuMemHostUnregister(start), NOT_REGISTERED);
    ok(cuMemHostUnregister(start + 100));
    ok(cuMemHostUnregister(start + 8192));
}

/// Gives a block, page-locked memory or registered memory back.
type Free = fn(&mut State, u64, usize, usize) -> Outcome;

#[test]
fn frees_wait_only_if_set_to() {
    let _fresh = FreshDriver::with_context();
    let mine = [0u8; 16];
    let start = mine.as_ptr().addr();
    let frees: [(Free, &str); 3] = [
        (|state, block, _, _| state.free(usize::try_from(block).unwrap_or(0), false), "device"),
        (|state, _, page, _| state.free_locked(page), "locked"),
        (|state, _, _, mine| state.unregister(mine), "registered"),
    ];
    for (free, name) in frees {
        for waits in [false, true] {
            state().config.frees_wait = waits;
            let (block, page) = (allocate(16), locked(&[0; 16]));
            ok(cuMemHostRegister_v2(start, 16, 0));
            ok(cuMemcpyHtoDAsync_v2(block, page, 16, 0));
            ok(cuMemcpyHtoDAsync_v2(block, start, 16, 0));
            // The child of a fork has no driver, so it goes without its functions.
            let died = dies(|| {
                let state = &mut *state();
                let is_freed = free(state, block, page, start).is_ok();
                if is_freed && state.streams.pending(None) == if waits { 0 } else { 2 } {
                    state.run_all(None);
                }
            });
            assert_eq!(died, !waits, "{name}");
            state().run_all(None);
            ok(cuMemHostUnregister(start));
        }
    }
    state().config.frees_wait = false;
    let (function, block) = (function(), allocate(8));
    ok(launch(function, 1, 256, &five(block), 0));
    ok(cuMemFree_v2(block));
    assert!(dies(|| state().run_all(None)));
}

#[test]
fn late_work_with_memory_that_is_gone_ends_the_process() {
    let _fresh = FreshDriver::with_context();
    let (block, page) = (allocate(16), locked(&[0; 16]));
    ok(cuMemcpyHtoDAsync_v2(block, page, 16, 0));
    ok(cuMemFreeHost(page));
    assert!(dies(|| state().run_all(None)));
}
