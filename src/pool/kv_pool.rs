//! K and V of every layer, in one region.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::base::{DType, Device, Error, Id, Page, Result, Slot, bytes_of, try_collect, widen};
use crate::kernels::{
    BufferInfo, Executor, IndexSpace, IndexSpaces, Indices, LayerRows, LoadWay, PageCopy, PagePair, Pieces,
    PlaneRows, RowBuffer, StoreRows,
};
use crate::layout::{CacheLayout, Group, GroupKind, GroupPlacement, Plane, PlaneOrder};
use crate::memory::{
    ALIGNMENT, Backend, BorrowedTensor, Event, Gpu, Region, Stream, page_lock, page_lock_steps,
    system_page_size,
};
use crate::tensor::TensorView;

use super::contract::{Pool, Stats};
use super::{Footprint, at_least_one, fits_int32, row_ring_bytes};

/// Rows of a buffer are rounded up to a multiple of this.
const ROW_MULTIPLE: usize = 8;

/// The order in which the buffers of a [`KvPool`] lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvLayout {
    /// Keys of every layer, then values of every layer.
    #[default]
    Split,
    /// Keys and values of the first layer, then those of the next. Values begin a whole number of pages
    /// behind the keys of their layer, for kernels that reach both from one address. Rows of keys and of
    /// values have the same shape.
    Fused,
}

/// The shape of a [`KvPool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvConfig {
    /// Usable slots, numbered `1..=size`.
    pub size: usize,
    /// Number of layers.
    pub layer_num: usize,
    /// Heads of a key row.
    pub k_head_num: usize,
    /// Elements of a key head.
    pub k_head_dim: usize,
    /// Heads of a value row.
    pub v_head_num: usize,
    /// Elements of a value head.
    pub v_head_dim: usize,
    /// Element type.
    pub dtype: DType,
    /// Slots per page of the allocator that goes with the pool.
    pub page_size: usize,
    /// The order in which the buffers lie.
    pub layout: KvLayout,
    /// Whether to page-lock host memory if there is a driver. Needs a backend such as [`MappedHost`].
    ///
    /// [`MappedHost`]: crate::memory::MappedHost
    pub pin_memory: bool,
}

impl KvConfig {
    /// Returns the number of rows of every buffer, enough for every slot of a paged allocator of `size`.
    fn rows(&self) -> Result<usize> {
        let end =
            self.size.checked_add(self.page_size).and_then(|end| end.checked_next_multiple_of(ROW_MULTIPLE));
        let what = format!("size {} with page_size {}", self.size, self.page_size);
        fits_int32(&what, end).map(widen)
    }

    /// Returns what the pool keeps: a full group of layers with the planes `k` and `v`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for sizes of 0 and for rows whose bytes overflow.
    pub fn cache_layout(&self) -> Result<CacheLayout> {
        CacheLayout::new("", self.page_size, vec![self.group()?])
    }

    fn group(&self) -> Result<Group> {
        let planes = vec![
            Plane::new("k", self.dtype, &[self.k_head_num, self.k_head_dim])?,
            Plane::new("v", self.dtype, &[self.v_head_num, self.v_head_dim])?,
        ];
        let token = planes.iter().map(Plane::entry_bytes).fold(0, usize::saturating_add);
        bytes_of("all layers", &[token, self.layer_num], DType::U8)?;
        let layers = try_collect(0..self.layer_num)?;
        Group::new("full", GroupKind::Full, &layers, planes)
    }

    /// Returns where the rows of K and of V lie, each buffer at a multiple of `alignment`, and the bytes of all.
    fn place(&self, alignment: usize) -> Result<([PlaneRows; 2], usize)> {
        let (group, page_size) = (self.group()?, self.page_size);
        let [k, v] = [[self.k_head_num, self.k_head_dim], [self.v_head_num, self.v_head_dim]];
        if self.layout == KvLayout::Fused && k != v {
            let text = format!(
                "fused buffers have rows of one shape, but those of keys are {k:?} and those of values {v:?}"
            );
            return Err(Error::config(text));
        }
        let order = match self.layout {
            KvLayout::Split => PlaneOrder::PlaneByPlane { plane: alignment, layer: alignment },
            KvLayout::Fused => PlaneOrder::LayerByLayer { page_size, alignment },
        };
        let placement = GroupPlacement::new(&group, self.rows()?, order)?;
        let rows = |plane: usize, row| PlaneRows { runs: placement.planes()[plane], row, dtype: self.dtype };
        Ok(([rows(0, k), rows(1, v)], placement.end()))
    }

