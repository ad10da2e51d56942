//! The state of every index of a space: one record per 64 indices.

use std::ops::Range;
use std::slice::IterMut;

use crate::base::bounded::narrow;
use crate::base::{IndexNumber, Result, try_zeros, widen};
use crate::index::Bitmap;
use crate::index::mask::{Mask, only_run};

/// A state in which an index cannot be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Set {
    Free,
    Released,
    Fenced,
}

/// The free and the released indices among 64, side by side: a call that changes one word reads the other.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(16))]
struct Record {
    free: u64,
    released: u64,
}

/// The state of each index of a space.
///
/// No index is in two sets. An index in no set is live.
#[derive(Clone, Debug)]
pub(super) struct Records {
    space: Range<u32>,
    /// One record for each 64 indices; their number is rounded up to a multiple of 64.
    sets: Vec<Record>,
    /// The fenced indices, laid out like `sets`. They are read only while there are fenced indices.
    fenced: Vec<u64>,
    /// The numbers of records with a free index.
    with_free: Bitmap,
    /// The numbers of records with a released index.
    with_released: Bitmap,
    /// The number of indices in each [`Set`].
    counts: [usize; 3],
}

impl Records {
    /// Records of `space` with all indices free.
    pub(super) fn new(space: Range<u32>) -> Result<Self> {
        let count = widen(space.end.div_ceil(64)).max(1);
        let mut made = Self {
            sets: try_zeros(count.next_multiple_of(64))?,
            fenced: try_zeros(count)?,
            with_free: Bitmap::new(count)?,
            with_released: Bitmap::new(count)?,
            counts: [0; 3],
            space,
        };
        made.clear();
        Ok(made)
    }

    /// Returns the number of indices in a set.
    pub(super) const fn count(&self, set: Set) -> usize {
        self.counts[set as usize]
    }

