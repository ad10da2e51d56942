//! Publications: units become the tree's, where it has none for their tokens.

use crate::base::{Error, Id, Page, Result, StateSlot, widen};
use crate::cache::Tokens;
use crate::cache::tree::FoundPrefix;

use super::{End, GroupHold, GroupTree, is_state};

/// What a request has computed behind its lease.
#[derive(Clone, Copy, Debug)]
pub struct GroupPublication<'a> {
    /// The tokens of the whole prefix, from the first one on: whole pages.
    pub tokens: &'a dyn Tokens,
    /// The units of each group: of a group of pages, those from the position of the lease's end on, without a partial
    /// one at the end, and `None` for one that the request no longer has; of a state, the numbers of a snapshot at
    /// the end of the tokens, or nothing.
    pub units: &'a [Vec<Option<u32>>],
}

/// A checked publication.
#[derive(Debug)]
#[must_use]
pub struct PublicationPlan {
    found: FoundPrefix,
    /// The blocks that others have published behind the hold.
    cached: Vec<Page>,
    /// The tokens behind them.
    fresh: Vec<i32>,
    /// The units of each group that the tree takes, with the pages in whose block each ends.
    taken: Vec<Vec<(usize, u32)>>,
    /// The snapshot of each state that the tree takes.
    snapshot: Option<Vec<Vec<u32>>>,
    /// Whether a request can go on at the end.
    is_end: bool,
    /// The units of each group that the tree does not take, because it has others for the same tokens.
    pub duplicates: Vec<Vec<u32>>,
    /// The units of each group after the publication: see [`GroupPublication::units`].
    pub units: Vec<Vec<Option<u32>>>,
    /// Tokens that others had published.
    pub duplicate_tokens: usize,
}

impl PublicationPlan {
    /// Returns the number of tokens that are new.
    #[must_use]
    pub fn fresh(&self) -> usize {
        self.fresh.len()
    }
}

impl GroupTree {
    /// Checks that tokens begin with those of a hold. Costs a comparison of all of them.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if they do not; the error of tokens that cannot be
    /// read.
    pub fn check_prefix(&self, hold: &GroupHold, tokens: &dyn Tokens) -> Result<()> {
        match self.tree.difference(&hold.hold, tokens)? {
            None => Ok(()),
            Some(position) => Err(Error::argument(format!(
                "the tokens published differ from those of the lease at position {position}"
            ))),
        }
    }

    /// Checks a publication of a request with this hold, and finds what is cached already. Changes nothing. The tokens
    /// begin with those of the hold: see [`Self::check_prefix`].
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for tokens that do not fill pages, are fewer than
    /// those of the hold, or are no token ids; for a number of units that is not that of the tokens; for a unit that is
    /// missing although a prefix has it always, or the end of a snapshot needs it; and for snapshots of some states and
    /// not of others. Also the error of tokens that cannot be read.
    pub fn plan(&self, hold: &GroupHold, publication: &GroupPublication<'_>) -> Result<PublicationPlan> {
        let GroupPublication { tokens, units } = *publication;
        let (len, begin) = (tokens.count(), hold.len());
        if len % self.page_size != 0 || len < begin {
            return Err(Error::argument(format!(
                "{len} tokens were published by a lease of {begin}; they must be whole pages of {}, from the first \
                 token on",
                self.page_size
            )));
        }
        let rest = Rest { tokens, begin };
        let found = self.tree.find(&hold.hold, &rest)?;
        let fresh = tokens.to_vec(begin + found.len()..len)?;
        self.tree.check_memory(&hold.hold, &found, fresh.len())?;
        self.check_memory_of_events(fresh.len(), len - begin)?;
        let cached = self.tree.found_pages(&found)?;
        let mut plan = PublicationPlan {
            duplicate_tokens: found.len(),
            found,
            cached,
            fresh,
            taken: vec![Vec::new(); self.groups.len()],
            snapshot: None,
            is_end: false,
            duplicates: vec![Vec::new(); self.groups.len()],
            units: Vec::with_capacity(self.groups.len()),
        };
        if units.len() != self.groups.len() {
            let groups = self.groups.len();
            return Err(Error::argument(format!(
                "units of {} groups were published; there are {groups}",
                units.len()
            )));
        }
        for (group, given) in units.iter().enumerate() {
            let units = if is_state(&self.groups[group]) {
                self.plan_state(&mut plan, group, given, len)?
            } else {
                self.plan_units(&mut plan, group, given, begin..len)?
            };
            plan.units.push(units);
        }
        self.plan_end(&mut plan, hold, len)?;
        Ok(plan)
    }

