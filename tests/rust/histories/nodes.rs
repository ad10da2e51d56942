//! The tree of slots by its nodes: requests of an engine that frees its own duplicates, against a naive
//! dictionary of pages and a list of tails.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvpool::base::{ErrorKind, IndexVec};
use kvpool::cache::{Namespace, NodeHandle};
use kvpool::engines::{EvictedNodes, Inserted, SlotTree, SlotTreeConfig};
use kvpool::kernels::Indices;
use kvpool::pool::{AllocatorConfig, TokenToKvPoolAllocator};

use super::{Refusal, STREAM, Source, host, ints_of, refused};

const NAMESPACES: i64 = 2;

/// Tokens of a namespace.
type Key = (i64, Vec<i32>);

/// The tokens of an insertion after its last whole page.
struct Tail {
    /// The tokens before it.
    before: Key,
    tokens: Vec<i32>,
    slots: Vec<i32>,
    /// Inserted once, and below the root.
    is_young: bool,
}

/// A request of an engine.
struct Request {
    name: i64,
    tokens: Vec<i32>,
    row: Vec<i32>,
    /// Tokens of the row whose slots are the tree's.
    protected: usize,
    locked: Option<NodeHandle>,
    /// Slots of the row that are the request's own.
    own: BTreeSet<i32>,
}

struct Nodes {
    allocator: Arc<TokenToKvPoolAllocator>,
    tree: SlotTree,
    page_size: usize,
    /// The slots of the last page of each cached prefix.
    pages: BTreeMap<Key, Vec<i32>>,
    tails: Vec<Tail>,
    live: Vec<Request>,
    gone: BTreeSet<NodeHandle>,
}

pub(super) fn run(source: &mut Source<'_>) {
    let page_size = source.of(&[1, 2, 3, 4]);
    let config = AllocatorConfig {
        need_sort: source.flip(),
        strict: true,
        ..AllocatorConfig::new(8 + source.below(80))
    };
    let allocator = Arc::new(TokenToKvPoolAllocator::new(&config, &host()).expect("memory"));
    let config = SlotTreeConfig { page_size, name: "tree".into() };
    let mut nodes = Nodes {
        tree: SlotTree::new(config, Some(Arc::clone(&allocator))).expect("a valid config"),
        allocator,
        page_size,
        pages: BTreeMap::new(),
        tails: Vec::new(),
        live: Vec::new(),
        gone: BTreeSet::new(),
    };
    while source.next_step() {
        nodes.step(source);
        nodes.check();
    }
    while !nodes.live.is_empty() {
        nodes.finish(source);
        nodes.check();
    }
    let capacity = nodes.allocator.stats().capacity;
    nodes.evict(capacity);
    assert_eq!(nodes.allocator.available_size(), capacity, "nothing is owned without an owner");
    drop(nodes.tree);
}

fn tokens(source: &mut Source<'_>, most: usize) -> Vec<i32> {
    // Few different ones, so that prefixes meet.
    (0..source.below(most + 1)).map(|_| i32::from(source.rarely(4))).collect()
}

fn wide(slots: &[i32]) -> IndexVec {
    IndexVec::I64(slots.iter().copied().map(i64::from).collect())
}

impl Nodes {
    fn step(&mut self, source: &mut Source<'_>) {
        match source.below(24) {
            0..=5 if self.live.len() < 4 => self.begin(source),
            0..=12 => self.decode(source),
            13..=17 => self.finish(source),
            18..=20 => {
                let (name, tokens) = (source.within(0, NAMESPACES - 1), tokens(source, 20));
                let _ = self.find(name, &tokens);
            }
            21 => self.evict(source.below(12)),
            22 => self.misuse(source),
            _ if source.rarely(4) => self.clear(source),
            _ => (),
        }
    }

    /// The number of tokens that are cached, in whole pages.
    fn cached(&self, name: i64, tokens: &[i32]) -> usize {
        let ends = (self.page_size..=tokens.len()).step_by(self.page_size);
        let is_cached = |end: &usize| self.pages.contains_key(&(name, tokens[..*end].to_vec()));
        ends.take_while(is_cached).last().unwrap_or(0)
    }

