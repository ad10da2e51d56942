//! The contents of a tier below the device: the place of each key, and the order of eviction.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::base::{Id, id, widen};

use super::{Namespace, PageHash, RecencyList};

id!(
    /// An entry of a [`Residency`]. It stays that of its page as long as it is held.
    pub EntryId,
    "entry"
);

/// Whether the device has a page, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DevicePresence {
    /// The device does not have it: the page goes first.
    Absent,
    /// The device has it, too.
    Present,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The page is on its way here from the device, and not to be found.
    Arriving,
    /// The page is on its way here from further below: something else may bring it first.
    Fetched,
    /// The page is complete.
    Ready,
    /// The page is given up, but held.
    Removed,
    /// The entry is not in use.
    Vacant,
}

#[derive(Debug)]
struct Entry<P> {
    key: PageHash,
    place: P,
    /// A hash of the namespace.
    namespace: u64,
    /// Copies that use the place.
    holders: u32,
    presence: DevicePresence,
    stage: Stage,
}

/// The contents of a tier, by key: pages, or snapshots of states.
///
/// An entry is found when its copy is complete. An entry that copies use keeps its place until the last of
/// them has ended, even if it is given up meanwhile. Of the others, entries that the device does not have are
/// evicted first, the least recently used before the rest: entries that the device has are not looked up here
/// now, and will be needed here when the device evicts them.
///
/// ```
/// use kvpool::cache::{DevicePresence, Namespace, Residency};
/// let mut tier = Residency::default();
/// let entry = tier.begin([1; 32], &Namespace::Unnamed, "place 0");
/// assert_eq!((tier.find(&[1; 32]), tier.contains(&[1; 32])), (None, true));
/// assert_eq!(tier.arrive(entry, DevicePresence::Absent), None);
/// tier.hold(tier.find(&[1; 32]).unwrap());
/// assert_eq!(tier.evict(), None, "it is in use");
/// assert_eq!(tier.release(entry), None);
/// assert_eq!(tier.evict(), Some(([1; 32], "place 0")));
/// ```
#[derive(Debug)]
pub struct Residency<P> {
    entries: Vec<Entry<P>>,
    vacant: Vec<EntryId>,
    by_key: HashMap<PageHash, EntryId>,
    /// The entries that are ready and not held: pages that the device has not, and pages that it has, too.
    order: [RecencyList<EntryId>; 2],
    ready: usize,
    clears: u64,
}

impl<P> Default for Residency<P> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            vacant: Vec::new(),
            by_key: HashMap::new(),
            order: Default::default(),
            ready: 0,
            clears: 0,
        }
    }
}

