//! One arena for all allocations of a forward pass.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, ThreadId};

use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::sync::lock;
use crate::base::{DType, Device, Dims, Discarded, Error, ErrorKind, Result};
use crate::index::{AddressSpace, IndexState};
use crate::memory::{ALIGNMENT, Backend, Contents, Gpu, Region, RegionWriter, Stream};
use crate::tensor::TensorView;

use super::at_least_one;
use super::contract::{Occupancy, Piece, Pool, Stats};

/// A byte that yields NaN in every supported float dtype, and -1 in every signed int.
const POISON: u8 = 0xff;

/// The shape of a [`Workspace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceConfig {
    /// Bytes of the arena.
    pub arena_bytes: usize,
    /// Whether the arena is filled with NaN at each reset.
    pub poison: bool,
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workspace")
            .field("device", &self.device)
            .field("arena_bytes", &self.config.arena_bytes)
            .finish_non_exhaustive()
    }
}

/// An arena of fixed size and address, whose tensors are all taken back at once by a reset.
///
/// It belongs to one thread from its first tensor until its reset: calls of other threads are errors. Between
/// [`Workspace::enter`] and [`Workspace::leave`] a framework's allocator can take segments of it.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{DType, Dims};
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{Workspace, WorkspaceConfig};
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let workspace = Workspace::new(&WorkspaceConfig { arena_bytes: 1024, poison: false }, &host).unwrap();
/// let shape = Dims::new(&[100]).unwrap();
/// let first = workspace.empty(shape, DType::F32, Stream::DEFAULT).unwrap();
/// assert!(workspace.empty(Dims::new(&[200]).unwrap(), DType::F32, Stream::DEFAULT).is_err());
/// assert!(workspace.reset(Stream::DEFAULT).unwrap());
/// let again = workspace.empty(shape, DType::F32, Stream::DEFAULT).unwrap();
/// assert_eq!(first.address(), again.address());
/// ```
pub struct Workspace {
    device: Device,
    config: WorkspaceConfig,
    /// `None` after `close`.
    shared: RankedMutex<Option<Arc<SharedArena>>>,
}

/// The part of a workspace that segments keep alive.
#[derive(Debug)]
struct SharedArena {
    region: Arc<Region>,
    state: RankedMutex<ArenaState>,
}

#[derive(Debug)]
struct ArenaState {
    arena: AddressSpace,
    owner: Option<ThreadId>,
    /// Nesting depth of `enter`.
    entered: usize,
    /// Number of segments that a framework holds.
    segments: usize,
    /// The last failed allocation since `enter`.
    refused: Option<Error>,
    order: StreamOrder,
    /// The host's writer of the arena.
    writer: RegionWriter,
}

/// The streams whose work must precede the reuse of memory.
#[derive(Debug, Default)]
struct StreamOrder<S = Stream> {
    /// Streams that may still use memory that was given back.
    before: Vec<S>,
    /// Streams already ordered after all of `before`.
    after: Vec<S>,
    /// Streams that may use memory that is taken now.
    users: Vec<S>,
}

impl StreamOrder {
    /// Orders `stream`, which takes memory, after the streams that used memory that was given back.
    fn take(&mut self, gpu: &Arc<Gpu>, stream: Stream) -> Result<()> {
        if !self.is_ordered(stream) {
            gpu.make_stream_wait(&self.before, stream)?;
        }
        self.record_take(stream);
        Ok(())
    }
}

impl<S: Copy + PartialEq> StreamOrder<S> {
    /// Returns whether work on `stream` is already ordered after all of `before`.
    fn is_ordered(&self, stream: S) -> bool {
        self.after.contains(&stream)
    }

    /// Records that `stream` takes memory, and is ordered after all of `before`.
    fn record_take(&mut self, stream: S) {
        for streams in [&mut self.after, &mut self.users] {
            if !streams.contains(&stream) {
                streams.push(stream);
            }
        }
    }

