//! Fences: points in work in flight, after which slots may be used again.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use crate::base::Result;
use crate::index::FenceId;
use crate::memory::Event;

/// A point in work in flight that still uses slots which their owner has freed.
///
/// Any work may stand behind it: a launch on a GPU (an [`Event`]), a transfer to another machine, a step of a program.
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
///     fn passed(&self) -> Result<bool> {
///         Ok(self.0.load(Ordering::Acquire))
///     }
/// }
///
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let config = AllocatorConfig { size: 8, page_size: 1, need_sort: true, strict: false };
/// let allocator = TokenToKvPoolAllocator::new(&config, &host).unwrap();
/// let slots = allocator.alloc(3, stream).unwrap().unwrap().keep();
/// let sent = Arc::new(Sent(AtomicBool::new(false)));
/// let fence: Arc<dyn Fence> = Arc::clone(&sent) as _;
/// let freed = Indices::of(slots.borrow(), Some(0)).unwrap();
/// let bad = allocator.free(&freed, Some(&fence), || None, stream).unwrap();
/// assert_eq!((bad.dropped(), allocator.available_size()), (0, 5));
/// sent.0.store(true, Ordering::Release);
/// allocator.poll(stream).unwrap();
/// assert_eq!(allocator.available_size(), 8);
/// ```
pub trait Fence: Any + Send + Sync {
    /// Whether the work before it is done. Does not wait. Pools ask without holding a lock.
    ///
    /// # Errors
    /// What ends the search for fences that have passed: the call that was looking for them returns it, and the slots
    /// stay in use.
    fn passed(&self) -> Result<bool>;
}

impl Fence for Event {
    fn passed(&self) -> Result<bool> {
        Self::passed(self)
    }
}

thread_local! {
    /// Whether this thread is asking fences.
    static IS_ASKING: Cell<bool> = const { Cell::new(false) };
}

/// The fences of an allocator that have not passed, in the order of their frees.
#[derive(Default)]
pub(super) struct Fences {
    waiting: Vec<PendingFence>,
}

/// A fence, and the name of what was freed behind it.
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

    /// All of them, to be asked when no lock is held.
    pub(super) fn list(&self) -> Vec<PendingFence> {
        self.waiting.clone()
    }

    /// Takes those that have passed. To be dropped without locks: they may be the last owners of foreign objects.
    pub(super) fn take_passed(&mut self, passed: &[FenceId]) -> Vec<PendingFence> {
        self.waiting.extract_if(.., |waiting| passed.contains(&waiting.id)).collect()
    }

    /// Takes all of them, to be dropped without locks.
    pub(super) fn take(&mut self) -> Vec<PendingFence> {
        std::mem::take(&mut self.waiting)
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

/// Asks which fences have passed, in order, up to the first that cannot tell.
///
/// A fence that uses an allocator while it is asked finds all fences as they are: searches do not nest.
pub(super) fn passed(waiting: &[PendingFence]) -> (Vec<FenceId>, Result<()>) {
    /// Ends the search, also when a fence panics.
    struct Asking;

    impl Drop for Asking {
        fn drop(&mut self) {
            IS_ASKING.set(false);
        }
    }

    let mut passed = Vec::new();
    if IS_ASKING.replace(true) {
        return (passed, Ok(()));
    }
    let _asking = Asking;
    for PendingFence { id, fence } in waiting {
        match fence.passed() {
            Ok(true) => passed.push(*id),
            Ok(false) => (),
            Err(error) => return (passed, Err(error)),
        }
    }
    (passed, Ok(()))
}
