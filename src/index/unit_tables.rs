//! The units of each request in every group of a layout, by row.
//!
//! [`UnitTables`] records which units a request has: a page table for each group. [`Slabs`] owns the units. Growing a
//! batch costs a few steps for each request and group, and for each unit that is taken or freed.

use std::fmt;
use std::ops::Range;

use crate::base::bounded::narrow;
use crate::base::{Error, Id, RequestRow, Result, try_with_capacity, try_zeros, widen};
use crate::layout::{Group, GroupKind};

use super::{PageSize, Slabs};

/// How the units of a group follow from the tokens of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitRule {
    kind: GroupKind,
    /// Tokens of a unit; of no meaning to a state.
    tokens: PageSize,
    /// Tokens of an entry.
    stride: PageSize,
    /// Entries of a unit.
    entries: PageSize,
    /// Units of the tokens at the beginning that stay.
    sinks: u32,
    /// Units of a request of the greatest length; for a state, the numbers of its unit.
    width: u32,
}

impl UnitRule {
    /// Returns the rule of a group with pages of `page_size` tokens, for requests of up to `max_tokens` tokens. The
    /// unit of a state has `numbers` numbers.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for pages or numbers beyond int32.
    pub fn new(group: &Group, page_size: usize, max_tokens: u32, numbers: usize) -> Result<Self> {
        let int32 = |what: &str, number: usize| {
            i32::try_from(number).map(i32::unsigned_abs).map_err(|_| {
                Error::config(format!(
                    "{what} of group {} is {number}, beyond {}, the largest int32",
                    group.name(),
                    i32::MAX
                ))
            })
        };
        let tokens = int32("a unit", group.unit_tokens(page_size).unwrap_or(1))?;
        let sinks = group.kind().sinks().div_ceil(widen(tokens));
        let width =
            if group.kind() == GroupKind::State { numbers } else { widen(max_tokens.div_ceil(tokens)) };
        let stride = int32("the stride", group.stride())?;
        Ok(Self {
            kind: group.kind(),
            tokens: PageSize::new(tokens),
            stride: PageSize::new(stride),
            entries: PageSize::new(tokens / stride),
            // More than a request has are all.
            sinks: narrow(sinks.min(width)),
            width: int32("a request", width)?,
        })
    }

    /// Returns whether a request has one unit, whatever its length.
    #[must_use]
    pub fn is_state(self) -> bool {
        self.kind == GroupKind::State
    }

    /// Returns the tokens of a unit.
    #[must_use]
    pub const fn tokens(self) -> u32 {
        self.tokens.slots()
    }

    /// Returns the tokens of an entry.
    #[must_use]
    pub const fn stride(self) -> u32 {
        self.stride.slots()
    }

    /// Returns the units of the tokens at the beginning that stay.
    #[must_use]
    pub const fn sinks(self) -> u32 {
        self.sinks
    }

    /// Returns the most units, or numbers, of a request.
    #[must_use]
    pub const fn width(self) -> u32 {
        self.width
    }

    /// Returns the units that `tokens` tokens reach, with those that are freed since.
    #[inline]
    fn end(self, tokens: u32) -> u32 {
        match self.kind {
            GroupKind::State => self.width,
            _ => self.tokens.pages(tokens),
        }
    }

    /// Returns the first unit, sinks apart, that the token after `tokens` tokens sees.
    #[inline]
    fn first(self, tokens: u32) -> u32 {
        match self.kind {
            GroupKind::Full | GroupKind::State => 0,
            kind => self.tokens.page(narrow(kind.first_seen(widen(tokens)))),
        }
    }

    /// Returns the units with whole entries of `tokens` tokens, and the entries of the last one.
    #[inline]
    #[must_use]
    pub fn filled(self, tokens: u32) -> (u32, u32) {
        let entries = self.stride.page(tokens);
        (self.entries.pages(entries), self.entries.last_page_len(entries))
    }

    /// Returns the position of the unit of a token.
    #[inline]
    #[must_use]
    pub const fn unit(self, token: u32) -> u32 {
        self.tokens.page(token)
    }

    /// Returns whether each token has an entry of its own.
    #[inline]
    #[must_use]
    pub const fn is_of_each_token(self) -> bool {
        self.stride.slots() == 1
    }

