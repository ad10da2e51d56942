//! Copies between the pages of a pool and pieces of host memory.
//!
//! A piece holds one page: for the first layer the page's rows of the first kind, then those of the second,
//! then the next layer. Every function checks its pages and pieces, then acts. None takes a lock: the pages
//! belong to the caller.

use std::ops::Range;
use std::sync::Arc;

use crate::base::bounded::{signed, unsigned};
use crate::base::{
    ChunkId, DType, Device, Dims, Error, Id, Result, bytes_of, try_collect, try_with_capacity, widen,
};
use crate::layout::{PieceLayout, PlaneRuns};
use crate::memory::{BorrowedTensor, Fingerprint, Region, Stream};

use super::row_copy::{AHEAD, RowCopy};
use super::rows::{LayerRows, RowBuffer};
use super::staging::StagingArea;

/// A page of a pool, and the piece of host memory that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagePair<I> {
    /// The page: its number is that of its first row, divided by the rows of a page.
    pub page: I,
    /// The piece.
    pub piece: ChunkId,
}

/// The direction of a copy between pages and pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageCopy {
    /// Copies from pages to pieces.
    Out,
    /// Copies from pieces to pages.
    In,
}

/// The way in which a device reaches the host memory of pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostAccess {
    /// The device reaches it in place: all of it is page-locked.
    InPlace,
    /// The device reaches it through copies of the driver, which stages them where the memory is pageable.
    Copied,
}

/// Pieces of host memory for the pages of a pool, one behind the other.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{ChunkId, DType, Dims, Id, IndexVec, Page};
/// use kvpool::kernels::{
///     Executor, HostAccess, IndexSpace, IndexSpaces, LayerRows, PageCopy, PagePair, Pieces, PlaneRows,
///     read_indices,
/// };
/// use kvpool::memory::{Host, Region, Stream};
/// let region = Arc::new(Region::new(Arc::new(Host), 2 * 4 * 16).unwrap());
/// let plane = |offset| PlaneRows::new(offset, 1, 64, [4, 1, 16], DType::U8).unwrap();
/// let rows = LayerRows::new(&region, [plane(0), plane(64)]).unwrap();
/// let space = IndexSpace { noun: "row", len: 4 };
/// let executor = Executor::new(&region, 1, IndexSpaces::of_rows(space), 0).unwrap();
///
/// let stride = rows.piece(2).unwrap().bytes();
/// let memory = Arc::new(Region::new(Arc::new(Host), 3 * stride).unwrap());
/// let pieces = Pieces::new(memory, HostAccess::Copied, &rows, 2, stride, 3).unwrap();
/// executor.fill_rows(&rows, &[2..4], 7, Stream::DEFAULT).unwrap();
/// let pairs = [PagePair { page: Page::new(1), piece: ChunkId::new(2) }];
/// executor.copy_pages(&rows, &pieces, PageCopy::Out, &pairs, 0..1, Stream::DEFAULT).unwrap();
/// let one = Dims::of(&[1]).unwrap();
/// let first = pieces.region().borrow(2 * stride, DType::I32, one, one).unwrap();
/// assert_eq!(read_indices(&first).unwrap(), IndexVec::I32(vec![0x0707_0707]));
/// ```
#[derive(Clone, Debug)]
pub struct Pieces {
    region: Arc<Region>,
    reach: HostAccess,
    /// Bytes from one piece to the next.
    stride: usize,
    count: usize,
    /// The device of the pool, and its pages.
    device: Device,
    pages: usize,
    page_size: usize,
    layout: PieceLayout,
    /// Where the pages of each plane lie in the pieces.
    runs: [PlaneRuns; 2],
    /// The way by which pages come here from a device and go back, if not directly.
    staging: Option<PieceStaging>,
}

/// The way of pages between a device and their pieces, through staging areas.
#[derive(Clone, Debug)]
struct PieceStaging {
    out: Arc<StagingArea>,
    into: Arc<StagingArea>,
    /// The number of pieces in each part of the memory that one copy may reach.
    pieces_together: usize,
}

/// The least bytes in a row that a copy engine moves at the rate of the bus, 55 GB/s, while a kernel scatters those
/// before: rows of 32 KiB go at 48 then, and at 33 below 8 KiB (H200, 2026-11-27).
const LEAST_ROW: usize = 64 << 10;

/// The bytes of a copy beside which its beginning, 3 us, counts little.
const LONG_COPY: usize = 4 << 20;

/// The least bytes of a step of a load, and of each of its copies, that come through a staging area: less is over
/// before a kernel has waited for a copy, or its copies take more time than a kernel that reads from the host.
const LEAST_STEP: usize = 1 << 20;
const LEAST_COPY: usize = 1 << 20;

