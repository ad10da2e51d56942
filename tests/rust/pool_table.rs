//! One suite over a table of all pools: every refused allocation is an error, and all memory is freed.

use std::sync::Arc;

use kvpool::base::{DType, ErrorKind, IndexDType, Result};
use kvpool::cache::WritePolicy;
use kvpool::index::Rounding;
use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
use kvpool::memory::{Backend, CountingBackend, FailingBackend, Host, LimitedBackend, Stream};
use kvpool::pool::{
    AllocatorConfig, BatchPlanner, BufferConfig, BufferPool, CacheArena, CacheArenaConfig, ChunkConfig,
    ChunkPool, GdnConfig, GdnPool, HostTier, HostTierConfig, KvConfig, KvLayout, KvPool, PageConfig,
    PagePool, PlannerConfig, ReqToTokenConfig, ReqToTokenPool, TableWriters, TokenToKvPoolAllocator,
    Workspace, WorkspaceConfig,
};

/// Host memory has no streams.
pub(crate) const STREAM: Stream = Stream::DEFAULT;

pub(crate) fn host() -> Arc<dyn Backend> {
    Arc::new(Host)
}

/// Makes a pool on a backend, takes something from it, and drops it.
type Make = fn(&Arc<dyn Backend>) -> Result<()>;

/// Every pool that takes memory. On the host an allocator takes none from its backend.
const POOLS: [(&str, Make); 10] = [
    ("KvPool", |backend| KvPool::new(&KV, backend).map(drop)),
    ("GdnPool", |backend| GdnPool::new(&GDN, backend).map(drop)),
    ("ReqToTokenPool", |backend| ReqToTokenPool::new(&ROWS, backend).map(drop)),
    ("TokenToKvPoolAllocator", |backend| TokenToKvPoolAllocator::new(&SLOTS, backend).map(drop)),
    ("BatchPlanner", |backend| {
        // Its pools are on the same device, but not on this backend.
        let other: Arc<dyn Backend> = match backend.gpu() {
            None => host(),
            Some(gpu) => Arc::new(kvpool::memory::Cuda::new(gpu, STREAM)),
        };
        let (slots, table) =
            (TokenToKvPoolAllocator::new(&SLOTS, &other)?, ReqToTokenPool::new(&ROWS, &other)?);
        BatchPlanner::new(&PLANS, backend, Arc::new(slots), Arc::new(table)).map(drop)
    }),
    ("CacheArena", |backend| {
        let plane = Plane::new("recurrent", DType::F32, &[64])?;
        let states = Group::new("state", GroupKind::State, &[0, 1], vec![plane])?;
        let config = CacheArenaConfig {
            layout: CacheLayout::new("", 1, vec![states])?,
            arena_bytes: 1 << 13,
            floors: Vec::new(),
            slabs: SlabOptions::default(),
            strict: true,
        };
        CacheArena::new(&config, backend)?.alloc(&[2]).map(drop)
    }),
    ("PagePool", |backend| {
        let pool = PagePool::new(&PAGES, backend)?;
        (0..3).try_for_each(|_| pool.alloc(STREAM).map(drop))
    }),
    ("BufferPool", |backend| {
        let pool = BufferPool::new(&BufferConfig { rounding: Rounding::Pow2 }, backend);
        pool.alloc_batch(&[100, 5000], STREAM).map(drop)
    }),
    ("ChunkPool", |backend| ChunkPool::new(&chunks(8, false), backend)?.try_allocate(2).map(drop)),
    ("Workspace", |backend| {
        Workspace::new(&WorkspaceConfig { arena_bytes: 4096, poison: true }, backend).map(drop)
    }),
];

/// The pool whose memory is the host's, wherever the pools above it are.
const TIER_BELOW: (&str, Make) = ("HostTier", |backend| {
    // Its pools are not on this backend.
    let kv = Arc::new(KvPool::new(&KV, &host())?);
    let states = Arc::new(GdnPool::new(&GDN, &host())?);
    let config = HostTierConfig { max_states: 3, ..TIER };
    HostTier::new(&config, &kv, Some(&states), backend).map(drop)
});

pub(crate) const KV: KvConfig = KvConfig {
    size: 64,
    layer_num: 2,
    k_head_num: 2,
    k_head_dim: 4,
    v_head_num: 1,
    v_head_dim: 8,
    dtype: DType::BF16,
    page_size: 16,
    layout: KvLayout::Split,
    pin_memory: false,
};

pub(crate) const GDN: GdnConfig = GdnConfig {
    max_reqs: 4,
    num_gdn_layers: 2,
    num_v_heads: 2,
    head_k_dim: 4,
    head_v_dim: 4,
    conv_dim: 8,
    conv_kernel_size: 4,
    dtype: DType::BF16,
    max_track_slots: 2,
    strict: false,
};

pub(crate) const ROWS: ReqToTokenConfig = ReqToTokenConfig {
    max_reqs: 8,
    max_context_len: 100,
    padding_row: true,
    strict: false,
    zero_rows: true,
    writers: TableWriters::Pool,
};

pub(crate) const SLOTS: AllocatorConfig =
    AllocatorConfig { size: 64, page_size: 16, need_sort: true, strict: false, index_dtype: IndexDType::I32 };

pub(crate) const TIER: HostTierConfig = HostTierConfig {
    size: 64,
    max_states: 0,
    write: WritePolicy::Through,
    pin_memory: false,
    page_lock_threads: 1,
    staging_bytes: 0,
};

const PLANS: PlannerConfig = PlannerConfig::new(4, 32);

