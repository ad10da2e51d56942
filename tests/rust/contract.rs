//! One contract over a table of all pools: the guarantees of [`Pool`], for every kind of unit.

use std::sync::Arc;

use kvpool::base::{Device, ErrorKind, Id, IndexVec, Result};
use kvpool::cache::PolicyKind;
use kvpool::index::{BadFrees, CallRecord, IndexState, Rounding};
use kvpool::kernels::Indices;
use kvpool::pool::{
    AllocatorConfig, BufferConfig, BufferPool, ChunkPool, GdnConfig, GdnPool, Grant, HostTier, KvPool,
    PageConfig, PagePool, Pool, PrefixCache, PrefixCacheConfig, ReqToTokenConfig, ReqToTokenPool,
    TensorOrigin, TokenToKvPoolAllocator, Workspace, WorkspaceConfig, Writes,
};
use kvpool::tensor::TensorView;

use crate::histories::contents;
use crate::pool_table::{GDN, KV, PAGES, ROWS, SLOTS, STREAM, TIER, chunks, host};

fn first(view: &TensorView) -> i64 {
    contents::read::<i32>(view.region(), view.offset(), 1)[0].into()
}

/// A pool whose units are numbers with one owner each.
trait Counted: Pool {
    fn take(&mut self) -> Option<i64>;
    fn give_back(&mut self, unit: i64) -> Result<BadFrees>;
}

impl Counted for TokenToKvPoolAllocator {
    fn take(&mut self) -> Option<i64> {
        self.alloc(1, STREAM).expect("memory").map(|taken| first(&taken.keep()))
    }

    fn give_back(&mut self, unit: i64) -> Result<BadFrees> {
        let given = Indices::Host(IndexVec::I64(vec![unit]));
        TokenToKvPoolAllocator::free(self, &given, STREAM)
    }
}

impl Counted for ReqToTokenPool {
    fn take(&mut self) -> Option<i64> {
        self.alloc(1, STREAM).expect("memory").map(|rows| rows[0].into())
    }

    fn give_back(&mut self, unit: i64) -> Result<BadFrees> {
        self.free(&IndexVec::I64(vec![unit]), STREAM).map(|freed| freed.bad)
    }
}

impl Counted for GdnPool {
    fn take(&mut self) -> Option<i64> {
        self.alloc_track_slot().map(Into::into)
    }

    fn give_back(&mut self, unit: i64) -> Result<BadFrees> {
        self.free_track_slot(unit)
    }
}

impl Counted for PagePool {
    fn take(&mut self) -> Option<i64> {
        self.alloc(STREAM).expect("memory").map(|page| page.number().into())
    }

    fn give_back(&mut self, unit: i64) -> Result<BadFrees> {
        self.free(unit)
    }
}

/// Frees a unit that was taken.
fn give_back(pool: &mut dyn Counted, unit: i64) {
    assert_eq!(pool.give_back(unit).expect("its own").dropped(), 0);
}

/// Every pool whose units are numbers, with six units each.
fn counted(strict: bool) -> Vec<Box<dyn Counted>> {
    let slots = AllocatorConfig { size: 6, page_size: 1, strict, ..SLOTS };
    let rows = ReqToTokenConfig { max_reqs: 6, strict, ..ROWS };
    let states = GdnConfig { max_track_slots: 6, strict, ..GDN };
    let pages = PageConfig { initial_pages: 6, grow: 0, strict, ..PAGES };
    vec![
        Box::new(TokenToKvPoolAllocator::new(&slots, &host()).expect("memory")),
        Box::new(ReqToTokenPool::new(&rows, &host()).expect("memory")),
        Box::new(GdnPool::new(&states, &host()).expect("memory")),
        Box::new(PagePool::new(&pages, &host()).expect("memory")),
    ]
}

/// A cache of prefixes on an allocator of its own.
fn cache(strict: bool) -> PrefixCache {
    let config = PrefixCacheConfig {
        policy: PolicyKind::Adaptive,
        cost: None,
        max_pinned: 0.5,
        name: "cache".into(),
        events: None,
    };
    let slots = TokenToKvPoolAllocator::new(&AllocatorConfig { strict, ..SLOTS }, &host()).expect("memory");
    PrefixCache::new(config, Arc::new(slots), None, None).expect("valid")
}

/// One pool of each class.
fn all() -> Vec<Box<dyn Pool>> {
    let arena = WorkspaceConfig { arena_bytes: 4096, poison: false };
    let kv = Arc::new(KvPool::new(&KV, &host()).expect("memory"));
    let mut pools: Vec<Box<dyn Pool>> = vec![
        Box::new(KvPool::new(&KV, &host()).expect("memory")),
        Box::new(ChunkPool::new(&chunks(6, true), &host()).expect("memory")),
        Box::new(BufferPool::new(&BufferConfig { rounding: Rounding::Pow2 }, &host())),
        Box::new(Workspace::new(&arena, &host()).expect("memory")),
        Box::new(cache(false)),
        Box::new(HostTier::new(&TIER, &kv, None, &host()).expect("memory")),
    ];
    pools.extend(counted(true).into_iter().map(|pool| pool as Box<dyn Pool>));
    pools
}

/// The number of units in a state, counted from the spans.
fn count(pool: &dyn Pool, state: IndexState) -> usize {
    pool.occupancy().pieces.iter().filter(|piece| piece.state == state).map(|piece| piece.range.len()).sum()
}

