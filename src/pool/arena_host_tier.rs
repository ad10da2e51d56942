//! Host memory below the prefix cache of a [`CacheArena`]: a unit of any group in one piece each.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{
    ChunkId, DType, Device, Error, Id, Page, Result, run_blocking, try_collect, try_with_capacity, widen,
};
use crate::kernels::{BufferInfo, HostAccess, PageCopy, PagePair, Pieces, StagingArea};
use crate::layout::{CacheLayout, Group, GroupKind, Plane, SlabLayout, SlabOptions};
use crate::memory::{
    Backend, CopyDirection, Fingerprint, Gpu, PageLockSink, PageLocking, Stream, page_lock_steps,
    system_page_size,
};
use crate::transfer::{CopyQueue, Transfer};

use super::contract::{Pool, Stats};
use super::{CacheArena, CacheArenaConfig, at_least_one};

/// The shape of an [`ArenaHostTier`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaHostTierConfig {
    /// Bytes of host memory; what is behind the last whole slab is not allocated.
    pub tier_bytes: usize,
    /// Whether to page-lock the memory, for an arena on a device. Needs a backend such as [`MappedHost`].
    ///
    /// [`MappedHost`]: crate::memory::MappedHost
    pub pin_memory: bool,
    /// Number of threads that page-lock it.
    pub page_lock_threads: usize,
    /// Bytes of device memory through which a device copies to page-locked memory, at most three times those of the
    /// tier; 0 for none.
    pub staging_bytes: usize,
}

/// Host memory for units that an [`ArenaPrefixCache`](super::ArenaPrefixCache) has published: an arena of its own, whose
/// slabs belong to whichever group needs them. Each unit is one contiguous piece: all layers, one behind the other.
///
/// It has memory and copies; what is in it, and what goes first, a cache over the same layout knows. Copies run beside
/// their callers, in either direction one after the other: on a thread or, for an arena on a device, on a stream of
/// their own.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::DType;
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
/// use kvpool::memory::{Backend, Host};
/// use kvpool::pool::{ArenaHostTier, ArenaHostTierConfig, CacheArena, CacheArenaConfig};
/// let kv = ["k", "v"].map(|name| Plane::new(name, DType::BF16, &[2, 64]).unwrap());
/// let full = Group::new("full", GroupKind::Full, &[0, 1], kv.to_vec()).unwrap();
/// let config = CacheArenaConfig {
///     layout: CacheLayout::new("a model", 16, vec![full]).unwrap(),
///     arena_bytes: 1 << 20, floors: Vec::new(), slabs: SlabOptions::default(), strict: true,
/// };
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let arena = Arc::new(CacheArena::new(&config, &host).unwrap());
/// let config = ArenaHostTierConfig {
///     tier_bytes: 4 << 20, pin_memory: false, page_lock_threads: 1, staging_bytes: 0,
/// };
/// let tier = ArenaHostTier::new(&config, &arena, &host).unwrap();
/// assert_eq!(tier.piece_bytes(0), 2 * 2 * 16 * 2 * 64 * 2);
/// ```
pub struct ArenaHostTier {
    config: ArenaHostTierConfig,
    device: Arc<CacheArena>,
    /// The memory. Its groups are those of the device; each number of theirs is a piece.
    pieces: Arc<CacheArena>,
    /// The pieces of each group, copied or, once all of them are page-locked, accessed in place.
    copied: Vec<Pieces>,
    in_place: Option<Vec<Pieces>>,
    /// Device memory on the way down and on the way up.
    staging: Option<[Arc<StagingArea>; 2]>,
    down: CopyQueue,
    up: CopyQueue,
    page_locked: Arc<PageLocked>,
    /// Page-locking, until it is known to be over.
    locking: RankedMutex<Option<PageLocking>>,
    /// What each piece of each group has.
    contents: RankedMutex<Vec<Vec<Contents>>>,
    /// The number of pieces that are damaged.
    damaged: AtomicUsize,
    counts: RankedMutex<ArenaTierCounts>,
    notes: RankedMutex<Vec<String>>,
    /// Whether the tier belongs to a prefix cache.
    is_taken: AtomicBool,
}

