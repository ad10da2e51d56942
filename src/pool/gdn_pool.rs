//! States of Gated DeltaNet layers, one for each request, and snapshots of them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::{DType, Device, Id, IndexVec, Result, StateSlot, bytes_of, widen};
use crate::index::{BadFrees, Ledgered, RowTable};
use crate::kernels::{Indices, Launcher, RowBuffer, move_rows, zero_rows};
use crate::memory::{ALIGNMENT, Backend, Region, Stream};
use crate::tensor::TensorView;

use super::copies::{host_copies, with_copies};
use super::{at_least_one, check_layer, expect_here, fits_int32, launcher_for};

/// The shape of a [`GdnPool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GdnConfig {
    /// Working slots, numbered `1..=max_reqs`.
    pub max_reqs: usize,
    /// Linear-attention layers.
    pub num_gdn_layers: usize,
    /// Value heads.
    pub num_v_heads: usize,
    /// Elements of a key head.
    pub head_k_dim: usize,
    /// Elements of a value head.
    pub head_v_dim: usize,
    /// Channels of the causal convolution.
    pub conv_dim: usize,
    /// Taps of the causal convolution; the state holds one less.
    pub conv_kernel_size: usize,
    /// Element type of the convolution state.
    pub dtype: DType,
    /// Snapshots, numbered after the working slots.
    pub max_track_slots: usize,
}

/// Recurrent and convolution states, indexed like the request table. Index 0 is padding.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{DType, IndexVec};
/// use kvpool::kernels::Indices;
/// use kvpool::memory::{Host, Stream};
/// use kvpool::pool::{GdnConfig, GdnPool};
/// let config = GdnConfig {
///     max_reqs: 4, num_gdn_layers: 2, num_v_heads: 2, head_k_dim: 8, head_v_dim: 8, conv_dim: 16,
///     conv_kernel_size: 4, dtype: DType::BF16, max_track_slots: 2,
/// };
/// let pool = GdnPool::new(Arc::new(Host), config, false).unwrap();
/// assert_eq!(pool.alloc_track_slot(), Some(5));
/// let index = |slot| Indices::Host(IndexVec::I64(vec![slot]));
/// pool.copy_states(&index(1), &index(5), Stream::DEFAULT).unwrap();
/// ```
#[derive(Debug)]
pub struct GdnPool {
    config: GdnConfig,
    pool_size: usize,
    strict: bool,
    recurrent: TensorView,
    conv: TensorView,
    /// Both states of every layer, one row a slot.
    buffers: Vec<RowBuffer>,
    /// Locked by itself, so that long copies of states do not hold it up.
    tracks: Mutex<Ledgered<RowTable<StateSlot>>>,
    /// Held while states are written, so that calls of several threads do not mix.
    copying: Mutex<()>,
    /// How it works on a GPU, where the order of a stream takes the place of that lock.
    launcher: Option<Launcher>,
}

impl GdnPool {
    /// Allocates the states from `backend`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for an argument of 0 (`max_track_slots` may be), for
    /// indices that do not fit int32 and for sizes whose bytes overflow; what the backend says when it has not
    /// enough.
    pub fn new(backend: Arc<dyn Backend>, config: GdnConfig, strict: bool) -> Result<Self> {
        at_least_one(&[
            ("max_reqs", config.max_reqs),
            ("num_gdn_layers", config.num_gdn_layers),
            ("num_v_heads", config.num_v_heads),
            ("head_k_dim", config.head_k_dim),
            ("head_v_dim", config.head_v_dim),
            ("conv_dim", config.conv_dim),
            ("conv_kernel_size", config.conv_kernel_size),
        ])?;
        let GdnConfig { max_reqs, num_gdn_layers: layers, max_track_slots, dtype, .. } = config;
        let end = max_reqs.checked_add(1).and_then(|sum| sum.checked_add(max_track_slots));
        let pool_size = fits_int32(&format!("max_reqs {max_reqs} + max_track_slots {max_track_slots}"), end)?;
        let pool_size = widen(pool_size);
        let recurrent = [layers, pool_size, config.num_v_heads, config.head_v_dim, config.head_k_dim];
        let conv = [layers, pool_size, config.conv_dim, config.conv_kernel_size - 1];
        let recurrent_bytes = bytes_of("recurrent_state", &recurrent, DType::F32)?;
        let conv_bytes = bytes_of("conv_state", &conv, dtype)?;
        let conv_offset = recurrent_bytes.next_multiple_of(ALIGNMENT);
        let region =
            Arc::new(Region::new(backend, bytes_of("both states", &[conv_offset + conv_bytes], DType::U8)?)?);
        let launcher = launcher_for(&region, pool_size)?;
        let recurrent = TensorView::contiguous(Arc::clone(&region), 0, DType::F32, &recurrent)?;
        let conv = TensorView::contiguous(region, conv_offset, dtype, &conv)?;
        let mut buffers = layer_rows(&recurrent, layers, pool_size)?;
        buffers.extend(layer_rows(&conv, layers, pool_size)?);
        let first_track = u32::try_from(max_reqs + 1).unwrap_or(u32::MAX);
        let tracks =
            Ledgered::from(RowTable::new(first_track, u32::try_from(max_track_slots).unwrap_or(u32::MAX))?);
        let (tracks, copying) = (Mutex::new(tracks), Mutex::new(()));
        Ok(Self { config, pool_size, strict, recurrent, conv, buffers, tracks, copying, launcher })
    }

