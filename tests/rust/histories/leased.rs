//! Requests of a planner with leased prefixes: every slot that a step reads has the K and V of its prefix.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use kvpool::base::IndexVec;
use kvpool::cache::{Namespace, PolicyKind};
use kvpool::pool::{
    AllocatorConfig, Batch, BatchPlanner, Field, Lease, Offer, Plan, PlannerConfig, Prefix, PrefixCache,
    PrefixCacheConfig, ReqToTokenConfig, ReqToTokenPool, TokenToKvPoolAllocator,
};

use super::{STREAM, Source, host, int, ints_of};

const NAME: Namespace = Namespace::Unnamed;

struct Running {
    row: i64,
    /// The tokens that have slots.
    tokens: Vec<i32>,
    lease: Option<Arc<Lease>>,
}

struct Requests {
    slots: Arc<TokenToKvPoolAllocator>,
    table: Arc<Mutex<ReqToTokenPool>>,
    planner: Arc<BatchPlanner>,
    cache: PrefixCache,
    page_size: usize,
    running: Vec<Running>,
    /// By slot, the tokens up to its own, which determine K and V.
    contents: HashMap<i32, Vec<i32>>,
}

pub(super) fn run(source: &mut Source<'_>) {
    let page_size = source.of(&[1, 2, 3]);
    let count = page_size * (6 + source.below(40));
    let of_slots = AllocatorConfig {
        size: count,
        page_size,
        need_sort: source.flip(),
        strict: true,
        ..AllocatorConfig::default()
    };
    let slots = Arc::new(TokenToKvPoolAllocator::new(&of_slots, &host()).expect("small"));
    let of_rows = ReqToTokenConfig {
        max_reqs: 4,
        max_context_len: 64,
        padding_row: true,
        strict: true,
        ..ReqToTokenConfig::default()
    };
    let table = Arc::new(Mutex::new(ReqToTokenPool::new(&of_rows, &host()).expect("small")));
    let config = PlannerConfig { max_batch_size: 4, max_tokens: 64, kv_indices: true, block_table: true };
    let planner = BatchPlanner::new(&config, &host(), Arc::clone(&slots), Arc::clone(&table)).expect("small");
    let config = PrefixCacheConfig {
        policy: PolicyKind::Adaptive,
        max_pinned: 0.5,
        name: "cache".into(),
        events: None,
    };
    let cache = PrefixCache::new(config, Arc::clone(&slots), None).expect("valid");
    let (running, contents) = (Vec::new(), HashMap::new());
    let mut requests = Requests { slots, table, planner, cache, page_size, running, contents };
    while source.next_step() {
        requests.step(source);
        requests.check();
    }
    while !requests.running.is_empty() {
        requests.finish(source);
    }
    let stats = requests.slots.stats();
    assert_eq!((stats.in_use, stats.shared), (stats.cached, 0), "only the cache has slots");
    assert_eq!(requests.cache.tree_stats(STREAM).locked, 0, "no lease is forgotten");
}

fn tokens(source: &mut Source<'_>, most: usize) -> Vec<i32> {
    (0..=source.below(most)).map(|_| i32::from(source.rarely(5))).collect()
}

impl Requests {
    fn step(&mut self, source: &mut Source<'_>) {
        match source.below(16) {
            0..=3 => self.start(source),
            4..=7 => self.grow(source),
            8..=10 => self.publish(source),
            11..=12 => self.finish(source),
            13 => self.truncate(source),
            14 => self.fork(source),
            _ => drop(self.cache.evict(source.below(8), STREAM)),
        }
    }

    fn alloc_row(&self) -> Option<i64> {
        let rows = self.table.lock().expect("no panic").alloc(1, STREAM).expect("no error")?;
        Some(i64::from(rows[0]))
    }

    fn free_row(&self, row: i64) {
        let rows = IndexVec::I64(vec![row]);
        assert_eq!(self.table.lock().expect("no panic").free(&rows, STREAM).expect("a row").dropped(), 0);
    }

    fn start(&mut self, source: &mut Source<'_>) {
        let Some(row) = self.alloc_row() else { return };
        let prompt = tokens(source, 30);
        let lease = (!source.rarely(6)).then(|| {
            self.cache.acquire(&NAME, &prompt.as_slice(), prompt.len() - 1, STREAM).expect("tokens")
        });
        let prefix = lease.as_ref().map_or(0, |lease| lease.len().expect("a lease"));
        let prefixes: Vec<Prefix> = lease.iter().cloned().map(Prefix::Leased).collect();
        let (rows, lens) = (IndexVec::I64(vec![row]), [int(prefix), int(prompt.len())]);
        let wrong = lease.is_some() && source.rarely(12);
        let prefix_lens = [lens[0] + i64::from(wrong)];
        let batch =
            Batch { rows: &rows, prefix_lens: &prefix_lens, seq_lens: &lens[1..], prefixes: &prefixes };
        let planned = self.planner.extend(batch, STREAM);
        assert_eq!(planned.is_err(), wrong, "{planned:?}");
        let Ok(Some(plan)) = planned else {
            // The lease is as it was.
            assert!(
                lease.is_none_or(|lease| lease.row().is_none() && lease.len().expect("a lease") == prefix)
            );
            return self.free_row(row);
        };
        self.compute(&plan, &[(row, prompt.clone(), prefix)]);
        self.running.push(Running { row, tokens: prompt, lease });
        if source.flip() {
            // The planner keeps what its caller has dropped.
            let last = self.running.last_mut().expect("just added");
            if let Some(lease) = last.lease.as_ref().filter(|_| source.flip()) {
                lease.release(STREAM);
                last.lease = None;
            }
        }
    }

