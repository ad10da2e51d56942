//! Who holds which index, and who held it last: kept where somebody debugs, and nowhere else.

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

/// A name that a caller gave for itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// Such as a request's id.
    Text(String),
    /// Such as a request's number, in decimal: it may have more than 64 bits.
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

/// One call that takes or gives indices: who, where and when.
#[derive(Clone, Debug)]
pub struct Act {
    /// Who, if that was said.
    pub owner: Option<Owner>,
    /// Where: file, line and function.
    pub site: Arc<str>,
    /// When.
    pub at: Instant,
    /// How many calls were noted before, in the whole process.
    pub number: u64,
}

/// How many calls were noted.
static NOTED: AtomicU64 = AtomicU64::new(0);

impl Act {
    /// Where a call was made that did not say it.
    pub const UNKNOWN_PLACE: &str = "an unknown place";

    /// A call that happens now.
    #[must_use]
    pub fn new(owner: Option<Owner>, site: &str) -> Self {
        Self { owner, site: site.into(), at: Instant::now(), number: NOTED.fetch_add(1, Relaxed) }
    }

    /// How many calls were noted so far, in the whole process.
    #[must_use]
    pub fn noted() -> u64 {
        NOTED.load(Relaxed)
    }

    /// How long ago it was.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.at.elapsed()
    }
}

thread_local! {
    /// What this thread is doing.
    static CURRENT: RefCell<Option<Arc<Act>>> = const { RefCell::new(None) };
}

impl Act {
    /// What this thread is doing: what was announced last, and is not over.
    #[must_use]
    pub fn current() -> Arc<Self> {
        let announced = CURRENT.with_borrow(Clone::clone);
        announced.unwrap_or_else(|| Arc::new(Self::new(None, Self::UNKNOWN_PLACE)))
    }

    /// Announces that this thread does it until the answer is dropped.
    #[must_use]
    pub fn begin(self: Arc<Self>) -> Acting {
        Acting { before: CURRENT.replace(Some(self)), of_this_thread: PhantomData }
    }
}

/// Ends what [`Act::begin`] began.
#[derive(Debug)]
pub struct Acting {
    before: Option<Arc<Act>>,
    of_this_thread: PhantomData<*const ()>,
}

impl Drop for Acting {
    fn drop(&mut self) {
        CURRENT.set(self.before.take());
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

/// What an index is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nobody's.
    Free,
    /// Somebody's.
    Live,
    /// Given back, and kept until work in flight is done.
    Fenced,
}

impl State {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Live => "live",
            Self::Fenced => "fenced",
        }
    }
}

/// Neighbouring indices of one state and the same holders.
#[derive(Clone, Debug)]
pub struct Span {
    /// Which.
    pub range: Range<u32>,
    /// What they are.
    pub state: State,
    /// Who holds them, if they are live and that is known.
    pub holders: Vec<Arc<Act>>,
}

/// Who gave which values of a list: where each part ends, and its act. Empty where nobody debugs.
pub type Signatures = Vec<(usize, Arc<Act>)>;

/// How many lifetimes were below each power of two of microseconds.
pub const LIFETIME_BUCKETS: usize = 48;

/// What is known of one index.
#[derive(Clone, Debug, Default)]
struct Life {
    /// The last call that took it.
    taken: Option<Arc<Act>>,
    /// The call that gave it back since. `None` while it is live.
    given: Option<Arc<Act>>,
}

