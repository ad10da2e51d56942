//! The hybrid tree: requests of an engine that acts between its steps, against dictionaries of prefixes.
//!
//! The model knows pages, not nodes: each prefix has the slots of its last page, and perhaps windows of
//! theirs and a state. Where nodes end it asks the tree, for prefixes are found and windows are locked by
//! whole nodes. Nor does it know which of several leaves goes first.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kvpool::base::{EngineSlot, ErrorKind, Id};
use kvpool::cache::{Namespace, NodeHandle};
use kvpool::engines::hybrid::{
    Action, EvictionOrder, Frees, HybridConfig, HybridTree, Insert, InsertResult, Match, PageDigest, Part,
    Receipt, Sizes, SkippedParts, StateConfig, StateRelease, Step, Victim, WindowConfig, WindowRelease,
};

use super::{Source, agree, ensure, refused};

const ORDERS: [EvictionOrder; 9] = [
    EvictionOrder::Lru,
    EvictionOrder::Mru,
    EvictionOrder::Fifo,
    EvictionOrder::Filo,
    EvictionOrder::Lfu,
    EvictionOrder::Priority,
    EvictionOrder::Slru(2),
    EvictionOrder::Tlru(3),
    EvictionOrder::Adaptive(64),
];

/// A prefix in a namespace: whole pages.
type Key = (i64, Vec<i64>);

/// A lock or a pin.
#[derive(Clone)]
struct Hold {
    node: NodeHandle,
    key: Key,
    receipt: Receipt,
    /// Positions of which it locked the windows, if it did.
    window: Range<usize>,
    /// The part of it that was released before the rest.
    released: WindowRelease,
    is_pin: bool,
}

struct Hybrid {
    tree: HybridTree,
    config: HybridConfig,
    /// The slots of the last page, by prefix.
    slots: BTreeMap<Key, Vec<EngineSlot>>,
    /// The windows by slot: those of the tree, and those about to be inserted.
    windows: BTreeMap<EngineSlot, EngineSlot>,
    states: BTreeMap<Key, Vec<EngineSlot>>,
    /// The digest of the last page, by prefix.
    digests: BTreeMap<Key, PageDigest>,
    held: Vec<Hold>,
    gone: Option<NodeHandle>,
    /// Evictions that are going on, by part.
    evicting: [bool; 3],
    /// Whether a leaf was named that the engine did not evict: until the end it is not queued.
    has_refused: bool,
    next: u32,
}

/// An insertion in progress.
struct OngoingInsertion {
    key: Key,
    row: Vec<EngineSlot>,
    /// The engine's still.
    own: BTreeSet<EngineSlot>,
    /// Freed by the tree, which will name the replacement in this step.
    old: Vec<EngineSlot>,
    state: Vec<EngineSlot>,
    /// Whether the node that it had reached was evicted between two steps.
    is_evicted: bool,
}

pub(super) fn run(source: &mut Source<'_>) {
    let window = WindowConfig { size: 1 + source.below(6), gates: source.flip() };
    let max_per_path = source.flip().then(|| source.below(4));
    let state = StateConfig { grid: 1 + source.below(4), max_per_path };
    let config = HybridConfig {
        page_size: 1 + source.below(4),
        order: source.of(&ORDERS),
        window: source.flip().then_some(window),
        state: source.flip().then_some(state),
    };
    let mut hybrid = Hybrid {
        tree: HybridTree::new(config),
        config,
        slots: BTreeMap::new(),
        windows: BTreeMap::new(),
        states: BTreeMap::new(),
        digests: BTreeMap::new(),
        held: Vec::new(),
        gone: None,
        evicting: [false; 3],
        has_refused: false,
        next: 0,
    };
    while source.next_step() {
        hybrid.step(source);
        hybrid.check();
    }
    for hold in std::mem::take(&mut hybrid.held) {
        hybrid.release(&hold);
    }
    hybrid.check();
    let frees = hybrid.tree.evict_full(usize::MAX);
    hybrid.apply(frees);
    hybrid.check();
    assert!(hybrid.slots.is_empty(), "without locks everything can be evicted");
}

fn tokens(source: &mut Source<'_>, most: usize) -> Vec<i64> {
    // Few different ones, so that prefixes meet, some of them wide.
    (0..source.below(most + 1)).map(|_| source.of(&[0, 0, 0, 0, 0, 1, 1, 1 << 40])).collect()
}

fn namespace(name: i64) -> Namespace {
    if name == 0 { Namespace::Unnamed } else { Namespace::Number(name) }
}

