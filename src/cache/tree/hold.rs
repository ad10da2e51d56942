//! Finding a prefix, and locking it while it is in use.

use crate::base::bounded::saturated;
use crate::base::{Page, Result, try_collect_each, try_push, try_with_capacity, widen};
use crate::index::PageList;

use super::evict::Evicted;
use super::{
    Kind, Namespace, NodeId, Novelty, RequestNovelty, SessionId, Tick, Tokens, Tree, TreePosition, narrow,
};

/// A lock of a prefix: until [`Tree::release`] the prefix is not evicted.
///
/// It is not a guard: if it is dropped, the prefix stays locked. [`pool`](crate::pool) makes a guard of it.
#[derive(Debug)]
#[must_use]
pub struct Hold {
    pub(super) node: NodeId,
    /// The number of tokens of the prefix, in whole pages.
    pub(super) len: usize,
    /// The number of tokens whose pages were found, whether or not there was a snapshot of the state.
    found: usize,
    /// Whether the last node was published through this hold, so that more pages may be appended to it.
    pub(super) is_author: bool,
    /// The number of tokens that were looked up: the length of the prompt.
    pub(super) prompt_len: usize,
    /// The node of the last snapshot that was made through this hold after the tokens of the prompt.
    pub(super) own_snapshot: Option<NodeId>,
    /// The session whose turn it is.
    pub(super) session: Option<SessionId>,
    /// How new the request is.
    pub(super) novelty: RequestNovelty,
}

impl Hold {
    /// Returns the number of tokens of the prefix, in whole pages.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of tokens whose pages are cached, in whole pages. It exceeds [`Hold::len`] if the
    /// tree is stateful and has no snapshot at their end.
    #[must_use]
    pub const fn found(&self) -> usize {
        if self.found > self.len { self.found } else { self.len }
    }

    /// Returns whether the prefix has no tokens.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Tree {
    /// Locks the longest cached prefix of `tokens`, in whole pages and of at most `limit` tokens, and records
    /// its use.
    ///
    /// # Errors
    /// Returns an error if a token cannot be read or is not a token id. Nothing is changed then.
    pub fn match_prefix(&mut self, namespace: &Namespace, tokens: &dyn Tokens, limit: usize) -> Result<Hold> {
        self.match_at(None, namespace, tokens, limit, true, Self::usable_place)
    }

