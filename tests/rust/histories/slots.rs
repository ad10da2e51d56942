//! The slot allocator, with every way to take and to free slots.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kvpool::base::{ErrorKind, Id, IndexDType, IndexVec, Page, Result};
use kvpool::index::{BadFree, BadFrees, Fit, Order};
use kvpool::kernels::Indices;
use kvpool::pool::{AllocatorConfig, Fence, TokenToKvPoolAllocator};
use kvpool::tensor::TensorView;

use super::slot_model::SlotModel;
use super::{STREAM, Source, agree, ensure, host, int, ints_of, refused, size};

/// Frees that are collected until the outermost group ends.
#[derive(Default)]
struct Group {
    nested: usize,
    given: Vec<i64>,
}

/// The fences that have not passed, each with its number in the model.
#[derive(Default)]
pub(super) struct Fences {
    waiting: Vec<(usize, Arc<FlagFence>)>,
    made: usize,
}

/// A fence that the history passes.
#[derive(Default)]
struct FlagFence(AtomicBool);

impl Fence for FlagFence {
    fn has_passed(&self) -> Result<bool> {
        Ok(self.0.load(Relaxed))
    }
}

impl Fences {
    /// Adds a fence.
    pub(super) fn make(&mut self) -> (usize, Arc<dyn Fence>) {
        self.made += 1;
        self.waiting.push((self.made, Arc::default()));
        self.last().expect("just made")
    }

    fn last(&self) -> Option<(usize, Arc<dyn Fence>)> {
        let (number, flag) = self.waiting.last()?;
        Some((*number, Arc::clone(flag) as _))
    }

    /// Passes one fence, and returns its number.
    pub(super) fn pass(&mut self, source: &mut Source<'_>) -> Option<usize> {
        let count = self.waiting.len();
        let (number, flag) = (count > 0).then(|| self.waiting.swap_remove(source.below(count)))?;
        flag.0.store(true, Relaxed);
        Some(number)
    }
}

struct Slots {
    pool: TokenToKvPoolAllocator,
    model: SlotModel,
    group: Option<Group>,
    fences: Fences,
}

pub(super) fn run(source: &mut Source<'_>) {
    let page_size = source.of(&[1, 1, 2, 3, 4, 16]);
    let count = 1 + source.below(150);
    let (is_sorted, strict) = (source.flip(), source.rarely(4));
    let config = AllocatorConfig {
        size: count,
        page_size,
        need_sort: is_sorted,
        strict,
        index_dtype: source.of(&[IndexDType::I32, IndexDType::I64]),
    };
    let made = TokenToKvPoolAllocator::new(&config, &host());
    let order = if is_sorted { Order::Sorted } else { Order::Fifo };
    let model = SlotModel::new(count, page_size, order);
    let mut slots = Slots { pool: made.expect("small"), model, group: None, fences: Fences::default() };
    while source.next_step() {
        slots.step(source);
        check(&slots.pool, &slots.model);
    }
}

impl Slots {
    fn step(&mut self, source: &mut Source<'_>) {
        match source.below(32) {
            0..=6 => self.alloc(source),
            7 => self.alloc_contiguous(Fit::First, source),
            8 => self.alloc_contiguous(Fit::Best, source),
            9..=15 => self.free(source),
            16..=18 => {
                let given = given(source, &self.model);
                let answer = self.pool.share(&source.index_vec(&given), STREAM);
                agree(answer, &self.model.share(&given));
            }
            19..=22 => self.pass(source),
            23..=26 => self.extend(source),
            27 => {
                self.pool.free_group_begin();
                match &mut self.group {
                    Some(group) => group.nested += 1,
                    None => self.group = Some(Group::default()),
                }
            }
            28 | 29 => self.end_group(),
            30 => {
                self.pool.merge_and_sort_free(STREAM).expect("nothing is in flight");
                self.model.merge();
            }
            _ if source.rarely(4) => {
                self.pool.clear(STREAM);
                self.model.clear();
                self.group = None;
            }
            _ => self.show(source),
        }
    }

    fn alloc(&mut self, source: &mut Source<'_>) {
        let count = if source.rarely(32) { source.of(&[200, 1 << 40, usize::MAX]) } else { source.below(40) };
        let Some(taken) = self.pool.alloc(count, STREAM).expect("memory") else {
            assert_eq!(self.model.alloc(count), None);
            return;
        };
        let slots = numbers(&taken.granted().view());
        assert_eq!(Some(&slots), self.model.alloc(count).as_ref());
        if source.rarely(16) {
            drop(taken);
            self.model.undo(&slots, &[]);
        } else {
            let _ = taken.keep();
        }
    }

