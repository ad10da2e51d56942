//! Insertion in steps. A step ends where the engine has to act before the tree can continue.

use super::{
    HybridTree, NamespaceId, NodeHandle, NodeId, Part, ROOT, Request, SlotSource, TokenRun, TokenSource,
};
use crate::base::{EngineSlot, Error, Result, check_memory};
use crate::cache::{Namespace, SessionId};

/// The tokens to insert, and the request's relation to them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Insert {
    /// The number of tokens that the request had found in the tree and has locked since: their slots belong
    /// to the tree already. They are looked up by the first pages of nodes, and only the last ones are
    /// compared again.
    pub found: usize,
    /// The number of tokens that the request has inserted before. Inserting them again does not count as a
    /// use.
    pub inserted: usize,
    /// The number of tokens of the request's prompt, if more of them than these are known.
    pub prompt: usize,
    /// The number of tokens whose window slots are freed already, a whole number of pages.
    pub window_freed: usize,
    /// The priority of new nodes. Nodes of higher priority are evicted later, with
    /// [`EvictionOrder::Priority`](super::EvictionOrder::Priority).
    pub priority: i64,
    /// The state at the end of the tokens. It must not be empty if the model has linear attention.
    pub state: Vec<EngineSlot>,
    /// The [`Match::window_branch`](super::Match::window_branch) of the request, if there is one.
    pub branch: Option<usize>,
    /// The session of which the request is a turn, for [`EvictionOrder::Adaptive`](super::EvictionOrder::Adaptive).
    pub session: Option<SessionId>,
}

/// An action for the engine. Ranges are positions of inserted slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Free the slots together with their window slots.
    Free(PositionRange),
    /// Free the slots only: their window slots are free already, or were moved.
    FreeFull(PositionRange),
    /// Free slots that were in the tree. Their window slots are free already.
    FreeOld(Vec<EngineSlot>),
    /// Find the window slots of `slots`, and give them to the node with [`HybridTree::set_value`].
    Rebuild {
        /// The node that gets the window slots.
        node: NodeHandle,
        /// The slots of the node for full attention.
        slots: Vec<EngineSlot>,
    },
    /// Move the window slots of inserted slots to slots that are locked, and give them to the node with
    /// [`HybridTree::set_value`]. Free the inserted slots without window slots.
    Recover {
        /// The node that gets the window slots.
        node: NodeHandle,
        /// The slots of the node for full attention.
        kept: Vec<EngineSlot>,
        /// The inserted slots, whose window slots are moved.
        incoming: PositionRange,
    },
    /// Call [`HybridTree::evict_excess_states`] with the node.
    EvictExcess(NodeHandle),
}

impl Action {
    /// Returns whether the tree can continue only after this action.
    const fn ends_step(&self) -> bool {
        matches!(self, Self::Rebuild { .. } | Self::Recover { .. } | Self::EvictExcess(_))
    }
}

/// A range of positions in a prompt.
pub type PositionRange = std::ops::Range<usize>;

/// The inserted slots that the tree has taken over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdoptedRanges {
    /// Slots for full attention.
    pub full: Vec<PositionRange>,
    /// Slots whose window slots belong to the tree now.
    pub window: Vec<PositionRange>,
}

impl AdoptedRanges {
    fn add(&mut self, part: Part, range: PositionRange) {
        let ranges = if part == Part::Window { &mut self.window } else { &mut self.full };
        match ranges.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => *last = last.start.min(range.start)..last.end.max(range.end),
            None => ranges.push(range),
        }
    }
}

/// The result of an insertion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InsertResult {
    /// The number of tokens that were in the tree before, in whole pages.
    pub found: usize,
    /// The node at the end of the inserted tokens.
    pub node: NodeHandle,
    /// Whether the node had a state already. Then the inserted state still belongs to the caller.
    pub had_state: bool,
    /// Whether the inserted tokens reach [`Insert::branch`].
    pub reached_branch: bool,
    /// The values that were taken over.
    pub adopted: AdoptedRanges,
}

/// A step of an insertion.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Step {
    /// The actions to take, in this order.
    pub actions: Vec<Action>,
    /// The result, if this is the last step. Otherwise call [`HybridTree::advance`] after the actions.
    pub result: Option<InsertResult>,
    /// The tokens that this step has added.
    pub added: Option<AddedTokens>,
}

/// Tokens that an insertion has added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedTokens {
    /// The node at their end.
    pub node: NodeHandle,
    /// The positions of the tokens in the prompt.
    pub tokens: PositionRange,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The walk down the nodes that have the tokens already.
    Walk,
    /// The addition of the tokens that have no node, and of the values of the parts.
    Commit,
    /// The record of the use.
    Tail,
}

