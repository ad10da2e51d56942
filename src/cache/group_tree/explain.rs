//! Explains which group shortened a match.

use std::ops::Range;

use crate::base::Result;
use crate::cache::tree::{Segment, SegmentState};
use crate::cache::{Namespace, Tokens};

use super::blocks::Presence;
use super::{GroupTree, Rules, TreePosition, is_state};

/// Why a group cannot go on at the end of a prompt.
#[derive(Clone, Debug)]
pub enum GroupReason {
    /// It can.
    Complete,
    /// Units were evicted.
    Evicted,
    /// Units were never published, or so long ago that their eviction is forgotten.
    NeverPublished,
    /// No snapshot of the state was published further on.
    NoSnapshot,
    /// A snapshot further on was evicted.
    SnapshotEvicted,
    /// The last entry stands for tokens beyond the end, and no state has the rest.
    PartOfEntry,
}

impl GroupReason {
    /// Returns the reason in words.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Evicted => "evicted",
            Self::NeverPublished => "never published",
            Self::NoSnapshot => "no snapshot",
            Self::SnapshotEvicted => "snapshot evicted",
            Self::PartOfEntry => "part of an entry",
        }
    }
}

/// How far a group could go on alone.
#[derive(Clone, Debug)]
pub struct GroupExplanation {
    /// The number of the group.
    pub group: usize,
    /// The longest prefix, in tokens, at which the group could go on.
    pub len: usize,
    /// The tokens of the units that are missing to go on at the end of the cached tokens or, if all tokens up to there
    /// are needed, behind it.
    pub missing: Option<Range<usize>>,
    /// Why it is not longer.
    pub reason: GroupReason,
}

impl GroupTree {
    /// Explains how long a match of `tokens` would be, and how far each group could go on alone. The match is at most
    /// as long as the shortest of them. Changes nothing.
    ///
    /// # Errors
    /// Returns an error if a token cannot be read or is not a token id.
    pub fn explain(
        &self,
        namespace: &Namespace,
        tokens: &dyn Tokens,
    ) -> Result<(usize, Vec<GroupExplanation>)> {
        tokens.check(0..tokens.count())?;
        let whole = self.tree.in_whole_pages(tokens.count());
        let place = self.tree.place_of(namespace, tokens, whole)?;
        let found = place.map_or(0, TreePosition::len);
        let len = place.map_or(0, |place| self.rules().usable(&self.tree, &self.blocks, place));
        let rest = self.tree.explain(namespace, tokens, None)?;
        let groups = (0..self.groups.len())
            .map(|group| self.explain_group(group, place, found..whole, &rest))
            .collect();
        Ok((len, groups))
    }

    /// Explains a group. The blocks of tokens up to `behind` are cached.
    fn explain_group(
        &self,
        group: usize,
        place: Option<TreePosition>,
        behind: Range<usize>,
        rest: &[Segment],
    ) -> GroupExplanation {
        let found = behind.start;
        let part_behind = rest.iter().find(|part| part.range.start >= found);
        let of_rest = match part_behind.map(|part| &part.state) {
            Some(SegmentState::Evicted(_)) => GroupReason::Evicted,
            _ => GroupReason::NeverPublished,
        };
        let all = |len| GroupExplanation {
            group,
            len,
            missing: (!behind.is_empty()).then(|| behind.clone()),
            reason: if behind.is_empty() { GroupReason::Complete } else { of_rest.clone() },
        };
        let Some((place, last)) = place.and_then(|place| Some((place, self.tree.page_before(place)?))) else {
            return all(0);
        };
        if is_state(&self.groups[group]) {
            let len = self.tree.last_snapshot_place(place).len();
            if len == found {
                return all(found);
            }
            let mut path = self.blocks.path(last, found / self.page_size);
            let mut pages = len / self.page_size..found / self.page_size;
            let reason = if pages.any(|page| self.blocks.had_end(path.block(page))) {
                GroupReason::SnapshotEvicted
            } else {
                GroupReason::NoSnapshot
            };
            return GroupExplanation { group, len, missing: None, reason };
        }
        let each = self.blocks.pages_of_unit(group);
        let step = if self.has_states() { 1 } else { each };
        let alone = Rules { step, ..self.rules() };
        let len = alone.usable_of_units(&self.blocks, last, found, |other| other == group);
        if len == found {
            return all(len);
        }
        let mut path = self.blocks.path(last, found / self.page_size);
        let needed = self.groups[group].prefix_units(found, self.page_size);
        let units = needed.map_or(0..0, |needed| needed.units);
        let mut gap: Option<Range<usize>> = None;
        let mut reason = GroupReason::NeverPublished;
        for unit in units.filter(|_| self.blocks.is_counted(group)) {
            match self.blocks.presence(group, path.block((unit + 1) * each - 1)) {
                Presence::There(_) => continue,
                Presence::Evicted => reason = GroupReason::Evicted,
                Presence::Absent => (),
            }
            gap = Some(gap.map_or(unit, |gap| gap.start)..unit + 1);
        }
        let tokens = each * self.page_size;
        let Some(gap) = gap else {
            return GroupExplanation { group, len, missing: None, reason: GroupReason::PartOfEntry };
        };
        GroupExplanation { group, len, missing: Some(gap.start * tokens..gap.end * tokens), reason }
    }
}
