//! The tokens of insertions after their last whole page, which no look-up finds.
//!
//! A *tail* belongs to the request that inserted it. The next insertion of the same slots takes it over, and it
//! is not evicted while the node before it, its parent, is locked, because a request locks that one. No request
//! locks the root, so a tail below the root is *young*, and not evicted, until its slots are inserted again.
//!
//! *Invariant.* A tail without locks that is not young is in the queue, or set aside by its parent; the latter
//! only while the parent is locked, since [`Tails::uncover`] queues it again.
//!
//! *Cost.* A few look-ups in tables for each tail, and nothing in a tree without tails.

use std::collections::BTreeSet;

use crate::base::{EngineSlot, Id, KeyMap, Page};
use crate::cache::{Namespace, NodeHandle};

/// A tail.
#[derive(Debug)]
pub(super) struct Tail {
    pub(super) parent: NodeHandle,
    pub(super) name: Namespace,
    pub(super) tokens: Vec<i32>,
    pub(super) slots: Vec<EngineSlot>,
    pub(super) locks: usize,
    pub(super) is_young: bool,
    /// When it was used last.
    pub(super) used: u64,
}

impl Tail {
    /// Returns whether the tail is kept whether its parent is locked or not.
    pub(super) const fn is_kept(&self) -> bool {
        self.locks > 0 || self.is_young
    }

    /// Returns by what its next insertion finds it.
    fn key(&self) -> (Namespace, EngineSlot) {
        (self.name.clone(), self.slots[0])
    }
}

/// The tails of one parent.
#[derive(Debug, Default)]
struct Siblings {
    /// Without an allocator, namespaces may have the same slots.
    by_first_slot: KeyMap<(Namespace, EngineSlot), NodeHandle>,
    all: BTreeSet<NodeHandle>,
    /// The number of slots of tails that are not kept.
    loose: usize,
    /// Tails to queue when the parent is unlocked.
    set_aside: Vec<NodeHandle>,
}

/// The tails of a tree.
#[derive(Debug, Default)]
pub(super) struct Tails {
    by_handle: KeyMap<NodeHandle, Tail>,
    siblings: KeyMap<NodeHandle, Siblings>,
    /// Tails that are not kept, the least recently used first.
    queue: BTreeSet<(u64, NodeHandle)>,
    /// The number of slots.
    slots: usize,
    /// The number of tails that are set aside.
    aside: usize,
    now: u64,
    /// The number of tails so far.
    made: u64,
}

/// A bit that the numbers of other nodes do not have: there are no more of those than slots, which fit int32.
const MARK: u64 = 1 << 31;

impl Tails {
    pub(super) fn is_empty(&self) -> bool {
        self.by_handle.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.by_handle.len()
    }

    pub(super) fn get(&self, tail: NodeHandle) -> Option<&Tail> {
        self.by_handle.get(&tail)
    }

