//! `kvpool.ReqToTokenPool`.

use std::sync::Mutex;

use pyo3::PyTraverseError;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PySlice};

use crate::base::{Error, Id, IndexVec, Row, reserve};
use crate::memory::backend_for;
use crate::pool::{ReqToTokenPool as Pool, TableIndex};

use super::args::Arg;
use super::framework::to_tensor;
use super::report::Reporter;
use super::{args, lock, with};

/// The table `req_to_token[request, position] -> slot`. It does not track sequence lengths.
///
/// Row 0 is the padding row, at which padded rows of a CUDA graph point: the table has `max_reqs + 1` rows, and
/// `1..=max_reqs` are handed out, the longest free first. Rows are zero when they are handed out.
///
/// Args:
///     max_reqs: Requests that can be in it at once.
///     max_context_len: Columns.
///     device: Where the table is.
///     padding_row: `False` gives exactly `max_reqs` rows, the first being 0.
///     strict: Whether a bad free raises; otherwise it is dropped, counted and reported.
///
/// Raises:
///     ConfigError: If a size is below 1 or its bytes overflow.
///     OutOfMemoryError: If the memory cannot be had.
///     BackendUnavailableError: If `device` cannot be used here.
#[pyclass(frozen, module = "kvpool", name = "ReqToTokenPool", weakref)]
pub(super) struct ReqToTokenPool {
    pool: Mutex<Pool>,
    table: Py<PyAny>,
    reporter: Reporter,
}

/// `index` as often as there are partners for it.
fn repeated(index: i64, count: usize) -> PyResult<IndexVec> {
    let mut values = reserve(count)?;
    values.resize(count, index);
    Ok(IndexVec::I64(values))
}

/// `(row, slice)`, `(row, column)` or `(rows, columns)`; a single row or column goes with all of the others.
fn table_index(index: &Bound<'_, PyAny>) -> PyResult<TableIndex> {
    let (first, second): (Bound<'_, PyAny>, Bound<'_, PyAny>) = index
        .extract()
        .map_err(|_| PyTypeError::new_err("index must be (row, slice), (row, column) or (rows, columns)"))?;
    let Ok(columns) = second.cast::<PySlice>() else {
        let (rows, columns) = match (args::single(&first)?, args::single(&second)?) {
            (Some(row), Some(column)) => (IndexVec::I64(vec![row]), IndexVec::I64(vec![column])),
            (None, None) => (args::indices(&first)?, args::indices(&second)?),
            (Some(row), None) => {
                let columns = args::indices(&second)?;
                (repeated(row, columns.len())?, columns)
            }
            (None, Some(column)) => {
                let rows = args::indices(&first)?;
                let columns = repeated(column, rows.len())?;
                (rows, columns)
            }
        };
        return Ok(TableIndex::Points { rows, columns });
    };
    let part = |name: &str| -> PyResult<Option<i64>> {
        let value = columns.getattr(name)?;
        if value.is_none() { Ok(None) } else { args::int(&value).map(Some) }
    };
    if let Some(step) = part("step")?.filter(|&step| step != 1) {
        return Err(Error::config(format!(
            "a slice with step {step}; only consecutive columns can be written"
        ))
        .into());
    }
    Ok(TableIndex::Columns {
        row: args::int(&first)?,
        start: part("start")?.unwrap_or(0),
        end: part("stop")?,
    })
}

