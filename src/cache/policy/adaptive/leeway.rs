//! How much a cache may evict early: tokens that least-recently-used eviction would hold at the same time.
//!
//! *Early* tokens are all that can go wrong. Whatever least-recently-used eviction finds and the cache does not was
//! evicted early, and once it is looked up it is in the cache again. So the cache loses at most what its early tokens
//! would save, however requests go on. As long as that is no more than what it has saved already beyond `1 - LOSS` of
//! what such eviction would have saved, it never falls below that share. The first leeway comes from the share `LOSS`
//! itself; what is found because of it adds to the leeway.
//!
//! That is strict, and too slow for a large cache, where few of the early tokens ever come back. So what is left when
//! [`SPARE`] usual look-ups are lost counts by the share of early tokens that came back so far. This bounds what is lost
//! in the mean, not in each case. To begin with, [`ADVANCE`] is added, which may be lost in all besides `LOSS`.

use super::lifetimes::real;

/// The share of what least-recently-used eviction would save that a cache may lose.
const LOSS: f64 = 0.025;

/// The share of what is looked up again below which least-recently-used eviction finds so little that there is nothing to
/// lose: a cache may lose as much. Else it would never begin to find what such eviction never finds, as in a loop.
const LITTLE: f64 = 1.0 / 64.0;

/// What a cache may lose in the mean beyond what it has saved, as a share of what the tokens of its capacity save.
const ADVANCE: f64 = 1.0 / 16.0;

/// The number of usual look-ups that may be lost before what is left counts by the share of early tokens that came back.
const SPARE: f64 = 4.0;

/// The least share of early tokens that are expected to come back.
const LEAST_SHARE: f64 = 0.05;

/// The weight of what is expected at first, as a share of what the tokens of the capacity save: all early tokens come back,
/// and look-ups that find something find all that was looked up before.
const PRIOR: f64 = 1.0;

/// Tokens that are used again, and what that saves or would have saved, in a unit of the caller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Again {
    pub(super) tokens: u32,
    pub(super) saved: f64,
}

impl Again {
    /// Tokens each of which saves 1.
    #[cfg(test)]
    pub(super) fn of_tokens(tokens: u32) -> Self {
        Self { tokens, saved: f64::from(tokens) }
    }
}

/// What has become of early tokens, and what look-ups usually find. All decay.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Leeway {
    /// What may be lost at once, as a share of what the tokens of the capacity save.
    of_capacity: f64,
    /// What early tokens would have saved: those looked up while least-recently-used eviction held them, and those
    /// and all that it has evicted since.
    came_back: f64,
    ended: f64,
    /// The tokens that were looked up again, and what they may save.
    tokens: f64,
    again: Usual,
    /// What they would have saved by least-recently-used eviction.
    recent: Usual,
}

/// What a look-up usually saves: the mean, weighted by that itself.
#[derive(Clone, Copy, Debug, Default)]
struct Usual {
    sum: f64,
    squares: f64,
    /// The part of the sum that is of the present look-up.
    present: f64,
}

impl Usual {
    fn add(&mut self, saved: f64) {
        self.sum += saved;
        self.present += saved;
    }

    fn end_look_up(&mut self) {
        let saved = std::mem::take(&mut self.present);
        self.squares += saved * saved;
    }

    /// Returns the mean, where `prior` of the sum are expected to be of look-ups like those of `like`.
    fn get(&self, prior: f64, like: &Self) -> f64 {
        (self.all_squares() + prior * like.all_squares() / like.sum) / (self.sum + prior)
    }

    fn all_squares(&self) -> f64 {
        self.squares + self.present * self.present
    }

    fn decay(&mut self, decay: f64) {
        // The present look-up loses a little, too.
        for sum in [&mut self.sum, &mut self.squares, &mut self.present] {
            *sum *= decay;
        }
    }
}

impl Leeway {
    /// That of a cache which counts tokens.
    pub(super) fn of_tokens() -> Self {
        Self::default()
    }

