//! Single structures against models too simple to be wrong; whole pools are in `histories`.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use kvpool::base::{ErrorKind, Id, IndexVec, Page};
use kvpool::index::{
    AddressSpace, BadFree, Bitmap, FreeList, LastLoc, Move, OnBadFree, Order, Rounding, Run, SlotAllocator,
    SlotList, ascending_runs, plan_moves,
};
use proptest::prelude::*;

fn narrow(slots: &[i64], wide: bool) -> IndexVec {
    if wide {
        IndexVec::I64(slots.to_vec())
    } else {
        IndexVec::I32(slots.iter().map(|&slot| i32::try_from(slot).expect("small")).collect())
    }
}

#[test]
fn a_list_that_ends_beyond_32_bits_is_refused() {
    for count in [1, u32::MAX] {
        let error = FreeList::<Page>::new(u32::MAX, count, Order::Sorted).expect_err("beyond");
        assert_eq!(error.kind(), ErrorKind::Config);
    }
}

/// The first free range of `bytes` in a naive space, which knows of each byte whether it is free.
fn first_fit(free: &[bool], bytes: usize) -> Option<Range<usize>> {
    let fits =
        |start: &usize| free[*start..].len() >= bytes && free[*start..start + bytes].iter().all(|&it| it);
    (0..free.len()).find(fits).map(|start| start..start + bytes)
}

#[derive(Clone, Debug)]
enum Use {
    Take(usize),
    TakeMany(usize, usize),
    /// One of the ranges that were taken, with what touches it up to a number of bytes.
    GiveBack(usize, usize),
    /// A range that need not have been taken.
    GiveBackAny(usize, usize),
    Grow(usize),
}

fn any_use() -> impl Strategy<Value = Use> {
    prop_oneof![
        5 => (0..40_usize).prop_map(Use::Take),
        2 => (0..9_usize, 0..100_usize).prop_map(|(bytes, count)| Use::TakeMany(bytes, count)),
        7 => (0..1000_usize, 0..80_usize).prop_map(|(number, bytes)| Use::GiveBack(number, bytes)),
        1 => (0..700_usize, 0..60_usize).prop_map(|(start, bytes)| Use::GiveBackAny(start, bytes)),
        1 => (0..60_usize).prop_map(Use::Grow),
    ]
}

fn signed(start: usize) -> i64 {
    i64::try_from(start).expect("small")
}

