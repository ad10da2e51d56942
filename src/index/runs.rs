//! Ascending runs in a sequence of indices: what makes bulk work on bitmaps cheap.

use crate::base::{Error, IndexVec, Result};

/// How many indices are compared at once; a multiple of every vector width.
const BLOCK: usize = 16;

/// An integer that index tensors are made of.
trait RawIndex: Copy {
    /// The value, widened.
    fn get(self) -> i64;

    /// Whether `block` is `first, first + 1, ...`, without a branch an element.
    fn continues(block: &[Self; BLOCK], first: i64) -> bool;
}

impl RawIndex for i32 {
    fn get(self) -> i64 {
        i64::from(self)
    }

    fn continues(block: &[Self; BLOCK], first: i64) -> bool {
        let Ok(first) = Self::try_from(first) else { return false };
        // Past i32::MAX the expected values wrap, which a run that ends before it never sees.
        let Some(_) = first.checked_add(15) else { return false };
        let mut difference = 0;
        let mut expected = first;
        for &value in block {
            difference |= value ^ expected;
            expected = expected.wrapping_add(1);
        }
        difference == 0
    }
}

impl RawIndex for i64 {
    fn get(self) -> i64 {
        self
    }

    fn continues(block: &[Self; BLOCK], first: i64) -> bool {
        let Some(_) = first.checked_add(15) else { return false };
        let mut difference = 0;
        let mut expected = first;
        for &value in block {
            difference |= value ^ expected;
            expected = expected.wrapping_add(1);
        }
        difference == 0
    }
}

fn runs_in<T: RawIndex>(values: &[T], mut visit: impl FnMut(i64, usize)) {
    let mut at = 0;
    while at < values.len() {
        let first = values[at].get();
        let mut end = at + 1;
        let mut expected = first.checked_add(1);
        while let Some(next) = expected {
            if let Some(block) = values[end..].first_chunk::<BLOCK>()
                && T::continues(block, next)
            {
                end += BLOCK;
                expected = next.checked_add(16);
            } else if values.get(end).is_some_and(|value| value.get() == next) {
                end += 1;
                expected = next.checked_add(1);
            } else {
                break;
            }
        }
        visit(first, end - at);
        at = end;
    }
}

/// Calls `visit(start, length)` for each maximal ascending run, in order.
///
/// ```
/// use kvpool::{base::IndexVec, index::for_each_run};
/// let mut runs = Vec::new();
/// for_each_run(&IndexVec::I32(vec![4, 5, 6, 9, 3]), |start, len| runs.push((start, len)));
/// assert_eq!(runs, [(4, 3), (9, 1), (3, 1)]);
/// ```
pub fn for_each_run(values: &IndexVec, visit: impl FnMut(i64, usize)) {
    match values {
        IndexVec::I32(values) => runs_in(values, visit),
        IndexVec::I64(values) => runs_in(values, visit),
    }
}

/// (start, length) of each maximal ascending run, in order, flattened: what DMA descriptors want.
///
/// # Errors
/// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when a start or a length does not fit int32.
pub fn ascending_runs(values: &IndexVec) -> Result<Vec<i32>> {
    let mut flat = Vec::new();
    let mut unfit = None;
    for_each_run(values, |start, len| match (i32::try_from(start), i32::try_from(len)) {
        (Ok(start), Ok(len)) => flat.extend([start, len]),
        _ => unfit = unfit.or(Some((start, len))),
    });
    match unfit {
        None => Ok(flat),
        Some((start, len)) => {
            Err(Error::config(format!("the run of {len} from {start} does not fit an int32 tensor")))
        }
    }
}
