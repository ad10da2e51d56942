//! States of Gated DeltaNet layers, one per request, and snapshots of them.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{
    DType, Device, Dims, Error, ErrorKind, Id, IndexVec, LONG_COPY, Result, StateSlot, bytes_of,
    run_blocking, try_collect, widen,
};
use crate::index::{BadFrees, Ledgered, OnBadFree, Owner, RowTable};
use crate::kernels::{
    BufferInfo, Executor, IndexSpace, IndexSpaces, Indices, LayerRows, PageCopy, PagePair, Pieces, PlaneRows,
    RowBuffer,
};
use crate::layout::{CacheLayout, Group, GroupKind, GroupPlacement, Plane, PlaneOrder, PlaneRuns};
use crate::memory::{ALIGNMENT, Backend, Event, Region, Stream};
use crate::tensor::TensorView;
use crate::transfer::Transfer;

use super::contract::{Occupancy, Pool, Stats};
use super::{Footprint, at_least_one, fits_int32, row_ring_bytes};

/// The shape of a [`GdnPool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GdnConfig {
    /// Working slots, numbered `1..=max_reqs`.
    pub max_reqs: usize,
    /// Linear-attention layers.
    pub num_gdn_layers: usize,
    /// Number of value heads.
    pub num_v_heads: usize,
    /// Elements of a key head.
    pub head_k_dim: usize,
    /// Elements of a value head.
    pub head_v_dim: usize,
    /// Channels of the causal convolution.
    pub conv_dim: usize,
    /// Taps of the causal convolution; the state holds one fewer.
    pub conv_kernel_size: usize,
    /// Element type of the convolution state.
    pub dtype: DType,
    /// Snapshots, numbered after the working slots.
    pub max_track_slots: usize,
    /// Whether an invalid free is an error.
    pub strict: bool,
}

impl GdnConfig {
    /// Returns what the pool keeps: a group of states with the planes `recurrent` and `conv`, the second unless the
    /// convolution has one tap, which needs no state.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for sizes of 0 and for states whose bytes overflow.
    pub fn cache_layout(&self) -> Result<CacheLayout> {
        CacheLayout::new("", 1, vec![self.group()?])
    }

    fn group(&self) -> Result<Group> {
        let recurrent =
            Plane::new("recurrent", DType::F32, &[self.num_v_heads, self.head_v_dim, self.head_k_dim])?;
        let mut planes = vec![recurrent];
        if self.conv_kernel_size > 1 {
            planes.push(Plane::new("conv", self.dtype, &[self.conv_dim, self.conv_kernel_size - 1])?);
        }
        let state = planes.iter().map(Plane::entry_bytes).fold(0, usize::saturating_add);
        bytes_of("all layers", &[state, self.num_gdn_layers], DType::U8)?;
        let layers = try_collect(0..self.num_gdn_layers)?;
        Group::new("state", GroupKind::State, &layers, planes)
    }

    /// Returns where the states of all layers lie, the recurrent ones first, and the bytes of all.
    fn place(&self) -> Result<([PlaneRows; 2], usize)> {
        at_least_one(&[
            ("max_reqs", self.max_reqs),
            ("num_gdn_layers", self.num_gdn_layers),
            ("num_v_heads", self.num_v_heads),
            ("head_k_dim", self.head_k_dim),
            ("head_v_dim", self.head_v_dim),
            ("conv_dim", self.conv_dim),
            ("conv_kernel_size", self.conv_kernel_size),
        ])?;
        let Self { max_reqs, max_track_slots, .. } = *self;
        let end = max_reqs.checked_add(1).and_then(|sum| sum.checked_add(max_track_slots));
        let slots = fits_int32(&format!("max_reqs {max_reqs} + max_track_slots {max_track_slots}"), end)?;
        let (group, order) = (self.group()?, PlaneOrder::PlaneByPlane { plane: ALIGNMENT, layer: 1 });
        let placement = GroupPlacement::new(&group, widen(slots), order)?;
        let recurrent = placement.planes()[0];
        // Without taps to keep, rows of no bytes behind the recurrent states.
        let none =
            PlaneRuns { offset: placement.end(), layer_step: 0, unit_step: 0, unit_bytes: 0, ..recurrent };
        let conv = placement.planes().get(1).copied().unwrap_or(none);
        // A state is a row of one head.
        let rows = |runs: PlaneRuns, dtype: DType| PlaneRows {
            runs,
            row: [1, runs.unit_bytes / dtype.size()],
            dtype,
        };
        Ok(([rows(recurrent, DType::F32), rows(conv, self.dtype)], placement.end()))
    }

