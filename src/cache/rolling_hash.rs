//! A rolling hash of prefixes: a polynomial over the tokens, to which tokens are added and from which they
//! are removed at the end.
//!
//! It names prefixes in the records of evictions. Two prefixes have the same hash with a probability of about
//! `length / 2**61`. No decision about which pages a request gets depends on it.

use std::fmt;
use std::hash::{BuildHasher, RandomState};

use super::{BlockKey, NamespaceHash};

/// 2**61 - 1, a prime for which the remainder of a product is two additions.
const PRIME: u64 = (1 << 61) - 1;

fn times(a: u64, b: u64) -> u64 {
    reduced(u128::from(a) * u128::from(b))
}

/// Returns the remainder of a number below 2**122.
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

/// The number of powers in one table: exponents are written in digits of 6 bits.
const DIGIT: usize = 64;

/// The number of digits of the length of a prefix.
const DIGITS: usize = 6;

/// The powers of a number: one table for each digit of the exponent.
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

    /// Returns the power whose exponent is the length of a prefix.
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

/// The base of the hashes that name prefixes: the same in each process, so that the policies of ranks that make the
/// same calls decide the same. Callers could choose tokens whose hashes are equal; a policy would take their
/// blocks for one.
const NAMES: u64 = 0x1a2c_95f1_e37b_4d86;

/// Computes rolling hashes.
pub(crate) struct RollingHasher {
    powers: Powers,
    /// The powers of the inverse of the base.
    inverse: Powers,
}

/// The hash of a prefix: the value of the polynomial over its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RollingHash(u64);

impl RollingHash {
    /// Returns the key of the block that ends here, in which all bits of the hash are mixed.
    pub(crate) const fn key(self) -> BlockKey {
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        BlockKey::new(mixed ^ (mixed >> 31))
    }
}

/// The hash of a prefix whose end moves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor<'a> {
    hasher: &'a RollingHasher,
    hash: u64,
    /// The base to the power of the length.
    factor: u64,
}

impl RollingHasher {
    /// Creates the hasher that names prefixes.
    pub(crate) fn of_names() -> Self {
        Self::new(NAMES)
    }

    /// Creates a hasher for tokens that callers must not be able to choose such that hashes are equal.
    pub(super) fn of_seed(seed: &RandomState) -> Self {
        Self::new(seed.hash_one(0))
    }

    fn new(base: u64) -> Self {
        let base = base % (PRIME - 2) + 2;
        Self { powers: Powers::of(base), inverse: Powers::of(power(base, PRIME - 2)) }
    }

    /// Returns the hash of the empty prefix of a namespace.
    pub(crate) const fn start(namespace: NamespaceHash) -> RollingHash {
        RollingHash(namespace.number() % PRIME)
    }

    /// Creates a cursor at the end of a prefix of `len` tokens.
    pub(crate) fn cursor(&self, hash: RollingHash, len: usize) -> Cursor<'_> {
        Cursor { hasher: self, hash: hash.0, factor: self.powers.get(len) }
    }

    /// Returns a hash of `tokens` alone.
    pub(super) fn hash(&self, tokens: &[i32]) -> u64 {
        let mut cursor = self.cursor(RollingHash(0), 0);
        cursor.push(tokens);
        cursor.hash
    }

    /// Returns the value of the polynomial over fewer than [`DIGIT`] tokens.
    fn block(&self, tokens: &[i32]) -> u64 {
        // 63 products of 61 and 32 bits are below 2**99.
        let products = tokens.iter().zip(&self.powers.0[0][1..]);
        let sum = products.fold(0_u128, |sum, (token, power)| {
            sum + u128::from(*power) * u128::from(u64::from(token.cast_unsigned()) + 1)
        });
        reduced(sum)
    }
}

impl fmt::Debug for RollingHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RollingHasher").finish_non_exhaustive()
    }
}

impl Cursor<'_> {
    /// Adds `tokens` at the end of the prefix.
    pub(crate) fn push(&mut self, tokens: &[i32]) {
        for block in tokens.chunks(DIGIT - 1) {
            self.hash = plus(self.hash, times(self.factor, self.hasher.block(block)));
            self.factor = times(self.factor, self.hasher.powers.0[0][block.len()]);
        }
    }

    /// Removes `tokens`, which are the last ones of the prefix.
    pub(crate) fn pop(&mut self, tokens: &[i32]) {
        for block in tokens.rchunks(DIGIT - 1) {
            self.factor = times(self.factor, self.hasher.inverse.0[0][block.len()]);
            self.hash = plus(self.hash, PRIME - times(self.factor, self.hasher.block(block)));
        }
    }

    pub(crate) const fn hash(&self) -> RollingHash {
        RollingHash(self.hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Namespace;

    #[test]
    fn a_prefix_has_one_hash_however_its_end_moved() {
        let hasher = RollingHasher::of_seed(&RandomState::new());
        let mut cursor = hasher.cursor(RollingHasher::start(NamespaceHash::from(&Namespace::Number(7))), 0);
        let tokens: Vec<i32> = (0..500).map(|at| at * at % 3 * 1_000_003).chain([i32::MAX]).collect();
        let mut expected = vec![cursor.hash()];
        for token in &tokens {
            cursor.push(std::slice::from_ref(token));
            assert!(!expected.contains(&cursor.hash()));
            expected.push(cursor.hash());
        }
        for (from, to) in [(0, 1), (0, 501), (3, 66), (3, 67), (62, 63), (64, 500), (100, 100)] {
            let mut forward = hasher.cursor(expected[from], from);
            forward.push(&tokens[from..to]);
            assert_eq!(forward.hash(), expected[to]);
            let mut back = hasher.cursor(expected[to], to);
            back.pop(&tokens[from..to]);
            assert_eq!(back.hash(), expected[from]);
            back.push(&tokens[from..to]);
            assert_eq!(back.hash(), expected[to]);
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
