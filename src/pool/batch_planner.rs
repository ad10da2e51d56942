//! A scheduler step in one call: slots, request table and the metadata of attention kernels.

use std::sync::Arc;

use crate::base::{DType, Device, Error, ErrorKind, Id, IndexVec, PADDING, Result, Row, Slot, bytes_of, reserve, widen};
use crate::index::{BadFrees, FenceId, Growth, Requests};
use crate::kernels::{Indices, Launcher, PlanBatch, PlanFields, PlanRequest};
use crate::memory::{ALIGNMENT, Backend, Host, Region, Stream};
use crate::tensor::TensorView;

use super::{ReqToTokenPool, TableIndex, TokenToKvPoolAllocator, at_least_one, fits_int32};

/// One array of a [`Plan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// Slots of the new tokens; the padding slot for padding.
    OutCacheLoc,
    /// Positions of the new tokens in their requests.
    Positions,
    /// Slots of the new tokens, int64; -1 for padding.
    SlotMapping,
    /// Rows.
    ReqPoolIndices,
    /// Tokens of each request, the new ones counted.
    SeqLens,
    /// Where the new tokens of each request begin, and their number.
    QoIndptr,
    /// Where the pages of each request begin in `KvIndices`, and their number.
    KvIndptr,
    /// Tokens in the last page of each request.
    KvLastPageLen,
    /// The pages of all requests.
    KvIndices,
    /// The pages of each request in a line of its own, zeros after them.
    BlockTable,
}

impl Field {
    /// All of them. The last two are those whose size grows with the context.
    pub const ALL: [Self; 10] = [
        Self::OutCacheLoc,
        Self::Positions,
        Self::SlotMapping,
        Self::ReqPoolIndices,
        Self::SeqLens,
        Self::QoIndptr,
        Self::KvIndptr,
        Self::KvLastPageLen,
        Self::KvIndices,
        Self::BlockTable,
    ];

    const fn at(self) -> usize {
        self as usize
    }

    const fn dtype(self) -> DType {
        match self {
            Self::SlotMapping => DType::I64,
            _ => DType::I32,
        }
    }
}

/// Sizes of a [`BatchPlanner`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannerConfig {
    /// Requests in a batch, at most, padding counted.
    pub max_batch_size: usize,
    /// New tokens in a batch, at most, padding counted.
    pub max_tokens: usize,
    /// Whether [`Field::KvIndices`] is wanted.
    pub kv_indices: bool,
    /// Whether [`Field::BlockTable`] is wanted.
    pub block_table: bool,
}

/// A step that was planned. Its arrays are the planner's, which the next plan overwrites.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    number: u64,
    /// What had changed when it was made.
    changes: u64,
    /// Requests.
    pub batch_size: usize,
    /// Requests with padding.
    pub padded_batch_size: usize,
    /// New tokens.
    pub num_tokens: usize,
    /// New tokens with those of padding.
    pub padded_num_tokens: usize,
    /// New tokens of the request that has most of them.
    pub max_seqlen_q: usize,
    /// Tokens of the longest request.
    pub max_seqlen_k: usize,
    kv_len: usize,
}

/// The pools that a planner works on.
#[derive(Debug)]
pub struct Pools<'a> {
    /// Its slots.
    pub slots: &'a mut TokenToKvPoolAllocator,
    /// Its table.
    pub table: &'a mut ReqToTokenPool,
}

/// A batch of requests, as a caller names it.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Rows.
    pub rows: &'a IndexVec,
    /// Tokens that each has, or whose slots are cached.
    pub prefix_lens: &'a [i64],
    /// Tokens that it will have.
    pub seq_lens: &'a [i64],
    /// Cached slots of new requests; empty, or one entry for each request.
    pub prefix_slots: &'a [Option<IndexVec>],
}

/// What a line of the block table holds.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    row: u32,
    turn: u32,
    /// Entries that are right as long as the request keeps these pages.
    same: u32,
    /// From here on it is zeros.
    until: u32,
}

