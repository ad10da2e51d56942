//! Leases: a request's hold on a prefix.

use std::fmt;
use std::sync::{Arc, Weak};

use crate::base::sync::explored::{Mutex, lock};
use crate::base::{Error, ErrorKind, Id, IndexVec, Page, RequestRow, Result, StateSlot, reserve, widen};
use crate::cache::{Hold, Namespace, Tokens};
use crate::index::put_slots_of;
use crate::kernels::Indices;
use crate::memory::Stream;
use crate::pool::batch_planner::PlannerState;
use crate::pool::slot_tensors::SlotTensors;
use crate::pool::{BatchPlanner, GdnPool, TokenToKvPoolAllocator};
use crate::tensor::TensorView;

use super::{Kept, Shared, pages_of};

/// A request's hold on a prefix: its pages are not evicted. Dropping it releases them.
pub struct Lease {
    shared: Arc<Shared>,
    namespace: Namespace,
    /// How often the allocator had been cleared.
    clears: u64,
    /// The stream on which it was made, for what a drop frees.
    stream: Stream,
    /// `None` once it is released.
    held: Mutex<Option<Held>>,
}

/// What a lease holds.
struct Held {
    hold: Hold,
    /// The request whose prefix it is.
    request: Option<Request>,
    /// Whether its user has released it. The request keeps it to its end.
    is_given_up: bool,
}

/// A request of a planner, which keeps its lease.
#[derive(Clone)]
struct Request {
    planner: Weak<BatchPlanner>,
    row: i64,
}

/// What a request has computed since the end of its lease.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// Tokens from the end of the lease on.
    pub tokens: &'a dyn Tokens,
    /// Their slots. A planner knows those of its requests.
    pub slots: Option<&'a IndexVec>,
    /// The working slot whose state is that of the last whole page's end.
    pub state: Option<u32>,
}

/// The result of a publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Tokens of the lease now.
    pub length: usize,
    /// Tokens that others had published in between: the cache has other slots for them, and those offered were
    /// freed.
    pub duplicates: usize,
    /// The cache's pages from the former end of the lease on.
    pub pages: Vec<Page>,
}

impl Lease {
    pub(super) fn new(
        shared: &Arc<Shared>,
        hold: Hold,
        clears: u64,
        namespace: Namespace,
        stream: Stream,
    ) -> Self {
        let state = Some(Held { hold, request: None, is_given_up: false });
        Self { shared: Arc::clone(shared), namespace, clears, stream, held: Mutex::new(state) }
    }

    /// The namespace of the prefix.
    #[must_use]
    pub const fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Tokens of the prefix, in whole pages.
    ///
    /// # Errors
    /// [`ErrorKind::StaleBuffer`] after its release, or when the allocator was cleared.
    pub fn len(&self) -> Result<usize> {
        self.with(self.stream, |_, held| Ok(held.hold.len()))
    }

    /// Tokens whose K and V were cached when it was made, in whole pages: more than [`Self::len`] if the cache has
    /// states, but no snapshot at their end.
    ///
    /// # Errors
    /// As [`Self::len`].
    pub fn kv_len(&self) -> Result<usize> {
        self.with(self.stream, |_, held| Ok(held.hold.found()))
    }

    /// Whether the prefix has no tokens.
    ///
    /// # Errors
    /// As [`Self::len`].
    pub fn is_empty(&self) -> Result<bool> {
        self.len().map(|len| len == 0)
    }

    /// Calls `work` with what the cache keeps and with what the lease holds, under their locks.
    fn with<R>(&self, stream: Stream, work: impl FnOnce(&mut Kept, &mut Held) -> Result<R>) -> Result<R> {
        self.with_request(stream, |kept, held| {
            if held.is_given_up { Err(stale("it was released")) } else { work(kept, held) }
        })
    }

    /// Like [`Self::with`], also if only the request needs the lease still.
    fn with_request<R>(
        &self,
        stream: Stream,
        work: impl FnOnce(&mut Kept, &mut Held) -> Result<R>,
    ) -> Result<R> {
        let mut held = lock(&self.held);
        let Some(held) = held.as_mut() else { return Err(stale("it was released")) };
        let mut kept = self.shared.current(stream);
        if kept.clears != self.clears {
            return Err(stale("the allocator was cleared, and its slots are gone"));
        }
        work(&mut kept, held)
    }

