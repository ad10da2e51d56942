//! The table of every request's slots.

mod device;

use std::sync::Arc;

use crate::base::bounded::narrow;
use crate::base::sync::explored::{Mutex, lock};
use crate::base::{
    DType, Device, Error, Id, IndexVec, Page, RequestRow, Result, bytes_of, run_blocking, try_zeros, widen,
};
use crate::index::{BadFrees, Ledgered, OnBadFree, RowExtent, RowTable};
use crate::kernels::{Executor, IndexSpace, IndexSpaces, Indices, Table};
use crate::memory::{Backend, BorrowedTensor, Event, Region, RegionWriter, Stream};
use crate::tensor::TensorView;

use super::contract::{Occupancy, Pool, Stats};
use super::mirror::{known_values, values_now};
use super::table_mirror::TableMirror;
use super::{Footprint, at_least_one, fits_int32};

/// Places of the table to write.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "made once a call, on the stack")]
pub enum TableIndex<'a> {
    /// Columns `start..end` of a row.
    Columns {
        /// The request row.
        row: i64,
        /// The first column, from 0 on.
        start: i64,
        /// The end; `None` for the end of the row.
        end: Option<i64>,
    },
    /// One place for each value: `(rows[i], columns[i])`.
    Points {
        /// One row for each value.
        rows: Indices<'a>,
        /// One column for each value.
        columns: Indices<'a>,
    },
}

impl TableIndex<'_> {
    /// Returns the first `count` columns of a row.
    pub(super) fn first_columns(row: RequestRow, count: u32) -> Self {
        Self::Columns { row: row.into(), start: 0, end: Some(count.into()) }
    }
}

/// The shape of a [`ReqToTokenPool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReqToTokenConfig {
    /// Maximum number of requests.
    pub max_reqs: usize,
    /// Maximum tokens per request: the number of columns.
    pub max_context_len: usize,
    /// Whether row 0 is a padding row, before the rows of requests.
    pub padding_row: bool,
    /// Whether an invalid free is an error.
    pub strict: bool,
    /// Whether rows are zero when they are handed out.
    pub zero_rows: bool,
    /// The writers of the table.
    pub writers: TableWriters,
}

/// The writers of a request table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TableWriters {
    /// The pool alone writes. Other writes are reported with [`ReqToTokenPool::mark_modified`].
    #[default]
    Pool,
    /// Others write as well, at any time: the host keeps no mirror, and takes a row that was handed out for
    /// written as a whole.
    Others,
}

impl ReqToTokenConfig {
    /// Creates a table for `max_reqs` requests with the defaults of the Python class: a padding row, and rows
    /// that are zeroed and written through the pool only.
    #[must_use]
    pub const fn new(max_reqs: usize, max_context_len: usize) -> Self {
        Self {
            max_reqs,
            max_context_len,
            padding_row: true,
            strict: false,
            zero_rows: true,
            writers: TableWriters::Pool,
        }
    }

    /// Rows and columns.
    fn shape(&self) -> Result<[usize; 2]> {
        let Self { max_reqs, max_context_len, padding_row, .. } = *self;
        let rows = fits_int32(&format!("max_reqs {max_reqs}"), max_reqs.checked_add(1))? - 1;
        fits_int32(&format!("max_context_len {max_context_len}"), Some(max_context_len))?;
        Ok([widen(rows + u32::from(padding_row)), max_context_len])
    }

    /// Returns the bytes of a pool on `device`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a table that does not fit int32.
    pub fn footprint(&self, device: Device) -> Result<Footprint> {
        let shape = self.shape()?;
        Footprint::new(device, bytes_of("req_to_token", &shape, DType::I32)?, numbers_at_once(shape))
    }
}

