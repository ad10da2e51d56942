//! The table of every request's slots.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::base::{DType, Device, Error, Id, IndexVec, RequestRow, Result, bytes_of, widen};
use crate::index::{BadFrees, Ledgered, RowExtent, RowTable};
use crate::kernels::{Indices, Launcher, Numbers, Table, build_kv_indices, kv_indices_part};
use crate::memory::{Backend, Borrowed, Event, Region, Stream};
use crate::tensor::TensorView;

use super::host_copy::{known_values, values_now};
use super::table_copy::TableCopy;
use super::{at_least_one, expect_here, fits_int32, launcher};

/// Where values go in the table.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "made once a call, on the stack")]
pub enum TableIndex<'a> {
    /// Columns `start..end` of a row.
    Columns {
        /// The row.
        row: i64,
        /// The first column.
        start: i64,
        /// The end, or that of the table.
        end: Option<i64>,
    },
    /// One place for each value: `(rows[i], columns[i])`.
    Points {
        /// Rows.
        rows: Indices<'a>,
        /// Columns.
        columns: Indices<'a>,
    },
}

impl TableIndex<'_> {
    /// The first `count` columns of a row.
    pub(super) fn first_columns(row: u32, count: u32) -> Self {
        Self::Columns { row: row.into(), start: 0, end: Some(count.into()) }
    }
}

/// `req_to_token[request, position] -> slot`, int32. It does not track sequence lengths.
///
/// On a GPU the host keeps a copy of the table, so that slots read from it can be freed without asking the device.
/// What is written through this class is in the copy, at once or, where only the device knows it, when a kernel has
/// told it. Somebody else's writes are not: see [`ReqToTokenPool::mark_modified`].
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::IndexVec;
/// use kvpool::kernels::Indices;
/// use kvpool::memory::{Host, Stream};
/// use kvpool::pool::{ReqToTokenPool, TableIndex};
/// let stream = Stream::DEFAULT;
/// let mut pool = ReqToTokenPool::new(Arc::new(Host), 8, 128, true, false).unwrap();
/// let row = i64::from(pool.alloc(1, stream).unwrap().unwrap()[0]);
/// assert_eq!(row, 1);
/// let slots = Indices::Host(IndexVec::I32(vec![7, 8]));
/// pool.write(&TableIndex::Columns { row, start: 0, end: Some(2) }, &slots, stream).unwrap();
/// assert!(pool.write(&TableIndex::Columns { row, start: 127, end: Some(129) }, &slots, stream).is_err());
/// ```
#[derive(Debug)]
pub struct ReqToTokenPool {
    max_reqs: usize,
    max_context_len: usize,
    padding_row: bool,
    strict: bool,
    table: TensorView,
    rows: Ledgered<RowTable<RequestRow>>,
    remote: Option<Remote>,
}

/// What it takes to work on a GPU.
#[derive(Debug)]
struct Remote {
    launcher: Launcher,
    copy: Arc<TableCopy>,
}

/// Places of the table, checked as far as the host knows them.
struct Places<'a> {
    row: Numbers<'a>,
    column: Numbers<'a>,
    count: usize,
    /// Which they are, if the host knows that.
    known: Option<Known>,
}

/// Places that the host knows.
enum Known {
    /// Row and column of each.
    Points(Vec<(u32, u32)>),
    /// So many columns of one row, from one on.
    Columns { row: RequestRow, from: usize, count: usize },
}

impl Known {
    fn rows(&self) -> Vec<u32> {
        match self {
            Self::Points(points) => points.iter().map(|(row, _)| *row).collect(),
            Self::Columns { row, .. } => vec![row.number()],
        }
    }
}

