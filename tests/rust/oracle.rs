//! Random histories, misuse included, against models that are too simple to be wrong.

use std::collections::{BTreeSet, VecDeque};

use kvpool::base::IndexVec;
use kvpool::index::{Bitmap, FenceId, Move, Order, RowTable, SlotAllocator, ascending_runs, plan_moves};
use proptest::prelude::*;

/// Free pages as a plain list, live ones as a set.
struct Model {
    page_size: usize,
    pages: usize,
    order: Order,
    free: VecDeque<usize>,
    released: BTreeSet<usize>,
    live: BTreeSet<usize>,
    fenced: Vec<(FenceId, Vec<usize>)>,
    dropped: usize,
}

impl Model {
    fn new(size: usize, page_size: usize, order: Order) -> Self {
        let pages = size / page_size;
        Self {
            page_size,
            pages,
            order,
            free: (1..=pages).collect(),
            released: BTreeSet::new(),
            live: BTreeSet::new(),
            fenced: Vec::new(),
            dropped: 0,
        }
    }

    fn merge(&mut self) {
        if self.order == Order::Sorted {
            let mut all: Vec<usize> = self.free.drain(..).chain(std::mem::take(&mut self.released)).collect();
            all.sort_unstable();
            self.free = all.into();
        }
    }

    fn alloc(&mut self, count: usize) -> Option<Vec<usize>> {
        let pages = count.div_ceil(self.page_size);
        if pages > self.free.len() {
            self.merge();
        }
        if pages > self.free.len() {
            return None;
        }
        let taken: Vec<usize> = self.free.drain(..pages).collect();
        self.live.extend(&taken);
        let slots = taken.iter().flat_map(|page| page * self.page_size..(page + 1) * self.page_size);
        Some(slots.take(count).collect())
    }

    fn contiguous(&mut self, count: usize) -> Option<Vec<usize>> {
        let pages = count.div_ceil(self.page_size);
        let last = self.pages;
        let find = |free: &VecDeque<usize>| {
            let set: BTreeSet<usize> = free.iter().copied().collect();
            (1..=last).find(|start| (*start..start + pages).all(|page| set.contains(&page)))
        };
        if pages == 0 {
            return Some(Vec::new());
        }
        let start = find(&self.free).or_else(|| {
            self.merge();
            find(&self.free)
        })?;
        self.free.retain(|page| !(start..start + pages).contains(page));
        self.live.extend(start..start + pages);
        Some((start * self.page_size..).take(count).collect())
    }

    /// Takes back what is live; says which pages those were.
    fn give(&mut self, slots: &[i64]) -> Vec<usize> {
        let mut pages = Vec::new();
        for &slot in slots {
            let page = usize::try_from(slot).ok().map(|slot| slot / self.page_size);
            match page {
                Some(page) if self.live.remove(&page) => pages.push(page),
                Some(page) if self.page_size > 1 && pages.contains(&page) => (),
                _ => self.dropped += 1,
            }
        }
        if self.page_size > 1 {
            pages.sort_unstable();
        }
        pages
    }

    fn release(&mut self, pages: Vec<usize>) {
        match self.order {
            Order::Sorted => self.released.extend(pages),
            Order::Fifo => self.free.extend(pages),
        }
    }

    fn available(&self) -> usize {
        (self.free.len() + self.released.len()) * self.page_size
    }
}

#[derive(Clone, Debug)]
enum Step {
    Alloc(usize),
    Contiguous(usize),
    /// Frees some of what is live, by position, and some nonsense.
    Free {
        picks: Vec<usize>,
        nonsense: Vec<i64>,
        after: bool,
    },
    FreeStrict {
        picks: Vec<usize>,
        nonsense: Vec<i64>,
    },
    Pass(usize),
    Group(Vec<Vec<usize>>),
    Merge,
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let picks = || prop::collection::vec(0..1000usize, 0..12);
    let nonsense = || prop::collection::vec(-3..200i64, 0..4);
    prop::collection::vec(
        prop_oneof![
            6 => (0..40usize).prop_map(Step::Alloc),
            2 => (0..20usize).prop_map(Step::Contiguous),
            6 => (picks(), nonsense(), any::<bool>())
                .prop_map(|(picks, nonsense, after)| Step::Free { picks, nonsense, after }),
            2 => (picks(), nonsense()).prop_map(|(picks, nonsense)| Step::FreeStrict { picks, nonsense }),
            3 => (0..4usize).prop_map(Step::Pass),
            1 => prop::collection::vec(picks(), 0..3).prop_map(Step::Group),
            1 => Just(Step::Merge),
            1 => Just(Step::Clear),
        ],
        1..60,
    )
}

