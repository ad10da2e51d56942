//! Copies between pages and pieces of host memory, compared with a model that copies byte by byte.

use std::ops::Range;
use std::sync::Arc;

use kvpool::base::{ChunkId, DType, Error, ErrorKind, Id, Page, Result, widen};
use kvpool::kernels::{
    Executor, HostAccess, IndexSpace, IndexSpaces, LayerRows, PageCopy, PagePair, Pieces, PlaneRows,
    RowBuffer,
};
use kvpool::memory::{Backend, Host, PageLockedHost, Region, Stream};

use crate::conformance::bytes;
use crate::histories::contents;
use crate::pool_table::{STREAM, host};

/// Numbers without a pattern, the same in every run.
pub(crate) struct Draws(u64);

impl Draws {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(2).wrapping_add(0x9E37_79B9_7F4A_7C15))
    }

    fn next(&mut self) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32
    }

    pub(crate) fn below(&mut self, count: usize) -> usize {
        usize::try_from(self.next()).unwrap() % count
    }

    pub(crate) fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count + 8);
        while bytes.len() < count {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(count);
        bytes
    }

    /// `count` numbers below `below`: each once, or any.
    fn numbers(&mut self, count: usize, below: usize, is_once: bool) -> Vec<u32> {
        let mut all: Vec<u32> = (0..u32::try_from(below).unwrap()).collect();
        let mut numbers = Vec::new();
        for _ in 0..count {
            let at = self.below(all.len());
            numbers.push(if is_once { all.swap_remove(at) } else { all[at] });
        }
        numbers
    }

    /// Returns up to `most` pairs, or all that are possible.
    pub(crate) fn pairs(&mut self, tier: &Tier, direction: PageCopy, most: usize) -> Vec<PagePair<Page>> {
        let targets = if direction == PageCopy::Out { tier.shape.pieces } else { tier.shape.pages() };
        let count = if tier.shape.pages() == 0 { 0 } else { most.min(targets) };
        let pages = self.numbers(count, tier.shape.pages(), direction == PageCopy::In);
        let pieces = self.numbers(count, tier.shape.pieces, direction == PageCopy::Out);
        pages
            .into_iter()
            .zip(pieces)
            .map(|(page, piece)| PagePair { page: Page::new(page), piece: ChunkId::new(piece) })
            .collect()
    }
}

/// The shape of a pool and its pieces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) layers: usize,
    pub(crate) rows: usize,
    /// Bytes of a row, of each kind.
    pub(crate) row_bytes: [usize; 2],
    pub(crate) page_size: usize,
    pub(crate) pieces: usize,
    /// Bytes between pieces.
    pub(crate) gap: usize,
    /// Whether both kinds of a layer lie side by side, as in fused pools.
    pub(crate) is_fused: bool,
    /// The number of bytes at whose multiples buffers begin.
    pub(crate) alignment: usize,
}

impl Shape {
    pub(crate) fn draw(draws: &mut Draws) -> Self {
        let page_size = draws.of(&[1, 4, 16]);
        Self {
            layers: 1 + draws.below(4),
            rows: draws.below(80),
            row_bytes: [draws.of(&[0, 1, 6, 16, 48, 256]), draws.of(&[0, 2, 16, 64, 1040])],
            page_size,
            pieces: 1 + draws.below(9),
            gap: draws.of(&[0, 0, 1, 16, 100]),
            is_fused: draws.below(2) == 1,
            alignment: draws.of(&[1, 16, 256]),
        }
    }

    pub(crate) fn pages(&self) -> usize {
        self.rows / self.page_size
    }

    fn layer_bytes(&self) -> usize {
        self.page_size * (self.row_bytes[0] + self.row_bytes[1])
    }

    pub(crate) fn stride(&self) -> usize {
        self.layers * self.layer_bytes() + self.gap
    }

    /// The planes of a pool, and its bytes.
    fn planes(&self) -> ([PlaneRows; 2], usize) {
        let sizes = self.row_bytes.map(|bytes| (self.rows * bytes).next_multiple_of(self.alignment));
        let of = |kind: usize, offset, step| {
            let shape = [self.rows, 1, self.row_bytes[kind]];
            PlaneRows::new(offset, self.layers, step, shape, DType::U8).expect("small")
        };
        let step = sizes[0] + sizes[1];
        let kinds = if self.is_fused {
            [of(0, 0, step), of(1, sizes[0], step)]
        } else {
            [of(0, 0, sizes[0]), of(1, self.layers * sizes[0], sizes[1])]
        };
        (kinds, self.layers * step)
    }
}

/// A pool, pieces for its pages, and what both should hold.
pub(crate) struct Tier {
    pub(crate) shape: Shape,
    pub(crate) rows: LayerRows,
    pub(crate) executor: Executor,
    pub(crate) pieces: Pieces,
    pool: Arc<Region>,
    expected: [Vec<u8>; 2],
}