    /// Calls `work` with the hold of this lease, if it is of the cache `shared`.
    pub(super) fn with_hold<R>(
        &self,
        shared: &Arc<Shared>,
        stream: Stream,
        work: impl FnOnce(&mut Kept, &Hold) -> Result<R>,
    ) -> Result<R> {
        if !Arc::ptr_eq(shared, &self.shared) {
            return Err(Error::config("the lease is of another prefix cache"));
        }
        self.with(stream, |kept, held| work(kept, &held.hold))
    }

    /// The pages of the prefix from token `from` on.
    ///
    /// # Errors
    /// As [`Self::len`].
    pub fn pages(&self, from: usize) -> Result<Vec<Page>> {
        self.with(self.stream, |kept, held| Ok(kept.tree.pages(&held.hold, from)))
    }

    /// The slots of the prefix: 1-D int32, valid on `stream`.
    ///
    /// # Errors
    /// As [`Self::len`]; as [`TokenToKvPoolAllocator::alloc`](crate::pool::TokenToKvPoolAllocator::alloc).
    pub fn slots(&self, stream: Stream) -> Result<TensorView> {
        self.show(&self.pages(0)?, stream)
    }

    /// The slots of pages of this cache: 1-D int32, valid on `stream`.
    ///
    /// # Errors
    /// As [`TokenToKvPoolAllocator::alloc`](crate::pool::TokenToKvPoolAllocator::alloc).
    pub fn show(&self, pages: &[Page], stream: Stream) -> Result<TensorView> {
        let allocator = &self.shared.allocator;
        let page_size = crate::base::bounded::narrow(allocator.page_size());
        let mut slots = reserve(pages.len() * widen(page_size))?;
        put_slots_of(pages.iter().map(|page| page.number()), page_size, &mut slots);
        allocator.lock().show(slots, stream)
    }

    /// The track slot of the snapshot at the end of the prefix.
    ///
    /// # Errors
    /// As [`Self::len`].
    pub fn state_slot(&self) -> Result<Option<StateSlot>> {
        self.with(self.stream, |kept, held| Ok(kept.tree.snapshot(&held.hold)))
    }

    /// Copies the snapshot at the end of the prefix to working slot `row`, or resets that for a prefix without
    /// tokens.
    ///
    /// # Errors
    /// As [`Self::len`] and [`GdnPool::copy_states`](crate::pool::GdnPool::copy_states);
    /// [`ErrorKind::Config`] when the cache has no states, or the prefix has tokens and no snapshot.
    pub fn restore(&self, row: i64, stream: Stream) -> Result<()> {
        let Some(states) = &self.shared.states else {
            return Err(Error::config("the prefix cache was made without states"));
        };
        // Under the locks: the snapshot is not given up before it is copied.
        self.with(stream, |kept, held| {
            let row = one_index(row);
            match kept.tree.snapshot(&held.hold) {
                Some(state) => states.copy_states(&one_index(state.number().into()), &row, stream),
                None if held.hold.is_empty() => states.reset_states(&row, stream),
                None => Err(Error::config(format!(
                    "the lease has {} tokens and no snapshot of the state at their end",
                    held.hold.len()
                ))),
            }
        })
    }

    /// Offers what the request has computed. Whole pages become the cache's, and the lease grows over them; a
    /// partial page at the end stays the caller's. The caller's slots of pages that others have published in
    /// between are freed.
    ///
    /// With a state, a snapshot of it is kept at the new end of the lease, if there is a track slot for it.
    ///
    /// # Errors
    /// As [`Self::len`]. [`ErrorKind::Config`] for a number that is no token id, and when there are not as many
    /// slots as tokens; [`ErrorKind::IndexOwnership`] for slots that are not live, are listed twice, are cached
    /// already, or do not fill pages in order. Nothing is changed.
    pub fn publish(&self, offer: &Offer<'_>, stream: Stream) -> Result<Published> {
        let page_size = self.shared.allocator.page_size();
        let (tokens, slots) = (offer.tokens.count(), offer.slots.map_or(offer.tokens.count(), IndexVec::len));
        if tokens != slots {
            return Err(Error::config(format!(
                "{tokens} tokens and {slots} slots were published; the numbers must be equal"
            )));
        }
        if offer.state.is_some() && self.shared.states.is_none() {
            return Err(Error::config("a state was published to a prefix cache without states"));
        }
        let pages = offer.slots.map(|slots| pages_of(slots, page_size)).transpose()?;
        self.with(stream, |kept, held| {
            let published = self.publish_pages(kept, held, offer.tokens, pages, stream)?;
            if let (Some(row), Some(states)) = (offer.state, &self.shared.states) {
                snapshot(kept, &held.hold, row, states, stream)?;
            }
            Ok(published)
        })
    }

