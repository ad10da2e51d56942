//! Looking up and adding in two steps, so that a caller can refuse in between: the first one changes nothing.
//! These calls are for full attention alone, and are no uses for [`EvictionOrder::Adaptive`](super::EvictionOrder::Adaptive).

use super::find::WalkEnd;
use super::{HybridTree, NodeHandle, Part, Request, TokenRun, TokenSource};
use crate::base::EngineSlot;
use crate::cache::Namespace;

/// The end of the cached part of a prompt. It is valid until the tree changes.
#[derive(Debug)]
#[must_use]
pub struct Place(WalkEnd);

impl Place {
    /// Returns the number of cached tokens, in whole pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len + self.0.part_of.map_or(0, |(_, common)| common)
    }

    /// Returns whether nothing is cached.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl HybridTree {
    /// Finds the end of the cached part of a prompt. Changes nothing.
    pub fn place_of(&self, name: &Namespace, prompt: &dyn TokenSource) -> Place {
        Place(self.walk(name, prompt, usize::MAX, |_, _, _| ()))
    }

    /// Returns the deepest node that ends at or before a place.
    #[must_use]
    pub fn node_before(&self, place: &Place) -> NodeHandle {
        self.handle(place.0.node)
    }

    /// Returns the number of tokens that [`HybridTree::use_place`] would move to another node.
    #[must_use]
    pub fn tokens_to_move(&self, place: &Place) -> usize {
        place.0.part_of.map_or(0, |(node, _)| self.node(node).tokens.len())
    }

    /// Records a use of the tokens before a place, and returns the node that ends there. Splits a node in two
    /// if none does; the deeper part is not used by that.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the tree changes, and the place is not valid after it"
    )]
    pub fn use_place(&mut self, place: Place) -> NodeHandle {
        let mut id = place.0.node;
        if let Some((node, common)) = place.0.part_of {
            let used = self.node(node).used;
            id = self.split_node(node, common);
            self.node_mut(node).used = used;
            self.requeue(node);
        }
        self.touch_path(id);
        self.handle(id)
    }

    /// Adds tokens, in whole pages, after a node that no child continues so, and returns the node of theirs.
    /// Returns `None` if the node no longer exists.
    ///
    /// # Panics
    /// If there are no tokens, or not one slot for each.
    pub fn add(
        &mut self,
        node: NodeHandle,
        name: &Namespace,
        tokens: TokenRun,
        slots: Vec<EngineSlot>,
    ) -> Option<NodeHandle> {
        let parent = self.at(node)?;
        assert!(!tokens.is_empty() && tokens.len() == slots.len(), "tokens come with a slot each");
        let namespace = self.namespaces.number_or_new(name);
        debug_assert!(
            self.config().window.is_none() && self.config().state.is_none(),
            "full attention alone"
        );
        let leaf = self.add_leaf(parent, namespace, tokens, slots, 0, Request::default());
        Some(self.handle(leaf))
    }

    /// Returns how many locks of a part a node has, those of the nodes after it included. The root counts one
    /// that nobody releases. Returns `None` if the node no longer exists.
    #[must_use]
    pub fn locks(&self, node: NodeHandle, part: Part) -> Option<u32> {
        self.at(node).map(|id| self.node(id).locks[part.index()])
    }
}
