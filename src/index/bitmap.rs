//! A set of small integers that finds its lowest member in a few steps, at any size and density.
//!
//! A bitmap does not track ownership; [`FreeList`](super::FreeList) does.

use std::fmt;
use std::ops::Range;

use crate::base::{Result, try_zeros};

use super::mask::run_of_bits;

/// A set of integers below a fixed bound.
///
/// Members are bits of 64-bit words. Above them, each level has one bit per word below, set when that word is
/// not zero. Adding or removing a run costs one pass over its words; finding the lowest member costs one step
/// per level (four for 16 M members).
///
/// ```
/// use kvpool::index::Bitmap;
/// let mut set = Bitmap::new(1 << 20).unwrap();
/// set.insert_run(700_000, 3);
/// assert_eq!(set.len(), 3);
/// assert_eq!(set.next_run(0, 64), Some((700_000, 3)));
/// ```
#[derive(Clone)]
pub struct Bitmap {
    /// One bit per possible member.
    words: Vec<u64>,
    /// Bit `i` of `summaries[0]` is set exactly if word `i` of `words` is not zero, bit `i` of `summaries[k +
    /// 1]` exactly if word `i` of `summaries[k]` is not zero. The last level is a single word; there is at
    /// least one.
    summaries: Vec<Vec<u64>>,
    /// The number of members: the population of `words`.
    len: usize,
}

impl fmt::Debug for Bitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bitmap").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Returns the number of set bits. Most words change as a whole or by one bit, so these cases come first: not
/// every target has an instruction that counts bits.
const fn population(bits: u64) -> usize {
    if bits & bits.wrapping_sub(1) == 0 {
        (bits != 0) as usize
    } else if bits == u64::MAX {
        64
    } else {
        bits.count_ones() as usize
    }
}

/// Returns the words that `start..start + len` touches, each with the touched bits.
fn words_of(start: usize, len: usize) -> impl Iterator<Item = (usize, u64)> {
    let end = start + len;
    let mut at = start;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let (word, bit) = (at / 64, at % 64);
            let take = (64 - bit).min(end - at);
            at += take;
            (word, run_of_bits(bit, take))
        })
    })
}

/// Returns the word that has all of `start..start + len`, and their bits in it, if there is one.
#[inline]
const fn within_word(start: usize, len: usize) -> Option<(usize, u64)> {
    let at = start % 64;
    if len == 0 || at + len > 64 {
        return None;
    }
    Some((start / 64, u64::MAX >> (64 - len) << at))
}

/// Returns the two ends of `start..start + len`, as (start, length), and the whole words between them.
fn split_words(start: usize, len: usize) -> ([(usize, usize); 2], Range<usize>) {
    let end = start + len;
    let whole = start.div_ceil(64)..end / 64;
    if whole.start >= whole.end {
        return ([(start, len), (end, 0)], 0..0);
    }
    ([(start, 64 * whole.start - start), (64 * whole.end, end - 64 * whole.end)], whole)
}

fn members_of(words: &[u64]) -> usize {
    words.iter().copied().map(population).sum()
}

impl Bitmap {
    /// Returns the empty set of integers below `bound`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate it.
    pub fn new(bound: usize) -> Result<Self> {
        let words: Vec<u64> = try_zeros(bound.div_ceil(64).max(1))?;
        let mut summaries = Vec::new();
        let mut below = words.len();
        while below > 1 || summaries.is_empty() {
            below = below.div_ceil(64);
            summaries.push(try_zeros(below)?);
        }
        Ok(Self { words, summaries, len: 0 })
    }

