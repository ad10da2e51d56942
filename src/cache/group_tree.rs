//! A prefix tree whose pages stand for the units of several groups of a layout.
//!
//! A [`Tree`] maps tokens to *blocks*, one a page of tokens, which are numbers of this module. A table beside it says
//! which unit of each group ends in a block: a page of a full group in every block, a unit of more tokens in the block
//! of its last page, a unit of a window only as long as it is worth something. So the order of eviction, the locks,
//! the namespaces, the journal and the history of evictions are those of the tree.
//!
//! **Ends.** Where a request can go on without more than what is kept is an *end*: a place with a snapshot of each
//! state and the last units of each window. Each publication makes one. The units of windows and chunks count the
//! ends and the leases that need them. One that nothing needs is worth nothing: it is kept until memory is short, and
//! a later publication may need it again. Layouts of full groups alone have no ends, as a request can go on anywhere.
//!
//! *Invariant.* Every block has its units of full groups and its sinks; every unit that an end or a lease needs is
//! there; no two blocks have one unit.
//!
//! *Cost.* That of the tree, a step for each unit of the windows at the end of a match, and as much for each
//! publication.

mod blocks;
mod contents;
mod events;
mod evict;
mod explain;
mod invariants;
mod publish;
mod waiting;

use std::collections::hash_map::Entry;
use std::fmt;

use crate::base::{Id, KeyMap, Page, Result, StateSlot, widen};
use crate::layout::{CacheLayout, Group, GroupKind, PrefixUnits};

use super::tree::{Hold, ResumeAt, Tree, TreePosition, TreeStats};
use super::{BlockTokens, CacheEvent, Cause, Namespace, PolicyKind, PrefillCost, SessionId, Tokens};
use blocks::Blocks;
use events::UnitEvents;
use waiting::WaitingPlaces;

pub use contents::CachedPage;
pub use events::JournalOf;
pub use evict::{Relief, UnitsToFree};
pub use explain::{GroupExplanation, GroupReason};
pub use publish::{GroupPublication, PublicationPlan};

/// How the units of a group are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitNumbers {
    /// The numbers that a unit takes: more than one for a state that is placed layer by layer.
    pub of_unit: usize,
    /// The numbers of a slab.
    pub of_slab: u32,
}

/// Units of a prefix that a lease has, by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeasedUnits {
    /// Units 0, 1, ... of the group, of the sinks.
    pub sinks: Vec<u32>,
    /// The position of the first of `units`, in units of the group.
    pub first: usize,
    /// The units from there on to the end of the prefix, or the numbers of a snapshot. `None` for a unit that a
    /// publication did not have.
    pub units: Vec<Option<u32>>,
}

/// A lock of a prefix with the units that a request needs to go on behind it. It is not a guard.
#[derive(Debug)]
#[must_use]
pub struct GroupHold {
    hold: Hold,
    /// The block at whose end the last end of this lease is.
    own_end: Option<Page>,
    /// Whether it is for a copy of the units, and no request goes on there.
    is_for_copy: bool,
}

impl GroupHold {
    /// Returns the number of tokens of the prefix, in whole pages.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.hold.len()
    }

    /// Returns the number of tokens whose blocks were found, at which not every group can go on.
    #[must_use]
    pub const fn found(&self) -> usize {
        self.hold.found()
    }

    /// Returns whether the prefix has no tokens.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.hold.is_empty()
    }
}

/// An end: its block, and the numbers of the snapshot of each state, in the order of the groups.
#[derive(Clone, Debug)]
struct End {
    block: Page,
    tokens: usize,
    states: Vec<Vec<u32>>,
}