fn check_moves(dst: &[u32], src: &[u32]) -> Result<(), TestCaseError> {
    let before: Vec<u32> = (100..180).collect();
    let mut expected = before.clone();
    for (dst, src) in dst.iter().zip(src) {
        expected[*dst as usize] = before[*src as usize];
    }
    let mut rows = before;
    for step in plan_moves(dst, src).expect("memory") {
        match step {
            Move::Copy { dst, src } => rows[dst as usize] = rows[src as usize],
            Move::Swap(a, b) => {
                prop_assert_ne!(a, b);
                rows.swap(a as usize, b as usize);
            }
        }
    }
    prop_assert_eq!(rows, expected);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, ..ProptestConfig::default() })]

    #[test]
    fn many_gaps_are_those_of_a_naive_space(order in Just((0..400_usize).collect::<Vec<_>>()).prop_shuffle()) {
        let mut space = AddressSpace::new(800, 1).unwrap();
        prop_assert_eq!(space.take_many(1, 800).unwrap().map(|starts| starts.len()), Some(800));
        let mut free = vec![false; 800];
        // Every second byte: gaps in several groups, which are divided.
        for &at in &order {
            space.give_back(2 * at..2 * at + 1).unwrap();
            free[2 * at] = true;
        }
        prop_assert_eq!(space.broken_invariant(), None);
        // Some become longer, and are found.
        for &at in order.iter().take(200) {
            space.give_back(2 * at + 1..2 * at + 2).unwrap();
            free[2 * at + 1] = true;
            let expected = first_fit(&free, 1 + at % 6);
            prop_assert_eq!(space.take(1 + at % 6), expected.clone());
            if let Some(range) = expected {
                free[range].fill(false);
            }
            prop_assert_eq!(space.broken_invariant(), None);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn ranges_are_those_of_a_naive_space(
        uses in prop::collection::vec(any_use(), 1..200),
        alignment in prop::sample::select(vec![1_usize, 4]),
    ) {
        let mut space = AddressSpace::new(500, alignment).unwrap();
        let mut free = vec![true; 500];
        let mut taken: Vec<Range<usize>> = Vec::new();
        let round = |bytes: usize| bytes.max(1).next_multiple_of(alignment);
        for step in uses {
            match step {
                Use::Take(bytes) => {
                    let expected = first_fit(&free, round(bytes));
                    prop_assert_eq!(space.take(bytes), expected.clone());
                    taken.extend(expected.inspect(|range| free[range.clone()].fill(false)));
                }
                Use::TakeMany(bytes, count) => {
                    let mut after = free.clone();
                    let found: Option<Vec<_>> = (0..count)
                        .map(|_| {
                            first_fit(&after, round(bytes)).inspect(|range| after[range.clone()].fill(false))
                        })
                        .collect();
                    let starts = found.as_ref().map(|found| found.iter().map(|range| range.start).collect());
                    prop_assert_eq!(space.take_many(bytes, count).unwrap(), starts);
                    if let Some(found) = found {
                        free = after;
                        taken.extend(found);
                    }
                }
                Use::GiveBack(number, most) => if !taken.is_empty() {
                    taken.sort_by_key(|range| range.start);
                    let at = number % taken.len();
                    let mut range = taken.remove(at);
                    while range.len() < most && taken.get(at).is_some_and(|next| next.start == range.end) {
                        range.end = taken.remove(at).end;
                    }
                    free[range.clone()].fill(true);
                    let again = space.refused(&[range.start; 2], range.len());
                    prop_assert_eq!(again.first(), [(signed(range.start), BadFree::AlreadyFree)]);
                    prop_assert_eq!(space.give_back_many(&[range.start], range.len()).dropped(), 0);
                },
                Use::GiveBackAny(start, bytes) => {
                    let range = start..start + bytes;
                    let expected = if bytes == 0 || range.end > free.len() {
                        Err(BadFree::OutOfRange)
                    } else if free[range.clone()].contains(&true) {
                        Err(BadFree::AlreadyFree)
                    } else {
                        continue; // a part of what somebody has
                    };
                    prop_assert_eq!(space.give_back(range.clone()), expected);
                    let before = space.dropped_frees();
                    let bad = space.give_back_many(&[start; 2], bytes);
                    prop_assert_eq!(bad.first(), expected.map_err(|reason| [(signed(start), reason); 2]).unwrap_err());
                    prop_assert_eq!(space.refused(&[start; 2], bytes), bad);
                    prop_assert_eq!(space.dropped_frees(), before + 2);
                }
                Use::Grow(bytes) => {
                    space.grow(bytes).unwrap();
                    free.resize(free.len() + bytes, true);
                }
            }
            prop_assert_eq!(space.broken_invariant(), None);
            let used = free.iter().filter(|&&it| !it).count();
            prop_assert_eq!((space.used(), space.capacity()), (used, free.len()));
            let longest = free.split(|&it| !it).map(<[bool]>::len).max().unwrap_or(0);
            prop_assert_eq!(space.longest(), longest);
        }
    }

    #[test]
    fn an_address_beyond_63_bits_is_refused(capacity in 0..1000_usize) {
        prop_assert!(AddressSpace::new(usize::MAX - capacity, 1).is_err());
        prop_assert!(AddressSpace::new(capacity, 3).is_err());
        let mut space = AddressSpace::new(capacity, 256).unwrap();
        prop_assert!(space.grow(usize::MAX).is_err());
        prop_assert_eq!(space.take(usize::MAX), None);
        prop_assert_eq!(space.take_many(usize::MAX, 1).unwrap(), None);
        let mut vast = AddressSpace::new(1 << 62, 1).unwrap();
        prop_assert!(vast.take_many(1, 1 << 61).is_err());
        prop_assert_eq!(vast.used(), 0);
        prop_assert_eq!((space.capacity(), space.broken_invariant()), (capacity, None));
    }

    #[test]
    fn extend_continues_pages(
        prefixes in prop::collection::vec((0..40usize, 0..40usize), 1..8),
        page_size in prop::sample::select(vec![1usize, 3, 4, 16]),
    ) {
        let mut slots = SlotAllocator::new(2000, page_size, Order::Sorted).unwrap();
        let mut held: Vec<Vec<i32>> = Vec::new();
        for (prefix, _) in &prefixes {
            held.push(slots.alloc(*prefix).unwrap().unwrap());
        }
        let int = |n: usize| i64::try_from(n).expect("small");
        let prefix: Vec<i64> = prefixes.iter().map(|(prefix, _)| int(*prefix)).collect();
        let seq: Vec<i64> = prefixes.iter().map(|(prefix, more)| int(prefix + more)).collect();
        let last: Vec<i64> = held.iter().map(|slots| slots.last().map_or(-1, |&slot| i64::from(slot))).collect();
        let before = slots.clone();
        let extension = slots.extend::<i32>(&prefix, &seq, LastLoc::Known(&last)).unwrap().unwrap();
        for last in [LastLoc::Known(&last), LastLoc::OnDevice(last.len())] {
            let mut list = SlotList::default();
            let listed = before.clone().extend::<i32>(&prefix, &seq, last).unwrap().unwrap();
            let continued = before.clone().extend_runs(&prefix, &seq, last, &mut list).unwrap().unwrap();
            prop_assert_eq!(list.iter().map(u32::cast_signed).collect::<Vec<_>>(), listed.slots);
            prop_assert_eq!(continued, listed.continued);
        }
        let mut undone = slots.clone();
        undone.undo(&extension.slots, &extension.continued);
        prop_assert_eq!(undone.broken_invariant(), None);
        prop_assert_eq!(undone.available(), before.available());
        for held in &held {
            let held = IndexVec::I32(held.clone());
            prop_assert!(undone.is_allocated(&held).all(|live| live));
        }
        let mut fresh = extension.slots.into_iter();
        for (held, (_, more)) in held.iter_mut().zip(&prefixes) {
            held.extend(fresh.by_ref().take(*more));
        }
        prop_assert_eq!(fresh.next(), None);
        // Every request fills whole pages in order, and no slot has another owner.
        let mut seen = BTreeSet::new();
        for held in &held {
            for (position, &slot) in held.iter().enumerate() {
                prop_assert!(seen.insert(slot));
                let slot = usize::try_from(slot).expect("positive");
                prop_assert_eq!(slot % page_size, position % page_size);
                if position % page_size > 0 {
                    prop_assert_eq!(slot, usize::try_from(held[position - 1]).expect("positive") + 1);
                }
            }
        }
        let pages: usize = held.iter().map(|held| held.len().div_ceil(page_size)).sum();
        prop_assert_eq!(slots.stats().in_use, pages * page_size);
    }

    #[test]
    fn moves_read_before_they_write(
        pairs in prop::collection::vec((0..12u32, 0..12u32), 0..40),
        rows in Just((0..80u32).collect::<Vec<_>>()).prop_shuffle(),
        apart in 0..40usize,
        again in prop::option::of((0..40usize, 0..80usize)),
    ) {
        let (dst, src): (Vec<u32>, Vec<u32>) = pairs.into_iter().unzip();
        check_moves(&dst, &src)?;
        // Distinct rows, perhaps but for one.
        let (dst, mut src) = (&rows[..apart], rows[40..40 + apart].to_vec());
        if let Some((at, row)) = again && at < apart {
            src[at] = rows[row];
        }
        check_moves(dst, &src)?;
        check_moves(&src, dst)?;
    }

    #[test]
    fn runs_cover_their_input(values in prop::collection::vec(-5..40i64, 0..100), wide in any::<bool>()) {
        let sorted = { let mut sorted = values.clone(); sorted.sort_unstable(); sorted.dedup(); sorted };
        for values in [values, sorted, (0..77).collect()] {
            let runs = ascending_runs(&narrow(&values, wide)).unwrap();
            let mut back = Vec::new();
            for pair in runs.chunks(2) {
                // Maximal: a run never continues the previous one.
                prop_assert_ne!(back.last().map(|last| last + 1), Some(i64::from(pair[0])));
                back.extend((i64::from(pair[0])..).take(usize::try_from(pair[1]).expect("positive")));
            }
            prop_assert_eq!(back, values);
        }
    }

    /// Histories of whole pools are small; here slots span thousands of words.
    #[test]
    fn scattered_slots_are_handed_out_lowest_first(
        steps in prop::collection::vec((0..3000usize, 1..200usize, any::<bool>(), any::<bool>()), 1..20),
        order in prop::sample::select(vec![Order::Sorted, Order::Fifo]),
    ) {
        const SIZE: i32 = 20_000;
        let mut slots = SlotAllocator::new(20_000, 1, order).unwrap();
        let (mut free, mut released): (VecDeque<i32>, BTreeSet<i32>) = ((1..=SIZE).collect(), BTreeSet::new());
        let mut held: Vec<i32> = Vec::new();
        for (count, step, is_strict, is_reversed) in steps {
            if count > free.len() && order == Order::Sorted {
                released.extend(free.drain(..));
                free.extend(std::mem::take(&mut released));
            }
            let taken = slots.alloc::<i32>(count).unwrap();
            let expected = (count <= free.len()).then(|| free.drain(..count).collect::<Vec<_>>());
            prop_assert_eq!(&taken, &expected);
            held.extend(taken.into_iter().flatten());
            let mut given: Vec<i32> = held.iter().copied().step_by(step).collect();
            if is_reversed {
                given.reverse();
            }
            // One slot too many, so a strict pool frees none.
            given.extend(given.first().copied());
            let answer = slots.free(&IndexVec::I32(given.clone()), OnBadFree::of(is_strict));
            prop_assert_eq!(answer.is_err(), is_strict && !given.is_empty());
            prop_assert_eq!(slots.broken_invariant(), None);
            if answer.is_ok() {
                given.pop();
                let gone: BTreeSet<i32> = given.iter().copied().collect();
                held.retain(|slot| !gone.contains(slot));
                match order {
                    Order::Sorted => released.extend(given),
                    Order::Fifo => free.extend(given),
                }
            }
            prop_assert_eq!(slots.available(), free.len() + released.len());
        }
    }

    #[test]
    fn page_runs_are_counted(
        steps in prop::collection::vec((0..5u8, prop::collection::vec((0..70u32, 1..40u32), 1..4)), 1..30),
        page_size in prop::sample::select(vec![1usize, 4]),
    ) {
        let mut slots = SlotAllocator::new(80 * page_size, page_size, Order::Sorted).unwrap();
        // The owners by page, and the number of them that a fence keeps.
        let (mut owners, mut pending) = ([0u32; 81], [0u32; 81]);
        let mut fences = Vec::new();
        for (act, runs) in steps {
            let runs: Vec<Run<Page>> = runs.iter().map(|&(start, len)| Run { start: Page::new(start), len }).collect();
            let pages: Vec<usize> = runs
                .iter()
                .flat_map(|run| run.start.number()..run.start.number() + run.len)
                .map(|page| page as usize)
                .collect();
            let stays = |page: usize, owners: &[u32; 81], pending: &[u32; 81]| owners[page].saturating_sub(pending[page]);
            match act {
                0 => for slot in slots.alloc::<i32>(pages.len() * page_size).unwrap().unwrap_or_default() {
                    owners[usize::try_from(slot).expect("positive") / page_size] = 1;
                },
                1 => {
                    let is_right = pages.iter().all(|&page| page <= 80 && stays(page, &owners, &pending) > 0);
                    prop_assert_eq!(slots.retain(&runs).is_ok(), is_right);
                    pages.iter().filter(|_| is_right).for_each(|&page| owners[page] += 1);
                }
                2 => for (fence, pages) in fences.drain(..) {
                    slots.fence_passed(fence);
                    for page in pages {
                        let page: usize = page;
                        owners[page] -= 1;
                        pending[page] -= 1;
                    }
                },
                _ => {
                    let named = |page: usize| u32::try_from(pages.iter().filter(|&&other| other == page).count()).expect("few");
                    let is_right = pages.iter().all(|&page| page <= 80 && stays(page, &owners, &pending) >= named(page));
                    let fence = (act == 4).then(|| slots.new_fence());
                    prop_assert_eq!(slots.release(&runs, fence).is_ok(), is_right);
                    if is_right && let Some(fence) = fence {
                        for &page in &pages {
                            pending[page] += 1;
                        }
                        fences.push((fence, pages));
                    } else if is_right {
                        for &page in &pages {
                            owners[page] -= 1;
                        }
                    }
                }
            }
            prop_assert_eq!(slots.broken_invariant(), None);
            let free = owners[1..].iter().filter(|&&owners| owners == 0).count();
            prop_assert_eq!(slots.available(), free * page_size);
        }
    }

    #[test]
    fn a_bitmap_is_a_set(steps in prop::collection::vec((any::<bool>(), 0..9000usize, 0..300usize), 0..40)) {
        let mut bitmap = Bitmap::new(10_000).unwrap();
        let mut set = BTreeSet::new();
        for (insert, start, len) in steps {
            if insert {
                bitmap.insert_run(start, len);
                set.extend(start..start + len);
            } else {
                bitmap.remove_run(start, len);
                set.retain(|member| !(start..start + len).contains(member));
            }
            prop_assert!(bitmap.is_consistent());
            prop_assert_eq!(bitmap.len(), set.len());
            let members: Vec<usize> = bitmap.runs().flat_map(|(start, len)| start..start + len).collect();
            prop_assert!(members.iter().eq(set.iter()));
            prop_assert_eq!(bitmap.contains(start), set.contains(&start));
        }
        bitmap.clear();
        prop_assert!(bitmap.is_empty() && bitmap.is_consistent());
    }
}

#[test]
fn released_pages_are_merged_when_free_ones_are_short() {
    let mut slots = SlotAllocator::new(8, 2, Order::Sorted).unwrap();
    let taken = IndexVec::I32(slots.alloc(4).unwrap().unwrap());
    assert_eq!(slots.free(&taken, OnBadFree::Fail).unwrap().dropped(), 0);
    assert_eq!([4, 5, 8, 9].map(|count| slots.merges_for(count)), [false, true, true, true]);
    slots.merge();
    assert_eq!([8, 9].map(|count| slots.merges_for(count)), [false, true]);
}

#[test]
fn no_batch_gets_more_slots_than_there_are() {
    // The slots of the last tokens, which the host does not know, cannot all be in pages of their own.
    let mut slots = SlotAllocator::new(4, 4, Order::Sorted).unwrap();
    let mut extend = |count: usize| {
        let last = LastLoc::OnDevice(count);
        slots.extend::<i32>(&vec![1; count], &vec![4; count], last).unwrap().map(|new| new.slots.len())
    };
    assert_eq!([extend(1), extend(2)], [Some(3), None]);
}

#[test]
fn extremes_of_runs() {
    let runs = |values: IndexVec| ascending_runs(&values);
    assert_eq!(runs(IndexVec::I32(vec![i32::MAX, i32::MIN])).unwrap(), [i32::MAX, 1, i32::MIN, 1]);
    assert!(runs(IndexVec::I64(vec![i64::MAX])).is_err());
    assert!(runs(IndexVec::I64(vec![i64::MIN])).is_err());
    let to_the_end: Vec<i32> = (0..40).map(|step| i32::MAX - 39 + step).collect();
    assert_eq!(runs(IndexVec::I32(to_the_end)).unwrap(), [i32::MAX - 39, 40]);
    let wide: Vec<i64> = (0..40).map(|step| i64::MAX - 39 + step).collect();
    assert!(runs(IndexVec::I64(wide)).is_err());
}

#[test]
fn extremes_are_dropped() {
    let mut slots = SlotAllocator::new(100, 1, Order::Sorted).unwrap();
    let _ = slots.alloc::<i32>(100).unwrap();
    let odd = vec![i64::MIN, i64::MIN + 1, -1, 0, 101, i64::MAX - 1, i64::MAX];
    let bad = slots.free(&IndexVec::I64(odd), OnBadFree::Report).unwrap();
    assert_eq!((bad.dropped(), slots.available()), (7, 0));
    let bad = slots.free(&IndexVec::I64((-50..150).collect()), OnBadFree::Report).unwrap();
    assert_eq!((bad.dropped(), slots.available()), (100, 100));
}

#[test]
fn buckets_are_the_smallest_that_hold_the_bytes() {
    for (rounding, sizes) in [(Rounding::Pow2, 1), (Rounding::Fine, 4)] {
        let of = |exponent: u32, step: u128| ((1u128 << exponent) * (sizes + step)).div_ceil(sizes);
        let known: Vec<u128> = (0..63)
            .flat_map(|exponent| (0..sizes).map(move |step| (exponent, step)))
            .map(|(exponent, step)| of(exponent, step))
            .collect();
        let around = (3..62).flat_map(|exponent| (1usize << exponent) - 2..(1usize << exponent) + 3);
        for bytes in (0..5000).chain(around) {
            let least = known.iter().copied().filter(|&size| size >= bytes.max(1) as u128).min();
            let bucket = rounding.bucket(bytes).expect("one so large").bytes();
            assert_eq!(Some(bucket as u128), least, "{bytes} bytes, {rounding:?}");
        }
        assert!(rounding.bucket(usize::MAX).is_err());
    }
}
