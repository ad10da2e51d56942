//! Storing, gathering, moving and zeroing rows of buffers.

use std::sync::Arc;

use crate::base::{DType, Dims, Error, IndexVec, Result, bytes_of, widen};
use crate::index::Move;
use crate::memory::{Borrowed, Region};

use super::convert::{Convert, conversion, element_copy};
use super::indices::offset_of;
use super::threads::in_parts;

/// A buffer of equal rows `[rows, heads, dim]` within a region of host memory.
#[derive(Clone, Debug)]
pub struct RowBuffer {
    region: Arc<Region>,
    /// The rows lie within the region from this byte on.
    offset: usize,
    rows: usize,
    heads: usize,
    dim: usize,
    dtype: DType,
}

impl RowBuffer {
    /// `rows` rows of `heads` x `dim` elements from byte `offset` of `region` on.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when they do not lie within the region.
    pub fn new(
        region: Arc<Region>,
        offset: usize,
        [rows, heads, dim]: [usize; 3],
        dtype: DType,
    ) -> Result<Self> {
        region.at(offset, bytes_of("a buffer of rows", &[rows, heads, dim], dtype)?)?;
        Ok(Self { region, offset, rows, heads, dim, dtype })
    }

    /// The memory it lies in.
    #[must_use]
    pub const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Where it begins in its region, in bytes.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// `[rows, heads, dim]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 3] {
        [self.rows, self.heads, self.dim]
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of one row.
    #[must_use]
    pub const fn row_bytes(&self) -> usize {
        self.heads * self.dim * self.dtype.size()
    }

    /// Bytes of all rows.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    /// The address of a row. `row` must be below `rows`.
    fn row(&self, row: u32) -> *mut u8 {
        debug_assert!(widen(row) < self.rows);
        self.region.address().as_ptr().wrapping_add(self.offset + widen(row) * self.row_bytes())
    }
}

/// Values that are stored into the rows of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Store<'a> {
    /// What the values are called in messages.
    pub name: &'static str,
    /// Where they go.
    pub target: &'a RowBuffer,
    /// The values: leading dimensions whose product is the number of rows, then `[heads, dim]` or `[heads * dim]`.
    pub values: Borrowed<'a>,
    /// Divides the values before they are converted to an 8-bit float.
    pub scale: Option<f32>,
}

/// How one row gets from its source to its buffer.
#[derive(Clone, Copy)]
enum Way {
    /// It lies in one piece.
    Whole,
    /// Its heads lie in one piece each.
    Heads,
    /// Element by element, converted where the dtypes differ.
    Convert(Convert),
}

/// A store whose shapes and dtypes were checked.
struct Planned<'a> {
    store: Store<'a>,
    way: Way,
    lead_shape: Dims,
    lead_strides: Dims,
    /// Strides of a head and of an element, in elements.
    head_stride: isize,
    dim_stride: isize,
    divisor: f32,
}

