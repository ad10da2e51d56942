//! Keys of prefixes: a polynomial over the tokens, which grows and shrinks at its end.
//!
//! A key names a prefix in memories of what was evicted. Two prefixes may have the same key, with a
//! probability of about `length / 2**61`; nothing that is handed out depends on it.

use std::hash::{BuildHasher, RandomState};

use super::PageKey;

/// 2**61 - 1, a prime for which the remainder of a product is two additions.
const PRIME: u64 = (1 << 61) - 1;

fn times(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    let low = u64::try_from(product & u128::from(PRIME)).expect("61 bits");
    let high = u64::try_from(product >> 61).expect("a product of two numbers of 61 bits");
    plus(low, high)
}

const fn plus(a: u64, b: u64) -> u64 {
    let sum = a + b;
    if sum >= PRIME { sum - PRIME } else { sum }
}

fn power(mut base: u64, mut exponent: u64) -> u64 {
    let mut result = 1;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = times(result, base);
        }
        base = times(base, base);
        exponent >>= 1;
    }
    result
}

/// The base of the polynomial, random in each cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    base: u64,
    inverse: u64,
}

/// The sum over the tokens of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sum(u64);

impl Sum {
    /// The key of the prefix. A sum has few bits in its ends; the key mixes them.
    pub(super) const fn key(self) -> PageKey {
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        PageKey::new(mixed ^ (mixed >> 31))
    }
}

/// A prefix whose end moves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor {
    chain: Chain,
    sum: u64,
    /// `base` to the power of the length.
    factor: u64,
}

impl Chain {
    pub(super) fn new(seed: &RandomState) -> Self {
        let base = seed.hash_one(0) % (PRIME - 2) + 2;
        Self { base, inverse: power(base, PRIME - 2) }
    }

    /// The sum of no tokens, for a namespace.
    pub(super) const fn start(hash: u64) -> Sum {
        Sum(hash % PRIME)
    }

    /// A cursor at the end of a prefix of `len` tokens.
    pub(super) fn cursor(self, sum: Sum, len: usize) -> Cursor {
        Cursor { chain: self, sum: sum.0, factor: power(self.base, len as u64) }
    }
}

impl Cursor {
    /// Moves past `token`.
    pub(super) fn push(&mut self, token: i32) {
        self.factor = times(self.factor, self.chain.base);
        self.sum = plus(self.sum, self.term(token));
    }

    /// Moves back before `token`, the last one.
    pub(super) fn pop(&mut self, token: i32) {
        self.sum = plus(self.sum, PRIME - self.term(token));
        self.factor = times(self.factor, self.chain.inverse);
    }

    fn term(&self, token: i32) -> u64 {
        times(self.factor, u64::from(token.cast_unsigned()) + 1)
    }

    pub(super) const fn sum(&self) -> Sum {
        Sum(self.sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_has_one_sum_however_its_end_moved() {
        let chain = Chain::new(&RandomState::new());
        let mut cursor = chain.cursor(Chain::start(7), 0);
        let sums: Vec<_> = [3, 0, 0, i32::MAX]
            .map(|token| {
                cursor.push(token);
                cursor.sum()
            })
            .to_vec();
        assert!(sums.iter().enumerate().all(|(at, sum)| !sums[..at].contains(sum)));
        cursor.pop(i32::MAX);
        assert_eq!(cursor.sum(), sums[2]);
        cursor.pop(0);
        assert_eq!(cursor.sum(), sums[1]);
        let mut resumed = chain.cursor(sums[1], 2);
        resumed.push(0);
        assert_eq!(resumed.sum(), sums[2]);
    }
}
