//! The table of every request's slots.

mod device;
mod table;

use std::fmt;
use std::sync::Arc;

use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{DType, Device, Error, IndexVec, RequestRow, Result, bytes_of, run_blocking};
use crate::index::{BadFrees, Ledgered, RowTable};
use crate::kernels::Indices;
use crate::memory::{Backend, BorrowedTensor, Event, Stream};
use crate::tensor::TensorView;

pub(super) use self::table::RequestTable;
use self::table::{begins_in, numbers_at_once};
use super::contract::{Occupancy, Pool, Stats};
use super::mirror::{known_values, values_now};
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

    /// Returns the number of rows of the table: those of requests, and the padding row.
    pub(super) const fn rows(&self) -> usize {
        self.max_reqs + if self.padding_row { 1 } else { 0 }
    }

    /// Returns the number of rows and of columns, which fit int32.
    fn shape(&self) -> Result<[usize; 2]> {
        let Self { max_reqs, max_context_len, .. } = *self;
        fits_int32(&format!("max_reqs {max_reqs}"), max_reqs.checked_add(1))?;
        fits_int32(&format!("max_context_len {max_context_len}"), Some(max_context_len))?;
        Ok([self.rows(), max_context_len])
    }

    /// Returns the bytes of a pool on `device`.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a table that does not fit int32.
    pub fn footprint(&self, device: Device) -> Result<Footprint> {
        let shape = self.shape()?;
        Footprint::new(device, bytes_of("req_to_token", &shape, DType::I32)?, numbers_at_once(shape))
    }
}

/// The outcome of a free of rows.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::IndexVec;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{FreedRows, ReqToTokenConfig, ReqToTokenPool, TableWriters};
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let config = ReqToTokenConfig { writers: TableWriters::Others, ..ReqToTokenConfig::new(8, 128) };
/// let table = ReqToTokenPool::new(&config, &host).unwrap();
/// table.alloc(1, stream).unwrap().expect("eight are free");
/// let FreedRows { bad, not_zeroed } = table.free(&IndexVec::I64(vec![1, 5]), stream).unwrap();
/// assert_eq!((bad.dropped(), not_zeroed.is_none()), (1, true));
/// ```
#[derive(Debug)]
pub struct FreedRows {
    /// The rows that were dropped.
    pub bad: BadFrees,
    /// The error of the driver if the freed rows are not zeroed yet. They are zeroed before they are handed
    /// out again.
    pub not_zeroed: Option<Error>,
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
/// let pool = ReqToTokenPool::new(&config, &host).unwrap();
/// let row = i64::from(pool.alloc(1, stream).unwrap().unwrap()[0]);
/// assert_eq!(row, 1);
/// let slots = Indices::Host(IndexVec::I32(vec![7, 8]));
/// pool.write(TableIndex::Columns { row, start: 0, end: Some(2) }, slots.clone(), stream).unwrap();
/// assert!(pool.write(TableIndex::Columns { row, start: 127, end: Some(129) }, slots, stream).is_err());
/// ```
pub struct ReqToTokenPool {
    config: ReqToTokenConfig,
    req_to_token: TensorView,
    generation: TensorView,
    table: RankedMutex<RequestTable>,
}

impl fmt::Debug for ReqToTokenPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReqToTokenPool")
            .field("max_reqs", &self.config.max_reqs)
            .field("max_context_len", &self.config.max_context_len)
            .field("device", &self.req_to_token.device())
            .finish_non_exhaustive()
    }
}

impl ReqToTokenPool {
    /// Creates an empty table.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when `max_reqs` or `max_context_len` is 0, or
    /// does not fit int32; the error of the backend if it runs out of memory.
    pub fn new(config: &ReqToTokenConfig, backend: &Arc<dyn Backend>) -> Result<Self> {
        let ReqToTokenConfig { max_reqs, max_context_len, .. } = *config;
        at_least_one(&[("max_reqs", max_reqs), ("max_context_len", max_context_len)])?;
        let table = RequestTable::new(config, backend)?;
        let (req_to_token, generation) = (table.view().clone(), table.generation().clone());
        Ok(Self {
            config: *config,
            req_to_token,
            generation,
            table: RankedMutex::new(LockRank::Table, table),
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
        self.req_to_token.device()
    }

    /// Returns the table, int32 `[rows, max_context_len]`, without a copy.
    #[must_use]
    pub const fn req_to_token(&self) -> &TensorView {
        &self.req_to_token
    }

    /// Returns the number of times that each row was handed out: int64 `[rows]` in host memory, without a
    /// copy. [`Self::clear`] keeps it.
    #[must_use]
    pub const fn generation(&self) -> &TensorView {
        &self.generation
    }

    /// Calls `read` with the ownership of rows, under the lock of the table.
    pub fn with_rows<R>(&self, read: impl FnOnce(&Ledgered<RowTable<RequestRow>>) -> R) -> R {
        read(self.lock().rows())
    }

    pub(super) fn lock(&self) -> RankedGuard<'_, RequestTable> {
        self.table.lock()
    }

    /// Returns the number of bytes of the table.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.req_to_token.region().bytes()
    }

