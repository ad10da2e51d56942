//! Frees of slots that only a device has, until their values are copied to the host, and later frees that
//! must not complete before them.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::base::bounded::signed;
use crate::base::{Discarded, IndexVec, Result, try_with_capacity};
use crate::index::{Attribution, FenceId};
use crate::kernels::{Fetcher, PendingFetch};
use crate::memory::{BorrowedTensor, Event, Gpu, Keep, Stream};

/// The meaning of the values of a free.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::IndexVec;
/// use kvpool::kernels::Indices;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, FreedAs, TokenToKvPoolAllocator};
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let config = AllocatorConfig { page_size: 4, ..AllocatorConfig::new(16) };
/// let slots = TokenToKvPoolAllocator::new(&config, &host).unwrap();
/// drop(slots.alloc(8, stream).unwrap().expect("16 are free").keep());
/// let pages = Indices::Host(IndexVec::I32(vec![1, 2]));
/// slots.free_pages(&[pages], &[None], FreedAs::Pages, None, |_| None, stream).unwrap();
/// assert_eq!(slots.available_size(), 16);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreedAs {
    /// Slots. The page of each is freed, once.
    Slots,
    /// Slots, one for each page.
    SlotsOfPages,
    /// Numbers of pages.
    Pages,
}

impl FreedAs {
    /// Returns the number of slots that `count` values free if each names a different page. Values may name
    /// the same page, which is unknown until they have arrived.
    pub(super) const fn slots(self, count: usize, page_size: usize) -> usize {
        match self {
            Self::Slots => count,
            Self::SlotsOfPages | Self::Pages => count * page_size,
        }
    }

    /// Returns the number of slots between one value and the next.
    fn stride(self, page_size: usize) -> i64 {
        match self {
            Self::Slots | Self::SlotsOfPages => 1,
            Self::Pages => signed(page_size),
        }
    }
}

/// Values of a free.
#[derive(Debug)]
pub(super) struct FreedValues {
    pub(super) values: Values,
    pub(super) freed_as: FreedAs,
}

/// Values on the host or in flight.
#[derive(Debug)]
pub(super) enum Values {
    Known(IndexVec),
    Fetched(Arc<Fetcher>, PendingFetch),
}

impl FreedValues {
    /// Returns the slots on the host.
    pub(super) const fn of_slots(slots: IndexVec) -> Self {
        Self { values: Values::Known(slots), freed_as: FreedAs::Slots }
    }

    pub(super) fn len(&self) -> usize {
        match &self.values {
            Values::Known(values) => values.len(),
            Values::Fetched(_, fetch) => fetch.len(),
        }
    }

    /// Takes values that have arrived, and discards the owner of their tensor.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate them;
    /// the part is as it was.
    fn land(&mut self, discarded: &Discarded) -> Result<()> {
        if let Values::Fetched(fetcher, fetch) = &self.values {
            let known = Values::Known(fetcher.take(fetch)?);
            if let Values::Fetched(_, fetch) = std::mem::replace(&mut self.values, known) {
                fetch.discard(discarded);
            }
        }
        Ok(())
    }

    /// Returns the number of slots that it frees, at most.
    fn slots(&self, page_size: usize) -> usize {
        self.freed_as.slots(self.len(), page_size)
    }
}

/// Values that were freed together, by one call or one group.
#[derive(Debug)]
struct Free {
    parts: Vec<FreedValues>,
    /// The fence that the slots wait for once they are known.
    fence: Option<FenceId>,
    /// The calls that made the frees, if a ledger is kept.
    by: Attribution,
}

/// A free whose slots are all on the host.
pub(super) struct ReadyFree {
    pub(super) slots: IndexVec,
    pub(super) fence: Option<FenceId>,
    pub(super) by: Attribution,
}

/// Frees in the order in which they were made.
#[derive(Debug, Default)]
pub(super) struct DeferredFrees {
    /// One per device whose tensors were freed.
    fetchers: Vec<Arc<Fetcher>>,
    frees: VecDeque<Free>,
}

impl DeferredFrees {
    pub(super) fn is_empty(&self) -> bool {
        self.frees.is_empty()
    }

    /// Prepares for tensors of `gpu` with up to `values` values in flight.
    pub(super) fn prepare(&mut self, gpu: &Arc<Gpu>, values: usize) -> Result<&Arc<Fetcher>> {
        let found = self.fetchers.iter().position(|fetcher| fetcher.gpu().device() == gpu.device());
        let at = if let Some(at) = found {
            at
        } else {
            self.fetchers.push(Arc::new(Fetcher::new(gpu, values)?));
            self.fetchers.len() - 1
        };
        Ok(&self.fetchers[at])
    }

