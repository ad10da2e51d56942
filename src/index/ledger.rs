//! The debugging ledger: holders of each index, their history, and how long indices live.
//!
//! It is kept only in debug mode, through [`Ledgered`](super::Ledgered): the structures that decide ownership
//! do not know it. Recording costs a clone of an `Arc` per index. It is not synchronised; callers wrap it in
//! the lock of its structure.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::base::bounded::narrow;
use crate::base::{IndexVec, widen};

use super::BadFrees;

/// A name that a caller gave to identify itself in reports.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// Text, for example the id of a request.
    Text(String),
    /// An integer, for example the number of a request, in decimal: it may have more than 64 bits.
    Number(String),
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => write!(f, "'{text}'"),
            Self::Number(number) => write!(f, "{number}"),
        }
    }
}

/// One call that takes or frees indices: its owner, its place and its time.
#[derive(Clone, Debug)]
pub struct Act {
    /// The owner that the call named, if any.
    pub owner: Option<Owner>,
    /// File, line and function of the call.
    pub site: Arc<str>,
    /// The time of the call.
    pub at: Instant,
    /// The number of acts recorded before it in this process.
    pub number: u64,
}

/// The number of acts recorded in this process.
static RECORDED: AtomicU64 = AtomicU64::new(0);

impl Act {
    /// The site of an act whose place is not known.
    pub const UNKNOWN_PLACE: &str = "an unknown place";

    /// An act that happens now.
    #[must_use]
    pub fn new(owner: Option<Owner>, site: &str) -> Self {
        Self { owner, site: site.into(), at: Instant::now(), number: RECORDED.fetch_add(1, Relaxed) }
    }

    /// The number of acts recorded so far in this process.
    #[must_use]
    pub fn count() -> u64 {
        RECORDED.load(Relaxed)
    }

    /// The time from the act to `now`.
    #[must_use]
    pub fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.at)
    }
}

thread_local! {
    /// The act of this thread in progress.
    static CURRENT: RefCell<Option<Arc<Act>>> = const { RefCell::new(None) };
}

impl Act {
    /// The act that this thread began last and has not ended.
    #[must_use]
    pub fn current() -> Arc<Self> {
        let announced = CURRENT.with_borrow(Clone::clone);
        announced.unwrap_or_else(|| Arc::new(Self::new(None, Self::UNKNOWN_PLACE)))
    }

    /// Makes this the act of the current thread until the guard drops.
    #[must_use]
    pub fn begin(self: Arc<Self>) -> ActGuard {
        ActGuard { outer: CURRENT.replace(Some(self)), of_this_thread: PhantomData }
    }
}

/// Ends the act that [`Act::begin`] began when it drops.
#[derive(Debug)]
pub struct ActGuard {
    outer: Option<Arc<Act>>,
    of_this_thread: PhantomData<*const ()>,
}

impl Drop for ActGuard {
    fn drop(&mut self) {
        CURRENT.set(self.outer.take());
    }
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(owner) = &self.owner {
            write!(f, "{owner} at ")?;
        }
        f.write_str(&self.site)
    }
}

/// The state of an index, as reports show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexState {
    /// The index is available.
    Free,
    /// An owner holds the index.
    Live,
    /// A prefix cache alone holds the index, and can free it.
    Evictable,
    /// A prefix cache alone holds the index, with leases.
    Locked,
    /// The index is freed, but kept until work in flight is done.
    Fenced,
}

impl IndexState {
    /// The name of this state.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Live => "live",
            Self::Evictable => "evictable",
            Self::Locked => "locked",
            Self::Fenced => "fenced",
        }
    }
}

/// Neighbouring indices with the same state and the same holders.
#[derive(Clone, Debug)]
pub struct Span {
    /// The first index, and the one behind the last.
    pub range: Range<u32>,
    /// The state of each.
    pub state: IndexState,
    /// The holders of these indices, when they have any and the ledger is open.
    pub holders: Vec<Arc<Act>>,
}

/// The acts that gave the values of a list: the end of each part, and its act. Empty while the ledger is
/// closed.
pub type Signatures = Vec<(usize, Arc<Act>)>;