/// Counts the bytes that are page-locked.
#[derive(Debug, Default)]
struct PageLocked(AtomicUsize);

impl PageLocked {
    fn bytes(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

impl PageLockSink for PageLocked {
    fn offer(&self, bytes: &Range<usize>, is_page_locked: bool) {
        if is_page_locked {
            self.0.fetch_add(bytes.len(), Ordering::AcqRel);
        }
    }

    fn end(&self) {}
}

/// What a piece has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contents {
    /// Nothing that anyone may read, or bytes on their way here.
    Unknown,
    /// Bytes with this fingerprint, unless something has damaged them.
    Complete(Fingerprint),
    /// Other bytes than those that came, or a copy that failed.
    Damaged,
}

/// Counts of what a tier did, in units' numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ArenaTierCounts {
    /// Copied here from the device.
    pub(super) written: usize,
    /// Copied back to the device.
    pub(super) loaded: usize,
    /// Not copied here because nothing could be given up for them.
    pub(super) skipped: usize,
    /// Of copies that failed.
    pub(super) failed: usize,
    /// Found with other bytes than those that came.
    pub(super) damaged: usize,
    /// Copied here from the store below.
    pub(super) fetched: usize,
    /// Not taken by the store below.
    pub(super) unstored: usize,
}

/// Copies between units of the device and pieces, by group.
pub(super) type UnitCopies = Vec<Vec<PagePair<Page>>>;

/// A copy of units to pieces.
#[derive(Debug)]
pub(super) struct UnitWrite {
    pub(super) transfer: Arc<Transfer>,
    copies: UnitCopies,
    /// The fingerprints, as soon as the thread that copies has taken them. A device takes none.
    fingerprints: Arc<OnceLock<Vec<Vec<Fingerprint>>>>,
}

/// Whether a piece has the bytes that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Soundness {
    Sound,
    /// They are on their way here.
    Arriving,
    Damaged,
}

impl ArenaHostTier {
    /// Creates a tier for units of `device`, in memory of `backend`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) if the bytes are too few for the layout; the error of the
    /// backend if it runs out of memory.
    pub fn new(
        config: &ArenaHostTierConfig,
        device: &Arc<CacheArena>,
        backend: &Arc<dyn Backend>,
    ) -> Result<Self> {
        at_least_one(&[("page_lock_threads", config.page_lock_threads)])?;
        let arena = CacheArenaConfig {
            layout: piece_layout(device)?,
            arena_bytes: config.tier_bytes,
            floors: Vec::new(),
            // Slabs are page-locked one by one.
            slabs: SlabOptions { granularity: system_page_size(), ..SlabOptions::default() },
            strict: true,
        };
        let pieces = CacheArena::new(&arena, backend)
            .map_err(|failure| failure.with_prefix("the host tier of an arena"))?;
        let groups = device.layout().groups().len();
        let gpu = device.gpu().cloned();
        let of_group = |reach| {
            let of_group = |group| {
                let (rows, runs) = (device.unit_rows(group), pieces.slabs().unit_runs(group));
                Pieces::new(Arc::clone(pieces.region()), reach, rows, 1, runs.unit_step, runs.units)
            };
            (0..groups).map(of_group).collect::<Result<Vec<_>>>()
        };
        let copied = of_group(HostAccess::Copied)?;
        let locks = gpu.as_ref().filter(|_| config.pin_memory);
        let mut in_place = locks.map(|_| of_group(HostAccess::InPlace)).transpose()?;
        let staging = in_place.as_mut().map(|in_place| {
            staging_areas(config, gpu.as_ref(), pieces.mem_bytes(), in_place, pieces.slabs())
        });
        let staging = staging.transpose()?.flatten();
        let page_locked = Arc::new(PageLocked::default());
        let locking = locks.map(|gpu| {
            let slab = pieces.slabs().slab_bytes();
            let steps = page_lock_steps((1..=pieces.mem_bytes() / slab).map(|slabs| slabs * slab));
            let sink: Weak<dyn PageLockSink> = Arc::<PageLocked>::downgrade(&page_locked);
            PageLocking::start(gpu, pieces.region(), steps, config.page_lock_threads, sink)
        });
        let mut contents = try_with_capacity(groups)?;
        for pieces in &copied {
            contents.push(try_collect((0..pieces.count()).map(|_| Contents::Unknown))?);
        }
        Ok(Self {
            config: *config,
            device: Arc::clone(device),
            pieces: Arc::new(pieces),
            copied,
            in_place,
            staging,
            down: CopyQueue::new(CopyDirection::Out, gpu.clone()),
            up: CopyQueue::new(CopyDirection::In, gpu),
            page_locked,
            locking: RankedMutex::new(LockRank::TierPageLocking, locking),
            contents: RankedMutex::new(LockRank::TierPages, contents),
            damaged: AtomicUsize::new(0),
            counts: RankedMutex::new(LockRank::TierCounts, ArenaTierCounts::default()),
            notes: RankedMutex::new(LockRank::TierNotes, Vec::new()),
            is_taken: AtomicBool::new(false),
        })
    }