impl Hybrid {
    fn step(&mut self, source: &mut Source<'_>) {
        match source.below(24) {
            0..=7 => self.insert(source),
            8..=10 => {
                let (name, tokens) = (source.within(0, 2), tokens(source, 18));
                self.find(name, &tokens);
            }
            11..=13 if self.held.len() < 5 => self.lock(source),
            14 | 15 => self.unlock(source),
            16 => self.unlock_window(source),
            17 | 18 => self.evict(source),
            19 => {
                let (node, key) = self.node(source);
                self.evict_excess(node, &key);
            }
            20 => self.set_values(source),
            21 | 22 => self.attach_window(source),
            _ if source.rarely(8) && self.evicting == [false; 3] => {
                self.gone = Some(self.tree.root());
                self.tree.reset();
                self.held.clear();
                self.slots.clear();
                self.windows.clear();
                self.states.clear();
                self.digests.clear();
            }
            _ => self.misuse(),
        }
    }

    fn new_slots(&mut self, count: usize) -> Vec<EngineSlot> {
        let first = self.next;
        self.next += u32::try_from(count).expect("few");
        (first..self.next).map(EngineSlot::new).collect()
    }

    /// The prefix up to the end of the page of a token.
    fn page(&self, name: i64, tokens: &[i64], at: usize) -> Key {
        (name, tokens[..(at / self.config.page_size + 1) * self.config.page_size].to_vec())
    }

    /// The number of tokens that are there.
    fn cached(&self, name: i64, tokens: &[i64]) -> usize {
        let ends = (self.config.page_size..=tokens.len()).step_by(self.config.page_size);
        ends.take_while(|&end| self.slots.contains_key(&(name, tokens[..end].to_vec()))).last().unwrap_or(0)
    }

    /// The slots of a prefix that is there.
    fn slots_of(&self, name: i64, prefix: &[i64]) -> Vec<EngineSlot> {
        let pages = (0..prefix.len()).step_by(self.config.page_size);
        pages.flat_map(|at| self.slots[&self.page(name, prefix, at)].clone()).collect()
    }

    fn has_window(&self, name: i64, tokens: &[i64], at: usize) -> bool {
        let slots = self.slots.get(&self.page(name, tokens, at));
        slots.is_some_and(|slots| self.windows.contains_key(&slots[at % self.config.page_size]))
    }

    /// The number of locks that a prefix has of a part.
    fn locks(&self, part: Part, (name, prefix): &Key) -> usize {
        let has = |hold: &&Hold| {
            let is_before = hold.key.0 == *name && hold.key.1.starts_with(prefix);
            let is_taken = !hold.is_pin && !hold.receipt.skipped.has(part);
            is_before
                && match part {
                    Part::Full => true,
                    Part::Window => {
                        is_taken
                            && hold.released == WindowRelease::NotYet
                            && hold.window.contains(&(prefix.len() - 1))
                    }
                    Part::State => {
                        is_taken
                            && hold.released != WindowRelease::WithState
                            && hold.key.1.len() == prefix.len()
                    }
                }
        };
        self.held.iter().filter(has).count()
    }

    /// A prefix up to the end of a node; rarely that of no tokens.
    fn node(&self, source: &mut Source<'_>) -> (NodeHandle, Key) {
        let at = source.below(self.slots.len() + 1);
        let Some((name, page)) = self.slots.keys().nth(at) else {
            return (self.tree.root(), (0, Vec::new()));
        };
        let page_size = self.config.page_size;
        let peek = self.tree.peek(&namespace(*name), &page.as_slice());
        assert_eq!(peek.len, page.len());
        let path = self.tree.path_to(peek.node).expect("a node");
        let of = |node| self.tree.state(node).expect("a node").tokens;
        let tokens: Vec<i64> = path.iter().flat_map(|at| of(at.node)).collect();
        assert!(tokens.starts_with(page) && tokens.len() == peek.end);
        for end in (page_size..=tokens.len()).step_by(page_size) {
            let digest = self.digests.get(&(*name, tokens[..end].to_vec())).copied();
            assert_eq!(self.tree.hash_at(peek.node, end), Some(digest));
        }
        (peek.node, (*name, tokens))
    }

    /// Whether a request can resume at the end of a prefix.
    fn accepts(&self, name: i64, prefix: &[i64]) -> bool {
        let covered = (0..prefix.len()).rev().take_while(|&at| self.has_window(name, prefix, at)).count();
        let has_window = self.config.window.is_none_or(|window| match covered {
            0 => !window.gates,
            _ => covered >= window.size.min(prefix.len()),
        });
        has_window && (self.config.state.is_none() || self.states.contains_key(&(name, prefix.to_vec())))
    }

