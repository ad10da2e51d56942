//! Slabs of equal size that belong to one group at a time, and the units in them.
//!
//! A group that is short takes an empty slab, and a slab without live units is empty again, whoever had it: so no
//! memory is split between groups in advance. Units are handed out from the fullest slab first, so that the others
//! become empty; they never move.

use std::collections::{BTreeSet, HashSet};

use crate::base::bounded::narrow;
use crate::base::{Error, Result, try_collect, try_with_capacity, widen};

use super::{BadFree, BadFrees, Bitmap, OnBadFree, on_bad_frees};

/// How the units of a group are numbered, and what is kept for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabUnits {
    /// Units of a slab.
    pub units: u32,
    /// Numbers from the first unit of a slab to that of the next, at least `units`.
    pub numbers: u32,
    /// Slabs that other groups leave to this one.
    pub floor: u32,
}

/// What a group has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlabCounts {
    /// Slabs of the group.
    pub slabs: usize,
    /// Units handed out.
    pub in_use: usize,
    /// Free units in slabs of the group.
    pub ready: usize,
    /// The largest number of units handed out at once.
    pub high_water: usize,
    /// Frees that were dropped.
    pub dropped_frees: usize,
}

/// Ownership of slabs by groups, and of units by whoever took them.
///
/// Unit `i` of slab `s` has the number `s * numbers + i`. Slab 0 is padding: nobody is given a unit of it. A call
/// that takes or frees `n` units costs `n` steps and a logarithmic search for each slab that it reaches.
///
/// ```
/// use kvpool::index::{OnBadFree, SlabUnits, Slabs};
/// let pages = SlabUnits { units: 4, numbers: 4, floor: 1 };
/// let states = SlabUnits { units: 1, numbers: 3, floor: 0 };
/// let mut slabs = Slabs::new(4, &[pages, states]).unwrap();
/// assert_eq!(slabs.alloc(&[2, 2]).unwrap(), Some(vec![vec![4, 5], vec![6, 9]]));
/// // One more state would leave no slab for anybody; all or nothing.
/// assert_eq!(slabs.alloc(&[1, 1]).unwrap(), None);
/// assert_eq!(slabs.free(1, &[6], OnBadFree::Fail).unwrap().dropped(), 0);
/// assert_eq!(slabs.alloc(&[3, 0]).unwrap(), Some(vec![vec![6, 7, 8], vec![]]));
/// ```
#[derive(Clone, Debug)]
pub struct Slabs {
    all: Vec<Slab>,
    /// Slabs of no group. The lowest is taken first.
    empty: Bitmap,
    /// Free units of slabs that have a group: unit `i` of slab `s` is `s * places + i`.
    free: Bitmap,
    /// Live units of a planner or a prefix cache, which [`Slabs::free`] refuses.
    held: Bitmap,
    /// The most units of a slab, whatever its group.
    places: usize,
    groups: Vec<SlabGroupState>,
    /// The largest number of slabs that groups had at once.
    high_water: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slab {
    /// The group that has the slab, while a unit of it is live.
    group: Option<usize>,
    live: u32,
}

#[derive(Clone, Debug)]
struct SlabGroupState {
    units: SlabUnits,
    counts: SlabCounts,
    /// Slabs of the group that have free units, by their number.
    partial: BTreeSet<(u32, u32)>,
}

/// The largest number of groups: far beyond any model's.
const MOST_GROUPS: usize = 64;

impl Slabs {
    /// Creates `count` slabs, the padding slab included, for these groups.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for fewer than two slabs, for no group or more than 64,
    /// for a group without units or with more units than numbers, for floors that add up to more than there is, and
    /// for numbers beyond int32; [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host
    /// cannot list the slabs.
    pub fn new(count: u32, groups: &[SlabUnits]) -> Result<Self> {
        if count < 2 {
            return Err(Error::config(format!("{count} slabs; one is padding, so at least 2 are needed")));
        }
        if groups.is_empty() || groups.len() > MOST_GROUPS {
            return Err(Error::config(format!("{} groups; there are 1 to {MOST_GROUPS}", groups.len())));
        }
        for (group, &SlabUnits { units, numbers, .. }) in groups.iter().enumerate() {
            if units == 0 || units > numbers {
                return Err(Error::config(format!(
                    "group {group} has {units} units and {numbers} numbers a slab"
                )));
            }
            if count.checked_mul(numbers).is_none_or(|end| i32::try_from(end).is_err()) {
                return Err(Error::config(format!(
                    "{count} slabs of {numbers} numbers need indices beyond {}, the largest int32",
                    i32::MAX
                )));
            }
        }
        let floors: u64 = groups.iter().map(|group| u64::from(group.floor)).sum();
        if floors > u64::from(count - 1) {
            return Err(Error::config(format!(
                "floors of {floors} slabs are more than the {} there are",
                count - 1
            )));
        }
        let state = |&units: &SlabUnits| SlabGroupState {
            units,
            counts: SlabCounts::default(),
            partial: BTreeSet::new(),
        };
        let places = widen(groups.iter().map(|group| group.units).max().unwrap_or(0));
        let mut empty = Bitmap::new(widen(count))?;
        empty.insert_run(1, widen(count) - 1);
        Ok(Self {
            all: try_collect((0..count).map(|_| Slab::default()))?,
            empty,
            free: Bitmap::new(widen(count) * places)?,
            held: Bitmap::new(widen(count) * places)?,
            places,
            groups: groups.iter().map(state).collect(),
            high_water: 0,
        })
    }

