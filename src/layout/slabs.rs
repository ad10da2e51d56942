//! Slabs of one size that any group can have, and the choice of that size.

use crate::base::{Error, Result};

use super::cache_layout::{CacheLayout, Group, GroupKind};
use super::placement::PlaneRuns;

/// What limits the choice of [`SlabLayout::choose`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabOptions {
    /// The size of a slab is a multiple of this: of the pages of virtual memory, where they come and go.
    pub granularity: usize,
    /// Planes that lie side by side begin at multiples of this; a power of two.
    pub alignment: usize,
}

impl Default for SlabOptions {
    fn default() -> Self {
        Self { granularity: 1, alignment: 16 }
    }
}

/// How a group lies in its slabs.
///
/// A slab has `runs` runs of `units` units, one behind the other: for each layer one a plane, or one for all
/// planes side by side where their bytes differ. Every unit of a run takes `unit_step` bytes, which divide the
/// slab; so a run is one ordinary tensor over all slabs, in which unit `i` of slab `s` has the number
/// `s * numbers + i`.
///
/// ```
/// use kvpool::base::DType;
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabGroup, SlabLayout, SlabOptions};
/// let k = vec![Plane::new("k", DType::BF16, &[2, 64]).unwrap()];
/// let full = Group::new("full", GroupKind::Full, &[0, 1], k).unwrap();
/// let layout = CacheLayout::new("a model", 16, vec![full]).unwrap();
/// let slabs = SlabLayout::choose(&layout, 1 << 20, SlabOptions::default()).unwrap();
/// let group: &SlabGroup = &slabs.groups()[0];
/// assert!(group.usable() > 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabGroup {
    /// Units of a slab.
    pub units: usize,
    /// Numbers from the first unit of a slab to that of the next.
    pub numbers: usize,
    /// Runs of a slab.
    pub runs: usize,
    /// Bytes from one unit to the next in a run.
    pub unit_step: usize,
    /// Bytes of a unit in a run that are not padding.
    pub unit_bytes: usize,
    /// What each plane of a layer begins at a multiple of, if they lie side by side in one unit. If not, each has a
    /// run.
    pub side_by_side: Option<usize>,
    /// Whether each layer of a request has a unit of its own, of one index space for all layers.
    pub by_layer: bool,
}

impl SlabGroup {
    /// Returns the bytes of a slab that units can hold.
    #[must_use]
    pub const fn usable(&self) -> usize {
        self.units * self.runs * self.unit_bytes
    }
}

/// An arena of slabs of equal size for the groups of a layout. The first slab is padding: unit 0 of every group is
/// in it, and nobody is given any of it.
///
/// ```
/// use kvpool::base::DType;
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabLayout, SlabOptions};
/// let kv = || vec![
///     Plane::new("k", DType::BF16, &[4, 128]).unwrap(),
///     Plane::new("v", DType::BF16, &[4, 128]).unwrap(),
/// ];
/// let state = vec![Plane::new("recurrent", DType::F32, &[8, 128, 128]).unwrap()];
/// let layout = CacheLayout::new("a hybrid model", 16, vec![
///     Group::new("full", GroupKind::Full, &[3, 7], kv()).unwrap(),
///     Group::new("state", GroupKind::State, &[0, 1, 2, 4, 5, 6], state).unwrap(),
/// ]).unwrap();
/// let slabs = SlabLayout::choose(&layout, 1 << 30, SlabOptions::default()).unwrap();
/// assert!(slabs.lost() < 0.03);
/// // K of layer 7 is the third run of each slab.
/// let k = slabs.plane(&layout, 0, 0);
/// let full = slabs.groups()[0];
/// assert_eq!(k.at(1, full.numbers), slabs.slab_bytes() + 2 * full.units * full.unit_step);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabLayout {
    arena_bytes: usize,
    slab_bytes: usize,
    slabs: usize,
    groups: Vec<SlabGroup>,
}

/// The bytes of a unit in a run, before a slab is chosen.
#[derive(Clone, Copy, Debug)]
struct UnitShape {
    runs: usize,
    /// Bytes without padding.
    bytes: usize,
    /// Bytes with the padding that alignment takes.
    least_step: usize,
    /// Whether the unit may be followed by padding.
    may_pad: bool,
    side_by_side: Option<usize>,
    by_layer: bool,
    /// The numbers of one unit of the group: more than one, if each layer has its own.
    of_unit: usize,
}