    /// Looks up a prompt; returns the node and the slots.
    fn find(&self, name: i64, tokens: &[i32]) -> (NodeHandle, Vec<i32>) {
        let found = self.tree.find(&Namespace::Number(name), &tokens).expect("tokens");
        let len = self.cached(name, tokens);
        assert_eq!(found.len, len);
        assert_eq!(found.node == self.tree.root(), len == 0);
        assert!(!self.gone.contains(&found.node), "a name is not used again");
        let slots = ints_of(&self.tree.slots(found.node, STREAM).expect("a node"));
        let ends = (self.page_size..=len).step_by(self.page_size);
        let expected: Vec<i32> =
            ends.flat_map(|end| self.pages[&(name, tokens[..end].to_vec())].clone()).collect();
        assert_eq!(slots, expected);
        (found.node, slots)
    }

    fn take(&mut self, count: usize) -> Option<Vec<i32>> {
        let mut taken = self.allocator.alloc(count, STREAM).expect("no error").map(kvpool::pool::Grant::keep);
        if taken.is_none() {
            self.evict(count);
            taken = self.allocator.alloc(count, STREAM).expect("no error").map(kvpool::pool::Grant::keep);
        }
        taken.map(|view| ints_of(&view))
    }

    fn give_back(&self, slots: &[i32]) {
        let bad = self.allocator.free(&Indices::Host(wide(slots)), STREAM);
        assert_eq!(bad.expect("own slots are freed").dropped(), 0);
    }

    /// Admits a request, computes its prompt and inserts it.
    fn begin(&mut self, source: &mut Source<'_>) {
        let (name, tokens) = (source.within(0, NAMESPACES - 1), tokens(source, 18));
        if tokens.is_empty() {
            return;
        }
        let (node, mut row) = self.find(name, &tokens);
        // Engines compute some tokens anew.
        row.truncate(row.len().min(tokens.len() - source.below(tokens.len().min(2))));
        let protected = row.len();
        self.tree.lock(node).expect("a node");
        self.live.push(Request { name, tokens, row, protected, locked: Some(node), own: BTreeSet::new() });
        let request = self.live.last().expect("the request");
        let Some(taken) = self.take(request.tokens.len() - protected) else {
            let request = self.live.pop().expect("the request");
            return self.tree.unlock(request.locked.expect("a lock")).expect("a lock");
        };
        let mut request = self.live.pop().expect("the request");
        request.own.extend(&taken);
        request.row.extend(taken);
        let inserted = self.insert(&mut request, 0);
        assert_eq!(inserted.len, request.tokens.len());
        let (node, slots) = self.find(request.name, &request.tokens);
        request.row[..slots.len()].copy_from_slice(&slots);
        request.protected = slots.len();
        self.tree.unlock(request.locked.take().expect("a lock")).expect("a lock");
        // The engine does as pymllm does: a prefix without tokens has no lock.
        if !slots.is_empty() {
            self.tree.lock(node).expect("a node");
            request.locked = Some(node);
        }
        if source.flip() {
            // A lock of the node at the end, a tail perhaps, and with it of all before.
            let evictable = self.tree.sizes().evictable;
            self.tree.lock(inserted.node).expect("a node");
            self.tree.verify().expect("consistent");
            assert!(self.tree.sizes().evictable <= evictable);
            self.tree.unlock(inserted.node).expect("a lock");
            assert_eq!(self.tree.sizes().evictable, evictable);
            if request.protected > 0 && inserted.node != node {
                refused(self.tree.unlock(inserted.node), ErrorKind::IndexOwnership);
            }
        }
        self.live.push(request);
    }

