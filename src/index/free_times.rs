//! When each index was last freed, so that a hold from before a free is told from one after it.

use crate::base::{Result, try_zeros, widen};

use super::mask::Mask;

/// A point between two frees of a space of indices: what was taken before it is told from what is freed
/// later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(u64);

/// The time of the last recorded free of each index, in recorded frees.
///
/// A call that frees whole words of 64 indices records one number for each; other indices have one of their
/// own.
#[derive(Clone, Debug)]
pub(super) struct FreeTimes {
    /// The number of frees so far.
    now: u64,
    /// The last free of everything.
    of_all: u64,
    /// The frees of each word of 64 indices.
    of_words: Vec<WordTimes>,
    /// The last free of an index that was not freed with its whole word.
    of_indices: Vec<u64>,
}

/// When indices of a word were freed last.
#[derive(Clone, Copy, Debug, Default)]
struct WordTimes {
    /// The last free of any of them.
    any: u64,
    /// The last free of all of them at once.
    all: u64,
}

impl FreeTimes {
    /// Creates the record of indices below `end`, none of them freed.
    pub(super) fn new(end: u32) -> Result<Self> {
        let words = widen(end.div_ceil(64));
        Ok(Self { now: 0, of_all: 0, of_words: try_zeros(words)?, of_indices: try_zeros(words * 64)? })
    }

    /// Returns the current moment, after all frees so far.
    pub(super) const fn now(&self) -> Moment {
        Moment(self.now)
    }

    /// Returns the size of the record in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.of_words.len() * size_of::<WordTimes>() + self.of_indices.len() * size_of::<u64>()
    }

    /// Records that one call frees `masks`.
    pub(super) fn record(&mut self, masks: impl IntoIterator<Item = Mask>) {
        self.now += 1;
        for Mask { word, bits } in masks {
            let word = widen(word);
            self.of_words[word].any = self.now;
            if bits == u64::MAX {
                self.of_words[word].all = self.now;
                continue;
            }
            let times = &mut self.of_indices[word * 64..][..64];
            let mut left = bits;
            while left != 0 {
                times[widen(left.trailing_zeros())] = self.now;
                left &= left - 1;
            }
        }
    }

    /// Records that everything is freed. The record continues that of `before`, if it replaces one.
    pub(super) fn record_all(&mut self, before: Option<&Self>) {
        self.now = before.map_or(self.now, |before| before.now) + 1;
        self.of_all = self.now;
        self.of_words.fill(WordTimes { any: self.now, all: self.now });
    }

    /// Returns whether everything was freed after `moment`.
    pub(super) const fn is_all_freed_since(&self, moment: Moment) -> bool {
        self.of_all > moment.0
    }

    /// Returns whether `index`, any number, was freed after `moment`.
    pub(super) fn is_freed_since(&self, index: u32, moment: Moment) -> bool {
        let Some(of_word) = self.of_words.get(widen(index / 64)) else { return false };
        of_word.any > moment.0 && of_word.all.max(self.of_indices[widen(index)]) > moment.0
    }

    /// Returns whether an index of a word, any number, was freed after `moment`.
    #[inline]
    pub(super) fn is_word_freed_since(&self, word: u32, moment: Moment) -> bool {
        self.of_words.get(widen(word)).is_some_and(|word| word.any > moment.0)
    }
}
