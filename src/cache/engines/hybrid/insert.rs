//! Inserting, in steps: where the engine must act before the tree goes on, a step ends.

use super::{HybridTree, Keys, NamespaceId, NodeHandle, NodeId, Part, ROOT, SlotSource, TokenRun};
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
    Free(Range),
    /// Free slots whose windows are free already, or have gone elsewhere.
    FreeFull(Range),
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
        incoming: Range,
    },
    /// Call [`HybridTree::evict_excess_states`] with the node.
    EvictExcess(NodeHandle),
}

impl Action {
    /// Whether the tree goes on only when it is done.
    const fn ends_step(&self) -> bool {
        matches!(self, Self::Rebuild { .. } | Self::Recover { .. } | Self::EvictExcess(_))
    }
}

/// Positions from `start` up to `end`, without it.
pub type Range = std::ops::Range<usize>;

/// The inserted values that the tree has taken over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Slots for full attention.
    pub full: Vec<Range>,
    /// Slots whose windows are the tree's now.
    pub window: Vec<Range>,
}

impl Adopted {
    fn add(&mut self, part: Part, range: Range) {
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
    pub adopted: Adopted,
}

/// A step of an insertion.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Step {
    /// The actions to take, in this order.
    pub acts: Vec<Action>,
    /// The result, in the last step. Without it, call [`HybridTree::advance`].
    pub result: Option<InsertResult>,
    /// The tokens that this step has added.
    pub added: Option<Added>,
}

/// Tokens that were not there before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Added {
    /// The node at their end.
    pub node: NodeHandle,
    /// The positions of the tokens in the prompt.
    pub tokens: Range,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Goes down what is there.
    Walk,
    /// Adds what is not.
    Commit,
    /// Counts the use.
    Tail,
}

/// An insertion that is going on.
#[derive(Debug)]
pub(super) struct Insertion {
    phase: Phase,
    insert: Insert,
    /// The node that the walk has reached.
    node: NodeId,
    len: usize,
    is_new: bool,
    result: InsertResult,
    /// The actions that were not handed out yet.
    acts: Vec<Action>,
    /// The tokens added, if they were not handed out yet.
    added: Option<Added>,
}