    fn find(&mut self, name: i64, tokens: &[i64]) -> Match {
        let full_len = self.cached(name, tokens);
        let found = self.tree.find(&namespace(name), &tokens);
        assert_eq!(found.full_len, full_len);
        let path = found.visited.map_or(Vec::new(), |node| self.tree.path_to(node).expect("a node"));
        let ends: Vec<usize> = path.iter().map(|node| node.end).collect();
        assert_eq!(ends.last().copied().unwrap_or(0), full_len);
        let len = ends.into_iter().rev().find(|&end| self.accepts(name, &tokens[..end])).unwrap_or(0);
        assert_eq!(found.len, len);
        let slots = self.tree.slots_between(found.node, self.tree.root());
        assert_eq!(slots, Some(self.slots_of(name, &tokens[..len])));
        let behind = |end: usize| (end > len).then_some(end);
        assert_eq!(found.window_branch, self.config.window.and_then(|_| behind(full_len)));
        let on_grid = |state: StateConfig| behind(full_len / state.grid * state.grid);
        assert_eq!(found.state_branch, self.config.state.and_then(on_grid));
        found
    }

    /// Inserts a prompt with slots of its own, or the rest of a prompt after a prefix that was locked or just
    /// found.
    fn insert(&mut self, source: &mut Source<'_>) {
        let (mut name, mut tokens, mut found) = (source.within(0, 2), tokens(source, 18), 0);
        if !self.held.is_empty() && source.flip() {
            let rest = std::mem::take(&mut tokens);
            (name, tokens) = self.held[source.below(self.held.len())].key.clone();
            found = tokens.len();
            tokens.extend(rest.iter().take(8));
        } else if source.flip() {
            found = self.find(name, &tokens).len;
        }
        let page_size = self.config.page_size;
        let whole = tokens.len() / page_size * page_size;
        let mut window_freed = 0;
        if self.config.window.is_some() && source.flip() {
            window_freed =
                source.below(tokens.len() / page_size + 1) * page_size + usize::from(source.rarely(8));
        }
        let mut row = self.slots_of(name, &tokens[..found]);
        row.extend(self.new_slots(tokens.len() - found));
        if self.config.window.is_some() {
            for &slot in &row[found.max(window_freed.min(row.len()))..] {
                self.windows.insert(slot, EngineSlot::new(self.next));
                self.next += 1;
            }
        }
        let count = if self.config.state.is_some() { 1 + source.below(2) } else { 0 };
        let state = self.new_slots(count);
        // What becomes of the tokens.
        let cached = self.cached(name, &tokens);
        let has_window = self.config.window.is_some();
        let is_lost = |at: &usize| *at >= found.max(window_freed) && !self.has_window(name, &tokens, *at);
        let mut windows: Vec<usize> = (0..cached).filter(|at| has_window && is_lost(at)).collect();
        let is_free = |at: &&usize| self.locks(Part::Full, &self.page(name, &tokens, **at)) == 0;
        let mut slots: Vec<usize> = windows.iter().filter(is_free).copied().collect();
        windows.extend((cached.max(window_freed)..whole).filter(|_| has_window));
        slots.extend(cached..whole);
        let had_state = whole == 0
            || (self.config.state.is_some() && self.states.contains_key(&(name, tokens[..whole].to_vec())));
        let insert = Insert {
            found,
            prompt: 0,
            inserted: source.below(tokens.len() + 1),
            window_freed,
            priority: source.within(-1, 1),
            state: state.clone(),
            branch: source.flip().then(|| source.below(20)),
            session: None,
        };
        let reaches_branch = has_window && whole > 0 && insert.branch.is_some_and(|at| tokens.len() >= at);
        let own = row[found..].iter().copied().collect();
        let mut going = OngoingInsertion {
            key: (name, tokens.clone()),
            row,
            own,
            old: Vec::new(),
            state,
            is_evicted: false,
        };
        let result = self.carry_out(source, &mut going, &insert);
        assert!(!self.tree.is_inserting());
        if let Some(result) = &result {
            assert_eq!((result.found, result.had_state), (cached, had_state));
            assert_eq!(result.reached_branch, reaches_branch);
            assert!(result.adopted.full.iter().cloned().flatten().eq(slots), "{:?}", result.adopted);
            assert!(result.adopted.window.iter().cloned().flatten().eq(windows), "{:?}", result.adopted);
            let all = self.tree.slots_between(result.node, self.tree.root());
            assert_eq!(all, Some(self.slots_of(name, &tokens[..whole])));
            assert!(going.own.iter().eq(&going.row[whole..]), "the rest is the tree's or free");
            self.record_state(&mut going, whole);
        } else {
            assert!(going.is_evicted || !window_freed.is_multiple_of(page_size));
        }
        for slot in going.own {
            self.windows.remove(&slot);
        }
    }