    fn publish_pages(
        &self,
        kept: &mut Kept,
        held: &mut Held,
        tokens: &dyn Tokens,
        pages: Option<Vec<Page>>,
        stream: Stream,
    ) -> Result<Published> {
        let (shared, page_size) = (&self.shared, kept.tree.page_size());
        let (begin, whole) = (held.hold.len(), tokens.count() / page_size * page_size);
        let found = kept.tree.find(&held.hold, tokens)?;
        let cached = kept.tree.found_pages(&found);
        let fresh = tokens.to_vec(found.len()..whole)?;
        tokens.check(whole..tokens.count())?;
        let planner = held.planner()?;
        let publish = |slots: &mut SlotTensors, mut request: Option<(&mut PlannerState, RequestRow)>| {
            let known = request
                .as_ref()
                .map(|(state, row)| state.pages(*row, begin, begin + tokens.count()))
                .transpose()?;
            let mut pages = match (known, pages) {
                (Some(known), Some(given)) if known != given => {
                    return Err(Error::config("the slots published are not those of the request"));
                }
                (Some(pages), _) | (None, Some(pages)) => pages,
                (None, None) => {
                    return Err(Error::config("slots are needed for a lease that no planner has"));
                }
            };
            let (given, new) = pages.split_at_mut(cached.len());
            slots.slots_mut().cache(new, given, &shared.owner)?;
            let duplicates = given.iter().zip(&cached).filter(|(given, cached)| given != cached).count();
            given.copy_from_slice(&cached);
            if let Some((state, row)) = &mut request {
                state.note_published(*row, begin / page_size, &pages);
            }
            Ok((pages, duplicates * page_size))
        };
        let published = shared.change_slots(self.clears, stream, |slots| match &planner {
            None => publish(slots, None),
            Some(planner) => planner.with_state(|state, table| {
                let is_mine = |row: &RequestRow| {
                    state.lease_of(*row, table).is_some_and(|lease| std::ptr::eq(&raw const **lease, self))
                };
                let row = held.request.as_ref().and_then(Request::row).filter(is_mine).ok_or_else(|| {
                    Error::config("the lease is of a request that its planner does not have")
                })?;
                publish(slots, Some((state, row)))
            }),
        })?;
        let Some((cached, duplicates)) = published else {
            return Err(stale("the allocator was cleared, and its slots are gone"));
        };
        let new = &cached[found.len() / page_size..];
        kept.counts.published += fresh.len();
        kept.tree.publish(&mut held.hold, found, fresh, new);
        kept.counts.duplicates += duplicates;
        Ok(Published { length: held.hold.len(), duplicates, pages: cached })
    }

    /// The row of its request, if a planner has that.
    #[must_use]
    pub fn row(&self) -> Option<i64> {
        let held = lock(&self.held);
        let request = held.as_ref()?.request.as_ref()?;
        (request.planner.strong_count() > 0).then_some(request.row)
    }

    /// Whether its pages are of `allocator`.
    pub(in crate::pool) fn is_of(&self, allocator: &Arc<TokenToKvPoolAllocator>) -> bool {
        Arc::ptr_eq(&self.shared.allocator, allocator)
    }

    /// Makes it the lease of a request, and returns its pages, with room for those that follow.
    ///
    /// # Errors
    /// As [`Self::len`]; [`ErrorKind::Config`] when it is that of another request.
    pub(in crate::pool) fn bind(&self, planner: &Weak<BatchPlanner>, row: i64) -> Result<Vec<i32>> {
        self.with(self.stream, |kept, held| {
            if let Some(other) = held.request.as_ref().filter(|request| request.planner.strong_count() > 0) {
                let text = format!("the lease is that of request row {} already; match again", other.row);
                return Err(Error::config(text));
            }
            let runs = kept.tree.runs(&held.hold);
            let count: usize = runs.iter().map(|run| run.len()).sum();
            let mut pages = reserve(count + count / 8 + 16)?;
            for run in runs {
                pages.extend(run.iter().map(|page| page.number().cast_signed()));
            }
            held.request = Some(Request { planner: Weak::clone(planner), row });
            Ok(pages)
        })
    }

