//! [`Buckets`] with a ledger.

use super::Ledgered;
use crate::base::BufferId;
use crate::index::ledger::{IndexState, Span, spans};
use crate::index::{Bucket, Buckets, IndexHandle, Reuse};

impl<L: Copy + PartialEq> Ledgered<Buckets<L>> {
    /// Returns every buffer with its state, its holders and its size in bytes, one span each.
    #[must_use]
    pub fn spans(&self) -> Vec<(Span, usize)> {
        let span_of = |(index, is_live, bytes): (u32, bool, usize)| {
            let state = if is_live { IndexState::Live } else { IndexState::Free };
            spans(index..index + 1, self.ledger.get(), |_| state).into_iter().map(move |span| (span, bytes))
        };
        self.inner.buffers().flat_map(span_of).collect()
    }

    /// Calls [`Buckets::set_marks`].
    pub const fn set_marks(&mut self, marks: [usize; 2]) {
        self.inner.set_marks(marks);
    }

    /// Calls [`Buckets::take`] and records it.
    pub fn take(&mut self, bucket: Bucket, lane: L) -> Option<Reuse<L>> {
        let reused = self.inner.take(bucket, lane)?;
        self.record_taken(reused.handle);
        Some(reused)
    }

    /// Calls [`Buckets::add`] and records it.
    pub fn add(&mut self, bucket: Bucket, lane: L) -> IndexHandle<BufferId> {
        let handle = self.inner.add(bucket, lane);
        self.record_taken(handle);
        handle
    }

    fn record_taken(&mut self, handle: IndexHandle<BufferId>) {
        self.ledger.record_take(handle.range());
    }

    /// Calls [`Buckets::give_back`] and records it.
    pub fn give_back(&mut self, handle: IndexHandle<BufferId>) -> bool {
        let is_given_back = self.inner.give_back(handle);
        if is_given_back {
            self.ledger.record_release(handle.range());
        }
        is_given_back
    }

    /// Calls [`Buckets::give_back_as`] and records it.
    pub fn give_back_as(&mut self, handle: IndexHandle<BufferId>, lane: L) {
        if self.inner.is_live(handle) {
            self.inner.give_back_as(handle, lane);
            self.ledger.record_release(handle.range());
        }
    }

    /// Calls [`Buckets::reset`] and records it.
    pub fn reset(&mut self) {
        if let Some(ledger) = self.ledger.get_mut() {
            let live = self.inner.buffers().filter(|(_, is_live, _)| *is_live);
            live.for_each(|(index, ..)| ledger.record_release(index..index + 1));
        }
        self.inner.reset();
    }

    /// Calls [`Buckets::drain_free`] and records it.
    pub fn drain_free(&mut self) -> Vec<BufferId> {
        self.inner.drain_free()
    }
}
