//! K and V of every layer, in one region.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::base::{DType, Device, Error, Result, bytes_of};
use crate::kernels::{Indices, Launcher, RowBuffer, Store, gather_rows, move_rows, store_rows};
use crate::memory::{
    ALIGNMENT, Backend, Borrowed, Event, Gpu, Host, Mapped, PAGE, PAGE_LOCK_STEP, Region, Stream,
};
use crate::tensor::TensorView;

use super::copies::{host_copies, with_copies};
use super::{at_least_one, fits_int32};

/// Rows of a buffer are rounded up to a multiple of this.
const ROW_MULTIPLE: usize = 8;

/// The shape of a [`KvPool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvConfig {
    /// Usable slots, numbered `1..=size`.
    pub size: usize,
    /// Layers.
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
    /// Slots in a page of the allocator that goes with it.
    pub page_size: usize,
}

impl KvConfig {
    /// Rows of every buffer: enough for each index that a paged allocator of `size` can return.
    fn rows(&self) -> Result<usize> {
        let end =
            self.size.checked_add(self.page_size).and_then(|end| end.checked_next_multiple_of(ROW_MULTIPLE));
        let what = format!("size {} with page_size {}", self.size, self.page_size);
        fits_int32(&what, end).map(crate::base::widen)
    }
}

/// Divisors of keys and values on their way into an 8-bit float pool.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scales {
    /// Of keys.
    pub k: Option<f32>,
    /// Of values.
    pub v: Option<f32>,
}

/// One buffer, as transfer engines register it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferInfo {
    /// Where it begins.
    pub address: usize,
    /// How long it is.
    pub bytes: usize,
    /// Bytes of one row.
    pub row_bytes: usize,
}

/// K and V storage of every layer: `[rows, head_num, head_dim]` each, zero at first.
///
/// Row 0 is the padding slot. All buffers lie in one region, keys of every layer first, each at a multiple of
/// [`ALIGNMENT`] bytes, in page-locked memory of [`PAGE`] bytes.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::DType;
/// use kvpool::memory::Host;
/// use kvpool::pool::{KvConfig, KvPool};
/// let config = KvConfig {
///     size: 64, layer_num: 2, k_head_num: 4, k_head_dim: 8, v_head_num: 4, v_head_dim: 8,
///     dtype: DType::BF16, page_size: 16,
/// };
/// let pool = KvPool::new(Arc::new(Host), config).unwrap();
/// assert_eq!(pool.rows(), 80);
/// assert_eq!(pool.mem_bytes(), 2 * 2 * 80 * 4 * 8 * 2);
/// ```
#[derive(Debug)]
pub struct KvPool {
    config: KvConfig,
    rows: usize,
    region: Arc<Region>,
    /// Keys of every layer, then values of every layer.
    buffers: Vec<RowBuffer>,
    /// One for each layer, held while its rows are read or written, so that calls of several threads do not mix.
    /// Who needs several takes them in order.
    layers: Vec<RwLock<()>>,
    /// How it works on a GPU, where the order of a stream takes the place of the locks.
    launcher: Option<Launcher>,
}

impl KvPool {
    /// Allocates the buffers from `backend`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for an argument of 0, for slots that do not fit int32
    /// and for sizes whose bytes overflow; what the backend says when it has not enough.
    pub fn new(backend: Arc<dyn Backend>, config: KvConfig) -> Result<Self> {
        Self::aligned(backend, config, ALIGNMENT)
    }

