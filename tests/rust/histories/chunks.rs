//! The chunk pool: references to chunks, and copies in and out of them.

use std::sync::Arc;
use std::time::Duration;

use kvpool::base::{ChunkId, DType, Dims, ErrorKind, Id};
use kvpool::index::IndexHandle;
use kvpool::kernels::Direction;
use kvpool::memory::{Host, Region};
use kvpool::pool::{Attempt, ChunkConfig, ChunkPool};

use super::{STREAM, Source, agree, bytes_of, dims, ensure, host, int, refused, size};

struct Model {
    /// Every chunk ever taken, with its references.
    given: Vec<(IndexHandle<ChunkId>, u32)>,
    /// Free chunks, the next one at the end.
    free: Vec<usize>,
    /// The contents by chunk.
    bytes: Vec<Vec<u8>>,
    dropped: usize,
    /// Makes the contents of every copy different.
    copies: u8,
}

/// The most handles to keep.
const KEPT: usize = 64;

pub(super) fn run(source: &mut Source<'_>) {
    let shape = source.of(&[[2, 3], [1, 1], [4, 8], [3, 85]]);
    let config = ChunkConfig {
        num_chunks: 1 + source.below(12),
        chunk_shape: shape.to_vec(),
        dtype: source.of(&[DType::F16, DType::U8]),
        pin_memory: false,
        page_lock_threads: 2,
        strict: source.rarely(3),
    };
    let pool = ChunkPool::new(&config, &host()).expect("memory");
    let count = pool.config().num_chunks;
    let mut model = Model {
        given: Vec::new(),
        free: (0..count).rev().collect(),
        bytes: vec![vec![0; pool.chunk_bytes()]; count],
        dropped: 0,
        copies: 0,
    };
    while source.next_step() {
        step(source, &pool, &mut model);
        check(&pool, &model);
    }
}

fn step(source: &mut Source<'_>, pool: &ChunkPool, model: &mut Model) {
    let at = source.below(model.given.len().max(1));
    match source.below(16) {
        0..=3 => take(source, pool, model),
        _ if model.given.is_empty() => (),
        4..=6 => {
            let (handle, references) = &mut model.given[at];
            agree(pool.retain(*handle), &ensure(*references > 0, ErrorKind::Stale));
            *references += u32::from(*references > 0);
        }
        7..=11 => give_up(source, pool, model, at),
        12 => {
            let (handle, _) = model.given[at];
            let expected = ensure(!pool.config().strict, ErrorKind::IndexOwnership);
            let answer = agree(pool.free_foreign(handle), &expected);
            model.dropped += answer.map_or(0, |bad| bad.dropped());
        }
        _ => copy(source, pool, model, at),
    }
}

fn take(source: &mut Source<'_>, pool: &ChunkPool, model: &mut Model) {
    let count = if source.rarely(16) { usize::MAX } else { source.below(5) };
    let attempt = match source.below(3) {
        0 => pool.allocate(count, Duration::ZERO),
        _ => pool.try_allocate(count),
    };
    let expected = (count <= model.free.len()).then(|| model.free.split_off(model.free.len() - count));
    match (attempt.expect("host memory"), expected) {
        (Attempt::Taken(handles), Some(mut expected)) => {
            expected.reverse();
            assert!(handles.iter().map(|handle| size(handle.index().number())).eq(expected));
            model.given.extend(handles.into_iter().map(|handle| (handle, 1)));
            while model.given.len() > KEPT
                && let Some(old) = model.given.iter().position(|(_, references)| *references == 0)
            {
                model.given.remove(old);
            }
        }
        (attempt, expected) => assert_eq!((attempt, expected), (Attempt::Full, None)),
    }
}

fn give_up(source: &mut Source<'_>, pool: &ChunkPool, model: &mut Model, at: usize) {
    let is_free = source.flip();
    let (handle, references) = &mut model.given[at];
    let is_right = if is_free { *references == 1 } else { *references > 0 };
    let answer = if is_free { pool.free(*handle) } else { pool.release(*handle) };
    let expected = ensure(is_right || !pool.config().strict, ErrorKind::IndexOwnership);
    let Some(bad) = agree(answer, &expected) else { return };
    assert_eq!(bad.dropped(), usize::from(!is_right));
    model.dropped += bad.dropped();
    if is_right {
        *references -= 1;
        if *references == 0 {
            model.free.push(size(handle.index().number()));
        }
    }
}

