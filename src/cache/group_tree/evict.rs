//! Evictions: what is worth nothing, then what is worth least.

use std::collections::{HashMap, HashSet};

use crate::base::widen;
use crate::cache::policy::real;
use crate::cache::tree::FreedMemory;
use crate::cache::{Cause, Evicted};
use crate::index::Slabs;
use crate::layout::GroupKind;

use super::{GroupTree, is_state};

/// Units that a tree has given up, for the caller to free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct UnitsToFree {
    /// The numbers of the units of each group; empty if there are none at all.
    pub groups: Vec<Vec<u32>>,
    /// The tokens that can no longer be found.
    pub tokens: usize,
}

impl UnitsToFree {
    /// Returns whether there are no units.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.iter().all(Vec::is_empty)
    }
}

/// Returns the groups whose slabs lack some of `wanted` units, and how many.
fn short_groups(wanted: &[usize], slabs: &Slabs) -> Vec<(usize, usize)> {
    let short = |(group, &count): (usize, &usize)| {
        let missing = count.saturating_sub(slabs.counts(group).ready);
        (missing > 0).then_some((group, missing))
    };
    wanted.iter().enumerate().filter_map(short).collect()
}

/// What a call that relieves an arena has tried already.
///
/// ```
/// use std::time::Instant;
/// use kvpool::base::DType;
/// use kvpool::cache::{Cause, GroupTree, PolicyKind, Pressure, Relief, UnitNumbers};
/// use kvpool::index::{SlabUnits, Slabs};
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane};
/// let k = vec![Plane::new("k", DType::BF16, &[2, 8]).unwrap()];
/// let full = Group::new("full", GroupKind::Full, &[0], k).unwrap();
/// let layout = CacheLayout::new("m", 2, vec![full]).unwrap();
/// let numbers = [UnitNumbers { of_unit: 1, of_slab: 1 }];
/// let mut tree = GroupTree::new(&layout, &numbers, PolicyKind::Lru, None, 1024, None);
/// let slabs = Slabs::new(2, &[SlabUnits { units: 1, numbers: 1, floor: 0 }]).unwrap();
/// let cause = Cause { pressure: Pressure::Alloc, at: Instant::now() };
/// // An empty tree has nothing to give up.
/// assert_eq!(tree.relieve(&[5], &slabs, &mut Relief::default(), cause), None);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Relief {
    /// No slab has only units that nothing needs.
    has_no_slab: bool,
}

impl GroupTree {
    /// Gives up a few units, so that `wanted` units, a number for each group, come closer to fitting `slabs`. Returns
    /// `None` if there is nothing to give up.
    ///
    /// First units of windows that nothing needs, of the groups that are short, or that leave a slab empty. Then the end
    /// that is worth least for its memory or, if all groups are full, leaves in the order of the policy. When nothing
    /// else is left, the units of windows that waiting requests need beside leases.
    ///
    /// `relief` is that of one call that is short: the slabs are looked through until none is left that helps.
    pub fn relieve(
        &mut self,
        wanted: &[usize],
        slabs: &Slabs,
        relief: &mut Relief,
        cause: Cause,
    ) -> Option<UnitsToFree> {
        let short = short_groups(wanted, slabs);
        let of_slab = |group: usize| widen(slabs.units(group).units);
        let needed: usize = short.iter().map(|&(group, missing)| missing.div_ceil(of_slab(group))).sum();
        let there = needed.saturating_sub(slabs.missing(wanted));
        // At least the units without which a group needs a slab less, and those for which no slab is there.
        let least = |(group, missing): (usize, usize)| {
            let few = (missing - 1) % of_slab(group) + 1;
            (group, few.max(missing.saturating_sub(there * of_slab(group))))
        };
        let short: Vec<(usize, usize)> = short.into_iter().map(least).collect();
        for &(group, units) in &short {
            if self.blocks.unneeded(group) > 0 {
                return Some(self.free_unneeded(group, 0, units));
            }
        }
        if !relief.has_no_slab {
            if let Some(freed) = self.free_unneeded_slab(slabs, true) {
                return Some(freed);
            }
            relief.has_no_slab = true;
        }
        if self.has_ends() {
            let evicted = self.tree.evict_end(self.freed_memory(slabs), cause);
            return match evicted {
                Some(evicted) => Some(self.recycle(evicted)),
                None => self.free_last(slabs),
            };
        }
        let blocks = short.iter().map(|&(group, units)| units * self.blocks.pages_of_unit(group)).min()?;
        let evicted = self.tree.evict(blocks, cause);
        if evicted.pages.is_empty() { self.free_last(slabs) } else { Some(self.recycle(evicted)) }
    }

    /// Frees units that nothing needs beside others in their slab, or lets a waiting request need its own no longer.
    fn free_last(&mut self, slabs: &Slabs) -> Option<UnitsToFree> {
        let freed = self.free_unneeded_slab(slabs, false);
        freed.or_else(|| self.give_up_last_place().then(UnitsToFree::default))
    }