impl UnitShape {
    /// Describes the units of a group.
    fn new(group: &Group, page_size: usize, alignment: usize, by_layer: bool) -> Self {
        let entries = group.unit_entries(page_size);
        let planes = || group.planes().iter().map(|plane| entries * plane.entry_bytes());
        let is_state = group.kind() == GroupKind::State;
        let by_layer = by_layer && is_state;
        let (layers, of_unit) = if by_layer { (1, group.layers().len()) } else { (group.layers().len(), 1) };
        let first = entries * group.planes()[0].entry_bytes();
        if planes().all(|bytes| bytes == first) {
            let runs = layers * group.planes().len();
            let may_pad = is_state || group.planes().len() == 1;
            return Self {
                runs,
                bytes: first,
                least_step: first,
                may_pad,
                side_by_side: None,
                by_layer,
                of_unit,
            };
        }
        Self {
            runs: layers,
            bytes: planes().sum(),
            least_step: planes().map(|bytes| bytes.next_multiple_of(alignment)).sum(),
            may_pad: true,
            side_by_side: Some(alignment),
            by_layer,
            of_unit,
        }
    }

    /// Returns the fewest bytes of a unit in a run that divide a slab, with little padding if it may have some.
    fn step_of(&self, slab_bytes: usize, alignment: usize) -> Option<usize> {
        if !self.may_pad {
            return Some(self.least_step);
        }
        // As much of the alignment as the unit has without padding.
        let multiple = 1 << self.least_step.trailing_zeros().min(alignment.trailing_zeros());
        let is_aligned = |units: &usize| {
            slab_bytes.is_multiple_of(*units) && (slab_bytes / units).is_multiple_of(multiple)
        };
        let most = slab_bytes / self.least_step;
        let is_little = |units: &usize| ratio(slab_bytes / units - self.bytes, self.bytes) <= MOST_PADDING;
        (1..=most).rev().take(NEAR).take_while(is_little).find(is_aligned).map(|units| slab_bytes / units)
    }

    /// Returns how the units lie in a slab, or `None` if none fits.
    fn within(&self, slab_bytes: usize, unit_step: usize) -> Option<SlabGroup> {
        let &Self { runs, bytes, side_by_side, by_layer, .. } = self;
        let units = slab_bytes / runs.checked_mul(unit_step)?;
        let numbers = slab_bytes / unit_step;
        (units > 0).then_some(SlabGroup {
            units,
            numbers,
            runs,
            unit_step,
            unit_bytes: bytes,
            side_by_side,
            by_layer,
        })
    }
}

/// The cheapest slabs of those that were tried, and their costs.
struct Search<'a> {
    arena_bytes: usize,
    shapes: &'a [UnitShape],
    best: Option<(f64, SlabLayout)>,
}

impl Search<'_> {
    /// Tries slabs of ascending sizes, in which the units of each group take the bytes that `step` says.
    fn try_all(
        &mut self,
        sizes: impl IntoIterator<Item = usize>,
        step: impl Fn(&UnitShape, usize) -> Option<usize>,
    ) {
        for slab_bytes in sizes {
            let slabs = self.arena_bytes / slab_bytes;
            // The padding slab, and half a slab for each group: larger slabs may cost more than the best does.
            let of_slabs = ratio(2 + self.shapes.len(), 2) * ratio(slab_bytes, self.arena_bytes);
            let is_beaten = self.best.as_ref().is_some_and(|(cost, _)| *cost <= of_slabs);
            if slab_bytes > MOST_SLAB || slabs <= self.shapes.len() || is_beaten {
                return;
            }
            let groups: Option<Vec<_>> =
                self.shapes.iter().map(|shape| shape.within(slab_bytes, step(shape, slab_bytes)?)).collect();
            let Some(groups) = groups else { continue };
            // Beside the padding slab, those of a request that has one unit of each group.
            let of_request = |(shape, group): (&UnitShape, &SlabGroup)| shape.of_unit.div_ceil(group.units);
            if self.shapes.iter().zip(&groups).map(of_request).sum::<usize>() >= slabs {
                continue;
            }
            let found = SlabLayout { arena_bytes: self.arena_bytes, slab_bytes, slabs, groups };
            let lost = found.lost();
            let cost = lost + of_slabs + TOO_MUCH * (lost - MOST_LOST).max(0.0);
            if self.best.as_ref().is_none_or(|(least, _)| cost < *least) {
                self.best = Some((cost, found));
            }
        }
    }
}

#[cold]
fn too_small_error(layout: &CacheLayout, arena_bytes: usize) -> Error {
    let unit = |group: &Group| {
        let bytes = group.unit_bytes(layout.page_size()).unwrap_or(usize::MAX);
        format!("{} {bytes}", group.name())
    };
    let units: Vec<_> = layout.groups().iter().map(unit).collect();
    let largest = layout.groups().iter().filter_map(|group| group.unit_bytes(layout.page_size()).ok()).max();
    let is_small = largest.is_some_and(|bytes| arena_bytes / (layout.groups().len() + 1) < bytes);
    let why = if is_small {
        "is too small for slabs of one size in which one request has a unit of every group, beside a slab of padding"
    } else {
        "has no size of slabs up to 1 GiB that the bytes of units divide, in one layer each"
    };
    Error::config(format!(
        "an arena of {arena_bytes} bytes {why}: the bytes of units are {}",
        units.join(", ")
    ))
}