    /// Returns the size of the bookkeeping in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.sets.len() * (size_of::<Record>() + size_of::<u64>())
            + self.with_free.bytes()
            + self.with_released.bytes()
    }

    fn fenced(&self, at: usize) -> u64 {
        if self.count(Set::Fenced) == 0 { 0 } else { self.fenced[at] }
    }

    /// Returns whether `index`, any number, is in a set.
    pub(super) fn is_in_set(&self, index: u32, set: Set) -> bool {
        let at = widen(index / 64);
        self.space.contains(&index) && {
            let bits = match set {
                Set::Free => self.sets[at].free,
                Set::Released => self.sets[at].released,
                Set::Fenced => self.fenced(at),
            };
            bits >> (index % 64) & 1 == 1
        }
    }

    /// Returns whether `index`, any number, is live.
    #[inline]
    pub(super) fn is_live(&self, index: u32) -> bool {
        let at = widen(index / 64);
        self.space.contains(&index) && {
            let Record { free, released } = self.sets[at];
            (free | released | self.fenced(at)) >> (index % 64) & 1 == 0
        }
    }

    /// Returns whether all of `mask`, which lies in the space, is live.
    pub(super) fn are_live(&self, mask: Mask) -> bool {
        let at = widen(mask.word);
        let Record { free, released } = self.sets[at];
        (free | released | self.fenced(at)) & mask.bits == 0
    }

    /// Frees everything.
    pub(super) fn clear(&mut self) {
        for mask in Mask::of_range(self.space.clone()) {
            let at = widen(mask.word);
            self.sets[at] = Record { free: mask.bits, released: 0 };
            self.with_free.insert(at);
        }
        self.with_released.clear();
        if self.count(Set::Fenced) > 0 {
            self.fenced.fill(0);
        }
        self.counts = [self.space.len(), 0, 0];
    }

    /// Moves live indices to a set.
    #[inline]
    fn add(&mut self, mask: Mask, set: Set) {
        let at = widen(mask.word);
        self.counts[set as usize] += mask.len();
        let (bits, numbers) = match set {
            Set::Free => (&mut self.sets[at].free, &mut self.with_free),
            Set::Released => (&mut self.sets[at].released, &mut self.with_released),
            Set::Fenced => {
                self.fenced[at] |= mask.bits;
                return;
            }
        };
        *bits |= mask.bits;
        if *bits == mask.bits {
            numbers.insert(at);
        }
    }

    /// Makes indices of a set live.
    pub(super) fn take(&mut self, mask: Mask, set: Set) {
        let at = widen(mask.word);
        self.counts[set as usize] -= mask.len();
        let (bits, numbers) = match set {
            Set::Free => (&mut self.sets[at].free, &mut self.with_free),
            Set::Released => (&mut self.sets[at].released, &mut self.with_released),
            Set::Fenced => {
                self.fenced[at] ^= mask.bits;
                return;
            }
        };
        *bits ^= mask.bits;
        if *bits == 0 {
            numbers.remove(at);
        }
    }

    /// Moves indices from one set to another.
    pub(super) fn shift(&mut self, mask: Mask, from: Set, to: Set) {
        self.take(mask, from);
        self.add(mask, to);
    }

    /// Moves the live indices of `mask`, which lies in the space, to a set and returns them.
    #[inline]
    pub(super) fn give_back(&mut self, mask: Mask, to: Set) -> Mask {
        let at = widen(mask.word);
        let Record { free, released } = self.sets[at];
        let moved = Mask { bits: mask.bits & !(free | released | self.fenced(at)), ..mask };
        if moved.bits != 0 {
            self.add(moved, to);
        }
        moved
    }

    /// Works like [`Records::give_back`], for `masks` with `count` indices in all, up to the first mask with
    /// an index that is not live. Returns how many masks were moved.
    #[inline]
    pub(super) fn give_back_while_live(&mut self, masks: &[Mask], count: usize, to: Set) -> usize {
        if to == Set::Fenced || self.count(Set::Fenced) > 0 {
            return 0;
        }
        // A function for each set: choosing it for each record makes a free of scattered indices a tenth
        // slower.
        let done = if to == Set::Free {
            give_back_masks(masks, &mut self.sets, |record| &mut record.free, &mut self.with_free)
        } else {
            give_back_masks(masks, &mut self.sets, |record| &mut record.released, &mut self.with_released)
        };
        let is_all = done == masks.len();
        self.counts[to as usize] +=
            if is_all { count } else { masks[..done].iter().map(|mask| mask.len()).sum() };
        done
    }

    /// Makes a run of free indices live.
    #[inline]
    pub(super) fn take_run(&mut self, run: Range<u32>) {
        self.counts[Set::Free as usize] -= run.len();
        for mask in Mask::of_range(run) {
            let at = widen(mask.word);
            let free = &mut self.sets[at].free;
            *free ^= mask.bits;
            if *free == 0 {
                self.with_free.remove(at);
            }
        }
    }

    /// Makes the lowest free index live.
    pub(super) fn take_first(&mut self) -> Option<u32> {
        let block = self.with_free.next_word(0)?;
        let at = block * 64 + widen(self.with_free.word(block).trailing_zeros());
        let free = &mut self.sets[at].free;
        let index = narrow(at) * 64 + free.trailing_zeros();
        *free &= *free - 1;
        if *free == 0 {
            self.with_free.remove(at);
        }
        self.counts[Set::Free as usize] -= 1;
        Some(index)
    }

    /// Makes the lowest free indices live and lists them in `out`. There must be enough to fill it.
    ///
    /// `merge` counts released indices as free and merges them, like [`Records::merge`].
    pub(super) fn take_lowest<T: IndexNumber>(&mut self, out: &mut [T], merge: bool) {
        if merge {
            let released = std::mem::take(&mut self.counts[Set::Released as usize]);
            self.counts[Set::Free as usize] += released;
            self.list_lowest::<T, true>(out);
            self.merge();
        } else {
            self.list_lowest::<T, false>(out);
        }
        self.counts[Set::Free as usize] -= out.len();
    }

    /// Lists the lowest free indices in `out` and makes them live; with `MERGE` the released ones, too.
    ///
    /// A separate function for each case, so that the loop has all registers.
    #[inline(never)]
    fn list_lowest<T: IndexNumber, const MERGE: bool>(&mut self, out: &mut [T]) {
        let Self { sets, with_free, with_released, .. } = self;
        let merged = if MERGE { u64::MAX } else { 0 };
        let mut out = out.iter_mut();
        let mut from = 0;
        while out.len() > 0
            && let Some(block) = next_block::<MERGE>(with_free, with_released, from)
        {
            let numbers = with_free.word(block) | with_released.word(block) & merged;
            let records: &mut [_; 64] =
                sets[block * 64..].first_chunk_mut().expect("there are whole words of them");
            let mut remaining = numbers;
            let mut partial = 0;
            while remaining != 0 {
                let at = remaining.trailing_zeros();
                let Record { free, released } = &mut records[widen(at)];
                let base = narrow(block) * 4096 + at * 64;
                *free = list(base, *free | *released & merged, &mut out);
                *released &= !merged;
                if *free != 0 {
                    partial = remaining & remaining.wrapping_neg();
                    break;
                }
                remaining &= remaining - 1;
            }
            with_released.remove_word(block, (numbers ^ remaining | partial) & merged);
            with_free.remove_word(block, numbers ^ remaining);
            with_free.insert_word(block, partial);
            from = block + 1;
        }
    }

    /// Moves every released index to the free set.
    pub(super) fn merge(&mut self) {
        let Self { sets, with_free, with_released, .. } = self;
        with_released.drain(|block, numbers| {
            let mut remaining = numbers;
            while remaining != 0 {
                let Record { free, released } = &mut sets[block * 64 + widen(remaining.trailing_zeros())];
                *free |= std::mem::take(released);
                remaining &= remaining - 1;
            }
            with_free.insert_word(block, numbers);
        });
        let released = std::mem::take(&mut self.counts[Set::Released as usize]);
        self.counts[Set::Free as usize] += released;
    }

    /// Returns the free or the released indices, lowest first.
    pub(super) fn indices(&self, set: Set) -> impl Iterator<Item = u32> + '_ {
        let of = move |record: &Record| if set == Set::Free { record.free } else { record.released };
        (0..).zip(&self.sets).flat_map(move |(word, record)| Mask { word, bits: of(record) }.indices())
    }

    /// Returns released indices of one record, the lowest one among them.
    pub(super) fn first_released(&self) -> Option<Mask> {
        let (at, _) = self.with_released.next_run(0, 1)?;
        Some(Mask { word: narrow(at), bits: self.sets[at].released })
    }

    /// Returns the first run of free indices at or after `from`, cut to `limit`.
    pub(super) fn next_free_run(&self, from: u32, limit: u32) -> Option<Range<u32>> {
        let here = self.sets.get(widen(from / 64))?.free >> (from % 64);
        let start = if here == 0 {
            let (at, _) = self.with_free.next_run(widen(from / 64) + 1, 1)?;
            narrow(at) * 64 + self.sets[at].free.trailing_zeros()
        } else {
            from + here.trailing_zeros()
        };
        let mut end = start;
        while end - start < limit
            && let Some(record) = self.sets.get(widen(end / 64))
        {
            let ones = (record.free >> (end % 64)).trailing_ones();
            end += ones;
            if ones == 0 || !end.is_multiple_of(64) {
                break;
            }
        }
        Some(start..start + (end - start).min(limit))
    }

    /// Describes a broken invariant, if there is one.
    pub(super) fn broken_invariant(&self) -> Option<String> {
        let mut space = Mask::of_range(self.space.clone()).peekable();
        let mut counts = [0; 3];
        for ((word, record), fenced) in (0..).zip(&self.sets).zip(&self.fenced) {
            let all = space.next_if(|mask| mask.word == word).map_or(0, |mask| mask.bits);
            let words = [record.free, record.released, *fenced];
            let (any, total) =
                words.iter().fold((0, 0), |(any, total), bits| (any | bits, total + bits.count_ones()));
            if any & !all != 0 || any.count_ones() != total {
                let first = word * 64;
                return Some(format!(
                    "an index from {first} on is in two sets at once, or outside of the space"
                ));
            }
            for (count, bits) in counts.iter_mut().zip(words) {
                *count += widen(bits.count_ones());
            }
            let numbers = [&self.with_free, &self.with_released].map(|numbers| numbers.contains(widen(word)));
            if numbers != [record.free != 0, record.released != 0] {
                return Some(format!("free or released indices from {} on would not be found", word * 64));
            }
        }
        if counts != self.counts {
            return Some(format!("{counts:?} indices are free, released and fenced, not {:?}", self.counts));
        }
        let mut numbers = [("free", &self.with_free), ("released", &self.with_released)].into_iter();
        let faulty = numbers.find(|(_, numbers)| !numbers.is_consistent());
        faulty.map(|(name, _)| format!("the {name} set disagrees with its own summary"))
    }
}