/// Who holds each index of a space, who gave it back last, and how long indices live.
///
/// A thread announces what it does with [`Act::begin`].
///
/// ```
/// use std::sync::Arc;
/// use kvpool::index::{Act, Ledger, Owner};
/// let mut ledger = Ledger::default();
/// let owner = Owner::Text("request 7".into());
/// let acting = Arc::new(Act::new(Some(owner), "engine.py:12 in admit")).begin();
/// ledger.took(3..5);
/// drop(acting);
/// let _acting = Arc::new(Act::new(None, "engine.py:40 in finish")).begin();
/// ledger.gave(4..5);
/// assert_eq!(ledger.holders(3).len(), 1);
/// assert_eq!(
///     ledger.history(4).unwrap(),
///     "taken by 'request 7' at engine.py:12 in admit, given back by engine.py:40 in finish"
/// );
/// ```
#[derive(Clone, Debug)]
pub struct Ledger {
    /// By index. Those beyond the end were never taken.
    lives: Vec<Life>,
    /// Holders beyond the first, of indices that are shared.
    more: HashMap<u32, Vec<Arc<Act>>>,
    /// Who gives which index in the call in progress, where that is not only the thread's own act.
    givers: HashMap<u32, Vec<Arc<Act>>>,
    lifetimes: [u64; LIFETIME_BUCKETS],
    /// Who gave which of the values that an open group has collected.
    group: Signatures,
    /// Indices that became free since somebody last asked, if somebody does.
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
    /// Notes that indices were taken.
    pub fn took(&mut self, range: Range<u32>) {
        self.forget_freed(&range);
        let end = widen(range.end);
        if self.lives.len() < end {
            self.lives.resize_with(end, Life::default);
        }
        let act = Act::current();
        for life in &mut self.lives[widen(range.start)..end] {
            *life = Life { taken: Some(Arc::clone(&act)), given: None };
        }
    }

