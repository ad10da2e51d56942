//! The chunks that an engine has offloaded to host memory: where they are, and which of them transfers use.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::base::{
    Error, ErrorKind, Id, KeyMap, OffloadSlot, Result, check_memory, id, try_with_capacity, widen,
};

use super::offload_order::{OffloadId, OffloadKey, OffloadOrder, RequestRank};
use crate::cache::RecencyList;

/// A chunk that an engine stores or loads.
#[derive(Clone, Copy, Debug)]
pub struct NamedChunk<'a> {
    /// The key of the chunk. Its last four bytes are the group of layers, as in vLLM's `OffloadKey`.
    pub key: &'a [u8],
    /// The position of the end of the chunk in the prompt of the request, if it is known.
    pub position: Option<i64>,
}

/// The chunks that a request has used. They belong to the first table that gets them, until that is cleared.
/// Given to another table, the request starts over.
#[derive(Debug, Default)]
pub struct OffloadRequest {
    rank: RequestRank,
    used: Vec<UsedChunk>,
    by_key: KeyMap<OffloadKey, usize>,
    is_finished: bool,
}

#[derive(Clone, Debug)]
struct UsedChunk {
    key: OffloadKey,
    position: Option<i64>,
}

impl OffloadRequest {
    /// Returns the chunks in the order of the prompt: by their positions, if all are known. Otherwise the
    /// groups of layers follow each other, each ordered by position if all of its positions are known, or by
    /// first use.
    fn in_order(&self) -> Vec<&UsedChunk> {
        let mut groups: BTreeMap<&[u8], Vec<&UsedChunk>> = BTreeMap::new();
        for used in &self.used {
            groups.entry(used.key.rchunks(4).next().unwrap_or_default()).or_default().push(used);
        }
        let mut ordered = Vec::with_capacity(self.used.len());
        for mut group in groups.into_values() {
            sort_if_known(&mut group);
            ordered.extend(group);
        }
        sort_if_known(&mut ordered);
        ordered
    }
}

fn sort_if_known(chunks: &mut [&UsedChunk]) {
    if chunks.iter().all(|used| used.position.is_some()) {
        chunks.sort_by_key(|used| used.position);
    }
}

/// The chunks to store: the result of [`OffloadTable::begin_store`].
#[derive(Debug, Default)]
pub struct StorePlan {
    /// The positions of the chunks to store among those that were offered.
    pub chosen: Vec<usize>,
    /// The place for each of these chunks.
    pub places: Vec<OffloadSlot>,
    /// The chunks that were evicted for them.
    pub evicted: Vec<OffloadKey>,
}

/// A change of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadChange {
    /// The chunks were stored and can be found.
    Stored,
    /// The chunks were evicted.
    Evicted,
    /// Storing the chunks failed.
    Failed,
}

/// A change of several chunks at once.
///
/// ```
/// use kvpool::engines::{
///     NamedChunk, OffloadChange, OffloadConfig, OffloadCounts, OffloadEvent, OffloadRequest, OffloadStage,
///     OffloadTable, OffloadedChunk, StorePlan,
/// };
/// let config = OffloadConfig { capacity: 4, store_threshold: 0, max_tracked: 0, events: true };
/// let (mut table, mut request) = (OffloadTable::new(config), OffloadRequest::default());
/// let chunk = [NamedChunk { key: b"chunk", position: None }];
/// let StorePlan { chosen, places, .. } = table.begin_store(&chunk, &mut request)?.expect("four are free");
/// assert_eq!((chosen, places.len()), (vec![0], 1));
/// let stage = |table: &OffloadTable| table.find(b"chunk").map(|OffloadedChunk { stage, .. }| stage);
/// assert_eq!(stage(&table), Some(OffloadStage::Arriving));
/// table.end_store([&b"chunk"[..]]);
/// assert_eq!(stage(&table), Some(OffloadStage::Ready));
/// let OffloadEvent { change, keys } = table.take_events().remove(0);
/// assert_eq!((change, &*keys[0]), (OffloadChange::Stored, &b"chunk"[..]));
/// let OffloadCounts { arriving, idle, .. } = table.counts();
/// assert_eq!((arriving, idle), (0, 1));
/// # Ok::<(), kvpool::base::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadEvent {
    /// The change.
    pub change: OffloadChange,
    /// The keys of the chunks.
    pub keys: Vec<OffloadKey>,
}

