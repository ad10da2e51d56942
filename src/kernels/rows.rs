//! Gathers, moves and fills of rows in host memory, and the layout of rows in a region.
//!
//! Every function checks its rows, then acts. None takes a lock: [`Executor`](super::Executor) does.

use std::ops::Range;
use std::sync::Arc;

use crate::base::bounded::signed;
use crate::base::{DType, Device, Error, Result, bytes_of, try_with_capacity, widen};
use crate::index::Move;
use crate::layout::{PieceLayout, PlaneRuns};
use crate::memory::{BorrowedTensor, Region};

use super::row_copy::{AHEAD, RowCopy};
use super::threads::run_in_parts;

/// A buffer of equal rows `[rows, heads, dim]` within a region, one behind the other.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::DType;
/// use kvpool::kernels::{PlaneRows, RowBuffer};
/// use kvpool::layout::{Group, GroupKind, GroupPlacement, Plane, PlaneOrder};
/// use kvpool::memory::{Host, Region};
/// let k = Plane::new("k", DType::BF16, &[2, 64]).unwrap();
/// let group = Group::new("full", GroupKind::Full, &[0], vec![k]).unwrap();
/// let order = PlaneOrder::PlaneByPlane { plane: 64, layer: 64 };
/// let placement = GroupPlacement::new(&group, 128, order).unwrap();
/// let region = Arc::new(Region::new(Arc::new(Host), placement.end()).unwrap());
/// let rows = PlaneRows { runs: placement.planes()[0], row: [2, 64], dtype: DType::BF16 };
/// let buffer = RowBuffer::new(region, &rows, 0).unwrap();
/// assert_eq!(buffer.shape(), [128, 2, 64]);
/// ```
#[derive(Clone, Debug)]
pub struct RowBuffer {
    region: Arc<Region>,
    /// Where the rows lie; its only layer is this buffer.
    runs: PlaneRuns,
    heads: usize,
    dim: usize,
    dtype: DType,
}

impl RowBuffer {
    /// The rows of a layer of `rows`, in `region`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when the rows are not within the region,
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for more rows than int32 can name, and for rows with
    /// bytes between them.
    pub fn new(region: Arc<Region>, rows: &PlaneRows, layer: usize) -> Result<Self> {
        let (runs, [heads, dim], dtype) = (rows.runs.layer(layer), rows.row, rows.dtype);
        if i32::try_from(runs.units).is_err() {
            return Err(Error::argument(format!("{} rows are more than int32 indices can name", runs.units)));
        }
        let row_bytes = bytes_of("a row", &[heads, dim], dtype)?;
        if [runs.unit_bytes, runs.unit_step] != [row_bytes; 2] {
            return Err(Error::argument(format!(
                "rows of {row_bytes} bytes lie {} bytes apart, in units of {}",
                runs.unit_step, runs.unit_bytes
            )));
        }
        region.at(runs.offset, bytes_of("a buffer of rows", &[runs.units, heads, dim], dtype)?)?;
        Ok(Self { region, runs, heads, dim, dtype })
    }

    /// Returns the region of the rows.
    #[must_use]
    pub const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the offset of the first row in the region, in bytes.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.runs.offset
    }

    /// Returns `[rows, heads, dim]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 3] {
        [self.runs.units, self.heads, self.dim]
    }

    /// Returns the element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the size of one row in bytes.
    #[must_use]
    pub const fn row_bytes(&self) -> usize {
        self.runs.unit_bytes
    }

    /// Returns the size of all rows in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.runs.bytes()
    }

    /// Returns the address and sizes of the buffer.
    #[must_use]
    pub fn info(&self) -> BufferInfo {
        let address = self.region.address().as_ptr().addr() + self.runs.offset;
        BufferInfo { address, bytes: self.bytes(), row_bytes: self.row_bytes() }
    }

    /// Returns the bytes of the region that a run of rows occupies; rows beyond the last are ignored.
    pub(super) fn bytes_of(&self, run: &Range<usize>) -> Range<usize> {
        let [start, end] = [run.start, run.end].map(|row| self.runs.at(0, row.min(self.runs.units)));
        start..end
    }

    /// Returns the address of a row. `row` must be below `rows`.
    pub(super) fn row(&self, row: u32) -> *mut u8 {
        debug_assert!(widen(row) < self.runs.units);
        self.region.address().as_ptr().wrapping_add(self.runs.at(0, widen(row)))
    }
}

/// One buffer, for registration with a transfer engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferInfo {
    /// Address of the first byte.
    pub address: usize,
    /// Bytes of the buffer.
    pub bytes: usize,
    /// Bytes of one row.
    pub row_bytes: usize,
}

