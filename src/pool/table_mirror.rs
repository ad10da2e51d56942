//! What the host knows of a request table on a device.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::base::bounded::narrow;
use crate::base::sync::lock;
use crate::base::{Result, widen, zeros};
use crate::index::Bitmap;
use crate::memory::{Gpu, Region, Reply, Ring};

use super::mirror::{Mirror, publish, stepped};

/// Bytes of writes that may be on their way to the host at once.
const ECHO_BYTES: usize = 4 << 20;

/// A copy of a table, which follows what is written to it in the order in which that is enqueued.
#[derive(Debug)]
pub(super) struct TableMirror {
    addresses: Range<usize>,
    columns: usize,
    /// Where kernels echo what they wrote.
    echoes: Ring,
    state: Mutex<MirrorState>,
}

#[derive(Debug)]
struct MirrorState {
    /// `[rows, columns]`, right but for `unknown` rows and what `changes` will change.
    values: Vec<i32>,
    /// Rows that were written to past this class.
    unknown: Bitmap,
    /// By row, columns below this may be written, as far as echoes say.
    written: Vec<u32>,
    /// What was enqueued behind an echo that has not landed, oldest first.
    changes: VecDeque<Change>,
    /// The framework's count of its own writes to the table up to which the copy is right.
    version: u64,
}

/// One change of the table.
#[derive(Debug)]
enum Change {
    /// A kernel echoes so many places and what it wrote to them.
    Echo(Reply, usize),
    /// The first columns of rows were zeroed.
    Zero(Vec<(u32, u32)>),
    /// Columns from one on of a row became these.
    Columns(u32, usize, Vec<i32>),
}

impl TableMirror {
    /// For a table of zeros that fills `region`.
    pub(super) fn new(gpu: &Arc<Gpu>, region: &Region, rows: usize, columns: usize) -> Result<Arc<Self>> {
        let start = region.address().as_ptr().addr();
        let state = MirrorState {
            values: zeros(rows * columns)?,
            unknown: Bitmap::new(rows)?,
            written: zeros(rows)?,
            changes: VecDeque::new(),
            version: 0,
        };
        let copy = Arc::new(Self {
            addresses: start..start + region.bytes(),
            columns,
            echoes: Ring::on_host(gpu, ECHO_BYTES)?,
            state: Mutex::new(state),
        });
        let published: Arc<dyn Mirror> = copy.clone();
        publish(&published);
        Ok(copy)
    }

    /// Where kernels echo what they wrote.
    pub(super) const fn echoes(&self) -> &Ring {
        &self.echoes
    }

    /// Whether every change has landed, so that known writes can be noted at once.
    pub(super) fn is_settled(&self) -> bool {
        self.settled().changes.is_empty()
    }

    /// Notes values that were written from column `from` of a row on.
    pub(super) fn wrote_columns(&self, row: u32, from: usize, values: &[i32]) {
        let mut state = self.lock();
        if state.changes.is_empty() {
            state.write(row, from, values, self.columns);
        } else {
            state.changes.push_back(Change::Columns(row, from, values.to_vec()));
        }
    }

    /// Notes values that were written, each with its row and column. Only when settled.
    pub(super) fn wrote_points(&self, places: impl Iterator<Item = (u32, u32, i32)>) {
        let mut state = self.lock();
        for (row, column, value) in places {
            state.values[widen(row) * self.columns + widen(column)] = value;
        }
    }

    /// Notes that a kernel will echo `count` places that it wrote.
    pub(super) fn expect_echo(&self, held: Reply, count: usize) {
        self.lock().changes.push_back(Change::Echo(held, count));
    }

    /// Notes that the host does not know rows any more.
    pub(super) fn forget(&self, rows: impl IntoIterator<Item = u32>) {
        let mut state = self.lock();
        for row in rows {
            state.unknown.insert_run(widen(row), 1);
        }
    }

    /// Notes that the host does not know any row any more.
    pub(super) fn forget_all(&self) {
        self.lock().forget_all();
    }

    /// Notes that the framework's own writes up to `version` are accounted for, and returns what was noted before.
    pub(super) fn account_for(&self, version: u64) -> u64 {
        std::mem::replace(&mut self.lock().version, version)
    }

