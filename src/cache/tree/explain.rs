//! Explains misses: which part of a prompt is cached, and why the rest is not.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use crate::base::Result;

use super::cause::{Cause, Reason};
use super::offers::DevicePrefix;
use super::{LowerTierContents, Namespace, Tick, Tokens, Tree, TreePosition};
use crate::cache::rolling_hash::RollingHasher;
use crate::cache::{BlockKey, NamespaceHash, Worth};

/// The record of an eviction.
#[derive(Clone, Copy, Debug)]
pub struct EvictionRecord {
    /// The cause of the eviction.
    pub cause: Cause,
    /// The number of tokens that were looked up between the last use of the pages and their eviction.
    pub idle: u64,
    /// What the policy expected of the pages and of those that it kept, if it chose them by that.
    pub worth: Option<Worth>,
}

/// Where a segment of a prompt is cached or, if no request can use it, why not.
#[derive(Clone, Debug)]
pub enum SegmentState {
    /// The segment is in pages of the device.
    Device,
    /// The segment is in pages of the device, but no snapshot of the state lets a request resume there.
    NoSnapshot,
    /// The segment is in host memory, and can be loaded from there.
    Host,
    /// The segment is in a store below host memory, and can be fetched from there.
    Store,
    /// The segment was cached and has been evicted.
    Evicted(EvictionRecord),
    /// The segment is cached in another namespace.
    Elsewhere(Namespace),
    /// The segment was never published, or so long ago that its eviction is forgotten.
    NeverPublished,
    /// The tokens of the segment do not fill a page.
    PageNotFull,
}

impl SegmentState {
    /// Returns whether neighbouring segments in these states were evicted together.
    fn is_same_eviction(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Evicted(one), Self::Evicted(other)) => (one.cause, one.idle) == (other.cause, other.idle),
            _ => false,
        }
    }
}

/// Neighbouring tokens of a prompt in the same state.
///
/// ```
/// use std::time::Instant;
/// use kvpool::base::{Id, Page};
/// use kvpool::cache::{
///     BlockTokens, Cause, EvictionRecord, Namespace, PolicyKind, Pressure, ResumeAt, Segment, SegmentState, Tree,
/// };
/// let (name, prompt): (_, &[i32]) = (Namespace::Unnamed, &[5, 6, 7, 8, 9]);
/// let mut tree = Tree::new(2, ResumeAt::AnyPage, PolicyKind::Lru.policy(1024, BlockTokens::of_page_size(2), None));
/// let mut hold = tree.match_prefix(&name, &prompt, 5).unwrap();
/// let found = tree.find(&hold, &prompt).unwrap();
/// tree.publish(&mut hold, found, prompt[..4].to_vec(), &[Page::new(3), Page::new(8)]);
/// drop(tree.release(hold));
/// drop(tree.evict(1, Cause { pressure: Pressure::Alloc, at: Instant::now() }));
/// let segments: Vec<Segment> = tree.explain(&name, &prompt, None).unwrap();
/// assert!(matches!(segments[0].state, SegmentState::Device));
/// let SegmentState::Evicted(EvictionRecord { cause, .. }) = segments[1].state else { panic!("it was") };
/// assert_eq!((segments[1].range.clone(), cause.pressure.name()), (2..4, "alloc"));
/// assert!(matches!(segments[2].state, SegmentState::PageNotFull));
/// ```
#[derive(Clone, Debug)]
pub struct Segment {
    /// The positions of its tokens in the prompt.
    pub range: Range<usize>,
    /// The state of all of these tokens.
    pub state: SegmentState,
}

impl Segment {
    /// Marks as stored the tokens from the first one that a request can neither use nor load up to token
    /// `end`.
    pub fn mark_stored(segments: &mut Vec<Self>, end: usize) {
        let is_usable = |part: &&Self| matches!(part.state, SegmentState::Device | SegmentState::Host);
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
        segments.insert(front, Self { range: begin..end, state: SegmentState::Store });
    }
}

/// The most recent evictions, in order. Recording one appends it to a ring; only [`Tree::explain`] looks them
/// up by key, and builds a table for that.
#[derive(Debug, Default)]
pub(super) struct EvictionLog {
    /// The last [`CAPACITY`] evictions; number `n` is at `n % CAPACITY`.
    entries: Vec<LogEntry>,
    /// The number of evictions recorded so far.
    recorded: u64,
    /// The reasons, each with the number of the first eviction that it is the reason of.
    reasons: VecDeque<(u64, Reason)>,
}

/// An evicted prefix. Its reason is in [`EvictionLog::reasons`].
#[derive(Clone, Copy, Debug)]
struct LogEntry {
    key: BlockKey,
    idle: u64,
}

/// The number of evictions that are remembered. With one for each 64 tokens, they are those of two million
/// tokens.
const CAPACITY: usize = 1 << 15;