/// The rows of one plane of a layout, equal in all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneRows {
    /// Where they lie: a unit is a row.
    pub runs: PlaneRuns,
    /// `[heads, dim]` of a row.
    pub row: [usize; 2],
    /// The element type.
    pub dtype: DType,
}

impl PlaneRows {
    /// Rows `[rows, heads, dim]` of `layers` layers, the first at byte `offset`, each `step` bytes behind the one
    /// before.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for rows of more bytes than an address can name.
    pub fn new(
        offset: usize,
        layers: usize,
        step: usize,
        [rows, heads, dim]: [usize; 3],
        dtype: DType,
    ) -> Result<Self> {
        let unit_bytes = bytes_of("a row", &[heads, dim], dtype)?;
        let runs =
            PlaneRuns { offset, layers, layer_step: step, units: rows, unit_step: unit_bytes, unit_bytes };
        Ok(Self { runs, row: [heads, dim], dtype })
    }
}

/// Rows of two kinds for several layers in one region: keys and values, or two states.
#[derive(Clone, Debug)]
pub struct LayerRows {
    /// The buffers of the first kind by layer, then those of the second.
    buffers: Vec<RowBuffer>,
    planes: [PlaneRows; 2],
}

impl LayerRows {
    /// Returns the rows of two planes in `region`.
    ///
    /// # Errors
    /// Same as [`RowBuffer::new`]; [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for planes of different
    /// numbers of layers; [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the
    /// host cannot list that many layers.
    pub fn new(region: &Arc<Region>, planes: [PlaneRows; 2]) -> Result<Self> {
        let [layers, others] = planes.map(|plane| plane.runs.layers);
        if layers != others {
            return Err(Error::argument(format!("planes of {layers} and of {others} layers")));
        }
        let mut buffers = try_with_capacity(planes.len() * layers)?;
        for plane in planes {
            for layer in 0..layers {
                buffers.push(RowBuffer::new(Arc::clone(region), &plane, layer)?);
            }
        }
        Ok(Self { buffers, planes })
    }

    /// Returns the layout of a piece that holds `page_size` rows of both planes, of every layer.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for pages of no rows and for more bytes than an
    /// address can name.
    pub fn piece(&self, page_size: usize) -> Result<PieceLayout> {
        if page_size == 0 {
            return Err(Error::argument("page_size is 0; a page has at least one row"));
        }
        let [first, second] =
            self.planes.map(|plane| bytes_of("a page", &[page_size, plane.runs.unit_bytes], DType::U8));
        PieceLayout::new(self.layers(), &[first?, second?])
    }

    /// Returns where the rows of each plane lie in their region.
    pub(super) fn runs(&self) -> [PlaneRuns; 2] {
        self.planes.map(|plane| plane.runs)
    }

    /// Returns the number of layers.
    #[must_use]
    pub const fn layers(&self) -> usize {
        self.planes[0].runs.layers
    }

    /// Returns the rows of a layer.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a layer that does not exist.
    pub fn layer(&self, layer: usize) -> Result<[&RowBuffer; 2]> {
        if layer >= self.layers() {
            return Err(Error::index(format!("layer {layer} is outside [0, {})", self.layers())));
        }
        Ok([&self.buffers[layer], &self.buffers[self.layers() + layer]])
    }

    /// Returns the rows of each kind, by layer.
    #[must_use]
    pub fn kinds(&self) -> [&[RowBuffer]; 2] {
        let (first, second) = self.buffers.split_at(self.layers());
        [first, second]
    }

    /// Returns every buffer, those of the first kind first.
    #[must_use]
    pub fn all(&self) -> &[RowBuffer] {
        &self.buffers
    }

    /// Returns the size of all rows in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.buffers.iter().map(RowBuffer::bytes).sum()
    }
}

