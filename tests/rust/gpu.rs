//! Devices: conforming memory, work in the order of streams, rings that never mix their contents.
//!
//! The tests run on a GPU, or on the software driver when it is preloaded. Without either they print a reason
//! and pass, unless `KVPOOL_REQUIRE_CUDA=1`.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use kvpool::base::{DType, Device, Dims, ErrorKind, IndexVec, close_fork_gate, open_fork_gate};
use kvpool::index::Rounding;
use kvpool::kernels::Indices;
use kvpool::memory::{
    Backend, Contents, CountingBackend, Cuda, Event, Gpu, Host, Keep, LimitedBackend, MappedHost,
    PageLockEvent, PageLockedHost, Region, Ring, Stream,
};
use kvpool::pool::{
    AllocatorConfig, BufferConfig, BufferPool, ChunkConfig, ChunkPool, FreedAs, GdnConfig, GdnPool,
    TokenToKvPoolAllocator, values_now,
};
use kvpool::tensor::TensorView;

use crate::conformance::conforms;
use crate::histories::contents;
use crate::pool_table::pools_conform;

/// Serialises the tests: some count all calls of the driver.
static ALONE: Mutex<()> = Mutex::new(());

/// The device, or `None` without one.
pub(crate) fn gpu(test: &str) -> Option<(Arc<Gpu>, MutexGuard<'static, ()>)> {
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
pub(crate) fn control(name: &std::ffi::CStr) -> Option<*mut c_void> {
    // SAFETY: the symbol is only looked up.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Two streams of the software driver. On a GPU a missing wait would not show reliably.
pub(crate) fn streams(test: &str) -> Option<[Stream; 2]> {
    let Some(create) = control(c"soft_stream") else {
        eprintln!("skipped {test}: it needs the late streams of the driver made of software");
        return None;
    };
    // SAFETY: the function has this signature.
    let create: extern "C" fn(i32) -> usize = unsafe { std::mem::transmute(create) };
    // SAFETY: the driver keeps the streams for the life of the process.
    Some([create(0), create(0)].map(|handle| unsafe { Stream::from_handle(handle, 0) }.expect("a handle")))
}

pub(crate) fn cuda(gpu: &Arc<Gpu>) -> Arc<dyn Backend> {
    Arc::new(Cuda::new(gpu, Stream::DEFAULT))
}

#[test]
fn device_memory_conforms() {
    let Some((gpu, _alone)) = gpu("device_memory_conforms") else { return };
    conforms(cuda(&gpu));
    let counted = Arc::new(CountingBackend::new(cuda(&gpu)));
    conforms(counted.clone());
    assert_eq!((counted.live_blocks(), counted.live_bytes()), (0, 0));
    conforms(Arc::new(LimitedBackend::new(cuda(&gpu), 64 << 20)));
}

#[test]
fn pools_conform_on_a_device() {
    let Some((gpu, _alone)) = gpu("pools_conform_on_a_device") else { return };
    pools_conform(&cuda(&gpu));
}

#[test]
fn page_locked_memory_conforms() {
    let Some((gpu, _alone)) = gpu("page_locked_memory_conforms") else { return };
    let backend: Arc<dyn Backend> = Arc::new(PageLockedHost::new(&gpu));
    assert_eq!(backend.device(), Device::Cpu);
    conforms(backend);
}

#[test]
fn no_process_forks_during_a_step_of_page_locking() {
    let Some((_gpu, _alone)) = gpu("no_process_forks_during_a_step_of_page_locking") else {
        return;
    };
    let config = ChunkConfig {
        num_chunks: 2,
        chunk_shape: vec![64 << 20],
        dtype: DType::U8,
        pin_memory: true,
        page_lock_threads: 1,
        strict: true,
    };
    let mapped: Arc<dyn Backend> = Arc::new(MappedHost::default());
    let pool = Arc::new(ChunkPool::new(&config, &mapped).expect("memory"));
    close_fork_gate();
    let locking = pool.start_page_locking().expect("a driver");
    assert!(matches!(locking.next(Duration::from_millis(100)), PageLockEvent::TimedOut));
    assert_eq!(pool.counts(|_, page_locked| page_locked), 0);
    open_fork_gate();
    while !matches!(locking.next(Duration::from_secs(60)), PageLockEvent::Finished) {}
    assert_eq!(pool.counts(|_, page_locked| page_locked), 2);
}

/// The number that `second` reads after `ring` has uploaded on `first`, with or without an event between
/// them.
fn seen(gpu: &Arc<Gpu>, [first, second]: [Stream; 2], is_ordered: bool) -> i32 {
    let ring = Ring::new(gpu, &cuda(gpu), 4096).expect("memory");
    let region = Region::with(cuda(gpu), 4, Contents::Undefined, Arc::default()).expect("memory");
    ring.upload_to(region.range(0, 4).expect("inside"), &[7i32], first).expect("enqueued");
    if is_ordered {
        Event::record(gpu, first).and_then(|event| event.make_stream_wait(second)).expect("ordered");
    }
    let view = TensorView::contiguous(Arc::new(region), 0, DType::I32, &[1]).expect("inside");
    let copy = Region::new(Arc::new(PageLockedHost::new(gpu)), 4).expect("memory");
    gpu.copy_out(&view.borrow(), copy.range(0, copy.bytes()).expect("inside"), second).expect("enqueued");
    gpu.synchronize(second).expect("ran");
    contents::read::<i32>(&copy, 0, 1)[0]
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
fn work_on_a_stream_of_another_device_is_refused() {
    let Some((gpu, _alone)) = gpu("work_on_a_stream_of_another_device_is_refused") else { return };
    let theirs = Stream::default_of(Device::Cuda(1));
    let [device, host]: [Arc<dyn Backend>; 2] = [cuda(&gpu), Arc::new(PageLockedHost::new(&gpu))];
    let [device, host] = [device, host].map(|backend| Region::new(backend, 64).expect("memory"));
    let [to, from] = [&device, &host].map(|region| region.range(0, 64).expect("inside"));
    let source = device.bytes_at(0, 64).expect("inside");
    for (answer, call) in [
        (gpu.fill(to, 1, theirs), "fill"),
        (gpu.copy_in(to, from, theirs), "copy_in"),
        (gpu.copy_out(&source, from, theirs), "copy_out"),
        (gpu.synchronize(theirs), "synchronize"),
    ] {
        let refused = answer.expect_err(call);
        assert_eq!(refused.kind(), ErrorKind::Argument, "{call}");
        let text = "stream 0x0 is one of cuda:1; the work is enqueued on cuda:0";
        assert_eq!(refused.to_string(), text, "{call}");
    }
    for region in [device, host] {
        assert_eq!(region.users().expect("of a backend").streams(), [], "nothing was enqueued");
    }
}

#[test]
fn a_dropped_grant_on_the_device_frees_its_new_pages() {
    let test = "a_dropped_grant_on_the_device_frees_its_new_pages";
    let Some((gpu, _alone)) = gpu(test) else { return };
    let config = AllocatorConfig { page_size: 4, strict: true, ..AllocatorConfig::new(40) };
    let allocator = TokenToKvPoolAllocator::new(&config, &cuda(&gpu)).expect("memory");
    let stream = Stream::DEFAULT;
    let first = allocator.alloc(3, stream).expect("memory").expect("room").keep();
    let last = Region::new(cuda(&gpu), 4).expect("memory");
    let ring = Ring::new(&gpu, &cuda(&gpu), 64).expect("memory");
    ring.upload_to(last.range(0, 4).expect("inside"), &[6i32], stream).expect("enqueued");
    let last = TensorView::contiguous(Arc::new(last), 0, DType::I32, &[1]).expect("inside");
    let last = Indices::of(last.borrow(), Some(0)).expect("int32");
    // Slot 7 of the page from before, and pages 2 and 3.
    drop(allocator.alloc_extend(&[3], &[9], &last, stream).expect("memory").expect("room"));
    assert_eq!(allocator.available_size(), 36);
    let first = Indices::of(first.borrow(), Some(0)).expect("int32");
    assert_eq!(allocator.free(&first, stream).expect("live").dropped(), 0);
    assert_eq!(allocator.available_size(), 40);
    allocator.verify().expect("consistent");
}

/// A wait under a lock ends the test: a debug build checks every wait.
#[test]
fn buffers_are_deallocated_without_locks() {
    let test = "buffers_are_deallocated_without_locks";
    let Some((gpu, _alone)) = gpu(test) else { return };
    let Some([stream, _]) = streams(test) else { return };
    let backend: Arc<dyn Backend> = Arc::new(LimitedBackend::new(cuda(&gpu), 4096));
    let pool = BufferPool::new(&BufferConfig { rounding: Rounding::Pow2 }, &backend);
    let free = || {
        let buffer = pool.alloc(2048, stream).expect("memory");
        pool.release(buffer.handle()).expect("in use");
    };
    free();
    pool.clear();
    free();
    let all = pool.alloc(4096, stream).expect("the memory of the free buffer");
    pool.release(all.handle()).expect("in use");
    drop(all);
    let [first, second] = pool.alloc_batch(&[1024, 2048], stream).expect("memory").try_into().expect("two");
    assert_eq!([first.region().bytes(), second.region().bytes()], [1024, 2048]);
    let refused = pool.alloc_batch(&[1024, 4096], stream).err().map(|failure| failure.kind());
    assert_eq!(refused, Some(ErrorKind::OutOfMemory));
}

#[test]
fn a_fault_is_reported_to_one_of_many_threads() {
    let Some((gpu, _alone)) = gpu("a_fault_is_reported_to_one_of_many_threads") else { return };
    let config = GdnConfig {
        max_reqs: 3,
        num_gdn_layers: 1,
        num_v_heads: 1,
        head_k_dim: 8,
        head_v_dim: 8,
        conv_dim: 8,
        conv_kernel_size: 4,
        dtype: DType::F32,
        max_track_slots: 0,
        strict: false,
    };
    let pool = GdnPool::new(&config, &cuda(&gpu)).expect("memory");
    let row = Region::new(cuda(&gpu), 4).expect("memory");
    let ring = Ring::new(&gpu, &cuda(&gpu), 64).expect("memory");
    ring.upload_to(row.range(0, 4).expect("inside"), &[99i32], Stream::DEFAULT).expect("enqueued");
    let row = TensorView::contiguous(Arc::new(row), 0, DType::I32, &[1]).expect("inside");
    let row = Indices::of(row.borrow(), None).expect("int32");
    pool.reset_states(&row, Stream::DEFAULT).expect("enqueued");
    gpu.synchronize(Stream::DEFAULT).expect("ran");
    let reports: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| pool.take_fault().err())).collect();
        threads.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect()
    });
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert!(reports[0].to_string().contains("99 at position 0"), "{}", reports[0]);
}

