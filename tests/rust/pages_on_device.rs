//! Copies of pages on a device: in place and by the driver, on streams of their own, with every driver call failed once.
//!
//! They run where the tests in `gpu.rs` run.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::sync::Arc;

use kvpool::base::{ChunkId, DType, ErrorKind, Id, Page};
use kvpool::kernels::{
    Executor, HostAccess, IndexSpace, IndexSpaces, LayerRows, PageCopy, PagePair, Pieces, PlaneRows,
};
use kvpool::memory::{
    Backend, CopyDirection, Event, Gpu, Host, MappedHost, PageKind, PageLockedHost, Region, SideStream,
    Stream, page_lock,
};
use kvpool::transfer::CopyQueue;

use crate::conformance::bytes;
use crate::gpu::{control, cuda, gpu, streams};
use crate::histories::contents;
use crate::pages::{Draws, Shape, Tier, refused, some_layers};
use crate::pool_table::host;

/// Declares the functions with which tests control the software driver, by the names that they have there.
macro_rules! soft {
    ($($name:ident($symbol:literal): $kind:ty;)*) => {
        struct Soft {
            $($name: $kind,)*
        }

        impl Soft {
            /// `None` on a GPU.
            fn find(test: &str) -> Option<Self> {
                let find = || {
                    Some(Self {
                        $($name: {
                            let found = control($symbol)?;
                            // SAFETY: the function has this signature.
                            unsafe { std::mem::transmute::<*mut c_void, $kind>(found) }
                        },)*
                    })
                };
                let found = find();
                if found.is_none() {
                    eprintln!("skipped {test}: it needs the driver made of software");
                }
                found
            }
        }
    };
}

soft! {
    counted(c"soft_calls"): extern "C" fn(*const c_char) -> c_long;
    reset_calls(c"soft_reset_calls"): extern "C" fn();
    fail(c"soft_fail"): extern "C" fn(*const c_char, c_long, c_int);
    failures_left(c"soft_failures_left"): extern "C" fn() -> c_long;
    forget_failures(c"soft_forget_failures"): extern "C" fn();
    begin_capture(c"soft_begin_capture"): extern "C" fn(usize) -> c_int;
    end_capture(c"soft_end_capture"): extern "C" fn(usize) -> c_long;
    set_host_pointers(c"soft_set_host_pointers"): extern "C" fn(c_int);
    set_queries(c"soft_set_queries"): extern "C" fn(c_long);
    pending(c"soft_pending"): extern "C" fn(usize) -> c_long;
}

impl Soft {
    fn calls(&self, name: &CStr) -> usize {
        usize::try_from((self.counted)(name.as_ptr())).unwrap()
    }

    /// Calls that a copy must not make: waits, and those for memory.
    fn forbidden(&self) -> usize {
        [
            c"cuStreamSynchronize",
            c"cuCtxSynchronize",
            c"cuEventSynchronize",
            c"cuMemAlloc_v2",
            c"cuMemHostAlloc",
        ]
        .into_iter()
        .map(|name| self.calls(name))
        .sum()
    }

    /// Makes `work` fail with each of its driver calls once, and then lets it do all of it.
    fn fail_each(&self, mut work: impl FnMut() -> kvpool::base::Result<()>) -> c_long {
        for number in 1.. {
            (self.fail)(std::ptr::null(), number, 719);
            let done = work();
            if (self.failures_left)() > 0 {
                (self.forget_failures)();
                done.expect("no call failed");
                return number - 1;
            }
            // A failure of the call that leaves a context is not reported: what was done is done.
            if let Err(error) = done {
                assert_eq!((error.kind(), error.facts().code), (ErrorKind::Driver, Some(719)), "{error}");
            }
        }
        unreachable!("a call makes no end of driver calls")
    }
}

