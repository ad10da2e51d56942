//! Histories of every pool, decoded from bytes, against models too simple to be wrong.
//!
//! Each is an endless program that reads every choice from a [`Source`]: the next call and its arguments,
//! misuse included. After every step the pool is compared with the model. The bytes come from a fuzzer
//! (`tests/fuzz`), from a seed, or from a file that was once a finding.

mod arena;
mod arena_prefix_cache;
mod buffers;
mod chunks;
pub(crate) mod contents;
mod counts;
pub(crate) mod disks;
mod dlpack;
mod gdn;
mod guarded;
mod hybrid;
mod kv;
mod leased;
mod nodes;
mod pages;
mod planner;
mod planner_model;
mod prefixes;
mod rows;
mod served;
mod slabs;
mod slot_model;
mod slots;
mod stored;
mod tiered;

use std::fmt::Debug;
use std::sync::Arc;

use arbitrary::Unstructured;
use kvpool::base::{DType, Dims, ErrorKind, IndexVec, Result};
use kvpool::cache::set_rare_cases_frequent;
use kvpool::memory::{Backend, Host, Stream};
use kvpool::tensor::TensorView;

/// Host memory has no streams.
const STREAM: Stream = Stream::DEFAULT;

fn host() -> Arc<dyn Backend> {
    Arc::new(Host)
}

/// One kind of history: its name, which is also the name of its fuzz target, and its program.
pub(crate) type History = (&'static str, fn(&mut Source<'_>));

/// Every kind.
pub(crate) const ALL: [History; 19] = [
    ("slots", slots::run),
    ("rows", rows::run),
    ("counts", counts::run),
    ("chunks", chunks::run),
    ("pages", pages::run),
    ("buffers", buffers::run),
    ("arena", arena::run),
    ("slabs", slabs::run),
    ("arena_prefix_cache", arena_prefix_cache::run),
    ("planner", planner::run),
    ("prefixes", prefixes::run),
    ("leased", leased::run),
    ("nodes", nodes::run),
    ("hybrid", hybrid::run),
    ("kv", kv::run),
    ("gdn", gdn::run),
    ("stored", stored::run),
    ("tiered", tiered::run),
    ("dlpack", dlpack::run),
];

/// Runs the history `name` and returns the number of its steps.
pub(crate) fn run(name: &str, bytes: &[u8]) -> usize {
    let (_, history) = ALL.iter().find(|(known, _)| *known == name).expect("a known history");
    // Half of the histories.
    set_rare_cases_frequent(bytes.iter().fold(0, |parity, byte| parity ^ byte) % 2 == 1);
    let mut source = Source { bytes: Unstructured::new(bytes), steps: 0 };
    history(&mut source);
    source.steps
}

/// The source of a history's choices. At its end every choice is the first one.
pub(crate) struct Source<'a> {
    bytes: Unstructured<'a>,
    steps: usize,
}

impl Source<'_> {
    /// Whether there is another step.
    fn next_step(&mut self) -> bool {
        let is_left = !self.bytes.is_empty();
        self.steps += usize::from(is_left);
        is_left
    }

    /// A number below `count`, which is not 0.
    fn below(&mut self, count: usize) -> usize {
        self.bytes.int_in_range(0..=count - 1).unwrap_or(0)
    }

    /// One of `values`.
    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    fn flip(&mut self) -> bool {
        self.below(2) == 1
    }

    /// Whether a rare event happens: once in `times`.
    fn rarely(&mut self, times: usize) -> bool {
        self.below(times) == times - 1
    }

    /// A number in the closed range.
    fn within(&mut self, low: i64, high: i64) -> i64 {
        self.bytes.int_in_range(low..=high).unwrap_or(low)
    }

    /// Usually an index below `count`, sometimes a number just outside or far beyond.
    fn index(&mut self, count: usize) -> i64 {
        match self.below(16) {
            0 => self.of(&[i64::MIN, -(1 << 32), i32::MIN.into(), -1, i32::MAX.into(), 1 << 32, i64::MAX]),
            1 => self.within(-2, int(count) + 2),
            _ => self.within(0, int(count.max(1)) - 1),
        }
    }

    /// Up to `most` such indices, of either width.
    fn indices(&mut self, most: usize, count: usize) -> Vec<i64> {
        (0..self.below(most + 1)).map(|_| self.index(count)).collect()
    }

    /// `values` as a caller passes them: sometimes as int32, where they fit.
    fn index_vec(&mut self, values: &[i64]) -> IndexVec {
        let narrow: Option<Vec<i32>> = values.iter().map(|&value| i32::try_from(value).ok()).collect();
        match narrow.filter(|_| self.flip()) {
            Some(narrow) => IndexVec::I32(narrow),
            None => IndexVec::I64(values.to_vec()),
        }
    }
}

