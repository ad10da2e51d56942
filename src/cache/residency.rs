//! The contents of a tier below the device: which page is in which place, and the order of eviction.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::base::{Epoch, Id, KeyMap, id, widen};

use super::{History, Namespace, PageHash, PageWorth, PlaceInRun, PolicyKind, RecencyList, Tick};

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

/// A hash of a namespace, the same in each process, for the pages of one that is asked for many times.
///
/// ```
/// use kvpool::cache::{DevicePresence, EntryId, Namespace, NamespaceHash, Residency};
/// let name = NamespaceHash::from(&Namespace::Unnamed);
/// let mut tier = Residency::default();
/// let entries: Vec<EntryId> =
///     (0..3).map(|page| tier.begin([page; 32], name, page, DevicePresence::Absent)).collect();
/// assert_eq!(entries.iter().map(|&entry| tier.place(entry)).collect::<Vec<_>>(), [0, 1, 2]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceHash(u64);

impl NamespaceHash {
    pub(super) const fn number(self) -> u64 {
        self.0
    }
}

impl From<&Namespace> for NamespaceHash {
    fn from(namespace: &Namespace) -> Self {
        let mut hasher = DefaultHasher::new();
        namespace.hash(&mut hasher);
        Self(hasher.finish())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// A copy from the device is in progress. The page can be found: later copies run behind this one.
    Arriving,
    /// A copy from the store is in progress. The page cannot be found yet, and a copy from the device may
    /// replace this one.
    Fetched,
    /// The page is complete.
    Ready,
    /// The page was removed, but its place is still in use.
    Removed,
    /// The page was removed and its place given up while its copy from the device is in progress.
    Departed,
    /// The entry is not in use.
    Vacant,
}

#[derive(Debug)]
struct Entry<P> {
    key: PageHash,
    place: P,
    namespace: NamespaceHash,
    /// The number of holds. A held entry has no place in the order of eviction.
    holders: u32,
    /// The number of readers that keep the place, but do not change when the entry is evicted.
    readers: u32,
    /// Whether a copy from the device to the place is in progress.
    is_copied: bool,
    presence: DevicePresence,
    stage: Stage,
}

impl<P> Entry<P> {
    /// Returns whether the page can be found.
    fn is_there(&self) -> bool {
        matches!(self.stage, Stage::Arriving | Stage::Ready)
    }

    /// Returns whether nothing reads the entry, and its place can be used.
    fn can_go(&self, is_usable: &impl Fn(P) -> bool) -> bool
    where
        P: Copy,
    {
        self.readers == 0 && is_usable(self.place)
    }

    /// Returns whether the entry has a place in the order of eviction.
    fn is_ordered(&self) -> bool {
        self.is_there() && self.holders == 0
    }
}

/// The contents of a tier by key: pages, or snapshots of states.
///
/// A page from the device can be found as soon as its copy begins, so that what is found and what is evicted
/// depends on the calls alone, not on when copies end: whoever uses the place of an entry orders itself
/// behind the copies of that place. A page from a store can be found once it is complete. An entry that is
/// held keeps its place, even if the entry is removed in the meantime.
///
/// Of the entries that nothing holds, those that the device does not have are evicted first, the least
/// recently used before the others or, with [`Self::set_policy`], those that are worth least before the
/// others. Entries that the device has are not looked up in the tier at present, and will be needed when the
/// device evicts them.
///
/// ```
/// use kvpool::cache::{DevicePresence, Namespace, Residency};
/// let mut tier = Residency::default();
/// let entry = tier.begin([1; 32], &Namespace::Unnamed, "place 0", DevicePresence::Absent);
/// assert_eq!((tier.find(&[1; 32]), tier.find_complete(&[1; 32])), (Some(entry), None));
/// assert_eq!(tier.evict(|_| true), None, "the call that began the copy holds it");
/// assert_eq!(tier.release(entry), None);
/// tier.arrive(entry);
/// assert_eq!(tier.find_complete(&[1; 32]), Some(entry));
/// assert_eq!(tier.evict(|_| true), Some(([1; 32], "place 0")));
/// ```
#[derive(Debug)]
pub struct Residency<P> {
    entries: Vec<Entry<P>>,
    vacant: Vec<EntryId>,
    by_key: KeyMap<PageHash, EntryId>,
    /// The entries that can be found and are not held: those that the device does not have, in the order in which
    /// they came, and those that it has, too, which are evicted after the others.
    lone: RecencyList<EntryId>,
    present: RecencyList<EntryId>,
    /// What pages are worth, if those that the device does not have are evicted by that.
    worth: Option<Box<PageWorth<EntryId>>>,
    /// By worth, the newest one of those of `lone` that were used at a time, which are neighbours there.
    runs: KeyMap<Tick, EntryId>,
    ready: usize,
    departed: usize,
    epoch: Epoch,
}

impl<P> Default for Residency<P> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            vacant: Vec::new(),
            by_key: KeyMap::default(),
            lone: RecencyList::default(),
            present: RecencyList::default(),
            worth: None,
            runs: KeyMap::default(),
            ready: 0,
            departed: 0,
            epoch: Epoch::default(),
        }
    }
}