impl ReqToTokenPool {
    /// An empty table of `max_reqs` rows, and a padding row before them if wanted.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when `max_reqs` or `max_context_len` is 0, or does not
    /// fit int32; what the backend says when it has not enough.
    pub fn new(
        backend: Arc<dyn Backend>,
        max_reqs: usize,
        max_context_len: usize,
        padding_row: bool,
        strict: bool,
    ) -> Result<Self> {
        at_least_one(&[("max_reqs", max_reqs), ("max_context_len", max_context_len)])?;
        let first = u32::from(padding_row);
        let rows = fits_int32(&format!("max_reqs {max_reqs}"), max_reqs.checked_add(1))? - 1;
        fits_int32(&format!("max_context_len {max_context_len}"), Some(max_context_len))?;
        let shape = [widen(rows + first), max_context_len];
        let region = Arc::new(Region::new(backend, bytes_of("req_to_token", &shape, DType::I32)?)?);
        let remote = match launcher(&region, numbers_at_once(shape))? {
            None => None,
            Some(launcher) => {
                let copy = TableCopy::new(launcher.gpu(), &region, shape[0], shape[1])?;
                Some(Remote { launcher, copy })
            }
        };
        let table = TensorView::contiguous(region, 0, DType::I32, &shape)?;
        let rows = Ledgered::from(RowTable::new(first, rows)?);
        Ok(Self { max_reqs, max_context_len, padding_row, strict, table, rows, remote })
    }

