//! Reference counts of pages with more than one owner, and the pages that a prefix cache owns.

use crate::base::{Id, KeyMap, Page, Result, out_of_memory_error, try_zeros, widen};

use super::free_list::FreeTiming;
use super::mask::Mask;
use super::{BadFree, Bitmap};

/// The owners of live pages, except the first owner of each.
///
/// An owner that was removed with a fence counts until the fence has passed, so that its page is not handed
/// out earlier.
#[derive(Clone, Debug)]
pub(super) struct Owners {
    /// The numbers of owners beyond the first, by page number; empty until a page is shared for the first
    /// time.
    extra: Vec<u32>,
    /// The number of entries of `extra` that are not 0.
    shared: usize,
    /// The numbers of removed owners whose fence has not passed, by page number. No entry is 0.
    pending: KeyMap<u32, u32>,
    /// The pages from which the last batch removed an owner.
    removed: Vec<Page>,
    /// The pages that a cache owns; frees do not remove the cache. Empty until there are such pages.
    cached: Bitmap,
}

/// Proof that the counts of owners are allocated. They stay allocated from then on.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharingReservation(());

impl Owners {
    /// Creates the record of pages with one owner each.
    pub(super) fn new() -> Result<Self> {
        let (extra, pending, removed) = (Vec::new(), KeyMap::default(), Vec::new());
        Ok(Self { extra, shared: 0, pending, removed, cached: Bitmap::new(0)? })
    }

    /// Returns whether every page has one owner, and no removal is pending.
    pub(super) fn is_trivial(&self) -> bool {
        self.shared == 0 && self.pending.is_empty() && self.cached.is_empty()
    }

    /// Returns whether each of `pages` has one owner, which is not the cache, and no removal is pending. It
    /// may return `false` because of other pages.
    pub(super) fn is_trivial_for(&self, pages: Mask) -> bool {
        let is_uncached = || self.cached.word(widen(pages.word)) & pages.bits == 0;
        self.shared == 0 && self.pending.is_empty() && (self.cached.is_empty() || is_uncached())
    }

    /// Returns the number of pages that have more than one owner.
    pub(super) const fn shared(&self) -> usize {
        self.shared
    }

    /// Returns the size of the bookkeeping in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.extra.capacity() * size_of::<u32>() + self.cached.bytes()
    }

    fn extra(&self, page: Page) -> u32 {
        self.extra.get(widen(page.number())).copied().unwrap_or(0)
    }

    fn pending(&self, page: Page) -> u32 {
        if self.pending.is_empty() { 0 } else { self.pending.get(&page.number()).copied().unwrap_or(0) }
    }

    /// Returns whether `page`, which is live, has or had more than one owner, or belongs to the cache:
    /// [`RemovalBatch::remove`] handles such pages.
    pub(super) fn counts_page(&self, page: Page) -> bool {
        self.extra(page) > 0 || self.pending(page) > 0 || self.is_cached(page)
    }

    /// Returns whether the cache is an owner of `page`.
    pub(super) fn is_cached(&self, page: Page) -> bool {
        self.cached.contains(widen(page.number()))
    }

    /// Returns whether the cache is an owner of all of `pages`.
    pub(super) fn are_cached(&self, pages: Mask) -> bool {
        self.cached.capacity() > widen(pages.word) * 64
            && self.cached.word(widen(pages.word)) & pages.bits == pages.bits
    }

    /// Returns the number of pages that the cache owns.
    pub(super) const fn cached(&self) -> usize {
        self.cached.len()
    }

    /// Returns whether `page`, which is live, has an owner other than the cache whose removal is not pending.
    pub(super) fn is_in_use(&self, page: Page) -> bool {
        self.extra(page) + 1 > self.pending(page) + u32::from(self.is_cached(page))
    }

    /// Works like [`Owners::cache`], word by word, for pages that are live and have one owner each. If there
    /// are other pages among them, returns `false` and changes nothing.
    pub(super) fn cache_plain(
        &mut self,
        space: usize,
        pages: impl Iterator<Item = Mask> + Clone,
        are_live: impl Fn(Mask) -> bool,
    ) -> Result<bool> {
        if self.cached.capacity() < space {
            self.cached = Bitmap::new(space)?;
        }
        for (done, mask) in pages.clone().enumerate() {
            let is_new = self.cached.word(widen(mask.word)) & mask.bits == 0;
            if !is_new || !self.pending.is_empty() || !are_live(mask) {
                self.uncache(pages.take(done));
                return Ok(false);
            }
            self.cached.insert_word(widen(mask.word), mask.bits);
        }
        Ok(true)
    }

    /// Makes the cache an owner of `pages` in place of a caller: of all pages, or of none.
    ///
    /// # Errors
    /// The first page that cannot be cached, and the reason.
    pub(super) fn cache(
        &mut self,
        space: usize,
        pages: &[Page],
        is_live: impl Fn(Page) -> bool,
    ) -> Result<std::result::Result<(), (Page, BadFree)>> {
        if self.cached.capacity() < space {
            self.cached = Bitmap::new(space)?;
        }
        for (done, &page) in pages.iter().enumerate() {
            let reason = if !is_live(page) || !self.is_owned(page) {
                BadFree::NotAllocated
            } else if self.is_cached(page) {
                if pages[..done].contains(&page) { BadFree::NamedTwice } else { BadFree::Cached }
            } else {
                self.cached.insert(widen(page.number()));
                continue;
            };
            self.uncache(pages[..done].iter().map(|page| Mask::of(page.number())));
            return Ok(Err((page, reason)));
        }
        Ok(Ok(()))
    }

    /// Undoes [`Owners::cache`] for some pages: a free removes their owner again.
    pub(super) fn uncache(&mut self, pages: impl Iterator<Item = Mask>) {
        for Mask { word, bits } in pages {
            self.cached.remove_word(widen(word), bits);
        }
    }

    /// Returns whether `page`, which is live, has an owner whose removal is not pending.
    #[inline]
    pub(super) fn is_owned(&self, page: Page) -> bool {
        self.pending.is_empty() || self.extra(page) + 1 > self.pending(page)
    }

    /// Returns the number of pages whose owners are all removed, but whose fences have not passed.
    pub(super) fn unowned(&self) -> usize {
        self.pending.keys().filter(|page| !self.is_owned(Page::new(**page))).count()
    }

    /// Allocates the counts of `pages` pages; later calls do nothing.
    pub(super) fn prepare(&mut self, pages: usize) -> Result<SharingReservation> {
        if self.extra.is_empty() {
            self.extra = try_zeros(pages)?;
        }
        Ok(SharingReservation(()))
    }

    /// Adds an owner.
    pub(super) fn add(&mut self, _reservation: SharingReservation, page: Page) {
        let extra = &mut self.extra[widen(page.number())];
        *extra += 1;
        self.shared += usize::from(*extra == 1);
    }

    fn subtract(&mut self, page: Page) {
        let extra = &mut self.extra[widen(page.number())];
        *extra -= 1;
        self.shared -= usize::from(*extra == 0);
    }

    fn subtract_pending(&mut self, page: Page) {
        if let Some(pending) = self.pending.get_mut(&page.number()) {
            *pending -= 1;
            if *pending == 0 {
                self.pending.remove(&page.number());
            }
        }
    }

    /// Removes an owner of `page`, unless it is the only one: then returns `false`.
    pub(super) fn give_back(&mut self, page: Page) -> bool {
        let is_shared = self.counts_page(page);
        if is_shared && self.is_in_use(page) {
            self.subtract(page);
        }
        is_shared
    }

    /// Starts a batch that removes owners, all or none of them: at once, or when a fence has passed.
    pub(super) fn remove(&mut self, timing: FreeTiming) -> RemovalBatch<'_> {
        self.removed.clear();
        RemovalBatch { owners: self, timing, is_short: false, is_committed: false }
    }

    /// Returns the pages from which the last batch removed an owner, once per owner.
    pub(super) fn last_removed(&self) -> &[Page] {
        &self.removed
    }

    /// Completes a removal whose fence has passed. Returns whether it removed the last owner.
    pub(super) fn complete(&mut self, page: Page) -> bool {
        self.subtract_pending(page);
        let is_last = self.extra(page) == 0;
        if !is_last {
            self.subtract(page);
        }
        is_last
    }

    /// Removes all but the first owner of each page.
    pub(super) fn clear(&mut self) {
        self.extra.fill(0);
        self.shared = 0;
        self.pending.clear();
        self.cached.clear();
    }

    /// Returns the pages with more than one owner, lowest first.
    pub(super) fn pages(&self) -> impl Iterator<Item = Page> + '_ {
        (0..).zip(&self.extra).filter(|(_, extra)| **extra > 0).map(|(page, _)| Page::new(page))
    }
}