    /// How far `row` may be written, as far as this copy knows.
    pub(super) fn extent(&self, row: u32) -> u32 {
        let state = self.settled();
        if state.changes.is_empty() && !state.unknown.contains(widen(row)) {
            state.written[widen(row)]
        } else {
            narrow(self.columns)
        }
    }

    /// Notes that the first columns of rows were zeroed, all that were ever written, so that these rows are known.
    pub(super) fn zeroed(&self, rows: Vec<(u32, u32)>) {
        let mut state = self.settled();
        for &(row, _) in &rows {
            state.unknown.remove_run(widen(row), 1);
        }
        if state.changes.is_empty() {
            state.zero(&rows, self.columns);
        } else {
            state.changes.push_back(Change::Zero(rows));
        }
    }

    /// Gives up echoes on their way: the whole table is about to be zeroed.
    pub(super) fn drop_echoes(&self) {
        for step in std::mem::take(&mut self.lock().changes) {
            if let Change::Echo(held, _) = step {
                self.echoes.release(&held);
            }
        }
    }

    /// The state after every change that has landed.
    fn settled(&self) -> MutexGuard<'_, MirrorState> {
        let mut state = self.lock();
        while let Some(step) = state.changes.front() {
            let landed = match step {
                // A device that has failed echoes nothing any more; what it would have written stays unknown.
                Change::Echo(held, _) => held.done().passed().unwrap_or(false),
                Change::Zero(_) | Change::Columns(..) => true,
            };
            if !landed {
                break;
            }
            match state.changes.pop_front() {
                Some(Change::Echo(held, count)) => {
                    if let Ok(echo) = self.echoes.take::<i32>(&held, 3 * count) {
                        state.apply(&echo, self.columns);
                    } else {
                        state.forget_all();
                    }
                }
                Some(Change::Zero(rows)) => state.zero(&rows, self.columns),
                Some(Change::Columns(row, from, values)) => state.write(row, from, &values, self.columns),
                None => (),
            }
        }
        state
    }

    fn lock(&self) -> MutexGuard<'_, MirrorState> {
        lock(&self.state)
    }
}

impl MirrorState {
    /// Notes that the host knows no row any more.
    fn forget_all(&mut self) {
        self.unknown.insert_run(0, self.written.len());
    }

    /// Notes what a kernel wrote: triples of row, column and value, row -1 where it wrote nothing.
    fn apply(&mut self, echo: &[i32], columns: usize) {
        let mut seen = HashSet::with_capacity(echo.len() / 3);
        for triple in echo.chunks_exact(3) {
            if let (Ok(row), Ok(column)) = (usize::try_from(triple[0]), u32::try_from(triple[1])) {
                self.values[row * columns + widen(column)] = triple[2];
                self.written[row] = self.written[row].max(column + 1);
                if !seen.insert((row, column)) {
                    // Which of its values a place has that was named twice is the device's choice.
                    self.unknown.insert_run(row, 1);
                }
            }
        }
    }

    fn write(&mut self, row: u32, from: usize, values: &[i32], columns: usize) {
        let place = widen(row) * columns + from;
        self.values[place..place + values.len()].copy_from_slice(values);
    }

    fn zero(&mut self, rows: &[(u32, u32)], columns: usize) {
        for &(row, len) in rows {
            let place = widen(row) * columns;
            self.values[place..place + widen(len)].fill(0);
            self.written[widen(row)] = 0;
        }
    }
}

impl Mirror for TableMirror {
    fn addresses(&self) -> Range<usize> {
        self.addresses.clone()
    }

    fn values(&self, first: usize, step: usize, count: usize, version: u64) -> Option<Vec<i32>> {
        let state = self.settled();
        if !state.changes.is_empty() || version != state.version {
            return None;
        }
        let last = step.checked_mul(count.saturating_sub(1))?.checked_add(first)?;
        let rows = first / self.columns..last / self.columns + 1;
        if !state.unknown.is_empty() && rows.into_iter().any(|row| state.unknown.contains(row)) {
            return None;
        }
        stepped(&state.values, first, step, count)
    }
}