    /// Inserts the tokens of a request, and `unknown` more that have no slots, and frees its duplicates.
    fn insert(&mut self, request: &mut Request, unknown: usize) -> Inserted {
        let (name, row) = (request.name, request.row.clone());
        let mut key = request.tokens.clone();
        let mut slots = row.clone();
        key.extend(std::iter::repeat_n(1, unknown));
        slots.extend(std::iter::repeat_n(0, unknown));
        let inserted = self
            .tree
            .insert(&Namespace::Number(name), &key.as_slice(), &wide(&slots), STREAM)
            .expect("own slots");
        let cached = self.cached(name, &request.tokens);
        assert_eq!((inserted.cached, inserted.len), (cached, request.tokens.len()));
        let info = self.tree.info(inserted.node).expect("a node");
        assert!(request.tokens.ends_with(&info.tokens) && !self.gone.contains(&inserted.node));
        let before = self.gone.len();
        self.gone.extend(&inserted.removed_nodes);
        // The tails of the request: those that others have overtaken are its own again.
        let mut continues = false;
        let mut taken = 0;
        let mut overtaken: Vec<i32> = Vec::new();
        self.tails.retain_mut(|tail| {
            let at = tail.before.1.len();
            let is_mine = tail.before.0 == name
                && at <= cached
                && request.tokens.starts_with(&tail.before.1)
                && row[at..].starts_with(&tail.slots);
            if is_mine && at == cached && row.len() == at + tail.slots.len() {
                (tail.is_young, continues) = (false, true);
                taken = tail.slots.len();
            } else if is_mine && at == cached {
                continues = true;
                overtaken.extend(&tail.slots);
                return false;
            } else if is_mine {
                request.own.extend(&tail.slots);
                overtaken.extend(&tail.slots);
                return false;
            }
            true
        });
        assert_eq!(self.gone.len() - before, usize::from(!overtaken.is_empty()), "a request has one tail");
        let whole = row.len() / self.page_size * self.page_size;
        for end in (cached + self.page_size..=whole).step_by(self.page_size) {
            let page = row[end - self.page_size..end].to_vec();
            self.pages.insert((name, request.tokens[..end].to_vec()), page);
        }
        if whole < row.len() && taken == 0 {
            self.tails.push(Tail {
                before: (name, request.tokens[..whole].to_vec()),
                tokens: request.tokens[whole..].to_vec(),
                slots: row[whole..].to_vec(),
                is_young: whole == 0 && !continues,
            });
        }
        for slot in &row[cached..] {
            request.own.remove(slot);
        }
        if cached > request.protected {
            let duplicates = &row[request.protected..cached];
            for slot in duplicates {
                assert!(request.own.remove(slot), "slot {slot} is the request's");
            }
            self.give_back(duplicates);
        }
        inserted
    }

    /// Computes one more token.
    fn decode(&mut self, source: &mut Source<'_>) {
        if self.live.is_empty() {
            return;
        }
        let at = source.below(self.live.len());
        let Some(slots) = self.take(1) else { return };
        let request = &mut self.live[at];
        request.tokens.push(i32::from(source.rarely(3)));
        request.row.extend(&slots);
        request.own.extend(slots);
    }

    fn finish(&mut self, source: &mut Source<'_>) {
        if self.live.is_empty() {
            return;
        }
        let mut request = self.live.swap_remove(source.below(self.live.len()));
        let unknown = source.below(3);
        let _ = self.insert(&mut request, unknown);
        assert!(request.own.is_empty(), "everything went to the tree or back");
        if let Some(node) = request.locked {
            self.tree.unlock(node).expect("a lock");
        }
    }

    fn is_locked(&self, (name, prefix): &Key) -> bool {
        let has = |request: &Request| {
            let locked = request
                .locked
                .map_or(0, |node| ints_of(&self.tree.slots(node, STREAM).expect("a node")).len());
            request.name == *name && request.tokens[..locked].starts_with(prefix)
        };
        self.live.iter().any(has)
    }

    fn is_kept(&self, tail: &Tail) -> bool {
        tail.is_young || (!tail.before.1.is_empty() && self.is_locked(&tail.before))
    }

    fn evict(&mut self, asked: usize) {
        let evictable = self.evictable();
        let done = self.tree.evict(asked, STREAM);
        assert_eq!(done.freed, done.slots.len());
        assert!(done.freed >= asked.min(evictable), "{asked} of {evictable}: {done:?}");
        assert_eq!(done.freed == 0, done.removed_nodes.is_empty());
        let kept: Vec<Key> = self.pages.keys().filter(|key| self.is_locked(key)).cloned().collect();
        let kept_tails: Vec<i32> =
            self.tails.iter().filter(|tail| self.is_kept(tail)).map(|tail| tail.slots[0]).collect();
        self.record_gone(&done);
        assert!(kept.iter().all(|key| self.pages.contains_key(key)), "a locked prefix was evicted");
        assert!(kept_tails.iter().all(|slot| self.tails.iter().any(|tail| tail.slots[0] == *slot)));
        // The rest is closed: a prefix goes after what hangs on it.
        for (name, prefix) in self.pages.keys().chain(self.tails.iter().map(|tail| &tail.before)) {
            let own = self.pages.contains_key(&(*name, prefix.clone()));
            assert!(own || prefix.is_empty(), "{prefix:?} is gone, and something hangs on it");
            let before = prefix[..prefix.len().saturating_sub(self.page_size)].to_vec();
            assert!(before.is_empty() || self.pages.contains_key(&(*name, before)));
        }
    }

