//! The cache arena: units have one owner, slabs one group, floors hold, and bytes of units in use never overlap.

use std::collections::BTreeMap;

use kvpool::base::{DType, ErrorKind};
use kvpool::layout::{CacheLayout, Group, GroupKind, Plane, SlabOptions};
use kvpool::pool::{CacheArena, CacheArenaConfig, Pool};
use kvpool::tensor::TensorView;

use super::{Source, agree, contents, ensure, host, int, refused, size};

/// What a naive arena knows of a group.
#[derive(Clone)]
struct Share {
    units: usize,
    numbers: usize,
    floor: usize,
    /// Numbers of units in use, and the byte that all of their memory holds.
    live: BTreeMap<usize, u8>,
    dropped: usize,
}

#[derive(Clone)]
struct Model {
    slabs: usize,
    groups: Vec<Share>,
}

impl Model {
    /// The slabs of a group.
    fn of(&self, group: usize) -> Vec<usize> {
        let share = &self.groups[group];
        let mut slabs: Vec<_> = share.live.keys().map(|unit| unit / share.numbers).collect();
        slabs.dedup();
        slabs
    }

    fn empty(&self) -> Vec<usize> {
        let owned: Vec<_> = (0..self.groups.len()).flat_map(|group| self.of(group)).collect();
        (1..self.slabs).filter(|slab| !owned.contains(slab)).collect()
    }

    /// Takes a unit as the arena documents it, from the slab with the fewest free ones. Whether it took a slab.
    fn take_one(&mut self, group: usize, tag: u8) -> Option<(usize, bool)> {
        let used = |slab: usize| {
            let share = &self.groups[group];
            share.live.range(slab * share.numbers..(slab + 1) * share.numbers).count()
        };
        let units = self.groups[group].units;
        let fullest = self.of(group).into_iter().filter(|&slab| used(slab) < units);
        let fullest = fullest.min_by_key(|&slab| (units - used(slab), slab));
        let slab = fullest.or_else(|| self.empty().first().copied())?;
        let share = &mut self.groups[group];
        let first = slab * share.numbers;
        let unit = (first..first + units).find(|unit| !share.live.contains_key(unit)).expect("room");
        share.live.insert(unit, tag);
        Some((unit, fullest.is_none()))
    }

    /// All or nothing.
    fn take(&mut self, wanted: &[usize], tag: u8) -> Option<Vec<Vec<usize>>> {
        let mut after = self.clone();
        let (mut taken, mut grew) = (Vec::new(), false);
        for (group, &count) in wanted.iter().enumerate() {
            let mut units = Vec::new();
            for _ in 0..count {
                let (unit, is_new) = after.take_one(group, tag)?;
                grew |= is_new;
                units.push(unit);
            }
            taken.push(units);
        }
        let kept = |group: usize| after.groups[group].floor.saturating_sub(after.of(group).len());
        let kept: usize = (0..after.groups.len()).map(kept).sum();
        if grew && after.empty().len() < kept {
            return None;
        }
        *self = after;
        Some(taken)
    }
}

/// A layout of a few small groups of every kind.
fn layout(source: &mut Source<'_>) -> CacheLayout {
    let count = 1 + source.below(3);
    let groups = (0..count).map(|number| {
        let kind = source.of(&[
            GroupKind::Full,
            GroupKind::State,
            GroupKind::Window { tokens: 5, sinks: 1 },
            GroupKind::Chunk { tokens: 8, sinks: 0 },
        ]);
        let dtype = source.of(&[DType::U8, DType::BF16, DType::F32]);
        let heads = source.of(&[1, 2, 3, 4, 8]);
        let mut planes = vec![Plane::new("k", dtype, &[heads, 16]).expect("small")];
        if source.flip() {
            let dim = source.of(&[16, 16, 8]);
            planes.push(Plane::new("v", dtype, &[heads, dim]).expect("small"));
        }
        if source.rarely(3) {
            let other = source.of(&[DType::U8, DType::F32]);
            planes.push(Plane::new("scale", other, &[source.of(&[1, 2, 5])]).expect("small"));
        }
        let layers: Vec<_> = (0..=source.below(3)).map(|layer| 2 * layer).collect();
        let stride = if kind == GroupKind::State { 1 } else { source.of(&[1, 1, 4, 8]) };
        let group = Group::new(&format!("group_{number}"), kind, &layers, planes);
        group.and_then(|group| group.with_stride(stride)).expect("valid")
    });
    let groups = groups.collect();
    CacheLayout::new("model", source.of(&[1, 2, 4]), groups).expect("small")
}

