//! What requests in the engine's waiting queue will find: it is evicted after all else that is not retained.
//!
//! A request needs the tokens up to a node, and the snapshot at its end if it was found up to there. Only leaves are
//! evicted, so it is enough to know that node: the pages before it are safe behind it. If it is evicted all the same, the
//! request needs what is left: up to the snapshot before it, if it had one, and else up to its parent. A node that is split
//! keeps its end, and the requests with it.
//!
//! *Cost.* A look-up visits the nodes that a match would, and may split one. To change what requests need is logarithmic in
//! their number; to remove a node that many need, linear.

use super::{Kind, Namespace, NodeId, Tokens, Tree, TreePosition};
use crate::base::{Error, Page, Result};
use crate::cache::{WaitingId, WaitingRank};

impl Tree {
    /// Adds a request that waits until it is served, behind those of its rank. It needs nothing until it is
    /// [looked up](Self::look_up_waiting).
    ///
    /// ```
    /// use std::time::Instant;
    /// use kvpool::base::{Id, Page};
    /// use kvpool::cache::{
    ///     BlockTokens, Cause, Namespace, PolicyKind, Pressure, ResumeAt, Tree, WaitingId, WaitingRank,
    /// };
    /// let name = Namespace::Unnamed;
    /// let policy = PolicyKind::Lru.policy(1024, BlockTokens::of_page_size(1), None);
    /// let mut tree = Tree::new(1, ResumeAt::AnyPage, policy);
    /// let prompts: [&[i32]; 2] = [&[5, 6], &[8]];
    /// for (prompt, page) in prompts.iter().zip([20, 30]) {
    ///     let mut hold = tree.match_prefix(&name, prompt, 0).unwrap();
    ///     let found = tree.find(&hold, prompt).unwrap();
    ///     let pages: Vec<Page> = (page..).take(prompt.len()).map(Page::new).collect();
    ///     tree.publish(&mut hold, found, prompt.to_vec(), &pages);
    ///     drop(tree.release(hold));
    /// }
    /// let request: WaitingId = tree.add_waiting(WaitingRank::default());
    /// assert_eq!(tree.look_up_waiting(request, &name, &prompts[0], 2).unwrap(), 2);
    /// let cause = || Cause { pressure: Pressure::Alloc, at: Instant::now() };
    /// assert_eq!(tree.evict(1, cause()).pages, [Page::new(30)], "a waiting request needs the older prompt");
    /// assert_eq!(tree.evict(1, cause()).pages, [Page::new(21)], "nothing is locked");
    /// tree.remove_waiting(request);
    /// assert!(tree.look_up_waiting(request, &name, &prompts[0], 2).is_err());
    /// ```
    pub fn add_waiting(&mut self, rank: WaitingRank) -> WaitingId {
        self.queues.waiting.add(rank)
    }

    /// Looks up what a waiting request would find of the first `limit` of `tokens`, and returns its length. The request
    /// needs that from now on, in place of what it needed before. It does not count as a use. Tokens behind what is found
    /// are not checked.
    ///
    /// # Errors
    /// See [`Self::cached_len`]; also [`ErrorKind::State`](crate::base::ErrorKind::State) if the request was removed.
    pub fn look_up_waiting(
        &mut self,
        request: WaitingId,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
    ) -> Result<usize> {
        self.look_up_waiting_at(request, namespace, tokens, limit, Self::usable_place)
    }

