//! Requests of a planner with leased prefixes: every slot that a step reads has the K and V of its prefix.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kvpool::base::{ErrorKind, Id, IndexVec};
use kvpool::cache::{Namespace, PolicyKind};
use kvpool::index::IndexState;
use kvpool::kernels::Indices;
use kvpool::pool::{
    AllocatorConfig, Batch, BatchPlanner, Fence, Field, Grant, Lease, Plan, PlannerConfig, Pool, Prefix,
    PrefixCache, PrefixCacheConfig, Publication, ReqToTokenConfig, ReqToTokenPool, TokenToKvPoolAllocator,
};

use super::slots::Fences;
use super::{STREAM, Source, agree, ensure, host, int, ints_of, refused, size};

const NAMESPACES: i64 = 2;

struct Running {
    row: i64,
    /// The namespace.
    name: i64,
    /// The tokens that have slots.
    tokens: Vec<i32>,
    /// The pages of the tokens.
    pages: Vec<i32>,
    lease: Option<Arc<Lease>>,
    /// Tokens of the lease.
    leased: usize,
    /// The fences of its cuts.
    cuts: Vec<usize>,
}

impl Running {
    /// The prefix that determines K and V of the last of the first `len` tokens.
    fn content(&self, len: usize) -> (i64, Vec<i32>) {
        (self.name, self.tokens[..len].to_vec())
    }
}

struct Requests {
    slots: Arc<TokenToKvPoolAllocator>,
    table: Arc<ReqToTokenPool>,
    planner: Arc<BatchPlanner>,
    cache: PrefixCache,
    page_size: usize,
    running: Vec<Running>,
    /// The namespace and the tokens up to its own by slot, which determine K and V.
    contents: HashMap<i32, (i64, Vec<i32>)>,
    /// Pages that are used without the planner.
    own: Vec<i32>,
    /// Pages that requests freed with a fence.
    waiting: Vec<(usize, Vec<i32>)>,
    /// Pages that they gave back while a fence of their lease had not passed.
    kept: Vec<(usize, Vec<i32>)>,
    fences: Fences,
    has_pins: bool,
}

pub(super) fn run(source: &mut Source<'_>) {
    let page_size = source.of(&[1, 2, 3]);
    let count = page_size * (6 + source.below(40));
    let of_slots =
        AllocatorConfig { page_size, need_sort: source.flip(), strict: true, ..AllocatorConfig::new(count) };
    let slots = Arc::new(TokenToKvPoolAllocator::new(&of_slots, &host()).expect("small"));
    let of_rows = ReqToTokenConfig { strict: true, ..ReqToTokenConfig::new(4, 64) };
    let table = Arc::new(ReqToTokenPool::new(&of_rows, &host()).expect("small"));
    let config = PlannerConfig::new(4, 64);
    let planner = BatchPlanner::new(&config, &host(), Arc::clone(&slots), Arc::clone(&table)).expect("small");
    let config = PrefixCacheConfig {
        policy: PolicyKind::Adaptive,
        cost: None,
        max_pinned: 0.5,
        name: "cache".into(),
        events: None,
    };
    let cache = PrefixCache::new(config, Arc::clone(&slots), None, None).expect("valid");
    let mut requests = Requests {
        slots,
        table,
        planner,
        cache,
        page_size,
        running: Vec::new(),
        contents: HashMap::new(),
        own: Vec::new(),
        waiting: Vec::new(),
        kept: Vec::new(),
        fences: Fences::default(),
        has_pins: false,
    };
    while source.next_step() {
        requests.step(source);
        requests.check();
    }
    while !requests.running.is_empty() {
        requests.finish(source);
    }
    while let Some(at) = requests.fences.pass(source) {
        requests.passed(at);
    }
    requests.free_own(usize::MAX);
    requests.clear(None);
    requests.check();
    let stats = requests.slots.stats();
    assert_eq!((stats.in_use, stats.shared), (stats.cached, 0), "only the cache has slots");
    assert_eq!(requests.cache.tree_stats(STREAM).locked, 0, "no lease is forgotten");
}

fn tokens(source: &mut Source<'_>, most: usize) -> Vec<i32> {
    (0..=source.below(most)).map(|_| i32::from(source.rarely(5))).collect()
}

