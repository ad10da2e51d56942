//! `kvpool.ReqToTokenPool`.

use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::PyVisit;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyNone, PySlice, PyString};

use crate::base::{Device, Error, Id, IndexVec, RequestRow, check_memory, try_with_capacity};
use crate::memory::Stream;
use crate::pool::{ReqToTokenConfig, ReqToTokenPool as Pool, TableIndex, TableWriters, make_room};

use super::args;
use super::args::{Arg, IndexArg, version_of};
use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::debug::Debug;
use super::export::to_tensor;
use super::framework::{backend, current_stream, torch};
use super::logging::{Reporter, warn};
use super::pool_name::PoolName;

/// The table `req_to_token[request, position] -> slot`. It does not track sequence lengths.
///
/// Row 0 is the padding row, for the padding requests of a CUDA graph. The table has `max_reqs + 1` rows, of
/// which `1..=max_reqs` are handed out, first in, first out. Rows are zero when they are handed out, unless
/// `zero_rows` is false.
///
/// On a GPU all work is enqueued on the current stream, and only methods that say so wait. The host keeps a
/// mirror of the table, so that slots read from it can be freed without a copy from the GPU. `write` and
/// `free` update the mirror at once or, for values that only the GPU has, when the kernel has reported what
/// it wrote. PyTorch's writes to `req_to_token` are detected by its write count (`_version`) and invalidate
/// the whole mirror until `mark_modified` or `clear`. Writes by other kernels are not detected: report them
/// with `mark_modified(rows)`, or set `foreign_writes` if other kernels write most of the table: the host then
/// keeps no mirror, and copies slots from the GPU when they are freed.
///
/// Args:
///     max_reqs: Maximum number of requests.
///     max_context_len: Maximum tokens per request: the number of columns.
///     device: Device of the table.
///     padding_row: Whether row 0 is padding. `False` gives exactly `max_reqs` rows, numbered from 0.
///     strict: Whether an invalid free raises; otherwise it is dropped, counted and reported.
///     zero_rows: Whether to zero the written columns of a row when it is freed. If not, a row still has the
///         slots of its earlier owners.
///     foreign_writes: Whether anything but this class writes the table, without `mark_modified`. Rows are then
///         zeroed whole.
///     debug: Whether to record owners and call sites for `leaks` and reports. Defaults to the environment
///         variable `KVPOOL_DEBUG`.
///
/// Raises:
///     ConfigError: If a size is below 1, or the size in bytes overflows.
///     OutOfMemoryError: If there is not enough memory.
///     BackendUnavailableError: If `device` is not available.
#[pyclass(extends = BasePool, frozen, subclass, module = "kvpool", name = "ReqToTokenPool")]
pub(super) struct ReqToTokenPool {
    pub(super) pool: Arc<Pool>,
    device: Device,
    table: Py<PyAny>,
    generation: Py<PyAny>,
    pub(super) debug: Debug,
    reporter: Reporter,
}

/// The argument `index` of `write`.
enum TableIndexArg<'a, 'py> {
    Columns { row: i64, start: i64, end: Option<i64> },
    Points { rows: IndexArg<'a, 'py>, columns: IndexArg<'a, 'py> },
}

impl TableIndexArg<'_, '_> {
    /// Returns the number of indices in host memory, which are sent to a device.
    fn host_len(&self) -> usize {
        match self {
            Self::Columns { .. } => 0,
            Self::Points { rows, columns } => rows.host_len() + columns.host_len(),
        }
    }

    fn take(&mut self) -> PyResult<TableIndex<'_>> {
        match self {
            Self::Columns { row, start, end } => {
                Ok(TableIndex::Columns { row: *row, start: *start, end: *end })
            }
            Self::Points { rows, columns } => {
                Ok(TableIndex::Points { rows: rows.take()?, columns: columns.take()? })
            }
        }
    }
}

/// A guard of rows that were taken. Dropping it before [`TakenRows::keep`] returns them.
struct TakenRows<'a> {
    pool: &'a Pool,
    rows: Vec<RequestRow>,
}

impl TakenRows<'_> {
    fn keep(mut self) {
        self.rows.clear();
    }
}

impl Drop for TakenRows<'_> {
    fn drop(&mut self) {
        self.pool.undo(&self.rows);
    }
}

/// Repeats `index` `count` times.
fn repeated<'a, 'py>(index: i64, count: usize) -> PyResult<IndexArg<'a, 'py>> {
    let mut values = try_with_capacity(count)?;
    values.resize(count, index);
    Ok(IndexArg::of_values(IndexVec::I64(values)))
}