    /// Returns the slot of a token in a unit, if each has an entry of its own.
    #[inline]
    #[must_use]
    pub const fn slot_of_each(self, unit: i32, token: u32) -> i32 {
        unit * self.tokens.slots().cast_signed() + self.tokens.offset(token).cast_signed()
    }

    /// Returns the slot of a token in a unit, and whether the token completes its entry.
    #[inline]
    #[must_use]
    pub fn slot(self, unit: i32, token: u32) -> (i32, bool) {
        let entry = self.stride.page(self.tokens.offset(token));
        let slot = unit * self.entries.slots().cast_signed() + entry.cast_signed();
        (slot, self.stride.offset(token + 1) == 0)
    }
}

/// The units of a request in a group, by position: its sinks, and `first..end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptUnits {
    /// The sinks are `0..sinks`.
    pub sinks: u32,
    /// The first unit behind the sinks, at least `sinks`.
    pub first: u32,
    /// The unit after the last.
    pub end: u32,
}

impl KeptUnits {
    /// Returns the number of units.
    #[inline]
    #[must_use]
    pub const fn len(self) -> u32 {
        self.sinks + (self.end - self.first)
    }

    /// Returns whether there are none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Returns the positions, in two runs.
    #[inline]
    #[must_use]
    pub fn runs(self) -> [Range<usize>; 2] {
        [0..widen(self.sinks), widen(self.first)..widen(self.end)]
    }

    /// Returns the positions from `from` on, in two runs.
    #[inline]
    #[must_use]
    pub fn runs_from(self, from: u32) -> [Range<usize>; 2] {
        let from = widen(from);
        self.runs().map(|run| run.start.max(from).min(run.end)..run.end)
    }

    /// Returns the part before unit `end`.
    #[must_use]
    pub fn until(self, end: u32) -> Self {
        let end = end.min(self.end);
        Self { sinks: self.sinks.min(end), first: self.first.min(end), end }
    }
}

/// The growth of one request in a batch, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitGrowth {
    /// The row of the request.
    pub row: RequestRow,
    /// Tokens that had units before.
    pub had: u32,
    /// Leading tokens that need no computation.
    pub prefix: u32,
    /// Tokens afterwards.
    pub seq: u32,
}

impl UnitGrowth {
    /// Returns the number of tokens to compute.
    #[must_use]
    pub const fn new_tokens(self) -> u32 {
        self.seq - self.prefix
    }
}

/// The units of one group, by row.
#[derive(Clone)]
struct UnitTable {
    rule: UnitRule,
    /// The unit at position `at` of `row` is `row * width + at`.
    units: Vec<i32>,
    /// By row.
    kept: Vec<KeptUnits>,
    /// Leading positions that a cache owns, by row.
    leased: Vec<u32>,
    /// Positions from which on the units have changed since they were last written elsewhere, by row.
    changed: Vec<u32>,
}

impl UnitTable {
    fn line(&self, row: RequestRow) -> &[i32] {
        let (at, width) = (widen(row.number()), widen(self.rule.width));
        &self.units[at * width..(at + 1) * width]
    }

    fn line_mut(&mut self, row: RequestRow) -> &mut [i32] {
        let (at, width) = (widen(row.number()), widen(self.rule.width));
        &mut self.units[at * width..(at + 1) * width]
    }

    /// Lists the units of `positions` that the request owns.
    fn list(&self, row: RequestRow, positions: Range<usize>, to: &mut Vec<u32>) {
        let from = positions.start.max(widen(self.leased[widen(row.number())])).min(positions.end);
        to.extend(self.line(row)[from..positions.end].iter().map(|unit| unit.cast_unsigned()));
    }

    /// Drops what the token after `tokens` tokens does not see, and lists it.
    #[inline]
    fn trim(&mut self, row: RequestRow, tokens: u32, freed: &mut Vec<u32>) {
        let kept = self.kept[widen(row.number())];
        let first = self.rule.first(tokens).min(kept.end);
        if first > kept.first {
            self.list(row, widen(kept.first)..widen(first), freed);
            self.kept[widen(row.number())].first = first;
        }
    }

    /// Drops the positions from `end` on, and lists their units.
    fn cut(&mut self, row: RequestRow, end: u32, freed: &mut Vec<u32>) {
        let at = widen(row.number());
        for run in self.kept[at].runs_from(end) {
            self.list(row, run, freed);
        }
        self.kept[at] = self.kept[at].until(end);
        self.changed[at] = self.changed[at].min(end);
    }