    /// Its shape.
    #[must_use]
    pub const fn config(&self) -> &GdnConfig {
        &self.config
    }

    /// Whether a bad free is an error.
    #[must_use]
    pub const fn strict(&self) -> bool {
        self.strict
    }

    /// Slots of every layer: padding, working and track slots.
    #[must_use]
    pub const fn pool_size(&self) -> usize {
        self.pool_size
    }

    /// Where it is.
    #[must_use]
    pub fn device(&self) -> Device {
        self.recurrent.device()
    }

    /// Bytes of both states.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.buffers.iter().map(RowBuffer::bytes).sum()
    }

    /// float32 `[num_gdn_layers, pool_size, num_v_heads, head_v_dim, head_k_dim]`, without a copy.
    #[must_use]
    pub const fn recurrent_state(&self) -> &TensorView {
        &self.recurrent
    }

    /// `[num_gdn_layers, pool_size, conv_dim, conv_kernel_size - 1]`, without a copy.
    #[must_use]
    pub const fn conv_state(&self) -> &TensorView {
        &self.conv
    }

    /// Both states of a layer, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a layer that is not there.
    pub fn layer_state(&self, layer: usize) -> Result<[TensorView; 2]> {
        check_layer(layer, self.config.num_gdn_layers)?;
        Ok([layer_view(&self.recurrent, layer)?, layer_view(&self.conv, layer)?])
    }

    /// Zeroes both states of the slots that `indices` names, in all layers. On a GPU it is one launch on `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a slot that is not there; nothing is zeroed then. On a
    /// GPU an index there that names none is left out, and told by [`GdnPool::fault`].
    pub fn reset_states(&self, indices: &Indices<'_>, stream: Stream) -> Result<()> {
        if let Some(launcher) = &self.launcher {
            expect_here(self.device(), &[indices], stream)?;
            self.fault()?;
            return launcher.zero_rows(self.groups(), indices, "state", stream);
        }
        let rows = indices.on_host()?.rows("state", self.pool_size)?;
        let _alone = lock(&self.copying);
        zero_rows(&self.buffers, &rows)
    }

    /// Copies both states of slot `src[i]` to slot `dst[i]`, in all layers, as if all were read before any is
    /// written.
    ///
    /// On a GPU it is one launch on `stream`. Of index tensors there, no slot may be both read and written, or
    /// written twice: what it holds then is not defined.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for different lengths,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for slots that are not there. Nothing is copied then. As
    /// [`GdnPool::reset_states`].
    pub fn copy_states(&self, src: &Indices<'_>, dst: &Indices<'_>, stream: Stream) -> Result<()> {
        if let Some(launcher) = &self.launcher {
            expect_here(self.device(), &[src, dst], stream)?;
            self.fault()?;
            return with_copies(dst, src, "state", self.pool_size, |plan| {
                launcher.copy_rows(self.groups(), plan, stream)
            });
        }
        let moves = host_copies(dst, src, "state", self.pool_size)?;
        let _alone = lock(&self.copying);
        move_rows(&self.buffers, &moves)
    }

    /// Tells what is wrong with indices that an earlier call was given on the device, once. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a slot that is not there: it was left out.
    pub fn fault(&self) -> Result<()> {
        let launcher = self.launcher.as_ref();
        launcher.map_or(Ok(()), |launcher| launcher.fault(["state"; 2], [self.pool_size; 2]))
    }

    /// The rows of both states, layer by layer.
    fn groups(&self) -> [&[RowBuffer]; 2] {
        let (recurrent, conv) = self.buffers.split_at(self.config.num_gdn_layers);
        [recurrent, conv]
    }

    /// Takes a track slot, the longest free first, or returns `None`.
    pub fn alloc_track_slot(&self) -> Option<u32> {
        self.tracks().alloc(1)?.first().map(|taken| taken.row.number())
    }

    /// Gives a track slot back; what is not live is dropped and reported.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) when it would be dropped.
    pub fn free_track_slot(&self, slot: i64) -> Result<BadFrees> {
        let (_, bad) = self.tracks().free(&IndexVec::I64(vec![slot]), self.strict)?;
        Ok(bad)
    }

    /// Notes from now on who takes and gives which track slot.
    pub fn keep_ledger(&self) {
        self.tracks().book_mut().open();
    }

    /// Who owns which track slot.
    pub fn tracks(&self) -> MutexGuard<'_, Ledgered<RowTable<StateSlot>>> {
        lock(&self.tracks)
    }
}

/// Locks `mutex`. A panic elsewhere cannot have left numbers half moved, so poison is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The rows of each layer of a state `[layers, slots, ...]`.
fn layer_rows(state: &TensorView, layers: usize, slots: usize) -> Result<Vec<RowBuffer>> {
    let row = state.shape().numel() / (layers * slots);
    let layer_bytes = slots * row * state.dtype().size();
    (0..layers)
        .map(|layer| {
            let offset = state.offset() + layer * layer_bytes;
            RowBuffer::new(Arc::clone(state.region()), offset, [slots, 1, row], state.dtype())
        })
        .collect()
}

/// Layer `layer`, below the first extent, of a state.
fn layer_view(state: &TensorView, layer: usize) -> Result<TensorView> {
    let extents: Vec<usize> =
        state.shape().as_slice()[1..].iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect();
    let bytes = extents.iter().product::<usize>() * state.dtype().size();
    TensorView::contiguous(
        Arc::clone(state.region()),
        state.offset() + layer * bytes,
        state.dtype(),
        &extents,
    )
}
