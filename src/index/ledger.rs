//! The debugging ledger: holders of each index, their history, and how long indices live.
//!
//! A ledger is kept only in debug mode, through [`Ledgered`](super::Ledgered): the structures that decide
//! ownership do not depend on it. Recording a call costs the clone of an `Arc` for each index. A ledger is
//! not synchronised: the lock of its structure protects it.

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

/// A call that takes or frees indices: its owner, its place in the program, and its time.
#[derive(Clone, Debug)]
pub struct CallRecord {
    /// The owner that the call named, if any.
    pub owner: Option<Owner>,
    /// File, line and function of the call.
    pub site: Arc<str>,
    /// The time of the call.
    pub at: Instant,
    /// The number of calls recorded before it in this process.
    pub number: u64,
}

/// The number of calls recorded in this process.
static RECORDED: AtomicU64 = AtomicU64::new(0);

impl CallRecord {
    /// The site of a call whose place in the program is not known.
    pub const UNKNOWN_SITE: &str = "an unknown place";

    /// Records a call that begins now.
    #[must_use]
    pub fn new(owner: Option<Owner>, site: &str) -> Self {
        Self { owner, site: site.into(), at: Instant::now(), number: RECORDED.fetch_add(1, Relaxed) }
    }

    /// Returns the number of calls recorded so far in this process.
    #[must_use]
    pub fn count() -> u64 {
        RECORDED.load(Relaxed)
    }

    /// Returns the time from the call to `now`.
    #[must_use]
    pub fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.at)
    }
}

thread_local! {
    /// The call in progress on this thread.
    static CURRENT: RefCell<Option<Arc<CallRecord>>> = const { RefCell::new(None) };
}

impl CallRecord {
    /// Returns the innermost call in progress on this thread; one at an unknown place if there is none.
    #[must_use]
    pub fn current() -> Arc<Self> {
        let innermost = CURRENT.with_borrow(Clone::clone);
        innermost.unwrap_or_else(|| Arc::new(Self::new(None, Self::UNKNOWN_SITE)))
    }

    /// Makes this the call in progress on the current thread until the guard drops.
    #[must_use]
    pub fn begin(self: Arc<Self>) -> CallGuard {
        CallGuard { outer: CURRENT.replace(Some(self)), of_this_thread: PhantomData }
    }
}

/// A guard that ends the call begun by [`CallRecord::begin`] when it is dropped.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::index::{CallGuard, CallRecord, Owner};
/// let record = Arc::new(CallRecord::new(Some(Owner::Text("scheduler".into())), "step.rs:12"));
/// let guard: CallGuard = Arc::clone(&record).begin();
/// assert_eq!(CallRecord::current().to_string(), record.to_string());
/// drop(guard);
/// assert_ne!(CallRecord::current().to_string(), record.to_string());
/// ```
#[derive(Debug)]
pub struct CallGuard {
    outer: Option<Arc<CallRecord>>,
    of_this_thread: PhantomData<*const ()>,
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        CURRENT.set(self.outer.take());
    }
}