    /// Works like [`Tree::match_prefix`], for a turn of a session, which ends with the hold.
    ///
    /// # Errors
    /// See [`Tree::match_prefix`].
    pub fn match_in_session(
        &mut self,
        session: SessionId,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<Hold> {
        self.match_at(Some(session), namespace, tokens, limit, true, Self::usable_place)
    }

    /// Works like [`Tree::match_prefix`]. The prefix ends at the place that `usable` returns, which is at or before
    /// the place where the cached tokens end. It counts as used if that `is_use`, which that of a session is.
    pub(in crate::cache) fn match_at(
        &mut self,
        session: Option<SessionId>,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        is_use: bool,
        usable: impl FnOnce(&Self, TreePosition) -> TreePosition,
    ) -> Result<Hold> {
        let limit = limit.min(tokens.count());
        let place = match self.root(namespace) {
            None => None,
            Some(root) => Some(self.descend(root, tokens, limit / self.page_size)?),
        };
        tokens.check(place.map_or(0, |place| place.len)..tokens.count())?;
        let end = place.map(|place| usable(self, place));
        end.map_or(Ok(()), |end| self.check_memory_at(end, 0, 0))?;
        if is_use {
            // An empty prompt counts as a look-up, too.
            self.now = Tick::new(self.now.tokens() + tokens.count().max(1) as u64);
        }
        let found = place.map_or(0, |place| place.len);
        let new = saturated(tokens.count() - found);
        let policy = &mut self.queues.policy;
        let novelty = if is_use { policy.record_request(new) } else { policy.novelty(new) };
        let node = match end {
            None => self.root_or_new(namespace),
            Some(end) => self.split_node(end),
        };
        self.lock(node, is_use);
        if is_use {
            self.touch(node, None, session, novelty);
            self.keep_use(node);
        }
        if let Some(session) = session {
            self.sessions.begin_turn(session, self.now);
        }
        let (len, prompt_len) = (widen(self.node(node).end), tokens.count());
        Ok(Hold {
            node,
            len,
            found,
            is_author: false,
            prompt_len,
            own_snapshot: None,
            session,
            novelty: RequestNovelty { level: novelty, is_estimate: true },
        })
    }

    /// Returns the page before a place, unless it is the beginning.
    pub(in crate::cache) fn page_before(&self, place: TreePosition) -> Option<Page> {
        place.pages.checked_sub(1).map(|last| self.node(place.node).pages[last])
    }

    /// Returns the last page of a hold, unless it is empty.
    pub(in crate::cache) fn last_page(&self, hold: &Hold) -> Option<Page> {
        self.node(hold.node).pages.last().copied()
    }

    /// Returns the first `count` pages of a hold, which has as many.
    pub(in crate::cache) fn first_pages(&self, hold: &Hold, count: usize) -> Vec<Page> {
        if count == 0 {
            return Vec::new();
        }
        let path: Vec<_> = self.path(hold.node).collect();
        path.iter().rev().flat_map(|&id| self.node(id).pages.iter().copied()).take(count).collect()
    }

    /// Returns the namespace of a hold, unless it was cleared since.
    pub(in crate::cache) fn namespace_of(&self, hold: &Hold) -> Option<&Namespace> {
        self.roots.name(self.node(hold.node).root)
    }

    /// Returns the pages and the tokens of a hold from token `from` on, which begins a page.
    pub(in crate::cache) fn pages_with_tokens(&self, hold: &Hold, from: usize) -> (Vec<Page>, Vec<i32>) {
        let (mut pages, mut tokens) = (Vec::new(), Vec::new());
        let nodes = self.path(hold.node).map(|id| self.node(id)).take_while(|node| widen(node.end) > from);
        let nodes: Vec<_> = nodes.collect();
        for node in nodes.into_iter().rev() {
            let skipped = from.saturating_sub(widen(node.end) - node.tokens.len());
            pages.extend_from_slice(&node.pages[skipped / self.page_size..]);
            tokens.extend_from_slice(&node.tokens[skipped..]);
        }
        (pages, tokens)
    }

    /// Returns the place of position `len`, which is at or before `place`.
    pub(in crate::cache) fn place_before(&self, place: TreePosition, len: usize) -> TreePosition {
        if len == place.len { place } else { self.place_on_path(place.node, len) }
    }

    /// Returns the first position at which `tokens` differ from those of a hold.
    ///
    /// # Errors
    /// The error of tokens that cannot be read.
    pub(in crate::cache) fn difference(&self, hold: &Hold, tokens: &dyn Tokens) -> Result<Option<usize>> {
        let mut difference = None;
        for id in self.path(hold.node) {
            let node = self.node(id);
            let begin = widen(node.end) - node.tokens.len();
            let equal = if begin < tokens.count() { tokens.common(begin, &node.tokens)? } else { 0 };
            if equal < node.tokens.len() {
                difference = Some(begin + equal);
            }
        }
        Ok(difference)
    }

    /// Returns the length of the longest cached prefix of `tokens`, in whole pages. Changes nothing.
    ///
    /// # Errors
    /// Returns an error if a token cannot be read.
    pub fn cached_len(&self, namespace: &Namespace, tokens: &dyn Tokens) -> Result<usize> {
        let place = self.place_of(namespace, tokens, tokens.count())?;
        Ok(place.map_or(0, |place| self.usable_place(place).len))
    }

    /// Creates another hold of the first `len` tokens, which are a whole number of pages.
    pub fn hold_first(&mut self, hold: &Hold, len: usize) -> Hold {
        let len = len.min(hold.len);
        let node = self.split_node(self.place_on_path(hold.node, len));
        self.lock(node, true);
        let found = if len < hold.len { len } else { hold.found };
        Hold { node, len, found, is_author: false, own_snapshot: None, ..*hold }
    }

    /// Creates another hold of the same prefix.
    pub fn hold_again(&mut self, hold: &Hold) -> Hold {
        self.hold_first(hold, hold.len)
    }

    /// Creates another hold of the same prefix, for a copy of what is there. No request goes on from it, so that the
    /// snapshot at its end is worth no more than before.
    pub fn hold_for_copy(&mut self, hold: &Hold) -> Hold {
        self.lock(hold.node, false);
        Hold { is_author: false, own_snapshot: None, session: None, ..*hold }
    }

    /// Ends a use of a prefix, and with it the turn of its session. Returns the pages and snapshots that were detached and had no other use.
    #[expect(clippy::needless_pass_by_value, reason = "a hold ends here")]
    pub fn release(&mut self, hold: Hold) -> Evicted {
        if let Some(session) = hold.session {
            self.end_turn(session, hold.node);
        }
        self.unlock(hold.node);
        self.prune(hold.node)
    }

    /// Returns the place of position `len` on the path to `node`.
    fn place_on_path(&self, node: NodeId, len: usize) -> TreePosition {
        let mut at = node;
        loop {
            let here = self.node(at);
            let begin = widen(here.end) - here.tokens.len();
            if begin < len || here.kind != Kind::Run {
                return TreePosition { node: at, pages: (len - begin) / self.page_size, len };
            }
            at = here.parent;
        }
    }

    /// Returns the deepest node that ends at or before `place` and has a snapshot. If there is none, returns
    /// the root.
    pub(super) fn last_snapshot(&self, place: TreePosition) -> NodeId {
        let is_whole = place.pages == self.node(place.node).pages.len();
        self.last_snapshot_of(if is_whole { place.node } else { self.node(place.node).parent })
    }

    /// Returns the deepest node on the path to `node` that has a snapshot. If there is none, returns the root.
    pub(super) fn last_snapshot_of(&self, node: NodeId) -> NodeId {
        let mut at = node;
        while self.node(at).kind == Kind::Run && !self.node(at).has_snapshot {
            at = self.node(at).parent;
        }
        at
    }

    /// Returns the pages of a hold from token `from` on, in order.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate the
    /// list.
    pub fn pages(&self, hold: &Hold, from: usize) -> Result<Vec<Page>> {
        let pages = self.node(hold.node).pages.len();
        self.pages_up_to(TreePosition { node: hold.node, pages, len: hold.len }, from)
    }

    /// Returns the pages of a hold, in order. Long runs are not copied: the list shares their memory with the
    /// tree.
    ///
    /// # Errors
    /// Same as [`Tree::pages`].
    pub fn share_pages(&mut self, hold: &Hold) -> Result<PageList> {
        let mut pages = PageList::default();
        let path = try_collect_each(self.path(hold.node))?;
        let shared_len = self.shared_len;
        for id in path.into_iter().rev() {
            let run = &mut self.node_mut(id).pages;
            match run.share(shared_len) {
                Some(run) => pages.share(run),
                None => pages.extend_from_slice(run)?,
            }
        }
        Ok(pages)
    }

    /// Returns the pages of positions `from..place.len`.
    pub(super) fn pages_up_to(&self, place: TreePosition, from: usize) -> Result<Vec<Page>> {
        let runs = self.runs_up_to(place, from)?;
        let mut pages = try_with_capacity(runs.iter().map(|run| run.len()).sum())?;
        for run in runs {
            pages.extend_from_slice(run);
        }
        Ok(pages)
    }

    /// Returns the pages of positions `from..place.len` as slices of the nodes, in order.
    fn runs_up_to(&self, place: TreePosition, from: usize) -> Result<Vec<&[Page]>> {
        let mut parts = Vec::new();
        let mut begin = place.len;
        for id in self.path(place.node) {
            if begin <= from {
                break;
            }
            let pages = &self.node(id).pages;
            let until = if id == place.node { place.pages } else { pages.len() };
            begin -= until * self.page_size;
            try_push(&mut parts, &pages[from.saturating_sub(begin) / self.page_size..until])?;
        }
        parts.reverse();
        Ok(parts)
    }

    /// Moves a hold to the end of `node`, which follows it.
    pub(super) fn move_hold(&mut self, hold: &mut Hold, node: NodeId) {
        if node != hold.node {
            self.lock(node, true);
            self.unlock(hold.node);
        }
        hold.node = node;
        hold.len = widen(self.node(node).end);
    }

    /// Records a use of the nodes on the path to `node`, by a session or none; only of those after `previous`,
    /// if it is given. The node has a lock.
    pub(super) fn touch(
        &mut self,
        node: NodeId,
        previous: Option<NodeId>,
        session: Option<SessionId>,
        novelty: Novelty,
    ) {
        let now = self.now;
        let mut path = std::mem::take(&mut self.path);
        path.extend(self.path(node).take_while(|&id| previous != Some(id)));
        while let Some(id) = path.pop() {
            let here = self.node(id);
            let (history, end) = (here.history, here.end);
            let positions = end - narrow(here.tokens.len())..end;
            let after = history.used_again(novelty, now);
            self.queues.policy.record_use(&history, &after, positions);
            let here = self.node_mut(id);
            here.history = after;
            here.user = here.user.filter(|&user| session == Some(user));
            self.offer_used(id);
        }
        self.path = path;
    }

    /// Adds a lease that ends at `node`. A request goes on there if that `is_use`.
    pub(super) fn lock(&mut self, node: NodeId, is_use: bool) {
        let here = self.node_mut(node);
        here.leases += 1;
        if here.has_snapshot {
            self.snapshots.set_leased(node, is_use.then_some(self.now));
        }
        let mut at = node;
        loop {
            let here = self.node_mut(at);
            here.locks += 1;
            if here.locks > 1 {
                return;
            }
            let (pages, parent) = (here.pages.len(), here.parent);
            self.counts.locked += pages;
            self.unqueue(at);
            if parent == at {
                return;
            }
            at = parent;
        }
    }

    /// Removes a lease that ends at `node`.
    pub(super) fn unlock(&mut self, node: NodeId) {
        let here = self.node_mut(node);
        here.leases -= 1;
        if here.has_snapshot && here.leases == 0 {
            self.snapshots.set_unused(node);
        }
        let mut at = node;
        loop {
            let here = self.node_mut(at);
            here.locks -= 1;
            if here.locks > 0 {
                return;
            }
            let (pages, parent) = (here.pages.len(), here.parent);
            self.counts.locked -= pages;
            self.queue(at);
            if parent == at {
                break;
            }
            at = parent;
        }
        // A detached node is pruned.
        if self.node(at).kind == Kind::Root {
            self.drop_if_empty(at);
        }
    }
}