/// Prefixes by their tokens, with the units of each group of a layout.
///
/// ```
/// use kvpool::base::DType;
/// use kvpool::cache::{
///     CachedPage, GroupExplanation, GroupHold, GroupPublication, GroupReason, GroupTree, LeasedUnits, Namespace,
///     PolicyKind, PublicationPlan, UnitNumbers, UnitsToFree,
/// };
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane};
/// let k = || vec![Plane::new("k", DType::BF16, &[2, 8]).unwrap()];
/// let layout = CacheLayout::new("m", 2, vec![
///     Group::new("full", GroupKind::Full, &[0], k()).unwrap(),
///     Group::new("window", GroupKind::Window { tokens: 3, sinks: 0 }, &[1], k()).unwrap(),
/// ]).unwrap();
/// let numbers = [UnitNumbers { of_unit: 1, of_slab: 4 }; 2];
/// let mut tree = GroupTree::new(&layout, &numbers, PolicyKind::Lru, None, 1024, None);
/// let prompt: &[i32] = &[5, 6, 7, 8, 9];
/// let mut hold: GroupHold = tree.match_prefix(&Namespace::Unnamed, &prompt, 5).unwrap();
/// // The first page is behind the window.
/// let units = [vec![Some(3), Some(8)], vec![None, Some(4)]];
/// let publication = GroupPublication { tokens: &&prompt[..4], units: &units };
/// let plan: PublicationPlan = tree.plan(&hold, &publication).unwrap();
/// assert_eq!((plan.fresh(), plan.duplicate_tokens), (4, 0));
/// tree.publish(&mut hold, plan);
/// let LeasedUnits { first, units, .. } = tree.units(&hold, 1).unwrap();
/// assert_eq!((first, units), (1, vec![Some(4)]));
/// let freed: UnitsToFree = tree.release(hold);
/// assert!(freed.is_empty());
/// let pages: Vec<CachedPage> = tree.contents();
/// assert_eq!((pages.len(), pages[1].units[0].as_slice()), (2, &[8][..]));
/// let (len, groups): (usize, Vec<GroupExplanation>) = tree.explain(&Namespace::Unnamed, &prompt).unwrap();
/// assert!(len == 4 && groups.iter().all(|group| matches!(group.reason, GroupReason::Complete)));
/// assert_eq!(tree.match_prefix(&Namespace::Unnamed, &prompt, 4).unwrap().len(), 4);
/// ```
pub struct GroupTree {
    tree: Tree,
    groups: Vec<Group>,
    numbers: Vec<UnitNumbers>,
    page_size: usize,
    /// The number of pages that every place where a request goes on is a multiple of: more than 1 only if entries
    /// of several pages have no state that knows the rest.
    step: usize,
    blocks: Blocks,
    /// The ends, by the number of the snapshot that the tree has of each; `None` for a number that is not in use.
    ends: Vec<Option<End>>,
    vacant_ends: Vec<StateSlot>,
    /// The number of holds.
    holds: usize,
    /// The number of holds for copies, by the last block of their prefix.
    copies: KeyMap<Page, u32>,
    /// What waiting requests need of windows and chunks.
    waiting: WaitingPlaces,
    events: Option<UnitEvents>,
}

impl fmt::Debug for GroupTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupTree")
            .field("groups", &self.groups.iter().map(Group::name).collect::<Vec<_>>())
            .field("tree", &self.tree)
            .finish_non_exhaustive()
    }
}