    /// Appends units up to position `end`, of the first ones of `taken`.
    #[inline]
    fn append(&mut self, row: RequestRow, end: u32, taken: &mut std::slice::Iter<'_, u32>) {
        let at = widen(row.number());
        let begin = self.kept[at].end;
        if begin < end {
            let sinks = self.rule.sinks;
            for (place, unit) in self.line_mut(row)[widen(begin)..widen(end)].iter_mut().zip(taken) {
                *place = unit.cast_signed();
            }
            let kept = &mut self.kept[at];
            kept.end = end;
            kept.sinks = sinks.min(end);
            kept.first = kept.first.max(kept.sinks);
        }
    }
}

/// Frees units, sorted, so that those of a slab are freed together.
fn free_sorted(slabs: &mut Slabs, group: usize, units: &mut [u32]) {
    if !units.is_sorted() {
        units.sort_unstable();
    }
    slabs.free_held(group, units);
}

#[derive(Clone, Copy, Default)]
struct UnitRequest {
    /// Tokens that have units.
    len: u32,
    /// Leading tokens that a cache keeps.
    leased: u32,
    /// Whether the request publishes to a cache.
    publishes: bool,
    /// Whether a cache takes units of the request at this moment.
    is_handing_over: bool,
    /// The last batch with this request.
    batch: u64,
    /// Tokens that ended when the arena was cleared; 0 if the request grew again.
    cleared: u32,
}

/// The units of every request in every group.
///
/// A request of a group of pages has units in the order of its tokens. Those behind its window or chunk are freed when
/// it grows, its sinks stay. A request has one unit of each group of states.
///
/// ```
/// use kvpool::base::{DType, Id, RequestRow};
/// use kvpool::index::{AdoptedUnits, KeptUnits, SlabCounts, SlabUnits, Slabs, UnitGrowth, UnitRule, UnitTables};
/// use kvpool::layout::{Group, GroupKind, Plane};
/// let k = vec![Plane::new("k", DType::U8, &[8]).unwrap()];
/// let window = Group::new("window", GroupKind::Window { tokens: 4, sinks: 0 }, &[0], k).unwrap();
/// let mut slabs = Slabs::new(9, &[SlabUnits { units: 1, numbers: 1, floor: 0 }]).unwrap();
/// let mut tables = UnitTables::new(2, 4, vec![UnitRule::new(&window, 4, 64, 1).unwrap()]).unwrap();
/// let row = RequestRow::new(1);
/// // Nothing of a cache is kept for it.
/// tables.adopt(row, 0, &[AdoptedUnits::default()]);
/// let grow = |tables: &mut UnitTables, slabs: &mut Slabs, had, seq| {
///     tables.grow(&[UnitGrowth { row, had, prefix: had, seq }], slabs).unwrap().unwrap();
///     tables.kept(0, row).len()
/// };
/// assert_eq!(grow(&mut tables, &mut slabs, 0, 16), 4);
/// // The token at position 16 sees positions 13 to 16: pages 3 and 4.
/// assert_eq!(grow(&mut tables, &mut slabs, 16, 17), 2);
/// let kept: KeptUnits = tables.kept(0, row);
/// assert_eq!((kept.len(), slabs.held()), (2, 2));
/// let SlabCounts { in_use, high_water, .. } = slabs.counts(0);
/// assert_eq!((in_use, high_water), (2, 4));
/// ```
#[derive(Clone)]
pub struct UnitTables {
    /// Tokens of a page: a cache keeps whole ones.
    page: PageSize,
    groups: Vec<UnitTable>,
    requests: Vec<UnitRequest>,
    batches: u64,
    /// Kept for its capacity.
    freed: Vec<u32>,
}

impl fmt::Debug for UnitTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnitTables")
            .field("groups", &self.groups.len())
            .field("rows", &self.requests.len())
            .finish_non_exhaustive()
    }
}

/// The units of a group that a cache keeps for a request: those of the first tokens, as far as the next one sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdoptedUnits {
    /// Their positions.
    pub kept: KeptUnits,
    /// The units, in their order.
    pub units: Vec<u32>,
}

/// What a batch could not take: numbers of units by group.
pub type MissingUnits = Vec<usize>;

