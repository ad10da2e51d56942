//! The table of every request's slots.

use std::sync::Arc;

use crate::base::{DType, Device, Error, Id, IndexVec, Result, Row, bytes_of, widen};
use crate::index::{BadFrees, FreedRow, RowTable};
use crate::memory::{Backend, Region};
use crate::tensor::TensorView;

use super::{at_least_one, fits_int32};

/// Where values go in the table.
#[derive(Clone, Debug)]
pub enum TableIndex {
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
        rows: IndexVec,
        /// Columns.
        columns: IndexVec,
    },
}

/// `req_to_token[request, position] -> slot`, int32. It does not track sequence lengths.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::memory::Host;
/// use kvpool::pool::{ReqToTokenPool, TableIndex};
/// let mut pool = ReqToTokenPool::new(Arc::new(Host), 8, 128, true, false).unwrap();
/// let row = i64::from(pool.alloc(1).unwrap().unwrap()[0]);
/// assert_eq!(row, 1);
/// pool.write(&TableIndex::Columns { row, start: 0, end: Some(2) }, &[7, 8]).unwrap();
/// assert!(pool.write(&TableIndex::Columns { row, start: 127, end: Some(129) }, &[7, 8]).is_err());
/// ```
#[derive(Debug)]
pub struct ReqToTokenPool {
    max_reqs: usize,
    max_context_len: usize,
    padding_row: bool,
    strict: bool,
    table: TensorView,
    rows: RowTable,
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
        let table = TensorView::contiguous(region, 0, DType::I32, &shape)?;
        let rows = RowTable::new(first, rows)?;
        Ok(Self { max_reqs, max_context_len, padding_row, strict, table, rows })
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
    pub const fn rows(&self) -> &RowTable {
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

    /// Takes `count` rows of zeros, the longest free first, or returns `None`.
    ///
    /// # Errors
    /// None in practice: every row lies in the table.
    pub fn alloc(&mut self, count: usize) -> Result<Option<Vec<u32>>> {
        let Some(taken) = self.rows.alloc(count) else { return Ok(None) };
        self.clean(&taken)?;
        Ok(Some(taken.iter().map(|taken| taken.row.number()).collect()))
    }

    /// Gives rows back and zeroes what was written to them; what is not live is dropped and reported.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) when anything would be
    /// dropped; nothing is changed then.
    pub fn free(&mut self, given: &IndexVec) -> Result<BadFrees> {
        let (freed, bad) = self.rows.free(given, self.strict, Row::NOUN)?;
        self.clean(&freed)?;
        Ok(bad)
    }

    fn clean(&self, rows: &[FreedRow]) -> Result<()> {
        for freed in rows {
            let bytes = widen(freed.written) * size_of::<i32>();
            self.table.region().zero(self.place(widen(freed.row.number()), 0), bytes)?;
        }
        Ok(())
    }

    /// Bytes from the start of the table to a place in it.
    const fn place(&self, row: usize, column: usize) -> usize {
        (row * self.max_context_len + column) * size_of::<i32>()
    }

    fn table_rows(&self) -> usize {
        self.max_reqs + usize::from(self.padding_row)
    }

    /// Writes `values` to the table; a single value goes to every place.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a place outside of the table,
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when there are not as many values as places. Nothing is
    /// written then.
    pub fn write(&mut self, index: &TableIndex, values: &[i32]) -> Result<()> {
        match index {
            TableIndex::Columns { row, start, end } => self.write_columns(*row, *start, *end, values),
            TableIndex::Points { rows, columns } => self.write_points(rows, columns, values),
        }
    }

    fn write_columns(&mut self, row: i64, start: i64, end: Option<i64>, values: &[i32]) -> Result<()> {
        let row = self.checked_row(row)?;
        let columns = self.max_context_len;
        let stop = end.map_or(Some(columns), |end| usize::try_from(end).ok()).filter(|&stop| stop <= columns);
        let (Ok(from), Some(stop)) = (usize::try_from(start), stop) else {
            let end = end.map_or("the end".to_owned(), |end| end.to_string());
            return Err(Error::index(format!(
                "columns {start} to {end} of row {row} are not all in [0, {columns})"
            )));
        };
        let room = stop
            .checked_sub(from)
            .ok_or_else(|| Error::config(format!("columns {from} to {stop} of row {row} run backwards")))?;
        let values = &*broadcast(values, room)?;
        self.table.region().write(self.place(widen(row.number()), from), values)?;
        self.rows.note_written(row, u32::try_from(stop).unwrap_or(u32::MAX));
        Ok(())
    }

    fn write_points(&mut self, rows: &IndexVec, columns: &IndexVec, values: &[i32]) -> Result<()> {
        if rows.len() != columns.len() {
            let (rows, columns) = (rows.len(), columns.len());
            return Err(Error::config(format!("{rows} rows and {columns} columns; there must be as many")));
        }
        let rows = rows.rows("row", self.table_rows())?;
        let columns = columns.rows("column", self.max_context_len)?;
        let values = broadcast(values, rows.len())?;
        for ((row, column), value) in rows.into_iter().zip(columns).zip(values.iter()) {
            self.table.region().write(self.place(widen(row), widen(column)), &[*value])?;
            self.rows.note_written(Row::new(row), column + 1);
        }
        Ok(())
    }

    fn checked_row(&self, row: i64) -> Result<Row> {
        IndexVec::I64(vec![row]).rows("row", self.table_rows()).map(|rows| Row::new(rows[0]))
    }

    /// The first `length` columns of a row, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when they are not in the table.
    pub fn read(&self, row: i64, length: i64) -> Result<TensorView> {
        let row = self.checked_row(row)?;
        let fits = usize::try_from(length).ok().filter(|&length| length <= self.max_context_len);
        let length = fits.ok_or_else(|| {
            Error::index(format!("{length} columns of row {row} are not in [0, {}]", self.max_context_len))
        })?;
        let offset = self.place(widen(row.number()), 0);
        TensorView::contiguous(Arc::clone(self.table.region()), offset, DType::I32, &[length])
    }

    /// Notes that somebody wrote these rows past this class, so that they are zeroed whole when they are freed.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a row outside of the table; nothing is noted then.
    pub fn mark_modified(&mut self, rows: &IndexVec) -> Result<()> {
        for row in rows.rows("row", self.table_rows())? {
            self.rows.note_written(Row::new(row), u32::try_from(self.max_context_len).unwrap_or(u32::MAX));
        }
        Ok(())
    }

    /// Makes every row free, and zeroes what was written.
    ///
    /// # Errors
    /// None in practice: the table is as long as it says.
    pub fn clear(&mut self) -> Result<()> {
        let written = self.rows.clear();
        self.clean(&written)
    }
}

/// `values`, or its only value as often as there are places.
fn broadcast(values: &[i32], places: usize) -> Result<std::borrow::Cow<'_, [i32]>> {
    match values {
        values if values.len() == places => Ok(values.into()),
        [value] => Ok(vec![*value; places].into()),
        values => Err(Error::config(format!("{} values for {places} places of the table", values.len()))),
    }
}
