//! What a call gives up under locks, and drops when it holds none.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

use super::blocking::assert_may_wait;

/// What a call gives up under locks. It is dropped with this value: the last owner of something may take locks
/// itself, wait, or run foreign code.
///
/// Make it before the locks of the call, so that it is dropped after them. A debug build checks that no lock is
/// held then. The first item costs no memory of its own.
#[derive(Debug)]
pub(crate) struct Discarded {
    items: RefCell<Items>,
}

/// Most calls discard nothing, and to make and drop this costs them next to nothing.
#[derive(Debug)]
struct Items {
    first: Option<Item>,
    more: Option<Box<More>>,
}

#[derive(Debug, Default)]
struct More {
    items: Vec<Item>,
}

type Item = Arc<dyn Any + Send + Sync>;

impl Discarded {
    /// Begins to collect.
    ///
    /// # Panics
    /// In a debug build, if the thread holds a lock of a pool.
    #[inline]
    pub(crate) fn new() -> Self {
        check();
        Self { items: RefCell::new(Items { first: None, more: None }) }
    }

    /// Takes something that is dropped later.
    pub(crate) fn add(&self, item: Item) {
        let Items { first, more } = &mut *self.items.borrow_mut();
        if first.is_none() {
            *first = Some(item);
        } else {
            more.get_or_insert_default().items.push(item);
        }
    }
}

impl Drop for Discarded {
    #[inline]
    fn drop(&mut self) {
        check();
    }
}

#[inline]
fn check() {
    // Another panic may have left locks behind.
    if cfg!(debug_assertions) && !std::thread::panicking() {
        assert_may_wait();
    }
}

#[cfg(all(test, debug_assertions, not(loom)))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use crate::base::lock_order::{LockRank, RankedMutex};

    use super::*;

    /// Takes a lock when it is dropped.
    struct Locking(Arc<RankedMutex<Vec<u32>>>, u32);

    impl Drop for Locking {
        fn drop(&mut self) {
            self.0.lock().push(self.1);
        }
    }

    #[test]
    fn what_takes_locks_is_dropped_after_them_in_order() {
        let dropped = Arc::new(RankedMutex::new(LockRank::Cache, Vec::new()));
        let call = || {
            let discarded = Discarded::new();
            let held = dropped.lock();
            for number in 0..3 {
                discarded.add(Arc::new(Locking(Arc::clone(&dropped), number)));
            }
            held.len()
        };
        assert_eq!((call(), &*dropped.lock()), (0, &vec![0, 1, 2]));
    }

    #[test]
    fn it_is_made_and_dropped_without_locks() {
        let table = RankedMutex::new(LockRank::Table, ());
        let discarded = Discarded::new();
        let held = table.lock();
        assert!(catch_unwind(Discarded::new).is_err());
        let mut discarded = Some(discarded);
        assert!(catch_unwind(AssertUnwindSafe(|| drop(discarded.take()))).is_err());
        drop(held);
        drop(Discarded::new());
    }
}