    /// Records that a part of the memory was given back. Streams may still use the rest, and their later work
    /// has to precede the reuse of that.
    fn give_part_back(&mut self) {
        for &stream in &self.users {
            if !self.before.contains(&stream) {
                self.before.push(stream);
            }
        }
        self.after.clear();
    }

    /// Records that all memory was given back.
    fn give_all_back(&mut self) {
        if self.after.is_empty() {
            self.give_part_back();
        } else {
            // Each of `after` is one of these, and waits for the streams that are dropped here.
            self.before = std::mem::take(&mut self.users);
        }
        self.users.clear();
        self.after.clear();
    }
}

impl SharedArena {
    fn state(&self) -> RankedGuard<'_, ArenaState> {
        self.state.lock()
    }

    /// Cuts `bytes` from the arena for work on `stream`.
    fn take(&self, state: &mut ArenaState, bytes: usize, stream: Stream) -> Result<Range<usize>> {
        let Some(range) = state.arena.take_last(bytes) else {
            let largest = state.arena.longest() / ALIGNMENT * ALIGNMENT;
            return Err(Error::new(
                ErrorKind::WorkspaceExhausted,
                format!(
                    "{bytes} bytes asked for, {} left in one piece in the workspace arena on {} ({} of {} bytes in use)",
                    largest,
                    self.region.device(),
                    state.arena.used(),
                    state.arena.capacity()
                ),
            )
            .with_asked(bytes)
            .with_available(largest));
        };
        if let Some(gpu) = self.region.gpu()
            && let Err(failure) = state.order.take(gpu, stream)
        {
            state.give_back(range);
            return Err(failure);
        }
        self.region.record_stream(stream);
        Ok(range)
    }

    /// Fills a range of the arena with `value`.
    fn fill(&self, state: &mut ArenaState, range: Range<usize>, value: u8, stream: Stream) -> Result<()> {
        match self.region.gpu() {
            Some(gpu) => gpu.fill(self.region.range(range.start, range.len())?, value, stream),
            None => state.writer.fill(range.start, range.len(), value),
        }
    }
}

impl ArenaState {
    /// Makes this thread the owner, or fails if another thread is.
    fn claim(&mut self) -> Result<()> {
        let here = thread::current().id();
        match self.owner {
            Some(owner) if owner != here => Err(Error::state(format!(
                "the workspace belongs to another thread ({owner:?}, this is {here:?}) until it resets it"
            ))),
            _ => {
                self.owner = Some(here);
                Ok(())
            }
        }
    }

    /// Frees a range that was taken and was not freed since.
    fn give_back(&mut self, range: Range<usize>) {
        self.arena.give_back(range).expect("the range is taken");
    }

    /// Gives up ownership, if no memory is in use.
    fn release_ownership(&mut self) {
        if self.entered == 0 && self.arena.used() == 0 {
            self.owner = None;
        }
    }
}

impl Workspace {
    /// Creates an arena from `backend`, with undefined contents.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for an arena of no bytes, the error of the backend if it runs out of memory.
    pub fn new(config: &WorkspaceConfig, backend: &Arc<dyn Backend>) -> Result<Self> {
        let arena_bytes = config.arena_bytes;
        at_least_one(&[("arena_bytes", arena_bytes)])?;
        let region = Region::with(Arc::clone(backend), arena_bytes, Contents::Undefined, Arc::default())?;
        let writer = RegionWriter::new(region);
        let region = Arc::clone(writer.region());
        let state = ArenaState {
            arena: AddressSpace::new(arena_bytes, ALIGNMENT)?,
            owner: None,
            entered: 0,
            segments: 0,
            refused: None,
            order: StreamOrder::default(),
            writer,
        };
        let shared = Arc::new(SharedArena { region, state: RankedMutex::new(LockRank::Arena, state) });
        Ok(Self {
            device: backend.device(),
            config: *config,
            shared: RankedMutex::new(LockRank::Workspace, Some(shared)),
        })
    }

    /// Returns the device of the arena.
    #[must_use]
    pub const fn device(&self) -> Device {
        self.device
    }

