//! An estimate of what least-recently-used eviction would have found, and what that saves.
//!
//! Such a cache holds exactly the most recently used tokens, up to its capacity. So it is enough to know how
//! many tokens were used last at which time, and from which time on they fill the capacity.
//!
//! A tree keeps the beginnings of prompts longest. So of the tokens that were used at the oldest time, those
//! at the beginning of a prompt are held.
//!
//! *Cost.* A binary search among a few hundred spans for each call.

use std::collections::VecDeque;

use super::lifetimes::real;
use crate::cache::policy::Tick;

/// The number of spans into which the capacity is divided.
const SPANS: usize = 256;

/// What a cache may save less than least-recently-used eviction does, before it goes by recency itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Margin {
    /// As a share of what it saves. If it is negative, the cache must save more.
    of_own: f64,
    /// What is added to that, as a share of what the tokens of the capacity save: so much is lost by chance when little
    /// was looked up yet.
    of_capacity: f64,
    /// The share of the whole that a cache which goes by recency may still have lost when it tries another order again.
    /// Each change of the order costs something: what is kept for the one is evicted first by the other.
    to_try_again: f64,
}

impl Margin {
    /// That of a cache that tries another order.
    pub(super) const OF_TRIAL: Self = Self { of_own: 0.02, of_capacity: 1.0 / 16.0, to_try_again: 0.5 };

    /// The same if it counts seconds. A few long prompts make most of these, so that there is more chance in them.
    pub(super) const OF_SECONDS: Self = Self { of_capacity: 0.5, ..Self::OF_TRIAL };

    /// That of a cache and the tier below it, which find about as much by recency if they do not find more than recency
    /// in a tier alone.
    pub(super) const BELOW: Self = Self { of_own: -0.02, of_capacity: 0.0, to_try_again: 1.0 };
}

/// The counts of found tokens halve each time that this many times the capacity was looked up.
const HALF_LIFE: f64 = 256.0;

/// The tokens that were used last from a time on, until the next span begins.
#[derive(Clone, Copy, Debug)]
struct Span {
    from: Tick,
    tokens: u64,
}

/// Tokens that are used again, and what that saves or would have saved, in a unit of the caller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Again {
    pub(super) tokens: u32,
    pub(super) saved: f64,
}

impl Again {
    /// Tokens each of which saves 1.
    pub(super) fn of_tokens(tokens: u32) -> Self {
        Self { tokens, saved: f64::from(tokens) }
    }
}

/// The estimate.
#[derive(Debug)]
pub(super) struct Recency {
    /// The tokens that such a cache would hold: as many as the cache kept when it was short of memory.
    capacity: u64,
    /// The time at which that was recorded.
    short: Option<Tick>,
    margin: Margin,
    is_matched: bool,
    /// The spans of the tokens that such a cache would hold, oldest first.
    spans: VecDeque<Span>,
    tokens_held: u64,
    /// The time of the last call, and by how much `tokens_held` has grown since that time began.
    now: Tick,
    fresh: u64,
    /// What the cache and least-recently-used eviction have saved, and the tokens found by the latter, which decay.
    own: f64,
    recent: f64,
    recent_tokens: f64,
    decayed: Tick,
}

impl Recency {
    pub(super) fn new(capacity: u64, margin: Margin) -> Self {
        Self {
            capacity,
            short: None,
            margin,
            is_matched: true,
            spans: VecDeque::new(),
            tokens_held: 0,
            now: Tick::default(),
            fresh: 0,
            own: 0.0,
            recent: 0.0,
            recent_tokens: 0.0,
            decayed: Tick::default(),
        }
    }

    /// Returns whether the cache saves as much as least-recently-used eviction, apart from the margin.
    pub(super) fn is_matched(&mut self) -> bool {
        let Margin { of_own, of_capacity, to_try_again } = self.margin;
        let share = if self.is_matched { 1.0 } else { to_try_again };
        let of_token = self.recent / self.recent_tokens.max(1.0);
        let may_lose = share * (of_own * self.own + of_capacity * real(self.capacity) * of_token);
        self.is_matched = self.recent - self.own <= may_lose;
        self.is_matched
    }

    /// Records that the cache is short of memory and keeps `tokens` tokens: as many are left to least-recently-used
    /// eviction.
    pub(super) fn record_shortage(&mut self, tokens: u64, now: Tick) {
        // Later, the pages of this request are missing that have been evicted for it, but not published yet.
        if self.short.replace(now) != Some(now) {
            self.capacity = tokens.max(1);
        }
    }

    /// Lets the counts of found tokens decay.
    pub(super) fn decay(&mut self, now: Tick) {
        let halves = real(now.since(self.decayed)) / (HALF_LIFE * real(self.capacity));
        self.decayed = now;
        self.own *= (-halves).exp2();
        self.recent *= (-halves).exp2();
        self.recent_tokens *= (-halves).exp2();
    }