/// Copies the rows in `rows`, all within the buffer, to `out`: contiguous `[rows.len(), heads, dim]` of
/// the same dtype in host memory.
///
/// # Errors
/// [`ErrorKind::Argument`] or [`ErrorKind::Type`]
/// when `out` differs; nothing is written then.
///
/// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
/// [`ErrorKind::Type`]: crate::base::ErrorKind::Type
pub(super) fn gather_rows(pairs: &[(&RowBuffer, BorrowedTensor<'_>)], rows: &[u32]) -> Result<()> {
    check_targets(pairs, rows.len())?;
    for (buffer, _) in pairs {
        check_on_host(buffer)?;
        check_rows(buffer, rows)?;
    }
    let bytes = pairs.iter().map(|(buffer, _)| buffer.row_bytes() * rows.len()).sum();
    run_in_parts(bytes, |part, parts| {
        let (from, to) = (rows.len() * part / parts, rows.len() * (part + 1) / parts);
        for (buffer, out) in pairs {
            let copy = RowCopy::new(buffer.row_bytes(), rows.len());
            let mut target = out.address().as_ptr().wrapping_add(from * buffer.row_bytes());
            for position in from..to {
                let (row, later) = (rows[position], rows[(position + AHEAD).min(rows.len() - 1)]);
                // SAFETY: `row` was checked; `out` is contiguous, has room for it, and does not overlap the
                // buffer.
                unsafe { copy.copy(buffer.row(row), target, buffer.row(later)) };
                target = target.wrapping_add(buffer.row_bytes());
            }
            copy.finish();
        }
    });
    Ok(())
}

/// Checks that every target is a contiguous `[count, heads, dim]` of its buffer's dtype and device, and
/// overlaps nothing that is read or written.
pub(super) fn check_targets(pairs: &[(&RowBuffer, BorrowedTensor<'_>)], count: usize) -> Result<()> {
    for (buffer, out) in pairs {
        out.check_on(buffer.region.device(), "out")?;
        let expected = [count, buffer.heads, buffer.dim].map(signed);
        if out.shape().as_slice() != expected || !out.is_contiguous() {
            return Err(Error::argument(format!(
                "out has shape {:?} and strides {:?}; a contiguous {expected:?} is needed",
                out.shape().as_slice(),
                out.strides().as_slice()
            )));
        }
        if out.dtype() != buffer.dtype {
            return Err(Error::wrong_type(format!("out is {}, the pool {}", out.dtype(), buffer.dtype)));
        }
    }
    check_apart(pairs)
}

/// Checks that the host can access the rows.
fn check_on_host(buffer: &RowBuffer) -> Result<()> {
    let device = buffer.region.device();
    if device == Device::Cpu {
        return Ok(());
    }
    Err(Error::argument(format!("rows on {device} cannot be reached by the host")))
}

/// Checks that no target overlaps another or a buffer that is read.
fn check_apart(pairs: &[(&RowBuffer, BorrowedTensor<'_>)]) -> Result<()> {
    let range = |start: usize, bytes: usize| start..start + bytes;
    for (position, (buffer, out)) in pairs.iter().enumerate() {
        let bytes = out.shape().numel() * buffer.dtype.size();
        let target = range(out.address().as_ptr().addr(), bytes);
        let sources = pairs
            .iter()
            .map(|(other, _)| range(other.region.address().as_ptr().addr(), other.region.bytes()));
        let others = pairs[..position].iter().map(|(other, out)| {
            range(out.address().as_ptr().addr(), out.shape().numel() * other.dtype.size())
        });
        if sources.chain(others).any(|other| target.start < other.end && other.start < target.end) {
            return Err(Error::argument(format!(
                "out overlaps the pool or the other out: {bytes} bytes at {:#x}",
                target.start
            )));
        }
    }
    Ok(())
}

fn check_rows(buffer: &RowBuffer, rows: &[u32]) -> Result<()> {
    match rows.iter().find(|&&row| widen(row) >= buffer.runs.units) {
        None => Ok(()),
        Some(row) => {
            Err(Error::index(format!("row {row} is outside [0, {})", buffer.runs.units)).with_index(*row))
        }
    }
}

/// Checks that every buffer has the rows of `moves`.
pub(super) fn check_moves(buffers: &[RowBuffer], moves: &[Move]) -> Result<()> {
    // Most pools have equal buffers: the check is repeated only where the number of rows changes.
    let mut checked = None;
    for buffer in buffers {
        if checked.replace(buffer.runs.units) == Some(buffer.runs.units) {
            continue;
        }
        for step in moves {
            let (Move::Copy { dst: a, src: b } | Move::Swap(a, b)) = *step;
            check_rows(buffer, &[a, b])?;
        }
    }
    Ok(())
}

/// Carries out `moves`, in order, in every buffer.
///
/// # Errors
/// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when a row is outside of a buffer; nothing is moved
/// then.
pub(super) fn move_rows(buffers: &[RowBuffer], moves: &[Move]) -> Result<()> {
    buffers.iter().try_for_each(check_on_host)?;
    check_moves(buffers, moves)?;
    let bytes = buffers.iter().map(|buffer| buffer.row_bytes() * moves.len()).sum();
    run_in_parts(bytes, |part, parts| {
        for buffer in buffers.iter().skip(part).step_by(parts) {
            let copy = RowCopy::new(buffer.row_bytes(), moves.len());
            for step in moves {
                match *step {
                    // SAFETY: both rows were checked to lie in the live region.
                    Move::Copy { dst, src } => unsafe {
                        copy.copy(buffer.row(src), buffer.row(dst), buffer.row(src));
                    },
                    // SAFETY: as above; a plan never swaps a row with itself, so they do not overlap.
                    Move::Swap(a, b) => unsafe {
                        std::ptr::swap_nonoverlapping(buffer.row(a), buffer.row(b), buffer.row_bytes());
                    },
                }
            }
            copy.finish();
        }
    });
    Ok(())
}

/// Zeroes the rows in `rows` in every buffer.
///
/// # Errors
/// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when a row is outside of a buffer; nothing is zeroed
/// then.
pub(super) fn zero_rows(buffers: &[RowBuffer], rows: &[u32]) -> Result<()> {
    for buffer in buffers {
        check_on_host(buffer)?;
        check_rows(buffer, rows)?;
    }
    let bytes = buffers.iter().map(|buffer| buffer.row_bytes() * rows.len()).sum();
    run_in_parts(bytes, |part, parts| {
        for buffer in buffers.iter().skip(part).step_by(parts) {
            for &row in rows {
                // SAFETY: the row was checked to lie in the live region.
                unsafe { buffer.row(row).write_bytes(0, buffer.row_bytes()) };
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{PlaneRows, RowBuffer, gather_rows, move_rows, zero_rows};
    use crate::base::{DType, Dims, ErrorKind, widen};
    use crate::index::Move;
    use crate::kernels::set_num_threads;
    use crate::memory::{Host, Region};

    fn buffer(rows: usize, heads: usize, dim: usize, dtype: DType) -> RowBuffer {
        let region =
            Arc::new(Region::new(Arc::new(Host), rows * heads * dim * dtype.size()).expect("memory"));
        let plane = PlaneRows::new(0, 1, 0, [rows, heads, dim], dtype).expect("small");
        RowBuffer::new(region, &plane, 0).expect("inside")
    }

    fn content(buffer: &RowBuffer) -> Vec<u8> {
        let mut copy = vec![0; buffer.bytes()];
        let source = buffer.region().address().as_ptr();
        // SAFETY: the buffer fills a live region, and the vector is ours.
        unsafe { copy.as_mut_ptr().copy_from_nonoverlapping(source, buffer.bytes()) };
        copy
    }

    fn fill(buffer: &RowBuffer, offset: usize, bytes: usize, value: u8) {
        // SAFETY: the test has the buffer to itself.
        unsafe { buffer.region().fill(offset, bytes, value) }.expect("inside");
    }

    fn dims(values: &[usize]) -> Dims {
        Dims::new(&values.iter().map(|&n| i64::try_from(n).expect("small")).collect::<Vec<_>>()).expect("few")
    }

    #[test]
    fn threads_zero_the_rows_that_are_named() {
        let [target, expected] = [(); 2].map(|()| buffer(4096, 8, 64, DType::F32));
        for buffer in [&target, &expected] {
            fill(buffer, 0, buffer.bytes(), 7);
        }
        let rows: Vec<u32> = (0..4096).step_by(3).collect();
        set_num_threads(4);
        zero_rows(std::slice::from_ref(&target), &rows).expect("zeroed");
        set_num_threads(0);
        let row_bytes = target.bytes() / 4096;
        for row in rows {
            fill(&expected, widen(row) * row_bytes, row_bytes, 0);
        }
        assert!(content(&target) == content(&expected));
    }

    #[test]
    fn rows_outside_are_refused_before_anything_happens() {
        let buffers = [buffer(8, 1, 4, DType::U8), buffer(4, 1, 4, DType::U8)];
        assert_eq!(zero_rows(&buffers, &[0, 5]).expect_err("outside").kind(), ErrorKind::Index);
        for step in [Move::Copy { dst: 0, src: 5 }, Move::Swap(5, 0)] {
            assert_eq!(move_rows(&buffers, &[step]).expect_err("outside").kind(), ErrorKind::Index);
        }
        let out = buffer(2, 1, 4, DType::U8);
        let borrow = |dtype, shape: &[usize], strides: &[usize]| {
            out.region().borrow(0, dtype, dims(shape), dims(strides)).expect("inside")
        };
        let gather =
            |out, rows: &[u32]| gather_rows(&[(&buffers[1], out)], rows).map_err(|error| error.kind());
        assert_eq!(gather(borrow(DType::U8, &[2, 1, 4], &[4, 4, 1]), &[0, 4]), Err(ErrorKind::Index));
        assert_eq!(gather(borrow(DType::U8, &[1, 1, 4], &[4, 4, 1]), &[0, 1]), Err(ErrorKind::Argument));
        assert_eq!(gather(borrow(DType::U8, &[2, 1, 4], &[1, 1, 2]), &[0, 1]), Err(ErrorKind::Argument));
        assert_eq!(gather(borrow(DType::I8, &[2, 1, 4], &[4, 4, 1]), &[0, 1]), Err(ErrorKind::Type));
        assert_eq!(gather(borrow(DType::U8, &[2, 1, 4], &[4, 4, 1]), &[0, 1]), Ok(()));
    }
}
