//! The steps before slots are taken, and the steps when there are not enough.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use crate::base::lock_order::RankedGuard;
use crate::base::{Discarded, Page, Result, run_blocking};
use crate::memory::Stream;
use crate::pool::fences::passed;
use crate::pool::shortage::{Obtainable, Reclaim, Shortage, Shortfall, TakeResult};
use crate::pool::slot_tensors::{CopiedPages, SlotTensors};

use super::{Notice, TokenToKvPoolAllocator};

impl TokenToKvPoolAllocator {
    /// Completes frees whose values are on the host or whose fences have passed. Does not wait.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) for the first invalid
    /// late free, which frees nothing. [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the device
    /// has failed. The error of a fence.
    pub fn poll(&self, stream: Stream) -> Result<()> {
        self.polled(stream).map(drop)
    }

    /// Calls [`Self::poll`], and then locks the slots.
    #[inline]
    pub(super) fn polled(&self, stream: Stream) -> Result<RankedGuard<'_, SlotTensors>> {
        let slots = self.lock();
        if slots.is_settled() {
            return Ok(slots);
        }
        drop(slots);
        self.complete_landed(stream)?;
        self.poll_fences(stream)?;
        Ok(self.lock())
    }

    /// Works like [`Self::poll`], for fences only. Reports no invalid frees.
    ///
    /// # Errors
    /// The error of a fence.
    pub fn poll_fences(&self, stream: Stream) -> Result<()> {
        let waiting = self.lock().fences().list();
        let (passed, end) = passed(&waiting);
        if !passed.is_empty() {
            let discarded = Discarded::new();
            // Slots behind passed fences are freed even if another fence fails.
            let freed = self.freeing(self.lock(), stream, |slots| {
                for &id in &passed {
                    slots.fence_passed(id);
                }
                slots.fences_mut().discard_passed(&passed, &discarded);
                Ok(())
            });
            freed.expect("giving back cannot fail");
        }
        end
    }

    /// Works like [`Self::poll`], and also waits for values in flight.
    ///
    /// # Errors
    /// See [`Self::poll`].
    pub fn settle(&self, stream: Stream) -> Result<()> {
        while self.wait_for_oldest(stream)? {}
        self.poll(stream)
    }

    /// Waits for the values of the oldest pending free and completes it. `false` if there is none.
    fn wait_for_oldest(&self, stream: Stream) -> Result<bool> {
        let oldest = {
            let slots = self.lock();
            if !slots.has_deferred() {
                return Ok(false);
            }
            slots.oldest_pending()
        };
        if let Some(oldest) = oldest {
            run_blocking(|| oldest.wait())?;
        }
        self.complete_landed(stream)?;
        Ok(true)
    }

    /// Completes frees whose values are on the host, and reports the invalid ones.
    fn complete_landed(&self, stream: Stream) -> Result<()> {
        let (mut settled, discarded) = (Vec::new(), Discarded::new());
        let answer = self.freeing(self.lock(), stream, |slots| slots.settle(&mut settled, &discarded));
        for late in settled {
            if late.bad.dropped() > 0 {
                self.notify(Notice::BadFrees(&late.bad, late.given));
            }
        }
        answer
    }

    /// Calls `take` until it succeeds, or until nothing is left to reclaim or to wait for: then `None`.
    #[inline]
    pub(in crate::pool) fn alloc_with<T>(
        &self,
        stream: Stream,
        mut take: impl FnMut(&mut SlotTensors) -> Result<TakeResult<T>>,
    ) -> Result<Option<T>> {
        let mut shortage = usize::MAX;
        loop {
            let mut slots = self.polled(stream)?;
            if let Some(event) = slots.backpressure_event() {
                drop(slots);
                run_blocking(|| event.wait())?;
                continue;
            }
            if slots.has_copied()
                && let Some(gpu) = self.gpu()
            {
                gpu.check_not_capturing(stream, "a wait for copies of free slots")?;
            }
            let taken = take(&mut slots)?;
            if taken.is_ok() && slots.has_copied() {
                self.wait_for_copies(slots, stream);
            } else {
                drop(slots);
            }
            match taken {
                Ok(taken) => return Ok(Some(taken)),
                // The number of pending slots was an estimate until now.
                Err(_) if self.wait_for_oldest(stream)? => shortage = usize::MAX,
                // Another thread has completed them.
                Err(Shortage::InFlight) => (),
                Err(Shortage::Missing(short)) => {
                    let missing = short.to_reclaim(self.obtainable(short, stream));
                    // Tried again as long as it frees slots.
                    if !(1..shortage).contains(&missing) {
                        return Ok(None);
                    }
                    let freed = self.reclaim(missing, stream)?;
                    // If enough slots were freed and there are not enough now, another thread has taken them.
                    shortage = if freed < missing { missing } else { usize::MAX };
                }
            }
        }
    }

    /// Makes later work on `stream` come after copies of slots that were just handed out; without a device, the
    /// calling thread waits.
    #[cold]
    fn wait_for_copies(&self, mut slots: RankedGuard<'_, SlotTensors>, stream: Stream) {
        let copied = slots.take_copied();
        drop(slots);
        for CopiedPages { copy, .. } in &copied {
            // A copy that cannot be ordered before `stream` is waited for. A failed device copies nothing.
            if copy.make_stream_wait_for_all(stream).is_err() {
                let _ = copy.wait();
            }
        }
        if let Err(failure) = self.lock().poison_copied(&copied, stream) {
            self.notify(Notice::NotPoisoned(&failure));
        }
    }

    /// Returns the slots that the registered [`Reclaim`]s could free, by their own estimates. Stops counting
    /// when the shortage is covered.
    fn obtainable(&self, short: Shortfall, stream: Stream) -> Obtainable {
        let mut all = Obtainable::default();
        for reclaim in self.reclaims() {
            if all.at_once < short.slots {
                let more = reclaim.obtainable(stream);
                all.at_once += more.at_once;
                all.behind_fences += more.behind_fences;
            }
        }
        all
    }

    /// Returns the registered [`Reclaim`]s.
    fn reclaims(&self) -> Vec<Arc<dyn Reclaim>> {
        let mut registered = self.reclaim.lock();
        registered.retain(|reclaim| reclaim.strong_count() > 0);
        registered.iter().filter_map(Weak::upgrade).collect()
    }

    /// Calls the registered [`Reclaim`]s until they have freed enough slots; returns how many they have.
    fn reclaim(&self, slots: usize, stream: Stream) -> Result<usize> {
        let mut freed = 0;
        for reclaim in self.reclaims() {
            if freed < slots {
                freed += reclaim.reclaim(slots - freed, stream)?;
            }
        }
        Ok(freed)
    }

    /// Returns the pages that the registered [`Reclaim`]s hold and cannot free now.
    pub(in crate::pool) fn locked_pages(&self) -> HashSet<Page> {
        self.reclaims().iter().flat_map(|reclaim| reclaim.locked()).collect()
    }
}
