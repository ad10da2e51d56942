//! The tokens and pages of each request, by row.
//!
//! [`Requests`] records which pages a request has. [`RowTable`] owns the rows and [`SlotAllocator`] the
//! pages. Growing a batch costs a few steps for each request and page.

use std::fmt;
use std::ops::Range;

use crate::base::bounded::narrow;
use crate::base::{
    Error, ErrorKind, Id, IndexVec, PADDING, Page, RequestRow, Result, try_with_capacity, widen,
};

use super::{Ledgered, Moment, PageList, PageSize, RowTable, Run, SlotAllocator};

#[derive(Clone, Debug)]
struct Request {
    /// The generation of the row when the request began. If the row has another one now, the entry is of an
    /// earlier request.
    generation: u32,
    /// The number of tokens that have slots.
    len: u32,
    /// The first position that has to be written to the table again; [`Request::WRITTEN`] if there is none.
    unwritten: u32,
    /// The number of leading pages that a cache owns; the request owns the others.
    leased: u32,
    /// The pages of positions `0..len`; the last one may be partly used.
    pages: PageList,
    /// The last batch with this request.
    batch: u64,
    /// The moment when the first page was taken.
    since: Moment,
    /// The number of tokens whose slots ended when the allocator was cleared; 0 if it grew again.
    cleared: u32,
}

impl Request {
    const WRITTEN: u32 = u32::MAX;

    /// Creates a request without tokens.
    fn new(generation: u32, batch: u64) -> Self {
        Self {
            generation,
            len: 0,
            unwritten: Self::WRITTEN,
            leased: 0,
            pages: PageList::default(),
            batch,
            since: Moment::default(),
            cleared: 0,
        }
    }
}

impl Request {
    /// Returns what the request of `row` had, if it had tokens.
    fn abandoned(self, row: RequestRow) -> Option<AbandonedRequest> {
        let Self { len, leased, pages, since, .. } = self;
        (len > 0).then_some(AbandonedRequest { row, len, pages, leased, since })
    }
}

/// The requested growth of one request in a batch. Only the row is checked.
///
/// ```
/// use kvpool::base::{Id, IndexVec, RequestRow};
/// use kvpool::index::{AbandonedRequest, Growth, GrowthRequest, Ledgered, OnBadFree, Order, Requests};
/// use kvpool::index::{RowExtent, RowTable, SlotAllocator};
/// let mut rows = RowTable::<RequestRow>::new(1, 4).unwrap();
/// let mut slots = Ledgered::from(SlotAllocator::new(64, 4, Order::Sorted).unwrap());
/// let mut requests = Requests::new(5, &slots).unwrap();
/// let RowExtent { row, .. } = rows.alloc_one().expect("four are free");
/// let named = IndexVec::I64(vec![row.number().into()]);
/// requests.resolve_rows(&named, &rows).unwrap();
/// let growth: Growth = requests.growth(row, 0, 6).expect("it has no tokens");
/// assert_eq!((growth.new_pages, growth.new_tokens()), (2, 6));
/// assert!(requests.grow(&[growth], &mut [], &mut slots).unwrap());
///
/// let wrong = GrowthRequest { position: 0, row, prefix: 7, seq: 8 };
/// assert!(requests.growth(row, wrong.prefix, wrong.seq).is_none());
/// assert!(requests.growth_error(wrong).to_string().contains("has 6 tokens"));
///
/// // The row is freed without the pages.
/// rows.free(&named, OnBadFree::Report).unwrap();
/// requests.find_abandoned(&rows);
/// let abandoned: &AbandonedRequest = &requests.abandoned()[0];
/// assert_eq!((abandoned.len, abandoned.own_pages().len()), (6, 2));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrowthRequest {
    /// The position of the request in the batch.
    pub position: usize,
    /// The row of the request.
    pub row: RequestRow,
    /// The number of tokens of the request before, as the caller counts them.
    pub prefix: i64,
    /// The number of tokens of the request afterwards.
    pub seq: i64,
}