impl UnitTables {
    /// Creates requests without tokens, in `rows` rows, with a rule for each group and pages of `page_size` tokens.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the tables.
    pub fn new(rows: usize, page_size: usize, rules: Vec<UnitRule>) -> Result<Self> {
        let mut groups = try_with_capacity(rules.len())?;
        for rule in rules {
            let units = try_zeros(rows * widen(rule.width))?;
            let (kept, leased) = (try_zeros(rows)?, try_zeros(rows)?);
            groups.push(UnitTable { rule, units, kept, leased, changed: try_zeros(rows)? });
        }
        let page = PageSize::new(narrow(page_size));
        Ok(Self { page, groups, requests: try_zeros(rows)?, batches: 0, freed: Vec::new() })
    }

    /// Returns the number of groups.
    #[must_use]
    pub const fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Returns the rule of a group.
    #[must_use]
    pub fn rule(&self, group: usize) -> UnitRule {
        self.groups[group].rule
    }

    /// Returns the tokens of a request that have units.
    #[must_use]
    pub fn len(&self, row: RequestRow) -> u32 {
        self.requests[widen(row.number())].len
    }

    /// Returns the number of requests with tokens, and the number of their tokens.
    #[must_use]
    pub fn totals(&self) -> (usize, usize) {
        let live = self.requests.iter().filter(|request| request.len > 0);
        live.fold((0, 0), |(requests, tokens), request| (requests + 1, tokens + widen(request.len)))
    }

    /// Returns the positions at which a request has units of a group.
    #[inline]
    #[must_use]
    pub fn kept(&self, group: usize, row: RequestRow) -> KeptUnits {
        self.groups[group].kept[widen(row.number())]
    }

    /// Returns the units of a request in a group by their positions; those that it does not keep are of no meaning.
    #[inline]
    #[must_use]
    pub fn line(&self, group: usize, row: RequestRow) -> &[i32] {
        self.groups[group].line(row)
    }

    /// Returns the position from which on the units of a request differ from what was recorded as written.
    #[inline]
    #[must_use]
    pub fn changed(&self, group: usize, row: RequestRow) -> u32 {
        self.groups[group].changed[widen(row.number())]
    }

    /// Records that all units of a request are written elsewhere, too.
    #[inline]
    pub fn record_written(&mut self, group: usize, row: RequestRow) {
        let UnitTable { kept, changed, .. } = &mut self.groups[group];
        changed[widen(row.number())] = kept[widen(row.number())].end;
    }

    /// Begins a batch, in which a row is named once.
    pub const fn begin_batch(&mut self) {
        self.batches += 1;
    }

    /// Returns whether a row was named in this batch before.
    pub fn is_named_again(&mut self, row: RequestRow) -> bool {
        let request = &mut self.requests[widen(row.number())];
        std::mem::replace(&mut request.batch, self.batches) == self.batches
    }

    /// Returns the growth of the request at `position` of a batch from `prefix` to `seq` tokens. A new request may
    /// begin with a prefix of `leased` tokens.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) when the request does not have `prefix` tokens, or
    /// `seq` is less; [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) if its tokens ended with a clear of the
    /// arena.
    #[inline]
    pub fn growth(
        &self,
        position: usize,
        row: RequestRow,
        [prefix, seq]: [i64; 2],
        leased: Option<u32>,
    ) -> Result<UnitGrowth> {
        self.check_not_handing_over(position, row)?;
        let has = self.len(row);
        let begin = leased.unwrap_or(has);
        let valid = prefix == i64::from(begin) && prefix <= seq && (leased.is_none() || has == 0);
        match u32::try_from(seq) {
            Ok(seq) if valid => Ok(UnitGrowth { row, had: has, prefix: begin, seq }),
            _ => Err(self.growth_error(position, row, [prefix, seq], leased)),
        }
    }

    /// Checks that no cache takes units of the request at `position` of a batch at this moment.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) if one does.
    #[inline]
    pub fn check_not_handing_over(&self, position: usize, row: RequestRow) -> Result<()> {
        if !self.requests[widen(row.number())].is_handing_over {
            return Ok(());
        }
        Err(Error::state(format!(
            "request row {row} at position {position} is being published by another thread; wait for it"
        )))
    }

