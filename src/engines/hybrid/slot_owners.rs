//! The slots for full attention that a tree has, to detect a slot with two owners.

use super::{HybridTree, SlotSource};
use crate::base::{EngineSlot, Id, widen};

/// The number of words in a block: 32,768 slots.
const WORDS: usize = 512;

/// A set of slots. It needs a bit for each slot, in blocks that exist only where there are slots.
#[derive(Debug, Default)]
pub(super) struct SlotSet {
    blocks: Vec<Option<Box<[u64; WORDS]>>>,
}

impl SlotSet {
    /// Returns the block, the word and the bit of a slot.
    fn place(slot: EngineSlot) -> (usize, usize, u64) {
        let number = widen(slot.number());
        let word = number / widen(u64::BITS);
        (word / WORDS, word % WORDS, 1 << (slot.number() % u64::BITS))
    }

    fn contains(&self, slot: EngineSlot) -> bool {
        let (block, word, bit) = Self::place(slot);
        self.blocks.get(block).and_then(Option::as_ref).is_some_and(|words| words[word] & bit != 0)
    }

    /// Adds a slot. Returns whether it was not in the set.
    fn insert(&mut self, slot: EngineSlot) -> bool {
        let (block, word, bit) = Self::place(slot);
        if block >= self.blocks.len() {
            self.blocks.resize_with(block + 1, || None);
        }
        let words = self.blocks[block].get_or_insert_with(|| Box::new([0; WORDS]));
        let is_new = words[word] & bit == 0;
        words[word] |= bit;
        is_new
    }

    fn remove(&mut self, slot: EngineSlot) {
        let (block, word, bit) = Self::place(slot);
        if let Some(words) = self.blocks.get_mut(block).and_then(Option::as_mut) {
            words[word] &= !bit;
        }
    }

    fn bytes(&self) -> usize {
        let blocks = self.blocks.iter().flatten().count();
        self.blocks.capacity() * size_of::<Option<Box<[u64; WORDS]>>>() + blocks * size_of::<[u64; WORDS]>()
    }
}

/// The slots of a tree, and what was found to have two owners.
#[derive(Debug, Default)]
pub(super) struct SlotOwners {
    /// Whether nothing is recorded.
    is_off: bool,
    slots: SlotSet,
    second: SecondOwners,
}

/// The slots that were inserted, or to be freed as duplicates, while a node had them: two requests have
/// written to each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SecondOwners {
    /// The number of times that such a slot was found.
    pub count: usize,
    /// The slot that was found last.
    pub last: Option<EngineSlot>,
}

impl SecondOwners {
    fn add(&mut self, slot: EngineSlot) {
        (self.count, self.last) = (self.count + 1, Some(slot));
    }
}

impl SlotOwners {
    /// Records slots that a node has from now on.
    pub(super) fn record_adopted(&mut self, slots: &[EngineSlot]) {
        if self.is_off {
            return;
        }
        for &slot in slots {
            if !self.slots.insert(slot) {
                self.second.add(slot);
            }
        }
    }

    /// Records slots that no node has any longer.
    pub(super) fn record_removed(&mut self, slots: &[EngineSlot]) {
        if self.is_off {
            return;
        }
        for &slot in slots {
            self.slots.remove(slot);
        }
    }

    /// Records the slots of duplicates that the engine is about to free.
    pub(super) fn record_duplicates(&mut self, slots: &[EngineSlot]) {
        for &slot in slots {
            if self.slots.contains(slot) {
                self.second.add(slot);
            }
        }
    }

    /// Removes all slots. What was found to have two owners is still counted.
    pub(super) fn clear(&mut self) {
        self.slots = SlotSet::default();
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.bytes()
    }
}

impl HybridTree {
    /// Returns the slots that were found to have two owners since the tree was created.
    ///
    /// A slot is found when it is inserted while a node has it, or is to be freed as a duplicate of another
    /// one. The tree is as it would be without: it owns no slots, and cannot tell which owner is right.
    #[must_use]
    pub const fn second_owners(&self) -> SecondOwners {
        self.owners.second
    }

    /// Stops looking for slots with two owners, in an empty tree whose caller rules them out.
    #[must_use]
    pub fn without_owners(mut self) -> Self {
        self.owners.is_off = true;
        self
    }

    /// Records the slots of duplicates, as far as they can be read.
    pub(super) fn check_duplicates(&mut self, slots: &dyn SlotSource, range: &super::PositionRange) {
        if let Ok(slots) = slots.read(range.start, range.len()) {
            self.owners.record_duplicates(&slots);
        }
    }
}
