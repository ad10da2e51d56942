//! Reasons for misses: the part of a prompt that is cached, and why the rest is not.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

use crate::base::Result;

use super::offers::DevicePrefix;
use super::{LowerTierContents, Namespace, Place, Tick, Tokens, Tree};
use crate::cache::PageKey;
use crate::cache::chain::Chain;

/// The reason why pages had to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pressure {
    /// An allocation was short.
    Alloc,
    /// A call asked for it.
    Evict,
    /// A namespace, or all of them, were cleared.
    Clear,
}

impl Pressure {
    /// The name of this pressure.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alloc => "alloc",
            Self::Evict => "evict",
            Self::Clear => "clear",
        }
    }
}

/// The cause of an eviction, and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The reason why the pages had to go.
    pub pressure: Pressure,
    /// The time of the call.
    pub at: Instant,
}

/// The end of pages that were cached.
#[derive(Clone, Copy, Debug)]
pub struct EvictionRecord {
    /// The cause of their eviction.
    pub cause: Cause,
    /// The number of tokens looked up between their last use and their end.
    pub idle: u64,
}

/// The place of a part of a prompt, or the reason why it is not cached.
#[derive(Clone, Debug)]
pub enum Location {
    /// It is in pages of the device.
    Device,
    /// It is in pages of the device, but without a snapshot of the state that a request could go on from.
    NoSnapshot,
    /// It is in host memory, from where it can be loaded.
    Host,
    /// It is in a store below, from where it can be fetched to host memory.
    Store,
    /// It was cached, and is gone.
    Evicted(EvictionRecord),
    /// Another namespace has it.
    Elsewhere(Namespace),
    /// Nothing is known of it: it was never published, or so long ago that it is forgotten.
    NeverPublished,
    /// Its tokens do not fill a page.
    PageNotFull,
}

impl Location {
    /// Whether neighbours with these answers went at once.
    fn is_one_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Evicted(one), Self::Evicted(other)) => (one.cause, one.idle) == (other.cause, other.idle),
            _ => false,
        }
    }
}

/// Neighbouring tokens of a prompt with the same answer.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The positions of its tokens in the prompt.
    pub range: Range<usize>,
    /// The answer for all of them.
    pub location: Location,
}

impl Segment {
    /// Marks the tokens behind those that a request can use or load as stored, up to token `end`.
    pub fn mark_stored(segments: &mut Vec<Self>, end: usize) {
        let is_usable = |part: &&Self| matches!(part.location, Location::Device | Location::Host);
        let front = segments.iter().take_while(is_usable).count();
        let begin = front.checked_sub(1).map_or(0, |last| segments[last].range.end);
        if end <= begin {
            return;
        }
        segments.retain_mut(|part| {
            if part.range.start >= begin {
                part.range.start = part.range.start.max(end);
            }
            part.range.start < part.range.end
        });
        segments.insert(front, Self { range: begin..end, location: Location::Store });
    }
}

/// The ends of the prefixes that were evicted last, in the order of their evictions: recording one is an
/// append. They are looked up by key only to explain, all at once.
#[derive(Debug, Default)]
pub(super) struct EvictionLog {
    /// The last [`ENDS`]; number `n` lies at `n % ENDS`.
    ends: Vec<End>,
    /// The number of ends recorded so far.
    recorded: u64,
    /// The causes, each with the number of the first end that it explains.
    causes: VecDeque<(u64, Cause)>,
}

/// A record of an end; its cause is that of its neighbours.
#[derive(Clone, Copy, Debug)]
struct End {
    key: PageKey,
    idle: u64,
}

/// The number of ends that are remembered. At a key for 64 tokens they reach back two million evicted tokens.
const ENDS: usize = 1 << 15;

impl EvictionLog {
    /// Remembers the prefix `key`, whose last use was at `used`.
    pub(super) fn record(&mut self, key: PageKey, used: Tick, now: Tick, cause: Cause) {
        if self.causes.back().is_none_or(|&(_, last)| last != cause) {
            self.begin(cause);
        }
        let end = End { key, idle: now.since(used) };
        let at = place_of(self.recorded);
        if at == self.ends.len() {
            self.ends.push(end);
        } else {
            self.ends[at] = end;
        }
        self.recorded += 1;
    }

