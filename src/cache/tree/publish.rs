//! Adding pages to a prefix.

use std::borrow::Cow;

use crate::base::{Page, Result, check_memory, widen};

use super::{
    History, Hold, Kind, Node, NodeId, RequestNovelty, RollingHash, Tokens, Tree, TreePosition, narrow,
};
use crate::cache::block_keys::{NewPages, PageAndBlock, Published, record_published};

/// The tokens after a hold that others have cached already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct FoundPrefix {
    pub(super) place: TreePosition,
    /// The number of tokens of the hold.
    pub(super) begin: usize,
}

impl FoundPrefix {
    /// Returns the number of tokens after the hold that are cached already.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.place.len - self.begin
    }

    /// Returns whether no token is.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Bytes that are not checked for.
const FEW: usize = 1 << 14;

impl Tree {
    /// Looks up how many of `tokens`, which follow the hold, are cached already.
    ///
    /// # Errors
    /// The error of tokens that cannot be read.
    pub fn find(&self, hold: &Hold, tokens: &dyn Tokens) -> Result<FoundPrefix> {
        let place = self.descend(hold.node, tokens, tokens.count() / self.page_size)?;
        Ok(FoundPrefix { place, begin: hold.len })
    }

    /// Returns the cached pages that were found.
    ///
    /// # Errors
    /// See [`Tree::pages`].
    pub fn found_pages(&self, found: &FoundPrefix) -> Result<Vec<Page>> {
        self.pages_up_to(found.place, found.begin)
    }

    /// Checks that there is memory for [`Tree::publish`] of `tokens` new tokens.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when there is not.
    pub fn check_memory(&self, hold: &Hold, found: &FoundPrefix, tokens: usize) -> Result<()> {
        let here = self.node(found.place.node);
        let may_grow = hold.is_author && found.is_empty();
        // A vector that grows is copied to one of up to twice the length.
        let is_full = here.tokens.heap_capacity() < here.tokens.len() + tokens;
        let copied = if may_grow && is_full && tokens > 0 { 2 * here.tokens.len() } else { 0 };
        self.check_memory_at(found.place, tokens, copied)
    }

    /// Checks that there is memory to split a node at `place`, to add `tokens` tokens behind it, and to copy
    /// `copied` tokens with their pages.
    pub(super) fn check_memory_at(&self, place: TreePosition, tokens: usize, copied: usize) -> Result<()> {
        let here = self.node(place.node);
        let split = if place.pages < here.pages.len() { here.tokens.len() } else { 0 };
        let each = size_of::<i32>() + size_of::<Page>().div_ceil(self.page_size);
        let lists = self.keyed.bytes_for(tokens, tokens / self.page_size);
        let bytes = each * (split + copied + 2 * tokens) + lists;
        if bytes <= FEW { Ok(()) } else { check_memory(bytes) }
    }

    /// Adds `pages` for `tokens`, which follow the tokens that were found, and moves the hold to their end.
    pub fn publish(&mut self, hold: &mut Hold, found: FoundPrefix, tokens: Vec<i32>, pages: &[Page]) {
        let mut is_author = hold.is_author && found.is_empty();
        let mut at = self.split_node(found.place);
        if !found.is_empty() {
            // Others have published, or a tier has loaded, what was not found in the beginning.
            hold.novelty = self.novelty_after(hold, found.place.len, None);
            let previous = hold.node;
            self.move_hold(hold, at);
            self.touch(at, Some(previous), hold.session, hold.novelty.level);
        }
        self.record_stored(at, &tokens, pages);
        let Published { segments, new_from } = self.record_published(at, &tokens);
        if !tokens.is_empty() {
            hold.novelty = self.novelty_after(hold, widen(self.node(at).end) + tokens.len(), new_from);
        }
        // There is usually one segment, which takes over the vector without a copy.
        let is_one = segments.len() == 1;
        let (mut tokens, mut begin, mut pages) = (tokens, 0, pages);
        for NewPages { pages: count, remembered, hash } in segments {
            let (part, later_pages) = pages.split_at(count);
            let end = begin + count * self.page_size;
            let part_tokens =
                if is_one { std::mem::take(&mut tokens).into() } else { Cow::Borrowed(&tokens[begin..end]) };
            (begin, pages) = (end, later_pages);
            let history = History::of_new(remembered, hold.novelty.level, self.now);
            self.queues.policy.record_new(&history, narrow(count * self.page_size));
            let mut first = 0;
            if is_author && self.can_grow(at, &history) {
                first = self.node(at).pages.len();
                self.grow(at, &part_tokens, part, hash);
            } else {
                at = self.add_below(at, part_tokens, part, history, hash);
                self.node_mut(at).user = hold.session;
            }
            self.offer_published(at, first..first + count);
            is_author = true;
        }
        self.move_hold(hold, at);
        hold.is_author = is_author;
        if begin == 0 {
            // Nothing new: it is used as it is in a match.
            self.keep_use(at);
        }
    }

    /// Returns how new a request is after it has published tokens up to `end`.
    fn novelty_after(&self, hold: &Hold, end: usize, new_from: Option<usize>) -> RequestNovelty {
        hold.novelty.after_publication(&*self.queues.policy, hold.prompt_len, end, new_from)
    }

    /// Records the publication of new tokens after `node`. Divides them into segments by what the policy remembers of
    /// them.
    pub(super) fn record_published(&mut self, node: NodeId, tokens: &[i32]) -> Published {
        let here = &self.nodes[node];
        let at = widen(here.end);
        let mut cursor = self.rolling.cursor(here.hash, at);
        let size = PageAndBlock { page: self.page_size, block: self.remembered_every };
        record_published(self.queues.policy.as_mut(), &mut cursor, at, tokens, size, self.now)
    }

    /// Returns whether the author of a node may append pages to it.
    fn can_grow(&self, node: NodeId, history: &History) -> bool {
        let here = self.node(node);
        let is_alone = (here.children, here.locks) == (0, 1);
        let is_plain = !here.has_snapshot && !self.is_pinned(node) && !self.queues.waiting.needs(node);
        here.kind == Kind::Run
            && is_alone
            && is_plain
            && here.history.uses == history.uses
            && here.history.novelty == history.novelty
    }

    fn grow(&mut self, node: NodeId, tokens: &[i32], pages: &[Page], hash: RollingHash) {
        let now = self.now;
        let capacity = self.node(node).heap_capacity();
        let here = self.node_mut(node);
        here.tokens.extend_from_slice(tokens);
        here.pages.extend_from_slice(pages);
        here.end += narrow(tokens.len());
        here.history.used = now;
        here.hash = hash;
        self.counts.heap_capacity += self.node(node).heap_capacity() - capacity;
        self.counts.cached += pages.len();
        self.counts.locked += pages.len();
    }

    /// Adds a node without locks below `parent`.
    pub(super) fn add_below(
        &mut self,
        parent: NodeId,
        tokens: Cow<'_, [i32]>,
        pages: &[Page],
        history: History,
        hash: RollingHash,
    ) -> NodeId {
        self.unqueue(parent);
        let Node { end, root, .. } = *self.node(parent);
        let end = end + narrow(tokens.len());
        let id = self.add(Node {
            parent,
            root,
            tokens: tokens.into(),
            pages: Cow::Borrowed(pages).into(),
            end,
            history,
            ..Node::new(Kind::Run, hash)
        });
        self.link(id);
        self.counts.cached += pages.len();
        id
    }
}