/// How the layers of a load come to their pages: see [`Pieces::begin_load`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadWay {
    /// The number of layers that one call copies.
    layers_at_once: usize,
    /// The stream of their copies to the staging area, if they come through it.
    filling: Option<Stream>,
}

impl LoadWay {
    /// Returns whether they come through a staging area: a part of the layers at a time.
    pub(crate) const fn is_staged(&self) -> bool {
        self.filling.is_some()
    }

    /// Returns the layers that the call for layer `layer` copies: none, if an earlier call has copied it.
    pub(crate) fn layers(&self, layer: usize, of: usize) -> Range<usize> {
        let end = if layer.is_multiple_of(self.layers_at_once) { layer + self.layers_at_once } else { layer };
        layer..end.min(of)
    }
}

impl Pieces {
    /// Returns the first `count` pieces of `region`, `stride` bytes apart, for pages of `page_size` of
    /// `rows`. Rows behind the last whole page belong to no page.
    ///
    /// Memory that the device of `rows` cannot reach in place is copied, whatever `reach` says.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for memory of a device or of the pool itself,
    /// for pageable memory that a device is to reach in place, for pieces that overlap and for more of them
    /// than int32 can name; [`ErrorKind::Index`](crate::base::ErrorKind::Index) when they are not within the
    /// region; [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails.
    pub fn new(
        region: Arc<Region>,
        reach: HostAccess,
        rows: &LayerRows,
        page_size: usize,
        stride: usize,
        count: usize,
    ) -> Result<Self> {
        if region.device() != Device::Cpu {
            return Err(Error::argument(format!("pieces are in host memory, not on {}", region.device())));
        }
        let pool = rows.all().first().map(RowBuffer::region);
        if pool.is_some_and(|pool| overlap(pool, &region)) {
            return Err(Error::argument("pieces lie in the memory of the pool that they are copied from"));
        }
        if i32::try_from(count).is_err() {
            return Err(Error::argument(format!("{count} pieces are more than int32 can name")));
        }
        let layout = rows.piece(page_size)?;
        let bytes = layout.bytes();
        bytes_of("the pieces", &[count.max(1), stride], DType::U8)?;
        if let Some(before) = count.checked_sub(1) {
            if before > 0 && stride < bytes {
                return Err(Error::argument(format!(
                    "pieces of {bytes} bytes overlap when they lie {stride} bytes apart"
                )));
            }
            let last = layout.range(stride, before, &(0..layout.layers()));
            region.at(last.start, bytes)?;
        }
        let reach = match (reach, pool.and_then(|pool| pool.gpu())) {
            (HostAccess::InPlace, Some(gpu)) => {
                if !region.backend().is_some_and(|backend| backend.is_device_accessible()) {
                    let text =
                        format!("{} bytes of pageable memory cannot be reached in place", region.bytes());
                    return Err(Error::argument(text));
                }
                if gpu.uses_host_pointers()? { HostAccess::InPlace } else { HostAccess::Copied }
            }
            (reach, _) => reach,
        };
        let runs = layout.planes(stride, count);
        let runs = [runs[0], runs[1]];
        let min_rows = rows.all().iter().map(|buffer| buffer.shape()[0]).min().unwrap_or(0);
        Ok(Self {
            region,
            reach,
            stride,
            count,
            device: pool.map_or(Device::Cpu, |pool| pool.device()),
            pages: min_rows / page_size,
            page_size,
            layout,
            runs,
            staging: None,
        })
    }

    /// Lets whole pages come from the device through `out`, if the device reaches the pieces in place and the area
    /// has room for one, and loads through `into`. No copy crosses a multiple of `pieces_together` pieces, at
    /// which another registration of page-locked memory may begin.
    #[must_use]
    pub fn staged(self, [out, into]: [&Arc<StagingArea>; 2], pieces_together: usize) -> Self {
        let is_useful = self.reach == HostAccess::InPlace && self.stride > 0;
        let [out, into] = [Arc::clone(out), Arc::clone(into)];
        Self { staging: is_useful.then_some(PieceStaging { out, into, pieces_together }), ..self }
    }

