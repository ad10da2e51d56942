//! The slots of requests as plain lists, and the expected contents of a planned step.

use std::collections::BTreeMap;

use kvpool::index::Order;

use super::slot_model::SlotModel;
use super::{int, size};

/// The call is refused.
pub(super) struct Refused;

/// The result of a call; `None` when there are not enough slots.
pub(super) type Answer<T> = Result<Option<T>, Refused>;

/// The sizes of the pools, as the planner checks them.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) max_batch: usize,
    pub(super) max_tokens: usize,
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
    limits: Limits,
}

impl Model {
    pub(super) fn new(slots: usize, page_size: usize, order: Order, limits: Limits) -> Self {
        Self { slots: SlotModel::new(slots, page_size, order), requests: BTreeMap::new(), limits }
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
    fn name(&self, rows: &[i64]) -> Result<(), Refused> {
        let is_named = |(at, row)| self.requests.contains_key(row) && !rows[..at].contains(row);
        if rows.iter().enumerate().all(is_named) { Ok(()) } else { Err(Refused) }
    }

    /// The pages of a cached prefix, if it is one.
    fn cached(&self, wish: &RequestedGrowth, cached: &[i64]) -> Option<Vec<usize>> {
        let size = int(self.slots.page_size);
        let is_right = self.len(wish.row) == 0
            && int(cached.len()) == wish.prefix
            && wish.prefix % size == 0
            && cached.chunks(self.slots.page_size).all(|page| {
                page[0] % size == 0
                    && page.windows(2).all(|pair| pair[0].checked_add(1) == Some(pair[1]))
                    && usize::try_from(page[0] / size).is_ok_and(|page| self.slots.is_owned(page))
            });
        let pages = cached.chunks(self.slots.page_size).map(|page| page[0] / size);
        is_right.then(|| pages.map(super::size).collect())
    }

    /// Grows requests, and pads the batch up to `padded` requests with ones of `padding` tokens.
    pub(super) fn grow(&mut self, wishes: &[RequestedGrowth], padded: usize, padding: usize) -> Answer<Step> {
        if padded > self.limits.max_batch {
            return Err(Refused);
        }
        self.name(&wishes.iter().map(|wish| wish.row).collect::<Vec<_>>())?;
        let page_size = self.slots.page_size;
        let (mut requests, mut cached_pages) = (Vec::new(), Vec::new());
        let (mut tokens, mut needed, mut longest) = (0, 0, 0);
        for wish in wishes {
            if wish.prefix < 0 || wish.prefix > wish.seq || wish.seq > i32::MAX.into() {
                return Err(Refused);
            }
            let (prefix, seq) = (size(wish.prefix), size(wish.seq));
            let cached = wish.cached.as_deref().filter(|cached| !cached.is_empty());
            let has = self.len(wish.row);
            match cached {
                None if has != prefix => return Err(Refused),
                None if prefix % page_size != 0 && seq > prefix => {
                    let open = self.requests[&wish.row][prefix - 1] / page_size;
                    if !self.slots.is_owned(open) {
                        return Err(Refused);
                    }
                    cached_pages.push(Vec::new());
                }
                None => cached_pages.push(Vec::new()),
                Some(cached) => cached_pages.push(self.cached(wish, cached).ok_or(Refused)?),
            }
            tokens += seq - prefix;
            needed += seq.div_ceil(page_size) - prefix.div_ceil(page_size);
            longest = longest.max(seq);
            requests.push((size(wish.row), prefix, seq));
        }
        let missing = padded - wishes.len();
        if missing > 0 {
            longest = longest.max(padding);
        }
        if longest > self.limits.columns || tokens + missing * padding > self.limits.max_tokens {
            return Err(Refused);
        }
        let Some(taken) = self.slots.take(needed) else { return Ok(None) };
        self.slots.join(&cached_pages.concat());
        let mut taken = taken.into_iter();
        for ((wish, cached), &(_, prefix, seq)) in wishes.iter().zip(cached_pages).zip(&requests) {
            let slots = self.requests.get_mut(&wish.row).expect("it was named");
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
    pub(super) fn padded(&self, count: usize, sizes: Option<&[usize]>) -> Result<usize, Refused> {
        let Some(sizes) = sizes else { return Ok(count) };
        let padded = sizes.iter().copied().filter(|size| *size >= count).min().ok_or(Refused)?;
        if padded > count && !self.limits.padding_row { Err(Refused) } else { Ok(padded) }
    }

    /// Cuts requests; returns how many pages were freed, and how many of them were no longer owned.
    pub(super) fn truncate(
        &mut self,
        rows: &[i64],
        lens: &[i64],
        fence: Option<usize>,
    ) -> Result<(usize, usize), Refused> {
        if rows.len() != lens.len() {
            return Err(Refused);
        }
        self.name(rows)?;
        for (&row, &len) in rows.iter().zip(lens) {
            let slots = &self.requests[&row];
            let len = usize::try_from(len).ok().filter(|len| *len <= slots.len()).ok_or(Refused)?;
            let page_size = self.slots.page_size;
            if len < slots.len() && len % page_size != 0 && self.slots.is_shared(slots[len] / page_size) {
                return Err(Refused);
            }
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
    ) -> Result<(usize, usize), Refused> {
        self.name(rows)?;
        let has: Vec<i64> = rows.iter().map(|&row| int(self.len(row))).collect();
        if lens.is_some_and(|lens| lens != has) {
            return Err(Refused);
        }
        let done = self.cut(rows, &vec![0; rows.len()], fence);
        self.requests.retain(|row, _| !rows.contains(row));
        Ok(done)
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
    pub(super) fn fork(&mut self, src: i64, dst: i64, len: i64) -> Answer<[Vec<usize>; 2]> {
        self.name(&[src, dst])?;
        let len = usize::try_from(len).ok().filter(|len| *len <= self.len(src)).ok_or(Refused)?;
        if self.len(dst) > 0 {
            return Err(Refused);
        }
        let page_size = self.slots.page_size;
        let pages = self.pages(src)[..len.div_ceil(page_size)].to_vec();
        if !pages.iter().all(|page| self.slots.is_owned(*page)) {
            return Err(Refused);
        }
        let (full, rest) = (len / page_size, len % page_size);
        let Some(own) = self.slots.take(usize::from(rest > 0)) else { return Ok(None) };
        self.slots.join(&pages[..full]);
        let mut slots = self.requests[&src][..full * page_size].to_vec();
        let from = self.requests[&src][full * page_size..len].to_vec();
        let to: Vec<usize> = own.iter().flat_map(|page| page * page_size..page * page_size + rest).collect();
        slots.extend(&to);
        self.requests.insert(dst, slots);
        Ok(Some([to, from]))
    }
}