    /// Returns the number of slabs that groups can have.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.all.len() - 1
    }

    /// Returns the number of slabs of no group.
    #[must_use]
    pub const fn empty(&self) -> usize {
        self.empty.len()
    }

    /// Returns the largest number of slabs that groups had at once.
    #[must_use]
    pub const fn high_water(&self) -> usize {
        self.high_water
    }

    /// Returns what a group has.
    #[must_use]
    pub fn counts(&self, group: usize) -> SlabCounts {
        self.groups[group].counts
    }

    /// Returns the number of units that a group could take now, if no other took any.
    #[must_use]
    pub fn available(&self, group: usize) -> usize {
        let state = &self.groups[group];
        let kept: usize =
            (0..self.groups.len()).filter(|&other| other != group).map(|other| self.kept(other, 0)).sum();
        state.counts.ready + self.empty.len().saturating_sub(kept) * widen(state.units.units)
    }

    /// Returns how many empty slabs are kept for a group that takes `more` of them.
    fn kept(&self, group: usize, more: usize) -> usize {
        let state = &self.groups[group];
        widen(state.units.floor).saturating_sub(state.counts.slabs.saturating_add(more))
    }

    /// Returns the number of empty slabs that are missing for these numbers of units, one number a group.
    #[must_use]
    pub fn missing(&self, wanted: &[usize]) -> usize {
        let (mut needed, mut kept) = (0, 0);
        for (group, state) in self.groups.iter().enumerate() {
            let count = wanted.get(group).copied().unwrap_or(0);
            let more = count.saturating_sub(state.counts.ready).div_ceil(widen(state.units.units));
            needed = more.saturating_add(needed);
            kept += self.kept(group, more);
        }
        // What fits the slabs that the groups have may always be taken.
        if needed == 0 { 0 } else { needed.saturating_add(kept).saturating_sub(self.empty.len()) }
    }

    /// Takes as many units of each group as `wanted` says, those of the fullest slabs first. Returns `None` and
    /// changes nothing if one of them is short, or would take a slab that is kept for another.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot list the units; nothing
    /// is changed.
    ///
    /// # Panics
    /// If `wanted` has a number for a group that does not exist.
    pub fn alloc(&mut self, wanted: &[usize]) -> Result<Option<Vec<Vec<u32>>>> {
        assert!(wanted.len() <= self.groups.len(), "{} of {} groups", wanted.len(), self.groups.len());
        if self.missing(wanted) > 0 {
            return Ok(None);
        }
        let mut taken = Vec::with_capacity(wanted.len());
        for &count in wanted {
            taken.push(try_with_capacity(count)?);
        }
        for (group, (&count, units)) in wanted.iter().zip(&mut taken).enumerate() {
            self.take(group, count, units);
        }
        self.high_water = self.high_water.max(self.capacity() - self.empty.len());
        Ok(Some(taken))
    }