/// Number of entries in the histogram of lifetimes: one per power of two of microseconds.
pub const LIFETIME_BUCKETS: usize = 48;

/// The last lifetime of one index.
#[derive(Clone, Debug, Default)]
struct Life {
    /// The last act that took it.
    taken: Option<Arc<Act>>,
    /// The act that freed it since. `None` while it is live.
    given: Option<Arc<Act>>,
}

/// The holders of each index of a space, the act that freed it last, and a histogram of lifetimes.
///
/// Every recorded change is attributed to the current act of the thread: see [`Act::begin`].
///
/// ```
/// use std::sync::Arc;
/// use kvpool::index::{Act, Ledger, Owner};
/// let mut ledger = Ledger::default();
/// let owner = Owner::Text("request 7".into());
/// let acting = Arc::new(Act::new(Some(owner), "engine.py:12 in admit")).begin();
/// ledger.record_take(3..5);
/// drop(acting);
/// let _acting = Arc::new(Act::new(None, "engine.py:40 in finish")).begin();
/// ledger.record_release(4..5);
/// assert_eq!(ledger.holders(3).len(), 1);
/// assert_eq!(
///     ledger.history(4).unwrap(),
///     "taken by 'request 7' at engine.py:12 in admit, given back by engine.py:40 in finish"
/// );
/// ```
#[derive(Clone, Debug)]
pub struct Ledger {
    /// The lives of indices, by index. Indices beyond the end were never taken.
    lives: Vec<Life>,
    /// Holders beyond the first, of shared indices.
    more: HashMap<u32, Vec<Arc<Act>>>,
    /// The acts that free each index in the call in progress, where it is not the thread's own act alone.
    givers: HashMap<u32, Vec<Arc<Act>>>,
    lifetimes: [u64; LIFETIME_BUCKETS],
    /// The acts behind the values that an open group has collected.
    group: Signatures,
    /// Indices that became free since the last [`Ledger::take_freed`], once [`Ledger::list_freed`] was
    /// called.
    freed: Option<Vec<Range<u32>>>,
}

impl Default for Ledger {
    fn default() -> Self {
        Self {
            lives: Vec::new(),
            more: HashMap::new(),
            givers: HashMap::new(),
            lifetimes: [0; LIFETIME_BUCKETS],
            group: Signatures::new(),
            freed: None,
        }
    }
}

impl Ledger {
    /// Records that indices were taken.
    pub fn record_take(&mut self, range: Range<u32>) {
        self.unlist_freed(&range);
        let end = widen(range.end);
        if self.lives.len() < end {
            self.lives.resize_with(end, Life::default);
        }
        let act = Act::current();
        for life in &mut self.lives[widen(range.start)..end] {
            *life = Life { taken: Some(Arc::clone(&act)), given: None };
        }
    }

    /// Records that the last holder of indices freed them.
    pub fn record_release(&mut self, range: Range<u32>) {
        let current = Act::current();
        for index in range {
            self.more.remove(&index);
            let act = self.givers.get(&index).and_then(|givers| givers.last()).unwrap_or(&current);
            let Some(life) = self.lives.get_mut(widen(index)) else { continue };
            if let Some(taken) = life.taken.as_ref().filter(|_| life.given.is_none()) {
                let micros = act.at.saturating_duration_since(taken.at).as_micros();
                let bucket = widen(u128::BITS - micros.leading_zeros()).min(LIFETIME_BUCKETS - 1);
                self.lifetimes[bucket] += 1;
                life.given = Some(Arc::clone(act));
            }
        }
    }

    /// Records that indices are available again: together with [`Ledger::record_release`], or when a fence
    /// has passed.
    pub(super) fn record_free(&mut self, range: Range<u32>) {
        if let Some(freed) = &mut self.freed {
            freed.push(range);
        }
    }

    /// Removes indices from the list of those that became free.
    fn unlist_freed(&mut self, taken: &Range<u32>) {
        if let Some(freed) = self.freed.as_mut().filter(|freed| !freed.is_empty()) {
            let outside = |range: Range<u32>| {
                [range.start..range.end.min(taken.start), range.start.max(taken.end)..range.end]
            };
            *freed = freed.drain(..).flat_map(outside).filter(|range| !range.is_empty()).collect();
        }
    }