    /// Returns the config of the tier.
    #[must_use]
    pub const fn config(&self) -> &ArenaHostTierConfig {
        &self.config
    }

    /// Returns the arena of the units.
    #[must_use]
    pub const fn arena(&self) -> &Arc<CacheArena> {
        &self.device
    }

    /// Returns the arena of the pieces.
    pub(super) const fn pieces(&self) -> &Arc<CacheArena> {
        &self.pieces
    }

    /// Returns the memory as one buffer, whose rows are slabs.
    pub fn buffer_infos(&self) -> impl Iterator<Item = BufferInfo> {
        self.pieces.buffer_infos()
    }

    /// Returns the number of bytes of the memory.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.pieces.mem_bytes()
    }

    /// Returns the bytes of a unit of a group; of a layer's, if it is a state that is placed layer by layer.
    ///
    /// # Panics
    /// If there is no such group.
    #[must_use]
    pub fn piece_bytes(&self, group: usize) -> usize {
        self.copied[group].piece(0).len()
    }

    /// Returns the number of bytes of device memory through which copies come here and go back.
    #[must_use]
    pub fn staging_bytes(&self) -> usize {
        self.staging.iter().flatten().map(|area| area.bytes()).sum()
    }

    /// Waits up to `timeout` for the end of page-locking. Returns whether it has ended.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) in a forked child, where it never ends.
    pub fn wait_page_locked(&self, timeout: Duration) -> Result<bool> {
        self.device.gpu().map_or(Ok(()), |gpu| gpu.check_process())?;
        Ok(PageLocking::wait(&mut self.locking.lock(), timeout))
    }

    /// Makes this the tier of a prefix cache, until [`Self::detach`].
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) if another one has it.
    pub(super) fn attach(&self) -> Result<()> {
        if self.is_taken.swap(true, Ordering::AcqRel) {
            return Err(Error::config("the host tier belongs to another prefix cache"));
        }
        Ok(())
    }

    /// Ends [`Self::attach`].
    pub(super) fn detach(&self) {
        self.is_taken.store(false, Ordering::Release);
    }

    /// Returns the pieces of all groups, as the device reaches them now.
    fn reached(&self) -> &[Pieces] {
        let in_place = self.in_place.as_ref().filter(|_| self.page_locked.bytes() == self.mem_bytes());
        in_place.unwrap_or(&self.copied)
    }

    /// Records that pieces were taken, numbers by group, whose bytes are yet to come.
    pub(super) fn expect(&self, taken: &[Vec<u32>]) {
        let mut contents = self.contents.lock();
        for (contents, pieces) in contents.iter_mut().zip(taken) {
            for &piece in pieces {
                self.put(&mut contents[widen(piece)], Contents::Unknown);
            }
        }
    }

    /// Starts to copy units to pieces, behind the work on `after`. The units must not change and the pieces not be read
    /// until the copy is over and [`Self::complete`].
    ///
    /// # Errors
    /// See [`CopyQueue::start`]; no copy is in flight then.
    pub(super) fn write(&self, copies: UnitCopies, after: Stream) -> Result<UnitWrite> {
        self.set(&copies, Contents::Unknown);
        let fingerprints = Arc::new(OnceLock::new());
        let (device, pieces, pairs) = (Arc::clone(&self.device), self.reached().to_vec(), copies.clone());
        let taken = self.device.gpu().is_none().then(|| Arc::clone(&fingerprints));
        let transfer = self.down.start(1, &[after], Vec::new(), move |_, stream| {
            copy_units(&device, &pieces, PageCopy::Out, &pairs, stream)?;
            if let Some(taken) = &taken {
                let _ = taken.set(fingerprints_of(&pieces, &pairs));
            }
            Ok(())
        })?;
        Ok(UnitWrite { transfer, copies, fingerprints })
    }

    /// Starts to copy pieces to units, behind the work on `after`.
    ///
    /// # Errors
    /// See [`CopyQueue::start`]; no copy is in flight then.
    pub(super) fn load(&self, copies: UnitCopies, after: Stream) -> Result<Arc<Transfer>> {
        let (device, pieces) = (Arc::clone(&self.device), self.reached().to_vec());
        self.up.start(1, &[after], Vec::new(), move |_, stream| {
            copy_units(&device, &pieces, PageCopy::In, &copies, stream)
        })
    }

    /// Ends a write that is over. If it `is_sound`, its pieces can be read from now on.
    pub(super) fn complete(&self, write: &UnitWrite, is_sound: bool) {
        let UnitWrite { transfer, copies, fingerprints } = write;
        if !is_sound {
            if let Some(cause) = transfer.failure() {
                self.note_failure(cause);
            }
            self.give_up(copies);
            return;
        }
        let known = run_blocking(|| fingerprints.get_or_init(|| fingerprints_of(&self.copied, copies)));
        let mut contents = self.contents.lock();
        for ((contents, pairs), known) in contents.iter_mut().zip(copies).zip(known) {
            for (pair, &fingerprint) in pairs.iter().zip(known) {
                self.put(&mut contents[widen(pair.piece.number())], Contents::Complete(fingerprint));
            }
        }
        drop(contents);
        self.count(|counts| counts.written += count_of(copies));
    }

    /// Marks the pieces of a copy that failed, or could not begin.
    pub(super) fn give_up(&self, copies: &UnitCopies) {
        self.set(copies, Contents::Damaged);
        self.count(|counts| counts.failed += count_of(copies));
    }

    /// Sets what a piece has, under the lock of all.
    fn put(&self, place: &mut Contents, contents: Contents) {
        let before = std::mem::replace(place, contents);
        self.damaged.fetch_add(usize::from(contents == Contents::Damaged), Ordering::AcqRel);
        self.damaged.fetch_sub(usize::from(before == Contents::Damaged), Ordering::AcqRel);
    }

    fn set(&self, copies: &UnitCopies, to: Contents) {
        let mut contents = self.contents.lock();
        for (contents, pairs) in contents.iter_mut().zip(copies) {
            for pair in pairs {
                self.put(&mut contents[widen(pair.piece.number())], to);
            }
        }
    }

    /// Compares the bytes of pieces of a group with those that came, by their fingerprints. The caller keeps the pieces.
    /// One that is found damaged is counted and noted by the `name` of its position once.
    pub(super) fn inspect(
        &self,
        group: usize,
        pieces: &[u32],
        name: impl Fn(usize) -> String,
    ) -> Vec<Soundness> {
        let before: Vec<Contents> = {
            let contents = &self.contents.lock()[group];
            pieces.iter().map(|&piece| contents[widen(piece)]).collect()
        };
        // What is on its way is not read.
        let is_there = |contents: &Contents| matches!(contents, Contents::Complete(_));
        let seeded = pieces.iter().zip(&before).filter(|(_, contents)| is_there(contents));
        let seeded: Vec<_> = seeded.map(|(&piece, _)| (ChunkId::new(piece), seed_of(piece))).collect();
        let now = run_blocking(|| self.copied[group].fingerprints(seeded.into_iter()));
        let mut now = now.into_iter();
        let soundness = |(at, contents)| match contents {
            Contents::Unknown => Soundness::Arriving,
            Contents::Damaged => Soundness::Damaged,
            Contents::Complete(came) if now.next() == Some(came) => Soundness::Sound,
            Contents::Complete(_) => {
                self.record_damage(group, pieces[at], &name(at));
                Soundness::Damaged
            }
        };
        before.into_iter().enumerate().map(soundness).collect()
    }

    #[cold]
    fn record_damage(&self, group: usize, piece: u32, name: &str) {
        self.put(&mut self.contents.lock()[group][widen(piece)], Contents::Damaged);
        self.count(|counts| counts.damaged += 1);
        self.note(format!(
            "{name} of an ArenaHostTier was damaged in host memory: it is not used, and requests compute it"
        ));
    }

    /// Returns the bytes of a piece in the memory of [`Self::pieces`].
    pub(super) fn range(&self, group: usize, piece: u32) -> Range<usize> {
        self.copied[group].piece(piece)
    }

    /// Records that the bytes of pieces have come from the store, numbers by group. Nothing copies to them now.
    pub(super) fn arrive(&self, pieces: &[Vec<u32>]) {
        let known = pieces.iter().zip(&self.copied).map(|(pieces, memory)| {
            memory.fingerprints(pieces.iter().map(|&piece| (ChunkId::new(piece), seed_of(piece))))
        });
        let known: Vec<_> = known.collect();
        let mut contents = self.contents.lock();
        for ((contents, pieces), known) in contents.iter_mut().zip(pieces).zip(known) {
            for (&piece, fingerprint) in pieces.iter().zip(known) {
                self.put(&mut contents[widen(piece)], Contents::Complete(fingerprint));
            }
        }
        drop(contents);
        self.count(|counts| counts.fetched += pieces.iter().map(Vec::len).sum::<usize>());
    }

    /// Returns whether any piece is damaged.
    pub(super) fn has_damage(&self) -> bool {
        self.damaged.load(Ordering::Acquire) > 0
    }

    /// Returns whether a piece is known to be damaged.
    pub(super) fn is_damaged(&self, group: usize, piece: u32) -> bool {
        self.contents.lock()[group][widen(piece)] == Contents::Damaged
    }

    /// Takes the causes of copies that failed since the last call, and the names of what was damaged, in words.
    #[must_use]
    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut *self.notes.lock())
    }

    /// Notes why units were not copied here.
    pub(super) fn note_failure(&self, cause: &Error) {
        self.note(format!("units were not copied to an ArenaHostTier: {cause}"));
    }

    fn note(&self, text: String) {
        /// Notes that are kept for whoever takes them.
        const NOTES: usize = 64;
        let mut notes = self.notes.lock();
        if notes.len() < NOTES && !notes.contains(&text) {
            notes.push(text);
        }
    }

    pub(super) fn count(&self, add: impl FnOnce(&mut ArenaTierCounts)) {
        add(&mut self.counts.lock());
    }

    /// Returns the statistics: slabs (`capacity`, `available`, `in_use`), `units` in use; units that were `written` here,
    /// `loaded` from here, `skipped` because nothing could be given up for them, of copies that `failed`, `damaged` in
    /// host memory, `fetched` from the store and `unstored` by it; `page_locked` bytes, `bytes`, and `staging_bytes` on
    /// the device.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let counts = *self.counts.lock();
        let arena = self.pieces.stats();
        let of = |name| arena.get(name).unwrap_or(0);
        Stats::from([
            ("capacity", of("capacity")),
            ("available", of("available")),
            ("in_use", of("in_use")),
            ("units", of("units_in_use")),
            ("written", counts.written),
            ("loaded", counts.loaded),
            ("skipped", counts.skipped),
            ("failed", counts.failed),
            ("damaged", counts.damaged),
            ("fetched", counts.fetched),
            ("unstored", counts.unstored),
            ("page_locked", self.page_locked.bytes()),
            ("bytes", self.mem_bytes()),
            ("staging_bytes", self.staging_bytes()),
        ])
    }
}

