//! The link between a cache and the tier below it: copies in flight, and the pages of the device that must
//! not change meanwhile.

use std::collections::VecDeque;
use std::hash::Hash;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::base::{KeyMap, Page, Result, StateSlot};
use crate::cache::{
    DevicePresence, Digest, Hold, LowerTierContents, Namespace, NodeHandle, OfferedPages, PageHash, Tokens,
    Tree,
};
use crate::memory::Stream;
use crate::pool::HostTier;
use crate::pool::host_tier::{Begun, Write};
use crate::pool::slot_tensors::CopiedPages;
use crate::transfer::Transfer;

use super::backing::Backing;
use super::config::{LowerStore, LowerTier};
use super::loading::{Loadable, SharedLoad};

/// The tier below a cache, and the copies between the two.
#[derive(Debug)]
pub(super) struct TierLink {
    pub(super) tier: Arc<HostTier>,
    pub(super) digest: Digest,
    /// The store below the tier.
    pub(super) backing: Option<Backing>,
    /// The writes, in the order of their copies.
    writes: VecDeque<InFlight>,
    /// Pages and snapshots that are being copied to the tier.
    pages: KeyMap<Page, Arc<Transfer>>,
    states: KeyMap<StateSlot, Arc<Transfer>>,
    /// Streams on which pages were published that have not been copied down since.
    publishers: Vec<Stream>,
    /// Loads from the tier, in flight or complete.
    loads: Vec<Weak<SharedLoad>>,
    uses: RecordedUses,
}

/// The uses of prefixes that the store below knows of.
#[derive(Debug, Default)]
struct RecordedUses {
    /// Pages that were copied to the tier so far.
    written: usize,
    /// For nodes of the tree, the number of pages and the time when their last use was recorded.
    recorded: KeyMap<NodeHandle, (usize, Instant)>,
}

/// The maximum number of pages whose use is recorded at once.
const MAX_USED: usize = 4096;

/// The maximum number of nodes whose recorded uses are remembered.
const MAX_NODES: usize = 4096;

/// The time after which a use of a node is recorded again, even if little was written in between: others may
/// write to the store, too.
const RECORD_AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct InFlight {
    write: Write,
    /// Whether the pages may have been overwritten before they were copied.
    is_void: bool,
}

impl TierLink {
    /// Takes the tier, and puts its pages in the store below if there is one.
    ///
    /// # Errors
    /// See [`HostTier::attach`]; the error of a store that is closed.
    pub(super) fn new(LowerTier { host: tier, digest, store }: LowerTier) -> Result<Self> {
        let model = store.as_ref().map(|store| store.model.clone());
        let backing = store.map(|LowerStore { store, model }| Backing::new(&tier, store, &model, digest));
        let backing = backing.transpose()?;
        tier.attach()?;
        tier.set_model(model.as_deref());
        let (writes, pages, states) = (VecDeque::new(), KeyMap::default(), KeyMap::default());
        let (publishers, loads, uses) = (Vec::new(), Vec::new(), RecordedUses::default());
        Ok(Self { tier, digest, backing, writes, pages, states, publishers, loads, uses })
    }

    /// Returns the number of leading writes that are over.
    pub(super) fn completed_writes(&self) -> usize {
        let is_over = |flight: &&InFlight| flight.write.transfer.is_over().unwrap_or(false);
        self.writes.iter().take_while(is_over).count()
    }

    /// Returns whether no copy to the tier and no write from there to the store is in progress.
    ///
    /// # Errors
    /// See [`Transfer::is_over`].
    pub(super) fn is_written(&self) -> Result<bool> {
        match self.writes.front() {
            // A failed device ends no copy.
            Some(oldest) => oldest.write.transfer.is_over().map(|_| false),
            None => Ok(self.tier.storing() == 0),
        }
    }

    /// Ends the first `count` writes, which are over.
    pub(super) fn settle(&mut self, count: usize, tree: &mut Tree) {
        let over: Vec<_> = self.writes.drain(..count).collect();
        for InFlight { write, is_void } in over {
            // Its places may be in use again, and in another copy.
            for page in write.pages() {
                remove_if(&mut self.pages, page, &write.transfer);
            }
            for state in write.states() {
                remove_if(&mut self.states, state, &write.transfer);
            }
            let is_complete = write.transfer.is_complete();
            if is_void || !matches!(is_complete, Ok(true)) {
                tree.record_dropped_below(&self.tier.discard(&write, is_complete.as_ref().err()));
                continue;
            }
            let _sending = self.backing.as_ref().map(|_| self.tier.begin_sending());
            self.tier.complete(&write);
            if let Some(backing) = &self.backing {
                backing.put(|kind| write.keys(kind));
            }
        }
    }

    /// Records pages that arrived in the tier from a store, except those that it has evicted meanwhile.
    pub(super) fn record_arrived(&self, tree: &mut Tree, arrived: &[OfferedPages]) {
        let contents = self.tier.contents();
        let is_there = |run: &&OfferedPages| run.keys.iter().all(|key| contents.has_page(key));
        arrived.iter().filter(is_there).for_each(|run| tree.record_copied(run));
    }

    /// Records that pages were published whose contents are written by work on `stream`.
    pub(super) fn record_publisher(&mut self, stream: Stream) {
        if !self.publishers.contains(&stream) {
            self.publishers.push(stream);
        }
    }

