//! Inserting, in steps: where the engine must act before the tree goes on, a step ends.

use super::{HybridTree, NamespaceId, NodeHandle, NodeId, Part, ROOT, SlotSource, TokenRun, TokenSource};
use crate::base::{EngineSlot, Error, Result};
use crate::cache::Namespace;

/// The facts about tokens to insert.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Insert {
    /// Tokens that the request had found in the tree, and has locked since: their slots are the tree's
    /// already. They are looked for by the first pages of nodes, and only the last tokens are compared again.
    pub found: usize,
    /// Tokens that the request has inserted before: they do not count as used again.
    pub inserted: usize,
    /// Tokens whose windows are freed already, a whole number of pages.
    pub window_freed: usize,
    /// Nodes with a higher one go later, with [`EvictionOrder::Priority`](super::EvictionOrder::Priority).
    pub priority: i64,
    /// The state at the end of the tokens. Not empty where nodes have states.
    pub state: Vec<EngineSlot>,
    /// The number of tokens at which the request branches off from a window.
    pub branch: Option<usize>,
}

/// An action for the engine. Ranges are of the slots that are inserted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Free slots with their windows.
    Free(PositionRange),
    /// Free slots whose windows are free already, or have gone elsewhere.
    FreeFull(PositionRange),
    /// Free slots that were in the tree. Their windows are free.
    FreeOld(Vec<EngineSlot>),
    /// Find the window of `slots`, and give it to the node with [`HybridTree::set_value`].
    Rebuild {
        /// The node that gets it.
        node: NodeHandle,
        /// The slots of the node for full attention.
        slots: Vec<EngineSlot>,
    },
    /// Move the windows of inserted slots to slots that are locked, and give them to the node with
    /// [`HybridTree::set_value`]. Free the inserted slots without their windows.
    Recover {
        /// The node that gets them.
        node: NodeHandle,
        /// The slots of the node for full attention.
        kept: Vec<EngineSlot>,
        /// The inserted slots, whose windows are moved.
        incoming: PositionRange,
    },
    /// Call [`HybridTree::evict_excess_states`] with the node.
    EvictExcess(NodeHandle),
}

impl Action {
    /// Returns whether the tree goes on only when it is done.
    const fn ends_step(&self) -> bool {
        matches!(self, Self::Rebuild { .. } | Self::Recover { .. } | Self::EvictExcess(_))
    }
}

/// Positions from `start` up to `end`, without it.
pub type PositionRange = std::ops::Range<usize>;

/// The inserted values that the tree has taken over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdoptedRanges {
    /// Slots for full attention.
    pub full: Vec<PositionRange>,
    /// Slots whose windows are the tree's now.
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
    /// Tokens that were there before, in whole pages.
    pub found: usize,
    /// The node at the end of the inserted tokens.
    pub node: NodeHandle,
    /// Whether the node had a state already: the inserted one is the caller's still.
    pub had_state: bool,
    /// Whether the tokens reach the branch.
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
    /// The result, in the last step. Without it, call [`HybridTree::advance`].
    pub result: Option<InsertResult>,
    /// The tokens that this step has added.
    pub added: Option<AddedTokens>,
}

/// Tokens that were not there before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedTokens {
    /// The node at their end.
    pub node: NodeHandle,
    /// The positions of the tokens in the prompt.
    pub tokens: PositionRange,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Goes down the nodes that the tokens have.
    Walk,
    /// Adds the tokens that have no node, and the values of the parts.
    Commit,
    /// Counts the use.
    Tail,
}

/// An insertion between two calls.
#[derive(Debug)]
pub(super) enum PendingInsertion {
    /// It goes on with [`HybridTree::advance`].
    Waiting(Box<Insertion>),
    /// It cannot go on. The actions are those of the failed step that the engine is to take all the same.
    Failed(Vec<Action>),
}

/// An insertion that is going on.
#[derive(Debug)]
pub(super) struct Insertion {
    phase: Phase,
    insert: Insert,
    namespace: NamespaceId,
    /// Tokens to insert, in whole pages.
    limit: usize,
    /// The node that the insertion has reached, while a step is taken.
    node: NodeId,
    /// The name of that node between two steps, when the engine may evict it.
    reached: NodeHandle,
    /// Tokens up to the end of that node.
    len: usize,
    /// Whether tokens were added behind those that were there.
    is_new: bool,
    result: InsertResult,
    /// The actions that were not handed out yet.
    actions: Vec<Action>,
    /// The tokens added, if they were not handed out yet.
    added: Option<AddedTokens>,
}

impl Insertion {
    /// Adds an action for slots that are there twice, if there are any.
    fn free(&mut self, slots: PositionRange, action: impl FnOnce(PositionRange) -> Action) {
        if !slots.is_empty() {
            self.actions.push(action(slots));
        }
    }
}