impl<P: Copy> Residency<P> {
    /// Returns the number of pages that can be found.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.ready
    }

    /// Returns whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.ready == 0
    }

    /// Returns the number of pages that are on their way here.
    #[must_use]
    pub fn arriving(&self) -> usize {
        self.by_key.len() - self.ready
    }

    /// Returns whether a page is here, or on its way from the device.
    #[must_use]
    pub fn contains(&self, key: &PageHash) -> bool {
        self.by_key.get(key).is_some_and(|&entry| self.entry(entry).stage != Stage::Fetched)
    }

    /// Gives up a page that is on its way from further below, if it is. Its place stays in use until
    /// [`Self::arrive`] or [`Self::fail`].
    pub fn give_up_fetch(&mut self, key: &PageHash) {
        if let Some(&entry) = self.by_key.get(key)
            && self.entry(entry).stage == Stage::Fetched
        {
            self.remove(entry);
        }
    }

    /// Returns the entry of a page that is complete.
    #[must_use]
    pub fn find(&self, key: &PageHash) -> Option<EntryId> {
        let &entry = self.by_key.get(key)?;
        (self.entry(entry).stage == Stage::Ready).then_some(entry)
    }

    /// Returns the place of an entry that is held, or was just found.
    #[must_use]
    pub fn place(&self, entry: EntryId) -> P {
        self.entry(entry).place
    }

    /// Returns the key of an entry that is held, or was just found.
    #[must_use]
    pub fn key(&self, entry: EntryId) -> &PageHash {
        &self.entry(entry).key
    }

    /// Returns the number of calls of [`Self::clear`].
    #[must_use]
    pub const fn clears(&self) -> u64 {
        self.clears
    }

    /// Returns the number of places that pages have, those that are given up but held included.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.entries.len() - self.vacant.len()
    }

    /// Lets a page begin to arrive from the device, which [contains](Self::contains) says is not here.
    pub fn begin(&mut self, key: PageHash, namespace: &Namespace, place: P) -> EntryId {
        self.add(key, namespace, place, Stage::Arriving)
    }

    /// Lets a page begin to arrive from further below. If it begins to arrive from the device meanwhile, that
    /// takes the place of this.
    pub fn begin_fetch(&mut self, key: PageHash, namespace: &Namespace, place: P) -> EntryId {
        self.add(key, namespace, place, Stage::Fetched)
    }

    fn add(&mut self, key: PageHash, namespace: &Namespace, place: P, stage: Stage) -> EntryId {
        self.give_up_fetch(&key);
        let namespace = hash_of(namespace);
        let entry = Entry { key, place, namespace, holders: 1, presence: DevicePresence::Absent, stage };
        let id = if let Some(id) = self.vacant.pop() {
            *self.entry_mut(id) = entry;
            id
        } else {
            let number = u32::try_from(self.entries.len()).expect("places are numbered in 32 bits");
            self.entries.push(entry);
            EntryId::new(number)
        };
        let previous = self.by_key.insert(key, id);
        debug_assert!(previous.is_none(), "a page is in one place");
        id
    }

    /// Makes a page that was arriving complete, as the one used last; `presence` says whether the device has
    /// it still. Returns its place if it was given up meanwhile.
    pub fn arrive(&mut self, entry: EntryId, presence: DevicePresence) -> Option<P> {
        let here = self.entry_mut(entry);
        if matches!(here.stage, Stage::Arriving | Stage::Fetched) {
            (here.stage, here.presence) = (Stage::Ready, presence);
            self.ready += 1;
        }
        self.release(entry)
    }

    /// Records that the device has pages, or has them no more, which is a use: the last is evicted last.
    /// Those that are not complete here are left out.
    pub fn set_device_presence<'a>(
        &mut self,
        keys: impl IntoIterator<Item = &'a PageHash>,
        presence: DevicePresence,
    ) {
        for key in keys {
            if let Some(entry) = self.find(key) {
                let previous = std::mem::replace(&mut self.entry_mut(entry).presence, presence);
                if self.entry(entry).holders == 0 {
                    self.order[previous as usize].remove(entry);
                    self.order[presence as usize].push(entry);
                }
            }
        }
    }

    /// Records that the device has none of the pages any more.
    pub fn set_none_on_device(&mut self) {
        let [lone, present] = &mut self.order;
        present.iter_oldest().for_each(|entry| lone.push(entry));
        *present = RecencyList::default();
        self.entries.iter_mut().for_each(|entry| entry.presence = DevicePresence::Absent);
    }

    /// Gives up a page that was arriving. Returns its place.
    pub fn fail(&mut self, entry: EntryId) -> Option<P> {
        self.remove(entry);
        self.release(entry)
    }

    /// Keeps the place of a complete page until it is released.
    pub fn hold(&mut self, entry: EntryId) {
        let here = self.entry_mut(entry);
        here.holders += 1;
        if here.holders == 1 {
            let presence = here.presence;
            self.order[presence as usize].remove(entry);
        }
    }

    /// Ends a hold, which is a use. Returns the place if it was the last one of a page that was given up.
    pub fn release(&mut self, entry: EntryId) -> Option<P> {
        let here = self.entry_mut(entry);
        here.holders -= 1;
        if here.holders > 0 {
            return None;
        }
        let (stage, presence) = (here.stage, here.presence);
        if stage == Stage::Ready {
            self.order[presence as usize].push(entry);
        }
        (stage == Stage::Removed).then(|| self.vacate(entry))
    }

    /// Gives up the page that goes first. Returns its key and its place; `None` if all are in use.
    pub fn evict(&mut self) -> Option<(PageHash, P)> {
        let oldest = self.order.iter().find_map(RecencyList::oldest)?;
        let key = self.entry(oldest).key;
        self.remove(oldest);
        Some((key, self.vacate(oldest)))
    }

    /// Gives up the pages of a namespace, or all: they are found no more. Returns their keys, and the places
    /// of those that nothing uses.
    pub fn clear(&mut self, namespace: Option<&Namespace>) -> (Vec<PageHash>, Vec<P>) {
        self.clears += 1;
        let name = namespace.map(hash_of);
        let is_named = |entry: &Entry<P>| name.is_none_or(|name| name == entry.namespace);
        let entries: Vec<EntryId> =
            self.by_key.values().copied().filter(|&entry| is_named(self.entry(entry))).collect();
        let (mut keys, mut places) = (Vec::with_capacity(entries.len()), Vec::new());
        for entry in entries {
            if self.entry(entry).stage == Stage::Ready {
                keys.push(self.entry(entry).key);
            }
            self.remove(entry);
            if self.entry(entry).holders == 0 {
                places.push(self.vacate(entry));
            }
        }
        (keys, places)
    }

    /// Returns the size of the bookkeeping in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry<P>>()
            + self.vacant.capacity() * size_of::<EntryId>()
            + self.by_key.capacity() * (size_of::<(PageHash, EntryId)>() + 1)
            + self.order.iter().map(RecencyList::bytes).sum::<usize>()
    }

    fn entry(&self, entry: EntryId) -> &Entry<P> {
        &self.entries[widen(entry.number())]
    }

    fn entry_mut(&mut self, entry: EntryId) -> &mut Entry<P> {
        &mut self.entries[widen(entry.number())]
    }

    /// Lets a page be found no more.
    fn remove(&mut self, entry: EntryId) {
        let here = self.entry(entry);
        let (key, stage, is_held) = (here.key, here.stage, here.holders > 0);
        if stage == Stage::Removed {
            return;
        }
        if stage == Stage::Ready {
            if !is_held {
                self.order[here.presence as usize].remove(entry);
            }
            self.ready -= 1;
        }
        self.by_key.remove(&key);
        self.entry_mut(entry).stage = Stage::Removed;
    }

    fn vacate(&mut self, entry: EntryId) -> P {
        let here = self.entry_mut(entry);
        here.stage = Stage::Vacant;
        let place = here.place;
        self.vacant.push(entry);
        place
    }

    /// Describes a broken invariant, if there is one.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let of = |stage| self.entries.iter().filter(|entry| entry.stage == stage).count();
        let counted = [of(Stage::Ready), of(Stage::Arriving) + of(Stage::Fetched), of(Stage::Vacant)];
        let known = [self.ready, self.arriving(), self.vacant.len()];
        let mut ordered = 0;
        for (order, presence) in self.order.iter().zip([DevicePresence::Absent, DevicePresence::Present]) {
            for entry in order.iter_oldest().map(|entry| self.entry(entry)) {
                if (entry.stage, entry.presence, entry.holders) != (Stage::Ready, presence, 0) {
                    return Some(format!("{:?} is out of order", entry.key));
                }
                ordered += 1;
            }
        }
        let idle = self.entries.iter().filter(|entry| entry.stage == Stage::Ready && entry.holders == 0);
        if counted != known || ordered != idle.count() {
            return Some(format!(
                "{counted:?} entries are ready, arriving and vacant; {known:?} are known, {ordered} in order"
            ));
        }
        let lost = self.by_key.iter().find(|&(key, &entry)| self.entry(entry).key != *key);
        lost.map(|(key, entry)| format!("entry {entry} is not that of {key:?}"))
    }
}

fn hash_of(namespace: &Namespace) -> u64 {
    let mut hasher = DefaultHasher::new();
    namespace.hash(&mut hasher);
    hasher.finish()
}