#[test]
fn too_many_kept_tensors_are_an_error_and_nothing_is_lost() {
    let Some((gpu, _alone)) = gpu("too_many_kept_tensors_are_an_error_and_nothing_is_lost") else { return };
    let slots = AllocatorConfig::new(1000);
    let allocator = TokenToKvPoolAllocator::new(&slots, &cuda(&gpu)).expect("memory");
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

/// The owner of a tensor, which uses the allocator when it is dropped, on a thread that can wait.
#[derive(Debug)]
struct Owner {
    allocator: Arc<TokenToKvPoolAllocator>,
    /// Whether the allocator has answered.
    answered: mpsc::Sender<bool>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let (allocator, (answer, wait)) = (Arc::clone(&self.allocator), mpsc::channel());
        thread::spawn(move || answer.send(allocator.available_size()));
        let _ = self.answered.send(wait.recv_timeout(Duration::from_secs(5)).is_ok());
    }
}

#[test]
fn a_failed_free_drops_owners_without_locks() {
    let Some((gpu, _alone)) = gpu("a_failed_free_drops_owners_without_locks") else { return };
    let config = AllocatorConfig::new(100);
    let allocator = Arc::new(TokenToKvPoolAllocator::new(&config, &cuda(&gpu)).expect("memory"));
    let taken = allocator.alloc(3, Stream::DEFAULT).expect("works").expect("room").keep();
    let zeros = |backend| {
        let region = Arc::new(Region::new(backend, 12).expect("memory"));
        TensorView::contiguous(region, 0, DType::I32, &[3]).expect("inside")
    };
    let (unknown, nowhere) = (zeros(cuda(&gpu)), zeros(Arc::new(Host)));
    let first = || Indices::Device { tensor: unknown.borrow(), version: None };
    let second = || Indices::Device { tensor: nowhere.borrow(), version: None };
    let (tell, answered) = mpsc::channel();
    let keep = || {
        let owner = Owner { allocator: Arc::clone(&allocator), answered: tell.clone() };
        Some(Arc::new(owner) as Keep)
    };
    // The second tensor is on no device: the copy of the first is abandoned.
    let failed =
        allocator.free_pages(&[first(), second()], &[], FreedAs::Pages, None, |_| keep(), Stream::DEFAULT);
    assert_eq!(failed.expect_err("refused").kind(), ErrorKind::Argument);
    assert_eq!(answered.try_iter().collect::<Vec<_>>(), [true]);
    // A free of one tensor that fails needs no owner.
    let failed = allocator.free_keeping(&second(), None, None, keep, Stream::DEFAULT);
    assert_eq!(failed.expect_err("refused").kind(), ErrorKind::Argument);
    assert_eq!(answered.try_iter().count(), 0);
    assert_eq!(allocator.available_size(), 97);
    drop(taken);
}

#[test]
fn numbers_that_are_no_indices_are_not_read_as_such() {
    let Some((gpu, _alone)) = gpu("numbers_that_are_no_indices_are_not_read_as_such") else { return };
    let region = Region::new(cuda(&gpu), 64).expect("memory");
    let (four, one) = (Dims::of(&[4]).expect("one dimension"), Dims::of(&[1]).expect("one dimension"));
    let read = |dtype| {
        let tensor = region.borrow(0, dtype, four, one).expect("inside");
        values_now(Indices::Device { tensor, version: None }, Stream::DEFAULT)
    };
    for dtype in [DType::F32, DType::U32, DType::I16, DType::F64] {
        assert_eq!(read(dtype).expect_err("refused").kind(), ErrorKind::Type, "{dtype}");
    }
    assert_eq!(read(DType::I32).expect("indices"), IndexVec::I32(vec![0; 4]));
    assert_eq!(read(DType::I64).expect("indices"), IndexVec::I64(vec![0; 4]));
}