/// Plans the steps of a scheduler: one call takes the slots, writes the table and makes the metadata.
///
/// What a request has is kept on the host, and is the only truth: the table and the metadata on the device are written from
/// it, in one copy and one launch, and nothing waits. On the CPU the tensors are written directly. Costs grow with the new
/// tokens and the requests; only [`Field::KvIndices`] is written whole every time.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::IndexVec;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{
///     Batch, BatchPlanner, Field, PlannerConfig, Pools, ReqToTokenPool, TokenToKvPoolAllocator,
/// };
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let mut slots = TokenToKvPoolAllocator::new(64, &host, 1, true, false).unwrap();
/// let mut table = ReqToTokenPool::new(Arc::clone(&host), 4, 32, true, false).unwrap();
/// let config = PlannerConfig { max_batch_size: 4, max_tokens: 16, kv_indices: true, block_table: true };
/// let mut planner = BatchPlanner::new(host, &slots, &table, config).unwrap();
/// let rows = IndexVec::I64(table.alloc(2, stream).unwrap().unwrap().into_iter().map(i64::from).collect());
/// let batch = Batch { rows: &rows, prefix_lens: &[0, 0], seq_lens: &[3, 5], prefix_slots: &[] };
/// let plan = planner.extend(Pools { slots: &mut slots, table: &mut table }, batch, stream).unwrap().unwrap();
/// assert_eq!((plan.num_tokens, plan.max_seqlen_k), (8, 5));
/// assert_eq!(planner.field(&plan, Field::QoIndptr).unwrap().unwrap().shape().as_slice(), [3]);
/// ```
#[derive(Debug)]
pub struct BatchPlanner {
    config: PlannerConfig,
    requests: Requests,
    /// Entries in a line of the block table.
    width: usize,
    /// Where each field begins in `fields`, and in `host` those that are there.
    offsets: [usize; Field::ALL.len()],
    fields: Arc<Region>,
    remote: Option<Remote>,
    /// By place in the batch.
    lines: Vec<Line>,
    /// By row, where it was last in a batch.
    places: Vec<u32>,
    plans: u64,
    /// Counts whatever changes the pages of a request.
    changes: u64,
    scratch: Scratch,
}

/// What it takes to work on a GPU.
#[derive(Debug)]
struct Remote {
    launcher: Launcher,
    /// The fields that do not grow with the context, for the host.
    host: Arc<Region>,
    /// Pages that cross to the device at once.
    most_pages: usize,
}

/// Arrays of the plan in progress, kept for their capacity.
#[derive(Debug, Default)]
struct Scratch {
    slots: Vec<i32>,
    out_cache_loc: Vec<i32>,
    positions: Vec<i32>,
    slot_mapping: Vec<i64>,
    req_pool_indices: Vec<i32>,
    seq_lens: Vec<i32>,
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_last_page_len: Vec<i32>,
    /// For a GPU.
    requests: Vec<PlanRequest>,
    pages: Vec<i32>,
}

impl BatchPlanner {
    /// For requests in `table` that take their slots from `slots`, with memory from `backend`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when a size is 0, the pools are not on the same device, or there may be more pages in a batch
    /// than fit int32; what the backend says when it has not enough.
    pub fn new(
        backend: Arc<dyn Backend>,
        slots: &TokenToKvPoolAllocator,
        table: &ReqToTokenPool,
        config: PlannerConfig,
    ) -> Result<Self> {
        let PlannerConfig { max_batch_size, max_tokens, .. } = config;
        at_least_one(&[("max_batch_size", max_batch_size), ("max_tokens", max_tokens)])?;
        if slots.device() != table.device() {
            return Err(Error::config(format!(
                "the allocator is on {}, the request table on {}; a planner needs both on one device",
                slots.device(),
                table.device()
            )));
        }
        let width = table.max_context_len().div_ceil(slots.slots().page_size());
        fits_int32(&format!("max_tokens {max_tokens}"), Some(max_tokens))?;
        fits_int32(
            &format!("max_batch_size {max_batch_size} with {width} pages a request"),
            max_batch_size.checked_mul(width),
        )?;
        let (offsets, bytes) = layout(config, width)?;
        let fields = Arc::new(Region::new(backend, bytes)?);
        let remote = match fields.gpu() {
            None => None,
            Some(gpu) => {
                let most_pages = max_tokens + 2 * max_batch_size + width;
                // Two steps may be on their way while a third is written.
                let ring = PlanBatch::bytes(max_batch_size, most_pages).saturating_mul(3);
                Some(Remote {
                    launcher: Launcher::new(gpu, ring)?,
                    host: Arc::new(Region::new(Arc::new(Host), offsets[Field::KvIndices.at()])?),
                    most_pages,
                })
            }
        };
        let rows = table.table_rows();
        Ok(Self {
            config,
            requests: Requests::new(rows, slots.slots()),
            width,
            offsets,
            fields,
            remote,
            lines: vec![Line::default(); max_batch_size],
            places: vec![0; rows],
            plans: 0,
            changes: 0,
            scratch: Scratch::default(),
        })
    }

    /// Its sizes.
    #[must_use]
    pub const fn config(&self) -> PlannerConfig {
        self.config
    }

    /// Where the fields are.
    #[must_use]
    pub fn device(&self) -> Device {
        self.fields.device()
    }

