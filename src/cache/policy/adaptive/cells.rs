//! Leaves by class and age.
//!
//! Each cell is a linked list, the leaf used least recently first. Leaves grow older by moving to the list of
//! the next age: whole lists at once where all of a list are old enough, else a few leaves a call.
//!
//! *Invariant.* A leaf lies in the cell of its class. Its age there is right or, while moves are due, too
//! young.
//!
//! *Cost.* Constant for each call, and 16 bytes for each node number.

use super::CLASSES;
use super::ages::{AGES, Ages};
use crate::base::{Id, widen};
use crate::cache::policy::{NodeId, Tick};

/// The number of cells.
const CELLS: usize = CLASSES * AGES;

/// How many leaves one call moves to the next age at most.
const MOVES: usize = 16;

/// A neighbour in the circular list of a cell: the cell's own end, numbered below `CELLS`, or a leaf.
#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    younger: u32,
    /// When the leaf was used last.
    used: u64,
}

/// A set of cells, as bits.
#[derive(Clone, Copy, Debug, Default)]
struct CellSet([u64; CELLS / 64]);

impl CellSet {
    fn set(&mut self, at: usize, value: bool) {
        let bit = 1 << (at % 64);
        if value { self.0[at / 64] |= bit } else { self.0[at / 64] &= !bit }
    }

    fn first_from(&self, start: usize) -> Option<usize> {
        let mut word = start / 64;
        let mut bits = self.0.get(word)? & (u64::MAX << (start % 64));
        while bits == 0 {
            word += 1;
            bits = *self.0.get(word)?;
        }
        Some(word * 64 + widen(bits.trailing_zeros()))
    }
}

/// The leaves.
#[derive(Debug)]
pub(super) struct Cells {
    ages: Ages,
    /// The ends of the cells, then the leaves by number.
    links: Vec<Link>,
    /// The cells that have leaves, the oldest age first.
    occupied: CellSet,
    /// The same cells by their place in `order`.
    ranked: CellSet,
    /// The cells, the least worth first.
    order: Vec<usize>,
    /// The place of each cell in `order`.
    place: Vec<usize>,
    /// When leaves are next moved to older cells.
    due: Tick,
}

/// Cells are numbered by age, the oldest first, then by class.
const fn cell(class: usize, age: usize) -> usize {
    (AGES - 1 - age) * CLASSES + class
}

impl Cells {
    /// The size of the bookkeeping in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.links.capacity() * size_of::<Link>()
    }

    pub(super) fn new(ages: Ages) -> Self {
        let links = (0..CELLS)
            .map(|cell| {
                let end = u32::try_from(cell).expect("cells are few");
                Link { older: end, younger: end, used: 0 }
            })
            .collect();
        let order: Vec<usize> = (0..CELLS).collect();
        Self {
            ages,
            links,
            occupied: CellSet::default(),
            ranked: CellSet::default(),
            place: order.clone(),
            order,
            due: Tick::default(),
        }
    }

    pub(super) fn insert(&mut self, leaf: NodeId, class: usize, used: Tick, now: Tick) {
        let at = widen(leaf.number()) + CELLS;
        if at >= self.links.len() {
            self.links.resize(at + 1, Link { older: 0, younger: 0, used: 0 });
        }
        self.links[at].used = used.tokens();
        self.append(at, cell(class, self.ages.of(now.since(used))));
    }

    pub(super) fn remove(&mut self, leaf: NodeId) {
        self.unlink(widen(leaf.number()) + CELLS);
    }

    /// The leaf that was used least recently.
    pub(super) fn oldest(&self) -> Option<NodeId> {
        let first = self.occupied.first_from(0)?;
        let end = (first / CLASSES + 1) * CLASSES;
        let heads = (first..end).filter_map(|cell| self.head(cell));
        heads.min_by_key(|&leaf| self.links[leaf].used).map(id)
    }

    /// The oldest leaf of the cell that is worth least.
    pub(super) fn least_worth(&self) -> Option<NodeId> {
        self.head(self.order[self.ranked.first_from(0)?]).map(id)
    }

    /// Orders the cells by the worth of their leaves; those of equal worth, oldest first.
    pub(super) fn rank(&mut self, worth: &[[f64; AGES]; CLASSES]) {
        let of = |cell: usize| worth[cell % CLASSES][AGES - 1 - cell / CLASSES];
        self.order.sort_unstable_by(|&a, &b| of(a).total_cmp(&of(b)).then(a.cmp(&b)));
        self.ranked = CellSet::default();
        for (place, &cell) in self.order.iter().enumerate() {
            self.place[cell] = place;
            self.ranked.set(place, self.links[cell].younger as usize != cell);
        }
    }

    /// Moves leaves that have grown older.
    pub(super) fn age(&mut self, now: Tick) {
        if now < self.due {
            return;
        }
        let mut left = MOVES;
        let mut next = self.occupied.first_from(CLASSES);
        while let Some(from) = next {
            next = self.occupied.first_from(from + 1);
            let to = from - CLASSES;
            let floor = self.ages.floor(AGES - 1 - to / CLASSES);
            let is_old = |used: u64| now.since(Tick::new(used)) >= floor;
            if is_old(self.links[widen(self.links[from].older)].used) {
                self.splice(from, to);
                continue;
            }
            while let Some(head) = self.head(from).filter(|&head| is_old(self.links[head].used)) {
                if left == 0 {
                    return;
                }
                left -= 1;
                self.unlink(head);
                self.append(head, to);
            }
        }
        self.due = Tick::new(now.tokens() + self.ages.unit().div_ceil(4));
    }

    /// The oldest leaf of a cell.
    fn head(&self, cell: usize) -> Option<usize> {
        let head = widen(self.links[cell].younger);
        (head != cell).then_some(head)
    }

    fn mark(&mut self, cell: usize, occupied: bool) {
        self.occupied.set(cell, occupied);
        self.ranked.set(self.place[cell], occupied);
    }

    fn join(&mut self, older: usize, younger: usize) {
        self.links[older].younger = link(younger);
        self.links[younger].older = link(older);
    }

    fn append(&mut self, leaf: usize, cell: usize) {
        let tail = widen(self.links[cell].older);
        // A parent that outlived its children can be older than the leaves that are there already.
        if tail != cell && self.head(cell).is_some_and(|head| self.links[leaf].used <= self.links[head].used)
        {
            let head = widen(self.links[cell].younger);
            self.join(cell, leaf);
            self.join(leaf, head);
        } else {
            self.join(tail, leaf);
            self.join(leaf, cell);
        }
        self.mark(cell, true);
    }

    fn unlink(&mut self, leaf: usize) {
        let Link { older, younger, .. } = self.links[leaf];
        self.join(widen(older), widen(younger));
        if older == younger {
            self.mark(widen(older), false);
        }
    }

    /// Appends a whole list to another.
    fn splice(&mut self, from: usize, to: usize) {
        let (head, tail) = (widen(self.links[from].younger), widen(self.links[from].older));
        self.join(widen(self.links[to].older), head);
        self.join(tail, to);
        self.join(from, from);
        self.mark(from, false);
        self.mark(to, true);
    }
}

fn link(at: usize) -> u32 {
    u32::try_from(at).expect("node numbers stay within i32, and cells are few")
}

fn id(link: usize) -> NodeId {
    NodeId::new(self::link(link - CELLS))
}