    fn alloc_contiguous(&mut self, fit: Fit, source: &mut Source<'_>) {
        let count = source.below(40);
        let taken = self.pool.alloc_contiguous(count, fit, STREAM).expect("memory");
        let taken = taken.map(|taken| numbers(&taken.keep()));
        assert_eq!(taken, self.model.contiguous(count, fit));
    }

    fn free(&mut self, source: &mut Source<'_>) {
        let given = given(source, &self.model);
        let fence = source.rarely(3).then(|| match self.fences.last() {
            Some(last) if source.rarely(8) => last,
            _ => self.fences.make(),
        });
        let (fence, behind) = fence.unzip();
        let values = Indices::Host(source.index_vec(&given));
        let answer = self.pool.free_keeping(&values, None, behind.as_ref(), || None, STREAM);
        if let (Some(group), None) = (&mut self.group, fence) {
            group.given.extend(given);
            assert_eq!(answer.expect("nothing is looked at yet").dropped(), 0);
            return;
        }
        self.freed(&given, answer, fence);
    }

    /// Applies a free to the model.
    fn freed(&mut self, slots: &[i64], answer: Result<BadFrees>, fence: Option<usize>) {
        let before = self.pool.strict().then(|| self.model.clone());
        let dropped = self.model.dropped;
        let given = self.model.give_back(slots, fence.is_some());
        let dropped = self.model.dropped - dropped;
        let expected = ensure(!self.pool.strict() || dropped == 0, ErrorKind::IndexOwnership);
        let Some(bad) = agree(answer, &expected) else {
            self.model = before.expect("a strict pool");
            return;
        };
        assert_eq!(bad.dropped(), dropped);
        check_reasons(&bad, &self.model);
        match fence {
            None => self.model.release(given),
            Some(fence) => self.model.fenced.push((fence, given)),
        }
    }

    fn pass(&mut self, source: &mut Source<'_>) {
        if let Some(fence) = self.fences.pass(source) {
            self.pool.poll(STREAM).expect("flags can tell");
            self.model.pass(fence);
        }
    }

    fn extend(&mut self, source: &mut Source<'_>) {
        let is_decode = source.flip();
        let mut batch: Vec<(i64, i64, i64)> = Vec::new();
        for _ in 0..source.below(5) {
            let prefix = source.index(40);
            let more = if is_decode { 1 } else { source.index(24) };
            batch.push((prefix, prefix.saturating_add(more), last_loc(source, &self.model, prefix)));
        }
        let column = |of: fn(&(i64, i64, i64)) -> i64| -> Vec<i64> { batch.iter().map(of).collect() };
        let (prefix, seq) = (column(|one| one.0), column(|one| one.1));
        let last = Indices::Host(IndexVec::I64(column(|one| one.2)));
        let answer = if is_decode {
            let batch = batch.iter().map(|&(_, seq, last)| (seq.saturating_sub(1), seq, last));
            (self.pool.alloc_decode(&seq, &last, STREAM), self.model.extend(&batch.collect::<Vec<_>>()))
        } else {
            (self.pool.alloc_extend(&prefix, &seq, &last, STREAM), self.model.extend(&batch))
        };
        let (answer, expected) = answer;
        let Some(answer) = agree(answer, &expected) else { return };
        let known = expected.expect("it was right");
        assert_eq!(answer.is_some(), known.is_some());
        if let (Some(taken), Some((slots, continued))) = (answer, known) {
            assert_eq!(numbers(&taken.granted().view()), slots);
            if source.rarely(8) {
                drop(taken);
                self.model.undo(&slots, &continued);
            } else {
                let _ = taken.keep();
            }
        }
    }

    fn end_group(&mut self) {
        match &mut self.group {
            None => refused(self.pool.free_group_end(STREAM), ErrorKind::State),
            Some(group) if group.nested > 0 => {
                group.nested -= 1;
                assert_eq!(self.pool.free_group_end(STREAM).expect("a group").0, 0);
            }
            Some(group) => {
                let given = std::mem::take(&mut group.given);
                self.group = None;
                let answer = self.pool.free_group_end(STREAM).map(|(count, bad)| {
                    assert_eq!(count, given.len());
                    bad
                });
                self.freed(&given, answer, None);
            }
        }
    }

