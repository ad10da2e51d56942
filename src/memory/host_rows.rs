//! Rows in host memory of another owner, kept alive for work that outlasts a call.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::base::bounded::{distance, unsigned};
use crate::base::{DType, Device, Error, Result};

use super::{BorrowedTensor, Keep, Region};

/// Rows in host memory of another owner, which they keep alive.
///
/// Other threads may read and write the memory at any time, so it is accessed through raw copies only.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::memory::{Host, HostRows, Region};
/// let region = Arc::new(Region::new(Arc::new(Host), 64).unwrap());
/// let rows = HostRows::of_region(&region, 0, 4, 16).unwrap();
/// rows.write(2, &[7; 16]);
/// let mut bytes = [0; 16];
/// rows.read(2, &mut bytes);
/// assert_eq!((rows.len(), bytes), (4, [7; 16]));
/// assert!(HostRows::of_region(&region, 0, 5, 16).is_err());
/// ```
#[derive(Debug)]
pub struct HostRows {
    address: NonNull<u8>,
    layout: RowLayout,
    /// The positions of these rows in the layout, if they are not all of its rows.
    selected: Option<Vec<usize>>,
    _keep: Keep,
}

/// The layout of rows from an address on.
#[derive(Debug)]
enum RowLayout {
    /// Rows of one size, `stride` bytes apart.
    Even { stride: isize, rows: usize, row_bytes: usize },
    /// The range of bytes of each row.
    Listed(Vec<Range<usize>>),
}

// SAFETY: it is an address, numbers, and an owner that may be dropped on any thread; the memory is accessed
// by raw copies, as memory that others share.
unsafe impl Send for HostRows {}
// SAFETY: as above.
unsafe impl Sync for HostRows {}

impl HostRows {
    /// Returns the rows of `tensor`, one for each index of dimension 0.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) unless the tensor is in host memory, each row is
    /// contiguous, and no two overlap.
    ///
    /// # Safety
    /// As long as `keep` lives, the memory of the tensor is valid for reads, and for writes where the rows
    /// are written.
    pub unsafe fn of_tensor(name: &str, tensor: &BorrowedTensor<'_>, keep: Keep) -> Result<Self> {
        if tensor.device() != Device::Cpu {
            let device = tensor.device();
            return Err(Error::config(format!("{name} is on {device}; it must be in host memory")));
        }
        let (shape, strides) = (tensor.shape().as_slice(), tensor.strides().as_slice());
        let (Some((&rows, inner)), Some((&stride, inner_strides))) =
            (shape.split_first(), strides.split_first())
        else {
            return Err(Error::config(format!("{name} has no dimensions; its first counts pages")));
        };
        let size = tensor.dtype().size();
        let mut packed = 1;
        for (&extent, &stride) in inner.iter().zip(inner_strides).rev() {
            // Strides say nothing if there are no rows.
            if rows > 0 && extent != 1 && stride != packed {
                let text = format!(
                    "{name} has shape {shape:?} and strides {strides:?}; each page must be contiguous"
                );
                return Err(Error::config(text));
            }
            packed *= extent;
        }
        let (rows, row_bytes) = (unsigned(rows), unsigned(packed) * size);
        let stride = distance(stride) * size.cast_signed();
        if rows > 1 && stride.unsigned_abs() < row_bytes {
            let text = format!("{name} has shape {shape:?} and strides {strides:?}; its pages overlap");
            return Err(Error::config(text));
        }
        let layout = RowLayout::Even { stride, rows, row_bytes };
        Ok(Self { address: tensor.address(), layout, selected: None, _keep: keep })
    }

    /// Creates `rows` rows of `row_bytes` in host memory of `region`, one behind the other from `offset` on.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) if they end behind the region.
    pub fn of_region(region: &Arc<Region>, offset: usize, rows: usize, row_bytes: usize) -> Result<Self> {
        let bytes = crate::base::bytes_of("rows", &[rows, row_bytes], DType::U8)?;
        let tensor = region.bytes_at(offset, bytes)?;
        tensor.check_on(Device::Cpu, "the region")?;
        let layout = RowLayout::Even { stride: row_bytes.cast_signed(), rows, row_bytes };
        Ok(Self { address: tensor.address(), layout, selected: None, _keep: Arc::new(Arc::clone(region)) })
    }

    /// Ranges of bytes in host memory of `region`, with an owner that lives as long as the rows.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a range that is not within the region.
    pub fn of_ranges(region: &Arc<Region>, ranges: Vec<Range<usize>>, owner: Keep) -> Result<Self> {
        let all = region.bytes_at(0, region.bytes())?;
        all.check_on(Device::Cpu, "the region")?;
        if let Some(range) = ranges.iter().find(|range| range.start > range.end || range.end > region.bytes())
        {
            return Err(Error::index(format!("bytes {range:?} are outside [0, {})", region.bytes())));
        }
        let keep: Keep = Arc::new((Arc::clone(region), owner));
        Ok(Self { address: all.address(), layout: RowLayout::Listed(ranges), selected: None, _keep: keep })
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
            return Err(Error::config(format!("row {row} appears twice")));
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

    /// Copies a row to `bytes`.
    ///
    /// # Panics
    /// If `row` is out of range, and unless `bytes` is as long as it.
    pub fn read(&self, row: usize, bytes: &mut [u8]) {
        let (row, row_bytes) = self.row(row);
        assert_eq!(bytes.len(), row_bytes);
        // SAFETY: the row lies in the memory that the owner keeps, and `bytes` is ours alone.
        unsafe { row.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies `bytes` to a row.
    ///
    /// # Panics
    /// See [`HostRows::read`].
    pub fn write(&self, row: usize, bytes: &[u8]) {
        let (row, row_bytes) = self.row(row);
        assert_eq!(bytes.len(), row_bytes);
        // SAFETY: the row lies in the memory that the owner keeps, which `bytes` is no part of.
        unsafe { row.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
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