    /// Returns the bytes of a pool on `device`, without page-locking.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for slots that do not fit int32 and for sizes
    /// whose bytes overflow.
    pub fn footprint(&self, device: Device) -> Result<Footprint> {
        let (_, bytes) = self.place(ALIGNMENT)?;
        Footprint::new(device, bytes, row_ring_bytes(self.rows()?))
    }
}

/// Divisors of keys and values before conversion to an 8-bit float.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scales {
    /// Divisor of keys.
    pub k: Option<f32>,
    /// Divisor of values.
    pub v: Option<f32>,
}

/// K and V storage of every layer: `[rows, head_num, head_dim]` each, zero at first.
///
/// Row 0 is the padding slot. All buffers lie in one region as [`KvLayout`] says, each at a multiple of
/// [`ALIGNMENT`] bytes, in page-locked memory of [`system_page_size`] bytes. Calls that work on the rows of
/// one layer lock that layer only.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::DType;
/// use kvpool::memory::{Backend, Host};
/// use kvpool::pool::{KvConfig, KvLayout, KvPool};
/// let config = KvConfig {
///     size: 64, layer_num: 2, k_head_num: 4, k_head_dim: 8, v_head_num: 4, v_head_dim: 8,
///     dtype: DType::BF16, page_size: 16,
///     layout: KvLayout::Split, pin_memory: false,
/// };
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let pool = KvPool::new(&config, &host).unwrap();
/// assert_eq!(pool.rows(), 80);
/// assert_eq!(pool.mem_bytes(), 2 * 2 * 80 * 4 * 8 * 2);
/// ```
pub struct KvPool {
    config: KvConfig,
    layout: CacheLayout,
    slots: IndexSpace,
    /// Keys and values.
    rows: LayerRows,
    region: Arc<Region>,
    executor: Executor,
}

impl fmt::Debug for KvPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvPool")
            .field("size", &self.config.size)
            .field("layer_num", &self.config.layer_num)
            .field("k", &[self.config.k_head_num, self.config.k_head_dim])
            .field("v", &[self.config.v_head_num, self.config.v_head_dim])
            .field("device", &self.region.device())
            .field("dtype", &self.config.dtype)
            .field("page_size", &self.config.page_size)
            .finish_non_exhaustive()
    }
}

impl KvPool {
    /// Allocates the buffers from `backend`.
    ///
    /// Page-locks memory in steps of whole buffers, small ones together: a copy must not cross from one step
    /// into the next.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for an argument of 0, for slots that do not fit
    /// int32 and for sizes whose bytes overflow; the error of the backend if it runs out of memory or a step
    /// cannot be page-locked.
    pub fn new(config: &KvConfig, backend: &Arc<dyn Backend>) -> Result<Self> {
        at_least_one(&[
            ("size", config.size),
            ("layer_num", config.layer_num),
            ("k_head_num", config.k_head_num),
            ("k_head_dim", config.k_head_dim),
            ("v_head_num", config.v_head_num),
            ("v_head_dim", config.v_head_dim),
            ("page_size", config.page_size),
        ])?;
        let wants_page_locking = config.pin_memory && backend.device() == Device::Cpu;
        let page_lock_gpu = wants_page_locking.then(|| Gpu::any().ok()).flatten();
        // Buffers that are page-locked separately must not share a page.
        let alignment = if page_lock_gpu.is_some() { system_page_size() } else { ALIGNMENT };
        let slots = IndexSpace { noun: "slot", len: config.rows()? };
        let (planes, total) = config.place(alignment)?;
        let region = Arc::new(Region::new(Arc::clone(backend), total)?);
        let executor =
            Executor::new(&region, config.layer_num, IndexSpaces::of_rows(slots), row_ring_bytes(slots.len))?;
        let rows = LayerRows::new(&region, planes)?;
        if let Some(gpu) = page_lock_gpu {
            let mut ends: Vec<_> = rows.all().iter().map(RowBuffer::offset).chain([total]).collect();
            ends.sort_unstable();
            page_lock(&gpu, &region, &page_lock_steps(ends.into_iter().skip(1)))?;
        }
        Ok(Self { config: *config, layout: config.cache_layout()?, slots, rows, region, executor })
    }

    /// Returns what the pool keeps.
    #[must_use]
    pub const fn cache_layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Returns the config of the pool.
    #[must_use]
    pub const fn config(&self) -> &KvConfig {
        &self.config
    }