    /// Returns the number of bytes of the arena.
    #[must_use]
    pub const fn arena_bytes(&self) -> usize {
        self.config.arena_bytes
    }

    /// Returns whether the workspace is closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.lock().is_none()
    }

    /// Returns the bytes in use, and the largest number in use at once; 0 after it is closed.
    #[must_use]
    pub fn usage(&self) -> [usize; 2] {
        self.lock().as_ref().map_or([0; 2], |shared| {
            let state = shared.state();
            [state.arena.used(), state.arena.high_water()]
        })
    }

    /// Returns the taken and free pieces of the arena in order, as [`AddressSpace::pieces`]; empty after it is
    /// closed.
    #[must_use]
    pub fn pieces(&self) -> Vec<(Range<usize>, bool)> {
        self.lock().as_ref().map_or(Vec::new(), |shared| shared.state().arena.pieces())
    }

    fn lock(&self) -> RankedGuard<'_, Option<Arc<SharedArena>>> {
        self.shared.lock()
    }

    /// Calls `work` with the arena, as the owner.
    fn with<R>(&self, work: impl FnOnce(&Arc<SharedArena>, &mut ArenaState) -> Result<R>) -> Result<R> {
        let shared = self.lock();
        let shared = shared.as_ref().ok_or_else(|| Error::state("the workspace is closed"))?;
        as_owner(shared, work)
    }

    /// Returns a contiguous tensor in the arena, 256-byte aligned, for work on `stream`. Its elements are
    /// undefined.
    ///
    /// # Errors
    /// [`ErrorKind::WorkspaceExhausted`] when it does not fit, [`ErrorKind::Argument`] for a negative extent,
    /// [`ErrorKind::State`] for a thread that is not the owner and after it is closed, [`ErrorKind::Driver`]
    /// when a driver call fails.
    pub fn empty(&self, shape: Dims, dtype: DType, stream: Stream) -> Result<TensorView> {
        let bytes = shape.bytes(dtype)?;
        self.with(|shared, state| {
            let range = shared.take(state, bytes, stream)?;
            TensorView::contiguous_with_dims(Arc::clone(&shared.region), range.start, dtype, shape)
        })
    }

    /// Works like [`Workspace::empty`], with elements that are zero.
    ///
    /// # Errors
    /// See [`Workspace::empty`].
    pub fn zeros(&self, shape: Dims, dtype: DType, stream: Stream) -> Result<TensorView> {
        let bytes = shape.bytes(dtype)?;
        self.with(|shared, state| {
            let range = shared.take(state, bytes, stream)?;
            if let Err(failure) = shared.fill(state, range.start..range.start + bytes, 0, stream) {
                state.give_back(range);
                return Err(failure);
            }
            TensorView::contiguous_with_dims(Arc::clone(&shared.region), range.start, dtype, shape)
        })
    }

    /// Takes all memory back and gives up ownership. Returns `false`, and does nothing, while a framework
    /// holds segments.
    ///
    /// # Errors
    /// [`ErrorKind::State`] for a thread that is not the owner, between [`Workspace::enter`] and
    /// [`Workspace::leave`], and after it is closed; [`ErrorKind::Driver`] when filling it with NaN fails.
    pub fn reset(&self, stream: Stream) -> Result<bool> {
        self.with(|shared, state| {
            state.expect_left()?;
            if state.segments > 0 {
                return Ok(false);
            }
            if self.config.poison {
                if let Some(gpu) = shared.region.gpu() {
                    state.order.take(gpu, stream)?;
                }
                shared.fill(state, 0..self.config.arena_bytes, POISON, stream)?;
            }
            state.arena.reset();
            state.order.give_all_back();
            Ok(true)
        })
    }

    /// Closes the workspace. Live tensors and segments keep the memory of the arena.
    ///
    /// # Errors
    /// [`ErrorKind::State`] for a thread that is not the owner, and between [`Workspace::enter`] and
    /// [`Workspace::leave`].
    pub fn close(&self) -> Result<()> {
        let discarded = Discarded::new();
        let mut shared = self.lock();
        if let Some(arena) = &*shared {
            as_owner(arena, |_, state| state.expect_left())?;
        }
        if let Some(closed) = shared.take() {
            discarded.add(closed);
        }
        Ok(())
    }

    /// Lets [`take_segment`] take from this arena on this thread, until [`Workspace::leave`]. Can be nested.
    ///
    /// # Errors
    /// [`ErrorKind::State`] for a thread that is not the owner, and once it is closed.
    pub fn enter(&self) -> Result<()> {
        self.with(|shared, state| {
            state.entered += 1;
            state.refused = None;
            ENTERED.with_borrow_mut(|entered| entered.push(Arc::clone(shared)));
            Ok(())
        })
    }

    /// Undoes [`Workspace::enter`], and returns the last failed allocation, if any.
    ///
    /// # Errors
    /// [`ErrorKind::State`] without a matching [`Workspace::enter`].
    pub fn leave(&self) -> Result<Option<Error>> {
        self.with(|shared, state| {
            let entered = ENTERED.with_borrow_mut(|entered| entered.pop_if(|last| Arc::ptr_eq(last, shared)));
            if entered.is_none() {
                return Err(Error::state("the workspace was not entered last by this thread"));
            }
            state.entered -= 1;
            Ok(state.refused.take())
        })
    }
}

