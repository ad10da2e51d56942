//! Fingerprints of bytes in host memory, by which bytes are found that are not those that were there.

use std::ops::Range;
use std::ptr::NonNull;

use crate::base::{Device, Error, Result, prefetch_line, widen};

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
/// Lines come from memory while those before them are hashed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fingerprint(u64);

/// Lines that are on their way from memory while one is hashed.
const AHEAD: usize = 16;

impl Fingerprint {
    /// Returns the fingerprints of ranges of bytes of `region`, each with its seed. The caller excludes code that
    /// writes them meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when they are not within the region;
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for device memory.
    pub(crate) fn of_each(
        region: &Region,
        seeded: impl ExactSizeIterator<Item = (Range<usize>, u64)>,
    ) -> Result<Vec<Self>> {
        if region.device() != Device::Cpu {
            let text = format!("memory of {} cannot be reached by the host", region.device());
            return Err(Error::argument(text));
        }
        let samples: Vec<Sample> =
            seeded.map(|(bytes, seed)| Sample::new(region, &bytes, seed)).collect::<Result<_>>()?;
        let mut next = samples.iter().flat_map(Sample::lines);
        next.by_ref().take(AHEAD).for_each(|line| prefetch_line(line.address()));
        let mut found = Vec::with_capacity(samples.len());
        for sample in &samples {
            let mut hash = mixed(sample.seed ^ SECRET, sample.bytes as u64 ^ SECRET.rotate_left(32));
            for line in sample.lines() {
                if let Some(next) = next.next() {
                    prefetch_line(next.address());
                }
                // SAFETY: a sample has lines within a region of live host memory; the caller excludes races.
                let words = unsafe { line.read() };
                hash = words.chunks_exact(2).fold(hash, |hash, pair| mixed(pair[0] ^ SECRET, pair[1] ^ hash));
            }
            found.push(Self(hash));
        }
        Ok(found)
    }
}

/// The lines of some bytes that their fingerprint depends on.
struct Sample {
    begin: NonNull<u8>,
    bytes: usize,
    seed: u64,
    /// The number of lines that are read, and of lines of which one is read.
    count: usize,
    step: usize,
}

/// A line, or the part of one that belongs to some bytes.
struct Line {
    begin: NonNull<u8>,
    offset: usize,
    bytes: usize,
}

impl Sample {
    fn new(region: &Region, range: &Range<usize>, seed: u64) -> Result<Self> {
        let (begin, bytes) = (region.at(range.start, range.len())?, range.len());
        let lines = bytes.div_ceil(LINE);
        let count = bytes.div_ceil(WINDOW).max(LEAST_LINES).min(lines);
        let step = lines.checked_div(count).unwrap_or(0);
        Ok(Self { begin, bytes, seed, count, step })
    }

    fn lines(&self) -> impl Iterator<Item = Line> {
        (0..self.count).map(|number| self.line(number))
    }

    fn line(&self, number: usize) -> Line {
        let first = number * self.step;
        let is_last = number + 1 == self.count;
        let of = if is_last { self.bytes.div_ceil(LINE) - first } else { self.step };
        let offset = LINE * (first + chosen(self.seed, number, of));
        Line { begin: self.begin, offset, bytes: LINE.min(self.bytes - offset) }
    }
}

impl Line {
    const fn address(&self) -> *const u8 {
        self.begin.as_ptr().wrapping_add(self.offset)
    }

    /// Returns the words of the line, and zeros after them.
    ///
    /// # Safety
    /// The bytes are live host memory, and nothing writes them during the call.
    unsafe fn read(&self) -> [u64; LINE / 8] {
        let mut words = [0; LINE / 8];
        let target: *mut u8 = words.as_mut_ptr().cast();
        if self.bytes == LINE {
            // SAFETY: guaranteed by the caller; the words are ours and as long.
            unsafe { target.copy_from_nonoverlapping(self.address(), LINE) };
        } else {
            // SAFETY: as above; the words are longer.
            unsafe { target.copy_from_nonoverlapping(self.address(), self.bytes) };
        }
        words
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
        Fingerprint::of_each(region, std::iter::once((bytes, seed))).expect("it is host memory")[0]
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
        assert!(Fingerprint::of_each(&region, std::iter::once((32..65, 0))).is_err());
    }
}
