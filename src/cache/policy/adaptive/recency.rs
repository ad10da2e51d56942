//! An estimate of what least-recently-used eviction would have found, and what that saves.
//!
//! Such a cache holds exactly the most recently used tokens, up to its capacity. So it is enough to know how
//! many tokens were used last at which time, and from which time on they fill the capacity.
//!
//! A tree keeps the beginnings of prompts longest. So of the tokens that were used at the oldest time, those
//! at the beginning of a prompt are held.
//!
//! Of the tokens that it would hold, some were evicted early by the cache, which goes by another order. They are counted
//! in the same spans, with what is lost if they come back.
//!
//! *Cost.* A binary search among a few hundred spans for each call.

use std::collections::VecDeque;

use super::leeway::{Again, Leeway};
use super::lifetimes::real;
use crate::cache::policy::Tick;

/// The number of spans into which the capacity is divided.
const SPANS: usize = 256;

/// The counts of found tokens halve each time that this many times the capacity was looked up.
const HALF_LIFE: f64 = 256.0;

/// The tokens that were used last from a time on, until the next span begins.
#[derive(Clone, Copy, Debug)]
struct Span {
    from: Tick,
    tokens: u64,
    /// Those of them that the cache has evicted, and what they would save.
    early: u64,
    at_stake: f64,
}

/// The span of the tokens that were evicted last, and its times.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    span: usize,
    from: Tick,
    until: Tick,
}

/// The estimate.
#[derive(Debug)]
pub(super) struct Recency {
    /// The tokens that such a cache would hold: as many as the cache kept when it was short of memory.
    capacity: u64,
    /// The time at which that was recorded.
    short: Option<Tick>,
    leeway: Leeway,
    /// What early tokens may save, until something is looked up again or the time passes.
    allowed: Option<f64>,
    /// The spans of the tokens that such a cache would hold when this time began, oldest first.
    spans: VecDeque<Span>,
    tokens_held: u64,
    last_evicted: Last,
    /// What all early tokens would save.
    at_stake: f64,
    /// The time of the last call, and by how much `tokens_held` has grown since that time began.
    now: Tick,
    fresh: u64,
    /// What the cache and least-recently-used eviction have saved, which decays.
    own: f64,
    recent: f64,
    decayed: Tick,
}

impl Recency {
    pub(super) fn new(capacity: u64, leeway: Leeway) -> Self {
        Self {
            capacity,
            short: None,
            leeway,
            allowed: None,
            spans: VecDeque::new(),
            tokens_held: 0,
            last_evicted: Last::default(),
            at_stake: 0.0,
            now: Tick::default(),
            fresh: 0,
            own: 0.0,
            recent: 0.0,
            decayed: Tick::default(),
        }
    }

    /// Returns what may still be evicted early, by what it saves. At or below 0, only what was used
    /// [before](Self::held_from) may be evicted.
    pub(super) fn room(&mut self) -> f64 {
        let Self { allowed, leeway, own, recent, capacity, .. } = self;
        let allowed = *allowed.get_or_insert_with(|| leeway.get(*own, *recent, *capacity));
        allowed - self.early_at_stake()
    }

    /// Returns whether the cache has lost what it may lose in the mean.
    pub(super) fn has_lost_too_much(&self) -> bool {
        self.leeway.has_lost_too_much(self.own, self.recent, self.capacity)
    }

    /// Returns what the early tokens would save.
    ///
    /// Least-recently-used eviction needs no room for the present request yet: it may have all of it. So what is evicted
    /// for that counts as early at first, even if it is the oldest.
    fn early_at_stake(&self) -> f64 {
        let displaced = self.displaced();
        match self.spans.front() {
            // The ends of prompts are evicted first, by the cache as well.
            Some(span) if displaced > 0 && span.early > 0 => {
                self.at_stake - span.at_stake * real(displaced.min(span.early)) / real(span.early)
            }
            _ => self.at_stake,
        }
    }

    /// Returns the time from which least-recently-used eviction has all that was used.
    pub(super) fn held_from(&self) -> Tick {
        let oldest = usize::from(self.displaced() > 0);
        self.spans.get(oldest).map_or(Tick::new(u64::MAX), |span| span.from)
    }

    /// Returns how many tokens of the oldest span such a cache has evicted.
    fn displaced(&self) -> u64 {
        let over = (self.tokens_held - self.fresh).saturating_sub(self.capacity);
        self.spans.front().map_or(0, |oldest| over.min(oldest.tokens))
    }

    /// Records that the cache evicts tokens whose last use was at `used`.
    pub(super) fn record_evicted(&mut self, used: Tick, evicted: Again, now: Tick) {
        self.remove_displaced(now);
        let Some(at) = self.span_of_evicted(used) else { return };
        let span = &mut self.spans[at];
        let (tokens, left) = (u64::from(evicted.tokens), span.tokens - span.early);
        let (early, at_stake) = if tokens <= left {
            (tokens, evicted.saved)
        } else {
            (left, evicted.saved * real(left) / real(tokens))
        };
        span.early += early;
        span.at_stake += at_stake;
        self.at_stake += at_stake;
    }