    /// Inserts step by step, and takes the actions of each step. Returns `None` if the tree has refused to
    /// continue.
    fn carry_out(
        &mut self,
        source: &mut Source<'_>,
        going: &mut OngoingInsertion,
        insert: &Insert,
    ) -> Option<InsertResult> {
        let names = source.flip();
        let (name, (tokens, row)) = (namespace(going.key.0), (going.key.1.clone(), going.row.clone()));
        let mut step = self.tree.begin(&name, &tokens.as_slice(), &row.as_slice(), insert.clone());
        loop {
            let Ok(Step { actions, result, added }) = step else {
                let again = self.tree.advance(&name, &tokens.as_slice(), &row.as_slice());
                // It has failed, or a node that it goes on from is gone.
                let kind = again.expect_err("the insertion cannot go on").kind();
                assert!(matches!(kind, ErrorKind::State | ErrorKind::Stale), "{kind:?}");
                for act in self.tree.end_insertion() {
                    self.act(act, going);
                }
                return None;
            };
            assert!(!going.is_evicted, "an insertion does not go on behind a node that is gone");
            if let Some(added) = added {
                assert!(self.adopt(going, added.tokens.start, &row[added.tokens.clone()]).is_empty());
                if names {
                    self.name_pages(added.node, &going.key, added.tokens);
                }
            }
            let is_free =
                |act: &Action| matches!(act, Action::Free(_) | Action::FreeFull(_) | Action::FreeOld(_));
            assert_eq!(result.is_some(), actions.iter().all(is_free), "it goes on when that is done");
            let reached = actions.iter().rev().find_map(|act| match act {
                Action::Rebuild { node, .. } | Action::Recover { node, .. } | Action::EvictExcess(node) => {
                    Some(*node)
                }
                Action::Free(_) | Action::FreeFull(_) | Action::FreeOld(_) => None,
            });
            for act in actions {
                self.act(act, going);
            }
            if result.is_some() {
                return result;
            }
            if source.rarely(8) {
                self.evict_reached(reached.expect("an action of the step names its node"), going);
            }
            let again = self.tree.begin(&name, &tokens.as_slice(), &row.as_slice(), insert.clone());
            refused(again, ErrorKind::State);
            step = self.tree.advance(&name, &tokens.as_slice(), &row.as_slice());
        }
    }

    /// Evicts the node that an insertion has reached, if it is a leaf without locks.
    fn evict_reached(&mut self, node: NodeHandle, going: &mut OngoingInsertion) {
        if self.tree.value(node, Part::State).is_some_and(|state| state == going.state) {
            self.record_state(going, going.key.1.len() / self.config.page_size * self.config.page_size);
        }
        if let Some(frees) = self.tree.evict_leaf(node).expect("a node") {
            self.apply(frees);
            going.is_evicted = true;
        }
    }

    /// Gives the tokens from `start` on slots of the engine, where these are not theirs already. Returns
    /// those that they had.
    fn adopt(&mut self, going: &mut OngoingInsertion, start: usize, slots: &[EngineSlot]) -> Vec<EngineSlot> {
        let mut old = Vec::new();
        for (page, slots) in slots.chunks(self.config.page_size).enumerate() {
            let key = self.page(going.key.0, &going.key.1, start + page * self.config.page_size);
            let before = self.slots.insert(key, slots.to_vec());
            if before.as_deref() != Some(slots) {
                assert!(slots.iter().all(|slot| going.own.remove(slot)), "the engine had {slots:?}");
                old.extend(before.into_iter().flatten());
            }
        }
        old
    }

    fn name_pages(&mut self, node: NodeHandle, (name, tokens): &Key, added: Range<usize>) {
        let page_size = self.config.page_size;
        let mut digests = Vec::new();
        for end in (added.start + page_size..=added.end).step_by(page_size) {
            let mut digest = PageDigest([7; 32]);
            digest.0[..4].copy_from_slice(&self.next.to_le_bytes());
            self.next += 1;
            self.digests.insert((*name, tokens[..end].to_vec()), digest);
            digests.push(digest);
        }
        let mut set =
            |digests: &[PageDigest]| self.tree.set_hashes(node, added.start, digests).expect("a node");
        refused(set(&digests[1..]), ErrorKind::Argument);
        set(&digests).expect("one for each page");
    }

    /// Records that a prefix has a state now, if it had none.
    fn record_state(&mut self, going: &mut OngoingInsertion, end: usize) {
        if end > 0 && !going.state.is_empty() {
            let key = (going.key.0, going.key.1[..end].to_vec());
            self.states.entry(key).or_insert(std::mem::take(&mut going.state));
        }
    }

