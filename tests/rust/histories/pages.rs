//! The growing page pool: pages have one owner, and keep their bytes and addresses.

use kvpool::base::{DType, ErrorKind, Id};
use kvpool::pool::{PageConfig, PagePool};

use super::{Refusal, STREAM, Source, agree, bytes_of, contents, ensure, host, int, size};

struct Model {
    /// Whether each page is in use, its address, and its bytes.
    pages: Vec<(bool, usize, Vec<u8>)>,
    /// Free pages, the next one at the end.
    free: Vec<usize>,
    dropped: usize,
}

pub(super) fn run(source: &mut Source<'_>) {
    let config = PageConfig {
        page_size: 1 + source.below(20),
        initial_pages: source.below(12),
        dtype: source.of(&[DType::F32, DType::U8, DType::BF16]),
        grow: source.of(&[0, 0, 1, 5]),
        strict: source.rarely(3),
    };
    let pool = PagePool::new(&config, &host()).expect("memory");
    let mut model = Model { pages: Vec::new(), free: Vec::new(), dropped: 0 };
    grow(&pool, &mut model, config.initial_pages);
    while source.next_step() {
        step(source, &pool, &mut model);
        check(&pool, &model);
    }
}

/// Adds pages of zeros.
fn grow(pool: &PagePool, model: &mut Model, count: usize) {
    let first = model.pages.len();
    for page in first..first + count {
        let view = pool.page(int(page)).expect("a page");
        let bytes = bytes_of(&view);
        assert!(bytes.iter().all(|&byte| byte == 0));
        model.pages.push((false, view.address().addr(), bytes));
    }
    // The lowest one is taken first.
    let fresh = (first..first + count).rev();
    model.free.splice(0..0, fresh);
}

fn step(source: &mut Source<'_>, pool: &PagePool, model: &mut Model) {
    /// Pools stop growing here, so that checking every page stays cheap.
    const MOST: usize = 40;
    match source.below(8) {
        0..=2 => {
            let is_full = model.free.is_empty();
            if is_full && model.pages.len() > MOST {
                return;
            }
            let taken = pool.alloc(STREAM).expect("memory");
            if is_full {
                grow(pool, model, pool.config().grow);
            }
            let expected = model.free.pop();
            assert_eq!(taken.map(|page| size(page.number())), expected);
            if let Some(page) = expected {
                model.pages[page].0 = true;
            }
        }
        3..=5 => {
            let page = source.index(model.pages.len());
            let live =
                usize::try_from(page).ok().filter(|page| model.pages.get(*page).is_some_and(|page| page.0));
            let is_right = live.is_some() || !pool.config().strict;
            let expected = ensure(is_right, Refusal::at(ErrorKind::IndexOwnership, page));
            let Some(bad) = agree(pool.free(page), &expected) else { return };
            assert_eq!(bad.dropped(), usize::from(live.is_none()));
            model.dropped += bad.dropped();
            if let Some(page) = live {
                model.pages[page].0 = false;
                model.free.push(page);
            }
        }
        _ => {
            let page = source.index(model.pages.len());
            let known = usize::try_from(page).ok().filter(|page| *page < model.pages.len());
            let known = known.ok_or(Refusal::at(ErrorKind::Index, page));
            if let (Some(view), Ok(page)) = (agree(pool.page(page), &known), known) {
                let at = source.below(model.pages[page].2.len());
                contents::fill(view.region(), view.offset() + at, 1, 9);
                model.pages[page].2[at] = 9;
            }
        }
    }
}

fn check(pool: &PagePool, model: &Model) {
    pool.with_pages(|pages| {
        assert_eq!(pages.broken_invariant(), None);
        assert_eq!(pages.capacity(), model.pages.len());
        assert_eq!(pages.available(), model.free.len());
        assert_eq!(pages.dropped_frees(), model.dropped);
    });
    for (page, (_, address, bytes)) in model.pages.iter().enumerate() {
        let view = pool.page(int(page)).expect("a page");
        assert_eq!((view.address().addr(), &bytes_of(&view)), (*address, bytes));
    }
}
