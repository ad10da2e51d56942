//! The journal of a tree of groups: which units it takes and gives up.
//!
//! A unit is named by the key of the page that it ends with, and a snapshot by that of the page at whose end it is. If
//! no group has a unit for every page, the pages themselves are reported as well, as units of no group: without them, a
//! reader would not know the tokens of all pages, nor the places where windows and chunks need no unit.
//!
//! *Invariant.* The blocks that can be found have keys. What is in other blocks was reported as removed.

use std::ops::Range;
use std::sync::Arc;

use crate::base::{Id, Page, Result, StateSlot, check_memory, try_push, widen};
use crate::cache::journal::{EventGroup, Journal, KeyedRun, Tier};
use crate::cache::keys::PageKeys;
use crate::cache::tree::Hold;
use crate::cache::{CacheEvent, Digest, Namespace, PageHash};
use crate::layout::{Group, GroupKind};

use super::blocks::Blocks;
use super::{End, GroupTree, is_state};

/// What a tree keeps a journal of.
///
/// ```
/// use kvpool::base::DType;
/// use kvpool::cache::{
///     CacheEvent, EventGroup, GroupPublication, GroupTree, JournalOf, Namespace, PolicyKind, Tier, UnitNumbers,
/// };
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane};
/// // Take BLAKE3 or SHA-256.
/// fn digest(parts: &[&[u8]]) -> [u8; 32] {
///     let mix = |sum: u64, &byte: &u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
///     [parts.concat().iter().fold(0, mix).to_le_bytes(); 4].concat().try_into().unwrap()
/// }
/// let k = vec![Plane::new("k", DType::BF16, &[2, 8]).unwrap()];
/// let full = Group::new("full", GroupKind::Full, &[0], k).unwrap();
/// let layout = CacheLayout::new("m", 2, vec![full]).unwrap();
/// let numbers = [UnitNumbers { of_unit: 1, of_slab: 4 }];
/// let journal = JournalOf { digest, tier: Tier::Host };
/// let mut tree = GroupTree::new(&layout, &numbers, PolicyKind::Lru, None, 1024, Some(journal));
/// let prompt: &[i32] = &[5, 6];
/// let mut hold = tree.match_prefix(&Namespace::Unnamed, &prompt, 2).unwrap();
/// let plan = tree.plan(&hold, &GroupPublication { tokens: &prompt, units: &[vec![Some(3)]] }).unwrap();
/// tree.publish(&mut hold, plan);
/// let events = tree.take_events();
/// let CacheEvent::Stored { tier, group, .. } = &events[0] else { panic!("a unit was stored") };
/// assert_eq!(*tier, Tier::Host);
/// let name = |group: &EventGroup| group.name.clone();
/// assert!(group.as_deref().map(name).is_none_or(|name| name == "full"));
/// drop(tree.release(hold));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct JournalOf {
    /// Hashes the keys of pages.
    pub digest: Digest,
    /// The memory that has the units.
    pub tier: Tier,
}

/// The journal of a tree, with the keys of its blocks.
#[derive(Debug)]
pub(super) struct UnitEvents {
    tier: Tier,
    journal: Journal,
    keys: PageKeys,
    groups: Vec<Arc<EventGroup>>,
    /// What is reported, in this order where units are stored, and in the reverse one where they are removed: the
    /// numbers of the groups, full ones first, behind `None` for pages if they are reported.
    order: Vec<Option<usize>>,
}

/// The end of a prefix that was published.
#[derive(Debug)]
pub(super) struct PublishedEnd<'a> {
    pub(super) namespace: &'a Namespace,
    /// The number of the page that `blocks` and `tokens` begin with. That of the page before the first new unit is
    /// among them, unless the unit is the first one.
    pub(super) first: usize,
    pub(super) blocks: Vec<Page>,
    pub(super) tokens: Vec<i32>,
}

/// New units of a group, or of none.
#[derive(Debug)]
pub(super) struct NewUnits {
    group: Option<usize>,
    /// The pages of each.
    each: usize,
    /// The numbers of the pages that they end with, ascending.
    ends: Vec<usize>,
}

impl NewUnits {
    /// Returns the number of the first page.
    pub(super) fn first(&self) -> Option<usize> {
        self.ends.first().map(|end| end + 1 - self.each)
    }
}

/// Bytes that are not checked for.
const FEW: usize = 1 << 14;

