//! Rows in host memory of another owner, kept alive for work that outlasts a call.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::base::bounded::{distance, unsigned};
use crate::base::{Device, Error, Result};

use super::{BorrowedTensor, Keep, Region};

/// Rows in host memory of another owner, which they keep alive.
///
/// One thread at a time copies them; threads of a store get a row each. The maker of the rows excludes other
/// code that has the memory.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::DType;
/// use kvpool::memory::{Host, HostRows, Region};
/// use kvpool::tensor::TensorView;
/// let region = Arc::new(Region::new(Arc::new(Host), 64).unwrap());
/// let tensor = TensorView::contiguous(Arc::clone(&region), 0, DType::U8, &[4, 16]).unwrap();
/// // SAFETY: nothing else uses the region.
/// let rows = unsafe { HostRows::of_tensor("rows", &tensor.borrow(), region) }.unwrap();
/// rows.write(2, &[7; 16]);
/// let mut bytes = [0; 16];
/// rows.read(2, &mut bytes);
/// assert_eq!((rows.len(), bytes), (4, [7; 16]));
/// ```
#[derive(Debug)]
pub struct HostRows {
    address: NonNull<u8>,
    layout: RowLayout,
    /// The positions of these rows in the layout, if they are not all of its rows.
    selected: Option<Vec<usize>>,
    keep: Keep,
}

/// The layout of rows from an address on.
#[derive(Debug)]
enum RowLayout {
    /// Rows of one size, `stride` bytes apart.
    Even { stride: isize, rows: usize, row_bytes: usize },
    /// The range of bytes of each row.
    Listed(Vec<Range<usize>>),
}

// SAFETY: it is an address, numbers, and an owner that may be dropped on any thread. It is not `Sync`, so one
// thread at a time copies rows.
unsafe impl Send for HostRows {}

/// One of [`HostRows`], for a thread of its own.
#[derive(Debug)]
pub(crate) struct HostRow {
    address: *mut u8,
    bytes: usize,
    _keep: Keep,
}

// SAFETY: as for `HostRows`, whose rows do not overlap.
unsafe impl Send for HostRow {}