    /// Returns false if `wanted` units would not fit `slabs` even if this tree gave up all that no lease needs. Looks
    /// at every block where that is not obvious.
    #[must_use]
    pub fn may_fit(&self, wanted: &[usize], slabs: &Slabs) -> bool {
        let short = short_groups(wanted, slabs);
        // At most so many units are kept by leases.
        let is_enough = |&(group, missing): &(usize, usize)| {
            let kept = if is_state(&self.groups[group]) {
                self.holds * self.numbers[group].of_unit
            } else if self.blocks.is_counted(group) {
                self.holds * self.blocks.most_of_lease(group)
            } else {
                self.tree.locked() / self.page_size
            };
            missing + kept <= self.units_of(group)
        };
        if short.iter().all(is_enough) {
            return true;
        }
        let freeable = self.freeable();
        let (mut empty, mut ready) = (slabs.empty(), vec![0; self.groups.len()]);
        for ((group, first), count) in freeable {
            if slabs.live_beside(group, first) == count {
                empty += 1;
            } else {
                ready[group] += widen(count);
            }
        }
        let slabs_of = |&(group, missing): &(usize, usize)| {
            missing.saturating_sub(ready[group]).div_ceil(widen(slabs.units(group).units))
        };
        short.iter().map(slabs_of).sum::<usize>() <= empty
    }

    /// Returns the memory that an end and a page of every full group free, in slabs. That of an end is a snapshot of every
    /// state, and every window: others may need a part of it.
    fn freed_memory(&self, slabs: &Slabs) -> FreedMemory {
        let unit = |group: usize| 1.0 / f64::from(slabs.units(group).units);
        let mut freed = FreedMemory { snapshot: 0.0, page: 0.0 };
        for (group, declared) in self.groups.iter().enumerate() {
            let page = unit(group) / real(self.blocks.pages_of_unit(group) as u64);
            let pages = |tokens: usize| real(tokens.div_ceil(self.page_size) as u64);
            match declared.kind() {
                GroupKind::State => freed.snapshot += unit(group) * real(self.numbers[group].of_unit as u64),
                GroupKind::Full => freed.page += page,
                GroupKind::Window { tokens, .. } => freed.snapshot += page * pages(tokens),
                // A chunk has begun anywhere.
                GroupKind::Chunk { tokens, .. } => freed.snapshot += page * pages(tokens) / 2.0,
            }
        }
        freed
    }

    /// Returns how many units can be given up in each slab, by its group and its first number: those of blocks without
    /// leases, and those of windows and states, some of which leases may need.
    fn freeable(&self) -> HashMap<(usize, u32), u32> {
        let locked: HashSet<_> = self.tree.locked_pages().into_iter().collect();
        let mut freeable = HashMap::new();
        let mut add = |group: usize, unit: u32| {
            let of_slab = self.numbers[group].of_slab;
            *freeable.entry((group, unit / of_slab * of_slab)).or_default() += 1;
        };
        for block in self.tree.all_pages() {
            for group in (0..self.groups.len()).filter(|&group| !is_state(&self.groups[group])) {
                let is_free = self.blocks.is_counted(group) || !locked.contains(&block);
                if let Some(unit) = self.blocks.unit(group, block).filter(|_| is_free) {
                    add(group, unit);
                }
            }
        }
        for end in self.ends.iter().flatten() {
            let states = (0..self.groups.len()).filter(|&group| is_state(&self.groups[group]));
            for (group, numbers) in states.zip(&end.states) {
                for &number in numbers {
                    add(group, number);
                }
            }
        }
        freeable
    }

    /// Frees up to `most` units of a group that nothing needs, from number `first` on.
    fn free_unneeded(&mut self, group: usize, first: u32, most: usize) -> UnitsToFree {
        if let Some(events) = &mut self.events {
            events.record_removed(group, self.blocks.unneeded_blocks(group, first).take(most));
        }
        let mut groups = vec![Vec::new(); self.groups.len()];
        groups[group] = self.blocks.take_unneeded(group, first, most);
        UnitsToFree { groups, tokens: 0 }
    }

    /// Frees the units that nothing needs of the slab that has the fewest others; of one that has no others, if that
    /// `must` be.
    fn free_unneeded_slab(&mut self, slabs: &Slabs, must: bool) -> Option<UnitsToFree> {
        let of_group = |group: usize| {
            let others = move |(first, count): (u32, u32)| {
                (slabs.live_beside(group, first) - count, group, first, count)
            };
            self.blocks.unneeded_slabs(group).map(others)
        };
        let all = (0..self.groups.len()).flat_map(of_group);
        let (_, group, first, count) = all.min().filter(|&(others, ..)| others == 0 || !must)?;
        Some(self.free_unneeded(group, first, widen(count)))
    }

    /// Takes evicted blocks and ends out of the table. Returns their units.
    pub(super) fn recycle(&mut self, evicted: Evicted) -> UnitsToFree {
        if evicted.pages.is_empty() && evicted.states.is_empty() {
            return UnitsToFree::default();
        }
        if self.events.is_some() {
            self.record_evicted(&evicted.pages, &evicted.states);
        }
        let mut groups = vec![Vec::new(); self.groups.len()];
        // Ends count blocks that may be among those evicted.
        for number in evicted.states {
            let end = self.take_end(number);
            self.blocks.count_needs(&self.groups, self.page_size, end.block, end.tokens, false);
            self.blocks.forget_end(end.block);
            let states = (0..self.groups.len()).filter(|&group| is_state(&self.groups[group]));
            for (group, numbers) in states.zip(end.states) {
                groups[group].extend(numbers);
            }
        }
        for &block in &evicted.pages {
            self.forget_place(block);
        }
        for &block in &evicted.pages {
            self.blocks.remove(block, |group, unit| groups[group].push(unit));
        }
        UnitsToFree { groups, tokens: evicted.pages.len() * self.page_size }
    }
}