    /// Records that tokens were found whose last use was at `used`.
    pub(super) fn record_found(&mut self, used: Tick, found: Again, now: Tick) {
        self.own += found.saved;
        self.record_missed(used, found, now);
    }

    /// Records that tokens were found in the tier below which have counted as not found.
    pub(super) fn record_loaded(&mut self, tokens: u64) {
        self.own += real(tokens);
    }

    /// Records that tokens were not found whose last use was at `used`.
    pub(super) fn record_missed(&mut self, used: Tick, missed: Again, now: Tick) {
        self.remove_displaced(now);
        let Again { tokens, saved } = missed;
        let mut unmatched = u64::from(tokens);
        let over = (self.tokens_held - self.fresh).saturating_sub(self.capacity);
        let mut at = self.spans.partition_point(|span| span.from <= used);
        // The times of remembered blocks are coarse: tokens that are not in one span are in the span before
        // it.
        while unmatched > 0 && at > 0 {
            at -= 1;
            let over = if at == 0 { over.min(self.spans[0].tokens) } else { 0 };
            let span = &mut self.spans[at];
            let removed = span.tokens.min(unmatched);
            // The beginnings in the oldest span are held; they are also looked up first.
            let held = real(removed.min(span.tokens - over));
            self.recent_tokens += held;
            self.recent += held * saved / f64::from(tokens);
            span.tokens -= removed;
            unmatched -= removed;
        }
        self.tokens_held += unmatched;
        self.fresh += unmatched;
        self.append(tokens, now);
    }

    /// Records that tokens are new.
    pub(super) fn add(&mut self, tokens: u32, now: Tick) {
        self.remove_displaced(now);
        self.tokens_held += u64::from(tokens);
        self.fresh += u64::from(tokens);
        self.append(tokens, now);
    }

    /// Removes the tokens that a new request displaces. All tokens of a request are looked up before that.
    fn remove_displaced(&mut self, now: Tick) {
        if now == self.now {
            return;
        }
        self.now = now;
        self.fresh = 0;
        while let Some(oldest) =
            self.spans.front().filter(|oldest| self.tokens_held >= self.capacity + oldest.tokens)
        {
            self.tokens_held -= oldest.tokens;
            self.spans.pop_front();
        }
    }

    fn append(&mut self, tokens: u32, now: Tick) {
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
    }

    /// Joins spans most of whose tokens were used again.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache of single tokens, the most recently used one last.
    #[test]
    fn finds_as_much_as_recency() {
        let mut used = [None; 40];
        let mut recent: Vec<usize> = Vec::new();
        let (mut ledger, mut found, mut state) = (Recency::new(16, Margin::OF_TRIAL), 0_u32, 1_usize);
        for now in (1..4000).map(Tick::new) {
            state = (state * 1_103_515_245 + 12345) % (1 << 31);
            let token = (state >> 16) % 40 * ((state >> 8) % 40) / 40;
            match used[token].replace(now) {
                Some(before) => ledger.record_missed(before, Again::of_tokens(1), now),
                None => ledger.add(1, now),
            }
            found += u32::from(recent.contains(&token));
            recent.retain(|&other| other != token);
            recent.push(token);
            if recent.len() > 16 {
                recent.remove(0);
            }
        }
        assert!((ledger.recent - f64::from(found)).abs() < 1.0, "{} of {found}", ledger.recent);
    }

    #[test]
    fn a_cache_may_lose_a_little_and_then_catches_up() {
        for of_token in [1.0, 20e-6] {
            let mut ledger = Recency::new(1600, Margin::OF_TRIAL);
            ledger.add(6000, Tick::new(1));
            let mut use_again = |found: u32, missed: u32| {
                let [found, missed] =
                    [found, missed].map(|tokens| Again { tokens, saved: of_token * f64::from(tokens) });
                ledger.record_found(Tick::new(1), found, Tick::new(1));
                ledger.record_missed(Tick::new(1), missed, Tick::new(1));
                ledger.is_matched()
            };
            // A sixteenth of the capacity is 100 tokens.
            assert!(use_again(0, 99));
            assert!(!use_again(0, 2));
            assert!(!use_again(98, 0), "101 of the 101.96 that it may lose, but it goes by recency now");
            // Half of 2 % of these and of a sixteenth of the capacity.
            assert!(!use_again(4_990, 0));
            assert!(use_again(20, 0));
            assert!(use_again(0, 99));
            assert!(!use_again(0, 4));
        }
    }

    #[test]
    fn tokens_far_behind_count_more() {
        let mut ledger = Recency::new(1600, Margin::OF_SECONDS);
        ledger.add(2000, Tick::new(1));
        ledger.record_missed(Tick::new(1), Again { tokens: 1000, saved: 0.02 }, Tick::new(1));
        assert!(!ledger.is_matched());
        ledger.record_found(Tick::default(), Again { tokens: 64, saved: 0.018 }, Tick::new(1));
        assert!(ledger.is_matched());
    }
}
