//! Devices: conforming memory, work in the order of streams, rings that never mix their contents.
//!
//! The tests run on a GPU, or on the software driver when it is preloaded. Without either they print a reason
//! and pass, unless `KVPOOL_REQUIRE_CUDA=1`.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvpool::base::{DType, Device, ErrorKind, IndexVec};
use kvpool::kernels::Indices;
use kvpool::memory::{Backend, Contents, Count, Cuda, Event, Gpu, Limit, Pinned, Region, Ring, Stream};
use kvpool::pool::{AllocatorConfig, ReqToTokenConfig, ReqToTokenPool, TableIndex, TokenToKvPoolAllocator};
use kvpool::tensor::TensorView;

use crate::conformance::{conforms, on_host};
use crate::pool_table::pools_conform;

/// Serialises the tests: some count all calls of the driver.
static ALONE: Mutex<()> = Mutex::new(());

/// The device, or `None` without one.
fn gpu(test: &str) -> Option<(Arc<Gpu>, MutexGuard<'static, ()>)> {
    match Gpu::open(0) {
        Ok(gpu) => Some((gpu, ALONE.lock().unwrap_or_else(PoisonError::into_inner))),
        Err(reason) => {
            let is_required = std::env::var("KVPOOL_REQUIRE_CUDA").is_ok_and(|value| value == "1");
            assert!(!is_required, "{test} must run, but {reason}");
            eprintln!("skipped {test}: {reason}");
            None
        }
    }
}

