//! Token slots as plain lists: the free pages in order, and the number of owners of each other page.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvpool::base::ErrorKind;
use kvpool::index::{Fit, Order};

use super::{Refusal, Verdict, ensure};

/// Pages that one free removed an owner from, in the order in which they return.
#[derive(Clone, Debug, Default)]
pub(super) struct Freed {
    /// Pages without another owner.
    alone: Vec<usize>,
    /// Pages with other owners, once per occurrence.
    shared: Vec<usize>,
}

impl Freed {
    fn has(&self, page: usize) -> bool {
        self.alone.contains(&page) || self.shared.contains(&page)
    }
}

/// The owners of each page.
#[derive(Clone, Debug)]
pub(super) struct SlotModel {
    pub(super) page_size: usize,
    pub(super) pages: usize,
    order: Order,
    pub(super) free: VecDeque<usize>,
    pub(super) released: BTreeSet<usize>,
    /// The owners that are not being removed, by page. No entry is 0.
    pub(super) owners: BTreeMap<usize, usize>,
    /// Pages ever handed out.
    pub(super) taken: BTreeSet<usize>,
    pub(super) fenced: Vec<(usize, Freed)>,
    pub(super) dropped: usize,
    pub(super) high_water: usize,
    /// The number of times that a page lost its last owner.
    pub(super) frees: usize,
    /// That number when each page last did.
    freed: BTreeMap<usize, usize>,
}

impl SlotModel {
    pub(super) fn new(size: usize, page_size: usize, order: Order) -> Self {
        let pages = size / page_size;
        Self {
            page_size,
            pages,
            order,
            free: (1..=pages).collect(),
            released: BTreeSet::new(),
            owners: BTreeMap::new(),
            taken: BTreeSet::new(),
            fenced: Vec::new(),
            dropped: 0,
            high_water: 0,
            frees: 0,
            freed: BTreeMap::new(),
        }
    }

    /// Frees everything; dropped frees stay counted.
    pub(super) fn clear(&mut self) {
        let fresh = Self::new(self.pages * self.page_size, self.page_size, self.order);
        *self = Self { dropped: self.dropped, ..fresh };
    }