/// The growth of one request in a batch, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// The row of the request.
    pub row: RequestRow,
    /// The number of tokens that the request had before.
    pub had: u32,
    /// The number of leading positions that are in the table already.
    pub start: u32,
    /// The number of leading positions that need no computation.
    pub prefix: u32,
    /// The number of tokens afterwards.
    pub seq: u32,
    /// The number of pages to take.
    pub new_pages: u32,
    /// Whether a cache keeps the prefix of a new request, which then does not own it.
    pub is_leased: bool,
}

impl Growth {
    /// Creates a request of the padding row with `tokens` new tokens, which takes no pages.
    #[must_use]
    pub fn padding(tokens: u32) -> Self {
        let row = RequestRow::new(PADDING);
        Self { row, had: 0, start: 0, prefix: 0, seq: tokens, new_pages: 0, is_leased: false }
    }

    /// Returns the number of tokens to compute.
    #[must_use]
    pub const fn new_tokens(self) -> usize {
        widen(self.seq - self.prefix)
    }
}

/// The own pages of a request whose row was freed without them.
#[derive(Clone, Debug)]
pub struct AbandonedRequest {
    /// The row that the request had.
    pub row: RequestRow,
    /// The number of tokens that had slots.
    pub len: u32,
    /// All pages of the request.
    pages: PageList,
    /// The number of leading pages that a cache owns.
    leased: u32,
    /// The moment when the first of them was taken.
    pub since: Moment,
}

impl AbandonedRequest {
    /// Returns the pages that the request owned.
    #[must_use]
    pub fn own_pages(&self) -> impl ExactSizeIterator<Item = Page> + '_ {
        let own = widen(self.leased)..self.pages.len();
        own.map(|at| self.pages.get(at))
    }
}

/// The pages of every request, from which tables and metadata are built.
///
/// Pages are filled from their first slot on: position `i` of a request is slot `pages[i / page_size] *
/// page_size + i % page_size`. A last page that is not full has one owner, so that no other request reads
/// what is written there.
///
/// ```
/// use kvpool::base::{IndexVec, RequestRow};
/// use kvpool::index::{Ledgered, Order, Requests, RowTable, SlotAllocator};
/// let mut rows = RowTable::<RequestRow>::new(1, 4).unwrap();
/// let mut slots = Ledgered::from(SlotAllocator::new(64, 4, Order::Sorted).unwrap());
/// let mut requests = Requests::new(5, &slots).unwrap();
/// rows.alloc(1).unwrap();
/// let row = IndexVec::I64(vec![1]);
/// let named = requests.resolve_rows(&row, &rows).unwrap();
/// let growth = [requests.growth(named[0], 0, 6).unwrap()];
/// assert!(requests.grow(&growth, &mut [], &mut slots).unwrap());
/// assert_eq!((requests.pages(named[0]).len(), requests.len(named[0])), (2, 6));
/// ```
#[derive(Clone)]
pub struct Requests {
    by_row: Vec<Request>,
    page_size: PageSize,
    /// The number of batches so far.
    batches: u64,
    /// Requests whose rows were freed without their pages.
    abandoned: Vec<AbandonedRequest>,
}

impl fmt::Debug for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Requests")
            .field("rows", &self.by_row.len())
            .field("page_size", &self.page_size)
            .finish_non_exhaustive()
    }
}

impl Requests {
    /// Requests without tokens, for a table with `rows` rows.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when the host cannot allocate the record.
    pub fn new(rows: usize, slots: &SlotAllocator) -> Result<Self> {
        let page_size = PageSize::new(slots.slots_of_a_page());
        let mut by_row = try_with_capacity(rows)?;
        by_row.resize(rows, Request::new(0, 0));
        Ok(Self { by_row, page_size, batches: 0, abandoned: Vec::new() })
    }