    /// Works like [`Slabs::alloc`], for a planner or a prefix cache: only [`Slabs::free_held`] frees these units.
    ///
    /// # Errors
    /// See [`Slabs::alloc`].
    ///
    /// ```
    /// # use kvpool::index::{BadFree, OnBadFree, SlabUnits, Slabs};
    /// let mut slabs = Slabs::new(2, &[SlabUnits { units: 4, numbers: 4, floor: 0 }]).unwrap();
    /// assert_eq!(slabs.alloc_held(&[1]).unwrap(), Some(vec![vec![4]]));
    /// let bad = slabs.free(0, &[4], OnBadFree::Report).unwrap();
    /// assert_eq!(bad.first(), [(4, BadFree::OtherOwner)]);
    /// slabs.free_held(0, &[4]);
    /// assert_eq!(slabs.empty(), 1);
    /// ```
    pub fn alloc_held(&mut self, wanted: &[usize]) -> Result<Option<Vec<Vec<u32>>>> {
        let taken = self.alloc(wanted)?;
        for (group, units) in taken.iter().flatten().enumerate() {
            let numbers = self.groups[group].units.numbers;
            // A run ends with its slab: places do not follow one another as numbers do.
            for run in units.chunk_by(|one, other| one + 1 == *other && one / numbers == other / numbers) {
                let place = self.place(group, run[0]);
                self.held.insert_run(place, run.len());
            }
        }
        Ok(taken)
    }

    /// Makes units that [`Slabs::alloc`] handed out, a list for each group, those of a prefix cache, as
    /// [`Slabs::alloc_held`] does.
    ///
    /// # Errors
    /// The first group with units that are not in use, are named twice, or are held by another, and those units;
    /// nothing is changed.
    pub fn hold(&mut self, units: &[Vec<u32>]) -> std::result::Result<(), (usize, BadFrees)> {
        for (group, wanted) in units.iter().enumerate() {
            for (at, &unit) in wanted.iter().enumerate() {
                if self.reason(group, unit.into()).is_ok() {
                    let place = self.place(group, unit);
                    self.held.insert(place);
                    continue;
                }
                // What this call has held is given back, from the unit before this one on.
                let mut before = units[..group].iter().enumerate().collect::<Vec<_>>();
                let here = wanted[..at].to_vec();
                before.push((group, &here));
                for (other, held) in before {
                    for &unit in held {
                        let place = self.place(other, unit);
                        self.held.remove(place);
                    }
                }
                return Err((group, self.bad_hold(group, wanted)));
            }
        }
        Ok(())
    }

    /// Returns why units of a group cannot be held.
    #[cold]
    fn bad_hold(&self, group: usize, units: &[u32]) -> BadFrees {
        let mut bad = BadFrees::default();
        let mut known = HashSet::new();
        for &unit in units {
            match self.reason(group, unit.into()) {
                Err(reason) => bad.add(unit.into(), reason, 1),
                Ok(unit) if !known.insert(unit) => bad.add(unit.into(), BadFree::NamedTwice, 1),
                Ok(_) => (),
            }
        }
        bad
    }

    /// Returns how many units of the slab of `unit` are in use.
    #[must_use]
    pub fn live_beside(&self, group: usize, unit: u32) -> u32 {
        self.all[widen(unit / self.groups[group].units.numbers)].live
    }

    /// Returns how the units of a group are numbered, and what is kept for it.
    #[must_use]
    pub fn units(&self, group: usize) -> SlabUnits {
        self.groups[group].units
    }

    /// Frees units of [`Slabs::alloc_held`] and [`Slabs::hold`]. Those of a slab are freed together where they ascend.
    ///
    /// # Panics
    /// If one of them is not held: its holder has lost count.
    pub fn free_held(&mut self, group: usize, units: &[u32]) {
        let numbers = self.groups[group].units.numbers;
        for freed in units.chunk_by(|one, other| one / numbers == other / numbers) {
            let before = self.held.len();
            for run in freed.chunk_by(|one, other| one + 1 == *other) {
                let place = self.place(group, run[0]);
                self.held.remove_run(place, run.len());
            }
            assert!(
                before - self.held.len() == freed.len(),
                "units of group {group} in {freed:?} are not held"
            );
            self.give_back(group, freed);
        }
    }