    /// Copies the pages that the tree offers to the tier, behind the work on `stream` and on the streams of
    /// the publishers.
    pub(super) fn copy_offers(&mut self, tree: &mut Tree, stream: Stream) {
        let offered = tree.take_offers();
        if offered.is_empty() {
            return;
        }
        self.record_publisher(stream);
        self.record_uses(tree);
        self.tier.begin_request(tree.now());
        let presence = |page, key: &PageHash| match tree.key_of(page) {
            Some(other) if other == *key => DevicePresence::Present,
            _ => DevicePresence::Absent,
        };
        let Begun { write, runs, evicted } = self.tier.write(&offered, presence, &self.publishers);
        tree.record_dropped_below(&evicted);
        // In the order of the prefix, and before the events of later calls: the pages can be found from now on.
        for run in &runs {
            tree.record_copied(run);
        }
        if let Some(write) = write {
            self.uses.written += write.pages().len();
            self.pages.extend(write.pages().iter().map(|page| (*page, Arc::clone(&write.transfer))));
            self.states.extend(write.states().iter().map(|state| (*state, Arc::clone(&write.transfer))));
            if let Some(backing) = &self.backing {
                backing.await_copy(&write.transfer, stream);
            }
            self.writes.push_back(InFlight { write, is_void: false });
            // Later copies are behind this one.
            self.publishers.clear();
        }
    }

    /// Lets the tier and the store below know which prefixes were used on the device, so that they do not evict what
    /// every request uses. A node is recorded again when a 128th of the tier was written since; with a store when it was a
    /// sixteenth, or after [`RECORD_AGAIN`].
    pub(super) fn record_uses(&mut self, tree: &mut Tree) {
        if !tree.has_uses() {
            return;
        }
        let Self { tier, backing, uses: RecordedUses { written, recorded }, .. } = self;
        let has_store = backing.is_some();
        // A store is asked by a thread, which is busy for longer.
        let interval = tier.capacity().div_ceil(if has_store { 16 } else { 128 });
        let mut record = || {
            let now = Instant::now();
            if recorded.len() > MAX_NODES {
                recorded.clear();
            }
            let is_due = |node: NodeHandle| {
                let is_due = recorded.get(&node).is_none_or(|(before, at)| {
                    *written - before >= interval || has_store && now.duration_since(*at) >= RECORD_AGAIN
                });
                if is_due {
                    recorded.insert(node, (*written, now));
                }
                is_due
            };
            let used = tree.take_uses(MAX_USED, is_due);
            tier.record_uses(&used, tree.now());
            used
        };
        match backing {
            Some(backing) => backing.record_uses(record),
            None => drop(record()),
        }
    }

    /// Empties the tier, and voids the copies in flight: pages of the device may get other contents before
    /// they are copied.
    pub(super) fn clear(&mut self) {
        self.writes.iter_mut().for_each(|flight| flight.is_void = true);
        self.tier.clear(None);
    }

    /// Returns the copy of a snapshot to the tier, if one is in flight.
    pub(super) fn write_of(&self, state: StateSlot) -> Option<Arc<Transfer>> {
        self.states.get(&state).cloned()
    }

    /// Returns the copies to the tier that may still read pages, each with its pages.
    pub(super) fn readers_of(&self, pages: &[Page]) -> Vec<CopiedPages> {
        let mut readers: Vec<CopiedPages> = Vec::new();
        if self.writes.is_empty() {
            return readers;
        }
        for page in pages {
            let Some(copy) = self.pages.get(page) else { continue };
            match readers.iter_mut().find(|reader| Arc::ptr_eq(&reader.copy, copy)) {
                Some(reader) => reader.pages.push(*page),
                None => readers.push(CopiedPages { copy: Arc::clone(copy), pages: vec![*page] }),
            }
        }
        readers
    }

    /// Returns the tokens that the tier could add to a prefix: those of `tokens`, at most `limit`, that
    /// follow the hold.
    ///
    /// # Errors
    /// The error of tokens that cannot be read.
    pub(super) fn loadable(
        &self,
        tree: &Tree,
        hold: &Hold,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<Loadable> {
        let keys = tree.keys_below(namespace, hold, tokens, limit, &self.tier.contents())?;
        let end = hold.len() + keys.len() * tree.page_size();
        Ok(Loadable { tokens: tokens.to_vec(hold.len()..end)?, keys, kept: None })
    }

    /// Lists a prefix that is being loaded.
    pub(super) fn add_load(&mut self, load: &Arc<SharedLoad>) {
        self.loads.retain(|load| load.strong_count() > 0);
        self.loads.push(Arc::downgrade(load));
    }

    /// Returns the prefixes that may be being loaded. The caller may become their last owner.
    pub(super) fn shared_loads(&self) -> impl Iterator<Item = Arc<SharedLoad>> {
        self.loads.iter().filter_map(Weak::upgrade)
    }

    /// Removes the prefixes that are being loaded from the list, so that no further lease joins them.
    pub(super) fn forget_tails(&mut self) {
        self.loads.clear();
    }

    /// Waits for every write and ends it, as successful if `is_valid` returns true. Called when the cache is
    /// dropped.
    pub(super) fn finish(&mut self, tree: &mut Tree, is_valid: impl FnOnce() -> bool) {
        let last = self.writes.back().map(|flight| Arc::clone(&flight.write.transfer));
        let is_over = last.is_none_or(|last| last.wait().is_ok());
        if !is_valid() {
            self.clear();
        }
        if is_over {
            self.settle(self.writes.len(), tree);
        }
        if let Some(backing) = &self.backing {
            backing.finish();
        }
        self.tier.detach();
    }
}

/// Removes an entry if it is of `transfer`, not of a later one.
fn remove_if<K: Hash + Eq>(copies: &mut KeyMap<K, Arc<Transfer>>, key: &K, transfer: &Arc<Transfer>) {
    if copies.get(key).is_some_and(|copy| Arc::ptr_eq(copy, transfer)) {
        copies.remove(key);
    }
}
