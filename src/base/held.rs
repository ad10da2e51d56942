//! The ranks of locks, and which locks a thread holds: debug builds record it.

/// The locks of pools, in the order in which a thread takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LockRank {
    /// The copies between the prefix cache of an arena and the tier below it.
    ArenaTierCopies,
    /// The list of those that can free slots for an allocator that is short.
    Reclaimers,
    /// The reference by which threads of a store reach a prefix cache.
    CacheRef,
    /// A lease of a prefix.
    Lease,
    /// The tree of a prefix cache, and all that it has below it.
    Cache,
    /// What came of a load from the tier below.
    LoadArrival,
    /// Whether a load has arrived.
    LoadOutcome,
    /// The slots of an allocator.
    Allocator,
    /// The requests of a planner.
    Planner,
    /// A request table.
    Table,
    /// The pages of a page pool.
    PagePool,
    /// The slabs of a cache arena.
    CacheArena,
    /// The buffers of a buffer pool.
    BufferPool,
    /// The track slots of the states.
    TrackSlots,
    /// The copies that may still use track slots.
    TrackCopies,
    /// The model whose pages a tier has.
    TierModel,
    /// The page-locking of a tier.
    TierPageLocking,
    /// Pieces of a tier on their way from a store.
    TierPieces,
    /// Pieces of a tier that wait until a store can take them.
    WaitingPieces,
    /// The pages of a tier.
    TierPages,
    /// The states of a tier.
    TierStates,
    /// The chunks of a chunk pool.
    ChunkPool,
    /// The counters of a tier.
    TierCounts,
    /// The failures of a tier that were not reported yet.
    TierNotes,
    /// The progress of a fetch from a store.
    Fetch,
    /// The threads of a file store.
    StoreWorkers,
    /// The file of a file store.
    StoreDisk,
    /// The queues of a store.
    Store,
    /// The progress of a call of a store.
    StoreTransfer,
    /// The slots of a stage.
    Stage,
    /// The mirror of a request table.
    TableMirror,
    /// Whether a workspace is open.
    Workspace,
    /// The arena of a workspace.
    Arena,
    /// The jobs of a background thread.
    JobQueue,
    /// The progress of copies on a thread.
    CopySteps,
}

pub(super) use check::{Held, assert_none_held};

#[cfg(all(debug_assertions, not(loom)))]
mod check {
    use std::cell::RefCell;
    use std::marker::PhantomData;

    use super::LockRank;

    thread_local! {
        /// The locks that this thread holds, in the order in which it took them.
        static HELD: RefCell<Vec<LockRank>> = const { RefCell::new(Vec::new()) };
    }

    /// A lock that this thread holds.
    #[derive(Debug)]
    pub(in crate::base) struct Held {
        rank: LockRank,
        of_this_thread: PhantomData<*const ()>,
    }

    impl Held {
        /// Records a lock of this thread.
        ///
        /// # Panics
        /// If the thread holds a lock that comes later, or one of the same rank.
        pub(in crate::base) fn new(rank: LockRank) -> Self {
            HELD.with_borrow_mut(|held| {
                let highest = held.iter().max();
                assert!(
                    highest.is_none_or(|highest| *highest < rank),
                    "{rank:?} is locked while {held:?} are"
                );
                held.push(rank);
            });
            Self { rank, of_this_thread: PhantomData }
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            // A thread that ends may drop guards after its record.
            let _ = HELD.try_with(|held| {
                let mut held = held.borrow_mut();
                if let Some(last) = held.iter().rposition(|rank| *rank == self.rank) {
                    held.remove(last);
                }
            });
        }
    }

    /// Checks that this thread holds no lock of a pool.
    ///
    /// # Panics
    /// If it holds one.
    pub(crate) fn assert_none_held() {
        HELD.with_borrow(|held| assert!(held.is_empty(), "no lock may be held here; {held:?} are"));
    }
}

#[cfg(not(all(debug_assertions, not(loom))))]
mod check {
    use super::LockRank;

    /// Nothing: only debug builds record locks.
    #[derive(Debug)]
    pub(in crate::base) struct Held;

    impl Held {
        #[inline]
        pub(in crate::base) const fn new(_: LockRank) -> Self {
            Self
        }
    }

    /// Does nothing: only debug builds record locks.
    #[inline]
    pub(crate) const fn assert_none_held() {}
}
