//! When each index was last freed, so that a hold from before a free is told from one after it.

use std::ops::Range;

use crate::base::{Result, try_zeros, widen};

use super::mask::Mask;

/// A point between two frees of a space of indices: what was taken before it is told from what is freed
/// later.
///
/// ```
/// use kvpool::base::{Id, IndexVec, Page};
/// use kvpool::index::{Held, Moment, OnBadFree, Order, SlotAllocator};
/// let mut slots = SlotAllocator::new(8, 1, Order::Sorted).unwrap();
/// slots.alloc::<i32>(1).unwrap();
/// let taken: Moment = slots.take_moment();
/// let held = Held { since: taken, is_over: false, is_whole: true };
/// let slot = IndexVec::I32(vec![1]);
/// assert!(!slots.may_be_stale(&slot, held));
/// slots.free(&slot, OnBadFree::Report).unwrap();
/// slots.alloc::<i32>(1).unwrap();
/// // The slot is in use, but by another owner.
/// assert!(slots.is_freed_since(Page::new(1), taken) && slots.may_be_stale(&slot, held));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(u64);

/// The time of the last recorded free of each index, in recorded frees.
///
/// A word of 64 indices keeps the last free of all of it, and its last two frees of a part. The time of an
/// earlier part is written to its indices only when a third one is freed: most parts are freed again as they
/// were, or border on one other part.
#[derive(Clone, Debug)]
pub(super) struct FreeTimes {
    /// The number of the current moment.
    now: u64,
    /// Whether something was taken at the current moment. Frees between which nothing is taken have one time.
    is_taken: bool,
    /// The last free of everything.
    of_all: u64,
    of_words: Vec<WordTimes>,
    /// The last free of an index in a part of its word before the last two.
    of_indices: Vec<u64>,
}

/// When indices of a word were freed last.
#[derive(Clone, Copy, Debug, Default)]
struct WordTimes {
    /// The last free of all of them at once.
    whole: u64,
    /// The last of the times that are written to their indices.
    written: u64,
    /// The last frees of some of them, the last one first.
    parts: [Part; 2],
}

/// A free of some indices of a word.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    time: u64,
    bits: u64,
}

impl WordTimes {
    /// Returns the last free of any of them.
    #[inline]
    fn any(&self) -> u64 {
        self.whole.max(self.written).max(self.parts[0].time)
    }

    /// Adds the free of a part at another time. Returns what an earlier part has that no kept one has.
    #[inline]
    fn add(&mut self, part: Part) -> Part {
        let [last, first] = self.parts;
        // What was freed before the whole word does not matter.
        if last.bits & !part.bits == 0 || last.time <= self.whole {
            self.parts[0] = part;
            return Part::default();
        }
        self.parts = [part, last];
        let bits = if first.time > self.whole { first.bits & !(part.bits | last.bits) } else { 0 };
        Part { bits, ..first }
    }
}

impl FreeTimes {
    /// Creates the record of indices below `end`, none of them freed.
    pub(super) fn new(end: u32) -> Result<Self> {
        let words = widen(end.div_ceil(64));
        Ok(Self {
            now: 0,
            is_taken: false,
            of_all: 0,
            of_words: try_zeros(words)?,
            of_indices: try_zeros(words * 64)?,
        })
    }

    /// Returns the current moment, after all frees so far, for something that is taken now.
    pub(super) const fn take_moment(&mut self) -> Moment {
        self.is_taken = true;
        Moment(self.now)
    }

    /// Returns whether nothing was freed since `moment`.
    pub(super) const fn is_now(&self, moment: Moment) -> bool {
        self.now == moment.0
    }