    /// That of a cache which counts seconds. A few long prompts make most of these, so that much that it gains is
    /// gained by chance, and what it dares not do is not gained.
    pub(super) fn of_seconds() -> Self {
        Self { of_capacity: 0.5, ..Self::default() }
    }

    /// Returns what early tokens may save, of a cache of `capacity` tokens that has saved `own`, where least-recently-used
    /// eviction would have saved `recent`.
    pub(super) fn get(&self, own: f64, recent: f64, capacity: u64) -> f64 {
        if self.tokens <= 0.0 {
            return 0.0;
        }
        let capacity = self.saved_by(capacity);
        let strict = self.strict(own, recent, capacity);
        strict.max(self.in_the_mean(strict, capacity))
    }

    /// Returns whether such a cache has lost more than it may lose in the mean, whatever is early now.
    pub(super) fn has_lost_too_much(&self, own: f64, recent: f64, capacity: u64) -> bool {
        if self.tokens <= 0.0 {
            return false;
        }
        let capacity = self.saved_by(capacity);
        self.strict(own, recent, capacity) + ADVANCE * capacity < 0.0
    }

    /// Returns what `tokens` tokens save.
    fn saved_by(&self, tokens: u64) -> f64 {
        real(tokens) * self.again.sum / self.tokens
    }

    /// Returns what early tokens may save, all of which may be lost, where the tokens of the capacity save `capacity`.
    fn strict(&self, own: f64, recent: f64, capacity: f64) -> f64 {
        let little = (LITTLE * self.again.sum - self.recent.sum).max(0.0);
        own - (1.0 - LOSS) * recent + little + self.of_capacity * capacity
    }

    /// Returns what early tokens may save so that no more than `strict` is lost in the mean, and a bit to begin with.
    fn in_the_mean(&self, strict: f64, capacity: f64) -> f64 {
        let prior = PRIOR * capacity;
        let usual = self.recent.get(prior, &self.again);
        let share = (prior + self.came_back) / (prior + self.ended);
        (strict + ADVANCE * capacity - SPARE * usual) / share.max(LEAST_SHARE)
    }

    /// Records that tokens are looked up again, `held` of which least-recently-used eviction has.
    pub(super) fn record_again(&mut self, again: Again, held: f64) {
        self.tokens += f64::from(again.tokens);
        self.again.add(again.saved);
        self.recent.add(again.saved * held / f64::from(again.tokens));
    }

    /// Ends the present look-up.
    pub(super) fn end_look_up(&mut self) {
        self.again.end_look_up();
        self.recent.end_look_up();
    }

    /// Records that early tokens were looked up.
    pub(super) fn record_came_back(&mut self, saved: f64) {
        self.came_back += saved;
        self.ended += saved;
    }

    /// Records that early tokens would not be held any longer by least-recently-used eviction either.
    pub(super) fn record_ended(&mut self, saved: f64) {
        self.ended += saved;
    }

    /// Returns what early tokens that came back, and all that are early no more, would have saved.
    #[cfg(test)]
    pub(super) const fn of_early(&self) -> [f64; 2] {
        [self.came_back, self.ended]
    }

