//! Publications, by which pages that a request has computed become the cache's.

use std::borrow::Cow;
use std::ops::Range;

use crate::base::{Error, IndexVec, Page, Result, try_with_capacity};
use crate::cache::Tokens;
use crate::memory::Stream;
use crate::pool::gdn_pool::Source;
use crate::pool::slot_tensors::SlotsAt;

use super::cache_core::{CacheCall, CacheState};
use super::lease::Lease;
use super::lease_state::LeaseState;
use super::loading::Loadable;
use super::pages::{PartialPage, pages_of};
use super::request::{FinishedRequests, LeaseKeeper, LeasedRequest};
use super::stale::cleared_error;
use super::taken_slot::TakenSlot;

/// The tokens that a request has computed since the end of its lease.
#[derive(Clone, Copy, Debug)]
pub struct Publication<'a> {
    /// Tokens from the end of the lease on.
    pub tokens: &'a dyn Tokens,
    /// The slots of the tokens. A planner has those of its requests.
    pub slots: Option<&'a IndexVec>,
    /// The working slot that has the state at the end of the last whole page.
    pub state: Option<i64>,
}

/// The result of a publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Tokens of the lease now.
    pub length: usize,
    /// Tokens that others had published in between: the cache has other slots for them, and those offered
    /// were freed.
    pub duplicates: usize,
    /// The cache's pages from the former end of the lease on.
    pub pages: Vec<Page>,
}

impl Lease {
    /// Offers what the request has computed. Whole pages become the cache's, and the lease grows over them; a
    /// partial page at the end stays the caller's. The caller's slots of pages that others have published in
    /// between are freed.
    ///
    /// With a state, a snapshot of it is kept at the new end of the lease, if there is a track slot for it and it
    /// is not worth less than all others. It is copied first.
    ///
    /// # Errors
    /// See [`Self::len`]. [`ErrorKind::Argument`] for a number that is no token id, and when there are not as
    /// many slots as tokens; [`ErrorKind::IndexOwnership`] for slots that are not live, are listed twice, are
    /// cached already, or do not fill pages in order; [`ErrorKind::Index`] for a state of no working slot; see
    /// [`GdnPool::copy_states`]. Nothing is changed, except that another snapshot may have been given up for
    /// the state.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`GdnPool::copy_states`]: crate::pool::GdnPool::copy_states
    /// [`ErrorKind::Index`]: crate::base::ErrorKind::Index
    /// [`ErrorKind::IndexOwnership`]: crate::base::ErrorKind::IndexOwnership
    pub fn publish(&self, publication: &Publication<'_>, stream: Stream) -> Result<Published> {
        let tokens = publication.tokens.count();
        let pages =
            publication.slots.map(|slots| self.pages_for(tokens, slots, PartialPage::Kept)).transpose()?;
        let Some(row) = publication.state else {
            return self.with(stream, |call, cache, lease| {
                self.publish_pages(call, cache, lease, publication.tokens, pages)
            });
        };
        // Read now, because other calls may run while the state is copied.
        let tokens = publication.tokens.to_vec(0..tokens)?;
        let snapshot = self.take_snapshot(&tokens, row, stream)?;
        self.with(stream, |call, cache, lease| {
            let published = self.publish_pages(call, cache, lease, &tokens.as_slice(), pages)?;
            // Another thread may have published the same pages meanwhile.
            if let Some(snapshot) = snapshot
                && cache.tree.snapshot(&lease.hold).is_none()
            {
                cache.tree.set_snapshot(&mut lease.hold, snapshot.keep());
                call.copy_offers_to_tier(cache);
            }
            Ok(published)
        })
    }