    /// Returns the size of the record in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.of_words.len() * size_of::<WordTimes>() + self.of_indices.len() * size_of::<u64>()
    }

    /// Records that one call frees `masks`.
    pub(super) fn record(&mut self, masks: impl IntoIterator<Item = Mask>) {
        self.now += u64::from(std::mem::take(&mut self.is_taken));
        for Mask { word, bits } in masks {
            let times = &mut self.of_words[widen(word)];
            // A call may free a word bit by bit, as may several calls.
            let latest = &mut times.parts[0];
            if latest.time == self.now {
                latest.bits |= bits;
                continue;
            }
            if bits == u64::MAX {
                times.whole = self.now;
                continue;
            }
            let lost = times.add(Part { time: self.now, bits });
            if lost.bits != 0 {
                self.write(word, lost);
            }
        }
    }

    /// Writes the time of a part of a word to its indices. No part that was written before it is later.
    fn write(&mut self, word: u32, Part { time, bits }: Part) {
        self.of_words[widen(word)].written = time;
        let of_indices = &mut self.of_indices[widen(word) * 64..][..64];
        let mut left = bits;
        while left != 0 {
            of_indices[widen(left.trailing_zeros())] = time;
            left &= left - 1;
        }
    }

    /// Records that everything is freed. The record continues that of `before`, if it replaces one.
    pub(super) fn record_all(&mut self, before: Option<&Self>) {
        self.now = before.map_or(self.now, |before| before.now) + 1;
        self.is_taken = false;
        self.of_all = self.now;
        self.of_words.fill(WordTimes { whole: self.now, ..WordTimes::default() });
    }

    /// Returns whether everything was freed after `moment`.
    pub(super) const fn is_all_freed_since(&self, moment: Moment) -> bool {
        self.of_all > moment.0
    }

    /// Returns whether `index`, any number, was freed after `moment`.
    pub(super) fn is_freed_since(&self, index: u32, moment: Moment) -> bool {
        self.is_any_freed_since(Mask::of(index), moment)
    }

    /// Returns whether one of the indices of a mask, any numbers, was freed after `moment`.
    #[inline]
    pub(super) fn is_any_freed_since(&self, mask: Mask, moment: Moment) -> bool {
        let of_word = self.of_words.get(widen(mask.word)).filter(|of_word| of_word.any() > moment.0);
        of_word.is_some_and(|of_word| self.is_any_of(of_word, mask, moment))
    }

    fn is_any_of(&self, of_word: &WordTimes, mask: Mask, moment: Moment) -> bool {
        let is_later = |part: &Part| part.time > moment.0 && part.bits & mask.bits != 0;
        of_word.whole > moment.0
            || of_word.parts.iter().any(is_later)
            || of_word.written > moment.0 && self.is_any_written_since(mask, moment)
    }

    fn is_any_written_since(&self, mask: Mask, moment: Moment) -> bool {
        let times = |range: Range<u32>| &self.of_indices[widen(range.start)..widen(range.end)];
        mask.ranges().any(|range| times(range).iter().any(|&time| time > moment.0))
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const WORDS: u32 = 3;

    /// Some indices of one word: any, a run, one, or all.
    fn masks() -> impl Strategy<Value = Mask> {
        let run = (0..64u32, 1..=64u32).prop_map(|(start, len)| (u64::MAX >> (64 - len)) << start);
        let bits = prop_oneof![any::<u64>(), run, (0..64u32).prop_map(|bit| 1 << bit), Just(u64::MAX)];
        (0..WORDS, bits).prop_map(|(word, bits)| Mask { word, bits })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn each_index_has_the_time_of_its_last_free(
            frees in vec((any::<bool>(), prop::option::weighted(0.95, masks())), 0..80)
        ) {
            let mut times = FreeTimes::new(WORDS * 64).expect("there is memory");
            let (mut model, mut now) = (vec![0; widen(WORDS * 64)], 0);
            for (is_taken, mask) in frees {
                if is_taken {
                    prop_assert_eq!(times.take_moment(), Moment(now));
                }
                if let Some(mask) = mask {
                    let (low, high) = (mask.bits & 0xf0f0_f0f0_f0f0, mask.bits & !0xf0f0_f0f0_f0f0);
                    let parts = [low, high].map(|bits| Mask { bits, ..mask });
                    times.record(parts.into_iter().filter(|part| part.bits != 0));
                    now += u64::from(is_taken);
                    mask.indices().for_each(|index| model[widen(index)] = now);
                } else {
                    times.record_all(None);
                    now += 1;
                    model.fill(now);
                }
                prop_assert!(times.is_now(Moment(now)));
                for moment in (0..=now).map(Moment) {
                    for (index, &last) in (0..).zip(&model) {
                        prop_assert_eq!(times.is_freed_since(index, moment), last > moment.0);
                    }
                    for bits in [u64::MAX, 0xff << 8, u64::MAX << 60, 1] {
                        let mask = Mask { word: 1, bits };
                        let is_freed = mask.indices().any(|index| model[widen(index)] > moment.0);
                        prop_assert_eq!(times.is_any_freed_since(mask, moment), is_freed);
                    }
                }
            }
        }
    }
}