/// Looks up a test function of the software driver, if it is preloaded.
fn control(name: &std::ffi::CStr) -> Option<*mut c_void> {
    // SAFETY: the symbol is only looked up.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Two streams of the software driver. On a GPU a missing wait would not show reliably.
fn streams(test: &str) -> Option<[Stream; 2]> {
    let Some(create) = control(c"soft_stream") else {
        eprintln!("skipped {test}: it needs the late streams of the driver made of software");
        return None;
    };
    // SAFETY: the function has this signature.
    let create: extern "C" fn(i32) -> usize = unsafe { std::mem::transmute(create) };
    Some([Stream::from_handle(create(0)), Stream::from_handle(create(0))])
}

fn cuda(gpu: &Arc<Gpu>) -> Arc<dyn Backend> {
    Arc::new(Cuda::new(gpu, Stream::DEFAULT))
}

fn slots_of(size: usize, need_sort: bool) -> AllocatorConfig {
    AllocatorConfig { size, page_size: 1, need_sort, strict: false }
}

fn numbers(region: &Region) -> Vec<i32> {
    on_host(region).read(0, region.bytes() / size_of::<i32>()).expect("inside")
}

fn slots(view: &TensorView) -> Vec<i32> {
    let all = numbers(view.region());
    let first = view.offset() / size_of::<i32>();
    all[first..first + view.shape().numel()].to_vec()
}

#[test]
fn device_memory_conforms() {
    let Some((gpu, _alone)) = gpu("device_memory_conforms") else { return };
    conforms(cuda(&gpu));
    let counted = Arc::new(Count::new(cuda(&gpu)));
    conforms(counted.clone());
    assert_eq!((counted.live_blocks(), counted.live_bytes()), (0, 0));
    conforms(Arc::new(Limit::new(cuda(&gpu), 64 << 20)));
}

#[test]
fn pools_conform_on_a_device() {
    let Some((gpu, _alone)) = gpu("pools_conform_on_a_device") else { return };
    pools_conform(&cuda(&gpu));
}

#[test]
fn page_locked_memory_conforms() {
    let Some((gpu, _alone)) = gpu("page_locked_memory_conforms") else { return };
    let backend: Arc<dyn Backend> = Arc::new(Pinned::new(&gpu));
    assert_eq!(backend.device(), Device::Cpu);
    conforms(backend);
}

#[test]
fn out_of_memory_names_requested_and_free_bytes() {
    let Some((gpu, _alone)) = gpu("out_of_memory_names_requested_and_free_bytes") else { return };
    let free = gpu.free_bytes().expect("the driver answers");
    let error = Region::new(cuda(&gpu), free + (1 << 20)).expect_err("too much");
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    let text = error.to_string();
    assert!(text.contains(&(free + (1 << 20)).to_string()) && text.contains("free on cuda:0"), "{text}");
    assert!(Region::new(cuda(&gpu), 1 << 20).is_ok());
}

#[test]
fn the_host_cannot_reach_device_memory() {
    let Some((gpu, _alone)) = gpu("the_host_cannot_reach_device_memory") else { return };
    let region = Region::new(cuda(&gpu), 64).expect("memory");
    for refused in [region.write(0, &[1i32]), region.fill(0, 4, 0), region.read::<i32>(0, 1).map(|_| ())] {
        assert_eq!(refused.expect_err("refused").kind(), ErrorKind::Config);
    }
}

#[test]
fn device_beyond_the_count_is_named() {
    let Some((_gpu, _alone)) = gpu("device_beyond_the_count_is_named") else { return };
    let error = Gpu::open(1000).expect_err("no machine has so many");
    assert_eq!(error.kind(), ErrorKind::BackendUnavailable);
    assert!(error.to_string().contains("has no cuda:1000"), "{error}");
}

/// What `second` reads after `ring` has uploaded on `first`, with or without an event between them.
fn seen(gpu: &Arc<Gpu>, [first, second]: [Stream; 2], is_ordered: bool) -> i32 {
    let ring = Ring::new(gpu, &cuda(gpu), 4096).expect("memory");
    let region = Region::with(cuda(gpu), 4, Contents::Undefined, Arc::default()).expect("memory");
    ring.upload_to(region.range(0, 4).expect("inside"), &[7i32], first).expect("enqueued");
    if is_ordered {
        Event::record(gpu, first).and_then(|event| event.precede(second)).expect("ordered");
    }
    let view = TensorView::contiguous(Arc::new(region), 0, DType::I32, &[1]).expect("inside");
    let copy = Region::new(Arc::new(Pinned::new(gpu)), 4).expect("memory");
    gpu.copy_out(&view.borrow(), copy.range(0, copy.bytes()).expect("inside"), second).expect("enqueued");
    gpu.synchronize(second).expect("ran");
    copy.read::<i32>(0, 1).expect("inside")[0]
}

#[test]
fn missing_wait_is_visible() {
    let Some((gpu, _alone)) = gpu("missing_wait_is_visible") else { return };
    let Some(streams) = streams("missing_wait_is_visible") else { return };
    assert_eq!(seen(&gpu, streams, true), 7);
    // The negative control: without the event the old contents are read.
    assert_eq!(seen(&gpu, streams, false), i32::from_ne_bytes([0xA5; 4]));
}

#[test]
fn slots_are_valid_on_the_stream_of_alloc() {
    let Some((gpu, _alone)) = gpu("slots_are_valid_on_the_stream_of_alloc") else { return };
    let Some([first, second]) = streams("slots_are_valid_on_the_stream_of_alloc") else { return };
    let allocator = TokenToKvPoolAllocator::new(&slots_of(4096, true), &cuda(&gpu)).expect("memory");
    let _on_first = allocator.alloc(10, first).expect("memory").expect("room").keep();
    // The same window, on a stream without an order after the first.
    let view = allocator.alloc(3, second).expect("memory").expect("room").keep();
    let copy = Region::new(Arc::new(Pinned::new(&gpu)), 12).expect("memory");
    gpu.copy_out(&view.borrow(), copy.range(0, copy.bytes()).expect("inside"), second).expect("enqueued");
    gpu.synchronize(second).expect("ran");
    assert_eq!(copy.read::<i32>(0, 3).expect("inside"), [11, 12, 13]);
}

#[test]
fn positions_are_reused_after_the_work_that_reads_them() {
    let Some((gpu, _alone)) = gpu("positions_are_reused_after_the_work_that_reads_them") else { return };
    let Some([first, second]) = streams("positions_are_reused_after_the_work_that_reads_them") else {
        return;
    };
    let allocator = TokenToKvPoolAllocator::new(&slots_of(64, true), &cuda(&gpu)).expect("memory");
    let copy = Region::new(Arc::new(Pinned::new(&gpu)), 4 * 64).expect("memory");
    for round in 0..2000 {
        let view = allocator.alloc(64, first).expect("memory").expect("room").keep();
        gpu.copy_out(&view.borrow(), copy.range(0, copy.bytes()).expect("inside"), first).expect("enqueued");
        drop(view);
        allocator.clear(Stream::DEFAULT);
        // On the other stream and with other slots, so that the stage is written again.
        let other = allocator.alloc(3, second).expect("memory").expect("room").keep();
        let rest = allocator.alloc(61, second).expect("memory").expect("room").keep();
        drop((other, rest));
        allocator.clear(Stream::DEFAULT);
        if round % 500 == 0 {
            gpu.synchronize(second).expect("ran");
            gpu.synchronize(first).expect("ran");
            let expected: Vec<i32> = (1..=64).collect();
            assert_eq!(copy.read::<i32>(0, 64).expect("inside"), expected);
        }
    }
}

#[test]
fn kept_tensors_do_not_change() {
    let Some((gpu, _alone)) = gpu("kept_tensors_do_not_change") else { return };
    let allocator = TokenToKvPoolAllocator::new(&slots_of(1000, false), &cuda(&gpu)).expect("memory");
    let mut kept = Vec::new();
    for round in 0..200 {
        let stream = Stream::DEFAULT;
        let view = allocator.alloc(1 + round % 37, stream).expect("memory").expect("room").keep();
        let values = slots(&view);
        let freed = Indices::Host(IndexVec::I32(values.clone()));
        assert_eq!(allocator.free(&freed, None, || None, stream).expect("valid").dropped(), 0);
        if round % 7 == 0 {
            kept.push((view, values));
        }
    }
    for (view, values) in &kept {
        assert_eq!(&slots(view), values);
    }
    allocator.verify().expect("consistent");
}

#[test]
fn too_many_kept_tensors_are_an_error_and_nothing_is_lost() {
    let Some((gpu, _alone)) = gpu("too_many_kept_tensors_are_an_error_and_nothing_is_lost") else { return };
    let allocator = TokenToKvPoolAllocator::new(&slots_of(1000, true), &cuda(&gpu)).expect("memory");
    let mut kept = Vec::new();
    let error = loop {
        match allocator.alloc(1000, Stream::DEFAULT) {
            Ok(Some(taken)) => kept.push(taken.keep()),
            Ok(None) => unreachable!("all were freed"),
            Err(error) => break error,
        }
        allocator.clear(Stream::DEFAULT);
        assert!(kept.len() < 1000, "the stage must be bounded");
    };
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.to_string().contains("still alive"), "{error}");
    assert_eq!(allocator.available_size(), 1000);
    allocator.verify().expect("consistent");
    kept.clear();
    assert!(allocator.alloc(1000, Stream::DEFAULT).expect("room on the stage").is_some());
}

