//! The slot of each page, and the order of eviction. Contains no page contents and accesses no files.

use std::collections::VecDeque;

use crate::base::{Id, KeyMap, Result, out_of_memory_error, try_push, widen};
use crate::cache::{PageHash, PlaceInRun, PolicyKind, RecencyList};
use crate::transfer::to_u64;

use super::layout::{FileSlot, Record};
use super::recency::{Recency, is_one_run};
use super::worth::StoreWorth;

/// The most slots of a store.
pub(super) const MAX_SLOTS: usize = 0xffff_fff0;

/// Pages that are stored before a disk that was full is tried with more than it had.
const PROBE: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// No page, and free to take.
    Free,
    /// A page is being written.
    Written,
    /// A page that can be found.
    Stored,
    /// A removed page, which is still held.
    Removed,
}

#[derive(Debug)]
struct SlotUse {
    record: Record,
    /// The number of uses when the entry in the index was written, whose tick may be older.
    written_at: u64,
    /// Threads that use the slot.
    holders: u32,
    usage: Use,
}

impl SlotUse {
    const FREE: Self = Self {
        record: Record { key: [0; 32], sum: [0; 16], tick: 0 },
        written_at: 0,
        holders: 0,
        usage: Use::Free,
    };
}

/// The slots of a store.
///
/// Pages that can be found are in a list by their ticks, those with larger ones first. A slot is taken for a
/// page, which then is stored or given up. Slots that are held are not taken. With a policy, the last page of each
/// run of similar ticks is offered to it.
#[derive(Debug)]
pub(super) struct Slots {
    /// The slots that were ever used, at most `count`.
    slot_uses: Vec<SlotUse>,
    count: usize,
    /// The largest number of slots in use: `count`, or fewer while the disk is full.
    limit: usize,
    /// The number of slots in use when the disk was found full, until there are more again.
    full_at: Option<usize>,
    stored_since_full: usize,
    by_key: KeyMap<PageHash, FileSlot>,
    written: usize,
    /// Free slots that were used before, so that the disk has space for them. The last one is taken first.
    free: VecDeque<FileSlot>,
    /// The pages that can be found.
    order: RecencyList<FileSlot>,
    /// The page that entered `order` last. Others with similar ticks follow it.
    entered: Option<FileSlot>,
    /// The pages used so far, each counted as often as it was used.
    uses: u64,
    evicted: usize,
    /// What pages are worth; `None` if the least recently used one is evicted.
    worth: Option<Box<StoreWorth>>,
}

impl Slots {
    pub(super) fn new(count: usize, policy: PolicyKind) -> Self {
        Self {
            slot_uses: Vec::new(),
            count,
            limit: count,
            full_at: None,
            stored_since_full: 0,
            by_key: KeyMap::default(),
            written: 0,
            free: VecDeque::new(),
            order: RecencyList::default(),
            entered: None,
            uses: 0,
            evicted: 0,
            worth: StoreWorth::new(policy, count).map(Box::new),
        }
    }

    /// Returns the number of pages that can be found.
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(super) const fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of pages that the store has room for: fewer than its slots while the disk is full.
    pub(super) const fn room(&self) -> usize {
        self.limit
    }

    pub(super) const fn evicted(&self) -> usize {
        self.evicted
    }

    /// Returns the slot of a page that can be found.
    pub(super) fn find(&self, key: &PageHash) -> Option<FileSlot> {
        self.by_key.get(key).copied()
    }

    pub(super) fn record(&self, slot: FileSlot) -> &Record {
        &self.slot_use(slot).record
    }

    /// Returns every page that can be found.
    pub(super) fn keys(&self) -> Vec<PageHash> {
        self.by_key.keys().copied().collect()
    }

    fn slot_use(&self, slot: FileSlot) -> &SlotUse {
        &self.slot_uses[widen(slot.number())]
    }

    fn slot_use_mut(&mut self, slot: FileSlot) -> &mut SlotUse {
        &mut self.slot_uses[widen(slot.number())]
    }

