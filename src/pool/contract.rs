//! The trait of all pools, on which metrics, snapshots, leak reports and the shared test suite are built.

use std::ops::Range;
use std::sync::Arc;

use crate::base::{Device, Id, Slot, widen};
use crate::index::{Act, Book, IndexState, RefCounts, RowTable, Span};

use super::{
    BufferPool, ChunkPool, GdnPool, HostTier, KvPool, PagePool, PrefixCache, ReqToTokenPool,
    TokenToKvPoolAllocator, Workspace,
};

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
/// let mut pages = PagePool::new(&config, &host).unwrap();
/// pages.alloc(Stream::DEFAULT).unwrap();
/// let pool: &dyn Pool = &pages;
/// assert_eq!((pool.unit(), pool.device()), ("page", Device::Cpu));
/// assert_eq!(pool.stats().get("in_use"), Some(1));
/// assert_eq!(pool.occupancy().pieces[1].range, 1..2);
/// ```
pub trait Pool {
    /// The unit that the pool hands out, in the singular; for a pool that hands nothing out, the unit that it
    /// stores.
    fn unit(&self) -> &'static str;

    /// Whether the pool hands out units. If not, it has no `available` and `in_use`, and nothing can leak.
    fn hands_out(&self) -> bool {
        true
    }

    /// Bytes of one unit, if all units have the same size.
    fn unit_bytes(&self) -> Option<usize> {
        None
    }

    /// The device of the memory or the index tensors.
    fn device(&self) -> Device;

    /// Whether an invalid free is an error. A pool without frees is not strict; a prefix cache is what its
    /// allocator is.
    fn strict(&self) -> bool {
        false
    }

    /// The statistics, at the cost of a lock and a few loads.
    fn stats(&self) -> Stats;

    /// The state of all units, at the cost of a pass over them.
    fn occupancy(&self) -> Occupancy {
        Occupancy::default()
    }

    /// Records owners and call sites from now on, if units have owners.
    fn keep_ledger(&mut self) {}
}

/// Statistics by name: `capacity`, `available`, `in_use` and `high_water` of a pool that hands out units,
/// `bytes`, and numbers of single classes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats(Vec<(&'static str, usize)>);

impl Stats {
    /// The number called `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<usize> {
        self.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    /// All numbers, in a fixed order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, usize)> + '_ {
        self.0.iter().copied()
    }

    fn of_counts<I: Id>(counts: &RefCounts<I>) -> Self {
        Self::from([
            ("capacity", counts.capacity()),
            ("available", counts.available()),
            ("in_use", counts.in_use()),
            ("high_water", counts.high_water()),
            ("dropped_frees", counts.dropped_frees()),
        ])
    }

    fn of_rows<I: Id>(table: &RowTable<I>) -> Self {
        let rows = table.rows();
        Self::from([
            ("capacity", rows.capacity()),
            ("available", rows.available()),
            ("in_use", rows.in_use()),
            ("high_water", rows.high_water()),
            ("dropped_frees", table.dropped_frees()),
        ])
    }

    fn and(mut self, name: &'static str, value: usize) -> Self {
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
    /// The first unit, and the one behind the last.
    pub range: Range<usize>,
    /// The state of each.
    pub state: IndexState,
    /// Bytes of the span, if units differ in size.
    pub bytes: Option<usize>,
    /// The holders of units in use, if a ledger is kept.
    pub holders: Vec<Arc<Act>>,
}

/// The units of a pool.
#[derive(Clone, Debug, Default)]
pub struct Occupancy {
    /// Spans that cover all units, in order.
    pub pieces: Vec<Piece>,
    /// Numbers of lifetimes below 1, 2, 4, ... microseconds, if a ledger is kept.
    pub lifetimes: Vec<u64>,
}