#[test]
fn the_hosts_copy_follows_every_write() {
    let Some((gpu, _alone)) = gpu("the_hosts_copy_follows_every_write") else { return };
    let stream = Stream::DEFAULT;
    let backend = cuda(&gpu);
    let config = ReqToTokenConfig { max_reqs: 4, max_context_len: 16, padding_row: true, strict: false };
    let mut table = ReqToTokenPool::new(&config, &backend).expect("memory");
    let allocator = TokenToKvPoolAllocator::new(&slots_of(64, true), &backend).expect("memory");
    let taken = allocator.alloc(6, stream).expect("memory").expect("room").keep();
    let row = i64::from(table.alloc(1, stream).expect("rows").expect("room")[0]);
    for version in [Some(0), None] {
        // First with a version that the host knows, then as a tensor that it does not know.
        let values = Indices::of(taken.borrow(), version).expect("int32");
        table.write(&TableIndex::Columns { row, start: 2, end: Some(8) }, &values, stream).expect("inside");
        gpu.synchronize(stream).expect("ran");
        let read = table.read(row, 8).expect("inside");
        assert_eq!(slots(&read), [0, 0, 1, 2, 3, 4, 5, 6]);
        let freed = Indices::of(read.borrow(), Some(0)).expect("int32");
        let bad = allocator.free(&freed, None, || None, stream).expect("valid");
        assert_eq!(allocator.pending(), 0, "the host knows the row");
        assert_eq!(bad.dropped(), 2, "the two zeros are padding");
        let again = allocator.alloc(6, stream).expect("memory").expect("room").keep();
        assert_eq!(again.shape().numel(), 6);
        allocator.clear(Stream::DEFAULT);
        // The same slots again, so that the next round frees live ones.
        let same = allocator.alloc(6, stream).expect("memory").expect("room").keep();
        assert_eq!(same.shape().numel(), 6);
    }
}
