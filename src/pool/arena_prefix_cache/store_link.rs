//! The link between the tier below the prefix cache of an arena and the store below that.
//!
//! A unit has a name in the store by its group and the key of the page that it ends with; a snapshot by the page that it
//! is behind. A thread puts what comes to the tier, and another one fetches prefixes to it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{Epoch, ForkGate, KeySet, Result, run_blocking};
use crate::cache::{Digest, KeyChain, Namespace, PageHash};
use crate::layout::{Group, GroupKind};
use crate::memory::{CopyDirection, HostRows, Keep, Stream};
use crate::pool::arena_host_tier::Soundness;
use crate::pool::piece_names::PieceNames;
use crate::pool::{ArenaHostTier, LowerStore, Store, StoreTransfer};
use crate::transfer::{CopyQueue, JobThread, Transfer};

use super::ArenaLease;
use super::cache_core::{ArenaCacheCore, free_units};
use super::leased::{end_of, in_places, units_of};

/// The time after which a fetch looks whether it was given up.
const SLICE: Duration = Duration::from_millis(20);

/// Prefixes that wait until the store can take them. More are not stored.
const WAITING: usize = 1024;

/// A store below a tier.
pub(super) struct StoreLink {
    tier: Arc<ArenaHostTier>,
    /// The cache of the tier's pieces.
    below: Arc<ArenaCacheCore>,
    store: Arc<dyn Store>,
    digest: Digest,
    /// The names of each group's pieces.
    names: Vec<PieceNames>,
    puts: Arc<JobThread>,
    fetches: CopyQueue,
    outgoing: RankedMutex<Outgoing>,
}

/// What is on its way to a store.
#[derive(Debug, Default)]
struct Outgoing {
    /// Prefixes that wait, in their order, by their tokens: they may be evicted meanwhile.
    waiting: VecDeque<(Namespace, Vec<i32>)>,
    puts: Vec<Put>,
    /// Whether the thread sends some.
    is_sending: bool,
}

/// A put in progress.
#[derive(Debug)]
struct Put {
    transfer: Arc<StoreTransfer>,
    pieces: Vec<Named>,
    bytes: usize,
}

/// A piece, by its group and its name among the pieces of that.
#[derive(Clone, Copy, Debug)]
struct Named {
    group: usize,
    key: PageHash,
    /// Which of the pieces with this key: those of a snapshot, one a layer, may be several.
    number: usize,
    /// The position of its unit.
    position: usize,
    piece: u32,
}

impl Named {
    /// Returns what tells it from all others.
    const fn name(&self) -> (usize, PageHash, usize) {
        (self.group, self.key, self.number)
    }
}

/// Keeps the pieces of a prefix for a store.
#[derive(Debug)]
struct KeptPrefix(Option<Arc<ArenaLease>>);

impl Drop for KeptPrefix {
    fn drop(&mut self) {
        // A thread of the store locks what callers lock, too.
        let _gate = ForkGate::enter_on_own_thread();
        drop(self.0.take());
    }
}

/// Pieces that a store reads. When it is done with them, more are sent.
#[derive(Debug)]
struct SentPieces {
    prefix: KeptPrefix,
    link: Weak<StoreLink>,
    thread: Arc<JobThread>,
}

impl Drop for SentPieces {
    fn drop(&mut self) {
        let (link, _gate) = (self.link.clone(), ForkGate::enter_on_own_thread());
        drop(self.prefix.0.take());
        // A thread of the store must not become the last owner of the link. Without a thread, the next call sends more.
        let _ = self.thread.submit(move || link.upgrade().iter().for_each(StoreLink::send_waiting));
    }
}

/// Pieces that a store writes, and that nobody else has yet.
#[derive(Debug)]
struct FetchedPieces {
    below: Option<Arc<ArenaCacheCore>>,
    epoch: Epoch,
    taken: Vec<Vec<u32>>,
    /// Whether the cache has them.
    is_published: AtomicBool,
}

impl Drop for FetchedPieces {
    fn drop(&mut self) {
        let (_gate, below) = (ForkGate::enter_on_own_thread(), self.below.take());
        if let Some(below) = below.filter(|_| !self.is_published.load(Ordering::Acquire)) {
            let _ = below.arena.in_epoch(self.epoch, |slabs| free_units(slabs, &self.taken));
        }
    }
}