    /// As [`KvPool::new`], every buffer at a multiple of `alignment` bytes.
    fn aligned(backend: Arc<dyn Backend>, config: KvConfig, alignment: usize) -> Result<Self> {
        at_least_one(&[
            ("size", config.size),
            ("layer_num", config.layer_num),
            ("k_head_num", config.k_head_num),
            ("k_head_dim", config.k_head_dim),
            ("v_head_num", config.v_head_num),
            ("v_head_dim", config.v_head_dim),
            ("page_size", config.page_size),
        ])?;
        let rows = config.rows()?;
        let shapes = [[config.k_head_num, config.k_head_dim], [config.v_head_num, config.v_head_dim]];
        let mut total = 0usize;
        let mut places = Vec::new();
        for [heads, dim] in shapes {
            let bytes = bytes_of("one buffer", &[rows, heads, dim], config.dtype)?;
            let step = bytes.next_multiple_of(alignment);
            let group = bytes_of("all layers", &[step, config.layer_num], DType::U8)?;
            places.push((total, step, [rows, heads, dim]));
            total = total.checked_add(group).filter(|&sum| i64::try_from(sum).is_ok()).ok_or_else(|| {
                Error::config(format!("{} layers of {bytes} bytes overflow an address", config.layer_num))
            })?;
        }
        let region = Arc::new(Region::new(backend, total)?);
        let launcher = super::launcher_for(&region, rows)?;
        let buffers = places
            .into_iter()
            .flat_map(|(start, step, shape)| {
                (0..config.layer_num).map(move |layer| (start + layer * step, shape))
            })
            .map(|(offset, shape)| RowBuffer::new(Arc::clone(&region), offset, shape, config.dtype))
            .collect::<Result<Vec<_>>>()?;
        let layers = (0..config.layer_num).map(|_| RwLock::new(())).collect();
        Ok(Self { config, rows, region, buffers, layers, launcher })
    }

    /// As [`KvPool::new`], in host memory that devices reach directly: page-locked where there is a driver, pageable where
    /// there is none.
    ///
    /// It is page-locked in parts of whole buffers, small ones together: a copy must not reach from one buffer into the next.
    ///
    /// # Errors
    /// As [`KvPool::new`]; what the driver says when it cannot page-lock a part.
    pub fn page_locked(config: KvConfig) -> Result<Self> {
        let Ok(gpu) = Gpu::any() else { return Self::new(Arc::new(Host), config) };
        let mapped = Arc::new(Mapped::default());
        // No two buffers share a page, so that each can be page-locked by itself.
        let pool = Self::aligned(Arc::clone(&mapped) as _, config, PAGE)?;
        pool.parts().iter().try_for_each(|part| mapped.lock_pages(&gpu, &pool.region, part))?;
        Ok(pool)
    }

    /// The bytes of whole buffers that are page-locked at once.
    fn parts(&self) -> Vec<Range<usize>> {
        let ends = self.buffers.iter().skip(1).map(RowBuffer::offset).chain([self.region.bytes()]);
        let mut parts: Vec<Range<usize>> = Vec::new();
        for (buffer, end) in self.buffers.iter().zip(ends) {
            match parts.last_mut() {
                Some(part) if end - part.start <= PAGE_LOCK_STEP => part.end = end,
                _ => parts.push(buffer.offset()..end),
            }
        }
        parts
    }

    /// Its shape.
    #[must_use]
    pub const fn config(&self) -> &KvConfig {
        &self.config
    }

    /// Where it is.
    #[must_use]
    pub fn device(&self) -> Device {
        self.region.device()
    }