    /// Checks that units are in use and that whoever took them has them still: that [`Slabs::free`] would free them.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) for one that is not.
    pub fn check_owned(&self, group: usize, units: &[i64]) -> Result<()> {
        let mut bad = BadFrees::default();
        for &unit in units {
            if let Err(reason) = self.reason(group, unit) {
                bad.add(unit, reason, 1);
            }
        }
        let capacity = self.capacity() * widen(self.groups[group].units.units);
        on_bad_frees(bad, OnBadFree::Fail, "unit", units.len(), capacity).map(drop)
    }

    /// Returns whether a unit of a group is in use and held.
    #[must_use]
    pub fn is_held(&self, group: usize, unit: u32) -> bool {
        self.reason(group, unit.into()) == Err(BadFree::OtherOwner)
    }

    /// Returns the number of units of planners and prefix caches.
    #[must_use]
    pub const fn held(&self) -> usize {
        self.held.len()
    }

    /// Returns the place of a unit of a group among those of all slabs.
    fn place(&self, group: usize, unit: u32) -> usize {
        let numbers = self.groups[group].units.numbers;
        widen(unit / numbers) * self.places + widen(unit % numbers)
    }

    /// Takes units, for which there are slabs.
    fn take(&mut self, group: usize, mut count: usize, taken: &mut Vec<u32>) {
        let Self { all, empty, free, places, groups, .. } = self;
        let SlabGroupState { units, counts, partial } = &mut groups[group];
        while count > 0 {
            let (left, number) = partial.pop_first().unwrap_or_else(|| {
                let (number, _) = empty.next_run(0, 1).expect("`missing` has counted the slabs");
                empty.remove(number);
                free.insert_run(number * *places, widen(units.units));
                all[number].group = Some(group);
                counts.slabs += 1;
                counts.ready += widen(units.units);
                (units.units, narrow(number))
            });
            let many = widen(left).min(count);
            let mut rest = many;
            while rest > 0 {
                let first = widen(number) * *places;
                let (start, len) = free.next_run(first, rest).expect("the slab has free units");
                free.remove_run(start, len);
                let start = number * units.numbers + narrow(start - first);
                taken.extend(start..start + narrow(len));
                rest -= len;
            }
            all[widen(number)].live += narrow(many);
            if many < widen(left) {
                partial.insert((left - narrow(many), number));
            }
            count -= many;
            counts.ready -= many;
            counts.in_use += many;
        }
        counts.high_water = counts.high_water.max(counts.in_use);
    }