/// An insertion between two calls.
#[derive(Debug)]
pub(super) enum PendingInsertion {
    /// It continues with [`HybridTree::advance`].
    Waiting(Box<Insertion>),
    /// The insertion has failed. The engine still has to take the actions of the failed step.
    Failed(Vec<Action>),
}

/// An insertion in progress.
#[derive(Debug)]
pub(super) struct Insertion {
    phase: Phase,
    insert: Insert,
    request: Request,
    namespace: NamespaceId,
    /// The number of tokens to insert, in whole pages.
    limit: usize,
    /// The node that the insertion has reached, during a step.
    node: NodeId,
    /// The handle of that node, for the time between two steps, in which the engine may evict it.
    reached: NodeHandle,
    /// The number of tokens up to the end of that node.
    len: usize,
    /// Whether the insertion has added tokens.
    is_new: bool,
    result: InsertResult,
    /// The actions that were not returned yet.
    actions: Vec<Action>,
    /// The added tokens, if they were not returned yet.
    added: Option<AddedTokens>,
}

impl Insertion {
    /// Adds an action that frees duplicate slots, if there are any.
    fn free(&mut self, slots: PositionRange, action: impl FnOnce(PositionRange) -> Action) {
        if !slots.is_empty() {
            self.actions.push(action(slots));
        }
    }
}

impl HybridTree {
    /// Inserts the whole pages of `prompt` with their `slots`, up to the first step after which the engine
    /// has to act.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) if another insertion is in progress;
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if the model has linear attention and no state
    /// is given; the error of `slots`. End an insertion that has
    /// failed with [`HybridTree::end_insertion`]. The tokens that its earlier steps have added stay in the
    /// tree.
    pub fn begin(
        &mut self,
        name: &Namespace,
        prompt: &dyn TokenSource,
        slots: &dyn SlotSource,
        insert: Insert,
    ) -> Result<Step> {
        if self.insertion.is_some() {
            return Err(Error::state("an insertion is going on; advance or end it first"));
        }
        let limit = self.whole_pages(prompt);
        if self.config.state.is_some() && insert.state.is_empty() && limit > 0 {
            return Err(Error::argument("tokens are inserted with a state where nodes have states"));
        }
        let now = self.tick();
        self.node_mut(ROOT).used = now;
        let result = InsertResult {
            found: 0,
            node: self.root(),
            had_state: limit == 0,
            reached_branch: false,
            adopted: AdoptedRanges::default(),
        };
        if limit == 0 {
            return Ok(Step { actions: Vec::new(), result: Some(result), added: None });
        }
        self.pass_time(limit.saturating_sub(insert.inserted));
        if let Some(session) = insert.session.filter(|_| insert.inserted == 0) {
            self.begin_turn(session);
        }
        let request = self.request(insert.session, limit.max(insert.prompt), [insert.inserted, insert.found]);
        let walk = Box::new(Insertion {
            phase: Phase::Walk,
            insert,
            request,
            namespace: self.namespaces.number_or_new(name),
            limit,
            node: ROOT,
            reached: self.root(),
            len: 0,
            is_new: false,
            result,
            actions: Vec::new(),
            added: None,
        });
        self.take_step(walk, prompt, slots)
    }

    /// Continues an insertion of the same tokens and slots, after the actions of the previous step were
    /// taken.
    ///
    /// # Errors
    /// [`ErrorKind::State`](crate::base::ErrorKind::State) if no insertion is in progress, or it has failed;
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if it began with other tokens;
    /// [`ErrorKind::Stale`](crate::base::ErrorKind::Stale) if the node that it had reached was evicted since the
    /// previous step. Nothing is changed then. The error of `slots`, as for [`HybridTree::begin`].
    pub fn advance(
        &mut self,
        name: &Namespace,
        prompt: &dyn TokenSource,
        slots: &dyn SlotSource,
    ) -> Result<Step> {
        let walk = match self.insertion.take() {
            None => return Err(Error::state("no insertion is going on")),
            Some(PendingInsertion::Waiting(walk)) => walk,
            Some(failed @ PendingInsertion::Failed(_)) => {
                self.insertion = Some(failed);
                return Err(Error::state("the insertion has failed; end it first"));
            }
        };
        if let Err(error) = self.check_resumable(&walk, name, prompt) {
            self.insertion = Some(PendingInsertion::Waiting(walk));
            return Err(error);
        }
        self.take_step(walk, prompt, slots)
    }

    /// Checks that an insertion can continue, and that the tokens are those with which it began.
    fn check_resumable(&self, walk: &Insertion, name: &Namespace, prompt: &dyn TokenSource) -> Result<()> {
        if !self.contains(walk.reached) {
            return Err(Error::stale(format!(
                "node {}, which the insertion has reached, was evicted before it went on; end the insertion",
                walk.reached.number()
            )));
        }
        if self.namespaces.number(name) != Some(walk.namespace) || self.whole_pages(prompt) != walk.limit {
            return Err(Error::argument(format!(
                "an insertion goes on with the namespace and the {} tokens that it began with",
                walk.limit
            )));
        }
        Ok(())
    }