    fn act(&mut self, act: Action, going: &mut OngoingInsertion) {
        let (name, tokens) = going.key.clone();
        let row = going.row.clone();
        match act {
            Action::Free(range) => {
                for slot in &row[range] {
                    assert!(going.own.remove(slot), "{slot:?} is the engine's");
                    assert_eq!(self.windows.remove(slot).is_some(), self.config.window.is_some());
                }
            }
            Action::FreeFull(range) => {
                for slot in &row[range] {
                    assert!(going.own.remove(slot) && !self.windows.contains_key(slot));
                }
            }
            Action::FreeOld(old) => {
                assert!(old.iter().all(|slot| !self.windows.contains_key(slot)));
                going.old = old;
            }
            Action::Rebuild { node, slots } => {
                assert_eq!(self.tree.value(node, Part::Full), Some(slots.as_slice()));
                let start = self.tree.path_to(node).expect("a node").last().expect("not the root").start;
                assert_eq!(self.adopt(going, start, &slots), std::mem::take(&mut going.old));
                let windows = slots.iter().map(|slot| self.windows[slot]).collect();
                self.tree.set_value(node, Part::Window, windows).expect("a node").expect("it has none");
            }
            Action::Recover { node, kept, incoming } => {
                assert_eq!(kept, self.slots_of(name, &tokens[..incoming.end])[incoming.start..]);
                let mut moved = Vec::new();
                for (slot, from) in kept.into_iter().zip(&row[incoming]) {
                    assert!(going.own.remove(from));
                    moved.push(self.windows.remove(from).expect("a window"));
                    assert_eq!(self.windows.insert(slot, moved[moved.len() - 1]), None);
                }
                self.tree.set_value(node, Part::Window, moved).expect("a node").expect("it has none");
            }
            Action::EvictExcess(node) => {
                let end = tokens.len() / self.config.page_size * self.config.page_size;
                self.record_state(going, end);
                self.evict_excess(node, &(name, tokens[..end].to_vec()));
            }
        }
    }

    fn key_of(&self, slot: EngineSlot) -> Key {
        self.slots.iter().find(|(_, slots)| slots.contains(&slot)).expect("a slot of the tree").0.clone()
    }

    /// Frees what the tree has removed: nothing may be locked, and everything must be removed once.
    fn apply(&mut self, frees: Frees) {
        assert_eq!(frees.counts, [frees.full.len(), frees.window.len(), frees.state.len()]);
        assert!(!frees.nodes.iter().any(|&node| self.tree.contains(node)), "nodes that are gone");
        for slot in frees.window {
            assert_eq!(self.locks(Part::Window, &self.key_of(slot)), 0);
            assert!(self.windows.remove(&slot).is_some(), "{slot:?} has a window");
        }
        for slot in frees.state {
            let key = self.states.iter().find(|(_, state)| state.contains(&slot)).expect("a state").0.clone();
            assert_eq!(self.locks(Part::State, &key), 0);
            let state = self.states.get_mut(&key).expect("a state");
            state.retain(|&of| of != slot);
            if state.is_empty() {
                self.states.remove(&key);
            }
        }
        let mut unnamed: Vec<(Namespace, [u8; 32])> = Vec::new();
        for page in frees.full.chunks(self.config.page_size) {
            let key = self.key_of(page[0]);
            assert_eq!((self.locks(Part::Full, &key), self.slots.remove(&key).as_deref()), (0, Some(page)));
            assert!(
                !page.iter().any(|slot| self.windows.contains_key(slot)) && !self.states.contains_key(&key)
            );
            unnamed.extend(self.digests.remove(&key).map(|digest| (namespace(key.0), digest.0)));
        }
        let removed = frees.removed.into_iter();
        let removed =
            removed.flat_map(|node| node.hashes.into_iter().map(move |hash| (node.name.clone(), hash.0)));
        assert!(removed.eq(unnamed), "the pages that are gone are named");
    }