impl Requests {
    fn step(&mut self, source: &mut Source<'_>) {
        match source.below(20) {
            0..=3 => self.start(source),
            4..=7 => self.grow(source),
            8..=10 => self.publish(source),
            11..=12 => self.finish(source),
            13 => self.truncate(source),
            14 => self.fork(source),
            15 => {
                if let Some(passed) = self.fences.pass(source) {
                    self.passed(passed);
                }
            }
            16 => self.alloc(source),
            17 => self.free_own(source.below(4)),
            18 if source.rarely(4) => {
                let name = source.flip().then(|| source.within(0, NAMESPACES - 1));
                self.clear(name);
            }
            18 => self.pin(source),
            _ => drop(self.cache.evict(source.below(8), STREAM)),
        }
    }

    fn alloc_row(&self) -> Option<i64> {
        let rows = self.table.alloc(1, STREAM).expect("no error")?;
        Some(i64::from(rows[0]))
    }

    fn free_row(&self, row: i64) {
        let rows = IndexVec::I64(vec![row]);
        assert_eq!(self.table.free(&rows, STREAM).expect("a row").bad.dropped(), 0);
    }

    fn width(&self) -> i32 {
        i32::try_from(self.page_size).expect("small")
    }

    /// A fence in one case of four.
    fn fence(&mut self, source: &mut Source<'_>) -> Option<(usize, Arc<dyn Fence>)> {
        source.rarely(4).then(|| self.fences.make())
    }

    fn start(&mut self, source: &mut Source<'_>) {
        let Some(row) = self.alloc_row() else { return };
        let (name, prompt) = (source.within(0, NAMESPACES - 1), tokens(source, 30));
        let namespace = Namespace::Number(name);
        let lease = (!source.rarely(6)).then(|| {
            self.cache.match_prefix(&namespace, &prompt.as_slice(), prompt.len() - 1, STREAM).expect("tokens")
        });
        let prefix = lease.as_ref().map_or(0, |lease| lease.len().expect("a lease"));
        let prefixes: Vec<Prefix> = lease.iter().cloned().map(Prefix::Leased).collect();
        let (rows, lens) = (IndexVec::I64(vec![row]), [int(prefix), int(prompt.len())]);
        let wrong = lease.is_some() && source.rarely(12);
        let prefix_lens = [lens[0] + i64::from(wrong)];
        let batch =
            Batch { rows: &rows, prefix_lens: &prefix_lens, seq_lens: &lens[1..], prefixes: &prefixes };
        let planned = self.planner.extend(batch, STREAM);
        let Some(Some(plan)) = agree(planned, &ensure(!wrong, ErrorKind::Argument)) else {
            // The lease is as it was.
            assert!(
                lease.is_none_or(|lease| lease.row().is_none() && lease.len().expect("a lease") == prefix)
            );
            if !wrong {
                self.is_short(prompt.len().div_ceil(self.page_size) - prefix / self.page_size);
            }
            return self.free_row(row);
        };
        self.running.push(Running {
            row,
            name,
            tokens: prompt,
            pages: Vec::new(),
            lease,
            leased: prefix,
            cuts: Vec::new(),
        });
        self.compute(&plan, &[(self.running.len() - 1, prefix)]);
        if source.flip() {
            // The planner keeps what its caller has dropped.
            let last = self.running.last_mut().expect("just added");
            if let Some(lease) = last.lease.as_ref().filter(|_| source.flip()) {
                lease.release(STREAM);
                last.lease = None;
            }
        }
    }

    /// Asserts that so many pages are not there, nor anything that could be evicted for them.
    fn is_short(&self, pages: usize) {
        let (stats, tree) = (self.slots.stats(), self.cache.tree_stats(STREAM));
        assert!(stats.available < pages * self.page_size, "{pages} pages are there");
        if stats.fenced + stats.shared == 0 {
            assert!(stats.available + tree.evictable < pages * self.page_size, "there is enough to evict");
        }
    }