    fn tick(&self, slot: FileSlot) -> u64 {
        self.slot_use(slot).record.tick
    }

    /// Records that a prompt of so many pages is looked up, which are used or put after that.
    pub(super) fn look_up(&mut self, pages: usize) {
        if let Some(worth) = &mut self.worth {
            worth.look_up(pages);
        }
    }

    /// Records that the pages of another request are used or put from now on.
    pub(super) fn begin_request(&mut self) {
        if let Some(worth) = &mut self.worth {
            worth.pages.begin_request();
        }
    }

    /// Records a use of the pages, which follow each other and become the last used: the first one is evicted
    /// last.
    pub(super) fn touch(&mut self, slots: &[FileSlot], recency: Recency) {
        for (page, &slot) in slots.iter().enumerate().rev() {
            self.leave(slot);
            self.record_use(slot, recency.tick(page));
            self.order.push(slot);
            self.offer(slot);
        }
    }

    /// Records a use of a page that is not in the order.
    fn record_use(&mut self, slot: FileSlot, tick: u64) {
        self.uses += 1;
        self.slot_use_mut(slot).record.tick = tick;
        if let Some(worth) = &mut self.worth {
            worth.record_use(slot);
        }
    }

    /// Tells the policy of a page that has got its place in the order.
    fn offer(&mut self, slot: FileSlot) {
        let Self { worth: Some(worth), order, slot_uses, .. } = self else { return };
        worth.pages.enter(slot, place_in_run(slot, order, slot_uses));
    }

    /// Takes a page out of the order.
    fn leave(&mut self, slot: FileSlot) {
        let Self { worth, order, slot_uses, .. } = self;
        if let Some(worth) = worth {
            worth.pages.leave(slot, place_in_run(slot, order, slot_uses));
        }
        order.remove(slot);
    }

    /// Records a use of a page, unless it was used later. `near` is a page with a similar tick.
    pub(super) fn raise(&mut self, slot: FileSlot, tick: u64, near: Option<FileSlot>) {
        if self.tick(slot) < tick {
            self.leave(slot);
            self.record_use(slot, tick);
            self.enter(slot, near);
        } else {
            self.uses += 1;
        }
    }

    /// Adds a page to the order, at the place of its tick. The one that was added before it is a good `near`.
    fn enter(&mut self, slot: FileSlot, near: Option<FileSlot>) {
        let is_there = |near: &FileSlot| *near != slot && self.slot_use(*near).usage == Use::Stored;
        let near = near.filter(is_there).or_else(|| self.entered.filter(is_there));
        let newer = self.last_used_since(self.tick(slot), near);
        self.order.insert_older_than(slot, newer);
        self.offer(slot);
        self.entered = Some(slot);
    }

    /// Returns the oldest of the pages whose tick is at least `tick`. Costs as many steps as there are pages
    /// between it and `near`, or an end of the order.
    fn last_used_since(&self, tick: u64, near: Option<FileSlot>) -> Option<FileSlot> {
        let (mut above, mut below) = (self.order.newest()?, self.order.oldest()?);
        if self.tick(above) < tick {
            return None;
        }
        if self.tick(below) >= tick {
            return Some(below);
        }
        match near {
            Some(near) if self.tick(near) >= tick => above = near,
            Some(near) => below = near,
            None => (),
        }
        loop {
            let next = self.order.older(above).expect("`below` is older");
            if self.tick(next) < tick {
                return Some(above);
            }
            above = next;
            let next = self.order.newer(below).expect("`above` is newer");
            if self.tick(next) >= tick {
                return Some(next);
            }
            below = next;
        }
    }

    /// Returns the record to write to the index, if the one in the index is much older.
    pub(super) fn stale_record(&mut self, slot: FileSlot) -> Option<Record> {
        let (uses, most) = (self.uses, to_u64(self.count / 8));
        let slot_use = self.slot_use_mut(slot);
        let is_stale = slot_use.usage == Use::Stored && uses - slot_use.written_at > most;
        if is_stale {
            slot_use.written_at = uses;
        }
        is_stale.then_some(slot_use.record)
    }

