//! Random histories of counted indices, buckets and arenas, misuse included, against naive models.

use std::collections::HashMap;
use std::ops::Range;

use kvpool::base::IndexVec;
use kvpool::index::{Arena, Buckets, FenceId, Order, RefCounts, Rounding, SlotAllocator, Ticket};
use proptest::prelude::*;

const CASES: u32 = 200;

#[derive(Clone, Debug)]
enum Step {
    Take(usize),
    Retain(usize),
    Release(usize),
    Reset,
    Drain,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..5000usize).prop_map(Step::Take),
        2 => (0..64usize).prop_map(Step::Retain),
        6 => (0..64usize).prop_map(Step::Release),
        1 => Just(Step::Reset),
        1 => Just(Step::Drain),
    ];
    proptest::collection::vec(step, 0..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn counted_indices_agree_with_a_model(steps in steps(), offered in 0..20u32) {
        let mut counts = RefCounts::default();
        counts.extend(20).expect("room");
        counts.offer(0..offered);
        // Every ticket that was ever given, with the references that it has.
        let mut given: Vec<(Ticket, u32)> = Vec::new();
        let mut free: Vec<u32> = (0..offered).rev().collect();
        for step in steps {
            match step {
                Step::Take(_) => {
                    let taken = counts.take();
                    prop_assert_eq!(taken.map(Ticket::index), free.pop());
                    given.extend(taken.map(|ticket| (ticket, 1)));
                }
                Step::Retain(at) if !given.is_empty() => {
                    let at = at % given.len();
                    let (ticket, references) = &mut given[at];
                    prop_assert_eq!(counts.retain(*ticket), *references > 0);
                    *references += u32::from(*references > 0);
                }
                Step::Release(at) if !given.is_empty() => {
                    let at = at % given.len();
                    let (ticket, references) = &mut given[at];
                    let answer = counts.release(*ticket);
                    prop_assert_eq!(answer.is_ok(), *references > 0);
                    *references = references.saturating_sub(1);
                    if answer == Ok(true) {
                        prop_assert_eq!(*references, 0);
                        counts.put_back(ticket.index());
                        free.push(ticket.index());
                    }
                }
                _ => (),
            }
            for (ticket, references) in &given {
                prop_assert_eq!(counts.references(*ticket), *references);
            }
            prop_assert_eq!(counts.fault(), None);
            prop_assert_eq!(counts.available() + counts.in_use(), 20);
            prop_assert_eq!(counts.ready(), free.len());
        }
    }

    #[test]
    fn buckets_agree_with_a_model(steps in steps(), fine: bool, lanes in 1..3usize) {
        let rounding = if fine { Rounding::Fine } else { Rounding::Pow2 };
        let mut buckets: Buckets<usize> = Buckets::default();
        let mut live: Vec<(Ticket, usize)> = Vec::new();
        let mut stale: Vec<Ticket> = Vec::new();
        // Free buffers by bytes.
        let mut free: HashMap<usize, usize> = HashMap::new();
        for step in steps {
            match step {
                Step::Take(bytes) => {
                    let bucket = rounding.bucket(bytes).expect("small");
                    prop_assert!(bucket.bytes() >= bytes.max(1) && bucket.bytes() < 2 * bytes.max(1));
                    let count = free.entry(bucket.bytes()).or_default();
                    let reused = buckets.take(bucket, bytes % lanes).map(|reused| reused.ticket);
                    prop_assert_eq!(reused.is_some(), *count > 0);
                    *count = count.saturating_sub(1);
                    let ticket = reused.unwrap_or_else(|| buckets.add(bucket, bytes % lanes));
                    prop_assert!(live.iter().all(|(other, _)| other.index() != ticket.index()));
                    live.push((ticket, bucket.bytes()));
                }
                Step::Release(at) if !live.is_empty() => {
                    let (ticket, bytes) = live.swap_remove(at % live.len());
                    prop_assert!(buckets.release(ticket));
                    *free.entry(bytes).or_default() += 1;
                    stale.push(ticket);
                }
                Step::Reset => {
                    buckets.reset();
                    for (ticket, bytes) in live.drain(..) {
                        *free.entry(bytes).or_default() += 1;
                        stale.push(ticket);
                    }
                }
                Step::Drain => {
                    let drained = buckets.drain_free();
                    prop_assert_eq!(drained.len(), free.values().sum::<usize>());
                    free.clear();
                }
                _ => (),
            }
            for &ticket in &stale {
                prop_assert!(!buckets.is_live(ticket) && !buckets.release(ticket));
            }
            prop_assert!(live.iter().all(|(ticket, _)| buckets.is_live(*ticket)));
            prop_assert_eq!(buckets.in_use_bytes(), live.iter().map(|(_, bytes)| bytes).sum::<usize>());
            prop_assert_eq!(buckets.free_bytes(), free.iter().map(|(bytes, count)| bytes * count).sum::<usize>());
            prop_assert_eq!(buckets.fault(), None);
        }
    }

    #[test]
    fn arenas_agree_with_a_model(steps in steps()) {
        const CAPACITY: usize = 20_100;
        let mut arena = Arena::new(CAPACITY, 256);
        let mut live: Vec<Range<usize>> = Vec::new();
        for step in steps {
            match step {
                Step::Take(bytes) => {
                    let largest = arena.largest();
                    match arena.take(bytes) {
                        Some(range) => {
                            prop_assert!(range.start % 256 == 0 && range.len() >= bytes && range.end <= CAPACITY);
                            prop_assert!(live.iter().all(|other| range.end <= other.start || other.end <= range.start));
                            live.push(range);
                        }
                        None => prop_assert!(largest < bytes.max(1)),
                    }
                }
                Step::Release(at) if !live.is_empty() => arena.give_back(live.swap_remove(at % live.len())),
                Step::Reset => {
                    arena.reset();
                    live.clear();
                }
                _ => (),
            }
            prop_assert_eq!(arena.used(), live.iter().map(Range::len).sum::<usize>());
        }
        live.drain(..).for_each(|range| arena.give_back(range));
        prop_assert_eq!(arena.take(CAPACITY / 256 * 256), Some(0..CAPACITY / 256 * 256));
    }
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

#[derive(Clone, Debug)]
enum Sharing {
    Alloc(usize),
    Share(Vec<i64>),
    Free(Vec<i64>, bool),
    FreeAfter(Vec<i64>),
    Pass(usize),
    Clear,
}

fn sharings() -> impl Strategy<Value = Vec<Sharing>> {
    // Few slots, so that most are named again and again; some that are none.
    let slots = || proptest::collection::vec(-2..44i64, 0..8);
    let step = prop_oneof![
        4 => (0..12usize).prop_map(Sharing::Alloc),
        4 => slots().prop_map(Sharing::Share),
        6 => (slots(), any::<bool>()).prop_map(|(slots, strict)| Sharing::Free(slots, strict)),
        3 => slots().prop_map(Sharing::FreeAfter),
        3 => (0..4usize).prop_map(Sharing::Pass),
        1 => Just(Sharing::Clear),
    ];
    proptest::collection::vec(step, 0..150)
}

/// By page, how many owners stay, and how many leave when their fence has passed.
#[derive(Clone, Debug, Default, PartialEq)]
struct Owned {
    stay: HashMap<i64, usize>,
    leave: Vec<(FenceId, i64)>,
    dropped: usize,
}

impl Owned {
    fn is_in_use(&self, page: i64) -> bool {
        self.stay.get(&page).is_some_and(|owners| *owners > 0)
            || self.leave.iter().any(|(_, leaving)| *leaving == page)
    }

    /// Takes an owner from the page of each slot, and returns the pages.
    fn free(&mut self, slots: &[i64], page_size: i64) -> Vec<i64> {
        let mut named = Vec::new();
        for slot in slots {
            let page = slot.div_euclid(page_size);
            if page_size > 1 && named.contains(&page) {
                continue;
            }
            match self.stay.get_mut(&page) {
                Some(owners) if *owners > 0 => {
                    *owners -= 1;
                    named.push(page);
                }
                _ => self.dropped += 1,
            }
        }
        named
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES * 4))]

    #[test]
    fn shared_slots_agree_with_a_model(steps in sharings(), is_paged in any::<bool>(), is_fifo in any::<bool>()) {
        let page_size = if is_paged { 4 } else { 1 };
        let order = if is_fifo { Order::Fifo } else { Order::Sorted };
        let mut slots = SlotAllocator::new(40, page_size, order).expect("small");
        let page_size = i64::try_from(page_size).expect("small");
        let mut model = Owned::default();
        let mut fences: Vec<FenceId> = Vec::new();
        for step in steps {
            match step {
                Sharing::Alloc(count) => {
                    for slot in slots.alloc(count).expect("room").into_iter().flatten() {
                        let page = i64::from(slot).div_euclid(page_size);
                        prop_assert!(!model.is_in_use(page) || page_size > 1);
                        model.stay.insert(page, 1);
                    }
                }
                Sharing::Share(given) => {
                    let mut pages: Vec<i64> = given.iter().map(|slot| slot.div_euclid(page_size)).collect();
                    if page_size > 1 {
                        pages.sort_unstable();
                        pages.dedup();
                    }
                    let is_right = pages.iter().all(|page| model.stay.get(page).is_some_and(|owners| *owners > 0));
                    prop_assert_eq!(slots.share(&IndexVec::I64(given)).is_ok(), is_right);
                    for page in pages.iter().filter(|_| is_right) {
                        *model.stay.entry(*page).or_default() += 1;
                    }
                }
                Sharing::Free(given, strict) => {
                    let mut after = model.clone();
                    after.free(&given, page_size);
                    let is_refused = strict && after.dropped > model.dropped;
                    prop_assert_eq!(slots.free(&IndexVec::I64(given), strict).is_err(), is_refused);
                    model = if is_refused { model } else { after };
                }
                Sharing::FreeAfter(given) => {
                    let fence = slots.new_fence();
                    let _ = slots.free_after(fence, &IndexVec::I64(given.clone()), false).expect("not strict");
                    let pages = model.free(&given, page_size);
                    model.leave.extend(pages.into_iter().map(|page| (fence, page)));
                    fences.push(fence);
                }
                Sharing::Pass(at) if !fences.is_empty() => {
                    let fence = fences.remove(at % fences.len());
                    slots.fence_passed(fence);
                    model.leave.retain(|(other, _)| *other != fence);
                }
                Sharing::Pass(_) => (),
                Sharing::Clear => {
                    slots.clear();
                    model.stay.clear();
                    model.leave.clear();
                }
            }
            prop_assert_eq!(slots.fault(), None);
            let every: Vec<i64> = (0..44).collect();
            let in_use: Vec<bool> = every.iter().map(|slot| model.is_in_use(slot.div_euclid(page_size))).collect();
            let found: Vec<bool> = slots.is_allocated(&IndexVec::I64(every)).collect();
            prop_assert_eq!(found, in_use);
            prop_assert_eq!(slots.stats().dropped_frees, model.dropped);
            prop_assert_eq!(slots.available() + slots.stats().in_use, 40);
        }
    }
}
