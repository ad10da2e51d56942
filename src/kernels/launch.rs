//! The operations on a GPU: parameters for the kernels of `plan.cu`, `plan_long.cu`, `rows.cu` and `table.cu`,
//! one launch per call.
//!
//! The structures are those of `params.cuh`. Everything that the host can check is checked before a launch.
//! Kernels check the indices that only the device has, and [`Launcher::take_fault`] reports the invalid
//! ones.

mod fault;
mod fetch;
mod grid;
mod images;
mod kernels;
mod numbers;
mod params;
mod plan;
mod unit_plan;

pub(crate) use fetch::{Fetcher, PendingFetch, read_now};
pub(crate) use plan::{PlanBatch, PlanFields, PlanRequest, PlanRequests};
pub(crate) use unit_plan::{
    UNIT_GROUP_NUMBERS, UNIT_REQUEST_NUMBERS, UNIT_SPAN_NUMBERS, UnitGroup, UnitPlanBatch,
};

use std::collections::HashSet;
use std::ptr;
use std::sync::Arc;

use crate::base::bounded::{int32, signed};
use crate::base::{
    DType, Error, Id, IndexDType, RequestRow, Result, Slot, bytes_of, out_of_memory_error, try_collect,
    try_with_capacity, widen,
};
use crate::index::{Move, RowExtent, Run};
use crate::kernels::indices::{IndexSpace, IndexSpaces, Indices, Numbers};
use crate::kernels::pages::{HostAccess, PageCopy, PagePlan, Pieces, StagedCopy};
use crate::kernels::rows::{LayerRows, RowBuffer, check_moves, check_targets};
use crate::kernels::store::{StoreRows, targets};
use crate::kernels::table::Table;
use crate::memory::{Backend, BorrowedTensor, Event, Gpu, RegionRange, Reply, Ring, Stream, StreamSet};

use fault::{Fault, FaultKind, FaultRecord};
use grid::{Groups, blocks, copy_grid, parts_grid, units};
use kernels::{Kernel, Kernels, TypedFunction};
use numbers::{Arrays, Index, WithList};
use params::{
    ColumnsParams, ContinueParams, GatherParams, GatherPart, KvIndicesParams, MoveParams, OrderParams,
    PageTarget, PagesParams, PointsParams, RunsParams, StoreParams, StorePart, ZeroParams,
};

/// The copies of a call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Copies<'a> {
    /// The host has planned them.
    Planned(&'a [Move]),
    /// Row `source[i]` to row `target[i]`, for `count` rows, in any order.
    Unplanned {
        /// The rows to write.
        target: Numbers<'a>,
        /// The rows to read.
        source: Numbers<'a>,
        /// The number of rows.
        count: usize,
    },
}

/// A batch that grows, for [`Launcher::continue_pages`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct GrowingBatch<'a> {
    /// The slots of each request that are taken in its last page; 0 if the page is full.
    pub offsets: &'a [i32],
    /// The place where the new slots of each request begin, and the end of all.
    pub indptr: &'a [i32],
    /// The number of slots of the pool.
    pub slots: usize,
    /// The number of slots in a page.
    pub page_size: usize,
}

/// The most requests in one launch of [`Launcher::continue_pages`].
const MAX_GROWING: usize = (WithList::<ContinueParams>::ROOM - 1) / 2;

/// The most runs in one launch of [`Launcher::list_runs`].
pub(crate) const MAX_RUNS: usize = WithList::<RunsParams>::ROOM / 2;

/// The most pages in one launch of [`Launcher::copy_pages`].
const MAX_PAGES: usize = WithList::<PagesParams>::ROOM / 2;

/// The most blocks of a copy of pages over the bus. Each has up to 16 KiB in flight: 512 KiB together are several
/// times what a bus transfers while one access takes, and the rest of the device is left to other streams.
const PAGE_BLOCKS: u32 = 32;

