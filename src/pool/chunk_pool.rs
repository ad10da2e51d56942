//! Fixed-size chunks in one region, for offloaded K and V.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::base::bounded::narrow;
use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::sync::Condvar;
use crate::base::{
    ChunkId, DType, Device, Dims, Error, Id, KeyMap, Result, bytes_of, try_with_capacity, widen,
};
use crate::index::{BadFree, BadFrees, IndexHandle, Ledgered, OnBadFree, RefCounts, Returning, on_bad_frees};
use crate::kernels::{Direction, pack};
use crate::memory::{
    ALIGNMENT, Backend, BorrowedTensor, Event, Gpu, HostWait, PageLockSink, PageLocking, Region, Stream,
    page_lock_steps, system_page_size,
};
use crate::tensor::TensorView;

use super::contract::{Occupancy, Pool, Stats};
use super::{at_least_one, fits_int32};

/// The shape of a [`ChunkPool`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkConfig {
    /// Number of chunks.
    pub num_chunks: usize,
    /// Shape of a chunk.
    pub chunk_shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Whether to page-lock host memory if there is a driver. Needs a backend such as [`MappedHost`].
    ///
    /// [`MappedHost`]: crate::memory::MappedHost
    pub pin_memory: bool,
    /// Number of threads that page-lock host memory. Keep it small: the driver delays other calls meanwhile.
    pub page_lock_threads: usize,
    /// Whether an invalid free is an error.
    pub strict: bool,
}

/// The result of an allocation that does not wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// The chunks, as many as were asked for.
    Taken(Vec<IndexHandle<ChunkId>>),
    /// There are not enough chunks.
    Full,
    /// Page-locking or copies in flight can still provide enough chunks.
    Later,
}

/// Fixed-size chunks, numbered from 0, each with a reference count, handed out last in, first out.
///
/// Host memory is page-locked in steps by [`ChunkPool::start_page_locking`]; chunks can be taken as soon as
/// their step is done.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::DType;
/// use kvpool::memory::{Backend, Host};
/// use kvpool::pool::{Attempt, ChunkConfig, ChunkPool};
/// let config = ChunkConfig {
///     num_chunks: 2, chunk_shape: vec![2, 8], dtype: DType::F16, pin_memory: false, page_lock_threads: 1,
///     strict: false,
/// };
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let pool = ChunkPool::new(&config, &host).unwrap();
/// let Attempt::Taken(chunks) = pool.try_allocate(2).unwrap() else { panic!("there are two") };
/// assert_eq!(pool.try_allocate(1).unwrap(), Attempt::Full);
/// assert_eq!(pool.free(chunks[0]).unwrap().dropped(), 0);
/// assert_eq!(pool.free(chunks[0]).unwrap().dropped(), 1);
/// ```
pub struct ChunkPool {
    config: ChunkConfig,
    shape: Dims,
    chunk_bytes: usize,
    /// Bytes from one chunk to the next.
    stride: usize,
    region: Arc<Region>,
    /// The device through which the memory is page-locked, if any.
    page_lock_gpu: Option<Arc<Gpu>>,
    state: RankedMutex<ChunkStates>,
    /// Signals that chunks were offered, a copy has ended, or page-locking has ended.
    changed: Condvar,
}

impl fmt::Debug for ChunkPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkPool")
            .field("num_chunks", &self.config.num_chunks)
            .field("chunk_shape", &self.config.chunk_shape)
            .field("dtype", &self.config.dtype)
            .field("device", &self.region.device())
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct ChunkStates {
    chunks: Ledgered<RefCounts<ChunkId>>,
    /// Chunks with copies that may be in flight.
    copies: KeyMap<ChunkId, ChunkCopies>,
    /// The freed chunks among `copies`.
    returning: Vec<Returning<ChunkId>>,
    /// Whether page-locking, which offers more chunks, is in progress.
    is_page_locking: bool,
    page_locked: usize,
    /// Whether a step could not be page-locked.
    is_partly_pageable: bool,
}

/// Copies of one chunk.
#[derive(Debug, Default)]
struct ChunkCopies {
    /// Calls that have not returned.
    calls: usize,
    /// Events after enqueued copies.
    done: Vec<Arc<Event>>,
}

impl ChunkCopies {
    /// Polls the events, and returns whether all copies are complete.
    fn poll(&mut self) -> Result<bool> {
        while let Some(event) = self.done.last() {
            if !event.has_passed()? {
                return Ok(false);
            }
            self.done.pop();
        }
        Ok(self.calls == 0)
    }
}

