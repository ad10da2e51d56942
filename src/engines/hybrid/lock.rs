//! Locks of the nodes that requests use.

use super::evict::Frees;
use super::{HybridTree, NodeHandle, NodeId, Part, ROOT};

/// The beginning of a locked window. It stays at its position when nodes are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Boundary(u64);

impl Boundary {
    /// Creates the boundary with this number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number of the boundary, which is at least 1.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// The parts that a lock has locked, which are needed to release it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Receipt {
    /// The parts that are not locked.
    pub skipped: SkippedParts,
    /// The beginning of the locked window; `None` if it begins at the root.
    pub boundary: Option<Boundary>,
}

/// The parts that a lock leaves out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SkippedParts([bool; 3]);

impl SkippedParts {
    /// Creates the set of these parts.
    #[must_use]
    pub fn of(parts: impl IntoIterator<Item = Part>) -> Self {
        let mut skipped = Self::default();
        for part in parts {
            skipped.0[part.index()] = true;
        }
        skipped
    }

    /// Returns whether a part is left out.
    #[must_use]
    pub const fn has(self, part: Part) -> bool {
        self.0[part.index()]
    }
}

/// The error that a node does not have a lock that was to be released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotLocked {
    /// The node, which may be an ancestor of the one that was to be unlocked.
    pub node: NodeHandle,
    /// The part of which the node has no lock.
    pub part: Part,
}

impl HybridTree {
    /// Locks a node: the slots for full attention up to its end, the window slots of its last window, and its
    /// state. Returns `None` if the node no longer exists.
    pub fn lock(&mut self, node: NodeHandle, skipped: SkippedParts) -> Option<LockResult> {
        let id = self.at(node)?;
        let mut locked = LockResult { receipt: Receipt { skipped, boundary: None }, newly_locked: 0 };
        if !skipped.has(Part::Full) {
            locked.newly_locked = self.lock_path(id);
        }
        if let Some(window) = self.config.window.filter(|_| !skipped.has(Part::Window)) {
            locked.receipt.boundary = self.lock_window(id, window.size);
        }
        if self.config.state.is_some() && !skipped.has(Part::State) && id != ROOT {
            self.lock_part(id, Part::State);
        }
        self.requeue(id);
        Some(locked)
    }

    /// Locks only the slots for full attention up to the end of a node. Returns `None` if the node no longer
    /// exists.
    pub fn pin(&mut self, node: NodeHandle) -> Option<()> {
        let id = self.at(node)?;
        self.lock_path(id);
        Some(())
    }

    /// Undoes [`HybridTree::pin`]. Returns `None` if the node no longer exists.
    ///
    /// # Errors
    /// [`NotLocked`]. Nothing is changed then.
    pub fn unpin(&mut self, node: NodeHandle) -> Option<Result<(), NotLocked>> {
        let id = self.at(node)?;
        Some(self.unlock_path(id))
    }

    /// Undoes [`HybridTree::lock`]. `released` tells which part of it [`HybridTree::unlock_window`] has
    /// released already. Returns `None` if the node no longer exists.
    ///
    /// # Errors
    /// [`NotLocked`] for a lock that the node does not have. Nothing is changed then.
    pub fn unlock(
        &mut self,
        node: NodeHandle,
        receipt: Receipt,
        released: WindowRelease,
    ) -> Option<Result<(), NotLocked>> {
        let id = self.at(node)?;
        // Without windows nothing can have been released before.
        let released = if self.config.window.is_some() { released } else { WindowRelease::NotYet };
        let takes = |part| self.config.has(part) && !receipt.skipped.has(part);
        let window = takes(Part::Window) && released == WindowRelease::NotYet;
        let state = takes(Part::State) && released != WindowRelease::WithState && id != ROOT;
        let full = takes(Part::Full);
        let missing = |part| NotLocked { node, part };
        if state && self.node(id).locks[Part::State.index()] == 0 {
            return Some(Err(missing(Part::State)));
        }
        if window && !self.has_window_locks(id, receipt.boundary) {
            return Some(Err(missing(Part::Window)));
        }
        if full && self.path(id).any(|at| self.node(at).locks[Part::Full.index()] == 0) {
            return Some(Err(missing(Part::Full)));
        }
        if state {
            self.unlock_part(id, Part::State);
        }
        if window {
            for at in self.window_nodes(id, receipt.boundary) {
                self.unlock_part(at, Part::Window);
            }
        }
        if full {
            self.unlock_path(id).expect("every node has a lock");
        }
        self.requeue(id);
        Some(Ok(()))
    }

    /// Releases the window of a lock early, because the request has moved past it, and with it the state, if
    /// `state` says so. Frees the window slots of leaves that nothing locks any more. Returns `None` if the
    /// node no longer exists.
    ///
    /// # Errors
    /// [`NotLocked`]. Nothing is changed then.
    pub fn unlock_window(
        &mut self,
        node: NodeHandle,
        receipt: Receipt,
        state: StateRelease,
    ) -> Option<Result<Frees, NotLocked>> {
        let id = self.at(node)?;
        let mut frees = Frees::default();
        if id == ROOT || self.config.window.is_none() {
            return Some(Ok(frees));
        }
        if !self.has_window_locks(id, receipt.boundary) {
            return Some(Err(NotLocked { node, part: Part::Window }));
        }
        let releases_state = state == StateRelease::Release;
        let state = releases_state && self.config.state.is_some() && !receipt.skipped.has(Part::State);
        if state && self.node(id).locks[Part::State.index()] == 0 {
            return Some(Err(NotLocked { node, part: Part::State }));
        }
        for at in self.window_nodes(id, receipt.boundary) {
            self.unlock_part(at, Part::Window);
            if self.node(at).has(Part::Window) && self.is_leaf(at) {
                self.free_part(at, Part::Window, &mut frees);
            }
        }
        if state {
            self.unlock_part(id, Part::State);
        }
        Some(Ok(frees))
    }

