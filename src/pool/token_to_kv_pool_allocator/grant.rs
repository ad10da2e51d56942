//! Guards of slots that a call takes, and of slots that a call changes while it holds other locks.

use std::cell::RefCell;

use crate::base::{Error, Page, Result};
use crate::memory::Stream;
use crate::pool::slot_tensors::{GrantedSlots, SlotTensors};
use crate::tensor::TensorView;

use super::{Notice, TokenToKvPoolAllocator};

/// A guard of taken slots. Dropping it returns them to the pool; [`Grant::keep`] passes them to the caller.
#[derive(Debug)]
#[must_use]
pub struct Grant<'a> {
    allocator: &'a TokenToKvPoolAllocator,
    granted: GrantedSlots,
    /// Pages of the requests from before, which contain some of the slots.
    continued: Vec<Page>,
    /// The number of times that the allocator had been cleared: clearing it returns the slots, too.
    clears: u64,
    is_kept: bool,
}

impl<'a> Grant<'a> {
    #[inline]
    pub(super) const fn new(
        allocator: &'a TokenToKvPoolAllocator,
        granted: GrantedSlots,
        continued: Vec<Page>,
        slots: &SlotTensors,
    ) -> Self {
        Self { allocator, granted, continued, clears: slots.clears(), is_kept: false }
    }

    /// Returns the slots.
    #[must_use]
    pub const fn granted(&self) -> &GrantedSlots {
        &self.granted
    }

    /// Passes the slots to the caller, who frees them with [`TokenToKvPoolAllocator::free`].
    #[must_use]
    pub fn keep(mut self) -> TensorView {
        let view = self.granted.view();
        self.commit();
        view
    }

    /// Works like [`Self::keep`], for a caller that has made a tensor of [`Self::granted`].
    #[inline]
    pub const fn commit(&mut self) {
        self.is_kept = true;
    }
}

impl Drop for Grant<'_> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        let mut slots = self.allocator.lock();
        if slots.clears() == self.clears {
            slots.undo(&self.granted, &self.continued);
        }
    }
}

/// A call that changes slots while it holds locks. Make it before any lock: notices are passed on when it is
/// dropped.
pub(in crate::pool) struct AllocatorCall<'a> {
    allocator: &'a TokenToKvPoolAllocator,
    stream: Stream,
    /// Freed rows that could not be poisoned.
    not_poisoned: RefCell<Vec<Error>>,
}

impl<'a> AllocatorCall<'a> {
    pub(super) const fn new(allocator: &'a TokenToKvPoolAllocator, stream: Stream) -> Self {
        Self { allocator, stream, not_poisoned: RefCell::new(Vec::new()) }
    }

    pub(in crate::pool) const fn allocator(&self) -> &'a TokenToKvPoolAllocator {
        self.allocator
    }

    /// Returns the stream of the call.
    pub(in crate::pool) const fn stream(&self) -> Stream {
        self.stream
    }

    /// Calls `work` with the slots, under their lock; `None` if they were cleared since they had been
    /// `clears` times.
    pub(in crate::pool) fn change<R>(
        &self,
        clears: u64,
        work: impl FnOnce(&mut SlotTensors) -> Result<R>,
    ) -> Result<Option<R>> {
        let slots = self.allocator.lock();
        if slots.clears() != clears {
            return Ok(None);
        }
        let (answer, poisoned) = TokenToKvPoolAllocator::freeing_quietly(slots, self.stream, work);
        self.not_poisoned.borrow_mut().extend(poisoned.err());
        answer.map(Some)
    }
}

impl Drop for AllocatorCall<'_> {
    fn drop(&mut self) {
        for failure in self.not_poisoned.take() {
            self.allocator.notify(Notice::NotPoisoned(&failure));
        }
    }
}