    /// Works like [`Self::look_up_waiting`]. The request would go on at the place that `usable` returns, which is at or
    /// before the place where the cached tokens end.
    pub(in crate::cache) fn look_up_waiting_at(
        &mut self,
        request: WaitingId,
        namespace: &Namespace,
        tokens: &dyn Tokens,
        limit: usize,
        usable: impl FnOnce(&Self, TreePosition) -> TreePosition,
    ) -> Result<usize> {
        if !self.queues.waiting.has(request) {
            return Err(Error::state("the request does not wait any more: it was removed"));
        }
        let place = self.place_of(namespace, tokens, limit.min(tokens.count()))?;
        let end = place.map(|place| usable(self, place)).filter(|end| end.len > 0);
        end.map_or(Ok(()), |end| self.check_memory_at(end, 0, 0))?;
        let node = end.map(|end| self.split_node(end));
        let needed = self.queues.waiting.needed_by(request).first().copied();
        if node != needed {
            self.requeue(needed, |tree, id| tree.queues.waiting.end_need(request, id));
            self.requeue(node, |tree, id| tree.queues.waiting.need(request, id));
        }
        Ok(end.map_or(0, |end| end.len))
    }

    /// Removes a request, because it runs now or does not go on. One that was removed before is ignored.
    pub fn remove_waiting(&mut self, request: WaitingId) {
        let needed = self.queues.waiting.needed_by(request).first().copied();
        self.requeue(needed, |tree, id| tree.queues.waiting.end_need(request, id));
        self.queues.waiting.remove(request);
    }

    /// Returns the last page of what a waiting request needs.
    pub(in crate::cache) fn waiting_page(&self, request: WaitingId) -> Option<Page> {
        let &needed = self.queues.waiting.needed_by(request).first()?;
        self.node(needed).pages.last().copied()
    }

    /// Lets the requests of `earlier`, which is no longer used, wait here, too. They need nothing until they are looked up.
    pub(crate) fn keep_waiting_of(&mut self, earlier: &mut Self) {
        self.queues.waiting = std::mem::take(&mut earlier.queues.waiting).without_needs();
    }

    /// Changes which requests need a node.
    fn requeue(&mut self, id: Option<NodeId>, change: impl FnOnce(&mut Self, NodeId)) {
        if let Some(id) = id {
            self.unqueue(id);
            change(self, id);
            self.queue(id);
        }
    }

    /// Lets the requests that need the end of a node, which is about to be removed or to lose its snapshot, need what is
    /// before it. The node is not queued.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "an eviction calls it for each leaf")]
    pub(super) fn move_needs_up(&mut self, id: NodeId) {
        if !self.queues.waiting.needs(id) {
            return;
        }
        let here = self.node(id);
        let before = if here.has_snapshot { self.last_snapshot_of(here.parent) } else { here.parent };
        let before = Some(before).filter(|&before| self.node(before).kind == Kind::Run);
        // A node with children is not queued.
        self.queues.waiting.replace(id, before);
    }

    /// Works like [`Self::move_needs_up`], for a node that stays.
    pub(super) fn move_needs_to_snapshot_before(&mut self, id: NodeId) {
        if self.queues.waiting.needs(id) {
            self.requeue(Some(id), Self::move_needs_up);
        }
    }

    /// Describes a leaf that waiting requests need and that is not in the queue for those, or the other way round; or a
    /// request that needs something from which it could not go on.
    pub(super) fn broken_needs(&self) -> Option<String> {
        if let Some(broken) = self.queues.waiting.broken_invariant() {
            return Some(broken);
        }
        let lost = self.queues.waiting.needed().find(|&id| {
            let here = self.node(id);
            here.kind != Kind::Run || here.pages.is_empty() || (self.is_stateful && !here.has_snapshot)
        });
        if let Some(lost) = lost {
            return Some(format!("a waiting request needs {lost:?}, where it cannot go on"));
        }
        let queued = |id: &NodeId| self.node(*id).is_queued && self.node(*id).history.priority == 0;
        let mut needed: Vec<_> = self.nodes.ids().filter(queued).collect();
        needed.retain(|&id| self.queues.waiting.needs(id));
        let mut offered: Vec<_> = self.queues.waiting.offered().collect();
        needed.sort_unstable();
        offered.sort_unstable();
        (needed != offered)
            .then(|| format!("waiting requests need the leaves {needed:?}, queued {offered:?}"))
    }
}
