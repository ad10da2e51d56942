//! The batch planner: every array of a step, the table, and ownership of slots.

use std::sync::Arc;

use kvpool::base::{ErrorKind, IndexVec};
use kvpool::index::Order;
use kvpool::kernels::Indices;
use kvpool::pool::{
    AllocatorConfig, Batch, BatchPlanner, Fence, Field, Plan, PlannerConfig, Prefix, ReqToTokenConfig,
    ReqToTokenPool, TokenToKvPoolAllocator,
};

use super::planner_model::{Limits, Model, RequestedGrowth, Step};
use super::slots::{Fences, check as check_slots, given};
use super::{STREAM, Source, Verdict, agree, contents, ensure, host, int, ints_of, refused, size};

struct Planner {
    slots: Arc<TokenToKvPoolAllocator>,
    table: Arc<ReqToTokenPool>,
    batches: Arc<BatchPlanner>,
    model: Model,
    fences: Fences,
    last: Option<Plan>,
    /// Whether other code frees or shares the slots of requests.
    is_meddled: bool,
}

pub(super) fn run(source: &mut Source<'_>) {
    let (page_size, count) = (source.of(&[1, 1, 2, 3, 4, 16]), 16 + source.below(120));
    let (is_sorted, strict, padding_row) = (source.flip(), source.rarely(4), !source.rarely(4));
    let (rows, columns) = (1 + source.below(7), 1 + source.below(60));
    let config = PlannerConfig {
        max_batch_size: 1 + source.below(6),
        max_tokens: 1 + source.below(70),
        kv_indices: !source.rarely(4),
        block_table: !source.rarely(4),
    };
    let of_slots = AllocatorConfig { page_size, need_sort: is_sorted, strict, ..AllocatorConfig::new(count) };
    let slots = Arc::new(TokenToKvPoolAllocator::new(&of_slots, &host()).expect("small"));
    let of_rows = ReqToTokenConfig { padding_row, ..ReqToTokenConfig::new(rows, columns) };
    let table = Arc::new(ReqToTokenPool::new(&of_rows, &host()).expect("small"));
    let batches = BatchPlanner::new(&config, &host(), Arc::clone(&slots), Arc::clone(&table)).expect("small");
    let limits = Limits {
        max_batch: config.max_batch_size,
        max_tokens: config.max_tokens,
        rows: table.table_rows(),
        columns,
        padding_row,
    };
    let order = if is_sorted { Order::Sorted } else { Order::Fifo };
    let model = Model::new(count, page_size, order, limits);
    let is_meddled = source.rarely(3);
    let mut planner =
        Planner { slots, table, batches, model, fences: Fences::default(), last: None, is_meddled };
    while source.next_step() {
        planner.step(source);
        planner.check();
    }
}

impl Planner {
    fn step(&mut self, source: &mut Source<'_>) {
        match source.below(16) {
            0..=2 => {
                let rows = self.table.alloc(1, STREAM).expect("host memory");
                for row in rows.into_iter().flatten() {
                    self.model.requests.insert(row.into(), Vec::new());
                }
            }
            3..=6 => self.extend(source),
            7..=9 => self.decode(source),
            10 => self.truncate(source),
            11 => self.finish(source),
            12 => self.fork(source),
            13 => {
                if let Some(fence) = self.fences.pass(source) {
                    self.slots.poll(STREAM).expect("flags can tell");
                    self.model.slots.pass(fence);
                }
            }
            14 if self.is_meddled => self.meddle(source),
            _ => self.share(source),
        }
    }

    /// The row of a request, rarely a free one.
    fn row(&self, source: &mut Source<'_>) -> i64 {
        let at = source.below(self.model.requests.len().max(1));
        match self.model.requests.keys().nth(at) {
            Some(&row) if !source.rarely(24) => row,
            _ => source.index(self.table.table_rows()),
        }
    }

    /// Some rows, usually each once.
    fn rows(&self, source: &mut Source<'_>) -> Vec<i64> {
        let mut rows: Vec<i64> = Vec::new();
        for _ in 0..source.below(5) {
            let row = self.row(source);
            if !rows.contains(&row) || source.rarely(24) {
                rows.push(row);
            }
        }
        rows
    }