    /// Free pages.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.released.len()
    }

    /// Pages that wait for a fence and have no remaining owner.
    pub(super) fn fenced_alone(&self) -> usize {
        (1..=self.pages).filter(|page| self.is_in_use(*page) && !self.is_owned(*page)).count()
    }

    /// Owners of a shared page that are removed when their fence passes.
    fn leaving(&self, page: usize) -> usize {
        let named = |given: &Freed| given.shared.iter().filter(|shared| **shared == page).count();
        self.fenced.iter().map(|(_, given)| named(given)).sum()
    }

    /// Pages with more than one owner, including those being removed.
    pub(super) fn shared(&self) -> usize {
        (1..=self.pages).filter(|page| self.stay(*page) + self.leaving(*page) > 1).count()
    }

    fn stay(&self, page: usize) -> usize {
        self.owners.get(&page).copied().unwrap_or(0)
    }

    pub(super) fn is_owned(&self, page: usize) -> bool {
        self.owners.contains_key(&page)
    }

    pub(super) fn is_in_use(&self, page: usize) -> bool {
        self.is_owned(page) || self.fenced.iter().any(|(_, given)| given.has(page))
    }

    /// Whether a page has another owner, or one whose fence has not passed.
    pub(super) fn is_shared(&self, page: usize) -> bool {
        self.stay(page) > 1 || self.leaving(page) > 0
    }

    pub(super) fn merge(&mut self) {
        if self.order == Order::Sorted {
            let mut all: Vec<usize> = self.free.drain(..).chain(std::mem::take(&mut self.released)).collect();
            all.sort_unstable();
            self.free = all.into();
        }
    }

    fn own(&mut self, pages: impl IntoIterator<Item = usize>) {
        for page in pages {
            assert!(self.owners.insert(page, 1).is_none());
            self.taken.insert(page);
        }
        self.high_water = self.high_water.max(self.pages - self.available());
    }

    /// Takes whole pages, all or none.
    pub(super) fn take(&mut self, count: usize) -> Option<Vec<usize>> {
        if count > self.free.len() {
            self.merge();
        }
        if count > self.free.len() {
            return None;
        }
        let taken: Vec<usize> = self.free.drain(..count).collect();
        self.own(taken.iter().copied());
        Some(taken)
    }

    fn slots_of(&self, pages: &[usize], count: usize) -> Vec<usize> {
        let slots = pages.iter().flat_map(|page| page * self.page_size..(page + 1) * self.page_size);
        slots.take(count).collect()
    }

    pub(super) fn alloc(&mut self, count: usize) -> Option<Vec<usize>> {
        let taken = self.take(count.div_ceil(self.page_size))?;
        Some(self.slots_of(&taken, count))
    }

    pub(super) fn contiguous(&mut self, count: usize, fit: Fit) -> Option<Vec<usize>> {
        let pages = count.div_ceil(self.page_size);
        if pages == 0 {
            return Some(Vec::new());
        }
        let last = self.pages;
        let find = |free: &VecDeque<usize>| {
            let set: BTreeSet<usize> = free.iter().copied().collect();
            let length = |start: usize| (start..=last).take_while(|page| set.contains(page)).count();
            let mut runs = (1..=last).filter(|start| !set.contains(&(start - 1)) && length(*start) >= pages);
            match fit {
                Fit::First => runs.next(),
                Fit::Best => runs.min_by_key(|start| length(*start)),
            }
        };
        let start = match fit {
            Fit::First => find(&self.free).or_else(|| {
                self.merge();
                find(&self.free)
            }),
            Fit::Best => {
                self.merge();
                find(&self.free)
            }
        }?;
        self.free.retain(|page| !(start..start + pages).contains(page));
        self.own(start..start + pages);
        Some((start * self.page_size..).take(count).collect())
    }

    /// The new slots of a batch, and the pages that it continues.
    pub(super) fn extend(&mut self, batch: &[(i64, i64, i64)]) -> Verdict<Option<(Vec<usize>, Vec<usize>)>> {
        let size = self.page_size;
        let (mut continued, mut tokens, mut pages) = (Vec::new(), 0, 0);
        let mut requests = Vec::new();
        for &(prefix, seq, _) in batch {
            ensure(0 <= prefix && prefix <= seq && seq <= i32::MAX.into(), ErrorKind::Argument)?;
            let [prefix, seq] = [prefix, seq].map(|len| usize::try_from(len).expect("not negative"));
            tokens += seq - prefix;
            pages += seq.div_ceil(size) - prefix.div_ceil(size);
            requests.push((prefix, seq));
        }
        for (&(prefix, seq), &(.., last)) in requests.iter().zip(batch) {
            if prefix % size != 0 && seq > prefix {
                let next = last.checked_add(1).filter(|next| (0..=i32::MAX.into()).contains(next));
                let next = usize::try_from(next.unwrap_or(0)).expect("not negative");
                let page = next / size;
                ensure(next % size == prefix % size, ErrorKind::Argument)?;
                let is_its_own = self.is_owned(page) && !continued.contains(&page);
                ensure(is_its_own, Refusal::at(ErrorKind::IndexOwnership, last))?;
                continued.push(page);
            }
        }
        if pages > self.available() || tokens > self.pages * size {
            self.merge();
            return Ok(None);
        }
        let taken = self.take(pages).expect("so many are free");
        let (mut taken, mut slots) = (taken.into_iter(), Vec::new());
        for (&(prefix, seq), &(.., last)) in requests.iter().zip(batch) {
            let mut slot = usize::try_from(last.saturating_add(1)).unwrap_or(0);
            for position in prefix..seq {
                if position % size == 0 {
                    slot = taken.next().expect("a page for every new one") * size;
                }
                slots.push(slot);
                slot += 1;
            }
        }
        Ok(Some((slots, continued)))
    }

    /// Adds an owner to the pages of slots, unless one of them has no owner.
    pub(super) fn share(&mut self, slots: &[i64]) -> Verdict {
        let page = |&slot: &i64| {
            let page = self.page(slot).filter(|page| self.is_owned(*page));
            page.ok_or(Refusal::at(ErrorKind::IndexOwnership, slot))
        };
        let mut pages: Vec<usize> = slots.iter().map(page).collect::<Verdict<_>>()?;
        if self.page_size > 1 {
            pages.sort_unstable();
            pages.dedup();
        }
        self.join(&pages);
        Ok(())
    }

    pub(super) fn join(&mut self, pages: &[usize]) {
        for page in pages {
            *self.owners.get_mut(page).expect("an owned page") += 1;
        }
    }

    fn page(&self, slot: i64) -> Option<usize> {
        usize::try_from(slot).ok().map(|slot| slot / self.page_size)
    }

    /// Removes an owner from the page of each slot, once per call where a page has several slots. Behind a
    /// fence the owners stay until it passes.
    pub(super) fn give_back(&mut self, slots: &[i64], is_fenced: bool) -> Freed {
        let mut given = Freed::default();
        for &slot in slots {
            let page = self.page(slot).unwrap_or(0);
            if self.page_size > 1 && given.has(page) {
                continue;
            }
            let leaves_now = is_fenced && given.shared.contains(&page);
            match self.stay(page) {
                0 => self.dropped += 1,
                1 if self.leaving(page) == 0 && !leaves_now => {
                    self.owners.remove(&page);
                    self.end(page);
                    given.alone.push(page);
                }
                owners => {
                    if owners == 1 {
                        self.owners.remove(&page)
                    } else {
                        self.owners.insert(page, owners - 1)
                    };
                    given.shared.push(page);
                }
            }
        }
        if self.page_size > 1 {
            given.alone.sort_unstable();
        }
        given
    }

    /// Records that a page lost its last owner.
    fn end(&mut self, page: usize) {
        self.frees += 1;
        self.freed.insert(page, self.frees);
    }

    /// Whether a page lost its last owner after so many did.
    pub(super) fn is_freed_since(&self, page: usize, frees: usize) -> bool {
        self.freed.get(&page).is_some_and(|freed| *freed > frees)
    }

    /// Frees pages without an owner.
    pub(super) fn release(&mut self, given: Freed) {
        for page in given.alone {
            assert!(!self.is_in_use(page));
            match self.order {
                Order::Sorted => drop(self.released.insert(page)),
                Order::Fifo => self.free.push_back(page),
            }
        }
    }

    /// Undoes the taking of pages that were never used.
    pub(super) fn undo(&mut self, slots: &[usize], continued: &[usize]) {
        let mut pages: Vec<usize> = slots.iter().map(|slot| slot / self.page_size).collect();
        pages.dedup();
        pages.retain(|page| !continued.contains(page));
        for page in &pages {
            assert_eq!(self.owners.remove(page), Some(1));
            self.end(*page);
        }
        self.release(Freed { alone: pages, shared: Vec::new() });
    }

    /// Passes a fence: its pages return, unless an owner remains.
    pub(super) fn pass(&mut self, id: usize) {
        while let Some(at) = self.fenced.iter().position(|(other, _)| *other == id) {
            let alone = std::mem::take(&mut self.fenced[at].1.alone);
            self.release(Freed { alone, shared: Vec::new() });
            while let Some(&page) = self.fenced[at].1.shared.first() {
                self.fenced[at].1.shared.remove(0);
                if !self.is_in_use(page) {
                    self.end(page);
                    self.release(Freed { alone: vec![page], shared: Vec::new() });
                }
            }
            self.fenced.remove(at);
        }
    }
}