    /// Plans the units of a group of pages for these tokens, and returns those that the tree has afterwards.
    fn plan_units(
        &self,
        plan: &mut PublicationPlan,
        group: usize,
        given: &[Option<u32>],
        tokens: std::ops::Range<usize>,
    ) -> Result<Vec<Option<u32>>> {
        let (declared, each) = (&self.groups[group], self.blocks.pages_of_unit(group));
        let (first_page, last_page) = (tokens.start / self.page_size, tokens.end / self.page_size);
        let (first, last) = (first_page / each, last_page / each);
        if given.len() != last - first {
            return Err(Error::argument(format!(
                "{} units of group {} were published for {} positions, {first} to {last}, of tokens {} to {}",
                given.len(),
                declared.name(),
                last - first,
                tokens.start,
                tokens.end
            )));
        }
        let mut after = Vec::with_capacity(given.len());
        for (position, &unit) in (first..last).zip(given) {
            let page = (position + 1) * each - 1;
            let cached = plan.cached.get(page - first_page).and_then(|&block| self.blocks.unit(group, block));
            after.push(cached.or(unit));
            match (cached, unit) {
                // A planner may have the tree's own unit, from a match of another request.
                (Some(cached), Some(unit)) if cached == unit => (),
                (Some(_), Some(unit)) => plan.duplicates[group].push(unit),
                (None, Some(unit)) => plan.taken[group].push((page, unit)),
                (None, None) if self.blocks.is_required(group, position) => {
                    return Err(Error::argument(format!(
                        "unit {position} of group {} is missing; a prefix has all units of kind {}",
                        declared.name(),
                        declared.kind()
                    )));
                }
                _ => (),
            }
        }
        Ok(after)
    }

    /// Plans the snapshot of a state at the end, and returns the one that the tree has afterwards.
    fn plan_state(
        &self,
        plan: &mut PublicationPlan,
        group: usize,
        given: &[Option<u32>],
        len: usize,
    ) -> Result<Vec<Option<u32>>> {
        let numbers: Option<Vec<u32>> = given.iter().copied().collect();
        let numbers = numbers.filter(|numbers| {
            numbers.is_empty() || (numbers.len() == self.numbers[group].of_unit && len > 0)
        });
        let Some(numbers) = numbers else {
            return Err(Error::argument(format!(
                "{} numbers of group {} were published for a snapshot behind {len} tokens; it has {}",
                given.len(),
                self.groups[group].name(),
                self.numbers[group].of_unit
            )));
        };
        if let Some(end) = self.end_behind(plan) {
            plan.duplicates[group].extend(&numbers);
            return Ok(end.states[self.state_position(group)].iter().copied().map(Some).collect());
        }
        let states = plan.snapshot.get_or_insert_default();
        if states.last().is_some_and(|other| other.is_empty() != numbers.is_empty()) {
            return Err(Error::argument(format!(
                "group {} and another group of states must both have a snapshot, or neither",
                self.groups[group].name()
            )));
        }
        states.push(numbers);
        Ok(given.to_vec())
    }

    /// Returns the end at the last token that is published, if the tree has one.
    fn end_behind(&self, plan: &PublicationPlan) -> Option<&End> {
        if !plan.fresh.is_empty() {
            return None;
        }
        let end = self.tree.snapshot_behind(&plan.found)?;
        self.ends[widen(end.number())].as_ref()
    }

    /// Decides whether there is an end at the last token that is published.
    fn plan_end(&self, plan: &mut PublicationPlan, hold: &GroupHold, len: usize) -> Result<()> {
        plan.snapshot.take_if(|states| states.iter().any(Vec::is_empty));
        let is_new = self.has_ends() && len > 0 && self.end_behind(plan).is_none();
        if !is_new || (self.has_states() && plan.snapshot.is_none()) {
            return Ok(());
        }
        let missing = self.missing_unit(plan, hold, len);
        plan.is_end = missing.is_none() && (len / self.page_size).is_multiple_of(self.step);
        match missing.filter(|_| plan.snapshot.is_some()) {
            None => Ok(()),
            Some((group, position)) => Err(Error::argument(format!(
                "unit {position} of group {} is missing; a request that goes on behind the snapshot at {len} needs it",
                self.groups[group].name()
            ))),
        }
    }

