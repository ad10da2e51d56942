//! Fingerprints of bytes in host memory, by which bytes are found that are not those that were there.

use std::ops::Range;
use std::ptr::NonNull;

use crate::base::{Device, Error, Result, widen};

use super::Region;

/// Bytes of a cache line, which costs one access to memory however much of it is read.
const LINE: usize = 64;

/// Bytes of which one line is read, at most.
const WINDOW: usize = 32 << 10;

/// The least number of lines, of bytes that have so many.
const LEAST_LINES: usize = 4;

/// A hash of some of the cache lines of bytes in host memory: one of every 32 KiB, and at least four.
///
/// All bytes would cost too much: a load by a copy engine reads none of them with the processor. The lines differ
/// from `seed` to `seed`, so that of many pieces each part is read in some. Bytes of another piece, bytes at
/// another place, and bytes that were not written, have another fingerprint where a line of them is read; a bit
/// that has flipped between the lines is not seen. It protects from faults, not from people who make bytes with
/// the same one.
///
/// Reading takes about an access to memory for each line, several at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    /// Returns the fingerprint of bytes of `region`. The caller excludes code that writes them meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when they are not within the region;
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for device memory.
    pub(crate) fn of(region: &Region, bytes: Range<usize>, seed: u64) -> Result<Self> {
        if region.device() != Device::Cpu {
            let text = format!("memory of {} cannot be reached by the host", region.device());
            return Err(Error::argument(text));
        }
        let (begin, len) = (region.at(bytes.start, bytes.len())?, bytes.len());
        let lines = len.div_ceil(LINE);
        let count = len.div_ceil(WINDOW).max(LEAST_LINES).min(lines);
        let step = lines.checked_div(count).unwrap_or(0);
        let mut hash = mixed(seed ^ SECRET, len as u64 ^ SECRET.rotate_left(32));
        for number in 0..count {
            let first = number * step;
            let of = if number + 1 == count { lines - first } else { step };
            let line = LINE * (first + chosen(seed, number, of));
            // SAFETY: `Region::at` checked that the bytes lie in this region, which is live host memory, and the
            // line begins within them.
            let address = unsafe { begin.add(line) };
            // SAFETY: as above, and it ends within them; the caller excludes races.
            let words = unsafe { read_line(address, LINE.min(len - line)) };
            hash = words.chunks_exact(2).fold(hash, |hash, pair| mixed(pair[0] ^ SECRET, pair[1] ^ hash));
        }
        Ok(Self(hash))
    }
}

/// A number that no bytes are likely to have.
const SECRET: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns a number below `of`, which is above 0, for a line.
fn chosen(seed: u64, number: usize, of: usize) -> usize {
    let random = mixed(seed ^ SECRET, number as u64 ^ SECRET.rotate_left(32));
    let scaled = (random >> 32) * (of as u64 & u64::from(u32::MAX));
    widen(u32::try_from(scaled >> 32).expect("32 bits"))
}

/// Returns both halves of a product, one upon the other: every bit of it depends on all bits of both.
fn mixed(one: u64, other: u64) -> u64 {
    let product = u128::from(one) * u128::from(other);
    let low = u64::try_from(product & u128::from(u64::MAX)).expect("64 bits");
    let high = u64::try_from(product >> 64).expect("64 bits");
    low ^ high.rotate_left(17)
}

/// Returns the words of a line that has `bytes` bytes, and zeros after them.
///
/// # Safety
/// The bytes are live host memory, and nothing writes them during the call.
unsafe fn read_line(address: NonNull<u8>, bytes: usize) -> [u64; LINE / 8] {
    let mut words = [0; LINE / 8];
    if bytes == LINE {
        // SAFETY: guaranteed by the caller; any bytes are words.
        return unsafe { address.cast::<[u64; LINE / 8]>().read_unaligned() };
    }
    let target: *mut u8 = words.as_mut_ptr().cast();
    // SAFETY: guaranteed by the caller; a line is at most as long as the words, which are ours.
    unsafe { target.copy_from_nonoverlapping(address.as_ptr(), bytes) };
    words
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;

    use crate::memory::Host;

    use super::*;

    /// A region whose words are numbers from `first` on.
    fn counting(words: usize, first: usize) -> Region {
        let values: Vec<i64> = (first..first + words).map(crate::base::bounded::signed).collect();
        Region::copy_of(&values).expect("memory is there")
    }

    fn of(region: &Region, bytes: Range<usize>, seed: u64) -> Fingerprint {
        Fingerprint::of(region, bytes, seed).expect("it is host memory")
    }

    #[test]
    fn equal_bytes_have_equal_fingerprints() {
        for words in [1, 7, 8, 9, 100, 5000, 50_000] {
            let (one, other) = (counting(words, 5), counting(words + 8, 5));
            let bytes = 0..8 * words;
            assert_eq!(of(&one, bytes.clone(), 3), of(&other, bytes.clone(), 3));
            assert_ne!(of(&one, bytes.clone(), 3), of(&one, bytes, 4), "the seed counts");
        }
    }

    #[test]
    fn bytes_of_another_place_are_noticed() {
        let region = counting(60_000, 1);
        for words in [1, 7, 8, 9, 100, 5000, 50_000] {
            let before = of(&region, 0..8 * words, 9);
            for shift in [1, 8, 512, 4096] {
                assert_ne!(of(&region, 8 * shift..8 * (shift + words), 9), before);
            }
        }
    }

    #[test]
    fn every_byte_counts_for_some_seed() {
        let bytes = 3 * WINDOW + 100;
        let zeros = Region::new(Arc::new(Host), bytes).expect("memory is there");
        let changed = Region::new(Arc::new(Host), bytes).expect("memory is there");
        for at in [0, 63, 64, 5000, WINDOW, 2 * WINDOW + 1, bytes - 1] {
            // SAFETY: nothing else uses the region.
            unsafe { changed.fill(at, 1, 1) }.expect("it is within");
            let differs = |seed: &u64| of(&zeros, 0..bytes, *seed) != of(&changed, 0..bytes, *seed);
            let seen = (0..5000).filter(differs).count();
            assert!((1..100).contains(&seen), "byte {at} is seen by {seen} of 5000");
            // SAFETY: nothing else uses the region.
            unsafe { changed.fill(at, 1, 0) }.expect("it is within");
        }
    }

    #[test]
    fn a_window_that_was_not_written_is_noticed() {
        let (whole, half) = (counting(4 * WINDOW / 8, 1), counting(4 * WINDOW / 8, 1));
        // SAFETY: nothing else uses the region.
        unsafe { half.fill(3 * WINDOW, WINDOW, 0) }.expect("it is within");
        for seed in 0..100 {
            assert_ne!(of(&whole, 0..4 * WINDOW, seed), of(&half, 0..4 * WINDOW, seed));
        }
    }

    #[test]
    fn bytes_outside_are_refused() {
        let region = counting(8, 0);
        assert!(Fingerprint::of(&region, 32..65, 0).is_err());
    }
}
