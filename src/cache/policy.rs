//! What goes first.

use std::collections::BTreeSet;
use std::fmt::Debug;

use super::{NodeId, PageKey};

/// A logical time: tokens looked up so far.
pub type Tick = u64;

/// What a policy knows of a leaf.
#[derive(Clone, Copy, Debug, Default)]
pub struct History {
    /// When it was published.
    pub published: Tick,
    /// When it was last used.
    pub used: Tick,
    /// How often it was used, its publication included.
    pub uses: u32,
    /// Tokens up to its end.
    pub end: u32,
    /// Tokens from its end to the end of the last request that used it.
    pub to_end: u32,
    /// Retention: higher goes later.
    pub priority: i32,
}

/// What is remembered of an evicted page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// How often it was used.
    pub uses: u32,
}

/// What goes first.
pub trait Policy: Debug + Send {
    /// Adds a leaf that can be evicted from now on.
    fn insert(&mut self, leaf: NodeId, history: &History, now: Tick);
    /// Removes a leaf: it is held, has children, or is gone.
    fn remove(&mut self, leaf: NodeId, history: &History);
    /// The leaf to evict next.
    fn victim(&mut self, now: Tick) -> Option<NodeId>;
    /// The size of the bookkeeping in bytes.
    fn bytes(&self) -> usize;
    /// Takes note of an evicted page.
    fn note_evicted(&mut self, _key: PageKey, _history: &History, _now: Tick) {}
    /// Takes note of a published page.
    fn note_published(&mut self, _key: PageKey, _now: Tick) -> Option<Remembered> {
        None
    }
    /// Takes note of a use of cached pages.
    fn note_used(&mut self, _before: &History, _now: Tick) {}
}

/// Least recently used first.
#[derive(Debug, Default)]
pub struct Lru(BTreeSet<(Tick, NodeId)>);

impl Policy for Lru {
    fn insert(&mut self, leaf: NodeId, history: &History, _now: Tick) {
        self.0.insert((history.used, leaf));
    }
    fn remove(&mut self, leaf: NodeId, history: &History) {
        self.0.remove(&(history.used, leaf));
    }
    fn bytes(&self) -> usize {
        self.0.len() * size_of::<(Tick, NodeId)>()
    }
    fn victim(&mut self, _now: Tick) -> Option<NodeId> {
        self.0.first().map(|(_, leaf)| *leaf)
    }
}