/// Writes `values` to the rows that `indices` names, for every store in turn, in one pass.
///
/// Negative indices are skipped. When a row is named twice, the last of its values stays. Large work is spread
/// over threads, each of which writes rows of its own.
///
/// # Errors
/// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for shapes that do not fit,
/// [`ErrorKind::Type`](crate::base::ErrorKind::Type) for dtypes that cannot be converted,
/// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for an index beyond the rows. Nothing is written then.
pub fn store_rows(stores: &[Store<'_>], indices: &IndexVec) -> Result<()> {
    let plans = stores.iter().map(|store| plan(store, indices.len())).collect::<Result<Vec<_>>>()?;
    let rows = stores.iter().map(|store| store.target.rows).min().unwrap_or(0);
    let targets = targets(indices, rows)?;
    let bytes: usize = stores.iter().map(|store| store.target.row_bytes() * targets.len()).sum();
    in_parts(bytes, |part, parts| {
        let mine = |row: u32| parts == 1 || widen(row) % parts == part;
        for planned in &plans {
            for (position, &target) in targets.iter().enumerate() {
                if let Ok(row) = u32::try_from(target)
                    && mine(row)
                {
                    planned.copy(position, row);
                }
            }
        }
    });
    Ok(())
}

/// The rows that `indices` names, checked; negative values stay negative.
fn targets(indices: &IndexVec, rows: usize) -> Result<Vec<i32>> {
    indices
        .iter()
        .enumerate()
        .map(|(position, value)| match i32::try_from(value) {
            _ if value < 0 => Ok(-1),
            Ok(row) if widen(row.unsigned_abs()) < rows => Ok(row),
            _ => Err(Error::index(format!("slot {value} at position {position} is outside [0, {rows})"))),
        })
        .collect()
}

fn plan<'a>(store: &Store<'a>, count: usize) -> Result<Planned<'a>> {
    let Store { name, target, values, scale } = *store;
    values.expect_host(name)?;
    let (shape, strides) = (values.shape().as_slice(), values.strides().as_slice());
    let [_, heads, dim] = target.shape();
    let extent = |axis: usize| usize::try_from(shape[axis]).unwrap_or(0);
    let n = shape.len();
    let stride = |axis: usize| isize::try_from(strides[axis]).unwrap_or(0);
    let (lead, head_stride, dim_stride) = if n >= 2 && extent(n - 2) == heads && extent(n - 1) == dim {
        (n - 2, stride(n - 2), stride(n - 1))
    } else if n >= 1 && extent(n - 1) == heads * dim {
        (n - 1, stride(n - 1) * isize::try_from(dim).unwrap_or(0), stride(n - 1))
    } else {
        return Err(Error::config(format!(
            "{name} has shape {shape:?}; its last dimensions must be [{heads}, {dim}] or [{}]",
            heads * dim
        )));
    };
    let lead_shape = Dims::new(&shape[..lead])?;
    if lead_shape.numel() != count {
        return Err(Error::config(format!(
            "{name} has shape {shape:?}, which is {} rows of [{heads}, {dim}]; there are {count} indices",
            lead_shape.numel()
        )));
    }
    let packed_heads = dim_stride == 1 || dim == 1;
    let packed_row = packed_heads && (heads == 1 || usize::try_from(head_stride).is_ok_and(|s| s == dim));
    let way = match (values.dtype() == target.dtype, conversion(values.dtype(), target.dtype)) {
        (true, _) if packed_row => Way::Whole,
        (true, _) if packed_heads => Way::Heads,
        (true, _) => Way::Convert(element_copy(target.dtype)),
        (false, Some(convert)) => Way::Convert(convert),
        (false, None) => {
            return Err(Error::wrong_type(format!(
                "{name} is {}, which cannot be converted to the pool's {}",
                values.dtype(),
                target.dtype
            )));
        }
    };
    Ok(Planned {
        store: *store,
        way,
        lead_strides: Dims::new(&strides[..lead])?,
        lead_shape,
        head_stride,
        dim_stride,
        divisor: scale.unwrap_or(1.0),
    })
}

impl Planned<'_> {
    /// Copies value number `position` to `row`, which is below the target's rows.
    fn copy(&self, position: usize, row: u32) {
        let size = isize::try_from(self.store.values.dtype().size()).unwrap_or(0);
        let lead = offset_of(position, self.lead_shape.as_slice(), self.lead_strides.as_slice());
        let source = self.store.values.address().as_ptr().cast_const().wrapping_offset(lead * size);
        let target = self.store.target.row(row);
        let [_, heads, dim] = self.store.target.shape();
        let head_bytes = dim * self.store.target.dtype.size();
        if let Way::Whole = self.way {
            // SAFETY: `plan` found the row of the source in one piece, `Borrowed` promises its elements, and
            // `row` is a row of a live region. The source may be that very region, hence a copy that may overlap.
            unsafe { target.copy_from(source, heads * head_bytes) };
            return;
        }
        for head in 0..heads {
            let step = isize::try_from(head).unwrap_or(0) * self.head_stride * size;
            let (source, target) = (source.wrapping_offset(step), target.wrapping_add(head * head_bytes));
            match self.way {
                // SAFETY: as above, for one head.
                Way::Whole | Way::Heads => unsafe { target.copy_from(source, head_bytes) },
                // SAFETY: as above; the conversion was chosen for these two dtypes.
                Way::Convert(convert) => unsafe {
                    convert(source, self.dim_stride, target, dim, self.divisor);
                },
            }
        }
    }
}

