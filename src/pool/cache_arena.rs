//! One region for everything that a model keeps: the units of all groups of a layout, in slabs.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::base::bounded::{narrow, signed};
use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{
    DType, Device, Dims, Epoch, Error, IndexVec, Page, Result, contiguous_strides, run_blocking, try_to_vec,
    try_with_capacity, widen,
};
use crate::index::{BadFrees, OnBadFree, SlabCounts, SlabUnits, Slabs};
use crate::kernels::{
    BufferInfo, Executor, IndexSpace, IndexSpaces, Indices, LayerRows, PageCopy, PagePair, Pieces, PlaneRows,
};
use crate::layout::{CacheLayout, PlaneRuns, SlabLayout, SlabOptions};
use crate::memory::{Backend, Gpu, Region, Stream};
use crate::tensor::TensorView;
use crate::transfer::Transfer;

use super::contract::{Pool, Stats};
use super::{fits_int32, make_room};

/// The shape of a [`CacheArena`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheArenaConfig {
    /// The groups that share the arena.
    pub layout: CacheLayout,
    /// Bytes of the arena; what is behind the last whole slab is not allocated.
    pub arena_bytes: usize,
    /// Slabs that other groups leave to a group, by its number. Empty for none.
    pub floors: Vec<usize>,
    /// What limits the size of slabs.
    pub slabs: SlabOptions,
    /// Whether an invalid free is an error.
    pub strict: bool,
}

/// Pages and states of all groups of a layout, in one region that is not split between them.
///
/// The region is cut into slabs of equal size, each of one group while a unit in it is in use. Units do not move,
/// and every plane of every layer is one tensor over the region ([`Self::buffer`]), in which a unit has the same
/// number in all layers, unless it is a state that is placed layer by layer, which has a number for each. Tensors of
/// different groups overlap as descriptions, never in units that are in use.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::DType;
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
/// use kvpool::memory::{Backend, Host};
/// use kvpool::pool::{CacheArena, CacheArenaConfig};
/// let plane = |name, heads| Plane::new(name, DType::BF16, &[heads, 64]).unwrap();
/// let layout = CacheLayout::new("a hybrid model", 16, vec![
///     Group::new("full", GroupKind::Full, &[1], vec![plane("k", 2), plane("v", 2)]).unwrap(),
///     Group::new("state", GroupKind::State, &[0], vec![plane("recurrent", 128)]).unwrap(),
/// ]).unwrap();
/// let config = CacheArenaConfig {
///     layout, arena_bytes: 1 << 20, floors: Vec::new(), slabs: SlabOptions::default(), strict: true,
/// };
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let arena = CacheArena::new(&config, &host).unwrap();
/// let taken = arena.alloc(&[3, 1]).unwrap().unwrap();
/// assert_eq!((taken[0].len(), taken[1].len()), (3, 1));
/// let k = arena.buffer(0, 0, 1).unwrap();
/// assert_eq!(k.shape().as_slice()[1..], [16, 2, 64]);
/// arena.free(0, &[taken[0][1].into()]).unwrap();
/// ```
pub struct CacheArena {
    config: CacheArenaConfig,
    slabs: SlabLayout,
    region: Arc<Region>,
    owners: RankedMutex<Owners>,
    /// The whole units of each group, and what copies them.
    units: Vec<(LayerRows, Executor)>,
    reclaim: RankedMutex<Vec<Weak<dyn ReclaimUnits>>>,
}

/// The ownership of an arena's slabs.
#[derive(Debug)]
struct Owners {
    slabs: Slabs,
    /// Ends when all units are freed at once.
    epoch: Epoch,
    /// The number of calls that have taken units and begin to copy to them.
    fills: usize,
    /// Copies to units that may be in flight.
    filling: Vec<Arc<Transfer>>,
}

/// A call that copies to units that it has taken: the units are not freed by a clear meanwhile.
#[derive(Debug)]
pub(super) struct Filling<'a> {
    arena: &'a CacheArena,
    transfer: Option<Arc<Transfer>>,
}