    /// Returns the number of slots in a page.
    #[must_use]
    pub const fn page_size(&self) -> PageSize {
        self.page_size
    }

    fn request(&self, row: RequestRow) -> &Request {
        &self.by_row[widen(row.number())]
    }

    fn request_mut(&mut self, row: RequestRow) -> &mut Request {
        &mut self.by_row[widen(row.number())]
    }

    /// Returns the number of tokens of a request that have slots.
    #[must_use]
    pub fn len(&self, row: RequestRow) -> u32 {
        self.request(row).len
    }

    /// Returns the number of leading tokens that a cache keeps for a request.
    #[must_use]
    pub fn leased(&self, row: RequestRow) -> u32 {
        self.request(row).leased * self.page_size.slots()
    }

    /// Returns the pages of a request.
    #[must_use]
    pub fn pages(&self, row: RequestRow) -> &PageList {
        &self.request(row).pages
    }

    /// Returns the number of requests with tokens, and the number of their tokens.
    #[must_use]
    pub fn totals(&self, rows: &RowTable<RequestRow>) -> (usize, usize) {
        let live = (0..).map(RequestRow::new).zip(&self.by_row).filter(|&(row, request)| {
            request.len > 0 && rows.rows().is_live(row) && rows.generation(row) == request.generation
        });
        live.fold((0, 0), |(requests, tokens), (_, request)| (requests + 1, tokens + widen(request.len)))
    }

    /// Checks that the rows of a batch are allocated and listed once, and returns them. A row that was handed
    /// out again starts without tokens.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for a row outside of the table, [`ErrorKind::IndexOwnership`] for one that is not
    /// allocated, [`ErrorKind::Argument`] for one that is listed twice.
    pub fn resolve_rows(
        &mut self,
        values: &IndexVec,
        rows: &RowTable<RequestRow>,
    ) -> Result<Vec<RequestRow>> {
        self.batches += 1;
        let resolved = values.ids::<RequestRow>(self.by_row.len())?;
        for (position, &row) in resolved.iter().enumerate() {
            if !rows.rows().contains(row) || !rows.rows().is_live(row) {
                return Err(Error::new(
                    ErrorKind::IndexOwnership,
                    format!("request row {row} at position {position} is not allocated"),
                )
                .with_index(row.number()));
            }
            let request = &mut self.by_row[widen(row.number())];
            if request.batch == self.batches {
                return Err(Error::argument(format!("request row {row} is resolved twice in one batch")));
            }
            request.batch = self.batches;
            let generation = rows.generation(row);
            if request.generation != generation {
                let before = std::mem::replace(request, Request::new(generation, self.batches));
                self.abandoned.extend(before.abandoned(row));
            }
        }
        Ok(resolved)
    }

    /// Ends the tokens of all requests: the allocator of their slots was cleared.
    pub fn clear(&mut self) {
        self.abandoned.clear();
        for request in &mut self.by_row {
            let cleared = request.len.max(request.cleared);
            *request = Request { cleared, ..Request::new(request.generation, request.batch) };
        }
    }

    /// Returns the number of tokens whose slots ended when the allocator was cleared, unless the request has
    /// grown since.
    #[must_use]
    pub fn cleared(&self, row: RequestRow) -> u32 {
        self.request(row).cleared
    }

    /// Finds the requests whose rows were freed by another call, and whose pages were not.
    pub fn find_abandoned(&mut self, rows: &RowTable<RequestRow>) {
        for (row, request) in (0..).map(RequestRow::new).zip(&mut self.by_row) {
            if request.len > 0 && !(rows.rows().is_live(row) && rows.generation(row) == request.generation) {
                let over = Request::new(request.generation, request.batch);
                self.abandoned.extend(std::mem::replace(request, over).abandoned(row));
            }
        }
    }

    /// Returns whether there are abandoned requests.
    #[must_use]
    pub const fn has_abandoned(&self) -> bool {
        !self.abandoned.is_empty()
    }