/// Copies the rows that `rows` names, all below the buffer's, to `out`: contiguous `[rows.len(), heads, dim]` of
/// the same dtype in host memory.
///
/// # Errors
/// [`ErrorKind::Config`](crate::base::ErrorKind::Config) or [`ErrorKind::Type`](crate::base::ErrorKind::Type) when
/// `out` is not that; nothing is written then.
pub fn gather_rows(pairs: &[(&RowBuffer, Borrowed<'_>)], rows: &[u32]) -> Result<()> {
    for (buffer, out) in pairs {
        out.expect_host("out")?;
        let expected = [rows.len(), buffer.heads, buffer.dim].map(|n| i64::try_from(n).unwrap_or(i64::MAX));
        if out.shape().as_slice() != expected || !out.is_contiguous() {
            return Err(Error::config(format!(
                "out has shape {:?} and strides {:?}; a contiguous {expected:?} is needed",
                out.shape().as_slice(),
                out.strides().as_slice()
            )));
        }
        if out.dtype() != buffer.dtype {
            return Err(Error::wrong_type(format!("out is {}, the pool {}", out.dtype(), buffer.dtype)));
        }
        check_rows(buffer, rows)?;
    }
    let bytes = pairs.iter().map(|(buffer, _)| buffer.row_bytes() * rows.len()).sum();
    in_parts(bytes, |part, parts| {
        let (from, to) = (rows.len() * part / parts, rows.len() * (part + 1) / parts);
        for (buffer, out) in pairs {
            let mut target = out.address().as_ptr().wrapping_add(from * buffer.row_bytes());
            for &row in &rows[from..to] {
                // SAFETY: `row` was checked; `out` is contiguous and has a place for it. Whoever passes a view
                // of the pool as `out` gets overlapping copies, not undefined ones.
                unsafe { target.copy_from(buffer.row(row), buffer.row_bytes()) };
                target = target.wrapping_add(buffer.row_bytes());
            }
        }
    });
    Ok(())
}

fn check_rows(buffer: &RowBuffer, rows: &[u32]) -> Result<()> {
    match rows.iter().find(|&&row| widen(row) >= buffer.rows) {
        None => Ok(()),
        Some(row) => Err(Error::index(format!("row {row} is outside [0, {})", buffer.rows))),
    }
}

/// Carries out `moves`, in order, in every buffer.
///
/// # Errors
/// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when a row is outside of a buffer; nothing is moved then.
pub fn move_rows(buffers: &[RowBuffer], moves: &[Move]) -> Result<()> {
    for buffer in buffers {
        for step in moves {
            let (Move::Copy { dst: a, src: b } | Move::Swap(a, b)) = *step;
            check_rows(buffer, &[a, b])?;
        }
    }
    let bytes = buffers.iter().map(|buffer| buffer.row_bytes() * moves.len()).sum();
    in_parts(bytes, |part, parts| {
        for buffer in buffers.iter().skip(part).step_by(parts) {
            for step in moves {
                match *step {
                    // SAFETY: both rows were checked to lie in the live region.
                    Move::Copy { dst, src } => unsafe {
                        buffer.row(dst).copy_from(buffer.row(src), buffer.row_bytes());
                    },
                    // SAFETY: as above; a plan never swaps a row with itself, so they do not overlap.
                    Move::Swap(a, b) => unsafe {
                        std::ptr::swap_nonoverlapping(buffer.row(a), buffer.row(b), buffer.row_bytes());
                    },
                }
            }
        }
    });
    Ok(())
}

/// Zeroes the rows that `rows` names in every buffer.
///
/// # Errors
/// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when a row is outside of a buffer; nothing is zeroed then.
pub fn zero_rows(buffers: &[RowBuffer], rows: &[u32]) -> Result<()> {
    for buffer in buffers {
        check_rows(buffer, rows)?;
    }
    let bytes = buffers.iter().map(|buffer| buffer.row_bytes() * rows.len()).sum();
    in_parts(bytes, |part, parts| {
        for buffer in buffers.iter().skip(part).step_by(parts) {
            for &row in rows {
                // SAFETY: the row was checked to lie in the live region.
                unsafe { buffer.row(row).write_bytes(0, buffer.row_bytes()) };
            }
        }
    });
    Ok(())
}