/// Whether a chunk can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadStage {
    /// The chunk is being stored.
    Arriving,
    /// The chunk can be read.
    Ready,
}

/// The current state of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadedChunk {
    /// The place of the chunk, a number below the capacity.
    pub place: OffloadSlot,
    /// Whether the chunk can be read.
    pub stage: OffloadStage,
    /// The number of loads that read the chunk.
    pub loads: u32,
}

/// The settings of an [`OffloadTable`].
#[derive(Clone, Copy, Debug)]
pub struct OffloadConfig {
    /// The number of places, one for each chunk.
    pub capacity: u32,
    /// How often a chunk has to be offered before it is stored. With 0 and 1, each chunk is stored at once.
    pub store_threshold: usize,
    /// The largest number of chunks whose offers are counted.
    pub max_tracked: usize,
    /// Whether to record events.
    pub events: bool,
}

/// Numbers of chunks in an [`OffloadTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadCounts {
    /// The number of places.
    pub capacity: u32,
    /// The number of chunks that are being stored.
    pub arriving: usize,
    /// The number of chunks that are being loaded.
    pub loading: usize,
    /// The number of chunks that no transfer uses.
    pub idle: usize,
}

/// A table of the chunks in host memory and their places.
///
/// A chunk can be found once the transfer that stores it is complete. A chunk that transfers use keeps its
/// place. The others are evicted in the order of [`OffloadOrder`], except those that the same call stores.
///
/// ```
/// use kvpool::base::{Id, OffloadSlot};
/// use kvpool::engines::{NamedChunk, OffloadConfig, OffloadRequest, OffloadTable};
/// let config = OffloadConfig { capacity: 1, store_threshold: 0, max_tracked: 0, events: false };
/// let (mut table, mut request) = (OffloadTable::new(config), OffloadRequest::default());
/// let [old, new] = [b"old", b"new"].map(|key| [NamedChunk { key, position: None }]);
/// assert_eq!(table.begin_store(&old, &mut request)?.unwrap().places, [OffloadSlot::new(0)]);
/// assert!(table.begin_store(&new, &mut request)?.is_none(), "the place is in use");
/// table.end_store([&b"old"[..]]);
/// let storing = table.begin_store(&new, &mut request)?.unwrap();
/// assert_eq!((storing.places.len(), &*storing.evicted[0]), (1, &b"old"[..]));
/// # Ok::<(), kvpool::base::Error>(())
/// ```
#[derive(Debug)]
pub struct OffloadTable {
    capacity: u32,
    order: OffloadOrder<OffloadedChunk>,
    arriving: usize,
    /// The number of the first place that was never used; neither were those after it.
    fresh: u32,
    free: Vec<OffloadSlot>,
    offers: Option<OfferCounts>,
    events: Option<Vec<OffloadEvent>>,
    requested: Vec<usize>,
    skipped: usize,
}

impl OffloadTable {
    /// Creates a table without chunks.
    #[must_use]
    pub fn new(config: OffloadConfig) -> Self {
        Self {
            capacity: config.capacity,
            order: OffloadOrder::default(),
            arriving: 0,
            fresh: 0,
            free: Vec::new(),
            offers: (config.store_threshold > 1).then(|| OfferCounts::new(config)),
            events: config.events.then(Vec::new),
            requested: Vec::new(),
            skipped: 0,
        }
    }