    /// Inserts up to the next action that ends a step.
    fn take_step(
        &mut self,
        mut walk: Box<Insertion>,
        prompt: &dyn TokenSource,
        slots: &dyn SlotSource,
    ) -> Result<Step> {
        let mut page = Vec::with_capacity(self.config.page_size);
        loop {
            let earlier = walk.actions.len();
            let progress = match walk.phase {
                Phase::Walk => self.insert_over(&mut walk, prompt, slots, &mut page),
                Phase::Commit => self.insert_rest(&mut walk, prompt, slots),
                Phase::Tail => {
                    self.end_insertion_at(&walk);
                    return Ok(Step { actions: walk.actions, result: Some(walk.result), added: walk.added });
                }
            };
            if let Err(error) = progress {
                self.namespaces.forget_unused(walk.namespace);
                // The engine still has to free the duplicate slots that were found.
                self.insertion = Some(PendingInsertion::Failed(walk.actions));
                return Err(error);
            }
            if walk.actions[earlier..].iter().any(Action::ends_step) {
                let (actions, added) = (std::mem::take(&mut walk.actions), walk.added.take());
                walk.reached = self.handle(walk.node);
                self.insertion = Some(PendingInsertion::Waiting(walk));
                return Ok(Step { actions, result: None, added });
            }
        }
    }

    /// Returns whether an insertion is in progress, or has failed and was not ended yet.
    #[must_use]
    pub const fn is_inserting(&self) -> bool {
        self.insertion.is_some()
    }

    /// Ends an insertion, if one is in progress or has failed, and returns the actions that the engine still
    /// has to take.
    pub fn end_insertion(&mut self) -> Vec<Action> {
        match self.insertion.take() {
            None => Vec::new(),
            Some(PendingInsertion::Waiting(walk)) => walk.actions,
            Some(PendingInsertion::Failed(actions)) => actions,
        }
    }

    /// Handles one node that is in the tree already.
    fn insert_over(
        &mut self,
        walk: &mut Insertion,
        prompt: &dyn TokenSource,
        slots: &dyn SlotSource,
        page: &mut Vec<i64>,
    ) -> Result<()> {
        let child = if walk.len == walk.limit {
            None
        } else {
            self.step(walk.node, walk.namespace, prompt, walk.len, walk.insert.found, page)
        };
        let Some((child, common)) = child else {
            walk.phase = Phase::Commit;
            return Ok(());
        };
        let now = self.tick();
        self.node_mut(child).used = now;
        let node =
            if common < self.node(child).tokens.len() { self.split_node(child, common) } else { child };
        let (start, end) = (walk.len, walk.len + common);
        // This precedes a split, so both parts get the priority.
        let here = self.node_mut(node);
        here.priority = here.priority.max(walk.insert.priority);
        let recovered = self.recover_window(walk, node, start..end, slots);
        let taken_from = recovered.inspect_err(|_| self.requeue(node))?;
        let free = start.max(walk.insert.found)..taken_from;
        if !free.is_empty() {
            self.check_duplicates(slots, &free);
            let freed = walk.insert.window_freed.clamp(free.start, free.end);
            walk.free(free.start..freed, Action::FreeFull);
            walk.free(freed..free.end, Action::Free);
        }
        let inserted = walk.insert.inserted;
        if start < inserted {
            self.go_on(&mut walk.request, node);
        }
        if end > inserted {
            let here = self.node_mut(node);
            here.hits = here.hits.saturating_add(1);
            self.count_use(node, walk.request);
        }
        self.requeue(node);
        (walk.node, walk.len) = (node, end);
        Ok(())
    }

    /// Takes the window slots of inserted slots for a node that has lost its own. Returns the position from
    /// which on the slots are taken.
    fn recover_window(
        &mut self,
        walk: &mut Insertion,
        node: NodeId,
        range: PositionRange,
        slots: &dyn SlotSource,
    ) -> Result<usize> {
        let is_found = walk.insert.found >= range.end;
        if self.config.window.is_none() || is_found || self.node(node).has(Part::Window) {
            return Ok(range.end);
        }
        let live = range.start.max(self.window_start(&walk.insert)?);
        if live >= range.end {
            return Ok(range.end);
        }
        let is_locked = self.node(node).locks[Part::Full.index()] > 0;
        let incoming = if is_locked { Vec::new() } else { slots.read(live, range.end - live)? };
        if live > range.start {
            self.split_node(node, live - range.start);
        }
        walk.result.adopted.add(Part::Window, live..range.end);
        let handle = self.handle(node);
        if is_locked {
            let kept = self.node(node).value(Part::Full).to_vec();
            walk.actions.push(Action::Recover { node: handle, kept, incoming: live..range.end });
        } else {
            walk.result.adopted.add(Part::Full, live..range.end);
            let full = &mut self.node_mut(node).values[Part::Full.index()];
            let old = std::mem::replace(full, incoming.clone());
            self.owners.record_removed(&old);
            self.owners.record_adopted(&incoming);
            walk.actions.push(Action::FreeOld(old));
            walk.actions.push(Action::Rebuild { node: handle, slots: incoming });
        }
        Ok(live)
    }