    #[cold]
    fn growth_error(
        &self,
        position: usize,
        row: RequestRow,
        [prefix, seq]: [i64; 2],
        leased: Option<u32>,
    ) -> Error {
        if let Some(error) = self.cleared_error(position, row) {
            return error;
        }
        let has = self.len(row);
        let text = match leased {
            Some(_) if has > 0 => format!("has {has} tokens with units; only a new one begins with a lease"),
            Some(leased) if i64::from(leased) != prefix => {
                format!("has a lease of {leased} tokens; it cannot grow from {prefix} to {seq}")
            }
            _ => format!("has {has} tokens with units; it cannot grow from {prefix} to {seq}"),
        };
        Error::argument(format!("request row {row} at position {position} {text}"))
    }

    /// Returns the error for a request whose tokens ended when the arena was cleared.
    #[cold]
    #[must_use]
    pub fn cleared_error(&self, position: usize, row: RequestRow) -> Option<Error> {
        let cleared = self.requests[widen(row.number())].cleared;
        let text = format!(
            "the {cleared} tokens of request row {row} at position {position} ended when the arena was cleared; extend the \
             request from 0 tokens, or finish it"
        );
        (cleared > 0).then(|| Error::stale(text))
    }

    /// Gives a request without tokens the units of a prefix that a cache keeps, a list for each group; those of states
    /// are not of tokens. [`UnitTables::grow`] with this prefix makes it the request's, [`UnitTables::disown`] undoes
    /// it.
    pub fn adopt(&mut self, row: RequestRow, prefix: u32, cached: &[AdoptedUnits]) {
        for (table, cached) in self.groups.iter_mut().zip(cached).filter(|(table, _)| !table.rule.is_state())
        {
            let mut units = cached.units.iter();
            for run in cached.kept.runs() {
                for (place, unit) in table.line_mut(row)[run].iter_mut().zip(&mut units) {
                    *place = unit.cast_signed();
                }
            }
            let at = widen(row.number());
            (table.kept[at], table.leased[at], table.changed[at]) = (cached.kept, cached.kept.end, 0);
        }
        let request = &mut self.requests[widen(row.number())];
        (request.leased, request.publishes) = (prefix, true);
    }

    /// Drops the cached units of a request without tokens, which publishes through an earlier lease, or not.
    pub fn disown(&mut self, row: RequestRow, publishes: bool) {
        let at = widen(row.number());
        for table in self.groups.iter_mut().filter(|table| !table.rule.is_state()) {
            (table.kept[at], table.leased[at], table.changed[at]) = (KeptUnits::default(), 0, 0);
        }
        (self.requests[at].leased, self.requests[at].publishes) = (0, publishes);
    }

    /// Makes a row one of a request without tokens, whose units were freed.
    pub fn forget(&mut self, row: RequestRow) {
        let at = widen(row.number());
        for UnitTable { kept, leased, changed, .. } in &mut self.groups {
            (kept[at], leased[at], changed[at]) = (KeptUnits::default(), 0, 0);
        }
        self.requests[at] = UnitRequest { batch: self.requests[at].batch, ..UnitRequest::default() };
    }

    /// Returns the leading tokens that a cache keeps for a request.
    #[must_use]
    pub fn leased(&self, row: RequestRow) -> u32 {
        self.requests[widen(row.number())].leased
    }

    /// Gives up the units of a request from its leased tokens to `tokens`, in whole units, to a cache, which owns them
    /// from now on. Returns them by group and position, `None` for those that the request has no more, and no list for
    /// states.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot list them; nothing is
    /// changed.
    pub fn hand_over(&mut self, row: RequestRow, tokens: u32) -> Result<Vec<Vec<Option<u32>>>> {
        let (at, from) = (widen(row.number()), self.requests[widen(row.number())].leased);
        let mut lists = try_with_capacity(self.groups.len())?;
        for table in &self.groups {
            let rule = table.rule;
            let positions = rule.tokens.page(from)..rule.tokens.page(tokens);
            let mut units = try_with_capacity(positions.len())?;
            if !rule.is_state() {
                let (kept, line) = (table.kept[at], table.line(row));
                units.extend(positions.map(|position| {
                    let has = position < kept.sinks || (kept.first..kept.end).contains(&position);
                    has.then(|| line[widen(position)].cast_unsigned())
                }));
            }
            lists.push(units);
        }
        for table in self.groups.iter_mut().filter(|table| !table.rule.is_state()) {
            table.leased[at] = table.leased[at].max(table.rule.tokens.page(tokens));
        }
        (self.requests[at].leased, self.requests[at].is_handing_over) = (tokens, true);
        Ok(lists)
    }