    /// Returns the slots of a tail.
    pub(super) fn slots_of(&self, tail: NodeHandle) -> impl Iterator<Item = EngineSlot> + '_ {
        self.by_handle[&tail].slots.iter().copied()
    }

    /// Returns whether a handle is that of a tail, which may exist no longer.
    pub(super) const fn is_tail(node: NodeHandle) -> bool {
        node.number() & MARK != 0
    }

    /// Returns the tail of `parent` that begins with the first of `slots` and has no others.
    pub(super) fn beginning(
        &self,
        parent: NodeHandle,
        name: &Namespace,
        slots: &[Page],
    ) -> Option<NodeHandle> {
        let first = EngineSlot::new(slots.first()?.number());
        let &tail = self.siblings.get(&parent)?.by_first_slot.get(&(name.clone(), first))?;
        let found = &self.by_handle[&tail];
        let is_same = |(page, slot): (&Page, &EngineSlot)| page.number() == slot.number();
        let is_beginning = found.slots.len() <= slots.len() && slots.iter().zip(&found.slots).all(is_same);
        is_beginning.then_some(tail)
    }

    pub(super) fn of(&self, parent: NodeHandle) -> impl Iterator<Item = NodeHandle> + '_ {
        self.siblings.get(&parent).into_iter().flat_map(|siblings| siblings.all.iter().copied())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeHandle, &Tail)> + '_ {
        self.by_handle.iter().map(|(&handle, tail)| (handle, tail))
    }

    /// Returns the number of slots.
    pub(super) const fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the number of slots of tails that are not kept and whose parents `is_locked` does not accept.
    /// Visits every parent.
    pub(super) fn evictable(&self, is_locked: impl Fn(NodeHandle) -> bool) -> usize {
        let open = self.siblings.iter().filter(|(parent, _)| !is_locked(**parent));
        open.map(|(_, siblings)| siblings.loose).sum()
    }

    const fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Adds a tail, whose time of use is set here, and returns its handle, which no other node ever has.
    pub(super) fn add(&mut self, mut tail: Tail) -> NodeHandle {
        let (low, high) = (self.made & (MARK - 1), self.made / MARK);
        let handle = NodeHandle::new(high << 32 | MARK | low);
        self.made += 1;
        tail.used = self.tick();
        self.slots += tail.slots.len();
        let siblings = self.siblings.entry(tail.parent).or_default();
        siblings.by_first_slot.insert(tail.key(), handle);
        siblings.all.insert(handle);
        self.by_handle.insert(handle, tail);
        self.loosen(handle);
        handle
    }

    /// Removes a tail.
    pub(super) fn remove(&mut self, handle: NodeHandle) -> Tail {
        self.hold(handle);
        let tail = self.by_handle.remove(&handle).expect("the tail exists");
        self.slots -= tail.slots.len();
        let siblings = self.siblings.get_mut(&tail.parent).expect("the tail was entered");
        if siblings.by_first_slot.get(&tail.key()) == Some(&handle) {
            siblings.by_first_slot.remove(&tail.key());
        }
        siblings.all.remove(&handle);
        if siblings.all.is_empty() {
            self.siblings.remove(&tail.parent);
        }
        tail
    }

    /// Makes a tail evictable, unless it is kept.
    fn loosen(&mut self, handle: NodeHandle) {
        let tail = &self.by_handle[&handle];
        if !tail.is_kept() {
            self.queue.insert((tail.used, handle));
            let siblings = self.siblings.get_mut(&tail.parent).expect("the tail was entered");
            siblings.loose += tail.slots.len();
        }
    }

    /// Undoes [`Tails::loosen`].
    fn hold(&mut self, handle: NodeHandle) {
        let tail = &self.by_handle[&handle];
        if !tail.is_kept() {
            let siblings = self.siblings.get_mut(&tail.parent).expect("the tail was entered");
            siblings.loose -= tail.slots.len();
            if !self.queue.remove(&(tail.used, handle)) {
                siblings.set_aside.retain(|&other| other != handle);
                self.aside -= 1;
            }
        }
    }

    fn change(&mut self, handle: NodeHandle, change: impl FnOnce(&mut Tail)) {
        self.hold(handle);
        change(self.by_handle.get_mut(&handle).expect("the tail exists"));
        self.loosen(handle);
    }

    /// Records that the slots of a tail were inserted again.
    pub(super) fn refresh(&mut self, handle: NodeHandle) {
        let now = self.tick();
        self.change(handle, |tail| (tail.used, tail.is_young) = (now, false));
    }

    pub(super) fn lock(&mut self, handle: NodeHandle) {
        self.change(handle, |tail| tail.locks += 1);
    }

    pub(super) fn unlock(&mut self, handle: NodeHandle) {
        self.change(handle, |tail| tail.locks -= 1);
    }

    /// Removes the least recently used tail that is not kept and whose parent `is_locked` does not accept.
    pub(super) fn evict(&mut self, is_locked: impl Fn(NodeHandle) -> bool) -> Option<(NodeHandle, Tail)> {
        while let Some((_, handle)) = self.queue.first().copied() {
            let parent = self.by_handle[&handle].parent;
            if !is_locked(parent) {
                return Some((handle, self.remove(handle)));
            }
            self.queue.pop_first();
            self.aside += 1;
            self.siblings.get_mut(&parent).expect("the tail was entered").set_aside.push(handle);
        }
        None
    }

    /// Returns whether some tails are set aside.
    pub(super) const fn are_some_aside(&self) -> bool {
        self.aside > 0
    }

    /// Queues what was set aside until `parent` has no locks.
    pub(super) fn uncover(&mut self, parent: NodeHandle) {
        let Some(siblings) = self.siblings.get_mut(&parent) else { return };
        for handle in std::mem::take(&mut siblings.set_aside) {
            self.aside -= 1;
            self.queue.insert((self.by_handle[&handle].used, handle));
        }
    }

    /// Removes everything. No later tail has the handle of an earlier one.
    pub(super) fn clear(&mut self) {
        *self = Self { now: self.now, made: self.made, ..Self::default() };
    }

    /// Describes a broken invariant, if there is one.
    pub(super) fn broken_invariant(&self, is_locked: impl Fn(NodeHandle) -> Option<bool>) -> Option<String> {
        let (mut queued, mut aside) = (0, 0);
        for (handle, tail) in self.iter() {
            let Some(siblings) = self.siblings.get(&tail.parent) else {
                return Some(format!("{handle:?} is not among those of its parent"));
            };
            let is_queued = self.queue.contains(&(tail.used, handle));
            queued += usize::from(is_queued);
            let is_aside = siblings.set_aside.contains(&handle);
            aside += usize::from(is_aside);
            let Some(is_locked) = is_locked(tail.parent) else {
                return Some(format!("{handle:?} has lost its parent"));
            };
            if (is_queued || is_aside) == tail.is_kept() || is_queued && is_aside || is_aside && !is_locked {
                return Some(format!("{handle:?} is queued: {is_queued}, set aside: {is_aside}"));
            }
            let is_found = siblings.by_first_slot.get(&tail.key()) == Some(&handle);
            if tail.tokens.len() != tail.slots.len() || !siblings.all.contains(&handle) || !is_found {
                return Some(format!("{handle:?} is not entered as it is"));
            }
        }
        let siblings = self.siblings.values();
        let (all, loose) = siblings
            .fold((0, 0), |(all, loose), siblings| (all + siblings.all.len(), loose + siblings.loose));
        let are_loose =
            self.by_handle.values().filter(|tail| !tail.is_kept()).map(|tail| tail.slots.len()).sum();
        let slots = self.by_handle.values().map(|tail| tail.slots.len()).sum();
        let counts = (self.len(), self.queue.len(), self.aside, are_loose, self.slots);
        ((all, queued, aside, loose, slots) != counts)
            .then(|| format!("the tails have {:?}, counted {counts:?}", (all, queued, aside, loose, slots)))
    }

    pub(super) fn bytes(&self) -> usize {
        let names: usize = self.by_handle.values().map(|tail| tail.name.text_bytes()).sum();
        self.by_handle.capacity() * size_of::<(NodeHandle, Tail)>()
            + self.slots * size_of::<(i32, EngineSlot)>()
            + self.siblings.capacity() * size_of::<(NodeHandle, Siblings)>()
            + 2 * names
            + self.len() * size_of::<(Namespace, EngineSlot, NodeHandle, NodeHandle)>()
            + self.queue.len() * size_of::<(u64, NodeHandle)>()
    }
}
