//! Stores of values into rows of buffers in host memory, strided and converted as necessary.
//!
//! A store checks everything, then writes. It takes no lock: [`Executor`](super::Executor) does.

use crate::base::bounded::{distance, signed};
use crate::base::{Device, Dims, Error, IndexVec, Result, try_with_capacity, widen};
use crate::memory::BorrowedTensor;

use super::convert::{Convert, conversion, element_copy};
use super::indices::offset_of;
use super::row_copy::{AHEAD, RowCopy};
use super::rows::RowBuffer;
use super::threads::run_in_parts;

/// Values to store into the rows of a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreRows<'a> {
    /// The name of the values in messages.
    pub name: &'static str,
    /// The buffer to store them in.
    pub target: &'a RowBuffer,
    /// The values: leading dimensions whose product is the number of rows, then `[heads, dim]` or `[heads *
    /// dim]`.
    pub values: BorrowedTensor<'a>,
    /// The divisor of values that are converted to an 8-bit float.
    pub scale: Option<f32>,
}

/// The way in which one row is copied from its source to its buffer.
#[derive(Clone, Copy)]
enum Method {
    /// The row is contiguous.
    Whole(RowCopy),
    /// Each head is contiguous.
    Heads,
    /// Element by element, converted where the dtypes differ.
    Convert(Convert),
}

/// A store with checked shapes and dtypes.
struct StorePlan<'a> {
    store: StoreRows<'a>,
    method: Method,
    layout: ValueLayout,
    divisor: f32,
}

/// Writes `values` to the rows in `indices`, for every store in turn, in one pass.
///
/// Negative indices are skipped. When a row occurs twice, its last value stays. A large store is split among
/// threads, each with rows of its own.
///
/// # Errors
/// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for shapes that do not fit,
/// [`ErrorKind::Type`](crate::base::ErrorKind::Type) for dtypes that cannot be converted,
/// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for an index beyond the rows. Nothing is written then.
pub(super) fn store_rows(stores: &[StoreRows<'_>], indices: &IndexVec) -> Result<()> {
    if let Some(store) = stores.iter().find(|store| store.target.region().device() != Device::Cpu) {
        return Err(Error::argument(format!(
            "rows on {} cannot be reached by the host",
            store.target.region().device()
        )));
    }
    let mut plans = try_with_capacity(stores.len())?;
    for store in stores {
        plans.push(plan(store, indices.len())?);
    }
    let rows = stores.iter().map(|store| store.target.shape()[0]).min().unwrap_or(0);
    let targets = targets(indices, rows)?;
    let bytes: usize = stores.iter().map(|store| store.target.row_bytes() * targets.len()).sum();
    run_in_parts(bytes, |part, parts| {
        // Each thread writes its own rows, so no row is written by two threads.
        let mine = |row: u32| parts == 1 || widen(row) % parts == part;
        for planned in &plans {
            for (position, &target) in targets.iter().enumerate() {
                if let Ok(row) = u32::try_from(target)
                    && mine(row)
                {
                    planned.copy(position, row);
                }
            }
            if let Method::Whole(copy) = planned.method {
                copy.finish();
            }
        }
    });
    Ok(())
}

/// Checks that the non-negative `indices` are below `rows`; negative values stay negative.
pub(super) fn targets(indices: &IndexVec, rows: usize) -> Result<Vec<i32>> {
    fn checked<T: Copy + Into<i64>>(values: &[T], rows: usize) -> Result<Vec<i32>> {
        let limit = signed(rows);
        let wide = || values.iter().map(|&value| value.into());
        if let Some((position, slot)) = wide().enumerate().find(|&(_, value)| value >= limit) {
            return Err(Error::index(format!("slot {slot} at position {position} is outside [0, {rows})"))
                .with_index(slot));
        }
        let mut targets = try_with_capacity(values.len())?;
        // Negative values are skipped, so all of them are replaced by one value.
        targets.extend(wide().map(|value| i32::try_from(value.max(-1)).expect("rows fit int32")));
        Ok(targets)
    }
    match indices {
        IndexVec::I32(values) => checked(values, rows),
        IndexVec::I64(values) => checked(values, rows),
    }
}

/// The layout of the values of a store, in elements. A row consists of `heads` pieces of `dim` elements, or
/// of one piece when its elements are evenly spaced.
#[derive(Clone, Copy, Debug)]
pub(super) struct ValueLayout {
    pub(super) lead_shape: Dims,
    pub(super) lead_strides: Dims,
    pub(super) heads: usize,
    pub(super) dim: usize,
    pub(super) head_stride: i64,
    pub(super) dim_stride: i64,
}

impl ValueLayout {
    /// Returns whether the elements of a piece are contiguous.
    pub(super) const fn is_packed(&self) -> bool {
        self.dim_stride == 1 || self.dim == 1
    }
}

/// Returns the layout of the values of `store`, which must be `count` rows.
///
/// # Errors
/// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) when their shape or device does not fit.
pub(super) fn layout(store: &StoreRows<'_>, count: usize) -> Result<ValueLayout> {
    let StoreRows { name, target, values, .. } = *store;
    values.check_on(target.region().device(), name)?;
    let (shape, strides) = (values.shape().as_slice(), values.strides().as_slice());
    let [_, heads, dim] = target.shape();
    let (lead, head_stride, dim_stride) = if shape.ends_with(&[signed(heads), signed(dim)]) {
        let n = shape.len();
        (n - 2, strides[n - 2], strides[n - 1])
    } else if shape.ends_with(&[signed(heads * dim)]) {
        let n = shape.len();
        // Strides of an empty tensor may be anything.
        (n - 1, strides[n - 1].wrapping_mul(signed(dim)), strides[n - 1])
    } else {
        return Err(Error::argument(format!(
            "{name} has shape {shape:?}; its last dimensions must be [{heads}, {dim}] or [{}]",
            heads * dim
        )));
    };
    let lead_shape = Dims::new(&shape[..lead])?;
    if lead_shape.numel() != count {
        return Err(Error::argument(format!(
            "{name} has shape {shape:?}, which is {} rows of [{heads}, {dim}]; there are {count} indices",
            lead_shape.numel()
        )));
    }
    let even = heads == 1 || signed(dim).checked_mul(dim_stride) == Some(head_stride);
    let (heads, dim) = if even { (1, heads * dim) } else { (heads, dim) };
    let lead_strides = Dims::new(&strides[..lead])?;
    Ok(ValueLayout { lead_shape, lead_strides, heads, dim, head_stride, dim_stride })
}

/// Returns the error for values that cannot be converted to the pool's dtype.
pub(super) fn inconvertible(store: &StoreRows<'_>) -> Error {
    let (from, to) = (store.values.dtype(), store.target.dtype());
    Error::wrong_type(format!("{} is {from}, which cannot be converted to the pool's {to}", store.name))
}

fn plan<'a>(store: &StoreRows<'a>, count: usize) -> Result<StorePlan<'a>> {
    let layout = layout(store, count)?;
    let (from, to) = (store.values.dtype(), store.target.dtype());
    let method = match conversion(from, to) {
        _ if from == to && layout.is_packed() && layout.heads == 1 => {
            Method::Whole(RowCopy::new(store.target.row_bytes(), count))
        }
        _ if from == to && layout.is_packed() => Method::Heads,
        _ if from == to => Method::Convert(element_copy(to)),
        Some(convert) => Method::Convert(convert),
        None => return Err(inconvertible(store)),
    };
    Ok(StorePlan { store: *store, method, layout, divisor: store.scale.unwrap_or(1.0) })
}

