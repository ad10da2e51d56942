//! Reading the request table on the CPU.

use crate::base::{Error, Result, widen};
use crate::memory::{Borrowed, Region};

/// Writes the first slots of each row of a table in host memory one after the other: row `rows[i]` of `columns`
/// columns gives `out[indptr[i]..indptr[i + 1]]`.
///
/// # Errors
/// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when a row or a column is not in the table, or a part of `out`
/// is not there; nothing is written then. `out` must be contiguous int32 in host memory.
pub fn build_kv_indices(
    table: &Region,
    columns: usize,
    rows: &[u32],
    indptr: &[i64],
    out: &Borrowed<'_>,
) -> Result<()> {
    let capacity = out.shape().numel();
    let mut parts = Vec::with_capacity(rows.len());
    for (position, (&row, ends)) in rows.iter().zip(indptr.windows(2)).enumerate() {
        parts.push((row, part(position, ends[0], ends[1], columns, capacity)?));
    }
    let mut values: Vec<i32> = Vec::new();
    for (row, part) in parts {
        values.clear();
        values.extend(table.read::<i32>(widen(row) * columns * size_of::<i32>(), part.len())?);
        let target = out.address().as_ptr().wrapping_add(part.start * size_of::<i32>());
        // SAFETY: `Borrowed` promises the elements of `out`, of which `part` names some; the vector is ours.
        unsafe { target.copy_from_nonoverlapping(values.as_ptr().cast(), size_of_val(&values[..])) };
    }
    Ok(())
}

/// The part of the output that row number `position` of a batch fills.
///
/// # Errors
/// [`ErrorKind::Index`](crate::base::ErrorKind::Index) unless `0 <= begin <= end <= capacity` and it is no longer than
/// a row.
pub fn part(
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