    /// Returns the state of the chunk with a key.
    #[must_use]
    pub fn find(&self, key: &[u8]) -> Option<OffloadedChunk> {
        self.order.find(key).map(|chunk| *self.order.get(chunk))
    }

    /// Returns how often a chunk was offered recently; 0 for a chunk whose offers are not counted.
    #[must_use]
    pub fn offers_of(&self, key: &[u8]) -> usize {
        self.offers.as_ref().map_or(0, |offers| offers.count(key))
    }

    /// Returns the numbers of chunks.
    #[must_use]
    pub fn counts(&self) -> OffloadCounts {
        let idle = self.order.evictable();
        let loading = self.order.len() - self.arriving - idle;
        OffloadCounts { capacity: self.capacity, arriving: self.arriving, loading, idle }
    }

    /// Takes places for the chunks that are not stored yet, and evicts others where no places are free.
    /// Returns `None`, and evicts nothing, if there are too few places.
    ///
    /// In either case the request has used these chunks and those that are stored already.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if the request is finished and has not used one of the chunks before.
    pub fn begin_store(
        &mut self,
        chunks: &[NamedChunk<'_>],
        request: &mut OffloadRequest,
    ) -> Result<Option<StorePlan>> {
        self.restart_if_foreign(request);
        check_memory(chunks.len() * 4 * size_of::<NamedChunk<'_>>())?;
        let stages: Vec<Option<OffloadId>> = chunks.iter().map(|chunk| self.order.find(chunk.key)).collect();
        let arrives = |table: &Self, id| table.order.get(id).stage == OffloadStage::Arriving;
        expect_unfinished(
            chunks
                .iter()
                .zip(&stages)
                .filter_map(|(chunk, id)| (!id.is_some_and(|id| arrives(self, id))).then_some(chunk)),
            request,
        )?;
        if let Some(offers) = &mut self.offers {
            offers.record(chunks);
        }
        let (chosen, used) = self.choose(chunks, &stages);
        self.record(&used, request);
        let mut plan = StorePlan { chosen, ..StorePlan::default() };
        if plan.chosen.is_empty() {
            return Ok(Some(plan));
        }
        self.requested.push(plan.chosen.len());
        let Some(evicted) = self.make_room(plan.chosen.len(), chunks) else { return Ok(None) };
        plan.evicted = evicted;
        for &at in &plan.chosen {
            let NamedChunk { key, position } = chunks[at];
            let place = self.take_place();
            let chunk = OffloadedChunk { place, stage: OffloadStage::Arriving, loads: 0 };
            self.order.insert(key, chunk, position, &mut request.rank);
            plan.places.push(place);
        }
        self.arriving += plan.chosen.len();
        Ok(Some(plan))
    }

    /// Returns the positions of the offered chunks to store, and the offered chunks that the request uses.
    fn choose<'a>(
        &mut self,
        chunks: &[NamedChunk<'a>],
        stages: &[Option<OffloadId>],
    ) -> (Vec<usize>, Vec<NamedChunk<'a>>) {
        let (mut chosen, mut used) = (Vec::new(), Vec::with_capacity(chunks.len()));
        let mut seen: HashSet<&[u8]> = HashSet::new();
        for (at, (chunk, id)) in chunks.iter().zip(stages).enumerate() {
            match id {
                Some(id) if self.order.get(*id).stage == OffloadStage::Arriving => continue,
                Some(_) => (),
                None if self.offers.as_ref().is_some_and(|offers| !offers.are_enough(chunk.key)) => {
                    self.skipped += 1;
                    continue;
                }
                None if !seen.insert(chunk.key) => continue,
                None => chosen.push(at),
            }
            used.push(*chunk);
        }
        (chosen, used)
    }

    /// Evicts chunks until `count` places are free, but none of `chunks`. Returns the keys of the evicted
    /// chunks. If too few chunks can be evicted, returns `None` and changes nothing.
    fn make_room(&mut self, count: usize, chunks: &[NamedChunk<'_>]) -> Option<Vec<OffloadKey>> {
        let short = count.saturating_sub(self.free.len() + widen(self.capacity - self.fresh));
        if short == 0 {
            return Some(Vec::new());
        }
        let evicted = self.order.evict(short, chunks.iter().map(|chunk| chunk.key))?;
        let (keys, places): (Vec<_>, Vec<_>) =
            evicted.into_iter().map(|(key, chunk)| (key, chunk.place)).unzip();
        self.free.extend(places);
        if self.events.is_some() {
            self.record_event(OffloadChange::Evicted, keys.clone());
        }
        Some(keys)
    }

    /// Takes a free place. There must be one.
    fn take_place(&mut self) -> OffloadSlot {
        if self.fresh < self.capacity {
            self.fresh += 1;
            return OffloadSlot::new(self.fresh - 1);
        }
        self.free.pop().expect("callers have counted the free places")
    }

    /// Completes the storing of chunks. Chunks that are not being stored do not change.
    pub fn end_store<'a>(&mut self, keys: impl IntoIterator<Item = &'a [u8]>) {
        let mut stored = Vec::new();
        for key in keys {
            if let Some(id) = self.find_arriving(key) {
                self.order.get_mut(id).stage = OffloadStage::Ready;
                self.order.set_evictable(id, true);
                self.arriving -= 1;
                stored.push(Arc::clone(self.order.key(id)));
            }
        }
        self.record_event(OffloadChange::Stored, stored);
    }

    /// Abandons the storing of chunks. Chunks that are not being stored do not change.
    pub fn fail_store<'a>(&mut self, keys: impl IntoIterator<Item = &'a [u8]>) {
        let mut failed = Vec::new();
        for key in keys {
            if let Some(id) = self.find_arriving(key) {
                failed.push(Arc::clone(self.order.key(id)));
                let chunk = self.order.remove(id);
                self.free.push(chunk.place);
                self.arriving -= 1;
            }
        }
        self.record_event(OffloadChange::Failed, failed);
    }

    /// Keeps chunks in their places until [`end_load`](Self::end_load), and returns these places. If a
    /// request is given, it has used the chunks.
    ///
    /// # Errors
    /// [`ErrorKind::Stale`] if a chunk is not in the table or not complete; [`ErrorKind::State`] as for
    /// [`begin_store`](Self::begin_store). Nothing is changed then.
    pub fn begin_load(
        &mut self,
        chunks: &[NamedChunk<'_>],
        request: Option<&mut OffloadRequest>,
    ) -> Result<Vec<OffloadSlot>> {
        let mut ids = try_with_capacity(chunks.len())?;
        for (at, chunk) in chunks.iter().enumerate() {
            let id = self.order.find(chunk.key);
            match id.map(|id| self.order.get(id).stage) {
                Some(OffloadStage::Ready) => ids.extend(id),
                Some(OffloadStage::Arriving) => {
                    return Err(not_offloaded_error(at, chunks.len(), "is still being stored"));
                }
                None => return Err(not_offloaded_error(at, chunks.len(), "is not here")),
            }
        }
        if let Some(request) = request {
            self.restart_if_foreign(request);
            expect_unfinished(chunks, request)?;
            self.record(chunks, request);
        }
        Ok(ids
            .into_iter()
            .map(|id| {
                self.order.set_evictable(id, false);
                let chunk = self.order.get_mut(id);
                chunk.loads += 1;
                chunk.place
            })
            .collect())
    }

    /// Ends a load of chunks.
    ///
    /// # Errors
    /// [`ErrorKind::IndexOwnership`] if fewer loads of a chunk are in progress. Nothing is changed then.
    pub fn end_load(&mut self, keys: &[&[u8]]) -> Result<()> {
        for (at, key) in keys.iter().enumerate() {
            let id = self.order.find(key).filter(|&id| self.order.get(id).loads > 0);
            let Some(id) = id else {
                for key in &keys[..at] {
                    let id = self.order.find(key).expect("the first loop has found the chunk");
                    self.order.get_mut(id).loads += 1;
                }
                let text = format!("chunk {at} of {} is not being loaded", keys.len());
                return Err(Error::new(ErrorKind::IndexOwnership, text));
            };
            self.order.get_mut(id).loads -= 1;
        }
        for key in keys {
            let id = self.order.find(key).expect("the first loop has found the chunk");
            if self.order.get(id).loads == 0 {
                self.order.set_evictable(id, true);
            }
        }
        Ok(())
    }

    /// Records a use of chunks. The first of them becomes the most recently used one.
    pub fn touch(&mut self, keys: &[&[u8]]) {
        for key in keys.iter().rev() {
            if let Some(id) = self.order.find(key) {
                self.order.touch(id);
            }
        }
    }

    /// Ends a request: all chunks that it used count as used now, the beginning of the prompt last. A second
    /// call does nothing.
    pub fn finish(&mut self, request: &mut OffloadRequest) {
        if !self.order.issued(&request.rank) || std::mem::replace(&mut request.is_finished, true) {
            return;
        }
        for used in request.in_order().into_iter().rev() {
            if let Some(id) = self.order.find(&used.key) {
                self.order.touch(id);
            }
        }
    }

    /// Removes all chunks, including those that transfers use.
    pub fn clear(&mut self) {
        drop(self.order.drain());
        (self.arriving, self.fresh) = (0, 0);
        self.free.clear();
    }

    /// Takes the events since the last call. A chunk whose storing failed is left out if it is in the table
    /// again.
    pub fn take_events(&mut self) -> Vec<OffloadEvent> {
        let mut events = self.events.as_mut().map(std::mem::take).unwrap_or_default();
        for event in events.iter_mut().filter(|event| event.change == OffloadChange::Failed) {
            event.keys.retain(|key| self.order.find(key).is_none());
        }
        events.retain(|event| !event.keys.is_empty());
        events
    }

    /// Takes the numbers of chunks to store, one for each call of [`begin_store`](Self::begin_store) since
    /// the last time.
    pub fn take_asked(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.requested)
    }

    /// Takes the number of chunks that were not stored because they had not been offered often enough, since
    /// the last time.
    pub const fn take_skipped(&mut self) -> usize {
        std::mem::replace(&mut self.skipped, 0)
    }

    /// Starts a request over that belongs to another table.
    fn restart_if_foreign(&self, request: &mut OffloadRequest) {
        if !self.order.issued(&request.rank) {
            *request = OffloadRequest { rank: self.order.rank_of_request(), ..OffloadRequest::default() };
        }
    }

    /// Records that a request uses chunks. Only the first use counts.
    fn record(&mut self, chunks: &[NamedChunk<'_>], request: &mut OffloadRequest) {
        for &NamedChunk { key, position } in chunks {
            if let Some(&at) = request.by_key.get(key) {
                let known = &mut request.used[at].position;
                *known = position.or(*known);
                continue;
            }
            self.order.assign_rank(&mut request.rank);
            let found = self.order.find(key);
            if let (Some(id), Some(position)) = (found, position) {
                self.order.access(id, position, &mut request.rank);
            }
            let key = found.map_or_else(|| OffloadKey::from(key), |id| Arc::clone(self.order.key(id)));
            request.by_key.insert(Arc::clone(&key), request.used.len());
            request.used.push(UsedChunk { key, position });
        }
    }

    fn find_arriving(&self, key: &[u8]) -> Option<OffloadId> {
        self.order.find(key).filter(|&id| self.order.get(id).stage == OffloadStage::Arriving)
    }

    fn record_event(&mut self, change: OffloadChange, keys: Vec<OffloadKey>) {
        if let Some(events) = &mut self.events
            && !keys.is_empty()
        {
            events.push(OffloadEvent { change, keys });
        }
    }

    /// Describes a broken invariant, if there is one.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        if let Some(fault) = self.order.broken_invariant() {
            return Some(fault);
        }
        let mut places: Vec<OffloadSlot> =
            self.order.values().map(|chunk| chunk.place).chain(self.free.clone()).collect();
        places.sort_unstable();
        if !places.iter().copied().eq((0..self.fresh).map(OffloadSlot::new)) {
            return Some(format!("places are {places:?}, of {} that were taken", self.fresh));
        }
        let arriving = self.order.values().filter(|chunk| chunk.stage == OffloadStage::Arriving).count();
        let idle = self.order.values().filter(|chunk| chunk.stage == OffloadStage::Ready && chunk.loads == 0);
        let (counted, known) = ([arriving, idle.count()], [self.arriving, self.order.evictable()]);
        (counted != known).then(|| format!("{counted:?} chunks are arriving and idle; {known:?} are known"))
    }
}

