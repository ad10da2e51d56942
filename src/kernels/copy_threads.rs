//! Standing threads that take part in large copies.
//!
//! Starting a thread costs as much as copying some 200 KB. Waking one that sleeps costs less, and reaching
//! one that still looks for work costs nothing. A copy allocates no memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::base::check_memory;
use crate::base::sync::{AtomicBool, AtomicPtr, thread};

#[cfg(all(target_os = "linux", not(loom)))]
use super::cpu_set::CpuSet;

/// The number of times that a thread looks for work, or for the end of another thread's part, before it
/// sleeps: some hundred microseconds, longer than a wake-up may take, so that a series of copies finds it
/// awake. None under `loom`, which explores every interleaving.
const SPIN_LIMIT: usize = if cfg!(loom) { 0 } else { 1 << 12 };

/// Work in parts, on the stack of its caller until the last part is done.
struct Work<'a> {
    part: &'a (dyn Fn(usize, usize) + Sync),
    parts: usize,
    caller: thread::Thread,
    has_panicked: AtomicBool,
}

/// The slot where a caller offers a part to one thread.
///
/// It is empty, [`TAKEN`], [`CLOSED`], or holds an offer. The caller fills an empty slot; then either the
/// thread takes the offer and empties the slot when the part is done, or the caller withdraws it.
#[derive(Debug, Default)]
struct WorkSlot(AtomicPtr<Work<'static>>);

/// The thread is at work.
const TAKEN: *mut Work<'static> = ptr::without_provenance_mut(1);

/// The thread is to end.
const CLOSED: *mut Work<'static> = ptr::without_provenance_mut(2);

impl WorkSlot {
    /// Offers a part of `work`, which must not move or end until the slot is empty again.
    fn offer(&self, work: &Work<'_>) {
        self.0.store(ptr::from_ref(work).cast_mut().cast(), Release);
    }

    /// Takes an offer back, unless the thread was faster. Returns whether there was one.
    fn withdraw(&self) -> bool {
        let offer = self.0.load(Relaxed);
        !offer.is_null()
            && offer != TAKEN
            && self.0.compare_exchange(offer, ptr::null_mut(), Relaxed, Relaxed).is_ok()
    }

    fn is_empty(&self) -> bool {
        self.0.load(Acquire).is_null()
    }

    /// Runs the parts that are offered here, each as number `part` of its work, until the slot is closed.
    fn serve(&self, part: usize) {
        let mut spins_left = SPIN_LIMIT;
        loop {
            let offer = self.0.load(Relaxed);
            if offer == CLOSED {
                return;
            }
            if offer.is_null() {
                pause(&mut spins_left);
                continue;
            }
            // The offer that is taken: that of the load may have been withdrawn, and another be at its address.
            let Ok(offer) = self.0.compare_exchange(offer, TAKEN, Acquire, Relaxed) else {
                pause(&mut spins_left);
                continue;
            };
            // SAFETY: the offer was still there when it was taken, so its caller waits for the slot to be
            // empty before it lets go of the work.
            let work = unsafe { &*offer };
            let caller = work.caller.clone();
            if catch_unwind(AssertUnwindSafe(|| (work.part)(part, work.parts))).is_err() {
                work.has_panicked.store(true, Relaxed);
            }
            self.0.store(ptr::null_mut(), Release);
            caller.unpark();
            spins_left = SPIN_LIMIT;
        }
    }
}

/// Spins once or, when no spins are left, sleeps until another thread wakes this one.
fn pause(spins_left: &mut usize) {
    if *spins_left > 0 {
        *spins_left -= 1;
        std::hint::spin_loop();
    } else {
        thread::park();
    }
}

#[derive(Debug)]
struct CopyThread {
    slot: Arc<WorkSlot>,
    handle: thread::JoinHandle<()>,
}

impl Drop for CopyThread {
    fn drop(&mut self) {
        self.slot.0.store(CLOSED, Release);
        self.handle.thread().unpark();
    }
}

/// The parts of a call that are offered to threads. Dropping them waits for those that were taken.
struct Offers<'a>(&'a [CopyThread]);

