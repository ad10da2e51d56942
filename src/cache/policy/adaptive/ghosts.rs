//! A record of evicted blocks.
//!
//! The record is a table of sets of 8 entries, in which a new entry replaces the oldest of its set. An entry
//! is one word: 32 bits of the key, the time of the last use of the block, its outlook, the novelty of the request
//! that used it last, and the number of its uses.
//!
//! *Invariant.* The block of an entry is not in the cache, unless two keys share 32 bits and a set.
//!
//! *Cost.* A call touches one set, which is one cache line. Memory: 16 words for each block of the capacity.

use crate::base::{prefetch, try_zeros};
use crate::cache::policy::{BlockKey, BlockTokens, History, Novelty, Outlook, Tick};

/// The number of entries in a set.
const WAYS: usize = 8;

/// The number of remembered blocks for each block of the capacity.
const TIMES: u64 = 16;

/// The record of an evicted block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ghost {
    /// When a request used the block last.
    pub(super) used: Tick,
    /// The number of requests that have used the block.
    pub(super) uses: u32,
    /// Its outlook when it was evicted.
    pub(super) outlook: Outlook,
    /// The novelty of the request that used it last.
    pub(super) novelty: Novelty,
}

impl Ghost {
    /// Returns what is remembered of blocks with this history.
    pub(super) const fn of(history: &History) -> Self {
        let History { used, uses, outlook, novelty, .. } = *history;
        Self { used, uses, outlook, novelty }
    }
}

/// The table of evicted blocks.
#[derive(Debug)]
pub(super) struct Ghosts {
    /// An empty entry is 0. Every block has been used, so no other entry is 0.
    sets: Vec<[u64; WAYS]>,
    /// The resolution of the times, in tokens.
    unit: u64,
    /// The mean age, in tokens, of the entries that were replaced recently. `None` before the first.
    lost_at: Option<u64>,
}

impl Ghosts {
    /// Returns the size of the table in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.sets.capacity() * size_of::<[u64; WAYS]>()
    }

    /// Creates an empty table: for fewer blocks, if the host has little memory.
    pub(super) fn new(capacity: u64, block_tokens: BlockTokens) -> Self {
        let sets = (capacity * TIMES / u64::from(block_tokens.get()) / WAYS as u64).max(8);
        let sets = usize::try_from(sets).expect("keys of a cache fit its host's memory");
        let halves = std::iter::successors(Some(sets), |sets| (*sets > 1).then_some(sets / 2));
        let sets = halves.map(try_zeros).find_map(Result::ok).unwrap_or_else(|| vec![[0; WAYS]]);
        Self { sets, unit: (capacity / 256).max(1), lost_at: None }
    }

    /// Remembers a block.
    pub(super) fn put(&mut self, key: BlockKey, ghost: Ghost, now: Tick) {
        let time = self.time(ghost.used);
        let uses = u64::from(ghost.uses.clamp(1, MOST_USES));
        let known = (ghost.outlook as u64) << OUTLOOK_AT | (ghost.novelty as u64) << USES_BITS | uses;
        let entry = tag(key) | time << KNOWN_BITS | known;
        let clock = self.time(now);
        let set = self.set(key);
        let age = |entry: u64| (clock.wrapping_sub(entry >> KNOWN_BITS)) & TIME;
        let oldest = (0..WAYS)
            .max_by_key(|&way| if set[way] == 0 { u64::MAX } else { age(set[way]) })
            .expect("a set has `WAYS` entries, and that is not 0");
        let lost = std::mem::replace(&mut set[oldest], entry);
        if lost != 0 {
            let age = age(lost) * self.unit;
            let mean = self.lost_at.unwrap_or(age);
            self.lost_at = Some(mean - mean / 64 + age / 64);
        }
    }

    /// Removes a block that is in the cache again, and returns what was remembered of it.
    pub(super) fn take(&mut self, key: BlockKey, now: Tick) -> Option<Ghost> {
        let clock = self.time(now);
        let entry = self.set(key).iter_mut().find(|entry| **entry != 0 && **entry & !REST == tag(key))?;
        let entry = std::mem::take(entry);
        let age = clock.wrapping_sub(entry >> KNOWN_BITS) & TIME;
        let start = (now.tokens() / self.unit).saturating_sub(age) * self.unit;
        let uses = u32::try_from(entry & u64::from(MOST_USES)).expect("a few bits");
        let [outlook, novelty] = [entry >> OUTLOOK_AT & OUTLOOK, entry >> USES_BITS & NOVELTY]
            .map(|number| usize::try_from(number).expect("a few bits"));
        let (outlook, novelty) = (Outlook::ALL[outlook], Novelty::ALL[novelty]);
        // The end of the unit of time in which the block was used.
        Some(Ghost { used: Tick::new((start + self.unit - 1).min(now.tokens())), uses, outlook, novelty })
    }

    /// Returns the age up to which a block is remembered if it is not used again.
    pub(super) fn horizon(&self, now: Tick) -> u64 {
        self.lost_at.unwrap_or(now.tokens())
    }

    fn time(&self, at: Tick) -> u64 {
        (at.tokens() / self.unit) & TIME
    }

    /// Prefetches the set of a block that will be looked up soon.
    pub(super) fn prefetch(&self, key: BlockKey) {
        prefetch(&self.sets[self.set_index(key)]);
    }

    fn set(&mut self, key: BlockKey) -> &mut [u64; WAYS] {
        let index = self.set_index(key);
        &mut self.sets[index]
    }

    fn set_index(&self, key: BlockKey) -> usize {
        // The lower half of the key picks the set, the upper half is the tag.
        let set = ((key.0 & REST) * self.sets.len() as u64) >> 32;
        usize::try_from(set).expect("below the number of sets")
    }
}

/// The number of bits for the uses of a block.
const USES_BITS: u32 = 6;

/// The largest number of uses that is remembered.
const MOST_USES: u32 = (1 << USES_BITS) - 1;

/// The number of bits for the uses of a block and its novelty, behind which its outlook is.
const OUTLOOK_AT: u32 = 8;

/// The number of bits for all three.
const KNOWN_BITS: u32 = 11;

/// The bits of a novelty.
const NOVELTY: u64 = (1 << (OUTLOOK_AT - USES_BITS)) - 1;

/// The bits of an outlook.
const OUTLOOK: u64 = (1 << (KNOWN_BITS - OUTLOOK_AT)) - 1;

/// The bits of a time.
const TIME: u64 = (1 << (32 - KNOWN_BITS)) - 1;

/// The bits of an entry that are not of its key.
const REST: u64 = (1 << 32) - 1;

const fn tag(key: BlockKey) -> u64 {
    key.0 & !REST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_of_a_block_stays() {
        let mut ghosts = Ghosts::new(256 * 64, BlockTokens::of_page_size(64));
        let key = BlockKey::new(0x9e37_79b9_7f4a_7c15);
        for (outlook, novelty) in Outlook::ALL.into_iter().flat_map(|of| Novelty::ALL.map(|new| (of, new))) {
            for uses in [1, 2, MOST_USES, 1_000] {
                let ghost = Ghost { used: Tick::new(127), uses, outlook, novelty };
                ghosts.put(key, ghost, Tick::new(9_000));
                let uses = uses.min(MOST_USES);
                assert_eq!(ghosts.take(key, Tick::new(10_000)), Some(Ghost { uses, ..ghost }));
                assert_eq!(ghosts.take(key, Tick::new(10_000)), None);
            }
        }
    }
}