/// Returns the first word, at or after `from`, of the summary that has a record with a free index or, with
/// `MERGE`, a released one.
fn next_block<const MERGE: bool>(with_free: &Bitmap, with_released: &Bitmap, from: usize) -> Option<usize> {
    let free = with_free.next_word(from);
    match with_released.next_word(from).filter(|_| MERGE) {
        Some(released) => Some(free.map_or(released, |free| free.min(released))),
        None => free,
    }
}

/// Adds `masks` to the sets that `set` names, and their records to `numbers`, up to the first mask with an
/// index that is free or released. Returns how many masks were added.
#[inline]
fn give_back_masks(
    masks: &[Mask],
    sets: &mut [Record],
    set: impl Fn(&mut Record) -> &mut u64,
    numbers: &mut Bitmap,
) -> usize {
    let mut done = 0;
    // Neighbouring records are marked together. Marked one at a time, each store would wait for the previous
    // one.
    let (mut block, mut found) = (0, 0);
    for &Mask { word, bits } in masks {
        let at = widen(word);
        let record = &mut sets[at];
        if (record.free | record.released) & bits != 0 {
            break;
        }
        *set(record) |= bits;
        if at / 64 != block {
            numbers.insert_word(block, found);
            (block, found) = (at / 64, 0);
        }
        found |= 1 << (at % 64);
        done += 1;
    }
    numbers.insert_word(block, found);
    done
}