    fn wish(&self, source: &mut Source<'_>, row: i64) -> RequestedGrowth {
        let len = int(self.model.len(row));
        let mut prefix = if source.rarely(24) { source.index(40) } else { len };
        let mut cached = None;
        if len == 0 && source.flip() {
            // The full pages of another request, as a prefix cache would pass them.
            let other = self.row(source);
            let page_size = self.model.slots.page_size;
            let pages = self.model.len(other) / page_size;
            let count = source.below(pages + 1) * page_size;
            let slots = self.model.requests.get(&other).map_or(&[][..], |slots| &slots[..count]);
            let mut slots: Vec<i64> = slots.iter().copied().map(int).collect();
            if source.rarely(12) {
                slots.push(source.index(140));
            }
            if !slots.is_empty() && source.rarely(12) {
                let at = source.below(slots.len());
                slots[at] = source.index(140);
            }
            prefix = int(slots.len());
            cached = Some(slots);
        }
        let more = if source.rarely(24) { source.index(60) } else { source.within(0, 12) };
        RequestedGrowth { row, prefix, seq: prefix.saturating_add(more), cached }
    }

    fn extend(&mut self, source: &mut Source<'_>) {
        let wishes: Vec<RequestedGrowth> =
            self.rows(source).into_iter().map(|row| self.wish(source, row)).collect();
        let rows: Vec<i64> = wishes.iter().map(|wish| wish.row).collect();
        let rows = source.index_vec(&rows);
        let prefix_lens: Vec<i64> = wishes.iter().map(|wish| wish.prefix).collect();
        let seq_lens: Vec<i64> = wishes.iter().map(|wish| wish.seq).collect();
        let mut slots = |cached: &Vec<i64>| Prefix::Slots(source.index_vec(cached));
        let prefixes: Vec<Prefix> =
            wishes.iter().map(|wish| wish.cached.as_ref().map_or(Prefix::None, &mut slots)).collect();
        let is_cut = !wishes.is_empty() && source.rarely(24);
        let seq_lens = if is_cut { &seq_lens[1..] } else { &seq_lens[..] };
        let batch = Batch { rows: &rows, prefix_lens: &prefix_lens, seq_lens, prefixes: &prefixes };
        let answer = self.batches.extend(batch, STREAM);
        let expected =
            ensure(!is_cut, ErrorKind::Argument).and_then(|()| self.model.grow(&wishes, wishes.len(), 0));
        self.planned(answer, expected);
    }

    fn decode(&mut self, source: &mut Source<'_>) {
        let rows = self.rows(source);
        let width = if source.rarely(6) { source.below(4) } else { 1 };
        let seq_lens: Vec<i64> = rows
            .iter()
            .map(|&row| if source.rarely(24) { source.index(60) } else { int(self.model.len(row) + width) })
            .collect();
        let sizes: Option<Vec<usize>> =
            source.rarely(3).then(|| (0..source.below(4)).map(|_| source.below(9)).collect());
        let answer = self.batches.decode(
            &source.index_vec(&rows),
            &source.index_vec(&seq_lens),
            width,
            sizes.as_deref(),
            STREAM,
        );
        let wish = |(&row, &seq): (&i64, &i64)| RequestedGrowth {
            row,
            prefix: seq.saturating_sub(int(width)),
            seq,
            cached: None,
        };
        let wishes: Vec<RequestedGrowth> = rows.iter().zip(&seq_lens).map(wish).collect();
        let expected = ensure(width > 0, ErrorKind::Argument)
            .and_then(|()| self.model.padded(rows.len(), sizes.as_deref()))
            .and_then(|padded| self.model.grow(&wishes, padded, width));
        self.planned(answer, expected);
    }