impl Pool for Workspace {
    fn unit(&self) -> &'static str {
        "byte"
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(1)
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn stats(&self) -> Stats {
        // In this order, because no memory of a closed workspace is in use.
        let capacity = if self.is_closed() { 0 } else { self.arena_bytes() };
        let [in_use, high_water] = self.usage();
        Stats::from([
            ("capacity", capacity),
            ("available", capacity - in_use),
            ("in_use", in_use),
            ("high_water", high_water),
            ("bytes", capacity),
        ])
    }

    /// Pieces have no holders: the workspace is reset as a whole.
    fn occupancy(&self) -> Occupancy {
        let piece = |(range, is_taken)| Piece {
            range,
            state: if is_taken { IndexState::Live } else { IndexState::Free },
            bytes: None,
            holders: Vec::new(),
        };
        Occupancy { pieces: self.pieces().into_iter().map(piece).collect(), lifetimes: Vec::new() }
    }
}

impl ArenaState {
    fn expect_left(&self) -> Result<()> {
        if self.entered == 0 {
            return Ok(());
        }
        Err(Error::state("the workspace is in use by `use()`"))
    }
}

/// Calls `work` with an arena, as its owner.
fn as_owner<R>(
    shared: &Arc<SharedArena>,
    work: impl FnOnce(&Arc<SharedArena>, &mut ArenaState) -> Result<R>,
) -> Result<R> {
    let mut state = shared.state();
    state.claim()?;
    let answer = work(shared, &mut state);
    state.release_ownership();
    answer
}

thread_local! {
    /// The arenas that this thread has entered, the innermost last.
    static ENTERED: RefCell<Vec<Arc<SharedArena>>> = const { RefCell::new(Vec::new()) };
}

/// The arenas and the bytes of segments, by address.
type Segments = BTreeMap<usize, (Arc<SharedArena>, Range<usize>)>;

/// Segments that frameworks hold.
static SEGMENTS: Mutex<Segments> = Mutex::new(BTreeMap::new());

