//! The stage: device memory to which the next slots are written before they are requested.

mod mirrored;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::base::bounded::narrow;
use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{
    DType, Error, ErrorKind, Id, IndexDType, Page, Result, Slot, bytes_of, try_reserve, widen,
};
use crate::index::{Bitmap, Run, SlotAllocator, SlotList};
use crate::kernels::{Executor, GrowingBatch, IndexSpace, IndexSpaces, MAX_RUNS};
use crate::memory::{
    Backend, BorrowedTensor, Contents, Event, Gpu, Region, ReturnedParts, Ring, Stream, StreamSet,
};
use crate::tensor::TensorView;

use super::mirror::{Mirror, publish};
use mirrored::MirroredSlots;

/// Slots that are written ahead: initially, at least and at most.
const AHEAD: usize = 1024;
const MIN_AHEAD: usize = 64;
const MAX_AHEAD: usize = 64 << 10;

/// Positions at which a write begins are multiples of this, so that it moves whole words.
const ALIGNED: usize = 4;

/// Device memory for the tensors of slots.
///
/// A write to the device brings the requested slots and, behind them, those predicted to come next. As long as
/// the prediction holds (every request is compared with it), handing out moves a cursor and makes no driver
/// call. Slots are written as runs, which a kernel lists; very many short runs are copied as a list. Positions
/// are reused when their tensors are dropped. Nothing is allocated on the device after construction, so live
/// tensors are bounded: tensors over more positions than the stage has are an error.
#[derive(Debug)]
pub(super) struct Stage {
    gpu: Arc<Gpu>,
    region: Arc<Region>,
    /// Streams on which positions were written, handed out or read. New writes wait for them. A stream leaves with
    /// such a wait when it has no tensor any more: the writer comes after all of its work.
    users: Arc<StreamSet>,
    ring: Ring,
    copy: Arc<StageMirror>,
    /// The streams that have tensors, and may read them without a call of kvpool.
    readers: Vec<Reader>,
    /// Positions that no tensor and no window covers.
    free: Bitmap,
    window: Option<Window>,
    page_size: usize,
    /// Writes runs of slots, and computes those that continue a page whose number only the device has.
    kernels: Executor,
    /// Slots in the next write.
    ahead: usize,
    /// The slots of the current write; kept for its capacity.
    slots: SlotList,
    /// As numbers, if they are copied, and as int64 for a stage of those; kept for their capacity.
    listed: Vec<i32>,
    wide: Vec<i64>,
}

/// Returns the bytes of a stage for tensors over up to `slots` live slots, and as many freed ones.
pub(super) fn stage_bytes(slots: usize, dtype: IndexDType) -> Result<usize> {
    bytes_of("the tensors of slots", &[2, slots + MAX_AHEAD], dtype.dtype())
}

/// A stream on which tensors were handed out.
#[derive(Debug)]
struct Reader {
    stream: Stream,
    /// Parts of the region whose tensors were dropped. Each tensor that is left has a reference.
    returned: Arc<ReturnedParts>,
}

/// Positions that hold the predicted slots.
#[derive(Debug)]
struct Window {
    positions: Range<usize>,
    /// The predicted pages, of which the last slots may have found no room.
    runs: VecDeque<Run<Page>>,
    /// The event after the write.
    written: Arc<Event>,
    /// Streams ordered after that event.
    ordered: Vec<Stream>,
}

/// The host's mirror of the region.
#[derive(Debug)]
struct StageMirror {
    addresses: Range<usize>,
    dtype: IndexDType,
    slots: RankedMutex<MirroredSlots>,
}

impl StageMirror {
    fn locked<R>(&self, work: impl FnOnce(&mut MirroredSlots) -> R) -> R {
        work(&mut self.slots.lock())
    }
}

impl Mirror for StageMirror {
    fn addresses(&self) -> Range<usize> {
        self.addresses.clone()
    }

    fn dtype(&self) -> DType {
        self.dtype.dtype()
    }

    fn values(&self, first: usize, step: usize, count: usize, version: u64) -> Option<Vec<i32>> {
        // A tensor over new slots starts at version 0; every write through the framework counts it up.
        if version == 0 { self.locked(|slots| slots.values(first, step, count)) } else { None }
    }

    fn runs(&self, first: usize, count: usize, version: u64) -> Option<SlotList> {
        if version == 0 { self.locked(|slots| slots.runs(first, count)) } else { None }
    }
}