/// Checks that the statistics add up and agree with the spans.
fn check(pool: &dyn Pool, in_use: usize) {
    let number = |name| pool.stats().get(name).expect(name);
    assert_eq!((number("in_use"), number("available")), (in_use, number("capacity") - in_use));
    assert!(number("high_water") >= in_use);
    assert_eq!(count(pool, IndexState::Free), number("available"), "{}", pool.unit());
    assert_eq!(count(pool, IndexState::Live), in_use, "{}", pool.unit());
    let pieces = pool.occupancy().pieces;
    assert!(pieces.windows(2).all(|pair| pair[0].range.end == pair[1].range.start));
}

#[test]
fn every_pool_describes_itself() {
    for pool in all() {
        assert_eq!(pool.device(), Device::Cpu);
        assert!(!pool.unit().is_empty());
        // The other pools cannot receive an invalid free.
        assert_eq!(pool.strict(), pool.hands_out() && pool.unit() != "byte");
        assert!(pool.unit_bytes().is_none_or(|bytes| bytes > 0));
        let names: Vec<_> = pool.stats().iter().map(|(name, _)| name).collect();
        assert!(names.contains(&"capacity") && names.contains(&"bytes"));
        if pool.hands_out() {
            check(pool.as_ref(), 0);
        } else {
            assert!(pool.occupancy().pieces.is_empty());
        }
    }
}

#[test]
fn a_cache_is_as_strict_as_the_allocator_of_its_slots() {
    for strict in [false, true] {
        assert_eq!(Pool::strict(&cache(strict)), strict);
    }
}

#[test]
fn units_are_handed_out_once_and_numbers_add_up() {
    for mut pool in counted(false) {
        let mut taken = Vec::new();
        while let Some(unit) = pool.take() {
            assert!(!taken.contains(&unit));
            taken.push(unit);
            check(pool.as_ref(), taken.len());
        }
        assert_eq!(taken.len(), 6);
        for left in (0..6).rev() {
            give_back(pool.as_mut(), taken[left]);
            check(pool.as_ref(), left);
        }
    }
}

#[test]
fn bad_frees_are_dropped_or_errors_and_change_nothing() {
    for strict in [false, true] {
        for mut pool in counted(strict) {
            let (held, freed) = (pool.take().expect("room"), pool.take().expect("room"));
            give_back(pool.as_mut(), freed);
            let before = pool.stats();
            let bad = [freed, -1, 100, i64::MIN, i64::MAX, 1 << 32];
            for (number, unit) in bad.into_iter().enumerate() {
                match pool.give_back(unit) {
                    Ok(dropped) => assert_eq!((strict, dropped.dropped()), (false, 1)),
                    Err(error) => {
                        assert_eq!((strict, error.kind()), (true, ErrorKind::IndexOwnership));
                        assert!(error.to_string().contains(&unit.to_string()));
                    }
                }
                let dropped = if strict { 0 } else { number + 1 };
                assert_eq!(pool.stats().get("dropped_frees"), Some(dropped));
            }
            assert_eq!(pool.stats().get("available"), before.get("available"));
            check(pool.as_ref(), 1);
            give_back(pool.as_mut(), held);
        }
    }
}

#[test]
fn ledger_records_holders() {
    for mut pool in counted(false) {
        pool.keep_ledger();
        let acting = Arc::new(CallRecord::new(None, "here")).begin();
        let unit = pool.take().expect("room");
        drop(acting);
        let holders = |pool: &dyn Counted| -> Vec<String> {
            let pieces = pool.occupancy().pieces.into_iter();
            pieces.flat_map(|piece| piece.holders).map(|call| call.site.to_string()).collect()
        };
        assert_eq!(holders(pool.as_ref()), ["here"]);
        give_back(pool.as_mut(), unit);
        assert!(holders(pool.as_ref()).is_empty());
        assert_eq!(pool.occupancy().lifetimes.iter().sum::<u64>(), 1);
    }
}

/// A tensor is copied to a cache line after its slots were handed out; another thread may clear the allocator
/// in between.
#[test]
fn a_copied_tensor_is_as_old_as_its_slots() {
    let slots = Arc::new(TokenToKvPoolAllocator::new(&SLOTS, &host()).expect("small"));
    let free = |view: &TensorView| {
        let (count, address) = (view.shape().numel(), view.address().addr());
        let values = Indices::Host(IndexVec::I32(contents::read(view.region(), view.offset(), count)));
        let origin = TensorOrigin { address, step: Some(1), writes: &|| Writes::None };
        slots.free_keeping(&values, Some(origin), None, || None, STREAM).expect("reported")
    };
    let is_copied = |grant: &Grant<'_>| {
        grant.aligned_view().expect("memory").address() != grant.granted().view().address()
    };
    for is_cleared in [false, true] {
        slots.clear(STREAM);
        let mut grant = slots.alloc(3, STREAM).expect("memory").expect("room");
        // Memory that begins at a cache line is not copied.
        let mut kept = Vec::new();
        while !is_copied(&grant) {
            kept.push(grant.granted().view());
            grant.commit();
            drop(grant);
            slots.clear(STREAM);
            grant = slots.alloc(3, STREAM).expect("memory").expect("room");
        }
        if is_cleared {
            slots.clear(STREAM);
        }
        let copy = grant.aligned_view().expect("memory");
        grant.commit();
        drop(grant);
        let others = if is_cleared { slots.alloc(3, STREAM).expect("memory") } else { None };
        assert_eq!(free(&copy).dropped(), if is_cleared { 3 } else { 0 });
        drop(others);
        assert_eq!(slots.stats().in_use, 0);
    }
}
