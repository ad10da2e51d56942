//! Events that report the changes of a cache to another process, such as a router that sends each prompt to
//! the machine that has most of it.
//!
//! Events name pages by their [keys](super::keys), and a unit of a group by the key of the page that it ends with.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::base::try_to_vec;
use crate::layout::GroupKind;

use super::{Namespace, PageHash};

/// A memory in which pages are cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// The pages of an allocator.
    Device,
    /// Host memory below the allocator.
    Host,
}

impl Tier {
    /// Returns the name of this tier.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
        }
    }
}

/// The group of a layout whose units an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventGroup {
    /// The name.
    pub name: String,
    /// How long its units are needed.
    pub kind: GroupKind,
}

/// A change of the contents of a cache.
///
/// ```
/// use kvpool::base::{Id, Page};
/// use kvpool::cache::{BlockTokens, CacheEvent, Namespace, PolicyKind, ResumeAt, Tier, Tree};
/// // Take BLAKE3 or SHA-256.
/// fn digest(parts: &[&[u8]]) -> [u8; 32] {
///     let mix = |sum: u64, &byte: &u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
///     [parts.concat().iter().fold(0, mix).to_le_bytes(); 4].concat().try_into().unwrap()
/// }
/// let (name, prompt): (_, &[i32]) = (Namespace::Unnamed, &[5, 6, 7, 8]);
/// let mut tree = Tree::new(2, ResumeAt::AnyPage, PolicyKind::Lru.policy(1024, BlockTokens::of_page_size(2), None));
/// tree.keep_journal(digest);
/// let mut hold = tree.match_prefix(&name, &prompt, 4).unwrap();
/// let found = tree.find(&hold, &prompt).unwrap();
/// tree.publish(&mut hold, found, prompt.to_vec(), &[Page::new(3), Page::new(8)]);
/// let events = tree.take_events();
/// let CacheEvent::Stored { tokens, parent, tier, group, .. } = &events[0] else { panic!("two pages were") };
/// assert_eq!((tokens.as_slice(), *parent, *tier), (prompt, None, Tier::Device));
/// assert!(group.is_none(), "a tree of pages has no groups");
/// drop(tree.release(hold));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// Consecutive pages of a prefix were stored, or consecutive units of a group.
    Stored {
        /// The keys of the pages, or of those with which the units end, in order.
        pages: Vec<PageHash>,
        /// The key of the page before them, if there is one.
        parent: Option<PageHash>,
        /// The token ids of the pages or units, the same number for each. A snapshot counts as the page before it.
        tokens: Vec<i32>,
        /// The namespace of their prefix.
        namespace: Namespace,
        /// The memory that has the pages now.
        tier: Tier,
        /// The group of the units; `None` for pages.
        group: Option<Arc<EventGroup>>,
    },
    /// Pages or units were removed.
    Removed {
        /// The keys of the pages, or of those with which the units end.
        pages: Vec<PageHash>,
        /// The memory that no longer has the pages.
        tier: Tier,
        /// The group of the units; `None` for pages.
        group: Option<Arc<EventGroup>>,
    },
    /// The cache was cleared, or events were lost: later events do not describe everything that is cached.
    Cleared,
}

/// The events that no reader has taken yet.
#[derive(Debug, Default)]
pub(super) struct Journal {
    events: VecDeque<CacheEvent>,
    /// The sum of the sizes of the events.
    tokens: usize,
}

/// Consecutive pages of a prefix with their keys, or consecutive units of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyedRun<'a> {
    pub(super) namespace: &'a Namespace,
    /// The key of the page before them.
    pub(super) parent: Option<PageHash>,
    pub(super) tokens: &'a [i32],
    pub(super) keys: &'a [PageHash],
}

impl CacheEvent {
    /// Returns the size of the event: its number of tokens or, if that is larger, of keys.
    fn size(&self) -> usize {
        match self {
            Self::Stored { pages, tokens, .. } => pages.len().max(tokens.len()),
            Self::Removed { pages, .. } => pages.len(),
            Self::Cleared => 0,
        }
    }
}

/// The number of events that are kept for a reader. If there are more, all are dropped, and the reader starts
/// over.
const MAX_EVENTS: usize = 1 << 16;