/// Owners that are being removed. Dropping the batch before [`RemovalBatch::commit`] restores all of them.
#[derive(Debug)]
#[must_use]
pub(super) struct RemovalBatch<'a> {
    owners: &'a mut Owners,
    timing: FreeTiming,
    /// Whether an owner was not removed for want of memory: the batch cannot be committed.
    is_short: bool,
    is_committed: bool,
}

impl RemovalBatch<'_> {
    /// Returns the owners, without the removed ones.
    pub(super) const fn owners(&self) -> &Owners {
        self.owners
    }

    /// Removes an owner of a page for which [`Owners::counts_page`] is true. Returns `false` if the cache is
    /// the only owner left.
    pub(super) fn remove(&mut self, page: Page) -> bool {
        if !self.owners.is_in_use(page) {
            return false;
        }
        let is_fenced = self.timing == FreeTiming::AfterFence;
        if self.owners.removed.try_reserve(1).is_err()
            || is_fenced && self.owners.pending.try_reserve(1).is_err()
        {
            self.is_short = true;
            return true;
        }
        match self.timing {
            FreeTiming::AfterFence => *self.owners.pending.entry(page.number()).or_default() += 1,
            FreeTiming::Now => self.owners.subtract(page),
        }
        self.owners.removed.push(page);
        true
    }

    /// Checks that all removals were recorded. Call this before [`RemovalBatch::commit`].
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host had no memory for them;
    /// drop the batch then.
    pub(super) fn check(&self) -> Result<()> {
        if self.is_short { Err(out_of_memory_error::<Page>(self.owners.removed.len() + 1)) } else { Ok(()) }
    }

    /// Returns the pages from which an owner was removed, once per owner.
    pub(super) fn pages(&self) -> &[Page] {
        &self.owners.removed
    }

    /// Makes the removals permanent. If they have a fence, call [`Owners::complete`] for each page once it
    /// has passed.
    pub(super) fn commit(mut self) {
        debug_assert!(!self.is_short, "it was checked");
        self.is_committed = true;
    }
}

impl Drop for RemovalBatch<'_> {
    fn drop(&mut self) {
        if self.is_committed {
            return;
        }
        while let Some(page) = self.owners.removed.pop() {
            match self.timing {
                FreeTiming::AfterFence => self.owners.subtract_pending(page),
                FreeTiming::Now => self.owners.add(SharingReservation(()), page),
            }
        }
    }
}