    /// Notes that indices were given back by their last holder.
    pub fn gave(&mut self, range: Range<u32>) {
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

    /// Notes that indices became free, at once with [`Ledger::gave`] or when a fence had passed.
    pub(super) fn became_free(&mut self, range: Range<u32>) {
        if let Some(freed) = &mut self.freed {
            freed.push(range);
        }
    }

    /// Takes from the list of what became free what is not free any more.
    fn forget_freed(&mut self, taken: &Range<u32>) {
        if let Some(freed) = self.freed.as_mut().filter(|freed| !freed.is_empty()) {
            let outside = |range: Range<u32>| {
                [range.start..range.end.min(taken.start), range.start.max(taken.end)..range.end]
            };
            *freed = freed.drain(..).flat_map(outside).filter(|range| !range.is_empty()).collect();
        }
    }

    /// Keeps from now on a list of what becomes free, for [`Ledger::take_freed`].
    pub fn list_freed(&mut self) {
        self.freed.get_or_insert_default();
    }

    /// What became free since the last call.
    pub fn take_freed(&mut self) -> Vec<Range<u32>> {
        self.freed.as_mut().map_or(Vec::new(), std::mem::take)
    }

    /// Notes that `index`, which is held, has one more holder.
    pub fn shared(&mut self, index: u32) {
        self.more.entry(index).or_default().push(Act::current());
    }

    /// Notes that one of the holders of `index` has left: of those with its name the first, of those without one the
    /// last, else the first of all.
    pub fn left(&mut self, index: u32) {
        let Some(more) = self.more.get_mut(&index) else { return self.gave(index..index + 1) };
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

    /// Notes who gives the values of the call that follows, as far as they are indices, which `index_of` says.
    pub(super) fn signed(
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

    /// Ends what [`Ledger::signed`] began.
    pub(super) fn all_given(&mut self) {
        self.givers.clear();
    }

    /// Puts `owner` in the place of the act in progress, if that took or shared `index`.
    pub fn sign(&mut self, index: u32, owner: &Arc<Act>) {
        let act = Act::current();
        let first = self.lives.get_mut(widen(index)).and_then(|life| life.taken.as_mut());
        let mut holders = first.into_iter().chain(self.more.get_mut(&index).into_iter().flatten());
        // A page that several requests of one call share has a holder for each of them.
        if let Some(holder) = holders.find(|holder| Arc::ptr_eq(holder, &act)) {
            *holder = Arc::clone(owner);
        }
    }

    /// Notes that everything was given back.
    pub fn clear(&mut self) {
        self.gave(0..narrow(self.lives.len()));
    }

    /// Who holds `index`, the first one first. Nobody if it is not live.
    #[must_use]
    pub fn holders(&self, index: u32) -> Vec<Arc<Act>> {
        let life = self.lives.get(widen(index)).filter(|life| life.given.is_none());
        let first = life.and_then(|life| life.taken.as_ref());
        first.into_iter().chain(self.more.get(&index).into_iter().flatten()).cloned().collect()
    }

    /// Who took `index` last and who gave it back, in words. `None` if nobody ever took it.
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

    /// How many lives ended after less than 1, 2, 4, ... microseconds, each counted once.
    #[must_use]
    pub const fn lifetimes(&self) -> &[u64; LIFETIME_BUCKETS] {
        &self.lifetimes
    }

    /// Adds to a report what is known of its first offenders; `index_of` says where they stand here.
    pub fn explain(&self, bad: &mut BadFrees, index_of: impl Fn(u32) -> u32) {
        bad.explain(|given| u32::try_from(given).ok().and_then(|given| self.history(index_of(given))));
    }
}

/// A ledger, or none where nobody debugs.
#[derive(Clone, Debug, Default)]
pub struct Book(Option<Box<Ledger>>);

impl Book {
    /// Opens a ledger.
    pub fn open(&mut self) {
        self.0 = Some(Box::default());
    }

    /// The ledger, if there is one.
    #[must_use]
    pub fn ledger(&self) -> Option<&Ledger> {
        self.0.as_deref()
    }

    /// As [`Book::ledger`], to write in it.
    pub fn ledger_mut(&mut self) -> Option<&mut Ledger> {
        self.0.as_deref_mut()
    }

    /// As [`Ledger::took`].
    #[inline]
    pub(super) fn took(&mut self, range: Range<u32>) {
        if let Some(ledger) = &mut self.0 {
            ledger.took(range);
        }
    }

    /// As [`Ledger::gave`].
    #[inline]
    pub(super) fn gave(&mut self, range: Range<u32>) {
        if let Some(ledger) = &mut self.0 {
            ledger.gave(range);
        }
    }

    /// As [`Ledger::clear`].
    pub(super) fn clear(&mut self) {
        if let Some(ledger) = &mut self.0 {
            ledger.clear();
        }
    }

    /// As [`Ledger::shared`].
    #[inline]
    pub(super) fn shared(&mut self, index: u32) {
        if let Some(ledger) = &mut self.0 {
            ledger.shared(index);
        }
    }

    /// As [`Ledger::left`].
    #[inline]
    pub(super) fn left(&mut self, index: u32) {
        if let Some(ledger) = &mut self.0 {
            ledger.left(index);
        }
    }

    /// Notes that the act in progress gave the last values of an open group, which has `count` now.
    pub(super) fn sign_group(&mut self, count: usize) {
        if let Some(ledger) = &mut self.0 {
            ledger.group.push((count, Act::current()));
        }
    }

    /// Who gave which values of a group that ends.
    pub(super) fn take_group(&mut self) -> Signatures {
        self.0.as_mut().map_or(Signatures::new(), |ledger| std::mem::take(&mut ledger.group))
    }

    /// As [`Ledger::explain`], where something was dropped.
    pub(super) fn explain(&self, bad: &mut BadFrees, index_of: impl Fn(u32) -> u32) {
        if let Some(ledger) = self.ledger().filter(|_| bad.dropped() > 0) {
            ledger.explain(bad, index_of);
        }
    }
}

/// Indices of `range` by state and holders, neighbours together.
pub(super) fn spans(
    range: Range<u32>,
    ledger: Option<&Ledger>,
    state_of: impl Fn(u32) -> State,
) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for index in range {
        let state = state_of(index);
        let holders = match (state, ledger) {
            (State::Live, Some(ledger)) => ledger.holders(index),
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