/// As [`PAGE_BLOCKS`], of a copy from the host in runs of [`LONG_RUN`] bytes, for which so few suffice (H100,
/// 2026-11-26).
const LOADING_BLOCKS: u32 = 8;
const LONG_RUN: usize = 16 << 10;

/// The most blocks of a copy of pages on the device: several for each multiprocessor.
const GATHERING_BLOCKS: u32 = 1024;

/// The kernels of a pool on its device, a ring for numbers from the host, and a record of faults.
#[derive(Debug)]
pub struct Launcher {
    gpu: Arc<Gpu>,
    kernels: Arc<Kernels>,
    ring: Ring,
    /// The spaces of row and column indices.
    spaces: IndexSpaces,
    fault: FaultRecord,
    /// The streams that use the pool's memory.
    users: Arc<StreamSet>,
}

/// A use of index tensors by work on a stream, which is recorded when the guard is dropped: after the work was
/// enqueued, as [`StreamSet::record`] requires.
#[must_use = "the work is enqueued before the guard is dropped"]
pub(crate) struct IndexUse<'a, const N: usize> {
    indices: [&'a Indices<'a>; N],
    stream: Stream,
}

impl<'a, const N: usize> IndexUse<'a, N> {
    fn tensors(&self) -> impl Iterator<Item = &BorrowedTensor<'a>> {
        self.indices.iter().filter_map(|indices| match indices {
            Indices::Host(_) => None,
            Indices::Device { tensor, .. } => Some(tensor),
        })
    }
}

impl<const N: usize> Drop for IndexUse<'_, N> {
    fn drop(&mut self) {
        self.tensors().for_each(|tensor| tensor.record_stream(self.stream));
    }
}

