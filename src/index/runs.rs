//! Ascending runs in a sequence of indices: what makes bulk work on bitmaps cheap.

use crate::base::{Error, IndexVec, Result};

/// How many indices are compared at once; a multiple of every vector width.
const BLOCK: usize = 32;

/// An integer that index tensors are made of.
trait RawIndex: Copy + PartialEq + Into<i64> {
    /// `self + n`, if there is such a number.
    fn plus(self, n: i8) -> Option<Self>;

    /// Whether `block` is `first, first + 1, ...`, without a branch an element.
    fn continues(block: &[Self; BLOCK], first: Self) -> bool;
}

macro_rules! raw_index {
    ($int:ty) => {
        impl RawIndex for $int {
            fn plus(self, n: i8) -> Option<Self> {
                self.checked_add(n.into())
            }

            fn continues(block: &[Self; BLOCK], first: Self) -> bool {
                let mut difference = 0;
                let mut expected = first;
                for &value in block {
                    difference |= value ^ expected;
                    expected = expected.wrapping_add(1);
                }
                difference == 0
            }
        }
    };
}

raw_index!(i32);
raw_index!(i64);

fn runs_in<T: RawIndex>(values: &[T], mut visit: impl FnMut(i64, usize)) {
    let mut at = 0;
    while at < values.len() {
        let first = values[at];
        let mut end = at + 1;
        let mut expected = first.plus(1);
        // There is no next number after the largest one: a run ends there.
        while let Some(next) = expected.filter(|next| values.get(end) == Some(next)) {
            if let (Some(block), Some(after)) = (values[end..].first_chunk::<BLOCK>(), next.plus(32))
                && T::continues(block, next)
            {
                end += BLOCK;
                expected = Some(after);
            } else {
                end += 1;
                expected = next.plus(1);
            }
        }
        visit(first.into(), end - at);
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
