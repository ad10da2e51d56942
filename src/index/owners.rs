//! Pages with more than one owner.

use std::collections::HashMap;

use crate::base::{Id, Page, Result, widen, zeros};

/// How an owner leaves a page that others own, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leave {
    /// It is one of several, and gone.
    Gone,
    /// It goes when its fence has passed.
    Later,
    /// There is none left that could go.
    Nobody,
}

/// Owners of live pages beyond the first of each.
///
/// An owner that has left behind a fence is counted until the fence passes, so that the page is not handed out before.
#[derive(Clone, Debug, Default)]
pub(super) struct Owners {
    /// By page number; empty until a page is shared for the first time.
    more: Vec<u32>,
    /// How many of `more` are not 0.
    shared: usize,
    /// By page number, owners whose fence has not passed. None is 0.
    leaving: HashMap<u32, u32>,
}

impl Owners {
    /// Whether every page has one owner, and none is leaving a page that had more.
    pub(super) fn is_trivial(&self) -> bool {
        self.shared == 0 && self.leaving.is_empty()
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

    fn leaving(&self, page: Page) -> u32 {
        if self.leaving.is_empty() { 0 } else { self.leaving.get(&page.number()).copied().unwrap_or(0) }
    }

    /// Whether `page`, which is live, has or had more than one owner, so that [`Owners::leave`] decides.
    pub(super) fn concerns(&self, page: Page) -> bool {
        self.more(page) > 0 || self.leaving(page) > 0
    }

    /// Whether `page`, which is live, has an owner that stays.
    pub(super) fn is_owned(&self, page: Page) -> bool {
        self.more(page) + 1 > self.leaving(page)
    }

    /// How many pages have no owner that stays, and are kept by fences alone.
    pub(super) fn left(&self) -> usize {
        self.leaving.keys().filter(|page| !self.is_owned(Page::new(**page))).count()
    }

    /// Makes room for counts of `pages` pages.
    pub(super) fn prepare(&mut self, pages: usize) -> Result<()> {
        if self.more.is_empty() {
            self.more = zeros(pages)?;
        }
        Ok(())
    }

    /// Adds an owner. There must be room.
    pub(super) fn join(&mut self, page: Page) {
        let more = &mut self.more[widen(page.number())];
        *more += 1;
        self.shared += usize::from(*more == 1);
    }

    fn part(&mut self, page: Page) {
        let more = &mut self.more[widen(page.number())];
        *more -= 1;
        self.shared -= usize::from(*more == 0);
    }

    /// Takes an owner from a page that [`Owners::concerns`] this, at once or when a fence has passed.
    pub(super) fn leave(&mut self, page: Page, is_fenced: bool) -> Leave {
        if !self.is_owned(page) {
            return Leave::Nobody;
        }
        if is_fenced {
            *self.leaving.entry(page.number()).or_default() += 1;
            return Leave::Later;
        }
        self.part(page);
        Leave::Gone
    }

    /// Undoes [`Owners::leave`].
    pub(super) fn stay(&mut self, page: Page, was_fenced: bool) {
        if was_fenced { self.arrive(page) } else { self.join(page) }
    }

    fn arrive(&mut self, page: Page) {
        if let Some(leaving) = self.leaving.get_mut(&page.number()) {
            *leaving -= 1;
            if *leaving == 0 {
                self.leaving.remove(&page.number());
            }
        }
    }

    /// Lets an owner go whose fence has passed, and says whether it was the last.
    pub(super) fn passed(&mut self, page: Page) -> bool {
        self.arrive(page);
        let is_last = self.more(page) == 0;
        if !is_last {
            self.part(page);
        }
        is_last
    }

    /// Forgets all but the first owner of each page.
    pub(super) fn clear(&mut self) {
        self.more.fill(0);
        self.shared = 0;
        self.leaving.clear();
    }

    /// The pages with more than one owner, lowest first.
    pub(super) fn pages(&self) -> impl Iterator<Item = Page> + '_ {
        (0..).zip(&self.more).filter(|(_, more)| **more > 0).map(|(page, _)| Page::new(page))
    }
}