/// Memory of `bytes` that was page-locked in place.
fn locked_in_place(gpu: &Arc<Gpu>, bytes: usize) -> Arc<Region> {
    let backend = Arc::new(MappedHost::new(None, PageKind::Ordinary).expect("node"));
    let region = Arc::new(Region::new(backend, bytes).expect("memory"));
    region.page_lock(gpu, &(0..bytes)).expect("locked");
    region
}

const SHAPE: Shape = Shape {
    layers: 3,
    rows: 66,
    row_bytes: [64, 6],
    page_size: 4,
    pieces: 9,
    gap: 10,
    is_fused: false,
    alignment: 256,
};

/// Copies, and waits for the stream.
fn copy(tier: &mut Tier, gpu: &Gpu, direction: PageCopy, pairs: &[PagePair<Page>], stream: Stream) {
    let layers = 0..tier.shape.layers;
    tier.copy(direction, pairs, &layers, stream).expect("enqueued");
    gpu.synchronize(stream).expect("ran");
}

#[test]
fn pages_go_out_and_come_in_on_a_device() {
    let test = "pages_go_out_and_come_in_on_a_device";
    let Some((gpu, _alone)) = gpu(test) else { return };
    let soft = Soft::find(test);
    let stream = gpu.side_stream(SideStream::Copy(CopyDirection::Out)).expect("a stream");
    let pinned: Arc<dyn Backend> = Arc::new(PageLockedHost::new(&gpu));
    for seed in 0..60 {
        let mut draws = Draws::new(seed);
        let shape = Shape::draw(&mut draws);
        let (memory, reach) = if draws.below(3) == 0 {
            (host(), HostAccess::Copied)
        } else {
            (Arc::clone(&pinned), draws.of(&[HostAccess::InPlace, HostAccess::InPlace, HostAccess::Copied]))
        };
        let mut tier = Tier::new(&mut draws, shape, &cuda(&gpu), &memory, reach);
        for _ in 0..4 {
            let direction = draws.of(&[PageCopy::Out, PageCopy::In]);
            let most = draws.below(12);
            let pairs = draws.pairs(&tier, direction, most);
            let layers = some_layers(&mut draws, shape.layers);
            if let Some(soft) = &soft {
                (soft.reset_calls)();
            }
            tier.copy(direction, &pairs, &layers, stream).expect("valid");
            if let Some(soft) = &soft {
                let kinds = shape.row_bytes.iter().filter(|bytes| **bytes > 0).count();
                let is_any = !pairs.is_empty() && !layers.is_empty() && kinds > 0;
                let (launches, copies) = match reach {
                    HostAccess::InPlace => (usize::from(is_any), 0),
                    HostAccess::Copied => (0, if is_any { pairs.len() * kinds } else { 0 }),
                };
                assert_eq!(soft.calls(c"launch:kvpool_copy_pages"), launches, "{shape:?}");
                assert_eq!(soft.calls(c"cuLaunchKernel"), launches);
                assert_eq!(soft.calls(c"cuMemcpy2DAsync_v2"), copies);
                assert_eq!((soft.calls(c"cuMemcpyHtoDAsync_v2"), soft.forbidden()), (0, 0));
            }
            gpu.synchronize(stream).expect("ran");
            tier.check();
        }
    }
}

#[test]
fn many_pages_take_few_launches() {
    let test = "many_pages_take_few_launches";
    let Some((gpu, _alone)) = gpu(test) else { return };
    let pinned: Arc<dyn Backend> = Arc::new(PageLockedHost::new(&gpu));
    let shape = Shape { rows: 1200, page_size: 1, pieces: 1100, ..SHAPE };
    let mut draws = Draws::new(5);
    let mut tier = Tier::new(&mut draws, shape, &cuda(&gpu), &pinned, HostAccess::InPlace);
    for (direction, count, launches) in
        [(PageCopy::Out, 486, 1), (PageCopy::Out, 487, 2), (PageCopy::In, 1100, 3), (PageCopy::Out, 1100, 3)]
    {
        let pairs = draws.pairs(&tier, direction, count);
        let soft = Soft::find(test);
        if let Some(soft) = &soft {
            (soft.reset_calls)();
        }
        copy(&mut tier, &gpu, direction, &pairs, Stream::DEFAULT);
        if let Some(soft) = &soft {
            assert_eq!(soft.calls(c"cuLaunchKernel"), launches);
        }
        tier.check();
    }
}

