//! One suite over every backend: alignment, zeroing, failures, drop order.

use std::sync::Arc;
use std::thread;

use kvpool::base::{DType, Device, Dims, ErrorKind};
use kvpool::memory::{
    ALIGNMENT, Backend, CountingBackend, FailingBackend, Host, LimitedBackend, PageLockedHost, Region,
    RegionRange, Stream, backend_for,
};
use kvpool::tensor::TensorView;

/// Sizes around every boundary: zero, one byte, the alignment, a page, the size from which the host maps.
const SIZES: [usize; 9] = [0, 1, 255, 256, 4095, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1];

/// The bytes of a region.
pub(crate) fn bytes(region: &Region) -> Vec<u8> {
    if region.gpu().is_some() {
        return bytes(&on_host(region));
    }
    let mut copy = vec![0xAA; region.bytes()];
    // SAFETY: the region is live host memory of that length, and the vector is ours.
    unsafe { copy.as_mut_ptr().copy_from_nonoverlapping(region.address().as_ptr(), region.bytes()) };
    copy
}

fn whole(region: &Region) -> RegionRange<'_> {
    region.range(0, region.bytes()).expect("inside")
}

fn fill(region: &Region, value: u8) {
    if let Some(gpu) = region.gpu() {
        let source = Region::new(Arc::new(PageLockedHost::new(gpu)), region.bytes()).expect("memory");
        fill(&source, value);
        gpu.copy_in(whole(region), whole(&source), Stream::DEFAULT).expect("enqueued");
        return gpu.synchronize(Stream::DEFAULT).expect("copied");
    }
    // SAFETY: the region is live host memory, and no other code accesses it.
    unsafe { region.address().as_ptr().write_bytes(value, region.bytes()) };
}

/// A copy of a region in host memory.
fn on_host(region: &Region) -> Region {
    let copy = Region::new(Arc::new(Host), region.bytes()).expect("memory");
    let shape = Dims::new(&[i64::try_from(region.bytes()).expect("small")]).expect("one dimension");
    let whole = region.borrow(0, DType::U8, shape, Dims::new(&[1]).expect("one dimension")).expect("inside");
    let gpu = region.gpu().expect("a region on a device");
    gpu.copy_out(&whole, self::whole(&copy), Stream::DEFAULT).expect("enqueued");
    gpu.synchronize(Stream::DEFAULT).expect("copied");
    copy
}

fn aligned_and_zero(backend: &Arc<dyn Backend>) {
    for size in SIZES {
        // Twice, so that stale contents of recycled memory would show.
        for _ in 0..2 {
            let region = Region::new(Arc::clone(backend), size).expect("memory");
            assert_eq!(region.bytes(), size);
            assert_eq!(region.address().as_ptr().addr() % ALIGNMENT, 0);
            assert!(bytes(&region).iter().all(|&byte| byte == 0), "{size} bytes are not zero");
            fill(&region, 0xFF);
        }
    }
}

fn blocks_do_not_overlap(backend: &Arc<dyn Backend>) {
    let regions: Vec<Region> =
        (0..32).map(|_| Region::new(Arc::clone(backend), 1000).expect("memory")).collect();
    for (value, region) in regions.iter().enumerate() {
        fill(region, u8::try_from(value).expect("small"));
    }
    for (value, region) in regions.iter().enumerate() {
        assert!(bytes(region).iter().all(|&byte| usize::from(byte) == value));
    }
}

fn views_outlive_everything(backend: Arc<dyn Backend>) {
    let region = Arc::new(Region::new(Arc::clone(&backend), 1024).expect("memory"));
    fill(&region, 7);
    let view = TensorView::contiguous(Arc::clone(&region), 512, DType::I32, &[2]).expect("inside");
    drop(region);
    drop(backend);
    assert_eq!(bytes(view.region())[512..520], [7; 8]);
}

fn too_much_is_an_answer(backend: &Arc<dyn Backend>) {
    let error = Region::new(Arc::clone(backend), usize::MAX / 4).expect_err("more than there is");
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.to_string().contains(&(usize::MAX / 4).to_string()), "{error}");
    assert!(Region::new(Arc::clone(backend), 64).is_ok(), "a failure must not spoil the backend");
}

fn threads_may_share_it(backend: &Arc<dyn Backend>) {
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for size in (0..200).map(|step| step * 37) {
                    let region = Region::new(Arc::clone(backend), size).expect("memory");
                    assert!(bytes(&region).iter().all(|&byte| byte == 0));
                    fill(&region, 1);
                }
            });
        }
    });
}

pub(crate) fn conforms(backend: Arc<dyn Backend>) {
    aligned_and_zero(&backend);
    blocks_do_not_overlap(&backend);
    too_much_is_an_answer(&backend);
    threads_may_share_it(&backend);
    views_outlive_everything(backend);
}

#[test]
fn host() {
    conforms(Arc::new(Host));
}

#[test]
fn limited() {
    conforms(Arc::new(LimitedBackend::new(Arc::new(Host), 64 << 20)));
}

#[test]
fn counted() {
    let backend = Arc::new(CountingBackend::new(Arc::new(Host)));
    conforms(backend.clone());
    assert_eq!((backend.live_blocks(), backend.live_bytes()), (0, 0));
    assert!(backend.allocations() > 1000);
}

#[test]
fn never_failing() {
    conforms(Arc::new(FailingBackend::new(Arc::new(Host), usize::MAX)));
}

#[test]
fn limit_counts_allocated_bytes() {
    let backend = Arc::new(LimitedBackend::new(Arc::new(Host), 1000));
    let first = Region::new(backend.clone(), 600).expect("fits");
    let error = Region::new(backend.clone(), 401).expect_err("too much");
    assert_eq!(error.to_string(), "401 bytes asked for, 400 of 1000 available on cpu");
    drop(first);
    assert!(Region::new(backend, 1000).is_ok());
}

#[test]
fn limit_ignores_refused_allocations() {
    let backend = Arc::new(LimitedBackend::new(Arc::new(FailingBackend::new(Arc::new(Host), 0)), 100));
    assert!(Region::new(backend.clone(), 100).is_err());
    assert!(Region::new(backend, 100).is_ok());
}

#[test]
fn tensors_lie_within_their_region() {
    let region = Arc::new(Region::new(Arc::new(Host), 16).expect("memory"));
    assert!(TensorView::contiguous(Arc::clone(&region), 4, DType::I32, &[3]).is_ok());
    assert!(TensorView::contiguous(region, 4, DType::I32, &[4]).is_err());
}

#[test]
fn missing_device_is_named() {
    assert!(backend_for(Device::Cpu, Stream::DEFAULT).is_ok());
    let error = backend_for(Device::Cuda(7), Stream::DEFAULT).expect_err("no machine has so many");
    assert_eq!(error.kind(), ErrorKind::BackendUnavailable);
    let words = ["libcuda.so.1", "without the `cuda` feature", "devices", "driver", "host memory only"];
    assert!(words.iter().any(|word| error.to_string().contains(word)), "{error}");
}
