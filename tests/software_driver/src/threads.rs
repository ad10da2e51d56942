//! The facts that the driver knows of the threads that call it.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// `CUstreamCaptureMode`: of a thread, what it may do while somebody captures; of a capture, what it forbids to whom.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
    /// 0 for a thread that has no number yet. It needs no destructor, so that calls may come from those of a thread
    /// that ends.
    static NUMBER: Cell<usize> = const { Cell::new(0) };
}

impl Mode {
    /// The mode with this number.
    pub fn new(number: i32) -> Option<Self> {
        [Self::Global, Self::ThreadLocal, Self::Relaxed].into_iter().find(|mode| *mode as i32 == number)
    }
}

/// The mode of this thread.
pub fn mode() -> Mode {
    MODE.get()
}

/// Sets the mode of this thread; the one that it had.
pub fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

/// The number of this thread, which no other has or had.
pub fn number() -> usize {
    static LAST: AtomicUsize = AtomicUsize::new(0);
    if NUMBER.get() == 0 {
        NUMBER.set(LAST.fetch_add(1, Relaxed) + 1);
    }
    NUMBER.get()
}