#[test]
fn large_pages_are_copied_by_blocks_in_turns() {
    let Some((gpu, _alone)) = gpu("large_pages_are_copied_by_blocks_in_turns") else { return };
    let pinned: Arc<dyn Backend> = Arc::new(PageLockedHost::new(&gpu));
    // Far more blocks of work than one launch has, in one kind and in both, in wide words and in bytes.
    for (row_bytes, gap) in [([0, 40_000], 0), ([8192, 24_576], 16), ([5000, 3001], 1)] {
        let mut draws = Draws::new(6);
        let shape = Shape { layers: 2, rows: 40, row_bytes, pieces: 9, gap, ..SHAPE };
        let mut tier = Tier::new(&mut draws, shape, &cuda(&gpu), &pinned, HostAccess::InPlace);
        for direction in [PageCopy::Out, PageCopy::In] {
            let pairs = draws.pairs(&tier, direction, 9);
            copy(&mut tier, &gpu, direction, &pairs, Stream::DEFAULT);
            tier.check();
        }
    }
}

#[test]
fn copies_are_late_and_keep_their_memory() {
    let test = "copies_are_late_and_keep_their_memory";
    let Some((gpu, _alone)) = gpu(test) else { return };
    let (Some([first, second]), Some(soft)) = (streams(test), Soft::find(test)) else { return };
    let pinned: Arc<dyn Backend> = Arc::new(PageLockedHost::new(&gpu));
    let mut draws = Draws::new(8);
    let mut tier = Tier::new(&mut draws, SHAPE, &cuda(&gpu), &pinned, HostAccess::InPlace);
    let before = bytes(tier.pieces.region());
    let pairs = draws.pairs(&tier, PageCopy::Out, 9);
    tier.copy(PageCopy::Out, &pairs, &(0..3), first).expect("enqueued");
    assert_eq!((soft.pending)(first.handle()), 1);
    assert!(bytes(tier.pieces.region()) == before, "nothing has run");
    // Another stream that waits for the copy brings the pages back.
    Event::record(&gpu, first).and_then(|event| event.make_stream_wait(second)).expect("ordered");
    let pairs = draws.pairs(&tier, PageCopy::In, 9);
    tier.copy(PageCopy::In, &pairs, &(0..3), second).expect("enqueued");
    gpu.synchronize(second).expect("ran");
    tier.check();
    // Memory is freed after the work that uses it: else the driver ends the process.
    for (is_pool_first, reach) in [
        (false, HostAccess::InPlace),
        (true, HostAccess::InPlace),
        (false, HostAccess::Copied),
        (true, HostAccess::Copied),
    ] {
        let mut tier = Tier::new(&mut draws, SHAPE, &cuda(&gpu), &pinned, reach);
        let pairs = draws.pairs(&tier, PageCopy::Out, 9);
        tier.copy(PageCopy::Out, &pairs, &(0..3), first).expect("enqueued");
        assert!((soft.pending)(first.handle()) > 0);
        let pieces = tier.pieces.clone();
        if is_pool_first {
            drop(tier);
            drop(pieces);
        } else {
            drop(pieces);
            drop(tier.pieces);
        }
        assert_eq!((soft.pending)(first.handle()), 0);
    }
}