    /// Returns a copy of the state of `row`, for the end of the whole pages of `tokens` behind the lease.
    /// `None` if there is one already, no track slot for it, or if it is worth less than the others.
    fn take_snapshot(&self, tokens: &[i32], row: i64, stream: Stream) -> Result<Option<TakenSlot<'_>>> {
        let Some(states) = &self.shared.states else {
            return Err(Error::state("a state was published to a prefix cache without states"));
        };
        states.check_working(row)?;
        let taken = self.with(stream, |_, cache, lease| {
            lease.check_arrived()?;
            let found = cache.tree.find(&lease.hold, &tokens)?;
            let len = cache.tree.in_whole_pages(tokens.len());
            if !cache.tree.lacks_snapshot(&found, len) {
                return Ok(None);
            }
            Ok(TakenSlot::new(states, &self.shared.owner, cache, &mut lease.hold, Some((&found, len))))
        })?;
        if let Some(taken) = &taken {
            taken.make_ready(stream)?;
            states.set_state(taken.slot().into(), Source::Slot(row), stream)?;
        }
        Ok(taken)
    }

    /// Publishes what the request has computed, frees the partial page at the end, and ends the lease: the
    /// end of a request without a planner.
    ///
    /// # Errors
    /// See [`Self::publish`], also for the slots of the partial page; also [`ErrorKind::State`] for the
    /// lease of a request that a planner has. Nothing is changed.
    ///
    /// [`ErrorKind::State`]: crate::base::ErrorKind::State
    pub fn finish(&self, tokens: &dyn Tokens, slots: &IndexVec, stream: Stream) -> Result<Published> {
        let pages = self.pages_for(tokens.count(), slots, PartialPage::Freed)?;
        let published = self.with(stream, |call, cache, lease| {
            if let Some(request) = lease.request() {
                let row = request.row();
                let text = format!("the lease is that of request row {row}, which its planner finishes");
                return Err(Error::state(text));
            }
            self.publish_of(call, cache, lease, tokens, Some(pages), None)
        })?;
        self.release(stream);
        Ok(published)
    }

    /// Publishes what the request of a planner has computed, and finishes the request: its planner frees the
    /// other slots and the row, and the lease ends.
    ///
    /// # Errors
    /// See [`Self::publish`], after which nothing is changed; [`ErrorKind::State`] for a lease that no
    /// planner has. See [`BatchPlanner::finish`], after which the tokens are published.
    ///
    /// [`BatchPlanner::finish`]: crate::pool::BatchPlanner::finish
    /// [`ErrorKind::State`]: crate::base::ErrorKind::State
    pub fn finish_request(&self, publication: &Publication<'_>, stream: Stream) -> Result<FinishedRequests> {
        let request = self.with(stream, |_, _, lease| {
            lease.request().map(|request| Ok((request.planner()?, request.row()))).transpose()
        })?;
        let Some((planner, row)) = request else {
            return Err(Error::state("no planner has the lease, so none can finish its request"));
        };
        let _ = self.publish(publication, stream)?;
        let finished = planner.finish_request(row, stream)?;
        self.release(stream);
        Ok(finished)
    }

    /// Returns the pages of the slots that are offered for so many tokens.
    fn pages_for(&self, tokens: usize, slots: &IndexVec, partial_page: PartialPage) -> Result<Vec<Page>> {
        if tokens != slots.len() {
            return Err(Error::argument(format!(
                "{tokens} tokens and {} slots were published; the numbers must be equal",
                slots.len()
            )));
        }
        pages_of(slots, self.allocator.page_size(), partial_page)
    }

    /// Publishes the whole pages of `tokens`, and frees a partly filled page behind them. `planner` is the
    /// planner of the lease's request, if it has one.
    fn publish_pages(
        &self,
        call: &CacheCall<'_>,
        cache: &mut CacheState,
        lease: &mut LeaseState,
        tokens: &dyn Tokens,
        pages: Option<Vec<Page>>,
    ) -> Result<Published> {
        let planner = lease.holder.planner()?;
        let published = self.publish_of(call, cache, lease, tokens, pages, planner.as_deref());
        // It may be the last owner.
        if let Some(planner) = planner {
            call.slots.discard(planner);
        }
        published
    }

    /// Works like [`Self::publish_pages`], for the request that `planner` has, if any.
    fn publish_of(
        &self,
        call: &CacheCall<'_>,
        cache: &mut CacheState,
        lease: &mut LeaseState,
        tokens: &dyn Tokens,
        pages: Option<Vec<Page>>,
        planner: Option<&dyn LeaseKeeper>,
    ) -> Result<Published> {
        lease.check_arrived()?;
        let (begin, page_size) = (lease.hold.len(), cache.tree.page_size());
        let whole = cache.tree.in_whole_pages(tokens.count());
        let found = cache.tree.find(&lease.hold, tokens)?;
        let cached = cache.tree.found_pages(&found)?;
        let fresh = tokens.to_vec(found.len()..whole)?;
        tokens.check(whole..tokens.count())?;
        cache.tree.check_memory(&lease.hold, &found, fresh.len())?;
        let published = call.slots.change(self.epoch, |mut slots| {
            let mut request = planner.map(|planner| self.request_of(planner, lease)).transpose()?;
            let mut pages = pages_of_request(request.as_deref(), begin..begin + tokens.count(), pages)?;
            let rest = pages.split_off((whole / page_size).min(pages.len()));
            let duplicates = self.hand_over(&mut pages, &rest, &cached, &mut slots)?;
            if let Some(request) = &mut request {
                request.record_published(begin / page_size, &pages);
            }
            Ok((pages, duplicates * page_size))
        })?;
        let (pages, duplicates) = published.ok_or_else(cleared_error)?;
        let new = &pages[found.len() / page_size..];
        cache.counts.published += fresh.len();
        cache.tree.publish(&mut lease.hold, found, fresh, new);
        if let Some(below) = &mut cache.below {
            below.record_publisher(call.slots.stream());
        }
        call.copy_offers_to_tier(cache);
        lease.loadable = Loadable::default();
        cache.counts.duplicates += duplicates;
        Ok(Published { length: lease.hold.len(), duplicates, pages })
    }

    /// Returns the request that keeps this lease, locked.
    ///
    /// # Errors
    /// [`ErrorKind::State`] when its planner no longer has it.
    ///
    /// [`ErrorKind::State`]: crate::base::ErrorKind::State
    fn request_of<'a>(
        &self,
        planner: &'a dyn LeaseKeeper,
        lease: &LeaseState,
    ) -> Result<Box<dyn LeasedRequest + 'a>> {
        let request =
            lease.holder.request().and_then(|request| planner.leased_request(request.row(), self.id()));
        request.ok_or_else(|| Error::state("the lease is of a request that its planner does not have"))
    }

    /// Makes `pages` the cache's, and frees `rest`. If the cache has pages for the first of the tokens
    /// already, `cached`, these replace the first of `pages`, which are freed. Returns the number of pages
    /// replaced.
    ///
    /// # Errors
    /// See [`SlotAllocator::cache`](crate::index::SlotAllocator::cache); nothing is changed.
    fn hand_over(
        &self,
        pages: &mut [Page],
        rest: &[Page],
        cached: &[Page],
        slots: &mut SlotsAt<'_>,
    ) -> Result<usize> {
        let (offered, new) = pages.split_at_mut(cached.len());
        let mut freed = Cow::Borrowed(&*offered);
        if !rest.is_empty() {
            let mut all = try_with_capacity(offered.len() + rest.len())?;
            all.extend_from_slice(offered);
            all.extend_from_slice(rest);
            freed = Cow::Owned(all);
        }
        slots.slots_mut().cache(new, &freed, &self.shared.owner)?;
        let duplicates = offered.iter().zip(cached).filter(|(offered, cached)| offered != cached).count();
        offered.copy_from_slice(cached);
        Ok(duplicates)
    }
}

/// Returns the pages of positions `range`, from the request if there is one; `given` pages must equal those.
fn pages_of_request(
    request: Option<&dyn LeasedRequest>,
    range: Range<usize>,
    given: Option<Vec<Page>>,
) -> Result<Vec<Page>> {
    match (request, given) {
        (None, None) => Err(Error::argument("slots are needed for a lease that no planner has")),
        (None, Some(given)) => Ok(given),
        (Some(request), given) => {
            let pages = request.pages(range.start, range.end)?;
            if given.is_some_and(|given| given != pages) {
                return Err(Error::argument("the slots published are not those of the request"));
            }
            Ok(pages)
        }
    }
}
