//! Indices on their way back, all of them or none.

use std::marker::PhantomData;

use crate::base::Id;
use crate::index::mask::Mask;

use super::records::Set;
use super::{FreeList, Give, Order};

/// Indices that are being given back. Dropped before [`FreeBatch::commit`], all of them are live again.
#[derive(Debug)]
#[must_use]
pub(crate) struct FreeBatch<'a, I: Id> {
    list: &'a mut FreeList<I>,
    /// Where they go.
    to: Set,
    is_committed: bool,
}

/// Indices that were given back behind a fence, for [`FreeList::unfence`].
#[derive(Clone, Debug)]
#[must_use]
pub(crate) struct Fenced<I> {
    masks: Vec<Mask>,
    space: PhantomData<I>,
}

impl<I> Fenced<I> {
    /// They, in the order in which they were given.
    pub(crate) fn masks(&self) -> &[Mask] {
        &self.masks
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.masks.iter().map(|mask| mask.len()).sum()
    }
}

impl<'a, I: Id> FreeBatch<'a, I> {
    pub(super) fn new(list: &'a mut FreeList<I>, give: Give) -> Self {
        list.marked.clear();
        Self { to: list.given(give), list, is_committed: false }
    }

    /// The list, in which what was added is not live any more.
    pub(crate) fn list(&self) -> &FreeList<I> {
        self.list
    }

    /// Adds the live indices of `mask`, and returns the bits of the others.
    #[inline]
    pub(crate) fn add(&mut self, mask: Mask) -> u64 {
        let given = self.list.records.give(mask, self.to);
        if given.bits != 0 {
            self.list.marked.push(given);
        }
        mask.bits & !given.bits
    }

    /// Adds `masks`, of `count` indices in all, up to the first with an index that is not live, and returns how many that
    /// are.
    #[inline]
    pub(crate) fn add_while_live(&mut self, masks: &[Mask], count: usize) -> usize {
        let done = self.list.records.give_while_live(masks, count, self.to);
        self.list.marked.extend_from_slice(&masks[..done]);
        done
    }

    /// What was added, in that order.
    pub(crate) fn masks(&self) -> &[Mask] {
        &self.list.marked
    }

    /// Whether `index` was added.
    pub(crate) fn contains(&self, index: I) -> bool {
        self.list.marked.iter().any(|mask| mask.contains(index.number()))
    }

    /// Puts what was added in ascending order, where that matters.
    pub(crate) fn sort(&mut self) {
        if self.list.order == Order::Sorted {
            return;
        }
        // Indices were added once each, so those of one record can be joined.
        self.list.marked.sort_unstable_by_key(|mask| mask.word);
        self.list.marked.dedup_by(|later, first| {
            let is_same = later.word == first.word;
            if is_same {
                first.bits |= later.bits;
            }
            is_same
        });
    }

    /// What was added behind a fence, for [`FreeList::unfence`].
    pub(crate) fn fenced(&self) -> Fenced<I> {
        Fenced { masks: self.list.marked.clone(), space: PhantomData }
    }

    /// Gives back what was added. In [`Order::Fifo`] it is queued in that order: now, or when its fence has passed.
    pub(crate) fn commit(mut self) {
        self.is_committed = true;
        if self.to != Set::Fenced {
            self.list.queue_marked();
        }
    }
}

impl<I: Id> Drop for FreeBatch<'_, I> {
    fn drop(&mut self) {
        if self.is_committed {
            return;
        }
        while let Some(mask) = self.list.marked.pop() {
            self.list.records.take(mask, self.to);
        }
    }
}