    /// Returns the abandoned requests.
    #[must_use]
    pub fn abandoned(&self) -> &[AbandonedRequest] {
        &self.abandoned
    }

    /// Takes the abandoned requests.
    #[must_use]
    pub fn take_abandoned(&mut self) -> Vec<AbandonedRequest> {
        std::mem::take(&mut self.abandoned)
    }

    /// Returns the growth of a request of the batch from `prefix` to `seq` tokens. Returns `None` when it
    /// does not have exactly `prefix` tokens, or `seq` is less: see [`Requests::growth_error`].
    #[inline]
    #[must_use]
    pub fn growth(&self, row: RequestRow, prefix: i64, seq: i64) -> Option<Growth> {
        self.lengths(row, prefix, seq).filter(|growth| growth.prefix == self.len(row))
    }

    /// Returns the growth of a request, as far as its lengths determine it.
    #[inline]
    fn lengths(&self, row: RequestRow, prefix: i64, seq: i64) -> Option<Growth> {
        if prefix < 0 || prefix > seq || seq > i64::from(i32::MAX) {
            return None;
        }
        let (prefix, seq) = (u32::try_from(prefix).ok()?, u32::try_from(seq).ok()?);
        let new_pages = self.page_size.pages(seq) - self.page_size.pages(prefix);
        let start = prefix.min(self.request(row).unwritten);
        Some(Growth { row, had: prefix, start, prefix, seq, new_pages, is_leased: false })
    }

    /// Returns the error for invalid lengths of the request at `position` of a batch.
    #[cold]
    #[must_use]
    pub fn growth_error(&self, GrowthRequest { position, row, prefix, seq }: GrowthRequest) -> Error {
        if let Some(error) = self.cleared_error(position, row) {
            return error;
        }
        let text = if self.lengths(row, prefix, seq).is_some() {
            let len = self.len(row);
            format!("has {len} tokens with slots; it cannot grow from {prefix} to {seq}")
        } else {
            format!("grows from {prefix} to {seq} tokens; needed is 0 <= prefix <= seq <= {}", i32::MAX)
        };
        Error::argument(format!("request row {row} at position {position} {text}"))
    }

    /// Returns the error for a request that has no tokens because the allocator was cleared.
    #[cold]
    #[must_use]
    pub fn cleared_error(&self, position: usize, row: RequestRow) -> Option<Error> {
        let cleared = self.cleared(row);
        let text = format!(
            "the {cleared} tokens of request row {row} at position {position} ended when the allocator was cleared or \
             resized; extend the request from 0 tokens, or finish it"
        );
        (cleared > 0).then(|| Error::stale(text))
    }

    /// Works like [`Requests::growth_error`], for a decode step to `seq` tokens, of which `width` are new.
    #[cold]
    #[must_use]
    pub fn decode_error(&self, request: GrowthRequest, width: i64) -> Error {
        let GrowthRequest { position, row, prefix, seq } = request;
        if let Some(error) = self.cleared_error(position, row) {
            return error;
        }
        let len = i64::from(self.len(row));
        if self.lengths(row, prefix, seq).is_none() && seq != len {
            return self.growth_error(request);
        }
        Error::argument(format!(
            "request row {row} at position {position} has {len} tokens with slots; seq_lens are the lengths after \
             the step, which has {width} new tokens of each request: {}, not {seq}",
            len.saturating_add(width)
        ))
    }

