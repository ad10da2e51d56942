//! The slots of an allocator that belong to a tree of an engine.

use std::fmt;
use std::sync::Arc;

use crate::base::{Device, Epoch, Error, Id, IndexVec, Page, Result, try_collect, try_with_capacity};
use crate::index::{Owner, Run};
use crate::memory::Stream;
use crate::tensor::TensorView;

use super::token_to_kv_pool_allocator::AllocatorCall;
use super::{Reclaim, TokenToKvPoolAllocator};

/// The slots of an allocator that belong to a tree: freeing them through the allocator is an invalid free, and
/// only [`CachedSlotsCall::give_back`] frees them. Without an allocator, slots are plain numbers.
#[derive(Debug)]
pub(crate) struct CachedSlots {
    allocator: Option<Arc<TokenToKvPoolAllocator>>,
    /// The owner of the slots in the ledger.
    owner: Owner,
}

impl CachedSlots {
    /// Creates the slots of a tree that is `name` in reports.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for an allocator with pages of more than one slot.
    pub(crate) fn new(allocator: Option<Arc<TokenToKvPoolAllocator>>, name: String) -> Result<Self> {
        if let Some(size) = allocator.as_ref().map(|own| own.page_size()).filter(|&size| size != 1) {
            return Err(Error::config(format!(
                "the allocator has pages of {size} slots; a tree of slots takes an allocator with page_size 1, or \
                 none"
            )));
        }
        Ok(Self { allocator, owner: Owner::Text(name) })
    }

    /// Registers the tree for reports of the allocator, until it is dropped.
    pub(crate) fn report(&self, tree: &Arc<dyn Reclaim>) {
        if let Some(allocator) = &self.allocator {
            allocator.on_shortage(tree);
        }
    }

    /// Returns the device of tensors of slots.
    #[must_use]
    pub(crate) fn device(&self) -> Device {
        self.allocator.as_deref().map_or(Device::Cpu, TokenToKvPoolAllocator::device)
    }

    /// Returns the epoch of the allocator. Slots of an earlier one are not the tree's any more.
    #[must_use]
    pub(crate) fn epoch(&self) -> Epoch {
        self.allocator.as_ref().map_or_else(Epoch::default, |allocator| allocator.lock().epoch())
    }

    /// Returns the number of slots that belong to trees and caches; `None` if `epoch` is over, or without an
    /// allocator.
    #[must_use]
    pub(crate) fn cached(&self, epoch: Epoch) -> Option<usize> {
        let slots = self.allocator.as_ref()?.lock();
        (slots.epoch() == epoch).then(|| slots.stats().cached)
    }

    /// Returns the slots before the first that is not allocated.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a number that is no slot.
    pub(crate) fn usable(&self, slots: &IndexVec) -> Result<Vec<Page>> {
        let count = match &self.allocator {
            None => slots.len(),
            Some(allocator) => {
                allocator.inspect(|all| all.is_allocated(slots).take_while(|is_live| *is_live).count())
            }
        };
        let mut pages = try_with_capacity(count)?;
        for (position, slot) in slots.iter().take(count).enumerate() {
            let page = i32::try_from(slot).ok().and_then(|slot| u32::try_from(slot).ok());
            pages.push(Page::new(page.ok_or_else(|| {
                Error::argument(format!("slot {slot} at position {position} is outside [0, 2**31)"))
                    .with_index(slot)
            })?));
        }
        Ok(pages)
    }

    /// Returns a 1-D tensor of slots, valid on `stream`.
    ///
    /// # Errors
    /// As [`TokenToKvPoolAllocator::alloc`].
    pub(crate) fn tensor_of(&self, slots: Vec<i32>, stream: Stream) -> Result<TensorView> {
        match &self.allocator {
            Some(allocator) => allocator.lock().tensor_of(slots, stream),
            None => Ok(TensorView::from_indices(IndexVec::I32(slots))),
        }
    }

    /// Begins a call that changes slots while its caller holds other locks. Begin it before them.
    #[must_use]
    pub(crate) fn begin_call(&self, stream: Stream) -> CachedSlotsCall<'_> {
        let call = self.allocator.as_ref().map(|allocator| allocator.begin_call(stream));
        CachedSlotsCall { call, owner: &self.owner }
    }
}

/// A call that changes the slots of a tree. It passes on notices of the allocator when it is dropped.
pub(crate) struct CachedSlotsCall<'a> {
    call: Option<AllocatorCall<'a>>,
    owner: &'a Owner,
}

impl fmt::Debug for CachedSlotsCall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedSlotsCall").finish_non_exhaustive()
    }
}

impl CachedSlotsCall<'_> {
    /// Makes the tree the owner of `new` slots in place of the caller, and the caller that of `returned`
    /// ones.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) for slots that are listed twice or
    /// cached; [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) if `epoch` is over. Nothing is changed.
    pub(crate) fn take(&self, epoch: Epoch, new: &[Page], returned: &[Page]) -> Result<()> {
        let Some(call) = &self.call else { return Ok(()) };
        let taken = call.change(epoch, |mut slots| {
            let returned_runs = try_collect(returned.iter().map(|&start| Run { start, len: 1 }))?;
            slots.slots_mut().retain(&returned_runs)?;
            if let Err(error) = slots.slots_mut().cache(new, &[], self.owner) {
                slots.slots_mut().undo_pages(&returned_runs);
                return Err(error);
            }
            slots.slots_mut().release_cached(returned, None, self.owner);
            Ok(())
        })?;
        taken.ok_or_else(|| {
            let text =
                "the allocator was cleared during an insertion; the slots are not the caller's any more";
            Error::stale(text)
        })
    }

    /// Returns slots of the tree to the allocator. Returns the number of slots that became free, which are
    /// fewer if some have other owners, and all without an allocator; `None` if `epoch` is over, and the
    /// allocator has them already.
    #[must_use]
    pub(crate) fn give_back(&self, epoch: Epoch, pages: &[Page]) -> Option<usize> {
        let Some(call) = &self.call else { return Some(pages.len()) };
        let freed = call.change(epoch, |mut slots| {
            let before = slots.slots().available();
            slots.slots_mut().release_cached(pages, None, self.owner);
            Ok(slots.slots().available() - before)
        });
        freed.expect("giving back cannot fail")
    }
}