    fn record_gone(&mut self, done: &EvictedNodes) {
        for node in &done.removed_nodes {
            assert!(self.gone.insert(*node), "{node:?} is gone twice");
            refused(self.tree.slots(*node, STREAM), ErrorKind::Stale);
        }
        let slots: BTreeSet<i32> = done.slots.iter().copied().collect();
        assert_eq!(slots.len(), done.slots.len());
        self.pages.retain(|_, page| !page.iter().any(|slot| slots.contains(slot)));
        self.tails.retain(|tail| !slots.contains(&tail.slots[0]));
    }

    fn evictable(&self) -> usize {
        let pages = self.pages.keys().filter(|key| !self.is_locked(key)).count() * self.page_size;
        let tails = self.tails.iter().filter(|tail| !self.is_kept(tail)).map(|tail| tail.slots.len());
        pages + tails.sum::<usize>()
    }

    fn clear(&mut self, source: &mut Source<'_>) {
        if !self.live.is_empty() {
            return;
        }
        if source.flip() {
            let done = self.tree.clear(STREAM);
            self.record_gone(&done);
        } else {
            self.allocator.clear(STREAM);
            // The names come with the next report.
            let done = self.tree.evict(0, STREAM);
            assert!(done.slots.is_empty());
            self.record_gone(&done);
            self.pages.clear();
            self.tails.clear();
        }
        assert!(self.pages.is_empty() && self.tails.is_empty());
    }

    /// Calls that must be refused, and change nothing.
    fn misuse(&self, source: &mut Source<'_>) {
        let name = Namespace::Unnamed;
        refused(self.tree.insert(&name, &[5_i32, 6].as_slice(), &wide(&[1]), STREAM), ErrorKind::Argument);
        refused(self.tree.find(&name, &[-1_i32].as_slice()), Refusal::at(ErrorKind::Argument, -1));

        if let Some(page) = self.pages.values().next() {
            // Tokens that no prefix has, with slots that are cached.
            let tokens = vec![7_i32; self.page_size];
            let answer = self.tree.insert(&name, &tokens.as_slice(), &wide(page), STREAM);
            refused(answer, Refusal::at(ErrorKind::IndexOwnership, page[0].into()));
        }
        if let Some(own) = self.live.iter().find_map(|request| request.own.first()) {
            let (tokens, twice) = ([7_i32, 7], wide(&[*own, *own]));
            let answer = self.tree.insert(&name, &tokens.as_slice(), &twice, STREAM);
            refused(answer, Refusal::at(ErrorKind::IndexOwnership, i64::from(*own)));
        }
        if let Some(node) = self.gone.iter().nth(source.below(self.gone.len().max(1))) {
            refused(self.tree.lock(*node), ErrorKind::Stale);
            refused(self.tree.unlock(*node), ErrorKind::Stale);
            refused(self.tree.info(*node), ErrorKind::Stale);
        }
        refused(self.tree.lock(NodeHandle::new(u64::MAX >> 1)), ErrorKind::Stale);
    }

    fn check(&self) {
        self.tree.verify().expect("consistent");
        self.allocator.verify().expect("consistent");
        let tree: Vec<i32> =
            self.pages.values().chain(self.tails.iter().map(|tail| &tail.slots)).flatten().copied().collect();
        let owned: BTreeSet<i32> = tree.iter().copied().collect();
        assert_eq!(owned.len(), tree.len(), "a slot is cached twice");
        let sizes = self.tree.sizes();
        assert_eq!((sizes.evictable + sizes.locked, sizes.evictable), (tree.len(), self.evictable()));
        let mut own = 0;
        for request in &self.live {
            own += request.own.len();
            for slot in &request.row {
                assert!(owned.contains(slot) != request.own.contains(slot), "slot {slot} is read and free");
            }
            assert_eq!(request.tokens.len(), request.row.len());
        }
        let stats = self.allocator.stats();
        assert_eq!((stats.cached, stats.in_use, stats.dropped_frees), (tree.len(), tree.len() + own, 0));
        assert_eq!(stats.capacity, stats.available + stats.in_use);
        assert!(self.tails.iter().all(|tail| tail.tokens.len() == tail.slots.len()));
    }
}