impl Filling<'_> {
    /// Records the copy, which may still be in flight when this drops.
    pub(super) fn keep(&mut self, transfer: &Arc<Transfer>) {
        self.transfer = Some(Arc::clone(transfer));
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        let in_flight = |transfer: &Arc<Transfer>| !transfer.is_complete().unwrap_or(true);
        let mut owners = self.arena.owners();
        owners.filling.retain(in_flight);
        owners.filling.extend(self.transfer.take().filter(in_flight));
        owners.fills -= 1;
    }
}

/// A holder of units of a [`CacheArena`] that can free some on demand, such as a prefix cache.
///
/// An arena calls it without holding a lock, from the threads that are short, possibly several at once. It may use
/// the arena.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use kvpool::base::{DType, Result};
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{CacheArena, CacheArenaConfig, ReclaimUnits};
/// struct Spare {
///     arena: Arc<CacheArena>,
///     units: Mutex<Vec<i64>>,
/// }
/// impl ReclaimUnits for Spare {
///     fn reclaim_units(&self, _wanted: &[usize], _stream: Stream) -> Result<bool> {
///         let units = std::mem::take(&mut *self.units.lock().unwrap());
///         self.arena.free(0, &units)?;
///         Ok(!units.is_empty())
///     }
/// }
/// let k = vec![Plane::new("k", DType::BF16, &[2, 64]).unwrap()];
/// let full = Group::new("full", GroupKind::Full, &[0], k).unwrap();
/// let config = CacheArenaConfig {
///     layout: CacheLayout::new("a model", 16, vec![full]).unwrap(),
///     arena_bytes: 1 << 16, floors: Vec::new(), slabs: SlabOptions::default(), strict: true,
/// };
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let arena = Arc::new(CacheArena::new(&config, &host).unwrap());
/// let mut taken = Vec::new();
/// while let Some(units) = arena.alloc(&[1]).unwrap() {
///     taken.push(i64::from(units[0][0]));
/// }
/// let spare = Spare { arena: Arc::clone(&arena), units: Mutex::new(taken) };
/// let spare: Arc<dyn ReclaimUnits> = Arc::new(spare);
/// arena.on_shortage(&spare);
/// assert!(arena.alloc(&[1]).unwrap().is_some());
/// ```
pub trait ReclaimUnits: Send + Sync {
    /// Frees units that it holds until `wanted`, one number of units' numbers a group, fits the arena
    /// ([`CacheArena::missing`] is 0), or nothing more can be freed. Returns whether it freed any.
    ///
    /// # Errors
    /// The call that was short returns the error.
    fn reclaim_units(&self, wanted: &[usize], stream: Stream) -> Result<bool>;
}

impl fmt::Debug for CacheArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CacheArena")
            .field("layout", &self.config.layout)
            .field("slabs", &self.slabs)
            .field("device", &self.region.device())
            .finish_non_exhaustive()
    }
}

impl CacheArena {
    /// Allocates an arena from `backend`, zero at first.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) if the layout does not fit the bytes
    /// ([`SlabLayout::choose`]), and for floors that are not one a group or more than there is; the error of the
    /// backend if it runs out of memory.
    pub fn new(config: &CacheArenaConfig, backend: &Arc<dyn Backend>) -> Result<Self> {
        let groups = config.layout.groups().len();
        if !config.floors.is_empty() && config.floors.len() != groups {
            return Err(Error::config(format!("{} floors for {groups} groups", config.floors.len())));
        }
        let slabs = SlabLayout::choose(&config.layout, config.arena_bytes, config.slabs)?;
        let units = slabs.groups().iter().enumerate().map(|(group, slab)| {
            let floor = config.floors.get(group).copied().unwrap_or(0);
            let floor = fits_int32(&format!("a floor of {floor} slabs"), Some(floor))?;
            // `choose` has checked that the numbers of all slabs fit int32.
            Ok(SlabUnits { units: narrow(slab.units), numbers: narrow(slab.numbers), floor })
        });
        let units = units.collect::<Result<Vec<_>>>()?;
        // Before the memory: its errors are about arguments.
        let owners = Slabs::new(narrow(slabs.slabs()), &units)?;
        let region = Arc::new(Region::new(Arc::clone(backend), slabs.bytes())?);
        let owners = Owners { slabs: owners, epoch: Epoch::default(), fills: 0, filling: Vec::new() };
        let owners = RankedMutex::new(LockRank::CacheArena, owners);
        let reclaim = RankedMutex::new(LockRank::Reclaimers, Vec::new());
        let mut units = try_with_capacity(groups)?;
        for group in 0..groups {
            units.push(copier(&region, slabs.unit_runs(group))?);
        }
        Ok(Self { units, config: config.clone(), slabs, region, owners, reclaim })
    }

