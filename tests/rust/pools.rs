//! Pools: a failed call leaves no trace, and every error has its kind and its numbers.

use std::sync::Arc;

use crate::pool_table::{GDN, KV};
use kvpool::base::{ErrorKind, IndexVec, Result};
use kvpool::kernels::Indices;
use kvpool::memory::{Backend, Count, Host, Stream};
use kvpool::pool::{
    AllocatorConfig, Fence, GdnConfig, GdnPool, KvConfig, KvPool, ReqToTokenConfig, ReqToTokenPool, Scales,
    TableIndex, TokenToKvPoolAllocator,
};

/// Host memory has no streams.
const STREAM: Stream = Stream::DEFAULT;

const ROWS: ReqToTokenConfig =
    ReqToTokenConfig { max_reqs: 4, max_context_len: 8, padding_row: true, strict: false };

fn slots(size: usize, page_size: usize) -> AllocatorConfig {
    AllocatorConfig { size, page_size, need_sort: true, strict: false }
}

fn host() -> Arc<dyn Backend> {
    Arc::new(Host)
}

#[test]
fn pool_allocates_and_frees_one_region() {
    let backend = Arc::new(Count::new(host()));
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

#[test]
fn invalid_sizes_are_refused() {
    let kv = |change: fn(&mut KvConfig)| {
        let mut config = KV;
        change(&mut config);
        KvPool::new(&config, &host()).expect_err("refused").kind()
    };
    assert_eq!(kv(|config| config.size = 0), ErrorKind::Config);
    assert_eq!(kv(|config| config.v_head_dim = 0), ErrorKind::Config);
    assert_eq!(kv(|config| config.size = usize::MAX), ErrorKind::Config);
    assert_eq!(kv(|config| config.size = 1 << 31), ErrorKind::Config);
    assert_eq!(kv(|config| config.k_head_dim = usize::MAX / 2), ErrorKind::Config);
    assert_eq!(kv(|config| config.layer_num = usize::MAX / 64), ErrorKind::Config);
    let gdn = |change: fn(&mut GdnConfig)| {
        let mut config = GDN;
        change(&mut config);
        GdnPool::new(&config, &host()).expect_err("refused").kind()
    };
    assert_eq!(gdn(|config| config.conv_kernel_size = 0), ErrorKind::Config);
    assert_eq!(gdn(|config| config.max_reqs = usize::MAX), ErrorKind::Config);
    assert_eq!(gdn(|config| config.max_track_slots = 1 << 31), ErrorKind::Config);
    assert_eq!(gdn(|config| config.head_k_dim = usize::MAX / 2), ErrorKind::Config);
    for (max_reqs, max_context_len) in [(0, 1), (1, 0), (1 << 31, 1), (1, 1 << 31), (usize::MAX, 1)] {
        let config = ReqToTokenConfig { max_reqs, max_context_len, ..ROWS };
        let error = ReqToTokenPool::new(&config, &host()).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Config);
    }
    for (size, page_size) in [(0, 1), (1, 0), (1 << 31, 1), (1, 1 << 31), (usize::MAX, usize::MAX)] {
        let error = TokenToKvPoolAllocator::new(&slots(size, page_size), &host()).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Config);
    }
}

#[test]
fn extend_names_the_error() {
    let allocator = TokenToKvPoolAllocator::new(&slots(64, 16), &host()).expect("valid");
    let _held = allocator.alloc(20, STREAM).expect("memory").expect("room").keep();
    let before = allocator.stats();
    let kind = |prefix: &[i64], seq: &[i64], last: &[i64]| {
        let taken = allocator.alloc_extend(prefix, seq, last, STREAM);
        taken.map(|taken| taken.is_some()).map_err(|error| error.kind())
    };
    assert_eq!(kind(&[0], &[1, 2], &[0]), Err(ErrorKind::Config));
    assert_eq!(kind(&[-1], &[1], &[0]), Err(ErrorKind::Config));
    assert_eq!(kind(&[2], &[1], &[0]), Err(ErrorKind::Config));
    assert_eq!(kind(&[0], &[i64::MAX], &[0]), Err(ErrorKind::Config));
    assert_eq!(kind(&[20], &[21], &[34]), Err(ErrorKind::Config));
    assert_eq!(kind(&[20], &[21], &[51]), Err(ErrorKind::IndexOwnership));
    assert_eq!(kind(&[20], &[21], &[-13]), Err(ErrorKind::Config));
    assert_eq!(kind(&[20, 20], &[21, 21], &[35, 35]), Err(ErrorKind::IndexOwnership));
    assert_eq!(kind(&[20], &[65], &[35]), Ok(false));
    assert_eq!(kind(&[20], &[i64::from(i32::MAX)], &[35]), Ok(false));
    assert_eq!(allocator.stats(), before);
    let taken = allocator.alloc_decode(&[21], &[35], STREAM).expect("valid").expect("room");
    assert_eq!((taken.view().shape().numel(), allocator.stats().in_use), (1, 32));
    drop(taken);
    assert_eq!(allocator.stats(), before, "the page that it continued stays");
}