    /// Returns the position from which on inserted slots have window slots.
    fn window_start(&self, insert: &Insert) -> Result<usize> {
        if insert.window_freed.is_multiple_of(self.config.page_size) {
            return Ok(insert.window_freed);
        }
        Err(Error::argument(format!(
            "the windows of {} tokens are freed; that is no multiple of the page size {}",
            insert.window_freed, self.config.page_size
        )))
    }

    /// Adds the tokens that are not in the tree yet, and gives the parts their values.
    fn insert_rest(
        &mut self,
        walk: &mut Insertion,
        prompt: &dyn TokenSource,
        slots: &dyn SlotSource,
    ) -> Result<()> {
        let (start, end) = (walk.len, walk.limit);
        let mut target = walk.node;
        if start < end {
            self.window_start(&walk.insert)?;
            // For the slots, the tokens, the keys of pages, and what is copied of them.
            check_memory((end - start) * 4 * size_of::<i64>())?;
            let values = slots.read(start, end - start)?;
            let tokens = TokenRun::of(prompt, start, end - start)?;
            walk.result.adopted.add(Part::Full, start..end);
            let priority = walk.insert.priority;
            target = self.add_leaf(walk.node, walk.namespace, tokens, values, priority, walk.request);
            walk.is_new = true;
            walk.added = Some(AddedTokens { node: self.handle(target), tokens: start..end });
        }
        walk.node = target;
        (walk.result.found, walk.result.node) = (start, self.handle(target));
        if self.config.window.is_some() {
            walk.result.reached_branch = walk.insert.branch.is_some_and(|branch| prompt.count() >= branch);
            if walk.is_new {
                self.add_window(walk, target, start..end)?;
            }
        }
        if let Some(state) = self.config.state {
            let had_state = self.node(target).has(Part::State);
            walk.result.had_state = had_state;
            if had_state {
                self.list_mut(Part::State).touch(target);
            } else {
                self.attach(target, Part::State, std::mem::take(&mut walk.insert.state));
                if state.max_per_path.is_some() {
                    walk.actions.push(Action::EvictExcess(walk.result.node));
                }
            }
            if !walk.is_new {
                let now = self.tick();
                self.node_mut(target).used = now;
                self.requeue(target);
            }
        }
        walk.phase = Phase::Tail;
        Ok(())
    }

    /// Requests the window slots of a new leaf. The last window becomes a node of its own, so that a lock
    /// protects no more than that.
    fn add_window(&mut self, walk: &mut Insertion, leaf: NodeId, range: PositionRange) -> Result<()> {
        let Some(window) = self.config.window else { return Ok(()) };
        let live = range.start.max(self.window_start(&walk.insert)?);
        if live >= range.end {
            return Ok(());
        }
        let last = window.size.next_multiple_of(self.config.page_size);
        self.split_path(leaf, live);
        if range.end - live > last {
            self.split_path(leaf, range.end - last);
        }
        let nodes: Vec<_> = self.path(leaf).take_while(|&id| self.node(id).end > live).collect();
        walk.actions.extend(nodes.into_iter().rev().map(|id| self.rebuild(id)));
        walk.result.adopted.add(Part::Window, live..range.end);
        Ok(())
    }

    /// Splits the node of the path to `end` within which position `at` is, so that none has both sides of it.
    fn split_path(&mut self, end: NodeId, at: usize) {
        let node = self.path(end).find(|&id| self.node(id).end - self.node(id).tokens.len() <= at);
        let Some(node) = node else { return };
        let front = at - (self.node(node).end - self.node(node).tokens.len());
        if front > 0 && at < self.node(node).end {
            self.split_node(node, front);
        }
    }

    fn rebuild(&self, node: NodeId) -> Action {
        Action::Rebuild { node: self.handle(node), slots: self.node(node).value(Part::Full).to_vec() }
    }

    fn end_insertion_at(&mut self, walk: &Insertion) {
        let target = walk.node;
        self.refresh_window(target);
        let len = self.node(target).tokens.len();
        if walk.is_new && walk.result.found + len > walk.insert.inserted {
            let here = self.node_mut(target);
            here.hits = here.hits.saturating_add(1);
            self.requeue(target);
        }
    }
}