fn not_offloaded_error(at: usize, count: usize, what: &str) -> Error {
    Error::stale(format!("chunk {at} of {count} {what}"))
}

fn expect_unfinished<'a>(
    chunks: impl IntoIterator<Item = &'a NamedChunk<'a>>,
    request: &OffloadRequest,
) -> Result<()> {
    let is_new = |chunk: &NamedChunk<'_>| !request.by_key.contains_key(chunk.key);
    if request.is_finished && chunks.into_iter().any(is_new) {
        return Err(Error::state("the request is finished: it cannot use further chunks"));
    }
    Ok(())
}

id!(
    /// The number of a chunk whose offers are counted.
    OfferId,
    "offer"
);

/// The numbers of offers of recently offered chunks.
#[derive(Debug)]
struct OfferCounts {
    threshold: usize,
    capacity: usize,
    by_key: KeyMap<OffloadKey, OfferId>,
    counts: Vec<OfferCount>,
    order: RecencyList<OfferId>,
}

#[derive(Debug)]
struct OfferCount {
    key: OffloadKey,
    count: usize,
}

impl OfferCounts {
    fn new(config: OffloadConfig) -> Self {
        Self {
            threshold: config.store_threshold,
            capacity: config.max_tracked,
            by_key: KeyMap::default(),
            counts: Vec::new(),
            order: RecencyList::default(),
        }
    }