    /// Records that the cache is short of memory and keeps `tokens` tokens: as many are left to least-recently-used
    /// eviction.
    pub(super) fn record_shortage(&mut self, tokens: u64, now: Tick) {
        self.remove_displaced(now);
        // Later, the pages of this request are missing that have been evicted for it, but not published yet.
        if self.short.replace(now) != Some(now) {
            self.capacity = tokens.max(1);
            self.allowed = None;
        }
    }

    /// Returns the span of tokens that are evicted. Mostly, those before were of the same one.
    fn span_of_evicted(&mut self, used: Tick) -> Option<usize> {
        let Last { span, from, until } = self.last_evicted;
        if from <= used && used < until {
            return Some(span);
        }
        let at = self.spans.partition_point(|span| span.from <= used).checked_sub(1)?;
        let until = self.spans.get(at + 1).map_or(self.now, |next| next.from);
        self.last_evicted = Last { span: at, from: self.spans[at].from, until };
        Some(at)
    }

    /// Begins another look-up: those of a prompt that is published in parts belong together.
    pub(super) fn begin_look_up(&mut self) {
        self.leeway.end_look_up();
    }

    /// Lets the counts of found tokens decay.
    pub(super) fn decay(&mut self, now: Tick) {
        let halves = real(now.since(self.decayed)) / (HALF_LIFE * real(self.capacity));
        self.decayed = now;
        let decay = (-halves).exp2();
        self.own *= decay;
        self.recent *= decay;
        self.leeway.decay(decay);
        self.allowed = None;
    }

    /// Records that tokens were found whose last use was at `used`.
    pub(super) fn record_found(&mut self, used: Tick, found: Again, now: Tick) {
        self.own += found.saved;
        self.record_again(used, found, now, |span, _| span.early.saturating_sub(span.tokens));
    }

    /// Records that tokens were not found whose last use was at `used`.
    pub(super) fn record_missed(&mut self, used: Tick, missed: Again, now: Tick) {
        let lost = self.record_again(used, missed, now, |span, removed| removed.min(span.early));
        self.leeway.record_came_back(lost);
    }

