//! The host's mirror of a request table on a device.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use crate::base::bounded::narrow;
use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{DType, Id, RequestRow, Result, try_zeros, widen};
use crate::index::{Bitmap, RowExtent};
use crate::memory::{Gpu, Region, Reply, Ring};

use super::mirror::{Mirror, publish, stepped};

/// Bytes of the ring for echoes of writes in flight.
const ECHO_BYTES: usize = 4 << 20;

/// A copy of a table that follows writes in the order in which they are enqueued.
#[derive(Debug)]
pub(super) struct TableMirror {
    addresses: Range<usize>,
    columns: usize,
    /// The ring into which kernels echo their writes.
    echoes: Ring,
    state: RankedMutex<MirrorState>,
}

#[derive(Debug)]
struct MirrorState {
    /// `[rows, columns]`, correct except for `unknown` rows and pending `changes`.
    values: Vec<i32>,
    /// Rows written outside of this class.
    unknown: Bitmap,
    /// The end of the columns that echoes report as written, by row.
    written: Vec<u32>,
    /// Changes from the first echo that has not arrived on, oldest first.
    changes: VecDeque<Change>,
    /// The framework's count of its own writes to the table up to which the mirror is correct.
    version: u64,
}

/// One change of the table.
#[derive(Debug)]
enum Change {
    /// A kernel echoes this many places and values.
    Echo(Reply, usize),
    /// The first columns of rows were zeroed.
    Zero(Vec<RowExtent<RequestRow>>),
    /// Columns of a row, from the given one on, were written.
    Columns(RequestRow, usize, Vec<i32>),
}

impl TableMirror {
    /// Returns a mirror of a table of zeros that fills `region`.
    pub(super) fn new(gpu: &Arc<Gpu>, region: &Region, rows: usize, columns: usize) -> Result<Arc<Self>> {
        let start = region.address().as_ptr().addr();
        let state = MirrorState {
            values: try_zeros(rows * columns)?,
            unknown: Bitmap::new(rows)?,
            written: try_zeros(rows)?,
            changes: VecDeque::new(),
            version: 0,
        };
        let copy = Arc::new(Self {
            addresses: start..start + region.bytes(),
            columns,
            echoes: Ring::on_host(gpu, ECHO_BYTES)?,
            state: RankedMutex::new(LockRank::TableMirror, state),
        });
        let published: Arc<dyn Mirror> = copy.clone();
        publish(&published);
        Ok(copy)
    }

    /// Returns the ring into which kernels echo their writes.
    pub(super) const fn echoes(&self) -> &Ring {
        &self.echoes
    }

    /// Returns whether no change is pending, so that known writes can be applied at once.
    pub(super) fn is_settled(&self) -> bool {
        self.settled().changes.is_empty()
    }

    /// Records values written to rows, each from a column on.
    pub(super) fn wrote_columns<'a>(&self, written: impl Iterator<Item = (RequestRow, usize, &'a [i32])>) {
        let mut state = self.lock();
        for (row, from, values) in written {
            if state.changes.is_empty() {
                state.write(row, from, values, self.columns);
            } else {
                state.changes.push_back(Change::Columns(row, from, values.to_vec()));
            }
        }
    }

    /// Records values written to places, given by row and column. No change may be pending.
    pub(super) fn wrote_points(&self, places: impl Iterator<Item = (RequestRow, u32, i32)>) {
        let mut state = self.lock();
        for (row, column, value) in places {
            state.values[widen(row.number()) * self.columns + widen(column)] = value;
        }
    }

    /// Expects a kernel to echo `count` places.
    pub(super) fn expect_echo(&self, held: Reply, count: usize) {
        self.lock().changes.push_back(Change::Echo(held, count));
    }

    /// Marks rows as unknown.
    pub(super) fn forget(&self, rows: impl IntoIterator<Item = RequestRow>) {
        let mut state = self.lock();
        for row in rows {
            state.unknown.insert_run(widen(row.number()), 1);
        }
    }

    /// Marks every row as unknown.
    pub(super) fn forget_all(&self) {
        self.lock().forget_all();
    }

    /// Accounts for the framework's own writes up to `version`. Returns the previous value.
    pub(super) fn account_for(&self, version: u64) -> u64 {
        std::mem::replace(&mut self.lock().version, version)
    }

    /// Returns the end of the columns of `row` that may be written.
    pub(super) fn extent(&self, row: RequestRow) -> u32 {
        let (state, row) = (self.settled(), widen(row.number()));
        if state.changes.is_empty() && !state.unknown.contains(row) {
            state.written[row]
        } else {
            narrow(self.columns)
        }
    }

    /// Records that all written columns of rows were zeroed, which makes these rows known.
    pub(super) fn zeroed(&self, rows: Vec<RowExtent<RequestRow>>) {
        let mut state = self.settled();
        for extent in &rows {
            state.unknown.remove_run(widen(extent.row.number()), 1);
        }
        if state.changes.is_empty() {
            state.zero(&rows, self.columns);
        } else {
            state.changes.push_back(Change::Zero(rows));
        }
    }

    /// Abandons pending echoes, before the whole table is zeroed.
    pub(super) fn drop_echoes(&self) {
        for step in std::mem::take(&mut self.lock().changes) {
            if let Change::Echo(held, _) = step {
                self.echoes.release(&held);
            }
        }
    }

    /// Returns the state after applying every change that has arrived.
    fn settled(&self) -> RankedGuard<'_, MirrorState> {
        let mut state = self.lock();
        while let Some(step) = state.changes.front() {
            let landed = match step {
                // A failed device does not echo; its writes stay unknown.
                Change::Echo(held, _) => held.done().has_passed().unwrap_or(false),
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
                        self.echoes.release(&held);
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

    fn lock(&self) -> RankedGuard<'_, MirrorState> {
        self.state.lock()
    }
}

impl MirrorState {
    /// Marks every row as unknown.
    fn forget_all(&mut self) {
        self.unknown.insert_run(0, self.written.len());
    }

    /// Applies an echo: triples of row, column and value, with row -1 for a skipped place.
    fn apply(&mut self, echo: &[i32], columns: usize) {
        let mut seen = HashSet::with_capacity(echo.len() / 3);
        for triple in echo.chunks_exact(3) {
            if let (Ok(row), Ok(column)) = (usize::try_from(triple[0]), u32::try_from(triple[1])) {
                self.values[row * columns + widen(column)] = triple[2];
                self.written[row] = self.written[row].max(column + 1);
                if !seen.insert((row, column)) {
                    // If a place was listed twice, the device has chosen which value is stored.
                    self.unknown.insert_run(row, 1);
                }
            }
        }
    }

    fn write(&mut self, row: RequestRow, from: usize, values: &[i32], columns: usize) {
        let place = widen(row.number()) * columns + from;
        // As in most decode steps.
        if let [only] = values {
            self.values[place] = *only;
            return;
        }
        self.values[place..place + values.len()].copy_from_slice(values);
    }

    fn zero(&mut self, rows: &[RowExtent<RequestRow>], columns: usize) {
        for &RowExtent { row, written } in rows {
            let row = widen(row.number());
            let place = row * columns;
            self.values[place..place + widen(written)].fill(0);
            self.written[row] = 0;
        }
    }
}

impl Mirror for TableMirror {
    fn addresses(&self) -> Range<usize> {
        self.addresses.clone()
    }

    fn dtype(&self) -> DType {
        DType::I32
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