/// A fetch of a prompt's units from a store to the tier above it. As long as it lives, it keeps there what it fetched or
/// found.
#[derive(Debug)]
pub struct ArenaFetch {
    /// `None` without a store.
    transfer: Option<Arc<Transfer>>,
    fetched: Arc<Fetched>,
}

/// What a fetch has brought.
#[derive(Debug, Default)]
struct Fetched {
    tokens: AtomicUsize,
    is_cancelled: AtomicBool,
    /// Keeps the prefix in the tier.
    prefix: OnceLock<KeptPrefix>,
}

impl ArenaFetch {
    /// A fetch that has nothing to do.
    pub(super) fn over() -> Self {
        Self { transfer: None, fetched: Arc::default() }
    }

    /// Returns the tokens whose units have arrived from the store, in whole pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.fetched.tokens.load(Ordering::Acquire)
    }

    /// Returns whether nothing has arrived.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the fetch is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.transfer.as_ref().is_none_or(|transfer| transfer.is_over().unwrap_or(true))
    }

    /// Waits up to `timeout` for its end. Returns whether it has come.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> bool {
        /// The time after which the thread is asked again.
        const POLL: Duration = Duration::from_millis(1);
        let begin = Instant::now();
        while !self.is_over() {
            if begin.elapsed() >= timeout {
                return false;
            }
            std::thread::sleep(POLL.min(timeout));
        }
        true
    }

    /// Stops the fetch. What has arrived stays.
    pub fn cancel(&self) {
        self.fetched.is_cancelled.store(true, Ordering::Release);
        self.transfer.iter().for_each(|transfer| transfer.cancel());
    }
}

impl Drop for ArenaFetch {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl StoreLink {
    /// Takes a store for pieces of `tier`, whose cache is `below`, with names made by `digest`.
    ///
    /// # Errors
    /// The error of a store that is closed.
    pub(super) fn new(
        tier: &Arc<ArenaHostTier>,
        below: &Arc<ArenaCacheCore>,
        LowerStore { store, model }: LowerStore,
        digest: Digest,
    ) -> Result<Self> {
        // A store that is closed returns its error here.
        store.find(&[])?;
        let layout = &below.contents.layout;
        let names = layout.groups().iter().enumerate().map(|(number, group)| {
            let (page, unit) = (layout.page_size().to_string(), group.description());
            // Layers apart or together, and the padding behind units, which arenas of other sizes may not have.
            let (numbers, bytes) = (below.contents.of_unit[number], tier.piece_bytes(number));
            let placed = format!("{numbers} pieces of {bytes} bytes");
            let context = [&*model, &*page, &*unit, &*placed].map(str::as_bytes);
            PieceNames::new(digest, &context, tier.piece_bytes(number), store.max_bytes())
        });
        Ok(Self {
            names: names.collect(),
            tier: Arc::clone(tier),
            below: Arc::clone(below),
            store,
            digest,
            puts: Arc::new(JobThread::new("kvpool-put")),
            fetches: CopyQueue::new(CopyDirection::In, None),
            outgoing: RankedMutex::new(LockRank::WaitingPieces, Outgoing::default()),
        })
    }

    fn groups(&self) -> &[Group] {
        self.below.contents.layout.groups()
    }

    fn page_size(&self) -> usize {
        self.below.contents.layout.page_size()
    }

    /// Has a thread put what the store lacks of a prefix of the tier.
    pub(super) fn put(self: &Arc<Self>, namespace: &Namespace, tokens: Vec<i32>) {
        let mut outgoing = self.outgoing.lock();
        let waiting = &mut outgoing.waiting;
        // What waits of the same request goes with it.
        waiting.retain(|(name, earlier)| name != namespace || !tokens.starts_with(earlier));
        waiting.push_back((namespace.clone(), tokens));
        let dropped = if waiting.len() > WAITING { waiting.pop_front() } else { None };
        drop(outgoing);
        self.give_up(dropped);
        self.wake();
    }

    /// Has the thread send what waits, if the store can take some.
    fn wake(self: &Arc<Self>) {
        {
            let mut outgoing = self.outgoing.lock();
            if outgoing.waiting.is_empty() || outgoing.is_sending {
                return;
            }
            outgoing.is_sending = true;
        }
        let link = Arc::clone(self);
        if self.puts.submit(move || link.send_waiting()).is_err() {
            let left = {
                let mut outgoing = self.outgoing.lock();
                outgoing.is_sending = false;
                std::mem::take(&mut outgoing.waiting)
            };
            self.give_up(left);
        }
    }