    /// Undoes [`UnitTables::hand_over`] for a request that had `leased` leased tokens before.
    pub fn take_back(&mut self, row: RequestRow, leased: u32) {
        for table in self.groups.iter_mut().filter(|table| !table.rule.is_state()) {
            table.leased[widen(row.number())] = table.rule.tokens.page(leased);
        }
        let request = &mut self.requests[widen(row.number())];
        (request.leased, request.is_handing_over) = (leased, false);
    }

    /// Puts the units of a cache, by group and position from the unit of token `from` on, in the place of those that
    /// were handed over up to token `to`. The cache keeps for the request what the token behind these sees, so the
    /// request drops what is behind the window of that one. Returns the first positions that changed, by group.
    pub fn replace_leased(
        &mut self,
        row: RequestRow,
        [from, to]: [u32; 2],
        units: &[Vec<Option<u32>>],
    ) -> Vec<Option<u32>> {
        self.requests[widen(row.number())].is_handing_over = false;
        let replace = |(table, units): (&mut UnitTable, &Vec<Option<u32>>)| {
            if table.rule.is_state() {
                return None;
            }
            let first = table.rule.tokens.page(from);
            let mut changed = None;
            let line = table.line_mut(row);
            for (position, unit) in (first..).zip(units) {
                let place = &mut line[widen(position)];
                if let Some(unit) = unit.map(u32::cast_signed).filter(|unit| *unit != *place) {
                    *place = unit;
                    changed = changed.or(Some(position));
                }
            }
            let (at, seen_from) = (widen(row.number()), table.rule.first(to));
            let kept = &mut table.kept[at];
            kept.first = kept.first.max(seen_from.min(kept.end));
            table.changed[at] = changed.map_or(table.changed[at], |changed| changed.min(table.changed[at]));
            changed
        };
        self.groups.iter_mut().zip(units).map(replace).collect()
    }

    /// Frees the units behind the windows and chunks of a batch, then takes the units for its new tokens: of all groups
    /// and requests, or none. A request that publishes keeps what the token behind its last whole page sees. Returns
    /// what would have been needed otherwise; what was freed stays free.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot list the units; nothing is
    /// taken.
    pub fn grow(
        &mut self,
        batch: &[UnitGrowth],
        slabs: &mut Slabs,
    ) -> Result<std::result::Result<(), MissingUnits>> {
        let mut wanted = try_with_capacity(self.groups.len())?;
        for (group, table) in self.groups.iter_mut().enumerate() {
            self.freed.clear();
            let mut count = 0;
            for &UnitGrowth { row, prefix, seq, .. } in batch {
                // Others go on behind whole pages: what the first of them sees can still be published.
                let is_kept = self.requests[widen(row.number())].publishes;
                let seen_from = if is_kept { prefix - self.page.offset(prefix) } else { prefix };
                table.trim(row, seen_from, &mut self.freed);
                // Full groups trim nothing, and most steps need no unit.
                count += table.rule.end(seq).saturating_sub(table.kept[widen(row.number())].end);
            }
            if !self.freed.is_empty() {
                free_sorted(slabs, group, &mut self.freed);
            }
            wanted.push(widen(count));
        }
        if wanted.iter().any(|count| *count > 0) {
            let Some(taken) = slabs.alloc_held(&wanted)? else { return Ok(Err(wanted)) };
            for (table, taken) in self.groups.iter_mut().zip(&taken).filter(|(_, taken)| !taken.is_empty()) {
                let mut taken = taken.iter();
                for &UnitGrowth { row, seq, .. } in batch {
                    table.append(row, table.rule.end(seq), &mut taken);
                }
            }
        }
        for growth in batch {
            let request = &mut self.requests[widen(growth.row.number())];
            (request.len, request.cleared) = (growth.seq, 0);
        }
        Ok(Ok(()))
    }

    /// Undoes [`UnitTables::grow`], but for what it freed.
    pub fn shrink(&mut self, batch: &[UnitGrowth], slabs: &mut Slabs) {
        for growth in batch {
            self.truncate(growth.row, growth.had, slabs);
        }
    }