    /// Frees units of a group, in any order. Invalid ones are dropped and reported, or the whole call fails.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) for an invalid unit, if `on_bad` is
    /// [`OnBadFree::Fail`]; [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot list
    /// the units. Nothing is changed.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn free(&mut self, group: usize, units: &[i64], on_bad: OnBadFree) -> Result<BadFrees> {
        let (mut valid, mut bad) = (try_with_capacity(units.len())?, BadFrees::default());
        for &unit in units {
            match self.reason(group, unit) {
                Ok(unit) => valid.push(unit),
                Err(reason) => bad.add(unit, reason, 1),
            }
        }
        if valid.windows(2).any(|pair| pair[0] >= pair[1]) {
            valid.sort_unstable();
        }
        let mut before = None;
        valid.retain(|&unit| {
            let is_new = before.replace(unit) != Some(unit);
            bad.add(unit.into(), BadFree::NamedTwice, usize::from(!is_new));
            is_new
        });
        let capacity = self.capacity() * widen(self.groups[group].units.units);
        let bad = on_bad_frees(bad, on_bad, "unit", units.len(), capacity)?;
        let numbers = self.groups[group].units.numbers;
        for freed in valid.chunk_by(|one, other| one / numbers == other / numbers) {
            self.give_back(group, freed);
        }
        self.groups[group].counts.dropped_frees += bad.dropped();
        Ok(bad)
    }

    /// Returns a live unit, or why it cannot be freed.
    fn reason(&self, group: usize, unit: i64) -> std::result::Result<u32, BadFree> {
        let SlabUnits { units, numbers, .. } = self.groups[group].units;
        let unit = u32::try_from(unit).map_err(|_| BadFree::OutOfRange)?;
        let (slab, place) = (unit / numbers, unit % numbers);
        match self.all.get(widen(slab)) {
            None => Err(BadFree::OutOfRange),
            Some(_) if slab == 0 => Err(BadFree::Padding),
            Some(owned) if owned.group != Some(group) || place >= units || self.is_free(slab, place) => {
                Err(BadFree::NotAllocated)
            }
            Some(_) if self.held.contains(self.place(group, unit)) => Err(BadFree::OtherOwner),
            Some(_) => Ok(unit),
        }
    }

    /// Returns whether a unit of a slab that has a group is free.
    fn is_free(&self, slab: u32, place: u32) -> bool {
        self.free.contains(widen(slab) * self.places + widen(place))
    }

    /// Frees live units of one slab.
    fn give_back(&mut self, group: usize, freed: &[u32]) {
        let SlabGroupState { units, counts, partial } = &mut self.groups[group];
        let number = freed[0] / units.numbers;
        let (slab, first) = (&mut self.all[widen(number)], widen(number) * self.places);
        let before = units.units - slab.live;
        for run in freed.chunk_by(|one, other| one + 1 == *other) {
            self.free.insert_run(first + widen(run[0] % units.numbers), run.len());
        }
        slab.live -= narrow(freed.len());
        counts.in_use -= freed.len();
        counts.ready += freed.len();
        if before > 0 {
            partial.remove(&(before, number));
        }
        if slab.live > 0 {
            partial.insert((units.units - slab.live, number));
            return;
        }
        slab.group = None;
        self.free.remove_run(first, widen(units.units));
        counts.slabs -= 1;
        counts.ready -= widen(units.units);
        self.empty.insert(widen(number));
    }

    /// Frees every unit of every group.
    pub fn clear(&mut self) {
        self.all.fill(Slab::default());
        self.empty.insert_run(1, self.all.len() - 1);
        self.free.clear();
        self.held.clear();
        for SlabGroupState { counts, partial, .. } in &mut self.groups {
            partial.clear();
            *counts = SlabCounts {
                high_water: counts.high_water,
                dropped_frees: counts.dropped_frees,
                ..SlabCounts::default()
            };
        }
    }

    /// Returns the first invariant that does not hold: no slab has two groups or none that counts it, and counts add
    /// up.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let mut found = vec![SlabCounts::default(); self.groups.len()];
        for (number, slab) in self.all.iter().enumerate() {
            let is_listed = self.empty.contains(number);
            let Some(group) = slab.group else {
                if is_listed != (number > 0) || slab.live > 0 {
                    return Some(format!(
                        "slab {number} has no group, {} live units; empty: {is_listed}",
                        slab.live
                    ));
                }
                continue;
            };
            let units = self.groups[group].units.units;
            let live = narrow((0..units).filter(|&place| !self.is_free(narrow(number), place)).count());
            let partial = self.groups[group].partial.contains(&(units - slab.live, narrow(number)));
            if is_listed || live != slab.live || live == 0 || live > units || partial != (live < units) {
                return Some(format!(
                    "slab {number} of group {group} has {live} of {} live units",
                    slab.live
                ));
            }
            found[group].slabs += 1;
            found[group].in_use += widen(live);
            found[group].ready += widen(units - live);
        }
        for (group, (state, found)) in self.groups.iter().zip(found).enumerate() {
            let SlabCounts { slabs, in_use, ready, high_water, .. } = state.counts;
            if (slabs, in_use, ready) != (found.slabs, found.in_use, found.ready) || in_use > high_water {
                return Some(format!("group {group} counts {:?}, and has {found:?}", state.counts));
            }
            let partial = state.partial.len();
            let with_room =
                self.all.iter().filter(|slab| slab.group == Some(group) && slab.live < state.units.units);
            if partial != with_room.count() {
                return Some(format!("group {group} lists {partial} slabs with free units"));
            }
        }
        let ready: usize = self.groups.iter().map(|state| state.counts.ready).sum();
        let is_held_badly = |place: usize| {
            let (slab, within) = (place / self.places, place % self.places);
            let units = self.all[slab].group.map_or(0, |group| self.groups[group].units.units);
            within >= widen(units) || self.free.contains(place)
        };
        let mut held = self.held.runs().flat_map(|(start, len)| start..start + len);
        if let Some(place) = held.find(|&place| is_held_badly(place)) {
            return Some(format!("place {place} is held, and no unit in use"));
        }
        let is_consistent = self.empty.is_consistent() && self.free.is_consistent();
        (!is_consistent || self.free.len() != ready)
            .then(|| format!("{} units are listed as free", self.free.len()))
    }
}