    /// Checks the result of a plan, and all of its arrays.
    fn planned(&mut self, answer: kvpool::base::Result<Option<Plan>>, expected: Verdict<Option<Step>>) {
        let Some(plan) = agree(answer, &expected) else { return };
        let step = expected.ok().flatten();
        assert_eq!(plan.is_some(), step.is_some());
        let (Some(plan), Some(step)) = (plan, step) else { return };
        if let Some(last) = self.last.replace(plan) {
            // Its arrays are overwritten.
            refused(self.batches.field(&last, Field::SeqLens), ErrorKind::Stale);
        }
        assert_eq!((plan.batch_size, plan.padded_batch_size), (step.real, step.requests.len()));
        let lens = || step.requests.iter().map(|(_, prefix, seq)| seq - prefix);
        assert_eq!(plan.padded_num_tokens, lens().sum::<usize>());
        assert_eq!(plan.num_tokens, lens().take(step.real).sum::<usize>());
        assert_eq!(plan.max_seqlen_q, lens().max().unwrap_or(0));
        assert_eq!(plan.max_seqlen_k, step.requests.iter().map(|(.., seq)| *seq).max().unwrap_or(0));
        for (field, expected) in self.fields(&step) {
            let view = self.batches.field(&plan, field).expect("the last plan");
            let found = view.as_ref().map(|view| match field {
                Field::SlotMapping => {
                    let count = view.shape().numel();
                    contents::read::<i64>(view.region(), view.offset(), count)
                }
                _ => ints_of(view).into_iter().map(i64::from).collect(),
            });
            let config = self.batches.config();
            let is_made = match field {
                Field::KvIndices => config.kv_indices,
                Field::BlockTable => config.block_table,
                _ => true,
            };
            assert_eq!(found, is_made.then_some(expected), "{field:?}");
            let on_host = self.batches.host_field(&plan, field).expect("the last plan");
            assert_eq!(on_host.map(|view| view.address()), view.map(|view| view.address()));
        }
    }

    /// The expected contents of every array of a step.
    fn fields(&self, step: &Step) -> Vec<(Field, Vec<i64>)> {
        let page_size = self.model.slots.page_size;
        let width = self.table.max_context_len().div_ceil(page_size);
        let mut fields = Field::ALL.map(|field| (field, Vec::new()));
        let (mut tokens, mut pages) = (0, 0);
        let mut put = |which: Field, values: &mut dyn Iterator<Item = i64>| {
            let (_, list) = fields.iter_mut().find(|(field, _)| *field == which).expect("all are listed");
            list.extend(values);
        };
        put(Field::QoIndptr, &mut std::iter::once(0));
        put(Field::KvIndptr, &mut std::iter::once(0));
        for (at, &(row, prefix, seq)) in step.requests.iter().enumerate() {
            let is_real = at < step.real;
            let slots = if is_real { self.model.requests[&int(row)].clone() } else { vec![0; seq] };
            let own = if is_real { self.model.pages(int(row)) } else { vec![0; seq.div_ceil(page_size)] };
            tokens += seq - prefix;
            pages += own.len();
            let new = || slots[prefix..seq].iter().copied().map(int);
            put(Field::OutCacheLoc, &mut new());
            put(Field::SlotMapping, &mut new().map(|slot| if is_real { slot } else { -1 }));
            put(Field::Positions, &mut (prefix..seq).map(int));
            put(Field::ReqPoolIndices, &mut std::iter::once(int(row)));
            put(Field::SeqLens, &mut std::iter::once(int(seq)));
            put(Field::QoIndptr, &mut std::iter::once(int(tokens)));
            put(Field::KvIndptr, &mut std::iter::once(int(pages)));
            let in_last = if seq == 0 { 0 } else { (seq - 1) % page_size + 1 };
            put(Field::KvLastPageLen, &mut std::iter::once(int(in_last)));
            put(Field::KvIndices, &mut own.iter().copied().map(int));
            let line = own.iter().copied().map(int).chain(std::iter::repeat(0)).take(width);
            put(Field::BlockTable, &mut { line });
        }
        fields.to_vec()
    }

    /// Returns a fence in one case of three.
    fn fence(&mut self, source: &mut Source<'_>) -> (Option<usize>, Option<Arc<dyn Fence>>) {
        source.rarely(3).then(|| self.fences.make()).unzip()
    }

    fn truncate(&mut self, source: &mut Source<'_>) {
        let (rows, (fence, after)) = (self.rows(source), self.fence(source));
        let mut lens: Vec<i64> = rows.iter().map(|&row| source.index(self.model.len(row) + 1)).collect();
        if source.rarely(16) {
            lens.pop();
        }
        let answer =
            self.batches.truncate(&source.index_vec(&rows), &source.index_vec(&lens), after.as_ref(), STREAM);
        let expected = self.model.truncate(&rows, &lens, fence);
        self.given_back(answer, expected);
    }