/// Converts `(row, slice)`, `(row, column)` or `(rows, columns)`. A single row or column is repeated for all
/// of the others.
fn table_index<'a, 'py>(
    (first, second): &'a (Bound<'py, PyAny>, Bound<'py, PyAny>),
) -> PyResult<TableIndexArg<'a, 'py>> {
    let Ok(columns) = second.cast::<PySlice>() else {
        let (rows, columns) = match (args::single(first)?, args::single(second)?) {
            (Some(row), Some(column)) => (repeated(row, 1)?, repeated(column, 1)?),
            (None, None) => (args::indices(first)?, args::indices(second)?),
            (Some(row), None) => {
                let columns = args::indices(second)?;
                (repeated(row, columns.len()?)?, columns)
            }
            (None, Some(column)) => {
                let rows = args::indices(first)?;
                let columns = repeated(column, rows.len()?)?;
                (rows, columns)
            }
        };
        return Ok(TableIndexArg::Points { rows, columns });
    };
    let py = columns.py();
    let part = |name: &Bound<'py, PyString>| -> PyResult<Option<i64>> {
        let value = columns.getattr(name)?;
        if value.is_none() { Ok(None) } else { args::int(&value).map(Some) }
    };
    if let Some(step) = part(intern!(py, "step"))?.filter(|&step| step != 1) {
        return Err(Error::argument(format!(
            "a slice with step {step}; only consecutive columns can be written"
        ))
        .into());
    }
    Ok(TableIndexArg::Columns {
        row: args::int(first)?,
        start: part(intern!(py, "start"))?.unwrap_or(0),
        end: part(intern!(py, "stop"))?,
    })
}

impl ReqToTokenPool {
    /// Returns the stream for a call that sends `numbers` numbers from the host.
    fn stream(&self, py: Python<'_>, numbers: usize) -> PyResult<Stream> {
        make_room(numbers, |numbers| self.pool.backpressure_event(numbers))?;
        current_stream(py, self.device)
    }

    /// Returns PyTorch's count of its own writes to the table, if there is one.
    fn version(&self, py: Python<'_>) -> Option<u64> {
        if self.device == Device::Cpu { None } else { version_of(self.table.bind(py)) }
    }
}

/// Warns of freed rows that the driver failed to zero.
pub(super) fn report_not_zeroed(py: Python<'_>, failure: Option<&Error>) {
    if let Some(failure) = failure {
        warn(py, &format!("freed rows are zeroed when they are handed out again: {failure}"));
    }
}

impl PoolClass for ReqToTokenPool {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&*self.pool);
    }
}

