//! Reference counts, with indices that are withheld at first.

use std::collections::BTreeSet;

use kvpool::base::{ChunkId, Id};
use kvpool::index::{BadFree, IndexHandle, RefCounts, Returning};

use super::{Source, size};

/// Every handle ever handed out with its references, and the indices that can be taken, the next one at the
/// end.
#[derive(Default)]
struct Model {
    capacity: u32,
    /// Indices from here on are withheld.
    offered: u32,
    given: Vec<(IndexHandle<ChunkId>, u32)>,
    /// Freed indices, the last one freed at the end.
    free: Vec<u32>,
    /// Offered and never taken, lowest first.
    fresh: Vec<u32>,
    /// Indices whose last reference was released.
    returning: Vec<Returning<ChunkId>>,
    /// Every index that was ever freed.
    freed: BTreeSet<i64>,
    high_water: usize,
}

/// The most handles to keep: all of them are checked after every step.
const KEPT: usize = 64;

pub(super) fn run(source: &mut Source<'_>) {
    let mut counts = RefCounts::default();
    let mut model = Model::default();
    while source.next_step() {
        step(source, &mut counts, &mut model);
        check(&counts, &model);
    }
}

fn step(source: &mut Source<'_>, counts: &mut RefCounts<ChunkId>, model: &mut Model) {
    let at = source.below(model.given.len().max(1));
    match source.below(16) {
        0 if model.capacity < 40 => {
            let more = u32::try_from(source.below(8)).expect("small");
            counts.extend(more).expect("room");
            model.capacity += more;
        }
        1 | 2 => {
            let end = model.capacity.min(model.offered + u32::try_from(source.below(8)).expect("small"));
            counts.offer(model.offered..end);
            model.fresh.extend(model.offered..end);
            model.offered = end;
        }
        3..=6 => {
            let taken = counts.take();
            let expected = match model.free.pop() {
                None if !model.fresh.is_empty() => Some(model.fresh.remove(0)),
                last => last,
            };
            assert_eq!(taken.map(|handle| handle.index().number()), expected);
            model.given.extend(taken.map(|handle| (handle, 1)));
            model.high_water = model.high_water.max(in_use(model));
            if model.given.len() > KEPT {
                let old = model.given.iter().position(|(_, references)| *references == 0);
                old.map(|old| model.given.remove(old));
            }
        }
        7..=9 if !model.given.is_empty() => {
            let (handle, references) = &mut model.given[at];
            assert_eq!(counts.retain(*handle), *references > 0);
            *references += u32::from(*references > 0);
        }
        10..=13 if !model.given.is_empty() => {
            let (handle, references) = &mut model.given[at];
            let answer = counts.release(*handle);
            let is_last = answer.as_ref().map(Option::is_some).map_err(|reason| *reason);
            let expected = if *references > 0 { Ok(*references == 1) } else { Err(BadFree::AlreadyFree) };
            assert_eq!(is_last, expected);
            if is_last == Ok(true) {
                model.freed.insert(i64::from(handle.index().number()));
            }
            model.returning.extend(answer.ok().flatten());
            *references = references.saturating_sub(1);
        }
        _ if !model.returning.is_empty() => {
            let returning = model.returning.swap_remove(source.below(model.returning.len()));
            model.free.push(returning.index().number());
            counts.give_back(returning);
        }
        _ => counts.count_dropped(),
    }
}

/// The number of indices taken or returning.
fn in_use(model: &Model) -> usize {
    model.given.iter().filter(|(_, references)| *references > 0).count() + model.returning.len()
}

fn check(counts: &RefCounts<ChunkId>, model: &Model) {
    assert_eq!(counts.broken_invariant(), None);
    assert_eq!(counts.capacity(), size(model.capacity));
    assert_eq!(counts.in_use(), in_use(model));
    assert_eq!(counts.available() + counts.in_use(), counts.capacity());
    assert_eq!(counts.ready(), model.free.len() + model.fresh.len());
    assert_eq!(counts.high_water(), model.high_water);
    for &(handle, references) in &model.given {
        assert_eq!(counts.references(handle), references);
        if references > 0 {
            assert_eq!(counts.handle(handle.index()), Some(handle));
        }
    }
    for index in -1..=i64::from(model.capacity) {
        let references = model
            .given
            .iter()
            .find(|(handle, left)| *left > 0 && i64::from(handle.index().number()) == index);
        let expected = match references {
            _ if !(0..i64::from(model.capacity)).contains(&index) => Some(BadFree::OutOfRange),
            Some((_, 1)) => None,
            Some(_) => Some(BadFree::StillReferenced),
            None if model.freed.contains(&index) => Some(BadFree::AlreadyFree),
            None => Some(BadFree::NotAllocated),
        };
        assert_eq!(counts.reason(index), expected);
    }
}
