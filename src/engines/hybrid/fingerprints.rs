//! Fingerprints of first pages, by which a tree finds the children of a node.

use std::hash::{BuildHasher, RandomState};

use crate::cache::fingerprint_mask;

use super::namespaces::NamespaceId;
use super::run::TokenRun;

/// Computes fingerprints.
#[derive(Debug)]
pub(super) struct Fingerprints {
    /// Random and secret: callers cannot choose tokens that collide.
    secrets: [u64; 3],
    mask: u32,
}

impl Fingerprints {
    pub(super) fn new(seed: &RandomState) -> Self {
        let secrets = [3_u64, 4, 5].map(|number| seed.hash_one(number) | 1);
        Self { secrets, mask: fingerprint_mask() }
    }

    /// Returns the fingerprint of a first page in a namespace.
    pub(super) fn of_page(&self, namespace: NamespaceId, page: &[i64]) -> u32 {
        let [plus, times, other] = self.secrets;
        let mut hash = plus ^ u64::from(namespace.number());
        let mut pairs = page.chunks_exact(2);
        for pair in &mut pairs {
            hash = fold(hash ^ pair[0].cast_unsigned(), times ^ pair[1].cast_unsigned());
        }
        if let [last] = pairs.remainder() {
            hash = fold(hash ^ last.cast_unsigned(), other);
        }
        let [a, b, c, d, ..] = fold(hash, times).to_le_bytes();
        u32::from_le_bytes([a, b, c, d]) & self.mask
    }

    /// Returns the fingerprint of the first page of `tokens`, which have at least one page.
    pub(super) fn of_run(&self, namespace: NamespaceId, tokens: &TokenRun, page_size: usize) -> u32 {
        let mut page = vec![0; page_size];
        tokens.read(&mut page);
        self.of_page(namespace, &page)
    }
}

/// Multiplies and folds the halves of the product.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    let [low, high] = [product & u128::from(u64::MAX), product >> 64];
    u64::try_from(low ^ high).expect("the halves have 64 bits")
}