impl ChunkStates {
    /// Puts back the freed chunks whose copies are complete.
    fn settle(&mut self) -> Result<()> {
        let mut at = 0;
        while let Some(index) = self.returning.get(at).map(Returning::index) {
            if self.copies.get_mut(&index).map_or(Ok(true), ChunkCopies::poll)? {
                self.copies.remove(&index);
                self.chunks.give_back(self.returning.remove(at));
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    /// Makes a chunk without references available, at once or when its copies are complete.
    fn give_back(&mut self, returning: Returning<ChunkId>) {
        let index = returning.index();
        // After a driver error, the copies are polled again when the chunk is needed.
        let is_over = self.copies.get_mut(&index).is_none_or(|copies| matches!(copies.poll(), Ok(true)));
        if is_over {
            self.copies.remove(&index);
            self.chunks.give_back(returning);
        } else {
            self.returning.push(returning);
        }
    }
}

impl ChunkPool {
    /// Allocates the memory from `backend`. If [`ChunkPool::uses_page_locking`], chunks become available as
    /// [`ChunkPool::start_page_locking`] proceeds, otherwise at once.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a size of 0 and sizes whose bytes overflow; the error of the backend if it
    /// runs out of memory.
    ///
    /// [`ErrorKind::Config`]: crate::base::ErrorKind::Config
    pub fn new(config: &ChunkConfig, backend: &Arc<dyn Backend>) -> Result<Self> {
        at_least_one(&[("num_chunks", config.num_chunks), ("page_lock_threads", config.page_lock_threads)])?;
        if config.chunk_shape.contains(&0) {
            return Err(Error::config(format!(
                "chunk_shape is {:?}; no extent may be 0",
                config.chunk_shape
            )));
        }
        let count = fits_int32("num_chunks", Some(config.num_chunks))?;
        let chunk_bytes = bytes_of("a chunk", &config.chunk_shape, config.dtype)?;
        let shape = Dims::of(&config.chunk_shape)?;
        let stride = chunk_bytes.next_multiple_of(ALIGNMENT);
        let bytes = bytes_of("all chunks", &[config.num_chunks, stride], DType::U8)?;
        let region = Arc::new(Region::new(Arc::clone(backend), bytes)?);
        let mut state = ChunkStates::default();
        state.chunks.extend(count)?;
        let wants_page_locking = config.pin_memory && backend.device() == Device::Cpu;
        let page_lock_gpu = wants_page_locking.then(|| Gpu::any().ok()).flatten();
        if page_lock_gpu.is_none() {
            state.chunks.offer(0..count);
        }
        let (state, changed) = (RankedMutex::new(LockRank::ChunkPool, state), Condvar::new());
        Ok(Self { config: config.clone(), shape, chunk_bytes, stride, region, page_lock_gpu, state, changed })
    }

    /// Returns whether the memory is page-locked, or will be.
    #[must_use]
    pub const fn uses_page_locking(&self) -> bool {
        self.page_lock_gpu.is_some()
    }

    /// Page-locks the memory step by step on a few threads and offers the chunks of each step, until the pool
    /// is dropped. A single step is complete on return.
    ///
    /// Call it once. Returns `None` if the pool is not [`ChunkPool::uses_page_locking`].
    pub fn start_page_locking(self: &Arc<Self>) -> Option<PageLocking> {
        let gpu = self.page_lock_gpu.as_ref()?;
        self.state().is_page_locking = true;
        let sink: Weak<dyn PageLockSink> = Arc::<Self>::downgrade(self);
        let threads = self.config.page_lock_threads;
        Some(PageLocking::start(gpu, &self.region, self.page_lock_steps(), threads, sink))
    }

    /// Returns the bytes of each step of page-locking: as many chunks in all steps but the last.
    fn page_lock_steps(&self) -> Vec<Range<usize>> {
        // A group of this many chunks begins and ends at a page.
        let page = system_page_size();
        let together = page / (1usize << self.stride.trailing_zeros()).min(page);
        let ends = (together..).step_by(together).take_while(|end| *end < self.config.num_chunks);
        page_lock_steps(ends.chain([self.config.num_chunks]).map(|end| end * self.stride))
    }

    /// Returns the number of chunks that are page-locked together: no copy by the driver crosses a multiple.
    pub(super) fn chunks_together(&self) -> usize {
        self.page_lock_steps().first().map_or(1, |step| (step.len() / self.stride.max(1)).max(1))
    }

    /// Waits up to `timeout` for the end of page-locking. Returns whether it has ended.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) in a forked child, where it never ends.
    pub fn wait_page_locked(&self, timeout: Duration) -> Result<bool> {
        let begin = Instant::now();
        let mut state = self.state();
        while state.is_page_locking {
            self.check_process()?;
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            state = state.wait_timeout(&self.changed, left);
        }
        Ok(true)
    }

    /// Returns the config of the pool.
    #[must_use]
    pub const fn config(&self) -> &ChunkConfig {
        &self.config
    }

    /// Returns the number of bytes of a chunk.
    #[must_use]
    pub const fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// Returns the number of bytes of the region.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.region.bytes()
    }

    /// Returns the number of bytes from one chunk to the next.
    #[must_use]
    pub const fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the device of the chunks.
    #[must_use]
    pub fn device(&self) -> Device {
        self.region.device()
    }

    /// Returns the memory.
    pub(super) const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns whether every chunk that was offered is page-locked.
    pub(super) fn is_all_page_locked(&self) -> bool {
        self.uses_page_locking() && !self.state().is_partly_pageable
    }

    fn state(&self) -> RankedGuard<'_, ChunkStates> {
        self.state.lock()
    }

    /// Calls `look` with the ownership of chunks and the number of page-locked chunks.
    pub fn counts<R>(&self, look: impl FnOnce(&Ledgered<RefCounts<ChunkId>>, usize) -> R) -> R {
        let state = self.state();
        look(&state.chunks, state.page_locked)
    }

    /// Takes `count` chunks, each with one reference, or none of them, without waiting.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when polling copies fails.
    pub fn try_allocate(&self, count: usize) -> Result<Attempt> {
        Self::attempt(&mut self.state(), count)
    }

    /// Works like [`ChunkPool::try_allocate`] for one chunk, without a list.
    ///
    /// # Errors
    /// See [`ChunkPool::try_allocate`].
    pub fn try_allocate_one(&self) -> Result<Option<IndexHandle<ChunkId>>> {
        let mut state = self.state();
        if !state.returning.is_empty() {
            state.settle()?;
        }
        Ok(state.chunks.take())
    }

    /// Takes up to `count` chunks, each with one reference: fewer if there are fewer now.
    ///
    /// # Errors
    /// See [`ChunkPool::try_allocate`].
    pub(super) fn try_allocate_up_to(&self, count: usize) -> Result<Vec<IndexHandle<ChunkId>>> {
        let mut state = self.state();
        if !state.returning.is_empty() {
            state.settle()?;
        }
        let mut taken = try_with_capacity(count.min(state.chunks.ready()))?;
        taken.extend(std::iter::from_fn(|| state.chunks.take()).take(count));
        Ok(taken)
    }

    fn attempt(state: &mut ChunkStates, count: usize) -> Result<Attempt> {
        if !state.returning.is_empty() {
            state.settle()?;
        }
        if state.chunks.ready() >= count {
            let mut taken = try_with_capacity(count)?;
            taken.extend((0..count).filter_map(|_| state.chunks.take()));
            return Ok(Attempt::Taken(taken));
        }
        let coming = state.chunks.available() + state.returning.len();
        Ok(if coming >= count && (state.is_page_locking || !state.returning.is_empty()) {
            Attempt::Later
        } else {
            Attempt::Full
        })
    }

    /// Works like [`ChunkPool::try_allocate`], but waits, as long as they can provide enough chunks, for
    /// page-locking, up to about `timeout`, and for copies of freed chunks.
    ///
    /// # Errors
    /// See [`ChunkPool::try_allocate`], and in a forked child, where neither makes progress.
    pub fn allocate(&self, count: usize, timeout: Duration) -> Result<Attempt> {
        /// Interval for polling copies while page-locking may provide chunks first.
        const POLL: Duration = Duration::from_micros(200);
        let begin = Instant::now();
        let mut state = self.state();
        loop {
            let attempt = Self::attempt(&mut state, count)?;
            if attempt != Attempt::Later || begin.elapsed() >= timeout {
                return Ok(attempt);
            }
            self.check_process()?;
            let copied = state
                .returning
                .iter()
                .find_map(|returning| state.copies.get(&returning.index())?.done.last().cloned());
            state = match copied {
                Some(copied) if !state.is_page_locking => {
                    drop(state);
                    copied.wait()?;
                    self.state()
                }
                _ => state.wait_timeout(&self.changed, POLL),
            };
        }
    }

    /// Checks that this process can still use the device that page-locks.
    pub(super) fn check_process(&self) -> Result<()> {
        self.page_lock_gpu.as_ref().map_or(Ok(()), |gpu| gpu.check_process())
    }

    /// Returns the number of references to a chunk; 0 after it was freed.
    #[must_use]
    pub fn references(&self, chunk: IndexHandle<ChunkId>) -> u32 {
        self.state().chunks.references(chunk)
    }

    /// Adds a reference.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) when the chunk was freed.
    pub fn retain(&self, chunk: IndexHandle<ChunkId>) -> Result<()> {
        if self.state().chunks.retain(chunk) { Ok(()) } else { Err(stale_chunk_error(chunk)) }
    }

    /// Drops a reference. Dropping the last one frees the chunk as soon as its copies are complete. Drops and
    /// reports the release of a freed chunk.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`] when the release is invalid.
    ///
    /// [`ErrorKind::IndexOwnership`]: crate::base::ErrorKind::IndexOwnership
    pub fn release(&self, chunk: IndexHandle<ChunkId>) -> Result<BadFrees> {
        self.give_up(&mut self.state(), chunk)
    }

    /// Frees a chunk to which the caller has the only reference. Drops and reports the free of a chunk that
    /// was freed or has further references.
    ///
    /// # Errors
    /// See [`ChunkPool::release`].
    pub fn free(&self, chunk: IndexHandle<ChunkId>) -> Result<BadFrees> {
        let mut state = self.state();
        if state.chunks.references(chunk) > 1 {
            return self.refuse(&mut state, chunk, BadFree::StillReferenced);
        }
        if state.chunks.references(chunk) == 1 && state.chunks.is_held_by_others(chunk.index()) {
            return self.refuse(&mut state, chunk, BadFree::OtherOwner);
        }
        self.give_up(&mut state, chunk)
    }

    fn give_up(&self, state: &mut ChunkStates, chunk: IndexHandle<ChunkId>) -> Result<BadFrees> {
        match state.chunks.release(chunk) {
            Ok(last) => {
                if let Some(returning) = last {
                    state.give_back(returning);
                }
                Ok(BadFrees::default())
            }
            Err(reason) => self.refuse(state, chunk, reason),
        }
    }

    /// Reports the free of a chunk of another pool.
    ///
    /// # Errors
    /// See [`ChunkPool::release`].
    pub fn free_foreign(&self, chunk: IndexHandle<ChunkId>) -> Result<BadFrees> {
        self.refuse(&mut self.state(), chunk, BadFree::Foreign)
    }

    fn refuse(
        &self,
        state: &mut ChunkStates,
        chunk: IndexHandle<ChunkId>,
        reason: BadFree,
    ) -> Result<BadFrees> {
        let index = i64::from(chunk.index().number());
        let bad = match reason {
            // The history of the index is that of this pool's chunk.
            BadFree::Foreign => BadFrees::of(index, reason),
            reason => state.chunks.bad_free(index, reason),
        };
        let bad = on_bad_frees(bad, OnBadFree::of(self.config.strict), "chunk", 1, state.chunks.capacity())?;
        state.chunks.count_dropped();
        Ok(bad)
    }

    /// Returns the chunk's first elements as a tensor of `shape`, or all of it, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] when the chunk was freed, [`ErrorKind::Argument`] for a shape that does not
    /// fit.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::Stale`]: crate::base::ErrorKind::Stale
    pub fn tensor(&self, chunk: IndexHandle<ChunkId>, shape: Option<Dims>) -> Result<TensorView> {
        if self.references(chunk) == 0 {
            return Err(stale_chunk_error(chunk));
        }
        let shape = match shape {
            Some(shape) => self.fitting(shape)?,
            None => self.shape,
        };
        let offset = widen(chunk.index().number()) * self.stride;
        TensorView::contiguous_with_dims(Arc::clone(&self.region), offset, self.config.dtype, shape)
    }

    fn fitting(&self, shape: Dims) -> Result<Dims> {
        let bytes = shape.bytes(self.config.dtype)?;
        if bytes > self.chunk_bytes {
            return Err(Error::argument(format!(
                "shape {:?} of {} takes {bytes} bytes, a chunk has {}",
                shape.as_slice(),
                self.config.dtype,
                self.chunk_bytes
            )));
        }
        Ok(shape)
    }

    /// Copies the elements of `tensor`, in order, to the beginning of a chunk or from there.
    ///
    /// Between host memory the copy is complete on return. With a GPU on either side it is enqueued on
    /// `stream`, a stream of that GPU, and complete when the returned event has passed; until then the tensor
    /// must stay alive and the chunk is not handed out again.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] when the chunk was freed; [`ErrorKind::Type`] for another dtype,
    /// [`ErrorKind::Argument`] for more elements than a chunk has, and for memory or a stream of another GPU;
    /// [`ErrorKind::Driver`] when a driver call fails.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    /// [`ErrorKind::Stale`]: crate::base::ErrorKind::Stale
    /// [`ErrorKind::Type`]: crate::base::ErrorKind::Type
    pub fn copy(
        &self,
        chunk: IndexHandle<ChunkId>,
        tensor: &BorrowedTensor<'_>,
        direction: Direction,
        stream: Stream,
    ) -> Result<Option<Arc<Event>>> {
        if tensor.dtype() != self.config.dtype {
            return Err(Error::wrong_type(format!(
                "the tensor is {}, the chunk {}",
                tensor.dtype(),
                self.config.dtype
            )));
        }
        let gpu = match (tensor.device(), self.region.gpu()) {
            (Device::Cpu, gpu) => gpu.cloned(),
            (Device::Cuda(ordinal), None) => Some(Gpu::open(ordinal)?),
            (Device::Cuda(_), Some(gpu)) => {
                tensor.check_on(gpu.device(), "the tensor")?;
                Some(Arc::clone(gpu))
            }
        };
        if let Some(gpu) = &gpu {
            gpu.check_own(stream)?;
            gpu.check_not_capturing(stream, "a copy of a chunk, whose end is waited for,")?;
        }
        let packed = self.tensor(chunk, Some(Dims::of(&[tensor.shape().numel()])?))?;
        self.begin_copy(chunk)?;
        let copied = pack(&packed.borrow(), tensor, direction, gpu.as_ref(), stream);
        if gpu.is_some() {
            self.region.record_stream(stream);
            tensor.record_stream(stream);
        }
        let done = match &gpu {
            Some(gpu) => {
                let bytes = tensor.shape().numel() * tensor.dtype().size();
                let wait = HostWait::for_copy_of(bytes);
                Event::record_for(gpu, stream, wait).map(|event| Some(Arc::new(event)))
            }
            None => Ok(None),
        };
        let done = copied.and(done);
        if let (Err(_), Some(gpu)) = (&done, &gpu) {
            // After an error the caller keeps nothing alive, so enqueued work must end before this call
            // returns.
            let _ = gpu.synchronize(stream);
        }
        self.end_copy(chunk.index(), done.as_ref().ok().and_then(Option::as_ref));
        done
    }

    fn begin_copy(&self, chunk: IndexHandle<ChunkId>) -> Result<()> {
        let mut state = self.state();
        if state.chunks.references(chunk) == 0 {
            return Err(stale_chunk_error(chunk));
        }
        let copies = state.copies.entry(chunk.index()).or_default();
        copies.poll()?;
        copies.calls += 1;
        Ok(())
    }

    fn end_copy(&self, index: ChunkId, done: Option<&Arc<Event>>) {
        let mut state = self.state();
        if let Some(copies) = state.copies.get_mut(&index) {
            copies.calls -= 1;
            copies.done.extend(done.cloned());
            if copies.calls == 0
                && copies.done.is_empty()
                && state.returning.iter().all(|returning| returning.index() != index)
            {
                state.copies.remove(&index);
            }
        }
        drop(state);
        self.changed.notify_all();
    }
}

impl Pool for ChunkPool {
    fn unit(&self) -> &'static str {
        "chunk"
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(self.chunk_bytes())
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn strict(&self) -> bool {
        self.config().strict
    }

    fn stats(&self) -> Stats {
        self.counts(|chunks, page_locked| Stats::of_counts(chunks).and("page_locked", page_locked))
            .and("bytes", self.mem_bytes())
    }

    fn occupancy(&self) -> Occupancy {
        self.counts(|chunks, _| Occupancy::of_equal_units(chunks.spans(), chunks.ledger(), 1))
    }

    fn keep_ledger(&self) {
        self.state().chunks.open_ledger();
    }
}

impl PageLockSink for ChunkPool {
    fn offer(&self, bytes: &Range<usize>, is_page_locked: bool) {
        let chunks = narrow(bytes.start / self.stride)..narrow(bytes.end / self.stride);
        let mut state = self.state();
        state.page_locked += if is_page_locked { chunks.len() } else { 0 };
        state.is_partly_pageable |= !is_page_locked;
        state.chunks.offer(chunks);
        drop(state);
        self.changed.notify_all();
    }

    fn end(&self) {
        self.state().is_page_locking = false;
        self.changed.notify_all();
    }
}

fn stale_chunk_error(chunk: IndexHandle<ChunkId>) -> Error {
    Error::stale(format!("chunk {} was freed", chunk.index()))
}
