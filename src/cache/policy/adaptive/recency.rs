//! What eviction by recency would have found.
//!
//! Such a cache holds exactly the tokens used most recently, up to the capacity. So it is enough to know how
//! many tokens were used last at which time, and from which time on they fill the capacity.
//!
//! *Cost.* A binary search among a few hundred spans for each call.

use std::collections::VecDeque;

use crate::cache::policy::Tick;

/// The capacity is divided into so many spans.
const SPANS: usize = 256;

/// The tokens used last from a time on, until the next span begins.
#[derive(Clone, Copy, Debug)]
struct Span {
    from: Tick,
    tokens: u64,
}

/// The ledger.
#[derive(Debug)]
pub(super) struct Recency {
    capacity: u64,
    /// What recency would hold, oldest first.
    spans: VecDeque<Span>,
    held: u64,
    /// Tokens found by the cache and by recency, fading.
    own: f64,
    recent: f64,
}

impl Recency {
    pub(super) fn new(capacity: u64) -> Self {
        Self { capacity, spans: VecDeque::new(), held: 0, own: 0.0, recent: 0.0 }
    }

    /// Whether recency finds no more than the cache does.
    pub(super) fn trails(&self) -> bool {
        self.recent <= self.own * 1.005
    }

    /// Tokens used last at `used` were found.
    pub(super) fn found(&mut self, used: Tick, tokens: u32, now: Tick) {
        self.own += f64::from(tokens);
        self.missed(used, tokens, now);
    }

    /// Tokens used last at `used` were not found.
    pub(super) fn missed(&mut self, used: Tick, tokens: u32, now: Tick) {
        let after = self.spans.partition_point(|span| span.from <= used);
        if let Some(span) = after.checked_sub(1).and_then(|at| self.spans.get_mut(at)) {
            self.recent += f64::from(tokens);
            // What is partly remembered is counted more coarsely than what is cached.
            let gone = span.tokens.min(u64::from(tokens));
            span.tokens -= gone;
            self.held -= gone;
        }
        self.add(tokens, now);
    }

    /// Tokens are new.
    pub(super) fn add(&mut self, tokens: u32, now: Tick) {
        let width = self.capacity / (SPANS as u64);
        match self.spans.back_mut() {
            Some(span) if span.from == now || span.tokens < width => span.tokens += u64::from(tokens),
            _ => {
                if self.spans.len() == 4 * SPANS {
                    self.merge(width);
                }
                self.spans.push_back(Span { from: now, tokens: u64::from(tokens) });
            }
        }
        self.held += u64::from(tokens);
        while self.held > self.capacity && self.spans.len() > 1 {
            self.held -= self.spans.pop_front().map_or(0, |span| span.tokens);
        }
    }

    /// Joins spans that were mostly used again since.
    fn merge(&mut self, width: u64) {
        let mut merged: VecDeque<Span> = VecDeque::with_capacity(self.spans.len());
        for &span in &self.spans {
            match merged.back_mut() {
                Some(last) if last.tokens + span.tokens <= width.max(1) => last.tokens += span.tokens,
                _ => merged.push_back(span),
            }
        }
        self.spans = merged;
    }
}
