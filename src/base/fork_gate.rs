//! A gate that delays a fork while a thread of kvpool holds locks. The child would wait for them forever.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use super::held::assert_none_held;
use super::own_thread::is_own_thread;

static GATE: RwLock<()> = RwLock::new(());

thread_local! {
    /// The number of times that this thread has entered, and the guard of the first entry.
    static ENTRIES: Cell<usize> = const { Cell::new(0) };
    static ENTERED: RefCell<Option<RwLockReadGuard<'static, ()>>> = const { RefCell::new(None) };
    static CLOSED: RefCell<Option<RwLockWriteGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// A guard that makes [`close_fork_gate`] wait as long as it exists, so that the process is not forked.
/// Threads of kvpool take one before they lock anything that callers also lock.
#[derive(Debug)]
pub struct ForkGate {
    /// A guard is counted for its thread, and must be dropped there.
    of_this_thread: PhantomData<*const ()>,
}

impl ForkGate {
    /// Enters the gate if this is a thread of kvpool. Other threads must not wait
    /// for the gate, because they may hold locks that a thread of kvpool waits for inside it.
    #[must_use]
    pub fn enter_on_own_thread() -> Option<Self> {
        is_own_thread().then(Self::enter)
    }

    /// Enters the gate; a thread may enter several times. Waits while the process is being forked. The caller
    /// must hold no lock.
    #[must_use]
    pub fn enter() -> Self {
        // A thread that has closed the gate runs foreign code before it opens the gate, which may enter.
        if ENTRIES.get() == 0 && CLOSED.with_borrow(Option::is_none) {
            assert_none_held();
            let entered = GATE.read().unwrap_or_else(PoisonError::into_inner);
            ENTERED.set(Some(entered));
        }
        Self::count()
    }

    /// Enters the gate, unless the process is being forked. The caller may hold locks.
    pub(super) fn try_enter() -> Option<Self> {
        if ENTRIES.get() == 0 && CLOSED.with_borrow(Option::is_none) {
            let entered = match GATE.try_read() {
                Ok(entered) => entered,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            };
            ENTERED.set(Some(entered));
        }
        Some(Self::count())
    }

    fn count() -> Self {
        ENTRIES.set(ENTRIES.get() + 1);
        Self { of_this_thread: PhantomData }
    }
}

impl Drop for ForkGate {
    fn drop(&mut self) {
        ENTRIES.set(ENTRIES.get() - 1);
        if ENTRIES.get() == 0 {
            ENTERED.take();
        }
    }
}

/// Waits until no thread holds a [`ForkGate`], and blocks new ones until [`open_fork_gate`]. Call it before a
/// fork, without locks.
///
/// ```
/// use kvpool::base::{ForkGate, close_fork_gate, open_fork_gate};
/// close_fork_gate();
/// // Fork here. Both processes go on with:
/// open_fork_gate();
/// drop(ForkGate::enter());
/// ```
pub fn close_fork_gate() {
    // A thread that holds a gate would deadlock.
    if ENTRIES.get() == 0 && CLOSED.with_borrow(Option::is_none) {
        let closed = GATE.write().unwrap_or_else(PoisonError::into_inner);
        CLOSED.set(Some(closed));
    }
}

/// Ends [`close_fork_gate`], in the parent and in the child.
pub fn open_fork_gate() {
    CLOSED.take();
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread::spawn;
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_thread_that_closes_the_gate_passes_it_alone() {
        close_fork_gate();
        close_fork_gate();
        let entered = ForkGate::enter();
        let (sender, other) = channel();
        let waiting = spawn(move || {
            assert!(ForkGate::try_enter().is_none());
            let entered = ForkGate::enter();
            sender.send(()).expect("the test waits");
            drop(entered);
        });
        assert!(other.recv_timeout(Duration::from_millis(20)).is_err(), "it waits");
        drop(entered);
        drop(ForkGate::enter());
        drop(ForkGate::try_enter().expect("the thread that closed it"));
        open_fork_gate();
        other.recv_timeout(Duration::from_secs(60)).expect("the gate is open");
        waiting.join().expect("no panic");
        let entered = ForkGate::try_enter().expect("the gate is open");
        let closing = spawn(|| {
            close_fork_gate();
            open_fork_gate();
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!closing.is_finished(), "it waits");
        drop(entered);
        closing.join().expect("no panic");
    }
}