    /// Requests that can be in it at once.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.max_reqs
    }

    /// Columns.
    #[must_use]
    pub const fn max_context_len(&self) -> usize {
        self.max_context_len
    }

    /// Whether row 0 is nobody's.
    #[must_use]
    pub const fn padding_row(&self) -> bool {
        self.padding_row
    }

    /// Whether a bad free is an error.
    #[must_use]
    pub const fn strict(&self) -> bool {
        self.strict
    }

    /// Where it is.
    #[must_use]
    pub fn device(&self) -> Device {
        self.table.device()
    }

    /// The table, int32 `[rows, max_context_len]`, without a copy.
    #[must_use]
    pub const fn req_to_token(&self) -> &TensorView {
        &self.table
    }

    /// Who owns which row.
    #[must_use]
    pub const fn rows(&self) -> &Ledgered<RowTable<RequestRow>> {
        &self.rows
    }

    /// Bytes of the table.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.table.region().bytes()
    }

    /// Rows that could be handed out now.
    #[must_use]
    pub fn available_size(&self) -> usize {
        self.rows.rows().available()
    }

    /// Notes from now on who takes and gives what.
    pub fn keep_ledger(&mut self) {
        self.rows.book_mut().open();
    }

    /// Takes `count` rows of zeros, the longest free first, or returns `None`.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the driver refuses.
    pub fn alloc(&mut self, count: usize, stream: Stream) -> Result<Option<Vec<u32>>> {
        self.not_capturing(stream)?;
        let Some(taken) = self.rows.alloc(count) else { return Ok(None) };
        if let Err(failure) = self.clean(&taken, stream) {
            self.give_back(&taken);
            return Err(failure);
        }
        Ok(Some(taken.iter().map(|taken| taken.row.number()).collect()))
    }

    /// Gives rows back that nobody got, and that are to be zeroed.
    fn give_back(&mut self, taken: &[RowExtent<RequestRow>]) {
        let rows = taken.iter().map(|taken| taken.row.number().into()).collect();
        let (_, bad) = self
            .rows
            .free(&IndexVec::I64(rows), false)
            .expect("a free that is not strict takes whatever it is given");
        debug_assert_eq!(bad.dropped(), 0, "all were taken just now");
        let whole = u32::try_from(self.max_context_len).expect("columns fit int32");
        for taken in taken {
            self.rows.note_written(taken.row, whole);
        }
    }

    /// Gives rows back and zeroes what was written to them; what is not live is dropped and reported.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) when anything would be
    /// dropped; nothing is changed then. [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the driver refuses.
    pub fn free(&mut self, given: &IndexVec, stream: Stream) -> Result<BadFrees> {
        self.not_capturing(stream)?;
        let (freed, bad) = self.rows.free(given, self.strict)?;
        self.clean(&freed, stream)?;
        Ok(bad)
    }

    /// Zeroes what was written to rows.
    fn clean(&mut self, freed: &[RowExtent<RequestRow>], stream: Stream) -> Result<()> {
        let Some(remote) = &self.remote else {
            for freed in freed {
                let bytes = widen(freed.written) * size_of::<i32>();
                self.table.region().fill(self.place(widen(freed.row.number()), 0), bytes, 0)?;
            }
            return Ok(());
        };
        let rows: Vec<(u32, u32)> = freed
            .iter()
            .map(|freed| (freed.row.number(), freed.written.max(remote.copy.extent(freed.row.number()))))
            .filter(|(_, written)| *written > 0)
            .collect();
        if let Err(failure) = remote.zero(&self.on_device()?, rows, stream) {
            // They are zeroed when they are handed out.
            let whole = u32::try_from(self.max_context_len).unwrap_or(u32::MAX);
            for freed in freed {
                self.rows.note_written(freed.row, whole);
            }
            return Err(failure);
        }
        Ok(())
    }

    /// Bytes from the start of the table to a place in it.
    const fn place(&self, row: usize, column: usize) -> usize {
        (row * self.max_context_len + column) * size_of::<i32>()
    }

    /// Rows of the table.
    #[must_use]
    pub fn table_rows(&self) -> usize {
        self.max_reqs + usize::from(self.padding_row)
    }

    pub(super) fn on_device(&self) -> Result<Table<'_>> {
        Table::new(self.table.region(), self.table_rows(), self.max_context_len)
    }

    /// Checks that work on the table may be enqueued on `stream`: a graph would repeat it, of which the host's copy would
    /// know nothing.
    pub(super) fn not_capturing(&self, stream: Stream) -> Result<()> {
        let Some(remote) = &self.remote else { return Ok(()) };
        let gpu = remote.launcher.gpu();
        gpu.check_process()?;
        match gpu.is_capturing(stream) {
            Ok(true) => gpu.not_capturing(stream, "a change of the table, of which the host keeps a copy,"),
            // A driver that does not answer must not keep rows from being given back.
            Ok(false) | Err(_) => Ok(()),
        }
    }

    fn check_process(&self) -> Result<()> {
        self.remote.as_ref().map_or(Ok(()), |remote| remote.launcher.gpu().check_process())
    }

    /// A point to wait for, without locks, before more numbers of the host are sent to the device: it is far behind.
    #[must_use]
    pub fn crowded(&self) -> Option<Arc<Event>> {
        self.remote.as_ref().map(|remote| &remote.launcher)?.crowded()
    }

    /// Tells what is wrong with what an earlier call was given on the device, once. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a place outside of the table,
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a value beyond int32: it was left out.
    pub fn fault(&self) -> Result<()> {
        let limits = [self.table_rows(), self.max_context_len];
        self.remote.as_ref().map_or(Ok(()), |remote| remote.launcher.fault(["row", "column"], limits))
    }

    /// Writes `values` to the table; a single value goes to every place. On a GPU it is one launch on `stream`. Numbers that
    /// are part of the table are read before; they are waited for if the host does not know them.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a place outside of the table,
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when there are not as many values as places. Nothing is
    /// written then. On a GPU what only the device knows to be wrong is left out, and [`ReqToTokenPool::fault`] tells
    /// it.
    pub fn write(&mut self, index: &TableIndex<'_>, values: &Indices<'_>, stream: Stream) -> Result<()> {
        if self.remote.is_some() {
            self.fault()?;
            return self.write_on_device(index, values, stream);
        }
        let values = values.on_host()?.clone().into_i32()?;
        match index {
            TableIndex::Columns { row, start, end } => self.write_columns(*row, *start, *end, &values),
            TableIndex::Points { rows, columns } => {
                self.write_points(rows.on_host()?, columns.on_host()?, &values)
            }
        }
    }

    /// The row and the columns of a slice.
    fn checked_columns(&self, row: i64, start: i64, end: Option<i64>) -> Result<(RequestRow, usize, usize)> {
        let row = self.checked_row(row)?;
        let columns = self.max_context_len;
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
        self.table.region().write(self.place(widen(row.number()), from), values)?;
        self.rows.note_written(row, u32::try_from(stop).unwrap_or(u32::MAX));
        Ok(())
    }

    fn write_points(&mut self, rows: &IndexVec, columns: &IndexVec, values: &[i32]) -> Result<()> {
        as_many(rows.len(), columns.len())?;
        let rows = rows.rows("row", self.table_rows())?;
        let columns = columns.rows("column", self.max_context_len)?;
        let values = broadcast(values, rows.len())?;
        for ((row, column), value) in rows.into_iter().zip(columns).zip(values.iter()) {
            self.table.region().write(self.place(widen(row), widen(column)), &[*value])?;
            self.rows.note_written(RequestRow::new(row), column + 1);
        }
        Ok(())
    }

    fn write_on_device(
        &mut self,
        index: &TableIndex<'_>,
        values: &Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        self.not_capturing(stream)?;
        expect_here(self.device(), &[values], stream)?;
        let values = &self.read_before(values, stream)?;
        let known = known(values).map(IndexVec::into_i32).transpose()?;
        let (mut row_list, mut column_list) = (Vec::new(), Vec::new());
        let read_points;
        let places = match index {
            TableIndex::Columns { row, start, end } => {
                let (row, from, stop) = self.checked_columns(*row, *start, *end)?;
                Places {
                    row: Numbers::Same(row.number().into()),
                    column: Numbers::From(i64::try_from(from).unwrap_or(i64::MAX)),
                    count: stop - from,
                    known: Some(Known::Columns { row, from, count: stop - from }),
                }
            }
            TableIndex::Points { rows, columns } => {
                expect_here(self.device(), &[rows, columns], stream)?;
                as_many(rows.len(), columns.len())?;
                read_points = [self.read_before(rows, stream)?, self.read_before(columns, stream)?];
                let [rows, columns] = &read_points;
                self.checked_points(rows, columns, [&mut row_list, &mut column_list])?
            }
        };
        let repeated;
        let value = match (values, values.len()) {
            (_, len) if len != places.count && len != 1 => return Err(mismatched(len, places.count)),
            (Indices::Host(_), 1) => Numbers::Same(known.as_ref().map_or(0, |values| values[0].into())),
            (Indices::Host(_), _) => Numbers::List(known.as_deref().unwrap_or_default()),
            (Indices::Device { tensor, .. }, 1) => {
                repeated = tensor.repeated(places.count).unwrap_or(*tensor);
                Numbers::Tensor(&repeated)
            }
            (Indices::Device { tensor, .. }, _) => Numbers::Tensor(tensor),
        };
        match (&places.known, known.as_deref()) {
            (Some(Known::Points(points)), Some(values)) if has_repeats(points) => {
                self.enqueue_last(points, values, stream)
            }
            (_, known) => self.enqueue(&places, value, known, stream),
        }
    }

    /// Whether a tensor is part of the table.
    fn has(&self, tensor: &Borrowed<'_>) -> bool {
        let start = self.table.region().address().as_ptr().addr();
        (start..start + self.table.region().bytes()).contains(&tensor.address().as_ptr().addr())
    }

    /// Numbers for a launch that writes the table. Those that are part of it are read now: a launch that writes what it reads
    /// leaves it to the device who comes first.
    fn read_before<'a>(&self, numbers: &Indices<'a>, stream: Stream) -> Result<Indices<'a>> {
        match numbers {
            Indices::Device { tensor, .. } if self.has(tensor) => {
                values_now(numbers.clone(), stream).map(Indices::Host)
            }
            numbers => Ok(numbers.clone()),
        }
    }

    /// Enqueues a write to places of which some are named more than once: the last value of each.
    fn enqueue_last(&mut self, points: &[(u32, u32)], values: &[i32], stream: Stream) -> Result<()> {
        let last: HashMap<(u32, u32), i32> =
            points.iter().enumerate().map(|(at, &point)| (point, nth(values, at))).collect();
        let points: Vec<(u32, u32)> = last.keys().copied().collect();
        let rows: Vec<i32> = points.iter().map(|(row, _)| row.cast_signed()).collect();
        let columns: Vec<i32> = points.iter().map(|(_, column)| column.cast_signed()).collect();
        let values: Vec<i32> = points.iter().filter_map(|point| last.get(point).copied()).collect();
        let (row, column) = (Numbers::List(&rows), Numbers::List(&columns));
        let places = Places { row, column, count: points.len(), known: Some(Known::Points(points)) };
        self.enqueue(&places, Numbers::List(&values), Some(&values), stream)
    }

    /// The places of points, with those of the host in `lists`.
    fn checked_points<'a>(
        &self,
        rows: &'a Indices<'_>,
        columns: &'a Indices<'_>,
        [row_list, column_list]: [&'a mut Vec<i32>; 2],
    ) -> Result<Places<'a>> {
        *row_list = rows.list("row", self.table_rows())?;
        *column_list = columns.list("column", self.max_context_len)?;
        let known = known(rows).zip(known(columns)).map(|(rows, columns)| -> Result<Vec<(u32, u32)>> {
            let rows = rows.rows("row", self.table_rows())?;
            Ok(rows.into_iter().zip(columns.rows("column", self.max_context_len)?).collect())
        });
        Ok(Places {
            row: rows.numbers(row_list),
            column: columns.numbers(column_list),
            count: rows.len(),
            known: known.transpose()?.map(Known::Points),
        })
    }

    /// Enqueues a write, and notes it in the host's copy now or when the kernel has told what it wrote.
    fn enqueue(
        &mut self,
        places: &Places<'_>,
        value: Numbers<'_>,
        known: Option<&[i32]>,
        stream: Stream,
    ) -> Result<()> {
        let Some(remote) = &self.remote else { return Ok(()) };
        let table = Table::new(self.table.region(), self.table_rows(), self.max_context_len)?;
        let rows = || places.known.as_ref().map(Known::rows);
        let told = places.known.as_ref().zip(known).filter(|_| remote.copy.is_settled());
        let echo = if told.is_none() { Some(remote.copy.echoes()) } else { None };
        let numbers = [places.row, places.column, value];
        let held =
            remote.launcher.write_points(&table, numbers, places.count, echo, stream).inspect_err(|_| {
                // Some of it may have been written.
                remote.copy.lost(rows().as_deref());
            })?;
        match (told, held) {
            (Some((&Known::Columns { row, from, count }, values)), _) => {
                remote.copy.wrote_columns(row.number(), from, &broadcast(values, count)?);
            }
            (Some((Known::Points(points), values)), _) => {
                let points = points.iter().enumerate();
                remote.copy.wrote_points(points.map(|(at, &(row, column))| (row, column, nth(values, at))));
            }
            (None, Some(held)) => remote.copy.will_tell(held, places.count),
            // There was no room for it to be told.
            (None, None) => remote.copy.lost(rows().as_deref()),
        }
        match places.known {
            None => (),
            Some(Known::Points(ref points)) => {
                for &(row, column) in points {
                    self.rows.note_written(RequestRow::new(row), column + 1);
                }
            }
            Some(Known::Columns { row, from, count }) => {
                self.rows.note_written(row, u32::try_from(from + count).unwrap_or(u32::MAX));
            }
        }
        Ok(())
    }

    /// Makes columns from `from` on of a row `slots`: in host memory now; on a GPU a launch of the caller does it, and
    /// this notes it.
    pub(super) fn put(&mut self, row: RequestRow, from: usize, slots: &[i32]) -> Result<()> {
        match &self.remote {
            None => self.table.region().write(self.place(widen(row.number()), from), slots)?,
            Some(remote) => remote.copy.wrote_columns(row.number(), from, slots),
        }
        self.rows.note_written(row, u32::try_from(from + slots.len()).unwrap_or(u32::MAX));
        Ok(())
    }

    /// Notes that a launch of the caller failed, which may have written the first `end` columns of a row.
    pub(super) fn lose(&mut self, row: RequestRow, end: usize) {
        if let Some(remote) = &self.remote {
            remote.copy.lost(Some(&[row.number()]));
        }
        self.rows.note_written(row, u32::try_from(end).unwrap_or(u32::MAX));
    }

    fn checked_row(&self, row: i64) -> Result<RequestRow> {
        IndexVec::I64(vec![row]).rows("row", self.table_rows()).map(|rows| RequestRow::new(rows[0]))
    }

    /// The first `length` columns of a row, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when they are not in the table.
    pub fn read(&self, row: i64, length: i64) -> Result<TensorView> {
        self.check_process()?;
        let row = self.checked_row(row)?;
        let fits = usize::try_from(length).ok().filter(|&length| length <= self.max_context_len);
        let length = fits.ok_or_else(|| {
            Error::index(format!("{length} columns of row {row} are not in [0, {}]", self.max_context_len))
        })?;
        let offset = self.place(widen(row.number()), 0);
        TensorView::contiguous(Arc::clone(self.table.region()), offset, DType::I32, &[length])
    }

    /// Notes that somebody wrote these rows past this class: they are zeroed whole when they are freed, and the host
    /// does not claim to know them until then. `version` is the framework's count of its own writes to the table,
    /// which are accounted for now.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a row outside of the table; nothing is noted then.
    pub fn mark_modified(&mut self, rows: &IndexVec, version: Option<u64>) -> Result<()> {
        let rows = rows.rows("row", self.table_rows())?;
        for &row in &rows {
            self.rows
                .note_written(RequestRow::new(row), u32::try_from(self.max_context_len).unwrap_or(u32::MAX));
        }
        if let Some(remote) = &self.remote {
            remote.copy.lost(Some(&rows));
            if let Some(version) = version {
                remote.copy.trust(version);
            }
        }
        Ok(())
    }

    /// Writes the first slots of some rows one after the other: row `rows[i]` gives `out[indptr[i]..indptr[i + 1]]`.
    /// `out` is contiguous int32 where the table is. On a GPU it is one launch on `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) or [`ErrorKind::Type`](crate::base::ErrorKind::Type) when
    /// a length or `out` does not fit, [`ErrorKind::Index`](crate::base::ErrorKind::Index) when a row is not in the
    /// table or a part not in `out`. Nothing is written then. On a GPU what only the device knows to be wrong is left
    /// out, and [`ReqToTokenPool::fault`] tells it.
    pub fn build_kv_indices(
        &self,
        rows: &Indices<'_>,
        indptr: &Indices<'_>,
        out: &Borrowed<'_>,
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
        out.expect_on(self.device(), "kv_indices")?;
        if self.has(out) {
            return Err(Error::config("kv_indices must not be part of the table that it is made of"));
        }
        let Some(remote) = &self.remote else {
            let ends = indptr.on_host()?.clone().into_i64()?;
            let rows = rows.on_host()?.rows("row", self.table_rows())?;
            return build_kv_indices(self.table.region(), self.max_context_len, &rows, &ends, out);
        };
        self.fault()?;
        expect_here(self.device(), &[rows, indptr], stream)?;
        let row_list = rows.list("row", self.table_rows())?;
        let end_list = match indptr {
            Indices::Device { .. } => Vec::new(),
            Indices::Host(ends) => {
                let capacity = out.shape().numel();
                let ends = ends.clone().into_i64()?;
                for (position, pair) in ends.windows(2).enumerate() {
                    kv_indices_part(position, pair[0], pair[1], self.max_context_len, capacity)?;
                }
                IndexVec::I64(ends).into_i32()?
            }
        };
        out.used_on(stream);
        let numbers = [rows.numbers(&row_list), indptr.numbers(&end_list)];
        remote.launcher.kv_indices(&self.on_device()?, numbers, out, rows.len(), stream)
    }

    /// Makes every row free, and zeroes what was written. `version` is as for [`ReqToTokenPool::mark_modified`]: if it
    /// has changed, the whole table is zeroed.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the driver refuses.
    pub fn clear(&mut self, version: Option<u64>, stream: Stream) -> Result<()> {
        self.not_capturing(stream)?;
        let written = self.rows.clear();
        let Some(remote) = &self.remote else { return self.clean(&written, stream) };
        let mut extents = vec![0; self.table_rows()];
        for freed in &written {
            extents[widen(freed.row.number())] = freed.written;
        }
        let foreign = version.is_some_and(|version| remote.copy.trust(version) != version);
        let rows: Vec<(u32, u32)> = (0..)
            .zip(extents)
            .map(|(row, written)| {
                let whole = u32::try_from(self.max_context_len).unwrap_or(u32::MAX);
                (row, if foreign { whole } else { written.max(remote.copy.extent(row)) })
            })
            .filter(|(_, written)| *written > 0)
            .collect();
        remote.copy.forget_echoes();
        remote.zero(&self.on_device()?, rows, stream)
    }
}