    /// Works like [`Requests::growth`], for a new request with a cached prefix in `slots`. Also returns their
    /// pages.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when it has tokens already, when there are not `prefix` slots, or they do not
    /// fill pages in order; [`ErrorKind::IndexOwnership`] when one is not live.
    pub fn growth_of_cached(
        &self,
        asked: GrowthRequest,
        cached: &IndexVec,
        slots: &SlotAllocator,
    ) -> Result<(Growth, PageList)> {
        let GrowthRequest { position, row, prefix, .. } = asked;
        let growth = self.growth_of_new(asked)?;
        let size = self.page_size.slots();
        if cached.len() != widen(growth.prefix) || self.page_size.offset(growth.prefix) != 0 {
            return Err(Error::argument(format!(
                "the cached prefix of request row {row} at position {position} has {} slots for a prefix of {prefix} \
                 tokens; the numbers must be equal, in whole pages of {size}",
                cached.len()
            )));
        }
        let mut pages: Vec<Page> = try_with_capacity(widen(self.page_size.page(growth.prefix)))?;
        for (at, slot) in cached.iter().enumerate() {
            let offset = narrow(at % widen(size));
            if offset == 0 {
                let page = u32::try_from(slot).ok().map(|slot| Page::new(slot / size));
                let Some(page) = page.filter(|&page| slots.is_owned(page)) else {
                    return Err(Error::new(
                        ErrorKind::IndexOwnership,
                        format!(
                            "slot {slot} in the cached prefix of request row {row} at position {position} is not \
                             allocated"
                        ),
                    )
                    .with_index(slot));
                };
                pages.push(page);
            }
            let first = pages.last().map_or(0, |page| i64::from(page.number()) * i64::from(size));
            if first + i64::from(offset) != slot {
                return Err(Error::argument(format!(
                    "slot {slot} in the cached prefix of request row {row} at position {position} is not number \
                     {offset} of a page of {size}"
                )));
            }
        }
        Ok((growth, pages.into()))
    }

    /// Returns the growth of a request without tokens.
    fn growth_of_new(&self, asked: GrowthRequest) -> Result<Growth> {
        let GrowthRequest { position, row, prefix, seq } = asked;
        let Some(growth) = self.lengths(row, prefix, seq) else { return Err(self.growth_error(asked)) };
        let len = self.len(row);
        if len > 0 {
            return Err(Error::argument(format!(
                "request row {row} at position {position} has {len} tokens with slots; only a new request takes a \
                 cached prefix, and this one continues with its own lease or none"
            )));
        }
        Ok(Growth { had: 0, start: 0, ..growth })
    }

    /// Works like [`Requests::growth`], for a new request with a leased prefix of `leased` pages.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when it has tokens already, or the prefix has another length.
    pub fn growth_of_leased(&self, asked: GrowthRequest, leased: usize) -> Result<Growth> {
        let growth = self.growth_of_new(asked)?;
        let tokens = leased * widen(self.page_size.slots());
        if tokens != widen(growth.prefix) {
            let GrowthRequest { position, row, prefix, .. } = asked;
            return Err(Error::argument(format!(
                "the lease of request row {row} at position {position} has {tokens} tokens for a prefix of {prefix}"
            )));
        }
        Ok(Growth { is_leased: true, ..growth })
    }

    /// Checks that a request still owns the page that it continues.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`] when another call freed it.
    #[inline]
    pub fn check_open(&self, position: usize, growth: Growth, slots: &SlotAllocator) -> Result<()> {
        if self.page_size.offset(growth.had) == 0 || growth.had == growth.seq {
            return Ok(());
        }
        let open = self.pages(growth.row).get(widen(self.page_size.page(growth.had)));
        self.check_owned(position, growth.row, open, slots)
    }

    /// Checks that a request still owns one of its pages.
    #[inline]
    fn check_owned(&self, position: usize, row: RequestRow, page: Page, slots: &SlotAllocator) -> Result<()> {
        if slots.is_owned(page) { Ok(()) } else { Err(self.not_owned_error(position, row, page)) }
    }

    #[cold]
    fn not_owned_error(&self, position: usize, row: RequestRow, page: Page) -> Error {
        let slot = page.number() * self.page_size.slots();
        Error::new(
            ErrorKind::IndexOwnership,
            format!("slot {slot} of request row {row} at position {position} was freed by another caller"),
        )
        .with_index(slot)
    }