/// Enqueues copies between units of the device and pieces on a stream.
fn copy_units(
    device: &CacheArena,
    pieces: &[Pieces],
    direction: PageCopy,
    copies: &UnitCopies,
    stream: Stream,
) -> Result<()> {
    let mut groups = copies.iter().enumerate().filter(|(_, pairs)| !pairs.is_empty());
    groups.try_for_each(|(group, pairs)| device.copy_pieces(group, &pieces[group], direction, pairs, stream))
}

fn count_of(copies: &UnitCopies) -> usize {
    copies.iter().map(Vec::len).sum()
}

/// Returns the seed of the fingerprint of a piece.
fn seed_of(piece: u32) -> u64 {
    u64::from(piece)
}

/// Takes the fingerprints of pieces, to which nothing copies meanwhile.
fn fingerprints_of(pieces: &[Pieces], copies: &UnitCopies) -> Vec<Vec<Fingerprint>> {
    let of_group = |(pieces, pairs): (&Pieces, &Vec<PagePair<Page>>)| {
        pieces.fingerprints(pairs.iter().map(|pair| (pair.piece, seed_of(pair.piece.number()))))
    };
    pieces.iter().zip(copies).map(of_group).collect()
}

/// Returns the layout of an arena in which each number of a unit of `device` is one piece.
fn piece_layout(device: &CacheArena) -> Result<CacheLayout> {
    let groups = device.layout().groups().iter().enumerate().map(|(number, group)| {
        let bytes = device.unit_rows(number).piece(1)?.bytes();
        let piece = Plane::new("piece", DType::U8, &[bytes])?;
        // Pieces have no tokens to be counted by.
        Group::new(group.name(), GroupKind::State, &[0], vec![piece])
    });
    CacheLayout::new(device.layout().model(), 1, groups.collect::<Result<Vec<_>>>()?)
}