    /// Returns the bytes of a pool on `device`.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) as [`GdnPool::new`].
    pub fn footprint(&self, device: Device) -> Result<Footprint> {
        let ([recurrent, _], bytes) = self.place()?;
        Footprint::new(device, bytes, row_ring_bytes(recurrent.runs.units))
    }
}

/// Recurrent and convolution states, indexed like the request table. Index 0 is padding.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{DType, Id, IndexVec, StateSlot};
/// use kvpool::kernels::Indices;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{GdnConfig, GdnPool};
/// let config = GdnConfig {
///     max_reqs: 4, num_gdn_layers: 2, num_v_heads: 2, head_k_dim: 8, head_v_dim: 8, conv_dim: 16,
///     conv_kernel_size: 4, dtype: DType::BF16, max_track_slots: 2, strict: false,
/// };
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let pool = GdnPool::new(&config, &host).unwrap();
/// assert_eq!(pool.alloc_track_slot(), Some(StateSlot::new(5)));
/// let index = |slot| Indices::Host(IndexVec::I64(vec![slot]));
/// pool.copy_states(&index(1), &index(5), Stream::DEFAULT).unwrap();
/// ```
pub struct GdnPool {
    config: GdnConfig,
    layout: CacheLayout,
    slots: IndexSpace,
    recurrent: TensorView,
    conv: TensorView,
    /// Both states, one row a slot.
    rows: LayerRows,
    /// Locked separately, so that long copies of states do not delay it.
    tracks: RankedMutex<Ledgered<RowTable<StateSlot>>>,
    /// Copies that may still use free track slots.
    track_copies: RankedMutex<HashMap<StateSlot, Arc<Transfer>>>,
    executor: Executor,
}

impl fmt::Debug for GdnPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GdnPool")
            .field("max_reqs", &self.config.max_reqs)
            .field("num_gdn_layers", &self.config.num_gdn_layers)
            .field("max_track_slots", &self.config.max_track_slots)
            .field("device", &self.recurrent.device())
            .finish_non_exhaustive()
    }
}

/// The value that [`GdnPool::set_state`] sets a state to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// The state of another slot.
    Slot(i64),
    /// The initial state, zeros.
    Zeros,
}

impl GdnPool {
    /// Allocates the states from `backend`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for an argument of 0 (`max_track_slots` may be),
    /// for indices that do not fit int32 and for sizes whose bytes overflow; the error of the backend if it
    /// runs out of memory.
    pub fn new(config: &GdnConfig, backend: &Arc<dyn Backend>) -> Result<Self> {
        let GdnConfig { max_reqs, num_gdn_layers: layers, max_track_slots, dtype, .. } = *config;
        let (planes, bytes) = config.place()?;
        let [recurrent, conv] = planes.map(|plane| plane.runs);
        let slots = IndexSpace { noun: "state", len: recurrent.units };
        let region = Arc::new(Region::new(Arc::clone(backend), bytes)?);
        // There is one section, because a call works on every layer.
        let executor = Executor::new(&region, 1, IndexSpaces::of_rows(slots), row_ring_bytes(slots.len))?;
        let rows = LayerRows::new(&region, planes)?;
        let shape = [layers, slots.len, config.num_v_heads, config.head_v_dim, config.head_k_dim];
        let recurrent = TensorView::contiguous(Arc::clone(&region), recurrent.offset, DType::F32, &shape)?;
        let shape = [layers, slots.len, config.conv_dim, config.conv_kernel_size - 1];
        let conv = TensorView::contiguous(region, conv.offset, dtype, &shape)?;
        let fit = |name: &str, number| fits_int32(&format!("{name} {number}"), Some(number));
        let tracks = Ledgered::from(RowTable::new(
            fit("the first track slot", max_reqs + 1)?,
            fit("max_track_slots", max_track_slots)?,
        )?);
        Ok(Self {
            config: *config,
            layout: config.cache_layout()?,
            slots,
            recurrent,
            conv,
            rows,
            tracks: RankedMutex::new(LockRank::TrackSlots, tracks),
            track_copies: RankedMutex::new(LockRank::TrackCopies, HashMap::new()),
            executor,
        })
    }

    /// Returns what the pool keeps.
    #[must_use]
    pub const fn cache_layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Returns the config of the pool.
    #[must_use]
    pub const fn config(&self) -> &GdnConfig {
        &self.config
    }