    /// Undoes [`Self::bind`].
    pub(in crate::pool) fn unbind(&self) {
        if let Some(held) = lock(&self.held).as_mut() {
            held.request = None;
        }
        self.end_if_given_up();
    }

    fn end_if_given_up(&self) {
        let is_given_up = lock(&self.held).as_ref().is_some_and(|held| held.is_given_up);
        if is_given_up {
            self.end(self.stream);
        }
    }

    /// Another lease of the first `len` tokens, in whole pages.
    ///
    /// # Errors
    /// As [`Self::len`].
    pub(in crate::pool) fn again(&self, len: usize, stream: Stream) -> Result<Self> {
        let hold = self.with_request(stream, |kept, held| {
            let mut hold = kept.tree.hold_again(&held.hold);
            let gone = kept.tree.shorten(&mut hold, len / kept.tree.page_size() * kept.tree.page_size());
            self.shared.give_back(kept, &gone, stream);
            Ok(hold)
        })?;
        Ok(Self::new(&self.shared, hold, self.clears, self.namespace.clone(), stream))
    }

    /// Shortens it to `len` tokens, a whole number of pages, or ends it if that is 0: its request was cut.
    pub(in crate::pool) fn cut(&self, len: usize, stream: Stream) {
        if len == 0 {
            return self.end(stream);
        }
        let shortened = self.with_request(stream, |kept, held| {
            let whole = len / kept.tree.page_size() * kept.tree.page_size();
            let gone = kept.tree.shorten(&mut held.hold, whole);
            self.shared.give_back(kept, &gone, stream);
            Ok(())
        });
        // A lease that has ended needs no cut.
        drop(shortened);
    }

    /// Ends the lease. Later calls of it fail; a second release does nothing. The prefix of a planner's request
    /// stays until the request is finished.
    pub fn release(&self, stream: Stream) {
        if let Some(held) = lock(&self.held).as_mut()
            && held.request.as_ref().is_some_and(|request| request.planner.strong_count() > 0)
        {
            held.is_given_up = true;
            return;
        }
        self.end(stream);
    }

    fn end(&self, stream: Stream) {
        let mut held = lock(&self.held);
        let Some(Held { hold, .. }) = held.take() else { return };
        let mut kept = self.shared.current(stream);
        if kept.clears == self.clears {
            let gone = kept.tree.release(hold);
            self.shared.give_back(&kept, &gone, stream);
        }
    }
}

impl Held {
    /// The planner of its request.
    fn planner(&self) -> Result<Option<Arc<BatchPlanner>>> {
        let Some(request) = &self.request else { return Ok(None) };
        let planner = request.planner.upgrade();
        planner.map(Some).ok_or_else(|| Error::config("the planner of the lease's request is gone"))
    }
}

impl Request {
    /// Its row; `None` if that is no row, which the planner is about to find out.
    fn row(&self) -> Option<RequestRow> {
        u32::try_from(self.row).ok().map(RequestRow::new)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end(self.stream);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("len", &self.len().ok()).finish_non_exhaustive()
    }
}

/// Keeps a snapshot of working slot `row` at the end of a prefix, unless there is one already.
fn snapshot(kept: &mut Kept, hold: &Hold, row: u32, states: &GdnPool, stream: Stream) -> Result<()> {
    if hold.is_empty() || kept.tree.snapshot(hold).is_some() {
        return Ok(());
    }
    let free = states.alloc_track_slot().map(StateSlot::new);
    let Some(slot) = free.or_else(|| kept.tree.evict_snapshot()) else { return Ok(()) };
    let copied = states.copy_states(&one_index(row.into()), &one_index(slot.number().into()), stream);
    match copied {
        Ok(()) => kept.tree.set_snapshot(hold, slot),
        Err(_) => drop(states.free_track_slot(slot.number().into())),
    }
    copied
}

fn one_index(index: i64) -> Indices<'static> {
    Indices::Host(IndexVec::I64(vec![index]))
}

#[cold]
fn stale(why: &str) -> Error {
    Error::new(ErrorKind::StaleBuffer, format!("the lease cannot be used: {why}"))
}