impl UnitEvents {
    pub(super) fn new(journal: JournalOf, groups: &[Group], page_size: usize) -> Self {
        let JournalOf { digest, tier } = journal;
        let is_full = |group: &Group| group.kind() == GroupKind::Full;
        let has_each_page = |group: &Group| is_full(group) && group.unit_tokens(page_size) == Some(page_size);
        let pages = (!groups.iter().any(has_each_page)).then_some(None);
        let mut order: Vec<_> = pages.into_iter().chain((0..groups.len()).map(Some)).collect();
        order.sort_by_key(|group| group.is_some_and(|group| !is_full(&groups[group])));
        let named =
            |group: &Group| Arc::new(EventGroup { name: group.name().to_owned(), kind: group.kind() });
        let groups = groups.iter().map(named).collect();
        Self { tier, journal: Journal::default(), keys: PageKeys::new(digest), groups, order }
    }

    /// Lists what is new behind a publication, in the order in which it is reported. `ends` returns the pages of each
    /// unit of a group, and the numbers of the pages that new ones end with.
    pub(super) fn new_units(
        &self,
        pages: Range<usize>,
        ends: impl Fn(usize) -> (usize, Vec<usize>),
    ) -> Vec<NewUnits> {
        let new = |&group: &Option<usize>| {
            let (each, ends) = group.map_or_else(|| (1, pages.clone().collect()), &ends);
            NewUnits { group, each, ends }
        };
        self.order.iter().map(new).filter(|new| !new.ends.is_empty()).collect()
    }

    /// Reports the units that a publication has brought. Its blocks from page `new` on are new.
    pub(super) fn record_published(&mut self, end: &PublishedEnd<'_>, new: usize, units: &[NewUnits]) {
        let &PublishedEnd { namespace, first, ref blocks, ref tokens } = end;
        let page_size = tokens.len() / blocks.len();
        let fresh = new - first;
        if fresh < blocks.len() {
            let parent = fresh.checked_sub(1).map(|before| key_of(&self.keys, blocks[before]));
            let _ = self.keys.add(namespace, parent, &tokens[fresh * page_size..], &blocks[fresh..]);
        }
        let keys = &self.keys;
        let key = |page: usize| key_of(keys, blocks[page - first]);
        for &NewUnits { group, each, ref ends } in units {
            let group = group.map(|group| &self.groups[group]);
            for run in ends.chunk_by(|one, next| one + each == *next) {
                let (begin, end) = (run[0] + 1 - each, run[run.len() - 1] + 1);
                let parent = begin.checked_sub(1).map(key);
                let keys: Vec<_> = run.iter().copied().map(key).collect();
                let tokens = &tokens[(begin - first) * page_size..(end - first) * page_size];
                self.journal.stored(self.tier, group, KeyedRun { namespace, parent, tokens, keys: &keys });
            }
        }
    }

    /// Reports units of a group, by the blocks that they end in, as removed.
    pub(super) fn record_removed(&mut self, group: usize, blocks: impl Iterator<Item = Page>) {
        self.removed(Some(group), blocks);
    }

    /// Reports blocks as removed, and before them units of the groups, by the blocks that they end in.
    pub(super) fn record_evicted(&mut self, units: &[Vec<Page>], blocks: &[Page]) {
        for at in (0..self.order.len()).rev() {
            let group = self.order[at];
            let of_group = group.map_or(blocks, |group| &units[group]);
            self.removed(group, of_group.iter().copied());
        }
        self.keys.forget(blocks);
    }

    fn removed(&mut self, group: Option<usize>, blocks: impl Iterator<Item = Page>) {
        let mut keys = Vec::new();
        for key in blocks.filter_map(|block| self.keys.get(block)) {
            if try_push(&mut keys, key).is_err() {
                // A reader that misses events starts over.
                return self.journal.record_cleared();
            }
        }
        self.journal.removed(self.tier, group.map(|group| &self.groups[group]), &keys);
    }

    /// Reports that nothing can be found any more.
    pub(super) fn record_cleared(&mut self) {
        self.keys.clear();
        self.journal.record_cleared();
    }

    /// Takes over the events of `earlier`, all of whose units were removed.
    pub(super) fn continue_from(&mut self, earlier: &mut Self) {
        self.journal = std::mem::take(&mut earlier.journal);
        self.journal.record_cleared();
    }

    pub(super) fn take(&mut self) -> Vec<CacheEvent> {
        self.journal.take()
    }