/// A fence that never passes.
struct Never;

impl Fence for Never {
    fn passed(&self) -> Result<bool> {
        Ok(false)
    }
}

#[test]
fn page_without_owners_is_not_continued() {
    let allocator = TokenToKvPoolAllocator::new(&slots(8, 4), &host()).expect("valid");
    let _held = allocator.alloc(2, STREAM).expect("memory").expect("room").keep();
    let page = IndexVec::I64(vec![4]);
    allocator.share(&page, STREAM).expect("it is live");
    for _ in 0..2 {
        let fence: Arc<dyn Fence> = Arc::new(Never);
        let freed = allocator.free(&Indices::Host(page.clone()), Some(&fence), || None, STREAM);
        assert_eq!(freed.expect("not strict").dropped(), 0);
    }
    let error = allocator.alloc_extend(&[2], &[3], &[5], STREAM).expect_err("the page has no owner");
    assert_eq!(error.kind(), ErrorKind::IndexOwnership);
}

#[test]
fn the_table_takes_all_or_nothing() {
    let mut pool = ReqToTokenPool::new(&ROWS, &host()).expect("memory");
    let columns = |row, start, end| TableIndex::Columns { row, start, end };
    let points = |rows: Vec<i64>, columns: Vec<i64>| TableIndex::Points {
        rows: Indices::Host(IndexVec::I64(rows)),
        columns: Indices::Host(IndexVec::I64(columns)),
    };
    let cases = [
        (columns(5, 0, Some(1)), 1, ErrorKind::Index),
        (columns(-1, 0, Some(1)), 1, ErrorKind::Index),
        (columns(1, 7, Some(9)), 2, ErrorKind::Index),
        (columns(1, -1, Some(1)), 2, ErrorKind::Index),
        (columns(1, 3, Some(2)), 0, ErrorKind::Config),
        (columns(1, 0, Some(3)), 2, ErrorKind::Config),
        (columns(1, 0, None), 7, ErrorKind::Config),
        (points(vec![1, 2], vec![0, 8]), 2, ErrorKind::Index),
        (points(vec![1, 5], vec![0, 1]), 2, ErrorKind::Index),
        (points(vec![1, 2, 3], vec![0, 1]), 3, ErrorKind::Config),
        (points(vec![1, 2], vec![0, 1]), 3, ErrorKind::Config),
    ];
    for (index, count, kind) in cases {
        let values = Indices::Host(IndexVec::I32(vec![9; count]));
        let error = pool.write(&index, &values, STREAM).expect_err("refused");
        assert_eq!(error.kind(), kind, "{index:?}: {error}");
    }
    let row = pool.read(0, 8).expect("inside").shape().numel();
    assert_eq!(row, 8);
    for (row, length) in [(5, 1), (0, 9), (0, -1)] {
        assert_eq!(pool.read(row, length).expect_err("outside").kind(), ErrorKind::Index);
    }
    assert_eq!(
        pool.mark_modified(&IndexVec::I64(vec![0, 5]), None).expect_err("outside").kind(),
        ErrorKind::Index
    );
}

#[test]
fn scales_are_for_eight_bit_floats() {
    let pool = KvPool::new(&KV, &host()).expect("memory");
    let [k, v] = pool.page_view(0).expect("a layer");
    let (k, v) = (k.borrow(), v.borrow());
    let none = Indices::Host(IndexVec::I32(Vec::new()));
    for scale in [2.0, 0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error =
            pool.set_kv(0, &none, [k, v], Scales { k: Some(scale), v: None }, STREAM).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Config);
    }
    let error = pool.set_kv(2, &none, [k, v], Scales::default(), STREAM).expect_err("no such layer");
    assert_eq!(error.kind(), ErrorKind::Index);
}