    /// Holds the slot of a page.
    pub(super) fn hold(&mut self, slot: FileSlot) {
        self.slot_use_mut(slot).holders += 1;
    }

    /// Returns whether a page that is held was removed.
    pub(super) fn is_removed(&self, slot: FileSlot) -> bool {
        self.slot_use(slot).usage == Use::Removed
    }

    /// Ends a hold. The slot of a removed page is free when the last one has ended.
    pub(super) fn release(&mut self, slot: FileSlot) {
        let slot_use = self.slot_use_mut(slot);
        slot_use.holders -= 1;
        if slot_use.holders == 0 && slot_use.usage == Use::Removed {
            slot_use.usage = Use::Free;
            self.free.push_back(slot);
        }
    }

    /// Takes a slot for a page with this tick: a free one, or that of the page that is worth least or was used least
    /// recently, if its tick is smaller. Pages with larger ticks stay: they come before it in a prompt, or were
    /// used later.
    pub(super) fn take(&mut self, tick: u64) -> Option<FileSlot> {
        let slot = if self.len() + self.written < self.limit { self.take_free() } else { None };
        let slot = slot.or_else(|| self.evict(tick))?;
        self.slot_use_mut(slot).usage = Use::Written;
        self.written += 1;
        Some(slot)
    }

    fn take_free(&mut self) -> Option<FileSlot> {
        if let Some(slot) = self.free.pop_back() {
            return Some(slot);
        }
        let fresh = self.slot_uses.len();
        if fresh >= self.count {
            return None;
        }
        self.reserve_worth_below(fresh + 1).ok()?;
        try_push(&mut self.slot_uses, SlotUse::FREE).ok()?;
        Some(FileSlot::new(u32::try_from(fresh).expect("MAX_SLOTS was checked")))
    }

    fn reserve_worth_below(&mut self, end: usize) -> Result<()> {
        self.worth.iter_mut().try_for_each(|worth| worth.pages.reserve_below(end))
    }

    /// Evicts the page that is worth least, or was used least recently, of those that are not held and have a smaller
    /// tick. The caller takes its slot.
    fn evict(&mut self, tick: u64) -> Option<FileSlot> {
        let slot = self.worth_least(tick).or_else(|| {
            let mut older = self.order.iter_oldest().take_while(|&slot| self.tick(slot) < tick);
            older.find(|&slot| self.slot_use(slot).holders == 0)
        })?;
        let key = self.slot_use(slot).record.key;
        self.by_key.remove(&key);
        self.leave(slot);
        if let Some(worth) = &mut self.worth {
            worth.pages.record_evicted(slot, &key);
        }
        self.evicted += 1;
        Some(slot)
    }

    /// Returns the page that is worth least of those that are not held and have a smaller tick, if it is soon found.
    fn worth_least(&mut self, tick: u64) -> Option<FileSlot> {
        let pages = self.len();
        let Self { worth, slot_uses, .. } = self;
        worth.as_mut()?.pages.first(pages, |slot| {
            let slot_use = &slot_uses[widen(slot.number())];
            slot_use.holders == 0 && slot_use.record.tick < tick
        })
    }

    /// Makes the page in a taken slot one that can be found. The entry in the index has the tick of `record`,
    /// which may be smaller than `tick`. The page is next to the one `before` it, if that is there.
    pub(super) fn store(&mut self, slot: FileSlot, record: Record, tick: u64, before: Option<&PageHash>) {
        let near = before.and_then(|key| self.find(key));
        self.begin_use(slot, record, tick);
        self.enter(slot, near);
        self.stored_since_full += 1;
        if self.full_at.is_some_and(|full| self.len() + self.written > full) {
            self.full_at = None;
        }
        if self.stored_since_full >= PROBE {
            self.limit = self.count;
        }
    }