    /// Returns a unit that a request needs to go on behind `len` tokens, and that will not be there.
    fn missing_unit(&self, plan: &PublicationPlan, hold: &GroupHold, len: usize) -> Option<(usize, usize)> {
        let begin = hold.len() / self.page_size;
        let mut path = self.tree.last_page(&hold.hold).map(|last| self.blocks.path(last, begin));
        for (group, declared) in self.groups.iter().enumerate() {
            let Some(needed) = declared.prefix_units(len, self.page_size) else { continue };
            let each = self.blocks.pages_of_unit(group);
            for position in needed.units {
                if self.blocks.is_required(group, position) {
                    continue;
                }
                let page = (position + 1) * each - 1;
                let unit = match (page.checked_sub(begin), &mut path) {
                    (None, Some(path)) => self.blocks.unit(group, path.block(page)),
                    _ => plan.units[group][position - begin / each],
                };
                if unit.is_none() {
                    return Some((group, position));
                }
            }
        }
        None
    }

    /// Carries out a plan that was made with this hold since the last change of the tree, and moves the hold to the
    /// end of the tokens.
    pub fn publish(&mut self, hold: &mut GroupHold, plan: PublicationPlan) {
        let PublicationPlan { found, cached, fresh, taken, snapshot, is_end, .. } = plan;
        let (begin, last) = (hold.len() / self.page_size, self.tree.last_page(&hold.hold));
        let old_len = hold.len();
        if let Some(last) = last.filter(|_| is_end && !self.has_states()) {
            self.drop_own_end(hold, last);
        }
        let before = begin + cached.len();
        let new = self.blocks.add(cached.last().copied().or(last), before, fresh.len() / self.page_size);
        let end = new.last().or(cached.last()).copied().or(last);
        let len = (before + new.len()) * self.page_size;
        // Counted before the units are there, as units that something needs are listed nowhere.
        if let Some(end) = end {
            self.blocks.count_needs(&self.groups, self.page_size, end, len, true);
        }
        for (group, units) in taken.iter().enumerate() {
            for &(page, unit) in units {
                let at = page - begin;
                let block = cached.get(at).or_else(|| new.get(at - cached.len()));
                self.blocks.set(group, *block.expect("a page of the publication"), unit);
            }
        }
        if let Some(last) = last {
            self.blocks.count_needs(&self.groups, self.page_size, last, old_len, false);
        }
        self.tree.publish(&mut hold.hold, found, fresh, &new);
        if self.events.is_some() {
            let has_snapshot = is_end && snapshot.is_some();
            self.record_published(&hold.hold, before, &taken, has_snapshot);
        }
        if let Some(block) = end.filter(|_| is_end) {
            self.blocks.count_needs(&self.groups, self.page_size, block, len, true);
            let states = snapshot.unwrap_or_default();
            let end = self.add_end(End { block, tokens: len, states });
            self.tree.set_snapshot(&mut hold.hold, end);
            hold.own_end = Some(block);
        }
    }

    /// Gives up the end at a hold whose request goes on, if nobody else can be expected to go on there.
    fn drop_own_end(&mut self, hold: &mut GroupHold, last: Page) {
        if hold.own_end != Some(last) {
            return;
        }
        let copies = self.copies.get(&last).copied().unwrap_or(0);
        if let Some(end) = self.tree.take_own_snapshot(&mut hold.hold, copies) {
            let end = self.take_end(end);
            debug_assert_eq!(end.block, last, "an end is at the end of its block");
            self.blocks.count_needs(&self.groups, self.page_size, end.block, end.tokens, false);
        }
    }

    fn add_end(&mut self, end: End) -> StateSlot {
        let number = self.vacant_ends.pop().unwrap_or_else(|| {
            self.ends.push(None);
            StateSlot::new(crate::base::bounded::narrow(self.ends.len() - 1))
        });
        self.ends[widen(number.number())] = Some(end);
        number
    }

    /// Removes an end that the tree no longer has.
    pub(super) fn take_end(&mut self, number: StateSlot) -> End {
        self.vacant_ends.push(number);
        self.ends[widen(number.number())].take().expect("the tree had the end")
    }
}

/// The tokens from `begin` on.
#[derive(Debug)]
struct Rest<'a> {
    tokens: &'a dyn Tokens,
    begin: usize,
}

impl Tokens for Rest<'_> {
    fn count(&self) -> usize {
        self.tokens.count() - self.begin
    }

    fn common(&self, at: usize, with: &[i32]) -> Result<usize> {
        self.tokens.common(self.begin + at, with)
    }

    fn read(&self, range: std::ops::Range<usize>, out: &mut Vec<i32>) -> Result<()> {
        self.tokens.read(self.begin + range.start..self.begin + range.end, out)
    }

    fn slice<'a>(&'a self, range: std::ops::Range<usize>, buffer: &'a mut Vec<i32>) -> Result<&'a [i32]> {
        self.tokens.slice(self.begin + range.start..self.begin + range.end, buffer)
    }

    fn check(&self, range: std::ops::Range<usize>) -> Result<()> {
        self.tokens.check(self.begin + range.start..self.begin + range.end)
    }
}
