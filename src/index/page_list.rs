//! The pages of a request, the first of which a prefix cache may own.

use std::ops::Range;
use std::sync::Arc;

use crate::base::{Page, Result, prefetch, try_extend, try_reserve, try_with_capacity};

/// Pages in order: first whole runs in memory that is shared with a cache, then pages in memory of its own.
///
/// A long cached prefix need not be copied for each request. Only the memory of the list is shared; the
/// allocator knows the owners of the pages.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{Id, Page};
/// use kvpool::index::PageList;
/// let [a, b, c] = [3, 4, 9].map(Page::new);
/// let mut pages = PageList::default();
/// pages.share(Arc::new(vec![a, b]));
/// pages.extend_from_slice(&[c]).unwrap();
/// assert_eq!((pages.len(), pages.to_vec(1..3).unwrap()), (3, vec![b, c]));
/// pages.truncate(1);
/// assert_eq!(pages.to_vec(0..1).unwrap(), [a]);
/// ```
#[derive(Clone, Debug, Default)]
pub struct PageList {
    /// The shared runs, boxed because most requests have none.
    shared: Option<Box<SharedRuns>>,
    /// The pages after the shared ones.
    tail: Vec<Page>,
}

/// Runs of pages, which do not change.
#[derive(Clone, Debug, Default)]
struct SharedRuns {
    runs: Vec<Arc<Vec<Page>>>,
    /// The number of pages in `runs`, at least 1.
    len: usize,
}

impl PageList {
    /// Returns the number of pages.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.shared_len() + self.tail.len()
    }

    /// Returns whether there are no pages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of shared pages.
    #[inline]
    fn shared_len(&self) -> usize {
        self.shared.as_ref().map_or(0, |shared| shared.len)
    }

    /// Appends a run, whose memory stays shared.
    pub fn share(&mut self, run: Arc<Vec<Page>>) {
        let earlier = (!self.tail.is_empty()).then(|| Arc::new(std::mem::take(&mut self.tail)));
        for run in earlier.into_iter().chain(Some(run).filter(|run| !run.is_empty())) {
            let shared = self.shared.get_or_insert_default();
            shared.len += run.len();
            shared.runs.push(run);
        }
    }

    /// Appends copies of pages.
    ///
    /// # Errors
    /// See [`PageList::try_reserve`].
    pub fn extend_from_slice(&mut self, pages: &[Page]) -> Result<()> {
        try_extend(&mut self.tail, pages)
    }

    /// Appends a page, for which there is room.
    #[inline]
    pub fn push(&mut self, page: Page) {
        self.tail.push(page);
    }

    /// Appends pages, for which there is room.
    #[inline]
    pub fn extend(&mut self, pages: impl Iterator<Item = Page>) {
        self.tail.extend(pages);
    }

    /// Returns the page at position `at`, which is below the length.
    #[must_use]
    #[inline]
    pub fn get(&self, at: usize) -> Page {
        match &self.shared {
            None => self.tail[at],
            Some(_) => self.get_with_shared(at),
        }
    }

    /// Works like [`PageList::get`], for a list with shared pages. It is a function of its own so that the
    /// common case stays small.
    #[cold]
    fn get_with_shared(&self, at: usize) -> Page {
        match at.checked_sub(self.shared_len()) {
            Some(at) => self.tail[at],
            None => self.runs(at..at + 1).flatten().next().copied().expect("it is below the length"),
        }
    }

    /// Returns all pages, unless some of them are shared.
    #[must_use]
    #[inline]
    pub fn unshared(&self) -> Option<&[Page]> {
        self.shared.is_none().then_some(&self.tail)
    }

    /// Returns the pages of positions `range`, which are below the length, run by run and without a copy.
    #[must_use]
    #[inline]
    pub fn runs(&self, range: Range<usize>) -> Runs<'_> {
        let Some(shared) = &self.shared else {
            return Runs { shared: [].iter(), skip: 0, left: 0, tail: Some(&self.tail[range]) };
        };
        let [skip, end] = [range.start, range.end].map(|at| at.min(shared.len));
        let tail = &self.tail[range.start - skip..range.end - end];
        let (skip, left) = if range.start < shared.len { (skip, end - skip) } else { (0, 0) };
        Runs { shared: shared.runs.iter(), skip, left, tail: Some(tail) }
    }

    /// Returns the pages from position `from` on, one by one.
    pub fn iter_from(&self, from: usize) -> impl Iterator<Item = Page> + '_ {
        self.runs(from..self.len()).flatten().copied()
    }

    /// Returns a copy of the pages of positions `range`, which are below the length.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate it.
    pub fn to_vec(&self, range: Range<usize>) -> Result<Vec<Page>> {
        let mut pages = try_with_capacity(range.len())?;
        self.runs(range).for_each(|run| pages.extend_from_slice(run));
        Ok(pages)
    }

    /// Makes room for `count` more pages, which need no memory then.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has none.
    pub fn try_reserve(&mut self, count: usize) -> Result<()> {
        try_reserve(&mut self.tail, count)
    }

    /// Prefetches the place of the next page.
    #[inline]
    pub(super) fn prefetch_end(&self) {
        if let Some(last) = self.tail.last() {
            prefetch(last);
        }
    }

    /// Creates a list of the first `len` pages, with capacity for `extra` more. Runs stay shared.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate it.
    pub fn first(&self, len: usize, extra: usize) -> Result<Self> {
        let mut first = Self::default();
        for run in self.shared.iter().flat_map(|shared| &shared.runs) {
            if run.len() > len - first.shared_len() {
                break;
            }
            first.share(Arc::clone(run));
        }
        let shared_len = first.shared_len();
        first.tail = try_with_capacity(len - shared_len + extra)?;
        self.runs(shared_len..len).for_each(|run| first.tail.extend_from_slice(run));
        Ok(first)
    }

    /// Returns whether the first pages are those of `other`.
    #[must_use]
    pub fn starts_with(&self, other: &Self) -> bool {
        let mut at = 0;
        other.len() <= self.len()
            && other.runs(0..other.len()).all(|mut run| {
                let mine = self.runs(at..at + run.len());
                at += run.len();
                mine.into_iter().all(|mine| {
                    let (same, tail) = run.split_at(mine.len());
                    run = tail;
                    same == mine
                })
            })
    }

    /// Makes room for [`PageList::truncate`], which copies the pages of a shared run that it cuts.
    ///
    /// # Errors
    /// See [`PageList::try_reserve`].
    pub fn prepare_truncate(&mut self, len: usize) -> Result<()> {
        let Some(shared) = self.shared.as_ref().filter(|shared| shared.len > len) else { return Ok(()) };
        let mut before = 0;
        for run in &shared.runs {
            if before + run.len() > len {
                break;
            }
            before += run.len();
        }
        let room = (len - before).saturating_sub(self.tail.len());
        self.try_reserve(room)
    }

    /// Drops all but the first `len` pages.
    pub fn truncate(&mut self, len: usize) {
        self.tail.truncate(len.saturating_sub(self.shared_len()));
        while let Some(shared) = self.shared.as_mut().filter(|shared| shared.len > len) {
            let last = shared.runs.pop().expect("shared pages are in runs");
            shared.len -= last.len();
            if let Some(keep) = len.checked_sub(shared.len) {
                self.tail.extend_from_slice(&last[..keep]);
            }
            if shared.runs.is_empty() {
                self.shared = None;
            }
        }
    }

    /// Replaces the pages from position `from` on, which are not shared. Returns the position of the first
    /// page that has changed.
    pub fn replace(&mut self, from: usize, pages: &[Page]) -> Option<usize> {
        let shared_len = self.shared_len();
        let own = &mut self.tail[from - shared_len..][..pages.len()];
        let changed = own.iter().zip(pages).position(|(own, new)| own != new);
        own.copy_from_slice(pages);
        changed.map(|at| from + at)
    }
}