    /// Rows of every buffer.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes of all buffers.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.buffers.iter().map(RowBuffer::bytes).sum()
    }

    /// Bytes of K and V of one token in one layer.
    #[must_use]
    pub fn token_bytes(&self) -> usize {
        self.buffers[0].row_bytes() + self.buffers[self.config.layer_num].row_bytes()
    }

    // The locks guard no value that a panic could leave half changed, so poison is ignored.
    fn writing(&self, layer: usize) -> RwLockWriteGuard<'_, ()> {
        self.layers[layer].write().unwrap_or_else(PoisonError::into_inner)
    }

    fn reading(&self, layer: usize) -> RwLockReadGuard<'_, ()> {
        self.layers[layer].read().unwrap_or_else(PoisonError::into_inner)
    }

    /// K and V of a layer.
    fn pair(&self, layer: usize) -> Result<[&RowBuffer; 2]> {
        super::check_layer(layer, self.config.layer_num)?;
        Ok([&self.buffers[layer], &self.buffers[self.config.layer_num + layer]])
    }

    /// The K and V buffers of a layer, `[rows, head_num, head_dim]`, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a layer that is not there.
    pub fn kv_buffer(&self, layer: usize) -> Result<[TensorView; 2]> {
        let [k, v] = self.pair(layer)?;
        Ok([view(k, &k.shape())?, view(v, &v.shape())?])
    }

    /// The K and V buffers of a layer, `[num_pages, page_size, head_num, head_dim]`, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a layer that is not there.
    pub fn page_view(&self, layer: usize) -> Result<[TensorView; 2]> {
        let page_size = self.config.page_size;
        let paged = |buffer: &RowBuffer| {
            let [rows, heads, dim] = buffer.shape();
            view(buffer, &[rows / page_size, page_size, heads, dim])
        };
        let [k, v] = self.pair(layer)?;
        Ok([paged(k)?, paged(v)?])
    }

    /// Writes `k` and `v` to the rows that `indices` names; negative indices are skipped.
    ///
    /// On a GPU it is one launch on `stream`, and indices there are checked there: see [`KvPool::fault`].
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for shapes or scales that do not fit,
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) for dtypes that cannot be converted,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a layer or row that is not there. Nothing is
    /// written then. As [`KvPool::fault`].
    pub fn set_kv<'a>(
        &'a self,
        layer: usize,
        indices: &Indices<'_>,
        [k, v]: [Borrowed<'a>; 2],
        scales: Scales,
        stream: Stream,
    ) -> Result<()> {
        let [k_buffer, v_buffer] = self.pair(layer)?;
        let (k_scale, v_scale) = (self.divisor("k", scales.k)?, self.divisor("v", scales.v)?);
        let stores = [
            Store { name: "k", target: k_buffer, values: k, scale: k_scale },
            Store { name: "v", target: v_buffer, values: v, scale: v_scale },
        ];
        if let Some(launcher) = &self.launcher {
            self.expect_here(&[indices], stream)?;
            self.fault()?;
            for values in [k, v] {
                values.used_on(stream);
            }
            return launcher.store_rows(&stores, indices, stream);
        }
        let indices = indices.on_host()?;
        let _alone = self.writing(layer);
        store_rows(&stores, indices)
    }

    /// A point to wait for, without locks, before more numbers of the host are sent to the device: it is far behind.
    #[must_use]
    pub fn crowded(&self) -> Option<Arc<Event>> {
        self.launcher.as_ref()?.crowded()
    }

    /// Tells what is wrong with indices that an earlier call was given on the device, once. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a row that is not there: it was left out.
    pub fn fault(&self) -> Result<()> {
        self.launcher.as_ref().map_or(Ok(()), |launcher| launcher.fault(["slot"; 2], [self.rows; 2]))
    }

    /// As [`KvPool::fault`], for every call on `stream` so far: waits for them.
    ///
    /// # Errors
    /// As [`KvPool::fault`], and [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the device has failed.
    pub fn check(&self, stream: Stream) -> Result<()> {
        self.launcher.as_ref().map_or(Ok(()), |launcher| launcher.gpu().synchronize(stream))?;
        self.fault()
    }

    /// Checks that index tensors are in host memory or where the pool is, for work on `stream`.
    fn expect_here(&self, indices: &[&Indices<'_>], stream: Stream) -> Result<()> {
        super::expect_here(self.device(), indices, stream)
    }

    /// A scale that may divide values of this pool.
    fn divisor(&self, name: &str, scale: Option<f32>) -> Result<Option<f32>> {
        let dtype = self.config.dtype;
        match scale {
            Some(scale) if !(scale.is_finite() && scale > 0.0) => {
                Err(Error::config(format!("{name}_scale is {scale}; it must be finite and above 0")))
            }
            Some(scale) if !dtype.is_fp8() && (scale - 1.0).abs() > 0.0 => Err(Error::config(format!(
                "{name}_scale is {scale}, but values of {dtype} are stored unscaled; only 8-bit floats are scaled"
            ))),
            scale => Ok(scale),
        }
    }

    /// The rows that `indices` names as new contiguous tensors `[n, head_num, head_dim]` in host memory.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a layer or row that is not there,
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when there is no memory for them,
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) on a GPU, whose memory is not allocated for an answer.
    pub fn gather_kv(&self, layer: usize, indices: &Indices<'_>) -> Result<[TensorView; 2]> {
        let [k, v] = self.pair(layer)?;
        if self.launcher.is_some() {
            return Err(Error::config(
                "rows on a GPU are gathered into tensors that the caller has: pass out",
            ));
        }
        let rows = indices.on_host()?.rows("slot", self.rows)?;
        let target = |buffer: &RowBuffer| {
            let [_, heads, dim] = buffer.shape();
            let bytes = bytes_of("gathered rows", &[rows.len(), heads, dim], buffer.dtype())?;
            let region = Arc::new(Region::scratch(bytes)?);
            TensorView::contiguous(region, 0, buffer.dtype(), &[rows.len(), heads, dim])
        };
        let out = [target(k)?, target(v)?];
        let _shared = self.reading(layer);
        gather_rows(&[(k, out[0].borrow()?), (v, out[1].borrow()?)], &rows)?;
        Ok(out)
    }

    /// The rows that `indices` names, written to `out`: contiguous K and V of the pool's dtype, where the pool is.
    ///
    /// # Errors
    /// As [`KvPool::gather_kv`], and [`ErrorKind::Config`](crate::base::ErrorKind::Config) or
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when `out` does not fit. Nothing is written then. On a GPU
    /// the row of an index there that names none is zeroed, and [`KvPool::fault`] tells it.
    pub fn gather_kv_into(
        &self,
        layer: usize,
        indices: &Indices<'_>,
        out: &[Borrowed<'_>; 2],
        stream: Stream,
    ) -> Result<()> {
        let [k, v] = self.pair(layer)?;
        let pairs = [(k, out[0]), (v, out[1])];
        if let Some(launcher) = &self.launcher {
            self.expect_here(&[indices], stream)?;
            self.fault()?;
            for out in out {
                out.used_on(stream);
            }
            return launcher.gather_rows(&pairs, indices, stream);
        }
        let rows = indices.on_host()?.rows("slot", self.rows)?;
        let _shared = self.reading(layer);
        gather_rows(&pairs, &rows)
    }

    /// Moves row `src[i]` to row `dst[i]` in every layer, as if all were read before any is written.
    ///
    /// On a GPU it is one launch on `stream`. Of index tensors there, no row may be both read and written, or written
    /// twice: what it holds then is not defined.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for different lengths,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for rows that are not there. Nothing is moved then.
    pub fn move_kv(&self, dst: &Indices<'_>, src: &Indices<'_>, stream: Stream) -> Result<()> {
        if let Some(launcher) = &self.launcher {
            self.expect_here(&[dst, src], stream)?;
            self.fault()?;
            let (k, v) = self.buffers.split_at(self.config.layer_num);
            return with_copies(dst, src, "slot", self.rows, |plan| launcher.copy_rows([k, v], plan, stream));
        }
        let moves = host_copies(dst, src, "slot", self.rows)?;
        let _alone: Vec<_> = (0..self.config.layer_num).map(|layer| self.writing(layer)).collect();
        move_rows(&self.buffers, &moves)
    }

    /// Fills rows of all layers with a pattern that shows when it is read: NaN in floats, -1 in int8, 255 in uint8. What
    /// lies beyond the last row is left out.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the driver refuses, and while `stream` is captured.
    pub fn poison(&self, rows: &[Range<usize>], stream: Stream) -> Result<()> {
        const POISON: u8 = 0xff;
        let gpu = self.region.gpu().filter(|_| !rows.is_empty());
        if let Some(gpu) = gpu {
            gpu.not_capturing(stream, "poison over freed rows")?;
        }
        let clip = |row: usize| row.min(self.rows);
        for layer in 0..self.config.layer_num {
            let _alone = self.writing(layer);
            for buffer in self.pair(layer)? {
                for rows in rows {
                    let offset = buffer.offset() + clip(rows.start) * buffer.row_bytes();
                    let bytes = (clip(rows.end) - clip(rows.start)) * buffer.row_bytes();
                    match gpu {
                        None => self.region.fill(offset, bytes, POISON)?,
                        Some(gpu) => gpu.fill((&self.region, offset), bytes, POISON, stream)?,
                    }
                }
            }
        }
        Ok(())
    }

    /// Every buffer, keys of all layers first.
    pub fn buffer_infos(&self) -> impl Iterator<Item = BufferInfo> + '_ {
        let base = self.region.address().as_ptr().addr();
        self.buffers.iter().map(move |buffer| BufferInfo {
            address: base + buffer.offset(),
            bytes: buffer.bytes(),
            row_bytes: buffer.row_bytes(),
        })
    }
}

fn view(buffer: &RowBuffer, shape: &[usize]) -> Result<TensorView> {
    TensorView::contiguous(Arc::clone(buffer.region()), buffer.offset(), buffer.dtype(), shape)
}
