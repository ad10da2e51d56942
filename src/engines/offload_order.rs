//! The order in which the offloaded chunks of an engine are evicted: the chunks of the least recently active
//! request first and, of one request, the end of the prompt before its beginning.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::base::{Epoch, KeyMap, widen};

/// The key of a chunk, of any length. Keys are compared in full.
pub type OffloadKey = Arc<[u8]>;

/// The number of a chunk of an [`OffloadOrder`], valid until the chunk is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadId(u32);

/// The rank of a chunk: the chunk of the lowest rank is evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct OffloadRank {
    at: u64,
    /// The position of the chunk in the prompt of the request that used it.
    position: Reverse<i64>,
}

/// The rank that all chunks of an active request share, so that the batches of one request count as one use.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestRank {
    /// The order that gave the rank, and when.
    of: Option<OrderEpoch>,
    at: Option<u64>,
}

/// An order between two clears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OrderEpoch {
    order: u64,
    epoch: Epoch,
}

#[derive(Debug)]
struct Entry<P> {
    key: OffloadKey,
    value: P,
    rank: OffloadRank,
    is_evictable: bool,
    /// The number of the last eviction that had to spare the chunk.
    spared_by: u64,
}

/// An entry of the heap. It is outdated unless the chunk is evictable and still has this rank.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: OffloadRank,
    key: OffloadKey,
    number: u32,
}

/// Chunks by their keys, each with a value, in the order of their eviction.
///
/// Transfers do not change the rank of a chunk: their end does not count as a use.
///
/// ```
/// use kvpool::engines::{OffloadId, OffloadOrder, RequestRank};
/// let mut order = OffloadOrder::default();
/// let mut request = RequestRank::default();
/// for (key, position) in [(b"head", 16), (b"tail", 32)] {
///     let chunk: OffloadId = order.insert(key, "place", Some(position), &mut request);
///     order.set_evictable(chunk, true);
/// }
/// let evicted = order.evict(1, []).unwrap();
/// assert_eq!(&*evicted[0].0, b"tail");
/// assert!(order.evict(1, [&b"head"[..]]).is_none(), "it is spared");
/// ```
#[derive(Debug)]
pub struct OffloadOrder<P> {
    entries: Vec<Option<Entry<P>>>,
    vacant: Vec<u32>,
    by_key: KeyMap<OffloadKey, u32>,
    heap: BinaryHeap<Reverse<Candidate>>,
    evictable: usize,
    last_rank: u64,
    evictions: u64,
    now: OrderEpoch,
}

impl<P> Default for OffloadOrder<P> {
    fn default() -> Self {
        static ORDERS: AtomicU64 = AtomicU64::new(0);
        Self {
            entries: Vec::new(),
            vacant: Vec::new(),
            by_key: KeyMap::default(),
            heap: BinaryHeap::new(),
            evictable: 0,
            last_rank: 0,
            evictions: 0,
            now: OrderEpoch { order: ORDERS.fetch_add(1, Relaxed), epoch: Epoch::default() },
        }
    }
}

impl<P> OffloadOrder<P> {
    /// Returns the number of chunks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Returns whether there are no chunks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Returns the number of chunks that may be evicted.
    #[must_use]
    pub const fn evictable(&self) -> usize {
        self.evictable
    }

    /// Returns the chunk with a key.
    #[must_use]
    pub fn find(&self, key: &[u8]) -> Option<OffloadId> {
        self.by_key.get(key).copied().map(OffloadId)
    }

    /// Returns the value of a chunk.
    #[must_use]
    pub fn get(&self, chunk: OffloadId) -> &P {
        &self.entry(chunk.0).value
    }

    /// Works like [`OffloadOrder::get`], but mutable.
    pub fn get_mut(&mut self, chunk: OffloadId) -> &mut P {
        &mut self.entry_mut(chunk.0).value
    }

    /// Returns the values of all chunks.
    pub fn values(&self) -> impl Iterator<Item = &P> {
        self.entries.iter().flatten().map(|entry| &entry.value)
    }

    /// Returns the key of a chunk.
    #[must_use]
    pub fn key(&self, chunk: OffloadId) -> &OffloadKey {
        &self.entry(chunk.0).key
    }

