//! The rows of a request table, their owners and what is written to them.

use std::sync::Arc;

use crate::base::bounded::narrow;
use crate::base::{
    DType, Device, Error, Id, IndexVec, Page, RequestRow, Result, bytes_of, try_collect, try_with_capacity,
    try_zeros, widen,
};
use crate::index::{Ledgered, OnBadFree, RowExtent, RowTable};
use crate::kernels::{Executor, IndexSpace, IndexSpaces, Indices, Table};
use crate::memory::{Backend, BorrowedTensor, Region, RegionWriter, Stream};
use crate::pool::table_mirror::TableMirror;
use crate::tensor::TensorView;

use super::{FreedRows, ReqToTokenConfig, TableIndex, TableWriters};

/// What a [`ReqToTokenPool`](super::ReqToTokenPool) locks: one thread at a time changes a table.
#[derive(Debug)]
pub(in crate::pool) struct RequestTable {
    pub(super) config: ReqToTokenConfig,
    view: TensorView,
    /// The writer of a table in host memory.
    writer: RegionWriter,
    pub(super) rows: Ledgered<RowTable<RequestRow>>,
    pub(super) executor: Executor,
    /// The host's mirror of a table on a device that others do not write.
    pub(super) mirror: Option<Arc<TableMirror>>,
    /// The number of times that each row was handed out, int64 by row in host memory.
    generation: TensorView,
    generation_writer: RegionWriter,
    generations: Vec<i64>,
}

impl RequestTable {
    /// Allocates the table. The sizes are at least 1.
    pub(super) fn new(config: &ReqToTokenConfig, backend: &Arc<dyn Backend>) -> Result<Self> {
        let shape = config.shape()?;
        let bytes = bytes_of("req_to_token", &shape, DType::I32)?;
        let writer = RegionWriter::new(Region::new(Arc::clone(backend), bytes)?);
        let region = writer.region();
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
        let view = TensorView::contiguous(Arc::clone(region), 0, DType::I32, &shape)?;
        let first = u32::from(config.padding_row);
        let rows = Ledgered::from(RowTable::new(first, narrow(shape[0]) - first)?);
        Ok(Self {
            config: *config,
            view,
            writer,
            rows,
            executor,
            mirror,
            generation,
            generation_writer,
            generations,
        })
    }

    pub(super) const fn view(&self) -> &TensorView {
        &self.view
    }

    pub(super) const fn generation(&self) -> &TensorView {
        &self.generation
    }

    pub(in crate::pool) const fn config(&self) -> &ReqToTokenConfig {
        &self.config
    }

    pub(in crate::pool) fn device(&self) -> Device {
        self.view.device()
    }

    pub(in crate::pool) const fn rows(&self) -> &Ledgered<RowTable<RequestRow>> {
        &self.rows
    }

    /// Records owners and call sites from now on.
    pub(super) fn keep_ledger(&mut self) {
        self.rows.open_ledger();
    }

    /// See [`ReqToTokenPool::alloc`](super::ReqToTokenPool::alloc).
    pub(super) fn alloc(&mut self, count: usize, stream: Stream) -> Result<Option<Vec<RequestRow>>> {
        self.check_not_capturing(stream)?;
        let mut rows = try_with_capacity(count.min(self.rows.rows().available()))?;
        let Some(taken) = self.rows.alloc(count)? else { return Ok(None) };
        if let Err(failure) = self.clean(&taken, stream) {
            self.undo(taken.iter().map(|taken| taken.row));
            return Err(failure);
        }
        rows.extend(taken.iter().map(|taken| taken.row));
        for row in rows.iter().map(|row| widen(row.number())) {
            self.generations[row] += 1;
            self.generation_writer
                .write(row * size_of::<i64>(), &[self.generations[row]])
                .expect("each row has its number in host memory");
        }
        Ok(Some(rows))
    }

    /// Returns rows to the pool that were not handed out. They are zeroed later.
    pub(super) fn undo(&mut self, rows: impl Iterator<Item = RequestRow>) {
        for row in rows {
            self.rows.undo(row);
            self.rows.record_written(row, self.columns());
        }
    }