#[test]
fn pageable_memory_is_copied_before_the_call_returns() {
    let test = "pageable_memory_is_copied_before_the_call_returns";
    let Some((gpu, _alone)) = gpu(test) else { return };
    let Some([stream, _]) = streams(test) else { return };
    let mut draws = Draws::new(9);
    let mut tier = Tier::new(&mut draws, SHAPE, &cuda(&gpu), &host(), HostAccess::Copied);
    let pairs = draws.pairs(&tier, PageCopy::Out, 9);
    tier.copy(PageCopy::Out, &pairs, &(0..3), stream).expect("copied");
    tier.check();
    let pairs = draws.pairs(&tier, PageCopy::In, 9);
    tier.copy(PageCopy::In, &pairs, &(0..3), stream).expect("enqueued");
    // The driver has read the buffer already, so what is written now is not copied.
    let region = tier.pieces.region();
    let kept = bytes(region);
    contents::fill(region, 0, region.bytes(), 0);
    gpu.synchronize(stream).expect("ran");
    for (at, byte) in kept.iter().enumerate() {
        contents::fill(region, at, 1, *byte);
    }
    tier.check();
}

#[test]
fn layers_may_be_farther_apart_than_a_copy_of_rows_takes() {
    let test = "layers_may_be_farther_apart_than_a_copy_of_rows_takes";
    let Some((gpu, _alone)) = gpu(test) else { return };
    let step = (1 << 31) + 256;
    let pool = Arc::new(Region::new(cuda(&gpu), step + 4096).expect("memory"));
    let plane = |offset, dim| PlaneRows::new(offset, 2, step, [16, 1, dim], DType::U8).expect("small");
    let rows = LayerRows::new(&pool, [plane(0, 48), plane(1024, 16)]).expect("inside");
    let space = IndexSpace { noun: "row", len: 16 };
    let executor = Executor::new(&pool, 2, IndexSpaces::of_rows(space), 4096).expect("memory");
    let piece = rows.piece(4).expect("small").bytes();
    let memory = Arc::new(Region::new(Arc::new(PageLockedHost::new(&gpu)), 4 * piece).expect("memory"));
    for reach in [HostAccess::InPlace, HostAccess::Copied] {
        let pieces = Pieces::new(Arc::clone(&memory), reach, &rows, 4, piece, 4).expect("fits");
        for at in 0..2 * piece {
            contents::fill(&memory, at, 1, (at % 251).to_le_bytes()[0]);
        }
        contents::fill(&memory, 2 * piece, 2 * piece, 0);
        let soft = Soft::find(test);
        if let Some(soft) = &soft {
            (soft.reset_calls)();
        }
        for (direction, first) in [(PageCopy::In, 0), (PageCopy::Out, 2)] {
            let pairs =
                [0, 1].map(|at| PagePair { page: Page::new(3 - at), piece: ChunkId::new(first + at) });
            executor.copy_pages(&rows, &pieces, direction, &pairs, 0..2, Stream::DEFAULT).expect("enqueued");
        }
        if let Some(soft) = &soft {
            let copies = if reach == HostAccess::Copied { 2 * 2 * 2 * 2 } else { 0 };
            assert_eq!(soft.calls(c"cuMemcpy2DAsync_v2"), copies);
        }
        gpu.synchronize(Stream::DEFAULT).expect("ran");
        let found = bytes(&memory);
        assert!(found[..2 * piece] == found[2 * piece..]);
    }
}

