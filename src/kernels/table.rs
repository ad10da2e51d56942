//! The request table, and operations on one in host memory.

use crate::base::{DType, Error, Id, RequestRow, Result, bytes_of, try_with_capacity, widen};
use crate::index::RowExtent;
use crate::memory::{BorrowedTensor, Region};

/// The slots of every request, int32 `[rows, columns]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table<'a> {
    region: &'a Region,
    rows: usize,
    columns: usize,
}

impl<'a> Table<'a> {
    /// Creates a table over all of `region`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when the region is smaller.
    pub(crate) fn new(region: &'a Region, rows: usize, columns: usize) -> Result<Self> {
        region.at(0, bytes_of("the table", &[rows, columns], DType::I32)?)?;
        Ok(Self { region, rows, columns })
    }

    pub(super) const fn region(&self) -> &'a Region {
        self.region
    }

    pub(super) const fn rows(&self) -> usize {
        self.rows
    }

    pub(super) const fn columns(&self) -> usize {
        self.columns
    }

    pub(super) fn address(&self) -> *mut i32 {
        self.region.address().as_ptr().cast()
    }

    /// Returns the offset of a row, in bytes.
    const fn row(&self, row: u32) -> usize {
        widen(row) * self.columns * size_of::<i32>()
    }
}

/// Zeroes the written columns of rows of a table in host memory.
///
/// # Errors
/// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when they are not in the table.
pub(super) fn zero_columns(table: &Table<'_>, rows: &[RowExtent<RequestRow>]) -> Result<()> {
    rows.iter().try_for_each(|&RowExtent { row, written }| {
        // SAFETY: the caller excludes other accesses to the table, which has one pool.
        unsafe { table.region.fill(table.row(row.number()), widen(written) * size_of::<i32>(), 0) }
    })
}

/// Concatenates the first slots of each row of a table in host memory: row `rows[i]` fills
/// `out[indptr[i]..indptr[i + 1]]`.
///
/// # Errors
/// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when a row or a column is not in the table, or a part
/// not in `out`; nothing is written then. `out` must be contiguous int32 in host memory.
pub(super) fn build_kv_indices(
    table: &Table<'_>,
    rows: &[u32],
    indptr: &[i64],
    out: &BorrowedTensor<'_>,
) -> Result<()> {
    let capacity = out.shape().numel();
    let mut parts = try_with_capacity(rows.len())?;
    for (position, (&row, ends)) in rows.iter().zip(indptr.windows(2)).enumerate() {
        parts.push((row, part(position, ends[0], ends[1], table.columns, capacity)?));
    }
    for (row, part) in parts {
        // SAFETY: tables are made of zeros; the caller excludes writes to them.
        let values = unsafe { table.region.read::<i32>(table.row(row), part.len()) }?;
        let target = out.address().as_ptr().wrapping_add(part.start * size_of::<i32>());
        // SAFETY: `BorrowedTensor` guarantees the elements of `out`, and `part` lies within them; the vector
        // is ours.
        unsafe { target.copy_from_nonoverlapping(values.as_ptr().cast(), size_of_val(&values[..])) };
    }
    Ok(())
}

/// Returns the part of the output for row number `position` of a batch.
///
/// # Errors
/// [`ErrorKind::Index`](crate::base::ErrorKind::Index) unless `0 <= begin <= end <= capacity` and the part is
/// no longer than a row.
pub(super) fn part(
    position: usize,
    begin: i64,
    end: i64,
    columns: usize,
    capacity: usize,
) -> Result<std::ops::Range<usize>> {
    let range = usize::try_from(begin).ok().zip(usize::try_from(end).ok());
    match range.filter(|&(begin, end)| begin <= end && end <= capacity && end - begin <= columns) {
        Some((begin, end)) => Ok(begin..end),
        None => Err(Error::index(format!(
            "kv_indptr goes from {begin} to {end} at position {position}; the table has {columns} columns, and \
             kv_indices room for {capacity}"
        ))),
    }
}
