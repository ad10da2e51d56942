//! Plans scheduler steps over a layout: one call takes the units of all groups and builds the metadata of attention
//! kernels for each.

mod arrays;
mod batch;
mod plan_array;
mod state;

use std::fmt;
use std::sync::Arc;

use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{Device, IndexVec, RequestRow, Result};
use crate::index::UnitGrowth;
use crate::memory::{Backend, Stream};
use crate::tensor::TensorView;

pub use self::plan_array::PlanArray;
use self::state::{NotPlanned, PlannerState, padded_size};
use super::{CacheArena, make_room};

/// Sizes of an [`ArenaPlanner`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaPlannerConfig {
    /// Maximum number of requests at once.
    pub max_requests: usize,
    /// Maximum number of tokens of a request.
    pub max_context_len: usize,
    /// Maximum number of requests in a batch, including padding.
    pub max_batch_size: usize,
    /// Maximum number of new tokens in a batch, including padding.
    pub max_tokens: usize,
    /// Whether to build [`PlanArray::KvIndices`].
    pub kv_indices: bool,
    /// Whether to build [`PlanArray::BlockTable`].
    pub block_table: bool,
}

/// A planned step. Its arrays lie in the planner's memory, and the next plan overwrites them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaPlan {
    number: usize,
    /// The planner's count of changes at the time of the plan.
    changes: u64,
    /// Number of requests, without padding.
    pub batch_size: usize,
    /// Number of requests, including padding.
    pub padded_batch_size: usize,
    /// Number of new tokens, without padding.
    pub num_tokens: usize,
    /// Number of new tokens, including padding.
    pub padded_num_tokens: usize,
    /// Largest number of new tokens of a request.
    pub max_seqlen_q: usize,
    /// Largest number of tokens of a request.
    pub max_seqlen_k: usize,
}

/// Plans the steps of a scheduler over a [`CacheArena`]: one call takes the units of every group, frees those behind
/// windows and chunks, and builds the metadata of each group.
///
/// The bookkeeping of requests is on the host. Page tables and metadata on a device are written from it, with one launch
/// and at most one copy, without waiting. On the CPU the arrays are written directly.
///
/// All calls are atomic and thread-safe. A call that is short asks those that can give units back
/// ([`ReclaimUnits`](super::ReclaimUnits)).
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{DType, IndexVec};
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{ArenaPlanner, ArenaPlannerConfig, CacheArena, CacheArenaConfig, PlanArray};
/// let k = || vec![Plane::new("k", DType::U8, &[8]).unwrap()];
/// let layout = CacheLayout::new("m", 4, vec![
///     Group::new("full", GroupKind::Full, &[0], k()).unwrap(),
///     Group::new("window", GroupKind::Window { tokens: 4, sinks: 0 }, &[1], k()).unwrap(),
/// ]).unwrap();
/// let config = CacheArenaConfig {
///     layout, arena_bytes: 4096, floors: Vec::new(), slabs: SlabOptions::default(), strict: true,
/// };
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let arena = Arc::new(CacheArena::new(&config, &host).unwrap());
/// let planner = ArenaPlanner::new(
///     ArenaPlannerConfig {
///         max_requests: 4, max_context_len: 64, max_batch_size: 4, max_tokens: 64, kv_indices: true,
///         block_table: true,
///     },
///     &host,
///     arena,
/// ).unwrap();
/// let row = IndexVec::I64(vec![planner.alloc(1).unwrap().unwrap()[0].into()]);
/// planner.extend(&row, &[0], &[16], stream).unwrap().unwrap();
/// let plan = planner.decode(&row, &IndexVec::I64(vec![17]), 1, None, stream).unwrap().unwrap();
/// let units = |group| planner.array(&plan, PlanArray::KvIndices(group)).unwrap().unwrap().shape().as_slice()[0];
/// assert_eq!((units(0), units(1)), (5, 2));
/// ```
pub struct ArenaPlanner {
    state: RankedMutex<PlannerState>,
    arena: Arc<CacheArena>,
    config: ArenaPlannerConfig,
}

impl ArenaPlanner {
    /// Returns a planner for requests that take their units from `arena`, with memory from `backend`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when a size is 0, or numbers of units or tokens may be beyond int32; the error of the backend
    /// if it runs out of memory.
    ///
    /// [`ErrorKind::Config`]: crate::base::ErrorKind::Config
    pub fn new(
        config: ArenaPlannerConfig,
        backend: &Arc<dyn Backend>,
        arena: Arc<CacheArena>,
    ) -> Result<Self> {
        let state = PlannerState::new(config, backend, &arena)?;
        Ok(Self { state: RankedMutex::new(LockRank::Planner, state), arena, config })
    }

    /// Returns the sizes of the planner.
    #[must_use]
    pub const fn config(&self) -> ArenaPlannerConfig {
        self.config
    }

    /// Returns the arena of the units.
    #[must_use]
    pub const fn arena(&self) -> &Arc<CacheArena> {
        &self.arena
    }

    /// Returns the device of the arrays.
    #[must_use]
    pub fn device(&self) -> Device {
        self.arena.device()
    }