    /// Moves tokens to the present. `back` is how many of the early tokens of a span, of which so many tokens were just
    /// removed, are not early any more. Returns what these would have saved.
    fn record_again(&mut self, used: Tick, again: Again, now: Tick, back: impl Fn(&Span, u64) -> u64) -> f64 {
        let Again { tokens, saved } = again;
        if tokens == 0 {
            return 0.0;
        }
        self.remove_displaced(now);
        let (mut unmatched, mut held, mut lost) = (u64::from(tokens), 0.0, 0.0);
        let displaced = self.displaced();
        let mut at = self.spans.partition_point(|span| span.from <= used);
        // The times of remembered blocks are coarse: tokens that are not in one span are in the span before
        // it.
        while unmatched > 0 && at > 0 {
            at -= 1;
            let span = &mut self.spans[at];
            let removed = span.tokens.min(unmatched);
            // The beginnings in the oldest span are held; they are also looked up first.
            held += real(removed.min(span.tokens - if at == 0 { displaced } else { 0 }));
            span.tokens -= removed;
            unmatched -= removed;
            let back = back(span, removed);
            let was_at_stake = if back > 0 { span.at_stake * real(back) / real(span.early) } else { 0.0 };
            span.early -= back;
            span.at_stake -= was_at_stake;
            self.at_stake -= was_at_stake;
            lost += was_at_stake;
        }
        self.tokens_held += unmatched;
        self.fresh += unmatched;
        self.append(tokens, now);
        self.recent += held * saved / f64::from(tokens);
        self.leeway.record_again(again, held);
        self.allowed = None;
        lost
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
        (self.allowed, self.last_evicted) = (None, Last::default());
        while let Some(oldest) =
            self.spans.front().filter(|oldest| self.tokens_held >= self.capacity + oldest.tokens)
        {
            self.tokens_held -= oldest.tokens;
            self.at_stake -= oldest.at_stake;
            self.leeway.record_ended(oldest.at_stake);
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
                self.spans.push_back(Span { from: now, tokens: u64::from(tokens), early: 0, at_stake: 0.0 });
            }
        }
    }

    /// Joins spans most of whose tokens were used again.
    fn merge(&mut self, width: u64) {
        let mut merged: VecDeque<Span> = VecDeque::with_capacity(self.spans.len());
        for &span in &self.spans {
            match merged.back_mut() {
                Some(last) if last.tokens + span.tokens <= width.max(1) => {
                    last.tokens += span.tokens;
                    last.early += span.early;
                    last.at_stake += span.at_stake;
                }
                _ => merged.push_back(span),
            }
        }
        self.spans = merged;
        self.last_evicted = Last::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sequence of a linear congruential generator.
    fn numbers(mut state: usize) -> impl FnMut() -> usize {
        move || {
            state = (state * 1_103_515_245 + 12345) % (1 << 31);
            state >> 8
        }
    }

    /// A cache of single tokens that evicts any of them, beside one by recency, the most recently used token last.
    #[test]
    fn early_tokens_are_those_that_recency_has_and_the_cache_has_not() {
        let mut next = numbers(1);
        let (mut used, mut recent, mut own) = ([None; 40], Vec::new(), Vec::new());
        let (mut ledger, mut found) = (Recency::new(16, Leeway::of_tokens()), [0_u32; 2]);
        let mut early_ones = 0;
        for now in (1..4000).map(Tick::new) {
            let token = next() / 256 % 40 * (next() % 40) / 40;
            let again = Again::of_tokens(1);
            let has = own.contains(&token);
            if let Some(before) = used[token].filter(|_| has) {
                ledger.record_found(before, again, now);
            } else if own.len() == 16 {
                ledger.record_shortage(16, now);
                let early = recent.iter().filter(|&other| !own.contains(other)).count();
                assert!((ledger.early_at_stake() - real(early as u64)).abs() < 1e-9, "{early} at {now:?}");
                early_ones += early;
                let victim = own.swap_remove(next() % 16);
                ledger.record_evicted(used[victim].expect("it was used"), again, now);
            }
            if !has {
                own.push(token);
                match used[token] {
                    Some(before) => ledger.record_missed(before, again, now),
                    None => ledger.add(1, now),
                }
            }
            used[token] = Some(now);
            found[0] += u32::from(has);
            found[1] += u32::from(recent.contains(&token));
            let room = ledger.room();
            ledger.allowed = None;
            assert!((ledger.room() - room).abs() < 1e-9, "{room} at {now:?}");
            recent.retain(|&other| other != token);
            recent.push(token);
            if recent.len() > 16 {
                recent.remove(0);
            }
        }
        assert!(early_ones > 4000, "{early_ones}");
        assert!((ledger.own - f64::from(found[0])).abs() < 1.0, "{} of {found:?}", ledger.own);
        assert!((ledger.recent - f64::from(found[1])).abs() < 1.0, "{} of {found:?}", ledger.recent);
    }

    #[test]
    fn what_is_evicted_early_ends_when_recency_evicts_it() {
        let mut ledger = Recency::new(1024, Leeway::of_tokens());
        for time in 1..=4 {
            ledger.add(256, Tick::new(time));
        }
        ledger.record_shortage(1024, Tick::new(5));
        assert_eq!(ledger.held_from(), Tick::new(1));
        // The request may be for what is evicted now, and recency has everything.
        ledger.record_evicted(Tick::new(3), Again::of_tokens(128), Tick::new(5));
        ledger.record_evicted(Tick::new(1), Again::of_tokens(128), Tick::new(5));
        assert_eq!((ledger.early_at_stake(), ledger.held_from()), (256.0, Tick::new(1)));
        ledger.add(128, Tick::new(5));
        // It was not: recency has made room by the same 128 tokens.
        ledger.record_shortage(1024, Tick::new(6));
        assert_eq!((ledger.early_at_stake(), ledger.held_from()), (128.0, Tick::new(2)));
        // Half of what was evicted early comes back; the rest ends with the others of its time.
        ledger.record_missed(Tick::new(3), Again::of_tokens(64), Tick::new(6));
        assert_eq!((ledger.early_at_stake(), ledger.recent), (64.0, 64.0));
        for time in 7..=9 {
            ledger.add(256, Tick::new(time));
        }
        assert!(ledger.early_at_stake() < 1e-9);
        ledger.record_shortage(1024, Tick::new(10));
        let [came_back, ended] = ledger.leeway.of_early();
        assert!((came_back - 64.0).abs() < 1e-9 && (ended - 256.0).abs() < 1e-9, "{came_back} of {ended}");
    }

    #[test]
    fn no_tokens_save_nothing() {
        let mut ledger = Recency::new(16, Leeway::of_tokens());
        ledger.add(16, Tick::new(1));
        ledger.record_found(Tick::new(1), Again::of_tokens(0), Tick::new(2));
        assert_eq!((ledger.own, ledger.recent, ledger.room()), (0.0, 0.0, 0.0));
    }

    #[test]
    fn what_was_saved_may_be_at_stake() {
        for of_token in [1.0, 20e-6] {
            let saved = |tokens: u32| Again { tokens, saved: of_token * f64::from(tokens) };
            let mut ledger = Recency::new(1600, Leeway::of_tokens());
            ledger.add(1600, Tick::new(1));
            assert!(ledger.room() <= 0.0);
            ledger.record_found(Tick::new(1), saved(1000), Tick::new(2));
            // 2.5 % of a look-up of 1,000 tokens.
            assert!((ledger.room() / of_token - 25.0).abs() < 1e-6, "{}", ledger.room());
            ledger.record_shortage(1600, Tick::new(3));
            ledger.record_evicted(Tick::new(2), saved(20), Tick::new(3));
            assert!((ledger.room() / of_token - 5.0).abs() < 1e-6, "{}", ledger.room());
            ledger.record_missed(Tick::new(2), saved(20), Tick::new(4));
            assert!((ledger.room() / of_token - 5.5).abs() < 1e-6, "{}", ledger.room());
        }
    }
}