    /// Returns whether this order gave the rank, and has not been cleared since.
    #[must_use]
    pub fn issued(&self, rank: &RequestRank) -> bool {
        rank.of == Some(self.now)
    }

    /// Creates the rank of a request. It gets its place in the order with the request's first use of a chunk.
    #[must_use]
    pub const fn rank_of_request(&self) -> RequestRank {
        RequestRank { of: Some(self.now), at: None }
    }

    /// Adds a chunk, which is not evictable yet. With a position it has the rank of the request; without one
    /// it is the most recently used chunk. It replaces a chunk with the same key.
    pub fn insert(
        &mut self,
        key: &[u8],
        value: P,
        position: Option<i64>,
        request: &mut RequestRank,
    ) -> OffloadId {
        if let Some(chunk) = self.find(key) {
            self.remove(chunk);
        }
        let rank = match position {
            Some(position) => OffloadRank { at: self.rank_of(request), position: Reverse(position) },
            None => self.next_rank(),
        };
        let key = OffloadKey::from(key);
        let entry = Entry { key: Arc::clone(&key), value, rank, is_evictable: false, spared_by: 0 };
        let number = if let Some(number) = self.vacant.pop() {
            self.entries[widen(number)] = Some(entry);
            number
        } else {
            let number = u32::try_from(self.entries.len()).expect("places are numbered in 32 bits");
            self.entries.push(Some(entry));
            number
        };
        self.by_key.insert(key, number);
        OffloadId(number)
    }

    /// Removes a chunk, and returns its value.
    pub fn remove(&mut self, chunk: OffloadId) -> P {
        self.take(chunk.0).1
    }

    /// Sets whether a chunk may be evicted.
    pub fn set_evictable(&mut self, chunk: OffloadId, is_evictable: bool) {
        let entry = self.entry_mut(chunk.0);
        let was_evictable = std::mem::replace(&mut entry.is_evictable, is_evictable);
        match (was_evictable, is_evictable) {
            (false, true) => {
                self.evictable += 1;
                self.push(chunk.0);
            }
            (true, false) => self.evictable -= 1,
            (false, false) | (true, true) => (),
        }
    }

    /// Makes a chunk the most recently used one.
    pub fn touch(&mut self, chunk: OffloadId) {
        let rank = self.next_rank();
        self.set_rank(chunk.0, rank);
    }

    /// Gives a request its place in the order, if it has none yet.
    pub fn assign_rank(&mut self, request: &mut RequestRank) {
        self.rank_of(request);
    }

    /// Records that an active request uses a chunk, at a position in its prompt. If the chunk has a later
    /// rank already, it keeps it.
    pub fn access(&mut self, chunk: OffloadId, position: i64, request: &mut RequestRank) {
        let rank = OffloadRank { at: self.rank_of(request), position: Reverse(position) };
        if self.entry(chunk.0).rank < rank {
            self.set_rank(chunk.0, rank);
        }
    }