    fn begin_use(&mut self, slot: FileSlot, record: Record, tick: u64) {
        self.uses += 1;
        let written_at = self.uses;
        let slot_use = self.slot_use_mut(slot);
        debug_assert_eq!(slot_use.usage, Use::Written, "{slot:?} was not taken");
        *slot_use =
            SlotUse { record: Record { tick, ..record }, written_at, usage: Use::Stored, ..*slot_use };
        if let Some(worth) = &mut self.worth {
            worth.add(slot, &record.key);
        }
        self.written -= 1;
        self.by_key.insert(record.key, slot);
    }

    /// Gives up a taken slot. It is taken again after all others, as its place on the disk may be bad.
    pub(super) fn give_up(&mut self, slot: FileSlot) {
        self.slot_use_mut(slot).usage = Use::Free;
        self.written -= 1;
        self.free.push_front(slot);
    }

    /// Records that the disk has no space for more pages than it has now. Others are evicted for new ones until
    /// it is tried again. Returns whether this was not known.
    pub(super) fn record_full(&mut self) -> bool {
        let used = (self.len() + self.written).min(self.count);
        self.limit = used.max(1);
        self.stored_since_full = 0;
        self.full_at.replace(used).is_none()
    }

    /// Removes a page. Its slot is held for the caller, who clears its entry and releases it.
    pub(super) fn remove(&mut self, key: &PageHash) -> Option<FileSlot> {
        let slot = self.by_key.remove(key)?;
        self.leave(slot);
        let slot_use = self.slot_use_mut(slot);
        slot_use.usage = Use::Removed;
        slot_use.holders += 1;
        Some(slot)
    }

    /// Fills the slots with the pages of an index, by ascending tick. Slots are below `count`, and each
    /// occurs once.
    pub(super) fn fill(&mut self, pages: &[(FileSlot, Record)]) -> Result<()> {
        let end = pages.iter().map(|(slot, _)| widen(slot.number()) + 1).max().unwrap_or(0);
        self.free.try_reserve(end).map_err(|_| out_of_memory_error::<FileSlot>(end))?;
        self.by_key.try_reserve(pages.len()).map_err(|_| out_of_memory_error::<PageHash>(pages.len()))?;
        self.order.reserve_below(end)?;
        self.reserve_worth_below(end)?;
        for slot in 0..end {
            try_push(&mut self.slot_uses, SlotUse::FREE)?;
            self.free.push_front(FileSlot::new(u32::try_from(slot).expect("MAX_SLOTS was checked")));
        }
        for &(slot, record) in pages {
            self.slot_use_mut(slot).usage = Use::Written;
            self.written += 1;
            self.begin_use(slot, record, record.tick);
            self.order.push(slot);
            self.offer(slot);
        }
        let slot_uses = &self.slot_uses;
        self.free.retain(|&slot| slot_uses[widen(slot.number())].usage == Use::Free);
        Ok(())
    }

    /// Returns a description of the first broken invariant.
    pub(super) fn broken_invariant(&self) -> Option<String> {
        let (mut seen, mut tick) = (0, 0);
        for slot in self.order.iter_oldest() {
            let slot_use = self.slot_use(slot);
            let is_known = slot_use.usage == Use::Stored && self.find(&slot_use.record.key) == Some(slot);
            if !is_known || slot_use.record.tick < tick {
                return Some(format!("{slot:?} is out of order: {slot_use:?}"));
            }
            (seen, tick) = (seen + 1, slot_use.record.tick);
        }
        let of = |usage| self.slot_uses.iter().filter(|slot_use| slot_use.usage == usage).count();
        let counted = [of(Use::Stored), of(Use::Written), of(Use::Free)];
        let known = [seen, self.written, self.free.len()];
        if counted != known || seen != self.len() || self.slot_uses.len() > self.count {
            return Some(format!("{counted:?} pages are stored, written and free, {known:?} are known"));
        }
        None
    }
}

