//! Plans a scheduler step in one call: slots, request table and the metadata of attention kernels.

mod claim;
mod growing;
mod leases;
mod metadata;
mod plan;
mod state;

use std::fmt;
use std::sync::{Arc, Weak};

use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{Device, Discarded, Id, IndexVec, Page, RequestRow, Result, try_with_capacity, widen};
use crate::index::BadFrees;
use crate::memory::{Backend, Stream};
use crate::tensor::TensorView;

use self::claim::Claim;
pub use self::plan::{Field, Plan, PlannerConfig};
use self::state::{PlannerState, Pools, Release};
use super::prefix_cache::{FinishedRequests, LeaseId, LeaseKeeper, LeasedRequest, LeasingRequest};
use super::req_to_token_pool::RequestTable;
use super::shortage::{Obtainable, Reclaim, TakeResult};
use super::{Fence, Lease, Notice, ReqToTokenPool, TokenToKvPoolAllocator, make_room};

/// The requests of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// The row of each request in the table.
    pub rows: &'a IndexVec,
    /// Tokens that each request has now, or the length of its cached prefix.
    pub prefix_lens: &'a [i64],
    /// Tokens that each request will have.
    pub seq_lens: &'a [i64],
    /// Cached prefixes; empty, or one entry per request.
    pub prefixes: &'a [Prefix],
}

/// The cached prefix of a new request.
#[derive(Clone, Debug)]
pub enum Prefix {
    /// No prefix. Requests that have tokens have this, too, or their own lease.
    None,
    /// Slots of whole pages, of which the request becomes another owner.
    Slots(IndexVec),
    /// A lease, which the request keeps until it is finished. It may be of length 0: the request publishes
    /// through it. A request that has tokens may name its own lease again, which changes nothing.
    Leased(Arc<Lease>),
}

/// Plans the steps of a scheduler: one call takes the slots, writes the table and builds the metadata.
///
/// The bookkeeping of requests is on the host. The table and the metadata on a device are written from it,
/// with one launch and at most one copy, without waiting. On the CPU the tensors are written directly. The
/// cost grows with the new tokens and the requests; only [`Field::KvIndices`] is rewritten whole in every
/// step.
///
/// All calls are atomic and thread-safe. [`TokenToKvPoolAllocator`] describes what happens when there are not
/// enough slots.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::IndexVec;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{
///     AllocatorConfig, Batch, BatchPlanner, Field, PlannerConfig, ReqToTokenConfig, ReqToTokenPool,
///     TokenToKvPoolAllocator,
/// };
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let config = AllocatorConfig::new(64);
/// let slots = Arc::new(TokenToKvPoolAllocator::new(&config, &host).unwrap());
/// let config = ReqToTokenConfig::new(4, 32);
/// let table = Arc::new(ReqToTokenPool::new(&config, &host).unwrap());
/// let config = PlannerConfig::new(4, 16);
/// let planner = BatchPlanner::new(&config, &host, slots, Arc::clone(&table)).unwrap();
/// let rows = table.alloc(2, stream).unwrap().unwrap();
/// let rows = IndexVec::I64(rows.into_iter().map(i64::from).collect());
/// let batch = Batch { rows: &rows, prefix_lens: &[0, 0], seq_lens: &[3, 5], prefixes: &[] };
/// let plan = planner.extend(batch, stream).unwrap().unwrap();
/// assert_eq!((plan.num_tokens, plan.max_seqlen_k), (8, 5));
/// assert_eq!(planner.field(&plan, Field::QoIndptr).unwrap().unwrap().shape().as_slice(), [3]);
/// ```
pub struct BatchPlanner {
    /// The reference by which leases reach this planner, to write to the table rows of their requests.
    me: Weak<Self>,
    state: RankedMutex<PlannerState>,
    slots: Arc<TokenToKvPoolAllocator>,
    table: Arc<ReqToTokenPool>,
    config: PlannerConfig,
    device: Device,
}

impl BatchPlanner {
    /// Returns a planner for requests in `table` that take their slots from `slots`, with memory from
    /// `backend`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when a size is 0, the pools are not on the same device, or there may be more
    /// pages in a batch than fit int32; the error of the backend if it runs out of memory.
    ///
    /// [`ErrorKind::Config`]: crate::base::ErrorKind::Config
    pub fn new(
        config: &PlannerConfig,
        backend: &Arc<dyn Backend>,
        slots: Arc<TokenToKvPoolAllocator>,
        table: Arc<ReqToTokenPool>,
    ) -> Result<Arc<Self>> {
        let state = PlannerState::new(config, backend, &slots, &table)?;
        let (state, config, device) = (RankedMutex::new(LockRank::Planner, state), *config, backend.device());
        let planner = Arc::new_cyclic(|me| Self { me: me.clone(), state, slots, table, config, device });
        let reclaim: Arc<dyn Reclaim> = planner.clone();
        planner.slots.on_shortage(&reclaim);
        Ok(planner)
    }