    /// Returns the tokens that the request at `position` of a batch is to keep, checked. Errors name the groups as
    /// they are `declared`.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if it has fewer tokens, if the token after them sees
    /// some whose units were freed, or if a cache keeps more of them;
    /// [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) as in [`UnitTables::growth`].
    pub fn check_truncate(
        &self,
        position: usize,
        row: RequestRow,
        tokens: i64,
        declared: &[Group],
    ) -> Result<u32> {
        if let Some(error) = self.cleared_error(position, row) {
            return Err(error);
        }
        self.check_not_handing_over(position, row)?;
        let UnitRequest { len, leased, .. } = self.requests[widen(row.number())];
        let refused = |text: String| {
            Err(Error::argument(format!("request row {row} at position {position} has {len} tokens {text}")))
        };
        let Some(tokens) = u32::try_from(tokens).ok().filter(|&tokens| tokens <= len) else {
            return refused(format!("with units; it cannot be truncated to {tokens}"));
        };
        if tokens < leased {
            return refused(format!("of which {leased} are leased; it cannot be truncated to {tokens}"));
        }
        for (group, table) in declared.iter().zip(&self.groups) {
            let (kept, first) = (table.kept[widen(row.number())], table.rule.first(tokens));
            if first.max(table.rule.sinks) < kept.first.min(table.rule.end(tokens)) {
                return refused(format!(
                    "and, in group {}, units from token {} on; the token after {tokens} sees token {}",
                    group.name(),
                    kept.first * table.rule.tokens(),
                    first * table.rule.tokens()
                ));
            }
        }
        Ok(tokens)
    }

    /// Keeps the first `tokens` tokens of a request, which [`UnitTables::check_truncate`] has checked, and frees the
    /// units of the others. A request that ends keeps none: [`UnitTables::forget`] ends what a cache keeps for it.
    pub fn truncate(&mut self, row: RequestRow, tokens: u32, slabs: &mut Slabs) {
        for (group, table) in self.groups.iter_mut().enumerate() {
            let end = if tokens == 0 { 0 } else { table.rule.end(tokens) };
            if end < table.kept[widen(row.number())].end {
                self.freed.clear();
                table.cut(row, end, &mut self.freed);
                free_sorted(slabs, group, &mut self.freed);
            }
        }
        self.requests[widen(row.number())].len = tokens;
    }

    /// Frees the units of all requests.
    pub fn end(&mut self, slabs: &mut Slabs) {
        for row in (0..narrow(self.requests.len())).map(RequestRow::new) {
            self.truncate(row, 0, slabs);
            self.forget(row);
        }
    }

    /// Ends the tokens of all requests: the arena was cleared.
    pub fn clear(&mut self) {
        for request in &mut self.requests {
            *request = UnitRequest {
                cleared: request.len.max(request.cleared),
                batch: request.batch,
                ..UnitRequest::default()
            };
        }
        for UnitTable { kept, leased, changed, .. } in &mut self.groups {
            kept.fill(KeptUnits::default());
            leased.fill(0);
            changed.fill(0);
        }
    }

    /// Checks that a unit has one request, and is held, and that a cache keeps no more of a request than it has.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) with the first unit that does not.
    pub fn verify(&self, slabs: &Slabs) -> Result<()> {
        for (row, UnitRequest { len, leased, cleared, .. }) in self.requests.iter().enumerate() {
            if leased > len || (*cleared > 0 && *len > 0) {
                return Err(Error::state(format!(
                    "request row {row} has {len} tokens, {leased} of them leased, and {cleared} that were cleared"
                )));
            }
        }
        for (group, table) in self.groups.iter().enumerate() {
            let mut own = Vec::new();
            for row in (0..narrow(self.requests.len())).map(RequestRow::new) {
                let kept = table.kept[widen(row.number())];
                let leased = table.leased[widen(row.number())];
                if kept.sinks > kept.first || kept.first.max(leased) > kept.end || kept.end > table.rule.width
                {
                    return Err(Error::state(format!(
                        "request row {row} keeps {kept:?} of group {group}, {leased} of them leased"
                    )));
                }
                kept.runs().into_iter().for_each(|run| table.list(row, run, &mut own));
            }
            if let Some(unit) = own.iter().find(|&&unit| !slabs.is_held(group, unit)) {
                return Err(Error::state(format!("unit {unit} of group {group} is not held")));
            }
            let count = own.len();
            own.sort_unstable();
            own.dedup();
            if own.len() < count {
                return Err(Error::state(format!("a unit of group {group} has two requests")));
            }
        }
        Ok(())
    }
}