    /// Returns the number of bytes of all arrays.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.state().mem_bytes()
    }

    /// Returns the number of plans made so far.
    #[must_use]
    pub fn plans(&self) -> usize {
        self.state().plans
    }

    /// Returns the number of rows in use, of requests that have units, and of their tokens.
    #[must_use]
    pub fn totals(&self) -> (usize, usize, usize) {
        let state = self.state();
        let (requests, tokens) = state.tables.totals();
        (state.rows_in_use(), requests, tokens)
    }

    /// Locks the state, which has ended the requests of earlier epochs of the arena.
    fn state(&self) -> RankedGuard<'_, PlannerState> {
        let mut state = self.state.lock();
        state.enter(&self.arena);
        state
    }

    /// Takes `count` rows for requests without tokens, or returns `None` and takes none.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot list them.
    pub fn alloc(&self, count: usize) -> Result<Option<Vec<RequestRow>>> {
        self.state().alloc(count)
    }

    /// Takes the units for positions `prefix..seq` of each request, in every group, and builds the metadata. Returns
    /// `None` if there are not enough: then only units behind windows and chunks were freed.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for lengths that do not follow from those of the requests, and for a batch of more requests
    /// or tokens than the planner has room for; [`ErrorKind::Index`] for a row or a length beyond the tables;
    /// [`ErrorKind::IndexOwnership`] for a row that is not allocated; [`ErrorKind::Stale`] for a request whose tokens
    /// ended with a clear of the arena; [`ErrorKind::Driver`] when a driver call fails. Nothing is taken.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    /// [`ErrorKind::Index`]: crate::base::ErrorKind::Index
    /// [`ErrorKind::IndexOwnership`]: crate::base::ErrorKind::IndexOwnership
    /// [`ErrorKind::Stale`]: crate::base::ErrorKind::Stale
    pub fn extend(
        &self,
        rows: &IndexVec,
        prefix_lens: &[i64],
        seq_lens: &[i64],
        stream: Stream,
    ) -> Result<Option<ArenaPlan>> {
        let size = [rows.len(), 0];
        self.plan(size, stream, |state| state.extensions(rows, prefix_lens, seq_lens))
    }

    /// Extends each request by `tokens_per_req` tokens, like [`ArenaPlanner::extend`]. Requests of the padding row pad the
    /// batch to the smallest size of `pad_to` that it fits.
    ///
    /// # Errors
    /// See [`ArenaPlanner::extend`]; also [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) when no size of
    /// `pad_to` fits.
    pub fn decode(
        &self,
        rows: &IndexVec,
        seq_lens: &IndexVec,
        tokens_per_req: usize,
        pad_to: Option<&[usize]>,
        stream: Stream,
    ) -> Result<Option<ArenaPlan>> {
        let size = [padded_size(rows.len(), pad_to)?, tokens_per_req];
        self.plan(size, stream, |state| state.decodes(rows, seq_lens, tokens_per_req))
    }

    /// Plans a batch, and asks those that can give units back while it is short.
    fn plan(
        &self,
        size: [usize; 2],
        stream: Stream,
        growths: impl Fn(&mut PlannerState) -> Result<Vec<UnitGrowth>>,
    ) -> Result<Option<ArenaPlan>> {
        make_room(self.config.max_tokens, |numbers| {
            self.state.lock().executor().backpressure_event(numbers)
        })?;
        loop {
            let planned = {
                let mut state = self.state();
                let growths = growths(&mut state)?;
                state.plan(&self.arena, growths, size, stream)?
            };
            match planned {
                Ok(plan) => return Ok(Some(plan)),
                Err(NotPlanned::Short(wanted)) if !self.arena.reclaim(&wanted, stream)? => return Ok(None),
                Err(_) => (),
            }
        }
    }

    /// Shrinks requests to `seq_lens` tokens, and frees the units of the others.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if a request has fewer tokens, or the units that the next token sees were freed behind a
    /// window; and those of [`ArenaPlanner::extend`] for rows. Nothing is changed.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    pub fn truncate(&self, rows: &IndexVec, seq_lens: &IndexVec) -> Result<()> {
        self.state().truncate(&self.arena, rows, seq_lens)
    }

    /// Frees all units and the rows of requests. `seq_lens`, if given, must match the requests.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a length that does not match; those of
    /// [`ArenaPlanner::extend`] for rows. Nothing is changed.
    pub fn finish(&self, rows: &IndexVec, seq_lens: Option<&IndexVec>) -> Result<()> {
        self.state().finish(&self.arena, rows, seq_lens)
    }

    /// Returns an array of a plan on the device, without a copy. `None` if the planner does not build it, or the group has
    /// none.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) after a later plan.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn array(&self, plan: &ArenaPlan, array: PlanArray) -> Result<Option<TensorView>> {
        self.state().array(plan, array)
    }

    /// Returns an array of a plan in host memory: a copy, if the plan is on a device.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) after a later plan and, for an array of a group on a device,
    /// after a change of the units of a request.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn host_array(&self, plan: &ArenaPlan, array: PlanArray) -> Result<Option<TensorView>> {
        self.state().host_array(plan, array)
    }

    /// Returns the tokens of a request that have units.
    ///
    /// # Errors
    /// Those of [`ArenaPlanner::extend`] for a row.
    pub fn seq_len(&self, row: i64) -> Result<u32> {
        self.state().seq_len(row)
    }

    /// Returns the positions and the units that a request has in a group, in their order.
    ///
    /// # Errors
    /// Those of [`ArenaPlanner::extend`] for a row.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn units(&self, row: i64, group: usize) -> Result<Vec<(u32, u32)>> {
        self.state().units(row, group)
    }

    /// Checks the bookkeeping.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) if it is inconsistent.
    pub fn verify(&self) -> Result<()> {
        self.state().verify()
    }
}

/// Requests end with their planner.
impl Drop for ArenaPlanner {
    fn drop(&mut self) {
        self.state.get_mut().end(&self.arena);
    }
}

impl fmt::Debug for ArenaPlanner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaPlanner").field("config", &self.config).finish_non_exhaustive()
    }
}