/// Returns the numbers up to `most` without a prime factor above 7, ascending: their multiples have many divisors.
fn smooth_numbers(most: usize) -> Vec<usize> {
    let mut numbers: Vec<usize> = vec![1];
    for prime in [2, 3, 5, 7] {
        let mut at = 0;
        while at < numbers.len() {
            numbers.extend(numbers[at].checked_mul(prime).filter(|number| *number <= most));
            at += 1;
        }
    }
    numbers.retain(|&number| number <= most);
    numbers.sort_unstable();
    numbers
}

#[expect(clippy::cast_precision_loss, reason = "shares of memory need no more than 52 bits")]
fn ratio(part: usize, whole: usize) -> f64 {
    part as f64 / whole as f64
}

/// Returns the least common multiple, unless it is larger than any slab.
fn common_multiple(one: usize, other: usize) -> Option<usize> {
    let (mut divisor, mut rest) = (one, other);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (one / divisor).checked_mul(other).filter(|multiple| *multiple <= MOST_SLAB)
}

/// The numbers of units that are tried for a slab: where there are many small ones, one that divides it is near.
const NEAR: usize = 1 << 12;

/// The largest share of a unit that is padding.
const MOST_PADDING: f64 = 0.03;

/// The share of an arena that should be lost to packing at most; what is lost beyond costs this much more.
const MOST_LOST: f64 = 0.03;
const TOO_MUCH: f64 = 10.0;

/// The costs up to which states lie in one unit a request, which takes one number instead of one a layer.
const GOOD: f64 = 0.03;

/// The largest slab, and the largest number of its sizes that are tried without padding.
const MOST_SLAB: usize = 1 << 30;
const MOST_TRIED: usize = 1 << 20;

/// The number of slabs above which smaller ones gain nothing, up to slabs of 16 MiB: each takes memory of the host.
const MOST_SLABS: usize = 1 << 16;
const LEAST_SLAB: usize = 16 << 20;

impl SlabLayout {
    /// Chooses the size of a slab, and how each group lies in it, for an arena of `arena_bytes`.
    ///
    /// The costs of a choice are the bytes that the group worst off [loses](Self::lost), the padding slab, and half a
    /// slab for each group, as the last slab of each is half full in the mean. States are placed layer by
    /// layer if the costs are above 3 % otherwise. Units may be padded by up to 3 % so that their bytes divide a smaller
    /// slab, unless they are of several planes with a run each, as K and V: kernels take no space between their pages.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) if the arena has no room for a unit of every group at once
    /// and the padding slab, no size up to 1 GiB suits all groups, a unit's number is beyond int32, or an option is
    /// invalid.
    pub fn choose(layout: &CacheLayout, arena_bytes: usize, options: SlabOptions) -> Result<Self> {
        if options.granularity == 0 || !options.alignment.is_power_of_two() {
            let SlabOptions { granularity, alignment } = options;
            return Err(Error::config(format!(
                "granularity is {granularity} and alignment {alignment}; the first is at least 1, the second a power of two"
            )));
        }
        let whole = Self::cheapest(layout, arena_bytes, options, false);
        let has_states = layout.groups().iter().any(|group| group.kind() == GroupKind::State);
        if let Some((cost, slabs)) = &whole
            && (*cost <= GOOD || !has_states)
        {
            return slabs.clone().checked(layout);
        }
        let by_layer = has_states.then(|| Self::cheapest(layout, arena_bytes, options, true)).flatten();
        let best = whole.into_iter().chain(by_layer).min_by(|(one, _), (other, _)| one.total_cmp(other));
        let (_, slabs) = best.ok_or_else(|| too_small_error(layout, arena_bytes))?;
        slabs.checked(layout)
    }