    /// Bytes of the fields.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.fields.bytes()
    }

    /// Plans so far.
    #[must_use]
    pub const fn plans(&self) -> u64 {
        self.plans
    }

    /// Requests that have slots, and their tokens.
    #[must_use]
    pub fn totals(&self, table: &ReqToTokenPool) -> (usize, usize) {
        self.requests.totals(table.rows())
    }

    /// Tokens of a request that have slots.
    ///
    /// # Errors
    /// As [`Requests::name`].
    pub fn seq_len(&mut self, row: i64, table: &ReqToTokenPool) -> Result<u32> {
        let row = self.requests.name(&IndexVec::I64(vec![row]), table.rows())?[0];
        Ok(self.requests.len(row))
    }

    /// Takes the slots for positions `prefix..seq` of each request, writes the table and makes the metadata; `None`, and
    /// nothing is changed, when there are not enough. Cached prefixes get the request as one more owner.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] and [`ErrorKind::IndexOwnership`] for what does not fit, as [`Requests::growth`] and
    /// [`Requests::growth_of_cached`] say; [`ErrorKind::Index`] for a row or a length outside of the table;
    /// [`ErrorKind::Driver`] when the driver refuses. Nothing is changed.
    pub fn extend(&mut self, pools: Pools<'_>, batch: Batch<'_>, stream: Stream) -> Result<Option<Plan>> {
        let Pools { slots, table } = pools;
        let (rows, count) = (batch.rows, batch.rows.len());
        let cached = if batch.prefix_slots.is_empty() { count } else { batch.prefix_slots.len() };
        if [batch.prefix_lens.len(), batch.seq_lens.len(), cached] != [count; 3] {
            return Err(Error::config(format!(
                "a batch of {count} rows, {} prefix_lens, {} seq_lens and {cached} prefix_slots; the lengths must be \
                 equal",
                batch.prefix_lens.len(),
                batch.seq_lens.len()
            )));
        }
        self.check_batch(count)?;
        let named = self.requests.name(rows, table.rows())?;
        let mut prefixes = Vec::new();
        let mut growths = reserve(count)?;
        for (position, &row) in named.iter().enumerate() {
            let (prefix, seq) = (batch.prefix_lens[position], batch.seq_lens[position]);
            let cached = batch.prefix_slots.get(position).and_then(Option::as_ref);
            growths.push(match cached.filter(|cached| !cached.is_empty()) {
                None => self.requests.growth(position, row, prefix, seq)?,
                Some(cached) => self.requests.growth_of_cached(
                    (position, row),
                    (prefix, seq),
                    cached,
                    slots.slots(),
                    &mut prefixes,
                )?,
            });
        }
        self.plan(Pools { slots, table }, &growths, &prefixes, (count, 0), stream)
    }

    /// As [`BatchPlanner::extend`], by `tokens_per_req` tokens a request. The batch is filled up to the least of `pad_to`
    /// that it fits, with requests of the padding row.
    ///
    /// # Errors
    /// As there; [`ErrorKind::Config`] when nothing of `pad_to` fits, or there is no padding row.
    pub fn decode(
        &mut self,
        pools: Pools<'_>,
        (rows, seq_lens): (&IndexVec, &IndexVec),
        tokens_per_req: usize,
        pad_to: Option<&[usize]>,
        stream: Stream,
    ) -> Result<Option<Plan>> {
        let Pools { slots, table } = pools;
        let count = rows.len();
        at_least_one(&[("tokens_per_req", tokens_per_req)])?;
        if seq_lens.len() != count {
            return Err(Error::config(format!(
                "a batch of {count} rows and {} seq_lens; the lengths must be equal",
                seq_lens.len()
            )));
        }
        let padded = match pad_to {
            None => count,
            Some(sizes) => padded_size(count, sizes, table.padding_row())?,
        };
        self.check_batch(padded)?;
        let width = i64::try_from(tokens_per_req).unwrap_or(i64::MAX);
        let named = self.requests.name(rows, table.rows())?;
        let mut growths = reserve(count)?;
        for (position, (&row, seq)) in named.iter().zip(seq_lens.iter()).enumerate() {
            growths.push(self.requests.growth(position, row, seq.saturating_sub(width), seq)?);
        }
        self.plan(Pools { slots, table }, &growths, &[], (padded, tokens_per_req), stream)
    }

    fn check_batch(&self, size: usize) -> Result<()> {
        if size > self.config.max_batch_size {
            return Err(Error::config(format!(
                "a batch of {size} requests is more than max_batch_size {}",
                self.config.max_batch_size
            )));
        }
        Ok(())
    }

    /// Plans a batch that was checked, with padding.
    fn plan(
        &mut self,
        pools: Pools<'_>,
        batch: &[Growth],
        prefixes: &[i32],
        (padded, padding): (usize, usize),
        stream: Stream,
    ) -> Result<Option<Plan>> {
        let Pools { slots, table } = pools;
        let longest = batch.iter().map(|growth| widen(growth.seq)).max().unwrap_or(0);
        let missing = padded - batch.len();
        let longest = longest.max(if missing > 0 { padding } else { 0 });
        if longest > table.max_context_len() {
            return Err(Error::index(format!(
                "a request of {longest} tokens does not fit a table of {} columns",
                table.max_context_len()
            )));
        }
        let num_tokens: usize = batch.iter().map(|growth| growth.new_tokens()).sum();
        let padded_num_tokens = num_tokens.saturating_add(missing.saturating_mul(padding));
        if padded_num_tokens > self.config.max_tokens {
            return Err(Error::config(format!(
                "{padded_num_tokens} new tokens are more than max_tokens {}",
                self.config.max_tokens
            )));
        }
        let most = batch.iter().map(|growth| growth.new_tokens()).max().unwrap_or(0);
        if !self.requests.grow(batch, prefixes, slots.slots_mut())? {
            return Ok(None);
        }
        self.list(batch, padded, padding);
        let kv_len = self.scratch.kv_indptr.last().map_or(0, |&last| widen(last.cast_unsigned()));
        let made = match &self.remote {
            None => self.make(batch, padded, table),
            Some(_) => self.launch(batch, padded, kv_len, table, stream),
        };
        if let Err(failure) = made {
            // Nobody can tell what was written.
            let width = u32::try_from(self.width).unwrap_or(u32::MAX);
            self.lines.fill(Line { until: width, ..Line::default() });
            self.changes += 1;
            self.plans += 1;
            self.requests.shrink(batch, slots.slots_mut());
            return Err(failure);
        }
        self.changes += 1;
        self.plans += 1;
        Ok(Some(Plan {
            number: self.plans,
            changes: self.changes,
            batch_size: batch.len(),
            padded_batch_size: padded,
            num_tokens,
            padded_num_tokens,
            max_seqlen_q: most.max(if missing > 0 { padding } else { 0 }),
            max_seqlen_k: longest,
            kv_len,
        }))
    }

    /// Lists the fields that do not grow with the context, of requests that have grown.
    fn list(&mut self, batch: &[Growth], padded: usize, padding: usize) {
        let Self { requests, scratch, .. } = self;
        scratch.clear();
        let size = requests.page_size();
        let (mut tokens, mut pages) = (0, 0);
        let padding = u32::try_from(padding).unwrap_or(0);
        let filler = Growth { row: 0, start: 0, prefix: 0, seq: padding };
        for growth in batch.iter().copied().chain(std::iter::repeat_n(filler, padded - batch.len())) {
            let Growth { row, prefix, seq, .. } = growth;
            scratch.req_pool_indices.push(row.cast_signed());
            scratch.seq_lens.push(seq.cast_signed());
            scratch.qo_indptr.push(tokens);
            scratch.kv_indptr.push(pages);
            scratch.kv_last_page_len.push(if seq == 0 { 0 } else { (seq - 1) % size + 1 }.cast_signed());
            scratch.positions.extend((prefix..seq).map(u32::cast_signed));
            tokens += (seq - prefix).cast_signed();
            pages += seq.div_ceil(size).cast_signed();
        }
        scratch.qo_indptr.push(tokens);
        scratch.kv_indptr.push(pages);
        for growth in batch {
            requests.slots(growth.row, growth.prefix, growth.seq, &mut scratch.out_cache_loc);
        }
        scratch.slot_mapping.extend(scratch.out_cache_loc.iter().copied().map(i64::from));
        scratch.out_cache_loc.resize(scratch.positions.len(), PADDING.cast_signed());
        scratch.slot_mapping.resize(scratch.positions.len(), -1);
    }

    /// Writes the listed fields to a region.
    fn write_listed(&self, region: &Region) -> Result<()> {
        let scratch = &self.scratch;
        for (field, values) in [
            (Field::OutCacheLoc, &scratch.out_cache_loc),
            (Field::Positions, &scratch.positions),
            (Field::ReqPoolIndices, &scratch.req_pool_indices),
            (Field::SeqLens, &scratch.seq_lens),
            (Field::QoIndptr, &scratch.qo_indptr),
            (Field::KvIndptr, &scratch.kv_indptr),
            (Field::KvLastPageLen, &scratch.kv_last_page_len),
        ] {
            region.write(self.offsets[field.at()], values)?;
        }
        region.write(self.offsets[Field::SlotMapping.at()], &scratch.slot_mapping)
    }

    /// Writes the table and the fields in host memory.
    fn make(&mut self, batch: &[Growth], padded: usize, table: &mut ReqToTokenPool) -> Result<()> {
        self.write_listed(&self.fields)?;
        let mut slots = std::mem::take(&mut self.scratch.slots);
        for (place, growth) in batch.iter().enumerate() {
            slots.clear();
            self.requests.slots(growth.row, growth.start, growth.seq, &mut slots);
            table.put(Row::new(growth.row), widen(growth.start), &slots)?;
            let from = self.show(place, growth.row, table);
            self.write_pages(place, from, self.requests.pages(growth.row))?;
            self.shown(place, growth.row, table);
        }
        self.scratch.slots = slots;
        for place in batch.len()..padded {
            let count = self.scratch.kv_indptr[place + 1] - self.scratch.kv_indptr[place];
            let pages = vec![0; widen(count.cast_unsigned())];
            self.write_pages(place, 0, &pages)?;
            self.lines[place] = Line { until: count.cast_unsigned(), ..Line::default() };
        }
        Ok(())
    }

    /// Writes the pages of the request at `place`, of which the block table has the first `from`.
    fn write_pages(&self, place: usize, from: usize, pages: &[i32]) -> Result<()> {
        let size = size_of::<i32>();
        if self.config.kv_indices {
            let begin = widen(self.scratch.kv_indptr[place].cast_unsigned());
            self.fields.write(self.offsets[Field::KvIndices.at()] + begin * size, pages)?;
        }
        if self.config.block_table {
            let line = self.offsets[Field::BlockTable.at()] + place * self.width * size;
            self.fields.write(line + from * size, &pages[from..])?;
            let stale = widen(self.lines[place].until).saturating_sub(pages.len());
            self.fields.fill(line + pages.len() * size, stale * size, 0)?;
        }
        Ok(())
    }

    /// How many entries of line `place` of the block table are right for a request.
    fn show(&self, place: usize, row: u32, table: &ReqToTokenPool) -> usize {
        let line = self.lines[place];
        let is_same = line.row == row
            && line.turn == table.rows().turn(Row::new(row))
            && widen(self.places[widen(row)]) == place;
        if is_same { widen(line.same) } else { 0 }
    }

    /// Notes that line `place` of the block table shows all pages of a request.
    fn shown(&mut self, place: usize, row: u32, table: &ReqToTokenPool) {
        let count = u32::try_from(self.requests.pages(row).len()).unwrap_or(u32::MAX);
        self.lines[place] =
            Line { row, turn: table.rows().turn(Row::new(row)), same: count, until: count };
        self.places[widen(row)] = u32::try_from(place).unwrap_or(u32::MAX);
    }

    /// Notes that a request has no more than `count` of its pages.
    fn forget_shown(&mut self, row: u32) {
        let count = u32::try_from(self.requests.pages(row).len()).unwrap_or(u32::MAX);
        let place = widen(self.places[widen(row)]);
        if let Some(line) = self.lines.get_mut(place).filter(|line| line.row == row) {
            line.same = line.same.min(count);
        }
    }

    /// Has the device write the table and the fields: one copy and one launch.
    fn launch(
        &mut self,
        batch: &[Growth],
        padded: usize,
        kv_len: usize,
        table: &mut ReqToTokenPool,
        stream: Stream,
    ) -> Result<()> {
        let size = self.requests.page_size();
        let sent: usize = batch.iter().map(|growth| sent_pages(*growth, size).len()).sum();
        let most_pages = self.remote.as_ref().map_or(0, |remote| remote.most_pages);
        let mut scratch = std::mem::take(&mut self.scratch);
        for (place, growth) in batch.iter().enumerate() {
            let mut growth = *growth;
            if sent > most_pages && growth.start < growth.prefix {
                // So many cached slots do not cross at once.
                scratch.slots.clear();
                self.requests.slots(growth.row, 0, growth.prefix, &mut scratch.slots);
                let prefix = Indices::Host(IndexVec::I32(scratch.slots.clone()));
                table.write(&TableIndex::first_columns(growth.row, growth.prefix), &prefix, stream)?;
                growth.start = growth.prefix;
            }
            let page_begin = signed(scratch.pages.len());
            scratch.pages.extend_from_slice(&self.requests.pages(growth.row)[sent_pages(growth, size)]);
            scratch.requests.push(PlanRequest {
                row: growth.row.cast_signed(),
                start: growth.start.cast_signed(),
                prefix: growth.prefix.cast_signed(),
                seq: growth.seq.cast_signed(),
                qo_begin: scratch.qo_indptr[place],
                kv_begin: scratch.kv_indptr[place],
                page_begin,
                block_from: signed(self.show(place, growth.row, table)),
                block_until: self.lines[place].until.cast_signed(),
            });
        }
        for place in batch.len()..padded {
            let count = scratch.kv_indptr[place + 1] - scratch.kv_indptr[place];
            let page_begin = signed(scratch.pages.len());
            scratch.pages.resize(scratch.pages.len() + widen(count.cast_unsigned()), 0);
            scratch.requests.push(PlanRequest {
                seq: scratch.seq_lens[place],
                qo_begin: scratch.qo_indptr[place],
                kv_begin: scratch.kv_indptr[place],
                page_begin,
                block_until: self.lines[place].until.cast_signed(),
                ..PlanRequest::default()
            });
        }
        self.scratch = scratch;
        let Some(remote) = &self.remote else { return Ok(()) };
        self.write_listed(&remote.host)?;
        let offset = |field: Field| self.offsets[field.at()];
        let fields = PlanFields {
            region: &self.fields,
            out_cache_loc: offset(Field::OutCacheLoc),
            positions: offset(Field::Positions),
            slot_mapping: offset(Field::SlotMapping),
            req_pool_indices: offset(Field::ReqPoolIndices),
            seq_lens: offset(Field::SeqLens),
            qo_indptr: offset(Field::QoIndptr),
            kv_indptr: offset(Field::KvIndptr),
            kv_last_page_len: offset(Field::KvLastPageLen),
            kv_indices: self.config.kv_indices.then(|| offset(Field::KvIndices)),
            block_table: self.config.block_table.then(|| offset(Field::BlockTable)),
        };
        let planned = PlanBatch {
            requests: &self.scratch.requests,
            batch: batch.len(),
            pages: &self.scratch.pages,
            page_size: size,
            width: self.width,
            tokens: self.scratch.positions.len(),
            kv_len,
        };
        let launched = remote.launcher.plan(&table.on_device()?, &fields, &planned, stream);
        let mut slots = std::mem::take(&mut self.scratch.slots);
        for (place, growth) in batch.iter().enumerate() {
            slots.clear();
            self.requests.slots(growth.row, growth.start, growth.seq, &mut slots);
            if launched.is_ok() {
                table.put(Row::new(growth.row), widen(growth.start), &slots)?;
                self.shown(place, growth.row, table);
            } else {
                table.lose(Row::new(growth.row), widen(growth.seq));
            }
        }
        self.scratch.slots = slots;
        for place in batch.len()..padded {
            let count = self.scratch.kv_indptr[place + 1] - self.scratch.kv_indptr[place];
            self.lines[place] = Line { until: count.cast_unsigned(), ..Line::default() };
        }
        launched
    }

    /// Shrinks requests to `seq_lens` tokens. Returns how many slots were given back, and what was wrong with them.
    ///
    /// # Errors
    /// As [`Requests::name`] and [`Requests::check_cut`]; nothing is changed then. [`ErrorKind::IndexOwnership`] if the
    /// allocator is strict and somebody else freed a page before; all others were given back.
    pub fn truncate(
        &mut self,
        pools: Pools<'_>,
        (rows, seq_lens): (&IndexVec, &IndexVec),
        fence: Option<FenceId>,
    ) -> Result<(usize, BadFrees)> {
        as_many("seq_lens", seq_lens, rows)?;
        let named = self.requests.name(rows, pools.table.rows())?;
        let mut lens = reserve(named.len())?;
        for (position, (&row, len)) in named.iter().zip(seq_lens.iter()).enumerate() {
            lens.push(self.requests.check_cut(position, row, len, pools.slots.slots())?);
        }
        self.give_back(pools.slots, named.into_iter().zip(lens), fence)
    }

    /// Gives back all slots and the rows of requests, which are zeroed. `seq_lens` must be what they have, if given. Returns
    /// how many slots were given back, and what was wrong with them.
    ///
    /// # Errors
    /// As [`Requests::name`], and [`ErrorKind::Config`] for another length; nothing is changed then. As
    /// [`BatchPlanner::truncate`]; [`ErrorKind::Driver`] when the driver refuses to zero the rows, which are given back.
    pub fn finish(
        &mut self,
        pools: Pools<'_>,
        (rows, seq_lens): (&IndexVec, Option<&IndexVec>),
        fence: Option<FenceId>,
        stream: Stream,
    ) -> Result<(usize, BadFrees)> {
        let named = self.requests.name(rows, pools.table.rows())?;
        if let Some(lens) = seq_lens {
            as_many("seq_lens", lens, rows)?;
            for (position, (&row, len)) in named.iter().zip(lens.iter()).enumerate() {
                let has = self.requests.len(row);
                if i64::from(has) != len {
                    return Err(Error::config(format!(
                        "request row {row} at position {position} has {has} tokens with slots, not {len}"
                    )));
                }
            }
        }
        let given = self.give_back(pools.slots, named.into_iter().zip(std::iter::repeat(0)), fence);
        // Each row was found to be somebody's.
        let _ = pools.table.free(rows, stream)?;
        given
    }

    fn give_back(
        &mut self,
        slots: &mut TokenToKvPoolAllocator,
        cuts: impl Iterator<Item = (u32, u32)>,
        fence: Option<FenceId>,
    ) -> Result<(usize, BadFrees)> {
        let (mut given, mut bad) = (0, BadFrees::default());
        for (row, len) in cuts {
            let pages = self.requests.cut(row, len);
            self.forget_shown(row);
            given += pages.len();
            bad.append(match fence {
                None => slots.slots_mut().free_now(&pages, false)?,
                Some(fence) => slots.slots_mut().free_after(fence, &pages, false)?,
            });
        }
        self.changes += 1;
        if slots.strict() && bad.dropped() > 0 {
            let report = bad.describe(Slot::NOUN, given);
            return Err(Error::new(
                ErrorKind::IndexOwnership,
                format!("somebody else freed slots of the planner, which gave the others back: {report}"),
            ));
        }
        Ok((given, bad))
    }

    /// Gives request `dst`, which has nothing, the first `len` tokens of `src`, or returns `None` when there is no page for
    /// it. Full pages are shared; what the caller must copy is returned as slots to copy to and from, valid on `stream`.
    ///
    /// # Errors
    /// As [`Requests::name`]; [`ErrorKind::Config`] when `src` has less or `dst` has something; [`ErrorKind::Driver`] when
    /// the driver refuses. Nothing is changed.
    pub fn fork(
        &mut self,
        pools: Pools<'_>,
        [src, dst]: [i64; 2],
        len: i64,
        stream: Stream,
    ) -> Result<Option<[TensorView; 2]>> {
        let Pools { slots, table } = pools;
        let named = self.requests.name(&IndexVec::I64(vec![src, dst]), table.rows())?;
        let (src, dst) = (named[0], named[1]);
        let (has, taken) = (self.requests.len(src), self.requests.len(dst));
        let Some(len) = u32::try_from(len).ok().filter(|&len| len <= has && taken == 0) else {
            return Err(Error::config(format!(
                "request row {src} has {has} tokens with slots and row {dst} has {taken}; {len} cannot be shared with \
                 it, which must have none"
            )));
        };
        let Some(copied) = self.requests.fork([src, dst], len, slots.slots_mut())? else { return Ok(None) };
        let written = self.write_fork(slots, table, dst, len, copied, stream);
        if written.is_err() {
            let growth = Growth { row: dst, start: 0, prefix: 0, seq: len };
            self.requests.shrink(&[growth], slots.slots_mut());
        }
        self.changes += 1;
        written.map(Some)
    }

    fn write_fork(
        &self,
        slots: &mut TokenToKvPoolAllocator,
        table: &mut ReqToTokenPool,
        dst: u32,
        len: u32,
        copied: [std::ops::Range<u32>; 2],
        stream: Stream,
    ) -> Result<[TensorView; 2]> {
        let [to, from] = copied.map(|slots| slots.map(u32::cast_signed).collect::<Vec<_>>());
        let copied = [slots.show(to, stream)?, slots.show(from, stream)?];
        if len > 0 {
            let mut values = reserve(widen(len))?;
            self.requests.slots(dst, 0, len, &mut values);
            let values = Indices::Host(IndexVec::I32(values));
            table.write(&TableIndex::first_columns(dst, len), &values, stream)?;
        }
        Ok(copied)
    }

    /// An array of a plan on the device, `None` if it is not made. No copy.
    ///
    /// # Errors
    /// [`ErrorKind::StaleBuffer`] when there was another plan since.
    pub fn field(&self, plan: &Plan, field: Field) -> Result<Option<TensorView>> {
        self.check_current(plan, plan.number == self.plans)?;
        self.view(&self.fields, plan, field)
    }

    /// An array of a plan on the host, `None` if it is not made. A copy, or where the plan is made.
    ///
    /// # Errors
    /// [`ErrorKind::StaleBuffer`] when there was another plan since, or, for one that grows with the context, when the pages
    /// of a request have changed.
    pub fn host_field(&self, plan: &Plan, field: Field) -> Result<Option<TensorView>> {
        self.check_current(plan, plan.number == self.plans)?;
        let Some(remote) = &self.remote else { return self.view(&self.fields, plan, field) };
        let width = match field {
            Field::KvIndices if self.config.kv_indices => None,
            Field::BlockTable if self.config.block_table => Some(self.width),
            Field::KvIndices | Field::BlockTable => return Ok(None),
            _ => return self.view(&remote.host, plan, field),
        };
        self.check_current(plan, plan.changes == self.changes)?;
        let mut values: Vec<i32> = reserve(width.map_or(plan.kv_len, |width| plan.padded_batch_size * width))?;
        for place in 0..plan.padded_batch_size {
            if place < plan.batch_size {
                let row = self.scratch.req_pool_indices[place].cast_unsigned();
                values.extend_from_slice(self.requests.pages(row));
            } else {
                let count = self.scratch.kv_indptr[place + 1] - self.scratch.kv_indptr[place];
                values.resize(values.len() + widen(count.cast_unsigned()), 0);
            }
            if let Some(width) = width {
                values.resize((place + 1) * width, 0);
            }
        }
        let shape = width.map_or(vec![plan.kv_len], |width| vec![plan.padded_batch_size, width]);
        let region = Arc::new(Region::from_indices(values));
        TensorView::contiguous(region, 0, field.dtype(), &shape).map(Some)
    }

    fn check_current(&self, plan: &Plan, is_current: bool) -> Result<()> {
        if is_current {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::StaleBuffer,
            format!(
                "plan {} is not the last any more: its arrays were overwritten by plan {}, or its requests have \
                 changed; take them before",
                plan.number, self.plans
            ),
        ))
    }

    fn view(&self, region: &Arc<Region>, plan: &Plan, field: Field) -> Result<Option<TensorView>> {
        let (tokens, batch) = (plan.padded_num_tokens, plan.padded_batch_size);
        let line = [batch, self.width];
        let shape: &[usize] = match field {
            Field::OutCacheLoc | Field::Positions | Field::SlotMapping => &[tokens],
            Field::ReqPoolIndices | Field::SeqLens | Field::KvLastPageLen => &[batch],
            Field::QoIndptr | Field::KvIndptr => &[batch + 1],
            Field::KvIndices if self.config.kv_indices => &[plan.kv_len],
            Field::BlockTable if self.config.block_table => &line,
            Field::KvIndices | Field::BlockTable => return Ok(None),
        };
        TensorView::contiguous(Arc::clone(region), self.offsets[field.at()], field.dtype(), shape).map(Some)
    }
}

