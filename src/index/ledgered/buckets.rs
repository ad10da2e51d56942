//! [`Buckets`] with a ledger.

use super::Ledgered;
use crate::base::BufferId;
use crate::index::ledger::{IndexState, Span, spans};
use crate::index::{Bucket, Buckets, Reuse, Ticket};

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
        self.record_taken(reused.ticket);
        Some(reused)
    }

    /// Calls [`Buckets::add`] and records it.
    pub fn add(&mut self, bucket: Bucket, lane: L) -> Ticket<BufferId> {
        let ticket = self.inner.add(bucket, lane);
        self.record_taken(ticket);
        ticket
    }

    fn record_taken(&mut self, ticket: Ticket<BufferId>) {
        self.ledger.record_take(ticket.range());
    }

    /// Calls [`Buckets::give_back`] and records it.
    pub fn give_back(&mut self, ticket: Ticket<BufferId>) -> bool {
        let is_given_back = self.inner.give_back(ticket);
        if is_given_back {
            self.ledger.record_release(ticket.range());
        }
        is_given_back
    }

    /// Calls [`Buckets::give_back_as`] and records it.
    pub fn give_back_as(&mut self, ticket: Ticket<BufferId>, lane: L) {
        if self.inner.is_live(ticket) {
            self.inner.give_back_as(ticket, lane);
            self.ledger.record_release(ticket.range());
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
