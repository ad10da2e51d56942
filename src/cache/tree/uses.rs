//! Uses of prefixes, for a store that does not see them.

use std::collections::{HashSet, VecDeque};

use super::{Kind, NodeId, PageHash, Tree};
use crate::cache::NodeHandle;

/// The maximum number of uses that are kept. If there are more, the oldest are dropped.
const MAX_USES: usize = 256;

/// Consecutive pages of a prefix that was used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsedRun {
    /// The keys of the pages, in order.
    pub pages: Vec<PageHash>,
    /// The key of the snapshot at their end, if there is one.
    pub state: Option<PageHash>,
}

/// The nodes at which used prefixes ended, the last use last.
#[derive(Debug, Default)]
pub(super) struct Uses(VecDeque<NodeHandle>);

impl Tree {
    /// Starts to keep uses, for [`Tree::take_uses`]. The tree must keep keys.
    pub fn keep_uses(&mut self) {
        self.uses.get_or_insert_with(Uses::default);
    }

    /// Returns whether there are uses to take.
    #[must_use]
    pub fn has_uses(&self) -> bool {
        self.uses.as_ref().is_some_and(|uses| !uses.0.is_empty())
    }

    /// Keeps a use of the prefix that ends at `node`. Costs a few comparisons.
    #[inline]
    pub(super) fn keep_use(&mut self, node: NodeId) {
        let Some(Uses(uses)) = &mut self.uses else { return };
        let handle = self.nodes.handle(node);
        if self.nodes[node].kind != Kind::Run || uses.iter().rev().take(8).any(|&other| other == handle) {
            return;
        }
        if uses.len() == MAX_USES {
            uses.pop_front();
        }
        uses.push_back(handle);
    }

    /// Takes the uses since the last call, of at most `max` pages and without nodes for which `is_due` returns
    /// false. A run comes before the run that it follows, so that the beginning of a prefix is used last.
    pub fn take_uses(&mut self, max: usize, mut is_due: impl FnMut(NodeHandle) -> bool) -> Vec<UsedRun> {
        let uses = self.uses.as_mut().map_or_else(Uses::default, std::mem::take);
        let (mut nodes, mut seen, mut pages) = (Vec::new(), HashSet::new(), 0);
        for handle in uses.0.into_iter().rev() {
            // Its number may be that of another node now.
            let Some(end) = self.nodes.at(handle).filter(|&node| self.node(node).kind == Kind::Run) else {
                continue;
            };
            let path: Vec<_> = self.path(end).take_while(|&node| seen.insert(node)).collect();
            // From the beginning of the prefix.
            for &node in path.iter().rev() {
                if pages < max && is_due(self.nodes.handle(node)) {
                    pages += self.node(node).pages.len();
                    nodes.push(node);
                }
            }
        }
        nodes.sort_by_key(|&node| std::cmp::Reverse(self.node(node).end));
        nodes.iter().filter_map(|&node| self.used_run(node)).collect()
    }

    /// Returns the pages of a node, unless they can no longer be found.
    fn used_run(&self, node: NodeId) -> Option<UsedRun> {
        let here = self.node(node);
        let pages: Option<Vec<_>> = here.pages.iter().map(|&page| self.key_of(page)).collect();
        let pages = pages.filter(|pages| !pages.is_empty())?;
        let state = pages.last().copied().filter(|_| here.has_snapshot);
        Some(UsedRun { pages, state })
    }
}
