//! Token slots as tensors.

use crate::base::{Device, Error, ErrorKind, IndexVec, Page, Result, reserve};
use crate::index::{BadFrees, FenceId, Order, SlotAllocator, SlotStats, ascending_runs};
use crate::memory::backend_for;
use crate::tensor::TensorView;

/// Hands out token slots of a [`KvPool`](super::KvPool) as int32 tensors and takes them back.
///
/// ```
/// use kvpool::base::{Device, IndexVec};
/// use kvpool::pool::TokenToKvPoolAllocator;
/// let mut allocator = TokenToKvPoolAllocator::new(1024, Device::Cpu, 1, true, false).unwrap();
/// let slots = allocator.alloc(3).unwrap().unwrap();
/// assert_eq!(slots.shape().as_slice(), [3]);
/// assert_eq!(allocator.available_size(), 1021);
/// let bad = allocator.free(&IndexVec::I32(vec![1, 2, 3, 3])).unwrap();
/// assert_eq!((bad.dropped(), allocator.available_size()), (1, 1024));
/// ```
#[derive(Debug)]
pub struct TokenToKvPoolAllocator {
    slots: SlotAllocator,
    device: Device,
    need_sort: bool,
    strict: bool,
}

impl TokenToKvPoolAllocator {
    /// All slots free.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when `size` or `page_size` is 0 or slots would not fit int32,
    /// [`ErrorKind::BackendUnavailable`] when `device` cannot be used.
    pub fn new(size: usize, device: Device, page_size: usize, need_sort: bool, strict: bool) -> Result<Self> {
        let order = if need_sort { Order::Sorted } else { Order::Fifo };
        let device = backend_for(device)?.device();
        Ok(Self { slots: SlotAllocator::new(size, page_size, order)?, device, need_sort, strict })
    }

    /// Who owns which slot.
    #[must_use]
    pub const fn slots(&self) -> &SlotAllocator {
        &self.slots
    }

    /// Where the tensors are.
    #[must_use]
    pub const fn device(&self) -> Device {
        self.device
    }

    /// Whether the lowest free slots are handed out first.
    #[must_use]
    pub const fn need_sort(&self) -> bool {
        self.need_sort
    }

    /// Whether a bad free is an error.
    #[must_use]
    pub const fn strict(&self) -> bool {
        self.strict
    }

    /// Takes `count` slots, or returns `None`: a 1-D int32 tensor.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when the host cannot hold the answer; nothing is taken.
    pub fn alloc(&mut self, count: usize) -> Result<Option<TensorView>> {
        Ok(self.slots.alloc(count)?.map(TensorView::from_indices))
    }

    /// Takes one ascending run of `count` slots, the lowest that fits, or returns `None`.
    ///
    /// # Errors
    /// As [`TokenToKvPoolAllocator::alloc`].
    pub fn alloc_contiguous(&mut self, count: usize) -> Result<Option<TensorView>> {
        Ok(self.slots.alloc_contiguous(count)?.map(TensorView::from_indices))
    }

    /// Takes the slots for positions `prefix..seq` of each request, concatenated, or returns `None`. Also names the
    /// pages that the requests had before and that some of the slots are in.
    ///
    /// # Errors
    /// As [`SlotAllocator::extend`].
    pub fn alloc_extend(
        &mut self,
        prefix_lens: &[i64],
        seq_lens: &[i64],
        last_loc: &[i64],
    ) -> Result<Option<(TensorView, Vec<Page>)>> {
        let taken = self.slots.extend(prefix_lens, seq_lens, last_loc)?;
        Ok(taken.map(|taken| (TensorView::from_indices(taken.slots), taken.continued)))
    }

    /// Takes one slot a request, that of position `seq - 1`, or returns `None`; else as `alloc_extend`.
    ///
    /// # Errors
    /// As [`SlotAllocator::extend`].
    pub fn alloc_decode(
        &mut self,
        seq_lens: &[i64],
        last_loc: &[i64],
    ) -> Result<Option<(TensorView, Vec<Page>)>> {
        let mut prefix_lens = reserve(seq_lens.len())?;
        prefix_lens.extend(seq_lens.iter().map(|len| len.saturating_sub(1)));
        self.alloc_extend(&prefix_lens, seq_lens, last_loc)
    }

    /// Gives back what was taken and never handed on: the pages of `slots` but those that were only `continued`.
    pub fn undo(&mut self, slots: &[i32], continued: &[Page]) {
        self.slots.undo(slots, continued);
    }

    /// Gives slots back; what is not live is dropped and reported.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`] when anything would be dropped; nothing is changed then.
    pub fn free(&mut self, given: &IndexVec) -> Result<BadFrees> {
        self.slots.free(given, self.strict)
    }

    /// Gives slots back that stay in use until [`TokenToKvPoolAllocator::fence_passed`] is told so.
    ///
    /// # Errors
    /// As [`TokenToKvPoolAllocator::free`].
    pub fn free_after(&mut self, given: &IndexVec) -> Result<(FenceId, BadFrees)> {
        self.slots.free_after(given, self.strict)
    }

    /// Frees the slots behind a fence; one that is not known any more has none.
    pub fn fence_passed(&mut self, id: FenceId) {
        self.slots.fence_passed(id);
    }

    /// Starts to collect frees. Groups nest.
    pub fn free_group_begin(&mut self) {
        self.slots.group_begin();
    }

    /// Ends a group; the outermost frees all that was collected and says how much that was.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when no group is open; as [`TokenToKvPoolAllocator::free`].
    pub fn free_group_end(&mut self) -> Result<(usize, BadFrees)> {
        self.slots.group_end(self.strict)
    }

    /// Slots that could be handed out now.
    #[must_use]
    pub fn available_size(&self) -> usize {
        self.slots.available()
    }

    /// Merges the released slots into the free ones.
    pub fn merge_and_sort_free(&mut self) {
        self.slots.merge();
    }

    /// Makes every slot free, closes groups and forgets fences.
    pub fn clear(&mut self) {
        self.slots.clear();
    }

    /// The free pages, in the order in which they are handed out without a merge.
    #[must_use]
    pub fn free_slots(&self) -> TensorView {
        page_tensor(self.slots.pages().free_ids())
    }

    /// The released pages, lowest first.
    #[must_use]
    pub fn release_slots(&self) -> TensorView {
        page_tensor(self.slots.pages().released_ids())
    }

    /// (start, length) of the maximal ascending runs: int32 `[k, 2]` on the host.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for values beyond int32.
    pub fn runs(given: &IndexVec) -> Result<TensorView> {
        ascending_runs(given).map(TensorView::from_pairs)
    }

    /// Checks every invariant.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`] with what is broken.
    pub fn verify(&self) -> Result<()> {
        self.slots.fault().map_or(Ok(()), |fault| {
            Err(Error::new(ErrorKind::IndexOwnership, format!("the allocator is inconsistent: {fault}")))
        })
    }

    /// The numbers of this pool.
    #[must_use]
    pub fn stats(&self) -> SlotStats {
        self.slots.stats()
    }
}

fn page_tensor(ids: Vec<u32>) -> TensorView {
    TensorView::from_indices(ids.into_iter().map(u32::cast_signed).collect())
}
