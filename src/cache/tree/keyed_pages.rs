//! The keys by which other processes and other tiers know the pages of a tree, and the events that report
//! changes.

use super::{Evicted, NodeId, OfferedPages, Tree};
use crate::base::{Page, Result, try_reserve};
use crate::cache::journal::{Journal, KeyedRun};
use crate::cache::keys::PageKeys;
use crate::cache::{CacheEvent, Digest, History, Namespace, PageHash, Tier};

/// The keys of the pages that can be found, and the journal of events. A tree without tiers and without
/// readers of events has neither.
#[derive(Debug, Default)]
pub(super) struct KeyedPages {
    /// The key of each page that can be found, if a tier or a journal needs keys.
    keys: Option<PageKeys>,
    /// The events that have not been taken yet, if the tree keeps a journal. A tree with a journal has keys.
    journal: Option<Journal>,
}

impl KeyedPages {
    /// Starts to keep keys, which `digest` makes.
    pub(super) fn keep_keys(&mut self, digest: Digest) {
        self.keys.get_or_insert_with(|| PageKeys::new(digest));
    }

    pub(super) const fn keys(&self) -> Option<&PageKeys> {
        self.keys.as_ref()
    }

    pub(super) const fn has_journal(&self) -> bool {
        self.journal.is_some()
    }

    /// Records new pages for `tokens`, which follow the page `previous`.
    fn record_stored(
        &mut self,
        namespace: &Namespace,
        previous: Option<Page>,
        tokens: &[i32],
        pages: &[Page],
    ) {
        let Some(keys) = &mut self.keys else { return };
        let parent = previous.and_then(|page| keys.get(page));
        let keys = &keys.add(namespace, parent, tokens, pages);
        if let Some(journal) = &mut self.journal {
            journal.stored(Tier::Device, None, KeyedRun { namespace, parent, tokens, keys });
        }
    }

    /// Records that `pages`, which have this history, can no longer be found. Appends the keys of those that could, the
    /// last one first, to those of `evicted`, which needs no memory if it has room for them.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "an eviction calls it for each leaf")]
    pub(super) fn record_removed(&mut self, pages: &[Page], history: &History, evicted: &mut Evicted) {
        let Some(keys) = &mut self.keys else { return };
        let Evicted { keys: removed, histories, .. } = evicted;
        let begin = removed.len();
        keys.remove(pages, removed);
        if let Some(journal) = &mut self.journal {
            journal.removed(Tier::Device, None, &removed[begin..]);
        }
        removed[begin..].reverse();
        histories.resize(removed.len(), *history);
    }

    /// Makes room in `removed` and `histories` for the keys of `pages` pages and their histories.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has none.
    pub(super) fn reserve_removed(
        &self,
        pages: usize,
        removed: &mut Vec<PageHash>,
        histories: &mut Vec<History>,
    ) -> Result<()> {
        if self.keys.is_none() {
            return Ok(());
        }
        try_reserve(removed, pages)?;
        try_reserve(histories, pages)
    }

    /// Records that all pages were removed.
    pub(super) fn record_cleared(&mut self) {
        let Some(keys) = &mut self.keys else { return };
        keys.clear();
        if let Some(journal) = &mut self.journal {
            journal.record_cleared();
        }
    }

    /// Returns an upper bound of the bytes that are needed to record `pages` new pages of `tokens` tokens.
    pub(super) fn bytes_for(&self, tokens: usize, pages: usize) -> usize {
        let Some(keys) = &self.keys else { return 0 };
        // The keys of the call, and those of an event or an offer, with their tokens.
        2 * pages * size_of::<PageHash>() + tokens * size_of::<i32>() + keys.bytes_for(pages)
    }

    /// Returns the bytes that are needed for the keys of `pages` pages that are removed.
    pub(super) fn bytes_to_remove(&self, pages: usize) -> usize {
        // The keys, what the journal is given, and the list of a caller, which grows by doubling.
        if self.keys.is_some() { pages * (4 * size_of::<PageHash>() + size_of::<History>()) } else { 0 }
    }

    pub(super) fn bytes(&self) -> usize {
        self.keys.as_ref().map_or(0, PageKeys::bytes) + self.journal.as_ref().map_or(0, Journal::bytes)
    }
}

impl Tree {
    /// Starts to keep a journal of changes, for [`Tree::take_events`].
    pub fn keep_journal(&mut self, digest: Digest) {
        self.keyed.keep_keys(digest);
        self.keyed.journal.get_or_insert_with(Journal::default);
    }

    /// Takes over the journal of `earlier`, all of whose pages were removed.
    pub fn keep_journal_of(&mut self, earlier: &mut Self) {
        self.keyed.journal = earlier.keyed.journal.take();
        if let Some(journal) = &mut self.keyed.journal {
            journal.record_cleared();
        }
    }

    /// Takes the events since the last call, in order.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.keyed.journal.as_mut().map_or(Vec::new(), Journal::take)
    }

    /// Returns the key of a page, if the tree keeps keys and the page can be found.
    #[must_use]
    pub fn key_of(&self, page: Page) -> Option<PageHash> {
        self.keyed.keys()?.get(page)
    }

    /// Records new pages after the end of `node`, unless the node is detached.
    pub(super) fn record_stored(&mut self, node: NodeId, tokens: &[i32], pages: &[Page]) {
        if self.keyed.keys.is_none() || pages.is_empty() {
            return;
        }
        let here = self.node(node);
        let (root, previous) = (here.root, here.pages.last().copied());
        if let Some(namespace) = self.roots.name(root) {
            self.keyed.record_stored(namespace, previous, tokens, pages);
        }
    }

    /// Records that the tier below has a copy of pages that were offered.
    pub fn record_copied(&mut self, offered: &OfferedPages) {
        let OfferedPages { keys, namespace, parent, tokens, .. } = offered;
        if let Some(journal) = &mut self.keyed.journal {
            journal.stored(Tier::Host, None, KeyedRun { namespace, parent: *parent, tokens, keys });
        }
    }

    /// Records that the tier below has dropped pages.
    pub fn record_dropped_below(&mut self, keys: &[PageHash]) {
        if let Some(journal) = &mut self.keyed.journal {
            journal.removed(Tier::Host, None, keys);
        }
    }
}