impl EvictionLog {
    /// Records that the prefix `key` was evicted, which was used last at `used`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "an eviction calls it for each leaf")]
    pub(super) fn record(&mut self, key: BlockKey, used: Tick, now: Tick, reason: &Reason) {
        if self.reasons.back().is_none_or(|(_, last)| last != reason) {
            self.set_reason(*reason);
        }
        let entry = LogEntry { key, idle: now.since(used) };
        let at = place_of(self.recorded);
        if at == self.entries.len() {
            self.entries.push(entry);
        } else {
            self.entries[at] = entry;
        }
        self.recorded += 1;
    }

    /// Sets the reason of later evictions, and drops the reasons of evictions that are no longer recorded.
    fn set_reason(&mut self, reason: Reason) {
        let oldest = (self.recorded + 1).saturating_sub(CAPACITY as u64);
        while self.reasons.get(1).is_some_and(|&(first, _)| first <= oldest) {
            self.reasons.pop_front();
        }
        self.reasons.push_back((self.recorded, reason));
    }

    /// Returns the records by key; of several with one key, the latest.
    fn by_key(&self) -> HashMap<BlockKey, EvictionRecord> {
        let mut records = HashMap::with_capacity(self.entries.len());
        let mut reasons = self.reasons.iter().copied().peekable();
        let mut reason = None;
        for number in self.recorded - self.entries.len() as u64..self.recorded {
            while let Some((_, next)) = reasons.next_if(|&(first, _)| first <= number) {
                reason = Some(next);
            }
            let LogEntry { key, idle } = self.entries[place_of(number)];
            let Reason { cause, worth } = reason.expect("the oldest entry has a reason");
            records.insert(key, EvictionRecord { cause, idle, worth });
        }
        records
    }

    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<LogEntry>() + self.reasons.capacity() * size_of::<(u64, Reason)>()
    }
}

fn place_of(number: u64) -> usize {
    usize::try_from(number % CAPACITY as u64).expect("a remainder of 2**15 fits usize")
}

impl Tree {
    /// Divides `tokens` into segments by where they are cached or why not. Changes nothing.
    ///
    /// The tree remembers recent evictions, by the ends of the evicted prefixes and every 64 tokens or so.
    /// `lower` is the tier below, if there is one.
    ///
    /// # Errors
    /// Returns an error if a token cannot be read or is not a token id.
    pub fn explain(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        lower: Option<&dyn LowerTierContents>,
    ) -> Result<Vec<Segment>> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut begin = 0;
        let mut add = |end: usize, state: SegmentState| {
            match segments.last_mut() {
                _ if begin >= end => return begin,
                Some(last) if last.state.is_same_eviction(&state) => last.range.end = end,
                _ => segments.push(Segment { range: begin..end, state }),
            }
            begin = end;
            begin
        };
        let (count, page_size) = (tokens.count(), self.page_size());
        let whole = count / page_size * page_size;
        tokens.check(0..count)?;
        let place = self.place_of(namespace, tokens, whole)?;
        let cached = place.map_or(0, TreePosition::len);
        let usable = place.map(|place| self.usable_place(place));
        let end = add(usable.map_or(0, TreePosition::len), SegmentState::Device);
        if let Some(lower) = lower {
            let keys = self.keys_after(namespace, DevicePrefix { usable, cached }, tokens, whole, lower)?;
            add(end + keys.len() * page_size, SegmentState::Host);
        }
        let mut explained = add(cached, SegmentState::NoSnapshot).max(cached);
        let hash = place.map_or_else(
            || RollingHasher::start(NamespaceHash::from(namespace)),
            |place| self.hash_at(place),
        );
        let (mut cursor, mut buffer) = (self.hasher().cursor(hash, cached), Vec::new());
        let records = if cached < whole { self.evictions.by_key() } else { HashMap::new() };
        for at in (cached..whole).step_by(page_size) {
            cursor.push(tokens.slice(at..at + page_size, &mut buffer)?);
            if let Some(&record) = records.get(&cursor.hash().key()) {
                explained = add(at + page_size, SegmentState::Evicted(record));
            }
        }
        if explained < whole
            && let Some((end, name)) = self.longest_elsewhere(namespace, tokens, whole)?
            && end > explained
        {
            add(end, SegmentState::Elsewhere(name.clone()));
        }
        add(whole, SegmentState::NeverPublished);
        add(count, SegmentState::PageNotFull);
        Ok(segments)
    }

    /// Finds the other namespace that has the longest prefix of the first `limit` of `tokens`, and returns
    /// the length of that prefix.
    fn longest_elsewhere(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<Option<(usize, &Namespace)>> {
        let mut longest = None;
        for name in self.namespaces().filter(|&name| name != namespace) {
            let found = self.place_of(name, tokens, limit)?.map_or(0, TreePosition::len);
            if longest.is_none_or(|(end, _)| end < found) {
                longest = Some((found, name));
            }
        }
        Ok(longest)
    }
}