pub(super) fn run(source: &mut Source<'_>) {
    let layout = layout(source);
    let arena_bytes = source.of(&[1 << 12, 1 << 14, 20_000]);
    let slabs = SlabOptions { granularity: source.of(&[1, 1, 256]), alignment: 16 };
    let strict = source.rarely(3);
    let mut config = CacheArenaConfig { layout, arena_bytes, floors: Vec::new(), slabs, strict };
    let made = CacheArena::new(&config, &host()).and_then(|arena| {
        let half = (arena.slabs().slabs() - 1) / 2;
        let groups = config.layout.groups().len();
        config.floors = (0..groups).map(|_| source.below(half / groups + 1)).collect();
        CacheArena::new(&config, &host())
    });
    let arena = match made {
        Ok(arena) => arena,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            while source.next_step() {
                source.below(256);
            }
            return;
        }
    };
    let share = |(slab, &floor): (&kvpool::layout::SlabGroup, &usize)| Share {
        units: slab.units,
        numbers: slab.numbers,
        floor,
        live: BTreeMap::new(),
        dropped: 0,
    };
    let groups = arena.slabs().groups().iter().zip(&config.floors).map(share).collect();
    let mut model = Model { slabs: arena.slabs().slabs(), groups };
    assert!(arena.slabs().bytes() <= arena_bytes);
    let mut tag = 0;
    while source.next_step() {
        tag = tag % 255 + 1;
        step(source, &arena, &mut model, tag);
        check(&arena, &model);
    }
    for group in 0..model.groups.len() {
        let units: Vec<_> = model.groups[group].live.keys().map(|&unit| int(unit)).collect();
        assert_eq!(arena.free(group, &units).expect("live").dropped(), 0);
    }
    assert_eq!(arena.stats().get("available"), arena.stats().get("capacity"));
}

/// The memory of a unit in a plane of a layer.
fn place(view: &TensorView, unit: usize) -> (usize, usize) {
    let bytes = view.dtype().size();
    let of_unit: i64 = view.shape().as_slice()[1..].iter().product();
    let step = usize::try_from(view.strides().as_slice()[0]).expect("positive");
    (view.offset() + unit * step * bytes, usize::try_from(of_unit).expect("positive") * bytes)
}

/// Calls `each` with the memory of a unit, in every layer and plane, and with what it holds: no two are alike. If units
/// are placed layer by layer, all layers have the same memory.
fn places(
    arena: &CacheArena,
    group: usize,
    unit: usize,
    tag: u8,
    mut each: impl FnMut(&TensorView, usize, usize, u8),
) {
    let declared = &arena.layout().groups()[group];
    let layers = if arena.slabs().groups()[group].by_layer { 1 } else { declared.layers().len() };
    let mut value = tag;
    for &layer in &declared.layers()[..layers] {
        for plane in 0..declared.planes().len() {
            let view = arena.buffer(group, plane, layer).expect("a plane of a layer");
            let (offset, bytes) = place(&view, unit);
            each(&view, offset, bytes, value);
            value = value.wrapping_add(37);
        }
    }
}

