//! The pages of a request, of which a cache may keep the first ones.

use std::ops::Range;
use std::sync::Arc;

use crate::base::{Page, Result, reserve};

/// Pages in order: whole runs in memory that is shared with a cache, and behind them pages in memory of their own.
///
/// A request with a long cached prefix costs no copy of it. What is shared is only the memory: which pages have
/// which owners is the allocator's.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{Id, Page};
/// use kvpool::index::PageList;
/// let [a, b, c] = [3, 4, 9].map(Page::new);
/// let mut pages = PageList::with_room(1).unwrap();
/// pages.share(Arc::new(vec![a, b]));
/// pages.extend_from_slice(&[c]);
/// assert_eq!((pages.len(), pages.to_vec(1..3)), (3, vec![b, c]));
/// pages.truncate(1);
/// assert_eq!(pages.to_vec(0..1), [a]);
/// ```
#[derive(Clone, Debug, Default)]
pub struct PageList {
    /// They are not changed.
    shared: Vec<Arc<Vec<Page>>>,
    /// Pages in `shared`.
    before: usize,
    /// The pages behind those.
    rest: Vec<Page>,
}

impl PageList {
    /// No pages, with room for so many in memory of their own.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate it.
    pub fn with_room(pages: usize) -> Result<Self> {
        Ok(Self { rest: reserve(pages)?, ..Self::default() })
    }

    /// The number of pages.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        self.before + self.rest.len()
    }

    /// Whether there are no pages.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends a run, whose memory stays shared.
    pub fn share(&mut self, run: Arc<Vec<Page>>) {
        if !self.rest.is_empty() {
            let earlier = std::mem::take(&mut self.rest);
            self.before += earlier.len();
            self.shared.push(Arc::new(earlier));
        }
        self.before += run.len();
        self.shared.push(run);
    }

    /// Appends copies of pages.
    pub fn extend_from_slice(&mut self, pages: &[Page]) {
        self.rest.extend_from_slice(pages);
    }

    /// Appends pages.
    #[inline]
    pub fn extend(&mut self, pages: impl Iterator<Item = Page>) {
        self.rest.extend(pages);
    }

    /// The page at position `at`, which is below the length.
    #[must_use]
    #[inline]
    pub fn get(&self, at: usize) -> Page {
        match at.checked_sub(self.before) {
            Some(at) => self.rest[at],
            None => self.shared_runs(at..at + 1).flatten().next().copied().expect("it is below the length"),
        }
    }

    /// The pages of positions `range`, which are below the length, as they lie.
    #[inline]
    pub fn runs(&self, range: Range<usize>) -> impl Iterator<Item = &[Page]> {
        let own = range.start.saturating_sub(self.before)..range.end.saturating_sub(self.before);
        let shared =
            (range.start < self.before).then(|| self.shared_runs(range.start..range.end.min(self.before)));
        shared.into_iter().flatten().chain(std::iter::once(&self.rest[own]))
    }

    /// The pages of positions `range` of those that are shared, as they lie.
    fn shared_runs(&self, range: Range<usize>) -> impl Iterator<Item = &[Page]> {
        let mut begin = 0;
        let within = self.shared.iter().map(move |run| {
            let [from, to] = [range.start, range.end].map(|at| at.saturating_sub(begin).min(run.len()));
            begin += run.len();
            &run[from..to]
        });
        within.filter(|run| !run.is_empty())
    }

    /// A copy of the pages of positions `range`, which are below the length.
    #[must_use]
    pub fn to_vec(&self, range: Range<usize>) -> Vec<Page> {
        let mut pages = Vec::with_capacity(range.len());
        self.runs(range).for_each(|run| pages.extend_from_slice(run));
        pages
    }

    /// The first `len` pages, with room for `room` more. Runs stay shared.
    ///
    /// # Errors
    /// As [`Self::with_room`].
    pub fn first(&self, len: usize, room: usize) -> Result<Self> {
        let mut first = Self::default();
        for run in &self.shared {
            if run.len() > len - first.before {
                break;
            }
            first.share(Arc::clone(run));
        }
        first.rest = reserve(len - first.before + room)?;
        self.runs(first.before..len).for_each(|run| first.rest.extend_from_slice(run));
        Ok(first)
    }

    /// Whether the first pages are those of `other`.
    #[must_use]
    pub fn starts_with(&self, other: &Self) -> bool {
        let mut at = 0;
        other.len() <= self.len()
            && other.runs(0..other.len()).all(|mut run| {
                let mine = self.runs(at..at + run.len());
                at += run.len();
                mine.into_iter().all(|mine| {
                    let (same, rest) = run.split_at(mine.len());
                    run = rest;
                    same == mine
                })
            })
    }

    /// Drops the pages behind the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.rest.truncate(len.saturating_sub(self.before));
        while self.before > len {
            let last = self.shared.pop().expect("there are shared pages");
            self.before -= last.len();
            if let Some(keep) = len.checked_sub(self.before) {
                self.rest.extend_from_slice(&last[..keep]);
            }
        }
    }

    /// Removes the pages from position `at` on, and returns them.
    pub fn split_off(&mut self, at: usize) -> Vec<Page> {
        match at.checked_sub(self.before) {
            Some(0) => std::mem::take(&mut self.rest),
            Some(at) => self.rest.split_off(at),
            None => {
                let gone = self.to_vec(at..self.len());
                self.truncate(at);
                gone
            }
        }
    }

    /// Replaces the pages from position `from` on, which are not shared, and returns the position of the first
    /// that differs.
    pub fn replace(&mut self, from: usize, pages: &[Page]) -> Option<usize> {
        let own = &mut self.rest[from - self.before..][..pages.len()];
        let changed = own.iter().zip(pages).position(|(own, new)| own != new);
        own.copy_from_slice(pages);
        changed.map(|at| from + at)
    }
}