/// The runs of a range of a [`PageList`]. The last one may be empty.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{Id, Page};
/// use kvpool::index::{PageList, Runs};
/// let mut pages = PageList::default();
/// pages.share(Arc::new(vec![Page::new(3), Page::new(4)]));
/// pages.push(Page::new(9));
/// let mut runs: Runs<'_> = pages.runs(1..3);
/// assert_eq!(runs.next(), Some(&[Page::new(4)][..]));
/// assert_eq!(runs.next(), Some(&[Page::new(9)][..]));
/// assert_eq!(runs.next(), None);
/// ```
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    shared: std::slice::Iter<'a, Arc<Vec<Page>>>,
    /// The number of shared pages to skip before the range, and of those in it.
    skip: usize,
    left: usize,
    tail: Option<&'a [Page]>,
}

impl<'a> Iterator for Runs<'a> {
    type Item = &'a [Page];

    #[inline]
    fn next(&mut self) -> Option<&'a [Page]> {
        while self.left > 0 {
            let run = self.shared.next().expect("the range is below the length");
            let from = self.skip.min(run.len());
            let run = &run[from..run.len().min(from + self.left)];
            self.skip -= from;
            self.left -= run.len();
            if !run.is_empty() {
                return Some(run);
            }
        }
        self.tail.take()
    }
}

impl From<Vec<Page>> for PageList {
    fn from(pages: Vec<Page>) -> Self {
        Self { tail: pages, ..Self::default() }
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
                    list.extend_from_slice(&new).expect("small");
                }
                9 if at >= list.shared_len() => {
                    let new = &new[..few.min(plain.len() - at)];
                    assert_eq!(list.replace(at, new), (!new.is_empty()).then_some(at));
                    assert_eq!(list.replace(at, new), None);
                    plain[at..at + new.len()].copy_from_slice(new);
                }
                10..=12 => {
                    list.prepare_truncate(at).expect("small");
                    list.truncate(at);
                    plain.truncate(at);
                }
                _ => {
                    let first = list.first(at, 1).expect("small");
                    assert_eq!(first.to_vec(0..first.len()).expect("small"), plain[..at]);
                    assert!(list.starts_with(&first) && (first.starts_with(&list) == (at == plain.len())));
                    let mut other = first.clone();
                    other.extend_from_slice(&[Page::new(next)]).expect("small");
                    assert!(!list.starts_with(&other) && !other.starts_with(&list) || at == plain.len());
                }
            }
            assert_eq!(list.len(), plain.len());
            assert!(list.unshared().map_or(list.shared_len() > 0, |own| own == plain));
            let [from, to] = [at.min(plain.len()) / 2, at.min(plain.len())];
            assert_eq!(list.to_vec(from..to).expect("small"), plain[from..to]);
            assert!(plain.get(from).is_none_or(|page| list.get(from) == *page));
        }
    }
}