    /// See [`ReqToTokenPool::free`](super::ReqToTokenPool::free).
    pub(in crate::pool) fn free(&mut self, given: &IndexVec, stream: Stream) -> Result<FreedRows> {
        self.check_not_capturing(stream)?;
        let (mut freed, bad) = self.rows.free(given, OnBadFree::of(self.config.strict))?;
        if self.config.writers == TableWriters::Others {
            for freed in &mut freed {
                freed.written = self.columns();
            }
        }
        let not_zeroed = self.clean(&freed, stream).err();
        Ok(FreedRows { bad, not_zeroed })
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
        let zeroed = try_with_capacity(freed.len()).and_then(|mut rows| {
            rows.extend(freed.iter().map(written).filter(|extent| extent.written > 0));
            self.zero(rows, stream)
        });
        zeroed.inspect_err(|_| {
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

    pub(in crate::pool) fn table_rows(&self) -> usize {
        self.config.rows()
    }

    /// Returns the index spaces of rows and columns.
    pub(in crate::pool) fn spaces(&self) -> IndexSpaces {
        spaces([self.table_rows(), self.config.max_context_len])
    }

    pub(in crate::pool) fn table(&self) -> Result<Table<'_>> {
        Table::new(self.view.region(), self.table_rows(), self.config.max_context_len)
    }

    /// Checks that work on the table may be enqueued on `stream`: a graph would repeat it without updating
    /// the mirror.
    pub(in crate::pool) fn check_not_capturing(&self, stream: Stream) -> Result<()> {
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

    /// Works like [`ReqToTokenPool::write`](super::ReqToTokenPool::write) with arguments that are not part of the
    /// table: within one launch, the order of reads and writes is undefined.
    pub(in crate::pool) fn write(
        &mut self,
        index: &TableIndex<'_>,
        values: &Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        if self.executor.gpu().is_some() {
            self.executor.take_fault()?;
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

    /// Returns the row and the columns of a slice.
    pub(super) fn checked_columns(
        &self,
        row: i64,
        start: i64,
        end: Option<i64>,
    ) -> Result<(RequestRow, usize, usize)> {
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
            return Err(Error::argument(format!("columns {from} to {stop} of row {row} run backwards")));
        }
        Ok((row, from, stop))
    }

    fn write_columns(&mut self, row: i64, start: i64, end: Option<i64>, values: &[i32]) -> Result<()> {
        let (row, from, stop) = self.checked_columns(row, start, end)?;
        let values = &*broadcast(values, stop - from)?;
        let place = self.place(widen(row.number()), from);
        self.writer.write(place, values)?;
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
            self.writer.write(place, &[*value])?;
            self.rows.record_written(row, column + 1);
        }
        Ok(())
    }

    /// Returns whether a tensor is part of the table.
    fn has(&self, tensor: &BorrowedTensor<'_>) -> bool {
        begins_in(self.view.region(), tensor)
    }

    /// Writes `slots` to a row from column `from` on: in host memory directly; on a GPU a launch of the
    /// caller writes them, and this updates the mirror.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a decode step calls it for each request")]
    pub(in crate::pool) fn put(&mut self, row: RequestRow, from: usize, slots: &[i32]) -> Result<()> {
        if self.executor.gpu().is_some() {
            self.record_launched(std::iter::once((row, from, slots)));
            return Ok(());
        }
        let place = self.place(widen(row.number()), from);
        self.writer.write(place, slots)?;
        self.record_written(row, from + slots.len());
        Ok(())
    }

    /// Records slots that a launch of the caller writes to rows, each from a column on.
    pub(in crate::pool) fn record_launched<'a>(
        &mut self,
        written: impl Iterator<Item = (RequestRow, usize, &'a [i32])>,
    ) {
        let rows = &mut self.rows;
        let written =
            written.inspect(|(row, from, slots)| rows.record_written(*row, narrow(from + slots.len())));
        match &self.mirror {
            Some(mirror) => mirror.wrote_columns(written),
            None => written.for_each(drop),
        }
    }

    /// Works like [`Self::put`] with pages of one slot, which has the number of its page.
    pub(in crate::pool) fn put_pages(&mut self, row: RequestRow, from: usize, pages: &[Page]) -> Result<()> {
        if self.executor.gpu().is_some() {
            let slots = try_collect(pages.iter().map(|page| page.number().cast_signed()))?;
            return self.put(row, from, &slots);
        }
        let place = self.place(widen(row.number()), from);
        self.writer.write(place, pages)?;
        self.record_written(row, from + pages.len());
        Ok(())
    }

    /// Records that a launch of the caller failed, which may have written the first `end` columns of a row.
    pub(in crate::pool) fn record_failed_write(&mut self, row: RequestRow, end: usize) {
        if let Some(mirror) = &self.mirror {
            mirror.forget([row]);
        }
        self.record_written(row, end);
    }

    /// Records that columns below `end` of a row are written.
    pub(super) fn record_written(&mut self, row: RequestRow, end: usize) {
        self.rows.record_written(row, narrow(end));
    }

    fn checked_row(&self, row: i64) -> Result<RequestRow> {
        IndexVec::I64(vec![row]).ids(self.table_rows()).map(|rows| rows[0])
    }

    /// See [`ReqToTokenPool::read`](super::ReqToTokenPool::read).
    pub(super) fn read(&self, row: i64, length: i64) -> Result<TensorView> {
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
        TensorView::contiguous(Arc::clone(self.view.region()), offset, DType::I32, &[length])
    }

    /// See [`ReqToTokenPool::mark_modified`](super::ReqToTokenPool::mark_modified).
    pub(in crate::pool) fn mark_modified(&mut self, rows: &IndexVec, version: Option<u64>) -> Result<()> {
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

    /// See [`ReqToTokenPool::build_kv_indices`](super::ReqToTokenPool::build_kv_indices).
    pub(in crate::pool) fn build_kv_indices(
        &self,
        rows: &Indices<'_>,
        indptr: &Indices<'_>,
        out: &BorrowedTensor<'_>,
        stream: Stream,
    ) -> Result<()> {
        if indptr.len() != rows.len() + 1 {
            let (rows, ends) = (rows.len(), indptr.len());
            return Err(Error::argument(format!(
                "{rows} rows need {} numbers in kv_indptr, not {ends}",
                rows + 1
            )));
        }
        if out.dtype() != DType::I32 {
            return Err(Error::wrong_type(format!("kv_indices must be int32, not {}", out.dtype())));
        }
        if !out.is_contiguous() {
            return Err(Error::argument("kv_indices must be contiguous"));
        }
        out.check_on(self.device(), "kv_indices")?;
        if self.has(out) {
            return Err(Error::argument("kv_indices must not overlap req_to_token"));
        }
        self.executor.build_kv_indices(&self.table()?, rows, indptr, out, stream)
    }

    /// See [`ReqToTokenPool::clear`](super::ReqToTokenPool::clear).
    pub(in crate::pool) fn clear(&mut self, version: Option<u64>, stream: Stream) -> Result<()> {
        self.check_not_capturing(stream)?;
        let (rows, columns) = (self.table_rows(), self.columns());
        // Allocated before anything changes.
        let (mut extents, mut unclean) = (try_zeros::<u32>(rows)?, try_with_capacity(rows)?);
        let mut all = try_with_capacity(if self.config.writers == TableWriters::Others { rows } else { 0 })?;
        let mut written = self.rows.clear()?;
        if self.config.writers == TableWriters::Others {
            all.extend(
                (0..narrow(rows)).map(|row| RowExtent { row: RequestRow::new(row), written: columns }),
            );
            written = all;
        }
        let Some(mirror) = self.mirror.as_ref().filter(|_| self.config.zero_rows) else {
            return self.clean(&written, stream);
        };
        let is_foreign = version.is_some_and(|version| mirror.account_for(version) != version);
        extents.fill(if is_foreign { columns } else { 0 });
        for freed in &written {
            let extent = &mut extents[widen(freed.row.number())];
            *extent = freed.written.max(*extent);
        }
        let rows = (0..).map(RequestRow::new).zip(extents);
        let rows = rows.map(|(row, written)| RowExtent { row, written: written.max(mirror.extent(row)) });
        unclean.extend(rows.filter(|extent| extent.written > 0));
        mirror.drop_echoes();
        self.zero(unclean, stream)
    }
}

/// Returns whether a tensor begins in `region`.
pub(super) fn begins_in(region: &Region, tensor: &BorrowedTensor<'_>) -> bool {
    let start = region.address().as_ptr().addr();
    (start..start + region.bytes()).contains(&tensor.address().as_ptr().addr())
}

fn spaces([rows, columns]: [usize; 2]) -> IndexSpaces {
    IndexSpaces {
        rows: IndexSpace { noun: "row", len: rows },
        columns: IndexSpace { noun: "column", len: columns },
    }
}

/// Returns the number of bytes of numbers that one call may send from the host.
pub(super) fn numbers_at_once([rows, columns]: [usize; 2]) -> usize {
    /// Minimum, for small tables.
    const LEAST: usize = 1 << 20;
    // A value, a row and a column for every place of a few rows, or an extent for every row.
    (rows.max(columns) * 4 * 3 * size_of::<i32>()).max(LEAST)
}

/// Checks that there is a column for every row.
pub(super) fn as_many(rows: usize, columns: usize) -> Result<()> {
    if rows == columns {
        return Ok(());
    }
    Err(Error::argument(format!("{rows} rows and {columns} columns; the numbers must be equal")))
}

pub(super) fn mismatched_error(values: usize, places: usize) -> Error {
    Error::argument(format!("{values} values for {places} places of the table"))
}

/// Returns `values`, or its single value repeated for every place.
pub(super) fn broadcast(values: &[i32], places: usize) -> Result<std::borrow::Cow<'_, [i32]>> {
    match values {
        values if values.len() == places => Ok(values.into()),
        [value] => {
            let mut values = try_with_capacity(places)?;
            values.resize(places, *value);
            Ok(values.into())
        }
        values => Err(mismatched_error(values.len(), places)),
    }
}
