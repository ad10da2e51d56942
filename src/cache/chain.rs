//! Keys of prefixes: a polynomial over the tokens, which grows and shrinks at its end.
//!
//! A key names a prefix in memories of what was evicted. Two prefixes may have the same key, with a
//! probability of about `length / 2**61`; nothing that is handed out depends on it.

use std::fmt;
use std::hash::{BuildHasher, RandomState};

use super::PageKey;

/// 2**61 - 1, a prime for which the remainder of a product is two additions.
const PRIME: u64 = (1 << 61) - 1;

fn times(a: u64, b: u64) -> u64 {
    reduced(u128::from(a) * u128::from(b))
}

/// The remainder of a number below 2**122.
fn reduced(number: u128) -> u64 {
    let low = u64::try_from(number & u128::from(PRIME)).expect("61 bits");
    let high = u64::try_from(number >> 61).expect("122 bits less 61");
    let sum = low + high;
    if sum >= PRIME { sum - PRIME } else { sum }
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

/// Powers in one table of this many: exponents have digits of 6 bits.
const DIGIT: usize = 64;

/// Digits of the length of a prefix.
const DIGITS: usize = 6;

/// The powers of a number, by the digits of the exponent.
struct Powers([[u64; DIGIT]; DIGITS]);

impl Powers {
    fn of(base: u64) -> Self {
        let mut powers = [[1; DIGIT]; DIGITS];
        let mut step = base;
        for digit in &mut powers {
            for at in 1..DIGIT {
                digit[at] = times(digit[at - 1], step);
            }
            step = times(digit[DIGIT - 1], step);
        }
        Self(powers)
    }

    /// The power with an exponent of a prefix's length.
    fn get(&self, mut exponent: usize) -> u64 {
        let mut result = self.0[0][exponent % DIGIT];
        for digit in &self.0[1..] {
            exponent /= DIGIT;
            if exponent == 0 {
                break;
            }
            result = times(result, digit[exponent % DIGIT]);
        }
        result
    }
}

/// The base of the polynomial, random in each cache.
pub(super) struct Chain {
    powers: Powers,
    /// The powers of the inverse of the base.
    inverse: Powers,
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
pub(super) struct Cursor<'a> {
    chain: &'a Chain,
    sum: u64,
    /// The base to the power of the length.
    factor: u64,
}

impl Chain {
    pub(super) fn new(seed: &RandomState) -> Self {
        let base = seed.hash_one(0) % (PRIME - 2) + 2;
        Self { powers: Powers::of(base), inverse: Powers::of(power(base, PRIME - 2)) }
    }

    /// The sum of no tokens, for a namespace.
    pub(super) const fn start(hash: u64) -> Sum {
        Sum(hash % PRIME)
    }

    /// A cursor at the end of a prefix of `len` tokens.
    pub(super) fn cursor(&self, sum: Sum, len: usize) -> Cursor<'_> {
        Cursor { chain: self, sum: sum.0, factor: self.powers.get(len) }
    }

    /// A hash of tokens.
    pub(super) fn hash(&self, tokens: &[i32]) -> u64 {
        let mut cursor = self.cursor(Sum(0), 0);
        cursor.push(tokens);
        cursor.sum
    }

    /// The sum over fewer tokens than a digit has values.
    fn block(&self, tokens: &[i32]) -> u64 {
        // 63 products of 61 and 32 bits are below 2**99.
        let products = tokens.iter().zip(&self.powers.0[0][1..]);
        let sum = products.fold(0_u128, |sum, (token, power)| {
            sum + u128::from(*power) * u128::from(u64::from(token.cast_unsigned()) + 1)
        });
        reduced(sum)
    }
}

impl fmt::Debug for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chain").finish_non_exhaustive()
    }
}

impl Cursor<'_> {
    /// Moves past `tokens`.
    pub(super) fn push(&mut self, tokens: &[i32]) {
        for block in tokens.chunks(DIGIT - 1) {
            self.sum = plus(self.sum, times(self.factor, self.chain.block(block)));
            self.factor = times(self.factor, self.chain.powers.0[0][block.len()]);
        }
    }

    /// Moves back before `tokens`, the last ones.
    pub(super) fn pop(&mut self, tokens: &[i32]) {
        for block in tokens.rchunks(DIGIT - 1) {
            self.factor = times(self.factor, self.chain.inverse.0[0][block.len()]);
            self.sum = plus(self.sum, PRIME - times(self.factor, self.chain.block(block)));
        }
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
        let tokens: Vec<i32> = (0..500).map(|at| at * at % 3 * 1_000_003).chain([i32::MAX]).collect();
        let mut sums = vec![cursor.sum()];
        for token in &tokens {
            cursor.push(std::slice::from_ref(token));
            assert!(!sums.contains(&cursor.sum()));
            sums.push(cursor.sum());
        }
        for (from, to) in [(0, 1), (0, 501), (3, 66), (3, 67), (62, 63), (64, 500), (100, 100)] {
            let mut forward = chain.cursor(sums[from], from);
            forward.push(&tokens[from..to]);
            assert_eq!(forward.sum(), sums[to]);
            let mut back = chain.cursor(sums[to], to);
            back.pop(&tokens[from..to]);
            assert_eq!(back.sum(), sums[from]);
            back.push(&tokens[from..to]);
            assert_eq!(back.sum(), sums[to]);
        }
    }

    #[test]
    fn powers_are_products() {
        let powers = Powers::of(PRIME - 12345);
        for exponent in [0, 1, 63, 64, 65, 4095, 4096, 131_072, 1 << 31] {
            assert_eq!(powers.get(exponent), power(PRIME - 12345, exponent as u64));
        }
    }
}