    /// Returns the sizes of the planner.
    #[must_use]
    pub const fn config(&self) -> PlannerConfig {
        self.config
    }

    /// Returns the device of the fields.
    #[must_use]
    pub const fn device(&self) -> Device {
        self.device
    }

    /// Returns the number of bytes of all fields.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.state.lock().metadata().mem_bytes()
    }

    /// Returns the number of plans made so far.
    #[must_use]
    pub fn plans(&self) -> usize {
        self.state.lock().metadata().plans()
    }

    /// Requests that have slots, and their tokens.
    #[must_use]
    pub fn totals(&self) -> (usize, usize) {
        let discarded = Discarded::new();
        let (state, table) = (self.state(Stream::default_of(self.device()), &discarded), self.table.lock());
        state.totals(&table)
    }

    /// Returns the tokens of a request that have slots.
    ///
    /// # Errors
    /// See [`Requests::resolve_rows`].
    ///
    /// [`Requests::resolve_rows`]: crate::index::Requests::resolve_rows
    pub fn seq_len(&self, row: i64) -> Result<u32> {
        let discarded = Discarded::new();
        let (mut state, table) =
            (self.state(Stream::default_of(self.device()), &discarded), self.table.lock());
        state.seq_len(row, &table)
    }

    /// Takes the slots for positions `prefix..seq` of each request, writes the table and builds the metadata.
    /// Returns `None`, and changes nothing, if there are not enough slots. The request becomes an additional
    /// owner of its cached prefix.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] and [`ErrorKind::IndexOwnership`] for invalid lengths and prefixes, as in
    /// [`Requests::growth`] and [`Requests::growth_of_cached`]; [`ErrorKind::Argument`] also for a batch of more
    /// requests or tokens than the planner has room for; [`ErrorKind::Index`] for a row or a length outside of
    /// the table; [`ErrorKind::Driver`] when a driver call fails. Nothing is changed.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    /// [`ErrorKind::Index`]: crate::base::ErrorKind::Index
    /// [`ErrorKind::IndexOwnership`]: crate::base::ErrorKind::IndexOwnership
    /// [`Requests::growth`]: crate::index::Requests::growth
    /// [`Requests::growth_of_cached`]: crate::index::Requests::growth_of_cached
    pub fn extend(&self, batch: Batch<'_>, stream: Stream) -> Result<Option<Plan>> {
        let mut claims = self.claim(&batch)?;
        self.alloc_with(stream, |state, pools| state.extend(pools, batch, &mut claims, stream))
    }

    /// Claims the leased prefixes of a batch, by position. The lease that a request has already is not
    /// claimed again.
    fn claim(&self, batch: &Batch<'_>) -> Result<Vec<Option<Claim>>> {
        if !batch.prefixes.iter().any(|prefix| matches!(prefix, Prefix::Leased(_))) {
            return Ok(Vec::new());
        }
        let rows = self.resolve(batch.rows)?;
        let claim = |(prefix, row): (&Prefix, RequestRow)| match prefix {
            Prefix::Leased(lease) if self.has_lease(row, lease) => lease.len().map(|_| None),
            Prefix::Leased(lease) => Claim::new(lease, self.request(row), &self.slots).map(Some),
            Prefix::None | Prefix::Slots(_) => Ok(None),
        };
        let mut claims = try_with_capacity(rows.len())?;
        for named in batch.prefixes.iter().zip(rows) {
            claims.push(claim(named)?);
        }
        Ok(claims)
    }

    /// Returns whether `lease` is that of the request in `row`.
    fn has_lease(&self, row: RequestRow, lease: &Lease) -> bool {
        let (state, table) = (self.state.lock(), self.table.lock());
        state.leases.is_of(lease.id(), row, &table)
    }

    /// Returns the rows of live requests.
    fn resolve(&self, rows: &IndexVec) -> Result<Vec<RequestRow>> {
        let discarded = Discarded::new();
        let (mut state, table) =
            (self.state(Stream::default_of(self.device()), &discarded), self.table.lock());
        state.resolve(rows, &table)
    }

    /// Returns the request in `row`, as one that keeps a lease.
    fn request(&self, row: RequestRow) -> LeasingRequest {
        LeasingRequest::new(Weak::clone(&self.me) as _, row)
    }

    /// Extends each request by `tokens_per_req` tokens, like [`BatchPlanner::extend`]. Requests of the
    /// padding row pad the batch to the smallest size of `pad_to` that it fits.
    ///
    /// # Errors
    /// See [`BatchPlanner::extend`]; also [`ErrorKind::Argument`] when no size of `pad_to` fits, or there is no
    /// padding row.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    pub fn decode(
        &self,
        rows: &IndexVec,
        seq_lens: &IndexVec,
        tokens_per_req: usize,
        pad_to: Option<&[usize]>,
        stream: Stream,
    ) -> Result<Option<Plan>> {
        self.alloc_with(stream, |state, pools| {
            state.decode(pools, rows, seq_lens, tokens_per_req, pad_to, stream)
        })
    }

    /// Shrinks requests to `seq_lens` tokens. Returns the number of pages given up, and the invalid ones
    /// among them.
    ///
    /// # Errors
    /// See [`Requests::resolve_rows`] and [`Requests::check_truncate`]; [`ErrorKind::Argument`] unless there are
    /// as many lengths as rows; nothing is changed.
    /// [`ErrorKind::IndexOwnership`] if the allocator is strict and another owner has freed a page; all
    /// others are freed.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::IndexOwnership`]: crate::base::ErrorKind::IndexOwnership
    /// [`Requests::check_truncate`]: crate::index::Requests::check_truncate
    /// [`Requests::resolve_rows`]: crate::index::Requests::resolve_rows
    pub fn truncate(
        &self,
        rows: &IndexVec,
        seq_lens: &IndexVec,
        after: Option<&Arc<dyn Fence>>,
        stream: Stream,
    ) -> Result<(usize, BadFrees)> {
        self.free_with(after, stream, |state, pools, release| state.truncate(pools, rows, seq_lens, release))
    }

    /// Frees all slots and the rows of requests, and zeroes the rows. `seq_lens`, if given, must match the
    /// requests.
    ///
    /// # Errors
    /// See [`Requests::resolve_rows`], and [`ErrorKind::Argument`] for a length that does not match; nothing is
    /// changed. See [`BatchPlanner::truncate`].
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`Requests::resolve_rows`]: crate::index::Requests::resolve_rows
    pub fn finish(
        &self,
        rows: &IndexVec,
        seq_lens: Option<&IndexVec>,
        after: Option<&Arc<dyn Fence>>,
        stream: Stream,
    ) -> Result<FinishedRequests> {
        self.make_room()?;
        self.free_with(after, stream, |state, pools, release| state.finish(pools, rows, seq_lens, release))
    }

    /// Gives the empty request `dst` the first `len` tokens of `src`, or returns `None` if there is no free
    /// page. Full pages are shared. Returns the slots that the caller must copy to and from, valid on
    /// `stream`.
    ///
    /// # Errors
    /// See [`Requests::resolve_rows`] and [`Requests::fork`]; also [`ErrorKind::Argument`] when `src` has fewer
    /// tokens or `dst` is not empty; [`ErrorKind::Driver`] when a driver call fails. Nothing is changed.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
    /// [`Requests::fork`]: crate::index::Requests::fork
    /// [`Requests::resolve_rows`]: crate::index::Requests::resolve_rows
    pub fn fork(&self, src: i64, dst: i64, len: i64, stream: Stream) -> Result<Option<[TensorView; 2]>> {
        let (leased, row) = {
            let discarded = Discarded::new();
            let (mut state, table) = (self.state(stream, &discarded), self.table.lock());
            let rows = state.resolve(&IndexVec::I64(vec![src, dst]), &table)?;
            (state.leases.of(rows[0], &table).cloned(), rows[1])
        };
        let claim =
            leased.map(|lease| Claim::of_prefix(&lease, len, self.request(row), stream)).transpose()?;
        self.alloc_with(stream, |state, pools| state.fork(pools, [src, dst], len, claim.as_ref(), stream))
    }

    /// Returns an array of a plan on the device, without a copy. `None` if the planner does not build it.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] after a later plan.
    ///
    /// [`ErrorKind::Stale`]: crate::base::ErrorKind::Stale
    pub fn field(&self, plan: &Plan, field: Field) -> Result<Option<TensorView>> {
        self.state.lock().field(plan, field)
    }

    /// Returns an array of a plan in host memory, a copy if the plan is on a device. `None` if the planner
    /// does not build it.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] after a later plan or, for an array that grows with the context, after a
    /// change of the pages of a request.
    ///
    /// [`ErrorKind::Stale`]: crate::base::ErrorKind::Stale
    pub fn host_field(&self, plan: &Plan, field: Field) -> Result<Option<TensorView>> {
        let discarded = Discarded::new();
        self.state(Stream::default_of(self.device()), &discarded).host_field(plan, field)
    }

    /// Calls `take` under the locks, with the allocator's handling of shortage.
    fn alloc_with<T>(
        &self,
        stream: Stream,
        mut take: impl FnMut(&mut PlannerState, Pools<'_>) -> Result<TakeResult<T>>,
    ) -> Result<Option<T>> {
        self.make_room()?;
        self.end_freed(stream)?;
        let discarded = Discarded::new();
        self.slots.alloc_with(stream, |slots| {
            let (mut state, mut table) = (self.state.lock(), self.table.lock());
            let slots = state.enter_slots(slots, stream, &discarded);
            take(&mut state, Pools { slots, table: &mut table, discarded: &discarded })
        })
    }

    /// Calls `give` under the locks, with the id of a new fence if `after` is given.
    fn free_with<R>(
        &self,
        after: Option<&Arc<dyn Fence>>,
        stream: Stream,
        give: impl FnOnce(&mut PlannerState, Pools<'_>, Release) -> Result<R>,
    ) -> Result<R> {
        self.end_freed(stream)?;
        let discarded = Discarded::new();
        self.slots.free_with(after, stream, |slots, fence| {
            let (mut state, mut table) = (self.state.lock(), self.table.lock());
            let slots = state.enter_slots(slots, stream, &discarded);
            let pools = Pools { slots, table: &mut table, discarded: &discarded };
            give(&mut state, pools, Release { fence, stream })
        })
    }

    /// Locks the state, which has ended the requests of earlier epochs of the allocator.
    fn state(&self, stream: Stream, discarded: &Discarded) -> RankedGuard<'_, PlannerState> {
        let epoch = self.slots.lock().epoch();
        let mut state = self.state.lock();
        state.enter(epoch, stream, discarded);
        state
    }

    /// Ends the leases of requests whose rows were freed by another call, and gives their pages back. Returns
    /// how many pages that were.
    fn end_freed(&self, stream: Stream) -> Result<usize> {
        let has_abandoned = {
            let discarded = Discarded::new();
            let (mut state, table) = (self.state(stream, &discarded), self.table.lock());
            state.end_freed(&table, stream, &discarded);
            state.requests().has_abandoned()
        };
        if !has_abandoned {
            return Ok(0);
        }
        let discarded = Discarded::new();
        let abandoned = self.slots.freeing(self.slots.lock(), stream, |slots| {
            let (mut state, table) = (self.state.lock(), self.table.lock());
            let slots = state.enter_slots(slots, stream, &discarded);
            state.give_back_abandoned(slots, &table)
        })?;
        // Pages that its user has freed are not lost.
        for (request, pages) in abandoned.iter().filter(|(_, pages)| *pages > 0) {
            self.slots.notify(Notice::Abandoned(request, *pages));
        }
        Ok(abandoned.iter().map(|(_, pages)| pages).sum())
    }

    /// Waits if the device is many steps behind.
    fn make_room(&self) -> Result<()> {
        make_room(self.config.max_tokens, |numbers| self.state.lock().metadata().backpressure_event(numbers))
    }
}