/// Writes to a region from its first byte on.
fn put(region: &Region, bytes: &[u8]) {
    let Some(gpu) = region.gpu() else {
        // SAFETY: the region is live host memory of that length, which nothing else uses.
        unsafe { region.address().as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        return;
    };
    let source = Region::new(Arc::new(PageLockedHost::new(gpu)), bytes.len()).expect("memory");
    put(&source, bytes);
    let whole = |region| Region::range(region, 0, bytes.len()).expect("inside");
    gpu.copy_in(whole(region), whole(&source), STREAM).expect("enqueued");
    gpu.synchronize(STREAM).expect("copied");
}

impl Tier {
    /// A pool on one backend and pieces on another, full of bytes without a pattern.
    pub(crate) fn new(
        draws: &mut Draws,
        shape: Shape,
        pool: &Arc<dyn Backend>,
        memory: &Arc<dyn Backend>,
        reach: HostAccess,
    ) -> Self {
        let (planes, bytes) = shape.planes();
        let pool = Arc::new(Region::new(Arc::clone(pool), bytes).expect("memory"));
        let rows = LayerRows::new(&pool, planes).expect("inside");
        let space = IndexSpace { noun: "row", len: shape.rows };
        let executor = Executor::new(&pool, shape.layers, IndexSpaces::of_rows(space), 4096).expect("memory");
        let layout = rows.piece(shape.page_size).expect("small");
        assert_eq!(layout.layer_bytes(), shape.layer_bytes());
        let piece = layout.bytes();
        assert_eq!(piece + shape.gap, shape.stride());
        // The last piece needs no gap after it.
        let bytes = (shape.pieces - 1) * shape.stride() + piece;
        let memory = Arc::new(Region::new(Arc::clone(memory), bytes).expect("memory"));
        let pieces =
            Pieces::new(memory, reach, &rows, shape.page_size, shape.stride(), shape.pieces).expect("fits");
        let expected = [&pool, pieces.region()].map(|region| draws.bytes(region.bytes()));
        put(&pool, &expected[0]);
        put(pieces.region(), &expected[1]);
        Self { shape, rows, executor, pieces, pool, expected }
    }

    /// Copies, and records what both should hold then.
    pub(crate) fn copy(
        &mut self,
        direction: PageCopy,
        pairs: &[PagePair<Page>],
        layers: &Range<usize>,
        stream: Stream,
    ) -> Result<()> {
        self.executor.copy_pages(&self.rows, &self.pieces, direction, pairs, layers.clone(), stream)?;
        let shape = self.shape;
        let [pool, memory] = &mut self.expected;
        for pair in pairs {
            let (page, piece) = (widen(pair.page.number()), widen(pair.piece.number()));
            for layer in layers.clone() {
                let mut at = piece * shape.stride() + layer * shape.layer_bytes();
                for buffers in self.rows.kinds() {
                    let bytes = shape.page_size * buffers[layer].row_bytes();
                    let page = buffers[layer].offset() + page * bytes;
                    let (in_pool, in_memory) = (&mut pool[page..page + bytes], &mut memory[at..at + bytes]);
                    match direction {
                        PageCopy::Out => in_memory.copy_from_slice(in_pool),
                        PageCopy::In => in_pool.copy_from_slice(in_memory),
                    }
                    at += bytes;
                }
            }
        }
        Ok(())
    }

    /// Checks every byte of both.
    pub(crate) fn check(&self) {
        for (region, expected, name) in
            [(&self.pool, &self.expected[0], "pool"), (self.pieces.region(), &self.expected[1], "pieces")]
        {
            let found = bytes(region);
            // Whole slices are compared much faster than their bytes.
            if found != *expected {
                let wrong = found.iter().zip(expected).position(|(found, expected)| found != expected);
                panic!("byte {wrong:?} of the {name} of {:?}", self.shape);
            }
        }
    }
}

/// A range of layers.
pub(crate) fn some_layers(draws: &mut Draws, layers: usize) -> Range<usize> {
    let start = draws.below(layers + 1);
    start..start + draws.below(layers + 1 - start)
}

#[test]
fn pages_go_out_and_come_in_and_nothing_else_changes() {
    for seed in 0..300 {
        let mut draws = Draws::new(seed);
        let shape = Shape::draw(&mut draws);
        let mut tier = Tier::new(&mut draws, shape, &host(), &host(), HostAccess::Copied);
        for _ in 0..6 {
            let direction = draws.of(&[PageCopy::Out, PageCopy::In]);
            let most = draws.below(12);
            let pairs = draws.pairs(&tier, direction, most);
            let layers = some_layers(&mut draws, shape.layers);
            tier.copy(direction, &pairs, &layers, STREAM).expect("valid");
            tier.check();
        }
    }
}

#[test]
fn large_copies_are_the_same_bytes() {
    // From 4 MiB on copies of small pages bypass the caches.
    for (page_size, row_bytes) in [(1, [2048, 2048]), (1, [2048, 1040]), (16, [1024, 256]), (1, [192, 3000])]
    {
        let mut draws = Draws::new(page_size as u64);
        let rows = (5 << 20) / row_bytes[0] / 2;
        let pieces = rows / page_size;
        let shape =
            Shape { layers: 2, rows, row_bytes, page_size, pieces, gap: 0, is_fused: false, alignment: 256 };
        let mut tier = Tier::new(&mut draws, shape, &host(), &host(), HostAccess::Copied);
        for direction in [PageCopy::Out, PageCopy::In] {
            let pairs = draws.pairs(&tier, direction, pieces);
            tier.copy(direction, &pairs, &(0..2), STREAM).expect("valid");
            tier.check();
        }
    }
}

#[test]
fn pages_round_trip() {
    let mut draws = Draws::new(7);
    let shape = Shape {
        layers: 3,
        rows: 50,
        row_bytes: [48, 6],
        page_size: 4,
        pieces: 12,
        gap: 5,
        is_fused: true,
        alignment: 16,
    };
    let mut tier = Tier::new(&mut draws, shape, &host(), &host(), HostAccess::Copied);
    let before = bytes(&tier.pool);
    let pairs = draws.pairs(&tier, PageCopy::Out, 12);
    let mut pages: Vec<Page> = pairs.iter().map(|pair| pair.page).collect();
    pages.sort_unstable();
    pages.dedup();
    // The last piece of each page that is there twice holds the same bytes.
    let back: Vec<PagePair<Page>> =
        pages.iter().map(|page| *pairs.iter().rfind(|pair| pair.page == *page).unwrap()).collect();
    tier.copy(PageCopy::Out, &pairs, &(0..3), STREAM).expect("valid");
    put(&tier.pool, &vec![0; before.len()]);
    tier.expected[0].fill(0);
    tier.copy(PageCopy::In, &back, &(0..3), STREAM).expect("valid");
    tier.check();
    let after = bytes(&tier.pool);
    for buffer in tier.rows.all() {
        for page in &pages {
            let page_bytes = 4 * buffer.row_bytes();
            let at = buffer.offset() + widen(page.number()) * page_bytes;
            assert!(before[at..at + page_bytes] == after[at..at + page_bytes]);
        }
    }
    assert_eq!(tier.pieces.bytes_of(2, &(1..3)).expect("inside"), {
        let begin = 2 * shape.stride();
        begin + 216..begin + 3 * 216
    });
}

/// A pool of 2 layers with 7 pages of 4 rows, and 5 pieces for them.
const SMALL: Shape = Shape {
    layers: 2,
    rows: 30,
    row_bytes: [16, 8],
    page_size: 4,
    pieces: 5,
    gap: 0,
    is_fused: false,
    alignment: 16,
};

/// The kind and the words of a refusal.
pub(crate) fn refused<T: std::fmt::Debug>(answer: Result<T>) -> (ErrorKind, String) {
    let error: Error = answer.expect_err("refused");
    (error.kind(), error.to_string())
}

#[test]
fn wrong_pages_pieces_and_layers_are_refused_before_any_copy() {
    let mut draws = Draws::new(1);
    let mut tier = Tier::new(&mut draws, SMALL, &host(), &host(), HostAccess::Copied);
    let of = |pairs: &[(u32, u32)]| -> Vec<PagePair<Page>> {
        pairs
            .iter()
            .map(|&(page, piece)| PagePair { page: Page::new(page), piece: ChunkId::new(piece) })
            .collect()
    };
    let all = 0..2;
    #[expect(clippy::reversed_empty_ranges, reason = "it is refused")]
    let reversed = 2..1;
    for (direction, pairs, layers, kind, text) in [
        // The tail of 2 rows is no page.
        (PageCopy::Out, &[(0, 0), (7, 1)][..], &all, ErrorKind::Index, "page 7 is outside [0, 7)"),
        (PageCopy::In, &[(0, 0), (u32::MAX, 1)], &all, ErrorKind::Index, "page 4294967295 is outside [0, 7)"),
        (PageCopy::Out, &[(0, 0), (1, 5)], &all, ErrorKind::Index, "piece 5 is outside [0, 5)"),
        (
            PageCopy::In,
            &[(0, 0), (1, u32::MAX)],
            &all,
            ErrorKind::Index,
            "piece 4294967295 is outside [0, 5)",
        ),
        (PageCopy::Out, &[(0, 0)], &(0..3), ErrorKind::Index, "layers 0..3 are outside [0, 2)"),
        (PageCopy::In, &[(0, 0)], &reversed, ErrorKind::Index, "layers 2..1 are outside [0, 2)"),
        (
            PageCopy::Out,
            &[(0, 3), (1, 2), (2, 3)],
            &all,
            ErrorKind::Argument,
            "piece 3 is written twice by one copy",
        ),
        (PageCopy::In, &[(6, 0), (6, 1)], &all, ErrorKind::Argument, "page 6 is written twice by one copy"),
    ] {
        assert_eq!(refused(tier.copy(direction, &of(pairs), layers, STREAM)), (kind, text.to_owned()));
        tier.check();
    }
    // A source may be named twice.
    tier.copy(PageCopy::Out, &of(&[(1, 4), (1, 0)]), &all, STREAM).expect("valid");
    tier.copy(PageCopy::In, &of(&[(1, 4), (0, 4)]), &all, STREAM).expect("valid");
    tier.copy(PageCopy::In, &[], &all, STREAM).expect("nothing");
    tier.check();
}

#[test]
fn pieces_that_do_not_fit_are_refused() {
    let mut draws = Draws::new(2);
    let tier = Tier::new(&mut draws, SMALL, &host(), &host(), HostAccess::Copied);
    let new = |bytes: usize, page_size, stride, count| {
        let memory = Arc::new(Region::new(Arc::new(Host), bytes).expect("memory"));
        refused(Pieces::new(memory, HostAccess::Copied, &tier.rows, page_size, stride, count))
    };
    assert_eq!(
        new(0, 0, 0, 0),
        (ErrorKind::Argument, "page_size is 0; a page has at least one row".to_owned())
    );
    let text = "pieces of 192 bytes overlap when they lie 191 bytes apart";
    assert_eq!(new(1000, 4, 191, 2), (ErrorKind::Argument, text.to_owned()));
    let text = "192 bytes at 192 are outside a region of 383 bytes";
    assert_eq!(new(383, 4, 192, 2), (ErrorKind::Index, text.to_owned()));
    let text = "2147483648 pieces are more than int32 can name";
    assert_eq!(new(1000, 4, 192, 1 << 31), (ErrorKind::Argument, text.to_owned()));
    for count in [0, 1, 3] {
        assert_eq!(new(1000, 4, usize::MAX, count).0, ErrorKind::Argument);
    }
    assert_eq!(new(1000, usize::MAX, 192, 1).0, ErrorKind::Argument);
    assert_eq!(new(1000, usize::MAX / 16, 192, 1).0, ErrorKind::Argument);
    let of_the_pool = Pieces::new(Arc::clone(&tier.pool), HostAccess::Copied, &tier.rows, 4, 192, 1);
    let text = "pieces lie in the memory of the pool that they are copied from";
    assert_eq!(refused(of_the_pool), (ErrorKind::Argument, text.to_owned()));
    // One piece needs no stride, none needs no memory.
    for (bytes, stride, count) in [(192, 0, 1), (0, 192, 0)] {
        let memory = Arc::new(Region::new(Arc::new(Host), bytes).expect("memory"));
        let pieces = Pieces::new(memory, HostAccess::Copied, &tier.rows, 4, stride, count).expect("fits");
        assert_eq!((pieces.count(), pieces.stride(), pieces.reach()), (count, stride, HostAccess::Copied));
    }
    assert_eq!(refused(tier.pieces.bytes_of(5, &(0..1))).0, ErrorKind::Index);
    assert_eq!(refused(tier.pieces.bytes_of(4, &(0..3))).0, ErrorKind::Index);
}

#[test]
fn pieces_of_other_rows_are_refused() {
    let mut draws = Draws::new(3);
    let tier = Tier::new(&mut draws, SMALL, &host(), &host(), HostAccess::Copied);
    let pairs = [PagePair { page: Page::new(0), piece: ChunkId::new(0) }];
    for other in
        [Shape { layers: 3, ..SMALL }, Shape { row_bytes: [8, 16], ..SMALL }, Shape { rows: 27, ..SMALL }]
    {
        let other = Tier::new(&mut draws, other, &host(), &host(), HostAccess::Copied);
        let copied = tier.executor.copy_pages(&other.rows, &tier.pieces, PageCopy::Out, &pairs, 0..1, STREAM);
        assert_eq!(refused(copied).0, ErrorKind::Argument);
    }
    // Rows that do not differ fit.
    let twin = Tier::new(&mut draws, SMALL, &host(), &host(), HostAccess::Copied);
    tier.executor.copy_pages(&twin.rows, &tier.pieces, PageCopy::Out, &pairs, 0..2, STREAM).expect("fits");
    let first: &RowBuffer = &twin.rows.all()[0];
    let expected = contents::read::<i32>(first.region(), first.offset(), 16);
    assert_eq!(contents::read::<i32>(tier.pieces.region(), 0, 16), expected);
}