impl fmt::Display for CallRecord {
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
    /// Returns the name of this state.
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
///
/// ```
/// use kvpool::index::{IndexState, Ledgered, Order, SlotAllocator, Span};
/// let mut slots = Ledgered::from(SlotAllocator::new(8, 1, Order::Sorted).unwrap());
/// slots.open_ledger();
/// slots.alloc::<i32>(3).unwrap();
/// let spans = slots.spans(|_page| false);
/// let live: &Span = spans.iter().find(|span| span.state == IndexState::Live).expect("three are");
/// assert_eq!((live.range.clone(), live.holders.len()), (1..4, 1));
/// ```
#[derive(Clone, Debug)]
pub struct Span {
    /// The indices of the span.
    pub range: Range<u32>,
    /// The state of each.
    pub state: IndexState,
    /// The holders of these indices, as far as a ledger has recorded them.
    pub holders: Vec<Arc<CallRecord>>,
}

/// The calls that freed the values of a list, part by part: the end of each part, and its call. Empty without
/// a ledger.
pub type Attribution = Vec<(usize, Arc<CallRecord>)>;

/// Number of entries in the histogram of lifetimes: one per power of two of microseconds.
pub const LIFETIME_BUCKETS: usize = 48;

/// The last lifetime of one index.
#[derive(Clone, Debug, Default)]
struct Life {
    /// The last call that took it.
    taken_by: Option<Arc<CallRecord>>,
    /// The call that freed it since then. `None` while it is live.
    freed_by: Option<Arc<CallRecord>>,
}

/// The holders of each index of a space, the call that freed it last, and a histogram of lifetimes.
///
/// Every change is attributed to the call in progress on the current thread: see [`CallRecord::begin`].
///
/// ```
/// use std::sync::Arc;
/// use kvpool::index::{CallRecord, Ledger, Owner};
/// let mut ledger = Ledger::default();
/// let owner = Owner::Text("request 7".into());
/// let call = Arc::new(CallRecord::new(Some(owner), "engine.py:12 in admit")).begin();
/// ledger.record_take(3..5);
/// drop(call);
/// let _call = Arc::new(CallRecord::new(None, "engine.py:40 in finish")).begin();
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
    more: HashMap<u32, Vec<Arc<CallRecord>>>,
    /// The calls that free each index, while a free runs on behalf of several earlier calls.
    freed_by: HashMap<u32, Vec<Arc<CallRecord>>>,
    lifetimes: [u64; LIFETIME_BUCKETS],
    /// The calls that freed the values that an open group has collected.
    group: Attribution,
    /// Indices that became free since the last [`Ledger::take_freed`], once [`Ledger::list_freed`] was
    /// called.
    freed: Option<Vec<Range<u32>>>,
}