    /// Computes a step: checks what it reads, and writes its new slots.
    fn compute(&mut self, plan: &Plan, batch: &[(i64, Vec<i32>, usize)]) {
        let field = |field| ints_of(&self.planner.field(plan, field).expect("the last plan").expect("built"));
        let (new, pages) = (field(Field::OutCacheLoc), field(Field::KvIndices));
        let (mut new, mut pages) = (new.as_slice(), pages.as_slice());
        let width = i32::try_from(self.page_size).expect("small");
        for (row, tokens, prefix) in batch {
            let (own, rest) = pages.split_at(tokens.len().div_ceil(self.page_size));
            let slots: Vec<i32> =
                own.iter().flat_map(|page| page * width..(page + 1) * width).take(tokens.len()).collect();
            let in_table =
                self.table.lock().expect("no panic").read(*row, int(tokens.len())).expect("written");
            assert_eq!(ints_of(&in_table), slots);
            for (at, slot) in slots.iter().enumerate() {
                if at < *prefix {
                    assert_eq!(self.contents[slot], tokens[..=at], "slot {slot} at position {at}");
                } else {
                    assert_eq!(new[at - prefix], *slot);
                    self.contents.insert(*slot, tokens[..=at].to_vec());
                }
            }
            (new, pages) = (&new[tokens.len() - prefix..], rest);
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
        let Some(plan) = self.planner.extend(batch, STREAM).expect("valid") else { return };
        let running = chosen.iter().map(|&at| self.running[at].row);
        let steps: Vec<_> =
            running.zip(after.iter().cloned()).zip(before).map(|((row, all), had)| (row, all, had)).collect();
        self.compute(&plan, &steps);
        for (at, tokens) in chosen.into_iter().zip(after) {
            self.running[at].tokens = tokens;
        }
    }

    fn publish(&mut self, source: &mut Source<'_>) {
        let Some(Running { tokens, lease: Some(lease), .. }) =
            (!self.running.is_empty()).then(|| &self.running[source.below(self.running.len())])
        else {
            return;
        };
        let begin = lease.len().expect("a lease");
        let end = if source.flip() { tokens.len() } else { begin + source.below(tokens.len() - begin + 1) };
        let offer = Offer { tokens: &&tokens[begin..end], slots: None, state: None };
        let published = lease.publish(&offer, STREAM).expect("computed");
        assert_eq!(published.length, begin + (end - begin) / self.page_size * self.page_size);
        let much = vec![0; tokens.len() - published.length + 1];
        let offer = Offer { tokens: &much.as_slice(), slots: None, state: None };
        assert!(lease.publish(&offer, STREAM).is_err(), "the request has fewer tokens");
    }

    fn finish(&mut self, source: &mut Source<'_>) {
        if self.running.is_empty() {
            return;
        }
        let Running { row, tokens, lease } = self.running.swap_remove(source.below(self.running.len()));
        let lens = IndexVec::I64(vec![int(tokens.len())]);
        let rows = IndexVec::I64(vec![row]);
        let (given, bad) = self.planner.finish(&rows, Some(&lens), None, STREAM).expect("strict");
        assert!(given <= tokens.len().div_ceil(self.page_size) && bad.dropped() == 0);
        assert!(lease.is_none_or(|lease| lease.len().is_err()), "finishing ends the lease");
    }

    fn truncate(&mut self, source: &mut Source<'_>) {
        if self.running.is_empty() {
            return;
        }
        let at = source.below(self.running.len());
        let Running { row, tokens, lease } = &mut self.running[at];
        let len = source.below(tokens.len() + 1);
        let (rows, lens) = (IndexVec::I64(vec![*row]), IndexVec::I64(vec![int(len)]));
        let cut = self.planner.truncate(&rows, &lens, None, STREAM);
        let leased = lease.as_ref().map(|lease| lease.len());
        let is_whole = len.is_multiple_of(self.page_size);
        if cut.is_err() {
            // Within a page that others may read.
            assert!(!is_whole && len < tokens.len());
            return;
        }
        tokens.truncate(len);
        match leased {
            Some(Ok(leased)) => assert!(leased <= len, "the lease ends with the request"),
            Some(Err(_)) => *lease = None,
            None => (),
        }
    }

    fn fork(&mut self, source: &mut Source<'_>) {
        if self.running.is_empty() {
            return;
        }
        let at = source.below(self.running.len());
        let (src, all) = (self.running[at].row, self.running[at].tokens.clone());
        let len = source.below(all.len() + 1);
        let Some(dst) = self.alloc_row() else { return };
        let Some([to, from]) = self.planner.fork(src, dst, int(len), STREAM).expect("valid") else {
            return self.free_row(dst);
        };
        for (to, from) in ints_of(&to).into_iter().zip(ints_of(&from)) {
            let copied = self.contents[&from].clone();
            self.contents.insert(to, copied);
        }
        self.running.push(Running { row: dst, tokens: all[..len].to_vec(), lease: None });
    }

    fn check(&self) {
        self.cache.verify(STREAM).expect("consistent");
        self.slots.verify().expect("consistent");
        let (stats, tree) = (self.slots.stats(), self.cache.tree_stats(STREAM));
        assert_eq!(stats.cached, tree.cached);
        assert!(stats.available + tree.cached <= stats.capacity);
        assert_eq!(stats.dropped_frees, 0);
        if self.running.is_empty() {
            assert_eq!((stats.in_use, tree.locked), (stats.cached, 0));
        }
        let tokens: usize = self.running.iter().map(|running| running.tokens.len()).sum();
        assert_eq!(self.planner.totals().1, tokens);
    }
}