/// `req_to_token[request, position] -> slot`, int32. It does not track sequence lengths.
///
/// On a GPU the host keeps a mirror of the table, unless others write it at any time
/// ([`TableWriters::Others`]), so that slots read from it can be freed without a copy from the
/// device. Writes through this type update the mirror at once or, for values that only the device has,
/// when a kernel has echoed them. Other writes do not: see [`ReqToTokenPool::mark_modified`].
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::IndexVec;
/// use kvpool::kernels::Indices;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{ReqToTokenConfig, ReqToTokenPool, TableIndex};
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let config = ReqToTokenConfig::new(8, 128);
/// let mut pool = ReqToTokenPool::new(&config, &host).unwrap();
/// let row = i64::from(pool.alloc(1, stream).unwrap().unwrap()[0]);
/// assert_eq!(row, 1);
/// let slots = Indices::Host(IndexVec::I32(vec![7, 8]));
/// pool.write(&TableIndex::Columns { row, start: 0, end: Some(2) }, &slots, stream).unwrap();
/// assert!(pool.write(&TableIndex::Columns { row, start: 127, end: Some(129) }, &slots, stream).is_err());
/// ```
#[derive(Debug)]
pub struct ReqToTokenPool {
    config: ReqToTokenConfig,
    table: TensorView,
    /// The writer of a table in host memory.
    table_writer: RegionWriter,
    rows: Ledgered<RowTable<RequestRow>>,
    executor: Executor,
    /// The host's mirror of a table on a device that others do not write.
    mirror: Option<Arc<TableMirror>>,
    /// The number of times that each row was handed out, int64 by row in host memory.
    generation: TensorView,
    generation_writer: RegionWriter,
    generations: Vec<i64>,
}

impl ReqToTokenPool {
    /// Creates an empty table.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when `max_reqs` or `max_context_len` is 0, or
    /// does not fit int32; the error of the backend if it runs out of memory.
    pub fn new(config: &ReqToTokenConfig, backend: &Arc<dyn Backend>) -> Result<Self> {
        let ReqToTokenConfig { max_reqs, max_context_len, padding_row, .. } = *config;
        at_least_one(&[("max_reqs", max_reqs), ("max_context_len", max_context_len)])?;
        let shape = config.shape()?;
        let bytes = bytes_of("req_to_token", &shape, DType::I32)?;
        let table_writer = RegionWriter::new(Region::new(Arc::clone(backend), bytes)?);
        let region = table_writer.region();
        let spaces = spaces(shape);
        // One thread at a time changes the table, so there is no section to lock.
        let executor = Executor::new(region, 0, spaces, numbers_at_once(shape))?;
        let mirrored = executor.gpu().filter(|_| config.writers == TableWriters::Pool);
        let mirror = mirrored.map(|gpu| TableMirror::new(gpu, region, shape[0], shape[1])).transpose()?;
        let generations = try_zeros::<i64>(shape[0])?;
        let zeros = IndexVec::I64(try_zeros(shape[0])?);
        let generation_writer = RegionWriter::new(Region::from_indices(zeros));
        let generation =
            TensorView::contiguous(Arc::clone(generation_writer.region()), 0, DType::I64, &shape[..1])?;
        let table = TensorView::contiguous(Arc::clone(region), 0, DType::I32, &shape)?;
        let first = u32::from(padding_row);
        let rows = Ledgered::from(RowTable::new(first, narrow(shape[0]) - first)?);
        Ok(Self {
            config: *config,
            table,
            table_writer,
            rows,
            executor,
            mirror,
            generation,
            generation_writer,
            generations,
        })
    }