/// Slots of live pages that `picks` points at.
fn picked(model: &Model, picks: &[usize]) -> Vec<i64> {
    let live: Vec<usize> = model.live.iter().copied().collect();
    if live.is_empty() {
        return Vec::new();
    }
    let slot = |pick: &usize| live[pick % live.len()] * model.page_size + pick % model.page_size;
    picks.iter().map(slot).map(|slot| i64::try_from(slot).expect("small")).collect()
}

fn narrow(slots: &[i64], wide: bool) -> IndexVec {
    if wide {
        IndexVec::I64(slots.to_vec())
    } else {
        IndexVec::I32(slots.iter().map(|&slot| i32::try_from(slot).expect("small")).collect())
    }
}

fn numbers(slots: Option<Vec<i32>>) -> Option<Vec<usize>> {
    slots.map(|slots| slots.into_iter().map(|slot| usize::try_from(slot).expect("positive")).collect())
}

fn apply(step: &Step, slots: &mut SlotAllocator, model: &mut Model) {
    match step {
        Step::Alloc(count) => assert_eq!(numbers(slots.alloc(*count).unwrap()), model.alloc(*count)),
        Step::Contiguous(count) => {
            assert_eq!(numbers(slots.alloc_contiguous(*count).unwrap()), model.contiguous(*count));
        }
        Step::Free { picks, nonsense, after } => {
            let mut given = picked(model, picks);
            given.extend(nonsense);
            let before = model.dropped;
            let pages = model.give(&given);
            let bad = if *after {
                let id = slots.new_fence();
                let bad = slots.free_after(id, &narrow(&given, true), false).unwrap();
                model.fenced.push((id, pages));
                bad
            } else {
                model.release(pages);
                slots.free(&narrow(&given, false), false).unwrap()
            };
            assert_eq!(bad.dropped(), model.dropped - before);
        }
        Step::FreeStrict { picks, nonsense } => {
            let mut given = picked(model, picks);
            given.extend(nonsense);
            let (live, dropped) = (model.live.clone(), model.dropped);
            let pages = model.give(&given);
            if model.dropped == dropped {
                model.release(pages);
                assert_eq!(slots.free(&narrow(&given, false), true).unwrap().dropped(), 0);
            } else {
                (model.live, model.dropped) = (live, dropped);
                assert!(slots.free(&narrow(&given, false), true).is_err());
            }
        }
        Step::Pass(which) => {
            if *which < model.fenced.len() {
                let (id, pages) = model.fenced.remove(*which);
                model.release(pages);
                slots.fence_passed(id);
                slots.fence_passed(id);
            }
        }
        Step::Group(frees) => {
            slots.group_begin();
            let mut all = Vec::new();
            for picks in frees {
                let given = picked(model, picks);
                slots.group_begin();
                assert_eq!(slots.free(&narrow(&given, false), false).unwrap().dropped(), 0);
                assert!(slots.group_end().unwrap().is_none());
                all.extend(given);
            }
            let before = model.dropped;
            let pages = model.give(&all);
            model.release(pages);
            let given = slots.group_end().unwrap().unwrap();
            let bad = slots.free_now(&given, false).unwrap();
            assert_eq!((given.len(), bad.dropped()), (all.len(), model.dropped - before));
        }
        Step::Merge => {
            slots.merge();
            model.merge();
        }
        Step::Clear => {
            slots.clear();
            let dropped = model.dropped;
            *model = Model::new(slots.size(), model.page_size, model.order);
            model.dropped = dropped;
        }
    }
}

