//! The units of leases by their positions, on their way from one memory to another.

use std::ops::Range;

use crate::base::Result;
use crate::layout::Group;

use super::ArenaLease;
use super::cache_core::ArenaCacheCore;

/// Returns the units of a lease of `cache` that a request needs to go on at its end, of each group: at the positions that
/// end in `tokens`, `None` where it needs none; of a state, the numbers of the snapshot, if `tokens` are not empty.
pub(super) fn units_of(
    cache: &ArenaCacheCore,
    lease: &ArenaLease,
    tokens: Range<usize>,
) -> Result<Vec<Vec<Option<u32>>>> {
    let layout = &cache.contents.layout;
    let of_group = |(number, group): (usize, &Group)| {
        let leased = lease.units(number)?;
        let Some(each) = group.unit_tokens(layout.page_size()) else {
            return Ok(if tokens.is_empty() { Vec::new() } else { leased.units });
        };
        let unit = |position: usize| match position.checked_sub(leased.first) {
            Some(at) => leased.units.get(at).copied().flatten(),
            None => leased.sinks.get(position).copied(),
        };
        Ok((tokens.start / each..tokens.end / each).map(unit).collect())
    };
    layout.groups().iter().enumerate().map(of_group).collect()
}

/// Puts taken numbers in the places of those that are there.
pub(super) fn in_places(wanted: &[Vec<Option<u32>>], taken: &[Vec<u32>]) -> Vec<Vec<Option<u32>>> {
    let of_group = |(wanted, taken): (&Vec<Option<u32>>, &Vec<u32>)| {
        let mut taken = taken.iter().copied();
        wanted.iter().map(|place| place.and_then(|_| taken.next())).collect()
    };
    wanted.iter().zip(taken).map(of_group).collect()
}

/// Returns the end of the whole pages before the unit at a position of [`units_of`] `tokens`, and the name of the unit.
pub(super) fn end_of(
    group: &Group,
    page_size: usize,
    position: usize,
    tokens: Range<usize>,
) -> (usize, String) {
    let Some(each) = group.unit_tokens(page_size) else {
        let name = format!("the snapshot of group {} behind {} tokens", group.name(), tokens.end);
        return (tokens.end - page_size, name);
    };
    let first = (tokens.start / each + position) * each;
    let name = format!("tokens {first} to {} of group {}", first + each, group.name());
    (first / page_size * page_size, name)
}