    /// Chooses how the layers of a load come to pages, on `stream`, whose current work they come after.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails.
    pub(crate) fn begin_load<I: Id>(&self, pairs: &[PagePair<I>], stream: Stream) -> Result<LoadWay> {
        let layer = self.layout.layer_bytes();
        let directly = LoadWay { layers_at_once: 1, filling: None };
        let Some(staging) = self.staging.as_ref().filter(|_| layer > 0) else { return Ok(directly) };
        let mut pieces = try_collect(pairs.iter().map(|pair| pair.piece.number().cast_signed()))?;
        pieces.sort_unstable();
        let copies = pieces.chunk_by(|before, next| staging.continues(*before, *next)).count();
        // Several layers make longer rows and longer copies, but those who wait for the first wait for all of them.
        let step = (pieces.len() * layer).max(1);
        let for_copies = (copies * LONG_COPY).div_ceil(step).min(staging.into.bytes() / step);
        let layers_at_once = LEAST_ROW.div_ceil(layer).max(for_copies).min(self.layout.layers());
        if layers_at_once * layer > staging.into.part_bytes()
            || layers_at_once * step < LEAST_STEP.max(copies * LEAST_COPY)
        {
            return Ok(directly);
        }
        let filling = staging.into.begin(stream)?;
        self.region.record_stream(filling);
        Ok(LoadWay { layers_at_once, filling: Some(filling) })
    }

    /// Returns the memory.
    #[must_use]
    pub const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the way in which the device of the pool reaches them.
    #[must_use]
    pub const fn reach(&self) -> HostAccess {
        self.reach
    }

    /// Returns the number of pieces.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of bytes from one piece to the next.
    #[must_use]
    pub const fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the bytes of the region that some layers of a piece occupy: a piece, for all of them.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a piece or layers that do not exist.
    pub fn bytes_of(&self, piece: u32, layers: &Range<usize>) -> Result<Range<usize>> {
        check_within("piece", piece, self.count)?;
        self.check_layers(layers)?;
        Ok(self.layout.range(self.stride, widen(piece), layers))
    }

    /// Returns the bytes of the region that a piece occupies. It must exist.
    pub(crate) fn piece(&self, piece: u32) -> Range<usize> {
        debug_assert!(widen(piece) < self.count);
        self.layout.range(self.stride, widen(piece), &(0..self.layout.layers()))
    }

    /// Returns the fingerprints of pieces, which must exist, each with its seed. The caller excludes copies to
    /// them.
    pub(crate) fn fingerprints(
        &self,
        seeded: impl ExactSizeIterator<Item = (ChunkId, u64)>,
    ) -> Vec<Fingerprint> {
        let ranges = seeded.map(|(piece, seed)| (self.piece(piece.number()), seed));
        Fingerprint::of_each(&self.region, ranges).expect("pieces lie in a region of host memory")
    }

    fn check_layers(&self, layers: &Range<usize>) -> Result<()> {
        if layers.start <= layers.end && layers.end <= self.layout.layers() {
            return Ok(());
        }
        Err(Error::index(format!("layers {layers:?} are outside [0, {})", self.layout.layers())))
    }

    /// Checks a copy of whole pages of `rows`, which are on `device`, and describes it. What comes in takes `way`.
    pub(super) fn plan<'a, I: Id>(
        &'a self,
        rows: &'a LayerRows,
        device: Device,
        direction: PageCopy,
        pairs: &[PagePair<I>],
        layers: &Range<usize>,
        way: Option<&LoadWay>,
    ) -> Result<PagePlan<'a>> {
        self.check_rows(rows, device)?;
        self.check_layers(layers)?;
        for pair in pairs {
            check_within("page", pair.page.number(), self.pages)?;
            check_within("piece", pair.piece.number(), self.count)?;
        }
        let mut indices = try_with_capacity(pairs.len())?;
        indices.extend(pairs.iter().map(|pair| {
            let [page, piece] = [pair.page.number(), pair.piece.number()].map(u32::cast_signed);
            match direction {
                PageCopy::Out => [page, piece],
                PageCopy::In => [piece, page],
            }
        }));
        match direction {
            PageCopy::Out => check_unique_targets("piece", &indices)?,
            PageCopy::In => check_unique_targets("page", &indices)?,
        }
        let of_pool = rows.runs().map(|runs| runs.in_pages(self.page_size).of_layers(layers));
        let kinds = [0, 1].map(|kind| {
            let piece = PageSide { region: &self.region, runs: self.runs[kind].of_layers(layers) };
            let buffer = rows.kinds()[kind].first();
            let page = buffer.map_or(piece, |first| PageSide { region: first.region(), runs: of_pool[kind] });
            let (source, target) = match direction {
                PageCopy::Out => (page, piece),
                PageCopy::In => (piece, page),
            };
            KindCopy { source, target, bytes: piece.runs.unit_bytes }
        });
        let staging = self.staging.as_ref().and_then(|staging| {
            let (area, filling) = match direction {
                PageCopy::Out if layers.len() == self.layout.layers() => (&staging.out, None),
                PageCopy::Out => return None,
                PageCopy::In => (&staging.into, Some(way?.filling?)),
            };
            let copied = self.layout.range(self.stride, 0, layers);
            let (offset, bytes) = (copied.start, copied.len());
            let staged = StagedCopy { pieces: self, staging, area, filling, offset, bytes };
            (1..=area.part_bytes()).contains(&staged.bytes).then_some(staged)
        });
        Ok(PagePlan { kinds, layers: layers.len(), indices, direction, staging })
    }

    /// Checks that `rows` have the layout of those that the pieces were made for.
    fn check_rows(&self, rows: &LayerRows, device: Device) -> Result<()> {
        let of_rows = rows.piece(self.page_size)?;
        if of_rows != self.layout {
            return Err(Error::argument(format!(
                "pieces for {} layers with pages of {:?} bytes do not fit {} layers with pages of {:?} bytes",
                self.layout.layers(),
                self.layout.plane_bytes(),
                of_rows.layers(),
                of_rows.plane_bytes()
            )));
        }
        for buffer in rows.all() {
            let at = buffer.region().device();
            if [self.device, at] != [device; 2] {
                return Err(Error::argument(format!(
                    "pages on {at} and pieces for a pool on {} do not fit a pool on {device}",
                    self.device
                )));
            }
            if buffer.shape()[0] / self.page_size < self.pages {
                let [rows, ..] = buffer.shape();
                return Err(Error::argument(format!("{rows} rows are fewer than {} pages", self.pages)));
            }
        }
        Ok(())
    }
}