    /// Evicts the first `count` chunks in the order, except those that are `spared`. Returns their keys and
    /// values. If there are too few, returns `None` and changes nothing.
    pub fn evict<'a>(
        &mut self,
        count: usize,
        spared: impl IntoIterator<Item = &'a [u8]>,
    ) -> Option<Vec<(OffloadKey, P)>> {
        self.evictions += 1;
        let mut evictable = self.evictable;
        for key in spared {
            if let Some(OffloadId(number)) = self.find(key) {
                let by = self.evictions;
                let entry = self.entry_mut(number);
                let was_spared = std::mem::replace(&mut entry.spared_by, by) == by;
                evictable -= usize::from(entry.is_evictable && !was_spared);
            }
        }
        if evictable < count {
            return None;
        }
        let (mut evicted, mut kept) = (Vec::with_capacity(count), Vec::new());
        while evicted.len() < count {
            let Reverse(candidate) = self.heap.pop().expect("the heap has all that is evictable");
            if !self.is_current(&candidate) {
                continue;
            }
            if self.entry(candidate.number).spared_by == self.evictions {
                kept.push(Reverse(candidate));
            } else {
                evicted.push(self.take(candidate.number));
            }
        }
        self.heap.extend(kept);
        Some(evicted)
    }

    /// Removes all chunks, and returns their values. The ranks of active requests become invalid.
    pub fn drain(&mut self) -> impl Iterator<Item = P> + use<P> {
        let now = OrderEpoch { epoch: self.now.epoch.next(), ..self.now };
        let earlier = std::mem::replace(self, Self { now, ..Self::default() });
        earlier.entries.into_iter().flatten().map(|entry| entry.value)
    }

    /// Returns the place of a request in the order. A rank that another order gave is replaced.
    fn rank_of(&mut self, request: &mut RequestRank) -> u64 {
        if !self.issued(request) {
            *request = self.rank_of_request();
        }
        *request.at.get_or_insert_with(|| {
            self.last_rank += 1;
            self.last_rank
        })
    }

    const fn next_rank(&mut self) -> OffloadRank {
        self.last_rank += 1;
        OffloadRank { at: self.last_rank, position: Reverse(0) }
    }

    fn set_rank(&mut self, number: u32, rank: OffloadRank) {
        let entry = self.entry_mut(number);
        entry.rank = rank;
        if entry.is_evictable {
            self.push(number);
        }
    }

    fn push(&mut self, number: u32) {
        let candidate = self.candidate(number);
        self.heap.push(candidate);
        // There are at most as many outdated candidates as others.
        if self.heap.len() > 64 + 2 * self.by_key.len() {
            let entries = self.entries.iter().zip(0..);
            let current = entries.filter(|(entry, _)| entry.as_ref().is_some_and(|entry| entry.is_evictable));
            self.heap = current.map(|(_, number)| self.candidate(number)).collect();
        }
    }

    fn candidate(&self, number: u32) -> Reverse<Candidate> {
        let entry = self.entry(number);
        Reverse(Candidate { rank: entry.rank, key: Arc::clone(&entry.key), number })
    }

    fn is_current(&self, candidate: &Candidate) -> bool {
        self.entries[widen(candidate.number)].as_ref().is_some_and(|entry| {
            entry.is_evictable && entry.rank == candidate.rank && Arc::ptr_eq(&entry.key, &candidate.key)
        })
    }

    fn take(&mut self, number: u32) -> (OffloadKey, P) {
        let entry = self.entries[widen(number)].take().expect("the chunk is here");
        self.evictable -= usize::from(entry.is_evictable);
        self.by_key.remove(&entry.key);
        self.vacant.push(number);
        (entry.key, entry.value)
    }

    fn entry(&self, number: u32) -> &Entry<P> {
        self.entries[widen(number)].as_ref().expect("the chunk is here")
    }

    fn entry_mut(&mut self, number: u32) -> &mut Entry<P> {
        self.entries[widen(number)].as_mut().expect("the chunk is here")
    }

    /// Returns the size of the bookkeeping in bytes, without the keys.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Option<Entry<P>>>()
            + self.vacant.capacity() * size_of::<u32>()
            + self.by_key.capacity() * (size_of::<(OffloadKey, u32)>() + 1)
            + self.heap.capacity() * size_of::<Reverse<Candidate>>()
    }

    /// Describes a broken invariant, if there is one.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let entries = || self.entries.iter().flatten();
        let lost = entries().find(|entry| {
            let number = self.by_key.get(&entry.key).map(|&number| widen(number));
            number.and_then(|number| self.entries[number].as_ref()).is_none_or(|found| found.key != entry.key)
        });
        if let Some(entry) = lost {
            return Some(format!("{:?} is not found", entry.key));
        }
        let evictable = entries().filter(|entry| entry.is_evictable).count();
        let mut current: Vec<u32> = self
            .heap
            .iter()
            .map(|Reverse(candidate)| candidate)
            .filter(|candidate| self.is_current(candidate))
            .map(|candidate| candidate.number)
            .collect();
        current.sort_unstable();
        current.dedup();
        let counted = [entries().count(), self.entries.len() - self.vacant.len(), evictable, current.len()];
        let known = [self.by_key.len(), self.by_key.len(), self.evictable, self.evictable];
        (counted != known).then(|| {
            format!("{counted:?} chunks are here, not vacant, evictable and in the heap; {known:?} are known")
        })
    }
}
