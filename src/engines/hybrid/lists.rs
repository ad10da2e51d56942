//! Lists of the nodes with a value of a part, the most recently used node first.

use super::{HybridTree, NodeId, Part, ROOT};

/// The neighbours of a node in a list.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ListLink {
    /// The node that was used next after it.
    later: Option<NodeId>,
    /// The node that was used last before it.
    earlier: Option<NodeId>,
    is_listed: bool,
}

#[derive(Debug, Default)]
pub(super) struct List {
    /// The most recently used node.
    pub(super) first: Option<NodeId>,
    /// The least recently used node.
    pub(super) last: Option<NodeId>,
    pub(super) len: usize,
}

/// Returns the number of the list of a part. Full attention has no list: its nodes are queued instead.
fn number(part: Part) -> usize {
    match part {
        Part::Full => unreachable!("full attention has no list"),
        Part::Window => 0,
        Part::State => 1,
    }
}

impl HybridTree {
    pub(super) fn list(&self, part: Part) -> &List {
        &self.lists[number(part)]
    }

    pub(super) fn is_listed(&self, part: Part, id: NodeId) -> bool {
        self.node(id).links[number(part)].is_listed
    }

    /// Returns the node that was used last before `id`.
    pub(super) fn earlier(&self, part: Part, id: NodeId) -> Option<NodeId> {
        self.node(id).links[number(part)].earlier
    }

    /// Adds a node that is not listed, as the next older one after `later`. Without `later`, it becomes the
    /// first.
    fn list_older_than(&mut self, part: Part, later: Option<NodeId>, id: NodeId) {
        let at = number(part);
        debug_assert!(!self.node(id).links[at].is_listed, "a node is listed once");
        let earlier = match later {
            None => self.lists[at].first.replace(id),
            Some(later) => self.node_mut(later).links[at].earlier.replace(id),
        };
        match earlier {
            None => self.lists[at].last = Some(id),
            Some(earlier) => self.node_mut(earlier).links[at].later = Some(id),
        }
        self.node_mut(id).links[at] = ListLink { later, earlier, is_listed: true };
        self.lists[at].len += 1;
    }

    pub(super) fn list_first(&mut self, part: Part, id: NodeId) {
        self.list_older_than(part, None, id);
    }

    pub(super) fn list_after(&mut self, part: Part, later: NodeId, id: NodeId) {
        self.list_older_than(part, Some(later), id);
    }

    pub(super) fn unlist(&mut self, part: Part, id: NodeId) {
        let at = number(part);
        let ListLink { later, earlier, is_listed } = std::mem::take(&mut self.node_mut(id).links[at]);
        debug_assert!(is_listed, "only a listed node is taken out");
        match later {
            None => self.lists[at].first = earlier,
            Some(later) => self.node_mut(later).links[at].earlier = earlier,
        }
        match earlier {
            None => self.lists[at].last = later,
            Some(earlier) => self.node_mut(earlier).links[at].later = later,
        }
        self.lists[at].len -= 1;
    }

    /// Records a use of the value of a node.
    pub(super) fn refresh(&mut self, part: Part, id: NodeId) {
        if self.list(part).first != Some(id) {
            self.unlist(part, id);
            self.list_first(part, id);
        }
    }

    /// Records a use of the window slots that a request at the end of `id` may read: those of the last window
    /// and a page. The deepest node becomes the most recent one.
    pub(super) fn refresh_window(&mut self, id: NodeId) {
        let Some(window) = self.config.window else { return };
        let reach = window.size + self.config.page_size;
        let (mut at, mut covered, mut later) = (id, 0, None);
        while at != ROOT && covered < reach {
            if self.node(at).has(Part::Window) {
                self.unlist(Part::Window, at);
                self.list_older_than(Part::Window, later, at);
                later = Some(at);
            }
            covered += self.node(at).tokens.len();
            at = self.node(at).parent;
        }
    }

    /// Returns the least recently used node without a lock of the part, from `from` on.
    pub(super) fn unlocked_from(&self, part: Part, from: Option<NodeId>) -> Option<NodeId> {
        let mut at = from;
        while let Some(id) = at
            && self.node(id).locks[part.index()] > 0
        {
            at = self.node(id).links[number(part)].later;
        }
        at
    }

    /// Returns the node that was used next after `id`.
    pub(super) fn later(&self, part: Part, id: NodeId) -> Option<NodeId> {
        self.node(id).links[number(part)].later
    }
}