pub(crate) const PAGES: PageConfig =
    PageConfig { page_size: 64, initial_pages: 2, dtype: DType::F32, grow: 1, strict: false };

pub(crate) fn chunks(num_chunks: usize, strict: bool) -> ChunkConfig {
    let (chunk_shape, dtype) = (vec![2, 64], DType::F16);
    ChunkConfig { num_chunks, chunk_shape, dtype, pin_memory: false, page_lock_threads: 1, strict }
}

/// Runs the suite on top of `inner`.
pub(crate) fn pools_conform(inner: &Arc<dyn Backend>) {
    for (name, make) in POOLS.into_iter().chain(inner.gpu().is_none().then_some(TIER_BELOW)) {
        let count = Arc::new(CountingBackend::new(Arc::clone(inner)));
        let counted: Arc<dyn Backend> = count.clone();
        make(&counted).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((count.live_blocks(), count.live_bytes()), (0, 0), "{name} keeps memory");
        let blocks = count.allocations();
        let takes_none = name == "TokenToKvPoolAllocator" && inner.gpu().is_none();
        assert_eq!(blocks == 0, takes_none, "{name} takes {blocks} blocks from its backend");
        // Each allocation fails in turn: the error is reported, and earlier allocations are freed.
        for nth in 0..blocks {
            let count = Arc::new(CountingBackend::new(Arc::new(FailingBackend::new(Arc::clone(inner), nth))));
            let failing: Arc<dyn Backend> = count.clone();
            let error = make(&failing).expect_err(name);
            assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{name}, allocation {nth}: {error}");
            assert_eq!((count.live_blocks(), count.live_bytes()), (0, 0), "{name} leaks after failure {nth}");
            // Only one failure was planned, so the pool can be made now.
            make(&failing).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        let limited: Arc<dyn Backend> = Arc::new(LimitedBackend::new(Arc::clone(inner), 100));
        match make(&limited) {
            Ok(()) => assert!(takes_none, "{name} fits 100 bytes"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{name}: {error}"),
        }
    }
}

#[test]
fn pools_on_the_host() {
    pools_conform(&host());
}

#[test]
fn pool_allocates_and_frees_one_region() {
    let backend = Arc::new(CountingBackend::new(Arc::new(Host)));
    let counted: Arc<dyn Backend> = backend.clone();
    let pool = KvPool::new(&KV, &counted).expect("memory");
    assert_eq!((backend.live_blocks(), pool.rows()), (1, 80));
    let infos: Vec<_> = pool.buffer_infos().collect();
    assert_eq!(infos.len(), 4);
    assert!(infos.iter().all(|info| info.address % 256 == 0 && info.bytes == 80 * info.row_bytes));
    assert_eq!(infos.iter().map(|info| info.bytes).sum::<usize>(), pool.mem_bytes());
    let [k, _] = pool.kv_buffer(1).expect("a layer");
    drop(pool);
    assert_eq!(backend.live_blocks(), 1, "a view keeps the memory");
    drop(k);
    assert_eq!(backend.live_blocks(), 0);
}

/// A pool is shown as in Python: what it is, and not what it has.
#[test]
fn a_pool_is_shown_in_a_line() {
    let host = host();
    let slots = Arc::new(TokenToKvPoolAllocator::new(&AllocatorConfig::new(1 << 16), &host).unwrap());
    let table = Arc::new(ReqToTokenPool::new(&ReqToTokenConfig::new(1024, 64), &host).unwrap());
    let planner =
        BatchPlanner::new(&PlannerConfig::new(64, 512), &host, Arc::clone(&slots), Arc::clone(&table));
    slots.alloc(1000, STREAM).unwrap().unwrap().commit();
    let _rows = table.alloc(500, STREAM).unwrap();
    let kv = Arc::new(KvPool::new(&KV, &host).unwrap());
    let states = Arc::new(GdnPool::new(&GDN, &host).unwrap());
    let tier = HostTier::new(&HostTierConfig { max_states: 3, ..TIER }, &kv, Some(&states), &host).unwrap();
    let buffers = BufferPool::new(&BufferConfig { rounding: Rounding::Pow2 }, &host);
    let _given = buffers.alloc_batch(&[100; 200], STREAM).unwrap();
    let chunks = ChunkPool::new(&chunks(100, false), &host).unwrap();
    let pages = PagePool::new(&PAGES, &host).unwrap();
    let workspace = Workspace::new(&WorkspaceConfig { arena_bytes: 4096, poison: true }, &host).unwrap();
    let shown: [(&str, String); 10] = [
        ("TokenToKvPoolAllocator", format!("{slots:?}")),
        ("ReqToTokenPool", format!("{table:?}")),
        ("BatchPlanner", format!("{:?}", planner.unwrap())),
        ("KvPool", format!("{kv:?}")),
        ("GdnPool", format!("{states:?}")),
        ("HostTier", format!("{tier:?}")),
        ("BufferPool", format!("{buffers:?}")),
        ("ChunkPool", format!("{chunks:?}")),
        ("PagePool", format!("{pages:?}")),
        ("Workspace", format!("{workspace:?}")),
    ];
    for (name, text) in shown {
        assert!(text.starts_with(name), "{text}");
        assert!(text.len() <= 250, "{name} is shown in {} characters: {text}", text.len());
    }
    let mut index = kvpool::index::SlotAllocator::new(1 << 16, 1, kvpool::index::Order::Sorted).unwrap();
    index.alloc::<i32>(1000).unwrap().unwrap();
    assert_eq!(format!("{index:?}"), "SlotAllocator { size: 65536, page_size: 1, available: 64536, .. }");
}