impl GroupTree {
    /// Creates an empty tree for the groups of a layout, whose units have these `numbers`. `capacity` is the number of
    /// tokens that the policy expects to be kept, and `cost` what they are worth by their positions. With `events`, the
    /// tree keeps a journal.
    #[must_use]
    pub fn new(
        layout: &CacheLayout,
        numbers: &[UnitNumbers],
        policy: PolicyKind,
        cost: Option<PrefillCost>,
        capacity: u64,
        events: Option<JournalOf>,
    ) -> Self {
        let page_size = layout.page_size();
        let page_tokens = u32::try_from(page_size).expect("units of a page have indices in int32");
        let policy = policy.policy(capacity, BlockTokens::of_page_size(page_tokens), cost);
        let tree = Tree::new(page_size, ResumeAt::AnyPage, policy);
        let groups = layout.groups().to_vec();
        let has_states = groups.iter().any(is_state);
        let pages = |group: &Group| group.unit_tokens(page_size).map_or(1, |tokens| tokens / page_size);
        let step = if has_states { 1 } else { groups.iter().map(pages).fold(1, least_common_multiple) };
        let blocks = Blocks::new(&groups, numbers, page_size);
        let (ends, vacant_ends) = (Vec::new(), Vec::new());
        let events = events.map(|journal| UnitEvents::new(journal, &groups, page_size));
        let numbers = numbers.to_vec();
        Self {
            tree,
            groups,
            numbers,
            page_size,
            step,
            blocks,
            ends,
            vacant_ends,
            holds: 0,
            copies: KeyMap::default(),
            waiting: WaitingPlaces::default(),
            events,
        }
    }

    /// Returns the groups.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Returns the number of tokens in a page.
    #[must_use]
    pub const fn page_size(&self) -> usize {
        self.page_size
    }

    fn has_states(&self) -> bool {
        self.groups.iter().any(is_state)
    }

    /// Returns whether a request cannot go on at every place whose blocks are kept.
    fn has_ends(&self) -> bool {
        self.groups.iter().any(|group| group.kind() != GroupKind::Full)
    }

    /// Returns the statistics of the tree, in tokens. Its snapshots are the ends.
    #[must_use]
    pub fn stats(&self) -> TreeStats {
        let stats = self.tree.stats();
        let ends = self.ends.capacity() * size_of::<Option<End>>();
        let events = self.events.as_ref().map_or(0, UnitEvents::bytes);
        TreeStats { bytes: stats.bytes + self.blocks.bytes() + ends + self.waiting.bytes() + events, ..stats }
    }

    /// Returns the number of units of a group.
    #[must_use]
    pub fn units_of(&self, group: usize) -> usize {
        if is_state(&self.groups[group]) {
            // Every end has a snapshot of every state.
            return (self.ends.len() - self.vacant_ends.len()) * self.numbers[group].of_unit;
        }
        self.blocks.count(group)
    }

    /// Returns the number of units of a group that no end and no lease needs.
    #[must_use]
    pub fn unneeded(&self, group: usize) -> usize {
        self.blocks.unneeded(group)
    }

    /// Returns the number of ends with snapshots of states.
    #[must_use]
    pub fn snapshots(&self) -> usize {
        if self.has_states() { self.tree.stats().snapshots } else { 0 }
    }