impl Stage {
    /// Creates a stage for tensors over all of `slots`, and as many freed ones.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        backend: &Arc<dyn Backend>,
        slots: &SlotAllocator,
        dtype: IndexDType,
    ) -> Result<Self> {
        let bytes = stage_bytes(slots.capacity(), dtype)?;
        let positions = bytes / dtype.dtype().size();
        let users = Arc::<StreamSet>::default();
        let region = Region::with(Arc::clone(backend), bytes, Contents::Undefined, Arc::clone(&users))?;
        let region = Arc::new(region);
        let start = region.address().as_ptr().addr();
        let mirrored = RankedMutex::new(LockRank::Stage, MirroredSlots::new(positions)?);
        let copy = Arc::new(StageMirror { addresses: start..start + bytes, dtype, slots: mirrored });
        let space = IndexSpace { noun: Slot::NOUN, len: slots.capacity() + slots.page_size() };
        let kernels = Executor::new(&region, 0, IndexSpaces::of_rows(space), 0)?;
        let published: Arc<dyn Mirror> = copy.clone();
        publish(&published);
        let mut free = Bitmap::new(positions)?;
        free.insert_run(0, positions);
        Ok(Self {
            gpu: Arc::clone(gpu),
            ring: Ring::on_host(gpu, bytes)?,
            region,
            users,
            copy,
            readers: Vec::new(),
            free,
            window: None,
            page_size: slots.page_size(),
            kernels,
            ahead: AHEAD,
            slots: SlotList::default(),
            listed: Vec::new(),
            wide: Vec::new(),
        })
    }

    /// Returns the device.
    pub(super) const fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Returns the size of a slot in bytes.
    fn size(&self) -> usize {
        self.copy.dtype().size()
    }

    /// Returns the number of bytes on the device.
    pub(super) fn bytes(&self) -> usize {
        self.region.bytes()
    }

    /// Returns the first `count` slots of `runs`, the pages that were just taken for them, as a tensor that
    /// is valid on `stream`. `upcoming` lists up to that many pages that come next.
    pub(super) fn hand_out(
        &mut self,
        runs: &[Run<Page>],
        count: usize,
        upcoming: impl FnOnce(usize, &mut VecDeque<Run<Page>>),
        stream: Stream,
    ) -> Result<TensorView> {
        self.gpu.check_process()?;
        self.order(stream)?;
        if let Some(positions) = self.advance_window(runs, count) {
            return self.view(positions, stream);
        }
        self.check_writable(stream)?;
        self.leave_window();
        let mut slots = std::mem::take(&mut self.slots);
        let mut next = VecDeque::new();
        let written = self.write_ahead(&mut slots, runs, count, &mut next, upcoming, stream);
        self.slots = slots;
        let (positions, written) = written?;
        let rest = positions.start + count..positions.end;
        self.window = Some(Window { positions: rest, runs: next, written, ordered: vec![stream] });
        self.view(positions.start..positions.start + count, stream)
    }

    /// Writes the first `count` slots of `runs` and those behind them, which `next` gets, by way of `slots`. Also returns
    /// the event after the write.
    fn write_ahead(
        &mut self,
        slots: &mut SlotList,
        runs: &[Run<Page>],
        count: usize,
        next: &mut VecDeque<Run<Page>>,
        upcoming: impl FnOnce(usize, &mut VecDeque<Run<Page>>),
        stream: Stream,
    ) -> Result<(Range<usize>, Arc<Event>)> {
        slots.clear();
        self.list(slots, runs.iter())?;
        slots.truncate(count);
        upcoming(self.ahead.saturating_sub(count).div_ceil(self.page_size), next);
        self.list(slots, next.iter())?;
        let (positions, copied) = self.write(count, slots, stream)?;
        let written = copied.map_or_else(|| Event::record(&self.gpu, stream).map(Arc::new), Ok);
        let written = written.inspect_err(|_| self.free.insert_run(positions.start, positions.len()))?;
        Ok((positions, written))
    }

    /// Appends the slots of `runs`.
    fn list<'a>(
        &self,
        slots: &mut SlotList,
        runs: impl ExactSizeIterator<Item = &'a Run<Page>>,
    ) -> Result<()> {
        slots.reserve(runs.len())?;
        let page_size = narrow(self.page_size);
        for run in runs {
            let start = Slot::new(run.start.number() * page_size);
            slots.push(Run { start, len: run.len * page_size });
        }
        Ok(())
    }

    /// Returns an event to wait for before more slots are sent to the device, if it is far
    /// behind.
    pub(super) fn backpressure_event(&self) -> Option<Arc<Event>> {
        self.ring.backpressure_event(0)
    }

    /// Returns whether `count` slots can be handed out without a write, provided that they are the predicted
    /// ones.
    pub(super) fn has_ready(&self, count: usize) -> bool {
        self.window.as_ref().is_some_and(|window| window.positions.len() >= count)
    }

    /// Checks that numbers can be written for `stream` now. The write is ordered after all streams that use
    /// the stage.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] while `stream` or one of those is captured.
    pub(super) fn check_writable(&self, stream: Stream) -> Result<()> {
        self.gpu.check_not_capturing(stream, "a copy of slots from the host")?;
        self.gpu.check_can_order(&self.users.streams(), stream)
    }

    /// Writes slots, or other numbers, to the stage, and returns a tensor of them that is valid on `stream`.
    pub(super) fn tensor_of(&mut self, slots: &SlotList, stream: Stream) -> Result<TensorView> {
        self.check_writable(stream)?;
        let (positions, _) = self.write(slots.len(), slots, stream)?;
        self.view(positions, stream)
    }

    /// Works like [`Self::tensor_of`] for the slots of a batch that grows. The padding slot in `slots` stands for
    /// those that continue a page behind a slot of `last_loc`, which only the device has: a launch writes
    /// them.
    pub(super) fn complete(
        &mut self,
        slots: &SlotList,
        last_loc: &BorrowedTensor<'_>,
        grown: &GrowingBatch<'_>,
        stream: Stream,
    ) -> Result<TensorView> {
        let view = self.tensor_of(slots, stream)?;
        if let Executor::Device(launcher) = &self.kernels {
            launcher.continue_pages(&view.borrow(), last_loc, grown, stream)?;
        }
        Ok(view)
    }

    /// Reports, once, a last slot of an earlier [`Self::complete`] that does not end its request.
    pub(super) fn take_fault(&self) -> Result<()> {
        self.kernels.take_fault()
    }

    /// Calls `read` with the slots that a tensor of this stage was made of.
    pub(super) fn with_listed<R>(
        &self,
        view: &TensorView,
        read: impl FnOnce(&mut dyn Iterator<Item = i32>) -> R,
    ) -> R {
        let first = (view.borrow().address().as_ptr().addr() - self.copy.addresses.start) / self.size();
        self.copy.locked(|slots| {
            read(&mut (first..first + view.shape().numel()).map(|position| slots.at(position)))
        })
    }

    /// Records that work on `stream` reads a tensor of this stage.
    pub(super) fn record_stream(&self, tensor: &BorrowedTensor<'_>, stream: Stream) -> Result<()> {
        let address = tensor.address().as_ptr().addr();
        if !self.copy.addresses.contains(&address) {
            return Err(Error::argument(format!(
                "the tensor at {address:#x} does not come from this allocator"
            )));
        }
        self.users.keep(stream)
    }

    /// Returns the positions of the first `count` slots of `runs`, if they are as predicted. The window moves
    /// past them, and past the rest of the last page, which belongs to the caller as well.
    fn advance_window(&mut self, runs: &[Run<Page>], count: usize) -> Option<Range<usize>> {
        let window = self.window.as_mut()?;
        if window.positions.len() < count || !begins_with(&window.runs, runs) {
            return None;
        }
        let pages = runs.iter().map(|run| run.len).sum();
        let start = window.positions.start;
        let next = (start + widen(pages) * self.page_size).min(window.positions.end);
        skip(&mut window.runs, pages);
        window.positions.start = next;
        let handed = start..start + count;
        self.free.insert_run(handed.end, next - handed.end);
        Some(handed)
    }

    /// Drops the rest of the window. Predicts further ahead next time if little was left.
    fn leave_window(&mut self) {
        let Some(window) = self.window.take() else { return };
        let left = window.positions.len();
        self.ahead = if left <= self.ahead / 4 { self.ahead * 2 } else { self.ahead / 2 };
        self.ahead = self.ahead.clamp(MIN_AHEAD, MAX_AHEAD);
        self.free.insert_run(window.positions.start, left);
    }

    /// Takes the positions of dropped tensors, and forgets the readers that have no tensor any more.
    fn take_returned(&mut self) {
        let (size, free) = (self.size(), &mut self.free);
        self.readers.retain_mut(|reader| {
            // Asked first: once no tensor is left, all of its reader's parts have been returned.
            let has_tensors = Arc::get_mut(&mut reader.returned).is_none();
            for range in reader.returned.take() {
                let (start, end) = (range.start / size, range.end / size);
                free.insert_run(start, end - start);
            }
            has_tensors
        });
    }

    /// Takes a run of `least` to `most` positions.
    fn take_run(&mut self, least: usize, most: usize) -> Result<Range<usize>> {
        self.take_returned();
        let (mut best, mut from) = (0..0, 0);
        while let Some((start, len)) = self.free.next_run(from, most + ALIGNED)
            && best.len() < most
        {
            from = start + len;
            let aligned = start.next_multiple_of(ALIGNED);
            let len = from.saturating_sub(aligned).min(most);
            if len > best.len() {
                best = aligned..aligned + len;
            }
        }
        if best.len() < least {
            let out = self.copy.addresses.len() / self.size() - self.free.len();
            return Err(Error::new(
                ErrorKind::OutOfMemory,
                format!(
                    "{least} slots asked for, but tensors over {out} slots that were handed out before are still \
                     alive; drop those of freed slots, or keep a copy"
                ),
            )
            .with_asked(least)
            .with_available(self.free.len()));
        }
        self.free.remove_run(best.start, best.len());
        Ok(best)
    }

    /// Writes at least the first `least` of `slots` to free positions. Also returns the event after the write, if it is
    /// a copy.
    fn write(
        &mut self,
        least: usize,
        slots: &SlotList,
        stream: Stream,
    ) -> Result<(Range<usize>, Option<Arc<Event>>)> {
        let positions = self.take_run(least, slots.len())?;
        let written = self.write_to(&positions, slots, stream).inspect_err(|_| {
            self.free.insert_run(positions.start, positions.len());
        })?;
        Ok((positions, written))
    }

    /// Fills positions with the first ones of `slots`.
    fn write_to(
        &mut self,
        positions: &Range<usize>,
        slots: &SlotList,
        stream: Stream,
    ) -> Result<Option<Arc<Event>>> {
        // The tensors over these positions were dropped, but work on their streams may still read them. Streams
        // that have no tensor enqueue no more such work: this one stands for them from now on.
        let readers = &self.readers;
        let taken = self.users.take(|user| {
            let has_tensors = readers.iter().any(|reader| user.is_kept || reader.stream == user.stream);
            user.stream != stream && !has_tensors
        });
        self.gpu.make_stream_wait(taken.before(), stream)?;
        self.users.record(stream);
        taken.forget();
        let target = self.region.range(positions.start * self.size(), positions.len() * self.size())?;
        if let Executor::Device(launcher) = &self.kernels
            && slots.runs().len() <= MAX_RUNS
        {
            launcher.list_runs(target, self.copy.dtype, slots.runs(), stream)?;
            self.copy.locked(|mirror| mirror.write(positions.clone(), slots));
            return Ok(None);
        }
        // So many short runs are listed here: a copy carries more numbers than a launch.
        let Self { listed, wide, ring, copy, .. } = self;
        listed.clear();
        slots.list(positions.len(), listed)?;
        let written = match copy.dtype {
            IndexDType::I32 => ring.upload_to(target, listed, stream)?,
            IndexDType::I64 => {
                wide.clear();
                try_reserve(wide, listed.len())?;
                wide.extend(listed.iter().copied().map(i64::from));
                ring.upload_to(target, wide, stream)?
            }
        };
        copy.locked(|mirror| mirror.write_listed(positions.start, listed));
        Ok(Some(written))
    }

    /// Makes the window valid on `stream`.
    fn order(&mut self, stream: Stream) -> Result<()> {
        let Some(window) = &mut self.window else { return Ok(()) };
        if !window.ordered.contains(&stream) {
            self.gpu
                .check_not_capturing(stream, "a wait for slots that were written outside of the capture")?;
            window.written.make_stream_wait(stream)?;
            window.ordered.push(stream);
        }
        Ok(())
    }

    /// Returns a tensor of these positions, which are valid on `stream`.
    fn view(&mut self, positions: Range<usize>, stream: Stream) -> Result<TensorView> {
        let (count, size) = (positions.len(), self.size());
        let bytes = positions.start * size..positions.end * size;
        let at = self.readers.iter().position(|reader| reader.stream == stream).unwrap_or_else(|| {
            self.readers.push(Reader { stream, returned: Arc::default() });
            self.readers.len() - 1
        });
        // Its work is recorded now, as it may read the tensor without a call of kvpool.
        self.users.record(stream);
        let part = Region::part(&self.region, bytes, &self.readers[at].returned)?;
        TensorView::contiguous(Arc::new(part), 0, self.copy.dtype(), &[count])
    }
}

/// Returns whether `runs` are the first pages of `expected`, regardless of the cuts between runs.
fn begins_with(expected: &VecDeque<Run<Page>>, runs: &[Run<Page>]) -> bool {
    let mut expected = expected.iter().map(|run| run.range());
    let mut here = 0..0;
    for mut run in runs.iter().map(|run| run.range()) {
        while !run.is_empty() {
            if here.is_empty() {
                let Some(next) = expected.next() else { return false };
                here = next;
            }
            if run.start != here.start {
                return false;
            }
            let common = run.len().min(here.len());
            (run.start, here.start) = (run.start + narrow(common), here.start + narrow(common));
        }
    }
    true
}

/// Drops the first `count` pages of `runs`.
fn skip(runs: &mut VecDeque<Run<Page>>, count: u32) {
    let mut left = count;
    while left > 0
        && let Some(first) = runs.pop_front()
    {
        let (skipped, rest) = first.split(left);
        left -= skipped.len;
        if let Some(rest) = rest {
            runs.push_front(rest);
        }
    }
}