impl StorePlan<'_> {
    /// Returns the size of `elements` of the source in bytes.
    fn bytes_of(&self, elements: isize) -> isize {
        elements.wrapping_mul(self.store.values.dtype().size().cast_signed())
    }

    /// Returns the address of value number `position`.
    fn source(&self, position: usize) -> *const u8 {
        let lead =
            offset_of(position, self.layout.lead_shape.as_slice(), self.layout.lead_strides.as_slice());
        self.store.values.address().as_ptr().cast_const().wrapping_offset(self.bytes_of(lead))
    }

    /// Copies value number `position` to `row`, which is one of the target's.
    fn copy(&self, position: usize, row: u32) {
        let (mut source, mut target) = (self.source(position), self.store.target.row(row));
        if let Method::Whole(copy) = self.method {
            // SAFETY: `plan` found the row of the source contiguous, `BorrowedTensor` guarantees its
            // elements, and `row` is a row of a live region.
            unsafe { copy.copy(source, target, self.source(position + AHEAD)) };
            return;
        }
        let head_step = self.bytes_of(distance(self.layout.head_stride));
        let dim_stride = distance(self.layout.dim_stride);
        let piece_bytes = self.layout.dim * self.store.target.dtype().size();
        for _ in 0..self.layout.heads {
            match self.method {
                // SAFETY: as above, for one head. The source may be the region itself, hence a copy that
                // allows overlap.
                Method::Whole(_) | Method::Heads => unsafe { target.copy_from(source, piece_bytes) },
                // SAFETY: as above; the conversion was chosen for these two dtypes.
                Method::Convert(convert) => unsafe {
                    convert(source, dim_stride, target, self.layout.dim, self.divisor);
                },
            }
            source = source.wrapping_offset(head_step);
            target = target.wrapping_add(piece_bytes);
        }
    }
}
