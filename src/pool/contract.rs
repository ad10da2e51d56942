//! The trait of all pools, on which metrics, snapshots, leak reports and the shared test suite are built.

use std::ops::Range;
use std::sync::Arc;

use crate::base::{Device, Id, widen};
use crate::index::{CallRecord, IndexState, Ledger, RefCounts, RowTable, Span};

/// A pool, as seen by metrics, snapshots and reports.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{DType, Device};
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{PageConfig, PagePool, Pool};
/// let config =
///     PageConfig { page_size: 16, initial_pages: 2, dtype: DType::F32, grow: 0, strict: false };
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let pages = PagePool::new(&config, &host).unwrap();
/// pages.alloc(Stream::DEFAULT).unwrap();
/// let pool: &dyn Pool = &pages;
/// assert_eq!((pool.unit(), pool.device()), ("page", Device::Cpu));
/// assert_eq!(pool.stats().get("in_use"), Some(1));
/// assert_eq!(pool.occupancy().pieces[1].range, 1..2);
/// ```
pub trait Pool {
    /// Returns the unit that the pool hands out, in the singular; for a pool that hands nothing out, the unit
    /// that it stores.
    fn unit(&self) -> &'static str;

    /// Returns whether the pool hands out units. If not, it has no `available` and `in_use`, and nothing can
    /// leak.
    fn hands_out(&self) -> bool {
        true
    }

    /// Returns the bytes of one unit, if all units have the same size.
    fn unit_bytes(&self) -> Option<usize> {
        None
    }

    /// Returns the device of the memory or the index tensors.
    fn device(&self) -> Device;

    /// Returns whether an invalid free is an error. A pool without frees is not strict; a prefix cache is
    /// strict if its allocator is.
    fn strict(&self) -> bool {
        false
    }

    /// Returns the statistics, at the cost of a lock and a few loads.
    fn stats(&self) -> Stats;

    /// Returns the state of all units, at the cost of a pass over them.
    fn occupancy(&self) -> Occupancy {
        Occupancy::default()
    }

    /// Records owners and call sites from now on, if units have owners.
    fn keep_ledger(&self) {}
}

/// Statistics by name: `capacity`, `available`, `in_use` and `high_water` of a pool that hands out units,
/// `bytes`, and numbers of single classes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats(Vec<(&'static str, usize)>);

impl Stats {
    /// Returns the number called `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<usize> {
        self.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    /// Returns all numbers, in a fixed order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, usize)> + '_ {
        self.0.iter().copied()
    }

    pub(super) fn of_counts<I: Id>(counts: &RefCounts<I>) -> Self {
        Self::from([
            ("capacity", counts.capacity()),
            ("available", counts.available()),
            ("in_use", counts.in_use()),
            ("high_water", counts.high_water()),
            ("dropped_frees", counts.dropped_frees()),
        ])
    }

    pub(super) fn of_rows<I: Id>(table: &RowTable<I>) -> Self {
        let rows = table.rows();
        Self::from([
            ("capacity", rows.capacity()),
            ("available", rows.available()),
            ("in_use", rows.in_use()),
            ("high_water", rows.high_water()),
            ("dropped_frees", table.dropped_frees()),
        ])
    }

    pub(super) fn and(mut self, name: &'static str, value: usize) -> Self {
        self.0.push((name, value));
        self
    }
}

impl<const N: usize> From<[(&'static str, usize); N]> for Stats {
    fn from(numbers: [(&'static str, usize); N]) -> Self {
        /// Enough for every class, in one allocation.
        const MOST: usize = 16;
        let mut all = Vec::with_capacity(N.max(MOST));
        all.extend(numbers);
        Self(all)
    }
}

/// A span of units with the same state and the same holders.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The first unit, and one past the last.
    pub range: Range<usize>,
    /// The state of each.
    pub state: IndexState,
    /// Bytes of the span, if units differ in size.
    pub bytes: Option<usize>,
    /// The holders of units in use, if a ledger is kept.
    pub holders: Vec<Arc<CallRecord>>,
}

/// The units of a pool.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::index::IndexState;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, Occupancy, Piece, Pool, Stats, TokenToKvPoolAllocator};
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let slots = TokenToKvPoolAllocator::new(&AllocatorConfig::new(16), &host).unwrap();
/// drop(slots.alloc(3, Stream::DEFAULT).unwrap().expect("16 are free").keep());
/// let Occupancy { pieces, lifetimes } = slots.occupancy();
/// let live = |piece: &&Piece| piece.state == IndexState::Live;
/// assert_eq!(pieces.iter().find(live).map(|piece| piece.range.clone()), Some(1..4));
/// assert!(lifetimes.is_empty(), "without a ledger");
/// let stats: Stats = Pool::stats(&slots);
/// assert_eq!((stats.get("in_use"), stats.get("capacity")), (Some(3), Some(16)));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Occupancy {
    /// Spans that cover all units, in order.
    pub pieces: Vec<Piece>,
    /// Numbers of lifetimes below 1, 2, 4, ... microseconds, if a ledger is kept.
    pub lifetimes: Vec<u64>,
}

impl Occupancy {
    /// Returns the spans of a space whose indices stand for `scale` units each.
    pub(super) fn new(
        spans: impl IntoIterator<Item = (Span, Option<usize>)>,
        ledger: Option<&Ledger>,
        scale: usize,
    ) -> Self {
        let piece = |(span, bytes): (Span, Option<usize>)| Piece {
            range: widen(span.range.start) * scale..widen(span.range.end) * scale,
            state: span.state,
            bytes,
            holders: span.holders,
        };
        let lives = |&lives: &u64| lives.saturating_mul(scale as u64);
        Self {
            pieces: spans.into_iter().map(piece).collect(),
            lifetimes: ledger.map_or(Vec::new(), |ledger| ledger.lifetimes().iter().map(lives).collect()),
        }
    }

    /// Works like [`Self::new`] for units of one size.
    pub(super) fn of_equal_units(spans: Vec<Span>, ledger: Option<&Ledger>, scale: usize) -> Self {
        Self::new(spans.into_iter().map(|span| (span, None)), ledger, scale)
    }
}