    /// Checks that there is memory to report a publication of `fresh` new pages, whose units are of `tokens` tokens.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when there is not.
    pub(super) fn check_memory(&self, fresh: usize, tokens: usize) -> Result<()> {
        let each = size_of::<i32>() + size_of::<PageHash>();
        // What is published is copied once, and then for the event of each group.
        let bytes = (1 + self.order.len()) * tokens * each + self.keys.bytes_for(fresh);
        if bytes <= FEW { Ok(()) } else { check_memory(bytes) }
    }

    pub(super) fn bytes(&self) -> usize {
        self.keys.bytes() + self.journal.bytes()
    }
}

impl GroupTree {
    /// Checks that there is memory to report a publication of `tokens` tokens, `fresh` of which are new.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when there is not.
    pub(super) fn check_memory_of_events(&self, fresh: usize, tokens: usize) -> Result<()> {
        let Some(events) = &self.events else { return Ok(()) };
        // Units may begin before the publication.
        let most = (0..self.groups.len()).map(|group| self.blocks.pages_of_unit(group)).max().unwrap_or(1);
        events.check_memory(fresh / self.page_size, tokens + (most + 1) * self.page_size)
    }

    /// Reports what a publication that ends at `hold` has brought: the blocks from page `new` on, the units of `taken`,
    /// with the pages that they end with, and maybe a snapshot.
    #[cold]
    pub(super) fn record_published(
        &mut self,
        hold: &Hold,
        new: usize,
        taken: &[Vec<(usize, u32)>],
        has_snapshot: bool,
    ) {
        let Self { tree, events: Some(events), groups, blocks, page_size, .. } = self else { return };
        let Some(namespace) = tree.namespace_of(hold) else { return };
        let pages = hold.len() / *page_size;
        let units = events.new_units(new..pages, |group| {
            let ends = if is_state(&groups[group]) {
                has_snapshot.then(|| pages - 1).into_iter().collect()
            } else {
                taken[group].iter().map(|&(page, _)| page).collect()
            };
            (blocks.pages_of_unit(group), ends)
        });
        let Some(first) = units.iter().filter_map(NewUnits::first).min() else { return };
        // With the page before, whose key is named.
        let first = first.saturating_sub(1);
        let (blocks, tokens) = tree.pages_with_tokens(hold, first * *page_size);
        events.record_published(&PublishedEnd { namespace, first, blocks, tokens }, new, &units);
    }

    /// Reports evicted blocks and ends, which are still in the table, as removed.
    #[cold]
    pub(super) fn record_evicted(&mut self, pages: &[Page], slots: &[StateSlot]) {
        let Self { events: Some(events), groups, blocks, ends, .. } = self else { return };
        let of_slot = |slot: &StateSlot| ends[widen(slot.number())].as_ref();
        let units = units_at(groups, blocks, pages, slots.iter().filter_map(of_slot));
        events.record_evicted(&units, pages);
    }

    /// Reports everything of a namespace as removed.
    pub(super) fn record_all_removed(&mut self, namespace: &Namespace) {
        let Self { tree, events: Some(events), groups, blocks, ends, .. } = self else { return };
        let runs = tree.runs_of(namespace);
        let pages: Vec<_> = runs.iter().flat_map(|(run, _)| run.iter().copied()).collect();
        let of_run = |&(_, slot): &(_, Option<StateSlot>)| ends[widen(slot?.number())].as_ref();
        let units = units_at(groups, blocks, &pages, runs.iter().filter_map(of_run));
        events.record_evicted(&units, &pages);
    }
}

fn key_of(keys: &PageKeys, block: Page) -> PageHash {
    keys.get(block).expect("a block that can be found has a key")
}

/// Lists, for each group, those of the blocks in which one of its units ends; of states, those of the ends.
fn units_at<'a>(
    groups: &[Group],
    blocks: &Blocks,
    pages: &[Page],
    ends: impl Iterator<Item = &'a End>,
) -> Vec<Vec<Page>> {
    let snapshots: Vec<_> = ends.filter(|end| !end.states.is_empty()).map(|end| end.block).collect();
    let of_group = |(number, group)| {
        if is_state(group) {
            return snapshots.clone();
        }
        pages.iter().copied().filter(|&block| blocks.unit(number, block).is_some()).collect()
    };
    groups.iter().enumerate().map(of_group).collect()
}