impl Launcher {
    /// Creates a launcher for memory of `backend` on `gpu` with these users, which passes up to `ring_bytes`
    /// of numbers from the host at once.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when the kernels cannot be loaded, [`ErrorKind::OutOfMemory`] when there is not
    /// enough memory.
    ///
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    /// [`ErrorKind::OutOfMemory`]: crate::base::ErrorKind::OutOfMemory
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        backend: &Arc<dyn Backend>,
        users: &Arc<StreamSet>,
        spaces: IndexSpaces,
        ring_bytes: usize,
    ) -> Result<Self> {
        let kernels = Kernels::of(gpu)?;
        let ring = Ring::new(gpu, backend, ring_bytes)?;
        let fault = FaultRecord::new(gpu, users)?;
        Ok(Self { gpu: Arc::clone(gpu), kernels, ring, spaces, fault, users: Arc::clone(users) })
    }

    /// Returns the device.
    #[must_use]
    pub(crate) const fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Returns a point to wait for before a call that gets `numbers` numbers from the host: see
    /// [`Ring::backpressure_event`].
    #[must_use]
    pub(crate) fn backpressure_event(&self, numbers: usize) -> Option<Arc<Event>> {
        // A call sends at most three numbers for two that it gets, and a few more to align them.
        let bytes = numbers.saturating_mul(2 * size_of::<i32>()).saturating_add(64);
        self.ring.backpressure_event(bytes)
    }

    pub(super) const fn spaces(&self) -> IndexSpaces {
        self.spaces
    }

    /// Checks that index tensors are in host memory or on this device. Work that reads them can be enqueued on
    /// `stream` until the guard is dropped.
    pub(super) fn use_indices<'a, const N: usize>(
        &self,
        indices: [&'a Indices<'a>; N],
        stream: Stream,
    ) -> Result<IndexUse<'a, N>> {
        let uses = IndexUse { indices, stream };
        uses.tensors().try_for_each(|tensor| tensor.check_on(self.gpu.device(), "the index tensor"))?;
        Ok(uses)
    }

    /// Starts every call: checks the devices of its indices, and reports a fault of an earlier call.
    pub(super) fn begin<'a, const N: usize>(
        &self,
        indices: [&'a Indices<'a>; N],
        stream: Stream,
    ) -> Result<IndexUse<'a, N>> {
        let uses = self.use_indices(indices, stream)?;
        self.take_fault()?;
        Ok(uses)
    }

    /// Returns, once, the error that a kernel of an earlier call has recorded. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] with the number, its position and its bound.
    ///
    /// [`ErrorKind::Index`]: crate::base::ErrorKind::Index
    pub(super) fn take_fault(&self) -> Result<()> {
        self.gpu.check_process()?;
        let Some(Fault { kind, position, value }) = self.fault.take() else { return Ok(()) };
        Err(match kind {
            FaultKind::Row | FaultKind::Column => {
                let IndexSpaces { rows, columns } = self.spaces;
                let IndexSpace { noun, len } = if kind == FaultKind::Column { columns } else { rows };
                Error::index(format!(
                    "{noun} {value} at position {position} is outside [0, {len}); an earlier call was given it in a \
                     tensor on the device, and left it out"
                ))
                .with_index(value)
            }
            FaultKind::LastLoc => Error::argument(format!(
                "last_loc {value} of request {position} does not end its prefix; an earlier call was given it in \
                 a tensor on the device, and handed out the padding slot in place of those behind it"
            )),
            FaultKind::Value => Error::argument(format!(
                "value {value} at position {position} does not fit an int32 tensor; an earlier call was given it \
                 in a tensor on the device, and left it out"
            )),
        })
    }

    /// Launches `kernel` with the parameters that `params` returns, once the device can read `arrays` of the
    /// host: behind the parameters if they fit there, otherwise in the ring. The caller has checked that
    /// `stream` is not being captured, even for empty arrays: a graph would repeat their values.
    fn launch_with_arrays<P>(
        &self,
        kernel: Kernel<P>,
        grid: [u32; 2],
        arrays: &[&[i32]],
        stream: Stream,
        params: impl FnOnce(Arrays<'_>) -> Result<P>,
    ) -> Result<()> {
        if WithList::<P>::fits(arrays) {
            return self.launch_with_list(kernel.listed, grid, arrays, stream, params(Arrays::Listed)?);
        }
        self.ring
            .upload(arrays, stream, |ranges| {
                let params = params(Arrays::Copied(ranges))?;
                self.launch(kernel.copied, grid, &params, stream)
            })
            .map(|_| ())
    }

    /// Launches a kernel that takes `arrays`, which fit, behind its parameters.
    // The stack of its callers does not grow by the list.
    #[inline(never)]
    fn launch_with_list<P, const WORDS: usize>(
        &self,
        kernel: TypedFunction<WithList<P, WORDS>>,
        grid: [u32; 2],
        arrays: &[&[i32]],
        stream: Stream,
        params: P,
    ) -> Result<()> {
        WithList::with(params, arrays, |params| self.launch(kernel, grid, params, stream))
    }

    /// Launches `kernel` with the parameters that `params` makes from `numbers`.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] while `stream` is being captured, if any of them are on the host.
    ///
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    fn launch_with_numbers<P>(
        &self,
        kernel: Kernel<P>,
        grid: [u32; 2],
        numbers: &[Numbers<'_>],
        stream: Stream,
        params: impl FnOnce(&[Index]) -> P,
    ) -> Result<()> {
        let lists: Vec<&[i32]> = numbers
            .iter()
            .filter_map(|numbers| if let Numbers::List(list) = numbers { Some(*list) } else { None })
            .collect();
        if lists.is_empty() {
            let indices = numbers.iter().map(Index::new).collect::<Result<Vec<_>>>()?;
            return self.launch(kernel.copied, grid, &params(&indices), stream);
        }
        self.ring.check_not_capturing(stream)?;
        self.launch_with_arrays(kernel, grid, &lists, stream, |arrays| Ok(params(&arrays.indices(numbers)?)))
    }

    /// Works like [`store_rows`](super::store_rows), for K and V in one launch. A row that occurs twice in a
    /// device tensor has undefined contents: warps share a row and run in any order, so K may come from one
    /// value and V from the other, and either may mix both.
    ///
    /// # Errors
    /// Same as [`store_rows`](super::store_rows); an index of a device tensor beyond the rows is skipped, and
    /// `Executor::take_fault` reports it.
    pub(super) fn store_rows(
        &self,
        stores: &[StoreRows<'_>; 2],
        indices: &Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        let count = indices.len();
        let parts = [StorePart::new(&stores[0], count)?, StorePart::new(&stores[1], count)?];
        let [rows, others] = [0, 1].map(|at| stores[at].target.shape()[0]);
        let rows = rows.min(others);
        let list = match indices {
            Indices::Host(values) => last_of_each(targets(values, rows)?)?,
            Indices::Device { .. } => Vec::new(),
        };
        let (first_blocks, grid) = parts_grid([parts[0].split, parts[1].split], count)?;
        let (count, rows) = (units(count)?, units(rows)?);
        let kernel = if parts.iter().all(StorePart::is_wide) {
            self.kernels.store_wide
        } else if parts.iter().all(StorePart::is_narrowed) {
            self.kernels.store_narrowed
        } else {
            self.kernels.store
        };
        self.launch_with_numbers(kernel, grid, &[indices.numbers(&list)], stream, |index| StoreParams {
            fault: self.fault.address(),
            count,
            rows,
            first_blocks,
            unused: 0,
            indices: index[0],
            parts,
        })
    }

    /// Works like [`gather_rows`](super::gather_rows), for K and V in one launch.
    ///
    /// # Errors
    /// Same as [`gather_rows`](super::gather_rows); for an index of a device tensor beyond the rows, the row
    /// of `out` is zeroed, and [`Launcher::take_fault`] reports it.
    pub(super) fn gather_rows(
        &self,
        pairs: &[(&RowBuffer, BorrowedTensor<'_>); 2],
        indices: &Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        let count = indices.len();
        check_targets(pairs, count)?;
        let rows = pairs[0].0.shape()[0];
        let list = indices.list(self.spaces.rows)?;
        let [k, v] = pairs;
        let parts = [GatherPart::new(k.0, &k.1)?, GatherPart::new(v.0, &v.1)?];
        let (first_blocks, grid) = parts_grid([parts[0].split, parts[1].split], count)?;
        let (count, rows) = (units(count)?, units(rows)?);
        self.launch_with_numbers(self.kernels.gather, grid, &[indices.numbers(&list)], stream, |index| {
            GatherParams {
                fault: self.fault.address(),
                count,
                rows,
                first_blocks,
                unused: 0,
                parts,
                indices: index[0],
            }
        })
    }

    /// Copies row `source[i]` to row `target[i]` in every buffer of both groups, in one launch.
    ///
    /// Indices from the host take effect as if all rows were read before any is written. With device tensors,
    /// no row may be both read and written, or written twice: its contents would be undefined.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for a row that does not exist, [`ErrorKind::Argument`] for more than can be
    /// transferred at once; a row of a device tensor that does not exist is reported by
    /// [`Launcher::take_fault`].
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::Index`]: crate::base::ErrorKind::Index
    pub(super) fn copy_rows(&self, buffers: &LayerRows, plan: Copies<'_>, stream: Stream) -> Result<()> {
        let rows = buffers.all().first().map_or(0, |buffer| buffer.shape()[0]);
        let raw = Groups::new(buffers)?;
        let (target, source, count) = match plan {
            Copies::Planned(moves) => {
                check_moves(buffers.all(), moves)?;
                let Some((target, source)) = independent(moves)? else {
                    return self.copy_rows_in_order(raw, moves, stream);
                };
                let count = moves.len();
                return self.copy_listed(
                    raw,
                    [Numbers::List(&target), Numbers::List(&source)],
                    count,
                    rows,
                    stream,
                );
            }
            Copies::Unplanned { target, source, count } => (target, source, count),
        };
        self.copy_listed(raw, [target, source], count, rows, stream)
    }

    fn copy_listed(
        &self,
        groups: Groups,
        numbers: [Numbers<'_>; 2],
        count: usize,
        rows: usize,
        stream: Stream,
    ) -> Result<()> {
        let (groups, grid) = groups.for_rows(count)?;
        let (count, rows) = (units(count)?, units(rows)?);
        self.launch_with_numbers(self.kernels.copy, grid, &numbers, stream, |index| MoveParams {
            groups,
            fault: self.fault.address(),
            count,
            rows,
            target: index[0],
            source: index[1],
        })
    }

    fn copy_rows_in_order(&self, groups: Groups, moves: &[Move], stream: Stream) -> Result<()> {
        let steps: Vec<i32> = moves
            .iter()
            .flat_map(|step| match *step {
                Move::Copy { dst, src } => [0, dst.cast_signed(), src.cast_signed()],
                Move::Swap(a, b) => [1, a.cast_signed(), b.cast_signed()],
            })
            .collect();
        let (groups, grid) = groups.for_words()?;
        self.ring.check_not_capturing(stream)?;
        self.launch_with_arrays(self.kernels.copy_in_order, grid, &[&steps], stream, |arrays| {
            Ok(OrderParams { steps: arrays.address(0), count: signed(moves.len()), groups })
        })
    }

    /// Zeroes the rows in `indices` in every buffer of both groups, in one launch.
    ///
    /// # Errors
    /// Same as [`Launcher::copy_rows`].
    pub(super) fn zero_rows(&self, buffers: &LayerRows, indices: &Indices<'_>, stream: Stream) -> Result<()> {
        let rows = buffers.all().first().map_or(0, |buffer| buffer.shape()[0]);
        let (list, count) = (indices.list(self.spaces.rows)?, indices.len());
        let (groups, grid) = Groups::new(buffers)?.for_rows(count)?;
        let (count, rows) = (units(count)?, units(rows)?);
        self.launch_with_numbers(self.kernels.zero, grid, &[indices.numbers(&list)], stream, |index| {
            ZeroParams { groups, fault: self.fault.address(), count, rows, indices: index[0] }
        })
    }

    /// Carries out a copy of pages. It is one launch for every `MAX_PAGES` pages, whose numbers are passed
    /// with it: the ring would keep those of a slow copy, and calls that need the ring would wait for it.
    /// With [`HostAccess::Copied`] it is one copy for each page and kind.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] while `stream` is being captured, and when a driver call fails.
    ///
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    pub(super) fn copy_pages(&self, plan: &PagePlan<'_>, pieces: &Pieces, stream: Stream) -> Result<()> {
        self.gpu.check_process()?;
        self.gpu.check_not_capturing(stream, "a copy between pages and host memory")?;
        let copied = match &plan.staging {
            _ if pieces.reach() == HostAccess::Copied => self.copy_each_page(plan, stream),
            Some(staged) => self.copy_staged_pages(plan, staged, stream),
            None => {
                let is_light = plan.direction == PageCopy::In && plan.run_bytes() >= LONG_RUN;
                self.launch_page_copies(plan, if is_light { LOADING_BLOCKS } else { PAGE_BLOCKS }, stream)
            }
        };
        self.users.record(stream);
        pieces.region().record_stream(stream);
        copied
    }

    /// Copies pages to pieces or back by way of a staging area: a kernel gathers them there, or scatters them, and
    /// copies of the driver, of as many pieces as lie in a row, move them over the bus.
    fn copy_staged_pages(&self, plan: &PagePlan<'_>, staged: &StagedCopy<'_>, stream: Stream) -> Result<()> {
        let piece_at = usize::from(plan.direction == PageCopy::Out);
        let mut indices = try_collect(plan.indices.iter().copied())?;
        indices.sort_unstable_by_key(|pair| pair[piece_at]);
        let area = staged.area();
        let filling = staged.filling.map_or_else(|| area.begin(stream), Ok)?;
        for batch in indices.chunks_mut(staged.pieces_at_once()) {
            let pieces = try_collect(batch.iter().map(|pair| pair[piece_at]))?;
            batch.iter_mut().zip(0..).for_each(|(pair, at)| pair[piece_at] = at);
            let indices = try_collect(batch.iter().copied())?;
            let within = |begin: usize, on: Stream| {
                let kinds = [0, 1].map(|kind| staged.within_device(&plan.kinds[kind], plan.direction, begin));
                let within = PagePlan { kinds, indices, staging: None, ..*plan };
                self.launch_page_copies(&within, GATHERING_BLOCKS, on)
            };
            let over_bus = |begin: usize, on: Stream| {
                staged.over_bus(&pieces, begin).try_for_each(|part| {
                    let [area, host] = part?;
                    match plan.direction {
                        PageCopy::Out => self.gpu.copy_2d(&host, &area, on),
                        PageCopy::In => self.gpu.copy_2d(&area, &host, on),
                    }
                })
            };
            let streams = [filling, stream];
            match plan.direction {
                PageCopy::Out => {
                    area.pass(streams, |begin| within(begin, filling), |begin| over_bus(begin, stream))
                }
                PageCopy::In => {
                    area.pass(streams, |begin| over_bus(begin, filling), |begin| within(begin, stream))
                }
            }?;
        }
        Ok(())
    }

    /// Copies pages by a kernel, of up to `max_blocks` blocks.
    fn launch_page_copies(&self, plan: &PagePlan<'_>, max_blocks: u32, stream: Stream) -> Result<()> {
        let groups = Groups::of_pages(plan)?;
        let targets = [PageTarget::new(&plan.kinds[0]), PageTarget::new(&plan.kinds[1])];
        for indices in plan.indices.chunks(MAX_PAGES) {
            let (groups, [blocks, _]) = groups.for_rows(indices.len())?;
            let params = PagesParams { count: signed(indices.len()), blocks: blocks.into(), groups, targets };
            let (grid, list) = ([blocks.min(max_blocks), 1], [indices.as_flattened()]);
            self.launch_with_list(self.kernels.copy_pages, grid, &list, stream, params)?;
        }
        Ok(())
    }

    fn copy_each_page(&self, plan: &PagePlan<'_>, stream: Stream) -> Result<()> {
        for &[source, target] in &plan.indices {
            for kind in plan.kinds.iter().filter(|kind| kind.bytes > 0) {
                let is_near = kind.source.runs.layer_step.max(kind.target.runs.layer_step) <= Gpu::MAX_PITCH;
                let at_once = if is_near { plan.layers } else { 1 };
                for first in (0..plan.layers).step_by(at_once.max(1)) {
                    let rows = first..first + at_once;
                    let source = kind.source.rows(rows.clone(), source, kind.bytes)?;
                    let target = kind.target.rows(rows, target, kind.bytes)?;
                    self.gpu.copy_2d(&target, &source, stream)?;
                }
            }
        }
        Ok(())
    }

    /// Writes `value[i]` to `table[row[i], column[i]]`, for `count` points, in one launch. With an echo, the
    /// written values are also sent to it, as (row, column, value) in int32, with row -1 for a point outside
    /// of the table: the caller has then checked that `stream` is not being captured.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for more numbers from the host than can be transferred at once;
    /// [`ErrorKind::Driver`] when a driver call fails. Invalid numbers of device tensors are skipped, and
    /// `Executor::take_fault` reports them.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    pub(crate) fn write_points(
        &self,
        table: &Table<'_>,
        [row, column, value]: [Numbers<'_>; 3],
        count: usize,
        echo: Option<&Ring>,
        stream: Stream,
    ) -> Result<Option<Reply>> {
        let blocks = blocks(count)?;
        let write = |echo: *mut i32| {
            self.launch_with_numbers(
                self.kernels.write_points,
                [blocks, 1],
                &[row, column, value],
                stream,
                |index| PointsParams {
                    table: table.address(),
                    rows: signed(table.rows()),
                    columns: signed(table.columns()),
                    row: index[0],
                    column: index[1],
                    value: index[2],
                    count: signed(count),
                    echo,
                    fault: self.fault.address(),
                },
            )
        };
        let bytes = bytes_of("an echo", &[count, 3], DType::I32)?;
        let reply = match echo {
            Some(ring) => ring.receive(bytes, stream, |range| write(range.address().as_ptr().cast()))?,
            None => None,
        };
        if reply.is_none() {
            write(ptr::null_mut())?;
        }
        Ok(reply)
    }

    /// Zeroes the written columns of rows of the table, in one launch on `stream`,
    /// which the caller has checked not to be captured.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for columns outside of the table, [`ErrorKind::Argument`] for more than can be
    /// transferred at once.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::Index`]: crate::base::ErrorKind::Index
    pub(super) fn zero_columns(
        &self,
        table: &Table<'_>,
        rows: &[RowExtent<RequestRow>],
        stream: Stream,
    ) -> Result<()> {
        let longest = rows.iter().map(|extent| extent.written).max();
        let Some(longest) = longest.filter(|longest| *longest > 0) else { return Ok(()) };
        if rows.iter().any(|extent| widen(extent.row.number()) >= table.rows())
            || widen(longest) > table.columns()
        {
            return Err(Error::index(format!("rows up to {longest} long are not all in the table")));
        }
        let mut indptr = try_with_capacity(rows.len() + 1)?;
        indptr.push(0);
        let mut total = 0i32;
        for extent in rows {
            // Only differences matter, so it may wrap.
            total = total.wrapping_add(extent.written.cast_signed());
            indptr.push(total);
        }
        let rows = try_collect(rows.iter().map(|extent| extent.row.number().cast_signed()))?;
        let grid = copy_grid(widen(longest), rows.len())?;
        self.launch_with_arrays(self.kernels.zero_columns, grid, &[&rows, &indptr], stream, |arrays| {
            Ok(ColumnsParams {
                table: table.address(),
                columns: signed(table.columns()),
                rows: arrays.address(0),
                indptr: arrays.address(1),
                count: signed(rows.len()),
            })
        })
    }

    /// Works like [`build_kv_indices`](super::table::build_kv_indices), in one launch.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for more numbers from the host than can be transferred at once; invalid numbers
    /// of device tensors are skipped, and `Executor::take_fault` reports them.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    pub(super) fn kv_indices(
        &self,
        table: &Table<'_>,
        [row, indptr]: [Numbers<'_>; 2],
        out: &BorrowedTensor<'_>,
        count: usize,
        stream: Stream,
    ) -> Result<()> {
        let capacity = out.shape().numel();
        let grid = copy_grid(table.columns().min(capacity), count)?;
        let (count, rows) = (units(count)?, units(table.rows())?);
        self.launch_with_numbers(self.kernels.kv_indices, grid, &[row, indptr], stream, |index| {
            KvIndicesParams {
                table: table.address(),
                out: out.address().as_ptr().cast(),
                columns: signed(table.columns()),
                capacity: signed(capacity),
                rows,
                count,
                fault: self.fault.address(),
                row: index[0],
                indptr: index[1],
            }
        })
    }

    /// Fills in the slots of `out`, those of a batch that grows, that continue the last page of a request:
    /// they follow its slot in `last_loc`. One launch on `stream`, which the caller has checked not to be
    /// captured, for every `MAX_GROWING` requests; their numbers are passed with it.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when a driver call fails. A last slot that does not end its request leaves the
    /// slots behind it as they are, and `Launcher::take_fault` reports it.
    ///
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    pub(crate) fn continue_pages(
        &self,
        out: &BorrowedTensor<'_>,
        last_loc: &BorrowedTensor<'_>,
        grown: &GrowingBatch<'_>,
        stream: Stream,
    ) -> Result<()> {
        let index = Index::new(&Numbers::Tensor(last_loc))?;
        let launched = grown.offsets.chunks(MAX_GROWING).enumerate().try_for_each(|(part, offsets)| {
            let first = part * MAX_GROWING;
            let indptr = &grown.indptr[first..=first + offsets.len()];
            let params = ContinueParams {
                out: out.address().as_ptr().cast(),
                last_loc: index,
                first: signed(first),
                count: signed(offsets.len()),
                slots: signed(grown.slots),
                fault: self.fault.address(),
                page_size: int32(grown.page_size),
                is_wide: i32::from(out.dtype() == DType::I64),
            };
            let grid = [blocks(offsets.len())?, 1];
            self.launch_with_list(self.kernels.continue_pages, grid, &[offsets, indptr], stream, params)
        });
        last_loc.record_stream(stream);
        launched
    }

    /// Fills `out` with the first slots of `runs`, at most [`MAX_RUNS`] of them, which are passed with the launch. The
    /// caller has checked that `stream` is not being captured.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when a driver call fails.
    ///
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    pub(crate) fn list_runs(
        &self,
        out: RegionRange<'_>,
        dtype: IndexDType,
        runs: &[Run<Slot>],
        stream: Stream,
    ) -> Result<()> {
        let count = out.bytes() / dtype.dtype().size();
        let mut next = 0;
        let begins = try_collect(runs.iter().map(|run| {
            next += run.len.cast_signed();
            next - run.len.cast_signed()
        }))?;
        let firsts = try_collect(runs.iter().map(|run| run.start.number().cast_signed()))?;
        let params = RunsParams {
            out: out.address().as_ptr().cast(),
            count: units(count)?,
            runs: units(runs.len())?,
            is_wide: i32::from(dtype == IndexDType::I64),
            unused: 0,
        };
        self.launch_with_list(
            self.kernels.list_runs,
            [blocks(count)?, 1],
            &[&begins, &firsts],
            stream,
            params,
        )
    }

    /// Launches a kernel on a grid of blocks. An empty grid is not launched.
    fn launch<P>(&self, kernel: TypedFunction<P>, grid: [u32; 2], params: &P, stream: Stream) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        // SAFETY: the kernel takes a `P`. Addresses are those of live regions of this device and of tensors
        // that the caller of the pool keeps alive in the order of `stream`; what a kernel reaches from them
        // was checked by the caller or is checked by the kernel.
        let launched = unsafe { self.gpu.launch(kernel.function(), grid, params, stream) };
        self.users.record(stream);
        launched
    }
}

/// Returns `rows` with -1 for each that occurs again later, so that only the last of its values is stored.
fn last_of_each(mut rows: Vec<i32>) -> Result<Vec<i32>> {
    let mut seen = HashSet::new();
    seen.try_reserve(rows.len()).map_err(|_| out_of_memory_error::<i32>(rows.len()))?;
    for row in rows.iter_mut().rev() {
        if !seen.insert(*row) {
            *row = -1;
        }
    }
    Ok(rows)
}

/// Returns the rows written and the rows read, if none of `moves` depends on another.
fn independent(moves: &[Move]) -> Result<Option<(Vec<i32>, Vec<i32>)>> {
    let mut pairs = (try_with_capacity(moves.len())?, try_with_capacity(moves.len())?);
    for step in moves {
        let Move::Copy { dst, src } = *step else { return Ok(None) };
        pairs.0.push(dst.cast_signed());
        pairs.1.push(src.cast_signed());
    }
    let mut written: HashSet<i32> = HashSet::new();
    written.try_reserve(moves.len()).map_err(|_| out_of_memory_error::<i32>(moves.len()))?;
    written.extend(pairs.0.iter().copied());
    Ok(pairs.1.iter().all(|row| !written.contains(row)).then_some(pairs))
}
