//! Keys of pages that are the same in every process: for the events of a cache, and for the tiers below it.
//!
//! A key is computed once, when its page is published or looked up below the device.

use crate::base::{KeyMap, Page};

use super::Namespace;

/// The key of a page: a hash of its tokens and of the key of the page before it. The hash of the namespace
/// and the page size takes the place of a key before the first page.
pub type PageHash = [u8; 32];

/// Returns a key in hexadecimal digits, for messages.
pub(crate) fn hex(key: &PageHash) -> String {
    let digit = |half: u8| char::from_digit(half.into(), 16).expect("it is below 16");
    key.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// A hash function over the concatenation of its parts: BLAKE3 where other processes have to compute the same
/// keys.
pub type Digest = fn(&[&[u8]]) -> PageHash;

/// Computes the keys of consecutive pages.
///
/// ```
/// use kvpool::cache::{KeyChain, Namespace};
/// let digest = |parts: &[&[u8]]| {
///     [parts.concat().iter().fold(7, |sum: u8, byte| sum.wrapping_mul(31) ^ byte); 32]
/// };
/// let mut chain = KeyChain::at_root(digest, &Namespace::Unnamed, 2);
/// let (first, second) = (chain.next(&[1, 2]), chain.next(&[3, 4]));
/// assert_eq!(KeyChain::after(digest, first).next(&[3, 4]), second);
/// ```
#[derive(Clone, Debug)]
pub struct KeyChain {
    digest: Digest,
    previous: PageHash,
    /// Whether `previous` is the key of a page.
    has_page: bool,
    /// What the last key was made of.
    bytes: Vec<u8>,
}

impl KeyChain {
    /// Creates a chain that continues after the page with this key.
    #[must_use]
    pub const fn after(digest: Digest, previous: PageHash) -> Self {
        Self { digest, previous, has_page: true, bytes: Vec::new() }
    }

    /// Creates a chain that begins with the first page of a prompt.
    #[must_use]
    pub fn at_root(digest: Digest, namespace: &Namespace, page_size: usize) -> Self {
        let (kind, name) = match namespace {
            Namespace::Unnamed => (0, Vec::new()),
            Namespace::Number(number) => (1, number.to_string().into_bytes()),
            Namespace::Large(digits) => (1, digits.clone().into_bytes()),
            Namespace::Text(text) => (2, text.clone().into_bytes()),
            Namespace::Bytes(bytes) => (3, bytes.clone()),
        };
        let previous = digest(&[&(page_size as u64).to_le_bytes(), &[kind], &name]);
        Self { digest, previous, has_page: false, bytes: Vec::new() }
    }

    /// Returns the key of the previous page, if there is one.
    #[must_use]
    pub fn last(&self) -> Option<PageHash> {
        self.has_page.then_some(self.previous)
    }

    /// Returns the key of the next page, whose tokens are given.
    pub fn next(&mut self, tokens: &[i32]) -> PageHash {
        self.bytes.clear();
        self.bytes.extend_from_slice(&self.previous);
        for token in tokens {
            self.bytes.extend_from_slice(&token.to_le_bytes());
        }
        self.previous = (self.digest)(&[&self.bytes]);
        self.has_page = true;
        self.previous
    }
}

/// The names of pieces in a store that several caches share, also caches of other models: hashes of the key
/// of a page and of everything else that the bytes depend on.
///
/// ```
/// use kvpool::cache::StoreKeys;
/// let digest = |parts: &[&[u8]]| {
///     [parts.concat().iter().fold(7, |sum: u8, byte| sum.wrapping_mul(31) ^ byte); 32]
/// };
/// let of = |model: &str| StoreKeys::new(digest, &[model.as_bytes(), b"float16"]);
/// assert_eq!(of("one").piece(&[1; 32], 0), of("one").piece(&[1; 32], 0));
/// assert_ne!(of("one").piece(&[1; 32], 0), of("other").piece(&[1; 32], 0));
/// ```
#[derive(Clone, Debug)]
pub struct StoreKeys {
    digest: Digest,
    context: PageHash,
}

impl StoreKeys {
    /// Creates names that depend on `parts`, which describe the model and the layout of the pieces in memory.
    #[must_use]
    pub fn new(digest: Digest, parts: &[&[u8]]) -> Self {
        // The lengths distinguish lists of parts whose concatenations are equal.
        let lengths: Vec<u8> = parts.iter().flat_map(|part| (part.len() as u64).to_le_bytes()).collect();
        let mut all: Vec<&[u8]> = vec![b"kvpool pieces 1", &lengths];
        all.extend(parts);
        Self { digest, context: digest(&all) }
    }

    /// Returns the name of part `part` of the piece of a page.
    #[must_use]
    pub fn piece(&self, page: &PageHash, part: u32) -> PageHash {
        (self.digest)(&[&self.context, page, &part.to_le_bytes()])
    }
}

/// The keys of the pages that can be found.
#[derive(Debug)]
pub(super) struct PageKeys {
    digest: Digest,
    by_page: KeyMap<Page, PageHash>,
}

impl PageKeys {
    pub(super) fn new(digest: Digest) -> Self {
        Self { digest, by_page: KeyMap::default() }
    }

    pub(super) const fn digest(&self) -> Digest {
        self.digest
    }

    pub(super) fn get(&self, page: Page) -> Option<PageHash> {
        self.by_page.get(&page).copied()
    }

    /// Computes the keys of `pages` with `tokens`, which follow the page with the key `parent`.
    pub(super) fn add(
        &mut self,
        namespace: &Namespace,
        parent: Option<PageHash>,
        tokens: &[i32],
        pages: &[Page],
    ) -> Vec<PageHash> {
        let page_size = tokens.len() / pages.len();
        let mut chain = match parent {
            Some(parent) => KeyChain::after(self.digest, parent),
            None => KeyChain::at_root(self.digest, namespace, page_size),
        };
        let keys: Vec<_> = tokens.chunks(page_size).map(|tokens| chain.next(tokens)).collect();
        self.by_page.extend(pages.iter().copied().zip(keys.iter().copied()));
        keys
    }

    /// Removes pages that can no longer be found, and appends their keys to `removed`. Pages without a key are
    /// left out.
    pub(super) fn remove(&mut self, pages: &[Page], removed: &mut Vec<PageHash>) {
        removed.extend(pages.iter().filter_map(|page| self.by_page.remove(page)));
    }

    /// Removes pages that can no longer be found.
    pub(super) fn forget(&mut self, pages: &[Page]) {
        for page in pages {
            self.by_page.remove(page);
        }
    }

    pub(super) fn clear(&mut self) {
        self.by_page.clear();
    }

    /// Returns an upper bound of the bytes that are needed for `pages` more pages.
    pub(super) fn bytes_for(&self, pages: usize) -> usize {
        let (len, capacity) = (self.by_page.len() + pages, self.by_page.capacity());
        // A table that is full moves to one of a power of two of entries, at most seven eighths of them used.
        let entries =
            if len <= capacity { 0 } else { (len.max(capacity + 1) * 8 / 7 + 16).next_power_of_two() };
        entries * (size_of::<(Page, PageHash)>() + 1)
    }

    pub(super) fn bytes(&self) -> usize {
        self.by_page.capacity() * (size_of::<(Page, PageHash)>() + 1)
    }
}
