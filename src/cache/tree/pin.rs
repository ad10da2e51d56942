//! Retention of prefixes: evicting them last, or not at all for a time.

use super::evict::Evicted;
use super::{Hold, Kind, NodeId, Tree};

impl Tree {
    /// Returns the number of tokens that would be pinned if this hold were pinned, too.
    #[must_use]
    pub fn pinned_with(&self, hold: &Hold) -> usize {
        let newly_pinned: usize =
            self.path(hold.node).filter(|&id| !self.is_pinned(id)).map(|id| self.node(id).pages.len()).sum();
        (self.counts.pinned + newly_pinned) * self.page_size
    }

    /// Returns whether the prefix can still be found: its namespace was not cleared.
    #[must_use]
    pub fn is_attached(&self, hold: &Hold) -> bool {
        self.node(self.node(hold.node).root).kind != Kind::Detached
    }

    pub(super) fn is_pinned(&self, id: NodeId) -> bool {
        let node = self.node(id);
        node.pins > 0 || node.history.priority > 0
    }

    /// Retains a prefix: it is evicted after all prefixes that are not retained, and after those of lower
    /// priority.
    pub fn retain(&mut self, hold: &Hold, priority: u8) {
        let priority = priority.saturating_add(1);
        self.change_path(hold.node, |tree, id| {
            let history = &mut tree.node_mut(id).history;
            history.priority = history.priority.max(priority);
        });
    }

    /// Locks a prefix until [`Tree::unpin`].
    pub fn pin(&mut self, hold: &Hold) -> Hold {
        self.change_path(hold.node, |tree, id| tree.node_mut(id).pins += 1);
        let mut hold = self.hold_again(hold);
        // A pin is no turn.
        hold.session = None;
        hold
    }

    /// Ends [`Tree::pin`].
    pub fn unpin(&mut self, pinned: Hold) -> Evicted {
        self.change_path(pinned.node, |tree, id| tree.node_mut(id).pins -= 1);
        self.release(pinned)
    }

    /// Changes every node on the path to `node`, all of which are locked, and updates the count of pinned
    /// pages.
    fn change_path(&mut self, node: NodeId, change: impl Fn(&mut Self, NodeId)) {
        let path: Vec<_> = self.path(node).collect();
        for id in path {
            let (pages, was_pinned) = (self.node(id).pages.len(), self.is_pinned(id));
            change(self, id);
            match (was_pinned, self.is_pinned(id)) {
                (false, true) => self.counts.pinned += pages,
                (true, false) => self.counts.pinned -= pages,
                _ => (),
            }
        }
    }
}