impl Drop for Offers<'_> {
    fn drop(&mut self) {
        for thread in self.0 {
            thread.slot.withdraw();
            let mut spins_left = SPIN_LIMIT;
            while !thread.slot.is_empty() {
                pause(&mut spins_left);
            }
        }
    }
}

/// Threads that take part in the work of one caller at a time. They start when they are first needed, and
/// sleep in between.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
/// let done = AtomicUsize::new(0);
/// kvpool::kernels::CopyThreads::new().run(3, &|part, _| drop(done.fetch_add(1 << part, Relaxed)));
/// assert_eq!(done.into_inner(), 0b111);
/// ```
#[derive(Debug, Default)]
pub struct CopyThreads {
    threads: Vec<CopyThread>,
    /// The processor that the threads are kept off, and the number of these threads.
    #[cfg(all(target_os = "linux", not(loom)))]
    excluded: Option<(usize, usize)>,
}

impl CopyThreads {
    /// Creates a set without threads.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            threads: Vec::new(),
            #[cfg(all(target_os = "linux", not(loom)))]
            excluded: None,
        }
    }

    /// Calls `part(number, parts)` for every part, and returns when all are done. Each thread always gets the
    /// same number: what it copies again is in its caches.
    ///
    /// The caller runs the first part, and then those that no thread has begun yet, so a copy never waits for
    /// a thread that gets no processor.
    ///
    /// # Panics
    /// When a part does, after all parts that were begun have ended.
    pub fn run(&mut self, parts: usize, part: &(dyn Fn(usize, usize) + Sync)) {
        self.start(parts.saturating_sub(1));
        #[cfg(all(target_os = "linux", not(loom)))]
        self.exclude_caller_cpu();
        let work = Work { part, parts, caller: thread::current(), has_panicked: AtomicBool::new(false) };
        let offers = Offers(&self.threads[..self.threads.len().min(parts.saturating_sub(1))]);
        for thread in offers.0 {
            thread.slot.offer(&work);
            thread.handle.thread().unpark();
        }
        part(0, parts);
        for number in (1..parts).rev() {
            if offers.0.get(number - 1).is_none_or(|thread| thread.slot.withdraw()) {
                part(number, parts);
            }
        }
        drop(offers);
        assert!(!work.has_panicked.load(Relaxed), "a part of the work panicked on its thread");
    }

    /// Starts threads until there are `count`, or the system has no more, or no memory for their stacks.
    fn start(&mut self, count: usize) {
        /// Bytes for a stack, and as many for what a thread allocates as it starts.
        const THREAD: usize = 4 << 20;
        while self.threads.len() < count && check_memory(THREAD).is_ok() {
            let (slot, number) = (Arc::<WorkSlot>::default(), self.threads.len() + 1);
            let worker_slot = Arc::clone(&slot);
            let name = format!("kvpool-copy-{number}");
            let Ok(handle) = thread::Builder::new().name(name).spawn(move || worker_slot.serve(number))
            else {
                return;
            };
            self.threads.push(CopyThread { slot, handle });
        }
    }

    /// Keeps the threads off the processor of the caller, if they are not already.
    #[cfg(all(target_os = "linux", not(loom)))]
    fn exclude_caller_cpu(&mut self) {
        let Some(processor) = CpuSet::current() else { return };
        let wanted = Some((processor, self.threads.len()));
        if self.excluded != wanted
            && let Some(others) = CpuSet::allowed_except(processor)
        {
            self.threads.iter().for_each(|thread| others.set_affinity(&thread.handle));
        }
        self.excluded = wanted;
    }

    /// Forgets the threads, which the child of a fork does not have.
    pub(super) fn forget(&mut self) {
        std::mem::forget(std::mem::take(&mut self.threads));
    }
}