    /// Computes a step of some running requests: checks what it reads, and writes its new slots.
    fn compute(&mut self, plan: &Plan, batch: &[(usize, usize)]) {
        let field = |field| ints_of(&self.planner.field(plan, field).expect("the last plan").expect("built"));
        let (new, pages) = (field(Field::OutCacheLoc), field(Field::KvIndices));
        let (mut new, mut pages) = (new.as_slice(), pages.as_slice());
        let width = self.width();
        for &(at, prefix) in batch {
            let request = &mut self.running[at];
            let len = request.tokens.len();
            let (own, rest) = pages.split_at(len.div_ceil(self.page_size));
            request.pages = own.to_vec();
            let slots: Vec<i32> =
                own.iter().flat_map(|page| page * width..(page + 1) * width).take(len).collect();
            let in_table = self.table.read(request.row, int(len)).expect("written");
            assert_eq!(ints_of(&in_table), slots);
            for (at, slot) in slots.iter().enumerate() {
                if at < prefix {
                    assert_eq!(self.contents[slot], request.content(at + 1), "slot {slot} at position {at}");
                } else {
                    assert_eq!(new[at - prefix], *slot);
                    self.contents.insert(*slot, request.content(at + 1));
                }
            }
            (new, pages) = (&new[len - prefix..], rest);
        }
    }

    /// A step of some requests, of none or more new tokens each.
    fn grow(&mut self, source: &mut Source<'_>) {
        let mut chosen: Vec<usize> = (0..self.running.len()).collect();
        chosen.retain(|_| source.flip());
        let before: Vec<usize> = chosen.iter().map(|&at| self.running[at].tokens.len()).collect();
        let after: Vec<Vec<i32>> = chosen
            .iter()
            .map(|&at| {
                let mut all = self.running[at].tokens.clone();
                all.extend((0..source.below(4)).map(|_| i32::from(source.rarely(5))));
                all.truncate(64);
                all
            })
            .collect();
        let rows = IndexVec::I64(chosen.iter().map(|&at| self.running[at].row).collect());
        let prefix_lens: Vec<i64> = before.iter().copied().map(int).collect();
        let seq_lens: Vec<i64> = after.iter().map(|tokens| int(tokens.len())).collect();
        let batch = Batch { rows: &rows, prefix_lens: &prefix_lens, seq_lens: &seq_lens, prefixes: &[] };
        let Some(plan) = self.planner.extend(batch, STREAM).expect("valid") else {
            let pages = |len: usize| len.div_ceil(self.page_size);
            let new = after.iter().zip(&before).map(|(tokens, before)| pages(tokens.len()) - pages(*before));
            return self.is_short(new.sum());
        };
        for (&at, tokens) in chosen.iter().zip(after) {
            self.running[at].tokens = tokens;
        }
        self.compute(&plan, &chosen.into_iter().zip(before).collect::<Vec<_>>());
    }

    fn publish(&mut self, source: &mut Source<'_>) {
        if self.running.is_empty() {
            return;
        }
        let at = source.below(self.running.len());
        let Running { tokens, lease: Some(lease), leased, pages, .. } = &mut self.running[at] else { return };
        let begin = lease.len().expect("a lease");
        assert_eq!(begin, *leased);
        let end = if source.flip() { tokens.len() } else { begin + source.below(tokens.len() - begin + 1) };
        let publication = Publication { tokens: &&tokens[begin..end], slots: None, state: None };
        let published = lease.publish(&publication, STREAM).expect("computed");
        assert_eq!(published.length, begin + (end - begin) / self.page_size * self.page_size);
        *leased = published.length;
        let cached = published.pages.iter().map(|page| page.number().cast_signed());
        pages.splice(begin / self.page_size..published.length / self.page_size, cached);
        let much = vec![0; tokens.len() - published.length + 1];
        let publication = Publication { tokens: &much.as_slice(), slots: None, state: None };
        // The request has fewer tokens.
        refused(lease.publish(&publication, STREAM), ErrorKind::State);
    }

    fn finish(&mut self, source: &mut Source<'_>) {
        if self.running.is_empty() {
            return;
        }
        let fence = self.fence(source);
        let request = self.running.swap_remove(source.below(self.running.len()));
        let Running { row, tokens, pages, lease, cuts, .. } = request;
        let lens = IndexVec::I64(vec![int(tokens.len())]);
        let rows = IndexVec::I64(vec![row]);
        let after = fence.as_ref().map(|(_, fence)| fence);
        let finished = self.planner.finish(&rows, Some(&lens), after, STREAM).expect("strict");
        assert!(finished.pages <= tokens.len().div_ceil(self.page_size) && finished.bad.dropped() == 0);
        // Finishing ends the lease.
        if let Some(lease) = lease {
            refused(lease.len(), ErrorKind::Stale);
        }
        match fence {
            Some((fence, _)) => self.wait(fence, &cuts, pages),
            None => self.keep(&cuts, &pages),
        }
    }

