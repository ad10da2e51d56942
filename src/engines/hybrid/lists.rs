//! The nodes with a value of a part, in the order of their last use.

use super::{HybridTree, NodeId, Part, ROOT};
use crate::cache::RecencyList;

impl HybridTree {
    pub(super) const fn list(&self, part: Part) -> &RecencyList<NodeId> {
        &self.lists[part.index()]
    }

    pub(super) const fn list_mut(&mut self, part: Part) -> &mut RecencyList<NodeId> {
        &mut self.lists[part.index()]
    }

    /// Records a use of the window slots that a request at the end of `id` may read: those of the last window
    /// and a page. The deepest node becomes the most recent one.
    pub(super) fn refresh_window(&mut self, id: NodeId) {
        let Some(window) = self.config.window else { return };
        let reach = window.size + self.config.page_size;
        let (mut at, mut covered, mut newer) = (id, 0, None);
        while at != ROOT && covered < reach {
            if self.node(at).has(Part::Window) {
                let list = self.list_mut(Part::Window);
                list.remove(at);
                list.insert_older_than(at, newer);
                newer = Some(at);
            }
            covered += self.node(at).tokens.len();
            at = self.node(at).parent;
        }
    }

    /// Returns the least recently used node without a lock of the part, from `from` on.
    pub(super) fn unlocked_from(&self, part: Part, from: Option<NodeId>) -> Option<NodeId> {
        std::iter::successors(from, |&id| self.list(part).newer(id))
            .find(|&id| self.node(id).locks[part.index()] == 0)
    }
}