    /// Grows all requests of a batch, or none. A new request gets the pages of its cached prefix, which are
    /// shared unless they are leased; then new pages are taken. If there are too few, returns `false` and
    /// takes nothing.
    ///
    /// `prefixes` are the cached prefixes of the new requests that have one, in the order of the batch.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when the host cannot allocate the bookkeeping.
    pub fn grow(
        &mut self,
        batch: &[Growth],
        prefixes: &mut [&mut PageList],
        slots: &mut Ledgered<SlotAllocator>,
    ) -> Result<bool> {
        let (mut needed, mut has_shared) = (0, false);
        let mut later = prefixes.iter_mut();
        for growth in batch {
            let pages = if growth.had < growth.prefix {
                has_shared |= !growth.is_leased;
                &mut **later.next().expect("each cached prefix has its pages")
            } else {
                &mut self.request_mut(growth.row).pages
            };
            pages.try_reserve(widen(growth.new_pages))?;
            pages.prefetch_end();
            needed += widen(growth.new_pages);
        }
        let mut taken = NewPages::new(needed)?;
        let reservation = if has_shared { Some(slots.prepare_sharing()?) } else { None };
        if !slots.alloc_page_runs(needed, &mut taken.runs)? {
            return Ok(false);
        }
        let mut prefixes = prefixes.iter_mut();
        let now = slots.take_moment();
        for &growth in batch {
            let request = self.request_mut(growth.row);
            if growth.had == 0 {
                request.since = now;
            }
            if growth.had < growth.prefix {
                let pages = std::mem::take(*prefixes.next().expect("each cached prefix has its pages"));
                match reservation.filter(|_| !growth.is_leased) {
                    Some(reservation) => {
                        slots.share_pages(reservation, pages.iter_from(0));
                    }
                    None => request.leased = narrow(pages.len()),
                }
                // A new request has no pages yet.
                request.pages = pages;
            }
            taken.move_to(&mut request.pages, growth.new_pages);
            request.len = growth.seq;
        }
        Ok(true)
    }

    /// Undoes [`Requests::grow`] of this batch. Needs no memory.
    pub fn shrink(&mut self, batch: &[Growth], slots: &mut Ledgered<SlotAllocator>) {
        for growth in batch {
            let (_, own) = self.kept(growth.row, growth.had);
            slots.give_back_each(self.pages(growth.row).iter_from(own));
            self.truncate(growth.row, growth.had);
        }
    }

    /// Returns the number of pages that a request keeps if its tokens from `len` on are dropped, and the
    /// position of the first page that it owned and drops.
    fn kept(&self, row: RequestRow, len: u32) -> (usize, usize) {
        let request = self.request(row);
        let keep = widen(self.page_size.pages(len)).min(request.pages.len());
        (keep, keep.max(widen(request.leased)))
    }

    /// Returns the number of pages that a request owns and gives up if its tokens from `len` on are dropped.
    #[must_use]
    pub fn own_pages_from(&self, row: RequestRow, len: u32) -> usize {
        let (_, own) = self.kept(row, len);
        self.pages(row).len().saturating_sub(own)
    }

    /// Prepares [`Requests::truncate`]. Appends one slot of each page to free that the request owns to `slots`,
    /// which has room for them.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when the host cannot allocate the list of the pages that stay.
    pub fn prepare_truncate(&mut self, row: RequestRow, len: u32, slots: &mut Vec<i32>) -> Result<()> {
        let (keep, own) = self.kept(row, len);
        let size = self.page_size.slots();
        let pages = &mut self.request_mut(row).pages;
        pages.prepare_truncate(keep)?;
        // By runs, which are copied without a branch for each page.
        for run in pages.runs(own..pages.len()) {
            slots.extend(run.iter().map(|page| (page.number() * size).cast_signed()));
        }
        Ok(())
    }