    fn evict(&mut self, source: &mut Source<'_>) {
        let (part, wanted) = (source.of(&Part::ALL), source.below(12));
        let evictable = self.tree.sizes(part).evictable;
        if part == Part::Full && source.flip() {
            let frees = self.tree.evict_full(wanted);
            assert!(self.has_refused || frees.count(part) >= wanted.min(evictable));
            return self.apply(frees);
        }
        let index = part as usize;
        let has_begun = std::mem::replace(&mut self.evicting[index], true);
        assert_eq!(self.tree.begin_eviction(part, wanted), !has_begun);
        if has_begun {
            return;
        }
        let (mut evicted, mut is_alone, mut refused) = (0, true, None);
        loop {
            let frees = match self.tree.next_victim(part, evicted).expect("it has begun") {
                Victim::Nothing => break,
                Victim::Leaf(leaf) if source.rarely(8) => {
                    assert_ne!(refused.replace(leaf), Some(leaf), "it is named once");
                    self.has_refused |= part == Part::Full;
                    continue;
                }
                Victim::Leaf(leaf) => {
                    assert_ne!(refused, Some(leaf), "it is named once");
                    self.gone = Some(leaf);
                    self.tree.evict_leaf(leaf).expect("a node").expect("a leaf")
                }
                Victim::Value(frees) => frees,
            };
            assert!(evicted < wanted && frees.count(part) > 0);
            evicted += frees.count(part);
            self.apply(frees);
            if source.rarely(8) {
                (is_alone, refused) = (false, None);
                self.step(source);
                self.check();
            }
        }
        let is_whole = is_alone && refused.is_none();
        assert!(
            !is_whole || evicted >= wanted.min(evictable),
            "{evicted} of {wanted}, {evictable} evictable"
        );
        self.evicting[index] = false;
        self.has_refused &= part != Part::Full;
        assert!(self.tree.end_eviction(part) && !self.tree.end_eviction(part));
        assert_eq!(self.tree.next_victim(part, 0), None);
    }

    /// Evicts states before the end of a node, those nearest to the root first.
    fn evict_excess(&mut self, node: NodeHandle, (name, tokens): &Key) {
        let most = self.config.state.and_then(|state| state.max_per_path).unwrap_or(usize::MAX);
        let prefixes = (1..=tokens.len()).map(|end| (*name, tokens[..end].to_vec()));
        let with_state: Vec<Key> = prefixes.filter(|key| self.states.contains_key(key)).collect();
        let is_spare = |key: &&Key| {
            let page = key.1.len() + self.config.page_size;
            let is_behind = |of: &&Key| of.0 == key.0 && of.1.len() == page && of.1.starts_with(&key.1);
            let behind = self.slots.keys().filter(is_behind).count();
            key.1.len() < tokens.len() && behind == 1 && self.locks(Part::State, key) == 0
        };
        let excess = with_state.len().saturating_sub(most);
        let spare = with_state.iter().filter(is_spare).take(excess);
        let expected: Vec<EngineSlot> = spare.flat_map(|key| self.states[key].clone()).collect();
        let frees = self.tree.evict_excess_states(node).expect("a node");
        assert_eq!((&frees.state, frees.full.len() + frees.window.len()), (&expected, 0));
        self.apply(frees);
    }

    fn lock(&mut self, source: &mut Source<'_>) {
        let (node, key) = self.node(source);
        let parts = source.of(&[&[][..], &[], &[Part::Window], &[Part::State], &[Part::Window, Part::State]]);
        let (skipped, is_pin) = (SkippedParts::of(parts.iter().copied()), source.rarely(4));
        let end = key.1.len();
        let mut hold = Hold {
            node,
            key,
            receipt: Receipt::default(),
            window: 0..0,
            released: WindowRelease::NotYet,
            is_pin,
        };
        if is_pin {
            self.tree.pin(node).expect("a node");
        } else {
            let before = self.tree.sizes(Part::Full);
            let locked = self.tree.lock(node, skipped).expect("a node");
            hold.receipt = locked.receipt;
            assert_eq!(locked.newly_locked, before.evictable - self.tree.sizes(Part::Full).evictable);
            assert_eq!(locked.receipt.skipped, skipped);
            if let Some(window) = self.config.window.filter(|_| !skipped.has(Part::Window)) {
                // Whole nodes, back to the first that has it all.
                let starts =
                    self.tree.path_to(node).expect("a node").into_iter().rev().map(|node| node.start);
                let start = starts.into_iter().find(|start| end - start >= window.size);
                assert_eq!(locked.receipt.boundary.is_some(), start.is_some());
                hold.window = start.unwrap_or(0)..end;
            }
        }
        self.held.push(hold);
    }

    /// The first part that is not locked where `unlock` wants a lock of it.
    fn missing(&self, hold: &Hold, released: WindowRelease) -> Option<Part> {
        let (name, tokens) = &hold.key;
        let released = if self.config.window.is_some() { released } else { WindowRelease::NotYet };
        let is_released = |part| match released {
            WindowRelease::NotYet => false,
            WindowRelease::WindowOnly => part == Part::Window,
            WindowRelease::WithState => true,
        };
        let wants = |part| self.config.has(part) && !is_released(part) && !hold.receipt.skipped.has(part);
        let lacks = |part, at: usize| self.locks(part, &self.page(*name, tokens, at)) == 0;
        let lacks_state =
            wants(Part::State) && tokens.last().is_some_and(|_| lacks(Part::State, tokens.len() - 1));
        if lacks_state {
            Some(Part::State)
        } else if wants(Part::Window) && hold.window.clone().any(|at| lacks(Part::Window, at)) {
            Some(Part::Window)
        } else {
            (0..tokens.len()).any(|at| lacks(Part::Full, at)).then_some(Part::Full)
        }
    }