    /// Returns the maximum number of requests.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.config.max_reqs
    }

    /// Returns the maximum tokens per request: the number of columns.
    #[must_use]
    pub const fn max_context_len(&self) -> usize {
        self.config.max_context_len
    }

    /// Returns whether row 0 is padding.
    #[must_use]
    pub const fn padding_row(&self) -> bool {
        self.config.padding_row
    }

    /// Returns whether what was written to a row is zeroed when it is freed.
    #[must_use]
    pub const fn zero_rows(&self) -> bool {
        self.config.zero_rows
    }

    /// Returns the writers of the table.
    #[must_use]
    pub const fn writers(&self) -> TableWriters {
        self.config.writers
    }

    /// Returns whether an invalid free is an error.
    #[must_use]
    pub const fn strict(&self) -> bool {
        self.config.strict
    }

    /// Returns the device of the table.
    #[must_use]
    pub fn device(&self) -> Device {
        self.table.device()
    }

    /// Returns the table, int32 `[rows, max_context_len]`, without a copy.
    #[must_use]
    pub const fn req_to_token(&self) -> &TensorView {
        &self.table
    }

    /// Returns the number of times that each row was handed out: int64 `[rows]` in host memory, without a
    /// copy. [`Self::clear`] keeps it.
    #[must_use]
    pub const fn generation(&self) -> &TensorView {
        &self.generation
    }

    /// Returns the ownership of rows.
    #[must_use]
    pub const fn rows(&self) -> &Ledgered<RowTable<RequestRow>> {
        &self.rows
    }

    /// Returns the number of bytes of the table.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.table.region().bytes()
    }

    /// Returns the number of free rows.
    #[must_use]
    pub fn available_size(&self) -> usize {
        self.rows.rows().available()
    }

    /// Records owners and call sites from now on.
    pub fn keep_ledger(&mut self) {
        self.rows.open_ledger();
    }

    /// Takes `count` rows, first in, first out, or returns `None`. Their generations count up.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails.
    pub fn alloc(&mut self, count: usize, stream: Stream) -> Result<Option<Vec<RequestRow>>> {
        self.check_not_capturing(stream)?;
        let Some(taken) = self.rows.alloc(count) else { return Ok(None) };
        if let Err(failure) = self.clean(&taken, stream) {
            self.give_back(&taken);
            return Err(failure);
        }
        let rows: Vec<_> = taken.iter().map(|taken| taken.row).collect();
        for row in rows.iter().map(|row| widen(row.number())) {
            self.generations[row] += 1;
            self.generation_writer
                .write(row * size_of::<i64>(), &[self.generations[row]])
                .expect("each row has its number in host memory");
        }
        Ok(Some(rows))
    }

    /// Returns rows to the pool that were not handed out. They are zeroed later.
    fn give_back(&mut self, taken: &[RowExtent<RequestRow>]) {
        let rows = taken.iter().map(|taken| taken.row.into()).collect();
        let (_, bad) = self
            .rows
            .free(&IndexVec::I64(rows), OnBadFree::Report)
            .expect("a free that is not strict takes whatever it is given");
        debug_assert_eq!(bad.dropped(), 0, "all were taken just now");
        for taken in taken {
            self.rows.record_written(taken.row, self.columns());
        }
    }

    /// Frees rows and zeroes their written columns, unless rows are not zeroed; drops and reports rows that
    /// are not live.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) for an invalid free;
    /// nothing is changed. [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) while `stream` is being
    /// captured, when nothing is changed, and when the rows cannot be zeroed: they are free all the same, and
    /// zeroed before they are handed out again.
    pub fn free(&mut self, given: &IndexVec, stream: Stream) -> Result<BadFrees> {
        self.check_not_capturing(stream)?;
        let (mut freed, bad) = self.rows.free(given, OnBadFree::of(self.config.strict))?;
        if self.config.writers == TableWriters::Others {
            for freed in &mut freed {
                freed.written = self.columns();
            }
        }
        self.clean(&freed, stream)?;
        Ok(bad)
    }

    /// Zeroes the written columns of rows.
    fn clean(&mut self, freed: &[RowExtent<RequestRow>], stream: Stream) -> Result<()> {
        if !self.config.zero_rows {
            return Ok(());
        }
        let written = |freed: &RowExtent<RequestRow>| {
            let extent = self.mirror.as_ref().map_or(0, |mirror| mirror.extent(freed.row));
            RowExtent { row: freed.row, written: freed.written.max(extent) }
        };
        let rows = freed.iter().map(written).filter(|extent| extent.written > 0).collect();
        self.zero(rows, stream).inspect_err(|_| {
            // The rows are zeroed when they are handed out.
            for freed in freed {
                self.rows.record_written(freed.row, self.columns());
            }
        })
    }

    /// Zeroes the first columns of rows, in the table and in the host's mirror.
    fn zero(&self, rows: Vec<RowExtent<RequestRow>>, stream: Stream) -> Result<()> {
        let zeroed = self.executor.zero_columns(&self.table()?, &rows, stream);
        match (&self.mirror, &zeroed) {
            (None, _) => (),
            (Some(mirror), Ok(())) => mirror.zeroed(rows),
            (Some(mirror), Err(_)) => mirror.forget(rows.iter().map(|extent| extent.row)),
        }
        zeroed
    }

    /// Returns the number of columns, which fits int32.
    fn columns(&self) -> u32 {
        narrow(self.config.max_context_len)
    }

    /// Returns the number of bytes from the start of the table to a place in it.
    const fn place(&self, row: usize, column: usize) -> usize {
        (row * self.config.max_context_len + column) * size_of::<i32>()
    }

    /// Rows of the table.
    #[must_use]
    pub fn table_rows(&self) -> usize {
        self.config.max_reqs + usize::from(self.config.padding_row)
    }

    /// Returns the index spaces of rows and columns.
    pub(super) fn spaces(&self) -> IndexSpaces {
        spaces([self.table_rows(), self.config.max_context_len])
    }

    pub(super) fn table(&self) -> Result<Table<'_>> {
        Table::new(self.table.region(), self.table_rows(), self.config.max_context_len)
    }

    /// Checks that work on the table may be enqueued on `stream`: a graph would repeat it without updating
    /// the mirror.
    pub(super) fn check_not_capturing(&self, stream: Stream) -> Result<()> {
        let Some(gpu) = self.executor.gpu() else { return Ok(()) };
        gpu.check_process()?;
        match gpu.is_capturing(stream) {
            Ok(true) => {
                gpu.check_not_capturing(stream, "a change of the table, of which the host keeps a copy,")
            }
            // A driver error must not prevent rows from being freed.
            Ok(false) | Err(_) => Ok(()),
        }
    }

    /// Returns an event to wait for, without locks, before more numbers are sent to the device, if it is far
    /// behind.
    #[must_use]
    pub fn backpressure_event(&self) -> Option<Arc<Event>> {
        self.executor.backpressure_event()
    }

    /// Reports, once, an invalid argument on the device of an earlier call. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a place outside of the table,
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a value beyond int32: it was skipped.
    pub fn take_fault(&self) -> Result<()> {
        self.executor.take_fault()
    }

    /// Writes `values` to the table; a single value goes to every place. On a GPU it is one launch on
    /// `stream`. Arguments that are part of the table are read first, with a wait if the host does not know
    /// them.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a place outside of the table,
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when the numbers of values and places differ.
    /// Nothing is written. Invalid places that only the device has are skipped, and
    /// [`ReqToTokenPool::take_fault`] reports them.
    pub fn write(&mut self, index: &TableIndex<'_>, values: &Indices<'_>, stream: Stream) -> Result<()> {
        if self.executor.gpu().is_some() {
            self.take_fault()?;
            return self.write_on_device(index, values, stream);
        }
        let values = values.host_values()?.as_i32()?;
        match index {
            TableIndex::Columns { row, start, end } => self.write_columns(*row, *start, *end, &values),
            TableIndex::Points { rows, columns } => {
                self.write_points(rows.host_values()?, columns.host_values()?, &values)
            }
        }
    }

    /// Works like [`Self::write`], for a table that threads share: it waits for arguments that are part of
    /// the table without the lock.
    ///
    /// # Errors
    /// See [`Self::write`].
    pub fn write_shared(
        table: &Mutex<Self>,
        index: TableIndex<'_>,
        values: Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        let region = Arc::clone(lock(table).table.region());
        let read = |numbers| read_part(table, &region, numbers, stream);
        let values = read(values)?;
        let index = match index {
            TableIndex::Points { rows, columns } => {
                TableIndex::Points { rows: read(rows)?, columns: read(columns)? }
            }
            columns @ TableIndex::Columns { .. } => columns,
        };
        lock(table).write(&index, &values, stream)
    }

    /// Returns the row and the columns of a slice.
    fn checked_columns(&self, row: i64, start: i64, end: Option<i64>) -> Result<(RequestRow, usize, usize)> {
        let row = self.checked_row(row)?;
        let columns = self.config.max_context_len;
        let stop = end.map_or(Some(columns), |end| usize::try_from(end).ok()).filter(|&stop| stop <= columns);
        let (Ok(from), Some(stop)) = (usize::try_from(start), stop) else {
            let end = end.map_or("the end".to_owned(), |end| end.to_string());
            return Err(Error::index(format!(
                "columns {start} to {end} of row {row} are not all in [0, {columns})"
            )));
        };
        if stop < from {
            return Err(Error::config(format!("columns {from} to {stop} of row {row} run backwards")));
        }
        Ok((row, from, stop))
    }

    fn write_columns(&mut self, row: i64, start: i64, end: Option<i64>, values: &[i32]) -> Result<()> {
        let (row, from, stop) = self.checked_columns(row, start, end)?;
        let values = &*broadcast(values, stop - from)?;
        let place = self.place(widen(row.number()), from);
        self.table_writer.write(place, values)?;
        self.record_written(row, stop);
        Ok(())
    }

    fn write_points(&mut self, rows: &IndexVec, columns: &IndexVec, values: &[i32]) -> Result<()> {
        as_many(rows.len(), columns.len())?;
        let rows = rows.ids::<RequestRow>(self.table_rows())?;
        let columns = columns.below(self.config.max_context_len, "column")?;
        let values = broadcast(values, rows.len())?;
        for ((row, column), value) in rows.into_iter().zip(columns).zip(values.iter()) {
            let place = self.place(widen(row.number()), widen(column));
            self.table_writer.write(place, &[*value])?;
            self.rows.record_written(row, column + 1);
        }
        Ok(())
    }

    /// Returns whether a tensor is part of the table.
    fn has(&self, tensor: &BorrowedTensor<'_>) -> bool {
        begins_in(self.table.region(), tensor)
    }

    /// Writes `slots` to a row from column `from` on: in host memory directly; on a GPU a launch of the
    /// caller writes them, and this updates the mirror.
    pub(super) fn put(&mut self, row: RequestRow, from: usize, slots: &[i32]) -> Result<()> {
        match (&self.mirror, self.executor.gpu()) {
            (Some(mirror), _) => mirror.wrote_columns(row, from, slots),
            (None, Some(_)) => (),
            (None, None) => {
                let place = self.place(widen(row.number()), from);
                self.table_writer.write(place, slots)?;
            }
        }
        self.record_written(row, from + slots.len());
        Ok(())
    }

    /// Does [`Self::put`] with pages of one slot, which has the number of its page.
    pub(super) fn put_pages(&mut self, row: RequestRow, from: usize, pages: &[Page]) -> Result<()> {
        if self.executor.gpu().is_some() {
            let slots: Vec<_> = pages.iter().map(|page| page.number().cast_signed()).collect();
            return self.put(row, from, &slots);
        }
        let place = self.place(widen(row.number()), from);
        self.table_writer.write(place, pages)?;
        self.record_written(row, from + pages.len());
        Ok(())
    }

    /// Records that a launch of the caller failed, which may have written the first `end` columns of a row.
    pub(super) fn record_failed_write(&mut self, row: RequestRow, end: usize) {
        if let Some(mirror) = &self.mirror {
            mirror.forget([row]);
        }
        self.record_written(row, end);
    }

    /// Records that columns below `end` of a row are written.
    fn record_written(&mut self, row: RequestRow, end: usize) {
        self.rows.record_written(row, narrow(end));
    }

    fn checked_row(&self, row: i64) -> Result<RequestRow> {
        IndexVec::I64(vec![row]).ids(self.table_rows()).map(|rows| rows[0])
    }

    /// Returns the first `length` columns of a row, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when the row or the columns are outside of the
    /// table.
    pub fn read(&self, row: i64, length: i64) -> Result<TensorView> {
        self.executor.check_process()?;
        let row = self.checked_row(row)?;
        let fits = usize::try_from(length).ok().filter(|&length| length <= self.config.max_context_len);
        let length = fits.ok_or_else(|| {
            Error::index(format!(
                "{length} columns of row {row} are not in [0, {}]",
                self.config.max_context_len
            ))
            .with_index(length)
        })?;
        let offset = self.place(widen(row.number()), 0);
        TensorView::contiguous(Arc::clone(self.table.region()), offset, DType::I32, &[length])
    }

    /// Reports that rows were written outside of this type. They are zeroed whole when they are freed, and
    /// are unknown to the host until then. `version` is the framework's count of its own writes to the table,
    /// which are accounted for.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a row outside of the table; nothing is
    /// changed.
    pub fn mark_modified(&mut self, rows: &IndexVec, version: Option<u64>) -> Result<()> {
        let rows = rows.ids::<RequestRow>(self.table_rows())?;
        for &row in &rows {
            self.rows.record_written(row, self.columns());
        }
        if let Some(mirror) = &self.mirror {
            mirror.forget(rows);
            if let Some(version) = version {
                mirror.account_for(version);
            }
        }
        Ok(())
    }

    /// Concatenates the first slots of rows: row `rows[i]` fills `out[indptr[i]..indptr[i + 1]]`. `out` is
    /// contiguous int32 on the table's device. On a GPU it is one launch on `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) or
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when a length or `out` does not fit,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when a row is not in the table or a part not in
    /// `out`. Nothing is written. Invalid arguments that only the device has are skipped, and
    /// [`ReqToTokenPool::take_fault`] reports them.
    pub fn build_kv_indices(
        &self,
        rows: &Indices<'_>,
        indptr: &Indices<'_>,
        out: &BorrowedTensor<'_>,
        stream: Stream,
    ) -> Result<()> {
        if indptr.len() != rows.len() + 1 {
            let (rows, ends) = (rows.len(), indptr.len());
            return Err(Error::config(format!(
                "{rows} rows need {} numbers in kv_indptr, not {ends}",
                rows + 1
            )));
        }
        if out.dtype() != DType::I32 {
            return Err(Error::wrong_type(format!("kv_indices must be int32, not {}", out.dtype())));
        }
        if !out.is_contiguous() {
            return Err(Error::config("kv_indices must be contiguous"));
        }
        out.check_on(self.device(), "kv_indices")?;
        if self.has(out) {
            return Err(Error::config("kv_indices must not be part of the table that it is made of"));
        }
        self.executor.build_kv_indices(&self.table()?, rows, indptr, out, stream)
    }

    /// Frees every row and zeroes the written columns. If `version`, as in [`ReqToTokenPool::mark_modified`],
    /// has changed, the whole table is zeroed.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails.
    pub fn clear(&mut self, version: Option<u64>, stream: Stream) -> Result<()> {
        self.check_not_capturing(stream)?;
        let mut written = self.rows.clear();
        if self.config.writers == TableWriters::Others {
            let rows = (0..narrow(self.table_rows())).map(RequestRow::new);
            written = rows.map(|row| RowExtent { row, written: self.columns() }).collect();
        }
        let Some(mirror) = self.mirror.as_ref().filter(|_| self.config.zero_rows) else {
            return self.clean(&written, stream);
        };
        let is_foreign = version.is_some_and(|version| mirror.account_for(version) != version);
        let mut extents = vec![if is_foreign { self.columns() } else { 0 }; self.table_rows()];
        for freed in &written {
            let extent = &mut extents[widen(freed.row.number())];
            *extent = freed.written.max(*extent);
        }
        let rows = (0..).map(RequestRow::new).zip(extents);
        let rows = rows.map(|(row, written)| RowExtent { row, written: written.max(mirror.extent(row)) });
        let rows = rows.filter(|extent| extent.written > 0).collect();
        mirror.drop_echoes();
        self.zero(rows, stream)
    }
}