    /// Drops the tokens of a request from `len` on. It needs no memory if it was prepared, or if all pages
    /// that stay were there before the last growth.
    pub fn truncate(&mut self, row: RequestRow, len: u32) {
        let (keep, _) = self.kept(row, len);
        let request = self.request_mut(row);
        request.len = len.min(request.len);
        request.pages.truncate(keep);
        request.leased = request.leased.min(narrow(keep));
    }

    /// Checks that a request can be truncated to `len` tokens.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when it has fewer; [`ErrorKind::IndexOwnership`] when its new last page has
    /// another owner too, and slots that would be written again.
    pub fn check_truncate(
        &self,
        position: usize,
        row: RequestRow,
        len: i64,
        slots: &SlotAllocator,
    ) -> Result<u32> {
        let has = self.len(row);
        let Some(len) = u32::try_from(len).ok().filter(|&len| len <= has) else {
            if let Some(error) = self.cleared_error(position, row) {
                return Err(error);
            }
            return Err(Error::argument(format!(
                "request row {row} at position {position} has {has} tokens with slots; it cannot be cut to {len}"
            )));
        };
        if len < has && self.page_size.offset(len) != 0 {
            let page = self.pages(row).get(widen(self.page_size.page(len)));
            if slots.is_shared(page) {
                return Err(Error::new(
                    ErrorKind::IndexOwnership,
                    format!(
                        "request row {row} at position {position} cannot be cut to {len} tokens: that is within page \
                         {page}, which has another owner, and later tokens would overwrite what that reads"
                    ),
                ));
            }
        }
        Ok(len)
    }

    /// Copies the first `len` tokens of `src` to request `dst`, which has no tokens. Full pages are shared,
    /// except the leading `leased` ones, which a cache owns; a partial page is replaced by a new one. Returns
    /// the slots to copy from and to, or `None` if no page is free.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`] when another call freed a page of `src`; otherwise same as
    /// [`Requests::grow`].
    pub fn fork(
        &mut self,
        [src, dst]: [RequestRow; 2],
        len: u32,
        leased: usize,
        slots: &mut Ledgered<SlotAllocator>,
    ) -> Result<Option<[Range<u32>; 2]>> {
        let shared = self.pages(src).runs(0..widen(self.page_size.pages(len))).flatten();
        shared.copied().try_for_each(|page| self.check_owned(0, src, page, slots))?;
        let full = widen(self.page_size.page(len));
        let rest = self.page_size.offset(len);
        let mut pages = self.pages(src).first(full, 1)?;
        let mut taken = NewPages::new(1)?;
        let reservation = slots.prepare_sharing()?;
        if !slots.alloc_page_runs(usize::from(rest > 0), &mut taken.runs)? {
            return Ok(None);
        }
        slots.share_pages(reservation, pages.iter_from(leased));
        taken.move_to(&mut pages, u32::from(rest > 0));
        let copied = if rest == 0 {
            [0..0, 0..0]
        } else {
            [&pages, self.pages(src)].map(|pages| {
                let first = pages.get(full).number() * self.page_size.slots();
                first..first + rest
            })
        };
        let now = slots.take_moment();
        let request = self.request_mut(dst);
        (request.len, request.pages, request.leased) = (len, pages, narrow(leased));
        request.since = now;
        Ok(Some(copied))
    }

    /// Records that a cache keeps the leading pages of a request, the last of which are `cached`. Returns the
    /// first page that differs from the request's own, from which on its row of the table is to be written.
    pub fn lease(&mut self, row: RequestRow, from: usize, cached: &[Page]) -> Option<usize> {
        let page_size = self.page_size.slots();
        let request = self.request_mut(row);
        let changed = request.pages.replace(from, cached);
        request.leased = narrow(from + cached.len());
        let changed = changed?;
        request.unwritten = request.unwritten.min(narrow(changed) * page_size);
        Some(changed)
    }

