//! The seconds of prefill that a cached token saves.

use std::ops::Range;

use crate::base::{Error, Result};

/// The prefill of a model on some devices: seconds of a token, and of each token before it.
///
/// The first part is that of the weights, the second that of attention, which is quadratic in the length. So a
/// token far behind in a prompt costs more than one at its beginning.
///
/// ```
/// use kvpool::cache::PrefillCost;
/// let cost = PrefillCost::new(20e-6, 1e-9).unwrap();
/// assert!((cost.seconds(0..1000) - (20e-3 + 0.5e-3)).abs() < 1e-6);
/// assert!((cost.at(20_000) - 40e-6).abs() < 1e-12);
/// assert!(PrefillCost::new(f64::NAN, 0.0).is_err() && PrefillCost::new(0.0, 0.0).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillCost {
    per_token_s: f64,
    per_pair_s: f64,
}

impl PrefillCost {
    /// Creates a cost from the seconds of a token without attention, and those that its attention takes for
    /// each token before it.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) unless both are finite, neither is negative, and
    /// one is above 0.
    pub fn new(per_token_s: f64, per_pair_s: f64) -> Result<Self> {
        let is_time = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
        if is_time(per_token_s) && is_time(per_pair_s) && per_token_s + per_pair_s > 0.0 {
            return Ok(Self { per_token_s, per_pair_s });
        }
        Err(Error::config(format!(
            "a prefill of {per_token_s} s for each token and {per_pair_s} s for each pair; both must be finite and \
             at least 0, and one above 0"
        )))
    }

    /// Returns the seconds of the token at a position.
    #[must_use]
    pub fn at(self, position: u32) -> f64 {
        self.per_pair_s.mul_add(f64::from(position), self.per_token_s)
    }

    /// Returns the first position whose token takes these seconds or more, if an index of int32 has one.
    #[must_use]
    pub(super) fn position_of(self, seconds: f64) -> Option<u32> {
        let position = ((seconds - self.per_token_s) / self.per_pair_s).max(0.0).ceil();
        // Without attention it is infinite, or no number.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is in range")]
        (position < f64::from(i32::MAX)).then_some(position as u32)
    }

    /// Returns the seconds of the tokens at these positions.
    #[must_use]
    pub fn seconds(self, positions: Range<u32>) -> f64 {
        let [begin, end] = [positions.start, positions.end].map(f64::from);
        (end - begin) * self.per_pair_s.mul_add(f64::midpoint(begin, end), self.per_token_s)
    }
}