    /// Undoes a lock as it must be done.
    fn release(&mut self, hold: &Hold) {
        if hold.is_pin {
            self.tree.unpin(hold.node).expect("a node").expect("a pin");
        } else {
            self.tree.unlock(hold.node, hold.receipt, hold.released).expect("a node").expect("a lock");
        }
    }

    /// Undoes a lock, or tries to undo one that is not there.
    fn unlock(&mut self, source: &mut Source<'_>) {
        let (node, key) = self.node(source);
        let of_all = Hold {
            window: 0..key.1.len(),
            node,
            key,
            receipt: Receipt::default(),
            released: WindowRelease::NotYet,
            is_pin: false,
        };
        let released =
            source.of(&[WindowRelease::NotYet, WindowRelease::WindowOnly, WindowRelease::WithState]);
        let wrong = if self.held.is_empty() || source.flip() {
            of_all
        } else {
            self.held[source.below(self.held.len())].clone()
        };
        if let Some(part) = self.missing(&wrong, released).filter(|_| !wrong.is_pin) {
            let answer = self.tree.unlock(wrong.node, wrong.receipt, released).expect("a node");
            assert_eq!(answer.expect_err("it is not locked").part, part);
        }
        if !wrong.key.1.is_empty() && self.locks(Part::Full, &wrong.key) == 0 {
            let answer = self.tree.unpin(wrong.node).expect("a node");
            assert_eq!(answer.expect_err("it is not locked").part, Part::Full);
        }
        if !self.held.is_empty() {
            let hold = self.held.swap_remove(source.below(self.held.len()));
            self.release(&hold);
        }
    }

    /// Releases the window of a lock, and perhaps its state.
    fn unlock_window(&mut self, source: &mut Source<'_>) {
        let of_nodes: Vec<usize> = (0..self.held.len()).filter(|&at| !self.held[at].is_pin).collect();
        if of_nodes.is_empty() {
            return;
        }
        let at = source.of(&of_nodes);
        let hold = self.held[at].clone();
        let state = source.of(&[StateRelease::Release, StateRelease::Keep]);
        let skipped = hold.receipt.skipped;
        if self.config.window.is_none() || hold.key.1.is_empty() {
            let frees = self.tree.unlock_window(hold.node, hold.receipt, state).expect("a node");
            assert!(frees.expect("no window").is_empty());
            return;
        }
        let lacks = |at| self.locks(Part::Window, &self.page(hold.key.0, &hold.key.1, at)) == 0;
        if hold.window.clone().any(lacks) {
            let answer = self.tree.unlock_window(hold.node, hold.receipt, state).expect("a node");
            assert_eq!(answer.expect_err("it is not locked").part, Part::Window);
        } else if hold.released == WindowRelease::NotYet && !skipped.has(Part::Window) {
            let frees = self.tree.unlock_window(hold.node, hold.receipt, state).expect("a node");
            assert!(frees.expect("a lock").is_empty(), "full attention is locked still");
            self.held[at].released = match state {
                StateRelease::Keep => WindowRelease::WindowOnly,
                StateRelease::Release => WindowRelease::WithState,
            };
        }
    }

    /// Gives a node values that it lacks, and values that it must not get.
    fn set_values(&mut self, source: &mut Source<'_>) {
        let (node, (name, prefix)) = self.node(source);
        let own = self.tree.value(node, Part::Full).expect("a node").to_vec();
        let (windows, state) = (self.new_slots(own.len()), self.new_slots(1));
        let mut set = |part, value: &[EngineSlot], is_right| {
            let answer = self.tree.set_value(node, part, value.to_vec()).expect("a node");
            agree(answer, &ensure(is_right, ErrorKind::Argument));
        };
        set(Part::Full, &own, false);
        set(Part::Window, &[&windows[..], &state].concat(), false);
        let takes_window = self.config.window.is_some()
            && !own.is_empty()
            && !self.windows.contains_key(&own[own.len() - 1]);
        set(Part::Window, &windows, takes_window);
        let key = (name, prefix);
        let takes_state = self.config.state.is_some() && !own.is_empty() && !self.states.contains_key(&key);
        set(Part::State, &[], false);
        set(Part::State, &state, takes_state);
        if takes_window {
            self.windows.extend(own.into_iter().zip(windows));
        }
        if takes_state {
            self.states.insert(key, state);
        }
    }

