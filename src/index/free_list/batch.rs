//! A batch of frees, all or none of them.

use std::marker::PhantomData;

use crate::base::{Id, Result, out_of_memory_error, try_to_vec};
use crate::index::mask::Mask;

use super::records::Set;
use super::{FreeList, FreeTiming, Order};

/// Indices that are being freed. Dropping the batch before [`FreeBatch::commit`] makes all of them live
/// again.
#[derive(Debug)]
#[must_use]
pub(crate) struct FreeBatch<'a, I: Id> {
    list: &'a mut FreeList<I>,
    /// The set of the freed indices.
    to: Set,
    /// Whether an index was not added for want of memory: the batch cannot be committed.
    is_short: bool,
    is_committed: bool,
}

/// Indices that were freed with a fence, for [`FreeList::unfence`].
#[derive(Clone, Debug)]
#[must_use]
pub(crate) struct FencedIndices<I> {
    masks: Vec<Mask>,
    space: PhantomData<I>,
}

impl<I> FencedIndices<I> {
    /// Returns the indices, in the order in which they were freed.
    pub(crate) fn masks(&self) -> &[Mask] {
        &self.masks
    }

    /// Returns the number of indices.
    pub(crate) fn len(&self) -> usize {
        self.masks.iter().map(|mask| mask.len()).sum()
    }
}

impl<'a, I: Id> FreeBatch<'a, I> {
    pub(super) fn new(list: &'a mut FreeList<I>, timing: FreeTiming) -> Self {
        list.marked.clear();
        Self { to: list.set_of(timing), list, is_short: false, is_committed: false }
    }

    /// Returns the list. The indices in this batch are not live in it.
    pub(crate) fn list(&self) -> &FreeList<I> {
        self.list
    }

    /// Adds the live indices of `mask`, and returns the bits of the others.
    #[inline]
    pub(crate) fn add(&mut self, mask: Mask) -> u64 {
        let moved = self.list.records.give_back(mask, self.to);
        if moved.bits != 0 {
            let marked = &mut self.list.marked;
            if marked.len() < marked.capacity() {
                marked.push(moved);
            } else {
                self.mark(&[moved]);
            }
        }
        mask.bits & !moved.bits
    }

    /// Adds `masks`, of `count` indices in all, up to the first mask with an index that is not live. Returns
    /// how many masks were added.
    #[inline]
    pub(crate) fn add_while_live(&mut self, masks: &[Mask], count: usize) -> usize {
        let done = self.list.records.give_back_while_live(masks, count, self.to);
        self.mark(&masks[..done]);
        done
    }

    /// Records that `masks` are in the set of this batch.
    #[inline]
    fn mark(&mut self, masks: &[Mask]) {
        let marked = &mut self.list.marked;
        if marked.capacity() - marked.len() < masks.len() && marked.try_reserve(masks.len()).is_err() {
            return self.reject(masks);
        }
        marked.extend_from_slice(masks);
    }

    /// Makes `masks`, which cannot be recorded, live again.
    #[cold]
    fn reject(&mut self, masks: &[Mask]) {
        self.is_short = true;
        for &mask in masks {
            self.list.records.take(mask, self.to);
        }
    }

    /// Checks that all indices were recorded. Call this before [`FreeBatch::commit`].
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host had no memory for the
    /// list; drop the batch then.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_short { Err(out_of_memory_error::<Mask>(self.list.marked.len() + 1)) } else { Ok(()) }
    }

    /// Returns the added indices, in the order in which they were added.
    pub(crate) fn masks(&self) -> &[Mask] {
        &self.list.marked
    }

    /// Returns whether `index` was added.
    pub(crate) fn contains(&self, index: I) -> bool {
        self.list.marked.iter().any(|mask| mask.contains(index.number()))
    }

    /// Sorts the added indices, where the order matters.
    pub(crate) fn sort(&mut self) {
        if self.list.order == Order::Sorted {
            return;
        }
        // Every index was added once, so masks of one record can be joined.
        self.list.marked.sort_unstable_by_key(|mask| mask.word);
        self.list.marked.dedup_by(|later, first| {
            let is_same = later.word == first.word;
            if is_same {
                first.bits |= later.bits;
            }
            is_same
        });
    }

    /// Returns the added indices as a fence has to keep them, for [`FreeList::unfence`].
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the
    /// list.
    pub(crate) fn fenced(&self) -> Result<FencedIndices<I>> {
        Ok(FencedIndices { masks: try_to_vec(&self.list.marked)?, space: PhantomData })
    }

    /// Frees the added indices. [`Order::Fifo`] queues them in that order: now, or when their fence has
    /// passed.
    #[inline]
    pub(crate) fn commit(mut self) {
        debug_assert!(!self.is_short, "it was checked");
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