    fn finish(&mut self, source: &mut Source<'_>) {
        let (rows, (fence, after)) = (self.rows(source), self.fence(source));
        let lens: Option<Vec<i64>> = source.flip().then(|| {
            let len =
                |&row: &i64| if source.rarely(16) { source.index(30) } else { int(self.model.len(row)) };
            rows.iter().map(len).collect()
        });
        let given_lens = lens.as_ref().map(|lens| source.index_vec(lens));
        let answer =
            self.batches.finish(&source.index_vec(&rows), given_lens.as_ref(), after.as_ref(), STREAM);
        let expected = self.model.finish(&rows, lens.as_deref(), fence);
        self.given_back(answer.map(|done| (done.pages, done.bad)), expected);
    }

    fn given_back(
        &mut self,
        answer: kvpool::base::Result<(usize, kvpool::index::BadFrees)>,
        expected: Verdict<(usize, usize)>,
    ) {
        // A strict allocator reports pages that other code has freed, after it has freed the rest.
        let is_told = |dropped: usize| dropped > 0 && self.slots.strict();
        let expected = expected.and_then(|(given, dropped)| {
            ensure(!is_told(dropped), ErrorKind::IndexOwnership)?;
            Ok((given, dropped))
        });
        if let (Some((given, bad)), Ok(expected)) = (agree(answer, &expected), expected) {
            assert_eq!((given, bad.dropped()), expected);
        }
    }

    fn fork(&mut self, source: &mut Source<'_>) {
        let (src, dst) = (self.row(source), self.row(source));
        let len = source.index(self.model.len(src) + 1);
        let answer = self.batches.fork(src, dst, len, STREAM);
        let expected = self.model.fork(src, dst, len);
        let Some(answer) = agree(answer, &expected) else { return };
        let found =
            answer.map(|views| views.map(|view| ints_of(&view).into_iter().map(size).collect::<Vec<_>>()));
        assert_eq!(found, expected.ok().flatten());
    }

    /// Lets a prefix cache become an owner of slots, or free them.
    fn share(&mut self, source: &mut Source<'_>) {
        let given = given(source, &self.model.slots);
        agree(self.slots.share(&source.index_vec(&given), STREAM), &self.model.slots.share(&given));
    }

    /// Frees slots that may belong to a request, or a row that does.
    fn meddle(&mut self, source: &mut Source<'_>) {
        if source.rarely(6) {
            let row = self.row(source);
            let _ = self.table.free(&IndexVec::I64(vec![row]), STREAM).expect("not strict");
            // The next call notices it.
            self.batches.finish(&IndexVec::I64(Vec::new()), None, None, STREAM).expect("it ends nothing");
            self.model.abandon(row);
            return;
        }
        let given = given(source, &self.model.slots);
        let (fence, after) = self.fence(source);
        let answer = self.slots.free_keeping(
            &Indices::Host(source.index_vec(&given)),
            None,
            after.as_ref(),
            || None,
            STREAM,
        );
        let before = (self.model.slots.clone(), self.model.slots.dropped);
        let pages = self.model.slots.give_back(&given, fence.is_some());
        let dropped = self.model.slots.dropped - before.1;
        let expected = ensure(dropped == 0 || !self.slots.strict(), ErrorKind::IndexOwnership);
        match agree(answer, &expected) {
            None => self.model.slots = before.0,
            Some(bad) => {
                assert_eq!(bad.dropped(), dropped);
                match fence {
                    None => self.model.slots.release(pages),
                    Some(fence) => self.model.slots.fenced.push((fence, pages)),
                }
            }
        }
    }

    fn check(&mut self) {
        check_slots(&self.slots, &self.model.slots);
        let columns = self.table.max_context_len();
        let table = ints_of(self.table.req_to_token());
        let (mut with_slots, mut tokens) = (0, 0);
        for (&row, slots) in &self.model.requests {
            let line = &table[size(row) * columns..][..slots.len()];
            assert!(line.iter().copied().map(size).eq(slots.iter().copied()), "row {row}");
            assert_eq!(size(self.batches.seq_len(row).expect("it is live")), slots.len());
            with_slots += usize::from(!slots.is_empty());
            tokens += slots.len();
        }
        assert_eq!(self.batches.totals(), (with_slots, tokens));
        if !self.is_meddled {
            self.check_owners();
        }
    }

    /// Checks that a page has one owner for each of its requests.
    fn check_owners(&self) {
        let pages = || self.model.requests.keys().flat_map(|&row| self.model.pages(row));
        for page in pages() {
            let owners = self.model.slots.owners.get(&page).copied().unwrap_or(0);
            assert!(pages().filter(|other| *other == page).count() <= owners, "page {page}");
        }
    }
}