impl Pool for ReqToTokenPool {
    fn unit(&self) -> &'static str {
        "row"
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(size_of::<i32>() * self.max_context_len())
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn strict(&self) -> bool {
        self.strict()
    }

    fn stats(&self) -> Stats {
        Stats::of_rows(self.rows()).and("bytes", self.mem_bytes())
    }

    fn occupancy(&self) -> Occupancy {
        let rows = self.rows();
        Occupancy::even(rows.spans(), rows.ledger(), 1)
    }

    fn keep_ledger(&mut self) {
        self.keep_ledger();
    }
}

/// Returns whether a tensor begins in `region`.
fn begins_in(region: &Region, tensor: &BorrowedTensor<'_>) -> bool {
    let start = region.address().as_ptr().addr();
    (start..start + region.bytes()).contains(&tensor.address().as_ptr().addr())
}

/// Returns the values of `numbers` if they are part of the table in `region`, read without its lock;
/// otherwise `numbers`.
fn read_part<'a>(
    table: &Mutex<ReqToTokenPool>,
    region: &Region,
    numbers: Indices<'a>,
    stream: Stream,
) -> Result<Indices<'a>> {
    match &numbers {
        Indices::Device { tensor, version } if begins_in(region, tensor) => {
            if let Some(known) = known_values(tensor, *version) {
                return Ok(Indices::Host(known));
            }
            lock(table).check_not_capturing(stream)?;
            run_blocking(|| values_now(numbers, stream)).map(Indices::Host)
        }
        _ => Ok(numbers),
    }
}