/// The size of the events that are kept together: some 100 MB with their keys, if pages have one token.
const MAX_TOKENS: usize = 1 << 21;

impl Journal {
    /// Records that a tier has consecutive pages of a prefix, or units of a group.
    pub(super) fn stored(&mut self, tier: Tier, group: Option<&Arc<EventGroup>>, run: KeyedRun<'_>) {
        let KeyedRun { namespace, parent, tokens, keys } = run;
        let (Ok(pages), Ok(tokens)) = (try_to_vec(keys), try_to_vec(tokens)) else {
            // A reader that misses events starts over.
            return self.start_over();
        };
        let (namespace, group) = (namespace.clone(), group.cloned());
        self.push(CacheEvent::Stored { pages, parent, tokens, namespace, tier, group });
    }

    /// Records that pages, or units of a group, can no longer be found in a tier.
    pub(super) fn removed(&mut self, tier: Tier, group: Option<&Arc<EventGroup>>, keys: &[PageHash]) {
        if keys.is_empty() {
            return;
        }
        let all = self.tokens + keys.len();
        match self.last_removed(tier, group) {
            Some(pages) if all <= MAX_TOKENS => {
                // A reader that misses events starts over.
                if pages.try_reserve(keys.len()).is_err() {
                    return self.start_over();
                }
                pages.extend_from_slice(keys);
                self.tokens = all;
            }
            _ => match try_to_vec(keys) {
                Ok(pages) => self.push(CacheEvent::Removed { pages, tier, group: group.cloned() }),
                Err(_) => self.start_over(),
            },
        }
    }

    /// Returns the keys of the last event, if it is such a removal. An eviction takes units of several groups: of the
    /// removals at the end, the one of this group counts as the last.
    fn last_removed(&mut self, tier: Tier, group: Option<&Arc<EventGroup>>) -> Option<&mut Vec<PageHash>> {
        for event in self.events.iter_mut().rev() {
            match event {
                CacheEvent::Removed { pages, tier: last, group: of } if *last == tier => {
                    if of.as_ref() == group {
                        return Some(pages);
                    }
                }
                _ => return None,
            }
        }
        None
    }

    /// Records that the cache is empty.
    pub(super) fn record_cleared(&mut self) {
        self.start_over();
    }

    fn start_over(&mut self) {
        self.events.clear();
        self.events.push_back(CacheEvent::Cleared);
        self.tokens = 0;
    }

    fn push(&mut self, event: CacheEvent) {
        let tokens = event.size();
        if self.events.len() == MAX_EVENTS || self.tokens + tokens > MAX_TOKENS && !self.events.is_empty() {
            self.start_over();
        }
        self.tokens += tokens;
        self.events.push_back(event);
    }

    pub(super) fn bytes(&self) -> usize {
        self.events.capacity() * size_of::<CacheEvent>()
            + self.tokens * (size_of::<i32>() + size_of::<PageHash>())
    }

    pub(super) fn take(&mut self) -> Vec<CacheEvent> {
        self.tokens = 0;
        std::mem::take(&mut self.events).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: usize = MAX_TOKENS / 2;

    fn store(journal: &mut Journal, pages: usize) {
        let (tokens, keys) = (vec![7; pages], vec![[0; 32]; pages]);
        let namespace = &Namespace::Unnamed;
        journal.stored(
            Tier::Device,
            None,
            KeyedRun { namespace, parent: None, tokens: &tokens, keys: &keys },
        );
    }

    #[test]
    fn kept_events_are_counted() {
        let mut journal = Journal::default();
        store(&mut journal, 2 * HALF);
        journal.record_cleared();
        store(&mut journal, HALF);
        store(&mut journal, HALF);
        assert_eq!(journal.take().len(), 3, "what was before a clear does not count");
        for _ in 0..3 {
            journal.removed(Tier::Device, None, &vec![[0; 32]; HALF]);
        }
        let events = journal.take();
        let [CacheEvent::Cleared, CacheEvent::Removed { pages, .. }] = &events[..] else {
            panic!("{}", events.len())
        };
        assert_eq!(pages.len(), HALF, "what joins an event counts");
    }
}