/// Returns whether two regions have bytes in common.
fn overlap(one: &Region, other: &Region) -> bool {
    let [one, other] = [one, other].map(|region| {
        let start = region.address().as_ptr().addr();
        start..start + region.bytes()
    });
    one.start < other.end && other.start < one.end
}

fn check_within(noun: &str, index: u32, count: usize) -> Result<()> {
    if widen(index) < count {
        return Ok(());
    }
    Err(Error::index(format!("{noun} {index} is outside [0, {count})")).with_index(index))
}

/// Checks that no target appears twice, since its contents would be undefined.
fn check_unique_targets(noun: &str, indices: &[[i32; 2]]) -> Result<()> {
    let targets = || indices.iter().map(|[_, target]| *target);
    if first_not_above(targets()).is_none() {
        return Ok(());
    }
    let mut sorted = try_with_capacity(indices.len())?;
    sorted.extend(targets());
    sorted.sort_unstable();
    match first_not_above(sorted) {
        None => Ok(()),
        Some(twice) => {
            Err(Error::argument(format!("{noun} {twice} is written twice by one copy")).with_index(twice))
        }
    }
}

/// Returns the first number that is not above the one before it.
fn first_not_above(numbers: impl IntoIterator<Item = i32>) -> Option<i32> {
    let mut before = None;
    numbers.into_iter().find(|number| before.replace(*number).is_some_and(|before| before >= *number))
}

/// A copy of pages that was checked.
#[derive(Debug)]
pub(super) struct PagePlan<'a> {
    pub(super) kinds: [KindCopy<'a>; 2],
    pub(super) layers: usize,
    /// The number of each source and of its target.
    pub(super) indices: Vec<[i32; 2]>,
    pub(super) direction: PageCopy,
    /// The way of whole pages to pieces through a staging area, if they take it.
    pub(super) staging: Option<StagedCopy<'a>>,
}

impl PagePlan<'_> {
    /// Returns the bytes of the longest contiguous part of a page.
    pub(super) fn run_bytes(&self) -> usize {
        self.kinds.iter().map(|kind| kind.bytes).max().unwrap_or(0)
    }
}

impl PieceStaging {
    /// Returns whether one copy may reach this piece and the next.
    fn continues(&self, before: i32, next: i32) -> bool {
        before + 1 == next && !unsigned(next.into()).is_multiple_of(self.pieces_together)
    }
}

/// A copy of pages to pieces or back through a staging area, where the bytes of each piece that are copied lie one
/// behind the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct StagedCopy<'a> {
    pieces: &'a Pieces,
    staging: &'a PieceStaging,
    area: &'a StagingArea,
    /// The stream on which the area is filled, of a load that has begun.
    pub(super) filling: Option<Stream>,
    /// The place and the number of the bytes within a piece.
    offset: usize,
    bytes: usize,
}