/// Creates the staging areas of a tier, and lets pieces take them.
fn staging_areas(
    config: &ArenaHostTierConfig,
    gpu: Option<&Arc<Gpu>>,
    mem_bytes: usize,
    in_place: &mut [Pieces],
    slabs: &SlabLayout,
) -> Result<Option<[Arc<StagingArea>; 2]>> {
    let bytes = mem_bytes.saturating_mul(3).min(config.staging_bytes);
    let is_in_place = in_place.iter().all(|pieces| pieces.reach() == HostAccess::InPlace);
    let Some(gpu) = gpu.filter(|_| bytes > 0 && is_in_place) else { return Ok(None) };
    let areas = StagingArea::of_tier(gpu, bytes)?;
    for (pieces, slab) in in_place.iter_mut().zip(slabs.groups()) {
        // No copy crosses the end of a slab, at which another registration may begin.
        *pieces = pieces.clone().staged([&areas[0], &areas[1]], slab.numbers);
    }
    Ok(Some(areas))
}

impl Pool for ArenaHostTier {
    fn unit(&self) -> &'static str {
        "slab"
    }

    /// Returns false: what is in a tier is a prefix cache's.
    fn hands_out(&self) -> bool {
        false
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(self.pieces.slabs().slab_bytes())
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn stats(&self) -> Stats {
        Self::stats(self)
    }
}

impl fmt::Debug for ArenaHostTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaHostTier").field("config", &self.config).finish_non_exhaustive()
    }
}