    /// Enqueues a copy of `tensor`, kept alive by what `keep` returns then, with up to `values` values in
    /// flight. `None` if there is no room.
    pub(super) fn fetch(
        &mut self,
        gpu: &Arc<Gpu>,
        values: usize,
        tensor: &BorrowedTensor<'_>,
        keep: impl FnOnce() -> Option<Keep>,
        stream: Stream,
    ) -> Result<Option<Values>> {
        let fetcher = Arc::clone(self.prepare(gpu, values)?);
        Ok(fetcher.fetch(tensor, keep, stream)?.map(|fetch| Values::Fetched(fetcher, fetch)))
    }

    pub(super) fn push(&mut self, parts: Vec<FreedValues>, fence: Option<FenceId>, by: Attribution) {
        self.frees.push_back(Free { parts, fence, by });
    }

    /// Marks a fence as passed. Returns whether a free was waiting for it.
    pub(super) fn fence_passed(&mut self, fence: FenceId) -> bool {
        let waiting = self.frees.iter_mut().find(|free| free.fence == Some(fence));
        waiting.is_some_and(|free| free.fence.take().is_some())
    }

    /// Returns the number of slots, without those behind fences.
    pub(super) fn slots(&self, page_size: usize) -> usize {
        let unfenced = self.frees.iter().filter(|free| free.fence.is_none());
        unfenced.flat_map(|free| &free.parts).map(|part| part.slots(page_size)).sum()
    }

    /// Returns an event that the oldest free waits for.
    pub(super) fn oldest(&self) -> Option<Arc<Event>> {
        // The copies of one free were enqueued one after the other, but perhaps on several streams.
        let mut events = self.frees.front()?.parts.iter().filter_map(|part| match &part.values {
            Values::Fetched(_, fetch) => Some(fetch.done()),
            Values::Known(_) => None,
        });
        events.find(|event| !event.has_passed().unwrap_or(true)).cloned()
    }

    /// Takes the oldest free if all of its values are on the host, and discards the owners of its tensors.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the device has failed,
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the
    /// list. The free stays for a later call.
    pub(super) fn landed(&mut self, page_size: usize, discarded: &Discarded) -> Result<Option<ReadyFree>> {
        let Some(oldest) = self.frees.front_mut() else { return Ok(None) };
        for part in &oldest.parts {
            if let Values::Fetched(_, fetch) = &part.values
                && !fetch.done().has_passed()?
            {
                return Ok(None);
            }
        }
        for part in &mut oldest.parts {
            part.land(discarded)?;
        }
        let slots = slots_of(&mut oldest.parts, page_size)?;
        let landed = self.frees.pop_front();
        Ok(landed.map(|free| ReadyFree { slots, fence: free.fence, by: free.by }))
    }

    /// Discards every free; copies in flight are abandoned.
    pub(super) fn clear(&mut self, discarded: &Discarded) {
        self.frees.drain(..).for_each(|free| abandon(free.parts, discarded));
    }
}

/// Takes the slots of parts whose values are on the host, in one list.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the list;
/// the parts are as they were.
pub(super) fn slots_of(parts: &mut [FreedValues], page_size: usize) -> Result<IndexVec> {
    if let [FreedValues { values: Values::Known(slots), freed_as }] = parts
        && freed_as.stride(page_size) == 1
    {
        return Ok(std::mem::replace(slots, IndexVec::I32(Vec::new())));
    }
    let mut all: Vec<i64> = try_with_capacity(parts.iter().map(FreedValues::len).sum())?;
    for part in parts {
        let Values::Known(values) = &part.values else { continue };
        let stride = part.freed_as.stride(page_size);
        // A number that is too large to multiply is larger than every slot number.
        all.extend(values.iter().map(|value| value.checked_mul(stride).unwrap_or(value)));
    }
    Ok(IndexVec::I64(all))
}

/// Abandons values in flight, and discards the owners of their tensors.
pub(super) fn abandon(parts: impl IntoIterator<Item = FreedValues>, discarded: &Discarded) {
    for part in parts {
        if let Values::Fetched(fetcher, fetch) = part.values {
            fetcher.abandon(&fetch);
            fetch.discard(discarded);
        }
    }
}