    fn count(&self, key: &[u8]) -> usize {
        self.by_key.get(key).map_or(0, |&id| self.counts[widen(id.number())].count)
    }

    fn are_enough(&self, key: &[u8]) -> bool {
        self.count(key) >= self.threshold
    }

    /// Counts an offer of chunks. If there are too many, forgets chunks that are not offered now.
    fn record(&mut self, chunks: &[NamedChunk<'_>]) {
        let mut counted: Vec<OfferId> = Vec::new();
        for chunk in chunks {
            if let Some(&id) = self.by_key.get(chunk.key) {
                self.order.touch(id);
                self.counts[widen(id.number())].count += 1;
                counted.push(id);
            }
        }
        counted.sort_unstable();
        counted.dedup();
        let mut forgettable = self.counts.len() - counted.len();
        for chunk in chunks {
            if self.by_key.contains_key(chunk.key) {
                continue;
            }
            let offered = OfferCount { key: OffloadKey::from(chunk.key), count: 1 };
            let key = Arc::clone(&offered.key);
            let id = if self.counts.len() < self.capacity {
                self.counts.push(offered);
                OfferId::new(u32::try_from(self.counts.len() - 1).expect("chunks are numbered in 32 bits"))
            } else if forgettable > 0 {
                forgettable -= 1;
                let oldest =
                    self.order.oldest().expect("counts of chunks that are not offered now are the oldest");
                self.order.remove(oldest);
                let forgotten = std::mem::replace(&mut self.counts[widen(oldest.number())], offered);
                self.by_key.remove(&forgotten.key);
                oldest
            } else {
                continue;
            };
            self.order.push(id);
            self.by_key.insert(key, id);
        }
    }
}