    /// Lets what was recorded weigh `decay` times as much.
    pub(super) fn decay(&mut self, decay: f64) {
        let Self { of_capacity: _, came_back, ended, tokens, again, recent } = self;
        for sum in [came_back, ended, tokens] {
            *sum *= decay;
        }
        again.decay(decay);
        recent.decay(decay);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// That of a cache of tokens after look-ups of these.
    fn after(look_ups: &[u32]) -> Leeway {
        let mut leeway = Leeway::of_tokens();
        for &tokens in look_ups {
            leeway.record_again(Again::of_tokens(tokens), f64::from(tokens));
            leeway.end_look_up();
        }
        leeway
    }

    #[track_caller]
    fn assert_is(leeway: &Leeway, [own, recent]: [f64; 2], expected: f64) {
        let found = leeway.get(own, recent, 1_000);
        assert!((found - expected).abs() < 1e-9, "{found}, not {expected}");
    }

    #[test]
    fn few_prompts_bet_what_they_have_saved() {
        let mut leeway = after(&[100]);
        assert_is(&leeway, [0.0, 0.0], 0.0);
        assert_is(&leeway, [100.0, 100.0], 2.5);
        assert_is(&leeway, [120.0, 100.0], 22.5);
        assert_is(&leeway, [90.0, 100.0], -7.5);
        // Half of what was evicted early came back.
        leeway.record_came_back(500.0);
        leeway.record_ended(500.0);
        assert_is(&leeway, [100.0, 100.0], 2.5);
    }

    #[test]
    fn many_prompts_bet_by_what_came_back() {
        assert_is(&Leeway::of_tokens(), [0.0, 0.0], 0.0);
        let mut leeway = after(&[10; 10]);
        // A sixteenth of the capacity, but for four look-ups.
        assert_is(&leeway, [0.0, 0.0], 22.5);
        assert_is(&leeway, [100.0, 100.0], 2.5 + 22.5);
        leeway.record_came_back(100.0);
        leeway.record_ended(1_100.0);
        assert_is(&leeway, [100.0, 100.0], 25.0 / 0.5);
        leeway.record_ended(1e9);
        assert_is(&leeway, [100.0, 100.0], 25.0 / LEAST_SHARE);
        assert_is(&leeway, [50.0, 100.0], -47.5);
        assert_is(&leeway, [0.0, 1_000.0], -975.0);
    }

    #[test]
    fn what_is_lost_beside_a_fortieth_and_a_sixteenth_of_the_capacity_is_too_much() {
        let of = |leeway: &Leeway, own| leeway.has_lost_too_much(own, 1_000.0, 1_000);
        assert!(!of(&Leeway::of_tokens(), 0.0), "nothing was looked up again");
        let mut leeway = after(&[100; 10]);
        assert_eq!([912.0, 913.0].map(|own| of(&leeway, own)), [true, false]);
        leeway.record_ended(1e9);
        assert_eq!(
            [912.0, 913.0].map(|own| of(&leeway, own)),
            [true, false],
            "whatever becomes of what is early"
        );
    }

    #[test]
    fn the_usual_look_up_counts_by_its_tokens() {
        let mut leeway = after(&[1, 1, 1, 1, 1, 1, 1, 1, 1, 5]);
        // 34 / 14 tokens.
        let expected = 14.0 * 0.025 + 62.5 - 4.0 * 34.0 / 14.0;
        assert_is(&leeway, [14.0, 14.0], expected);
        leeway.decay(0.5);
        assert_is(&leeway, [14.0, 14.0], expected);
    }

    #[test]
    fn as_long_as_recency_finds_little_the_usual_look_up_finds_all_that_was_looked_up_before() {
        let mut leeway = Leeway::of_tokens();
        leeway.record_again(Again::of_tokens(10), 0.0);
        // A 64th of what is looked up again may be lost, as least-recently-used eviction finds nothing of it.
        assert_is(&leeway, [0.0, 0.0], 10.0 / 64.0 + 62.5 - 40.0);
        leeway.end_look_up();
        // Two tokens that it finds say little beside 1,000 that are expected.
        leeway.record_again(Again::of_tokens(10), 2.0);
        assert_is(&leeway, [2.0, 2.0], 0.05 + 62.5 - 4.0 * (4.0 + 1_000.0 * 10.0) / 1_002.0);
    }

    #[test]
    fn seconds_are_bet_before_they_are_saved() {
        let mut leeway = Leeway::of_seconds();
        leeway.record_again(Again { tokens: 1_000, saved: 0.02 }, 1_000.0);
        assert_is(&leeway, [0.0, 0.02], 0.01 - 0.0195);
        assert_is(&leeway, [0.02, 0.02], 0.01 + 0.0005);
    }
}