/// Takes `bytes` from the arena that this thread has entered, for work on `stream`, and returns the address.
/// `None` if there is no arena on that device, too few bytes are left, or there is no stream but an error:
/// [`Workspace::leave`] returns the reason.
///
/// The memory stays valid until [`give_back_segment`], even after the workspace is closed.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::Device;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{Workspace, WorkspaceConfig, give_back_segment, take_segment};
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let workspace = Workspace::new(&WorkspaceConfig { arena_bytes: 1024, poison: false }, &host).unwrap();
/// assert_eq!(take_segment(256, Device::Cpu, Ok(Stream::DEFAULT)), None, "this thread has entered none");
/// workspace.enter().unwrap();
/// let address = take_segment(256, Device::Cpu, Ok(Stream::DEFAULT)).expect("there are 1,024 bytes");
/// assert!(workspace.leave().unwrap().is_none(), "nothing was refused");
/// give_back_segment(address);
/// ```
#[must_use]
pub fn take_segment(bytes: usize, device: Device, stream: Result<Stream>) -> Option<usize> {
    let shared = ENTERED.with_borrow(|entered| entered.last().cloned())?;
    if shared.region.device() != device {
        return None;
    }
    let mut state = shared.state();
    let range = match stream.and_then(|stream| shared.take(&mut state, bytes, stream)) {
        Ok(range) => range,
        Err(failure) => {
            state.refused = Some(failure);
            return None;
        }
    };
    state.refused = None;
    state.segments += 1;
    drop(state);
    let address = shared.region.address().as_ptr().addr() + range.start;
    segments().insert(address, (shared, range));
    Some(address)
}

/// Takes a segment back. Ignores an address without a segment.
pub fn give_back_segment(address: usize) {
    let Some((shared, range)) = segments().remove(&address) else { return };
    let mut state = shared.state();
    state.give_back(range);
    state.segments -= 1;
    if state.arena.used() == 0 {
        state.order.give_all_back();
    } else {
        state.order.give_part_back();
    }
    state.release_ownership();
}

fn segments() -> MutexGuard<'static, Segments> {
    lock(&SEGMENTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAMS: usize = 4;
    const PARTS: usize = 3;

    /// The number of operations of each stream that are known to be over.
    type Clock = [usize; STREAMS];

    /// A part of the memory.
    #[derive(Default)]
    struct Part {
        /// The stream that has taken it.
        taken_by: Option<usize>,
        /// The last operation of each stream on it.
        uses: Clock,
    }

    fn latest(one: &Clock, other: &Clock) -> Clock {
        std::array::from_fn(|stream| one[stream].max(other[stream]))
    }

    /// Takes, uses and gives back parts in a random order. Memory is taken only by streams whose work comes
    /// after each earlier use of it.
    #[test]
    fn every_use_precedes_the_next_taker() {
        let (mut order, mut random) = (StreamOrder::<usize>::default(), 1_u64);
        let (mut parts, mut clocks): ([Part; PARTS], _) = Default::default();
        let clocks: &mut [Clock; STREAMS] = &mut clocks;
        let mut without_wait = 0;
        for step in 0..200_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let choice = usize::try_from(random >> 40).expect("24 bits");
            let (stream, part) = (choice % STREAMS, choice / STREAMS % PARTS);
            let action = choice / STREAMS / PARTS % 16;
            match parts[part].taken_by {
                None => {
                    let is_ordered = order.is_ordered(stream);
                    if !is_ordered {
                        let seen = |known, &before: &usize| latest(&known, &clocks[before]);
                        clocks[stream] = order.before.iter().fold(clocks[stream], seen);
                    }
                    without_wait += usize::from(is_ordered);
                    order.record_take(stream);
                    let (uses, known) = (&parts[part].uses, &clocks[stream]);
                    assert_eq!(latest(uses, known), *known, "a use is not waited for in step {step}");
                    parts[part].taken_by = Some(stream);
                }
                Some(owner) if action > 4 => {
                    clocks[owner][owner] += 1;
                    parts[part].uses[owner] = clocks[owner][owner];
                }
                Some(_) => {
                    parts[part].taken_by = None;
                    if action == 0 {
                        for part in &mut parts {
                            part.taken_by = None;
                        }
                    }
                    if parts.iter().all(|part| part.taken_by.is_none()) {
                        order.give_all_back();
                    } else {
                        order.give_part_back();
                    }
                }
            }
        }
        assert!(without_wait > 1000, "{without_wait} takers were ordered already");
    }
}