    fn truncate(&mut self, source: &mut Source<'_>) {
        if self.running.is_empty() {
            return;
        }
        let fence = self.fence(source);
        let at = source.below(self.running.len());
        let Running { row, tokens, pages, lease, leased, cuts, .. } = &mut self.running[at];
        let len = source.below(tokens.len() + 1);
        let (rows, lens) = (IndexVec::I64(vec![*row]), IndexVec::I64(vec![int(len)]));
        let after = fence.as_ref().map(|(_, fence)| fence);
        let cut = self.planner.truncate(&rows, &lens, after, STREAM);
        if let Err(error) = cut {
            // The cut is within a page that others may read.
            assert_eq!(error.kind(), ErrorKind::IndexOwnership, "{error}");
            assert!(!len.is_multiple_of(self.page_size) && len < tokens.len());
            return;
        }
        tokens.truncate(len);
        *leased = len.min(*leased);
        let given = pages.split_off(len.div_ceil(self.page_size));
        if len == 0 {
            // It ends the lease.
            if let Some(ended) = lease.take() {
                refused(ended.len(), ErrorKind::Stale);
            }
        } else if let Some(lease) = lease {
            assert_eq!(lease.len().expect("a lease"), *leased);
        }
        let before = cuts.clone();
        cuts.extend(fence.as_ref().map(|(fence, _)| fence));
        match fence {
            Some((fence, _)) => self.wait(fence, &before, given),
            None => self.keep(&before, &given),
        }
    }

    /// Notes pages that wait for a fence. Cuts of one lease may all wait for each other.
    fn wait(&mut self, fence: usize, cuts: &[usize], pages: Vec<i32>) {
        let earlier = self.waiting.iter().chain(&self.kept).filter(|(cut, _)| cuts.contains(cut));
        let earlier: Vec<i32> = earlier.flat_map(|(_, pages)| pages).copied().collect();
        self.kept.push((fence, earlier));
        self.keep(cuts, &pages);
        self.waiting.push((fence, pages));
    }

    fn are_passed(&self, fences: &[usize]) -> bool {
        !self.waiting.iter().any(|(fence, _)| fences.contains(fence))
    }

    /// Notes pages that may stay locked until the fences of earlier cuts have passed.
    fn keep(&mut self, cuts: &[usize], pages: &[i32]) {
        let waiting = cuts.iter().filter(|cut| !self.are_passed(&[**cut])).copied();
        self.kept.extend(waiting.map(|cut| (cut, pages.to_vec())).collect::<Vec<_>>());
    }

    fn fork(&mut self, source: &mut Source<'_>) {
        if self.running.is_empty() {
            return;
        }
        let at = source.below(self.running.len());
        let Running { row: src, name, ref tokens, ref pages, .. } = self.running[at];
        let len = source.below(tokens.len() + 1);
        let (tokens, mut pages) = (tokens[..len].to_vec(), pages[..len.div_ceil(self.page_size)].to_vec());
        let Some(dst) = self.alloc_row() else { return };
        let Some([to, from]) = self.planner.fork(src, dst, int(len), STREAM).expect("valid") else {
            return self.free_row(dst);
        };
        let to = ints_of(&to);
        if let (Some(slot), Some(last)) = (to.first(), pages.last_mut()) {
            *last = slot / i32::try_from(self.page_size).expect("small");
        }
        for (to, from) in to.into_iter().zip(ints_of(&from)) {
            let copied = self.contents[&from].clone();
            self.contents.insert(to, copied);
        }
        self.running.push(Running {
            row: dst,
            name,
            tokens,
            pages,
            lease: None,
            leased: 0,
            cuts: Vec::new(),
        });
    }

    /// Takes the slots of a fence that has passed.
    fn passed(&mut self, fence: usize) {
        self.slots.poll(STREAM).expect("flags can tell");
        self.waiting.retain(|(other, _)| *other != fence);
        self.kept.retain(|(other, _)| *other != fence);
    }