    /// Returns the config of the arena.
    #[must_use]
    pub const fn config(&self) -> &CacheArenaConfig {
        &self.config
    }

    /// Returns the groups that share the arena.
    #[must_use]
    pub const fn layout(&self) -> &CacheLayout {
        &self.config.layout
    }

    /// Returns how the groups lie in slabs.
    #[must_use]
    pub const fn slabs(&self) -> &SlabLayout {
        &self.slabs
    }

    /// Returns the device of the memory.
    #[must_use]
    pub fn device(&self) -> Device {
        self.region.device()
    }

    /// Returns the number of bytes of all slabs.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.region.bytes()
    }

    /// Returns the memory as one buffer, whose rows are slabs.
    pub fn buffer_infos(&self) -> impl Iterator<Item = BufferInfo> {
        let address = self.region.address().as_ptr().addr();
        std::iter::once(BufferInfo { address, bytes: self.mem_bytes(), row_bytes: self.slabs.slab_bytes() })
    }

    /// Returns the memory.
    pub(super) const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the GPU of the memory, if it is on one.
    pub(super) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.region.gpu()
    }

    /// Returns the whole units of a group, by their numbers.
    pub(super) fn unit_rows(&self, group: usize) -> &LayerRows {
        &self.units[group].0
    }

    fn owners(&self) -> RankedGuard<'_, Owners> {
        self.owners.lock()
    }

    /// Has `reclaim` asked when a call is short, as long as it lives.
    pub fn on_shortage(&self, reclaim: &Arc<dyn ReclaimUnits>) {
        self.reclaim.lock().push(Arc::downgrade(reclaim));
    }

    /// Asks the registered [`ReclaimUnits`] to free what is missing for `wanted`, numbers of units by group. Returns
    /// whether it fits now. The caller holds no lock.
    ///
    /// # Errors
    /// The first error of a holder.
    pub(super) fn reclaim(&self, wanted: &[usize], stream: Stream) -> Result<bool> {
        let holders = {
            let mut holders = self.reclaim.lock();
            holders.retain(|holder| holder.strong_count() > 0);
            holders.clone()
        };
        for holder in holders.iter().filter_map(Weak::upgrade) {
            if self.missing(wanted) == 0 {
                break;
            }
            holder.reclaim_units(wanted, stream)?;
        }
        Ok(self.missing(wanted) == 0)
    }

    /// Returns the number of empty slabs that are missing for `wanted`, numbers of units by group.
    #[must_use]
    pub fn missing(&self, wanted: &[usize]) -> usize {
        self.owners().slabs.missing(wanted)
    }

    /// Calls `act` with the ownership of slabs, under the lock of the arena. `None` if `epoch` is over: all units
    /// have been freed since.
    pub(super) fn in_epoch<R>(&self, epoch: Epoch, act: impl FnOnce(&mut Slabs) -> R) -> Option<R> {
        let mut owners = self.owners();
        (owners.epoch == epoch).then(|| act(&mut owners.slabs))
    }

    /// Returns how often all units were freed at once.
    #[must_use]
    pub fn clears(&self) -> u64 {
        self.owners().epoch.number()
    }

    /// Returns the epoch, which ends when all units are freed at once.
    pub(super) fn epoch(&self) -> Epoch {
        self.owners().epoch
    }

    /// Calls `read` with the ownership of slabs, under the lock of the arena.
    pub fn with_slabs<R>(&self, read: impl FnOnce(&Slabs) -> R) -> R {
        read(&self.owners().slabs)
    }

    /// Returns the numbers that one unit of a group takes: one, or one a layer if it is placed layer by layer.
    #[must_use]
    pub fn numbers_of_unit(&self, group: usize) -> usize {
        if self.slabs.groups()[group].by_layer { self.layout().groups()[group].layers().len() } else { 1 }
    }

    /// Takes as many units of each group as `wanted` says. Returns `None` and changes nothing if one of them is short.
    ///
    /// Returns the numbers of each group's units. A unit that is placed layer by layer has one for each layer, one
    /// behind the other.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if there is not one number for each group;
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot list the units.
    pub fn alloc(&self, wanted: &[usize]) -> Result<Option<Vec<Vec<u32>>>> {
        let numbers = self.numbers(wanted)?;
        let Some(numbers) = numbers else { return Ok(None) };
        loop {
            let taken = self.owners().slabs.alloc(&numbers)?;
            if taken.is_some() || !self.reclaim(&numbers, Stream::default_of(self.device()))? {
                return Ok(taken);
            }
        }
    }

    /// Returns whether [`Self::alloc`] would succeed.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if there is not one number for each group.
    pub fn fits(&self, wanted: &[usize]) -> Result<bool> {
        let numbers = self.numbers(wanted)?;
        Ok(numbers.is_some_and(|numbers| self.missing(&numbers) == 0))
    }

    /// Returns the numbers that units take, or `None` if they are more than any arena has.
    fn numbers(&self, wanted: &[usize]) -> Result<Option<Vec<usize>>> {
        let groups = self.layout().groups().len();
        if wanted.len() != groups {
            return Err(Error::argument(format!(
                "units of {} groups are wanted; there are {groups}",
                wanted.len()
            )));
        }
        let most = widen(u32::MAX);
        let numbers = wanted.iter().enumerate().map(|(group, &count)| {
            count.checked_mul(self.numbers_of_unit(group)).filter(|&numbers| numbers <= most)
        });
        Ok(numbers.collect())
    }

    /// Frees numbers of units of a group. Invalid ones are dropped and reported.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a group that does not exist;
    /// [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) for an invalid number if the arena is
    /// strict; nothing is changed.
    pub fn free(&self, group: usize, numbers: &[i64]) -> Result<BadFrees> {
        self.check_group(group)?;
        self.owners().slabs.free(group, numbers, OnBadFree::of(self.config.strict))
    }

    /// Copies whole units of a group, `src[i]` to `dst[i]`, as if all were read before any is written. On a GPU it is
    /// one launch on `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a group that does not exist, for different lengths
    /// and for more than 8192 units; [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) for a target
    /// that is not in use or is a planner's or a prefix cache's, [`ErrorKind::Index`](crate::base::ErrorKind::Index)
    /// for a source that does not exist; [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call
    /// fails; [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot list the units.
    /// Nothing is copied.
    pub fn copy(&self, group: usize, dst: &[i64], src: &[i64], stream: Stream) -> Result<()> {
        self.check_group(group)?;
        if dst.len() != src.len() {
            let (dst, src) = (dst.len(), src.len());
            let text = format!("{dst} destinations and {src} sources; the numbers must be equal");
            return Err(Error::argument(text));
        }
        // A part is not copied after another that wrote what it reads.
        if dst.len() > COPIED_AT_ONCE {
            let text =
                format!("{} units are more than the {COPIED_AT_ONCE} that are copied at once", dst.len());
            return Err(Error::argument(text));
        }
        self.make_copy_room()?;
        self.owners().slabs.check_owned(group, dst)?;
        self.copy_units(group, dst, src, stream)
    }

    /// Waits until the device is not far behind with copies of units. The caller holds no lock.
    ///
    /// # Errors
    /// See [`make_room`].
    pub(super) fn make_copy_room(&self) -> Result<()> {
        self.units.iter().try_for_each(|(_, executor)| {
            make_room(2 * COPIED_AT_ONCE, |numbers| executor.backpressure_event(numbers))
        })
    }

    /// Works like [`Self::copy`], for targets of whoever calls, who has made room; in parts, if there are many.
    pub(super) fn copy_units(&self, group: usize, dst: &[i64], src: &[i64], stream: Stream) -> Result<()> {
        let (rows, executor) = &self.units[group];
        for (dst, src) in dst.chunks(COPIED_AT_ONCE).zip(src.chunks(COPIED_AT_ONCE)) {
            let [dst, src] = [dst, src].map(|units| Ok(Indices::Host(IndexVec::I64(try_to_vec(units)?))));
            executor.copy_rows(rows, &dst?, &src?, stream)?;
        }
        Ok(())
    }

    /// Copies whole units of a group to their pieces in host memory, or back: see [`Executor::copy_pages`].
    pub(super) fn copy_pieces(
        &self,
        group: usize,
        pieces: &Pieces,
        direction: PageCopy,
        pairs: &[PagePair<Page>],
        stream: Stream,
    ) -> Result<()> {
        let (rows, executor) = &self.units[group];
        let layers = rows.layers();
        if direction == PageCopy::In {
            let way = pieces.begin_load(pairs, stream)?;
            if way.is_staged() {
                let steps = (0..layers).map(|layer| way.layers(layer, layers));
                return steps
                    .filter(|layers| !layers.is_empty())
                    .try_for_each(|layers| executor.load_pages(rows, pieces, pairs, &layers, &way, stream));
            }
        }
        executor.copy_pages(rows, pieces, direction, pairs, 0..layers, stream)
    }

    /// Takes units for a prefix cache, numbers by group, and asks those that can give units back. `None` if that is not
    /// enough, or `epoch` is over.
    pub(super) fn take_held(
        &self,
        epoch: Epoch,
        wanted: &[usize],
        stream: Stream,
    ) -> Result<Option<Vec<Vec<u32>>>> {
        loop {
            let Some(taken) = self.in_epoch(epoch, |slabs| slabs.alloc_held(wanted)).transpose()? else {
                return Ok(None);
            };
            if taken.is_some() || !self.reclaim(wanted, stream)? {
                return Ok(taken);
            }
        }
    }

    /// Begins to copy to units taken in `epoch`, which a clear does not free until this drops and its copy is over. `None`
    /// if the epoch is over: the units are free.
    pub(super) fn begin_fill(&self, epoch: Epoch) -> Option<Filling<'_>> {
        let mut owners = self.owners();
        if owners.epoch != epoch {
            return None;
        }
        owners.fills += 1;
        Some(Filling { arena: self, transfer: None })
    }

    /// Frees all units of all groups, those of planners and prefix caches too. Waits for copies from a tier to units of
    /// prefixes that are being loaded.
    pub fn clear(&self) {
        /// The time after which a call that fills units is looked at again.
        const POLL: Duration = Duration::from_micros(50);
        loop {
            let filling = {
                let mut owners = self.owners();
                owners.filling.retain(|transfer| !transfer.is_complete().unwrap_or(true));
                if owners.fills == 0 && owners.filling.is_empty() {
                    owners.slabs.clear();
                    owners.epoch = owners.epoch.next();
                    return;
                }
                owners.filling.clone()
            };
            for transfer in &filling {
                // A device that has failed copies no more.
                let _ = transfer.wait();
            }
            if filling.is_empty() {
                run_blocking(|| std::thread::sleep(POLL));
            }
        }
    }

    fn check_group(&self, group: usize) -> Result<()> {
        let groups = self.layout().groups().len();
        if group < groups {
            return Ok(());
        }
        Err(Error::argument(format!("group {group} is outside [0, {groups})")))
    }

    /// Returns what a group has, and how many units it could take now.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a group that does not exist.
    pub fn group_counts(&self, group: usize) -> Result<(SlabCounts, usize)> {
        self.check_group(group)?;
        Ok(self.with_slabs(|slabs| (slabs.counts(group), slabs.available(group))))
    }

    /// Returns a plane of a layer of a group as one tensor over the arena, `[units, entries, *shape]`, without a copy;
    /// `[units, *shape]` for states. All layers of a state that is placed layer by layer have one tensor.
    ///
    /// Dimension 0 is indexed by the numbers of units. Those of other groups, and the padding units before the first
    /// slab that is handed out, are in it too: do not write where this group has no unit.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a group that does not exist,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a plane or layer that it does not have.
    pub fn buffer(&self, group: usize, plane: usize, layer: usize) -> Result<TensorView> {
        self.check_group(group)?;
        let declared = &self.layout().groups()[group];
        let position = declared.position(layer).ok_or_else(|| {
            let layers = declared.layers();
            Error::index(format!(
                "layer {layer} has no entries in group {}, which has {layers:?}",
                declared.name()
            ))
        })?;
        let array = declared.planes().get(plane).ok_or_else(|| {
            let planes = declared.planes().len();
            Error::index(format!("plane {plane} is outside [0, {planes}) of group {}", declared.name()))
        })?;
        let runs = self.slabs.plane(self.layout(), group, plane).layer(position);
        let page_size = self.layout().page_size();
        let entries = declared.unit_tokens(page_size).map(|_| declared.unit_entries(page_size));
        let unit = Dims::of(&entries.into_iter().chain(array.shape().iter().copied()).collect::<Vec<_>>())?;
        let with = |first: usize, rest: &Dims| Dims::new(&[&[signed(first)], rest.as_slice()].concat());
        let shape = with(runs.units, &unit)?;
        let strides = with(runs.unit_step / array.dtype().size(), &contiguous_strides(&unit))?;
        TensorView::strided(Arc::clone(&self.region), runs.offset, array.dtype(), shape, strides)
    }

    /// Checks the bookkeeping.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) if it is inconsistent.
    pub fn verify(&self) -> Result<()> {
        match self.with_slabs(Slabs::broken_invariant) {
            None => Ok(()),
            Some(broken) => Err(Error::state(format!("the arena is inconsistent: {broken}"))),
        }
    }
}