    /// Sends prefixes that wait: as many as may be on their way at once, at most half of the tier.
    fn send_waiting(self: &Arc<Self>) {
        loop {
            self.settle();
            let gate = ForkGate::enter_on_own_thread();
            let next = {
                let mut outgoing = self.outgoing.lock();
                let bytes: usize = outgoing.puts.iter().map(|put| put.bytes).sum();
                let room = (self.tier.mem_bytes() / 2).saturating_sub(bytes);
                let next = if room > 0 { outgoing.waiting.pop_front() } else { None };
                outgoing.is_sending = next.is_some();
                next.map(|next| (next, room))
            };
            drop(gate);
            let Some(((namespace, tokens), room)) = next else { return };
            if let Ok(false) = self.send(&namespace, &tokens, room) {
                // The rest follows when the store is done with the first.
                let _gate = ForkGate::enter_on_own_thread();
                let mut outgoing = self.outgoing.lock();
                outgoing.waiting.push_front((namespace, tokens));
                outgoing.is_sending = false;
                return;
            }
        }
    }

    /// Puts what the store lacks of a prefix, in `room` bytes, and records a use of the rest. Returns whether it was all.
    fn send(self: &Arc<Self>, namespace: &Namespace, tokens: &[i32], room: usize) -> Result<bool> {
        let keys = self.keys_of(namespace, tokens);
        let gate = ForkGate::enter_on_own_thread();
        let prefix = KeptPrefix(Some(ArenaLease::without_use(&self.below, namespace, &tokens)?));
        let lease = prefix.0.as_ref().expect("it was just made");
        let len = lease.len()?;
        let units = units_of(&self.below, lease, 0..len)?;
        // The tier has evicted the others.
        self.count_unstored(self.pieces_of(tokens.len()).saturating_sub(self.pieces_of(len)));
        drop(gate);
        let mut all = self.named(&units, 0..len, &keys);
        let present = self.store.touch(&self.names_of(&all));
        let present = present.inspect_err(|_| self.count_unstored(all.len()))?;
        let mut present = self.whole(&all, &present).into_iter();
        all.retain(|_| !present.next().unwrap_or(false));
        let is_sending = self.drop_sent(&mut all);
        self.keep_sound(&mut all, 0..len);
        let mut bytes = 0;
        let fitting = all.iter().take_while(|piece| {
            bytes += self.tier.piece_bytes(piece.group);
            bytes <= room
        });
        // One at least, however small the tier.
        let count = fitting.count().max(usize::from(!is_sending)).min(all.len());
        let is_all = count == all.len();
        all.truncate(count);
        if all.is_empty() {
            return Ok(is_all);
        }
        let bytes = all.iter().map(|piece| self.tier.piece_bytes(piece.group)).sum();
        let sent = SentPieces { prefix, link: Arc::downgrade(self), thread: Arc::clone(&self.puts) };
        let rows = self.rows(&all, Arc::new(sent));
        let transfer = rows.and_then(|rows| self.store.put(self.names_of(&all), rows));
        let transfer = transfer.inspect_err(|_| self.count_unstored(all.len()))?;
        let _gate = ForkGate::enter_on_own_thread();
        self.outgoing.lock().puts.push(Put { transfer, pieces: all, bytes });
        Ok(is_all)
    }

    /// Drops the pieces that are on their way already. Returns whether any are.
    fn drop_sent(&self, pieces: &mut Vec<Named>) -> bool {
        let _gate = ForkGate::enter_on_own_thread();
        let outgoing = self.outgoing.lock();
        let sent: KeySet<_> =
            outgoing.puts.iter().flat_map(|put| put.pieces.iter().map(Named::name)).collect();
        pieces.retain(|piece| !sent.contains(&piece.name()));
        !sent.is_empty()
    }

    /// Returns the number of pieces that a prefix has in the store.
    fn pieces_of(&self, len: usize) -> usize {
        if len == 0 { 0 } else { self.wanted(0..len, |_| true).iter().flatten().flatten().count() }
    }

    /// Counts prefixes that are not stored.
    fn give_up(&self, waiting: impl IntoIterator<Item = (Namespace, Vec<i32>)>) {
        for (_, tokens) in waiting {
            self.count_unstored(self.pieces_of(tokens.len()));
        }
    }

    fn count_unstored(&self, pieces: usize) {
        let _gate = ForkGate::enter_on_own_thread();
        self.tier.count(|counts| counts.unstored += pieces);
    }

