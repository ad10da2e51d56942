//! The lock of an interpreter, which a thread releases while it waits.
//!
//! A binding installs it once. Nobody waits with it: neither for a device, nor for a lock that is held by a
//! thread which waits for a device. So work of a device may need the interpreter.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::OnceLock;

use super::fork_gate::ForkGate;
use super::own_thread::is_own_thread;

/// The functions that release and take the lock of an interpreter. Neither runs code of the interpreter.
#[derive(Clone, Copy, Debug)]
pub struct InterpreterLock {
    /// Releases the lock if the calling thread holds it, and returns what `acquire` needs.
    pub release: fn() -> Option<NonNull<c_void>>,
    /// Waits for the lock that `release` released on this thread.
    pub acquire: fn(NonNull<c_void>),
}

static INTERPRETER: OnceLock<InterpreterLock> = OnceLock::new();

/// Installs the lock of an interpreter, which `unlock_interpreter` releases from then on. Later
/// installations have no effect.
///
/// ```
/// use std::ptr::NonNull;
/// use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
/// use kvpool::base::{InterpreterLock, set_interpreter_lock};
/// static IS_HELD: AtomicBool = AtomicBool::new(true);
/// set_interpreter_lock(InterpreterLock {
///     release: || IS_HELD.swap(false, Relaxed).then_some(NonNull::dangling()),
///     acquire: |_| IS_HELD.store(true, Relaxed),
/// });
/// assert!(IS_HELD.load(Relaxed), "it is released around calls only");
/// ```
pub fn set_interpreter_lock(lock: InterpreterLock) {
    let _ = INTERPRETER.set(lock);
}

/// Keeps the lock of the interpreter released on this thread; takes it again on drop.
#[derive(Debug)]
#[must_use = "it takes the lock again when it is dropped"]
pub(crate) struct UnlockedInterpreter {
    lock: InterpreterLock,
    state: NonNull<c_void>,
    /// Keeps others from forking, who have the lock of the interpreter for it: the child would wait for locks
    /// of pools that this thread holds.
    _gate: ForkGate,
}

impl Drop for UnlockedInterpreter {
    fn drop(&mut self) {
        (self.lock.acquire)(self.state);
    }
}

/// Releases the lock of the interpreter, if this thread holds it, for a call that may wait; not while another
/// thread is about to fork. Meanwhile nothing may be dropped that belongs to the interpreter. Locks of pools
/// may be held, since whoever waits for one of those has released the lock of the interpreter, too.
#[inline]
#[must_use = "it takes the lock again when it is dropped"]
pub(crate) fn unlock_interpreter() -> Option<UnlockedInterpreter> {
    let lock = *INTERPRETER.get().filter(|_| !is_own_thread())?;
    let gate = ForkGate::try_enter()?;
    (lock.release)().map(|state| UnlockedInterpreter { lock, state, _gate: gate })
}