/// Units that one copy takes.
const COPIED_AT_ONCE: usize = 1 << 13;

/// Returns the whole units of a group as rows, and what copies them.
fn copier(region: &Arc<Region>, runs: PlaneRuns) -> Result<(LayerRows, Executor)> {
    /// Bytes for the numbers of a few copies.
    const RING_BYTES: usize = 4 * 2 * COPIED_AT_ONCE * size_of::<i32>();
    let plane = |runs: PlaneRuns| PlaneRows { runs, row: [1, runs.unit_bytes], dtype: DType::U8 };
    // All planes are in the first.
    let none = PlaneRuns { unit_step: 0, unit_bytes: 0, ..runs };
    let rows = LayerRows::new(region, [plane(runs), plane(none)])?;
    let space = IndexSpace { noun: "unit", len: runs.units };
    Ok((rows, Executor::new(region, 1, IndexSpaces::of_rows(space), RING_BYTES)?))
}

impl Pool for CacheArena {
    fn unit(&self) -> &'static str {
        "slab"
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(self.slabs.slab_bytes())
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn strict(&self) -> bool {
        self.config.strict
    }

    fn stats(&self) -> Stats {
        let (groups, owners) = (self.layout().groups().len(), self.owners());
        let slabs = &owners.slabs;
        let counts = || (0..groups).map(|group| slabs.counts(group));
        Stats::from([
            ("capacity", slabs.capacity()),
            ("available", slabs.empty()),
            ("in_use", slabs.capacity() - slabs.empty()),
            ("high_water", slabs.high_water()),
            ("units_in_use", counts().map(|counts| counts.in_use).sum()),
            ("dropped_frees", counts().map(|counts| counts.dropped_frees).sum()),
            ("bytes", self.mem_bytes()),
        ])
    }
}
