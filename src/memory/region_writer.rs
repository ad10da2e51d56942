//! Host memory with one writer.

use std::sync::Arc;

use crate::base::Result;

use super::{Plain, Region};

/// The only writer of a region in host memory. A pool writes through it, and shares the region for views.
///
/// Writes need `&mut self`, so two writes never overlap. Other code has tensors of the region; the pool that
/// hands them out documents when it writes.
#[derive(Debug)]
pub(crate) struct RegionWriter {
    region: Arc<Region>,
}

impl RegionWriter {
    /// Takes over a region that nothing else refers to.
    pub(crate) fn new(region: Region) -> Self {
        Self { region: Arc::new(region) }
    }

    /// Returns the region, for views.
    pub(crate) const fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Writes `values` at byte `offset`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when they are not within the region;
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for device memory.
    #[inline]
    pub(crate) fn write<T: Plain>(&mut self, offset: usize, values: &[T]) -> Result<()> {
        // SAFETY: this is the only writer, and borrowed for the call.
        unsafe { self.region.write(offset, values) }
    }

    /// Writes computed values at byte `offset`.
    ///
    /// # Errors
    /// Same as [`RegionWriter::write`].
    #[inline]
    pub(crate) fn write_each<T: Plain>(
        &mut self,
        offset: usize,
        values: impl ExactSizeIterator<Item = T>,
    ) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.region.write_each(offset, values) }
    }

    /// Fills `bytes` bytes at `offset` with `value`.
    ///
    /// # Errors
    /// Same as [`RegionWriter::write`].
    pub(crate) fn fill(&mut self, offset: usize, bytes: usize, value: u8) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.region.fill(offset, bytes, value) }
    }
}
