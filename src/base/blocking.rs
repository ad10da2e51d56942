//! A process-wide hook around code that blocks its thread.
//!
//! A binding installs the hook once, for example to release the lock of its interpreter. Without one,
//! [`run_blocking`] calls the closure directly.

use std::sync::OnceLock;
use std::time::Duration;

use super::Result;
use super::held::assert_none_held;
use super::own_thread::is_own_thread;

/// Runs a section that may block its thread, for example with the lock of an interpreter released.
pub type Section = fn(section: &mut (dyn FnMut() + Send));

/// Returns an error if a wait of the calling thread has to end, for example for a signal.
pub type InterruptCheck = fn() -> Result<()>;

/// A copy of this many bytes takes longer than handing the lock of an interpreter to another thread.
pub(crate) const LONG_COPY: usize = 64 << 10;

static SECTION: OnceLock<Section> = OnceLock::new();

static INTERRUPT_CHECK: OnceLock<InterruptCheck> = OnceLock::new();

/// Checks, in a debug build, that this thread may wait: it is a thread of kvpool, or holds no lock of a pool.
///
/// # Panics
/// If it may not wait.
pub(crate) fn assert_may_wait() {
    if !is_own_thread() {
        assert_none_held();
    }
}

/// Installs `section` around every later call of [`run_blocking`] in this process. Later installations have
/// no effect.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
/// use kvpool::base::{run_blocking, set_blocking_hook};
/// static WAITS: AtomicUsize = AtomicUsize::new(0);
/// set_blocking_hook(|section| {
///     WAITS.fetch_add(1, Relaxed); // an async runtime would be told here that the thread blocks
///     section();
/// });
/// assert_eq!(run_blocking(|| 7), 7);
/// assert_eq!(WAITS.load(Relaxed), 1);
/// ```
pub fn set_blocking_hook(section: Section) {
    let _ = SECTION.set(section);
}

/// Installs `check` between the slices of every later [`wait_interruptibly`] in this process. Later
/// installations have no effect.
///
/// ```
/// use std::time::Duration;
/// use kvpool::base::{Error, set_interrupt_check, wait_interruptibly};
/// assert!(wait_interruptibly(|slice: Duration| Ok(!slice.is_zero())).is_ok());
/// set_interrupt_check(|| Err(Error::state("the engine shuts down")));
/// let error = wait_interruptibly(|_| Ok(false)).unwrap_err();
/// assert_eq!(error.to_string(), "the engine shuts down");
/// ```
pub fn set_interrupt_check(check: InterruptCheck) {
    let _ = INTERRUPT_CHECK.set(check);
}

/// Calls `wait`, which waits for at most the given time and returns whether it is done, until it is. The
/// caller must hold no lock.
///
/// # Errors
/// The error of `wait`, or that of the installed check, which ends the wait.
pub fn wait_interruptibly(wait: impl Fn(Duration) -> Result<bool> + Send + Sync) -> Result<()> {
    // Under loom no wait ends by itself: time would change the orders that it repeats.
    const SLICE: Duration = if cfg!(loom) { Duration::MAX } else { Duration::from_millis(50) };
    while !run_blocking(|| wait(SLICE))? {
        INTERRUPT_CHECK.get().filter(|_| !is_own_thread()).map_or(Ok(()), |check| check())?;
    }
    Ok(())
}

/// Calls `wait`, which may take long because it waits for a device or another thread, or copies many bytes.
/// The caller must hold no lock.
///
/// ```
/// use kvpool::base::run_blocking;
/// let (sender, receiver) = std::sync::mpsc::channel();
/// std::thread::spawn(move || sender.send(7));
/// assert_eq!(run_blocking(move || receiver.recv()), Ok(7));
/// ```
pub fn run_blocking<T: Send>(wait: impl FnOnce() -> T + Send) -> T {
    if is_own_thread() {
        return wait();
    }
    assert_may_wait();
    let Some(section) = SECTION.get() else { return wait() };
    let (mut wait, mut answer) = (Some(wait), None);
    section(&mut || answer = wait.take().map(|wait| wait()));
    answer.expect("a section runs its body once")
}
