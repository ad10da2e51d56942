//! The slots of requests as plain lists, and the expected contents of a planned step.

use std::collections::BTreeMap;

use kvpool::base::ErrorKind;
use kvpool::index::Order;

use super::slot_model::SlotModel;
use super::{Refusal, Verdict, ensure, int, places, size};

/// The sizes of the pools, as the planner checks them.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) max_batch: usize,
    pub(super) max_tokens: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) padding_row: bool,
}

/// The growth of one request of a batch, as the caller asks for it.
#[derive(Clone, Debug)]
pub(super) struct RequestedGrowth {
    pub(super) row: i64,
    pub(super) prefix: i64,
    pub(super) seq: i64,
    pub(super) cached: Option<Vec<i64>>,
}

/// A planned step, one entry per request including padding: its row, and the tokens before and after.
pub(super) struct Step {
    pub(super) requests: Vec<(usize, usize, usize)>,
    /// The number of requests without padding.
    pub(super) real: usize,
}

pub(super) struct Model {
    pub(super) slots: SlotModel,
    /// The slots of its tokens by row.
    pub(super) requests: BTreeMap<i64, Vec<usize>>,
    /// The frees of the allocator when each request took its first slots.
    since: BTreeMap<i64, usize>,
    limits: Limits,
}

impl Model {
    pub(super) fn new(slots: usize, page_size: usize, order: Order, limits: Limits) -> Self {
        Self {
            slots: SlotModel::new(slots, page_size, order),
            requests: BTreeMap::new(),
            since: BTreeMap::new(),
            limits,
        }
    }

    pub(super) fn len(&self, row: i64) -> usize {
        self.requests.get(&row).map_or(0, Vec::len)
    }

    /// The pages of a request.
    pub(super) fn pages(&self, row: i64) -> Vec<usize> {
        let slots = self.requests.get(&row).map_or(&[][..], Vec::as_slice);
        slots.chunks(self.slots.page_size).map(|page| page[0] / self.slots.page_size).collect()
    }

    /// Checks that each row is allocated and listed once.
    fn name(&self, rows: &[i64]) -> Verdict {
        places(rows, self.limits.rows)?;
        for (at, row) in rows.iter().enumerate() {
            ensure(self.requests.contains_key(row), Refusal::at(ErrorKind::IndexOwnership, *row))?;
            ensure(!rows[..at].contains(row), ErrorKind::Argument)?;
        }
        Ok(())
    }

    /// The pages of a cached prefix.
    fn cached(&self, wish: &RequestedGrowth, cached: &[i64]) -> Verdict<Vec<usize>> {
        let size = int(self.slots.page_size);
        let is_of_new = self.len(wish.row) == 0;
        let is_whole = int(cached.len()) == wish.prefix && wish.prefix % size == 0;
        ensure(is_of_new && is_whole, ErrorKind::Argument)?;
        let mut pages = Vec::new();
        for slots in cached.chunks(self.slots.page_size) {
            let page = usize::try_from(slots[0]).ok().map(|slot| slot / self.slots.page_size);
            let page = page.filter(|page| self.slots.is_owned(*page));
            pages.push(page.ok_or(Refusal::at(ErrorKind::IndexOwnership, slots[0]))?);
            let is_in_order = slots.windows(2).all(|pair| pair[0].checked_add(1) == Some(pair[1]));
            ensure(slots[0] % size == 0 && is_in_order, ErrorKind::Argument)?;
        }
        Ok(pages)
    }

    /// Grows requests, and pads the batch up to `padded` requests with ones of `padding` tokens.
    pub(super) fn grow(
        &mut self,
        wishes: &[RequestedGrowth],
        padded: usize,
        padding: usize,
    ) -> Verdict<Option<Step>> {
        ensure(padded <= self.limits.max_batch, ErrorKind::Argument)?;
        self.name(&wishes.iter().map(|wish| wish.row).collect::<Vec<_>>())?;
        let page_size = self.slots.page_size;
        let (mut requests, mut cached_pages) = (Vec::new(), Vec::new());
        let (mut tokens, mut needed, mut longest) = (0, 0, 0);
        let mut are_open_owned = true;
        for wish in wishes {
            let is_growth = 0 <= wish.prefix && wish.prefix <= wish.seq && wish.seq <= i32::MAX.into();
            ensure(is_growth, ErrorKind::Argument)?;
            let (prefix, seq) = (size(wish.prefix), size(wish.seq));
            let cached = wish.cached.as_deref().filter(|cached| !cached.is_empty());
            let has = self.len(wish.row);
            match cached {
                None => {
                    ensure(has == prefix, ErrorKind::Argument)?;
                    if prefix % page_size != 0 && seq > prefix {
                        let open = self.requests[&wish.row][prefix - 1] / page_size;
                        are_open_owned &= self.slots.is_owned(open);
                    }
                    cached_pages.push(Vec::new());
                }
                Some(cached) => cached_pages.push(self.cached(wish, cached)?),
            }
            tokens += seq - prefix;
            needed += seq.div_ceil(page_size) - prefix.div_ceil(page_size);
            longest = longest.max(seq);
            requests.push((size(wish.row), prefix, seq));
        }
        ensure(are_open_owned, ErrorKind::IndexOwnership)?;
        let missing = padded - wishes.len();
        if missing > 0 {
            longest = longest.max(padding);
        }
        ensure(longest <= self.limits.columns, ErrorKind::Index)?;
        ensure(tokens + missing * padding <= self.limits.max_tokens, ErrorKind::Argument)?;
        let Some(taken) = self.slots.take(needed) else { return Ok(None) };
        self.slots.join(&cached_pages.concat());
        let mut taken = taken.into_iter();
        for ((wish, cached), &(_, prefix, seq)) in wishes.iter().zip(cached_pages).zip(&requests) {
            let slots = self.requests.get_mut(&wish.row).expect("it was named");
            if slots.is_empty() {
                self.since.insert(wish.row, self.slots.frees);
            }
            slots.extend(cached.iter().flat_map(|page| page * page_size..(page + 1) * page_size));
            for position in prefix..seq {
                let slot = match position % page_size {
                    0 => taken.next().expect("so many were taken") * page_size,
                    _ => slots[position - 1] + 1,
                };
                slots.push(slot);
            }
        }
        requests.resize(padded, (0, 0, padding));
        Ok(Some(Step { requests, real: wishes.len() }))
    }