    /// Returns the cheapest choice with states as `by_layer` says, and its costs.
    fn cheapest(
        layout: &CacheLayout,
        arena_bytes: usize,
        options: SlabOptions,
        by_layer: bool,
    ) -> Option<(f64, Self)> {
        let groups = layout.groups().iter();
        let shapes: Vec<_> = groups
            .map(|group| UnitShape::new(group, layout.page_size(), options.alignment, by_layer))
            .collect();
        let granularity = options.granularity;
        let multiple_of = |numbers: &[usize]| {
            numbers.iter().try_fold(granularity, |all, &number| common_multiple(all, number))
        };
        let mut search = Search { arena_bytes, shapes: &shapes, best: None };
        let steps: Vec<_> = shapes.iter().map(|shape| shape.least_step).collect();
        let smallest = (arena_bytes / MOST_SLABS).min(LEAST_SLAB);
        if let Some(least) = multiple_of(&steps) {
            let sizes = (smallest / least + 1..).take(MOST_TRIED).map(|times| least * times);
            search.try_all(sizes, |shape, _| Some(shape.least_step));
        }
        // With padding: sizes with many divisors, in which a unit or a slab of a group is exact.
        let fixed: Vec<_> =
            shapes.iter().filter(|shape| !shape.may_pad).map(|shape| shape.least_step).collect();
        let padded = shapes.iter().filter(|shape| shape.may_pad);
        let mut bases: Vec<_> = padded
            .flat_map(|shape| [1, shape.least_step, shape.runs * shape.least_step])
            .filter_map(|exact| multiple_of(&[&fixed[..], &[exact]].concat()))
            .collect();
        bases.sort_unstable();
        bases.dedup();
        for least in bases {
            let sizes = smooth_numbers(MOST_SLAB / least).into_iter().map(|times| least * times);
            let sizes = sizes.filter(|size| *size > smallest);
            search.try_all(sizes, |shape, slab| shape.step_of(slab, options.alignment));
        }
        search.best
    }

    /// Checks that every number of a unit fits int32.
    fn checked(self, layout: &CacheLayout) -> Result<Self> {
        for (group, slab) in layout.groups().iter().zip(&self.groups) {
            let end = self.slabs.checked_mul(slab.numbers);
            if end.is_none_or(|end| i32::try_from(end).is_err()) {
                return Err(Error::config(format!(
                    "units of group {} in an arena of {} bytes need numbers beyond {}, the largest int32",
                    group.name(),
                    self.arena_bytes,
                    i32::MAX
                )));
            }
        }
        Ok(self)
    }

    /// Returns the bytes of the arena that are in slabs.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.slabs * self.slab_bytes
    }

    /// Returns the bytes of a slab.
    #[must_use]
    pub const fn slab_bytes(&self) -> usize {
        self.slab_bytes
    }

    /// Returns the number of slabs, the padding slab included.
    #[must_use]
    pub const fn slabs(&self) -> usize {
        self.slabs
    }

    /// Returns how each group lies in its slabs.
    #[must_use]
    pub fn groups(&self) -> &[SlabGroup] {
        &self.groups
    }

    /// Returns the share of the arena that the group worst off loses to packing, were all of it its own: what is left
    /// in every slab, padding of units, and what is behind the last slab. The padding slab is not counted.
    #[must_use]
    pub fn lost(&self) -> f64 {
        let usable = self.groups.iter().map(SlabGroup::usable).min().unwrap_or(0);
        1.0 - ratio(self.slabs * usable, self.arena_bytes)
    }

    /// Returns the bytes of the arena that a unit of a group takes, in all layers, its share of what its slab loses
    /// included.
    #[must_use]
    pub fn held_bytes(&self, layout: &CacheLayout, group: usize) -> f64 {
        let slab = &self.groups[group];
        let units = if slab.by_layer { layout.groups()[group].layers().len() } else { 1 };
        ratio(units * self.slab_bytes, slab.units)
    }

    /// Returns where whole units of a group lie, all planes and padding included, as one tensor over the arena for each
    /// run.
    ///
    /// # Panics
    /// If there is no such group.
    #[must_use]
    pub fn unit_runs(&self, group: usize) -> PlaneRuns {
        let SlabGroup { units, numbers, runs, unit_step, .. } = self.groups[group];
        PlaneRuns {
            offset: 0,
            layers: runs,
            layer_step: units * unit_step,
            units: (self.slabs - 1) * numbers + units,
            unit_step,
            unit_bytes: unit_step,
        }
    }

    /// Returns where the units of a plane of a group lie, as one tensor over the arena for each layer.
    ///
    /// # Panics
    /// If there is no such group or plane in `layout`, which the slabs were chosen for.
    #[must_use]
    pub fn plane(&self, layout: &CacheLayout, group: usize, plane: usize) -> PlaneRuns {
        let (declared, slab) = (&layout.groups()[group], &self.groups[group]);
        let run = slab.units * slab.unit_step;
        let unit_bytes =
            |plane: usize| declared.planes()[plane].entry_bytes() * declared.unit_entries(layout.page_size());
        let (offset, runs_of_layer) = if let Some(alignment) = slab.side_by_side {
            ((0..plane).map(|before| unit_bytes(before).next_multiple_of(alignment)).sum(), 1)
        } else {
            (plane * run, declared.planes().len())
        };
        PlaneRuns {
            offset,
            layers: declared.layers().len(),
            layer_step: if slab.by_layer { 0 } else { runs_of_layer * run },
            units: (self.slabs - 1) * slab.numbers + slab.units,
            unit_step: slab.unit_step,
            unit_bytes: unit_bytes(plane),
        }
    }
}
