//! What a policy is told of the blocks of a run of tokens: by which keys it remembers them.
//!
//! A block ends at a multiple of [`BlockTokens`](super::BlockTokens) from the beginning of a prompt. Its key is
//! the [`RollingHash`] of the prefix up to there, so it belongs to the node that has its last page.

use crate::base::bounded::narrow;
use crate::base::widen;

use super::rolling_hash::{Cursor, RollingHash};
use super::{BlockKey, Policy, Remembered, Tick};

/// New pages that share a history.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewPages {
    pub(crate) pages: usize,
    /// The policy's record of an earlier stay of the pages in the cache.
    pub(crate) remembered: Remembered,
    /// The hash of the prefix up to their end.
    pub(crate) hash: RollingHash,
}

/// The sizes of pages and of blocks, in tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageAndBlock {
    pub(crate) page: usize,
    pub(crate) block: usize,
}

/// The number of keys that the policy gets together.
const BATCH: usize = 32;

/// Tokens that were published.
#[derive(Debug, Default)]
pub(crate) struct Published {
    pub(crate) segments: Vec<NewPages>,
    /// The position of the first token of which the policy remembers nothing.
    pub(crate) new_from: Option<usize>,
}

impl Published {
    /// Returns what is remembered of the last page.
    fn last(&self) -> Remembered {
        self.segments.last().map_or(Remembered::default(), |last| last.remembered)
    }

    /// Adds pages, to the last segment if the policy remembers the same of them.
    fn add(&mut self, pages: usize, remembered: Remembered, hash: RollingHash) {
        match self.segments.last_mut().filter(|last| last.remembered == remembered) {
            _ if pages == 0 => (),
            Some(last) => (last.pages, last.hash) = (last.pages + pages, hash),
            None => self.segments.push(NewPages { pages, remembered, hash }),
        }
    }
}

/// Records the publication of `tokens`, whole pages, which follow the `at` tokens before the cursor. Divides them
/// into segments by what the policy remembers of them. The caller gives each its history, and tells the policy of it
/// ([`Policy::record_new`]).
pub(crate) fn record_published(
    policy: &mut dyn Policy,
    cursor: &mut Cursor<'_>,
    mut at: usize,
    tokens: &[i32],
    size: PageAndBlock,
    now: Tick,
) -> Published {
    let (mut published, mut remaining) = (Published::default(), tokens);
    let mut begin = narrow(at);
    let mut keyed = Vec::with_capacity(BATCH.min(remaining.len() / size.block + 2));
    while !remaining.is_empty() {
        keyed.clear();
        while !remaining.is_empty() && keyed.len() < BATCH {
            let to_key = size.block - at % size.block;
            // The policy is asked only for the page at the end of a block.
            let plain = remaining.len().min(to_key - size.page);
            cursor.push(&remaining[..plain]);
            let plain_sum = cursor.hash();
            let page = remaining[plain..].get(..size.page);
            let end = page.map(|page| {
                cursor.push(page);
                cursor.hash()
            });
            keyed.push((plain / size.page, plain_sum, end));
            let done = remaining.len().min(to_key);
            (at, remaining) = (at + done, &remaining[done..]);
        }
        policy.fetch(&mut keyed.iter().filter_map(|(.., end)| Some(end.as_ref()?.key())));
        for &(plain, hash, end) in &keyed {
            let mut tokens = narrow(plain * size.page);
            published.add(plain, published.last(), hash);
            let mut remembered = Remembered::default();
            if let Some(hash) = end {
                tokens += narrow(size.page);
                remembered = policy.record_publication(hash.key(), begin..begin + tokens, now);
                published.add(1, remembered, hash);
            } else {
                policy.record_fragment(tokens, now);
            }
            if remembered == Remembered::default() {
                published.new_from.get_or_insert(widen(begin));
            }
            begin += tokens;
        }
    }
    published
}

/// Moves a cursor back over the blocks that end in `tokens`, which are the last ones of the prefix of `end`
/// tokens before the cursor, and visits the end of each, the last one first. Only ends after the first `until`
/// tokens of the prompt are visited. Returns the number of tokens before the cursor then.
pub(crate) fn visit_ends_back(
    cursor: &mut Cursor<'_>,
    end: usize,
    tokens: &[i32],
    until: usize,
    block: usize,
    mut visit: impl FnMut(usize, BlockKey),
) -> usize {
    let begin = end - tokens.len();
    let (mut at, mut key) = (end, end - end % block);
    while key > until {
        cursor.pop(&tokens[key - begin..at - begin]);
        visit(key, cursor.hash().key());
        (at, key) = (key, key - block);
    }
    at
}
