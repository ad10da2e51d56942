//! Why a prompt is not found: what is cached of it, and what became of the rest.

use std::ops::Range;
use std::time::Instant;

use crate::base::Result;

use super::chain::Chain;
use super::tree::{Place, Tree};
use super::{Namespace, PageKey, Tick, Tokens};

/// What pages had to make room for.
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

/// Why pages go, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cause {
    /// What for.
    pub pressure: Pressure,
    /// The time of the call.
    pub at: Instant,
}

impl Cause {
    /// A cause of this moment.
    #[must_use]
    pub fn now(pressure: Pressure) -> Self {
        Self { pressure, at: Instant::now() }
    }
}

/// What is remembered of pages that went.
#[derive(Clone, Copy, Debug)]
pub struct Gone {
    key: PageKey,
    /// Why, and when.
    pub cause: Cause,
    /// Tokens looked up between their last use and their end.
    pub idle: u64,
}

/// Where a part of a prompt is, or why it is not cached.
#[derive(Clone, Debug)]
pub enum Whereabouts {
    /// In pages of the device.
    Device,
    /// In pages of the device, but without a snapshot of the state that a request could go on from.
    NoSnapshot,
    /// It was cached.
    Evicted(Gone),
    /// Another namespace has it.
    Elsewhere(Namespace),
    /// Nothing is known of it: it was never published, or so long ago that it is forgotten.
    NeverPublished,
    /// Its tokens do not fill a page.
    PageNotFull,
}

impl Whereabouts {
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
    /// Positions.
    pub range: Range<usize>,
    /// Where they are.
    pub whereabouts: Whereabouts,
}

/// The ends of prefixes that went, the latest of each set.
#[derive(Debug, Default)]
pub(super) struct Memory(Vec<[Option<Gone>; WAYS]>);

/// Sets, of which each remembers a few. At a key for 64 tokens they reach back two million evicted tokens.
const SETS: usize = 1 << 13;
const WAYS: usize = 4;

impl Memory {
    /// Remembers the prefix `key`, whose last use was at `used`.
    pub(super) fn note(&mut self, key: PageKey, used: Tick, now: Tick, cause: Cause) {
        if self.0.is_empty() {
            self.0.resize(SETS, [None; WAYS]);
        }
        let set = &mut self.0[set_of(key)];
        // The oldest is last.
        let at = set.iter().position(|known| known.is_none_or(|known| known.key == key)).unwrap_or(WAYS - 1);
        set.copy_within(..at, 1);
        set[0] = Some(Gone { key, cause, idle: now.since(used) });
    }

    /// Reads the set of `key`, so that it is near when that is noted.
    pub(super) fn fetch(&self, key: PageKey) -> u32 {
        self.0.get(set_of(key)).map_or(0, |set| u32::from(set[0].is_some()))
    }

    fn get(&self, key: PageKey) -> Option<Gone> {
        let set = self.0.get(set_of(key))?;
        set.iter().flatten().find(|known| known.key == key).copied()
    }

    pub(super) const fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<[Option<Gone>; WAYS]>()
    }
}

fn set_of(key: PageKey) -> usize {
    usize::try_from(key.hash() % SETS as u64).expect("fewer than 2**13")
}

impl Tree {
    /// Where the parts of `tokens` are, in order. Changes nothing.
    ///
    /// What was evicted is remembered in steps of about 64 tokens and by its end, for a while.
    ///
    /// # Errors
    /// The error of tokens that cannot be read or are none.
    pub fn explain(&self, namespace: &Namespace, tokens: &dyn Tokens) -> Result<Vec<Segment>> {
        let mut answer: Vec<Segment> = Vec::new();
        let mut begin = 0;
        let mut add = |end: usize, whereabouts: Whereabouts| {
            match answer.last_mut() {
                _ if begin >= end => return begin,
                Some(last) if last.whereabouts.is_one_with(&whereabouts) => last.range.end = end,
                _ => answer.push(Segment { range: begin..end, whereabouts }),
            }
            begin = end;
            begin
        };
        let (count, page_size) = (tokens.count(), self.page_size());
        let whole = count / page_size * page_size;
        tokens.check(0..count)?;
        let place = self.place_of(namespace, tokens, whole)?;
        let cached = place.map_or(0, Place::len);
        add(place.map_or(0, |place| self.usable(place)), Whereabouts::Device);
        let mut known = add(cached, Whereabouts::NoSnapshot).max(cached);
        let sum = place.map_or_else(|| Chain::start(self.hash_of(namespace)), |place| self.sum_at(place));
        let (mut cursor, mut page) = (self.chain().cursor(sum, cached), Vec::new());
        for at in (cached..whole).step_by(page_size) {
            page.clear();
            tokens.read(at..at + page_size, &mut page)?;
            cursor.push(&page);
            if let Some(gone) = self.memory().get(cursor.sum().key()) {
                known = add(at + page_size, Whereabouts::Evicted(gone));
            }
        }
        let others = self.namespaces().filter(|&name| known < whole && name != namespace);
        let mut elsewhere = None;
        for name in others {
            let found = self.place_of(name, tokens, whole)?.map_or(0, Place::len);
            if elsewhere.as_ref().map_or(known, |(longest, _)| *longest) < found {
                elsewhere = Some((found, name));
            }
        }
        if let Some((end, name)) = elsewhere {
            add(end, Whereabouts::Elsewhere(name.clone()));
        }
        add(whole, Whereabouts::NeverPublished);
        add(count, Whereabouts::PageNotFull);
        Ok(answer)
    }
}