impl Occupancy {
    /// The spans of a space whose indices stand for `scale` units each.
    fn new(spans: impl IntoIterator<Item = (Span, Option<usize>)>, book: &Book, scale: usize) -> Self {
        let piece = |(span, bytes): (Span, Option<usize>)| Piece {
            range: widen(span.range.start) * scale..widen(span.range.end) * scale,
            state: span.state,
            bytes,
            holders: span.holders,
        };
        let lives = |&lives: &u64| lives.saturating_mul(scale as u64);
        Self {
            pieces: spans.into_iter().map(piece).collect(),
            lifetimes: book
                .ledger()
                .map_or(Vec::new(), |ledger| ledger.lifetimes().iter().map(lives).collect()),
        }
    }

    /// [`Self::new`] for units of one size.
    fn even(spans: Vec<Span>, book: &Book, scale: usize) -> Self {
        Self::new(spans.into_iter().map(|span| (span, None)), book, scale)
    }
}

impl Pool for TokenToKvPoolAllocator {
    fn unit(&self) -> &'static str {
        Slot::NOUN
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn strict(&self) -> bool {
        self.strict()
    }

    fn stats(&self) -> Stats {
        let slots = self.lock();
        let (stats, pending) = (slots.stats(), slots.pending());
        Stats::from([
            ("capacity", stats.capacity),
            ("available", stats.available),
            ("in_use", stats.in_use),
            ("high_water", stats.high_water),
            ("dropped_frees", stats.dropped_frees),
            ("free", stats.available - stats.released - pending),
            ("released", stats.released),
            ("fenced", stats.fenced),
            ("shared", stats.shared),
            ("cached", stats.cached),
            ("pending", pending),
            ("size", slots.slots().size()),
            ("page_size", slots.slots().page_size()),
            ("bytes", stats.bytes),
            ("device_bytes", slots.device_bytes()),
        ])
    }

    fn occupancy(&self) -> Occupancy {
        // Asked before: a cache takes its own lock, and then that of the slots.
        let locked = self.locked_pages();
        self.look(|slots| {
            let spans = slots.spans(|page| locked.contains(&page));
            Occupancy::even(spans, slots.book(), slots.page_size())
        })
    }

    fn keep_ledger(&mut self) {
        Self::keep_ledger(self);
    }
}

impl Pool for PrefixCache {
    fn unit(&self) -> &'static str {
        Slot::NOUN
    }

    /// Its slots are the allocator's.
    fn hands_out(&self) -> bool {
        false
    }

    fn device(&self) -> Device {
        self.allocator().device()
    }

    fn strict(&self) -> bool {
        self.allocator().strict()
    }

    fn stats(&self) -> Stats {
        let (tree, counts) = self.numbers();
        Stats::from([
            ("capacity", self.allocator().stats().capacity),
            ("lookups", counts.lookups),
            ("hit_tokens", counts.hit_tokens),
            ("missed_tokens", counts.missed_tokens),
            ("published", counts.published),
            ("duplicates", counts.duplicates),
            ("evicted", counts.evicted),
            ("loaded", counts.loaded),
            ("cached", tree.cached),
            ("evictable", tree.evictable),
            ("locked", tree.locked),
            ("nodes", tree.nodes),
            ("snapshots", tree.snapshots),
            ("bytes", tree.bytes),
        ])
    }
}

impl Pool for HostTier {
    fn unit(&self) -> &'static str {
        "page"
    }

    /// Its pages are a prefix cache's.
    fn hands_out(&self) -> bool {
        false
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(self.page_bytes())
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn stats(&self) -> Stats {
        Self::stats(self)
    }
}

impl Pool for ReqToTokenPool {
    fn unit(&self) -> &'static str {
        "row"
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(size_of::<i32>() * self.max_context_len())
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn strict(&self) -> bool {
        self.strict()
    }

    fn stats(&self) -> Stats {
        Stats::of_rows(self.rows()).and("bytes", self.mem_bytes())
    }

    fn occupancy(&self) -> Occupancy {
        let rows = self.rows();
        Occupancy::even(rows.spans(), rows.book(), 1)
    }

    fn keep_ledger(&mut self) {
        self.keep_ledger();
    }
}

impl Pool for KvPool {
    fn unit(&self) -> &'static str {
        Slot::NOUN
    }

    fn hands_out(&self) -> bool {
        false
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn stats(&self) -> Stats {
        Stats::from([
            ("capacity", self.config().size),
            ("rows", self.rows()),
            ("layer_num", self.config().layer_num),
            ("page_size", self.config().page_size),
            ("bytes", self.mem_bytes()),
        ])
    }
}