impl<'a> StagedCopy<'a> {
    /// Returns the staging area.
    pub(super) const fn area(&self) -> &'a StagingArea {
        self.area
    }

    /// Returns the number of pieces in a part of the area.
    pub(super) const fn pieces_at_once(&self) -> usize {
        self.area.part_bytes() / self.bytes
    }

    /// Returns the copy of a kind between its pages and the area, where the pieces begin at byte `begin`.
    pub(super) fn within_device(
        self,
        kind: &KindCopy<'a>,
        direction: PageCopy,
        begin: usize,
    ) -> KindCopy<'a> {
        let in_area = |piece: PageSide<'a>| {
            let offset = begin + piece.runs.offset - self.offset;
            let runs = PlaneRuns { offset, unit_step: self.bytes, ..piece.runs };
            PageSide { region: self.area.region(), runs }
        };
        match direction {
            PageCopy::Out => KindCopy { target: in_area(kind.target), ..*kind },
            PageCopy::In => KindCopy { source: in_area(kind.source), ..*kind },
        }
    }

    /// Returns the parts of the copy over the bus, as rows of bytes in the area, where these pieces begin at byte
    /// `begin`, and in the pieces: each is as many pieces in a row as one copy may reach. They ascend.
    pub(super) fn over_bus<'b>(
        self,
        pieces: &'b [i32],
        begin: usize,
    ) -> impl Iterator<Item = Result<[BorrowedTensor<'a>; 2]>> + 'b
    where
        'a: 'b,
    {
        let mut at = 0;
        pieces.chunk_by(move |before, next| self.staging.continues(*before, *next)).map(move |run| {
            let Self { bytes, .. } = self;
            let (area, piece) = (begin + at * bytes, self.pieces.piece(run[0].cast_unsigned()));
            let host = piece.start + self.offset;
            at += run.len();
            let (count, stride) = (run.len(), self.pieces.stride);
            // Whole pieces without anything between them are one row.
            let shape = if bytes == stride { [1, count * bytes] } else { [count, bytes] };
            let rows = |region: &'a Region, begin: usize, apart: usize| {
                let strides = Dims::new(&[signed(if shape[0] == 1 { shape[1] } else { apart }), 1])?;
                region.borrow(begin, DType::U8, Dims::of(&shape)?, strides)
            };
            Ok([rows(self.area.region(), area, bytes)?, rows(&self.pieces.region, host, stride)?])
        })
    }
}

/// The copies of one kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct KindCopy<'a> {
    pub(super) source: PageSide<'a>,
    pub(super) target: PageSide<'a>,
    /// Bytes of a page in one layer.
    pub(super) bytes: usize,
}

/// The place of the pages of a kind, in the pool or in pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageSide<'a> {
    region: &'a Region,
    pub(super) runs: PlaneRuns,
}

impl PageSide<'_> {
    /// Returns the address of a page in a layer.
    pub(super) fn at(&self, layer: usize, index: i32) -> *mut u8 {
        self.region.address().as_ptr().wrapping_add(self.runs.at(layer, unsigned(index.into())))
    }

    /// Returns the first `bytes` of a page in some layers, as rows.
    pub(super) fn rows(&self, layers: Range<usize>, index: i32, bytes: usize) -> Result<BorrowedTensor<'_>> {
        // A single row may be farther from the next than a copy of rows takes.
        let step = if layers.len() == 1 { bytes } else { self.runs.layer_step };
        let shape = Dims::of(&[layers.len(), bytes])?;
        let strides = Dims::new(&[signed(step), 1])?;
        let offset = self.runs.at(layers.start, unsigned(index.into()));
        self.region.borrow(offset, DType::U8, shape, strides)
    }
}

/// Carries out a copy in host memory, on this thread.
pub(super) fn copy_pages(plan: &PagePlan<'_>) {
    let PagePlan { kinds, layers, indices, .. } = plan;
    let batch_bytes = indices.len() * layers * (kinds[0].bytes + kinds[1].bytes);
    let kinds = kinds.map(|kind| (kind, RowCopy::of_pages(kind.bytes, batch_bytes)));
    for (at, &[source, target]) in indices.iter().enumerate() {
        for layer in 0..*layers {
            // Two kinds a layer.
            let ahead = layer + AHEAD / 2;
            let (later, later_layer) =
                (indices[(at + ahead / layers).min(indices.len() - 1)][0], ahead % layers);
            for (kind, copy) in kinds.iter().filter(|(kind, _)| kind.bytes > 0) {
                let later = kind.source.at(later_layer, later);
                // SAFETY: the plan was checked: source and target lie in live regions that do not overlap.
                unsafe { copy.copy(kind.source.at(layer, source), kind.target.at(layer, target), later) };
            }
        }
    }
    for (_, copy) in kinds {
        copy.finish();
    }
}