impl HostRow {
    /// Returns the number of bytes.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies the row to `bytes`.
    ///
    /// # Panics
    /// Unless `bytes` is as long as the row.
    pub(crate) fn read(&self, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), self.bytes);
        // SAFETY: the owner keeps the row, which is this thread's; `bytes` is borrowed exclusively.
        unsafe { self.address.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies `bytes` to the row.
    ///
    /// # Panics
    /// Unless `bytes` is as long as the row.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        // SAFETY: the owner keeps the row, which is this thread's, and `bytes` is no part of it.
        unsafe { self.address.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

impl HostRows {
    /// Returns the rows of `tensor`, one for each index of dimension 0.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) unless the tensor is in host memory, each row is
    /// contiguous, and no two overlap.
    ///
    /// # Safety
    /// As long as `keep` lives, the memory of the tensor is valid for reads, and for writes where the rows are
    /// written; no other code writes rows that are read, or reads or writes rows that are written.
    pub unsafe fn of_tensor(name: &str, tensor: &BorrowedTensor<'_>, keep: Keep) -> Result<Self> {
        if tensor.device() != Device::Cpu {
            let device = tensor.device();
            return Err(Error::argument(format!("{name} is on {device}; it must be in host memory")));
        }
        let (shape, strides) = (tensor.shape().as_slice(), tensor.strides().as_slice());
        let (Some((&rows, inner)), Some((&stride, inner_strides))) =
            (shape.split_first(), strides.split_first())
        else {
            return Err(Error::argument(format!("{name} has no dimensions; its first counts pages")));
        };
        let size = tensor.dtype().size();
        let mut packed = 1;
        for (&extent, &stride) in inner.iter().zip(inner_strides).rev() {
            // Strides say nothing if there are no rows.
            if rows > 0 && extent != 1 && stride != packed {
                let text = format!(
                    "{name} has shape {shape:?} and strides {strides:?}; each page must be contiguous"
                );
                return Err(Error::argument(text));
            }
            packed *= extent;
        }
        let (rows, row_bytes) = (unsigned(rows), unsigned(packed) * size);
        let stride = distance(stride) * size.cast_signed();
        if rows > 1 && stride.unsigned_abs() < row_bytes {
            let text = format!("{name} has shape {shape:?} and strides {strides:?}; its pages overlap");
            return Err(Error::argument(text));
        }
        let layout = RowLayout::Even { stride, rows, row_bytes };
        Ok(Self { address: tensor.address(), layout, selected: None, keep })
    }

    /// Ranges of bytes in host memory of `region`, with an owner that lives as long as the rows. No two
    /// overlap, and the caller excludes other code that uses them, as in [`HostRows::of_tensor`].
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a range that is not within the region.
    pub(crate) fn of_ranges(region: &Arc<Region>, ranges: Vec<Range<usize>>, owner: Keep) -> Result<Self> {
        let all = region.bytes_at(0, region.bytes())?;
        all.check_on(Device::Cpu, "the region")?;
        if let Some(range) = ranges.iter().find(|range| range.start > range.end || range.end > region.bytes())
        {
            return Err(Error::index(format!("bytes {range:?} are outside [0, {})", region.bytes())));
        }
        let keep: Keep = Arc::new((Arc::clone(region), owner));
        Ok(Self { address: all.address(), layout: RowLayout::Listed(ranges), selected: None, keep })
    }

    /// Keeps only these rows, in this order.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a row out of range,
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a row that appears twice.
    pub fn select(mut self, rows: &[i64]) -> Result<Self> {
        let mut indices = Vec::with_capacity(rows.len());
        for &row in rows {
            let index = usize::try_from(row).ok().filter(|index| *index < self.layout.len());
            let index = index.ok_or_else(|| {
                Error::index(format!("row {row} is outside [0, {})", self.layout.len())).with_index(row)
            })?;
            indices.push(index);
        }
        let mut sorted = indices.clone();
        sorted.sort_unstable();
        if let Some((row, _)) =
            sorted.iter().zip(&sorted[1.min(sorted.len())..]).find(|(row, next)| row == next)
        {
            return Err(Error::argument(format!("row {row} appears twice")));
        }
        self.selected = Some(indices);
        Ok(self)
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.selected.as_ref().map_or(self.layout.len(), Vec::len)
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of bytes of a row.
    ///
    /// # Panics
    /// If `row` is out of range.
    #[must_use]
    pub fn bytes_of(&self, row: usize) -> usize {
        self.row(row).1
    }

    /// Returns the address where a row begins, for work that goes on as long as these rows live.
    ///
    /// # Panics
    /// If `row` is out of range.
    #[must_use]
    pub fn address_of(&self, row: usize) -> usize {
        self.row(row).0.addr()
    }

    fn row(&self, row: usize) -> (*mut u8, usize) {
        assert!(row < self.len(), "row {row} of {}", self.len());
        let index = self.selected.as_ref().map_or(row, |selected| selected[row]);
        let begin = self.address.as_ptr();
        match &self.layout {
            RowLayout::Even { stride, row_bytes, .. } => {
                (begin.wrapping_offset(stride * index.cast_signed()), *row_bytes)
            }
            RowLayout::Listed(ranges) => (begin.wrapping_add(ranges[index].start), ranges[index].len()),
        }
    }

    /// Returns the rows one by one.
    pub(crate) fn into_rows(self) -> impl Iterator<Item = HostRow> {
        (0..self.len()).map(move |row| self.host_row(row))
    }

    fn host_row(&self, row: usize) -> HostRow {
        let (address, bytes) = self.row(row);
        HostRow { address, bytes, _keep: Arc::clone(&self.keep) }
    }

    /// Copies a row to `bytes`.
    ///
    /// # Panics
    /// If `row` is out of range, and unless `bytes` is as long as it.
    pub fn read(&self, row: usize, bytes: &mut [u8]) {
        self.host_row(row).read(bytes);
    }

    /// Copies `bytes` to a row.
    ///
    /// # Panics
    /// See [`HostRows::read`].
    pub fn write(&self, row: usize, bytes: &[u8]) {
        self.host_row(row).write(bytes);
    }
}

impl RowLayout {
    fn len(&self) -> usize {
        match self {
            Self::Even { rows, .. } => *rows,
            Self::Listed(ranges) => ranges.len(),
        }
    }
}