    /// Returns whether a bad free is an error.
    #[must_use]
    pub const fn strict(&self) -> bool {
        self.config.strict
    }

    /// Returns the number of slots in each layer: padding, working and track slots.
    #[must_use]
    pub const fn pool_size(&self) -> usize {
        self.slots.len
    }

    /// Returns the device of the states.
    #[must_use]
    pub fn device(&self) -> Device {
        self.recurrent.device()
    }

    /// Returns the number of bytes of both states.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.rows.bytes()
    }

    /// Returns the states of all layers, each slot a page of one row, for pieces of them.
    pub(super) const fn pages(&self) -> (&LayerRows, usize) {
        (&self.rows, 1)
    }

    /// Copies states to their pieces, or back: see [`Executor::copy_pages`].
    pub(super) fn copy_pieces(
        &self,
        pieces: &Pieces,
        direction: PageCopy,
        pairs: &[PagePair<StateSlot>],
        stream: Stream,
    ) -> Result<()> {
        self.executor.copy_pages(&self.rows, pieces, direction, pairs, 0..self.rows.layers(), stream)
    }

    /// Returns the states, float32 `[num_gdn_layers, pool_size, num_v_heads, head_v_dim, head_k_dim]`, without a copy.
    #[must_use]
    pub const fn recurrent_state(&self) -> &TensorView {
        &self.recurrent
    }

    /// Returns the convolution states, `[num_gdn_layers, pool_size, conv_dim, conv_kernel_size - 1]`, without a copy.
    #[must_use]
    pub const fn conv_state(&self) -> &TensorView {
        &self.conv
    }

    /// Returns both states of a layer, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a layer that does not exist.
    pub fn layer_state(&self, layer: usize) -> Result<[TensorView; 2]> {
        let [recurrent, conv] = self.rows.layer(layer)?;
        let view = |state: &TensorView, rows: &RowBuffer| {
            let shape = Dims::new(&state.shape().as_slice()[1..])?;
            TensorView::contiguous_with_dims(Arc::clone(state.region()), rows.offset(), state.dtype(), shape)
        };
        Ok([view(&self.recurrent, recurrent)?, view(&self.conv, conv)?])
    }

    /// Returns every buffer, the recurrent states of all layers first. A row is the state of a slot.
    pub fn buffer_infos(&self) -> impl Iterator<Item = BufferInfo> {
        self.rows.all().iter().map(RowBuffer::info)
    }

    /// Zeroes both states of the slots that `indices` lists, in all layers. On a GPU it is one launch on
    /// `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a slot that does not exist,
    /// [`ErrorKind::IndexOwnership`] for a snapshot of a prefix cache; nothing is zeroed. An invalid index on a
    /// GPU is skipped, and [`GdnPool::take_fault`] reports it; a snapshot is not protected there.
    pub fn reset_states(&self, indices: &Indices<'_>, stream: Stream) -> Result<()> {
        self.check_not_cached(indices)?;
        self.executor.zero_rows(&self.rows, indices, stream)
    }

    /// Copies both states of slot `src[i]` to slot `dst[i]`, in all layers, as if all were read before any is
    /// written.
    ///
    /// On a GPU it is one launch on `stream`. With index tensors there, the contents of a slot that is both
    /// read and written, or written twice, are undefined.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for different lengths,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for slots that do not exist,
    /// [`ErrorKind::IndexOwnership`] when a snapshot of a prefix cache would be written. Nothing is copied. As
    /// [`GdnPool::reset_states`].
    pub fn copy_states(&self, src: &Indices<'_>, dst: &Indices<'_>, stream: Stream) -> Result<()> {
        self.check_not_cached(dst)?;
        self.executor.copy_rows(&self.rows, dst, src, stream)
    }

    /// Returns an event to wait for before `numbers` numbers are sent to the device, if it is
    /// far behind.
    #[must_use]
    pub fn backpressure_event(&self, numbers: usize) -> Option<Arc<Event>> {
        self.executor.backpressure_event(numbers)
    }

    /// Checks that `slot` is a working slot.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for the padding slot, a track slot, and numbers
    /// that are no slots.
    pub(super) fn check_working(&self, slot: i64) -> Result<()> {
        let max_reqs = self.config.max_reqs;
        if usize::try_from(slot).is_ok_and(|slot| (1..=max_reqs).contains(&slot)) {
            return Ok(());
        }
        let text = format!("state slot {slot} is no working slot; these are 1 to {max_reqs}");
        Err(Error::index(text).with_index(slot))
    }

    /// Checks that none of `indices` is the track slot of a snapshot in a prefix cache, which only the cache
    /// may write. Indices that only a device has are not checked.
    fn check_not_cached(&self, indices: &Indices<'_>) -> Result<()> {
        let Indices::Host(indices) = indices else { return Ok(()) };
        let tracks = self.tracks.lock();
        let is_cached =
            |slot: &i64| u32::try_from(*slot).is_ok_and(|slot| tracks.is_cached(StateSlot::new(slot)));
        if tracks.cached() > 0
            && let Some(slot) = indices.iter().find(is_cached)
        {
            let text = format!("{} {slot} cannot be written: owned by the prefix cache", StateSlot::NOUN);
            return Err(Error::new(ErrorKind::IndexOwnership, text).with_index(slot));
        }
        Ok(())
    }

    /// Sets both states of slot `dst`. A long copy in host memory is a [`run_blocking`] section.
    ///
    /// # Errors
    /// See [`GdnPool::copy_states`].
    pub(super) fn set_state(&self, dst: i64, source: Source, stream: Stream) -> Result<()> {
        let one = |slot| Indices::Host(IndexVec::I64(vec![slot]));
        let set = || match source {
            Source::Slot(src) => self.executor.copy_rows(&self.rows, &one(dst), &one(src), stream),
            Source::Zeros => self.executor.zero_rows(&self.rows, &one(dst), stream),
        };
        let is_long = self.device() == Device::Cpu && self.mem_bytes() / self.slots.len >= LONG_COPY;
        if is_long { run_blocking(set) } else { set() }
    }

    /// Reports, once, an invalid index on the device of an earlier call. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a slot that does not exist: it was skipped.
    pub fn take_fault(&self) -> Result<()> {
        self.executor.take_fault()
    }

    /// Takes the track slot that has been free longest, or returns `None`. Waits for the copy to or from a tier
    /// that may still use it.
    pub fn alloc_track_slot(&self) -> Option<StateSlot> {
        let slot = self.tracks.lock().alloc_one()?.row;
        if let Some(copy) = self.track_copies.lock().remove(&slot) {
            // A failed device copies nothing.
            let _ = copy.wait();
        }
        Some(slot)
    }

    /// Frees a track slot; drops and reports one that is not live, or of a snapshot in a prefix cache.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`] when the free is invalid.
    pub fn free_track_slot(&self, slot: i64) -> Result<BadFrees> {
        let (_, bad) =
            self.tracks.lock().free(&IndexVec::I64(vec![slot]), OnBadFree::of(self.config.strict))?;
        Ok(bad)
    }

    /// Takes a track slot for a prefix cache, the `owner`, or returns `None`. Nobody else can free it. Also
    /// returns the copy to or from a tier that may still use the slot.
    pub(super) fn take_cached(&self, owner: &Owner) -> Option<(StateSlot, Option<Arc<Transfer>>)> {
        let slot = self.tracks.lock().alloc_cached(owner)?;
        Some((slot, self.track_copies.lock().remove(&slot)))
    }

    /// Frees a track slot of a prefix cache, the `owner`. `copy` may still use it.
    pub(super) fn free_cached(&self, slot: StateSlot, copy: Option<Arc<Transfer>>, owner: &Owner) {
        if let Some(copy) = copy.filter(|copy| !copy.is_over().unwrap_or(false)) {
            self.track_copies.lock().insert(slot, copy);
        }
        self.tracks.lock().free_cached(slot, owner);
    }

    /// Returns the number of track slots of prefix caches.
    pub(super) fn cached(&self) -> usize {
        self.tracks.lock().cached()
    }

    /// Calls `read` with the ownership of track slots, under their lock.
    pub fn with_tracks<R>(&self, read: impl FnOnce(&Ledgered<RowTable<StateSlot>>) -> R) -> R {
        read(&self.tracks.lock())
    }
}

impl Pool for GdnPool {
    fn unit(&self) -> &'static str {
        "track slot"
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(self.mem_bytes() / self.pool_size())
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn strict(&self) -> bool {
        self.strict()
    }

    fn stats(&self) -> Stats {
        let tracks = self.tracks.lock();
        Stats::of_rows(&tracks).and("cached", tracks.cached()).and("bytes", self.mem_bytes())
    }

    fn occupancy(&self) -> Occupancy {
        let tracks = self.tracks.lock();
        Occupancy::of_equal_units(tracks.spans(), tracks.ledger(), 1)
    }

    fn keep_ledger(&self) {
        self.tracks.lock().open_ledger();
    }
}