#[test]
fn memory_that_a_device_does_not_reach_is_copied_or_refused() {
    let test = "memory_that_a_device_does_not_reach_is_copied_or_refused";
    let Some((gpu, _alone)) = gpu(test) else { return };
    let pinned: Arc<dyn Backend> = Arc::new(PageLockedHost::new(&gpu));
    let mut draws = Draws::new(10);
    let tier = Tier::new(&mut draws, SHAPE, &cuda(&gpu), &pinned, HostAccess::InPlace);
    let new = |region: Arc<Region>| {
        Pieces::new(region, HostAccess::InPlace, &tier.rows, SHAPE.page_size, SHAPE.stride(), 1)
    };
    let pageable = Arc::new(Region::new(Arc::new(Host), 5000).expect("memory"));
    let expected = "5000 bytes of pageable memory cannot be reached in place";
    assert_eq!(refused(new(pageable)), (ErrorKind::Argument, expected.to_owned()));
    let on_device = Arc::new(Region::new(cuda(&gpu), 5000).expect("memory"));
    assert_eq!(refused(new(on_device)).0, ErrorKind::Argument);
    let in_place = || new(locked_in_place(&gpu, 8192)).expect("fits");
    assert_eq!(in_place().reach(), HostAccess::InPlace);
    // Rows of the host are not those of a pool on a device.
    let other = Tier::new(&mut draws, SHAPE, &host(), &host(), HostAccess::Copied);
    let copied = tier.executor.copy_pages::<Page>(
        &other.rows,
        &tier.pieces,
        PageCopy::Out,
        &[],
        0..1,
        Stream::DEFAULT,
    );
    assert_eq!(refused(copied).0, ErrorKind::Argument);
    // Nor are pieces for a pool of the host, whose memory may be anything, for one on a device.
    let copied = tier.executor.copy_pages::<Page>(
        &tier.rows,
        &other.pieces,
        PageCopy::Out,
        &[],
        0..1,
        Stream::DEFAULT,
    );
    assert_eq!(refused(copied).0, ErrorKind::Argument);
    let Some(soft) = Soft::find(test) else { return };
    (soft.set_host_pointers)(0);
    let reach = in_place().reach();
    (soft.set_host_pointers)(1);
    assert_eq!(reach, HostAccess::Copied);
}

#[test]
fn memory_locked_in_place_is_reached_in_steps() {
    let Some((gpu, _alone)) = gpu("memory_locked_in_place_is_reached_in_steps") else { return };
    let shape = Shape { page_size: 1, rows: 64, pieces: 64, ..SHAPE };
    let mut draws = Draws::new(11);
    let mapped: Arc<dyn Backend> = Arc::new(MappedHost::new(None, PageKind::Ordinary).expect("node"));
    for reach in [HostAccess::InPlace, HostAccess::Copied] {
        let mut tier = Tier::new(&mut draws, shape, &cuda(&gpu), &mapped, reach);
        let region = Arc::clone(tier.pieces.region());
        if reach == HostAccess::InPlace {
            page_lock(&gpu, &region, &[0..4096, 4096..region.bytes()]).expect("locked");
        }
        for direction in [PageCopy::Out, PageCopy::In] {
            let pairs = draws.pairs(&tier, direction, 60);
            copy(&mut tier, &gpu, direction, &pairs, Stream::DEFAULT);
            tier.check();
        }
    }
}

#[test]
fn a_copy_into_a_graph_is_refused() {
    let test = "a_copy_into_a_graph_is_refused";
    let Some((gpu, _alone)) = gpu(test) else { return };
    let (Some([stream, other]), Some(soft)) = (streams(test), Soft::find(test)) else { return };
    let mut draws = Draws::new(12);
    for (memory, reach) in [
        (Arc::new(PageLockedHost::new(&gpu)) as Arc<dyn Backend>, HostAccess::InPlace),
        (host(), HostAccess::Copied),
    ] {
        let mut tier = Tier::new(&mut draws, SHAPE, &cuda(&gpu), &memory, reach);
        let pairs = draws.pairs(&tier, PageCopy::Out, 5);
        assert_eq!((soft.begin_capture)(stream.handle()), 0);
        let (kind, said) = refused(tier.copy(PageCopy::Out, &pairs, &(0..3), stream));
        assert_eq!((kind, said.contains("cannot be captured")), (ErrorKind::Driver, true), "{said}");
        // Copies on another stream run during the capture, and do not invalidate it.
        tier.copy(PageCopy::Out, &pairs, &(0..3), other).expect("enqueued");
        assert!((soft.end_capture)(stream.handle()) > 0);
        gpu.synchronize(other).expect("ran");
        tier.check();
    }
}