    /// Drops the pieces that have other bytes than those that came.
    fn keep_sound(&self, pieces: &mut Vec<Named>, tokens: Range<usize>) {
        let _gate = ForkGate::enter_on_own_thread();
        let page_size = self.page_size();
        for (number, group) in self.groups().iter().enumerate() {
            let of_group: Vec<Named> = pieces.iter().filter(|piece| piece.group == number).copied().collect();
            let numbers: Vec<u32> = of_group.iter().map(|piece| piece.piece).collect();
            let name = |at: usize| end_of(group, page_size, of_group[at].position, tokens.clone()).1;
            let mut sound = self.tier.inspect(number, &numbers, name).into_iter();
            pieces.retain(|piece| piece.group != number || sound.next() == Some(Soundness::Sound));
        }
    }

    /// Ends the puts that are over, and sends more.
    pub(super) fn settle_puts(self: &Arc<Self>) {
        self.settle();
        self.wake();
    }

    /// Ends the puts that are over.
    fn settle(&self) {
        let _gate = ForkGate::enter_on_own_thread();
        self.outgoing.lock().puts.retain(|put| {
            // In the child of a fork nothing is stored.
            let is_over = put.transfer.query().unwrap_or(true);
            if is_over {
                let present = self.whole(&put.pieces, &put.transfer.present().unwrap_or_default());
                let unstored = put.pieces.len() - present.iter().filter(|is_there| **is_there).count();
                self.tier.count(|counts| counts.unstored += unstored);
            }
            !is_over
        });
    }

    /// Returns whether nothing is on its way to the store.
    pub(super) fn is_idle(self: &Arc<Self>) -> bool {
        self.settle_puts();
        let outgoing = self.outgoing.lock();
        outgoing.waiting.is_empty() && outgoing.puts.is_empty() && !outgoing.is_sending
    }

    /// Waits until what waits was passed to the store, as far as it takes it. Called when the cache is dropped.
    pub(super) fn finish(self: &Arc<Self>) {
        let (sender, given) = std::sync::mpsc::channel::<()>();
        let link = Arc::clone(self);
        let send_all = move || {
            link.send_waiting();
            drop(sender);
        };
        // When the job is done or dropped, its end of the channel is dropped.
        let _ = self.puts.submit(send_all);
        let _ = run_blocking(move || given.recv());
        let left = std::mem::take(&mut self.outgoing.lock().waiting);
        self.give_up(left);
    }

    fn keys_of(&self, namespace: &Namespace, tokens: &[i32]) -> Vec<PageHash> {
        let mut chain = KeyChain::at_root(self.digest, namespace, self.page_size());
        tokens.chunks_exact(self.page_size()).map(|page| chain.next(page)).collect()
    }

    /// Names pieces at the positions of [`units_of`] `tokens`.
    fn named(&self, units: &[Vec<Option<u32>>], tokens: Range<usize>, keys: &[PageHash]) -> Vec<Named> {
        let mut named = Vec::new();
        for (group, units) in units.iter().enumerate() {
            let each = self.groups()[group].unit_tokens(self.page_size());
            let there = units.iter().enumerate().filter_map(|(at, piece)| Some((at, (*piece)?)));
            named.extend(there.map(|(position, piece)| {
                // A unit is named by its last page, and a snapshot by the page before it.
                let end = each.map_or(tokens.end, |each| (tokens.start / each + position + 1) * each);
                let number = if each.is_some() { 0 } else { position };
                Named { group, key: keys[end / self.page_size() - 1], number, position, piece }
            }));
        }
        named
    }

    /// Returns the names of the parts of pieces, which are sorted by their group.
    fn names_of(&self, pieces: &[Named]) -> Vec<PageHash> {
        let of_group = |pieces: &[Named]| {
            self.names[pieces[0].group].of(pieces.iter().map(|piece| (&piece.key, piece.number)))
        };
        pieces.chunk_by(|one, next| one.group == next.group).flat_map(of_group).collect()
    }

    /// Returns which of these pieces a store has whole, that has or has not their parts.
    fn whole(&self, pieces: &[Named], parts: &[bool]) -> Vec<bool> {
        let mut rest = parts;
        let mut whole = Vec::with_capacity(pieces.len());
        for pieces in pieces.chunk_by(|one, next| one.group == next.group) {
            let names = &self.names[pieces[0].group];
            let of_group;
            (of_group, rest) = rest.split_at((pieces.len() * names.parts()).min(rest.len()));
            whole.extend(names.whole(of_group));
        }
        whole.resize(pieces.len(), false);
        whole
    }