    /// Gives tokens without a window some.
    fn attach_window(&mut self, source: &mut Source<'_>) {
        let (_, (name, mut prefix)) = self.node(source);
        prefix.extend(tokens(source, 4));
        let page_size = self.config.page_size;
        let begin = source.below(8 / page_size + 1) * page_size;
        let limit = begin + source.below(20 / page_size + 1) * page_size + usize::from(source.rarely(8));
        let gaps = self.tree.window_gaps(&namespace(name), &prefix.as_slice(), begin, limit);
        let cached = self.cached(name, &prefix);
        let lacking = (begin..limit.min(cached)).filter(|&at| !self.has_window(name, &prefix, at));
        assert!(gaps.iter().cloned().flatten().eq(lacking), "{gaps:?}");
        let Some(gap) = gaps.first().cloned() else { return };
        let windows = self.new_slots(gap.len());
        let mut attach = |begin, windows: &[EngineSlot]| {
            self.tree.attach_window(&namespace(name), &prefix.as_slice(), begin, windows)
        };
        refused(attach(cached, &windows), ErrorKind::Argument);
        let is_whole = gap.start.is_multiple_of(page_size) && gap.len().is_multiple_of(page_size);
        let expected = ensure(self.config.window.is_some() && is_whole, ErrorKind::Argument);
        if agree(attach(gap.start, &windows), &expected).is_some() {
            let slots = self.slots_of(name, &prefix[..gap.end]);
            self.windows.extend(slots[gap.start..].iter().copied().zip(windows));
        }
    }

    /// Calls that must be refused, and change nothing.
    fn misuse(&mut self) {
        let (name, keys, slots) = (Namespace::Unnamed, [0_i64; 4], [EngineSlot::new(0); 4]);
        refused(self.tree.advance(&name, &keys.as_slice(), &slots.as_slice()), ErrorKind::State);
        assert!(self.tree.end_insertion().is_empty());
        if self.config.state.is_some() {
            let answer = self.tree.begin(&name, &keys.as_slice(), &slots.as_slice(), Insert::default());
            refused(answer, ErrorKind::Argument);
        }
        for part in Part::ALL.into_iter().filter(|&part| !self.evicting[part as usize]) {
            assert_eq!(self.tree.next_victim(part, 0), None);
        }
        assert_eq!(self.tree.evict_leaf(self.tree.root()), Some(None));
        let Some(gone) = self.gone else { return };
        let receipt = Receipt::default();
        assert!(!self.tree.contains(gone));
        assert_eq!(self.tree.lock(gone, SkippedParts::default()), None);
        assert_eq!(self.tree.unlock(gone, receipt, WindowRelease::NotYet), None);
        assert_eq!(self.tree.unlock_window(gone, receipt, StateRelease::Release), None);
        assert_eq!((self.tree.pin(gone), self.tree.unpin(gone)), (None, None));
        assert_eq!(self.tree.evict_leaf(gone), None);
        assert_eq!(self.tree.evict_excess_states(gone), None);
    }

    fn check(&self) {
        assert!(
            self.has_refused || self.tree.broken_invariant().is_none(),
            "{:?}",
            self.tree.broken_invariant()
        );
        for part in Part::ALL {
            let mut expected = Sizes::default();
            let mut values = Vec::new();
            for (key, slots) in &self.slots {
                let value = match part {
                    Part::Full => slots.clone(),
                    Part::Window => slots.iter().filter_map(|slot| self.windows.get(slot)).copied().collect(),
                    Part::State => self.states.get(key).cloned().unwrap_or_default(),
                };
                let is_locked = self.locks(part, key) > 0;
                *(if is_locked { &mut expected.locked } else { &mut expected.evictable }) += value.len();
                values.extend(value);
            }
            assert_eq!(self.tree.sizes(part), expected, "{part:?}");
            let mut has = self.tree.values(part);
            has.sort_unstable();
            values.sort_unstable();
            assert_eq!(has, values, "{part:?}");
        }
        assert!(self.windows.len() == self.tree.values(Part::Window).len(), "every window is the tree's");
        let rows = self.tree.slot_rows(|_, _| true).into_iter();
        let mut rows: Vec<_> = rows.map(|row| (row.slot, row.position, row.before)).collect();
        rows.sort_unstable();
        let mut expected = Vec::new();
        for ((name, prefix), slots) in &self.slots {
            let start = prefix.len() - slots.len();
            let mut before =
                self.slots.get(&(*name, prefix[..start].to_vec())).map(|page| page[slots.len() - 1]);
            for (at, &slot) in (start..).zip(slots) {
                expected.push((slot, at, before.replace(slot)));
            }
        }
        expected.sort_unstable();
        assert_eq!(rows, expected);
    }
}