/// Copies a tensor, which may be transposed or have gaps, in or out.
fn copy(source: &mut Source<'_>, pool: &ChunkPool, model: &mut Model, at: usize) {
    let (handle, references) = model.given[at];
    let dtype = if source.rarely(16) { DType::F32 } else { pool.config().dtype };
    let [rows, columns] = [source.below(5), source.below(9)];
    let (gap, is_turned, is_flat) = (source.below(3), source.flip(), source.rarely(8));
    let wide = columns + gap;
    let strides = if is_flat {
        [0, 1]
    } else if is_turned {
        [1, rows]
    } else {
        [wide, 1]
    };
    let room = (wide + rows) * (rows + columns + 1) * dtype.size();
    let region = Region::new(Arc::new(Host), room).expect("memory");
    model.copies = model.copies.wrapping_add(1);
    let filled: Vec<u8> = (0..room).map(|at| at.to_le_bytes()[0].wrapping_add(model.copies)).collect();
    let whole = region.bytes_at(0, room).expect("inside");
    // SAFETY: the region is live, as long as the vector, and only this call uses it.
    unsafe { whole.address().as_ptr().copy_from_nonoverlapping(filled.as_ptr(), room) };
    let tensor = region.borrow(0, dtype, dims(&[rows, columns]), dims(&strides)).expect("inside");
    let direction = if source.flip() { Direction::Pack } else { Direction::Unpack };
    let element = dtype.size();
    let fits = rows * columns * element <= pool.chunk_bytes();
    let on_top =
        direction == Direction::Unpack && ((rows > 1 && strides[0] == 0) || (columns > 1 && strides[1] == 0));
    let right = ensure(dtype == pool.config().dtype, ErrorKind::Type)
        .and_then(|()| ensure(references > 0, ErrorKind::Stale))
        .and_then(|()| ensure(fits && !on_top, ErrorKind::Argument));
    let mut expected = filled;
    if agree(pool.copy(handle, &tensor, direction, STREAM), &right).is_some() {
        let chunk = &mut model.bytes[size(handle.index().number())];
        for position in 0..rows * columns {
            let lying = (position / columns * strides[0] + position % columns * strides[1]) * element;
            let packed = position * element;
            match direction {
                Direction::Pack => {
                    chunk[packed..packed + element].copy_from_slice(&expected[lying..lying + element]);
                }
                Direction::Unpack => {
                    expected[lying..lying + element].copy_from_slice(&chunk[packed..packed + element]);
                }
            }
        }
    }
    let mut found = vec![0; room];
    // SAFETY: as above.
    unsafe { found.as_mut_ptr().copy_from_nonoverlapping(whole.address().as_ptr(), room) };
    assert_eq!(found, expected);
}

fn check(pool: &ChunkPool, model: &Model) {
    pool.counts(|counts, page_locked| {
        assert_eq!((counts.broken_invariant(), page_locked), (None, 0));
        assert_eq!((counts.available(), counts.ready()), (model.free.len(), model.free.len()));
        assert_eq!(counts.dropped_frees(), model.dropped);
    });
    let element = pool.config().dtype.size();
    for &(handle, references) in &model.given {
        assert_eq!(pool.references(handle), references);
        let view = agree(pool.tensor(handle, None), &ensure(references > 0, ErrorKind::Stale));
        if let Some(view) = view {
            assert_eq!(bytes_of(&view), model.bytes[size(handle.index().number())]);
        }
    }
    if let Some(&(handle, _)) = model.given.iter().find(|(_, references)| *references > 0) {
        for elements in [0, 1, pool.chunk_bytes() / element, pool.chunk_bytes() / element + 1] {
            let view = pool.tensor(handle, Some(dims(&[elements])));
            agree(view, &ensure(elements * element <= pool.chunk_bytes(), ErrorKind::Argument));
        }
        for shape in [&[-1][..], &[int(1 << 62), 4]] {
            refused(pool.tensor(handle, Some(Dims::new(shape).expect("few"))), ErrorKind::Argument);
        }
    }
}