impl HybridTree {
    /// Inserts the whole pages of `keys` with their `slots`, up to the first step that the engine must act
    /// on.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) while another insertion is going on, and without
    /// a state where nodes have states; the error of `slots`. After an error in a later step the tokens
    /// walked over are there, and the rest is not.
    pub fn begin(
        &mut self,
        name: &Namespace,
        keys: &dyn Keys,
        slots: &dyn SlotSource,
        insert: Insert,
    ) -> Result<Step> {
        if self.insertion.is_some() {
            return Err(Error::config("an insertion is going on; advance or end it first"));
        }
        let limit = self.whole_pages(keys);
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
            adopted: Adopted::default(),
        };
        if limit == 0 {
            return Ok(Step { acts: Vec::new(), result: Some(result), added: None });
        }
        self.insertion = Some(Insertion {
            phase: Phase::Walk,
            insert,
            node: ROOT,
            len: 0,
            is_new: false,
            result,
            acts: Vec::new(),
            added: None,
        });
        self.advance(name, keys, slots)
    }

    /// Goes on with an insertion of the same tokens and slots, after what the step before asked for is done.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) without an insertion that is going on; as
    /// [`HybridTree::begin`].
    pub fn advance(&mut self, name: &Namespace, keys: &dyn Keys, slots: &dyn SlotSource) -> Result<Step> {
        let Some(mut walk) = self.insertion.take() else {
            return Err(Error::config("no insertion is going on"));
        };
        let namespace = self.namespace_or_new(name);
        let mut page = Vec::with_capacity(self.config.page_size);
        let step = loop {
            let before = walk.acts.len();
            let done = match walk.phase {
                Phase::Walk => self.insert_over(&mut walk, namespace, keys, slots, &mut page),
                Phase::Commit => self.insert_rest(&mut walk, namespace, keys, slots),
                Phase::Tail => {
                    self.end_insertion_at(&mut walk);
                    break Ok(Step { acts: walk.acts, result: Some(walk.result), added: walk.added });
                }
            };
            if let Err(error) = done {
                // Slots that were found to be there twice are free all the same.
                self.insertion = Some(Insertion { phase: Phase::Tail, ..walk });
                break Err(error);
            }
            if walk.acts[before..].iter().any(Action::ends_step) {
                let (acts, added) = (std::mem::take(&mut walk.acts), walk.added.take());
                self.insertion = Some(walk);
                break Ok(Step { acts, result: None, added });
            }
        };
        self.forget_unused(name, namespace);
        step
    }

    /// Whether an insertion is going on.
    #[must_use]
    pub const fn is_inserting(&self) -> bool {
        self.insertion.is_some()
    }

    /// Gives up an insertion that is going on, if there is one, and returns what is still to be done.
    pub fn end_insertion(&mut self) -> Vec<Action> {
        self.insertion.take().map_or(Vec::new(), |walk| walk.acts)
    }

    /// A namespace without nodes needs no number.
    fn forget_unused(&mut self, name: &Namespace, number: NamespaceId) {
        if self.insertion.is_none() && self.names.get(&number).is_some_and(|(_, count)| *count == 0) {
            self.names.remove(&number);
            self.namespaces.remove(name);
        }
    }

    /// Goes over one node that is there.
    fn insert_over(
        &mut self,
        walk: &mut Insertion,
        namespace: NamespaceId,
        keys: &dyn Keys,
        slots: &dyn SlotSource,
        page: &mut Vec<i64>,
    ) -> Result<()> {
        let at_end = walk.len == self.whole_pages(keys);
        let child = if at_end {
            None
        } else {
            self.step(walk.node, namespace, keys, walk.len, walk.insert.found, page)
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
            let middle = walk.insert.window_freed.clamp(free.start, free.end);
            for (range, act) in [
                (free.start..middle, Action::FreeFull as fn(Range) -> Action),
                (middle..free.end, Action::Free as fn(Range) -> Action),
            ] {
                if !range.is_empty() {
                    walk.acts.push(act(range));
                }
            }
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
        range: Range,
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
            walk.acts.push(Action::Recover { node: handle, kept, incoming: live..range.end });
        } else {
            walk.result.adopted.add(Part::Full, live..range.end);
            let full = &mut self.node_mut(node).values[Part::Full.index()];
            let old = std::mem::replace(full, incoming.clone());
            walk.acts.push(Action::FreeOld(old));
            walk.acts.push(Action::Rebuild { node: handle, slots: incoming });
        }
        Ok(live)
    }

    /// The position where the windows of inserted slots begin.
    fn window_start(&self, insert: &Insert) -> Result<usize> {
        if insert.window_freed.is_multiple_of(self.config.page_size) {
            return Ok(insert.window_freed);
        }
        Err(Error::config(format!(
            "the windows of {} tokens are freed; that is no multiple of the page size {}",
            insert.window_freed, self.config.page_size
        )))
    }

    /// Adds the tokens behind what is there, and gives the parts their values.
    fn insert_rest(
        &mut self,
        walk: &mut Insertion,
        namespace: NamespaceId,
        keys: &dyn Keys,
        slots: &dyn SlotSource,
    ) -> Result<()> {
        let (start, end) = (walk.len, self.whole_pages(keys));
        let mut target = walk.node;
        if start < end {
            self.window_start(&walk.insert)?;
            let values = slots.read(start, end - start)?;
            let tokens = TokenRun::of(keys, start, end - start);
            walk.result.adopted.add(Part::Full, start..end);
            target = self.add_leaf(walk.node, namespace, tokens, values, walk.insert.priority);
            walk.is_new = true;
            walk.added = Some(Added { node: self.handle(target), tokens: start..end });
        }
        walk.node = target;
        (walk.result.found, walk.result.node) = (start, self.handle(target));
        if self.config.window.is_some() {
            walk.result.reached_branch = walk.insert.branch.is_some_and(|branch| keys.count() >= branch);
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
                    walk.acts.push(Action::EvictExcess(walk.result.node));
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
    fn add_window(&mut self, walk: &mut Insertion, leaf: NodeId, range: Range) -> Result<()> {
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
            let before = self.cut(leaf, len - last);
            walk.acts.push(self.rebuild(before));
        }
        walk.acts.push(self.rebuild(leaf));
        walk.result.adopted.add(Part::Window, live..range.end);
        Ok(())
    }

    fn rebuild(&self, node: NodeId) -> Action {
        Action::Rebuild { node: self.handle(node), slots: self.node(node).value(Part::Full).to_vec() }
    }

    fn end_insertion_at(&mut self, walk: &mut Insertion) {
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