/// Lists indices from `base` on whose `bits` are set in `out`, until that is full: what remains of it is left
/// there. Returns the bits of the others.
#[inline]
fn list<T: IndexNumber>(base: u32, bits: u64, out: &mut IterMut<'_, T>) -> u64 {
    // In a pool with few free slots, a word usually has one or two of them; in one with many they are a run.
    let others = bits & bits.wrapping_sub(1);
    if others & others.wrapping_sub(1) == 0 {
        let mut left = bits;
        while left != 0
            && let Some(slot) = out.next()
        {
            *slot = T::of(base + left.trailing_zeros());
            left &= left - 1;
        }
        return left;
    }
    let (left, rest) = list_many(base, bits, std::mem::take(out).into_slice());
    *out = rest.iter_mut();
    left
}

/// Works like [`list`], and also returns the rest of `out`. A function of its own, so that the loop over single
/// indices has all registers.
#[inline(never)]
fn list_many<T: IndexNumber>(base: u32, bits: u64, out: &mut [T]) -> (u64, &mut [T]) {
    if let Some(run) = only_run(bits) {
        let (front, rest) = out.split_at_mut(out.len().min(run.len()));
        for (slot, index) in front.iter_mut().zip(base + run.start..) {
            *slot = T::of(index);
        }
        return (if front.len() == run.len() { 0 } else { bits & bits << front.len() }, rest);
    }
    let (front, rest) = out.split_at_mut(out.len().min(widen(bits.count_ones())));
    let mut left = bits;
    for slot in front {
        *slot = T::of(base + left.trailing_zeros());
        left &= left - 1;
    }
    (left, rest)
}