    /// Returns the number of free rows.
    #[must_use]
    pub fn available_size(&self) -> usize {
        self.lock().rows().rows().available()
    }

    /// Returns the rows in use, lowest first.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the list.
    pub fn rows_in_use(&self) -> Result<Vec<RequestRow>> {
        self.with_rows(|rows| rows.rows().indices_in_use())
    }

    /// Takes `count` rows, first in, first out, or returns `None`. Their generations count up.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails.
    pub fn alloc(&self, count: usize, stream: Stream) -> Result<Option<Vec<RequestRow>>> {
        self.lock().alloc(count, stream)
    }

    /// Returns rows that were taken and not handed out. Needs no memory.
    pub fn undo(&self, rows: &[RequestRow]) {
        self.lock().undo(rows.iter().copied());
    }

    /// Frees rows and zeroes their written columns, unless rows are not zeroed; drops and reports rows that
    /// are not live.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) for an invalid free;
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) while `stream` is being captured. Nothing is
    /// changed.
    pub fn free(&self, given: &IndexVec, stream: Stream) -> Result<FreedRows> {
        self.lock().free(given, stream)
    }

    /// Returns the number of rows of the table: those of requests, and the padding row.
    #[must_use]
    pub fn table_rows(&self) -> usize {
        self.config.rows()
    }

    /// Returns an event to wait for before `numbers` numbers are sent to the device, if it is
    /// far behind.
    #[must_use]
    pub fn backpressure_event(&self, numbers: usize) -> Option<Arc<Event>> {
        self.lock().executor.backpressure_event(numbers)
    }

    /// Reports, once, an invalid argument on the device of an earlier call. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a place outside of the table,
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a value beyond int32: it was skipped.
    pub fn take_fault(&self) -> Result<()> {
        self.lock().executor.take_fault()
    }

    /// Writes `values` to the table; a single value goes to every place. On a GPU it is one launch on
    /// `stream`. Arguments that are part of the table are read first, with a wait, if the host does not know
    /// them.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a place outside of the table,
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) when the numbers of values and places differ, a
    /// value does not fit int32 or the columns run backwards. Nothing is written. Invalid places that only the
    /// device has are skipped, and [`ReqToTokenPool::take_fault`] reports them.
    pub fn write(&self, index: TableIndex<'_>, values: Indices<'_>, stream: Stream) -> Result<()> {
        let values = self.read_part(values, stream)?;
        let index = match index {
            TableIndex::Points { rows, columns } => {
                let (rows, columns) = (self.read_part(rows, stream)?, self.read_part(columns, stream)?);
                TableIndex::Points { rows, columns }
            }
            columns @ TableIndex::Columns { .. } => columns,
        };
        self.lock().write(&index, &values, stream)
    }

    /// Returns the values of `numbers` if they are part of the table, read without its lock; otherwise
    /// `numbers`.
    fn read_part<'a>(&self, numbers: Indices<'a>, stream: Stream) -> Result<Indices<'a>> {
        match &numbers {
            Indices::Device { tensor, version } if begins_in(self.req_to_token.region(), tensor) => {
                if let Some(known) = known_values(tensor, *version) {
                    return Ok(Indices::Host(known));
                }
                self.lock().check_not_capturing(stream)?;
                run_blocking(|| values_now(numbers, stream)).map(Indices::Host)
            }
            _ => Ok(numbers),
        }
    }

    /// Returns the first `length` columns of a row, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when the row or the columns are outside of the
    /// table.
    pub fn read(&self, row: i64, length: i64) -> Result<TensorView> {
        self.lock().read(row, length)
    }

    /// Reports that rows were written outside of this type. They are zeroed whole when they are freed, and
    /// are unknown to the host until then. `version` is the framework's count of its own writes to the table,
    /// which are accounted for.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a row outside of the table; nothing is
    /// changed.
    pub fn mark_modified(&self, rows: &IndexVec, version: Option<u64>) -> Result<()> {
        self.lock().mark_modified(rows, version)
    }

    /// Concatenates the first slots of rows: row `rows[i]` fills `out[indptr[i]..indptr[i + 1]]`. `out` is
    /// contiguous int32 on the table's device. On a GPU it is one launch on `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) or
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
        self.lock().build_kv_indices(rows, indptr, out, stream)
    }

    /// Frees every row and zeroes the written columns. If `version`, as in [`ReqToTokenPool::mark_modified`],
    /// has changed, the whole table is zeroed.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails.
    pub fn clear(&self, version: Option<u64>, stream: Stream) -> Result<()> {
        self.lock().clear(version, stream)
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
        self.with_rows(|rows| Stats::of_rows(rows)).and("bytes", self.mem_bytes())
    }

    fn occupancy(&self) -> Occupancy {
        self.with_rows(|rows| Occupancy::of_equal_units(rows.spans(), rows.ledger(), 1))
    }

    fn keep_ledger(&self) {
        self.lock().keep_ledger();
    }
}