impl<P: Copy> Residency<P> {
    /// Evicts entries that the device does not have by what they are worth to a policy, whose time begins, or by recency.
    /// There is room for `count` pages.
    pub fn set_policy(&mut self, policy: PolicyKind, count: usize, page_tokens: u32) {
        self.runs.clear();
        self.worth = match policy {
            PolicyKind::Lru => None,
            _ => Some(Box::new(PageWorth::new(policy, count, page_tokens))),
        };
        let Some(worth) = &mut self.worth else { return };
        for (number, entry) in (0..).zip(&self.entries) {
            if matches!(entry.stage, Stage::Arriving | Stage::Fetched | Stage::Ready) {
                worth.add(EntryId::new(number), &entry.key);
            }
        }
        for entry in std::mem::take(&mut self.lone).iter_oldest() {
            self.put_in_order(entry);
        }
    }

    /// Sets the time, in tokens that were looked up in the cache above.
    pub fn set_now(&mut self, now: Tick) {
        if let Some(worth) = &mut self.worth {
            worth.set_now(now);
        }
    }

    /// Records that requests have used pages that the device has. Pages that are not there are left out.
    pub fn record_uses<'a>(&mut self, keys: impl IntoIterator<Item = &'a PageHash>) {
        let Self { entries, by_key, worth: Some(worth), .. } = self else { return };
        for &entry in keys.into_iter().filter_map(|key| by_key.get(key)) {
            // An entry that the device does not have may have a place in the order.
            if entries[widen(entry.number())].presence == DevicePresence::Present {
                worth.record_use(entry);
            }
        }
    }

    /// Records that pages of another request begin from now on.
    pub fn begin_request(&mut self, now: Tick) {
        self.set_now(now);
        if let Some(worth) = &mut self.worth {
            worth.begin_request();
        }
    }

    /// Adds an entry to the order, as the newest one, or behind those that were used together with it: these left the
    /// device before it.
    fn put_in_order(&mut self, entry: EntryId) {
        if self.entry(entry).presence == DevicePresence::Present {
            self.present.push(entry);
            return;
        }
        let Self { lone, runs, .. } = self;
        let Some(worth) = &mut self.worth else {
            lone.push(entry);
            return;
        };
        let newest = runs.insert(worth.used(entry), entry);
        lone.insert_older_than(entry, newest.and_then(|newest| lone.newer(newest)));
        worth.enter(entry, PlaceInRun::of(entry, lone, |entry, other| worth.are_used_together(entry, other)));
    }

    fn remove_from_order(&mut self, entry: EntryId) {
        if self.entry(entry).presence == DevicePresence::Present {
            self.present.remove(entry);
            return;
        }
        let Self { lone, runs, .. } = self;
        if let Some(worth) = &mut self.worth {
            let used = worth.used(entry);
            if runs.get(&used) == Some(&entry) {
                match lone.older(entry).filter(|&older| worth.are_used_together(older, entry)) {
                    Some(older) => runs.insert(used, older),
                    None => runs.remove(&used),
                };
            }
            worth.leave(
                entry,
                PlaceInRun::of(entry, lone, |entry, other| worth.are_used_together(entry, other)),
            );
        }
        lone.remove(entry);
    }

    /// Returns the number of pages that are complete.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.ready
    }

    /// Returns whether no page is complete.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.ready == 0
    }

    /// Returns the number of pages whose copies are in progress.
    #[must_use]
    pub fn arriving(&self) -> usize {
        self.by_key.len() - self.ready
    }

    /// Cancels the copy of a page from the store, if one is in progress. Its place stays in use until
    /// [`Self::arrive_fetched`] or [`Self::fail_fetched`].
    pub fn cancel_fetch(&mut self, key: &PageHash) {
        if let Some(&entry) = self.by_key.get(key)
            && self.entry(entry).stage == Stage::Fetched
        {
            self.remove(entry);
        }
    }

    /// Returns the entry of a page that is complete, or whose copy from the device has begun.
    #[must_use]
    pub fn find(&self, key: &PageHash) -> Option<EntryId> {
        let &entry = self.by_key.get(key)?;
        self.entry(entry).is_there().then_some(entry)
    }

    /// Returns the entry of a page that is complete.
    #[must_use]
    pub fn find_complete(&self, key: &PageHash) -> Option<EntryId> {
        let &entry = self.by_key.get(key)?;
        (self.entry(entry).stage == Stage::Ready).then_some(entry)
    }

    /// Returns the place of an entry that is held, or was just found.
    #[must_use]
    pub fn place(&self, entry: EntryId) -> P {
        self.entry(entry).place
    }

    /// Returns the current epoch, which any [`Self::clear`] ends.
    #[must_use]
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns the number of places in use, including those of removed pages that are held.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.entries.len() - self.vacant.len() - self.departed
    }

    /// Makes room for `count` more pages.
    pub fn reserve(&mut self, count: usize) {
        self.by_key.reserve(count);
        self.entries.reserve(count.saturating_sub(self.vacant.len()));
    }

    /// Begins the copy of a page from the device, which has it or not. The page must not be
    /// [there](Self::find). The caller holds the entry: [release](Self::release) it to give it its place in
    /// the order of eviction.
    pub fn begin(
        &mut self,
        key: PageHash,
        namespace: impl Into<NamespaceHash>,
        place: P,
        presence: DevicePresence,
    ) -> EntryId {
        let id = self.add(key, namespace.into(), place, Stage::Arriving);
        let here = self.entry_mut(id);
        (here.is_copied, here.presence) = (true, presence);
        id
    }

    /// Begins the copy of a page from the store. If a copy from the device begins in the meantime, it
    /// replaces this one. The caller holds the entry.
    pub fn begin_fetch(&mut self, key: PageHash, namespace: impl Into<NamespaceHash>, place: P) -> EntryId {
        self.add(key, namespace.into(), place, Stage::Fetched)
    }

    fn add(&mut self, key: PageHash, namespace: NamespaceHash, place: P, stage: Stage) -> EntryId {
        let presence = DevicePresence::Absent;
        let (holders, readers, is_copied) = (1, 0, false);
        let entry = Entry { key, place, namespace, holders, readers, is_copied, presence, stage };
        let id = if let Some(id) = self.vacant.pop() {
            *self.entry_mut(id) = entry;
            id
        } else {
            let number = u32::try_from(self.entries.len()).expect("places are numbered in 32 bits");
            self.entries.push(entry);
            EntryId::new(number)
        };
        if let Some(worth) = &mut self.worth {
            worth.add(id, &key);
        }
        if let Some(fetched) = self.by_key.insert(key, id) {
            let here = self.entry_mut(fetched);
            debug_assert!(here.stage == Stage::Fetched, "a page is in one place");
            here.stage = Stage::Removed;
            self.vacate_unused(fetched);
        }
        id
    }

    /// Returns whether a page whose copy from the device is in progress can be found: its place is not that of
    /// another page.
    #[must_use]
    pub fn is_expected(&self, entry: EntryId) -> bool {
        self.entry(entry).stage == Stage::Arriving
    }

    /// Completes the copy of a page from the device. Returns whether the page can be found.
    pub fn arrive(&mut self, entry: EntryId) -> bool {
        let here = self.entry_mut(entry);
        here.is_copied = false;
        match here.stage {
            Stage::Arriving => {
                here.stage = Stage::Ready;
                self.ready += 1;
                return true;
            }
            Stage::Departed => self.vacate_departed(entry),
            _ => (),
        }
        false
    }

    /// Removes a page that somebody [reads](Self::begin_read). Returns whether it could be found.
    pub fn give_up(&mut self, entry: EntryId) -> bool {
        let is_there = self.entry(entry).is_there();
        if is_there {
            let place = self.remove(entry);
            debug_assert!(place.is_none(), "a reader keeps the place");
        }
        is_there
    }

    /// Abandons the copy of a page from the device. Returns its key, if the page was there, and its place,
    /// unless something still uses it.
    pub fn fail(&mut self, entry: EntryId) -> (Option<PageHash>, Option<P>) {
        let here = self.entry_mut(entry);
        here.is_copied = false;
        match here.stage {
            Stage::Arriving => {
                let key = here.key;
                (Some(key), self.remove(entry))
            }
            Stage::Departed => {
                self.vacate_departed(entry);
                (None, None)
            }
            _ => (None, None),
        }
    }

    /// Completes the copy of a page from the store. Returns whether the page was not removed in the meantime.
    /// The caller still holds the entry.
    pub fn arrive_fetched(&mut self, entry: EntryId) -> bool {
        let here = self.entry_mut(entry);
        let is_wanted = here.stage == Stage::Fetched;
        if is_wanted {
            here.stage = Stage::Ready;
            self.ready += 1;
        }
        is_wanted
    }

    /// Abandons the copy of a page from the store, and ends the hold of its entry. Returns its place.
    pub fn fail_fetched(&mut self, entry: EntryId) -> Option<P> {
        self.remove(entry);
        self.release(entry)
    }

    /// Records that the device has pages, or no longer has them. This counts as a use, the last page being
    /// the most recent one. Pages that are not there are left out.
    pub fn set_device_presence<'a>(
        &mut self,
        keys: impl IntoIterator<Item = &'a PageHash>,
        presence: DevicePresence,
    ) {
        for key in keys {
            if let Some(entry) = self.find(key) {
                self.set_presence(entry, presence, None);
            }
        }
    }

    /// Records that the device no longer has pages, with their histories.
    pub fn set_evicted_above<'a>(&mut self, pages: impl IntoIterator<Item = (&'a PageHash, &'a History)>) {
        for (key, history) in pages {
            if let Some(entry) = self.find(key) {
                self.set_presence(entry, DevicePresence::Absent, Some(*history));
            }
        }
    }

    /// Records whether the device has a page. Without a `history`, that of the page stays.
    fn set_presence(&mut self, entry: EntryId, presence: DevicePresence, history: Option<History>) {
        let is_ordered = self.entry(entry).holders == 0;
        if is_ordered {
            self.remove_from_order(entry);
        }
        let before = std::mem::replace(&mut self.entry_mut(entry).presence, presence);
        if let Some(worth) = &mut self.worth {
            match (history, before, presence) {
                (Some(history), ..) => worth.record_given_up(entry, &history),
                // The device has got it anew.
                (None, DevicePresence::Absent, DevicePresence::Present) => worth.record_use(entry),
                _ => (),
            }
        }
        if is_ordered {
            self.put_in_order(entry);
        }
    }

    /// Records that the device no longer has any of the pages.
    pub fn set_none_on_device(&mut self) {
        self.entries.iter_mut().for_each(|entry| entry.presence = DevicePresence::Absent);
        let present = std::mem::take(&mut self.present);
        present.iter_oldest().for_each(|entry| self.put_in_order(entry));
    }

    /// Keeps the place of a page that is there until it is released.
    pub fn hold(&mut self, entry: EntryId) {
        let here = self.entry_mut(entry);
        here.holders += 1;
        if here.holders == 1 {
            self.remove_from_order(entry);
        }
    }

    /// Ends a hold, which counts as a use. Returns the place if nothing uses it any more.
    pub fn release(&mut self, entry: EntryId) -> Option<P> {
        let here = self.entry_mut(entry);
        here.holders -= 1;
        if here.is_ordered() {
            self.put_in_order(entry);
        }
        self.vacate_unused(entry)
    }

    /// Keeps the place of a page that is there until [`Self::end_read`]. Does not count as a use, unlike a
    /// hold.
    pub fn begin_read(&mut self, entry: EntryId) {
        self.entry_mut(entry).readers += 1;
    }

    /// Ends what [`Self::begin_read`] began. Returns the place if nothing uses it any more.
    pub fn end_read(&mut self, entry: EntryId) -> Option<P> {
        self.entry_mut(entry).readers -= 1;
        self.vacate_unused(entry)
    }

    /// Evicts the first page, in the order of eviction, that nothing reads and whose place `is_usable`.
    /// Returns its key and its place; `None` if there is none.
    pub fn evict(&mut self, is_usable: impl Fn(P) -> bool) -> Option<(PageHash, P)> {
        let first = self
            .first_lone(&is_usable)
            .or_else(|| self.present.iter_oldest().find(|&entry| self.entry(entry).can_go(&is_usable)))?;
        let key = self.entry(first).key;
        let place = self.remove(first);
        if let Some(worth) = &mut self.worth {
            worth.record_evicted(first, &key);
        }
        place.map(|place| (key, place))
    }

    /// Returns the first entry that the device does not have and that can go.
    fn first_lone(&mut self, is_usable: &impl Fn(P) -> bool) -> Option<EntryId> {
        let Self { entries, lone, worth, by_key, .. } = self;
        let can_go = |entry: EntryId| entries[widen(entry.number())].can_go(is_usable);
        let least = worth.as_mut().and_then(|worth| worth.first(by_key.len(), can_go));
        least.or_else(|| lone.iter_oldest().find(|&entry| can_go(entry)))
    }

    /// Removes the pages of a namespace, or all pages, so that they can no longer be found. Returns the keys
    /// of those that could, and the places that nothing uses. A new epoch begins.
    pub fn clear(&mut self, namespace: Option<&Namespace>) -> (Vec<PageHash>, Vec<P>) {
        self.epoch = self.epoch.next();
        let name = namespace.map(NamespaceHash::from);
        let is_named = |entry: &Entry<P>| name.is_none_or(|name| name == entry.namespace);
        let entries: Vec<EntryId> =
            self.by_key.values().copied().filter(|&entry| is_named(self.entry(entry))).collect();
        let (mut keys, mut places) = (Vec::with_capacity(entries.len()), Vec::new());
        for entry in entries {
            if self.entry(entry).is_there() {
                keys.push(self.entry(entry).key);
            }
            places.extend(self.remove(entry));
        }
        (keys, places)
    }

    /// Returns the size of the bookkeeping in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry<P>>()
            + self.vacant.capacity() * size_of::<EntryId>()
            + self.by_key.capacity() * (size_of::<(PageHash, EntryId)>() + 1)
            + self.present.bytes()
            + self.lone.bytes()
            + self.worth.as_ref().map_or(0, |worth| worth.bytes())
            + self.runs.capacity() * (size_of::<(Tick, EntryId)>() + 1)
    }

    fn entry(&self, entry: EntryId) -> &Entry<P> {
        &self.entries[widen(entry.number())]
    }

    fn entry_mut(&mut self, entry: EntryId) -> &mut Entry<P> {
        &mut self.entries[widen(entry.number())]
    }

    /// Removes a page, so that it can no longer be found. Returns its place, unless something still uses it.
    fn remove(&mut self, entry: EntryId) -> Option<P> {
        let here = self.entry(entry);
        if !here.is_there() && here.stage != Stage::Fetched {
            return None;
        }
        let key = here.key;
        let (is_ordered, is_ready) = (here.is_ordered(), here.stage == Stage::Ready);
        if is_ordered {
            self.remove_from_order(entry);
        }
        self.ready -= usize::from(is_ready);
        self.by_key.remove(&key);
        self.entry_mut(entry).stage = Stage::Removed;
        self.vacate_unused(entry)
    }

    /// Gives up the place of a removed page that nothing uses, and returns it.
    fn vacate_unused(&mut self, entry: EntryId) -> Option<P> {
        let here = self.entry_mut(entry);
        if here.stage != Stage::Removed || here.holders > 0 || here.readers > 0 {
            return None;
        }
        let place = here.place;
        if here.is_copied {
            // The number of the entry is used again when its copy is over.
            here.stage = Stage::Departed;
            self.departed += 1;
        } else {
            here.stage = Stage::Vacant;
            self.vacant.push(entry);
        }
        Some(place)
    }

    fn vacate_departed(&mut self, entry: EntryId) {
        self.entry_mut(entry).stage = Stage::Vacant;
        self.departed -= 1;
        self.vacant.push(entry);
    }

    /// Describes a broken invariant, if there is one.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let of = |stage| self.entries.iter().filter(|entry| entry.stage == stage).count();
        let arriving = of(Stage::Arriving) + of(Stage::Fetched);
        let counted = [of(Stage::Ready), arriving, of(Stage::Departed), of(Stage::Vacant)];
        let known = [self.ready, self.arriving(), self.departed, self.vacant.len()];
        let mut ordered = 0;
        for (order, presence) in [
            (self.lone.iter_oldest().collect::<Vec<_>>(), DevicePresence::Absent),
            (self.present.iter_oldest().collect(), DevicePresence::Present),
        ] {
            for entry in order.into_iter().map(|entry| self.entry(entry)) {
                if !entry.is_ordered() || entry.presence != presence {
                    return Some(format!("{:?} is out of order", entry.key));
                }
                ordered += 1;
            }
        }
        let idle = self.entries.iter().filter(|entry| entry.is_ordered());
        if counted != known || ordered != idle.count() {
            return Some(format!(
                "{counted:?} entries are ready, arriving, departed and vacant; {known:?} are known, {ordered} in order"
            ));
        }
        let lost = self.by_key.iter().find(|&(key, &entry)| self.entry(entry).key != *key);
        lost.map(|(key, entry)| format!("entry {entry} is not that of {key:?}"))
    }
}
