//! The blocks of a tree: which units end in each, and what needs them.

use std::collections::{BTreeMap, HashSet};

use crate::base::{Id, Page, widen};
use crate::layout::{Group, GroupKind, PrefixUnits};

use super::UnitNumbers;

/// A unit that was never there, and a block before the first one.
const NONE: u32 = u32::MAX;

/// A unit that was there.
const EVICTED: u32 = u32::MAX - 1;

/// Whether a block has the unit of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    There(u32),
    Evicted,
    /// It was not published.
    Absent,
}

impl Presence {
    /// Returns the number of the unit.
    const fn number(self) -> Option<u32> {
        match self {
            Self::There(unit) => Some(unit),
            Self::Absent | Self::Evicted => None,
        }
    }
}

/// What a group has in blocks.
#[derive(Debug)]
struct Column {
    /// Whether it is of states, which are in no block.
    is_state: bool,
    /// The pages of a unit, which ends in the block of the last one.
    pages: usize,
    /// The most units of a window or chunk that a lease needs, its sinks included.
    most_of_lease: usize,
    /// The units of sinks, which stay as long as their blocks.
    sinks: usize,
    /// Whether units count what needs them: those of windows and chunks.
    is_counted: bool,
    /// The unit that ends in each block: [`NONE`], [`EVICTED`] or a number. Empty for states.
    units: Vec<u32>,
    /// How many ends and leases need the unit that ends, or would end, in each block. Empty unless counted.
    needs: Vec<u32>,
    unneeded: Unneeded,
    /// The number of units.
    count: usize,
}

/// The units of a group that are there, that nothing needs and that are no sinks.
#[derive(Debug)]
struct Unneeded {
    /// The numbers of a slab.
    of_slab: u32,
    /// The units, with their blocks.
    units: BTreeMap<u32, Page>,
    /// The numbers of units by slab, without those of no unit.
    slabs: BTreeMap<u32, u32>,
}

impl Unneeded {
    fn insert(&mut self, unit: u32, block: Page) {
        self.units.insert(unit, block);
        *self.slabs.entry(unit / self.of_slab).or_default() += 1;
    }

    fn remove(&mut self, unit: u32) -> Option<Page> {
        let block = self.units.remove(&unit)?;
        let slab = unit / self.of_slab;
        let count = self.slabs.get_mut(&slab).expect("the slab of a unit");
        *count -= 1;
        if *count == 0 {
            self.slabs.remove(&slab);
        }
        Some(block)
    }
}

/// The blocks by number.
#[derive(Debug)]
pub(super) struct Blocks {
    /// The block before each on its path, or [`NONE`].
    previous: Vec<u32>,
    /// The number of blocks before each on its path.
    pages: Vec<u32>,
    /// The blocks behind which an end was evicted.
    former_ends: HashSet<Page>,
    columns: Vec<Column>,
    /// Blocks that are not in use; the last one is taken first.
    vacant: Vec<Page>,
}

/// The blocks of a path, which is followed from its end as far as they are asked for.
#[derive(Debug)]
pub(super) struct Path<'a> {
    blocks: &'a Blocks,
    pages: usize,
    /// The blocks from the last one on.
    known: Vec<Page>,
}

impl Path<'_> {
    /// Returns the block of a page.
    pub(super) fn block(&mut self, page: usize) -> Page {
        let back = self.pages - 1 - page;
        while self.known.len() <= back {
            let last = self.known[self.known.len() - 1];
            self.known.push(self.blocks.previous(last).expect("a page before another"));
        }
        self.known[back]
    }
}

impl Blocks {
    pub(super) fn new(groups: &[Group], numbers: &[UnitNumbers], page_size: usize) -> Self {
        let column = |(group, numbers): (&Group, &UnitNumbers)| {
            let tokens = group.unit_tokens(page_size);
            Column {
                is_state: tokens.is_none(),
                most_of_lease: tokens.map_or(0, |tokens| most_of_lease(group.kind(), tokens)),
                pages: tokens.map_or(1, |tokens| tokens / page_size),
                sinks: tokens.map_or(0, |tokens| group.kind().sinks().div_ceil(tokens)),
                is_counted: matches!(group.kind(), GroupKind::Window { .. } | GroupKind::Chunk { .. }),
                units: Vec::new(),
                needs: Vec::new(),
                unneeded: Unneeded {
                    of_slab: numbers.of_slab,
                    units: BTreeMap::new(),
                    slabs: BTreeMap::new(),
                },
                count: 0,
            }
        };
        Self {
            previous: Vec::new(),
            pages: Vec::new(),
            former_ends: HashSet::new(),
            columns: groups.iter().zip(numbers).map(column).collect(),
            vacant: Vec::new(),
        }
    }