#[test]
fn every_driver_call_of_a_copy_may_fail_once() {
    let test = "every_driver_call_of_a_copy_may_fail_once";
    let Some((gpu, _alone)) = gpu(test) else { return };
    let (Some([stream, _]), Some(soft)) = (streams(test), Soft::find(test)) else { return };
    let mut draws = Draws::new(13);
    for (memory, reach) in [
        (Arc::new(PageLockedHost::new(&gpu)) as Arc<dyn Backend>, HostAccess::InPlace),
        (host(), HostAccess::Copied),
    ] {
        let mut tier = Tier::new(&mut draws, SHAPE, &cuda(&gpu), &memory, reach);
        for direction in [PageCopy::Out, PageCopy::In] {
            let pairs = draws.pairs(&tier, direction, 9);
            let calls = soft.fail_each(|| tier.copy(direction, &pairs, &(0..3), stream));
            assert!(calls >= 3, "{calls} calls failed");
            gpu.synchronize(stream).expect("ran");
            tier.check();
        }
        let calls = soft.fail_each(|| {
            let region = Arc::clone(tier.pieces.region());
            let (reach, stride) = (tier.pieces.reach(), SHAPE.stride());
            Pieces::new(region, reach, &tier.rows, SHAPE.page_size, stride, SHAPE.pieces).map(drop)
        });
        assert_eq!(calls > 0, reach == HostAccess::InPlace);
    }
}

fn side_streams(gpu: &Arc<Gpu>) -> [Stream; 3] {
    let copies = [CopyDirection::In, CopyDirection::Out].map(SideStream::Copy);
    [copies[0], copies[1], SideStream::Filling(CopyDirection::Out)]
        .map(|work| gpu.side_stream(work).expect("made"))
}

#[test]
fn side_streams_are_made_once() {
    let test = "side_streams_are_made_once";
    let Some((gpu, _alone)) = gpu(test) else { return };
    let made = side_streams(&gpu);
    assert!(made[0] != made[1] && made[1] != made[2] && made[2] != made[0]);
    assert!(!made.contains(&Stream::DEFAULT));
    let again = side_streams(&gpu);
    assert_eq!(made, again);
    // The first stream of another device is made while a stream is in a capture, and each call fails once.
    let (Some([captured, _]), Some(soft)) = (streams(test), Soft::find(test)) else { return };
    let other = Gpu::open(1).expect("a second device");
    assert_eq!((soft.begin_capture)(captured.handle()), 0);
    let mut found = None;
    let calls = soft.fail_each(|| {
        found = None;
        found = Some(other.side_stream(SideStream::Copy(CopyDirection::In))?);
        Ok(())
    });
    assert!(calls >= 2, "{calls} calls failed");
    assert!((soft.end_capture)(captured.handle()) > 0, "the capture is whole");
    let stream = found.expect("made");
    assert!(!made.contains(&stream));
    (soft.reset_calls)();
    assert_eq!(other.side_stream(SideStream::Copy(CopyDirection::In)).expect("made"), stream);
    assert_eq!(soft.calls(c"cuStreamCreate"), 0);
    other.synchronize(stream).expect("it belongs to the device");
}

#[test]
fn a_thread_sleeps_until_the_end_of_copies() {
    let test = "a_thread_sleeps_until_the_end_of_copies";
    let (Some((gpu, _alone)), Some(soft)) = (gpu(test), Soft::find(test)) else { return };
    let region = Arc::new(Region::new(cuda(&gpu), 64).expect("memory"));
    let queue = CopyQueue::new(CopyDirection::In, Some(Arc::clone(&gpu)));
    let target = Arc::clone(&region);
    let step = move |_, stream| gpu.fill(target.range(0, 64)?, 7, stream);
    let transfer = queue.start(3, &[Stream::DEFAULT], Vec::new(), step).expect("enqueued");
    // The copies do not run because somebody asks for them.
    (soft.set_queries)(0);
    (soft.reset_calls)();
    let waited = transfer.wait();
    (soft.set_queries)(3);
    waited.expect("copied");
    assert_eq!([c"wait:sleeps", c"wait:spins"].map(|how| soft.calls(how)), [1, 0]);
    assert!(transfer.is_complete().expect("a device"));
}
