//! Everything that a tree of groups has, page by page.

use crate::base::{Id, StateSlot, widen};
use crate::cache::Namespace;

use super::{GroupTree, is_state};

/// A page of tokens that can be found, with what ends there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedPage {
    /// The namespace.
    pub namespace: Namespace,
    /// The tokens from the first one on to the end of the page.
    pub tokens: Vec<i32>,
    /// The unit of each group that ends with the page, or the numbers of its snapshot there.
    pub units: Vec<Vec<u32>>,
}

impl GroupTree {
    /// Returns every page that can be found. Costs the tokens of all prefixes: for tests and debugging.
    #[must_use]
    pub fn contents(&self) -> Vec<CachedPage> {
        let mut pages = Vec::new();
        for (namespace, tokens, blocks, end) in self.tree.found_runs() {
            let front = tokens.len() - blocks.len() * self.page_size;
            let last = blocks.len();
            for (number, block) in (1..).zip(blocks) {
                let end = end.filter(|_| number == last);
                let units = (0..self.groups.len()).map(|group| {
                    if is_state(&self.groups[group]) {
                        return self.states_of(end, group);
                    }
                    self.blocks.unit(group, block).into_iter().collect()
                });
                let tokens = tokens[..front + number * self.page_size].to_vec();
                pages.push(CachedPage { namespace: namespace.clone(), tokens, units: units.collect() });
            }
        }
        pages
    }

    fn states_of(&self, end: Option<StateSlot>, group: usize) -> Vec<u32> {
        let end = end.and_then(|end| self.ends[widen(end.number())].as_ref());
        end.map_or(Vec::new(), |end| end.states[self.state_position(group)].clone())
    }
}