    /// Starts to list indices that become free, for [`Ledger::take_freed`].
    pub fn list_freed(&mut self) {
        self.freed.get_or_insert_default();
    }

    /// Indices that became free since the last call.
    pub fn take_freed(&mut self) -> Vec<Range<u32>> {
        self.freed.as_mut().map_or(Vec::new(), std::mem::take)
    }

    /// Records one more holder of `index`, which is held.
    pub fn add_holder(&mut self, index: u32) {
        self.more.entry(index).or_default().push(Act::current());
    }

    /// Records that a holder of `index` is gone: the oldest one with the owner of the current act; for an act
    /// without an owner the newest such holder; otherwise the oldest.
    pub fn remove_holder(&mut self, index: u32) {
        let Some(more) = self.more.get_mut(&index) else { return self.record_release(index..index + 1) };
        let Some(life) = self.lives.get_mut(widen(index)) else { return };
        let givers = self.givers.get_mut(&index).filter(|givers| !givers.is_empty());
        let act = givers.map_or_else(Act::current, |givers| givers.remove(0));
        let mut alike = (0..=more.len()).filter(|at| {
            let holder = if *at == 0 { life.taken.as_ref() } else { Some(&more[at - 1]) };
            holder.is_some_and(|holder| holder.owner == act.owner)
        });
        let leaves = if act.owner.is_some() { alike.next() } else { alike.next_back() };
        match leaves {
            Some(at) if at > 0 => drop(more.remove(at - 1)),
            _ => life.taken = Some(more.remove(0)),
        }
        if more.is_empty() {
            self.more.remove(&index);
        }
    }

    /// Sets the acts that give the values of the following call; `index_of` maps a value to its index, if it
    /// has one.
    pub(super) fn set_givers(
        &mut self,
        given: &IndexVec,
        by: &Signatures,
        index_of: impl Fn(i64) -> Option<u32>,
    ) {
        let mut values = given.iter();
        let mut begin = 0;
        for (end, act) in by {
            for index in values.by_ref().take(end - begin).filter_map(&index_of) {
                self.givers.entry(index).or_default().push(Arc::clone(act));
            }
            begin = *end;
        }
    }

    /// Clears the acts that [`Ledger::set_givers`] has set.
    pub(super) fn clear_givers(&mut self) {
        self.givers.clear();
    }

    /// Replaces the act in progress by `owner` in the holders of `index`, if that act took or shared it.
    pub fn sign(&mut self, index: u32, owner: &Arc<Act>) {
        let act = Act::current();
        let first = self.lives.get_mut(widen(index)).and_then(|life| life.taken.as_mut());
        let mut holders = first.into_iter().chain(self.more.get_mut(&index).into_iter().flatten());
        // A page that several requests of one call share has one holder per request.
        if let Some(holder) = holders.find(|holder| Arc::ptr_eq(holder, &act)) {
            *holder = Arc::clone(owner);
        }
    }

    /// Records that everything was freed.
    pub fn clear(&mut self) {
        self.record_release(0..narrow(self.lives.len()));
    }

    /// The holders of `index`, oldest first. Empty when it is not live.
    #[must_use]
    pub fn holders(&self, index: u32) -> Vec<Arc<Act>> {
        let life = self.lives.get(widen(index)).filter(|life| life.given.is_none());
        let first = life.and_then(|life| life.taken.as_ref());
        first.into_iter().chain(self.more.get(&index).into_iter().flatten()).cloned().collect()
    }

    /// The last take of `index`, its holders and its free, in words. `None` if it was never taken.
    #[must_use]
    pub fn history(&self, index: u32) -> Option<String> {
        let Life { taken, given } = self.lives.get(widen(index))?;
        let mut words = format!("taken by {}", taken.as_ref()?);
        for act in self.more.get(&index).into_iter().flatten() {
            let _ = write!(words, ", shared by {act}");
        }
        if let Some(given) = given {
            let _ = write!(words, ", given back by {given}");
        }
        Some(words)
    }