/// Returns the place of a page among those of similar ticks.
fn place_in_run(
    slot: FileSlot,
    order: &RecencyList<FileSlot>,
    slot_uses: &[SlotUse],
) -> PlaceInRun<FileSlot> {
    let tick = |slot: FileSlot| slot_uses[widen(slot.number())].record.tick;
    PlaceInRun::of(slot, order, |slot, other| is_one_run(tick(slot), tick(other)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::file_store::recency::{PutAfter, Ticks};

    /// Slots that are full of prompts of one page, each of which was used once more than the one before.
    fn full(count: u32, ticks: &mut Ticks) -> Slots {
        let mut slots = Slots::new(widen(count), PolicyKind::Lfu);
        for number in 0..count {
            let slot = put(&mut slots, ticks, number).expect("a free slot");
            for _ in 0..number {
                slots.look_up(1);
                slots.touch(&[slot], ticks.look_up(1));
            }
        }
        slots
    }

    fn put(slots: &mut Slots, ticks: &mut Ticks, number: u32) -> Option<FileSlot> {
        let tick = ticks.put(1, slots.room(), PutAfter::Nothing, None).tick(0);
        let slot = slots.take(tick)?;
        let mut key = [0; 32];
        key[..4].copy_from_slice(&number.to_le_bytes());
        slots.store(slot, Record { key, sum: [0; 16], tick }, tick, None);
        Some(slot)
    }

    #[test]
    fn a_page_that_is_read_stays() {
        let mut ticks = Ticks::after(0);
        let mut slots = full(4, &mut ticks);
        slots.hold(FileSlot::new(0));
        assert_eq!(
            put(&mut slots, &mut ticks, 4),
            Some(FileSlot::new(1)),
            "the next one that was seldom used"
        );
        slots.release(FileSlot::new(0));
        assert_eq!(put(&mut slots, &mut ticks, 5), Some(FileSlot::new(0)));
        assert_eq!(slots.broken_invariant(), None);
    }

    #[test]
    fn the_oldest_goes_if_many_must_stay() {
        let mut ticks = Ticks::after(0);
        let count = 20;
        let mut slots = full(count, &mut ticks);
        // The last ones were used most often, and now the others later.
        for number in 0..count - 2 {
            let slot = FileSlot::new(number);
            slots.touch(&[slot], ticks.touch(1));
            slots.hold(slot);
        }
        assert_eq!(put(&mut slots, &mut ticks, count), Some(FileSlot::new(count - 2)));
        for number in 0..count - 2 {
            slots.release(FileSlot::new(number));
        }
        assert_eq!(put(&mut slots, &mut ticks, count + 1), Some(FileSlot::new(count - 2)), "it is new");
        assert_eq!(slots.broken_invariant(), None);
    }

    #[test]
    fn a_prompt_loses_its_end() {
        let mut ticks = Ticks::after(0);
        let mut slots = Slots::new(6, PolicyKind::Lfu);
        for prompt in 0..2 {
            let recency = ticks.put(3, 6, PutAfter::Nothing, None);
            // Threads store the pages in any order.
            for page in [1, 2, 0] {
                let tick = recency.tick(page);
                let slot = slots.take(tick).expect("a free slot");
                let mut key = [prompt; 32];
                key[0] = u8::try_from(page).expect("few");
                slots.store(slot, Record { key, sum: [0; 16], tick }, tick, None);
            }
        }
        let of = |slots: &Slots, prompt: u8| -> Vec<u8> {
            let key = |page| std::array::from_fn(|at| if at == 0 { page } else { prompt });
            (0..3).filter(|&page| slots.find(&key(page)).is_some()).collect()
        };
        let mut left = Vec::new();
        for number in 0..3 {
            put(&mut slots, &mut ticks, 1 << 16 | number).expect("a page to evict");
            left.push((of(&slots, 0), of(&slots, 1)));
        }
        assert_eq!(left, [(vec![0, 1], vec![0, 1, 2]), (vec![0], vec![0, 1, 2]), (vec![], vec![0, 1, 2])]);
    }
}