    /// Records that the table has all slots of the requests of a batch.
    pub fn record_written(&mut self, batch: &[Growth]) {
        for growth in batch {
            let request = self.request_mut(growth.row);
            (request.unwritten, request.cleared) = (Request::WRITTEN, 0);
        }
    }

    /// Appends the slots of positions `from..to` of a request to `out`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a decode step calls it for each request")]
    pub fn slots(&self, row: RequestRow, from: u32, to: u32, out: &mut Vec<i32>) {
        let (pages, size) = (self.pages(row), self.page_size);
        // As in most decode steps.
        if to - from == 1 {
            let page = pages.get(widen(size.page(from))).number();
            return out.push((page * size.slots() + size.offset(from)).cast_signed());
        }
        self.slots_of(pages, from, to, out);
    }

    /// Works like [`Self::slots`], for the request that has `pages`.
    #[inline(never)]
    fn slots_of(&self, pages: &PageList, from: u32, to: u32, out: &mut Vec<i32>) {
        let size = self.page_size;
        let mut at = from;
        if size.slots() == 1
            && let Some(pages) = pages.unshared()
        {
            return out.extend(pages[widen(from)..widen(to)].iter().map(|page| page.number().cast_signed()));
        }
        if size.offset(from) == 0 {
            // There is no `for` loop because there is usually one run.
            pages
                .runs(widen(size.page(from))..widen(size.page(to)))
                .for_each(|run| put_slots_of(run.iter().map(|page| page.number()), size.slots(), out));
            at = size.page(to) * size.slots();
        }
        while at < to {
            let page = pages.get(widen(size.page(at))).number() * size.slots();
            let offset = size.offset(at);
            let end = to.min(at - offset + size.slots());
            let first = page + offset;
            out.extend((first..first + (end - at)).map(u32::cast_signed));
            at = end;
        }
    }
}

/// Appends the slots of whole pages to `out`.
pub(crate) fn put_slots_of(pages: impl ExactSizeIterator<Item = u32>, page_size: u32, out: &mut Vec<i32>) {
    if page_size == 1 {
        return out.extend(pages.map(u32::cast_signed));
    }
    let begin = out.len();
    out.resize(begin + pages.len() * widen(page_size), 0);
    for (slots, page) in out[begin..].chunks_exact_mut(widen(page_size)).zip(pages) {
        for (slot, number) in slots.iter_mut().zip(page * page_size..) {
            *slot = number.cast_signed();
        }
    }
}

/// Pages that were taken and not yet appended to a request.
struct NewPages {
    runs: Vec<Run<Page>>,
    /// The position of the next run in `runs`.
    at: usize,
}

impl NewPages {
    /// Makes room for the runs of up to `pages` pages.
    fn new(pages: usize) -> Result<Self> {
        /// Runs are usually long, and short batches frequent.
        const FEW: usize = 64;
        Ok(Self { runs: try_with_capacity(pages.min(FEW))?, at: 0 })
    }

    /// Takes the next page.
    #[inline]
    fn next(&mut self) -> Option<Page> {
        let run = self.runs.get_mut(self.at)?;
        let page = run.start;
        *run = Run { start: Page::new(page.number() + 1), len: run.len - 1 };
        self.at += usize::from(run.len == 0);
        Some(page)
    }

    /// Moves the next `count` pages, for which `pages` has room, to its end.
    #[inline]
    fn move_to(&mut self, pages: &mut PageList, count: u32) {
        // As in most decode steps.
        if count == 1 {
            if let Some(page) = self.next() {
                pages.push(page);
            }
            return;
        }
        let mut left = count;
        while left > 0
            && let Some(run) = self.runs.get_mut(self.at)
        {
            let (first, rest) = run.split(left);
            pages.extend(first.range().map(Page::new));
            left -= first.len;
            match rest {
                Some(rest) => *run = rest,
                None => self.at += 1,
            }
        }
    }
}