    fn rows(&self, pieces: &[Named], owner: Keep) -> Result<HostRows> {
        let ranges = pieces
            .iter()
            .flat_map(|piece| self.names[piece.group].parts_of(&[self.tier.range(piece.group, piece.piece)]));
        HostRows::of_ranges(self.tier.pieces().region(), ranges.collect(), owner)
    }

    /// Starts to fetch what the store has of a prompt behind what the tier has.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when no thread can be started.
    pub(super) fn fetch(self: &Arc<Self>, namespace: Namespace, tokens: Vec<i32>) -> Result<ArenaFetch> {
        let fetched = Arc::new(Fetched::default());
        let (mut link, brought) = (Some(Arc::clone(self)), Arc::clone(&fetched));
        let transfer = self.fetches.start(1, &[], Vec::new(), move |_, _| {
            let Some(link) = link.take() else { return Ok(()) };
            let found = link.fetch_prefix(&namespace, &tokens, &brought);
            // The thread may be the last owner.
            let _gate = ForkGate::enter_on_own_thread();
            drop(link);
            found
        })?;
        Ok(ArenaFetch { transfer: Some(transfer), fetched })
    }

    /// Fetches a prefix: up to the last end that the store has and the tier has room for.
    fn fetch_prefix(&self, namespace: &Namespace, tokens: &[i32], brought: &Fetched) -> Result<()> {
        let page_size = self.page_size();
        let tokens = &tokens[..tokens.len() / page_size * page_size];
        let gate = ForkGate::enter_on_own_thread();
        let target = KeptPrefix(Some(ArenaLease::without_use(&self.below, namespace, &tokens)?));
        let lease = target.0.as_ref().expect("it was just made");
        let begin = lease.len()?;
        drop(gate);
        let keys = self.keys_of(namespace, tokens);
        let mut limit = tokens.len();
        while !brought.is_cancelled.load(Ordering::Acquire) {
            let Some(end) = self.last_end(begin, &keys[..limit / page_size], brought)? else { break };
            let Some(missing) = self.fetch_part(lease, &tokens[..end], begin, &keys, brought)? else {
                brought.tokens.store(end - begin, Ordering::Release);
                break;
            };
            limit = missing.min(end - page_size);
        }
        let _ = brought.prefix.set(target);
        Ok(())
    }

    /// Fetches what `tokens` have behind the first `begin`. Returns `None` if all came, or where to end instead.
    fn fetch_part(
        &self,
        lease: &Arc<ArenaLease>,
        tokens: &[i32],
        begin: usize,
        keys: &[PageHash],
        brought: &Fetched,
    ) -> Result<Option<usize>> {
        let end = tokens.len();
        let wanted = self.wanted(begin..end, |_| true);
        let counts: Vec<usize> = wanted.iter().map(|units| units.iter().flatten().count()).collect();
        let gate = ForkGate::enter_on_own_thread();
        let taken = self.below.arena.take_held(lease.epoch(), &counts, Stream::DEFAULT)?;
        let Some(taken) = taken else {
            self.tier.count(|tier| tier.skipped += counts.iter().sum::<usize>());
            // A shorter part may fit.
            return Ok(Some(begin + (end - begin) / 2));
        };
        self.tier.expect(&taken);
        drop(gate);
        let units = in_places(&wanted, &taken);
        let fetched = Arc::new(FetchedPieces {
            below: Some(Arc::clone(&self.below)),
            epoch: lease.epoch(),
            taken,
            is_published: AtomicBool::new(false),
        });
        let pieces = self.named(&units, begin..end, keys);
        let rows = self.rows(&pieces, Arc::clone(&fetched) as Keep)?;
        let transfer = self.store.get(self.names_of(&pieces), rows)?;
        while !transfer.wait(SLICE)? {
            if brought.is_cancelled.load(Ordering::Acquire) {
                transfer.cancel();
                return Ok(Some(begin));
            }
        }
        let present = self.whole(&pieces, &transfer.present()?);
        let missing = pieces.iter().zip(present).filter(|(_, is_there)| !is_there);
        let ends = missing.map(|(piece, _)| {
            end_of(&self.groups()[piece.group], self.page_size(), piece.position, begin..end).0
        });
        if let Some(missing) = ends.min() {
            return Ok(Some(missing));
        }
        let _gate = ForkGate::enter_on_own_thread();
        self.tier.arrive(&fetched.taken);
        lease.publish_held(&tokens, &units)?;
        fetched.is_published.store(true, Ordering::Release);
        Ok(None)
    }