    /// The padded size of a batch of `count`.
    pub(super) fn padded(&self, count: usize, sizes: Option<&[usize]>) -> Verdict<usize> {
        let Some(sizes) = sizes else { return Ok(count) };
        let padded = sizes.iter().copied().filter(|size| *size >= count).min().ok_or(ErrorKind::Argument)?;
        ensure(padded == count || self.limits.padding_row, ErrorKind::Argument)?;
        Ok(padded)
    }

    /// Cuts requests; returns how many pages were freed, and how many of them were no longer owned.
    pub(super) fn truncate(
        &mut self,
        rows: &[i64],
        lens: &[i64],
        fence: Option<usize>,
    ) -> Verdict<(usize, usize)> {
        ensure(rows.len() == lens.len(), ErrorKind::Argument)?;
        self.name(rows)?;
        for (&row, &len) in rows.iter().zip(lens) {
            let slots = &self.requests[&row];
            let len =
                usize::try_from(len).ok().filter(|len| *len <= slots.len()).ok_or(ErrorKind::Argument)?;
            let page_size = self.slots.page_size;
            let is_within = len < slots.len() && len % page_size != 0;
            let is_read = is_within && self.slots.is_shared(slots[len] / page_size);
            ensure(!is_read, ErrorKind::IndexOwnership)?;
        }
        let lens: Vec<usize> = lens.iter().copied().map(size).collect();
        Ok(self.cut(rows, &lens, fence))
    }

    /// Ends requests, whose lengths must equal `lens` if given.
    pub(super) fn finish(
        &mut self,
        rows: &[i64],
        lens: Option<&[i64]>,
        fence: Option<usize>,
    ) -> Verdict<(usize, usize)> {
        self.name(rows)?;
        let has: Vec<i64> = rows.iter().map(|&row| int(self.len(row))).collect();
        ensure(lens.is_none_or(|lens| lens == has), ErrorKind::Argument)?;
        let done = self.cut(rows, &vec![0; rows.len()], fence);
        self.requests.retain(|row, _| !rows.contains(row));
        Ok(done)
    }

    /// Ends a request whose row was freed without it: what was not freed since goes back.
    pub(super) fn abandon(&mut self, row: i64) {
        let since = self.since.get(&row).copied().unwrap_or(0);
        let own = self.pages(row).into_iter().filter(|page| !self.slots.is_freed_since(*page, since));
        let slots: Vec<i64> = own.map(|page| int(page * self.slots.page_size)).collect();
        let pages = self.slots.give_back(&slots, false);
        self.slots.release(pages);
        self.requests.remove(&row);
    }

    fn cut(&mut self, rows: &[i64], lens: &[usize], fence: Option<usize>) -> (usize, usize) {
        let (dropped, mut given) = (self.slots.dropped, 0);
        for (&row, &len) in rows.iter().zip(lens) {
            let gone = self.pages(row).split_off(len.div_ceil(self.slots.page_size));
            let slots: Vec<i64> = gone.iter().map(|page| int(page * self.slots.page_size)).collect();
            given += slots.len();
            self.requests.get_mut(&row).expect("it was named").truncate(len);
            let pages = self.slots.give_back(&slots, fence.is_some());
            match fence {
                None => self.slots.release(pages),
                Some(fence) => self.slots.fenced.push((fence, pages)),
            }
        }
        (given, self.slots.dropped - dropped)
    }

    /// Shares the first tokens of a request with another; returns the slots to copy to and from.
    pub(super) fn fork(&mut self, src: i64, dst: i64, len: i64) -> Verdict<Option<[Vec<usize>; 2]>> {
        self.name(&[src, dst])?;
        let len = usize::try_from(len).ok().filter(|len| *len <= self.len(src)).ok_or(ErrorKind::Argument)?;
        ensure(self.len(dst) == 0, ErrorKind::Argument)?;
        let page_size = self.slots.page_size;
        let pages = self.pages(src)[..len.div_ceil(page_size)].to_vec();
        ensure(pages.iter().all(|page| self.slots.is_owned(*page)), ErrorKind::IndexOwnership)?;
        let (full, rest) = (len / page_size, len % page_size);
        let Some(own) = self.slots.take(usize::from(rest > 0)) else { return Ok(None) };
        self.slots.join(&pages[..full]);
        let mut slots = self.requests[&src][..full * page_size].to_vec();
        let from = self.requests[&src][full * page_size..len].to_vec();
        let to: Vec<usize> = own.iter().flat_map(|page| page * page_size..page * page_size + rest).collect();
        slots.extend(&to);
        self.requests.insert(dst, slots);
        self.since.insert(dst, self.slots.frees);
        Ok(Some([to, from]))
    }
}