#[pymethods]
impl ReqToTokenPool {
    #[new]
    #[pyo3(signature = (max_reqs, max_context_len, device=None, *, padding_row=true, strict=false,
                     zero_rows=true, foreign_writes=false, debug=None),
           text_signature = "(max_reqs, max_context_len, device=\"cuda\", *, padding_row=True, strict=False, \
                             zero_rows=True, foreign_writes=False, debug=None)")]
    #[expect(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "the arguments of a constructor in Python"
    )]
    fn new(
        py: Python<'_>,
        max_reqs: &Bound<'_, PyAny>,
        max_context_len: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        padding_row: bool,
        strict: bool,
        zero_rows: bool,
        foreign_writes: bool,
        debug: Option<bool>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let writers = if foreign_writes { TableWriters::Others } else { TableWriters::Pool };
        let max_reqs = args::size("max_reqs", max_reqs)?;
        let max_context_len = args::size("max_context_len", max_context_len)?;
        let device = args::device(py, device)?;
        let backend = backend(py, device)?;
        let config = ReqToTokenConfig { max_reqs, max_context_len, padding_row, strict, zero_rows, writers };
        let pool = py.detach(|| Pool::new(&config, &backend))?;
        let debug = Debug::new(debug, &pool);
        let table = to_tensor(py, pool.req_to_token())?;
        let generation = to_tensor(py, pool.generation())?;
        let name = PoolName::next("ReqToTokenPool");
        let reporter = Reporter::new(&name);
        let pool = Self { pool: Arc::new(pool), device, table, generation, debug, reporter };
        Ok(BasePool::named(name, debug, pool))
    }

    /// Takes rows.
    ///
    /// Args:
    ///     n: Number of rows.
    ///     owner: An owner for reports and `leaks`, a str or an int. Recorded only if the pool debugs.
    ///
    /// Returns:
    ///     A list of `n` ints, or `None` if there are not enough rows.
    ///
    /// Raises:
    ///     ArgumentError: If `n` is negative.
    ///     DriverError: If the stream is being captured, or rows that an earlier call could not zero cannot be zeroed now.
    ///         No row is taken.
    #[pyo3(signature = (n=Arg::Missing, *, owner=None), text_signature = "($self, n=1, *, owner=None)")]
    fn alloc(
        &self,
        py: Python<'_>,
        n: Arg<'_>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Py<PyList>>> {
        /// The number of rows whose list counts as of no caller's length.
        const FEW: usize = 64;
        let _acting = self.debug.begin(py, owner)?;
        let count = n.count("n", 1)?;
        let stream = self.stream(py, count)?;
        if count > FEW {
            // For the list and its ints.
            check_memory(count.min(self.pool.size()) * 64)?;
        }
        let Some(rows) = self.pool.alloc(count, stream)? else { return Ok(None) };
        let taken = TakenRows { pool: &self.pool, rows };
        let list = PyList::new(py, taken.rows.iter().map(|row| row.number()))?.unbind();
        taken.keep();
        Ok(Some(list))
    }

    /// Frees one or more rows, and zeroes their written columns, unless `zero_rows` is false. If the driver
    /// fails to zero them, a warning is logged, and they are zeroed before they are handed out again. Requests of
    /// a `BatchPlanner` end with `BatchPlanner.finish`; if their rows are freed here, the planner frees their
    /// slots at its next call, or when slots are short, and logs a warning.
    ///
    /// Args:
    ///     rows: An int, or ints in a tensor, an array or a sequence. Waits for values that only a GPU has.
    ///     owner: As in `alloc`.
    ///     slot_or_slots: Another name of `rows`.
    ///
    /// Raises:
    ///     IndexOwnershipError: If the pool is strict and a free is invalid. Nothing is changed.
    ///     DriverError: If the stream is being captured. Nothing is changed.
    #[pyo3(signature = (rows=None, *, owner=None, slot_or_slots=None))]
    fn free(
        &self,
        py: Python<'_>,
        rows: Option<&Bound<'_, PyAny>>,
        owner: Option<&Bound<'_, PyAny>>,
        slot_or_slots: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        if rows.is_some() && slot_or_slots.is_some() {
            return Err(PyTypeError::new_err("free takes rows or slot_or_slots, not both"));
        }
        let _acting = self.debug.begin(py, owner)?;
        let none = PyNone::get(py);
        let rows = rows.or(slot_or_slots).unwrap_or(none.as_any());
        let values = args::index_or_indices(rows)?.values(py)?;
        let stream = self.stream(py, values.len())?;
        let freed = self.pool.free(&values, stream)?;
        self.reporter.bad_frees(py, &freed.bad, RequestRow::NOUN, values.len(), self.debug);
        report_not_zeroed(py, freed.not_zeroed.as_ref());
        Ok(())
    }

    /// Writes slots to the table; on a GPU in one launch.
    ///
    /// For a place listed twice, the last value wins; if only the GPU has the places, either may.
    ///
    /// Args:
    ///     index: `(row, slice)`, `(row, column)`, or `(rows, columns)` with one column for each row.
    ///     values: One slot for each place, int32 or int64, or a single one for all places.
    ///
    /// Raises:
    ///     IndexError: If a place is outside of the table. Nothing is written. An invalid place that only the
    ///         GPU has is skipped, and a later call raises this error.
    ///     ArgumentError: If the number of values is neither 1 nor the number of places.
    ///     DriverError: If a driver call fails, or the stream is being captured.
    fn write(&self, py: Python<'_>, index: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>) -> PyResult<()> {
        let index: (Bound<'_, PyAny>, Bound<'_, PyAny>) = index.extract().map_err(|_| {
            PyTypeError::new_err("index must be (row, slice), (row, column) or (rows, columns)")
        })?;
        let mut index_arg = table_index(&index)?;
        let mut values = args::index_or_indices(values)?;
        let stream = self.stream(py, index_arg.host_len() + values.host_len())?;
        let (index, values) = (index_arg.take()?, values.take()?);
        Ok(self.pool.write(index, values, stream)?)
    }

    /// Concatenates the slots of requests in the layout of FlashInfer's `kv_indices`.
    ///
    /// Request `i` fills `kv_indices[kv_indptr[i]:kv_indptr[i + 1]]` with the first slots of its row. On a
    /// GPU it is one launch on the current stream. Invalid arguments that only the GPU has are skipped, and
    /// a later call raises the error.
    ///
    /// Args:
    ///     req_pool_indices: Request rows, int32 or int64 `[bs]`.
    ///     kv_indptr: Offsets of the requests, int32 or int64 `[bs + 1]`.
    ///     kv_indices: Output, a contiguous int32 tensor on the table's device.
    ///
    /// Raises:
    ///     IndexError: If a row is not in the table, or a request is longer than a row or than `kv_indices`.
    ///     ArgumentError: If a length or device is invalid.
    ///     TypeError: If `kv_indices` is not an int32 tensor.
    fn build_kv_indices(
        &self,
        py: Python<'_>,
        req_pool_indices: &Bound<'_, PyAny>,
        kv_indptr: &Bound<'_, PyAny>,
        kv_indices: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (mut rows, mut indptr) = (args::indices(req_pool_indices)?, args::indices(kv_indptr)?);
        let out = args::output(kv_indices)?;
        let stream = self.stream(py, rows.host_len() + indptr.host_len())?;
        let (rows, indptr, out) = (rows.take()?, indptr.take()?, out.borrow()?);
        Ok(self.pool.build_kv_indices(&rows, &indptr, &out, stream)?)
    }

    /// Returns the first `length` slots of a row: an int32 tensor `[length]`, a view of the table.
    ///
    /// Raises:
    ///     IndexError: If the row or the length is outside of the table.
    fn read(&self, py: Python<'_>, row: &Bound<'_, PyAny>, length: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let (row, length) = (args::int(row)?, args::int(length)?);
        let view = self.pool.read(row, length)?;
        if self.device == Device::Cpu || torch(py)?.is_none() {
            return to_tensor(py, &view);
        }
        // A view of the table shares its write count, through which `free` detects writes.
        let first = view.offset() / view.dtype().size();
        Ok(self.table.bind(py).call_method1("as_strided", ((length,), (1,), first))?.unbind())
    }

    /// Reports that rows of the tensor were written outside of this class. They are zeroed whole when they
    /// are freed, and until then their values are copied from the GPU when needed. All PyTorch writes so far
    /// are accounted for.
    ///
    /// Args:
    ///     rows: An int, or ints in a tensor, an array or a sequence. Waits for values that only a GPU has.
    ///
    /// Raises:
    ///     IndexError: If a row is outside of the table.
    fn mark_modified(&self, py: Python<'_>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let rows = args::index_or_indices(rows)?.values(py)?;
        let version = self.version(py);
        Ok(self.pool.mark_modified(&rows, version)?)
    }

    /// Returns the number of free rows.
    fn available_size(&self) -> usize {
        self.pool.available_size()
    }

    /// Number of free rows: what `available_size` returns.
    #[getter]
    fn rows_free(&self) -> usize {
        self.available_size()
    }

    /// Returns the rows in use, ascending: all that `alloc` has returned and nobody has freed.
    ///
    /// After an error in the middle of a step, those that no request has can be freed.
    ///
    /// Raises:
    ///     OutOfMemoryError: If there is not enough host memory.
    fn rows_in_use(&self, py: Python<'_>) -> PyResult<Py<PyList>> {
        let rows = self.pool.rows_in_use()?;
        check_memory(rows.len() * 64)?;
        Ok(PyList::new(py, rows.iter().map(|row| row.number()))?.unbind())
    }

    /// Frees every row, and zeroes everything that was written through this class, marked as modified or, on
    /// a GPU, counted by PyTorch.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let _acting = self.debug.begin(py, None)?;
        let (version, stream) = (self.version(py), self.stream(py, self.size())?);
        Ok(self.pool.clear(version, stream)?)
    }

    /// The table, int32 `[max_reqs + 1, max_context_len]` (`max_reqs` rows without a padding row), without a
    /// copy.
    #[getter]
    fn req_to_token(&self, py: Python<'_>) -> Py<PyAny> {
        self.table.clone_ref(py)
    }

    /// The number of times that each row was handed out, int64 `[max_reqs + 1]` on the host (`max_reqs` without a
    /// padding row), without a copy. `clear` keeps it: a row has another request if its number is another one. Do not
    /// write to it.
    #[getter]
    fn generation(&self, py: Python<'_>) -> Py<PyAny> {
        self.generation.clone_ref(py)
    }

    /// Maximum number of requests.
    #[getter]
    fn size(&self) -> usize {
        self.pool.size()
    }

    /// Maximum tokens per request: the number of columns.
    #[getter]
    fn max_context_len(&self) -> usize {
        self.pool.max_context_len()
    }

    /// Whether row 0 is padding.
    #[getter]
    fn padding_row(&self) -> bool {
        self.pool.padding_row()
    }

    /// Whether the written columns of a row are zeroed when it is freed.
    #[getter]
    fn zero_rows(&self) -> bool {
        self.pool.zero_rows()
    }

    /// Whether anything but this class writes the table, without `mark_modified`.
    #[getter]
    fn foreign_writes(&self) -> bool {
        self.pool.writers() == TableWriters::Others
    }

    fn __repr__(&self) -> String {
        let pool = &self.pool;
        format!(
            "ReqToTokenPool(max_reqs={}, max_context_len={}, device='{}', available={})",
            pool.size(),
            pool.max_context_len(),
            pool.device(),
            pool.available_size()
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.table)?;
        visit.call(&self.generation)
    }
}