    /// Returns the places of the units that a request needs to go on behind `tokens.end`, from `tokens.start` on, of the
    /// groups that count.
    fn wanted(&self, tokens: Range<usize>, counts: impl Fn(usize) -> bool) -> Vec<Vec<Option<u32>>> {
        let page_size = self.page_size();
        let of_group = |(number, group): (usize, &Group)| {
            if !counts(number) {
                return Vec::new();
            }
            let (Some(needed), Some(each)) =
                (group.prefix_units(tokens.end, page_size), group.unit_tokens(page_size))
            else {
                return vec![Some(0); self.below.contents.of_unit[number]];
            };
            let is_needed = |position: usize| position < needed.sinks || needed.units.contains(&position);
            (tokens.start / each..tokens.end / each).map(|at| is_needed(at).then_some(0)).collect()
        };
        self.groups().iter().enumerate().map(of_group).collect()
    }

    /// Returns what a request needs of windows, chunks and states to go on behind `tokens.end`, from `tokens.start` on.
    fn needs(&self, tokens: Range<usize>, keys: &[PageHash]) -> Vec<Named> {
        let page_size = self.page_size();
        let mut needs = Vec::new();
        let mut add = |group, end: usize, number| {
            let key = keys[end / page_size - 1];
            needs.push(Named { group, key, number, position: 0, piece: 0 });
        };
        for (number, group) in
            self.groups().iter().enumerate().filter(|(_, group)| group.kind() != GroupKind::Full)
        {
            let (Some(needed), Some(each)) =
                (group.prefix_units(tokens.end, page_size), group.unit_tokens(page_size))
            else {
                (0..self.below.contents.of_unit[number]).for_each(|layer| add(number, tokens.end, layer));
                continue;
            };
            let first = tokens.start / each;
            let positions = (first..needed.sinks).chain(needed.units.start.max(first)..needed.units.end);
            positions.for_each(|position| add(number, (position + 1) * each, 0));
        }
        needs
    }

    /// Returns the last tokens behind the first `begin` at which every group can go on with what the store has.
    fn last_end(&self, begin: usize, keys: &[PageHash], brought: &Fetched) -> Result<Option<usize>> {
        /// Pieces, and places with all that they need, that are looked for at once.
        const PIECES: usize = 512;
        const PLACES: usize = 64;
        let page_size = self.page_size();
        let mut limit = keys.len() * page_size;
        // What every place behind needs is looked for first.
        let groups = self.groups().iter().enumerate();
        for (number, group) in groups.filter(|(_, group)| group.kind() == GroupKind::Full) {
            let wanted = self.wanted(begin..limit, |other| other == number);
            for pieces in self.named(&wanted, begin..limit, keys).chunks(PIECES) {
                if brought.is_cancelled.load(Ordering::Acquire) {
                    return Ok(None);
                }
                let present = self.whole(pieces, &self.store.find(&self.names_of(pieces))?);
                if let Some(missing) = present.iter().position(|is_there| !is_there) {
                    let whole = begin..keys.len() * page_size;
                    limit = limit.min(end_of(group, page_size, pieces[missing].position, whole).0);
                    break;
                }
            }
        }
        let mut ends: Vec<usize> =
            (begin / page_size + 1..=limit / page_size).map(|page| page * page_size).collect();
        while !ends.is_empty() && !brought.is_cancelled.load(Ordering::Acquire) {
            let places = ends.split_off(ends.len().saturating_sub(PLACES));
            let needs = |&end: &usize| self.needs(begin..end, keys);
            let mut pieces: Vec<Named> = places.iter().flat_map(needs).collect();
            pieces.sort_by_key(Named::name);
            pieces.dedup_by_key(|piece| piece.name());
            let found = self.whole(&pieces, &self.store.find(&self.names_of(&pieces))?);
            let has = |wanted: &Named| {
                pieces.binary_search_by_key(&wanted.name(), Named::name).is_ok_and(|at| found[at])
            };
            if let Some(end) = places.iter().rev().find(|end| needs(end).iter().all(has)) {
                return Ok(Some(*end));
            }
        }
        Ok(None)
    }
}

impl std::fmt::Debug for StoreLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreLink").field("store", &self.store).finish_non_exhaustive()
    }
}