    /// Gives the ends from the next one on another cause, and forgets causes without ends.
    fn begin(&mut self, cause: Cause) {
        let oldest = (self.recorded + 1).saturating_sub(ENDS as u64);
        while self.causes.get(1).is_some_and(|&(first, _)| first <= oldest) {
            self.causes.pop_front();
        }
        self.causes.push_back((self.recorded, cause));
    }

    /// The records by key; of one key the latest.
    fn by_key(&self) -> HashMap<PageKey, EvictionRecord> {
        let mut records = HashMap::with_capacity(self.ends.len());
        let mut causes = self.causes.iter().copied().peekable();
        let mut cause = None;
        for number in self.recorded - self.ends.len() as u64..self.recorded {
            while let Some((_, next)) = causes.next_if(|&(first, _)| first <= number) {
                cause = Some(next);
            }
            let End { key, idle } = self.ends[place_of(number)];
            let cause = cause.expect("the oldest end has a cause");
            records.insert(key, EvictionRecord { cause, idle });
        }
        records
    }

    pub(super) fn bytes(&self) -> usize {
        self.ends.capacity() * size_of::<End>() + self.causes.capacity() * size_of::<(u64, Cause)>()
    }
}

fn place_of(number: u64) -> usize {
    usize::try_from(number % ENDS as u64).expect("a remainder of 2**15 fits usize")
}

impl Tree {
    /// The parts of `tokens` and their places, in order. Changes nothing.
    ///
    /// Evicted prefixes are remembered in steps of about 64 tokens and by their ends, for a while. `lower` is
    /// the tier below, if there is one.
    ///
    /// # Errors
    /// The error of tokens that cannot be read or are none.
    pub fn explain(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        lower: Option<&dyn LowerTierContents>,
    ) -> Result<Vec<Segment>> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut begin = 0;
        let mut add = |end: usize, location: Location| {
            match segments.last_mut() {
                _ if begin >= end => return begin,
                Some(last) if last.location.is_one_with(&location) => last.range.end = end,
                _ => segments.push(Segment { range: begin..end, location }),
            }
            begin = end;
            begin
        };
        let (count, page_size) = (tokens.count(), self.page_size());
        let whole = count / page_size * page_size;
        tokens.check(0..count)?;
        let place = self.place_of(namespace, tokens, whole)?;
        let cached = place.map_or(0, Place::len);
        let usable = place.map(|place| self.usable_place(place));
        let end = add(usable.map_or(0, Place::len), Location::Device);
        if let Some(lower) = lower {
            let keys = self.keys_behind(namespace, DevicePrefix { usable, cached }, tokens, whole, lower)?;
            add(end + keys.len() * page_size, Location::Host);
        }
        let mut explained = add(cached, Location::NoSnapshot).max(cached);
        let sum = place.map_or_else(|| Chain::start(self.hash_of(namespace)), |place| self.sum_at(place));
        let (mut cursor, mut page) = (self.chain().cursor(sum, cached), Vec::new());
        let records = if cached < whole { self.evictions.by_key() } else { HashMap::new() };
        for at in (cached..whole).step_by(page_size) {
            page.clear();
            tokens.read(at..at + page_size, &mut page)?;
            cursor.push(&page);
            if let Some(&record) = records.get(&cursor.sum().key()) {
                explained = add(at + page_size, Location::Evicted(record));
            }
        }
        if explained < whole
            && let Some((end, name)) = self.longest_elsewhere(namespace, tokens, whole)?
            && end > explained
        {
            add(end, Location::Elsewhere(name.clone()));
        }
        add(whole, Location::NeverPublished);
        add(count, Location::PageNotFull);
        Ok(segments)
    }

    /// The other namespace that has most of the first `limit` of `tokens`, and how many it has.
    fn longest_elsewhere(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<Option<(usize, &Namespace)>> {
        let mut longest = None;
        for name in self.namespaces().filter(|&name| name != namespace) {
            let found = self.place_of(name, tokens, limit)?.map_or(0, Place::len);
            if longest.is_none_or(|(end, _)| end < found) {
                longest = Some((found, name));
            }
        }
        Ok(longest)
    }
}