impl Scratch {
    fn clear(&mut self) {
        let Self { slots, out_cache_loc, positions, slot_mapping, .. } = self;
        for values in [slots, out_cache_loc, positions] {
            values.clear();
        }
        slot_mapping.clear();
        let Self { req_pool_indices, seq_lens, qo_indptr, kv_indptr, kv_last_page_len, .. } = self;
        for values in [req_pool_indices, seq_lens, qo_indptr, kv_indptr, kv_last_page_len] {
            values.clear();
        }
        self.requests.clear();
        self.pages.clear();
    }
}

/// Where each field begins, and the bytes of all.
fn layout(config: PlannerConfig, width: usize) -> Result<([usize; Field::ALL.len()], usize)> {
    let PlannerConfig { max_batch_size, max_tokens, .. } = config;
    let mut offsets = [0; Field::ALL.len()];
    let mut end = 0usize;
    for field in Field::ALL {
        offsets[field.at()] = end;
        let shape: &[usize] = match field {
            Field::OutCacheLoc | Field::Positions | Field::SlotMapping => &[max_tokens],
            Field::ReqPoolIndices | Field::SeqLens | Field::KvLastPageLen => &[max_batch_size],
            Field::QoIndptr | Field::KvIndptr => &[max_batch_size + 1],
            Field::KvIndices => &[usize::from(config.kv_indices), max_batch_size, width],
            Field::BlockTable => &[usize::from(config.block_table), max_batch_size, width],
        };
        end += bytes_of("a plan", shape, field.dtype())?.next_multiple_of(ALIGNMENT);
    }
    Ok((offsets, end))
}

/// The pages of a request that cross to the device.
fn sent_pages(growth: Growth, page_size: u32) -> std::ops::Range<usize> {
    widen(growth.start / page_size)..widen(growth.seq.div_ceil(page_size))
}

fn signed(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// The least of `sizes` that a batch of `count` fits.
fn padded_size(count: usize, sizes: &[usize], padding_row: bool) -> Result<usize> {
    let found = sizes.iter().copied().filter(|&size| size >= count).min();
    let size = found.ok_or_else(|| {
        Error::config(format!("a batch of {count} requests is larger than all of pad_to {sizes:?}"))
    })?;
    if size > count && !padding_row {
        return Err(Error::config(format!(
            "a batch of {count} requests cannot be padded to {size}: the request table has no padding row"
        )));
    }
    Ok(size)
}

fn as_many(name: &str, values: &IndexVec, rows: &IndexVec) -> Result<()> {
    if values.len() == rows.len() {
        return Ok(());
    }
    Err(Error::config(format!(
        "a batch of {} rows and {} {name}; the lengths must be equal",
        rows.len(),
        values.len()
    )))
}
