//! Pages with more than one owner.

use std::collections::HashMap;

use crate::base::{Id, Page, Result, widen, zeros};

use super::free_list::Give;

/// Owners of live pages beyond the first of each.
///
/// An owner that was removed behind a fence is counted until the fence has passed, so that the page is not handed out
/// before.
#[derive(Clone, Debug, Default)]
pub(super) struct Owners {
    /// By page number; empty until a page is shared for the first time.
    more: Vec<u32>,
    /// How many of `more` are not 0.
    shared: usize,
    /// By page number, owners whose fence has not passed. None is 0.
    pending: HashMap<u32, u32>,
    /// From which pages the last batch has removed an owner.
    removed: Vec<Page>,
}

/// Proof that there is room for counts of owners: it is made once, and never given back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room(());

impl Owners {
    /// Whether every page has one owner, and none is pending.
    pub(super) fn is_trivial(&self) -> bool {
        self.shared == 0 && self.pending.is_empty()
    }

    /// How many pages have more than one owner.
    pub(super) const fn shared(&self) -> usize {
        self.shared
    }

    /// Bytes of the bookkeeping.
    pub(super) const fn bytes(&self) -> usize {
        self.more.capacity() * size_of::<u32>()
    }

    fn more(&self, page: Page) -> u32 {
        self.more.get(widen(page.number())).copied().unwrap_or(0)
    }

    fn pending(&self, page: Page) -> u32 {
        if self.pending.is_empty() { 0 } else { self.pending.get(&page.number()).copied().unwrap_or(0) }
    }

    /// Whether `page`, which is live, has or had more than one owner, so that [`RemovalBatch::remove`] decides.
    pub(super) fn concerns(&self, page: Page) -> bool {
        self.more(page) > 0 || self.pending(page) > 0
    }

    /// Whether `page`, which is live, has an owner that is not pending.
    pub(super) fn is_owned(&self, page: Page) -> bool {
        self.more(page) + 1 > self.pending(page)
    }

    /// How many pages are kept by fences alone.
    pub(super) fn unowned(&self) -> usize {
        self.pending.keys().filter(|page| !self.is_owned(Page::new(**page))).count()
    }

    /// Makes room for counts of `pages` pages, once for all.
    pub(super) fn prepare(&mut self, pages: usize) -> Result<Room> {
        if self.more.is_empty() {
            self.more = zeros(pages)?;
        }
        Ok(Room(()))
    }

    /// Adds an owner.
    pub(super) fn add(&mut self, _room: Room, page: Page) {
        let more = &mut self.more[widen(page.number())];
        *more += 1;
        self.shared += usize::from(*more == 1);
    }

    fn subtract(&mut self, page: Page) {
        let more = &mut self.more[widen(page.number())];
        *more -= 1;
        self.shared -= usize::from(*more == 0);
    }

    fn subtract_pending(&mut self, page: Page) {
        if let Some(pending) = self.pending.get_mut(&page.number()) {
            *pending -= 1;
            if *pending == 0 {
                self.pending.remove(&page.number());
            }
        }
    }

    /// Begins to remove owners, all or none of them: at once, or when a fence has passed.
    pub(super) fn remove(&mut self, give: Give) -> RemovalBatch<'_> {
        self.removed.clear();
        RemovalBatch { owners: self, give, is_committed: false }
    }

    /// From which pages the last batch removed an owner, as often as it did.
    pub(super) fn last_removed(&self) -> &[Page] {
        &self.removed
    }

    /// Completes a removal whose fence has passed, and says whether it was that of the last owner.
    pub(super) fn complete(&mut self, page: Page) -> bool {
        self.subtract_pending(page);
        let is_last = self.more(page) == 0;
        if !is_last {
            self.subtract(page);
        }
        is_last
    }

    /// Forgets all but the first owner of each page.
    pub(super) fn clear(&mut self) {
        self.more.fill(0);
        self.shared = 0;
        self.pending.clear();
    }

    /// The pages with more than one owner, lowest first.
    pub(super) fn pages(&self) -> impl Iterator<Item = Page> + '_ {
        (0..).zip(&self.more).filter(|(_, more)| **more > 0).map(|(page, _)| Page::new(page))
    }
}

/// Owners that are being removed. Dropped before [`RemovalBatch::commit`], all of them stay.
#[derive(Debug)]
#[must_use]
pub(super) struct RemovalBatch<'a> {
    owners: &'a mut Owners,
    give: Give,
    is_committed: bool,
}

impl RemovalBatch<'_> {
    /// The owners that are left.
    pub(super) const fn owners(&self) -> &Owners {
        self.owners
    }

    /// Removes an owner of a page that [`Owners::concerns`] this. `false` if there is none left that could go.
    pub(super) fn remove(&mut self, page: Page) -> bool {
        if !self.owners.is_owned(page) {
            return false;
        }
        match self.give {
            Give::Fenced => *self.owners.pending.entry(page.number()).or_default() += 1,
            Give::Now => self.owners.subtract(page),
        }
        self.owners.removed.push(page);
        true
    }

    /// From which pages an owner was removed, as often as one was.
    pub(super) fn pages(&self) -> &[Page] {
        &self.owners.removed
    }

    /// Makes it so. Behind a fence, [`Owners::complete`] follows for each of the pages.
    pub(super) fn commit(mut self) {
        self.is_committed = true;
    }
}

impl Drop for RemovalBatch<'_> {
    fn drop(&mut self) {
        if self.is_committed {
            return;
        }
        while let Some(page) = self.owners.removed.pop() {
            match self.give {
                Give::Fenced => self.owners.subtract_pending(page),
                Give::Now => self.owners.add(Room(()), page),
            }
        }
    }
}
