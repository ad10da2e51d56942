//! Guards of slots that a call takes, and of slots that a call changes while it holds other locks.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

use crate::base::{Discarded, Epoch, Error, Page, Result};
use crate::memory::Stream;
use crate::pool::slot_tensors::{GrantedSlots, SlotTensors, SlotsAt};
use crate::tensor::TensorView;
use crate::tensor::dlpack::IndexExport;

use super::{Notice, TokenToKvPoolAllocator};

/// A guard of taken slots. Dropping it returns them to the pool; [`Grant::keep`] passes them to the caller.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, Grant, GrantedSlots, OneSlot, TokenToKvPoolAllocator};
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let slots = TokenToKvPoolAllocator::new(&AllocatorConfig::new(8), &host).unwrap();
/// let grant: Grant<'_> = slots.alloc(1, Stream::DEFAULT).unwrap().expect("8 are free");
/// // A single slot in host memory needs no memory of its own.
/// let &GrantedSlots::One(OneSlot { .. }) = grant.granted() else { panic!("there is one slot") };
/// assert_eq!(grant.granted().view().shape().as_slice(), [1]);
/// drop(grant);
/// assert_eq!(slots.available_size(), 8, "nobody kept them");
/// ```
#[derive(Debug)]
#[must_use]
pub struct Grant<'a> {
    allocator: &'a TokenToKvPoolAllocator,
    granted: GrantedSlots,
    /// Pages of the requests from before, which contain some of the slots.
    continued: Vec<Page>,
    /// The epoch in which the slots were taken. Its end returns them, too.
    epoch: Epoch,
    is_kept: bool,
}

impl<'a> Grant<'a> {
    #[inline]
    pub(super) fn new(
        allocator: &'a TokenToKvPoolAllocator,
        granted: GrantedSlots,
        continued: Vec<Page>,
        slots: &SlotTensors,
    ) -> Self {
        Self { allocator, granted, continued, epoch: slots.epoch(), is_kept: false }
    }

    /// Returns the slots.
    #[must_use]
    pub const fn granted(&self) -> &GrantedSlots {
        &self.granted
    }

    /// Takes the tensor of a single slot in host memory, to be given to a framework. `None` for all others.
    #[inline]
    pub const fn take_export(&mut self) -> Option<IndexExport> {
        self.granted.take_export()
    }

    /// Returns a 1-D tensor of the slots that begins at a cache line, if it is in host memory.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has no memory for it.
    pub fn aligned_view(&self) -> Result<TensorView> {
        let mut view = self.granted.view().cache_aligned()?;
        self.allocator.lock().list_again(&mut view, self.epoch, !self.continued.is_empty())?;
        Ok(view)
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
        if let Some(mut slots) = self.allocator.lock().at(self.epoch) {
            slots.undo(&self.granted, &self.continued);
        }
    }
}

/// A call that changes slots while it holds locks. Make it before any lock: when it is dropped, notices are
/// passed on, and then what it has discarded is dropped.
pub(in crate::pool) struct AllocatorCall<'a> {
    allocator: &'a TokenToKvPoolAllocator,
    stream: Stream,
    /// Freed rows that could not be poisoned.
    not_poisoned: RefCell<Vec<Error>>,
    discarded: Discarded,
}

impl<'a> AllocatorCall<'a> {
    pub(super) fn new(allocator: &'a TokenToKvPoolAllocator, stream: Stream) -> Self {
        let discarded = Discarded::new();
        Self { allocator, stream, not_poisoned: RefCell::new(Vec::new()), discarded }
    }

    /// Takes something that is dropped at the end of the call.
    pub(in crate::pool) fn discard(&self, item: Arc<dyn Any + Send + Sync>) {
        self.discarded.add(item);
    }

    pub(in crate::pool) const fn allocator(&self) -> &'a TokenToKvPoolAllocator {
        self.allocator
    }

    /// Returns the stream of the call.
    pub(in crate::pool) const fn stream(&self) -> Stream {
        self.stream
    }

    /// Calls `work` with the slots, under their lock; `None` if `epoch` is over.
    pub(in crate::pool) fn change<R>(
        &self,
        epoch: Epoch,
        work: impl FnOnce(SlotsAt<'_>) -> Result<R>,
    ) -> Result<Option<R>> {
        let work = |slots: &mut SlotTensors| slots.at(epoch).map(work).transpose();
        let slots = self.allocator.lock();
        let (answer, poisoned) = TokenToKvPoolAllocator::freeing_quietly(slots, self.stream, work);
        self.not_poisoned.borrow_mut().extend(poisoned.err());
        answer
    }
}

impl Drop for AllocatorCall<'_> {
    fn drop(&mut self) {
        for failure in self.not_poisoned.get_mut() {
            self.allocator.notify(Notice::NotPoisoned(failure));
        }
    }
}