    /// Uses slots without the planner, which may evict.
    fn alloc(&mut self, source: &mut Source<'_>) {
        let pages = source.below(6);
        let taken = self.slots.alloc(pages * self.page_size, STREAM).expect("no error").map(Grant::keep);
        let Some(taken) = taken else { return self.is_short(pages) };
        let slots = ints_of(&taken);
        let width = self.width();
        self.own.extend(slots.iter().step_by(self.page_size).map(|slot| slot / width));
        self.contents.extend(slots.into_iter().map(|slot| (slot, (NAMESPACES, Vec::new()))));
    }

    fn free_own(&mut self, count: usize) {
        let width = self.width();
        let given = self.own.split_off(self.own.len().saturating_sub(count));
        let slots = given.into_iter().flat_map(|page| page * width..(page + 1) * width).collect();
        let slots = Indices::Host(IndexVec::I32(slots));
        assert_eq!(self.slots.free(&slots, STREAM).expect("its own").dropped(), 0);
    }

    /// Clears a namespace: its prefixes can no longer be found, and stay with the requests that use them.
    fn clear(&mut self, name: Option<i64>) {
        self.cache.clear(name.map(Namespace::Number).as_ref(), STREAM);
        self.has_pins &= name.is_some();
    }

    fn pin(&mut self, source: &mut Source<'_>) {
        let lease = self.running.iter().find_map(|running| running.lease.as_ref());
        let Some(lease) = lease else { return };
        let time = source.of(&[None, Some(Duration::ZERO), Some(Duration::from_secs(1 << 20))]);
        // At most the half is pinned.
        let answer = self.cache.pin(lease, time, 0, STREAM);
        self.has_pins |= answer.is_ok() && time.is_some_and(|time| !time.is_zero());
    }

    fn check(&self) {
        self.cache.verify(STREAM).expect("consistent");
        self.slots.verify().expect("consistent");
        let (stats, tree) = (self.slots.stats(), self.cache.tree_stats(STREAM));
        assert_eq!((stats.cached, tree.cached), (tree.cached, tree.evictable + tree.locked));
        assert_eq!(stats.available + stats.in_use, stats.capacity);
        assert_eq!(stats.dropped_frees, 0);
        if self.running.is_empty() && self.waiting.is_empty() && !self.has_pins {
            let own = self.own.len() * self.page_size;
            assert_eq!((stats.in_use, tree.locked), (stats.cached + own, 0));
        }
        let tokens: usize = self.running.iter().map(|running| running.tokens.len()).sum();
        assert_eq!(self.planner.totals().1, tokens);
        self.check_pages();
    }

    /// Looks at who has each page.
    fn check_pages(&self) {
        let pages = |pages: &mut dyn Iterator<Item = &Vec<i32>>| -> BTreeSet<i32> {
            pages.flatten().copied().collect()
        };
        let used = pages(&mut self.running.iter().map(|running| &running.pages));
        let waiting = pages(&mut self.waiting.iter().map(|(_, pages)| pages));
        let kept = pages(&mut self.waiting.iter().chain(&self.kept).map(|(_, pages)| pages));
        let mut counts = [0; 5];
        for piece in self.slots.occupancy().pieces {
            let state = piece.state;
            for slot in piece.range.step_by(self.page_size) {
                let page = i32::try_from(slot / self.page_size).expect("small");
                counts[size(state as u8)] += self.page_size;
                let is_right = match state {
                    IndexState::Free => !used.contains(&page) && !waiting.contains(&page),
                    IndexState::Live => used.contains(&page) || self.own.contains(&page),
                    IndexState::Evictable => !used.contains(&page),
                    IndexState::Locked => used.contains(&page) || kept.contains(&page) || self.has_pins,
                    IndexState::Fenced => waiting.contains(&page) && !used.contains(&page),
                };
                assert!(is_right, "page {page} is {state:?}");
                assert!(state == IndexState::Live || !self.own.contains(&page), "page {page} is {state:?}");
            }
        }
        let (stats, tree) = (self.slots.stats(), self.cache.tree_stats(STREAM));
        let [free, _, evictable, locked, fenced] = counts;
        assert_eq!((free, fenced), (stats.available, stats.fenced));
        // The rest of the cached pages have another owner.
        assert!(evictable <= tree.evictable && locked <= tree.locked);
    }
}