fn spaces([rows, columns]: [usize; 2]) -> IndexSpaces {
    IndexSpaces {
        rows: IndexSpace { noun: "row", len: rows },
        columns: IndexSpace { noun: "column", len: columns },
    }
}

/// Returns the number of bytes of numbers that one call may send from the host.
fn numbers_at_once([rows, columns]: [usize; 2]) -> usize {
    /// Minimum, for small tables.
    const LEAST: usize = 1 << 20;
    // A value, a row and a column for every place of a few rows, or an extent for every row.
    (rows.max(columns) * 4 * 3 * size_of::<i32>()).max(LEAST)
}

/// Checks that there is a column for every row.
fn as_many(rows: usize, columns: usize) -> Result<()> {
    if rows == columns {
        return Ok(());
    }
    Err(Error::config(format!("{rows} rows and {columns} columns; the numbers must be equal")))
}

fn mismatched(values: usize, places: usize) -> Error {
    Error::config(format!("{values} values for {places} places of the table"))
}

/// Returns `values`, or its single value repeated for every place.
fn broadcast(values: &[i32], places: usize) -> Result<std::borrow::Cow<'_, [i32]>> {
    match values {
        values if values.len() == places => Ok(values.into()),
        [value] => Ok(vec![*value; places].into()),
        values => Err(mismatched(values.len(), places)),
    }
}