    /// Locks the longest cached prefix of `tokens`, of at most `limit` tokens, at which every group can go on.
    ///
    /// # Errors
    /// An error if a token cannot be read or is not a token id. Nothing is changed then.
    pub fn match_prefix(
        &mut self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<GroupHold> {
        self.hold_at(None, namespace, tokens, limit, true)
    }

    /// Works like [`Self::match_prefix`], for a turn of a session, which ends with the hold.
    ///
    /// # Errors
    /// See [`Self::match_prefix`].
    pub fn match_in_session(
        &mut self,
        session: SessionId,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<GroupHold> {
        self.hold_at(Some(session), namespace, tokens, limit, true)
    }

    /// Records that the turn of a session is over, and what it waits for: see [`Tree::pause`].
    pub fn pause(&mut self, session: SessionId, kind: &str) {
        self.tree.pause(session, kind);
    }

    /// Records that a session has ended: what only it has used is evicted first.
    pub fn end(&mut self, session: SessionId) {
        self.tree.end(session);
    }

    /// Works like [`Self::match_prefix`], and does not count as a use of the prefix.
    ///
    /// # Errors
    /// See [`Self::match_prefix`].
    pub fn hold_prefix(
        &mut self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<GroupHold> {
        self.hold_at(None, namespace, tokens, limit, false)
    }

    fn hold_at(
        &mut self,
        session: Option<SessionId>,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        is_use: bool,
    ) -> Result<GroupHold> {
        let Self { tree, groups, page_size, step, blocks, .. } = self;
        let rules = Rules { groups, page_size: *page_size, step: *step };
        let hold = tree.match_at(session, namespace, tokens, limit, is_use, |tree, place| {
            tree.place_before(place, rules.usable(tree, blocks, place))
        })?;
        let hold = GroupHold { hold, own_end: None, is_for_copy: false };
        self.holds += 1;
        self.count_needs(&hold, true);
        Ok(hold)
    }

    /// Creates another hold of the same prefix, for a copy of the units that a request needs there. It is no use of the
    /// prefix, and no reason to keep the end there when the request goes on.
    pub fn hold_for_copy(&mut self, hold: &GroupHold) -> GroupHold {
        let hold = GroupHold { hold: self.tree.hold_for_copy(&hold.hold), own_end: None, is_for_copy: true };
        self.holds += 1;
        self.count_needs(&hold, true);
        if let Some(last) = self.tree.last_page(&hold.hold) {
            *self.copies.entry(last).or_default() += 1;
        }
        hold
    }

    /// Returns the tokens that [`Self::match_prefix`] would find. Changes nothing.
    ///
    /// # Errors
    /// An error if a token cannot be read.
    pub fn cached_len(&self, namespace: &Namespace, tokens: &dyn Tokens, limit: usize) -> Result<usize> {
        let place = self.tree.place_of(namespace, tokens, limit.min(tokens.count()))?;
        Ok(place.map_or(0, |place| self.rules().usable(&self.tree, &self.blocks, place)))
    }

    fn rules(&self) -> Rules<'_> {
        Rules { groups: &self.groups, page_size: self.page_size, step: self.step }
    }

    /// Ends a use of a prefix. Returns what was detached and had no other use.
    pub fn release(&mut self, hold: GroupHold) -> UnitsToFree {
        self.holds -= 1;
        self.count_needs(&hold, false);
        if hold.is_for_copy
            && let Some(last) = self.tree.last_page(&hold.hold)
            && let Entry::Occupied(mut copies) = self.copies.entry(last)
        {
            *copies.get_mut() -= 1;
            if *copies.get() == 0 {
                copies.remove();
            }
        }
        let evicted = self.tree.release(hold.hold);
        self.recycle(evicted)
    }

    /// Adds or removes a lease among what needs the units at the end of `hold`.
    fn count_needs(&mut self, hold: &GroupHold, is_needed: bool) {
        if let Some(last) = self.tree.last_page(&hold.hold) {
            self.blocks.count_needs(&self.groups, self.page_size, last, hold.len(), is_needed);
        }
    }

    /// Returns the units of a group that a request with this prefix needs, or the snapshot at its end.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot list them.
    pub fn units(&self, hold: &GroupHold, group: usize) -> Result<LeasedUnits> {
        let declared = &self.groups[group];
        let Some(PrefixUnits { sinks, units }) = declared.prefix_units(hold.len(), self.page_size) else {
            let end = self.end_of(&hold.hold).filter(|end| !end.states.is_empty());
            let numbers = end.map(|end| &end.states[self.state_position(group)]);
            let units = numbers.into_iter().flatten().copied().map(Some).collect();
            return Ok(LeasedUnits { units, ..LeasedUnits::default() });
        };
        let pages = self.blocks.pages_of_unit(group);
        // The unit ends in the last block of its pages.
        let blocks = self.tree.pages(&hold.hold, units.start * pages * self.page_size)?;
        let blocks = blocks.iter().skip(pages - 1).step_by(pages);
        let front = self.tree.first_pages(&hold.hold, sinks * pages);
        let front = front.iter().skip(pages - 1).step_by(pages);
        Ok(LeasedUnits {
            sinks: front.filter_map(|&block| self.blocks.unit(group, block)).collect(),
            first: units.start,
            units: blocks.map(|&block| self.blocks.unit(group, block)).collect(),
        })
    }

    /// Returns the place of a group of states among them.
    fn state_position(&self, group: usize) -> usize {
        self.groups[..group].iter().filter(|group| is_state(group)).count()
    }

    /// Returns the end at the end of a hold.
    fn end_of(&self, hold: &Hold) -> Option<&End> {
        let end = self.tree.snapshot(hold)?;
        self.ends[widen(end.number())].as_ref()
    }

    /// Takes the events since the last call, in order.
    ///
    /// Each unit that the tree takes or gives up is reported with its group, by the key of the page that it ends with; a
    /// snapshot by that of the page at whose end it is. If no full group has a unit for every page, pages are reported as
    /// well, without a group.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.events.as_mut().map_or(Vec::new(), UnitEvents::take)
    }

    /// Takes over the journal of `earlier`, all of whose units were freed.
    pub fn keep_journal_of(&mut self, earlier: &mut Self) {
        if let (Some(events), Some(earlier)) = (&mut self.events, &mut earlier.events) {
            events.continue_from(earlier);
        }
    }

    /// Removes the prefixes of a namespace, or all of them. Prefixes in use can no longer be found, and are
    /// removed with their last lease.
    pub fn clear(&mut self, namespace: Option<&Namespace>, cause: Cause) -> UnitsToFree {
        match (namespace, &mut self.events) {
            (_, None) => (),
            (None, Some(events)) => events.record_cleared(),
            (Some(namespace), Some(_)) => self.record_all_removed(namespace),
        }
        let evicted = self.tree.clear(namespace, cause);
        self.recycle(evicted)
    }

    /// Removes everything. There are no holds, and the tree must not be used after this call.
    pub fn take_all(&mut self) -> UnitsToFree {
        let evicted = self.tree.take_all();
        self.recycle(evicted)
    }
}

/// Where requests can go on.
#[derive(Clone, Copy)]
struct Rules<'a> {
    groups: &'a [Group],
    page_size: usize,
    step: usize,
}

