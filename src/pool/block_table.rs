//! The contents of the block table, so that a step writes only new entries.

use crate::base::bounded::narrow;
use crate::base::{Id, RequestRow, Result, try_zeros, widen};

/// The contents of a line of the block table.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    /// `None` for padding.
    row: Option<RequestRow>,
    generation: u32,
    /// Entries that hold pages of the request.
    valid: u32,
    /// Entries before the zeros.
    used: u32,
}

/// The contents of the block table, so that a step writes only new entries.
#[derive(Debug)]
pub(in crate::pool) struct BlockTable {
    /// The lines of the table, by index in the batch.
    lines: Vec<Line>,
    /// The last index of each row in a batch.
    batch_indices: Vec<u32>,
}

impl BlockTable {
    /// Creates a block table of zeros.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the
    /// record.
    pub(in crate::pool) fn new(lines: usize, rows: usize) -> Result<Self> {
        Ok(Self { lines: try_zeros(lines)?, batch_indices: try_zeros(rows)? })
    }

    /// Returns the number of entries of the line at `batch_index` that hold pages of the request of `row`,
    /// whose generation is given.
    pub(in crate::pool) fn valid(&self, batch_index: usize, row: RequestRow, generation: u32) -> usize {
        let line = self.lines[batch_index];
        let is_same = line.row == Some(row)
            && line.generation == generation
            && widen(self.batch_indices[widen(row.number())]) == batch_index;
        if is_same { widen(line.valid) } else { 0 }
    }

    /// Returns the number of entries of the line at `batch_index` before its zeros.
    pub(in crate::pool) fn used(&self, batch_index: usize) -> usize {
        widen(self.lines[batch_index].used)
    }

    /// Records that all `count` pages of a request were written to the line at `batch_index`.
    pub(in crate::pool) fn set_request(
        &mut self,
        batch_index: usize,
        row: RequestRow,
        generation: u32,
        count: usize,
    ) {
        let count = narrow(count);
        self.lines[batch_index] = Line { row: Some(row), generation, valid: count, used: count };
        self.batch_indices[widen(row.number())] = narrow(batch_index);
    }

    /// Records that `count` padding pages were written to the line at `batch_index`.
    pub(in crate::pool) fn set_padding(&mut self, batch_index: usize, count: usize) {
        self.lines[batch_index] = Line { used: narrow(count), ..Line::default() };
    }

    /// Records that a request has kept only the first `count` of its pages.
    pub(in crate::pool) fn truncate(&mut self, row: RequestRow, count: usize) {
        if let Some(line) = self
            .lines
            .get_mut(widen(self.batch_indices[widen(row.number())]))
            .filter(|line| line.row == Some(row))
        {
            line.valid = line.valid.min(narrow(count));
        }
    }

    /// Marks the contents of all lines, of `width` entries, as unknown.
    pub(in crate::pool) fn invalidate(&mut self, width: usize) {
        self.lines.fill(Line { used: narrow(width), ..Line::default() });
    }
}
