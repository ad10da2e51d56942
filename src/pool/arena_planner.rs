//! Plans scheduler steps over a layout: one call takes the units of all groups and builds the metadata of attention
//! kernels for each.

mod arrays;
mod batch;
mod claim;
mod plan_array;
mod publish;
mod state;

use std::fmt;
use std::sync::Arc;

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{Device, Discarded, Error, IndexVec, RequestRow, Result, try_collect, try_with_capacity};
use crate::cache::Tokens;
use crate::index::UnitGrowth;
use crate::memory::{Backend, Stream};
use crate::tensor::TensorView;

use self::claim::ArenaClaim;
pub use self::plan_array::PlanArray;
use self::state::{NotPlanned, PlannerState};
use super::batch_args::padded_size;
use super::{ArenaLease, CacheArena, make_room};

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
/// The bookkeeping of requests is on the host. Page tables and metadata on a device are written from it, with one
/// launch and at most one copy, without waiting. On the CPU the arrays are written directly.
///
/// All calls are atomic and thread-safe. A call that is short asks those that can give units back
/// ([`ReclaimUnits`](super::ReclaimUnits)).
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{DType, IndexVec};
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{ArenaPlan, ArenaPlanner, ArenaPlannerConfig, CacheArena, CacheArenaConfig, PlanArray};
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
/// planner.extend(&row, &[0], &[16], None, stream).unwrap().unwrap();
/// let plan: ArenaPlan =
///     planner.decode(&row, &IndexVec::I64(vec![17]), 1, None, stream).unwrap().unwrap();
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
    /// [`ErrorKind::Config`] when a size is 0, or numbers of units or tokens may be beyond int32; the error of the
    /// backend if it runs out of memory.
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
        self.with(|state, _| state.mem_bytes())
    }

    /// Returns the number of plans made so far.
    #[must_use]
    pub fn plans(&self) -> usize {
        self.with(|state, _| state.plans)
    }

    /// Returns the number of rows in use, of requests that have units, and of their tokens.
    #[must_use]
    pub fn totals(&self) -> (usize, usize, usize) {
        self.with(|state, _| {
            let (requests, tokens) = state.tables.totals();
            (state.rows_in_use(), requests, tokens)
        })
    }

    /// Calls `act` with the state, which has ended the requests of earlier epochs of the arena, under its lock.
    fn with<R>(&self, act: impl FnOnce(&mut PlannerState, &Discarded) -> R) -> R {
        let discarded = Discarded::new();
        let mut state = self.state.lock();
        state.enter(&self.arena, &discarded);
        act(&mut state, &discarded)
    }

    /// Takes `count` rows for requests without tokens, or returns `None` and takes none.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot list them.
    pub fn alloc(&self, count: usize) -> Result<Option<Vec<RequestRow>>> {
        self.with(|state, _| state.alloc(count))
    }

    /// Takes the units for positions `prefix..seq` of each request, in every group, and builds the metadata. Returns
    /// `None` if there are not enough: then only units behind windows and chunks were freed.
    ///
    /// `prefixes` has an entry for each request. A new request may begin with a lease, possibly of length 0,
    /// which it keeps until it is finished. Its states become copies of the lease's snapshots, on `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for lengths that do not follow from those of the requests or their leases, and for a
    /// batch of more requests or tokens than the planner has room for; [`ErrorKind::State`] for another request's
    /// lease; [`ErrorKind::Index`] for a row or a length beyond the tables; [`ErrorKind::IndexOwnership`] for a row
    /// that is not allocated; [`ErrorKind::Stale`] for a request whose tokens ended with a clear of the arena;
    /// [`ErrorKind::Driver`] when a driver call fails. Nothing is taken.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    /// [`ErrorKind::Index`]: crate::base::ErrorKind::Index
    /// [`ErrorKind::IndexOwnership`]: crate::base::ErrorKind::IndexOwnership
    /// [`ErrorKind::Stale`]: crate::base::ErrorKind::Stale
    /// [`ErrorKind::State`]: crate::base::ErrorKind::State
    pub fn extend(
        &self,
        rows: &IndexVec,
        prefix_lens: &[i64],
        seq_lens: &[i64],
        prefixes: Option<&[Option<Arc<ArenaLease>>]>,
        stream: Stream,
    ) -> Result<Option<ArenaPlan>> {
        if prefixes.is_some_and(|prefixes| prefixes.len() != rows.len()) {
            let (rows, given) = (rows.len(), prefixes.map_or(0, <[_]>::len));
            return Err(Error::argument(format!(
                "a batch of {rows} rows and {given} prefixes; there must be an entry for each"
            )));
        }
        let size = [rows.len(), 0];
        let claims = self.claim(rows, prefixes.unwrap_or_default())?;
        self.plan(size, &claims, stream, |state| state.extensions(rows, prefix_lens, seq_lens, &claims))
    }

    /// Claims the leases of a batch, by position. The lease that a request has already is not claimed again.
    fn claim(
        &self,
        rows: &IndexVec,
        prefixes: &[Option<Arc<ArenaLease>>],
    ) -> Result<Vec<Option<ArenaClaim>>> {
        if prefixes.iter().all(Option::is_none) {
            return Ok(Vec::new());
        }
        let has = self.with(|state, _| {
            let rows = state.resolve(rows)?;
            let has = |(row, lease): (&RequestRow, &Option<Arc<ArenaLease>>)| {
                lease.as_ref().is_some_and(|lease| state.has_lease(*row, lease))
            };
            try_collect(rows.iter().zip(prefixes).map(has))
        })?;
        let mut claims = try_with_capacity(prefixes.len())?;
        for (lease, has) in prefixes.iter().zip(has) {
            let lease = lease.as_ref().filter(|_| !has);
            claims.push(lease.map(|lease| ArenaClaim::new(lease, &self.arena)).transpose()?);
        }
        Ok(claims)
    }

    /// Extends each request by `tokens_per_req` tokens, like [`ArenaPlanner::extend`]. Requests of the padding row pad
    /// the batch to the smallest size of `pad_to` that it fits.
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
        self.plan(size, &[], stream, |state| state.decodes(rows, seq_lens, tokens_per_req))
    }

    /// Plans a batch, and asks those that can give units back while it is short.
    fn plan(
        &self,
        size: [usize; 2],
        claims: &[Option<ArenaClaim>],
        stream: Stream,
        growths: impl Fn(&mut PlannerState) -> Result<Vec<UnitGrowth>>,
    ) -> Result<Option<ArenaPlan>> {
        make_room(self.config.max_tokens, |numbers| {
            self.state.lock().executor().backpressure_event(numbers)
        })?;
        if !claims.is_empty() {
            self.arena.make_copy_room()?;
        }
        loop {
            let planned = self.with(|state, discarded| {
                let growths = growths(state)?;
                state.plan(&self.arena, growths, claims, size, stream, discarded)
            })?;
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
        self.with(|state, _| state.truncate(&self.arena, rows, seq_lens))
    }

    /// Publishes the first tokens of a request, in whole pages, through its lease: their units become the cache's.
    /// Where others have published the same tokens in between, the request goes on with their units, and its own are
    /// freed. With `snapshot`, copies of its states are kept too, on `stream`, if there are units for them. Returns the
    /// tokens of the lease.
    ///
    /// # Errors
    /// [`ErrorKind::State`] for a request without a lease, or that another thread publishes at this moment;
    /// [`ErrorKind::Argument`] for fewer tokens than the lease has, for more than the request has, for a snapshot of
    /// fewer, and for tokens that are not those of the lease, as in [`ArenaLease::publish`]; those of
    /// [`ArenaPlanner::extend`] for a row. Nothing is changed.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::State`]: crate::base::ErrorKind::State
    pub fn publish(&self, row: i64, tokens: &dyn Tokens, snapshot: bool, stream: Stream) -> Result<usize> {
        if snapshot {
            self.arena.make_copy_room()?;
        }
        let mut handed = self.with(|state, _| state.hand_over(row, tokens.count(), snapshot))?;
        let taken = if snapshot { handed.take_snapshots(&self.arena, stream) } else { Ok(Vec::new()) };
        let published = taken.and_then(|taken| {
            let published = handed.lease.publish_held(tokens, &handed.units);
            published.inspect_err(|_| handed.free(&self.arena, &taken))
        });
        let length = self.with(|state, _| match published {
            Ok(published) => {
                state.record_published(&handed, &published.units);
                Ok(published.length)
            }
            Err(error) => {
                state.take_back(&self.arena, &handed);
                Err(error)
            }
        })?;
        handed.lease.save(tokens, stream);
        Ok(length)
    }

    /// Frees all units and the rows of requests, and ends their leases. `seq_lens`, if given, must match the requests.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a length that does not match; those of
    /// [`ArenaPlanner::extend`] for rows. Nothing is changed.
    pub fn finish(&self, rows: &IndexVec, seq_lens: Option<&IndexVec>) -> Result<()> {
        self.with(|state, discarded| state.finish(&self.arena, rows, seq_lens, discarded))
    }

    /// Returns an array of a plan on the device, without a copy. `None` if the planner does not build it, or the group
    /// has none.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) after a later plan.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn array(&self, plan: &ArenaPlan, array: PlanArray) -> Result<Option<TensorView>> {
        self.with(|state, _| state.array(plan, array))
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
        self.with(|state, _| state.host_array(plan, array))
    }

    /// Returns the tokens of a request that have units.
    ///
    /// # Errors
    /// Those of [`ArenaPlanner::extend`] for a row.
    pub fn seq_len(&self, row: i64) -> Result<u32> {
        self.with(|state, _| state.seq_len(row))
    }

    /// Returns the positions and the units that a request has in a group, in their order.
    ///
    /// # Errors
    /// Those of [`ArenaPlanner::extend`] for a row.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn units(&self, row: i64, group: usize) -> Result<Vec<(u32, u32)>> {
        self.with(|state, _| state.units(row, group))
    }

    /// Checks the bookkeeping.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) if it is inconsistent.
    pub fn verify(&self) -> Result<()> {
        self.with(|state, _| state.verify(&self.arena))
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