    /// Returns the number of members.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has no members.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the size of the words in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let summaries: usize = self.summaries.iter().map(Vec::len).sum();
        (self.words.len() + summaries) * size_of::<u64>()
    }

    /// Returns the bound, rounded up to whole words.
    pub(super) const fn capacity(&self) -> usize {
        self.words.len() * 64
    }

    /// Returns whether `member` is in the set. Integers at or above the bound are not.
    #[must_use]
    pub fn contains(&self, member: usize) -> bool {
        self.words.get(member / 64).is_some_and(|word| word >> (member % 64) & 1 == 1)
    }

    /// Returns the membership of `64 * word..64 * (word + 1)`, as bits.
    pub(super) fn word(&self, word: usize) -> u64 {
        self.words[word]
    }

    /// Adds a member. Returns whether it was none before.
    #[inline]
    pub(super) fn insert(&mut self, member: usize) -> bool {
        let (word, bit) = (member / 64, 1 << (member % 64));
        let old = self.words[word];
        let is_new = old & bit == 0;
        self.words[word] = old | bit;
        self.len += usize::from(is_new);
        if old == 0 {
            self.mark(word);
        }
        is_new
    }

    /// Removes a member.
    #[inline]
    pub(super) fn remove(&mut self, member: usize) {
        let (word, bit) = (member / 64, 1 << (member % 64));
        let old = self.words[word];
        self.words[word] = old & !bit;
        self.len -= usize::from(old & bit != 0);
        if old == bit {
            self.unmark(word);
        }
    }

    /// Adds the members whose `bits` are set in `word`.
    pub(super) fn insert_word(&mut self, word: usize, bits: u64) {
        let old = self.words[word];
        self.words[word] = old | bits;
        self.len += population(bits & !old);
        if old == 0 && bits != 0 {
            self.mark(word);
        }
    }

    /// Removes the members whose `bits` are set in `word`.
    pub(super) fn remove_word(&mut self, word: usize, bits: u64) {
        let old = self.words[word];
        self.words[word] = old & !bits;
        self.len -= population(bits & old);
        if old != 0 && old & !bits == 0 {
            self.unmark(word);
        }
    }

    /// Records in the summaries that `word` has members.
    fn mark(&mut self, word: usize) {
        self.mark_from(0, word);
    }

    /// Records in `level` and those above that word `at` below has members.
    fn mark_from(&mut self, level: usize, mut at: usize) {
        for level in &mut self.summaries[level..] {
            let summary = &mut level[at / 64];
            let old = *summary;
            *summary |= 1 << (at % 64);
            if old != 0 {
                return;
            }
            at /= 64;
        }
    }

    /// Records in the summaries that `word` is empty.
    fn unmark(&mut self, word: usize) {
        self.unmark_from(0, word);
    }

    /// Records in `level` and those above that word `at` below is empty.
    fn unmark_from(&mut self, level: usize, mut at: usize) {
        for level in &mut self.summaries[level..] {
            let summary = &mut level[at / 64];
            *summary &= !(1 << (at % 64));
            if *summary != 0 {
                return;
            }
            at /= 64;
        }
    }

    /// Adds `start..start + len`; existing members stay.
    #[inline]
    pub fn insert_run(&mut self, start: usize, len: usize) {
        match within_word(start, len) {
            Some((word, bits)) => self.insert_word(word, bits),
            None => self.insert_long_run(start, len),
        }
    }

    fn insert_long_run(&mut self, start: usize, len: usize) {
        let (ends, whole) = split_words(start, len);
        for (start, len) in ends {
            words_of(start, len).for_each(|(word, bits)| self.insert_word(word, bits));
        }
        let words = &mut self.words[whole.clone()];
        self.len += 64 * words.len() - members_of(words);
        words.fill(u64::MAX);
        for (summary, bits) in words_of(whole.start, whole.len()) {
            let old = self.summaries[0][summary];
            self.summaries[0][summary] = old | bits;
            if old == 0 {
                self.mark_from(1, summary);
            }
        }
    }

    /// Removes `start..start + len`; integers that are not members are skipped.
    #[inline]
    pub fn remove_run(&mut self, start: usize, len: usize) {
        match within_word(start, len) {
            Some((word, bits)) => self.remove_word(word, bits),
            None => self.remove_long_run(start, len),
        }
    }

    fn remove_long_run(&mut self, start: usize, len: usize) {
        let (ends, whole) = split_words(start, len);
        for (start, len) in ends {
            words_of(start, len).for_each(|(word, bits)| self.remove_word(word, bits));
        }
        let words = &mut self.words[whole.clone()];
        self.len -= members_of(words);
        words.fill(0);
        for (summary, bits) in words_of(whole.start, whole.len()) {
            let old = self.summaries[0][summary];
            self.summaries[0][summary] = old & !bits;
            if old != 0 && old & !bits == 0 {
                self.unmark_from(1, summary);
            }
        }
    }

    /// Removes every member. Costs one step per word with members.
    pub fn clear(&mut self) {
        self.drain(|_, _| ());
    }

    /// Works like [`Bitmap::clear`], and calls `each` with every word that had members, and its bits.
    pub(super) fn drain(&mut self, mut each: impl FnMut(usize, u64)) {
        let mut from = 0;
        while let Some(word) = self.next_word(from) {
            each(word, self.words[word]);
            self.remove_word(word, u64::MAX);
            from = word + 1;
        }
    }

    /// Returns the first word with members, at or after word `from`.
    pub(super) fn next_word(&self, from: usize) -> Option<usize> {
        if *self.words.get(from)? != 0 {
            return Some(from);
        }
        let mut at = from;
        for (height, level) in self.summaries.iter().enumerate() {
            let bits = level.get(at / 64)? & (u64::MAX << (at % 64));
            if bits != 0 {
                let top = at / 64 * 64 + bits.trailing_zeros() as usize;
                return Some(
                    self.summaries[..height]
                        .iter()
                        .rev()
                        .fold(top, |word, below| word * 64 + below[word].trailing_zeros() as usize),
                );
            }
            at = at / 64 + 1;
        }
        None
    }

    /// Returns the first run of members at or after `from`, as (start, length), cut to `limit` members.
    #[must_use]
    pub fn next_run(&self, from: usize, limit: usize) -> Option<(usize, usize)> {
        let here = self.words.get(from / 64)? >> (from % 64);
        let start = if here == 0 {
            let word = self.next_word(from / 64 + 1)?;
            word * 64 + self.words[word].trailing_zeros() as usize
        } else {
            from + here.trailing_zeros() as usize
        };
        let mut end = start;
        while end - start < limit
            && let Some(word) = self.words.get(end / 64)
        {
            let ones = (word >> (end % 64)).trailing_ones() as usize;
            end += ones;
            if ones == 0 || !end.is_multiple_of(64) {
                break;
            }
        }
        Some((start, (end - start).min(limit)))
    }

    /// Returns the maximal runs of members, lowest first, as (start, length).
    pub fn runs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let (start, len) = self.next_run(from, usize::MAX)?;
            from = start + len;
            Some((start, len))
        })
    }

    /// Returns whether the summaries and the count agree with the words.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        let counted: usize = self.words.iter().map(|word| word.count_ones() as usize).sum();
        let mut below = &self.words;
        counted == self.len
            && self.summaries.iter().all(|summary| {
                let words = std::mem::replace(&mut below, summary);
                words
                    .iter()
                    .enumerate()
                    .all(|(word, &bits)| (summary[word / 64] >> (word % 64) & 1 == 1) == (bits != 0))
            })
    }
}
