//! What the block table holds, so that a step writes only what is new.

use crate::base::bounded::narrow;
use crate::base::widen;

/// What a line of the block table holds.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    row: u32,
    turn: u32,
    /// Entries that hold pages of the request.
    valid: u32,
    /// Entries before the zeros.
    used: u32,
}

/// What the block table holds, so that a step writes only what is new.
#[derive(Debug)]
pub(super) struct BlockTable {
    /// By place in the batch.
    lines: Vec<Line>,
    /// By row, where it was last in a batch.
    places: Vec<u32>,
}

impl BlockTable {
    /// All zeros.
    pub(super) fn new(lines: usize, rows: usize) -> Self {
        Self { lines: vec![Line::default(); lines], places: vec![0; rows] }
    }

    /// How many entries of the line at `place` hold pages of a request, whose row was handed out for the `turn`-th time.
    pub(super) fn valid(&self, place: usize, row: u32, turn: u32) -> usize {
        let line = self.lines[place];
        let is_same = line.row == row && line.turn == turn && widen(self.places[widen(row)]) == place;
        if is_same { widen(line.valid) } else { 0 }
    }

    /// Entries of the line at `place` before its zeros.
    pub(super) fn used(&self, place: usize) -> usize {
        widen(self.lines[place].used)
    }

    /// Notes that all `count` pages of a request were written to the line at `place`.
    pub(super) fn note_request(&mut self, place: usize, row: u32, turn: u32, count: usize) {
        let count = narrow(count);
        self.lines[place] = Line { row, turn, valid: count, used: count };
        self.places[widen(row)] = narrow(place);
    }

    /// Notes that `count` padding pages were written to the line at `place`.
    pub(super) fn note_padding(&mut self, place: usize, count: usize) {
        self.lines[place] = Line { used: narrow(count), ..Line::default() };
    }

    /// Notes that a request has kept the first `count` of its pages only.
    pub(super) fn truncate(&mut self, row: u32, count: usize) {
        if let Some(line) = self.lines.get_mut(widen(self.places[widen(row)])).filter(|line| line.row == row)
        {
            line.valid = line.valid.min(narrow(count));
        }
    }

    /// Notes that lines of `width` may hold anything.
    pub(super) fn invalidate(&mut self, width: usize) {
        self.lines.fill(Line { used: narrow(width), ..Line::default() });
    }
}