    fn show(&mut self, source: &mut Source<'_>) {
        let shown = numbers(&self.pool.free_slots(STREAM).expect("memory"));
        assert!(shown.iter().eq(&self.model.free));
        let shown = numbers(&self.pool.release_slots(STREAM).expect("memory"));
        assert!(shown.iter().eq(&self.model.released));
        let count = source.below(40);
        let mut upcoming = Vec::new();
        self.pool.inspect(|slots| {
            slots.pages().upcoming(count, |run| upcoming.extend(run.range().map(size::<u32>)));
        });
        assert!(self.model.free.iter().take(count).eq(&upcoming));
    }
}

fn numbers(view: &TensorView) -> Vec<usize> {
    ints_of(view).into_iter().map(size).collect()
}

/// A slot of an owned page, or the padding slot.
fn owned_slot(source: &mut Source<'_>, model: &SlotModel) -> i64 {
    let at = source.below(model.owners.len().max(1));
    let page = model.owners.keys().nth(at).copied().unwrap_or(0);
    int(page * model.page_size + source.below(model.page_size))
}

/// The last token's slot of a request: usually correct for a prefix that ends within a page.
fn last_loc(source: &mut Source<'_>, model: &SlotModel, prefix: i64) -> i64 {
    let size = int(model.page_size);
    let slot = owned_slot(source, model);
    match source.below(8) {
        0 => source.index(150),
        1 => slot,
        _ => slot / size * size + prefix.rem_euclid(size) - 1,
    }
}

/// Slots as callers pass them: their own, whole runs, and invalid ones.
pub(super) fn given(source: &mut Source<'_>, model: &SlotModel) -> Vec<i64> {
    let mut given = Vec::new();
    for _ in 0..source.below(6) {
        let slot = owned_slot(source, model);
        match source.below(8) {
            0 => given.push(source.index(170)),
            1 | 2 => {
                let len = source.below(48);
                given.extend((slot..).take(len));
            }
            3 => {
                let slot = source.within(-4, 160);
                given.extend((slot..).take(source.below(48)));
            }
            _ => given.push(slot),
        }
    }
    given
}

/// Checks the report of slots that were not freed.
fn check_reasons(bad: &BadFrees, model: &SlotModel) {
    assert!(bad.first().len() <= bad.dropped().min(8));
    assert!(bad.dropped() == 0 || !bad.first().is_empty());
    let end = int((model.pages + 1) * model.page_size);
    for &(slot, reason) in bad.first() {
        let is_inside = (0..end).contains(&slot);
        assert_eq!(reason == BadFree::OutOfRange, !is_inside, "slot {slot}");
        assert_eq!(reason == BadFree::Padding, is_inside && slot < int(model.page_size), "slot {slot}");
        let is_new = (1..=model.pages).any(|page| {
            !model.taken.contains(&page)
                && (int(page * model.page_size)..int((page + 1) * model.page_size)).contains(&slot)
        });
        assert_eq!(reason == BadFree::NotAllocated, is_new, "slot {slot}");
    }
}

/// Checks everything that is visible of the allocator.
pub(super) fn check(pool: &TokenToKvPoolAllocator, model: &SlotModel) {
    pool.verify().expect("consistent");
    let (stats, page_size) = (pool.stats(), model.page_size);
    assert_eq!(stats.capacity, model.pages * page_size);
    assert_eq!(stats.available + stats.in_use, stats.capacity);
    assert_eq!(stats.available, model.available() * page_size);
    assert_eq!(pool.available_size(), stats.available);
    assert_eq!(stats.released, model.released.len() * page_size);
    assert_eq!(stats.fenced, model.fenced_alone() * page_size);
    assert_eq!(stats.shared, model.shared() * page_size);
    assert_eq!(stats.high_water, model.high_water * page_size);
    assert_eq!(stats.dropped_frees, model.dropped);
    let numbers = |pages: Vec<Page>| pages.into_iter().map(|page| size(page.number())).collect::<Vec<_>>();
    pool.inspect(|slots| {
        assert!(numbers(slots.pages().free_indices().expect("memory")).iter().eq(&model.free));
        assert!(numbers(slots.pages().released_indices().expect("memory")).iter().eq(&model.released));
    });
    let in_use: BTreeSet<usize> = (1..=model.pages).filter(|page| model.is_in_use(*page)).collect();
    let all: Vec<i64> = (-2..int((model.pages + 2) * page_size)).collect();
    let query = IndexVec::I64(all.clone());
    let answers: Vec<bool> = pool.inspect(|slots| slots.is_allocated(&query).collect());
    for (slot, answer) in all.into_iter().zip(answers) {
        let page = usize::try_from(slot).map_or(0, |slot| slot / page_size);
        assert_eq!(answer, in_use.contains(&page), "slot {slot}");
    }
}
