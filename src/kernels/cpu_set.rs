//! The processors that a copy's threads run on.
//!
//! The system often runs a woken thread on the processor of the thread that woke it. The caller of a copy
//! copies a part itself and keeps its processor busy, so the woken thread would begin when the copy is over.
//! Therefore it is kept off that processor.

use std::os::unix::thread::JoinHandleExt;
use std::thread::JoinHandle;

/// A set of CPUs of this machine.
pub(super) struct CpuSet(libc::cpu_set_t);

impl CpuSet {
    /// Returns the processor of the calling thread, if the system says which.
    pub(super) fn current() -> Option<usize> {
        if cfg!(miri) {
            return None;
        }
        // SAFETY: the call has no arguments and touches no memory of this process.
        usize::try_from(unsafe { libc::sched_getcpu() }).ok()
    }

    /// Returns the processors on which the calling thread may run, without `processor`. `None` if that leaves
    /// none.
    pub(super) fn allowed_except(processor: usize) -> Option<Self> {
        // SAFETY: all bits zero is a set: the empty one.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: the size is that of `set`.
        let result = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
        if result != 0 || processor >= 8 * size_of_val(&set) {
            return None;
        }
        // SAFETY: the set has room for this processor.
        unsafe { libc::CPU_CLR(processor, &mut set) };
        // SAFETY: the call only counts bits.
        let left = unsafe { libc::CPU_COUNT(&set) };
        (left > 0).then_some(Self(set))
    }

    /// Restricts a thread to these CPUs. Has no effect if the system refuses.
    pub(super) fn set_affinity(&self, thread: &JoinHandle<()>) {
        // SAFETY: the handle keeps the id valid, also when the thread has ended; the size is that of the set.
        unsafe {
            libc::pthread_setaffinity_np(thread.as_pthread_t(), size_of_val(&self.0), &raw const self.0)
        };
    }
}