    /// Returns the device of the buffers.
    #[must_use]
    pub fn device(&self) -> Device {
        self.region.device()
    }

    /// Rows of every buffer.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.slots.len
    }

    /// Returns the number of bytes of all buffers.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.rows.bytes()
    }

    /// Returns the device of the buffers, or `None` on the host.
    pub(super) const fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.executor.gpu()
    }

    /// Returns the rows of pages, and how many a page has, for pieces of them.
    pub(super) const fn pages(&self) -> (&LayerRows, usize) {
        (&self.rows, self.config.page_size)
    }

    /// Copies layers of pages to their pieces, or back: see [`Executor::copy_pages`].
    pub(super) fn copy_pieces(
        &self,
        pieces: &Pieces,
        direction: PageCopy,
        pairs: &[PagePair<Page>],
        layers: Range<usize>,
        stream: Stream,
    ) -> Result<()> {
        self.executor.copy_pages(&self.rows, pieces, direction, pairs, layers, stream)
    }

    /// Copies layers of a load to their pages: see `Executor::load_pages`.
    pub(super) fn load_pieces(
        &self,
        pieces: &Pieces,
        pairs: &[PagePair<Page>],
        layers: &Range<usize>,
        way: &LoadWay,
        stream: Stream,
    ) -> Result<()> {
        self.executor.load_pages(&self.rows, pieces, pairs, layers, way, stream)
    }

    /// Returns the number of bytes of K and V of one token in one layer.
    #[must_use]
    pub fn token_bytes(&self) -> usize {
        self.rows.kinds().iter().map(|buffers| buffers[0].row_bytes()).sum()
    }

    /// Returns the K and V buffers of a layer, `[rows, head_num, head_dim]`, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a layer that does not exist.
    pub fn kv_buffer(&self, layer: usize) -> Result<[TensorView; 2]> {
        let [k, v] = self.rows.layer(layer)?;
        Ok([view(k, &k.shape())?, view(v, &v.shape())?])
    }

    /// Returns the K and V buffers of a layer, `[num_pages, page_size, head_num, head_dim]`, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a layer that does not exist.
    pub fn page_view(&self, layer: usize) -> Result<[TensorView; 2]> {
        let page_size = self.config.page_size;
        let paged = |buffer: &RowBuffer| {
            let [rows, heads, dim] = buffer.shape();
            view(buffer, &[rows / page_size, page_size, heads, dim])
        };
        let [k, v] = self.rows.layer(layer)?;
        Ok([paged(k)?, paged(v)?])
    }

    /// Writes `k` and `v` to the rows that `indices` lists; negative indices are skipped.
    ///
    /// On a GPU it is one launch on `stream`, which checks the indices in device memory: see
    /// [`KvPool::take_fault`].
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for shapes or scales that do not fit,
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) for dtypes that cannot be converted,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a layer or row that does not exist. Nothing is
    /// written. See [`KvPool::take_fault`].
    pub fn set_kv<'a>(
        &'a self,
        layer: usize,
        indices: &Indices<'_>,
        [k, v]: [BorrowedTensor<'a>; 2],
        scales: Scales,
        stream: Stream,
    ) -> Result<()> {
        let [k_buffer, v_buffer] = self.rows.layer(layer)?;
        let (k_scale, v_scale) = (self.divisor("k", scales.k)?, self.divisor("v", scales.v)?);
        let stores = [
            StoreRows { name: "k", target: k_buffer, values: k, scale: k_scale },
            StoreRows { name: "v", target: v_buffer, values: v, scale: v_scale },
        ];
        self.executor.store_rows(layer, &stores, indices, stream)
    }

    /// Returns an event to wait for before `numbers` numbers are sent to the device, if it is
    /// far behind.
    #[must_use]
    pub fn backpressure_event(&self, numbers: usize) -> Option<Arc<Event>> {
        self.executor.backpressure_event(numbers)
    }

    /// Reports, once, an invalid index on the device of an earlier call. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a row that does not exist: it was skipped.
    pub fn take_fault(&self) -> Result<()> {
        self.executor.take_fault()
    }

    /// Works like [`KvPool::take_fault`], after waiting for every call on `stream` so far.
    ///
    /// # Errors
    /// See [`KvPool::take_fault`], and [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the device
    /// has failed.
    pub fn check(&self, stream: Stream) -> Result<()> {
        self.executor.synchronize(stream)?;
        self.take_fault()
    }

    /// Returns a scale that may divide values of this pool.
    fn divisor(&self, name: &str, scale: Option<f32>) -> Result<Option<f32>> {
        let dtype = self.config.dtype;
        match scale {
            Some(scale) if !(scale.is_finite() && scale > 0.0) => {
                Err(Error::argument(format!("{name}_scale is {scale}; it must be finite and above 0")))
            }
            Some(scale) if !dtype.is_fp8() && (scale - 1.0).abs() > 0.0 => Err(Error::argument(format!(
                "{name}_scale is {scale}, but values of {dtype} are stored unscaled; only 8-bit floats are scaled"
            ))),
            scale => Ok(scale),
        }
    }

    /// Copies the rows that `indices` lists to new contiguous tensors `[n, head_num, head_dim]` in host
    /// memory.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a layer or row that does not exist,
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when there is not enough memory,
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) on a GPU, where results are not allocated: use
    /// [`KvPool::gather_kv_into`].
    pub fn gather_kv(&self, layer: usize, indices: &Indices<'_>) -> Result<[TensorView; 2]> {
        let [k, v] = self.rows.layer(layer)?;
        if self.executor.gpu().is_some() {
            return Err(Error::argument("rows on a GPU are gathered into tensors of the caller: pass out"));
        }
        let target = |buffer: &RowBuffer| {
            let [_, heads, dim] = buffer.shape();
            let shape = [indices.len(), heads, dim];
            let region = Arc::new(Region::scratch(bytes_of("gathered rows", &shape, buffer.dtype())?)?);
            TensorView::contiguous(region, 0, buffer.dtype(), &shape)
        };
        let out = [target(k)?, target(v)?];
        let pairs = [(k, out[0].borrow()), (v, out[1].borrow())];
        self.executor.gather_rows(layer, &pairs, indices, Stream::DEFAULT)?;
        Ok(out)
    }

    /// Copies the rows that `indices` lists to `out`: contiguous K and V of the pool's dtype, on its device.
    ///
    /// # Errors
    /// See [`KvPool::gather_kv`], and [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) or
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when `out` does not fit. Nothing is written. The row
    /// of an invalid index on a GPU is zeroed, and [`KvPool::take_fault`] reports it.
    pub fn gather_kv_into(
        &self,
        layer: usize,
        indices: &Indices<'_>,
        out: &[BorrowedTensor<'_>; 2],
        stream: Stream,
    ) -> Result<()> {
        let [k, v] = self.rows.layer(layer)?;
        self.executor.gather_rows(layer, &[(k, out[0]), (v, out[1])], indices, stream)
    }

    /// Moves row `src[i]` to row `dst[i]` in every layer, as if all were read before any is written.
    ///
    /// On a GPU it is one launch on `stream`. With index tensors there, the contents of a row that is both
    /// read and written, or written twice, are undefined.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for different lengths,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for rows that do not exist. Nothing is moved.
    pub fn move_kv(&self, dst: &Indices<'_>, src: &Indices<'_>, stream: Stream) -> Result<()> {
        self.executor.copy_rows(&self.rows, dst, src, stream)
    }

    /// Fills rows of all layers with a pattern that is visible when read: NaN in floats, -1 in int8, 255 in
    /// uint8. Ignores rows beyond the last.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails, and while `stream` is
    /// captured.
    pub fn poison(&self, rows: &[Range<usize>], stream: Stream) -> Result<()> {
        const POISON: u8 = 0xff;
        if !rows.is_empty() {
            self.executor.check_not_capturing(stream, "poison over freed rows")?;
        }
        self.executor.fill_rows(&self.rows, rows, POISON, stream)
    }

    /// Returns every buffer, keys of all layers first.
    pub fn buffer_infos(&self) -> impl Iterator<Item = BufferInfo> {
        self.rows.all().iter().map(RowBuffer::info)
    }
}

impl Pool for KvPool {
    fn unit(&self) -> &'static str {
        Slot::NOUN
    }

    fn hands_out(&self) -> bool {
        false
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn stats(&self) -> Stats {
        Stats::from([
            ("capacity", self.config().size),
            ("rows", self.rows()),
            ("layer_num", self.config().layer_num),
            ("page_size", self.config().page_size),
            ("bytes", self.mem_bytes()),
        ])
    }
}

fn view(buffer: &RowBuffer, shape: &[usize]) -> Result<TensorView> {
    TensorView::contiguous(Arc::clone(buffer.region()), buffer.offset(), buffer.dtype(), shape)
}