fn check(slots: &SlotAllocator, model: &Model) {
    assert_eq!(slots.fault(), None);
    let stats = slots.stats();
    assert_eq!(stats.available + stats.in_use, stats.capacity);
    assert_eq!(stats.available, model.available());
    assert_eq!(stats.dropped_frees, model.dropped);
    let ids =
        |ids: Vec<u32>| ids.into_iter().map(|id| usize::try_from(id).expect("small")).collect::<Vec<_>>();
    assert_eq!(ids(slots.pages().free_ids()), model.free.iter().copied().collect::<Vec<_>>());
    assert_eq!(ids(slots.pages().released_ids()), model.released.iter().copied().collect::<Vec<_>>());
    let all: Vec<i64> = (-2..200).collect();
    let fenced: BTreeSet<usize> = model.fenced.iter().flat_map(|(_, pages)| pages.iter().copied()).collect();
    let query = IndexVec::I64(all.clone());
    for (slot, answer) in all.iter().zip(slots.is_allocated(&query)) {
        let page = usize::try_from(*slot).map_or(0, |slot| slot / model.page_size);
        assert_eq!(answer, model.live.contains(&page) || fenced.contains(&page), "slot {slot}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn slots_agree_with_a_list(
        steps in steps(),
        size in 1..150usize,
        page_size in prop::sample::select(vec![1usize, 1, 3, 4, 16]),
        fifo in any::<bool>(),
    ) {
        let order = if fifo { Order::Fifo } else { Order::Sorted };
        let mut slots = SlotAllocator::new(size, page_size, order).unwrap();
        let mut model = Model::new(size, page_size, order);
        for step in &steps {
            apply(step, &mut slots, &mut model);
            check(&slots, &model);
        }
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
        let extension = slots.extend(&prefix, &seq, &last).unwrap().unwrap();
        let mut undone = slots.clone();
        undone.undo(&extension.slots, &extension.continued);
        prop_assert_eq!(undone.fault(), None);
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
        // Every request fills whole pages in order, and no slot is anybody else's.
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
    fn rows_agree_with_a_queue(steps in prop::collection::vec((any::<bool>(), 0..5usize, -2..12i64), 1..80)) {
        let mut table = RowTable::new(1, 8).unwrap();
        let mut free: VecDeque<u32> = (1..=8).collect();
        let mut dropped = 0;
        for (take, count, row) in steps {
            if take {
                let expected = (count <= free.len()).then(|| free.drain(..count).collect::<Vec<_>>());
                let taken = table.alloc(count).map(|rows| {
                    rows.iter().map(|taken| kvpool::base::Id::number(taken.row)).collect::<Vec<_>>()
                });
                prop_assert_eq!(taken, expected);
            } else {
                let live = (1..=8).contains(&row) && !free.iter().any(|&free| i64::from(free) == row);
                let (freed, bad) = table.free(&IndexVec::I64(vec![row, row]), false, "row").unwrap();
                prop_assert_eq!(freed.len(), usize::from(live));
                prop_assert_eq!(bad.dropped(), 2 - usize::from(live));
                dropped += bad.dropped();
                if live {
                    free.push_back(u32::try_from(row).expect("positive"));
                } else {
                    prop_assert!(table.free(&IndexVec::I64(vec![row]), true, "row").is_err());
                }
            }
            prop_assert_eq!(table.rows().available(), free.len());
            prop_assert_eq!(table.dropped_frees(), dropped);
            prop_assert_eq!(table.rows().fault(), None);
        }
    }

    #[test]
    fn moves_read_before_they_write(pairs in prop::collection::vec((0..12u32, 0..12u32), 0..40)) {
        let (dst, src): (Vec<u32>, Vec<u32>) = pairs.into_iter().unzip();
        let before: Vec<u32> = (100..112).collect();
        let mut expected = before.clone();
        for (dst, src) in dst.iter().zip(&src) {
            expected[*dst as usize] = before[*src as usize];
        }
        let mut rows = before;
        for step in plan_moves(&dst, &src) {
            match step {
                Move::Copy { dst, src } => rows[dst as usize] = rows[src as usize],
                Move::Swap(a, b) => {
                    prop_assert_ne!(a, b);
                    rows.swap(a as usize, b as usize);
                }
            }
        }
        prop_assert_eq!(rows, expected);
    }

    #[test]
    fn runs_cover_their_input(values in prop::collection::vec(-5..40i64, 0..100), wide in any::<bool>()) {
        let sorted = { let mut sorted = values.clone(); sorted.sort_unstable(); sorted.dedup(); sorted };
        for values in [values, sorted, (0..77).collect()] {
            let runs = ascending_runs(&narrow(&values, wide)).unwrap();
            let mut back = Vec::new();
            for pair in runs.chunks(2) {
                // Maximal: a run never continues the one before.
                prop_assert_ne!(back.last().map(|last| last + 1), Some(i64::from(pair[0])));
                back.extend((i64::from(pair[0])..).take(usize::try_from(pair[1]).expect("positive")));
            }
            prop_assert_eq!(back, values);
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
        let mut lowest = Vec::new();
        let count = set.len() / 2;
        bitmap.take_lowest(count, |start, len| lowest.extend(start..start + len));
        prop_assert!(lowest.iter().eq(set.iter().take(count)));
        let mut other = Bitmap::new(10_000).unwrap();
        bitmap.drain_into(&mut other);
        prop_assert_eq!((bitmap.len(), other.len()), (0, set.len() - count));
        prop_assert!(bitmap.is_consistent() && other.is_consistent());
    }
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
    let _ = slots.alloc(100).unwrap();
    let odd = vec![i64::MIN, i64::MIN + 1, -1, 0, 101, i64::MAX - 1, i64::MAX];
    let bad = slots.free(&IndexVec::I64(odd), false).unwrap();
    assert_eq!((bad.dropped(), slots.available()), (7, 0));
    let bad = slots.free(&IndexVec::I64((-50..150).collect()), false).unwrap();
    assert_eq!((bad.dropped(), slots.available()), (100, 100));
}