    /// The numbers of lifetimes that ended within 1, 2, 4, ... microseconds; each counts once, in the
    /// smallest entry.
    #[must_use]
    pub const fn lifetimes(&self) -> &[u64; LIFETIME_BUCKETS] {
        &self.lifetimes
    }

    /// Adds histories to the first invalid indices of a report; `index_of` maps them to indices of this
    /// ledger.
    pub fn explain(&self, bad: &mut BadFrees, index_of: impl Fn(u32) -> u32) {
        bad.explain(|given| u32::try_from(given).ok().and_then(|given| self.history(index_of(given))));
    }
}

/// A ledger that is open or, outside of debug mode, closed.
#[derive(Clone, Debug, Default)]
pub struct Book(Option<Box<Ledger>>);

impl Book {
    /// Opens the ledger.
    pub fn open(&mut self) {
        self.0 = Some(Box::default());
    }

    /// The ledger, if it is open.
    #[must_use]
    pub fn ledger(&self) -> Option<&Ledger> {
        self.0.as_deref()
    }

    /// Works like [`Book::ledger`], but mutable.
    pub fn ledger_mut(&mut self) -> Option<&mut Ledger> {
        self.0.as_deref_mut()
    }

    /// Calls [`Ledger::record_take`] if open.
    #[inline]
    pub(super) fn record_take(&mut self, range: Range<u32>) {
        if let Some(ledger) = &mut self.0 {
            ledger.record_take(range);
        }
    }

    /// Calls [`Ledger::record_release`] if open.
    #[inline]
    pub(super) fn record_release(&mut self, range: Range<u32>) {
        if let Some(ledger) = &mut self.0 {
            ledger.record_release(range);
        }
    }

    /// Calls [`Ledger::clear`] if open.
    pub(super) fn clear(&mut self) {
        if let Some(ledger) = &mut self.0 {
            ledger.clear();
        }
    }

    /// Calls [`Ledger::add_holder`] if open.
    #[inline]
    pub(super) fn add_holder(&mut self, index: u32) {
        if let Some(ledger) = &mut self.0 {
            ledger.add_holder(index);
        }
    }

    /// Calls [`Ledger::remove_holder`] if open.
    #[inline]
    pub(super) fn remove_holder(&mut self, index: u32) {
        if let Some(ledger) = &mut self.0 {
            ledger.remove_holder(index);
        }
    }

    /// Attributes the last values of an open group, which now has `count`, to the act in progress.
    pub(super) fn sign_group(&mut self, count: usize) {
        if let Some(ledger) = &mut self.0 {
            ledger.group.push((count, Act::current()));
        }
    }

    /// Takes the acts of a group that ends.
    pub(super) fn take_group(&mut self) -> Signatures {
        self.0.as_mut().map_or(Signatures::new(), |ledger| std::mem::take(&mut ledger.group))
    }

    /// Calls [`Ledger::explain`] if open and something was dropped.
    pub(super) fn explain(&self, bad: &mut BadFrees, index_of: impl Fn(u32) -> u32) {
        if let Some(ledger) = self.ledger().filter(|_| bad.dropped() > 0) {
            ledger.explain(bad, index_of);
        }
    }
}

/// The indices of `range` by state and holders; equal neighbours share a span.
pub(super) fn spans(
    range: Range<u32>,
    ledger: Option<&Ledger>,
    state_of: impl Fn(u32) -> IndexState,
) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for index in range {
        let state = state_of(index);
        let holders = match (state, ledger) {
            (IndexState::Live | IndexState::Evictable | IndexState::Locked, Some(ledger)) => {
                ledger.holders(index)
            }
            _ => Vec::new(),
        };
        match spans.last_mut() {
            Some(last) if last.state == state && same(&last.holders, &holders) => last.range.end = index + 1,
            _ => spans.push(Span { range: index..index + 1, state, holders }),
        }
    }
    spans
}

fn same(one: &[Arc<Act>], other: &[Arc<Act>]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| Arc::ptr_eq(one, other))
}