/// A size as a number of a tensor.
fn int(size: usize) -> i64 {
    i64::try_from(size).expect("a small number")
}

/// A non-negative number as a size.
fn size<T: TryInto<usize>>(number: T) -> usize
where
    T::Error: Debug,
{
    number.try_into().expect("a number that is not negative")
}

/// `given` as places, which are below `count`.
fn places(given: &[i64], count: usize) -> Verdict<Vec<usize>> {
    let place = |&given: &i64| {
        let place = usize::try_from(given).ok().filter(|place| *place < count);
        place.ok_or(Refusal::at(ErrorKind::Index, given))
    };
    given.iter().map(place).collect()
}

fn dims(extents: &[usize]) -> Dims {
    Dims::of(extents).expect("few dimensions")
}

/// The bytes of a contiguous tensor in host memory.
fn bytes_of(view: &TensorView) -> Vec<u8> {
    let count = view.shape().numel() * view.dtype().size();
    let source = view.region().at(view.offset(), count).expect("a view lies in its region");
    let mut bytes = vec![0; count];
    // SAFETY: the region is live host memory, `at` checked the bounds, and the vector is ours.
    unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(source.as_ptr(), count) };
    bytes
}

/// The elements of a contiguous int32 tensor in host memory.
fn ints_of(view: &TensorView) -> Vec<i32> {
    let (region, offset, count) = (view.region(), view.offset(), view.shape().numel());
    if view.dtype() == DType::I64 {
        let wide = contents::read::<i64>(region, offset, count);
        return IndexVec::I64(wide).into_i32().expect("indices fit");
    }
    assert_eq!(view.dtype(), DType::I32);
    contents::read::<i32>(region, offset, count)
}

/// Why a call is refused: the kind of its error, and the invalid index where the model knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Refusal {
    kind: ErrorKind,
    index: Option<i64>,
}

impl Refusal {
    /// The call is refused for `index`.
    const fn at(kind: ErrorKind, index: i64) -> Self {
        Self { kind, index: Some(index) }
    }
}

impl From<ErrorKind> for Refusal {
    fn from(kind: ErrorKind) -> Self {
        Self { kind, index: None }
    }
}

/// The outcome that a model expects of a call. Of several faults it names the one that is found first.
type Verdict<T = ()> = std::result::Result<T, Refusal>;

/// A call that is refused unless `is_right`.
fn ensure(is_right: bool, refusal: impl Into<Refusal>) -> Verdict {
    if is_right { Ok(()) } else { Err(refusal.into()) }
}

/// Checks that a call is refused exactly when it should be, and for the right reason.
#[track_caller]
fn agree<T: Debug, E>(answer: Result<T>, expected: &Verdict<E>) -> Option<T> {
    match (answer, expected) {
        (Ok(answer), Ok(_)) => Some(answer),
        (Ok(answer), Err(refusal)) => {
            panic!("should have been refused ({refusal:?}), not answered with {answer:?}")
        }
        (Err(error), Ok(_)) => panic!("should not have been refused: {error}"),
        (Err(error), Err(refusal)) => {
            assert_eq!(error.kind(), refusal.kind, "{error}");
            assert!(refusal.index.is_none() || error.facts().index == refusal.index, "{refusal:?}: {error}");
            None
        }
    }
}

/// Checks that a call is refused.
#[track_caller]
fn refused<T: Debug>(answer: Result<T>, refusal: impl Into<Refusal>) {
    let expected: Verdict = Err(refusal.into());
    agree(answer, &expected);
}
