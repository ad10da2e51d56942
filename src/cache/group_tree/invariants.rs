//! Checks of the invariants of a tree of groups. Tests and debugging use them.

use std::collections::{HashMap, HashSet};

use crate::base::Page;

use super::blocks::Presence;
use super::{GroupHold, GroupTree, is_state};

impl GroupTree {
    /// Describes a broken invariant, if there is one. Without a list of all its holds, it is not checked what they
    /// need.
    #[must_use]
    pub fn broken_invariant(&self, holds: Option<&[&GroupHold]>) -> Option<String> {
        let holds = holds.or_else(|| (self.holds == 0).then_some(&[]));
        (self.tree.broken_invariant()).or_else(|| self.broken_table()).or_else(|| self.broken_needs(holds))
    }

    /// Checks the units of each block, and that each has one owner.
    fn broken_table(&self) -> Option<String> {
        let blocks = self.tree.all_pages();
        if blocks.len() != self.blocks.len() {
            return Some(format!(
                "{} blocks are in the tree, {} in the table",
                blocks.len(),
                self.blocks.len()
            ));
        }
        for group in (0..self.groups.len()).filter(|&group| !is_state(&self.groups[group])) {
            let (mut units, mut unneeded) = (HashSet::new(), 0);
            let each = self.blocks.pages_of_unit(group);
            for &block in &blocks {
                let position = self.blocks.page(block) / each;
                let is_last = (self.blocks.page(block) + 1).is_multiple_of(each);
                let is_required = is_last && self.blocks.is_required(group, position);
                let Presence::There(unit) = self.blocks.presence(group, block) else {
                    if is_required {
                        return Some(format!("{block} lacks unit {position} of group {group}"));
                    }
                    continue;
                };
                if !is_last || !units.insert(unit) {
                    return Some(format!("unit {unit} of group {group} is at {block} and elsewhere"));
                }
                let is_unneeded = !is_required && self.blocks.needs(group, block) == 0;
                unneeded += usize::from(is_unneeded);
                if is_unneeded != (self.blocks.unneeded_block(group, unit) == Some(block)) {
                    return Some(format!(
                        "unit {unit} of group {group} is listed as not needed: {}",
                        !is_unneeded
                    ));
                }
            }
            if (units.len(), unneeded) != (self.blocks.count(group), self.blocks.unneeded(group)) {
                return Some(format!("group {group} has {} units, {unneeded} not needed", units.len()));
            }
        }
        None
    }

    /// Checks that units count the ends, waiting requests and holds that need them, and that the former have theirs.
    fn broken_needs(&self, holds: Option<&[&GroupHold]>) -> Option<String> {
        let mut expected: HashMap<(usize, Page), u32> = HashMap::new();
        let mut count = |last: Option<Page>, tokens: usize, is_end: bool| {
            for (group, declared) in
                self.groups.iter().enumerate().filter(|&(group, _)| self.blocks.is_counted(group))
            {
                let Some(last) = last else { continue };
                let needed = declared.prefix_units(tokens, self.page_size)?;
                let each = self.blocks.pages_of_unit(group);
                let mut path = self.blocks.path(last, tokens / self.page_size);
                for unit in needed.units {
                    let block = path.block((unit + 1) * each - 1);
                    if !self.blocks.is_required(group, unit) {
                        *expected.entry((group, block)).or_default() += 1;
                    }
                    if is_end && self.blocks.unit(group, block).is_none() {
                        return Some(format!("the end at {tokens} lacks unit {unit} of group {group}"));
                    }
                }
            }
            None
        };
        let mut ends = 0;
        for end in self.ends.iter().flatten() {
            ends += 1;
            if let Some(broken) = count(Some(end.block), end.tokens, true) {
                return Some(broken);
            }
        }
        for (block, tokens) in self.waiting.iter() {
            if let Some(broken) = count(Some(block), tokens, true) {
                return Some(broken);
            }
        }
        for hold in holds.into_iter().flatten() {
            let _ = count(self.tree.last_page(&hold.hold), hold.len(), false);
        }
        if ends != self.tree.stats().snapshots || ends + self.vacant_ends.len() != self.ends.len() {
            return Some(format!("{ends} ends, {} vacant of {}", self.vacant_ends.len(), self.ends.len()));
        }
        for block in self.tree.all_pages() {
            for group in 0..self.groups.len() {
                let needs = expected.get(&(group, block)).copied().unwrap_or(0);
                let counted = self.blocks.needs(group, block);
                if counted < needs || (counted > needs && holds.is_some()) {
                    return Some(format!("{block} counts {counted} needs of group {group}, not {needs}"));
                }
            }
        }
        None
    }
}