impl Rules<'_> {
    /// Returns the tokens, up to those of `place`, at which every group can go on.
    fn usable(self, tree: &Tree, blocks: &Blocks, place: TreePosition) -> usize {
        if self.groups.iter().any(is_state) {
            return tree.last_snapshot_place(place).len();
        }
        let last = tree.page_before(place);
        last.map_or(0, |last| self.usable_of_units(blocks, last, place.len(), |_| true))
    }

    /// Returns the tokens, up to `len`, at which the units that the groups of `counts` need are there. `last` is the
    /// block at the end.
    fn usable_of_units(
        self,
        blocks: &Blocks,
        last: Page,
        len: usize,
        counts: impl Fn(usize) -> bool,
    ) -> usize {
        let mut path = blocks.path(last, len / self.page_size);
        let mut pages = len / self.page_size;
        let has_reach = |group: &Group| !matches!(group.kind(), GroupKind::Full | GroupKind::State);
        let windows =
            || (0..self.groups.len()).filter(|&group| has_reach(&self.groups[group]) && counts(group));
        loop {
            pages -= pages % self.step;
            let mut before = pages;
            for group in windows() {
                let tokens = before * self.page_size;
                let Some(needed) = self.groups[group].prefix_units(tokens, self.page_size) else { continue };
                let each = blocks.pages_of_unit(group);
                for unit in needed.units {
                    if blocks.unit(group, path.block((unit + 1) * each - 1)).is_none() {
                        // The longest prefix that ends before the unit does. Those in between need it, too.
                        before = (unit + 1) * each - 1;
                        break;
                    }
                }
            }
            if before == pages {
                return pages * self.page_size;
            }
            pages = before;
        }
    }
}

fn is_state(group: &Group) -> bool {
    group.kind() == GroupKind::State
}

fn least_common_multiple(one: usize, other: usize) -> usize {
    let (mut a, mut b) = (one, other);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    one / a * other
}