fn step(source: &mut Source<'_>, arena: &CacheArena, model: &mut Model, tag: u8) {
    let groups = model.groups.len();
    match source.below(8) {
        0..=3 => {
            let mut count = |group: usize| {
                let most = (model.groups[group].units * 2 + 1).min(20);
                if source.flip() { source.below(most) } else { source.below(3) }
            };
            let wanted: Vec<_> = (0..groups).map(&mut count).collect();
            let numbers: Vec<_> = wanted
                .iter()
                .enumerate()
                .map(|(group, count)| count * arena.numbers_of_unit(group))
                .collect();
            let fits = arena.fits(&wanted).expect("one a group");
            let expected = model.take(&numbers, tag);
            assert_eq!(fits, expected.is_some());
            let taken = arena.alloc(&wanted).expect("memory");
            let taken = taken.map(|groups| {
                groups
                    .iter()
                    .map(|units| units.iter().map(|&unit| size(unit)).collect::<Vec<_>>())
                    .collect::<Vec<_>>()
            });
            assert_eq!(taken, expected);
            for (group, units) in taken.unwrap_or_default().into_iter().enumerate() {
                for unit in units {
                    places(arena, group, unit, tag, |view, offset, bytes, value| {
                        contents::fill(view.region(), offset, bytes, value);
                    });
                }
            }
        }
        4..=6 => {
            let group = source.below(groups);
            let share = &model.groups[group];
            let end = model.slabs * share.numbers;
            let count = source.below(6);
            let units: Vec<_> = (0..count)
                .map(|_| {
                    let live = source.below(share.live.len().max(1));
                    let live = share.live.keys().nth(live).map(|&unit| int(unit));
                    if source.rarely(4) { source.index(end) } else { live.unwrap_or(0) }
                })
                .collect();
            let mut left = share.live.clone();
            let is_freed =
                |unit: &&i64| usize::try_from(**unit).is_ok_and(|unit| left.remove(&unit).is_some());
            let freed = units.iter().filter(is_freed).count();
            let bad = units.len() - freed;
            let expected = ensure(bad == 0 || !arena.strict(), ErrorKind::IndexOwnership);
            let Some(report) = agree(arena.free(group, &units), &expected) else { return };
            assert_eq!(report.dropped(), bad);
            model.groups[group].live = left;
            model.groups[group].dropped += bad;
        }
        _ => {
            if source.rarely(8) {
                arena.clear();
                model.groups.iter_mut().for_each(|share| share.live.clear());
            }
            refused(arena.alloc(&vec![1; groups + 1]), ErrorKind::Argument);
            refused(arena.free(groups, &[]), ErrorKind::Argument);
            refused(arena.group_counts(groups), ErrorKind::Argument);
            let layers = arena.layout().groups()[0].layers().len() * 2;
            refused(arena.buffer(0, 0, layers), ErrorKind::Index);
            refused(arena.buffer(0, 9, 0), ErrorKind::Index);
            refused(arena.buffer(groups, 0, 0), ErrorKind::Argument);
        }
    }
}

fn check(arena: &CacheArena, model: &Model) {
    arena.verify().expect("consistent");
    let stats = arena.stats();
    assert_eq!(stats.get("available"), Some(model.empty().len()));
    assert_eq!(stats.get("dropped_frees"), Some(model.groups.iter().map(|share| share.dropped).sum()));
    for (group, share) in model.groups.iter().enumerate() {
        let (counts, available) = arena.group_counts(group).expect("a group");
        assert_eq!(counts.in_use, share.live.len());
        assert_eq!(counts.slabs, model.of(group).len());
        let one = |count: usize| {
            let mut wanted = vec![0; model.groups.len()];
            wanted[group] = count;
            model.clone().take(&wanted, 0).is_some()
        };
        // A naive arena takes them one by one.
        assert!(available > 30 || (one(available) && !one(available + 1)));
        for (&unit, &tag) in &share.live {
            places(arena, group, unit, tag, |view, offset, bytes, value| {
                let is_own = contents::are_all(view.region(), offset, bytes, value);
                assert!(is_own, "unit {unit} of group {group} was overwritten");
            });
        }
    }
}