impl Remote {
    /// Zeroes the first columns of rows, on the device and in the host's copy.
    fn zero(&self, table: &Table<'_>, rows: Vec<(u32, u32)>, stream: Stream) -> Result<()> {
        let (numbers, lens): (Vec<u32>, Vec<u32>) = rows.iter().copied().unzip();
        if let Err(failure) = self.launcher.zero_ragged(table, &numbers, &lens, stream) {
            self.copy.lost(Some(&numbers));
            return Err(failure);
        }
        self.copy.zeroed(rows);
        Ok(())
    }
}

/// Whether a place is named more than once.
fn has_repeats(points: &[(u32, u32)]) -> bool {
    let mut seen = HashSet::with_capacity(points.len());
    !points.iter().all(|point| seen.insert(point))
}

/// Value number `at`, or the only one.
fn nth(values: &[i32], at: usize) -> i32 {
    if let [only] = values { *only } else { values[at] }
}

/// What the host knows of indices.
fn known(indices: &Indices<'_>) -> Option<IndexVec> {
    match indices {
        Indices::Host(values) => Some(values.clone()),
        Indices::Device { tensor, version } => known_values(tensor, *version),
    }
}

/// Bytes of numbers that one call may bring from the host.
fn numbers_at_once([rows, columns]: [usize; 2]) -> usize {
    /// For small tables.
    const LEAST: usize = 1 << 20;
    // A value, a row and a column for every place of a few rows, or an extent for every row.
    rows.max(columns).saturating_mul(4 * 3 * size_of::<i32>()).max(LEAST)
}

/// Checks that there is a column for every row.
fn as_many(rows: usize, columns: usize) -> Result<()> {
    if rows == columns {
        return Ok(());
    }
    Err(Error::config(format!("{rows} rows and {columns} columns; there must be as many")))
}

fn mismatched(values: usize, places: usize) -> Error {
    Error::config(format!("{values} values for {places} places of the table"))
}

/// `values`, or its only value as often as there are places.
fn broadcast(values: &[i32], places: usize) -> Result<std::borrow::Cow<'_, [i32]>> {
    match values {
        values if values.len() == places => Ok(values.into()),
        [value] => Ok(vec![*value; places].into()),
        values => Err(mismatched(values.len(), places)),
    }
}
