//! Fences: points in work in flight, after which freed slots may be reused.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use crate::base::{Discarded, Result};
use crate::index::FenceId;
use crate::memory::{Event, Keep};
use crate::transfer::Transfer;

/// The end of work that still uses freed slots.
///
/// The work can be of any kind: a launch on a GPU (an [`Event`]), a transfer to another machine, a step of a
/// program.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicBool, Ordering};
/// use kvpool::base::{IndexVec, Result};
/// use kvpool::kernels::Indices;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, Fence, TokenToKvPoolAllocator};
///
/// struct Sent(AtomicBool);
///
/// impl Fence for Sent {
///     fn has_passed(&self) -> Result<bool> {
///         Ok(self.0.load(Ordering::Acquire))
///     }
/// }
///
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let config = AllocatorConfig::new(8);
/// let allocator = TokenToKvPoolAllocator::new(&config, &host).unwrap();
/// let slots = allocator.alloc(3, stream).unwrap().unwrap().keep();
/// let sent = Arc::new(Sent(AtomicBool::new(false)));
/// let fence: Arc<dyn Fence> = Arc::clone(&sent) as _;
/// let freed = Indices::of(slots.borrow(), Some(0)).unwrap();
/// let bad = allocator.free_after(&freed, &fence, stream).unwrap();
/// assert_eq!((bad.dropped(), allocator.available_size()), (0, 5));
/// sent.0.store(true, Ordering::Release);
/// allocator.poll(stream).unwrap();
/// assert_eq!(allocator.available_size(), 8);
/// ```
pub trait Fence: Any + Send + Sync {
    /// Returns whether the work is complete. Must not wait. Pools call it without holding a lock.
    ///
    /// # Errors
    /// An error ends the polling of fences: the polling call returns it, and the slots stay in use.
    fn has_passed(&self) -> Result<bool>;
}

impl Fence for Event {
    fn has_passed(&self) -> Result<bool> {
        Self::has_passed(self)
    }
}

impl Fence for Transfer {
    fn has_passed(&self) -> Result<bool> {
        self.is_over()
    }
}

thread_local! {
    /// Whether this thread is polling fences.
    static IS_ASKING: Cell<bool> = const { Cell::new(false) };
}

/// The fences of an allocator that have not passed, in the order of their frees.
#[derive(Default)]
pub(super) struct Fences {
    waiting: Vec<PendingFence>,
    /// The owners that are dropped when a fence has passed.
    keeps: Vec<(FenceId, Keep)>,
}

/// A fence, and the id under which slots were freed behind it.
#[derive(Clone)]
pub(super) struct PendingFence {
    id: FenceId,
    fence: Arc<dyn Fence>,
}

impl Fences {
    pub(super) const fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn add(&mut self, id: FenceId, fence: Arc<dyn Fence>) {
        self.waiting.push(PendingFence { id, fence });
    }

    /// Keeps `keep` until the fence `id`, which is added next, has passed.
    pub(super) fn keep(&mut self, id: FenceId, keep: Keep) {
        self.keeps.push((id, keep));
    }

    /// Returns whether something is kept until the fence `id` has passed.
    pub(super) fn keeps_for(&self, id: FenceId) -> bool {
        self.keeps.iter().any(|(kept, _)| *kept == id)
    }

    /// Returns all fences, to be polled.
    pub(super) fn list(&self) -> Vec<PendingFence> {
        self.waiting.clone()
    }

    /// Discards the passed fences, and the owners that were kept until then.
    pub(super) fn discard_passed(&mut self, passed: &[FenceId], discarded: &Discarded) {
        self.discard_if(|id| passed.contains(&id), discarded);
    }

    /// Discards all fences.
    pub(super) fn clear(&mut self, discarded: &Discarded) {
        self.discard_if(|_| true, discarded);
    }

    fn discard_if(&mut self, is_over: impl Fn(FenceId) -> bool, discarded: &Discarded) {
        for over in self.waiting.extract_if(.., |waiting| is_over(waiting.id)) {
            discarded.add(over.fence);
        }
        for (_, keep) in self.keeps.extract_if(.., |(id, _)| is_over(*id)) {
            discarded.add(keep);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &dyn Fence> {
        self.waiting.iter().map(|waiting| &*waiting.fence)
    }
}

impl fmt::Debug for Fences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.waiting.iter().map(|waiting| waiting.id)).finish()
    }
}

/// Polls fences in order, up to the first error, and returns the ids of those that have passed.
///
/// Polling does not nest: if a fence uses an allocator in `passed`, that call polls nothing.
pub(super) fn passed(waiting: &[PendingFence]) -> (Vec<FenceId>, Result<()>) {
    /// Resets the flag, even if a fence panics.
    struct PollingGuard;

    impl Drop for PollingGuard {
        fn drop(&mut self) {
            IS_ASKING.set(false);
        }
    }

    let mut passed = Vec::new();
    if IS_ASKING.replace(true) {
        return (passed, Ok(()));
    }
    let _guard = PollingGuard;
    for PendingFence { id, fence } in waiting {
        match fence.has_passed() {
            Ok(true) => passed.push(*id),
            Ok(false) => (),
            Err(error) => return (passed, Err(error)),
        }
    }
    (passed, Ok(()))
}
