//! The units of leases by their positions, on their way from one memory to another.

use std::ops::Range;

use crate::base::Result;
use crate::layout::{Group, GroupKind};

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

/// Returns whether a lease of `cache` lacks a unit of a window or chunk that a request needs to go on at its end.
pub(super) fn has_hole(cache: &ArenaCacheCore, lease: &ArenaLease) -> Result<bool> {
    // Full groups lack none, and list the whole prefix.
    any_group(cache, lease, |kind| kind != GroupKind::Full, |units| units.contains(&None))
}

/// Returns whether a lease of `cache` lacks a snapshot of a state at its end.
pub(super) fn lacks_state(cache: &ArenaCacheCore, lease: &ArenaLease) -> Result<bool> {
    any_group(cache, lease, |kind| kind == GroupKind::State, <[_]>::is_empty)
}

/// Returns whether the leased units of any group of such a kind are such units.
fn any_group(
    cache: &ArenaCacheCore,
    lease: &ArenaLease,
    is_asked: fn(GroupKind) -> bool,
    is_so: fn(&[Option<u32>]) -> bool,
) -> Result<bool> {
    for (number, group) in cache.contents.layout.groups().iter().enumerate() {
        if is_asked(group.kind()) && is_so(&lease.units(number)?.units) {
            return Ok(true);
        }
    }
    Ok(false)
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