impl Pool for GdnPool {
    fn unit(&self) -> &'static str {
        "track slot"
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(self.mem_bytes() / self.pool_size())
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn strict(&self) -> bool {
        self.strict()
    }

    fn stats(&self) -> Stats {
        Stats::of_rows(&self.tracks()).and("bytes", self.mem_bytes())
    }

    fn occupancy(&self) -> Occupancy {
        let tracks = self.tracks();
        Occupancy::even(tracks.spans(), tracks.book(), 1)
    }

    fn keep_ledger(&mut self) {
        Self::keep_ledger(self);
    }
}

impl Pool for PagePool {
    fn unit(&self) -> &'static str {
        "page"
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(self.config().page_size * self.config().dtype.size())
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn strict(&self) -> bool {
        self.config().strict
    }

    fn stats(&self) -> Stats {
        Stats::of_counts(self.pages()).and("bytes", self.mem_bytes())
    }

    fn occupancy(&self) -> Occupancy {
        Occupancy::even(self.pages().spans(), self.pages().book(), 1)
    }

    fn keep_ledger(&mut self) {
        self.keep_ledger();
    }
}

impl Pool for ChunkPool {
    fn unit(&self) -> &'static str {
        "chunk"
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(self.chunk_bytes())
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn strict(&self) -> bool {
        self.config().strict
    }

    fn stats(&self) -> Stats {
        self.counts(|chunks, registered| Stats::of_counts(chunks).and("registered", registered))
            .and("bytes", self.mem_bytes())
    }

    fn occupancy(&self) -> Occupancy {
        self.counts(|chunks, _| Occupancy::even(chunks.spans(), chunks.book(), 1))
    }

    fn keep_ledger(&mut self) {
        Self::keep_ledger(self);
    }
}

impl Pool for BufferPool {
    fn unit(&self) -> &'static str {
        "buffer"
    }

    fn device(&self) -> Device {
        self.device()
    }

    /// Releasing a buffer that is not in use is always an error.
    fn strict(&self) -> bool {
        true
    }

    fn stats(&self) -> Stats {
        let buckets = self.buckets();
        Stats::from([
            ("capacity", buckets.free_count() + buckets.in_use_count()),
            ("available", buckets.free_count()),
            ("in_use", buckets.in_use_count()),
            ("high_water", buckets.high_water()),
            ("stale_uses", self.stale_uses()),
            ("bytes", buckets.free_bytes() + buckets.in_use_bytes()),
            ("free_bytes", buckets.free_bytes()),
            ("in_use_bytes", buckets.in_use_bytes()),
            ("high_water_bytes", buckets.high_water_bytes()),
            ("registered_bytes", self.registered_bytes()),
        ])
    }

    fn occupancy(&self) -> Occupancy {
        let spans = self.buckets().spans().into_iter().map(|(span, bytes)| (span, Some(bytes)));
        Occupancy::new(spans, self.buckets().book(), 1)
    }

    fn keep_ledger(&mut self) {
        self.keep_ledger();
    }
}

impl Pool for Workspace {
    fn unit(&self) -> &'static str {
        "byte"
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(1)
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn stats(&self) -> Stats {
        // In this order: once it is closed nothing of it is in use.
        let capacity = if self.is_closed() { 0 } else { self.arena_bytes() };
        let [in_use, high_water] = self.usage();
        Stats::from([
            ("capacity", capacity),
            ("available", capacity - in_use),
            ("in_use", in_use),
            ("high_water", high_water),
            ("bytes", capacity),
        ])
    }

    /// Pieces have no holders: the workspace is reset as a whole.
    fn occupancy(&self) -> Occupancy {
        let piece = |(range, is_taken)| Piece {
            range,
            state: if is_taken { IndexState::Live } else { IndexState::Free },
            bytes: None,
            holders: Vec::new(),
        };
        Occupancy { pieces: self.pieces().into_iter().map(piece).collect(), lifetimes: Vec::new() }
    }
}