impl HybridTree {
    /// Inserts the whole pages of `prompt` with their `slots`, up to the first step that the engine must act
    /// on.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) while another insertion is going on, and without
    /// a state where nodes have states; the error of `slots`. An insertion that has failed is to be ended
    /// with [`HybridTree::end_insertion`]. Tokens that earlier steps have added stay, and no others are
    /// added.
    pub fn begin(
        &mut self,
        name: &Namespace,
        prompt: &dyn TokenSource,
        slots: &dyn SlotSource,
        insert: Insert,
    ) -> Result<Step> {
        if self.insertion.is_some() {
            return Err(Error::config("an insertion is going on; advance or end it first"));
        }
        let limit = self.whole_pages(prompt);
        if self.config.state.is_some() && insert.state.is_empty() && limit > 0 {
            return Err(Error::config("tokens are inserted with a state where nodes have states"));
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
        let walk = Box::new(Insertion {
            phase: Phase::Walk,
            insert,
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

    /// Goes on with an insertion of the same tokens and slots, when the actions of the step before are taken.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) without an insertion that is going on, after one
    /// that has failed, for other tokens than those that it began with, and if the node that it has reached
    /// was evicted since the step before; nothing is changed. The error of `slots`, as [`HybridTree::begin`].
    pub fn advance(
        &mut self,
        name: &Namespace,
        prompt: &dyn TokenSource,
        slots: &dyn SlotSource,
    ) -> Result<Step> {
        let walk = match self.insertion.take() {
            None => return Err(Error::config("no insertion is going on")),
            Some(PendingInsertion::Waiting(walk)) => walk,
            Some(failed @ PendingInsertion::Failed(_)) => {
                self.insertion = Some(failed);
                return Err(Error::config("the insertion has failed; end it first"));
            }
        };
        if let Err(error) = self.check_resumable(&walk, name, prompt) {
            self.insertion = Some(PendingInsertion::Waiting(walk));
            return Err(error);
        }
        self.take_step(walk, prompt, slots)
    }

    /// Checks that an insertion can go on, and that it goes on with the tokens that it began with.
    fn check_resumable(&self, walk: &Insertion, name: &Namespace, prompt: &dyn TokenSource) -> Result<()> {
        if !self.contains(walk.reached) {
            return Err(Error::config(format!(
                "node {}, which the insertion has reached, was evicted before it went on; end the insertion",
                walk.reached.number()
            )));
        }
        if self.namespaces.number(name) != Some(walk.namespace) || self.whole_pages(prompt) != walk.limit {
            return Err(Error::config(format!(
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
                // Slots that were found to be there twice are free all the same.
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

    /// Returns whether an insertion is going on, or has failed and is to be ended.
    #[must_use]
    pub const fn is_inserting(&self) -> bool {
        self.insertion.is_some()
    }

    /// Gives up an insertion that is going on, if there is one, and returns the actions that are still to be
    /// taken.
    pub fn end_insertion(&mut self) -> Vec<Action> {
        match self.insertion.take() {
            None => Vec::new(),
            Some(PendingInsertion::Waiting(walk)) => walk.actions,
            Some(PendingInsertion::Failed(actions)) => actions,
        }
    }

    /// Goes over one node that is there.
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
        let node = if common < self.node(child).tokens.len() { self.cut(child, common) } else { child };
        let (start, end) = (walk.len, walk.len + common);
        // Before a cut, whose parts have it both.
        let here = self.node_mut(node);
        here.priority = here.priority.max(walk.insert.priority);
        let recovered = self.recover_window(walk, node, start..end, slots);
        let taken_from = recovered.inspect_err(|_| self.requeue(node))?;
        let free = start.max(walk.insert.found)..taken_from;
        if !free.is_empty() {
            let freed = walk.insert.window_freed.clamp(free.start, free.end);
            walk.free(free.start..freed, Action::FreeFull);
            walk.free(freed..free.end, Action::Free);
        }
        if end > walk.insert.inserted {
            let here = self.node_mut(node);
            here.hits = here.hits.saturating_add(1);
        }
        self.requeue(node);
        (walk.node, walk.len) = (node, end);
        Ok(())
    }

    /// Takes the windows of inserted slots for a node that has lost its own. Returns from where on the slots
    /// are taken.
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
            self.cut(node, live - range.start);
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
            walk.actions.push(Action::FreeOld(old));
            walk.actions.push(Action::Rebuild { node: handle, slots: incoming });
        }
        Ok(live)
    }

    /// Returns the position where the windows of inserted slots begin.
    fn window_start(&self, insert: &Insert) -> Result<usize> {
        if insert.window_freed.is_multiple_of(self.config.page_size) {
            return Ok(insert.window_freed);
        }
        Err(Error::config(format!(
            "the windows of {} tokens are freed; that is no multiple of the page size {}",
            insert.window_freed, self.config.page_size
        )))
    }

    /// Adds the tokens behind those that are there, and gives the parts their values.
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
            let values = slots.read(start, end - start)?;
            let tokens = TokenRun::of(prompt, start, end - start);
            walk.result.adopted.add(Part::Full, start..end);
            target = self.add_leaf(walk.node, walk.namespace, tokens, values, walk.insert.priority);
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
                self.refresh(Part::State, target);
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

    /// Asks for the window of a new leaf. The last window is a node of its own, so that a lock keeps no more.
    fn add_window(&mut self, walk: &mut Insertion, leaf: NodeId, range: PositionRange) -> Result<()> {
        let Some(window) = self.config.window else { return Ok(()) };
        let live = range.start.max(self.window_start(&walk.insert)?);
        if live >= range.end {
            return Ok(());
        }
        if live > range.start {
            self.cut(leaf, live - range.start);
        }
        let last = window.size.next_multiple_of(self.config.page_size);
        let len = range.end - live;
        if len > last {
            let front = self.cut(leaf, len - last);
            walk.actions.push(self.rebuild(front));
        }
        walk.actions.push(self.rebuild(leaf));
        walk.result.adopted.add(Part::Window, live..range.end);
        Ok(())
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