/// Frees the pages of requests whose rows were freed without them.
impl Reclaim for BatchPlanner {
    fn obtainable(&self, stream: Stream) -> Obtainable {
        let discarded = Discarded::new();
        let (mut state, table) = (self.state(stream, &discarded), self.table.lock());
        state.end_freed(&table, stream, &discarded);
        let pages: usize = state.requests().abandoned().iter().map(|request| request.own_pages().len()).sum();
        Obtainable { at_once: pages * widen(state.requests().page_size().slots()), behind_fences: 0 }
    }

    fn reclaim(&self, _slots: usize, stream: Stream) -> Result<usize> {
        Ok(self.end_freed(stream)? * self.slots.page_size())
    }
}

impl LeaseKeeper for BatchPlanner {
    fn leased_request(&self, row: RequestRow, lease: LeaseId) -> Option<Box<dyn LeasedRequest + '_>> {
        let (state, table) = (self.state.lock(), self.table.lock());
        state
            .leases
            .is_of(lease, row, &table)
            .then(|| Box::new(LockedRequest { state, _table: table, row }) as _)
    }

    fn finish_request(&self, row: RequestRow, stream: Stream) -> Result<FinishedRequests> {
        self.finish(&IndexVec::I64(vec![row.number().into()]), None, None, stream)
    }
}

/// A request of a planner, whose row no call frees meanwhile.
struct LockedRequest<'a> {
    row: RequestRow,
    state: RankedGuard<'a, PlannerState>,
    _table: RankedGuard<'a, RequestTable>,
}

impl LeasedRequest for LockedRequest<'_> {
    fn pages(&self, from: usize, to: usize) -> Result<Vec<Page>> {
        self.state.pages(self.row, from, to)
    }

    fn record_published(&mut self, from: usize, cached: &[Page]) {
        self.state.record_published(self.row, from, cached);
    }
}

impl fmt::Debug for BatchPlanner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchPlanner").field("config", &self.config).finish_non_exhaustive()
    }
}