    fn lock_path(&mut self, id: NodeId) -> usize {
        let (mut at, mut newly) = (id, 0);
        while at != ROOT {
            let node = self.node_mut(at);
            let (parent, len) = (node.parent, node.tokens.len());
            if node.locks[Part::Full.index()] == 0 {
                newly += len;
            }
            node.locks[Part::Full.index()] += 1;
            at = parent;
        }
        let sizes = &mut self.sizes[Part::Full.index()];
        (sizes.evictable, sizes.locked) = (sizes.evictable - newly, sizes.locked + newly);
        self.requeue(id);
        newly
    }

    fn unlock_path(&mut self, id: NodeId) -> Result<(), NotLocked> {
        if let Some(at) = self.path(id).find(|&at| self.node(at).locks[Part::Full.index()] == 0) {
            return Err(NotLocked { node: self.handle(at), part: Part::Full });
        }
        let (mut at, mut freed) = (id, 0);
        while at != ROOT {
            let node = self.node_mut(at);
            let (parent, len) = (node.parent, node.tokens.len());
            node.locks[Part::Full.index()] -= 1;
            if node.locks[Part::Full.index()] == 0 {
                freed += len;
            }
            at = parent;
        }
        let sizes = &mut self.sizes[Part::Full.index()];
        (sizes.evictable, sizes.locked) = (sizes.evictable + freed, sizes.locked - freed);
        // The ancestors have children, so they are not queued.
        self.requeue(id);
        Ok(())
    }

    fn lock_window(&mut self, id: NodeId, size: usize) -> Option<Boundary> {
        let (mut at, mut covered) = (id, 0);
        while at != ROOT && covered < size {
            self.lock_part(at, Part::Window);
            covered += self.node(at).tokens.len();
            if covered >= size {
                let next = Boundary(self.next_boundary);
                let boundary = *self.node_mut(at).boundary.get_or_insert(next);
                if boundary == next {
                    self.next_boundary += 1;
                }
                return Some(boundary);
            }
            at = self.node(at).parent;
        }
        None
    }

    /// Returns the nodes from `id` up to the one with the boundary, or up to the root.
    fn window_nodes(&self, id: NodeId, boundary: Option<Boundary>) -> Vec<NodeId> {
        let mut is_inside = true;
        let nodes = self.path(id).take_while(|&at| {
            let is_taken = is_inside;
            is_inside &= boundary.is_none() || self.node(at).boundary != boundary;
            is_taken
        });
        nodes.collect()
    }

    fn has_window_locks(&self, id: NodeId, boundary: Option<Boundary>) -> bool {
        self.window_nodes(id, boundary).iter().all(|&at| self.node(at).locks[Part::Window.index()] > 0)
    }

    fn lock_part(&mut self, id: NodeId, part: Part) {
        let at = part.index();
        let node = self.node_mut(id);
        node.locks[at] += 1;
        if node.locks[at] == 1 {
            let len = node.values[at].len();
            let sizes = &mut self.sizes[at];
            (sizes.evictable, sizes.locked) = (sizes.evictable - len, sizes.locked + len);
            self.requeue(id);
        }
    }

    fn unlock_part(&mut self, id: NodeId, part: Part) {
        let at = part.index();
        let node = self.node_mut(id);
        node.locks[at] -= 1;
        if node.locks[at] == 0 {
            let len = node.values[at].len();
            let sizes = &mut self.sizes[at];
            (sizes.evictable, sizes.locked) = (sizes.evictable + len, sizes.locked - len);
            self.requeue(id);
        }
    }
}

/// The result of [`HybridTree::lock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockResult {
    /// The receipt that releases the lock.
    pub receipt: Receipt,
    /// The number of slots for full attention that had no locks before.
    pub newly_locked: usize,
}

/// Which part of a lock [`HybridTree::unlock_window`] has released already.
///
/// ```
/// use kvpool::base::{EngineSlot, Id};
/// use kvpool::cache::Namespace;
/// use kvpool::engines::hybrid::{
///     EvictionOrder, HybridConfig, HybridTree, Insert, SkippedParts, StateRelease, WindowRelease,
/// };
/// let config = HybridConfig { page_size: 1, order: EvictionOrder::Lru, window: None, state: None };
/// let mut tree = HybridTree::new(config);
/// let prompt: &[i64] = &[5];
/// let slots = [EngineSlot::new(20)];
/// let step = tree.begin(&Namespace::Unnamed, &prompt, &slots.as_slice(), Insert::default()).unwrap();
/// let node = step.result.unwrap().node;
/// let receipt = tree.lock(node, SkippedParts::default()).unwrap().receipt;
/// // The window is released while the request goes on, the rest at its end.
/// let frees = tree.unlock_window(node, receipt, StateRelease::Keep).unwrap().unwrap();
/// assert!(frees.is_empty(), "the model has no window");
/// tree.unlock(node, receipt, WindowRelease::WindowOnly).unwrap().unwrap();
/// assert_eq!(tree.locks(node, kvpool::engines::hybrid::Part::Full), Some(0));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowRelease {
    /// Nothing was released.
    NotYet,
    /// The window was released and the state was kept, by [`StateRelease::Keep`].
    WindowOnly,
    /// The window and the state were released, by [`StateRelease::Release`].
    WithState,
}

/// Whether the state is released together with the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateRelease {
    /// The state stays locked. Call [`HybridTree::unlock`] with [`WindowRelease::WindowOnly`] later.
    Keep,
    /// The state is released, too. Call [`HybridTree::unlock`] with [`WindowRelease::WithState`] later.
    Release,
}
