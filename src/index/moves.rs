//! Orders the moves of rows so that no row has to be copied aside.

use std::collections::{HashMap, HashSet};

use crate::base::{Result, out_of_memory_error, try_collect, try_to_vec, try_with_capacity};

/// A step of a plan. Executed in order, the steps have the effect of reading every source before writing any
/// row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// Row `dst` becomes row `src`.
    Copy {
        /// The row written.
        dst: u32,
        /// The row read.
        src: u32,
    },
    /// Two rows are exchanged.
    Swap(u32, u32),
}

/// Orders the moves `dst[i] <- src[i]` as if every source were read before any row is written.
///
/// Of several moves onto the same row, the last one counts. A row that is moved onto itself is left alone.
/// Chains are followed from their ends and cycles are resolved by swaps, so no temporary row is needed. Both
/// slices have the same length.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the plan.
///
/// ```
/// use kvpool::index::{Move, plan_moves};
/// let chain = plan_moves(&[2, 3], &[1, 2]).unwrap();
/// assert_eq!(chain, [Move::Copy { dst: 3, src: 2 }, Move::Copy { dst: 2, src: 1 }]);
/// assert_eq!(plan_moves(&[1, 2], &[2, 1]).unwrap(), [Move::Swap(1, 2)]);
/// ```
pub fn plan_moves(dst: &[u32], src: &[u32]) -> Result<Vec<Move>> {
    if are_apart(dst, src)? {
        return try_collect(dst.iter().zip(src).map(|(&dst, &src)| Move::Copy { dst, src }));
    }
    let mut source: HashMap<u32, u32> = HashMap::new();
    source.try_reserve(dst.len()).map_err(|_| out_of_memory_error::<[u32; 2]>(dst.len()))?;
    source.extend(dst.iter().copied().zip(src.iter().copied()));
    source.retain(|dst, src| dst != src);

    // For each row that a move writes, the number of moves that still have to read it.
    let mut readers: HashMap<u32, u32> = HashMap::new();
    readers.try_reserve(source.len()).map_err(|_| out_of_memory_error::<[u32; 2]>(source.len()))?;
    for src in source.values().filter(|src| source.contains_key(src)) {
        *readers.entry(*src).or_default() += 1;
    }
    let order = written_order(dst, &source)?;
    let mut ready: Vec<u32> = try_with_capacity(order.len())?;
    ready.extend(order.iter().rev().copied().filter(|row| !readers.contains_key(row)));

    let mut plan = try_with_capacity(source.len())?;
    while let Some(dst) = ready.pop() {
        let Some(src) = source.remove(&dst) else { continue };
        plan.push(Move::Copy { dst, src });
        if let Some(count) = readers.get_mut(&src) {
            *count -= 1;
            if *count == 0 {
                ready.push(src);
            }
        }
    }
    // Only cycles remain: each row is read by one move.
    for start in order {
        let mut row = start;
        while let Some(src) = source.remove(&row) {
            if src != start {
                plan.push(Move::Swap(row, src));
            }
            row = src;
        }
    }
    Ok(plan)
}

/// Returns whether no row is written twice and none is both read and written. Then the order of the moves
/// does not matter.
fn are_apart(dst: &[u32], src: &[u32]) -> Result<bool> {
    /// Up to this number of rows, comparing all of them is faster than sorting.
    const FEW: usize = 16;
    if dst.len() <= FEW {
        let mut left = dst;
        while let Some((row, later)) = left.split_first() {
            if later.contains(row) || src.contains(row) {
                return Ok(false);
            }
            left = later;
        }
        return Ok(true);
    }
    let mut written = try_to_vec(dst)?;
    written.sort_unstable();
    Ok(written.is_sorted_by(|a, b| a < b) && src.iter().all(|row| written.binary_search(row).is_err()))
}

/// Returns the rows that `source` writes, once each, in the order of their last occurrence in `dst`.
fn written_order(dst: &[u32], source: &HashMap<u32, u32>) -> Result<Vec<u32>> {
    let mut seen = HashSet::new();
    seen.try_reserve(source.len()).map_err(|_| out_of_memory_error::<u32>(source.len()))?;
    let mut order: Vec<u32> = try_with_capacity(source.len())?;
    order.extend(dst.iter().rev().copied().filter(|row| source.contains_key(row) && seen.insert(*row)));
    order.reverse();
    Ok(order)
}