#[pymethods]
impl ReqToTokenPool {
    #[new]
    #[pyo3(signature = (max_reqs, max_context_len, device=None, *, padding_row=true, strict=false),
           text_signature = "(max_reqs, max_context_len, device=\"cuda\", *, padding_row=True, strict=False)")]
    fn new(
        py: Python<'_>,
        max_reqs: &Bound<'_, PyAny>,
        max_context_len: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        padding_row: bool,
        strict: bool,
    ) -> PyResult<Self> {
        let max_reqs = args::size("max_reqs", max_reqs)?;
        let max_context_len = args::size("max_context_len", max_context_len)?;
        let backend = backend_for(args::device(device)?)?;
        let pool = Pool::new(backend, max_reqs, max_context_len, padding_row, strict)?;
        let table = to_tensor(py, pool.req_to_token())?;
        Ok(Self { pool: Mutex::new(pool), table, reporter: Reporter::default() })
    }

    /// Takes rows.
    ///
    /// Args:
    ///     n: How many.
    ///
    /// Returns:
    ///     A list of `n` ints, or `None` when the pool is short.
    ///
    /// Raises:
    ///     ConfigError: If `n` is negative.
    #[pyo3(signature = (n=Arg::Missing), text_signature = "($self, n=1)")]
    fn alloc(&self, n: Arg<'_>) -> PyResult<Option<Vec<u32>>> {
        let count = n.count("n", 1)?;
        with(&self.pool, |pool| pool.alloc(count))
    }

    /// Gives a row or several back, and zeroes what was written to them.
    ///
    /// Args:
    ///     slot_or_slots: An int, or ints in a tensor, an array or a sequence.
    ///
    /// Raises:
    ///     IndexOwnershipError: If the pool is strict and a row is not the caller's to free.
    fn free(&self, py: Python<'_>, slot_or_slots: &Bound<'_, PyAny>) -> PyResult<()> {
        let values = args::index_or_indices(slot_or_slots)?;
        let bad = with(&self.pool, |pool| pool.free(&values))?;
        self.reporter.bad_frees(py, &bad, Row::NOUN, values.len());
        Ok(())
    }

    /// Writes slots to the table.
    ///
    /// Args:
    ///     index: `(row, slice)`, `(row, column)`, or `(rows, columns)` with one column for each row.
    ///     values: One slot for each place, int32 or int64, or a single one for all places.
    ///
    /// Raises:
    ///     IndexError: If a place is outside of the table. Nothing is written then.
    ///     ConfigError: If there are not as many values as places.
    fn write(&self, index: &Bound<'_, PyAny>, values: &Bound<'_, PyAny>) -> PyResult<()> {
        let index = table_index(index)?;
        let values = args::index_or_indices(values)?.into_i32()?;
        with(&self.pool, |pool| pool.write(&index, &values))
    }

    /// The first `length` slots of a row: an int32 tensor `[length]`, a view of the table.
    ///
    /// Raises:
    ///     IndexError: If they are outside of the table.
    fn read(&self, py: Python<'_>, row: &Bound<'_, PyAny>, length: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let (row, length) = (args::int(row)?, args::int(length)?);
        let view = with(&self.pool, |pool| pool.read(row, length))?;
        to_tensor(py, &view)
    }

    /// Says that these rows of the tensor were written by somebody else, so that they are zeroed whole when freed.
    ///
    /// Raises:
    ///     IndexError: If a row is outside of the table.
    fn mark_modified(&self, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let rows = args::index_or_indices(rows)?;
        with(&self.pool, |pool| pool.mark_modified(&rows))
    }

    /// Rows that can be handed out now.
    fn available_size(&self) -> usize {
        lock(&self.pool).available_size()
    }

    /// Makes every row free, and zeroes what was written through this class or marked as modified.
    fn clear(&self) -> PyResult<()> {
        with(&self.pool, Pool::clear)
    }

    /// The numbers of this pool, in rows: `capacity`, `available`, `in_use`, `high_water`, `dropped_frees`; and
    /// `bytes` of the table.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        let pool = lock(&self.pool);
        let numbers = row_stats(pool.rows());
        let bytes = pool.mem_bytes();
        drop(pool);
        for (key, value) in numbers.into_iter().chain([("bytes", bytes)]) {
            dict.set_item(key, value)?;
        }
        Ok(dict)
    }

    /// The table: int32 `[max_reqs + 1, max_context_len]` (`max_reqs` rows without a padding row), no copy.
    #[getter]
    fn req_to_token(&self, py: Python<'_>) -> Py<PyAny> {
        self.table.clone_ref(py)
    }

    /// Requests that can be in it at once.
    #[getter]
    fn size(&self) -> usize {
        lock(&self.pool).size()
    }

    /// Columns.
    #[getter]
    fn max_context_len(&self) -> usize {
        lock(&self.pool).max_context_len()
    }

    /// Where the table is, as PyTorch writes it.
    #[getter]
    fn device(&self) -> String {
        lock(&self.pool).device().to_string()
    }

    /// Whether row 0 is nobody's.
    #[getter]
    fn padding_row(&self) -> bool {
        lock(&self.pool).padding_row()
    }

    /// Whether a bad free raises.
    #[getter]
    fn strict(&self) -> bool {
        lock(&self.pool).strict()
    }

    fn __repr__(&self) -> String {
        let pool = lock(&self.pool);
        format!(
            "ReqToTokenPool(max_reqs={}, max_context_len={}, device='{}', available={})",
            pool.size(),
            pool.max_context_len(),
            pool.device(),
            pool.available_size()
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.table)
    }
}

/// The numbers of single indices: rows, track slots.
pub(super) fn row_stats(rows: &crate::index::RowTable) -> [(&'static str, usize); 5] {
    [
        ("capacity", rows.rows().capacity()),
        ("available", rows.rows().available()),
        ("in_use", rows.rows().in_use()),
        ("high_water", rows.rows().high_water()),
        ("dropped_frees", rows.dropped_frees()),
    ]
}