impl From<Vec<Page>> for PageList {
    fn from(pages: Vec<Page>) -> Self {
        Self { rest: pages, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Id;

    #[test]
    fn it_is_a_list_of_pages() {
        let (mut list, mut plain, mut earlier) = (PageList::default(), Vec::new(), Vec::new());
        let (mut state, mut next) = (1_usize, 0);
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let [kind, few] = [state >> 60, (state >> 40) % 8];
            let at = (state >> 20) % (plain.len() + 1);
            let new: Vec<Page> = (next..).map(Page::new).take(few).collect();
            next += 8;
            match kind {
                0..=2 => {
                    plain.extend_from_slice(&new);
                    earlier.push(Arc::new(new));
                    list.share(Arc::clone(&earlier[earlier.len() - 1]));
                }
                3..=5 => {
                    plain.extend_from_slice(&new);
                    list.extend(new.into_iter());
                }
                6..=8 => {
                    plain.extend_from_slice(&new);
                    list.extend_from_slice(&new);
                }
                9 if at >= list.before => {
                    let new = &new[..few.min(plain.len() - at)];
                    assert_eq!(list.replace(at, new), (!new.is_empty()).then_some(at));
                    assert_eq!(list.replace(at, new), None);
                    plain[at..at + new.len()].copy_from_slice(new);
                }
                10 | 11 => {
                    list.truncate(at);
                    plain.truncate(at);
                }
                12 => assert_eq!(list.split_off(at), plain.split_off(at)),
                _ => {
                    let first = list.first(at, 1).expect("small");
                    assert_eq!(first.to_vec(0..first.len()), plain[..at]);
                    assert!(list.starts_with(&first) && (first.starts_with(&list) == (at == plain.len())));
                    let mut other = first.clone();
                    other.extend_from_slice(&[Page::new(next)]);
                    assert!(!list.starts_with(&other) && !other.starts_with(&list) || at == plain.len());
                }
            }
            assert_eq!(list.len(), plain.len());
            let [from, to] = [at.min(plain.len()) / 2, at.min(plain.len())];
            assert_eq!(list.to_vec(from..to), plain[from..to]);
            assert!(plain.get(from).is_none_or(|page| list.get(from) == *page));
        }
    }
}
