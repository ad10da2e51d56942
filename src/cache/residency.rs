//! The contents of a tier below the device: which page is in which place, and the order of eviction.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::base::{Id, id, widen};

use super::{Namespace, PageHash, RecencyList};

id!(
    /// An entry of a [`Residency`]. As long as it is held, it belongs to the same page.
    pub EntryId,
    "entry"
);

/// Whether the device has a page that the tier has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DevicePresence {
    /// The device does not have the page, so the tier evicts it before those that the device has.
    Absent,
    /// The device has the page, too.
    Present,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// A copy from the device is in progress. The page cannot be found yet.
    Arriving,
    /// A copy from the store is in progress. A copy from the device may replace it.
    Fetched,
    /// The page is complete.
    Ready,
    /// The page was removed, but its place is still held.
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
    /// The number of copies that use the place.
    holders: u32,
    presence: DevicePresence,
    stage: Stage,
}

/// The contents of a tier by key: pages, or snapshots of states.
///
/// An entry can be found once its copy is complete. An entry that copies use keeps its place until the last
/// copy has ended, even if the entry is removed in the meantime.
///
/// Of the entries that no copy uses, those that the device does not have are evicted first, the least
/// recently used before the others. Entries that the device has are not looked up in the tier at present, and
/// will be needed when the device evicts them.
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
    /// The entries that are ready and not held, in the order of eviction: those that the device does not
    /// have, then those that it has.
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

    /// Returns whether no page can be found.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.ready == 0
    }

    /// Returns the number of pages whose copies are in progress.
    #[must_use]
    pub fn arriving(&self) -> usize {
        self.by_key.len() - self.ready
    }

    /// Returns whether the tier has a page, or a copy of it from the device is in progress.
    #[must_use]
    pub fn contains(&self, key: &PageHash) -> bool {
        self.by_key.get(key).is_some_and(|&entry| self.entry(entry).stage != Stage::Fetched)
    }

    /// Cancels the copy of a page from the store, if one is in progress. Its place stays in use until
    /// [`Self::arrive`] or [`Self::fail`].
    pub fn cancel_fetch(&mut self, key: &PageHash) {
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

    /// Returns the number of places in use, including those of removed pages that are held.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.entries.len() - self.vacant.len()
    }

    /// Begins the copy of a page from the device. The tier must not [contain](Self::contains) the page.
    pub fn begin(&mut self, key: PageHash, namespace: &Namespace, place: P) -> EntryId {
        self.add(key, namespace, place, Stage::Arriving)
    }

    /// Begins the copy of a page from the store. If a copy from the device begins in the meantime, it
    /// replaces this one.
    pub fn begin_fetch(&mut self, key: PageHash, namespace: &Namespace, place: P) -> EntryId {
        self.add(key, namespace, place, Stage::Fetched)
    }

    fn add(&mut self, key: PageHash, namespace: &Namespace, place: P, stage: Stage) -> EntryId {
        self.cancel_fetch(&key);
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

    /// Completes the copy of a page, and makes the page the most recently used one. `presence` says whether
    /// the device still has the page. Returns the place if the page was removed in the meantime.
    pub fn arrive(&mut self, entry: EntryId, presence: DevicePresence) -> Option<P> {
        let here = self.entry_mut(entry);
        if matches!(here.stage, Stage::Arriving | Stage::Fetched) {
            (here.stage, here.presence) = (Stage::Ready, presence);
            self.ready += 1;
        }
        self.release(entry)
    }

    /// Records that the device has pages, or no longer has them. This counts as a use, the last page being
    /// the most recent one. Pages that are not complete in the tier are left out.
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

    /// Records that the device no longer has any of the pages.
    pub fn set_none_on_device(&mut self) {
        let [lone, present] = &mut self.order;
        present.iter_oldest().for_each(|entry| lone.push(entry));
        *present = RecencyList::default();
        self.entries.iter_mut().for_each(|entry| entry.presence = DevicePresence::Absent);
    }

    /// Abandons the copy of a page. Returns its place.
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

    /// Ends a hold, which counts as a use. Returns the place if this was the last hold of a removed page.
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

    /// Evicts the first page in the order of eviction. Returns its key and its place; `None` if all pages are
    /// in use.
    pub fn evict(&mut self) -> Option<(PageHash, P)> {
        let oldest = self.order.iter().find_map(RecencyList::oldest)?;
        let key = self.entry(oldest).key;
        self.remove(oldest);
        Some((key, self.vacate(oldest)))
    }

    /// Removes the pages of a namespace, or all pages, so that they can no longer be found. Returns their
    /// keys, and the places that nothing uses.
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

    /// Removes a page, so that it can no longer be found.
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
