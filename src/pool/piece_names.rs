//! The names that pieces of host memory have in a store, and the parts in which they are stored.

use std::ops::Range;
use std::sync::Arc;

use crate::base::Result;
use crate::cache::{Digest, PageHash, StoreKeys};
use crate::memory::{HostRows, Keep, Region};

/// The names of the pieces of one kind.
#[derive(Debug)]
pub(super) struct PieceNames {
    keys: StoreKeys,
    /// Bytes of a piece, and the maximum bytes of a part.
    piece_bytes: usize,
    part_bytes: usize,
}

impl PieceNames {
    /// Names that depend on `context`, all that the bytes of a piece depend on beside its key. A store takes `max_bytes`
    /// at once.
    pub(super) fn new(digest: Digest, context: &[&[u8]], piece_bytes: usize, max_bytes: usize) -> Self {
        let part_bytes = max_bytes.min(piece_bytes).max(1);
        Self { keys: StoreKeys::new(digest, context), piece_bytes, part_bytes }
    }

    /// Returns the number of parts in which a piece is stored.
    pub(super) const fn parts(&self) -> usize {
        self.piece_bytes.div_ceil(self.part_bytes)
    }

    /// Returns the names of the parts of pieces: each is piece `number` of those with its key.
    pub(super) fn of<'a>(&self, pieces: impl IntoIterator<Item = (&'a PageHash, usize)>) -> Vec<PageHash> {
        let parts = |number: usize| number * self.parts()..(number + 1) * self.parts();
        let name = |key, part| self.keys.piece(key, crate::base::bounded::narrow(part));
        let all = pieces.into_iter().flat_map(|(key, number)| parts(number).map(move |part| (key, part)));
        all.map(|(key, part)| name(key, part)).collect()
    }

    /// Returns which pieces are whole, of parts that a store has or has not.
    pub(super) fn whole(&self, parts: &[bool]) -> Vec<bool> {
        parts.chunks(self.parts()).map(|parts| parts.iter().all(|part| *part)).collect()
    }

    /// Returns the ranges of the parts of pieces in `ranges` of their memory.
    pub(super) fn parts_of(&self, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
        let part = |range: &Range<usize>, part: usize| {
            let begin = range.start + part * self.part_bytes;
            begin..(begin + self.part_bytes).min(range.end)
        };
        let parts = ranges.iter().flat_map(|range| (0..self.parts()).map(move |number| part(range, number)));
        parts.collect()
    }

    /// Returns the parts of pieces in `ranges` of `region`, which `owner` keeps.
    pub(super) fn rows(
        &self,
        region: &Arc<Region>,
        ranges: &[Range<usize>],
        owner: Keep,
    ) -> Result<HostRows> {
        HostRows::of_ranges(region, self.parts_of(ranges), owner)
    }
}