impl Default for Ledger {
    fn default() -> Self {
        Self {
            lives: Vec::new(),
            more: HashMap::new(),
            freed_by: HashMap::new(),
            lifetimes: [0; LIFETIME_BUCKETS],
            group: Attribution::new(),
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
        let call = CallRecord::current();
        for life in &mut self.lives[widen(range.start)..end] {
            *life = Life { taken_by: Some(Arc::clone(&call)), freed_by: None };
        }
    }

    /// Records that the last holder of indices freed them.
    pub fn record_release(&mut self, range: Range<u32>) {
        let current = CallRecord::current();
        for index in range {
            self.more.remove(&index);
            let call = self.freed_by.get(&index).and_then(|calls| calls.last()).unwrap_or(&current);
            let Some(life) = self.lives.get_mut(widen(index)) else { continue };
            if let Some(taken) = life.taken_by.as_ref().filter(|_| life.freed_by.is_none()) {
                let micros = call.at.saturating_duration_since(taken.at).as_micros();
                let bucket = widen(u128::BITS - micros.leading_zeros()).min(LIFETIME_BUCKETS - 1);
                self.lifetimes[bucket] += 1;
                life.freed_by = Some(Arc::clone(call));
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

    /// Returns the indices that became free since the last call.
    pub fn take_freed(&mut self) -> Vec<Range<u32>> {
        self.freed.as_mut().map_or(Vec::new(), std::mem::take)
    }

    /// Records one more holder of `index`, which is held.
    pub fn add_holder(&mut self, index: u32) {
        self.more.entry(index).or_default().push(CallRecord::current());
    }

    /// Removes a holder of `index`.
    ///
    /// If the call in progress has an owner, it removes the oldest holder of the same owner; otherwise the
    /// newest holder without an owner. If there is no such holder, it removes the oldest of all.
    pub fn remove_holder(&mut self, index: u32) {
        let Some(more) = self.more.get_mut(&index) else { return self.record_release(index..index + 1) };
        let Some(life) = self.lives.get_mut(widen(index)) else { return };
        let calls = self.freed_by.get_mut(&index).filter(|calls| !calls.is_empty());
        let call = calls.map_or_else(CallRecord::current, |calls| calls.remove(0));
        let mut alike = (0..=more.len()).filter(|at| {
            let holder = if *at == 0 { life.taken_by.as_ref() } else { Some(&more[at - 1]) };
            holder.is_some_and(|holder| holder.owner == call.owner)
        });
        let removed = if call.owner.is_some() { alike.next() } else { alike.next_back() };
        match removed {
            Some(at) if at > 0 => drop(more.remove(at - 1)),
            _ => life.taken_by = Some(more.remove(0)),
        }
        if more.is_empty() {
            self.more.remove(&index);
        }
    }

    /// Attributes the frees of `values` to the calls `by` until [`Ledger::end_attribution`]; `index_of` maps
    /// a value to its index, if it has one.
    pub(super) fn attribute_frees(
        &mut self,
        values: &IndexVec,
        by: &Attribution,
        index_of: impl Fn(i64) -> Option<u32>,
    ) {
        let mut values = values.iter();
        let mut begin = 0;
        for (end, call) in by {
            for index in values.by_ref().take(end - begin).filter_map(&index_of) {
                self.freed_by.entry(index).or_default().push(Arc::clone(call));
            }
            begin = *end;
        }
    }

    /// Ends [`Ledger::attribute_frees`].
    pub(super) fn end_attribution(&mut self) {
        self.freed_by.clear();
    }

    /// Makes `holder` the holder of `index` in place of the call in progress, if that call took or shared it.
    pub fn replace_holder(&mut self, index: u32, holder: &Arc<CallRecord>) {
        let current = CallRecord::current();
        let first = self.lives.get_mut(widen(index)).and_then(|life| life.taken_by.as_mut());
        let mut holders = first.into_iter().chain(self.more.get_mut(&index).into_iter().flatten());
        // A page that several requests of one call share has one holder per request.
        if let Some(replaced) = holders.find(|holder| Arc::ptr_eq(holder, &current)) {
            *replaced = Arc::clone(holder);
        }
    }

    /// Records that everything was freed.
    pub fn clear(&mut self) {
        self.record_release(0..narrow(self.lives.len()));
    }

    /// Returns the holders of `index`, oldest first; none when it is not live.
    #[must_use]
    pub fn holders(&self, index: u32) -> Vec<Arc<CallRecord>> {
        let life = self.lives.get(widen(index)).filter(|life| life.freed_by.is_none());
        let first = life.and_then(|life| life.taken_by.as_ref());
        first.into_iter().chain(self.more.get(&index).into_iter().flatten()).cloned().collect()
    }

    /// Returns whether `index` has holders, and all of them are known to be others than `owner`.
    #[must_use]
    pub fn is_held_by_others(&self, index: u32, owner: &Owner) -> bool {
        let holders = self.holders(index);
        let is_other = |holder: &Arc<CallRecord>| holder.owner.as_ref().is_some_and(|held| held != owner);
        !holders.is_empty() && holders.iter().all(is_other)
    }

    /// Describes the last take of `index`, its holders and its free. Returns `None` if it was never taken.
    #[must_use]
    pub fn history(&self, index: u32) -> Option<String> {
        let Life { taken_by, freed_by } = self.lives.get(widen(index))?;
        let mut words = format!("taken by {}", taken_by.as_ref()?);
        for call in self.more.get(&index).into_iter().flatten() {
            let _ = write!(words, ", shared by {call}");
        }
        if let Some(freed_by) = freed_by {
            let _ = write!(words, ", given back by {freed_by}");
        }
        Some(words)
    }

    /// Returns the numbers of lifetimes that ended within 1, 2, 4, ... microseconds. Each lifetime is counted
    /// once, in the first entry that it fits.
    #[must_use]
    pub const fn lifetimes(&self) -> &[u64; LIFETIME_BUCKETS] {
        &self.lifetimes
    }

    /// Adds histories to the first invalid indices of a report; `index_of` maps them to indices of this
    /// ledger.
    pub fn explain(&self, bad: &mut BadFrees, index_of: impl Fn(u32) -> u32) {
        bad.explain(|freed| u32::try_from(freed).ok().and_then(|freed| self.history(index_of(freed))));
    }
}

/// The ledger of a structure in debug mode, and nothing otherwise.
#[derive(Clone, Debug, Default)]
pub(super) struct OptionalLedger(Option<Box<Ledger>>);

impl OptionalLedger {
    /// Starts an empty ledger.
    pub(super) fn open(&mut self) {
        self.0 = Some(Box::default());
    }

    /// Returns the ledger, if there is one.
    pub(super) fn get(&self) -> Option<&Ledger> {
        self.0.as_deref()
    }

    /// Works like [`OptionalLedger::get`], but mutable.
    pub(super) fn get_mut(&mut self) -> Option<&mut Ledger> {
        self.0.as_deref_mut()
    }

    /// Calls [`Ledger::record_take`], if there is a ledger.
    #[inline]
    pub(super) fn record_take(&mut self, range: Range<u32>) {
        if let Some(ledger) = &mut self.0 {
            ledger.record_take(range);
        }
    }

    /// Calls [`Ledger::record_release`], if there is a ledger.
    #[inline]
    pub(super) fn record_release(&mut self, range: Range<u32>) {
        if let Some(ledger) = &mut self.0 {
            ledger.record_release(range);
        }
    }

    /// Records that a take of indices was undone, if there is a ledger.
    pub(super) fn record_undo(&mut self, range: Range<u32>) {
        if let Some(ledger) = &mut self.0 {
            ledger.record_release(range.clone());
            ledger.record_free(range);
        }
    }

    /// Calls [`Ledger::clear`], if there is a ledger.
    pub(super) fn clear(&mut self) {
        if let Some(ledger) = &mut self.0 {
            ledger.clear();
        }
    }

    /// Calls [`Ledger::add_holder`], if there is a ledger.
    #[inline]
    pub(super) fn add_holder(&mut self, index: u32) {
        if let Some(ledger) = &mut self.0 {
            ledger.add_holder(index);
        }
    }

    /// Calls [`Ledger::remove_holder`], if there is a ledger.
    #[inline]
    pub(super) fn remove_holder(&mut self, index: u32) {
        if let Some(ledger) = &mut self.0 {
            ledger.remove_holder(index);
        }
    }

    /// Returns the owner that the call in progress names, if there is a ledger.
    #[inline]
    pub(super) fn named_owner(&self) -> Option<Owner> {
        self.get().and_then(|_| CallRecord::current().owner.clone())
    }

    /// Returns whether the call in progress names an owner, and `index` is known to be held by others alone.
    pub(super) fn is_held_by_others(&self, index: u32) -> bool {
        let owner = self.named_owner();
        owner.is_some_and(|owner| self.is_held_by_others_than(index, &owner))
    }

    /// Returns whether `index` is known to be held by others than `owner`.
    pub(super) fn is_held_by_others_than(&self, index: u32, owner: &Owner) -> bool {
        self.get().is_some_and(|ledger| ledger.is_held_by_others(index, owner))
    }

    /// Attributes the values that were added to an open group last, which now has `count` values, to the call
    /// in progress.
    pub(super) fn attribute_group(&mut self, count: usize) {
        if let Some(ledger) = &mut self.0 {
            ledger.group.push((count, CallRecord::current()));
        }
    }

    /// Takes the calls that freed the values of a group that ends.
    pub(super) fn take_group(&mut self) -> Attribution {
        self.0.as_mut().map_or(Attribution::new(), |ledger| std::mem::take(&mut ledger.group))
    }

    /// Calls [`Ledger::explain`], if there is a ledger and something was dropped.
    pub(super) fn explain(&self, bad: &mut BadFrees, index_of: impl Fn(u32) -> u32) {
        if let Some(ledger) = self.get().filter(|_| bad.dropped() > 0) {
            ledger.explain(bad, index_of);
        }
    }
}

/// Lists the indices of `range` with their states and holders; neighbours with the same ones share a span.
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
            Some(last) if last.state == state && are_same(&last.holders, &holders) => {
                last.range.end = index + 1;
            }
            _ => spans.push(Span { range: index..index + 1, state, holders }),
        }
    }
    spans
}

fn are_same(one: &[Arc<CallRecord>], other: &[Arc<CallRecord>]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| Arc::ptr_eq(one, other))
}