    /// Returns the blocks of a path of so many pages that ends in `last`.
    pub(super) fn path(&self, last: Page, pages: usize) -> Path<'_> {
        Path { blocks: self, pages, known: vec![last] }
    }

    /// Returns the pages of a unit.
    pub(super) fn pages_of_unit(&self, group: usize) -> usize {
        self.columns[group].pages
    }

    /// Returns whether the units of a group count what needs them: those of windows and chunks.
    pub(super) fn is_counted(&self, group: usize) -> bool {
        self.columns[group].is_counted
    }

    /// Returns the most units of a window or chunk that a lease needs.
    pub(super) fn most_of_lease(&self, group: usize) -> usize {
        self.columns[group].most_of_lease
    }

    /// Returns whether a prefix has the unit at `position` of a group as long as it has its last page.
    pub(super) fn is_required(&self, group: usize, position: usize) -> bool {
        let column = &self.columns[group];
        !column.is_counted || position < column.sinks
    }

    /// Returns the number of units of a group.
    pub(super) fn count(&self, group: usize) -> usize {
        self.columns[group].count
    }

    /// Returns the number of units of a group that nothing needs.
    pub(super) fn unneeded(&self, group: usize) -> usize {
        self.columns[group].unneeded.units.len()
    }

    /// Returns the slabs with units of a group that nothing needs: their first number, and how many such units.
    pub(super) fn unneeded_slabs(&self, group: usize) -> impl Iterator<Item = (u32, u32)> + '_ {
        let Unneeded { of_slab, slabs, .. } = &self.columns[group].unneeded;
        slabs.iter().map(move |(&slab, &count)| (slab * of_slab, count))
    }

    /// Returns the blocks of the units of a group that nothing needs, from number `first` on.
    pub(super) fn unneeded_blocks(&self, group: usize, first: u32) -> impl Iterator<Item = Page> + '_ {
        self.columns[group].unneeded.units.range(first..).map(|(_, &block)| block)
    }

    /// Takes up to `most` units of a group that nothing needs from their blocks, from number `first` on.
    pub(super) fn take_unneeded(&mut self, group: usize, first: u32, most: usize) -> Vec<u32> {
        let column = &mut self.columns[group];
        let units: Vec<u32> =
            column.unneeded.units.range(first..).take(most).map(|(&unit, _)| unit).collect();
        for &unit in &units {
            let block = column.unneeded.remove(unit).expect("a unit that nothing needs");
            column.units[widen(block.number())] = EVICTED;
            column.count -= 1;
        }
        units
    }

    /// Returns the block of a unit of a group that nothing needs.
    pub(super) fn unneeded_block(&self, group: usize, unit: u32) -> Option<Page> {
        self.columns[group].unneeded.units.get(&unit).copied()
    }

    /// Returns the unit of a group that ends in a block.
    pub(super) fn unit(&self, group: usize, block: Page) -> Option<u32> {
        self.presence(group, block).number()
    }

    pub(super) fn presence(&self, group: usize, block: Page) -> Presence {
        match self.columns[group].units[widen(block.number())] {
            NONE => Presence::Absent,
            EVICTED => Presence::Evicted,
            unit => Presence::There(unit),
        }
    }

    /// Returns the block before `block` on its path.
    pub(super) fn previous(&self, block: Page) -> Option<Page> {
        Some(self.previous[widen(block.number())]).filter(|&before| before != NONE).map(Page::new)
    }

    /// Returns how many ends and leases need the unit of a group that ends in a block.
    pub(super) fn needs(&self, group: usize, block: Page) -> u32 {
        self.columns[group].needs.get(widen(block.number())).copied().unwrap_or(0)
    }

    /// Records that the end behind a block was evicted.
    pub(super) fn forget_end(&mut self, block: Page) {
        self.former_ends.insert(block);
    }

    /// Returns whether an end behind a block was evicted.
    pub(super) fn had_end(&self, block: Page) -> bool {
        self.former_ends.contains(&block)
    }

    /// Returns the number of blocks before `block` on its path.
    pub(super) fn page(&self, block: Page) -> usize {
        widen(self.pages[widen(block.number())])
    }

    /// Takes `count` blocks that follow `last` on a path of `before` pages. They have no units.
    pub(super) fn add(&mut self, last: Option<Page>, before: usize, count: usize) -> Vec<Page> {
        let mut blocks = self.vacant.split_off(self.vacant.len().saturating_sub(count));
        let known = self.previous.len();
        let all = known + count - blocks.len();
        blocks.extend((known..all).map(|block| Page::new(narrow(block))));
        self.previous.resize(all, NONE);
        self.pages.resize(all, 0);
        for column in self.columns.iter_mut().filter(|column| !column.is_state) {
            column.units.resize(all, NONE);
            if column.is_counted {
                column.needs.resize(all, 0);
            }
        }
        let mut previous = last.map_or(NONE, Id::number);
        for (block, page) in blocks.iter().zip(before..) {
            let at = widen(block.number());
            (self.previous[at], self.pages[at]) = (previous, narrow(page));
            previous = block.number();
        }
        blocks
    }

    /// Sets the unit of a group that ends in a block, which has none.
    pub(super) fn set(&mut self, group: usize, block: Page, unit: u32) {
        let at = widen(block.number());
        let position = widen(self.pages[at]) / self.columns[group].pages;
        let is_required = self.is_required(group, position);
        let column = &mut self.columns[group];
        column.units[at] = unit;
        column.count += 1;
        if !is_required && column.needs[at] == 0 {
            column.unneeded.insert(unit, block);
        }
    }

    /// Gives a block up. Calls `free` with the group and the number of each of its units.
    pub(super) fn remove(&mut self, block: Page, mut free: impl FnMut(usize, u32)) {
        let at = widen(block.number());
        for (group, column) in self.columns.iter_mut().enumerate() {
            debug_assert!(column.needs.get(at).is_none_or(|&needs| needs == 0), "an end needs {block}");
            let Some(place) = column.units.get_mut(at) else { continue };
            let unit = std::mem::replace(place, NONE);
            if unit < EVICTED {
                column.count -= 1;
                if column.is_counted {
                    column.unneeded.remove(unit);
                }
                free(group, unit);
            }
        }
        if !self.former_ends.is_empty() {
            self.former_ends.remove(&block);
        }
        self.vacant.push(block);
    }

    /// Adds or removes something that needs the units at the end of a prefix of `tokens` tokens whose last block is
    /// `last`.
    pub(super) fn count_needs(
        &mut self,
        groups: &[Group],
        page_size: usize,
        last: Page,
        tokens: usize,
        is_needed: bool,
    ) {
        let Self { previous, columns, .. } = self;
        for (group, column) in groups.iter().zip(columns).filter(|(_, column)| column.is_counted) {
            let Some(PrefixUnits { units, .. }) = group.prefix_units(tokens, page_size) else { continue };
            // Sinks stay anyway.
            let begin = units.start.max(column.sinks) * column.pages;
            let end = units.end * column.pages;
            let (mut at, mut page) = (last.number(), tokens / page_size);
            while page > begin {
                page -= 1;
                if page < end && (page + 1).is_multiple_of(column.pages) {
                    column.count_need(Page::new(at), is_needed);
                }
                at = previous[widen(at)];
            }
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let words = |column: &Column| column.units.capacity() + column.needs.capacity();
        let words: usize = self.columns.iter().map(words).sum();
        let unneeded: usize = (0..self.columns.len()).map(|group| self.unneeded(group)).sum();
        let own = self.previous.capacity() + self.pages.capacity() + self.vacant.capacity();
        (words + own) * size_of::<u32>() + unneeded * size_of::<(u32, Page)>()
    }

    /// Returns the number of blocks in use.
    pub(super) fn len(&self) -> usize {
        self.previous.len() - self.vacant.len()
    }
}

impl Column {
    fn count_need(&mut self, block: Page, is_needed: bool) {
        let at = widen(block.number());
        let (needs, unit) = (&mut self.needs[at], self.units[at]);
        if is_needed {
            *needs += 1;
            if *needs == 1 && unit < EVICTED {
                self.unneeded.remove(unit);
            }
            return;
        }
        *needs -= 1;
        if *needs == 0 && unit < EVICTED {
            self.unneeded.insert(unit, block);
        }
    }
}

/// Returns the most units, of `each` tokens, that a lease needs of a window or chunk.
fn most_of_lease(kind: GroupKind, each: usize) -> usize {
    match kind {
        GroupKind::Full | GroupKind::State => 0,
        GroupKind::Window { tokens, sinks } | GroupKind::Chunk { tokens, sinks } => {
            tokens.div_ceil(each) + 1 + sinks.div_ceil(each)
        }
    }
}

fn narrow(count: usize) -> u32 {
    crate::base::bounded::narrow(count)
}
